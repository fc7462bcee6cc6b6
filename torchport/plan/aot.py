"""Ahead-of-time compilation of a job's stage for an absent TPU, from shapes: the network's weights are on `meta`.

It runs in a process of its own: libtpu reads its environment, the dump's folder included, once, when it is loaded.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import torch

from torchport import compile, load, shard
from torchport.compile import cached_steps, network, ported, preflight, rules
from torchport.compile.in_force import in_force, lowerings
from torchport.config import xla_flags
from torchport.config.card import LoraFile
from torchport.config.machine import Machine
from torchport.config.step_cache import StepCache
from torchport.errors import BadValueError, OutputError, TopologyError, VmemError
from torchport.files import atomic
from torchport.files.folder import expand_home, has_file
from torchport.kernels.attention import dispatch
from torchport.load import checkpoint, lora
from torchport.plan.figures import Overflow
from torchport.plan.tpu import absent, bundles
from torchport.processes import child
from torchport.shard import grid
from torchport.stages import family, recorder
from torchport.task import Task, encoder_names

SCHEDULED = "*after_codegen.txt"
"""The names of the files in a compiler's dump that have a scheduled program; see `hlo`."""


@dataclasses.dataclass(frozen=True)
class StageNetwork:
    """A stage's network and its calls in a run, as shapes, before anything is lowered."""

    program: compile.Compiled
    called: list[recorder.NetworkCall]
    #: The calls of attention and of other kernels; lowering a program appends its calls here.
    kernels: list[dispatch.Traced | dispatch.Pass]


@contextlib.contextmanager
def outlined(task: Task, stage: family.Stage, devices: Any, bounded: bool = True) -> Iterator[StageNetwork]:
    """Yields a stage's network as shapes, with its patches in force: lower its programs inside the `with`.

    Args:
        stage: A stage with a network whose inputs' shapes are known before a run (`Stage.like`); raises for others.
        bounded: Whether attention scores are taken to be within the card's bounds, or within reach of shifts.
    """
    if stage.network is None or stage.like is None:
        raise BadValueError(f"--stage {stage.name}", "Its inputs are not known beforehand", "Plan the stage 'denoise'")
    with in_force(task, [stage]) as ledger, lowerings(ledger):
        network.check_classes(task)
        network.check_heads(task)
        check_loras(task, stage)
        parts, mesh = network.as_shapes(task, stage), shard.make_mesh(task.job.mesh, devices)
        module, how = network.module_of(stage, parts), network.how(stage, task)
        weights = network.shapes(task, stage, module, mesh)
        # A copy is called: upstream may cache tensors in the module, as position tables, which would be on `meta`.
        called = recorder.network_calls(stage, parts, copy.deepcopy(module), how, task.settings)
        preflight.input_rules(task, stage.network, called)  # raises if no rule fits an input
        network.restore_attributes(task, stage.network, parts[stage.network])
        kernels: list[dispatch.Traced | dispatch.Pass] = []
        program = network.compiled(task, stage, module, weights, mesh, record=kernels.append)
        if not bounded:
            program.attention = dataclasses.replace(program.attention, bounds={}, shifts=False)
        yield StageNetwork(program, called, kernels)


def encoder_calls(task: Task, stage: family.Stage) -> dict[str, recorder.NetworkCall]:
    """Returns the call of each encoder of a stage, by the encoder's name. The shapes of its tokens and mask follow from
    its embeddings' shapes; {} if these are not known before a run. The patches of `stage` must be in force.
    """
    first, calls = task.denoising[0], {}
    if first.like is None:
        return {}
    # The network's module may need a stub to be imported, which `stage` does not need.
    with in_force(task, [first]), preflight.without_values():
        inputs = first.like(network.outlines(task, first), task.settings)
    embeddings = {name: x for name, x in inputs.items() if x.ndim == 3 and x.is_floating_point()}
    for name in encoder_names(task.card, stage):
        # `prompt_embeds_2` is the output of `text_encoder_2`.
        outputs = [x for key, x in embeddings.items() if _suffix(key) == _suffix(name)] or [*embeddings.values()]
        if outputs:
            # An encoder runs once for each sample of its embeddings.
            tokens, times = max(x.shape[-2] for x in outputs), sum(x.shape[0] for x in outputs)
            config = load.configuration(network.outline(task, name)) if task.encodes_on_devices(stage) else {}
            # CLIP's output may be a vector, without tokens: T5's tokens beside it are more than CLIP takes.
            tokens = min(tokens, config.get("max_position_embeddings") or tokens)
            ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
            flops = 2 * network.parameters(task, name) * tokens  # a multiply and an add
            shapes = {"input_ids": ids, "attention_mask": ids}
            calls[name] = recorder.NetworkCall(
                shapes, static=(), times=times, flops=flops, output=None, kept={}, borders=0
            )
    return calls


