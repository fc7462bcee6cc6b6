"""What one call of an attention kernel costs: all bundles that it runs, first, last and ragged tiles included.

An instruction schedule (`bundles`) says how many bundles each loop's body has, not how often it runs. The kernel knows
that before it runs. The rule, from the kernel inwards:

* The n-th loop that begins in it runs as often as `Trips.loops` says for the n-th. A loop whose number of
  passes is known to be one when it is compiled is none to the compiler, and is left out on both sides.
* Loops without matrix work that have under `OVERHEAD` bundles, or stand under a predicate with none either, are the
  compiler's: they start a copy in pieces. They count once.
* What a predicate can rule out counts as if it ran, except a region without matrix work beside the one that has it,
  where `Trips.once_in` says that it is for the first or the last of so many steps.

So the count is rather too high than too low.

It can promise too much: on v5p and tpu7x the compiler issues products faster than the matrix units take them
(v5p, head size 128: 256 products of 16 bundles for each unit in 3923 bundles), and the core will wait. Where the
products of a steady step alone take longer than its bundles (`least`), they count instead.

The count leaves out waiting for memory, of which `dma_share` says how much room there is, and XLA's passes over q, k
and v around the kernel.

Shapes: S queries, T keys, H heads of a device, D features of a head, g heads that share a tile.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy
import numpy.typing

from torchport.config.machine import Chip, Machine
from torchport.errors import TopologyError
from torchport.kernels.attention import dispatch
from torchport.kernels.attention.tiles import LANES, TAIL, SplashTile, Tile, up
from torchport.plan.tpu.bundles import MATMUL, KernelBundles, Region, compile_kernel

BFLOAT16 = 2
"""Bytes."""
OVERHEAD = 40
"""Bundles: the compiler's loops have 7 to 33, the shortest of a kernel here 50 (libtpu 0.0.51)."""


@dataclasses.dataclass(frozen=True)
class Work:
    """One device's attention: its sizes, and how heads are brought to the kernel."""

    queries: int  #: S.
    keys: int  #: T, all of them valid, of the first array.
    heads: int  #: H.
    head_size: int  #: D.
    group: int = 1  #: g, heads that share a tile.
    further: int = 0  #: Keys in a second array, all of them valid.
    #: Whether queries and keys are multiplied in eight bits, at twice the rate.
    int8: bool = False

    @property
    def flops(self) -> int:
        """Useful bfloat16 flop: two products, a multiply and an add each, of no padded row and no padded feature."""
        return 4 * self.queries * (self.keys + self.further) * self.head_size * self.heads


@dataclasses.dataclass(frozen=True)
class Trips:
    """How often the parts of a kernel run on one core."""

    #: Passes of each loop through its body, each time it is entered, in the order in which the loops begin.
    loops: tuple[int, ...]
    #: Steps of which only one runs a region without matrix work beside the one that has it.
    once_in: int = 1


