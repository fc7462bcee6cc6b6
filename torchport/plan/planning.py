"""`torchport plan`: whether a job traces, shards and fits on a TPU slice, and its modelled speed, without a TPU.

Bytes per device, collectives, and estimated cycles of all but the kernels come from the compiler. Other times are
modelled, see `step_time`. All but attention is divided by the factor of `calibration.yaml`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from torchport import progress, shard
from torchport.compile import network, preflight
from torchport.compile.in_force import in_force
from torchport.config.card import DENOISING
from torchport.config.machine import Chip, Machine
from torchport.config.step_cache import schedule_text
from torchport.errors import BadValueError
from torchport.files import atomic
from torchport.plan import aot, step_time
from torchport.plan.figures import (
    Clip,
    ClipPart,
    Communication,
    JobPlan,
    Memory,
    Operation,
    Overflow,
    ProgramPlan,
    StageLeftOut,
    StagePlan,
    StepTime,
    VerificationCost,
)
from torchport.plan.step_time import floor_seconds, program_time
from torchport.plan.tpu import hlo
from torchport.progress import size_text
from torchport.run.journey import LOSSY_INT8
from torchport.save.manifest import versions
from torchport.stages.family import Stage
from torchport.stages.recorder import BORDERS_LIMIT
from torchport.task import Request, Task, accept, check_tiling, encoder_names

VERIFY_CALLS, VERIFY_LARGE_CALLS = 5, 3
"""The most runs of the original, for each call in the loop, that a verification takes.

The first number is for blocks whose values have at most `BORDERS_LIMIT` bytes, the second for larger values. Two runs
in the job's dtype record the blocks, and then all modules. Three runs in the yardstick's dtype go freely, with the
original's values at the blocks, and with the original's values at all modules. For larger values, the runs for modules
are left out.
"""

HOST_FLOPS = 1e12
"""Floating-point operations of a host in a second, as plans assume."""
DISK = 1e9
"""Bytes that a host reads or writes in a second, on a disk or over a network, as plans assume."""
ENCODED = 16.7e6
"""Pixels of video that a core encodes in a second. x264 took 0.06 CPU-s for a million of a noisy video."""
ROWS_OF_THREAD = 32
"""Rows of a frame for each thread of x264. Cores suffice: a TPU's host has 24 or more for each chip."""
COMPRESSED = 6e6
"""Pixels of a picture that a core compresses in a second. PNG took 0.16 CPU-s for a million."""
ONE_HOST, MANY_HOSTS = 8, 4
"""The most chips of a slice with one host, and the chips of each host in a larger slice."""
CLIP_ASSUMED = (
    f"a clip: the host does {HOST_FLOPS / 1e12:.3g} TFLOP/s, reads and writes {DISK / 1e9:.3g} GB/s, and encodes "
    f"{ENCODED / 1e6:.3g} Mpixel/s on each of x264's threads; what moves between host and devices takes no time"
)


def plan(
    request: Request,
    topology_name: str | None,
    keep: Path | None = None,
    bounded: bool = True,
    *,
    stages: Sequence[str] = (),
) -> JobPlan:
    """Returns a job's memory, collectives and modelled times on a TPU slice, from programs compiled without a TPU.

    Args:
        topology_name: The slice, such as `v6e:2x4`; None: the job's machine.
        keep: A folder for the compiler's dump, from which every figure can be computed again, and `plan.json`.
        bounded: Whether attention scores are assumed to be within the card's bounds; no weights are read to check it.
        stages: The stages to compile, one after the other, as a compiler takes gigabytes. The default is the denoising
            stages, and others with a network whose input shapes are known before a run; `all` is all with a network.
    """
    task = accept(on_slice(request, topology_name), dry=True)
    with progress.waiting(f"plan {task.card.model} on {task.machine.name}"):
        return of_task(task, keep, bounded, stages)


def on_slice(request: Request, topology_name: str | None) -> Request:
    """Returns a request to denoise on the named slice, such as `v6e:2x4`; with None, on the job's own machine."""
    overrides = request.overrides if topology_name is None else (*request.overrides, f"machine={topology_name}")
    return dataclasses.replace(request, stage="denoise", overrides=overrides)


