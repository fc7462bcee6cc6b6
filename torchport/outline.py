"""One stage of a job as shapes alone: its network on meta, its inputs as the verb itself makes them, its program.

Run as `python -P -m torchport.outline REQUEST OUTCOME` (both JSON files) it compiles the stage for a TPU that is not
there; the environment, the folder of the dump included, has to be set before libtpu is loaded: a process of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import torch

from torchport import compile, load, patch, pipelines, shard, topology, upstream
from torchport.attention import dispatch
from torchport.errors import BadValueError, TopologyError, TorchportError
from torchport.task import Request, Task, accept, check_heads, published


class _CalledError(Exception):
    """The network is called for the first time: with these inputs."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        super().__init__()
        self.inputs = inputs


class _Recorder:
    """Stands where a compiled network stands, up to its first call."""

    batches = True
    drops = True

    def place(self, **inputs: torch.Tensor) -> dict[str, Any]:
        """Returns the inputs: only their shapes count."""
        return inputs

    def __call__(self, **inputs: Any) -> torch.Tensor:
        """Raises what the verb would have passed."""
        raise _CalledError(inputs)


@dataclasses.dataclass(frozen=True)
class Outline:
    """A stage's program before it is lowered.

    Attributes:
        program: The network on the mesh, its weights shapes alone.
        inputs: Shapes of its inputs, placed.
        static: What is no tensor.
        flops: Of one call, counted by PyTorch on shapes alone: every matrix product, attention with padding included.
        calls: Of attention; filled while the program is lowered.
    """

    program: compile.Compiled
    inputs: dict[str, jax.ShapeDtypeStruct]
    static: compile.Static
    flops: int
    calls: list[dispatch.Traced]


@contextlib.contextmanager
def outlined(task: Task, stage: pipelines.Stage, devices: Any) -> Iterator[Outline]:
    """Gives a stage as shapes alone, under its patches; what is traced must be traced inside.

    Args:
        task: The job.
        stage: One with a network whose inputs' shapes are known beforehand (`Stage.like`).
        devices: Of the machine, or of a topology.

    Raises:
        BadValueError: The stage has no network, or does not say what its inputs are like.
    """
    if stage.network is None or stage.like is None:
        raise BadValueError(f"--stage {stage.name}", "Its inputs are not known beforehand", "Plan the stage 'denoise'")
    with upstream.on_path(task.upstream), patch.applied(task.patches([stage]), stage=stage.name) as ledger:
        with compile.operators({op.target: op.function for op in ledger.ops()}), load.hushed(True):
            check_heads(task)
            parts = _parts(task, stage)
            inputs = _inputs(task, stage, parts)
            yield _outline(task, stage, parts[stage.network], inputs, devices)


def _parts(task: Task, stage: pipelines.Stage) -> dict[str, Any]:
    """Returns the stage's parts as the checkpoint, or its published configuration, has them; none has storage."""
    parts: dict[str, Any] = {}
    for name in stage.parts:
        component = task.card.components[name]
        parts[name] = load.class_of(component.class_)() if component.dtype is None else published(task, name)
    for name in (*stage.meta, str(stage.network)):
        parts[name] = published(task, name)
    parts[str(stage.network)].to(task.settings.dtypes[str(stage.network)])
    if stage.prepare is not None:
        stage.prepare(parts, task.settings)
    return parts


