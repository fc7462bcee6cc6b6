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
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils import _pytree

from torchport import engine

CONSTANTS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))
"""Types of values that a program may depend on, and return."""
SMALL = 2**16
"""Bytes of the largest array of numpy whose values are compared from call to call."""
LONG = 10_000
"""Items of the longest container that is looked through; a longer one is known by its identity."""
_LEAF = _pytree.tree_structure(0)
_INTERNAL = vars(torch.nn.Module()).keys()
_NO_OBJECTS = (*CONSTANTS, type, types.FunctionType, types.MethodType, types.ModuleType, torch.Tensor, torch.nn.Module)
_LIBRARIES = {"torch", "torchax", "jax", "numpy", "torchport", *sys.stdlib_module_names} - {"types"}
"""Packages whose objects are no model's: a logger knows all others. `types` has SimpleNamespace."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Same:
    """A value that is known by what it is, not by what it is equal to; a tensor also by how often it was written to."""

    value: Any
    version: int = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value and self.version == other.version

    def __hash__(self) -> int:
        return hash((id(self.value), self.version))

    def __repr__(self) -> str:
        return f"{type(self.value).__name__} {id(self.value)} {self.version}"


Place = tuple[_Same, str]
"""The attributes of a module or an object, and the name of one of them."""


class Pieces(NamedTuple):
    """A value that is taken apart.

    Attributes:
        leaves: Its tensors, constants and objects.
        tree: The lists, tuples and dicts that they are in.
        container: The list or dict itself, if it stays and what is in it changes; None: the value is made anew.
    """

    leaves: list[Any]
    tree: _pytree.TreeSpec
    container: Any = None

    @classmethod
    def take(cls, value: Any) -> Pieces:
        """Takes a value apart."""
        if type(value) in CONSTANTS or _is_long(value):
            return cls([value], _LEAF)
        return cls(*_pytree.tree_flatten(value), container=value if isinstance(value, list | dict) else None)

    def whole(self) -> Any:
        """Returns the value: its own container, with these parts in it, or a new one."""
        return rewritten(self.container, _pytree.tree_unflatten(self.leaves, self.tree))


def rewritten(old: Any, new: Any) -> Any:
    """Returns a value in the lists and dicts of an older one, which others may hold, as far as they are alike."""
    if isinstance(old, list) and isinstance(new, list):
        old[:] = [rewritten(old[n], item) if n < len(old) else item for n, item in enumerate(new)]
        return old
    if isinstance(old, dict) and isinstance(new, dict):
        items = {key: rewritten(old.get(key), item) for key, item in new.items()}
        old.clear()
        old.update(items)
        return old
    if isinstance(old, tuple) and isinstance(new, tuple):
        for item, new_item in zip(old, new, strict=False):
            rewritten(item, new_item)
    return new


class State:
    """The attributes of a module's parts, and of the objects that they hold.

    Args:
        module: It stays as it is.

    Attributes:
        kept: The attributes that a call has bound to tensors that depend on its inputs: they are inputs of the next.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.owned = {
            (id(part), name) for part in module.modules() for name, b in part._buffers.items() if b is not None
        }
        self.kept: set[Place] = set()
        self._numbers: dict[Any, int] = {}

    def read(self, objects: Sequence[Any] = ()) -> dict[Place, Pieces]:
        """Returns all of it by place, also that of objects which are arguments of a call."""
        found: dict[Place, Pieces] = {}
        for attributes in _attributes([*self.module.modules(), *objects]):
            holder = _Same(attributes)
            found.update({(holder, name): Pieces.take(v) for name, v in attributes.items() if name not in _INTERNAL})
        for part in self.module.modules():  # a buffer that was None is no weight of the program
            buffers = part._buffers
            holder = _Same(buffers)
            names = [name for name in buffers if (id(part), name) not in self.owned]
            found.update({(holder, name): Pieces.take(buffers[name]) for name in names})
        return found

    def number(self, read: Mapping[Place, Pieces]) -> int:
        """Returns a number for a state: two states of one number make the same program."""
        attributes = tuple(
            (place, parts.tree, tuple(_mark(leaf, place in self.kept) for leaf in parts.leaves))
            for place, parts in read.items()
        )
        modules = tuple(
            (part, part.training, *map(_Same, (*part._forward_pre_hooks.values(), *part._forward_hooks.values())))
            for part in self.module.modules()
        )
        key = attributes, modules
        return self._numbers.setdefault(key, len(self._numbers))

    def tensors(self, read: Mapping[Place, Pieces]) -> dict[str, torch.Tensor]:
        """Returns those tensors of a state that are inputs of a program, by a name for each."""
        kept = [leaf for place in read if place in self.kept for leaf in read[place].leaves if _is_host(leaf)]
        return {f"(state).{number}": tensor for number, tensor in enumerate(kept)}

    @contextlib.contextmanager
    def entered(self, objects: Sequence[Any], inputs: Mapping[str, torch.Tensor]) -> Iterator[dict[Place, Pieces]]:
        """Puts a program's inputs in the place of these tensors, and takes back what is bound in the context."""
        original = self.read(objects)
        waiting = iter(inputs.values())
        try:
            for place, parts in original.items():
                if place in self.kept:
                    leaves = [next(waiting) if _is_host(leaf) else leaf for leaf in parts.leaves]
                    bind(place, parts._replace(leaves=leaves))
            yield self.read(objects)
        finally:
            for place in changed(original, self.read(objects)):
                bind(place, original.get(place))


