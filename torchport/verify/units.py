"""The errors of the units of one call of a network: blocks, modules, and the code of a forward between two modules.

Each unit of the port gets the original's inputs, and its output is compared with the yardstick's. A unit's effect is
how far its error alone moves the network's output. It is measured in the original's network: a fault in the port would
change the effects of the units before it. Beside a capture, the original cannot be called, and the port is used.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils import _pytree as pytree

from torchport.errors import MachineError
from torchport.processes import child
from torchport.task import Request, accept
from torchport.verify.borders import Border, Port, Values, WatchedCall, inner_paths
from torchport.verify.recording import RecordedCall, original_network, read
from torchport.verify.report import FAULT, ROUNDING, Kind, Unit, Verdict
from torchport.verify.yardstick import by_place, channel_ratio, distance, is_sampled, least_rounding, matched, shape_of

HARMLESS = 6
"""Units of one call, with an error above rounding, whose effects on the network's output are measured together."""
CLEAR = 100.0
"""An error of more roundings in the output is a fault, whatever a better estimate of the rounding gives."""


@dataclasses.dataclass
class MeasuredUnit:
    """One unit, and what is needed to measure it again without a patch."""

    unit: Unit
    border: Border
    block: str  #: The path of the block in which it lies; empty for the network's forward.
    #: The patches that were called between the border before and this one.
    patches: frozenset[str] = frozenset()
    block_patches: frozenset[str] = frozenset()
    forced: tuple[str, ...] = ()  #: Paths of the modules that get the original's values.
    skipped: tuple[str, ...] = ()  #: Paths of the blocks that are not called: they return the original's values.
    #: The first module in the call that returns another shape than the original's, in words; empty where none does.
    reshaped: str = ""
    reshaped_patches: frozenset[str] = frozenset()


