"""Attention of a decoder's middle: each position sees its own frame, and if it is causal all earlier ones, too.

All keys are brought to every device, and each computes its own queries, a frame at a time. So the scores of a frame are
all that is held of the (T H W) x (T H W) there are.

Shapes: B batch, C channels of the one head, T frames, H rows, W columns.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from torchport.kernels.convolution import canvas
from torchport.kernels.convolution.canvas import Canvas


def attention(causal: bool, q_BCTHW: jax.Array, k_BCTHW: jax.Array, v_BCTHW: jax.Array) -> jax.Array:
    """Returns it for latents on the canvas that is set, [B, C, T, H, W]; padding takes no part."""
    form = canvas.current()
    if jax.sharding.get_abstract_mesh().empty:
        return _local(form, causal, q_BCTHW, k_BCTHW, v_BCTHW)

    def local(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = (_whole(form, x) for x in (k, v))
        return _local(form, causal, q, k, v)

    out: jax.Array = jax.shard_map(local, in_specs=(form.spec,) * 3, out_specs=form.spec, check_vma=False)(
        q_BCTHW, k_BCTHW, v_BCTHW
    )
    return out


def _whole(form: Canvas, x: jax.Array) -> jax.Array:
    for axes, dim in ((form.rows, 3), (form.columns, 4)):
        x = lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x
    return x


def _local(form: Canvas, causal: bool, q_BCTHW: jax.Array, k_BCTHW: jax.Array, v_BCTHW: jax.Array) -> jax.Array:
    """Returns attention of some queries to all keys; all are [B, C, T, h, w]."""
    batch, channels, frames, height, width = k_BCTHW.shape
    rows, columns, lead = form.valid_rows(height), form.valid_columns(width), form.lead
    k_BCTS, v_BCTS = (x[..., :rows, :columns].reshape(batch, channels, frames, -1) for x in (k_BCTHW, v_BCTHW))
    q = jnp.moveaxis(q_BCTHW.reshape(*q_BCTHW.shape[:3], -1), 2, 0)
    k, v = (x.reshape(batch, channels, -1) for x in (k_BCTS, v_BCTS))
    frame_of_key = jnp.repeat(jnp.arange(frames), rows * columns)

    def sample(item: tuple[jax.Array, jax.Array]) -> jax.Array:
        # Frames of padding are the first frame once more.
        seen = (frame_of_key >= lead) & (frame_of_key <= jnp.maximum(item[0], lead))
        return _attended(item[1], k, v, seen)

    if causal:
        out = lax.map(sample, (jnp.arange(frames), q))
    else:
        out = lax.map(lambda item: _attended(*item), (q, jnp.moveaxis(k_BCTS, 2, 0), jnp.moveaxis(v_BCTS, 2, 0)))
    return jnp.moveaxis(out, 0, 2).reshape(q_BCTHW.shape)


def _attended(q_BCS: jax.Array, k_BCT: jax.Array, v_BCT: jax.Array, seen_T: jax.Array | None = None) -> jax.Array:
    scores = jnp.einsum("bcs,bct->bst", q_BCS * q_BCS.shape[1] ** -0.5, k_BCT, preferred_element_type=jnp.float32)
    scores = scores if seen_T is None else jnp.where(seen_T, scores, -jnp.inf)
    return jnp.einsum("bst,bct->bcs", jax.nn.softmax(scores, axis=-1).astype(v_BCT.dtype), v_BCT)
