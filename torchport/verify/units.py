"""The units of one call of a network: each with the original's inputs, beside the original and the yardstick."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch.utils import _pytree as pytree

from torchport.verify.borders import Border, Pass, Values, inner_paths
from torchport.verify.effects import Outputs, of_port
from torchport.verify.facts import FAULT, ROUNDING, Kind, Unit, Verdict
from torchport.verify.original import given
from torchport.verify.port import Port
from torchport.verify.recording import Call
from torchport.verify.yardstick import by_place, distance, floor, is_sampled, matched, shape_of

HARMLESS = 6
"""Units of one call, with more than rounding, whose effect on the network's output is measured at once."""
CLEAR = 100.0
"""Roundings in the output above which no better estimate of the rounding makes an error one."""


@dataclasses.dataclass
class Measured:
    """One unit, and what is needed to look further into it.

    Attributes:
        unit: The unit.
        border: Where it was measured.
        block: The path of the unit of the network that it lies in; empty for the network's forward.
        touched: The patches that were called between the border before and this one.
        nearby: Those that were called in its block.
        forced: The paths of the modules whose borders had the original's values.
        skipped: Those that were not called.
    """

    unit: Unit
    border: Border
    block: str
    touched: frozenset[str] = frozenset()
    nearby: frozenset[str] = frozenset()
    forced: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


