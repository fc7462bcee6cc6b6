"""The arguments of a class, from its source: those of its `__init__`, of a base's, or the fields of a dataclass."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from torchport.porting.draft.target import is_literal
from torchport.source.modules import SourceFile
from torchport.source.names import Classes, Home, definition
from torchport.source.parameters import STARRED, Function, parameters

DEEPEST = 8
"""Bases that are followed, one above the other."""
_PLAIN = {"int", "float", "bool", "str", "list", "tuple", "dict", "List", "Tuple", "Dict", "Optional", "Union"}
_PLAIN |= {"Literal", "Sequence", "Any", "None", "typing"}


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of a constructor."""

    name: str  #: Its name.
    default: Any  #: Its default, if that is a literal.
    required: bool  #: Whether it has none.
    annotation: str  #: As written; empty without one.
    plain: bool  #: Whether YAML can say it, as far as its annotation tells.


def arguments(source: SourceFile, node: ast.ClassDef) -> list[Argument] | None:
    """Returns the arguments of a class. None where its source, and that of its bases, does not show them."""
    for _, one in _lineage(source, node):
        init = next((each for each in one.body if isinstance(each, Function) and each.name == "__init__"), None)
        if init is not None:
            return list(_of_function(init))
        fields = [each for each in one.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]
        is_strict = any(word in ast.unparse(each) for each in one.decorator_list for word in ("dataclass", "strict"))
        if fields and is_strict:
            return [_argument(str(ast.unparse(each.target)), each.annotation, each.value) for each in fields]
    return None


def configuration(source: SourceFile, node: ast.ClassDef) -> list[Argument] | None:
    """Returns what a card's configuration of a class holds.

    These are its arguments; of a class of transformers those of its one argument, the object that its `config.json` is.
    """
    given = arguments(source, node)
    required = [one for one in given or () if one.required]
    if source.module.partition(".")[0] != "transformers" or len(required) != 1:
        return given
    annotated = _classes(Classes(None).names(source.module, tuple(required[0].annotation.split("."))))
    return next((arguments(*place) for place in annotated), given)


def _of_function(init: Function) -> Iterator[Argument]:
    for one in parameters(init)[1:]:
        if one.kind not in STARRED:
            yield _argument(one.name, one.argument.annotation, one.default)


def _argument(name: str, annotation: ast.expr | None, default: ast.expr | None) -> Argument:
    value = ast.literal_eval(default) if default is not None and is_literal(default) else None
    words = {one.id for one in ast.walk(annotation) if isinstance(one, ast.Name)} if annotation is not None else set()
    written = ast.unparse(annotation) if annotation is not None else ""
    return Argument(name, value, default is None, written, words <= _PLAIN)


Place = tuple[SourceFile, ast.ClassDef]
"""A class, with its module."""


def _lineage(source: SourceFile, node: ast.ClassDef) -> Iterator[Place]:
    """Yields a class and those above it, as far as source shows them."""
    pending: list[Place] = [(source, node)]
    for _ in range(DEEPEST):
        if not pending:
            return
        home, one = pending.pop(0)
        yield home, one
        pending += _classes(Classes(None).bases(home.module, one))


def _classes(homes: Iterable[Home]) -> Iterator[Place]:
    for place in map(definition, homes):
        if place is not None and isinstance(place[1], ast.ClassDef):
            yield place[0], place[1]


def derives_from_nothing(source: SourceFile, node: ast.ClassDef) -> bool:
    """Returns whether every class above a class is known from source, and none of them is of torch."""
    return all(
        home.module.partition(".")[0] != "torch"
        and len(list(_classes(Classes(None).bases(home.module, one)))) >= len(one.bases) - _derives_from_object(one)
        for home, one in _lineage(source, node)
    )


def _derives_from_object(node: ast.ClassDef) -> bool:
    return "object" in map(ast.unparse, node.bases)


def forward(source: SourceFile, node: ast.ClassDef) -> list[Argument]:
    """Returns the arguments of a class's `forward`; none where its source does not show it."""
    for _, one in _lineage(source, node):
        found = next((each for each in one.body if isinstance(each, Function) and each.name == "forward"), None)
        if found is not None:
            return list(_of_function(found))
    return []
