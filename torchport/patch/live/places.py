"""The places in which an object is exchanged for another one: the forms of rebinding.

Each form is there because an upstream of the shipped patches needs it; `docs/patches.md` names them. A holder of any
other form is refused by name.
"""

from __future__ import annotations

import dataclasses
from typing import Any

ABSENT = object()


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Somewhere an object stands, and can be exchanged."""

    def now(self) -> Any:
        """Returns what stands there, or `ABSENT`."""
        raise NotImplementedError

    def put(self, value: Any) -> None:
        raise NotImplementedError

    def exchange(self, old: Any, new: Any) -> None:
        """Puts `new` where `old` stands. What somebody else has put there since stays."""
        if self.now() is old:
            self.put(new)


@dataclasses.dataclass(frozen=True, slots=True)
class Value(Place):
    """The value of a dict's key: a name of a module, an attribute of an object, an entry of a table."""

    names: dict[Any, Any]
    key: Any

    def now(self) -> Any:
        return dict.get(self.names, self.key, ABSENT)

    def put(self, value: Any) -> None:
        dict.__setitem__(self.names, self.key, value)


@dataclasses.dataclass(frozen=True, slots=True)
class ClassAttribute(Place):
    """An attribute of a class. It is set through `type`, so that no metaclass has a say."""

    owner: type
    name: str

    def now(self) -> Any:
        return vars(self.owner).get(self.name, ABSENT)

    def put(self, value: Any) -> None:
        type.__setattr__(self.owner, self.name, value)


@dataclasses.dataclass(frozen=True, slots=True)
class Item(Place):
    items: list[Any]
    index: int

    def now(self) -> Any:
        return self.items[self.index] if self.index < len(self.items) else ABSENT

    def put(self, value: Any) -> None:
        self.items[self.index] = value


@dataclasses.dataclass(frozen=True, slots=True)
class TupleItem(Place):
    """An item of a tuple that stands in another place. The tuple is made anew there."""

    outer: Place
    index: int

    def now(self) -> Any:
        whole = self.outer.now()
        return whole[self.index] if type(whole) is tuple and self.index < len(whole) else ABSENT

    def put(self, value: Any) -> None:
        whole = self.outer.now()
        self.outer.put((*whole[: self.index], value, *whole[self.index + 1 :]))


@dataclasses.dataclass(frozen=True, slots=True)
class StaticMethod(Place):
    """The function of a static method that stands in another place. The static method is made anew there."""

    outer: Place

    def now(self) -> Any:
        method = self.outer.now()
        return method.__func__ if type(method) is staticmethod else ABSENT

    def put(self, value: Any) -> None:
        self.outer.put(staticmethod(value))


@dataclasses.dataclass(frozen=True, slots=True)
class Key(Place):
    """A key of a dict. The order of the keys stays."""

    names: dict[Any, Any]

    def exchange(self, old: Any, new: Any) -> None:
        if any(key is old for key in dict.keys(self.names)):
            items = [(new if key is old else key, value) for key, value in dict.items(self.names)]
            dict.clear(self.names)
            dict.update(self.names, items)


@dataclasses.dataclass(frozen=True, slots=True)
class Member(Place):
    members: set[Any]

    def exchange(self, old: Any, new: Any) -> None:
        if old in self.members:
            self.members.remove(old)
            self.members.add(new)
