"""Step times that others have published, as a file has them: `configs/published/steps.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pydantic

from torchport.attention import tiles
from torchport.config import Document, Frozen, read_document, validated
from torchport.config.card import Axis
from torchport.errors import BadValueError, UnknownNameError, nearest

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
    """`configs/published/steps.yaml`."""

    kernels: dict[str, MeasuredKernel]
    steps: Annotated[list[PublishedStep], pydantic.Field(min_length=1)]


def chip_name(step: PublishedStep) -> str:
    """Returns the name of the chip that a step was measured on."""
    return step.machine.partition(":")[0]


def read(file: Path, shown: str | None = None) -> tuple[PublishedSteps, Document]:
    """Returns the published step times, and the document they were read from.

    Raises:
        ConfigError: A mistake in the file, by its line; a kernel that it does not describe; two steps of one name.
    """
    document = read_document(file, shown)
    published = validated(PublishedSteps, document)
    for number, step in enumerate(published.steps):
        place, kernel = document.place(["steps", number, "kernel"]), published.kernels.get(step.kernel)
        if kernel is None:
            fact = f"There is no kernel '{step.kernel}'"
            raise UnknownNameError(place, fact, nearest(step.kernel, published.kernels))
        if step.left_out is None and kernel.implementation is None:
            fact = f"'{step.kernel}' has no implementation, and '{step.name}' is to be modelled"
            raise BadValueError(place, fact, "Add left_out, with the reason")
        chip, shares = chip_name(step), kernel.steady_percent
        if step.left_out is None and shares and chip not in shares:
            fact = f"The kernel '{step.kernel}' has no steady_percent for {chip}"
            raise BadValueError(place, fact, f"Add it, or use one of {', '.join(shares)}")
        if step.name in [other.name for other in published.steps[:number]]:
            place = document.place(["steps", number, "name"])
            raise BadValueError(place, f"A second step is called '{step.name}'", "Give each its own name")
    return published, document
