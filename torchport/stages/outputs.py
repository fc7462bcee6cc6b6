"""What a network returns, and trees of tensors: tuples, lists and dicts of tensors, one in another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import torch
from torch.utils import _pytree as pytree

from torchport.errors import BadValueError, nearest

TENSORS = (torch.Tensor, jax.Array, jax.ShapeDtypeStruct)
"""What may be a leaf of a tree; the last are shapes alone, for programs that are only compiled."""


def stage_outputs(output: Any, names: Sequence[str], network: str) -> Any:
    """Returns the outputs of a stage's network that the stage asks for, from all that the network returns.

    Args:
        output: A tensor, or a tuple, list, mapping or object of several outputs.
        names: The stage's names of the outputs, `Stage.outputs`; empty for the first output alone.

    Returns:
        Without names the first output, a tensor. With names a tuple, one tree of tensors for each name: by the position
        in a tuple or list, else by the name.
    """
    if not names:
        values: Any = list(output.values()) if isinstance(output, Mapping) else output
        value = values[0] if isinstance(values, tuple | list) and values else values
        if not isinstance(value, torch.Tensor):
            fact = f"The first of its outputs is no tensor, but of the type {type(value).__name__}"
            raise BadValueError(network, fact, "Return a tensor first, or name all outputs in `Stage.outputs`")
        return value
    if isinstance(output, torch.Tensor | tuple | list):
        values = (output,) if isinstance(output, torch.Tensor) else output
        if len(values) != len(names):
            fact = f"It returns {len(values)} output(s), and `Stage.outputs` names {len(names)}: {', '.join(names)}"
            raise BadValueError(network, fact, "Give each output a name, in their order")
    else:
        fields = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
        missing = [name for name in names if name not in fields]
        if missing:
            fact = f"What it returns, of the type {type(output).__name__}, has no '{missing[0]}'"
            raise BadValueError(network, fact, nearest(missing[0], map(str, fields)), name=missing[0])
        values = [fields[name] for name in names]
    return tuple(plain(name, value, network) for name, value in zip(names, values, strict=True))


def plain(name: str, value: Any, network: str) -> Any:
    """Returns a tree of tensors with plain tuples, lists and dicts; refuses a leaf that is no tensor. None stays."""
    for path, leaf in leaves({name: value}).items():
        if not isinstance(leaf, TENSORS):
            fact = f"'{path}' is no tensor, but of the type {type(leaf).__name__}"
            remedy = "It must be tensors in tuples, lists and dicts: the function of `Stage.call` may arrange them"
            raise BadValueError(network, fact, remedy, name=path)
    return map_leaves(lambda _, leaf: leaf, name, value)  # makes plain containers


def map_leaves(function: Callable[[str, Any], Any], name: str, value: Any) -> Any:
    """Returns a tree with `function(name, leaf)` in place of each leaf; the name is its path, `cache.0.keys`."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {str(key): map_leaves(function, f"{name}.{key}", item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [map_leaves(function, f"{name}.{number}", item) for number, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return function(name, value)


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns a tree of anything with `function(tensor)` in place of each tensor."""
    return pytree.tree_map_only(torch.Tensor, function, value)


def leaves(trees: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all leaves of named trees by their paths: `{"cache": [x, y]}` -> `{"cache.0": x, "cache.1": y}`."""
    by_path: dict[str, Any] = {}
    for name, tree in trees.items():
        map_leaves(by_path.__setitem__, name, tree)
    return by_path


def has_tensor(value: Any) -> bool:
    """Returns whether a value is a tensor or a tree with one in it."""
    return any(isinstance(leaf, TENSORS) for leaf in leaves({"": value}).values())


def not_finite(tensor: torch.Tensor) -> int:
    """Returns how many values of a tensor are NaN or infinite; 0 of one whose values are whole numbers.

    The sum comes first, which takes a twentieth of the time: it is NaN or infinite if one of the values is. Finite
    values whose sum overflows are looked at one by one.
    """
    if not tensor.is_floating_point():
        return 0
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    if bool(torch.isfinite(tensor.sum(dtype=wide))):
        return 0
    return int((~torch.isfinite(tensor)).sum())
