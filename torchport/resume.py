"""Stops a run cleanly, saves what it has done so far, and goes on from there to the same bits."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pydantic
import torch

from torchport import checkpoint, hosts, pipelines, save, watch
from torchport.errors import ArtefactBrokenError, ArtefactForeignError, OutputError, StoppedError
from torchport.files import atomic
from torchport.progress import log, track
from torchport.task import Task

PARTIAL = "denoise.partial"
"""The unfinished latents' artefact."""
UNFINISHED = ".unfinished.json"
"""Names the run of all stages that has begun in a folder and has not ended; its artefacts carry the name, too."""
AFTER_REMOVAL = "the same command, after removing it"
"""What makes an artefact of a stopped run again."""
GRACE = 2.0
"""Seconds that a second Ctrl-C leaves a run for tidying up; a busy machine needs half of one."""


class Stopping:
    """The first Ctrl-C, SIGTERM or SIGHUP asks for a stop after the step in progress; the second stops at once.

    A hangup stops nothing at once: shells and service managers send it after another signal, or twice.
    """

    def __init__(self) -> None:
        self.asked = ""  # by what

    def __call__(self, number: int, frame: object) -> None:
        """Handles a signal, in the main thread and between two of Python's own steps."""
        if self.asked and number != signal.SIGHUP:
            raise KeyboardInterrupt
        self.asked = self.asked or ("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)

    @contextlib.contextmanager
    def listening(self) -> Iterator[Stopping]:
        """Handles the signals while the context lasts; only a main thread can, and elsewhere nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        # nohup has the hangup ignored, and that is to stay so.
        hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        thread = threading.Thread(target=_hear, args=(reading,), daemon=True)
        thread.start()
        waking = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        before = {number: signal.signal(number, self) for number in (signal.SIGINT, signal.SIGTERM, *hangup)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(waking)
            os.close(writing)
            thread.join(GRACE)  # what it logs comes before what the run says last

    def wanted(self) -> bool:
        """Returns whether any process of the run was asked to stop; all of them must call this."""
        if hosts.anywhere(bool(self.asked)):
            self.asked = self.asked or "another process"
        return bool(self.asked)

    def check(self, task: Task, when: str) -> None:
        """Stops here, in all processes of the run, if that was asked for in any.

        Raises:
            StoppedError: It was.
        """
        if self.wanted():
            self.stop(task, when)

    def stop(self, task: Task, when: str) -> NoReturn:
        """Stops here, as all processes of the run do.

        Raises:
            StoppedError: Always.
        """
        raise StoppedError(
            self.asked,
            f"Stopped {when}; what was finished is in {task.folder}",
            f"Go on with the same command and --out {task.folder}",
            everywhere=True,
        )


def _hear(reading: int) -> None:
    """Answers signals where the main thread cannot: it may be in a program or a compiler for minutes.

    Where it can, the second signal raises a KeyboardInterrupt there, which leaves nothing half-written behind. That has
    `GRACE` seconds to end the run: what calls Python from C may swallow it.

    Args:
        reading: Gives the number of each signal as a byte, and ends when the run does.
    """
    asked = False
    with open(reading, "rb", buffering=0) as signals:
        while byte := signals.read(1):
            number = byte[0]
            if number == signal.SIGHUP:
                _leave_terminal()
            if asked and number in (signal.SIGINT, signal.SIGTERM):
                if not select.select([signals], [], [], GRACE)[0] or signals.read(1):
                    watch.end(StoppedError.exit_code, watch.AT_ONCE)
                return
            if not asked and number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                asked = True
                again = "press Ctrl-C again" if number == signal.SIGINT else "send SIGTERM"
                log.warning("stopping after what is in progress; %s to stop at once", again)


def _leave_terminal() -> None:
    """Writes to nowhere from now on if the terminal is gone: a line that fails would end the run before it is saved."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), stream)


class Unfinished:
    """A run's unfinished latents: saved every few steps, and read by the run that goes on from there.

    Attributes:
        step: How many steps the latents on the disk have gone through; 0 where there are none.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.step = 0

    def save(self, number: int, state: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        """Saves the latents after a step; until these are whole on the disk, the older ones stay.

        Raises:
            OutputError: They cannot be written.
        """
        hosts.told(lambda: save.write(self.task.folder, PARTIAL, state, {**facts, "done": number}).sha256)
        self.step = number

    def read(self, weights: checkpoint.Checkpoint, shas: Mapping[str, str]) -> tuple[int, dict[str, torch.Tensor]]:
        """Returns how many steps a stopped or killed run of this very job finished, and its latents.

        Args:
            weights: The checkpoint in use.
            shas: sha256 of the artefacts that the stage reads.

        Raises:
            ArtefactForeignError: Latents of another job lie there.
            ArtefactBrokenError: They are damaged.
        """
        self.step, tensors = hosts.told_with(lambda: _unfinished(self.task, weights, shas))
        return self.step, dict(tensors)


def steps(
    task: Task,
    stage: pipelines.Stage,
    stopping: Stopping,
    unfinished: Unfinished,
    facts: Callable[[], dict[str, Any]],
    start: tuple[int, dict[str, torch.Tensor]],
) -> pipelines.Steps:
    """Returns a loop's progress bar, its saving every few steps, and where it goes on.

    Args:
        task: The run.
        stage: The stage whose loop it is.
        stopping: Whether a stop was asked for.
        unfinished: Where the latents are saved.
        facts: The manifest's fields for an artefact of this stage, as of now.
        start: How many steps are done, and the state after them; 0 and nothing where it begins.
    """
    total = task.settings.steps

    def finished(number: int, state: Mapping[str, torch.Tensor]) -> None:
        if number < total:
            stop = stopping.wanted()
            if stop or number % task.job.save_every == 0:
                unfinished.save(number, state, facts())
            if stop:
                stopping.stop(task, f"after step {number} of {total}")

    bar = functools.partial(track, what=stage.name, unit="tile" if stage.name == "decode" else "step")
    if stage.name != "denoise":

        def watched(items: Iterable[Any], done: int, total: int) -> Iterator[Any]:
            for item in bar(items, done=done, total=total):
                stopping.check(task, f"in '{stage.name}'")
                yield item

        return pipelines.Steps(watched)
    return pipelines.Steps(bar, finished, start if start[0] else None)


def _unfinished(
    task: Task, weights: checkpoint.Checkpoint, shas: Mapping[str, str]
) -> tuple[int, dict[str, torch.Tensor]]:
    file = save.file_of(task.folder, PARTIAL)
    if not file.is_file():
        return 0, {}
    remedy = f"Finish that run, or remove {file.name}, or choose another --out"
    tensors, manifest = save.read(task.folder, PARTIAL, task.identity("denoise"), weights.digests, AFTER_REMOVAL)
    assert manifest is not None
    differs = _difference(task, _denoise(task), manifest)
    if differs is not None:
        key, written, asked = differs
        fact = f"A run with {key} {written!r} was stopped here, and this one has {asked!r}"
        raise ArtefactForeignError(str(file), fact, remedy, key=key)
    if manifest.inputs != dict(shas):
        raise ArtefactForeignError(str(file), "The run that was stopped here had other embeddings", remedy)
    done, total = manifest.done, task.settings.steps
    if done is None or done >= total:
        fact = f"Its latents have gone through {done} of {total} steps, and are said to be unfinished"
        raise ArtefactBrokenError(str(file), fact, f"Remove {file.name}: the stage then begins anew")
    log.info("resume after step %d of %d", done, total)
    return done, tensors


def _difference(task: Task, stage: pipelines.Stage, manifest: save.Manifest) -> tuple[str, Any, Any] | None:
    """Returns the first setting in which an artefact's run differs from this one: key, its value, ours."""
    written = {**manifest.settings, "backend": manifest.backend, "mesh": manifest.config.get("mesh")}
    asked = {**task.shown(stage), "backend": task.request.backend, "mesh": dict(task.job.mesh)}
    return next(((key, written.get(key), ours) for key, ours in asked.items() if written.get(key) != ours), None)


def _denoise(task: Task) -> pipelines.Stage:
    return next(stage for stage in task.family.STAGES if stage.name == "denoise")  # type: ignore[no-any-return]


def unfinished_run(task: Task) -> str | None:
    """Returns the name of the run of all stages that has begun in the folder and has not ended; None if all have."""
    file = task.folder / UNFINISHED
    if task.request.stage != "all" or not file.is_file():
        return None
    try:
        return _Unfinished.model_validate_json(file.read_bytes()).run
    except (pydantic.ValidationError, OSError):
        # Nothing wrong can come of it: stages that were finished are run again.
        log.warning("%s cannot be read: every stage is run again", file)
        return None


class _Unfinished(pydantic.BaseModel):
    """The content of `UNFINISHED`."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)
    run: str


def begin(task: Task, run: str) -> None:
    """Writes down that a run of all stages has begun: its artefacts count when the same command is given again.

    Raises:
        OutputError: The folder cannot be written.
    """
    if task.request.stage == "all":
        atomic.write_json(task.folder / UNFINISHED, {"run": run})


def finished(task: Task, run: str, weights: checkpoint.Checkpoint) -> dict[str, save.Manifest]:
    """Returns the stages that a stopped or killed run of this very job finished, with their verified manifests.

    Args:
        task: The run; another job than the stopped one has nothing finished.
        run: The stopped run's name.
        weights: The checkpoint in use.

    Raises:
        ArtefactBrokenError: One of them is damaged.
    """
    manifests: dict[str, save.Manifest] = {}
    for stage in task.stages:
        file = save.file_of(task.folder, stage.name)
        if not file.is_file():
            break
        manifest = save.read_manifest(file)
        inputs = {name: manifests[name].sha256 for name in manifest.inputs if name in manifests}
        if manifest.run != run or manifest.inputs != inputs or _difference(task, stage, manifest) is not None:
            break
        save.read(task.folder, stage.name, task.identity(stage.name), weights.digests, AFTER_REMOVAL)
        manifests[stage.name] = manifest
    return manifests


def going_on(task: Task, error: OutputError, names: Sequence[str], step: int) -> OutputError:
    """Returns the error with what the same command does next time.

    Args:
        task: The run.
        error: What could not be written.
        names: The stages that are finished.
        step: How many steps the unfinished latents on the disk have gone through.
    """
    again = f"the same command with --out {task.folder} then"
    if step:
        what = f"{again} goes on after step {step} of {task.settings.steps}"
    elif names and task.request.stage == "all":
        what = f"{again} goes on after '{names[-1]}'"
    else:
        what = f"{again} begins anew: nothing was finished"
    return OutputError(error.place, error.fact, f"{error.remedy}; {what}")


def forget(task: Task) -> None:
    """Removes what a stopped run left for going on: this one has finished."""
    save.remove(task.folder, PARTIAL)
    atomic.remove(task.folder / UNFINISHED)
