"""A plan's figures: for `--json`, for `plan.json`, for the page and for the terminal.

Each field has its meaning and its unit below it; docs/plan.md has the same sentences (see `schema`). None stands for
an unknown figure: a program that does not fit has no time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Generic, Literal, TypeVar

import pydantic

from torchport.config import Frozen
from torchport.config.card import DENOISING
from torchport.config.strategy import Axis
from torchport.errors import BadValueError

SecondsT = TypeVar("SecondsT")


class Figure(Frozen, use_attribute_docstrings=True):
    """A part of a plan; the sentence below a field is its description."""


class Memory(Figure):
    """The memory of one device."""

    arguments_bytes: int | None
    """bytes of weights and inputs"""
    temporaries_bytes: int | None
    """bytes of what is computed on the way"""
    peak_bytes: int | None
    """bytes that the program takes at most, outputs and code included"""
    constants_bytes: int | None
    """bytes of constants in the program: what was traced into it instead of being an argument"""
    hbm_bytes: int
    """bytes that the device has"""


class Collective(Figure):
    """A collective of one block or one step."""

    kind: str
    """the collective, as HLO names it"""
    bytes: int
    """bytes of one output on one device"""
    count: int | float
    """times that it runs"""
    group: int
    """devices that exchange with one another"""
    source: str | None
    """the line of PyTorch that it comes from"""
    links: str
    """the shape of its group on the grid of chips; of several unlike groups, of the one with the fewest ports"""
    ports: float
    """links that each device of the group has for it"""


class KernelTime(Figure):
    """A kernel beside attention."""

    kernel: str
    """the kernel's name"""
    count: int
    """calls in one block"""
    ms: float
    """milliseconds of one call: by its instruction schedule, compiled alone, or by its bytes where these take longer"""


class BlockTime(Figure):
    """One block of a network whose blocks run in a loop."""

    count: int
    """blocks of a step"""
    other_ms: float
    """milliseconds of all but attention and collectives, by the compiler's estimate; products at peak at the least"""
    kernels: list[KernelTime]
    """kernels beside attention; their time is within `other_ms`"""
    attention_ms: float | None
    """milliseconds of attention by the model; null where it is no kernel"""
    communication_ms: float
    """milliseconds of the collectives by the model"""
    collectives: list[Collective]
    """the collectives of one block"""


class Communication(Figure):
    """The collectives of a denoising step or of a whole decode, those of blocks included."""

    communication_ms: float | None
    """milliseconds by the model"""
    collectives: list[Collective]
    """those of one kind, size, line and links counted together; fields as in a block"""


class Parts(Figure, Generic[SecondsT]):
    """The parts of a modelled time, before any factor; of a program that does not fit they may be None."""

    attention_s: SecondsT
    """seconds of attention kernels, by the model; 0 where attention is no kernel but XLA's"""
    other_s: SecondsT
    """seconds of all else that computes, by the compiler's estimate; products at peak at the least"""
    products_s: SecondsT
    """seconds of `other_s` that its products take at peak: no program takes less, so no factor divides them"""
    communication_s: SecondsT
    """seconds of the collectives, by the model"""


class ModelledTime(Parts[SecondsT], Generic[SecondsT]):
    """The parts with their sum, before and after the factor."""

    uncalibrated_s: SecondsT
    """seconds: the sum of attention, other and communication"""
    model_s: SecondsT
    """seconds: the same; of a step that denoises, with all but attention and products divided by a factor"""


class KnownTime(ModelledTime[float]):
    """The modelled time of a program that fits into memory: no figure is None."""

    @property
    def factor(self) -> float:
        """The factor of the calibration; 1 without a calibration, or where attention takes all of the time."""
        if self.model_s == self.uncalibrated_s:
            return 1.0
        kept = self.attention_s + self.products_s
        return (self.uncalibrated_s - kept) / (self.model_s - kept)

    @property
    def calibrated_other_s(self) -> float:
        """Seconds of all that computes but attention, as they are in `model_s`."""
        return self.products_s + (self.other_s - self.products_s) / self.factor


class StepTime(ModelledTime[float | None]):
    """A denoising step, or a whole decode."""

    floor_s: float
    """seconds that the arithmetic alone takes at peak on the whole slice"""
    flops: int | float
    """floating-point operations on the whole slice"""

    @property
    def known(self) -> KnownTime | None:
        """The modelled time; None if the program does not fit into memory, as its time is then not known."""
        return None if self.model_s is None else KnownTime(**self.model_dump(include=set(KnownTime.model_fields)))


