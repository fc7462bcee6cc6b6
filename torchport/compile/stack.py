"""Runs a network's repeated blocks as one block under `lax.scan`, over weights that are stacked along a new first dim.

The compiler then sees one block instead of dozens: it takes a fraction of the time, and its temporaries are those of
one. Upstream's own loop stays: the `ModuleList` that it iterates gets one item in place of the stacked blocks. The
blocks that are not stacked follow it.

Blocks may be stacked if they differ in their weights alone. A block that knows its index, or keeps state between calls,
is refused by name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.sharding import NamedSharding, PartitionSpec

from torchport import engine
from torchport.config.card import Stack
from torchport.errors import StackError, nearest
from torchport.patch.live.exchange import PATCH

BLOCK = "block"
"""The attribute under which the stacked block keeps its template: a part of every stacked weight's name."""

After = Callable[[Any, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]
"""What is done after each block: `after(index, outputs)` returns the outputs that the next block gets."""


Gather = Callable[[str, torch.Tensor], torch.Tensor]


class Stacked(torch.nn.Module):
    """Several blocks as one: called like one of them, it returns what the last of them would.

    Args:
        block: The first of them; its weights are exchanged for stacked ones before it is called.
        count: How many they are.
        carries: The parameters of its `forward` that a block's outputs become for the next block, in order.
        name: What errors call them.
        place: Where the stack is declared.
        after: Called after each block, within the scan.

    Attributes:
        gather: Called for each of a block's weights, by name, before the block is: what makes them whole, one block at
            a time.
    """

    def __init__(
        self,
        block: torch.nn.Module,
        count: int,
        carries: Sequence[str],
        name: str,
        place: str,
        after: After | None = None,
    ) -> None:
        super().__init__()
        self.block = block
        self.count = count
        self.carries = tuple(carries)
        self.name = name
        self.place = place
        self.after = after
        self.gather: Gather = lambda name, weight: weight

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the outputs of the last block; weights are [count, ...] while this is called."""
        bound = inspect.signature(self.block.forward).bind(*args, **kwargs)
        missing = [name for name in self.carries if name not in bound.arguments]
        if missing:
            raise StackError(
                self.place,
                f"'{missing[0]}' is no argument with which '{self.name}' is called",
                nearest(missing[0], bound.arguments),
                name=self.name,
            )
        weights = dict(self.block.named_parameters()) | dict(self.block.named_buffers())
        tensors, static = _split({key: value for key, value in bound.arguments.items() if key not in self.carries})
        before = _state(self.block)

        def step(carry: Any, layer: Mapping[str, torch.Tensor], index: Any, fixed: Any) -> Any:
            arguments = _merge(fixed, static) | dict(zip(self.carries, carry, strict=True))
            whole = {name: self.gather(name, weight) for name, weight in layer.items()}
            outputs = torch.func.functional_call(self.block, whole, (), arguments)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            if self.after is not None:
                outputs = self.after(index, outputs)
            return self._next_carry(carry, outputs)

        def scan(carry: Any, layers: Any, fixed: Any) -> Any:
            def run_block(carry: Any, item: Any) -> Any:
                # A block's weights become arrays of their own first: a product that reads them out of the stack takes
                # a third longer on a TPU, by the compiler's estimate, since it cannot choose how they lie.
                layer = jax.lax.optimization_barrier(item[0])
                return engine.call_torch(step, carry, layer, item[1], fixed), None

            return jax.lax.scan(run_block, carry, (layers, jnp.arange(self.count)))[0]

        outputs = engine.call_jax(scan, tuple(bound.arguments[name] for name in self.carries), weights, tensors)
        self._check_state(before)
        return outputs if len(self.carries) > 1 else outputs[0]

    def _next_carry(self, carry: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Returns a block's outputs, which the next block can take."""
        kinds = [[(tuple(t.shape), t.dtype) for t in tensors] for tensors in (carry, outputs)]
        if kinds[0] != kinds[1]:
            raise StackError(
                self.place,
                f"'{self.name}' takes {kinds[0]} as {', '.join(self.carries)} and returns {kinds[1]}",
                "Name the arguments that its outputs become, in their order, under 'carries'",
                name=self.name,
            )
        return tuple(outputs)

    def _check_state(self, before: Mapping[str, Any]) -> None:
        """Refuses a block that kept something of its call: under a scan there is one call for all blocks."""
        after = _state(self.block)
        changed = [key for key in after if key not in before or after[key] is not before[key]]
        if changed:
            raise StackError(
                self.place,
                f"A block of '{self.name}' sets its own '{changed[0]}' when it is called",
                "Leave these blocks unstacked: take the stack out of the card, or run with --set stacked=false",
                name=self.name,
                attribute=changed[0],
            )


def stack(module: torch.nn.Module, stacks: Mapping[str, Stack], place: Callable[[str], str]) -> dict[str, int]:
    """Puts stacked blocks in the place of the `ModuleList`s that are declared, and returns how many each has.

    Args:
        module: The network, changed in place.
        stacks: By the list's name in the network.
        place: Where a stack is written, by its name.

    Raises:
        StackError: There is no such list, or its blocks differ in more than their weights.
    """
    counts: dict[str, int] = {}
    for name, entry in stacks.items():
        where = place(name)
        lists = {key: m for key, m in module.named_modules() if isinstance(m, torch.nn.ModuleList) and len(m)}
        if name not in lists:
            raise StackError(where, f"The network has no list of blocks '{name}'", nearest(name, lists), name=name)
        blocks = list(lists[name])
        count = len(blocks) - entry.last
        if count < 1:
            raise StackError(where, f"'{name}' has {len(blocks)} blocks, and {entry.last} stay apart", "Stack fewer")
        for number, block in enumerate(blocks[1:count], 1):
            _check_alike(blocks[0], block, f"{name}.{number}", where)
        stacked = Stacked(blocks[0], count, entry.carries, name, where)
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, torch.nn.ModuleList([stacked, *blocks[count:]]))
        counts[name] = count
    return counts


