"""The kernel of sums as plain JAX against float64, and its loops against what the TPU's compiler makes of it."""

import jax
import jax.numpy as jnp
import numpy
import pytest

from torchport.config.machine import parse_machine
from torchport.kernels.convolution import moments
from torchport.kernels.convolution.moments import Sums
from torchport.plan.tpu import absent, bundles

pytestmark = pytest.mark.usefixtures("plainly_compiled")
SUMMED = jax.jit(moments.summed, static_argnums=0, static_argnames="interpret")


@pytest.mark.parametrize("valid", [(3, 6), (2, 6), (3, 4), (0, 0)], ids=str)
def test_differences_to_the_first_position_are_summed(valid):
    x = numpy.random.default_rng(0).normal(size=(3, 6, 8, 16)).astype("float32") + 1000
    call = Sums(3, 6, 8, 16, padded=valid != (3, 6))
    near, total, squares = SUMMED(call, jnp.asarray(x), jnp.asarray(valid, jnp.int32), interpret=True)
    apart = (x.astype("float64") - x[0, 0])[: valid[0], : valid[1]]
    assert numpy.array_equal(near, x[0, 0])
    numpy.testing.assert_allclose(total, apart.sum((0, 1)), rtol=1e-6, atol=1e-5)
    numpy.testing.assert_allclose(squares, (apart**2).sum((0, 1)), rtol=1e-6)


def test_a_row_is_added_some_columns_at_a_time():
    call = Sums(2, 40, 16, 128)
    assert call.columns_at_once == 20 and moments.sums_pass(call).loops == (2, 2)
    x = jnp.asarray(numpy.random.default_rng(0).normal(size=(2, 40, 16, 128)), jnp.bfloat16)
    _, total, _ = SUMMED(call, x, jnp.asarray([2, 40], jnp.int32), interpret=True)
    wide = numpy.asarray(x, numpy.float64)
    numpy.testing.assert_allclose(total, (wide - wide[0, 0]).sum((0, 1)), rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(not absent.installed(), reason="libtpu is not installed")
@pytest.mark.parametrize("sizes", [(90, 20, 8, 512, False, "bfloat16"), (24, 44, 16, 512, True, "float32")], ids=str)
def test_its_loops_run_as_often_as_a_plan_counts(sizes):
    call = Sums(*sizes)
    arguments = dict(zip(("height", "width", "frames", "channels", "padded", "dtype"), sizes, strict=True))
    noted = moments.sums_pass(call)
    assert (noted.build, noted.arguments) == ("torchport.kernels.convolution.moments:sums_alone", arguments)
    machine = parse_machine("v6e:2x4", "here")
    seconds = bundles.pass_seconds(noted, machine)
    chip = machine.require_tpu()
    assert call.height * 20 / chip.clock < seconds < 3 * noted.bytes / chip.bandwidth
