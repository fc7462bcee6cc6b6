"""A verification records the original, compares the port with it, and searches for the patch at fault.

Each of the three runs in a process of its own, so that no patch of a port is in force in the original.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torchport import engine, patch
from torchport.compile import network
from torchport.compile.in_force import in_force, lowerings
from torchport.config.card import DENOISING
from torchport.errors import BadValueError, MachineError, TorchportError
from torchport.files import atomic
from torchport.load.foreign import brief, refusals
from torchport.processes import child
from torchport.progress import log, waiting
from torchport.stages.family import Stage
from torchport.task import Request, Task, accept, devices
from torchport.verify import decoder, reference, seams
from torchport.verify.borders import Port, inner_values
from torchport.verify.comparing import Measurements
from torchport.verify.recording import BlockKey, RecordedCall, read, split_by_call, tensors_of
from torchport.verify.report import FAULT, Cause, Decoded, Drift, Seam, Unit, Verdict, Verification
from torchport.verify.units import MeasuredUnit, Units
from torchport.verify.yardstick import LEVELS, channel_ratio, distance

SMALLER = "Free memory, or make the video smaller: --set height=, width= or frames="


@dataclasses.dataclass(frozen=True)
class Options:
    """What a verification compares, and with what."""

    steps: tuple[int, ...] | None = None
    decodes: bool = False
    #: Another mesh, on which the drift is measured for comparison; None: none.
    floor: str | None = None
    #: The folder of a capture, which is used instead of the original; None: the original runs.
    reference: Path | None = None


def verify(request: Request, options: Options) -> Verification:
    """Returns how far a port differs from the original, with a verdict, and the patch at fault if one is found."""
    task = _accept(request)
    _check_steps(task, options.steps)
    if options.floor is not None:
        _check_floor(task, options.floor)
    clock = _Clock()
    with atomic.scratch() as folder:
        file = folder / "original.pt"
        notes, left_out = ([], 0) if options.reference is None else reference.check(options.reference, task)
        found = _side_by_side(task, options, file, clock)
        if options.reference is None and any(item.unit.verdict is Verdict.OTHER for item in found.measured):
            with clock.lap("the faulty block"):
                _measure_modules(found, request, file)
        verification = _verification(task, options, found, notes)
        verification = dataclasses.replace(verification, left_out=left_out)
        decoded = verification.decoded
        if verification.bad_seams or verification.culprits:
            with clock.lap("the patch at fault"):
                verification = _blame(verification, found, request, file)
        elif decoded is not None and decoded.verdict is not Verdict.SAME:
            with clock.lap("the patch at fault"):
                verification = _blame_of_decoder(verification, decoded, task, options, found.folder, file)
        if options.floor is not None and verification.drift:
            with clock.lap("the floor"):
                verification = _with_floor(verification, task, options.floor, file)
        return dataclasses.replace(verification, seconds=clock.seconds)


def _accept(request: Request) -> Task:
    """Returns a request's task; raises if the task has a step cache, which changes the latents."""
    task = accept(request)
    if task.job.cache is not None:
        fact = "A step cache makes other latents on purpose, and a verification is of the network that it calls"
        raise BadValueError(task.job_document.place(["cache"]), fact, "Verify without it: --set cache=null")
    return task


def _measure_modules(found: Measurements, request: Request, file: Path) -> None:
    """Measures the modules of the first faulty block, unless they were: a recording of all modules may be too large."""
    bad = [item for item in found.measured if item.unit.verdict is Verdict.OTHER]
    if not bad or bad[0].unit.kind != "block":
        return
    unit = bad[0].unit
    if any(item.block == unit.path and item.unit.kind != "block" for item in found.measured):
        return
    key = BlockKey(unit.network, unit.step, unit.call, unit.path)
    _call("recording:record_modules", dataclasses.replace(request, backend="original"), key, file)
    found.measured += _call("comparing:compare_modules", request, key, found.folder, file)


