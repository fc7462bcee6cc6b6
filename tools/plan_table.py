"""Writes the schema of a plan's JSON as a table in Markdown, made from the figures.

`python tools/plan_table.py docs/plan.md` writes it into the page again, between the comments that mark its place.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from torchport.plan.figures import Figure, JobPlan

BEGIN, END = "<!-- Made from torchport/plan/figures.py: begin -->\n", "<!-- end -->\n"
HEAD = "| field | type | means |\n|---|---|---|\n"
NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
"""What JSON calls a Python type."""


def table() -> str:
    """Returns each field of a plan: its path, from a stage on where it is a stage's, its type in JSON, its meaning."""
    rows = [(path.removeprefix("stages.<name>"), kind, meaning) for path, kind, meaning in _rows(JobPlan, "", set())]
    return HEAD + "".join(f"| `{path}` | {kind} | {meaning} |\n" for path, kind, meaning in rows)


def with_table(page: str) -> str:
    """Returns a page with the table in its place."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


def _rows(model: type[Figure], prefix: str, known: set[tuple[type, str]]) -> Iterator[tuple[str, str, str]]:
    """Yields a model's fields, and below each the fields that its values have; those that are `known` once."""
    for name, field in model.model_fields.items():
        owner = next(base for base in reversed(model.__mro__) if name in inspect.get_annotations(base))
        if (owner, name) in known or field.description is None:
            continue
        known.add((owner, name))
        kinds, models = _types(field.annotation)
        path = prefix + name
        yield path, " or ".join(dict.fromkeys(kinds)), field.description
        each = "[]" if kinds[0].startswith("list") else ".<name>" if kinds[0].startswith("object of") else ""
        for part in models:
            yield from _rows(part, f"{path}{each}.", known)


def _types(annotation: Any) -> tuple[list[str], list[type[Figure]]]:
    """Returns what a type is called in JSON, and the models that its values are made of."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ["string"], []
    if origin is Annotated:
        return _types(arguments[0])
    if origin in (Union, types.UnionType):
        parts = [_types(part) for part in arguments]
        return [kind for kinds, _ in parts for kind in kinds], [model for _, models in parts for model in models]
    if origin in (list, dict):
        kinds, models = _types(arguments[-1])
        plural = kinds[0].replace("list of", "lists of") if "list" in kinds[0] else f"{kinds[0]}s"
        return [f"{'list' if origin is list else 'object'} of {plural}"], models
    if issubclass(annotation, Figure):
        return ["object"], [annotation]
    return [NAMES[annotation]], []


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(with_table(file.read_text(encoding="utf-8")), encoding="utf-8")
