"""What a module keeps from one call to the next, beside its weights: attributes, and what the objects in them hold.

PyTorch runs a forward anew at each call. A program is made once, of what the attributes said at that time. So a program
belongs to a state, and each call leaves the state that PyTorch's forward would leave.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from torchport import engine

CONSTANTS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))
"""Types of values that a program may depend on, and return."""
_LEAF = _pytree.tree_structure(0)
_INTERNAL = vars(torch.nn.Module()).keys()
_NO_OBJECTS = (*CONSTANTS, type, types.FunctionType, types.MethodType, types.ModuleType, torch.Tensor, torch.nn.Module)
_LIBRARIES = {"torch", "torchax", "jax", "numpy", "torchport", *sys.stdlib_module_names} - {"types"}
"""Packages whose objects are no model's: a logger knows all others. `types` has SimpleNamespace."""


@dataclasses.dataclass(frozen=True, eq=False)
class Same:
    """A value that is known by what it is, not by what it is equal to; a tensor also by how often it was written to."""

    value: Any
    version: int = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value and self.version == other.version

    def __hash__(self) -> int:
        return hash((id(self.value), self.version))

    def __repr__(self) -> str:
        return f"{type(self.value).__name__} {id(self.value)} {self.version}"


Place = tuple[Same, str]
"""The attributes of a module or an object, and the name of one of them."""
Tree = tuple[list[Any], _pytree.TreeSpec]
"""A value that is taken apart: tensors, constants and objects, and the lists, tuples and dicts that they are in."""


class State:
    """The attributes of a module's parts, and of the objects that they hold.

    Args:
        module: It stays as it is.

    Attributes:
        kept: The attributes that a call has bound to tensors that depend on its inputs: they are inputs of the next.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.kept: set[Place] = set()
        self._numbers: dict[Any, int] = {}

    def read(self, objects: Sequence[Any] = ()) -> dict[Place, Tree]:
        """Returns all of it by place, also that of objects which are arguments of a call."""
        found: dict[Place, Tree] = {}
        for attributes in _attributes([*self.module.modules(), *objects]):
            holder = Same(attributes)
            for name, value in attributes.items():
                if name not in _INTERNAL:
                    is_constant = type(value) in CONSTANTS
                    found[holder, name] = ([value], _LEAF) if is_constant else _pytree.tree_flatten(value)
        return found

    def number(self, read: Mapping[Place, Tree]) -> int:
        """Returns a number for a state: two states of one number make the same program."""
        key = tuple(
            (place, tree, tuple(_mark(leaf, place in self.kept) for leaf in leaves))
            for place, (leaves, tree) in read.items()
        )
        return self._numbers.setdefault(key, len(self._numbers))

    def tensors(self, read: Mapping[Place, Tree]) -> dict[str, torch.Tensor]:
        """Returns those tensors of a state that are inputs of a program, by a name for each."""
        kept = [leaf for place in read if place in self.kept for leaf in read[place][0] if _is_host(leaf)]
        return {f"(state).{number}": tensor for number, tensor in enumerate(kept)}

    @contextlib.contextmanager
    def entered(self, objects: Sequence[Any], inputs: Mapping[str, torch.Tensor]) -> Iterator[dict[Place, Tree]]:
        """Puts a program's inputs in the place of these tensors, and takes back what is bound in the context."""
        original, waiting = self.read(objects), iter(inputs.values())
        try:
            for place, (leaves, tree) in original.items():
                if place in self.kept:
                    bind(place, ([next(waiting) if _is_host(leaf) else leaf for leaf in leaves], tree))
            yield self.read(objects)
        finally:
            for place in changed(original, self.read(objects)):
                bind(place, original.get(place))


def bind(place: Place, value: Tree | None) -> None:
    """Binds an attribute; None: removes it."""
    attributes, name = place[0].value, place[1]
    if value is None:
        attributes.pop(name, None)
    else:
        attributes[name] = _pytree.tree_unflatten(*value)


def changed(before: Mapping[Place, Tree], after: Mapping[Place, Tree]) -> dict[Place, Tree | None]:
    """Returns what a call has bound, by place; None where it removed an attribute."""
    new = {place: value for place, value in after.items() if place not in before or not _alike(before[place], value)}
    return {**new, **{place: None for place in before if place not in after}}


def _alike(first: Tree, second: Tree) -> bool:
    return first[1] == second[1] and list(map(_mark, first[0])) == list(map(_mark, second[0]))


def _mark(leaf: Any, is_input: bool = False) -> Any:
    """Returns what a program depends on of a value."""
    if type(leaf) in CONSTANTS:
        return type(leaf), leaf
    if _is_host(leaf):
        version = 0 if leaf.is_inference() else leaf._version
        return (leaf.dtype, leaf.shape) if is_input else Same(leaf, version)
    return Same(leaf)


def _is_host(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not engine.is_traced(leaf)


def _attributes(things: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Returns the attributes of modules and objects, and of the objects in them."""
    seen, waiting = set(), list(things)
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        attributes = vars(thing)
        yield attributes
        for name, value in attributes.items():
            if name not in _INTERNAL and type(value) not in CONSTANTS:
                waiting.extend(leaf for leaf in _pytree.tree_leaves(value) if is_object(leaf))


def is_object(leaf: Any) -> bool:
    """Returns whether a value has attributes of its own, which upstream's code may bind."""
    if isinstance(leaf, _NO_OBJECTS) or not hasattr(leaf, "__dict__"):
        return False
    return type(leaf).__module__.partition(".")[0] not in _LIBRARIES
