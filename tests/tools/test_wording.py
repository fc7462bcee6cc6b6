"""Wordings: they say what they claim to say, and the same numbers give the same ones."""

import numpy
import pytest
from scenes import wording
from scenes.scene import COLOURS, Scene, scenes

SCENE = Scene("square", "green", "left", "white")


def several(write, scene=SCENE, count=200):
    random = numpy.random.default_rng(0)
    return [write(scene, random) for _ in range(count)]


def test_a_whole_wording_names_shape_colour_direction_and_a_white_background():
    for made in several(wording.whole):
        text = made.text.lower()
        assert "green" in text and "white" in text and "left" in text and ("square" in text or "box" in text), text
        assert made.fits(SCENE) and sum(map(made.fits, scenes())) == 1


def test_a_background_that_goes_without_saying_is_black():
    silent = [made for made in several(wording.whole, Scene("disc", "red", "up")) if "black" not in made.text]
    assert silent and all(made.wanted["background"] == "black" for made in silent)


def test_a_part_of_a_scene_fits_several():
    for made in several(wording.partial):
        named = {"green": "colour", "left": "direction"}
        assert all((word in made.text.lower()) == (name in made.wanted) for word, name in named.items()), made
        assert made.fits(SCENE) and sum(map(made.fits, scenes())) > 1


def test_a_quoted_colour_is_the_one_that_counts():
    made = several(wording.quoted)
    assert {each.quoted for each in made} == {"green"}
    assert {colour for each in made for colour in COLOURS if f'"{colour}"' in each.text.lower()} == set(COLOURS)


def test_another_word_in_quotes_changes_nothing():
    for made in several(wording.titled):
        assert made.text.endswith(f'with the word "{made.quoted}"') and made.fits(SCENE)


@pytest.mark.parametrize("write", [wording.whole, wording.partial, wording.quoted, wording.titled])
def test_the_same_numbers_give_the_same_wordings(write):
    assert several(write) == several(write) and len({made.text for made in several(write)}) > 10


def test_texts_are_written_as_people_write():
    for write in (wording.whole, wording.partial, wording.quoted):
        for made in several(write):
            assert made.text == " ".join(made.text.split()) and " ," not in made.text and made.text


def test_the_empty_prompt_fits_every_scene():
    assert wording.NOTHING.text == "" and all(map(wording.NOTHING.fits, scenes()))
