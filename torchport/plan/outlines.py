"""A network that is data alone, for planning: its class, configuration, inputs and rules, where there is no model card.

A sketch says nothing of weights, encoders or a loop; it has what the time of a step depends on. As an `outline`, it is
compiled in a process of its own for a TPU that is not there.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import pydantic
import torch

from torchport import compile, engine, load, patch, shard
from torchport.attention import dispatch, tiles
from torchport.config import Frozen, checkout, read_document, validated
from torchport.config.card import ActivationRule, Axis, ClassPath, DType, Rule, Spec, Stack
from torchport.config.machine import chip, parse_machine
from torchport.config.pack import find_pack
from torchport.errors import BadValueError, TopologyError, UnknownNameError, nearest
from torchport.plan.collectives import exchanges
from torchport.processes import child
from torchport.shard import grid
from torchport.tpu import absent, hlo

NETWORK = "network"
"""What errors call it."""


class Input(Frozen):
    """A tensor that the network is called with; `name.0`, `name.1` are the parts of a tuple."""

    shape: list[pydantic.PositiveInt]
    dtype: DType | Literal["int32", "int64"]


class Drawn(Frozen):
    """One strategy of a sketch."""

    weights: list[Rule]
    inputs: list[Rule]
    activations: list[ActivationRule] = []
    attention_inputs: Spec | None = None
    """Where queries, keys and values [B, H, S, D] are before attention, if the program says so."""
    attention_output: Spec | None = None
    """Likewise, what attention returns."""


class Sketch(Frozen):
    """A file of `configs/published/outlines`."""

    title: str
    class_: ClassPath = pydantic.Field(alias="class")
    source: str
    """Where the configuration is published."""
    config: dict[str, Any]
    dtype: DType
    float32: list[str] = []
    """Parts of the names of weights that stay in float32, as upstream's own loading keeps them."""
    height: pydantic.PositiveInt
    width: pydantic.PositiveInt
    frames: pydantic.PositiveInt
    batch: pydantic.PositiveInt
    """Conditions of guidance in one call."""
    inputs: dict[str, Input]
    static: dict[str, bool | int | float | str | None] = {}
    patches: list[str]
    stacks: dict[str, Stack] = {}
    strategies: dict[str, Drawn]


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is asked of a sketch.

    Attributes:
        file: Where it lies.
        machine: A TPU slice.
        mesh: Axes and their sizes.
        strategy: One of its own.
        attention: The kernel.
        path: The pack whose patches it needs; None: torchport's own.
    """

    file: str
    machine: str
    mesh: dict[Axis, int]
    strategy: str
    attention: tiles.KernelName
    path: str | None = None


def read(file: Path, shown: str | None = None) -> Sketch:
    """Returns a sketch.

    Raises:
        ConfigError: The file has a mistake, by its line.
    """
    return validated(Sketch, read_document(file, shown))


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of the model of a step, in seconds, before any factor; see `plan`.

    Attributes:
        attention_s: The largest attention, as often as the program calls it, at `peak_percent`.
        other_s: The compiler's estimate of all but kernels and collectives.
        communication_s: Bytes over links.
        peak_percent: The kernel's share of peak, of the table of tiles.
    """

    attention_s: float
    other_s: float
    communication_s: float
    peak_percent: float


def parts(asked: Asked) -> Parts:
    """Returns the model of a sketch's step; its program is compiled in a process of its own.

    Raises:
        TopologyError: No libtpu, no such slice, or a program that the compiler refuses, for one that it does not fit.
        TorchportError: Whatever the sketch is refused for.
    """
    kind = chip(parse_machine(asked.machine, asked.file))
    if kind is None:
        raise BadValueError(asked.file, f"The machine {asked.machine} is no TPU", "Name a slice such as v6e:2x4")
    name = asked.machine.partition(":")[0]
    with tempfile.TemporaryDirectory(prefix="torchport-sketch-") as scratch:
        dump = Path(scratch) / "hlo"
        found = child.call(
            "torchport.plan.outlines:compiled",
            asked,
            ended=lambda end: TopologyError(
                f"sketch {asked.file}", f"The compiler {end}", "Mend that, or plan another size"
            ),
            environment=absent.compiling(dump),
        )
        program = hlo.read(dump)
    call = max(found["attention"], key=lambda call: call["queries"] * call["keys"])
    flops = 4 * math.prod(call[size] for size in ("batch", "heads", "queries", "keys", "head_size"))
    row = tiles.row(name, asked.attention, call["head_size"], call["bounded"])
    loops = [loop for loop in program.loop_bodies() if program.kernels(loop.body)]
    times = max(loops, key=lambda loop: loop.cycles).trips if loops else sum(program.kernels().values())
    peak = kind.flops * math.prod(asked.mesh.values()) * row.peak_percent / 100
    moved = exchanges(program, None, grid.read(found["spots"]))
    return Parts(
        attention_s=times * flops / peak,
        other_s=program.cycles() / kind.clock,
        communication_s=sum(one.seconds(name) for one in moved),
        peak_percent=row.peak_percent,
    )


