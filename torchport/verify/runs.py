"""Two finished runs, compared: their settings and versions, their frames, and their latents step by step."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchport import save
from torchport.config.card import DENOISING, STAGES, StageName
from torchport.errors import ArtefactForeignError, ArtefactMissingError
from torchport.progress import track
from torchport.save.manifest import Manifest, leaves
from torchport.stages.frames import pixels
from torchport.verify import yardstick

MADE_BY = "the command that made it"
"""How error messages name the command that makes an artefact again."""
ROUNDING_FIELDS = ("machine", "mesh", "strategy", "attention", "stacked")
"""Fields that change how numbers are rounded and nothing else; a run that serves as a floor differs in these alone."""
LOSSY_ATTENTION = "splash_int8"
"""The implementation of attention whose result is less exact by design, more than by rounding."""
VIDEO_FIELDS = ("model", "prompt", "negative_prompt", "seed", "image_digest", "noise")
"""Fields that say what a video shows: runs that differ in one of these make two videos."""
FIELDS_WITHOUT_EFFECT = ("fps", "image", "save_every", "keep_steps", "overrides")
"""Fields of a job and settings that no latents and no frames depend on. What an image holds is in `image_digest`."""
# Compared as a whole, and not key by key.
_WHOLE_FIELDS = ("mesh",)
_NOT_COPIED = ("settings", "config", "identity", "patches", "cache")  # read, but not under these names
# Fields that differ in each run of a job.
_FIELDS_OF_ONE_RUN = (
    "schema_version",
    "run",
    "stage",
    "created",
    "inputs",
    "programs",
    "seconds",
    "done",
    "tensors",
    "sha256",
)
_STATES_OF_NO_EFFECT = ("not needed", "displaced")
"""States of patches. All others depend on what was imported and traced earlier in the same process."""
_NAMES = {
    "card": "the card's {}",
    "code": "{}",
    "components": "the weights of {}",
    "dtypes": "the dtype of {}",
    "image_digest": "the image",
    "patches": "the patch {}",
    "precision": "the precision of {}",
    "versions": "the version of {}",
}


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """A finished run, read from its output folder."""

    folder: Path
    manifests: dict[StageName, Manifest]
    frames: torch.Tensor  #: The video before the codec: bytes [F, 3, height, width].
    #: The last latents of the `denoise` stage, of any shape and floating-point dtype.
    latents: torch.Tensor
    #: The stages whose files hold the latents after a step, by its number from 1.
    steps: dict[int, StageName]
    #: `latents`, the last ones of the sound, and `samples` [channels, samples]; empty for a video without sound.
    sound: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    @property
    def total(self) -> int | None:
        """How many denoising steps the run took; None if its manifest does not say it."""
        total: int | None = job(self.manifests["denoise"]).get("steps")
        return total

    def latents_after(self, number: int) -> torch.Tensor:
        """Returns the latents after a step, counted from 1; raises if their file was left there by another run."""
        stage = self.steps[number]
        name = save.step_name(stage, number)
        tensors, manifest = save.read(self.folder, name, identity={}, components={}, made_by=MADE_BY)
        assert manifest is not None  # hand-written ports have no such files
        origins = origin(self.manifests[stage]), origin(manifest)
        differing = [field for field in {**origins[0], **origins[1]} if origins[0].get(field) != origins[1].get(field)]
        if differing or manifest.done != number or "latents" not in tensors:
            words = _field_words(differing[0]) if differing else "the step"
            fact = f"It is not of the run that made {stage}.safetensors: {words} is another"
            remedy = "Finish the run that left it, or remove it"
            raise ArtefactForeignError(str(save.file_of(self.folder, name)), fact, remedy)
        return tensors["latents"]


def read(folder: Path) -> FinishedRun:
    """Returns the run in an output folder; raises if the folder has no latents or no frames."""
    if not folder.is_dir():
        raise ArtefactMissingError(str(folder), "There is no such folder", "Name the output folder of a run")
    if not save.file_of(folder, "denoise").is_file():
        fact = "It holds no denoise.safetensors, and so no run"
        raise ArtefactMissingError(str(folder), fact, "Name the folder that `torchport run --out` wrote to")
    if not save.file_of(folder, "decode").is_file():
        remedy = f"Run --stage decode with the flags of that run and --out {folder}"
        raise ArtefactMissingError(str(save.file_of(folder, "decode")), "The run has no frames", remedy)
    manifests = {
        stage: save.read_manifest(save.file_of(folder, stage), MADE_BY)
        for stage in STAGES
        if save.file_of(folder, stage).is_file()
    }
    for stage, manifest in manifests.items():
        save.check_lineage(folder, stage, manifest)
    denoising = [stage for stage in DENOISING if stage in manifests]
    steps = {number: stage for stage in denoising for number in save.step_numbers(folder, stage)}
    video = _tensor(folder, "decode", "frames")
    levels = video if video.dtype == torch.uint8 else pixels(video)[0]
    sound = {}
    if "sound" in manifests["decode"].tensors:
        sound = {"latents": _tensor(folder, "denoise", "sound_latents"), "samples": _tensor(folder, "decode", "sound")}
    latents = _tensor(folder, "denoise", "latents")
    return FinishedRun(folder, manifests, levels[0], latents, dict(sorted(steps.items())), sound)


def _tensor(folder: Path, stage: StageName, name: str) -> torch.Tensor:
    # Empty: it may be an artefact of any task and any checkpoint.
    tensors, _ = save.read(folder, stage, identity={}, components={}, made_by=MADE_BY)
    if name not in tensors:
        fact = f"It holds {', '.join(map(repr, sorted(tensors)))}, and no '{name}'"
        raise ArtefactForeignError(str(save.file_of(folder, stage)), fact, f"Only runs with '{name}' can be compared")
    return tensors[name]


@dataclasses.dataclass(frozen=True)
class Difference:
    """A field of the manifests in which two runs differ."""

    field: str  #: Its path: `mesh`, `dtypes.transformer`.
    a: Any
    b: Any
    #: The stages in which A and B differ; () if they differ in all stages that have the field.
    stages: tuple[StageName, ...] = ()

    @property
    def key(self) -> str:
        """The field's first name: `dtypes` of `dtypes.transformer`."""
        return self.field.partition(".")[0]

    def words(self) -> str:
        """Returns the difference as a person reads it: `mesh: tp=4 and dp=2 x tp=2`."""
        where = f" (in {' and '.join(self.stages)})" if self.stages else ""
        if self.key == "code":
            side = "A" if self.b is None else "B"
            fact = f"only {side} has it" if None in (self.a, self.b) else "its text is another"
            return f"{_field_words(self.field)}: {fact}{where}"
        a, b = self.a, self.b
        if isinstance(a, list) and isinstance(b, list):  # items of both are left out, unless only their order differs
            only_a, only_b = [item for item in a if item not in b], [item for item in b if item not in a]
            a, b = (only_a, only_b) if only_a or only_b else (a, b)
        return f"{_field_words(self.field)}: {_value_words(a)} and {_value_words(b)}{where}"


