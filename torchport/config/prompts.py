"""A file of prompts: JSON Lines, one video a line, read as strictly as YAML."""

from __future__ import annotations

import dataclasses
import json
import re
import unicodedata
from pathlib import Path
from typing import Annotated, Any

import pydantic

from torchport.config.document import Document, Frozen, validated
from torchport.errors import BadValueError, DuplicateKeyError, SyntaxYamlError, TorchportError, together
from torchport.files import folder

LONGEST_NAME = 255
"""Bytes of a folder's name, on common file systems."""


BYTE_ORDER_MARK = "\ufeff"
"""What some editors of Windows write in front of UTF-8."""
DEVICES = {"CON", "PRN", "AUX", "NUL", *(f"{name}{number}" for name in ("COM", "LPT") for number in range(1, 10))}
"""Names that Windows keeps for devices, with any ending: a folder that is to be copied there cannot have them."""


def _name(text: str) -> str:
    """Returns the name of a folder, which every system can have and no command takes for a flag."""
    if not re.fullmatch(r"[^./\\\0][^/\\\0]*", text) or len(text.encode("utf-8", "replace")) > LONGEST_NAME:
        raise ValueError("It must be the name of one folder in --out: no slash, and no dot in front")
    bad = next((letter for letter in text if not letter.isprintable() or letter in '<>:"|?*'), None)
    if bad is not None:
        raise ValueError(f"A folder's name has no {bad!r}: use letters, digits, '-', '_', '.' and spaces")
    if text != text.strip() or text.endswith("."):
        raise ValueError("A folder's name neither begins with a space nor ends with a space or a dot: remove it")
    if text.startswith("-"):
        raise ValueError("Commands take a name with '-' in front for a flag: begin with a letter or a digit")
    if text.partition(".")[0].rstrip().upper() in DEVICES:
        raise ValueError(f"Windows has no folder of this name: write for example 'video-{text}'")
    return text


class Prompt(Frozen):
    """A line of a file of prompts.

    Attributes:
        prompt: What the video shows.
        negative: What it does not show; by default that of `--negative-prompt`.
        seed: The seed of the noise; by default that of `--seed`.
        height: Pixels; by default the config's.
        width: Pixels; by default the config's.
        frames: Their number; by default the config's.
        image: A file with the first frame, for image-to-video; by default that of `--image`.
        out: The name of the video's folder in `--out`, one that every system can have; by default the number of the
            line, as `0001`.
    """

    prompt: str
    negative: str | None = None
    seed: Annotated[int, pydantic.Field(ge=0, le=2**63 - 1)] | None = None
    height: Annotated[int, pydantic.Field(ge=1)] | None = None
    width: Annotated[int, pydantic.Field(ge=1)] | None = None
    frames: Annotated[int, pydantic.Field(ge=1)] | None = None
    image: str | None = None
    out: Annotated[str, pydantic.AfterValidator(_name)] | None = None


@dataclasses.dataclass(frozen=True)
class Line:
    """A line, with what errors and folders call it."""

    prompt: Prompt  #: What it says.
    place: str  #: `file:line`.
    name: str  #: Of the video's folder in `--out`.

    def sizes(self) -> tuple[str, ...]:
        """Returns the sizes that the line has of its own, as overrides of a config."""
        sizes = {key: getattr(self.prompt, key) for key in ("height", "width", "frames")}
        return tuple(f"{key}={value}" for key, value in sizes.items() if value is not None)


def read_prompts(file: Path) -> list[Line]:
    """Returns the lines of a file of prompts; blank ones are left out."""
    try:
        text = folder.text(file)
    except OSError as error:
        fact = f"It cannot be read: {error.strerror}"
        raise SyntaxYamlError(str(file), fact, 'Put a file there with a line such as {"prompt": "A cat"}') from error
    except UnicodeDecodeError as error:
        raise SyntaxYamlError(f"{file}:1", f"Byte {error.start} is not UTF-8", "Save the file as UTF-8") from error
    lines: list[Line] = []
    mistakes: list[TorchportError] = []
    for number, line in enumerate(
        text.removeprefix(BYTE_ORDER_MARK).split("\n"), 1
    ):  # JSON's strings may hold what `splitlines` also splits at
        if line.strip():
            try:
                lines.append(_line(line, str(file), number))
            except TorchportError as error:
                mistakes += [error, *error.others]
                error.others = ()
    mistakes += _twice(lines)
    if mistakes:
        raise together(mistakes)
    if not lines:
        raise BadValueError(str(file), "It has no line", 'Write one such as {"prompt": "A cat"} for each video')
    return lines


def _line(text: str, file: str, number: int) -> Line:
    place, remedy = f"{file}:{number}", 'Write one object on a line, such as {"prompt": "A cat", "seed": 7}'
    try:
        data = json.loads(text, object_pairs_hook=lambda pairs: _mapping(pairs, place))
    except json.JSONDecodeError as error:
        raise SyntaxYamlError(f"{place}:{error.pos + 1}", f"Not JSON: {error.msg}", remedy) from error
    except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
        raise SyntaxYamlError(place, f"Not JSON: {' '.join(str(error).split())[:200]}", remedy) from error
    if not isinstance(data, dict):
        raise SyntaxYamlError(place, f"It is no JSON object: {text[:80]}", remedy)
    document = Document(file, data, {(): number})
    prompt = validated(Prompt, document)
    return Line(prompt, place, prompt.out or f"{number:04}")


def _mapping(pairs: list[tuple[str, Any]], place: str) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        key = next(key for key in keys if keys.count(key) > 1)
        raise DuplicateKeyError(place, f"'{key}' stands here twice", "Keep one of the two", key=key)
    return mapping


def _twice(lines: list[Line]) -> list[TorchportError]:
    """Returns an error for each line whose folder is another line's; some disks tell no capital letters from small."""
    first: dict[str, Line] = {}
    mistakes: list[TorchportError] = []
    for line in lines:
        other = first.setdefault(unicodedata.normalize("NFC", line.name).casefold(), line)
        if other is not line:
            also = "so is that" if other.name == line.name else f"'{other.name}', the same on some disks, is that"
            fact = f"Its folder is '{line.name}', and {also} of {other.place}"
            mistakes.append(BadValueError(line.place, fact, "Give each line an 'out' of its own", key="out"))
    return mistakes