def compiled(asked: Asked) -> dict[str, Any]:
    """Compiles a sketch; the program itself is in the dump.

    Returns:
        `attention`, the calls of it, and `spots`, where the mesh's devices are, in its order.

    Raises:
        UnknownNameError: A strategy that the sketch has not.
        MeshError: What cannot be divided.
        TopologyError: What the compiler refuses.
    """
    drawn = read(Path(asked.file))
    if asked.strategy not in drawn.strategies:
        fact = f"It has no strategy '{asked.strategy}'"
        raise UnknownNameError(asked.file, fact, nearest(asked.strategy, drawn.strategies))
    machine = parse_machine(asked.machine, asked.file)
    shard.check_mesh(asked.mesh, machine.devices, machine.name, asked.file)
    mesh = shard.make_mesh(asked.mesh, absent.describe(machine).devices)
    entries = patch.read(find_pack(asked.path).patches, ["torchax", *drawn.patches])
    strategy, calls = drawn.strategies[asked.strategy], list[dispatch.Traced]()
    with patch.applied(entries, stage="denoise") as ledger:
        found = {op.target: _around(op.target, op.function, strategy, mesh) for op in ledger.ops()}
        with engine.operators(found), checkout.hushed(True):
            program = _program(drawn, strategy, mesh, asked, calls)
            inputs = {
                name: torch.empty(one.shape, dtype=getattr(torch, one.dtype), device="meta")
                for name, one in drawn.inputs.items()
            }
            lowered = program.lowered(program.shapes(inputs), tuple(sorted(drawn.static.items())))
            try:
                lowered.compile()
            except jax.errors.JaxRuntimeError as error:
                said = " ".join(str(error).split())[:300]
                raise TopologyError(asked.file, f"The compiler refuses it: {said}", "Mend its rules") from error
    spots = grid.spots(list(mesh.devices.flat))
    return {
        "attention": [dataclasses.asdict(call) for call in calls],
        "spots": [dataclasses.astuple(spot) for spot in spots],
    }


def _around(target: str, function: Callable[..., Any], strategy: Drawn, mesh: jax.sharding.Mesh) -> Callable[..., Any]:
    """Returns attention with its operands and its output where the strategy puts them; any other operator as it is."""
    if not target.endswith(":scaled_dot_product_attention"):
        return function

    def attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        put = functools.partial(_put, strategy.attention_inputs, mesh)
        return _put(strategy.attention_output, mesh, function(put(query), put(key), put(value), *args, **kwargs))

    return attention


def _put(spec: Spec | None, mesh: jax.sharding.Mesh, tensor: Any) -> Any:
    if spec is None:
        return tensor
    where = shard.sharding(Rule(match=".*", spec=spec), mesh)
    return engine.call_jax(jax.lax.with_sharding_constraint, tensor, where)


def _program(
    drawn: Sketch, strategy: Drawn, mesh: jax.sharding.Mesh, asked: Asked, calls: list[dispatch.Traced]
) -> compile.Compiled:
    def note(one: Any) -> None:
        if isinstance(one, dispatch.Traced):  # and not a kernel beside attention
            calls.append(one)

    module = _network(drawn)
    held = dict(module.named_parameters()) | dict(module.named_buffers())
    rules = shard.match(strategy.weights, shard.named_shapes(held), asked.mesh, asked.file)
    weights = {name: shard.shape(tensor, shard.sharding(rules[name], mesh)) for name, tensor in held.items()}
    network = compile.Network(
        module,
        strategy.inputs,
        NETWORK,
        place=asked.file,
        precision="default",
        activations=strategy.activations,
        stacks=drawn.stacks,
        place_of=lambda what: f"{asked.file} {what}",
        how=_gathered,
    )
    return compile.Compiled(network, weights, mesh, attention=dispatch.Context(asked.attention, {}, note))


def _network(drawn: Sketch) -> torch.nn.Module:
    """Returns the network on meta, in the dtypes that it would be loaded in."""
    module: torch.nn.Module = load.published(drawn.class_, drawn.config, "the sketch's")
    module.to(getattr(torch, drawn.dtype))
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if set(drawn.float32) & set(name.split(".")):
            tensor.data = tensor.data.to(torch.float32)
    return module


def _gathered(module: torch.nn.Module, **inputs: Any) -> Any:
    """Calls a network: inputs named `name.0`, `name.1` and so on are one tuple."""
    whole: dict[str, Any] = {}
    for name, value in sorted(inputs.items()):
        start, _, _ = name.partition(".")
        whole[start] = (*whole.get(start, ()), value) if start != name else value
    return module(**whole)


def check_size(drawn: Sketch, size: Mapping[str, int], place: str) -> None:
    """Refuses a sketch of another size than is asked for.

    Raises:
        BadValueError: By the first of height, width, frames and batch that differs.
    """
    for name, asked in size.items():
        if getattr(drawn, name) != asked:
            fact = f"'{name}' is {asked}, and the sketch '{drawn.title}' has {getattr(drawn, name)}"
            raise BadValueError(place, fact, "Name a sketch of this size", key=name)
