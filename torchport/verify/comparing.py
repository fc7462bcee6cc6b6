"""The port, compared with a recording of the original: its programs as a whole, and its modules one by one.

The programs of a run must also be those that a plan lowers for the same job, to the letter. They are compared before
they are compiled: modules, arguments with their dtypes and shardings, constants, and the hash of the StableHLO text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import torch
from torch.utils import _pytree as pytree

from torchport import patch
from torchport.compile import Compiled, jax_cache, network, preflight
from torchport.compile.in_force import in_force, lowerings, stage_in_force
from torchport.config.card import DENOISING
from torchport.plan import aot
from torchport.run.path import checkpoint_of
from torchport.stages.family import Stage, Steps
from torchport.stages.outputs import leaves
from torchport.task import Request, Task, accept
from torchport.task.devices import devices, prepare
from torchport.verify import decoder, recording, seams
from torchport.verify.borders import Port, Values, call_counts, compiled_network, to_host
from torchport.verify.recording import LoopStop, RecordedCall, Recording
from torchport.verify.report import Decoded, Drift, Seam, Unit, Verdict
from torchport.verify.units import MeasuredUnit, Units, measured_units, original_outputs, with_effects
from torchport.verify.yardstick import distance

_CONSTANT = re.compile(r"stablehlo\.constant dense.*: tensor<([^>]*)>")
"""A constant in the text of a program; the group is its shape and dtype."""


@dataclasses.dataclass
class Measurements:
    """All measurements of the port's process."""

    networks: list[Unit] = dataclasses.field(default_factory=list)  #: The outputs of whole networks.
    measured: list[MeasuredUnit] = dataclasses.field(default_factory=list)
    seams: list[Seam] = dataclasses.field(default_factory=list)
    unlike: list[str] = dataclasses.field(default_factory=list)  #: Notes, a line each: what was not compared.
    drift: list[Drift] = dataclasses.field(default_factory=list)
    decoded: Decoded | None = None
    #: Differences of the run's programs from a plan's, a line each.
    programs: list[str] = dataclasses.field(default_factory=list)
    #: How many operators compute what PyTorch does, in words, by stage.
    operators: dict[str, str] = dataclasses.field(default_factory=dict)
    #: The folder of the checkpoint.
    folder: Path = Path()
    #: The dtype of each network's yardstick, by network.
    yardstick: dict[str, str] = dataclasses.field(default_factory=dict)
    #: The patches that were called where no network ran: in encoders and denoising loops.
    loop_patches: frozenset[str] = frozenset()
    #: The inputs of the port's networks in the steps whose output is at fault, by network and step.
    network_inputs: dict[tuple[str, int], list[dict[str, Any]]] = dataclasses.field(default_factory=dict)


def compare(request: Request, file: Path, original: Request | None, parent: int) -> Measurements:
    """Returns how the port differs from the recording in `file`; effects are measured in `original`, if it is given."""
    task, results = accept(request), Measurements()
    with in_force(task, task.family.STAGES) as ledger, jax_cache.of_task(task):
        preflight.check(task)
        planned: dict[str, list[LoweredProgram] | None] = {}
        for stage in task.denoising:  # None where a plan does not know the network's inputs
            with stage_in_force(task, stage):
                planned[stage.name] = plan_programs(task, stage, devices(task.machine)) if stage.like else None
        recording.wait(file, parent)  # until here the original runs in parallel
        recorded = recording.read(file)
        folder = results.folder = checkpoint_of(task).folder
        dtypes = {call.network: recording.tensors_of(call.wide_output)[0].dtype for call in recorded.calls}
        results.yardstick = {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()}
        ends: dict[str, dict[str, torch.Tensor]] = {}
        for stage in task.denoising:
            if any(call.stage == stage.name for call in recorded.calls):
                with stage_in_force(task, stage) as stage_ledger:
                    comparison = _StageComparison(task, stage, folder, stage_ledger, recorded, results)
                    outputs_of = functools.partial(original_outputs, original, file) if original else None
                    comparison.run(ends, planned[stage.name], outputs_of)
        if recorded.decoded is not None:
            results.decoded = decoder.compare(task, folder, recorded.decoded)
        before = call_counts(ledger)
        results.seams, notes = seams.compare(task, folder, recorded.seams, recorded.templates)
        results.unlike = [*notes, *results.unlike]
        results.loop_patches = frozenset(key for key, count in call_counts(ledger).items() if count != before[key])
    return results