def differences(a: Mapping[StageName, Manifest], b: Mapping[StageName, Manifest]) -> list[Difference]:
    """Returns the fields that differ between two runs; stages with the same two values share a Difference."""
    pairs = {stage: _comparable(a[stage], b[stage]) for stage in a if stage in b}
    stage_counts = collections.Counter(field for first, second in pairs.values() for field in {**first, **second})
    rows: dict[tuple[str, str, str], Difference] = {}
    for stage, (first, second) in pairs.items():
        for field in {**first, **second}:
            in_a = first.get(field)
            in_b = second.get(field)
            if in_a != in_b:
                key = field, _value_words(in_a), _value_words(in_b)
                before = rows[key].stages if key in rows else ()
                rows[key] = Difference(field, in_a, in_b, (*before, stage))
    everywhere = {key for key, row in rows.items() if len(row.stages) == stage_counts[row.field]}
    return [dataclasses.replace(row, stages=()) if key in everywhere else row for key, row in rows.items()]


def _comparable(a: Manifest, b: Manifest) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the fields and patches of two runs, by dotted path.

    If only one run is of a port, hashes of code (`code.*`) that the other run lacks are left out: the original has
    fewer patches.
    """
    first, second = ({**job(run), **_patches(run)} for run in (a, b))
    if a.backend != b.backend:
        common = first.keys() & second.keys()
        for run in (first, second):
            for field in set(run) - common:
                if field.startswith("code."):
                    del run[field]
    return first, second


def origin(manifest: Manifest) -> dict[str, Any]:
    """Returns the fields that decide an artefact's bits: a run that resumes another must agree with it in these."""
    inputs = {str(stage): sha256 for stage, sha256 in manifest.inputs.items()}
    return job(manifest, {key: manifest.config.get(key) for key in ROUNDING_FIELDS}) | inputs


