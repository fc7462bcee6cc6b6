"""The loop's side faults, by name: schedule, noise, embeddings, guidance and dtypes, compared before a network runs.

Both loops are run with networks whose outputs are made up. What each passes on is recorded and compared: the first seam
that differs is where the loop went wrong.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from torchport import patch
from torchport.compile import network, preflight
from torchport.compile.in_force import in_force
from torchport.load.foreign import brief, refusals
from torchport.stages import outputs
from torchport.stages.family import Stage, Steps
from torchport.task import Task
from torchport.verify import loop
from torchport.verify.loop import NEGATIVE, ConditionCall, LoopRecord, MadeUpNetwork, SchedulerStep
from torchport.verify.report import Seam, Verdict

ROUNDINGS = 2
"""Roundings of a value's dtype that the same arithmetic in another order may make. Both loops run on one host."""
FIRST = ("timesteps", "sigmas")
"""Fields of a scheduler that are compared first: the others follow from them."""
RENAMED = {"model_output": "guidance", "sample": "latents"}
"""What the arguments of a scheduler's step are called here: the combined prediction is what guidance makes."""
SHOWN = 4
"""Numbers of a tensor that a person is shown."""
STEPS = "number of scheduler steps"
"""The seam of how many steps a loop takes."""
LOOP = "denoise"
"""The stage of a loop's seams."""


@dataclasses.dataclass(frozen=True)
class SideRecord:
    """What one side passes on."""

    #: What the encoders returned, by stage.
    encoded: dict[str, dict[str, torch.Tensor]]
    moments: dict[str, torch.Tensor]  #: What was encoded of the image.
    loop: LoopRecord  #: The loop's.
    #: What upstream raised in a port's loop; None where the loop came to its end.
    stopped: Exception | None = None

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """What the denoising stages receive."""
        return {**{name: x for values in self.encoded.values() for name, x in values.items()}, **self.moments}


@dataclasses.dataclass(frozen=True)
class Seams:
    """What was compared by name."""

    seams: tuple[Seam, ...]  #: In the order of the run.
    unlike: tuple[str, ...]  #: What could not be compared, a line each.


def against(
    port: Task, folder: Path, chosen: Collection[int], reference: SideRecord, likes: Mapping[str, torch.Tensor]
) -> Seams:
    """Returns the seams of a port beside the original's record; see `record`."""
    side = record(port, folder, chosen, likes, reference)
    rows, unlike = differences(reference, side), []
    if side.stopped is not None:
        if all(row.verdict is Verdict.SAME for row in rows if row.name != STEPS):
            raise side.stopped
        unlike.append(f"the loop after step {len(side.loop.steps)}: the port's stops with {brief(side.stopped)}")
    if any(stage.network for stage in _encoders(port)):
        unlike.append("the image's moments: the port takes the original's, whose VAE encodes it in PyTorch")
    if not loop.has_upstream_loop(port):
        unlike.append("the loop: that of the family is both the port's and the original's")
    return Seams(tuple(rows), tuple(unlike))


def output_like(task: Task, stage: Stage) -> torch.Tensor:
    """Returns what the stage's network returns, without values."""
    output = preflight.rehearse(task, stage).calls[0].output
    first: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return first


def _encoders(task: Task) -> list[Stage]:
    """Returns the stages before the first that takes denoising steps."""
    names = [stage.name for stage in task.family.STAGES]
    return list(task.family.STAGES[: names.index(task.denoising[0].name)])


def record(
    task: Task,
    folder: Path,
    chosen: Collection[int],
    likes: Mapping[str, torch.Tensor],
    reference: SideRecord | None = None,
    encoded: Mapping[str, dict[str, torch.Tensor]] | None = None,
) -> SideRecord:
    """Returns what one side passes on. No network runs but encoders.

    Args:
        task: The side's, with all stages.
        folder: Of the checkpoint.
        chosen: Steps, from 0, whose large tensors are compared.
        likes: What the networks return, without values.
        reference: The original's, for a port: its loop gets the original's embeddings, so that what an encoder does
            wrong is told once.
        encoded: What the stages before the loop return, where that is known.
    """
    with in_force(task, task.stages):
        side = SideRecord({}, {} if reference is None else reference.moments, LoopRecord(chosen))
        for stage in _encoders(task):
            if stage.network is not None and reference is not None:
                continue
            values = _encoded(task, stage, folder) if encoded is None else encoded[stage.name]
            if stage.network is None:
                side.encoded[stage.name] = values
            else:
                side.moments.update(values)
        inputs = (reference or side).inputs
        with side.loop.recording():
            try:
                _denoise(task, folder, side.loop, likes, inputs)
            except refusals() as error:
                if reference is None:
                    raise
                return dataclasses.replace(side, stopped=error)
    return side


