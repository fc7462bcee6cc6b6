"""Finds who holds an object: names in modules, and whatever else the garbage collector knows."""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from torchport.patch.live import registry

ABSENT = object()


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A place that refers to an object, which can be exchanged there."""

    kind: Literal["value", "attribute", "item", "in tuple", "in static method", "default", "key", "member"]
    #: The dict of a value or key, the class of an attribute, the list of an item, the set of a member, the
    #: `functools.singledispatch` function of a default. A tuple and a static method cannot be changed: for the object
    #: in them it is the place of the whole, which takes a new one.
    container: Any
    key: Any = None  #: The key of a value, the name of an attribute, the index of an item.

    def current(self) -> Any:
        """Returns the object at this place, or `ABSENT`. Not for keys and members: for these there is `exchange`."""
        container, key = self.container, self.key
        if self.kind == "in tuple":
            whole = container.current()
            return whole[key] if type(whole) is tuple and key < len(whole) else ABSENT
        if self.kind == "in static method":
            method = container.current()
            return method.__func__ if type(method) is staticmethod else ABSENT
        if self.kind == "item":
            return container[key] if key < len(container) else ABSENT
        if self.kind == "default":
            return container.registry.get(object, ABSENT)
        return vars(container).get(key, ABSENT) if self.kind == "attribute" else dict.get(container, key, ABSENT)

    def exchange(self, old: Any, new: Any) -> None:
        """Puts `new` in the place of `old`; does nothing if some other object is there by now."""
        container = self.container
        if self.kind == "key" and any(name is old for name in dict.keys(container)):
            items = [(new if name is old else name, value) for name, value in dict.items(container)]
            dict.clear(container)  # so that the order of the keys stays
            dict.update(container, items)
        elif self.kind == "member" and old in container:
            container.remove(old)
            container.add(new)
        elif self.kind not in ("key", "member") and self.current() is old:
            self.assign(new)

    def assign(self, value: Any) -> None:
        """Puts a value into this place. Not for keys and members: for these there is `exchange`."""
        container, key = self.container, self.key
        if self.kind == "in tuple":
            whole = container.current()
            container.assign((*whole[:key], value, *whole[key + 1 :]))
        elif self.kind == "in static method":
            container.assign(staticmethod(value))
        elif self.kind == "attribute":
            type.__setattr__(container, key, value)  # no metaclass has a say, and the method caches are dropped
        elif self.kind == "item":
            container[key] = value
        elif self.kind == "default":
            container.register(object, value)
        else:
            dict.__setitem__(container, key, value)


namespace: Callable[[types.ModuleType], dict[str, Any]] = vars(types.ModuleType)["__dict__"].__get__
# What may belong to something else, which a refusal names: a cell is a tuple's, and that a function's.
_OWNED = (
    dict, list, set, tuple, types.CellType, types.MethodType, staticmethod, classmethod, property, frozenset,
    functools.partial,
)  # fmt: skip
_NEEDS_NO_OWNER = (list, set)  # their items are exchanged whoever owns them


@dataclasses.dataclass(slots=True)
class Holder:
    """One place that holds an object."""

    where: str  #: In words, such as `up.model.attention` for a module's global, or `a list of up.model`.
    module: str | None = None  #: The module whose file has it, if it is known.
    name: str | None = None  #: The global's name.
    place: Place | None = None  #: Where the object can be exchanged. None if it cannot.
    #: The object that holds it, for a refusal to name. None for a namespace, which `where` names.
    container: Any = None


def names_of(objects: Sequence[Any]) -> dict[int, list[Holder]]:
    """Returns the module globals that are bound to objects, by the objects' ids."""
    ids = {id(thing) for thing in objects}
    result: dict[int, list[Holder]] = {key: [] for key in ids}
    seen: set[int] = set()
    for key, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or key.startswith("torchport_patches."):
            continue
        names = namespace(module)
        if id(names) not in seen and not ids.isdisjoint(map(id, list(names.values()))):
            seen.add(id(names))
            for name, value in list(names.items()):
                if id(value) in ids:
                    where = f"{module.__name__}.{name}"
                    result[id(value)].append(Holder(where, module.__name__, name, Place("value", names, name)))
    return result


