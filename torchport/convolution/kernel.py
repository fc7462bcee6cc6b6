"""A 3 x 3 x 3 convolution, causal in time, of one device's part of a video: a Pallas kernel for TPU.

Rows, columns, frames and channels lie in this order, so that a step in space is another address and frames fill the
sublanes. A grid step makes one row. It puts the next row of the input into a ring of three, normalised and split into
bfloat16 parts, and multiplies 256 positions at a time with the weights of a tap in space. The three taps in time are
columns of one product. They are added in the end, one and two frames later: what is due after the last frame is
carried to the next chunk as a sum, so that no frame is computed twice or kept.

The parts are `x = high + middle + low`, each of 8 bits. Of two parts three products are made and of three six: all but
those whose size is that of the rounding. On v6e the matrix units are 95 % busy at 256 channels and more, and 64 % at
128, whose columns fill them by three quarters (by the instruction schedule, libtpu 0.0.52).

Shapes: H rows, W columns, T frames, C channels in, D channels out, P parts; N = 3 B columns of a block of B channels out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
ROWS = 256
"""Positions of one product: the weights, which have to be loaded for each, are loaded less often with more."""
BLOCK = 256
"""Channels out of one grid step: three times as many columns fill the matrix units."""
VMEM = 110 * 2**20
"""Bytes of vector memory that a kernel may take of the 128 MiB."""


@dataclasses.dataclass(frozen=True)
class Conv:
    """What is known of a convolution before it is traced.

    Attributes:
        height: H of the output.
        width: W.
        frames: T, a multiple of 8, and of 16 for bfloat16 products without a conversion for each tap.
        inputs: C.
        outputs: D.
        parts: 1 for products of bfloat16, 2 for three of them, 3 for six.
        taps: Of time: 3, or 1.
        edges: Whether what is outside is the nearest row or frame; otherwise it is 0.
        rows: Whether the input has a row more at each end.
        normal: Whether the input goes through RMSNorm and SiLU first.
        residual: Whether something is added to the output.
        carried: Whether there are chunks before and after this one.
        dtype: Of input, output and residual.
    """

    height: int
    width: int
    frames: int
    inputs: int
    outputs: int
    parts: int
    taps: int = 3
    edges: bool = True
    rows: bool = False
    normal: bool = False
    residual: bool = False
    carried: bool = False
    dtype: str = "float32"

    @property
    def channels(self) -> int:
        """C, as the ring has it."""
        return -(-self.inputs // LANES) * LANES

    @property
    def block(self) -> int:
        """B."""
        return min(BLOCK, -(-self.outputs // LANES) * LANES)

    @property
    def blocks(self) -> int:
        """How many blocks of channels out there are."""
        return -(-self.outputs // self.block)

    @property
    def columns(self) -> int:
        """Columns of one product's positions: a divisor of W."""
        fits = [n for n in range(1, self.width + 1) if self.width % n == 0 and n * self.frames <= 2.5 * ROWS]
        return min(fits or [1], key=lambda n: (abs(n * self.frames - ROWS), n % 8 != 0))

    @property
    def together(self) -> int:
        """Columns of the input that are put into the ring at once; with a norm those of 64 registers, a divisor of W."""
        if not self.normal:
            return self.width
        most = max(1, 64 * 1024 // (self.frames * self.channels))
        return max(n for n in range(1, most + 1) if self.width % n == 0)

    @property
    def split(self) -> bool:
        """Whether the ring holds parts; float32 is split for each tap where bfloat16 does not fill its sublanes."""
        return self.frames % 16 == 0

    @property
    def products(self) -> list[tuple[int, int]]:
        """Which parts of the input meet which of the weights, the largest last."""
        every = [(a, b) for a in range(self.parts) for b in range(self.parts) if a + b < self.parts]
        return sorted(every, key=lambda pair: -sum(pair))

    @property
    def name(self) -> str:
        """Names the kernel in a program."""
        flags = "".join(letter for letter, on in zip("nrc", (self.normal, self.residual, self.carried), strict=True) if on)
        sizes = f"{self.height}x{self.width}x{self.frames}_{self.inputs}_{self.outputs}"
        return f"conv{self.taps}_{sizes}_p{self.parts}{flags}_{jnp.dtype(self.dtype).itemsize}"


def parts_of(x: jax.Array, count: int) -> list[jax.Array]:
    """Returns bfloat16 arrays whose sum is x, to 8 bits for each of them."""
    parts: list[jax.Array] = []
    for _ in range(count):
        parts.append(x.astype(jnp.bfloat16))
        x = x.astype(jnp.float32) - parts[-1].astype(jnp.float32)
    return parts


def weights_of(weight_DCTHW: jax.Array, conv: Conv) -> list[jax.Array]:
    """Returns PyTorch's weights as the kernel takes them: parts [blocks, 9 channels, taps * block], bfloat16."""
    outputs, inputs = weight_DCTHW.shape[:2]
    padded = jnp.pad(
        weight_DCTHW,
        ((0, conv.blocks * conv.block - outputs), (0, conv.channels - inputs), (0, 0), (0, 0), (0, 0)),
    )
    every = padded.reshape(conv.blocks, conv.block, conv.channels, conv.taps, 9)
    every = every.transpose(0, 4, 2, 3, 1).reshape(conv.blocks, 9 * conv.channels, conv.taps * conv.block)
    return parts_of(every, conv.parts)


def convolved(
    conv: Conv,
    x: jax.Array,
    sides: tuple[jax.Array, jax.Array],
    weights: list[jax.Array],
    bias: jax.Array,
    *,
    gains: jax.Array | None = None,
    residual: jax.Array | None = None,
    carry: jax.Array | None = None,
    first: jax.Array | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the convolution, and what it adds to the first two frames of the next chunk.

    Args:
        conv: Its sizes and forms.
        x: [H, W, T, C], with `conv.rows` [H + 2, W, T, C].
        sides: The columns before and after it, of as many rows, [H, 1, T, C].
        weights: From `weights_of`.
        bias: [D].
        gains: [C] of the norm.
        residual: [H, W, T, D].
        carry: [2, H, W, D] float32, from the chunk before.
        first: Whether there is no chunk before, int32 [1]; with `conv.edges` the first frame then counts as all before.
        interpret: Run it as plain JAX.

    Returns:
        [H, W, T, D] of x's dtype; and [2, H, W, D] float32, or None without chunks.
    """
    flag = jnp.ones(1, jnp.int32) if first is None else first.reshape(1).astype(jnp.int32)
    operands: list[Any] = [x, *sides, *weights, _row(bias, conv.blocks * conv.block)]
    operands += [_row(gains, conv.channels)] if conv.normal else []
    operands += [residual] if conv.residual else []
    operands += [carry] if conv.carried else []
    outputs = pl.pallas_call(
        functools.partial(_kernel, conv),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(conv.blocks, conv.height + 2),
            in_specs=_inputs(conv),
            out_specs=_outputs(conv),
            scratch_shapes=_scratch(conv),
        ),
        out_shape=_shapes(conv),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM),
        interpret=interpret,
        name=conv.name,
    )(flag, *operands)
    return outputs[0], outputs[1] if conv.carried else None


def _row(vector: jax.Array | None, size: int) -> jax.Array:
    assert vector is not None
    return jnp.pad(vector.astype(jnp.float32), (0, size - vector.shape[0]))[None]


def _inputs(conv: Conv) -> list[pl.BlockSpec]:
    """Returns the blocks of the operands, at each block of channels out and each row of the input."""
    last = conv.height + 1 if conv.rows else conv.height - 1

    def row(n: Any, s: Any, first: Any) -> tuple[Any, ...]:
        return (s if conv.rows else jnp.clip(s - 1, 0, last), 0, 0, 0)

    def made(n: Any, s: Any, first: Any) -> tuple[Any, ...]:
        return (jnp.maximum(s - 2, 0), 0, 0, n)

    def line(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, width, conv.frames, conv.inputs), row)

    block = min(conv.block, conv.outputs)
    depth = 9 * conv.channels
    weights = pl.BlockSpec((1, depth, conv.taps * conv.block), lambda n, s, first: (n, 0, 0), pipeline_mode=_once())
    specs = [line(conv.width), line(1), line(1), *[weights] * conv.parts]
    specs.append(pl.BlockSpec((1, conv.block), lambda n, s, first: (0, n)))
    specs += [pl.BlockSpec((1, conv.channels), lambda n, s, first: (0, 0))] if conv.normal else []
    specs += [pl.BlockSpec((1, conv.width, conv.frames, block), made)] if conv.residual else []
    return specs + ([_carry_block(conv)] if conv.carried else [])


def _once() -> Any:
    return pl.Buffered(1)


def _carry_block(conv: Conv) -> pl.BlockSpec:
    block = min(conv.block, conv.outputs)
    return pl.BlockSpec((2, 1, conv.width, block), lambda n, s, first: (0, jnp.maximum(s - 2, 0), 0, n))


def _outputs(conv: Conv) -> list[pl.BlockSpec]:
    block = min(conv.block, conv.outputs)
    made = pl.BlockSpec(
        (1, conv.width, conv.frames, block), lambda n, s, first: (jnp.maximum(s - 2, 0), 0, 0, n)
    )
    return [made, *([_carry_block(conv)] if conv.carried else [])]


def _shapes(conv: Conv) -> list[jax.ShapeDtypeStruct]:
    made = jax.ShapeDtypeStruct((conv.height, conv.width, conv.frames, conv.outputs), conv.dtype)
    carry = jax.ShapeDtypeStruct((2, conv.height, conv.width, conv.outputs), jnp.float32)
    return [made, *([carry] if conv.carried else [])]


def _scratch(conv: Conv) -> list[Any]:
    ring = (3, conv.width + 2, conv.frames, conv.channels)
    rings = [pltpu.VMEM(ring, jnp.bfloat16)] * conv.parts if conv.split else [pltpu.VMEM(ring, jnp.float32)]
    # Slabs of 128 columns: every so-manieth row can be read of no wider array.
    slabs = (conv.taps * conv.block // LANES, conv.columns * conv.frames, LANES)
    return [pltpu.VMEM(slabs, jnp.float32), *rings]


def _kernel(conv: Conv, first: Any, *refs: Any) -> None:
    """One row of the input comes in, and one of the output goes out."""
    names = ["x", "left", "right", *[f"weight{n}" for n in range(conv.parts)], "bias"]
    flags = (("gains", conv.normal), ("residual", conv.residual), ("carry", conv.carried), ("out", True))
    names += [name for name, on in (*flags, ("next", conv.carried), ("sums", True)) if on]
    step = _Step(conv, dict(zip(names, refs, strict=False)), refs[len(names) :], first[0] == 1, pl.program_id(1))
    step.take_row()
    pl.when(step.row >= 2)(step.make_row)


@dataclasses.dataclass(frozen=True)
class _Step:
    """One step of the grid.

    Attributes:
        conv: The convolution.
        ref: The operands, the outputs and the sums, by name.
        rings: The last three rows of the input, with a column more at each end: one array for each part.
        is_first: Whether there is no chunk before.
        row: The input's row, of H + 2.
    """

    conv: Conv
    ref: dict[str, Any]
    rings: Any
    is_first: Any
    row: Any

    def take_row(self) -> None:
        """Puts a row of the input into the ring, with the column before it and the one after it."""
        conv, x, sides = self.conv, self.ref["x"], (self.ref["left"], self.ref["right"])
        some = conv.together
        if some == conv.width:
            self._put(x[0], 1)

        def put(number: Any, _: Any) -> Any:
            self._put(x[0, pl.ds(number * some, some)], 1 + number * some)
            return 0

        if some < conv.width:
            jax.lax.fori_loop(0, conv.width // some, put, 0)
        for side, column in zip(sides, (0, conv.width + 1), strict=True):
            self._put(side[0], column)

    def _put(self, x: jax.Array, column: Any) -> None:
        conv, x = self.conv, x.astype(jnp.float32)
        if conv.channels != conv.inputs:
            x = jnp.pad(x, ((0, 0), (0, 0), (0, conv.channels - conv.inputs)))
        if conv.normal:
            x = _activated(x, self.ref["gains"][...], conv.inputs)
        if not conv.edges and not conv.rows:
            x = jnp.where(jnp.logical_or(self.row == 0, self.row == conv.height + 1), 0.0, x)
        for ring, part in zip(self.rings, parts_of(x, conv.parts) if conv.split else [x], strict=True):
            ring[self.row % 3, pl.ds(column, x.shape[0])] = part

    def make_row(self) -> None:
        """Makes a row of the output, some columns at a time."""
        count, columns = self.conv.width // self.conv.columns, self.conv.columns

        def make(number: Any, _: Any) -> Any:
            self._make_columns(number * columns)
            return 0

        if columns % 8 == 0 or not self.conv.carried:
            jax.lax.fori_loop(0, count, make, 0)
        else:  # the carry's columns are sublanes, and cannot be cut anywhere by a number that is not known yet
            for number in range(count):
                make(number, 0)

    def _make_columns(self, start: Any) -> None:
        sums = self.ref["sums"]
        if self.conv.channels > BLOCK:  # a loop, which keeps the kernel's code short
            sums[...] = jnp.zeros_like(sums)

        def add(row: Any, _: Any) -> Any:
            product = self._product(start, row, 3)
            for n in range(sums.shape[0]):
                sums[n] += product[:, n * LANES : (n + 1) * LANES]
            return 0

        if self.conv.channels > BLOCK:
            jax.lax.fori_loop(0, 3, add, 0)
        else:
            product = self._product(start, 0, 9)
            for n in range(sums.shape[0]):
                sums[n] = product[:, n * LANES : (n + 1) * LANES]
        self._finish(start)

    def _product(self, start: Any, group: Any, count: int) -> jax.Array:
        """Returns the sum of products of a group of taps in space, [columns * T, N]."""
        conv = self.conv
        step = max(1, BLOCK // conv.channels)  # so many taps make a product as deep as a matrix unit
        total: Any = None
        for tap in range(0, count, step):
            some = range(tap, min(tap + step, count))
            lhs = [self._positions(start, group, n, count) for n in some]
            joined = [jnp.concatenate(each, -1) if len(each) > 1 else each[0] for each in zip(*lhs, strict=True)]
            here = pl.ds((group * count + tap) * conv.channels, len(some) * conv.channels)
            for mine, theirs in conv.products:
                weight = self.ref[f"weight{theirs}"][0, here]
                product = jnp.dot(joined[mine], weight, precision="default", preferred_element_type=jnp.float32)
                total = product if total is None else total + product
        return total

    def _positions(self, start: Any, group: Any, number: int, count: int) -> list[jax.Array]:
        """Returns the parts of the positions that a tap in space meets, [columns * T, C]."""
        conv = self.conv
        row, column = (number // 3, number % 3) if count == 9 else (group, number)
        slot = (self.row + row + 1) % 3  # the output's row is two behind the input's
        rows = [ring[slot, pl.ds(start + column, conv.columns)] for ring in self.rings]
        rows = [x.reshape(conv.columns * conv.frames, conv.channels) for x in rows]
        return rows if conv.split else parts_of(rows[0], conv.parts)

    def _finish(self, start: Any) -> None:
        """Adds the taps in time, each some frames later, and the bias; keeps what is due after the last frame."""
        conv, here = self.conv, pl.ds(start, self.conv.columns)
        total = [x.reshape(conv.columns, conv.frames, conv.block) for x in self._taps(slice(None))]
        out = total[-1] + self.ref["bias"][...]
        if conv.taps == 3:
            number = jax.lax.broadcasted_iota(jnp.int32, (1, conv.frames, 1), 1)
            out = out + jnp.where(number >= 1, pltpu.roll(total[1], 1, 1), 0.0)
            out = out + jnp.where(number >= 2, pltpu.roll(total[0], 2, 1), 0.0)
            for n, before in enumerate(self._before(here)):
                out = out + jnp.where(number == n, before[:, None, :], 0.0)
        if conv.carried:
            last, other = (self._taps(self._frame(conv.frames - n)) for n in (1, 2))
            width = self.ref["next"].shape[-1]
            self.ref["next"][0, 0, here] = (other[0] + last[1])[:, :width]
            self.ref["next"][1, 0, here] = last[0][:, :width]
        out = out[..., : self.ref["out"].shape[-1]]
        if conv.residual:
            out = out + self.ref["residual"][0, here].astype(jnp.float32)
        self.ref["out"][0, here] = out.astype(conv.dtype)

    def _taps(self, rows: Any) -> list[jax.Array]:
        """Returns rows of the sums, those of each tap in time."""
        slabs = self.conv.block // LANES
        parts = [[self.ref["sums"].at[n * slabs + m][rows] for m in range(slabs)] for n in range(self.conv.taps)]
        return [jnp.concatenate(part, -1) for part in parts]

    def _frame(self, number: int) -> Any:
        """Returns where the rows of one frame are."""
        return pl.ds(number, self.conv.columns, stride=self.conv.frames)

    def _before(self, here: Any) -> list[jax.Array]:
        """Returns what earlier frames add to the first two, [columns, B] each."""
        head = self._taps(self._frame(0))
        begin = [head[0] + head[1], head[0]] if self.conv.edges else [jnp.zeros_like(head[0])] * 2
        if not self.conv.carried:
            return begin if self.conv.edges else []
        missing = self.conv.block - self.ref["carry"].shape[-1]
        carry = [jnp.pad(self.ref["carry"][n, 0, here], ((0, 0), (0, missing))) for n in range(2)]
        return [jnp.where(self.is_first, mine, one) for mine, one in zip(begin, carry, strict=True)]


def _activated(x: jax.Array, gains: jax.Array, channels: int) -> jax.Array:
    """Returns SiLU of RMSNorm, as `torch.nn.functional.normalize` computes it."""
    length = jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))
    x = x / jnp.maximum(length, 1e-12) * channels**0.5 * gains
    return x * jax.nn.sigmoid(x)


def alone(**sizes: Any) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """Returns a kernel and its operands' shapes, for `torchport.tpu.bundles.compile_kernel`."""
    conv = Conv(**sizes)
    shape = jax.ShapeDtypeStruct
    rows = conv.height + 2 * conv.rows
    x = shape((rows, conv.width, conv.frames, conv.inputs), conv.dtype)
    side = shape((rows, 1, conv.frames, conv.inputs), conv.dtype)
    weight = shape((conv.blocks, 9 * conv.channels, conv.taps * conv.block), jnp.bfloat16)
    more = {
        "gains": shape((conv.inputs,), jnp.float32) if conv.normal else None,
        "residual": shape((conv.height, conv.width, conv.frames, conv.outputs), conv.dtype) if conv.residual else None,
        "carry": shape((2, conv.height, conv.width, conv.outputs), jnp.float32) if conv.carried else None,
        "first": shape((1,), jnp.int32) if conv.carried else None,
    }
    keys = [key for key, value in more.items() if value is not None]

    def call(x: Any, left: Any, right: Any, bias: Any, *rest: Any) -> Any:
        weights, others = list(rest[: conv.parts]), dict(zip(keys, rest[conv.parts :], strict=True))
        return convolved(conv, x, (left, right), weights, bias, **others)

    bias = shape((conv.outputs,), jnp.float32)
    return call, [x, side, side, bias, *[weight] * conv.parts, *(more[key] for key in keys)]


def trips(conv: Conv) -> tuple[int, ...]:
    """Returns how often the kernel's loops run, in the order in which they begin: see `torchport.tpu.cost.Trips`."""
    tiles = conv.width // conv.columns
    deep = (3,) if conv.channels > BLOCK else ()
    if conv.columns % 8 == 0 or not conv.carried:
        inner: tuple[int, ...] = (*((tiles,) if tiles > 1 else ()), *deep)
    else:
        inner = deep * tiles
    some = conv.width // conv.together
    return (conv.blocks * (conv.height + 2), *((some,) if some > 1 else ()), *inner)


def moved(conv: Conv) -> int:
    """Returns the bytes that a call reads from HBM and writes there."""
    size, positions = jnp.dtype(conv.dtype).itemsize, conv.height * conv.width
    inputs = conv.blocks * positions * conv.frames * conv.inputs * size
    outputs = positions * conv.frames * conv.outputs * size * (1 + conv.residual)
    carries = 2 * 2 * 4 * positions * conv.outputs * conv.carried
    return inputs + outputs + carries + 2 * 9 * conv.parts * conv.taps * conv.channels * conv.blocks * conv.block
