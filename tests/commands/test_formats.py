"""The formats of `torchport check`."""

from __future__ import annotations

import json

from torchport.commands import formats
from torchport.commands.findings import Finding, Report


def test_findings_are_written_in_six_formats():
    found = Report([Finding("TP207", "patches/up/p.yaml:3", "It drifted 10%.", "up.one", "drift")])
    assert formats.text(found) == "patches/up/p.yaml:3: TP207 It drifted 10%.\n1 findings"
    assert formats.github(found) == "::error file=patches/up/p.yaml,line=3,title=TP207::It drifted 10%25."
    assert json.loads(formats.as_json(found))[0]["patch"] == "up.one"
    (result,) = json.loads(formats.sarif(found))["runs"][0]["results"]
    assert result["locations"][0]["physicalLocation"]["region"] == {"startLine": 3}
    assert set(formats.FORMATS) == {"text", "json", "sarif", "github", "junit", "markdown"}


def test_what_github_would_take_for_a_command_of_its_own_is_escaped():
    text = "100%\r\n::warning::a\x85b\u2028c\u2029d\x1b[31m, e: f"
    (line,) = formats.github(Report([Finding("TP101", "patches/up/a,b:c%.yaml:3", text, "", "schema")])).splitlines()
    assert line == (
        "::error file=patches/up/a%2Cb%3Ac%25.yaml,line=3,title=TP101::"
        "100%25%0D%0A::warning::a\\x85b\\u2028c\\u2029d\\x1b[31m, e: f"
    )
    (line,) = formats.github(Report([Finding("TP200", "a\nb", "c", "", "apply")])).splitlines()
    assert line == "::error title=TP200::c"


def test_findings_are_one_line_each_without_control_characters():
    text = "Unknown key '\x1b[2J'.\nAnd\r\u2028more."
    found = Report([Finding("TP103", "a\x1b.yaml:1", text, "", "schema")])
    lines = formats.text(found).splitlines()
    assert lines == ["a\\x1b.yaml:1: TP103 Unknown key '\\x1b[2J'. And\\r\\u2028more.", "1 findings"]
    for form in formats.FORMATS.values():
        assert all(letter.isprintable() or letter == "\n" for letter in form(found))