def _side_by_side(task: Task, options: Options, file: Path, clock: _Clock) -> Measurements:
    """Runs the original and the port, each in a process, and returns how they differ; if one fails, the other stops.
    The port's process imports, checks and plans while the original's runs, but loads no weights before that has ended.
    """
    original = dataclasses.replace(task.request, backend="original") if options.reference is None else None
    no_port, no_original = threading.Event(), threading.Event()

    def compare() -> Measurements:
        arguments = task.request, file, original, os.getpid()
        try:
            found: Measurements = _call("comparing:compare", *arguments, stop=no_original)
            return found
        except BaseException:
            no_port.set()
            raise

    with ThreadPoolExecutor(1) as pool:
        port: Future[Measurements] = pool.submit(compare)
        try:
            with contextlib.suppress(child.ChildStoppedError):  # the port has failed: `port.result()` raises its error
                _write_recording(task, options, file, clock, no_port)
            with clock.lap("the port"):
                return port.result()
        except BaseException:
            no_original.set()
            raise


def _write_recording(task: Task, options: Options, file: Path, clock: _Clock, stop: threading.Event) -> None:
    """Writes to `file` what the original computes: from a capture if one is given, or else by running the original."""
    if options.reference is not None:
        with clock.lap("the capture"):
            _call("reference:unpack", options.reference, file, stop=stop)
        return
    original = dataclasses.replace(task.request, backend="original")
    with clock.lap("the original"):
        _call("recording:record", original, options.steps, file, options.decodes, stop=stop)


def capture_original(request: Request, options: Options, folder: Path, limit: int) -> str:
    """Writes a capture of the original to a folder, for a port on another machine; returns a text of what it has."""
    original = dataclasses.replace(request, backend="original")
    _check_steps(_accept(request), options.steps)
    with _Clock().lap("the original"):
        words: str = _call("reference:record", original, options.steps, options.decodes, folder, limit)
    return words


def _call(function: str, *arguments: Any, stop: threading.Event | None = None) -> Any:
    """Calls a function of this package, named as `module:function`, in a new process; returns what it returns."""

    def ended(end: child.Ended) -> MachineError:
        remedy = SMALLER if end.code < 0 else "Report this, with what `torchport -v verify` prints"
        return MachineError(f"torchport.verify.{function}", f"Its process {end}", remedy)

    environment = {"PYTHONWARNINGS": "ignore"}
    return child.call(f"torchport.verify.{function}", *arguments, ended=ended, environment=environment, stop=stop)


def _with_floor(verification: Verification, task: Task, mesh: str, file: Path) -> Verification:
    """Returns a verification with the drift of the same port on another mesh, for comparison."""
    request, steps = _on_mesh(task, mesh), max(row.step for row in verification.drift)
    floors: list[Drift] = _call("comparing:drift_of_mesh", request, file, steps)
    by_step = {row.step: row.distance for row in floors}
    drift = tuple(dataclasses.replace(row, floor=by_step.get(row.step)) for row in verification.drift)
    return dataclasses.replace(verification, drift=drift, floor=f"the same port on {mesh}")


def _on_mesh(task: Task, mesh: str) -> Request:
    """Returns a task's request with another mesh, such as `dp=1,tp=4`; raises if the text is no mesh."""
    parts = [part.partition("=") for part in mesh.split(",")]
    sizes = {axis: size for axis, _, size in parts}
    if len(sizes) < len(parts) or not all(re.fullmatch(r"[a-z]\w*=[1-9]\d{0,5}", "".join(part)) for part in parts):
        raise BadValueError(f"--floor {mesh}", "It is no mesh", "Write the size of each axis once: dp=1,tp=4")
    overrides = (*task.request.overrides, f"mesh={{{', '.join(f'{axis}: {size}' for axis, size in sizes.items())}}}")
    if task.machine.platform == "cpu":  # virtual devices: as many as the mesh takes
        overrides += (f"machine=cpu:{math.prod(map(int, sizes.values()))}",)
    return dataclasses.replace(task.request, overrides=overrides)


def _check_floor(task: Task, mesh: str) -> None:
    """Raises an error that names --floor if the job cannot run on that mesh."""
    try:
        accept(_on_mesh(task, mesh))  # for its errors alone
    except BadValueError:
        raise
    except TorchportError as error:
        raise BadValueError(f"--floor {mesh}", error.fact, error.remedy) from error


