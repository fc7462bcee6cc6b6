"""Drift: what changed upstream is named; what only looks different passes. Versions and probes have three outcomes."""

from __future__ import annotations

import importlib.metadata
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from fakes.checkouts import committed
from fakes.patch_world import World

from torchport import patch
from torchport.errors import DriftError, ReplacementError, UnsupportedError, WrongTypeError
from torchport.patch.declared import versions
from torchport.patch.declared.reading import read_lock
from torchport.patch.source import drift

UP = '''\
def helper(x):
    return x + 1

def f(a, b=1):
    """Adds."""
    c = helper(a)
    for i in range(b):
        c += i
    return c
'''


@pytest.fixture
def world(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)
    world.write("up/m.py", UP)
    world.python("def new(a, b=1): return 'new'\n")
    yield world
    world.close()


def _locked(world, more="relies_on: ['up.m:helper']"):
    entries = world.one("replace: p.py:new", "up.m:f", more)
    drift.lock(entries)
    return entries


def _apply(entries):
    with patch.applied(entries) as ledger:
        return ledger.rows()[0]["drift"]


def test_a_locked_target_passes_and_an_unlocked_one_says_so(world):
    entries = world.one("replace: p.py:new", "up.m:f")
    assert _apply(entries) == "unlocked"
    assert drift.lock(entries, write=False) == ["up.m:f: new"]
    assert _apply(entries) == "unlocked"
    assert drift.lock(entries) == ["up.m:f: new"]
    assert _apply(entries) == "locked"
    assert drift.lock(entries) == []


def test_a_renamed_argument_is_named(world):
    entries = _locked(world)
    world.write("up/m.py", UP.replace("a, b=1", "q, b=1").replace("helper(a)", "helper(q)"))
    world.python("def new(q, b=1): return 'new'\n")
    with pytest.raises(DriftError) as caught:
        _apply(entries)
    assert str(caught.value) == (
        "patches/up/p.yaml:1: up.m:f is not what 'up.one' was reviewed against (up unknown): its signature was "
        "(a, b=...), is (q, b=...); line 4 is new: q; line 6 is new: c = helper(q). "
        "Review the patch, then run: torchport patches lock up "
        "(with the --path and --upstream-path that are used here)."
    )


def test_a_changed_callee_is_named(world):
    entries = _locked(world)
    world.write("up/m.py", UP.replace("return x + 1", "return x + 2"))
    with pytest.raises(
        DriftError, match=r"\(up unknown\): up.m:helper \(up/m.py:1\), which it relies on, changed. Rev"
    ):
        _apply(entries)
    world.write("up/m.py", UP.replace("helper", "assistant"))
    with pytest.raises(
        DriftError, match=r"up.m:helper, which it relies on, is gone; up.m:assistant .* is new; line 6 is new: c = a"
    ):
        _apply(entries)


def test_a_reformatted_file_with_new_comments_passes(world):
    entries = _locked(world)
    world.write(
        "up/m.py",
        """
        # A comment.

        def helper( x ):
            '''A new docstring.'''
            return (
                x + 1  # another
            )


        def f(a: int, b: int = 1) -> int:
            "Another docstring."
            c = helper( a )
            for i in range(b): c += i

            return c
        """,
    )
    assert _apply(entries) == "locked"


CHANGED = """\
import functools

@functools.cache
@staticmethod
def f(
    a,
    b=(1,
       2), *more,
    wide: int = 3,
    **others,
):
    if a:
        return helper(a,
                      b)
    return 1
"""


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("       2)", "       -2)", "line 7 is new: b=(1, -2)"),
        ("wide: int = 3", "wide: int = 4", "line 9 is new: wide: int = 4"),
        (
            "@functools.cache\n",
            "@functools.lru_cache(\n    maxsize=2)\n",
            "line 3 is new: @functools.lru_cache( maxsize=2)",
        ),
        ("@staticmethod\n", "@staticmethod\n@functools.cache\n", "line 5 is new: @functools.cache"),
        ("@functools.cache\n", "", "1 part before line 3 gone"),
        ("                      b)", "                      -b)", "line 13 is new: return helper(a, -b)"),
        ("if a:", "if not a:", "line 12 is new: if not a:"),
    ],
)
def test_the_text_shows_the_argument_decorator_or_statement_that_changed(world, old, new, text):
    world.write("up/m.py", CHANGED)
    world.python("def new(*args, **kwargs): return 'new'\n")
    entries = _locked(world, "")
    world.write("up/m.py", CHANGED.replace(old, new))
    with pytest.raises(DriftError) as caught:
        _apply(entries)
    assert f"(up unknown): {text}. Review the patch" in str(caught.value)


