"""`torchport plan --sweep`: every strategy of a model on every mesh of a slice, planned and compared in one table."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torchport.compile import network
from torchport.compile.in_force import in_force
from torchport.config.card import Card
from torchport.config.machine import GIB, Machine, parse_machine
from torchport.config.pack import find_pack
from torchport.config.strategy import Axis, Rule
from torchport.errors import BadValueError, MeshError, TorchportError
from torchport.plan.figures import JobPlan, mesh_text, moved_bytes
from torchport.plan.planning import of_task, on_slice, require_tpu
from torchport.processes import child
from torchport.progress import table
from torchport.save.manifest import versions
from torchport.shard import AXES, axes_of
from torchport.task import Request, Task, accept

STAGE = "denoise"
SWEPT = ("strategy", "mesh")
"""Fields of the config that are swept."""


@dataclasses.dataclass(frozen=True)
class SweptMesh:
    """A strategy on a mesh, without axes of size 1 and without axes that the strategy does not use."""

    strategy: str
    mesh: dict[Axis, int]

    @property
    def mesh_text(self) -> str:
        """The mesh as text, `dp=2 x sp=4`; `1` for a single device."""
        return mesh_text(self.mesh) or "1"


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The result of a sweep: the plans, the choices whose plan failed, and the choices that the mesh does not allow."""

    model: str
    machine: str
    #: Strategies and meshes with their plans, the fastest first; plans that do not fit come last.
    planned: list[tuple[SweptMesh, JobPlan]]
    failed: list[tuple[SweptMesh, TorchportError]]
    skipped: list[tuple[SweptMesh, TorchportError]]


def sweep(
    request: Request,
    topology_name: str | None,
    keep: Path | None = None,
    bounded: bool = True,
    count: int | None = None,
) -> Sweep:
    """Returns the plans of a job for every strategy of its card on every valid mesh of its slice, made in parallel.

    Args:
        topology_name: The slice, such as `v6e:2x4`; None: the job's machine.
        keep: A folder for the compiler's dumps, with a subfolder for each plan.
        count: The number of parallel compilations; by default as many as the machine has room for.
    """
    # `mesh.sp=4` sets `mesh`.
    swept = [override for override in request.overrides if override.partition("=")[0].split(".")[0].strip() in SWEPT]
    if swept:
        raise BadValueError(f"--set {swept[0]}", "A sweep takes every strategy and mesh in turn", "Leave it out")
    job_request = on_slice(request, topology_name)
    pack = find_pack(request.paths)
    card, _ = pack.card(request.model)
    job, document = pack.job(request.config, job_request.overrides, card)
    machine = parse_machine(job.machine, document.place(["machine"]))
    require_tpu(machine)
    valid, skipped = _checked(job_request, choices(card, machine))

    def work(item: tuple[SweptMesh, Task]) -> JobPlan:
        choice, task = item
        folder = None if keep is None else keep / "-".join((choice.strategy, *choice.mesh_text.split(" x ")))
        return of_task(task, folder, bounded, stages=(STAGE,))

    workers = count or child.default_workers()
    results = child.in_parallel(work, valid, workers, "sweep", lambda item: f"{item[0].strategy}, {item[0].mesh_text}")
    outcomes = [(choice, outcome) for (choice, _), outcome in zip(valid, results, strict=True)]
    planned = [(choice, outcome) for choice, outcome in outcomes if not isinstance(outcome, TorchportError)]
    failed = [(choice, outcome) for choice, outcome in outcomes if isinstance(outcome, TorchportError)]
    planned.sort(key=lambda pair: (not pair[1].fits, pair[1].stage(STAGE).step.model_s or math.inf))
    return Sweep(card.model, machine.name, planned, failed, skipped)


