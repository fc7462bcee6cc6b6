"""Which tile serves a chip, a head size and a kind of scores best, and the table that says so. No TPU needed.

    python benchmarks/attention_tiles.py --model hunyuan --config configs/720p.yaml --topology v6e:2x4
    python benchmarks/attention_tiles.py --topology CHIP:SHAPE --write torchport/kernels/attention/tiles.yaml ...

Without the chip, candidates are compiled for it and ranked by their instruction schedule: by the share of peak of a
whole call at the job's length. With it, by time. What overflows VMEM, does not fit instruction memory or waits for HBM
is dropped, and the reason is printed.

The bundles of a whole call are counted by the rule of `torchport.plan.tpu.bundles`. The count can promise too much: on
v5p and tpu7x the compiler issues products faster than the matrix units take them (v5p, head size 128: 256 products of
16 bundles for each unit in 3923 bundles), and the core will wait. Where the products of a steady step alone take longer
than its bundles (`least`), they count instead. It leaves out waiting for memory, of which `dma_share` says how much
room there is, and XLA's passes over q, k and v around the kernel.

Shapes: S queries, T keys, H heads of a device, D features of a head, g heads that share a tile.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import click
import jax
import jax.numpy as jnp

from torchport import load
from torchport.commands import options, terminal
from torchport.compile import network as networks
from torchport.compile.in_force import in_force
from torchport.config.machine import TPU_CHIPS, Chip, Machine, parse_machine
from torchport.config.strategy import Axis
from torchport.errors import BadValueError, OutputError, TopologyError, UnknownNameError, VmemError, nearest
from torchport.files import folder
from torchport.kernels.attention import splash, tiles, transposed
from torchport.kernels.attention.int8 import EXPONENT
from torchport.kernels.attention.tiles import LANES, TAIL, KernelName, SplashTile, Tile, rounded_up
from torchport.plan.tpu.bundles import MATMUL, KernelBundles, Region, Trips, compile_kernel, executed
from torchport.progress import size_text, track
from torchport.task import Request, Task, accept
from torchport.task.devices import visible_devices

SCRIPT = "python benchmarks/attention_tiles.py"
SIZES = "--tokens, --heads and --head-size"
"""What says as much as a model and a config."""

LARGEST_BODY = 16_000
"""Bundles of a kernel's steady step. How large instruction memory is, nobody says; the largest body of the public
kernels that have run on chips is about this large. Larger ones may never have run, though the count favours them."""

SMALLEST_PART = 4
"""A tile whose steady step is shorter than one part in so many of the largest is not tried: what runs once for each
tile, or each chunk, weighs too much."""

DMA_LIMIT = 0.9
"""Largest part of the steady step that fetching may take: beyond it the kernel waits for HBM, whatever its bundles."""

SPLASH = (
    (2048, 2048, 1024),
    (1024, 2048, 1024),
    (1024, 2048, 512),
    (2048, 1024, 512),
    (1024, 1024, 512),
    (4096, 1024, 512),
)
"""Tiles of JAX's own kernel that are tried: block_q, block_kv, block_kv_compute."""

UNIT_WIDTH = {"v5e": 128, "v5p": 128, "v6e": 256, "tpu7x": 256}
"""How wide, and how deep, a chip's matrix unit is. Source: cloud.google.com/tpu/docs/system-architecture-tpu-vm."""

SPILL, FILL = "VSTORE:SPILL", "VLOAD:FILL"
"""Slots, as the compiler names them: vector registers that are saved to VMEM and read back."""

PEELED = 4
"""A loop counts as the kernel's if it holds one part in so many of the matrix work: a pipelined loop's first and last
iterations, which stand outside of it, do together what one iteration does, and twice that if two are in flight."""

BFLOAT16 = 2
"""Bytes."""

