"""Trees of tensors, numbers and text as data of JSON beside their tensors: a scheduler's state, a capture's values."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

STRUCTURE = "structure"
"""The tensor that holds all but the tensors, as the bytes of JSON text."""


def is_packable(value: Any) -> bool:
    """Returns whether `packed` can store a value: tensors, numbers, text and None in plain tuples, lists and dicts."""
    if type(value) in (tuple, list):
        return all(map(is_packable, value))
    if type(value) is dict:
        return all(type(key) is str and is_packable(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, str) or isinstance(value, torch.Tensor)


def packed(value: Any) -> dict[str, torch.Tensor]:
    """Returns copies of a tree's tensors by path, `scheduler.sigmas`, and under `structure` all else as JSON."""
    tensors: dict[str, torch.Tensor] = {}

    def store(path: str, tensor: torch.Tensor) -> dict[str, Any]:
        tensors[path] = tensor.clone()  # the tree's own may be shared, or written to later
        return {"tensor": path}

    text = json.dumps(as_data(value, store))
    return {**tensors, STRUCTURE: torch.tensor(list(text.encode()), dtype=torch.uint8)}


def unpacked(tensors: Mapping[str, torch.Tensor]) -> Any:
    """Returns the tree of some tensors by path: the inverse of `packed`."""
    return from_data(json.loads(bytes(tensors[STRUCTURE].tolist())), lambda node: tensors[node["tensor"]])


def as_data(value: Any, store: Callable[[str, torch.Tensor], dict[str, Any]], path: str = "") -> Any:
    """Returns a tree as data that JSON can hold. What is no tree of tensors, numbers and text becomes None. `store`
    stores the tensor of a path, and returns a dict for its place in the data, which has the key `tensor`.
    """
    if isinstance(value, torch.Tensor):
        return store(path, value)
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value):
            return {"dict": {key: as_data(item, store, f"{path}.{key}".lstrip(".")) for key, item in value.items()}}
        return {"dict": [[as_data(key, store), as_data(item, store)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [as_data(item, store, f"{path}.{number}".lstrip(".")) for number, item in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    return value if value is None or type(value) in (bool, int, float, str) else None


def from_data(data: Any, tensor_of: Callable[[dict[str, Any]], torch.Tensor]) -> Any:
    """Returns the tree of some data, the inverse of `as_data`; `tensor_of` returns the tensor of a dict by `store`."""
    if not isinstance(data, dict):
        return data
    if "tensor" in data:
        return tensor_of(data)
    [(kind, content)] = data.items()
    if kind == "dict":
        pairs = content.items() if isinstance(content, dict) else content
        return {from_data(key, tensor_of): from_data(item, tensor_of) for key, item in pairs}
    items = [from_data(item, tensor_of) for item in content]
    return tuple(items) if kind == "tuple" else items
