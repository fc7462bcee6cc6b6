"""A request, and the task that it becomes once all that it names is read and checked."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from torchport import patch, save, shard
from torchport.config import Document, checkout
from torchport.config.card import DENOISING, RANDOM, Card, Job, StageName, check_job, check_names, is_tiny
from torchport.config.machine import Machine, parse_machine
from torchport.config.pack import Pack, find_pack
from torchport.errors import BadValueError, CheckpointMissingError, UnknownNameError, nearest
from torchport.files.folder import expand_home, has_file
from torchport.load import checkpoint
from torchport.load.lora import check_format, config_beside
from torchport.patch.declared.replacement import file_of
from torchport.patch.ledger import entry_digest
from torchport.stages import family as families
from torchport.stages import picture
from torchport.task.execution import COMPILED, check
from torchport.task.execution import Execution as Execution
from torchport.task.family_file import family as load_family

Backend = Literal["torchax", "original"]
DEFAULT_SEED = 42


@dataclasses.dataclass(frozen=True)
class Request:
    """A request to run stages of a model, from the command line or from Python; nothing in it is checked yet."""

    model: str  #: The name of a model card.
    config: str  #: The name or the file of a job.
    #: The text that the video is to show; may be left out where no prompt is encoded.
    prompt: str | None = None
    negative_prompt: str | None = None
    seed: int | None = None  #: Of the noise; by default 42.
    #: A folder, `repo@revision`, `tiny` or `tiny:random`; by default the config's, else the card's.
    checkpoint: str | None = None
    #: The output folder; by default a new one under `outputs/`.
    out: Path | None = None
    #: Where earlier stages' artefacts are read; by default `out`.
    inputs: Path | None = None
    stage: str = "all"  #: One stage, or `all`.
    #: `torchax`, or `original`: upstream, eager, in PyTorch.
    backend: Backend = "torchax"
    overrides: tuple[str, ...] = ()  #: Of fields of the job, by `--set`: `("steps=4",)`.
    #: Folders with `patches/` or `configs/`, the highest first; the shipped one lies under them.
    paths: tuple[str, ...] = ()
    #: The latents to start from, [1, C, T, H, W]; by default drawn from the seed.
    noise: torch.Tensor | None = None
    image: Path | None = None  #: A file with the first frame, or the video to edit.
    #: The checkout of an upstream that is no installed package.
    upstream_path: str | None = None
    #: Whether JAX keeps compiled programs on disk, and loads them again.
    cache: bool = True
    execution: Execution = COMPILED


@dataclasses.dataclass(frozen=True)
class Task:
    """A request, with the card, job, family and other files that it names, read and checked."""

    request: Request
    pack: Pack
    card: Card
    job: Job
    card_document: Document
    job_document: Document
    machine: Machine
    family: ModuleType
    settings: families.Settings
    folder: Path
    upstream: Path | None
    #: Components as shapes, each built once; see `network.outline`.
    shapes: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    without: frozenset[str] = frozenset()  #: The ids of patches that are left out, to find a patch at fault.

    @property
    def original(self) -> bool:
        """Whether upstream's networks run in eager PyTorch, and none is compiled."""
        return self.request.backend == "original"

    @property
    def inputs(self) -> Path:
        """The folder in which earlier stages' artefacts are read."""
        return self.request.inputs or self.folder

    @property
    def stages(self) -> list[families.Stage]:
        """The family's stages that the request asks for, in order."""
        return [stage for stage in self.family.STAGES if self.request.stage in (stage.name, "all")]

    @property
    def denoising(self) -> list[families.Stage]:
        """The family's stages that take denoising steps, in order; the first of them begins with the noise."""
        return [stage for stage in self.family.STAGES if stage.name in DENOISING]

    @property
    def checkpoint(self) -> str:
        """The checkpoint's name: the flag's, else the config's, else the card's."""
        return self.request.checkpoint or self.job.checkpoint or self.card.checkpoint

    @property
    def is_tiny(self) -> bool:
        """Whether the checkpoint is the card's tiny checkpoint."""
        return is_tiny(self.checkpoint)

    @property
    def result(self) -> Path:
        """The file that a whole run makes: a video, or a picture."""
        return self.folder / (save.PICTURE if self.card.makes_pictures else save.VIDEO)

    def patches(self, stages: Sequence[families.Stage]) -> list[patch.Entry]:
        """Returns the patches of some stages but those in `without`; a compiled network has torchax's among them.

        For the original, these are only the patches without which upstream cannot start: plumbing, and the patches that
        the card lists under `original`.
        """
        names: list[str] = []
        for stage in stages:
            if stage.network is not None and not self.original:
                names.append("torchax")
            if self.encodes_on_devices(stage):
                names += ["torchax", "torch/attention"]
            names += self.card.patch_names(stage.name, self.job.implementations)
        home = self.pack.home(self.card.model).patches
        entries = patch.read(self.pack.folders, list(dict.fromkeys(names)), home)
        entries = [entry for entry in entries if entry.id not in self.without]
        if not self.original:
            return entries
        needed = {entry.id for entry in patch.read(self.pack.folders, self.card.original, home)}
        return [entry for entry in entries if entry.plumbing or entry.id in needed]

    def encodes_on_devices(self, stage: families.Stage) -> bool:
        """Returns whether a stage's text encoders are compiled for the devices; by default they run on the host."""
        return stage.name == "encode" and self.job.encode == "devices" and not self.original

    def noise(self, stage: families.Stage) -> dict[str, torch.Tensor]:
        """Returns the caller's noise as an input of the first stage with steps, `{"noise": tensor}`; else {}."""
        noise = self.request.noise
        return {} if noise is None or stage.name != self.denoising[0].name else {"noise": noise}

    def component_folder(self, weights: Path, component: str) -> Path:
        """Returns the folder of a component in the folder of a checkpoint: `weights / "transformer"`."""
        return weights / self.card.folder(component, self.settings.variant)

    def dtype(self, component: str) -> str:
        """Returns the name of a component's dtype: `"bfloat16"`."""
        return str(self.settings.dtypes[component]).removeprefix("torch.")

    def identity(self, stage: StageName) -> dict[str, Any]:
        """Returns the fields in which the run that makes a stage's artefact and the run that reads it must agree:
        `{"model": "NAME", "height": 480, ...}`.
        """
        identity: dict[str, Any] = {"model": self.card.artefacts}
        if stage == "encode":
            return identity | {"guidance": self.settings.guidance_scale != 1.0}
        # Arguments of the pipeline's `__call__`: a stage of diffusers replays its call on an earlier stage's latents.
        if self.card.call is not None and stage != "encode_image":
            identity["call"] = {**self.card.call.constants, **self.settings.call}
        if stage == "denoise_first":  # `denoise` takes the remaining steps of the same loop
            identity |= {"steps": self.settings.steps, "guidance_scale": self.settings.guidance_scale}
            identity |= {"lora": self.loras, "scheduler": self.settings.scheduler}
        return identity | {key: getattr(self.settings, key) for key in ("height", "width", "frames")}

    @functools.cached_property
    def loras(self) -> list[dict[str, Any]]:
        """The job's LoRA files as rows of a manifest. Checksums tell whether two runs had the same files."""
        rows: list[dict[str, Any]] = []
        for lora in self.job.lora:
            file = expand_home(lora.path)
            row = {"file": file.name, "sha256": _sha256(file), "scale": lora.scale, "component": lora.component}
            config = config_beside(file)
            rows.append({**row, "config": _sha256(config)} if config else row)
        return rows

    @functools.cached_property
    def image_digest(self) -> str:
        """The first 16 digits of the SHA-256 of the image's file."""
        assert self.settings.image is not None
        return hashlib.sha256(self.settings.image.read_bytes()).hexdigest()[:16]

    def manifest_settings(self, stage: families.Stage) -> dict[str, Any]:
        """Returns the settings that a stage uses, for its manifest, with checksums of image, LoRA files and noise."""
        settings = dataclasses.asdict(self.settings)
        settings["image"] = str(self.settings.image) if self.settings.image else None
        settings["dtypes"] = {name: self.dtype(name) for name in self.settings.dtypes}
        row = {key: settings[key] for key in stage.uses}
        if "dtypes" in row:
            row["precision"] = {name: self.card.components[name].precision for name in self.settings.dtypes}
        if "image" in row and self.settings.image is not None:
            row["image_digest"] = self.image_digest
        if stage.name in DENOISING:
            row["lora"] = self.loras
        if stage.name == "encode":
            row["encode"] = self.job.encode
        if "seed" in row:
            row["noise"] = None  # it is drawn from the seed
            if self.request.noise is not None:
                raw = self.request.noise.detach().to(torch.float32).contiguous().numpy().tobytes()
                row["noise"] = hashlib.sha256(raw).hexdigest()[:16]
        return row

    def code(self, stage: families.Stage) -> dict[str, dict[str, Any]]:
        """Returns a manifest's fields `card` and `code`: the card's content, and checksums of the family's files and of
        a stage's patches by file name.
        """
        digests = {file: _sha256(file)[:16] for file in self.card.python_files(Path(str(self.family.__file__)))}
        for entry in self.patches([stage]):
            file = Path(entry.place.rpartition(":")[0])
            digests[file.with_name(f"{file.name}: {entry.id}")] = entry_digest(entry)  # a row of its own, like a file's
            if entry.reference is not None:
                digests[file_of(entry, entry.reference)] = _sha256(file_of(entry, entry.reference))[:16]
        code: dict[str, str] = {}
        for file, digest in digests.items():
            name = "/".join(file.parts[-3:])
            code[name] = code.get(name, "") + digest  # two packs may have files of the same name
        return {"card": self.card.model_dump(mode="json", exclude_defaults=True), "code": code}

    def flag_settings(self) -> dict[str, Any]:
        """Returns the settings that the user has set by flags, such as `--seed` or `--set steps=4`, by name."""
        keys = {override.partition("=")[0].split(".")[0].strip() for override in self.request.overrides}
        settings = {key: getattr(self.settings, key) for key in keys - {"dtypes"} if hasattr(self.settings, key)}
        flags = {key: getattr(self.request, key) for key in ("prompt", "negative_prompt", "seed")}
        flags["image"] = None if self.request.image is None else str(self.request.image)
        flags["lora"] = self.loras if "lora" in keys else None
        return settings | {key: value for key, value in flags.items() if value is not None}

    def command(self, stage: StageName, folder: Path) -> str:
        """Returns the command line that makes the artefact of a stage in a folder, for remedies."""
        request = self.request
        words = ["torchport", "run", "--model", self.card.model, "--config", request.config, "--stage", stage]
        if stage == "encode":
            words += ["--prompt", request.prompt or "..."]
        if self.family.TAKES_IMAGE == families.ALWAYS and stage in families.with_image(self.family.STAGES):
            words += ["--image", "FILE"]
        flags = {"--checkpoint": request.checkpoint, "--upstream-path": request.upstream_path}
        for flag, value in (*flags.items(), *(("--path", path) for path in request.paths)):
            if value is not None:
                words += [flag, value]
        if self.original:
            words += ["--backend", "original"]
        for override in request.overrides:
            words += ["--set", override]
        return shlex.join([*words, "--out", str(folder)])

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns how `pickle` restores the task elsewhere: its family, a module, is loaded; `shapes` is empty."""
        names = [field.name for field in dataclasses.fields(self) if field.name not in ("family", "shapes")]
        fields = {name: getattr(self, name) for name in names}
        return _with_family, (fields,)


def _with_family(fields: dict[str, Any]) -> Task:
    """Returns the task with these fields, after loading its family: the reverse of `Task.__reduce__`."""
    card = fields["card"]
    document = fields["card_document"]
    return Task(**fields, family=load_family(fields["pack"], card, document))


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def accept(request: Request, dry: bool = False, reads_picture: bool = True) -> Task:
    """Returns the task of a request, after reading and checking card, job, family and files that the request names.

    Args:
        dry: Whether the task is not to be run, so that prompt, image and LoRA files may be missing.
        reads_picture: Whether the image is read, to check its file. A series reads the images of its videos itself.
    """
    pack = find_pack(request.paths)
    card, card_document = pack.card(request.model)
    job, job_document = pack.job(request.config, request.overrides, card)
    _check_request(request, card, dry)
    check_job(job, card, job_document, pack.cards())
    job_as_read = job
    job = shard.with_mesh(job, card.strategies[job.strategy], job_document)
    machine = parse_machine(job.machine, job_document.place(["machine"]))
    family = load_family(pack, card, card_document)
    _check_stage(request, family)
    _check_components(card, job, family, job_document)
    stages = [stage for stage in family.STAGES if request.stage in (stage.name, "all")]
    check(request.execution, stages, original=request.backend == "original", job=job, machine=machine)
    check_step_cache(card, job, stages, original=request.backend == "original", document=job_document)
    check_names(card, {stage.network for stage in family.STAGES if stage.network}, card_document)
    if request.backend == "torchax":
        # A mesh that the job takes from its strategy is wrong on the strategy's line.
        mesh_place = job_document.place(["mesh" if job is job_as_read else "strategy"])
        shard.check_mesh(job.mesh, machine.devices, job.machine, mesh_place)
        shard.check_divides(
            "dp",
            job.mesh.get("dp", 1),
            f"the batch of guidance_scale {job.guidance_scale}",
            family.batch(job.guidance_scale),
            job_document.place(["mesh", "dp"]),
        )
        networks = [stage.network for stage in stages if stage.network]
        shard.check_axes(card.strategies[job.strategy], networks, job, job_document)
    if not dry:
        _check_lora_files(job, request.stage, request.overrides, job_document)
    weights = request.checkpoint or job.checkpoint or card.checkpoint
    checkpoint.check_name(weights)
    if weights == RANDOM:
        card = card.with_trained({})
    published = checkpoint.as_published(card, weights)
    if published is not card:
        card, family = published, load_family(pack, published, card_document)
    upstream = checkout.find(card.checkout, request.upstream_path)
    _check_image(request, family, dry, reads_picture, job.frames if card.edits else None)
    if request.backend == "torchax":
        check_tiling(card, job, stages, job_document)
    _check_variant(request, card, job, family, job_document if job.variant else card_document)
    folder, settings = request.out or _new_folder(request), _settings(request, card, job)
    return Task(request, pack, card, job, card_document, job_document, machine, family, settings, folder, upstream)


def accept_like(task: Task, request: Request) -> Task:
    """Returns the task of a request that differs from the request of `task` in prompts, seed, image and folder alone.
    Card, job and family are those of `task`. The image is not read: a series reads its images itself.
    """
    _check_request(request, task.card, dry=False)
    frames = task.job.frames if task.card.edits else None
    _check_image(request, task.family, dry=False, reads_picture=False, frames=frames)
    folder, settings = request.out or _new_folder(request), _settings(request, task.card, task.job)
    return dataclasses.replace(task, request=request, settings=settings, folder=folder)


def encoder_names(card: Card, stage: families.Stage) -> list[str]:
    """Returns the components that encode the prompt in a stage: its parts with weights, without the VAE."""
    return [name for name in stage.parts if card.components[name].dtype is not None and name != "vae"]


def _check_stage(request: Request, family: ModuleType) -> None:
    """Refuses a stage that the family lacks, and noise for a stage that begins with an earlier stage's latents."""
    names = [*(stage.name for stage in family.STAGES), "all"]
    if request.stage not in names:
        raise UnknownNameError(f"--stage {request.stage}", "There is no such stage", nearest(request.stage, names))
    denoising = [name for name in names if name in DENOISING]
    if request.noise is not None and request.stage in denoising[1:]:
        fact = f"'{request.stage}' goes on from what '{denoising[0]}' left, and takes no noise"
        raise BadValueError("noise", fact, f"Give it to the stage '{denoising[0]}'")


