"""What one call of a kernel costs: all bundles that it runs, first, last and ragged tiles included.

An instruction schedule (`bundles`) says how many bundles each loop's body has, not how often it runs. The kernel knows
that before it runs. The rule, from the kernel inwards:

* The n-th loop that begins in it runs as often as `Trips.loops` says for the n-th. A loop whose number of
  passes is known to be one when it is compiled is none to the compiler, and is left out on both sides.
* Loops without matrix work that have under `OVERHEAD` bundles, or stand under a predicate with none either, are the
  compiler's: they start a copy in pieces. They count once.
* What a predicate can rule out counts as if it ran, except a region without matrix work beside the one that has it,
  where `Trips.once_in` says that it is for the first or the last of so many steps.

So the count is rather too high than too low.

The count leaves out waiting for memory and for the matrix units, and XLA's passes around the kernel.
"""

from __future__ import annotations

import dataclasses
import math

import numpy
import numpy.typing

from torchport.config.machine import Machine
from torchport.errors import TopologyError
from torchport.kernels.attention import dispatch
from torchport.plan.tpu.bundles import MATMUL, KernelBundles, Region, compile_kernel

OVERHEAD = 40
"""Bundles: the compiler's loops have 7 to 33, the shortest of a kernel here 50 (libtpu 0.0.51)."""


@dataclasses.dataclass(frozen=True)
class Trips:
    """How often the parts of a kernel run on one core."""

    #: Passes of each loop through its body, each time it is entered, in the order in which the loops begin.
    loops: tuple[int, ...]
    #: Steps of which only one runs a region without matrix work beside the one that has it.
    once_in: int = 1


def pass_seconds(call: dispatch.Pass, machine: Machine) -> float:
    """Returns how long a kernel beside attention takes on a device: its bundles, or its bytes if they take longer."""
    chip = machine.require_tpu()
    kernel = compile_kernel(call.build, dict(call.arguments), machine)
    loops = (math.ceil(call.loops[0] / chip.cores), *call.loops[1:])
    count = executed(kernel, Trips(tuple(passes for passes in loops if passes > 1)))  # a loop of one pass is none
    return max(count / chip.clock, call.bytes / chip.bandwidth)


def executed(kernel: KernelBundles, trips: Trips, slot: str | None = None) -> int:
    """Returns the bundles that one core runs in a call, or how many of a slot they take."""
    loops = _loops(kernel)
    if len(loops) != len(trips.loops):
        raise TopologyError(
            f"bundles of {kernel.kernel}",
            f"It has {len(loops)} loops, and the passes of {len(trips.loops)} are known {trips.loops}",
            "The rule must follow the kernel: mend torchport/plan/tpu/cost.py",
        )
    weights = numpy.ones(kernel.size, numpy.int64)
    if slot is not None:
        weights = kernel.counts[:, list(kernel.slots).index(slot)]
    passes = dict(zip(loops, trips.loops, strict=True))
    return _Count(_work(kernel), passes, trips.once_in, weights).weight(kernel.root, 1)


def _work(kernel: KernelBundles) -> numpy.typing.NDArray[numpy.int64]:
    return kernel.counts[:, list(kernel.slots).index(MATMUL)]


def _loops(kernel: KernelBundles) -> list[Region]:
    """Returns the kernel's own loops in the order in which they begin, the outer before the inner."""
    work, loops = _work(kernel), list[Region]()

    def visit(region: Region) -> None:
        busy = work[region.start : region.end].any()
        if region.kind == "predicated" and not busy and work.any():  # a kernel of sums has no matrix work anywhere
            return
        if region.kind == "loop" and (busy or region.end - region.start >= OVERHEAD):
            loops.append(region)
        for part in region.inside:
            visit(part)

    visit(kernel.root)
    return loops


@dataclasses.dataclass(frozen=True)
class _Count:
    """Adds up what the bundles of a region weigh, each as often as it runs."""

    work: numpy.typing.NDArray[numpy.int64]
    passes: dict[Region, int]
    once_in: int
    weights: numpy.typing.NDArray[numpy.int64]

    def weight(self, region: Region, times: int) -> int:
        times *= self.passes.get(region, 1)
        busy = [bool(self.work[part.start : part.end].any()) for part in region.inside]
        total, at = 0, region.start
        for part, works in zip(region.inside, busy, strict=True):
            rare = part.kind == "predicated" and not works and any(busy)
            total += times * self._between(at, part.start) + self.weight(part, times // self.once_in if rare else times)
            at = part.end
        return total + times * self._between(at, region.end)

    def _between(self, start: int, end: int) -> int:
        return int(self.weights[start:end].sum())