def transposed_trips(work: Work, tile: Tile, cores: int) -> Trips:
    """Returns the trips of `splash_transposed`.

    Args:
        tile: As fitted to the work.
        cores: Over which a device's groups of heads are divided.
    """
    tiles, chunks = math.ceil(work.queries / tile.block_q), work.keys // tile.block_kv
    groups, cells = math.ceil(work.heads / work.group / cores), tile.block_q // tile.columns
    pieces = math.ceil((work.keys - chunks * tile.block_kv) / TAIL)
    each = () if cells == 1 else (cells,)  # a loop of one pass is none
    some = () if cells == tile.cells_at_once else (cells // tile.cells_at_once,)
    further = (math.ceil(work.further / TAIL), *some) if work.further else ()
    # Tiles; first halves of the first chunk; chunks in pairs; second halves of the last; pieces, cells; outputs.
    return Trips((groups * tiles, *each, chunks - 1, *each, pieces, *some, *further, *each))


def splash_trips(work: Work, tile: SplashTile, cores: int) -> Trips:
    """Returns the trips of JAX's own kernel: one loop over all tiles and chunks, padded to whole ones."""
    tiles, chunks = math.ceil(work.queries / tile.block_q), math.ceil(work.keys / tile.block_kv)
    return Trips((math.ceil(work.heads / cores) * tiles * chunks,), once_in=chunks)


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


@dataclasses.dataclass(frozen=True)
class Figures:
    """What the instruction schedule says of a kernel with a tile; `percent` of the bfloat16 peak."""

    #: Of a whole call: useful flop over what the matrix units could do in all bundles that it runs.
    peak_percent: float
    steady_percent: float  #: Of the steady step alone, with no ragged tile in it.
    #: Part of the steady step in which the matrix units are busy, 0 to 1, padding included.
    matrix_unit_share: float
    #: Part of the steady step that fetching its keys and values takes at the published bandwidth, 0 to 1.
    dma_share: float
    spills: int  #: Vector registers that a steady step saves to VMEM.
    steady_bundles: int  #: Of a steady step.
    #: Cycles that the step takes beyond its bundles, until the matrix units are done.
    waits: int
    body_bundles: int


def padding(head_size: int, width: int) -> Literal["feature", "segments"]:
    """Returns how JAX's own kernel hides padded keys at the least cost: a further feature, where there is room for it.

    Args:
        head_size: D.
    """
    return "feature" if head_size % width else "segments"


def least(work: Work, tile: Tile | SplashTile, width: int, flops: int) -> float:
    """Returns the bundles for which a steady step's products hold the matrix units, zeros along their depth included.

    Args:
        tile: As fitted to the work.
        width: Of the matrix unit, which is as deep (`tiles.UNIT_WIDTH`).
        flops: That a core's matrix units do in a bundle.
    """
    transposed = isinstance(tile, Tile)
    half = 2 * tile.block_q * tile.block_kv * (work.group if transposed else 1) / flops
    # K Q^T has the features along the depth, and V^T P the keys, of which there are enough. JAX's own kernel has the
    # features there, or across, in both; one more with the keys where that hides the padding.
    further = padding(work.head_size, width) == "feature"
    across = work.group * up(work.head_size, LANES // work.group) if transposed else work.head_size + further
    scores = up(across, width) / (2 if work.int8 else 1)
    return half * (scores + (work.head_size if transposed else up(work.head_size, width)))


def figures(kernel: KernelBundles, work: Work, tile: Tile | SplashTile, chip: Chip, width: int) -> Figures:
    steady = len(kernel.steady())
    if isinstance(tile, Tile):
        trips, group = transposed_trips(work, tile, chip.cores), work.group
        lanes = 2 * group * up(work.head_size, LANES // group)
        steps = trips.loops[0] * max(0, work.keys // tile.block_kv - 1)
    else:
        trips, group = splash_trips(work, tile, chip.cores), 1
        # HBM holds features in whole lanes; the keys may have a further one, which hides padding.
        lanes = up(work.head_size, LANES) + up(work.head_size + (padding(work.head_size, width) == "feature"), LANES)
        steps = trips.loops[0]
    waits = max(0, math.ceil(least(work, tile, width, chip.bundle_flops)) - steady)
    step = 4 * tile.block_q * tile.block_kv * work.head_size * group
    fetched = tile.block_kv * lanes * BFLOAT16
    cycles = executed(kernel, trips) + steps * waits
    return Figures(
        peak_percent=100 * work.flops / (chip.cores * chip.bundle_flops * cycles),
        steady_percent=100 * step / (chip.bundle_flops * (steady + waits)),
        matrix_unit_share=1.0 if waits else kernel.share(MATMUL),
        dma_share=fetched / (chip.bandwidth / chip.cores / chip.clock) / (steady + waits),
        spills=kernel.spills()[0],
        steady_bundles=steady,
        waits=waits,
        body_bundles=kernel.size,
    )
