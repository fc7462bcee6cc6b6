"""What the engine computes is what PyTorch computes: writes through views, stale views, dtypes, tables."""

import gc

import jax
import numpy
import pytest
import torch
from fakes import forms
from torch.nn import functional

from torchport import engine, patch, shard

pytestmark = pytest.mark.usefixtures("plainly_compiled")


@pytest.fixture(scope="module", autouse=True)
def patched(pack):
    """torchax beside this torch needs its patches, as everything else does."""
    with patch.applied(patch.read(pack.patches, ["torchax"])) as ledger:
        engine.begin_trace()
        with engine.operators({op.target: op.function for op in ledger.ops()}):
            yield


def x():
    return torch.arange(12.0).reshape(2, 6)


def traced(function, value=None):
    """Returns what a function of x makes of it in a compiled program."""

    def network(x):
        with torch.no_grad():
            return function(x)

    array = jax.numpy.asarray((x() if value is None else value).numpy())
    with engine.wide():
        program = jax.jit(lambda array: engine.call_torch(network, array)).trace(array)
    return jax.tree.map(shard.to_torch, program.lower().compile()(array))


def test_views_that_pytorchs_own_code_makes_are_collected_after_a_trace():
    def attend(x):
        query = x.reshape(1, 1, 2, 6)
        return torch.nn.functional.scaled_dot_product_attention(query, query, query)  # PyTorch makes it of others

    def count():
        gc.collect()
        return sum(type(each).__name__ == "Tensor" and engine.is_traced(each) for each in gc.get_objects())

    before = count()
    traced(attend)
    assert count() == before


def _silu_in_place(x):
    return functional.silu(x + x, inplace=True)


HALVES = {
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "silu in place": _silu_in_place,
    "sigmoid": torch.sigmoid,
    "leaky_relu": lambda x: functional.leaky_relu(x, 0.3),
    "log2": lambda x: torch.log2(x.abs()),
    "hypot": lambda x: torch.hypot(x, x.flip(0)),
    "a number": lambda x: x * 0.3,
    "softmax": lambda x: x.softmax(-1),
    "group_norm": lambda x: functional.group_norm(x, 4),
    "weight_norm": lambda x: torch._weight_norm(x, x[:, :1].exp()),
    "addmm": lambda x: torch.addmm(x[0, :40], x, x.mT, beta=0.3, alpha=0.7),
    "conv1d": lambda x: functional.conv1d(x[None], x[:6, :80].reshape(6, 40, 2), x[0, :6]),
}
"""Functions that JAX rounds several times, and whose numbers it rounds, in bfloat16."""


IN_16_BITS = {
    "equal": lambda x: (x * 0 + 0.3 == 0.3, x * 0 + 257 == 257),
    "less": lambda x: (x.sign() * 0.7 < 0.7, x.eq_(0.3)),
    "where": lambda x: torch.where(torch.full_like(x, 0.3) == 0.3, 1.0, x),
    "power in place": lambda x: ((x + 1).abs().pow_(0.5), (x + 1).square_()),
    "neighbours": lambda x: torch.nextafter(x, x + 1),
    "remainder": lambda x: (x % 0.3, 1.7**x),
    "shrink": lambda x: (functional.hardshrink(x, 0.3), functional.threshold(x, 0.3, 0.1)),
}
"""Functions whose numbers PyTorch rounds to the tensor's dtype."""


@pytest.mark.parametrize("name", IN_16_BITS)
def test_what_pytorch_computes_in_16_bits_is(name):
    values = torch.linspace(-2, 2, 401).bfloat16()
    expected = IN_16_BITS[name](values.clone())
    got = traced(lambda x: IN_16_BITS[name](x.bfloat16()), values.float())
    for one, other in zip(*(value if isinstance(value, tuple) else (value,) for value in (got, expected)), strict=True):
        assert (one != other).float().mean() < 0.005


