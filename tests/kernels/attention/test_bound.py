"""The bound of scores from gains: above every score that norms and rotation can make, and reached by some."""

import math

import jax
import jax.numpy as jnp
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchport.errors import BadValueError, DeadRuleError
from torchport.kernels.attention import bound

UNIT = 2.0**-8
PAIRINGS = ("none", "neighbours", "halves")


def to_bfloat16(x):
    """Returns x rounded to bfloat16, as float64."""
    return numpy.asarray(x).astype(jnp.bfloat16).astype(numpy.float64)


def same(x):
    """Returns x: no rounding."""
    return x


def normed(x, kind, eps=1e-6):
    """Returns RMSNorm or LayerNorm of the last dim, without gain."""
    if kind == "layer":
        x = x - x.mean(-1, keepdims=True)
    return x / numpy.sqrt((x * x).mean(-1, keepdims=True) + eps)


def rotated(x, angles, pairing, table=same, product=same, result=same):
    """Returns x [..., D] with every pair of features turned by its angle [D / 2].

    Args:
        x: Features.
        angles: One for each pair.
        pairing: `neighbours` (0 with 1), `halves` (0 with D / 2) or `none`.
        table: How cosines and sines round.
        product: How their products with features round.
        result: How the sum rounds.
    """
    if pairing == "none":
        return x
    half = x.shape[-1] // 2
    first, second = (
        (slice(0, None, 2), slice(1, None, 2)) if pairing == "neighbours" else (slice(half), slice(half, None))
    )
    cos, sin = table(numpy.cos(angles)), table(numpy.sin(angles))
    out = numpy.empty_like(x)
    out[..., first] = result(product(x[..., first] * cos) - product(x[..., second] * sin))
    out[..., second] = result(product(x[..., first] * sin) + product(x[..., second] * cos))
    return out