class _Clock:
    """Measures the seconds of each part of a verification, and shows the running part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def lap(self, what: str) -> Iterator[None]:
        """Measures a part, named `what`, for the length of a `with`."""
        start = time.perf_counter()
        with waiting(f"verify: {what}"):
            yield
        self.seconds[what] = round(time.perf_counter() - start, 1)


def _check_steps(task: Task, steps: tuple[int, ...] | None) -> None:
    """Raises if a step that --steps names is none of the job's."""
    for step in steps or ():
        if not 0 <= step < task.settings.steps:
            fact = f"The job takes {task.settings.steps} steps, which are 0 to {task.settings.steps - 1}"
            raise BadValueError(f"--steps {step}", fact, "Name some of these")


def _verification(task: Task, options: Options, found: Measurements, notes: list[str]) -> Verification:
    """Returns the report of all measurements; the causes of errors are added later."""
    names = [str(stage.network) for stage in task.family.STAGES if stage.name in DENOISING]
    dtypes = {name: task.dtype(name) for name in names}
    units = (*found.networks, *(measured.unit for measured in found.measured))
    steps = tuple(sorted({unit.step for unit in units}))
    return Verification(
        model=task.card.model,
        config=task.request.config,
        dtypes=dtypes,
        yardstick={name: found.yardstick.get(name, "none") for name in names},
        strategy=task.job.strategy,
        mesh={str(axis): size for axis, size in task.job.mesh.items()},
        steps=steps,
        total=task.settings.steps,
        seams=found.seams.seams,
        units=units,
        drift=tuple(found.drift),
        decoded=found.decoded,
        against="original" if options.reference is None else f"run:{options.reference}",
        unlike=(*notes, *found.seams.unlike, *found.unlike, *_not_compared(options, found.decoded)),
        programs=tuple(found.programs),
        operators=found.operators,
    )


def _not_compared(options: Options, decoded: Decoded | None) -> list[str]:
    """Returns the report's note on what no verification of these options compares."""
    remedy = "--decode compares it" if options.reference is None else "capture with --decode"
    decoder = [] if decoded is not None else [f"the decoder ({remedy})"]
    return [f"not compared: {', and '.join([*decoder, 'the weights of the text encoders'])}"]


def _blame(verification: Verification, found: Measurements, request: Request, file: Path) -> Verification:
    """Returns a verification with the patch that causes its first fault, or with a clue where no patch does."""
    if verification.bad_seams:
        seam = verification.bad_seams[0]
        search: Search = _call("verification:causes_of_seam", request, file, found.folder, seam, found.loop_patches)
        clue = "no patch is at fault: look at the family's loop, and at the card"
        return _with_causes(verification, search, lambda: clue)
    unit = verification.culprits[0]
    measured = next((item for item in found.measured if item.unit == unit), None)
    if measured is None:
        inputs = found.network_inputs[unit.network, unit.step]
        search = _call("verification:causes_of_network", request, file, found.folder, unit, inputs)
        return _with_causes(verification, search, lambda: _network_clue(search, verification.strategy))
    search = _call("verification:causes_of_unit", request, file, found.folder, measured)
    return _with_causes(verification, search, lambda: _unit_clue(search))


def _blame_of_decoder(
    verification: Verification, decoded: Decoded, task: Task, options: Options, folder: Path, file: Path
) -> Verification:
    """Returns a verification with the decoder's first module that differs, and the patch at fault or a clue."""
    original = dataclasses.replace(task.request, backend="original") if options.reference is None else None
    search, parted = _call("verification:causes_of_decoder", task.request, original, file, folder, decoded)
    if parted is not None:
        decoded = dataclasses.replace(decoded, parting=parted.words)
        verification = dataclasses.replace(verification, decoded=decoded)
    return _with_causes(verification, search, lambda: _decoder_clue(task, search, parted))


def _network_clue(search: Search, strategy: str) -> str:
    """Returns where to look if a network is wrong, but each of its units is right when called for one condition."""
    if not search.tried:
        place = f"strategy '{strategy}'"
        return f"each of its modules alone is right on one device: look at the rules of {place}, and at --no-jit"
    return f"called for all conditions of guidance at once, it is wrong on one device, too; {_unit_clue(search)}"


