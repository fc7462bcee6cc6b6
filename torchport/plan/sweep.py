"""`torchport plan --sweep`: every strategy of a model on every mesh of a slice, planned and compared in one table."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchport import patch
from torchport.compile import network
from torchport.config import checkout
from torchport.config.card import Axis, Card, Rule, Strategy
from torchport.config.machine import Machine, parse_machine
from torchport.config.pack import find_pack
from torchport.errors import BadValueError, MeshError, TorchportError
from torchport.plan.plan import plan
from torchport.processes import workers
from torchport.save.manifest import versions
from torchport.shard import AXES
from torchport.task import Request, accept

STAGE = "denoise"
OWN = ("strategy", "mesh")
"""Fields of the config that are swept."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """A strategy on a mesh, both axes of size 1 and axes that the strategy does not use left out."""

    strategy: str
    mesh: dict[Axis, int]

    @property
    def shown(self) -> str:
        """The mesh, as text."""
        return " x ".join(f"{axis}={size}" for axis, size in self.mesh.items()) or "1"

    @property
    def overrides(self) -> tuple[str, str]:
        """The choice, as overrides of a config."""
        mesh = ", ".join(f"{axis}: {size}" for axis, size in self.mesh.items())
        return f"strategy={self.strategy}", f"mesh={{{mesh}}}"


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What came of a sweep.

    Attributes:
        model: The model card's name.
        machine: The slice.
        planned: Choices with their plans, the fastest first; those that do not fit come last.
        failed: Choices whose plan was refused, with the refusal.
        skipped: Choices that no plan was made for, with the reason.
    """

    model: str
    machine: str
    planned: list[tuple[Choice, dict[str, Any]]]
    failed: list[tuple[Choice, TorchportError]]
    skipped: list[tuple[Choice, TorchportError]]


def sweep(
    request: Request,
    topology_name: str | None,
    keep: Path | None = None,
    bounded: bool = True,
    count: int | None = None,
) -> Sweep:
    """Returns the plans of a job under every strategy of its card, on every mesh of its slice that is valid.

    Args:
        request: Model, config and overrides.
        topology_name: A TPU slice in place of the config's machine.
        keep: A folder for the compiler's dumps, a folder in it for each plan.
        bounded: As `plan` takes it.
        count: How many compilations at once; by default as many as there is room for.

    Raises:
        BadValueError: The machine is no TPU, or an override says what is swept.
        ConfigError: The model or the config.
    """
    swept = [override for override in request.overrides if override.partition("=")[0].split(".")[0].strip() in OWN]
    if swept:
        raise BadValueError(f"--set {swept[0]}", "A sweep takes every strategy and mesh in turn", "Leave it out")
    overrides = request.overrides if topology_name is None else (*request.overrides, f"machine={topology_name}")
    asked = dataclasses.replace(request, stage=STAGE, overrides=overrides)
    pack = find_pack(asked.path)
    card, _ = pack.card(asked.model)
    job, document = pack.job(asked.config, overrides)
    machine = parse_machine(job.machine, document.place(["machine"]))
    if machine.platform != "tpu":
        remedy = "Name a slice with --topology v6e:2x4"
        raise BadValueError(f"machine {machine.name}", "It is no TPU, and a plan is for one", remedy)
    valid: list[Choice] = []
    skipped: list[tuple[Choice, TorchportError]] = []
    for choice in choices(card, machine):
        refusal = _refusal(asked, choice)
        valid += [choice] if refusal is None else []
        skipped += [(choice, refusal)] if refusal is not None else []

    def work(choice: Choice) -> dict[str, Any]:
        folder = None if keep is None else keep / "-".join((choice.strategy, *choice.shown.split(" x ")))
        given = dataclasses.replace(asked, overrides=(*overrides, *choice.overrides))
        return plan(given, None, folder, bounded=bounded)

    found = workers.each(work, valid, count or workers.default(), "sweep", lambda it: f"{it.strategy}, {it.shown}")
    results = list(zip(valid, found, strict=True))
    planned = [(choice, made) for choice, made in results if not isinstance(made, TorchportError)]
    failed = [(choice, made) for choice, made in results if isinstance(made, TorchportError)]
    return Sweep(card.model, machine.name, sorted(planned, key=lambda pair: _rank(pair[1])), failed, skipped)


