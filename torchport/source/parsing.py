"""A Python file as a text and as a syntax tree. Here alone is said why one cannot be read."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import os
import re
import stat
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from torchport.errors import UnreadableError
from torchport.files.folder import as_named

LARGEST = 5_000_000
"""Bytes of the largest file that is read: the largest modules that people write have a tenth of it."""
_PYTHON_2 = re.compile(
    r"^[ \t]*(print\s+[\"'\w]|exec\s+[\"']|raise\s+\w+\s*,|except\s+[\w.]+\s*,\s*\w+\s*:)", re.MULTILINE
)


def tree_of(file: Path) -> ast.Module:
    """Returns the syntax tree of a file, read once for each version of it. It is shared: never change it.

    Raises:
        UnreadableError: There is no such file, or it is not Python.
    """
    return _tree_of(file, as_named(file), _status(file, as_named(file)).st_mtime_ns)


@functools.cache
def _tree_of(file: Path, name: str, mtime_ns: int) -> ast.Module:
    return tree(text_of(file, name), name)


def text_of(file: Path, name: str) -> str:
    """Returns a file's text in the encoding that it declares, with newlines as Python reads them.

    Raises:
        UnreadableError: It is no file, too large, or its bytes are no text.
    """
    size = _status(file, name).st_size
    if size > LARGEST:
        fact = f"It has {size / 1e6:.0f} MB, more than the {LARGEST // 10**6} MB that are read"
        raise _unreadable(name, 0, fact, "too-large")
    with decoded(name):
        return importlib.util.decode_source(file.read_bytes())


def _status(file: Path, name: str) -> os.stat_result:
    with decoded(name):
        status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise _unreadable(name, 0, "It is no file, but a folder, pipe or device", "unreadable")
    return status


@contextlib.contextmanager
def decoded(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unreadable(name, 0, f"It cannot be opened: {error.strerror}", "unreadable") from error
    except ImportError as error:  # a loader's word for the same
        raise _unreadable(name, 0, "It cannot be opened", "unreadable") from error
    except (SyntaxError, LookupError, UnicodeError) as error:  # an encoding that is none, or is not the file's
        fact = f"Its bytes are no text: {' '.join(str(error).split())}"
        raise _unreadable(name, 0, fact, "encoding") from error


def tree(text: str, name: str) -> ast.Module:
    """Returns the syntax tree of a text.

    Raises:
        UnreadableError: It is not Python, not that of this interpreter, or nested too deep.
    """
    with nesting(name), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of somebody's escapes in strings
        try:
            return ast.parse(text)
        except SyntaxError as error:
            is_old = _PYTHON_2.search(text) is not None
            fact = "It is written for Python 2" if is_old else _cannot_read(error.msg)
            raise _unreadable(name, error.lineno or 0, fact, "python-2" if is_old else "syntax-error") from error
        except ValueError as error:  # a null byte
            raise _unreadable(name, 0, _cannot_read(str(error)), "syntax-error") from error


@contextlib.contextmanager
def nesting(name: str, line: int = 0) -> Iterator[None]:
    """Refuses a file, while its syntax tree is walked, that is nested deeper than Python can follow."""
    try:
        yield
    except (RecursionError, MemoryError) as error:
        raise _unreadable(name, line, _cannot_read("nested too deep"), "syntax-error") from error


def _cannot_read(why: str) -> str:
    return f"Python {sys.version_info[0]}.{sys.version_info[1]} cannot read it: {' '.join(why.split())}"


def _unreadable(name: str, line: int, fact: str, kind: str) -> UnreadableError:
    remedy = "Mend the file, or use a version of it for this Python"
    return UnreadableError(f"{name}:{line}" if line else name, fact.rstrip("."), remedy, line=line, kind=kind)