def test_16_bits_are_rounded_once_as_pytorch_does():
    values = torch.randn(40, 100, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = {name: function(values.clone()) for name, function in HALVES.items()}

    def network(x):
        return {name: function(x.bfloat16()) for name, function in HALVES.items()}

    got = traced(network, values.float())
    for name, value in expected.items():
        assert got[name].dtype == torch.bfloat16
        assert (got[name] != value).float().mean() < 0.005, name  # sums are added in another order


@pytest.mark.parametrize("table", ["WRITES", "STALE", "DTYPES"])
def test_small_programs_compute_what_they_compute_in_pytorch(table):
    made = forms.functions(getattr(forms, table))
    with torch.no_grad():
        expected = {text: function(x()) for text, function in made.items()}
    got = traced(lambda x: {text: function(x) for text, function in made.items()})
    wrong = [text for text, value in expected.items() if not same(got[text], value)]
    assert not wrong, "\n".join(f"{text}: {got[text]} and not {expected[text]}" for text in wrong)


def same(got, expected):
    """Whether two tensors have the same dtype, shape and values, up to the last digits of a sum or a division."""
    alike = got.dtype == expected.dtype and got.shape == expected.shape
    return alike and torch.allclose(got.double(), expected.double(), rtol=2e-7 if got.dtype != torch.float64 else 1e-15)


@pytest.mark.parametrize("text", forms.functions(forms.REFUSED))
def test_what_cannot_be_done_is_refused_while_it_is_traced(text):
    def network(x):
        engine.freeze(x, "an argument of the network")
        return forms.functions(text)[text](x)

    from torchax.tensor import OperatorNotFound

    kinds = RuntimeError, jax.errors.NonConcreteBooleanIndexError, OperatorNotFound, engine.DiffersError
    with pytest.raises(kinds) as caught:
        traced(network)
    known = engine.difference(caught.value), engine.missing_operator(caught.value)
    assert any(known) or engine.is_traced_value(caught.value) or "written-to tensor" in str(caught.value)


def test_a_table_that_depends_on_no_input_is_pytorchs_own_bit_for_bit():
    def table(device):
        frequencies = torch.exp(-torch.arange(0, 128, device=device) / 128 * 9.21)
        positions = torch.arange(0, 1000, device=device, dtype=torch.float64) * 37
        return torch.outer(positions, frequencies.double()).sin().float()

    assert traced(lambda x: table(x.device)).equal(table("cpu"))


def test_the_value_of_a_table_may_be_asked_for():
    def network(x):
        lengths = torch.tensor([3, 2], device=x.device).cumsum(0)
        return x[:, : lengths.max().item()].sum() + len(lengths.tolist()) + int(lengths[0]) + lengths.numpy()[1]

    assert traced(network).item() == network(x()).item()


def test_a_table_is_no_tracer_to_upstream_code_that_asks():
    def network(x):
        masks = torch.ones(3, device=x.device), x > 0
        return [mask for mask in masks if not isinstance(mask.jax(), jax.core.Tracer) and mask.all()]

    assert [mask.tolist() for mask in traced(network)] == [[1, 1, 1]]


def test_a_lowering_that_returns_another_shape_or_writes_nothing_is_refused():
    with (
        engine.operators({"torch.ops.aten:cumsum.default": lambda x, dim, **options: x[:1]}),
        pytest.raises(
            engine.DiffersError, match=r"aten\.cumsum\.default, which returns the shape \[1, 6\], PyTorch's \[2, 6\]"
        ),
    ):
        traced(lambda x: x.cumsum(0))
    with (
        engine.operators({"torch.ops.aten:mul_.Tensor": lambda x, other: x}),
        pytest.raises(engine.DiffersError, match=r"aten\.mul_\.Tensor, which does not write to its argument"),
    ):
        traced(lambda x: x.clone().mul_(2))


def test_a_lowering_that_writes_to_a_known_tensor_makes_it_the_programs():
    """As `native_batch_norm` does, whose schema says nothing of its statistics."""

    def lowering(x, y):
        y._elem = x._elem
        return x

    def network(x):
        y = torch.zeros(2, 6, device=x.device)
        row = y[0]
        torch.fmod(x, y)
        return y + row

    with engine.operators({"torch.ops.aten:fmod.Tensor": lowering}):
        assert traced(network).equal(x() + x()[0])


def test_a_result_has_the_dtype_that_pytorch_gives_it():
    with engine.operators({"torch.ops.aten:add.Tensor": lambda x, other: x.to(torch.float32) * 2}):
        assert traced(lambda x: torch.add(x.bfloat16(), x.bfloat16())).dtype == torch.bfloat16


def test_what_a_loop_wrote_to_cannot_be_read_as_it_was_before():
    def network(x):
        y = x + 1
        engine.spoil(y, "reads what the stacked blocks wrote to")
        return y * 2

    with pytest.raises(engine.DiffersError, match=r"aten\.mul\.Tensor, which reads what the stacked blocks wrote to"):
        traced(network)


def test_an_array_of_64_bits_is_32_in_a_kernel_and_its_tensor_is_not():
    seen = []

    def kernel(x):
        seen.append(x.dtype)
        return x + 1

    assert traced(lambda x: engine.call_kernel(kernel, x.long())).equal((x() + 1).int())
    assert seen == [numpy.int32]


def test_rotary_written_into_a_part_of_the_queries_is_what_the_scores_are_made_of():
    """As CogView4 has it. With `dynamic_update_slice`, XLA for CPU makes the scores of the queries before the write."""
    torch.manual_seed(0)
    to_q, to_k = torch.randn(2, 192, 192) / 14
    cos, sin = torch.randn(2, 8, 24)

    def scores(x):
        q, k = ((x @ w).unflatten(2, (8, -1)).transpose(1, 2) for w in (to_q, to_k))
        q = torch.nn.functional.layer_norm(q, (24,))
        real, imaginary = q[:, :, 32:].reshape(1, 8, 8, 2, 12).unbind(-2)
        q[:, :, 32:] = q[:, :, 32:] * cos + torch.cat([-imaginary, real], dim=-1) * sin
        return q @ k.transpose(-1, -2)

    x = torch.randn(1, 40, 192)
    with torch.no_grad():
        assert torch.allclose(traced(scores, x), scores(x), atol=1e-4)


def test_a_table_that_upstream_keeps_from_one_program_to_the_next_is_a_table_in_both():
    kept = {}

    def network(x):
        if "table" not in kept:
            kept["table"] = torch.arange(4096 * 12).reshape(4096, 12).cos().to(x.device)
        return kept["table"][: x.shape[1]].sum() + x

    first, second = traced(network), traced(network)
    assert torch.equal(first, second) and torch.isfinite(first).all()


def test_a_tensor_of_the_host_that_is_moved_to_the_devices_is_known():
    seen = {}

    def network(x):
        moved = torch.arange(6.0).to(x.device)
        seen["value"] = moved.tolist()
        return x + moved

    assert torch.equal(traced(network), x() + torch.arange(6.0)) and seen["value"] == [0, 1, 2, 3, 4, 5]


def test_attention_takes_a_mask_of_four_dims_that_is_a_table():
    """torchax's lowering adds it to a bias of two dims, in place, which PyTorch refuses."""

    def network(x):
        mask = torch.ones(6, 6, dtype=torch.float32).tril().log()[None, None]
        q = x.reshape(1, 1, 6, 2)
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    with torch.no_grad():
        assert torch.allclose(traced(network), network(x()), atol=1e-6)
