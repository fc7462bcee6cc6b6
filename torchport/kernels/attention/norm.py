"""The norms of queries and keys, as data: what is subtracted, what is squared, and where PyTorch rounds.

Shapes: B batch, S tokens, H heads, D features of a head, F = H * D.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Norm:
    """A norm of each head's features, or of the features of all heads together."""

    weight: jax.Array  #: Gains: [D] of each head, or [F] of all heads together.
    bias: jax.Array | None  #: Offsets, likewise; or None.
    #: Added to the mean square.
    eps: float = dataclasses.field(metadata={"static": True})
    #: Whether the mean is subtracted first: LayerNorm.
    centred: bool = dataclasses.field(default=False, metadata={"static": True})
    #: Whether the result is rounded to the gains' dtype before the gains multiply it, as the RMSNorm of PyTorch models

    #: is; otherwise it is rounded once, as PyTorch's own norms are.
    twice: bool = dataclasses.field(default=False, metadata={"static": True})

    def is_over_all(self, size: int) -> bool:
        """Returns whether it is of all heads together, where a head has `size` features."""
        return int(self.weight.shape[0]) != size

    def scaled(self, normal: jax.Array, weight: jax.Array, bias: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
        """Returns float32 features of mean square 1 with gains and offsets, rounded to a dtype as PyTorch rounds.

        Args:
            normal: Features, float32.
            weight: Their gains, in any dtype that holds them.
            bias: Their offsets, or None.
            dtype: Of the result.
        """
        if self.twice:
            rounded = normal.astype(self.weight.dtype).astype(jnp.float32) * weight.astype(jnp.float32)
            normal = rounded.astype(self.weight.dtype).astype(jnp.float32)
        else:
            normal = normal * weight.astype(jnp.float32)
        if bias is not None:
            normal = normal + bias.astype(jnp.float32)
        return normal.astype(dtype)


def normalised(x_BSF: jax.Array, norm: Norm | None, axis: str | None = None) -> jax.Array:
    """Returns projections after a norm, of their own dtype.

    Args:
        x_BSF: Projections [B, S, F].
        norm: None: they are returned as they are.
        axis: The mesh's axis that parts F, where the norm is of all heads together and devices have parts of it.
    """
    if norm is None:
        return x_BSF

    def mean(x: jax.Array) -> jax.Array:
        own = x.mean(-1, keepdims=True)
        return own if axis is None else lax.pmean(own, axis)

    x = x_BSF.reshape(*x_BSF.shape[:2], -1, norm.weight.shape[0]).astype(jnp.float32)
    x = x - mean(x) if norm.centred else x
    x = x * lax.rsqrt(mean(jnp.square(x)) + norm.eps)
    return norm.scaled(x, norm.weight, norm.bias, x_BSF.dtype).reshape(x_BSF.shape)