def test_a_class_that_gets_another_base_shows_it(world):
    world.write("up/m.py", "class C(dict):\n    def f(self):\n        return 1\n")
    world.python("class New:\n    pass\n")
    entries = world.one("replace: p.py:New", "up.m:C")
    drift.lock(entries)
    world.write("up/m.py", "class C(list):\n    def f(self):\n        return 1\n")
    with pytest.raises(DriftError, match=r": line 1 is new: list\. Review"):
        _apply(entries)


def test_statements_that_are_gone_are_told(world):
    entries = _locked(world)
    world.write("up/m.py", UP.replace("    for i in range(b):\n        c += i\n", ""))
    with pytest.raises(DriftError, match=r"2 parts before line 7 gone"):
        _apply(entries)


def test_several_known_good_rows_stand_beside_each_other(world, monkeypatch):
    version = {"up": "1.0"}
    monkeypatch.setattr(drift, "installed", lambda name: version[name])
    entries = _locked(world)
    world.write("up/m.py", UP.replace("range(b)", "range(b + 0)"))
    version["up"] = "2.0"
    with pytest.raises(DriftError, match=r"\(up 1.0\): line 7 is new: for i in range\(b \+ 0\):"):
        _apply(entries)
    assert drift.lock(entries) == ["up.m:f: changed"]
    assert _apply(entries) == "locked"
    world.write("up/m.py", UP)
    assert _apply(entries) == "locked"
    world.write("up/m.py", UP.replace("range(b)", "range(b + 9)"))
    with pytest.raises(DriftError, match=r"\(up 1.0 or up 2.0\)"):
        _apply(entries)
    rows = read_lock(world.patches / "up")["up.m:f"].rows
    assert [row.versions for row in rows] == [{"up": "1.0"}, {"up": "2.0"}]


def _rows(world):
    return [row.seen_at() for row in read_lock(world.patches / "up")["up.m:f"].rows]


def test_a_row_of_a_checkout_has_the_commit_that_its_source_was_first_seen_at(world):
    first = committed(world.site)
    entries = _locked(world)
    assert _rows(world) == [{"commit": first}]
    text = (world.patches / "up" / "lock.yaml").read_text()
    assert f'  rows:\n    - commit: "{first}"\n      signature: ' in text and "dirty" not in text
    world.write("up/other.py", "x = 1\n")
    committed(world.site)
    assert drift.lock(entries) == []
    world.write("up/m.py", UP.replace("range(b)", "range(b + 0)"))
    third = committed(world.site)
    with pytest.raises(DriftError, match=rf"\(commit {first[:12]}\): line 7 is new: for i in range\(b \+ 0\):"):
        _apply(entries)
    assert drift.lock(entries) == ["up.m:f: changed"]
    assert _rows(world) == [{"commit": first}, {"commit": third}]
    assert _apply(entries) == "locked"


def test_a_row_of_a_checkout_with_changes_says_so_until_they_are_committed(world):
    first = committed(world.site)
    entries = _locked(world)
    for change in ("range(b + 0)", "range(b + 1)"):
        world.write("up/m.py", UP.replace("range(b)", change))
        assert drift.lock(entries) == ["up.m:f: changed"]
        assert _rows(world) == [{"commit": first}, {"commit": first, "dirty": True}]
    assert "\n      dirty: true\n" in (world.patches / "up" / "lock.yaml").read_text()
    world.write("up/m.py", UP.replace("range(b)", "range(b + 2)"))
    with pytest.raises(DriftError, match=rf"\(commit {first[:12]} or commit {first[:12]} with changes\)"):
        _apply(entries)
    world.write("up/m.py", UP.replace("range(b)", "range(b + 1)"))
    second = committed(world.site)
    assert drift.lock(entries) == ["up.m:f: changed"]
    assert _rows(world) == [{"commit": first}, {"commit": second}]
    assert drift.lock(entries) == []


