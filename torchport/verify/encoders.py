"""The port's text encoders on the devices, compared with the original's on the host, module by module."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchport.compile import network, ported
from torchport.compile.in_force import stage_in_force
from torchport.stages.family import Stage, Steps
from torchport.task import Task, encoder_names
from torchport.verify.borders import outputs_kept, to_host
from torchport.verify.report import FAULT, Seam, Verdict
from torchport.verify.yardstick import computing_in, distance, sampled, wide_dtype

Values = list[tuple[str, torch.Tensor]]
"""Pairs of a module's path and its output, in the order in which the modules return."""


@dataclasses.dataclass(frozen=True)
class Yardstick:
    """The outputs of the original's encoders, in their dtype and in a wider one, the yardstick's."""

    host: Values  #: The outputs of the encoders' modules.
    wide: Values  #: The same outputs, computed in the wider dtype.
    roundings: dict[str, float]  #: The distance of the original from the yardstick, by output of the stage.


def yardstick_of(task: Task, stage: Stage, folder: Path, original: Mapping[str, torch.Tensor]) -> Yardstick:
    """Runs the original's encoders, under its patches, in their dtype and in a wider one; `original` has the outputs of
    the stage in the encoders' dtype.
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
    """Returns the outputs of a port's encoders, and a seam for each encoder: its first faulty module, or the worst.

    There are no seams if `yardstick` is None or has no modules, as in a capture.
    """
    with stage_in_force(task, stage) as ledger:
        parts = network.loaded(task, stage, folder)
        programs = ported.encoders(task, stage, parts, ledger)
        parts |= programs  # in place of the encoders
        outputs = stage.run(parts, None, task.settings, Steps())
        if yardstick is None or not yardstick.host:
            return outputs, []
        for program in programs.values():
            program.compiled.jit = False  # hooks see values only without `jax.jit`
        port, _ = _watched(task, stage, parts, {name: program.original for name, program in programs.items()})
    return outputs, _seams(stage.name, yardstick, port)


def _watched(
    task: Task, stage: Stage, parts: Mapping[str, Any], encoders: Mapping[str, torch.nn.Module]
) -> tuple[Values, dict[str, torch.Tensor]]:
    """Runs a stage, and returns the outputs of all modules of its encoders, and the outputs of the stage."""
    values: Values = []
    modules = {
        f"{name}.{path}".rstrip("."): module
        for name, encoder in encoders.items()
        for path, module in encoder.named_modules()
    }
    with outputs_kept(modules, lambda path, tensor: values.append((path, sampled(to_host(tensor))))):
        outputs = stage.run(parts, None, task.settings, Steps())  # None: the stage has no network
    return values, outputs


def _seams(stage: str, yardstick: Yardstick, port: Values) -> list[Seam]:
    """Returns the seam of each encoder's first faulty module; else of its module with the greatest error / allowed."""
    worst: dict[str, Seam] = {}  # by encoder
    outputs = zip(yardstick.host, yardstick.wide, port, strict=True)
    for (path, original), (_, wide), (_, output) in outputs:
        error, rounding = distance(output, wide) or 0.0, distance(original, wide) or 0.0
        allowed = FAULT * max(rounding, torch.finfo(original.dtype).eps if original.is_floating_point() else 0.0)
        words = f"{rounding:.2g} from the yardstick", f"{error:.2g} from it"
        seam = Seam(path, stage, None, *words, distance=error, allowed=allowed)  # None: it is of no denoising step
        encoder = path.partition(".")[0]
        before = worst.setdefault(encoder, seam)
        is_worse = seam.distance * before.allowed > before.distance * seam.allowed  # products: `allowed` may be 0
        if before.verdict is Verdict.SAME and is_worse:
            worst[encoder] = seam
    return [*worst.values()]
