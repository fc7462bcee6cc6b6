"""Convolutions parted over a mesh, in chunks of time, against PyTorch's of the whole video."""

import math

import jax
import jax.numpy as jnp
import numpy
import pytest
import torch
from torch.nn import functional

from torchport import shard
from torchport.kernels.attention import dispatch as attention
from torchport.kernels.convolution import canvas, forms
from torchport.kernels.convolution.by_xla import ConvolutionRequest

pytestmark = pytest.mark.usefixtures("plainly_compiled")
MESHES = [{}, {"sp": 8}, {"dp": 2, "sp": 4}]


def draw(*shape):
    return numpy.random.default_rng(sum(shape)).normal(size=shape).astype("float32")


def whole(x, weight, bias, edges):
    """Returns PyTorch's convolution in float64."""
    x, weight, bias = (torch.from_numpy(a).double() for a in (x, weight, bias))
    padded = functional.pad(x, (1, 1, 1, 1, weight.shape[2] - 1, 0), mode="replicate" if edges else "constant")
    return functional.conv3d(padded, weight, bias).numpy()


def parted(mesh, x, weight, bias, edges, **options):
    """Returns the same from the devices of a mesh; padding holds what must not be seen."""
    with (
        jax.set_mesh(shard.make_mesh(mesh, jax.devices()[: math.prod(mesh.values())])),
        jax.default_matmul_precision("highest"),
        attention.context(attention.Context(**options)),
    ):
        form = canvas.of_latents(*x.shape[2:])
        more = ((0, 0), (0, 0), (0, 0), (0, form.height - x.shape[3]), (0, form.width - x.shape[4]))
        x = jnp.pad(jnp.asarray(x), more, constant_values=1e6)
        with canvas.using(form):
            run = jax.jit(lambda *a: forms.convolved(ConvolutionRequest(edges), *a)[0])
            out = run(x, jnp.asarray(weight), jnp.asarray(bias))
    return numpy.asarray(out)[..., : form.valid_height, : form.valid_width]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("size", [(3, 8), (5, 9), (2, 3), (17, 5)], ids=str)
@pytest.mark.parametrize("edges", [True, False])
def test_parts_of_a_frame_make_the_whole(mesh, size, edges):
    x, weight, bias = draw(2, 4, 3, *size), draw(6, 4, 3, 3, 3) / 10, draw(6)
    ours, reference = parted(mesh, x, weight, bias, edges), whole(x, weight, bias, edges)
    assert numpy.abs(ours - reference).max() < 1e-6 * numpy.abs(reference).max()


@pytest.mark.parametrize("mesh", [{"dp": 2, "sp": 4}, {}], ids=str)
@pytest.mark.parametrize("edges", [True, False])
def test_the_kernel_on_parts_makes_the_whole(mesh, edges):
    x, weight, bias = draw(1, 4, 16, 3, 9), draw(6, 4, 3, 3, 3) / 10, draw(6)
    ours, reference = parted(mesh, x, weight, bias, edges, interpret=True), whole(x, weight, bias, edges)
    assert numpy.abs(ours - reference).max() < 1e-6 * numpy.abs(reference).max()


def test_more_frames_than_vector_memory_takes_are_several_calls(monkeypatch):
    monkeypatch.setattr(forms, "MOST_FRAMES", 16)
    x, weight, bias = draw(1, 4, 32, 2, 3), draw(6, 4, 3, 3, 3) / 10, draw(6)
    names = []
    ours = parted({}, x, weight, bias, True, interpret=True, note=lambda call: names.append(call.kernel))
    assert len(names) == 1 and "2x3x16" in names[0]
    reference = whole(x, weight, bias, True)
    assert numpy.abs(ours - reference).max() < 1e-6 * numpy.abs(reference).max()


def test_the_precision_says_how_many_products_are_made():
    x, weight, bias = draw(1, 4, 16, 2, 3), draw(6, 4, 3, 3, 3) / 10, draw(6)
    names = []
    with attention.context(attention.Context(interpret=True, note=lambda call: names.append(call.kernel))):
        for precision in ("default", "high", "highest"):
            with jax.default_matmul_precision(precision):
                jax.eval_shape(lambda: forms.convolved(ConvolutionRequest(True), *map(jnp.asarray, (x, weight, bias))))
    assert [name.rsplit("_", 2)[1] for name in names] == ["p1", "p2", "p3"]
