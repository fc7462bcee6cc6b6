"""`torchport check` and `torchport patches`: all findings of all patches, from fresh processes, as data."""

from __future__ import annotations

import json
import sys

import pytest
from fakes.patch_world import World

from torchport.commands import check, findings, patches
from torchport.commands.check import CheckProcess
from torchport.commands.findings import Finding, Report, exit_code
from torchport.errors import UnknownNameError, UnsupportedError
from torchport.processes.child import Ended


@pytest.fixture
def world(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)
    world.write("up/m.py", "def f(a):\n    return 1\n\ndef g(a):\n    return 2\n\ndef h(a):\n    return 3\n")
    world.python("def new(a): return 'new'\ndef other(b): return 'other'\n")
    yield world
    world.close()


def _entries(world, *targets, put="new"):
    parts = [f"id: up.{name}\n  target: up.m:{name}\n  replace: p.py:{put}" for name in targets]
    return world.yaml("\n- ".join(parts))


def _check(world):
    return check.check(world.patches, ["up"], upstream_path=world.site).findings


def test_a_locked_pack_is_clean(world):
    _entries(world, "f", "g")
    assert patches.lock(world.patches, ["up"], check=True) == ["up.m:f: new", "up.m:g: new"]
    assert patches.lock(world.patches, ["up/p"]) == ["up.m:f: new", "up.m:g: new"]
    assert _check(world) == []
    assert exit_code([]) == 0
    assert findings.as_text(Report()) == "clean"


def test_a_module_that_is_not_imported_without_its_stub_is_tried_with_it(world):
    world.write("up/m.py", "import flashy_attn\n\ndef f(a):\n    return 1\n")
    stub = "stub: {package: flashy_attn, importers: [up.m]}\n  plumbing: true"
    target = "id: up.f\n  target: up.m:f\n  replace: p.py:new"
    world.yaml(f"id: up.flashy\n  target: flashy_attn:f\n  {stub}\n- {target}")
    assert patches.lock(world.patches, ["up"]) == ["up.m:f: new"]
    assert _check(world) == []


def test_a_patch_that_needs_an_extra_which_is_not_installed_is_skipped(world):
    error = "AbsentPackageError('up', 'extra is not installed', 'Install it')"
    text = f"from torchport.errors import AbsentPackageError\nraise {error}\n"
    _entries(world, "f")
    assert patches.lock(world.patches, ["up/p"]) == ["up.m:f: new"]
    world.python(text)
    report = check.check(world.patches, ["up"], upstream_path=world.site)
    assert report.findings == []
    assert [case.skipped for case in report.cases if case.step == "targets"] == ["extra is not installed"]


def test_all_findings_are_gathered_and_the_lowest_code_is_given(world):
    world.write("up/m.py", "def f(a):\n    return 1\n\ndef h(a):\n    return 3\n\nPENDING = map(h, [])\n")
    _entries(world, "f", "absent", "h")
    findings = _check(world)
    told = sorted((finding.id, finding.patch, finding.step) for finding in findings)
    assert told == [
        ("TP201", "up.absent", "targets"),
        ("TP203", "up.h", "apply"),
        ("TP204", "up.h", "apply"),
        ("TP207", "up.f", "drift"),
        ("TP207", "up.h", "drift"),
    ]
    assert exit_code(findings) == 3
    assert exit_code([f for f in findings if f.id != "TP207"]) == 4
    assert exit_code([f for f in findings if f.id == "TP201"]) == 1


def test_drift_is_found_and_the_patch_is_tried_all_the_same(world):
    _entries(world, "f")
    patches.lock(world.patches)
    world.write("up/m.py", "def f(a):\n    return 10\n")
    (finding,) = _check(world)
    assert (finding.id, finding.place, finding.step) == ("TP207", "patches/up/p.yaml:1", "drift")
    assert "line 2 is new: return 10" in finding.text


