"""The formats of findings, and the files that reports are written to."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
import re
import urllib.parse
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from xml.etree import ElementTree

from torchport import __version__, errors
from torchport.commands.explain import scan_section
from torchport.commands.findings import Case, Finding, Report
from torchport.errors import BadValueError, printable
from torchport.files import folder
from torchport.files.atomic import writing
from torchport.porting.scan.rules import RULES

AnyReport = TypeVar("AnyReport")
_LEVELS = {"covered": "note", "unknown": "warning"}
"""The level of a scan's finding, by what is to be done about it; everything else is an error."""


def text(report: Report) -> str:
    """Returns one line per finding, and a last line that counts them."""
    lines = [printable(f"{finding.place}: {finding.id} {finding.text}") for finding in report.findings]
    return "\n".join([*lines, f"{len(lines)} finding{'s' if len(lines) > 1 else ''}" if lines else "clean"])


def as_json(report: Report) -> str:
    """Returns the findings as a JSON list."""
    return json.dumps([dataclasses.asdict(finding) for finding in report.findings], indent=2)


def github(report: Report) -> str:
    """Returns workflow commands that put each finding on its line of a pull request."""
    lines = []
    for finding in report.findings:
        file, line = _file_and_line(finding.place)
        at = f" file={_escaped(file, ':,')},line={line}," if line else " "
        lines.append(f"::error{at}title={_escaped(finding.id, ':,')}::{_escaped(finding.text)}")
    return "\n".join(lines)


def _file_and_line(place: str) -> tuple[str, int]:
    """Returns a place's file and its line; the place and 0 where it has no line."""
    file, _, line = place.rpartition(":")
    return (file, int(line)) if line.isdecimal() else (place, 0)


def _escaped(value: str, more: str = "") -> str:
    """Returns what a workflow command may hold: `%`, CR, LF and `more` as it reads them, other controls as `repr` does.

    Source: `actions/toolkit`, packages/core/src/command.ts; properties need `:` and `,` as well.
    """
    held = {letter: f"%{ord(letter):02X}" for letter in f"%\r\n{more}"}
    return "".join(held.get(letter) or printable(letter) for letter in value)


def sarif(report: Report) -> str:
    """Returns the findings as SARIF 2.1.0, with files relative to the repository that the current folder is in."""
    ids = sorted({finding.id for finding in report.findings})
    root = _repository(Path.cwd())
    results = [
        {
            "ruleId": finding.id,
            "ruleIndex": ids.index(finding.id),
            "level": _LEVELS.get(finding.step, "error"),
            "message": {"text": printable(finding.text)},
            "locations": [{"physicalLocation": _location(finding.place, root)}],
            "partialFingerprints": {"torchport/v1": _fingerprint(finding, root)},
        }
        for finding in report.findings
    ]
    driver = {"name": "torchport", "version": __version__, "rules": [_rule(id) for id in ids]}
    run = {"tool": {"driver": driver}, "results": results}
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return json.dumps({"$schema": schema, "version": "2.1.0", "runs": [run]}, indent=2)


def _rule(id: str) -> dict[str, Any]:
    """Returns what SARIF knows of an id: the documentation of its class, or of a scan's rule."""
    if id in RULES:
        return _rule_of(id, RULES[id].kind, RULES[id].title, scan_section(id))
    kind = next(kind for kind in errors.kinds() if kind.id == id)
    page = inspect.getdoc(kind) or ""
    return _rule_of(id, kind.__name__, page.partition("\n")[0], page)


def _rule_of(id: str, name: str, title: str, page: str) -> dict[str, Any]:
    return {
        "id": id,
        "name": name,
        "shortDescription": {"text": title},
        "fullDescription": {"text": page},
        "help": {"text": f"{page}\n\nSee: torchport explain {id}"},
        "defaultConfiguration": {"level": "error"},
    }


def _repository(here: Path) -> Path:
    """Returns the root of the repository that a folder is in; the folder itself if it is in none."""
    return next((one for one in (here, *here.parents) if (one / ".git").exists()), here)