def memory(read: Mapping[Place, Pieces]) -> set[int]:
    """Returns where the tensors of a state lie in the host's memory."""
    leaves = (leaf for parts in read.values() for leaf in parts.leaves if _is_host(leaf))
    return {leaf.untyped_storage().data_ptr() for leaf in leaves if leaf.layout == torch.strided}


def bind(place: Place, value: Pieces | None) -> None:
    """Binds an attribute; None: removes it."""
    name = place[1]
    attributes = place[0].value
    if value is None:
        attributes.pop(name, None)
    else:
        attributes[name] = value.whole()


def changed(before: Mapping[Place, Pieces], after: Mapping[Place, Pieces]) -> dict[Place, Pieces | None]:
    """Returns what a call has bound or changed, by place; None where it removed an attribute."""
    found: dict[Place, Pieces | None] = {place: None for place in before if place not in after}
    for place, value in after.items():
        old = before.get(place)
        if old is None or old.container is not value.container:
            value = value._replace(container=None)
        is_same = (
            old is not None and old.tree == value.tree and [*map(_mark, old.leaves)] == [*map(_mark, value.leaves)]
        )
        if not is_same or any(map(_is_written, value.leaves)):
            found[place] = value
    return found


def _mark(leaf: Any, is_input: bool = False) -> Any:
    """Returns what a program depends on of a value."""
    if type(leaf) in CONSTANTS:
        return type(leaf), leaf
    if isinstance(leaf, set) and not _is_long(leaf):
        return frozenset(leaf)
    if isinstance(leaf, numpy.ndarray) and leaf.nbytes <= SMALL:
        return leaf.dtype, leaf.shape, leaf.tobytes()
    if _is_host(leaf):
        version = 0 if leaf.is_inference() else leaf._version
        return (leaf.dtype, leaf.shape) if is_input else _Same(leaf, version)
    return _Same(leaf)


def _is_long(value: Any) -> bool:
    """Returns whether a container, such as a tokenizer's words, is too long to be looked through at each call."""
    return isinstance(value, dict | list | tuple | set) and len(value) > LONG


def _is_written(leaf: Any) -> bool:
    return engine.is_traced(leaf) and engine.was_written(leaf)


def _is_host(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not engine.is_traced(leaf)


def _attributes(things: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Returns the attributes of modules and objects, and of the objects in them."""
    seen = set()
    waiting = list(things)
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        attributes = vars(thing)
        yield attributes
        for name, value in attributes.items():
            if name not in _INTERNAL and type(value) not in CONSTANTS and not _is_long(value):
                waiting.extend(leaf for leaf in _pytree.tree_leaves(value) if is_object(leaf))


def is_object(leaf: Any) -> bool:
    """Returns whether a value has attributes of its own, which upstream's code may bind."""
    if isinstance(leaf, _NO_OBJECTS) or not hasattr(leaf, "__dict__"):
        return False
    return type(leaf).__module__.partition(".")[0] not in _LIBRARIES
