"""The kernel as plain JAX against XLA's convolution, and its loops against what the TPU's compiler makes of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy
import pytest

from torchport.config.machine import parse_machine
from torchport.kernels.attention.dispatch import Pass
from torchport.kernels.convolution import by_xla, kernel
from torchport.kernels.convolution.by_xla import ConvolutionRequest, Operands
from torchport.kernels.convolution.kernel import Conv
from torchport.plan.tpu import absent, bundles

pytestmark = pytest.mark.usefixtures("plainly_compiled")
BOUNDS = {1: 2e-2, 2: 2e-5, 3: 1e-6}
"""max|a - b| / max|b| by the number of parts; float32's own sums differ by 4e-7."""


def arrays_of(conv, chunks=1):
    """Returns a call's arrays by name, of as many chunks of time."""
    rng = numpy.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    rows, frames = conv.height + 2 * conv.rows, conv.frames * chunks
    return {
        "x": draw(rows, conv.width, frames, conv.inputs),
        "sides": tuple(draw(rows, 1, frames, conv.inputs) for _ in range(2)),
        "weight": draw(conv.outputs, conv.inputs, conv.taps, 3, 3) / (27 * conv.inputs) ** 0.5,
        "bias": draw(conv.outputs),
        "operands": Operands(
            gains=draw(conv.inputs) if conv.normal else None,
            residual=draw(conv.height * conv.residual, conv.width, frames, conv.outputs) if conv.residual else None,
        ),
    }


def by_kernel(conv, x, sides, weight, bias, operands):
    """Returns what the kernel makes of the chunks of x, one after the other."""
    weights, outs = kernel.weights_of(weight, conv), []
    # Of the first chunk's carry nothing may be seen.
    carry = jnp.full((2, conv.height, conv.width, conv.outputs), jnp.nan) if conv.carried else None
    for n in range(x.shape[2] // conv.frames):
        part = slice(n * conv.frames, (n + 1) * conv.frames)
        cut_x, cut_sides, residual = jax.tree.map(lambda a, part=part: a[:, :, part], (x, sides, operands.residual))
        chunk = dataclasses.replace(operands, residual=residual, carry=carry, first=jnp.asarray(n == 0))
        out, carry = kernel.convolved(conv, cut_x, cut_sides, weights, bias, chunk, interpret=True)
        outs.append(out)
    return jnp.concatenate(outs, axis=2)


SMALL = Conv(height=3, width=6, frames=16, inputs=16, outputs=24, parts=3)
CASES = {
    "one_product": dataclasses.replace(SMALL, parts=1),
    "three_products": dataclasses.replace(SMALL, parts=2),
    "norm_and_residual": dataclasses.replace(SMALL, normal=True, residual=True),
    "zeros_outside": dataclasses.replace(SMALL, edges=False, normal=True),
    "rows_of_neighbours": dataclasses.replace(SMALL, rows=True),
    "no_taps_in_time": dataclasses.replace(SMALL, taps=1, edges=False, frames=8),
    "chunks": dataclasses.replace(SMALL, carried=True, normal=True),
    "chunks_of_eight_frames_and_zeros": dataclasses.replace(SMALL, carried=True, edges=False, frames=8, width=8),
    "upsampling": dataclasses.replace(SMALL, taps=1, edges=False, frames=8, zoom=2),
    "upsampling_of_parts": dataclasses.replace(SMALL, taps=1, rows=True, parts=2, zoom=2, normal=True, residual=1),
    "upsampling_of_many_channels": dataclasses.replace(
        SMALL, taps=1, parts=1, zoom=2, inputs=260, outputs=300, residual=2
    ),
    "many_channels": dataclasses.replace(SMALL, carried=True, frames=8, width=5, height=2, inputs=260, outputs=300),
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_computes_the_convolution(name):
    conv = CASES[name]
    arrays = arrays_of(conv, chunks=2 if conv.carried else 1)
    ours = by_kernel(conv, **arrays)
    with jax.default_matmul_precision("highest"):
        reference, _ = by_xla.convolved(ConvolutionRequest(conv.edges, zoom=conv.zoom), conv.rows, **arrays)
    assert ours.shape == reference.shape and 0.5 < float(jnp.abs(reference).max()) < 20
    assert float(jnp.abs(ours - reference).max() / jnp.abs(reference).max()) < BOUNDS[conv.parts]


def test_bfloat16_is_rounded_once():
    conv = dataclasses.replace(SMALL, parts=1, dtype="bfloat16", residual=True)
    arrays = arrays_of(conv)
    narrow = {
        key: jax.tree.map(lambda a: a.astype(jnp.bfloat16), arrays[key]) for key in ("x", "sides", "operands", "weight")
    }
    ours = by_kernel(conv, **{**arrays, **narrow})
    wide = {key: jax.tree.map(lambda a: a.astype(jnp.float32), value) for key, value in narrow.items()}
    with jax.default_matmul_precision("highest"):
        reference, _ = by_xla.convolved(ConvolutionRequest(edges=True), False, **{**arrays, **wide})
    assert ours.dtype == jnp.bfloat16
    step = jnp.abs(reference).max() * 2.0**-8
    assert float(jnp.abs(ours.astype(jnp.float32) - reference).max()) <= float(step)


def test_parts_add_up_to_what_they_are_parts_of():
    x = jnp.asarray(numpy.random.default_rng(1).normal(size=1000), jnp.float32)
    for count, bound in ((1, 2.0**-8), (2, 2.0**-16), (3, 2.0**-23)):
        parts = kernel.parts_of(x, count)
        total = sum(part.astype(jnp.float32) for part in parts)
        assert all(part.dtype == jnp.bfloat16 for part in parts)
        assert float((jnp.abs(total - x) / jnp.abs(x)).max()) <= bound


def test_a_product_takes_about_256_positions_and_never_part_of_a_column():
    for width in (5, 7, 10, 20, 28, 37, 40, 53, 80, 112, 160):
        for frames in (8, 16, 32, 64):
            conv = dataclasses.replace(SMALL, width=width, frames=frames)
            assert width % conv.columns == 0 and conv.columns * frames <= 2.5 * kernel.ROWS
            assert width % dataclasses.replace(conv, normal=True).columns_at_once == 0


@pytest.mark.skipif(not absent.installed(), reason="libtpu is not installed: pip install 'torchport[plan]'")
@pytest.mark.parametrize(
    "conv",
    [
        Conv(height=8, width=16, frames=16, inputs=128, outputs=128, parts=2, normal=True, residual=True, carried=True),
        Conv(height=8, width=10, frames=16, inputs=512, outputs=512, parts=1, edges=False, carried=True),
        Conv(height=8, width=10, frames=16, inputs=512, outputs=256, parts=2, taps=1, edges=False, zoom=2),
        Conv(height=8, width=20, frames=8, inputs=96, outputs=96, parts=1, edges=False, rows=True, dtype="bfloat16"),
    ],
    ids=["norm", "many_channels", "upsampling", "bfloat16"],
)
def test_the_compiler_makes_the_loops_that_are_counted(conv):
    call = Pass(
        conv.name,
        "torchport.kernels.convolution.kernel:alone",
        dataclasses.asdict(conv),
        kernel.trips(conv),
        kernel.moved(conv),
    )
    machine = parse_machine("v6e:2x4", "a test")
    seconds = bundles.pass_seconds(call, machine)
    products = len(conv.products) * 2 * 9 * conv.taps * conv.inputs * conv.outputs
    least = products * conv.height * conv.width * conv.frames / machine.require_tpu().flops
    assert least < seconds < 6 * least
