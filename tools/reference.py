"""Prints the reference part of the pages on cards, jobs, families, patches, scans and the engine, from the code.

python tools/reference.py            # prints all of it
python tools/reference.py --write    # writes it into docs/, between the markers of each page
"""

from __future__ import annotations

import argparse
import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from operator_table import in_short

from torchport.commands.explain import scan_section
from torchport.commands.schema import meanings, schema, summary
from torchport.engine import conformance
from torchport.porting.scan import RULES
from torchport.stages import NAMES, WITH_VARIANTS, family

ROOT = Path(__file__).resolve().parent.parent
START, END = "<!-- reference: python tools/reference.py --write -->\n", "<!-- end of the reference -->\n"
SPEC = schema("card")["$defs"]["Rule"]["properties"]["spec"]["anyOf"]
FOR_RUN = ("check_inputs",)
"""Functions of the families' module that a run calls, and no family."""


def of_schema(kind: Any) -> str:
    """Returns the tables of a schema: one for the whole file, then one for each part that a field refers to."""
    definitions = schema(kind)["$defs"]
    [top] = {"Card", "Job", "Entry"} & set(definitions)
    names = [top, *dict.fromkeys(name for name in _references(definitions, top) if name != top)]
    return "\n".join(_section(name, definitions[name]) for name in names)


def _references(definitions: dict[str, Any], name: str) -> Iterator[str]:
    """Yields the parts that a part refers to, and what those refer to, in the order of the fields."""
    for part in _nodes(definitions[name]):
        if "$ref" in part:
            inner = part["$ref"].rpartition("/")[2]
            yield inner
            yield from _references(definitions, inner)


def _nodes(part: Any) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        yield part
        for value in part.values():
            yield from _nodes(value)
    elif isinstance(part, list):
        for value in part:
            yield from _nodes(value)


def _section(name: str, definition: dict[str, Any]) -> str:
    objects = [part for part in (definition, *definition.get("anyOf", ())) if "properties" in part]
    rows = [
        (f"`{key}`", words(field), _default(key, field, part), field["description"])
        for part in objects
        for key, field in part["properties"].items()
    ]
    return f"## {name}\n\n{definition['description']}\n\n{_table(('field', 'type', 'default', 'meaning'), rows)}"


