"""The picture that a video begins with, as a viewer shows it: upright, in 8 bits, RGB. Any other is refused. And the
frames of a video that is edited.

Pillow recognises a file by its content, whatever it is called, and for some formats it starts another program on it
(Ghostscript for PostScript). So formats are named here.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchport.errors import BadValueError
from torchport.patch.declared.replacement import Explained

FORMATS = {"PNG": "PNG", "JPEG": "JPEG", "WEBP": "WebP", "BMP": "BMP", "GIF": "GIF", "TIFF": "TIFF"}
"""Pillow's names of the formats that are read. A camera's JPEG with a preview inside it opens as an MPO."""

VIDEOS = {b"ftyp": ("mp4", 4), b"\x1a\x45\xdf\xa3": ("matroska", 0), b"AVI ": ("avi", 8)}
"""FFmpeg's names of the formats of videos that are read, by bytes at a place. Others may name further files to open."""

_STARTS = {b"%PDF": "PDF", b"<svg": "SVG", b"<?xml": "XML"}
_PLAIN = ("1", "L", "P", "RGB")
_WITH_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")
_GREY_16 = ("I;16", "I;16L", "I;16B", "I;16N")


def read(file: Path | None, frames: int | None = None) -> Any:
    """Returns a picture as a `PIL.Image.Image` in RGB; or a list of that many first frames of a video.

    Raises:
        BadValueError: Another format, a picture that is broken or moves, or one whose colours depend on who shows it; a
            video that is broken or shorter.
    """
    from PIL import Image, ImageOps

    assert file is not None
    if frames is not None:
        return _frames(file, frames)
    place = f"--image {file}"
    # Whatever else Pillow raises means a broken picture.
    with Explained(lambda _: BadValueError(place, "It is no picture that can be read", "Name a picture")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of damaged metadata, and reads the picture
            with file.open("rb") as stream:
                name = next(_formats(stream.read(64)), None)
            if name is None or name not in FORMATS:
                formats = ", ".join(FORMATS.values())
                fact = f"Its format is {name}" if name else "It is no picture that can be read"
                raise BadValueError(place, fact, f"Name a picture in one of {formats}" if name else "Name a picture")
            with Image.open(str(file), formats=[name]) as picture:
                if getattr(picture, "is_animated", False) and picture.format != "MPO":
                    fact = f"It has {getattr(picture, 'n_frames', 'several')} frames or pages"
                    raise BadValueError(place, fact, "Save the one that the video begins with as a picture of its own")
                return _in_rgb(ImageOps.exif_transpose(picture), place)


def _frames(file: Path, count: int) -> list[Any]:
    """Returns the first frames of a video, each as a `PIL.Image.Image`; refuses another file and a shorter one."""
    import av

    place, named = f"--image {file}", "Name a video in MP4, MOV, MKV, WebM or AVI"
    with Explained(lambda _: BadValueError(place, "It is no video that can be read", named)):
        with file.open("rb") as reader:
            start = reader.read(16)
        formats = [name for sign, (name, at) in VIDEOS.items() if start[at : at + len(sign)] == sign]
        if not formats:
            raise BadValueError(place, "It is no video that can be read", named)
        with av.open(str(file), format=formats[0]) as container:
            stream = container.streams.video[0]
            stream.codec_context.options = {"err_detect": "explode"}  # FFmpeg would make up what is damaged
            frames = [*itertools.islice(container.decode(stream), count)]
            if not frames or any(frame.is_corrupt for frame in frames):
                raise BadValueError(place, "It is no video that can be read", named)
            if (stream.sample_aspect_ratio or 1) != 1:
                raise BadValueError(place, "Its pixels are not square", "Save it with square pixels")
            pictures = [frame.to_image().rotate(frame.rotation, expand=True) for frame in frames]
    if len(pictures) < count:
        remedy = "Name a longer video, or take fewer frames"
        raise BadValueError(place, f"It has {len(pictures)} of the job's {count} frames", remedy)
    return pictures


def _formats(start: bytes) -> Iterator[str]:
    """Yields names of formats that fit a file's first bytes: Pillow's, then some that Pillow cannot read."""
    from PIL import Image

    Image.init()
    for name in [*FORMATS, *Image.ID]:
        accept = Image.OPEN[name][1] if name in Image.OPEN else None
        if accept is not None and accept(start) is True:  # it may also be a text: why Pillow cannot read the file
            yield name
    yield from (name for sign, name in _STARTS.items() if start.lstrip().startswith(sign))
    if start[4:8] == b"ftyp":
        yield "HEIF, or a video"


def _in_rgb(picture: Any, place: str) -> Any:
    """Returns a picture in RGB with 8 bits; refuses transparency, and colours that depend on who shows them."""
    from PIL import Image

    mode = picture.mode
    if mode in _GREY_16 and "transparency" not in picture.info:
        import numpy

        levels = numpy.asarray(picture).astype(numpy.uint32)  # 65535 levels to 255, rounded: 65535 is 257 * 255
        return Image.fromarray(((levels + 128) // 257).astype(numpy.uint8)).convert("RGB")
    if mode in _WITH_ALPHA or (mode in _PLAIN and "transparency" in picture.info):
        picture = picture.convert("RGBA")
        if picture.getextrema()[3][0] < 255:
            fact = "It is transparent in places, and what is seen there depends on who shows it"
            raise BadValueError(place, fact, "Save it on a background, without transparency")
    elif mode not in _PLAIN:
        fact = f"Its pixels are {mode}, and what is seen of them depends on who shows them"
        raise BadValueError(place, fact, "Save it in RGB or grey, with 8 or 16 bits a colour")
    return picture.convert("RGB")
