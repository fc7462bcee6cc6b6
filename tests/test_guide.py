"""The guide's port runs to its video, at night to its end. Its other Python blocks and the traps' run alone."""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[1] / "MIGRATION_GUIDE.md"
TRAPS = GUIDE.parent / "docs" / "traps.md"
TEXT = GUIDE.read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w/]+\.(?:py|yaml))\n")
NEEDS = re.compile(r"# needs: (.*)\n")
PORT, REST = (BLOCK.findall(part) for part in TEXT.split("\n## The first errors", 1))
SKILL = (GUIDE.parent / "skills" / "port-to-tpu" / "SKILL.md").read_text(encoding="utf-8")
RIPPLE = {"REPO": "upstream", "CLASS": "ripple.model:Ripple", "NAME": "ripple", "PORT": "port", "TEXT": "'A wave'"}
"""What stands for the names of the skill in the guide's port."""
TRAP_BLOCKS = BLOCK.findall(TRAPS.read_text(encoding="utf-8"))


def lines(text):
    return text.splitlines()[0][:60]


def comparable(line):
    """A line without what is another one on another machine: numbers of frames, figures of a plan."""
    return re.sub(r"\(\d+ more frames", "(N more frames", line.strip())


class Reader:
    """A person who does what the guide says, in an empty folder."""

    def __init__(self, call):
        self.call = call
        self.printed = []

    def does(self, kind, code):
        if match := FILE.match(code):
            file = Path(match[1])
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(code, encoding="utf-8")
        elif kind == "python":
            exec(compile(code, str(GUIDE), "exec"), {"__name__": "guide"})
        elif kind == "sh" and not NEEDS.match(code):
            self.printed = []
            for line in code.replace("\\\n", "").splitlines():
                self.runs(line)
        elif kind == "text":
            self.reads(code)

    def runs(self, line):
        line, _, comment = line.partition("   # ")
        expected = int(comment.removeprefix("exit code ") or 0)
        program, *words = shlex.split(line)
        if program == "torchport":
            exit_code, out, error = self.call(*words)
        else:
            exit_code, out, error = self.shell(line)
        assert exit_code == expected, (line, out, error)
        self.printed += out

    def shell(self, line):
        line = line.replace("PYTHONPATH=upstream", f"PYTHONPATH=upstream:{GUIDE.parent}")
        program = f"{shlex.quote(sys.executable)} -m pytest -p no:cacheprovider"
        done = subprocess.run(line.replace("pytest", program, 1), shell=True, capture_output=True, text=True)
        return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()

    def reads(self, text):
        """Looks for the lines of an output, in their order; `...` stands for lines that are left out."""
        rest = iter(map(comparable, self.printed))
        for line in filter(None, map(comparable, text.splitlines())):
            if line != "...":
                assert line in rest, (line, self.printed)


VERIFY = next(number for number, (_, code) in enumerate(PORT) if code.startswith("torchport verify"))
"""Of the last commands, one starts two more processes, one compiles for a TPU: they are two thirds of the whole."""


@pytest.mark.parametrize("end", [VERIFY, pytest.param(len(PORT), marks=pytest.mark.slow)], ids=["verify", "end"])
def test_the_port_of_the_guide_runs_from_the_first_line_to(end, torchport, capsys, tmp_path, monkeypatch):
    import functools

    reader = Reader(functools.partial(torchport, capsys=capsys))
    before = {**os.environ}
    try:
        for kind, code in PORT[:end]:
            reader.does(kind, code)
    finally:
        for name in [name for name in sys.modules if re.match(r"(torchport_patches\.)?ripple\b|flash_attn\b", name)]:
            del sys.modules[name]
    assert dict(os.environ) == before
    upstream = sorted(file.name for file in (tmp_path / "upstream").rglob("*.py"))
    assert upstream == ["attention.py", "conditions.py", "model.py"]
    assert (tmp_path / "ported" / "video.mp4").stat().st_size > 0
    if end == len(PORT):
        answers = skills_answers(reader)
        assert {row["reach"] for row in answers["scan"]["findings"]} >= {"path"}
        assert answers["trace"]["stoppers"] == [] and answers["check"] == []
        assert answers["verify"]["verdict"] == "the same picture" and answers["plan"]["fits"] is True


def skills_answers(reader):
    """Runs the skill's commands that answer in JSON, on the guide's port, and returns the last answer of each."""
    lines = [line for kind, code in BLOCK.findall(SKILL) if kind == "sh" for line in code.splitlines()]
    answers = {}
    for line in lines:
        words = shlex.split(re.sub(r"\b[A-Z]{4,}", lambda name: RIPPLE.get(name[0], name[0]), line))[1:]
        if words[-1] in ("--json", "json") and "diffusers:MochiPipeline" not in words:
            code, out, error = reader.call(*words)
            assert code == (1 if words[0] == "scan" else 0), (line, error)
            answers[words[0]] = json.loads("\n".join(out))
    return answers


def test_the_commands_of_the_skill_that_draft_and_run_are_the_guides():
    lines = [line for kind, code in BLOCK.findall(SKILL) if kind == "sh" for line in code.splitlines()]
    drafts = [line for line in lines if not line.endswith("json") and "MochiPipeline" not in line]
    told = [code.replace("\\\n", "") for kind, code in PORT if kind == "sh"]
    for line in drafts:
        words = [RIPPLE.get(word, word).replace("NAME", "ripple") for word in line.split()]
        assert any(set(words) - {"'A wave'"} <= set(code.replace('"A wave"', "").split()) for code in told), line


def test_an_output_that_the_guide_does_not_show_is_seen():
    reader = Reader(None)
    reader.printed = ["one", "two (3 more frames)", "three"]
    reader.reads("one\n...\ntwo (9 more frames)\n")
    with pytest.raises(AssertionError, match="'four'"):
        reader.reads("one\nfour\n")
    with pytest.raises(AssertionError, match="'one'"):
        reader.reads("two (3 more frames)\none\n")


@pytest.mark.parametrize("code", [code for kind, code in REST + TRAP_BLOCKS if kind == "python"], ids=lines)
def test_a_python_block_runs(code):
    exec(compile(code, str(GUIDE), "exec"), {"__name__": "guide"})


def test_every_block_of_the_traps_is_python():
    assert len(TRAP_BLOCKS) > 5 and {kind for kind, _ in TRAP_BLOCKS} == {"python"}


def test_a_python_block_that_fails_is_seen():
    """Or a block whose assertion was optimised away would pass for ever."""
    right = next(code for kind, code in TRAP_BLOCKS if '== "flash"' in code)
    wrong = right.replace('== "flash"', '== "mine"')
    done = subprocess.run([sys.executable, "-c", wrong], capture_output=True, text=True)
    assert done.returncode == 1 and "AssertionError" in done.stderr


def test_a_shell_block_that_is_not_run_says_what_it_needs():
    needs = [NEEDS.match(code) for kind, code in REST if kind == "sh"]
    assert needs and all(needs)
    found = {match[1] for _, code in itertools.chain(PORT, REST) if (match := NEEDS.match(code))}
    assert found <= {"network", "checkout", "tpu"}


def test_every_config_of_torchports_that_the_guide_names_is_there():
    for name in re.findall(r"(?<![\w/])configs/[\w/]+\.yaml", TEXT):
        assert (GUIDE.parent / name).is_file() or name.startswith("configs/ripple"), name