def drift_of_mesh(request: Request, file: Path, steps: int) -> list[Drift]:
    """Returns the drift of a port that runs its first `steps` steps by itself; runs in a process of its own."""
    task = accept(request)
    results = Measurements()
    recorded = recording.read(file)
    with in_force(task, task.family.STAGES), jax_cache.of_task(task):
        preflight.check(task)
        folder, ends = checkpoint_of(task).folder, dict[str, dict[str, torch.Tensor]]()
        for stage in task.denoising:
            if len(results.drift) < steps:
                with stage_in_force(task, stage) as ledger:
                    call, parts = compiled_network(task, stage, folder)
                    comparison = _StageComparison(task, stage, folder, ledger, recorded, results)
                    comparison.run_freely(call, parts, ends, steps - 1)
    return results.drift


def compare_modules(request: Request, block: Unit, folder: Path, file: Path) -> list[MeasuredUnit]:
    """Returns the measured modules of a block that `record_modules` recorded; runs in a process of its own."""
    task, call = accept(request), recording.read(file).call_of(block.network, block.step, block.call)
    prepare(task.machine)
    stage = next(stage for stage in task.denoising if stage.name == call.stage)
    with in_force(task, [stage]) as ledger, lowerings(ledger):
        original = dataclasses.replace(request, backend="original")
        port, outputs = Port(task, stage, folder, ledger), functools.partial(original_outputs, original, file, call)
        units = Units(port, call, outputs)
        units.measure_blocks()  # keeps the calls that `measure_modules` needs
        return with_effects(units, units.measure_modules(block.path))


