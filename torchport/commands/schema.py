"""`torchport schema`: the JSON Schemas of cards, jobs and patch files, with the meaning of every field."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping
from typing import Any, Literal

import click

from torchport import patch
from torchport.commands import terminal
from torchport.config import Frozen, card, step_cache, strategy
from torchport.patch import declared

DIALECT = "https://json-schema.org/draft/2020-12/schema"
Kind = Literal["card", "job", "patch"]


@terminal.command("schema")
@click.argument("kind", type=click.Choice(["card", "job", "patch"]))
def command(kind: Kind) -> None:
    """Prints the JSON Schema of model cards, configs or patch files, so that editors complete and check them."""
    terminal.say_json(schema(kind))


def schema(kind: Kind) -> dict[str, Any]:
    """Returns the JSON Schema of a kind of YAML file, for editors; torchport's checks are stricter."""
    if kind == "patch":
        return _described(patch.schema(), vars(declared))
    model: type[Frozen] = card.Card if kind == "card" else card.Job
    raw = model.model_json_schema(by_alias=True)
    definitions = {**raw.pop("$defs", {}), model.__name__: raw}
    top: dict[str, Any] = {"$schema": DIALECT, "title": f"torchport {kind}", "$ref": f"#/$defs/{model.__name__}"}
    if kind == "card":  # a card that extends another needs only these two fields
        top["anyOf"] = [{"$ref": top.pop("$ref")}, {"type": "object", "required": ["model", "extends"]}]
    return _described({**top, "$defs": definitions}, {**vars(step_cache), **vars(strategy), **vars(card)})


def _described(schema: dict[str, Any], models: Mapping[str, Any]) -> dict[str, Any]:
    """Adds descriptions to the definitions and fields of a schema, from the docstrings of `models`; returns it."""
    for name, definition in schema["$defs"].items():
        model = models[name]
        definition["description"] = summary(model)
        aliases = {field: info.alias or field for field, info in model.model_fields.items()}
        _describe(definition, {aliases[field]: text for field, text in meanings(model).items()})
    return schema


def _describe(part: dict[str, Any], texts: dict[str, str]) -> None:
    """Adds descriptions to the properties of an object schema, also within its `anyOf`."""
    for key, field in part.get("properties", {}).items():
        field.pop("title", None)  # pydantic's: the field's name, capitalised
        field["description"] = texts[key]
    for alternative in part.get("anyOf", ()):
        _describe(alternative, texts)


def summary(model: type) -> str:
    """Returns a class's docstring without its section `Attributes:`, each paragraph on one line."""
    text = (inspect.getdoc(model) or "").partition("\nAttributes:\n")[0].strip()
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def meanings(model: type) -> dict[str, str]:
    """Returns the meaning of each field of a class: from `Attributes:` in its docstring, or from the text below it."""
    texts: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if kind.__module__.startswith("torchport.") and kind is not Frozen:
            section = inspect.cleandoc(kind.__doc__ or "").partition("\nAttributes:\n")[2]
            fields = re.split(r"^    (?=\w+: )", section, flags=re.MULTILINE)[1:]  # `    name: text`
            texts |= dict(" ".join(field.split()).split(": ", 1) for field in fields)
            texts |= _below_fields(kind)
    return texts


def _below_fields(kind: type) -> dict[str, str]:
    """Returns the docstring below each field of a class, by field: from the source, as Python does not keep them."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    texts: dict[str, str] = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            texts[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return texts