class Attention(Figure):
    """The largest call of attention, on all devices together."""

    implementation: str
    """the implementation"""
    batch: int
    """batch of one call"""
    heads: int
    """heads"""
    queries: int
    """queries"""
    keys: int
    """keys, those of all arrays"""
    head_size: int
    """features of a head"""
    bounded: bool
    """whether a bound of the scores is known"""
    shifted: bool
    """whether shifts of the scores are taken to spare the maximum"""
    arrays: int
    """arrays that the keys come in"""
    dtype: str
    """dtype of queries, keys and values"""
    flops_per_device: int
    """useful floating-point operations of one call on one device"""
    steady_percent: float | None
    """percent of the bfloat16 peak in the kernel's steady loop; null where it is no kernel"""
    peak_percent: float | None
    """percent of the bfloat16 peak of a whole call; null where it is no kernel"""


class KernelAttention(Attention):
    """The largest call of attention, where a kernel computes it."""

    steady_percent: float
    peak_percent: float
    row_tokens: int
    """tokens for which the table of tiles has this share of peak; absent where it is no kernel"""
    ms: float
    """milliseconds of one call by the model; absent where it is no kernel"""


class Operation(Figure):
    """An operation that takes long."""

    ms: float
    """milliseconds by the compiler's estimate; products at peak at the least"""
    opcode: str
    """the operation, as HLO names it, or `kernel`"""
    source: str
    """the line of PyTorch that it comes from, or the kernel's name; empty where there is none"""


class Overflow(Figure):
    """What does not fit."""

    what: Literal["hbm", "vmem"]
    """the memory"""
    kernel: str | None
    """the kernel that takes too much vector memory"""
    tile: str | None
    """the kernel's tile"""
    asked_bytes: int | None
    """bytes that are needed"""
    limit_bytes: int | None
    """bytes that there are"""
    fact: str
    """the same in words"""


class PlanFigures(Figure):
    """The figures that a program has, and a stage of one or several programs."""

    status: Literal["ok"] = "ok"
    """`ok`: it was compiled"""
    fits: bool
    """whether it fits; of a stage, whether all of its programs do"""
    per_device: Memory
    """of a stage, the memory of the program that takes most"""
    per_block: BlockTime | None
    """one block of a network that denoises; null where blocks do not run in a loop"""
    per_step: Communication | None
    """the collectives of a denoising step, or of a whole decode"""
    step: StepTime
    """the time of a denoising step, or of a whole decode"""
    attention: KernelAttention | Attention | None
    """the largest call of attention"""
    largest: list[Operation]
    """the ten most expensive operations of a block, or where there is none of the stage"""
    findings: list[Overflow]
    """what does not fit"""
    not_modelled: list[str]
    """what takes time and is in no part of the model"""
    operators: str = ""
    """how many operators it calls, by what is known of them (engine.md)"""
    trace_s: float
    """seconds of tracing on this machine"""
    compile_s: float
    """seconds of compiling on this machine"""


class ProgramPlan(PlanFigures):
    """One run of one program."""

    inputs: dict[str, list[int]]
    """shapes of its inputs, by name"""
    times: int
    """runs in the stage"""
    borders_bytes: int
    """what the blocks get and return in one run, each tensor once: `torchport verify` records it"""
    dump: str | None
    """its file, in the folder of `--keep`"""


class StagePlan(PlanFigures):
    """A stage that was compiled."""

    steps: int
    """denoising steps; 1 for another stage"""
    programs: list[ProgramPlan]
    """one for each set of input shapes; the figures above for one run, and four more"""
    dtypes: dict[str, str]
    """dtype of the network, by its name"""
    precision: dict[str, str]
    """precision of the network's matrix products, by its name"""


class StageLeftOut(Figure):
    """A stage that was not compiled."""

    status: Literal["not_ported", "not_asked"]
    """`not_ported` or `not_asked`: it was not compiled"""
    why: str
    """the reason, in words; the only other field of such a stage"""


