"""What stops a network from being traced: every place in one go, from shapes alone, as a run would trace it.

Every trace has a process of its own: what is assumed stays in torch and in the modules that are imported under it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torchport import shard
from torchport.compile import network, preflight
from torchport.compile.eager import plainly
from torchport.compile.failure import Owners, class_and_message
from torchport.compile.in_force import in_force, lowerings
from torchport.errors import TopologyError, TorchportError
from torchport.porting.trace.assumptions import GoingOn, assumed, modules_go_on
from torchport.porting.trace.notes import Constant, Notes, Raised, Stopper
from torchport.processes import child
from torchport.progress import waiting
from torchport.stages import outputs, recorder
from torchport.stages.family import Stage
from torchport.task import Request, Task, accept, devices

Calls = Mapping[str, Sequence[recorder.NetworkCall]]
"""By stage, the calls that its verb makes of its network."""


@dataclasses.dataclass
class TraceReport:
    stoppers: list[Stopper]
    constants: list[Constant]  #: The largest first.
    programs: list[Program]
    stages: list[str]
    skipped: dict[str, str]  #: Why a stage is not traced, by its name.
    operators: dict[str, str] = dataclasses.field(default_factory=dict)  #: By stage, which operators agree, in words.


@dataclasses.dataclass
class Program:
    """What XLA would compile for a stage's network."""

    stage: str
    times: int  #: How often the stage calls it in this job; 0 if only another job would.
    because: str  #: Why it is not the stage's first program; empty for the first.


def trace(request: Request, patched: bool = True) -> TraceReport:
    """Returns what stops the networks of a job from being traced.

    Args:
        request: The job; it needs no prompt, and no weights are read.
        patched: Whether the card's patches are in force. Without them, the inputs still have the shapes that the
            stages make under the patches.
    """
    accept(request, dry=True)  # refusals come before a process is started
    with waiting(f"trace {request.model}"):
        calls = None if patched else child.call("torchport.porting.trace:called", request, ended=_ended)
        # Blocks that a stopper changes cannot be stacked, and without patches blocks may differ.
        overrides = request.overrides if patched else (*request.overrides, "stacked=false")
        request = dataclasses.replace(request, overrides=overrides)
        report: TraceReport = child.call("torchport.porting.trace:traced", request, calls, ended=_ended)
    return report


def _ended(end: child.Ended) -> TopologyError:
    return TopologyError("torchport trace", f"The process that traces {end}", "Mend that, or trace another job")


def called(request: Request) -> Calls:
    """Returns the calls of every stage's network, under the card's patches. `trace` runs it in a process of its own."""
    task = accept(request, dry=True)
    devices.prepare(task.machine)
    result: dict[str, list[recorder.NetworkCall]] = {}
    for stage in task.stages:
        if stage.network is not None and stage.like is not None:
            with in_force(task, [stage]):
                calls = _network_calls(task, stage)
                # `pickle` cannot carry the outputs to the parent process.
                result[stage.name] = [dataclasses.replace(call, output=None, kept={}) for call in calls]
    return result


def traced(request: Request, calls: Calls | None) -> TraceReport:
    """Traces the networks of a job's stages, and returns what stopped them. `trace` runs it in a process of its own.

    Args:
        calls: The recorded calls of the networks, for a trace without the card's patches; None applies the patches.
    """
    task = accept(request, dry=True)
    devices.prepare(task.machine)
    notes = Notes(dataclasses.replace(Owners.of_task(task), unpatched=calls is not None))
    report = TraceReport([], [], [], [], {})
    for stage in task.stages:
        if stage.network is None or stage.like is None:
            reason = "it runs on the host" if stage.network is None else "its inputs are not known beforehand"
            report.skipped[stage.name] = reason
            continue
        notes.stage = stage.name
        report.stages.append(stage.name)
        ends = f"nothing: the trace of {stage.name} ends here"
        try:
            with Raised() as raised:
                _trace_stage(task, stage, notes, calls, report)
        except TorchportError as error:
            if not notes.stoppers:
                raise
            # The values that were assumed after a stopper may be the reason: the refusal is one more stopper.
            stopper = Stopper(
                error.id, stage.name, error.place, error.fact, error.remedy, frames=[], folded=0, entry="", assumed=ends
            )
            notes.stoppers.setdefault((error.id, error.place), stopper)
        else:
            if raised.error is not None:
                notes.record(raised.error, ends)
    report.stoppers = list(notes.stoppers.values())
    report.constants = sorted(notes.constants.values(), key=lambda constant: -constant.bytes)
    return report


