"""The expected time of a compiled program: the compiler's estimates, and models of kernels and collectives.

Attention is modelled by its share of peak FLOP/s, other kernels by their instruction schedules, collectives by bytes
and links. The compiler estimates all else. The model lets nothing overlap.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, get_args

import pydantic

from torchport.config import Frozen, read_document, validated
from torchport.config.machine import Chip, Machine
from torchport.kernels.attention import dispatch, tiles, transposed
from torchport.plan import aot
from torchport.plan.figures import (
    Attention,
    BlockTime,
    Collective,
    Communication,
    KernelAttention,
    KernelTime,
    Operation,
    Parts,
    StepTime,
)
from torchport.plan.tpu import bundles, hlo
from torchport.shard import grid, ways
from torchport.task import Task

SHIFT = {64: 1.037, 128: 1.006}
"""How much longer attention takes if scores are shifted than if they are bounded, by head size: by the kernel's
instruction schedule on v6e, 11,613 bundles of the steady loop against 11,201, and 12,537 against 12,469."""
SECOND_ARRAY = 1.025
"""How much longer attention takes if the text's keys are in a second array: by the kernel's instruction schedule for
111,600 and 1,256 keys on v6e, 45.7 ms against 44.6."""
_MOVED = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0, "collective-permute": 1.0}
"""How often a collective of n devices moves its larger array through a device's links; times (n - 1) / n."""


@dataclasses.dataclass(frozen=True)
class ProgramTime:
    """A compiled program on a slice, with all that its modelled time depends on."""

    program: hlo.HloProgram
    machine: Machine
    spots: Sequence[grid.Spot]  #: The place of each device on the grid of chips.
    #: The traced calls of attention: one for all blocks where these are stacked in a loop.
    calls: Sequence[Attention]
    passes: dict[str, float]  #: Seconds of one call of each other kernel, by its name.
    flops: int  #: FLOPs of one run, on the whole slice.
    denoises: bool = True  #: Whether it is a denoising network, which consists of blocks.

    @property
    def chip(self) -> Chip:
        return self.machine.require_tpu()

    @functools.cached_property
    def loop(self) -> hlo.HloLoop | None:
        """The loop over blocks; None without a loop, where blocks are unrolled."""
        return _block_loop(self.program) if self.denoises else None

    @property
    def attention(self) -> Attention | None:
        """The call of attention with the most FLOPs; None if there is none."""
        return max(self.calls, key=lambda call: call.flops_per_device, default=None)

    def block(self) -> BlockTime | None:
        """Returns the modelled time of one block; None if blocks do not run in a loop."""
        if self.loop is None:
            return None
        body, sent = self.loop.body, _collectives(self.program, self.loop.body, self.spots)
        kernels = self.program.kernels(body)
        return BlockTime(
            count=self.loop.trips * self.loop.times,
            other_ms=1e3 * self.loop.cycles / self.chip.clock + 1e3 * self._kernel_seconds(body),
            kernels=[
                KernelTime(kernel=name, count=times, ms=1e3 * self.passes[name])
                for name, times in kernels.items()
                if name in self.passes
            ],
            attention_ms=self.attention.ms if isinstance(self.attention, KernelAttention) else None,
            communication_ms=1e3 * communication_seconds(sent, self.chip),
            collectives=sent,
        )

    def communication(self) -> Communication:
        """Returns the collectives of a whole run, and their modelled time."""
        sent = _collectives(self.program, computation=None, spots=self.spots)
        return Communication(communication_ms=1e3 * communication_seconds(sent, self.chip), collectives=sent)

    def step(self) -> StepTime:
        """Returns the modelled time of one run; only a denoising step's time is calibrated."""
        # Attention that no kernel computes is in the compiler's estimate. The call in the loop over blocks was traced
        # once, but runs in each iteration; it is taken to be the longest call.
        attention_ms = sorted(call.ms for call in self.calls if isinstance(call, KernelAttention))
        loop = _block_loop(self.program) if attention_ms else None
        repeats = loop.trips * loop.times - 1 if loop else 0
        sent = _collectives(self.program, computation=None, spots=self.spots)
        parts = Parts[float](
            attention_s=(sum(attention_ms) + repeats * max(attention_ms, default=0.0)) / 1e3,
            other_s=self.program.cycles() / self.chip.clock + self._kernel_seconds(computation=None),
            products_s=sum(run.least * run.times for run in self.program.priced(None)) / self.chip.clock,
            communication_s=communication_seconds(sent, self.chip),
        )
        # The calibration was fitted to denoising steps.
        calibration = shipped_calibration() if self.denoises else None
        return StepTime(
            **parts.model_dump(),
            uncalibrated_s=calibrated(parts, calibration=None),
            model_s=calibrated(parts, calibration),
            floor_s=floor_seconds(self.flops, self.machine),
            flops=self.flops,
        )

    def largest(self) -> list[Operation]:
        """Returns the ten longest operations of a block, or of a program without a loop over blocks."""
        # Attention and collectives have fields of their own in a plan.
        computation = None if self.loop is None else self.loop.body
        kernels = [
            Operation(ms=1e3 * times * self.passes[name], opcode="kernel", source=name)
            for name, times in self.program.kernels(computation).items()
            if name in self.passes
        ]
        compiled = [
            Operation(
                ms=1e3 * runs.cycles / self.chip.clock,
                opcode=runs.instruction.opcode,
                source=str(runs.instruction.source or ""),
            )
            for runs in self.program.largest(10, computation)
        ]
        return sorted([*kernels, *compiled], key=lambda operation: -operation.ms)[:10]

    def not_modelled(self) -> list[str]:
        """Returns in words all work that takes time on a TPU, but is in no part of the model."""
        facts, unpriced = [], self.program.unpriced()
        if unpriced:
            size = sum(runs.instruction.bytes * runs.times for runs in unpriced)
            facts.append(
                f"{len(unpriced)} operation(s) without an estimate of the compiler's, {size / 1e6:.3g} MB of output"
            )
        exchanges = sum(collective.times for collective in self.program.collectives())
        if exchanges:
            facts.append(f"the latency of {exchanges:,} collective(s): what each takes however small it is")
        for call in self.calls:
            # The table has a kernel's share of peak for `row_tokens` keys in bfloat16; far fewer keys reach less.
            if isinstance(call, KernelAttention) and (call.dtype != "bfloat16" or 4 * call.keys < call.row_tokens):
                keys = f"{call.keys:,} keys in {call.dtype}"
                facts.append(f"attention's own share of peak: {keys} are given that of {call.row_tokens:,} in bfloat16")
        if self.loop is None and any(call.implementation not in dispatch.KERNELS for call in self.calls):
            facts.append("attention on its own: it is plain XLA here, and its cycles are among the other operations'")
        return list(dict.fromkeys(facts))

    def _kernel_seconds(self, computation: str | None) -> float:
        """Returns the modelled seconds of all kernels but attention, in a computation, or for None in the program."""
        return sum(times * self.passes.get(kernel, 0.0) for kernel, times in self.program.kernels(computation).items())