HEADER = """\
# Which tile serves which chip. Written by `python benchmarks/attention_tiles.py --write`,
# read by torchport/kernels/attention/tiles.py.
# tokens: queries, and as many keys, at which peak_percent holds: useful bfloat16 arithmetic of a whole call over peak.
# steady_percent: of the steady loop alone. The matrix unit is 256 wide on v6e and tpu7x, 128 wide on v5e and v5p.
"""
KINDS: dict[str, type[tiles.Row]] = {
    "splash_transposed": tiles.TransposedRow,
    "splash_int8": tiles.Int8Row,
    "splash": tiles.SplashRow,
}
"""The rows of each list of a table."""

BUILD = "attention_tiles:attention_call"
"""What a process that compiles imports: it searches the folder of this file, as every script's process does."""
CALLS = 5
"""Timed calls of a kernel, of which the median counts."""


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


@dataclasses.dataclass(frozen=True)
class Workload:
    machine: Machine
    work: Work
    note: str = ""

    @property
    def chip(self) -> Chip:
        return self.machine.require_tpu()


@dataclasses.dataclass(frozen=True)
class Candidate:
    tile: Tile | SplashTile
    #: Of its instruction schedule; None where it was dropped before there was one.
    figures: Figures | None = None
    dropped: str = ""
    seconds: float | None = None  #: The median call's, where there is a chip.


@dataclasses.dataclass(frozen=True)
class Result:
    """All candidates of an implementation, the best first, the dropped last."""

    job: Workload
    implementation: KernelName
    bounded: bool
    ranked_by: str  #: `schedule` or `time`.
    candidates: list[Candidate]


def candidates(job: Workload, implementation: KernelName) -> list[Tile | SplashTile]:
    if implementation == "splash":
        return [SplashTile(*sides) for sides in SPLASH]
    # Where the exponential is of two scores at once, narrower cells leave the matrix unit less alone.
    columns = 256 if implementation == "splash_int8" and EXPONENT.get(job.chip.name) == "bfloat16" else 512
    sizes = [Tile(q, kv, columns) for q in (2048, 4096, 8192) for kv in (256, 512, 1024, 2048)]
    width, flops = UNIT_WIDTH[job.chip.name], job.chip.bundle_flops
    shortest = LARGEST_BODY / SMALLEST_PART
    return [tile for tile in sizes if shortest <= least(job.work, tile, width, flops) <= LARGEST_BODY]


def tune(job: Workload, implementation: KernelName, bounded: bool, among: Sequence[Tile | SplashTile] = ()) -> Result:
    count, kind, _ = visible_devices("tpu")
    present = count > 0 and kind in job.chip.kinds
    what = f"tune {implementation}{' bounded' * bounded} {job.chip.name} {job.work.head_size}"
    outcomes = []
    for tile in track(list(among or candidates(job, implementation)), what, "tile"):
        candidate = tried(job, implementation, bounded, tile)
        if present and not candidate.dropped:
            candidate = dataclasses.replace(candidate, seconds=_seconds(job, implementation, bounded, tile))
        outcomes.append(candidate)
    return Result(job, implementation, bounded, "time" if present else "schedule", sorted(outcomes, key=_rank))


def _of_int8(job: Workload) -> Workload:
    place, (_, size) = "--implementation splash_int8", transposed.grouping(job.work.heads, job.work.head_size)
    if job.chip.name not in EXPONENT:
        raise BadValueError(place, f"{job.chip.name} multiplies int8 no faster", f"It is for {', '.join(EXPONENT)}")
    if size != LANES:
        remedy = f"It is for heads that are padded to {LANES}: 65 to 128 features"
        raise BadValueError(place, f"Heads have {job.work.head_size} features", remedy)
    return dataclasses.replace(job, work=dataclasses.replace(job.work, int8=True))


def tune_all(job: Workload, implementation: str, scores: str) -> list[Result]:
    """Returns the results for `bounded` scores, `any`, or `both`; only one kernel takes either."""
    if implementation == "splash":
        return [tune(job, "splash", False)]
    if implementation == "splash_int8":
        return [tune(job, "splash_int8", True)]
    kinds = {"bounded": [True], "any": [False], "both": [True, False]}
    return [tune(job, "splash_transposed", bounded) for bounded in kinds[scores]]


def _rank(candidate: Candidate) -> tuple[bool, float]:
    figures = candidate.figures
    if candidate.dropped or figures is None:
        return True, 0.0
    return False, -figures.peak_percent if candidate.seconds is None else candidate.seconds


