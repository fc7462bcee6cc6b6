"""`torchport check`: every patch tried against the upstreams that are installed, in fresh processes.

It needs no accelerator and no weights, goes on after a finding, and gathers all of them.

The patches of one upstream share a process in which its modules are imported under them. Two upstreams cannot: what
the first imports, the second would find imported before its patches. Patches that come late to modules can, so all of
them share one more process, which imports everything once.

Over 400 lines: what is tried, the processes that try it, and the formats of a finding are one command; nothing else
uses a part of it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchport import patch, progress
from torchport.config.card import Card
from torchport.config.pack import Pack
from torchport.errors import (
    DriftError,
    PatchError,
    TargetError,
    TorchportError,
    UnknownNameError,
    UnsupportedError,
    nearest,
    printable,
)
from torchport.patch.declared import replacement, versions
from torchport.patch.source import checks, drift
from torchport.patch.source.source import shown
from torchport.processes import child

# Exit codes: the lowest of 3, 4 and 5 that occurs; 1 for findings of any other sort.
_CODES = {"TP207": 3, "TP203": 4, "TP204": 4, "TP206": 5}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        id: The diagnostic id, as TP207.
        place: `file:line`.
        text: What is wrong and what to do, without the place.
        patch: The entry's id, or empty for a whole file.
        step: schema, targets, drift, apply, undo or called.
    """

    id: str
    place: str
    text: str
    patch: str
    step: str


def check(
    folders: patch.Folders,
    names: Sequence[str] = (),
    upstream_path: Path | None = None,
    called: Callable[[], Iterable[Finding]] | None = None,
) -> list[Finding]:
    """Returns all findings over the patches of the upstreams or files that are named; of all if none is.

    Args:
        folders: The folders of patches, from the top.
        names: `upstream` or `upstream/file`.
        upstream_path: Where the upstream stands, if it is not installed.
        called: Runs a model's tiny weights and returns `not_called` of its manifests.
    """
    known = patch.upstreams(folders)
    for name in names:
        if name.partition("/")[0] not in known:
            raise UnknownNameError(f"torchport check {name}", "There are no such patches", nearest(name, known))
    groups = _by_upstream(names or known)
    findings: list[Finding] = []
    alive = []  # an upstream that ends the process under its patches would end that of all the others
    for group in progress.track(groups, "check", "upstream"):
        found, ended = _in_fresh_process(folders, [group], "armed", upstream_path)
        findings += found
        alive += [] if ended else [group]
    with progress.waiting("check patches after their modules"):
        findings += _late(folders, alive, upstream_path)
    return [*dict.fromkeys(findings), *(called() if called else ())]


def _by_upstream(names: Iterable[str]) -> list[list[str]]:
    """Returns the names in groups, one for each upstream."""
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        groups.setdefault(name.partition("/")[0], []).append(name)
    return list(groups.values())


def _late(folders: patch.Folders, groups: list[list[str]], upstream_path: Path | None) -> list[Finding]:
    """Returns the findings of patches whose modules were imported before them; all groups share one process.

    Where that ends without an answer, each group has a process of its own, which says whose modules end it.
    """
    if not groups:
        return []
    found, ended = _in_fresh_process(folders, groups, "late", upstream_path)
    if not ended or len(groups) == 1:
        return found
    return [one for group in groups for one in _late(folders, [group], upstream_path)]


def require_applied(folders: patch.Folders, names: Sequence[str], upstream_path: Path | None = None) -> None:
    """Refuses upstreams on which some patch cannot be applied; a drift of their sources is no reason.

    Args:
        folders: The folders of patches, from the top.
        names: The upstreams.
        upstream_path: Where the upstream stands, if it is not installed.

    Raises:
        UnsupportedError: The first patch that cannot be applied, and why.
    """
    for finding in check(folders, names, upstream_path):
        if finding.step != "drift":
            fact = f"Nothing is locked, as {finding.id} is found: {finding.text.rstrip('.')}"
            remedy = f"See all findings with: torchport check {' '.join(names)}"
            raise UnsupportedError(finding.place, fact, remedy, patch=finding.patch)


