"""The memory that tensors of a traced network share, and the way of a write to all tensors in it.

An array of JAX never changes, and a view of PyTorch is its base's memory. So each traced tensor knows the memory that
it lies in and the views that lead to it. A write goes back along the views, and every other tensor of that memory that
is still alive gets its new value.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


@dataclasses.dataclass(frozen=True)
class View:
    """One view of PyTorch, as two functions of arrays."""

    forward: Callable[[Any], Any]  # the base's value -> the view's
    backward: Callable[[Any, Any], Any]  # the base's value, the view's new one -> the base's new one


@dataclasses.dataclass(eq=False)
class Storage:
    """The memory of a traced tensor that is no view, with its array as `value`; views of the tensor share it."""

    value: Any
    layout: Any  #: The result of `layout` for its first tensor.
    whose: str = ""  #: If the network must not write to it, a word for it: `an argument of the network`.
    is_callers: bool = False  #: Whether the network's caller made it: then its offset is not known.
    written: bool = False
    stale: str | Exception = ""  #: Why its value is not what PyTorch would have.
    tensors: list[tuple[weakref.ref[Any], tuple[View, ...]]] = dataclasses.field(default_factory=list)

    def add(self, tensor: Any, path: tuple[View, ...]) -> None:
        """Notes a tensor of this memory, and the views that lead from the whole memory to the tensor."""
        self.tensors.append((weakref.ref(tensor), path))

    def write(self, path: tuple[View, ...], value: Any) -> None:
        """Writes a value to the part of the memory where a path of views leads; the caller updates its tensors."""
        self.written = True
        # The value of the base of each view.
        bases = [self.value]
        for view in path[:-1]:
            bases.append(view.forward(bases[-1]))
        for view, base in zip(reversed(path), reversed(bases), strict=bool(path)):  # an empty path needs no base
            value = view.backward(base, value)
        self.value = value

    def read(self, path: tuple[View, ...]) -> Any:
        """Returns the value of the part of the memory to which a path of views leads."""
        value = self.value
        for view in path:
            value = view.forward(value)
        return value

    def alive(self) -> list[tuple[Any, tuple[View, ...]]]:
        """Returns the tensors of this memory that something still refers to, each with its views."""
        self.tensors = [(ref, path) for ref, path in self.tensors if ref() is not None]
        return [(tensor, path) for ref, path in self.tensors if (tensor := ref()) is not None]


class Section(NamedTuple):
    """Where a tensor lies in a larger tensor, and how it is read; strides and offset in elements of its own dtype."""

    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool

    def within(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the view of a host tensor that this section describes."""
        if self.dtype != whole.dtype:
            (start, end), first = extent(whole), whole.storage_offset()
            whole = whole.as_strided(((end - start) // whole.itemsize,), (1,), first).view(self.dtype)
        part = whole.as_strided(self.shape, self.strides, whole.storage_offset() + self.offset)
        part = part.conj() if self.is_conj else part
        return torch._neg_view(part) if self.is_neg else part


def place(part: torch.Tensor, whole: torch.Tensor) -> Section:
    """Returns the section of `whole` that is `part`; both have the same storage."""
    offset = int(part.storage_offset() - whole.storage_offset() * whole.itemsize // part.itemsize)
    return Section(part.shape, part.stride(), offset, part.dtype, part.is_conj(), part.is_neg())


def layout(tensor: torch.Tensor) -> tuple[int, list[int]] | None:
    """Returns where a tensor begins in its storage, and its dims from the largest stride to the smallest: of a
    transposed matrix `(0, [1, 0])`. None if it has gaps.
    """
    order = sorted(range(tensor.ndim), key=tensor.stride().__getitem__, reverse=True)
    stride = 1
    for dim in reversed(order):
        if tensor.shape[dim] != 1 and tensor.stride(dim) != stride:
            return None
        stride *= tensor.shape[dim]
    return int(tensor.storage_offset()), order


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns where a tensor begins and where it ends in its storage, in bytes; the end is exclusive."""
    start, size = int(tensor.storage_offset()), tensor.itemsize
    if not tensor.numel():
        return start * size, start * size
    last = start + sum(int((n - 1) * stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * size, (last + 1) * size


def lies_in(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Returns whether a tensor lies within another tensor of the same storage."""
    (start, end), (first, last) = extent(part), extent(whole)
    return first <= start and end <= last


def overlap(first: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors share some elements of a storage, and are not the same elements in the same order."""
    (start, end), (head, tail) = extent(first), extent(other)
    is_apart = first.untyped_storage()._cdata != other.untyped_storage()._cdata or max(start, head) >= min(end, tail)
    dims = [[(n, stride) for n, stride in zip(x.shape, x.stride(), strict=True) if n != 1] for x in (first, other)]
    if is_apart or (start == head and first.dtype == other.dtype and dims[0] == dims[1]):
        return False
    if first.dtype != other.dtype:
        return True
    # Marks the elements of the first tensor, and looks for a mark among those of the other.
    low, size = min(start, head), first.itemsize
    marks = torch.zeros((max(end, tail) - low) // size, dtype=torch.bool)
    marks.as_strided(first.shape, first.stride(), (start - low) // size).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), (head - low) // size).any())


_SAME = {"alias", "detach", "lift_fresh", "lift", "_to_copy", "positive"}
_RESHAPE = {"view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "flatten", "unflatten"}
_PARTS = {"split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk"}


def inverse(name: str, base: Any, args: Any, kwargs: dict[str, Any], item: int, shapes: Any, selected: Any) -> Any:
    """Returns a function that takes the base's value and a view's new value, and returns the base's new value; for
    `transpose` it transposes the view's value back. None if the view has an element of the base several times.

    Args:
        name: The name of the operator that makes the view, such as `slice`.
        base: The base, or its shadow.
        args: The operator's arguments. For the operators that are named below the first is the base.
        item: The number of the view among the operator's outputs; `shapes` has the shapes of all of these.
        selected: Returns the same view of a host tensor. Other operators are tried with it on numbered elements.
    """
    import jax
    import jax.numpy as jnp

    def argument(number: int, key: str, default: Any) -> Any:
        return args[number] if len(args) > number else kwargs.get(key, default)

    dims = len(base.shape)
    if name in _SAME:
        return lambda whole, part: part
    if name in _RESHAPE:
        return lambda whole, part: part.reshape(whole.shape)
    if name == "permute":
        order = [dim % dims for dim in argument(1, "dims", ())]
        back = [order.index(n) for n in range(dims)]
        return lambda whole, part: jnp.transpose(part, back)
    if name in ("transpose", "t"):
        pair = (0, dims - 1) if name == "t" else (argument(1, "dim0", 0), argument(2, "dim1", 1))
        return lambda whole, part: jnp.swapaxes(part, *pair) if dims else part
    if name == "slice":
        dim, step = argument(1, "dim", 0) % dims, argument(4, "step", 1)
        start, stop, _ = slice(argument(2, "start", None), argument(3, "end", None)).indices(base.shape[dim])
        if step == 1:
            return lambda whole, part: _with_part(whole, part, start, dim)
        sliced = (*(slice(None) for _ in range(dim)), slice(start, stop, step))
        return lambda whole, part: whole.at[sliced].set(part)
    if name in ("select", "unbind"):
        dim = argument(1, "dim", 0) % dims
        index = item if name == "unbind" else argument(2, "index", 0)
        index %= base.shape[dim]
        return lambda whole, part: _with_part(whole, jnp.expand_dims(part, dim), index, dim)
    if name in _PARTS:
        dim = argument(2, "dim", 0) % dims
        before = sum(shape[dim] for shape in shapes[:item])
        return lambda whole, part: _with_part(whole, part, before, dim)
    if name == "real":
        return lambda whole, part: jax.lax.complex(part, whole.imag) if jnp.iscomplexobj(whole) else part
    if name == "imag":
        return lambda whole, part: jax.lax.complex(whole.real, part)
    if name == "view_as_real":
        return lambda whole, part: jax.lax.complex(part[..., 0], part[..., 1])
    if name == "view_as_complex":
        return lambda whole, part: jnp.stack([part.real, part.imag], -1)
    if name == "_conj":
        return lambda whole, part: jnp.conj(part)
    numbers = torch.arange(math.prod(base.shape)).reshape(tuple(base.shape))
    chosen = selected(numbers).reshape(-1).numpy()
    if len(set(chosen.tolist())) != len(chosen):
        return None
    return lambda whole, part: whole.ravel().at[chosen].set(part.ravel()).reshape(whole.shape)


def _with_part(whole: Any, part: Any, start: int, dim: int) -> Any:
    """Returns a copy of `whole` with `part` in it from `start` on along `dim`, as a concatenation.

    XLA for CPU (jaxlib 0.10.2) reads a tensor before a `dynamic_update_slice` into it where a product of matrices takes
    the result, in some layouts: tests/engine/test_tracked.py.
    """
    import jax
    import jax.numpy as jnp

    stop = start + part.shape[dim]
    before = jax.lax.slice_in_dim(whole, 0, start, axis=dim)
    after = jax.lax.slice_in_dim(whole, stop, whole.shape[dim], axis=dim)
    pieces = [piece for piece in (before, part.astype(whole.dtype), after) if piece.shape[dim]]
    return jnp.concatenate(pieces, axis=dim) if pieces else whole
