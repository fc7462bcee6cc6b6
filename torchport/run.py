"""Carries a job down the path, one stage or all: patch, load, shard, compile, run, save meet only here."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import platform
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from torchport import compile, load, machine, patch, pipelines, save, shard, tiny
from torchport.card import STAGES, Card, Job, Pack, StageName, check_job, find_pack
from torchport.config import Document
from torchport.errors import ArtefactForeignError, BadValueError, MeshError, StoppedError, UnknownNameError, nearest
from torchport.progress import log, track

Backend = Literal["torchax", "original"]
PARTIAL = "denoise.partial"


@dataclasses.dataclass(frozen=True)
class Request:
    """What was asked for on the command line, or from Python.

    Attributes:
        model: Name of a model card.
        config: A config: a path, or a name in `configs/`.
        prompt: What to show; may be left out where no prompt is encoded.
        negative_prompt: What to avoid.
        seed: Of the noise.
        checkpoint: A folder, `repo@revision`, or `tiny`; by default the config's, else the card's.
        out: The output folder; by default a new one under `outputs/`.
        inputs: Where earlier stages' artefacts are read; by default `out`.
        stage: One stage, or `all`.
        backend: `torchax`, or `original`: upstream, eager, in PyTorch.
        overrides: `path.to.field=value`, into the config.
        path: The pack; by default the checkout's or the wheel's own.
        noise: The latents to start from, [1, C, T, H, W]; by default drawn from the seed.
    """

    model: str
    config: str
    prompt: str | None = None
    negative_prompt: str = ""
    seed: int = 42
    checkpoint: str | None = None
    out: Path | None = None
    inputs: Path | None = None
    stage: str = "all"
    backend: Backend = "torchax"
    overrides: tuple[str, ...] = ()
    path: str | None = None
    noise: torch.Tensor | None = None


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


@dataclasses.dataclass
class Journey:
    """One run on its way: what every stage needs to know, and what it leaves behind."""

    request: Request
    pack: Pack
    card: Card
    job: Job
    card_document: Document
    job_document: Document
    family: ModuleType
    folder: Path
    checkpoint: load.Checkpoint
    settings: pipelines.Settings
    stopping: Stopping
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    shas: dict[str, str] = dataclasses.field(default_factory=dict)
    steps: int = 0

    @property
    def inputs(self) -> Path:
        """Where earlier stages' artefacts are read."""
        return self.request.inputs or self.folder


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


def run(request: Request) -> Summary:
    """Carries a job down the path and returns where its outputs are.

    Raises:
        TorchportError: Whatever is refused; see `torchport.errors`.
    """
    stopping = Stopping()
    with stopping.listening():
        journey = _depart(request, stopping)
        stages = [stage for stage in journey.family.STAGES if request.stage in (stage.name, "all")]
        with patch.applied(_patches(journey, [stage.name for stage in stages]), stage=None):
            _check_machine(journey, stages)
            journey = dataclasses.replace(journey, checkpoint=_checkpoint(journey))
            _check_heads(journey, stages)
            for stage in stages:
                _travel(journey, stage)
    return _arrive(journey)


def _depart(request: Request, stopping: Stopping) -> Journey:
    """Reads and checks everything that is written, before anything is loaded."""
    pack = find_pack(request.path)
    card, card_document = pack.card(request.model)
    job, job_document = pack.job(request.config, request.overrides)
    if request.stage not in (*STAGES, "all"):
        raise UnknownNameError(
            f"--stage {request.stage}", "There is no such stage", nearest(request.stage, [*STAGES, "all"])
        )
    if request.prompt is None and request.stage in ("encode", "all"):
        raise BadValueError("--prompt", "It is missing, and the stage 'encode' needs one", 'Add --prompt "..."')
    check_job(job, card, job_document)
    slice_ = machine.parse_machine(job.machine, job_document.place(["machine"]))
    family = pipelines.family(card.family, card_document.place(["family"]))
    if request.backend == "torchax":
        shard.check_mesh(job.mesh, slice_.devices, job.machine, job_document.place(["mesh"]))
        shard.check_divides(
            "dp", job.mesh.get("dp", 1), f"the batch of guidance_scale {job.guidance_scale}",
            family.batch(job.guidance_scale), job_document.place(["mesh", "dp"]),
        )
        machine.prepare(slice_)
    folder = request.out or _new_folder(request)
    save.make_folder(folder)
    return Journey(
        request, pack, card, job, card_document, job_document, family, folder, load.Checkpoint(Path(), "", {}),
        _settings(request, card, job), stopping,
    )


