"""Layer normalization of compiled programs: PyTorch's own statistics, in float32 and rounded once."""

import contextlib

import jax
import jax.numpy as jnp
import numpy
import pytest
import torch
from torch.nn import functional

from torchport import engine, patch

ULP = 2**-8
"""Of bfloat16: half a unit in the last place, of a value just above a power of two."""


@pytest.fixture(scope="module", autouse=True)
def patched(pack):
    """The patch, and what torchax beside this torch needs; an op counts only among the engine's operators."""
    with patch.applied(patch.read(pack.patches, ["torchax", "torch/normalization"])) as ledger:
        yield ledger


@pytest.fixture
def lowered(patched):
    """A function that normalizes in a compiled program, with the patch in force or without."""

    def normalized(x, shape, weight=None, bias=None, eps=1e-6, ours=True):
        import torchax
        from torchax import interop

        engine.begin_trace()

        with contextlib.ExitStack() as stack:
            if ours:
                stack.enter_context(engine.operators({op.target: op.function for op in patched.ops()}))
            stack.enter_context(torchax.default_env())
            env = torchax.default_env()
            tensors = [None if one is None else torchax.tensor.Tensor(_array(one), env) for one in (x, weight, bias)]
            program = interop.jax_jit(lambda x, weight, bias: functional.layer_norm(x, shape, weight, bias, eps))
            out = program(*tensors).jax()
        return torch.from_numpy(numpy.array(out.astype(jnp.float32))).to(getattr(torch, str(out.dtype)))

    return normalized


def _array(tensor):
    return jnp.asarray(tensor.float().numpy()).astype(str(tensor.dtype).removeprefix("torch."))


def rows(mean=0.0, *, size=2048, seed=1):
    """Rows of features, some of them massive, as a transformer's residual stream has them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(7, size, generator=generator) + mean
    x[1, 5], x[2, 0], x[3, :64] = 3000.0, -900.0, 40.0
    return x


def apart(a, b):
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


def ulps(out, exact):
    """Returns the largest distance from exact values in halves of bfloat16's last place."""
    return float(((out.double() - exact).abs() / exact.abs().clamp(min=1e-3)).max() / ULP)


@pytest.mark.parametrize("mean", [0.0, 10.0, 300.0])
def test_bfloat16_is_rounded_once_from_the_exact_value(lowered, mean):
    x = rows(mean).bfloat16()
    exact = functional.layer_norm(x.double(), (2048,), eps=1e-6)
    assert ulps(functional.layer_norm(x, (2048,), eps=1e-6), exact) <= 1.01
    assert ulps(lowered(x, (2048,)), exact) <= 1.01


def test_what_was_widened_is_read_as_it_was_unless_it_was_written_to(patched):
    """XLA would write the wide copy to memory: Wan's norms get `x.float()`."""
    from torchax import interop

    def norm(x, adds):
        x = x.float()
        return functional.layer_norm(x.add_(1) if adds else x, (2048,), eps=1e-6)

    x = rows().bfloat16()
    for adds in (False, True):
        with engine.operators({op.target: op.function for op in patched.ops()}):
            engine.begin_trace()
            program = jax.jit(lambda x, adds=adds: interop.call_torch(norm, x, adds))
            array = _array(x)
            out, text = torch.tensor(numpy.asarray(program(array))), program.lower(array).as_text()
        assert ("-> tensor<7x128xbf16>" in text) is not adds and out.dtype == torch.float32
        exact = functional.layer_norm(x.double() + adds, (2048,), eps=1e-6)
        assert apart(out, exact) <= 5e-6


def test_torchax_still_rounds_every_step(lowered):
    """When this fails, the patch's `until` has come."""
    x = rows()[4:].bfloat16() + 10
    exact = functional.layer_norm(x.double(), (2048,), eps=1e-6)
    assert (lowered(x, (2048,), ours=False).double() - exact).abs().max() > 0.01
    assert (lowered(x, (2048,)).double() - exact).abs().max() < 0.01


