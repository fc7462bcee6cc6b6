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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torchport import engine, patch
from torchport.compile import network
from torchport.compile.in_force import in_force, lowerings
from torchport.errors import BadValueError, MachineError, TorchportError
from torchport.files import atomic
from torchport.load.foreign import brief, refusals
from torchport.processes import child
from torchport.progress import log, waiting
from torchport.stages.family import Stage
from torchport.task import Request, Task, accept, devices
from torchport.verify import decoder, reference, seams
from torchport.verify.borders import Port
from torchport.verify.comparing import Measurements
from torchport.verify.recording import RecordedCall, read, split_by_call, tensors_of
from torchport.verify.report import FAULT, Cause, Decoded, Drift, Seam, Unit, Verdict, Verification
from torchport.verify.units import MeasuredUnit, Units
from torchport.verify.yardstick import LEVELS, channel_ratio, distance

SMALLER = "Free memory, or make the video smaller: --set height=, width= or frames="


@dataclasses.dataclass(frozen=True)
class Options:
    """The parts of a port that a verification compares, and the reference for them."""

    #: The denoising steps to compare, from 0; None: the recording of the original chooses them.
    steps: tuple[int, ...] | None = None
    #: Whether the decoder's frames are compared, too.
    decodes: bool = False
    #: Another mesh, on which the drift is measured for comparison; None: none.
    floor: str | None = None
    #: The folder of a capture, which is used instead of the original; None: the original runs.
    reference: Path | None = None


def verify(request: Request, options: Options) -> Verification:
    """Returns how far a port differs from the original, with a verdict, and the patch at fault if one is found."""
    task = _accept(request, options.steps)
    floor_request = None if options.floor is None else _on_mesh(task, options.floor)
    original = dataclasses.replace(request, backend="original") if options.reference is None else None
    seconds: dict[str, float] = {}
    with atomic.scratch() as folder:
        file = folder / "original.pt"
        notes, left_out = ([], 0) if options.reference is None else reference.check(options.reference, task)
        results = _measure_both(task, original, options, file, seconds)
        if original is not None and any(item.unit.verdict is Verdict.OTHER for item in results.measured):
            with _timed("the faulty block", seconds):  # whose modules a large recording lacks
                _measure_modules(results, request, original, file)
        verification = dataclasses.replace(_verification(task, options, results, notes), left_out=left_out)
        is_decoder_bad = verification.decoded is not None and verification.decoded.verdict is not Verdict.SAME
        if verification.bad_seams or verification.culprits or is_decoder_bad:
            with _timed("the patch at fault", seconds):
                verification = _with_causes(verification, results, request, original, file)
        if floor_request is not None and verification.drift:
            with _timed("the floor", seconds):
                steps = max(row.step for row in verification.drift)
                floors: list[Drift] = _call("comparing:drift_of_mesh", floor_request, file, steps)
            distances = {row.step: row.distance for row in floors}
            drift = tuple(dataclasses.replace(row, floor=distances.get(row.step)) for row in verification.drift)
            verification = dataclasses.replace(verification, drift=drift, floor=f"the same port on {options.floor}")
        return dataclasses.replace(verification, seconds=seconds)


def _accept(request: Request, steps: tuple[int, ...] | None) -> Task:
    """Returns a request's task; raises if the job has a step cache, which changes latents, or lacks one of `steps`."""
    task = accept(request)
    if task.job.cache is not None:
        fact = "A step cache makes other latents on purpose, and a verification is of the network that it calls"
        raise BadValueError(task.job_document.place(["cache"]), fact, "Verify without it: --set cache=null")
    for step in steps or ():
        if not 0 <= step < task.settings.steps:
            fact = f"The job takes {task.settings.steps} steps, which are 0 to {task.settings.steps - 1}"
            raise BadValueError(f"--steps {step}", fact, "Name some of these")
    return task