def weak_references(thing: Any) -> list[Holder]:
    """Returns the weak references to a function as holders without a place; none for a class, which has many."""
    if isinstance(thing, type):
        return []
    ours = registry.substitutes.valuerefs()
    references = [known for known in weakref.getweakrefs(thing) if not any(known is reference for reference in ours)]
    return [Holder("an unknown holder", container=reference) for reference in references]


def thaw() -> None:
    """Unfreezes all objects of the garbage collector: `gc.get_referrers` passes over frozen ones."""
    if gc.get_freeze_count():
        gc.unfreeze()


def referrers_of(objects: list[Any]) -> list[Any]:
    """Returns what refers to objects, without their list, and without the tuple that Python 3.13 makes of arguments."""
    arguments = tuple(objects)
    return [r for r in gc.get_referrers(*arguments) if r is not objects and r is not arguments]


class Referrers:
    """What the garbage collector knows about the holders of objects."""

    def __init__(self, objects: list[Any], is_own: Callable[[Any], bool]) -> None:
        """Finds the referrers of objects, and up to three levels of owners; `is_own` says which are torchport's."""
        thaw()
        self._subjects = {id(thing) for thing in objects}
        self._is_own = is_own
        modules = [m for m in list(sys.modules.values()) if isinstance(m, types.ModuleType)]
        self._modules = {id(namespace(module)): module for module in modules}
        self._first = referrers_of(objects)
        self._owners: dict[int, list[Any]] = {}  #: What refers to a referrer, by the referrer's id.
        referrers = [r for r in self._first if not isinstance(r, _NEEDS_NO_OWNER) and not is_own(r)]
        # The lists of this search refer to the same objects, and are no holders.
        lists = [referrers, self._first]
        for _ in range(3):  # the longest row is function, tuple, cell, object
            known = self._modules | self._owners.keys()
            frontier = [r for r in referrers if isinstance(r, _OWNED) and id(r) not in known and r is not lists]
            if not frontier:
                return
            for referrer in frontier:
                self._owners[id(referrer)] = []
            referrers = referrers_of(frontier)
            lists += [frontier, referrers, *self._owners.values()]
            internal = {*map(id, lists), id(lists), id(self._owners)}
            for owner in referrers:
                if id(owner) not in internal:
                    for key in {id(thing) for thing in gc.get_referents(owner)} & self._owners.keys():
                        self._owners[key].append(owner)

    def holders(self, thing: Any) -> tuple[list[Holder], int]:
        """Returns an object's holders, module globals aside, and how many references were seen in all."""
        subclasses: list[type] = type.__subclasses__(thing) if isinstance(thing, type) else []
        result = [Holder(f"its subclass {cls.__module__}.{cls.__qualname__}") for cls in subclasses]
        references = 0
        for referrer in self._first:
            count = sum(1 for referent in gc.get_referents(referrer) if referent is thing)
            references += count
            # `names_of` finds the globals of modules.
            skipped = id(referrer) in self._modules or id(referrer) in self._subjects or self._is_own(referrer)
            if count and not skipped and isinstance(thing, type):
                skipped = self._belongs_to_class(referrer, thing)
            elif count and type(thing) is types.FunctionType:
                # A function's own cell leads to itself, as decorators of transformers make it.
                skipped = skipped or any(referrer is cell for cell in thing.__closure__ or ())
            if count and not skipped:
                result += self._holders_in(referrer, thing)
        return result, references

    def _belongs_to_class(self, referrer: Any, thing: type) -> bool:
        """Returns whether a referrer belongs to a class itself, or to a subclass: its bases, a `__class__` cell."""
        if isinstance(referrer, tuple):
            return any(isinstance(owner, type) for owner in self._owners.get(id(referrer), ()))
        if isinstance(referrer, types.CellType):
            return id(referrer) in _class_cells(thing)
        return isinstance(referrer, type) or getattr(referrer, "__objclass__", None) is thing

    def _holders_in(self, referrer: Any, thing: Any) -> list[Holder]:
        """Returns an object's holders in one referrer; each has a place where the object can be exchanged, or None."""
        if isinstance(referrer, types.FrameType):
            code = referrer.f_code
            where = f"a local variable of {code.co_name} ({code.co_filename}:{referrer.f_lineno})"
            return [Holder(where)]
        if type(referrer) is thing:
            return [Holder(f"an instance of it, {thing.__qualname__}")]
        module = self._module_of(referrer)
        where = f"a {type(referrer).__name__}" + (f" of {module}" if module else "")
        places: list[Place | None] = [*self._places(referrer, thing)] or [None]
        return [Holder(where, module, place=place, container=referrer) for place in places]

    def _module_of(self, referrer: Any, height: int = 3) -> str | None:
        """Returns the name of the module that a referrer or one of its owners belongs to; None if none does."""
        if id(referrer) in self._modules:
            return self._modules[id(referrer)].__name__
        if isinstance(referrer, (type, types.FunctionType)):
            return str(referrer.__module__)
        above = self._owners.get(id(referrer), ()) if height else ()
        return next(filter(None, (self._module_of(owner, height - 1) for owner in above)), None)

    def _places(self, referrer: Any, thing: Any) -> Iterator[Place | None]:
        """Yields the places of an object in a referrer; None for one where it cannot be exchanged."""
        classes = [owner for owner in self._owners.get(id(referrer), ()) if isinstance(owner, type)]
        if type(referrer) is tuple:
            indices = [index for index, value in enumerate(referrer) if value is thing]
            for whole in self._places_of(referrer):
                yield from (None if whole is None else Place("in tuple", whole, index) for index in indices)
        elif type(referrer) is staticmethod:
            for whole in self._places_of(referrer):
                yield None if whole is None else Place("in static method", whole)
        elif isinstance(referrer, set):
            yield Place("member", referrer)
        elif isinstance(referrer, dict) and classes:
            names = [name for name, value in list(vars(classes[0]).items()) if value is thing]
            yield from (Place("attribute", classes[0], name) for name in names)
        # The other kinds of `_OWNED` cannot be changed.
        elif not isinstance(referrer, _OWNED) or isinstance(referrer, (dict, list)):
            yield from _places_in(referrer, thing)

    def _places_of(self, immutable: Any) -> list[Place | None]:
        """Returns the places that refer to a tuple or static method; `[None]` if one of them cannot be changed."""
        places: list[Place | None] = []
        for owner in self._owners.get(id(immutable), ()):
            if not self._is_own(owner):
                places += [*self._places(owner, immutable)] or [None]
        # As a key or member a new tuple would have another hash. If one owner keeps the old tuple, all must.
        is_kept = any(place is None or place.kind in ("key", "member") for place in places)
        return [None] if is_kept else places


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


def _places_in(container: Any, thing: Any) -> Iterator[Place | None]:
    """Yields the places of an object in a list, a dict, or the attributes of another object. None stands for references
    that none of these explain: a field of an object in C, a slot, a default factory.
    """
    names = container if isinstance(container, dict) else getattr(container, "__dict__", None)
    referents = gc.get_referents(container)  # after `__dict__` was asked for: that may change who holds the values
    if isinstance(container, list):
        places = [Place("item", container, index) for index, value in enumerate(container) if value is thing]
    else:
        attributes = names if isinstance(names, dict) else {}
        places = [Place("value", attributes, key) for key, value in list(attributes.items()) if value is thing]
        if any(key is thing for key in list(attributes)):
            places += [Place("key", attributes)]
    has_dict = any(referent is names for referent in referents)  # then its values are no referents
    explained = 0 if has_dict else len(places)
    if sum(1 for referent in referents if referent is thing) > explained:
        yield None
    yield from places
