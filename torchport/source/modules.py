"""Finds and reads upstream's modules without importing any of them.

`importlib.util.find_spec("a.b")` would run the code of `a`; here only search paths are walked.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import pkgutil
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from torchport.source import parsing
from torchport.source.bindings import Binding, all_bindings, binding_at, last_bindings


@dataclasses.dataclass(frozen=True, eq=False)
class SourceFile:
    module: str
    file: str
    text: str  #: Its text, with newlines as Python reads them.

    @property
    def shown(self) -> str:
        return shown(self.file)

    @property
    def is_package(self) -> bool:
        return self.file.endswith("__init__.py")

    @functools.cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree. It is shared: never change it.

        Raises:
            UnreadableError: The text is not Python, or not that of this interpreter.
        """
        return parsing.tree(self.text, self.shown)

    @property
    def names(self) -> dict[str, ast.stmt]:
        with parsing.nesting(self.shown):
            return last_bindings(self.tree)

    @functools.cached_property
    def all_names(self) -> dict[str, list[ast.stmt]]:
        """All statements of the module that bind each name, or a part of it, with the conditions above them."""
        with parsing.nesting(self.shown):
            return all_bindings(self.tree.body)

    def imported_from(self, node: ast.ImportFrom) -> str:
        return imported_from(node, self.module, self.is_package)

    def where(self, path: Sequence[str]) -> Binding:
        with parsing.nesting(self.shown):
            return binding_at(self.tree, path)


def read_source(module: str) -> SourceFile | None:
    """Returns a module's source, or None if it has no source.

    Raises:
        ModuleNotFoundError: No such module.
        UnreadableError: It is too large, or its bytes are no text.
    """
    file = _spec_of(module).origin
    if file is None or not file.endswith(".py"):
        return None
    try:
        stat = Path(file).stat()
    except OSError:  # a file in an archive
        return _source_file(module, file, 0, 0)
    return _source_file(module, file, stat.st_mtime_ns, stat.st_size)


@functools.cache
def _source_file(module: str, file: str, mtime_ns: int, size: int) -> SourceFile | None:
    """Returns a module's source, read once for each version of its file."""
    if Path(file).is_file():
        return SourceFile(module, file, parsing.text_of(Path(file), shown(file)))
    loader: Any = _spec_of(module).loader
    with parsing.decoded(shown(file)):
        text = loader.get_source(module) if hasattr(loader, "get_source") else None
    return None if text is None else SourceFile(module, file, text)


def _spec_of(module: str) -> ModuleSpec:
    """Returns the spec that an import of a module would use. No parent package is imported.

    Raises:
        ModuleNotFoundError: No such module.
    """
    parts = module.split(".")
    spec = _top_spec(parts[0])
    for depth in range(2, len(parts) + 1):
        name, parent = ".".join(parts[:depth]), ".".join(parts[: depth - 1])
        live = vars(sys.modules[parent]).get("__path__") if parent in sys.modules else None
        paths = live if live is not None else spec.submodule_search_locations
        spec = _spec_in(name, list(paths or ()))
    return spec


def package_folder(source: SourceFile) -> Path:
    """Returns the folder of a module's top-level package; of a single module its file."""
    file = Path(source.file)
    depth = len(source.module.split(".")) - (not source.is_package)
    return file.parents[depth - 1] if depth else file


def imported_from(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """Returns the module that a statement imports from, a relative one resolved."""
    if not node.level:
        return node.module or ""
    above = module.split(".")
    above = above[: len(above) - node.level + is_package]
    return ".".join([*above, *([node.module] if node.module else [])])


def is_there(module: str) -> bool:
    """Returns whether an import would find a module."""
    try:
        _spec_of(module)
    except ModuleNotFoundError:
        return False
    return True


def _top_spec(name: str) -> ModuleSpec:
    live = sys.modules.get(name)
    spec = None if live is None else vars(live).get("__spec__")
    if isinstance(spec, ModuleSpec):
        return spec
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(name, None) if find else None
        if isinstance(spec, ModuleSpec):
            return spec
    raise ModuleNotFoundError(f"no '{name}' on the search path")


def _spec_in(name: str, paths: Sequence[str]) -> ModuleSpec:
    portions: list[str] = []
    for path in paths:
        finder = pkgutil.get_importer(path)
        spec = finder.find_spec(name) if finder is not None else None
        if spec is not None and spec.loader is not None:
            return spec
        portions += (spec.submodule_search_locations or []) if spec is not None else []
    if not portions:
        raise ModuleNotFoundError(f"no '{name}'")
    namespace = ModuleSpec(name, None, is_package=True)
    namespace.submodule_search_locations = portions
    return namespace


def shown(file: str) -> str:
    """Returns a file of upstream as errors show it: from its package on, where it stands on the search path."""
    path = Path(file)
    for root in sorted(map(str, sys.path), key=len, reverse=True):
        if root and path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return path.as_posix()
