"""Special functions for which torchax has no lowering, or one that stops or is not exact. They compute in float64."""

from __future__ import annotations

import math

import torch

from torchport import engine

NODES = 128
"""Of the sums that stand for the integrals of Bessel functions. The error falls exponentially with their number."""
BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)


def piecewise(original, x, condlist, funclist, *args, **kw):
    """Returns for each value what the function of its last condition gives, of functions that are all computed.

    JAX's chooses by an argmax of 64 bits, which its compiler refuses in a program of torchport's.
    """
    import jax.numpy as jnp

    def of_one(value, *conditions):
        given = [one(value, *args, **kw) if callable(one) else one for one in funclist]
        out = jnp.asarray(given[len(conditions)] if len(given) > len(conditions) else 0, value.dtype)
        for condition, other in zip(conditions, given, strict=False):
            out = jnp.where(condition, jnp.asarray(other, value.dtype), out)
        return out

    return jnp.vectorize(of_one)(x, *condlist)


def _elementwise(function, *args):
    """Calls a function with float64 arrays."""
    import jax.numpy as jnp

    return engine.call_jax(lambda *arrays: function(*(array.astype(jnp.float64) for array in arrays)), *args)


def _polynomial(first, step, x, n):
    """Returns the polynomial of a degree, by the recurrence of its family from the one of degree 1."""
    import jax
    import jax.numpy as jnp

    def value(x, n):
        x, n = jnp.broadcast_arrays(x, jnp.where(jnp.isfinite(n), jnp.trunc(n), -1))

        def following(state):
            k, before, last = state
            return k + 1, last, jnp.where(k < n, step(k, x, before, last), last)

        start = jnp.ones((), x.dtype), jnp.ones_like(x), first(x)
        _, _, last = jax.lax.while_loop(lambda state: state[0] < n.max(initial=0), following, start)
        return jnp.where(n < 0, 0, jnp.where(n == 0, 1, last))

    return _elementwise(value, x, n)


def _chebyshev(k, x, before, last):
    return 2 * x * last - before


def chebyshev_polynomial_v(x, n):
    """Returns the Chebyshev polynomial of the third kind."""
    return _polynomial(lambda x: 2 * x - 1, _chebyshev, x, n)


def chebyshev_polynomial_w(x, n):
    """Returns the Chebyshev polynomial of the fourth kind."""
    return _polynomial(lambda x: 2 * x + 1, _chebyshev, x, n)


def shifted_chebyshev_polynomial_t(x, n):
    """Returns the Chebyshev polynomial of the first kind, of values between 0 and 1."""
    return _polynomial(lambda x: x, _chebyshev, x.double() * 2 - 1, n)


def shifted_chebyshev_polynomial_u(x, n):
    """Returns the Chebyshev polynomial of the second kind, of values between 0 and 1."""
    return _polynomial(lambda x: 2 * x, _chebyshev, x.double() * 2 - 1, n)


def shifted_chebyshev_polynomial_v(x, n):
    """Returns the Chebyshev polynomial of the third kind, of values between 0 and 1."""
    return chebyshev_polynomial_v(x.double() * 2 - 1, n)


def shifted_chebyshev_polynomial_w(x, n):
    """Returns the Chebyshev polynomial of the fourth kind, of values between 0 and 1."""
    return chebyshev_polynomial_w(x.double() * 2 - 1, n)


def legendre_polynomial_p(x, n):
    """Returns the Legendre polynomial."""
    return _polynomial(lambda x: x, lambda k, x, before, last: ((2 * k + 1) * x * last - k * before) / (k + 1), x, n)


def spherical_bessel_j0(x):
    """Returns sin(x) / x."""
    import jax.numpy as jnp

    return _elementwise(lambda x: jnp.where(x == 0, 1, jnp.where(jnp.isinf(x), 0, jnp.sin(x) / x)), x)


def _scaled_bessel_k(order, x):
    """Returns the integral of exp(-x (cosh t - 1)) cosh(order t) over t > 0: exp(x) times the Bessel function."""
    import jax.numpy as jnp

    end = jnp.arccosh(1 + 45 / jnp.where(x > 0, x, 1))[..., None]  # the rest is below exp(-45)
    t = end * jnp.arange(NODES) / (NODES - 1)
    weight = jnp.where(jnp.arange(NODES) == 0, 0.5, 1)
    values = jnp.exp(-2 * x[..., None] * jnp.sinh(t / 2) ** 2) * jnp.cosh(order * t) * weight
    out = values.sum(-1) * end[..., 0] / (NODES - 1)
    return jnp.where(x == 0, jnp.inf, jnp.where(x > 0, out, jnp.nan))


