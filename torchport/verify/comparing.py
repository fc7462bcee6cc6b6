"""The port, compared with a recording of the original: its programs as a whole, and its modules one by one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchport import patch, shard
from torchport.compile import jax_cache, network, preflight
from torchport.compile.in_force import in_force, lowerings, stage_in_force
from torchport.config.card import DENOISING
from torchport.stages.family import Stage, Steps
from torchport.stages.replay import latents_of
from torchport.task import Request, Task, accept
from torchport.task.devices import devices, prepare
from torchport.verify import decoder, effects, handover, programs, seams
from torchport.verify.facts import Decoded, Drift, Unit, Verdict
from torchport.verify.port import Port, to_host
from torchport.verify.recording import Call, Enough, Inside, Recording, by_call, read, start_of, weights_of
from torchport.verify.units import Measured, Units, looked_into, with_effects
from torchport.verify.yardstick import distance, floor


@dataclasses.dataclass
class Compared:
    """What the port's process found.

    Attributes:
        networks: Units that are whole networks, in the order of their calls.
        measured: The other units.
        seams: What its stages and its loop pass on, beside the original's.
        unlike: What was not compared, a line each.
        drift: Of the free-running port.
        decoded: The decoder's frames; None where they were not compared.
        programs: What differs from the programs that a plan has, a line each.
        folder: The checkpoint's.
        yardstick: Its dtype, by component.
        called: The patches that were called where no network ran: in encoders and loops.
        fed: What the port's networks were called with in a step in which one is at fault, by network and step.
    """

    networks: list[Unit] = dataclasses.field(default_factory=list)
    measured: list[Measured] = dataclasses.field(default_factory=list)
    seams: Any = None
    unlike: list[str] = dataclasses.field(default_factory=list)
    drift: list[Drift] = dataclasses.field(default_factory=list)
    decoded: Decoded | None = None
    programs: list[str] = dataclasses.field(default_factory=list)
    folder: Path = Path()
    yardstick: dict[str, str] = dataclasses.field(default_factory=dict)
    called: frozenset[str] = frozenset()
    fed: dict[tuple[str, int], list[dict[str, Any]]] = dataclasses.field(default_factory=dict)


def compare(request: Request, file: Path, original: Request | None, parent: int) -> Compared:
    """Returns how the port differs from a recording; runs in a process of its own.

    Args:
        request: Of the port.
        file: The recording.
        original: Of the original, which shows the effect of errors; None: the port does, as beside a capture.
        parent: The process that began this one.
    """
    task, compared = accept(request), Compared()
    with in_force(task, task.family.STAGES) as ledger, jax_cache.of_task(task):
        preflight.check(task)
        planned = {stage.name: _planned(task, stage) for stage in task.denoising}
        handover.wait(file, parent)  # until here the original runs beside this
        recording = read(file)
        folder = compared.folder = weights_of(task)
        compared.yardstick = {
            call.network: str(call.wide_output.dtype).removeprefix("torch.") for call in recording.calls
        }
        ends: dict[str, dict[str, torch.Tensor]] = {}
        for stage in task.denoising:
            if any(call.stage == stage.name for call in recording.calls):
                with stage_in_force(task, stage) as own:
                    comparison = _Comparison(task, stage, folder, own, recording, compared)
                    shown = functools.partial(effects.of_original, original, file) if original else None
                    comparison.run(ends, planned[stage.name], shown)
        if recording.decoded is not None:
            compared.decoded = decoder.compared(task, folder, recording.decoded)
        before = _counts(ledger)
        compared.seams = seams.against(task, folder, recording.steps, recording.seams, recording.likes)
        compared.called = frozenset(key for key, count in _counts(ledger).items() if count != before[key])
    return compared


def drifted(request: Request, file: Path, steps: int) -> list[Drift]:
    """Returns how far a free-running port is from the original after each step; runs in a process of its own.

    Args:
        request: Of the port, on a mesh of its own.
        file: The recording.
        steps: How many steps are taken.
    """
    task, compared, recording = accept(request), Compared(), read(file)
    with in_force(task, task.family.STAGES), jax_cache.of_task(task):
        preflight.check(task)
        folder, ends = weights_of(task), dict[str, dict[str, torch.Tensor]]()
        for stage in task.denoising:
            if len(compared.drift) < steps:
                with stage_in_force(task, stage) as ledger:
                    _Comparison(task, stage, folder, ledger, recording, compared).run_freely(ends, steps)
    return compared.drift


def compare_inside(request: Request, inside: Inside, folder: Path, file: Path) -> list[Measured]:
    """Returns the modules of a unit, which was recorded by `record_inside`; runs in a process of its own.

    Args:
        request: Of the port.
        inside: The unit.
        folder: The checkpoint's.
        file: The recording.
    """
    task, call = accept(request), inside.call_of(read(file))
    prepare(task.machine)
    stage = next(stage for stage in task.denoising if stage.name == call.stage)
    with in_force(task, [stage]) as ledger, lowerings(ledger):
        original = dataclasses.replace(request, backend="original")
        units = Units(Port(task, stage, folder, ledger), call, effects.of_original(original, file, call))
        units.outer()
        return with_effects(units, units.inner(inside.block))


def _planned(task: Task, stage: Stage) -> list[programs.Program] | None:
    """Returns the programs that a plan has of a stage; None where they are not known beforehand."""
    if stage.like is None:
        return None
    with stage_in_force(task, stage):
        return programs.of_plan(task, stage, devices(task.machine))


def _counts(ledger: patch.Ledger) -> dict[str, int]:
    return {record.entry.id: record.calls.count for record in ledger.records}


class _Comparison:
    """A stage's network, compared.

    Args:
        task: The port's.
        stage: The stage.
        folder: The checkpoint's.
        ledger: Of the stage's patches, in force.
        recording: The original's.
        compared: Is added to.
    """

    def __init__(
        self,
        task: Task,
        stage: Stage,
        folder: Path,
        ledger: patch.Ledger,
        recording: Recording,
        compared: Compared,
    ) -> None:
        self.task, self.stage, self.folder, self.ledger = task, stage, folder, ledger
        self.recording, self.compared = recording, compared
        self.calls = [call for call in recording.calls if call.stage == stage.name]

    def run(
        self,
        ends: dict[str, dict[str, torch.Tensor]],
        planned: list[programs.Program] | None,
        shown: Callable[[Call], effects.Outputs] | None,
    ) -> None:
        """Compares the stage's programs, and then its modules.

        Args:
            ends: What the stages before returned; is added to.
            planned: The programs that a plan has of the stage; None where they are not known.
            shown: Shows the effect of errors in a call; None: the port does.
        """
        self._compare_programs(ends, planned)
        port = Port(self.task, self.stage, self.folder, self.ledger)
        for call in self.calls:
            if not call.values:
                name = f"blocks of {call.network} in call {call.number} of step {call.step}"
                self.compared.unlike.append(f"not compared: {name}: those of its call 0 are the same modules")
                continue
            is_over = any(one.unit.verdict is Verdict.OTHER for one in self.compared.measured)
            units = Units(port, call, shown(call) if shown is not None else None)
            found = looked_into(units, is_over)
            self.compared.measured += found
            if not any(one.unit.verdict is Verdict.OTHER for one in found):
                self._judge_again(call, units)

    def _judge_again(self, call: Call, units: Units) -> None:
        """Judges a call's program by a better estimate of the rounding, where none of its units is at fault."""
        for number, unit in enumerate(self.compared.networks):
            if (unit.network, unit.step, unit.call) == (call.network, call.step, call.number):
                units.estimate_rounding(unit.added)
                self.compared.networks[number] = dataclasses.replace(unit, rounding=units.rounding)

    def run_freely(self, ends: dict[str, dict[str, torch.Tensor]], steps: int) -> None:
        """Runs the loop from where the stage before ended, and notes how far it is from the original."""
        call, parts = self._program()
        self._drift(self._loop(call, parts, start_of(ends, self.stage), steps - 1, ends))

    def _program(self) -> tuple[Any, dict[str, Any]]:
        """Returns the network as a run compiles it, and the stage's parts."""
        task, stage = self.task, self.stage
        parts = network.loaded(task, stage, self.folder)
        module, mesh = network.module_of(stage, parts), shard.make_mesh(task.job.mesh, devices(task.machine))
        weights = network.placed(task, stage, parts, mesh, self.folder)
        return network.compiled(task, stage, module, weights, mesh), parts

    def _compare_programs(
        self, ends: dict[str, dict[str, torch.Tensor]], planned: list[programs.Program] | None
    ) -> None:
        """Runs the loop at each chosen step from where the original was; and freely, from where it begins.

        A second network's loop runs freely only where that of the first was not left early.
        """
        stage = self.stage
        call, parts = self._program()
        steps, states = sorted({recorded.step for recorded in self.calls}), self.recording.states
        loops: dict[int, _Loop] = {}
        if all(name in ends for name in stage.needs if name in DENOISING):
            loop = self._loop(call, parts, start_of(ends, stage), max(steps), ends)
            self._drift(loop)
            loops = {0: loop} if loop.first == 0 else {}  # nothing has drifted before the first step
        for step in steps:
            if step not in loops:
                loops[step] = self._loop(call, parts, (step, states[step]), step, {})
            self._compare_outputs(step, loops[step])
        if planned is not None:
            self.compared.programs += programs.differences(stage, programs.of_run(call), planned)

    def _loop(self, call: Any, parts: Mapping[str, Any], start: Any, last: int, ends: dict[str, Any]) -> _Loop:
        task, stage = self.task, self.stage
        loop = _Loop(call, start[0], last + 1)
        steps = Steps(finished=loop.finished, resume=start if start[0] else None)
        inputs = {**self.recording.embeddings, **task.noise(stage)}
        fresh = network.afresh(task, stage, parts, self.folder)
        with contextlib.suppress(Enough):
            ends[stage.name] = stage.run(fresh, loop, task.settings, steps, **inputs)
        return loop

    def _drift(self, loop: _Loop) -> None:
        for number, latents in loop.latents.items():
            original = self.recording.latents.get(number)
            apart = None if original is None else distance(latents, original)
            if apart is not None:
                self.compared.drift.append(Drift(number, apart))

    def _compare_outputs(self, step: int, loop: _Loop) -> None:
        """Compares what the programs return in a step with what the original's network returned, call by call."""
        calls = [call for call in self.calls if call.step == step]
        parts = by_call(loop.outputs[step], calls)
        if parts is None:
            line = f"{calls[0].network}: its program computes more or fewer conditions than the original"
            self.compared.unlike.append(line)
            return
        for call, part in zip(calls, parts, strict=True):
            added = distance(part, call.wide_output)
            if added is None:
                shapes = f"{list(part.shape)}, and the original's {list(call.wide_output.shape)}"
                self.compared.unlike.append(f"{call.network}: its program returns {shapes}")
                continue
            rounding = max(call.rounding, floor(call.output))
            unit = Unit(step, call.number, call.network, "", 0, "network", call.network, rounding, added, added)
            self.compared.networks.append(unit)
            if unit.verdict is Verdict.OTHER:
                self.compared.fed[call.network, step] = loop.inputs


