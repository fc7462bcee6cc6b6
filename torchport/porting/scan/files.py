"""The Python files of a folder, read as strangers' files: each that cannot be read is reported, and none is fatal."""

from __future__ import annotations

import ast
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from torchport.errors import UnreadableError
from torchport.porting.scan.rules import BY_KIND
from torchport.source import parsing

_NOT_ENTERED = {"__pycache__", "node_modules", "site-packages", "build", "dist"}


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A file that was read."""

    path: str  #: Its path below the folder, with forward slashes.
    tree: ast.Module  #: Its syntax tree.
    lines: int  #: The number of its lines.


@dataclasses.dataclass(frozen=True)
class Unread:
    """A file or folder that was not read."""

    path: str  #: Its path below the folder.
    line: int  #: The line of a mistake in it; 0 for none.
    rule: str  #: The id that `torchport explain` knows.
    why: str  #: What is wrong with it, without a full stop.


def read(root: Path) -> tuple[list[Source], list[Unread]]:
    """Returns the files of a folder, or one file, and what could not be read."""
    sources: list[Source] = []
    unread: list[Unread] = []
    files = iter([(root, root.name)]) if root.is_file() else _walk(root, unread)
    for file, name in files:
        one = _read_file(file, name)
        if isinstance(one, Source):
            sources.append(one)
        else:
            unread.append(one)
    return sources, unread


def _walk(root: Path, unread: list[Unread]) -> Iterator[tuple[Path, str]]:
    """Yields the Python files below a folder. A linked folder is entered once, a loop of links is reported."""
    entered = {os.path.realpath(root)}
    pending = [root]
    while pending:
        folder = pending.pop()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            unread.append(Unread(_below(root, folder), 0, "PS906", f"It cannot be opened: {error.strerror}"))
            continue
        for entry in entries:
            path = Path(entry.path)
            if _is_loop(path):
                unread.append(Unread(_below(root, path), 0, "PS905", "It is a link that leads back to itself"))
            elif entry.is_dir() and _is_entered(entry.name):
                real, top = os.path.realpath(path), Path(os.path.realpath(root))
                if entry.is_symlink() and top.is_relative_to(real):
                    unread.append(Unread(_below(root, path), 0, "PS905", "It is a link to a folder that it lies in"))
                elif entry.is_symlink() and not Path(real).is_relative_to(top):
                    unread.append(Unread(_below(root, path), 0, "PS905", "It is a link out of the folder"))
                elif real not in entered:
                    entered.add(real)
                    pending.append(path)
            elif entry.name.endswith(".py"):
                yield path, _below(root, path)


def _below(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()


def _is_entered(name: str) -> bool:
    return not name.startswith(".") and name not in _NOT_ENTERED


def _is_loop(path: Path) -> bool:
    """Returns whether a link never arrives."""
    if not path.is_symlink():
        return False
    try:
        path.stat()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _read_file(file: Path, name: str) -> Source | Unread:
    try:
        text = parsing.text_of(file, name)
        return Source(name, parsing.tree(text, name), text.count("\n") + 1)
    except UnreadableError as error:
        return Unread(name, error.line, BY_KIND[error.kind], error.fact)