def of_task(task: Task, keep: Path | None, bounded: bool, stages: Sequence[str] = ()) -> JobPlan:
    """Compiles a checked job's stages and returns the plan, which is also written to `keep`; arguments as in `plan`."""
    stages = _checked_stages(task, stages)
    with nullcontext(keep) if keep is not None else atomic.scratch() as folder:
        planned = {}
        for number, name in enumerate(stages, 1):
            label = f"compile {name} ({number} of {len(stages)})"
            with progress.waiting(label) if len(stages) > 1 else nullcontext():
                planned[name] = _stage_plan(task, name, folder / name, bounded)
    clip_plan = clip_of_plans(task, planned)
    job = JobPlan(
        model=task.card.model,
        machine=task.machine.name,
        strategy=task.job.strategy,
        mesh=dict(task.job.mesh),
        fits=all(stage.fits for stage in planned.values()) and (clip_plan is None or clip_plan.fits_host),
        versions=versions(),
        assumptions=[
            step_time.calibration_words(step_time.shipped_calibration(), versions()),
            *_assumptions(
                task, bounded, any(stage.attention and stage.attention.shifted for stage in planned.values())
            ),
            *([] if clip_plan is None else [CLIP_ASSUMED]),
        ],
        lossy=lossy(task),
        stages={stage.name: planned.get(stage.name) or _left_out(task, stage) for stage in task.family.STAGES},
        clip=clip_plan,
        verification=verification_cost(task, planned),
    )
    if keep is not None:
        atomic.write_json(keep / "plan.json", job.model_dump(mode="json"))
    return job


def require_tpu(machine: Machine) -> Chip:
    """Returns the machine's chip; raises if it is no TPU."""
    return machine.require_tpu(
        remedy="Name a slice with --topology v6e:2x4", fact="It is no TPU, and a plan is for one"
    )


def _checked_stages(task: Task, names: Sequence[str]) -> list[str]:
    """Returns the stages to compile: the stages in `names`, or without names all stages with known input shapes."""
    require_tpu(task.machine)
    networks = {stage.name: str(stage.network) for stage in task.family.STAGES if stage.network is not None}
    # Text encoders are compiled, but no network's rules are for them.
    encoding = [stage.name for stage in task.family.STAGES if task.encodes_on_devices(stage)]
    candidates = [stage for stage in task.family.STAGES if stage.name in (*networks, *encoding)]
    if "all" in names:
        chosen = [stage.name for stage in candidates]
    elif names:
        chosen = list(names)
    else:  # `like` gives the shapes of a stage's inputs before a run
        known = (s for s in candidates if s in task.denoising or s.like is not None or s.name in encoding)
        chosen = [stage.name for stage in known]
    with_network = [name for name in chosen if name not in encoding]
    for name in with_network:
        if name not in networks:
            fact = "Nothing of it is compiled: it runs on the host, in PyTorch"
            raise BadValueError(f"--stage {name}", fact, f"Name one of {', '.join(networks)}, or all")
    strategy = task.card.strategies[task.job.strategy]
    shard.check_axes(strategy, [networks[name] for name in with_network], task.job, task.job_document)
    tiled = [stage for stage in task.family.STAGES if stage.name in with_network]
    check_tiling(task.card, task.job, tiled, task.job_document)
    return chosen


def _left_out(task: Task, stage: Stage) -> StageLeftOut:
    """Returns, in place of a stage's plan, why the stage was not compiled."""
    if stage.network is None and not task.encodes_on_devices(stage):
        why = "It runs on the host, in PyTorch: nothing of it is compiled"
        return StageLeftOut(status="not_ported", why=why)
    if stage.network is not None and stage.like is None:
        return StageLeftOut(status="not_asked", why="The shapes of its inputs are not known beforehand")
    return StageLeftOut(status="not_asked", why=f"Add --stage {stage.name}, or --stage all")


SHIFTS_ASSUMED = (
    "attention without a named bound needs no maximum: queries are short enough, and keys near enough to their mean "
    "(else --scores any)"
)


