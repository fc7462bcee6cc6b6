"""Turns a module and its placed weights into a program on the mesh, through torchax.

The module itself keeps no storage. Its weights are arguments of the program, so every weight is placed, and none
becomes a constant.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import numpy
import torch
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.sharding import NamedSharding, PartitionSpec

from torchport import engine, patch, shard
from torchport.compile import jax_cache, stack
from torchport.compile.eager import FirstNotFinite, How, plainly
from torchport.config import xla_flags
from torchport.config.card import Stack
from torchport.config.strategy import ActivationRule, Rule
from torchport.errors import BadValueError, MachineError, VmemError
from torchport.kernels.attention import dispatch
from torchport.progress import log, waiting
from torchport.shard.activations import constrain
from torchport.stages.constants import Constants, converted
from torchport.stages.outputs import has_tensor, leaves, map_leaves, plain, stage_outputs
from torchport.stages.recorder import Static

LARGE = 2**20
"""Bytes of a constant that XLA would compile slowly: it becomes an argument of its program."""
_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)
"""Modules that are not called: their items are."""


@dataclasses.dataclass(frozen=True)
class Network:
    """All that determines a network's programs beside its mesh, its weights and its inputs."""

    module: torch.nn.Module
    inputs: Sequence[Rule]  #: The rules for the tensors that it is called with.
    name: str  #: The component's name, for errors and the log.
    place: str  #: Where its rules for inputs are written, for errors.
    precision: str  #: The precision of its float32 products.
    places: Sequence[str] = ()  #: Where each of the rules for inputs is written.
    activations: Sequence[ActivationRule] = ()  #: The rules for what its modules return.
    #: Its repeated blocks that become one block of stacked weights, by the path of their list.
    stacks: Mapping[str, Stack] = dataclasses.field(default_factory=dict)
    gathered: Set[str] = frozenset()  #: The weights that each device gathers before it uses them.
    #: Returns where one of the card's fields for this network is written, for errors.
    place_of: Callable[[str], str] = str
    how: How = plainly
    #: The names of its outputs, if more than the first is returned: `Stage.outputs`.
    outputs: Sequence[str] = ()
    #: The outputs that stay on the devices, and are inputs of later calls: `Stage.keeps`.
    keeps: Sequence[str] = ()
    free: Set[str] = frozenset()  #: The outputs in `keeps` whose sharding the compiler chooses: no rule says it.
    #: Whether a rule for inputs may match no input: a caller may leave out optional inputs.
    spare: bool = False
    #: Operators that may compute something else than PyTorch, each with the reason.
    differing: Mapping[str, str] = dataclasses.field(default_factory=dict)
    strict: bool = False  #: Whether an operator is refused that no sample has compared with PyTorch's.

    def operator_record(self) -> engine.Operators:
        """Returns an empty record for the operators that the network calls while it is traced."""
        return engine.Operators(self.differing, self.strict)


@dataclasses.dataclass(frozen=True)
class Origin:
    """How a program was made, and what a call of the program needs."""

    trace: patch.Trace | None  #: The patches' calls while it was traced; None where no ledger counts them.
    jax_cache: bool  #: Whether JAX's cache had it.
    operators: engine.Operators  #: The operators that the program calls.
    #: The large constants: a list, which is the program's first argument; an empty tuple if it takes no such list.
    tables: tuple[list[jax.Array], ...]


def _largest_product(program: Jaxpr) -> int:
    """Returns the bytes of the largest array that a product of the program writes, on all devices together."""
    largest = 0
    for equation in program.eqns:
        sizes = [_largest_product(part) for part in jaxprs_in_params(equation.params)]
        if equation.primitive is jax.lax.dot_general_p:
            array = equation.outvars[0].aval
            sizes.append(array.size * array.dtype.itemsize)
        largest = max(largest, *sizes, 0)
    return largest


class _Bound(torch.nn.Module):
    """A module whose forward calls another module by `how`: only a module's weights can be exchanged for a call."""

    def __init__(self, module: torch.nn.Module, how: How) -> None:
        super().__init__()
        self.module = module
        self.how = how

    def forward(self, **inputs: Any) -> Any:
        return self.how(self.module, **inputs)


