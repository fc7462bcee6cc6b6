"""A job's LoRA files: whether they are there, and how manifests name them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torchport.config import Document
from torchport.config.card import DENOISING, Card, Job
from torchport.errors import CheckpointMissingError, UnknownNameError, nearest
from torchport.files.folder import expand_home, has_file
from torchport.load.lora import check_format


def check_components(card: Card, job: Job, family: ModuleType, document: Document) -> None:
    """Refuses a LoRA of what the loop does not call.

    Raises:
        UnknownNameError: There is one.
    """
    names = [str(stage.network) for stage in family.STAGES if stage.name in DENOISING]
    for number, lora in enumerate(job.lora):
        if lora.component not in names:
            fact = f"'{card.model}' takes no steps with a network '{lora.component}'"
            place = document.place(["lora", number, "component"])
            raise UnknownNameError(place, fact, nearest(lora.component, names), name=lora.component)


def check_files(job: Job, stage: str, overrides: Sequence[str], document: Document) -> None:
    """Refuses a LoRA that is not there, or that is a pickle.

    A plan, which is made without the checkpoint's files too, needs none, and checks those that are here itself. Nor
    does a stage that takes no steps, unless a flag names the file: it is compared with what the steps were taken with.

    Raises:
        CheckpointMissingError: One is missing.
        CheckpointForeignError: One is a pickle.
    """
    if stage not in (*DENOISING, "all") and not any(flag.startswith("lora") for flag in overrides):
        return
    for number, lora in enumerate(job.lora):
        place, file = document.place(["lora", number, "path"]), expand_home(lora.path)
        if not has_file(file):
            raise CheckpointMissingError(place, f"There is no file '{lora.path}'", "Name a LoRA in safetensors")
        check_format(file)


def rows(job: Job) -> list[dict[str, Any]]:
    """Returns a job's LoRA files as manifests list them: by their bytes, wherever they lie."""
    listed: list[dict[str, Any]] = []
    for lora in job.lora:
        with expand_home(lora.path).open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        row = {"file": Path(lora.path).name, "sha256": sha256, "scale": lora.scale, "component": lora.component}
        listed.append(row)
    return listed
