"""The one factor between modelled and measured step times: fitted by `torchport plan --calibrate`, read by every plan.

A plan divides by it what is estimated: everything but attention by the compiler, communication by bytes over links. 1.6
says that these estimates, beside attention as it is, are 1.6 times what measured steps leave room for. Attention is not
divided: its time is the kernel's own instruction schedule, which has no stalls in it and so bounds a step from below.
There is one factor for all models, machines, kernels and meshes: with one for each, the model would only repeat what
was measured.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import pydantic

from torchport.config import Frozen, read_document, validated
from torchport.errors import OutputError
from torchport.plan.figures import Parts

TABLE = Path(__file__).with_name("calibration.yaml")
HEADER = """\
# Written by `torchport plan --calibrate --write`, read by torchport/plan/calibration.py.
# factor: a plan's step takes attention + (other + communication) / factor; least squares of log(model / measured).
# spread_percent: the root mean square of these logarithms, as percent.
"""
RANGE = (0.05, 20.0)
"""Between which the factor is searched."""
POINTS = 400
"""Of one search; the next ones are between the neighbours of the best of them."""
SEARCHES = 5
"""After which the neighbours are less than 1e-9 apart, in logarithms."""


class Calibration(Frozen):
    """`calibration.yaml`."""

    factor: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
    """By which everything but attention is divided."""
    spread_percent: Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
    """By how much a step's model is off what was measured: the root mean square of the logarithms, as percent."""
    steps: pydantic.PositiveInt
    """How many measured step times it was fitted to."""
    versions: dict[str, str]
    """Of what the modelled seconds depend on."""
    date: str
    """When it was fitted."""


def fitted(steps: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Returns the factor and its spread in percent: least squares of log(model / measured).

    The sum of squares may have more than one minimum, so the whole range is searched, ever finer. A step that was
    measured shorter than its attention alone pulls the factor up, to the end of the range if all are. Of factors that
    fit equally well, the one next to 1 is taken.

    Args:
        steps: At least one; seconds of attention, of everything else with communication, and measured.

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


def read(file: Path) -> Calibration:
    """Returns a calibration.

    Raises:
        ConfigError: The file has a mistake, by its line.
    """
    return validated(Calibration, read_document(file, file.name))


@functools.cache
def shipped() -> Calibration | None:
    """Returns the package's own calibration, if it has one."""
    return read(TABLE) if TABLE.is_file() else None


def write(file: Path, by: Calibration) -> None:
    """Writes a calibration.

    Raises:
        OutputError: It cannot be written.
    """
    versions = ", ".join(f'{name}: "{version}"' for name, version in by.versions.items())
    fields = f"factor: {by.factor:.4f}\nspread_percent: {by.spread_percent:.1f}\nsteps: {by.steps}\n"
    text = f'{HEADER}{fields}versions: {{{versions}}}\ndate: "{by.date}"\n'
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        fact = f"It cannot be written: {error.strerror}"
        raise OutputError(str(file), fact, "Name a file in a folder that can be written") from error


def calibrated(parts: Parts[float], by: Calibration | None) -> float:
    """Returns a model's seconds: attention as it is, all else divided by the factor, if there is one.

    Args:
        parts: Of the step, before any factor.
        by: The calibration, if there is one.
    """
    rest = parts.other_s + parts.communication_s
    return parts.attention_s + (rest if by is None else rest / by.factor)


def said(by: Calibration | None, versions: Mapping[str, str]) -> str:
    """Returns what a plan says of the factor among its assumptions.

    Args:
        by: The calibration, if there is one.
        versions: Those of this plan.
    """
    if by is None:
        return "uncalibrated"
    factor = f"factor {by.factor:.3g} for all but attention"
    text = f"calibrated with {by.steps} published steps, {factor}, spread ±{by.spread_percent:.0f} %"
    other = [f"{name} {version}" for name, version in by.versions.items() if versions.get(name) != version]
    return f"{text} (with {', '.join(other)})" if other else text