def program_time(
    task: Task, compiled: aot.CompiledProgram, program: hlo.HloProgram, denoises: bool = True
) -> ProgramTime:
    """Returns a program's modelled time; each kernel but attention is compiled alone for its instruction schedule."""
    calls = [_attention(task, call) for call in compiled.calls]
    passes = {call.kernel: bundles.pass_seconds(call, task.machine) for call in compiled.passes}
    return ProgramTime(program, task.machine, compiled.spots, calls, passes, compiled.flops, denoises=denoises)


def _block_loop(program: hlo.HloProgram) -> hlo.HloLoop | None:
    """Returns the loop over blocks: the longest loop with a Pallas kernel in it; None if no loop has a kernel."""
    loops = [loop for loop in program.loop_bodies() if program.kernels(loop.body)]
    return max(loops, key=lambda loop: loop.cycles, default=None)


def floor_seconds(flops: int, machine: Machine) -> float:
    """Returns the seconds that the FLOPs alone take at peak on all devices of a slice."""
    return flops / (machine.require_tpu().flops * machine.devices)


def _collectives(program: hlo.HloProgram, computation: str | None, spots: Sequence[grid.Spot]) -> list[Collective]:
    """Returns the collectives of a computation, or for None of the program; equal collectives are counted together."""
    counts = collections.Counter[Collective]()
    for collective in program.collectives(computation):
        # A group of a single device moves nothing, and has no links.
        groups = [[spots[n] for n in group] for group in collective.groups if len(set(group)) > 1]
        # The group with the fewest ports takes longest. Equal collectives have the same key, and are counted by it.
        ports, links = min(
            ((grid.ports(collective.kind, group), grid.links(group)) for group in groups), default=(1.0, "none")
        )
        line = str(collective.source) if collective.source else None
        key = Collective(
            kind=collective.kind,
            bytes=collective.bytes,
            count=0,
            group=collective.group_size,
            source=line,
            links=links,
            ports=ports,
        )
        counts[key] += collective.times
    return [key.model_copy(update={"count": count}) for key, count in counts.items()]


