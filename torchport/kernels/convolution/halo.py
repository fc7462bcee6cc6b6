"""The rows and columns of a device's neighbours, within `jax.shard_map`.

Shapes: H rows, W columns, of one device; further dims follow.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def sides(x: jax.Array, dim: int, axes: tuple[str, ...], edges: bool) -> tuple[jax.Array, jax.Array]:
    """Returns the last slice of the device before and the first of the device after, along a dim.

    Args:
        x: A device's part.
        dim: Which dim is parted.
        axes: Over which axes of the mesh; none: it is whole here.
        edges: Whether what lies outside is the nearest slice; otherwise it is 0.
    """
    first, last = (lax.index_in_dim(x, n, dim) for n in (0, x.shape[dim] - 1))
    before, after = (first, last) if edges else (jnp.zeros_like(first), jnp.zeros_like(last))
    count = lax.axis_size(axes) if axes else 1
    if count == 1:
        return before, after
    number = lax.axis_index(axes)
    left = lax.ppermute(last, axes, [(n, n + 1) for n in range(count - 1)])
    right = lax.ppermute(first, axes, [(n + 1, n) for n in range(count - 1)])
    return jnp.where(number == 0, before, left), jnp.where(number == count - 1, after, right)


def outside(x: jax.Array, dim: int, axes: tuple[str, ...], valid: int, edges: bool) -> jax.Array:
    """Returns a device's part with padding after the valid slices replaced by the last valid one, or by 0.

    A device that has padding alone keeps it: nobody reads it but its neighbour, which has the last valid slice, and
    takes no other (`after_last`).
    """
    size = x.shape[dim]
    count = _valid_here(size, axes, valid)
    index = lax.broadcasted_iota(jnp.int32, [size if n == dim else 1 for n in range(x.ndim)], dim)
    last = lax.dynamic_slice_in_dim(x, jnp.clip(count - 1, 0, size - 1), 1, dim)
    return jnp.where(index < count, x, last if edges else jnp.zeros_like(last))


def after_last(after: jax.Array, x: jax.Array, dim: int, axes: tuple[str, ...], valid: int, edges: bool) -> jax.Array:
    """Returns the slice after a device's part, which is outside where that part ends with the last valid slice."""
    size = x.shape[dim]
    last = lax.index_in_dim(x, size - 1, dim)
    is_end = _valid_here(size, axes, valid) <= size
    return jnp.where(is_end, last if edges else jnp.zeros_like(last), after)


def _valid_here(size: int, axes: tuple[str, ...], valid: int) -> jax.Array:
    """Returns how many slices from this device's first on are valid; more than it has where others follow."""
    number = lax.axis_index(axes) if axes else jnp.int32(0)
    return valid - number * size
