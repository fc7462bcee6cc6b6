"""The first frame: what a viewer shows of a picture, or a refusal by its format; nothing else is started on a file."""

import fractions
import io
import random
import struct
import zlib

import av
import numpy
import pytest
import torch
from PIL import Image, ImageOps

from torchport.errors import BadValueError
from torchport.save import video
from torchport.stages import picture

RAMP = numpy.linspace(0, 65535, 256).astype(numpy.uint16).reshape(1, 256).repeat(4, 0)
COLOURS = Image.fromarray(numpy.random.default_rng(0).integers(0, 255, (6, 8, 3), numpy.uint8))


def saved(tmp_path, image, format_, name="picture", **options):
    file = tmp_path / f"{name}.{format_.lower()}"
    image.save(file, format_, **options)
    return file


def refusal(file):
    with pytest.raises(BadValueError) as caught:
        picture.read(file)
    return str(caught.value).removeprefix(f"--image {file}: ")


@pytest.mark.parametrize("format_", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "RGBA", "LA"])
def test_every_format_is_read_as_upstreams_loader_reads_it(tmp_path, format_, mode):
    if (format_, mode) in {("JPEG", "P"), ("JPEG", "RGBA"), ("JPEG", "LA"), ("BMP", "LA"), ("GIF", "LA")}:
        pytest.skip("there is no such file")
    file = saved(tmp_path, COLOURS.convert(mode), format_)
    with Image.open(file) as there:
        wanted = ImageOps.exif_transpose(there).convert("RGB")
    read = picture.read(file.rename(tmp_path / "called.anything"))
    assert read.mode == "RGB" and read.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(("format_", "dtype"), [("PNG", "<u2"), ("TIFF", "<u2"), ("TIFF", ">u2")])
