"""The one factor between modelled and measured step times: fitted by `torchport plan --calibrate`, read by every plan.

A model's seconds (attention, everything else and communication, added up) over those that somebody measured: 0.7 says
that the parts that are modelled take 70 % of a real step. A plan divides by it. There is one factor for all models,
machines, kernels and meshes: with one for each, the model would only repeat what was measured.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import pydantic

from torchport.config import Frozen, read_document, validated

TABLE = Path(__file__).with_name("calibration.yaml")
HEADER = """\
# Modelled over measured step time, written by `torchport plan --calibrate --write`, read by torchport/calibration.py.
# factor: the geometric mean; a plan divides by it. spread_percent: one standard deviation of the logarithms.
"""


class Calibration(Frozen):
    """`calibration.yaml`."""

    factor: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
    """Modelled over measured seconds: the geometric mean."""
    spread_percent: Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
    """By how much one step's ratio is off the factor: one standard deviation, in logarithms, as percent."""
    steps: pydantic.PositiveInt
    """How many measured step times it was fitted to."""
    versions: dict[str, str]
    """Of what the modelled seconds depend on."""
    date: str
    """When it was fitted."""


def fitted(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the factor and its spread in percent: least squares of the logarithms.

    Args:
        pairs: Modelled and measured seconds.
    """
    logs = [math.log(modelled / measured) for modelled, measured in pairs]
    spread = statistics.stdev(logs) if len(logs) > 1 else 0.0
    return math.exp(statistics.fmean(logs)), 100 * (math.exp(spread) - 1)


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


def write(file: Path, found: Calibration) -> None:
    """Writes a calibration.

    Raises:
        OSError: It cannot be written.
    """
    versions = ", ".join(f'{name}: "{version}"' for name, version in found.versions.items())
    fields = f"factor: {found.factor:.4f}\nspread_percent: {found.spread_percent:.1f}\nsteps: {found.steps}\n"
    file.write_text(f'{HEADER}{fields}versions: {{{versions}}}\ndate: "{found.date}"\n', encoding="utf-8")


def calibrated(seconds: float, by: Calibration | None) -> float:
    """Returns a model's seconds divided by the factor, if there is one."""
    return seconds if by is None else seconds / by.factor


def said(by: Calibration | None, versions: Mapping[str, str]) -> str:
    """Returns what a plan says of the factor among its assumptions.

    Args:
        by: The calibration, if there is one.
        versions: Those of this plan.
    """
    if by is None:
        return "uncalibrated"
    text = f"calibrated with {by.steps} published steps, factor {by.factor:.3g}, spread ±{by.spread_percent:.0f} %"
    other = [f"{name} {version}" for name, version in by.versions.items() if versions.get(name) != version]
    return f"{text} (with {', '.join(other)})" if other else text
