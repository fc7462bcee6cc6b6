"""A judge of frames: it finds the coloured blob, and says its shape, its colour, its motion and what is behind it.

It knows the scenes' shapes and colours, and no network. Noise has no blob that overlaps a shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy

from scenes.scene import BACKGROUNDS, COLOURS, DIRECTIONS, SHAPES, Floats, Frames, Scene, coverage

_SATURATED = 70
"""A pixel is coloured when its largest channel is that much above its smallest, in steps of 8 bits."""
_SMALLEST = 150
"""A blob has that many pixels at least."""
_OVERLAP = 0.7
"""The least intersection over union with the best shape."""
_MOTION = 16.0
"""The least way from the first frame to the last, in pixels."""
_APART = 90.0
"""The largest distance of a mean colour from one with a name, in steps of 8 bits."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the judge sees. None where it is nothing that has a name."""

    shape: str | None
    colour: str | None
    direction: str | None
    background: str | None
    overlap: float
    """The intersection over union with the best shape; the mean over the frames that show it whole."""

    def agrees(self, scene: Scene) -> bool:
        """Returns whether that is the scene."""
        return not self.mistakes(scene)

    def mistakes(self, scene: Scene) -> list[str]:
        """Returns what is not as in the scene, `shape: square`."""
        names = ("shape", "colour", "direction", "background")
        return [f"{name}: {getattr(self, name)}" for name in names if getattr(self, name) != getattr(scene, name)]

    def __str__(self) -> str:
        """Returns it in words."""
        return f"{self.colour} {self.shape}, {self.direction}, on {self.background}, overlap {self.overlap:.2f}"


def judged(frames: Frames) -> Verdict:
    """Returns what frames show.

    Args:
        frames: [F, H, W, 3].
    """
    masks = [_blob(frame) for frame in frames]
    seen = [number for number, mask in enumerate(masks) if mask.sum() >= _SMALLEST]
    background = _background(frames, masks)
    if len(seen) < 2:
        return Verdict(None, None, None, background, 0.0)
    shape, overlap = _shape([masks[number] for number in seen])
    colour = _colour(numpy.concatenate([frames[number][masks[number]] for number in seen]))
    centres = [_centre(masks[number]) for number in (seen[0], seen[-1])]
    return Verdict(shape, colour, _direction(centres[0], centres[1]), background, overlap)


def _blob(frame: Frames) -> numpy.typing.NDArray[numpy.bool_]:
    wide = frame.astype(numpy.int16)
    mask: numpy.typing.NDArray[numpy.bool_] = wide.max(-1) - wide.min(-1) > _SATURATED
    return mask


def _background(frames: Frames, masks: Sequence[numpy.typing.NDArray[numpy.bool_]]) -> str | None:
    outside = frames[~numpy.stack(masks)]
    if not outside.size:
        return None
    grey = float(numpy.median(outside.mean(-1)))
    name, level = min(BACKGROUNDS.items(), key=lambda item: abs(item[1] - grey))
    return name if abs(level - grey) < _APART else None


def _centre(mask: numpy.typing.NDArray[numpy.bool_]) -> tuple[float, float]:
    rows, columns = numpy.nonzero(mask)
    return float(columns.mean()) + 0.5, float(rows.mean()) + 0.5


def _shape(masks: Sequence[numpy.typing.NDArray[numpy.bool_]]) -> tuple[str | None, float]:
    """Returns the shape that overlaps most, and how much, over the frames where the blob touches no border."""
    whole = [mask for mask in masks if not (mask[[0, -1]].any() or mask[:, [0, -1]].any())]
    overlaps = {
        shape: [_overlap(mask, coverage(shape, *_centre(mask), (mask.shape[0], mask.shape[1]))) for mask in whole]
        for shape in SHAPES
    }
    means = {shape: float(numpy.mean(values)) if values else 0.0 for shape, values in overlaps.items()}
    best, overlap = max(means.items(), key=lambda item: item[1])
    return (best if overlap >= _OVERLAP else None), overlap


def _overlap(mask: numpy.typing.NDArray[numpy.bool_], covered: Floats) -> float:
    ideal = covered > 0.5
    return float((mask & ideal).sum() / (mask | ideal).sum())


def _colour(pixels: Frames) -> str | None:
    mean = pixels.mean(0)
    name, distance = min(
        ((name, float(numpy.linalg.norm(mean - numpy.array(value)))) for name, value in COLOURS.items()),
        key=lambda item: item[1],
    )
    return name if distance < _APART else None


def _direction(first: tuple[float, float], last: tuple[float, float]) -> str | None:
    dx, dy = last[0] - first[0], last[1] - first[1]
    if max(abs(dx), abs(dy)) < _MOTION or min(abs(dx), abs(dy)) > max(abs(dx), abs(dy)) / 2:
        return None
    sign = (round(dx / abs(dx)), 0) if abs(dx) > abs(dy) else (0, round(dy / abs(dy)))
    return next(name for name, motion in DIRECTIONS.items() if motion == sign)
