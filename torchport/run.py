"""Carries a task down the path, one stage or all: patch, load, shard, compile, run, save meet only here."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import logging
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import torch

from torchport import (
    checkpoint,
    compile,
    hosts,
    load,
    patch,
    pipelines,
    preflight,
    programs,
    resume,
    save,
    shard,
    tiny,
    upstream,
)
from torchport.attention import bound, dispatch
from torchport.errors import ArtefactForeignError, BadValueError, CheckpointBrokenError, OutputError
from torchport.files import atomic
from torchport.foreign import reading
from torchport.machine import devices
from torchport.progress import log, track
from torchport.record import versions, write_manifest
from torchport.task import Request, Task, accept
from torchport.video import write_contact_sheet, write_video


@dataclasses.dataclass(frozen=True)
class Summary:
    """Where the video is, and where the time went.

    Attributes:
        folder: The output folder.
        video: The video, if this run decoded one.
        seconds: By stage and verb: `denoise compile`, `denoise run`.
        steps: Denoising steps that this run took.
    """

    folder: Path
    video: Path | None
    seconds: dict[str, float]
    steps: int


class Journey:
    """A task on its way: its weights, and what it has left behind so far."""

    def __init__(
        self,
        task: Task,
        weights: checkpoint.Checkpoint,
        stopping: resume.Stopping,
        kept: programs.Programs,
    ) -> None:
        self.task = task
        self.weights = weights
        self.stopping = stopping
        self.programs = kept
        self.run = ""  # its name, which its artefacts carry
        self.unfinished = resume.Unfinished(task)
        self.seconds: dict[str, float] = {}
        self.manifests: dict[str, save.Manifest] = {}  # of the stages that this run has finished, now or before a stop
        self.shas: dict[str, str] = {}  # of artefacts read or written, by stage
        self.settings: dict[str, Any] = {}  # with which everything so far was made, here or elsewhere
        self.steps = 0


def run(request: Request, cluster: hosts.Cluster | None = None) -> Summary:
    """Carries a request down the path and returns where its outputs are.

    Args:
        request: What was asked for.
        cluster: The processes that run it together, each with the same request; by default this one alone.

    Raises:
        TorchportError: Whatever is refused; see `torchport.errors`.
    """
    with resume.Stopping().listening() as stopping:
        task = accept(request)
        if task.original and cluster is not None:
            remedy = "Leave the cluster out, and run it on one host"
            raise BadValueError("--backend original", "It runs in PyTorch, which knows nothing of other hosts", remedy)
        with hosts.joined(cluster) as watch:
            task = _alike(task)
            watch.folder = task.folder
            return _carry(task, stopping)


def _alike(task: Task) -> Task:
    """Returns the task with the first process's folder, if all processes of the run have the same task."""
    settings = dataclasses.asdict(task.settings)
    hosts.agree({**task.job.model_dump(), **settings, "stage": task.request.stage, "versions": versions()})
    return dataclasses.replace(task, folder=Path(hosts.told(lambda: str(task.folder))))


def _carry(task: Task, stopping: resume.Stopping) -> Summary:
    """Carries a task down the path."""
    entries = task.patches(task.stages)
    hush = not log.isEnabledFor(logging.DEBUG)
    with (
        upstream.on_path(task.upstream),
        patch.applied(entries),
        load.hushed(hush),
        load.default_dtype(torch.float32),  # upstream's schedules count on it, and a caller may have set another
        _folder(task.folder),
        programs.Programs.opened(task) as kept,
    ):
        preflight.check(task)
        journey = Journey(task, _weights(task), stopping, kept)
        hosts.agree({"checkpoint": journey.weights.digests})
        _check_parts(journey)
        finished = _goes_on(journey)
        try:
            for stage in task.stages:
                stopping.check(task, f"before '{stage.name}'")
                if stage.name in finished:
                    _take(journey, stage, finished[stage.name])
                else:
                    _travel(journey, stage)
            return _arrive(journey)
        except OutputError as error:
            raise resume.going_on(task, error, list(journey.manifests), journey.unfinished.step) from error


def _goes_on(journey: Journey) -> dict[str, save.Manifest]:
    """Names the run, and returns the manifests of the stages that it finished before it was stopped or killed."""
    task = journey.task

    def before() -> tuple[str, dict[str, Any]]:
        name = resume.unfinished_run(task)
        if name is None:
            return secrets.token_hex(8), {}
        manifests = resume.finished(task, name, journey.weights)
        return name, {stage: manifest.model_dump() for stage, manifest in manifests.items()}

    journey.run, finished = hosts.told(before)
    return {stage: save.Manifest.model_validate(manifest) for stage, manifest in finished.items()}


