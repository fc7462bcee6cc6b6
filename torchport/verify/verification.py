"""A verification: the original is recorded, the port is compared with it, and the patch at fault is looked for.

Each of the three has a process of its own: the original must not meet a port's patches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torchport.config.card import DENOISING
from torchport.errors import BadValueError, MachineError, TorchportError
from torchport.processes import child
from torchport.progress import waiting
from torchport.task import Request, Task, accept
from torchport.verify import capture
from torchport.verify.causes import Search
from torchport.verify.comparing import Measurements
from torchport.verify.recording import BlockKey
from torchport.verify.report import Decoded, Drift, Verdict, Verification

SMALLER = "Free memory, or make the video smaller: --set height=, width= or frames="


@dataclasses.dataclass(frozen=True)
class Options:
    """What is verified, beside the request."""

    #: The denoising steps, from 0; None: the first of each network.
    steps: tuple[int, ...] | None = None
    decodes: bool = False  #: Whether the decoder is compared.
    #: Another mesh, whose drift is printed beside the port's; None: none.
    floor: str | None = None
    #: The folder of a capture, which takes the original's place; None: the original runs.
    reference: Path | None = None


def verify(request: Request, options: Options) -> Verification:
    """Returns whether a port computes what the original computes, and what is at fault if it does not."""
    task = _accept(request)
    _check_steps(task, options.steps)
    if options.floor is not None:
        _check_floor(task, options.floor)
    clock = _Clock()
    with tempfile.TemporaryDirectory(prefix="torchport-verify-") as name:
        file = Path(name, "original.pt")
        notes, left_out = ([], 0) if options.reference is None else capture.check(options.reference, task)
        found = _side_by_side(task, options, file, clock)
        if options.reference is None and any(item.unit.verdict is Verdict.OTHER for item in found.measured):
            with clock.lap("the faulty block"):
                _measure_modules(found, request, file)
        verification = _verification(task, options, found, notes)
        verification = dataclasses.replace(verification, left_out=left_out)
        if verification.bad_seams or verification.culprits:
            with clock.lap("the patch at fault"):
                verification = _blame(verification, found, request, file)
        elif verification.decoded is not None and verification.decoded.verdict is not Verdict.SAME:
            with clock.lap("the patch at fault"):
                search = _call("causes:of_decoder", request, file, found.folder, verification.decoded)
                verification = _with_causes(verification, search, lambda: _decoder_clue(search))
        if options.floor is not None and verification.drift:
            with clock.lap("the floor"):
                verification = _with_floor(verification, task, options.floor, file)
        return dataclasses.replace(verification, seconds=clock.seconds)


def _accept(request: Request) -> Task:
    """Returns the task of a request."""
    task = accept(request)
    if task.job.cache is not None:
        fact = "A step cache makes other latents on purpose, and a verification is of the network that it calls"
        raise BadValueError(task.job_document.place(["cache"]), fact, "Verify without it: --set cache=null")
    return task


def _measure_modules(found: Measurements, request: Request, file: Path) -> None:
    """Adds the modules of the first faulty block, where a recording of all modules would have been too large."""
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
    """Returns how the port differs from the original.

    The port's process imports, checks and plans while the original's runs. It loads no weights before that has ended.
    Each of the two is ended where the other is refused.
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
            with contextlib.suppress(child.ChildStoppedError):  # then the port says why
                _record_original(task, options, file, clock, no_port)
            with clock.lap("the port"):
                return port.result()
        except BaseException:
            no_original.set()
            raise


def _record_original(task: Task, options: Options, file: Path, clock: _Clock, stop: threading.Event) -> None:
    """Records the original, or takes a capture for it."""
    if options.reference is not None:
        with clock.lap("the capture"):
            _call("capture:unpack", options.reference, file, stop=stop)
        return
    original = dataclasses.replace(task.request, backend="original")
    with clock.lap("the original"):
        _call("recording:record", original, options.steps, file, options.decodes, stop=stop)


def capture_original(request: Request, options: Options, folder: Path, limit: int) -> str:
    """Writes what the original does to a folder, for a port on another machine, and returns what that is in words."""
    original = dataclasses.replace(request, backend="original")
    _check_steps(_accept(request), options.steps)
    with _Clock().lap("the original"):
        words: str = _call("capture:record", original, options.steps, options.decodes, folder, limit)
    return words


def _call(function: str, *arguments: Any, stop: threading.Event | None = None) -> Any:
    def ended(end: child.Ended) -> MachineError:
        remedy = SMALLER if end.code < 0 else "Report this, with what `torchport -v verify` prints"
        return MachineError(f"torchport.verify.{function}", f"Its process {end}", remedy)

    environment = {"PYTHONWARNINGS": "ignore"}
    return child.call(f"torchport.verify.{function}", *arguments, ended=ended, environment=environment, stop=stop)


def _with_floor(verification: Verification, task: Task, mesh: str, file: Path) -> Verification:
    """Returns a verification with the drift of another mesh beside the port's."""
    request, steps = _on_mesh(task, mesh), max(row.step for row in verification.drift)
    floors: list[Drift] = _call("comparing:drift_of_mesh", request, file, steps)
    by_step = {row.step: row.distance for row in floors}
    drift = tuple(dataclasses.replace(row, floor=by_step.get(row.step)) for row in verification.drift)
    return dataclasses.replace(verification, drift=drift, floor=f"the same port on {mesh}")


