"""Python's mutable objects as nodes of a graph: how a node is read, filled and made.

A node has parts, such as the items of a list. A term describes a part's value, with numbers in place of the nodes and
tensors in it. So what one call did to its nodes can be done to other nodes of the same kind.
"""

from __future__ import annotations

import array
import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

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
_FOLLOWED = {"types", "collections", "argparse", "queue", "weakref"}
"""Packages of Python's own whose objects hold what is a model's. `types` has SimpleNamespace."""
_LIBRARIES = {"torch", "torchax", "jax", "numpy", "torchport", *sys.stdlib_module_names} - _FOLLOWED
"""Packages whose objects are no model's: a logger knows all others."""
_CONSTANTS = {bool, int, str, bytes, torch.dtype, torch.device, torch.Size, type(None)}
_ITEMS = list, dict, set, collections.deque
_BYTES = bytearray, array.array
_VALUES = int, float, complex, str, bytes, frozenset
"""An object of a subclass of these, such as a text with attributes, has a value that it was made with."""
_BASES = {object, dict, collections.OrderedDict, collections.defaultdict, types.SimpleNamespace, *_ITEMS, *_VALUES}
ITERATORS = {"builtins", "itertools"}
"""Where the types are of iterators that a call advances; a file is no such iterator."""

LEVELS = 6  # of referrers that are followed: those of a tensor, those of these, and so on
MOST = 100  # referrers that are followed at each level
_CARRIERS = {"builtins", "functools", "collections", "types"}

Part = tuple[str, Any]
"""The kind and the name of a part: an attribute or a slot, an item with its key or number, a cell's content."""


@dataclasses.dataclass(frozen=True)
class Reference:
    """The part of a term that refers to a mutable object, which is a node of the graph, or to a tensor."""

    #: A `thing`, which is a node; a tensor that is an `input` or an `output` of the program; a `table`, a tensor of the
    #: host whose values are in the program; a `weight` or a buffer of the module; or a `new` buffer.
    kind: str
    number: Any  #: Its number among those of its kind, from 0 on; of a weight its name.


@dataclasses.dataclass(frozen=True)
class Whole:
    """The term of an immutable value with other values in it, such as a tuple; `attributes` are those of a subclass."""

    type: type
    terms: tuple[Any, ...]
    attributes: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Opaque:
    """The term of a value that is not looked into. Two are equal by type and value, or by identity without a hash."""

    value: Any

    def __eq__(self, other: object) -> bool:
        """Returns whether two values have one type and are equal, or the same object if they have no hash."""
        if not isinstance(other, Opaque) or type(self.value) is not type(other.value):
            return False
        if isinstance(self.value, numpy.generic):  # 0.0 is not -0.0
            return bool(self.value.tobytes() == other.value.tobytes())
        return self.value is other.value or (is_hashable(self.value) and bool(self.value == other.value))

    def __hash__(self) -> int:
        return hash(self.value) if is_hashable(self.value) else id(self.value)


def is_hashable(value: Any) -> bool:
    """Returns whether a value can be hashed."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def constant(value: Any) -> tuple[type, Any] | None:
    """Returns the term of a constant, its type and a value to compare: `(int, 3)`; None for any other value."""
    kind = type(value)
    if kind is torch.device and value.type == "jax":  # of a traced tensor, which is on the host for the caller
        return kind, torch.device("cpu")
    if kind in _CONSTANTS:
        return kind, value
    if kind is float:
        return kind, value.hex()  # 0.0 is not -0.0, and NaN is NaN
    return (kind, repr(value)) if kind is complex else None


def values_in(value: Any) -> Sequence[Any] | None:
    """Returns the values in an immutable value, such as the items of a tuple; None for any other value."""
    if isinstance(value, tuple):
        return value
    if type(value) is frozenset:
        return (*value,)
    if isinstance(value, slice | range):  # two ranges with other ends may be equal
        return value.start, value.stop, value.step
    if type(value) is functools.partial:
        return value.func, value.args, tuple(value.keywords.items())
    if isinstance(value, types.MethodType) and not isinstance(value.__self__, type):
        return value.__func__, value.__self__
    return None


def _is_simple(value: Any) -> bool:
    """Returns whether a dict's key has no mutable object and no tensor in it; keys may be tuples and sets of values."""
    if isinstance(value, tuple | frozenset | set):
        return {*map(type, value)} <= _CONSTANTS or all(map(_is_simple, value))
    return not (isinstance(value, torch.Tensor) or is_node(value) or values_in(value))


