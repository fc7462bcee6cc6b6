"""The operators of a network while it is traced, and what the table of operators says of each."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torchport.engine import conformance
from torchport.engine.conformance import Form

_STOPS = re.compile("(for some inputs: )?(with [^ ]+: )?(raises|no lowering)")
_WORST = ("differs", "unknown", "mended", "same")


class DiffersError(Exception):
    """An operator would compute something else than PyTorch: its name, a verb with what follows it, and what helps."""

    def __init__(self, operator: str, how: str, cure: str = "Compute it with other operators, and write to a copy"):
        super().__init__(f"{operator}, which {how}")
        self.cure = cure


class _RefusedError(DiffersError):
    """The table of operators says so, or does not know: a card or a caller may accept the operator."""

    def __init__(self, operator: str, how: str) -> None:
        cure = "Compute it with other operators, or accept it under `operators` in the card, with the reason"
        super().__init__(operator, how, cure)


class Operators:
    """What a network calls, by what the table says of it.

    Args:
        accepted: The reason by name of each operator that may differ.
        strict: Whether one of which nobody knows whether it differs is refused, too.
    """

    def __init__(self, accepted: Mapping[str, str] = {}, strict: bool = False) -> None:
        self.accepted = accepted
        self.strict = strict
        self.found: dict[Form, tuple[str, str]] = {}

    def see(self, function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
        """Notes a call; returns whether it has a form that no sample has tried."""
        form = conformance.form_of(function, args, kwargs)
        if form in self.found:
            return self.found[form][0] == "unknown"
        state, what = conformance.state(form)
        name, _, overload = form.operator.rpartition(".")
        if state == "unknown" and name.endswith("_"):  # torchax computes `add_` by `add`
            state, what = conformance.state(dataclasses.replace(form, operator=f"{name.rstrip('_')}.{overload}"))
        stops = state == "differs" and _STOPS.match(what) is not None
        if stops:  # its own exception says more, if it does stop
            state = "unknown"
        if form.operator not in self.accepted:
            if state == "differs":
                raise _RefusedError(form.operator, f"differs from PyTorch's on torchax ({what})")
            if state == "unknown" and self.strict and not stops:
                raise _RefusedError(form.operator, f"no sample has compared with PyTorch's ({what})")
        self.found[form] = state, what
        return state == "unknown"

    def states(self) -> dict[str, str]:
        """Returns the state of each operator: the worst one of its forms."""
        states: dict[str, str] = {}
        for form, (state, _) in self.found.items():
            states[form.operator] = min(states.get(form.operator, "same"), state, key=_WORST.index)
        return states

    def unknown(self) -> str:
        """Returns the operators of which no sample has shown what they compute, each with what is unknown."""
        lines = {form.operator: what for form, (state, what) in self.found.items() if state == "unknown"}
        return "; ".join(f"{name} ({what})" for name, what in sorted(lines.items()))

    def row(self) -> dict[str, Any]:
        """Returns what a manifest says: how many are the same, and the names of all others, with what differs."""
        states = self.states()
        others: dict[str, Any] = {state: [] for state in _WORST if state != "same"}
        for form, (state, what) in sorted(self.found.items(), key=lambda found: found[0].operator):
            if state != "same":
                text = f"{form.operator}: {what}"
                if form.operator in self.accepted:
                    reason = self.accepted[form.operator]
                    text += f"; accepted: {reason}"
                others[state].append(text)
        return {"same": sum(state == "same" for state in states.values()), **{k: v for k, v in others.items() if v}}

    def text(self) -> str:
        """Returns one line: `112 operators: 110 same, 2 mended`. Those that differ or are unknown have their names."""
        states = self.states()
        parts = []
        for state in reversed(_WORST):
            names = sorted(name for name in states if states[name] == state)
            words = f"{len(names)} {state}"
            if state in ("differs", "unknown"):
                words += f" ({', '.join(names)})"
            if names:
                parts.append(words)
        return f"{len(states)} operators: {', '.join(parts)}"


_WATCHING: contextvars.ContextVar[Operators | None] = contextvars.ContextVar("operators", default=None)


@contextlib.contextmanager
def watching(operators: Operators | None) -> Iterator[None]:
    """Notes each operator that is traced in the context; None: notes none."""
    token = _WATCHING.set(operators)
    try:
        yield
    finally:
        _WATCHING.reset(token)


def watched() -> Operators | None:
    """Returns where operators are noted; None where they are not."""
    return _WATCHING.get()
