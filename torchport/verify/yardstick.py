"""The yardstick: the original in a wider dtype. And distances of two trees of tensors, and of two videos.

Shapes: C channels, H rows and W columns of a frame.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

TINY = 1e-30
"""If a yardstick's greatest value is below this, it counts as zero: distances from it are absolute."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the yardstick's dtype for a network of some dtype: float64 for float32, float32 for narrower ones."""
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def widened(tree: Any, dtype: torch.dtype) -> Any:
    """Returns a tree whose floating-point tensors are cast to a dtype, unless theirs is as wide."""
    return pytree.tree_map_only(
        torch.Tensor,
        lambda x: x.to(dtype) if x.is_floating_point() and x.dtype.itemsize < dtype.itemsize else x,
        tree,
    )


def wide_module(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Returns a copy of a module that computes in a wider dtype, the yardstick's."""
    wide = copy.deepcopy(module).to(dtype)
    for part in wide.modules():  # tensors that are plain attributes, which `.to` leaves as they are
        tables = {name: value for name, value in vars(part).items() if isinstance(value, torch.Tensor)}
        vars(part).update({name: widened(value, dtype) for name, value in tables.items()})
    return wide


class _Float64Mode(TorchFunctionMode):
    """Replaces float32 by float64 where a module's code names it, as the code of many norms does: `x.float()`.

    Such a cast is there for precision, but would narrow a yardstick in float64.
    """

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of PyTorch with float64 in place of float32 among its arguments."""
        if function is torch.Tensor.float:
            return args[0].double()
        wide = {torch.float32: torch.float64}
        args, kwargs = pytree.tree_map_only(torch.dtype, lambda dtype: wide.get(dtype, dtype), (args, kwargs or {}))
        return function(*args, **kwargs)


@contextlib.contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Computes in the yardstick's dtype for the length of a `with`. Functions under `torch.compile` run eagerly:
    compiled flex attention has no float64 on a CPU.
    """
    mode = _Float64Mode() if dtype is torch.float64 else contextlib.nullcontext()
    with torch.compiler.set_stance("force_eager"), mode:
        yield


def distance(a: Any, b: Any) -> float | None:
    """Returns the greatest max|a - b| / max|b| of two trees' tensors that have the same place and shape.

    Elements that are not finite in b are left out; if one is not finite in a alone, the distance is infinite. None if
    no two tensors have the same place and shape.
    """
    return max((_tensor_distance(first, second) for first, second in matched(a, b)), default=None)


def matched(a: Any, b: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the pairs of floating-point tensors of two trees that have the same place and shape."""
    first, second = by_place(a), by_place(b)
    pairs = [(first[place], second[place]) for place in first.keys() & second.keys()]
    return [_in_same_rows(*pair) for pair in pairs if _are_alike(*pair)]


def _are_alike(*tensors: torch.Tensor) -> bool:
    is_float = all(tensor.is_floating_point() for tensor in tensors)
    return is_float and len({shape_of(tensor) for tensor in tensors}) == 1


ROWS, SHAPE = "torchport_rows", "torchport_shape"
"""The attributes of a sampled tensor, one with only some rows of another: row numbers, and the other's shape."""
LARGE, KEPT = 2**22, 4096
"""A tensor of more than `LARGE` elements is sampled: only `KEPT` of its rows are kept."""


def sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a large tensor's sample: some rows, evenly spaced over all dims but the last; a small one as it is."""
    if tensor.ndim < 2 or tensor.numel() <= LARGE or hasattr(tensor, ROWS):
        return tensor
    table = tensor.reshape(-1, tensor.shape[-1])
    numbers = torch.linspace(0, table.shape[0] - 1, min(KEPT, table.shape[0])).round().long()
    rows = table[numbers]
    setattr(rows, ROWS, numbers)
    setattr(rows, SHAPE, tuple(tensor.shape))
    return rows


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape of a tensor; for a sampled one, the shape of the whole tensor."""
    shape: tuple[int, ...] = getattr(tensor, SHAPE, tuple(tensor.shape))
    return shape


def is_sampled(tree: Any) -> bool:
    """Returns whether a tree has a tensor of which only some rows were kept; see `sampled`."""
    return any(hasattr(leaf, ROWS) for leaf in pytree.tree_leaves(tree))


def _in_same_rows(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two tensors of one shape; if only one of them is sampled, its rows of the other."""
    if hasattr(a, ROWS) and not hasattr(b, ROWS):
        b = b.reshape(-1, b.shape[-1])[getattr(a, ROWS)]
    elif hasattr(b, ROWS) and not hasattr(a, ROWS):
        a = a.reshape(-1, a.shape[-1])[getattr(b, ROWS)]
    return a, b


def by_place(tree: Any, place: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], torch.Tensor]:
    """Returns the tensors of a tree by their paths of keys and positions; upstream's output classes are mappings."""
    if isinstance(tree, torch.Tensor):
        return {place: tree}
    inner: Any = ()
    if isinstance(tree, Mapping):
        inner = tree.items()
    elif isinstance(tree, list | tuple):
        inner = enumerate(tree)
    return {path: tensor for key, item in inner for path, tensor in by_place(item, (*place, key)).items()}


def _tensor_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns max|a - b| / max|b| of two tensors; see `distance`."""
    known = torch.isfinite(b)
    if not b.numel() or not bool(known.any()):
        return 0.0
    b = torch.where(known, b.double(), 0.0)
    a = torch.where(known, a.double(), 0.0)
    largest = float(b.abs().max())
    error = float((a - b).abs().max())
    if math.isnan(error):
        return math.inf
    return error / largest if largest > TINY else error


QUANTILES = (0.5, 0.9, 1.0)
"""The quantiles of the channels' errors that are compared: they show a fault in half of them, in a tenth, in one."""
CHANNEL_VALUES = 8
"""Channels with fewer values are not compared: the greatest rounding of so few is an accident."""


