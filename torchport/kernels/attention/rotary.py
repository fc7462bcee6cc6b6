"""A norm and rotary positions of queries and keys in one pass, with heads laid out as an all-to-all needs them.

XLA takes eight passes over q and k for this, most of them to turn pairs of features that lie side by side; a kernel
reads them once and writes them once, and swaps neighbours in registers.

Heads lie in registers of 128 features as the attention kernel has them (`transposed.grouping`): one of 128, or two of
64, padded with zeros.

Shapes: B batch, S tokens, D features of a head, P as padded; H heads, F = H * P features of all; N groups of heads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torchport.kernels.attention.dispatch import Pass, current
from torchport.kernels.attention.tiles import LANES


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Norm:
    """A norm of each head's features, or of the features of all heads together."""

    weight: jax.Array  #: Gains: [D] of each head, or [F] of all heads together.
    bias: jax.Array | None  #: Offsets, likewise; or None.
    #: The number that is added to the mean square.
    eps: float = dataclasses.field(metadata={"static": True})
    #: Whether the mean is subtracted first: LayerNorm.
    centred: bool = dataclasses.field(default=False, metadata={"static": True})
    #: Whether the result is rounded to the gains' dtype before the gains multiply it, as the RMSNorm of PyTorch models
    #: is; otherwise it is rounded once, as PyTorch's own norms are.
    twice: bool = dataclasses.field(default=False, metadata={"static": True})

    def is_over_all(self, size: int) -> bool:
        """Returns whether the norm is of all heads together, where a head has `size` features."""
        return int(self.weight.shape[0]) != size

    def scaled(self, normal: jax.Array, weight: jax.Array, bias: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
        """Returns float32 features of mean square 1 with gains and offsets, rounded to a dtype as PyTorch rounds."""
        if self.twice:
            rounded = normal.astype(self.weight.dtype).astype(jnp.float32) * weight.astype(jnp.float32)
            normal = rounded.astype(self.weight.dtype).astype(jnp.float32)
        else:
            normal = normal * weight.astype(jnp.float32)
        if bias is not None:
            normal = normal + bias.astype(jnp.float32)
        return normal.astype(dtype)


def normalised(x_BSF: jax.Array, norm: Norm | None, axis: str | None = None) -> jax.Array:
    """Returns projections after a norm, in the projections' dtype.

    Args:
        norm: None: the projections are returned as they are.
        axis: The mesh's axis that splits F, if the norm is of all heads together; its devices exchange means.
    """
    if norm is None:
        return x_BSF

    def mean(x: jax.Array) -> jax.Array:
        here = x.mean(-1, keepdims=True)
        return here if axis is None else lax.pmean(here, axis)

    x = x_BSF.reshape(*x_BSF.shape[:2], -1, norm.weight.shape[0]).astype(jnp.float32)
    x = x - mean(x) if norm.centred else x
    x = x * lax.rsqrt(mean(jnp.square(x)) + norm.eps)
    return norm.scaled(x, norm.weight, norm.bias, x_BSF.dtype).reshape(x_BSF.shape)


ROWS = 256
"""Tokens of a tile: two tiles, in and out, take 4 MiB of VMEM at 2,048 features."""


@dataclasses.dataclass(frozen=True)
class Heads:
    """How heads lie in projections [B, S, F]."""

    size: int  #: D.
    padded: int  #: P: 128 or 64.
    groups: int = 1  #: N, the groups into which the heads are split.

    def lanes(self, x: jax.Array) -> jax.Array:
        """Returns features [..., D] of one head as a register, [..., 128]: padded, and repeated if it has two heads."""
        padding = [(0, 0)] * (x.ndim - 1) + [(0, self.padded - self.size)]
        padded = jnp.pad(x, padding) if self.padded > self.size else x
        return padded if self.padded == LANES else jnp.concatenate([padded] * (LANES // self.padded), axis=-1)

    def spread(self, x: jax.Array) -> jax.Array:
        """Returns features [..., H * D] of all heads as [..., H * P], padded with zeros."""
        if self.padded == self.size:
            return x
        heads = x.reshape(*x.shape[:-1], -1, self.size)
        padded = jnp.pad(heads, [(0, 0)] * x.ndim + [(0, self.padded - self.size)])
        return padded.reshape(*x.shape[:-1], -1)

    def gathered(self, x: jax.Array) -> jax.Array:
        """Returns features [..., H * P] of all heads as [..., H * D]: the reverse of `spread`."""
        if self.padded == self.size:
            return x
        return x.reshape(*x.shape[:-1], -1, self.padded)[..., : self.size].reshape(*x.shape[:-1], -1)


def norm_rotary(
    x_BSF: jax.Array,
    norm: Norm | None,
    cos_SD: jax.Array,
    sin_SD: jax.Array,
    heads: Heads,
    interpret: bool = False,
    samples: range | None = None,
) -> jax.Array:
    """Returns queries or keys after a norm and rotary positions, with features 2i and 2i + 1 as a pair.

    Args:
        x_BSF: Projections [B, S, F], heads spread as `heads` says; S a multiple of 256.
        norm: The norm of the unpadded features; None if the projections are normalised already.
        cos_SD: Cosines, float32, each twice.
        interpret: Run the kernel as plain JAX, on any platform.
        samples: The samples to compute; None: all samples.

    Returns:
        [B, N, S, F / N] of x's dtype, B only of `samples`; rounded as `norm` says, and again after the rotation.
    """
    batch, tokens, features = x_BSF.shape
    rows = min(ROWS, tokens)
    part = features // heads.groups
    first, count = (0, batch) if samples is None else (samples.start, len(samples))
    tables = [heads.lanes(table) for table in (cos_SD, sin_SD)]
    gains = _gains(norm, heads)
    note = current().note
    if note is not None:
        arguments = {"batch": count, "tokens": tokens, "features": features, **dataclasses.asdict(heads)}
        if norm is not None:
            arguments |= {"gains": norm.weight.size, "centred": int(norm.centred), "bias": int(norm.bias is not None)}
        moved = 2 * x_BSF.nbytes // batch * count + count * sum(table.nbytes for table in tables)
        loops = (count * (tokens // rows),)  # over the grid alone
        note(Pass("norm_rotary", f"{__name__}:alone", arguments, loops=loops, bytes=moved))
    table = pl.BlockSpec((rows, LANES), lambda b, i: (i, 0))
    call = pl.pallas_call(
        functools.partial(_kernel, norm, heads),
        grid=(count, tokens // rows),
        in_specs=[
            pl.BlockSpec((None, rows, features), lambda b, i: (first + b, i, 0)),
            *(pl.BlockSpec(gain.shape, lambda b, i: (0, 0)) for gain in gains),
            table,
            table,
        ],
        out_specs=pl.BlockSpec((None, heads.groups, rows, part), lambda b, i: (b, 0, i, 0)),
        out_shape=jax.ShapeDtypeStruct((count, heads.groups, tokens, part), x_BSF.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        name="norm_rotary",
        interpret=interpret,
    )
    output: jax.Array = call(x_BSF, *gains, *tables)
    return output


def alone(
    batch: int, tokens: int, features: int, *, gains: int = 0, centred: int = 0, bias: int = 0, **heads: int
) -> tuple[Callable[..., jax.Array], list[jax.ShapeDtypeStruct]]:
    """Returns `norm_rotary` as a function of arrays, and the arrays' shapes; `plan` compiles the kernel with them.

    Args:
        gains: The number of the norm's gains; 0: no norm.
        centred: 1 for a LayerNorm, 0 for an RMSNorm.
        bias: 1 for a norm with offsets.
        heads: The fields of `Heads`.
    """

    def run(x: jax.Array, cos: jax.Array, sin: jax.Array, *arrays: jax.Array) -> jax.Array:
        norm = None
        if arrays:
            norm = Norm(arrays[0], arrays[1] if bias else None, eps=1e-6, centred=bool(centred), twice=not centred)
        return norm_rotary(x, norm, cos, sin, Heads(**heads))

    table = jax.ShapeDtypeStruct((tokens, heads["size"]), jnp.float32)
    shapes = [jax.ShapeDtypeStruct((batch, tokens, features), jnp.bfloat16), table, table]
    return run, shapes + [jax.ShapeDtypeStruct((gains,), jnp.bfloat16)] * (1 + bias if gains else 0)


def _gains(norm: Norm | None, heads: Heads) -> list[jax.Array]:
    """Returns gains and offsets as rows [1, 128] or, of all heads together, [1, F], padded with zeros."""
    if norm is None:
        return []
    place = heads.spread if norm.is_over_all(heads.size) else heads.lanes
    return [place(x)[None].astype(jnp.float32) for x in (norm.weight, norm.bias) if x is not None]


def _kernel(norm: Norm | None, heads: Heads, x: Any, *others: Any) -> None:
    """Computes `norm_rotary` for a tile of tokens, in registers of 128 features.

    Args:
        x: Reference to queries or keys [rows, F].
        others: References to the norm's gains and offsets [1, 128 or F], where it has them; to cosines and sines
            [rows, 128]; and to the output [N, rows, F / N].
    """
    *gains, cos, sin, out = others
    groups, _, part = out.shape
    per_group = part // LANES
    row, lane = (lax.broadcasted_iota(jnp.int32, (LANES, LANES), dim) for dim in (0, 1))
    # The product with this matrix turns each pair (a, b) into (-b, a), in the matrix unit, which is free otherwise.
    turn = jnp.where(row == lane + 1, -1.0, 1.0) * ((row ^ lane) == 1)
    columns = [slice(i * LANES, (i + 1) * LANES) for i in range(groups * per_group)]
    over_all = norm is not None and norm.is_over_all(heads.size)
    shared = _statistics([x[:, column] for column in columns], norm, heads) if norm is not None and over_all else None
    for i, column in enumerate(columns):
        features = x[:, column]
        if norm is not None:
            mean, scale = shared or _statistics([features], norm, heads)
            weight, *bias = (gain[:, column] if over_all else gain[...] for gain in gains)
            wide = features.astype(jnp.float32)
            normal = (wide if mean is None else wide - mean) * scale
            features = norm.scaled(normal, weight, bias[0] if bias else None, out.dtype)
        turned = features.astype(jnp.float32) * cos[...] + _product(features, turn) * sin[...]
        out[i // per_group, :, columns[i % per_group]] = turned.astype(out.dtype)


def _product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Returns x [rows, 128] times a matrix of 0, 1 and -1 in float32: exact for bfloat16."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, matrix.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32)


def _statistics(columns: list[jax.Array], norm: Norm, heads: Heads) -> tuple[jax.Array | None, jax.Array]:
    """Returns mean and reciprocal deviation [rows, 1 or 128], of each head or of all heads; an RMSNorm's mean is None.
    `columns` are features [rows, 128] that are normalised together: the registers of all heads, or a single register.
    """
    count, over_all = norm.weight.shape[0], norm.is_over_all(heads.size)  # padding does not count
    lane = lax.broadcasted_iota(jnp.int32, columns[0].shape, 1)

    def total(parts: list[jax.Array]) -> jax.Array:
        """Returns the sum over features [rows, 1]; of two heads in a register, each sum in its half [rows, 128]."""
        whole = functools.reduce(jnp.add, parts)
        if over_all or heads.padded == LANES:
            return whole.sum(-1, keepdims=True)
        left = lane < heads.padded
        halves = [jnp.where(half, whole, 0.0).sum(-1, keepdims=True) for half in (left, ~left)]
        return jnp.where(left, *halves)

    wide, mean = [column.astype(jnp.float32) for column in columns], None
    if norm.centred:
        # By a product, not by `total`: this leaves `total`'s unit to the squares.
        row, at = (lax.broadcasted_iota(jnp.int32, (LANES, LANES), dim) for dim in (0, 1))
        same_head = jnp.where(over_all | (row // heads.padded == at // heads.padded), 1.0, 0.0)
        mean = functools.reduce(jnp.add, (_product(column, same_head) for column in columns)) / count
        wide = [column - mean for column in wide]
        if heads.size < heads.padded:
            wide = [jnp.where(lane % heads.padded < heads.size, column, 0.0) for column in wide]
    return mean, lax.rsqrt(total([jnp.square(column) for column in wide]) / count + norm.eps)
