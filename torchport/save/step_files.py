"""Files of the latents after each denoising step: `denoise.step-0007.safetensors`."""

from __future__ import annotations

import re
from pathlib import Path

from torchport.config.card import StageName
from torchport.files import atomic
from torchport.save.artefact import file_of


def name(stage: StageName, number: int) -> str:
    """Returns the name of the artefact that holds the latents after a step; steps count from 1."""
    return f"{stage}.step-{number:04}"


def numbers(folder: Path, stage: StageName) -> list[int]:
    """Returns the steps of a stage whose latents a folder holds, in order."""
    files = folder.glob(f"{stage}.step-*.safetensors")
    matches = (re.fullmatch(rf"{stage}\.step-(\d{{4}})\.safetensors", file.name) for file in files)
    return sorted(int(match[1]) for match in matches if match)


def remove_after(folder: Path, stage: StageName, number: int) -> None:
    """Removes the latents after all steps of a stage behind this one: an earlier run's, or to be taken again."""
    atomic.remove(*(file_of(folder, name(stage, later)) for later in numbers(folder, stage) if later > number))
