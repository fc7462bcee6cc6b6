"""Splash attention, interpreted: padding is exact, windows and tiles change no number, keys may be smoothed."""

import functools

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
from hypothesis import given, settings
from hypothesis import strategies as st

from torchport.errors import AttentionError
from torchport.kernels.attention import splash
from torchport.kernels.attention.tiles import SplashTile

pytestmark = pytest.mark.usefixtures("plainly_compiled")
NAMES = ("scale", "causal", "window", "tile", "padding", "interpret")
ATTENTION = jax.jit(splash.attention, static_argnames=NAMES)
SMALL = {"tile": SplashTile(128, 256, 128), "interpret": True}


def attend(q, k, v, lengths_B=None, **options):
    """Attention with the usual scale and small tiles, interpreted."""
    usual = {"lengths_B": lengths_B, "scale": q.shape[3] ** -0.5, "causal": False, "window": None}
    return ATTENTION(q, k, v, **{**usual, **SMALL, **options})


@settings(max_examples=settings.default.max_examples // 8)
@given(cases(largest=300), st.sampled_from(["feature", "segments"]))
def test_any_case_agrees_with_float64(case, padding):
    q, k, v = case.tokens()
    o = attend(q, k, v, **case.options(), padding=padding)
    assert o.dtype == case.dtype
    assert case.distance(o) <= BOUNDS[case.dtype]


@pytest.mark.parametrize("padding", ["feature", "segments"])
@pytest.mark.parametrize("lengths", [(1, 128), (127, 129), (256, 300), (0, 257)])
def test_lengths_at_the_edges_of_tiles_are_exact(lengths, padding):
    q, k, v = tokens(1, 2, 2, 130, 300, 16)
    o = attend(q, k, v, jnp.asarray(lengths, jnp.int32), padding=padding)
    assert distance(o, reference(q, k, v, lengths)) <= BOUNDS["float32"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"padding": "segments"}])
def test_padding_may_hold_anything(dtype, options):
    assert_padding_is_not_read(functools.partial(attend, **options), dtype)


@pytest.mark.parametrize("norm", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("common", [0.0, 3.0])
def test_the_error_of_float32_is_at_most_four_times_eager_pytorchs(norm, common):
    q, k, v = tokens(3, 1, 2, 257, 300, 64, norm=norm, common=common)
    assert distance(attend(q, k, v), reference(q, k, v)) <= 4 * eager_distance(q, k, v, 64**-0.5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_further_feature_changes_no_bit_of_a_valid_score(dtype):
    q, k, v = tokens(4, 2, 2, 128, 256, 16, dtype)
    everything = attend(q, k, v)
    numpy.testing.assert_array_equal(attend(q, k, v, jnp.asarray([256, 256], jnp.int32)), everything)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_ways_to_hide_padding_give_the_same_bits(dtype):
    q, k, v = tokens(4, 2, 2, 128, 256, 16, dtype)
    lengths_B = jnp.asarray([100, 255], jnp.int32)
    numpy.testing.assert_array_equal(*(attend(q, k, v, lengths_B, padding=way) for way in ("feature", "segments")))


def test_a_query_that_sees_no_key_gets_zero():
    q, k, v = tokens(5, 1, 1, 300, 300, 8)
    o = numpy.asarray(attend(q, k, v, jnp.asarray([10], jnp.int32), window=(4, 0)))
    assert not o[0, 0, 14:].any()
    assert o[0, 0, :14].any(-1).all()


def test_tiles_that_the_kernel_does_not_take_are_refused():
    q, k, v = tokens(6, 1, 1, 8, 8, 8)
    with pytest.raises(AttentionError) as caught:
        attend(q, k, v, tile=SplashTile(100, 256, 128))
    assert str(caught.value) == "attention 'splash': block_q is 100. Give a multiple of 128."
    with pytest.raises(AttentionError, match="block_kv is 256 with a block_kv_compute of 384"):
        attend(q, k, v, tile=SplashTile(128, 256, 384))
