"""Mean and variance of a video's channels in groups, for each frame, where its parts are on several devices.

Sums are float32, and of differences to a value of the video: so nothing is lost where the mean is much larger than the
variance. The video is read once, and no copy of it is made.

Shapes: B batch, C channels, G groups of them, T frames, H rows, W columns.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from torchport.kernels.attention import dispatch as attention
from torchport.kernels.convolution import canvas, dispatch, sums
from torchport.kernels.convolution.canvas import Canvas


def of_frames(groups: int, x_BCTHW: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance [B, G, T] in float32, on the canvas that is set; padding does not count."""
    form = canvas.current()
    local = functools.partial(_local, groups, form)
    if jax.sharding.get_abstract_mesh().empty:
        return local(x_BCTHW)
    whole = (PartitionSpec(), PartitionSpec())
    made: tuple[jax.Array, jax.Array] = jax.shard_map(local, in_specs=form.spec, out_specs=whole, check_vma=False)(
        x_BCTHW
    )
    return made


def _local(groups: int, form: Canvas, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the whole video's from a device's part: of each channel first, then of its group."""
    height, width = x.shape[3:]
    rows, columns = _valid(form.rows, height, form.valid_rows), _valid(form.columns, width, form.valid_columns)
    # A device that has padding alone counts for nothing.
    is_padded = form.height != form.valid_height or form.width != form.valid_width
    takes = dispatch.uses_kernel() and x.shape[2] % 8 == 0 and x.dtype in (jnp.float32, jnp.bfloat16)
    run = _by_kernel if takes else _by_xla
    every = [run(is_padded, part.transpose(2, 3, 1, 0), rows, columns) for part in x]
    near, total, squares = (jnp.stack(each).swapaxes(1, 2) for each in zip(*every, strict=True))
    near = jnp.where(rows * columns > 0, near, 0.0)  # padding may hold anything, and NaN times 0 is NaN
    count = jnp.maximum(rows * columns, 1).astype(jnp.float32)
    offset = total / count
    spread = squares / count - offset * offset
    return _joined(groups, form, near + offset, spread, (rows * columns).astype(jnp.float32))


def _by_xla(is_padded: bool, x: jax.Array, rows: jax.Array, columns: jax.Array) -> tuple[jax.Array, ...]:
    """Returns what `sums.summed` does, through XLA."""
    wide = x.astype(jnp.float32)
    apart = wide - wide[0, 0]
    if is_padded:
        inside = (jnp.arange(x.shape[0]) < rows)[:, None] & (jnp.arange(x.shape[1]) < columns)
        apart = jnp.where(inside[..., None, None], apart, 0.0)
    return wide[0, 0], jnp.sum(apart, axis=(0, 1)), jnp.sum(apart * apart, axis=(0, 1))


def _by_kernel(is_padded: bool, x: jax.Array, rows: jax.Array, columns: jax.Array) -> tuple[jax.Array, ...]:
    height, width, frames, channels = x.shape
    call = sums.Sums(height, width, frames, channels, is_padded, x.dtype.name)
    context = attention.current()
    if context.note is not None:
        build, sizes = f"{sums.__name__}:alone", dataclasses.asdict(call)
        context.note(attention.Pass(call.name, build, sizes, sums.trips(call), sums.moved(call)))
    valid = jnp.stack([jnp.asarray(rows, jnp.int32), jnp.asarray(columns, jnp.int32)])
    return sums.summed(call, x, valid, interpret=context.interpret)


def _joined(
    groups: int, form: Canvas, mean: jax.Array, variance: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the moments of groups of channels on all devices from those of each channel on one, [B, C, T]."""
    axes = (*form.rows, *form.columns)
    share = count / lax.psum(count, axes) if axes else jnp.float32(1)

    def over_all(x_BCT: jax.Array) -> jax.Array:
        part = jnp.mean(x_BCT.reshape(x_BCT.shape[0], groups, -1, x_BCT.shape[2]), axis=2) * share
        return lax.psum(part, axes) if axes else part

    whole = over_all(mean)
    apart = mean - jnp.repeat(whole, mean.shape[1] // groups, axis=1)
    return whole, over_all(variance + apart * apart)


def _valid(axes: tuple[str, ...], size: int, valid_of: Callable[[int], int]) -> jax.Array:
    """Returns how many of a device's rows or columns are no padding."""
    count = lax.axis_size(axes) if axes else 1
    number = lax.axis_index(axes) if axes else jnp.int32(0)
    return jnp.clip(valid_of(size * count) - number * size, 0, size)
