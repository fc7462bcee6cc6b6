"""Finds a target in a live module. It reads `__dict__`s alone, so that no lazy package is woken on the way."""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import functools
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

from torchport.errors import TargetError, nearest
from torchport.patch.declared import Entry
from torchport.patch.live.holders import ABSENT, Place
from torchport.patch.rewriting import first_line
from torchport.patch.source.checks import walks_out
from torchport.source.bindings import Function


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """A name in a live namespace."""

    holder: Any  #: The module, class or object whose namespace it is.
    name: str
    raw: Any  #: The object of that name, descriptors unbound; for an inherited name the base's.
    in_holder: bool  #: Whether it stands in the holder's own namespace.
    path: tuple[Any, ...]  #: The objects on the way there, the module first: of `up.m:A.f` the module and `A`.
    #: Whether it is the default implementation of a `functools.singledispatch` function, which is the holder.
    is_default: bool = False

    @property
    def place(self) -> Place:
        """Where the holder refers to the object. Raises TypeError if the holder has no namespace to change."""
        if self.is_default:
            return Place("default", self.holder)
        if isinstance(self.holder, type):
            return Place("attribute", self.holder, self.name)
        return Place("value", vars(self.holder), self.name)

    def restore(self) -> None:
        """Puts the original back, or removes the name again if the holder only inherited it."""
        if self.in_holder:
            self.place.assign(self.raw)
        elif isinstance(self.holder, type):
            type.__delattr__(self.holder, self.name)
        else:
            del vars(self.holder)[self.name]


def locate(entry: Entry, module: types.ModuleType) -> Slot:
    """Returns the slot that an entry's target names; refuses a name that is not there."""
    path: list[Any] = [module]
    for depth, name in enumerate(entry.path):
        raw, in_holder = _find(path[-1], name)
        if raw is ABSENT:
            walked = entry.module + ":" + ".".join(entry.path[:depth]) if depth else entry.module
            known = [key for key in getattr(path[-1], "__dict__", {}) if not key.startswith("__")]
            fact, remedy = f"'{entry.id}' finds no '{name}' in {walked}", nearest(name, known)
            if len(remedy) > 200:
                remedy = "Look the target up in the upstream that is installed"
            raise TargetError(entry.place, fact, remedy, patch=entry.id, target=entry.target)
        path.append(raw)
    return Slot(path[-2], name, raw, in_holder, tuple(path[:-1]))


def check_scope(entry: Entry, slot: Slot) -> None:
    """Refuses a target whose path leads through an object of another package, unless the entry's scope is global."""
    if entry.scope == "global":
        return
    # `slot.path` begins with the module, and ends before the target.
    for name, thing in zip(entry.path, slot.path[1:], strict=False):
        owner = thing if isinstance(thing, (type, types.FunctionType)) else type(thing)
        home = thing.__name__ if isinstance(thing, types.ModuleType) else str(owner.__module__)
        if home.partition(".")[0] != entry.package:
            raise walks_out(entry, name, home)


def check_function(entry: Entry, function: types.FunctionType) -> None:
    """Refuses a function that another module defines: its code is shared with that module's callers."""
    home = str(function.__globals__.get("__name__"))
    if home == entry.module:
        return
    if home.partition(".")[0] != entry.package and entry.scope != "global":
        raise walks_out(entry, function.__qualname__, home)
    fact = f"{entry.target} is a function of {home}"
    raise TargetError(entry.place, fact, f"Write {home}:{function.__qualname__}", patch=entry.id, target=entry.target)


def _find(holder: Any, name: str) -> tuple[Any, bool]:
    """Returns a holder's or its bases' object of a name, or `ABSENT`, and whether the holder has the name itself."""
    names = vars(holder) if isinstance(holder, type) else getattr(holder, "__dict__", {})
    if name in names:
        return names[name], True
    if isinstance(holder, types.ModuleType):
        return ABSENT, False
    classes = holder.__mro__[1:] if isinstance(holder, type) else type(holder).__mro__
    for base in classes:
        if name in vars(base):
            return vars(base)[name], False
    return ABSENT, False


def function_in(raw: Any) -> Any:
    """Returns the function inside a static or class method, a property, or a cached property. Otherwise `raw`."""
    if isinstance(raw, (staticmethod, classmethod)):
        return raw.__func__
    if isinstance(raw, property):
        return raw.fget
    if isinstance(raw, functools.cached_property):
        return raw.func
    return raw


def forget(raw: Any) -> None:
    """Empties the caches (`functools.lru_cache`) around a function whose code was changed."""
    for layer in layers(raw):
        if isinstance(layer, functools._lru_cache_wrapper):
            layer.cache_clear()


def layers(raw: Any) -> Iterator[Any]:
    """Yields a function and all callables under its descriptor and decorators, outermost first. A decorator leads on by
    the `__wrapped__` that `functools.wraps` leaves, and by what its closure holds.
    """
    pending, seen = [function_in(raw)], set()
    while pending:
        current = pending.pop(0)
        current = current.__func__ if isinstance(current, types.MethodType) else current
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        wrapped = getattr(current, "__dict__", {}).get("__wrapped__")
        if wrapped is not None:
            pending.append(function_in(wrapped))
        for cell in (current.__closure__ or ()) if isinstance(current, types.FunctionType) else ():
            with contextlib.suppress(ValueError):  # the cell is empty
                content = function_in(cell.cell_contents)
                if callable(content):
                    pending.append(content)


def function_of(raw: Any, module: str, node: ast.stmt | None) -> types.FunctionType | None:
    """Returns the function under the decorators in `raw` that comes from `node`, a `def` in `module`. If no function
    does, returns the outermost, or None without a function. If `node` is no `def`, the first without `__wrapped__`.
    """
    functions = [layer for layer in layers(raw) if isinstance(layer, types.FunctionType)]
    if not isinstance(node, Function):
        return next((f for f in functions if "__wrapped__" not in vars(f)), None)
    line = first_line(node)
    for function in functions:
        code, home = function.__code__, function.__globals__.get("__name__")
        if (code.co_name, code.co_firstlineno, home) == (node.name, line, module):
            return function
    return functions[0] if functions else None


def shaped_as(entry: Entry, raw: Any, function: Any) -> Any:
    """Returns a function wrapped as the original `raw` is: a static or class method, a property, or not at all."""
    try:
        if isinstance(raw, (staticmethod, classmethod)):
            shaped: Any = type(raw)(function)
            shaped.__dict__ = raw.__dict__
            return shaped
        if isinstance(raw, property):
            return raw.getter(function)
    except TypeError as error:
        fact = f"{entry.target} is a {type(raw).__name__}, which cannot be made of a function: {error}"
        raise TargetError(entry.place, fact, "Patch a function that it calls", patch=entry.id) from error
    if isinstance(raw, functools.cached_property):
        shaped = copy.copy(raw)
        shaped.func = function
        return shaped
    return function


def held_elsewhere(slot: Slot) -> bool:
    """Returns whether more than its namespace refers to a slot's object; True for a class, which refers to itself."""
    if isinstance(slot.raw, type):
        return True
    inner = function_in(slot.raw)
    nested = inner is not slot.raw
    if weakref.getweakrefcount(inner):
        return True
    del inner
    # Always counted: the namespace, the slot and the argument of the call; the descriptor and the argument.
    return sys.getrefcount(slot.raw) > 3 or (nested and sys.getrefcount(function_in(slot.raw)) > 2)
