"""One run: what it reads for a stage, what it writes after the stage, and how long it took."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax
import torch

from torchport import compile, patch, save
from torchport.compile import network
from torchport.compile.cached_steps import StepCached
from torchport.compile.program import Compiled
from torchport.config import checkout
from torchport.config.card import DENOISING, STAGES, StageName
from torchport.config.step_cache import computed_steps
from torchport.errors import ArtefactForeignError, OutputError
from torchport.files import atomic
from torchport.load import checkpoint
from torchport.processes import git, hosts
from torchport.processes.stopping import Stopping
from torchport.progress import log, size_text, track
from torchport.run import resume
from torchport.save.manifest import SCHEMA, Manifest, versions
from torchport.save.video import contact_sheet, encoded, write_picture
from torchport.stages import family
from torchport.task import Task
from torchport.task.devices import devices
from torchport.task.execution import SKIPPED

T = TypeVar("T")
LOSSY_INT8 = "multiplies queries and keys in eight bits where scores have a bound"
"""The sentence of a manifest and of the log on `attention: splash_int8`."""
CURVE = "magcache.yaml"
"""The file with the curve that `cache: {kind: calibrate}` measures, as a config takes it."""
STATE = "state/"
"""The prefix of tensors that are no inputs of a stage, but the loop's state after an earlier stage's steps."""
_PROFILES = "profile"
"""The folder of profiles in a run's folder; each stage has a folder in it."""
_DERIVED = ("schema_version", "tensors", "sha256")
"""Fields of a manifest that `save.write` finds out itself."""


