"""Runs a network's repeated blocks as one block under `lax.scan`, over weights that are stacked along a new first dim.

The compiler then sees one block instead of dozens: it takes a fraction of the time, and its temporaries are those of
one. Upstream's own loop stays: the `ModuleList` that it iterates gets one item in place of the stacked blocks. The
blocks that are not stacked stay before and after it.

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
from torchport.stages.constants import Constants, converted

BLOCK = "block"
"""The attribute under which the stacked block keeps its template: a part of every stacked weight's name."""

After = Callable[[Any, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]
"""What is done after each block: `after(index, outputs)` returns the outputs that the next block gets."""

Gather = Callable[[str, torch.Tensor], torch.Tensor]

Run = Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]
"""Runs all blocks: called with the first block's inputs named in `carries`, it returns the last block's outputs."""


def through(carry: tuple[torch.Tensor, ...], run: Run) -> tuple[torch.Tensor, ...]:
    return run(carry)


class Stacked(torch.nn.Module):
    """Several blocks as one: called like one of them, it returns what the last of them would.

    Args:
        block: The first of them; its weights are exchanged for stacked ones before it is called.
        carries: The parameters of its `forward` that a block's outputs become for the next block, in order.
        first: How many blocks of the list come before the stacked ones.
        after: Called after each block, within the scan.
    """

    def __init__(
        self,
        block: torch.nn.Module,
        count: int,
        carries: Sequence[str],
        name: str,
        place: str,
        first: int = 0,
        after: After | None = None,
    ) -> None:
        super().__init__()
        self.block = block
        self.count = count
        self.carries = tuple(carries)
        self.name = name
        self.place = place
        self.first = first
        self.after = after
        #: Called with each weight of a block before the block runs: it gathers sharded weights, a block at a time.
        self.gather: Gather = lambda name, weight: weight
        #: Called in place of the blocks, with their inputs and with the function that runs them.
        self.around: Callable[[tuple[torch.Tensor, ...], Run], tuple[torch.Tensor, ...]] = through

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the last block's outputs, from one `lax.scan` over the weights, which are [count, ...] meanwhile."""
        signature = inspect.signature(self.block.forward)
        given = dict(signature.bind(*args, **kwargs).arguments)
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                given |= given.pop(parameter.name, {})
        missing = [name for name in self.carries if name not in given]
        if missing:
            raise StackError(
                self.place,
                f"'{missing[0]}' is no argument with which '{self.name}' is called",
                nearest(missing[0], given),
                name=self.name,
            )
        weights = dict(self.block.named_parameters()) | dict(self.block.named_buffers())
        others = {key: value for key, value in given.items() if key not in self.carries}
        tensors = {key: value for key, value in others.items() if _has_tensor(value)}
        static = {key: value for key, value in others.items() if key not in tensors}
        state = _attributes(self.block)

        written: set[int] = set()

        def step(carry: Any, layer: Mapping[str, torch.Tensor], index: Any, fixed: Any) -> Any:
            """Runs one block in PyTorch with its layer of the weights, and returns the next block's inputs."""
            arguments = {**fixed, **static} | dict(zip(self.carries, carry, strict=True))
            engine.freeze((layer, fixed), "an argument of a stacked block")
            whole = {name: self.gather(name, weight) for name, weight in layer.items()}
            unchanged = dict(whole)
            with Constants(engine.is_traced, engine.constant):  # inside the engine's modes, which are entered anew
                outputs = torch.func.functional_call(self.block, whole, (), arguments)
            self._check_state(unchanged, whole)  # `functional_call` puts there what is assigned anew
            written.update(number for number, tensor in enumerate(carry) if engine.was_written(tensor))
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            if self.after is not None:
                outputs = self.after(index, outputs)
            return self._next_carry(carry, outputs)

        def scan(carry: Any, layers: Any, fixed: Any) -> Any:
            """Calls `step` for one block after the other, in JAX."""

            def run_block(carry: Any, item: Any) -> Any:
                # A block's weights become arrays of their own first: a product that reads them out of the stack takes
                # a third longer on a TPU, by the compiler's estimate, since it cannot choose how they lie.
                layer = jax.lax.optimization_barrier(item[0])
                return engine.call_torch(step, carry, layer, item[1], fixed), None

            return jax.lax.scan(run_block, carry, (layers, jnp.arange(self.count, dtype=jnp.int32)))[0]

        def run(carry: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return tuple(engine.call_jax(scan, *converted((carry, weights, tensors), engine.constant)))

        before_blocks = tuple(given[name] for name in self.carries)
        outputs = self.around(before_blocks, run)
        self._check_state(state, _attributes(self.block))
        for number in written:
            engine.spoil(before_blocks[number], "reads what the stacked blocks wrote to, as it was before them")
        return outputs if len(self.carries) > 1 else outputs[0]

    def _next_carry(self, carry: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Returns a block's outputs as the next block's inputs; refuses another number, dtype or shape of them."""
        takes, gives = ([f"{t.dtype} {list(t.shape)}".removeprefix("torch.") for t in ts] for ts in (carry, outputs))
        if takes == gives:
            return tuple(outputs)
        remedy = "name the arguments that its outputs become, in their order, under 'carries'"
        if sorted(takes) == sorted(gives) or len(takes) != len(gives):  # these are other arguments, or in another order
            fact = f"'{self.name}' takes {', '.join(takes)} as {', '.join(self.carries)} and returns {', '.join(gives)}"
            raise StackError(self.place, fact, remedy[0].upper() + remedy[1:], name=self.name)
        number = next(n for n, take in enumerate(takes) if take != gives[n])
        name, block = self.carries[number], f"'{self.name}.{self.first}', the first stacked block,"
        if carry[number].shape == outputs[number].shape:
            remedy = "cast the carry before the blocks"
        raise StackError(
            self.place,
            f"{block} takes the carry '{name}' as {takes[number]} and returns it as {gives[number]}",
            f"Leave this block apart with `first: {self.first + 1}`, or {remedy}",
            name=self.name,
            carry=name,
        )

    def _check_state(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Refuses a block that sets its own attributes when it is called: a scan traces one call for all blocks."""
        changed = [key for key in after if key not in before or after[key] is not before[key]]
        if changed:
            raise StackError(
                self.place,
                f"A block of '{self.name}' sets its own '{changed[0]}' when it is called",
                "Leave these blocks unstacked: take the stack out of the card, or run with --set stacked=false",
                name=self.name,
                attribute=changed[0],
            )


class _StackedList(torch.nn.ModuleList):
    """A `ModuleList` with one item for all stacked blocks: it can be iterated over, but not indexed."""

    def __init__(self, items: Sequence[torch.nn.Module], name: str, place: str) -> None:
        super().__init__(items)
        self.name = name
        self.place = place

    def __getitem__(self, index: Any) -> Any:
        fact = f"The network takes blocks out of '{self.name}' by their numbers, and stacked blocks are one"
        raise StackError(
            self.place, fact, "Leave these blocks unstacked: take the stack out of the card", name=self.name
        )


def stack(module: torch.nn.Module, stacks: Mapping[str, Stack], place: Callable[[str], str]) -> dict[str, int]:
    """Stacks blocks of each `ModuleList` in `stacks`, in the network itself, or raises; returns counts by name."""
    counts: dict[str, int] = {}
    for name, entry in stacks.items():
        where = place(name)
        lists = {key: m for key, m in module.named_modules() if isinstance(m, torch.nn.ModuleList) and len(m)}
        if name not in lists:
            raise StackError(where, f"The network has no list of blocks '{name}'", nearest(name, lists), name=name)
        blocks = list(lists[name])
        apart = entry.first + entry.last
        count = len(blocks) - apart
        if count < 1:
            raise StackError(where, f"'{name}' has {len(blocks)} blocks, and {apart} stay apart", "Stack fewer")
        end = entry.first + count
        for number in range(entry.first + 1, end):
            _check_alike(blocks[entry.first], blocks[number], f"{name}.{number}", where)
        stacked = Stacked(blocks[entry.first], count, entry.carries, name, where, entry.first)
        parent, _, attribute = name.rpartition(".")
        items = [*blocks[: entry.first], stacked, *blocks[end:]]
        setattr(module.get_submodule(parent), attribute, _StackedList(items, name, where))
        counts[name] = count
    return counts


def prefix(name: str, entry: Stack) -> str:
    return f"{name}.{entry.first}.{BLOCK}."


def names(keys: Iterable[str], stacks: Mapping[str, Stack], counts: Mapping[str, int]) -> dict[str, list[str]]:
    """Returns, for each weight of the stacked network, the original weights in it: one, or one for each block."""
    parts_by_name: dict[str, list[str]] = {}
    for key in keys:
        new = key
        for name, entry in stacks.items():
            match = re.fullmatch(rf"{re.escape(name)}\.(\d+)\.(.*)", key)
            if match and entry.first <= int(match[1]) < entry.first + counts[name]:
                new = prefix(name, entry) + match[2]
            elif match and int(match[1]) >= entry.first:
                new = f"{name}.{int(match[1]) - counts[name] + 1}.{match[2]}"
        parts_by_name.setdefault(new, []).append(key)
    number = re.compile(r"\.(\d+)\.")
    for parts in parts_by_name.values():
        parts.sort(key=lambda part: [int(n) for n in number.findall(part)])
    return parts_by_name


def weights(arrays: dict[str, Any], stacks: Mapping[str, Stack], counts: Mapping[str, int]) -> dict[str, Any]:
    """Returns a network's weights with those of stacked blocks stacked, and empties `arrays`.

    Args:
        arrays: Arrays on a mesh, or `jax.ShapeDtypeStruct`s with shardings, by name. They are taken out one by one, so
            that no more than one weight of all blocks is in memory twice.
    """
    stacked: dict[str, Any] = {}
    prefixes = tuple(prefix(name, entry) for name, entry in stacks.items())
    for new, parts in names(list(arrays), stacks, counts).items():
        blocks = [arrays.pop(part) for part in parts]
        # A network may have blocks called so itself: only the lists that are stacked count.
        stacked[new] = _stacked(blocks) if new.startswith(prefixes) else blocks[0]
    return stacked


def _stacked(parts: Sequence[Any]) -> Any:
    """Stacks one weight of all blocks along a new first dim, which is not sharded; of shapes it returns a shape."""
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
    """Says how two modules of one class differ in shapes of weights or in settings, not in submodules; else None."""
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
    """Returns a module's attributes of plain types, such as numbers, and the methods that the instance overrides."""
    plain = (bool, int, float, str, torch.dtype, tuple, type(None))
    attributes = vars(module)
    settings = {key: value for key, value in attributes.items() if isinstance(value, plain)}
    methods = {key: value for key, value in attributes.items() if callable(value) and hasattr(type(module), key)}
    return settings | methods


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Returns the public attributes of a block and its submodules, by path: all but weights, submodules and hooks."""
    return {
        f"{name}.{key}".lstrip("."): value
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if not key.startswith("_")
    }


def _has_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, tuple | list) and any(map(_has_tensor, value)))
