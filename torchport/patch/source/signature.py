"""Whether a replacement can be called in every way in which its target can."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from torchport.errors import SignatureError
from torchport.patch.declared.entry import Entry

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)

# Decorators of which the signature of what they make is known to be that of the function under them.
_KEEPING = {
    "staticmethod", "classmethod", "property", "cached_property", "cache", "lru_cache", "abstractmethod", "no_grad",
    "inference_mode", "disable", "override", "final", "deprecated",
}  # fmt: skip


def live_signature(function: Any) -> Signature | None:
    """Returns the signature of a live function or class; None for one in C that does not tell."""
    try:
        return inspect.signature(function)
    except (ValueError, TypeError):
        return None


def written_signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Signature | None:
    """Returns a function's signature from its source; None if a decorator may have changed it."""
    for decorator in function.decorator_list:
        named = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = named.attr if isinstance(named, ast.Attribute) else getattr(named, "id", "")
        if name not in _KEEPING:
            return None
    spec = function.args
    positional = [*spec.posonlyargs, *spec.args]
    first_default = len(positional) - len(spec.defaults)
    made = []
    for index, argument in enumerate(positional):
        kind = _POSITIONAL[0] if index < len(spec.posonlyargs) else _POSITIONAL[1]
        made.append(_parameter(argument, kind, index >= first_default))
    if spec.vararg:
        made.append(_parameter(spec.vararg, Parameter.VAR_POSITIONAL, False))
    for argument, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        made.append(_parameter(argument, Parameter.KEYWORD_ONLY, default is not None))
    if spec.kwarg:
        made.append(_parameter(spec.kwarg, Parameter.VAR_KEYWORD, False))
    return Signature(made)


def _parameter(argument: ast.arg, kind: Any, default: bool) -> Parameter:
    return Parameter(argument.arg, kind, default=... if default else Parameter.empty)


def check(entry: Entry, target: Signature | None, loaded: Callable[..., Any], method: bool) -> None:
    """Checks the replacement or wrapper of an entry against its target.

    Args:
        entry: The entry, which replaces or wraps.
        target: The target's signature; None if it is not known.
        loaded: The replacement, or the wrapper, whose first parameter is the original.
        method: Whether the target's first parameter is never passed by name.

    Raises:
        SignatureError: Some call that the target takes would fail.
    """
    given = live_signature(loaded)
    if target is None or given is None:
        return
    if entry.kind == "wrap":
        given = _without_original(entry, given)
    lacking = _lacking(target, given, method)
    if lacking:
        fact = f"'{entry.reference}' {lacking}, unlike {entry.target}{_plain(target)}"
        remedy = "Give it the target's parameters, in its order and with defaults where it has them"
        raise SignatureError(entry.place, fact, remedy, patch=entry.id, target=entry.target)


def _without_original(entry: Entry, given: Signature) -> Signature:
    parameters = list(given.parameters.values())
    if not parameters or parameters[0].kind not in (*_POSITIONAL, Parameter.VAR_POSITIONAL):
        fact = f"The wrapper '{entry.reference}' of '{entry.id}' has no parameter for the original"
        raise SignatureError(entry.place, fact, "Take the original as its first parameter", patch=entry.id)
    return given if parameters[0].kind is Parameter.VAR_POSITIONAL else given.replace(parameters=parameters[1:])


def _plain(signature: Signature) -> str:
    bare = [
        p.replace(annotation=Parameter.empty, default=p.default if p.default is Parameter.empty else ...)
        for p in signature.parameters.values()
    ]
    return str(Signature(bare)).replace("=Ellipsis", "=...")


def _lacking(target: Signature, given: Signature, method: bool) -> str | None:
    """Returns what a replacement lacks to take all calls of its target, or None."""
    theirs, ours = list(target.parameters.values()), list(given.parameters.values())
    kinds = {parameter.kind for parameter in ours}
    positional = [parameter for parameter in ours if parameter.kind in _POSITIONAL]
    used: set[str] = set()
    for index, parameter in enumerate(p for p in theirs if p.kind in _POSITIONAL):
        own = positional[index] if index < len(positional) else None
        exempt = (method and index == 0) or parameter.kind is Parameter.POSITIONAL_ONLY
        problem = _positional_lack(parameter, own, given, kinds, exempt)
        if problem:
            return problem
        used.add(own.name if own else parameter.name)
    for parameter in (p for p in theirs if p.kind is Parameter.KEYWORD_ONLY):
        problem = _named_lack(parameter, given, kinds)
        if problem:
            return problem
        used.add(parameter.name)
    for kind, mark in ((Parameter.VAR_POSITIONAL, "*args"), (Parameter.VAR_KEYWORD, "**kwargs")):
        if any(p.kind is kind for p in theirs) and kind not in kinds:
            return f"does not take {mark}"
    required = (p for p in ours if p.kind in (*_POSITIONAL, Parameter.KEYWORD_ONLY) and p.default is Parameter.empty)
    return next((f"asks for '{p.name}'" for p in required if p.name not in used), None)


def _positional_lack(
    theirs: Parameter, own: Parameter | None, given: Signature, kinds: set[Any], exempt: bool
) -> str | None:
    if own is None and Parameter.VAR_POSITIONAL not in kinds:
        return f"does not take '{theirs.name}' by position"
    if theirs.default is not Parameter.empty and own is not None and own.default is Parameter.empty:
        return f"asks for '{own.name}', which has a default"
    if exempt or (own is not None and own.name == theirs.name and own.kind in _BY_NAME):
        return None
    named = given.parameters.get(theirs.name)
    if own is None or named is None or named.kind is Parameter.POSITIONAL_ONLY:
        return _named_lack(theirs, given, kinds)
    return f"has '{theirs.name}' in another place"


def _named_lack(theirs: Parameter, given: Signature, kinds: set[Any]) -> str | None:
    own = given.parameters.get(theirs.name)
    if own is None or own.kind not in _BY_NAME:
        return None if Parameter.VAR_KEYWORD in kinds else f"does not take '{theirs.name}' by name"
    if theirs.default is not Parameter.empty and own.default is Parameter.empty:
        return f"asks for '{theirs.name}', which has a default"
    return None
