"""Which command runs Python of a pack or of an upstream: what docs/patches.md says, and what a marker file shows."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from fakes.plain_pack import FAMILY, MODEL, PlainPack

from torchport.__main__ import cli

PAGE = Path(__file__).parents[2] / "docs" / "patches.md"
ROW = re.compile(r"^\| `([^`]+)` \| (yes|no) \| (yes|no) \|", re.MULTILINE)
SAID = {row[1]: (row[2] == "yes", row[3] == "yes") for row in ROW.finditer(PAGE.read_text(encoding="utf-8"))}
"""By command, whether it runs Python of a pack, and of an upstream, as the page says."""

WRAPPED = "def wrapped(original, self, *args, **keywords):\n    return original(self, *args, **keywords)\n"
PATCH = """
- id: up.forward
  target: up.model:Net.forward
  wrap: p.py:wrapped
  why: A test.
  reported: "none: a test"
  until: never
  fits: {torch: "*"}
  equivalence: bitwise
"""
JOB = ("--model", "plain", "--config", "configs/small.yaml", "--path", "pack")
WORDS = {
    "check": ("check", "--path", "pack"),
    "check --static": ("check", "--static", "--path", "pack"),
    "compare": ("compare", "one", "two"),
    "demo": ("demo", "--out", "other"),
    "doctor": ("doctor", "--path", "pack"),
    "exec": ("exec", "--model", "plain", "--path", "pack", "--", "-m", "up.model"),
    "explain": ("explain", "TP101"),
    "models": ("models", "--path", "pack"),
    "new model": ("new", "model", "mine", "--entry", "up.model:Net", "--out", "pack"),
    "new model --pipeline": ("new", "model", "mine", "--pipeline", "diffusers:WanPipeline", "--out", "pack"),
    "new patch": ("new", "patch", "up.model:Text.forward", "--kind", "wrap", "--out", "pack"),
    "patches list": ("patches", "list", "--path", "pack"),
    "patches lock": ("patches", "lock", "up", "--path", "pack"),
    "patches schema": ("patches", "schema"),
    "patches show": ("patches", "show", "up.forward", "--path", "pack"),
    "plan": ("plan", *JOB, "--topology", "v6e:2x4"),
    "run": ("run", *JOB, "--prompt", "A cat", "--out", "other"),
    "scan": ("scan", "site", "--entry", "up.model:Net", "--path", "pack"),
    "scan --emit": ("scan", "site", "--entry", "up.model:Net", "--emit", "pack"),
    "schema": ("schema", "card"),
    "shard show": ("shard", "show", *JOB),
    "trace": ("trace", *JOB),
    "verify": ("verify", *JOB),
}


def _leaves(group, words=()):
    for name in group.list_commands(click.Context(group)):
        _, command, _ = group.resolve_command(click.Context(group), [name])
        if isinstance(command, click.Group):
            yield from _leaves(command, (*words, name))
        else:
            yield " ".join((*words, name))


def test_the_page_says_it_of_every_command():
    assert {*_leaves(cli)} == {name.partition(" --")[0] for name in SAID}
    assert sorted(SAID) == sorted(WORDS)


@pytest.fixture
def marked(tmp_path, monkeypatch):
    """A pack beside its upstream, each of whose files leaves a mark where it is executed; returns the marks' names."""
    pack = PlainPack(tmp_path, monkeypatch)
    mark = {word: f"open({str(tmp_path / word)!r}, 'w').close()\n" for word in ("family", "patch", "upstream")}
    pack.write("patches/up/stages.py", mark["family"] + FAMILY)
    pack.write("patches/up/p.py", mark["patch"] + WRAPPED)
    pack.write("patches/up/p.yaml", PATCH)
    pack.write("../site/up/model.py", mark["upstream"] + MODEL)
    pack.change("denoise: []", "denoise: [up/p]")

    def marks(forget=False):
        files = [tmp_path / word for word in mark if (tmp_path / word).exists()]
        for file in files if forget else ():
            file.unlink()
        return {file.name for file in files}

    marks.pack = pack
    yield marks
    pack.close()


def _ran(marks):
    return bool(marks & {"family", "patch"}), "upstream" in marks


@pytest.mark.parametrize("name", sorted(name for name in WORDS if SAID[name] == (False, False)))
def test_a_command_that_runs_none_of_it_leaves_no_mark(name, marked, torchport, capsys):
    if name == "compare":
        run = ("run", *JOB, "--prompt", "A cat", "--out", "one", "--backend", "original")
        assert torchport(*run, capsys=capsys)[0] == 0 and marked(forget=True)
        shutil.copytree("one", "two")
    code, _, err = torchport(*WORDS[name], capsys=capsys)
    assert code in (0, 1, 3), err
    assert marked() == set()


def test_a_command_that_runs_it_in_this_process_leaves_marks(marked, torchport, capsys):
    assert torchport(*WORDS["shard show"], capsys=capsys)[0] == 0
    assert _ran(marked()) == SAID["shard show"] == (True, True)


@pytest.mark.parametrize("name", ["plan", "run", "trace", "verify"])
def test_a_command_that_loads_a_family_runs_it(name, marked, torchport, capsys):
    """The family stops them after its mark: what comes after it takes seconds."""
    marked.pack.change("import torch\n\nfrom", "raise RuntimeError('stop')\n\nfrom", "patches/up/stages.py")
    code, _, err = torchport(*WORDS[name], capsys=capsys)
    assert code == 2 and "RuntimeError: stop" in err[0]
    assert marked() == {"family"} and SAID[name][0]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(name for name in WORDS if SAID[name] != (False, False)))
def test_what_the_page_says_is_what_a_whole_command_does(name, marked, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PAGE.parents[1]), str(tmp_path / "site")])}
    words = [sys.executable, "-m", "torchport", *WORDS[name]]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1, 3), done.stderr
    pack, upstream = _ran(marked())
    has_mark = name not in ("demo", "new model --pipeline")
    assert (pack, upstream or not has_mark) == SAID[name], "diffusers, an upstream, leaves no mark"