class Units:
    """The units of one call. Effects are measured with `outputs`, which runs the call once for each set of replacement
    values at borders, and returns the outputs; where it is None, in the port's network.
    """

    def __init__(
        self, port: Port, call: RecordedCall, outputs: Callable[[Sequence[Values]], list[Any]] | None = None
    ) -> None:
        self.port = port
        self.call = call
        self.outputs = outputs or functools.partial(outputs_of, port.called, call)
        #: The rounding of the network's output; see `estimate_rounding`.
        self.rounding = call.rounding
        #: The port's values if only the network gets the original's inputs.
        self.free_values: Values = {}
        #: The port's call in which each block gets the original's inputs.
        self.forced_call: WatchedCall | None = None
        self._is_estimated = False
        self._distance: float | None = None  # of the port's output from the yardstick's
        self._uncompared: dict[Border, list[str]] = {}

    def measure_blocks(self) -> list[MeasuredUnit]:
        """Measures the network's blocks, and the code of its forward between them. Keeps the port's calls, which
        `measure_modules` and `effects` need.
        """
        paths = ["", *self.port.units]
        output, free = self.port.called(self.call.inputs, paths, replacements={})
        self.free_values = free.observed
        self._distance = distance(output, self.call.wide_output)
        self.estimate_rounding(self._distance)
        _, forced = self.port.called(self.call.inputs, paths, self.call.values_at(paths))
        self.forced_call = forced
        blocks = list(self._measured(forced, self.call.outer, paths, block="", skipped=()))
        for block in blocks:
            block.skipped = self._skipped(block.border.path)
        return self._note_reshaped(blocks)

    def measure_modules(self, block: str) -> list[MeasuredUnit]:
        """Measures the modules of a block, and the code of their forwards; `measure_blocks` must have been called."""
        assert self.forced_call is not None
        all_paths, skipped = inner_paths(self.port.module, block), self._skipped(block)
        replacements = self.call.values_at((block, *skipped))
        _, free = self.port.called(self.call.inputs, ["", *self.port.units, *all_paths], replacements, skipped)
        # Only a module that the port calls as the original does can get the original's values.
        paths = [path for path in all_paths if self._is_alike(path, free.observed)]
        self._uncompared = _uncompared(free.observed, all_paths, paths)
        replacements |= self.call.values_at(paths)
        _, forced = self.port.called(self.call.inputs, [*self.port.units, *paths], replacements, skipped)
        return self._note_reshaped(list(self._measured(forced, self.call.inner, paths, block, skipped)))

    def _note_reshaped(self, measured: list[MeasuredUnit]) -> list[MeasuredUnit]:
        """Notes in each unit the first module outside of it whose output has another shape than the original's."""
        assert self.forced_call is not None
        patches: frozenset[str] = frozenset()
        for border, value in self.forced_call.observed.items():
            patches |= self.forced_call.patches[border]
            recorded = self.call.values.get(border)
            if border.side == "in" or not border.path or recorded is None:
                continue
            shapes = _shapes(value)
            expected = _shapes(recorded)
            if shapes == expected:
                continue
            places = [place for place in expected if shapes.get(place) != expected[place]]
            sides = (shapes, expected)
            port, original = (", ".join(str(list(x[place])) for place in places if place in x) for x in sides)
            words = f"{self.call.network}.{border.path} returns {port}, and the original's {original}"
            for item in measured:
                if not _within(item.border.path, border.path):
                    item.reshaped, item.reshaped_patches = words, patches
            break
        return measured

    @property
    def joint_effect(self) -> float | None:
        """The error of the port's output, which is made by all units together, divided by the rounding there."""
        return self._in_roundings(self._distance)

    def effects(self, measured: Sequence[MeasuredUnit]) -> list[float | None]:
        """Returns how far each unit's error alone moves the output, in roundings; None if it cannot be measured."""
        # A capture may have only some rows of a value, which cannot replace the whole.
        complete = [unit for unit in measured if not is_sampled(self.call.values[unit.border])]
        changes = [(unit.border, self._port_value(unit)) for unit in complete]
        changes = [(border, value) for border, value in changes if _can_replace(value, self.call.values[border])]
        moved = self._moved(changes)
        for move in moved:
            # May raise the rounding by which all of them are divided.
            self.estimate_rounding(move)
        by_border = {border: self._in_roundings(move) for (border, _), move in zip(changes, moved, strict=True)}
        return [by_border.get(unit.border) for unit in measured]

    def _port_value(self, measured: MeasuredUnit) -> Any:
        """Returns the port's value at the end of a unit; calls the network again if only some rows of it were kept."""
        border = measured.border
        forced = self.forced_call
        if forced is not None and border in forced.observed and border.path in self.port.units:
            value = forced.observed[border]
            if not is_sampled(value):
                return value
        replacements = self.call.values_at((*measured.forced, *measured.skipped))
        paths = [*self.port.units, *measured.forced]
        _, call = self.port.called(self.call.inputs, paths, replacements, measured.skipped, whole=[border])
        return call.observed[border]

    def effect_of(self, border: Border, value: Any) -> float | None:
        """Returns how far a value that replaces the original's at a border moves the output, in roundings."""
        [move] = self._moved([(border, value)])
        return self._in_roundings(move)

    def estimate_rounding(self, judged: float | None) -> None:
        """Raises `self.rounding`, that of the network's output, to the expected rounding, if the latter is greater.

        In the original's output the rounding errors of blocks may cancel by chance. So the effect of each block's
        rounding is measured alone, and the root of the sum of squares is the expected rounding. This takes two calls
        for each border; it is left out where it cannot change the verdict on `judged`, a distance of outputs.
        """
        ratio = self._in_roundings(judged)
        if self._is_estimated or ratio is None or not ROUNDING < ratio <= CLEAR:
            return
        self._is_estimated = True
        values, wide = self.call.values, self.call.outer
        pairs = {border: (values[border], wide[border]) for border in wide if border.path and border in values}
        borders = [border for border, pair in pairs.items() if not is_sampled(pair) and distance(*pair)]
        moved = self._moved([(border, wide[border]) for border in borders])
        expected = math.sqrt(sum(move**2 for move in moved if move is not None and math.isfinite(move)))
        self.rounding = max(self.rounding, expected)

    def _moved(self, changes: Sequence[tuple[Border, Any]]) -> list[float | None]:
        """Returns how far the network's output moves if each value alone replaces the original's at its border."""
        if not changes:
            return []
        values = self.call.values
        pairs = [{border: x} for border, value in changes for x in (value, values[border])]
        # Two for each change: with the value, and with the original's.
        outputs = self.outputs(pairs)
        return [distance(*outputs[i : i + 2]) for i in range(0, len(outputs), 2)]

    def _in_roundings(self, move: float | None) -> float | None:
        """Returns a distance of two outputs divided by the output's rounding; None for None."""
        return None if move is None else move / self.rounding

    def _skipped(self, block: str) -> tuple[str, ...]:
        """Returns the blocks but `block` that need not be called: the original's outputs can take their place."""
        assert self.forced_call is not None
        observed = self.forced_call.observed
        return tuple(path for path in self.port.units if path != block and self._is_alike(path, observed))

    def _is_alike(self, path: str, observed: Values) -> bool:
        """Returns whether the port's module can get the original's values: port and original call it as often, with
        tensors of the same shapes, and the values are whole. A capture has only some rows of large values.
        """
        borders = {border for border in self.call.values if border.path == path}
        # Each call has borders of its own, as a `Border` has the call's number.
        if not borders or borders != {border for border in observed if border.path == path}:
            return False
        if is_sampled([self.call.values[border] for border in borders]):
            return False
        return all(_shapes(self.call.values[border]) == _shapes(observed[border]) for border in borders)

    def _measured(
        self, forced: WatchedCall, wide: Values, paths: Collection[str], block: str, skipped: tuple[str, ...]
    ) -> Iterator[MeasuredUnit]:
        """Yields each unit that ends at a recorded value of a call, with its error.

        Args:
            wide: The yardstick's values, from which errors are measured.
            paths: The modules at which values were recorded.
            block: The path of the block whose modules are measured; empty: blocks are measured.
        """
        patches_by_block = _patches_by_block(forced, self.port.units)
        call = self.call
        for depth, (border, value) in enumerate(forced.observed.items()):
            is_known = border in wide and border in call.values and (not block or _within(border.path, block))
            if not is_known or (border.side == "in" and border.path in ("", block)):  # no unit ends there
                continue
            original = call.values[border]
            exact = wide[border]
            rounding, added = distance(original, exact), distance(value, exact)
            if rounding is None or added is None or not matched(value, original):
                continue
            is_free = not block and border in self.free_values
            kind, path, name = self._unit_at(border, paths, block)
            if kind == "forward" and self._uncompared.get(border):
                name += f", with {', '.join(other.removeprefix(f'{path}.') for other in self._uncompared[border])}"
            unit = Unit(
                step=call.step,
                call=call.number,
                network=call.network,
                path=path,
                depth=depth,
                kind=kind,
                name=f"{call.network}{name}",
                rounding=max(rounding, least_rounding(original)),
                added=added,
                inherited=distance(self.free_values[border], exact) if is_free else None,
                number=border.number,
                by_channel=channel_ratio(value, exact, original),
            )
            block_path = block or (border.path if border.side == "out" else "")
            yield MeasuredUnit(
                unit,
                border,
                block=block_path,
                patches=forced.patches[border],
                block_patches=patches_by_block.get(block_path, frozenset()),
                forced=tuple(paths),
                skipped=skipped,
            )

    def _unit_at(self, border: Border, paths: Collection[str], block: str) -> tuple[Kind, str, str]:
        """Returns the unit that ends at a border, as its kind, its module's path and its name.

        It is a block, a module in a block, or the code of a module's `forward` before its next submodule or its end:
        at the input of `blocks.0.norm`, `("forward", "blocks.0", ".blocks.0.forward before norm")`.
        """
        path = border.path
        inside = [other for other in paths if other != path and _within(other, path)]
        if border.side == "in":
            owners = [other for other in (*paths, block) if other and other != path and _within(path, other)]
            owner = max(owners, key=len, default="")
            before = path.removeprefix(f"{owner}.") if owner else path
            return "forward", owner, f"{owner and f'.{owner}'}.forward before {before}"
        if not path:
            return "forward", "", ".forward at its end"
        if not block:
            return "block", path, f".{path}"
        if inside:
            return "forward", path, f".{path}.forward at its end"
        return "module", path, f".{path}"


