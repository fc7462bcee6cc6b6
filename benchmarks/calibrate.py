"""Published step times against a plan's model of them, and the one factor between, which every plan divides by.

    python benchmarks/calibrate.py [--jobs N]    # the table
    python benchmarks/calibrate.py --write       # and writes the factor into torchport/plan/calibration.yaml
    python benchmarks/calibrate.py --page docs/performance.md    # and writes the table into that page

Every modelled time is a model's. The factor is fitted to all of them together, never to one model, machine, mesh or
kernel; how far each is off, and which pairs come out in the wrong order, is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pydantic

from torchport.config import Document, Frozen, read_document, validated, xla_flags
from torchport.config.strategy import Axis
from torchport.errors import BadValueError, TorchportError
from torchport.kernels.attention import tiles
from torchport.plan import step_time
from torchport.plan.figures import KernelAttention, Parts
from torchport.plan.planning import plan
from torchport.plan.step_time import Calibration
from torchport.processes import child
from torchport.progress import size_text
from torchport.save.manifest import versions
from torchport.task import Request

STEPS = Path(__file__).with_name("published.yaml")
APART = 1.15
"""Measured times that differ by more than this have to come out in their order."""
DECIDING = ("torchport", "jax", "libtpu", "torchax", "diffusers")
"""Packages that modelled seconds depend on."""
HEADER = """\
# Written by `python benchmarks/calibrate.py --write`, read by torchport/plan/step_time.py.
# factor: a plan's step takes attention + products + (other - products + communication) / factor, with the products at
# peak; least squares of log(model / measured).
# spread_percent: the root mean square of these logarithms, as percent.
"""
BEGIN, END = "<!-- Made by benchmarks/calibrate.py --page: begin -->", "<!-- end -->"
"""The comments between which a page has the table."""
RANGE = (0.05, 20.0)
"""Between which the factor is searched."""
FLAGS = f"--{xla_flags.FUSION_VMEM}=32768"
"""The compiler's own limit on v6e and tpu7x: no source of a published step says another."""
POINTS = 400
"""Of one search; the next ones are between the neighbours of the best of them."""
SEARCHES = 5
"""After which the neighbours are less than 1e-9 apart, in logarithms."""

Seconds = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
Percent = Annotated[float, pydantic.Field(gt=0, le=100)]


class MeasuredKernel(Frozen):
    """An attention kernel that somebody ran, and what stands for it in a program."""

    title: str
    implementation: tiles.KernelName | None = None
    """Whose call is traced in its place; none: no such kernel is modelled."""
    bounded: bool = False
    """Whether its softmax needs no maximum."""
    steady_percent: dict[str, Percent] = {}
    """Its share of peak by its instruction schedule, by chip; without it, that of the implementation is taken."""
    source: str | None = None


class CardReference(Frozen):
    """A step that a model card's plan models."""

    model: str
    config: str
    strategy: str


class PublishedStep(Frozen):
    """A published step time."""

    name: str
    model: str
    height: pydantic.PositiveInt
    width: pydantic.PositiveInt
    frames: pydantic.PositiveInt
    batch: pydantic.PositiveInt
    """Conditions of guidance in one step."""
    machine: str
    kernel: str
    mesh: dict[Axis, pydantic.PositiveInt] = {}
    strategy: str
    """In the words of the source."""
    step_s: Seconds
    source: str
    date: str | None = None
    trusted: bool = True
    differs: str | None = None
    """What its program does that the modelled one does not."""
    card: CardReference | None = None
    left_out: str | None = None
    """Why it is not modelled."""

    @pydantic.model_validator(mode="after")
    def _one_way(self) -> PublishedStep:
        ways = [way for way in ("card", "left_out") if getattr(self, way) is not None]
        if len(ways) != 1:
            raise ValueError(f"It must have one of card and left_out, and has {', '.join(ways) or 'none'}")
        if not self.trusted and self.left_out is None:
            raise ValueError("What is not trusted is not modelled: it must have left_out, with the reason")
        return self


class PublishedSteps(Frozen):
    """`published.yaml`."""

    kernels: dict[str, MeasuredKernel]
    steps: Annotated[list[PublishedStep], pydantic.Field(min_length=1)]

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> PublishedSteps:
        for number, step in enumerate(self.steps):
            if step.kernel not in self.kernels:
                raise ValueError(f"There is no kernel '{step.kernel}', which '{step.name}' names")
            if step.name in [other.name for other in self.steps[:number]]:
                raise ValueError(f"Two steps are called '{step.name}'")
            kernel, chip = self.kernels[step.kernel], chip_name(step)
            if step.left_out is None and kernel.implementation is None:
                raise ValueError(f"'{step.kernel}' has no implementation: '{step.name}' must have left_out")
            if step.left_out is None and kernel.steady_percent and chip not in kernel.steady_percent:
                raise ValueError(f"'{step.kernel}' has no steady_percent for {chip}, the chip of '{step.name}'")
        return self


