"""Which patch is at fault: each one that was called in a faulty unit is left out, and the unit is measured again."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchport import engine, patch
from torchport.compile import network
from torchport.compile.in_force import in_force, lowerings
from torchport.errors import TorchportError
from torchport.load.foreign import brief, refusals
from torchport.progress import log
from torchport.stages.family import Stage
from torchport.task import Request, Task, accept, devices
from torchport.verify import decoder, seams
from torchport.verify.borders import Port, inner_values
from torchport.verify.recording import RecordedCall, read, split_by_call
from torchport.verify.report import FAULT, Cause, Decoded, Seam, Unit, Verdict
from torchport.verify.similarity import LEVELS
from torchport.verify.units import MeasuredUnit, Units
from torchport.verify.yardstick import distance


@dataclasses.dataclass(frozen=True)
class TaskWithout(Task):
    """A task without some of its patches."""

    without: frozenset[str] = frozenset()  #: The ids of those that are left out.

    def patches(self, stages: Sequence[Stage]) -> list[patch.Entry]:
        """Returns the patches of some stages that are not left out."""
        return [entry for entry in super().patches(stages) if entry.id not in self.without]


def task_without(task: Task, ids: Collection[str]) -> TaskWithout:
    """Returns a task without some of its patches."""
    fields = {field.name: getattr(task, field.name) for field in dataclasses.fields(Task)}
    return TaskWithout(**fields, without=frozenset(ids))


@dataclasses.dataclass(frozen=True)
class Search:
    """What the search for a patch found."""

    causes: tuple[Cause, ...]  #: The patches at fault, the likeliest first.
    #: The ids of those that were left out, with the unit's error without them, as far as the output shows it; None
    #: where it cannot be called.
    tried: dict[str, float | None]


def of_unit(request: Request, file: Path, folder: Path, measured: MeasuredUnit) -> Search:
    """Returns the patches that a unit's error comes from; runs in a process of its own."""
    task, unit = accept(request), measured.unit
    calls = read(file).calls
    call = next(c for c in calls if (c.step, c.number, c.network) == (unit.step, unit.call, unit.network))
    stage = next(stage for stage in task.denoising if stage.name == call.stage)
    devices.prepare(task.machine)
    entries = candidates(task, stage, measured)
    found = _search(task, stage, folder, unit, entries, lambda port: _error_at_border(port, call, measured))
    if any(cause.how == "absence" for cause in found.causes):
        prepared = _is_prepared(task, stage, unit.path)
        return Search(tuple(dataclasses.replace(cause, prepared=prepared) for cause in found.causes), found.tried)
    return found


def _is_prepared(task: Task, stage: Stage, path: str) -> bool:
    """Returns whether a family's `prepare` gives a module tensors that upstream's has not, or takes some away."""
    names = []
    with in_force(task, [stage]):
        for variant in (stage, dataclasses.replace(stage, prepare=None)):
            module = network.module_of(variant, network.as_shapes(task, variant)).get_submodule(path)
            names.append({name for name, _ in (*module.named_parameters(), *module.named_buffers())})
    return bool(path) and names[0] != names[1]


def of_network(request: Request, file: Path, folder: Path, unit: Unit, inputs: Sequence[Mapping[str, Any]]) -> Search:
    """Returns the patches that a network's error comes from, where each of its units is right for one condition alone.

    The network is called on one device, with what its program got: all conditions of guidance at once. Runs in a
    process of its own.
    """
    task = accept(request)
    calls = [call for call in read(file).calls if (call.step, call.network) == (unit.step, unit.network)]
    stage = next(stage for stage in task.denoising if stage.name == calls[0].stage)
    devices.prepare(task.machine)

    def error(port: Port) -> float | None:
        outputs = [port.called(values, [], {})[0] for values in inputs]
        parts = split_by_call([output if isinstance(output, torch.Tensor) else output[0] for output in outputs], calls)
        return None if parts is None else distance(parts[unit.call], calls[unit.call].wide_output)

    if _is_cured(unit.rounding, _error_without(task, stage, folder, None, error)):
        return Search((), {})  # on one device it is right
    entries = [entry for entry in task.patches([stage]) if not entry.plumbing]
    return _search(task, stage, folder, unit, entries, error)


def _search(
    task: Task,
    stage: Stage,
    folder: Path,
    unit: Unit,
    entries: Iterable[patch.Entry],
    error: Callable[[Port], float | None],
) -> Search:
    """Leaves patches out, one at a time, until a unit's error is gone."""
    tried: dict[str, float | None] = {}
    for entry in entries:
        tried[entry.id] = _error_without(task, stage, folder, entry, error)
        log.info("without %s: %s adds %s", entry.id, unit.name, tried[entry.id])
        if _is_cured(unit.rounding, tried[entry.id]):
            return Search((_cause(entry, unit, tried[entry.id]),), tried)
    return Search(tuple(_eliminated(task, stage, unit, tried)), tried)


def of_decoder(request: Request, file: Path, folder: Path, decoded: Decoded) -> Search:
    """Returns the patch that a difference of the decoder's frames comes from; runs in a process of its own."""
    task, recorded = accept(request), read(file).decoded
    stage = task.family.STAGES[-1]
    devices.prepare(task.machine)
    tried: dict[str, float | None] = {}
    unit = f"frame {decoded.frame} of {stage.name}"
    for entry in (entry for entry in task.patches([stage]) if not entry.plumbing):
        rest, without = task_without(task, [entry.id]), list[Decoded]()
        with _refusals_logged(entry), in_force(rest, [stage]):
            without.append(decoder.compare(rest, folder, recorded))
        tried[entry.id] = without[0].added / LEVELS if without else None
        log.info("without %s: %s differs by %s", entry.id, unit, tried[entry.id])
        if without and without[0].verdict is Verdict.SAME:
            errors = decoded.added / LEVELS, tried[entry.id]
            return Search((Cause(entry.id, entry.place, _promise(entry), unit, *errors, "absence"),), tried)
    return Search((), tried)


