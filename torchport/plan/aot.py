"""One stage of a job as shapes alone: its network on meta, its inputs as the verb itself makes them, its program.

A stage is compiled for a TPU that is not there in a process of its own: the environment, the folder of the dump
included, has to be set before libtpu is loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

from torchport import compile, engine, patch, shard
from torchport.attention import dispatch
from torchport.compile import network, preflight
from torchport.config import checkout
from torchport.config.machine import Machine
from torchport.errors import BadValueError, OutputError, TopologyError, VmemError
from torchport.files import atomic
from torchport.processes import child
from torchport.shard import grid
from torchport.stages import family, recorder
from torchport.task import Request, Task, accept
from torchport.tpu import absent, bundles

SCHEDULED = "*after_codegen.txt"
"""Files of the dump that have a scheduled program; see `hlo`."""


@dataclasses.dataclass(frozen=True)
class Outline:
    """A stage's network, and all that its verb calls it with, before anything is lowered.

    Attributes:
        program: The network on the mesh, its weights shapes alone.
        called: Each set of shapes it is called with, in the order of first calls.
        kernels: Calls of attention and of kernels beside it; more with every lowering.
    """

    program: compile.Compiled
    called: list[recorder.NetworkCall]
    kernels: list[dispatch.Traced | dispatch.Pass]


@contextlib.contextmanager
def outlined(task: Task, stage: family.Stage, devices: Any, bounded: bool = True) -> Iterator[Outline]:
    """Gives a stage as shapes alone, under its patches; what is traced must be traced inside.

    Args:
        task: The job.
        stage: One with a network whose inputs' shapes are known beforehand (`Stage.like`).
        devices: Of the machine, or of a topology.
        bounded: Whether scores lie within the bounds that the card names.

    Raises:
        BadValueError: The stage has no network, or does not say what its inputs are like.
    """
    if stage.network is None or stage.like is None:
        raise BadValueError(f"--stage {stage.name}", "Its inputs are not known beforehand", "Plan the stage 'denoise'")
    with checkout.on_path(task.upstream), patch.applied(task.patches([stage]), stage=stage.name) as ledger:
        with engine.operators({op.target: op.function for op in ledger.ops()}), checkout.hushed(True):
            network.check_heads(task)
            outline = _outline(task, stage, devices)
            if not bounded:
                outline.program.attention = dataclasses.replace(outline.program.attention, bounds={})
            yield outline


def _outline(task: Task, stage: family.Stage, devices: Any) -> Outline:
    name, parts, mesh = str(stage.network), network.as_shapes(task, stage), shard.make_mesh(task.job.mesh, devices)
    module, how = network.module_of(stage, parts), network.how(stage, task)
    weights = network.shapes(task, stage, module, mesh)
    called = recorder.network_calls(stage, parts, module, how, task.settings)
    preflight.input_rules(task, name, called)
    kernels: list[dispatch.Traced | dispatch.Pass] = []
    return Outline(network.compiled(task, stage, module, weights, mesh, record=kernels.append), called, kernels)


def compiled(request: Request, dump: Path, bounded: bool) -> list[dict[str, Any]]:
    """Compiles a stage's programs, one for each set of shapes that its verb calls with.

    Args:
        request: For one stage.
        dump: The folder into which the compiler writes.
        bounded: Whether scores are.

    Returns:
        Of each program: shapes, how often it is called, bytes per device or what it lacks, seconds, the kernel's
        operands, and the name of its file in the dump.
    """
    task = accept(request)
    [stage] = task.stages
    devices = absent.describe(task.machine).devices
    with outlined(task, stage, devices, bounded) as outline:
        return [_program(outline, called, task.machine, dump) for called in outline.called]


def _program(outline: Outline, called: recorder.NetworkCall, machine: Machine, dump: Path) -> dict[str, Any]:
    """Compiles for one set of shapes."""
    written, traced = set(dump.glob(SCHEDULED)), len(outline.kernels)
    start, lowered_at = time.monotonic(), None
    try:
        lowered = outline.program.lowered(outline.program.shapes(called.tensors), called.static)
        lowered_at = time.monotonic()
        outcome = _sizes(lowered, machine)
    except VmemError as error:
        outcome = {"vmem": _overflow(error, outline.kernels[traced:])}
    written, end = set(dump.glob(SCHEDULED)) - written, time.monotonic()
    lowered_at = lowered_at or end  # a tile may be refused while it is traced
    noted = outline.kernels[traced:]
    return {
        **outcome,
        "inputs": {name: list(tensor.shape) for name, tensor in called.tensors.items()},
        "times": called.times,
        "flops": called.flops,
        "attention": [dataclasses.asdict(call) for call in noted if isinstance(call, dispatch.Traced)],
        "passes": _once(call for call in noted if isinstance(call, dispatch.Pass)),
        "spots": [dataclasses.astuple(spot) for spot in grid.spots(outline.program.mesh.devices.flat)],
        "dump": next((path.name for path in written), None),
        "trace_s": lowered_at - start,
        "compile_s": end - lowered_at,
    }


def _once(passes: Iterable[dispatch.Pass]) -> list[dict[str, Any]]:
    """Returns of each kernel the call that moves most."""
    found = {one.kernel: dataclasses.asdict(one) for one in sorted(passes, key=lambda one: one.bytes)}
    return list(found.values())


def _overflow(error: VmemError, traced: list[dispatch.Traced | dispatch.Pass]) -> dict[str, Any]:
    """Returns what of a kernel does not fit into vector memory; the last one traced, where it was not yet compiled."""
    tile = getattr(error, "tile", None)
    return {
        "kernel": error.place if tile is None else _name(traced[-1]),
        "tile": None if tile is None else "/".join(map(str, dataclasses.astuple(tile))),
        "fact": error.fact,
        "asked": getattr(error, "asked", None),
        "limit": getattr(error, "limit", None),
    }


def _name(call: dispatch.Traced | dispatch.Pass) -> str:
    return call.implementation if isinstance(call, dispatch.Traced) else call.kernel


def _sizes(lowered: Any, machine: Machine) -> dict[str, Any]:
    """Compiles, and returns the bytes on each device; or those asked for and at hand where it does not fit.

    Raises:
        VmemError: A kernel's tile does not fit the chip's vector memory.
        TopologyError: The compiler refuses the program for another reason.
    """
    try:
        memory = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        exceeds = _EXCEEDS.search(str(error))
        if exceeds is None:
            kernel = _KERNEL.search(str(error))
            found = bundles.refused(str(error), machine, kernel[1] if kernel else "a kernel")
            if isinstance(found, VmemError):
                raise found from error
            said = " ".join(str(error).split())[:300]
            raise TopologyError(
                f"plan {machine.name}", f"The compiler refuses it: {said}", "Plan another size"
            ) from error
        asked, limit = (round(float(exceeds[n]) * 1024 ** " KMG".index(exceeds[n + 1])) for n in (1, 3))
        return {"exceeds": {"asked": asked, "limit": limit}}
    sizes = ("argument", "temp", "output", "alias", "generated_code")
    return {"bytes": {size: getattr(memory, f"{size}_size_in_bytes") for size in sizes}}


_EXCEEDS = re.compile(r"\(([\d.]+)([KMG ])\) exceeds available HBM \(([\d.]+)([KMG ])\)")
_KERNEL = re.compile(r"%([\w-]+?)(?:\.\d+)? = [^%]*custom-call\(")


def apart(task: Task, stage: str, folder: Path, bounded: bool = True) -> list[dict[str, Any]]:
    """Returns what `compiled` does, from a process of its own, with the compiler's dump in a folder.

    Args:
        task: The job.
        stage: Its name.
        folder: For the dump; it is made.
        bounded: Whether scores lie within the bounds that the card names.

    Raises:
        TopologyError: The process stopped without a word.
        OutputError: The folder cannot be made, or holds a dump already.
        TorchportError: Whatever it refuses.
    """
    dump = folder.resolve()
    if any(dump.glob(SCHEDULED)):
        raise OutputError(str(folder), "It holds the dump of an earlier plan", "Name a new folder with --keep")
    atomic.make_folder(dump)
    programs: list[dict[str, Any]] = child.call(
        "torchport.plan.aot:compiled",
        *(dataclasses.replace(task.request, stage=stage, prompt=None), dump, bounded),
        ended=lambda end: TopologyError(
            f"plan {task.machine.name}", f"The compiler {end}", "Mend that, or plan another size"
        ),
        environment=absent.compiling(dump),
    )
    return programs