def chip_name(step: PublishedStep) -> str:
    """Returns the name of the chip that a step was measured on."""
    return step.machine.partition(":")[0]


def read(file: Path) -> tuple[PublishedSteps, Document]:
    """Returns the published step times, and the document they were read from; a mistake in it is a ConfigError."""
    document = read_document(file, file.name)
    return validated(PublishedSteps, document), document


@dataclasses.dataclass(frozen=True)
class StepModel:
    """A published step beside this package's model of it.

    Attributes:
        step: As published.
        parts: Of the model, before any factor; attention is the kernel's that was measured.
    """

    step: PublishedStep
    parts: Parts[float]

    @property
    def seconds(self) -> float:
        """The sum of the parts."""
        return self.model_s(None)

    def model_s(self, by: Calibration | None) -> float:
        """Returns the step's time with a factor."""
        return step_time.calibrated(self.parts, by)


@dataclasses.dataclass(frozen=True)
class StepParts:
    """The parts of the model of a step.

    Attributes:
        parts: In seconds; attention is the largest call, as often as the program calls it, at `peak_percent`.
        peak_percent: The kernel's share of peak, of the table of tiles.
    """

    parts: Parts[float]
    peak_percent: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The models of published steps.

    Attributes:
        models: Of the steps that have one, in the file's order.
        failed: Steps that could not be modelled, with the refusal.
        left_out: Steps that are not to be modelled.
        calibration: The factor that fits; none, if nothing was modelled.
    """

    models: list[StepModel]
    failed: list[tuple[PublishedStep, TorchportError]]
    left_out: list[PublishedStep]
    calibration: Calibration | None


def calibrate(file: Path, count: int | None = None) -> Outcome:
    """Returns models of the published step times, and the factor that fits them.

    Args:
        file: The published step times.
        count: How many compilations at once; by default as many as there is room for.
    """
    published, document = read(file)

    def work(number: int) -> StepParts:
        step = published.steps[number]
        return parts(step, published.kernels[step.kernel], document.place(["steps", number]))

    numbers = [number for number, step in enumerate(published.steps) if step.left_out is None]
    programs = {number: _program(published, number) for number in numbers}
    first: dict[tuple[Any, ...], int] = {}
    for number, program in programs.items():
        first.setdefault(program, number)
    jobs, each = count or child.default_workers(), list(first.values())
    results = child.in_parallel(work, each, jobs, "calibrate", lambda it: published.steps[it].name)
    outcomes = dict(zip(first, results, strict=True))
    models: list[StepModel] = []
    failed: list[tuple[PublishedStep, TorchportError]] = []
    for number, program in programs.items():
        step, outcome = published.steps[number], outcomes[program]
        if isinstance(outcome, TorchportError):
            failed.append((step, outcome))
        else:
            models.append(_with_its_kernel(step, published.kernels[step.kernel], outcome))
    return Outcome(models, failed, [step for step in published.steps if step.left_out is not None], fit(models))


def _program(published: PublishedSteps, number: int) -> tuple[Any, ...]:
    """Returns what decides a step's program: steps with the same share one compilation."""
    step = published.steps[number]
    kernel = published.kernels[step.kernel]
    size = (step.height, step.width, step.frames, step.batch)
    return step.card, step.machine, tuple(step.mesh.items()), size, kernel.implementation, kernel.bounded