@dataclasses.dataclass(frozen=True)
class Summary:
    """The result of a run: where the video is, and where the time went."""

    folder: Path
    video: Path | None  #: None if `decode` was not run.
    seconds: dict[str, float]  #: By stage and verb: `denoise load`.
    steps: int  #: The denoising steps that the run took.
    #: The upstream and its commit, if it is a checkout.
    upstream: checkout.Upstream | None = None
    #: By stage, how many operators its programs call, and how many of them compute what PyTorch does.
    operators: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class Journey:
    """A run of a task, which reads and writes artefacts, and notes the facts for their manifests.

    Only the first process of a run has the folder: it reads and writes, and sends the other processes what it read.
    """

    task: Task
    weights: checkpoint.Checkpoint
    upstream: checkout.Upstream | None
    stopping: Stopping
    run: str = ""  #: Its name; empty before `stages` is called.
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  #: By stage and verb: `denoise load`.
    steps: int = 0  #: The denoising steps that the run takes itself, without those of a stopped run.
    begins: int = 0  #: The step, counted from 0, at which the network of the current stage begins; set by `read`.
    #: By stage, in words, how many operators its programs call.
    operators: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.unfinished = resume.Unfinished(self.task, self.upstream)
        self._programs: dict[str, list[dict[str, Any]]] = {}  # rows of manifests, by stage
        self._manifests: dict[str, Manifest] = {}  # of the stages that this run has finished, now or before a stop
        self._shas: dict[str, str] = {}  # of artefacts read or written, by stage
        self._settings: dict[str, Any] = {}  # of all artefacts so far, from this run or others
        self._start: tuple[int, dict[str, torch.Tensor]] = (0, {})  # finished steps, and the state after them
        self._clock = 0.0  # the moment from which the next seconds count

    def stages(self) -> Iterator[family.Stage]:
        """Yields the stages that are left to run. It gives the run its name, notes the stages that a stopped or killed
        run finished, and writes the files that are missing beside their artefacts.
        """

        def name_and_manifests() -> tuple[str, dict[str, Any]]:
            """Returns the name of the unfinished run with the manifests of its finished stages, or a new name."""
            name = resume.unfinished_run(self.task)
            if name is None:
                return secrets.token_hex(8), {}
            manifests = resume.finished_manifests(self.task, name, self.weights, self.upstream)
            return name, {stage: manifest.model_dump() for stage, manifest in manifests.items()}

        self.run, rows = hosts.from_first(name_and_manifests)
        finished = {name: Manifest.model_validate(row) for name, row in rows.items()}
        for stage in self.task.stages:
            self.stopping.check(self.task.folder, f"before '{stage.name}'")
            if stage.name not in finished:
                yield stage
                continue
            log.info("%s was finished before the stop", stage.name)
            self._note(stage, finished[stage.name])
            hosts.from_first(functools.partial(self._complete, stage, finished[stage.name]))
            if stage.name == self.task.stages[-1].name:
                self.revise()

    def _complete(self, stage: family.Stage, manifest: Manifest) -> None:
        """Writes the files beside a finished stage's artefact, such as the video: a killed run may not have done so."""
        outputs: dict[str, torch.Tensor] = {}
        if "frames" in manifest.tensors:
            identity = self.task.identity(stage.name)
            outputs, _ = save.read(self.task.folder, stage.name, identity, self.weights.digests, resume.AFTER_REMOVAL)
        self._tidy(stage, manifest)
        with _rendered(self.task, outputs) as write_pictures:
            write_pictures()

    def revise(self) -> bool:
        """Writes the finished video again if the job has another `fps` by now; returns whether this was done."""
        fields = hosts.from_first(lambda: _video_at_jobs_rate(self.task, self.weights.digests))
        if fields is not None:
            self._note(self.task.stages[-1], Manifest.model_validate(fields))
        return fields is not None

    def read(self, stage: family.Stage) -> dict[str, torch.Tensor]:
        """Reads and verifies the artefacts of the stages that a stage needs, and returns its inputs with the noise. It
        keeps the state of an earlier stage's loop for `steps_of`, and starts the clock of `note_seconds`.
        """
        self._clock = time.perf_counter()
        facts, tensors = hosts.pair_from_first(lambda: self._read(stage))
        self._shas |= facts["shas"]
        self._settings = {**facts["settings"], **self._settings}
        inputs = {name: tensor for name, tensor in tensors.items() if not name.startswith(STATE)}
        state = {name.removeprefix(STATE): tensor for name, tensor in tensors.items() if name not in inputs}
        self.begins = int(state.pop("done", 0))  # a stopped run goes on later than here
        self._start = (self.begins, state)
        return inputs | self.task.noise(stage)

    def _read(self, stage: family.Stage) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Returns the facts `{"shas": ..., "settings": ...}` of the artefacts that a stage needs, and their tensors by
        name. Tensors of the state of an earlier stage's loop are named `state/...`.
        """
        task = self.task
        tensors: dict[str, torch.Tensor] = {}
        shas: dict[str, str] = {}
        settings: dict[str, Any] = {}
        for name in stage.needs:
            folder = task.folder if name in self._manifests else task.inputs
            made_by = task.command(name, task.folder)
            embeddings = None if task.card.call is None else task.card.call.embeddings
            identity = task.identity(name)
            stage_tensors, manifest = save.read(folder, name, identity, self.weights.digests, made_by, embeddings)
            prefix = STATE if name in DENOISING and stage.name in DENOISING else ""
            tensors |= {f"{prefix}{key}": tensor for key, tensor in stage_tensors.items()}
            if manifest is not None:
                save.check_lineage(folder, name, manifest)
                file = save.file_of(folder, name)
                _check_flags(task, stage, file, manifest)
                revision = manifest.upstream
                if self.upstream and revision and revision.model_dump() != self.upstream.row():  # a warning, no error
                    made = git.Revision(revision.commit, revision.dirty, reason="unknown")
                    log.warning("%s was made by %s at %s; this run has %s", file, revision.package, made, self.upstream)
                shas[name] = manifest.sha256
                settings = {**manifest.settings, **settings}
        return {"shas": shas, "settings": settings}, tensors

    def inputs_of(self, stage: family.Stage) -> dict[str, str]:
        """Returns the SHA-256 of each artefact that a stage has read, by the stage that made the artefact."""
        return {str(name): self._shas[name] for name in stage.needs if name in self._shas}

    def steps_of(self, stage: family.Stage, ledger: patch.Ledger) -> family.Steps:
        """Returns the progress bar, the saving and the starting point of a stage's loop; see `resume.steps`. For a
        stage of denoising steps it reads the steps of a stopped run, deletes saved steps after these, and counts the
        steps left.
        """
        if stage.name in DENOISING:
            saved = self.unfinished.read(self.weights, self.inputs_of(stage), stage.name)
            if saved[0]:
                self._start = saved
            done, _ = self._start
            self.steps += self.task.settings.steps - done
            hosts.from_first(functools.partial(save.remove_steps_after, self.task.folder, stage.name, done))
        facts = functools.partial(self._facts, stage, ledger)
        steps = resume.steps(self.task, stage, self.stopping, self.unfinished, facts, self._start)
        count = self.task.request.execution.profile
        if count is None or stage.name not in DENOISING or not hosts.is_first():
            return steps
        folder = self.task.folder / _PROFILES / stage.name

        def track_and_profile(items: Iterable[T], done: int, total: int) -> Iterator[T]:
            """Iterates over steps under the progress bar and the profiler."""
            return profiled(steps.track(items, done=done, total=total), done, count, folder)

        return dataclasses.replace(steps, track=track_and_profile)

    def is_idle(self, stage: family.Stage, outputs: Mapping[str, torch.Tensor]) -> bool:
        """Returns whether a stopped run had taken all steps of `denoise_first`, so that this run called no network."""
        return stage.name == "denoise_first" and int(outputs["done"]) == self._start[0]

    def note_run(self, stage: family.Stage, call: Any, programs: Mapping[str, compile.Compiled]) -> None:
        """Notes a stage's programs and its seconds of running and compiling, and writes the curve of a step cache that
        calibrates. With `--memory` it logs the memory of programs.
        """
        self.note_seconds(stage, "run")
        self._programs[stage.name] = [row for compiled in programs.values() for row in compiled.rows()]
        self.operators |= {name: compiled.operators_text() for name, compiled in programs.items() if compiled.jit}
        if self.task.request.execution.memory:
            for compiled in programs.values() or [call]:  # on the host there are none, and `call` itself is measured
                for line in memory_lines(compiled, devices(self.task.machine)):
                    log.info("memory of '%s': %s", stage.name, line)
        # A stage compiles a program at its first call: these seconds are among those of `run`.
        compiling = sum(compiled.seconds for compiled in programs.values())
        self.seconds[f"{stage.name} compile"] = compiling
        self.seconds[f"{stage.name} run"] -= compiling
        # Of two stages that denoise, the first has only a part of the curve.
        if isinstance(call, StepCached) and len(call.curve) == self.task.settings.steps:
            file, numbers = self.task.folder / CURVE, ", ".join(f"{value:.5f}" for value in call.curve)
            text = f"cache: {{kind: magcache, curve: [{numbers}]}}\n"
            hosts.from_first(lambda: atomic.write_text(file, text))
            log.info("the curve of %d steps: %s", len(call.curve), file)

    def write(self, stage: family.Stage, outputs: Mapping[str, torch.Tensor], ledger: patch.Ledger) -> None:
        """Writes a stage's artefact and the files beside it, in the first process alone, and notes its manifest."""
        facts = self._facts(stage, ledger)

        def write_artefact() -> dict[str, Any]:
            """Marks the folder as an unfinished run's, writes the artefact, and returns its manifest as a dict."""
            resume.start(self.task, self.run)
            return save.write(self.task.folder, stage.name, outputs, facts).model_dump()

        with _rendered(self.task, outputs) as write_pictures:
            manifest = Manifest.model_validate(hosts.from_first(write_artefact))
            self._note(stage, manifest)
            if stage.name == "denoise_first":  # `steps_of` has counted to the last step, and `denoise` takes the rest
                self.steps -= self.task.settings.steps - int(outputs["done"])
            hosts.from_first(lambda: self._tidy(stage, manifest))
            hosts.from_first(write_pictures)

    def _facts(self, stage: family.Stage, ledger: patch.Ledger) -> dict[str, Any]:
        """Returns the fields of a manifest that say how a stage was run, with their values at this moment."""
        task = self.task
        return {
            "stage": stage.name,
            "run": self.run,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "identity": task.identity(stage.name),
            "checkpoint": self.weights.identity,
            "components": self.weights.digests,
            "inputs": self.inputs_of(stage),
            "settings": {**self._settings, **task.manifest_settings(stage)},
            "config": task.job.model_dump(),
            "backend": task.request.backend,
            **self.task.request.execution.row(task.machine),
            "patches": ledger.rows(),
            "cache": _cache_row(task, stage, self.begins),
            **task.code(stage),
            "upstream": None if self.upstream is None else self.upstream.row(),
            "programs": self._programs.get(stage.name, []),
            "versions": versions(),
            "seconds": {key: round(s, 3) for key, s in self.seconds.items() if key.startswith(f"{stage.name} ")},
        }

    def _note(self, stage: family.Stage, manifest: Manifest) -> None:
        """Notes the manifest of a finished stage, with the checksum and the settings that later manifests repeat."""
        self._manifests[stage.name] = manifest
        self._shas[stage.name] = manifest.sha256
        self._settings |= manifest.settings

    def _tidy(self, stage: family.Stage, manifest: Manifest) -> None:
        """Writes a stage's manifest beside its artefact; removes later artefacts that were made from an older one."""
        task = self.task
        save.write_copy(task.folder, stage.name, manifest)
        names = [each.name for each in task.family.STAGES]  # the stage may be another task's, of the same series
        save.discard_stale(task.folder, stage.name, manifest.sha256, names[names.index(stage.name) + 1 :])

    def note_seconds(self, stage: family.Stage, verb: str) -> None:
        """Notes the seconds of a stage's `load`, `shard`, `run` or `save`: since the last note, or since `read`."""
        moment = time.perf_counter()
        self.seconds[f"{stage.name} {verb}"] = moment - self._clock
        self._clock = moment

    def finish(self) -> Summary:
        """Writes the run's own manifest, removes the files for resuming it, and returns where its outputs are."""
        has_video = any(stage.name == "decode" for stage in self.task.stages)
        video = self.task.result if has_video else None
        hosts.from_first(lambda: _write_manifest(self.task, video, self._manifests))
        hosts.from_first(lambda: resume.forget(self.task))
        return Summary(self.task.folder, video, self.seconds, self.steps, self.upstream, self.operators)

    def continuation(self) -> str:
        """Returns a clause for an error's remedy: from where the same command would go on."""
        again, unfinished = f"the same command with --out {self.task.folder} then", self.unfinished
        if unfinished.step and unfinished.stage not in self._manifests:
            return f"{again} goes on after step {unfinished.step} of {self.task.settings.steps}"
        if self._manifests and self.task.request.stage == "all":
            return f"{again} goes on after '{[*self._manifests][-1]}'"
        return f"{again} begins anew: nothing was finished"