def _take(journey: Journey, stage: pipelines.Stage, manifest: save.Manifest) -> None:
    """Takes over a stage that was finished before the stop, and what may not have been written after it."""
    task = journey.task
    log.info("%s was finished before the stop", stage.name)
    _note(journey, stage, manifest)

    def complete() -> None:
        names = task.identity(stage.name), journey.weights.digests, resume.AFTER_REMOVAL
        outputs = save.read(task.folder, stage.name, *names)[0] if "frames" in manifest.tensors else {}
        _tidy(journey, stage, outputs, manifest)

    hosts.told(complete)


def _note(journey: Journey, stage: pipelines.Stage, manifest: save.Manifest) -> None:
    """Notes what later stages need of a finished one."""
    journey.manifests[stage.name] = manifest
    journey.shas[stage.name] = manifest.sha256
    journey.settings |= manifest.settings


def _check_parts(journey: Journey) -> None:
    """Refuses a checkpoint that lacks a part, or holds another model's, before the first stage spends hours."""
    task = journey.task
    for stage in task.stages:
        network = [stage.network] if stage.network is not None else []
        for name in (*stage.parts, *stage.loads(task.settings), *network):
            load.account_component(task.card.components[name], task.component_folder(journey.weights.folder, name))


def _built(journey: Journey, name: str) -> torch.nn.Module:
    """Returns a network without storage, as the checkpoint configures it."""
    task, folder = journey.task, journey.task.component_folder(journey.weights.folder, name)
    config = checkpoint.read_json(folder / "config.json")
    return load.build(task.card.components[name].class_, config, task.dtype(name), str(folder))


@contextlib.contextmanager
def _folder(folder: Path) -> Iterator[None]:
    """Makes the output folder, keeps it for this run, and takes it away again if an error leaves nothing in it."""
    new = [path for path in (folder, *folder.parents) if not path.exists()] if hosts.first() else []
    hosts.told(lambda: atomic.make_folder(folder))
    lock = contextlib.ExitStack()
    try:
        with lock:
            hosts.told(lambda: lock.enter_context(atomic.locked(folder)))
            yield
    except BaseException:
        # What cannot be removed stays: the error that is on its way says more.
        with contextlib.suppress(OSError):
            for path in new:
                path.rmdir()
        raise


def _weights(task: Task) -> checkpoint.Checkpoint:
    if task.checkpoint != "tiny":
        return checkpoint.locate(task.checkpoint, task.card, task.settings.variant)
    folder = tiny.write(task.card, task.family.arrange_tiny)
    return checkpoint.Checkpoint(
        folder, f"tiny:{folder.name}", checkpoint.digests(folder, task.card, task.settings.variant)
    )


def _travel(journey: Journey, stage: pipelines.Stage) -> None:
    """Carries one stage down the path."""
    task, clock = journey.task, [time.perf_counter()]
    inputs = _read(journey, stage)
    with patch.applied(task.patches([stage]), stage=stage.name) as ledger:  # patch
        run = functools.partial(_run, journey, stage, ledger, inputs, clock)  # load, shard, compile, run
        # What runs in PyTorch runs in one process: elsewhere it might round otherwise.
        outputs = run() if stage.network is not None else hosts.told_with(lambda: (None, run()))[1]
        facts = _facts(journey, stage, ledger)

        def written() -> dict[str, Any]:
            resume.begin(task, journey.run)
            return save.write(task.folder, stage.name, outputs, facts).model_dump()

        manifest = save.Manifest.model_validate(hosts.told(written))  # save
        _note(journey, stage, manifest)
    hosts.told(lambda: _tidy(journey, stage, outputs, manifest))
    journey.seconds[f"{stage.name} save"] = time.perf_counter() - clock[-1]


def _run(
    journey: Journey, stage: pipelines.Stage, ledger: patch.Ledger, inputs: dict[str, torch.Tensor], clock: list[float]
) -> dict[str, torch.Tensor]:
    """Loads a stage, and runs it on its inputs."""
    task = journey.task
    parts = _load(journey, stage)  # load
    pipelines.check_inputs(stage, parts, task.settings, inputs)
    clock.append(time.perf_counter())
    with compile.operators({op.target: op.function for op in ledger.ops()}):
        call = _network(journey, stage, parts, ledger)  # shard, compile
        clock.append(time.perf_counter())
        facts = functools.partial(_facts, journey, stage, ledger)
        shas = {str(name): journey.shas[name] for name in stage.needs if name in journey.shas}
        start = journey.unfinished.read(journey.weights, shas) if stage.name == "denoise" else (0, {})
        steps = resume.steps(task, stage, journey.stopping, journey.unfinished, facts, start)
        outputs = stage.run(parts, call, task.settings, steps, **inputs)  # run
        clock.append(time.perf_counter())
    ledger.check_called()
    _log_patches(ledger, "" if task.original or stage.network is None else " while tracing")
    _note_times(journey, stage, call, clock)
    if stage.name == "denoise":
        journey.steps = task.settings.steps - (steps.resume[0] if steps.resume else 0)
    return outputs


