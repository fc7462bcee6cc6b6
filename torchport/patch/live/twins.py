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
    files = {name: _file(module) for name, module in names.items()}
    endings = {os.path.basename(file) for file in files.values()}  # noqa: PTH119 - of thousands of modules
    by_file: dict[str, list[tuple[str, types.ModuleType]]] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(tuple(endings - {""})) and isinstance(module, types.ModuleType):
            by_file.setdefault(os.path.realpath(file), []).append((name, module))
    twins = {}
    for name, file in files.items():
        others = [other for other, module in by_file.get(file, ()) if module is not names[name]]
        if others:
            twins[name] = file, others[0]
    return twins


def _file(module: object) -> str:
    file = getattr(module, "__file__", None)
    return os.path.realpath(file) if isinstance(file, str) else ""


def _remedy(file: str, name: str, other: str) -> str:
    """Returns what to do about the second name: most often a folder inside the package is on the path."""
    if other == "__main__":
        return f"Start it from a script of its own, which imports '{name}'"
    folder = Path(file).parents[other.count(".") + (Path(file).name == "__init__.py")]
    if str(folder) in map(os.path.realpath, sys.path):
        return f"Take {folder} off sys.path (and PYTHONPATH), and import '{name}' there"
    return f"Import it as '{name}' everywhere"
