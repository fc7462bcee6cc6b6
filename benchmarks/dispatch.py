"""What the host spends on a call of a network with 54 blocks, beside the devices' work: torchport and torchax.compile.

    python benchmarks/dispatch.py [--json] [--calls 100] [--devices 1 8] [--blocks 54]

The network is HunyuanVideo-1.5's transformer: the real class with the published number of blocks, and so with as many
weights, by the same names, placed by the card's rules. Its widths are those of the card's tiny checkpoint, and the
latents are small: they are copied in each call, and the time of that copy is not meant here. Else the host's work
depends on how many tensors there are, and not on what is computed. So the devices are given next to nothing to do: in
place of the blocks the program reads one number of every weight and every input, and adds their sum to the latents.
Three callers of the same weights take turns in one process:

- `torchport`: what `torchport run` calls in each denoising step (`torchport.compile.Compiled`), blocks stacked.
- `torchport, unstacked`: the same with `stacked: false`: each block's weights are arguments of their own.
- `torchax.compile`: the module as users of torchax compile it, its tensors sharded alike.

A call takes latents and a timestep in host memory, and returns the velocity in host memory. All other inputs are on the
devices. `before` is what passes from the call to that of the executable; `dispatch` is until the executable has
returned, whether or not its outputs are ready; `after` is from the moment when they are ready until the call returns.
While it waits for them the host has nothing to do. The sum of the three is its overhead. `least` is the least sum of
all calls, and `processor` the median of the processor time that the calling thread takes in all of a call: on a machine
that is shared, these two say most. Virtual devices take the cores that the host needs, so `dispatch` is an upper bound.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy
import torch

from torchport import engine, load, patch, shard
from torchport.compile import network
from torchport.stages import recorder
from torchport.task import Request, Task, accept
from torchport.task.devices import devices, prepare

MESHES = {1: {"dp": 1, "tp": 1}, 8: {"dp": 2, "tp": 4}}
SMALLEST = ("height=64", "width=64", "frames=5", "steps=1")
CHANGING = ("hidden_states", "timestep")
"""The inputs that each step has anew."""
COLUMNS = ("before", "dispatch", "after", "sum", "least", "processor")


REAL_JIT = jax.jit
WARM = 5
"""Calls that are not counted."""


class Timed:
    """An executable that notes when it is called, has returned, and has its outputs ready."""

    def __init__(self, executable: Callable[..., Any]) -> None:
        self.executable = executable
        self.called = self.returned = self.ready = 0.0

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Returns the outputs, ready."""
        self.called = time.perf_counter()
        outputs = self.executable(*arguments, **keywords)
        self.returned = time.perf_counter()
        jax.block_until_ready(outputs)
        self.ready = time.perf_counter()
        return outputs


@dataclasses.dataclass(frozen=True)
class Caller:
    """A call of the network, and the executable that it calls."""

    timed: Timed
    call: Callable[[], torch.Tensor]

    def measure(self) -> dict[str, float]:
        """Returns the seconds of each part of a call, of all of them, and of the calling thread's processor time."""
        worked, start = time.thread_time(), time.perf_counter()
        self.call()
        end, done = time.perf_counter(), time.thread_time()
        before, dispatch = self.timed.called - start, self.timed.returned - self.timed.called
        after = end - self.timed.ready
        return {
            "before": before,
            "dispatch": dispatch,
            "after": after,
            "sum": before + dispatch + after,
            "processor": done - worked,
        }


