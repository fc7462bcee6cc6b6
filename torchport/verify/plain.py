"""Trees of tensors as plain data beside the tensors themselves: each tensor is kept once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchport.verify.yardstick import ROWS, SHAPE, shape_of


class Shelf:
    """Tensors by number, those with the same values once.

    Attributes:
        tensors: By name.
        size: Their bytes.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.size = 0
        self._names: dict[str, str] = {}

    def put(self, value: Any) -> Any:
        """Returns a tree as plain data. What is no tree of tensors, numbers and texts becomes None."""
        if isinstance(value, torch.Tensor):
            rows = getattr(value, ROWS, None)
            sampled = {} if rows is None else {"rows": self._name(rows), "shape": list(shape_of(value))}
            return {"tensor": self._name(value)} | sampled
        if isinstance(value, Mapping):
            return {"dict": [[self.put(key), self.put(item)] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            return {"list" if isinstance(value, list) else "tuple": [self.put(item) for item in value]}
        return value if value is None or type(value) in (bool, int, float, str) else None

    def cost(self, values: Iterable[Any]) -> int:
        """Returns the bytes that trees would add."""
        leaves = [leaf for leaf in pytree.tree_leaves(list(values)) if isinstance(leaf, torch.Tensor)]
        new = {_digest(leaf): leaf.numel() * leaf.dtype.itemsize for leaf in leaves}
        return sum(size for digest, size in new.items() if digest not in self._names)

    def _name(self, tensor: torch.Tensor) -> str:
        digest = _digest(tensor)
        if digest not in self._names:
            name = self._names[digest] = f"t{len(self._names)}"
            self.tensors[name] = _fresh(tensor)
            self.size += tensor.numel() * tensor.dtype.itemsize
        return self._names[digest]


def _digest(tensor: torch.Tensor) -> str:
    sha = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    sha.update(_fresh(tensor).reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy with strides of its own: one of a single element may have none, and count as contiguous."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def restored(data: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Returns the tree that `Shelf.put` made plain data of."""
    if not isinstance(data, dict):
        return data
    if "tensor" in data:
        tensor = tensors[data["tensor"]].clone()
        if "rows" in data:
            setattr(tensor, ROWS, tensors[data["rows"]])
            setattr(tensor, SHAPE, tuple(data["shape"]))
        return tensor
    [(kind, content)] = data.items()
    if kind == "dict":
        return {restored(key, tensors): restored(item, tensors) for key, item in content}
    items = [restored(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items
