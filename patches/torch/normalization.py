"""PyTorch's layer normalization, as torchax traces it: statistics in float32, in one pass over the input.

Shapes: N rows in any number of dims, D features in the normalized ones.
"""

from __future__ import annotations

import math

FEW = 128
"""Features whose mean every feature is shifted by before it is squared: one register's width."""


def native_layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    """Returns what the ATen function of this name does, for torchax's tensors.

    Args:
        input: [*N, *D], floating point.
        normalized_shape: The sizes of D.
        weight: [*D], or None.
        bias: [*D], or None.
        eps: Added to the variance.

    Returns:
        The normalized input [*N, *D] in its own dtype, rounded once; the mean and the reciprocal of the deviation,
        [*N, 1, ...] in float32 or wider, as on CUDA.
    """
    from torchport import engine

    # What was widened is read as it was: XLA would write the wide copy to memory.
    x = engine.narrow(input)
    call = engine.call_jax if input.element_size() == 8 else engine.call_kernel  # a kernel has no float64
    return call(layer_norm, x, normalized_shape, weight, bias, eps, x.dtype != input.dtype)


def layer_norm(x_ND, normalized_shape, weight_D, bias_D, eps, in_float32=False):
    """Returns the same of JAX's arrays, in their dtype or in float32.

    Mean and variance come from sums of one pass: the variance from the mean of squares less the square of the mean.
    Where a row's mean is large beside its deviation, that would cancel. So the row is first shifted by the mean s of
    its first features: by Cauchy and Schwarz, (mean - s)^2 <= D / FEW * variance for any row, and the variance loses a
    few times D / FEW roundings of float32 at most (5e-6 of it was the worst found at D = 2048; bfloat16 has 4e-3). Of
    what is in float32 already, s is the mean of all features, which takes a pass more: XLA would write a copy for the
    few.
    """
    import jax.numpy as jnp
    from jax import lax

    rows = x_ND.shape[: x_ND.ndim - len(normalized_shape)]
    wide = jnp.promote_types(x_ND.dtype, jnp.float32)
    flat_ND = x_ND.reshape(*rows, math.prod(normalized_shape))
    # Taken before they are widened: what is widened once for two uses, XLA writes to memory.
    few = flat_ND if x_ND.dtype == wide else flat_ND[..., :FEW]
    shift_N1 = jnp.mean(few.astype(wide), -1, keepdims=True)
    shifted_ND = flat_ND.astype(wide) - shift_N1
    mean_N1 = jnp.mean(shifted_ND, -1, keepdims=True)
    variance_N1 = jnp.mean(lax.square(shifted_ND), -1, keepdims=True) - lax.square(mean_N1)
    # Of equal features, rounding can leave less than nothing.
    rstd_N1 = lax.rsqrt(jnp.maximum(variance_N1, 0) + eps)
    out_ND = (shifted_ND - mean_N1) * rstd_N1
    if weight_D is not None:
        out_ND = out_ND * weight_D.reshape(-1)
    if bias_D is not None:
        out_ND = out_ND + bias_D.reshape(-1)
    kept = (*rows, *(1 for _ in normalized_shape))
    out_ND = out_ND.astype(jnp.float32 if in_float32 else x_ND.dtype)
    return out_ND.reshape(x_ND.shape), (mean_N1 + shift_N1).reshape(kept), rstd_N1.reshape(kept)
