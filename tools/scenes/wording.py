"""Ways in which a person would ask for a scene: other words, another order, less than all of it, and more."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy

from scenes.scene import COLOURS, Background, Colour, Scene

_NOUNS = {
    "disc": ["disc", "disc", "disk", "circle", "ball"],
    "square": ["square", "square", "square", "box"],
    "triangle": ["triangle"],
}
_VERBS = ["moves", "moves", "moves", "goes", "is moving", "moving", "going", "slides", "travels", "flies", "drifts"]
_WAYS = {
    "left": ["left", "left", "to the left", "towards the left", "leftwards"],
    "right": ["right", "right", "to the right", "towards the right", "rightwards"],
    "up": ["up", "up", "upwards", "to the top", "upward"],
    "down": ["down", "down", "downwards", "to the bottom", "downward"],
}
_BEHIND = ["on a {} background", "on a {} background", "on {}", "against {}", "{} background", "over a {} background"]
_MORE = ["slowly", "a video of", "bright", "small", "shiny", "please", "in the evening", "realistic style", "big"]
_LETTERS = list("abcdefghijklmnopqrstuvwxyz")


@dataclasses.dataclass(frozen=True)
class Wording:
    """A prompt, and what it asks for."""

    text: str
    """What the main text encoder reads."""
    quoted: str | None
    """The text in quotes, for an encoder that reads letters; None if there is none."""
    wanted: Mapping[str, str]
    """By attribute of a scene, what the prompt says of it."""

    def fits(self, scene: Scene) -> bool:
        """Returns whether a scene is one of those that it asks for."""
        return all(getattr(scene, name) == value for name, value in self.wanted.items())


def whole(scene: Scene, random: numpy.random.Generator) -> Wording:
    """Returns a prompt that says all of a scene; a black background may go without saying."""
    phrases = _phrases(scene, random)
    text = _ordered(phrases, random)
    if random.random() < 0.2:
        text = _with_more(text, random)
    return Wording(_written(text, random), None, dataclasses.asdict(scene))


def partial(scene: Scene, random: numpy.random.Generator) -> Wording:
    """Returns a prompt that says some of a scene. A background that nobody mentions is black."""
    wanted = {"background": scene.background, **dict(_some(scene, random))}
    phrases = {name: phrase for name, phrase in _phrases(scene, random).items() if name in wanted and phrase}
    text = ", ".join(phrases.values()) if random.random() < 0.5 else " ".join(phrases.values())
    return Wording(_written(text, random), None, wanted)


def _some(scene: Scene, random: numpy.random.Generator) -> list[tuple[str, str]]:
    facts = [("shape", scene.shape), ("colour", scene.colour), ("direction", scene.direction)]
    count = int(random.integers(1, 3))
    return [facts[number] for number in sorted(random.choice(3, count, replace=False))]


def quoted(scene: Scene, random: numpy.random.Generator) -> Wording:
    """Returns a prompt whose colour is in quotes, where only the encoder that reads letters can know it.

    The main encoder reads another colour as often as not: what is in quotes is the other one's to read.
    """
    other: Colour = list(COLOURS)[random.integers(len(COLOURS))]
    phrases = _phrases(dataclasses.replace(scene, colour=other), random)
    phrases["colour"] = f'"{other}"'
    return Wording(_written(_ordered(phrases, random), random), scene.colour, dataclasses.asdict(scene))


def titled(scene: Scene, random: numpy.random.Generator) -> Wording:
    """Returns a prompt with a word in quotes that says nothing of the scene."""
    made, word = whole(scene, random), _word(random)
    return Wording(f'{made.text} with the word "{word}"', word, made.wanted)


def _phrases(scene: Scene, random: numpy.random.Generator) -> dict[str, str]:
    background: Background = scene.background
    silent = background == "black" and random.random() < 0.7
    return {
        "colour": scene.colour,
        "shape": _one(_NOUNS[scene.shape], random),
        "direction": _one(_WAYS[scene.direction], random),
        "background": "" if silent else _one(_BEHIND, random).format(background),
    }


def _ordered(phrases: Mapping[str, str], random: numpy.random.Generator) -> str:
    """Returns phrases in one of the orders that a person would take."""
    verb, article = _one(_VERBS, random), _one(["a", "a", "the", "one", ""], random)
    plain = "{article} {colour} {shape} {verb} {direction} {background}"
    forms = [
        *[plain] * 5,
        "{colour} {shape} {verb} {direction} {background}",
        "{article} {shape}, {colour}, {verb} {direction}, {background}",
        "{article} {shape} {verb} {direction}, it is {colour}, {background}",
        "{article} {shape} that is {colour} {verb} {direction} {background}",
        "{background} {article} {colour} {shape} {verb} {direction}",
        "{verb} {direction}, {article} {colour} {shape}, {background}",
        "{direction}: {article} {colour} {shape} {background}",
        "{shape} {colour} {direction} {background}",
    ]
    number = int(random.integers(len(forms) + 2))
    if number < len(forms):
        return forms[number].format(verb=verb, article=article, **phrases)
    values = list(phrases.values())
    return ", ".join(values[at] for at in random.permutation(len(values)) if values[at])


def _with_more(text: str, random: numpy.random.Generator) -> str:
    """Returns a prompt with one more word, which the scenes know nothing of."""
    more, words = _one([*_MORE, _word(random), _word(random)], random), text.split(" ")
    at = int(random.integers(len(words) + 1))
    return " ".join([*words[:at], more, *words[at:]])


def _word(random: numpy.random.Generator) -> str:
    return "".join(_LETTERS[number] for number in random.integers(0, 26, random.integers(3, 8)))


def _written(text: str, random: numpy.random.Generator) -> str:
    """Returns a prompt as it is typed: single spaces, and sometimes a capital or a full stop."""
    text = " ".join(text.replace(" ,", ",").split()).strip(" ,:")
    text = text[:1].upper() + text[1:] if random.random() < 0.15 else text
    return text + "." if random.random() < 0.15 else text


def _one(values: list[str], random: numpy.random.Generator) -> str:
    return values[int(random.integers(len(values)))]


NOTHING = Wording("", None, {})
"""The empty prompt, which guidance compares with."""