def _decoder_clue(task: Task, search: Search, parted: decoder.Parting | None) -> str:
    """Returns where to look if the decoder is wrong, and leaving out one patch does not cure it."""
    if parted is not None and parted.patches:
        entries = sorted(task.patches(task.family.STAGES[-1:]), key=lambda entry: entry.kind == "op")  # mostly exact
        words = [f"{entry.id} ({entry.place})" for entry in entries if entry.id in parted.patches]
        return f"leaving out one patch does not cure it; called in that module: {', '.join(words)}"
    if not search.tried:
        return "it has no patch: look at the card's dtypes and rules"
    return f"leaving out one patch does not cure it ({', '.join(search.tried)}): look at two of them, and at dtypes"


def _with_causes(verification: Verification, search: Search, clue: Callable[[], str]) -> Verification:
    """Returns a verification with the causes that a search found; without any, with the text that `clue` returns."""
    return dataclasses.replace(verification, causes=search.causes, clue="" if search.causes else clue())


def _unit_clue(search: Search) -> str:
    """Returns where to look if a unit is wrong, and no single patch causes its error."""
    if not search.tried:
        return "no patch is called in it: look at the card's dtypes and rules, and at the family's `prepare`"
    tried = ", ".join(search.tried)
    return f"leaving out one patch does not cure it ({tried}): look at two of them, at dtypes, and at `prepare`"


@dataclasses.dataclass(frozen=True)
class _TaskWithout(Task):
    """A task that leaves out the patches with the ids `without`."""

    without: frozenset[str] = frozenset()

    def patches(self, stages: Sequence[Stage]) -> list[patch.Entry]:
        """Returns the patches of some stages, as `Task.patches` does, but for those that are left out."""
        return [entry for entry in super().patches(stages) if entry.id not in self.without]


def _task_without(task: Task, ids: Collection[str]) -> _TaskWithout:
    fields = {field.name: getattr(task, field.name) for field in dataclasses.fields(Task)}
    return _TaskWithout(**fields, without=frozenset(ids))


@dataclasses.dataclass(frozen=True)
class Search:
    """What a search for the patch at fault has found."""

    causes: tuple[Cause, ...]
    #: The error without each patch that was left out, by the patch's id, as far as the output shows it; None where the
    #: network cannot be called without it.
    tried: dict[str, float | None]


def causes_of_unit(request: Request, file: Path, folder: Path, measured: MeasuredUnit) -> Search:
    """Returns the patch that causes a unit's error, and all patches tried; runs in a process of its own."""
    task, unit = accept(request), measured.unit
    call = BlockKey(unit.network, unit.step, unit.call, "").call_of(read(file))
    stage = next(stage for stage in task.denoising if stage.name == call.stage)
    devices.prepare(task.machine)
    entries = candidates(task, stage, measured)
    found = _search(task, stage, folder, unit, entries, lambda port: _error_at_border(port, call, measured))
    causes = found.causes
    if any(cause.how == "absence" for cause in causes):
        prepared = _is_prepared(task, stage, unit.path)
        causes = tuple(dataclasses.replace(cause, prepared=prepared) for cause in causes)
    earlier = measured.reshaped_patches - measured.patches - measured.block_patches
    words = dict.fromkeys(earlier, measured.reshaped)
    causes = tuple(dataclasses.replace(cause, reshaped=words.get(cause.patch, "")) for cause in causes)
    return Search(causes, found.tried)


def _is_prepared(task: Task, stage: Stage, path: str) -> bool:
    """Returns whether a family's `prepare` adds parameters or buffers to a module, or removes some."""
    names = []
    with in_force(task, [stage]):
        for variant in (stage, dataclasses.replace(stage, prepare=None)):
            module = network.module_of(variant, network.as_shapes(task, variant)).get_submodule(path)
            names.append({name for name, _ in (*module.named_parameters(), *module.named_buffers())})
    return bool(path) and names[0] != names[1]