def of_seam(request: Request, file: Path, folder: Path, seam: Seam, called: Collection[str]) -> Search:
    """Returns the patch that a seam differs through: halves of those that were called are left out until one is left.

    `called` are the patches that were called where no network ran.
    """
    task, recorded = accept(request), read(file)

    def distance_without(ids: Collection[str]) -> float:
        found = seams.against(task_without(task, ids), folder, recorded.steps, recorded.seams, recorded.likes)
        key = seam.name, seam.stage, seam.step
        same = [other.distance for other in found.seams if (other.name, other.stage, other.step) == key]
        return max(same, default=0.0)

    entries = [entry for entry in task.patches(task.family.STAGES) if entry.id in called and not entry.plumbing]
    if not entries or distance_without([entry.id for entry in entries]) > seam.allowed:
        return Search((), {})
    while len(entries) > 1:
        half = entries[: len(entries) // 2]
        is_in = distance_without([entry.id for entry in half]) <= seam.allowed
        entries = half if is_in else entries[len(half) :]
    without = distance_without([entries[0].id])
    if without > seam.allowed:
        return Search((), {entries[0].id: without})
    entry = entries[0]
    cause = Cause(entry.id, entry.place, _promise(entry), seam.name, seam.distance, without, "absence")
    return Search((cause,), {entry.id: without})


def _is_cured(rounding: float, added: float | None) -> bool:
    return added is not None and added <= FAULT * rounding


def candidates(task: Task, stage: Stage, measured: MeasuredUnit) -> list[patch.Entry]:
    """Returns the patches that may be at fault: those called right before the border first, then those of its block.

    A patch whose calls are not counted may have been called anywhere.
    """
    entries = [entry for entry in task.patches([stage]) if not entry.plumbing]
    first = [entry for entry in entries if entry.id in measured.patches]
    # What a patch of an operator computes differs last: most often it is exact, and every module calls it.
    first.sort(key=lambda entry: entry.kind == "op")
    rest = [entry for entry in entries if entry not in first]
    uncounted = {entry.id for entry in rest if not entry.counted}
    nearby = [entry for entry in rest if entry.id in measured.block_patches | uncounted]
    return [*first, *nearby]


def _error_without(
    task: Task, stage: Stage, folder: Path, entry: patch.Entry | None, error: Callable[[Port], float | None]
) -> float | None:
    """Returns an error without a patch, or with all; None where the network cannot be called without it."""
    with _refusals_logged(entry), in_force(task_without(task, [entry.id] if entry else []), [stage]) as ledger:
        with lowerings(ledger):
            return error(Port(task, stage, folder, ledger))
    return None


@contextlib.contextmanager
def _refusals_logged(entry: patch.Entry | None) -> Iterator[None]:
    """Logs why a network cannot be called without a patch, and goes on."""
    name = "all patches in force" if entry is None else f"{entry.id} left out"
    try:
        yield
    except TorchportError as error:
        log.info("with %s the network cannot be called: %s", name, error.fact)
    except BaseException as error:
        if engine.missing_operator(error) is None and not isinstance(error, refusals()):
            raise
        log.info("with %s the network cannot be called: %s", name, brief(error))


def _error_at_border(port: Port, call: RecordedCall, measured: MeasuredUnit) -> float | None:
    """Returns the distance of the port from the yardstick at a border, as far as the network's output shows it.

    What is left without the patch may be harmless: a clean port may have that, too.
    """
    values = inner_values(call.values)
    paths = {*measured.forced, *measured.skipped} - {""}
    borders = {border: value for border, value in values.items() if border.path in paths}
    wide = call.inner if measured.border in call.inner and measured.unit.kind != "block" else call.outer
    watched = ["", *port.units, *measured.forced]
    observed = port.called(call.inputs, watched, borders, measured.skipped, [measured.border])[1].observed
    if measured.border not in observed:
        return None
    unit, added = measured.unit, distance(observed[measured.border], wide[measured.border])
    if added is None or added <= FAULT * unit.rounding or unit.effect is None or added >= unit.added:
        return added
    effect = Units(port, call).effect_of(measured.border, observed[measured.border])
    return added if effect is None else min(added, effect * unit.rounding)


def _eliminated(task: Task, stage: Stage, unit: Unit, tried: dict[str, float | None]) -> Iterator[Cause]:
    """Yields the one patch that could not be left out, where all others were and are not at fault."""
    untried = [key for key, added in tried.items() if added is None]
    if len(untried) == 1:
        entry = next(entry for entry in task.patches([stage]) if entry.id == untried[0])
        yield dataclasses.replace(_cause(entry, unit, None), how="elimination")


def _cause(entry: patch.Entry, unit: Unit, without: float | None) -> Cause:
    return Cause(entry.id, entry.place, _promise(entry), unit.name, unit.added, without, "absence", unit.rounding)


def _promise(entry: patch.Entry) -> str:
    """Returns what a patch promises of its equivalence, in words."""
    written = entry.equivalence.written()
    if isinstance(written, str):
        return written
    return "; ".join(f"{key}: {value}" for key, value in written.items())