def test_a_file_that_cannot_be_read_is_one_finding(world):
    (world.patches / "up").mkdir(exist_ok=True)
    (world.patches / "up" / "p.yaml").write_text("- id: [\n")
    (finding,) = _check(world)
    assert (finding.id, finding.step) == ("TP101", "schema")


PYTHON = f"Python {sys.version_info.major}.{sys.version_info.minor}"
UNREADABLE = f"{PYTHON} cannot read it: invalid syntax. Mend the file, or use a version of it for this Python."


@pytest.mark.parametrize(
    ("more", "key", "place", "text"),
    [
        ("def broken(:\n", "TP217", "up/m.py:10", UNREADABLE),
        (
            "\nimport up.x\n",
            "TP201",
            "up/m.py:11",
            "Importing up.m fails: ModuleNotFoundError: No module named 'up.x'. "
            "Install what it needs, or patch what fails.",
        ),
    ],
)
def test_an_upstream_that_does_not_import_is_one_finding_with_its_line(world, more, key, place, text):
    world.write("up/m.py", "def f(a):\n    return 1\n\ndef g(a):\n    return 2\n\ndef h(a):\n    return 3\n\n" + more)
    _entries(world, "f")
    findings = [finding for finding in _check(world) if finding.id != "TP207"]
    assert [(finding.id, finding.place) for finding in findings] == [(key, place)]
    assert findings[0].text == text


def test_a_callee_that_is_no_python_is_one_finding_with_its_line(world):
    world.write("up/other.py", "def helper(x):\n    return x\n")
    world.write("up/m.py", "from up.other import helper\ndef f(a):\n    return helper(a)\n")
    _entries(world, "f")
    patches.lock(world.patches)
    world.write("up/other.py", "def helper(x):\n    return x +\n")
    (finding,) = _check(world)
    assert (finding.id, finding.place) == ("TP217", "up/other.py:2")
    assert finding.text == UNREADABLE


def test_an_upstream_that_ends_the_process_is_a_finding(world):
    world.write("up/m.py", "import os\ndef f(a):\n    return 1\nos._exit(7)\n")
    _entries(world, "f")
    findings = _check(world)
    assert [finding.text for finding in findings] == [
        "The process that checks 'up' ended with exit code 7 and said: nothing. Mend what ends it while it is imported."
    ]


def test_an_upstreams_patches_share_a_process_and_all_that_come_late_share_another(world, monkeypatch):
    """Where that one ends, each upstream has its own; an upstream that ends under its patches is not tried late."""
    calls = []

    def call(function, folder, groups, mode, *, ended, **options):
        calls.append((mode, groups))
        if groups == [CheckProcess(("ends",))] or len(groups) > 1:
            raise ended(Ended(7, ""))
        return Report([Finding("TP201", "a", "b", "", "apply")])

    monkeypatch.setattr(check.child, "call", call)
    for name in ("up", "other", "ends"):
        (world.patches / name).mkdir(exist_ok=True)
    for name in ("up/p", "up/q", "other/p", "ends/p"):
        (world.patches / f"{name}.yaml").write_text("[]\n")
    findings = check.check(world.patches, ["up/p", "other", "up/q", "ends", "up/p"]).findings
    up, other = CheckProcess(("up/p", "up/q")), CheckProcess(("other",))
    assert calls[:3] == [("armed", [up]), ("armed", [other]), ("armed", [CheckProcess(("ends",))])]
    assert calls[3:] == [("late", [up, other]), ("late", [up]), ("late", [other])]
    assert [finding.text.partition(" and")[0] for finding in findings] == [
        "b",
        "The process that checks 'ends' ended with exit code 7",
    ]


def test_two_upstreams_that_come_late_in_one_process_are_each_checked(world):
    world.write("other/m.py", "def f(a):\n    return 1\n\nPENDING = map(f, [])\n")
    world.python("def new(a): return 'new'\n", upstream="other")
    world.yaml("id: other.f\n  target: other.m:f\n  replace: p.py:new", upstream="other")
    _entries(world, "f", "absent")
    findings = check.check(world.patches, ["up", "other"], upstream_path=world.site).findings
    assert {(finding.id, finding.patch) for finding in findings} == {
        ("TP201", "up.absent"),
        ("TP203", "other.f"),
        ("TP204", "other.f"),
        ("TP207", "other.f"),
        ("TP207", "up.f"),
    }