def tried(job: Workload, implementation: KernelName, bounded: bool, tile: Tile | SplashTile) -> Candidate:
    if implementation == "splash_int8":
        job = _of_int8(job)
    arguments = _arguments(_reduced(job, tile), implementation, bounded, tile)
    try:
        if isinstance(tile, Tile):
            _, size = transposed.grouping(job.work.heads, job.work.head_size)
            fitted = tile.fitted(job.work.queries, job.work.keys)
            group, vmem = job.work.group, job.chip.vmem
            tiles.check_vmem(fitted, head_size=size, heads=group, itemsize=2, bounded=bounded, vmem=vmem)
        kernel = compile_kernel(BUILD, arguments, job.machine)
    except VmemError as error:
        asked, limit = vars(error)["asked"], vars(error)["limit"]
        return Candidate(tile, dropped=f"VMEM: {asked:,} bytes, limit {limit:,} ({size_text(limit)})")
    fits, width = tile.fitted(job.work.queries, job.work.keys), UNIT_WIDTH[job.chip.name]
    shares = figures(kernel, job.work, fits, job.chip, width)
    if shares.steady_bundles > LARGEST_BODY:
        return Candidate(tile, shares, f"body: {shares.steady_bundles:,} bundles, limit {LARGEST_BODY:,}")
    if shares.dma_share > DMA_LIMIT:
        return Candidate(tile, shares, f"HBM: {shares.dma_share:.2f} of the cycles, limit {DMA_LIMIT}")
    return Candidate(tile, shares)


def _reduced(job: Workload, tile: Tile | SplashTile) -> Workload:
    """Returns a job with the same program in it: tiles, chunks and heads are loops, of which a few passes will do.

    Two heads or groups for each core, since with one the grid loses a dim and the program is another (tpu7x: 5 %
    longer), and two tiles, the last one ragged. XLA has less around the kernel to compile.
    """
    work, fitted = job.work, tile.fitted(job.work.queries, job.work.keys)
    missing = -work.queries % fitted.block_q
    # Less than 128 queries for each tile are missing, or it would have been fitted smaller.
    queries = min(work.queries, 2 * fitted.block_q - min(missing, LANES - 1))
    keys = min(work.keys, 3 * fitted.block_kv + work.keys % fitted.block_kv)
    heads = 2 * work.group * job.chip.cores
    return dataclasses.replace(job, work=dataclasses.replace(work, queries=queries, keys=keys, heads=heads))


def _arguments(job: Workload, implementation: KernelName, bounded: bool, tile: Tile | SplashTile) -> dict[str, Any]:
    return {
        "implementation": implementation,
        "queries": job.work.queries,
        "keys": job.work.keys,
        "heads": job.work.heads,
        "head_size": job.work.head_size,
        "bounded": bounded,
        "tile": dataclasses.asdict(tile),
        "vmem_bytes": job.chip.vmem - tiles.RESERVED,
        "padding": padding(job.work.head_size, UNIT_WIDTH[job.chip.name]),
        "chip": job.chip.name,
    }