class Units:
    """The units of one call.

    Args:
        port: The port's network.
        call: The original's, recorded.
        outputs: Shows the effect of values at borders; None: the port does.

    Attributes:
        rounding: Of the network's output; see `estimate_rounding`.
    """

    def __init__(self, port: Port, call: Call, outputs: Outputs | None = None) -> None:
        self.port = port
        self.call = call
        self.outputs = outputs or of_port(port, call)
        self.rounding = max(call.rounding, floor(call.output))
        self._is_estimated = False
        self._apart: float | None = None  # what the errors of all units together make in the output
        self.free: Values = {}
        self.last: Pass | None = None
        self.between: dict[Border, list[str]] = {}

    def outer(self) -> list[Measured]:
        """Returns the network's blocks, and what its forward computes between them."""
        paths = ["", *self.port.outer]
        output, free = self.port.called(self.call.inputs, paths, {})
        self.free = free.noted
        self._apart = distance(output, self.call.wide_output)
        self.estimate_rounding(self._apart)
        values = {border: value for border, value in self.call.values.items() if border.path in paths}
        _, forced = self.port.called(self.call.inputs, paths, given(values))
        self.last = forced
        measured = list(self._measured(forced, self.call.outer, paths, "", ()))
        for one in measured:
            one.skipped = self._skipped(one.border.path)
        return measured

    def inner(self, block: str) -> list[Measured]:
        """Returns the modules of a block, and what its forward computes between them."""
        assert self.last is not None
        every, skipped = inner_paths(self.port.module, block), self._skipped(block)
        values = given(self.call.values)
        borders = {border: value for border, value in values.items() if border.path in (block, *skipped)}
        _, look = self.port.called(self.call.inputs, ["", *self.port.outer, *every], borders, skipped)
        paths = [path for path in every if self._is_alike(path, look.noted)]
        self.between = _between(look.noted, every, paths)
        borders |= {border: value for border, value in values.items() if border.path in paths}
        _, forced = self.port.called(self.call.inputs, [*self.port.outer, *paths], borders, skipped)
        return list(self._measured(forced, self.call.inner, paths, block, skipped))

    @property
    def together(self) -> float | None:
        """What the errors of all units make together in the output, in units of the rounding there."""
        return self._in_roundings(self._apart)

    def effects(self, measured: Sequence[Measured]) -> list[float | None]:
        """Returns what each unit's own error alone does to the network's output, in units of the rounding there.

        None stands for a unit that a capture has only some rows of, or whose value cannot take the original's place.
        """
        whole = [one for one in measured if not is_sampled(self.call.values[one.border])]
        changes = [(one.border, measured_value(self, one)) for one in whole]
        changes = [(border, value) for border, value in changes if _takes_place(value, self.call.values[border])]
        moved = self._moved(changes)
        for apart in moved:
            self.estimate_rounding(apart)
        by_border = {border: self._in_roundings(apart) for (border, _), apart in zip(changes, moved, strict=True)}
        return [by_border.get(one.border) for one in measured]

    def effect_of(self, border: Border, bad: Any) -> float | None:
        """Returns what a value at a border, in place of the original's, does to the output, in units of rounding."""
        [moved] = self._moved([(border, bad)])
        return self._in_roundings(moved)

    def estimate_rounding(self, apart: float | None) -> None:
        """Takes what the roundings of all blocks make together for the network's, if that is more.

        The original has one rounding of many that are as likely, and in it the errors of blocks may cancel. So each
        block's is measured in the output, and the root of the sum of their squares is what is to be expected. It takes
        two calls of the network for each border, so it is left where it changes no verdict.

        Args:
            apart: A distance of outputs that is judged.
        """
        ratio = self._in_roundings(apart)
        if self._is_estimated or ratio is None or not ROUNDING < ratio <= CLEAR:
            return
        self._is_estimated = True
        values, wide = self.call.values, given(self.call.outer)
        pairs = {border: (values[border], wide[border]) for border in wide if border in values}
        borders = [border for border, pair in pairs.items() if not is_sampled(pair) and distance(*pair)]
        moved = self._moved([(border, wide[border]) for border in borders])
        together = math.sqrt(sum(apart**2 for apart in moved if apart is not None and math.isfinite(apart)))
        self.rounding = max(self.rounding, together)

    def _moved(self, changes: Sequence[tuple[Border, Any]]) -> list[float | None]:
        """Returns how far values at borders, in place of the original's, move the network's output."""
        if not changes:
            return []
        pairs = [{border: each} for border, value in changes for each in (value, self.call.values[border])]
        outputs = self.outputs(pairs)
        return [distance(*outputs[i : i + 2]) for i in range(0, len(outputs), 2)]

    def _in_roundings(self, apart: float | None) -> float | None:
        """Returns a distance of two outputs in units of the rounding there."""
        return None if apart is None else apart / self.rounding

    def _skipped(self, block: str) -> tuple[str, ...]:
        """Returns the other blocks whose outputs are known in every detail, so that they need not be called."""
        assert self.last is not None
        others = [path for path in self.port.outer if path != block]
        return tuple(path for path in others if self._is_alike(path, self.last.noted))

    def _is_alike(self, path: str, noted: Values) -> bool:
        """Returns whether the port calls a module as often as the original, with tensors of the same shapes."""
        borders = {border for border in self.call.values if border.path == path}
        if not borders or borders != {border for border in noted if border.path == path}:
            return False
        if is_sampled([self.call.values[border] for border in borders]):  # there is no more of it to be returned
            return False
        return all(_shapes(self.call.values[border]) == _shapes(noted[border]) for border in borders)

    def _measured(
        self, forced: Pass, wide: Values, paths: Collection[str], block: str, skipped: tuple[str, ...]
    ) -> Iterator[Measured]:
        """Yields a unit for each border that can be compared, in the order of the call."""
        nearby = _nearby(forced, self.port.outer)
        for depth, (border, value) in enumerate(forced.noted.items()):
            known = border in wide and border in self.call.values and (not block or _within(border.path, block))
            is_root = not border.path
            if not known or (is_root and border.side == "in") or (border.path == block and border.side == "in"):
                continue
            original = self.call.values[border]
            rounding, added = distance(original, wide[border]), distance(value, wide[border])
            if rounding is None or added is None or not matched(value, original):
                continue
            inherited = distance(self.free[border], wide[border]) if not block and border in self.free else None
            kind, path, name = self._named(border, paths, block)
            if kind == "forward" and self.between.get(border):
                name += f", with {', '.join(other.removeprefix(f'{path}.') for other in self.between[border])}"
            rounding = max(rounding, floor(original))
            call = self.call
            unit = Unit(
                *(call.step, call.number, call.network, path, depth, kind, f"{call.network}{name}"),
                *(rounding, added, inherited, None, border.number),
            )
            within = block or (border.path if border.side == "out" else "")
            yield Measured(
                *(unit, border, within, forced.touched[border], nearby.get(within, frozenset())),
                *(tuple(paths), skipped),
            )

    def _named(self, border: Border, paths: Collection[str], block: str) -> tuple[Kind, str, str]:
        """Returns a border's kind, the path of what it belongs to, and its name after the network's."""
        path = border.path
        inside = [other for other in paths if other != path and _within(other, path)]
        if border.side == "in":
            owner = _owner(path, [*paths, block])
            before = path.removeprefix(f"{owner}.") if owner else path
            return "forward", owner, f"{owner and f'.{owner}'}.forward before {before}"
        if not path:
            return "forward", "", ".forward at its end"
        if not block:
            return "block", path, f".{path}"
        if inside:
            return "forward", path, f".{path}.forward at its end"
        return "module", path, f".{path}"