def _check_request(request: Request, card: Card, dry: bool) -> None:
    """Refuses a request without a prompt for `encode`, with text that is not Unicode, or with a flag without effect."""
    if request.prompt is None and request.stage in ("encode", "all") and not dry:
        raise BadValueError("--prompt", "It is missing, and the stage 'encode' needs one", 'Add --prompt "..."')
    for flag, text in (("--prompt", request.prompt), ("--negative-prompt", request.negative_prompt)):
        try:
            (text or "").encode("utf-8")
        except UnicodeEncodeError as error:
            fact = f"Character {error.start + 1} is not Unicode text"
            raise BadValueError(flag, fact, "Write it as UTF-8") from error
    if request.checkpoint == "":
        raise BadValueError("--checkpoint ''", "It is empty", "Write a value, or leave the flag out")
    if request.out is not None and request.out == Path():
        raise BadValueError("--out", "It is empty, or the current folder", "Name a folder of its own")
    if request.stage == "all" and request.inputs is not None:
        fact = "All stages are run here, and none is read"
        raise BadValueError(f"--inputs {request.inputs}", fact, "Leave it out, or name a --stage")
    if request.negative_prompt and card.call is not None and not card.call.takes_negative:
        fact = f"'{card.model}' takes none"
        raise BadValueError(f"--negative-prompt {request.negative_prompt}", fact, "Leave it out")


