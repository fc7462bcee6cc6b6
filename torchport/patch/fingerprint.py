"""What a piece of source is, apart from its formatting, comments, docstrings and annotations.

The hashes do not depend on the interpreter: empty fields, which Python versions add and drop, are left out.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
from collections.abc import Iterator

_SKIPPED = {"ctx", "kind", "type_comment", "annotation", "returns", "type_params", "type_ignores"}
_BLOCKS = {"body", "orelse", "finalbody", "handlers", "cases"}
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def tree_hash(node: ast.AST) -> str:
    """Returns the hash of a definition, 16 hexadecimal digits."""
    return hashlib.sha256("".join(_written(node)).encode()).hexdigest()[:16]


def statement_hashes(node: ast.stmt) -> list[tuple[str, int]]:
    """Returns a short hash and the line of every statement in a definition, the insides of blocks apart."""
    return [(hashlib.sha256("".join(text).encode()).hexdigest()[:6], line) for text, line in _statements(node)]


def _statements(node: ast.stmt) -> Iterator[tuple[list[str], int]]:
    yield list(_written(node, blocks=False)), node.lineno
    for statement in _inner(node):
        yield from _statements(statement)


def _inner(node: ast.AST) -> Iterator[ast.stmt]:
    for field in ("body", "orelse", "finalbody"):
        block = getattr(node, field, None)
        if isinstance(block, list):
            yield from _without_docstring(node, block)
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield from part.body


def _without_docstring(node: ast.AST, block: list[ast.stmt]) -> list[ast.stmt]:
    first = block[0] if block and isinstance(node, _DEFINITIONS) else None
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return block[1:] if is_text and isinstance(first.value.value, str) else block  # type: ignore[union-attr]


def _written(node: object, blocks: bool = True) -> Iterator[str]:
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
            yield from _written(_without_docstring(node, value) if field == "body" and is_block else value, blocks)
        yield ")"
    elif isinstance(node, list):
        yield "["
        for item in node:
            yield from _written(item, blocks)
            yield ","
        yield "]"
    else:
        yield f"{type(node).__name__}:{node!r}"


def changes(old: list[str], node: ast.stmt, text: str) -> list[str]:
    """Returns in words how a definition differs from the statement hashes of an earlier one."""
    new = statement_hashes(node)
    lines = text.split("\n")
    result: list[str] = []
    for tag, old_from, old_to, new_from, new_to in difflib.SequenceMatcher(
        None, old, [key for key, _ in new], autojunk=False
    ).get_opcodes():
        if tag == "equal":
            continue
        gone = old_to - old_from
        for _, line in new[new_from:new_to]:
            result.append(f"line {line} is new: {lines[line - 1].strip()[:80]}")
        if gone and new_to == new_from:
            at = new[new_from][1] if new_from < len(new) else (node.end_lineno or node.lineno)
            result.append(f"{gone} statement{'s' if gone > 1 else ''} before line {at} gone")
    return result
