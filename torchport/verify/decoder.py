"""The decoder's frames, of the original, the yardstick and the port, from the same latents; and where they part.

A port may decode all frames in one call that the original decodes one after the other. So what a module returns is
compared as a whole: its calls, joined along the dim in which they differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import torch

from torchport import engine, patch, shard
from torchport.compile import network
from torchport.compile.in_force import stage_in_force
from torchport.stages import frames
from torchport.stages.family import Steps
from torchport.task import Task
from torchport.verify.borders import WideNetwork, call_counts, compiled_network, on_one_device, outputs_kept
from torchport.verify.report import FAULT, Decoded
from torchport.verify.yardstick import distance, is_sampled, least_rounding, sampled, shape_of, wide_dtype

_Returned = dict[str, list[torch.Tensor]]
"""The outputs of each module, one for each of its calls, by the module's path; only some rows of large tensors."""


def original_frames(task: Task, folder: Path, latents: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Returns the frames that the original and the yardstick decode from the same latents, and the latents."""
    original, yardstick = (_frames(task, folder, latents, is_wide) for is_wide in (False, True))
    return {"original": original, "yardstick": yardstick, "latents": latents}


def _frames(
    task: Task, folder: Path, latents: Mapping[str, torch.Tensor], is_wide: bool, returned: _Returned | None = None
) -> torch.Tensor:
    """Returns the frames that the original decodes, in a wider dtype if `is_wide`; `returned` gets modules' outputs."""
    stage = dataclasses.replace(task.family.STAGES[-1], prepare=None)
    parts = network.loaded(task, stage, folder)
    call = None if stage.network is None else network.eager(task, stage, parts, folder)
    if call is not None and is_wide:
        call = WideNetwork(call, wide_dtype(task.settings.dtypes[str(stage.network)]))
    modules = {} if call is None or returned is None else _inner_modules(call.module)
    kept = {} if returned is None else returned
    with outputs_kept(modules, lambda path, x: kept.setdefault(path, []).append(sampled(x.detach().clone()))):
        return frames.levels(stage.run(parts, call, task.settings, Steps(), **latents)["frames"])


def compare(task: Task, folder: Path, recorded: Mapping[str, Any]) -> Decoded:
    """Returns the distance of the port's frames, and of the original's, from those decoded in a wider dtype."""
    stage = task.family.STAGES[-1]
    with stage_in_force(task, stage):
        if stage.network is None:
            call, parts = None, network.loaded(task, stage, folder)
        else:
            call, parts = compiled_network(task, stage, folder)
        ported = frames.levels(stage.run(parts, call, task.settings, Steps(), **recorded["latents"])["frames"])
    yardstick = recorded["yardstick"].float()
    by_frame = (ported.float() - yardstick).abs().flatten(2).amax(2)[0]  # [frames], in levels of 255
    original = (recorded["original"].float() - yardstick).abs()
    worst = int(by_frame.argmax())
    pictures = frame_pictures(recorded["original"][0, worst], ported[0, worst])
    return Decoded(rounding=float(original.max()), added=float(by_frame.max()), frame=worst, pictures=pictures)


def first_fault(task: Task, original: Task, folder: Path, recorded: Mapping[str, Any]) -> tuple[str, frozenset[str]]:
    """Returns the decoder's first module, in the order of the port's calls, whose error is above `FAULT` roundings, as
    "vae.decoder.mid_block (5.2 times the rounding)", and the ids of the patches that are called in it. Both are empty
    if no module that port and original call has such an error.
    """
    stage = task.family.STAGES[-1]
    if stage.network is None:
        return "", frozenset()
    exact, rounded = _Returned(), _Returned()
    with stage_in_force(original, stage):
        for returned, is_wide in ((exact, True), (rounded, False)):
            _frames(original, folder, recorded["latents"], is_wide, returned)  # fills `returned`
    with stage_in_force(task, stage) as ledger:
        ported, patches = _port_returns(task, folder, recorded["latents"], ledger)
    for path, tensors in ported.items():
        # Pairs of the port's output with the yardstick's, and with the original's.
        with_exact, with_rounded = (_joined(tensors, returned.get(path, [])) for returned in (exact, rounded))
        if with_exact is None or with_rounded is None:
            continue
        added, rounding = distance(*with_exact), distance(with_rounded[1], with_exact[1])
        ratio = (added or 0.0) / max(rounding or 0.0, least_rounding(with_rounded[1]))
        if ratio > FAULT:
            return f"{stage.network}.{path} ({ratio:.3g} times the rounding)", patches[path]
    return "", frozenset()


def _port_returns(
    task: Task, folder: Path, latents: Mapping[str, torch.Tensor], ledger: patch.Ledger
) -> tuple[_Returned, dict[str, frozenset[str]]]:
    """Decodes with the port on one device; returns the outputs of each module, and the ids of the patches in its call.

    The decoder is compiled, so the hooks see values only while it is traced: each puts a callback into the program,
    which gets the module's output when the program runs.
    """
    task = on_one_device(task)
    stage = task.family.STAGES[-1]
    returned = _Returned()
    patches = dict[str, frozenset[str]]()
    call, parts = compiled_network(task, stage, folder)
    counts_before: dict[str, dict[str, int]] = {}

    def keep(path: str, tensor: torch.Tensor) -> None:
        """Makes the program keep the output of a module, which is traced now."""
        if path not in returned:
            before = counts_before[path]
            after = call_counts(ledger)
            returned[path], patches[path] = [], frozenset(key for key in after if after[key] != before[key])
        outputs = returned[path]
        jax.debug.callback(lambda x: outputs.append(sampled(shard.to_torch(x))), engine.array(tensor), ordered=True)

    modules = _inner_modules(network.module_of(stage, parts))
    for path, module in modules.items():
        module.register_forward_pre_hook(lambda *_, path=path: counts_before.update({path: call_counts(ledger)}))
    with outputs_kept(modules, keep):
        stage.run(parts, call, task.settings, Steps(), **latents)
    jax.effects_barrier()  # the callbacks have run then
    return returned, patches


def _inner_modules(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return {path: part for path, part in module.named_modules() if path}


def _joined(port: Sequence[torch.Tensor], original: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns a module's outputs in port and original, each joined along some dim, if this gives both one shape.

    A port may return all frames in one call, [1, C, 5, H, W], and the original in two, with 2 and 3 frames. None if no
    dim gives one shape.
    """
    if len(port) == len(original) == 1:
        return (port[0], original[0]) if shape_of(port[0]) == shape_of(original[0]) else None
    if not original or len({tensor.ndim for tensor in (*port, *original)}) != 1 or is_sampled([*port, *original]):
        return None
    for dim in range(port[0].ndim):
        with contextlib.suppress(RuntimeError):  # `torch.cat` refuses these shapes along this dim
            pair = torch.cat(tuple(port), dim), torch.cat(tuple(original), dim)
            if pair[0].shape == pair[1].shape:
                return pair
    return None


def frame_pictures(original_CHW: torch.Tensor, port_CHW: torch.Tensor) -> dict[str, bytes]:
    """Returns PNG files by caption: two uint8 frames [3, H, W], and their difference, amplified to be visible."""
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
