"""PyTorch's `scaled_dot_product_attention` in JAX, with its masks.

Shapes: B batch, H heads, S queries, T keys, D features of a head.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from torchport.errors import AttentionError
from torchport.kernels.attention.dispatch import attention
from torchport.progress import size_text

MASK_LIMIT = 2**30
"""The most bytes of a mask: 1 GiB, a bool mask of 32,768 x 32,768."""


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
    """Computes `torch.nn.functional.scaled_dot_product_attention` in JAX, by `dispatch.attention`.

    A bool mask over keys alone ([B, H or 1, 1, T], or fewer dims) becomes lengths: valid keys move to the front. The
    order of keys does not change the result. Any other mask is applied as it is, if it fits into `MASK_LIMIT` bytes.

    Args:
        query: [..., S, D], two dims or more; the dim before S is that of the heads.
        key: [..., T, D]; a batch or head dim of 1 stands for all of the queries', and the other way round.
        attn_mask: bool or float, broadcast to [..., S, T].

    Returns:
        [..., S, D]; 0 for a query that sees no key.
    """
    if attn_mask is not None and not (attn_mask.dtype == jnp.bool_ or jnp.issubdtype(attn_mask.dtype, jnp.floating)):
        fact = f"The mask is {attn_mask.dtype}"
        raise AttentionError("scaled_dot_product_attention", fact, "It must be bool, or float and added")
    if dropout_p:
        raise AttentionError("scaled_dot_product_attention", f"dropout_p is {dropout_p}", "It must be 0 in inference")
    if is_causal and attn_mask is not None:
        raise AttentionError("scaled_dot_product_attention", "It is causal and has a mask", "PyTorch takes one of them")
    batch = _batch_dims(query, key, value, attn_mask)
    dims = max(x.ndim for x in (query, key, value))
    if dims > 4:
        if attn_mask is not None and attn_mask.ndim > 3:
            is_same = math.prod(attn_mask.shape[:-3]) == 1  # for all samples: copies of it would take memory
            attn_mask = _one_batch(attn_mask, (1,) * len(batch) if is_same else batch)
        query, key, value = (_one_batch(x, batch) for x in (query, key, value))
        folded = scaled_dot_product_attention(
            query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return folded.reshape(*batch, *folded.shape[1:])
    q, k, v = (_with_four_dims(x) for x in (query, key, value))
    if enable_gqa:
        k, v = (_repeat_heads(x, q.shape[1]) for x in (k, v))
    # A batch or head dim of 1 stands for all. Other sizes that differ are refused by `attention`.
    lead = [max(sizes) for sizes in zip(q.shape[:2], k.shape[:2], v.shape[:2], strict=True)]
    q, k, v = (
        jnp.broadcast_to(x, [*(m if n == 1 else n for n, m in zip(x.shape[:2], lead, strict=True)), *x.shape[2:]])
        for x in (q, k, v)
    )
    scale = q.shape[3] ** -0.5 if scale is None else scale
    widest = max(q.shape[3], v.shape[3])  # zeros change no product
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, widest - x.shape[3]))) for x in (q, k, v))
    if attn_mask is None:
        output = attention(q, k, v, scale=scale, causal=is_causal)
    elif attn_mask.dtype == jnp.bool_ and (attn_mask.ndim < 2 or attn_mask.shape[-2] == 1):
        output = _over_valid_keys(q, k, v, attn_mask, scale)
    else:
        output = attention(q, k, v, scale=scale, mask=_full_mask(attn_mask, q.shape, k.shape[2]))
    return output[..., : value.shape[-1]].reshape(*output.shape[4 - dims : 3], value.shape[-1])


def _batch_dims(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None) -> tuple[int, ...]:
    """Returns the dims of a call before the heads; refuses tensors and a mask that do not broadcast."""
    tensors = (query, key, value)
    heads = max(size for x in tensors for size in (1, *x.shape[-3:-2]))  # 1 for a tensor without a dim of heads
    try:
        batch = jnp.broadcast_shapes(*(x.shape[:-3] for x in tensors))
        scores = (*(batch or (1,)), heads, query.shape[-2], key.shape[-2])
        fits = mask is None or jnp.broadcast_shapes(mask.shape, scores) == scores
    except ValueError:
        fits = False
    if not fits:
        fact = f"query is {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
        fact = fact if mask is None else f"{fact}, and the mask {list(mask.shape)}"
        remedy = "Batch dims must be equal or 1, and the mask must broadcast to [..., H, S, T]"
        raise AttentionError("scaled_dot_product_attention", fact, remedy)
    return batch


def _repeat_heads(x: jax.Array, heads: int) -> jax.Array:
    """Returns keys or values with each head repeated for all queries' heads that share it (grouped-query attention)."""
    if heads % x.shape[1]:
        fact = f"Queries have {heads} heads, and keys or values {x.shape[1]}"
        raise AttentionError("scaled_dot_product_attention", fact, "With enable_gqa it must divide")
    return jnp.repeat(x, heads // x.shape[1], axis=1)


def _with_four_dims(x: jax.Array) -> jax.Array:
    """Returns an array with dims of 1 in front, up to four dims: [T] becomes [1, 1, 1, T]."""
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _one_batch(x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Returns an array with its batch dims as a single dim: [2, 5, H, S, D] becomes [10, H, S, D] for (2, 5)."""
    x = x.reshape((1,) * (3 - x.ndim) + x.shape)
    return jnp.broadcast_to(x, (*batch, *x.shape[-3:])).reshape(-1, *x.shape[-3:])


def _over_valid_keys(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, scale: float | None) -> jax.Array:
    """Returns attention under a mask over keys: valid keys move to the front, and their number becomes a length."""
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    mask = _with_four_dims(mask)
    mask = jnp.broadcast_to(mask[:, :, 0], (batch, heads if mask.shape[1] > 1 else 1, keys))
    if mask.shape[1] > 1:  # each head becomes a sample
        q, k, v = (x.reshape(batch * heads, 1, *x.shape[2:]) for x in (q, k, v))
    valid_BT = mask.reshape(-1, keys)
    order = jnp.argsort(~valid_BT, axis=1, stable=True)[:, None, :, None]
    k = jnp.take_along_axis(k, order, axis=2)
    v = jnp.take_along_axis(v, order, axis=2)
    all_queries = jnp.full(q.shape[:1], queries)
    output = attention(q, k, v, lengths=valid_BT.sum(axis=1), query_lengths=all_queries, scale=scale)
    return output.reshape(batch, heads, *output.shape[2:])


def _full_mask(mask: jax.Array, query: tuple[int, ...], keys: int) -> jax.Array:
    """Returns a mask as [B or 1, H or 1, S, T]; refuses a mask of more than `MASK_LIMIT` bytes."""
    mask = _with_four_dims(mask)
    shape = (*mask.shape[:2], query[2], keys)
    size = math.prod(shape) * mask.dtype.itemsize
    if size > MASK_LIMIT:
        raise AttentionError(
            "scaled_dot_product_attention",
            f"Its mask {list(shape)} takes {size_text(size)}",
            "Write a patch for the function that builds it: a mask over keys alone goes as lengths, "
            "`torchport.kernels.attention.for_torch.attention(q, k, v, lengths=...)`",
            bytes=size,
        )
    return jnp.broadcast_to(mask, shape)
