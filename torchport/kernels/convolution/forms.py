"""The only door to causal convolutions of a video: the kernel on a TPU, XLA elsewhere, on each device's part.

On a TPU a convolution whose frames are a multiple of 8 goes through the kernel. A float32 product is made of 1, 3 or 6
bfloat16 products, with `jax.default_matmul_precision` at `default`, `high` or `highest`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from torchport.kernels.attention import dispatch
from torchport.kernels.attention.dispatch import platform
from torchport.kernels.convolution import by_xla, canvas, kernel
from torchport.kernels.convolution.by_xla import ConvolutionRequest, Operands
from torchport.kernels.convolution.canvas import Canvas

PARTS = {None: 1, "default": 1, "high": 2, "highest": 3}
"""The number of bfloat16 parts of a float32 operand, by the precision of a card."""
PAIRED = 8
"""Latent frames of a chunk, if latent frames are decoded in pairs."""
MOST_FRAMES = 64
"""The most frames of a call of the kernel: a row of more frames would not fit vector memory."""


def uses_kernel() -> bool:
    """Returns whether the program is traced for a TPU, or a test runs its kernels as plain JAX."""
    return platform()[0] == "tpu" or dispatch.current().interpret


def convolved(
    request: ConvolutionRequest,
    x_BCTHW: jax.Array,
    weight_DCTHW: jax.Array,
    bias_D: jax.Array | None,
    **operands: Any,
) -> tuple[jax.Array, jax.Array]:
    """Returns a causal convolution of a video on the current canvas (shards and padding), and the next chunk's carry.

    Args:
        x_BCTHW: The video, with the padding of the canvas.
        weight_DCTHW: [D, C, 3 or 1, 3, 3].
        operands: Fields of `Operands`, or None: residual [B, D, T, H, W], scale and shift [B, C, T, H, W], and the
            carry that the chunk before returned, [B, 2, H, W, D].
    """
    form = canvas.current()
    spec, whole = form.spec, PartitionSpec()
    carry_spec = PartitionSpec(None, None, form.rows or None, form.columns or None)
    specs = {"residual": spec, "scale": spec, "shift": spec, "carry": carry_spec}
    given = {name: jnp.asarray(value) for name, value in operands.items() if value is not None}

    def local(part: jax.Array, weight: jax.Array, bias: jax.Array | None, parts: dict[str, jax.Array]) -> Any:
        """Computes one device's part, sample by sample, with the borders of its neighbours."""
        fits = part.shape[2] % 8 == 0 and weight.shape[3:] == (3, 3)
        if request.zoom > 1:  # the kernel upsamples single frames alone, and repeats no residual
            is_wide = "residual" not in parts or parts["residual"].shape[4] == part.shape[4]
            fits = fits and request.zoom == 2 and weight.shape[2] == 1 and is_wide and "scale" not in parts
        takes_kernel = uses_kernel() and fits and part.dtype in (jnp.float32, jnp.bfloat16)
        convolve = _by_kernel if takes_kernel else by_xla.convolved
        outs, carries = [], []
        for n in range(part.shape[0]):  # the kernel takes the frames of one video
            x, sides = _with_neighbours(form, part[n].transpose(2, 3, 1, 0), request.edges)
            of_sample = _operands_of(form, n, Operands(**parts))
            out, kept = convolve(request, bool(form.rows), x, sides, weight, bias, of_sample)
            outs.append(out.transpose(3, 2, 0, 1))
            carries.append(kept)
        return jnp.stack(outs), jnp.stack(carries)

    given_specs = {name: specs.get(name, whole) for name in given}
    run = canvas.on_parts(local, (spec, whole, whole, given_specs), (spec, carry_spec))
    result: tuple[jax.Array, jax.Array] = run(x_BCTHW, weight_DCTHW, bias_D, given)
    return result