def names(keys: Iterable[str], stacks: Mapping[str, Stack], counts: Mapping[str, int]) -> dict[str, list[str]]:
    """Returns the weights that make up each weight of a stacked network: one, or one of each stacked block in order.

    Args:
        keys: The weights' names before stacking.
        stacks: As `stack` takes them.
        counts: How many blocks of each list are stacked.
    """
    parts_by_name: dict[str, list[str]] = {}
    for key in keys:
        new = key
        for name in stacks:
            match = re.fullmatch(rf"{re.escape(name)}\.(\d+)\.(.*)", key)
            if match and int(match[1]) < counts[name]:
                new = f"{name}.0.{BLOCK}.{match[2]}"
            elif match:
                new = f"{name}.{int(match[1]) - counts[name] + 1}.{match[2]}"
        parts_by_name.setdefault(new, []).append(key)
    number = re.compile(r"\.(\d+)\.")
    for parts in parts_by_name.values():
        parts.sort(key=lambda part: [int(n) for n in number.findall(part)])
    return parts_by_name


def weights(arrays: dict[str, Any], stacks: Mapping[str, Stack], counts: Mapping[str, int]) -> dict[str, Any]:
    """Returns a network's weights with those of stacked blocks stacked; what was stacked is taken out of `arrays`.

    Args:
        arrays: By name: placed arrays, or `jax.ShapeDtypeStruct`s with shardings. Emptied, so that at no time more than
            one weight of all blocks is held twice.
        stacks: As `stack` takes them.
        counts: How many blocks of each list are stacked.
    """
    stacked: dict[str, Any] = {}
    for new, parts in names(list(arrays), stacks, counts).items():
        blocks = [arrays.pop(part) for part in parts]
        # A network may have blocks called so itself: only the lists that are stacked count.
        stacked[new] = _stacked(blocks) if any(new.startswith(f"{name}.0.{BLOCK}.") for name in stacks) else blocks[0]
    return stacked


def _stacked(parts: Sequence[Any]) -> Any:
    spec = parts[0].sharding.spec
    where = NamedSharding(parts[0].sharding.mesh, PartitionSpec(None, *spec))
    if isinstance(parts[0], jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(parts), *parts[0].shape), parts[0].dtype, sharding=where)
    return jax.jit(lambda *blocks: jnp.stack(blocks), out_shardings=where)(*parts)


def _check_alike(first: torch.nn.Module, other: torch.nn.Module, name: str, place: str) -> None:
    """Refuses a block that differs from the first in anything but the values of its weights."""
    ours, theirs = dict(first.named_modules()), dict(other.named_modules())
    for key in [*ours, *(key for key in theirs if key not in ours)]:
        if key not in ours or key not in theirs or type(ours[key]) is not type(theirs[key]):
            raise StackError(
                place, f"'{name}' has other modules than the first: '{key}'", "Leave it unstacked", name=name
            )
        difference = _difference(ours[key], theirs[key])
        if difference:
            raise StackError(
                place,
                f"'{'.'.join(filter(None, (name, key)))}' differs from the first block's in {difference}",
                "Only weights may differ: leave the blocks that know their place apart, or unstacked",
                name=name,
            )


def _difference(first: torch.nn.Module, other: torch.nn.Module) -> str | None:
    """Returns in what two modules of one class differ, their own weights and settings only."""
    for kind in ("_parameters", "_buffers"):
        tensors = [
            {key: (tuple(t.shape), t.dtype) for key, t in getattr(module, kind).items() if t is not None}
            for module in (first, other)
        ]
        if tensors[0] != tensors[1]:
            return f"its weights, {tensors[1]}"
    mine, its = _settings(first), _settings(other)
    key = next((key for key in [*mine, *its] if mine.get(key) != its.get(key)), None)
    return None if key is None else f"'{key}', {mine.get(key)!r} there and {its.get(key)!r} here"


def _settings(module: torch.nn.Module) -> dict[str, Any]:
    """Returns a module's plain attributes, and which methods it has in place of its class's: whose, if a patch's."""
    plain = (bool, int, float, str, torch.dtype, tuple, type(None))
    attributes = vars(module)
    settings = {key: value for key, value in attributes.items() if isinstance(value, plain)}
    methods = {key: value for key, value in attributes.items() if callable(value) and hasattr(type(module), key)}
    return settings | {key: getattr(method, PATCH, method) for key, method in methods.items()}


def _state(module: torch.nn.Module) -> dict[str, Any]:
    """Returns what a block and its parts keep: attributes beside weights, modules and hooks."""
    return {
        f"{name}.{key}".lstrip("."): value
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if not key.startswith("_")
    }


def _split(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns arguments that hold tensors, whole or in a tuple, and the others."""
    with_tensors = {key for key, value in arguments.items() if _has_tensor(value)}
    return {k: v for k, v in arguments.items() if k in with_tensors}, {
        k: v for k, v in arguments.items() if k not in with_tensors
    }


def _has_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, tuple | list) and any(map(_has_tensor, value)))


def _merge(tensors: Mapping[str, Any], static: Mapping[str, Any]) -> dict[str, Any]:
    return {**tensors, **static}
