"""One call of a network, in which the values at the borders of its modules are recorded, and replaced by others.

A module has two borders: its arguments and its output. With the original's values at all borders, an error at a border
was made since the border before it: by a module, or by the code between two modules. The yardstick is the original in a
wider dtype.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import math
import weakref
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import torch
from torch.utils import _pytree as pytree

from torchport import engine, patch, shard
from torchport.compile import Compiled, network
from torchport.compile.eager import Eager
from torchport.stages import outputs
from torchport.stages.family import Stage
from torchport.stages.recorder import unit_paths
from torchport.task import Task
from torchport.task.devices import devices
from torchport.verify.yardstick import computing_in, sampled, wide_dtype, wide_module, widened


class Border(NamedTuple):
    """Where a value enters a module or leaves it: `Border("blocks.0.norm", 0, "in")` is that of a norm's arguments."""

    path: str  #: The module's, as `named_modules` gives it; empty for the network.
    number: int  #: Which call of the module in this call of the network, from 0.
    side: str  #: `in` or `out`.


Values = dict[Border, Any]
"""Trees of tensors of the host by border, in the order of the call: of `in`, the arguments by name."""


@dataclasses.dataclass(eq=False)
class WatchedCall:
    """One call of a network with hooks on the modules `paths`: records their arguments and outputs, or replaces them.

    A tensor is replaced only by one of its shape and kind: a port may pad a tensor, or pass a mask in another form.
    """

    network: torch.nn.Module
    paths: Collection[str]
    replacements: Values
    #: Converts a host tensor for the network, to the dtype of its second argument, the tensor replaced.
    to_network: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    to_host: Callable[[torch.Tensor], torch.Tensor]  #: Copies a tensor of the network to the host.
    skipped: Collection[str] = ()  #: Paths of modules that are not called: they return their replacement.
    counts: Callable[[], Mapping[str, int]] = dict  #: Returns how often each patch was called so far.
    #: The borders at which large tensors are recorded whole, and elsewhere only some of their rows; None: all borders.
    whole: Container[Border] | None = None
    observed: Values = dataclasses.field(default_factory=dict)
    #: The patches that were called since the border before, by border.
    patches: dict[Border, frozenset[str]] = dataclasses.field(default_factory=dict)
    autocasts: bool = False  #: Whether a region of CUDA autocast was entered around a module.
    #: By module's path, the numbers of its calls that are not left yet.
    _open_calls: dict[str, list[int]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    _call_counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    _patch_counts: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Puts the hooks on the modules for the length of a `with`, in which the network is called once."""
        self._patch_counts = self.counts()
        modules = {path: module for path, module in self.network.named_modules() if path in self.paths}
        with contextlib.ExitStack() as hooks:
            for path, module in modules.items():
                enter, leave = functools.partial(self._enter, path), functools.partial(self._leave, path)
                hooks.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(leave, with_kwargs=True))
                if path in self.skipped:
                    vars(module)["forward"] = functools.partial(self._skip, path)
                    hooks.callback(vars(module).pop, "forward", None)
            yield

    def _enter(self, path: str, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """The forward pre-hook: records a module's arguments, and returns replaced arguments; None to keep them."""
        number = self._call_counts[path]
        self._call_counts[path] += 1
        self._open_calls[path].append(number)
        border = Border(path, number, "in")
        self.autocasts |= torch.is_autocast_enabled("cuda")
        if path in self.skipped:
            return None
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        self._observe(border, dict(bound.arguments))
        if border not in self.replacements:
            return None
        bound.arguments.update(self._replaced(dict(bound.arguments), self.replacements[border]))
        return bound.args, bound.kwargs

    def _leave(self, path: str, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """The forward hook: records a module's output, and returns a replaced output; None to keep it."""
        border = Border(path, self._open_calls[path].pop(), "out")
        if path in self.skipped:
            return None
        self._observe(border, output)
        return self._replaced(output, self.replacements[border]) if border in self.replacements else None

    def _skip(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """The `forward` of a skipped module: returns its replacement, in the replacement's dtype."""
        value = self.replacements[Border(path, self._open_calls[path][-1], "out")]
        return pytree.tree_map_only(torch.Tensor, lambda leaf: self.to_network(leaf, leaf), value)

    def _observe(self, border: Border, value: Any) -> None:
        """Records what enters or leaves a module, and the patches whose counts rose since the border before."""
        is_whole = self.whole is None or border in self.whole
        keep = self.to_host if is_whole else lambda tensor: sampled(self.to_host(tensor))
        self.observed[border] = pytree.tree_map_only(torch.Tensor, keep, value)
        counts = self.counts()
        self.patches[border] = frozenset(key for key, n in counts.items() if n != self._patch_counts.get(key, 0))
        self._patch_counts = counts

    def _replaced(self, value: Any, replacement: Any) -> Any:
        """Returns `value` with those tensors of `replacement` that fit, converted for the network. A tensor fits if
        both have one shape, and both or neither are floating-point. If the trees differ in structure, the value is
        unchanged; a module's arguments, a dict, are replaced one by one.
        """
        if type(value) is dict and isinstance(replacement, Mapping):
            known = {key: self._replaced(value[key], replacement[key]) for key in value if key in replacement}
            return {**value, **known}
        leaves, structure = pytree.tree_flatten(value)
        replacements, other_structure = pytree.tree_flatten(replacement)
        if structure != other_structure:
            return value
        for number, (leaf, other) in enumerate(zip(leaves, replacements, strict=True)):
            if not isinstance(leaf, torch.Tensor) or not isinstance(other, torch.Tensor):
                continue
            if leaf.shape == other.shape and leaf.is_floating_point() == other.is_floating_point():
                leaves[number] = self.to_network(other, leaf)
        return pytree.tree_unflatten(leaves, structure)


@contextlib.contextmanager
def outputs_kept(modules: Mapping[str, torch.nn.Module], keep: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """Calls `keep(name, tensor)` with the first tensor of each module's output, for the length of a `with`."""
    with contextlib.ExitStack() as hooks:
        for name, module in modules.items():
            hooks.enter_context(module.register_forward_hook(_OutputHook(name, keep)))
        yield


@dataclasses.dataclass(frozen=True)
class _OutputHook:
    """A forward hook of `outputs_kept`; a class of torchport's, which no port counts as its model's part."""

    name: str
    keep: Callable[[str, torch.Tensor], None]

    def __call__(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        tensors = [leaf for leaf in outputs.leaves({"": output}).values() if isinstance(leaf, torch.Tensor)]
        if tensors:
            self.keep(self.name, tensors[0])


_TensorAndCopy = tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]]


@dataclasses.dataclass(eq=False)
class Copies:
    """Copies tensors, as a module may change its input in place: each once until it changes. Keeps weak references."""

    _known: dict[tuple[int, int], _TensorAndCopy] = dataclasses.field(default_factory=dict)  #: By id and version.

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a tensor: the same copy as before, if the tensor has not changed since."""
        key = id(tensor), tensor._version
        original, copy = (reference() for reference in self._known[key]) if key in self._known else (None, None)
        if copy is None or original is not tensor:  # a new tensor can get the id of a freed one
            copy = tensor.detach().clone()
            self._known[key] = weakref.ref(tensor), weakref.ref(copy)
        return copy


def inner_paths(network: torch.nn.Module, path: str) -> list[str]:
    """Returns the path of a module, and those of all modules in it; a `ModuleList` is left out, as none is called."""
    lists = (torch.nn.ModuleList, torch.nn.ModuleDict)
    modules = network.get_submodule(path).named_modules()
    inner = [f"{path}.{name}" for name, module in modules if name and not isinstance(module, lists)]
    return [path, *inner]


def total_bytes(values: Values) -> int:
    """Returns the bytes of all tensors at borders; a tensor that several borders have is counted once."""
    leaves = pytree.tree_leaves(list(values.values()))
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())


class WideNetwork(Eager):
    """A copy of a network in a wider dtype, the yardstick's, to which it casts its inputs."""

    def __init__(self, eager: Eager, dtype: torch.dtype) -> None:
        super().__init__(wide_module(eager.module, dtype), eager.how, eager.outputs, eager.name)
        self.dtype = dtype

    def __call__(self, **inputs: Any) -> Any:
        with computing_in(self.dtype):
            return super().__call__(**widened(inputs, self.dtype))


class Original:
    """The original's network in PyTorch, and its yardstick: a copy in a wider dtype, made when it is first called."""

    def __init__(self, eager: Eager, dtype: torch.dtype) -> None:
        self.eager = eager
        self.dtype = wide_dtype(dtype)
        self.units = unit_paths(eager.module)
        self._wide: WideNetwork | None = None

    def observed(
        self, inputs: Mapping[str, Any], paths: Collection[str], replacements: Values | None = None
    ) -> tuple[Any, Values]:
        """Returns the network's output, and the values that enter and leave the modules `paths`, where `replacements`
        take the place of the network's own. If the network autocasts, its yardstick is made in float64.
        """
        call = WatchedCall(self.eager.module, paths, replacements or {}, to_network=_cast, to_host=Copies())
        with call.watching():
            output = self.eager(**inputs)
        if call.autocasts:  # it would also narrow a yardstick in float32
            self.dtype = torch.float64
        return output, call.observed

    def yardstick(self, inputs: Mapping[str, Any], paths: Collection[str], values: Values) -> tuple[Any, Values]:
        """Calls the copy in a wider dtype; returns its output, and the values at its modules `paths`. In the copy,
        `values` replace a module's arguments and outputs, so that a difference is the module's own.
        """
        if self._wide is None:
            self._wide = WideNetwork(self.eager, self.dtype)
        call = WatchedCall(
            self._wide.module,
            paths,
            # What the network itself gets and returns stays.
            {border: value for border, value in values.items() if border.path},
            to_network=_cast,
            to_host=Copies(),
            whole=(),  # these values are only compared, so some rows of a large tensor are enough
        )
        with call.watching():
            return self._wide(**inputs), call.observed


def _cast(tensor: torch.Tensor, template: torch.Tensor) -> torch.Tensor:
    """Returns a value in the network's own dtype; a copy, as a module may write into it."""
    return tensor.to(template.dtype, copy=True)


class Port:
    """The port's network of a stage, run eagerly on one device, so that hooks see the values at every module.

    A run compiles the same module, with the same patches, precision and attention. What sharding and the compiler
    change is only in the compiled program, which is compared as a whole.
    """

    def __init__(self, task: Task, stage: Stage, folder: Path, ledger: patch.Ledger) -> None:
        self.ledger = ledger
        self.compiled, parts = compiled_network(on_one_device(task), stage, folder)
        self.module = network.module_of(stage, parts)
        # Set only here: `Compiled(jit=False)` would get hooks that look for NaN, and wait for every operator.
        self.compiled.jit = False
        self.units = unit_paths(self.module)

    def called(
        self,
        inputs: Mapping[str, Any],
        paths: Collection[str],
        replacements: Values,
        skipped: Collection[str] = (),
        whole: Container[Border] = (),
    ) -> tuple[Any, WatchedCall]:
        """Calls the port's network; returns its output, and the `WatchedCall` with the recorded values."""
        call = WatchedCall(
            self.module,
            paths,
            replacements,
            to_network=lambda tensor, template: engine.constant(tensor.to(template.dtype)),
            to_host=to_host,
            skipped=skipped,
            counts=functools.partial(call_counts, self.ledger),
            whole=whole,
        )
        with call.watching():
            output = self.compiled(**inputs)
        return output, call


def on_one_device(task: Task) -> Task:
    """Returns a task whose networks run on a single device and without stacks, so that hooks see every module."""
    mesh = dict.fromkeys(task.job.mesh, 1)
    return dataclasses.replace(task, job=task.job.model_copy(update={"mesh": mesh, "stacked": False}))


def compiled_network(task: Task, stage: Stage, folder: Path) -> tuple[Compiled, dict[str, Any]]:
    """Returns a stage's network, sharded over the job's mesh and ready to be called, and the stage's components."""
    mesh = shard.make_mesh(task.job.mesh, devices(task.machine)[: math.prod(task.job.mesh.values())])
    parts = network.loaded(task, stage, folder)
    weights = network.placed(task, stage, parts, mesh, folder)
    return network.compiled(task, stage, network.module_of(stage, parts), weights, mesh), parts


def call_counts(ledger: patch.Ledger) -> dict[str, int]:
    """Returns how often each patch was called so far, by its id."""
    return {record.entry.id: record.calls.count for record in ledger.records}


def to_host(tensor: torch.Tensor | jax.Array) -> torch.Tensor:
    """Returns a copy in the host's memory of a tensor of the host, of the engine or of JAX."""
    if isinstance(tensor, jax.Array):
        return shard.to_torch(tensor)
    return shard.to_torch(engine.array(tensor)) if engine.is_traced(tensor) else tensor.detach().clone()