def fitted(steps: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Returns the factor and its spread in percent: least squares of log(model / measured).

    The sum of squares may have more than one minimum, so the whole range is searched, ever finer. A step that was
    measured shorter than its attention alone pulls the factor up, to the end of the range if all are. Of factors that
    fit equally well, the one next to 1 is taken.

    Args:
        steps: At least one; seconds that the factor does not divide, seconds that it divides, and measured.

    Returns:
        The factor, and 100 * (exp(r) - 1), r being the root mean square of log(model / measured) with it.
    """

    def off(factor: float) -> float:
        """Returns the sum of squares."""
        return math.fsum(math.log((kernel + rest / factor) / measured) ** 2 for kernel, rest, measured in steps)

    first, last = low, high = math.log(RANGE[0]), math.log(RANGE[1])
    best = 0.0
    for _ in range(SEARCHES):
        width = (high - low) / POINTS
        tried = [low + number * width for number in range(POINTS + 1)]
        best = min(tried, key=lambda at: (off(math.exp(at)), abs(at)))
        low, high = max(best - width, first), min(best + width, last)
    factor = math.exp(best)
    return factor, 100 * (math.exp(math.sqrt(off(factor) / len(steps))) - 1)


def fit(models: Sequence[StepModel]) -> Calibration | None:
    """Returns the factor that fits the models, if there are any."""
    if not models:
        return None
    undivided = [one.parts.attention_s + one.parts.products_s for one in models]
    steps = [(s, one.seconds - s, one.step.step_s) for s, one in zip(undivided, models, strict=True)]
    factor, spread = fitted(steps)
    deciding = {name: version for name, version in versions().items() if name in DECIDING}
    today = datetime.date.today().isoformat()
    return Calibration(factor=factor, spread_percent=spread, steps=len(models), versions=deciding, date=today)


def request_of(step: PublishedStep, kernel: MeasuredKernel) -> Request:
    """Returns the job of a step that has a card, as `parts` plans it."""
    card = step.card
    assert card is not None
    mesh = ", ".join(f"{axis}: {size}" for axis, size in step.mesh.items())
    fields = {
        "height": step.height,
        "width": step.width,
        "frames": step.frames,
        "machine": step.machine,
        "mesh": f"{{{mesh}}}",
        "strategy": card.strategy,
        "attention": kernel.implementation,
    } | ({"guidance_scale": 1.0} if step.batch == 1 else {})
    overrides = tuple(f"{name}={value}" for name, value in fields.items())
    return Request(card.model, card.config, overrides=overrides)


def parts(step: PublishedStep, kernel: MeasuredKernel, place: str) -> StepParts:
    """Returns the parts of a step's model: its program is compiled for its slice.

    Args:
        step: One with a card.
        kernel: Its kernel.
        place: Where the step is written.

    Raises:
        TorchportError: Whatever the plan is refused for; a job that does not fit.
    """
    request = request_of(step, kernel)
    stage = plan(request, None, bounded=kernel.bounded, stages=("denoise",)).stage("denoise")
    time, attention = stage.step.known, stage.attention
    if not stage.fits or time is None:
        fact = f"Its program takes {size_text(stage.per_device.peak_bytes or 0)} on a device"
        raise BadValueError(place, fact, "Mend its rules, or leave it out")
    assert isinstance(attention, KernelAttention)  # `Implementation` has kernels alone
    seconds = Parts[float](**time.model_dump(include=set(Parts.model_fields)))
    return StepParts(seconds, attention.peak_percent)


def _with_its_kernel(step: PublishedStep, kernel: MeasuredKernel, model: StepParts) -> StepModel:
    """Returns a step's model with the share of peak of the kernel that was measured."""
    share = kernel.steady_percent.get(chip_name(step), model.peak_percent)
    attention_s = model.parts.attention_s * model.peak_percent / share
    return StepModel(step, model.parts.model_copy(update={"attention_s": attention_s}))


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two steps with the same kernel whose measured times are apart, the faster first; whether the model agrees."""

    faster: StepModel
    slower: StepModel
    right: bool


def pairs(models: Sequence[StepModel], by: Calibration | None) -> list[Pair]:
    """Returns the pairs of one kernel whose measured times differ by more than `APART`."""
    apart = []
    for two in itertools.combinations(models, 2):
        faster, slower = sorted(two, key=lambda one: one.step.step_s)
        if faster.step.kernel == slower.step.kernel and slower.step.step_s > APART * faster.step.step_s:
            apart.append(Pair(faster, slower, faster.model_s(by) < slower.model_s(by)))
    return apart


def write(file: Path, by: Calibration) -> None:
    """Writes the factor."""
    named = ", ".join(f'{name}: "{version}"' for name, version in by.versions.items())
    fields = f"factor: {by.factor:.4f}\nspread_percent: {by.spread_percent:.1f}\nsteps: {by.steps}\n"
    file.write_text(f'{HEADER}{fields}versions: {{{named}}}\ndate: "{by.date}"\n', encoding="utf-8")


def lines(outcome: Outcome) -> list[str]:
    """Returns a calibration as text."""
    by, width = outcome.calibration, max((len(one.step.name) for one in outcome.models), default=4)
    sums = "uncalibrated (attention + products + other + communication)"
    head = f"{'step':{width}}  measured  {sums}  ratio    model  ratio"
    text = [head] if outcome.models else []
    for one in outcome.models:
        seconds = one.parts
        other_s = seconds.other_s - seconds.products_s
        summands = (seconds.attention_s, seconds.products_s, other_s, seconds.communication_s)
        parts = " + ".join(f"{part:.2f}" for part in summands)
        measured, model = one.step.step_s, one.model_s(by)
        text.append(
            f"{one.step.name:{width}}  {measured:6.2f} s  {one.seconds:10.2f} s ({parts:28})  "
            f"{one.seconds / measured:5.2f}  {model:5.2f} s  {model / measured:5.2f}"
            f"{', shorter than its attention alone' * (measured < seconds.attention_s)}"
        )
    text += [f"not modelled: {step.name}, {error}" for step, error in outcome.failed]
    text += [f"left out: {step.name}, {step.step_s:g} s: {step.left_out}" for step in outcome.left_out]
    if by is not None:
        text.append(_summary(by, outcome.models))
    every = pairs(outcome.models, by)
    wrong = [pair for pair in every if not pair.right]
    apart = f"{len(every)} pairs of one kernel are more than {100 * (APART - 1):.0f} % apart"
    text.append(f"{apart}: {len(every) - len(wrong)} in their order, {len(wrong)} not")
    return text + [f"  misordered: {_times(pair.faster, by)} before {_times(pair.slower, by)}" for pair in wrong]


def table(outcome: Outcome) -> str:
    """Returns a calibration as a table of a page, with sources, and its summary."""
    by, rows = (
        outcome.calibration,
        ["| model, machine, mesh | kernel | measured, s | model, s | off | source |", "|" + "---|" * 6],
    )
    for one in outcome.models:
        step, seconds = one.step, one.model_s(by)
        mesh = ", ".join(f"{axis}={size}" for axis, size in step.mesh.items())
        what = f"{step.model}, {step.height}p{step.frames}f, {step.machine}, {mesh}"
        off = f"{100 * (seconds / step.step_s - 1):+.0f} %"
        rows.append(f"| {what} | {step.kernel} | {step.step_s:g} | {seconds:.2f} | {off} | {step.source} |")
    return "\n".join(rows) + ("" if by is None else f"\n\nBy {by.date}: {_summary(by, outcome.models)}.")


def write_page(file: Path, outcome: Outcome) -> None:
    """Writes the table into a page, between the comments that mark its place."""
    before, begin, rest = file.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        sys.exit(f"{file} has no place for the table: {BEGIN} ... {END}")
    file.write_text(f"{before}{begin}\n\n{table(outcome)}\n\n{end}{after}", encoding="utf-8")


def _summary(by: Calibration, models: Sequence[StepModel]) -> str:
    ratios: Mapping[str, float] = {one.step.name: one.model_s(by) / one.step.step_s for one in models}
    worst = max(ratios, key=lambda name: abs(math.log(ratios[name])))
    at_end = any(math.isclose(end, by.factor, rel_tol=1e-6) for end in RANGE)
    return (
        f"factor {by.factor:.3f}{', the end of the range searched,' * at_end} for all but attention and products "
        f"(least squares of {by.steps}), spread ±{by.spread_percent:.0f} %; the worst is {worst}, "
        f"{100 * (ratios[worst] - 1):+.0f} % after the factor"
    )


def _times(one: StepModel, by: Calibration | None) -> str:
    return f"{one.step.name} (measured {one.step.step_s:g} s, model {one.model_s(by):.2f} s)"


def main() -> None:
    """Prints the table, and writes the factor if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, metavar="N", help="compilations at once [by processors and memory]")
    parser.add_argument("--write", action="store_true", help=f"write the factor into {step_time.CALIBRATION.name}")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write the table into a page, between its two comments"
    )
    arguments = parser.parse_args()
    outcome = calibrate(STEPS, arguments.jobs)
    print("\n".join(lines(outcome)))
    if arguments.page is not None:
        write_page(arguments.page, outcome)
    if arguments.write:
        if outcome.failed or outcome.calibration is None:  # a factor of a part would not be the one that is said
            sys.exit("No factor is written: mend the steps that are not modelled, or leave them out with a reason.")
        write(step_time.CALIBRATION, outcome.calibration)


if __name__ == "__main__":
    os.environ.setdefault(xla_flags.VARIABLES["tpu"], FLAGS)
    main()