def exit_code(findings: Iterable[Finding]) -> int:
    """Returns 0 if there are none, else the lowest of 3 drift, 4 late or aliased, 5 not called; 1 for any other."""
    codes = {_CODES.get(finding.id, 1) for finding in findings}
    return min(codes - {1}, default=1) if codes else 0


def not_called(rows: Iterable[Mapping[str, Any]], entries: Iterable[patch.Entry], stage: str) -> list[Finding]:
    """Returns a finding for each patch that must be called in a stage and, by a manifest's rows, was not."""
    calls = {row["id"]: row for row in rows}
    result = []
    for entry in entries:
        row = calls.get(entry.id)
        skipped = row is not None and row["state"] == "not needed"
        if stage in entry.must_be_called and not skipped and not (row and row["calls"]):
            state = row["state"] if row else "not in the ledger"
            text = f"'{entry.id}' was not called in {stage} (it is {state}). Find what is called instead"
            result.append(Finding("TP206", entry.place, f"{text} of {entry.target}.", entry.id, "called"))
    return result


SMALL = ("height=64", "width=64", "frames=5", "steps=1")
"""The demo at a size of seconds: every stage runs, and every patch has its chance to be called."""


def demo_called(pack: Pack, model: str, upstream_path: Path | None) -> list[Finding]:
    """Runs a card's tiny weights down the path in a fresh process; returns the patches that were not called.

    Args:
        pack: Where the card lies.
        model: The card's name.
        upstream_path: Where the upstream stands, if it is not installed.
    """
    from torchport.task import Request

    card, _ = pack.card(model)
    place = None if upstream_path is None else str(upstream_path)
    paths = tuple(str(layer.root) for layer in pack.layers() if layer.chosen)
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        options: dict[str, Any] = {"prompt": "check", "overrides": SMALL, "cache": False}
        request = Request(model, pack.demo(card), out=out, paths=paths, upstream_path=place, **options)
        try:
            with progress.waiting(f"run {model}'s demo"):
                child.call("torchport.run:run", request, ended=lambda end: _demo_ended(card, end))
        except TorchportError as error:
            return [_finding(error, "called")]
        findings = []
        for stage, names in card.patches.items():
            rows = json.loads((out / f"{stage}.json").read_text(encoding="utf-8"))["patches"]
            findings += not_called(rows, patch.read(pack.folders, names, pack.home(model).patches), stage)
        return findings


def _demo_ended(card: Card, end: child.Ended) -> PatchError:
    remedy = f'Run it: torchport run --model {card.model} --config {card.demo} --prompt "..."'
    return PatchError(f"--model {card.model}", f"The process of its demo {end}", remedy)


def _ended(name: str, end: child.Ended) -> PatchError:
    return PatchError(name, f"The process that checks '{name}' {end}", "Mend what ends it while it is imported")


def _in_fresh_process(
    folders: patch.Folders, groups: list[list[str]], mode: str, upstream_path: Path | None
) -> tuple[list[Finding], bool]:
    """Returns the findings of some groups of names in one process, and whether it ended without an answer."""
    ends: list[child.Ended] = []

    def refusal(end: child.Ended) -> PatchError:
        ends.append(end)
        return _ended(", ".join(name for group in groups for name in group), end)

    try:
        found: list[Finding] = child.call(
            "torchport.commands.check:walked",
            *(folders, groups, mode),
            ended=refusal,
            environment={"PYTHONWARNINGS": "ignore"},
            first=[] if upstream_path is None else [upstream_path],
        )
    except TorchportError as error:
        return [_finding(error, "apply")], bool(ends)
    return found, False


def _finding(error: TorchportError, step: str, key: str = "") -> Finding:
    kind = "TP200" if type(error) is PatchError else error.id  # of no kind that has an id of its own
    return Finding(kind, error.place, f"{error.fact}. {error.remedy}.", key, step)


def walked(folders: patch.Folders, groups: Sequence[Sequence[str]], mode: str) -> list[Finding]:
    """Returns the findings of groups of upstreams or files, one group after the other in this process, a fresh one.

    Args:
        folders: The folders of patches, from the top.
        groups: Names of one upstream each: `upstream` or `upstream/file`.
        mode: "armed" imports the targets under the patches, "late" before them.
    """
    return [finding for names in groups for finding in _walked(folders, names, mode)]


