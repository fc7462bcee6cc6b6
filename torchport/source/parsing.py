"""A Python file as a text and as a syntax tree, or an UnreadableError that says why it cannot be read.

Upstream's modules are found and read without importing any of them: `importlib.util.find_spec("a.b")` would run the
code of `a`, so only search paths are walked.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib.util
import os
import re
import stat
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from torchport.errors import UnreadableError
from torchport.files.folder import as_named
from torchport.source.bindings import Binding, all_bindings, binding_at, last_bindings

LARGEST = 5_000_000
"""Bytes of the largest file that is read: the largest modules that people write have a tenth of it."""
_PYTHON_2 = re.compile(
    r"^[ \t]*(print\s+[\"'\w]|exec\s+[\"']|raise\s+\w+\s*,|except\s+[\w.]+\s*,\s*\w+\s*:)", re.MULTILINE
)


def tree_of(file: Path) -> ast.Module:
    """Returns the syntax tree of a file, read once for each version of it. It is shared: never change it."""
    return _tree_of(file, as_named(file), _status(file, as_named(file)).st_mtime_ns)


@functools.cache
def _tree_of(file: Path, name: str, mtime_ns: int) -> ast.Module:
    return tree(text_of(file, name), name)


def text_of(file: Path, name: str) -> str:
    """Returns a file's text in the encoding that it declares; raises UnreadableError with `name` as the file's name."""
    size = _status(file, name).st_size
    if size > LARGEST:
        fact = f"It has {size / 1e6:.0f} MB, more than the {LARGEST // 10**6} MB that are read"
        raise _unreadable(name, fact, "too-large")
    with decoded(name):
        return importlib.util.decode_source(file.read_bytes())


def _status(file: Path, name: str) -> os.stat_result:
    """Returns the status of a regular file; refuses anything else."""
    with decoded(name):
        status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise _unreadable(name, "It is no file, but a folder, pipe or device", "unreadable")
    return status


@contextlib.contextmanager
def decoded(name: str) -> Iterator[None]:
    """Turns an exception of Python's while a file is opened and decoded into an UnreadableError with that name."""
    try:
        yield
    except OSError as error:
        raise _unreadable(name, f"It cannot be opened: {error.strerror}", "unreadable") from error
    except (SyntaxError, LookupError, UnicodeError) as error:  # an unknown encoding, or bytes of another one
        fact = f"Its bytes are no text: {' '.join(str(error).split())}"
        raise _unreadable(name, fact, "encoding") from error


def tree(text: str, name: str) -> ast.Module:
    """Returns the syntax tree of a text; raises UnreadableError if it is not Python, or nested too deep."""
    with nesting(name), warnings.catch_warnings():
        # Warnings of the text, such as for an invalid escape.
        warnings.simplefilter("ignore")
        try:
            return ast.parse(text)
        except SyntaxError as error:
            line = error.lineno or 0
            if _PYTHON_2.search(text) is not None:
                raise _unreadable(name, "It is written for Python 2", "python-2", line) from error
            raise _not_python(name, error.msg, line) from error
        except ValueError as error:  # a null byte
            raise _not_python(name, str(error)) from error


@contextlib.contextmanager
def nesting(name: str, line: int = 0) -> Iterator[None]:
    """Turns Python's exceptions for a syntax tree that is nested too deep to be walked into an UnreadableError."""
    try:
        yield
    except (RecursionError, MemoryError) as error:
        raise _not_python(name, "nested too deep", line) from error


def _not_python(name: str, why: str, line: int = 0) -> UnreadableError:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return _unreadable(name, f"Python {version} cannot read it: {' '.join(why.split())}", "syntax-error", line)


def _unreadable(name: str, fact: str, kind: str, line: int = 0) -> UnreadableError:
    remedy = "Mend the file, or use a version of it for this Python"
    return UnreadableError(f"{name}:{line}" if line else name, fact.rstrip("."), remedy, line=line, kind=kind)


