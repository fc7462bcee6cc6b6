"""The same convolution as `kernel`'s through XLA: for platforms without the kernel, and for sizes it does not take.

Shapes: H rows, W columns, T frames, C channels in, D channels out.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def convolved(
    x: jax.Array,
    sides: tuple[jax.Array, jax.Array],
    weight: jax.Array,
    bias: jax.Array | None,
    *,
    edges: bool,
    rows: bool,
    gains: jax.Array | None = None,
    residual: jax.Array | None = None,
    scale: jax.Array | None = None,
    shift: jax.Array | None = None,
    still: bool | None = None,
    zoom: int = 1,
    carry: jax.Array | None = None,
    first: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the convolution [H, W, T, D], and the last frames of its input, which the next chunk needs.

    Args:
        x: [H, W, T, C], or with `rows` [H + 2, W, T, C]; H and W divided by `zoom`.
        sides: The columns before and after it, [H, 1, T, C].
        weight: PyTorch's, [D, C, 3 or 1, 3, 3].
        bias: [D], or None.
        edges: Whether what is outside is the nearest row; otherwise it is 0.
        rows: Whether x has a row more at each end.
        gains: [C] of an RMSNorm that the input goes through first, and then SiLU.
        residual: [H, W, T, D], added to the output.
        scale: float32, what x goes through first, and then SiLU: as `kernel.convolved` has it.
        shift: Like the scale.
        still: Whether what is before the first frame is that frame; otherwise it is 0. None: as `edges` says.
        zoom: How many rows and columns each of x becomes first.
        carry: What the chunk before returned; None: there is none.
        first: Whether there is no chunk before all the same.
    """
    x = _spread(jnp.concatenate([sides[0], x, sides[1]], axis=1), zoom, rows)
    x = x if gains is None else activated(x, gains)
    if scale is not None and shift is not None:
        times = (x.shape[1] - 2) // (scale.shape[1] - 2)
        wide = x.astype(jnp.float32) * _spread(scale, times, rows) + _spread(shift, times, rows)
        x = (wide * jax.nn.sigmoid(wide)).astype(x.dtype)
    if not rows:
        x = jnp.pad(x, ((1, 1), (0, 0), (0, 0), (0, 0)), mode="edge" if edges else "constant")
    more = weight.shape[2] - 1
    still = edges if still is None else still
    begin = jnp.repeat(x[:, :, :1], more, axis=2) if still else jnp.zeros_like(x[:, :, :more])
    before = begin if carry is None else carry
    if carry is not None and first is not None:
        before = jnp.where(first, begin, carry)
    x = jnp.concatenate([before, x], axis=2)
    out = lax.conv_general_dilated(x[None], weight, (1, 1, 1), [(0, 0)] * 3, dimension_numbers=_DIMS)[0]
    out = out if bias is None else out + bias.astype(out.dtype)
    return out if residual is None else out + residual, x[:, :, x.shape[2] - more :]


_DIMS = lax.ConvDimensionNumbers((0, 4, 3, 1, 2), (0, 1, 2, 3, 4), (0, 4, 3, 1, 2))
"""Input and output [1, H, W, T, C], weights [D, C, T, H, W]."""


def _spread(x: jax.Array, times: int, rows: bool) -> jax.Array:
    """Returns x with each row and column so many times, and those at the ends, which are not its own, once."""
    if times == 1:
        return x
    cut = slice(times - 1, 1 - times)
    x = jnp.repeat(x, times, axis=1)[:, cut]
    x = jnp.repeat(x, times, axis=0)
    return x[cut] if rows else x


def activated(x: jax.Array, gains: jax.Array) -> jax.Array:
    """Returns SiLU of RMSNorm over the last dim, as `torch.nn.functional.normalize` computes it, of x's dtype."""
    wide = x.astype(jnp.float32)
    length = jnp.sqrt(jnp.sum(wide * wide, axis=-1, keepdims=True))
    wide = wide / jnp.maximum(length, 1e-12) * x.shape[-1] ** 0.5 * gains.astype(jnp.float32)
    return (wide * jax.nn.sigmoid(wide)).astype(x.dtype)
