"""Scores in eight bits, interpreted: how far from attention in float64 they are, and which calls have them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy
import pytest
from attention_reference import poisoned, reference

from torchport.errors import AttentionError
from torchport.kernels.attention import dispatch, int8, transposed
from torchport.kernels.attention.dispatch import Context, Problem
from torchport.kernels.attention.tiles import Tile

pytestmark = pytest.mark.usefixtures("plainly_compiled")
ATTENTION = jax.jit(transposed.attention, static_argnames="settings")
QUANTISED = jax.jit(int8.quantised, static_argnums=(2, 3))
SMALL = Tile(256, 256, 128)
EXPONENTS = pytest.mark.parametrize("exponent", ["float32", "bfloat16"])
PROBLEM = Problem("tpu", "v6e", jnp.bfloat16, 128, 128**-0.5, False, None, False, 11.0, None, False)


def normed(seed, tokens, heads=2, common=0.0, batch=1):
    """Returns queries, keys or values as a norm leaves them, with a common part beside it, in bfloat16."""
    draw = numpy.random.default_rng(seed).standard_normal((batch, heads, tokens, 128))
    draw /= numpy.sqrt((draw**2).mean(-1, keepdims=True))
    shared = numpy.random.default_rng(9).standard_normal((1, heads, 1, 128))
    return jnp.asarray(draw + common * shared, jnp.bfloat16)


def attend(q, k, v, exponent, lengths_B=None):
    settings = transposed.KernelSettings(128**-0.5, True, SMALL, 2**26, exponent, interpret=True)
    return ATTENTION(q, k, v, lengths_B=lengths_B, settings=settings)


def cosine(a, b):
    """Returns the cosine of all elements of two arrays."""
    a, b = (numpy.asarray(x).astype(numpy.float64).ravel() for x in (a, b))
    return float(a @ b / numpy.sqrt((a @ a) * (b @ b)))


@EXPONENTS
@pytest.mark.parametrize("lengths", [(700,), (0,)])
def test_the_result_is_within_the_error_of_eight_bits(exponent, lengths):
    """Each score is off by about 0.02 of a factor of 2, as is each probability: 1 - 0.02^2 / 2 by the cosine."""
    q, k, v = normed(0, 300), normed(1, 800), normed(2, 800)
    out = attend(q, k, v, exponent, jnp.asarray(lengths, jnp.int32))
    exact = reference(q, k, v, lengths)
    if lengths == (0,):
        assert not numpy.asarray(out).any()
    else:
        assert cosine(out, exact) > 0.999


@EXPONENTS
def test_padding_is_not_read(exponent):
    q, k, v, lengths = normed(0, 300), normed(1, 800), normed(2, 800), jnp.asarray([700], jnp.int32)
    clean = attend(q, k, v, exponent, lengths)
    assert jnp.array_equal(
        attend(q, poisoned(k, (700,), jnp.nan), poisoned(v, (700,), jnp.nan), exponent, lengths), clean
    )


def test_what_keys_have_in_common_costs_no_bits():
    """The common part is three times the rest: with it, a step would be as much larger."""
    q, k, v = normed(0, 300), normed(1, 800, common=3.0), normed(2, 800)
    assert cosine(attend(q, k, v, "float32", jnp.asarray([800], jnp.int32)), reference(q, k, v)) > 0.999


def test_quantised_keys_stay_within_the_growth_of_the_bound():
    q, k = (normed(seed, 256, heads=1).swapaxes(1, 2).reshape(1, 256, 128) for seed in (0, 1))
    lengths = jnp.asarray([256], jnp.int32)
    q8, rows, [k8] = QUANTISED(q, [(k, lengths)], 128, 1.0)
    assert q8.dtype == k8.dtype == jnp.int8 and rows.shape == (1, 1, 256)
    scores = q8[0].astype(jnp.float32) @ k8[0].astype(jnp.float32).T * rows[0, 0][:, None]
    longest = [float(jnp.linalg.norm(x.astype(jnp.float32), axis=-1).max()) for x in (q, k)]
    assert jnp.abs(scores).max() <= int8.GROWTH * longest[0] * longest[1]
    centred = k.astype(jnp.float32) - k.astype(jnp.float32).mean(1, keepdims=True)
    exact = q[0].astype(jnp.float32) @ centred[0].T
    assert float(jnp.abs(scores - exact).max()) < 0.02 * longest[0] * longest[1]


def test_an_array_of_further_keys_has_the_scale_and_the_mean_of_all():
    k, few = normed(1, 512, heads=1), normed(3, 256, heads=1, common=2.0)
    k, few = (x.swapaxes(1, 2).reshape(1, -1, 128) for x in (k, few))
    q, lengths = k[:, :256], [jnp.asarray([number], jnp.int32) for number in (512, 256)]
    _, rows, [first, second] = QUANTISED(q, [(k, lengths[0]), (few, lengths[1])], 128, 1.0)
    whole = jnp.concatenate([k, few], axis=1)
    _, rows_of_whole, [joined] = QUANTISED(q, [(whole, lengths[0] + lengths[1])], 128, 1.0)
    assert jnp.abs(jnp.concatenate([first, second], axis=1).astype(int) - joined.astype(int)).max() <= 1
    assert jnp.allclose(rows, rows_of_whole, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "applies"),
    [
        ({}, True),
        ({"head_size": 72}, True),
        ({"head_size": 64}, False),
        ({"dtype": jnp.float32}, False),
        ({"bound": None}, False),
        ({"bound": 80 / int8.GROWTH}, False),
        ({"bound": 50.0 / int8.GROWTH}, True),
    ],
)
def test_a_call_has_eight_bits_where_they_are_faster_and_the_bound_holds(change, applies):
    assert dataclasses.replace(PROBLEM, **change).int8 is applies


def test_a_named_implementation_takes_the_calls_that_have_a_bound():
    q, k, v = normed(0, 256), normed(1, 512), normed(2, 512)
    options, names = {"tile": SMALL, "interpret": True}, []
    with dispatch.context(Context("splash_int8", {"joint": 128.0}, lambda call: names.append(call.implementation))):
        bounded, unbounded = (
            jax.jit(functools.partial(dispatch.attention, bound=bound, **options))(q, k, v) for bound in ("joint", None)
        )
    assert names == ["splash_int8", "splash_transposed"]
    by_name = jax.jit(functools.partial(dispatch.attention, implementation="splash_transposed", **options))
    assert jnp.array_equal(unbounded, by_name(q, k, v))
    assert not jnp.array_equal(bounded, unbounded) and cosine(bounded, unbounded) > 0.999


def test_a_chip_that_is_no_faster_is_refused():
    with pytest.raises(AttentionError) as caught:
        dispatch._check_kernel("splash_int8", dataclasses.replace(PROBLEM, chip="tpu7x"))
    assert str(caught.value) == (
        "attention splash_int8: tpu7x multiplies int8 no faster than bfloat16. Use implementation 'splash_transposed'."
    )
