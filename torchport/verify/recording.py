"""The original, recorded: the inputs and outputs of its networks in chosen steps, and those of the yardstick.

The original runs in PyTorch, without the port's patches and without the family's `prepare`: a fault in one of them must
not be in both. The yardstick (the original in a wider dtype) gets the original's values at every border, so that each
unit (a block, a module, or the code between two modules) is measured alone.

The user chooses the steps, or they follow from the loop: the first and the last of each network, and the first whose
calls have other shapes or flags. Such a step is known only after it: the state before it is kept, and it is run again.

If the values of a call take more than `BORDERS_LIMIT` bytes, only those of blocks are recorded, and the modules of a
faulty block later; of guidance's other calls in the same step, only the network's output.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchport.compile import network, preflight
from torchport.compile.in_force import in_force
from torchport.config.card import DENOISING
from torchport.errors import MachineError, OutputError
from torchport.load.foreign import brief
from torchport.progress import log
from torchport.run.path import checkpoint_of
from torchport.stages.family import Call, Stage, Steps
from torchport.stages.outputs import map_tensors
from torchport.stages.recorder import BORDERS_LIMIT
from torchport.stages.replay import all_latents
from torchport.task import Request, Task, accept
from torchport.verify import decoder, seams
from torchport.verify.borders import Original, Values, inner_paths, total_bytes
from torchport.verify.report import Unit
from torchport.verify.yardstick import by_place, distance, least_rounding

PAUSE = 0.1
"""Seconds between two looks at the folder."""


@dataclasses.dataclass
class RecordedCall:
    """One call of the original's network, with the yardstick's values beside its own."""

    stage: str
    network: str
    step: int  #: The denoising step, from 0.
    number: int  #: The call in this step, from 0.
    inputs: dict[str, Any]
    output: Any
    wide_output: Any
    #: The original's values at the borders; empty where those of another call of the step are too large already.
    values: Values
    #: The yardstick's values at the borders of blocks, each with the original's inputs; some rows of large tensors.
    outer: Values
    #: The yardstick's values at all borders, each with the original's inputs; empty where that would be too large.
    inner: Values

    @property
    def rounding(self) -> float:
        """The distance of the original's output from the yardstick's, and at least the epsilon of its dtype."""
        return max(distance(self.output, self.wide_output) or 0.0, least_rounding(self.output))

    def values_at(self, paths: Collection[str]) -> Values:
        """Returns the original's values at the borders of some modules, but not those of the network itself."""
        return {border: value for border, value in self.values.items() if border.path and border.path in paths}


def split_by_call(outputs: Sequence[Any], calls: Sequence[RecordedCall]) -> list[list[torch.Tensor]] | None:
    """Returns the port's outputs in a step, split by the original's calls; None if the numbers of rows differ. A port's
    call may batch several conditions of guidance, for each of which the original has a call.
    """
    ported = zip(*map(tensors_of, outputs), strict=True)
    originals = zip(*(tensors_of(call.wide_output) for call in calls), strict=True)
    parts = []
    for batches, tensors in zip(ported, originals, strict=True):
        rows, counts = torch.cat([batch.float() for batch in batches]), [tensor.shape[0] for tensor in tensors]
        if rows.shape[0] != sum(counts):
            return None
        parts.append(torch.split(rows, counts))
    return [list(part) for part in zip(*parts, strict=True)]


def tensors_of(output: Any) -> Sequence[torch.Tensor]:
    """Returns the tensors of a network's output."""
    return [output] if isinstance(output, torch.Tensor) else list(output)


def latents_in(state: Mapping[str, torch.Tensor]) -> Any:
    """Returns copies of the latents in a loop's state: a tensor, or a list with the sound's; None without any."""
    copies = [_copied(latents) for latents in all_latents(state)]
    return copies if len(copies) > 1 else next(iter(copies), None)