@pytest.mark.parametrize("mean", [0.0, 10.0, 300.0, 3000.0])
def test_float32_is_no_further_from_float64_than_eager_is(lowered, mean):
    x = rows(mean)
    exact = functional.layer_norm(x.double(), (2048,), eps=1e-6)
    ours, eager = (apart(out, exact) for out in (lowered(x, (2048,)), functional.layer_norm(x, (2048,), eps=1e-6)))
    assert ours <= max(4 * eager, 3e-7)


@pytest.mark.parametrize("where", [0, 127, 128, 2047])
def test_one_massive_feature_among_equal_ones_is_no_cancellation(lowered, where):
    """The worst row for bfloat16's shift: the features that it is taken from have the only other one, or not."""
    x = torch.full((2, 2048), 1e3)
    x[0, where], x[1, where] = 2e3, 1004
    x = x.bfloat16()
    exact = functional.layer_norm(x.double(), (2048,), eps=1e-12)
    assert ulps(lowered(x, (2048,), eps=1e-12), exact) <= 1.01


def test_float32_is_shifted_by_all_features(lowered):
    x = rows()
    x[:, :128] = 3000.0
    exact = functional.layer_norm(x.double(), (2048,), eps=1e-6)
    eager = functional.layer_norm(x, (2048,), eps=1e-6)
    assert apart(lowered(x, (2048,)), exact) <= max(4 * apart(eager, exact), 3e-7)


def test_what_pytorch_refuses_is_refused(lowered):
    whole = torch.ones(2, 6, dtype=torch.int32)
    for x, shape in ((torch.ones(2, 6, 4), (4, 6)), (whole, (6,)), (torch.ones(6), (1, 6))):
        with pytest.raises(RuntimeError):
            lowered(x, shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(40,), (5, 40), (1,), (300,)])
@pytest.mark.parametrize("gains", ["none", "weight", "bias", "both"])
def test_dims_gains_and_dtypes_are_pytorchs(lowered, dtype, shape, gains):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 3, *shape, generator=generator).to(dtype)
    weight, bias = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    weight, bias = weight if gains in ("weight", "both") else None, bias if gains in ("bias", "both") else None
    wanted = functional.layer_norm(x, shape, weight, bias, 1e-5)
    found = lowered(x, shape, weight, bias, 1e-5)
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    if shape != (1,):  # of one feature nothing is left but the bias
        assert apart(found, wanted) <= torch.finfo(dtype).eps * 4
    else:
        assert (found - wanted).abs().max() < 1e-5


def test_gains_of_float32_leave_bfloat16_as_it_is(lowered):
    x, weight = rows().bfloat16(), torch.linspace(0.5, 2, 2048)
    wanted = functional.layer_norm(x, (2048,), weight, weight, 1e-6)
    found = lowered(x, (2048,), weight, weight, 1e-6)
    assert found.dtype == wanted.dtype == torch.bfloat16
    assert apart(found, wanted) <= ULP


def test_equal_features_are_nothing_and_no_number_is_lost(lowered):
    x = torch.tensor([[0.1] * 300, [0.0] * 300, [-65504.0] * 300])
    assert lowered(x, (300,)).abs().max() < 1e-2
    assert torch.isnan(lowered(torch.tensor([[1.0, torch.nan, 2.0]]), (3,))).all()


def test_mean_and_reciprocal_deviation_of_float32_are_pytorchs(patched):
    import torchax

    x = rows(10.0)
    with engine.operators({op.target: op.function for op in patched.ops()}), torchax.default_env():
        tensor = torchax.tensor.Tensor(_array(x), torchax.default_env())
        found = [part.jax() for part in torch.ops.aten.native_layer_norm.default(tensor, [2048], None, None, 1e-6)]
    wanted = torch.ops.aten.native_layer_norm.default(x, [2048], None, None, 1e-6)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert apart(torch.from_numpy(numpy.array(one)), other) < 1e-6
