"""The video and its contact sheet."""

import io

import av
import imageio.v3
import numpy
import pytest
import torch
from PIL import Image

from torchport.save import video

FRAMES = torch.linspace(0, 1, 6 * 3 * 32 * 48).reshape(6, 3, 32, 48)


def test_a_video_has_its_frames_size_and_rate(tmp_path):
    (tmp_path / "video.mp4").write_bytes(video.encoded(FRAMES, 8, iter))
    read = imageio.v3.imread(tmp_path / "video.mp4", plugin="pyav")
    assert read.shape == (6, 32, 48, 3)
    assert imageio.v3.immeta(tmp_path / "video.mp4", plugin="pyav")["fps"] == 8
    expected = (FRAMES * 255).permute(0, 2, 3, 1).numpy()
    assert numpy.abs(read.astype(float) - expected).mean() < 8


@pytest.mark.parametrize(("rate", "written"), [(24000, 24000), (16000, 16000), (12345, 48000)])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_video_has_its_sound(rate, written, channels):
    times = torch.arange(rate) / rate
    tones = torch.stack([torch.sin(2 * torch.pi * hertz * times) / 2 for hertz in (440, 880)])[:channels]
    with av.open(io.BytesIO(video.encoded(FRAMES, 8, iter, (tones, rate)))) as file:
        assert file.streams.video[0].frames == 6
        [audio] = file.streams.audio
        assert (audio.rate, audio.channels) == (written, channels)
        heard = numpy.concatenate([frame.to_ndarray() for frame in file.decode(audio)], axis=1)
    for samples, hertz in zip(heard, (440, 880), strict=False):
        spectrum = numpy.abs(numpy.fft.rfft(samples))
        assert abs(spectrum.argmax() * written / len(samples) - hertz) < 2
        assert samples.std() == pytest.approx(0.5 / 2**0.5, rel=0.05)


def test_a_contact_sheet_shows_evenly_spaced_frames_in_order():
    frames = (torch.arange(23) / 22).reshape(23, 1, 1, 1).expand(23, 3, 16, 32)
    with Image.open(io.BytesIO(video.contact_sheet(frames))) as image:
        sheet = numpy.asarray(image)
    assert sheet.shape == (3 * 16 + 2 * 4, 4 * 32 + 3 * 4, 3)  # white gaps of four pixels between them
    assert (sheet[17] == 255).all()
    shown = [int(sheet[row * 20 + 8, column * 36 + 16, 0]) for row in range(3) for column in range(4)]
    assert shown == sorted(set(shown)) and shown[0] == 0 and shown[-1] == 255


def test_a_contact_sheet_of_few_large_frames_is_scaled_down():
    with Image.open(io.BytesIO(video.contact_sheet(torch.zeros(1, 3, 100, 3200)))) as sheet:
        assert sheet.size == (1600, 50)


def test_a_grid_has_pictures_of_other_sizes_fitted_into_the_cell_of_the_first():
    images = [Image.new("RGB", size, "black") for size in ((40, 20), (20, 20), (80, 40))]
    with Image.open(io.BytesIO(video.grid(images, columns=2))) as image:
        grid = numpy.asarray(image)[..., 0]
    assert grid.shape == (2 * 20 + 4, 2 * 40 + 4)
    assert (grid[:20, :40] == 0).all() and (grid[24:, :40] == 0).all() and (grid[24:, 44:] == 255).all()
    assert (grid[:20, 54:74] == 0).all() and (grid[:20, 44:54] == 255).all() and (grid[:20, 74:] == 255).all()


def test_pixels_are_the_nearest_of_256_levels():
    frame = torch.tensor([0.0, 0.5, 1.0, 2.0, -1.0, 0.499 / 255]).reshape(1, 1, 6).expand(3, 1, 6)
    assert video._pixels(frame)[0, :, 0].tolist() == [0, 128, 255, 255, 0, 0]


def test_bytes_are_written_as_they_are():
    frame = torch.arange(256, dtype=torch.uint8).reshape(1, 8, 32).expand(3, 8, 32)
    assert (video._pixels(frame) == frame.permute(1, 2, 0).numpy()).all()
    levels = (FRAMES * 255).round().to(torch.uint8)
    assert video.encoded(FRAMES, 8, iter) == video.encoded(levels, 8, iter)
    assert video.contact_sheet(FRAMES) == video.contact_sheet(levels)


@pytest.mark.parametrize("width", [2, 46, 48, 128])  # ffmpeg pads the rows of some
def test_planes_make_the_same_frame_as_pixels(width):
    levels = (torch.rand(3, 16, width, generator=torch.Generator().manual_seed(0)) * 255).to(torch.uint8)
    pixels = av.VideoFrame.from_ndarray(video._pixels(levels), format="rgb24").reformat(format="yuv420p")
    assert (video._frame(levels).to_ndarray() == pixels.to_ndarray()).all()


def test_a_picture_keeps_its_pixels_and_says_how_it_was_made(tmp_path):
    pixels = torch.arange(3 * 5 * 7, dtype=torch.uint8).reshape(3, 5, 7)  # odd sides, which no video has
    video.write_picture(tmp_path / "image.png", pixels, {"prompt": "Ein schöner Tag", "seed": "3"})
    with Image.open(tmp_path / "image.png") as image:
        assert image.text == {"prompt": "Ein schöner Tag", "seed": "3"}
        assert torch.equal(torch.from_numpy(numpy.array(image)).permute(2, 0, 1), pixels)
