"""Lowerings that sort, count, and write to places: reductions into an index, bags, segments, histograms."""

from __future__ import annotations

import math

import torch

from torchport import engine

AT = {
    "sum": "add",
    "add": "add",
    "mean": "add",
    "prod": "multiply",
    "multiply": "multiply",
    "amax": "max",
    "amin": "min",
}
"""How JAX calls a reduction of PyTorch's."""


def _neutral(how, dtype):
    """Returns what a reduction begins with."""
    import jax.numpy as jnp

    if how in ("amax", "amin"):
        floats = jnp.issubdtype(dtype, jnp.floating)
        low, high = (-jnp.inf, jnp.inf) if floats else (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
        return jnp.asarray(low if how == "amax" else high, dtype)
    return jnp.asarray(AT[how] == "multiply", dtype)


def _reduced(x, at, values, how, include_self=True):
    """Returns an array into whose places others are reduced; a sum of bools is whether one is true."""
    import jax.numpy as jnp

    dtype, is_bool = x.dtype, x.dtype.kind == "b"
    if is_bool:
        x, values = x.astype(jnp.int32), values.astype(jnp.int32)
    hit = jnp.zeros(x.shape, jnp.int32).at[at].add(1)
    base = x if include_self else jnp.where(hit > 0, _neutral(how, x.dtype), x)
    out = getattr(base.at[at], AT[how])(values.astype(x.dtype))
    if how == "mean":
        count = jnp.maximum(hit + int(include_self), 1).astype(x.dtype)
        out = out / count if jnp.issubdtype(x.dtype, jnp.floating) else out // count
    return out != 0 if is_bool else out.astype(dtype)


def index_reduce(self, dim, index, source, reduce, *, include_self=True):
    """Returns a tensor into whose places along a dim others are reduced."""
    import jax.numpy as jnp

    def reduced(x, places, values):
        if not x.ndim:
            return _reduced(x[None], places.reshape(-1), values.reshape(-1), reduce, include_self)[0]
        x, values = jnp.moveaxis(x, dim, 0), jnp.moveaxis(values if values.ndim else values[None], dim, 0)
        return jnp.moveaxis(_reduced(x, places.reshape(-1), values, reduce, include_self), 0, dim)

    return engine.call_jax(reduced, self, index, source)


def index_add(self, dim, index, source, *, alpha=1):
    """Returns a tensor to whose places along a dim others are added."""
    import jax.numpy as jnp

    def added(x, places, values):
        values = values if alpha is True or alpha == 1 else values * jnp.asarray(alpha, values.dtype)
        x, values = (each if each.ndim else each[None] for each in (x, values))
        x, values, places = jnp.moveaxis(x, dim, 0), jnp.moveaxis(values, dim, 0), places.reshape(-1)
        out = x.at[places].max(values) if x.dtype == bool else x.at[places].add(values)
        return jnp.moveaxis(out, 0, dim).reshape(self.shape)

    return engine.call_jax(added, self, index, source)


def index_add_(self, dim, index, source, *, alpha=1):
    """Adds others to places along a dim, in place."""
    return self.copy_(index_add(self, dim, index, source, alpha=alpha))


def put(self, index, source, accumulate=False):
    """Returns a tensor into whose places, counted in one dim, values are put, or to which they are added."""
    if accumulate:
        return index_add(self.reshape(-1), 0, index, source.reshape(-1)).reshape(self.shape)

    def placed(x, places, values):
        return x.ravel().at[places.ravel()].set(values.ravel()).reshape(x.shape)

    return engine.call_jax(placed, self, index, source)


def scatter_add(self, dim, index, src):
    """Returns a tensor to which the values at an index are added."""
    return scatter_reduce(self, dim, index, src, "sum")


def scatter_with(self, dim, index, src, *, reduce):
    """Returns a tensor into which the values at an index, or one value, are reduced."""
    if not isinstance(src, torch.Tensor):
        src = torch.full(index.shape, src, dtype=self.dtype, device=self.device)
    return scatter_reduce(self, dim, index, src, reduce)


def scatter_reduce(self, dim, index, src, reduce, *, include_self=True):
    """Returns a tensor into which the values at an index are reduced."""
    import jax.numpy as jnp

    def reduced(x, places, values):
        shape = x.shape
        x, places, values = (each if each.ndim else each[None] for each in (x, places, values))
        at = list(jnp.indices(places.shape, sparse=True))
        at[dim] = places
        values = values[tuple(slice(size) for size in places.shape)]
        return _reduced(x, tuple(at), values, reduce, include_self).reshape(shape)

    return engine.call_jax(reduced, self, index, src)


def max_pool2d_backward(grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices):
    """Returns zeros to which the values of a pooling are added at their places."""
    zeros = torch.zeros_like(self).flatten(-2)
    return scatter_add(zeros, -1, indices.flatten(-2), grad_output.flatten(-2)).reshape(self.shape)


def nonzero_static(self, *, size, fill_value=-1):
    """Returns the places of so many values that are not 0, and a number where there are fewer."""
    import jax.numpy as jnp

    def places(x):
        if not x.ndim:
            return jnp.zeros((size, 0), jnp.int64)
        if not x.size:
            return jnp.full((size, x.ndim), fill_value, jnp.int64)
        return jnp.stack(jnp.nonzero(x, size=size, fill_value=fill_value), -1).astype(jnp.int64)

    return engine.call_jax(places, self)


def topk(self, k, dim=-1, largest=True, sorted=True):
    """Returns the greatest or least values along a dim, and their places."""
    import jax
    import jax.numpy as jnp

    def best(x):
        rows = jnp.moveaxis(x, dim, -1) if x.ndim else x[None]
        key = rows if largest else -rows if jnp.issubdtype(x.dtype, jnp.inexact) else ~rows
        _, places = jax.lax.top_k(key.astype(jnp.uint8) if x.dtype == bool else key, k)
        values = jnp.take_along_axis(rows, places, -1)
        if not x.ndim:
            return values.reshape(()), places.reshape(()).astype(jnp.int64)
        return jnp.moveaxis(values, -1, dim), jnp.moveaxis(places, -1, dim).astype(jnp.int64)

    return engine.call_jax(best, self)


def mode(self, dim=-1, keepdim=False):
    """Returns the most frequent value along a dim, of several the least, and its last place."""
    import jax
    import jax.numpy as jnp

    def found(x):
        rows = jnp.moveaxis(x, dim, -1) if x.ndim else x[None]
        ordered = jnp.sort(rows, -1)
        count = jax.lax.broadcasted_iota(jnp.int32, ordered.shape, ordered.ndim - 1)
        starts = jnp.concatenate([jnp.ones_like(count[..., :1]), ordered[..., 1:] != ordered[..., :-1]], -1)
        run = count - jax.lax.cummax(jnp.where(starts == 1, count, 0), ordered.ndim - 1)
        best = jax.lax.argmax(run, run.ndim - 1, jnp.int32)[..., None]
        value = jnp.take_along_axis(ordered, best, -1)
        place = jnp.where(rows == value, count, -1).max(-1, keepdims=True).astype(jnp.int64)
        if not x.ndim:
            return value[0], place[0]
        pair = jnp.moveaxis(value, -1, dim), jnp.moveaxis(place, -1, dim)
        return pair if keepdim else tuple(each.squeeze(dim) for each in pair)

    return engine.call_jax(found, self)


def cumsum(self, dim, *, dtype=None):
    """Returns the sums so far along a dim, of 16-bit floats computed in float32, of whole numbers in int64."""
    import jax.numpy as jnp

    given = _summed(self, dtype)

    def sums(x):
        small = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
        wide = x.astype(jnp.float32) if small else x
        return jnp.cumsum(wide if x.ndim else wide[None], dim).reshape(x.shape)

    return engine.call_jax(sums, given)


def cumprod(self, dim, *, dtype=None):
    """Returns the products so far along a dim, of whole numbers computed in int64."""
    import jax.numpy as jnp

    return engine.call_jax(lambda x: jnp.cumprod(x if x.ndim else x[None], dim).reshape(x.shape), _summed(self, dtype))


def _summed(given, dtype):
    """Returns a tensor in the dtype in which PyTorch sums it."""
    whole = not (given.is_floating_point() or given.is_complex())
    return given.to(torch.int64 if dtype is None and whole else dtype or given.dtype)


def resize(self, size, *, memory_format=None):
    """Returns the first values in another shape; what is added is 0."""
    import jax.numpy as jnp

    def resized(x):
        count = math.prod(size)
        flat = x.ravel()[:count]
        return jnp.pad(flat, (0, count - flat.size)).reshape(size)

    return engine.call_jax(resized, self)


def resize_as(self, the_template, *, memory_format=None):
    """Returns the first values in the shape of another tensor."""
    return resize(self, the_template.shape)


def embedding_bag(
    weight, indices, offsets, scale_grad_by_freq=False, mode=0, sparse=False, per_sample_weights=None,
    include_last_offset=False, padding_idx=-1,
):  # fmt: skip
    """Returns the sum, the mean or the greatest of the rows of each bag, and what the backward pass needs of sizes."""
    import jax.numpy as jnp

    def bags(table, places, starts, scale=None):
        count = starts.shape[0] - include_last_offset
        wide = jnp.promote_types(table.dtype, jnp.float32)
        bag = (starts[:count] <= jnp.arange(places.shape[0])[:, None]).sum(-1, dtype=jnp.int32) - 1
        rows = table[places].astype(wide)
        rows = rows if scale is None else rows * scale.astype(wide)[:, None]
        bag = jnp.where(places == padding_idx, count, bag)  # out of bounds: what is written there is dropped
        size = jnp.zeros(count, jnp.int64).at[bag].add(1, mode="drop")
        start = -jnp.inf if mode == 2 else 0
        place = jnp.full((count, table.shape[1]), start, wide).at[bag]
        out = (place.max if mode == 2 else place.add)(rows, mode="drop")
        out = out / jnp.maximum(size, 1)[:, None] if mode == 1 else jnp.where(size[:, None] > 0, out, 0)
        sizes = jnp.zeros_like(starts).at[:count].set(size.astype(starts.dtype))
        of_max = jnp.zeros((count, table.shape[1]) if mode == 2 else 0, starts.dtype)
        return out.astype(table.dtype), bag.astype(places.dtype), sizes, of_max

    return engine.call_jax(bags, weight, indices, offsets, *[each for each in [per_sample_weights] if each is not None])


def segment_reduce(data, reduce, *, lengths=None, indices=None, offsets=None, axis=0, unsafe=False, initial=None):
    """Returns a reduction of each segment of a dim."""
    import jax.numpy as jnp

    how = {"max": "amax", "min": "amin"}.get(reduce, reduce)

    def reduced(x, given):
        ends = jnp.cumsum(given, -1) if lengths is not None else given[..., 1:]
        starts = ends - given if lengths is not None else given[..., :-1]
        place = jnp.arange(x.shape[axis])
        inside = (starts[..., None] <= place) & (place < ends[..., None])
        count = inside.sum(-1, dtype=jnp.int32)
        inside = inside.reshape(*inside.shape, *[1] * (x.ndim - axis - 1))
        count = count.reshape(*count.shape, *[1] * (x.ndim - axis - 1))
        start = _neutral(how, x.dtype) if initial is None else jnp.asarray(initial, x.dtype)
        values = jnp.where(inside, jnp.expand_dims(x, axis), _neutral(how, x.dtype))
        name = {"amax": "max", "amin": "min", "prod": "prod"}.get(how, "sum")
        out = getattr(values, name)(axis + 1)
        out = {"max": jnp.maximum, "min": jnp.minimum, "prod": jnp.multiply}.get(name, jnp.add)(out, start)
        if how != "mean":
            return out
        empty = start if initial is not None else jnp.asarray(jnp.nan, x.dtype)
        return jnp.where(count > 0, out / jnp.maximum(count, 1).astype(x.dtype), empty)

    return engine.call_jax(reduced, data, lengths if lengths is not None else offsets)


def hash_tensor(self, dim=(), *, keepdim=False, mode=0):
    """Returns the exclusive or of the bits of all values, as float64 or int64."""
    import jax
    import jax.numpy as jnp

    dims = [dim] if isinstance(dim, int) else list(dim)

    def bits(x):
        axes = tuple(one % x.ndim for one in dims) if dims and x.ndim else tuple(range(x.ndim))
        wide = x.astype(jnp.float64 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int64)
        out = jax.lax.reduce_xor(jax.lax.bitcast_convert_type(wide, jnp.uint64), axes)
        return jnp.expand_dims(out, axes) if keepdim else out

    return engine.call_jax(bits, self)


def _upper_bound(edges, values):
    """Returns how many edges come before each value or are equal to it, by halving, also where they have no order."""
    import jax.numpy as jnp

    first = jnp.zeros(values.shape, jnp.int32)
    length = jnp.full(values.shape, edges.size, jnp.int32)
    for _ in range(edges.size.bit_length()):
        half = length // 2
        before = (length > 0) & ~(values < edges[jnp.minimum(first + half, edges.size - 1)])
        first, length = (
            jnp.where(before, first + half + 1, first),
            jnp.where(before, length - half - 1, jnp.minimum(half, length)),
        )
    return first


def _counts(points, edges, weight, density):
    """Returns how many points, (number, dim), lie in each box between edges, one array of them for each dim."""
    import jax.numpy as jnp

    shape, inside, box = [], jnp.ones(points.shape[0], bool), jnp.zeros(points.shape[0], jnp.int32)
    for values, edge in zip(points.T, edges, strict=True):
        bins = edge.size - 1
        place = _upper_bound(edge, values) - 1
        inside &= (values >= edge[0]) & (values <= edge[-1])
        box = box * bins + jnp.where(place == bins, bins - 1, place)
        shape.append(bins)
    weight = jnp.ones(points.shape[0], points.dtype) if weight is None else weight.reshape(-1).astype(points.dtype)
    total = math.prod(shape)
    out = jnp.zeros(total, points.dtype).at[jnp.where(inside, box, total)].add(weight, mode="drop").reshape(shape)
    if density:
        out = out / out.sum()
        for dim, edge in enumerate(edges):
            out = out / jnp.diff(edge).reshape([-1 if other == dim else 1 for other in range(len(edges))])
    return out


def _edges(points, bins, range):
    """Returns the edges of so many bins in each dim, between the least and the greatest value if no range is given."""
    import jax.numpy as jnp

    found = []
    for dim, count in enumerate(bins):
        values = points[:, dim]
        if range:
            low, high = (jnp.asarray(number, points.dtype) for number in range[2 * dim : 2 * dim + 2])
        else:
            low, high = (values.min(), values.max()) if values.size else (jnp.zeros_like(x := points.sum()), x * 0 + 1)
        same = low == high
        low, high = jnp.where(same, low - 0.5, low), jnp.where(same, high + 0.5, high)
        found.append(jnp.linspace(low, high, count + 1, dtype=points.dtype))
    return found


def histogram(self, bins=100, *, range=None, weight=None, density=False):
    """Returns how many values are in each bin, and the edges of the bins."""
    tensors = [each for each in (bins, weight) if isinstance(each, torch.Tensor)]

    def counted(x, *tensors):
        points, tensors = x.reshape(-1, 1), list(tensors)
        edges = [tensors.pop(0)] if isinstance(bins, torch.Tensor) else _edges(points, [bins], range)
        return _counts(points, edges, tensors[0] if tensors else None, density), edges[0]

    return engine.call_jax(counted, self, *tensors)


def histogramdd_edges(self, bins, *, range=None, weight=None, density=False):
    """Returns the edges of the bins of each dim."""
    return list(engine.call_jax(lambda x: _edges(x.reshape(-1, x.shape[-1]), bins, range), self))


def histogramdd(self, bins, *, range=None, weight=None, density=False):
    """Returns how many points are in each box."""
    tensors = [each for each in (weight, *bins) if isinstance(each, torch.Tensor)]

    def counted(x, *tensors):
        points, tensors = x.reshape(-1, x.shape[-1]), list(tensors)
        shares = None if weight is None else tensors.pop(0)
        return _counts(points, tensors or _edges(points, bins, range), shares, density)

    return engine.call_jax(counted, self, *tensors)


def histc(self, bins=100, min=0, max=0):
    """Returns how many values are in each bin between two numbers, or between the least and the greatest value.

    Of whole numbers, which PyTorch counts on CUDA alone, the bin is a quotient of whole numbers, as there.
    """
    import jax.numpy as jnp

    def counted(x):
        points = x.reshape(-1, 1)
        if x.dtype.kind in "iu":
            return counted_whole(points[:, 0])
        wide = points.astype(jnp.promote_types(x.dtype, jnp.float32)) if x.dtype.kind in "fV" else points
        edges = _edges(wide, [bins], [min, max] if min != max else None)
        return _counts(wide, edges, None, False).astype(x.dtype)

    def counted_whole(points):
        kind, points = points.dtype, points.astype(jnp.int64)  # the product below leaves the narrow kinds
        has_range = min != max or not points.size
        least, most = (int(min), int(max)) if has_range else (points.min(), points.max())
        is_single = least == most
        least, most = least - is_single, most + is_single
        places = jnp.minimum((points - least) * bins // (most - least), bins - 1)
        is_inside = (points >= least) & (points <= most)
        return jnp.zeros(bins, kind).at[places].add(is_inside.astype(kind), mode="drop")

    return engine.call_jax(counted, self)


def fractional_max_pool2d(self, kernel_size, output_size, random_samples):
    """Returns the greatest value of each of windows of random distances, and its place."""
    return _fractional(2, self, kernel_size, output_size, random_samples, (1, 0))


def fractional_max_pool3d(self, kernel_size, output_size, random_samples):
    """Returns the greatest value of each of windows of random distances, and its place."""
    return _fractional(3, self, kernel_size, output_size, random_samples, (0, 1, 2))


def _fractional(dims, x, kernel_size, output_size, random_samples, order):
    import jax
    import jax.numpy as jnp

    def pooled(x, samples):
        whole = x if x.ndim == dims + 2 else x[None]
        batch, sizes = whole.shape[:2], whole.shape[2:]
        flat = jnp.zeros((*batch, *[1] * 2 * dims), jnp.int32)
        for dim, (size, width, count) in enumerate(zip(sizes, kernel_size, output_size, strict=True)):
            sample = samples[..., order[dim]][..., None]
            step = jnp.asarray((size - width) / max(count - 1, 1), samples.dtype)
            starts = ((jnp.arange(count).astype(samples.dtype) + sample) * step).astype(jnp.int32)
            starts = starts - (sample * step).astype(jnp.int32)
            starts = jnp.where(jnp.arange(count) == count - 1, size - width, starts)
            shape = [1] * 2 * dims
            shape[dim], shape[dims + dim] = count, width
            flat = flat * size + (starts[..., None] + jnp.arange(width)).reshape(*batch, *shape)
        places = flat.reshape(*batch, math.prod(output_size), math.prod(kernel_size))
        parts = jnp.take_along_axis(whole.reshape(*batch, 1, math.prod(sizes)), places, -1)
        chosen = jax.lax.argmax(parts.astype(jnp.float32), parts.ndim - 1, jnp.int32)[..., None]
        shape = (*x.shape[:-dims], *output_size)
        values, found = (jnp.take_along_axis(each, chosen, -1)[..., 0].reshape(shape) for each in (parts, places))
        return values, found.astype(jnp.int64)

    return engine.call_jax(pooled, x, random_samples)
