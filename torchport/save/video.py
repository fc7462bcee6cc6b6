"""Makes the final video, its contact sheet and pictures."""

from __future__ import annotations

import collections
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch

from torchport.files import atomic

if TYPE_CHECKING:
    from av import Packet, VideoFrame
    from av.container import OutputContainer
    from PIL.Image import Image

PRESET = "veryfast"
"""Of x264: a third of the default's time for a noisy video, the same error to 0.4 dB, and no larger file."""
AAC_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000, 64000, 88200, 96000)
"""Samples a second that AAC has."""
AHEAD = 32
"""Frames that wait for x264."""


def encoded(
    frames_FCHW: torch.Tensor, fps: int, track: Callable[..., Any], sound: tuple[torch.Tensor, int] | None = None
) -> bytes:
    """Returns an H.264 video of frames [F, 3, height, width]: bytes, or numbers from 0 to 1; height and width even.
    `sound` is [1 or 2 channels, samples], numbers from -1 to 1, with the samples a second; it becomes AAC.
    """
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as video, ThreadPoolExecutor() as pool:
        stream = video.add_stream("libx264", rate=fps, options={"preset": PRESET})
        stream.height, stream.width = frames_FCHW.shape[2:]
        stream.pix_fmt = "yuv420p"
        # Several frames at a time. PyAV's default, slices of one frame at a time, is slower and makes a larger file.
        stream.codec_context.thread_type = "FRAME"
        if sound is not None:
            video.mux(_audio(video, *sound))
        for frame in track(_ahead(pool, frames_FCHW)):
            video.mux(stream.encode(frame))
        video.mux(stream.encode())
    return file.getvalue()


def _audio(video: OutputContainer, sound: torch.Tensor, rate: int) -> list[Packet]:
    """Returns the packets of a video's audio stream. A rate that AAC does not have becomes 48 kHz."""
    from av import AudioFrame, AudioResampler

    layout = "mono" if len(sound) == 1 else "stereo"
    stream = video.add_stream("aac", rate=rate if rate in AAC_RATES else 48000, layout=layout)
    resampler = AudioResampler(format="fltp", layout=layout, rate=stream.rate, frame_size=1024)
    frame = AudioFrame.from_ndarray(sound.float().contiguous().numpy(), format="fltp", layout=layout)
    frame.sample_rate = rate
    frames = [*resampler.resample(frame), *resampler.resample(None)]  # None: what is left in it
    return [packet for each in (*frames, None) for packet in stream.encode(each)]


def _ahead(pool: ThreadPoolExecutor, frames_FCHW: torch.Tensor) -> Iterator[VideoFrame]:
    """Yields frames as x264 takes them, in order. Threads make the next ones meanwhile, at most `AHEAD`."""
    waiting: collections.deque[Future[VideoFrame]] = collections.deque()
    for frame in frames_FCHW:
        waiting.append(pool.submit(_frame, frame))
        if len(waiting) > AHEAD:
            yield waiting.popleft().result()
    yield from (each.result() for each in waiting)


def _frame(frame_CHW: torch.Tensor) -> VideoFrame:
    """Returns a frame as x264 takes it. Its planes are copied as they lie: to make it of pixels takes twice as long."""
    from av import VideoFrame

    height, width = frame_CHW.shape[1:]
    frame = VideoFrame(width, height, "gbrp")
    for plane, channel in zip(frame.planes, (1, 2, 0), strict=True):  # green, blue, red
        rows = numpy.frombuffer(plane, numpy.uint8).reshape(height, plane.line_size)
        rows[:, :width] = _levels(frame_CHW[channel]).numpy()
    return frame.reformat(format="yuv420p")


def write_picture(file: Path, frame_CHW: torch.Tensor, facts: Mapping[str, str]) -> None:
    """Writes a frame [3, height, width] as PNG, whole: bytes, or numbers from 0 to 1. The file also has `facts`, texts
    by their keys: how it was made.
    """
    from PIL import Image, PngImagePlugin

    texts = PngImagePlugin.PngInfo()
    for key, value in facts.items():
        texts.add_itxt(key, value)
    with atomic.writing(file) as temporary:
        Image.fromarray(_pixels(frame_CHW)).save(temporary, format="PNG", pnginfo=texts)


def contact_sheet(frames_FCHW: torch.Tensor) -> bytes:
    """Returns up to twelve frames, evenly spaced and in order, four in a row, as one PNG at most 1600 pixels wide."""
    from PIL import Image

    count = len(frames_FCHW)
    number = min(len(frames_FCHW), 12)
    frames = [frames_FCHW[round(position * (count - 1) / max(1, number - 1))] for position in range(number)]
    return grid([Image.fromarray(_pixels(frame)) for frame in frames], columns=4)


def grid(images: Sequence[Image], columns: int) -> bytes:
    """Returns pictures in rows, as one PNG at most 1600 pixels wide. Cells have the shape of the first picture."""
    from PIL import ImageOps
    from PIL.Image import new

    columns = min(columns, len(images))
    width, height = images[0].size
    gap = 4  # pixels between two cells
    scale = min(1.0, 1600 / (columns * width))
    wide = max(1, round(width * scale))
    high = max(1, round(height * scale))
    lines = math.ceil(len(images) / columns)
    sheet = new("RGB", (columns * (wide + gap) - gap, lines * (high + gap) - gap), "white")
    for position, image in enumerate(images):
        cell = (wide, high)
        fitted = image.resize(cell) if image.size == (width, height) else ImageOps.pad(image, cell, color="white")
        sheet.paste(fitted, (position % columns * (wide + gap), position // columns * (high + gap)))
    file = io.BytesIO()
    sheet.save(file, format="PNG")
    return file.getvalue()


def _pixels(frame_CHW: torch.Tensor) -> numpy.ndarray[Any, Any]:
    """Returns a frame as bytes [height, width, 3]."""
    return numpy.ascontiguousarray(_levels(frame_CHW).permute(1, 2, 0).numpy())


def _levels(x: torch.Tensor) -> torch.Tensor:
    """Returns bytes as they are, and numbers from 0 to 1 as the nearest of 256 levels."""
    return (x.float().clamp(0, 1) * 255).round().to(torch.uint8) if x.is_floating_point() else x
