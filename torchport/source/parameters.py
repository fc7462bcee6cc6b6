"""The parameters of a function, as its source has them."""

from __future__ import annotations

import ast
import dataclasses
from inspect import Parameter, Signature
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef
POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
STARRED = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)

# Decorators of which the signature of what they make is known to be that of the function under them.
_KEEPING = {
    "staticmethod", "classmethod", "property", "cached_property", "cache", "lru_cache", "abstractmethod", "no_grad",
    "inference_mode", "disable", "override", "final", "deprecated",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class WrittenParameter:
    argument: ast.arg
    kind: Any
    default: ast.expr | None = None

    @property
    def name(self) -> str:
        return self.argument.arg


def parameters(function: Function | ast.Lambda) -> list[WrittenParameter]:
    spec = function.args
    positional = [*spec.posonlyargs, *spec.args]
    defaults = [None] * (len(positional) - len(spec.defaults)) + spec.defaults
    kinds = [POSITIONAL[0]] * len(spec.posonlyargs) + [POSITIONAL[1]] * len(spec.args)
    result = [WrittenParameter(*parameter) for parameter in zip(positional, kinds, defaults, strict=True)]
    if spec.vararg:
        result.append(WrittenParameter(spec.vararg, Parameter.VAR_POSITIONAL))
    for argument, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        result.append(WrittenParameter(argument, Parameter.KEYWORD_ONLY, default))
    if spec.kwarg:
        result.append(WrittenParameter(spec.kwarg, Parameter.VAR_KEYWORD))
    return result


def signature(function: Function) -> Signature:
    """Returns a function's signature without its decorators; `...` stands for every default."""
    bare = [
        Parameter(parameter.name, parameter.kind, default=Parameter.empty if parameter.default is None else ...)
        for parameter in parameters(function)
    ]
    return Signature(bare)


def written_signature(function: Function) -> Signature | None:
    """Returns a function's signature from its source. None if a decorator may have changed it."""
    for decorator in function.decorator_list:
        named = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = named.attr if isinstance(named, ast.Attribute) else getattr(named, "id", "")
        if name not in _KEEPING:
            return None
    return signature(function)
