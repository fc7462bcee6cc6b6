"""What attention is, in float64 and numpy, and how far from it a computation may be.

Shapes: B batch, H heads, S queries, T keys, D features of a head.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy
import torch
from hypothesis import strategies as st

BOUNDS = {"float32": 32 * 2.0**-23, "bfloat16": 4 * 2.0**-8}
"""Largest max|a - b| / max|b|. float32: some tens of roundings on the way through D products, T exponentials and their
sum. bfloat16: the inputs are given, so what rounds is q times the scale, the probabilities and the result, each by at
most 2^-8."""


def reference(q, k, v, lengths=None, scale=None, causal=False, window=None, mask=None):
    """Returns softmax(scale * q k^T + mask) v as float64 [B, H, S, D]; 0 for a query that sees no key.

    Args:
        q: [B, H, S, D], any dtype; k and v likewise, [B, H, T, D].
        lengths: [B], numbers of valid keys; None: all.
        scale: None: 1 / sqrt(D).
        causal: Whether query s sees keys up to s only.
        window: (left, right), each an int or None.
        mask: bool or float, [B or 1, H or 1, S, T].
    """
    q, k, v = (numpy.asarray(x).astype(numpy.float64) for x in (q, k, v))
    batch, _, queries, size = q.shape
    keys = k.shape[2]
    rows, columns = numpy.arange(queries)[:, None], numpy.arange(keys)[None, :]
    seen = numpy.ones((queries, keys), bool)
    if causal:
        seen &= columns <= rows
    left, right = window or (None, None)
    if left is not None:
        seen &= columns >= rows - left
    if right is not None:
        seen &= columns <= rows + right
    ends = numpy.full(batch, keys) if lengths is None else numpy.asarray(lengths)
    valid = numpy.arange(keys) < ends[:, None]
    seen = seen[None, None] & valid[:, None, None, :]
    k, v = (numpy.where(valid[:, None, :, None], x, 0.0) for x in (k, v))
    scores = q @ k.swapaxes(2, 3) * (scale if scale is not None else 1 / math.sqrt(size))
    if mask is not None:
        mask = numpy.asarray(mask)
        seen = seen & mask if mask.dtype == bool else seen
        scores = scores if mask.dtype == bool else scores + mask.astype(numpy.float64)
    scores = numpy.where(seen, scores, -numpy.inf)
    peak = scores.max(-1, keepdims=True)
    weights = numpy.exp(scores - numpy.where(numpy.isinf(peak), 0.0, peak))
    total = weights.sum(-1, keepdims=True)
    return weights @ v / numpy.where(total == 0, 1.0, total)


def distance(a, b):
    """Returns max|a - b| / max|b|, of finite a."""
    a, b = numpy.asarray(a).astype(numpy.float64), numpy.asarray(b).astype(numpy.float64)
    assert a.shape == b.shape
    assert numpy.isfinite(a).all()
    return float(numpy.abs(a - b).max() / max(numpy.abs(b).max(), 1e-30))


def eager_distance(q, k, v, scale):
    """Returns how far PyTorch's eager float32 attention is from float64, without mask and padding."""
    tensors = [torch.from_numpy(numpy.array(x, numpy.float32)) for x in (q, k, v)]
    scores = tensors[0] @ tensors[1].transpose(2, 3) * scale
    return distance((scores.softmax(-1) @ tensors[2]).numpy(), reference(q, k, v, scale=scale))


def tokens(seed, batch, heads, queries, keys, size, dtype="float32", *, norm=1.0, common=0.0):
    """Returns q, k and v as jax arrays.

    Args:
        seed: Of the random numbers.
        batch: B, and so on.
        heads: H.
        queries: S.
        keys: T.
        size: D.
        dtype: Of all three.
        norm: What q and k are multiplied by.
        common: Size of a vector that all keys of a head share.
    """
    random = numpy.random.default_rng(seed)
    q, k, v = (random.standard_normal((batch, heads, n, size)) for n in (queries, keys, keys))
    k = k * norm + common * random.standard_normal((batch, heads, 1, size))
    # Whatever the seed, values of about 1 to 4: a bound relative to a small maximum proves nothing.
    return [jnp.asarray(x, dtype) for x in (q * norm, k, v)]


@dataclasses.dataclass(frozen=True)
class Case:
    """What one call of attention is given."""

    seed: int
    batch: int
    heads: int
    queries: int
    keys: int
    size: int
    lengths: tuple[int, ...] | None
    causal: bool
    window: tuple[int | None, int | None] | None
    dtype: str
    norm: float
    common: float

    def tokens(self):
        """Returns q, k, v."""
        sizes = (self.batch, self.heads, self.queries, self.keys, self.size)
        return tokens(self.seed, *sizes, self.dtype, norm=self.norm, common=self.common)

    def options(self):
        """Returns what every implementation takes beside q, k and v."""
        lengths = None if self.lengths is None else jnp.asarray(self.lengths, jnp.int32)
        return {"lengths_B": lengths, "scale": self.size**-0.5, "causal": self.causal, "window": self.window}

    def distance(self, o):
        """Returns how far o is from float64."""
        options = {"lengths": self.lengths, "causal": self.causal, "window": self.window}
        return distance(o, reference(*self.tokens(), **options))


@st.composite
def cases(draw, largest=40, windows=True):
    """Draws a case with up to `largest` queries and keys."""
    batch, keys = draw(st.integers(1, 2)), draw(st.integers(1, largest))
    side = st.none() | st.integers(0, largest)
    return Case(
        seed=draw(st.integers(0, 99)),
        batch=batch,
        heads=draw(st.integers(1, 2)),
        queries=draw(st.integers(1, largest)),
        keys=keys,
        size=draw(st.sampled_from([3, 8, 16])),
        lengths=draw(st.none() | st.tuples(*[st.integers(0, keys)] * batch)),
        causal=draw(st.booleans()) if windows else False,
        window=draw(st.none() | st.tuples(side, side)) if windows else None,
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        norm=draw(st.sampled_from([0.01, 1.0])),
        common=draw(st.sampled_from([0.0, 2.0])),
    )


def poisoned(x, lengths, value):
    """Returns keys or values with `value` beyond each sample's length."""
    valid = numpy.arange(x.shape[2]) < numpy.asarray(lengths)[:, None]
    return jnp.where(valid[:, None, :, None], x, jnp.asarray(value, x.dtype))


def assert_padding_is_not_read(call, dtype="float32", lengths=(5, 0, 13, 30), sizes=(2, 17, 30, 16)):
    """Asserts that what lies beyond the lengths changes no bit, and that a length of 0 gives 0.

    Args:
        call: Takes q, k, v and lengths_B.
        dtype: Of the tokens.
        lengths: One for each sample; 0 among them.
        sizes: H, S, T and D.
    """
    q, k, v = tokens(0, len(lengths), *sizes, dtype)
    lengths_B = jnp.asarray(lengths, jnp.int32)
    clean = numpy.asarray(call(q, poisoned(k, lengths, 0), poisoned(v, lengths, 0), lengths_B))
    assert numpy.isfinite(clean.astype(numpy.float32)).all()
    assert not clean[lengths.index(0)].any()
    for value in (numpy.nan, numpy.inf, -1e30, 1e30):
        dirty = call(q, poisoned(k, lengths, value), poisoned(v, lengths, value), lengths_B)
        numpy.testing.assert_array_equal(numpy.asarray(dirty).view(numpy.uint8), clean.view(numpy.uint8))
