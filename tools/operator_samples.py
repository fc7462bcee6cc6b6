"""Calls of PyTorch's operators with which `conformance.py` compares: PyTorch's own samples, and what they leave out."""

from __future__ import annotations

import functools
import itertools
import operator
import random
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy
import torch
from torch.nn import functional

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float16, torch.int32)
PROMOTED = (*DTYPES, torch.float64, torch.uint8, torch.complex64)
SEED = 0


class Sample(NamedTuple):
    """A call in PyTorch: it may reach the engine as one operator, or as several."""

    source: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}


def sources() -> list[tuple[str, str]]:
    """Returns what samples come from: pairs of a name and a dtype, for `samples`."""
    pairs = [(op.full_name, dtype) for op in _operators() for dtype in DTYPES]
    pairs += [(kind, dtype) for kind in MADE for dtype in PROMOTED]
    return [(name, str(dtype).removeprefix("torch.")) for name, dtype in pairs]


def samples(name: str, dtype: str) -> list[Sample]:
    """Returns the samples of one source, the same ones each time."""
    made = MADE.get(name, lambda kind: opinfo(name, kind))
    for seed in (torch.manual_seed, numpy.random.seed, random.seed):
        seed(SEED)
    return list(made(getattr(torch, dtype)))


def opinfo(name: str, dtype: torch.dtype) -> Iterator[Sample]:
    """Yields PyTorch's own samples of an operator."""
    for op in _operators():
        if op.full_name == name and dtype in op.dtypes:
            for one in op.sample_inputs("cpu", dtype):
                # A sample that makes a tensor names the CPU; a network names the device of its inputs.
                kwargs = {key: "jax" if key == "device" else value for key, value in one.kwargs.items()}
                yield Sample(name, op.op, (one.input, *one.args), kwargs)


def _operators() -> list[Any]:
    # torch's tests want this package for one class, which no sample needs.
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules.setdefault("expecttest", stand_in)
    from torch.testing._internal import common_methods_invocations as invocations

    # It would save and restore the state of every device's generator; the engine's device has none.
    invocations.wrapper_set_seed = lambda function, *args, **kwargs: function(*args, **kwargs)
    return invocations.op_db  # type: ignore[no-any-return]