def test_changes_beside_a_commits_source_leave_its_row_as_it_is(world):
    first = committed(world.site)
    entries = _locked(world)
    world.write("up/__init__.py", "# edited\n")
    assert drift.lock(entries) == [] and _rows(world) == [{"commit": first}]


def test_a_row_that_was_unknown_gets_its_commit_and_keeps_it_without_git(world, monkeypatch):
    entries = _locked(world)
    assert _rows(world) == [{"up": "unknown"}]
    first = committed(world.site)
    assert drift.lock(entries) == ["up.m:f: changed"]
    assert _rows(world) == [{"commit": first}]
    monkeypatch.setenv("PATH", "")
    assert drift.lock(entries) == [] and _rows(world) == [{"commit": first}]


def test_an_installed_distribution_keeps_its_version_in_a_repository(world, monkeypatch):
    committed(world.site)
    monkeypatch.setattr(drift, "installed", lambda name: "1.0")
    _locked(world)
    assert _rows(world) == [{"up": "1.0"}]


def test_a_package_of_one_module_and_a_package_itself_have_their_commit(world):
    world.write("other.py", "def f(a): return 1\n")
    world.write("up/__init__.py", "def g(a): return 1\n")
    commit = committed(world.site)
    world.python("def new(a): return 2\n")
    entries = world.yaml(
        "id: up.one\n  target: other:f\n  replace: p.py:new\n- id: up.two\n  target: up:g\n  replace: p.py:new"
    )
    drift.lock(entries)
    locked = read_lock(world.patches / "up")
    assert {key: [row.commit for row in one.rows] for key, one in locked.items()} == {
        "other:f": [commit],
        "up:g": [commit],
    }


def test_a_commit_that_is_none_is_refused_with_its_line(world):
    committed(world.site)
    entries = _locked(world)
    file = world.patches / "up" / "lock.yaml"
    file.write_text(re.sub(r'commit: "[0-9a-f]{40}"', 'commit: "main"', file.read_text()))
    with pytest.raises(WrongTypeError, match=r"patches/up/lock.yaml:4: 'rows.0.commit' is 'main'"):
        _apply(entries)


def test_a_target_of_480_branches_is_locked(world):
    world.write("up/m.py", "def f(a):\n    if a:\n        pass\n" + "    elif a:\n        pass\n" * 480)
    entries = world.one("replace: p.py:new", "up.m:f")
    with ThreadPoolExecutor(1) as pool:  # a thread has the whole of the stack, which pytest's calls do not shorten
        assert pool.submit(drift.lock, entries).result() == ["up.m:f: new"]
        assert pool.submit(drift.check, entries[0]).result() == "locked"


def test_a_target_that_nothing_patches_any_more_is_dropped_from_the_lock(world):
    _locked(world)
    world.python("def helped(x): return 1\n")
    entries = world.one("replace: p.py:helped", "up.m:helper")
    assert drift.lock(entries) == ["up.m:f: dropped", "up.m:helper: new"]


def test_a_lock_that_is_no_lock_is_refused(world):
    (world.patches / "up").mkdir(exist_ok=True)
    (world.patches / "up" / "lock.yaml").write_text("a: 1\n")
    with pytest.raises(WrongTypeError, match=r"patches/up/lock.yaml:1: The lock is no list. Write it with: torchport"):
        _apply(world.one("replace: p.py:new", "up.m:f"))


def test_classes_are_locked_too(world):
    world.write("up/m.py", "class C:\n    '''Doc.'''\n    def f(self):\n        return 1\n")
    world.python("class New:\n    pass\n")
    entries = world.one("replace: p.py:New", "up.m:C")
    drift.lock(entries)
    world.write("up/m.py", "class C:\n    def f(self):\n        return 2\n")
    with pytest.raises(DriftError, match=r"line 3 is new: return 2"):
        _apply(entries)