def _trace_stage(task: Task, stage: Stage, notes: Notes, calls: Calls | None, report: TraceReport) -> None:
    """Traces a stage's network for each set of its inputs, and adds its operators and programs to `report`. `calls` are
    the recorded calls for a trace without patches, which adds no programs; None applies the patches.
    """
    patches = task.patches([stage])
    # Patches of torchax mend the engine and not upstream: they are in force in any trace.
    entries = patches if calls is None else [entry for entry in patches if entry.upstream == "torchax"]
    # The network is called twice: on shapes alone, which gives its inputs, and to be lowered.
    on_shapes = _going_on(stage, notes, lowers=False)
    lowered = _going_on(stage, notes, lowers=True)
    with assumed(notes), modules_go_on(notes):
        with in_force(task, [stage], entries=entries, explained=False) as ledger, lowerings(ledger):
            network.check_classes(task)
            stage_calls = calls[stage.name] if calls is not None else _network_calls(task, on_shapes)
            mesh = shard.make_mesh(task.job.mesh, devices.devices(task.machine))
            parts = network.as_shapes(task, lowered)
            network.restore_attributes(task, str(lowered.network), parts[str(lowered.network)])
            module = network.module_of(lowered, parts)
            compiled = network.compiled(task, lowered, module, network.shapes(task, lowered, module, mesh), mesh)
            for call in stage_calls:
                compiled.lowered(compiled.shapes(call.inputs), call.static)  # what stops it goes into `notes`
            report.operators[stage.name] = compiled.operators.text()
        if calls is None:
            with in_force(task, [stage], entries=entries, explained=False):
                report.programs += _programs(task, on_shapes, stage_calls, notes)


def _going_on(stage: Stage, notes: Notes, lowers: bool) -> Stage:
    """Returns a copy of a stage whose call and `prepare` note errors and go on. If `lowers`, the network is lowered
    and constants are noted, too; otherwise it is called on shapes alone.
    """
    call, prepare = stage.call, stage.prepare

    def noted_call(module: Any, settings: Any, **inputs: Any) -> Any:
        notes.lowers = lowers
        with GoingOn(notes, lowers):
            return plainly(module, **inputs) if call is None else call(module, settings=settings, **inputs)

    def noted_prepare(parts: Mapping[str, Any], settings: Any) -> None:
        with Raised() as raised:
            prepare(parts, settings)  # type: ignore[misc]  # never called where `prepare` is None
        if raised.error is not None:
            notes.record(raised.error, "the rest of prepare is left out")

    return dataclasses.replace(stage, call=noted_call, prepare=noted_prepare if prepare is not None else None)


def _network_calls(task: Task, stage: Stage) -> list[recorder.NetworkCall]:
    with preflight.without_values():
        parts = network.as_shapes(task, stage)
        module, how = network.module_of(stage, parts), network.how(stage, task)
        return recorder.network_calls(stage, parts, module, how, task.settings, count=False)


def _programs(task: Task, stage: Stage, calls: Sequence[recorder.NetworkCall], notes: Notes) -> list[Program]:
    """Returns the programs of this job, and those that other values of its settings would add. A place that stops a job
    with other settings is not noted: it does not stop this job.
    """
    first = calls[0]
    result = [Program(stage.name, first.times, because="")]
    result += [Program(stage.name, call.times, _difference(first, call)) for call in calls[1:]]
    settings = task.settings
    word, scale = ("without", 1.0) if settings.guidance_scale > 1.0 else ("with", 5.0)  # at 1.0 there is no guidance
    # Other settings that a service may be asked for.
    others: dict[str, dict[str, Any]] = {
        f"{word} guidance (guidance_scale {scale})": {"guidance_scale": scale},
        f"with {settings.steps + 1} steps": {"steps": settings.steps + 1},
    }
    for words, changes in others.items():
        other = dataclasses.replace(task, settings=dataclasses.replace(settings, **changes))
        try:
            with notes.of_another_job(), Raised() as raised:
                # The calls that differ from every call of this job.
                new = [call for call in _network_calls(other, stage) if all(_difference(call, old) for old in calls)]
                result += [Program(stage.name, 0, f"{words}: {_difference(first, call)}") for call in new]
            error: BaseException | None = raised.error
        except TorchportError as refusal:
            error = refusal
        if error is not None:
            result.append(Program(stage.name, 0, f"{words}: not known, that job ends with {class_and_message(error)}"))
    if settings.text_bucket is not None and stage.needs:
        words = f"prompts whose lengths differ by more than text_bucket, {settings.text_bucket} tokens"
        result.append(Program(stage.name, 0, f"{words}: the shapes of the text"))
    return result


def _difference(first: recorder.NetworkCall, other: recorder.NetworkCall) -> str:
    """Returns how two calls' arguments differ, such as "'x' is [1, 8], not [1, 4]"; empty if one program takes both."""
    before = outputs.leaves(first.inputs)
    after = outputs.leaves(other.inputs)
    words = [f"'{name}' is only in one of them" for name in sorted(before.keys() ^ after.keys())]
    for name in sorted(before.keys() & after.keys()):
        old, new = before[name], after[name]
        if tuple(old.shape) != tuple(new.shape):
            words.append(f"'{name}' is {list(new.shape)}, not {list(old.shape)}")
        elif old.dtype != new.dtype:
            words.append(f"'{name}' is {new.dtype}, not {old.dtype}".replace("torch.", ""))
    was = dict(first.static)
    statics = dict(other.static)
    changed = [key for key in sorted(was | statics) if was.get(key) != statics.get(key)]
    words += [f"'{key}' is {statics.get(key)!r}, not {was.get(key)!r}" for key in changed]
    return "; ".join(words)