def _new_folder(request: Request) -> Path:
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = f"{request.model}-{Path(request.config).stem}-{now}"
    folder = Path("outputs") / name
    for number in range(2, 1000):
        if not folder.exists():
            break
        folder = Path("outputs") / f"{name}-{number}"
    return folder


def _settings(request: Request, card: Card, job: Job) -> pipelines.Settings:
    dtypes = {name: job.dtypes.get(name, component.dtype) for name, component in card.components.items()}
    return pipelines.Settings(
        prompt=request.prompt or "", negative_prompt=request.negative_prompt, seed=request.seed, height=job.height,
        width=job.width, frames=job.frames, steps=job.steps, guidance_scale=job.guidance_scale,
        dtypes={name: getattr(torch, dtype) for name, dtype in dtypes.items() if dtype}, vae_tiling=job.vae_tiling,
    )


def _patches(journey: Journey, stages: list[StageName]) -> list[Any]:
    """Returns the entries of some stages; for the original, only the plumbing that it cannot start without."""
    names = list(dict.fromkeys(name for stage in stages for name in journey.card.patches.get(stage, [])))
    entries = patch.read(journey.pack.patches, names)
    return [entry for entry in entries if entry.plumbing or journey.request.backend == "torchax"]


def _named(journey: Journey) -> str:
    """Returns the checkpoint's name: the flag's, else the config's, else the card's."""
    return journey.request.checkpoint or journey.job.checkpoint or journey.card.checkpoint


def _config(journey: Journey, component: str) -> dict[str, Any]:
    """Returns a component's configuration from the checkpoint on this machine; empty: the class's own, as published."""
    name = _named(journey)
    if name == "tiny":
        return dict(journey.card.tiny.components.get(component, {}))
    file = Path(name).expanduser() / component / "config.json"
    config = load.read_json(file) if load.is_folder(name) and file.is_file() else {}
    return {key: value for key, value in config.items() if not key.startswith("_")}


def _check_machine(journey: Journey, stages: list[pipelines.Stage]) -> None:
    """Refuses a job that this machine cannot carry; shapes alone are looked at."""
    job, card = journey.job, journey.card
    slice_ = machine.parse_machine(job.machine, job.machine)
    eager = journey.request.backend == "original"
    devices: dict[str, int] = {}
    host = [0]
    for stage in stages:
        host.append(sum(_parameters(journey, name) * _size(journey, name) for name in stage.parts))
        if stage.network and eager:
            host[-1] += _parameters(journey, stage.network) * _size(journey, stage.network)
        elif stage.network:
            devices[stage.network] = _device_bytes(journey, stage)
    machine.require(
        machine.Machine("cpu:1", "cpu", 1) if eager else slice_,
        machine.Need(1 if eager else job.devices, {} if eager else devices, max(host), _named(journey)),
        f'torchport run --model {card.model} --config configs/demo.yaml --prompt "..."',
    )


def _size(journey: Journey, component: str) -> int:
    dtype = journey.settings.dtypes.get(component)
    return dtype.itemsize if dtype else 0


def _parameters(journey: Journey, component: str) -> int:
    """Returns how many parameters a component has: the card's figure for the published one; small ones are not counted."""
    return 0 if _named(journey) == "tiny" else journey.card.components[component].parameters or 0


def _device_bytes(journey: Journey, stage: pipelines.Stage) -> int:
    assert stage.network is not None
    module = load.published(journey.card.components[stage.network].class_, _config(journey, stage.network))
    module = module.get_submodule(stage.submodule)
    shapes = shard.named_shapes(dict(module.named_parameters()))
    strategy = journey.card.strategies[journey.job.strategy]
    rules = [rule for rule in strategy.weights[stage.network] if any(shard.matches(rule, name) for name in shapes)]
    found = shard.match(rules, shapes, journey.job.mesh, _rules_place(journey, "weights", stage.network))
    dtype = str(journey.settings.dtypes[stage.network]).removeprefix("torch.")
    return shard.device_bytes(shapes, found, journey.job.mesh, dtype)


