"""A call that is seen as the function it stands in for, whatever kind of function that is."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import wrapt


class Proxy(wrapt.ObjectProxy[Any]):
    """Attributes, class and kind are those of a function: `inspect` sees no difference. Calls go elsewhere.

    `wrapt.FunctionWrapper` binds the original to an instance first. Here the call gets the instance as its first
    argument, as a plain function does, and the proxy binds where the original does.

    Args:
        function: What it is seen as.
        call: What is called.
    """

    def __init__(self, function: Any, call: Callable[..., Any]) -> None:
        super().__init__(function)
        self._self_call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._self_call(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        binds = hasattr(type(self.__wrapped__), "__get__")
        return types.MethodType(self, instance) if binds and instance is not None else self

    def __copy__(self) -> Proxy:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Proxy:
        return self
