"""`torchport tune`: which tile serves a chip, a head size and a kind of scores best, and the table that says so.

Without the chip, candidates are compiled for it and ranked by their instruction schedule (`cost`): by the share of peak
of a whole call at the job's length. With it, by time. What overflows VMEM, does not fit instruction memory or waits for
HBM is dropped, and the reason is printed.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from torchport import load
from torchport.compile import network as networks
from torchport.compile.in_force import in_force
from torchport.config.machine import TPU_CHIPS, Chip, Machine, parse_machine
from torchport.config.strategy import Axis
from torchport.errors import BadValueError, OutputError, TopologyError, VmemError
from torchport.files import folder
from torchport.kernels.attention import tiles, transposed
from torchport.kernels.attention.int8 import EXPONENT
from torchport.kernels.attention.tiles import KernelName, SplashTile, Tile
from torchport.plan.tpu.bundles import attention_call, compile_kernel
from torchport.plan.tpu.cost import Figures, Work, figures, least, padding
from torchport.progress import size_text, track
from torchport.task import Request, Task, accept
from torchport.task.devices import visible_devices

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

BUILD = "torchport.plan.tpu.bundles:attention_call"
CALLS = 5
"""Timed calls of a kernel, of which the median counts."""


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
    width, flops = tiles.UNIT_WIDTH[job.chip.name], job.chip.bundle_flops
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
    if size != tiles.LANES:
        remedy = f"It is for heads that are padded to {tiles.LANES}: 65 to 128 features"
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
    fits, width = tile.fitted(job.work.queries, job.work.keys), tiles.UNIT_WIDTH[job.chip.name]
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
    queries = min(work.queries, 2 * fitted.block_q - min(missing, tiles.LANES - 1))
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
        "padding": padding(job.work.head_size, tiles.UNIT_WIDTH[job.chip.name]),
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
        tiles.write_table(file, best)
    except OSError as error:
        raise OutputError(
            str(file), f"It cannot be written ({error.strerror})", "Name a file in a folder that can be written"
        ) from error


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
            "torchport tune",
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
    network = task.card.written(str(task.stages[0].network))
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
