"""What a verification measured, and what it says of it."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Literal

ROUNDING = 2.0
"""Up to this ratio a unit's error is rounding."""
FAULT = 3.0
"""Above this ratio a unit's error is a fault's."""
LEVELS = 255
"""The greatest level of a frame's pixel."""

Kind = Literal["network", "block", "module", "forward"]
How = Literal["absence", "elimination"]


class Verdict(enum.StrEnum):
    """What is said of a unit, of a value, and of all."""

    SAME = "same"
    UNCLEAR = "unclear"
    OTHER = "different"


def verdict_of(ratio: float) -> Verdict:
    """Returns the verdict of an error over the original's own."""
    if math.isnan(ratio) or ratio > FAULT:
        return Verdict.OTHER
    return Verdict.SAME if ratio <= ROUNDING else Verdict.UNCLEAR


@dataclasses.dataclass(frozen=True)
class Unit:
    """One unit of a network in one of its calls. Distances are max|a - b| / max|b|, b being the yardstick.

    Attributes:
        step: The denoising step, from 0.
        call: The call of the network in this step, from 0: guidance may call it twice.
        network: The component.
        path: The module's path in it; empty for the network. Of a forward: its module's.
        depth: The order in which units begin, from 0.
        kind: network, block, module, or forward: what a forward computes itself between the modules that it calls.
        name: As a person reads it: `transformer.blocks.3.forward before norm2`.
        rounding: The distance of the original, in the job's dtypes, from the yardstick.
        added: That of the port, whose unit gets the original's inputs: the unit's own error.
        inherited: That of the port, whose network gets the original's inputs: with the errors of all units before.
            None where it was not measured.
        effect: What its own error alone does to the network's output, in units of the rounding there. None where it
            was not measured.
        number: Which of the calls of its module this is, from 0: a module may be called more than once.
        is_behind: Whether it stands behind the first fault: effects are not measured there.
    """

    step: int
    call: int
    network: str
    path: str
    depth: int
    kind: Kind
    name: str
    rounding: float
    added: float
    inherited: float | None = None
    effect: float | None = None
    number: int = 0
    is_behind: bool = False

    @property
    def ratio(self) -> float:
        """Its own error over the original's: about 1 is rounding."""
        if self.added == 0:
            return 0.0
        return self.added / self.rounding if self.rounding > 0 else math.inf

    @property
    def is_harmless(self) -> bool:
        """Whether its error is more than rounding, and the network's output does not show it."""
        return self.ratio > ROUNDING and self.verdict is Verdict.SAME

    @property
    def verdict(self) -> Verdict:
        """What is said of it: an error that the network's output does not show is none.

        A unit behind the first fault is no fault: whether the output shows its error is not known.
        """
        verdict = verdict_of(self.ratio if self.effect is None else min(self.ratio, self.effect))
        return Verdict.UNCLEAR if self.is_behind and verdict is Verdict.OTHER else verdict


@dataclasses.dataclass(frozen=True)
class Seam:
    """A value that the loop passes to a network or from one, or between stages, compared by name.

    Attributes:
        name: sigmas, timesteps, noise, guidance, an embedding, a dtype, a field of the scheduler.
        stage: The stage that makes or takes it.
        step: The denoising step, from 0; None for what is before the loop.
        original: The original's, in words.
        port: The port's, in words.
        distance: max|a - b| / max|b|; 0 for words that agree, and infinity for others.
        allowed: The greatest distance that is rounding.
    """

    name: str
    stage: str
    step: int | None
    original: str
    port: str
    distance: float
    allowed: float

    @property
    def verdict(self) -> Verdict:
        """Whether it is rounding."""
        return Verdict.SAME if self.distance <= self.allowed else Verdict.OTHER


