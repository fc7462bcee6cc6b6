"""The output folder of a finished run, as it is compared: its manifests, frames and latents."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from torchport import save
from torchport.compare import facts
from torchport.config.card import DENOISING, STAGES, StageName
from torchport.errors import ArtefactForeignError, ArtefactMissingError
from torchport.save import step_files
from torchport.save.manifest import Manifest
from torchport.stages.frames import pixels

MADE_BY = "the command that made it"


@dataclasses.dataclass(frozen=True)
class Run:
    """A run's outputs.

    Attributes:
        folder: Where they lie.
        manifests: Of all stages that are there, in order.
        frames: The video before the codec: bytes [F, 3, height, width].
        latents: What `denoise` ended with, of any shape and floating-point dtype.
        steps: The stages whose files hold the latents after a step, by its number from 1.
    """

    folder: Path
    manifests: dict[StageName, Manifest]
    frames: torch.Tensor
    latents: torch.Tensor
    steps: dict[int, StageName]

    @property
    def total(self) -> int | None:
        """How many steps the run took."""
        total: int | None = facts.job(self.manifests["denoise"]).get("steps")
        return total

    def latents_after(self, number: int) -> torch.Tensor:
        """Returns the latents after a step.

        Raises:
            ArtefactBrokenError: Their file is damaged.
            ArtefactForeignError: Another run left it.
        """
        stage = self.steps[number]
        name = step_files.name(stage, number)
        tensors, manifest = save.read(self.folder, name, {}, {}, MADE_BY)
        assert manifest is not None  # hand-written ports have no such files
        theirs, ours = facts.origin(manifest), facts.origin(self.manifests[stage])
        other = [field for field in {**ours, **theirs} if theirs.get(field) != ours.get(field)]
        if other or manifest.done != number or "latents" not in tensors:
            what = facts.name(other[0]) if other else "the step"
            fact = f"It is not of the run that made {stage}.safetensors: {what} is another"
            remedy = "Finish the run that left it, or remove it"
            raise ArtefactForeignError(str(save.file_of(self.folder, name)), fact, remedy)
        return tensors["latents"]


def read(folder: Path) -> Run:
    """Returns the outputs of a finished run, verified.

    Raises:
        ArtefactMissingError: There is no run, or it has not decoded.
        ArtefactBrokenError: An artefact is damaged.
        ArtefactForeignError: An artefact of another schema, or made from another one than lies beside it.
    """
    if not folder.is_dir():
        raise ArtefactMissingError(str(folder), "There is no such folder", "Name the output folder of a run")
    if not save.file_of(folder, "denoise").is_file():
        fact = "It holds no denoise.safetensors, and so no run"
        raise ArtefactMissingError(str(folder), fact, "Name the folder that `torchport run --out` wrote to")
    if not save.file_of(folder, "decode").is_file():
        remedy = f"Run --stage decode with the flags of that run and --out {folder}"
        raise ArtefactMissingError(str(save.file_of(folder, "decode")), "The run has no frames", remedy)
    manifests = {
        stage: save.read_manifest(save.file_of(folder, stage), MADE_BY)
        for stage in STAGES
        if save.file_of(folder, stage).is_file()
    }
    for stage, manifest in manifests.items():
        save.check_lineage(folder, stage, manifest)
    denoising = [stage for stage in DENOISING if stage in manifests]
    steps = {number: stage for stage in denoising for number in step_files.numbers(folder, stage)}
    video = _tensor(folder, "decode", "frames")
    levels = video if video.dtype == torch.uint8 else pixels(video)[0]
    return Run(folder, manifests, levels[0], _tensor(folder, "denoise", "latents"), dict(sorted(steps.items())))


def _tensor(folder: Path, stage: StageName, name: str) -> torch.Tensor:
    """Returns the tensor of an artefact that is compared.

    Raises:
        ArtefactForeignError: It has none of this name.
    """
    tensors, _ = save.read(folder, stage, {}, {}, MADE_BY)
    if name not in tensors:
        fact = f"It holds {', '.join(map(repr, sorted(tensors)))}, and no '{name}'"
        raise ArtefactForeignError(str(save.file_of(folder, stage)), fact, f"Only runs with '{name}' can be compared")
    return tensors[name]
