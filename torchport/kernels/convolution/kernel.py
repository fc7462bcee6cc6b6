"""A 3 x 3 x 3 convolution, causal in time, of one device's part of a video: a Pallas kernel for TPU.

A grid step makes a row of the output for a block of B of the D channels out; docs/decoders.md says how. float32
operands are split into two or three bfloat16 parts, and multiplied as three or six products of parts: products as small
as the rounding are left out.

Shapes: H rows, W columns, T frames, C channels in, D channels out, P parts; N = 3 B columns, for three taps in time.
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

from torchport.kernels.attention.tiles import LANES, rounded_up
from torchport.kernels.convolution.by_xla import Operands, activated

ROWS = 256
"""Positions of a product. Each product loads the weights again, so few positions are slow."""
BLOCK = 256
"""The most channels out of a grid step, and the depth of a matrix unit."""
VMEM = 110 * 2**20
"""Bytes of vector memory that a kernel may take of the 128 MiB."""


@dataclasses.dataclass(frozen=True)
class Conv:
    """The sizes and options of a call of the kernel."""

    height: int  #: H of the input.
    width: int  #: W.
    #: T, a multiple of 8, and of 16 for bfloat16 products without a conversion for each tap.
    frames: int
    inputs: int  #: C.
    outputs: int  #: D.
    parts: int  #: 1 for products of bfloat16, 2 for three of them, 3 for six.
    taps: int = 3  #: Of time: 3, or 1.
    #: Whether the video is padded with its nearest row or frame; otherwise with 0.
    edges: bool = True
    rows: bool = False  #: Whether the input has a row more at each end.
    normal: bool = False  #: Whether the input goes through RMSNorm and SiLU first.
    residual: int = 0  #: Rows of the residual for each row of the input; 0: there is none.
    carried: bool = False  #: Whether there are chunks before and after this one.
    led: bool = False  #: Whether frames of padding may come first, which count as 0.
    dtype: str = "float32"  #: Of input, output and residual.
    #: Whether the padding before the first frame repeats that frame; otherwise it is 0. None: as `edges` says.
    still: bool | None = None
    #: 2: rows and columns of the input are repeated first, which is upsampling, and the output has twice as many.
    zoom: int = 1
    #: How many rows, and columns, of the input share a scale and a shift, if the input becomes SiLU(input * scale +
    #: shift) first; 0: without scale and shift.
    scaled: int = 0

    @property
    def channels(self) -> int:
        """C, padded to whole registers in the ring of input rows."""
        return rounded_up(self.inputs, LANES)

    @property
    def depth(self) -> int:
        """C, padded to whole registers of the weights: the rows of a tap's weights in a product."""
        return rounded_up(self.inputs, 16)

    @property
    def side(self) -> int:
        """Taps in space along a side. With upsampling, two of three meet the same position, and become their sum."""
        return 3 if self.zoom == 1 else 2

    @property
    def phases(self) -> int:
        """How many positions of the output come of a position of the input; each phase has different weights."""
        return self.zoom**2

    @property
    def weight_parts(self) -> int:
        """P of the weights: at least 2 with upsampling, as sums of weights have more bits than bfloat16."""
        return self.parts if self.zoom == 1 else max(2, self.parts)

    @property
    def deep(self) -> bool:
        """Whether the kernel loops over rows of taps in space, as unrolled code would be too long."""
        return self.side**2 * self.channels > 9 * BLOCK

    @property
    def together_taps(self) -> int:
        """Taps in space that are joined in a product, to leave little of a matrix unit's depth of 256 empty."""
        whole = BLOCK % self.depth == 0 or self.depth % BLOCK == 0
        return max(1, (BLOCK if whole else 3 * BLOCK) // self.depth)

    @property
    def pitch(self) -> int:
        """Columns of a tap in time in a product: B, or 32 if the channels out of all taps then fit the 128 lanes."""
        return LANES // 4 if self.taps == 3 and self.outputs <= LANES // 4 else self.block

    @property
    def sums(self) -> int:
        """N: columns of a product, for all taps in time."""
        return rounded_up(self.taps * self.pitch, LANES)

    @property
    def block(self) -> int:
        """B: channels out of a grid step."""
        return min(BLOCK, rounded_up(self.outputs, LANES))

    @property
    def blocks(self) -> int:
        """Blocks of B channels into which the D channels out are cut, a grid step for each."""
        return -(-self.outputs // self.block)

    @property
    def columns(self) -> int:
        """Columns of the video in a product: the divisor of W whose positions in all frames are closest to `ROWS`."""
        fits = [n for n in range(1, self.width + 1) if self.width % n == 0 and n * self.frames <= 2.5 * ROWS]
        return min(fits or [1], key=lambda n: (abs(n * self.frames - ROWS), n % 8 != 0))

    @property
    def columns_at_once(self) -> int:
        """Columns of the input that enter the ring at once: W, or with a norm or scale a divisor with 64 registers."""
        if not self.normal and not self.scaled:
            return self.width
        unit = max(self.scaled, 1)
        most = max(1, 64 * 1024 // (self.frames * self.channels * unit))  # a register has 1024 values
        return unit * max(n for n in range(1, most + 1) if self.width // unit % n == 0)

    @property
    def split(self) -> bool:
        """Whether the ring has bfloat16 parts; else it has float32, as frames do not fill bfloat16's 16 sublanes."""
        return self.frames % 16 == 0

    @property
    def products(self) -> list[tuple[int, int]]:
        """Pairs (part of the input, part of the weights) that are multiplied, the smallest products first."""
        pairs = [(a, b) for a in range(self.parts) for b in range(self.weight_parts - a)]
        return sorted(pairs, key=lambda pair: -sum(pair))

    @property
    def name(self) -> str:
        """The kernel's name in a profile."""
        ways = (self.normal, bool(self.residual), self.carried, self.led)
        flags = "".join(letter for letter, on in zip("nrcl", ways, strict=True) if on)
        if self.zoom > 1:
            flags += f"z{self.zoom}"
        if self.scaled:
            flags += f"s{self.scaled}"
        sizes = f"{self.height}x{self.width}x{self.frames}_{self.inputs}_{self.outputs}"
        return f"conv{self.taps}_{sizes}_p{self.parts}{flags}_{jnp.dtype(self.dtype).itemsize}"


def parts_of(x: jax.Array, count: int) -> list[jax.Array]:
    """Returns x as `count` bfloat16 arrays, whose sum is x: each has the next 8 bits."""
    parts: list[jax.Array] = []
    for _ in range(count):
        parts.append(x.astype(jnp.bfloat16))
        x = x.astype(jnp.float32) - parts[-1].astype(jnp.float32)
    return parts


def weights_of(weight_DCTHW: jax.Array, conv: Conv) -> list[jax.Array]:
    """Returns PyTorch's weights as the kernel takes them: parts [phases * blocks, taps in space * depth, N]."""
    phases = [weight_DCTHW]
    if conv.zoom == 2:
        wide = weight_DCTHW.astype(jnp.float32)
        phases = [_phase(_phase(wide, 3, row), 4, column) for row in range(2) for column in range(2)]
    by_part = zip(*[_weight_parts(phase, conv.weight_parts) for phase in phases], strict=True)
    return [jnp.concatenate([_as_rows(part, conv) for part in parts]) for parts in by_part]


def _weight_parts(x: jax.Array, count: int) -> list[jax.Array]:
    """Returns `parts_of` x by operations that XLA moves out of the loop over chunks: no output exceeds its input."""
    parts: list[jax.Array] = []
    for _ in range(count):
        part = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return parts


def _phase(weight: jax.Array, dim: int, phase: int) -> jax.Array:
    """Returns the two taps along a dim that compute phase 0 or 1: the first or second of two upsampled positions."""
    # Two of the three taps meet copies of the same position, and are added up.
    first, middle, last = jnp.split(weight, 3, dim)
    return jnp.concatenate([first + middle, last] if phase else [first, middle + last], dim)


def _as_rows(weight_DCTHW: jax.Array, conv: Conv) -> jax.Array:
    """Returns weights as [blocks, taps in space * depth, N]."""
    outputs, inputs = weight_DCTHW.shape[:2]
    padded = jnp.pad(
        weight_DCTHW, ((0, conv.blocks * conv.pitch - outputs), (0, conv.depth - inputs), (0, 0), (0, 0), (0, 0))
    )
    spots = conv.side**2
    split = padded.reshape(conv.blocks, conv.pitch, conv.depth, conv.taps, spots)
    # Taps in time are joined one by one: a TPU pads three of them to four.
    taps = [split[:, :, :, n].transpose(0, 3, 2, 1) for n in range(conv.taps)]
    rows = jnp.concatenate([tap.reshape(conv.blocks, spots * conv.depth, conv.pitch) for tap in taps], -1)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, conv.sums - rows.shape[2])))


def convolved(
    conv: Conv,
    x: jax.Array,
    sides: tuple[jax.Array, jax.Array],
    weights: list[jax.Array],
    bias: jax.Array,
    operands: Operands,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the convolution, and the carry for the next chunk.

    Args:
        x: [H, W, T, C], with `conv.rows` [H + 2, W, T, C].
        sides: The columns before and after x, of as many rows, [H, 1, T, C].
        weights: From `weights_of`.
        operands: The arrays for which `conv` has an option. In the first chunk `carry` is replaced, by `conv.still`.
        interpret: Run the kernel as plain JAX.

    Returns:
        [zoom * H, zoom * W, T, D] of x's dtype; and [2, H, W, D] float32, or None without chunks.
    """
    first = 1 if operands.first is None else operands.first
    lead = 0 if operands.lead is None else operands.lead
    numbers = [jnp.asarray(number).reshape(1).astype(jnp.int32) for number in (first, lead)]
    arrays = {"x": x, "left": sides[0], "right": sides[1], "bias": _row(bias, conv.blocks * conv.block)}
    arrays |= {f"weight{n}": weight for n, weight in enumerate(weights)} | vars(operands)
    if operands.gains is not None:
        arrays["gains"] = _row(operands.gains, conv.channels)
    in_specs, (out_specs, out_shapes) = _inputs(conv), _outputs(conv)
    ring = (3, conv.width + 2, conv.frames, conv.channels)
    rings = [pltpu.VMEM(ring, jnp.bfloat16)] * conv.parts if conv.split else [pltpu.VMEM(ring, jnp.float32)]
    # Slabs of 128 columns: rows cannot be read with a stride from a wider array.
    slabs = (conv.sums // LANES, conv.columns * conv.frames, LANES)
    outputs = pl.pallas_call(
        functools.partial(_kernel, conv),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(conv.phases * conv.blocks, conv.height + 2),
            in_specs=list(in_specs.values()),
            out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM(slabs, jnp.float32), *rings],
        ),
        out_shape=out_shapes,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM),
        interpret=interpret,
        name=conv.name,
    )(*numbers, *(arrays[name] for name in in_specs))
    out = outputs[0].reshape(conv.zoom * conv.height, conv.zoom * conv.width, conv.frames, conv.outputs)
    return out, outputs[1] if conv.carried else None


def _row(vector: jax.Array, size: int) -> jax.Array:
    """Returns a vector as a float32 row [1, size], padded with zeros."""
    return jnp.pad(vector.astype(jnp.float32), (0, size - vector.shape[0]))[None]


def _inputs(conv: Conv) -> dict[str, pl.BlockSpec]:
    """Returns the operands' block specs by name, in order, for a grid of (n: phase and block of channels out, s: row).

    Step s takes row s - 1 of the input, as row -1 is padding, and writes row s - 2 of the output.
    """

    def line(width: int, times: int) -> pl.BlockSpec:
        """Returns the block spec of an array with a row for each `times` rows of the input."""

        def row(n: Any, s: Any, *numbers: Any) -> tuple[Any, ...]:
            # With `conv.rows`, the array begins with row -1.
            inside = jnp.clip(s - 1, 0, conv.height - 1) // times
            return ((s - 1 + times) // times if conv.rows else inside, 0, 0, 0)

        return pl.BlockSpec((1, width, conv.frames, conv.inputs), row)

    def of_residual(n: Any, s: Any, *numbers: Any) -> tuple[Any, ...]:
        row = jnp.maximum(s - 2, 0)
        return (row if conv.residual == 1 else 2 * row + n // conv.blocks // 2, 0, 0, n % conv.blocks)

    block = min(conv.block, conv.outputs)
    taps = (1, conv.side**2 * conv.depth, conv.sums)
    weights = pl.BlockSpec(taps, lambda n, s, *numbers: (n, 0, 0), pipeline_mode=pl.Buffered(1))
    specs = {"x": line(conv.width, times=1), "left": line(1, times=1), "right": line(1, times=1)}
    specs |= {f"weight{n}": weights for n in range(conv.weight_parts)}
    specs["bias"] = pl.BlockSpec((1, conv.block), lambda n, s, *numbers: (0, n % conv.blocks))
    if conv.normal:
        specs["gains"] = pl.BlockSpec((1, conv.channels), lambda n, s, *numbers: (0, 0))
    if conv.residual:
        specs["residual"] = pl.BlockSpec((1, conv.width, conv.frames, block), of_residual)
    if conv.scaled:
        specs["scale"] = specs["shift"] = line(conv.width // conv.scaled + 2, conv.scaled)
    if conv.carried:
        size = (2, 1, conv.width, block)
        specs["carry"] = pl.BlockSpec(size, lambda n, s, *numbers: (0, jnp.maximum(s - 2, 0), 0, n))
    return specs


def _outputs(conv: Conv) -> tuple[list[pl.BlockSpec], list[jax.ShapeDtypeStruct]]:
    """Returns block specs and shapes of the kernel's outputs: the video, and with chunks the next chunk's carry."""
    block = min(conv.block, conv.outputs)

    def upsampled(n: Any, s: Any, *numbers: Any) -> tuple[Any, ...]:
        """Returns the block that grid step (n, s) writes: n counts the blocks of D of each of four phases."""
        phase = n // conv.blocks
        return (jnp.maximum(s - 2, 0), phase // 2, 0, phase % 2, 0, n % conv.blocks)

    specs = [pl.BlockSpec((1, conv.width, conv.frames, block), lambda n, s, *numbers: (jnp.maximum(s - 2, 0), 0, 0, n))]
    sizes: tuple[int, ...] = (conv.height, conv.width)
    if conv.zoom == 2:
        specs = [pl.BlockSpec((1, 1, conv.width, 1, conv.frames, block), upsampled)]
        sizes = (conv.height, 2, conv.width, 2)
    shapes = [jax.ShapeDtypeStruct((*sizes, conv.frames, conv.outputs), conv.dtype)]
    if conv.carried:
        specs.append(_inputs(conv)["carry"])
        shapes.append(jax.ShapeDtypeStruct((2, conv.height, conv.width, conv.outputs), jnp.float32))
    return specs, shapes


def _kernel(conv: Conv, first: Any, lead: Any, *refs: Any) -> None:
    """Takes a row of the input into the ring of three rows, and makes a row of the output from the ring. `refs` are
    references to operands, outputs, sums and rings.
    """
    names = [*_inputs(conv), *(["out", "next"] if conv.carried else ["out"]), "sums"]
    step = _GridStep(
        conv,
        dict(zip(names, refs, strict=False)),
        rings=refs[len(names) :],
        is_first=first[0] == 1,
        lead=lead[0],
        row=pl.program_id(1),
        phase=divmod(pl.program_id(0) // conv.blocks, 2) if conv.zoom == 2 else (0, 0),
    )
    step.take_row()
    pl.when(step.row >= 2)(step.make_row)


@dataclasses.dataclass(frozen=True)
class _GridStep:
    """A step of the kernel's grid, with its references by name."""

    conv: Conv
    ref: dict[str, Any]
    #: The last three rows of the input, with a column more at each end: one array for each part.
    rings: Any
    is_first: Any
    lead: Any  #: How many frames count as 0.
    row: Any  #: The input's row, of H + 2.
    #: 0 or 1 for the first or second of two upsampled rows, and columns.
    phase: tuple[Any, Any]

    def take_row(self) -> None:
        """Puts a row of the input, and the columns on its two sides, into the ring of the last three rows."""
        conv = self.conv
        count = self.conv.columns_at_once

        def write_columns(number: Any, _: Any) -> Any:
            x = self._columns("x", number * count, count, times=1)
            scales = [self._columns(name, 1 + number * (count // conv.scaled), count, conv.scaled) for name in scaling]
            self._enter_columns(x, 1 + number * count, scales)
            return 0

        scaling = ("scale", "shift") if conv.scaled else ()
        if count < conv.width:
            jax.lax.fori_loop(0, conv.width // count, write_columns, 0)
        else:
            write_columns(0, 0)
        for side, column in (("left", 0), ("right", conv.width + 1)):
            start = conv.width // conv.scaled + 1 if conv.scaled and side == "right" else 0
            x = self._columns(side, start=0, count=1, times=1)
            scales = [self._columns(name, start, count=1, times=1) for name in scaling]
            self._enter_columns(x, column, scales)

    def _columns(self, name: str, start: Any, count: int, times: int) -> jax.Array:
        """Returns `count` columns of an operand's row, [count, T, C] in float32, each read column `times` times."""
        conv = self.conv
        x = self.ref[name][0, pl.ds(start, count // times)].astype(jnp.float32)
        if conv.channels != conv.inputs:
            x = jnp.pad(x, ((0, 0), (0, 0), (0, conv.channels - conv.inputs)))
        if times == 1:
            return x
        return jnp.broadcast_to(x[:, None], (x.shape[0], times, *x.shape[1:])).reshape(count, *x.shape[1:])

    def _enter_columns(self, x: jax.Array, column: Any, scaling: list[jax.Array]) -> None:
        """Puts columns into the ring of input rows, after scale and shift, the norm, and zeros for padding."""
        conv = self.conv
        if conv.scaled:
            x = x * scaling[0] + scaling[1]
            x = x * jax.nn.sigmoid(x)
        if conv.normal:
            x = activated(x, self.ref["gains"][...], conv.inputs)
        if not conv.edges and not conv.rows:
            x = jnp.where(jnp.logical_or(self.row == 0, self.row == conv.height + 1), 0.0, x)
        if conv.led:
            x = jnp.where(jax.lax.broadcasted_iota(jnp.int32, (1, conv.frames, 1), 1) >= self.lead, x, 0.0)
        for ring, part in zip(self.rings, parts_of(x, conv.parts) if conv.split else [x], strict=True):
            ring[self.row % 3, pl.ds(column, x.shape[0])] = part

    def make_row(self) -> None:
        """Makes a row of the output, some columns at a time; `columns` divides the width."""
        count = self.conv.width // self.conv.columns
        if self.conv.columns % 8 == 0 or not self.conv.carried:
            jax.lax.fori_loop(0, count, self._make_columns, 0)
        else:
            # The carry's columns are sublanes, 8 to a register. A loop's number may cut them at multiples of 8 alone,
            # and a number that is known when the kernel is compiled anywhere.
            for number in range(count):
                self._make_columns(number, 0)

    def _make_columns(self, number: Any, _: Any) -> Any:
        """Computes and writes the output for the columns of product `number`; the loop's carry, 0, is not used."""
        start = number * self.conv.columns
        sums = self.ref["sums"]
        side = self.conv.side

        def add(row: Any, _: Any) -> Any:
            product = self._product(start, row, side)
            for n in range(sums.shape[0]):
                sums[n] += product[:, n * LANES : (n + 1) * LANES]
            return 0

        if self.conv.deep:
            sums[...] = jnp.zeros_like(sums)
            jax.lax.fori_loop(0, side, add, 0)
        else:
            product = self._product(start, group=0, count=side**2)
            for n in range(sums.shape[0]):
                sums[n] = product[:, n * LANES : (n + 1) * LANES]
        self._finish(start)
        return 0

    def _product(self, start: Any, group: Any, count: int) -> jax.Array:
        """Returns the sum of products of a group of `count` taps in space, [columns * T, N]."""
        conv = self.conv
        total: Any = None
        for tap in range(0, count, conv.together_taps):
            taps = range(tap, min(tap + conv.together_taps, count))
            inputs = [self._positions(start, group, n, count) for n in taps]
            by_part = zip(*inputs, strict=True)
            joined = [jnp.concatenate(each, -1) if len(each) > 1 else each[0] for each in by_part]
            rows = pl.ds((group * count + tap) * conv.depth, len(taps) * conv.depth)
            for part, weight_part in conv.products:
                weight = self.ref[f"weight{weight_part}"][0, rows]
                product = jnp.dot(joined[part], weight, precision="default", preferred_element_type=jnp.float32)
                total = product if total is None else total + product
        return total

    def _positions(self, start: Any, group: Any, number: int, count: int) -> list[jax.Array]:
        """Returns the input of tap `number` in space of a group, [columns * T, depth], an array for each part."""
        conv = self.conv
        # A group has all taps, or a row of them if the kernel loops over rows.
        row, column = divmod(number, conv.side) if count > conv.side else (group, number)
        slot = (self.row + row + self.phase[0] + 1) % 3  # the output's row is two behind the input's
        rows = [ring[slot, pl.ds(start + column + self.phase[1], conv.columns)] for ring in self.rings]
        rows = [x.reshape(conv.columns * conv.frames, conv.channels)[:, : conv.depth] for x in rows]
        return rows if conv.split else parts_of(rows[0], conv.parts)

    def _finish(self, start: Any) -> None:
        """Adds up the taps in time, each some frames later, and the bias; writes the output and the next carry."""
        conv = self.conv
        here = pl.ds(start, self.conv.columns)
        total = [x.reshape(conv.columns, conv.frames, conv.block) for x in self._taps(slice(None))]
        out = total[-1] + self.ref["bias"][...]
        if conv.taps == 3:
            number = jax.lax.broadcasted_iota(jnp.int32, (1, conv.frames, 1), 1)
            out = out + jnp.where(number >= 1, pltpu.roll(total[1], shift=1, axis=1), 0.0)
            out = out + jnp.where(number >= 2, pltpu.roll(total[0], shift=2, axis=1), 0.0)
            for n, before in enumerate(self._from_earlier_frames(here)):
                out = out + jnp.where(number == n, before[:, None, :], 0.0)
        if conv.carried:
            last, other = (self._taps(self._rows_of_frame(conv.frames - n)) for n in (1, 2))
            width = self.ref["next"].shape[-1]
            self.ref["next"][0, 0, here] = (other[0] + last[1])[:, :width]
            self.ref["next"][1, 0, here] = last[0][:, :width]
        out = out[..., : self.ref["out"].shape[-1]]
        if conv.residual:
            out = out + self.ref["residual"][0, here].astype(jnp.float32)
        self.ref["out"][(0, here) if conv.zoom == 1 else (0, 0, here, 0)] = out.astype(conv.dtype)

    def _taps(self, rows: Any) -> list[jax.Array]:
        """Returns some rows of the summed products, as an array for each tap in time."""
        if self.conv.pitch < LANES:
            # A single slab has all taps, `pitch` lanes apart: each is moved to the front.
            taps = self.ref["sums"].at[0][rows]
            return [taps, *(pltpu.roll(taps, LANES - n * self.conv.pitch, 1) for n in range(1, self.conv.taps))]
        slabs = self.conv.block // LANES
        parts = [[self.ref["sums"].at[n * slabs + m][rows] for m in range(slabs)] for n in range(self.conv.taps)]
        return [jnp.concatenate(part, -1) for part in parts]

    def _rows_of_frame(self, number: int) -> Any:
        """Returns the rows of the sums [columns * T, N] that belong to frame `number`."""
        return pl.ds(number, self.conv.columns, stride=self.conv.frames)

    def _from_earlier_frames(self, here: Any) -> list[jax.Array]:
        """Returns the earlier frames' part in the first two output frames, [columns, B] each; [] if it is always 0."""
        head = self._taps(self._rows_of_frame(0))
        still = self.conv.edges if self.conv.still is None else self.conv.still
        start = [head[0] + head[1], head[0]] if still else [jnp.zeros_like(head[0])] * 2
        if not self.conv.carried:
            return start if still else []
        missing = self.conv.block - self.ref["carry"].shape[-1]
        carry = [jnp.pad(self.ref["carry"][n, 0, here], ((0, 0), (0, missing))) for n in range(2)]
        return [jnp.where(self.is_first, before, carried) for before, carried in zip(start, carry, strict=True)]


def alone(**sizes: Any) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """Returns the kernel as a function of arrays, and their shapes, for `torchport.plan.tpu.bundles.compile_kernel`."""
    conv = Conv(**sizes)
    shape = jax.ShapeDtypeStruct
    rows = conv.height + 2 * conv.rows
    x = shape((rows, conv.width, conv.frames, conv.inputs), conv.dtype)
    side = shape((rows, 1, conv.frames, conv.inputs), conv.dtype)
    weight = shape((conv.phases * conv.blocks, conv.side**2 * conv.depth, conv.sums), jnp.bfloat16)
    scaling = None
    if conv.scaled:
        size = (conv.height // conv.scaled + 2 * conv.rows, conv.width // conv.scaled + 2)
        scaling = shape((*size, conv.frames, conv.inputs), jnp.float32)
    operands = Operands(
        gains=shape((conv.inputs,), jnp.float32) if conv.normal else None,
        residual=shape((conv.height * conv.residual, conv.width, conv.frames, conv.outputs), conv.dtype)
        if conv.residual
        else None,
        scale=scaling,
        shift=scaling,
        carry=shape((2, conv.height, conv.width, conv.outputs), jnp.float32) if conv.carried else None,
        first=shape((1,), jnp.int32) if conv.carried else None,
        lead=shape((1,), jnp.int32) if conv.led else None,
    )
    bias = shape((conv.outputs,), jnp.float32)
    shapes, tree = jax.tree.flatten((x, (side, side), [weight] * conv.weight_parts, bias, operands))
    return lambda *arrays: convolved(conv, *tree.unflatten(arrays)), shapes


def trips(conv: Conv) -> tuple[int, ...]:
    """Returns the iterations of each of the kernel's loops, in the order of `torchport.plan.tpu.bundles.Trips`."""
    tiles = conv.width // conv.columns
    deep = (conv.side,) if conv.deep else ()
    if conv.columns % 8 == 0 or not conv.carried:  # as in `make_row`
        inner: tuple[int, ...] = (*((tiles,) if tiles > 1 else ()), *deep)
    else:
        inner = deep * tiles
    some = conv.width // conv.columns_at_once
    return (conv.phases * conv.blocks * (conv.height + 2), *((some,) if some > 1 else ()), *inner)


def moved(conv: Conv) -> int:
    """Returns the bytes that a call reads from HBM and writes there."""
    size = jnp.dtype(conv.dtype).itemsize
    positions = conv.height * conv.width
    blocks = conv.phases * conv.blocks
    inputs = blocks * positions * conv.frames * conv.inputs * size
    if conv.scaled:
        columns = conv.height // conv.scaled * (conv.width // conv.scaled + 2)
        inputs += 2 * 4 * blocks * columns * conv.frames * conv.inputs  # scale and shift, float32
    outputs = positions * conv.frames * conv.outputs * size * conv.phases * (2 if conv.residual else 1)
    carries = 2 * 2 * 4 * positions * conv.outputs * conv.carried  # two frames in float32, read and written
    weights = 2 * conv.side**2 * conv.weight_parts * conv.depth * blocks * conv.sums  # bfloat16
    return inputs + outputs + carries + weights