@contextlib.contextmanager
def _rendered(task: Task, outputs: Mapping[str, torch.Tensor]) -> Iterator[Callable[[], None]]:
    """Encodes a stage's video and contact sheet in the background, in the first process alone, while the context lasts.

    Yields:
        A function that writes the video and the sheet, or the picture of a model of pictures. It does nothing if the
        stage's outputs are no frames.
    """
    if "frames" not in outputs or not hosts.is_first():
        yield lambda: None
        return
    frames_FCHW = outputs["frames"][0]
    if task.card.makes_pictures:
        settings = task.settings
        facts = {"Software": "torchport", "model": task.card.model, "checkpoint": task.checkpoint}
        facts |= {"prompt": settings.prompt, "negative_prompt": settings.negative_prompt, "seed": str(settings.seed)}
        facts |= {"steps": str(settings.steps), "guidance_scale": str(settings.guidance_scale)}
        yield lambda: write_picture(task.result, frames_FCHW[0], facts)
        return
    ended = threading.Event()

    def tracked(frames: Iterable[T]) -> Iterator[T]:
        """Yields the frames under a progress bar, until the context ends with an error: nobody waits for the rest."""
        shown = track(frames, what="save video.mp4", unit="frame", total=len(frames_FCHW))
        yield from itertools.takewhile(lambda _: not ended.is_set(), shown)

    with ThreadPoolExecutor(2) as pool:
        sound = (outputs["sound"], int(outputs["sound_rate"])) if "sound" in outputs else None
        video = pool.submit(encoded, frames_FCHW, task.job.fps, tracked, sound)
        sheet = pool.submit(contact_sheet, frames_FCHW)

        def write() -> None:
            atomic.write_bytes(task.folder / save.VIDEO, video.result())
            atomic.write_bytes(task.folder / save.CONTACT_SHEET, sheet.result())

        try:
            yield write
        finally:
            ended.set()


