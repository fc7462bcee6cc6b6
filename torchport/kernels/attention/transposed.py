"""`splash_transposed`: torchport's kernel (see `transposed_kernel`), and the arrangement of q, k and v for it.

Shapes: B batch, H heads, S queries, T keys, D features of a head; G groups of heads that share a tile, g heads in one,
W = g * D features of a group, F = G * W; N parts of the values.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torchport.kernels.attention import bound
from torchport.kernels.attention.bound import LOG2E
from torchport.kernels.attention.int8 import Exponent, Int8Softmax, quantised
from torchport.kernels.attention.tiles import LANES, TAIL, Tile, rounded_up
from torchport.kernels.attention.transposed_kernel import Plan, ShiftedSoftmax, Softmax, kernel, scratch


@dataclasses.dataclass(frozen=True)
class KernelSettings:
    """The settings of a call of the kernel: everything but its shapes."""

    scale: float  #: The factor of scores.
    bounded: bool  #: Whether the caller guarantees that every score lies within `bound.LIMIT` (`bound.holds`).
    tile: Tile  #: How the work is cut, before it is fitted to the shapes.
    vmem_bytes: int
    #: Queries and keys are multiplied in eight bits, which needs a bound, bfloat16 and heads of 128 features; then the
    #: dtype of scores whose exponentials are taken. None: not in eight bits.
    int8: Exponent | None = None
    #: The tile for scores that a shift of each query bounds (`bound.shifts`), which is looked for as the program runs.
    #: None: it is not looked for.
    shifted_tile: Tile | None = None
    interpret: bool = False  #: Run the kernel as plain JAX, on any platform.


def attention(
    q_BHSD: jax.Array,
    k_BHTD: jax.Array,
    v_BHTD: jax.Array,
    *,
    lengths_B: jax.Array | None,
    settings: KernelSettings,
) -> jax.Array:
    """Returns softmax(scale * q k^T) v over the first `lengths` keys of each sample.

    Args:
        q_BHSD: Queries [B, H, S, D], bfloat16 or float32.
        lengths_B: int32 [B], the number of keys that count; None: all of them.

    Returns:
        [B, H, S, D] of q's dtype; 0 where the length is 0. bfloat16 probabilities with bfloat16 inputs, float32 sums.
    """
    batch, all_heads, queries, size = q_BHSD.shape
    keys = k_BHTD.shape[2]
    heads, head_size = grouping(all_heads, size)
    if lengths_B is None:
        lengths_B = jnp.full((batch,), keys, jnp.int32)
    # Tokens come before heads, as in projections: XLA cancels these transposes against the caller's.
    q = _heads_side_by_side(q_BHSD, head_size, queries)
    k, v = (_heads_side_by_side(x, head_size, rounded_up(keys, TAIL)) for x in (k_BHTD, v_BHTD))
    arrays = Keys(k, jnp.swapaxes(v, 1, 2)[:, None], lengths_B)
    out = side_by_side(q, [arrays], heads=heads, head_size=head_size, settings=settings)
    return jnp.swapaxes(out.reshape(batch, queries, all_heads, head_size)[..., :size], 1, 2)


@dataclasses.dataclass(frozen=True)
class Keys:
    """An array of keys with its values, as `side_by_side` takes them."""

    keys: jax.Array  #: [B, T, F], T a multiple of 256.
    values: jax.Array  #: [B, N, F, T / N], T / N a multiple of 128.
    #: int32 [B], 0 to T: later keys and values may hold anything.
    lengths: jax.Array


def side_by_side(
    q_BSF: jax.Array, arrays: Sequence[Keys], *, heads: int, head_size: int, settings: KernelSettings
) -> jax.Array:
    """Returns softmax(scale * q k^T) v over the valid keys of all arrays, of heads that lie side by side.

    Args:
        q_BSF: Queries [B, S, F], bfloat16 or float32.
        arrays: Keys and values; most of them should be in the first array, whose whole chunks are copied ahead.
        heads: g.
        head_size: D; g * D is a multiple of 128.

    Returns:
        [B, S, F] of q's dtype; 0 for a sample without keys. The precision is that of `attention`.
    """
    int8 = settings.int8
    plan = Plan(
        settings.tile.fitted(q_BSF.shape[1], arrays[0].keys.shape[1]),
        heads,
        head_size,
        groups=q_BSF.shape[2] // (heads * head_size),
        scale=settings.scale * LOG2E,
        bounded=settings.bounded,
        precision=lax.Precision.HIGHEST if q_BSF.dtype == jnp.float32 else None,
        arrays=len(arrays),
        scores=None if int8 is None else jnp.int8,
        packed=int8 == "bfloat16",
    )
    lengths = jnp.stack([array.lengths.astype(jnp.int32) for array in arrays])
    call = functools.partial(_pallas_call, shape=q_BSF.shape, dtype=q_BSF.dtype, settings=settings)
    values = [array.values for array in arrays]
    keys_and_lengths = [(array.keys, array.lengths) for array in arrays]
    if int8 is not None:
        q, rows, keys = quantised(q_BSF, keys_and_lengths, head_size, plan.scale)
        return call(plan, Int8Softmax)(lengths, rows, q, *keys, *values)
    operands = (q_BSF, *(array.keys for array in arrays), *values)
    if settings.shifted_tile is None:
        return call(plan, Softmax)(lengths, *operands)
    shifts, holds = bound.shifts(q_BSF, keys_and_lengths, head_size, plan.scale)
    tile = settings.shifted_tile.fitted(q_BSF.shape[1], arrays[0].keys.shape[1])
    shifted = call(dataclasses.replace(plan, tile=tile, bounded=True), ShiftedSoftmax)
    rows = shifts.reshape(-1, heads, q_BSF.shape[1])
    return lax.cond(
        holds,
        lambda rows, *operands: shifted(lengths, rows, *operands),
        lambda _, *operands: call(plan, Softmax)(lengths, *operands),
        *(rows, *operands),
    )


def _pallas_call(
    plan: Plan, kind: type[Softmax], *, shape: tuple[int, int, int], dtype: Any, settings: KernelSettings
) -> Callable[..., jax.Array]:
    """Returns the kernel as a function of lengths, the scales or shifts of scores, q, all keys and all values.

    Args:
        kind: `Softmax` takes no scales or shifts.
        shape: [B, S, F] of q, as is `dtype`.
    """
    (batch, queries, _), groups, block_q = shape, plan.groups, plan.tile.block_q
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    block = pl.BlockSpec((None, block_q, plan.width), lambda r, i, _: (lax.div(r, groups), i, lax.rem(r, groups)))
    rows = [] if kind is Softmax else [pl.BlockSpec((None, plan.heads, block_q), lambda r, i, _: (r, 0, i))]
    call: Callable[..., jax.Array] = pl.pallas_call(
        functools.partial(kernel, plan, kind),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch * groups, -(-queries // block_q)),
            in_specs=[*rows, block, *[hbm] * (2 * plan.arrays)],
            out_specs=block,
            scratch_shapes=scratch(plan, dtype),
        ),
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
        compiler_params=pltpu.CompilerParams(
            # Heads are independent; tiles are not, as a tile fetches the first chunk of the next tile.
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=settings.vmem_bytes,
            # Every copy is within its array; checks would lengthen the steady loop.
            disable_bounds_checks=True,
        ),
        name="splash_int8" if kind is Int8Softmax else "splash_transposed",
        interpret=settings.interpret,
    )
    return call


def grouping(heads: int, size: int) -> tuple[int, int]:
    """Returns how many heads share a tile, and the head size to which features are padded: (24, 40) -> (2, 64).

    Two heads of at most 64 features lie side by side in the 128 lanes: the matrix unit takes no longer than for a
    single head with zeros beside it.
    """
    if size <= LANES // 2 and heads % 2 == 0:
        return 2, LANES // 2
    return 1, rounded_up(size, LANES)


def _heads_side_by_side(x_BHTD: jax.Array, head_size: int, tokens: int) -> jax.Array:
    """Returns [B, H, T, D] as [B, tokens, F], heads side by side, padded with zeros."""
    batch, heads, have, size = x_BHTD.shape
    if (have, size) != (tokens, head_size):
        x_BHTD = jnp.pad(x_BHTD, ((0, 0), (0, 0), (0, tokens - have), (0, head_size - size)))
    return jnp.swapaxes(x_BHTD, 1, 2).reshape(batch, tokens, heads * head_size)
