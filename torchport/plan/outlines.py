"""A network that is data alone, for planning: its class, configuration, inputs and rules, where there is no model card.

An outline says nothing of weights, encoders or a loop; it has what the time of a step depends on. It is compiled in a
process of its own for a TPU that is not there.
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
from torchport.config.machine import parse_machine
from torchport.config.pack import find_pack
from torchport.errors import BadValueError, TopologyError, UnknownNameError, nearest
from torchport.plan.collectives import collectives, seconds
from torchport.plan.figures import Parts
from torchport.plan.step_time import block_loop
from torchport.processes import child
from torchport.shard import grid
from torchport.tpu import absent, hlo

NETWORK = "network"
"""What errors call it."""


class OutlineInput(Frozen):
    """A tensor that the network is called with; `name.0`, `name.1` are the parts of a tuple."""

    shape: list[pydantic.PositiveInt]
    dtype: DType | Literal["int32", "int64"]


class OutlineStrategy(Frozen):
    """One strategy of an outline."""

    weights: list[Rule]
    inputs: list[Rule]
    activations: list[ActivationRule] = []
    attention_inputs: Spec | None = None
    """Where queries, keys and values [B, H, S, D] are before attention, if the program says so."""
    attention_output: Spec | None = None
    """Likewise, what attention returns."""


class Outline(Frozen):
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
    inputs: dict[str, OutlineInput]
    static: dict[str, bool | int | float | str | None] = {}
    patches: list[str]
    stacks: dict[str, Stack] = {}
    strategies: dict[str, OutlineStrategy]


@dataclasses.dataclass(frozen=True)
class OutlineJob:
    """An outline on a slice: what is compiled.

    Attributes:
        file: Where it lies.
        machine: A TPU slice.
        mesh: Axes and their sizes.
        strategy: One of its own.
        attention: The kernel.
        paths: The packs whose patches it needs, on top of the shipped one.
    """

    file: str
    machine: str
    mesh: dict[Axis, int]
    strategy: str
    attention: tiles.KernelName
    paths: tuple[str, ...] = ()


def read(file: Path, shown: str | None = None) -> Outline:
    """Returns an outline.

    Raises:
        ConfigError: The file has a mistake, by its line.
    """
    return validated(Outline, read_document(file, shown))


@dataclasses.dataclass(frozen=True)
class StepParts:
    """The parts of the model of a step.

    Attributes:
        parts: In seconds; attention is the largest call, as often as the program calls it, at `peak_percent`.
        peak_percent: The kernel's share of peak, of the table of tiles.
    """

    parts: Parts[float]
    peak_percent: float


def step_parts(job: OutlineJob) -> StepParts:
    """Returns the model of an outline's step; its program is compiled in a process of its own.

    Raises:
        TopologyError: No libtpu, no such slice, or a program that the compiler refuses, for one that it does not fit.
        TorchportError: Whatever the outline is refused for.
    """
    fact = f"The machine {job.machine} is no TPU"
    chip = parse_machine(job.machine, job.file).require_tpu(job.file, "Name a slice such as v6e:2x4", fact)
    with tempfile.TemporaryDirectory(prefix="torchport-outline-") as scratch:
        dump = Path(scratch) / "hlo"
        calls, spots = child.call(
            "torchport.plan.outlines:compiled",
            job,
            ended=lambda end: TopologyError(
                f"outline {job.file}", f"The compiler {end}", "Mend that, or plan another size"
            ),
            environment=absent.compiling(dump),
        )
        program = hlo.read(dump)
    call = max(calls, key=lambda call: call.queries * call.keys)
    flops = 4 * call.batch * call.heads * call.queries * call.keys * call.head_size
    row = tiles.row(chip.name, job.attention, call.head_size, call.bounded)
    loop = block_loop(program)
    times = loop.trips if loop else sum(program.kernels().values())
    peak = chip.flops * math.prod(job.mesh.values()) * row.peak_percent / 100
    parts = Parts[float](
        attention_s=times * flops / peak,
        other_s=program.cycles() / chip.clock,
        communication_s=seconds(collectives(program, None, spots), chip),
    )
    return StepParts(parts, row.peak_percent)


def compiled(job: OutlineJob) -> tuple[list[dispatch.Traced], list[grid.Spot]]:
    """Compiles an outline; the program itself is in the dump.

    Returns:
        The calls of attention, and where the mesh's devices are, in its order.

    Raises:
        UnknownNameError: A strategy that the outline has not.
        MeshError: What cannot be divided.
        TopologyError: What the compiler refuses.
    """
    outline = read(Path(job.file))
    if job.strategy not in outline.strategies:
        fact = f"It has no strategy '{job.strategy}'"
        raise UnknownNameError(job.file, fact, nearest(job.strategy, outline.strategies))
    machine = parse_machine(job.machine, job.file)
    shard.check_mesh(job.mesh, machine.devices, machine.name, job.file)
    mesh = shard.make_mesh(job.mesh, absent.describe(machine).devices)
    entries = patch.read(find_pack(job.paths).folders, ["torchax", *outline.patches])
    strategy, calls = outline.strategies[job.strategy], list[dispatch.Traced]()
    with patch.applied(entries, stage="denoise") as ledger:
        operators = {op.target: _around(op.target, op.function, strategy, mesh) for op in ledger.ops()}
        with engine.operators(operators), checkout.hushed(True):
            program = _program(outline, strategy, mesh, job, calls)
            inputs = {
                name: torch.empty(one.shape, dtype=getattr(torch, one.dtype), device="meta")
                for name, one in outline.inputs.items()
            }
            lowered = program.lowered(program.shapes(inputs), tuple(sorted(outline.static.items())))
            try:
                lowered.compile()
            except jax.errors.JaxRuntimeError as error:
                said = " ".join(str(error).split())[:300]
                raise TopologyError(job.file, f"The compiler refuses it: {said}", "Mend its rules") from error
    return calls, grid.spots(list(mesh.devices.flat))


def _around(
    target: str, function: Callable[..., Any], strategy: OutlineStrategy, mesh: jax.sharding.Mesh
) -> Callable[..., Any]:
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
    outline: Outline, strategy: OutlineStrategy, mesh: jax.sharding.Mesh, job: OutlineJob, calls: list[dispatch.Traced]
) -> compile.Compiled:
    def note(one: Any) -> None:
        if isinstance(one, dispatch.Traced):  # and not a kernel beside attention
            calls.append(one)

    module = _network(outline)
    held = dict(module.named_parameters()) | dict(module.named_buffers())
    rules = shard.match(strategy.weights, shard.named_shapes(held), job.mesh, job.file)
    weights = {name: shard.shape(tensor, shard.sharding(rules[name], mesh)) for name, tensor in held.items()}
    network = compile.Network(
        module,
        strategy.inputs,
        NETWORK,
        place=job.file,
        precision="default",
        activations=strategy.activations,
        stacks=outline.stacks,
        place_of=lambda what: f"{job.file} {what}",
        how=_gathered,
    )
    return compile.Compiled(network, weights, mesh, attention=dispatch.Context(job.attention, {}, note))


def _network(outline: Outline) -> torch.nn.Module:
    """Returns the network on meta, in the dtypes that it would be loaded in."""
    module: torch.nn.Module = load.published(outline.class_, outline.config, "the outline's")
    module.to(getattr(torch, outline.dtype))
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if set(outline.float32) & set(name.split(".")):
            tensor.data = tensor.data.to(torch.float32)
    return module


def _gathered(module: torch.nn.Module, **inputs: Any) -> Any:
    """Calls a network: inputs named `name.0`, `name.1` and so on are one tuple."""
    whole: dict[str, Any] = {}
    for name, value in sorted(inputs.items()):
        start, _, _ = name.partition(".")
        whole[start] = (*whole.get(start, ()), value) if start != name else value
    return module(**whole)


def check_size(outline: Outline, size: Mapping[str, int], place: str) -> None:
    """Refuses an outline of another size than the one that is needed.

    Raises:
        BadValueError: By the first of height, width, frames and batch that differs.
    """
    for name, needed in size.items():
        if getattr(outline, name) != needed:
            fact = f"'{name}' is {needed}, and the outline '{outline.title}' has {getattr(outline, name)}"
            raise BadValueError(place, fact, "Name an outline of this size", key=name)
