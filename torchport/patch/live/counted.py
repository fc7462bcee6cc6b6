"""Counts calls with a plain Python counter, so that tracing counts as well as running."""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(slots=True)
class Calls:
    """How often a patch was called.

    Attributes:
        count: The number of calls.
    """

    count: int = 0


Retire = Callable[[Any], None]

_made: weakref.WeakSet[types.FunctionType] = weakref.WeakSet()


def own_parts() -> set[int]:
    """Returns the ids of the cells and dicts of all functions made here, and of their set: none of them is an alias."""
    parts: set[int] = {id(vars(_made)["data"])}
    for function in list(_made):
        parts.update(id(cell) for cell in function.__closure__ or ())
        parts.add(id(vars(function)))
    return parts


def is_ours(function: Any) -> bool:
    """Returns whether a function was made here."""
    return isinstance(function, types.FunctionType) and function in _made


def _ours(function: Callable[..., Any], like: Callable[..., Any]) -> Callable[..., Any]:
    functools.update_wrapper(function, like)
    if isinstance(function, types.FunctionType):
        _made.add(function)
    return function


def counted(function: Callable[..., Any], calls: Calls) -> tuple[Callable[..., Any], Retire]:
    """Returns a function that counts its calls, and one that makes it fall through to what it is given.

    A wrapper that somebody has captured cannot be taken away from them; retired, it does what the original does.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.count += 1
        return function(*args, **kwargs)

    def retire(original: Any) -> None:
        nonlocal function, calls
        function, calls = original, Calls()

    return _ours(call, function), retire


def wrapped(
    wrapper: Callable[..., Any], original: Callable[..., Any], calls: Calls
) -> tuple[Callable[..., Any], Retire]:
    """Returns a function that calls `wrapper(original, ...)` and counts, and one that retires it."""
    active = True

    def call(*args: Any, **kwargs: Any) -> Any:
        if not active:
            return original(*args, **kwargs)
        calls.count += 1
        return wrapper(original, *args, **kwargs)

    def retire(_: Any) -> None:
        nonlocal active
        active = False

    return _ours(call, original), retire


def counted_class(replacement: type, calls: Calls) -> Callable[[], None]:
    """Counts the instances of a replacement class; returns what stops the counting.

    The class stays itself: `isinstance`, pickling and subclasses see no stand-in.
    """
    own = "__init__" in vars(replacement)
    original: Any = type.__getattribute__(replacement, "__init__")

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        calls.count += 1
        original(self, *args, **kwargs)

    type.__setattr__(replacement, "__init__", init)

    def stop() -> None:
        if own:
            type.__setattr__(replacement, "__init__", original)
        else:
            type.__delattr__(replacement, "__init__")

    return stop
