"""The results of a verification and its verdict, as text of twelve lines, as JSON data, and as an HTML page."""

from __future__ import annotations

import base64
import dataclasses
import enum
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from torchport.files import page
from torchport.files.page import Curve, LineChart

TEMPLATE = Path(__file__).with_suffix(".html")
ROUNDING = 2.0
"""Up to this ratio a unit's error is rounding."""
FAULT = 3.0
"""Above this ratio a unit's error is a fault's."""

Kind = Literal["network", "block", "module", "forward"]
How = Literal["absence", "elimination"]
KINDS: dict[Kind, str] = {"block": "blocks", "module": "modules", "forward": "stretches of forward() between them"}
"""The plural of each kind of unit in the line that counts units, in the order of that line."""
SHOWN = 100
"""The most rows of the page's table of units: those with the greatest ratios are shown."""
HOTTEST = 100.0
"""The ratio from which a cell of the heat map has the strongest colour."""
CURVES = {"rounding": "the original's rounding", "added": "added by the port", "inherited": "with the errors before it"}


class Verdict(enum.StrEnum):
    """The verdict on a unit, a seam or a whole verification; the values are those of the JSON report."""

    SAME = "same"
    UNCLEAR = "unclear"
    OTHER = "different"


def _verdict_of(ratio: float) -> Verdict:
    if math.isnan(ratio) or ratio > FAULT:
        return Verdict.OTHER
    return Verdict.SAME if ratio <= ROUNDING else Verdict.UNCLEAR


@dataclasses.dataclass(frozen=True)
class Unit:
    """A block, module or code between modules in one call of a network. Distances: max|a - b| / max|yardstick|."""

    step: int  #: The denoising step, from 0.
    call: int  #: The call of the network in this step, from 0: guidance may call it twice.
    network: str
    path: str  #: The module's path in it; empty for the network. Of a forward: its module's.
    depth: int  #: The order in which units begin, from 0.
    #: Network, block, module, or forward: the code of a `forward` between the modules that it calls.
    kind: Kind
    name: str  #: As a person reads it: `transformer.blocks.3.forward before norm2`.
    rounding: float  #: The distance of the original, in the job's dtypes, from the yardstick.
    #: The port's distance if the unit gets the original's inputs: the unit's own error.
    added: float
    #: The port's distance if only the network gets the original's inputs, with all errors before. None if not measured.
    inherited: float | None = None
    #: How far its own error alone moves the network's output, divided by the rounding there. None if not measured.
    effect: float | None = None
    #: Which of the calls of its module this is, from 0: a module may be called more than once.
    number: int = 0
    #: Whether it stands behind the first fault: effects are not measured there.
    is_behind: bool = False
    #: Its own error over the original's if the error of each channel is divided by the channel's greatest value.
    by_channel: float = 0.0

    @property
    def ratio(self) -> float:
        """Its own error divided by the original's rounding, or by channel if that is more; about 1 is rounding."""
        if self.added == 0:
            return 0.0
        return max(self.added / self.rounding if self.rounding > 0 else math.inf, self.by_channel)

    @property
    def is_harmless(self) -> bool:
        """Whether its error is more than rounding, but has no effect on the network's output beyond rounding."""
        return self.ratio > ROUNDING and self.verdict is Verdict.SAME

    @property
    def verdict(self) -> Verdict:
        """The verdict; an error without an effect on the output is none, and behind a fault it is at most unclear."""
        verdict = _verdict_of(self.ratio if self.effect is None else min(self.ratio, self.effect))
        return Verdict.UNCLEAR if self.is_behind and verdict is Verdict.OTHER else verdict


@dataclasses.dataclass(frozen=True)
class Seam:
    """A value that passes between the denoising loop and a network, or between stages, compared by name."""

    #: `sigmas`, `timesteps`, noise, guidance, an embedding, a dtype, a field of the scheduler.
    name: str
    stage: str
    step: int | None  #: The denoising step, from 0; None for values before the loop.
    original: str
    port: str
    #: max|a - b| / max|b|; for values that are no tensors, 0 if they are equal and infinity if not.
    distance: float
    allowed: float

    @property
    def verdict(self) -> Verdict:
        return Verdict.SAME if self.distance <= self.allowed else Verdict.OTHER