def _uncompared(observed: Values, all_paths: Collection[str], paths: Collection[str]) -> dict[Border, list[str]]:
    """Returns the modules between two compared values that cannot be compared, by the later value's border."""
    modules: dict[Border, list[str]] = {}
    waiting: list[str] = []
    for border in observed:
        if border.path in paths:
            modules[border], waiting = waiting, []
        elif border.path in all_paths and not any(_within(border.path, other) for other in waiting):
            waiting.append(border.path)
    return modules


def _within(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _can_replace(value: Any, original: Any) -> bool:
    """Returns whether a value can replace another one: the trees must have the same structure."""
    if isinstance(value, Mapping) and isinstance(original, Mapping):
        return all(_can_replace(value[key], original[key]) for key in value.keys() & original.keys())
    return pytree.tree_structure(value) == pytree.tree_structure(original)


def _shapes(tree: Any) -> dict[Any, Any]:
    return {place: shape_of(tensor) for place, tensor in by_place(tree).items()}


def _patches_by_block(forced: WatchedCall, blocks: Collection[str]) -> Mapping[str, frozenset[str]]:
    """Returns the patches that were called in each block; under "" those of the network's forward between blocks."""
    patches: dict[str, frozenset[str]] = {}
    for border, called in forced.patches.items():
        if not border.path or (border.path in blocks and border.side == "in"):
            patches[""] = patches.get("", frozenset()) | called
        # Patches that were called before a block's input belong to the code before the block.
        for path in blocks:
            if _within(border.path, path) and not (border.path == path and border.side == "in"):
                patches[path] = patches.get(path, frozenset()) | called
    return patches


def measured_units(units: Units, has_fault_before: bool) -> list[MeasuredUnit]:
    """Returns the measured blocks of a call, and the modules of its first faulty block. Behind an earlier call that is
    at fault, neither effects nor modules are measured.
    """
    if has_fault_before:
        return [_mark_behind(measured) for measured in units.measure_blocks()]
    outer = with_effects(units, units.measure_blocks())
    bad = [measured for measured in outer if measured.unit.verdict is Verdict.OTHER]
    if not bad or not bad[0].block or not units.call.inner:
        return outer
    return [*outer, *with_effects(units, units.measure_modules(bad[0].block))]


def with_effects(units: Units, measured: list[MeasuredUnit]) -> list[MeasuredUnit]:
    """Returns units with their effects: how far the error of each alone moves the network's output, in roundings.

    An effect takes calls of the original, so it is measured only for errors above rounding, up to the first faulty
    unit; after `HARMLESS` of them only for errors above `FAULT`. If all units together move the output by no more than
    rounding, that is taken for the effect of each.
    """
    joint_effect = units.joint_effect
    if joint_effect is not None and joint_effect <= ROUNDING:
        for item in measured:
            if item.unit.ratio > ROUNDING:
                item.unit = dataclasses.replace(item.unit, effect=joint_effect)
        return measured
    candidates: list[MeasuredUnit] = []
    for item in measured:
        if item.unit.ratio > (ROUNDING if len(candidates) < HARMLESS else FAULT):
            candidates.append(item)
    for start in range(0, len(candidates), HARMLESS):
        batch = candidates[start : start + HARMLESS]
        for item, effect in zip(batch, units.effects(batch), strict=True):
            item.unit = dataclasses.replace(item.unit, effect=effect)
        if any(item.unit.verdict is Verdict.OTHER for item in batch):
            break
    first = next((n for n, item in enumerate(measured) if item.unit.verdict is Verdict.OTHER), len(measured))
    return [*measured[: first + 1], *map(_mark_behind, measured[first + 1 :])]


def _mark_behind(measured: MeasuredUnit) -> MeasuredUnit:
    measured.unit = dataclasses.replace(measured.unit, effect=None, is_behind=True)
    return measured


def outputs_of(network: Callable[..., tuple[Any, Any]], call: RecordedCall, changes: Sequence[Values]) -> list[Any]:
    """Returns the outputs of a network in a recorded call, one for each set of values at borders, which replace the
    network's own. `network` is `Port.called` or `Original.observed`.
    """
    return [network(call.inputs, {border.path for border in values}, values)[0] for values in changes]


def original_outputs(request: Request, file: Path, call: RecordedCall, changes: Sequence[Values]) -> list[Any]:
    """Returns the same outputs of the original's network, which is called in a process of its own."""
    computed: list[Any] = child.call(
        "torchport.verify.units:outputs_of_original",
        *(request, file, (call.network, call.step, call.number), list(changes)),
        ended=lambda end: MachineError("torchport verify", f"The original's process {end}", "Free memory"),
        environment={"PYTHONWARNINGS": "ignore"},
    )
    return computed


def outputs_of_original(
    request: Request, file: Path, place: tuple[str, int, int], changes: Sequence[Values]
) -> list[Any]:
    """Returns what `original_outputs` does, in this process. `place` is the network, the denoising step, and the number
    of the call in the step; both count from 0.
    """
    call = read(file).call_of(*place)
    with original_network(accept(request), call) as original:
        return outputs_of(original.observed, call, changes)
