"""The Python blocks of docs/own-code.md run; its shell block says what it needs."""

import re
import shlex
from pathlib import Path

import click
import pytest

from torchport.commands.exec import command

PAGE = Path(__file__).parents[1] / "docs" / "own-code.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", [n for n, (kind, _) in enumerate(BLOCKS) if kind == "python"])
def test_a_python_block_runs(number):
    exec(compile(BLOCKS[number][1], str(PAGE), "exec"), {"__name__": "page"})


def test_the_shell_block_is_a_command_of_torchports():
    (block,) = [text for kind, text in BLOCKS if kind == "sh"]
    assert block.startswith("# needs: checkout\n")
    words = shlex.split(block.replace("\\\n", " "), comments=True)
    context = click.Context(command)
    values, _, _ = command.make_parser(context).parse_args(words[2:])
    assert words[:2] == ["torchport", "exec"] and values["mesh"] == "dp=2,tp=4"
    assert values["words"][0] == "HunyuanVideo-1.5/generate.py" and "--prompt" in values["words"]