def _tidy(
    journey: Journey, stage: pipelines.Stage, outputs: Mapping[str, torch.Tensor], manifest: save.Manifest
) -> None:
    """Removes what a stage's new artefact has outdated, and writes what goes beside it: its manifest, its pictures."""
    task = journey.task
    save.write_copy(task.folder, stage.name, manifest)
    later = [after.name for after in task.family.STAGES[task.family.STAGES.index(stage) + 1 :]]
    save.discard_stale(task.folder, stage.name, journey.shas[stage.name], later)
    if "frames" in outputs:
        _save_pictures(task, outputs["frames"][0])


def _log_patches(ledger: patch.Ledger, when: str) -> None:
    for row in ledger.rows():
        calls = f", called {row['calls']} time{'s' * (row['calls'] > 1)}{when}" if row["calls"] else ""
        log.info("patch %s: %s%s", row["id"], row["state"], calls)


def _note_times(journey: Journey, stage: pipelines.Stage, call: Any, clock: list[float]) -> None:
    """Notes where a stage's time went; programs are compiled when first called, inside the verb."""
    compiling = call.seconds if isinstance(call, compile.Compiled) else 0.0
    start, loaded, placed, done = clock
    spent = {"load": loaded - start, "shard": placed - loaded, "compile": compiling, "run": done - placed - compiling}
    journey.seconds |= {f"{stage.name} {verb}": seconds for verb, seconds in spent.items()}


def _read(journey: Journey, stage: pipelines.Stage) -> dict[str, torch.Tensor]:
    """Returns the tensors of the stages that this one needs, verified by the first process, which has the folder."""
    noted, tensors = hosts.told_with(lambda: _read_artefacts(journey, stage))
    journey.shas |= noted["shas"]
    journey.settings = {**noted["settings"], **journey.settings}
    inputs = dict(tensors)
    if stage.name == "denoise" and journey.task.request.noise is not None:
        inputs["noise"] = journey.task.request.noise
    return inputs


def _read_artefacts(journey: Journey, stage: pipelines.Stage) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Returns the artefacts' checksums and settings, and their tensors."""
    task = journey.task
    tensors: dict[str, torch.Tensor] = {}
    shas: dict[str, str] = {}
    settings: dict[str, Any] = {}
    for name in stage.needs:
        folder = task.folder if name in journey.manifests else task.inputs
        found, manifest = save.read(
            folder, name, task.identity(name), journey.weights.digests, task.command(name, task.folder)
        )
        tensors |= found
        if manifest is not None:
            save.check_lineage(folder, name, manifest)
            _check_asked(task, stage, save.file_of(folder, name), manifest)
            shas[name] = manifest.sha256
            settings = {**manifest.settings, **settings}
    return {"shas": shas, "settings": settings}, tensors


def _check_asked(task: Task, stage: pipelines.Stage, file: Path, manifest: save.Manifest) -> None:
    """Refuses a flag for what an earlier stage has settled otherwise: it would have no effect."""
    for key, asked in task.asked().items():
        settled = manifest.settings.get(key, asked)
        if key not in stage.uses and settled != asked:
            raise ArtefactForeignError(
                str(file),
                f"'{manifest.stage}' was made with {key} {settled!r}, and '{stage.name}' is asked for with {asked!r}",
                "Leave the flag out: it has no effect here; or make the earlier stage again with it",
                key=key,
            )


def _load(journey: Journey, stage: pipelines.Stage) -> dict[str, Any]:
    """Returns the stage's parts: whole on the host, or, the network and what lends its configuration, on meta."""
    task = journey.task
    root = journey.weights.folder
    with reading(CheckpointBrokenError, str(root), "Upstream cannot load its encoders", checkpoint.WHOLE):
        parts = stage.load(root, task.settings) if stage.load is not None else {}
    for name in stage.parts:
        component, folder = task.card.components[name], task.component_folder(journey.weights.folder, name)
        if component.dtype is None:
            parts[name] = load.part(component.class_, folder)
        else:
            parts[name] = load.text_encoder(component, folder, task.dtype(name), name)
    for name in (*stage.meta, *([stage.network] if stage.network else [])):
        if name in parts:
            continue  # loaded whole already
        parts[name] = _built(journey, name)
    if stage.prepare is not None:
        stage.prepare(parts, task.settings)
    return parts


