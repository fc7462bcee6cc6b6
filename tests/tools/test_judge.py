"""The judge: right on every scene, right on a damaged one, and silent on noise."""

import numpy
import pytest
from scenes.judge import judged
from scenes.scene import FRAMES, HEIGHT, WIDTH, Scene, clip, scenes


def test_every_scene_is_what_it_is():
    assert [judged(clip(scene)[::4]).mistakes(scene) for scene in scenes()] == [[]] * 96


def test_noise_is_nothing():
    random = numpy.random.default_rng(0)
    verdict = judged(random.integers(0, 256, (FRAMES, HEIGHT, WIDTH, 3), dtype=numpy.uint8))
    assert (verdict.shape, verdict.colour, verdict.direction) == (None, None, None)


@pytest.mark.parametrize("level", [0, 12, 128, 255])
def test_a_grey_video_shows_nothing_that_moves(level):
    verdict = judged(numpy.full((FRAMES, HEIGHT, WIDTH, 3), level, numpy.uint8))
    assert (verdict.shape, verdict.colour, verdict.direction) == (None, None, None)
    assert verdict.background == {0: "black", 12: "black", 128: None, 255: "white"}[level]


def test_a_scene_under_noise_of_30_levels_is_still_seen():
    scene = Scene("triangle", "yellow", "left", "black")
    noise = numpy.random.default_rng(0).normal(0, 8, (FRAMES, HEIGHT, WIDTH, 3))
    assert judged(numpy.clip(clip(scene) + noise, 0, 255).astype(numpy.uint8)).agrees(scene)


def test_a_shape_that_stands_still_has_no_direction():
    scene = Scene("disc", "red", "up")
    verdict = judged(numpy.repeat(clip(scene)[:1], FRAMES, 0))
    assert (verdict.shape, verdict.colour, verdict.direction) == ("disc", "red", None)
    assert verdict.mistakes(scene) == ["direction: None"]


def test_what_is_wrong_is_named():
    asked = Scene("disc", "red", "up", "white")
    assert judged(clip(Scene("square", "blue", "up", "black"))).mistakes(asked) == [
        "shape: square",
        "colour: blue",
        "background: black",
    ]


def test_a_blob_of_no_shape_has_none():
    video = clip(Scene("square", "green", "right"))
    video[:, 56:72] = 12  # a black bar cuts it into two
    verdict = judged(video)
    assert verdict.shape is None and verdict.colour == "green" and verdict.overlap < 0.7
    assert str(verdict).startswith("green None, right, on black, overlap 0.")
