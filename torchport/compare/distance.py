"""How far one run is from another: in what made them, in their frames, and in their latents step by step."""

from __future__ import annotations

import dataclasses

import torch

from torchport import save
from torchport.compare import facts, similarity
from torchport.compare.facts import Difference
from torchport.compare.folder import Run
from torchport.errors import ArtefactForeignError
from torchport.progress import track


@dataclasses.dataclass(frozen=True)
class Frames:
    """How alike two videos are, as bytes before the codec.

    Attributes:
        psnr: Of the whole video, dB; infinite where no byte differs.
        worst_psnr: Of the frame in which it is least.
        worst_psnr_frame: That frame, from 1.
        ssim: The mean of all frames; None for frames under 11 x 11 pixels.
        worst_ssim: Of the frame in which it is least.
        worst_ssim_frame: That frame, from 1.
        greatest: The greatest difference of a byte.
    """

    psnr: float
    worst_psnr: float
    worst_psnr_frame: int
    ssim: float | None
    worst_ssim: float | None
    worst_ssim_frame: int | None
    greatest: int


@dataclasses.dataclass(frozen=True)
class Latents:
    """How alike two runs' latents are.

    Attributes:
        step: After how many steps; None for what `denoise` ends with.
        cosine: Of the angle between them.
        difference: max|a - b| / max|b|.
        same: Whether every byte is the same.
    """

    step: int | None
    cosine: float
    difference: float
    same: bool


@dataclasses.dataclass(frozen=True)
class Distance:
    """How far a run is from the first one.

    Attributes:
        run: The run.
        differences: The fields in which what made them differs.
        frames: Of their videos.
        same_frames: Whether every byte of those is the same.
        latents: After each step that both kept, and at last those that `denoise` ends with.
        unkept: Why the latents after some or all steps are not compared, and the remedy; "" where all are.
    """

    run: Run
    differences: list[Difference]
    frames: Frames
    same_frames: bool
    latents: list[Latents]
    unkept: str

    @property
    def same_latents(self) -> bool:
        """Whether every byte of all latents that are compared is the same."""
        return all(latents.same for latents in self.latents)

    @property
    def warning(self) -> str:
        """A warning, where frames differ and latents do not, or the other way round; "" where there is none."""
        if self.latents[-1].same and not self.same_frames:
            return "the latents are the same, and the frames differ: only the decodes differ"
        if self.same_frames and not self.latents[-1].same:
            return "the latents differ, and the frames are the same: the difference is too small for a byte"
        return ""


def distance(a: Run, b: Run) -> Distance:
    """Returns how far a run is from the first one.

    Raises:
        ArtefactForeignError: Their frames or latents have other shapes; or latents after a step are another run's.
        ArtefactBrokenError: A file of latents after a step is damaged.
    """
    _check_shape(b, "decode", "frames", b.frames, a.frames)
    _check_shape(b, "denoise", "latents", b.latents, a.latents)
    numbers, unkept = _steps(a, b)
    steps = [latents(number, a.latents_after(number), b.latents_after(number)) for number in numbers]
    return Distance(
        b,
        facts.differences(a.manifests, b.manifests),
        frames(a.frames, b.frames, str(b.folder)),
        similarity.is_same(a.frames, b.frames),
        [*steps, latents(None, a.latents, b.latents)],
        unkept,
    )


def _check_shape(run: Run, stage: str, name: str, theirs: torch.Tensor, ours: torch.Tensor) -> None:
    if theirs.shape != ours.shape:
        fact = f"Its '{name}' have the shape {list(theirs.shape)}, and those of the first run {list(ours.shape)}"
        remedy = "Compare runs of one model, one size and one number of frames"
        raise ArtefactForeignError(str(save.file_of(run.folder, stage)), fact, remedy, name=name)


def _steps(a: Run, b: Run) -> tuple[list[int], str]:
    """Returns the steps after which latents can be compared, and why the others cannot."""
    if a.total != b.total:
        return [], f"{a.folder} takes {a.total} steps, and {b.folder} {b.total}: only their last latents are compared"
    both = [number for number in a.steps if number in b.steps]
    lacking = [run for run in (a, b) if run.total is None or len(run.steps) < run.total]
    kept = (f"{run.folder} kept latents after {len(run.steps) or 'none'} of its {run.total} steps" for run in lacking)
    remedy = ". A run with --set keep_steps=true keeps them after each" if lacking else ""
    return both, ", and ".join(kept) + remedy


def latents(step: int | None, a: torch.Tensor, b: torch.Tensor) -> Latents:
    """Returns how alike latents are; see `Latents`."""
    return Latents(step, similarity.cosine(a, b), similarity.difference(a, b), similarity.is_same(a, b))


def frames(a_FCHW: torch.Tensor, b_FCHW: torch.Tensor, what: str) -> Frames:
    """Returns how alike two videos of bytes are; see `Frames`.

    Args:
        a_FCHW: The first one.
        b_FCHW: The other.
        what: What the other is, for the progress bar.
    """
    squares, ssims, greatest = [], [], 0
    for a, b in track(list(zip(a_FCHW, b_FCHW, strict=True)), f"compare {what}", "frame"):
        squares.append(similarity.mean_square(a, b))
        ssims.append(similarity.ssim(a, b))
        greatest = max(greatest, int((a.int() - b.int()).abs().max()))
    worst = max(range(len(squares)), key=squares.__getitem__)
    whole = similarity.psnr(sum(squares) / len(squares))
    known = [value for value in ssims if value is not None]
    least = min(range(len(known)), key=known.__getitem__, default=None)
    return Frames(
        psnr=whole,
        worst_psnr=similarity.psnr(squares[worst]),
        worst_psnr_frame=worst + 1,
        ssim=sum(known) / len(known) if known else None,
        worst_ssim=None if least is None else known[least],
        worst_ssim_frame=None if least is None else least + 1,
        greatest=greatest,
    )
