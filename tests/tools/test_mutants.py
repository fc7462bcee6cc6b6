"""Mutants: what is edited and what is not, the same draw for the same seed, and what their tests make of them."""

import dataclasses
import json
import sys

from mutants import Source, drawn, is_mutated, main, run, suites, summary

TEXT = '''\
"""Where 1 == 1."""

__all__ = ["f"] * 2


class Size:
    wide: int = 3

    def f(self, x: "1 < 2", é=0.5):
        """Returns 1 or 2."""
        if not x:
            raise ValueError(f"{x} is {1}, and must be 2" if x else "0 < 1")
        while "é" in x and x is not é and True: x = x[1:]
        return x == (1)
'''


def edits(text):
    source = Source(text)
    found = [(at, one) for at, one in source.statements() if is_mutated(at, one)]
    return {
        (kind, text[start:end], new)
        for _, statement in found
        for kind, start, end, new in source.edits(statement)
        if Source(text[:start] + new + text[end:])
    }


def test_every_kind_of_edit_is_found_and_text_and_types_are_left_alone():
    assert edits(TEXT) == {
        ("branch", "not x", "False"),
        ("not", "not x", "(x)"),
        ("comparison", "in", "not in"),
        ("comparison", "is not", "is"),
        ("comparison", "==", "!="),
        ("and/or", "and", "or"),
        ("constant", "True", "False"),
        ("constant", "0.5", "1.0"),
        ("constant", "1", "2"),
        ("return", "return x == (1)", "return None"),
    }


def test_an_edit_of_several_lines_is_one_edit():
    text = "def f(x):\n    return (\n        x + 'é'\n    )\n"
    assert edits(text) == {("return", text[text.index("return") : -1], "return None")}


def project(folder, text, tests="def test_no():\n    pass\n"):
    """Writes a package of one module with its tests, and returns its folder."""
    for name, content in {"fake/a/size.py": text, "tests/a/test_size.py": tests}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def test_the_same_seed_draws_the_same_from_files_that_are_the_same(tmp_path):
    root, other = project(tmp_path / "one", TEXT), project(tmp_path / "two", TEXT)
    first = drawn(root, "fake", 1, 3)
    assert len(first) == 3 and first == drawn(other, "fake", 1, 3, same_as=root)
    assert any(drawn(root, "fake", seed, 3) != first for seed in range(2, 9))
    assert len({(one.line, one.column) for one in drawn(root, "fake", 1, 99)}) == 5, "one of each statement"
    (other / "fake" / "a" / "size.py").write_text(TEXT + "\n", encoding="utf-8")
    assert drawn(other, "fake", 1, 3, same_as=root) == []


def test_a_mutant_is_found_where_its_line_moved_and_not_where_it_changed():
    text = "def f(x):\n    x += 1\n    x += 1\n    return x\n\n\ndef g(x):\n    x += 1\n"
    source = Source(text)
    mutants = [source.mutant("f.py", "f", "constant", at, at + 1, "2") for at in (19, 30)]
    assert [(one.line, one.column, one.text, one.nth) for one in mutants] == [(2, 5, "x += 1", 0), (3, 5, "x += 1", 1)]
    moved = "import os\n\n\ndef g(x):\n    x += 1\n\n\ndef f(x):\n    if x:\n        x += 1\n    x += 1\n    return x\n"
    wanted = moved.replace("    x += 1\n    return", "    x += 2\n    return")
    assert Source(moved).mutated(mutants[1]) == wanted
    assert Source(moved.replace("    x += 1\n    return", "    return")).mutated(mutants[1]) is None
    assert Source(moved.replace("def f", "def h")).mutated(mutants[0]) is None


