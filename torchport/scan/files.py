"""The Python files of a folder, read as strangers' files: each that cannot be read is reported, and none is fatal."""

from __future__ import annotations

import ast
import dataclasses
import io
import os
import re
import stat
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

LARGEST = 5_000_000
"""Bytes of the largest file that is read: the largest modules that people write have a tenth of it."""
_NOT_ENTERED = {"__pycache__", "node_modules", "site-packages", "build", "dist"}
_PRINT = re.compile(r"^\s*(print\s+[\"'\w]|exec\s+[\"']|raise\s+\w+\s*,|except\s+[\w.]+\s*,\s*\w+\s*:)", re.MULTILINE)


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A file that was read.

    Attributes:
        path: Its path below the folder, with forward slashes.
        tree: Its syntax tree.
        lines: The number of its lines.
    """

    path: str
    tree: ast.Module
    lines: int


@dataclasses.dataclass(frozen=True)
class Unread:
    """A file or folder that was not read.

    Attributes:
        path: Its path below the folder.
        line: The line of a mistake in it; 0 for none.
        rule: The id that `torchport explain` knows.
        why: What is wrong with it, without a full stop.
    """

    path: str
    line: int
    rule: str
    why: str


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
                real = os.path.realpath(path)
                if entry.is_symlink() and Path(os.path.realpath(root)).is_relative_to(real):
                    unread.append(Unread(_below(root, path), 0, "PS905", "It is a link to a folder that it lies in"))
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
        facts = file.stat()
        if not stat.S_ISREG(facts.st_mode):
            return Unread(name, 0, "PS906", "It is no file, but a folder, pipe or device")
        if facts.st_size > LARGEST:
            size = f"{facts.st_size / 1e6:.0f} MB"
            return Unread(name, 0, "PS904", f"It has {size}, more than the {LARGEST // 10**6} MB that are read")
        data = file.read_bytes()
    except OSError as error:
        return Unread(name, 0, "PS906", f"It cannot be opened: {error.strerror}")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        return Unread(name, 0, "PS903", f"Its bytes are no text: {' '.join(str(error).split())}")
    return _parse(name, text)


def _parse(name: str, text: str) -> Source | Unread:
    try:
        with warnings.catch_warnings():  # of somebody's escapes in strings
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except SyntaxError as error:
        if _PRINT.search(text):
            return Unread(name, error.lineno or 0, "PS902", "It is written for Python 2")
        return Unread(name, error.lineno or 0, "PS901", f"Python cannot read it: {error.msg}")
    except (ValueError, RecursionError, MemoryError) as error:
        return Unread(name, 0, "PS901", f"Python cannot read it: {' '.join(str(error).split()) or 'nested too deep'}")
    return Source(name, tree, text.count("\n") + 1)
