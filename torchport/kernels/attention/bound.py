"""Upper bounds of attention scores: from the gains of the q and k norms before any token is seen, or from the tokens.

Softmax needs no maximum where no exponential can overflow and no sum can vanish: `exp2(s) / sum(exp2(s))` is exact as
it stands when every score, in units of log 2, lies within `LIMIT`. docs/attention.md derives the bound.

Source: the idea of a bound in place of the running maximum is maxdiffusion's (`custom_splash_attention.py`, pull
requests 436 and 452, Apache-2.0), which takes it from the tokens at run time and subtracts it. The static form without
a subtraction, the mean key as the centre, and the check that no sum vanishes are ours.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy
from jax import lax

from torchport.errors import BadValueError, DeadRuleError, nearest

LOG2E = math.log2(math.e)

LIMIT = 80.0
"""The largest score, in units of log 2, for which softmax needs no maximum.

Underflow: every exponential is at least 2^-80, far from where float32 and bfloat16 lose precision (2^-126), so that
nothing is flushed and every term keeps its relative precision. Overflow: a row's sum is at most T * 2^80, and with the
values T * 2^80 * max|v|; for T up to 2^17 keys that stays finite for values up to 2^30 (1e9). At the other end, if all
scores of a row are near -80, values below 2^-46 (1e-14) lose precision, as their products come near 2^-126.
"""

ROUNDING = 1.0 + 2.0**-4
"""What bfloat16 may add to a product, 16 roundings of at most 2^-8 each.