def _on_mesh(task: Task, mesh: str) -> Request:
    """Returns the request of the same job on another mesh."""
    parts = [part.partition("=") for part in mesh.split(",")]
    sizes = {axis: size for axis, _, size in parts}
    if len(sizes) < len(parts) or not all(re.fullmatch(r"[a-z]\w*=[1-9]\d{0,5}", "".join(part)) for part in parts):
        raise BadValueError(f"--floor {mesh}", "It is no mesh", "Write the size of each axis once: dp=1,tp=4")
    overrides = (*task.request.overrides, f"mesh={{{', '.join(f'{axis}: {size}' for axis, size in sizes.items())}}}")
    if task.machine.platform == "cpu":  # virtual devices: as many as the mesh takes
        overrides += (f"machine=cpu:{math.prod(map(int, sizes.values()))}",)
    return dataclasses.replace(task.request, overrides=overrides)


def _check_floor(task: Task, mesh: str) -> None:
    """Refuses a mesh that the job cannot run on, before the original runs."""
    try:
        accept(_on_mesh(task, mesh))
    except BadValueError:
        raise
    except TorchportError as error:
        raise BadValueError(f"--floor {mesh}", error.fact, error.remedy) from error


class _Clock:
    """The seconds of each part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def lap(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        with waiting(f"verify: {what}"):
            yield
        self.seconds[what] = round(time.perf_counter() - start, 1)


def _check_steps(task: Task, steps: tuple[int, ...] | None) -> None:
    """Refuses steps that the job does not take."""
    for step in steps or ():
        if not 0 <= step < task.settings.steps:
            fact = f"The job takes {task.settings.steps} steps, which are 0 to {task.settings.steps - 1}"
            raise BadValueError(f"--steps {step}", fact, "Name some of these")


def _verification(task: Task, options: Options, found: Measurements, notes: list[str]) -> Verification:
    names = [str(stage.network) for stage in task.family.STAGES if stage.name in DENOISING]
    dtypes = {name: task.dtype(name) for name in names}
    units = (*found.networks, *(measured.unit for measured in found.measured))
    steps = tuple(sorted({unit.step for unit in units}))
    return Verification(
        task.card.model,
        task.request.config,
        dtypes,
        {name: found.yardstick.get(name, "none") for name in names},
        task.job.strategy,
        {str(axis): size for axis, size in task.job.mesh.items()},
        steps,
        task.settings.steps,
        seams=found.seams.seams,
        units=units,
        drift=tuple(found.drift),
        decoded=found.decoded,
        against="original" if options.reference is None else f"run:{options.reference}",
        unlike=(*notes, *found.seams.unlike, *found.unlike, *_not_compared(options, found.decoded)),
        programs=tuple(found.programs),
    )


def _not_compared(options: Options, decoded: Decoded | None) -> list[str]:
    remedy = "--decode compares it" if options.reference is None else "capture with --decode"
    decoder = [] if decoded is not None else [f"the decoder ({remedy})"]
    return [f"not compared: {', and '.join([*decoder, 'the weights of the text encoders'])}"]


def _blame(verification: Verification, found: Measurements, request: Request, file: Path) -> Verification:
    """Returns a verification with the patch at fault, or with where to look."""
    if verification.bad_seams:
        seam = verification.bad_seams[0]
        search: Search = _call("causes:of_seam", request, file, found.folder, seam, found.loop_patches)
        clue = "no patch is at fault: look at the family's loop, and at the card"
        return _with_causes(verification, search, lambda: clue)
    unit = verification.culprits[0]
    measured = next((item for item in found.measured if item.unit == unit), None)
    if measured is None:
        inputs = found.network_inputs[unit.network, unit.step]
        search = _call("causes:of_network", request, file, found.folder, unit, inputs)
        return _with_causes(verification, search, lambda: _network_clue(search, verification.strategy))
    search = _call("causes:of_unit", request, file, found.folder, measured)
    return _with_causes(verification, search, lambda: _clue(search))


def _network_clue(search: Search, strategy: str) -> str:
    """Returns where to look if each unit of a network is right for one condition, and the network is not."""
    if not search.tried:
        place = f"strategy '{strategy}'"
        return f"each of its modules alone is right on one device: look at the rules of {place}, and at --no-jit"
    return f"called for all conditions of guidance at once, it is wrong on one device, too; {_clue(search)}"


def _decoder_clue(search: Search) -> str:
    """Returns where to look if no patch of the decoder is at fault."""
    if not search.tried:
        return "it has no patch: look at the card's dtypes and rules"
    return f"leaving out one patch does not cure it ({', '.join(search.tried)}): look at two of them, and at dtypes"


def _with_causes(verification: Verification, search: Search, clue: Callable[[], str]) -> Verification:
    return dataclasses.replace(verification, causes=search.causes, clue="" if search.causes else clue())


def _clue(search: Search) -> str:
    if not search.tried:
        return "no patch is called in it: look at the card's dtypes and rules, and at the family's `prepare`"
    tried = ", ".join(search.tried)
    return f"leaving out one patch does not cure it ({tried}): look at two of them, at dtypes, and at `prepare`"
