"""Writes the final video and its contact sheet, whole or not at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch

from torchport.files import atomic

if TYPE_CHECKING:
    from PIL.Image import Image

PRESET = "veryfast"
"""Of x264: a third of the default's time for a noisy video, the same error to 0.4 dB, and no larger file."""


def write_video(file: Path, frames_FCHW: torch.Tensor, fps: int, track: Callable[..., Any]) -> None:
    """Writes an H.264 video of frames [F, 3, height, width]: bytes, or numbers from 0 to 1; height and width even."""
    import av

    with atomic.writing(file) as temporary, av.open(temporary, "w", format="mp4") as video:
        stream = video.add_stream("libx264", rate=fps, options={"preset": PRESET})
        stream.height, stream.width = frames_FCHW.shape[2:]
        stream.pix_fmt = "yuv420p"
        for frame in track(frames_FCHW):
            video.mux(stream.encode(av.VideoFrame.from_ndarray(_pixels(frame), format="rgb24")))
        video.mux(stream.encode())


def write_picture(file: Path, frame_CHW: torch.Tensor, facts: Mapping[str, str]) -> None:
    """Writes a picture as PNG, whole.

    Args:
        frame_CHW: [3, height, width], bytes, or numbers from 0 to 1.
        facts: Texts by their keys, which lie in the file: how it was made.
    """
    from PIL import Image, PngImagePlugin

    texts = PngImagePlugin.PngInfo()
    for key, value in facts.items():
        texts.add_itxt(key, value)
    with atomic.writing(file) as temporary:
        Image.fromarray(_pixels(frame_CHW)).save(temporary, format="PNG", pnginfo=texts)


def write_contact_sheet(file: Path, frames_FCHW: torch.Tensor, columns: int = 4, rows: int = 3) -> None:
    """Writes up to `columns` x `rows` frames, evenly spaced and in order, as one PNG at most 1600 pixels wide."""
    from PIL import Image

    count, number = len(frames_FCHW), min(len(frames_FCHW), columns * rows)
    frames = [frames_FCHW[round(position * (count - 1) / max(1, number - 1))] for position in range(number)]
    write_grid(file, [Image.fromarray(_pixels(frame)) for frame in frames], columns)


def write_grid(file: Path, images: Sequence[Image], columns: int) -> None:
    """Writes pictures in rows, as one PNG at most 1600 pixels wide. One of another size than the first is fitted in."""
    from PIL import ImageOps
    from PIL.Image import new

    columns, gap, (width, height) = min(columns, len(images)), 4, images[0].size
    scale = min(1.0, 1600 / (columns * width))
    wide, high = max(1, round(width * scale)), max(1, round(height * scale))
    lines = math.ceil(len(images) / columns)
    sheet = new("RGB", (columns * (wide + gap) - gap, lines * (high + gap) - gap), "white")
    for position, image in enumerate(images):
        cell = (wide, high)
        fitted = image.resize(cell) if image.size == (width, height) else ImageOps.pad(image, cell, color="white")
        sheet.paste(fitted, (position % columns * (wide + gap), position // columns * (high + gap)))
    with atomic.writing(file) as temporary:
        sheet.save(temporary, format="PNG")


def _pixels(frame_CHW: torch.Tensor) -> numpy.ndarray[Any, Any]:
    """Returns a frame as bytes [height, width, 3]; numbers are rounded to the nearest of 256 levels."""
    if frame_CHW.is_floating_point():
        frame_CHW = (frame_CHW.float().clamp(0, 1) * 255).round().to(torch.uint8)
    return numpy.ascontiguousarray(frame_CHW.permute(1, 2, 0).numpy())