def causes_of_network(
    request: Request, file: Path, folder: Path, unit: Unit, inputs: Sequence[Mapping[str, Any]]
) -> Search:
    """Returns the patch that causes a network's error, where each of its units is right for one condition alone.

    The network is called on one device with its program's inputs, all conditions of guidance in one batch. If the
    output is right then, no patch is tried: sharding or the compiler is at fault. Runs in a process of its own.
    """
    task = accept(request)
    calls = [call for call in read(file).calls if (call.step, call.network) == (unit.step, unit.network)]
    stage = next(stage for stage in task.denoising if stage.name == calls[0].stage)
    devices.prepare(task.machine)

    def error(port: Port) -> float | None:
        outputs = [port.called(values, [], {})[0] for values in inputs]
        parts = split_by_call(outputs, calls)
        return None if parts is None else distance(parts[unit.call], tensors_of(calls[unit.call].wide_output))

    if _is_cured(unit.rounding, _error_without(task, stage, folder, None, error)):
        return Search((), {})  # right on one device: no patch is at fault
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
    """Leaves out one patch at a time, until a unit's `error` is gone. Returns that patch as the cause (no cause if the
    error stays), and the error without each patch that was tried.
    """
    tried: dict[str, float | None] = {}
    for entry in entries:
        tried[entry.id] = _error_without(task, stage, folder, entry, error)
        log.info("without %s: %s adds %s", entry.id, unit.name, tried[entry.id])
        if _is_cured(unit.rounding, tried[entry.id]):
            return Search((_cause(entry, unit, tried[entry.id]),), tried)
    return Search(tuple(_cause_by_elimination(task, stage, unit, tried)), tried)


def causes_of_decoder(
    request: Request, original: Request | None, file: Path, folder: Path, decoded: Decoded
) -> tuple[Search, decoder.Parting | None]:
    """Returns the patch that causes a difference of the decoded frames, and the first module that differs. Without
    `original`, as beside a capture, the module is None. Runs in a process of its own.
    """
    task, recorded = accept(request), read(file).decoded
    stage = task.family.STAGES[-1]
    devices.prepare(task.machine)
    parted = None if original is None else decoder.parting(task, accept(original), folder, recorded)
    tried: dict[str, float | None] = {}
    unit = f"frame {decoded.frame} of {stage.name}"
    entries = [entry for entry in task.patches([stage]) if not entry.plumbing]
    for entry in sorted(entries, key=lambda entry: parted is not None and entry.id not in parted.patches):
        reduced, without = _task_without(task, [entry.id]), None
        with _refusals_logged([entry]), in_force(reduced, [stage]):
            without = decoder.compare(reduced, folder, recorded)
        tried[entry.id] = None if without is None else without.added / LEVELS
        log.info("without %s: %s differs by %s", entry.id, unit, tried[entry.id])
        if without is not None and without.verdict is Verdict.SAME:
            errors = decoded.added / LEVELS, tried[entry.id]
            return Search((Cause(entry.id, entry.place, _promise(entry), unit, *errors, how="absence"),), tried), parted
    return Search((), tried), parted


def causes_of_seam(request: Request, file: Path, folder: Path, seam: Seam, called: Collection[str]) -> Search:
    """Returns the patch that causes a seam's difference, found by bisection. Candidates are the patches that were
    `called` outside the networks; one half of them is left out at a time.
    """
    task, recorded = accept(request), read(file)

    def distance_without(ids: Collection[str]) -> float:
        found = seams.compare(_task_without(task, ids), folder, recorded.steps, recorded.seams, recorded.likes)
        key = seam.name, seam.stage, seam.step
        same = [other.distance for other in found.seams if (other.name, other.stage, other.step) == key]
        return max(same, default=0.0)

    entries = [entry for entry in task.patches(task.family.STAGES) if entry.id in called and not entry.plumbing]
    if task.job.encode == "devices":
        devices.prepare(task.machine)
        entries = [entry for entry in entries if entry.package not in ("torch", "torchax")]  # encoders run on these
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
    cause = Cause(entry.id, entry.place, _promise(entry), seam.name, seam.distance, without, how="absence")
    return Search((cause,), {entry.id: without})


def _is_cured(rounding: float, added: float | None) -> bool:
    """Returns whether an error is no longer a fault's; never where it could not be measured (None)."""
    return added is not None and added <= FAULT * rounding


