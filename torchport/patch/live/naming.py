"""Names an object by the expression that leads to it from a module or class, as `up.m.table['a'][1]`."""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

_namespace: Callable[[types.ModuleType], dict[str, Any]] = vars(types.ModuleType)["__dict__"].__get__
_attributes = type.__dict__["__dict__"].__get__
_HEIGHT = 5


def expression(thing: Any) -> str | None:
    """Returns the shortest expression that leads to an object. None if no module or class leads to it in five steps.

    Names are read from `__dict__`s, so that no lazy package is woken.
    """
    homes = {id(_namespace(m)): m.__name__ for m in list(sys.modules.values()) if isinstance(m, types.ModuleType)}
    level: list[tuple[Any, str]] = [(thing, "")]
    seen = {id(thing), id(level)}
    for _ in range(_HEIGHT):
        above: list[tuple[Any, str]] = []
        seen.add(id(above))
        for held, steps in level:
            for referrer in gc.get_referrers(held):
                name = _of_home(referrer, held, homes)
                if name is not None:
                    return f"{name}{steps}"
                if id(referrer) not in seen and not isinstance(referrer, types.FrameType):
                    seen.add(id(referrer))
                    above += [(owner, f"{step}{steps}") for owner, step in _steps(referrer, held)]
        level = above
    return None


def _of_home(referrer: Any, held: Any, homes: dict[int, str]) -> str | None:
    """Returns `module.name`, or `module.Class.name`, where a referrer is the namespace of a module or class."""
    if id(referrer) in homes:
        keys = (key for key, value in list(referrer.items()) if value is held)
        return next((f"{homes[id(referrer)]}.{key}" for key in keys), None)
    if isinstance(referrer, type):
        keys = (key for key, value in list(_attributes(referrer).items()) if value is held)
        return next((f"{referrer.__module__}.{referrer.__qualname__}.{key}" for key in keys), None)
    if isinstance(referrer, dict):
        owners = (owner for owner in gc.get_referrers(referrer) if isinstance(owner, type))
        return next(filter(None, (_of_home(owner, held, homes) for owner in owners)), None)
    return None


def _steps(referrer: Any, held: Any) -> Iterator[tuple[Any, str]]:
    """Yields the objects of which the source could name what a referrer holds, with the step from each."""
    if isinstance(referrer, dict):
        if any(key is held for key in list(dict.keys(referrer))):
            yield referrer, ""
        for key in [key for key, value in list(dict.items(referrer)) if value is held]:
            owners = [owner for owner in gc.get_referrers(referrer) if _attributes_of(owner) is referrer]
            yield from ((owner, f".{key}") for owner in owners)
            if not owners:
                yield referrer, f"[{key!r}]"
    elif isinstance(referrer, (set, frozenset)):
        yield referrer, ""  # a member has no name, and neither has a key
    elif isinstance(referrer, (types.FunctionType, functools.partial)) and type(held) is tuple:
        fields = ("__closure__", "__defaults__", "args")
        yield from ((referrer, f".{field}") for field in fields if getattr(referrer, field, None) is held)
    elif isinstance(referrer, (list, tuple)):
        yield from ((referrer, f"[{index}]") for index, value in enumerate(referrer) if value is held)
    else:
        names = _attributes_of(referrer)
        yield from ((referrer, f".{key}") for key, value in list((names or {}).items()) if value is held)


def _attributes_of(owner: Any) -> dict[str, Any] | None:
    """Returns an object's attributes. None for a module, whose names are its home's, and for what has none."""
    if isinstance(owner, (types.ModuleType, type, dict)):
        return None
    names = getattr(owner, "__dict__", None)
    return names if isinstance(names, dict) else None
