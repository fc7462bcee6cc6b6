"""The decoder's frames, of the original, the yardstick and the port, given the same latents."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchport import shard
from torchport.compile import network
from torchport.compile.eager import Eager
from torchport.compile.in_force import stage_in_force
from torchport.stages.family import Steps
from torchport.task import Task
from torchport.task.devices import devices
from torchport.verify import pictures
from torchport.verify.facts import Decoded
from torchport.verify.yardstick import computing_in, wide_dtype, wide_module, widened


def recorded(task: Task, folder: Path, latents: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Returns the frames of the original and of the yardstick for the same latents, and what both were given."""
    frames = {"original": _frames(task, folder, latents, False), "yardstick": _frames(task, folder, latents, True)}
    return {**frames, "latents": latents}


def _frames(task: Task, folder: Path, latents: Mapping[str, torch.Tensor], is_wide: bool) -> torch.Tensor:
    stage = dataclasses.replace(task.family.STAGES[-1], prepare=None)
    parts = network.loaded(task, stage, folder)
    call: Any = None if stage.network is None else network.eager(task, stage, parts, folder)
    if call is not None and is_wide:
        dtype = wide_dtype(task.settings.dtypes[str(stage.network)])
        call = _Widened(Eager(wide_module(call.module, dtype), call.how, call.outputs, call.name), dtype)
    frames: torch.Tensor = stage.run(parts, call, task.settings, Steps(), **latents)["frames"]
    return frames


@dataclasses.dataclass(frozen=True)
class _Widened:
    """A network in the yardstick's dtype, called with inputs in the original's."""

    eager: Eager
    dtype: torch.dtype
    batches: bool = False
    drops: bool = False

    def place(self, **inputs: Any) -> dict[str, Any]:
        """Returns the inputs as they are."""
        return inputs

    def __call__(self, **inputs: Any) -> Any:
        """Returns what the network returns."""
        with computing_in(self.dtype):
            return self.eager(**widened(inputs, self.dtype))


def compared(task: Task, folder: Path, recording: Mapping[str, Any]) -> Decoded:
    """Returns how far the port's frames are from the original's, given the same latents."""
    stage = task.family.STAGES[-1]
    with stage_in_force(task, stage):
        parts = network.loaded(task, stage, folder)
        call = None
        if stage.network is not None:
            mesh = shard.make_mesh(task.job.mesh, devices(task.machine))
            weights = network.placed(task, stage, parts, mesh, folder)
            call = network.compiled(task, stage, network.module_of(stage, parts), weights, mesh)
        frames = stage.run(parts, call, task.settings, Steps(), **recording["latents"])["frames"]
    yardstick = recording["yardstick"].float()
    own = (frames.float() - yardstick).abs().flatten(2).amax(2)[0]
    original = (recording["original"].float() - yardstick).abs()
    worst = int(own.argmax())
    shown = pictures.beside(recording["original"][0, worst], frames[0, worst])
    return Decoded(float(original.max()), float(own.max()), worst, shown)
