"""The decoder's frames, of the original, the yardstick and the port, from the same latents."""

from __future__ import annotations

import dataclasses
import io
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
from torchport.verify.borders import compiled_network
from torchport.verify.report import Decoded
from torchport.verify.yardstick import computing_in, wide_dtype, wide_module, widened


def original_frames(task: Task, folder: Path, latents: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Returns the frames of the original and of the yardstick for the same latents, and these."""
    frames = {"original": _frames(task, folder, latents, False), "yardstick": _frames(task, folder, latents, True)}
    return {**frames, "latents": latents}


def _frames(task: Task, folder: Path, latents: Mapping[str, torch.Tensor], is_wide: bool) -> torch.Tensor:
    stage = dataclasses.replace(task.family.STAGES[-1], prepare=None)
    parts = network.loaded(task, stage, folder)
    call: Any = None if stage.network is None else network.eager(task, stage, parts, folder)
    if call is not None and is_wide:
        dtype = wide_dtype(task.settings.dtypes[str(stage.network)])
        call = _WideNetwork(Eager(wide_module(call.module, dtype), call.how, call.outputs, call.name), dtype)
    frames: torch.Tensor = stage.run(parts, call, task.settings, Steps(), **latents)["frames"]
    return frames


@dataclasses.dataclass(frozen=True)
class _WideNetwork:
    """A network in the yardstick's dtype, called with inputs in the original's."""

    eager: Eager
    dtype: torch.dtype
    batches: bool = False
    drops: bool = False

    def place(self, **inputs: Any) -> dict[str, Any]:
        return inputs

    def __call__(self, **inputs: Any) -> Any:
        with computing_in(self.dtype):
            return self.eager(**widened(inputs, self.dtype))


def compare(task: Task, folder: Path, recorded: Mapping[str, Any]) -> Decoded:
    """Returns how far the port's frames are from the original's; see `original_frames`."""
    stage = task.family.STAGES[-1]
    with stage_in_force(task, stage):
        if stage.network is None:
            call, parts = None, network.loaded(task, stage, folder)
        else:
            mesh = shard.make_mesh(task.job.mesh, devices(task.machine))
            call, parts = compiled_network(task, stage, folder, mesh)
        frames = stage.run(parts, call, task.settings, Steps(), **recorded["latents"])["frames"]
    yardstick = recorded["yardstick"].float()
    by_frame = (frames.float() - yardstick).abs().flatten(2).amax(2)[0]
    original = (recorded["original"].float() - yardstick).abs()
    worst = int(by_frame.argmax())
    pictures = frame_pictures(recorded["original"][0, worst], frames[0, worst])
    return Decoded(float(original.max()), float(by_frame.max()), worst, pictures)


def frame_pictures(original_CHW: torch.Tensor, port_CHW: torch.Tensor) -> dict[str, bytes]:
    """Returns two frames of bytes [3, H, W] and their difference, made visible, as PNG by what they are."""
    difference = (original_CHW.int() - port_CHW.int()).abs()
    greatest = int(difference.max())
    times = 255 // greatest if greatest else 1
    return {
        "the original": _png(original_CHW),
        "the port": _png(port_CHW),
        f"the difference, {times} times": _png((difference * times).to(torch.uint8)),
    }


def _png(frame_CHW: torch.Tensor) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(frame_CHW.permute(1, 2, 0).contiguous().numpy()).save(file, "PNG")
    return file.getvalue()