def _measure_both(
    task: Task, original: Request | None, options: Options, file: Path, seconds: dict[str, float]
) -> Measurements:
    """Runs the original and the port, each in a process, and returns how they differ; if one fails, the other stops.
    The port's process imports, checks and plans while the original's runs, but loads no weights before the latter ends.

    `original` is the original's request; None: the capture `options.reference` has what the original computes. The
    original's process writes the recording to `file`, and the port's reads it. `seconds` gets the time of each part.
    """
    port_failed = threading.Event()
    original_failed = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        comparison = "comparing:compare", task.request, file, original, os.getpid()
        port: Future[Measurements] = pool.submit(_call, *comparison, stop=original_failed)
        port.add_done_callback(lambda future: port_failed.set() if future.exception() else None)
        part = "the capture" if original is None else "the original"
        try:
            # Where the port has failed, this part is stopped, and `port.result()` raises the port's error.
            with contextlib.suppress(child.ChildStoppedError), _timed(part, seconds):
                if original is None:
                    _call("reference:unpack", options.reference, file, stop=port_failed)
                else:
                    _call("recording:record", original, options.steps, file, options.decodes, stop=port_failed)
            with _timed("the port", seconds):
                return port.result()
        except BaseException:
            original_failed.set()
            raise


def _measure_modules(results: Measurements, request: Request, original: Request, file: Path) -> None:
    """Adds the measured modules of the first faulty block to `results`, unless `results` has them already.

    A recording of the modules of all blocks may be too large, and then only blocks were measured.
    """
    unit = next(item.unit for item in results.measured if item.unit.verdict is Verdict.OTHER)
    if unit.kind != "block":
        return
    if any(item.block == unit.path and item.unit.kind != "block" for item in results.measured):
        return
    _call("recording:record_modules", original, unit, file)
    results.measured += _call("comparing:compare_modules", request, unit, results.folder, file)


def capture_original(request: Request, options: Options, folder: Path, limit: int) -> str:
    """Writes a capture of the original, of at most `limit` bytes, for another machine; returns a summary of it."""
    original = dataclasses.replace(request, backend="original")
    _accept(request, options.steps)  # for its errors alone
    with _timed("the original", {}):
        words: str = _call("reference:record", original, options.steps, options.decodes, folder, limit)
    return words


def _call(function: str, *arguments: Any, stop: threading.Event | None = None) -> Any:
    """Calls a function of this package, named as `module:function`, in a new process; returns its result."""
    report = "Report this, with what `torchport -v verify` prints"
    name = f"torchport.verify.{function}"
    return child.call(
        name,
        *arguments,
        ended=lambda end: MachineError(name, f"Its process {end}", SMALLER if end.code < 0 else report),
        environment={"PYTHONWARNINGS": "ignore"},
        stop=stop,
    )


@contextlib.contextmanager
def _timed(part: str, seconds: dict[str, float]) -> Iterator[None]:
    """Shows what runs for the length of a `with`, such as "the port", and adds to `seconds` how long it took."""
    start = time.perf_counter()
    with waiting(f"verify: {part}"):
        yield
    seconds[part] = round(time.perf_counter() - start, 1)


def _on_mesh(task: Task, mesh: str) -> Request:
    """Returns a task's request with another mesh, such as `dp=1,tp=4`."""
    parts = [part.partition("=") for part in mesh.split(",")]  # ("dp", "=", "1")
    sizes = {axis: size for axis, _, size in parts}
    if len(sizes) < len(parts) or not all(re.fullmatch(r"[a-z]\w*=[1-9]\d{0,5}", "".join(part)) for part in parts):
        raise BadValueError(f"--floor {mesh}", "It is no mesh", "Write the size of each axis once: dp=1,tp=4")
    overrides = (*task.request.overrides, f"mesh={{{', '.join(f'{axis}: {size}' for axis, size in sizes.items())}}}")
    if task.machine.platform == "cpu":  # virtual devices: as many as the mesh takes
        overrides += (f"machine=cpu:{math.prod(map(int, sizes.values()))}",)
    request = dataclasses.replace(task.request, overrides=overrides)
    try:
        accept(request)  # for its errors alone
    except BadValueError:
        raise
    except TorchportError as error:
        raise BadValueError(f"--floor {mesh}", error.fact, error.remedy) from error
    return request


