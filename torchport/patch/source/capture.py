"""Says in which file and line a name was captured, or a module imported. Only messages need it."""

from __future__ import annotations

import ast
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchport.errors import UnreadableError
from torchport.source.modules import SourceFile, read_source, shown


def line_of(module: str, name: str | None, original: str) -> str | None:
    """Returns `file:line` of the statement by which a module took a name.

    Args:
        name: The name that it has there, or None if it is not a name of the module.
        original: The name that it has at home.
    """
    source = source_of_module(module)
    if source is None:
        return None
    wanted = {name, original} - {None}
    for node in _statements(source.tree):
        if wanted & set(_names_in(node)):
            return f"{source.shown}:{node.lineno}"
    return None


def importer(module: str) -> str | None:
    """Returns `file:line` of a statement that imports a module, the running program's first."""
    parent, _, leaf = module.rpartition(".")
    absolute = rf"^\s*(?:import {re.escape(module)}\b|from {re.escape(module)} |from {re.escape(parent)} import\b)"
    for name in ("__main__", *reversed(list(sys.modules))):
        if name != module and isinstance(sys.modules.get(name), types.ModuleType):
            near = name.partition(".")[0] == module.partition(".")[0]
            source = source_of_module(name, rf"{absolute}|\b{leaf}\b" if near else absolute)
            for node in ast.walk(source.tree) if source else ():
                if isinstance(node, (ast.Import, ast.ImportFrom)) and source and module in _imports(node, source):
                    return f"{source.shown}:{node.lineno}"
    return None


def local_variable(thing: Any) -> str | None:
    """Returns the local variable of a running function that holds an object."""
    frame = sys._getframe(1)
    while frame is not None:
        if not str(frame.f_globals.get("__name__")).startswith("torchport.patch"):
            for name, value in frame.f_locals.items():
                if value is thing:
                    code = frame.f_code
                    where = f"{shown(code.co_filename)}:{frame.f_lineno}"
                    return f"the variable '{name}' of {code.co_name} ({where})"
        frame = frame.f_back  # type: ignore[assignment]
    return None


def source_of_module(module: str, needle: str | None = None) -> SourceFile | None:
    """Returns a loaded module's source. With a needle, only if the text matches that before it is parsed."""
    live = sys.modules.get(module)
    file = vars(live).get("__file__") if isinstance(live, types.ModuleType) else None
    if not isinstance(file, str) or not file.endswith(".py"):
        return None
    try:
        text = Path(file).read_text(encoding="utf-8", errors="replace") if needle or module == "__main__" else ""
        if needle is not None and not re.search(needle, text, re.MULTILINE):
            return None
        source = SourceFile(module, file, text) if module == "__main__" else read_source(module)
        return source if source is None or source.tree else None
    except (OSError, ImportError, UnreadableError):
        return None  # only a message is poorer for it


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    yield from imports
    yield from (node for node in nodes if isinstance(node, (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)))
    yield from (node for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef)))


def _names_in(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [name for alias in node.names for name in (alias.name, alias.asname) if name]
    return [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)]


def _imports(node: ast.Import | ast.ImportFrom, source: SourceFile) -> set[str]:
    """Returns the modules that a statement may import."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    home = source.imported_from(node)
    return {home, *(f"{home}.{alias.name}" for alias in node.names)}