def _encoded(task: Task, stage: Stage, folder: Path) -> dict[str, torch.Tensor]:
    """Returns what a stage before the loop returns, computed in PyTorch."""
    with patch.applied(task.patches([stage]), stage=stage.name):
        parts = network.loaded(task, _bare(stage) if task.original else stage, folder)
        call = None if stage.network is None else network.eager(task, stage, parts, folder)
        return stage.run(parts, call, task.settings, Steps())


def _denoise(
    task: Task, folder: Path, record: LoopRecord, likes: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
) -> None:
    """Takes all denoising steps with made-up outputs."""
    calls = {name: MadeUpNetwork(name, template, inputs, record, not task.original) for name, template in likes.items()}
    start = {**inputs, **task.noise(task.denoising[0])}
    if task.original and loop.has_upstream_loop(task):
        with patch.applied(task.patches(task.denoising)):
            by_stage = [network.loaded(task, _bare(stage), folder) for stage in task.denoising]
            parts = {name: part for loaded in by_stage for name, part in loaded.items()}
            loop.run_upstream(task, parts, calls, start)
        return
    done: Mapping[str, torch.Tensor] = {}
    for stage in task.denoising:
        with patch.applied(task.patches([stage]), stage=stage.name):
            parts = network.loaded(task, _bare(stage) if task.original else stage, folder)
            done = stage.run(parts, calls[str(stage.network)], task.settings, Steps(resume=_resume(done)), **start)
            start = dict(inputs)


def _bare(stage: Stage) -> Stage:
    """Returns a stage whose network nothing prepares."""
    return dataclasses.replace(stage, prepare=None)


def _resume(first: Mapping[str, torch.Tensor]) -> tuple[int, Mapping[str, torch.Tensor]] | None:
    """Returns where the second of two denoising stages goes on."""
    if not first:
        return None
    return int(first["done"]), {name: value for name, value in first.items() if name != "done"}


def differences(original: SideRecord, port: SideRecord) -> list[Seam]:
    """Returns what both sides passed on, compared by name."""
    stages = original.encoded.items()
    rows = [row for stage, values in stages for row in value_seams(stage, values, port.encoded[stage])]
    # A loop that stopped took fewer steps because of what differs before.
    return [
        *rows,
        *sorted(loop_seams(original.loop, port.loop), key=lambda row: row.name == STEPS and bool(port.stopped)),
    ]


def value_seams(
    stage: str, original: Mapping[str, Any], port: Mapping[str, Any], step: int | None = None, suffix: str = ""
) -> Iterator[Seam]:
    """Yields the seams of named trees of tensors, numbers and texts: of each its dtype, and itself."""
    ours, theirs = outputs.leaves(port), outputs.leaves(original)
    masks = [x for x in theirs.values() if isinstance(x, torch.Tensor) and x.ndim == 2]
    others = [x for x in ours.values() if isinstance(x, torch.Tensor) and x.ndim == 2]
    for name in [*theirs, *(name for name in ours if name not in theirs)]:
        expected, other = theirs.get(name), ours.get(name)
        if not isinstance(expected, torch.Tensor) or not isinstance(other, torch.Tensor):
            distance = 0.0 if _is_same(expected, other) else math.inf
            yield Seam(f"{name}{suffix}", stage, step, _words(expected), _words(other), distance, 0.0)
            continue
        if expected.dtype != other.dtype:
            first, second = (str(x.dtype).removeprefix("torch.") for x in (expected, other))
            yield Seam(f"dtype of {name}{suffix}", stage, step, first, second, math.inf, 0.0)
        expected, other = _without_padding(expected, other, masks), _without_padding(other, expected, others)
        where = _worst(expected, other)
        words = _words(expected, where), _words(other, where)
        yield Seam(f"{name}{suffix}", stage, step, *words, _distance(expected, other), _allowed(expected))


def loop_seams(original: LoopRecord, port: LoopRecord) -> Iterator[Seam]:
    """Yields the seams of two loops, in the order in which the loops pass them on."""
    counts = str(len(original.steps)), str(len(port.steps))
    yield Seam(STEPS, LOOP, None, *counts, _distance_unless(counts[0] == counts[1]), 0.0)
    for n, (theirs, ours) in enumerate(zip(original.steps, port.steps, strict=False)):
        constant = _constant(original.steps[0], theirs) & _constant(port.steps[0], ours) if n else set()
        suffix = " of the scheduler" if n else ""
        step = n if n else None
        yield from value_seams(LOOP, _state(theirs, constant), _state(ours, constant), step, suffix)
        if n == 0:
            noise, other = ({"noise": each.arguments.get("sample")} for each in (theirs, ours))
            yield from value_seams(LOOP, noise, other)
        yield from _call_seams(theirs.calls, ours.calls, n)
        yield from value_seams(LOOP, _step_values(theirs), _step_values(ours), n)


