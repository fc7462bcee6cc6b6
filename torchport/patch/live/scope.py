"""Refuses targets whose path walks out of their package, where a patch would reach strangers."""

from __future__ import annotations

import ast
import types
from typing import Any

from torchport.errors import ScopeError, TargetError
from torchport.patch.declared.entry import Entry
from torchport.patch.live.target import Slot
from torchport.patch.source.source import Found


def check_written(entry: Entry, where: Found) -> None:
    """Checks a target against upstream's source: `module:nn.LayerNorm` is a name of torch if `nn` is imported.

    Raises:
        ScopeError: It lies in another package, and the entry is not declared global.
    """
    if where.depth == len(entry.path) or entry.scope == "global":
        return
    name = entry.path[where.depth - 1]
    home = None
    if isinstance(where.node, ast.ImportFrom) and where.node.level == 0:
        home = where.node.module
    elif isinstance(where.node, ast.Import):
        home = next(a.name for a in where.node.names if name in (a.asname, a.name.partition(".")[0]))
    if home is not None and _package(home) != _package(entry.module):
        raise _walks_out(entry, name, home)


def check_live(entry: Entry, slot: Slot) -> None:
    """Checks what was really walked through; see `check_written`."""
    if entry.scope == "global":
        return
    for name, passed in zip(entry.path, slot.path[1:], strict=False):
        home = _home(passed)
        if _package(home) != _package(entry.module):
            raise _walks_out(entry, name, home)


def _home(passed: Any) -> str:
    """Returns the module that an object belongs to; an instance may be shared by whoever has its class."""
    if isinstance(passed, types.ModuleType):
        return passed.__name__
    owner = passed if isinstance(passed, (type, types.FunctionType)) else type(passed)
    return str(owner.__module__)


def check_function(entry: Entry, function: types.FunctionType) -> None:
    """Checks that the code to be rewritten belongs to the target's module, and so to its readers alone.

    Raises:
        ScopeError: It is another package's.
        TargetError: It is another module's of the same package, where the target should name it.
    """
    home = str(function.__globals__.get("__name__"))
    if home == entry.module:
        return
    if _package(home) != _package(entry.module) and entry.scope != "global":
        raise _walks_out(entry, function.__qualname__, home)
    fact = f"{entry.target} is a function of {home}"
    raise TargetError(entry.place, fact, f"Write {home}:{function.__qualname__}", patch=entry.id, target=entry.target)


def _package(module: str) -> str:
    return module.partition(".")[0]


def _walks_out(entry: Entry, name: str, home: str) -> ScopeError:
    fact = f"{entry.target} walks out of {_package(entry.module)}: '{name}' belongs to {home}"
    remedy = "Patch the name that its module looks up, or declare 'scope: global' with 'scope_reason'"
    return ScopeError(entry.place, fact, remedy, patch=entry.id, target=entry.target)