On either side: the norm's result, its product with the gain, and the rotation, whose length grows by 2^-8 where it is
computed in float32, and where it is not by (1 + 2 sqrt(2)) 2^-8: that of the sum, and those of tables and products, of
which each feature takes two. Together up to 1.023 and 1.047 (measured: 1.0211 and 1.0306). LayerNorm whose statistics
are rounded too, as torchax computes it in bfloat16, may reach 1.08: the range that `LIMIT` leaves to values takes that.
"""


def holds(bound: float | None) -> bool:
    """Returns whether scores within a bound (scaled, in natural units) need no running maximum; False for None."""
    return bound is not None and bound * LOG2E * ROUNDING <= LIMIT


def shifts(
    q_BSF: jax.Array, arrays: Sequence[tuple[jax.Array, jax.Array]], head_size: int, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Returns what to subtract from each query's scores for softmax to need no maximum, and whether that is so.

    Let c be the mean key of a head, and R the distance of the furthest key from c. The scores of a query q have the
    mean q . c. So the largest is not below q . c, and none is more than |q| R above. Less q . c + |q| R / 2, no score
    is above |q| R / 2, and the largest is not below -|q| R / 2: softmax needs no maximum if that is within `LIMIT`.

    Args:
        q_BSF: Queries, heads side by side.
        arrays: Keys [B, T, F], and the number of valid keys, int32 [B]; keys after them may hold anything.
        head_size: D.
        scale: Of the scores, in units of log 2, as are the shifts. It may be negative.

    Returns:
        Shifts, float32 [B, H, S]; and whether they do for all queries, bool [].
    """
    # XLA would move a reshape of the caller's behind the arithmetic here, and write out what the products read.
    q_BSF, arrays = lax.optimization_barrier((q_BSF, list(arrays)))
    ones_FH = jnp.repeat(jnp.eye(q_BSF.shape[2] // head_size, dtype=jnp.bfloat16), head_size, axis=0)

    def sums_by_head(x_BTF: jax.Array) -> jax.Array:
        """Returns the sums of each head's features, float32 [H, B, T], by the matrix unit."""
        sums_BTH = jnp.matmul(x_BTF.astype(jnp.bfloat16), ones_FH, preferred_element_type=jnp.float32)
        return jnp.moveaxis(sums_BTH, 2, 0)

    def lengths_by_head(x_BTF: jax.Array) -> jax.Array:
        # Squares below 2^-126 count as 0.
        return jnp.sqrt(sums_by_head(x_BTF * x_BTF)) + 2.0**-59

    keys_BTF = [jnp.where(jnp.arange(k.shape[1])[:, None] < n[:, None, None], k, jnp.zeros_like(k)) for k, n in arrays]
    # With eight equal rows it is a product for XLA, which the matrix unit computes.
    ones_by_array = [jnp.ones((8, keys.shape[1]), keys.dtype) for keys in keys_BTF]
    dims = (((1,), (1,)), ((), ()))
    sums_BF = sum(
        lax.dot_general(ones, keys, dims, preferred_element_type=jnp.float32)[0]
        for ones, keys in zip(ones_by_array, keys_BTF, strict=True)
    )
    count_B = sum(lengths for _, lengths in arrays)
    centre_B1F = (sums_BF / jnp.maximum(jnp.asarray(count_B), 1)[:, None]).astype(q_BSF.dtype)[:, None]
    furthest = []
    for keys, (_, lengths) in zip(keys_BTF, arrays, strict=True):
        distances = jnp.where(jnp.arange(keys.shape[1]) < lengths[:, None], lengths_by_head(keys - centre_B1F), 0.0)
        furthest.append(distances.max(2, keepdims=True))
    # The centre is the mean up to a rounding, and so are its products with queries.
    error_HB1 = 2.0**-7 * lengths_by_head(centre_B1F)
    half_radius_HB1 = (functools.reduce(jnp.maximum, furthest) + error_HB1) / 2
    lengths_HBS = abs(scale) * ROUNDING * lengths_by_head(q_BSF)
    shifts_HBS = scale * sums_by_head(q_BSF * centre_B1F) + lengths_HBS * half_radius_HB1
    # With a mean that is too large by its error, the largest score less its shift is smaller by as much.
    return jnp.swapaxes(shifts_HBS, 0, 1), (lengths_HBS * (half_radius_HB1 + error_HB1) <= LIMIT).all()


def norm_bound(
    query_gains: Sequence[numpy.ndarray],
    key_gains: Sequence[numpy.ndarray],
    *,
    query_offsets: Sequence[numpy.ndarray] = (),
    key_offsets: Sequence[numpy.ndarray] = (),
) -> float:
    """Returns an upper bound of |q . k| for queries and keys that are the outputs of norms over each head's features.

    Args:
        query_gains: Gains [D] of every norm of queries, such as a norm for each kind of token. A norm over all heads
            together has H * D gains, and its bound is sqrt(H) times as large.
        key_gains: Gains [D] of every norm of keys.
        query_offsets: Offsets [D] of LayerNorms of queries.

    Returns:
        The bound; infinity where a gain is not finite.
    """
    # The longest output of a norm has all of its mean square in the feature with the largest gain: max|gain| sqrt(D).
    # The maximum is numpy's, as Python's drops a NaN that does not come first.
    bound = 1.0
    for gains, offsets in ((query_gains, query_offsets), (key_gains, key_offsets)):
        lengths = [numpy.max(numpy.abs(gain.astype(numpy.float64))) * math.sqrt(gain.size) for gain in gains]
        added: list[Any] = [0.0, *(numpy.linalg.norm(offset.astype(numpy.float64)) for offset in offsets)]
        bound *= float(numpy.max(lengths)) + float(numpy.max(added))
    return bound if math.isfinite(bound) else math.inf


def of_weights(
    weights: Mapping[str, Any], queries: Sequence[str], keys: Sequence[str], what: str, place: str
) -> float | None:
    """Returns an upper bound of |q . k| over all blocks, from a network's weights; None for weights that are shapes.

    Args:
        weights: Every weight by name: arrays, or shapes of a network that is not loaded.
        queries: Regular expressions for the gains of every norm of queries. The first number in a weight's name is its
            block's number. An offset `bias` beside a gain `weight` is counted in.
        what: The bound's name, for errors, as is `place`.
    """
    # By block: gains of queries, gains of keys, offsets of queries, offsets of keys.
    blocks: dict[str, tuple[list[Any], list[Any], list[Any], list[Any]]] = {}
    for side, patterns in enumerate((queries, keys)):
        for pattern in patterns:
            for name in _gains(weights, pattern, what, place):
                number = re.search(r"\d+", name)
                block = blocks.setdefault(number[0] if number else "", ([], [], [], []))
                block[side].append(weights[name])
                # LayerNorm's offset lies beside its gain, and lengthens the norm's output.
                offset = re.sub(r"weight$", "bias", name)
                if offset != name and offset in weights:
                    block[2 + side].append(weights[offset])
    if not all(hasattr(array, "__array__") for block in blocks.values() for group in block for array in group):
        return None
    bounds = []
    for block in blocks.values():
        gains_q, gains_k, offsets_q, offsets_k = ([numpy.asarray(x, numpy.float64) for x in group] for group in block)
        # A single gain may be for all features, and then does not say how many features there are.
        if not gains_q or not gains_k or any(gain.size == 1 for gain in (*gains_q, *gains_k)):
            bounds.append(math.inf)
        else:
            bounds.append(norm_bound(gains_q, gains_k, query_offsets=offsets_q, key_offsets=offsets_k))
    if min(bounds) <= 0:
        fact = f"The gains of the bound '{what}' are all 0"
        raise BadValueError(place, fact, "A norm that multiplies by 1 + weight has no place here")
    return max(bounds)


def _gains(weights: Mapping[str, Any], pattern: str, what: str, place: str) -> list[str]:
    """Returns the names of gains that a pattern matches; refuses a pattern that also matches other weights, or that
    misses a gain: a name that differs from a matched name only in the first number.
    """
    names = [name for name in weights if re.fullmatch(pattern, name)]
    if not names:
        fact = f"'{pattern}' of the bound '{what}' matches no weight"
        raise DeadRuleError(place, fact, nearest(pattern, weights))
    wrong = next((name for name in names if len(weights[name].shape) != 1 or name.endswith("bias")), None)
    if wrong is not None:
        fact = f"'{pattern}' of the bound '{what}' matches '{wrong}' {list(weights[wrong].shape)}, which is no gain"
        raise BadValueError(place, fact, "Match the weights of norms alone")
    patterns = {re.sub(r"\d+", "#", name, count=1) for name in names}
    unmatched = [name for name in weights if re.sub(r"\d+", "#", name, count=1) in patterns and name not in names]
    if unmatched:
        fact = f"'{pattern}' of the bound '{what}' matches '{names[0]}' and not '{unmatched[0]}'"
        raise DeadRuleError(place, fact, "It must match the norms of every block")
    return names
