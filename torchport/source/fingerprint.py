"""Hashes a piece of source without its formatting, comments, docstrings and annotations.

The hashes do not depend on the interpreter: empty fields, which Python versions add and drop, are left out.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import hashlib
from collections.abc import Iterable, Iterator
from inspect import Parameter
from typing import Any

from torchport.source.bindings import DEFINITIONS, Definition, parameters

_SKIPPED = {"ctx", "kind", "type_comment", "annotation", "returns", "type_params", "type_ignores"}
_BLOCKS = {"body", "orelse", "finalbody", "handlers", "cases"}
_MARKS = {
    Parameter.POSITIONAL_ONLY: "/",
    Parameter.POSITIONAL_OR_KEYWORD: "",
    Parameter.VAR_POSITIONAL: "*",
    Parameter.KEYWORD_ONLY: "*,",
    Parameter.VAR_KEYWORD: "**",
}
"""What the hash of a parameter has before its name."""


def tree_hash(node: ast.AST) -> str:
    """Returns the hash of a definition, 16 hexadecimal digits."""
    return hashlib.sha256("".join(_plain_text(node)).encode()).hexdigest()[:16]


def bound_hash(statements: Iterable[ast.stmt], uses: Iterable[str] = ()) -> str:
    """Returns the hash of what a name is: of all that binds it, and of where the names in that lead.

    Args:
        statements: Those that bind it; of loops and conditions the first line alone counts.
    """
    texts = ["".join(_plain_text(statement, blocks=isinstance(statement, DEFINITIONS))) for statement in statements]
    return hashlib.sha256("\0".join([*texts, *uses]).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class HashedPart:
    """A statement without its blocks, or a decorator, argument or base of a definition."""

    key: str
    first: Any
    last: Any  #: The node that it ends with: an argument's default, or the first one.
    mark: str = ""  #: `@` for a decorator, which begins before its node.

    def source_line(self, text: str) -> str:
        line, column = self.last.end_lineno, self.last.end_col_offset
        if isinstance(self.last, ast.stmt) and getattr(self.last, "body", None):
            line, column = self.last.body[0].lineno, self.last.body[0].col_offset  # type: ignore[attr-defined]
        rows = text.encode().split(b"\n")[self.first.lineno - 1 : line]
        rows[-1] = rows[-1][:column]
        rows[0] = rows[0][self.first.col_offset :]
        words = self.mark + " ".join(b"\n".join(rows).decode(errors="replace").split())
        return words if len(words) <= 160 else f"{words[:157]}..."


def parts(node: ast.stmt) -> list[HashedPart]:
    return [HashedPart(hashlib.sha256(text.encode()).hexdigest()[:6], *rest) for text, *rest in _parts(node)]


def _parts(node: ast.stmt) -> Iterator[tuple[Any, ...]]:
    if isinstance(node, DEFINITIONS):
        for decorator in node.decorator_list:
            yield f"@{''.join(_plain_text(decorator))}", decorator, decorator, "@"
        yield f"{type(node).__name__} {node.name}", node, node
        yield from _header(node)
    else:
        yield "".join(_plain_text(node, blocks=False)), node, node
    for statement in _inner(node):
        yield from _parts(statement)


def _header(node: Definition) -> Iterator[tuple[Any, ...]]:
    if isinstance(node, ast.ClassDef):
        yield from (("".join(_plain_text(base)), base, base) for base in (*node.bases, *node.keywords))
        return
    for parameter in parameters(node):
        default = "".join(_plain_text(parameter.default))
        yield (
            f"{_MARKS[parameter.kind]}{parameter.name}={default}",
            parameter.argument,
            parameter.default or parameter.argument,
        )


def _inner(node: ast.AST) -> Iterator[ast.stmt]:
    for field in ("body", "orelse", "finalbody"):
        block = getattr(node, field, None)
        if isinstance(block, list):
            yield from _without_docstring(node, block)
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield from part.body


def _without_docstring(node: ast.AST, block: list[ast.stmt]) -> list[ast.stmt]:
    first = block[0] if block and isinstance(node, DEFINITIONS) else None
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return block[1:] if is_text and isinstance(first.value.value, str) else block  # type: ignore[union-attr]


def _plain_text(node: object, blocks: bool = True) -> Iterator[str]:
    if isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for field, value in ast.iter_fields(node):
            is_block = field in _BLOCKS and isinstance(value, list)
            if field in _SKIPPED and not (field == "annotation" and isinstance(node, ast.AnnAssign)):
                continue
            if value is None and not isinstance(node, ast.Constant):
                continue
            if value == [] or (is_block and not blocks):
                continue
            yield f" {field}="
            yield from _plain_text(_without_docstring(node, value) if field == "body" and is_block else value, blocks)
        yield ")"
    elif isinstance(node, list):
        yield "["
        for item in node:
            yield from _plain_text(item, blocks)
            yield ","
        yield "]"
    else:
        yield f"{type(node).__name__}:{node!r}"


def changes(old: list[str], node: ast.stmt, text: str) -> list[str]:
    """Returns in words how a definition differs from the hashes of the parts of an earlier one."""
    new = parts(node)
    result: list[str] = []
    for tag, old_from, old_to, new_from, new_to in difflib.SequenceMatcher(
        None, old, [part.key for part in new], autojunk=False
    ).get_opcodes():
        if tag == "equal":
            continue
        gone = old_to - old_from
        result += [f"line {part.first.lineno} is new: {part.source_line(text)}" for part in new[new_from:new_to]]
        if gone and new_to == new_from:
            at = new[new_from].first.lineno if new_from < len(new) else (node.end_lineno or node.lineno)
            result.append(f"{gone} {'parts' if gone > 1 else 'part'} before line {at} gone")
    return result
