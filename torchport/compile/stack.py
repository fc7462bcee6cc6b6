"""Runs a network's repeated blocks as one block under `lax.scan`, over weights that are stacked along a new first dim.

The compiler then sees one block instead of dozens: it takes a fraction of the time, and its temporaries are those of
one. Upstream's own loop stays. Each of its calls of a stacked block is noted, and the last one runs them all: what a
call before it returned may only go to the next block. The tensors beside the carries may differ from call to call.
Where anything else differs, as for a block that guidance skips, another scan begins. The blocks that are not stacked
stay before and after.

Blocks may be stacked if they differ in their weights alone. A block that knows its index, or keeps state between calls,
is refused by name.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import re
import reprlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch.utils import _pytree as tree

from torchport import engine
from torchport.compile import graph
from torchport.config.card import Stack
from torchport.errors import StackError, nearest
from torchport.stages.constants import Constants, converted

BLOCK = "block"
"""The attribute under which the stacked block keeps its template: a part of every stacked weight's name."""
PLAIN = (bool, int, float, str, torch.dtype, tuple, type(None))
"""Types of attributes that are the same in all blocks: others than these are weights, modules and what changes."""
UNSTACKED = "Leave these blocks unstacked: take the stack out of the card, or run with --set stacked=false"
Tensors = tuple[torch.Tensor, ...]
Run = Callable[[Tensors], Tensors]
"""Runs all blocks: called with the first block's inputs named in `carries`, it returns the last block's outputs."""