def _check_components(card: Card, job: Job, family: ModuleType, document: Document) -> None:
    """Refuses a LoRA of a component that takes no steps, and `encode: devices` for encoders that the family loads."""
    names = [str(stage.network) for stage in family.STAGES if stage.name in DENOISING]
    for number, lora in enumerate(job.lora):
        if lora.component not in names:
            fact = f"'{card.model}' takes no steps with a network '{lora.component}'"
            place = document.place(["lora", number, "component"])
            raise UnknownNameError(place, fact, nearest(lora.component, names), name=lora.component)
    encoding = [stage for stage in family.STAGES if stage.name == "encode"]
    if job.encode == "devices" and not any(encoder_names(card, stage) for stage in encoding):
        fact = f"The family of '{card.model}' loads its encoders itself, for the host"
        raise BadValueError(document.place(["encode"]), fact, "Write 'encode: host', or leave it out")


def _check_lora_files(job: Job, stage: str, overrides: Sequence[str], document: Document) -> None:
    """Refuses a LoRA file that is missing, or that is a pickle.

    A stage without denoising steps reads LoRA files only if `--set lora=` names them, to compare their checksums with
    those of the steps. `torchport plan` works without the files.
    """
    if stage not in (*DENOISING, "all") and not any(flag.startswith("lora") for flag in overrides):
        return
    for number, lora in enumerate(job.lora):
        place, file = document.place(["lora", number, "path"]), expand_home(lora.path)
        if not has_file(file):
            raise CheckpointMissingError(place, f"There is no file '{lora.path}'", "Name a LoRA in safetensors")
        check_format(file)


