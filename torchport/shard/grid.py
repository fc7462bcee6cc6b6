"""The devices of a mesh on the grid of chips: an order in which devices that exchange are neighbours, and their links.

All of it is computed from coordinates alone, so it works, and can be tested, without a TPU.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

Sizes = Sequence[int]
"""The sizes of a mesh's axes, the outermost first."""
Order = list[int]
"""For each position in a mesh, the last axis fastest, the number of the device at this position."""


@dataclasses.dataclass(frozen=True)
class Spot:
    """The place of a device."""

    #: Devices of one island have links to each other; between islands there is the network. A slice of TPUs is one
    #: island, on one host or several. Of CPUs and GPUs each process is one.
    island: int
    #: The chip's coordinates, (x, y, z); empty where chips have none.
    chip: tuple[int, ...]
    #: The number of the device on its chip, or in its process if chips have no coordinates.
    core: int


def spots(devices: Sequence[Any]) -> list[Spot]:
    """Returns the place of each device; the devices are JAX's own, or those of an absent slice."""
    places, devices_of_process = [], collections.Counter[int]()
    for device in devices:
        if hasattr(device, "coords"):
            # A device of a single slice has no `slice_index`.
            places.append(Spot(getattr(device, "slice_index", 0), tuple(device.coords), device.core_on_chip))
        else:
            places.append(Spot(device.process_index, (), devices_of_process[device.process_index]))
            devices_of_process[device.process_index] += 1
    return places


def order(sizes: Sizes, where: Sequence[Spot], candidates: Sequence[Order] = ()) -> Order:
    """Returns an order of devices in which the groups along each axis are as compact as possible, inner axes first.

    A group gets a box of chips, 2x2 rather than 1x4, on one slice if it fits, with both devices of a chip before a
    second chip; successive devices of a group are neighbours wherever the box allows it.

    Args:
        sizes: Their product is the number of devices.
        where: The place of each device, by its number.
        candidates: Further orders; the first of them is returned, unless another order is more compact, or as compact
            with neighbours that are closer.
    """
    # If there is no order at all, as for devices that do not fill a box, the devices keep theirs.
    orders = [*candidates, *_boxes(sizes, where)] or [list(range(len(where)))]
    return min(orders, key=lambda numbers: _spread(sizes, [where[number] for number in numbers]))


def _spread(sizes: Sizes, ordered: Sequence[Spot]) -> tuple[list[tuple[int, ...]], int]:
    """Returns how far apart the devices of groups are; a smaller value is better. First come, for each axis, inner axes
    first, the islands and the sides of the worst group's box; then the sum of distances between successive devices.
    """
    worst, distance = [], 0
    for axis in reversed(range(len(sizes))):
        groups = [[ordered[position] for position in group] for group in _groups(sizes, axis)]
        if sizes[axis] > 1:
            boxes = [sorted(_sides(group), reverse=True) for group in groups]
            islands = [len({spot.island for spot in group}) for group in groups]
            worst.append(max((count, *box) for count, box in zip(islands, boxes, strict=True)))
        # Decoders exchange borders between successive devices.
        for device, neighbour in itertools.chain(*map(itertools.pairwise, groups)):
            distance += sum(abs(a - b) for a, b in zip(device.chip, neighbour.chip, strict=True))
    return worst, distance


def _groups(sizes: Sizes, axis: int) -> Iterator[range]:
    """Yields the positions of each group along an axis: 0, 1 and then 2, 3 along axis 1 of a mesh of sizes (2, 2)."""
    stride = math.prod(sizes[axis + 1 :])
    for outer in range(0, math.prod(sizes), stride * sizes[axis]):
        for inner in range(stride):
            yield range(outer + inner, outer + inner + stride * sizes[axis], stride)


def _sides(group: Sequence[Spot]) -> list[int]:
    """Returns the sides of the smallest box of chips around a group: `[2, 4, 1]`."""
    return [max(line) - min(line) + 1 for line in zip(*(spot.chip for spot in group), strict=True)]