def _walked(folders: patch.Folders, names: Sequence[str], mode: str) -> list[Finding]:
    findings: list[Finding] = []
    entries = _read(folders, names, findings)
    good = [entry for entry in entries if _is_sound(entry, findings)]
    while good:
        try:
            with patch.applied(_import_aids(folders, good)):
                _tried(good, mode, findings)
            break
        except PatchError as error:
            culprit = str(vars(error).get("patch", ""))
            findings.append(_finding(error, "apply", culprit))
            rest = [entry for entry in good if entry.id != culprit]
            if len(rest) == len(good):
                break
            good = rest
    return findings


def _read(folders: patch.Folders, names: Sequence[str], findings: list[Finding]) -> list[patch.Entry]:
    """Returns the entries of what can be read, each file once; the rest becomes findings."""
    readable = []
    for name in names:
        try:
            patch.read(folders, [name])
            readable.append(name)
        except TorchportError as error:
            findings += [_finding(one, "schema") for one in (error, *error.others)]
    try:
        return patch.read(folders, readable)
    except TorchportError as error:  # two files that contradict each other
        findings.append(_finding(error, "schema"))
        return []


def _import_aids(folders: patch.Folders, entries: Sequence[patch.Entry]) -> list[patch.Entry]:
    """Returns the shipped entries without which the targets' packages would not import at all."""
    packages = {entry.module.partition(".")[0] for entry in entries}
    chosen = {entry.id for entry in entries}
    every = patch.read(folders, patch.upstreams(folders))
    return [e for e in every if e.lifetime.while_importing in packages and e.id not in chosen]


def _is_sound(entry: patch.Entry, findings: list[Finding]) -> bool:
    """Checks what needs no import of upstream; returns whether the entry can be tried."""
    try:
        if versions.outcome(entry) is not None:
            return False
        loaded = replacement.load(entry, entry.reference) if entry.reference else None
        if not entry.has_source:
            return True
        found = _drifted(entry, findings)
        checks.check_source(entry, loaded)
        if found == "unlocked":
            text = f"'{entry.id}' has no row in the lock. Review it, then run: torchport patches lock {entry.upstream}."
            findings.append(Finding("TP207", entry.place, text, entry.id, "drift"))
    except TorchportError as error:
        findings.append(_finding(error, "targets", entry.id))
        return False
    return True


def _drifted(entry: patch.Entry, findings: list[Finding]) -> str | None:
    """Returns what the lock says of a target; a drift is noted, and what it led to is looked for all the same."""
    try:
        return drift.check(entry)
    except DriftError as error:
        findings.append(_finding(error, "drift", entry.id))
        return None


def _tried(entries: Sequence[patch.Entry], mode: str, findings: list[Finding]) -> None:
    """Applies, applies twice, undoes, and compares the namespaces."""
    modules = sorted({entry.module for entry in entries if entry.edits})
    if mode == "late":
        served = {importer for entry in entries if entry.stub for importer in entry.stub.importers}
        _import_all([module for module in modules if module not in served])  # those cannot come before their stub
    before = _identities(modules)
    with patch.applied(entries, accept_drift=True) as ledger:
        _import_all(modules)
        findings += _unapplied(ledger.rows(), entries)
        inside = _identities(modules)
        with patch.applied(entries, accept_drift=True):
            pass
        if _identities(modules) != inside:
            findings.append(Finding("TP200", "patch.applied", "A second application changed something.", "", "apply"))
    after = _identities(modules)
    for key in sorted(before.keys() & after.keys()):
        if not _is_left_alone(before[key], after[key]):
            text = "The namespace is not what it was before the patches were applied and undone."
            findings.append(Finding("TP200", key, text, "", "undo"))


def _is_left_alone(before: list[tuple[str, int]], after: list[tuple[str, int]]) -> bool:
    """Returns whether all names are what and where they were; a submodule that was imported meanwhile may be new."""
    known = {name for name, _ in before}
    modules = {id(module) for module in list(sys.modules.values())}
    return [pair for pair in after if pair[0] in known or pair[1] not in modules] == before


