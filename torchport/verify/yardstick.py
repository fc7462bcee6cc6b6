"""The yardstick: the original in a wider dtype. And how far two trees of tensors, or two pictures, are apart.

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
"""A yardstick whose greatest value is below this is zero: distances from it are absolute."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the yardstick's dtype for a network: float64 for float32, float32 for what is narrower."""
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def widened(tree: Any, dtype: torch.dtype) -> Any:
    """Returns a tree whose floating-point tensors have the yardstick's dtype, unless theirs is as wide."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        narrower = tensor.is_floating_point() and tensor.dtype.itemsize < dtype.itemsize
        return tensor.to(dtype) if narrower else tensor

    return pytree.tree_map_only(torch.Tensor, cast, tree)


def wide_module(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Returns a copy of a module that computes in the yardstick's dtype."""
    wide = copy.deepcopy(module).to(dtype)
    for part in wide.modules():  # tables that are attributes, and no buffers
        tables = {name: value for name, value in vars(part).items() if isinstance(value, torch.Tensor)}
        vars(part).update({name: widened(value, dtype) for name, value in tables.items()})
    return wide


class _Wide(TorchFunctionMode):
    """Computes in float64 what a module's code casts to float32, or makes in it, as many norms and tables do.

    Such code says that the dtype should be wide. The yardstick's is wider. Where the yardstick's is float32, nothing
    changes.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.dtype is not torch.float64:
            return function(*args, **kwargs)
        if function is torch.Tensor.float:
            return args[0].double()
        wide = {torch.float32: torch.float64}
        args, kwargs = pytree.tree_map_only(torch.dtype, lambda dtype: wide.get(dtype, dtype), (args, kwargs))
        return function(*args, **kwargs)


@contextlib.contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Computes in the yardstick's dtype for the length of a `with`.

    What upstream gives to `torch.compile` runs as it is written: flex attention has no compiled float64 on a CPU.
    """
    with torch.compiler.set_stance("force_eager"), _Wide(dtype):
        yield


def distance(a: Any, b: Any) -> float | None:
    """Returns max|a - b| / max|b| over the tensors of two trees, the greatest of those that have the same shape.

    Values that are NaN or infinite in b are left out. A value that is so in a alone is infinitely far.

    Returns:
        None where no two tensors have the same shape.
    """
    pairs = matched(a, b)
    return max((_distance(first, other) for first, other in pairs), default=None) if pairs else None


