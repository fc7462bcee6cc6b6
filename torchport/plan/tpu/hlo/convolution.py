"""The arithmetic of a convolution; to the TPU's compiler a matrix product is one, too."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy

Array = tuple[str, tuple[int, ...]]
"""Dtype and shape, as an instruction has them."""
_PARTS = {"default": 1, "high": 2, "highest": 3}
"""bfloat16 numbers whose sum stands for a float32 operand, by its precision."""
_LABELS = re.compile(r"([\w?]+)_([\w?]+)->([\w?]+)")


def flops(output: Array, left: Array, right: Array, attributes: Mapping[str, str]) -> int:
    """Returns the bfloat16 operations of a convolution on one device, in all its passes; 0 of another dtype.

    A multiply and an add are two. What is multiplied with padding is not counted: a product with a batch is written as
    a convolution along that batch, and of each window of it all but one position is padding.

    Args:
        output: Dtype and shape of the result.
        left: Of the input.
        right: Of the kernel.
        attributes: The instruction's, by name.

    Raises:
        ValueError: The labels of the dims are missing, or those of other shapes.
    """
    labels = _LABELS.fullmatch(attributes.get("dim_labels", ""))
    if labels is None:
        raise ValueError(attributes)
    names = labels.groups()
    sizes, inputs, kernel = (
        dict[str, int](zip(dims, array[1], strict=True))
        for dims, array in zip((names[2], names[0], names[1]), (output, left, right), strict=True)
    )
    window = dict(field.split("=") for field in attributes.get("window", "").strip("{}").split())
    spatial = sorted(dim for dim in kernel if dim.isdigit())
    products = sizes["b"] * sizes["f"] * kernel["i"]
    for at, dim in enumerate(spatial):
        products *= _positions(sizes[dim], inputs[dim], kernel[dim], window, at)
    return 2 * products * passes(left[0], right[0], attributes)


def passes(left: str, right: str, attributes: Mapping[str, str]) -> int:
    """Returns how many bfloat16 products make one product of these dtypes; 0 where the unit takes them as they are.

    Two float32 operands of n parts each take n * (n + 1) / 2: the products of the smallest parts are left out.
    """
    each = attributes.get("operand_precision", "").strip("{}").split(",")
    parts = min(_PARTS.get(precision, 1) for precision in each)
    wide = (left, right).count("f32")
    if wide + (left, right).count("bf16") < 2:
        return 0
    return (1, parts, parts * (parts + 1) // 2)[wide]


def _positions(output: int, inputs: int, kernel: int, window: Mapping[str, str], at: int) -> int:
    """Returns along a dim how many pairs of a position of the output and one of the kernel meet an input."""

    def field(name: str, default: str) -> str:
        return window[name].split("x")[at] if name in window else default

    stride, spread, apart = (int(field(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    before = int(field("pad", "0_0").split("_")[0])
    reached = numpy.arange(output)[:, None] * stride + numpy.arange(kernel) * apart - before
    return int(((reached >= 0) & (reached <= (inputs - 1) * spread) & (reached % spread == 0)).sum())
