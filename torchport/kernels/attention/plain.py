"""Attention that runs everywhere, the reference for the other forms: float32 softmax, a tile of scores at a time.

Nothing is padded: the last tile of queries and the last chunk of keys start earlier instead. Keys that a chunk repeats
are masked, and outputs that a tile repeats are written again with the same values. The bounds of the loops are known
only at run time: this form has no reverse mode. docs/attention.md has the precision of each product.

Shapes: B batch, H heads, S queries, T keys, D features of a head; Q queries of a tile, C keys of a chunk.

Source: online softmax, Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); blocked over queries
and keys as in Rabe and Staats, "Self-attention does not need O(n^2) memory" (2021).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Window = tuple[int | None, int | None]


def without_padding(x_BHTD: jax.Array, lengths_B: jax.Array | None) -> jax.Array:
    """Returns keys or values with zeros beyond each sample's length: 0 * NaN is NaN, so weights of 0 do not suffice."""
    if lengths_B is None:
        return x_BHTD
    valid_BT = jnp.arange(x_BHTD.shape[2]) < lengths_B[:, None]
    return jnp.where(valid_BT[:, None, :, None], x_BHTD, jnp.zeros_like(x_BHTD))


def limits(causal: bool, window: Window | None) -> Window:
    """Returns how many keys a query sees to the left and right of its own index; None on a side without a limit."""
    left, right = window if window is not None else (None, None)
    if causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def visible(
    rows_S: jax.Array, columns_T: jax.Array, lengths_B: jax.Array | None, causal: bool, window: Window | None
) -> jax.Array:
    """Returns which keys each query sees by lengths, causality and window; the caller's mask is not applied here.

    Args:
        rows_S: int32 [S], indices of queries.
        lengths_B: int32 [B], numbers of valid keys; None: all keys are valid.
        window: Farthest key to the left and to the right that is seen.

    Returns:
        bool [B or 1, 1, S, T].
    """
    left, right = limits(causal, window)
    distance_ST = columns_T[None, :] - rows_S[:, None]
    seen_ST = jnp.ones(distance_ST.shape, bool)
    if left is not None:
        seen_ST &= distance_ST >= -left
    if right is not None:
        seen_ST &= distance_ST <= right
    if lengths_B is None:
        return seen_ST[None, None]
    return seen_ST[None, None] & (columns_T < lengths_B[:, None])[:, None, None, :]


def sees_a_key(queries: int, keys: int, lengths_B: jax.Array | None, causal: bool, window: Window | None) -> jax.Array:
    """Returns which queries see any key at all, bool [B or 1, 1, S, 1]; the output of the others is 0."""
    left, right = limits(causal, window)
    rows_S = jnp.arange(queries)
    first_S = jnp.maximum(rows_S - left, 0) if left is not None else jnp.zeros_like(rows_S)
    ends_B = jnp.asarray([keys]) if lengths_B is None else lengths_B
    ends_BS = jnp.broadcast_to(ends_B[:, None], (ends_B.shape[0], queries))
    if right is not None:
        ends_BS = jnp.minimum(ends_BS, rows_S + right + 1)
    return (first_S < ends_BS)[:, None, :, None]


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """The arguments of `attention`; all but the arrays are known before tracing."""

    q: jax.Array  # [B, H, S, D]
    k: jax.Array  # [B, H, T, D]
    v: jax.Array  # [B, H, T, D]
    lengths: jax.Array | None  # int32 [B]
    mask: jax.Array | None  # bool or float, [B or 1, H or 1, S, T]
    scale: float
    causal: bool
    window: Window | None
    block_q: int
    block_kv: int

    def chunks(self, first_row: Any) -> tuple[Any, Any]:
        """Returns the chunks that the tile of queries at `first_row` sees: the first, and the chunk after the last."""
        left, right = limits(self.causal, self.window)
        keys = self.k.shape[2]
        if keys <= self.block_kv:
            return 0, 1  # Python integers: a plan must know the length of the loop
        end = jnp.int32(keys) if self.lengths is None else jnp.minimum(jnp.max(self.lengths), keys)
        if right is not None:
            end = jnp.minimum(end, first_row + self.block_q + right)
        start = jnp.int32(0) if left is None else jnp.maximum(first_row - left, 0) // self.block_kv
        return start, (end + self.block_kv - 1) // self.block_kv

    def scores(self, q_BHQD: jax.Array, first_row: Any, first_column: Any, first_new: Any) -> jax.Array:
        """Returns the scores of a tile and a chunk, float32 [B, H, Q, C], with -inf for keys that take no part."""
        k_BHCD = lax.dynamic_slice_in_dim(self.k, first_column, self.block_kv, axis=2)
        precision = lax.Precision.HIGHEST if q_BHQD.dtype == jnp.float32 else None
        s_BHQC = self.scale * jnp.einsum(
            "bhqd,bhcd->bhqc", q_BHQD, k_BHCD, precision=precision, preferred_element_type=jnp.float32
        )
        columns_C = first_column + jnp.arange(self.block_kv)
        rows_Q = first_row + jnp.arange(self.block_q)
        # Keys before `first_new` were in an earlier chunk.
        seen = visible(rows_Q, columns_C, self.lengths, self.causal, self.window) & (columns_C >= first_new)
        if self.mask is not None:
            block = lax.dynamic_slice_in_dim(self.mask, first_row, self.block_q, axis=2)
            block = lax.dynamic_slice_in_dim(block, first_column, self.block_kv, axis=3)
            if block.dtype == jnp.bool_:
                seen = seen & block
            else:
                s_BHQC = s_BHQC + block.astype(jnp.float32)
        return jnp.where(seen, s_BHQC, -jnp.inf)


