"""Functions that stand in for others: they count their calls, and fall through to the original in the end.

The counter is plain Python, so that tracing counts as well as running. A stand-in for a plain function is a plain
function, because that is faster: a wrapped call through a `Proxy` takes 2.2 times the time (`benchmarks/patching.py`).
The proxy, which `wrapt` makes transparent, is for what a plain function cannot be: a coroutine or generator function,
an `lru_cache`, a `functools.partial`, a function in C.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torchport.patch.live.registry import registry


@dataclasses.dataclass(slots=True)
class Calls:
    """How often a patch was called.

    Attributes:
        count: The number of calls.
    """

    count: int = 0


Retire = Callable[[Any, Any], None]
"""Makes a stand-in, its first argument, do what the original does, its second."""

_COROUTINES = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE
_SPECIAL_KINDS = _COROUTINES | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_OF_CACHES = ("cache_clear", "cache_info", "cache_parameters")


def parts_of_stand_ins() -> set[int]:
    """Returns the ids of all that stand-ins consist of, down to their cells."""
    ids: set[int] = set()
    for stand_in in list(registry.stand_ins.values()):
        ids.add(id(stand_in))
        call = stand_in if type(stand_in) is types.FunctionType else stand_in._self_call
        ids.update(id(cell) for cell in call.__closure__ or ())
        ids.update((id(vars(call)), id(call.__kwdefaults__)))
        ids.update(id(vars(call).get(name)) for name in _OF_CACHES)  # methods of the original
    return ids


def _is_plain(function: Any) -> bool:
    """Returns whether a plain function can stand in for another one unnoticed."""
    return type(function) is types.FunctionType and not function.__code__.co_flags & _SPECIAL_KINDS


def _stand_in(call: Callable[..., Any], function: Callable[..., Any]) -> Any:
    """Returns a call that is seen as a function: itself if that is plain, or else a proxy."""
    if _is_plain(function):
        return _register(functools.update_wrapper(call, function))
    # Imported here: hardly a patch needs wrapt, whose import takes 25 ms.
    from torchport.patch.live.proxy import Proxy

    return _register(Proxy(function, call))


def _register(stand_in: Any) -> Any:
    registry.stand_ins[id(stand_in)] = stand_in
    return stand_in


def counting(function: Callable[..., Any], calls: Calls, original: Any = None) -> tuple[Callable[..., Any], Retire]:
    """Returns a stand-in that counts its calls and makes them of a replacement, and what retires it.

    A stand-in that somebody has captured cannot be taken away from them. Retired, it does what the original does.

    Args:
        function: The replacement.
        calls: The counter.
        original: What it takes the place of. Of an `lru_cache` it keeps the methods.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.count += 1
        return function(*args, **kwargs)

    def retire(stand_in: Any, original: Any) -> None:
        nonlocal function, calls
        function, calls = original, Calls()
        if type(stand_in) is not types.FunctionType:
            stand_in.__wrapped__ = original

    stand_in = _stand_in(call, function)
    if stand_in is call and isinstance(original, functools._lru_cache_wrapper):
        vars(call).update({name: getattr(original, name) for name in _OF_CACHES})
    return stand_in, retire


def wrapping(
    wrapper: Callable[..., Any], original: Callable[..., Any], calls: Calls
) -> tuple[Callable[..., Any], Retire]:
    """Returns a stand-in that calls `wrapper(original, ...)` and counts, and what retires it."""
    active = True

    def call(*args: Any, **kwargs: Any) -> Any:
        if not active:
            return original(*args, **kwargs)
        calls.count += 1
        return wrapper(original, *args, **kwargs)

    def retire(*_: Any) -> None:
        nonlocal active
        active = False

    return _stand_in(call, original), retire


def uncounted(function: Callable[..., Any]) -> tuple[Callable[..., Any], Retire | None]:
    """Returns a stand-in that adds no frame to a replacement's calls, and what retires it.

    It is a copy of the function, whose code is exchanged in the end. What has no code of its own to exchange (a
    closure, a class) stands in itself, and cannot be retired.
    """
    if not _is_plain(function) or function.__closure__:
        return function, None
    copy = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return _register(functools.update_wrapper(copy, function)), _fall_through


def _fall_through(function: types.FunctionType, original: Any) -> None:
    """Gives a function without a closure the code of a call of the original, which it has as a default."""

    def call(*args: Any, _torchport_original: Any, **kwargs: Any) -> Any:
        return _torchport_original(*args, **kwargs)

    function.__code__, function.__defaults__ = call.__code__, None
    function.__kwdefaults__ = {"_torchport_original": original}


def counted_class(replacement: type, calls: Calls) -> Callable[[], None]:
    """Counts the instances of a replacement class. Returns what stops the counting.

    The class stays itself: `isinstance`, pickling and subclasses see no stand-in.
    """
    has_init = "__init__" in vars(replacement)
    original: Any = type.__getattribute__(replacement, "__init__")

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        calls.count += 1
        original(self, *args, **kwargs)

    type.__setattr__(replacement, "__init__", init)

    def stop() -> None:
        if has_init:
            type.__setattr__(replacement, "__init__", original)
        else:
            type.__delattr__(replacement, "__init__")

    return stop
