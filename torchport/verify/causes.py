"""Which patch is at fault: each one that was called in a faulty unit is left out, and the unit is measured again."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchport import engine, patch
from torchport.compile import network
from torchport.compile.in_force import in_force, lowerings
from torchport.errors import TorchportError
from torchport.foreign import brief, refusals
from torchport.progress import log
from torchport.stages.family import Stage
from torchport.task import Request, Task, accept, devices
from torchport.verify import decoder, seams
from torchport.verify.facts import FAULT, LEVELS, Cause, Decoded, Seam, Unit, Verdict
from torchport.verify.original import given
from torchport.verify.port import Port
from torchport.verify.recording import Call, by_call, read
from torchport.verify.units import Measured, Units
from torchport.verify.yardstick import distance


@dataclasses.dataclass(frozen=True)
class Without(Task):
    """A task without some of its patches.

    Attributes:
        without: The ids of those that are left out.
    """

    without: frozenset[str] = frozenset()

    def patches(self, stages: Sequence[Stage]) -> list[patch.Entry]:
        """Returns the patches of some stages that are not left out."""
        return [entry for entry in super().patches(stages) if entry.id not in self.without]


def leaving_out(task: Task, ids: Collection[str]) -> Without:
    """Returns a task without some of its patches."""
    fields = {field.name: getattr(task, field.name) for field in dataclasses.fields(Task)}
    return Without(**fields, without=frozenset(ids))


@dataclasses.dataclass(frozen=True)
class Search:
    """What the search for a patch found.

    Attributes:
        causes: The patches at fault, the likeliest first.
        tried: The ids of those that were left out, with the unit's error without them, as far as the output shows it;
            None where it cannot be called.
    """

    causes: tuple[Cause, ...]
    tried: dict[str, float | None]


def search(request: Request, file: Path, folder: Path, measured: Measured) -> Search:
    """Returns the patches that a unit's error comes from; runs in a process of its own.

    Args:
        request: Of the port.
        file: The recording.
        folder: The checkpoint's.
        measured: The unit.
    """
    task = accept(request)
    recording = read(file)
    unit = measured.unit
    call = next(c for c in recording.calls if (c.step, c.number, c.network) == (unit.step, unit.call, unit.network))
    stage = next(stage for stage in task.denoising if stage.name == call.stage)
    devices.prepare(task.machine)
    tried: dict[str, float | None] = {}
    for entry in candidates(task, stage, measured):
        tried[entry.id] = _without(task, stage, folder, entry, lambda port: _added(port, call, measured))
        log.info("without %s: %s adds %s", entry.id, unit.name, tried[entry.id])
        if _is_cured(unit.rounding, tried[entry.id]):
            cause = _cause(entry, unit, tried[entry.id])
            return Search((dataclasses.replace(cause, prepared=_is_prepared(task, stage, unit.path)),), tried)
    return Search(tuple(_left(task, stage, unit, tried)), tried)


def _is_prepared(task: Task, stage: Stage, path: str) -> bool:
    """Returns whether a family's `prepare` gives a module tensors that upstream's has not, or takes some away."""
    names = []
    with in_force(task, [stage]):
        for one in (stage, dataclasses.replace(stage, prepare=None)):
            module = network.module_of(one, network.as_shapes(task, one)).get_submodule(path)
            names.append({name for name, _ in (*module.named_parameters(), *module.named_buffers())})
    return bool(path) and names[0] != names[1]


def of_network(request: Request, file: Path, folder: Path, unit: Unit, fed: Sequence[Mapping[str, Any]]) -> Search:
    """Returns the patches that a network's error comes from, where each of its units is right for one condition alone.

    The network is called on one device, with what its program got: all conditions of guidance at once. Runs in a
    process of its own.

    Args:
        request: Of the port.
        file: The recording.
        folder: The checkpoint's.
        unit: The network's call.
        fed: What its program got in this step.
    """
    task = accept(request)
    calls = [call for call in read(file).calls if (call.step, call.network) == (unit.step, unit.network)]
    stage = next(stage for stage in task.denoising if stage.name == calls[0].stage)
    devices.prepare(task.machine)

    def added(port: Port) -> float | None:
        outputs = [port.called(inputs, [], {})[0] for inputs in fed]
        parts = by_call([output if isinstance(output, torch.Tensor) else output[0] for output in outputs], calls)
        return None if parts is None else distance(parts[unit.call], calls[unit.call].wide_output)

    own = _without(task, stage, folder, None, added)
    if _is_cured(unit.rounding, own):
        return Search((), {})  # on one device it is right
    tried: dict[str, float | None] = {}
    for entry in (entry for entry in task.patches([stage]) if not entry.plumbing):
        tried[entry.id] = _without(task, stage, folder, entry, added)
        log.info("without %s: %s adds %s", entry.id, unit.name, tried[entry.id])
        if _is_cured(unit.rounding, tried[entry.id]):
            return Search((_cause(entry, unit, tried[entry.id]),), tried)
    return Search(tuple(_left(task, stage, unit, tried)), tried)


def of_decoder(request: Request, file: Path, folder: Path, decoded: Decoded) -> Search:
    """Returns the patch that a difference of the decoder's frames comes from; runs in a process of its own.

    Args:
        request: Of the port.
        file: The recording.
        folder: The checkpoint's.
        decoded: The frames.
    """
    task, recording = accept(request), read(file)
    stage = task.family.STAGES[-1]
    devices.prepare(task.machine)
    tried: dict[str, float | None] = {}
    unit = f"frame {decoded.frame} of {stage.name}"
    for entry in (entry for entry in task.patches([stage]) if not entry.plumbing):
        rest, ends = leaving_out(task, [entry.id]), list[Decoded]()
        with _what_refuses(entry), in_force(rest, [stage]):
            ends.append(decoder.compared(rest, folder, recording.decoded))
        tried[entry.id] = ends[0].added / LEVELS if ends else None
        log.info("without %s: %s differs by %s", entry.id, unit, tried[entry.id])
        if ends and ends[0].verdict is Verdict.SAME:
            cause = Cause(
                entry.id, entry.place, _promise(entry), unit, decoded.added / LEVELS, tried[entry.id], "absence"
            )
            return Search((cause,), tried)
    return Search((), tried)


def of_seam(request: Request, file: Path, folder: Path, seam: Seam, called: Collection[str]) -> Search:
    """Returns the patch that a seam differs through: halves of the patches are left out until one is left.

    Args:
        request: Of the port.
        file: The recording.
        folder: The checkpoint's.
        seam: The seam.
        called: The patches that were called where no network ran.
    """
    task = accept(request)
    recording = read(file)

    def distance_without(ids: Collection[str]) -> float:
        found = seams.against(leaving_out(task, ids), folder, recording.steps, recording.seams, recording.likes)
        same = [one for one in found.seams if (one.name, one.stage, one.step) == (seam.name, seam.stage, seam.step)]
        return max((one.distance for one in same), default=0.0)

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


def candidates(task: Task, stage: Stage, measured: Measured) -> list[patch.Entry]:
    """Returns the patches that may be at fault: those called right before the border first, then those of its block.

    A patch whose calls are not counted may have been called anywhere.
    """
    entries = [entry for entry in task.patches([stage]) if not entry.plumbing]
    first = [entry for entry in entries if entry.id in measured.touched]
    # What a patch of an operator computes differs last: most often it is exact, and every module calls it.
    first.sort(key=lambda entry: entry.kind == "op")
    rest = [entry for entry in entries if entry not in first]
    uncounted = {entry.id for entry in rest if not entry.counted}
    nearby = [entry for entry in rest if entry.id in measured.nearby | uncounted]
    return [*first, *nearby]


def _without(
    task: Task, stage: Stage, folder: Path, entry: patch.Entry | None, added: Callable[[Port], float | None]
) -> float | None:
    """Returns an error without a patch, or with all; None where the network cannot be called without it.

    Args:
        task: The port's.
        stage: The network's.
        folder: The checkpoint's.
        entry: The patch; None: all are in force.
        added: Measures the error.
    """
    with _what_refuses(entry), in_force(leaving_out(task, [entry.id] if entry else []), [stage]) as ledger:
        with lowerings(ledger):
            return added(Port(task, stage, folder, ledger))
    return None


@contextlib.contextmanager
def _what_refuses(entry: patch.Entry | None) -> Iterator[None]:
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


def _added(port: Port, call: Call, measured: Measured) -> float | None:
    """Returns the distance of the port from the yardstick at a border, as far as the network's output shows it.

    What is left without the patch may be harmless: a clean port may have that, too.
    """
    values = given(call.values)
    paths = {*measured.forced, *measured.skipped} - {""}
    borders = {border: value for border, value in values.items() if border.path in paths}
    wide = call.inner if measured.border in call.inner and measured.unit.kind != "block" else call.outer
    watched = ["", *port.outer, *measured.forced]
    noted = port.called(call.inputs, watched, borders, measured.skipped, [measured.border])[1].noted
    if measured.border not in noted:
        return None
    unit, added = measured.unit, distance(noted[measured.border], wide[measured.border])
    if added is None or added <= FAULT * unit.rounding or unit.effect is None or added >= unit.added:
        return added
    effect = Units(port, call).effect_of(measured.border, noted[measured.border])
    return added if effect is None else min(added, effect * unit.rounding)


def _left(task: Task, stage: Stage, unit: Unit, tried: dict[str, float | None]) -> Iterator[Cause]:
    """Yields the patches that could not be left out: all others were, and are not at fault."""
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
