"""Lowerings of linear algebra."""

from __future__ import annotations

from torchport import engine


def linalg_eigh(A, UPLO="L", compute_v=True):
    """Returns the eigenvalues and eigenvectors of a matrix of which one triangle is read."""
    import jax.numpy as jnp

    def pairs(x):
        half, rest = (jnp.tril(x), jnp.tril(x, -1)) if UPLO == "L" else (jnp.triu(x), jnp.triu(x, 1))
        values, vectors = jnp.linalg.eigh(half + rest.mT.conj())
        return values, vectors if compute_v else jnp.zeros(0, x.dtype)

    return engine.call_jax(pairs, A)


def linalg_lu(A, *, pivot=True):
    """Returns the factors of a matrix: a permutation, a lower and an upper triangle."""
    import jax

    def factors(x):
        packed, _, order = jax.lax.linalg.lu(x)
        return _unpacked(packed, order)

    return engine.call_jax(factors, A)


def _unpacked(packed, order):
    import jax.numpy as jnp

    rank = min(packed.shape[-2:])
    eye = jnp.eye(packed.shape[-2], dtype=packed.dtype)
    lower = jnp.tril(packed, -1)[..., :rank] + eye[:, :rank]
    return jnp.take(eye, order, 0).mT, lower, jnp.triu(packed)[..., :rank, :]


def lu_unpack(LU_data, LU_pivots, unpack_data=True, unpack_pivots=True):
    """Returns the factors of a matrix that are packed in one, with the rows that were exchanged."""
    import jax
    import jax.numpy as jnp

    def factors(packed, pivots):
        order = jax.lax.linalg.lu_pivots_to_permutation(pivots - 1, packed.shape[-2])
        permutation, lower, upper = _unpacked(packed, order)
        none = jnp.zeros(0, packed.dtype)
        return permutation if unpack_pivots else none, *((lower, upper) if unpack_data else (none, none))

    return engine.call_jax(factors, LU_data, LU_pivots)


def ormqr(self, input2, input3, left=True, transpose=False):
    """Returns a product with the matrix Q that Householder reflectors make, given as columns below a diagonal."""
    import jax.numpy as jnp

    def product(columns, scales, other):
        count = scales.shape[-1]
        vectors = jnp.tril(columns[..., :count], -1) + jnp.eye(columns.shape[-2], count, dtype=columns.dtype)
        other = other if left else other.mT.conj()
        forward = left == bool(transpose)
        for k in range(count) if forward else reversed(range(count)):
            vector, scale = vectors[..., k : k + 1], scales[..., k : k + 1, None]
            scale = scale.conj() if forward else scale
            other = other - scale * vector @ (vector.mT.conj() @ other)
        return other if left else other.mT.conj()

    return engine.call_jax(product, self, input2, input3)


def geqrf(self):
    """Returns a triangle R with the Householder reflectors below it, and their scales."""
    import jax.numpy as jnp

    def factors(x):
        scales = []
        row = jnp.arange(x.shape[-2])
        for k in range(min(x.shape[-2:])):
            column = jnp.where(row >= k, x[..., k], 0)
            first = column[..., k : k + 1]
            rest = jnp.sqrt((jnp.abs(jnp.where(row > k, column, 0)) ** 2).sum(-1, keepdims=True))
            length = jnp.sqrt(jnp.abs(first) ** 2 + rest**2)
            end = jnp.where(rest == 0, first, jnp.where(first.real > 0, -length, length).astype(x.dtype))
            scale = jnp.where(rest == 0, 0, (end - first) / jnp.where(end == 0, 1, end))
            vector = jnp.where(row == k, 1, column / jnp.where(rest == 0, 1, first - end))
            vector = jnp.where(row >= k, vector, 0)[..., None]
            changed = x - scale[..., None].conj() * vector @ (vector.mT.conj() @ x)
            after = jnp.arange(x.shape[-1]) > k
            stored = jnp.where(row > k, vector[..., 0], jnp.where(row == k, end, x[..., k]))
            x = jnp.where(after, changed, x).at[..., k].set(stored)
            scales.append(scale[..., 0])
        return x, jnp.stack(scales, -1) if scales else jnp.zeros((*x.shape[:-2], 0), x.dtype)

    return engine.call_jax(factors, self)


def linalg_pinv(self, *, atol=None, rtol=None, hermitian=False):
    """Returns the pseudo-inverse of a matrix: its singular values below a tolerance count as 0."""
    import jax.numpy as jnp

    given = [each for each in (atol, rtol) if each is not None]

    def inverse(x, *tensors):
        tensors = list(tensors)
        least = tensors.pop(0) if atol is not None else jnp.zeros((), x.real.dtype)
        share = jnp.asarray(jnp.finfo(x.dtype).eps * max(x.shape[-2:]), x.real.dtype)
        share = tensors.pop(0) if rtol is not None else jnp.where(least > 0, 0, share)
        if hermitian:
            values, right = jnp.linalg.eigh(x, UPLO="L", symmetrize_input=False)
            left, right = right, right.mT.conj()
        else:
            left, values, right = jnp.linalg.svd(x, full_matrices=False)
        size = jnp.abs(values)
        bound = jnp.maximum(least[..., None], share[..., None] * size.max(-1, keepdims=True, initial=0))
        scale = jnp.where(size > bound, 1 / values, 0).astype(x.dtype)
        return right.mT.conj() * scale[..., None, :] @ left.mT.conj()

    return engine.call_jax(inverse, self, *given)


def grouped_mm(self, mat2, offs=None, bias=None, out_dtype=None):
    """Returns the products of groups of matrices. `offs` has the end of each group.

    The groups are rows of the first matrix for [S, K] and [G, K, N], columns of the second for [G, M, K] and [K, N],
    parts of the sum for [M, K] and [K, N]. Without `offs` it is the usual product of [G, M, K] and [G, K, N].
    """
    import jax
    import jax.numpy as jnp
    from torchax.ops import mappings

    def product(left, right, ends=None):
        dtype = left.dtype if out_dtype is None else mappings.t2j_dtype(out_dtype)
        if ends is None:
            return jnp.matmul(left, right, preferred_element_type=dtype)
        sizes = jnp.diff(ends, prepend=0)
        if right.ndim == 3:
            return jax.lax.ragged_dot(left, right, sizes, preferred_element_type=dtype)
        if left.ndim == 3:
            return jax.lax.ragged_dot(right.T, left.mT, sizes, preferred_element_type=dtype).T
        dims = jax.lax.RaggedDotDimensionNumbers((((1,), (0,)), ((), ())), [1], [])
        return jax.lax.ragged_dot_general(left, right, sizes, dims, preferred_element_type=dtype)

    result = engine.call_jax(product, *(x for x in (self, mat2, offs) if x is not None))
    return result if bias is None else result + bias
