"""Strangers' files: whatever cannot be read is a finding, and the rest is scanned all the same."""

import os
import re

import pytest

from torchport.porting.scan import scanning as scan
from torchport.porting.scan.codebase import find_sources

GOOD = "import torch\ndef f(x: torch.Tensor):\n    return x.item()\n"


def findings(folder):
    return {(one.file.rpartition("/")[2], one.rule): one for one in scan.scan(folder).findings}


def test_a_syntax_error_is_reported_with_its_line(codebase):
    found = findings(codebase({"good.py": GOOD, "bad.py": "x = 1\ndef f(:\n    pass\n"}))
    assert set(found) == {("good.py", "PS402"), ("bad.py", "PS901")}
    assert found["bad.py", "PS901"].line == 2
    assert re.fullmatch(r"Python 3\.\d+ cannot read it: invalid syntax", found["bad.py", "PS901"].text)


@pytest.mark.parametrize("text", ['print "loading"\n', "try:\n    f()\nexcept E, e:\n    pass\n", "raise E, 'x'\n"])
def test_python_2_is_called_that(codebase, text):
    found = findings(codebase({"good.py": GOOD, "old.py": text}))
    assert set(found) == {("good.py", "PS402"), ("old.py", "PS902")}
    assert found["old.py", "PS902"].text == "It is written for Python 2"


def test_a_declared_encoding_is_read_and_an_undeclared_one_reported(codebase):
    folder = codebase({"good.py": GOOD})
    (folder / "declared.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\n" + GOOD.encode())
    (folder / "foreign.py").write_bytes(b"# \xe9\n" + GOOD.encode())
    (folder / "unknown.py").write_bytes(b"# -*- coding: klingon -*-\n" + GOOD.encode())
    (folder / "marked.py").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    found = findings(folder)
    readable = {(name, "PS402") for name in ("good.py", "declared.py", "marked.py")}
    assert set(found) == {*readable, ("foreign.py", "PS903"), ("unknown.py", "PS903")}
    assert found["foreign.py", "PS903"].text.startswith("Its bytes are no text: ")


def test_null_bytes_and_deep_nesting_are_syntax_errors(codebase):
    folder = codebase({"good.py": GOOD, "deep.py": "x = " + "(" * 5000 + ")" * 5000 + "\n"})
    (folder / "null.py").write_bytes(b"x = 1\0\n")
    assert set(findings(folder)) == {("good.py", "PS402"), ("deep.py", "PS901"), ("null.py", "PS901")}


@pytest.mark.parametrize(
    "statement",
    [
        "y = " + " + ".join(["x.sum()"] * 1400),
        "y = x" + ".clone()" * 900,
        "if x:\n        pass\n" + "    elif y:\n        pass\n" * 900,
        "assert " + "not " * 1400 + "x",
        "y = " + " or ".join(["x"] * 5000),
        "y = " + "[" * 90 + "x" + "]" * 90,
    ],
)
def test_a_long_expression_is_no_end(codebase, statement):
    text = f"import torch\ndef f(x: torch.Tensor, y):\n    {statement}\ndef g(x):\n    return x.item()\n"
    found = findings(codebase({"long.py": text}))
    assert ("long.py", "PS402") in found and ("long.py", "PS901") not in found


def test_a_file_of_50_mb_is_not_read(codebase, monkeypatch):
    folder = codebase({"good.py": GOOD})
    with (folder / "table.py").open("wb") as file:
        file.truncate(50_000_000)
    found = findings(folder)
    assert set(found) == {("good.py", "PS402"), ("table.py", "PS904")}
    assert found["table.py", "PS904"].text == "It has 50 MB, more than the 5 MB that are read"


def test_loops_of_links_are_reported_and_a_linked_folder_is_read_once(codebase, tmp_path):
    folder = codebase({"good.py": GOOD, "inner/more.py": GOOD})
    (folder / "itself.py").symlink_to("itself.py")
    (folder / "inner" / "up").symlink_to(folder)
    (folder / "twice").symlink_to(folder / "inner")
    (folder / "nothing.py").symlink_to("absent.py")
    (folder / "processes").symlink_to("/proc")
    found = findings(folder)
    assert set(found) == {
        ("good.py", "PS402"),
        ("more.py", "PS402"),
        ("itself.py", "PS905"),
        ("up", "PS905"),
        ("processes", "PS905"),
        ("nothing.py", "PS906"),
    }
    assert sum(one.rule == "PS402" for one in scan.scan(folder).findings) == 2


@pytest.mark.skipif(
    os.geteuid() == 0, reason="root may read everything: run `pytest tests/porting/scan/test_files.py` as another user"
)
def test_what_may_not_be_read_is_reported(codebase):
    folder = codebase({"good.py": GOOD, "secret.py": GOOD, "closed/a.py": GOOD})
    (folder / "secret.py").chmod(0)
    (folder / "closed").chmod(0)
    try:
        assert set(findings(folder)) == {("good.py", "PS402"), ("secret.py", "PS906"), ("closed", "PS906")}
    finally:
        (folder / "closed").chmod(0o700)


def test_a_pipe_is_not_waited_for(codebase):
    folder = codebase({"good.py": GOOD})
    os.mkfifo(folder / "pipe.py")
    assert set(findings(folder)) == {("good.py", "PS402"), ("pipe.py", "PS906")}


def test_one_file_can_be_scanned(codebase):
    folder = codebase({"good.py": GOOD, "other.py": GOOD})
    report = scan.scan(folder / "good.py")
    assert report.files == 1 and [one.line for one in report.findings] == [3]


def test_hidden_folders_and_caches_are_not_entered(codebase):
    folder = codebase({"good.py": GOOD, ".git/a.py": GOOD, "__pycache__/b.py": GOOD, "node_modules/c.py": GOOD})
    sources, unread = find_sources(folder)
    assert [source.path for source in sources] == ["good.py"] and unread == []