def is_node(value: Any, *, is_long: bool = False) -> bool:
    """Returns whether a value is a mutable object of a model; containers above `LONG` items only if `is_long`."""
    kind: Any = type(value)
    if kind is types.CellType:
        return True
    if isinstance(value, numpy.ndarray):
        is_plain = value.dtype == object or not value.dtype.hasobject
        return is_plain and not isinstance(value, numpy.memmap) and value.nbytes <= SMALL
    if isinstance(value, _BYTES):
        return len(value) <= SMALL
    library = is_of_library(kind.__module__)
    if isinstance(value, _ITEMS):
        return (kind.__module__ == "builtins" or not library) and (is_long or len(value) <= LONG)
    if isinstance(value, types.FunctionType):
        return not is_of_library(value.__module__)
    if isinstance(value, torch.nn.Module):
        return not isinstance(value, torch.jit.ScriptModule)
    opaque = type, types.ModuleType, torch.Tensor, enum.Enum, weakref.ref
    if isinstance(value, opaque) or library or _base(kind) not in _BASES:
        return False
    return hasattr(value, "__dict__") or bool(_slots(kind))


def is_of_library(module: Any, but: Collection[str] = ()) -> bool:
    """Returns whether a module, by its `__module__`, is of a library in `_LIBRARIES`, and of no package in `but`."""
    package = str(module).partition(".")[0]
    return package in _LIBRARIES and package not in but


def _base(kind: Any) -> Any:
    """Returns the class whose `__new__` makes a class's objects: the first in its MRO in `_BASES` or written in C."""
    return next(each for each in kind.__mro__ if each in _BASES or not each.__flags__ & _HEAP_TYPE)


@functools.cache
def _slots(kind: Any) -> dict[str, types.MemberDescriptorType]:
    """Returns the descriptors of a class's `__slots__`: `{"Point.x": <member 'x' of 'Point' objects>}`."""
    members: dict[str, types.MemberDescriptorType] = {}
    for cls in kind.__mro__:
        for name, member in vars(cls).items() if "__slots__" in vars(cls) else ():
            if isinstance(member, types.MemberDescriptorType):
                members[f"{cls.__qualname__}.{name}"] = member
    return members


def parts(thing: Any) -> dict[Part, Any]:
    """Returns the parts of a node, a mutable object, by kind and name: items or content, attributes, slots. The list
    `["a", "b"]` has the parts `{("item", 0): "a", ("item", 1): "b"}`.
    """
    result: dict[Part, Any] = {}
    if isinstance(thing, types.CellType):
        try:
            return {("cell", ""): thing.cell_contents}
        except ValueError:  # nothing is bound to its name yet
            return {}
    if isinstance(thing, numpy.ndarray):
        data = numpy.asarray(thing)
        result["array", ""] = data.dtype, data.shape, (*data.flat,) if data.dtype.hasobject else data.tobytes()
    elif isinstance(thing, _BYTES):
        result["bytes", ""] = getattr(thing, "typecode", ""), bytes(thing)
    elif isinstance(thing, _VALUES):
        result["value", ""] = _base(type(thing))(thing)
    elif isinstance(thing, list | collections.deque):
        result = {("item", number): value for number, value in enumerate(thing)}
    elif isinstance(thing, dict):
        items = (collections.OrderedDict if isinstance(thing, collections.OrderedDict) else dict).items(thing)
        # A key with a tensor or an object in it is a part's value, not its name, so that the key gets a term, too.
        is_plain = {*map(type, dict.keys(thing))} <= _CONSTANTS or all(_is_simple(key) for key, _ in items)
        result = {("item", key): value for key, value in items} if is_plain else {("pairs", ""): (*items,)}
    elif isinstance(thing, set):
        result = {("set", ""): frozenset(thing)}
    elif isinstance(thing, types.FunctionType):
        result = {("closure", ""): thing.__closure__, ("default", ""): thing.__defaults__}
        result["keyword default", ""] = thing.__kwdefaults__
    hidden = INTERNAL - _COUNTS if isinstance(thing, torch.nn.Module) else ()
    for name, value in getattr(thing, "__dict__", {}).items():
        if name not in hidden:
            result["attribute", name] = value
    return result | slots(thing)


