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
import functools
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
        tensors: By the names of `named_parameters` and `named_buffers`; a tensor that modules share has one name there.

    Returns:
        The module's output, and the names of weights that its forward has bound to other tensors.
    """
    names = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    exchanged = {}
    # `tie_weights=True` would exchange the tensors of a module with two names twice, and leave the new ones in it.
    for prefix, part in module.named_modules():
        for attribute, tensor in (*part._parameters.items(), *part._buffers.items()):
            name = names.get(id(tensor), "")
            if name in tensors:
                exchanged[f"{prefix}.{attribute}".lstrip(".")] = tensors[name]
    before = dict(exchanged)
    output = torch.func.functional_call(module, exchanged, args, dict(kwargs), tie_weights=False)
    # PyTorch has written to `exchanged` the tensors that the module had at the end of the call.
    return output, [name for name in before if exchanged[name] is not before[name]]


class Stacked(torch.nn.Module):
    """Several blocks as one module: a call with the arguments of a block returns the output of the last block.

    Args:
        block: The first block; its weights are exchanged for stacked ones before it is called.
        carries: The parameters of `forward` that get the outputs of the block before, in their order.
        name: The path of the list of blocks, for errors; `place`: where the card names it.
        first: How many blocks of the list come before the stacked ones.
    """

    def __init__(
        self, block: torch.nn.Module, count: int, carries: Sequence[str], name: str, place: str, first: int
    ) -> None:
        """Notes the stack's blocks; their weights are stacked later, by `weights`."""
        super().__init__()
        self.block = block
        self.count = count
        self.carries = tuple(carries)
        self.name = name
        self.place = place
        self.first = first
        #: Gathers a sharded weight of a block before the block runs, so that one block is gathered at a time.
        self.gather: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, weight: weight
        #: Takes the place of a call of the blocks: it gets their inputs and the function that runs them all.
        self.around: Callable[[Tensors, Run], Tensors] | None = None
        #: The calls of the blocks by upstream's loop, in their order.
        self.calls: list[_Call] = []
        #: Tensors without values, which the last of these calls returned.
        self.pending: Tensors = ()
        #: Whether a block returns a tuple; known once it is traced.
        self.returns_tuple = False
        #: The objects that all blocks refer to, by id; no block may change them.
        self.shared: dict[int, Any] = {}
        #: A photo of the objects that must not change between the first call and the last.
        self.photo: list[Any] = []

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The blocks' class: upstream may ask for the class of a block in its list."""
        return type(self.__dict__["_modules"]["block"]) if self.__dict__.get("_modules") else Stacked

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute that is the same in all blocks: upstream may read attributes of a block in its list."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "block" not in self._modules:
                raise
            return _plain_attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute of `__init__`; refuses any other, which upstream's code would set for one block alone."""
        if "photo" in vars(self) and name not in vars(self):
            raise self._error(f"The network sets '{name}' of a block of '{self.name}'")
        super().__setattr__(name, value)

    def _error(self, fact: str, remedy: str = UNSTACKED, **names: str) -> StackError:
        """Returns the refusal of these blocks; by default the remedy is to leave them unstacked."""
        return StackError(self.place, fact, remedy, name=self.name, **names)

    def reset(self) -> None:
        """Forgets the calls of blocks noted so far, such as those that a failed call of the network has left."""
        self.calls, self.pending, self.photo = [], (), []

    def noted(self, number: int, /, *args: Any, **kwargs: Any) -> Any:
        """Notes the call of block `number`, not the last; returns tensors without values, for the next block alone."""
        if number != len(self.calls):
            raise self._error(f"The network calls block {self.first + number} of '{self.name}' out of order")
        self._note(args, kwargs)
        carry = self.calls[-1].carry
        # New tensors of the carry's shapes: a block's outputs have the shapes of its carry.
        self.pending = engine.call_jax(lambda *arrays: arrays, *converted(carry, engine.constant))
        fact = f"The network computes with what a block of '{self.name}' returned, and stacked blocks run at the last"
        remedy = f"Name all that a block returns under 'carries'. Else {UNSTACKED[0].lower()}{UNSTACKED[1:]}"
        for tensor in self.pending:
            engine.spoil(tensor, self._error(fact, remedy))
        return self.pending if len(self.carries) > 1 else self.pending[0]

    def _note(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Notes a block's call, its arguments by name; refuses carries other than the outputs of the block before."""
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
        for name, tensor, pending in zip(self.carries, carry, self.pending, strict=False):  # none before block 0
            if tensor is not pending:
                fact = f"Block {number} of '{self.name}' gets a '{name}' that is not what the block before returned"
                raise self._error(fact, argument=name)
        leaves, form = tree.tree_flatten(given)
        # Carries that another block returned are spoiled for all but the next block.
        engine.check_read(leaves if self.pending else [*leaves, *carry])
        if not self.calls:
            self.photo = graph.photo([self.block, *self._modules_of_code()])
        # Upstream may change a list or dict for the next block. The copy has the same tensors.
        given = copy.deepcopy(given, {id(leaf): leaf for leaf in leaves})
        self.calls.append(_Call(carry, given, leaves, form, graph.photo([*leaves, *carry])))

    def _modules_of_code(self) -> list[types.ModuleType]:
        """Returns the Python modules that define the classes of a block's parts: a block may read their globals."""
        names = {type(part).__module__ for part in self.block.modules()}
        return [sys.modules[name] for name in sorted(names & sys.modules.keys()) if not graph.is_of_library(name)]

    def check_done(self) -> None:
        """Refuses a network that has called some of the blocks and not all, by the calls noted so far."""
        if self.calls:
            count = f"{len(self.calls)} of the {self.count}"
            raise self._error(f"The network calls {count} stacked blocks of '{self.name}'")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Notes the last block's call, runs all blocks by `lax.scan`, and returns the last block's outputs. The
        parameters of `block` are weights of the shape [count, ...] during this call.
        """
        self._note(args, kwargs)
        if len(self.calls) < self.count:  # the network has left out a block before the last
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
        before_blocks = calls[0].carry
        written = set[int]()
        # One scan runs the blocks whose calls are alike.
        starts = [0, *(number for number in range(1, len(calls)) if not calls[number].is_alike(calls[number - 1]))]

        def run(carry: Tensors) -> Tensors:
            """Returns the last block's outputs, by a scan for each group of calls that are alike."""
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
        """Returns the last output of blocks whose calls are alike; `written` gets the numbers of written carries."""
        weights = dict(self.block.named_parameters()) | dict(self.block.named_buffers())
        leaves = calls[0].leaves
        tensors = {number: leaf for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        # Arguments that differ from call to call are stacked as the weights are; the others are the same in all blocks.
        by_call = {number: [call.leaves[number] for call in calls] for number in tensors}
        varying = {n: values for n, values in by_call.items() if any(value is not leaves[n] for value in values)}
        shared = {number: leaf for number, leaf in tensors.items() if number not in varying}
        torch_block = functools.partial(self._run_block, calls[0], written)

        def scan(carry: Any, layers: Any, shared: Any, varying: Any) -> Any:
            """Calls `torch_block` for one block after the other in JAX, and returns the last block's outputs."""
            is_all = len(blocks) == self.count

            def run_block(carry: Any, item: Any) -> Any:
                layer, index, given = item
                if not is_all:  # slices of the weights for some blocks would be copies
                    layer = {k: jax.lax.dynamic_index_in_dim(each, index, keepdims=False) for k, each in layers.items()}
                return engine.call_torch(torch_block, carry, layer, {**shared, **given}), None

            indices = jnp.arange(blocks.start, blocks.stop, dtype=jnp.int32)
            stacked = {number: jnp.stack(values) for number, values in varying.items()}
            return jax.lax.scan(run_block, carry, (layers if is_all else {}, indices, stacked))[0]

        return tuple(engine.call_jax(scan, *converted((carry, weights, shared, varying), engine.constant)))

    def _run_block(
        self,
        call: _Call,
        written: set[int],
        carry: Any,
        layer: Mapping[str, torch.Tensor],
        given: Mapping[int, torch.Tensor],
    ) -> Tensors:
        """Runs one block in PyTorch, and returns the next carry. A scan traces this once for all its blocks. `call` is
        that of the first block, `layer` has the weights by name, and `given` the tensors by their number in
        `call.leaves`. `written` gets the numbers of the carries that the block writes to.
        """
        # By one deepcopy, so that an object that two arguments share stays shared.
        leaves = {id(leaf): given.get(number, leaf) for number, leaf in enumerate(call.leaves)}
        others = copy.deepcopy(call.given, leaves)
        arguments = others | dict(zip(self.carries, carry, strict=True))
        engine.freeze((layer, given), "an argument of a stacked block")
        whole = {name: self.gather(name, weight) for name, weight in layer.items()}
        photo = graph.photo([*others.values(), self.block, *self._modules_of_code()])
        with Constants(engine.is_traced, engine.constant):  # inside the engine's modes, which are entered anew
            outputs, rebound = call_with(self.block, whole, *self._as_passed(arguments))
        if rebound:
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

    def _as_passed(self, arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns a block's arguments as `args` and `kwargs`. All are keywords, unless its forward has a `*args`."""
        parameters = inspect.signature(self.block.forward).parameters
        names = [*parameters]
        rest = [name for name in names if parameters[name].kind is inspect.Parameter.VAR_POSITIONAL]
        if not rest or rest[0] not in arguments:
            return (), arguments
        first = [arguments.pop(name) for name in names[: names.index(rest[0])]]
        return (*first, *arguments.pop(rest[0])), arguments

    def _check_changes(self, photo: list[Any]) -> None:
        """Refuses a block that changes an argument, or an attribute that had a value: all blocks have one trace. A
        block may give a new attribute a value that depends on no input, such as a table: it is the same for all blocks.
        """
        kept = {id(thing) for thing, _ in graph.photo([self.block])} - self.shared.keys()  # of this block alone
        for thing, part, old, new in graph.changes(photo):
            depends_on_inputs = any(engine.is_traced(engine.on_host(each)) for each, _ in graph.photo([new]))
            if old is not None or depends_on_inputs or id(thing) not in kept:
                raise self._error(f"A block of '{self.name}' changes {_named(thing, part)} when it is called")

    def _next_carry(self, carry: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Tensors:
        """Returns a block's outputs as the next block's carry; refuses outputs of other number, dtypes or shapes."""
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
    kind = "tensor" if isinstance(thing, torch.Tensor) else type(thing).__name__
    return f"{part[1]!r} of a {kind}" if part[1] != "" else f"a {kind}"


class _Block:
    """Takes the place of a stacked block before the last: a call is noted, and attributes equal in all can be read."""

    def __init__(self, stacked: Stacked, number: int) -> None:
        vars(self).update(stacked=stacked, number=number)  # `__setattr__` would refuse

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The blocks' class: upstream may ask for the class of a block in its list."""
        return type(vars(self)["stacked"].block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["stacked"].noted(vars(self)["number"], *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return _plain_attribute(vars(self)["stacked"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses to set an attribute, as upstream's code would do for one block: all blocks have one trace."""
        stacked = vars(self)["stacked"]
        raise stacked._error(f"The network sets '{name}' of a block of '{stacked.name}'")


def _plain_attribute(stacked: Stacked, name: str) -> Any:
    """Returns an attribute of the blocks that is the same in all; refuses a weight, a module or a method of theirs."""
    value = getattr(stacked.block, name)
    if isinstance(value, PLAIN):
        return value
    raise stacked._error(f"The network takes '{name}' of a block of '{stacked.name}'")


class _StackedList(torch.nn.ModuleList):
    """A `ModuleList` of all blocks for upstream's loop: `_Block`s, which note calls, and the `Stacked` at last."""

    def _items(self) -> list[Any]:
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
    """Replaces blocks in a network by one `Stacked` for each list of blocks, and returns how many blocks each has, by
    the list's path. Refuses a list that is absent or too short, and blocks that differ in more than weights.
    """
    counts: dict[str, int] = {}
    for name, card_stack in stacks.items():
        where = place(name)
        lists = {key: m for key, m in module.named_modules() if isinstance(m, torch.nn.ModuleList) and len(m)}
        if name not in lists:
            raise StackError(where, f"The network has no list of blocks '{name}'", nearest(name, lists), name=name)
        blocks = list(lists[name])
        start, unstacked = card_stack.first, card_stack.first + card_stack.last
        count = len(blocks) - unstacked
        if count < 1:
            raise StackError(where, f"'{name}' has {len(blocks)} blocks, and {unstacked} stay apart", "Stack fewer")
        end = start + count
        for number in range(start + 1, end):
            _check_alike(blocks[start], blocks[number], f"{name}.{number}", where)
        stacked = Stacked(blocks[start], count, card_stack.carries, name, where, start)
        others = {id(thing) for thing, _ in graph.photo(blocks[start + 1 : end])}
        stacked.shared = {id(t): t for t, _ in graph.photo(blocks[start : start + 1]) if id(t) in others}
        parent, _, attribute = name.rpartition(".")
        items = [*blocks[:start], stacked, *blocks[end:]]
        setattr(module.get_submodule(parent), attribute, _StackedList(items))
        counts[name] = count
    return counts


def prefix(name: str, card_stack: Stack) -> str:
    """Returns how the names of stacked weights begin: `blocks.1.block.` if the first block of `blocks` is unstacked."""
    return f"{name}.{card_stack.first}.{BLOCK}."


def names(keys: Iterable[str], stacks: Mapping[str, Stack], counts: Mapping[str, int]) -> dict[str, list[str]]:
    """Returns, by each name in the stacked network, the names of the original weights in that weight, block by block:
    `{"blocks.0.block.w": ["blocks.0.w", "blocks.1.w"], "norm.w": ["norm.w"]}`.
    """
    parts_by_name: dict[str, list[str]] = {}
    for key in keys:
        new = key
        for name, card_stack in stacks.items():
            match = re.fullmatch(rf"{re.escape(name)}\.(\d+)\.(.*)", key)
            if match and card_stack.first <= int(match[1]) < card_stack.first + counts[name]:
                new = prefix(name, card_stack) + match[2]
            elif match and int(match[1]) >= card_stack.first:  # after the stack, which counts as one item
                new = f"{name}.{int(match[1]) - counts[name] + 1}.{match[2]}"
        parts_by_name.setdefault(new, []).append(key)
    number = re.compile(r"\.(\d+)\.")
    for parts in parts_by_name.values():
        parts.sort(key=lambda part: [int(n) for n in number.findall(part)])
    return parts_by_name


def weights(arrays: dict[str, Any], stacks: Mapping[str, Stack], counts: Mapping[str, int]) -> dict[str, Any]:
    """Returns a network's weights, arrays on a mesh or `jax.ShapeDtypeStruct`s with shardings, with those of stacked
    blocks stacked along a new first dim. They are taken out of `arrays` one by one, so that no more than one weight of
    all blocks is in memory twice.
    """
    stacked: dict[str, Any] = {}
    prefixes = tuple(prefix(name, card_stack) for name, card_stack in stacks.items())
    for new, parts in names(list(arrays), stacks, counts).items():
        blocks = [arrays.pop(part) for part in parts]
        first = stacked[new] = blocks[0]
        # By name: a stack of one block gets the new dim, too, and a network may have modules called `block`.
        if new.startswith(prefixes):
            where = NamedSharding(first.sharding.mesh, PartitionSpec(None, *first.sharding.spec))
            if isinstance(first, jax.ShapeDtypeStruct):
                stacked[new] = jax.ShapeDtypeStruct((len(blocks), *first.shape), first.dtype, sharding=where)
            else:
                stacked[new] = jax.jit(lambda *arrays: jnp.stack(arrays), out_shardings=where)(*blocks)
    return stacked


def _check_alike(first: torch.nn.Module, other: torch.nn.Module, name: str, place: str) -> None:
    """Refuses a block that differs from the first in anything but the values of its weights."""
    firsts = dict(first.named_modules())
    others = dict(other.named_modules())
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
    """Returns, in words, how two modules of a class differ in shapes of weights or in settings; None if they agree."""
    for kind in ("_parameters", "_buffers"):
        tensors = [
            {key: (tuple(t.shape), t.dtype) for key, t in getattr(module, kind).items() if t is not None}
            for module in (first, other)
        ]
        if tensors[0] != tensors[1]:
            return f"its weights, {tensors[1]}"
    firsts = _settings(first)
    others = _settings(other)
    for key in {**firsts, **others}:
        if key not in firsts or key not in others or not graph.are_alike(firsts[key], others[key], pairs):
            return f"'{key}', {reprlib.repr(firsts.get(key))} there and {reprlib.repr(others.get(key))} here"
    return None


def _settings(module: torch.nn.Module) -> dict[str, Any]:
    """Returns a module's attributes without weights and submodules, and its upstream hooks, by name."""
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
    given: dict[str, Any]  #: All other arguments, by name.
    leaves: list[Any]  #: The leaves of `given`.
    form: Any  #: The tree of `given`, without its leaves.
    photo: list[Any]  #: A photo of all arguments as they were at the call.

    def is_alike(self, other: _Call) -> bool:
        """Returns whether the arguments of two calls differ in the values of tensors alone."""
        # By a tensor's id, its first number among the leaves: tensors passed twice must be passed twice in both calls.
        left_firsts: dict[int, int] = {}
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