def choices(card: Card, machine: Machine) -> Iterator[Choice]:
    """Yields every strategy on every mesh of as many devices as the machine has, over the axes that it uses."""
    divisors = [size for size in range(1, machine.devices + 1) if machine.devices % size == 0]
    for name, strategy in card.strategies.items():
        used = [axis for axis in AXES if axis in _named(strategy)]
        for sizes in itertools.product(divisors, repeat=len(used)):
            if math.prod(sizes) == machine.devices:
                yield Choice(name, {axis: size for axis, size in zip(used, sizes, strict=True) if size > 1})


def _named(strategy: Strategy) -> set[str]:
    """Returns the axes that any of a strategy's rules names."""
    rules: list[Rule] = [rule for group in strategy.weights.values() for rule in group]
    rules += [rule for group in strategy.inputs.values() for rule in group]
    outputs = [rule.outputs for group in strategy.activations.values() for rule in group]
    return set(_flat([*[(rule.spec, rule.otherwise) for rule in rules], *outputs]))


def _flat(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif value is not None:
        for part in value:
            yield from _flat(part)


def _refusal(request: Request, choice: Choice) -> TorchportError | None:
    """Returns why no plan can be made, as far as that is known before anything is compiled."""
    try:
        task = accept(dataclasses.replace(request, overrides=(*request.overrides, *choice.overrides)))
        # Heads are counted by the network's configuration, which its class has.
        with checkout.on_path(task.upstream), patch.applied(task.patches(task.stages)), checkout.hushed(True):
            network.check_heads(task)
    except MeshError as error:
        return error
    return None


def _rank(found: Mapping[str, Any]) -> tuple[bool, float]:
    seconds = found["stages"][STAGE]["step"]["model_s"]
    return not found["fits"], math.inf if seconds is None else seconds


def data(swept: Sweep) -> dict[str, Any]:
    """Returns a sweep as `--json` prints it."""
    refused = [("failed", swept.failed), ("skipped", swept.skipped)]
    return {
        "model": swept.model,
        "machine": swept.machine,
        "versions": versions(),
        "assumptions": swept.planned[0][1]["assumptions"] if swept.planned else [],
        "rows": [_row(choice, found) for choice, found in swept.planned],
        **{
            key: [{"strategy": c.strategy, "mesh": c.mesh, "id": e.id, "error": str(e)} for c, e in pairs]
            for key, pairs in refused
        },
    }


def _row(choice: Choice, found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the figures of one plan by which it is compared; None for what is not known."""
    stage = found["stages"][STAGE]
    block, step = stage["per_block"] or {}, stage["step"]
    moved = [one["bytes"] * one["count"] for one in block.get("collectives", [])]
    return {
        "strategy": choice.strategy,
        "mesh": choice.mesh,
        "fits": found["fits"],
        "peak_bytes": stage["per_device"]["peak_bytes"],
        "block_other_ms": block.get("other_ms"),
        "block_collectives_bytes": sum(moved) if block else None,
        "block_attention_ms": block.get("attention_ms"),
        "uncalibrated_s": step["uncalibrated_s"],
        "model_s": step["model_s"],
    }


def lines(swept: Sweep) -> list[str]:
    """Returns a sweep as text."""
    head = ("strategy", "mesh", "fits", "GiB/device", "other ms", "MB moved", "attention ms", "model s")
    table: list[Sequence[str]] = [head]
    for choice, found in swept.planned:
        row = _row(choice, found)
        moved = row["block_collectives_bytes"]
        figures = (row["block_other_ms"], None if moved is None else moved / 1e6, row["block_attention_ms"])
        fits, gib = "yes" if row["fits"] else "NO", f"{row['peak_bytes'] / 2**30:.3g}"
        table.append((choice.strategy, choice.shown, fits, gib, *map(_figure, (*figures, row["model_s"]))))
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    text = [f"{swept.model} on {swept.machine}; other, moved and attention are of one block, model s of a step"]
    for cells in table:
        left = [f"{cell:{width}}" for cell, width in zip(cells[:3], widths[:3], strict=True)]
        right = [f"{cell:>{width}}" for cell, width in zip(cells[3:], widths[3:], strict=True)]
        text.append("  ".join((*left, *right)).rstrip())
    text += [f"failed: {choice.strategy}, {choice.shown}: {error}" for choice, error in swept.failed]
    text += [f"skipped: {choice.strategy}, {choice.shown}: {error}" for choice, error in swept.skipped]
    if swept.planned:
        text.append(f"assumed: {'; '.join(swept.planned[0][1]['assumptions'])}")
    return text


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
