"""Finds who holds an object, by identity, and can make each holder hold another one.

Module namespaces and class attributes are swept by reading `__dict__`s, which wakes no lazy package. What else the
garbage collector knows (containers, defaults, closures, partials) costs two of its passes, whatever the number of
objects: that is done only for objects whose reference count says that somebody else holds them.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Undo = Callable[[], None]
Rebind = Callable[[Any], Undo]

_namespace: Callable[[types.ModuleType], dict[str, Any]] = vars(types.ModuleType)["__dict__"].__get__
_attributes = type.__dict__["__dict__"].__get__
_OWNED = (
    dict, list, set, tuple, types.CellType, types.MethodType, staticmethod, classmethod, property, frozenset,
    functools.partial,
)  # fmt: skip
_REBOUND_ALONE = (list, set, types.CellType, functools.partial)  # whoever owns them
_REBUILT = (tuple, types.MethodType, staticmethod, classmethod, property, frozenset)


@dataclasses.dataclass(slots=True)
class Holder:
    """One place that holds an object.

    Attributes:
        where: What it is, in words.
        module: The module whose file has it, if it is known.
        name: The name that it has there, if it has one.
        rebind: Makes it hold another object and returns what undoes that; None if it cannot be done.
        container: The object that holds it, for a refusal to name; None for a namespace, which `where` names.
    """

    where: str
    module: str | None
    name: str | None
    rebind: Rebind | None
    container: Any = None


def swept(objects: Sequence[Any], classes: bool = True) -> dict[int, list[Holder]]:
    """Returns the holders of objects among module globals and class attributes, by the objects' ids."""
    ids = {id(thing) for thing in objects}
    result: dict[int, list[Holder]] = {key: [] for key in ids}
    seen: set[int] = set()
    for key, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or key.startswith("torchport_patches."):
            continue
        names = _namespace(module)
        values = list(names.values())
        if id(names) not in seen and not ids.isdisjoint(map(id, values)):
            seen.add(id(names))
            _in_module(module, names, ids, result)
        for value in values if classes else ():
            if isinstance(value, type) and id(value) not in seen:
                seen.add(id(value))
                if not ids.isdisjoint(map(id, list(_attributes(value).values()))):
                    _in_class(value, ids, result)
    return result


def _in_module(module: types.ModuleType, names: dict[str, Any], ids: set[int], result: dict[int, list[Holder]]) -> None:
    for name, value in list(names.items()):
        if id(value) in ids:
            where = f"{module.__name__}.{name}"
            result[id(value)].append(Holder(where, module.__name__, name, functools.partial(_set_key, names, name)))


def _in_class(cls: type, ids: set[int], result: dict[int, list[Holder]]) -> None:
    for name, value in list(vars(cls).items()):
        if id(value) in ids:
            where = f"{cls.__module__}.{cls.__qualname__}.{name}"
            rebind = functools.partial(_set_attribute, cls, name)
            result[id(value)].append(Holder(where, cls.__module__, name, rebind))


def _set_key(mapping: dict[Any, Any], key: Any, value: Any) -> Undo:
    old = dict.__getitem__(mapping, key)
    dict.__setitem__(mapping, key, value)

    def undo() -> None:
        if dict.get(mapping, key) is value:
            dict.__setitem__(mapping, key, old)

    return undo


def _set_key_itself(mapping: dict[Any, Any], old: Any, new: Any) -> Undo:
    """Puts another object in the place of a key; the order of the keys stays."""
    items = [(new if key is old else key, value) for key, value in dict.items(mapping)]
    dict.clear(mapping)
    dict.update(mapping, items)
    return functools.partial(_set_key_back, mapping, new, old)


def _set_key_back(mapping: dict[Any, Any], old: Any, new: Any) -> None:
    if any(key is old for key in mapping):
        _set_key_itself(mapping, old, new)


def _set_attribute(cls: type, name: str, value: Any) -> Undo:
    old = vars(cls)[name]
    type.__setattr__(cls, name, value)

    def undo() -> None:
        if vars(cls).get(name) is value:
            type.__setattr__(cls, name, old)

    return undo


def _set_item(items: list[Any], index: int, value: Any) -> Undo:
    old = items[index]
    items[index] = value

    def undo() -> None:
        if index < len(items) and items[index] is value:
            items[index] = old

    return undo


def _set_cell(cell: types.CellType, value: Any) -> Undo:
    old = cell.cell_contents
    cell.cell_contents = value

    def undo() -> None:
        if cell.cell_contents is value:
            cell.cell_contents = old

    return undo


def _set_member(items: set[Any], old: Any, value: Any) -> Undo:
    items.remove(old)
    items.add(value)

    def undo() -> None:
        if value in items:
            items.remove(value)
            items.add(old)

    return undo


