"""The pictures of a verification's page: a heat map of blocks and steps, and error against depth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torchport.verify.facts import ROUNDING, Unit, Verdict

WIDTH, HEIGHT, MARGIN = 900.0, 220.0, 50.0
"""Units of a chart."""
HOTTEST = 100.0
"""The ratio from which a cell is as hot as it gets."""
LINES = {"rounding": "the original's rounding", "added": "added by the port", "inherited": "with the errors before it"}


class Cell(NamedTuple):
    """One cell of a heat map: its ratio in words, which of the kinds it is, and its opacity, 0 to 1."""

    text: str
    kind: str
    shade: float


class Row(NamedTuple):
    """A block's cells; None where it was not measured in that step."""

    name: str
    cells: list[Cell | None]


class Heat(NamedTuple):
    """A heat map of blocks and steps."""

    columns: list[str]
    rows: list[Row]


class Line(NamedTuple):
    """A line of a chart: its kind, what it is, and its points as SVG has them."""

    kind: str
    label: str
    points: str


class Chart(NamedTuple):
    """Error against depth, on a logarithmic scale."""

    title: str
    lines: list[Line]
    ticks: list[tuple[float, str]]
    names: list[tuple[float, str]]


def heat_of(units: Sequence[Unit]) -> Heat:
    """Returns the ratios of networks and blocks in each call of each step; modules are in the table."""
    outer = sorted((u for u in units if u.kind in ("network", "block")), key=lambda u: (u.network, u.depth))
    calls = sorted({(unit.step, unit.call) for unit in outer})
    names = list(dict.fromkeys((unit.network, unit.path) for unit in outer))
    by_place = {(unit.network, unit.path, unit.step, unit.call): unit for unit in outer}
    rows = [
        Row(
            f"{network}.{path}" if path else network,
            [None if (unit := by_place.get((network, path, *call))) is None else _cell(unit) for call in calls],
        )
        for network, path in names
    ]
    return Heat([f"step {step}" + (f", call {call}" if call else "") for step, call in calls], rows)


def _cell(unit: Unit) -> Cell:
    kind = "bad" if unit.verdict is Verdict.OTHER else "unclear" if unit.ratio > ROUNDING else "same"
    heat = math.log(max(min(unit.ratio, HOTTEST), 0.1) / 0.1) / math.log(HOTTEST / 0.1)
    return Cell(f"{unit.ratio:.2g}", kind, 0.15 + 0.85 * heat)


def chart_of(units: Sequence[Unit]) -> Chart:
    """Returns error against depth of the blocks of one call."""
    units = sorted(units, key=lambda unit: unit.depth)
    values = {kind: [getattr(unit, kind) for unit in units] for kind in LINES}
    known = [v for group in values.values() for v in group if v is not None and 0 < v < math.inf]
    low, high = (math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))) if known else (-8, 0)
    high = max(high, low + 1)

    def x(n: int) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * n / max(len(units) - 1, 1)

    def y(value: float) -> float:
        share = (math.log10(value) - low) / (high - low) if value < math.inf else 1.0
        return HEIGHT - MARGIN / 2 - (HEIGHT - MARGIN) * share

    lines = []
    for kind, label in LINES.items():
        points = [f"{x(n):.1f},{y(v):.1f}" for n, v in enumerate(values[kind]) if v is not None and v > 0]
        lines.append(Line(kind, label, " ".join(points)))
    first = units[0]
    ticks = [(y(10.0**power), f"1e{power}") for power in range(low, high + 1)]
    return Chart(
        f"{first.network}, step {first.step}, call {first.call}: error against depth",
        [line for line in lines if line.points],
        ticks,
        [(x(0), units[0].path), (x(len(units) - 1), units[-1].path)],
    )
