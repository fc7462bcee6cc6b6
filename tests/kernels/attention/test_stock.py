"""JAX's own attention: XLA's agrees with float64, and what cuDNN lacks is refused before it is asked."""

import jax
import jax.numpy as jnp
import numpy
import pytest
from attention_reference import (
    BOUNDS,
    assert_padding_is_not_read,
    cases,
    distance,
    eager_distance,
    reference,
    tokens,
)
from hypothesis import assume, given, settings

from torchport.errors import AttentionError
from torchport.kernels.attention import stock

pytestmark = pytest.mark.usefixtures("plainly_compiled")
ATTENTION = jax.jit(stock.attention, static_argnames=("scale", "causal", "window", "implementation"))


def attend(q, k, v, lengths_B=None, **options):
    """Attention with the usual scale, by XLA."""
    usual = {"lengths_B": lengths_B, "scale": q.shape[3] ** -0.5, "causal": False, "window": None}
    return ATTENTION(q, k, v, **{**usual, "implementation": "xla", **options})


def refusal(size=64, dtype="bfloat16", **options):
    """Returns the text with which `cudnn` refuses."""
    q, k, v = tokens(0, 1, 1, 8, 8, size, dtype)
    with pytest.raises(AttentionError) as caught:
        attend(q, k, v, implementation="cudnn", **options)
    return str(caught.value)


@settings(max_examples=settings.default.max_examples // 5)
@given(cases())
def test_any_case_agrees_with_float64(case):
    # XLA's CPU backend has no bfloat16 product of single rows (INVALID_ARGUMENT: ALG_DOT_BF16_BF16_F32).
    assume(case.dtype == "float32" or min(case.queries, case.keys) > 1)
    o = ATTENTION(*case.tokens(), **case.options(), implementation="xla")
    assert o.dtype == case.dtype
    assert case.distance(o) <= BOUNDS[case.dtype]


@pytest.mark.parametrize("norm", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("common", [0.0, 3.0])
def test_the_error_of_float32_is_at_most_four_times_eager_pytorchs(norm, common):
    q, k, v = tokens(3, 2, 3, 257, 300, 64, norm=norm, common=common)
    assert distance(attend(q, k, v), reference(q, k, v)) <= 4 * eager_distance(q, k, v, 64**-0.5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padding_may_hold_anything(dtype):
    assert_padding_is_not_read(attend, dtype)


def test_a_query_that_sees_no_key_gets_zero():
    q, k, v = tokens(5, 1, 1, 30, 30, 8)
    o = numpy.asarray(attend(q, k, v, jnp.asarray([10], jnp.int32), window=(4, 0)))
    assert not o[0, 0, 14:].any()
    assert o[0, 0, :14].any(-1).all()


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="here cuDNN can run")
def test_cudnn_without_cuda_is_refused():
    assert refusal() == (
        "attention 'cudnn': JAX has no CUDA device here, its platform is 'cpu'. Choose 'splash' or 'splash_transposed' "
        "on a TPU, 'plain' anywhere, or install torchport[cuda] by a GPU."
    )


def test_what_cudnn_lacks_is_refused_by_name():
    assert refusal(dtype="float32").startswith(
        "attention 'cudnn': queries are float32. cuDNN takes bfloat16 or float16"
    )
    assert refusal(size=36).startswith("attention 'cudnn': the head size is 36. cuDNN takes multiples of 8 up to 256")
    assert refusal(size=264).startswith("attention 'cudnn': the head size is 264.")
    assert "the window is 3 to the left and 5 to the right" in refusal(window=(3, 5))
    assert "the window is 3 to the left and None to the right" in refusal(window=(3, None))


@pytest.mark.parametrize("options", [{"window": (3, 0)}, {"window": (3, 5), "causal": True}, {"window": (None, None)}])
def test_windows_that_cudnn_has_are_refused_only_for_want_of_a_gpu(options):
    assert "no CUDA device" in refusal(**options)