def _default(key: str, field: dict[str, Any], part: dict[str, Any]) -> str:
    if key in part.get("required", ()):
        return "required"
    default = field.get("default")
    if default is None or default in ([], {}):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def words(field: dict[str, Any]) -> str:
    """Returns the type of a field as somebody who writes YAML calls it."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in field:
        nullable = "default" in field and field["default"] is None  # null means that the field is left out
        if field["anyOf"][: len(SPEC)] == SPEC:
            return "[spec](sharding.md)" if field["anyOf"] == SPEC else "[spec](sharding.md) or `null`"
        return _or([words(part) for part in field["anyOf"] if not (nullable and part == {"type": "null"})])
    if "oneOf" in field:
        return _or([words(part) for part in field["oneOf"]])
    if "const" in field or "enum" in field:
        return _or([f"`{value}`" for value in field.get("enum", [field.get("const")])])
    return _plain(field)


def _or(parts: list[str]) -> str:
    return " or ".join([", ".join(parts[:-1])] * (len(parts) > 1) + parts[-1:])


def _plain(field: dict[str, Any]) -> str:
    """Returns the type of a field that is no choice."""
    kind = field.get("type")
    if kind == "array":
        return f"list of: {words(field['items'])}"
    if kind == "object":
        values = field.get("additionalProperties")
        keys = field.get("propertyNames", {}).get("enum")
        left = _or([f"`{key}`" for key in keys]) if keys else "names"
        return f"mapping of {left} to: {words(values)}" if isinstance(values, dict) else "mapping"
    if field.get("format") == "regex":
        return "regular expression"
    names = {
        "string": "text",
        "integer": "whole number",
        "number": "number",
        "boolean": "true or false",
        "null": "`null`",
    }
    return names.get(str(kind), "any value") + _limits(field)


def _limits(field: dict[str, Any]) -> str:
    least, most = field.get("minimum"), field.get("maximum")
    if field.get("exclusiveMinimum") == 0:
        least = 1 if field["type"] == "integer" else "more than 0"
    if least is None or field["type"] == "string":
        return ""
    if isinstance(least, str):
        return f", {least}" if most is None else f", {least}, at most {most:g}"
    if most is None:
        return f", at least {least}"
    return f", {least:g} to {most:g}" if most < 10_000 else f", {least} to {most:,}"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"


def of_families() -> str:
    """Returns the reference of families: what the module has, the data of its stages, and functions that help."""
    names = [(f"`{name}`", text) for name, text in {**NAMES, **WITH_VARIANTS}.items()]
    parts = [f"## Names of the module\n\n{_table(('name', 'what it is'), names)}"]
    parts += [_dataclass(kind) for kind in (family.Stage, family.Settings, family.Steps)]
    parts.append(f"## Call\n\n```python\n{inspect.getsource(family.Call).strip()}\n```\n")
    helpers = "\n\n\n".join(_helpers())
    parts.append(
        "## Functions that help\n\nThey are in `torchport.stages.family`. No family has to use them.\n\n"
        f"```python\n{helpers}\n```\n"
    )
    return "\n".join(parts)


def _dataclass(kind: type) -> str:
    texts = meanings(kind)
    [definition] = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    rows = []
    for field in definition.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            default = "required" if field.value is None else f"`{ast.unparse(field.value)}`"
            default = "" if isinstance(field.value, ast.Lambda) else default
            rows.append((f"`{field.target.id}`", f"`{ast.unparse(field.annotation)}`", default, texts[field.target.id]))
    return f"## {kind.__name__}\n\n{summary(kind)}\n\n{_table(('field', 'type', 'default', 'meaning'), rows)}"


def _helpers() -> list[str]:
    """Returns the signature and docstring of each function and module that a family may use."""
    text = Path(inspect.getfile(family)).read_text(encoding="utf-8")
    lines, texts = text.splitlines(), []
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.name not in FOR_RUN:
            texts.append("\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]))
        elif isinstance(node, ast.ClassDef) and any("Module" in ast.unparse(above) for above in node.bases):
            start = next(part for part in node.body if isinstance(part, ast.FunctionDef))
            texts.append("\n".join(lines[node.lineno - 1 : start.body[0].lineno - 1]).rstrip() + " ...")
    return texts


def of_rules() -> str:
    """Returns what a scan looks for: a table of all ids, and a section of each."""
    rows = [(f"[{id}](#{id.lower()}-{rule.kind})", rule.kind, rule.title, rule.effort) for id, rule in RULES.items()]
    sections = "\n\n".join(f"### {scan_section(id)}" for id in RULES)
    return f"{_table(('id', 'kind', 'what is found', 'effort'), rows)}\n{sections}\n"


PAGES: dict[str, Callable[[], str]] = {
    "cards.md": lambda: of_schema("card"),
    "jobs.md": lambda: of_schema("job"),
    "families.md": of_families,
    "patches.md": lambda: of_schema("patch").replace("\n## ", "\n### ").replace("## Entry", "### Entry", 1),
    "scan.md": of_rules,
    "engine.md": lambda: in_short(yaml.safe_load(conformance.FILE.read_text(encoding="utf-8"))),
}


def page(name: str) -> str:
    """Returns a page of docs/ with the reference in its place."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    before, after = text.split(START)[0], text.split(END)[1]
    return before + START + "\n" + PAGES[name]() + "\n" + END + after


def main() -> None:
    """Prints the reference, or writes it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write it into the pages of docs/")
    write = parser.parse_args().write
    for name, reference in PAGES.items():
        if write:
            (ROOT / "docs" / name).write_text(page(name), encoding="utf-8")
        else:
            print(f"docs/{name}\n\n{reference()}")


if __name__ == "__main__":
    main()
