"""Trees of tensors, numbers and text as tensors alone, so that an artefact holds them: what a scheduler keeps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

STRUCTURE = "structure"
"""The tensor that holds all but the tensors, as the bytes of JSON text."""


def is_packable(value: Any) -> bool:
    """Returns whether a value is a tree: tuples, lists and dicts, of those very types, of tensors, numbers and text."""
    if type(value) in (tuple, list):
        return all(map(is_packable, value))
    if type(value) is dict:
        return all(type(key) is str and is_packable(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, str) or isinstance(value, torch.Tensor)


def packed(value: Any) -> dict[str, torch.Tensor]:
    """Returns a tree as tensors by name. They are copies: what is written to later, and what is shared, may be in it.

    Args:
        value: A tree for which `is_packable` is true.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_structure("", value, tensors))
    return {**tensors, STRUCTURE: torch.tensor(list(text.encode()), dtype=torch.uint8)}


def _structure(path: str, value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors[path] = value.clone()
        return {"tensor": path}
    if isinstance(value, dict):
        items = {key: _structure(f"{path}.{key}".lstrip("."), item, tensors) for key, item in value.items()}
        return {"dict": items}
    if isinstance(value, tuple | list):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_structure(f"{path}.{n}".lstrip("."), item, tensors) for n, item in enumerate(value)]}
    return value


def unpacked(tensors: Mapping[str, torch.Tensor]) -> Any:
    """Returns the tree that `packed` made these tensors of."""
    return _value(json.loads(bytes(tensors[STRUCTURE].tolist())), tensors)


def _value(structure: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if not isinstance(structure, dict):
        return structure
    [(kind, content)] = structure.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _value(item, tensors) for key, item in content.items()}
    items = [_value(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items
