"""The transposed kernel, interpreted: softmax in float64 for any cut, length and size, up to the edge of its bound."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy
import pytest
from attention_reference import (
    BOUNDS,
    assert_padding_is_not_read,
    distance,
    eager_distance,
    poisoned,
    reference,
    tokens,
)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from torchport.kernels.attention import bound, transposed, transposed_kernel
from torchport.kernels.attention.tiles import Tile

pytestmark = pytest.mark.usefixtures("plainly_compiled")
ATTENTION = jax.jit(transposed.attention, static_argnames="settings")
SMALL = Tile(256, 256, 128)
TILES = [Tile(128, 256, 128), Tile(256, 256, 256), SMALL, Tile(384, 256, 256), Tile(512, 512, 256), Tile(512, 256)]
ROUNDING = 2.0**-8
# float32 as the siblings have it. bfloat16: two roundings lie between the inputs, which are given, and the result:
# the probabilities' and the result's own. The first is relative to the values, not to what is left of their mean: for
# inputs that are drawn, `within_roundings` says it exactly.
CLOSE = {"float32": BOUNDS["float32"], "bfloat16": 2 * ROUNDING}
ALONE = (4, 1, 140, 900, 40)
"""Sizes of a call whose heads have a tile to themselves. Tests share them, with lengths: each size is a program."""
PAIRED = (4, 4, 150, 520, 64)
"""Sizes of a call whose heads share a tile in pairs, likewise."""
SCORES = {
    "bounded": {"bounded": True},
    "online": {"bounded": False},
    "shifted": {"bounded": False, "shifted_tile": SMALL},
}
MODES = pytest.mark.parametrize("bounded", [True, False], ids=["bounded", "online"])
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def attend(q, k, v, lengths_B=None, **options):
    """Attention with the usual scale and a small tile, interpreted."""
    usual = {"scale": q.shape[3] ** -0.5, "tile": SMALL, "vmem_bytes": 2**26, "interpret": True}
    return ATTENTION(q, k, v, lengths_B=lengths_B, settings=transposed.KernelSettings(**{**usual, **options}))


def all_of(k):
    """Returns lengths of as many keys as there are."""
    return jnp.full(k.shape[0], k.shape[2], jnp.int32)


def largest_score(q, k):
    """Returns max|scale * q . k|, in natural units."""
    q, k = (numpy.asarray(x).astype(numpy.float64) for x in (q, k))
    return numpy.abs(q @ k.swapaxes(2, 3)).max() * q.shape[3] ** -0.5


def within_roundings(o, q, k, v, lengths=None):
    """Returns whether every element is within its own two roundings: of each probability, and of the result."""
    exact = reference(q, k, v, lengths)
    spread = reference(q, k, numpy.abs(numpy.asarray(v).astype(numpy.float64)), lengths)
    error = numpy.abs(numpy.asarray(o).astype(numpy.float64) - exact)
    # What float32 adds, on the way there, grows with the weighted values as the probabilities' rounding does.
    return bool((error <= ROUNDING * (1 + ROUNDING) * (spread + numpy.abs(exact)) + BOUNDS["float32"] * spread).all())


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One call."""

    sizes: tuple[int, int, int, int, int]
    lengths: tuple[int, ...] | None
    tile: Tile
    dtype: str
    scores: str
    norm: float
    common: float


@st.composite
def calls(draw):
    """Draws up to three tiles of queries and five chunks of keys, with remainders of either."""
    tile, batch = draw(st.sampled_from(TILES)), draw(st.integers(1, 2))
    keys = draw(st.integers(1, 1300) | st.sampled_from([256, 512, 1024]))
    edges = [number for number in (0, 1, tile.block_kv, 2 * tile.block_kv, keys) if number <= keys]
    length = st.sampled_from(edges) | st.integers(0, keys)
    return Drawn(
        sizes=(
            batch,
            draw(st.integers(1, 4)),
            draw(st.integers(1, 700) | st.sampled_from([128, 512])),
            keys,
            draw(st.sampled_from([16, 32, 40, 64, 72, 96, 128, 160])),
        ),
        lengths=draw(st.none() | st.tuples(*[length] * batch)),
        tile=tile,
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        scores=draw(st.sampled_from(list(SCORES))),
        norm=draw(st.sampled_from([0.01, 1.0])),
        common=draw(st.sampled_from([0.0, 2.0])),
    )