@dataclasses.dataclass(frozen=True)
class _StageComparison:
    """Compares the network of one stage with a recording, and adds the figures to `results`."""

    task: Task
    stage: Stage
    folder: Path
    ledger: patch.Ledger
    recorded: Recording
    results: Measurements

    @property
    def calls(self) -> list[RecordedCall]:
        return [call for call in self.recorded.calls if call.stage == self.stage.name]

    def run(
        self,
        ends: dict[str, dict[str, torch.Tensor]],
        planned: list[LoweredProgram] | None,
        outputs_of: Callable[[RecordedCall, Sequence[Values]], list[Any]] | None,
    ) -> None:
        """Compares the stage's programs, then the modules of each call. `ends` has the outputs of the stages before,
        and gets those of this stage. `outputs_of` returns the original's outputs in a call, by which `Units` measures
        effects; None: they are measured in the port.
        """
        self._compare_programs(ends, planned)
        port = Port(self.task, self.stage, self.folder, self.ledger)
        for call in self.calls:
            if not call.values:
                name = f"blocks of {call.network} in call {call.number} of step {call.step}"
                self.results.unlike.append(f"not compared: {name}: those of its call 0 are the same modules")
                continue
            has_fault_before = any(item.unit.verdict is Verdict.OTHER for item in self.results.measured)
            units = Units(port, call, None if outputs_of is None else functools.partial(outputs_of, call))
            measured = measured_units(units, has_fault_before)
            self.results.measured += measured
            if any(item.unit.verdict is Verdict.OTHER for item in measured):
                continue
            for number, unit in enumerate(self.results.networks):  # judged again, by a better estimate of the rounding
                if (unit.network, unit.step, unit.call) == (call.network, call.step, call.number):
                    units.estimate_rounding(unit.added)
                    self.results.networks[number] = dataclasses.replace(unit, rounding=units.rounding)

    def run_freely(
        self, call: Compiled, parts: Mapping[str, Any], ends: dict[str, dict[str, torch.Tensor]], last: int
    ) -> _WatchedProgram:
        """Runs the loop up to step `last` from the port's own latents, and notes their distance from the original's."""
        loop = self._run_loop(call, parts, recording.start_of(ends, self.stage), last, ends)
        for number, latents in loop.latents.items():
            drift = distance(latents, self.recorded.latents.get(number))  # None where the original has no such step
            if drift is not None:
                self.results.drift.append(Drift(number, drift))
        return loop

    def _compare_programs(self, ends: dict[str, dict[str, torch.Tensor]], planned: list[LoweredProgram] | None) -> None:
        """Compares the port's programs with the original in each recorded step, started from the original's latents,
        and notes the drift: how far a loop that goes on from its own latents gets from the original's. The drift of a
        second network is measured only if the first one's loop has ended: it starts from those latents.
        """
        stage = self.stage
        call, parts = compiled_network(self.task, stage, self.folder)
        steps, states = sorted({call.step for call in self.calls}), self.recorded.states
        loops: dict[int, _WatchedProgram] = {}
        if all(name in ends for name in stage.needs if name in DENOISING):
            # A second network starts from the last latents of this loop, which then has to end.
            is_followed = any(other.step > max(steps) for other in self.recorded.calls)
            last = self.task.settings.steps if is_followed else max(steps)
            loop = self.run_freely(call, parts, ends, last)
            loops = {0: loop} if loop.first == 0 else {}  # no latents have drifted before the first step
        for step in steps:
            if step not in loops:
                loops[step] = self._run_loop(call, parts, (step, states[step]), last=step, ends={})
            self._compare_outputs(step, loops[step])
        self.results.operators[stage.name] = call.operators_text()
        if planned is not None:
            self.results.programs += program_differences(stage, run_programs(call), planned)

    def _run_loop(
        self, call: Any, parts: Mapping[str, Any], start: Any, last: int, ends: dict[str, Any]
    ) -> _WatchedProgram:
        """Runs the stage's loop from `start` (steps done, state) to step `last`; fills `ends` only if the loop ends."""
        task, stage = self.task, self.stage
        loop = _WatchedProgram(call, start[0], last + 1)
        steps = Steps(finished=loop.finished, resume=start if start[0] else None)
        inputs = {**self.recorded.embeddings, **task.noise(stage)}
        fresh = network.afresh(task, stage, parts, self.folder)
        with contextlib.suppress(LoopStop):
            ends[stage.name] = stage.run(fresh, loop, task.settings, steps, **inputs)
        return loop

    def _compare_outputs(self, step: int, loop: _WatchedProgram) -> None:
        """Compares the outputs of the port's programs in a step with those of the original's network, call by call."""
        calls = [call for call in self.calls if call.step == step]
        parts = recording.split_by_call(loop.outputs, calls)
        if parts is None:
            line = f"{calls[0].network}: its program computes more or fewer conditions than the original"
            self.results.unlike.append(line)
            return
        for call, part in zip(calls, parts, strict=True):
            wide = recording.tensors_of(call.wide_output)
            added = distance(part, wide)
            if added is None:
                shapes, expected = (", ".join(str(list(x.shape)) for x in tensors) for tensors in (part, wide))
                line = f"{call.network}: its program returns {shapes}, and the original's {expected}"
                self.results.unlike.append(line)
                continue
            place = step, call.number, call.network, ""  # the network itself has an empty path
            unit = Unit(
                *place, depth=0, kind="network", name=call.network, rounding=call.rounding, added=added, inherited=added
            )
            self.results.networks.append(unit)
            if unit.verdict is Verdict.OTHER:
                self.results.network_inputs[call.network, step] = loop.inputs


class _WatchedProgram:
    """A compiled network in a loop that stops after step `last`. Keeps its inputs and outputs of the first step."""

    def __init__(self, call: Any, first: int, last: int) -> None:
        self.call = call
        self.step = self.first = first  #: The step that the loop begins with, from 0.
        self.last = last  #: The number of the last step, from 1.
        self.batches, self.drops, self.place = call.batches, call.drops, call.place
        self.inputs: list[dict[str, Any]] = []
        self.outputs: list[Any] = []
        self.latents: dict[int, Any] = {}

    def __call__(self, **inputs: Any) -> Any:
        """Calls the network; in the first compared step it also records inputs and outputs in the host's memory."""
        output = self.call(**inputs)
        if self.step == self.first:
            # To the host: JAX arrays would start JAX in every process that unpickles them, before its devices are set.
            self.inputs.append(pytree.tree_map_only((torch.Tensor, jax.Array), to_host, inputs))
            self.outputs.append(output)
        return output

    def finished(self, number: int, state: Mapping[str, torch.Tensor], timestep: Any = None, kept: Any = None) -> None:
        """Keeps the latents after step `number`, counted from 1; raises `LoopStop` after the last step."""
        latents = recording.latents_in(state)
        if latents is not None:
            self.latents[number] = latents
        self.step = number
        if number >= self.last:
            raise LoopStop


