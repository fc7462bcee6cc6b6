"""Lowerings of torchax's that computed something else than PyTorch, or stopped with an exception."""

from __future__ import annotations

import math

import torch

from torchport import engine


def argmax(self, dim=None, keepdim=False):
    """Returns the place of the greatest value, int64."""
    return _place("argmax", self, dim, keepdim)


def argmin(self, dim=None, keepdim=False):
    """Returns the place of the least value, int64."""
    return _place("argmin", self, dim, keepdim)


def max_dim(self, dim, keepdim=False):
    """Returns the greatest values along a dim, and their places."""
    return torch.amax(self, dim, keepdim), _place("argmax", self, dim, keepdim)


def min_dim(self, dim, keepdim=False):
    """Returns the least values along a dim, and their places."""
    return torch.amin(self, dim, keepdim), _place("argmin", self, dim, keepdim)


def _first_place(name, x, axis):
    """Returns what `jax.lax.argmax` and `jax.lax.argmin` compute: in 32 bits, since 64 have no lowering for a TPU."""
    import jax
    import jax.numpy as jnp

    if x.dtype.itemsize < 8:
        return getattr(jax.lax, name)(x, axis, jnp.int32)
    # that of 64 bits is lowered by a loop that counts in 64
    best = getattr(jnp, name.removeprefix("arg"))(x, axis, keepdims=True)
    chosen = (x == best) | (x != x)  # the first NaN is the greatest, and the least
    return jnp.where(chosen, jax.lax.broadcasted_iota(jnp.int32, x.shape, axis), x.shape[axis]).min(axis)


def _place(name, x, dim, keepdim):
    import jax.numpy as jnp

    def place(x):
        shape = x.shape
        flat, axis = (x.ravel(), 0) if dim is None or not shape else (x, dim % len(shape))
        found = _first_place(name, flat, axis).astype(jnp.int64)
        if not keepdim or not shape:
            return found
        return found.reshape([1] * len(shape)) if dim is None else jnp.expand_dims(found, axis)

    return engine.call_jax(place, x)


def mean(self, dim=None, keepdim=False, *, dtype=None):
    """Returns the mean over dims, computed in a dtype."""
    import jax.numpy as jnp

    return _over_dims(jnp.mean, self, dim, keepdim, dtype)


def _over_dims(function, x, dim, keepdim, dtype):
    x = x if dtype is None else x.to(dtype)
    dims = None if dim in (None, []) or not x.dim() else dim if isinstance(dim, int) else tuple(dim)
    return engine.call_jax(lambda x: function(x, dims, keepdims=keepdim), x)


