"""Stops a run cleanly, saves what it has done so far, and goes on from there to the same bits."""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torchport import checkpoint, pipelines, save
from torchport.errors import ArtefactForeignError, StoppedError
from torchport.progress import log, track
from torchport.task import Task

PARTIAL = "denoise.partial"
"""The unfinished latents' artefact."""
STOPPED = ".stopped.json"
"""Written when a run of all stages is stopped: which of them are finished."""


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

        def watched(items: Iterable[Any], done: int, total: int) -> Iterator[Any]:
            for item in bar(items, done=done, total=total):
                stopping.check(task, f"in '{stage.name}'")
                yield item

        return pipelines.Steps(watched)
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
        if task.request.stage == "all" and made:
            shas = {name: save.read_manifest(task.folder / f"{name}.json").sha256 for name in made}
            save.write_json(task.folder / STOPPED, shas)
        raise


def finished(task: Task, weights: checkpoint.Checkpoint) -> dict[str, save.Manifest]:
    """Returns the stages that a stopped run of this very job finished, with their verified manifests.

    Args:
        task: The run; another one than the stopped one finds nothing finished.
        weights: The checkpoint in use.
    """
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
    save.remove(task.folder, PARTIAL)
    (task.folder / STOPPED).unlink(missing_ok=True)