@dataclasses.dataclass
class Recording:
    """The values of a run of the original with which a port is compared."""

    encoded: dict[str, dict[str, torch.Tensor]]  #: The outputs of the stages before denoising, by stage.
    calls: list[RecordedCall] = dataclasses.field(default_factory=list)
    #: The latents after each step, by its number from 1; a list if the sound has latents, too.
    latents: dict[int, Any] = dataclasses.field(default_factory=dict)
    #: The state from which a loop can resume at each chosen step, by the number of steps before it.
    states: dict[int, dict[str, torch.Tensor]] = dataclasses.field(default_factory=dict)
    #: The outputs of each denoising stage, by stage, if its loop came to its end.
    ends: dict[str, dict[str, torch.Tensor]] = dataclasses.field(default_factory=dict)
    seams: Any = None
    #: An output of each network, whose shape and dtype made-up outputs take.
    templates: dict[str, Any] = dataclasses.field(default_factory=dict)
    #: Frames of the original and of the yardstick, and the latents; None where they are not compared.
    decoded: Any = None

    @property
    def embeddings(self) -> dict[str, torch.Tensor]:
        """The outputs of all stages before denoising, by name: the inputs of a denoising stage."""
        return {name: tensor for outputs in self.encoded.values() for name, tensor in outputs.items()}

    @property
    def steps(self) -> tuple[int, ...]:
        """The denoising steps of which calls were recorded, from 0."""
        return tuple(sorted({call.step for call in self.calls}))

    def call_of(self, network: str, step: int, number: int) -> RecordedCall:
        """Returns the recorded call of a network with a number in a denoising step, both counted from 0."""
        return next(c for c in self.calls if (c.network, c.step, c.number) == (network, step, number))


class LoopStop(BaseException):
    """Leaves a denoising loop after the last step that is compared."""


def write(recording: Any, file: Path) -> None:
    """Writes a recording, or raises. The port's process waits for `file`, which gets this name when complete."""
    unfinished = file.with_suffix(".unfinished")
    try:
        torch.save(recording, unfinished)
        unfinished.rename(file)
    except (OSError, RuntimeError) as error:  # PyTorch raises the latter where the disk is full
        fact = f"What the original computes cannot be written: {brief(error)}"
        raise OutputError(str(file.parent), fact, "Free space there, or name another folder with TMPDIR=DIR") from error


def wait(file: Path, parent: int) -> None:
    """Waits until a recording exists; raises if the parent process has ended, as no recording will come then."""
    while not file.exists():
        if os.getppid() != parent:
            fact = "The process that waits for this one has ended"
            raise MachineError("torchport.verify", fact, "Verify again")
        time.sleep(PAUSE)


def read(path: Path) -> Recording:
    """Returns the recording in a file that `write` wrote."""
    # Unpickling is safe: our own file, in a folder of this user alone. `mmap` reads a tensor when it is used.
    recording: Recording = torch.load(path, weights_only=False, mmap=True)
    return recording


def record(request: Request, steps: tuple[int, ...] | None, file: Path, decodes: bool = False) -> None:
    """Records the original in the denoising `steps`, from 0, and writes the recording to a file. None: in steps that
    `_StepWatch` finds. With `decodes` the decoder's frames are recorded, too. Runs in a process of its own.
    """
    write(recording_of(accept(request), steps, decodes), file)


def recording_of(task: Task, steps: tuple[int, ...] | None, decodes: bool) -> Recording:
    """Runs the original, and returns its recording; for the arguments see `record`."""
    with in_force(task, task.family.STAGES):
        preflight.check(task)
        folder = checkpoint_of(task).folder
        recording = Recording({})
        for stage in seams.encoding_stages(task):
            recording.encoded[stage.name] = seams.encode(task, stage, folder)
        for stage in task.denoising:
            if not decodes and steps is not None and len(recording.latents) > max(steps):  # all chosen steps are over
                break
            _RecordedLoop(task, stage, folder, recording, steps, decodes).run()
        if decodes:
            recording.decoded = decoder.original_frames(task, folder, recording.ends[task.denoising[-1].name])
        outputs = {call.network: call.output for call in reversed(recording.calls)}  # of each network's first call
        names = [str(stage.network) for stage in task.denoising]
        # A network without a recorded call returns what the first network does.
        recording.templates = {name: outputs.get(name, recording.calls[0].output) for name in names}
        recording.seams = seams.record(task, folder, recording.steps, recording.templates, encoded=recording.encoded)
    return recording


