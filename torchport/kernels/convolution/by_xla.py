"""What a convolution takes, and the convolution through XLA: for platforms and sizes that `kernel` does not take.

It is one convolution of the frames, as if they were a batch of pictures, with three times as many channels out: one for
each tap in time. These are added one and two frames later. On a CPU XLA's convolution in 3 dims takes three times as
long, and for a TPU it compiles five times as long.

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
    #: Whether what is outside the video is its nearest row and column; otherwise it is 0.
    edges: bool
    #: Whether there are chunks of time before and after this one.
    chunked: bool = False
    #: Whether what is before the first frame is that frame; otherwise it is 0. None: as `edges` says.
    still: bool | None = None
    zoom: int = 1  #: How many rows and columns each of x becomes first.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """What a convolution may take beside its input, weights and bias; None: it does without."""

    #: [C] of an RMSNorm that the input goes through first, and then SiLU.
    gains: jax.Array | None = None
    residual: jax.Array | None = None  #: [H, W, T, D], added to the output.
    #: float32 [H, W + 2, T, C], what the input goes through first, and then SiLU; with a row more at each end where the
    #: input has them. Each of its rows and columns may be for several of the input's. The first column and the last are
    #: those of the sides. It is 0 outside the video, and so is the shift.
    scale: jax.Array | None = None
    shift: jax.Array | None = None  #: Like the scale.
    #: [2, H, W, D] float32, what the chunk before adds to the first two frames.
    carry: jax.Array | None = None
    #: Whether there is no chunk before all the same, where that is known only when it runs.
    first: jax.Array | None = None
    #: How many frames of the input count as 0, the norm's output too: int32 []. There may be fewer frames.
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
    """Returns the convolution [H, W, T, D] of x's dtype, and what it adds to the first two frames of the next chunk.

    Args:
        rows: Whether x has a row more at each end.
        x: [H, W, T, C], or with `rows` [H + 2, W, T, C]; H and W divided by `request.zoom`.
        sides: The columns before and after it, [H, 1, T, C].
        weight: PyTorch's, [D, C, 3 or 1, 3, 3].
        bias: [D], or None.
    """
    dtype, (outputs, inputs, taps) = x.dtype, weight.shape[:3]
    x = _spread(jnp.concatenate([sides[0], x, sides[1]], axis=1), request.zoom, rows)
    x = x if operands.gains is None else activated(x, operands.gains, x.shape[-1])
    if operands.scale is not None and operands.shift is not None:
        times = (x.shape[1] - 2) // (operands.scale.shape[1] - 2)
        scale, shift = (_spread(operand, times, rows) for operand in (operands.scale, operands.shift))
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
        out, after = _added(products, outputs, still, operands.carry, operands.first)
    out = out.transpose(1, 2, 0, 3)
    out = out if bias is None else out + bias.astype(jnp.float32)
    out = out if operands.residual is None else out + operands.residual.astype(jnp.float32)
    return out.astype(dtype), after


def _added(
    products: jax.Array, outputs: int, still: bool, carry: jax.Array | None, first: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the taps in time [T, H, W, 3 D] added up, and what is due after the last frame."""
    oldest, older, newest = (products[..., n * outputs : (n + 1) * outputs] for n in range(3))
    start = jnp.stack([oldest[0] + older[0], oldest[0]])
    start = start if still else jnp.zeros_like(start)
    before = start if carry is None else carry if first is None else jnp.where(first, start, carry)
    total = jnp.pad(newest, ((0, 2), (0, 0), (0, 0), (0, 0)))
    total = total.at[:2].add(before).at[1:-1].add(older).at[2:].add(oldest)
    return total[:-2], total[-2:]


def _spread(x: jax.Array, times: int, rows: bool) -> jax.Array:
    """Returns x with each row and column so many times, and those at the ends, which are not its own, once."""
    if times == 1:
        return x
    cut = slice(times - 1, 1 - times)
    x = jnp.repeat(x, times, axis=1)[:, cut]
    x = jnp.repeat(x, times, axis=0)
    return x[cut] if rows else x


def activated(x: jax.Array, gains: jax.Array, channels: int) -> jax.Array:
    """Returns SiLU of RMSNorm over the last dim, as `torch.nn.functional.normalize` computes it, of x's dtype.

    Args:
        channels: How many of the last dim are no padding, which is 0.
    """
    wide = x.astype(jnp.float32)
    length = jnp.sqrt(jnp.sum(wide * wide, axis=-1, keepdims=True))
    wide = wide / jnp.maximum(length, 1e-12) * channels**0.5 * gains.astype(jnp.float32)
    return (wide * jax.nn.sigmoid(wide)).astype(x.dtype)
