"""Runs callbacks around the execution of a module, through one finder at the head of the import system.

The finder has to be in `sys.meta_path`: nowhere else does Python ask before it executes a module. The callbacks are in
the registry.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.abc
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from typing import Any, Literal

from torchport.patch.live import Callback, Window, registry

When = Literal["before", "after", "windows"]
"""The registry's tables of callbacks and contexts."""


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find a module, and puts `_Loader` around the loader of one that has callbacks."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns a module's spec, with a loader that runs our callbacks around its import; None for other modules."""
        if name not in registry.after and name not in registry.before and not _windows(name):
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find else None
            if spec is not None:
                if spec.loader is not None:
                    around: Any = _Loader if hasattr(spec.loader, "exec_module") else _OldLoader
                    spec.loader = around(spec.loader)
                return spec
        return None


@dataclasses.dataclass(eq=False)
class _Around:
    """A loader around a module's own loader, with the attributes of both."""

    _loader: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Loader(_Around):
    """Runs the callbacks around a module's own loader, which is put back before the module's code can look at it."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Runs a module's code by its own loader, between the callbacks for before and after its import."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        for callback in list(registry.before.get(module.__name__, ())):
            callback(module)
        with _open_windows(module.__name__):
            self._loader.exec_module(module)
        run_callbacks(module)


class _OldLoader(_Around):
    """Runs the callbacks after a loader that has `load_module` alone, which makes and executes a module at once."""

    def load_module(self, fullname: str) -> types.ModuleType:
        """Loads and returns a module, inside the contexts of its packages, and runs its callbacks for `after`."""
        with _open_windows(fullname):
            self._loader.load_module(fullname)
        module = sys.modules[fullname]
        run_callbacks(module)
        return module


_FINDER = _Finder()  # a constant: it has no state


def _windows(name: str) -> list[Window]:
    """Returns the contexts to open while a module executes: those of the module's name and of the packages above."""
    packages = [p for p in registry.windows if name == p or name.startswith(p + ".")]
    return [window for package in packages for window in registry.windows[package]]


@contextlib.contextmanager
def _open_windows(name: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for window in _windows(name):
            stack.enter_context(window())
        yield


def run_callbacks(module: types.ModuleType) -> None:
    """Runs the callbacks of a module that has been executed, in the order in which they were armed."""
    for callback in list(registry.after.get(module.__name__, ())):
        callback(module)


def _place_finder() -> None:
    """Puts the finder at the head of the import system, or takes it out if the registry waits for no import."""
    while _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
    if not registry.is_idle():
        sys.meta_path.insert(0, _FINDER)


def arm(name: str, callback: Callback | Window, when: When = "after") -> Callable[[], None]:
    """Registers a callback for each execution of a module, before or after it; returns a function that removes it. For
    `windows` the name is a package's, and the callback returns a context, which is open while a module of it executes.
    """
    table: dict[str, list[Any]] = getattr(registry, when)
    table.setdefault(name, []).append(callback)
    _place_finder()

    def disarm() -> None:
        if callback in table.get(name, ()):
            table[name].remove(callback)
        if not table.get(name):
            table.pop(name, None)
        _place_finder()

    return disarm