def test_sixteen_bits_become_eight_and_not_white(tmp_path, format_, dtype):
    if dtype == ">u2":
        image = Image.frombytes("I;16B", (256, 4), RAMP.astype(dtype).tobytes())
    else:
        image = Image.fromarray(RAMP)
    read = numpy.asarray(picture.read(saved(tmp_path, image, format_)))
    assert read[0, :, 0].tolist() == list(range(256))
    assert read[..., 0].tolist() == read[..., 2].tolist() and read.mean() == 127.5


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(colour_type, depth, rows, *chunks):
    """Returns a PNG of 8 x 4 pixels that no encoder of Pillow writes."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 4, depth, colour_type, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_colours_of_sixteen_bits_are_read(tmp_path):
    rows = b"".join(b"\0" + numpy.arange(24).astype(">u2").__mul__(2570).astype(">u2").tobytes() for _ in range(4))
    (tmp_path / "a.png").write_bytes(png(2, 16, rows))
    read = numpy.asarray(picture.read(tmp_path / "a.png")).astype(int)
    assert abs(read[0].flatten() - numpy.arange(24) * 10).max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_picture_is_upright(tmp_path, format_, orientation):
    upright = Image.new("RGB", (16, 8))
    upright.paste((255, 255, 255), (0, 0, 8, 4))
    exif = Image.Exif()
    exif[0x0112] = orientation
    back = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # what undoes each of them
    turned = upright.transpose(Image.Transpose(back[orientation])) if orientation > 1 else upright
    read = picture.read(saved(tmp_path, turned, format_, exif=exif))
    assert read.size == (16, 8)
    assert (read.getpixel((1, 1))[0] > 200, read.getpixel((14, 6))[0] < 50) == (True, True)


def transparent(mode):
    image = COLOURS.convert("RGBA")
    image.putpixel((2, 2), (9, 9, 9, 254))
    return image.convert(mode)


def test_transparency_is_refused_and_none_is_not(tmp_path):
    said = "It is transparent in places, and what is seen there depends on who shows it. Save it on a background, "
    said += "without transparency."
    for mode, format_ in (("RGBA", "PNG"), ("LA", "PNG"), ("RGBA", "WEBP"), ("RGBA", "TIFF"), ("PA", "PNG")):
        if mode != "PA":
            assert refusal(saved(tmp_path, transparent(mode), format_, mode)) == said
    for mode, key in (("P", 1), ("L", 8), ("RGB", COLOURS.getpixel((0, 0))), ("1", 0)):
        image = COLOURS.convert(mode)
        image.putpixel((1, 1), key)
        assert refusal(saved(tmp_path, image, "PNG", f"key_{mode}", transparency=key)) == said
    (tmp_path / "grey.png").write_bytes(png(0, 16, (b"\0" + b"\1\2" * 8) * 4, chunk(b"tRNS", b"\1\2")))
    assert "depends on who shows them" in refusal(tmp_path / "grey.png")


@pytest.mark.parametrize(
    ("mode", "format_"), [("CMYK", "JPEG"), ("CMYK", "TIFF"), ("F", "TIFF"), ("I", "TIFF"), ("LAB", "TIFF")]
)
def test_colours_that_depend_on_who_shows_them_are_refused(tmp_path, mode, format_):
    image = Image.new(mode, (8, 8))
    said = f"Its pixels are {mode}, and what is seen of them depends on who shows them. Save it in RGB or grey, with 8 "
    assert refusal(saved(tmp_path, image, format_)) == said + "or 16 bits a colour."


@pytest.mark.parametrize("format_", ["GIF", "PNG", "WEBP", "TIFF"])
def test_what_moves_or_has_pages_is_refused(tmp_path, format_):
    others = [ImageOps.invert(COLOURS), COLOURS.rotate(90, expand=False)]
    file = saved(tmp_path, COLOURS, format_, save_all=True, append_images=others)
    text = refusal(file)
    assert text == "It has 3 frames or pages. Save the one that the video begins with as a picture of its own."


def test_a_cameras_jpeg_with_a_preview_is_its_first_picture(tmp_path):
    file = saved(tmp_path, COLOURS, "MPO", save_all=True, append_images=[COLOURS.resize((4, 3))])
    assert picture.read(file).size == COLOURS.size


LIST = "Name a picture in one of PNG, JPEG, WebP, BMP, GIF, TIFF."
OTHERS = [
    "EPS",
    "PPM",
    "ICO",
    "TGA",
    "PCX",
    "SGI",
    "DDS",
    "JPEG2000",
    "ICNS",
    "AVIF",
    "PDF",
    "XBM",
    "QOI",
]


@pytest.mark.parametrize("format_", OTHERS)
def test_another_format_is_refused_by_its_name_and_nothing_is_started_on_it(tmp_path, monkeypatch, format_):
    monkeypatch.setattr("subprocess.Popen.__init__", lambda *args, **kwargs: pytest.fail("a program was started"))
    file = tmp_path / "picture.png"
    image = COLOURS.resize((32, 32))
    image.convert("1" if format_ == "XBM" else image.mode).save(file, format_)
    name = "CUR" if format_ == "TGA" else format_  # a TGA has no sign of its own, and begins as a cursor does
    assert refusal(file) == f"Its format is {name}. {LIST}"


@pytest.mark.parametrize("start", ["%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "\xc5\xd0\xd3\xc6" + "\0" * 28])
def test_postscript_is_never_run(tmp_path, monkeypatch, start):
    monkeypatch.setattr("subprocess.Popen.__init__", lambda *args, **kwargs: pytest.fail("a program was started"))
    file = tmp_path / "x.png"
    file.write_bytes(start.encode("latin-1") + b"(gone) (w) file closefile showpage\n%%EOF\n")
    assert refusal(file) == f"Its format is EPS. {LIST}"


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"<svg xmlns='a'/>", "SVG"),
        (b"%PDF-1.7", "PDF"),
        (b"\0\0\0\x18ftypheic\0\0", "HEIF, or a video"),
        (b"<?xml", "XML"),
    ],
)
def test_what_pillow_does_not_know_has_a_name_too(tmp_path, content, name):
    (tmp_path / "x.png").write_bytes(content)
    assert refusal(tmp_path / "x.png") == f"Its format is {name}. {LIST}"


def test_a_broken_picture_is_refused_whatever_is_broken(tmp_path):
    rng = random.Random(37)
    file = tmp_path / "x"
    for format_ in ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "MPO"):
        buffer = io.BytesIO()
        COLOURS.save(buffer, format_)
        whole, read = buffer.getvalue(), 0
        for _ in range(60):
            damaged = bytearray(whole[: rng.choice([len(whole), rng.randrange(len(whole))])])
            for _ in range(rng.choice([0, 1, 4])):
                if damaged:
                    damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            file.write_bytes(damaged)
            try:
                read += picture.read(file).mode == "RGB"
            except BadValueError as error:
                assert error.fact
        assert read < 60


def test_the_first_frames_of_a_video_are_read_and_nothing_else_is_one(tmp_path):
    clip = numpy.random.default_rng(0).integers(0, 255, (4, 3, 16, 16), numpy.uint8)
    file = tmp_path / "clip.mov"
    file.write_bytes(video.encoded(torch.from_numpy(clip), 8, iter))
    with av.open(str(file)) as opened:
        wanted = [frame.to_image().tobytes() for frame in opened.decode(video=0)]
    assert [frame.tobytes() for frame in picture.read(file, 3)] == wanted[:3]
    for content, frames, words in (
        (file.read_bytes(), 5, "It has 4 of the job's 5 frames. Name a longer video, or take fewer frames."),
        (file.read_bytes()[:300], 3, "It is no video that can be read. Name a video in MP4, MOV, MKV, WebM or AVI."),
        (b"#EXTM3U\n#EXTINF:1,\nclip.mov\n", 1, "It is no video that can be read."),  # it names other files to open
        (b"ffconcat version 1.0\nfile clip.mov\n", 1, "It is no video that can be read."),
    ):
        other = tmp_path / "other.mp4"
        other.write_bytes(content)
        with pytest.raises(BadValueError, match=words):
            picture.read(other, frames)


def clip(file, rotation=0, **stream_options):
    """Writes a video of three frames, 16 x 8, that players turn."""
    with av.open(str(file), "w") as opened:
        stream = opened.add_stream("libx264", rate=8, options={"preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = 16, 8, "yuv420p"
        for name, value in stream_options.items():
            setattr(stream.codec_context, name, value)
        for level in (0, 100, 200):
            pixels = numpy.full((8, 16, 3), level, numpy.uint8)
            pixels[:, :8] = 255
            opened.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        opened.mux(stream.encode())
    data = bytearray(file.read_bytes())
    if rotation:  # the matrix of the track's header, for a quarter turn
        at = data.index(b"tkhd") + 4 + 40
        data[at : at + 20] = struct.pack(">5i", 0, 65536, 0, -65536, 0)
        file.write_bytes(data)
    return file


def test_a_video_is_as_a_player_shows_it(tmp_path):
    assert picture.read(clip(tmp_path / "plain.mp4"), 1)[0].size == (16, 8)
    turned = picture.read(clip(tmp_path / "phone.mp4", rotation=90), 1)[0]
    assert turned.size == (8, 16)
    white = numpy.asarray(turned).mean((1, 2))  # what was on the left is at the top
    assert white[0] > 200 > 100 > white[-1]
    with pytest.raises(BadValueError, match=r"Its pixels are not square\. Save it with square pixels"):
        picture.read(clip(tmp_path / "wide.mp4", sample_aspect_ratio=fractions.Fraction(2)), 1)
    file = clip(tmp_path / "damaged.mp4")
    data = bytearray(file.read_bytes())
    start = data.index(b"mdat") + 4
    data[start + 700 : -600] = bytes(len(data[start + 700 : -600]))
    file.write_bytes(data)
    with pytest.raises(BadValueError, match="It is no video that can be read"):
        picture.read(file, 3)
