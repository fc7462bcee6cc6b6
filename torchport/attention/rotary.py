"""RMSNorm and rotary positions of queries and keys in one pass, which leaves heads where an all-to-all wants them.

XLA takes eight passes over q and k for this, most of them to turn pairs of features that lie side by side; a kernel
reads them once and writes them once, and swaps neighbours in registers.

Shapes: B batch, S tokens, D features of a head, F = H * D features of all heads; N groups of heads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torchport.attention.dispatch import Pass, current
from torchport.attention.tiles import LANES

ROWS = 256
"""Tokens of a block: two of them, in and out, take 4 MiB of VMEM at 2,048 features."""


def rms_norm(x_BSF: jax.Array, weight_D: jax.Array, eps: float) -> jax.Array:
    """Returns RMSNorm of each head, rounded as PyTorch models round it: to the weight's dtype, before the weight.

    Args:
        x_BSF: Projections [B, S, F].
        weight_D: The norm's gains.
        eps: Added to the mean square.

    Returns:
        [B, S, F] of the weight's dtype.
    """
    heads = x_BSF.reshape(*x_BSF.shape[:2], -1, weight_D.shape[0]).astype(jnp.float32)
    scaled = heads * lax.rsqrt(jnp.square(heads).mean(-1, keepdims=True) + eps)
    return (scaled.astype(weight_D.dtype) * weight_D).reshape(x_BSF.shape)


def by_group(x_BSF: jax.Array, groups: int) -> jax.Array:
    """Returns features [B, S, F] as [B, N, S, F / N]."""
    return jnp.swapaxes(x_BSF.reshape(*x_BSF.shape[:2], groups, -1), 1, 2)


def rms_norm_rotary(
    x_BSF: jax.Array,
    weight_D: jax.Array,
    cos_SD: jax.Array,
    sin_SD: jax.Array,
    eps: float,
    groups: int,
    interpret: bool = False,
    samples: range | None = None,
) -> jax.Array:
    """Returns queries or keys after RMSNorm and rotary positions, with features 2i and 2i + 1 as a pair.

    Args:
        x_BSF: Projections [B, S, F]; S a multiple of 256.
        weight_D: The norm's gains; D is 128.
        cos_SD: Cosines, float32, each twice.
        sin_SD: Sines, likewise.
        eps: Added to the mean square.
        groups: N, into which the heads are parted.
        interpret: Run the kernel as plain JAX, on any platform.
        samples: Those that are taken, which lie one after another; all of them by default.

    Returns:
        [B, N, S, F / N] of x's dtype, B those that are taken; rounded as `rms_norm` and then once more.
    """
    batch, tokens, features = x_BSF.shape
    rows, part = min(ROWS, tokens), features // groups
    first, count = (0, batch) if samples is None else (samples.start, len(samples))
    note = current().note
    if note is not None:
        arguments = {"batch": count, "tokens": tokens, "features": features, "groups": groups}
        moved = 2 * x_BSF.nbytes // batch * count + count * (cos_SD.nbytes + sin_SD.nbytes)
        note(Pass("rms_norm_rotary", f"{__name__}:alone", arguments, count * (tokens // rows), moved))
    table = pl.BlockSpec((rows, LANES), lambda b, i: (i, 0))
    call = pl.pallas_call(
        functools.partial(_kernel, eps),
        grid=(count, tokens // rows),
        in_specs=[
            pl.BlockSpec((None, rows, features), lambda b, i: (first + b, i, 0)),
            pl.BlockSpec((1, LANES), lambda b, i: (0, 0)),
            table,
            table,
        ],
        out_specs=pl.BlockSpec((None, groups, rows, part), lambda b, i: (b, 0, i, 0)),
        out_shape=jax.ShapeDtypeStruct((count, groups, tokens, part), x_BSF.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        name="rms_norm_rotary",
        interpret=interpret,
    )
    output: jax.Array = call(x_BSF, weight_D[None], cos_SD, sin_SD)
    return output


def alone(
    batch: int, tokens: int, features: int, groups: int
) -> tuple[Callable[..., jax.Array], list[jax.ShapeDtypeStruct]]:
    """Returns `rms_norm_rotary` of bfloat16 projections and its tensors' shapes, for `bundles.compile_kernel`."""

    def run(x: jax.Array, weight: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        return rms_norm_rotary(x, weight, cos, sin, 1e-6, groups)

    table = jax.ShapeDtypeStruct((tokens, LANES), jnp.float32)
    gains = jax.ShapeDtypeStruct((LANES,), jnp.bfloat16)
    return run, [jax.ShapeDtypeStruct((batch, tokens, features), jnp.bfloat16), gains, table, table]


def _kernel(eps: float, x: Any, weight: Any, cos: Any, sin: Any, out: Any) -> None:
    """A block of tokens: x [rows, F], weight [1, D], cos and sin [rows, D], out [N, rows, F / N]."""
    groups, rows, part = out.shape
    per_group = part // LANES
    even = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1) % 2 == 0
    for head in range(groups * per_group):
        whole = x[:, head * LANES : (head + 1) * LANES].astype(jnp.float32)
        scaled = whole * lax.rsqrt(jnp.square(whole).mean(-1, keepdims=True) + eps)
        normal = (scaled.astype(weight.dtype) * weight[...]).astype(x.dtype).astype(jnp.float32)
        other = jnp.where(even, -pltpu.roll(normal, LANES - 1, 1), pltpu.roll(normal, 1, 1))
        here = slice(head % per_group * LANES, (head % per_group + 1) * LANES)
        out[head // per_group, :, here] = (normal * cos[...] + other * sin[...]).astype(out.dtype)