def test_where_nobody_sees_a_bar_each_upstream_has_a_line(world, torchport, capsys, caplog):
    _entries(world, "f")
    patches.lock(world.patches)
    (world.patches.parent / "configs" / "models").mkdir(parents=True)
    command = ("check", "--path", world.patches.parent, "--upstream-path", world.site)
    assert torchport(*command, "--static", capsys=capsys) == (0, ["clean"], []) and caplog.messages == []
    assert torchport(*command, capsys=capsys) == (0, ["clean"], [])
    assert caplog.messages == ["check ...", "check up (1 of 1) ...", "check patches after their modules ..."]


def test_a_checkout_on_which_a_patch_cannot_be_applied_is_not_locked(world):
    world.write("up/m.py", "def f(a):\n    return 1\n\ndef h(a):\n    return 3\n\nPENDING = map(h, [])\n")
    _entries(world, "f", "h")

    def tried(names):
        check.require_applied(world.patches, names, world.site)

    with pytest.raises(UnsupportedError) as caught:
        patches.lock(world.patches, ["up"], check_apply=tried)
    assert str(caught.value) == (
        "patches/up/p.yaml:9: Nothing is locked, as TP204 is found: up.m:h is still held by up.m.PENDING, a map. Patch "
        "that holder instead. See all findings with: torchport check up."
    )
    assert not (world.patches / "up" / "lock.yaml").exists()
    _entries(world, "f")
    assert patches.lock(world.patches, ["up"], check_apply=tried) == ["up.m:f: new"]
    world.write("up/m.py", "def f(a):\n    return 10\n")
    assert patches.lock(world.patches, ["up"], check_apply=tried) == ["up.m:f: changed"]


def test_patches_are_listed_and_shown_as_data(world, torchport, capsys):
    _entries(world, "f")
    _, (line,), _ = torchport("patches", "list", "up", "--path", str(world.patches.parent), capsys=capsys)
    assert line.split() == ["up.f", "replace", "bitwise", "up.m:f", "(not", "locked)", "patches/up/p.yaml:1"]
    patches.lock(world.patches)
    shown = patches.details(world.patches, "up.f")
    assert (shown["why"], shown["locked_at"], shown["installed"]) == ("A test.", [{"up": "unknown"}], {"up": None})
    json.dumps(shown)
    with pytest.raises(UnknownNameError, match=r"No patch 'up.g'. Did you mean 'up.f'"):
        patches.details(world.patches, "up.g")


def test_a_patch_that_a_manifest_does_not_show_as_called_is_a_finding(world, monkeypatch):
    entries = world.one("replace: p.py:new", "up.m:f", "must_be_called: [denoise]")
    row = {"id": "up.one", "state": "applied", "calls": 0}
    report = check.not_called([row], entries, "denoise")
    (finding,) = report.findings
    assert finding.text == "'up.one' was not called in denoise (it is applied). Find what is called instead of up.m:f."
    assert exit_code([finding]) == 5
    assert check.not_called([row], entries, "decode") == Report()
    assert check.not_called([{**row, "calls": 2}], entries, "denoise").findings == []
    assert check.not_called([{**row, "state": "not needed"}], entries, "denoise") == Report()
    assert "not in the ledger" in check.not_called([], entries, "denoise").findings[0].text
    monkeypatch.setattr(check.static_check, "check_cards", lambda *_: Report())
    monkeypatch.setattr(check.static_check, "read_cards", lambda *_: [])
    monkeypatch.setattr(check, "_not_called_by", lambda *_: report)
    assert check.report_of(["up"], "m", False, str(world.site), [str(world.patches.parent)]).findings[-1] == finding