def slots(thing: Any) -> dict[Part, Any]:
    """Returns the values of a mutable object's `__slots__`, without unbound slots: `{("slot", "Point.x"): 3}`."""
    values: dict[Part, Any] = {}
    kind: Any = type(thing)
    for name, slot in _slots(kind).items():
        with contextlib.suppress(AttributeError):  # nothing is bound to it
            values["slot", name] = slot.__get__(thing)
    return values


def fill(thing: Any, new: Mapping[Part, Any]) -> None:
    """Replaces the parts of a node, a mutable object, in place: items or content, attributes, slots; see `parts`."""
    if isinstance(thing, types.CellType):
        del thing.cell_contents
        for value in new.values():  # 0 or 1
            thing.cell_contents = value
        return
    if isinstance(thing, numpy.ndarray):
        dtype, shape, values = new["array", ""]
        data = numpy.fromiter(values, dtype) if dtype.hasobject else numpy.frombuffer(values, dtype)
        numpy.asarray(thing)[...] = data.reshape(shape)
    elif isinstance(thing, _BYTES):
        code, values = new["bytes", ""]
        thing[:] = array.array(code, values) if code else values
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
        for key, value in (*items.items(), *new.get(("pairs", ""), ())):
            base.__setitem__(thing, key, value)
    elif isinstance(thing, set):
        set.clear(thing)
        set.update(thing, new["set", ""])
    if hasattr(thing, "__dict__"):
        attributes = {name: value for (kind, name), value in new.items() if kind == "attribute"}
        hidden = INTERNAL - _COUNTS if isinstance(thing, torch.nn.Module) else ()
        for name in [name for name in vars(thing) if name not in attributes and name not in hidden]:
            del vars(thing)[name]
        vars(thing).update(attributes)
    fill_slots(thing, new)


def fill_slots(thing: Any, new: Mapping[Part, Any]) -> None:
    """Replaces the values of a mutable object's `__slots__` by `new`; deletes the values of other slots."""
    bound = slots(thing)
    kind: Any = type(thing)
    for name, slot in _slots(kind).items():
        if ("slot", name) in new:
            slot.__set__(thing, new["slot", name])
        elif ("slot", name) in bound:
            slot.__delete__(thing)


def blank(thing: Any) -> Callable[[], Any]:
    """Returns a function that makes empty objects of a node's type; arrays and bytes, of fixed size, are copied."""
    kind: Any = type(thing)
    if kind is types.CellType:
        return types.CellType
    if isinstance(thing, (numpy.ndarray, *_BYTES)):
        return functools.partial(copy.copy, copy.copy(thing))
    base = _base(kind)
    if isinstance(thing, _VALUES):
        return functools.partial(base.__new__, kind, base(thing))
    length = thing.maxlen if isinstance(thing, collections.deque) else None
    factory = thing.default_factory if isinstance(thing, collections.defaultdict) else None

    def new() -> Any:
        made = base.__new__(kind)
        if isinstance(made, collections.deque):
            collections.deque.__init__(made, (), length)
        elif isinstance(made, collections.defaultdict):
            made.default_factory = factory
        return made

    return new