def matched(a: Any, b: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the floating-point tensors of two trees that stand at the same place and have the same shape."""
    first, second = by_place(a), by_place(b)
    both = [(first[key], second[key]) for key in first.keys() & second.keys()]
    return [_in_the_same_rows(*pair) for pair in both if shape_of(pair[0]) == shape_of(pair[1]) and _are_numbers(*pair)]


def _are_numbers(*tensors: torch.Tensor) -> bool:
    return all(tensor.is_floating_point() for tensor in tensors)


ROWS, SHAPE = "torchport_rows", "torchport_shape"
"""The attributes of a tensor that is some rows of another: the numbers of these rows, and the other's shape."""
LARGE, KEPT = 2**22, 4096
"""Elements above which a tensor is kept in some rows, and how many."""


def sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Returns some rows of a large tensor, evenly spaced over all dims but the last; a small one as it is."""
    if tensor.ndim < 2 or tensor.numel() <= LARGE or hasattr(tensor, ROWS):
        return tensor
    table = tensor.reshape(-1, tensor.shape[-1])
    numbers = torch.linspace(0, table.shape[0] - 1, min(KEPT, table.shape[0])).round().long()
    rows = table[numbers]
    setattr(rows, ROWS, numbers)
    setattr(rows, SHAPE, tuple(tensor.shape))
    return rows


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape of a tensor; of one that is some rows of another, the other's."""
    shape: tuple[int, ...] = getattr(tensor, SHAPE, tuple(tensor.shape))
    return shape


def is_sampled(tree: Any) -> bool:
    return any(hasattr(leaf, ROWS) for leaf in pytree.tree_leaves(tree))


def _in_the_same_rows(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two tensors of one shape: where one of them is some rows, these rows of both."""
    return _rows_as(a, b), _rows_as(b, a)


def _rows_as(tensor: torch.Tensor, template: torch.Tensor) -> torch.Tensor:
    """Returns the rows of a tensor that another one has, where that has only some."""
    numbers = getattr(template, ROWS, None)
    if numbers is None or hasattr(tensor, ROWS):
        return tensor
    return tensor.reshape(-1, tensor.shape[-1])[numbers]


def by_place(tree: Any, place: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], torch.Tensor]:
    """Returns the tensors of a tree by the keys and positions that lead to them; outputs of upstream are mappings."""
    if isinstance(tree, torch.Tensor):
        return {place: tree}
    inner = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    return {path: tensor for key, item in inner for path, tensor in by_place(item, (*place, key)).items()}


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    known = torch.isfinite(b)
    if not b.numel() or not bool(known.any()):
        return 0.0
    b = torch.where(known, b.double(), 0.0)
    a = torch.where(known, a.double(), 0.0)
    largest, error = float(b.abs().max()), float((a - b).abs().max())
    if math.isnan(error):
        return math.inf
    return error / largest if largest > TINY else error


QUANTILES = (0.5, 0.9, 1.0)
"""Of the channels' errors: a fault in half of them, in a tenth, and in the worst."""
CHANNEL_VALUES = 8
"""Values that a channel must have: the greatest rounding of fewer is an accident."""


def channel_ratio(value: Any, wide: Any, original: Any) -> float:
    """Returns how many times the original's error a value's is, where each channel is measured by its own scale.

    A value of 1e6 in one channel makes the rounding of a whole tensor so large that no change among values of size 1
    is more. So each channel's error is divided by its own greatest value. Of the channels' errors some quantiles are
    compared: one channel's rounding may be small by luck, a quantile's is not.
    """
    ours, exact, theirs = by_place(value), by_place(wide), by_place(original)
    ratios = [0.0]
    for place in ours.keys() & exact.keys() & theirs.keys():
        tensors = ours[place], exact[place], theirs[place]
        if len({shape_of(tensor) for tensor in tensors}) == 1 and _are_numbers(*tensors):
            least = torch.finfo(tensors[2].dtype).eps
            errors, rounding = (_channel_errors(tensor, tensors[1], least) for tensor in (tensors[0], tensors[2]))
            is_known = errors.numel() and rounding.numel()
            for q in QUANTILES if is_known else ():
                unit = max(float(rounding.quantile(q)), least)
                error = float(errors.quantile(q))
                ratios.append(error / unit)
    return max(ratios)


def _channel_errors(a: torch.Tensor, b: torch.Tensor, least: float) -> torch.Tensor:
    """Returns max|a - b| / max|b| of each channel: dim 1 of a picture or video, the last dim of everything else."""
    is_picture = a.ndim > 3 and not is_sampled([a, b])
    a, b = ((x.movedim(1, -1) if is_picture else x) for x in _in_the_same_rows(a, b))
    if a.ndim < 2 or a.numel() < CHANNEL_VALUES * a.shape[-1] or not a.numel():
        return torch.zeros(0)
    a, b = (x.double().reshape(-1, x.shape[-1]) for x in (a, b))
    known = b.isfinite()
    errors = torch.where(known, a - b, 0.0).abs().nan_to_num(nan=math.inf).amax(0)
    scales = torch.where(known, b, 0.0).abs().amax(0)
    return errors / scales.clamp(min=max(TINY, least * float(scales.median())))


def least_rounding(tree: Any) -> float:
    """Returns the distance that one rounding makes in the narrowest dtype of a tree's tensors."""
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return max((torch.finfo(leaf.dtype).eps for leaf in tensors if leaf.is_floating_point()), default=0.0)


LEVELS = 255
"""The greatest value of a byte, to which PSNR and SSIM refer."""
RADIUS, SIGMA = 5, 1.5
"""Of SSIM's window, 11 x 11, in pixels."""
K1, K2 = 0.01, 0.03
"""SSIM's constants."""


def mean_square(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).square().mean())


def psnr(mean_square: float) -> float:
    """Returns the peak signal-to-noise ratio, in dB, of a mean square of bytes; infinite where nothing differs."""
    return math.inf if mean_square == 0 else 10 * math.log10(LEVELS**2 / mean_square)


def ssim(a_CHW: torch.Tensor, b_CHW: torch.Tensor) -> float | None:
    """Returns the structural similarity of two frames, the mean of all channels; 1 where they are equal.

    Returns:
        The mean over all whole windows; None if a frame is smaller than one. It agrees within 1e-12 with scikit-image's
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
    """Returns the Gaussian mean of every whole window of the last two dims."""
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
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    left, right = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b))
    return torch.equal(left, right)