def _network(journey: Journey, stage: pipelines.Stage, parts: Mapping[str, Any], ledger: patch.Ledger) -> Any:
    """Returns the stage's network, ready to be called: filled and eager, or placed and to be compiled."""
    if stage.network is None:
        return None
    task, name = journey.task, stage.network
    module, folder = parts[name].get_submodule(stage.submodule), task.component_folder(journey.weights.folder, name)
    settings = task.settings if task.original else programs.fixed(task.settings)
    how = functools.partial(stage.call, settings=settings) if stage.call is not None else compile.plainly
    if task.original:
        load.fill(parts[name], folder, name)
        return compile.Eager(module, how)
    mesh = shard.make_mesh(task.job.mesh, devices(task.machine))
    strategy = task.card.strategies[task.job.strategy]
    rules = preflight.weight_rules(task, name, module)
    prefix = f"{stage.submodule}." if stage.submodule else ""
    tensors = load.tensors(parts[name], folder, name)
    own = ((key.removeprefix(prefix), tensor) for key, tensor in tensors if key.startswith(prefix))
    weights = shard.place(own, rules, mesh)
    bounds = _score_bounds(task, name, weights)
    return compile.Compiled(
        module,
        weights,
        strategy.inputs[name],
        mesh,
        what=name,
        place=task.rules_place("inputs", name),
        places=task.rule_places("inputs", name),
        precision=task.card.components[name].precision,
        trace=ledger.trace(),
        attention=dispatch.Settings(task.job.attention, bounds),
        activations=strategy.activations.get(name, []),
        stacks=task.card.stacks.get(name, {}) if task.job.stacked else {},
        gathered=shard.gathered(rules),
        rules_place=functools.partial(task.program_place, name),
        how=how,
        kept=journey.programs.of(stage, module, journey.weights.folder, bounds, mesh, ledger),
    )


def _score_bounds(task: Task, name: str, weights: Mapping[str, Any]) -> dict[str, float]:
    """Returns the bounds of a network's attention scores that its gains give."""
    found: dict[str, float] = {}
    # A gain that lies on several hosts is none that this one can read.
    spread = {n: a for n, a in weights.items() if isinstance(a, jax.Array) and not a.is_fully_addressable}
    weights = {**weights, **{name: shard.to_host(array) for name, array in spread.items() if array.ndim == 1}}
    for what, entry in task.card.score_bounds.items():
        place = task.card_document.place(["score_bounds", what])
        limit = bound.of_weights(weights, entry.queries, entry.keys, what, place) if entry.component == name else None
        if limit is not None:
            found[what] = limit
            log.info("attention scores %s: |q . k| is at most %.1f by the gains of the norms", what, limit)
    return found


def _save_pictures(task: Task, frames_FCHW: torch.Tensor) -> None:
    every = functools.partial(track, what="save video.mp4", unit="frame", total=len(frames_FCHW))
    write_video(task.folder / save.VIDEO, frames_FCHW, task.job.fps, every)
    write_contact_sheet(task.folder / save.CONTACT_SHEET, frames_FCHW)


def _facts(journey: Journey, stage: pipelines.Stage, ledger: patch.Ledger) -> dict[str, Any]:
    """Returns a manifest's facts about how this stage was run."""
    task = journey.task
    return {
        "stage": stage.name,
        "run": journey.run,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "identity": task.identity(stage.name),
        "checkpoint": journey.weights.identity,
        "components": journey.weights.digests,
        "inputs": {name: journey.shas[name] for name in stage.needs if name in journey.shas},
        "settings": {**journey.settings, **task.shown(stage)},
        "config": task.job.model_dump(),
        "backend": task.request.backend,
        "patches": ledger.rows(),
        "programs": journey.programs.made.get(stage.name, []),
        "versions": versions(),
        "seconds": {key: round(s, 3) for key, s in journey.seconds.items() if key.startswith(f"{stage.name} ")},
    }


def _arrive(journey: Journey) -> Summary:
    """Writes the run's own manifest, forgets that it was unfinished, and returns the summary."""
    task = journey.task
    made = task.folder / save.VIDEO if any(stage.name == "decode" for stage in task.stages) else None
    hosts.told(lambda: write_manifest(task, made, journey.manifests))
    hosts.told(lambda: resume.forget(task))
    return Summary(task.folder, made, journey.seconds, journey.steps)