def _checked(
    request: Request, swept: Iterable[SweptMesh]
) -> tuple[list[tuple[SweptMesh, Task]], list[tuple[SweptMesh, TorchportError]]]:
    """Returns the choices whose mesh fits the network, with their tasks; and the others, with the errors."""
    valid: list[tuple[SweptMesh, Task]] = []
    skipped: list[tuple[SweptMesh, TorchportError]] = []
    is_unpatched = True
    with contextlib.ExitStack() as patches:
        for choice in swept:
            try:
                sizes = ", ".join(f"{axis}: {size}" for axis, size in choice.mesh.items())
                chosen = (f"strategy={choice.strategy}", f"mesh={{{sizes}}}")
                task = accept(dataclasses.replace(request, overrides=(*request.overrides, *chosen)), dry=True)
                if is_unpatched:  # all choices have the same patches, which take long to apply
                    patches.enter_context(in_force(task, task.stages))
                    is_unpatched = False
                network.check_heads(task)  # needs the patches, as it reads the network's class
                valid.append((choice, task))
            except MeshError as error:
                skipped.append((choice, error))
    return valid, skipped


def choices(card: Card, machine: Machine) -> Iterator[SweptMesh]:
    """Yields every strategy of a card on every mesh of all devices of a machine, over axes that the strategy names."""
    divisors = [size for size in range(1, machine.devices + 1) if machine.devices % size == 0]
    for name, strategy in card.strategies.items():
        groups: list[Sequence[Rule]] = [*strategy.weights.values(), *strategy.inputs.values()]
        rules = [rule for group in groups for rule in group]
        activations = [rule for group in strategy.activations.values() for rule in group]
        axes = axes_of(rules, activations)
        used = [axis for axis in AXES if axis in axes]
        for sizes in itertools.product(divisors, repeat=len(used)):
            if math.prod(sizes) == machine.devices:
                yield SweptMesh(name, {axis: size for axis, size in zip(used, sizes, strict=True) if size > 1})


def data(swept: Sweep) -> dict[str, Any]:
    """Returns a sweep as JSON data: a row for each plan, and an error for each failed or skipped choice."""
    refused = [("failed", swept.failed), ("skipped", swept.skipped)]
    plans = [job for _, job in swept.planned]  # of one job: all assume the same
    return {
        "model": swept.model,
        "machine": swept.machine,
        "versions": versions(),
        "assumptions": plans[0].assumptions if plans else [],
        "lossy": plans[0].lossy if plans else [],
        "rows": [_row(choice, job) for choice, job in swept.planned],
        **{
            key: [{"strategy": c.strategy, "mesh": c.mesh, "id": e.id, "error": str(e)} for c, e in pairs]
            for key, pairs in refused
        },
    }


def _row(choice: SweptMesh, job: JobPlan) -> dict[str, Any]:
    stage = job.stage(STAGE)
    block = stage.per_block
    return {
        "strategy": choice.strategy,
        "mesh": choice.mesh,
        "fits": job.fits,
        "peak_bytes": stage.per_device.peak_bytes,
        "block_other_ms": None if block is None else block.other_ms,
        "block_collectives_bytes": None if block is None else moved_bytes(block.collectives),
        "block_attention_ms": None if block is None else block.attention_ms,
        "uncalibrated_s": stage.step.uncalibrated_s,
        "model_s": stage.step.model_s,
    }


def lines(swept: Sweep) -> list[str]:
    """Returns the printed lines of `torchport plan --sweep`: a table of plans, then failures and assumptions."""
    head = ("strategy", "mesh", "fits", "GiB/device", "other ms", "MB moved", "attention ms", "model s")
    rows: list[Sequence[str]] = [head]
    for choice, job in swept.planned:
        row = _row(choice, job)
        moved = None if row["block_collectives_bytes"] is None else row["block_collectives_bytes"] / 1e6
        gib = None if row["peak_bytes"] is None else row["peak_bytes"] / GIB
        figures = (gib, row["block_other_ms"], moved, row["block_attention_ms"], row["model_s"])
        words = ["-" if figure is None else f"{figure:.3g}" for figure in figures]
        rows.append((choice.strategy, choice.mesh_text, "yes" if job.fits else "NO", *words))
    text = [f"{swept.model} on {swept.machine}; other, moved and attention are of one block, model s of a step"]
    text += table(rows, left=3)
    text += [f"failed: {choice.strategy}, {choice.mesh_text}: {error}" for choice, error in swept.failed]
    text += [f"skipped: {choice.strategy}, {choice.mesh_text}: {error}" for choice, error in swept.skipped]
    # All plans assume the same.
    for _, job in swept.planned[:1]:
        text += [*(f"lossy: {reason}" for reason in job.lossy), f"assumed: {'; '.join(job.assumptions)}"]
    return text
