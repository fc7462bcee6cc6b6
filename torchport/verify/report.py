"""A verification as twelve lines, as data, and as a page: nothing is measured here."""

from __future__ import annotations

import base64
import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchport.files import atomic
from torchport.verify.chart import Chart, chart_of, heat_of
from torchport.verify.facts import FAULT, ROUNDING, Kind, Unit, Verdict, Verification

TEMPLATE = Path(__file__).with_suffix(".html")
KINDS: dict[Kind, str] = {"block": "blocks", "module": "modules", "forward": "stretches of forward() between them"}
"""What units are called where they are counted, in this order."""
SAID = (
    f"with at most {ROUNDING:g} times the rounding",
    "with more, which the output does not show",
    "unclear",
    f"at fault (above {FAULT:g} times)",
    "behind the first fault and not judged",
)
"""What is said of units where they are counted."""
SHOWN = 100
"""Rows of a table of units on the page: those with the greatest ratios."""


def lines(verification: Verification) -> list[str]:
    """Returns a verification in twelve lines at most, the verdict first."""
    parts = [
        verification.first_line,
        _what(verification),
        _seam_line(verification),
        _network_line(verification),
        _unit_line(verification),
        _culprit_line(verification),
        _cause_line(verification),
        _drift_line(verification),
        _decoder_line(verification),
        _joined("programs: ", verification.programs),
        _joined("note: ", verification.unlike),
        _joined("", [f"{what} took {seconds:.1f} s" for what, seconds in verification.seconds.items()], ", "),
    ]
    return [line for line in parts if line]


def _joined(head: str, parts: Sequence[str], separator: str = "; ") -> str:
    return head + separator.join(parts) if parts else ""


def _what(verification: Verification) -> str:
    mesh = ",".join(f"{axis}={size}" for axis, size in verification.mesh.items())
    dtypes = {f"{dtype} beside {verification.yardstick[name]}" for name, dtype in verification.dtypes.items()}
    steps = ", ".join(map(str, verification.steps)) or "none"
    return (
        f"{verification.model} {verification.config}: {' and '.join(sorted(dtypes))}, {verification.strategy} on "
        f"{mesh or 'one device'}, step {steps} of {verification.total}, against {verification.against}"
    )


def _seam_line(verification: Verification) -> str:
    bad = verification.bad_seams
    if not verification.seams:
        return ""
    names = list(dict.fromkeys(seam.name for seam in bad))
    more = f": {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}" if bad else ""
    return f"seams: {len(verification.seams)} values of the loop compared by name, {len(bad) or 'none'} differ{more}"


def _network_line(verification: Verification) -> str:
    """Returns how far the whole networks are, of their worst call."""
    networks = [unit for unit in verification.units if unit.kind == "network"]
    if not networks:
        return ""
    worst = max(networks, key=lambda unit: unit.ratio)
    return (
        f"networks: {len(networks)} call(s) on the mesh, at most {worst.ratio:.3g} times the rounding: {worst.name}, "
        f"step {worst.step}"
    )


def _unit_line(verification: Verification) -> str:
    units = [unit for unit in verification.units if unit.kind != "network"]
    if not units:
        return ""
    numbers = Counter(unit.kind for unit in units)
    kinds = ", ".join(f"{numbers[kind]} {name}" for kind, name in KINDS.items() if numbers[kind])
    said = Counter(_said(unit) for unit in units)
    return f"units: {kinds}: {', '.join(f'{said[words]} {words}' for words in SAID if said[words])}"


def _said(unit: Unit) -> str:
    """Returns one of `SAID`."""
    within, harmless, between, fault, behind = SAID
    if unit.verdict is Verdict.SAME:
        return harmless if unit.is_harmless else within
    if unit.verdict is Verdict.OTHER:
        return fault
    return behind if unit.is_behind else between


def _culprit_line(verification: Verification) -> str:
    if not verification.culprits:
        return ""
    unit = verification.culprits[0]
    before = "" if unit.inherited is None else f", {unit.inherited / unit.rounding:.3g} times with the errors before it"
    output = "; alone it moves the network's output by"
    effect = "" if unit.effect is None else f"{output} {unit.effect:.3g} times the rounding there"
    others = len(verification.culprits) - 1
    more = f"; {others} more in the same call" if others else ""
    own = f"first: {unit.name} adds {unit.ratio:.3g} times the rounding"
    return f"{own}{before}{effect}{more}; the rounding is {unit.rounding:.2g} of the largest value"