def check_step_cache(
    card: Card, job: Job, stages: Sequence[families.Stage], original: bool, document: Document
) -> None:
    """Refuses the job's step cache if a denoising loop among the stages cannot have a step cache."""
    loops = [stage for stage in stages if stage.name in DENOISING]
    if job.cache is None or not loops:
        return
    place = document.place(["cache"])
    if original:
        fact = "'cache' is for compiled programs, and --backend original computes every step in PyTorch"
        raise BadValueError(place, fact, "Remove it, --set cache=null, or leave out --backend original")
    for stage in loops:
        if stage.outputs:
            fact = f"'{stage.network}' returns {', '.join(stage.outputs)}, and a step cache is for one output"
            raise BadValueError(place, fact, "Remove it, or --set cache=null")
        if not card.stacks.get(str(stage.network)):
            fact = (
                f"A step cache reuses what stacked blocks compute, and the card '{card.model}' names none of "
                f"'{stage.network}'"
            )
            raise BadValueError(place, fact, "Name them in the card's 'stacks' (docs/cards.md), or --set cache=null")


def _check_image(
    request: Request, family: ModuleType, dry: bool, reads_picture: bool, frames: int | None = None
) -> None:
    """Refuses a missing image if the model needs an image, and an image that the model does not take or that cannot be
    read; see `accept`. `frames` is how many are read of a video that a model edits; None for a picture.
    """
    kind = "picture" if frames is None else "video"
    is_read = request.stage in (*families.with_image(family.STAGES), "all")
    if request.image is None:
        if family.TAKES_IMAGE == families.ALWAYS and is_read and not dry:
            fact = f"It is missing, and '{request.model}' begins with {'an image' if frames is None else 'a video'}"
            raise BadValueError("--image", fact, "Add --image FILE")
        return
    if not family.TAKES_IMAGE:
        fact = f"'{request.model}' begins with text alone"
        raise BadValueError(f"--image {request.image}", fact, "Leave the flag out")
    if not request.image.is_file():
        raise BadValueError(f"--image {request.image}", "There is no such file", f"Name a {kind}")
    if reads_picture:
        picture.read(request.image, frames)  # raises if it cannot be read