def _values(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor of small values; those of integers are exact in every sum."""
    values = torch.randn(shape)
    return values.to(dtype) if dtype.is_floating_point or dtype.is_complex else (values * 4).abs().to(dtype)


def _filled(fill: Callable[..., Any], x: Any, *given: Any, **options: Any) -> Any:
    """Returns a tensor of one value on the device of `x`."""
    return fill(*given, device=x.device, **options)


def _positive(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns values from 1 on: a quotient is defined, and so is a float in uint8."""
    return (torch.rand(shape) * 4 + 1).to(dtype)


NUMBERS = (True, 3, 2.5)
BINARY = (
    "add",
    "sub",
    "mul",
    "true_divide",
    "pow",
    "maximum",
    "minimum",
    "eq",
    "lt",
    "ge",
    "remainder",
    "floor_divide",
)
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
WITH_NUMBER = ("add", "sub", "mul", "true_divide", "pow", "remainder", "floor_divide", "fmod", *COMPARISONS)


def promotion(dtype: torch.dtype) -> Iterator[Sample]:
    """Yields calls whose result has the dtype of `torch.result_type`: all pairs of dtypes, dimensions and numbers."""
    shapes = [((), (3,)), ((3,), ()), ((3,), (2, 3)), ((), ())]
    for other, (left, right) in itertools.product(PROMOTED, shapes):
        first, second = _positive(*left, dtype=dtype), _positive(*right, dtype=other)
        for name in BINARY:
            yield Sample(name, getattr(torch, name), (first, second))
        condition = torch.tensor([True, False, True])
        yield Sample("where", torch.where, (condition, first, second))
        yield Sample("addcmul", torch.addcmul, (first, second, second))
        yield Sample("lerp", torch.lerp, (first, second.to(dtype), 0.5))
        yield Sample("clamp", torch.clamp, (first, second, None))
        yield Sample("type_as", torch.Tensor.type_as, (first, second))
        yield Sample("to", lambda x, kind: x.to(kind), (first, other))
        yield Sample("copy", torch.Tensor.copy_, (first.expand(2, 3).clone(), second))
        if left == right == (3,):
            continue
        yield Sample("cat", torch.cat, ([first.reshape(-1), second.reshape(-1)],))
        yield Sample("stack", torch.stack, ([first.expand(2, 3), second.expand(2, 3)],))
    for shape, number in itertools.product([(), (3,)], NUMBERS):
        first = _positive(*shape, dtype=dtype)
        for name in WITH_NUMBER:
            yield Sample(name, getattr(torch, name), (first, number))
            yield Sample(name, lambda x, n, name=name: getattr(torch, name)(n, x), (first.bool(), number))
        yield Sample("rsub", lambda x, n: n - x, (first, number))
        yield Sample("rdiv", lambda x, n: n / x, (first, number))
        yield Sample("rpow", lambda x, n: n**x, (first, number))
        yield Sample("where", torch.where, (first.bool(), first, number))
        yield Sample("clamp", torch.clamp, (first, number, None))
        yield Sample("masked_fill", torch.masked_fill, (first, first.bool(), number))
        yield Sample("fill", torch.Tensor.fill_, (first, number))
        yield Sample("full_like", torch.full_like, (first, number))


def generated(dtype: torch.dtype) -> Iterator[Sample]:
    """Yields what PyTorch's own samples leave out."""
    yield from _shapes(dtype)
    yield from _conversions(dtype)
    yield from _sums(dtype)
    yield from _functions(dtype)
    yield from _writes(dtype)
    if dtype.is_floating_point:
        yield from _pools(dtype)
        yield from _resizes(dtype)
        yield from _products(dtype)
        yield from _attention(dtype)
        yield from _normalizations(dtype)


def _shapes(dtype: torch.dtype) -> Iterator[Sample]:
    """Indices, negative dimensions and steps, empty tensors, sizes of 1, expanded and transposed inputs."""
    x, y = _values(2, 3, 4, dtype=dtype), _values(4, 3, 2, dtype=dtype)
    mask = torch.tensor([True, False])
    indices = {
        "int": 1, "negative": -1, "slice": slice(1, None), "step": (slice(None), slice(None, None, 2)),
        "None": (None, 0), "Ellipsis": (..., 0), "tensor": torch.tensor([1, 0, -1]), "list": [0, 1],
        "tensors": (torch.tensor([0, 1]), slice(None), torch.tensor([3, -1])), "mask": mask,
        "empty": torch.tensor([], dtype=torch.int64), "slice beyond": slice(1, 9), "negative slice": slice(-2, -1),
    }  # fmt: skip
    for name, index in indices.items():
        yield Sample(f"index {name}", lambda x, index: x[index], (x, index))
    for name in ("slice", "step", "tensor", "mask", "int"):
        yield Sample(f"assign {name}", lambda x, index: x.__setitem__(index, 1), (x.clone(), indices[name]))
    forms = {"whole": x, "transposed": y.mT.mT.permute(2, 1, 0), "expanded": x[:1].expand(2, 3, 4), "one": x[:, :1],
             "empty": x[:0], "flat": x.flatten(), "0-dim": x[0, 0, 0]}  # fmt: skip
    unary: dict[str, Callable[[Any], Any]] = {
        "all": lambda x: x.all(),
        "any": lambda x: x.any(-1),
        "any of dims": lambda x: x.any((-1,)),
        "argsort": lambda x: x.argsort(stable=True),
        "argsort of int32": lambda x: torch.argsort(x.int(), stable=True),
        "cat": lambda x: torch.cat([x, x], -1),
        "chunk": lambda x: x.chunk(2, -1),
        "clamp": lambda x: x.clamp(0, 1).clamp(max=1).clamp(min=0),
        "contiguous": lambda x: x.contiguous(),
        "cos": lambda x: x.cos(),
        "sin": lambda x: x.sin(),
        "cumsum": lambda x: x.cumsum(-1),
        "detach": lambda x: x.detach(),
        "diff": lambda x: x.diff(dim=-1),
        "eq": lambda x: x == x,
        "eq of a number": lambda x: x == 1,
        "lt of a number": lambda x: x < 1,
        "expand": lambda x: x.unsqueeze(0).expand(3, *[-1] * x.ndim),
        "flatten": lambda x: x.flatten(),
        "flip": lambda x: x.flip(-1),
        "leaky_relu": lambda x: functional.leaky_relu(x, 0.2) if dtype.is_floating_point else x,
        "gelu": lambda x: functional.gelu(x) if dtype.is_floating_point else x,
        "mean": lambda x: x.mean(-1) if dtype.is_floating_point else x.sum(-1, True),
        "movedim": lambda x: x.movedim(0, -1),
        "narrow": lambda x: x.narrow(-1, 0, 1),
        "repeat": lambda x: x.repeat(2, 1, 1),
        "repeat_interleave": lambda x: x.repeat_interleave(2, dim=-1),
        "roll": lambda x: x.roll(-1, -1),
        "select": lambda x: x.select(-1, -1),
        "softmax": lambda x: x.softmax(-1) if dtype.is_floating_point else x,
        "squeeze": lambda x: x.squeeze(-2),
        "stack": lambda x: torch.stack([x, x], -1),
        "sum": lambda x: x.sum(-1),
        "sum of dims": lambda x: x.sum((-1,), dtype=torch.float32) if dtype.is_floating_point else x.sum(-1, True),
        "sum of int32": lambda x: x.bool().sum(-1, dtype=torch.int32),
        "masked_fill of bool": lambda x: x.bool().masked_fill(x.bool(), False),
        "tensor_split": lambda x: x.tensor_split(2, -1),
        "tile": lambda x: x.tile(2),
        "unbind": lambda x: x.unbind(-1),
        "unflatten": lambda x: x.unflatten(-1, (-1, 1)),
        "unfold": lambda x: x.unfold(-1, 2, 1),
        "unsqueeze": lambda x: x.unsqueeze(-1),
        "view": lambda x: x.reshape(-1).view(-1, 1),
    }
    for (form, tensor), (name, function) in itertools.product(forms.items(), unary.items()):
        yield Sample(f"{name} of {form}", function, (tensor,))
    for first, second in itertools.combinations(("whole", "transposed", "expanded", "one", "0-dim"), 2):
        yield Sample("add broadcast", torch.add, (forms[first], forms[second]))
    rows = torch.empty(0, dtype=torch.int64)
    video, weight = _values(1, 3, 2, 2, 2, dtype=dtype), _values(4, 3, dtype=dtype)
    heads, cube = _values(3, 2, 5, dtype=dtype), _values(2, 3, 3, dtype=dtype)
    for equation, *tensors in (
        ("bcthw,dc->bdthw", video, weight), ("dc,bcthw->bdthw", weight, video), ("nd,dhf->nhf", weight, heads),
        ("nhwpqc->nchpwq", video[..., None]), ("...cd,dc->...", cube, cube[0]), ("...i,ij", cube, cube[0]),
        ("bii->b", cube), ("bij,jk,kl->bil", cube, cube[0], cube[1]), ("i,j->ij", weight[0], weight[1]),
        ("bij->j", cube), ("ii,ij->i", cube[0], cube[1]),
    ):  # fmt: skip
        yield Sample("einsum", torch.einsum, (equation, *tensors))
    yield Sample("embedding of nothing", functional.embedding, (rows, x[0]))
    yield Sample("take_along_dim", lambda x: torch.take_along_dim(x, x.argsort(-1, stable=True), -1), (x,))
    yield Sample("repeat_interleave", torch.repeat_interleave, (x, torch.tensor([1, 2])), {"dim": 0, "output_size": 3})
    if dtype != torch.bool and not dtype.is_complex:  # PyTorch leaves the order open; the host sorts 3 of 200
        yield Sample("topk", lambda x: x.topk(3, sorted=False), (torch.randperm(200).to(dtype),))
    if dtype != torch.bool and not dtype.is_complex and not dtype.is_floating_point:
        for name in ("and", "or", "xor", "left_shift", "right_shift"):
            yield Sample(f"{name} with a number", getattr(torch, f"bitwise_{name}"), (x, 2))
    size = 257, 256  # larger than what the engine makes on the host
    for name, *given in (("zeros", size), ("zeros", *size), ("ones", size), ("ones", *size), ("full", size, 2)):
        fill = functools.partial(_filled, getattr(torch, name))
        yield Sample(name, fill, (x, *given), {"dtype": dtype})
        yield Sample(name, fill, (x, *given))
    for dtype in (torch.uint8, torch.int32, torch.int64, torch.bool):
        yield Sample("cumsum", torch.cumsum, (torch.full((2, 3), 2**30).to(dtype), 1))
        yield Sample("cumprod", torch.cumprod, (torch.full((2, 3), 100).to(dtype), 1))
    yield Sample("pad", functional.pad, (x, (1, -1)))
    for mode in ("reflect", "replicate", "circular"):
        yield Sample(f"pad {mode}", functional.pad, (x, (2, 1)), {"mode": mode})
        yield Sample(f"pad {mode}", functional.pad, (x[None], (1, 0, 2, 1)), {"mode": mode})
    for value in (0, 1):
        yield Sample("pad constant", functional.pad, (x, (1, 1, 0, 2), "constant", value))
    yield Sample("pad of bool", functional.pad, (x.bool(), (1, 1)), {"value": True})


def _conversions(dtype: torch.dtype) -> Iterator[Sample]:
    """`to`, `view(dtype)`, `new_*` and `*_like` with dtypes, and what makes tensors."""
    x = _values(2, 4, dtype=dtype)
    x = x.abs().to(dtype) if dtype.is_floating_point or dtype.is_complex else x  # uint8 has no negative floats
    for other in PROMOTED:
        yield Sample("zeros_like", torch.zeros_like, (x,), {"dtype": other})
        yield Sample("ones_like", torch.ones_like, (x,), {"dtype": other})
        yield Sample("full_like", torch.full_like, (x, 1), {"dtype": other})
        yield Sample("new_zeros", torch.Tensor.new_zeros, (x, (2, 3)), {"dtype": other})
        yield Sample("new_ones", torch.Tensor.new_ones, (x, (2, 3)), {"dtype": other})
        yield Sample("new_full", torch.Tensor.new_full, (x, (2, 3), 1), {"dtype": other})
        yield Sample("to", torch.Tensor.to, (x, other))
        yield Sample("to keyword", torch.Tensor.to, (x,), {"dtype": other})
        yield Sample("type", torch.Tensor.type, (x, other))
        yield Sample("sum dtype", torch.sum, (x,), {"dtype": other})
        yield Sample("cumsum dtype", torch.cumsum, (x, 0), {"dtype": other})
        yield Sample("arange dtype", lambda dtype: torch.arange(5, dtype=dtype, device="jax"), (other,))
        yield Sample("full dtype", lambda dtype: torch.full((2,), 1, dtype=dtype, device="jax"), (other,))
        yield Sample("zeros dtype", lambda dtype: torch.zeros((2,), dtype=dtype, device="jax"), (other,))
        if other.itemsize == dtype.itemsize and torch.bool not in (dtype, other):
            yield Sample("view dtype", torch.Tensor.view, (x, other))
        if dtype.is_floating_point and other.is_floating_point:
            yield Sample("softmax dtype", torch.softmax, (x, -1), {"dtype": other})
    for name in ("float", "double", "half", "bfloat16", "int", "long", "bool"):
        yield Sample(name, getattr(torch.Tensor, name), (x,))
    if dtype in (torch.float32, torch.float64):
        yield Sample("view_as_complex", lambda x: torch.view_as_real(torch.view_as_complex(x) * 2), (x.reshape(4, 2),))
        yield Sample("polar", lambda x: torch.view_as_real(torch.polar(x.abs(), x)), (x,))
        yield Sample("linspace", lambda: torch.linspace(0, 1, 7, dtype=dtype, device="jax"), ())
        yield Sample("logspace", lambda: torch.logspace(0, 2, 7, dtype=dtype, device="jax"), ())
        yield Sample("arange step", lambda: torch.arange(3, -1, -0.5, dtype=dtype, device="jax"), ())


def _sums(dtype: torch.dtype) -> Iterator[Sample]:
    """Values that leave 32 bits, and rows of equals."""
    if dtype == torch.int64:
        yield Sample("wide product", torch.mul, (torch.tensor([3_000_000]), torch.tensor([1_000_003])))
        yield Sample("wide sum", torch.sum, (torch.arange(100_000),))
        yield Sample("wide cumsum", lambda x: x.cumsum(0), (torch.arange(100_000),))
        for kind in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
            wide = torch.tensor([0, 1, 3, 200, 94906267]).to(kind)
            for power in (2, 63):
                yield Sample("pow wraps", torch.pow, (wide, power))
                yield Sample("pow wraps", torch.pow, (power, wide))
    if dtype not in (torch.bool, torch.complex64):
        x = _values(3, 5, dtype=dtype)
        for name in ("max", "min", "median", "mode", "argmax", "argmin", "sort", "cummax", "cummin"):
            yield Sample(f"{name} of a row", getattr(torch, name), (x, -1))
        yield Sample("topk", torch.topk, (x, 2), {"dim": -1})
        yield Sample("topk smallest", torch.topk, (x, 2, -1, False))
        yield Sample("sort descending", torch.sort, (x,), {"descending": True, "stable": True})


def _functions(dtype: torch.dtype) -> Iterator[Sample]:
    """Functions that are computed in 64 bits, histograms, and the angles of complex values."""
    if dtype != torch.bool and not dtype.is_complex:
        for options in ({}, {"bins": 4, "min": 0, "max": 3}):  # of whole numbers, too, as networks ask for it on CUDA
            yield Sample("histc", torch.histc, (torch.randint(0, 5, (9,)).to(dtype),), options)
    if dtype in (torch.float32, torch.float64):
        x = _positive(3, 4, dtype=dtype)
        for name in ("digamma", "i0", "special.i0e", "Tensor.angle"):
            yield Sample(name, operator.attrgetter(name)(torch), (x,))
        yield Sample("mvlgamma", torch.mvlgamma, (x, 2))
        yield Sample("angle of complex", lambda x: torch.complex(x, 2 - x).angle(), (x,))
        for shape in ((), (0, 2), (3, 4)):
            y = _values(*shape, dtype=dtype)
            yield Sample("gelu", torch.nn.functional.gelu, (y,))
            yield Sample("leaky_relu", torch.nn.functional.leaky_relu, (y, 0.2))
        for name in ("igamma", "igammac"):
            yield Sample(name, getattr(torch, name), (x, x.flip(0)))
        for power in (0.0, 1.0, 2.0, float("inf")):
            yield Sample("cdist", torch.cdist, (x, x, power))


def _writes(dtype: torch.dtype) -> Iterator[Sample]:
    """Operators that write to their first argument, or to `out`."""
    x, other = _positive(3, 4, dtype=dtype), _positive(3, 4, dtype=dtype)
    mask, places = torch.arange(12).reshape(3, 4) % 2 == 0, torch.tensor([[2, 0, 1, 0], [1, 1, 0, 2]])
    row = torch.tensor([2, 0])
    floats = dtype.is_floating_point
    pairs = ["add_", "mul_", "eq_", "ne_", "logical_and_", "logical_or_", "copy_"]
    pairs += ["lt_", "le_", "gt_", "ge_"] * (not dtype.is_complex) + ["sub_"] * (dtype != torch.bool)
    pairs += ["remainder_", "floor_divide_", "fmod_"] * (not dtype.is_complex and dtype != torch.bool)
    pairs += ["pow_"] * (dtype != torch.bool) + ["div_", "atan2_", "hypot_"] * floats
    whole = not floats and not dtype.is_complex
    pairs += ["bitwise_and_", "bitwise_or_", "bitwise_xor_"] * whole
    pairs += ["bitwise_left_shift_", "bitwise_right_shift_"] * (whole and dtype != torch.bool)
    single = ["zero_", "squeeze_", "t_", "logical_not_", "tril_", "triu_"] + ["bitwise_not_"] * whole
    single += ["neg_", "square_", "sign_"] * (dtype != torch.bool and not dtype.is_complex)
    single += ["abs_"] * dtype.is_signed * (not dtype.is_complex)
    if floats:
        single += ["relu_", "sigmoid_", "tanh_", "exp_", "sqrt_", "rsqrt_", "sin_", "cos_", "log_", "log1p_", "expm1_"]
        single += ["floor_", "ceil_", "round_", "trunc_", "reciprocal_", "erf_", "acos_", "asin_", "atan_", "frac_"]
    for name in pairs:
        yield Sample(name, getattr(torch.Tensor, name), (x.clone(), other))
    yield Sample("copy_ of nothing", torch.Tensor.copy_, (x[:0].clone(), other[:0]))
    for name in single:
        yield Sample(name, getattr(torch.Tensor, name), (x[:1].clone(),))
    yield Sample("unsqueeze_", torch.Tensor.unsqueeze_, (x, 1))
    yield Sample("transpose_", torch.Tensor.transpose_, (x, 0, 1))
    yield Sample("masked_fill_", torch.Tensor.masked_fill_, (x, mask, 1))
    yield Sample("masked_scatter_", torch.Tensor.masked_scatter_, (x, mask, other))
    yield Sample("put_", torch.Tensor.put_, (x, torch.tensor([0, 1, 1]), other.ravel()[:3], True))
    yield Sample("scatter_", torch.Tensor.scatter_, (x, 0, places, other))
    yield Sample("scatter_ of a number", torch.Tensor.scatter_, (x, 0, places, 1))
    yield Sample("scatter_add_", torch.Tensor.scatter_add_, (x, 0, places, other))
    yield Sample("index_add_", torch.Tensor.index_add_, (x, 0, row, other[:2]))
    yield Sample("index_copy_", torch.Tensor.index_copy_, (x, 0, row, other[:2]))
    yield Sample("index_fill_", torch.Tensor.index_fill_, (x, 1, row, 1))
    yield Sample("index_put_", torch.Tensor.index_put_, (x, (row,), other[:2]))
    yield Sample("cumsum_", torch.Tensor.cumsum_, (x, 0))
    yield Sample("out", lambda x, y, out: torch.add(x, y, out=out), (x, other, torch.zeros_like(x)))
    yield Sample("out", lambda x, y, out: torch.mul(x, y, out=out), (x, other, torch.zeros_like(x)))
    if floats:
        yield Sample("clamp_", torch.Tensor.clamp_, (x, 2, 3))
        yield Sample("lerp_", torch.Tensor.lerp_, (x, other, 0.5))
        yield Sample("addcmul_", torch.Tensor.addcmul_, (x, other, other), {"value": 2})
        yield Sample("addcdiv_", torch.Tensor.addcdiv_, (x, other, other), {"value": 2})
        yield Sample("scatter_reduce_", torch.Tensor.scatter_reduce_, (x, 0, places, other, "amax"))
        for name in ("leaky_relu_", "elu_", "hardtanh_", "celu_", "selu_", "silu", "hardswish", "mish"):
            yield Sample(name, getattr(functional, name.rstrip("_")), (x - 2,), {"inplace": True})
        for name in ("sqrt", "sigmoid", "tanh", "ceil"):
            yield Sample("out", lambda x, out, name=name: getattr(torch, name)(x, out=out), (x, torch.zeros_like(x)))
        yield Sample("out", lambda x, y, out: torch.div(x, y, out=out), (x, other, torch.zeros_like(x)))
        yield Sample("out", lambda x, y, out: torch.matmul(x, y.T, out=out), (x, other, torch.zeros_like(x[:, :3])))


def _pools(dtype: torch.dtype) -> Iterator[Sample]:
    """Pooling with each of its options, over one, two and three dimensions."""
    for count in (1, 2, 3):
        x = _values(1, 2, *[7] * count, dtype=dtype)
        average = getattr(functional, f"avg_pool{count}d")
        for ceil, padded, inside in itertools.product((False, True), (0, 1), (False, True)):
            options = {"stride": 2, "padding": padded, "ceil_mode": ceil, "count_include_pad": inside}
            yield Sample("avg_pool", average, (x, 2), options)
            yield Sample("avg_pool", average, (x, 3), options)
        if count > 1:
            yield Sample("avg_pool divisor", average, (x, 2), {"divisor_override": 3})
        largest = getattr(functional, f"max_pool{count}d")
        for ceil, padded, dilation, indices in itertools.product((False, True), (0, 1), (1, 2), (False, True)):
            options = {"stride": 2, "padding": padded, "ceil_mode": ceil, "dilation": dilation}
            yield Sample("max_pool", largest, (x, 2), options | {"return_indices": indices})
        for size in (1, 3, 7, 9):
            yield Sample("adaptive", getattr(functional, f"adaptive_avg_pool{count}d"), (x, size))
            yield Sample("adaptive", getattr(functional, f"adaptive_max_pool{count}d"), (x, size))


def _resizes(dtype: torch.dtype) -> Iterator[Sample]:
    """Interpolation and sampling from grids, with each mode."""
    smooth = {1: ("linear",), 2: ("bilinear", "bicubic"), 3: ("trilinear",)}
    sizes = [("size", 8), ("size", 3), ("scale_factor", 2.0), ("scale_factor", 0.6)]
    for count, names in smooth.items():
        x = _values(1, 2, *[5] * count, dtype=dtype)
        for mode, (key, value) in itertools.product((*names, "nearest", "nearest-exact", "area"), sizes):
            size = value if key == "scale_factor" else [value] * count
            yield Sample(f"interpolate {mode}", functional.interpolate, (x,), {key: size, "mode": mode})
            if mode in names:
                options = {key: size, "mode": mode, "align_corners": True}
                yield Sample(f"interpolate {mode}", functional.interpolate, (x,), options)
            if mode in ("bilinear", "bicubic"):
                options = {key: size, "mode": mode, "antialias": True}
                yield Sample(f"interpolate {mode}", functional.interpolate, (x,), options)
    for count in (2, 3):
        x, grid = _values(1, 2, *[5] * count, dtype=dtype), _values(1, *[4] * count, count, dtype=dtype)
        kinds = ("bilinear", "nearest", "bicubic") if count == 2 else ("bilinear", "nearest")
        for mode, padding, corners in itertools.product(kinds, ("zeros", "border", "reflection"), (False, True)):
            options = {"mode": mode, "padding_mode": padding, "align_corners": corners}
            yield Sample("grid_sample", functional.grid_sample, (x, grid), options)
        theta, size = _values(1, count, count + 1, dtype=dtype), [1, 2, *[4] * count]
        yield Sample("affine_grid", functional.affine_grid, (theta, size), {"align_corners": False})
    for padding, stride, dilation in itertools.product((0, 1), (1, 2), (1, 2)):
        options = {"kernel_size": 3, "padding": padding, "stride": stride, "dilation": dilation}
        windows = functional.unfold(_values(2, 3, 7, 9, dtype=dtype), **options)
        yield Sample("fold", functional.fold, (windows,), {"output_size": (7, 9), **options})
    if dtype.is_floating_point:
        for scores, labels in (([5], [5]), ([2, 5], [2, 5])):
            tensors = _values(*scores, dtype=dtype), torch.randint(0, 5, labels)
            yield Sample("multilabel_margin_loss", functional.multilabel_margin_loss, tensors, {"reduction": "none"})
    yield Sample("pixel_shuffle", functional.pixel_shuffle, (_values(1, 8, 2, 3, dtype=dtype), 2))
    yield Sample("pixel_unshuffle", functional.pixel_unshuffle, (_values(1, 2, 4, 6, dtype=dtype), 2))


def _products(dtype: torch.dtype) -> Iterator[Sample]:
    """Products of matrices with `beta=0` and NaN, convolutions with each option, embeddings."""
    x, row = _values(3, 3, dtype=dtype), _values(3, dtype=dtype)
    nan = torch.full((3, 3), float("nan"), dtype=dtype)
    for options in ({"beta": 0}, {"beta": 0, "alpha": 2}, {"beta": 0.5, "alpha": 2}):
        base = nan if options["beta"] == 0 else x
        yield Sample("addmm", torch.addmm, (base, x, x), options)
        yield Sample("addmv", torch.addmv, (base[0], x, row), options)
        yield Sample("addr", torch.addr, (base, row, row), options)
        yield Sample("baddbmm", torch.baddbmm, (base[None], x[None], x[None]), options)
        yield Sample("addbmm", torch.addbmm, (base, x[None], x[None]), options)
    for first, second in ([(3,), (3,)], [(2, 3), (3,)], [(3,), (3, 2)], [(2, 4, 3), (3, 2)], [(2, 1, 4, 3), (5, 3, 2)]):
        yield Sample("matmul", torch.matmul, (_values(*first, dtype=dtype), _values(*second, dtype=dtype)))
    yield Sample("linear", lambda x: functional.linear(input=x, weight=x, bias=x[0]), (x,))
    yield Sample("linear", lambda x: functional.linear(x, weight=x), (x,))
    yield Sample("linear", lambda x: functional.linear(x, weight=x, bias=x[0]), (x,))
    ends = torch.tensor([3, 3, 8], dtype=torch.int32)  # the second group is empty
    for first, second in (
        ([(8, 4), (3, 4, 6)], [(3, 6, 4), (4, 8)], [(6, 8), (8, 4)]) if dtype.is_floating_point else ()
    ):
        pair = _values(*first, dtype=dtype), _values(*second, dtype=dtype)
        yield Sample("grouped_mm", functional.grouped_mm, pair, {"offs": ends})
    for count in (1, 2, 3):
        image, kernel = _values(1, 4, *[6] * count, dtype=dtype), _values(4, 4, *[3] * count, dtype=dtype)
        plain, turned = (getattr(functional, f"conv{kind}{count}d") for kind in ("", "_transpose"))
        for options in ({}, {"stride": 2}, {"padding": 1}, {"dilation": 2}, {"padding": "same"}, {"padding": "valid"}):
            yield Sample("conv", plain, (image, kernel, kernel[:, 0].flatten(1)[:, 0]), options)
        yield Sample("conv groups", plain, (image, kernel[:, :2]), {"groups": 2})
        for options in ({}, {"stride": 2}, {"stride": 2, "padding": 1, "output_padding": 1}, {"dilation": 2}):
            yield Sample("conv_transpose", turned, (image, kernel), options)
        yield Sample("conv_transpose groups", turned, (image, kernel[:, :2]), {"groups": 2})
    places = torch.tensor([[0, 2], [1, 1]])
    for options in ({}, {"padding_idx": 1}, {"max_norm": 0.5}, {"scale_grad_by_freq": True}):
        yield Sample("embedding", functional.embedding, (places, x), options)
    for mode in ("sum", "mean", "max"):
        yield Sample("embedding_bag", functional.embedding_bag, (places, x), {"mode": mode})
    # Of float16, meta gives the norms, which no layer reads, another dtype than the host.
    for dim in (0, 2) if dtype != torch.float16 else ():
        image = _values(4, 4, 3, dtype=dtype)
        length = _positive(*(size if each == dim else 1 for each, size in enumerate(image.shape)), dtype=dtype)
        yield Sample("weight_norm", torch._weight_norm, (image, length, dim))
    for name in ("fft", "ifft", "rfft", "fftn", "rfftn", "fft2"):
        wide = x if dtype in (torch.float32, torch.float64) else x.float()
        for norm in (None, "ortho", "forward"):
            yield Sample(name, getattr(torch.fft, name), (wide,), {"norm": norm})


def _attention(dtype: torch.dtype) -> Iterator[Sample]:
    """Attention with masks that hide whole rows, causal, scaled, and with fewer heads of keys."""
    query, key = _values(1, 4, 5, 8, dtype=dtype), _values(1, 4, 6, 8, dtype=dtype)
    attention = functional.scaled_dot_product_attention
    mask = torch.ones(5, 6, dtype=torch.bool).tril()
    full = mask.clone()
    full[2] = False
    for options in (
        {}, {"attn_mask": mask}, {"attn_mask": full}, {"is_causal": True}, {"scale": 0.5},
        {"attn_mask": torch.zeros(5, 6, dtype=dtype).masked_fill(~mask, float("-inf"))},
    ):  # fmt: skip
        yield Sample("attention", attention, (query, key, key), options)
    by_name = {"query": query, "key": key, "value": key}
    yield Sample("attention by keyword", attention, (), by_name)
    yield Sample("attention groups", attention, (query, key[:, :2], key[:, :2]), {"enable_gqa": True})
    hidden = torch.full((2, 4), float("-inf"), dtype=dtype)
    yield Sample("softmax of nothing", torch.softmax, (hidden, -1))
    yield Sample("logsumexp of nothing", torch.logsumexp, (hidden, -1))
    yield Sample("log_softmax of nothing", torch.log_softmax, (hidden, -1))


def _normalizations(dtype: torch.dtype) -> Iterator[Sample]:
    """Norms, with running statistics and without."""
    x, row = _values(4, 6, 5, dtype=dtype), _values(6, dtype=dtype)
    for training in (False, True):
        running = row.clone(), row.abs()
        yield Sample("batch_norm", functional.batch_norm, (x, *running, row, row, training))
        yield Sample("instance_norm", functional.instance_norm, (x, *running, row, row, training))
    yield Sample("group_norm", functional.group_norm, (x, 3, row, row))
    yield Sample("group_norm plain", functional.group_norm, (x, 2))
    wide = _values(3, 5, 6, dtype=dtype) * 10 + 300
    yield Sample("layer_norm", functional.layer_norm, (wide, (6,), row, row, 1e-6))
    yield Sample("layer_norm plain", functional.layer_norm, (wide, (5, 6)))
    yield Sample("rms_norm", functional.rms_norm, (x.mT, (6,), row, 1e-6))
    yield Sample("rms_norm plain", functional.rms_norm, (x.mT, (6,)))
    yield Sample("normalize", functional.normalize, (x,), {"dim": -1})
    for name in ("gelu", "silu", "mish", "relu", "elu", "softplus", "sigmoid", "tanh", "leaky_relu", "hardswish"):
        yield Sample(name, getattr(functional, name), (torch.cat([x * 20, x]),))
    yield Sample("gelu tanh", functional.gelu, (x * 20,), {"approximate": "tanh"})
    for beta in (1, 100):
        yield Sample("softplus", functional.softplus, (x * 20, beta))


MADE = {"generated": generated, "promotion": promotion}
"""Sources of what PyTorch's own samples leave out."""