@dataclasses.dataclass(frozen=True)
class Cause:
    """A patch that causes the error of a unit or a seam, or may cause it."""

    patch: str
    place: str
    promise: str
    unit: str
    #: The error with the patch.
    with_it: float
    #: The error without the patch; None where the network cannot be called then.
    without_it: float | None
    #: Absence: without the patch the error is gone; elimination: without any other patch it is not.
    how: How
    rounding: float | None = None  #: The unit's; None for a value of the loop.
    #: Whether the family's `prepare` changes the unit, so that it may be at fault instead of the patch.
    prepared: bool = False
    #: The module before the unit whose output has another shape through the patch, with both shapes; or empty.
    reshaped: str = ""

    def words(self, error: float) -> str:
        """Returns an error in words: a unit's in multiples of its rounding, a seam's as a part of its largest value."""
        if self.rounding is not None:
            return f"{error / self.rounding:.3g} times the rounding"
        return "another value" if math.isinf(error) else f"{error:.2g} of the largest value"


@dataclasses.dataclass(frozen=True)
class Drift:
    """How far the latents of a port that runs its own loop are from the original's; it is no verdict."""

    step: int
    distance: float  #: max|a - b| / max|b| of the latents after this many steps.
    floor: float | None = None  #: The same distance on another mesh; None where none was run.


@dataclasses.dataclass(frozen=True)
class Decoded:
    """How far the port's frames are from the original's, decoded from the same latents."""

    #: The greatest difference of the original's frames from the yardstick's, in levels of 255.
    rounding: float
    #: The same difference of the port's frames.
    added: float
    frame: int  #: The port's worst frame, from 0.
    #: That frame as PNG, by caption: the original's, the port's, and their difference.
    pictures: dict[str, bytes] = dataclasses.field(default_factory=dict)
    #: The first module whose output differs from the original's, in words; empty where none was searched or found.
    parting: str = ""

    @property
    def verdict(self) -> Verdict:
        """A difference of one level is rounding: frames are integers."""
        return Verdict.SAME if self.added <= 1 else _verdict_of(self.added / max(self.rounding, 1.0))