def _assumptions(task: Task, bounded: bool, shifted: bool) -> list[str]:
    """Returns in words what a plan takes for granted: about scores, tokens, time, flags and LoRA files."""
    text = "the norms' gains keep the scores '{}' within their bound" if bounded else "no bound of the scores '{}'"
    known = [text.format(name) for name in task.card.score_bounds]
    if shifted:
        known.append(SHIFTS_ASSUMED)
    flags = task.request.execution.xla_flags
    chosen = [] if flags is None else [f"--xla-flags {flags}"]
    return [*known, "every token is valid", "nothing overlaps", *chosen, *aot.unchecked_loras(task)]


def lossy(task: Task) -> list[str]:
    """Returns in words the settings that change a job's result on purpose: int8 attention and a step cache."""
    eight_bits = [f"attention splash_int8 {LOSSY_INT8}"] if task.job.attention == "splash_int8" else []
    cache, steps = task.job.cache, task.job.steps
    if cache is None or len(cache.computed(steps)) == steps:
        return eight_bits
    return [*eight_bits, f"cache {cache.kind} computes {schedule_text(cache, steps)}"]


def _stage_plan(task: Task, name: str, folder: Path, bounded: bool) -> StagePlan:
    """Compiles a stage in a child process, and returns the stage's figures; the compiler's dump goes into `folder`."""
    compiled = aot.compiled_in_child(task, name, folder, bounded)
    [stage] = (stage for stage in task.family.STAGES if stage.name == name)
    networks = [str(stage.network)] if stage.network is not None else encoder_names(task.card, stage)
    # Figures of each call are combined to those of one denoising step, or of one whole decode.
    return combined(
        [_program_plan(task, program, folder, denoises=name in DENOISING) for program in compiled],
        steps=compiled[0].steps,
        dtypes={key: task.dtype(key) for key in networks},
        precision={key: task.card.components[key].precision for key in networks},
    )


def _program_plan(task: Task, compiled: aot.CompiledProgram, folder: Path, denoises: bool) -> ProgramPlan:
    """Returns the figures of one compiled program, read from the compiler's dump in `folder`."""
    names = ("inputs", "times", "operators", "trace_s", "compile_s")
    shared = {name: getattr(compiled, name) for name in names} | {"borders_bytes": compiled.borders}
    shared["dump"] = None if compiled.dump is None else f"{folder.name}/{compiled.dump}"
    if isinstance(compiled.memory, Overflow):
        return _unfit(task, compiled.flops, compiled.memory, shared)
    sizes = compiled.memory
    chip = task.machine.require_tpu()
    # If the program has no dump, `hlo.read` gets the folder, and raises with the names of the files in it.
    program = hlo.read(folder / (compiled.dump or ""), flops_per_cycle=chip.cores * chip.bundle_flops)
    time = program_time(task, compiled, program, denoises)
    return ProgramPlan(
        fits=sizes.peak <= chip.memory,
        per_device=Memory(
            arguments_bytes=sizes.argument,
            temporaries_bytes=sizes.temp,
            peak_bytes=sizes.peak,
            constants_bytes=program.constants(),
            hbm_bytes=chip.memory,
        ),
        per_block=time.block(),
        per_step=time.communication(),
        step=time.step(),
        attention=time.attention,
        largest=time.largest(),
        findings=[],
        not_modelled=time.not_modelled(),
        **shared,
    )


def _unfit(task: Task, flops: int, overflow: Overflow, shared: dict[str, Any]) -> ProgramPlan:
    """Returns the few known figures of a program that does not fit: the compiler then leaves no program to read."""
    limit = overflow.limit_bytes if overflow.what == "hbm" else None
    unknown = dict.fromkeys(StepTime.model_fields) | {"floor_s": floor_seconds(flops, task.machine), "flops": flops}
    return ProgramPlan(
        fits=False,
        per_device=Memory(
            arguments_bytes=None,
            temporaries_bytes=None,
            peak_bytes=overflow.asked_bytes if overflow.what == "hbm" else None,
            constants_bytes=None,
            hbm_bytes=task.machine.require_tpu().memory if limit is None else limit,
        ),
        per_block=None,
        per_step=None,
        step=StepTime.model_validate(unknown),
        attention=None,
        largest=[],
        findings=[overflow],
        not_modelled=[],
        **shared,
    )