def _operands_of(form: Canvas, number: int, operands: Operands) -> Operands:
    """Returns the operands of sample `number` as [H, W, T, C], with neighbours' borders for scale and shift."""
    residual = None if operands.residual is None else operands.residual[number].transpose(2, 3, 1, 0)
    carry = None if operands.carry is None else operands.carry[number]
    scale = None if operands.scale is None else _scaling(form, operands.scale[number])
    shift = None if operands.shift is None else _scaling(form, operands.shift[number])
    return dataclasses.replace(operands, residual=residual, scale=scale, shift=shift, carry=carry)


def _scaling(form: Canvas, scale_CTHW: jax.Array) -> jax.Array:
    """Returns a device's part of a scale or shift, [H, W + 2, T, C], with neighbours' borders; 0 outside the video."""
    x = scale_CTHW.astype(jnp.float32).transpose(2, 3, 1, 0)
    x, (left, right) = _with_neighbours(form, x, edges=False)
    return jnp.concatenate([left, x, right], axis=1)


def ways(axes: tuple[str, ...]) -> int:
    """Returns the number of parts into which some axes of the mesh split a dim; call it inside a `shard_map`."""
    return int(lax.axis_size(axes)) if axes else 1


def _with_neighbours(form: Canvas, x: jax.Array, edges: bool) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns a device's part [H, W, T, C], with a row more at each end if rows are split; and the columns beside."""
    if form.rows:
        valid_rows = form.valid_rows(x.shape[0] * ways(form.rows))
        x, (above, below) = _with_slices_beside(x, 0, form.rows, valid_rows, edges)
        x = jnp.concatenate([above, x, below])
    valid_columns = form.valid_columns(x.shape[1] * ways(form.columns))
    return _with_slices_beside(x, 1, form.columns, valid_columns, edges)


