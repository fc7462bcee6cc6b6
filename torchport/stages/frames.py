"""Frames: a video as bytes, made where the video is computed."""

from __future__ import annotations

import torch

from torchport.errors import NotFiniteError

OUTPUTS = ("frames", "not_finite")
"""What `pixels` returns, for `Stage.outputs`."""


def pixels(video: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a video as bytes, each value rounded to the nearest of 256 levels; it may be traced.

    Args:
        video: Numbers from 0 to 1, of any shape and floating-point dtype.

    Returns:
        uint8 of that shape, and how many of the numbers are NaN or infinite, int32: bytes cannot say so.
    """
    frames = (video.float().clamp(0, 1) * 255).round().to(torch.uint8)
    return frames, not_finite(video)


def levels(video: torch.Tensor) -> torch.Tensor:
    """Returns the `frames` of a stage as bytes: bytes as they are, numbers from 0 to 1 rounded; refuses NaN."""
    return video if video.dtype == torch.uint8 else checked(*pixels(video))


def not_finite(video: torch.Tensor) -> torch.Tensor:
    """Returns how many numbers are NaN or infinite, int32; it may be traced."""
    return (~torch.isfinite(video)).sum().to(torch.int32)


def checked(frames: torch.Tensor, not_finite: torch.Tensor) -> torch.Tensor:
    """Returns the frames of `pixels`; raises if some numbers were not finite. Tensors without values pass."""
    from torch._subclasses.fake_tensor import FakeTensor

    if not isinstance(not_finite, FakeTensor) and int(not_finite):
        fact = f"'frames' were made of {int(not_finite)} values of {frames.numel()} that are NaN or infinite"
        remedy = "Compare with --backend original: if that is finite, a patch or a precision is wrong, else the weights"
        raise NotFiniteError("decode.safetensors", fact, f"Nothing was written. {remedy}", key="frames")
    return frames