# To shrink a failure takes minutes: every try is a program to compile.
@settings(max_examples=settings.default.max_examples // 8, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(calls(), st.integers(0, 99))
def test_any_call_agrees_with_float64(drawn, seed):
    q, k, v = tokens(seed, *drawn.sizes, drawn.dtype, norm=drawn.norm, common=drawn.common)
    lengths_B = None if drawn.lengths is None else jnp.asarray(drawn.lengths, jnp.int32)
    o = attend(q, k, v, lengths_B, **SCORES[drawn.scores], tile=drawn.tile)
    assert o.dtype == drawn.dtype
    assert o.shape == q.shape
    assert drawn.scores != "bounded" or bound.holds(largest_score(q, k))
    if drawn.dtype == "float32":
        assert distance(o, reference(q, k, v, drawn.lengths)) <= CLOSE["float32"]
    else:
        assert within_roundings(o, q, k, v, drawn.lengths)


@MODES
@pytest.mark.parametrize(("heads", "size"), [(16, 128), (48, 64)])
def test_the_heads_of_real_models_agree_with_float64(heads, size, bounded):
    q, k, v = tokens(2, 1, heads, 70, 300, size, "bfloat16")
    assert distance(attend(q, k, v, bounded=bounded), reference(q, k, v)) <= CLOSE["bfloat16"]


@MODES
@pytest.mark.parametrize("norm", [0.01, 1.0, 2.5])
@pytest.mark.parametrize("common", [0.0, 3.0])
def test_the_error_of_float32_is_at_most_four_times_eager_pytorchs(norm, common, bounded):
    q, k, v = tokens(3, *ALONE, norm=norm, common=common)
    assert not bounded or bound.holds(largest_score(q, k))
    mine = distance(attend(q, k, v, all_of(k), bounded=bounded), reference(q, k, v))
    assert mine <= 4 * eager_distance(q, k, v, 40**-0.5)


@pytest.mark.parametrize(("norm", "common"), [(30.0, 0.0), (1.0, 400.0)])
def test_scores_far_beyond_the_bound_are_no_trouble_for_the_running_maximum(norm, common):
    q, k, v = tokens(3, *ALONE, norm=norm, common=common)
    assert largest_score(q, k) > 1000
    mine = distance(attend(q, k, v, all_of(k), bounded=False), reference(q, k, v))
    assert mine <= 4 * eager_distance(q, k, v, 40**-0.5)


@MODES
@DTYPES
@pytest.mark.parametrize(
    "lengths", [(0, 1, 2, 127), (128, 129, 255, 256), (257, 511, 512, 513), (767, 768, 769, 900), (0, 0, 0, 0)]
)
def test_lengths_at_the_edges_of_chunks_are_exact(lengths, dtype, bounded):
    q, k, v = tokens(1, *ALONE, dtype)
    o = attend(q, k, v, jnp.asarray(lengths, jnp.int32), bounded=bounded)
    assert distance(o, reference(q, k, v, lengths)) <= CLOSE[dtype]
    for sample, length in enumerate(lengths):
        assert length > 0 or not numpy.asarray(o[sample]).any()


@MODES
def test_one_program_serves_every_length(bounded):
    q, k, v = tokens(1, *ALONE)
    attend(q, k, v, jnp.asarray((3, 900, 1, 600), jnp.int32), bounded=bounded)
    before = ATTENTION._cache_size()
    for lengths in ((900, 1, 2, 3), (0, 300, 900, 899)):
        o = attend(q, k, v, jnp.asarray(lengths, jnp.int32), bounded=bounded)
        assert distance(o, reference(q, k, v, lengths)) <= CLOSE["float32"]
    assert ATTENTION._cache_size() == before


@MODES
@DTYPES
def test_padding_may_hold_anything(dtype, bounded):
    call = functools.partial(attend, bounded=bounded)
    assert_padding_is_not_read(call, dtype, lengths=(5, 0, 300, 512), sizes=PAIRED[1:])


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("value", [numpy.nan, numpy.inf, 1e30])
def test_padding_may_hold_anything_beside_heads_that_have_a_tile_to_themselves(value, scores):
    q, k, v = tokens(1, *ALONE)
    lengths = (277, 511, 0, 899)
    lengths_B = jnp.asarray(lengths, jnp.int32)
    dirty, clean = (
        attend(q, poisoned(k, lengths, x), poisoned(v, lengths, x), lengths_B, **SCORES[scores]) for x in (value, 0)
    )
    numpy.testing.assert_array_equal(numpy.asarray(dirty).view(numpy.uint8), numpy.asarray(clean).view(numpy.uint8))


@pytest.mark.parametrize(("heads", "size", "grouped"), [(48, 64, (2, 64)), (16, 128, (1, 128)), (4, 40, (2, 64))])
def test_two_small_heads_share_a_tile(heads, size, grouped):
    assert transposed.grouping(heads, size) == grouped


@pytest.mark.parametrize(("heads", "size", "grouped"), [(3, 64, (1, 128)), (2, 72, (1, 128)), (2, 160, (1, 256))])
def test_odd_and_larger_heads_have_a_tile_to_themselves(heads, size, grouped):
    assert transposed.grouping(heads, size) == grouped


@pytest.mark.parametrize(("axis", "devices", "bounded"), [("heads", 2, False), ("batch", 4, True)])
def test_a_sharded_call_gives_the_same_bits(axis, devices, bounded):
    q, k, v = tokens(8, *PAIRED)
    lengths_B = jnp.asarray((520, 300, 1, 0), jnp.int32)
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices])
    spec = PartitionSpec(None, "x") if axis == "heads" else PartitionSpec("x")
    specs = (spec, spec, spec, PartitionSpec() if axis == "heads" else spec)
    call = functools.partial(attend, bounded=bounded)
    # A kernel says nothing of which axes its outputs vary over.
    sharded = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False))
    numpy.testing.assert_array_equal(sharded(q, k, v, lengths_B), call(q, k, v, lengths_B))