@dataclasses.dataclass(frozen=True)
class Cause:
    """A patch that a unit's error comes from, or that it may come from.

    Attributes:
        patch: The entry's id.
        place: Where it is declared, `file:line`.
        promise: What it promised of its equivalence, in words.
        unit: The name of the unit.
        with_it: The unit's error with it.
        without_it: Without it; None where the network cannot be called without it.
        how: absence: the error goes when it is left out; elimination: no other patch is at fault.
        rounding: The unit's; None for a value of the loop.
        prepared: Whether the family's `prepare` changes the unit, so that it may be at fault in the patch's place.
    """

    patch: str
    place: str
    promise: str
    unit: str
    with_it: float
    without_it: float | None
    how: How
    rounding: float | None = None
    prepared: bool = False

    def words(self, error: float) -> str:
        """Returns an error in words: of a unit in times its rounding, of a value of the loop as a part of it."""
        if self.rounding is not None:
            return f"{error / self.rounding:.3g} times the rounding"
        return "another value" if math.isinf(error) else f"{error:.2g} of the largest value"


@dataclasses.dataclass(frozen=True)
class Drift:
    """How far a free-running port is from the original, which is no verdict.

    Attributes:
        step: The steps that were taken.
        distance: max|a - b| / max|b| of the latents after them.
        floor: The same of another mesh; None where none was run.
    """

    step: int
    distance: float
    floor: float | None = None


@dataclasses.dataclass(frozen=True)
class Decoded:
    """Frames of the decoder given the same latents.

    Attributes:
        rounding: The greatest difference of the original's frames from the yardstick's, in levels of 255.
        added: Of the port's.
        frame: The port's worst frame, from 0.
        pictures: That frame as PNG, by what it is: the original's, the port's, and their difference.
    """

    rounding: float
    added: float
    frame: int
    pictures: dict[str, bytes] = dataclasses.field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """A difference of one level is rounding's: frames are whole levels."""
        return Verdict.SAME if self.added <= 1 else verdict_of(self.added / max(self.rounding, 1.0))