@dataclasses.dataclass(frozen=True)
class LoweredProgram:
    """The facts of a lowered, not compiled program by which two programs are compared."""

    arguments: dict[str, str]
    static: dict[str, str]
    outputs: list[str]
    modules: dict[str, str]
    #: The number of constants of each shape and dtype; scalars are left out.
    constants: dict[str, int]
    text: str

    @property
    def digest(self) -> str:
        """The first 16 digits of the SHA-256 of the text, by which a person tells programs apart."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


def lower(compiled: Compiled, arrays: Mapping[str, Any], static: Any) -> LoweredProgram:
    """Returns a network's lowered program for inputs that are given as shapes with shardings, and static arguments."""
    lowered = compiled.lowered(arrays, static)
    text = lowered.as_text()
    arguments = {**{f"weight {name}": leaf for name, leaf in compiled.weights.items()}, **leaves(arrays)}
    modules = dict(compiled.network.module.named_modules())
    constants = Counter(shape for shape in _CONSTANT.findall(text) if "x" in shape)  # `2x4xf32`; a scalar is `f32`
    return LoweredProgram(
        arguments={path: f"{leaf.dtype} {list(leaf.shape)} {leaf.sharding.spec}" for path, leaf in arguments.items()},
        static={name: repr(value) for name, value in static},
        outputs=[f"{leaf.dtype} {list(leaf.shape)}" for leaf in jax.tree.leaves(lowered.out_info)],
        modules={path: f"{type(part).__module__}.{type(part).__qualname__}" for path, part in modules.items()},
        constants=dict(constants),
        text=text,
    )


def run_programs(compiled: Compiled) -> list[LoweredProgram]:
    """Returns the lowered programs of all calls that a network got in a run."""
    programs = []
    for static, _, tree, kinds in compiled.programs:  # the keys of `Compiled._program`
        shapes = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype, sharding in kinds]
        programs.append(lower(compiled, jax.tree.unflatten(tree, shapes), static))
    return programs


def plan_programs(task: Task, stage: Stage, devices: Any) -> list[LoweredProgram]:
    """Returns the lowered programs that a plan has for a stage's network."""
    with aot.outlined(task, stage, devices) as outline:
        compiled = outline.program
        return [lower(compiled, compiled.shapes(called.inputs), called.static) for called in outline.called]


def program_differences(stage: Stage, run: list[LoweredProgram], plan: list[LoweredProgram]) -> list[str]:
    """Returns a line for each program of a run that a plan lacks; a run that stops early may have fewer programs."""
    lines = []
    digests = [program.digest for program in plan]
    for program in run:
        if program.digest not in digests:
            nearest = min(plan, key=lambda other: sum(1 for _ in _differing_fields(program, other)), default=None)
            difference = "a plan has no program" if nearest is None else next(_differing_fields(program, nearest))
            lines.append(f"{stage.name}: run and plan compile two programs ({program.digest}): {difference}")
    return lines


def _differing_fields(run: LoweredProgram, plan: LoweredProgram) -> Iterator[str]:
    """Yields the differences of two programs in words: fields first, then the first line of text that differs."""
    # The words before a name. Those of `arguments` need none: `weight norm.bias`.
    kinds = {"modules": "module", "static": "argument", "arguments": "", "constants": "constants of"}
    for field, kind in kinds.items():
        in_run = getattr(run, field)
        in_plan = getattr(plan, field)
        for name in {**in_run, **in_plan}:
            if in_run.get(name) != in_plan.get(name):
                values = ["absent" if facts.get(name) is None else facts[name] for facts in (in_run, in_plan)]
                yield f"{kind} '{name}' is {values[0]} in a run and {values[1]} in a plan".strip()
    if run.outputs != plan.outputs:
        yield f"the output is {', '.join(run.outputs)} in a run and {', '.join(plan.outputs)} in a plan"
    pairs = zip(run.text.splitlines(), plan.text.splitlines(), strict=False)
    difference = next(((number, a, b) for number, (a, b) in enumerate(pairs, 1) if a != b), None)
    if difference is not None:
        number, a, b = difference
        yield f"line {number} of the text is `{a.strip()[:120]}` in a run and `{b.strip()[:120]}` in a plan"
    elif run.text != plan.text:
        yield "the text of one goes on where the other ends"