def photo(values: Iterable[Any]) -> list[tuple[Any, dict[Part, Any]]]:
    """Returns the mutable objects and the tensors that values lead to, each with its content at this moment, for a
    later call of `changes`. Of a Python module among the values, the content is global constants, lists, dicts and
    sets.
    """
    contents: dict[int, tuple[Any, dict[Part, Any]]] = {}
    waiting = [*values]
    modules = {id(value) for value in waiting if isinstance(value, types.ModuleType)}
    while waiting:
        value = waiting.pop()
        if id(value) in contents or constant(value) is not None or type(value).__module__.startswith("torchport."):
            continue
        if (inner := values_in(value)) is not None:
            waiting.extend(inner)
        elif id(value) in modules or isinstance(value, torch.Tensor) or is_node(value):
            content = _content(value)
            contents[id(value)] = value, content
            waiting.extend(content.values() if not isinstance(value, torch.Tensor) else ())
    return [*contents.values()]


def _content(thing: Any) -> dict[Part, Any]:
    """Returns the parts of a node; of a tensor a stamp that a write changes; of a Python module its global data."""
    if isinstance(thing, torch.Tensor):
        return {("written", ""): engine.stamp(thing)}
    if isinstance(thing, types.ModuleType):
        names = ((name, value) for name, value in vars(thing).items() if name[:2] != "__")
        return {("global", n): v for n, v in names if constant(v) is not None or isinstance(v, _ITEMS)}
    return parts(thing)


def changes(before: Iterable[tuple[Any, dict[Part, Any]]]) -> list[tuple[Any, Part, Any, Any]]:
    """Returns the parts of objects that changed since a `photo`: object, part, old and new value (None if absent)."""
    return [
        (thing, part, old.get(part), new.get(part))
        for thing, old, new in ((thing, old, _content(thing)) for thing, old in before)
        for part in {**old, **new}
        if part not in old or part not in new or not _is_still(old[part], new[part])
    ]


def _is_still(before: Any, after: Any) -> bool:
    """Returns whether a part's value is unchanged: the same object, an equal constant, or a tuple of these."""
    if type(before) is tuple and type(after) is tuple:
        return len(before) == len(after) and all(map(_is_still, before, after))
    if isinstance(before, frozenset | numpy.dtype):
        return bool(before == after)
    return before is after or (constant(before) is not None and constant(before) == constant(after))


def are_alike(left: Any, right: Any, pairs: set[tuple[int, int]]) -> bool:
    """Returns whether two values make the same program: equal constants and tensors, and objects with parts alike.
    `pairs` has the ids of objects that count as alike. It gets those of the objects compared here, as an object may
    refer to itself.
    """
    if left is right or (id(left), id(right)) in pairs:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return (left.shape, left.dtype) == (right.shape, right.dtype) and (left.is_meta or torch.equal(left, right))
    if isinstance(left, frozenset | numpy.dtype):
        return bool(left == right)
    if (term := constant(left)) is not None:
        return term == constant(right)
    if (lefts := values_in(left)) is not None:
        rights = values_in(right) or ()
        return len(lefts) == len(rights) and all(are_alike(*pair, pairs) for pair in zip(lefts, rights, strict=True))
    if not is_node(left) or (isinstance(left, types.FunctionType) and left.__code__ != right.__code__):
        return Opaque(left) == Opaque(right)
    pairs.add((id(left), id(right)))
    left_parts = parts(left)
    right_parts = parts(right)
    if [*left_parts] != [*right_parts]:
        return False
    return all(are_alike(value, right_parts[part], pairs) for part, value in left_parts.items())


_HEAP_TYPE = 1 << 9
"""Source: Py_TPFLAGS_HEAPTYPE, a class that Python code defines."""