def _video_at_jobs_rate(task: Task, digests: dict[str, str]) -> dict[str, Any] | None:
    """Writes a finished video again if it has another `fps` than the job: neither latents nor frames depend on the
    rate. Returns the last stage's new manifest as a dict; None if nothing was written.
    """
    stage, folder = task.stages[-1], task.folder
    manifest = save.read_manifest(save.file_of(folder, stage.name))
    before = manifest.config.get("fps")
    if "frames" not in manifest.tensors or before == task.job.fps:
        return None
    outputs, _ = save.read(folder, stage.name, task.identity(stage.name), digests, resume.AFTER_REMOVAL)
    log.info("%s had %s frames per second: it is written again with %s", task.result, before, task.job.fps)
    with _rendered(task, outputs) as write_pictures:
        write_pictures()  # before the manifest: a run that is killed between the two writes both again
    facts = {key: value for key, value in manifest.model_dump().items() if key not in _DERIVED}
    facts["config"] = {**manifest.config, "fps": task.job.fps}
    manifest = save.write(folder, stage.name, outputs, facts)
    save.write_copy(folder, stage.name, manifest)
    return manifest.model_dump()


def log_patches(ledger: patch.Ledger, when: str) -> None:
    """Logs a line for all patches, and a line for each patch that is inexact or displaced; with -v for every patch.

    Args:
        when: When calls were counted, as the end of a sentence: " while tracing".
    """
    rows = ledger.rows()
    applied = sum(row["state"] in ("applied", "used") for row in rows)
    if rows:
        log.info("patches: %d in force, %d called%s", applied, sum(bool(row["calls"]) for row in rows), when)
    for row in rows:
        equivalence = row["equivalence"]
        promise = equivalence if isinstance(equivalence, str) else next(iter(equivalence))  # of {close: ...}
        matters = promise in ("close", "lossy") or row["state"] == "displaced"
        calls = f", called {row['calls']} time{'s' * (row['calls'] > 1)}{when}" if row["calls"] else ""
        level = logging.INFO if matters else logging.DEBUG
        log.log(level, "patch %s (%s): %s%s", row["id"], promise, row["state"], calls)