@dataclasses.dataclass(frozen=True)
class Verification:
    """The report of a verification."""

    model: str
    config: str
    dtypes: dict[str, str]
    yardstick: dict[str, str]
    strategy: str
    mesh: dict[str, int]
    steps: tuple[int, ...]  #: The denoising steps that were compared, from 0.
    total: int  #: Steps that the job takes.
    #: What the port was compared with: `original` or a folder of a capture.
    against: str = "original"
    seams: tuple[Seam, ...] = ()
    units: tuple[Unit, ...] = ()
    causes: tuple[Cause, ...] = ()
    clue: str = ""  #: Where to look next.
    drift: tuple[Drift, ...] = ()
    floor: str = ""  #: The run whose drift is the floor, in words; empty without one.
    decoded: Decoded | None = None
    unlike: tuple[str, ...] = ()  #: Notes, a line each: what was not compared.
    left_out: int = 0  #: Blocks not captured.
    programs: tuple[str, ...] = ()  #: Differences of the run's programs from a plan's, a line each.
    operators: dict[str, str] = dataclasses.field(default_factory=dict)  #: By stage: how many are as PyTorch's.
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  #: By part of the verification.

    @property
    def bad_seams(self) -> list[Seam]:
        return [seam for seam in self.seams if seam.verdict is Verdict.OTHER]

    @property
    def culprits(self) -> list[Unit]:
        """The faulty units of the first call that has any; of faulty blocks only the first one, after its modules."""
        all_bad = [unit for unit in self.units if unit.verdict is Verdict.OTHER]
        if not all_bad:
            return []
        first_call = min((unit.step, unit.call) for unit in all_bad)
        bad = sorted((u for u in all_bad if (u.step, u.call) == first_call), key=lambda unit: unit.depth)
        # A block, or the code of the network's own forward between blocks.
        outer = next((u for u in bad if u.kind == "block" or (u.kind == "forward" and not u.path)), None)
        if outer is None:
            return bad
        inner = [u for u in bad if u.path and u.kind != "block" and f"{u.path}.".startswith(f"{outer.path}.")]
        return [*inner, outer]

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all seams, units and the decoder; at best unclear if no unit was compared."""
        verdicts = {seam.verdict for seam in self.seams} | {unit.verdict for unit in self.units}
        if self.decoded is not None:
            verdicts |= {self.decoded.verdict}
        if not self.units:
            verdicts.add(Verdict.UNCLEAR)
        return next((verdict for verdict in (Verdict.OTHER, Verdict.UNCLEAR) if verdict in verdicts), Verdict.SAME)

    @property
    def verdict_words(self) -> str:
        """The verdict in words; if the decoder was not compared, the latents can be the same, but not the picture."""
        same = "the same latents" if self.decoded is None else "the same picture"
        return {Verdict.SAME: same, Verdict.UNCLEAR: "unclear", Verdict.OTHER: "another picture"}[self.verdict]

    @property
    def exit_code(self) -> int:
        """1 for another picture, else 0."""
        return int(self.verdict is Verdict.OTHER)

    @property
    def first_line(self) -> str:
        """The verdict in one line, with the first fault, or else with what was compared and the worst unit."""
        line = f"{self.verdict_words}: "
        if self.bad_seams:
            seam = self.bad_seams[0]
            at = f"{seam.stage}, step {seam.step}" if seam.step is not None else seam.stage
            return f"{line}{seam.name} ({at}) is {seam.port}, and the original's is {seam.original}{self._blame()}"
        if self.culprits:
            unit = self.culprits[0]
            where = f"at step {unit.step}"
            reshaped = self.causes[0].reshaped if self.causes else ""
            line += f"{reshaped}, and so " if reshaped else ""
            return f"{line}{unit.name} adds {unit.ratio:.3g} times the rounding {where}{self._blame()}"
        if self.decoded is not None and self.decoded.verdict is not Verdict.SAME:
            decoded = self.decoded
            words = f"frame {decoded.frame} of decode differs by {decoded.added:.3g} levels of 255"
            words += f", first in {decoded.parting}" if decoded.parting else ""
            return f"{line}{words}{self._blame()}"
        unclear = [unit for unit in self.units if unit.verdict is Verdict.UNCLEAR]
        if self.verdict is Verdict.UNCLEAR and unclear:
            unit = max(unclear, key=lambda unit: unit.ratio)
            effect = "" if unit.effect is None else f", and moves the output by {unit.effect:.3g} roundings"
            between = f"up to {ROUNDING:g} is rounding, above {FAULT:g} a fault"
            words = f"{unit.name} adds {unit.ratio:.3g} times the rounding at step {unit.step}{effect}"
            return f"{self.verdict_words} ({self._compared_words()}): {words}; {between}{self._harmless_words()}"
        units = [unit for unit in self.units if not unit.is_harmless] or list(self.units)
        if not units:
            return f"{line}no network was compared; every value of the loop agrees"
        worst = max(units, key=lambda unit: unit.ratio)
        most = f"no unit adds more than {worst.ratio:.3g} times the rounding ({worst.name}, step {worst.step})"
        return f"{self.verdict_words} ({self._compared_words()}): {most}{self._harmless_words()}"

    def _compared_words(self) -> str:
        steps = f"{len(self.steps)} of {self.total} steps compared"
        if self.left_out:
            steps += f", without {self.left_out} blocks that the capture lacks"
        if self.decoded is not None:
            return f"{steps}, and the decoder"
        remedy = "add --decode" if self.against == "original" else "capture with --decode"
        return f"{steps}; the decoder was not: {remedy}"

    def _harmless_words(self) -> str:
        """Returns the worst harmless unit in words, with its figures; an empty text without one."""
        units = [unit for unit in self.units if unit.is_harmless]
        if not units:
            return ""
        most = max(units, key=lambda unit: unit.ratio)
        figures = f"adds {most.ratio:.3g} times the rounding, and moves the output by {most.effect:.3g} roundings"
        more = f", and {len(units) - 1} more" if len(units) > 1 else ""
        return f"; harmless: {most.name} {figures}{more}"

    def _blame(self) -> str:
        """Returns the end of the first line: the patch at fault, or else the clue; empty without both."""
        if self.causes:
            cause = self.causes[0]
            prepared = "; or the family's `prepare`, which changes this module" if cause.prepared else ""
            return f"; patch {cause.patch} ({cause.place}), which promises: {cause.promise}{prepared}"
        return f"; {self.clue}" if self.clue else ""


def lines(verification: Verification) -> list[str]:
    """Returns a verification in twelve lines at most, the verdict first."""
    mesh = ",".join(f"{axis}={size}" for axis, size in verification.mesh.items()) or "one device"
    # Each network's dtype, and its yardstick's: `bfloat16 beside float32`.
    dtypes = {f"{dtype} beside {verification.yardstick[name]}" for name, dtype in verification.dtypes.items()}
    steps = ", ".join(map(str, verification.steps)) or "none"
    text = [
        verification.first_line,
        f"{verification.model} {verification.config}: {' and '.join(sorted(dtypes))}, {verification.strategy} on "
        f"{mesh}, step {steps} of {verification.total}, against {verification.against}",
        _seam_line(verification),
        _network_line(verification),
        _unit_line(verification),
        _culprit_line(verification),
        _cause_line(verification),
    ]
    if verification.drift:
        last = verification.drift[-1]
        floor = "" if last.floor is None else f", of {verification.floor} {last.floor:.2g}"
        distance = f"the port is {last.distance:.2g} away after step {last.step}{floor}"
        text.append(f"drift (no verdict): running free, {distance}")
    if verification.decoded is not None:
        decoded = verification.decoded
        text.append(
            f"decoder: frames differ by at most {decoded.added:.3g} of 255, the original's rounding "
            f"{decoded.rounding:.3g} (frame {decoded.frame})"
        )
    if verification.programs:
        text.append(f"programs: {'; '.join(verification.programs)}")
    if verification.unlike:
        text.append(f"note: {'; '.join(verification.unlike)}")
    text.append(", ".join(f"{part} took {seconds:.1f} s" for part, seconds in verification.seconds.items()))
    return [line for line in text if line]


def _seam_line(verification: Verification) -> str:
    """Returns the line on seams, the loop's values outside networks that are compared by name; empty without any."""
    bad = verification.bad_seams
    if not verification.seams:
        return ""
    names = list(dict.fromkeys(seam.name for seam in bad))
    if len(names) > 4:
        names[4:] = ["..."]
    more = f": {', '.join(names)}" if names else ""
    return f"seams: {len(verification.seams)} values of the loop compared by name, {len(bad) or 'none'} differ{more}"


