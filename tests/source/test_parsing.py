"""Whatever keeps a file from being read is one error with its file and line, whoever reads the file."""

import os
import re

import pytest
from fakes.patch_world import World

from torchport import patch
from torchport.commands import static_check
from torchport.errors import UnreadableError
from torchport.patch.source import drift
from torchport.porting import draft
from torchport.porting.scan import scanning as scan
from torchport.source import parsing

PYTHON = r"Python 3.\d+ cannot read it: "
UNREADABLE = {
    "a mistake": (b"x = 1\ndef f(:\n    pass\n", r":2: ", f"{PYTHON}invalid syntax"),
    "Python 2": (b"\n\nprint 'loading'\n", r":3: ", "It is written for Python 2"),
    "a null byte": (b"def f(a): pass\nf = f\nx = 1\0\n", ": ", f"{PYTHON}source code string cannot contain null bytes"),
    "no UTF-8": (
        b"def f(a): pass\nf = f\n# \xe9\n",
        ": ",
        "Its bytes are no text: 'utf-?8' codec can't decode byte 0xe9",
    ),
    "an unknown encoding": (b"# coding: klingon\ndef f(a): pass\n", ": ", "Its bytes are no text: unknown encoding"),
    "no encoding": (b"# coding: undefined\ndef f(a): pass\n", ": ", "Its bytes are no text: .*undefined encoding"),
    "punycode": (b"# coding: punycode\ndef f(a): pass\n", ": ", "Its bytes are no text: "),
    "an encoding of bytes": (b"# coding: rot13\ndef f(a): pass\n", ": ", "Its bytes are no text: "),
    "many brackets": (b"def f(a): pass\nf = " + b"(" * 5000 + b")" * 5000, ":2: ", f"{PYTHON}too many nested parenth"),
    "many signs": (b"def f(a): pass\nf = " + b"-" * 100_000 + b"1\n", ": ", f"{PYTHON}nested too deep"),
    "many names": (b"def f(a): pass\nf = a" + b".a" * 20_000, ": ", f"{PYTHON}nested too deep"),
    "many bytes": (b"#" * 6_000_000, ": ", "It has 6 MB, more than the 5 MB that are read"),
}


@pytest.fixture
def world(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)
    world.write("up/m.py", "def f(a): pass\n")
    world.python("def new(a): pass\n")
    world.yaml("id: up.f\n  target: up.m:f\n  replace: p.py:new")
    yield world
    world.close()


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_file_is_refused_with_its_line_and_what_is_wrong(case, tmp_path, monkeypatch):
    data, line, text = UNREADABLE[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.py").write_bytes(data)
    with pytest.raises(UnreadableError, match=rf"^m\.py{line}{text}.*\. Mend the file, or use a version of it for"):
        parsing.tree_of(tmp_path / "m.py")


@pytest.mark.parametrize("case", [case for case in UNREADABLE if case != "Python 2"])
def test_the_check_a_lock_a_draft_and_a_scan_say_the_same_of_an_upstream(case, world):
    data, line, text = UNREADABLE[case]
    world.write("up/m.py", "")
    (world.site / "up" / "m.py").write_bytes(data)
    entries = patch.read(world.patches, ["up"])
    with pytest.raises(UnreadableError, match=rf"^up/m\.py{line}{text}") as error:
        drift.lock(entries, write=False)
    with pytest.raises(UnreadableError) as drafted:
        draft.draft(draft.PatchDraftRequest("up.m:f", "replace"))
    (finding,) = static_check.check(world.patches).findings
    (unread,) = scan.scan(world.site / "up").findings
    assert str(drafted.value) == str(error.value)
    assert (finding.id, f"{finding.place}: {finding.text}") == ("TP217", str(error.value))
    assert (unread.line, unread.text) == (error.value.line, error.value.fact)


@pytest.mark.parametrize("case", UNREADABLE)
def test_the_python_of_a_patch_is_refused_in_the_same_words(case, world):
    data, line, text = UNREADABLE[case]
    (world.patches / "up" / "p.py").write_bytes(data)
    (finding,) = static_check.check(world.patches).findings
    assert finding.id == "TP217"
    assert re.match(f"patches/up/p\\.py{line}{text}", f"{finding.place}: {finding.text}")


DEEP = {
    "attributes": "y = a" + ".a" * 2500,
    "terms": "y = a" + " + a" * 2500,
    "branches": "if a:\n        pass\n" + "    elif a:\n        pass\n" * 900,
}


@pytest.mark.parametrize("case", DEEP)
def test_what_parses_and_is_too_deep_to_walk_is_an_error_too(case, world):
    world.write("up/m.py", f"def f(a):\n    {DEEP[case]}\n    return y\n")
    entries = patch.read(world.patches, ["up"])
    with pytest.raises(UnreadableError, match=rf"^up/m\.py:1: {PYTHON}nested too deep"):
        drift.lock(entries, write=False)
    with pytest.raises(UnreadableError, match=rf"^up/m\.py(:\d+)?: {PYTHON}nested too deep"):
        draft.draft(draft.PatchDraftRequest("up.m:f", "rewrite", line=2))
    assert {finding.id for finding in static_check.check(world.patches).findings} == {"TP217"}


def test_a_chain_of_branches_in_a_module_is_an_error_too(world):
    world.write("up/m.py", "if a:\n    pass\n" + "elif a:\n    pass\n" * 2000 + "def f(a): pass\nf = f\n")
    with pytest.raises(UnreadableError, match=rf"^up/m\.py: {PYTHON}nested too deep"):
        parsing.read_source("up.m").where(["f"])


def test_blank_lines_before_a_mistake_cost_nothing(tmp_path):
    (tmp_path / "m.py").write_text("\n" * 300_000 + "def f(:\n")
    with pytest.raises(UnreadableError, match="invalid syntax"):
        parsing.tree_of(tmp_path / "m.py")


def test_a_folder_a_pipe_and_an_absent_file_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.py")
    for name, text in (("", "It is no file"), ("pipe.py", "It is no file"), ("no.py", "It cannot be opened: No such")):
        with pytest.raises(UnreadableError, match=text):
            parsing.text_of(tmp_path / name, "m.py")


def test_a_file_is_read_in_the_encoding_that_it_declares(tmp_path):
    (tmp_path / "m.py").write_bytes(b"# coding: latin-1\r\nx = '\xe9'\r\n")
    assert parsing.text_of(tmp_path / "m.py", "m.py") == "# coding: latin-1\nx = '\xe9'\n"


def test_somebodys_escapes_in_strings_are_no_warning(tmp_path):
    (tmp_path / "m.py").write_text("x = '\\d'\n")
    assert parsing.tree_of(tmp_path / "m.py").body