def _outcome(world, **fields):
    more = "\n".join(f"{name}: {value}" for name, value in fields.items())
    entries = world.one("replace: p.py:new", "up.m:f", more)
    with patch.applied(entries) as ledger:
        row = ledger.rows()[0]
        ledger.check_called()
    return row["state"], row["detail"]


def _installed(monkeypatch, found):
    def version(name):
        if name not in found:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(versions.importlib.metadata, "version", version)


def _with_fits(world, fits):
    file = world.patches / "up" / "p.yaml"
    world.one("replace: p.py:new", "up.m:f")
    file.write_text(file.read_text().replace('{up: "*"}', fits))
    return patch.read(world.patches, ["up"])


def test_an_upstream_outside_fits_is_refused(world, monkeypatch):
    _installed(monkeypatch, {"up": "3.1"})
    with pytest.raises(UnsupportedError) as caught:
        _apply(_with_fits(world, '{up: ">=1,<3"}'))
    assert str(caught.value) == (
        "patches/up/p.yaml:1: 'up.one' does not fit: up is 3.1, not >=1,<3. "
        "Review it against that version and widen 'fits'."
    )
    _installed(monkeypatch, {})
    with pytest.raises(UnsupportedError, match="up >=1 is asked for, and no version of it is known"):
        _apply(_with_fits(world, '{up: ">=1"}'))


def test_a_patch_that_is_not_needed_steps_aside_where_it_would_not_fit(world, monkeypatch):
    """The fault ended with version 2, so nobody has reviewed the patch against version 3."""
    _installed(monkeypatch, {"up": "3.1"})
    world.one("replace: p.py:new", "up.m:f", 'needed: {up: "<=2"}')
    file = world.patches / "up" / "p.yaml"
    file.write_text(file.read_text().replace('fits: {up: "*"}', 'fits: {up: "<=2"}'))
    with patch.applied(patch.read(world.patches, ["up"])) as ledger:
        assert ledger.records[0].state() == "not needed"
    _installed(monkeypatch, {})
    with pytest.raises(UnsupportedError, match="up <=2 is asked for, and no version of it is known"):
        _apply(patch.read(world.patches, ["up"]))


@pytest.mark.parametrize(
    ("version", "fits"), [("2.13.0+cpu", "==2.13.0"), ("3.0.dev5", ">=2.9"), ("2.9.0rc1", ">=2.9.0rc0"), ("1.0", "*")]
)
def test_development_and_local_versions_are_ordered(world, monkeypatch, version, fits):
    _installed(monkeypatch, {"up": version})
    assert _apply(_with_fits(world, f'{{up: "{fits}"}}')) == "unlocked"


def test_a_patch_that_is_not_needed_says_why_and_need_not_be_called(world, monkeypatch):
    _installed(monkeypatch, {"up": "3.1"})
    assert _outcome(world, needed='{up: "<3"}', must_be_called="[denoise]") == (
        "not needed",
        "up is 3.1, not <3; delete the entry when no supported upstream needs it",
    )
    assert _outcome(world, needed='{up: ">=3"}')[0] == "armed"


def test_a_probe_decides_and_is_run_only_when_the_versions_ask_for_it(world, monkeypatch):
    _installed(monkeypatch, {"up": "3.1"})
    world.python("def new(a, b=1): pass\ndef yes(): return True\ndef no(): return False\ndef bad(): return 1 / 0\n")
    assert _outcome(world, needed='{probe: "p.py:yes"}')[0] == "armed"
    assert _outcome(world, needed='{probe: "p.py:no"}') == ("not needed", "p.py:no finds no fault")
    assert _outcome(world, needed='{up: "<3", probe: "p.py:bad"}')[0] == "not needed"
    with pytest.raises(ReplacementError, match=r"The probe 'p.py:bad' of 'up.one' fails: ZeroDivisionError: division"):
        _outcome(world, needed='{probe: "p.py:bad"}')
    world.python("def new(a, b=1): pass\ndef odd(): return 1\n")
    with pytest.raises(ReplacementError, match=r"The probe 'p.py:odd' of 'up.one' answers 1. Return True where"):
        _outcome(world, needed='{probe: "p.py:odd"}')
