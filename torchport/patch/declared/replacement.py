"""Loads the Python functions beside the YAML, by their path."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torchport.errors import ReplacementError, TorchportError, nearest
from torchport.files.folder import as_named
from torchport.patch.declared import Entry


@dataclasses.dataclass(frozen=True)
class Explained(contextlib.AbstractContextManager[object]):
    """A context that turns an exception of foreign code into an error of torchport's."""

    #: Returns the error to raise for an exception, or None to let the exception through.
    error_for: Callable[[BaseException], Exception | None]

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: object) -> None:
        # SystemExit, too: `sys.exit` in foreign code would end the process without a word.
        if isinstance(value, Exception | SystemExit) and not isinstance(value, TorchportError):
            error = self.error_for(value)
            if error is not None:
                raise error from value


def file_of(entry: Entry, reference: str) -> Path:
    """Returns the path of the file in a `file.py:name`; refuses a missing file, and a link out of the patches."""
    path = entry.folder / reference.partition(":")[0]
    if not path.is_file():
        known = [file.name for file in sorted(entry.folder.glob("*.py"))]
        fact = f"No file '{path.name}' beside it for '{entry.id}'"
        raise ReplacementError(entry.place, fact, nearest(path.name, known), patch=entry.id)
    if not path.resolve().is_relative_to(entry.folder.parent.resolve()):
        fact = f"'{path.name}' is a link out of the patches"
        raise ReplacementError(entry.place, fact, "Put the file itself there", patch=entry.id)
    return path.resolve()


def load(entry: Entry, reference: str) -> Any:
    """Executes the file of a `file.py:name`, once for each content, and returns the function or class of that name."""
    path = file_of(entry, reference)
    name = reference.partition(":")[2]
    fact = f"'{path.name}' does not load for '{entry.id}'"
    module = module_of(path, entry.upstream, entry.place, fact, patch=entry.id)
    if name not in vars(module):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise no_such_name(entry, path, name, known)
    return vars(module)[name]


def no_such_name(entry: Entry, path: Path, name: str, known: Iterable[str]) -> ReplacementError:
    """Returns the error for a reference `file.py:name` to a file that has no such name."""
    fact = f"'{path.name}' has no '{name}' for '{entry.id}'"
    return ReplacementError(entry.place, fact, nearest(name, known), patch=entry.id)


def module_of(path: Path, upstream: str, place: str, fact: str = "", **culprit: Any) -> types.ModuleType:
    """Executes a Python file among the patches of an upstream, once for each content, and returns its module. The error
    of a file that does not load has the `place` that names the file, the attributes `culprit`, and begins with `fact`.
    """

    def does_not_load(error: BaseException) -> ReplacementError:
        words = " ".join(str(error).split()).rstrip(".") or "no message"
        opening = fact or f"'{as_named(path)}' does not load"
        return ReplacementError(place, f"{opening}: {type(error).__name__}: {words}", "Mend the file", **culprit)

    name = f"torchport_patches.{upstream}.{path.stem}"
    with Explained(does_not_load):
        module = sys.modules[name] = _execute(path, name, path.read_bytes())
        return module


@functools.cache
def _execute(path: Path, name: str, source: bytes) -> types.ModuleType:
    """Executes a file's source, and returns the module. Cached: new function objects would miss the caches of jit."""
    module = types.ModuleType(name)
    module.__file__ = str(path)
    previous = sys.modules.get(name)
    sys.modules[name] = module
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))
    except BaseException:
        del sys.modules[name]
        if previous is not None:
            sys.modules[name] = previous
        raise
    return module


def load_all(entries: Iterable[Entry]) -> dict[str, Any]:
    """Returns each entry's function or class, by its id; refuses a file that imports a patch's target, too early."""
    chosen = list(entries)
    homes = {entry.module: entry for entry in chosen if entry.scope == "package" and entry.edits}
    loaded: dict[str, Any] = {}
    for entry in chosen:
        if entry.reference is None:
            continue
        before = {name for name in homes if name in sys.modules}
        loaded[entry.id] = load(entry, entry.reference)
        targets = sorted(name for name in homes if name in sys.modules and name not in before)
        if targets:
            fact = f"Loading '{entry.reference}' imports '{targets[0]}', the target of '{homes[targets[0]].id}'"
            raise ReplacementError(entry.place, fact, "Import it inside the function", patch=entry.id)
    return loaded