def _suffix(name: str) -> str:
    """Returns the number at the end of a name, `2` for `text_encoder_2` and `prompt_embeds_2_mask`; '' without it."""
    number = re.search(r"_(\d+)(?=_mask$|$)", name)
    return "" if number is None else number[1]


def _encoder(task: Task, name: str, called: recorder.NetworkCall, mesh: jax.sharding.Mesh) -> StageNetwork:
    """Returns an encoder that runs on the devices, with its only call, ready to be lowered."""
    module, sharding = copy.deepcopy(network.outline(task, name)), rules.of_shared(name, ported.STRATEGY)
    program = network.ported(
        module.eval(),
        sharding,
        mesh,
        how=lambda module, **inputs: (module(**inputs)[0],),  # the embeddings alone
        trace=None,
        attention=ported.ATTENTION,
    )
    return StageNetwork(program, [called], [])


def check_loras(task: Task, stage: family.Stage) -> None:
    """Raises for a LoRA file that does not fit a stage's network; files of `unchecked_loras` are left out."""
    name = str(stage.network)
    layout = network.layout(task, name)
    checked = [file for file in task.job.lora if file.component == name and _why_unchecked(task, file) is None]
    if not checked or layout.loras is None:
        return
    shapes = {key: tuple(tensor.shape) for key, tensor in network.outline(task, name).state_dict().items()}
    # Each parameter's name in the checkpoint, which a LoRA file may use.
    names = {key: key for key in shapes}
    folder = _component_folder(task, name)
    if layout.rename and folder is not None:
        names |= {key: stored.name for key, stored in layout.stored(folder).items()}
    files = [lora.Lora(expand_home(file.path), file.scale) for file in checked]
    lora.additions(dataclasses.replace(layout.loras, files=files), shapes, names)  # raises if a file does not fit


def unchecked_loras(task: Task) -> list[str]:
    """Returns a line for each LoRA file that a plan cannot check, and so takes to fit."""
    whys = [(file.path, _why_unchecked(task, file)) for file in task.job.lora]
    return [f"the LoRA '{path}' fits: {why}" for path, why in whys if why is not None]


def _why_unchecked(task: Task, file: LoraFile) -> str | None:
    """Returns in words why a plan cannot check that a LoRA file fits; None if the file can be checked."""
    if not has_file(expand_home(file.path)):
        return "the file is not here"
    if network.layout(task, file.component).rename and _component_folder(task, file.component) is None:
        return "it may have the checkpoint's names, and that is not here"
    return None


def _component_folder(task: Task, component: str) -> Path | None:
    root = checkpoint.described(task.checkpoint, task.card)
    return None if root is None else task.component_folder(root, component)


@dataclasses.dataclass(frozen=True)
class DeviceBytes:
    """Bytes of a program on one device, by the compiler's memory analysis; `resident` is other data on the device."""

    argument: int
    temp: int
    output: int
    alias: int
    generated_code: int
    resident: int = 0

    @property
    def peak(self) -> int:
        """The most bytes in use at a time; outputs in a donated argument's memory (`alias`) count once."""
        return self.argument + self.temp + self.output + self.generated_code - self.alias + self.resident


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """The compiler's figures of one program, which go from the child process to its parent."""

    memory: DeviceBytes | Overflow
    inputs: dict[str, list[int]]
    times: int
    steps: int  #: The denoising steps of the stage; 1 for another stage.
    flops: int  #: FLOPs of one run, on the whole slice.
    #: Bytes of the inputs and outputs of the network's blocks in one run, as upstream computes them.
    borders: int
    calls: list[dispatch.Traced]
    passes: list[dispatch.Pass]  #: For each kernel except attention, the call that moves most bytes.
    spots: list[grid.Spot]
    dump: str | None  #: The name of its file in the dump; None where there is none.
    operators: str  #: How many operators it calls, by what is known of them, in words.
    trace_s: float
    compile_s: float

    def holding(self, resident: int) -> CompiledProgram:
        """Returns the program with `resident` more bytes on each device; unchanged if the program does not fit."""
        if isinstance(self.memory, Overflow):
            return self
        return dataclasses.replace(self, memory=dataclasses.replace(self.memory, resident=resident))


