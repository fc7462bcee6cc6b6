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

import torch

from torchport import checkpoint, hosts, pipelines, save, watch
from torchport.errors import ArtefactForeignError, StoppedError
from torchport.progress import log, track
from torchport.task import Task

PARTIAL = "denoise.partial"
"""The unfinished latents' artefact."""
GRACE = 2.0
"""Seconds that a second Ctrl-C leaves a run for tidying up; a busy machine needs half of one."""
STOPPED = ".stopped.json"
"""Written when a run of all stages is stopped: which of them are finished."""


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


def steps(
    task: Task,
    stage: pipelines.Stage,
    stopping: Stopping,
    weights: checkpoint.Checkpoint,
    facts: Callable[[], dict[str, Any]],
    shas: Mapping[str, str],
) -> pipelines.Steps:
    """Returns a loop's progress bar, its saving every few steps, and where it goes on.

    Args:
        task: The run.
        stage: The stage whose loop it is.
        stopping: Whether a stop was asked for.
        weights: The checkpoint in use.
        facts: The manifest's fields for an artefact of this stage, as of now.
        shas: sha256 of the artefacts that the stage reads.

    Raises:
        ArtefactForeignError: Unfinished latents of another job lie in the output folder.
    """
    total = task.settings.steps

    def finished(number: int, state: Mapping[str, torch.Tensor]) -> None:
        if number < total:
            stop = stopping.wanted()
            if stop or number % task.job.save_every == 0:
                noted = facts()
                noted |= {"settings": {**noted["settings"], "done": number}}
                hosts.told(lambda: save.write(task.folder, PARTIAL, state, noted).sha256)
            if stop:
                stopping.stop(task, f"after step {number} of {total}")

    bar = functools.partial(track, what=stage.name, unit="tile" if stage.name == "decode" else "step")
    if stage.name != "denoise":

        def watched(items: Iterable[Any], done: int, total: int) -> Iterator[Any]:
            for item in bar(items, done=done, total=total):
                stopping.check(task, f"in '{stage.name}'")
                yield item

        return pipelines.Steps(watched)
    done, latents = hosts.told_with(lambda: _unfinished(task, weights, shas))
    return pipelines.Steps(bar, finished, (done, latents) if done else None)


def _unfinished(
    task: Task, weights: checkpoint.Checkpoint, shas: Mapping[str, str]
) -> tuple[int, dict[str, torch.Tensor]]:
    """Returns how many steps a stopped run of this very job finished, and its latents."""
    file = task.folder / f"{PARTIAL}.json"
    if not file.is_file():
        return 0, {}
    tensors, manifest = save.read(
        task.folder, PARTIAL, task.identity("denoise"), weights.digests, "the whole stage, after removing both"
    )
    assert manifest is not None
    remedy = f"Finish that run, or remove the two files {PARTIAL}.*, or choose another --out"
    found = {**manifest.settings, "backend": manifest.backend, "mesh": manifest.config["mesh"]}
    for key, value in {
        **task.shown(_denoise(task)),
        "backend": task.request.backend,
        "mesh": dict(task.job.mesh),
    }.items():
        if found.get(key) != value:
            fact = f"A run with {key} {found.get(key)!r} was stopped here, and this one has {value!r}"
            raise ArtefactForeignError(str(file), fact, remedy, key=key)
    if manifest.inputs != dict(shas):
        raise ArtefactForeignError(str(file), "The run that was stopped here had other embeddings", remedy)
    done = int(manifest.settings["done"])
    log.info("resume after step %d of %d", done, task.settings.steps)
    return done, tensors


def _denoise(task: Task) -> pipelines.Stage:
    return next(stage for stage in task.family.STAGES if stage.name == "denoise")  # type: ignore[no-any-return]


@contextlib.contextmanager
def noting(task: Task, made: Sequence[str]) -> Iterator[None]:
    """Writes down, if a run of all stages is stopped inside the context, which of them are finished."""
    try:
        yield
    except StoppedError:
        if task.request.stage == "all" and made and hosts.first():
            shas = {name: save.read_manifest(task.folder / f"{name}.json").sha256 for name in made}
            save.write_json(task.folder / STOPPED, shas)
        raise


def finished(task: Task, weights: checkpoint.Checkpoint) -> dict[str, save.Manifest]:
    """Returns the stages that a stopped run of this very job finished, with their verified manifests.

    Args:
        task: The run; another one than the stopped one finds nothing finished.
        weights: The checkpoint in use.
    """
    found = hosts.told(lambda: {name: manifest.model_dump() for name, manifest in _finished(task, weights).items()})
    return {name: save.Manifest.model_validate(manifest) for name, manifest in found.items()}


def _finished(task: Task, weights: checkpoint.Checkpoint) -> dict[str, save.Manifest]:
    file = task.folder / STOPPED
    if task.request.stage != "all" or not file.is_file():
        return {}
    shas = checkpoint.read_json(file)
    found: dict[str, save.Manifest] = {}
    for stage in task.stages:
        manifest_file = task.folder / f"{stage.name}.json"
        if stage.name not in shas or not manifest_file.is_file():
            break
        manifest = save.read_manifest(manifest_file)
        asked = {**task.shown(stage), "backend": task.request.backend, "mesh": dict(task.job.mesh)}
        made = {**manifest.settings, "backend": manifest.backend, "mesh": manifest.config["mesh"]}
        if manifest.sha256 != shas[stage.name] or any(made.get(key) != value for key, value in asked.items()):
            break
        save.read(task.folder, stage.name, task.identity(stage.name), weights.digests, "the stage again")
        found[stage.name] = manifest
    return found


def forget(task: Task) -> None:
    """Removes what a stopped run left for going on: this one has finished."""
    hosts.told(lambda: _forget(task))


def _forget(task: Task) -> None:
    save.remove(task.folder, PARTIAL)
    (task.folder / STOPPED).unlink(missing_ok=True)