def _rules_place(journey: Journey, kind: str, component: str) -> str:
    return journey.card_document.place(["strategies", journey.job.strategy, kind, component])


def _checkpoint(journey: Journey) -> load.Checkpoint:
    name = _named(journey)
    if name == "tiny":
        folder = tiny.write(journey.card)
        return load.Checkpoint(folder, f"tiny:{folder.name}", load.digests(folder, journey.card))
    return load.locate(name, journey.card)


def _check_heads(journey: Journey, stages: list[pipelines.Stage]) -> None:
    """Refuses an axis that does not divide what the card says it splits: the heads."""
    if journey.request.backend == "original":
        return
    for axis, path in journey.card.strategies[journey.job.strategy].divides.items():
        component, _, key = path.partition(".")
        if any(stage.network == component for stage in stages):
            config = load.read_json(journey.checkpoint.folder / component / "config.json")
            place = journey.card_document.place(["strategies", journey.job.strategy, "divides", axis])
            if not isinstance(config.get(key), int):
                raise BadValueError(place, f"'{path}' is no number of the checkpoint's", nearest(key, config))
            shard.check_divides(
                axis, journey.job.mesh.get(axis, 1), path, config[key], journey.job_document.place(["mesh", axis])
            )


def _travel(journey: Journey, stage: pipelines.Stage) -> None:
    """Carries one stage down the path."""
    if journey.stopping.asked:
        raise _stopped(journey, f"before '{stage.name}'")
    start = time.perf_counter()
    inputs = _read_inputs(journey, stage)
    with patch.applied(_patches(journey, [stage.name]), stage=stage.name) as ledger:
        parts = _load(journey, stage)
        loaded = time.perf_counter()
        with compile.operators({op.target: op.function for op in ledger.ops()}):
            call = _network(journey, stage, parts, ledger)
            placed = time.perf_counter()
            outputs = stage.run(parts, call, journey.settings, _steps(journey, stage, ledger), **inputs)
        ledger.check_called()
        done = time.perf_counter()
        compiling = call.seconds if isinstance(call, compile.Compiled) else 0.0
        for verb, seconds in (
            ("load", loaded - start), ("shard", placed - loaded), ("compile", compiling), ("run", done - placed - compiling),
        ):
            journey.seconds[f"{stage.name} {verb}"] = seconds
        manifest = save.write(journey.folder, stage.name, outputs, _facts(journey, stage, ledger))
    save.remove(journey.folder, f"{stage.name}.partial")
    journey.shas[stage.name] = manifest.sha256
    if "frames" in outputs:
        frames = outputs["frames"][0]
        every = functools.partial(track, what="save video.mp4", unit="frame", total=len(frames))
        save.write_video(journey.folder / "video.mp4", frames, journey.job.fps, every)
        save.write_contact_sheet(journey.folder / "contact_sheet.png", frames)
    journey.seconds[f"{stage.name} save"] = time.perf_counter() - done


def _read_inputs(journey: Journey, stage: pipelines.Stage) -> dict[str, torch.Tensor]:
    """Returns the tensors of the stages that this one needs, verified."""
    inputs: dict[str, torch.Tensor] = {}
    for name in stage.needs:
        command = f"torchport run --model {journey.card.model} --config {journey.request.config} --stage {name}"
        tensors, manifest = save.read(
            journey.inputs, name, _identity(journey, name), journey.checkpoint.digests, command
        )
        if manifest is not None:
            save.check_lineage(journey.inputs, name, manifest)
            journey.shas[name] = manifest.sha256
            _check_prompts(journey, name, manifest)
        inputs |= tensors
    if stage.name == "denoise" and journey.request.noise is not None:
        inputs["noise"] = journey.request.noise
    return inputs