def _network_line(verification: Verification) -> str:
    """Returns the line for the outputs of the whole networks: the worst call's ratio; empty if there is none."""
    networks = [unit for unit in verification.units if unit.kind == "network"]
    if not networks:
        return ""
    worst = max(networks, key=lambda unit: unit.ratio)
    return (
        f"networks: {len(networks)} call(s) on the mesh, at most {worst.ratio:.3g} times the rounding: {worst.name}, "
        f"step {worst.step}" + "".join(f"; {stage}: {words}" for stage, words in verification.operators.items())
    )


def _unit_line(verification: Verification) -> str:
    units = [unit for unit in verification.units if unit.kind != "network"]
    if not units:
        return ""
    numbers = Counter(unit.kind for unit in units)
    kinds = ", ".join(f"{numbers[kind]} {name}" for kind, name in KINDS.items() if numbers[kind])
    verdicts = Counter(unit.verdict for unit in units)
    harmless = sum(unit.is_harmless for unit in units)
    behind = sum(unit.is_behind for unit in units if unit.verdict is Verdict.UNCLEAR)
    groups = {
        f"with at most {ROUNDING:g} times the rounding": verdicts[Verdict.SAME] - harmless,
        "with more, which the output does not show": harmless,
        "unclear": verdicts[Verdict.UNCLEAR] - behind,
        f"at fault (above {FAULT:g} times)": verdicts[Verdict.OTHER],
        "behind the first fault and not judged": behind,
    }
    return f"units: {kinds}: {', '.join(f'{count} {words}' for words, count in groups.items() if count)}"


