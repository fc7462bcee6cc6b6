"""The table of operators: made from what compared calls say, written, counted, and compared with another table."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import yaml

from torchport.engine.conformance import Form

RANDOM = "random by nature"
"""What differs from itself when it is called again."""
SOME = "for some inputs: "
KINDS = "differs", "stops", "mended"
"""The lists of rows of an entry. What stops for some inputs says so itself, and is the same for the others."""
SHOWN = 2
"""How many ways to differ a row names."""
WIDTHS = {("int32", "int64"), ("float32", "float64"), ("complex64", "complex128"), ("uint32", "uint64")}


class Evidence(NamedTuple):
    """What one compared call says."""

    form: Form
    what: str
    patch: str
    source: str


def table(evidence: Iterable[Evidence]) -> dict[str, Any]:
    """Returns the table as plain data."""
    groups: dict[str, list[Evidence]] = collections.defaultdict(list)
    for one in evidence:
        groups[one.form.operator].append(one)
    random = {name for name, found in groups.items() if _is_random(found)}
    drawn = {name: [one for one in groups[name] if one.what != RANDOM] for name in sorted(groups.keys() - random)}
    entries = {name: _entry(found) for name, found in drawn.items()}
    return {"versions": versions(), "random": sorted(random), "operators": entries}


def _is_random(found: Sequence[Evidence]) -> bool:
    """Returns whether an operator is random without an option that makes it so, such as a dropout."""
    drawn = [one for one in found if one.what == RANDOM]
    return len(drawn) == len(found) or any(not one.form.options for one in drawn)


def versions() -> dict[str, str]:
    """Returns the versions for which a table is made here."""
    return {name: metadata.version(name).partition("+")[0] for name in ("torch", "torchax", "jax")}


def _entry(found: Sequence[Evidence]) -> dict[str, Any]:
    passed = {one.form for one in found if not one.what}
    narrow = passed | {one.form for one in found if _is_width(one.what)}
    right = passed | {one.form for one in found if one.patch}
    rows: dict[tuple[frozenset[str], str, str], frozenset[str]] = collections.defaultdict(frozenset)
    for one in sorted(found, key=lambda one: (sorted(one.form.options), sorted(one.form.dtypes), one.what)):
        if one.what:
            others = passed if _is_width(one.what) else narrow if one.patch else narrow | right
            options, dtypes, always = smallest(one.form, others)
            rows[options, one.what if always else f"{SOME}{one.what}", one.patch] |= dtypes
    entry: dict[str, Any] = {
        "dtypes": sorted({name for form in passed for name in form.dtypes}),
        "options": sorted({name for form in passed for name in form.options}),
    }
    for kind in KINDS:
        joined: dict[tuple[frozenset[str], frozenset[str], str], list[str]] = collections.defaultdict(list)
        for (options, what, id_), dtypes in rows.items():
            if _kind(what, id_) == kind:
                joined[options, dtypes, id_].append(what)
        if joined:
            entry[kind] = sorted(
                itertools.starmap(_row, joined.items()), key=lambda row: (row["options"], row["dtypes"])
            )
    return entry


def _kind(what: str, id_: str) -> str:
    """Returns the list of an entry to which a row belongs."""
    if id_:
        return "mended"
    return "stops" if what.startswith(SOME) and "raises " in what else "differs"


def _row(key: tuple[frozenset[str], frozenset[str], str], whats: Sequence[str]) -> dict[str, Any]:
    options, dtypes, id_ = key
    what = "; ".join(sorted(whats)[:SHOWN]) + ("; and others" if len(whats) > SHOWN else "")
    return {"options": sorted(options), "dtypes": sorted(dtypes), "what": what} | ({"patch": id_} if id_ else {})


def _is_width(what: str) -> bool:
    """Returns whether only the width of a dtype differs: JAX has no types of 64 bits unless it is asked for them."""
    parts = [re.fullmatch(r"dtype: (\w+) for (\w+)", part.removeprefix(SOME)) for part in what.split("; ")]
    return all(part is not None and part.groups() in WIDTHS for part in parts)


def smallest(form: Form, passed: Iterable[Form]) -> tuple[frozenset[str], frozenset[str], bool]:
    """Returns the fewest options, with dtypes, that a form which differs has and no form that is the same.

    The third value is false if there are none such: some calls of the form are the same.
    """
    passed = set(passed)
    for others in (passed, passed - {form}):
        for count in range(len(form.options) + 1):
            for options in map(frozenset, itertools.combinations(sorted(form.options), count)):
                with_them = [other for other in others if options <= other.options]
                dtypes = form.dtypes - {name for other in with_them for name in other.dtypes}
                if dtypes or (not form.dtypes and not with_them):
                    return options, dtypes, others is passed
    return form.options, form.dtypes, False


def written(data: Mapping[str, Any]) -> str:
    """Returns the table as the text of its file."""
    lines = ["# Made by `python tools/conformance.py --write`: which operators of the engine agree with PyTorch."]
    lines += _flow("versions: ", data["versions"]) + _flow("random: ", data["random"]) + ["operators:"]
    for name, entry in data["operators"].items():
        if set(entry) == {"dtypes", "options"}:
            lines += _flow(f"  {name}: ", entry)
            continue
        lines.append(f"  {name}:")
        lines += [line for key in ("dtypes", "options") for line in _flow(f"    {key}: ", entry[key])]
        for kind in KINDS:
            if kind in entry:
                lines += [f"    {kind}:", *(line for row in entry[kind] for line in _flow("    - ", row))]
    return "\n".join(lines) + "\n"


def _flow(start: str, value: Any) -> list[str]:
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1 << 20).strip()
    words = re.split(r"(?<=,) ", text)
    lines = [start]
    for word in words:
        if len(lines[-1]) + len(word) > 118:
            lines[-1] = lines[-1].rstrip()
            lines.append(" " * 6)
        lines[-1] += f"{word} "
    return [line.rstrip() for line in lines]


def in_short(data: Mapping[str, Any]) -> str:
    """Returns the table in short, as Markdown: its counts by state and dtype, and what differs by more than a width."""
    titles = "dtype", "operators", "same", "mended", "differ in a form", "of these: in 64-bit types alone"
    lines = [_cells(titles), _cells(["---"] * len(titles))]
    for dtype in ("any", "float32", "bfloat16", "float16", "int64", "int32", "bool"):
        counts = collections.Counter(_state(entry, dtype) for entry in data["operators"].values())
        total = sum(count for kind, count in counts.items() if kind)
        lines.append(
            _cells(
                (dtype, total, counts["same"], counts["mended"], counts["differs"] + counts["width"], counts["width"])
            )
        )
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    lines += ["", f"Made with {versions}. {len(data['random'])} more operators are random.", ""]
    return "\n".join([*lines, *_groups(data)]) + "\n"


def _cells(row: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, row))} |"


def _groups(data: Mapping[str, Any]) -> list[str]:
    """Returns the operators that differ by more than a width, in a line for each way to differ."""
    groups: dict[str, dict[str, None]] = collections.defaultdict(dict)
    for name, entry in data["operators"].items():
        for row in entry.get("differs", ()):
            for part in row["what"].split("; "):
                if not _is_width(part):
                    groups[part.removeprefix(SOME).partition(": ")[0]][name.removesuffix(".default")] = None
    titles = "differs by", "operators"
    rows = [_cells((what, ", ".join(f"`{name}`" for name in names))) for what, names in sorted(groups.items())]
    return [_cells(titles), _cells(["---"] * 2), *rows]


def _state(entry: Mapping[str, Any], dtype: str) -> str:
    """Returns the state of an operator in a dtype; empty if it was never sampled there."""
    rows = [row for row in entry.get("differs", ()) if dtype == "any" or dtype in row["dtypes"]]
    if rows:
        return "width" if all(_is_width(row["what"]) for row in rows) else "differs"
    if any(dtype == "any" or dtype in row["dtypes"] for row in entry.get("mended", ())):
        return "mended"
    return "same" if dtype == "any" or dtype in entry["dtypes"] else ""


def drift(old: Mapping[str, Any], new: Mapping[str, Any], chosen: str) -> list[str]:
    """Returns how two tables differ, a line for each operator."""
    lines = [f"{key}: {old[key]} -> {new[key]}" for key in ("versions",) if old[key] != new[key]]
    before = {name: entry for name, entry in old["operators"].items() if re.search(chosen, name)}
    after = {name: entry for name, entry in new["operators"].items() if re.search(chosen, name)}
    changed = [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]
    lines += [f"{name}: {before.get(name)} -> {after.get(name)}" for name in changed]
    return lines


def differing(data: Mapping[str, Any]) -> list[str]:
    """Returns a line for each row of a table that differs."""
    rows = [(name, row) for name, entry in data["operators"].items() for row in entry.get("differs", ())]
    return [f"{n} [{', '.join(r['dtypes'])}] {{{', '.join(r['options'])}}}: {r['what']}" for n, r in rows]
