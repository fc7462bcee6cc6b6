"""The exchanges between devices of a compiled program, and the model of their time: bytes over links."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torchport.shard import grid
from torchport.tpu import hlo

LINKS = {"v5e": 50e9, "v5p": 100e9, "v6e": 100e9, "tpu7x": 100e9}
"""Bytes per second of one link between chips, in one direction.

Source: cloud.google.com/tpu/docs: 400, 1200, 800 and 1200 GB/s a chip, both directions, over 4, 6, 4 and 6 ports.
"""
MOVED = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0, "collective-permute": 1.0}
"""How many times a collective moves the larger of its input and output through a device's links, before (n - 1) / n."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A collective of one block or step: output bytes on a device, how often, among how many devices, on which links.

    Attributes:
        links: The shape of its group on the grid of chips; of several unlike groups, of the one with the fewest ports.
        ports: Links that each device of the group has for it; see `grid.ports`.
    """

    kind: str
    bytes: int
    count: int
    group: int
    source: str | None
    links: str
    ports: float

    def seconds(self, chip_name: str) -> float:
        """Returns the model's time: bytes over links, nothing overlapped."""
        size = self.bytes * (self.group if self.kind == "reduce-scatter" else 1)
        share = 1.0 if self.kind == "collective-permute" else (self.group - 1) / self.group
        return self.count * MOVED.get(self.kind, 1.0) * size * share / (self.ports * LINKS[chip_name])


def exchanges(program: hlo.Program, of: str | None, where: Sequence[grid.Spot]) -> list[Exchange]:
    """Returns the collectives of a computation, those of one kind, size, line and links counted together.

    Args:
        program: As the compiler left it.
        of: The computation's name; None for all, loops' as often as they run.
        where: Of the mesh's devices, in its order.
    """
    together: dict[Exchange, int] = {}
    for one in program.collectives(of):
        # A group of one moves nothing, and has no links.
        groups = [[where[n] for n in group] for group in one.groups if len(set(group)) > 1]
        found = [(grid.ports(one.kind, group), grid.links(group)) for group in groups]
        ports, links = min(found, default=(1.0, "none"))
        line = str(one.source) if one.source else None
        key = Exchange(one.kind, one.bytes, 0, one.group_size, line, links, ports)
        together[key] = together.get(key, 0) + one.times
    return [dataclasses.replace(key, count=count) for key, count in together.items()]
