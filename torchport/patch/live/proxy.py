"""A call that is seen as the function it stands in for, whatever kind of function that is."""

from __future__ import annotations

import functools
import inspect
import pkgutil
import types
from collections.abc import Callable
from typing import Any


class Proxy:
    """Attributes, class and kind are those of the original: `inspect` sees no difference. Calls go elsewhere.

    The call gets the instance as its first argument, as a plain function does, and the proxy binds where the original
    does. It is equal to nothing but itself: whoever caches by function must not find what was cached for the original.
    """

    __slots__ = ("__weakref__", "_call", "_name", "_original")

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name) if name in _OF_PROXY else getattr(_original(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_original(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_original(self), name)

    def __dir__(self) -> list[str]:
        return dir(_original(self))

    def __repr__(self) -> str:
        return repr(_original(self))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call_of(self)(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        name = _name(self)
        return (pkgutil.resolve_name, (name,)) if name else _original(self).__reduce_ex__(protocol)

    def __copy__(self) -> Proxy:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Proxy:
        return self


_OF_PROXY = {"__call__", "__get__", "__reduce_ex__", "__copy__", "__deepcopy__"}
_original, _name, call_of = (vars(Proxy)[name].__get__ for name in ("_original", "_name", "_call"))


def proxy(original: Any, call: Callable[..., Any], name: str | None) -> Proxy:
    """Returns a proxy.

    Args:
        name: `module:path` that leads to it, by which it is pickled. None if there is none.
    """
    kind: Any = type(original)
    result = object.__new__(_class(kind))
    for slot, value in {"_original": original, "_call": call, "_name": name}.items():
        object.__setattr__(result, slot, value)
    return result


@functools.cache
def _class(kind: type) -> type[Proxy]:
    """Returns the class of proxies of a type: Python looks for methods such as `__len__` and `__get__` there."""
    inherited = {*dir(Proxy), "__class_getitem__", "__init_subclass__", "__subclasshook__"}
    special = {name: getattr(kind, name, None) for name in dir(kind) if name.startswith("__") and name.endswith("__")}
    methods = {n: _handed_on(method) for n, method in special.items() if callable(method) and n not in inherited}
    method = inspect.getattr_static(kind, "__call__", None)
    if isinstance(method, types.FunctionType):
        methods["__call__"] = _called_as(method)
    if hasattr(kind, "__get__"):
        methods["__get__"] = _bound
    return type("Proxy", (Proxy,), {**methods, "__slots__": ()})


def _handed_on(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: method(_original(self), *args, **kwargs)


def _called_as(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the call of a proxy with the signature of a method: `inspect` asks the class of a callable object."""

    def call(self: Proxy, *args: Any, **kwargs: Any) -> Any:
        return call_of(self)(*args, **kwargs)

    call.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    return call


def _bound(self: Proxy, instance: Any, owner: type | None = None) -> Any:
    return self if instance is None else types.MethodType(self, instance)