def channel_ratio(value: Any, wide: Any, original: Any) -> float:
    """Returns the port's error divided by the original's, both measured channel by channel against `wide`.

    A value of 1e6 in one channel makes the rounding of a whole tensor so large that it hides any change of values of
    size 1. So each channel's error is divided by the channel's greatest value. Some quantiles of these errors are
    compared, and the largest ratio is returned: the rounding of a single channel may be small by luck.
    """
    values = by_place(value)
    wides = by_place(wide)
    originals = by_place(original)
    ratios = [0.0]
    for place in values.keys() & wides.keys() & originals.keys():
        x = values[place]
        wide_x = wides[place]
        original_x = originals[place]
        if _are_alike(x, wide_x, original_x):
            least = torch.finfo(original_x.dtype).eps
            errors, rounding = (_channel_errors(tensor, wide_x, least) for tensor in (x, original_x))
            if errors.numel() and rounding.numel():
                ratios += [float(errors.quantile(q)) / max(float(rounding.quantile(q)), least) for q in QUANTILES]
    return max(ratios)


def _channel_errors(a: torch.Tensor, b: torch.Tensor, least: float) -> torch.Tensor:
    """Returns max|a - b| / max|b| of each channel: dim 1 of a picture or video, else the last; empty if too small."""
    is_picture = a.ndim > 3 and not is_sampled([a, b])
    a, b = ((x.movedim(1, -1) if is_picture else x) for x in _in_same_rows(a, b))
    if a.ndim < 2 or a.numel() < CHANNEL_VALUES * a.shape[-1] or not a.numel():
        return torch.zeros(0)
    a, b = (x.double().reshape(-1, x.shape[-1]) for x in (a, b))
    known = b.isfinite()
    errors = torch.where(known, a - b, 0.0).abs().nan_to_num(nan=math.inf).amax(0)
    scales = torch.where(known, b, 0.0).abs().amax(0)
    # A channel that is almost zero is measured by the rounding of the other channels.
    return errors / scales.clamp(min=max(TINY, least * float(scales.median())))


def least_rounding(tree: Any) -> float:
    """Returns the epsilon of the narrowest dtype of a tree's tensors; 0 without floating-point tensors."""
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return max((torch.finfo(leaf.dtype).eps for leaf in tensors if leaf.is_floating_point()), default=0.0)


LEVELS = 255
"""The greatest value of a byte, which PSNR and SSIM depend on."""
RADIUS, SIGMA = 5, 1.5
"""Radius and standard deviation of SSIM's Gaussian window of 11 x 11 pixels."""
K1, K2 = 0.01, 0.03
"""SSIM's constants."""


def mean_square(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the mean squared difference of two tensors."""
    return float((a.double() - b.double()).square().mean())


def psnr(mean_square: float) -> float:
    """Returns the peak signal-to-noise ratio in dB for a mean squared error of bytes; infinite for 0."""
    return math.inf if mean_square == 0 else 10 * math.log10(LEVELS**2 / mean_square)


def ssim(a_CHW: torch.Tensor, b_CHW: torch.Tensor) -> float | None:
    """Returns the structural similarity of two frames, the mean of all channels and whole windows.

    It is 1 for equal frames, and None for frames smaller than a window. It agrees within 1e-12 with scikit-image's
    `structural_similarity(gaussian_weights=True, sigma=1.5, use_sample_covariance=False, data_range=255)`.

    Source: Wang, Bovik, Sheikh, Simoncelli: Image quality assessment, IEEE Transactions on Image Processing 13 (2004),
    equation 13 and its window.
    """
    if min(a_CHW.shape[-2:]) < 2 * RADIUS + 1:
        return None
    a, b = a_CHW.double(), b_CHW.double()
    mean_a, mean_b, square_a, square_b, product = _windows(torch.stack([a, b, a * a, b * b, a * b]))
    c1, c2 = (K1 * LEVELS) ** 2, (K2 * LEVELS) ** 2
    variances = square_a - mean_a.square() + square_b - mean_b.square()
    luminance = (2 * mean_a * mean_b + c1) / (mean_a.square() + mean_b.square() + c1)
    return float((luminance * (2 * (product - mean_a * mean_b) + c2) / (variances + c2)).mean())


def _windows(maps: torch.Tensor) -> torch.Tensor:
    """Returns the Gaussian-weighted mean of every whole window over the last two dims."""
    weights = [math.exp(-((n / SIGMA) ** 2) / 2) for n in range(-RADIUS, RADIUS + 1)]
    for dim in (-1, -2):
        length = maps.shape[dim] - 2 * RADIUS
        parts = (maps.narrow(dim, n, length) * (weight / sum(weights)) for n, weight in enumerate(weights))
        maps = functools.reduce(torch.Tensor.add_, parts)
    return maps


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the cosine of the angle between two tensors; 1 if both are zero, 0 if one is."""
    a, b = a.double().flatten(), b.double().flatten()
    norms = float(a.norm() * b.norm())
    if norms == 0:
        return float(not a.any() and not b.any())
    return float(a @ b) / norms


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns max|a - b| / max|b|; 0 if nothing differs, infinite if b alone is zero."""
    greatest, scale = float((a.double() - b.double()).abs().max()), float(b.double().abs().max())
    if greatest == 0:
        return 0.0
    return greatest / scale if scale else math.inf


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two tensors have the same dtype, shape and bytes."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    left, right = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b))
    return torch.equal(left, right)