@dataclasses.dataclass(frozen=True, eq=False)
class SourceFile:
    """The source of a Python module, and the statements that bind its names."""

    module: str
    file: str
    text: str  #: With newlines as Python reads them.

    @property
    def shown(self) -> str:
        return shown(self.file)

    @functools.cached_property
    def tree(self) -> ast.Module:
        """The syntax tree, which is shared: never change it. Raises UnreadableError if the text is not Python."""
        return tree(self.text, self.shown)

    @property
    def names(self) -> dict[str, ast.stmt]:
        """The last statement of the module that binds each name."""
        with nesting(self.shown):
            return last_bindings(self.tree)

    @functools.cached_property
    def all_names(self) -> dict[str, list[ast.stmt]]:
        """All statements of the module that bind each name, or a part of it, with the conditions above them."""
        with nesting(self.shown):
            return all_bindings(self.tree.body)

    def imported_from(self, node: ast.ImportFrom) -> str:
        return imported_from(node, self.module, Path(self.file).name == "__init__.py")

    def where(self, path: Sequence[str]) -> Binding:
        """Returns where a path such as `("Block", "forward")` leads in the module."""
        with nesting(self.shown):
            return binding_at(self.tree, path)


def read_source(module: str) -> SourceFile | None:
    """Returns a module's source, without importing it; None if it has none in a file. Raises ModuleNotFoundError if
    there is no such module, and UnreadableError if the file is too large, or no text.
    """
    file = _spec_of(module).origin
    if file is None or not file.endswith(".py") or not Path(file).is_file():
        return None
    status = Path(file).stat()
    return _source_file(module, file, status.st_mtime_ns, status.st_size)


@functools.cache
def _source_file(module: str, file: str, mtime_ns: int, size: int) -> SourceFile:
    """Returns a module's source, read once for each version of its file."""
    return SourceFile(module, file, text_of(Path(file), shown(file)))


def _spec_of(module: str) -> ModuleSpec:
    """Returns the spec that an import would use, without importing the parents; raises ModuleNotFoundError."""
    parts = module.split(".")
    top = sys.modules.get(parts[0])
    spec = None if top is None else vars(top).get("__spec__")
    finders = [] if isinstance(spec, ModuleSpec) else sys.meta_path  # an imported package has its spec
    for finder in finders:
        find = getattr(finder, "find_spec", None)
        spec = find(parts[0], None) if find else None
        if isinstance(spec, ModuleSpec):
            break
    if not isinstance(spec, ModuleSpec):
        raise ModuleNotFoundError(f"no '{parts[0]}' on the search path")
    for depth in range(2, len(parts) + 1):
        name = ".".join(parts[:depth])
        parent = ".".join(parts[: depth - 1])
        live = vars(sys.modules[parent]).get("__path__") if parent in sys.modules else None
        paths = live if live is not None else spec.submodule_search_locations
        # The last name alone: for a dotted name, Python would import the parents.
        below = PathFinder.find_spec(parts[depth - 1], list(paths or ()))
        if below is None:
            raise ModuleNotFoundError(f"no '{name}'")
        spec = below
    return spec


def package_folder(source: SourceFile) -> Path:
    """Returns the folder of a module's top-level package; of a single module its file."""
    file = Path(source.file)
    depth = len(source.module.split(".")) - (file.name != "__init__.py")  # how many packages the file lies in
    return file.parents[depth - 1] if depth else file


def imported_from(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """Returns the module that a statement imports from: for `from . import x` in the module `up.nn.norm`, `up.nn`."""
    if not node.level:
        return node.module or ""
    above = module.split(".")
    # The first dot leads to the package: that of a module is above it, an `__init__.py` is the package itself.
    above = above[: len(above) - node.level + is_package]
    return ".".join([*above, *([node.module] if node.module else [])])


def is_there(module: str) -> bool:
    """Returns whether an import would find a module."""
    try:
        _spec_of(module)
    except ModuleNotFoundError:
        return False
    return True


def shown(file: str) -> str:
    """Returns a file's path as errors show it, from a folder of the search path on: `diffusers/models/attention.py`."""
    path = Path(file)
    for root in sorted(map(str, sys.path), key=len, reverse=True):
        if root and path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return path.as_posix()