def view_dtype(self, dtype):
    """Returns a tensor's bytes as another dtype, of the last dim's neighbours where the sizes differ."""
    import jax
    import jax.numpy as jnp
    from torchax.ops import mappings

    target = mappings.t2j_dtype(dtype)
    pairs = {"complex64": "float32", "complex128": "float64"}

    def bits(x):
        if x.dtype.name in pairs:
            x = jnp.stack([x.real, x.imag], -1)
            x = x.reshape(*x.shape[:-2], -1)
        part = jnp.dtype(pairs.get(target.name, target.name))
        if x.dtype.itemsize < part.itemsize:
            x = x.reshape(*x.shape[:-1], -1, part.itemsize // x.dtype.itemsize)
        out = jax.lax.bitcast_convert_type(x, part)
        out = out.reshape(*out.shape[:-2], -1) if out.ndim > self.dim() else out
        return jax.lax.complex(out[..., 0::2], out[..., 1::2]) if target.name in pairs else out

    return engine.call_jax(bits, self)


def _wide(dtype):
    """Returns the dtype in which PyTorch adds up values of a dtype: float32 for floats of 16 bits."""
    import jax.numpy as jnp

    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype


def linear(input, weight, bias=None):
    """Returns `input @ weight.mT + bias`. XLA adds the bias where the product is used: rounded once, it took longer."""
    import jax.numpy as jnp

    def product(input, weight, bias=None):
        out = jnp.einsum("...a,ba->...b", input, weight)
        return out if bias is None else out + bias

    return engine.call_jax(product, input, weight, *([] if bias is None else [bias]))


def addmm(self, mat1, mat2, *, beta=1, alpha=1):
    """Returns `beta * self + alpha * (mat1 @ mat2)`, rounded once; `self` is not read where `beta` is 0."""
    import jax.numpy as jnp

    def product(base, one, two):
        out = jnp.matmul(one, two, preferred_element_type=_wide(one.dtype))
        out = out if alpha == 1 else out * jnp.asarray(alpha, out.dtype)
        if beta == 0:
            return out.astype(one.dtype)
        base = base.astype(out.dtype)
        return ((base if beta == 1 else base * jnp.asarray(beta, out.dtype)) + out).astype(one.dtype)

    return engine.call_jax(product, self, mat1, mat2)


def _each(value, count):
    """Returns an option of pooling with one number for each dim."""
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


def _windows(sizes, kernel, stride, padding, dilation, ceil_mode):
    """Returns how many windows each dim has, and its padding before and after."""
    counts, pads = [], []
    for size, width, step, pad, spread in zip(sizes, kernel, stride, padding, dilation, strict=True):
        reach = spread * (width - 1) + 1
        count = -(-(size + 2 * pad - reach) // step) if ceil_mode else (size + 2 * pad - reach) // step
        count += 1
        if ceil_mode and (count - 1) * step >= size + pad:
            count -= 1  # the last window starts inside of the image or its left padding
        counts.append(count)
        pads.append((pad, max(0, (count - 1) * step + reach - size - pad)))
    return counts, pads


def avg_pool2d(self, kernel_size, stride=(), padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None):
    """Returns the mean of each window of the last two dims."""
    return _mean_of_windows(2, self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


def avg_pool3d(self, kernel_size, stride=(), padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None):
    """Returns the mean of each window of the last three dims."""
    return _mean_of_windows(3, self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


def _mean_of_windows(dims, x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override):
    """Returns means, of bfloat16 computed in float32 as PyTorch does."""
    import jax
    import jax.numpy as jnp
    import numpy

    kernel, padding = _each(kernel_size, dims), _each(padding, dims)
    stride = _each(stride, dims) or kernel
    sizes = x.shape[-dims:]
    counts, pads = _windows(sizes, kernel, stride, padding, [1] * dims, ceil_mode)
    divisor = numpy.ones([1] * dims, numpy.int64)
    for dim in range(dims):
        start = numpy.arange(counts[dim]) * stride[dim] - padding[dim]
        end = numpy.minimum(start + kernel[dim], sizes[dim] + padding[dim])
        if not count_include_pad:
            start, end = numpy.maximum(start, 0), numpy.minimum(end, sizes[dim])
        divisor = divisor * (end - start).reshape([-1 if other == dim else 1 for other in range(dims)])
    if divisor_override is not None:
        divisor = divisor_override

    def means(x):
        dtype = jnp.promote_types(x.dtype, jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
        batch = x.ndim - dims
        ones, zeros = [1] * batch, [(0, 0)] * batch
        start = numpy.zeros((), dtype)
        sums = jax.lax.reduce_window(
            x.astype(dtype), start, jax.lax.add, [*ones, *kernel], [*ones, *stride], [*zeros, *pads]
        )
        by = jnp.asarray(divisor, dtype)
        whole = jnp.issubdtype(dtype, jnp.integer)
        return (jax.lax.div(sums, jnp.broadcast_to(by, sums.shape)) if whole else sums / by).astype(x.dtype)

    return engine.call_jax(means, x)


def max_pool2d(self, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False):
    """Returns the greatest value of each window of the last two dims, and its place."""
    return _greatest_of_windows(2, self, kernel_size, stride, padding, dilation, ceil_mode)


def max_pool3d(self, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False):
    """Returns the greatest value of each window of the last three dims, and its place."""
    return _greatest_of_windows(3, self, kernel_size, stride, padding, dilation, ceil_mode)


def _greatest_of_windows(dims, x, kernel_size, stride, padding, dilation, ceil_mode):
    import jax
    import jax.numpy as jnp
    import numpy

    kernel, padding, dilation = _each(kernel_size, dims), _each(padding, dims), _each(dilation, dims)
    stride = _each(stride, dims) or kernel
    _, pads = _windows(x.shape[-dims:], kernel, stride, padding, dilation, ceil_mode)

    def later(one, two):
        place, value = one
        other_place, other = two
        first = (value == other) & (place < other_place) | (value != value) & ((other == other) | (place > other_place))
        kept = (value > other) | first
        return jnp.where(kept, place, other_place), jnp.where(kept, value, other)

    def greatest(x):
        whole = jnp.issubdtype(x.dtype, jnp.integer)
        least = numpy.asarray(jnp.iinfo(x.dtype).min if whole else -jnp.inf, x.dtype)
        ones, zeros = [1] * (x.ndim - dims), [(0, 0)] * (x.ndim - dims)
        window = [*ones, *kernel], [*ones, *stride], [*zeros, *pads], None, [*ones, *dilation]
        sizes = x.shape[-dims:]
        places = jnp.broadcast_to(jnp.arange(int(numpy.prod(sizes)), dtype=jnp.int32).reshape(sizes), x.shape)
        values = jax.lax.reduce_window(x, least, jax.lax.max, *window)
        places, _ = jax.lax.reduce_window((places, x), (numpy.int32(2**31 - 1), least), later, *window)
        return values, places.astype(jnp.int64)

    return engine.call_jax(greatest, x)


def adaptive_max_pool2d(self, output_size):
    """Returns the greatest value of each of so many parts of the last two dims, and its place."""
    return _greatest_of_parts(2, self, output_size)


def adaptive_max_pool3d(self, output_size):
    """Returns the greatest value of each of so many parts of the last three dims, and its place."""
    return _greatest_of_parts(3, self, output_size)


def _greatest_of_parts(dims, x, output_size):
    import jax.numpy as jnp
    import numpy

    sizes, flat = x.shape[-dims:], numpy.zeros([1] * 2 * dims, numpy.int32)
    for dim, (size, count) in enumerate(zip(sizes, _each(output_size, dims), strict=True)):
        start = numpy.arange(count) * size // count
        end = -(-(numpy.arange(count) + 1) * size // count)
        width = int((end - start).max(initial=1))
        rows = numpy.minimum(start[:, None] + numpy.arange(width), end[:, None] - 1)  # a shorter part's end, again
        shape = [1] * 2 * dims
        shape[dim], shape[dims + dim] = rows.shape
        flat = flat * size + rows.reshape(shape)
    places = flat.reshape(*flat.shape[:dims], -1).astype(numpy.int32)

    def greatest(x):
        parts = x.reshape(*x.shape[:-dims], -1)[..., places]
        chosen = _first_place("argmax", parts, parts.ndim - 1)[..., None]
        values = jnp.take_along_axis(parts, chosen, -1)[..., 0]
        found = jnp.take_along_axis(jnp.broadcast_to(places, parts.shape), chosen, -1)[..., 0]
        return values, found.astype(jnp.int64)

    return engine.call_jax(greatest, x)


def native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps):
    """Returns a batch normalized, its means and inverse deviations; in training it writes to running statistics."""
    import jax
    import jax.numpy as jnp

    optional = {"weight": weight, "bias": bias, "mean": running_mean, "var": running_var}
    names = [name for name, tensor in optional.items() if tensor is not None]
    running = [tensor for tensor in (running_mean, running_var) if tensor is not None]

    def normalized(x, *tensors):
        wide = jnp.promote_types(x.dtype, jnp.float32)
        given = {name: tensor.astype(wide) for name, tensor in zip(names, tensors, strict=True)}
        dtype, x = x.dtype, jnp.moveaxis(x.astype(wide), 1, -1)
        dims, updated = tuple(range(x.ndim - 1)), []
        if training:
            mean, var = x.mean(dims), x.var(dims)
            count = x.size // x.shape[-1]
            total = var * count
            for name, old in zip(names, tensors, strict=True):
                half = old.dtype == jnp.bfloat16  # of which PyTorch rounds each step
                kept = (lambda x: jax.lax.reduce_precision(x, 8, 7)) if half else lambda x: x
                share = kept(jnp.asarray(momentum, wide))
                if name == "mean":
                    updated.append(kept(share * kept(mean)) + kept(kept(1 - share) * given[name]))
                if name == "var":
                    updated.append(share * kept(kept(total) / max(count - 1, 1)) + kept(kept(1 - share) * given[name]))
        else:
            mean, var = given["mean"], given["var"]
        inverse = 1 / jnp.sqrt(var + eps)
        out = (x - mean) * (inverse * given.get("weight", 1)) + given.get("bias", 0)
        return jnp.moveaxis(out, -1, 1).astype(dtype), mean, inverse, updated

    out, mean, inverse, updated = engine.call_jax(normalized, input, *(optional[name] for name in names))
    for tensor, new in zip(running, updated, strict=True) if training else ():
        tensor.copy_(new)
    return out, mean, inverse


def native_group_norm(input, weight, bias, N, C, HxW, group, eps):
    """Returns an input normalized in groups of channels; of an empty one also the statistics."""
    import jax.numpy as jnp
    from torchax.ops import jaten

    if input.numel():
        return engine.call_jax(jaten._aten_native_group_norm, input, weight, bias, N, C, HxW, group, eps)
    return engine.call_jax(lambda x: (x, *[jnp.zeros((N, group), x.dtype)] * 2), input)


def flip(self, dims):
    """Returns a tensor with dims in reverse; one without dims as it is."""
    import jax.numpy as jnp

    return engine.call_jax(lambda x: jnp.flip(x, tuple(dims)) if x.ndim else x, self)


def searchsorted(sorted_sequence, self, *, out_int32=False, right=False, side=None, sorter=None):
    """Returns how many values of sorted rows come before each value."""
    import jax.numpy as jnp

    after = right or side == "right"

    def places(rows, values, order=None):
        if order is not None:
            rows = jnp.take_along_axis(rows, order, -1)
        rows, values = rows if rows.ndim == 1 else jnp.expand_dims(rows, -2), jnp.expand_dims(values, -1)
        before = ~(rows > values) if after else ~(rows >= values)  # a NaN comes after all
        return before.sum(-1, dtype=jnp.int32).astype(jnp.int32 if out_int32 else jnp.int64)

    def of_tensors(rows, *tensors):
        tensors = list(tensors)
        values = tensors.pop(0) if isinstance(self, torch.Tensor) else jnp.asarray(self, rows.dtype)
        return places(rows, values, *tensors)

    tensors = [tensor for tensor in (self, sorter) if isinstance(tensor, torch.Tensor)]
    return engine.call_jax(of_tensors, sorted_sequence, *tensors)


def ldexp(self, other):
    """Returns a tensor times a power of 2."""
    import jax.numpy as jnp

    return engine.call_jax(lambda x, power: x * jnp.float32(2) ** power, self, other)


def embedding_renorm_(self, indices, max_norm, norm_type):
    """Shortens the rows of a table that are used and too long, in place."""
    import jax.numpy as jnp

    def shortened(table, places):
        used = jnp.zeros(table.shape[0], bool).at[places.ravel()].set(True)
        wide = table.astype(jnp.promote_types(table.dtype, jnp.float32))
        length = jnp.linalg.norm(wide, ord=norm_type, axis=1).astype(table.dtype)
        scale = jnp.where(used & (length > max_norm), max_norm / (length + 1e-7), 1).astype(table.dtype)
        return table * scale[:, None]

    return self.copy_(engine.call_jax(shortened, self, indices))


def repeat_interleave(repeats, *, output_size=None):
    """Returns each place so many times as its number says; how many that are must be known."""
    import jax.numpy as jnp

    def places(repeats):
        if output_size is None:
            return jnp.repeat(jnp.arange(repeats.size), repeats)
        ends = jnp.cumsum(repeats)
        return (ends <= jnp.arange(output_size)[:, None]).sum(-1, dtype=jnp.int32).astype(jnp.int64)

    return engine.call_jax(places, repeats)


def sum_dtype(self, dim=None, keepdim=False, *, dtype=None):
    """Returns the sum over dims, computed in a dtype."""
    import jax.numpy as jnp

    return _over_dims(jnp.sum, self, dim, keepdim, dtype)


def convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    """Returns a convolution over the last dims, or its transpose, in groups of channels."""
    import jax
    import jax.numpy as jnp

    dims = weight.dim() - 2
    stride, padding, dilation, more = (_each(value, dims) for value in (stride, padding, dilation, output_padding))
    pads, spread = [(pad, pad) for pad in padding], [1] * dims
    if transposed:
        reach = [step * (size - 1) for step, size in zip(dilation, weight.shape[2:], strict=True)]
        pads = [(far - pad, far - pad + end) for far, pad, end in zip(reach, padding, more, strict=True)]
        stride, spread = spread, stride

    def product(x, kernel, shift=None):
        if transposed:  # (in, out of a group, ...) to (out, in of a group, ...)
            kernel = kernel.reshape(groups, -1, *kernel.shape[1:]).swapaxes(1, 2)
            kernel = jnp.flip(kernel.reshape(-1, *kernel.shape[2:]), range(2, 2 + dims))
        whole = x if x.ndim == dims + 2 else x[None]
        out = jax.lax.conv_general_dilated(
            whole,
            kernel,
            stride,
            pads,
            lhs_dilation=spread,
            rhs_dilation=dilation,
            feature_group_count=groups,
            preferred_element_type=None if shift is None else _wide(x.dtype),
        )
        out = out if shift is None else (out + shift.reshape(-1, *[1] * dims)).astype(x.dtype)
        return out if x.ndim == dims + 2 else out[0]

    return engine.call_jax(product, input, weight, *([] if bias is None else [bias]))


def _resized(image, size, weights):
    """Returns an image whose last two dims are sums of neighbours: each has a matrix of weights, (out, in)."""
    import jax.numpy as jnp

    if not image.is_floating_point():
        raise NotImplementedError(f"An image of {image.dtype} is rounded in steps. Convert it to float32 before")
    down, across = (weights(*sizes) for sizes in zip(image.shape[-2:], size, range(2), strict=True))

    def product(x):
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        rows = jnp.einsum("...hw,vw->...hv", x.astype(dtype), jnp.asarray(across, dtype), precision="highest")
        return jnp.einsum("...hw,uh->...uw", rows, jnp.asarray(down, dtype), precision="highest").astype(x.dtype)

    return engine.call_jax(product, image)


def _cubic(x):
    """Returns the weight of a neighbour at a distance in the convolution with cubic pieces."""
    import numpy

    x = abs(x)
    near, far = (1.5 * x - 2.5) * x * x + 1, ((2.5 - 0.5 * x) * x - 4) * x + 2
    return numpy.where(x < 1, near, numpy.where(x < 2, far, 0))


def upsample_bilinear2d_aa(self, output_size, align_corners, scales_h=None, scales_w=None):
    """Returns an image of another size, each pixel of all that it covers, those near its middle more."""
    return _antialiased(self, output_size, align_corners, (scales_h, scales_w), 1, lambda x: (1 - abs(x)).clip(0))


def upsample_bicubic2d_aa(self, output_size, align_corners, scales_h=None, scales_w=None):
    """Returns an image of another size, each pixel of all that it covers, by a cubic convolution."""
    return _antialiased(self, output_size, align_corners, (scales_h, scales_w), 2, _cubic)


def _antialiased(image, output_size, align_corners, scales, reach, filtered):
    import numpy

    def weights(size, count, dim):
        if align_corners:
            step = (size - 1) / (count - 1) if count > 1 else 0.0
        else:
            step = 1 / scales[dim] if scales[dim] else size / count
        wide = max(step, 1.0)
        middle = step * (numpy.arange(count)[:, None] + 0.5)
        first = numpy.maximum((middle - reach * wide + 0.5).astype(int), 0)
        last = numpy.minimum((middle + reach * wide + 0.5).astype(int), size)
        places = numpy.arange(size)
        found = filtered((places - middle + 0.5) / wide) * ((places >= first) & (places < last))
        return found / found.sum(1, keepdims=True)

    return _resized(image, output_size, weights)


def glu(self, dim=-1):
    """Returns the first half of a dim times the sigmoid of the second half, computed in float32 or wider."""
    import jax
    import jax.numpy as jnp

    def halves(x):
        return jax.nn.glu(x.astype(jnp.promote_types(x.dtype, jnp.float32)), dim).astype(x.dtype)

    return engine.call_jax(halves, self)


def logit(self, eps=None):
    """Returns the logarithm of x / (1 - x); with `eps`, of x between `eps` and `1 - eps`."""
    import jax.numpy as jnp

    between = self if eps is None else torch.clamp(self, eps, 1 - eps)
    return engine.call_jax(lambda x: jnp.log(x / (1 - x)), between)


def fmod(self, other):
    """Returns the rest of a division, with the sign of the dividend, computed in float32 or wider."""
    import jax.numpy as jnp

    def rest(x, y):
        dtype = jnp.promote_types(x.dtype, y.dtype)
        x, y = (value.astype(jnp.promote_types(dtype, jnp.float32) if dtype.kind != "i" else dtype) for value in (x, y))
        return jnp.fmod(x, y)

    return engine.call_jax(rest, self, other)


def max_unpool(self, indices, output_size, stride=None, padding=None):
    """Returns zeros with values at the places that a pooling has returned; the last dims are those of `output_size`."""
    import jax.numpy as jnp

    dims, size = len(output_size), math.prod(output_size)

    def placed(x, places):
        rows = math.prod(x.shape[:-dims])
        flat = jnp.zeros((rows, size), x.dtype)
        at = jnp.arange(rows)[:, None], places.reshape(rows, -1)
        return flat.at[at].set(x.reshape(rows, -1)).reshape(*x.shape[:-dims], *output_size)

    return engine.call_jax(placed, self, indices)


def cummax(self, dim):
    """Returns the greatest value so far along a dim, and its place; of equals the last."""
    return _best_so_far(self, dim, lambda new, old: new >= old)


def cummin(self, dim):
    """Returns the least value so far along a dim, and its place; of equals the last."""
    return _best_so_far(self, dim, lambda new, old: new <= old)


def _best_so_far(x, dim, better):
    import jax
    import jax.numpy as jnp

    def later(one, two):
        (old, place), (new, other) = one, two
        takes = better(new, old) | (new != new)
        return jnp.where(takes, new, old), jnp.where(takes, other, place)

    def best(x):
        whole = x if x.ndim else x[None]
        places = jax.lax.broadcasted_iota(jnp.int32, whole.shape, dim % whole.ndim)
        values, places = jax.lax.associative_scan(later, (whole, places), axis=dim)
        return values.reshape(x.shape), places.reshape(x.shape).astype(jnp.int64)

    return engine.call_jax(best, x)


def renorm(self, p, dim, maxnorm):
    """Returns a tensor whose parts along a dim are no longer than a norm."""
    import jax.numpy as jnp

    def shortened(x):
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        others = tuple(n for n in range(x.ndim) if n != dim % x.ndim)
        size = jnp.abs(wide)
        length = size.max(others, keepdims=True) if p == math.inf else (size**p).sum(others, keepdims=True) ** (1 / p)
        return x * jnp.where(length > maxnorm, maxnorm / (length + 1e-7), 1).astype(x.dtype)

    return engine.call_jax(shortened, self)


def linalg_vector_norm(self, ord=2, dim=None, keepdim=False, *, dtype=None):
    """Returns the norm of all values, or of those along dims, computed in float32 or wider."""
    import jax.numpy as jnp

    given = self if dtype is None else self.to(dtype)
    dims = () if dim is None or not given.dim() else (dim,) if isinstance(dim, int) else tuple(dim)
    dims = dims or tuple(range(given.dim()))

    def norm(x):
        x = jnp.abs(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
        if ord == 0:
            return (x != 0).astype(x.dtype).sum(dims, keepdims=keepdim)
        if abs(ord) == float("inf"):
            return (x.max if ord > 0 else x.min)(dims, keepdims=keepdim)
        if ord == 2:
            return jnp.sqrt((x * x).sum(dims, keepdims=keepdim))
        return x.sum(dims, keepdims=keepdim) if ord == 1 else (x**ord).sum(dims, keepdims=keepdim) ** (1 / ord)

    return engine.call_jax(norm, given)


def sign(self):
    """Returns the sign of each value; that of a bool is itself."""
    import jax.numpy as jnp

    return engine.call_jax(lambda x: x if x.dtype == bool else jnp.where(x == x, jnp.sign(x), 0), self)


def power(self, exponent):
    """Returns values to the power of others; of integers that wraps, and is 0 for a power below 0 unless of 1 or -1."""
    return engine.call_jax(_raised, self, exponent)


def _raised(x, n):
    import jax
    import jax.numpy as jnp

    dtype = jnp.promote_types(x.dtype, n.dtype)
    x, n = jnp.broadcast_arrays(x.astype(dtype), n.astype(dtype))
    if not jnp.issubdtype(dtype, jnp.integer):
        return jnp.power(x, n)

    def doubled(state):
        out, factor, rest = state
        return jnp.where(rest & 1 == 1, out * factor, out), factor * factor, rest >> 1

    start = jnp.ones_like(x), x, jnp.maximum(n, 0)
    out, _, _ = jax.lax.while_loop(lambda state: (state[2] > 0).any(), doubled, start)
    inverse = jnp.where(x == 1, 1, jnp.where(x + 1 == 0, 1 - 2 * (n & 1), 0)).astype(dtype)
    return jnp.where(n < 0, inverse, out)


def power_by_number(self, exponent):
    """Returns values to the power of a number; of integers that wraps."""
    import jax
    import jax.numpy as jnp
    from torchax.ops import jaten

    def raised(x):
        if not isinstance(exponent, int) or jnp.issubdtype(x.dtype, jnp.inexact):
            return jaten._aten_pow(x, exponent)
        if exponent < 0:
            raise RuntimeError("Integers to negative integer powers are not allowed.")
        return jax.lax.integer_pow(x.astype(jnp.int64) if x.dtype == bool else x, int(exponent))

    return engine.call_jax(raised, self)


def power_of_number(self, exponent):
    """Returns a number to the power of values; of integers that wraps."""
    import jax.numpy as jnp
    from torchax.ops import jaten

    def raised(n):
        if not isinstance(self, int) or jnp.issubdtype(n.dtype, jnp.inexact):
            return jaten._aten_pow(self, n)
        kind = jnp.int64 if n.dtype == bool else n.dtype
        return _raised(jnp.asarray(self, jnp.int64).astype(kind), n)

    return engine.call_jax(raised, exponent)


def angle(self):
    """Returns the angle of complex values; of real ones 0 or pi."""
    import jax.numpy as jnp

    def angles(x):
        values = jnp.angle(x) if jnp.iscomplexobj(x) else jnp.where(x < 0, jnp.pi, 0.0).astype(x.dtype)
        return jnp.where(x == x, values, x.real)

    return engine.call_jax(angles, self)


def special_erfcx(self):
    """Returns exp(x^2) erfc(x), also where the first is too large and the second too small for a number."""
    import jax

    return engine.call_jax(jax.scipy.special.erfcx, self)


def special_log_ndtr(self):
    """Returns the logarithm of the normal distribution's cumulative function, also far below 0."""
    import jax

    return engine.call_jax(jax.scipy.special.log_ndtr, self)


def cdist(x1, x2, p=2.0, compute_mode="use_mm_for_euclid_dist_if_necessary"):
    """Returns the distances of all pairs of rows."""
    from torchax.ops import jaten

    if p == 2 and x1.dtype != torch.float64:
        return engine.call_jax(jaten._aten_cdist, x1, x2, p, compute_mode)
    return engine.call_jax(jaten._aten_cdist_forward, x1, x2, p)


def einsum(equation, *operands):
    """Returns products and sums over labels; PyTorch counts bools."""
    from torchax.ops import jtorch

    tensors = operands[0] if isinstance(operands[0], list | tuple) else operands
    tensors = [one.long() for one in tensors] if all(one.dtype == torch.bool for one in tensors) else tensors
    return engine.call_jax(lambda *arrays: jtorch._einsum(equation, *arrays), *tensors)


def rrelu_with_noise(self, noise, lower=0.125, upper=1 / 3, training=False, generator=None):
    """Returns values with those below 0 times a slope: in training a random one, which is written to the noise."""
    if not training:
        noise.copy_(noise + 0)  # what the engine takes for a write: PyTorch's schema says that it writes
        return torch.nn.functional.leaky_relu(self, (lower + upper) / 2)
    slope = torch.where(self <= 0, torch.rand_like(self) * (upper - lower) + lower, 1)
    noise.copy_(slope)
    return self * slope


def grid_sampler_3d(input, grid, interpolation_mode, padding_mode, align_corners):
    """Returns samples of a volume, of 16-bit floats computed in float32."""
    from torchax import decompositions

    wide = torch.float64 if input.dtype == torch.float64 else torch.float32
    options = interpolation_mode, padding_mode, align_corners
    return decompositions._grid_sampler_3d(input.to(wide), grid.to(wide), *options).to(input.dtype)


def col2im(self, output_size, kernel_size, dilation, padding, stride):
    """Returns images, [N, C, H, W], as sums of windows, [N, C * kernel, windows]; both may lack N."""
    sizes = output_size, kernel_size, dilation, padding, stride
    channels = self.shape[-2] // math.prod(kernel_size)
    return engine.call_jax(
        lambda x: _fold(x.reshape(-1, *x.shape[-2:]), *sizes).reshape(*x.shape[:-2], channels, *output_size), self
    )


def _fold(x, output_size, kernel_size, dilation, padding, stride):
    """Adds the windows of each image, [N, C * kernel, windows], into an array with the padding, and cuts it off."""
    import jax.numpy as jnp

    padded = [size + 2 * pad for size, pad in zip(output_size, padding, strict=True)]
    reach = [(size - 1) * gap + 1 for size, gap in zip(kernel_size, dilation, strict=True)]
    counts = [(whole - part) // step + 1 for whole, part, step in zip(padded, reach, stride, strict=True)]
    channels = x.shape[-2] // math.prod(kernel_size)  # no -1: there may be no image
    windows = x.reshape(x.shape[0], channels, *kernel_size, *counts)
    images = jnp.zeros((x.shape[0], channels, *padded), x.dtype)
    for row in range(kernel_size[0]):
        for column in range(kernel_size[1]):
            rows, columns = (
                slice(at * gap, at * gap + (count - 1) * step + 1, step)
                for at, gap, count, step in zip((row, column), dilation, counts, stride, strict=True)
            )
            images = images.at[:, :, rows, columns].add(windows[:, :, row, column])
    top, left = padding
    return images[:, :, top : top + output_size[0], left : left + output_size[1]]
