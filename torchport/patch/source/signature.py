"""Checks that a replacement takes every call that its target takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from torchport.errors import SignatureError
from torchport.patch.declared.entry import Entry
from torchport.source.bindings import BY_NAME, POSITIONAL


def live_signature(function: Any) -> Signature | None:
    """Returns the signature of a live function or class. None for one in C that has none."""
    try:
        return inspect.signature(function)
    except (ValueError, TypeError):
        return None


def check(entry: Entry, target: Signature | None, loaded: Callable[..., Any], method: bool) -> None:
    """Checks the replacement or wrapper of an entry against its target.

    Args:
        target: The target's signature; None if it is not known.
        loaded: The replacement, or the wrapper, whose first parameter is the original.
        method: Whether the target's first parameter is never passed by name.
    """
    ours = live_signature(loaded)
    if target is None or ours is None:
        return
    if entry.kind == "wrap":
        parameters = list(ours.parameters.values())
        if not parameters or parameters[0].kind not in (*POSITIONAL, Parameter.VAR_POSITIONAL):
            fact = f"The wrapper '{entry.reference}' of '{entry.id}' has no parameter for the original"
            raise SignatureError(entry.place, fact, "Take the original as its first parameter", patch=entry.id)
        if parameters[0].kind is not Parameter.VAR_POSITIONAL:
            ours = ours.replace(parameters=parameters[1:])
    lacking = _lacking(target, ours, method)
    if lacking:
        fact = f"'{entry.reference}' {lacking}, unlike {entry.target}{_plain(target)}"
        remedy = "Give it the target's parameters, in its order and with defaults where it has them"
        raise SignatureError(entry.place, fact, remedy, patch=entry.id, target=entry.target)


def _plain(signature: Signature) -> str:
    bare = [
        p.replace(annotation=Parameter.empty, default=p.default if p.default is Parameter.empty else ...)
        for p in signature.parameters.values()
    ]
    return str(Signature(bare)).replace("=Ellipsis", "=...")


def _lacking(target: Signature, ours: Signature, method: bool) -> str | None:
    theirs, mine = list(target.parameters.values()), list(ours.parameters.values())
    kinds = {parameter.kind for parameter in mine}
    positional = [parameter for parameter in mine if parameter.kind in POSITIONAL]
    used: set[str] = set()
    for index, parameter in enumerate(p for p in theirs if p.kind in POSITIONAL):
        match = positional[index] if index < len(positional) else None
        exempt = (method and index == 0) or parameter.kind is Parameter.POSITIONAL_ONLY
        problem = _positional_lack(parameter, match, ours, kinds, exempt)
        if problem:
            return problem
        used.add(match.name if match else parameter.name)
    for parameter in (p for p in theirs if p.kind is Parameter.KEYWORD_ONLY):
        problem = _named_lack(parameter, ours, kinds)
        if problem:
            return problem
        used.add(parameter.name)
    for kind, mark in ((Parameter.VAR_POSITIONAL, "*args"), (Parameter.VAR_KEYWORD, "**kwargs")):
        if any(p.kind is kind for p in theirs) and kind not in kinds:
            return f"does not take {mark}"
    required = (p for p in mine if p.kind in (*POSITIONAL, Parameter.KEYWORD_ONLY) and p.default is Parameter.empty)
    return next((f"asks for '{p.name}'" for p in required if p.name not in used), None)


def _positional_lack(
    theirs: Parameter, match: Parameter | None, ours: Signature, kinds: set[Any], exempt: bool
) -> str | None:
    if match is None and Parameter.VAR_POSITIONAL not in kinds:
        return f"does not take '{theirs.name}' by position"
    if theirs.default is not Parameter.empty and match is not None and match.default is Parameter.empty:
        return f"asks for '{match.name}', which has a default"
    if exempt or (match is not None and match.name == theirs.name and match.kind in BY_NAME):
        return None
    named = ours.parameters.get(theirs.name)
    if match is None or named is None or named.kind is Parameter.POSITIONAL_ONLY:
        return _named_lack(theirs, ours, kinds)
    return f"has '{theirs.name}' in another place"


def _named_lack(theirs: Parameter, ours: Signature, kinds: set[Any]) -> str | None:
    match = ours.parameters.get(theirs.name)
    if match is None or match.kind not in BY_NAME:
        return None if Parameter.VAR_KEYWORD in kinds else f"does not take '{theirs.name}' by name"
    if theirs.default is not Parameter.empty and match.default is Parameter.empty:
        return f"asks for '{theirs.name}', which has a default"
    return None
