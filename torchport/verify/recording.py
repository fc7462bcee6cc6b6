"""The original, recorded: what its networks get and return in chosen steps, beside the yardstick.

The original runs in PyTorch, without the patches that a port needs and without the family's `prepare`: a fault in one
of them must not be in both. The yardstick gets the original's own values at every border, so that each unit is
measured alone.

Of a call whose borders take more than `LIMIT` bytes, units are recorded, and modules of a faulty unit later; of
guidance's other calls in the same step, what the network returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchport.compile import network, preflight
from torchport.compile.eager import Eager
from torchport.compile.in_force import in_force
from torchport.config.card import DENOISING
from torchport.load import checkpoint
from torchport.plan.verification import LIMIT
from torchport.progress import log
from torchport.stages.family import Stage, Steps
from torchport.stages.replay import latents_of
from torchport.task import Request, Task, accept
from torchport.verify import decoder, handover, seams
from torchport.verify.borders import Values, inner_paths, size
from torchport.verify.original import Original
from torchport.verify.yardstick import distance


@dataclasses.dataclass
class Call:
    """One call of a network.

    Attributes:
        stage: The stage's name.
        network: The component.
        step: The denoising step, from 0.
        number: The call in this step, from 0.
        inputs: What the network got.
        output: What it returned.
        wide_output: What the yardstick returned.
        values: The original's at the borders; empty where those of another call of the step are too large already.
        outer: The yardstick's at the borders of units, with the original's at those borders; large ones in some rows.
        inner: The yardstick's at all borders, with the original's at all; empty where that would be too large.
        is_whole: Whether all modules were recorded.
    """

    stage: str
    network: str
    step: int
    number: int
    inputs: dict[str, Any]
    output: Any
    wide_output: Any
    values: Values
    outer: Values
    inner: Values
    is_whole: bool = True

    @property
    def rounding(self) -> float:
        """The distance of the network's output from the yardstick's."""
        return distance(self.output, self.wide_output) or 0.0


def by_call(outputs: Sequence[torch.Tensor], calls: Sequence[Call]) -> list[torch.Tensor] | None:
    """Returns what a port computed in a step, for each of the original's calls in it.

    Args:
        outputs: Of the port's calls: one may compute several conditions of guidance.
        calls: The original's.

    Returns:
        None if the port computed another number of conditions.
    """
    rows = torch.cat([output.float() for output in outputs])
    counts = [call.wide_output.shape[0] for call in calls]
    return list(torch.split(rows, counts)) if rows.shape[0] == sum(counts) else None


@dataclasses.dataclass
class Recording:
    """What the original did.

    Attributes:
        encoded: What the stages before denoising returned, by stage.
        calls: Of its networks in the chosen steps, in order.
        latents: After each step, by its number from 1.
        states: What a loop goes on from at each chosen step, by the number of steps before it.
        ends: What each denoising stage returned, by its name.
        seams: What its stages and its loop pass on.
        likes: What a call of each network returns, for loops without a network.
        decoded: Frames of the original and of the yardstick, and the latents; None where they are not compared.
    """

    encoded: dict[str, dict[str, torch.Tensor]]
    calls: list[Call] = dataclasses.field(default_factory=list)
    latents: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    states: dict[int, dict[str, torch.Tensor]] = dataclasses.field(default_factory=dict)
    ends: dict[str, dict[str, torch.Tensor]] = dataclasses.field(default_factory=dict)
    seams: Any = None
    likes: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    decoded: Any = None

    @property
    def embeddings(self) -> dict[str, torch.Tensor]:
        """What the denoising stages get, by the names of the artefacts."""
        return {name: tensor for outputs in self.encoded.values() for name, tensor in outputs.items()}

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that were recorded."""
        return tuple(sorted({call.step for call in self.calls}))


class Enough(BaseException):
    """Leaves a loop after the last step that is looked at."""


def weights_of(task: Task) -> Path:
    """Returns the folder of a task's checkpoint; the tiny one is written if it is not there."""
    if task.is_tiny:
        return network.write_tiny(task)
    return checkpoint.locate(task.checkpoint, task.card, task.settings.variant).folder


