"""The same convolution as `kernel`'s through XLA: for platforms without the kernel, and for sizes it does not take.

Shapes: H rows, W columns, T frames, C channels in, D channels out.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from torchport.attention.problem import platform


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
    carry: jax.Array | None = None,
    first: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the convolution [H, W, T, D], and the last frames of its input, which the next chunk needs.

    Args:
        x: [H, W, T, C], or with `rows` [H + 2, W, T, C].
        sides: The columns before and after it, [H, 1, T, C].
        weight: PyTorch's, [D, C, 3 or 1, 3, 3].
        bias: [D], or None.
        edges: Whether what is outside is the nearest row or frame; otherwise it is 0.
        rows: Whether x has a row more at each end.
        gains: [C] of an RMSNorm that the input goes through first, and then SiLU.
        residual: [H, W, T, D], added to the output.
        carry: What the chunk before returned; None: there is none.
        first: Whether there is no chunk before all the same.
    """
    x = jnp.concatenate([sides[0], x, sides[1]], axis=1)
    x = x if gains is None else activated(x, gains)
    if not rows:
        x = jnp.pad(x, ((1, 1), (0, 0), (0, 0), (0, 0)), mode="edge" if edges else "constant")
    more = weight.shape[2] - 1
    begin = jnp.repeat(x[:, :, :1], more, axis=2) if edges else jnp.zeros_like(x[:, :, :more])
    before = begin if carry is None else carry
    if carry is not None and first is not None:
        before = jnp.where(first, begin, carry)
    x = jnp.concatenate([before, x], axis=2)
    out = _products(x, weight)
    out = out if bias is None else out + bias.astype(out.dtype)
    return out if residual is None else out + residual, x[:, :, x.shape[2] - more :]


_DIMS = lax.ConvDimensionNumbers((0, 4, 3, 1, 2), (0, 1, 2, 3, 4), (0, 4, 3, 1, 2))
"""Input and output [1, H, W, T, C], weights [D, C, T, H, W]."""


def _products(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns the convolution of [H + 2, W + 2, T + taps - 1, C] without padding.

    On a TPU it is one, which compiles fastest. Elsewhere it is one in space for each tap in time: XLA's CPU takes a
    quarter of the time for them. In a loop it computes them as matrix products only if channels are the last dim of the
    input and of the weights; anything else takes up to 60 times as long.
    """
    if platform()[0] == "tpu":
        return lax.conv_general_dilated(x[None], weight, (1, 1, 1), [(0, 0)] * 3, dimension_numbers=_DIMS)[0]
    x_THWC, weight_THWCD = x.transpose(2, 0, 1, 3), weight.transpose(2, 3, 4, 1, 0)
    taps = weight_THWCD.shape[0]
    frames = x_THWC.shape[0] - taps + 1
    convolve = functools.partial(
        lax.conv_general_dilated, window_strides=(1, 1), padding="VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    outs = [convolve(x_THWC[tap : tap + frames], weight_THWCD[tap]) for tap in range(taps)]
    return sum(outs[1:], outs[0]).transpose(1, 2, 0, 3)


def activated(x: jax.Array, gains: jax.Array) -> jax.Array:
    """Returns SiLU of RMSNorm over the last dim, as `torch.nn.functional.normalize` computes it, of x's dtype."""
    wide = x.astype(jnp.float32)
    length = jnp.sqrt(jnp.sum(wide * wide, axis=-1, keepdims=True))
    wide = wide / jnp.maximum(length, 1e-12) * x.shape[-1] ** 0.5 * gains.astype(jnp.float32)
    return (wide * jax.nn.sigmoid(wide)).astype(x.dtype)
