"""A stand-in that is seen as the function it stands in for, whatever kind of function that is."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import wrapt


class Proxy(wrapt.ObjectProxy[Any]):
    """Counts its calls. Attributes, class and kind are those of a function: `inspect` sees no difference.

    `wrapt.FunctionWrapper` binds the original to an instance first. Here a wrapper gets the original unbound, as a
    plain stand-in gives it, and the proxy binds where the original does.

    Args:
        function: The original of a wrapper, or a replacement.
        wrapper: It is called with the function first. None calls the function alone.
        calls: The counter.
    """

    def __init__(self, function: Any, wrapper: Callable[..., Any] | None, calls: Any) -> None:
        super().__init__(function)
        self._self_wrapper = wrapper
        self._self_calls = calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._self_calls.count += 1
        if self._self_wrapper is None:
            return self.__wrapped__(*args, **kwargs)
        return self._self_wrapper(self.__wrapped__, *args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        binds = hasattr(type(self.__wrapped__), "__get__")
        return types.MethodType(self, instance) if binds and instance is not None else self

    def __copy__(self) -> Proxy:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Proxy:
        return self

    def retire(self, original: Any) -> None:
        """Makes it do what the original does, and counts no more for the patch."""
        self.__wrapped__ = original
        self._self_wrapper = None
        self._self_calls = type(self._self_calls)()