def encoded(task: Task, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Returns what each stage before denoising returns; the original's patches must be in force."""
    outputs: dict[str, dict[str, torch.Tensor]] = {}
    for stage in task.family.STAGES[: task.family.STAGES.index(task.denoising[0])]:
        parts = network.loaded(task, dataclasses.replace(stage, prepare=None), folder)
        call = network.eager(task, stage, parts, folder) if stage.network is not None else None
        outputs[stage.name] = stage.run(parts, call, task.settings, Steps())
    return outputs


def read(path: Path) -> Recording:
    """Returns the recording of a verification, from its file."""
    # Our own file, in a folder that only this user has. Its tensors stay there until they are read.
    recording: Recording = torch.load(path, weights_only=False, mmap=True)
    return recording


def record(
    request: Request,
    steps: tuple[int, ...] | None,
    file: Path,
    decodes: bool = False,
) -> None:
    """Writes what the original does to a file; runs in a process of its own.

    Args:
        request: Of the original.
        steps: From 0; None: the first of each network.
        file: Where the recording is written.
        decodes: Whether the decoder's frames are recorded, too.
    """
    handover.write(recorded(accept(request), steps, decodes), file)


def recorded(task: Task, steps: tuple[int, ...] | None, decodes: bool) -> Recording:
    """Returns what the original does; see `record`."""
    with in_force(task, task.family.STAGES):
        preflight.check(task)
        folder = weights_of(task)
        recording = Recording(encoded(task, folder))
        for stage in task.denoising:
            if _is_over(recording, steps, decodes):
                break
            _Loop(task, stage, folder, recording, steps, decodes).run()
        if decodes:
            recording.decoded = decoder.recorded(task, folder, recording.ends[task.denoising[-1].name])
        outputs = {call.network: call.output for call in reversed(recording.calls)}
        likes = {
            str(stage.network): outputs.get(str(stage.network), recording.calls[0].output) for stage in task.denoising
        }
        recording.likes = {
            name: output if isinstance(output, torch.Tensor) else output[0] for name, output in likes.items()
        }
        recording.seams = seams.record(task, folder, recording.steps, recording.likes, encoded=recording.encoded)
    return recording


def _is_over(recording: Recording, steps: tuple[int, ...] | None, decodes: bool) -> bool:
    return not decodes and steps is not None and len(recording.latents) > max(steps)


class _Loop:
    """A stage's loop, recorded.

    Args:
        task: The original's.
        stage: The stage.
        folder: The checkpoint's.
        recording: Is added to.
        steps: As `record` has them.
        decodes: Whether all steps are taken.
    """

    def __init__(
        self,
        task: Task,
        stage: Stage,
        folder: Path,
        recording: Recording,
        steps: tuple[int, ...] | None,
        decodes: bool,
    ) -> None:
        self.task, self.stage, self.folder = task, dataclasses.replace(stage, prepare=None), folder
        self.recording = recording
        self.start, self.state = start_of(recording.ends, stage)
        chosen = (self.start,) if steps is None else steps
        self.chosen = [step for step in chosen if step >= self.start]
        is_last = stage.name == task.denoising[-1].name
        self.enough = max(chosen) + 1 if (is_last or steps is not None) and not decodes else task.settings.steps + 1
        self.step = self.start

    def run(self) -> None:
        """Runs it as far as is needed."""
        task, stage, recording = self.task, self.stage, self.recording
        parts = network.loaded(task, stage, self.folder)
        eager = network.eager(task, stage, parts, self.folder)
        inputs = {**recording.embeddings, **task.noise(stage)}
        if self.start in self.chosen and self.start:
            recording.states[self.start] = self.state
        call = Recorded(eager, self)
        steps = Steps(finished=self._finished, resume=(self.start, self.state) if self.start else None)
        try:
            recording.ends[stage.name] = stage.run(parts, call, task.settings, steps, **inputs)
        except Enough:
            log.debug("%s: step %d is the last that is looked at", stage.name, self.step - 1)

    def _finished(self, number: int, state: Mapping[str, torch.Tensor], timestep: Any = None, kept: Any = None) -> None:
        recording = self.recording
        latents = latents_of(state)
        if latents is not None:
            recording.latents[number] = _copied(latents)
        if number in self.chosen:
            recording.states[number] = {name: _copied(tensor) for name, tensor in state.items()}
        self.step = number
        if number >= self.enough:
            raise Enough


def start_of(ends: Mapping[str, Mapping[str, torch.Tensor]], stage: Stage) -> tuple[int, dict[str, torch.Tensor]]:
    """Returns how many steps were taken before a stage, and what they leave."""
    for name in stage.needs:
        if name in DENOISING:
            state = dict(ends[name])
            return int(state.pop("done")), state
    return 0, {}


class Recorded:
    """An eager network whose calls in chosen steps are recorded, with the yardstick's beside them."""

    batches = False
    drops = False

    def __init__(self, eager: Eager, loop: _Loop) -> None:
        self.eager = eager
        self.loop = loop
        self.original = Original(eager, loop.task.settings.dtypes[str(loop.stage.network)])
        self._last = (-1, 0)
        self._is_large = False  # whether the borders of one call are more than `LIMIT`

    def place(self, **inputs: Any) -> dict[str, Any]:
        """Returns the inputs as they are."""
        return inputs

    def __call__(self, **inputs: Any) -> Any:
        """Returns what the network returns."""
        step = self.loop.step
        if step not in self.loop.chosen:
            return self.eager(**inputs)
        number = self._last[1] + 1 if self._last[0] == step else 0
        self._last = (step, number)
        return self._recorded(step, number, inputs)

    def _recorded(self, step: int, number: int, inputs: dict[str, Any]) -> Any:
        original = self.original
        paths = [] if number and self._is_large else ["", *original.outer]
        kept = {name: _copied(value) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
        output, outer = original.watched(kept, paths)
        wide_output, _ = original.yardstick(kept, [], {})
        wide_outer = original.yardstick(kept, paths, outer)[1] if paths else {}
        self._is_large = self._is_large or size(outer) > LIMIT
        every = original.every
        # Guidance's other calls go through the same modules.
        is_whole = number == 0 and size(outer) * len(every) / len(paths) <= LIMIT
        values = original.watched(kept, every)[1] if is_whole else outer
        wide_inner = original.yardstick(kept, every, values)[1] if is_whole else {}
        stage = self.loop.stage
        self.loop.recording.calls.append(
            Call(
                *(stage.name, str(stage.network), step, number, kept, _copied(output), wide_output),
                *(values, wide_outer, wide_inner, is_whole),
            )
        )
        return output


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


@dataclasses.dataclass(frozen=True)
class Inside:
    """A unit of one call of a network.

    Attributes:
        network: The component.
        step: The denoising step, from 0.
        number: The call in this step, from 0.
        block: The unit's path.
    """

    network: str
    step: int
    number: int
    block: str

    def call_of(self, recording: Recording) -> Call:
        """Returns the call in a recording."""
        key = self.network, self.step, self.number
        return next(call for call in recording.calls if (call.network, call.step, call.number) == key)


def record_inside(request: Request, inside: Inside, file: Path) -> None:
    """Adds to a recording what the original has in a unit; runs in a process of its own.

    Args:
        request: Of the original.
        inside: The unit.
        file: The recording; it is written anew.
    """
    task, recording = accept(request), read(file)
    call = inside.call_of(recording)
    stage = next(dataclasses.replace(stage, prepare=None) for stage in task.denoising if stage.name == call.stage)
    with in_force(task, [stage]):
        folder = weights_of(task)
        eager = network.eager(task, stage, network.loaded(task, stage, folder), folder)
        original = Original(eager, task.settings.dtypes[inside.network])
        paths = inner_paths(eager.module, inside.block)
        call.values = {**call.values, **original.watched(call.inputs, paths)[1]}
        call.inner = original.yardstick(call.inputs, [*original.outer, *paths], call.values)[1]
    handover.write(recording, file)