class _Loop:
    """A compiled network in a loop that is left after a step; what it gets and returns in its first step is kept.

    Args:
        call: The network.
        first: The step that the loop begins with, from 0.
        enough: The number of the last step, from 1.
    """

    def __init__(self, call: Any, first: int, enough: int) -> None:
        self.call = call
        self.step = self.first = first
        self.enough = enough
        self.batches, self.drops = call.batches, call.drops
        self.inputs: list[dict[str, Any]] = []
        self.outputs: dict[int, list[torch.Tensor]] = {first: []}
        self.latents: dict[int, torch.Tensor] = {}

    def place(self, **inputs: Any) -> dict[str, Any]:
        """Returns the inputs where the network wants them."""
        placed: dict[str, Any] = self.call.place(**inputs)
        return placed

    def __call__(self, **inputs: Any) -> Any:
        """Returns what the network returns."""
        output = self.call(**inputs)
        if self.step == self.first:
            self.inputs.append(pytree.tree_map_only(torch.Tensor, to_host, inputs))
            self.outputs[self.step].append(output if isinstance(output, torch.Tensor) else output[0])
        return output

    def finished(self, number: int, state: Mapping[str, torch.Tensor], timestep: Any = None, kept: Any = None) -> None:
        """Is called after each step."""
        latents = latents_of(state)
        if latents is not None:
            self.latents[number] = latents.detach().clone()
        self.step = number
        if number >= self.enough:
            raise Enough
