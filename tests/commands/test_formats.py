"""The formats of `torchport check`."""

from __future__ import annotations

import dataclasses
import json
from xml.etree import ElementTree

import pytest
from fakes import sarif

from torchport.commands import findings
from torchport.commands.findings import Case, Finding, Report
from torchport.errors import KINDS


def test_findings_are_written_in_five_formats():
    found = Report([Finding("TP207", "patches/up/p.yaml:3", "It drifted 10%.", "up.one", "drift")])
    assert findings.as_text(found) == "patches/up/p.yaml:3: TP207 It drifted 10%.\n1 finding"
    assert findings.as_github(found) == "::error file=patches/up/p.yaml,line=3,title=TP207::It drifted 10%25."
    assert json.loads(findings.as_json(found))[0]["patch"] == "up.one"
    (result,) = json.loads(findings.as_sarif(found))["runs"][0]["results"]
    assert result["locations"][0]["physicalLocation"]["region"] == {"startLine": 3}
    assert set(findings.FORMATS) == {"text", "json", "sarif", "github", "junit"}


def test_what_github_would_take_for_a_command_of_its_own_is_escaped():
    text = "100%\r\n::warning::a\x85b\u2028c\u2029d\x1b[31m, e: f"
    (line,) = findings.as_github(
        Report([Finding("TP101", "patches/up/a,b:c%.yaml:3", text, "", "schema")])
    ).splitlines()
    assert line == (
        "::error file=patches/up/a%2Cb%3Ac%25.yaml,line=3,title=TP101::"
        "100%25%0D%0A::warning::a\\x85b\\u2028c\\u2029d\\x1b[31m, e: f"
    )
    (line,) = findings.as_github(Report([Finding("TP200", "a\nb", "c", "", "apply")])).splitlines()
    assert line == "::error title=TP200::c"


def test_findings_are_one_line_each_without_control_characters():
    text = "Unknown key '\x1b[2J'.\nAnd\r\u2028more."
    found = Report([Finding("TP103", "a\x1b.yaml:1", text, "", "schema")])
    lines = findings.as_text(found).splitlines()
    assert lines == ["a\\x1b.yaml:1: TP103 Unknown key '\\x1b[2J'. And\\r\\u2028more.", "1 finding"]
    for form in findings.FORMATS.values():
        assert all(letter.isprintable() or letter == "\n" for letter in form(found))


DRIFT = Finding(
    "TP207", "patches/up/p.yaml:3", "It drifted at line 7 (up/m.py:8).", "up.one", "drift", "--- a\n+++ b\n-x"
)
ABSENT = Finding("TP201", "up/m.py:12", "Importing up.m fails.", "up.two", "apply")
WHOLE = Finding("TP101", "patches/up/q.yaml:2", "Not YAML.", "", "schema")
CASES = [
    Case("patches/up/p.yaml:3", "up.one", "schema"),
    Case("patches/up/p.yaml:3", "up.one", "drift"),
    Case("patches/up/p.yaml:9", "up.two", "schema"),
    Case("patches/up/p.yaml:9", "up.two", "apply"),
    Case("patches/up/p.yaml:20", "up.three", "targets", skipped="not needed: up is 2"),
]
REPORT = Report([DRIFT, ABSENT, WHOLE], CASES)


def _sarif(report):
    (run,) = json.loads(findings.as_sarif(report))["runs"]
    return run


def _uris(*places):
    report = Report([Finding("TP207", place, "text", "up.one", "drift") for place in places])
    locations = [result["locations"][0]["physicalLocation"] for result in _sarif(report)["results"]]
    return [(where["artifactLocation"]["uri"], where["region"]["startLine"]) for where in locations]


def test_files_in_sarif_are_relative_to_the_repository_that_they_lie_in(tmp_path, monkeypatch):
    (tmp_path / "repository" / ".git").mkdir(parents=True)
    here = tmp_path / "repository" / "a pack"
    here.mkdir()
    monkeypatch.chdir(here)
    assert _uris("patches/up/p.yaml:3", f"{here}/patches/p.yaml:4", f"{tmp_path}/elsewhere/p.yaml:5", "--model x") == [
        ("a%20pack/patches/up/p.yaml", 3),
        ("a%20pack/patches/p.yaml", 4),
        ((tmp_path / "elsewhere" / "p.yaml").as_uri(), 5),
        ("a%20pack/--model%20x", 1),
    ]
    monkeypatch.chdir(tmp_path)
    assert _uris("patches/up/p.yaml:3", "../p.yaml:1") == [
        ("patches/up/p.yaml", 3),
        ((tmp_path.parent / "p.yaml").as_uri(), 1),
    ]