class _RecordedLoop(Call):
    """The original's denoising loop of one stage, whose results are added to a recording.

    The loop calls this object in place of the network, which runs eagerly. Calls in chosen steps are recorded, together
    with the yardstick's.
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
        self.task, self.folder, self.recording = task, folder, recording
        self.stage = dataclasses.replace(stage, prepare=None)  # the original, without the family's changes
        self.start, self.state = start_of(recording.ends, stage)
        chosen = (self.start,) if steps is None else steps
        self.chosen = [step for step in chosen if step >= self.start]
        #: Finds more steps to record; None where the user chose the steps.
        self.watch = _StepWatch(self.start, self.state) if steps is None else None
        #: The step after which the loop is left, from 1. A number above the last step lets the loop end: the decoder
        #: needs its latents, and without chosen steps its last step has to be known.
        self.stop = max(chosen) + 1 if steps is not None and not decodes else task.settings.steps + 1
        self.step = self.start
        self._is_large = False  # whether the values at the borders of one call take more than `BORDERS_LIMIT`

    def run(self) -> None:
        """Runs the loop and records the chosen steps; then takes each step that the watch found once more."""
        task = self.task
        stage = self.stage
        recording = self.recording
        parts = network.loaded(task, stage, self.folder)
        eager = network.eager(task, stage, parts, self.folder)
        self.original = Original(eager, task.settings.dtypes[str(stage.network)])
        if self.start in self.chosen and self.start:
            recording.states[self.start] = self.state
        outputs = self._loop(parts, (self.start, self.state) if self.start else None)
        if outputs is not None:
            recording.ends[stage.name] = outputs
        for step, state in [] if self.watch is None else self.watch.steps_with_states():
            recording.states[step] = state
            self.watch, self.chosen, self.step, self.stop = None, [step], step, step + 1
            self._loop(network.afresh(task, stage, parts, self.folder), (step, state))

    def _loop(self, parts: dict[str, Any], resume: Any) -> dict[str, torch.Tensor] | None:
        """Runs the stage, and returns its outputs; None where the loop was left after the last compared step."""
        task, stage = self.task, self.stage
        inputs = {**self.recording.embeddings, **task.noise(stage)}
        try:
            return stage.run(parts, self, task.settings, Steps(finished=self._finished, resume=resume), **inputs)
        except LoopStop:
            log.debug("%s: step %d is the last that is looked at", stage.name, self.step - 1)
        return None

    def _finished(self, number: int, state: Mapping[str, torch.Tensor], timestep: Any = None, kept: Any = None) -> None:
        """Records the latents and state after step `number`, counted from 1; raises `LoopStop` after the last step."""
        recording = self.recording
        latents = latents_in(state)
        if latents is not None:
            recording.latents[number] = latents
        if number in self.chosen:
            recording.states[number] = {name: _copied(tensor) for name, tensor in state.items()}
        if self.watch is not None:
            self.watch.finished(number, state)
        self.step = number
        if number >= self.stop:
            raise LoopStop

    def __call__(self, **inputs: Any) -> Any:
        """Calls the network. In a chosen step, all values of the call that are not too large are recorded."""
        original = self.original
        if self.watch is not None:
            self.watch.called(inputs)
        if self.step not in self.chosen:
            return original.eager(**inputs)
        number = sum(call.step == self.step for call in self.recording.calls)
        # Of guidance's other calls in a step, only the output is recorded if the first call's values are large.
        paths = [] if number and self._is_large else ["", *original.units]  # "": the network itself
        kept = {name: _copied(value) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
        output, at_blocks = original.observed(kept, paths)
        wide_output, _ = original.yardstick(kept, paths=[], values={})
        wide_outer = original.yardstick(kept, paths, at_blocks)[1] if paths else {}
        self._is_large = self._is_large or total_bytes(at_blocks) > BORDERS_LIMIT
        all_paths = ["", *(path for unit in original.units for path in inner_paths(original.eager.module, unit))]
        # All modules are recorded in the first call of a step alone: guidance's other calls use the same modules.
        # Their size is estimated from that of the blocks. So they are recorded in a second call of the network.
        is_whole = number == 0 and total_bytes(at_blocks) * len(all_paths) / len(paths) <= BORDERS_LIMIT
        values = original.observed(kept, all_paths)[1] if is_whole else at_blocks
        wide_inner = original.yardstick(kept, all_paths, values)[1] if is_whole else {}
        call = RecordedCall(
            stage=self.stage.name,
            network=str(self.stage.network),
            step=self.step,
            number=number,
            inputs=kept,
            output=map_tensors(output, _copied),
            wide_output=wide_output,
            values=values,
            outer=wide_outer,
            inner=wide_inner,
        )
        self.recording.calls.append(call)
        return output


class _StepWatch:
    """Follows a loop, and finds the steps whose calls differ from the first's, so that another fault may show there."""

    def __init__(self, start: int, state: Mapping[str, torch.Tensor]) -> None:
        self.start = start
        self._state = dict(state)  # before the step that is taken
        # The last step, from 0, and the state before it.
        self._last = (start, self._state)
        self._calls: list[Any] = []  # of the network in this step
        self._known: list[Any] = []  # the calls of each kind of step
        self._steps: dict[int, dict[str, torch.Tensor]] = {}  # the first of each kind, and the state before it

    def called(self, inputs: Mapping[str, Any]) -> None:
        """Notes what kind of call this is: the shapes and dtypes of tensors, and the flags and texts."""
        shapes = {key: (tuple(leaf.shape), leaf.dtype) for key, leaf in by_place(inputs).items()}
        flags = {name: value for name, value in inputs.items() if value is None or isinstance(value, bool | str)}
        self._calls.append((shapes, flags))

    def finished(self, number: int, state: Mapping[str, torch.Tensor]) -> None:
        """Ends step `number`, from 1; keeps the state before it if no earlier step had the same kinds of calls."""
        self._last = (number - 1, self._state)
        if self._calls not in self._known:
            self._known.append(self._calls)
            self._steps[number - 1] = self._state
        self._calls = []
        self._state = {name: _copied(tensor) for name, tensor in state.items()}

    def steps_with_states(self) -> list[tuple[int, dict[str, torch.Tensor]]]:
        """Returns pairs of a step and the state before it: the last step, and the first of each kind but the start."""
        steps = {**self._steps, self._last[0]: self._last[1]}
        return [(step, steps[step]) for step in sorted(steps) if step > self.start]