def scaled_modified_bessel_k0(x):
    """Returns exp(x) times the modified Bessel function of the second kind, of order 0."""
    return _elementwise(lambda x: _scaled_bessel_k(0, x), x)


def scaled_modified_bessel_k1(x):
    """Returns exp(x) times the modified Bessel function of the second kind, of order 1."""
    return _elementwise(lambda x: _scaled_bessel_k(1, x), x)


def _zeta(s, q):
    """Returns the sum of (q + k) to the power of -s over k: its first terms, and the formula of Euler and Maclaurin."""
    import jax
    import jax.numpy as jnp

    s, q = jnp.broadcast_arrays(s, q)
    small = jnp.where(jnp.isfinite(q) & (s > 1), q, 10)

    def add(state):
        total, place = state
        near = place < 10
        return total + jnp.where(near, place**-s, 0), jnp.where(near, place + 1, place)

    total, place = jax.lax.while_loop(lambda state: (state[1] < 10).any(), add, (jnp.zeros_like(s), small))
    last = place**-s
    total, factor = total + last * place / (s - 1) + last / 2, s * last / place
    for k, number in enumerate(BERNOULLI, 1):
        total = total + number / math.factorial(2 * k) * factor
        factor = factor * (s + 2 * k - 1) * (s + 2 * k) / place**2
    total = jnp.where((q <= 0) & (s != jnp.floor(s)), jnp.nan, total)
    total = jnp.where((q <= 0) & (q == jnp.floor(q)), jnp.inf, total)
    total = jnp.where(jnp.isposinf(q), 0, total)
    return jnp.where((s < 1) | (s != s) | (q != q), jnp.nan, jnp.where(s == 1, jnp.inf, total))


def zeta(self, other):
    """Returns the zeta function of Hurwitz."""
    return _elementwise(_zeta, self, other)


def polygamma(n, self):
    """Returns a derivative of the logarithm of the gamma function."""
    if n == 0:
        return torch.digamma(self)
    return _elementwise(lambda x: (-1) ** (n + 1) * math.factorial(n) * _zeta(x * 0 + n + 1, x), self)


def digamma(self):
    """Returns the derivative of the logarithm of the gamma function, which has the sign of -0 at it."""
    import jax
    import jax.numpy as jnp

    return _elementwise(lambda x: jnp.where(x == 0, -jnp.copysign(jnp.inf, x), jax.lax.digamma(x)), self)


def mvlgamma(self, p):
    """Returns the logarithm of the gamma function of several dims."""
    import jax

    return _elementwise(lambda x: jax.scipy.special.multigammaln(x, p), self)


def _expanded(name, *args, **options):
    """Returns what JAX makes of a special function as it lowers it: there its constants would have 32 bits."""
    from jax._src.lax import special

    return getattr(special, f"{name}_impl")(*args, **options)


def i0(self):
    """Returns the modified Bessel function of the first kind, of order 0."""
    import jax.numpy as jnp

    return _elementwise(lambda x: jnp.exp(jnp.abs(x)) * _expanded("bessel_i0e", x), self)


def i0e(self):
    """Returns exp(-|x|) times the modified Bessel function of the first kind, of order 0."""
    return _elementwise(lambda x: _expanded("bessel_i0e", x), self)


def igamma(self, other):
    """Returns the lower part of the gamma function, as a share of it."""
    import jax.numpy as jnp

    return _elementwise(lambda a, x: _expanded("igamma", *jnp.broadcast_arrays(a, x), dtype=a.dtype), self, other)


def igammac(self, other):
    """Returns the upper part of the gamma function, as a share of it."""
    import jax.numpy as jnp

    return _elementwise(lambda a, x: _expanded("igammac", *jnp.broadcast_arrays(a, x), dtype=a.dtype), self, other)


def lgamma(self):
    """Returns the logarithm of the gamma function, which is 0 at 1 and 2."""
    import jax
    import jax.numpy as jnp

    return engine.call_jax(lambda x: jnp.where((x == 1) | (x == 2), 0, jax.lax.lgamma(x)), self)
