"""The planned seconds from a prompt to the video file (a clip), by part, and what limits each part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from torchport.compile import network, preflight
from torchport.compile.in_force import in_force
from torchport.config.card import DENOISING
from torchport.plan import aot
from torchport.plan.figures import Clip, ClipPart, StagePlan
from torchport.progress import size_text
from torchport.stages.family import Stage
from torchport.task import Task

HOST_FLOPS = 1e12
"""Floating-point operations of a host in a second, as plans assume."""
DISK = 1e9
"""Bytes that a host reads or writes in a second, on a disk or over a network, as plans assume."""
ENCODED = 16.7e6
"""Pixels of video that a core encodes in a second. x264 took 0.06 CPU-s for a million of a noisy video."""
ROWS_OF_THREAD = 32
"""x264 takes a thread for as many rows of a frame, if there are cores: a TPU's host has 24 for each chip, or more."""
COMPRESSED = 6e6
"""Pixels of a picture that a core compresses in a second. PNG took 0.16 CPU-s for a million."""
ONE_HOST, MANY_HOSTS = 8, 4
"""The most chips of a slice with one host, and the chips of each host in a larger slice."""
ASSUMED = (
    f"a clip: the host does {HOST_FLOPS / 1e12:.3g} TFLOP/s, reads and writes {DISK / 1e9:.3g} GB/s, and encodes "
    f"{ENCODED / 1e6:.3g} Mpixel/s on each of x264's threads; what moves between host and devices takes no time"
)


def of_plans(task: Task, planned: Mapping[str, StagePlan]) -> Clip | None:
    """Returns the planned seconds of a clip; None if a stage with a network was not planned or does not fit."""
    stages = [stage for stage in task.family.STAGES if stage.network is not None or task.encodes_on_devices(stage)]
    if any(stage.name not in planned or planned[stage.name].step.model_s is None for stage in stages):
        return None
    encode = [] if task.job.encode == "devices" else _encode(task)
    with in_force(task, task.family.STAGES):  # upstream's modules may need a stub to be imported
        load, host_bytes = _load(task), preflight.host_bytes(task)
    parts = [load, _compile(planned), *encode, *(_on_devices(planned[s.name], s) for s in stages)]
    parts.append(_write(task))
    seconds = {once: sum(part.seconds for part in parts if part.once == once) for once in (True, False)}
    chip, length = task.machine.require_tpu(), task.settings.frames / task.job.fps
    chips = task.machine.devices // chip.devices
    price = task.job.price_per_chip_hour
    chips_of_host = chips if chips <= ONE_HOST else MANY_HOSTS
    return Clip(
        parts=parts,
        first_s=seconds[True] + seconds[False],
        next_s=seconds[False],
        length_s=length,
        times_real_time=seconds[False] / length,
        chip_s=seconds[False] * chips,
        dollars=None if price is None else seconds[False] * chips * price / 3600,
        host_bytes=host_bytes,
        host_memory_bytes=None if chip.host_memory is None else chip.host_memory * chips_of_host,
    )


def _load(task: Task) -> ClipPart:
    size = 0
    for name in task.card.components:
        size += task.settings.dtypes.get(name, torch.float16).itemsize * network.parameters(task, name)
    return ClipPart(part="load", once=True, seconds=size / DISK, limit=f"reads {size_text(size)} of weights")


def _compile(planned: Mapping[str, StagePlan]) -> ClipPart:
    seconds = sum(stage.trace_s + stage.compile_s for stage in planned.values())
    limit = "traced and compiled, as long as on this machine; JAX's cache keeps the programs"
    return ClipPart(part="compile", once=True, seconds=seconds, limit=limit)


def _encode(task: Task) -> Iterator[ClipPart]:
    """Yields one part: the time of the text encoders, which run on the host."""
    stage = task.family.STAGES[0]
    with in_force(task, [stage]):
        calls = aot.encoder_calls(task, stage).values()
    flops = sum(call.times * (call.flops or 0) for call in calls)
    limit = f"{flops:.3g} FLOP of the encoders on the host"
    yield ClipPart(part="encode", once=False, seconds=flops / HOST_FLOPS, limit=limit)


def _on_devices(plan: StagePlan, stage: Stage) -> ClipPart:
    """Returns the time of a stage on the devices; its limit is the largest share of it."""
    step = plan.step.known
    assert step is not None
    rest = step.model_s - step.attention_s
    other = rest * step.other_s / ((step.other_s + step.communication_s) or 1)
    shares = {"attention": step.attention_s, "other operations": other, "communication": rest - other}
    largest = max(shares, key=lambda name: shares[name])
    count = f"{plan.steps} steps of {step.model_s:.3g} s, " if stage.name in DENOISING else ""
    limit = f"{count}{shares[largest] / step.model_s:.0%} of it {largest}" if step.model_s else "nothing"
    return ClipPart(part=stage.name, once=False, seconds=plan.steps * step.model_s, limit=limit)


def _write(task: Task) -> ClipPart:
    """Returns the time to write the frames and, at the same time, the video or the picture."""
    settings = task.settings
    pixels = settings.frames * settings.height * settings.width
    disk = 3 * pixels / DISK
    threads = max(1, settings.height // ROWS_OF_THREAD)
    is_picture = task.card.makes_pictures
    encoding = pixels / COMPRESSED if is_picture else pixels / (ENCODED * threads)
    work = "of a picture are compressed" if is_picture else f"of video are encoded on {threads} threads"
    limit = f"{pixels / 1e6:.3g} Mpixel {work}"
    if disk > encoding:
        limit = f"{size_text(3 * pixels)} of frames are written to the disk"
    return ClipPart(part="write", once=False, seconds=max(disk, encoding), limit=limit)