def _culprit_line(verification: Verification) -> str:
    """Returns the line on the first unit of the network whose error is too large; empty without one."""
    if not verification.culprits:
        return ""
    unit = verification.culprits[0]
    before = "" if unit.inherited is None else f", {unit.inherited / unit.rounding:.3g} times with the errors before it"
    output = "; alone it moves the network's output by"
    effect = "" if unit.effect is None else f"{output} {unit.effect:.3g} times the rounding there"
    others = len(verification.culprits) - 1
    more = f"; {others} more in the same call" if others else ""
    words = f"first: {unit.name} adds {unit.ratio:.3g} times the rounding"
    return f"{words}{before}{effect}{more}; the rounding is {unit.rounding:.2g} of the largest value"


def _cause_line(verification: Verification) -> str:
    """Returns the line on the patch at fault and how it was found; without one the clue, or empty text."""
    if not verification.causes:
        return f"cause: {verification.clue}" if verification.clue else ""
    cause = verification.causes[0]
    without = "" if cause.without_it is None else f", {cause.words(cause.without_it)} without it"
    others = ", ".join(other.patch for other in verification.causes[1:])
    if others:
        others = f"; also possible: {others}"
    how = "leaving it out" if cause.how == "absence" else "leaving out the others"
    found = f"found by {how}: {cause.words(cause.with_it)} with it{without}"
    return f"patch: {cause.patch} ({cause.place}), {found}{others}"


def data(verification: Verification) -> dict[str, Any]:
    """Returns a verification as JSON data; numbers that are infinite or missing are null."""
    rows = dataclasses.asdict(verification)
    if verification.decoded is not None:
        rows["decoded"] |= {"verdict": verification.decoded.verdict}
        rows["decoded"].pop("pictures", None)  # bytes of PNG files
    rows["units"] = [
        {**dataclasses.asdict(unit), "ratio": unit.ratio, "verdict": unit.verdict, "harmless": unit.is_harmless}
        for unit in verification.units
    ]
    rows["seams"] = [{**dataclasses.asdict(seam), "verdict": seam.verdict} for seam in verification.seams]
    head = {"verdict": verification.verdict_words, "first_line": verification.first_line}
    whole: dict[str, Any] = finite({**head, "exit_code": verification.exit_code, **rows})
    return whole


