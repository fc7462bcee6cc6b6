"""A scene: one coloured shape that starts in the middle and moves, and the clip that shows it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal

import numpy
import numpy.typing

Shape = Literal["disc", "square", "triangle"]
Colour = Literal["red", "green", "blue", "yellow"]
Direction = Literal["left", "right", "up", "down"]
Background = Literal["black", "white"]

SHAPES: tuple[Shape, ...] = ("disc", "square", "triangle")
COLOURS: dict[Colour, tuple[int, int, int]] = {
    "red": (225, 45, 40),
    "green": (40, 185, 65),
    "blue": (45, 85, 235),
    "yellow": (245, 205, 35),
}
DIRECTIONS: dict[Direction, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
"""By direction, the sign of the motion in x and y; y points down."""
BACKGROUNDS: dict[Background, int] = {"black": 12, "white": 240}

HEIGHT = WIDTH = 128
FRAMES = 13
SPEED = 4
"""Pixels per frame: one latent position, 16 pixels, for each latent frame, 4 frames."""
_RADIUS, _HALF_SIDE, _CORNER = 21.0, 19.0, 30.0
"""Of the disc; of the square; and from the triangle's centre of mass to its corners."""

Floats = numpy.typing.NDArray[numpy.float64]
Frames = numpy.typing.NDArray[numpy.uint8]


@dataclasses.dataclass(frozen=True)
class Scene:
    """What a prompt can ask for."""

    shape: Shape
    colour: Colour
    direction: Direction
    background: Background = "black"

    @property
    def prompt(self) -> str:
        """The plainest words for it."""
        ending = "" if self.background == "black" else f" on a {self.background} background"
        return f"a {self.colour} {self.shape} moves {self.direction}{ending}"


def scenes() -> list[Scene]:
    """Returns all 96 scenes, always in the same order."""
    return [Scene(*each) for each in itertools.product(SHAPES, COLOURS, DIRECTIONS, BACKGROUNDS)]


_HELD_OUT = {
    ("disc", "yellow", "up"),
    ("disc", "green", "left"),
    ("square", "red", "down"),
    ("square", "blue", "right"),
    ("triangle", "green", "up"),
    ("triangle", "yellow", "left"),
}
"""Combinations that training never sees, before either background."""


def is_held_out(scene: Scene) -> bool:
    """Returns whether training leaves a scene out."""
    return (scene.shape, scene.colour, scene.direction) in _HELD_OUT


def coverage(shape: Shape, x: float, y: float, size: tuple[int, int] = (HEIGHT, WIDTH)) -> Floats:
    """Returns how much of each pixel a shape covers.

    Args:
        shape: The shape.
        x: Where its centre of mass is, in pixels from the left border.
        y: The same from the upper border.
        size: Height and width of the result, in pixels.

    Returns:
        [H, W], from 0 to 1.
    """
    dy, dx = numpy.meshgrid(numpy.arange(size[0]) + 0.5 - y, numpy.arange(size[1]) + 0.5 - x, indexing="ij")
    if shape == "disc":
        distance = numpy.hypot(dx, dy) - _RADIUS
    elif shape == "square":
        distance = numpy.maximum(abs(dx), abs(dy)) - _HALF_SIDE
    else:
        # Three half-planes: below, and to the upper right and the upper left, at 30 degrees from the horizontal.
        slanted = abs(dx) * 3**0.5 / 2 - dy / 2
        distance = numpy.maximum(dy, slanted) - _CORNER / 2
    covered: Floats = numpy.clip(0.5 - distance, 0.0, 1.0)
    return covered


def clip(scene: Scene, frames: int = FRAMES, offset: int = 0) -> Frames:
    """Returns the frames of a scene.

    Args:
        scene: The scene.
        frames: How many.
        offset: How many frames of motion precede the first one.

    Returns:
        [F, H, W, 3].
    """
    step_x, step_y = DIRECTIONS[scene.direction]
    colour = numpy.array(COLOURS[scene.colour], numpy.float64)
    pictures = []
    for number in range(offset, offset + frames):
        x, y = WIDTH / 2 + SPEED * number * step_x, HEIGHT / 2 + SPEED * number * step_y
        part = coverage(scene.shape, x, y)[..., None]
        pictures.append(part * colour + (1 - part) * BACKGROUNDS[scene.background])
    return numpy.stack(pictures).round().astype(numpy.uint8)