def _inputs(task: Task, stage: pipelines.Stage, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the verb calls the network with: the verb itself says it."""
    assert stage.like is not None
    try:
        stage.run(parts, _Recorder(), task.settings, pipelines.Steps(), **stage.like(parts, task.settings))
    except _CalledError as called:
        return called.inputs
    raise BadValueError(f"--stage {stage.name}", "It never calls its network", "Report this: its verb is at fault")


def _outline(task: Task, stage: pipelines.Stage, network: Any, inputs: Mapping[str, Any], devices: Any) -> Outline:
    name, job, card = str(stage.network), task.job, task.card
    module = network.get_submodule(stage.submodule)
    mesh, strategy = shard.make_mesh(job.mesh, devices), card.strategies[job.strategy]
    held = dict(module.named_parameters()) | dict(module.named_buffers())
    rules = shard.match(strategy.weights[name], shard.named_shapes(held), job.mesh, task.rules_place("weights", name))
    weights = {key: shard.shape(tensor, shard.sharding(rules[key], mesh)) for key, tensor in held.items()}
    tensors = {key: value for key, value in inputs.items() if isinstance(value, torch.Tensor)}
    static = tuple(sorted((key, value) for key, value in inputs.items() if key not in tensors))
    flops, calls = _flops(stage, task, module, {**tensors, **dict(static)}), list[dispatch.Traced]()
    program = compile.Compiled(
        module,
        weights,
        strategy.inputs[name],
        mesh,
        what=name,
        place=task.rules_place("inputs", name),
        precision=card.components[name].precision,
        trace=None,
        # No gains are at hand: that they keep scores within their bound is assumed, and said.
        attention=dispatch.Settings(job.attention, dict.fromkeys(card.score_bounds, 1.0), calls.append),
        activations=strategy.activations.get(name, []),
        stacks=card.stacks.get(name, {}) if job.stacked else {},
        rules_place=lambda what: task.card_document.place([what.partition(".")[0]]),
        how=_how(stage, task),
    )
    return Outline(program, program.shapes(tensors), static, flops, calls)


def _how(stage: pipelines.Stage, task: Task) -> compile.How:
    return compile.plainly if stage.call is None else functools.partial(stage.call, settings=task.settings)


def _flops(stage: pipelines.Stage, task: Task, module: torch.nn.Module, inputs: Mapping[str, Any]) -> int:
    """Returns the floating-point operations of one call, counted on meta."""
    from torch.utils.flop_counter import FlopCounterMode

    module.to("meta")
    there = {key: value.to("meta") if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        _how(stage, task)(module, **there)
    return int(counter.get_total_flops())


def compiled(request: Mapping[str, Any]) -> dict[str, Any]:
    """Compiles a stage, and returns what the compiler says of it.

    Args:
        request: `task`, the fields of a `task.Request`; `stage`.

    Returns:
        Bytes per device, seconds, the kernel's operands; the program itself is in the dump.
    """
    fields = dict(request["task"])
    fields["overrides"] = tuple(fields["overrides"])
    task = accept(Request(**fields))
    stage = next(stage for stage in task.stages if stage.name == request["stage"])
    devices = topology.describe(task.machine).devices
    with outlined(task, stage, devices) as outline:
        start = time.monotonic()
        lowered = outline.program.lowered(outline.inputs, outline.static)
        traced = time.monotonic()
        sizes = _sizes(lowered, task.machine.name)
    return {
        **sizes,
        "flops": outline.flops,
        "attention": [dataclasses.asdict(call) for call in outline.calls],
        "trace_s": traced - start,
        "compile_s": time.monotonic() - traced,
    }


def _sizes(lowered: Any, name: str) -> dict[str, Any]:
    """Compiles, and returns the bytes on each device; or those asked for and at hand where it does not fit.

    Raises:
        TopologyError: The compiler refuses the program for another reason.
    """
    try:
        memory = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        exceeds = _EXCEEDS.search(str(error))
        if exceeds is None:
            said = " ".join(str(error).split())[:300]
            raise TopologyError(f"plan {name}", f"The compiler refuses it: {said}", "Plan another size") from error
        asked, limit = (round(float(exceeds[n]) * 1024 ** " KMG".index(exceeds[n + 1])) for n in (1, 3))
        return {"exceeds": {"asked": asked, "limit": limit}}
    sizes = ("argument", "temp", "output", "alias", "generated_code")
    return {"bytes": {size: getattr(memory, f"{size}_size_in_bytes") for size in sizes}}


_EXCEEDS = re.compile(r"\(([\d.]+)([KMG ])\) exceeds available HBM \(([\d.]+)([KMG ])\)")


def main(arguments: list[str]) -> int:
    """Reads the request, compiles, and writes the outcome: a result, or a refusal."""
    request, outcome = (Path(argument) for argument in arguments)
    try:
        found = {"result": compiled(json.loads(request.read_text()))}
    except TorchportError as error:
        found = {"refusal": {"kind": type(error).__name__, "args": [error.place, error.fact, error.remedy]}}
    outcome.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