def candidates(task: Task, stage: Stage, measured: MeasuredUnit) -> list[patch.Entry]:
    """Returns the patches that may cause a unit's error: called in it, then in its block (or uncounted), then earlier.
    Of the earlier ones only those up to the first module whose output has another shape: the error may follow from it.
    """
    entries = [entry for entry in task.patches([stage]) if not entry.plumbing]
    first = [entry for entry in entries if entry.id in measured.patches]
    # Patches of operators come last: every module calls them, and most are exact.
    first.sort(key=lambda entry: entry.kind == "op")
    others = [entry for entry in entries if entry not in first]
    uncounted = {entry.id for entry in others if not entry.counted}
    nearby = [entry for entry in others if entry.id in measured.block_patches | uncounted]
    earlier = [entry for entry in others if entry not in nearby and entry.id in measured.reshaped_patches]
    return [*first, *nearby, *earlier]


def _error_without(
    task: Task, stage: Stage, folder: Path, entry: patch.Entry | None, error: Callable[[Port], float | None]
) -> float | None:
    """Returns the `error` of a port without one patch, or with all if `entry` is None; None if it cannot be called."""
    entries = [entry] if entry else []
    with _refusals_logged(entries), in_force(_task_without(task, [each.id for each in entries]), [stage]) as ledger:
        with lowerings(ledger):
            return error(Port(task, stage, folder, ledger))
    return None  # the error was logged


@contextlib.contextmanager
def _refusals_logged(entries: Sequence[patch.Entry]) -> Iterator[None]:
    """Logs and suppresses the error of a network that cannot be called while the patches `entries` are left out."""
    name = f"{', '.join(entry.id for entry in entries)} left out" if entries else "all patches in force"
    try:
        yield
    except TorchportError as error:
        log.info("with %s the network cannot be called: %s", name, error.fact)
    except BaseException as error:
        if engine.missing_operator(error) is None and not isinstance(error, refusals()):
            raise
        log.info("with %s the network cannot be called: %s", name, brief(error))


def _error_at_border(port: Port, call: RecordedCall, measured: MeasuredUnit) -> float | None:
    """Returns a unit's error in this port, or its effect on the network's output if that is less. None if the port does
    not call the unit, or returns another shape there.
    """
    values = inner_values(call.values)
    paths = {*measured.forced, *measured.skipped} - {""}
    borders = {border: value for border, value in values.items() if border.path in paths}
    wide = call.inner if measured.border in call.inner and measured.unit.kind != "block" else call.outer
    watched = ["", *port.units, *measured.forced]
    observed = port.called(call.inputs, watched, borders, measured.skipped, [measured.border])[1].observed
    if measured.border not in observed:
        return None
    value, exact, unit = observed[measured.border], wide[measured.border], measured.unit
    added = distance(value, exact)
    if added is None:
        return None
    added = max(added, unit.rounding * channel_ratio(value, exact, call.values[measured.border]))
    if added <= FAULT * unit.rounding or unit.effect is None or added >= unit.ratio * unit.rounding:
        return added
    # The error that is left without the patch may be harmless, as errors of a right port are.
    effect = Units(port, call).effect_of(measured.border, observed[measured.border])
    return added if effect is None else min(added, effect * unit.rounding)


def _cause_by_elimination(task: Task, stage: Stage, unit: Unit, tried: dict[str, float | None]) -> Iterator[Cause]:
    """Yields a patch as the cause if it is the only one that could not be left out; else yields nothing. It is called
    where the error stayed without each of the others.
    """
    untried = [key for key, added in tried.items() if added is None]
    if len(untried) == 1:
        entry = next(entry for entry in task.patches([stage]) if entry.id == untried[0])
        yield dataclasses.replace(_cause(entry, unit, None), how="elimination")


def _cause(entry: patch.Entry, unit: Unit, without: float | None) -> Cause:
    """Returns a patch as the cause of a unit's error; `without` is the error that is left without the patch."""
    with_it = unit.ratio * unit.rounding
    return Cause(entry.id, entry.place, _promise(entry), unit.name, with_it, without, "absence", unit.rounding)


def _promise(entry: patch.Entry) -> str:
    """Returns the equivalence that a patch promises, in words, with its bounds or its reason."""
    written = entry.equivalence.written()
    if isinstance(written, str):
        return written
    return "; ".join(f"{key}: {value}" for key, value in written.items())