def _verification(task: Task, options: Options, results: Measurements, notes: list[str]) -> Verification:
    """Returns the report of all measurements, with the `notes` of a capture; the causes of errors are added later."""
    names = [str(stage.network) for stage in task.denoising]
    units = (*results.networks, *(measured.unit for measured in results.measured))
    remedy = "--decode compares it" if options.reference is None else "capture with --decode"
    absent = [f"the decoder ({remedy})"] if results.decoded is None else []
    absent.append("the weights of the text encoders")
    return Verification(
        model=task.card.model,
        config=task.request.config,
        dtypes={name: task.dtype(name) for name in names},
        yardstick={name: results.yardstick.get(name, "none") for name in names},
        strategy=task.job.strategy,
        mesh={str(axis): size for axis, size in task.job.mesh.items()},
        steps=tuple(sorted({unit.step for unit in units})),
        total=task.settings.steps,
        seams=tuple(results.seams),
        units=units,
        drift=tuple(results.drift),
        decoded=results.decoded,
        against="original" if options.reference is None else f"run:{options.reference}",
        unlike=(*notes, *results.unlike, f"not compared: {', and '.join(absent)}"),
        programs=tuple(results.programs),
        operators=results.operators,
    )


def _with_causes(
    verification: Verification, results: Measurements, request: Request, original: Request | None, file: Path
) -> Verification:
    """Returns a verification with the patch that causes its first fault, or with a clue where no single patch does."""
    decoded = verification.decoded
    search: Search
    if verification.bad_seams:
        seam = verification.bad_seams[0]
        search = _call("verification:causes_of_seam", request, file, results.folder, seam, results.loop_patches)
    elif verification.culprits:
        unit = verification.culprits[0]
        measured = next((item for item in results.measured if item.unit == unit), None)
        # None: the output of the whole network is wrong, though each of its units is right.
        if measured is None:
            inputs = results.network_inputs[unit.network, unit.step]
            search = _call("verification:causes_of_network", request, file, results.folder, unit, inputs)
        else:
            search = _call("verification:causes_of_unit", request, file, results.folder, measured)
    else:
        search = _call("verification:causes_of_decoder", request, original, file, results.folder, decoded)
    if decoded is not None and search.parting:
        decoded = dataclasses.replace(decoded, parting=search.parting)
    clue = "" if search.causes else search.clue
    return dataclasses.replace(verification, causes=search.causes, clue=clue, decoded=decoded)


@dataclasses.dataclass(frozen=True)
class Search:
    """The result of a search for the patch at fault."""

    causes: tuple[Cause, ...]
    clue: str  #: Where to look if there is no cause.
    parting: str = ""  #: The decoder's first module whose output differs from the original's, in words.


def causes_of_unit(request: Request, file: Path, folder: Path, measured: MeasuredUnit) -> Search:
    """Returns the patch that causes a unit's error, or else a clue; runs in a process of its own."""
    task, unit = accept(request), measured.unit
    call = read(file).call_of(unit.network, unit.step, unit.call)
    stage = next(stage for stage in task.denoising if stage.name == call.stage)
    devices.prepare(task.machine)
    entries = candidates(task, stage, measured)
    causes, tried = _leave_out(task, stage, folder, unit, entries, lambda port: _error_at_border(port, call, measured))
    if any(cause.how == "absence" for cause in causes):
        prepared = _is_prepared(task, stage, unit.path)
        causes = [dataclasses.replace(cause, prepared=prepared) for cause in causes]
    # A patch that is called only before the unit causes its error through another shape.
    earlier = measured.reshaped_patches - measured.patches - measured.block_patches
    causes = [dataclasses.replace(c, reshaped=measured.reshaped if c.patch in earlier else "") for c in causes]
    return Search(tuple(causes), _unit_clue(tried))


def _unit_clue(tried: Collection[str]) -> str:
    """Returns where to look if a unit is wrong, and leaving out any of the patches `tried` does not cure it."""
    if not tried:
        return "no patch is called in it: look at the card's dtypes and rules, and at the family's `prepare`"
    ids = ", ".join(tried)
    return f"leaving out one patch does not cure it ({ids}): look at two of them, at dtypes, and at `prepare`"


