"""Parses one top-level definition out of a long file, which takes a tenth of the time of parsing it all.

It answers only where it is sure; elsewhere the whole file is parsed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

_HEADS = ("def ", "class ", "async def ")


def definition(text: str, name: str) -> ast.Module | None:
    """Returns a tree that has only a file's one definition of a name, on its own lines.

    None where the name may be bound in another way as well, or where the definition cannot be cut out by its lines.
    """
    occurrences = list(_lines_with(text, name))
    heads = [(at, line) for at, line in occurrences if _is_head(line, name)]
    if len(heads) != 1 or heads[0][1][0] in " \t":
        return None
    if any(_may_bind(line, name) for at, line in occurrences if at != heads[0][0]):
        return None
    tree = _cut(text, heads[0][0])
    single = tree is not None and len(tree.body) == 1
    return tree if single and tree is not None and getattr(tree.body[0], "name", None) == name else None


def _lines_with(text: str, name: str) -> Iterator[tuple[int, str]]:
    """Yields the start of each line that has a name as a word, and the line."""
    at = text.find(name)
    while at >= 0:
        start = text.rfind("\n", 0, at) + 1
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        before, after = text[at - 1 : at], text[at + len(name) : at + len(name) + 1]
        if not (before.isalnum() or before == "_" or after.isalnum() or after == "_"):
            yield start, text[start:end]
            at = text.find(name, end)
        else:
            at = text.find(name, at + len(name))


def _is_head(line: str, name: str) -> bool:
    words = line.strip()
    return any(words.startswith(head) and words[len(head) :].lstrip().startswith(name) for head in _HEADS)


def _may_bind(line: str, name: str) -> bool:
    """Returns whether a line may bind a name; in doubt it may, and the whole file is parsed."""
    words = line.strip()
    if words.startswith(("from ", "import ", "del ", "global ")) or words.rstrip(",").endswith(f" as {name}"):
        return True
    if words.rstrip(",") == name or f"for {name}" in line or f"as {name}" in line or f"{name} :=" in line:
        return True
    left, equals, _ = words.partition("=")
    return bool(equals) and "(" not in left and name in left.partition(":")[0]


def _cut(text: str, start: int) -> ast.Module | None:
    """Returns the tree of the statement that a line heads, with the decorators above it."""
    first = start
    while first > 0:
        above = text.rfind("\n", 0, first - 1) + 1
        line = text[above : first - 1]
        if not line.startswith("@") and not (line.strip() and line[0] in " \t)]}#"):
            break
        first = above
    end = start
    while True:
        end = text.find("\n", end) + 1
        if end == 0 or end >= len(text):
            end = len(text)
            break
        if text[end] not in " \t\n\r#)]}":
            break
    try:
        return ast.parse("\n" * text.count("\n", 0, first) + text[first:end])
    except SyntaxError:
        return None
