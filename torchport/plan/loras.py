"""The LoRA files of a plan's job: a file that is here is checked by its header; a plan needs none of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from torchport.compile import network
from torchport.config.card import LoraFile
from torchport.files.folder import expand_home, has_file
from torchport.load import checkpoint, lora
from torchport.stages.family import Stage
from torchport.task import Task


def check(task: Task, stage: Stage) -> None:
    """Refuses a LoRA file of a stage's network that is here and would be refused when it is loaded.

    Merged weights have the same shapes, so nothing else of a plan depends on it.

    Raises:
        CheckpointBrokenError, CheckpointForeignError: A file, a key or a shape that does not fit.
        DeadRuleError: A rule of the card that names no layer.
    """
    name = str(stage.network)
    layout = network.layout(task, name)
    here = [one for one in task.job.lora if one.component == name and _why_unchecked(task, one) is None]
    if not here or layout.loras is None:
        return
    shapes = {key: tuple(tensor.shape) for key, tensor in network.published(task, name).state_dict().items()}
    names = {key: key for key in shapes}
    folder = _folder(task, name)
    if layout.rename and folder is not None:
        names |= {key: stored.name for key, stored in layout.stored(folder).items()}
    files = [lora.Lora(expand_home(one.path), one.scale) for one in here]
    lora.additions(dataclasses.replace(layout.loras, files=files), shapes, names)


def unchecked(task: Task) -> list[str]:
    """Returns what a plan takes for granted of LoRA files, in words: those that it cannot check."""
    whys = [(one.path, _why_unchecked(task, one)) for one in task.job.lora]
    return [f"the LoRA '{path}' fits: {why}" for path, why in whys if why is not None]


def _why_unchecked(task: Task, one: LoraFile) -> str | None:
    """Returns why a file cannot be checked; None if it can."""
    if not has_file(expand_home(one.path)):
        return "the file is not here"
    if network.layout(task, one.component).rename and _folder(task, one.component) is None:
        return "it may have the checkpoint's names, and that is not here"
    return None


def _folder(task: Task, component: str) -> Path | None:
    """Returns where a component of the checkpoint lies; None if it is not here."""
    root = None if task.is_tiny else checkpoint.local(task.checkpoint)
    return None if root is None else task.component_folder(root, component)
