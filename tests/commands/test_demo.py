"""The demo in one word: what it runs, and what it says to try next."""

import shlex

import click
import pytest

from torchport.__main__ import cli
from torchport.config import pack
from torchport.errors import BadValueError
from torchport.run import path
from torchport.run.journey import Summary


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The requests that the demo runs; nothing is run."""
    requests = []
    monkeypatch.setattr(path, "run", lambda request: requests.append(request) or Summary(tmp_path, None, {}, 0, None))
    return requests


def test_the_demo_is_a_run_of_its_first_line_and_names_its_folder_and_more_commands(asked, torchport, capsys, tmp_path):
    code, out, err = torchport("demo", "a blue square moves up", "--out", "here", capsys=capsys)
    first = next(line for line in err if "torchport run " in line)
    assert code == 0 and str(tmp_path) in out
    [request] = asked
    assert request.prompt == "a blue square moves up" and request.out.name == "here"
    program, name, *words = shlex.split(first[first.index("torchport") :])
    context = cli.resolve_command(click.Context(cli), [name, *words])[1].make_context(name, words)
    assert program == "torchport" and context.params["prompt"] == request.prompt
    assert (context.params["model"], context.params["config"]) == (request.model, request.config)


def test_a_card_that_cannot_be_read_is_said(asked, torchport, capsys, monkeypatch):
    monkeypatch.setattr(
        pack.Pack, "cards", lambda self: iter([("hunyuan", BadValueError("card.yaml:1", "No", "Mend it"))])
    )
    assert torchport("demo", capsys=capsys)[2] == ["error[TP107] card.yaml:1: No. Mend it."]
    monkeypatch.setattr(pack.Pack, "cards", lambda self: iter(()))
    assert "No card has configs/demo.yaml" in torchport("demo", capsys=capsys)[2][0]


def test_the_commands_to_try_next_are_taken_as_they_are_printed(asked, torchport, capsys):
    _, out, _ = torchport("demo", capsys=capsys)
    printed = [line.partition("    (")[0] for line in out if line.startswith("torchport ")]
    assert [line.split()[1] for line in printed] == ["verify", "plan", "scan"] and asked[0].prompt in printed[0]
    for line in printed:
        name, *words = shlex.split(line)[1:]
        cli.resolve_command(click.Context(cli), [name])[1].make_context(name, words)