def finite(value: Any) -> Any:
    """Returns a tree as JSON data: infinite floats and NaN become None, verdicts their texts, and tuples lists."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, Verdict):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def page_of(verification: Verification) -> str:
    """Returns a verification as one self-contained HTML page."""
    units = sorted(verification.units, key=lambda unit: unit.ratio, reverse=True)
    pictures = {} if verification.decoded is None else verification.decoded.pictures
    heads = "unit|step.call|kind|rounding|added|ratio|inherited|effect|verdict"
    floor = f"floor: {verification.floor}" if verification.floor else "floor"
    drift = [(d.step, f"{d.distance:.2e}", "" if d.floor is None else f"{d.floor:.2e}") for d in verification.drift]
    causes = []
    for cause in verification.causes:
        errors = ["" if error is None else cause.words(error) for error in (cause.with_it, cause.without_it)]
        causes.append((cause.patch, cause.place, cause.promise, cause.unit, *errors, cause.how))
    seams = []
    for seam in sorted(verification.seams, key=lambda seam: seam.verdict is Verdict.SAME):  # those that differ first
        step = "" if seam.step is None else seam.step
        distances = f"{seam.distance:.2e}", f"{seam.allowed:.2e}"
        seams.append((seam.name, seam.stage, step, seam.original, seam.port, *distances))
    return page.rendered(
        TEMPLATE,
        verification=verification,
        lines=lines(verification)[1:],
        heat=_heat_map(verification.units),
        charts=_charts(verification.units),
        causes=page.table(caption="", heads="patch|where|promises|unit|error with it|without it|by", rows=causes),
        drift=page.table(caption="", heads=f"after step|distance|{floor}", rows=drift),
        units=page.table(caption="", heads=heads, rows=[_unit_row(unit) for unit in units[:SHOWN]]),
        left_out=max(0, len(units) - SHOWN),
        seams=page.table(
            caption="",
            heads="value|stage|step|original|port|distance|allowed",
            rows=seams,
            bad=len(verification.bad_seams),
        ),
        pictures=[(name, base64.b64encode(png).decode()) for name, png in pictures.items()],
    )


def _heat_map(units: Sequence[Unit]) -> dict[str, Any]:
    """Returns the ratio of each network and block in each call of each step, as `columns` (their heads) and `rows`.

    A row is a name and a cell for each call: `("transformer.blocks.3", [{"text": "1.2", "kind": "same", ...}, None])`.
    """
    outer = sorted((u for u in units if u.kind in ("network", "block")), key=lambda u: (u.network, u.depth))
    calls = sorted({(unit.step, unit.call) for unit in outer})
    by_place = {(unit.network, unit.path, unit.step, unit.call): unit for unit in outer}
    rows = [
        (f"{network}.{path}" if path else network, [_cell(by_place.get((network, path, *call))) for call in calls])
        for network, path in dict.fromkeys((unit.network, unit.path) for unit in outer)
    ]
    columns = [f"step {step}" + (f", call {call}" if call else "") for step, call in calls]
    return {"columns": columns, "rows": rows}


def _cell(unit: Unit | None) -> dict[str, Any] | None:
    """Returns a unit's cell of the heat map, with its opacity `shade`; None where the unit was not measured."""
    if unit is None:
        return None
    kind = "bad" if unit.verdict is Verdict.OTHER else "unclear" if unit.ratio > ROUNDING else "same"
    # A logarithmic scale, from 0 at a tenth of the rounding to 1 at `HOTTEST`.
    heat = math.log(max(min(unit.ratio, HOTTEST), 0.1) / 0.1) / math.log(HOTTEST / 0.1)
    return {"text": f"{unit.ratio:.2g}", "kind": kind, "shade": 0.15 + 0.85 * heat}


def _charts(units: Sequence[Unit]) -> list[LineChart]:
    charts = []
    for network in dict.fromkeys(unit.network for unit in units):
        blocks = [unit for unit in units if unit.network == network and unit.kind == "block"]
        if len(blocks) > 1:
            worst = max(blocks, key=lambda unit: unit.ratio)
            call = [unit for unit in blocks if (unit.step, unit.call) == (worst.step, worst.call)]
            charts.append(_chart(sorted(call, key=lambda unit: unit.depth)))
    return charts


def _chart(units: Sequence[Unit]) -> LineChart:
    """Returns the chart of error against depth for the blocks of one call, on a logarithmic scale."""
    values = {kind: [getattr(unit, kind) for unit in units] for kind in CURVES}
    known = [v for group in values.values() for v in group if v is not None and 0 < v < math.inf]
    low, high = (math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))) if known else (-8, 0)
    high = max(high, low + 1)

    def height(value: float) -> float:
        return (math.log10(value) - low) / (high - low) if value < math.inf else 1.0

    curves = []
    for kind, label in CURVES.items():
        last = max(len(units) - 1, 1)
        points = [(n / last, height(value)) for n, value in enumerate(values[kind]) if value is not None and value > 0]
        if points:
            curves += [Curve(kind, label, points)]
    first = units[0]
    title = f"{first.network}, step {first.step}, call {first.call}: error against depth"
    ticks = [(height(10.0**power), f"1e{power}") for power in range(low, high + 1)]
    return LineChart(title, curves, ticks, (first.path, units[-1].path))


def _unit_row(unit: Unit) -> list[str]:
    optional = ("" if value is None else f"{value:.3g}" for value in (unit.inherited, unit.effect))
    verdict = "harmless" if unit.is_harmless else str(unit.verdict)
    numbers = (f"{unit.rounding:.2e}", f"{unit.added:.2e}", f"{unit.ratio:.3g}", *optional)
    return [unit.name, f"{unit.step}.{unit.call}", unit.kind, *numbers, verdict]