def combined(
    programs: Sequence[ProgramPlan], steps: int, *, dtypes: dict[str, str], precision: dict[str, str]
) -> StagePlan:
    """Returns a stage's figures from its programs' figures: the largest program's bytes, and the times of a step."""
    largest = max(programs, key=lambda program: (not program.fits, program.per_device.peak_bytes or 0))
    longest = max(programs, key=lambda program: program.step.flops * program.times)
    # A single program that runs once a step has the step's figures; otherwise a step is an average.
    if len(programs) == 1 and programs[0].times == steps:
        block = longest.per_block
        sent = longest.per_step
        step = longest.step
        operations = longest.largest
    else:
        block = None
        sent, step, operations = _average_step(programs, steps)
    return StagePlan(
        fits=all(program.fits for program in programs),
        per_device=largest.per_device,
        per_block=block,
        per_step=sent,
        step=step,
        attention=longest.attention,
        largest=operations,
        findings=[finding for program in programs for finding in program.findings],
        not_modelled=list(dict.fromkeys(text for program in programs for text in program.not_modelled)),
        operators="; ".join(dict.fromkeys(program.operators for program in programs)),
        trace_s=sum(program.trace_s for program in programs),
        compile_s=sum(program.compile_s for program in programs),
        steps=steps,
        programs=list(programs),
        dtypes=dtypes,
        precision=precision,
    )


def _average_step(programs: Sequence[ProgramPlan], steps: int) -> tuple[Communication, StepTime, list[Operation]]:
    """Returns the collectives, the time and the ten longest operations of an average step of all programs.

    Each program counts by its runs in a step. A time is None if any program does not fit, and so has no time.
    """
    sent, operations = [], []
    for program in programs:
        for collective in program.per_step.collectives if program.per_step else ():
            sent.append(collective.model_copy(update={"count": collective.count * program.times / steps}))
        for operation in program.largest:
            operations.append(operation.model_copy(update={"ms": operation.ms * program.times / steps}))
    operations.sort(key=lambda operation: -operation.ms)
    known = []
    for program in programs:
        step = program.per_step
        if step is not None and step.communication_ms is not None:
            known.append(step.communication_ms * program.times / steps)
    sent_ms = sum(known) if len(known) == len(programs) else None
    communication = Communication(communication_ms=sent_ms, collectives=sent)
    total: dict[str, float | None] = {}
    for name in StepTime.model_fields:
        amounts = [getattr(program.step, name) for program in programs]
        total[name] = None
        if None not in amounts:
            total[name] = sum(amount * p.times for amount, p in zip(amounts, programs, strict=True)) / steps
    return communication, StepTime.model_validate(total), operations[:10]


def verification_cost(task: Task, planned: Mapping[str, StagePlan]) -> VerificationCost | None:
    """Returns the memory and FLOPs of `torchport verify` for one step; None if no denoising stage was planned."""
    stages = [stage for stage in task.denoising if stage.name in planned]
    if not stages:
        return None
    host, device, values, flops = [], [], 0, 0.0
    for stage in stages:
        name = str(stage.network)
        stage_plan = planned[stage.name]
        with in_force(task, [stage]):  # upstream's module may need a stub to be imported
            count = sum(parameter.numel() for parameter in network.outline(task, name).parameters())
        dtype = task.settings.dtypes[name]
        # `verify` takes a wider dtype as its yardstick.
        yardstick = torch.float64 if dtype.itemsize >= torch.float32.itemsize else torch.float32
        # The original is on the host in the job's dtype and in the yardstick's; the port is on one device.
        host.append(count * (dtype.itemsize + yardstick.itemsize))
        device.append(count * dtype.itemsize)
        borders = sum(program.borders_bytes * program.times for program in stage_plan.programs)
        borders //= stage_plan.steps
        values += borders
        flops += stage_plan.step.flops * (VERIFY_LARGE_CALLS if borders > BORDERS_LIMIT else VERIFY_CALLS)
    return VerificationCost(
        host_bytes=max(host) + values,
        values_bytes=values,
        device_bytes=max(device),
        flops=flops,
        host_s=round(flops / HOST_FLOPS, 1),
    )