def communication_seconds(sent: Sequence[Collective], chip: Chip) -> float:
    """Returns the modelled seconds of collectives: bytes by the links' bandwidth, without any overlap."""
    seconds = 0.0
    for collective in sent:
        kind, group = collective.kind, collective.group
        # `bytes` are of the output, and the larger array of a reduce-scatter is its input.
        size = collective.bytes * (group if kind == "reduce-scatter" else 1)
        # A device keeps its own n-th part; in a permutation it sends all.
        share = 1.0 if kind == "collective-permute" else (group - 1) / group
        seconds += collective.count * _MOVED.get(kind, 1.0) * size * share / (collective.ports * chip.link)
    return seconds


def _attention(task: Task, call: dispatch.Traced) -> Attention:
    """Returns a traced call of attention with its FLOPs and, if a kernel computes it, the kernel's share of peak."""
    chip = task.machine.require_tpu()
    split = math.prod(task.job.mesh.values())
    # Two products, q k^T and p v, each with a multiply and an add.
    flops = 4 * call.batch * call.heads * call.queries * call.keys * call.head_size // split
    sizes = dataclasses.asdict(call) | {"flops_per_device": flops}
    # None if no kernel computes the call: `plain`, `xla` and `cudnn` are not among the kernels' names.
    implementation = next((name for name in get_args(tiles.KernelName) if name == call.implementation), None)
    if implementation is None:
        return Attention(**sizes, steady_percent=None, peak_percent=None)
    heads = call.heads // ways(dispatch.HEAD_AXES, task.job.mesh)
    # Of fewer heads than devices, some devices compute the same head.
    _, size = transposed.grouping(max(heads, 1), call.head_size)
    row = tiles.row(chip.name, implementation, size, call.bounded or call.shifted)
    # The row of the table is for a padded head size; arithmetic on padding is not useful.
    useful = call.head_size / size
    share = (
        useful
        * row.peak_percent
        / (SECOND_ARRAY if call.arrays > 1 else 1)
        / (SHIFT.get(size, 1) if call.shifted else 1)
    )
    return KernelAttention(
        **sizes,
        steady_percent=useful * row.steady_percent,
        peak_percent=share,
        row_tokens=row.tokens,
        ms=1e3 * flops / (chip.flops * share / 100),
    )


CALIBRATION = Path(__file__).with_name("calibration.yaml")
"""The only factor between modelled and measured step times, which `benchmarks/calibrate.py` fits.

It divides the estimates of collectives, and what the compiler's estimates have beyond the products at peak. Attention
and these products are not divided, as no program takes less: attention's time is from the kernel's instruction
schedule, which has no stalls. All models, machines, kernels and meshes share the factor: with a factor for each, the
model would only repeat the measurements.
"""


class Calibration(Frozen):
    factor: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
    """The divisor of all but attention and the products at peak."""
    spread_percent: Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
    """The root mean square of log(modelled / measured) over the steps, as percent."""
    steps: pydantic.PositiveInt
    """The number of measured step times to which the factor was fitted."""
    versions: dict[str, str]
    """Versions of the packages on which the modelled seconds depend."""
    date: str
    """The day of the fit."""


def read_calibration(file: Path) -> Calibration:
    return validated(Calibration, read_document(file, file.name))


@functools.cache
def shipped_calibration() -> Calibration | None:
    return read_calibration(CALIBRATION) if CALIBRATION.is_file() else None


def calibrated(parts: Parts[float], calibration: Calibration | None) -> float:
    """Returns the sum of a model's seconds; a calibration's factor divides all but attention and products at peak."""
    kept = parts.attention_s + parts.products_s
    rest = parts.other_s - parts.products_s + parts.communication_s
    return kept + (rest if calibration is None else rest / calibration.factor)


def calibration_words(calibration: Calibration | None, versions: Mapping[str, str]) -> str:
    """Returns in words the calibration of modelled times, with its versions where they differ from `versions`."""
    if calibration is None:
        return "uncalibrated"
    factor = f"factor {calibration.factor:.3g} for all but attention and products"
    spread = f"spread ±{calibration.spread_percent:.0f} %"
    text = f"calibrated with {calibration.steps} published steps, {factor}, {spread}"
    fitted = calibration.versions.items()
    other = [f"{name} {version}" for name, version in fitted if versions.get(name) != version]
    return f"{text} (with {', '.join(other)})" if other else text