def _unapplied(rows: Sequence[Mapping[str, Any]], entries: Sequence[patch.Entry]) -> list[Finding]:
    waiting = {entry.id for entry in entries if not entry.edits or entry.lifetime.while_importing}
    result = []
    for row in rows:
        if row["state"] not in ("applied", "used", "not needed") and row["id"] not in waiting:
            text = f"'{row['id']}' is {row['state']} after its module was imported. Find who changed it."
            result.append(Finding("TP200", row["place"], text, row["id"], "apply"))
    return result


def _import_all(modules: Sequence[str]) -> None:
    for module in modules:
        with replacement.Explained(functools.partial(_not_importable, module)):
            importlib.import_module(module)


def _not_importable(module: str, error: BaseException) -> TargetError:
    """Returns the refusal of an upstream that fails while it is imported, at the line that fails."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    place = f"{shown(frames[-1].filename)}:{frames[-1].lineno}"
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{shown(error.filename)}:{error.lineno}"
    what = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    fact = f"Importing {module} fails: {type(error).__name__}: {what}".rstrip(". ")
    return TargetError(place, fact, "Install what it needs, or patch what fails")


def _identities(modules: Sequence[str]) -> dict[str, list[tuple[str, int]]]:
    """Returns, for each module and each of its classes, the names with the identity of what they are."""
    result: dict[str, list[tuple[str, int]]] = {}
    for name in modules:
        module = sys.modules.get(name)
        if isinstance(module, types.ModuleType):
            names = dict(vars(module))
            result[name] = [(key, id(value)) for key, value in names.items() if key != "__warningregistry__"]
            for value in names.values():
                if isinstance(value, type) and value.__module__ == name:
                    result[f"{name}:{value.__qualname__}"] = [(k, id(v)) for k, v in vars(value).items()]
    return result


def as_json(findings: Sequence[Finding]) -> str:
    """Returns the findings as a JSON list."""
    return json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2)


def as_text(findings: Sequence[Finding]) -> str:
    """Returns one line per finding, and a last line that counts them."""
    lines = [printable(f"{finding.place}: {finding.id} {finding.text}") for finding in findings]
    return "\n".join([*lines, f"{len(findings)} findings" if findings else "clean"])


def as_github(findings: Sequence[Finding]) -> str:
    """Returns workflow commands that put each finding on its line of a pull request."""
    lines = []
    for finding in findings:
        file, _, line = finding.place.rpartition(":")
        at = f" file={_escaped(file, ':,')},line={line}," if line.isdecimal() else " "
        lines.append(f"::error{at}title={_escaped(finding.id, ':,')}::{_escaped(finding.text)}")
    return "\n".join(lines)


def _escaped(text: str, more: str = "") -> str:
    """Returns what a workflow command may hold: `%`, CR, LF and `more` as it reads them, other controls as `repr` does.

    Source: `actions/toolkit`, packages/core/src/command.ts; properties need `:` and `,` as well.
    """
    held = {letter: f"%{ord(letter):02X}" for letter in f"%\r\n{more}"}
    return "".join(held.get(letter) or printable(letter) for letter in text)


def as_sarif(findings: Sequence[Finding]) -> str:
    """Returns the findings as SARIF 2.1.0."""
    results = []
    for finding in findings:
        file, _, line = finding.place.rpartition(":")
        uri, start = (file, int(line)) if line.isdecimal() else (finding.place, 1)
        region = {"artifactLocation": {"uri": uri}, "region": {"startLine": start}}
        results.append(
            {
                "ruleId": finding.id,
                "level": "error",
                "message": {"text": finding.text},
                "locations": [{"physicalLocation": region}],
            }
        )
    rules = [{"id": key} for key in sorted({finding.id for finding in findings})]
    run = {"tool": {"driver": {"name": "torchport", "rules": rules}}, "results": results}
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return json.dumps({"$schema": schema, "version": "2.1.0", "runs": [run]}, indent=2)


FORMATS = {"text": as_text, "json": as_json, "sarif": as_sarif, "github": as_github}