def _cause_line(verification: Verification) -> str:
    if not verification.causes:
        return f"cause: {verification.clue}" if verification.clue else ""
    cause = verification.causes[0]
    without = "" if cause.without_it is None else f", {cause.words(cause.without_it)} without it"
    others = (
        f"; also possible: {', '.join(c.patch for c in verification.causes[1:])}" if verification.causes[1:] else ""
    )
    how = "leaving it out" if cause.how == "absence" else "leaving out the others"
    found = f"found by {how}: {cause.words(cause.with_it)} with it{without}"
    return f"patch: {cause.patch} ({cause.place}), {found}{others}"


def _drift_line(verification: Verification) -> str:
    if not verification.drift:
        return ""
    last = verification.drift[-1]
    floor = f", of {verification.floor} {last.floor:.2g}" if last.floor is not None else ""
    return f"drift (no verdict): running free, the port is {last.distance:.2g} away after step {last.step}{floor}"


def _decoder_line(verification: Verification) -> str:
    decoded = verification.decoded
    if decoded is None:
        return ""
    return (
        f"decoder: frames differ by at most {decoded.added:.3g} of 255, the original's rounding {decoded.rounding:.3g} "
        f"(frame {decoded.frame})"
    )


def data(verification: Verification) -> dict[str, Any]:
    """Returns a verification as JSON has it: what is infinite, or is not there, is null."""
    rows = dataclasses.asdict(verification)
    if verification.decoded is not None:
        rows["decoded"] |= {"verdict": verification.decoded.verdict}
        rows["decoded"].pop("pictures", None)
    rows["units"] = [
        {**dataclasses.asdict(unit), "ratio": unit.ratio, "verdict": unit.verdict, "harmless": unit.is_harmless}
        for unit in verification.units
    ]
    rows["seams"] = [{**dataclasses.asdict(seam), "verdict": seam.verdict} for seam in verification.seams]
    head = {"verdict": verification.said, "first_line": verification.first_line}
    finite: dict[str, Any] = _finite({**head, "exit_code": verification.exit_code, **rows})
    return finite


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, Verdict):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(file: Path, verification: Verification) -> None:
    """Writes a verification as a page; an older file gives way, once the new one is complete.

    Raises:
        OutputError: It cannot be written.
    """
    with atomic.writing(file) as temporary:
        temporary.write_text(page(verification), encoding="utf-8")


def page(verification: Verification) -> str:
    """Returns a verification as one HTML page that refers to nothing outside itself."""
    import jinja2

    template = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(TEMPLATE.read_text(encoding="utf-8"))
    units = sorted(verification.units, key=lambda unit: unit.ratio, reverse=True)
    return template.render(
        one=verification,
        lines=lines(verification)[1:],
        heat=heat_of(verification.units),
        charts=_charts(verification.units),
        units=[_row(unit) for unit in units[:SHOWN]],
        left_out=max(0, len(units) - SHOWN),
        seams=sorted(verification.seams, key=lambda seam: seam.verdict is Verdict.SAME),
        pictures=_pictures(verification),
    )


def _charts(units: Sequence[Unit]) -> list[Chart]:
    """Returns error against depth of each network, of its call with the worst block."""
    charts = []
    for network in dict.fromkeys(unit.network for unit in units):
        blocks = [unit for unit in units if unit.network == network and unit.kind == "block"]
        if len(blocks) > 1:
            worst = max(blocks, key=lambda unit: unit.ratio)
            charts.append(chart_of([u for u in blocks if (u.step, u.call) == (worst.step, worst.call)]))
    return charts


def _row(unit: Unit) -> list[str]:
    optional = ("" if value is None else f"{value:.3g}" for value in (unit.inherited, unit.effect))
    verdict = "harmless" if unit.is_harmless else str(unit.verdict)
    numbers = (f"{unit.rounding:.2e}", f"{unit.added:.2e}", f"{unit.ratio:.3g}", *optional)
    return [unit.name, f"{unit.step}.{unit.call}", unit.kind, *numbers, verdict]


def _pictures(verification: Verification) -> list[tuple[str, str]]:
    """Returns the frames of the page: what each is, and the picture as text."""
    if verification.decoded is None:
        return []
    return [(name, base64.b64encode(png).decode()) for name, png in verification.decoded.pictures.items()]
