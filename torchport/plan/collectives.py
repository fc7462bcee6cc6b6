"""The collectives of a compiled program, and the model of their time: bytes over links."""

from __future__ import annotations

from collections.abc import Sequence

from torchport.config.machine import Chip
from torchport.plan.figures import Collective
from torchport.plan.tpu import hlo
from torchport.shard import grid

MOVED = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0, "collective-permute": 1.0}
"""How many times a collective moves the larger of its input and output through a device's links, before (n - 1) / n."""


def collectives(program: hlo.Program, of: str | None, where: Sequence[grid.Spot]) -> list[Collective]:
    """Returns the collectives of a computation, those of one kind, size, line and links counted together.

    Args:
        program: As the compiler left it.
        of: The computation's name; None for all, loops' as often as they run.
        where: Of the mesh's devices, in its order.
    """
    together: dict[Collective, int] = {}
    for one in program.collectives(of):
        # A group of one moves nothing, and has no links.
        groups = [[where[n] for n in group] for group in one.groups if len(set(group)) > 1]
        ports, links = min(
            ((grid.ports(one.kind, group), grid.links(group)) for group in groups), default=(1.0, "none")
        )
        line = str(one.source) if one.source else None
        key = Collective(
            kind=one.kind, bytes=one.bytes, count=0, group=one.group_size, source=line, links=links, ports=ports
        )
        together[key] = together.get(key, 0) + one.times
    return [key.model_copy(update={"count": count}) for key, count in together.items()]


def seconds(collectives: Sequence[Collective], chip: Chip) -> float:
    """Returns the model's time of some collectives: bytes over links, nothing overlapped."""
    return sum(_seconds(one, chip) for one in collectives)


def _seconds(one: Collective, chip: Chip) -> float:
    size = one.bytes * (one.group if one.kind == "reduce-scatter" else 1)
    share = 1.0 if one.kind == "collective-permute" else (one.group - 1) / one.group
    return one.count * MOVED.get(one.kind, 1.0) * size * share / (one.ports * chip.link)
