"""Python's objects as a graph: how those that can be changed are read, filled and made.

A thing that can be changed is a node, which has parts, such as the items of a list. A term says a part's value without
any thing in it, so that what one call did to some things can be done to others that are alike.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import gc
import sys
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy
import torch

from torchport import engine
from torchport.patch.live import holders

SMALL = 2**16  # bytes of an array of numpy
LONG = 10_000
"""Items of the longest container that is looked through; a longer one, such as a tokenizer's words, is opaque."""
INTERNAL = frozenset(vars(torch.nn.Module()))
_COUNTS = {"_parameters", "_buffers", "_modules", "training"}
"""Internal attributes of a module that count where it is no submodule, such as one in a plain list."""
_LIBRARIES = {"torch", "torchax", "jax", "numpy", "torchport", *sys.stdlib_module_names} - {"types", "collections"}
"""Packages whose objects are no model's: a logger knows all others. `types` has SimpleNamespace."""
_CONSTANTS = {bool, int, str, bytes, torch.dtype, torch.device, torch.Size, type(None)}
_ITEMS = list, dict, set, collections.deque

LEVELS = 6  # of holders of a tensor's holders
MOST = 100  # of them, at each level
_CARRIERS = {"builtins", "functools", "collections", "types"}

Part = tuple[str, Any]
"""What a node has: an attribute or a slot of a name, an item of a key or a number, a cell's content."""


@dataclasses.dataclass(frozen=True)
class Reference:
    """Stands for something that has a number among those of its kind.

    Attributes:
        kind: A `thing` that can be changed; a tensor that is an `input` of the program, or an `output`; or a `table`: a
            tensor of the host whose values are in the program.
        number: From 0 on.
    """

    kind: str
    number: int


@dataclasses.dataclass(frozen=True)
class Whole:
    """A value that cannot be changed and holds others, such as a tuple."""

    type: type
    terms: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Opaque:
    """A value that nobody looks into. It is known by its type and value, or by its identity if it has no hash."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Opaque) or type(self.value) is not type(other.value):
            return False
        return self.value is other.value or (is_hashable(self.value) and bool(self.value == other.value))

    def __hash__(self) -> int:
        return hash(self.value) if is_hashable(self.value) else id(self.value)


def is_hashable(value: Any) -> bool:
    """Returns whether a value is known by what it is equal to."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def constant(value: Any) -> tuple[type, Any] | None:
    """Returns a constant as a term, which is its type and what it is known by; None for another value."""
    kind = type(value)
    if kind in _CONSTANTS:
        return kind, value
    if kind is float:
        return kind, value.hex()  # 0.0 is not -0.0, and NaN is NaN
    return (kind, repr(value)) if kind is complex else None