def _seconds(job: Workload, implementation: KernelName, bounded: bool, tile: Tile | SplashTile) -> float:
    call, shapes = attention_call(**_arguments(job, implementation, bounded, tile))
    keys = jax.random.split(jax.random.key(0), 3)
    tensors = [jax.random.normal(key, shape.shape, shape.dtype) for key, shape in zip(keys, shapes, strict=False)]
    lengths = jax.numpy.full(shapes[3].shape, job.work.keys, shapes[3].dtype)
    program = jax.jit(call).lower(*tensors, lengths).compile()
    times = []
    for _ in range(CALLS + 1):  # the first one waits for what is still on its way
        began = time.perf_counter()
        program(*tensors, lengths).block_until_ready()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def attention_call(
    implementation: str,
    queries: int,
    keys: int,
    heads: int,
    head_size: int,
    bounded: bool,
    tile: dict[str, int],
    vmem_bytes: int,
    padding: Literal["feature", "segments"] = "feature",
    chip: str = "v6e",
) -> tuple[Callable[..., jax.Array], list[jax.ShapeDtypeStruct]]:
    """Returns a function of q, k, v and lengths, and their shapes [1, H, S, D], [1, H, T, D], [1, H, T, D], [1].

    Args:
        chip: Which decides how `splash_int8` takes exponentials.
        queries: S.
        keys: T.
        heads: H, of one device.
        head_size: D.
        bounded: Whether the caller knows a bound of the scores.
        vmem_bytes: What the compiler may use of VMEM; JAX's own kernel takes no such limit.
        padding: How JAX's own kernel hides padded keys.
    """
    scale = head_size**-0.5
    if implementation == "splash":
        how: dict[str, Any] = {"scale": scale, "causal": False, "window": None, "padding": padding}
        how["tile"] = SplashTile(**tile)
        attention: Callable[..., jax.Array] = splash.attention
    else:
        exponent = EXPONENT[chip] if implementation == "splash_int8" else None
        how = {"settings": transposed.KernelSettings(scale, bounded, Tile(**tile), vmem_bytes, exponent)}
        attention = transposed.attention

    def run(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
        return functools.partial(attention, **how)(q, k, v, lengths_B=lengths)

    shapes = [(1, heads, tokens, head_size) for tokens in (queries, keys, keys)]
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
    return run, [*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes), lengths]


