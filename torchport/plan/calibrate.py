"""`torchport plan --calibrate`: published step times against this package's model of them, and the one factor between.

Every modelled time is a model's. The factor is fitted to all of them together, never to one model, machine, mesh or
kernel; how far each is off, and which pairs come out in the wrong order, is printed.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchport.config.pack import find_pack
from torchport.errors import BadValueError, TorchportError
from torchport.files.folder import as_named
from torchport.plan import calibration
from torchport.plan.calibration import Calibration
from torchport.plan.figures import KernelAttention, Parts
from torchport.plan.plan import plan
from torchport.plan.published import (
    MeasuredKernel,
    PublishedStep,
    PublishedSteps,
    chip_name,
    read,
)
from torchport.processes import workers
from torchport.progress import size_text
from torchport.save.manifest import versions
from torchport.task import Request

APART = 1.15
"""Measured times that differ by more than this have to come out in their order."""
DECIDING = ("torchport", "jax", "libtpu", "torchax", "diffusers")
"""Packages that modelled seconds depend on."""


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
        return calibration.calibrated(self.parts, by)


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


def calibrate(paths: tuple[str, ...], count: int | None = None) -> Outcome:
    """Returns models of the published step times, and the factor that fits them.

    Args:
        paths: The packs, in which `configs/published/steps.yaml` lies; by default torchport's own.
        count: How many compilations at once; by default as many as there is room for.

    Raises:
        DataFolderError: No pack has published step times.
        ConfigError: A mistake in them.
    """
    file = find_pack(paths).file("configs/published/steps.yaml")
    published, document = read(file, as_named(file))

    def work(number: int) -> StepParts:
        step = published.steps[number]
        return parts(step, published.kernels[step.kernel], paths, document.place(["steps", number]))

    numbers = [number for number, step in enumerate(published.steps) if step.left_out is None]
    programs = {number: _program(published, number) for number in numbers}
    first: dict[tuple[Any, ...], int] = {}
    for number, program in programs.items():
        first.setdefault(program, number)
    jobs, each = count or workers.default(), list(first.values())
    results = workers.each(work, each, jobs, "calibrate", lambda it: published.steps[it].name)
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


def fit(models: Sequence[StepModel]) -> Calibration | None:
    """Returns the factor that fits the models, if there are any."""
    if not models:
        return None
    steps = [(one.parts.attention_s, one.parts.other_s + one.parts.communication_s, one.step.step_s) for one in models]
    factor, spread = calibration.fitted(steps)
    deciding = {name: version for name, version in versions().items() if name in DECIDING}
    today = datetime.date.today().isoformat()
    return Calibration(factor=factor, spread_percent=spread, steps=len(models), versions=deciding, date=today)


def request_of(step: PublishedStep, kernel: MeasuredKernel, paths: tuple[str, ...]) -> Request:
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
    return Request(card.model, card.config, paths=paths, overrides=overrides)


def parts(step: PublishedStep, kernel: MeasuredKernel, paths: tuple[str, ...], place: str) -> StepParts:
    """Returns the parts of a step's model: its program is compiled for its slice.

    Args:
        step: One with a card.
        kernel: Its kernel.
        paths: The packs.
        place: Where the step is written.

    Raises:
        TorchportError: Whatever the plan is refused for; a job that does not fit.
    """
    request = request_of(step, kernel, paths)
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


def write(file: Path, outcome: Outcome) -> None:
    """Writes the factor.

    Raises:
        BadValueError: A step could not be modelled, or none was: a factor of a part would not be the one that is said.
    """
    if outcome.failed or outcome.calibration is None:
        names = ", ".join(step.name for step, _ in outcome.failed) or "any step"
        raise BadValueError(
            f"--write {file}", f"There is no model of {names}", "Mend it, or leave it out with a reason"
        )
    calibration.write(file, outcome.calibration)


def data(outcome: Outcome) -> dict[str, Any]:
    """Returns a calibration as `--json` prints it."""
    by = outcome.calibration
    return {
        "factor": None if by is None else by.factor,
        "spread_percent": None if by is None else by.spread_percent,
        "versions": versions(),
        "steps": [
            {
                "name": one.step.name,
                "measured_s": one.step.step_s,
                **one.parts.model_dump(),
                "uncalibrated_s": one.seconds,
                "ratio": one.seconds / one.step.step_s,
                "model_s": one.model_s(by),
                "model_ratio": one.model_s(by) / one.step.step_s,
                "differs": one.step.differs,
            }
            for one in outcome.models
        ],
        "failed": [{"name": step.name, "error": str(error), "id": error.id} for step, error in outcome.failed],
        "left_out": [
            {"name": step.name, "measured_s": step.step_s, "trusted": step.trusted, "why": step.left_out}
            for step in outcome.left_out
        ],
        "pairs": [
            {"faster": pair.faster.step.name, "slower": pair.slower.step.name, "right": pair.right}
            for pair in pairs(outcome.models, by)
        ],
    }


def lines(outcome: Outcome) -> list[str]:
    """Returns a calibration as text."""
    by, width = outcome.calibration, max((len(one.step.name) for one in outcome.models), default=4)
    head = f"{'step':{width}}  measured  uncalibrated (attention + other + communication)  ratio    model  ratio"
    text = [head] if outcome.models else []
    for one in outcome.models:
        seconds = one.parts
        parts = f"({seconds.attention_s:.2f} + {seconds.other_s:.2f} + {seconds.communication_s:.2f})"
        measured, model = one.step.step_s, one.model_s(by)
        text.append(
            f"{one.step.name:{width}}  {measured:6.2f} s  {one.seconds:10.2f} s {parts:35}  "
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


def _summary(by: Calibration, models: Sequence[StepModel]) -> str:
    ratios: Mapping[str, float] = {one.step.name: one.model_s(by) / one.step.step_s for one in models}
    worst = max(ratios, key=lambda name: abs(math.log(ratios[name])))
    at_end = any(math.isclose(end, by.factor, rel_tol=1e-6) for end in calibration.RANGE)
    return (
        f"factor {by.factor:.3f}{', the end of the range searched,' * at_end} for everything but attention (least "
        f"squares of {by.steps}), spread ±{by.spread_percent:.0f} %; the worst is {worst}, "
        f"{100 * (ratios[worst] - 1):+.0f} % after the factor"
    )


def _times(one: StepModel, by: Calibration | None) -> str:
    return f"{one.step.name} (measured {one.step.step_s:g} s, model {one.model_s(by):.2f} s)"
