"""What runs have written, and how far one tensor is from another."""

import dataclasses
from unittest import mock

import torch
from safetensors.torch import load_file

from torchport import engine, patch, save, shard
from torchport.compile import network
from torchport.stages import frames
from torchport.stages.family import Steps
from torchport.task import accept
from torchport.task.devices import devices

ROUNDED_OTHERWISE = 5e-4
"""The share of a video's bytes that may be one level apart where the numbers under them differ by rounding errors."""


def tensor_of(folder, stage="denoise", name="latents"):
    return load_file(save.file_of(folder, stage))[name]


def latents_of(folder):
    return tensor_of(folder)


def frames_of(folder):
    return tensor_of(folder, "decode", "frames")


def levels(video):
    """Returns a video of numbers as bytes: the nearest of 256 levels."""
    return (video.float().clamp(0, 1) * 255).round().to(torch.uint8)


def bits(folder, stage):
    """Returns the checksum of a stage's artefact."""
    return save.read_manifest(save.file_of(folder, stage)).sha256


def difference(ours, reference):
    """Returns max|a - b| / max|b|, of a reference whose size makes that mean something."""
    largest = reference.abs().max().item()
    assert 0.5 <= largest <= 20
    return (ours.double() - reference.double()).abs().max().item() / largest


def same_frames(ours, reference):
    """Whether two videos in bytes differ by one level at most, and only where numbers were rounded otherwise."""
    assert ours.dtype == reference.dtype == torch.uint8 and ours.shape == reference.shape
    assert len(reference.unique()) > 16  # a picture
    apart = (ours.int() - reference.int()).abs()
    return apart.max() <= 1 and (apart > 0).float().mean() <= ROUNDED_OTHERWISE


def video_of(request, inputs):
    """Returns the video that a request's stage `decode` makes of a folder's latents, as numbers and not yet bytes.

    It is computed by the stage itself, compiled or eager, of the tiny checkpoint.
    """
    later = {"prompt": None, "negative_prompt": None, "seed": None, "noise": None, "image": None}
    task = accept(dataclasses.replace(request, stage="decode", **later))
    [stage] = task.stages
    latents = load_file(save.file_of(inputs, "denoise"))
    numbers = mock.patch.object(frames, "pixels", lambda video: (video, torch.zeros((), dtype=torch.int32)))
    with numbers, patch.applied(task.patches([stage]), stage="decode") as ledger:
        folder = network.write_tiny(task)
        parts = network.loaded(task, stage, folder)
        with engine.operators({op.target: op.function for op in ledger.ops()}):
            if task.original:
                call = network.eager(task, stage, parts, folder)
            else:
                mesh, module = shard.make_mesh(task.job.mesh, devices(task.machine)), network.module_of(stage, parts)
                weights = network.placed(task, stage, parts, mesh, folder)
                call = network.compiled(task, stage, module, weights, mesh, trace=ledger.trace())
            return stage.run(parts, call, task.settings, Steps(), **latents)["frames"]