def _check_prompts(journey: Journey, name: str, manifest: save.Manifest) -> None:
    """Refuses a --prompt that is not the one whose artefact is read: it would have no effect."""
    prompt = journey.request.prompt
    if prompt is not None and manifest.settings.get("prompt", prompt) != prompt:
        raise ArtefactForeignError(
            str(journey.inputs / f"{name}.json"), f"'{name}' was made for the prompt {manifest.settings['prompt']!r}",
            f"Leave --prompt out, or run --stage encode with {prompt!r} first",
        )


def _identity(journey: Journey, name: str) -> dict[str, Any]:
    """Returns what a stage's artefact is made for, and must be read for."""
    settings = journey.settings
    identity: dict[str, Any] = {"model": journey.card.model}
    if name == "encode":
        return identity | {"guidance": journey.family.batch(settings.guidance_scale) > 1}
    return identity | {"height": settings.height, "width": settings.width, "frames": settings.frames}


def _load(journey: Journey, stage: pipelines.Stage) -> dict[str, Any]:
    """Returns the stage's parts: whole ones on the host, the network and what only lends its configuration on meta."""
    folder, parts = journey.checkpoint.folder, {}
    for name in stage.parts:
        component = journey.card.components[name]
        dtype = str(journey.settings.dtypes[name]).removeprefix("torch.") if component.dtype else None
        parts[name] = (
            load.text_encoder(component.class_, folder / name, dtype, name)
            if dtype
            else load.part(component.class_, folder / name)
        )
    for name in (*stage.meta, *([stage.network] if stage.network else [])):
        config = load.read_json(folder / name / "config.json")
        parts[name] = load.build(journey.card.components[name].class_, config, str(folder / name))
    if stage.prepare is not None:
        stage.prepare(parts, journey.settings)
    return parts


def _network(journey: Journey, stage: pipelines.Stage, parts: Mapping[str, Any], ledger: Any) -> Any:
    """Returns the stage's network, ready to be called: filled and eager, or placed and compiled."""
    if stage.network is None:
        return None
    name, folder = stage.network, journey.checkpoint.folder / stage.network
    dtype = str(journey.settings.dtypes[name]).removeprefix("torch.")
    module = parts[name].get_submodule(stage.submodule)
    if journey.request.backend == "original":
        load.fill(parts[name], folder, dtype, name)
        return compile.Eager(module)
    devices = machine.devices(machine.parse_machine(journey.job.machine, journey.job.machine))
    mesh = shard.make_mesh(journey.job.mesh, devices)
    strategy = journey.card.strategies[journey.job.strategy]
    own = dict(module.named_parameters()) | dict(module.named_buffers())
    rules = shard.match(
        strategy.weights[name], shard.named_shapes(own), journey.job.mesh, _rules_place(journey, "weights", name)
    )
    prefix = f"{stage.submodule}." if stage.submodule else ""
    tensors = (
        (key.removeprefix(prefix), tensor)
        for key, tensor in load.tensors(parts[name], folder, dtype, name)
        if key.startswith(prefix)
    )
    return compile.Compiled(
        module, shard.place(tensors, rules, mesh), strategy.inputs[name], mesh, what=name,
        place=_rules_place(journey, "inputs", name), precision=journey.card.components[name].precision,
        trace=None,
    )


def _steps(journey: Journey, stage: pipelines.Stage, ledger: Any) -> pipelines.Steps:
    """Returns the loop's progress, saving every few steps, and resuming."""
    total = journey.settings.steps

    def finished(number: int, state: Mapping[str, torch.Tensor]) -> None:
        journey.steps += bool(state)
        stop = journey.stopping.asked and number < total
        if state and number < total and (stop or number % journey.job.save_every == 0):
            facts = _facts(journey, stage, ledger)
            save.write(journey.folder, PARTIAL, state, {**facts, "settings": facts["settings"] | {"done": number}})
        if stop and state:
            raise _stopped(journey, f"after step {number} of {total}")

    every = functools.partial(track, what=stage.name, unit="step")
    return pipelines.Steps(every, finished, _resumable(journey, stage) if stage.name == "denoise" else None)