class Reading:
    """Called in the network's place while it is traced: reads one number of each weight and each input.

    Args:
        mesh: The devices.
        channels: Of the velocity.
    """

    def __init__(self, mesh: jax.sharding.Mesh, channels: int) -> None:
        self.mesh = mesh
        self.channels = channels
        self.arrays: dict[str, jax.Array] = {}
        """The weights and the inputs, by name: where each of them lies."""

    def __call__(self, module: torch.nn.Module, settings: Any = None, **inputs: Any) -> torch.Tensor:
        """Returns latents [B, C, T, H, W], and the sum in each of their numbers."""
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        tensors |= {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        assert tensors.keys() == self.arrays.keys()
        specs = tuple(self.arrays[name].sharding.spec for name in tensors)
        velocity: torch.Tensor = engine.call_jax(
            functools.partial(self._velocity, specs), inputs["hidden_states"], *tensors.values()
        )
        return velocity

    def _velocity(self, specs: tuple[Any, ...], latents: jax.Array, *arrays: jax.Array) -> jax.Array:
        """Returns the same as an array: each device reads its own shares of all arrays, and their sums are summed."""

        def total(*shares: jax.Array) -> jax.Array:
            first = [share.ravel()[:1].sum() for share in shares]  # of no number at all it is 0
            return jax.lax.psum(sum(number.astype("float32") for number in first), self.mesh.axis_names)

        where = jax.sharding.PartitionSpec()
        whole = jax.shard_map(total, mesh=self.mesh, in_specs=specs, out_specs=where, check_vma=False)(*arrays)
        return latents[:, : self.channels] + whole


class Velocity(torch.nn.Module):
    """The transformer, called with tensors by name alone."""

    def __init__(self, module: torch.nn.Module, how: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.how = how

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Returns the velocity."""
        velocity: torch.Tensor = self.how(self.module, **inputs)
        return velocity


def task_of(count: int, blocks: int | None, folder: str, *overrides: str) -> Task:
    """Returns the demo's job on so many virtual devices, its transformer by default as deep as the published one."""
    mesh = [f"mesh.{axis}={size}" for axis, size in MESHES[count].items()]
    settings = (*SMALLEST, f"machine=cpu:{count}", *mesh, *overrides)
    request = Request("hunyuan", "configs/demo.yaml", "A cat", out=Path(folder), stage="denoise", overrides=settings)
    task = accept(request)
    prepare(task.machine)
    entry = task.card.components["transformer"]
    published = load.configuration(load.published(entry.class_, entry.published))
    task.card.tiny.components["transformer"]["num_layers"] = blocks or published["num_layers"]
    return task


def drawn(shape: torch.Tensor) -> torch.Tensor:
    """Returns small numbers in the place of a tensor without storage, or ones if it holds integers."""
    size, dtype = tuple(shape.shape), shape.dtype
    return (torch.randn(size) / 16).to(dtype) if dtype.is_floating_point else torch.ones(size, dtype=dtype)


def torchport_caller(task: Task, weights: dict[str, jax.Array], inputs: dict[str, Any], reading: Reading) -> Caller:
    """Returns what a run calls in each step."""
    stage = dataclasses.replace(task.stages[0], call=reading)
    module = network.module_of(stage, network.as_shapes(task, stage))
    program = network.compiled(task, stage, module, weights, reading.mesh)
    placed = program.place(**inputs)
    reading.arrays = {**program.weights, **placed}
    step = {name: inputs[name] for name in CHANGING}
    fixed = {name: placed[name] for name in placed if name not in CHANGING}
    call = functools.partial(program, **step, **fixed, return_dict=False)
    call()
    (key, executable), *_ = program.programs.items()
    program.programs[key] = timed = Timed(executable)
    return Caller(timed, call)


def torchax_caller(task: Task, weights: dict[str, jax.Array], inputs: dict[str, Any], reading: Reading) -> Caller:
    """Returns what torchax compiles of the same network, and a call of it with the same tensors, sharded alike."""
    import torchax
    from torchax import interop

    stage = task.stages[0]
    module = network.module_of(stage, network.as_shapes(task, stage))
    for name, array in weights.items():
        path, _, attribute = name.rpartition(".")
        owner, tensor = module.get_submodule(path), interop.torch_view(array)
        if attribute in owner._buffers:
            owner._buffers[attribute] = tensor
        else:
            owner._parameters[attribute] = torch.nn.Parameter(tensor, requires_grad=False)
    timed: list[Timed] = []

    def jit(function: Callable[..., Any], **options: Any) -> Timed:
        timed.append(Timed(REAL_JIT(function, **options)))
        return timed[-1]

    with mock.patch.object(jax, "jit", jit):
        compiled = torchax.compile(Velocity(module, reading))
    rules, mesh = task.card.strategies[task.job.strategy].inputs["transformer"], dict(reading.mesh.shape)
    where: dict[str, Any] = {}
    for name, value in inputs.items():
        rule = shard.input_rule(rules, name, tuple(value.shape), mesh, "the card", "the transformer")
        where[name] = shard.sharding(rule, reading.mesh)

    def placed(name: str) -> Any:
        return interop.torch_view(jax.device_put(inputs[name].numpy(), where[name]))

    fixed = {name: placed(name) for name in inputs if name not in CHANGING}
    reading.arrays = {**weights, **{name: placed(name).jax() for name in inputs}}

    def call() -> torch.Tensor:
        velocity = compiled(**{name: placed(name) for name in CHANGING}, **fixed)
        return torch.from_numpy(numpy.array(velocity.jax()))

    call()
    return Caller(timed[0], call)


def milliseconds(callers: dict[str, Caller], calls: int) -> dict[str, dict[str, float]]:
    """Returns for each caller the medians of its calls, and the least sum; the callers take turns."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in callers}
    for turn in range(calls + WARM):
        for name, caller in callers.items():
            row = caller.measure()
            if turn >= WARM:
                rows[name].append(row)
    figures: dict[str, dict[str, float]] = {}
    for name, measured in rows.items():
        figures[name] = {part: 1e3 * statistics.median(row[part] for row in measured) for part in measured[0]}
        figures[name]["least"] = 1e3 * min(row["sum"] for row in measured)
    return figures


def inputs_of(task: Task) -> tuple[dict[str, torch.Tensor], int]:
    """Returns the inputs that a step has, with numbers that are drawn, and the channels of the velocity."""
    stage = task.stages[0]
    parts, how = network.as_shapes(task, stage), network.how(stage, task)
    module = network.module_of(stage, parts)
    first = recorder.network_calls(stage, parts, module, how, task.settings, count=False)[0]
    return {name: drawn(shape) for name, shape in first.inputs.items()}, first.output.shape[1]


def weights_of(task: Task, mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """Returns weights that are drawn, each where its rule puts it."""
    stage = task.stages[0]
    module = network.module_of(stage, network.as_shapes(task, stage))
    shapes = dict(module.named_parameters()) | dict(module.named_buffers())
    rules = network.weight_rules(task, stage, module)
    return shard.place(((name, drawn(shape)) for name, shape in shapes.items()), rules, mesh)


def of_devices(count: int, blocks: int | None, calls: int) -> dict[str, Any]:
    """Returns how many weights there are, and the milliseconds of all callers, by the number of devices."""
    with tempfile.TemporaryDirectory() as folder:
        stacked, apart, shallow = (
            task_of(count, blocks, folder),
            task_of(count, blocks, folder, "stacked=false"),
            task_of(count, 1, folder),
        )
        with patch.applied(stacked.patches(stacked.stages), stage="denoise"), load.default_dtype(torch.float32):
            torch.manual_seed(0)
            mesh = shard.make_mesh(stacked.job.mesh, devices(stacked.machine))
            inputs, channels = inputs_of(shallow)
            weights = weights_of(stacked, mesh)
            callers = {
                "torchport": torchport_caller(stacked, weights, inputs, Reading(mesh, channels)),
                "torchport, unstacked": torchport_caller(apart, weights, inputs, Reading(mesh, channels)),
                "torchax.compile": torchax_caller(stacked, weights, inputs, Reading(mesh, channels)),
            }
            shapes = {caller.call().shape for caller in callers.values()}
            assert len(shapes) == 1, shapes
            return {str(count): {"weights": len(weights), "milliseconds": milliseconds(callers, calls)}}


def of_fresh_process(count: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the same of a process that has so many devices: JAX cannot change their number."""
    command = [sys.executable, __file__, "--devices", str(count), "--calls", str(arguments.calls), "--json"]
    command += ["--blocks", str(arguments.blocks)] if arguments.blocks else []
    figures: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return figures


def main() -> None:
    """Prints the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100, help="calls for each median [100]")
    parser.add_argument("--devices", type=int, nargs="+", choices=MESHES, default=list(MESHES), help="virtual devices")
    parser.add_argument("--blocks", type=int, help="of the network [as many as published]")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    counts = arguments.devices
    if len(counts) == 1:
        results = of_devices(counts[0], arguments.blocks, arguments.calls)
    else:
        results = {key: value for count in counts for key, value in of_fresh_process(count, arguments).items()}
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    for count, figures in results.items():
        print(f"{count} device(s), {figures['weights']} weights; milliseconds of a call")
        print(f"{'':24}" + "".join(f"{column:>11}" for column in COLUMNS))
        for name, times in figures["milliseconds"].items():
            print(f"{name:24}" + "".join(f"{times[column]:11.3f}" for column in COLUMNS))


if __name__ == "__main__":
    main()
