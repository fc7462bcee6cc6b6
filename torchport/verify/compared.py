"""Two records of a loop, compared by name: each value that one passes on beside the other's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchport.stages import outputs
from torchport.verify.facts import Seam
from torchport.verify.trace import NEGATIVE, Called, Stepped, Trace

ROUNDINGS = 2
"""Roundings of a value's dtype that the same arithmetic in another order may make. Both loops run on one host."""

FIRST = ("timesteps", "sigmas")
"""Fields of a scheduler that are compared first: the others follow from them."""

RENAMED = {"model_output": "guidance", "sample": "latents"}
"""What the arguments of a scheduler's step are called here: the combined prediction is what guidance makes."""

SHOWN = 4
"""Numbers of a tensor that a person is shown."""

STEPS = "number of scheduler steps"
"""The name of a seam."""

LOOP = "denoise"
"""The stage of a loop's seams."""


def of_values(
    stage: str, original: Mapping[str, Any], port: Mapping[str, Any], step: int | None = None, suffix: str = ""
) -> Iterator[Seam]:
    """Yields the seams of named values: of each its dtype, and itself.

    Args:
        stage: The stage that makes or takes them.
        original: The original's: trees of tensors, numbers and texts.
        port: The port's.
        step: The step, from 0.
        suffix: What is said of them beside their names.
    """
    ours, theirs = outputs.leaves(port), outputs.leaves(original)
    masks = [x for x in theirs.values() if isinstance(x, torch.Tensor) and x.ndim == 2]
    others = [x for x in ours.values() if isinstance(x, torch.Tensor) and x.ndim == 2]
    for name in [*theirs, *(name for name in ours if name not in theirs)]:
        one, other = theirs.get(name), ours.get(name)
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            distance = 0.0 if _is_same(one, other) else math.inf
            yield Seam(f"{name}{suffix}", stage, step, _words(one), _words(other), distance, 0.0)
            continue
        if one.dtype != other.dtype:
            first, second = (str(x.dtype).removeprefix("torch.") for x in (one, other))
            yield Seam(f"dtype of {name}{suffix}", stage, step, first, second, math.inf, 0.0)
        one, other = _without_padding(one, other, masks), _without_padding(other, one, others)
        where = _worst(one, other)
        words = _words(one, where), _words(other, where)
        yield Seam(f"{name}{suffix}", stage, step, *words, _distance(one, other), _allowed(one))


def of_traces(original: Trace, port: Trace) -> Iterator[Seam]:
    """Yields the seams of two loops, in the order in which the loops pass them on."""
    counts = str(len(original.steps)), str(len(port.steps))
    yield Seam(STEPS, LOOP, None, *counts, _unless(counts[0] == counts[1]), 0.0)
    for n, (theirs, ours) in enumerate(zip(original.steps, port.steps, strict=False)):
        constant = _constant(original.steps[0], theirs) & _constant(port.steps[0], ours) if n else set()
        suffix = " of the scheduler" if n else ""
        step = n if n else None
        yield from of_values(LOOP, _state(theirs, constant), _state(ours, constant), step, suffix)
        if n == 0:
            noise, other = ({"noise": each.arguments.get("sample")} for each in (theirs, ours))
            yield from of_values(LOOP, noise, other)
        yield from _of_calls(theirs.calls, ours.calls, n)
        yield from of_values(LOOP, _passed(theirs), _passed(ours), n)


def _state(stepped: Stepped, constant: set[str]) -> dict[str, Any]:
    """Returns the fields of a scheduler before a step by their bare names, without some."""
    state = {name.lstrip("_"): value for name, value in stepped.state.items()}
    ordered = {name: state[name] for name in FIRST if name in state} | state
    return {name: value for name, value in ordered.items() if name not in constant}


def _constant(first: Stepped, now: Stepped) -> set[str]:
    """Returns the fields of a scheduler that are the same before two steps."""
    before, after = _state(first, set()), _state(now, set())
    seams = ((name, of_values(LOOP, {name: before[name]}, {name: after.get(name)})) for name in before)
    return {name for name, each in seams if not any(seam.distance for seam in each)}


