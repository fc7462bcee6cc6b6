"""Runs what is armed when a module has been executed, through one finder at the head of the import system."""

from __future__ import annotations

import contextlib
import importlib.abc
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

Callback = Callable[[types.ModuleType], None]
Window = Callable[[], contextlib.AbstractContextManager[None]]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it lets the other finders find, and watches the modules that are armed."""

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callback]] = {}
        self.windows: dict[str, list[Window]] = {}
        self.befores: dict[str, list[Callback]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.callbacks and name not in self.befores and not self._windows(name):
            return None
        spec = self._found_by_others(name, path, target)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self)
        return spec

    def _found_by_others(self, name: str, path: Any, target: Any) -> ModuleSpec | None:
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        for finder in others:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find else None
            if spec is not None:
                return spec  # type: ignore[no-any-return]
        return None

    def _windows(self, name: str) -> list[Window]:
        packages = [p for p in self.windows if name == p or name.startswith(p + ".")]
        return [window for package in packages for window in self.windows[package]]

    @contextlib.contextmanager
    def executing(self, name: str) -> Iterator[None]:
        """Holds open every window that a module's package has."""
        with contextlib.ExitStack() as stack:
            for window in self._windows(name):
                stack.enter_context(window())
            yield

    def executed(self, module: types.ModuleType) -> None:
        """Runs a module's callbacks, in the order in which they were armed."""
        for callback in list(self.callbacks.get(module.__name__, ())):
            callback(module)


class _Loader(importlib.abc.Loader):
    """The module's own loader, which steps back into its place before the module's code can look at it."""

    def __init__(self, own: Any, finder: _Finder) -> None:
        self._own = own
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        return self._own.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        module.__loader__ = self._own
        for prepare in list(self._finder.befores.get(module.__name__, ())):
            prepare(module)
        with self._finder.executing(module.__name__):
            self._own.exec_module(module)
        self._finder.executed(module)


_finder = _Finder()


def _settle() -> None:
    """Keeps the finder at the head of the import system exactly as long as something is armed."""
    armed = bool(_finder.callbacks or _finder.windows or _finder.befores)
    while _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    if armed:
        sys.meta_path.insert(0, _finder)


def _added(table: dict[str, list[Any]], key: str, item: Any) -> Callable[[], None]:
    table.setdefault(key, []).append(item)
    _settle()

    def remove() -> None:
        if item in table.get(key, ()):
            table[key].remove(item)
        if not table.get(key):
            table.pop(key, None)
        _settle()

    return remove


def arm(module: str, callback: Callback) -> Callable[[], None]:
    """Runs a callback each time that a module has been executed; returns what disarms it."""
    return _added(_finder.callbacks, module, callback)


def arm_window(package: str, window: Window) -> Callable[[], None]:
    """Holds a context open while any module of a package executes; returns what disarms it."""
    return _added(_finder.windows, package, window)


def arm_before(module: str, callback: Callback) -> Callable[[], None]:
    """Runs a callback each time that a module is about to be executed; returns what disarms it."""
    return _added(_finder.befores, module, callback)