def _set_state(partial: functools.partial[Any], old: Any, value: Any) -> Undo:
    state: Any = partial.__reduce__()[2]
    function, arguments, keywords, names = state
    swap = functools.partial(_swapped, old, value)
    items = value if arguments is old else tuple(map(swap, arguments))
    changed = (swap(function), items, {k: swap(v) for k, v in keywords.items()}, names)
    partial.__setstate__(changed)  # type: ignore[attr-defined]
    return lambda: partial.__setstate__((function, arguments, keywords, names))  # type: ignore[attr-defined]


def _set_defaults(function: types.FunctionType, old: Any, value: tuple[Any, ...]) -> Undo:
    function.__defaults__ = value

    def undo() -> None:
        if function.__defaults__ is value:
            function.__defaults__ = old

    return undo


def _swapped(old: Any, new: Any, item: Any) -> Any:
    return new if item is old else item


def _rebuilt(holder: Any, old: Any, new: Any) -> Any:
    """Returns an immutable holder with another object in it."""
    swap = functools.partial(_swapped, old, new)
    if isinstance(holder, types.MethodType):
        return types.MethodType(swap(holder.__func__), swap(holder.__self__))
    if isinstance(holder, (staticmethod, classmethod)):
        return type(holder)(new)
    if isinstance(holder, property):
        return property(swap(holder.fget), swap(holder.fset), swap(holder.fdel), holder.__doc__)
    if hasattr(holder, "_fields") and isinstance(holder, tuple):
        return type(holder)(*map(swap, holder))
    return type(holder)(map(swap, holder))


def referring(reference: weakref.ref[Any], thing: Any) -> weakref.ref[Any] | None:
    """Returns a weak reference like another one, to another object; None for a kind that cannot be made anew."""
    if isinstance(reference, weakref.KeyedRef):
        return weakref.KeyedRef(thing, reference.__callback__, reference.key)
    return weakref.ref(thing, reference.__callback__) if type(reference) is weakref.ref else None