def references(term: Any, *kinds: str) -> list[Reference]:
    """Returns the references in a term that are of some kinds, such as `input`."""
    if isinstance(term, Reference):
        return [term] if term.kind in kinds else []
    inner = (*term.terms, *(value for _, value in term.attributes)) if isinstance(term, Whole) else ()
    return [reference for part in inner for reference in references(part, *kinds)]


def value_of(term: Any, values: Mapping[str, Any]) -> Any:
    """Returns the value that a term describes; `values` has objects and tensors for its references, by kind and number.
    With `{"input": [x]}` the term `Whole(tuple, (Reference("input", 0), (int, 3)))` gives `(x, 3)`.
    """
    if isinstance(term, Reference):
        return values[term.kind][term.number]
    if isinstance(term, Whole):
        whole = _rebuilt(term.type, [value_of(each, values) for each in term.terms])
        if term.attributes:
            vars(whole).update((n, value_of(each, values)) for n, each in term.attributes)
        return whole
    if isinstance(term, Opaque):
        return term.value
    kind, value = term
    if kind is float:
        return float.fromhex(value)
    return complex(value) if kind is complex else value


def _rebuilt(kind: type, values: list[Any]) -> Any:
    """Returns an immutable value of a type, made of the values in `values`: the reverse of `values_in`."""
    if kind is functools.partial:
        function, arguments, keywords = values
        return functools.partial(function, *arguments, **dict(keywords))
    if kind in (slice, range, types.MethodType):
        return kind(*values)
    if hasattr(kind, "_make"):
        return kind._make(values)
    if kind.__module__ in ("builtins", "torch.return_types"):
        return kind(values)
    return tuple.__new__(kind, values)


def holder_of_traced() -> str:
    """Returns, in words, an object that still refers to a tensor of the last trace: a global or a class of a model if
    the search finds one, else an object's type. Returns "" if there is no such object.
    """
    if not engine.live_tensors():
        return ""
    holders.thaw()
    gc.collect()  # garbage that is not collected yet does not count
    things: list[Any] = engine.live_tensors()
    if not things:
        return ""
    named = reversed([*sys.modules.items()])  # `__main__` has a second name where processes were started
    modules = {id(vars(module)): name for name, module in named if hasattr(module, "__dict__")}
    known, first = {id(modules)}, ""  # known: the objects that were looked at, and the search's own lists and dicts
    # From the tensors outwards: their referrers, the referrers of these, and so on.
    for _ in range(LEVELS):
        known.update(map(id, (things, *things)))
        referrers = [r for r in holders.referrers_of(things) if id(r) not in known]
        for referrer in referrers:
            if found := _named_holder(referrer, things, modules.get(id(referrer), "")):
                return found
        things = [each for each in referrers if id(each) not in modules and _is_followed(each)]
        if not things:
            break
        first = first or f"a {type(things[0]).__name__}"
        things = things[:MOST]
    return first or "something"


def _named_holder(referrer: Any, things: Sequence[Any], module: str) -> str:
    """Returns, in words, the global or the model's class that refers to one of `things`; "" if `referrer` is neither.

    Args:
        module: The name of the module whose globals `referrer` is; "" if it is no module's globals.
    """
    if module and not is_of_library(module):
        names = (key for key, value in referrer.items() if any(value is thing for thing in things))
        return f"'{next(names, '')}' of the module '{module}'"
    if isinstance(referrer, type) and not is_of_library(referrer.__module__):
        return f"the class '{referrer.__qualname__}'"
    return ""


def _is_followed(referrer: Any) -> bool:
    """Returns whether the search goes on to an object's referrers: of libraries, only lists and the like."""
    if isinstance(referrer, types.FrameType | type):
        return False
    return engine.is_traced(referrer) or not is_of_library(type(referrer).__module__, but=_CARRIERS)
