"""How the frames of a video lie on the devices of a mesh, and which of their rows, columns and frames are padding."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping

import jax
from jax.sharding import PartitionSpec

from torchport.kernels.attention.tiles import up


@dataclasses.dataclass(frozen=True)
class Canvas:
    """A video's latents on a mesh. What is made of them lies in the same way, at a multiple of their sizes."""

    frames: int  #: T with padding, which is before the first frame and after the last.
    height: int  #: H with padding, which is below.
    width: int  #: W with padding, which is on the right.
    lead: int  #: Frames of padding before the first; each counts as it.
    valid_height: int  #: H.
    valid_width: int  #: W.
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    tail: int = 0  #: Frames of padding after the last.
    #: Whether the first latent frame becomes one frame; otherwise as many as each of the others.
    single: bool = True

    def lead_of(self, frames: int) -> int:
        """Returns how many of so many frames come before the first that counts."""
        times = frames // self.frames
        return (self.lead + 1) * times - 1 if self.single else self.lead * times

    def tail_of(self, frames: int) -> int:
        """Returns how many of so many frames are made of padding after the last latent frame."""
        return self.tail * (frames // self.frames)

    def valid_rows(self, height: int) -> int:
        """Returns how many of so many rows are no padding."""
        return self.valid_height * (height // self.height)

    def valid_columns(self, width: int) -> int:
        return self.valid_width * (width // self.width)

    @property
    def spec(self) -> PartitionSpec:
        """Where an array [B, C, T, H, W] lies."""
        return PartitionSpec(None, None, None, self.rows or None, self.columns or None)


NONE = Canvas(1, 1, 1, 0, 1, 1)
"""One device, and no padding."""
_CANVAS: contextvars.ContextVar[Canvas] = contextvars.ContextVar("canvas", default=NONE)


def current() -> Canvas:
    return _CANVAS.get()


@contextlib.contextmanager
def using(canvas: Canvas) -> Iterator[None]:
    token = _CANVAS.set(canvas)
    try:
        yield
    finally:
        _CANVAS.reset(token)


def of_latents(frames: int, height: int, width: int, *, multiple: int = 1, paired: bool = False) -> Canvas:
    """Returns the canvas for latents, on the mesh that is set (`jax.set_mesh`).

    All axes are used, for columns, for rows, or for both: as leaves a device the fewest positions, its neighbours'
    included. Rows are parted only where that saves a tenth: to join them with their neighbours' is a copy.

    Args:
        multiple: T is padded to a multiple of this.
        paired: Whether latent frames are decoded in pairs: then padding is after the last, but for one frame before an
            odd number of them, so that each pair begins at an even frame.
    """
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {} if mesh.empty else {name: size for name, size in mesh.shape.items() if size > 1}
    some = [chosen for count in range(len(sizes) + 1) for chosen in itertools.combinations(sizes, count)]
    # Of two ways that are as good, the one with more axes for columns comes first.
    partings = [(chosen, tuple(name for name in sizes if name not in chosen)) for chosen in some]
    rows, columns = min(partings, key=lambda parting: _positions(height, width, sizes, *parting))
    lead = frames % 2 if paired else -frames % multiple
    return Canvas(
        up(frames + lead, multiple),
        up(height, _ways(sizes, rows)),
        up(width, _ways(sizes, columns)),
        lead,
        height,
        width,
        rows,
        columns,
        up(frames + lead, multiple) - frames - lead,
        not paired or frames % 2 == 1,
    )


def _positions(
    height: int, width: int, sizes: Mapping[str, int], rows: tuple[str, ...], columns: tuple[str, ...]
) -> float:
    """Returns the positions of a device and what it needs of its neighbours.

    Parted rows count for a tenth more: each convolution's input is copied then, to stand beside its neighbours'.
    """
    sides = []
    for size, axes in ((height, rows), (width, columns)):
        ways = _ways(sizes, axes)
        sides.append(-(-size // ways) + (2 if ways > 1 else 0))
    return math.prod(sides) * (1.1 if _ways(sizes, rows) > 1 else 1.0)


def _ways(sizes: Mapping[str, int], axes: tuple[str, ...]) -> int:
    return math.prod(sizes[axis] for axis in axes)
