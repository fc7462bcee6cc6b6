"""Scenes: all of them once, a shape where it should be, clips that move one latent position in a latent frame."""

import numpy
import pytest
from scenes.scene import FRAMES, HEIGHT, SHAPES, WIDTH, Scene, clip, coverage, is_held_out, scenes


def test_there_are_96_scenes_and_twelve_of_them_are_held_out():
    assert len(set(scenes())) == 96
    assert sum(map(is_held_out, scenes())) == 12


def test_what_is_held_out_is_so_before_both_backgrounds_and_every_word_stays_known():
    known = [scene for scene in scenes() if not is_held_out(scene)]
    for name in ("shape", "colour", "direction", "background"):
        assert {getattr(scene, name) for scene in known} == {getattr(scene, name) for scene in scenes()}
    assert all(is_held_out(Scene(s.shape, s.colour, s.direction, "white")) == is_held_out(s) for s in scenes())


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shapes_centre_of_mass_is_where_it_is_said_to_be(shape):
    covered = coverage(shape, 60.0, 50.0)
    rows, columns = numpy.mgrid[0:HEIGHT, 0:WIDTH] + 0.5
    assert (covered * columns).sum() / covered.sum() == pytest.approx(60.0, abs=0.1)
    assert (covered * rows).sum() / covered.sum() == pytest.approx(50.0, abs=0.3)


def test_a_clip_moves_by_sixteen_pixels_in_four_frames():
    video = clip(Scene("disc", "red", "right"))
    assert video.shape == (FRAMES, HEIGHT, WIDTH, 3)
    assert numpy.array_equal(video[4, :, 16:], video[0, :, :-16])
    assert numpy.array_equal(clip(Scene("disc", "red", "right"), 5, offset=8), video[8:])


def test_the_prompt_of_a_scene_says_all_of_it():
    assert Scene("disc", "red", "right").prompt == "a red disc moves right"
    assert Scene("square", "blue", "up", "white").prompt == "a blue square moves up on a white background"
