"""Matches a run of statements, with holes, against one function's syntax tree.

`$name` matches any one expression, the same one wherever it stands; `$...name` on a line of its own matches any
statements, none included. Formatting and comments never matter.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import textwrap
from collections.abc import Iterator, Sequence

from torchport.source.bindings import Chain, Function, blocks

_HOLE = re.compile(r"\$(\.\.\.)?([A-Za-z_][A-Za-z0-9_]*)")
_ONE, _MANY = "_torchport_hole_one_", "_torchport_hole_many_"


class PatternError(ValueError):
    """The text of a `match` is no pattern."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One place where a pattern matches: `block[start:end]`, and the way to the block."""

    block: list[ast.stmt]
    start: int
    end: int
    chain: Chain

    @property
    def statements(self) -> list[ast.stmt]:
        return self.block[self.start : self.end]


def statements(text: str) -> list[ast.stmt]:
    """Returns the statements of a pattern.

    Raises:
        PatternError: It is not Python, has no statement of its own, or has a misplaced hole.
    """
    marked = _HOLE.sub(lambda hole: (_MANY if hole[1] else _ONE) + hole[2], textwrap.dedent(text))
    try:
        body = ast.parse(marked).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise PatternError(f"is not Python: {error.args[0] if error.args else error}") from error
    if all(_many(statement) for statement in body):
        raise PatternError("names no statement")
    if _many(body[0]) or _many(body[-1]):
        raise PatternError("begins or ends with a hole for statements, which would match nothing")
    alone = {id(node.value) for node in ast.walk(ast.Module(body, [])) if isinstance(node, ast.Expr)}
    for node in ast.walk(ast.Module(body, [])):
        if isinstance(node, ast.Name) and node.id.startswith(_MANY) and id(node) not in alone:
            raise PatternError(f"has '$...{node.id.removeprefix(_MANY)}' inside a statement")
    return body


def runs(function: Function, pattern: Sequence[ast.stmt]) -> Iterator[Run]:
    """Yields the runs of a function's own statements that match, none of them overlapping."""
    for block, chain in blocks(function):
        start = 0
        while start < len(block):
            length = _match_run(pattern, block[start:], {})
            if length:
                yield Run(block, start, start + length, chain)
            start += length or 1


Captured = dict[str, str]


def _many(node: ast.AST) -> str | None:
    value = node.value if isinstance(node, ast.Expr) else None
    return value.id if isinstance(value, ast.Name) and value.id.startswith(_MANY) else None


def _match_run(pattern: Sequence[ast.stmt], statements: Sequence[ast.stmt], captured: Captured) -> int | None:
    """Returns how many of the first statements a pattern takes, as few as possible. None if it does not match."""
    if not pattern:
        return 0
    if _many(pattern[0]):
        for skipped in range(len(statements) + 1):
            rest = _match_run(pattern[1:], statements[skipped:], captured)
            if rest is not None:
                return skipped + rest
        return None
    if not statements:
        return None
    trial = dict(captured)
    if not _match(pattern[0], statements[0], trial):
        return None
    rest = _match_run(pattern[1:], statements[1:], trial)
    if rest is not None:
        captured.update(trial)
    return None if rest is None else rest + 1


def _match(pattern: object, node: object, captured: Captured) -> bool:
    if isinstance(pattern, ast.Name) and pattern.id.startswith(_ONE) and isinstance(node, ast.expr):
        seen = ast.dump(node).replace("Store()", "Load()")
        return captured.setdefault(pattern.id, seen) == seen
    if isinstance(pattern, ast.AST):
        if type(pattern) is not type(node):
            return False
        fields = (field for field in pattern._fields if field not in ("ctx", "kind", "type_comment"))
        return all(_match(getattr(pattern, f, None), getattr(node, f, None), captured) for f in fields)
    if isinstance(pattern, list):
        return isinstance(node, list) and _match_list(pattern, node, captured)
    if isinstance(pattern, str):
        return pattern.replace(_MANY, "$...").replace(_ONE, "$") == node  # inside strings a `$` is only a `$`
    return type(pattern) is type(node) and pattern == node


def _match_list(pattern: list[ast.AST], nodes: list[ast.AST], captured: Captured) -> bool:
    if not any(_many(part) for part in pattern if isinstance(part, ast.AST)):
        return len(pattern) == len(nodes) and all(_match(p, n, captured) for p, n in zip(pattern, nodes, strict=True))
    return _match_whole(pattern, nodes, captured)


def _match_whole(pattern: Sequence[ast.AST], nodes: Sequence[ast.AST], captured: Captured) -> bool:
    """Matches a nested block, which a pattern must take to its end."""
    if not pattern:
        return not nodes
    if _many(pattern[0]):
        return any(_match_whole(pattern[1:], nodes[skip:], captured) for skip in range(len(nodes) + 1))
    trial = dict(captured)
    if nodes and _match(pattern[0], nodes[0], trial) and _match_whole(pattern[1:], nodes[1:], trial):
        captured.update(trial)
        return True
    return False
