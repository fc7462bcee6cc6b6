"""JAX's own Splash Attention, with exact padding at no cost: docs/attention.md says how, and why this kernel.

bfloat16 inputs: the scale is applied to q in float32 and rounded, which is exact when it is a power of 2 and otherwise
adds a rounding as large as the inputs' own. float32 inputs: products at `highest`.

Shapes: B batch, H heads, S queries, T keys, D features of a head. B and H are one dim to the kernel.

Source: jax 0.10.2, `splash_attention_kernel.py`. Masking the padding in the product is our idea.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

from torchport.errors import AttentionError
from torchport.kernels.attention.plain import Window, limits, sees_a_key, without_padding
from torchport.kernels.attention.tiles import LANES, SplashTile, rounded_up

USUAL_TILE = SplashTile(2048, 2048, 1024)
HIDDEN = -(2.0**100)
"""Score of a padded key: exact in bfloat16, far below any real score, and far above the kernel's own -2.4e38."""

FEATURES = 8
"""Features added to a head for the padding: a single feature would do, eight are a whole sublane."""


def _mask(shape: tuple[int, int], sides: Window) -> Any:
    """Returns the kernel's mask [S, T] for a window of keys around each query: full, causal, or local."""
    if sides == (None, None):
        return splash_attention_mask.FullMask(shape)
    if sides == (None, 0):
        return splash_attention_mask.CausalMask(shape)
    return splash_attention_mask.LocalMask(shape, sides, offset=0)


def _check_tile(tile: SplashTile) -> None:
    """Refuses a tile whose sizes are not the multiples that the kernel computes at once."""
    for name, block in dataclasses.asdict(tile).items():
        if block <= 0 or block % LANES:
            remedy = f"Give a multiple of {LANES}"
            raise AttentionError("attention 'splash'", f"{name} is {block}", remedy, **{name: block})
    if tile.block_kv % tile.block_kv_compute:
        raise AttentionError(
            "attention 'splash'",
            f"block_kv is {tile.block_kv} with a block_kv_compute of {tile.block_kv_compute}",
            "Give a block_kv that is a multiple of block_kv_compute",
            block_kv=tile.block_kv,
            block_kv_compute=tile.block_kv_compute,
        )


def _padded(x_BHTD: jax.Array, tokens: int, first_BT: jax.Array | None = None) -> jax.Array:
    """Returns queries, keys or values as [B * H, tokens, D], padded with zeros. With `first_BT` [B, tokens], each head
    gets `FEATURES` more features: the first is `first_BT`, and the others are 0.
    """
    batch, heads, have, size = x_BHTD.shape
    more = 0 if first_BT is None else FEATURES
    x_BHTD = jnp.pad(x_BHTD, ((0, 0), (0, 0), (0, tokens - have), (0, more)))
    if first_BT is not None:
        # A select, not a concatenation: XLA makes one pass of it and the padding.
        here_D = jnp.arange(size + more) == size
        x_BHTD = jnp.where(here_D, first_BT[:, None, :, None].astype(x_BHTD.dtype), x_BHTD)
    return x_BHTD.reshape(batch * heads, tokens, size + more)


def attention(
    q_BHSD: jax.Array,
    k_BHTD: jax.Array,
    v_BHTD: jax.Array,
    *,
    lengths_B: jax.Array | None,
    scale: float,
    causal: bool,
    window: Window | None,
    tile: SplashTile = USUAL_TILE,
    padding: Literal["feature", "segments"] = "feature",
    interpret: bool = False,
) -> jax.Array:
    """Returns softmax(scale * q k^T) v by JAX's Splash Attention kernel, padding masked exactly.

    `dispatch.attention` describes the other arguments and the result.

    Args:
        q_BHSD: Queries [B, H, S, D], bfloat16 or float32.
        tile: How the work is cut, at most. The larger tiles need a larger scoped VMEM than XLA's default
            (`xla_tpu_scoped_vmem_limit_kib`).
        padding: How padded keys are hidden: by an added feature, or by segment ids, which suit matrix units 128 wide
            (v5e, v5p) with a head size of 128 or a multiple.
    """
    batch, heads, queries, _ = q_BHSD.shape
    keys, size = v_BHTD.shape[2:]
    _check_tile(tile)
    tile = tile.fitted(queries, keys)
    all_queries, all_keys = rounded_up(queries, tile.block_q), rounded_up(keys, tile.block_kv)
    q_BHSD = (q_BHSD.astype(jnp.float32) * scale).astype(q_BHSD.dtype)
    one_BS = hidden_BT = valid_BT = None
    if lengths_B is not None or all_keys > keys:
        ends_B = jnp.full((batch,), keys, jnp.int32) if lengths_B is None else lengths_B
        valid_BT = jnp.arange(all_keys) < ends_B[:, None]
        if padding == "feature":  # a query's is 1 and a padded key's is HIDDEN, so their product hides the key
            one_BS, hidden_BT = jnp.ones((batch, all_queries)), jnp.where(valid_BT, 0.0, HIDDEN)
            valid_BT = None  # the kernel needs no segment ids
    mask = _mask((all_queries, all_keys), limits(causal, window))
    q_NSD = _padded(q_BHSD, all_queries, one_BS)
    k_NTD = _padded(without_padding(k_BHTD, lengths_B), all_keys, hidden_BT)
    v_NTD = _padded(without_padding(v_BHTD, lengths_B), all_keys)
    o_NSD = _run(mask, tile, q_NSD, k_NTD, v_NTD, valid_BT, interpret=interpret)
    o_BHSD = o_NSD.reshape(batch, heads, all_queries, size)[:, :, :queries]
    seen = sees_a_key(queries, keys, lengths_B, causal, window)
    return jnp.where(seen, o_BHSD, jnp.zeros_like(o_BHSD))


def _run(
    mask: Any,
    tile: SplashTile,
    q_NSD: jax.Array,
    k_NTD: jax.Array,
    v_NTD: jax.Array,
    valid_BT: jax.Array | None,
    interpret: bool,
) -> jax.Array:
    """Runs the kernel over N = B * H heads at once; with `valid_BT`, sample by sample with its segment ids."""
    rows = q_NSD.shape[0]
    heads = rows if valid_BT is None else rows // valid_BT.shape[0]
    precise = jax.default_matmul_precision("highest") if q_NSD.dtype == jnp.float32 else contextlib.nullcontext()
    with precise:
        kernel = splash_attention_kernel.make_splash_mha(
            splash_attention_mask.MultiHeadMask([mask] * heads),
            block_sizes=splash_attention_kernel.BlockSizes(**dataclasses.asdict(tile)),
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )
        if valid_BT is None:
            return jnp.asarray(kernel(q_NSD, k_NTD, v_NTD))
        real_BS = jnp.ones((valid_BT.shape[0], q_NSD.shape[1]), jnp.int32)
        ids = splash_attention_kernel.SegmentIds(real_BS, valid_BT.astype(jnp.int32))
        by_sample = [x.reshape(-1, heads, *x.shape[1:]) for x in (q_NSD, k_NTD, v_NTD)]
        o_BHSD = jax.vmap(lambda q, k, v, ids: kernel(q, k, v, segment_ids=ids))(*by_sample, ids)
        return jnp.asarray(o_BHSD).reshape(rows, *o_BHSD.shape[2:])