def call_with(
    module: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[Any, list[str]]:
    """Calls a module with tensors in place of its parameters and buffers.

    Args:
        tensors: By the names of `named_parameters` and `named_buffers`, which name a tensor once.

    Returns:
        What it returns, and the names that its forward has bound to other tensors.
    """
    names = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    bound = {}
    # PyTorch would name what belongs to a module of two names twice, and leave the second tensor in it after the call.
    for prefix, part in module.named_modules():
        for attribute, tensor in (*part._parameters.items(), *part._buffers.items()):
            name = names.get(id(tensor), "")
            if name in tensors:
                bound[f"{prefix}.{attribute}".lstrip(".")] = tensors[name]
    before = dict(bound)
    output = torch.func.functional_call(module, bound, args, dict(kwargs), tie_weights=False)
    return output, [name for name in before if bound[name] is not before[name]]


class Stacked(torch.nn.Module):
    """Several blocks as one: called like one of them, it returns what the last of them would.

    Args:
        block: The first of them; its weights are exchanged for stacked ones before it is called.
        carries: The parameters of its `forward` that a block's outputs become for the next block, in order.
        first: How many blocks of the list come before the stacked ones.
    """

    def __init__(
        self, block: torch.nn.Module, count: int, carries: Sequence[str], name: str, place: str, first: int
    ) -> None:
        super().__init__()
        self.block = block
        self.count = count
        self.carries = tuple(carries)
        self.name = name
        self.place = place
        self.first = first
        #: Called with each weight of a block before the block runs: it gathers sharded weights, a block at a time.
        self.gather: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, weight: weight
        #: Called in place of the blocks, with their inputs and with the function that runs them.
        self.around: Callable[[Tensors, Run], Tensors] | None = None
        #: What upstream's loop called the blocks with, one after the other.
        self.calls: list[_Call] = []
        #: What the last of these calls returned: tensors without values.
        self.pending: Tensors = ()
        #: Whether a block returns a tuple, by its trace.
        self.returns_tuple = False
        #: What the blocks have in common, by id; a block must not change that.
        self.shared: dict[int, Any] = {}
        #: What is not to change from the first call on.
        self.photo: list[Any] = []

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The blocks' class: upstream may ask for it, and for attributes in which all blocks agree."""
        return type(self.__dict__["_modules"]["block"]) if self.__dict__.get("_modules") else Stacked

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the blocks that is the same in all: upstream may ask its block for it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "block" not in self._modules:
                raise
            return _plain_attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute of torchport's; refuses what upstream's code sets, as it does for the other blocks."""
        if "photo" in vars(self) and name not in vars(self):
            raise self._error(f"The network sets '{name}' of a block of '{self.name}'")
        super().__setattr__(name, value)

    def _error(self, fact: str, remedy: str = UNSTACKED, **names: str) -> StackError:
        """Returns the refusal of these blocks; by default the remedy is to leave them unstacked."""
        return StackError(self.place, fact, remedy, name=self.name, **names)

    def reset(self) -> None:
        """Forgets what a call of the network that ended with an error has left."""
        self.calls, self.pending, self.photo = [], (), []

    def noted(self, number: int, /, *args: Any, **kwargs: Any) -> Any:
        """Notes the call of a block before the last. What it returns has no value, and goes to the next block."""
        if number != len(self.calls):
            raise self._error(f"The network calls block {self.first + number} of '{self.name}' out of order")
        self._note(args, kwargs)
        carry = self.calls[-1].carry
        self.pending = engine.call_jax(lambda *arrays: arrays, *converted(carry, engine.constant))
        fact = f"The network computes with what a block of '{self.name}' returned, and stacked blocks run at the last"
        remedy = f"Name all that a block returns under 'carries'. Else {UNSTACKED[0].lower()}{UNSTACKED[1:]}"
        for tensor in self.pending:
            engine.spoil(tensor, self._error(fact, remedy))
        return self.pending if len(self.carries) > 1 else self.pending[0]

    def _note(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Notes a call of a block by its arguments' names; refuses one with other carries than were returned."""
        signature = inspect.signature(self.block.forward)
        given = dict(signature.bind(*args, **kwargs).arguments)
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                given |= given.pop(parameter.name, {})
        missing = [name for name in self.carries if name not in given]
        if missing:
            fact = f"'{missing[0]}' is no argument with which '{self.name}' is called"
            raise self._error(fact, nearest(missing[0], given))
        carry, number = tuple(given.pop(name) for name in self.carries), self.first + len(self.calls)
        for name, tensor in zip(self.carries, carry, strict=True):
            if not isinstance(tensor, torch.Tensor):
                fact = f"The carry '{name}' of '{self.name}' is no tensor, but of the type {type(tensor).__name__}"
                raise self._error(fact, argument=name)
        for name, tensor, pending in zip(self.carries, carry, self.pending, strict=False):
            if tensor is not pending:
                fact = f"Block {number} of '{self.name}' gets a '{name}' that is not what the block before returned"
                raise self._error(fact, argument=name)
        leaves, form = tree.tree_flatten(given)
        engine.check_read([*leaves, *(() if self.pending else carry)])
        if not self.calls:
            self.photo = graph.photo([self.block, *self._modules_of_code()])
        # A copy: upstream may change a list or dict for the next block.
        given = copy.deepcopy(given, {id(leaf): leaf for leaf in leaves})
        self.calls.append(_Call(carry, given, leaves, form, graph.photo([*leaves, *carry])))

    def _modules_of_code(self) -> list[types.ModuleType]:
        """Returns the modules of Python in which the classes of a block are: it may read their globals."""
        names = {type(part).__module__ for part in self.block.modules()}
        return [sys.modules[name] for name in sorted(names & sys.modules.keys()) if not graph.is_of_library(name)]

    def check_done(self) -> None:
        """Refuses a network that called some of the blocks, and not all."""
        if self.calls:
            count = f"{len(self.calls)} of the {self.count}"
            raise self._error(f"The network calls {count} stacked blocks of '{self.name}'")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the last block's outputs, from `lax.scan` over the weights, which are [count, ...] meanwhile."""
        self._note(args, kwargs)
        if len(self.calls) < self.count:
            self.check_done()
        calls, photo = self.calls, self.photo
        self.reset()
        if changed := graph.changes(photo):
            part = _named(*changed[0][:2])
            raise self._error(f"The network changes {part} between its calls of the blocks '{self.name}'")
        for number, call in enumerate(calls):
            if graph.changes(call.photo):
                block = f"'{self.name}.{self.first + number}'"
                raise self._error(f"The network writes to an argument of {block} after that call")
        before_blocks, written = calls[0].carry, set[int]()
        # One scan runs the blocks whose calls are alike.
        starts = [0, *(number for number in range(1, len(calls)) if not calls[number].is_alike(calls[number - 1]))]

        def run(carry: Tensors) -> Tensors:
            """Runs all blocks, by a scan for each group of calls that are alike."""
            for start, stop in itertools.pairwise([*starts, len(calls)]):
                carry = self._scanned(carry, calls[start:stop], range(start, stop), written)
            return carry

        outputs = run(before_blocks) if self.around is None else self.around(before_blocks, run)
        for number in written:
            others = [leaf for call in calls for leaf in call.leaves if isinstance(leaf, torch.Tensor)]
            others += [*before_blocks[:number], *before_blocks[number + 1 :]]
            if any(engine.share_memory(before_blocks[number], other) for other in others):
                name = self.carries[number]
                raise self._error(f"A block of '{self.name}' writes to '{name}', another argument's memory")
            engine.spoil(before_blocks[number], "reads what the stacked blocks wrote to, as it was before them")
        return outputs if len(self.carries) > 1 or self.returns_tuple else outputs[0]

    def _scanned(self, carry: Tensors, calls: Sequence[_Call], blocks: range, written: set[int]) -> Tensors:
        """Returns what the last of some blocks returns, by one scan.

        Args:
            calls: The arguments of each.
            written: The numbers of the carries that a block wrote to are added.
        """
        weights = dict(self.block.named_parameters()) | dict(self.block.named_buffers())
        leaves = calls[0].leaves
        tensors = {number: leaf for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        by_call = {number: [call.leaves[number] for call in calls] for number in tensors}
        varying = {n: values for n, values in by_call.items() if any(value is not leaves[n] for value in values)}
        shared = {number: leaf for number, leaf in tensors.items() if number not in varying}

        def step(carry: Any, layer: Mapping[str, torch.Tensor], given: Mapping[int, torch.Tensor]) -> Any:
            """Runs one block in PyTorch with its layer of the weights, and returns the next block's inputs."""
            # One list under two names stays one, and so does a tensor.
            others = copy.deepcopy(
                calls[0].given, {id(leaf): given.get(number, leaf) for number, leaf in enumerate(leaves)}
            )
            arguments = {**others} | dict(zip(self.carries, carry, strict=True))
            engine.freeze((layer, given), "an argument of a stacked block")
            whole = {name: self.gather(name, weight) for name, weight in layer.items()}
            photo = graph.photo([*others.values(), self.block, *self._modules_of_code()])
            with Constants(engine.is_traced, engine.constant):  # inside the engine's modes, which are entered anew
                outputs, rebound = call_with(self.block, whole, *self._as_passed(arguments))
            if rebound:  # a scan traces one call for all blocks
                fact = f"A block of '{self.name}' sets its own '{rebound[0]}' when it is called"
                raise self._error(fact, attribute=rebound[0])
            self._check_changes(photo)
            written.update(number for number, tensor in enumerate(carry) if engine.was_written(tensor))
            self.returns_tuple = isinstance(outputs, tuple)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            if not all(isinstance(output, torch.Tensor) for output in outputs):
                kinds = ", ".join(type(output).__name__ for output in outputs)
                raise self._error(f"A block of '{self.name}' returns {kinds}, and no tensors")
            return self._next_carry(carry, outputs)

        def scan(carry: Any, layers: Any, shared: Any, varying: Any) -> Any:
            """Calls `step` for one block after the other, in JAX."""
            is_all = len(blocks) == self.count

            def run_block(carry: Any, item: Any) -> Any:
                """Runs one block of the scan: `item` has its weights, its number and what varies from call to call."""
                layer, index, given = item
                if not is_all:  # slices of the weights for some blocks would be copies
                    layer = {k: jax.lax.dynamic_index_in_dim(each, index, keepdims=False) for k, each in layers.items()}
                # A block's weights become arrays of their own first: a product that reads them out of the stack takes
                # a third longer on a TPU, by the compiler's estimate, since it cannot choose how they lie.
                layer = jax.lax.optimization_barrier(layer)
                return engine.call_torch(step, carry, layer, {**shared, **given}), None

            indices = jnp.arange(blocks.start, blocks.stop, dtype=jnp.int32)
            stacked = {number: jnp.stack(values) for number, values in varying.items()}
            return jax.lax.scan(run_block, carry, (layers if is_all else {}, indices, stacked))[0]

        return tuple(engine.call_jax(scan, *converted((carry, weights, shared, varying), engine.constant)))

    def _as_passed(self, arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns a block's arguments by position, if it takes any number of these, and by keyword."""
        parameters = inspect.signature(self.block.forward).parameters
        names = [*parameters]
        rest = [name for name in names if parameters[name].kind is inspect.Parameter.VAR_POSITIONAL]
        if not rest or rest[0] not in arguments:
            return (), arguments
        first = [arguments.pop(name) for name in names[: names.index(rest[0])]]
        return (*first, *arguments.pop(rest[0])), arguments

    def _check_changes(self, photo: list[Any]) -> None:
        """Refuses a block that changes what it was called with, or what was something else before: its trace stands for
        all blocks. A table that it keeps from then on is the same in all.
        """
        kept = {id(thing) for thing, _ in graph.photo([self.block])} - self.shared.keys()
        for thing, part, old, new in graph.changes(photo):
            of_inputs = any(engine.is_traced(engine.on_host(each)) for each, _ in graph.photo([new]))
            if old is not None or of_inputs or id(thing) not in kept:
                raise self._error(f"A block of '{self.name}' changes {_named(thing, part)} when it is called")

    def _next_carry(self, carry: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Tensors:
        """Returns a block's outputs as the next block's inputs; refuses another number, dtype or shape of them."""
        takes, gives = ([f"{t.dtype} {list(t.shape)}".removeprefix("torch.") for t in ts] for ts in (carry, outputs))
        if takes == gives:
            return tuple(outputs)
        remedy = "name the arguments that its outputs become, in their order, under 'carries'"
        if sorted(takes) == sorted(gives) or len(takes) != len(gives):  # these are other arguments, or in another order
            fact = f"'{self.name}' takes {', '.join(takes)} as {', '.join(self.carries)} and returns {', '.join(gives)}"
            raise self._error(fact, remedy[0].upper() + remedy[1:])
        number = next(n for n, take in enumerate(takes) if take != gives[n])
        name, block = self.carries[number], f"'{self.name}.{self.first}', the first stacked block,"
        if carry[number].shape == outputs[number].shape:
            remedy = "cast the carry before the blocks"
        fact = f"{block} takes the carry '{name}' as {takes[number]} and returns it as {gives[number]}"
        raise self._error(fact, f"Leave this block apart with `first: {self.first + 1}`, or {remedy}", carry=name)


def _named(thing: Any, part: graph.Part) -> str:
    """Returns the name of a part that has changed: `'n' of a Counter`."""
    kind = "tensor" if isinstance(thing, torch.Tensor) else type(thing).__name__
    return f"{part[1]!r} of a {kind}" if part[1] != "" else f"a {kind}"


class _Block:
    """Takes the place of a stacked block before the last: it can be called, and asked what all blocks agree in."""

    def __init__(self, stacked: Stacked, number: int) -> None:
        vars(self).update(stacked=stacked, number=number)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(vars(self)["stacked"].block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["stacked"].noted(vars(self)["number"], *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return _plain_attribute(vars(self)["stacked"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses an attribute that upstream's code sets of one block: all blocks are one trace."""
        stacked = vars(self)["stacked"]
        raise stacked._error(f"The network sets '{name}' of a block of '{stacked.name}'")


def _plain_attribute(stacked: Stacked, name: str) -> Any:
    """Returns an attribute of the blocks that is the same in all; refuses a weight, a module or a method of theirs."""
    value = getattr(stacked.block, name)
    if isinstance(value, PLAIN):
        return value
    raise stacked._error(f"The network takes '{name}' of a block of '{stacked.name}'")


class _StackedList(torch.nn.ModuleList):
    """A `ModuleList` of which one item runs all stacked blocks, and gives a function for each block before the last."""

    def _items(self) -> list[Any]:
        """Returns what upstream's code calls, block by block."""
        items: list[Any] = []
        for item in self._modules.values():
            if isinstance(item, Stacked):
                items += [_Block(item, number) for number in range(item.count - 1)]
            items.append(item)
        return items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items())

    def __len__(self) -> int:
        return len(self._items())

    def __getitem__(self, index: Any) -> Any:
        return self._items()[index]


def stack(module: torch.nn.Module, stacks: Mapping[str, Stack], place: Callable[[str], str]) -> dict[str, int]:
    """Stacks blocks of each `ModuleList` in `stacks`, in the network itself, or raises; returns counts by name."""
    counts: dict[str, int] = {}
    for name, entry in stacks.items():
        where = place(name)
        lists = {key: m for key, m in module.named_modules() if isinstance(m, torch.nn.ModuleList) and len(m)}
        if name not in lists:
            raise StackError(where, f"The network has no list of blocks '{name}'", nearest(name, lists), name=name)
        blocks = list(lists[name])
        unstacked = entry.first + entry.last
        count = len(blocks) - unstacked
        if count < 1:
            raise StackError(where, f"'{name}' has {len(blocks)} blocks, and {unstacked} stay apart", "Stack fewer")
        end = entry.first + count
        for number in range(entry.first + 1, end):
            _check_alike(blocks[entry.first], blocks[number], f"{name}.{number}", where)
        stacked = Stacked(blocks[entry.first], count, entry.carries, name, where, entry.first)
        others = {id(thing) for thing, _ in graph.photo(blocks[entry.first + 1 : end])}
        stacked.shared = {id(t): t for t, _ in graph.photo(blocks[entry.first : entry.first + 1]) if id(t) in others}
        parent, _, attribute = name.rpartition(".")
        items = [*blocks[: entry.first], stacked, *blocks[end:]]
        setattr(module.get_submodule(parent), attribute, _StackedList(items))
        counts[name] = count
    return counts


def prefix(name: str, entry: Stack) -> str:
    """Returns how the names of stacked weights begin: `blocks.1.block.` if the first block stays apart."""
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
    """Returns a network's weights with those of stacked blocks stacked along a new first dim, and empties `arrays`.

    Args:
        arrays: Arrays on a mesh, or `jax.ShapeDtypeStruct`s with shardings, by name. They are taken out one by one, so
            that no more than one weight of all blocks is in memory twice.
    """
    stacked: dict[str, Any] = {}
    prefixes = tuple(prefix(name, entry) for name, entry in stacks.items())
    for new, parts in names(list(arrays), stacks, counts).items():
        blocks = [arrays.pop(part) for part in parts]
        first = stacked[new] = blocks[0]
        # A network may have blocks called so itself: only the lists that are stacked count.
        if new.startswith(prefixes):
            where = NamedSharding(first.sharding.mesh, PartitionSpec(None, *first.sharding.spec))
            if isinstance(first, jax.ShapeDtypeStruct):
                stacked[new] = jax.ShapeDtypeStruct((len(blocks), *first.shape), first.dtype, sharding=where)
            else:
                stacked[new] = jax.jit(lambda *arrays: jnp.stack(arrays), out_shardings=where)(*blocks)
    return stacked


def _check_alike(first: torch.nn.Module, other: torch.nn.Module, name: str, place: str) -> None:
    """Refuses a block that differs from the first in anything but the values of its weights."""
    firsts, others = dict(first.named_modules()), dict(other.named_modules())
    pairs = {(id(firsts[path]), id(others[path])) for path in firsts.keys() & others.keys()}
    for path in {**firsts, **others}:
        if type(firsts.get(path)) is not type(others.get(path)):
            fact = f"'{name}' has other modules than the first: '{path}'"
            raise StackError(place, fact, "Leave it unstacked", name=name)
        difference = _difference(firsts[path], others[path], pairs)
        if difference:
            fact = f"'{'.'.join(filter(None, (name, path)))}' differs from the first block's in {difference}"
            remedy = "Only weights may differ: leave the blocks that know their place apart, or unstacked"
            raise StackError(place, fact, remedy, name=name)


def _difference(first: torch.nn.Module, other: torch.nn.Module, pairs: set[tuple[int, int]]) -> str | None:
    """Says how two modules of one class differ in shapes of weights or in settings, not in submodules; else None."""
    for kind in ("_parameters", "_buffers"):
        tensors = [
            {key: (tuple(t.shape), t.dtype) for key, t in getattr(module, kind).items() if t is not None}
            for module in (first, other)
        ]
        if tensors[0] != tensors[1]:
            return f"its weights, {tensors[1]}"
    firsts, others = _settings(first), _settings(other)
    for key in {**firsts, **others}:
        if key not in firsts or key not in others or not graph.are_alike(firsts[key], others[key], pairs):
            return f"'{key}', {reprlib.repr(firsts.get(key))} there and {reprlib.repr(others.get(key))} here"
    return None


def _settings(module: torch.nn.Module) -> dict[str, Any]:
    """Returns a module's attributes, but for weights and submodules, and its hooks."""
    settings = {key: value for key, value in vars(module).items() if key not in graph.INTERNAL or key == "training"}
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    functions = [(hook, getattr(hook, "func", hook)) for hook in hooks]
    # Those of the rules for activations are torchport's, and name each block.
    upstream_hooks = [hook for hook, f in functions if not str(getattr(f, "__module__", "")).startswith("torchport.")]
    return settings | {"forward hooks": len(hooks), "a forward hook": upstream_hooks}


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of a block by upstream's loop."""

    carry: Tensors
    given: dict[str, Any]  #: All other arguments.
    leaves: list[Any]  #: Of them.
    form: Any  #: The tree that they are the leaves of.
    photo: list[Any]  #: All tensors, and what the other leaves lead to.

    def is_alike(self, other: _Call) -> bool:
        """Returns whether the arguments of two calls differ in the values of tensors alone."""
        left_firsts: dict[int, int] = {}  # by a tensor's id, where it is first: a tensor that is passed twice stays so
        right_firsts: dict[int, int] = {}
        if self.form != other.form:
            return False
        for number, (left, right) in enumerate(zip(self.leaves, other.leaves, strict=True)):
            if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
                firsts = left_firsts.setdefault(id(left), number), right_firsts.setdefault(id(right), number)
                is_alike = (left.shape, left.dtype, firsts[0]) == (right.shape, right.dtype, firsts[1])
            else:
                is_plain = isinstance(left, bool | int | float | str | torch.dtype) and type(left) is type(right)
                is_alike = left is right or (is_plain and bool(left == right))
            if not is_alike:
                return False
        return True