class VerificationCost(Figure):
    """What `torchport verify` takes, of one step of each network that denoises."""

    host_bytes: int
    """the host's memory: weights of the original in its own dtype and in the yardstick's, and the values"""
    values_bytes: int
    """what the original's blocks get and return in a step: it lies on disk, too, in the folder of TMPDIR"""
    device_bytes: int
    """memory of one device for the port's weights, whole: its modules are called one by one there"""
    flops: int | float
    """arithmetic on the host: calls of the original, most of them in the yardstick's dtype"""
    host_s: float
    """seconds of that on a host with 1 TFLOP/s"""


class ClipPart(Figure):
    """A part of the way from a prompt to the file of the video."""

    part: str
    """`load`, `compile`, `encode`, a stage with a network, or `write`"""
    once: bool
    """whether the first clip alone takes it: clips of one shape share what was loaded and compiled"""
    seconds: float
    """seconds by the model"""
    limit: str
    """what limits it, in words"""


class Clip(Figure):
    """The seconds from a prompt to the file of the video; parts run one after the other."""

    parts: list[ClipPart]
    """the parts, in their order"""
    first_s: float
    """seconds of the first clip, with loading and compiling"""
    next_s: float
    """seconds of each clip after it"""
    length_s: float
    """seconds that the video lasts"""
    times_real_time: float
    """`next_s` over `length_s`: below 1, a video is made faster than it plays"""
    chip_s: float
    """`next_s` times the chips of the slice"""
    dollars: float | None
    """US dollars of `chip_s`; null where the config has no `price_per_chip_hour`"""
    host_bytes: int
    """memory that a stage takes on each host at most: weights of encoders, latents, frames"""
    host_memory_bytes: int | None
    """memory of a host as Google rents it with so many chips; null where it is not known, and then all fits"""

    @property
    def fits_host(self) -> bool:
        """Whether the host's memory is enough."""
        return self.host_memory_bytes is None or self.host_bytes <= self.host_memory_bytes


class JobPlan(Figure):
    """A job's plan."""

    model: str
    """the model card"""
    machine: str
    """the slice"""
    strategy: str
    """the sharding rules"""
    mesh: dict[Axis, int]
    """sizes of the mesh's axes"""
    fits: bool
    """whether every stage that was compiled fits, and the host's part of the job in its memory"""
    versions: dict[str, str]
    """versions of the packages that decide the figures"""
    assumptions: list[str]
    """what is taken for granted; the first says what the plan was calibrated with"""
    lossy: list[str] = []
    """what makes the result another than the model's own: attention in eight bits, a step cache"""
    stages: dict[str, Annotated[StagePlan | StageLeftOut, pydantic.Field(discriminator="status")]]
    """the stages, by name"""
    clip: Clip | None = None
    """a whole clip; null where a stage with a network was not compiled, or does not fit"""
    verification: VerificationCost | None = None
    """what `torchport verify` takes; null where no stage that denoises was compiled"""

    @property
    def at_once_bytes(self) -> int | None:
        """Bytes on each device with all denoising networks on it; None for a single network, or if any does not fit."""
        stages = [stage for name, stage in self.stages.items() if name in DENOISING and isinstance(stage, StagePlan)]
        sizes = [(stage.per_device.arguments_bytes, stage.per_device.peak_bytes) for stage in stages]
        known = [(arguments, peak) for arguments, peak in sizes if arguments is not None and peak is not None]
        if len(sizes) < 2 or len(known) < len(sizes):
            return None
        # The weights of all stay; only the running network has temporaries.
        return sum(arguments for arguments, _ in known) + max(peak - arguments for arguments, peak in known)

    def stage(self, name: str) -> StagePlan:
        """Returns the figures of a stage; raises if the stage was not compiled."""
        stage = self.stages[name]
        if isinstance(stage, StageLeftOut):
            raise BadValueError(f"stage {name}", "It was not compiled", stage.why)
        return stage


def mesh_text(mesh: Mapping[Axis, int]) -> str:
    """Returns the sizes of a mesh's axes as text: `dp=2 x sp=4`."""
    return " x ".join(f"{axis}={size}" for axis, size in mesh.items())


def moved_bytes(collectives: Sequence[Collective]) -> float:
    """Returns the bytes of all outputs of some collectives on one device, as often as each collective runs."""
    return sum(collective.bytes * collective.count for collective in collectives)


def largest_shape(inputs: Mapping[str, list[int]]) -> list[int]:
    """Returns the shape of a network's input with the most dims, and of these with the most elements."""
    return max(inputs.values(), key=lambda shape: (len(shape), math.prod(shape)))
