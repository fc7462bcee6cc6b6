"""Queries and keys of eight bits for `splash_int8`, and the part of the kernel that multiplies them.

docs/attention.md has the loss and the gain. On v6e exponentials are taken of bfloat16 scores, two to a register, and a
row of ones beside the values adds the probabilities up: the sum is of the rounded probabilities.

Shapes: B batch, H heads, S queries, T keys, D features of a head, F = H * D; C keys of a chunk.

Source: int8 scores and the keys' mean are ideas of SageAttention (arXiv 2410.02367).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torchport.kernels.attention.tiles import LANES
from torchport.kernels.attention.transposed_kernel import PLAIN, ROWS, Cell, Softmax

Exponent = Literal["float32", "bfloat16"]
EXPONENT: dict[str, Exponent] = {"v5e": "float32", "v5p": "float32", "v6e": "bfloat16"}
"""Chips that multiply int8 at twice the bfloat16 rate, with the dtype of the scores whose exponential they take.
Source: `jax/_src/pallas/mosaic/tpu_info.py` of JAX 0.10.2, and for the exponential the compiler's schedules."""

LARGEST = 127
"""The largest number of int8 in use."""
GROWTH = 2 * (1 + math.sqrt(LANES) / (2 * LARGEST)) ** 2
"""The factor by which quantising may raise a bound of |q . k|. Less their mean, keys are at most twice as long, as the
mean is no longer than the longest key. Rounding moves each feature by half a quantum, and so lengthens a vector by at
most sqrt(D) / (2 * 127) of its largest feature."""
ONES = 16
"""Rows that are added to the values, as many as a register of bfloat16 has; the first is all ones."""


def quantised(
    q_BSF: jax.Array, arrays: Sequence[tuple[jax.Array, jax.Array]], head_size: int, scale: float
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """Returns queries and keys in eight bits.

    Heads stay slices of the features. A dim of heads would change the array's layout, and XLA would write the array out
    in float32. With slices XLA reads queries and keys twice, and writes int8 alone.

    Args:
        arrays: Keys [B, T, F], and the number of valid keys, int32 [B]; keys after them may hold anything.

    Returns:
        Queries, int8 [B, S, F]; factors of the scores of each query, float32 [B * H, 1, S]; keys, int8.
    """
    batch, queries, features = q_BSF.shape
    mean_B1F, peak_B1F = _mean_and_peak(arrays)
    quantum_k = _quantum(peak_B1F.reshape(batch, -1, head_size).max(2))
    quanta_q = [
        _quantum(jnp.abs(q_BSF[:, :, start : start + head_size].astype(jnp.float32)).max(2))
        for start in range(0, features, head_size)
    ]
    rows = jnp.stack([quantum * quantum_k[:, h, None] * scale for h, quantum in enumerate(quanta_q)], axis=1)
    keys = [
        _rounded(keys.astype(jnp.float32) - mean_B1F, jnp.repeat(1 / quantum_k, head_size, axis=1)[:, None])
        for keys, _ in arrays
    ]
    factors = [1 / quantum for quantum in quanta_q]
    # Each feature gets the factor of its head, without a dim of heads.
    head = lax.broadcasted_iota(jnp.int32, (1, 1, features), 2) // head_size
    factor_BSF = factors[0][..., None]
    for number, factor in enumerate(factors):
        factor_BSF = jnp.where(head == number, factor[..., None], factor_BSF)
    return _rounded(q_BSF, factor_BSF), rows.reshape(-1, 1, queries), keys


def _mean_and_peak(arrays: Sequence[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """Returns the mean valid key, and the largest distance of a valid key from it in each feature: float32 [B, 1, F].

    In each feature, the largest or the smallest key is furthest from the mean: keys are read once for all three.
    """
    sums, largest, smallest = [], [], []
    for keys, lengths in arrays:
        valid = jnp.arange(keys.shape[1])[:, None] < lengths[:, None, None]
        wide = keys.astype(jnp.float32)
        sums.append(jnp.where(valid, wide, 0.0).sum(1, keepdims=True))
        largest.append(jnp.where(valid, wide, -jnp.inf).max(1, keepdims=True))
        smallest.append(jnp.where(valid, wide, jnp.inf).min(1, keepdims=True))
    count = sum(lengths for _, lengths in arrays)
    mean = sum(sums) / jnp.maximum(jnp.asarray(count), 1)[:, None, None]
    return mean, jnp.maximum(jnp.stack(largest).max(0) - mean, mean - jnp.stack(smallest).min(0))


def _quantum(peak: jax.Array) -> jax.Array:
    """Returns the value of 1 in int8, with which the peak becomes 127; 1.0 for a peak of 0, or of -inf without keys."""
    return jnp.where(peak > 0, peak / LARGEST, 1.0)


def _rounded(x: jax.Array, factor: jax.Array) -> jax.Array:
    return jnp.round(x.astype(jnp.float32) * factor).astype(jnp.int8)


@dataclasses.dataclass(eq=False)
class Int8Softmax(Softmax):
    """The products and the softmax of one chunk whose keys and queries are int8."""

    rows: Any  #: Factors of the scores of each query, float32 [1, block_q].

    def multiply_keys(self, keys: jax.Array, cell: Cell) -> None:
        """Multiplies keys with a cell's queries, and stores the probabilities; if packed, as pairs of bfloat16."""
        if not self.plan.packed:
            super().multiply_keys(keys, cell)
            return
        # int32 has the layout in which the exponentials come: as bfloat16, each register would be put together anew.
        p = jnp.exp2(self._scores(keys, cell).astype(jnp.bfloat16))
        self._store(cell, pltpu.bitcast(p, jnp.int32))

    def _add(self, values: Any, cell: Cell, p: jax.Array, shrink: jax.Array | None = None) -> None:
        """Adds the values weighted with p [C, queries] to the outputs; and p to the sums, if p comes in pairs."""
        if p.dtype != jnp.int32:
            super()._add(values, cell, p, shrink)
            return
        head, start, count = cell
        head_values = self._head_values(values, head)
        row = lax.broadcasted_iota(jnp.int32, (ONES, head_values.shape[1]), 0)
        with_ones = jnp.concatenate([head_values, (row == 0).astype(head_values.dtype)], axis=0)
        product = self._product(with_ones, pltpu.bitcast(p, jnp.bfloat16), PLAIN)
        size = self.plan.head_size
        self.refs.acc[self.plan.rows(head), pl.ds(start, count)] += product[:size]
        self.refs.sums[head, :, pl.ds(start, count)] += product[size : size + self.refs.sums.shape[1]]

    def _scores(self, keys: jax.Array, cell: Cell) -> jax.Array:
        """Returns the scores [C, queries] of int8 keys [C, W] in float32, in units of log 2."""
        _, start, count = cell
        exact = lax.dot_general(keys, self.refs.q[pl.ds(start, count), :], ROWS, preferred_element_type=jnp.int32)
        return exact.astype(jnp.float32) * self.rows[:, pl.ds(start, count)]