def _outputs_of_tile(inputs: _Inputs, first_row: Any) -> jax.Array:
    """Returns the outputs of the tile of queries that starts at `first_row`, [B, H, Q, D] of q's dtype."""
    q_BHQD = lax.dynamic_slice_in_dim(inputs.q, first_row, inputs.block_q, axis=2)
    batch, heads, queries, _ = q_BHQD.shape
    keys, size = inputs.v.shape[2:]

    def add_chunk(j: Any, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Adds a chunk of keys by online softmax: to the running maximum, the sums and the outputs."""
        peak_BHQ1, sum_BHQ1, o_BHQD = carry
        first_new = j * inputs.block_kv  # the chunks before have had the keys before it
        first_column = jnp.minimum(first_new, keys - inputs.block_kv)
        s_BHQC = inputs.scores(q_BHQD, first_row, first_column, first_new)
        after_BHQ1 = jnp.maximum(peak_BHQ1, s_BHQC.max(-1, keepdims=True))
        # -inf - -inf is NaN: scores of a query that has seen no key yet are measured from 0.
        origin_BHQ1 = jnp.where(after_BHQ1 == -jnp.inf, 0.0, after_BHQ1)
        p_BHQC = jnp.exp(s_BHQC - origin_BHQ1)
        shrink_BHQ1 = jnp.exp(peak_BHQ1 - origin_BHQ1)
        v_BHCD = lax.dynamic_slice_in_dim(inputs.v, first_column, inputs.block_kv, axis=2)
        valid_B = None if inputs.lengths is None else inputs.lengths - first_column
        v_BHCD = without_padding(v_BHCD, valid_B).astype(jnp.float32)
        more_BHQD = jnp.einsum("bhqc,bhcd->bhqd", p_BHQC, v_BHCD, precision=lax.Precision.HIGHEST)
        return after_BHQ1, sum_BHQ1 * shrink_BHQ1 + p_BHQC.sum(-1, keepdims=True), o_BHQD * shrink_BHQ1 + more_BHQD

    start = (
        jnp.full((batch, heads, queries, 1), -jnp.inf, jnp.float32),
        jnp.zeros((batch, heads, queries, 1), jnp.float32),
        jnp.zeros((batch, heads, queries, size), jnp.float32),
    )
    _, sum_BHQ1, o_BHQD = lax.fori_loop(*inputs.chunks(first_row), add_chunk, start)
    # A query that sees no key has the sum 0 and the output 0. `where` computes both its values: it divides by 1.
    o_BHQD = jnp.where(sum_BHQ1 == 0, 0.0, o_BHQD / jnp.where(sum_BHQ1 == 0, 1.0, sum_BHQ1))
    return o_BHQD.astype(q_BHQD.dtype)


# Where operators are called one by one, JAX would compile the loops anew in each call: their bodies are new functions.
@functools.partial(jax.jit, static_argnames=("scale", "causal", "window", "block_q", "block_kv"), inline=True)
def attention(
    q_BHSD: jax.Array,
    k_BHTD: jax.Array,
    v_BHTD: jax.Array,
    *,
    lengths_B: jax.Array | None,
    scale: float,
    causal: bool,
    window: Window | None,
    mask: jax.Array | None = None,
    block_q: int = 512,
    block_kv: int = 1024,
) -> jax.Array:
    """Returns softmax(scale * q k^T + mask) v, computed in float32 a tile at a time.

    `dispatch.attention` describes the other arguments and the result.

    Args:
        q_BHSD: Queries [B, H, S, D], bfloat16 or float32.
        mask: bool (True takes part) or float (added to the scaled scores), [B or 1, H or 1, S, T]. The whole mask is
            in memory, so it must be small.
        block_q: Queries of a tile, at most.
        block_kv: Keys of a chunk, at most. The scores in memory are B * H * block_q * block_kv float32.
    """
    queries, keys = q_BHSD.shape[2], k_BHTD.shape[2]
    block_q = min(block_q, queries)
    block_kv = min(block_kv, keys)
    inputs = _Inputs(q_BHSD, k_BHTD, v_BHTD, lengths_B, mask, scale, causal, window, block_q, block_kv)

    def write_tile(i: Any, o_BHSD: jax.Array) -> jax.Array:
        # The last tile overlaps the tile before it, so that all tiles have the same size.
        first_row = jnp.minimum(i * block_q, queries - block_q)
        return lax.dynamic_update_slice_in_dim(o_BHSD, _outputs_of_tile(inputs, first_row), first_row, axis=2)

    o_BHSD = jnp.zeros((*q_BHSD.shape[:3], v_BHTD.shape[3]), q_BHSD.dtype)
    return lax.fori_loop(0, -(-queries // block_q), write_tile, o_BHSD)
