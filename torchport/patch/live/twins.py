"""One file under two module names is two modules, with two copies of every function: a patch changes one of them."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterable
from pathlib import Path

from torchport.errors import TwinModuleError
from torchport.patch.declared.entry import Entry


def check(entries: Iterable[Entry]) -> None:
    """Refuses a patched module of which this process has a second copy, under another name.

    Raises:
        TwinModuleError: The first such module; file and both names are in it.
    """
    twins = _twins({entry.module for entry in entries if entry.edits})
    for entry in entries:
        if entry.edits and entry.module in twins:
            file, other = twins[entry.module]
            fact = (
                f"{file} was imported twice, as '{entry.module}' and as '{other}', and '{entry.id}' changes the first "
                "alone"
            )
            raise TwinModuleError(entry.place, fact, _remedy(file, entry.module, other), patch=entry.id, names=other)


def _twins(patched: set[str]) -> dict[str, tuple[str, str]]:
    """Returns the file and the second name of each patched module that has one."""
    names = {name: sys.modules[name] for name in sorted(patched) if name in sys.modules}
    by_file: dict[tuple[int, int], list[tuple[str, object]]] = {}
    for name, module in list(sys.modules.items()):
        if (file := _identity(module)) is not None:
            by_file.setdefault(file, []).append((name, module))
    twins = {}
    for name, module in names.items():
        file = _identity(module)
        others = [other for other, second in by_file.get(file, ()) if second is not module] if file else []
        if others:
            twins[name] = str(module.__file__), others[0]
    return twins


def _identity(module: object) -> tuple[int, int] | None:
    """Returns what names a module's file on its disk; None for a module without one."""
    path = getattr(module, "__file__", None) if isinstance(module, types.ModuleType) else None
    try:
        status = os.stat(path) if isinstance(path, str) else None  # noqa: PTH116 - of thousands of modules
    except OSError:
        return None  # in an archive, or removed since
    return None if status is None else (status.st_dev, status.st_ino)


def _remedy(file: str, name: str, other: str) -> str:
    """Returns what to do about the second name: most often a folder inside the package is on the path."""
    if other == "__main__":
        return f"Start it from a script of its own, which imports '{name}'"
    folder = Path(file).parents[other.count(".") + (Path(file).name == "__init__.py")]
    if str(folder) in map(os.path.realpath, sys.path):
        return f"Take {folder} off sys.path (and PYTHONPATH), and import '{name}' there"
    return f"Import it as '{name}' everywhere"
