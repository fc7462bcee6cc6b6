"""How far two runs are from each other: frames, latents step by step, and what is not there."""

import math

import pytest
import torch
from fakes.run_folders import frames, latents, write_run

from torchport.compare import distance, folder
from torchport.errors import ArtefactForeignError


@pytest.fixture
def runs(tmp_path):
    """Writes two runs and reads them."""

    def of(a=None, b=None):
        return (folder.read(write_run(tmp_path / name, **(run or {}))) for name, run in (("a", a), ("b", b)))

    return of


def test_frames_are_compared_as_a_whole_and_by_the_worst(runs):
    video = frames()
    video[0, 1] += 2
    result = distance.distance(*runs(None, {"video": video})).frames
    assert result.psnr == pytest.approx(20 * math.log10(255) - 10 * math.log10(2)), "a mean square of 0 and 4"
    assert result.worst_psnr == pytest.approx(20 * math.log10(255 / 2)) and result.worst_psnr_frame == 2
    c1 = (0.01 * 255) ** 2
    ssim = (2 * 100 * 102 + c1) / (100**2 + 102**2 + c1)
    assert result.worst_ssim == pytest.approx(ssim) and result.worst_ssim_frame == 2
    assert result.ssim == pytest.approx((1 + ssim) / 2) and result.greatest == 2


def test_small_frames_have_no_ssim(runs):
    video = torch.zeros(1, 2, 3, 8, 8, dtype=torch.uint8)
    result = distance.distance(*runs({"video": video}, {"video": video + 1})).frames
    assert result.ssim is result.worst_ssim is result.worst_ssim_frame is None and result.psnr < 49


def test_latents_are_compared_after_each_step_and_at_last(runs):
    a = {"steps": [latents(1), latents(2)]}
    b = {"steps": [latents(1), 2 * latents(2)], "last": -latents()}
    one, two, last = distance.distance(*runs(a, b)).latents
    assert (one.step, one.difference, one.same) == (1, 0, True) and one.cosine == pytest.approx(1)
    assert (two.step, two.difference, two.same) == (2, 0.5, False) and two.cosine == pytest.approx(1)
    assert (last.step, last.difference) == (None, 2) and last.cosine == pytest.approx(-1)


@pytest.mark.parametrize(
    ("a", "b", "numbers", "unkept"),
    [
        ([1, 2], [1, 2], [1, 2, None], ""),
        ([], [1, 2], [None], "A kept latents after none of its 2 steps"),
        ([1], [1, 2], [1, None], "A kept latents after 1 of its 2 steps"),
        ([], [], [None], "A kept latents after none of its 2 steps, and B kept latents after none of its 2 steps"),
    ],
)
def test_steps_that_a_run_did_not_keep_are_named(runs, tmp_path, a, b, numbers, unkept):
    result = distance.distance(*runs({"steps": [*map(latents, a)]}, {"steps": [*map(latents, b)]}))
    assert [row.step for row in result.latents] == numbers
    remedy = ". A run with --set keep_steps=true keeps them after each" if unkept else ""
    assert result.unkept == unkept.replace("A k", f"{tmp_path}/a k").replace("B k", f"{tmp_path}/b k") + remedy


def test_steps_of_another_number_of_steps_are_not_compared(runs, tmp_path):
    """After the same number of steps they have other noise."""
    kept = {"steps": [latents(1), latents(2)]}
    result = distance.distance(*runs(kept, {**kept, "settings": {"steps": 4}}))
    assert [row.step for row in result.latents] == [None]
    assert result.unkept == f"{tmp_path}/a takes 2 steps, and {tmp_path}/b 4: only their last latents are compared"


def test_videos_of_two_sizes_are_refused(runs, tmp_path):
    with pytest.raises(ArtefactForeignError) as caught:
        distance.distance(*runs(None, {"video": torch.zeros(1, 2, 3, 16, 32, dtype=torch.uint8)}))
    assert str(caught.value) == (
        f"{tmp_path}/b/decode.safetensors: Its 'frames' have the shape [2, 3, 16, 32], and those of the first run "
        "[2, 3, 16, 16]. Compare runs of one model, one size and one number of frames."
    )


def test_latents_of_two_shapes_are_refused(runs, tmp_path):
    with pytest.raises(ArtefactForeignError) as caught:
        distance.distance(*runs(None, {"last": torch.ones(1, 8, 4)}))
    assert f"{tmp_path}/b/denoise.safetensors: Its 'latents' have the shape [1, 8, 4], and" in str(caught.value)


def test_latents_that_differ_without_frames_and_the_reverse_are_warned_of(runs):
    a, b = runs(None, {"video": frames(101)})
    assert distance.distance(a, b).warning == "the latents are the same, and the frames differ: only the decodes differ"
    assert distance.distance(a, a).warning == ""


def test_frames_that_hide_a_difference_of_latents_are_warned_of(runs):
    text = distance.distance(*runs(None, {"last": latents() + 1e-6})).warning
    assert text == "the latents differ, and the frames are the same: the difference is too small for a byte"
