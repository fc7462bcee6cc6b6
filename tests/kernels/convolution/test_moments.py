"""Mean and variance of channels in groups, on parts of a frame, against numpy's of the whole in float64."""

import jax
import jax.numpy as jnp
import numpy
import pytest

from torchport import shard
from torchport.kernels.attention import dispatch as attention
from torchport.kernels.convolution import canvas, moments

pytestmark = pytest.mark.usefixtures("plainly_compiled")


@pytest.mark.parametrize("interpret", [True, False], ids=["kernel", "xla"])
def test_the_moments_of_parts_are_those_of_the_whole(interpret):
    """Five columns over four devices, of which one has padding alone; it holds what must not be seen."""
    x, calls = numpy.random.default_rng(0).normal(size=(2, 6, 8, 3, 5)).astype("float32") + 100, []
    options = attention.Context(interpret=interpret, note=lambda call: calls.append(call.kernel))
    mesh = shard.make_mesh({"sp": 4}, jax.devices()[:4])
    with jax.set_mesh(mesh), attention.context(options):
        form = canvas.of_latents(8, 3, 5)
        more = ((0, 0), (0, 0), (0, 0), (0, form.height - 3), (0, form.width - 5))
        padded = jnp.pad(jnp.asarray(x), more, constant_values=numpy.nan)
        with canvas.using(form):
            mean, variance = jax.jit(lambda x: moments.of_frames(2, x))(padded)
    grouped = x.astype("float64").reshape(2, 2, 3, 8, 3, 5)
    numpy.testing.assert_allclose(mean, grouped.mean((2, 4, 5)), rtol=1e-6)
    numpy.testing.assert_allclose(variance, grouped.var((2, 4, 5)), rtol=1e-5)
    assert bool(calls) == interpret