def job(manifest: Manifest, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns what made an artefact, by dotted path: `{"mesh": {...}, "dtypes.vae": "float32", ...}`; without patches.

    Also without `FIELDS_WITHOUT_EFFECT`, and without fields that change with every run of one job, as its seconds do.
    `config` are the fields of the job; None: those of the manifest.
    """
    if config is None:
        config = manifest.config
    row = manifest.model_dump()
    # A setting is the job's field as the run took it; the job's `dtypes` are only those that it changes.
    merged = {**config, **row["identity"], **row["settings"]}
    merged |= {key: value for key, value in row.items() if key not in (*_NOT_COPIED, *_FIELDS_OF_ONE_RUN)}
    return leaves({key: value for key, value in merged.items() if key not in FIELDS_WITHOUT_EFFECT}, _WHOLE_FIELDS)


def _patches(manifest: Manifest) -> dict[str, str]:
    """Returns each patch's promise, `{"patches.up.norm": "bitwise"}`; for a patch without effect, its state instead."""
    rows = {}
    for row in manifest.patches:
        promise = row.equivalence if isinstance(row.equivalence, str) else next(iter(row.equivalence))
        rows[f"patches.{row.id}"] = row.state if row.state in _STATES_OF_NO_EFFECT else promise
    return rows


def lossy(manifests: Mapping[StageName, Manifest]) -> str | None:
    """Returns the run's first lossy setting in words: a step cache, or int8 attention; None if it has none."""
    for manifest in manifests.values():
        if manifest.stage not in DENOISING or manifest.backend == "original":
            continue
        cache, attention = manifest.cache, manifest.config.get("attention")
        if cache is not None and len(cache.computed) < cache.steps:
            return f"the step cache '{cache.kind}'"
        if attention == LOSSY_ATTENTION:
            return f"attention '{attention}'"
    return None


def _field_words(field: str) -> str:
    """Returns a field's name for a person: `the dtype of vae` for `dtypes.vae`."""
    key, _, rest = field.partition(".")
    return _NAMES[key].format(rest) if key in _NAMES else field.replace("_", " ")


def _value_words(value: Any) -> str:
    """Returns a value as a person reads it: `dp=2 x tp=4`, `'A cat'`, `none`."""
    if isinstance(value, dict):
        return " x ".join(f"{key}={item}" for key, item in value.items()) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    return f"'{value}'" if isinstance(value, str) and (" " in value or not value) else str(value)


@dataclasses.dataclass(frozen=True)
class Frames:
    """How similar two videos are, as bytes before the video codec."""

    psnr: float  #: Of the whole video, dB; infinite where no byte differs.
    worst_psnr: float  #: The lowest PSNR of a frame.
    worst_psnr_frame: int  #: From 1.
    ssim: float | None  #: The mean of all frames; None for frames under 11 x 11 pixels.
    worst_ssim: float | None  #: The lowest SSIM of a frame.
    worst_ssim_frame: int | None  #: From 1.
    #: The greatest difference of two bytes.
    greatest: int


@dataclasses.dataclass(frozen=True)
class Latents:
    """How similar the latents of two runs are."""

    step: int | None  #: After how many steps; None for the last latents of `denoise`.
    cosine: float  #: The cosine similarity of the two runs' latents.
    difference: float  #: max|a - b| / max|b|.
    same: bool


@dataclasses.dataclass(frozen=True)
class Distance:
    """How far a run is from another one."""

    run: FinishedRun
    differences: list[Difference]
    frames: Frames
    same_frames: bool
    #: The latents after each step that both runs kept, and at last the last latents of `denoise`.
    latents: list[Latents]
    #: Why the latents after some or all steps are not compared, and the remedy; "" where all are.
    unkept: str
    #: The same figures of the sound's `latents` and `samples`; empty for videos without sound.
    sound: dict[str, Latents]

    @property
    def warning(self) -> str:
        """A warning, where frames differ and latents do not, or the other way round; "" where there is none."""
        if self.latents[-1].same and not self.same_frames:
            return "the latents are the same, and the frames differ: only the decodes differ"
        if self.same_frames and not self.latents[-1].same:
            return "the latents differ, and the frames are the same: the difference is too small for a byte"
        return ""


def distance(a: FinishedRun, b: FinishedRun) -> Distance:
    """Returns how far run B is from run A; raises if their frames or latents have different shapes."""
    _check_shape(b, "decode", "frames", b.frames, a.frames)
    _check_shape(b, "denoise", "latents", b.latents, a.latents)
    for name in {**a.sound, **b.sound}:
        sounds = [run.sound.get(name, torch.empty(0)) for run in (b, a)]
        _check_shape(b, "decode" if name == "samples" else "denoise", f"sound {name}", *sounds)
    numbers, unkept = _common_steps(a, b)
    steps = [_compare_latents(number, a.latents_after(number), b.latents_after(number)) for number in numbers]
    return Distance(
        run=b,
        differences=differences(a.manifests, b.manifests),
        frames=_compare_frames(a.frames, b.frames, str(b.folder)),
        same_frames=yardstick.is_same(a.frames, b.frames),
        latents=[*steps, _compare_latents(None, a.latents, b.latents)],
        unkept=unkept,
        sound={name: _compare_latents(None, sound, b.sound[name]) for name, sound in a.sound.items()},
    )


def _check_shape(run: FinishedRun, stage: str, name: str, tensor: torch.Tensor, first: torch.Tensor) -> None:
    if tensor.shape != first.shape:
        fact = f"Its '{name}' have the shape {list(tensor.shape)}, and those of the first run {list(first.shape)}"
        remedy = "Compare runs of one model, one size and one number of frames"
        raise ArtefactForeignError(str(save.file_of(run.folder, stage)), fact, remedy, name=name)


def _common_steps(a: FinishedRun, b: FinishedRun) -> tuple[list[int], str]:
    """Returns the steps after which latents can be compared, and why the others cannot; "" if all can."""
    if a.total != b.total:
        return [], f"{a.folder} takes {a.total} steps, and {b.folder} {b.total}: only their last latents are compared"
    both = [number for number in a.steps if number in b.steps]
    lacking = [run for run in (a, b) if run.total is None or len(run.steps) < run.total]
    kept = (f"{run.folder} kept latents after {len(run.steps) or 'none'} of its {run.total} steps" for run in lacking)
    remedy = ". A run with --set keep_steps=true keeps them after each" if lacking else ""
    return both, ", and ".join(kept) + remedy


def _compare_latents(step: int | None, a: torch.Tensor, b: torch.Tensor) -> Latents:
    """Returns how similar the latents of two runs are after a step; None for the last latents."""
    return Latents(step, yardstick.cosine(a, b), yardstick.difference(a, b), yardstick.is_same(a, b))


def _compare_frames(a_FCHW: torch.Tensor, b_FCHW: torch.Tensor, name: str) -> Frames:
    """Returns how similar two videos of bytes are; `name` is that of the second one in the progress bar."""
    squares, ssims, greatest = [], [], 0
    for a, b in track(list(zip(a_FCHW, b_FCHW, strict=True)), f"compare {name}", "frame"):
        squares.append(yardstick.mean_square(a, b))
        ssims.append(yardstick.ssim(a, b))
        greatest = max(greatest, int((a.int() - b.int()).abs().max()))
    worst = max(range(len(squares)), key=squares.__getitem__)
    total = yardstick.psnr(sum(squares) / len(squares))
    known = [value for value in ssims if value is not None]
    least = min(range(len(known)), key=known.__getitem__, default=None)
    return Frames(
        psnr=total,
        worst_psnr=yardstick.psnr(squares[worst]),
        worst_psnr_frame=worst + 1,
        ssim=sum(known) / len(known) if known else None,
        worst_ssim=None if least is None else known[least],
        worst_ssim_frame=None if least is None else least + 1,
        greatest=greatest,
    )
