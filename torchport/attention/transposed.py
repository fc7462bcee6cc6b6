"""`splash_transposed`: the project's own kernel (see `transposed_kernel`), and how q, k and v are brought to it.

Shapes: B batch, H heads, S queries, T keys, D features of a head; G groups of heads that share a tile, g heads in one,
W = g * D features of a group.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torchport.attention.bound import LOG2E
from torchport.attention.tiles import LANES, TAIL, Tile, up
from torchport.attention.transposed_kernel import Plan, kernel, scratch


def attention(
    q_BHSD: jax.Array,
    k_BHTD: jax.Array,
    v_BHTD: jax.Array,
    *,
    lengths_B: jax.Array | None,
    scale: float,
    bounded: bool,
    tile: Tile,
    vmem_bytes: int,
    interpret: bool = False,
) -> jax.Array:
    """Returns softmax(scale * q k^T) v over the first `lengths` keys of each sample.

    Args:
        q_BHSD: Queries [B, H, S, D], bfloat16 or float32.
        k_BHTD: Keys [B, H, T, D]; those beyond a sample's length may hold anything.
        v_BHTD: Values [B, H, T, D], likewise.
        lengths_B: int32 [B], 0 to T; None: all keys.
        scale: What scores are multiplied by.
        bounded: The caller's word that every score lies within `bound.LIMIT` (`bound.holds`).
        tile: How the work is cut.
        vmem_bytes: What the compiler may use of VMEM.
        interpret: Run the kernel as plain JAX, on any platform.

    Returns:
        [B, H, S, D] of q's dtype; 0 where the length is 0. bfloat16 probabilities with bfloat16 inputs, float32 sums.
    """
    batch, all_heads, queries, size = q_BHSD.shape
    keys = k_BHTD.shape[2]
    heads, head_size = grouping(all_heads, size)
    fitted = tile.fitted(queries, keys)
    precision = lax.Precision.HIGHEST if q_BHSD.dtype == jnp.float32 else None
    plan = Plan(fitted, heads, head_size, all_heads // heads, scale * LOG2E, bounded, precision)
    if lengths_B is None:
        lengths_B = jnp.full((batch,), keys, jnp.int32)
    q = _grouped(q_BHSD, plan, queries)
    k = _grouped(k_BHTD, plan, up(keys, TAIL))
    v = _grouped(v_BHTD, plan, up(keys, TAIL))
    # Columns of 128 keys, each with all features: the layout that the kernel's second product reads.
    v = v.reshape(v.shape[0], -1, LANES, v.shape[2]).swapaxes(2, 3)
    out = _call(plan, lengths_B.astype(jnp.int32), q, k, v, vmem_bytes, interpret)
    out = out.reshape(batch, all_heads, head_size, queries)[:, :, :size]
    return jnp.swapaxes(out, 2, 3)


def _call(
    plan: Plan, lengths_B: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, vmem_bytes: int, interpret: bool
) -> jax.Array:
    """Returns [B * G, W, S] of queries [B * G, S, W], keys [B * G, T, W] and values [B * G, T / 128, W, 128]."""
    rows, queries, width = q.shape
    block_q = plan.tile.block_q
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(kernel, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows, -(-queries // block_q)),
            in_specs=[pl.BlockSpec((None, block_q, width), lambda r, i, _: (r, i, 0)), hbm, hbm],
            out_specs=pl.BlockSpec((None, width, block_q), lambda r, i, _: (r, 0, i)),
            scratch_shapes=scratch(plan, q.dtype),
        ),
        out_shape=jax.ShapeDtypeStruct((rows, width, queries), q.dtype),
        compiler_params=pltpu.CompilerParams(
            # Heads are independent; a tile finds its first chunk fetched by the tile before it.
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=vmem_bytes,
        ),
        name="splash_transposed",
        interpret=interpret,
    )(lengths_B, q, k, v)


def grouping(heads: int, size: int) -> tuple[int, int]:
    """Returns how many heads share a tile, and the head size to which features are padded with zeros.

    Two heads of at most 64 features lie side by side in the 128 lanes; the matrix unit takes no longer for both than
    it would for zeros in their place.
    """
    if size <= LANES // 2 and heads % 2 == 0:
        return 2, LANES // 2
    return 1, up(size, LANES)


def _grouped(x_BHTD: jax.Array, plan: Plan, tokens: int) -> jax.Array:
    """Returns tokens as [B * G, tokens, W]: the heads of a group side by side, padded with zeros."""
    batch, heads, have, size = x_BHTD.shape
    if (have, size) != (tokens, plan.head_size):
        x_BHTD = jnp.pad(x_BHTD, ((0, 0), (0, 0), (0, tokens - have), (0, plan.head_size - size)))
    if plan.heads == 1:
        return x_BHTD.reshape(batch * heads, tokens, plan.head_size)
    x = x_BHTD.reshape(batch, plan.groups, plan.heads, tokens, plan.head_size)
    return jnp.swapaxes(x, 2, 3).reshape(batch * plan.groups, tokens, plan.heads * plan.head_size)
