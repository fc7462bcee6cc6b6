"""A convolution's arguments, and the convolution through XLA: for platforms and sizes that `kernel` does not take.

XLA convolves the frames as a batch of pictures, with D channels out for each of three taps in time. The taps' results
are then added, zero, one and two frames later. XLA's convolution in 3 dims takes three times as long on a CPU, and
compiles five times as long for a TPU.

Shapes: H rows, W columns, T frames, C channels in, D channels out.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

DIMS = ("NHWC", "HWIO", "NHWC")


@dataclasses.dataclass(frozen=True)
class ConvolutionRequest:
    """The options of a convolution; `Operands` are its optional arrays."""

    #: Whether the video is padded with its nearest row and column; otherwise with 0.
    edges: bool
    #: Whether there are chunks of time before and after this one.
    chunked: bool = False
    #: Whether the padding before the first frame repeats this frame; otherwise it is 0. None: as `edges`.
    still: bool | None = None
    zoom: int = 1  #: How often rows and columns of x are repeated first, which is upsampling.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """A convolution's optional arrays, beside input, weights and bias; None for an array that it does without."""

    #: [C], gains of an RMSNorm over channels: the input becomes SiLU(RMSNorm(input)) first.
    gains: jax.Array | None = None
    #: [H, W, T, D], added to the output. If that is upsampled, H and W may be smaller; then they are repeated, too.
    residual: jax.Array | None = None
    #: float32 [H, W + 2, T, C]: the input becomes SiLU(input * scale + shift) first. The scale has a row more at each
    #: end if the input has. A row or column of the scale may be for several of the input's. The first and the last
    #: column are for `sides`. Scale and shift are 0 outside the video.
    scale: jax.Array | None = None
    shift: jax.Array | None = None  #: Like the scale.
    #: [2, H, W, D] float32, the chunk before's part in the first two frames: products of taps that reach back in time.
    carry: jax.Array | None = None
    #: Whether this is the first chunk, which does not use `carry`; known only when the program runs.
    first: jax.Array | None = None
    #: int32 []: how many frames from the first on count as 0, after the norm; all if there are fewer.
    lead: jax.Array | None = None


def convolved(
    request: ConvolutionRequest,
    rows: bool,
    x: jax.Array,
    sides: tuple[jax.Array, jax.Array],
    weight: jax.Array,
    bias: jax.Array | None,
    operands: Operands,
) -> tuple[jax.Array, jax.Array]:
    """Returns the convolution [H, W, T, D] of x's dtype, and the carry for the next chunk, [2, H, W, D].

    Args:
        rows: Whether x has a row more at each end.
        x: [H, W, T, C], or with `rows` [H + 2, W, T, C]; H and W divided by `request.zoom`.
        sides: The columns before and after it, [H, 1, T, C].
        weight: PyTorch's, [D, C, 3 or 1, 3, 3].
    """
    dtype, (outputs, inputs, taps) = x.dtype, weight.shape[:3]
    x = _upsampled(jnp.concatenate([sides[0], x, sides[1]], axis=1), request.zoom, rows)
    x = x if operands.gains is None else activated(x, operands.gains, x.shape[-1])
    if operands.scale is not None and operands.shift is not None:
        times = (x.shape[1] - 2) // (operands.scale.shape[1] - 2)
        scale, shift = (_upsampled(operand, times, rows) for operand in (operands.scale, operands.shift))
        wide = x.astype(jnp.float32) * scale + shift
        x = (wide * jax.nn.sigmoid(wide)).astype(dtype)
    x = x.transpose(2, 0, 1, 3)
    if operands.lead is not None:
        x = jnp.where(jnp.arange(x.shape[0])[:, None, None, None] >= operands.lead, x, 0)
    if not rows:
        x = jnp.pad(x, ((0, 0), (1, 1), (0, 0), (0, 0)), mode="edge" if request.edges else "constant")
    columns = weight.transpose(3, 4, 1, 2, 0).reshape(3, 3, inputs, taps * outputs)
    products = lax.conv_general_dilated(
        x, columns.astype(dtype), (1, 1), "VALID", dimension_numbers=DIMS, preferred_element_type=jnp.float32
    )
    if taps == 1:
        out, after = products, jnp.zeros((2, *products.shape[1:]), jnp.float32)
    else:
        still = request.edges if request.still is None else request.still
        out, after = _sum_of_taps(products, outputs, still, operands.carry, operands.first)
    out = out.transpose(1, 2, 0, 3)
    out = out if bias is None else out + bias.astype(jnp.float32)
    if operands.residual is not None:
        times = [size // other for size, other in zip(out.shape[:2], operands.residual.shape[:2], strict=True)]
        out = out + jnp.repeat(jnp.repeat(operands.residual, times[0], 0), times[1], 1).astype(jnp.float32)
    return out.astype(dtype), after


def _sum_of_taps(
    products: jax.Array, outputs: int, still: bool, carry: jax.Array | None, first: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Adds up the products of the three taps in time [T, H, W, 3 D]; returns frames, and the carry [2, H, W, D]."""
    oldest, older, newest = (products[..., n * outputs : (n + 1) * outputs] for n in range(3))
    # Two still frames before the first frame would add these products to the first two frames.
    start = jnp.stack([oldest[0] + older[0], oldest[0]])
    start = start if still else jnp.zeros_like(start)
    before = start if carry is None else carry
    if carry is not None and first is not None:
        before = jnp.where(first, start, carry)
    total = jnp.pad(newest, ((0, 2), (0, 0), (0, 0), (0, 0)))
    total = total.at[:2].add(before).at[1:-1].add(older).at[2:].add(oldest)
    return total[:-2], total[-2:]


def _upsampled(x: jax.Array, times: int, rows: bool) -> jax.Array:
    """Repeats rows and columns of x (nearest-neighbour upsampling); of a neighbour's border, at the ends, once."""
    if times == 1:
        return x
    cut = slice(times - 1, 1 - times)
    x = jnp.repeat(x, times, axis=1)[:, cut]
    x = jnp.repeat(x, times, axis=0)
    return x[cut] if rows else x


def activated(x: jax.Array, gains: jax.Array, channels: int) -> jax.Array:
    """Returns SiLU of RMSNorm over x's last dim, in x's dtype. The features of x after `channels` are zeros."""
    # The norm is that of `torch.nn.functional.normalize`, with its 1e-12.
    wide = x.astype(jnp.float32)
    length = jnp.sqrt(jnp.sum(wide * wide, axis=-1, keepdims=True))
    wide = wide / jnp.maximum(length, 1e-12) * channels**0.5 * gains.astype(jnp.float32)
    return (wide * jax.nn.sigmoid(wide)).astype(x.dtype)