def _state(step: SchedulerStep, constant: set[str]) -> dict[str, Any]:
    """Returns the fields of a scheduler before a step by their bare names, without some."""
    state = {name.lstrip("_"): value for name, value in step.state.items()}
    ordered = {name: state[name] for name in FIRST if name in state} | state
    return {name: value for name, value in ordered.items() if name not in constant}


def _constant(first: SchedulerStep, other: SchedulerStep) -> set[str]:
    """Returns the fields of a scheduler that are the same before two steps."""
    before, after = _state(first, set()), _state(other, set())
    pairs = {name: value_seams(LOOP, {name: before[name]}, {name: after.get(name)}) for name in before}
    return {name for name, seams in pairs.items() if not any(seam.distance for seam in seams)}


def _call_seams(theirs: list[ConditionCall], ours: list[ConditionCall], step: int) -> Iterator[Seam]:
    """Yields the seams of the networks' calls in a step, matched by network and condition, in whatever order."""
    known, calls = ({(c.network, c.condition, c.number): c for c in each} for each in (theirs, ours))
    words, other = (", ".join(sorted(_call_words(key) for key in each)) or "none" for each in (known, calls))
    yield Seam("calls of networks", LOOP, step, words, other, _distance_unless(known.keys() == calls.keys()), 0.0)
    for key in known:
        if key in calls:
            both = known[key].values.keys() & calls[key].values.keys()
            inputs, others = (
                {**each.tensors, **{name: each.values[name] for name in sorted(both)}}
                for each in (known[key], calls[key])
            )
            suffix = " of the negative prompt" if known[key].condition == NEGATIVE else ""
            yield from value_seams(LOOP, inputs, others, step, suffix)


def _call_words(key: tuple[str, str, int]) -> str:
    network, condition, number = key
    prompt = " with the negative prompt" if condition == NEGATIVE else " with the prompt"
    return f"{network}{prompt}" + (f" again ({number + 1})" if number else "")


def _step_values(step: SchedulerStep) -> dict[str, Any]:
    """Returns what a step was called with, by what it is and the timestep first, and what it returned."""
    names = sorted(step.arguments, key=lambda name: (name != "timestep", name != "model_output"))
    arguments = {RENAMED.get(name, name): step.arguments[name] for name in names}
    return {**arguments, "latents after the step": step.latents}


def _without_padding(x: torch.Tensor, other: torch.Tensor, masks: list[torch.Tensor]) -> torch.Tensor:
    """Returns tokens without those that the other side has not, if they are masked or zeros: they change nothing."""
    if x.ndim not in (2, 3) or x.ndim != other.ndim or x.shape[1] <= other.shape[1]:
        return x
    length, count = other.shape[1], x.shape[1]
    mask_ends = [mask[:, length:] for mask in [*masks, x] if mask.ndim == 2 and mask.shape[1] == count]
    is_unread = not x[:, length:].any() or any(not end.any() for end in mask_ends)
    return x[:, :length] if is_unread else x


def _is_same(first: Any, other: Any) -> bool:
    """Returns whether two values that are not both tensors are the same: a tensor is like the number that it holds."""
    values = [x.item() if isinstance(x, torch.Tensor) and x.numel() == 1 else x for x in (first, other)]
    return not any(isinstance(value, torch.Tensor) for value in values) and bool(values[0] == values[1])


def _distance_unless(same: bool) -> float:
    return 0.0 if same else math.inf


def _distance(first: torch.Tensor, other: torch.Tensor) -> float:
    """Returns max|a - b| / max|b|; infinity for other shapes, or where one is not finite and the other is."""
    if first.numel() == other.numel() == 0:
        return 0.0
    if first.shape != other.shape:
        return math.inf
    if torch.equal(first, other):
        return 0.0
    if not first.is_floating_point():
        return math.inf
    a, b = other.double(), first.double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return math.inf
    a, b = a.nan_to_num(posinf=0.0, neginf=0.0), b.nan_to_num(posinf=0.0, neginf=0.0)
    greatest = float(b.abs().max())
    return float((a - b).abs().max()) / greatest if greatest else math.inf


def _allowed(x: torch.Tensor) -> float:
    """Returns the distance that roundings of the original's dtype may make."""
    return ROUNDINGS * torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0


def _worst(first: torch.Tensor, other: torch.Tensor) -> int:
    """Returns the number of the element in which two tensors differ most; 0 if that is among the first."""
    if first.shape != other.shape or not first.numel() or torch.equal(first, other):
        return 0
    difference = (first.double() - other.double()).abs().nan_to_num(nan=math.inf)
    worst = int(difference.argmax())
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
