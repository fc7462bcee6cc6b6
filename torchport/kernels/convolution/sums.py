"""Sums and sums of squares of a video's channels in each frame, over one device's part: a Pallas kernel for TPU.

The video is read once, as fast as memory gives it. What is summed are differences to the values of the part's first
position: so nothing is lost where the mean is much larger than the variance.

Shapes: H rows, W columns, T frames, C channels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torchport.kernels.convolution.kernel import VMEM


@dataclasses.dataclass(frozen=True)
class Sums:
    """What is known of a call before it is traced."""

    height: int  #: H.
    width: int  #: W.
    frames: int  #: T, a multiple of 8.
    channels: int  #: C.
    padded: bool = False  #: Whether some rows or columns may be padding.
    dtype: str = "float32"  #: Of the video.

    @property
    def together(self) -> int:
        """Columns that are added at once, a divisor of W: of 32 to 64 registers, or all where there is none."""
        size = self.frames * self.channels
        fits = [n for n in range(1, self.width) if self.width % n == 0 and 32 * 1024 <= n * size <= 64 * 1024]
        return max(fits, default=self.width)

    @property
    def name(self) -> str:
        """Names the kernel in a program."""
        sizes = f"{self.height}x{self.width}x{self.frames}_{self.channels}"
        return f"sums_{sizes}{'_v' if self.padded else ''}_{jnp.dtype(self.dtype).itemsize}"


def summed(
    sums: Sums, x: jax.Array, valid: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the values at the first position, and sums of differences to them and of their squares.

    Args:
        sums: Its sizes.
        x: [H, W, T, C].
        valid: How many rows and columns are no padding, int32 [2].
        interpret: Run it as plain JAX.

    Returns:
        Three of [T, C], float32.
    """
    whole = pl.BlockSpec((sums.frames, sums.channels), lambda row, valid: (0, 0))
    shape = jax.ShapeDtypeStruct((sums.frames, sums.channels), jnp.float32)
    near, total, squares = pl.pallas_call(
        functools.partial(_kernel, sums),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(sums.height,),
            in_specs=[
                pl.BlockSpec((1, sums.width, sums.frames, sums.channels), lambda row, valid: (row, 0, 0, 0)),
            ],
            out_specs=[whole] * 3,
        ),
        out_shape=[shape] * 3,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM),
        interpret=interpret,
        name=sums.name,
    )(valid, x)
    return near, total, squares


def _kernel(sums: Sums, valid: Any, x: Any, near: Any, total: Any, squares: Any) -> None:
    """Adds one row."""
    row, some = pl.program_id(0), sums.together

    def begin() -> None:
        near[...] = x[0, 0].astype(jnp.float32)
        total[...] = jnp.zeros_like(total)
        squares[...] = jnp.zeros_like(squares)

    pl.when(row == 0)(begin)
    origin = near[...]

    def add(number: Any, so_far: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        apart = x[0, pl.ds(number * some, some)].astype(jnp.float32) - origin
        if sums.padded:
            column = number * some + jax.lax.broadcasted_iota(jnp.int32, (some, 1, 1), 0)
            apart = jnp.where(jnp.logical_and(row < valid[0], column < valid[1]), apart, 0.0)
        return so_far[0] + jnp.sum(apart, axis=0), so_far[1] + jnp.sum(apart * apart, axis=0)

    zeros = jnp.zeros((sums.frames, sums.channels), jnp.float32)
    count = sums.width // some
    of_row = jax.lax.fori_loop(0, count, add, (zeros, zeros)) if count > 1 else add(0, (zeros, zeros))
    total[...] += of_row[0]
    squares[...] += of_row[1]


def alone(**sizes: Any) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """Returns a kernel and its operands' shapes, for `torchport.plan.tpu.bundles.compile_kernel`."""
    sums = Sums(**sizes)
    x = jax.ShapeDtypeStruct((sums.height, sums.width, sums.frames, sums.channels), sums.dtype)
    return functools.partial(summed, sums), [x, jax.ShapeDtypeStruct((2,), jnp.int32)]


def trips(sums: Sums) -> tuple[int, ...]:
    """Returns how often the kernel's loops run: see `torchport.plan.tpu.cost.Trips`."""
    return (sums.height, sums.width // sums.together)


def moved(sums: Sums) -> int:
    """Returns the bytes that a call reads from HBM and writes there."""
    read = sums.height * sums.width * jnp.dtype(sums.dtype).itemsize
    return (read + 3 * 4) * sums.frames * sums.channels