def clip_of_plans(task: Task, planned: Mapping[str, StagePlan]) -> Clip | None:
    """Returns the planned seconds of a clip; None if a stage with a network was not planned or does not fit."""
    stages = [stage for stage in task.family.STAGES if stage.network is not None or task.encodes_on_devices(stage)]
    if any(stage.name not in planned or planned[stage.name].step.model_s is None for stage in stages):
        return None
    encode = [] if task.job.encode == "devices" else [_encode_part(task)]
    with in_force(task, task.family.STAGES):  # upstream's modules may need a stub to be imported
        dtypes, host_bytes = task.settings.dtypes, preflight.host_bytes(task)
        sizes = {name: network.parameters(task, name) for name in task.card.components}
    weights = sum(dtypes.get(name, torch.float16).itemsize * count for name, count in sizes.items())
    duration = sum(stage.trace_s + stage.compile_s for stage in planned.values())
    limit = "traced and compiled, as long as on this machine; JAX's cache keeps the programs"
    parts = [
        ClipPart(part="load", once=True, seconds=weights / DISK, limit=f"reads {size_text(weights)} of weights"),
        ClipPart(part="compile", once=True, seconds=duration, limit=limit),
        *encode,
        *(_device_part(planned[stage.name], stage) for stage in stages),
        _write_part(task),
    ]
    first_alone = sum(part.seconds for part in parts if part.once)
    repeated = sum(part.seconds for part in parts if not part.once)
    chip, length = task.machine.require_tpu(), task.settings.frames / task.job.fps
    chips = task.machine.devices // chip.devices
    price = task.job.price_per_chip_hour
    chips_of_host = chips if chips <= ONE_HOST else MANY_HOSTS
    return Clip(
        parts=parts,
        first_s=first_alone + repeated,
        next_s=repeated,
        length_s=length,
        times_real_time=repeated / length,
        chip_s=repeated * chips,
        dollars=None if price is None else repeated * chips * price / 3600,
        host_bytes=host_bytes,
        host_memory_bytes=None if chip.host_memory is None else chip.host_memory * chips_of_host,
    )


def _encode_part(task: Task) -> ClipPart:
    """Returns the time of the encoders on the host; they belong to the first stage."""
    stage = task.family.STAGES[0]
    with in_force(task, [stage]):
        calls = aot.encoder_calls(task, stage).values()
    flops = sum(call.times * (call.flops or 0) for call in calls)
    limit = f"{flops:.3g} FLOP of the encoders on the host"
    return ClipPart(part="encode", once=False, seconds=flops / HOST_FLOPS, limit=limit)


def _device_part(plan: StagePlan, stage: Stage) -> ClipPart:
    """Returns the time of a stage on the devices, with its largest share named as the limit."""
    step = plan.step.known
    assert step is not None
    other = step.calibrated_other_s
    moved = step.model_s - step.attention_s - other
    shares = {"attention": step.attention_s, "other operations": other, "communication": moved}
    largest = max(shares, key=lambda name: shares[name])
    count = f"{plan.steps} steps of {step.model_s:.3g} s, " if stage.name in DENOISING else ""
    limit = f"{count}{shares[largest] / step.model_s:.0%} of it {largest}" if step.model_s else "nothing"
    return ClipPart(part=stage.name, once=False, seconds=plan.steps * step.model_s, limit=limit)


def _write_part(task: Task) -> ClipPart:
    """Returns the time to write the raw frames and to encode the video or picture: the longer time, as both overlap."""
    settings = task.settings
    pixels = settings.frames * settings.height * settings.width
    frame_bytes = 3 * pixels  # a byte for each colour
    disk = frame_bytes / DISK
    threads = max(1, settings.height // ROWS_OF_THREAD)
    is_picture = task.card.makes_pictures
    encoding = pixels / COMPRESSED if is_picture else pixels / (ENCODED * threads)
    work = "of a picture are compressed" if is_picture else f"of video are encoded on {threads} threads"
    limit = f"{pixels / 1e6:.3g} Mpixel {work}"
    if disk > encoding:
        limit = f"{size_text(frame_bytes)} of frames are written to the disk"
    return ClipPart(part="write", once=False, seconds=max(disk, encoding), limit=limit)