def compiled(task: Task, dump: Path, bounded: bool) -> list[CompiledProgram]:
    """Compiles a task's only stage, one program for each set of input shapes; runs in the child process."""
    [stage] = task.stages
    devices = absent.describe(task.machine).devices
    if task.encodes_on_devices(stage):
        with in_force(task, [stage]) as ledger, lowerings(ledger):
            mesh = ported.encoder_mesh(task, devices)
            return [
                _program(_encoder(task, name, called, mesh), called, task.machine, dump)[0]
                for name, called in encoder_calls(task, stage).items()
            ]
    with outlined(task, stage, devices, bounded) as outline:
        cache = network.step_cache_of(task, stage)
        if cache is None:
            return [_program(outline, called, task.machine, dump)[0] for called in outline.called]
        return [program for called in outline.called for program in _with_cache(outline, called, task, dump, cache)]


def _with_cache(
    outline: StageNetwork, called: recorder.NetworkCall, task: Task, dump: Path, cache: StepCache
) -> Iterator[CompiledProgram]:
    """Yields the program of steps that compute all blocks, and then the program of steps that reuse outputs.

    The second is left out if no step reuses outputs, or if the first does not fit: its inputs are then not known.
    """
    steps, computed = task.job.steps, len(cache.computed(task.job.steps))
    calls_per_step = called.times // steps
    static = (*called.static, (cached_steps.MODE, "full"))
    first = dataclasses.replace(called, static=static, times=calls_per_step * computed)
    full, outputs = _program(outline, first, task.machine, dump)
    kept = None if outputs is None else outputs[1]  # outputs of blocks, for steps that reuse them
    # An extrapolation also keeps differences of earlier steps on the devices, besides inputs and outputs.
    kept_bytes = 0
    for leaf in jax.tree.leaves(kept):
        elements = math.prod(leaf.sharding.shard_shape(leaf.shape))
        kept_bytes += cache.differences * elements * leaf.dtype.itemsize
    yield full.holding(kept_bytes)
    if kept is not None and computed < steps:
        assert called.flops is not None
        # The last blocks are in no stack: each step computes them.
        blocks = sum(count + cache.last_blocks for count in outline.program.counts.values())
        reused = dataclasses.replace(
            called,
            inputs={**called.inputs, cached_steps.KEPT: kept},
            static=(*called.static, (cached_steps.MODE, "reuse")),
            times=calls_per_step * (steps - computed),
            flops=called.flops * cache.last_blocks // blocks,  # work outside of blocks is small
        )
        yield _program(outline, reused, task.machine, dump)[0].holding(kept_bytes)


def _program(
    outline: StageNetwork, called: recorder.NetworkCall, machine: Machine, dump: Path
) -> tuple[CompiledProgram, Any]:
    """Compiles for one set of shapes; returns the program, and its outputs as shapes, or None if it does not fit."""
    # Programs compiled earlier have left files in the dump, and calls in `kernels`.
    earlier_files = set(dump.glob(SCHEDULED))
    earlier_calls = len(outline.kernels)
    start, lowered_at = time.monotonic(), None
    outline.program.operators = outline.program.network.operator_record()
    memory: DeviceBytes | Overflow
    outputs = None
    try:
        lowered = outline.program.lowered(outline.program.shapes(called.inputs), called.static)
        lowered_at = time.monotonic()
        memory, outputs = _memory(functools.partial(outline.program.compile_lowered, lowered), machine)
    except VmemError as error:
        memory = _overflow(error, outline.kernels[earlier_calls:])
    dumped, end = set(dump.glob(SCHEDULED)) - earlier_files, time.monotonic()
    lowered_at = lowered_at or end  # None if tracing raised, as for a tile that is too large
    noted = outline.kernels[earlier_calls:]
    passes = sorted((call for call in noted if isinstance(call, dispatch.Pass)), key=lambda call: call.bytes)
    assert called.flops is not None and called.borders is not None  # `outlined` has them counted
    program = CompiledProgram(
        memory=memory,
        inputs={name: list(tensor.shape) for name, tensor in called.tensors.items()},
        times=called.times,
        steps=called.steps,
        flops=called.flops,
        borders=called.borders,
        calls=[call for call in noted if isinstance(call, dispatch.Traced)],
        passes=list({call.kernel: call for call in passes}.values()),  # the largest call of each: sorted by bytes
        spots=grid.spots(list(outline.program.mesh.devices.flat)),
        dump=next((path.name for path in dumped), None),
        operators=outline.program.operators.text(),
        trace_s=lowered_at - start,
        compile_s=end - lowered_at,
    )
    return program, outputs


