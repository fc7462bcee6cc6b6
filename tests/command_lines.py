"""Odd command lines, drawn from a seed: every command, every flag of it, and values that nobody had in mind."""

import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import click

VALUES = {
    "empty": "",
    "blank": " ",
    "a name that is too long": "x" * 300,
    "a path that is too long": "x/" * 3000,
    "a file that the system can just name": "y" * 250 + ".yaml",
    "a loop of links": "loop",
    "below a loop of links": "loop/below",
    "a dangling link": "dangling",
    "a pipe": "pipe.yaml",
    "a socket": "socket.yaml",
    "a device": "/dev/full",
    "a file": "file",
    "below a file": "file/below",
    "a folder": "folder.yaml",
    "a parent": "..",
    "escapes": "\x1b[31mred\x07",
    "separators": "a\x85b\u2028c\rd",
    "lines": "a\nb",
    "no text": os.fsdecode(b"\xff\xfe"),
    "a directory of someone": "~nobody-of-that-name/x",
    "a number": "9" * 5000,
    "a negative": "-1",
    "a mapping": "{a: &x 1, b: *x}",
    "a path of keys": "steps=&x 3",
    "deep": "mesh=" + "[" * 400,
    "a flag": "--help-me",
    "an assignment": "checkpoint=",
    "an empty checkpoint": "checkpoint=''",
    "a checkpoint of nobody": "checkpoint=~nobody-of-that-name/x",
    "a pipe as checkpoint": "checkpoint=./pipe.yaml",
}
"""What is put behind a flag, by what it is."""


def prepare(folder: Path, job: str) -> None:
    """Makes the files that the values name; one of them is a config, with this text."""
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere")
    os.mkfifo(folder / "pipe.yaml")
    with socket.socket(socket.AF_UNIX) as made:
        here = Path.cwd()
        os.chdir(folder)  # a socket's path has 108 bytes at most
        made.bind("socket.yaml")
        os.chdir(here)
    (folder / "file").write_text("root:x:0:0\n")
    (folder / "folder.yaml").mkdir()
    (folder / ("y" * 250 + ".yaml")).write_text(job)


def commands(group: click.Group, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yields every command of a group with the words that name it."""
    for name in group.list_commands(click.Context(group)):
        _, command, _ = group.resolve_command(click.Context(group), [name])
        if isinstance(command, click.Group):
            yield from commands(command, (*above, name))
        else:
            yield (*above, name), command


def drawn(group: click.Group, seed: int, count: int) -> Iterator[tuple[str, ...]]:
    """Yields command lines: each flag and argument of each command in turn, with a value drawn from the seed."""
    chance = random.Random(seed)
    spots = [
        (words, command, option)
        for words, command in commands(group)
        for option in command.params
        if not (isinstance(option, click.Option) and option.is_flag)
    ]
    order: list[tuple[tuple[str, ...], click.Command, click.Parameter]] = []
    for _ in range(count):
        order = order or chance.sample(spots, len(spots))
        words, command, option = order.pop()
        value = VALUES[chance.choice(list(VALUES))]
        spot = [value] if isinstance(option, click.Argument) else [option.opts[0], value]
        yield (*words, *_needed(command, option), *spot)


def _needed(command: click.Command, odd: click.Parameter) -> list[str]:
    """Returns sound values of the flags that a command cannot do without, so that the odd one is reached."""
    sound = {"model": "hunyuan", "config": "configs/demo.yaml", "topology": "v6e:2x4", "prompt": "A cat"}
    words = []
    for option in command.params:
        wanted = option.required or command.name in ("run", "shard", "plan")
        if isinstance(option, click.Option) and option.name in sound and option is not odd and wanted:
            words += [option.opts[0], sound[option.name]]
    return words
