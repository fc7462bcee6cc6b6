"""PyTorch's `scaled_dot_product_attention` in JAX: its masks are understood, not dropped.

Shapes: B batch, H heads, S queries, T keys, D features of a head.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from torchport.attention.dispatch import attention
from torchport.errors import AttentionError

MASK_LIMIT = 2**30
"""Bytes of the largest mask that is worth holding: 1 GiB, a bool mask of 32,768 x 32,768."""


def scaled_dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attn_mask: jax.Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> jax.Array:
    """Returns what `torch.nn.functional.scaled_dot_product_attention` does, through the one door.

    A bool mask over keys alone ([B, 1, 1, T], or fewer dims) becomes lengths: valid keys are moved to the front, which
    no sum over keys can tell. Any other mask is applied as it is, as long as somebody can hold it.

    Args:
        query: [..., S, D], two to four dims.
        key: [..., T, D].
        value: [..., T, D].
        attn_mask: bool or float, broadcast to [..., S, T].
        dropout_p: 0.
        is_causal: Whether query s sees keys up to s only.
        scale: 1 / sqrt(D) by default.
        enable_gqa: Whether keys and values have fewer heads, each used by several of the queries' heads.

    Returns:
        [..., S, D]; 0 for a query that sees no key.

    Raises:
        AttentionError: Dropout, a causal call with a mask, more than four dims, or a mask too large to hold.
    """
    if dropout_p:
        raise AttentionError("scaled_dot_product_attention", f"dropout_p is {dropout_p}", "It must be 0 in inference")
    if is_causal and attn_mask is not None:
        raise AttentionError("scaled_dot_product_attention", "It is causal and has a mask", "PyTorch takes one of them")
    lead = query.shape[:-2]
    if len(lead) > 2:
        raise AttentionError(
            "scaled_dot_product_attention", f"query is {list(query.shape)}", "At most 4 dims are known"
        )
    q, k, v = (_four(x) for x in (query, key, value))
    if enable_gqa:
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    queries = jnp.full(q.shape[:1], q.shape[2])
    if attn_mask is None:
        output = attention(q, k, v, query_lengths=queries, scale=scale, causal=is_causal)
    elif _over_keys(attn_mask):
        k, v, lengths = _valid_first(k, v, attn_mask)
        output = attention(q, k, v, lengths=lengths, query_lengths=queries, scale=scale)
    else:
        output = attention(q, k, v, query_lengths=queries, scale=scale, mask=_whole(attn_mask, q.shape, k.shape[2]))
    return output.reshape(*lead, *output.shape[-2:])


def _four(x: jax.Array) -> jax.Array:
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _over_keys(mask: jax.Array) -> bool:
    """Returns whether a mask says the same for every query and head."""
    alike = all(size == 1 for size in mask.shape[-3:-1])
    return bool(mask.dtype == jnp.bool_) and alike


def _valid_first(k: jax.Array, v: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns keys and values with the valid ones first, and how many they are in each sample."""
    batch, _, keys, _ = k.shape
    valid_BT = jnp.broadcast_to(mask.reshape(-1 if mask.ndim > 1 else 1, mask.shape[-1]), (batch, keys))
    order = jnp.argsort(~valid_BT, axis=1, stable=True)[:, None, :, None]
    return jnp.take_along_axis(k, order, axis=2), jnp.take_along_axis(v, order, axis=2), valid_BT.sum(axis=1)


def _whole(mask: jax.Array, query: tuple[int, ...], keys: int) -> jax.Array:
    """Returns a mask as [B or 1, H or 1, S, T].

    Raises:
        AttentionError: It takes more than `MASK_LIMIT` bytes.
    """
    mask = _four(mask)
    shape = (*mask.shape[:2], query[2], keys)
    size = math.prod(shape) * mask.dtype.itemsize
    if size > MASK_LIMIT:
        raise AttentionError(
            "scaled_dot_product_attention",
            f"Its mask {list(shape)} takes {size / 2**30:.1f} GiB",
            "Write a patch for the function that builds it: a mask over keys alone goes as lengths, "
            "`torchport.attention.for_torch.attention(q, k, v, lengths=...)`",
            bytes=size,
        )
    return jnp.broadcast_to(mask, shape)