def _overflow(error: VmemError, traced: list[dispatch.Traced | dispatch.Pass]) -> Overflow:
    """Returns the kernel that takes too much VMEM, by the compiler's error or by the check of a tile."""
    tile = getattr(error, "tile", None)
    kernel = error.place
    # An error with a tile was raised while the kernel was traced, so the last traced kernel has this tile.
    if tile is not None:
        call = traced[-1]
        kernel = call.implementation if isinstance(call, dispatch.Traced) else call.kernel
    return Overflow(
        what="vmem",
        kernel=kernel,
        tile=None if tile is None else "/".join(map(str, dataclasses.astuple(tile))),
        asked_bytes=getattr(error, "asked", None),
        limit_bytes=getattr(error, "limit", None),
        fact=error.fact,
    )


def _memory(compile_program: Callable[[], Any], machine: Machine) -> tuple[DeviceBytes | Overflow, Any]:
    """Compiles a program; returns its bytes on each device, and its outputs as shapes with shardings.

    If the program does not fit into HBM, returns an `Overflow` and None.

    Raises:
        VmemError: A kernel's tile does not fit into the chip's VMEM.
    """
    try:
        program = compile_program()
        memory = program.memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        exceeds = _EXCEEDS.search(str(error))
        if exceeds is None:
            kernel = _KERNEL.search(str(error))
            refusal = bundles.refused(str(error), machine, kernel[1] if kernel else "a kernel")
            if isinstance(refusal, VmemError):
                raise refusal from error
            fact = f"The compiler refuses it: {' '.join(str(error).split())[:300]}"
            raise TopologyError(f"plan {machine.name}", fact, "Plan another size") from error
        # A number and its unit each: 15.2 and G are 15.2 * 1024**3 bytes.
        asked, limit = (round(float(exceeds[n]) * 1024 ** " KMG".index(exceeds[n + 1])) for n in (1, 3))
        fact = "Too large for HBM"
        return Overflow(what="hbm", kernel=None, tile=None, asked_bytes=asked, limit_bytes=limit, fact=fact), None
    # The analysis names these sizes as `DeviceBytes` does. It does not know what else is resident on the device.
    sizes = (field.name for field in dataclasses.fields(DeviceBytes) if field.name != "resident")
    return DeviceBytes(*(getattr(memory, f"{size}_size_in_bytes") for size in sizes)), program.out_info


_EXCEEDS = re.compile(r"\(([\d.]+)([KMG ])\) exceeds available HBM \(([\d.]+)([KMG ])\)")
_KERNEL = re.compile(r"%([\w-]+?)(?:\.\d+)? = [^%]*custom-call\(")


def compiled_in_child(task: Task, stage: str, folder: Path, bounded: bool = True) -> list[CompiledProgram]:
    """Returns a stage's programs, compiled in a child process with the dump in `folder`; refuses an earlier dump."""
    dump = folder.resolve()
    if any(dump.glob(SCHEDULED)):
        raise OutputError(str(folder), "It holds the dump of an earlier plan", "Name a new folder with --keep")
    atomic.make_folder(dump)
    dump_flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump} --xla_dump_hlo_as_text".strip()
    # Without JAX's cache: a program out of it is not compiled, so the compiler would dump nothing.
    environment = {"XLA_FLAGS": dump_flags, "JAX_ENABLE_COMPILATION_CACHE": "false", **absent.environment()}
    flags = task.request.execution.xla_flags
    if flags is not None:
        flag_set = xla_flags.flag_set(flags, task.machine)
        environment[flag_set.variable] = flag_set.value({**os.environ, **environment})
    programs: list[CompiledProgram] = child.call(
        "torchport.plan.aot:compiled",
        *(dataclasses.replace(task, request=dataclasses.replace(task.request, stage=stage)), dump, bounded),
        ended=lambda end: TopologyError(
            f"plan {task.machine.name}", f"The compiler {end}", "Mend that, or plan another size"
        ),
        environment=environment,
    )
    return programs