def raw(random, count, size):
    """Returns tokens [count, D] before the norm, some of them with all they have in one feature."""
    x = random.standard_normal((count, size)) * 10 ** random.uniform(-3, 3, (count, 1)) + random.uniform(-5, 5)
    x[: count // 2] *= random.random((count // 2, size)) < 2 / size
    return x


@st.composite
def sides(draw):
    """Draws two to four norms: their gains and offsets, and which side each is on."""
    random = numpy.random.default_rng(draw(st.integers(0, 9999)))
    size, spread = draw(st.sampled_from([16, 64, 128])), draw(st.sampled_from([0.0, 0.3, 2.0]))
    kind, offset = draw(st.sampled_from([("rms", 0.0), ("layer", 0.0), ("layer", 0.5)]))
    counts = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    gains = [[numpy.exp(spread * random.standard_normal(size)) * random.choice([-1, 1], size) for _ in range(count)]
             for count in counts]  # fmt: skip
    offsets = [[offset * random.standard_normal(size) for _ in range(count)] for count in counts]
    return random, kind, gains, offsets, draw(st.sampled_from(PAIRINGS))


def bound_of(gains, offsets):
    """Returns norm_bound of both sides' gains and offsets."""
    return bound.norm_bound(gains[0], gains[1], query_offsets=offsets[0], key_offsets=offsets[1])


def largest_product(random, kind, gains, offsets, pairing, number=same, norm=None, **rotation):
    """Returns max|q . k| over tokens of every norm of either side, each turned by angles of its own."""
    made = []
    for side in range(2):
        tokens = []
        for gain, offset in zip(gains[side], offsets[side], strict=True):
            x = number(number(number(normed(raw(random, 64, gain.size), kind)) * gain) + offset)
            # Whatever a norm can leave, the worst token is among them: all of it in the feature of the largest gain.
            worst = numpy.arange(gain.size) == numpy.abs(gain).argmax()
            x[0] = number(number(gain * worst * gain.size**0.5) + offset)
            angles = random.uniform(0, 2 * numpy.pi, gain.size // 2)
            tokens.append(rotated(x, angles if side else angles * 0, pairing, result=number, **rotation))
        made.append(numpy.concatenate(tokens))
    return numpy.abs(made[0] @ made[1].T).max()


@settings(max_examples=150)
@given(sides())
def test_no_token_exceeds_the_bound(drawn):
    random, kind, gains, offsets, pairing = drawn
    assert largest_product(random, kind, gains, offsets, pairing) <= bound_of(gains, offsets) * (1 + 1e-12)


@settings(max_examples=150)
@given(sides(), st.booleans())
def test_no_token_in_bfloat16_exceeds_the_bound_with_its_rounding(drawn, all_bfloat16):
    """The rotation in float32, or with tables and products in bfloat16 too."""
    random, kind, gains, offsets, pairing = drawn
    gains, offsets = ([[to_bfloat16(x) for x in side] for side in both] for both in (gains, offsets))
    rotation = {"table": to_bfloat16, "product": to_bfloat16} if all_bfloat16 else {}
    largest = largest_product(random, kind, gains, offsets, pairing, number=to_bfloat16, **rotation)
    assert largest <= bound_of(gains, offsets) * bound.ROUNDING


@pytest.mark.parametrize(
    ("norm", "gain", "angle", "rotation", "least"),
    [
        (1 + 9 * UNIT, 1.1015625, 0.08172962222967034, {}, 1.020),
        (1 + 13 * UNIT, 1.3671875, 0.7826002976443287, {"table": to_bfloat16, "product": to_bfloat16}, 1.030),
    ],
    ids=["rotated in float32", "rotated in bfloat16"],
)
def test_roundings_that_all_go_up_stay_within_their_allowance(norm, gain, angle, rotation, least):
    """Every feature lies just above the middle of two bfloat16, after the norm and, nearly, after each later step."""
    size, value = 128, norm + 2.0**-20
    pairs = int(size / value**2 / 2)
    x = numpy.zeros((1, size))
    x[0, : 2 * pairs] = value
    # What is left of the length that the norm gives, so that the norm changes nothing.
    x[0, -1] = (size - 2 * pairs * value**2) ** 0.5
    numpy.testing.assert_allclose(normed(x, "rms", 0.0), x, rtol=1e-14)
    gains = numpy.full(size, gain)
    after = to_bfloat16(to_bfloat16(x) * gains)
    q = rotated(after, numpy.full(size // 2, angle), "neighbours", result=to_bfloat16, **rotation)
    ratio = float((q * q).sum()) / bound.norm_bound([gains], [gains])
    assert least <= ratio <= bound.ROUNDING


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_uniform_gains_reach_the_bound(kind, pairing):
    random = numpy.random.default_rng(0)
    angles = random.uniform(0, 2 * numpy.pi, 32)
    x = normed(raw(random, 4, 64), kind, 0.0)[-1]
    q, k = (rotated(gain * x, angles, pairing) for gain in (1.5, -2.0))
    reached = bound.norm_bound([numpy.full(64, 1.5)], [numpy.full(64, -2.0)])
    numpy.testing.assert_allclose(abs(q @ k), reached, rtol=1e-12)
    assert reached == pytest.approx(64 * 3.0)


def test_one_large_gain_on_either_side_reaches_the_bound():
    gains = numpy.ones(64)
    gains[7] = 5.0
    token = numpy.where(numpy.arange(64) == 7, 8.0, 0.0) * gains
    assert token @ token == pytest.approx(bound.norm_bound([gains], [gains]))


def test_offsets_along_the_token_reach_the_bound():
    ones = numpy.ones(64)
    token = ones + 0.25 * ones
    reached = bound.norm_bound([ones], [ones], query_offsets=[0.25 * ones], key_offsets=[0.25 * ones])
    assert token @ token == pytest.approx(reached)


def test_the_largest_norm_of_a_side_counts_whatever_the_order():
    small, large = numpy.ones(16), numpy.full(16, -3.0)
    for order in ([small, large], [large, small]):
        assert bound.norm_bound(order, [small]) == pytest.approx(48)
        assert bound.norm_bound([small], order) == pytest.approx(48)


def test_a_norm_over_all_heads_may_leave_all_its_length_in_one():
    gain = numpy.full(4 * 16, 1.5)
    x = numpy.zeros((1, 64))
    x[0, 16:32] = numpy.random.default_rng(0).standard_normal(16)
    head = (normed(x, "rms", 0.0) * gain)[0, 16:32]
    assert head @ head == pytest.approx(bound.norm_bound([gain], [gain]))
    assert bound.norm_bound([gain], [gain]) == pytest.approx(4 * bound.norm_bound([gain[:16]], [gain[:16]]))


@pytest.mark.parametrize("value", [numpy.nan, numpy.inf, -numpy.inf])
@pytest.mark.parametrize("place", ["query_gains", "key_gains", "query_offsets", "key_offsets"])
@pytest.mark.parametrize("last", [False, True])
def test_no_bound_holds_of_gains_that_are_not_finite(value, place, last):
    bad, good = numpy.ones(16), numpy.ones(16)
    bad[3] = value
    both = {"query_gains": [good], "key_gains": [good]} | {place: [good, bad] if last else [bad, good]}
    infinite = bound.norm_bound(both.pop("query_gains"), both.pop("key_gains"), **both)
    assert infinite == numpy.inf
    assert not bound.holds(infinite)


def test_gains_of_zero_have_a_bound_of_zero_and_infinite_ones_beside_them_none():
    zero = numpy.zeros(16)
    assert bound.norm_bound([zero], [zero]) == 0
    assert bound.holds(0.0)
    assert not bound.holds(bound.norm_bound([zero], [numpy.full(16, numpy.inf)]))


def test_gains_in_bfloat16_are_read_exactly():
    gain = jnp.asarray(numpy.random.default_rng(0).standard_normal(64), jnp.bfloat16)
    wide = numpy.asarray(gain).astype(numpy.float64)
    assert bound.norm_bound([numpy.asarray(gain)], [wide]) == bound.norm_bound([wide], [wide])


def test_the_bound_holds_up_to_its_limit_and_not_beyond():
    edge = bound.LIMIT / bound.LOG2E / bound.ROUNDING
    assert bound.holds(edge * (1 - 1e-12))
    assert not bound.holds(edge * (1 + 1e-12))
    assert not bound.holds(None)
    assert not bound.holds(float("nan"))


def test_the_limit_keeps_a_hundred_thousand_keys_with_large_values_in_float32s_range():
    largest = numpy.finfo(numpy.float32).max
    assert largest > 2.0**17 * 2.0**bound.LIMIT * 2.0**30
    assert jnp.finfo(jnp.bfloat16).tiny < 2.0**-bound.LIMIT


def test_a_networks_bound_is_that_of_its_worst_block_offsets_counted():
    gains = {f"blocks.{n}.norm_{side}.weight": numpy.full(4, 1.0 + n) for n in range(3) for side in "qk"}
    patterns = ([r"blocks\.\d+\.norm_q\.weight"], [r"blocks\.\d+\.norm_k\.weight"])
    assert bound.of_weights(gains, *patterns, "joint", "card.yaml:3") == pytest.approx(4 * 9)
    gains["blocks.0.norm_q.bias"] = numpy.full(4, 10.0)  # |q| <= 2 + 20, |k| <= 2
    assert bound.of_weights(gains, *patterns, "joint", "card.yaml:3") == pytest.approx(44)


def test_a_bound_is_none_without_values_and_infinite_for_a_shared_gain_or_a_block_with_one_side():
    shapes = {f"norm_{side}.weight": jax.ShapeDtypeStruct((4,), jnp.float32) for side in "qk"}
    patterns = (["norm_q.weight"], ["norm_k.weight"])
    assert bound.of_weights(shapes, *patterns, "joint", "card.yaml:3") is None
    shared = {"norm_q.weight": numpy.ones(1), "norm_k.weight": numpy.ones(4)}
    assert bound.of_weights(shared, *patterns, "joint", "card.yaml:3") == math.inf
    apart = {"blocks.0.norm_q.weight": numpy.ones(4), "blocks.1.norm_k.weight": numpy.ones(4)}
    patterns = ([r"blocks\.\d+\.norm_q\.weight"], [r"blocks\.\d+\.norm_k\.weight"])
    assert bound.of_weights(apart, *patterns, "joint", "card.yaml:3") == math.inf


def test_a_pattern_that_matches_no_weight_is_refused():
    with pytest.raises(DeadRuleError) as caught:
        bound.of_weights({"norm_q.weight": numpy.ones(4)}, ["norm_q.weight"], ["norm_x.weight"], "joint", "card.yaml:3")
    assert str(caught.value) == (
        "card.yaml:3: 'norm_x.weight' of the bound 'joint' matches no weight. Did you mean 'norm_q.weight'? "
        "Known: norm_q.weight."
    )


@pytest.mark.parametrize(
    ("pattern", "kind", "text"),
    [
        (r"blocks\.\d\.norm_q\.weight", DeadRuleError, "and not 'blocks.10.norm_q.weight'. It must match the norms of"),
        (r"blocks\.\d+\.norm_q\.bias", BadValueError, "'blocks.0.norm_q.bias' [4], which is no gain"),
        (r"blocks\.\d+\.to_q\.weight", BadValueError, "'blocks.0.to_q.weight' [4, 4], which is no gain"),
        (r"blocks\.\d+\.centred\.weight", BadValueError, "The gains of the bound 'joint' are all 0"),
    ],
)
def test_a_card_that_would_give_a_wrong_bound_is_refused(pattern, kind, text):
    weights = {}
    for n in range(11):
        weights |= {f"blocks.{n}.norm_{side}.weight": numpy.ones(4) for side in "qk"}
        weights |= {f"blocks.{n}.norm_q.bias": numpy.zeros(4), f"blocks.{n}.to_q.weight": numpy.ones((4, 4))}
        weights |= {f"blocks.{n}.centred.weight": numpy.zeros(4)}
    with pytest.raises(kind) as caught:
        bound.of_weights(weights, [pattern], [r"blocks\.\d+\.norm_k\.weight"], "joint", "card.yaml:3")
    assert text in str(caught.value) and str(caught.value).startswith("card.yaml:3: ")