def _resumable(journey: Journey, stage: pipelines.Stage) -> tuple[int, dict[str, torch.Tensor]] | None:
    """Returns the steps that an earlier, stopped run of this very job finished, and its latents."""
    if not (journey.folder / f"{PARTIAL}.json").is_file():
        return None
    tensors, manifest = save.read(
        journey.folder, PARTIAL, _identity(journey, "denoise"), journey.checkpoint.digests, "removing both files"
    )
    assert manifest is not None
    wanted = _settings_shown(journey)
    for key, value in {**wanted, "backend": journey.request.backend}.items():
        found = manifest.backend if key == "backend" else manifest.settings.get(key)
        if found != value:
            raise ArtefactForeignError(
                str(journey.folder / f"{PARTIAL}.json"), f"A run with {key} {found!r} was stopped here; this one has {value!r}",
                f"Finish that one, or remove the two files {PARTIAL}.*, or choose another --out", key=key,
            )
    if manifest.inputs != _made_from(journey, stage):
        raise ArtefactForeignError(
            str(journey.folder / f"{PARTIAL}.json"), "The run that was stopped here had other embeddings",
            f"Remove the two files {PARTIAL}.*, or choose another --out",
        )
    done = int(manifest.settings["done"])
    log.info("resume after step %d of %d", done, journey.settings.steps)
    return done, tensors


def _stopped(journey: Journey, when: str) -> StoppedError:
    return StoppedError(
        "Ctrl-C", f"Stopped {when}; what was finished is in {journey.folder}",
        f"Go on with the same command and --out {journey.folder}",
    )


def _made_from(journey: Journey, stage: pipelines.Stage) -> dict[str, str]:
    return {name: journey.shas[name] for name in stage.needs if name in journey.shas}


def _settings_shown(journey: Journey) -> dict[str, Any]:
    """Returns the settings that decide a video, as the manifest keeps them."""
    settings = dataclasses.asdict(journey.settings)
    settings["dtypes"] = {name: str(dtype).removeprefix("torch.") for name, dtype in journey.settings.dtypes.items()}
    settings["precision"] = {name: c.precision for name, c in journey.card.components.items() if c.dtype}
    if journey.request.prompt is None:
        del settings["prompt"], settings["negative_prompt"]
    return settings


def _facts(journey: Journey, stage: pipelines.Stage, ledger: Any) -> dict[str, Any]:
    """Returns a manifest's facts about how this stage was run."""
    return {
        "stage": stage.name,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "identity": _identity(journey, stage.name),
        "checkpoint": journey.checkpoint.identity,
        "components": journey.checkpoint.digests,
        "inputs": _made_from(journey, stage),
        "settings": _settings_shown(journey),
        "config": journey.job.model_dump(),
        "backend": journey.request.backend,
        "patches": ledger.rows(),
        "versions": versions(),
        "seconds": {k: round(v, 3) for k, v in journey.seconds.items() if k.startswith(f"{stage.name} ")},
    }


def versions() -> dict[str, str]:
    """Returns the versions that decide a run's numbers."""
    names = ("torchport", "torch", "jax", "jaxlib", "libtpu", "torchax", "diffusers", "transformers", "numpy")
    found = {"python": platform.python_version()}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _arrive(journey: Journey) -> Summary:
    """Writes the run's own manifest, and returns the summary."""
    video = journey.folder / "video.mp4"
    made = journey.request.stage in ("decode", "all")
    stages = {}
    for name in STAGES:
        file = journey.folder / f"{name}.json"
        if file.is_file():
            stages[name] = save.read_manifest(file).model_dump()
    save.write_json(
        journey.folder / "manifest.json",
        {
            "schema_version": save.SCHEMA, "model": journey.card.model, "title": journey.card.title,
            "video": video.name if made else None, "stages": stages,
            "deviations": [
                row for stage in stages.values() for row in stage["patches"] if row["equivalence"] != "bitwise"
            ],
        },
    )
    return Summary(journey.folder, video if made else None, journey.seconds, journey.steps)


__all__ = ["Backend", "MeshError", "Request", "Summary", "run", "versions"]
