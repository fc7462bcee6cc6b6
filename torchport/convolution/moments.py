"""Mean and variance of a video's channels in groups, for each frame, where its parts are on several devices.

Sums are float32, and of differences to a value near the mean: so nothing is lost where the mean is much larger than
the variance. The video is read once, and no copy of it is made.

Shapes: B batch, C channels, G groups of them, T frames, H rows, W columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from torchport.convolution import canvas
from torchport.convolution.canvas import Canvas


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
    # Values of the first row: a device that has padding alone has none, and counts for nothing.
    first = x[:, :, :, :1].astype(jnp.float32)
    near = jnp.mean(first, axis=(3, 4), keepdims=True)
    apart = x.astype(jnp.float32) - near
    if form.height != form.valid_height:
        apart = jnp.where((jnp.arange(height) < rows)[:, None], apart, 0.0)
    if form.width != form.valid_width:
        apart = jnp.where(jnp.arange(width) < columns, apart, 0.0)
    count = jnp.maximum(rows * columns, 1).astype(jnp.float32)
    offset = jnp.sum(apart, axis=(3, 4)) / count
    spread = jnp.sum(apart * apart, axis=(3, 4)) / count - offset * offset
    return _joined(groups, form, near[..., 0, 0] + offset, spread, (rows * columns).astype(jnp.float32))


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