def transposed_trips(work: Work, tile: Tile, cores: int) -> Trips:
    """Returns the trips of `splash_transposed`.

    Args:
        tile: As fitted to the work.
        cores: Over which a device's groups of heads are divided.
    """
    passes, chunks = math.ceil(work.queries / tile.block_q), work.keys // tile.block_kv
    groups, cells = math.ceil(work.heads / work.group / cores), tile.block_q // tile.columns
    pieces = math.ceil((work.keys - chunks * tile.block_kv) / TAIL)
    each = () if cells == 1 else (cells,)  # a loop of one pass is none
    some = () if cells == tile.cells_at_once else (cells // tile.cells_at_once,)
    further = (math.ceil(work.further / TAIL), *some) if work.further else ()
    # Tiles; first halves of the first chunk; chunks in pairs; second halves of the last; pieces, cells; outputs.
    return Trips((groups * passes, *each, chunks - 1, *each, pieces, *some, *further, *each))


def splash_trips(work: Work, tile: SplashTile, cores: int) -> Trips:
    """Returns the trips of JAX's own kernel: one loop over all tiles and chunks, padded to whole ones."""
    passes, chunks = math.ceil(work.queries / tile.block_q), math.ceil(work.keys / tile.block_kv)
    return Trips((math.ceil(work.heads / cores) * passes * chunks,), once_in=chunks)


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
        width: Of the matrix unit, which is as deep (`UNIT_WIDTH`).
        flops: That a core's matrix units do in a bundle.
    """
    is_ours = isinstance(tile, Tile)
    half = 2 * tile.block_q * tile.block_kv * (work.group if is_ours else 1) / flops
    # K Q^T has the features along the depth, and V^T P the keys, of which there are enough. JAX's own kernel has the
    # features there, or across, in both; one more with the keys where that hides the padding.
    further = padding(work.head_size, width) == "feature"
    across = work.group * rounded_up(work.head_size, LANES // work.group) if is_ours else work.head_size + further
    scores = rounded_up(across, width) / (2 if work.int8 else 1)
    return half * (scores + (work.head_size if is_ours else rounded_up(work.head_size, width)))


def figures(kernel: KernelBundles, work: Work, tile: Tile | SplashTile, chip: Chip, width: int) -> Figures:
    steady = len(steady_bundles(kernel))
    if isinstance(tile, Tile):
        trips, group = transposed_trips(work, tile, chip.cores), work.group
        lanes = 2 * group * rounded_up(work.head_size, LANES // group)
        steps = trips.loops[0] * max(0, work.keys // tile.block_kv - 1)
    else:
        trips, group = splash_trips(work, tile, chip.cores), 1
        # HBM holds features in whole lanes; the keys may have a further one, which hides padding.
        lanes = rounded_up(work.head_size, LANES) + rounded_up(
            work.head_size + (padding(work.head_size, width) == "feature"), LANES
        )
        steps = trips.loops[0]
    waits = max(0, math.ceil(least(work, tile, width, chip.bundle_flops)) - steady)
    step = 4 * tile.block_q * tile.block_kv * work.head_size * group
    fetched = tile.block_kv * lanes * BFLOAT16
    cycles = executed(kernel, trips) + steps * waits
    return Figures(
        peak_percent=100 * work.flops / (chip.cores * chip.bundle_flops * cycles),
        steady_percent=100 * step / (chip.bundle_flops * (steady + waits)),
        matrix_unit_share=1.0 if waits else share(kernel, MATMUL),
        dma_share=fetched / (chip.bandwidth / chip.cores / chip.clock) / (steady + waits),
        spills=spills(kernel)[0],
        steady_bundles=steady,
        waits=waits,
        body_bundles=kernel.size,
    )


def steady_bundles(kernel: KernelBundles) -> list[int]:
    """Returns the bundles that one iteration runs while the matrix unit is in its steady state, in order.

    The loop is the innermost one that holds the matrix work: from the kernel inwards, always into the loop with
    the most of it, as long as that has a quarter of the kernel's; a kernel without such a loop is taken whole. Of
    its predicated regions only the one with the most matrix work runs, and within it likewise: a steady grid step
    runs neither the first step's region nor the last's. Of two with equally much, the shorter runs: the other one
    masks as well. What is left out with them is code that starts a DMA under a predicate, some tens of bundles
    where the compiler makes a region of it. A loop inside counts as one iteration.
    """
    return _iteration(kernel, _steady_loop(kernel))


def share(kernel: KernelBundles, slot: str) -> float:
    """Returns which part of a slot the steady state takes, 0 to 1."""
    steady = steady_bundles(kernel)
    return float(kernel.counts[steady, _column(kernel, slot)].sum()) / (kernel.slots[slot] * len(steady))


def spills(kernel: KernelBundles) -> tuple[int, int]:
    """Returns the vector registers that one steady iteration saves to VMEM, and those it reads back."""
    steady = steady_bundles(kernel)
    saved, filled = (int(kernel.counts[steady, _column(kernel, slot)].sum()) for slot in (SPILL, FILL))
    return saved, filled


def _column(kernel: KernelBundles, slot: str) -> int:
    if slot in kernel.slots:
        return list(kernel.slots).index(slot)
    raise UnknownNameError(f"bundles of {kernel.kernel}", f"There is no slot '{slot}'", nearest(slot, kernel.slots))


def _matrix_work(kernel: KernelBundles, region: Region) -> int:
    return int(kernel.counts[region.start : region.end, _column(kernel, MATMUL)].sum())


def _steady_loop(kernel: KernelBundles) -> Region:
    region, enough = kernel.root, max(1, _matrix_work(kernel, kernel.root) / PEELED)
    while True:
        loops = [loop for loop in outermost_loops(region) if _matrix_work(kernel, loop) >= enough]
        if not loops:
            return region
        region = max(loops, key=functools.partial(_matrix_work, kernel))


def _iteration(kernel: KernelBundles, region: Region) -> list[int]:
    busy = [part for part in region.inside if part.kind == "predicated" and _matrix_work(kernel, part)]
    kept = max(busy, key=lambda part: (_matrix_work(kernel, part), part.start - part.end), default=None)
    ran: list[int] = []
    at = region.start
    for part in region.inside:
        ran += range(at, part.start)
        ran += _iteration(kernel, part) if part.kind == "loop" or part is kept else []
        at = part.end
    return [*ran, *range(at, region.end)]


def outermost_loops(region: Region) -> Iterator[Region]:
    """Yields the outermost loops inside a region, those under predicates too."""
    for part in region.inside:
        yield from [part] if part.kind == "loop" else outermost_loops(part)


def percent_of_peak(result: Result, candidate: Candidate) -> float:
    """Returns useful bfloat16 flop over peak, in percent, of a whole call: by time where there is a time."""
    if candidate.seconds is not None:
        return 100 * result.job.work.flops / (candidate.seconds * result.job.chip.flops)
    return candidate.figures.peak_percent if candidate.figures else 0.0


def rows(result: Result) -> list[dict[str, Any]]:
    shared = {"chip": result.job.chip.name, "implementation": result.implementation, "ranked_by": result.ranked_by}
    return [
        shared
        | {"head_size": result.job.work.head_size, "heads": result.job.work.heads, "tokens": result.job.work.queries}
        | ({} if result.implementation == "splash" else {"bounded": result.bounded})
        | {"tile": dataclasses.asdict(candidate.tile)}
        | (dataclasses.asdict(candidate.figures) if candidate.figures else {})
        | {"seconds": candidate.seconds, "dropped": candidate.dropped or None}
        for candidate in result.candidates
    ]


def lines(result: Result) -> list[str]:
    work = result.job.work
    head = f"{result.implementation}{' bounded' * result.bounded}, {result.job.chip.name}, by {result.ranked_by}: "
    note = f" ({result.job.note})" if result.job.note else ""
    text = [head + f"{work.queries:,} tokens{note}, {work.heads} head(s) of {work.head_size}"]
    text.append(f"  {'tile':18}{'peak %':>8}{'steady %':>10}{'matrix':>8}{'HBM':>6}{'spills':>8}{'bundles':>9}")
    for candidate in result.candidates:
        name, shares = "/".join(map(str, dataclasses.astuple(candidate.tile))), candidate.figures
        line = f"  {name:18}"
        if shares:
            line += f"{percent_of_peak(result, candidate):8.1f}{shares.steady_percent:10.1f}"
            line += f"{shares.matrix_unit_share:8.2f}{shares.dma_share:6.2f}{shares.spills:8}{shares.steady_bundles:9}"
        text.append(f"{line}  {candidate.dropped and f'dropped, {candidate.dropped}'}".rstrip())
    return text


def check_writable(file: Path) -> None:
    """Refuses a file that a table cannot be written to, before an hour is spent on one."""
    folder.check_writable("--write", file)
    if file.is_file():
        tiles.read_table(file)


def write(file: Path, results: Iterable[Result]) -> None:
    """Puts the best tile of each result into a table; rows of other keys stay."""
    best = [_best_row(result) for result in results]
    try:
        write_table(file, best)
    except OSError as error:
        raise OutputError(
            str(file), f"It cannot be written ({error.strerror})", "Name a file in a folder that can be written"
        ) from error


def write_table(file: Path, rows: Sequence[tiles.Row]) -> None:
    """Writes rows into a table. A row replaces the one with the same key; the other rows stay.

    Raises:
        OSError: It cannot be written.
    """
    old = tiles.read_table(file) if file.exists() else tiles.TileTable(splash_transposed=[], splash=[])
    text = HEADER
    for name, kind in KINDS.items():
        by_key = {tiles.key(row): row for row in [*getattr(old, name), *rows] if isinstance(row, kind)}
        ordered = sorted(by_key.values(), key=lambda row: (list(TPU_CHIPS).index(row.chip), tiles.key(row)))
        text += f"{name}:\n" if by_key else f"{name}: []\n"
        text += "".join(f"  - {_flow(row.model_dump())}\n" for row in ordered)
    file.write_text(text, encoding="utf-8")


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_flow(item)}" for name, item in value.items()) + "}"
    if isinstance(value, str):
        return value if value.isidentifier() else f'"{value}"'  # a version such as 0.1 would be a number
    return str(value).lower() if isinstance(value, bool) else str(value)


def _best_row(result: Result) -> tiles.Row:
    best = next(iter(result.candidates), None)
    if best is None or best.dropped or best.figures is None:
        raise TopologyError(
            f"tune {result.implementation} on {result.job.chip.name}",
            f"Every tile was dropped; the first: {best.dropped}" if best else "No tile fits this head size",
            "Name another chip or head size",
        )
    work = result.job.work
    _, head_size = transposed.grouping(work.heads, work.head_size)
    fields: dict[str, Any] = {
        "chip": result.job.chip.name,
        "head_size": work.head_size if result.implementation == "splash" else head_size,
        "tile": dataclasses.asdict(best.tile),
        "tokens": result.job.work.queries,
        "peak_percent": round(percent_of_peak(result, best), 1),
        "steady_percent": round(best.figures.steady_percent, 1),
        "ranked_by": result.ranked_by,
        "libtpu": importlib.metadata.version("libtpu"),
    }
    if result.implementation == "splash":
        return tiles.SplashRow(**fields)
    if result.implementation == "splash_int8":
        return tiles.Int8Row(**fields)
    return tiles.TransposedRow(bounded=result.bounded, **fields)


def sized_workload(machine: Machine, tokens: int, heads: int, head_size: int, note: str = "") -> Workload:
    remedy = f"It must be a TPU slice ({', '.join(TPU_CHIPS)}, such as v6e:2x4)"
    machine.require_tpu(f"--topology {machine.name}", remedy)
    group, _ = transposed.grouping(heads, head_size)
    return Workload(machine, Work(tokens, tokens, heads, head_size, group), note)


def workload_of_flags(
    topology: str,
    *,
    model: str | None = None,
    config: str | None = None,
    tokens: int | None = None,
    heads: int | None = None,
    head_size: int | None = None,
    upstream_path: str | None = None,
    overrides: tuple[str, ...] = (),
    paths: tuple[str, ...] = (),
) -> Workload:
    """Returns the job of the flags: of a model and a config, or of sizes alone; beside a model, sizes override."""
    machine = parse_machine(topology, f"--topology {topology}")
    if model is not None and config is not None:
        request = Request(model, config, paths=paths, upstream_path=upstream_path, overrides=overrides)
        return workload_of_model(request, machine, tokens, heads, head_size)
    unread = {"model": model, "config": config, "upstream-path": upstream_path, "set": overrides or None}
    if tokens is None or heads is None or head_size is None or any(unread.values()):
        flags = unread | {"tokens": tokens, "heads": heads, "head-size": head_size}
        have = [f"--{name}" for name, value in flags.items() if value is not None]
        raise BadValueError(
            SCRIPT,
            f"It has {', '.join(have) or 'neither a model nor sizes'}",
            "Give --model and --config, or --tokens, --heads and --head-size alone",
        )
    return sized_workload(machine, tokens, heads, head_size)


def workload_of_model(
    request: Request,
    machine: Machine,
    tokens: int | None = None,
    heads: int | None = None,
    head_size: int | None = None,
) -> Workload:
    """Returns the job of a model and a config, from configurations alone: no weights are read.

    Args:
        tokens: S = T; by default the tokens of the pictures, to which those of the text come on top.
        heads: Of one device; by default the model's, over the axes that split them.
        head_size: D; by default the model's.
    """
    overrides = (*request.overrides, f"machine={machine.name}")
    task = accept(dataclasses.replace(request, stage="denoise", overrides=overrides))
    network, vae = _configurations(task)
    heads, note = _heads(task, network) if heads is None else heads, ""
    head_size = _head_size(task, network) if head_size is None else head_size
    if tokens is None:
        tokens, note = _pictures(task, network, vae), "of the pictures; those of the text come on top"
    return sized_workload(machine, tokens, heads, head_size, note)


def _configurations(task: Task) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the published configuration of the network that denoises, and of the VAE (empty where there is none)."""
    [stage] = task.stages
    names = [str(stage.network), "vae"]
    with in_force(task, [stage]):
        known = {name: task.card.components[name] for name in names if name in task.card.components}
        makers = {name: networks.maker(task, name) for name in known}
        read = {name: load.configuration(load.published(makers[name], c.published, name)) for name, c in known.items()}
    return read[names[0]], read.get("vae", {})


def _split(task: Task) -> dict[Axis, str]:
    """Returns the axes of the mesh that split the heads, with the configuration's key that counts the heads."""
    network = task.card.rule_key(str(task.stages[0].network))
    divides = {axis: path.partition(".") for axis, path in task.card.strategies[task.job.strategy].divides.items()}
    return {axis: key for axis, (component, _, key) in divides.items() if component == network}


def _heads(task: Task, network: Mapping[str, Any]) -> int:
    axes = _split(task)
    heads = _number(network, [*axes.values(), "num_attention_heads"], "--heads", task)
    return heads // math.prod(task.job.mesh.get(axis, 1) for axis in axes)


def _head_size(task: Task, network: Mapping[str, Any]) -> int:
    if "attention_head_dim" in network or not isinstance(network.get("hidden_size"), int):
        return _number(network, ["attention_head_dim"], "--head-size", task)
    heads = _number(network, [*_split(task).values(), "num_attention_heads"], "--head-size", task)
    return int(network["hidden_size"]) // heads


def _pictures(task: Task, network: Mapping[str, Any], vae: Mapping[str, Any]) -> int:
    """Returns the tokens of the pictures: patches of the latents, by the names that configurations have for sizes."""
    space = _number(vae, ["spatial_compression_ratio", "ffactor_spatial", "scale_factor_spatial"], "--tokens", task)
    frames = _number(vae, ["temporal_compression_ratio", "ffactor_temporal", "scale_factor_temporal"], "--tokens", task)
    patch_size = network.get("patch_size", 1)
    sides = (
        patch_size if isinstance(patch_size, list | tuple) else (network.get("patch_size_t") or 1, *2 * [patch_size])
    )
    latents = ((task.job.frames - 1) // frames + 1, task.job.height // space, task.job.width // space)
    return math.prod(latent // side for latent, side in zip(latents, sides, strict=True))


def _number(config: Mapping[str, Any], keys: Sequence[str], flag: str, task: Task) -> int:
    for key in keys:
        if isinstance(config.get(key), int):
            return int(config[key])
    raise BadValueError(
        f"--model {task.card.model}", f"Its configuration has no {' or '.join(dict.fromkeys(keys))}", f"Add {flag}"
    )


@click.command(
    SCRIPT,
    cls=terminal.Command,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--model",
    metavar="NAME",
    help=f"A model card (`torchport models` lists them), or a pipeline: diffusers:MochiPipeline [{SIZES}].",
    callback=options.derived,
)
@options.config(SIZES)
@click.option("--topology", required=True, metavar="NAME", help="The TPU slice, such as v6e:2x4; it may be absent.")
@click.option(
    "--implementation",
    type=click.Choice(["splash_transposed", "splash_int8", "splash"]),
    default="splash_transposed",
    show_default=True,
    help="The kernel: torchport's own, the same in eight bits, or JAX's Splash Attention.",
)
@click.option(
    "--scores",
    type=click.Choice(["bounded", "any", "both"]),
    default="both",
    show_default=True,
    help="Scores with a known bound, any scores, or both; for splash_transposed alone.",
)
@click.option("--tokens", type=click.IntRange(1), metavar="N", help="The number of queries, and of keys.")
@click.option("--heads", type=click.IntRange(1), metavar="N", help="Heads on one device, if there is no --model.")
@click.option("--head-size", type=click.IntRange(1), metavar="N", help="Features of a head, if there is no --model.")
@options.upstream_path
@options.overrides
@options.as_json
@click.option("--write", "file", type=options.FILE, metavar="FILE", help="Put the best tile into it.")
@options.paths
def command(implementation: Any, scores: str, as_json: bool, file: Path | None, **given: Any) -> None:
    """Compares tiles of an attention kernel, by time or by the compiler's static schedule.

    Head size, heads and tokens are those of --model and --config; --topology replaces the config's machine.
    """
    terminal.log_to_stderr()
    job = workload_of_flags(**given)
    if file is not None:
        check_writable(file)
    results = tune_all(job, implementation, scores)
    if as_json:
        terminal.say_json([row for result in results for row in rows(result)])
    else:
        terminal.say("\n\n".join("\n".join(lines(result)) for result in results))
    if file is not None:
        write(file, results)


def main() -> None:
    """Runs the command line; a refusal is a line for each mistake and an exit code, never a traceback."""
    sys.exit(terminal.run(command))


if __name__ == "__main__":
    main()