def test_every_rule_of_sarif_is_explained():
    run = _sarif(REPORT)
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == ["TP101", "TP201", "TP207"]
    assert rules[2]["name"] == "DriftError" and rules[2]["shortDescription"]["text"].startswith(
        "The source of the target"
    )
    assert all(rules[result["ruleIndex"]]["id"] == result["ruleId"] for result in run["results"])
    for kind in KINDS.values():
        (rule,) = _sarif(Report([Finding(kind.id, "a:1", "b", "", "c")]))["tool"]["driver"]["rules"]
        assert rule["fullDescription"]["text"].startswith(rule["shortDescription"]["text"].rstrip(".")), kind
        assert rule["help"]["text"].endswith(f"torchport explain {kind.id}")


def test_a_fingerprint_outlives_a_move_and_tells_findings_apart():
    def fingerprint(**changes):
        report = Report([dataclasses.replace(DRIFT, **changes)])
        return _sarif(report)["results"][0]["partialFingerprints"]["torchport/v1"]

    assert fingerprint(place="patches/up/p.yaml:30", text="It drifted at line 9 (up/m.py:80).") == fingerprint()
    changes = [{}, {"id": "TP201"}, {"patch": "up.two"}, {"step": "apply"}, {"text": "x"}, {"place": "q.yaml:3"}]
    assert len({fingerprint(**change) for change in changes}) == len(changes)


def test_sarif_is_what_its_schema_accepts():
    odd = Finding("TP200", "a b\x1b/ü:x", "text\x00\n", "", "undo")
    for report in (Report(), REPORT, Report([odd])):
        sarif.check(json.loads(findings.as_sarif(report)))
    with pytest.raises(Exception, match="'tool' is a required property"):
        sarif.check({"version": "2.1.0", "runs": [{}]})


ATTRIBUTES = {
    "testsuites": {"tests", "failures", "errors"},
    "testsuite": {"name", "tests", "failures", "errors", "skipped"},
    "testcase": {"classname", "name", "time"},
    "failure": {"type", "message"},
    "skipped": {"message"},
}
CHILDREN = {"testsuites": {"testsuite"}, "testsuite": {"testcase"}, "testcase": {"failure", "skipped"}}


def test_junit_has_a_case_for_each_patch_and_step_those_that_pass_included():
    root = ElementTree.fromstring(findings.as_junit(REPORT))
    for element in root.iter():
        assert set(element.attrib) == ATTRIBUTES[element.tag]
        assert {child.tag for child in element} <= CHILDREN.get(element.tag, set())
    first, second = root
    assert [(case.get("name"), [child.tag for child in case]) for case in first] == [
        ("up.one schema", []),
        ("up.one drift", ["failure"]),
        ("up.two schema", []),
        ("up.two apply", ["failure"]),
        ("up.three targets", ["skipped"]),
    ]
    assert [suite.get("name") for suite in root] == ["patches/up/p.yaml", "patches/up/q.yaml"]
    assert {case.get("classname") for case in first} == {"patches/up/p.yaml"}
    assert [first.get(key) for key in ("tests", "failures", "skipped", "errors")] == ["5", "2", "1", "0"]
    assert [root.get(key) for key in ("tests", "failures", "errors")] == ["6", "3", "0"]
    assert [case.get("name") for case in second] == ["q.yaml schema"]
    assert first[3][0].text == "up/m.py:12: TP201 Importing up.m fails."
    assert [(case.find("failure").get("type")) for case in second] == ["TP101"]
    assert findings.as_junit(Report()) == '<testsuites tests="0" failures="0" errors="0" />'


def test_several_findings_of_one_step_are_one_case_of_junit_and_odd_letters_are_written_out():
    odd = dataclasses.replace(DRIFT, text="a\x00b\ud800 <&> \ufffe")
    (suite,) = ElementTree.fromstring(findings.as_junit(Report([DRIFT, odd])))
    (case,) = suite
    assert [failure.get("message") for failure in case] == [DRIFT.text, "a\\x00b\\ud800 <&> \\ufffe"]
    assert suite.get("failures") == "1"


def test_a_report_is_written_in_the_format_of_each_ending(tmp_path):
    files = [tmp_path / f"check{ending}" for ending in findings.ENDINGS]
    for file in files:
        findings.check_report_file(file, findings.FORMATS)
        findings.write_report(REPORT, file, findings.FORMATS)
    for file in files:
        assert file.read_text() == findings.FORMATS[findings.ENDINGS[file.suffix]](REPORT) + "\n"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (
            "check.html",
            "--report check.html: '.html' is the ending of no format. Known: .txt (text), .json (json), .sarif "
            "(sarif), .xml (junit).",
        ),
        (
            "no/check.txt",
            "--report no/check.txt: It is no file, or lies in no folder. Name a file in a folder that is there.",
        ),
    ],
)
def test_a_report_that_cannot_be_written_is_refused_before_anything_is_checked(torchport, capsys, file, text):
    code, out, (line,) = torchport("check", "--static", "--report", file, capsys=capsys)
    assert (code, out) == (2, []) and line.partition("] ")[2] == text