def inner(value: Any) -> Sequence[Any] | None:
    """Returns what a value holds that cannot be changed itself; None for another value."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, slice):
        return value.start, value.stop, value.step
    if type(value) is functools.partial:
        return value.func, value.args, tuple(value.keywords.items())
    if isinstance(value, types.MethodType) and not isinstance(value.__self__, type):
        return value.__func__, value.__self__
    return None


def is_node(
    value: Any,
    *,
    is_long: bool = False,
) -> bool:
    """Returns whether a value is a thing that can be changed, and that a model's code may change.

    Args:
        value: Of any type.
        is_long: Whether a container of any length is one.
    """
    kind: Any = type(value)
    if kind is types.CellType:
        return True
    if isinstance(value, numpy.ndarray):
        return kind is numpy.ndarray and not value.dtype.hasobject and value.nbytes <= SMALL
    library = is_of_library(kind.__module__)
    if isinstance(value, _ITEMS):
        return (kind.__module__ == "builtins" or not library) and (is_long or len(value) <= LONG)
    if isinstance(value, types.FunctionType):
        has_parts = value.__closure__ or value.__defaults__ or value.__kwdefaults__ or vars(value)
        return bool(has_parts) and not is_of_library(value.__module__)
    if isinstance(value, torch.nn.Module):
        return not isinstance(value, torch.jit.ScriptModule)
    if isinstance(value, type | types.ModuleType | torch.Tensor | enum.Enum) or library:
        return False
    return hasattr(value, "__dict__") or bool(_slots(kind))


def is_of_library(module: Any, but: Collection[str] = ()) -> bool:
    """Returns whether a module of this name is no model's.

    Args:
        module: As `__module__` says it, which may be no text.
        but: Packages that do not count.
    """
    package = str(module).partition(".")[0]
    return package in _LIBRARIES and package not in but


@functools.cache
def _slots(kind: Any) -> dict[str, types.MemberDescriptorType]:
    found = [(cls, name, each) for cls in kind.__mro__ if "__slots__" in vars(cls) for name, each in vars(cls).items()]
    return {f"{c.__qualname__}.{name}": each for c, name, each in found if isinstance(each, types.MemberDescriptorType)}


def parts(thing: Any) -> dict[Part, Any]:
    """Returns what a node has."""
    found: dict[Part, Any] = {}
    if isinstance(thing, types.CellType):
        try:
            return {("cell", ""): thing.cell_contents}
        except ValueError:  # nothing is bound to its name yet
            return {}
    if isinstance(thing, numpy.ndarray):
        return {("array", ""): (str(thing.dtype), thing.shape, thing.tobytes())}
    if isinstance(thing, list | collections.deque):
        found = {("item", number): value for number, value in enumerate(thing)}
    elif isinstance(thing, dict):
        found = {("item", key): value for key, value in dict.items(thing)}
    elif isinstance(thing, set):
        found = {("set", ""): frozenset(thing)}
    elif isinstance(thing, types.FunctionType):
        found = {("closure", ""): thing.__closure__, ("default", ""): thing.__defaults__}
        found["keyword default", ""] = thing.__kwdefaults__
    hidden = INTERNAL - _COUNTS if isinstance(thing, torch.nn.Module) else ()
    for name, value in getattr(thing, "__dict__", {}).items():
        if name not in hidden:
            found["attribute", name] = value
    kind: Any = type(thing)
    for name, slot in _slots(kind).items():
        try:
            found["slot", name] = slot.__get__(thing)
        except AttributeError:  # nothing is bound to it
            continue
    return found


def fill(thing: Any, new: Mapping[Part, Any]) -> None:
    """Gives a node other parts."""
    if isinstance(thing, types.CellType):
        del thing.cell_contents
        for value in new.values():
            thing.cell_contents = value
        return
    if isinstance(thing, numpy.ndarray):
        dtype, shape, data = new["array", ""]
        thing[...] = numpy.frombuffer(data, dtype).reshape(shape)
        return
    items = {part[1]: value for part, value in new.items() if part[0] == "item"}
    if isinstance(thing, list):
        list.__setitem__(thing, slice(None), [*items.values()])
    elif isinstance(thing, collections.deque):
        thing.clear()
        thing.extend(items.values())
    elif isinstance(thing, dict):
        # Not its own methods: a subclass may do more.
        base = collections.OrderedDict if isinstance(thing, collections.OrderedDict) else dict
        base.clear(thing)
        for key, value in items.items():
            base.__setitem__(thing, key, value)
    elif isinstance(thing, set):
        set.clear(thing)
        set.update(thing, new["set", ""])
    if hasattr(thing, "__dict__"):
        _set_attributes(thing, {name: value for (kind, name), value in new.items() if kind == "attribute"})
    kind: Any = type(thing)
    for name, slot in _slots(kind).items():
        if ("slot", name) in new:
            slot.__set__(thing, new["slot", name])
        elif ("slot", name) in parts(thing):
            slot.__delete__(thing)


def _set_attributes(thing: Any, new: Mapping[str, Any]) -> None:
    attributes = vars(thing)
    hidden = INTERNAL - _COUNTS if isinstance(thing, torch.nn.Module) else ()
    for name in [name for name in attributes if name not in new and name not in hidden]:
        del attributes[name]
    attributes.update(new)


class Blank(NamedTuple):
    """How things are made that calls make."""

    type: type
    model: Any

    @classmethod
    def describe(cls, thing: Any) -> Blank:
        """Returns how things are made that are like another, without its parts."""
        if isinstance(thing, numpy.ndarray):
            return cls(type(thing), thing.copy())
        maximum = thing.maxlen if isinstance(thing, collections.deque) else None
        return cls(type(thing), getattr(thing, "default_factory", maximum))

    def new(self) -> Any:
        if self.type is types.CellType:
            return types.CellType()
        if self.type is numpy.ndarray:
            return self.model.copy()
        base: Any = next(each for each in self.type.__mro__ if not each.__flags__ & _HEAP_TYPE)
        thing = base.__new__(self.type)
        if isinstance(thing, collections.deque):
            collections.deque.__init__(thing, (), self.model)
        elif isinstance(thing, collections.defaultdict):
            thing.default_factory = self.model
        return thing


_HEAP_TYPE = 1 << 9
"""Source: Py_TPFLAGS_HEAPTYPE, a class that Python code defines."""


def walk(term: Any) -> Iterator[Any]:
    yield term
    if isinstance(term, Whole):
        for each in term.terms:
            yield from walk(each)


def make(term: Any, values: Mapping[str, Sequence[Any]]) -> Any:
    """Returns a term's value.

    Args:
        term: Of any kind.
        values: What references stand for, by kind.
    """
    if isinstance(term, Reference):
        return values[term.kind][term.number]
    if isinstance(term, Whole):
        return _whole(term.type, [make(each, values) for each in term.terms])
    if isinstance(term, Opaque):
        return term.value
    kind, value = term
    if kind is float:
        return float.fromhex(value)
    return complex(value) if kind is complex else value


def _whole(kind: type, values: list[Any]) -> Any:
    if kind is functools.partial:
        function, arguments, keywords = values
        return functools.partial(function, *arguments, **dict(keywords))
    if kind in (slice, types.MethodType):
        return kind(*values)
    if hasattr(kind, "_make"):
        return kind._make(values)
    if kind.__module__ in ("builtins", "torch.return_types"):
        return kind(values)
    return tuple.__new__(kind, values)


def holder_of_traced() -> str:
    """Returns the global or the class of a model's that holds a tensor of the last trace; empty if there is none.

    Caches of JAX's hold some, too, and do no harm: nobody reads them.
    """
    if not engine.alive():
        return ""
    holders.thaw()
    gc.collect()  # who is only waiting to be collected holds nothing
    named = reversed([*sys.modules.items()])  # `__main__` has a second name where processes were started
    modules = {id(vars(module)): name for name, module in named if hasattr(module, "__dict__")}
    things: list[Any] = engine.alive()
    known = {id(modules)}
    for _ in range(LEVELS):
        known.update(map(id, (things, *things)))
        referrers = [r for r in gc.get_referrers(*things) if id(r) not in known]
        for referrer in referrers:
            name = modules.get(id(referrer), "")
            if name and not is_of_library(name):
                return f"'{_name(referrer, things)}' of the module '{name}'"
            if isinstance(referrer, type) and not is_of_library(referrer.__module__):
                return f"the class '{referrer.__qualname__}'"
        things = [r for r in referrers if id(r) not in modules and _carries(r)]
        things = things[:MOST]
        if not things:
            break
    return ""


def _carries(thing: Any) -> bool:
    """Returns whether what holds a thing holds what is in it, in a model's eyes."""
    if isinstance(thing, types.FrameType | type):
        return False
    return engine.is_traced(thing) or not is_of_library(type(thing).__module__, but=_CARRIERS)


def _name(attributes: dict[str, Any], things: Sequence[Any]) -> str:
    for name, value in attributes.items():
        if any(value is thing for thing in things):
            return name
    return ""
