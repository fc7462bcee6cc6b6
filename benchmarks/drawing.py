"""What the benchmarks of the demo's pictures share: prompts, runs of the trained tiny weights, and rows of a table."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy
from PIL import Image

from torchport.run import series
from torchport.run.series import read_prompts
from torchport.task import Request
from torchport.verify import runs

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))  # also for those that import this module
from scenes.judge import judged
from scenes.scene import Frames, Scene, is_held_out, scenes

DEMOS = {
    "hunyuan": Request("hunyuan", "configs/demo.yaml", None),
    "cogvideox": Request("cogvideox", "configs/cogvideox_demo.yaml", None),
}
"""Demos with trained weights, by their card's name."""
DEMO = DEMOS["hunyuan"]


def trained(count: int) -> list[Scene]:
    """Returns scenes whose combination training has seen, spread evenly over all of them."""
    known = [scene for scene in scenes() if not is_held_out(scene)]
    return [known[number * len(known) // count] for number in range(count)]


def held_out() -> list[Scene]:
    """Returns the scenes whose combination training has not seen."""
    return [scene for scene in scenes() if is_held_out(scene)]


def drawn(request: Request, prompts: Sequence[str], out: Path, negatives: Sequence[str] | None = None) -> list[Frames]:
    """Returns the frames of prompts, [F, H, W, 3] each; those that OUT has from an earlier run are taken from there.

    Args:
        request: What all of them share.
        prompts: One for each video.
        out: The folder of their folders.
        negatives: A negative prompt for each, or none.
    """
    out.mkdir(parents=True, exist_ok=True)
    lines = [{"prompt": prompt, "negative": (negatives or [""] * len(prompts))[n]} for n, prompt in enumerate(prompts)]
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write("\n".join(json.dumps(line) for line in lines))
        file.flush()
        videos = series.accepted(dataclasses.replace(request, out=out), read_prompts(Path(file.name)))
    series.make(videos, out, together=len(videos))
    failed = [video.error for video in videos if video.error is not None]
    if failed:
        raise failed[0]
    return [runs.read(out / video.name).frames.permute(0, 2, 3, 1).numpy() for video in videos]


def score(frames: Sequence[Frames], asked: Sequence[Scene]) -> tuple[int, list[str]]:
    """Returns how many videos show what was asked, and what is wrong with the others."""
    wrong = []
    for video, scene in zip(frames, asked, strict=True):
        mistakes = judged(video).mistakes(scene)
        if mistakes:
            wrong.append(f"{scene.prompt}: {', '.join(mistakes)}")
    return len(asked) - len(wrong), wrong


def strip(rows: Sequence[Sequence[Frames]], file: Path, columns: int = 4) -> None:
    """Writes rows of videos as one picture: of each video, some frames side by side.

    Args:
        rows: Rows of videos.
        file: `*.jpg`.
        columns: Frames of each video.
    """
    lines = []
    for row in rows:
        shown = [video[numpy.linspace(0, len(video) - 1, columns).round().astype(int)] for video in row]
        gap = numpy.full((shown[0].shape[1], 4, 3), 128, numpy.uint8)
        lines.append(numpy.concatenate(list(_between([numpy.concatenate(list(each), 1) for each in shown], gap)), 1))
    between = numpy.full((4, lines[0].shape[1], 3), 128, numpy.uint8)
    Image.fromarray(numpy.concatenate(list(_between(lines, between)), 0)).save(file, quality=85)


def _between(pictures: Sequence[Frames], gap: Frames) -> Iterator[Frames]:
    yield from itertools.islice(itertools.chain.from_iterable((gap, each) for each in pictures), 1, None)