def _boxes(sizes: Sizes, where: Sequence[Spot]) -> Iterator[Order]:
    """Yields orders in which each group has a box of the grid, boxes inside boxes; none if the grid has gaps."""
    keys = [(spot.island, *reversed(spot.chip), spot.core) for spot in where]  # island, z, y, x, core
    lines = [sorted(set(line)) for line in zip(*keys, strict=True)]  # all coordinates along each line of the grid
    if math.prod(map(len, lines)) != len(set(keys)) or len(set(keys)) != len(where):
        return
    # The number of each device, by its coordinates: these are counted from 0 along each line.
    devices = {tuple(line.index(at) for line, at in zip(lines, key, strict=True)): n for n, key in enumerate(keys)}
    splits = [list(_factorisations(len(line), len(sizes))) for line in lines]
    for parts in itertools.product(*splits):  # for each line of the grid, a factor for each axis of the mesh
        if any(math.prod(part[axis] for part in parts) != size for axis, size in enumerate(sizes)):
            continue
        # A box of an axis consists of the boxes of the axis inside it: a step along the axis is as long as such a box.
        strides = [[math.prod(part[axis + 1 :]) for part in parts] for axis in range(len(sizes))]
        walks = [_turning([part[axis] for part in parts]) for axis in range(len(sizes))]
        numbers = []
        for digits in itertools.product(*walks):  # for each axis, coordinates in its box
            pairs = zip(digits, strides, strict=True)
            moves = ([at * length for at, length in zip(digit, stride, strict=True)] for digit, stride in pairs)
            numbers.append(devices[tuple(map(sum, zip(*moves, strict=True)))])
        yield numbers


def _factorisations(length: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yields every way to write a length as a product of `parts` factors: `(1, 4)`, `(2, 2)` and `(4, 1)` for 4."""
    if parts == 1:
        yield (length,)
        return
    for first in range(1, length + 1):
        if length % first == 0:
            yield from ((first, *rest) for rest in _factorisations(length // first, parts - 1))


def _turning(lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yields the coordinates in a box of these sides, each a neighbour of the one before: of `[2, 2]` (0, 0), (0, 1),
    (1, 1), (1, 0).

    Source: the reflected Gray code, in mixed radix.
    """
    if not lengths:
        yield ()
        return
    for number, first in enumerate(_turning(lengths[:-1])):
        line = range(lengths[-1])
        yield from ((*first, last) for last in (reversed(line) if number % 2 else line))


def links(group: Sequence[Spot]) -> str:
    """Returns the name of the links of a group's devices: `2x2 square`, `1x4 line`, `one chip`, or `hosts` or `slices`
    for a network. A box `with gaps` holds chips of other groups, too, and its links carry their exchange as well.
    """
    sides = sorted(_sides(group))
    if len({spot.island for spot in group}) > 1:
        return "slices" if sides else "hosts"
    if math.prod(sides) == 1:
        return "one chip" if sides else "one host"
    gaps = " with gaps" if len({spot.chip for spot in group}) < math.prod(sides) else ""
    # Only the longest side is longer than 1.
    if sides[-2:-1] == [1]:
        return f"1x{sides[-1]} line{gaps}"
    long_sides = [side for side in sides if side > 1]
    names = ("square", "rectangle") if len(long_sides) == 2 else ("cube", "box")
    return f"{'x'.join(map(str, long_sides))} {names[len(set(long_sides)) > 1]}{gaps}"


INSIDE = 6.0
"""The bandwidth between the two devices of a tpu7x chip, in links between chips.

Source: cloud.google.com/tpu/docs/tpu7x, "Dual-chiplet architecture".
"""


def ports(kind: str, group: Sequence[Spot]) -> float:
    """Returns how many links between chips each device of a group has for an exchange such as `all-to-all`.

    Two things limit it. A chip in the box's corner has one link for each side that is longer than 1, and its devices
    share them. In an all-to-all, half of what the devices of one half hold crosses the middle of the longest side: N/2
    devices send through as many links as the box is wide there, 4 * links / N for each device. So a 2x2 square has 2, a
    1x4 line 1 and a 1x8 line 1/2; a 2x4 rectangle has 2 for a ring and 1 for an all-to-all. Where the box has gaps, its
    links are shared by as many groups as fill it. Links that lead round, of large slices, are not counted.

    Args:
        group: On one island; chips with coordinates.
    """
    sides = _sides(group)
    chips = len({spot.chip for spot in group})
    if chips == 1:
        return INSIDE
    count = sum(side > 1 for side in sides) * chips / len(group)
    if kind in ("all-to-all", "ragged-all-to-all"):
        count = min(count, 4 * math.prod(sides) / max(sides) / len(group))
    return count * chips / math.prod(sides)
