"""Plain attention: the same numbers as softmax in float64, whatever the blocks, lengths, windows and masks are."""

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
from jax.sharding import NamedSharding, PartitionSpec

from torchport.kernels.attention import plain

NAMES = ("scale", "causal", "window", "block_q", "block_kv")
# Compiled without LLVM's optimisations: every case of hypothesis is a program of its own, and its numbers are the same.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
ATTENTION = jax.jit(plain.attention, static_argnames=NAMES, compiler_options=QUICKLY)


def attend(q, k, v, lengths_B=None, **options):
    """Attention with the usual scale, compiled."""
    return ATTENTION(
        q, k, v, **{"lengths_B": lengths_B, "scale": q.shape[3] ** -0.5, "causal": False, "window": None, **options}
    )


@settings(max_examples=settings.default.max_examples // 4)
@given(cases(), st.sampled_from([1, 7, 16, 64]), st.sampled_from([1, 5, 16, 64]))
def test_any_case_agrees_with_float64_for_any_blocks(case, block_q, block_kv):
    o = ATTENTION(*case.tokens(), **case.options(), block_q=block_q, block_kv=block_kv)
    assert o.dtype == case.dtype
    assert case.distance(o) <= BOUNDS[case.dtype]


@pytest.mark.parametrize("norm", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("common", [0.0, 3.0])
def test_the_error_of_float32_is_at_most_four_times_eager_pytorchs(norm, common):
    q, k, v = tokens(3, 2, 3, 257, 300, 64, norm=norm, common=common)
    mine = distance(attend(q, k, v, block_q=64, block_kv=100), reference(q, k, v))
    assert mine <= 4 * eager_distance(q, k, v, 64**-0.5)


@pytest.mark.parametrize("lengths", [(1, 1), (16, 32), (32, 48), (15, 17), (0, 48), (0, 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lengths_at_the_edges_of_blocks_are_exact(lengths, dtype):
    q, k, v = tokens(1, 2, 2, 48, 48, 8, dtype)
    o = attend(q, k, v, jnp.asarray(lengths, jnp.int32), block_q=16, block_kv=16)
    assert distance(o, reference(q, k, v, lengths)) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padding_may_hold_anything(dtype):
    assert_padding_is_not_read(functools.partial(attend, block_q=8, block_kv=8), dtype)


def test_one_program_serves_every_length():
    q, k, v = tokens(2, 2, 1, 20, 20, 8)
    for lengths in ((3, 20), (20, 1), (7, 9)):
        o = attend(q, k, v, jnp.asarray(lengths, jnp.int32), block_q=8, block_kv=8)
        assert distance(o, reference(q, k, v, lengths)) <= BOUNDS["float32"]
    before = ATTENTION._cache_size()
    attend(q, k, v, jnp.asarray((11, 12), jnp.int32), block_q=8, block_kv=8)
    assert ATTENTION._cache_size() == before


def test_called_alone_it_is_compiled_once():
    q, k, v = tokens(2, 1, 2, 11, 13, 4)
    before = plain.attention._cache_size()
    for _ in range(2):
        plain.attention(q, k, v, lengths_B=None, scale=0.5, causal=False, window=None)
    assert plain.attention._cache_size() == before + 1


@settings(max_examples=settings.default.max_examples // 4)
@given(st.integers(0, 99), st.sampled_from([(2, 3), (1, 3), (2, 1), (1, 1)]), st.booleans(), st.booleans())
def test_a_mask_is_read_block_by_block(seed, sizes, boolean, with_lengths):
    q, k, v = tokens(seed, 2, 3, 21, 26, 8)
    random = numpy.random.default_rng(seed)
    mask = random.random((*sizes, 21, 26)) < 0.3 if boolean else random.standard_normal((*sizes, 21, 26))
    mask = mask if boolean else mask.astype(numpy.float32)
    mask[:, :, 4] = False if boolean else -numpy.inf
    lengths = (9, 26) if with_lengths else None
    lengths_B = jnp.asarray(lengths, jnp.int32) if with_lengths else None
    o = attend(q, k, v, lengths_B, mask=jnp.asarray(mask), block_q=8, block_kv=10)
    assert not numpy.asarray(o)[:, :, 4].any()
    assert distance(o, reference(q, k, v, lengths, mask=mask)) <= BOUNDS["float32"]


def test_a_query_that_sees_no_key_gets_zero():
    q, k, v = tokens(5, 1, 1, 30, 30, 8)
    o = attend(q, k, v, jnp.asarray([10], jnp.int32), window=(4, 0), block_q=8, block_kv=8)
    assert not numpy.asarray(o)[0, 0, 14:].any()
    assert numpy.asarray(o)[0, 0, :14].any(-1).all()


def test_bfloat16_is_rounded_once_at_the_end():
    q, k, v = tokens(6, 1, 2, 100, 400, 64, "bfloat16", norm=2.0)
    exact = reference(q, k, v)
    once = distance(jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16), exact)
    assert distance(attend(q, k, v, block_q=32, block_kv=64), exact) <= 1.01 * once


def test_scores_too_large_for_an_exponential_are_no_trouble():
    q, k, v = tokens(7, 1, 1, 16, 40, 8, norm=30.0)
    assert numpy.abs(numpy.asarray(q) @ numpy.asarray(k).swapaxes(2, 3)).max() * 8**-0.5 > 1000
    # The scores themselves are rounded to float32: 1000 * 2^-24 in the exponent, whoever computes them.
    assert distance(attend(q, k, v, block_kv=16), reference(q, k, v)) <= 4 * eager_distance(q, k, v, 8**-0.5)


@pytest.mark.parametrize("spec", [PartitionSpec(None, "x"), PartitionSpec("x"), PartitionSpec(None, None, "x")])
def test_sharded_inputs_give_the_same_numbers(spec):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    q, k, v = tokens(8, 4, 4, 64, 64, 8)
    lengths = (50, 64, 1, 0)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (q, k, v)]
    o = attend(*placed, jnp.asarray(lengths, jnp.int32), block_q=32, block_kv=16)
    assert distance(o, reference(q, k, v, lengths)) <= BOUNDS["float32"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hundred_thousand_tokens_need_little_more_than_themselves(dtype):
    x = jax.ShapeDtypeStruct((1, 2, 100_000, 128), dtype)
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
    compiled = ATTENTION.lower(x, x, x, lengths_B=lengths, scale=0.1, causal=False, window=None).compile()
    # The scores would be 80 GB. Eight blocks of them are allowed, and for bfloat16 four tensors in float32: XLA's CPU
    # backend has no bfloat16 products and converts q, k, v and the output ahead of the loops; on a TPU it does not.
    blocks, tensors = 8 * 2 * 512 * 1024 * 4, 4 * 2 * 100_000 * 128 * 4
    allowed = blocks + (tensors if dtype == "bfloat16" else 0)
    assert compiled.memory_analysis().temp_size_in_bytes <= allowed


def test_keys_of_one_block_are_a_loop_whose_length_the_program_knows():
    k = jnp.ones((2, 2, 257, 8))
    how = {"scale": 1.0, "causal": False, "window": None}
    program = jax.make_jaxpr(lambda lengths: plain.attention(k[:, :, :1], k, k, lengths_B=lengths, **how))
    program = str(program(jnp.array([0, 5])))
    assert "scan" in program and "while" not in program