def _is_prepared(task: Task, stage: Stage, path: str) -> bool:
    """Returns whether a family's `prepare` adds parameters or buffers to a module, or removes some."""
    # The names of parameters and buffers, with `prepare` and without.
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
        """Returns the error of the network's output in the call that is at fault; None without an output to compare."""
        outputs = [port.called(values, paths=[], replacements={})[0] for values in inputs]
        parts = split_by_call(outputs, calls)
        return None if parts is None else distance(parts[unit.call], tensors_of(calls[unit.call].wide_output))

    entries = [entry for entry in task.patches([stage]) if not entry.plumbing]
    if _is_cured(unit.rounding, _error_without(task, stage, folder, entry=None, error=error)):
        entries = []  # right on one device: no patch is at fault
    causes, tried = _leave_out(task, stage, folder, unit, entries, error)
    if not tried:
        place = f"strategy '{task.job.strategy}'"
        clue = f"each of its modules alone is right on one device: look at the rules of {place}, and at --no-jit"
    else:
        clue = f"called for all conditions of guidance at once, it is wrong on one device, too; {_unit_clue(tried)}"
    return Search(tuple(causes), clue)


def _leave_out(
    task: Task,
    stage: Stage,
    folder: Path,
    unit: Unit,
    entries: Sequence[patch.Entry],
    error: Callable[[Port], float | None],
) -> tuple[list[Cause], dict[str, float | None]]:
    """Leaves out one patch at a time, until a unit's `error` is gone. Returns the patch without which it is gone, as
    the cause; no cause if the error stays. And by the id of each patch that was tried, the error without it; None
    where the network cannot be called then.
    """
    tried: dict[str, float | None] = {}
    with_it = unit.ratio * unit.rounding
    for entry in entries:
        without = tried[entry.id] = _error_without(task, stage, folder, entry, error)
        log.info("without %s: %s adds %s", entry.id, unit.name, without)
        if _is_cured(unit.rounding, without):
            return [_cause(entry, unit.name, with_it, without, rounding=unit.rounding)], tried
    unmeasured = [entry for entry in entries if tried[entry.id] is None]
    if len(unmeasured) == 1:  # the error stayed without each of the others
        cause = _cause(unmeasured[0], unit.name, with_it, None, rounding=unit.rounding)
        return [dataclasses.replace(cause, how="elimination")], tried
    return [], tried


def _cause(
    entry: patch.Entry, unit: str, with_it: float, without: float | None, rounding: float | None = None
) -> Cause:
    """Returns a patch as the cause of the error `with_it` in a unit or a seam, `transformer.blocks.2` or `sigmas`."""
    written = entry.equivalence.written()  # `bitwise`, or a dict such as {"lossy": "int8"}
    promises = [f"{key}: {value}" for key, value in written.items()] if isinstance(written, dict) else [written]
    promise = "; ".join(promises)
    return Cause(entry.id, entry.place, promise, unit, with_it, without, how="absence", rounding=rounding)


def causes_of_decoder(request: Request, original: Request | None, file: Path, folder: Path, decoded: Decoded) -> Search:
    """Returns the patch that causes a difference of the decoded frames, and the first module that differs. Without
    `original`, as beside a capture, no module is searched. Runs in a process of its own.
    """
    task, recorded = accept(request), read(file).decoded
    stage = task.family.STAGES[-1]
    devices.prepare(task.machine)
    module, called = "", frozenset[str]()
    if original is not None:
        module, called = decoder.first_fault(task, accept(original), folder, recorded)
    name = f"frame {decoded.frame} of {stage.name}"
    entries = [entry for entry in task.patches([stage]) if not entry.plumbing]
    entries.sort(key=lambda entry: entry.id not in called)  # patches that are called in the module come first
    for entry in entries:
        reduced = dataclasses.replace(task, without=frozenset({entry.id}))
        # It stays None where the decoder cannot be called without the patch.
        without = None
        with _refusals_logged(entry), in_force(reduced, [stage]):
            without = decoder.compare(reduced, folder, recorded)
        added = None if without is None else without.added / LEVELS
        log.info("without %s: %s differs by %s", entry.id, name, added)
        if without is not None and without.verdict is Verdict.SAME:
            return Search((_cause(entry, name, decoded.added / LEVELS, added),), "", module)
    if called:
        ordered = sorted(task.patches([stage]), key=lambda entry: entry.kind == "op")  # operators last: most are exact
        places = ", ".join(f"{entry.id} ({entry.place})" for entry in ordered if entry.id in called)
        return Search((), f"leaving out one patch does not cure it; called in that module: {places}", module)
    if not entries:
        return Search((), "it has no patch: look at the card's dtypes and rules", module)
    ids = ", ".join(entry.id for entry in entries)
    return Search((), f"leaving out one patch does not cure it ({ids}): look at two of them, and at dtypes", module)