def _cache_row(task: Task, stage: family.Stage, begins: int) -> dict[str, Any] | None:
    """Returns a manifest's row on a stage's step cache; None without a cache. The stage begins at step `begins`."""
    cache = network.step_cache_of(task, stage)
    steps = task.job.steps
    if cache is None:
        return None
    return {"kind": cache.kind, "steps": steps, "computed": list(computed_steps(cache, steps, begins))}


def _lossy(stages: Mapping[StageName, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows of a manifest's `deviations` that come from step caches and from attention in eight bits."""
    lossy: list[tuple[str, StageName, str]] = []
    for name, stage in stages.items():
        if (row := stage["cache"]) is not None:
            lossy.append((f"cache {row['kind']}", name, f"computes {len(row['computed'])} of {row['steps']} steps"))
        is_int8 = name in DENOISING and stage["config"].get("attention") == "splash_int8"
        if is_int8 and stage["backend"] != "original":
            lossy.append(("attention splash_int8", name, LOSSY_INT8))
    return [{"id": id, "stage": name, "equivalence": {"lossy": how}} for id, name, how in lossy]


def _write_manifest(task: Task, video: Path | None, finished: Mapping[str, Manifest]) -> None:
    """Writes the run's `manifest.json`, with the manifests of all stages: `finished`, or from the folder."""
    manifests = {name: finished.get(name) or save.readable_manifest(save.file_of(task.folder, name)) for name in STAGES}
    stages = {name: manifest.model_dump() for name, manifest in manifests.items() if manifest is not None}
    # A lowering that nothing called has changed nothing.
    rows = [row for stage in stages.values() for row in stage["patches"] if row["state"] != "armed"]
    manifest = {
        "schema_version": SCHEMA,
        "model": task.card.model,
        "title": task.card.title,
        "video": video.name if video else None,
        "deviations": [*(row for row in rows if row["equivalence"] != "bitwise"), *_lossy(stages)],
        "stages": stages,
    }
    atomic.write_json(task.folder / "manifest.json", manifest)


def _check_flags(task: Task, stage: family.Stage, file: Path, manifest: Manifest) -> None:
    """Refuses a flag that contradicts the `file` of an earlier stage: the flag would have no effect on this stage."""
    for key, value in task.flag_settings().items():
        earlier = manifest.settings.get(key, value)
        is_other = earlier != value
        if key == "image" and "image_digest" in manifest.settings:  # the file may have another name, or content
            is_other = manifest.settings["image_digest"] != task.image_digest
            value = f"{value}, which holds something else"
        if key not in stage.uses and is_other:
            fact = f"'{manifest.stage}' was made with {key} {earlier!r}, and '{stage.name}' is asked for with {value!r}"
            remedy = "Leave the flag out: it has no effect here; or make the earlier stage again with it"
            raise ArtefactForeignError(str(file), fact, remedy, key=key)


def profiled(items: Iterable[T], done: int, count: int, folder: Path) -> Iterator[T]:
    """Yields the items of a loop, one for each step, and traces some of these steps with JAX's profiler.

    Args:
        done: The steps that an earlier run has taken.
        count: How many steps are traced, after the first `SKIPPED`.
        folder: The stage's folder for the trace.
    """
    items, first, taken = iter(items), SKIPPED + 1, 0
    try:
        with contextlib.ExitStack() as trace:
            for number, item in enumerate(items, 1):
                if number == first:
                    trace.enter_context(_tracing(folder))
                mark = jax.profiler.StepTraceAnnotation("step", step_num=done + number)
                with mark if number >= first else contextlib.nullcontext():
                    yield item
                taken += number >= first
                if taken == count:
                    break
    except GeneratorExit:  # the loop breaks off: another network takes the remaining steps
        _log_profile(folder, done + first, taken)
        raise
    _log_profile(folder, done + first, taken)
    # The steps after the traced ones.
    yield from items


def _log_profile(folder: Path, first: int, taken: int) -> None:
    stage = folder.name
    if not taken:
        log.warning("profile: '%s' took no more than %d steps, and none is traced", stage, SKIPPED)
        return
    files = sorted(folder.glob("plugins/profile/*/perfetto_trace.json.gz"))
    log.info("profile: steps %d to %d of '%s' are in %s", first, first + taken - 1, stage, folder)
    log.info("profile: open it with `xprof --logdir %s` (pip install xprof),", folder)
    log.info("profile: or %s at https://ui.perfetto.dev", files[-1])


@contextlib.contextmanager
def _tracing(folder: Path) -> Iterator[None]:
    """Traces host and devices with JAX's profiler while the context lasts, and writes the trace to a folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)  # before the trace: JAX cannot start another after one that it lost
    except OSError as error:
        raise _unwritten_trace(folder, error) from error
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's own calls would be most of the file, and of the time
    jax.profiler.start_trace(folder, create_perfetto_trace=True, profiler_options=options)
    try:
        yield
    finally:
        try:
            jax.profiler.stop_trace()
        except (OSError, jax.errors.JaxRuntimeError) as error:
            raise _unwritten_trace(folder, error) from error


def _unwritten_trace(folder: Path, error: Exception) -> OutputError:
    reason = " ".join(str(error).split())[:200].rstrip(".")
    remedy = "Free some space, or choose another folder with --out"
    return OutputError(str(folder), f"The trace cannot be written: {reason}", remedy)


def memory_lines(call: Any, devices: Sequence[jax.Device]) -> list[str]:
    """Returns lines on a stage's memory: of each program by its compiler, and of the fullest device by the backend."""
    if not isinstance(call, Compiled):
        return ["it runs on the host, and takes no memory of a device"]
    name = f"'{call.network.name}'"
    lines = [] if call.jit else [f"{name} ran op by op: no program was compiled"]
    for program in call.programs.values() if call.jit else ():
        memory = program.memory_analysis()
        if memory is None:
            lines.append(f"{name}: this backend's compiler does not say what a program takes")
            continue
        sizes = {
            "weights and inputs": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
            "intermediate": memory.temp_size_in_bytes,
            "code": memory.generated_code_size_in_bytes,
        }
        parts = ", ".join(f"{size_text(size)} {use}" for use, size in sizes.items())
        lines.append(f"{name}, as compiled, on each device: {size_text(sum(sizes.values()))} ({parts})")
    return [*lines, _counted([device for device in devices if device.process_index == jax.process_index()])]


def _counted(devices: Sequence[jax.Device]) -> str:
    """Returns a line on the fullest device's memory: in use at this moment, and at most since the run began."""
    stats = [stats for device in devices if (stats := device.memory_stats())]
    if not stats:
        return f"the backend '{devices[0].platform}' does not count what its devices hold"
    most = max(stats, key=lambda counts: counts.get("peak_bytes_in_use", 0))
    used, peak = (size_text(most.get(key, 0)) for key in ("bytes_in_use", "peak_bytes_in_use"))
    limit = f" of {size_text(most['bytes_limit'])}" if "bytes_limit" in most else ""
    return f"on the fullest device: {used} in use, {peak} at most since the run began{limit}"