@pytest.mark.parametrize("scores", SCORES)
def test_every_fetch_is_waited_for_and_nothing_is_overwritten_while_it_is_read(scores):
    """Under Pallas' TPU interpreter: copies happen when they are waited for, fresh memory holds NaN, races are seen."""
    lengths = (700, 256, 300)
    q, k, v = tokens(9, 3, 2, 300, 700, 64)
    machine = pltpu.InterpretParams(dma_execution_mode="on_wait", uninitialized_memory="nan", detect_races=True)
    o = attend(q, k, v, jnp.asarray(lengths, jnp.int32), **SCORES[scores], interpret=machine)
    assert distance(o, reference(q, k, v, lengths)) <= CLOSE["float32"]
    assert not races_found()


def races_found():
    """Returns whether the interpreter saw a race in its last run."""
    # Where jax keeps it; there is no public door.
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return interpret_pallas_call.races.races_found


# At the edge of the bound.


def at_the_edge(kind, dtype, score=bound.LIMIT):
    """Returns q and k whose scores, in units of log 2, are all `score` in size.

    Args:
        kind: `equal`: a row's scores are all score or all -score. `mixed`: one key's sign differs from the others'.
        dtype: Of both.
        score: Of a size that k, rounded to its dtype, meets to one rounding.
    """
    batch, heads, queries, keys, size = PAIRED
    signs_S = numpy.where(numpy.arange(queries) % 2, -1.0, 1.0)
    signs_T = numpy.ones(keys)
    if kind == "mixed":
        signs_T[:] = -1.0
        signs_T[keys // 3] = 1.0
    q, k = numpy.zeros((batch, heads, queries, size)), numpy.zeros((batch, heads, keys, size))
    # One factor is a power of 2, and four features share the product: no step of it rounds.
    q[..., :4] = signs_S[:, None] * 4.0
    k[..., :4] = signs_T[:, None] * (score / bound.LOG2E * size**0.5 / 16.0)
    return jnp.asarray(q, dtype), jnp.asarray(k, dtype)


@DTYPES
@pytest.mark.parametrize("kind", ["equal", "mixed"])
@pytest.mark.parametrize("size_of_values", [1e-4, 1.0, 1e4, 2.0**35])
def test_at_its_edge_the_bound_still_replaces_the_maximum(kind, dtype, size_of_values):
    """520 keys at 2^35 reach what 2^17 keys do at 2^27; the sums stay below 2^128."""
    q, k = at_the_edge(kind, dtype)
    v = (tokens(0, *PAIRED)[2] * size_of_values).astype(dtype)
    lengths = (519,) * 4
    o = attend(q, k, v, jnp.asarray(lengths, jnp.int32), bounded=True)
    exact = reference(q, k, v, lengths)
    assert distance(o, exact) <= CLOSE[dtype]


@pytest.mark.parametrize("kind", ["equal", "mixed"])
def test_values_of_one_sign_fill_the_range_of_float32_and_no_more(kind):
    q, k = at_the_edge(kind, "float32")
    v = jnp.full(k.shape, 2.0**38, jnp.float32)
    o = attend(q, k, v, all_of(k), bounded=True)
    assert distance(o, reference(q, k, v)) <= CLOSE["float32"]


@pytest.mark.parametrize("kind", ["equal", "mixed"])
def test_beyond_the_bound_only_the_running_maximum_is_right(kind):
    q, k = at_the_edge(kind, "float32", score=200.0)
    assert not bound.holds(largest_score(q, k))
    v, lengths = tokens(0, *PAIRED)[2], (519,) * 4
    lengths_B = jnp.asarray(lengths, jnp.int32)
    exact = reference(q, k, v, lengths)
    online, bounded = (numpy.asarray(attend(q, k, v, lengths_B, bounded=way)) for way in (False, True))
    assert distance(online, exact) <= CLOSE["float32"]
    # 2^200 is infinite and 2^-200 is 0: rows come out as NaN, or as nothing.
    assert not numpy.isfinite(bounded[:, :, 0]).any()
    assert not numpy.allclose(bounded[:, :, 1], exact[:, :, 1], atol=0.1 * numpy.abs(exact).max())


# Shifts in place of the maximum.


def side_by_side(x_BHSD):
    """Returns [B, H, S, D] as [B, S, H * D]."""
    return jnp.swapaxes(x_BHSD, 1, 2).reshape(x_BHSD.shape[0], x_BHSD.shape[2], -1)


def shifts_of(q, k, lengths, scale=None):
    """Returns the shifts [B, H, S] and whether they do, with the keys in two arrays; and the scores in float64."""
    _, _, keys, size = k.shape
    scale, half = (scale or size**-0.5) * bound.LOG2E, keys // 2
    counts = jnp.asarray([[min(n, half), max(n - half, 0)] for n in lengths], jnp.int32)
    arrays = [(side_by_side(k[:, :, :half]), counts[:, 0]), (side_by_side(k[:, :, half:]), counts[:, 1])]
    shifts, holds = jax.jit(bound.shifts, static_argnums=(2, 3))(side_by_side(q), arrays, size, scale)
    wide_q, wide_k = (numpy.asarray(x, numpy.float64) for x in (q, k))
    return numpy.asarray(shifts, numpy.float64), bool(holds), scale * wide_q @ wide_k.swapaxes(2, 3)


@DTYPES
@pytest.mark.parametrize(
    ("norm", "common", "does"),
    [(0.01, 0, True), (1, 3, True), (2, 0, True), (1, 40, True), (7, 0, False), (30, 9, False)],
)
def test_shifted_scores_overflow_nowhere_and_leave_a_key_to_every_query(norm, common, does, dtype):
    q, k, _ = tokens(4, *ALONE, dtype, norm=norm, common=common)
    lengths = (900, 517, 300, 1)
    shifts, holds, scores = shifts_of(q, poisoned(k, lengths, numpy.nan), lengths)
    assert holds is does
    for sample, length in enumerate(lengths):
        shifted = scores[sample, :, :, :length] - shifts[sample][..., None]
        assert shifted.max() <= bound.LIMIT
        assert not holds or shifted.max(-1).min() >= -bound.LIMIT


def test_the_reach_of_shifts_is_twice_that_of_a_bound():
    """A query whose scores are equally far on both sides of their mean: to 160 in units of log 2."""
    batch, heads, queries, keys, size = PAIRED
    q, k = numpy.zeros((batch, heads, queries, size)), numpy.zeros((batch, heads, keys, size))
    q[..., 0], k[..., ::2, 0], k[..., 1::2, 0] = 8.0, 1.0, -1.0
    for score, does in ((140.0, True), (161.0, False)):
        far = jnp.asarray(k * score / bound.LOG2E * size**0.5 / 8.0, jnp.float32)
        shifts, holds, _ = shifts_of(jnp.asarray(q, jnp.float32), far, (keys,) * batch)
        assert holds is does
        assert shifts.min() >= 0.99 * score / 2
        v = tokens(0, *PAIRED)[2]
        o = attend(jnp.asarray(q, jnp.float32), far, v, all_of(far), **SCORES["shifted"])
        assert distance(o, reference(q, far, v)) <= CLOSE["float32"]


@DTYPES
def test_keys_that_are_all_alike_leave_the_mean_no_room_for_its_rounding(dtype):
    """The shift is then the score itself, up to roundings, which grow with it."""
    batch, heads, queries, keys, size = PAIRED
    for key, does in ((8.0, True), (192.0, False)):
        q = jnp.full((batch, heads, queries, size), 8.5625, dtype)
        k = jnp.full((batch, heads, keys, size), key, dtype)
        shifts, holds, scores = shifts_of(q, k, (keys,) * batch)
        assert holds is does
        v = tokens(0, *PAIRED, dtype)[2]
        assert distance(attend(q, k, v, all_of(k), **SCORES["shifted"]), reference(q, k, v)) <= CLOSE[dtype]
        assert not holds or (scores - shifts[..., None]).max(-1).min() >= -bound.LIMIT


@pytest.mark.parametrize("norm", [1.0, 7.0])
def test_a_negative_scale_is_shifted_too(norm):
    q, k, v = tokens(4, *ALONE, norm=norm, common=2.0)
    shifts, holds, scores = shifts_of(q, k, (900,) * 4, scale=-(40**-0.5))
    assert holds is (norm == 1.0)
    assert (scores - shifts[..., None]).max() <= bound.LIMIT
    o = attend(q, k, v, all_of(k), **SCORES["shifted"], scale=-(40**-0.5))
    assert distance(o, reference(-q, k, v)) <= 4 * eager_distance(q, k, v, -(40**-0.5))


def test_queries_whose_squares_vanish_are_not_taken_for_zeros():
    q, k, _ = tokens(4, *ALONE)
    assert shifts_of(q * 1e-19, k * 1e18, (900,) * 4, scale=1.0)[1]
    assert not shifts_of(q * 1e-19, k * 1e18, (900,) * 4, scale=100.0)[1]


@pytest.mark.parametrize(("norm", "common"), [(30.0, 0.0), (1.0, 400.0)])
def test_out_of_reach_of_shifts_the_running_maximum_is_kept(norm, common):
    q, k, v = tokens(3, *ALONE, norm=norm, common=common)
    q = q.at[0, 0, 0].set(numpy.nan)
    assert not shifts_of(q, k, (900,) * 4)[1]
    shifted, online = (attend(q, k, v, all_of(k), **SCORES[scores]) for scores in ("shifted", "online"))
    numpy.testing.assert_array_equal(shifted, online)


def test_copies_are_started_one_by_one_between_many_cells_and_all_before_the_first_of_few():
    assert [list(some) for some in transposed_kernel._shares(2, 5)] == [[], [], [0], [], [1]]
    assert [list(some) for some in transposed_kernel._shares(4, 2)] == [[0, 1, 2, 3], []]
