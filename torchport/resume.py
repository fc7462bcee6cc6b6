"""Stops a run cleanly, saves what it has done so far, and goes on from there to the same bits."""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torchport import checkpoint, pipelines, save
from torchport.errors import ArtefactForeignError, StoppedError
from torchport.progress import log, track
from torchport.task import Task

PARTIAL = "denoise.partial"
"""The unfinished latents' artefact."""


class Stopping:
    """The first Ctrl-C asks for a stop after the step in progress; the second stops at once."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, number: int, frame: object) -> None:
        """Handles SIGINT."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        log.warning("stopping after what is in progress; press Ctrl-C again to stop at once")

    @contextlib.contextmanager
    def listening(self) -> Iterator[Stopping]:
        """Handles SIGINT while the context lasts; only a main thread can, and elsewhere nothing changes."""
        try:
            before = signal.signal(signal.SIGINT, self)
        except ValueError:
            yield self
            return
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)

    def check(self, task: Task, when: str) -> None:
        """Stops here if that was asked for.

        Raises:
            StoppedError: It was.
        """
        if self.asked:
            raise StoppedError(
                "Ctrl-C",
                f"Stopped {when}; what was finished is in {task.folder}",
                f"Go on with the same command and --out {task.folder}",
            )


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
            if stopping.asked or number % task.job.save_every == 0:
                noted = facts()
                save.write(task.folder, PARTIAL, state, {**noted, "settings": {**noted["settings"], "done": number}})
            stopping.check(task, f"after step {number} of {total}")

    bar = functools.partial(track, what=stage.name, unit="tile" if stage.name == "decode" else "step")
    if stage.name != "denoise":
        return pipelines.Steps(bar)
    return pipelines.Steps(bar, finished, _unfinished(task, weights, shas))


def _unfinished(
    task: Task, weights: checkpoint.Checkpoint, shas: Mapping[str, str]
) -> tuple[int, dict[str, torch.Tensor]] | None:
    """Returns how many steps a stopped run of this very job finished, and its latents."""
    file = task.folder / f"{PARTIAL}.json"
    if not file.is_file():
        return None
    tensors, manifest = save.read(
        task.folder, PARTIAL, task.identity("denoise"), weights.digests, "the whole stage, after removing both"
    )
    assert manifest is not None
    remedy = f"Finish that run, or remove the two files {PARTIAL}.*, or choose another --out"
    found = {**manifest.settings, "backend": manifest.backend, "mesh": manifest.config["mesh"]}
    for key, value in {**task.shown(), "backend": task.request.backend, "mesh": dict(task.job.mesh)}.items():
        if key not in ("prompt", "negative_prompt") and found.get(key) != value:
            fact = f"A run with {key} {found.get(key)!r} was stopped here, and this one has {value!r}"
            raise ArtefactForeignError(str(file), fact, remedy, key=key)
    if manifest.inputs != dict(shas):
        raise ArtefactForeignError(str(file), "The run that was stopped here had other embeddings", remedy)
    done = int(manifest.settings["done"])
    log.info("resume after step %d of %d", done, task.settings.steps)
    return done, tensors


def forget(task: Task) -> None:
    """Removes the unfinished latents: the finished ones have been written."""
    save.remove(task.folder, PARTIAL)