def check_tiling(card: Card, job: Job, stages: Sequence[families.Stage], document: Document) -> None:
    """Raises if `vae_tiling` is set and a stage compiles the VAE: that decodes the whole video, split over the mesh."""
    if card.call is None or not job.vae_tiling:
        return
    if any(stage.network == "vae" and "vae_tiling" in stage.uses for stage in stages):
        fact = f"'vae_tiling' is true, and the VAE of '{card.model}' is compiled whole and split over the mesh"
        raise BadValueError(document.place(["vae_tiling"]), fact, "Leave it out: --backend original decodes in tiles")


def _check_variant(request: Request, card: Card, job: Job, family: ModuleType, document: Document) -> None:
    """Refuses a variant that the family lacks, or that is for t2v or i2v alone; upstream would notice that late."""
    variant = job.variant or card.variant
    place = document.place(["variant"])
    if variant is None:
        return
    if variant not in family.VARIANTS:
        raise UnknownNameError(place, f"'{card.model}' has no variant '{variant}'", nearest(variant, family.VARIANTS))
    made_for, task = family.task(variant), "t2v" if request.image is None else "i2v"
    if request.stage in ("encode", "all") and made_for != task:
        remedy = "Add --image FILE" if task == "t2v" else "Leave --image out"
        other = f"--set variant={variant.replace(made_for, task)}"
        raise BadValueError(place, f"'{variant}' is made for {made_for}, and this is {task}", f"{remedy}, or {other}")