class Deep:
    """What the garbage collector knows about the holders of objects.

    Args:
        objects: What to find the holders of.
        own: Whether a referrer is torchport's: it is counted, and is no alias.
    """

    def __init__(self, objects: list[Any], own: Callable[[Any], bool]) -> None:
        self._subjects = {id(thing) for thing in objects}
        self._own = own
        modules = [m for m in list(sys.modules.values()) if isinstance(m, types.ModuleType)]
        self._modules = {id(_namespace(module)): module for module in modules}
        self._first = [r for r in gc.get_referrers(*objects) if r is not objects]
        self._owners: dict[int, list[Any]] = {}
        self._climb([r for r in self._first if not isinstance(r, _REBOUND_ALONE) and not own(r)])

    def _climb(self, referrers: list[Any]) -> None:
        """Finds the owners of the referrers, and theirs: a cell is a tuple's, and that a function's."""
        lists = [referrers, self._first]
        for _ in range(3):
            frontier = [r for r in referrers if isinstance(r, _OWNED) and self._is_unknown(r, lists)]
            if not frontier:
                return
            for referrer in frontier:
                self._owners[id(referrer)] = []
            referrers = gc.get_referrers(*frontier)
            lists += [frontier, referrers, *self._owners.values()]
            internal = {*map(id, lists), id(lists), id(self._owners)}
            for owner in referrers:
                if id(owner) not in internal:
                    for key in {id(thing) for thing in gc.get_referents(owner)} & self._owners.keys():
                        self._owners[key].append(owner)

    def _is_unknown(self, referrer: Any, lists: list[Any]) -> bool:
        return id(referrer) not in self._modules and id(referrer) not in self._owners and referrer is not lists

    def holders(self, thing: Any) -> tuple[list[Holder], int]:
        """Returns an object's holders, module globals aside, and how many references were seen in all."""
        subclasses: list[type] = type.__subclasses__(thing) if isinstance(thing, type) else []
        result = [Holder(f"its subclass {s.__module__}.{s.__qualname__}", None, None, None) for s in subclasses]
        references = 0
        for referrer in self._first:
            count = sum(1 for referent in gc.get_referents(referrer) if referent is thing)
            references += count
            skipped = id(referrer) in self._modules or id(referrer) in self._subjects or self._own(referrer)
            if count and isinstance(thing, type) and not skipped:
                skipped = self._is_anatomy(referrer, thing)
            if count and not skipped:
                result += self._holders_in(referrer, thing)
        return result, references

    def _is_anatomy(self, referrer: Any, thing: type) -> bool:
        """Returns whether a referrer belongs to a class itself, or to a subclass of it."""
        if isinstance(referrer, tuple):
            return any(isinstance(owner, type) for owner in self._owners.get(id(referrer), ()))
        if isinstance(referrer, types.CellType):
            return id(referrer) in _class_cells(thing)
        return isinstance(referrer, type) or getattr(referrer, "__objclass__", None) is thing

    def _holders_in(self, referrer: Any, thing: Any) -> list[Holder]:
        if isinstance(referrer, types.FrameType):
            code = referrer.f_code
            where = f"a local variable of {code.co_name} ({code.co_filename}:{referrer.f_lineno})"
            return [Holder(where, None, None, None)]
        if type(referrer) is thing:
            return [Holder(f"an instance of it, {thing.__qualname__}", None, None, None)]
        module = self._module_of(referrer)
        where = f"a {type(referrer).__name__}" + (f" of {module}" if module else "")
        rebinds: list[Rebind | None] = [*self._rebinds(referrer, thing)] or [None]
        return [Holder(where, module, None, rebind, referrer) for rebind in rebinds]

    def _module_of(self, referrer: Any, height: int = 3) -> str | None:
        if id(referrer) in self._modules:
            return self._modules[id(referrer)].__name__
        if isinstance(referrer, (type, types.FunctionType)):
            return str(referrer.__module__)
        above = self._owners.get(id(referrer), ()) if height else ()
        return next(filter(None, (self._module_of(owner, height - 1) for owner in above)), None)

    def _rebinds(self, referrer: Any, thing: Any) -> Iterator[Rebind | None]:
        owners = self._owners.get(id(referrer), ())
        if isinstance(referrer, _REBUILT):
            yield from self._rebuilding(referrer, thing)
        elif isinstance(referrer, types.CellType):
            yield functools.partial(_set_cell, referrer)
        elif isinstance(referrer, set):
            yield functools.partial(_set_member, referrer, thing)
        elif isinstance(referrer, functools.partial):
            yield functools.partial(_set_state, referrer, thing)
        elif isinstance(referrer, dict) and any(isinstance(owner, type) for owner in owners):
            cls = next(owner for owner in owners if isinstance(owner, type))
            for name in [n for n, value in vars(cls).items() if value is thing]:
                yield functools.partial(_set_attribute, cls, name)
        else:
            yield from _in_container(referrer, thing)

    def _rebuilding(self, referrer: Any, thing: Any) -> Iterator[Rebind | None]:
        for owner in self._owners.get(id(referrer), ()):
            if self._own(owner):
                continue
            if isinstance(owner, types.FunctionType) and owner.__defaults__ is referrer:
                yield functools.partial(_rebuild, referrer, thing, functools.partial(_set_defaults, owner, referrer))
            else:
                rebinds = list(self._rebinds(owner, referrer))
                if not rebinds or None in rebinds:
                    yield None  # one owner would keep the old one: then nothing is gained by the others
                for rebind in filter(None, rebinds):
                    yield functools.partial(_rebuild, referrer, thing, rebind)


def _class_cells(cls: type) -> set[int]:
    """Returns the ids of the cells through which a class's methods know it for `super()`."""
    cells: set[int] = set()
    for value in vars(cls).values():
        function = getattr(value, "__func__", getattr(value, "fget", value))
        while function is not None:
            if isinstance(function, types.FunctionType):
                names = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
                cells.update(id(cell) for name, cell in names if name == "__class__")
            function = getattr(function, "__dict__", {}).get("__wrapped__")
    return cells


def _rebuild(referrer: Any, old: Any, rebind: Rebind, new: Any) -> Undo:
    return rebind(_rebuilt(referrer, old, new))


def _in_container(container: Any, thing: Any) -> Iterator[Rebind | None]:
    """Yields what rebinds an item of a list, a value of a dict, or an attribute of an object.

    None stands for references that none of these explain: a field of an object in C, a slot, a default factory.
    """
    names = container if isinstance(container, dict) else getattr(container, "__dict__", None)
    referents = gc.get_referents(container)  # after `__dict__` was asked for: that may change who holds the values
    rebinds = list(_in_list(container, thing) if isinstance(container, list) else _in_names(names, thing))
    apart = any(referent is names for referent in referents)  # then the names' values are not among the referents
    explained = 0 if apart else len(rebinds)
    if sum(1 for referent in referents if referent is thing) > explained:
        yield None
    yield from rebinds


def _in_list(items: list[Any], thing: Any) -> Iterator[Rebind]:
    for index in [i for i, value in enumerate(items) if value is thing]:
        yield functools.partial(_set_item, items, index)


def _in_names(names: Any, thing: Any) -> Iterator[Rebind]:
    if not isinstance(names, dict):
        return
    for key in [k for k, value in list(names.items()) if value is thing]:
        yield functools.partial(_set_key, names, key)
    if any(key is thing for key in list(names)):
        yield functools.partial(_set_key_itself, names, thing)
