"""The loop's own faults, by name: schedule, noise, embeddings, guidance and dtypes, compared before a network runs.

Both loops are run with networks whose outputs are made up. What each passes on is recorded and compared: the first seam
that differs is where the loop went wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from torchport import patch
from torchport.compile import network, preflight
from torchport.compile.in_force import in_force, stage_in_force
from torchport.foreign import brief, refusals
from torchport.stages.family import Stage, Steps
from torchport.task import Task
from torchport.verify import upstream_loop
from torchport.verify.compared import STEPS, of_traces, of_values
from torchport.verify.facts import Seam, Verdict
from torchport.verify.trace import Fed, Trace


@dataclasses.dataclass(frozen=True)
class Seams:
    """What was compared by name.

    Attributes:
        seams: In the order of the run.
        unlike: What could not be compared, a line each.
    """

    seams: tuple[Seam, ...]
    unlike: tuple[str, ...]


def seams(port: Task, original: Task, folder: Path, chosen: Collection[int]) -> Seams:
    """Returns every value between the stages and around the networks, compared by name; no network runs but encoders.

    No patch may be in force. The original has its plumbing alone, and nothing prepares its networks.

    Args:
        port: The port's task, of all stages.
        original: The same with `--backend original`.
        folder: Of the checkpoint.
        chosen: Steps, from 0, whose large tensors are compared.
    """
    with in_force(port, port.stages):
        likes = {str(stage.network): like(port, stage) for stage in port.denoising}
    reference = record(original, folder, chosen, likes)
    return against(port, folder, chosen, reference, likes)


def against(
    port: Task, folder: Path, chosen: Collection[int], reference: Recorded, likes: Mapping[str, torch.Tensor]
) -> Seams:
    """Returns the seams of a port, given those of the original; see `seams`.

    Raises:
        Exception: What upstream raised in the port's loop, where no seam before it differs.
    """
    own = record(port, folder, chosen, likes, reference)
    rows, unlike = differences(reference, own), []
    if own.stopped is not None:
        if all(row.verdict is Verdict.SAME for row in rows if row.name != STEPS):
            raise own.stopped
        unlike.append(f"the loop after step {len(own.trace.steps)}: the port's stops with {brief(own.stopped)}")
    if any(stage.network for stage in _encoding(port)):
        unlike.append("the image's moments: the port takes the original's, whose VAE encodes it in PyTorch")
    if not upstream_loop.is_upstreams(port):
        unlike.append("the loop: that of the family is both the port's and the original's")
    return Seams(tuple(rows), tuple(unlike))


def differences(original: Recorded, port: Recorded) -> list[Seam]:
    """Returns what both sides passed on, compared by name."""
    stages = original.encoded.items()
    rows = [row for stage, values in stages for row in of_values(stage, values, port.encoded[stage])]
    # A loop that stopped took fewer steps because of what differs before.
    return [
        *rows,
        *sorted(of_traces(original.trace, port.trace), key=lambda row: row.name == STEPS and bool(port.stopped)),
    ]


@dataclasses.dataclass(frozen=True)
class Recorded:
    """One side.

    Attributes:
        encoded: What the encoders returned, by stage.
        moments: What was encoded of the image.
        trace: The loop's.
        stopped: What upstream raised in a port's loop; None where the loop came to its end.
    """

    encoded: dict[str, dict[str, torch.Tensor]]
    moments: dict[str, torch.Tensor]
    trace: Trace
    stopped: Exception | None = None

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """What the denoising stages receive."""
        return {**{name: x for values in self.encoded.values() for name, x in values.items()}, **self.moments}


def like(task: Task, stage: Stage) -> torch.Tensor:
    """Returns what the stage's network returns, without values."""
    output = preflight.rehearse(task, stage).calls[0].output
    first: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return first


def _encoding(task: Task) -> list[Stage]:
    """Returns the stages before the first that takes denoising steps."""
    names = [stage.name for stage in task.family.STAGES]
    return list(task.family.STAGES[: names.index(task.denoising[0].name)])


def record(
    task: Task,
    folder: Path,
    chosen: Collection[int],
    likes: Mapping[str, torch.Tensor],
    reference: Recorded | None = None,
    encoded: Mapping[str, dict[str, torch.Tensor]] | None = None,
) -> Recorded:
    """Returns what one side passes on; no patch may be in force.

    Args:
        task: The side's.
        folder: Of the checkpoint.
        chosen: See `seams`.
        likes: What the networks return, without values.
        reference: The original's, for a port: its loop gets the original's embeddings, so that what an encoder does
            wrong is told once.
        encoded: What the stages before the loop return, where that is known.
    """
    with in_force(task, task.stages):
        own = Recorded({}, {} if reference is None else reference.moments, Trace(chosen))
        for stage in _encoding(task):
            if stage.network is not None and reference is not None:
                continue
            values = _encoded(task, stage, folder) if encoded is None else encoded[stage.name]
            if stage.network is None:
                own.encoded[stage.name] = values
            else:
                own.moments.update(values)
        inputs = (reference or own).inputs
        with own.trace.recording():
            try:
                _denoise(task, folder, own.trace, likes, inputs)
            except refusals() as error:
                if reference is None:
                    raise
                return dataclasses.replace(own, stopped=error)
    return own


def _encoded(task: Task, stage: Stage, folder: Path) -> dict[str, torch.Tensor]:
    """Returns what a stage before the loop returns, computed in PyTorch."""
    with stage_in_force(task, stage):
        parts = network.loaded(task, _bare(stage) if task.original else stage, folder)
        call = None if stage.network is None else network.eager(task, stage, parts, folder)
        return stage.run(parts, call, task.settings, Steps())


def _denoise(
    task: Task, folder: Path, trace: Trace, likes: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
) -> None:
    """Takes all denoising steps with made-up outputs."""
    calls = {name: Fed(name, like, inputs, trace, not task.original) for name, like in likes.items()}
    given = {**inputs, **task.noise(task.denoising[0])}
    if task.original and upstream_loop.is_upstreams(task):
        with patch.applied(task.patches(task.denoising)):
            every = [network.loaded(task, _bare(stage), folder) for stage in task.denoising]
            parts = {name: part for each in every for name, part in each.items()}
            upstream_loop.run(task, parts, calls, given)
        return
    done: Mapping[str, torch.Tensor] = {}
    for stage in task.denoising:
        with stage_in_force(task, stage):
            parts = network.loaded(task, _bare(stage) if task.original else stage, folder)
            done = stage.run(parts, calls[str(stage.network)], task.settings, Steps(resume=_resume(done)), **given)
            given = dict(inputs)


def _bare(stage: Stage) -> Stage:
    """Returns a stage whose network nothing prepares."""
    return dataclasses.replace(stage, prepare=None)


def _resume(first: Mapping[str, torch.Tensor]) -> tuple[int, Mapping[str, torch.Tensor]] | None:
    """Returns where the second of two denoising stages goes on."""
    if not first:
        return None
    return int(first["done"]), {name: value for name, value in first.items() if name != "done"}