def _with_slices_beside(
    x: jax.Array, dim: int, axes: tuple[str, ...], valid: int, edges: bool
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns a device's part with its padding replaced, and the slices before and after it along a dim.

    A device without a valid slice may get any values: only its neighbour with the last valid slice reads from it, and
    drops the values.

    Args:
        valid: How many slices of the whole video are no padding.
        edges: Whether padding and slices beyond the video become the nearest valid slice; otherwise 0.
    """
    size = x.shape[dim]
    if valid == size * ways(axes):
        return x, slices_beside(x, dim, axes, edges)
    count = valid_from_here(size, axes, valid)
    index = lax.broadcasted_iota(jnp.int32, [size if n == dim else 1 for n in range(x.ndim)], dim)
    last = lax.dynamic_slice_in_dim(x, jnp.clip(count - 1, 0, size - 1), 1, dim)
    x = jnp.where(index < count, x, last if edges else jnp.zeros_like(last))
    before, after = slices_beside(x, dim, axes, edges)
    last = lax.index_in_dim(x, size - 1, dim)
    # After the last valid slice comes the video's padding, not the neighbour's part, which is all padding.
    is_end = valid_from_here(size, axes, valid) <= size
    return x, (before, jnp.where(is_end, last if edges else jnp.zeros_like(last), after))


def _by_kernel(
    request: ConvolutionRequest,
    rows: bool,
    x: jax.Array,
    sides: tuple[jax.Array, jax.Array],
    weight: jax.Array,
    bias: jax.Array | None,
    operands: Operands,
) -> tuple[jax.Array, jax.Array]:
    """Computes `by_xla.convolved` by the kernel, in several calls if a row of frames would not fit vector memory."""
    conv, count = _sizes_and_calls(request, rows, x, weight, operands)
    context = dispatch.current()
    if context.note is not None:
        loops = kernel.trips(conv)
        size = kernel.moved(conv)
        context.note(dispatch.Pass(conv.name, f"{kernel.__name__}:alone", dataclasses.asdict(conv), loops, size))
    weights = kernel.weights_of(weight, conv)
    bias = jnp.zeros(weight.shape[0], jnp.float32) if bias is None else bias
    run = functools.partial(kernel.convolved, conv, interpret=context.interpret)
    empty = jnp.zeros((2, conv.height, conv.width, weight.shape[0]), jnp.float32)
    carry = empty if operands.carry is None else operands.carry
    is_first = jnp.asarray(operands.carry is None if operands.first is None else operands.first).reshape(1)
    if count == 1:
        out, kept = run(x, sides, weights, bias, dataclasses.replace(operands, carry=carry, first=is_first))
        return out, empty if kept is None else kept

    def by_call(array: jax.Array) -> jax.Array:
        # [H, W, T, C] as [calls, H, W, frames of a call, C].
        return jnp.moveaxis(array.reshape(*array.shape[:2], count, conv.frames, -1), 2, 0)

    def call(kept: jax.Array, item: Any) -> tuple[jax.Array, jax.Array]:
        """Calls the kernel on some frames, with the carry of the frames before them; returns carry and output."""
        number, x, sides, arrays = item
        left = None if operands.lead is None else operands.lead - number * conv.frames
        options = Operands(**arrays, gains=operands.gains, carry=kept, first=is_first & (number == 0), lead=left)
        out, after = run(x, sides, weights, bias, options)
        return (kept if after is None else after), out

    framed = {"residual": operands.residual, "scale": operands.scale, "shift": operands.shift}
    kept, outs = lax.scan(call, carry, (jnp.arange(count), *jax.tree.map(by_call, (x, sides, framed))))
    return jnp.moveaxis(outs, 0, 2).reshape(*outs.shape[1:3], x.shape[2], -1), kept


def _sizes_and_calls(
    request: ConvolutionRequest, rows: bool, x: jax.Array, weight: jax.Array, operands: Operands
) -> tuple[kernel.Conv, int]:
    """Returns the sizes of a call of the kernel, and the number of calls; with `rows`, x has its neighbours' rows."""
    frames = x.shape[2]
    count = next(n for n in range(1, frames + 1) if frames % n == 0 and frames // n <= MOST_FRAMES)
    height, width = x.shape[0] - 2 * rows, x.shape[1]
    conv = kernel.Conv(
        height=height,
        width=width,
        frames=frames // count,
        inputs=x.shape[3],
        outputs=weight.shape[0],
        parts=1 if x.dtype == jnp.bfloat16 else PARTS[jax.config.jax_default_matmul_precision],
        taps=weight.shape[2],
        edges=request.edges,
        rows=rows,
        normal=operands.gains is not None,
        residual=0 if operands.residual is None else operands.residual.shape[0] // height,
        carried=(request.chunked or count > 1) and weight.shape[2] == 3,
        led=operands.lead is not None,
        dtype=x.dtype.name,
        still=request.still,
        zoom=request.zoom,
        scaled=0 if operands.scale is None else width // (operands.scale.shape[1] - 2),
    )
    return conv, count


def slices_beside(x: jax.Array, dim: int, axes: tuple[str, ...], edges: bool) -> tuple[jax.Array, jax.Array]:
    """Returns the slices before and after a device's part along a dim: its neighbours', or the video's padding.

    Args:
        axes: The axes of the mesh that split the dim; () if the part has the whole dim.
        edges: Whether the slice beyond the video's end is the nearest slice; otherwise it is 0.
    """
    first, last = (lax.index_in_dim(x, n, dim) for n in (0, x.shape[dim] - 1))
    before, after = (first, last) if edges else (jnp.zeros_like(first), jnp.zeros_like(last))
    count = ways(axes)
    if count == 1:
        return before, after
    number = lax.axis_index(axes)
    left = lax.ppermute(last, axes, [(n, n + 1) for n in range(count - 1)])
    right = lax.ppermute(first, axes, [(n + 1, n) for n in range(count - 1)])
    return jnp.where(number == 0, before, left), jnp.where(number == count - 1, after, right)


def valid_from_here(size: int, axes: tuple[str, ...], valid: int) -> jax.Array:
    """Returns the number of valid slices of this device and all devices after it; 0 or less if all are padding."""
    number = lax.axis_index(axes) if axes else jnp.int32(0)
    return valid - number * size