def causes_of_seam(request: Request, file: Path, folder: Path, seam: Seam, called: Collection[str]) -> Search:
    """Returns the patch that causes a seam's difference, found by bisection among the patches with the ids `called`:
    those that were called outside the networks. Runs in a process of its own.
    """
    task, recorded = accept(request), read(file)
    clue = "no patch is at fault: look at the family's loop, and at the card"

    def distance_without(entries: Collection[patch.Entry]) -> float:
        reduced = dataclasses.replace(task, without=frozenset(entry.id for entry in entries))
        rows, _ = seams.compare(reduced, folder, recorded.seams, recorded.templates)
        key = seam.name, seam.stage, seam.step
        same = [row.distance for row in rows if (row.name, row.stage, row.step) == key]
        return max(same, default=0.0)

    entries = [e for e in task.patches(task.family.STAGES) if e.id in called and not e.plumbing]
    if task.job.encode == "devices":
        devices.prepare(task.machine)
        entries = [entry for entry in entries if entry.package not in ("torch", "torchax")]  # encoders run on these
    if not entries or distance_without(entries) > seam.allowed:  # it stays without all candidates
        return Search((), clue)
    while len(entries) > 1:
        half = entries[: len(entries) // 2]
        entries = half if distance_without(half) <= seam.allowed else entries[len(half) :]
    without = distance_without(entries)
    causes = () if without > seam.allowed else (_cause(entries[0], seam.name, seam.distance, without),)
    return Search(causes, clue)


def _is_cured(rounding: float, added: float | None) -> bool:
    """Returns whether an error is too small for a fault; False for None, where it could not be measured."""
    return added is not None and added <= FAULT * rounding


def candidates(task: Task, stage: Stage, measured: MeasuredUnit) -> list[patch.Entry]:
    """Returns the patches that may cause a unit's error, the nearest first: called in the unit, in its block (or with
    calls that cannot be counted), and earlier. The latter only up to the first module whose output has another shape,
    from which the error may follow.
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
    """Returns the `error` of a port without the patch `entry` (None: with all), or None if it cannot be called then."""
    reduced = dataclasses.replace(task, without=frozenset({entry.id} if entry else ()))
    with _refusals_logged(entry), in_force(reduced, [stage]) as ledger, lowerings(ledger):
        return error(Port(task, stage, folder, ledger))
    return None  # the network raised, and `_refusals_logged` suppressed the error


@contextlib.contextmanager
def _refusals_logged(entry: patch.Entry | None) -> Iterator[None]:
    """Logs and suppresses the error of a network that cannot be called while a patch (None: no patch) is left out."""
    name = f"{entry.id} left out" if entry else "all patches in force"
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
    replacements = call.values_at((*measured.forced, *measured.skipped))
    wide = call.inner if measured.border in call.inner and measured.unit.kind != "block" else call.outer
    paths = ["", *port.units, *measured.forced]
    _, watched = port.called(call.inputs, paths, replacements, measured.skipped, whole=[measured.border])
    if measured.border not in watched.observed:
        return None
    value = watched.observed[measured.border]
    exact = wide[measured.border]
    unit = measured.unit
    with_patch = unit.ratio * unit.rounding
    added = distance(value, exact)
    if added is None:
        return None
    added = max(added, unit.rounding * channel_ratio(value, exact, call.values[measured.border]))
    if _is_cured(unit.rounding, added) or unit.effect is None or added >= with_patch:
        return added
    # The error that is left without the patch may be harmless, as errors of a right port are.
    effect = Units(port, call).effect_of(measured.border, value)
    return added if effect is None else min(added, effect * unit.rounding)
