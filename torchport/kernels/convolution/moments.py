"""Mean and variance of a video's channels in groups, for each frame, if its parts are on several devices.

Sums are float32. They are of the differences from the values at the video's first position, so that no precision is
lost if the mean is much larger than the deviation. The video is read once and not copied: on TPU by a Pallas kernel.

Shapes: B batch, C channels, G groups of them, T frames, H rows, W columns.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from torchport.kernels.attention import dispatch as attention
from torchport.kernels.convolution import canvas, forms
from torchport.kernels.convolution.canvas import Canvas
from torchport.kernels.convolution.kernel import VMEM


def of_frames(groups: int, x_BCTHW: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance of each frame's groups of channels, float32 [B, G, T]; padding does not count."""
    form = canvas.current()
    run = canvas.on_parts(functools.partial(_local, groups, form), form.spec, (PartitionSpec(), PartitionSpec()))
    mean, variance = run(x_BCTHW)
    return mean, variance


def _local(groups: int, form: Canvas, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance of the whole video's groups, from each device's part x [B, C, T, H, W]."""
    height, width = x.shape[3:]
    rows = _valid_slices(form.rows, height, form.valid_rows)
    columns = _valid_slices(form.columns, width, form.valid_columns)
    # Positions of padding are left out of the sums. A device with padding alone has a count of 0.
    is_padded = form.height != form.valid_height or form.width != form.valid_width
    fits = forms.uses_kernel() and x.shape[2] % 8 == 0 and x.dtype in (jnp.float32, jnp.bfloat16)
    run = _by_kernel if fits else _by_xla
    samples = [run(is_padded, part.transpose(2, 3, 1, 0), rows, columns) for part in x]
    base, total, squares = (jnp.stack(arrays).swapaxes(1, 2) for arrays in zip(*samples, strict=True))
    base = jnp.where(rows * columns > 0, base, 0.0)  # padding may hold anything, and NaN times 0 is NaN
    count = jnp.maximum(rows * columns, 1).astype(jnp.float32)
    offset = total / count
    spread = squares / count - offset * offset
    return _over_groups(groups, form, base + offset, spread, (rows * columns).astype(jnp.float32))


def _by_xla(is_padded: bool, x: jax.Array, rows: jax.Array, columns: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the values at the first position, sums of differences to them, and sums of squared differences.

    Arrays are as in `summed`. With `is_padded`, only the first `rows` and `columns` count.
    """
    wide = x.astype(jnp.float32)
    difference = wide - wide[0, 0]
    if is_padded:
        inside = (jnp.arange(x.shape[0]) < rows)[:, None] & (jnp.arange(x.shape[1]) < columns)
        difference = jnp.where(inside[..., None, None], difference, 0.0)
    return wide[0, 0], jnp.sum(difference, axis=(0, 1)), jnp.sum(difference * difference, axis=(0, 1))


def _by_kernel(is_padded: bool, x: jax.Array, rows: jax.Array, columns: jax.Array) -> tuple[jax.Array, ...]:
    """Computes `_by_xla` by the kernel, and notes the call for a plan."""
    height, width, frames, channels = x.shape
    call = Sums(height, width, frames, channels, is_padded, x.dtype.name)
    context = attention.current()
    if context.note is not None:
        context.note(sums_pass(call))
    valid = jnp.stack([jnp.asarray(rows, jnp.int32), jnp.asarray(columns, jnp.int32)])
    return summed(call, x, valid, interpret=context.interpret)


def _over_groups(
    groups: int, form: Canvas, mean: jax.Array, variance: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance of groups on all devices, from each channel's at this device's `count` positions."""
    axes = (*form.rows, *form.columns)
    share = count / lax.psum(count, axes) if axes else jnp.float32(1)

    def over_all(x_BCT: jax.Array) -> jax.Array:
        """Returns the mean over each group's channels and over devices, which weigh as much as their positions."""
        part = jnp.mean(x_BCT.reshape(x_BCT.shape[0], groups, -1, x_BCT.shape[2]), axis=2) * share
        return lax.psum(part, axes) if axes else part

    whole = over_all(mean)
    difference = mean - jnp.repeat(whole, mean.shape[1] // groups, axis=1)
    return whole, over_all(variance + difference * difference)


def _valid_slices(axes: tuple[str, ...], size: int, valid_of: Callable[[int], int]) -> jax.Array:
    """Returns how many of a device's `size` rows or columns are no padding; `valid_of` maps a video's size to them."""
    return jnp.clip(forms.valid_from_here(size, axes, valid_of(size * forms.ways(axes))), 0, size)


@dataclasses.dataclass(frozen=True)
class Sums:
    """The sizes and options of a call of the kernel that adds up a part of a video."""

    height: int  #: H.
    width: int  #: W.
    frames: int  #: T, a multiple of 8.
    channels: int  #: C.
    padded: bool = False
    dtype: str = "float32"  #: Of the video.

    @property
    def columns_at_once(self) -> int:
        """Columns that are added at once: the largest divisor of W with 32 to 64 registers of values, or else W."""
        size = self.frames * self.channels
        fits = [n for n in range(1, self.width) if self.width % n == 0 and 32 * 1024 <= n * size <= 64 * 1024]
        return max(fits, default=self.width)

    @property
    def name(self) -> str:
        sizes = f"{self.height}x{self.width}x{self.frames}_{self.channels}"
        return f"sums_{sizes}{'_v' if self.padded else ''}_{jnp.dtype(self.dtype).itemsize}"


def summed(
    sums: Sums, x: jax.Array, valid: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the values at the first position, sums of differences to them, and of squared differences: [T, C].

    Args:
        x: [H, W, T, C].
        valid: How many rows and columns are no padding, int32 [2].
    """
    whole = pl.BlockSpec((sums.frames, sums.channels), lambda row, valid: (0, 0))
    shape = jax.ShapeDtypeStruct((sums.frames, sums.channels), jnp.float32)
    base, total, squares = pl.pallas_call(
        functools.partial(_sums_kernel, sums),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(sums.height,),
            in_specs=[pl.BlockSpec((1, sums.width, sums.frames, sums.channels), lambda row, valid: (row, 0, 0, 0))],
            out_specs=[whole] * 3,
        ),
        out_shape=[shape] * 3,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM),
        interpret=interpret,
        name=sums.name,
    )(valid, x)
    return base, total, squares


def _sums_kernel(sums: Sums, valid: Any, x: Any, base: Any, total: Any, squares: Any) -> None:
    """Adds a row of the video to the sums; the first row also sets the values from which differences are taken."""
    row, at_once = pl.program_id(0), sums.columns_at_once

    def start() -> None:
        base[...] = x[0, 0].astype(jnp.float32)
        total[...] = jnp.zeros_like(total)
        squares[...] = jnp.zeros_like(squares)

    pl.when(row == 0)(start)
    origin = base[...]

    def add(number: Any, so_far: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Returns the sums `so_far` with the differences of some columns of the row, and with their squares."""
        difference = x[0, pl.ds(number * at_once, at_once)].astype(jnp.float32) - origin
        if sums.padded:
            column = number * at_once + jax.lax.broadcasted_iota(jnp.int32, (at_once, 1, 1), 0)
            difference = jnp.where(jnp.logical_and(row < valid[0], column < valid[1]), difference, 0.0)
        return so_far[0] + jnp.sum(difference, axis=0), so_far[1] + jnp.sum(difference * difference, axis=0)

    zeros = jnp.zeros((sums.frames, sums.channels), jnp.float32)
    count = sums.width // at_once
    of_row = jax.lax.fori_loop(0, count, add, (zeros, zeros)) if count > 1 else add(0, (zeros, zeros))
    total[...] += of_row[0]
    squares[...] += of_row[1]


def sums_alone(**sizes: Any) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """Returns the kernel as a function of arrays, and their shapes, for `torchport.plan.tpu.bundles.compile_kernel`."""
    sums = Sums(**sizes)
    x = jax.ShapeDtypeStruct((sums.height, sums.width, sums.frames, sums.channels), sums.dtype)
    return functools.partial(summed, sums), [x, jax.ShapeDtypeStruct((2,), jnp.int32)]


def sums_pass(sums: Sums) -> attention.Pass:
    """Returns how to compile a call of the kernel alone, how often its loops run, and the bytes that it moves."""
    read = sums.height * sums.width * jnp.dtype(sums.dtype).itemsize
    size = (read + 3 * 4) * sums.frames * sums.channels  # three float32 results
    loops = (sums.height, sums.width // sums.columns_at_once)
    return attention.Pass(sums.name, f"{__name__}:sums_alone", dataclasses.asdict(sums), loops, size)