def _location(place: str, root: Path) -> dict[str, Any]:
    file, line = _file_and_line(place)
    return {"artifactLocation": {"uri": _uri(file, root)}, "region": {"startLine": max(line, 1)}}


def _uri(file: str, root: Path) -> str:
    """Returns a file as a reference: relative to a repository if it lies in it, else absolute."""
    path = Path(os.path.normpath(Path.cwd() / file))
    return urllib.parse.quote(path.relative_to(root).as_posix()) if path.is_relative_to(root) else path.as_uri()


def _fingerprint(finding: Finding, root: Path) -> str:
    """Returns a hash of a finding that stays the same when its lines move."""
    what = re.sub(r"(:|\bline )\d+", "", finding.text)
    parts = (finding.id, _uri(_file_and_line(finding.place)[0], root), finding.patch, finding.step, what)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def junit(report: Report) -> str:
    """Returns a test case for each patch and step, in one suite per file, as JUnit's XML.

    The elements and attributes are those that Jenkins' schema and Surefire's have in common: no file, no line.
    """
    suites: dict[str, dict[tuple[str, str], list[Case | Finding]]] = {}
    everything: list[Case | Finding] = [*report.cases, *report.findings]
    for one in everything:
        file, _ = _file_and_line(one.place)
        if isinstance(one, Finding) and one.patch:  # what upstream's file shows belongs to the patch
            place = next((case.place for case in report.cases if case.patch == one.patch), one.place)
            file, _ = _file_and_line(place)
        suites.setdefault(file, {}).setdefault((one.patch, one.step), []).append(one)
    root = ElementTree.Element("testsuites")
    for file, tests in suites.items():
        root.append(_suite(file, tests))
    for name in ("tests", "failures", "errors"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=False)


def _suite(file: str, tests: Mapping[tuple[str, str], Sequence[Case | Finding]]) -> ElementTree.Element:
    suite = ElementTree.Element("testsuite", name=printable(file))
    for (patch, step), all_of_it in tests.items():
        name = f"{patch or Path(file).name} {step}"
        case = ElementTree.SubElement(suite, "testcase", classname=printable(file), name=printable(name), time="0")
        failures = [one for one in all_of_it if isinstance(one, Finding)]
        reasons = [one.skipped for one in all_of_it if isinstance(one, Case) and one.skipped]
        if reasons and not failures:
            ElementTree.SubElement(case, "skipped", message=printable(reasons[0]))
        for one in failures:
            failure = ElementTree.SubElement(case, "failure", type=one.id, message=printable(one.text))
            failure.text = printable(f"{one.place}: {one.id} {one.text}")
    counts = {"tests": "testcase", "failures": "testcase[failure]", "skipped": "testcase[skipped]"}
    for key, path in counts.items():
        suite.set(key, str(len(suite.findall(path))))
    suite.set("errors", "0")
    return suite


FORMATS: dict[str, Callable[[Report], str]] = {
    "text": text,
    "json": as_json,
    "sarif": sarif,
    "github": github,
    "junit": junit,
}
ENDINGS = {".txt": "text", ".json": "json", ".sarif": "sarif", ".xml": "junit"}
"""The format of a file that `--report` names, by its ending."""


def check_file(file: Path, formats: Collection[str]) -> None:
    """Refuses a file that no report can be written to, before minutes are spent on it.

    Args:
        file: The file.
        formats: The formats that the command can write.
    """
    endings = {ending: form for ending, form in ENDINGS.items() if form in formats}
    if file.suffix not in endings:
        known = ", ".join(f"{ending} ({form})" for ending, form in endings.items())
        raise BadValueError(f"--report {file}", f"'{file.suffix}' is the ending of no format", f"Known: {known}")
    folder.check_writable("--report", file)


def write(report: AnyReport, file: Path, formats: Mapping[str, Callable[[AnyReport], str]]) -> None:
    """Writes a report to a file, in the format of its ending."""
    with writing(file) as temporary:
        temporary.write_text(formats[ENDINGS[file.suffix]](report) + "\n", encoding="utf-8")