@dataclasses.dataclass(frozen=True)
class Verification:
    """All that a verification measured.

    Attributes:
        model: The card's name.
        config: The job, as it was named.
        dtypes: Of the networks, by component.
        yardstick: The dtype of the yardstick, by component.
        strategy: Of sharding.
        mesh: Its axes' sizes.
        steps: The denoising steps that were compared, from 0.
        total: The steps of the job.
        against: What the port was compared with: `original` or a folder of a capture.
        seams: What was compared by name.
        units: What was compared unit by unit.
        causes: The patches that are at fault.
        clue: Where to look when no patch is at fault; else empty.
        drift: Of the free-running port.
        floor: What the floor of the drift is, in words; empty without one.
        decoded: The decoder's frames; None where they were not compared.
        unlike: Facts that are no measurement and no verdict, a line each: what was not compared.
        left_out: Blocks that were not compared, as a capture lacks them.
        programs: A line for each program that `run` and `plan` do not have in common.
        seconds: By what took them.
    """

    model: str
    config: str
    dtypes: dict[str, str]
    yardstick: dict[str, str]
    strategy: str
    mesh: dict[str, int]
    steps: tuple[int, ...]
    total: int
    against: str = "original"
    seams: tuple[Seam, ...] = ()
    units: tuple[Unit, ...] = ()
    causes: tuple[Cause, ...] = ()
    clue: str = ""
    drift: tuple[Drift, ...] = ()
    floor: str = ""
    decoded: Decoded | None = None
    unlike: tuple[str, ...] = ()
    left_out: int = 0
    programs: tuple[str, ...] = ()
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def bad_seams(self) -> list[Seam]:
        """The seams that differ, in the order of the run."""
        return [seam for seam in self.seams if seam.verdict is Verdict.OTHER]

    @property
    def culprits(self) -> list[Unit]:
        """The units at fault: the innermost of the first call that has one, in order of depth."""
        bad = [unit for unit in self.units if unit.verdict is Verdict.OTHER]
        if not bad:
            return []
        first = min((unit.step, unit.call) for unit in bad)
        bad = sorted((u for u in bad if (u.step, u.call) == first), key=lambda unit: unit.depth)
        outer = [unit for unit in bad if unit.kind == "block" or (unit.kind == "forward" and not unit.path)]
        if not outer:
            return bad
        inner = [u for u in bad if u.path and u.kind != "block" and f"{u.path}.".startswith(f"{outer[0].path}.")]
        return [*inner, outer[0]]

    @property
    def worst(self) -> Unit | None:
        """The unit with the greatest ratio among those that say the verdict; None without units."""
        units = [unit for unit in self.units if not unit.is_harmless] or list(self.units)
        return max(units, key=lambda unit: unit.ratio, default=None)

    @property
    def verdict(self) -> Verdict:
        """Different if a seam, a unit or the decoder is; unclear if one of them is, and where no unit was compared."""
        verdicts = {seam.verdict for seam in self.seams} | {unit.verdict for unit in self.units}
        verdicts |= {self.decoded.verdict} if self.decoded is not None else set()
        verdicts |= set() if self.units else {Verdict.UNCLEAR}
        return next((one for one in (Verdict.OTHER, Verdict.UNCLEAR) if one in verdicts), Verdict.SAME)

    @property
    def said(self) -> str:
        """The verdict in words: without the decoder's frames, that the latents are the same, and no more."""
        same = "the same latents" if self.decoded is None else "the same picture"
        return {Verdict.SAME: same, Verdict.UNCLEAR: "unclear", Verdict.OTHER: "another picture"}[self.verdict]

    @property
    def exit_code(self) -> int:
        """1 for another picture, else 0."""
        return int(self.verdict is Verdict.OTHER)

    @property
    def first_line(self) -> str:
        """The verdict, and what is at fault or what was compared."""
        line = f"{self.said}: "
        if self.bad_seams:
            seam = self.bad_seams[0]
            at = f"{seam.stage}, step {seam.step}" if seam.step is not None else seam.stage
            return f"{line}{seam.name} ({at}) is {seam.port}, and the original's is {seam.original}{self._blamed()}"
        if self.culprits:
            unit = self.culprits[0]
            where = f"at step {unit.step}"
            return f"{line}{unit.name} adds {unit.ratio:.3g} times the rounding {where}{self._blamed()}"
        if self.decoded is not None and self.decoded.verdict is not Verdict.SAME:
            decoded = self.decoded
            return f"{line}frame {decoded.frame} of decode differs by {decoded.added:.3g} levels of 255{self._blamed()}"
        unclear = [unit for unit in self.units if unit.verdict is Verdict.UNCLEAR]
        if self.verdict is Verdict.UNCLEAR and unclear:
            unit = max(unclear, key=lambda unit: unit.ratio)
            seen = "" if unit.effect is None else f", and moves the output by {unit.effect:.3g} roundings"
            between = f"up to {ROUNDING:g} is rounding, above {FAULT:g} a fault"
            own = f"{unit.name} adds {unit.ratio:.3g} times the rounding at step {unit.step}{seen}"
            return f"{self.said} ({self._compared()}): {own}; {between}{self._harmless()}"
        worst = self.worst
        if worst is None:
            return f"{line}no network was compared; every value of the loop agrees"
        most = f"no unit adds more than {worst.ratio:.3g} times the rounding ({worst.name}, step {worst.step})"
        return f"{self.said} ({self._compared()}): {most}{self._harmless()}"

    def _compared(self) -> str:
        steps = f"{len(self.steps)} of {self.total} steps compared"
        steps += f", without {self.left_out} blocks that the capture lacks" if self.left_out else ""
        if self.decoded is not None:
            return f"{steps}, and the decoder"
        remedy = "add --decode" if self.against == "original" else "capture with --decode"
        return f"{steps}; the decoder was not: {remedy}"

    def _harmless(self) -> str:
        """Returns the unit that adds most of those whose error the output does not show, with its figures."""
        units = [unit for unit in self.units if unit.is_harmless]
        if not units:
            return ""
        most = max(units, key=lambda unit: unit.ratio)
        figures = f"adds {most.ratio:.3g} times the rounding, and moves the output by {most.effect:.3g} roundings"
        more = f", and {len(units) - 1} more" if len(units) > 1 else ""
        return f"; harmless: {most.name} {figures}{more}"

    def _blamed(self) -> str:
        if self.causes:
            cause = self.causes[0]
            prepared = "; or the family's `prepare`, which changes this module" if cause.prepared else ""
            return f"; patch {cause.patch} ({cause.place}), which promises: {cause.promise}{prepared}"
        return f"; {self.clue}" if self.clue else ""