def start_of(ends: Mapping[str, Mapping[str, torch.Tensor]], stage: Stage) -> tuple[int, dict[str, torch.Tensor]]:
    """Returns how many steps the denoising stage before took, and its final state; 0 and an empty dict without one."""
    for name in stage.needs:
        if name in DENOISING:
            state = dict(ends[name])
            return int(state.pop("done")), state
    return 0, {}


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def record_modules(request: Request, block: Unit, file: Path) -> None:
    """Adds the values of all modules in a block to a recording, and writes it again; runs in a process of its own."""
    recording = read(file)
    call = recording.call_of(block.network, block.step, block.call)
    with original_network(accept(request), call) as original:
        paths = inner_paths(original.eager.module, block.path)
        call.values = {**call.values, **original.observed(call.inputs, paths)[1]}
        # At the blocks, too, the yardstick gets the original's values.
        call.inner = original.yardstick(call.inputs, [*original.units, *paths], call.values)[1]
    write(recording, file)


@contextlib.contextmanager
def original_network(task: Task, call: RecordedCall) -> Iterator[Original]:
    """Yields the original's network of a recorded call, loaded again, while the patches of its stage are in force."""
    stage = next(dataclasses.replace(stage, prepare=None) for stage in task.denoising if stage.name == call.stage)
    with in_force(task, [stage]):
        folder = checkpoint_of(task).folder
        eager = network.eager(task, stage, network.loaded(task, stage, folder), folder)
        yield Original(eager, task.settings.dtypes[call.network])
