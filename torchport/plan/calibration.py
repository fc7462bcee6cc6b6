"""The one factor between modelled and measured step times: fitted by `benchmarks/calibrate.py`, read by every plan.

A plan divides by it what is estimated: everything but attention by the compiler, communication by bytes over links. 1.6
says that these estimates, beside attention as it is, are 1.6 times what measured steps leave room for. Attention is not
divided: its time is the kernel's own instruction schedule, which has no stalls in it and so bounds a step from below.
There is one factor for all models, machines, kernels and meshes: with one for each, the model would only repeat what
was measured.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import pydantic

from torchport.config import Frozen, read_document, validated
from torchport.plan.figures import Parts

TABLE = Path(__file__).with_name("calibration.yaml")


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


def read(file: Path) -> Calibration:
    """Returns a calibration."""
    return validated(Calibration, read_document(file, file.name))


@functools.cache
def shipped() -> Calibration | None:
    """Returns the package's own calibration, if it has one."""
    return read(TABLE) if TABLE.is_file() else None


def calibrated(parts: Parts[float], by: Calibration | None) -> float:
    """Returns a model's seconds: attention as it is, all else divided by the factor, if there is one."""
    rest = parts.other_s + parts.communication_s
    return parts.attention_s + (rest if by is None else rest / by.factor)


def said(by: Calibration | None, versions: Mapping[str, str]) -> str:
    """Returns what a plan says of the factor among its assumptions."""
    if by is None:
        return "uncalibrated"
    factor = f"factor {by.factor:.3g} for all but attention"
    text = f"calibrated with {by.steps} published steps, {factor}, spread ±{by.spread_percent:.0f} %"
    other = [f"{name} {version}" for name, version in by.versions.items() if versions.get(name) != version]
    return f"{text} (with {', '.join(other)})" if other else text