def _between(noted: Values, every: Collection[str], paths: Collection[str]) -> dict[Border, list[str]]:
    """Returns the modules that cannot be compared alone and were called since the border before, by border."""
    between: dict[Border, list[str]] = {}
    waiting: list[str] = []
    for border in noted:
        if border.path in paths:
            between[border], waiting = waiting, []
        elif border.path in every and not any(_within(border.path, other) for other in waiting):
            waiting.append(border.path)
    return between


def measured_value(units: Units, measured: Measured) -> Any:
    """Returns the port's value at a unit's border."""
    border = measured.border
    if units.last is not None and border in units.last.noted and measured.border.path in units.port.outer:
        value = units.last.noted[border]
        if not is_sampled(value):
            return value
    values = given(units.call.values)
    borders = {b: value for b, value in values.items() if b.path in (*measured.forced, *measured.skipped)}
    paths = [*units.port.outer, *measured.forced]
    return units.port.called(units.call.inputs, paths, borders, measured.skipped, [border])[1].noted[border]


def _within(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _owner(path: str, paths: Collection[str]) -> str:
    """Returns the nearest of some modules that a module lies in; empty for the network itself."""
    owners = [other for other in paths if other and other != path and path.startswith(f"{other}.")]
    return max(owners, key=len, default="")


def _takes_place(value: Any, original: Any) -> bool:
    """Returns whether a value is put in the place of another one: a tree of another structure is not."""
    if isinstance(value, Mapping) and isinstance(original, Mapping):
        return all(_takes_place(value[key], original[key]) for key in value.keys() & original.keys())
    return pytree.tree_structure(value) == pytree.tree_structure(original)


def _shapes(tree: Any) -> dict[Any, Any]:
    return {place: shape_of(tensor) for place, tensor in by_place(tree).items()}


def _nearby(forced: Pass, outer: Collection[str]) -> Mapping[str, frozenset[str]]:
    """Returns the patches that were called in each block, and under an empty path those of its own forward."""
    nearby: dict[str, frozenset[str]] = {}
    for border, touched in forced.touched.items():
        if not border.path or (border.path in outer and border.side == "in"):
            nearby[""] = nearby.get("", frozenset()) | touched
        for path in outer:
            if _within(border.path, path) and not (border.path == path and border.side == "in"):
                nearby[path] = nearby.get(path, frozenset()) | touched
    return nearby


def looked_into(units: Units, is_over: bool) -> list[Measured]:
    """Returns the units of a call: its blocks and, where one is at fault, the modules of the first of these.

    Args:
        units: Of the call.
        is_over: Whether a call before is at fault: then effects and modules are not looked for.
    """
    if is_over:
        return [_behind(measured) for measured in units.outer()]
    outer = with_effects(units, units.outer())
    bad = [measured for measured in outer if measured.unit.verdict is Verdict.OTHER]
    if not bad or not bad[0].block or not units.call.inner:
        return outer
    return [*outer, *with_effects(units, units.inner(bad[0].block))]


def with_effects(units: Units, measured: list[Measured]) -> list[Measured]:
    """Returns units, with the effect of those that have more than rounding, up to the first that is at fault.

    After the first `HARMLESS` of them, only the effects of those that may be at fault are measured.

    Where all units' errors together make no more than rounding in the output, that is taken for the effect of each.
    """
    together = units.together
    if together is not None and together <= ROUNDING:
        for one in measured:
            if one.unit.ratio > ROUNDING:
                one.unit = dataclasses.replace(one.unit, effect=together)
        return measured
    candidates: list[Measured] = []
    for one in measured:
        if one.unit.ratio > (ROUNDING if len(candidates) < HARMLESS else FAULT):
            candidates.append(one)
    for start in range(0, len(candidates), HARMLESS):
        some = candidates[start : start + HARMLESS]
        for one, effect in zip(some, units.effects(some), strict=True):
            one.unit = dataclasses.replace(one.unit, effect=effect)
        if any(one.unit.verdict is Verdict.OTHER for one in some):
            break
    first = next((i for i, one in enumerate(measured) if one.unit.verdict is Verdict.OTHER), len(measured))
    return [*measured[: first + 1], *map(_behind, measured[first + 1 :])]


def _behind(measured: Measured) -> Measured:
    """Returns a unit that stands behind the first fault."""
    measured.unit = dataclasses.replace(measured.unit, effect=None, is_behind=True)
    return measured