def test_a_modules_own_tests_come_before_the_rest_of_their_folder(root):
    def runs(name):
        return suites(root, f"torchport/{name}.py")

    assert runs("config/card") == [
        ["tests/config/test_card.py"],
        ["tests/config", "--ignore=tests/config/test_card.py"],
    ]
    assert runs("patch/source/drift") == [
        ["tests/patch/source/test_drift.py"],
        ["tests/patch/source", "--ignore=tests/patch/source/test_drift.py"],
    ]
    assert runs("plan/__init__") == [["tests/plan"]] and runs("plan/deeper/new") == [["tests/plan"]]
    assert runs("__main__") == [["tests/test_main.py"]] and runs("new_module") == []


SIZE = "def is_small(x):\n    return x < 10\n"


def mutants_of(root):
    source = Source(SIZE)
    edits = [(kind, *rest) for _, statement in source.statements() for kind, *rest in source.edits(statement)]
    return {kind: source.mutant("fake/a/size.py", "is_small", kind, *rest) for kind, *rest in edits}


def test_a_mutant_that_a_test_notices_is_killed_by_it(tmp_path):
    root = project(
        tmp_path / "p", SIZE, "from fake.a.size import is_small\n\ndef test_ten():\n    assert not is_small(10)\n"
    )
    [verdict] = run([mutants_of(root)["comparison"]], root, 1, marker=None, timeout=60, check=False)
    assert (verdict["outcome"], verdict["test"]) == ("killed", "tests/a/test_size.py::test_ten")
    assert (root / "fake" / "a" / "size.py").read_text() == SIZE


PYTEST = """\
#!/bin/sh
case "$*" in *" tests/a "*) exit 5;; esac
grep -q None fake/a/size.py && sleep 60
grep -q 11 fake/a/size.py && echo "ERROR tests/a - it breaks" && exit 2
exit 0
"""
"""In the place of pytest: no tests in the rest of the folder, a mutant that hangs, one that cannot be imported."""


def test_survivors_are_shown_and_can_be_run_again_alone(tmp_path, monkeypatch, capsys):
    root = project(tmp_path / "p", SIZE)
    python = tmp_path / "python"
    python.write_text(PYTEST)
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    mutants = list(mutants_of(root).values())
    lost = dataclasses.replace(mutants[0], function="is_large")
    verdicts = run([*mutants, lost], root, 2, marker="slow", timeout=3, check=True)
    assert {one["kind"]: (one["outcome"], one["test"]) for one in verdicts[:-1]} == {
        "return": ("timed out", "tests/a/test_size.py"),
        "comparison": ("survived", ""),
        "constant": ("killed", "tests/a"),
    }
    assert verdicts[-1]["outcome"] == "not found"
    text = "\n".join(summary(verdicts))
    assert "killed: 2 of 3 (67 %)" in text
    assert text.endswith("fake/a/size.py:2 is_small: survived\n- return x < 10\n+ return x <= 10")
    drawn_file, result = tmp_path / "mutants.json", tmp_path / "result.json"
    drawn_file.write_text(json.dumps([dataclasses.asdict(one) for one in mutants]))
    result.write_text(json.dumps(verdicts))
    monkeypatch.setattr("mutants.ROOT", root)
    monkeypatch.setattr("sys.argv", ["mutants.py", "run", str(drawn_file), "--only", str(result)])
    main()
    assert [one["kind"] for one in json.loads(capsys.readouterr().out)] == ["comparison"]


def test_what_fails_without_a_mutant_or_once_alone_kills_none(tmp_path, monkeypatch):
    root = project(tmp_path / "p", SIZE)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 4\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    mutants = [mutants_of(root)["constant"]]
    [verdict] = run(mutants, root, 1, marker=None, timeout=9, check=True)
    assert (verdict["outcome"], verdict["test"]) == ("fails without it", "tests/a/test_size.py")
    assert [one["test"] for one in run(mutants, root, 1, marker=None, timeout=9, check=False)] == ["exit 4: "]
    python.write_text("#!/bin/sh\ntest -f ended && exit 0\ntouch ended\nexit 4\n")
    [verdict] = run(mutants, root, 1, marker=None, timeout=9, check=False)
    assert verdict["outcome"] == "survived", "the first run was ended by something else"
