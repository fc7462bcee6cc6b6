"""Encoders on the devices beside those of the host, module by module, in the same process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchport.compile import network, ported
from torchport.compile.in_force import stage_in_force
from torchport.stages.family import Stage, Steps
from torchport.stages.outputs import leaves
from torchport.task import Task, encoder_names
from torchport.verify.borders import to_host
from torchport.verify.report import FAULT, Seam, Verdict
from torchport.verify.yardstick import computing_in, distance, sampled, wide_dtype

Values = list[tuple[str, torch.Tensor]]
"""What modules return, by their paths, in the order in which they end."""


@dataclasses.dataclass(frozen=True)
class Yardstick:
    """What the original's encoders do.

    Attributes:
        host: What their modules return.
        wide: The same in the yardstick's dtype.
        roundings: By output of the stage, how far the original's is from the yardstick's.
    """

    host: Values
    wide: Values
    roundings: dict[str, float]

    def allowed(self, name: str) -> float:
        """Returns how far an output of the port's may be from the original's: by both their roundings."""
        return (1 + FAULT) * self.roundings.get(name, 0.0)


def yardstick_of(task: Task, stage: Stage, folder: Path, original: Mapping[str, torch.Tensor]) -> Yardstick:
    """Runs the encoders of the original in their own dtype, and in a wider one; its patches must be in force.

    Args:
        original: What the stage returns.
    """
    names, parts = encoder_names(task.card, stage), network.loaded(task, stage, folder)
    modules: dict[str, torch.nn.Module] = {name: parts[name] for name in names}
    host, _ = _watched(task, stage, parts, modules)
    wide_type = wide_dtype(task.settings.dtypes[names[0]])
    for module in modules.values():
        module.to(wide_type)
    with computing_in(wide_type):
        wide, precise = _watched(task, stage, parts, modules)
    return Yardstick(host, wide, {name: distance(values, precise[name]) or 0.0 for name, values in original.items()})


def encoded(
    task: Task, stage: Stage, folder: Path, yardstick: Yardstick | None
) -> tuple[dict[str, torch.Tensor], list[Seam]]:
    """Returns what a port's encoders return, and of each the module that is at fault, or nearest to that.

    Args:
        yardstick: Without modules, as of a capture, none of the port's is looked at.
    """
    with stage_in_force(task, stage) as ledger:
        parts = network.loaded(task, stage, folder)
        programs = ported.encoders(task, stage, parts, ledger)
        parts |= programs
        outputs = stage.run(parts, None, task.settings, Steps())
        if yardstick is None or not yardstick.host:
            return outputs, []
        for program in programs.values():
            program.compiled.jit = False  # each module returns what can be looked at
        port, _ = _watched(task, stage, parts, {name: program.original for name, program in programs.items()})
    return outputs, _seams(stage.name, yardstick, port)


def _watched(
    task: Task, stage: Stage, parts: Mapping[str, Any], encoders: Mapping[str, torch.nn.Module]
) -> tuple[Values, dict[str, torch.Tensor]]:
    """Returns what the modules of some encoders return in a stage, and what the stage returns."""
    values: Values = []
    hooks = [
        module.register_forward_hook(_Note(values, f"{name}.{path}".rstrip(".")))
        for name, encoder in encoders.items()
        for path, module in encoder.named_modules()
    ]
    try:
        return values, stage.run(parts, None, task.settings, Steps())
    finally:
        for hook in hooks:
            hook.remove()


@dataclasses.dataclass(frozen=True)
class _Note:
    """A hook. It is an object of torchport's, which a ported module does not count as a part of its model."""

    values: Values
    path: str

    def __call__(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        first = next(iter(leaves({"": output}).values()), None)
        if first is not None:
            self.values.append((self.path, sampled(to_host(first))))


def _seams(stage: str, yardstick: Yardstick, port: Values) -> list[Seam]:
    """Returns of each encoder the first module at fault, or else the one that is nearest to that."""
    found: dict[str, Seam] = {}
    for (path, expected), (_, wide), (_, ours) in zip(yardstick.host, yardstick.wide, port, strict=True):
        error, rounding = distance(ours, wide) or 0.0, distance(expected, wide) or 0.0
        allowed = FAULT * max(rounding, torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0.0)
        words = f"{rounding:.2g} from the yardstick", f"{error:.2g} from it"
        seam = Seam(path, stage, None, *words, error, allowed)
        worst = found.setdefault(path.partition(".")[0], seam)
        is_fault = worst.verdict is Verdict.OTHER
        if not is_fault and seam.distance * worst.allowed > worst.distance * seam.allowed:
            found[path.partition(".")[0]] = seam
    return [*found.values()]
