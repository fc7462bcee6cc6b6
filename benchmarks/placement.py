"""Seconds of a step's exchanges for each order of the devices: the best, the worst, and the one that a run takes.

    python benchmarks/placement.py

Each axis of a mesh can take other parts of the grid of chips. The times are those of a plan's model of communication:
the exchanges of HunyuanVideo-1.5 at 1280 x 720 x 121 (`ulysses`): four all-to-alls in each of 54 blocks. Their bytes
on a device are those of eight chips. No TPU and no compiler is needed.
"""

import itertools
from collections.abc import Sequence

from torchport.config.machine import parse_machine
from torchport.plan import step_time
from torchport.plan.figures import Collective
from torchport.shard import grid
from torchport.shard.grid import Order, Spot

BYTES = 4 * 115_500_000
"""Of the all-to-alls of one block, on each of eight chips with sp=4."""
BLOCKS = 54
CASES = (("v6e:2x4", (2, 4, 1)), ("v6e:2x4", (4, 2, 1)), ("v6e:4x4", (2, 8, 1)), ("v6e:4x4", (4, 4, 1)))
"""Slices, and sizes of dp, sp and tp."""


def chips(shape: str) -> list[Spot]:
    """Returns the places of a slice's chips, x fastest, as JAX lists them."""
    sides = [range(int(side)) for side in shape.split("x")]
    return [Spot(0, (*reversed(place), 0), 0) for place in itertools.product(*reversed(sides))]


def seconds(machine: str, sizes: Sequence[int], where: Sequence[Spot], order: Order) -> float:
    """Returns the seconds of a step's all-to-alls along sp, in the group that takes longest."""
    groups = [[where[order[n]] for n in group] for group in grid._groups(sizes, 1)]
    ports = min(grid.ports("all-to-all", group) for group in groups)
    size = BYTES * 8 // len(where)
    fields = {"kind": "all-to-all", "bytes": size, "count": BLOCKS, "group": sizes[1], "source": None, "links": ""}
    chip = parse_machine(machine, "placement").require_tpu()
    return step_time.communication_seconds([Collective(**fields, ports=ports)], chip)


def main() -> None:
    """Prints a line for each slice and mesh."""
    print(f"{'slice':9}{'dp':>3}{'sp':>3}{'orders':>8}{'best':>9}{'worst':>9}{'ratio':>7}{'taken':>9}")
    for machine, sizes in CASES:
        where = chips(machine.partition(":")[2])
        orders = [list(range(len(where))), *grid._boxes(sizes, where)]
        times = [seconds(machine, sizes, where, order) for order in orders]
        taken = seconds(machine, sizes, where, grid.order(sizes, where))
        line = f"{machine:9}{sizes[0]:3}{sizes[1]:3}{len(orders):8}{min(times):9.3f}{max(times):9.3f}"
        print(f"{line}{max(times) / min(times):7.2f}{taken:9.3f}")


if __name__ == "__main__":
    main()