def _new_folder(request: Request) -> Path:
    """Returns the path of a new folder under `outputs/`, named by model, config and time; the folder is not made."""
    moment = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    config = Path(request.config).stem.encode()[:100].decode(errors="ignore")  # a name has 255 bytes at most
    stem = Path("outputs") / f"{request.model}-{config}-{moment}"
    folder, number = stem, 1
    while folder.exists():
        number += 1
        folder = Path(f"{stem}-{number}")
    return folder


def _settings(request: Request, card: Card, job: Job) -> families.Settings:
    """Returns the settings that a family's functions get, from the flags, the config and the card."""
    dtypes = {name: job.dtypes.get(name, component.dtype) for name, component in card.components.items()}
    return families.Settings(
        prompt=request.prompt or "",
        negative_prompt=request.negative_prompt or "",
        seed=DEFAULT_SEED if request.seed is None else request.seed,
        height=job.height,
        width=job.width,
        frames=job.frames,
        frame_rate=job.fps,
        steps=job.steps,
        guidance_scale=job.guidance_scale,
        dtypes={name: getattr(torch, dtype) for name, dtype in dtypes.items() if dtype},
        vae_tiling=job.vae_tiling,
        text_bucket=job.text_bucket,
        variant=job.variant or card.variant,
        image=request.image,
        call=job.call,
        guider=job.guider,
        scheduler=job.scheduler,
    )
