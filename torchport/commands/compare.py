"""`torchport compare A B`: how far two runs are from each other, and how far rounding alone moves a run."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchport.commands import options, terminal
from torchport.errors import BadValueError
from torchport.progress import table

if TYPE_CHECKING:
    from torchport.verify.runs import Difference, Distance, FinishedRun, Latents

OTHER_MESH = "Run the job of A again on another mesh: --set mesh=..., with --out of its own"


@terminal.command("compare")
@click.argument("a", metavar="A", type=options.FILE)
@click.argument("b", metavar="B", type=options.FILE)
@click.option("--floor", type=options.FILE, metavar="DIR", help="A run of A's job on another mesh.")
@options.as_json
def command(a: Path, b: Path, floor: Path | None, as_json: bool) -> None:
    """Compares two runs by their output folders: frames before the codec, and latents step by step.

    The latents after each step are there if both runs had `keep_steps: true`. The differences of --floor from A are
    printed beside those of B: they are what rounding alone makes.
    """
    terminal.log_to_stderr()
    comparison = compare(a, b, floor)
    if as_json:
        terminal.say(json.dumps(data(comparison), indent=2, ensure_ascii=False))
    else:
        terminal.say(lines(comparison))


@dataclasses.dataclass(frozen=True)
class Comparison:
    a: FinishedRun
    b: Distance  #: How far B is from A.
    #: The distance from A of A's job on another mesh: rounding alone; None if no such run was named.
    floor: Distance | None = None

    @property
    def is_same(self) -> bool:
        """Whether every byte of the latents and frames of A and B is the same."""
        return self.b.same_frames and all(row.same for row in (*self.b.latents, *self.b.sound.values()))

    @property
    def other_video(self) -> list[Difference]:
        """The differences in settings that decide the content of a video, such as the prompt."""
        from torchport.verify import runs

        return [row for row in self.b.differences if row.key in runs.VIDEO_FIELDS]

    @property
    def distances(self) -> list[Distance]:
        """The distances from A: B's, and the floor's if there is one."""
        return [self.b] if self.floor is None else [self.b, self.floor]


def compare(a: Path, b: Path, floor: Path | None = None) -> Comparison:
    """Returns how far two runs are from each other, by their folders; raises if B or the floor is the folder of A."""
    from torchport.verify import runs

    for folder, place in ((b, str(b)), (floor, f"--floor {floor}")):
        if folder is not None and folder.resolve() == a.resolve():
            raise BadValueError(place, "It is the folder of the first run", "Name another run")
    first = runs.read(a)
    floor_run = None if floor is None else runs.read(floor)
    if floor_run is not None:
        _check_floor(first, floor_run)
    b_distance = runs.distance(first, runs.read(b))
    floor_distance = None if floor_run is None else runs.distance(first, floor_run)
    return Comparison(first, b_distance, floor_distance)


def _check_floor(a: FinishedRun, floor: FinishedRun) -> None:
    """Raises if the floor is a lossy run, or differs from A in nothing, or in more than fields that change rounding."""
    from torchport.verify import runs

    place = f"--floor {floor.folder}"
    lossy = runs.lossy(floor.manifests)
    if lossy is not None:
        fact = f"It was made with {lossy}, which is lossy: a floor shows rounding alone"
        raise BadValueError(place, fact, "Name a run without it, on another mesh than A")
    rows = runs.differences(a.manifests, floor.manifests)
    if not rows:
        raise BadValueError(place, "It is the job of A on the same mesh, which shows nothing of rounding", OTHER_MESH)
    for row in rows:
        if row.key not in runs.ROUNDING_FIELDS or runs.LOSSY_ATTENTION in (row.a, row.b):
            raise BadValueError(place, f"It is another job than A: {row.words()}", OTHER_MESH)


def data(comparison: Comparison) -> dict[str, Any]:
    """Returns a comparison as JSON data; numbers that are infinite or missing are null."""
    floor = comparison.floor
    return {
        "a": str(comparison.a.folder),
        "identical": comparison.is_same,
        "other_video": [row.field for row in comparison.other_video],
        "b": _distance_data(comparison.b),
        "floor": None if floor is None else _distance_data(floor),
    }


def _distance_data(distance: Distance) -> dict[str, Any]:
    """Returns how far a run is from A as JSON data; numbers that are infinite or missing are null."""
    from torchport.verify.report import finite

    return {
        "folder": str(distance.run.folder),
        "differences": [dataclasses.asdict(row) for row in distance.differences],
        "warning": distance.warning or None,
        "frames": {**finite(dataclasses.asdict(distance.frames)), "same": distance.same_frames},
        "latents": [finite(dataclasses.asdict(latents)) for latents in distance.latents],
        "unkept": distance.unkept or None,
        "sound": {name: finite(dataclasses.asdict(sound)) for name, sound in distance.sound.items()},
    }


def lines(comparison: Comparison) -> list[str]:
    """Returns the output of `torchport compare`: both folders, the differences, and tables of frames and latents."""
    other = comparison.other_video
    text = [f"A and B are two different videos: {'; '.join(row.words() for row in other)}"] if other else []
    text += [f"A      {comparison.a.folder}", f"B      {comparison.b.run.folder}"]
    if comparison.floor is not None:
        changed = "; ".join(row.words() for row in comparison.floor.differences)
        text.append(f"floor  {comparison.floor.run.folder}: the job of A but for {changed}")
    rows = [row for row in comparison.b.differences if row not in other]
    if rows:
        text += ["", "A and B differ:", *(f"  {row.words()}" for row in rows)]
    if comparison.b.warning:
        text.append(f"warning: {comparison.b.warning}")
    if comparison.is_same:
        text += ["", "identical: every byte of latents and frames"]
    if not comparison.is_same or comparison.floor is not None:
        text += ["", *_frame_lines(comparison), "", *_latent_lines(comparison)]
    return [*text, *dict.fromkeys(f"{row.unkept}." for row in comparison.distances if row.unkept)]


def _frame_lines(comparison: Comparison) -> list[str]:
    """Returns a table of how far B's frames are from A's, and those of the floor, A's job on another mesh."""
    count, _, height, width = comparison.a.frames.shape
    heads = [f"{count} frames of {height} x {width}, bytes before the codec"]
    heads += ["PSNR, dB", "PSNR of the worst frame", "SSIM", "SSIM of the worst frame", "greatest difference"]
    columns = [heads]
    for name, distance in zip(("B", "floor"), comparison.distances, strict=False):  # the floor may be absent
        frames = distance.frames
        psnr, worst_psnr = ("equal" if math.isinf(x) else f"{x:.2f}" for x in (frames.psnr, frames.worst_psnr))
        ssim, worst_ssim = ("-" if x is None else f"{x:.5f}" for x in (frames.ssim, frames.worst_ssim))
        if worst_psnr != "equal":
            worst_psnr += f" (frame {frames.worst_psnr_frame})"
        if worst_ssim != "-":
            worst_ssim += f" (frame {frames.worst_ssim_frame})"
        columns.append([name, psnr, worst_psnr, ssim, worst_ssim, f"{frames.greatest} of 255"])
    return table(list(zip(*columns, strict=True)), left=1)


def _latent_lines(comparison: Comparison) -> list[str]:
    """Returns the table of latents: a line for each step, with two columns for B and two for a floor that is given."""
    head = ["latents after step", "B: cosine", "max|a-b|/max|b|", "floor: cosine", "max|a-b|/max|b|"]
    by_distance: list[dict[str, Latents]] = []  # for B and the floor, the latents by the name of their row
    for distance in comparison.distances:
        by_row: dict[str, Latents] = {}
        for latents in distance.latents:
            by_row["last" if latents.step is None else str(latents.step)] = latents
        by_row |= {f"sound: {name}": latents for name, latents in distance.sound.items()}
        by_distance.append(by_row)
    rows = []
    for name in by_distance[0]:
        row = [name]
        for by_row in by_distance:
            found = by_row.get(name)
            row += ["-", "-"] if found is None else [f"{found.cosine:.8f}", f"{found.difference:.2e}"]
        rows.append(row)
    return table([head[: 1 + 2 * len(by_distance)], *rows], left=1)
