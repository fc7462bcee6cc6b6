"""Step caches: which denoising steps compute all blocks, and what the others take from before. Known before the first.

A cached step is another result: every kind is lossy. `torchport compare` says by how much.
"""

from __future__ import annotations

import abc
from typing import Annotated, ClassVar, Literal

import pydantic

from torchport.config.document import Frozen
from torchport.errors import BadValueError

Positive = Annotated[float, pydantic.Field(gt=0, le=100, allow_inf_nan=False)]


class _Kind(Frozen, abc.ABC):
    """A kind of step cache."""

    last_blocks: ClassVar[int] = 0  #: The number of blocks at the end that every step computes.

    @property
    def differences(self) -> int:
        """The order of the extrapolation of reused outputs, in finite differences; 0: they are reused unchanged."""
        return 0

    @abc.abstractmethod
    def computed(self, steps: int) -> tuple[int, ...]:
        """Returns the steps, counted from 0, that compute all blocks; raises BadValueError if the fields do not fit."""


class _Periodic(_Kind):
    """All steps before `start` and from `end` on compute all blocks, and between them every so many."""

    start: pydantic.PositiveInt = 11
    """The first step that may be cached, of `of`."""
    end: pydantic.PositiveInt = 45
    """The step from which on none is cached, of `of`."""
    every: Annotated[int, pydantic.Field(ge=2, le=100)] = 4
    """Between them, one step of so many computes all blocks."""
    of: pydantic.PositiveInt = 50
    """The number of steps that `start` and `end` are meant for. With another number both move in proportion."""

    def computed(self, steps: int) -> tuple[int, ...]:
        """Returns the steps that compute all blocks; refuses fields that are not in the order start < end <= of."""
        if not self.start < self.end <= self.of:
            keys = ("start", "end") if self.start >= self.end else ("of", "end")
            values = []
            for key in ("start", "end", "of"):
                source = "" if key in self.model_fields_set else " by default"
                values.append(f"'cache.{key}' is {getattr(self, key)}{source}")
            remedy = "Write all three in this order: start < end <= of"
            raise BadValueError("cache", ", ".join(values), remedy, keys=keys)
        # `start` and `end` are meant for `of` steps, and the job has `steps`.
        start, end = (max(1, round(step * steps / self.of)) for step in (self.start, self.end))
        return tuple(n for n in range(steps) if n < start or n >= end or (n - start) % self.every == 0)


class DeepCache(_Periodic):
    """A cached step computes the last block alone, on what entered it in the last whole step."""

    kind: Literal["deepcache"]
    """This kind."""
    keep: Literal["last"] = "last"
    """The blocks that a cached step computes."""

    last_blocks: ClassVar[int] = 1


class TaylorSeer(_Periodic):
    """A cached step extrapolates what all blocks together added in the last whole steps."""

    kind: Literal["taylorseer"]
    """This kind."""
    order: Annotated[int, pydantic.Field(ge=1, le=3)] = 1
    """The highest difference that the extrapolation takes. Each needs as much memory as the blocks' output."""

    @property
    def differences(self) -> int:
        return self.order


class Schedule(_Kind):
    """A cached step adds what all blocks together added in the last whole step."""

    kind: Literal["schedule"]
    """This kind."""
    full: Annotated[list[pydantic.NonNegativeInt], pydantic.Field(min_length=1)]
    """The steps that compute all blocks, from 0. The first is among them."""

    def computed(self, steps: int) -> tuple[int, ...]:
        """Returns the steps in `full`, after checking that step 0 is among them and that the job has them all."""
        numbers = sorted(set(self.full))
        if numbers[-1] >= steps:
            fact = f"'cache.full' names step {numbers[-1]}, and the job has {steps}, counted from 0"
            remedy = f"Name steps from 0 to {steps - 1}, or take more: --set steps={numbers[-1] + 1}"
            raise BadValueError("cache", fact, remedy, keys=("full",))
        if numbers[0] != 0:
            fact = f"'cache.full' begins with step {numbers[0]}, and before it nothing is there to reuse"
            raise BadValueError("cache", fact, "Add step 0", keys=("full",))
        return tuple(numbers)


class MagCache(_Kind):
    """As `schedule`; the steps follow from a curve: how much smaller the sum of all blocks gets from step to step.

    Source: MagCache, Ma et al. 2025, arXiv:2506.09045. `kind: calibrate` measures the curve.
    """

    kind: Literal["magcache"]
    """This kind."""
    curve: Annotated[list[Positive], pydantic.Field(min_length=2)]
    """By step, the norm of what all blocks added over that of the step before; 1 for the first."""
    threshold: Positive = 0.12
    """The error that cached steps in a row may add up to."""
    skips: pydantic.PositiveInt = 4
    """The number of cached steps in a row."""
    retain: Annotated[float, pydantic.Field(ge=0, le=1)] = 0.2
    """The share of steps at the beginning that compute all blocks."""

    def computed(self, steps: int) -> tuple[int, ...]:
        """Returns the steps that compute all blocks. Others are skipped: after the first share `retain`, no more than
        `skips` in a row, and while the errors that they add up to stay below `threshold`.
        """
        whole = []
        ratio, error, skipped = 1.0, 0.0, 0
        for step in range(steps):
            # The curve may be of another number of steps: its nearest step counts.
            ratio *= self.curve[round(step * (len(self.curve) - 1) / max(steps - 1, 1))]
            error += abs(1 - ratio)
            if step >= max(1, self.retain * steps) and error <= self.threshold and skipped < self.skips:
                skipped += 1
            else:
                whole.append(step)
                ratio, error, skipped = 1.0, 0.0, 0
        return tuple(whole)


class Calibrate(_Kind):
    """Computes all steps, and writes the curve of `magcache` into the output folder, as `magcache.yaml`."""

    kind: Literal["calibrate"]
    """This kind."""

    def computed(self, steps: int) -> tuple[int, ...]:
        return tuple(range(steps))


StepCache = Annotated[DeepCache | Schedule | MagCache | TaylorSeer | Calibrate, pydantic.Field(discriminator="kind")]


def computed_steps(cache: _Kind, steps: int, first_step: int) -> tuple[int, ...]:
    """Returns the steps, counted from 0, that compute all blocks in a network that takes steps from `first_step` on.

    That step is always among them: at its first step a network has nothing to reuse.
    """
    return tuple(sorted({*cache.computed(steps), first_step}))


def schedule_text(cache: _Kind, steps: int, first_step: int = 0) -> str:
    """Returns which steps compute all blocks, in words: `25 of 50 steps: 0-11, 15, 19`; see `computed_steps`."""
    numbers = computed_steps(cache, steps, first_step)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{len(numbers)} of {steps} steps: {words}"