class Compiled:
    """A network's forward as programs on a mesh, one for each set of input shapes.

    Args:
        weights: Its weights where their rules put them: arrays, or shapes for a program that is only compiled.
        trace: The patches under which it is traced; a trace under other patches is refused. None: nothing is refused.
        jit: Whether it is compiled. Otherwise PyTorch's operators are called one by one, each on all devices, and NaN
            is looked for in what each module returns; the network must have no stacks.
    """

    batches = True  #: See `family.Call`.
    drops = True  #: Tokens that are masked for good need not be traced.

    def __init__(
        self,
        network: Network,
        weights: Mapping[str, Any],
        mesh: jax.sharding.Mesh,
        *,
        trace: patch.Trace | None = None,
        attention: dispatch.Context = dispatch.NONE,
        jit: bool = True,
    ) -> None:
        """Stacks the network's blocks and their weights; nothing is traced yet."""
        module, stacks = network.module, network.stacks
        constrain(module, network.activations, mesh, network.place_of("activations"))
        counts = self.counts = stack.stack(module, stacks, lambda name: network.place_of(f"stacks.{name}"))
        self.network = network
        self.bound = _Bound(module, network.how)
        self.blocks = tuple(stack.prefix(name, stacks[name]) for name in counts)
        names = stack.names(weights, stacks, counts).items()  # each stacked weight's, and those of the weights in it
        self.gathered = frozenset(name for name, parts in names if any(part in network.gathered for part in parts))
        for prefix in self.blocks:
            stacked = module.get_submodule(prefix.removesuffix(f".{stack.BLOCK}."))
            assert isinstance(stacked, stack.Stacked)
            stacked.gather = functools.partial(self._gathered, prefix)
        self.weights = stack.weights(dict(weights), stacks, counts)
        self.mesh = mesh
        self.precision = network.precision
        self.trace = trace
        self.attention = attention
        self.ledger: patch.Ledger | None = None
        self.jit = jit
        #: The first of its modules that returned NaN or infinity, where that is looked for.
        self.first = None if jit else FirstNotFinite(module, network.name)
        self.seconds = 0.0  #: Spent tracing and compiling in this run so far.
        self.programs: dict[Any, Any] = {}
        self.shardings: dict[tuple[str, tuple[int, ...]], NamedSharding] = {}
        self.operators = network.operator_record()
        self._tables: list[Any] = []  # of the program that was lowered last, as are the compiler's options
        self._options: dict[str, str] = {}
        self._origins: dict[Any, Origin] = {}
        self._used: dict[Any, Origin] = {}  # of the programs that this run has called

    def start_run(self, ledger: patch.Ledger) -> None:
        """Begins a run, the first or a later one with the same weights and programs: clears the seconds and the list of
        programs used. The ledger will be credited with the patches' calls in programs that an earlier run traced.
        """
        self.seconds = 0.0
        self.ledger = ledger
        self._used.clear()

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row for the manifest on each program that this run has called."""
        return [{"jax_cache": origin.jax_cache, "operators": origin.operators.row()} for origin in self._used.values()]

    def operators_text(self) -> str:
        """Returns a line on how many operators this run's programs have, and how many are the same as PyTorch's."""
        operators = self.network.operator_record()
        for origin in self._used.values():
            operators.found |= origin.operators.found
        return operators.text()

    def place(self, **inputs: Any) -> dict[str, Any]:
        """Returns inputs by name as JAX arrays, each sharded by its rule. An input is a tensor or a tree of tensors."""
        name_of_network = self.network.name
        return {name: map_leaves(self._to_device, name, plain(name, x, name_of_network)) for name, x in inputs.items()}

    def shapes(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns inputs by name as `jax.ShapeDtypeStruct`s, each with the sharding of its rule; see `place`."""

        def shape(path: str, leaf: Any) -> jax.ShapeDtypeStruct:
            is_placed = isinstance(leaf, jax.ShapeDtypeStruct)
            return leaf if is_placed else shard.shape(leaf, self._sharding(path, leaf))

        return {name: map_leaves(shape, name, value) for name, value in inputs.items()}

    @torch.inference_mode(False)  # whatever the caller's: a tensor of inference takes no part in a trace
    def __call__(self, **inputs: Any) -> Any:
        """Returns the module's outputs, gathered on the host; those in `Network.keeps` stay on the devices.

        Args:
            **inputs: Tensors of the host, arrays from `place` or from an earlier call, trees of them, and anything
                else as static arguments.

        Returns:
            The first output, or a tuple of all if they have names.
        """
        arrays, static = self._arrays_and_static(inputs)
        with _lack_of_memory_refused(self.network.name):
            if self.jit:
                program, tables = self._program(arrays, static)
                output = program(*tables, *self._arguments(arrays))
            else:
                with self._tracing():
                    output = self._function(static, names=[])(*self._arguments(arrays))
            if not self.network.outputs:
                return shard.to_torch(output)
            named = zip(self.network.outputs, output, strict=True)
            keeps, to_host = self.network.keeps, lambda _, array: shard.to_torch(array)
            return tuple(value if name in keeps else map_leaves(to_host, "", value) for name, value in named)

    @torch.inference_mode(False)
    def prepare(self, **inputs: Any) -> Any:
        """Compiles a call's program; returns `jax.ShapeDtypeStruct`s with shardings, which may be inputs in turn."""
        arrays, static = self._arrays_and_static(inputs)
        with _lack_of_memory_refused(self.network.name):
            return self._program(arrays, static)[0].out_info

    def _arrays_and_static(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Static]:
        """Returns inputs with tensors in them as arrays, sharded by their rules, and others as static arguments."""
        arrays = self.place(**{name: value for name, value in inputs.items() if has_tensor(value)})
        return arrays, tuple(sorted((name, value) for name, value in inputs.items() if name not in arrays))

    def lowered(self, arrays: Mapping[str, Any], static: Static) -> Any:
        """Returns the program of inputs, arrays or `jax.ShapeDtypeStruct`s, traced and lowered, for `compile_lowered`;
        keeps its large constants in `_tables`. Refuses a rule for inputs that matches no input.
        """
        names = list(leaves(arrays))
        # If no output is kept, the trace adds no names.
        if not self.network.keeps:
            self._check_alive(names)
        with self._tracing():
            jit = functools.partial(jax.jit, donate_argnames="caches")
            with engine.wide():
                # The trace adds to `names` the outputs that later calls take as inputs: a rule may be for these.
                program = jit(self._function(static, names))
                traced = program.trace(*self._arguments(arrays))
            traced, self._tables = self._with_tables(traced, self._arguments(arrays), jit)
            written = _largest_product(traced.jaxpr.jaxpr) // self.mesh.size
            self._options = xla_flags.compiler_options(dispatch.platform()[1], written)
            # Lowered without 64-bit types, a loop counts in 32 bits; a TPU has no others.
            lowered = traced.lower()
        self._check_alive(names)
        return lowered

    def compile_lowered(self, lowered: Any) -> Any:
        """Compiles the program that was lowered last."""
        return lowered.compile(compiler_options=self._options)

    def _with_tables(self, traced: Any, arguments: Any, jit: Callable[..., Any]) -> tuple[Any, list[Any]]:
        """Returns a traced program that takes its large constants as its first argument, and these constants: XLA
        compiles large constants slowly. Without large ones, it returns the program as it is, and an empty list.
        """
        closed = traced.jaxpr
        large = [number for number, value in enumerate(closed.consts) if value.nbytes > LARGE]
        if not large:
            return traced, []

        def program(tables: list[Any], weights: Any, inputs: Any, caches: Any) -> Any:
            """Evaluates the traced program with `tables` in place of its large constants."""
            constants = list(closed.consts)
            for number, table in zip(large, tables, strict=True):
                constants[number] = table
            flat = jax.tree.leaves((weights, inputs, caches))
            return jax.tree.unflatten(traced.out_tree, jax.core.eval_jaxpr(closed.jaxpr, constants, *flat))

        where = NamedSharding(self.mesh, PartitionSpec())
        tables = [numpy.asarray(closed.consts[number]) for number in large]
        shapes = [jax.ShapeDtypeStruct(table.shape, table.dtype, sharding=where) for table in tables]
        with engine.wide():  # as in the first trace: the program's values may have 64 bits
            return jit(program).trace(shapes, *arguments), tables

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        """Sets mesh, precision, implementation of attention and record of operators for a trace in the context."""
        if self.trace is not None:
            self.trace.check()
        engine.begin_trace()
        with (
            warnings.catch_warnings(),
            jax.set_mesh(self.mesh),
            jax.default_matmul_precision(self.precision),
            dispatch.context(self.attention),
            engine.watching(self.operators),
            _module_scopes(self.network.module, self.network.name),
        ):
            # A cache that grows has no output of its size.
            warnings.filterwarnings("ignore", "Some donated buffers were not usable", UserWarning)
            yield

    def _function(self, static: Static, names: list[str]) -> Callable[..., Any]:
        """Returns the network as a function of JAX arrays: `program(weights, inputs, caches)`. `names` gets, while the
        function is traced, the paths of the outputs that become inputs of a later call.
        """

        def program(weights: dict[str, jax.Array], inputs: dict[str, Any], caches: dict[str, Any]) -> Any:
            """Calls the network on JAX arrays, and shards the outputs that later calls take as inputs."""
            output = engine.call_torch(functools.partial(self._forward, static), weights, {**inputs, **caches})
            if not self.network.keeps:
                return output
            named = dict(zip(self.network.outputs, output, strict=True))
            ruled = [name for name in self.network.keeps if name not in self.network.free]
            for name in ruled:
                names.extend(leaves({name: named[name]}))
                named[name] = map_leaves(
                    lambda path, array: jax.lax.with_sharding_constraint(array, self._sharding(path, array)),
                    name,
                    named[name],
                )
            return tuple(named.values())

        return program

    def _forward(self, static: Static, weights: dict[str, torch.Tensor], inputs: dict[str, Any]) -> Any:
        """Calls the network in PyTorch with traced `weights` as parameters; refuses what a program cannot repeat."""
        engine.freeze(weights, "a weight or a buffer of the network")
        arguments = {name: value for name, value in inputs.items() if name not in self.network.keeps}
        engine.freeze(arguments, "an argument of the network")
        parameters = {f"module.{name}": self._gathered("", name, weight) for name, weight in weights.items()}
        stacks = [part for part in self.network.module.modules() if isinstance(part, stack.Stacked)]
        for blocks in stacks:
            blocks.reset()
        kwargs = {**inputs, **dict(static)}
        with torch.no_grad(), Constants(engine.is_traced, engine.constant):
            output, rebound = stack.call_with(self.bound, parameters, args=(), kwargs=kwargs)
        for blocks in stacks:
            blocks.check_done()
        engine.check_read(output)
        if rebound:
            name = rebound[0].removeprefix("module.")
            fact = f"'{name}' is bound to another tensor, and a later call would not see that"
            raise BadValueError(self.network.name, fact, "Patch its forward to return it", name=name)
        output = stage_outputs(output, self.network.outputs, self.network.name)
        return converted(output, engine.constant)

    def _check_alive(self, names: list[str]) -> None:
        """Refuses a rule for inputs that matches none of these paths, unless the network may lack inputs."""
        if not self.network.spare:
            shard.check_alive(self.network.inputs, names, self.network.place, self.network.places)

    def _arguments(self, arrays: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]:
        """Returns a program's arguments: weights, inputs, and caches, whose memory is donated to the outputs."""
        caches = {name: value for name, value in arrays.items() if name in self.network.keeps}
        return self.weights, {name: value for name, value in arrays.items() if name not in caches}, caches

    def _gathered(self, prefix: str, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Returns a weight, gathered on each device if its rule says so. Stacked weights are gathered block by block,
        by a call with their block's `prefix`; with the empty prefix they are returned as they are.
        """
        key = prefix + name
        if key not in self.gathered or (not prefix and key.startswith(self.blocks)):
            return weight
        where = NamedSharding(self.mesh, PartitionSpec())
        whole: torch.Tensor = engine.call_jax(jax.lax.with_sharding_constraint, weight, where)
        return whole

    def _program(self, arrays: Mapping[str, Any], static: Static) -> tuple[Any, tuple[list[jax.Array], ...]]:
        """Returns the program of these inputs, compiled at the first call with such shapes, and its large constants."""
        flat, tree = jax.tree_util.tree_flatten(arrays)
        # 1, 1.0 and True are equal keys, but make different programs: `repr` tells them apart.
        key = (static, repr(static), tree, tuple((array.shape, array.dtype, array.sharding) for array in flat))
        if key not in self.programs:
            text = ", ".join(f"{path} {list(array.shape)}" for path, array in leaves(arrays).items() if array.size > 1)
            log.debug("%s takes %s", self.network.name, text)
            start = time.perf_counter()
            self.programs[key], self._origins[key] = self._compiled(arrays, static)
            spent = time.perf_counter() - start
            self.seconds += spent
            log.info("compile %s: %.1f s, %s", self.network.name, spent, self.operators.text())
        elif key not in self._used and self.ledger is not None and (trace := self._origins[key].trace) is not None:
            self.ledger.credit(trace)  # an earlier run traced it, and its ledger counted the patches' calls
        self._used[key] = self._origins[key]
        return self.programs[key], self._origins[key].tables

    def _compiled(self, arrays: Mapping[str, Any], static: Static) -> tuple[Any, Origin]:
        """Compiles the program for these inputs, and returns it with its origin."""
        before = None if self.ledger is None else self.ledger.trace()
        with waiting(f"compile {self.network.name}"):
            self.operators = self.network.operator_record()
            lowered = self.lowered(arrays, static)
            if unknown := self.operators.unknown():
                log.warning("%s calls operators that may differ from PyTorch's: %s", self.network.name, unknown)
            trace = None if self.ledger is None else self.ledger.trace(before)
            with jax_cache.deliveries() as delivered:
                program = self.compile_lowered(lowered)
            where = NamedSharding(self.mesh, PartitionSpec())
            with engine.wide():
                placed = [
                    jax.make_array_from_callback(t.shape, where, lambda index, t=t: t[index]) for t in self._tables
                ]
            return program, Origin(trace, bool(delivered), self.operators, (placed,) if placed else ())

    def _to_device(self, path: str, leaf: torch.Tensor | jax.Array) -> jax.Array:
        """Returns a tensor as an array sharded by its rule, or an array as it is; refuses a leaf without values."""
        if isinstance(leaf, torch.Tensor):
            if leaf.is_meta:
                fact, remedy = f"'{path}' has no values: it was computed with weights on meta", "Add what computes it"
                raise BadValueError(self.network.name, fact, f"{remedy} to the stage's `parts`", name=path)
            return shard.to_jax(leaf, self._sharding(path, leaf))
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            fact = f"'{path}' was an input of an earlier call, which may write over it"
            remedy = "Pass a cache once only, and then the one that the call returned"
            raise BadValueError(self.network.name, fact, remedy)
        return leaf

    def _sharding(self, path: str, tensor: torch.Tensor | jax.Array) -> jax.sharding.NamedSharding:
        """Returns the sharding of an input by its rule, which is looked up once for each shape."""
        key = path, tuple(tensor.shape)
        if key not in self.shardings:
            mesh = dict(self.mesh.shape)
            place = self.network.place
            rule = shard.input_rule(self.network.inputs, path, key[1], mesh, place, self.network.name)
            self.shardings[key] = shard.sharding(rule, self.mesh)
        return self.shardings[key]


@contextlib.contextmanager
def _lack_of_memory_refused(network: str) -> Iterator[None]:
    """Turns XLA's out-of-memory error into a refusal that names the network, with the bytes that XLA requested."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        if "memory space vmem" in str(error):
            reason = " ".join(str(error).split())[:200]
            raise VmemError(network, f"A kernel's tile does not fit: {reason}", "Take a smaller tile") from error
        request = re.search(r"allocat\w* (\d+) bytes|allocate (\S+)\.", str(error))
        size = f" ({request[1] or request[2]} bytes at once)" if request else ""
        fact = f"Its activations do not fit into a device's memory{size}"
        remedy = "Make the video smaller with --set height=, width= or frames=, or run it on a larger machine"
        raise MachineError(network, fact, remedy) from error


@contextlib.contextmanager
def _module_scopes(module: torch.nn.Module, name: str) -> Iterator[None]:
    """Names the operations of a trace after the modules that compute them, while the context lasts.

    An operation of XLA then has a name such as `jit(program)/transformer/blocks.0-53/while/body/block/attn/to_q/dot`.
    Names are no part of what XLA compiles: a program's key and its numbers stay as they are.
    """
    entered: list[Any] = []

    def enter(scope: str) -> None:
        entered.append(jax.named_scope(scope))
        entered[-1].__enter__()

    def leave() -> None:
        entered.pop().__exit__(None, None, None)

    with contextlib.ExitStack() as hooks:
        for part, scope in _scope_names(module, name).items():
            hooks.enter_context(part.register_forward_pre_hook(lambda _, inputs, scope=scope: enter(scope)))
            # Also after an exception: upstream may catch it and go on.
            hooks.enter_context(part.register_forward_hook(lambda _, inputs, output: leave(), always_call=True))
        yield


def _scope_names(module: torch.nn.Module, name: str) -> Mapping[torch.nn.Module, str]:
    """Returns each module's path inside the module that calls it: `attn` for `blocks.0.attn`. A list is not called, so
    a block in it keeps the list's name, `blocks.0`. Stacked blocks are `blocks.0-53`.
    """
    modules = dict(module.named_modules())
    result: dict[torch.nn.Module, str] = {module: name}
    for path, part in modules.items():
        if not path or isinstance(part, _LISTS):
            continue
        parent = path.rpartition(".")[0]
        while parent and isinstance(modules[parent], _LISTS):
            parent = parent.rpartition(".")[0]
        scope = path[len(parent) :].lstrip(".")
        if isinstance(part, stack.Stacked):
            scope = f"{scope}-{part.first + part.count - 1}"
        result[part] = scope
    return result
