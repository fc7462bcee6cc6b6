"""Saves what a run has done so far, and goes on from there to the same bits."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from torchport import save
from torchport.config.card import DENOISING, StageName
from torchport.config.checkout import Upstream
from torchport.errors import ArtefactBrokenError, ArtefactForeignError, BadValueError, NotFiniteError
from torchport.files import atomic
from torchport.load import checkpoint
from torchport.processes import hosts
from torchport.processes.stopping import Stopping
from torchport.progress import log, track
from torchport.save.manifest import Manifest, leaves, versions
from torchport.stages import family
from torchport.stages.outputs import not_finite
from torchport.stages.replay import latents_of
from torchport.task import Task

PARTIAL = "{}.partial"
"""The artefact of a stage's unfinished latents: `denoise.partial`."""
UNFINISHED = ".unfinished.json"
"""The file with the name of the run of all stages that has begun in a folder and has not ended."""
ROUNDS = ("machine", "mesh", "strategy", "attention", "stacked", "cache")
"""Fields of a job by which the rounding of compiled programs differs: a run that goes on must have the same."""
AFTER_REMOVAL = "the same command, after removing it"
"""What errors name as the command that makes a broken artefact of a stopped run again."""


@dataclasses.dataclass(eq=False)
class Unfinished:
    """A run's unfinished latents: saved every few steps, and read by the run that goes on from there."""

    task: Task
    upstream: Upstream | None = None
    stage: StageName = "denoise"
    step: int = 0  #: How many steps the latents on the disk have gone through; 0 where there are none.

    def save(self, number: int, state: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        """Saves the loop's state after step `number`. The state saved before stays until the new file is whole."""
        name = PARTIAL.format(self.stage)
        hosts.from_first(lambda: save.write(self.task.folder, name, state, {**facts, "done": number}).sha256)
        self.step = number

    def keep(self, number: int, state: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        """Writes the latents after a step to a new file, for `torchport compare`; refuses a state without latents."""
        latents = latents_of(state)
        if latents is None:
            fact = f"'keep_steps' is true, and the state of '{self.stage}' after a step has no 'latents', but"
            remedy = "Give them this name in `steps.finished` (docs/families.md), or leave 'keep_steps' out"
            place = self.task.job_document.place(["keep_steps"])
            raise BadValueError(place, f"{fact} {', '.join(map(repr, sorted(state)))}", remedy)
        name, tensors = save.step_name(self.stage, number), {"latents": latents}
        hosts.from_first(lambda: save.write(self.task.folder, name, tensors, {**facts, "done": number}).sha256)

    def read(
        self, weights: checkpoint.Checkpoint, shas: Mapping[str, str], stage: StageName = "denoise"
    ) -> tuple[int, dict[str, torch.Tensor]]:
        """Returns how many steps of a stage a stopped run of the same job finished, and the state after them; `(0, {})`
        if there was no such run. Sets the stage whose state `save` saves from now on.
        """
        [denoising] = (each for each in self.task.denoising if each.name == stage)
        self.stage = stage
        self.step, tensors = hosts.pair_from_first(lambda: self._read(denoising, weights, shas))
        return self.step, dict(tensors)

    def _read(
        self, stage: family.Stage, weights: checkpoint.Checkpoint, shas: Mapping[str, str]
    ) -> tuple[int, dict[str, torch.Tensor]]:
        """Returns the same as `read`, in this process alone; refuses the latents of another job, or of other inputs."""
        name, identity = PARTIAL.format(stage.name), self.task.identity(stage.name)
        file = save.file_of(self.task.folder, name)
        if not file.is_file():
            return 0, {}
        remedy = f"Finish that run, or remove {file.name}, or choose another --out"
        tensors, manifest = save.read(self.task.folder, name, identity, weights.digests, AFTER_REMOVAL)
        assert manifest is not None
        difference = _difference(self.task, stage, manifest, self.upstream)
        if difference is not None:
            key, earlier, current = difference
            fact = f"A run with {key} {earlier!r} was stopped here, and this one has {current!r}"
            raise ArtefactForeignError(str(file), fact, remedy, key=key)
        if manifest.inputs != dict(shas):
            digests = {str(name): sha for name, sha in manifest.inputs.items()}
            other = next((name for name, sha in shas.items() if digests.get(name) != sha), "encode")
            what = "other embeddings" if other == "encode" else f"another '{other}'"
            raise ArtefactForeignError(str(file), f"The run that was stopped here had {what}", remedy)
        done = manifest.done
        total = self.task.settings.steps
        if done is None or done >= total:
            fact = f"Its latents have gone through {done} of {total} steps, and are said to be unfinished"
            raise ArtefactBrokenError(str(file), fact, f"Remove {file.name}: the stage then begins anew")
        log.info("resume after step %d of %d", done, total)
        return done, tensors


def steps(
    task: Task,
    stage: family.Stage,
    stopping: Stopping,
    unfinished: Unfinished,
    facts: Callable[[], dict[str, Any]],
    start: tuple[int, dict[str, torch.Tensor]],
) -> family.Steps:
    """Returns the `Steps` of a stage's loop: its progress bar, a function that checks and saves the state after a step,
    and the starting point. Loops of other stages than denoising are neither saved nor resumed.

    Args:
        facts: Returns the manifest's fields for an artefact of this stage, with their values at that moment.
        start: How many steps are done, and the state after them; `(0, {})` at the beginning.
    """
    bar = functools.partial(track, what=stage.name, unit="tile" if stage.name == "decode" else "step")
    if stage.name not in DENOISING:

        def until_stopped(items: Iterable[Any], done: int, total: int) -> Iterator[Any]:
            for item in bar(items, done=done, total=total):
                stopping.check(task.folder, f"in '{stage.name}'")
                yield item

        return family.Steps(until_stopped)
    total = task.settings.steps

    def after_step(
        number: int,
        state: Mapping[str, torch.Tensor],
        timestep: Any = None,
        kept: family.Kept | None = None,
    ) -> None:
        """Checks the state after step `number`, saves it every few steps and before a stop, and stops if requested."""
        _check_finite(task, stage, number, state, timestep)
        if task.job.keep_steps:
            unfinished.keep(number, state, facts())
        if number < total:
            stop = stopping.is_requested()
            if stop or number % task.job.save_every == 0:
                further = kept() if kept is not None else {}  # such as the tensors of a step cache
                unfinished.save(number, {**state, **further}, facts())
            if stop:
                stopping.stop(task.folder, f"after step {number} of {total}")

    return family.Steps(bar, after_step, start if start[0] else None)


def _check_finite(
    task: Task, stage: family.Stage, number: int, state: Mapping[str, torch.Tensor], timestep: Any
) -> None:
    """Refuses NaN and infinity in the state after a step; the latents saved before the step stay.

    A scheduler takes its step on the host, so checking makes no device wait. It takes 0.7 ms at 720p (32 x 31 x 45 x 80
    latents), where a step takes seconds. So every loop is checked in the step itself, not one step later by a program.
    """
    counts = {key: not_finite(tensor) for key, tensor in state.items()}
    keys = [key for key, count in counts.items() if count]
    if not keys:
        return
    key, count = keys[0], counts[keys[0]]
    at = "" if timestep is None else f" (timestep {float(timestep):g})"
    network = str(stage.network)
    ways = ["--no-jit, which names the module that computes them first"] if task.request.execution.jit else []
    if stage.network is not None and task.dtype(network) != "float32":
        ways.append(f"--set dtypes.{network}=float32")
    if not task.original:
        ways.append("--backend original: if that is finite, a patch or a precision is wrong, else the weights")
    place = f"'{stage.name}', step {number} of {task.settings.steps}{at}"
    fact = f"'{key}' has {count} of {state[key].numel()} values that are NaN or infinite"
    remedy = f"Run the same command into another folder with {', or '.join(ways)}" if ways else "Check the weights"
    raise NotFiniteError(place, fact, remedy, key=key, step=number)


def _difference(
    task: Task, stage: family.Stage, manifest: Manifest, upstream: Upstream | None
) -> tuple[str, Any, Any] | None:
    """Returns the first setting in which the run of an artefact differs from this run, or None. A difference is the
    key, the artefact's value, and this run's value: `("steps", 50, 30)`.
    """
    rounds = () if task.original else ROUNDS
    job = task.job.model_dump()
    earlier = {**manifest.settings, "backend": manifest.backend, **{key: manifest.config.get(key) for key in rounds}}
    current = {**task.manifest_settings(stage), "backend": task.request.backend, **{key: job[key] for key in rounds}}
    earlier |= {"jit": manifest.jit, "xla flags": manifest.xla_flags and manifest.xla_flags.model_dump()}
    current |= {key.replace("_", " "): value for key, value in task.request.execution.row(task.machine).items()}
    code = leaves({"card": manifest.card, "code": manifest.code})
    earlier |= code
    current |= dict.fromkeys(code) | leaves(task.code(stage))  # None for code that is gone
    earlier |= {f"version of {name}": version for name, version in manifest.versions.items()}
    current |= {f"version of {name}": version for name, version in versions().items()}
    if upstream is not None and manifest.upstream is not None:
        for settings, revision in ((earlier, manifest.upstream), (current, upstream.revision)):
            settings[f"commit of {upstream.package}"] = revision.commit
            settings[f"changes to {upstream.package}'s commit"] = revision.dirty
    for key, value in current.items():
        before = earlier.get(key)
        if before != value:
            return key, before, value
    return None


def unfinished_run(task: Task) -> str | None:
    """Returns the name of the run of all stages that has begun in the folder and not ended; None if there is none."""
    file = task.folder / UNFINISHED
    if task.request.stage != "all" or not file.is_file():
        return None
    try:
        content = json.loads(file.read_bytes())
        name = content["run"] if isinstance(content, dict) and [*content] == ["run"] else None
    except (ValueError, RecursionError, OSError):
        name = None
    if not isinstance(name, str):
        log.warning("%s cannot be read: every stage is run again", file)  # which is safe
        return None
    return name


def start(task: Task, run: str) -> None:
    """Writes the name of a run of all stages into its folder, so that the same command can continue the run."""
    if task.request.stage == "all":
        atomic.write_json(task.folder / UNFINISHED, {"run": run})


def finished_manifests(
    task: Task, run: str, weights: checkpoint.Checkpoint, upstream: Upstream | None = None
) -> dict[str, Manifest]:
    """Returns, by stage, the manifests of the stages that the named run finished, up to the first that is missing or
    made with other settings. Their artefacts are read and verified.
    """
    manifests: dict[str, Manifest] = {}
    for stage in task.stages:
        file = save.file_of(task.folder, stage.name)
        if not file.is_file():
            break
        manifest = save.read_manifest(file)
        inputs = {name: manifests[name].sha256 for name in manifest.inputs if name in manifests}
        if (manifest.run, manifest.inputs) != (run, inputs) or _difference(task, stage, manifest, upstream) is not None:
            break
        # Raises if the artefact is broken or of another job.
        save.read(task.folder, stage.name, task.identity(stage.name), weights.digests, AFTER_REMOVAL)
        manifests[stage.name] = manifest
    return manifests


def is_finished(task: Task, weights: checkpoint.Checkpoint, upstream: Upstream | None = None) -> bool:
    """Returns whether the folder has a finished run of this job. Its artefacts are read and verified.

    Raises ArtefactForeignError if the folder has a finished run with other settings.
    """
    last = save.file_of(task.folder, task.stages[-1].name)
    is_whole = (task.folder / "manifest.json").is_file() and task.result.is_file() and last.is_file()
    if not is_whole or unfinished_run(task) is not None:
        return False
    for stage in task.stages:
        file = save.file_of(task.folder, stage.name)
        if not file.is_file():
            continue  # `finished_manifests` ends before this stage
        manifest = save.read_manifest(file)
        difference = _difference(task, stage, manifest, upstream)
        # The latents of steps that this job asks for may be missing. Those that it does not ask for do no harm.
        if difference is None and task.job.keep_steps and not manifest.config.get("keep_steps"):
            difference = ("keep_steps", False, True)
        if difference is not None:
            key, earlier, current = difference
            fact = f"A finished video with {key} {earlier!r} lies here, and this one has {current!r}"
            remedy = "Remove the folder to make it anew, or choose another --out"
            raise ArtefactForeignError(str(task.folder), fact, remedy, key=key)
    verified = finished_manifests(task, save.read_manifest(last).run, weights, upstream)
    return len(verified) == len(task.stages)


def forget(task: Task) -> None:
    """Removes the files from which a stopped run would continue: this run has finished."""
    for stage in task.denoising:
        save.remove(task.folder, PARTIAL.format(stage.name))
    atomic.remove(task.folder / UNFINISHED)
