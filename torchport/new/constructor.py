"""The arguments of a class, from its source: those of its `__init__`, of a base's, or the fields of a dataclass."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from typing import Any

from torchport.new.target import Function, is_literal
from torchport.patch.source.capture import imported_from
from torchport.patch.source.source import SourceFile, read_source

DEEPEST = 8
"""Bases that are followed, one above the other."""
_PLAIN = {"int", "float", "bool", "str", "list", "tuple", "dict", "List", "Tuple", "Dict", "Optional", "Union"}
_PLAIN |= {"Literal", "Sequence", "Any", "None", "typing"}


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of a constructor.

    Attributes:
        name: Its name.
        default: Its default, if that is a literal.
        required: Whether it has none.
        annotation: As written; empty without one.
        plain: Whether YAML can say it, as far as its annotation tells.
    """

    name: str
    default: Any
    required: bool
    annotation: str
    plain: bool


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
    found = definition(source, required[0].annotation)
    return given if found is None or not isinstance(found[1], ast.ClassDef) else arguments(found[0], found[1])


def _of_function(init: Function) -> Iterator[Argument]:
    spec = init.args
    positional = [*spec.posonlyargs, *spec.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(spec.defaults))
    pairs = list(zip(positional, [*defaults, *spec.defaults], strict=True))[1:]
    for one, default in (*pairs, *zip(spec.kwonlyargs, spec.kw_defaults, strict=True)):
        yield _argument(one.arg, one.annotation, default)


def _argument(name: str, annotation: ast.expr | None, default: ast.expr | None) -> Argument:
    value = ast.literal_eval(default) if default is not None and is_literal(default) else None
    words = {one.id for one in ast.walk(annotation) if isinstance(one, ast.Name)} if annotation is not None else set()
    written = ast.unparse(annotation) if annotation is not None else ""
    return Argument(name, value, default is None, written, words <= _PLAIN)


def _lineage(source: SourceFile, node: ast.ClassDef) -> Iterator[tuple[SourceFile, ast.ClassDef]]:
    """Yields a class and those above it, as far as source shows them."""
    pending: list[tuple[SourceFile, ast.ClassDef]] = [(source, node)]
    for _ in range(DEEPEST):
        if not pending:
            return
        home, one = pending.pop(0)
        yield home, one
        bases = (found for base in one.bases if (found := definition(home, ast.unparse(base))) is not None)
        pending += [(where, base) for where, base in bases if isinstance(base, ast.ClassDef)]


def derives_from_nothing(source: SourceFile, node: ast.ClassDef) -> bool:
    """Returns whether every class above a class is known from source, so that none of them is of another package."""
    return all(
        (found := definition(home, ast.unparse(base))) is not None and isinstance(found[1], ast.ClassDef)
        for home, one in _lineage(source, node)
        for base in one.bases
        if ast.unparse(base) != "object"
    )


def definition(source: SourceFile, name: str) -> tuple[SourceFile, ast.stmt] | None:
    """Returns where a plain name of a module is defined, in it or where it is imported from; None if unknown."""
    for _ in range(DEEPEST):
        node = source.where((name,)).node if name.isidentifier() else None
        if not isinstance(node, ast.ImportFrom):
            return None if node is None else (source, node)
        alias = next((one for one in node.names if name == (one.asname or one.name)), None)
        try:
            home = read_source(imported_from(node, source.module, source)) if alias is not None else None
        except ModuleNotFoundError:
            return None
        if home is None or alias is None:
            return None
        source, name = home, alias.name
    return None


def forward(source: SourceFile, node: ast.ClassDef) -> list[Argument]:
    """Returns the arguments of a class's `forward`; none where its source does not show it."""
    for _, one in _lineage(source, node):
        found = next((each for each in one.body if isinstance(each, Function) and each.name == "forward"), None)
        if found is not None:
            return list(_of_function(found))
    return []
