"""How the frames of a video lie on the devices of a mesh, and which of their rows, columns and frames are padding."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from torchport.kernels.attention.tiles import rounded_up
from torchport.shard import ways


@dataclasses.dataclass(frozen=True)
class Canvas:
    """How a video's latents lie on a mesh; a decoder's larger videos lie likewise, at a multiple of these sizes."""

    frames: int  #: T with padding, which is before the first frame and after the last.
    height: int  #: H with padding, which is below.
    width: int  #: W with padding, which is on the right.
    lead: int  #: Frames of padding before the first frame, which repeat it.
    valid_height: int  #: H.
    valid_width: int  #: W.
    rows: tuple[str, ...] = ()  #: The axes of the mesh that split rows.
    columns: tuple[str, ...] = ()  #: The axes that split columns.
    tail: int = 0  #: Frames of padding after the last.
    #: Whether the first latent frame becomes one frame; otherwise as many as each of the others.
    single: bool = True

    def lead_of(self, frames: int) -> int:
        """Returns the frames of padding before the first valid frame, in a video of `frames` frames in all."""
        times = frames // self.frames
        return (self.lead + 1) * times - 1 if self.single else self.lead * times

    def valid_rows(self, height: int) -> int:
        """Returns the rows that are no padding, in a video of `height` rows in all, a multiple of the latents'."""
        return self.valid_height * (height // self.height)

    def valid_columns(self, width: int) -> int:
        return self.valid_width * (width // self.width)

    @property
    def spec(self) -> PartitionSpec:
        """The sharding of an array [B, C, T, H, W]."""
        return PartitionSpec(None, None, None, self.rows or None, self.columns or None)


NONE = Canvas(frames=1, height=1, width=1, lead=0, valid_height=1, valid_width=1)
"""One device, and no padding."""
_CANVAS: contextvars.ContextVar[Canvas] = contextvars.ContextVar("canvas", default=NONE)


current = _CANVAS.get
"""Returns the canvas of the video that is being decoded."""


@contextlib.contextmanager
def using(canvas: Canvas) -> Iterator[None]:
    """Sets the current canvas while the context lasts: how the video that is decoded in it is sharded and padded."""
    token = _CANVAS.set(canvas)
    try:
        yield
    finally:
        _CANVAS.reset(token)


def on_parts(run: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Returns `run`, a function of each device's parts, as a function of whole arrays; without a mesh returns `run`."""
    if jax.sharding.get_abstract_mesh().empty:
        return run
    sharded: Callable[..., Any] = jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return sharded


def of_latents(frames: int, height: int, width: int, *, multiple: int = 1, paired: bool = False) -> Canvas:
    """Returns the canvas of latents on the current mesh (`jax.set_mesh`), with padding and the axes that split rows
    and columns.

    The split is the one with the fewest positions on a device, the borders of its neighbours included. Rows are split
    only if a device then has a tenth fewer positions: joining rows with a border is a copy.

    Args:
        multiple: The number to a multiple of which T is padded.
        paired: Whether latent frames are decoded in pairs. Then padding is after the last frame; an odd number of
            frames also gets a frame of padding before them, so that each pair begins at an even frame.
    """
    sizes = {name: size for name, size in jax.sharding.get_abstract_mesh().shape.items() if size > 1}
    subsets = itertools.chain.from_iterable(itertools.combinations(sizes, n) for n in range(len(sizes) + 1))
    splits = [(rows, tuple(name for name in sizes if name not in rows)) for rows in subsets]
    # Of two equally good splits `min` takes the first, which has more axes for columns.
    rows, columns = min(splits, key=lambda split: _positions(height, width, sizes, *split))
    lead = frames % 2 if paired else -frames % multiple  # unpaired, all padding comes first
    return Canvas(
        frames=rounded_up(frames + lead, multiple),
        height=rounded_up(height, ways(rows, sizes)),
        width=rounded_up(width, ways(columns, sizes)),
        lead=lead,
        valid_height=height,
        valid_width=width,
        rows=rows,
        columns=columns,
        tail=-(frames + lead) % multiple,
        single=not paired or frames % 2 == 1,
    )


def _positions(
    height: int, width: int, sizes: Mapping[str, int], rows: tuple[str, ...], columns: tuple[str, ...]
) -> float:
    """Returns the positions that a device computes, with its neighbours' borders, under a split of rows and columns."""
    sides = []
    for size, axes in ((height, rows), (width, columns)):
        parts = ways(axes, sizes)
        sides.append(-(-size // parts) + (2 if parts > 1 else 0))  # a border on each side
    # Split rows count for a tenth more: each convolution's input is then copied, to join it with its neighbours' rows.
    return math.prod(sides) * (1.1 if ways(rows, sizes) > 1 else 1.0)