def _of_calls(theirs: list[Called], ours: list[Called], step: int) -> Iterator[Seam]:
    """Yields the seams of the networks' calls in a step, matched by network and condition, in whatever order."""
    known, calls = ({(c.network, c.condition, c.number): c for c in each} for each in (theirs, ours))
    one, other = (", ".join(sorted(_called(key) for key in each)) or "none" for each in (known, calls))
    yield Seam("calls of networks", LOOP, step, one, other, _unless(known.keys() == calls.keys()), 0.0)
    for key in known:
        if key in calls:
            both = known[key].values.keys() & calls[key].values.keys()
            inputs, others = (
                {**each.tensors, **{name: each.values[name] for name in sorted(both)}}
                for each in (known[key], calls[key])
            )
            suffix = " of the negative prompt" if known[key].condition == NEGATIVE else ""
            yield from of_values(LOOP, inputs, others, step, suffix)


def _called(key: tuple[str, str, int]) -> str:
    network, condition, number = key
    prompt = " with the negative prompt" if condition == NEGATIVE else " with the prompt"
    return f"{network}{prompt}" + (f" again ({number + 1})" if number else "")


def _passed(stepped: Stepped) -> dict[str, Any]:
    """Returns what a step was called with, by what it is and the timestep first, and what it returned."""
    names = sorted(stepped.arguments, key=lambda name: (name != "timestep", name != "model_output"))
    arguments = {RENAMED.get(name, name): stepped.arguments[name] for name in names}
    return {**arguments, "latents after the step": stepped.latents}


def _without_padding(x: torch.Tensor, other: torch.Tensor, masks: list[torch.Tensor]) -> torch.Tensor:
    """Returns tokens without those that the other side has not, if they are masked or zeros: they change nothing."""
    if x.ndim not in (2, 3) or x.ndim != other.ndim or x.shape[1] <= other.shape[1]:
        return x
    length, count = other.shape[1], x.shape[1]
    mask_ends = [mask[:, length:] for mask in [*masks, x] if mask.ndim == 2 and mask.shape[1] == count]
    is_unread = not x[:, length:].any() or any(not end.any() for end in mask_ends)
    return x[:, :length] if is_unread else x


def _is_same(one: Any, other: Any) -> bool:
    """Returns whether two values that are not both tensors are the same: a tensor is like the number that it holds."""
    values = [x.item() if isinstance(x, torch.Tensor) and x.numel() == 1 else x for x in (one, other)]
    return not any(isinstance(value, torch.Tensor) for value in values) and bool(values[0] == values[1])


def _unless(same: bool) -> float:
    return 0.0 if same else math.inf


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Returns max|a - b| / max|b|; infinity for other shapes, or where one is not finite and the other is."""
    if one.numel() == other.numel() == 0:
        return 0.0
    if one.shape != other.shape:
        return math.inf
    if torch.equal(one, other):
        return 0.0
    if not one.is_floating_point():
        return math.inf
    a, b = other.double(), one.double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return math.inf
    a, b = a.nan_to_num(posinf=0.0, neginf=0.0), b.nan_to_num(posinf=0.0, neginf=0.0)
    greatest = float(b.abs().max())
    return float((a - b).abs().max()) / greatest if greatest else math.inf


def _allowed(x: torch.Tensor) -> float:
    """Returns the distance that roundings of the original's dtype may make."""
    return ROUNDINGS * torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0


def _worst(one: torch.Tensor, other: torch.Tensor) -> int:
    """Returns the number of the element in which two tensors differ most; 0 if that is among the first."""
    if one.shape != other.shape or not one.numel() or torch.equal(one, other):
        return 0
    apart = (one.double() - other.double()).abs().nan_to_num(nan=math.inf)
    worst = int(apart.argmax())
    return 0 if worst < SHOWN else worst


def _words(value: Any, first: int = 0) -> str:
    """Returns a value as a person reads it: dtype, shape, and some numbers from one of them on."""
    if not isinstance(value, torch.Tensor):
        return "absent" if value is None else repr(value)
    kind = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    numbers = [f"{number:.6g}" for number in value.flatten()[first : first + SHOWN].tolist()]
    more = ", ..." if value.numel() > first + len(numbers) else ""
    before = f"from number {first} on: " if first else ""
    return f"{kind} ({before}{', '.join(numbers)}{more})" if numbers else kind
