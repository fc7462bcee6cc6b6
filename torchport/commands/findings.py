"""The findings of `torchport check`, the steps that it tried, the exit code, and the formats of reports."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
import re
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from xml.etree import ElementTree

from torchport import __version__, errors
from torchport.commands.explain import scan_section
from torchport.errors import DRIFT_EXIT_CODE, BadValueError, TorchportError, printable
from torchport.files import folder
from torchport.files.atomic import writing
from torchport.patch import Entry
from torchport.porting.scan import RULES

# Exit codes: the lowest of 3, 4 and 5 that occurs; 1 for findings of any other sort.
_CODES = {"TP207": DRIFT_EXIT_CODE, "TP203": 4, "TP204": 4, "TP206": 5}


@dataclasses.dataclass(frozen=True)
class Finding:
    """A mistake that a check found, or a fault of a verification, with its place."""

    id: str  #: The diagnostic id, as TP207.
    place: str  #: `file:line`.
    text: str
    patch: str
    #: schema, card, job, targets, drift, apply, undo or called; of a scan's finding its verdict.
    step: str
    #: For drift, the change of the lock file that would accept it, as a unified diff.
    review: str = ""


@dataclasses.dataclass(frozen=True)
class Case:
    """One step that was tried on one patch or file, with or without a finding."""

    place: str  #: `file:line`.
    patch: str
    step: str
    skipped: str = ""  #: Why the step was skipped; empty if it was tried.


@dataclasses.dataclass
class Report:
    """All findings of a check, and all steps that it tried."""

    findings: list[Finding] = dataclasses.field(default_factory=list)
    cases: list[Case] = dataclasses.field(default_factory=list)
    #: Facts worth knowing that are no mistakes, a line each; printed only as text.
    notes: list[str] = dataclasses.field(default_factory=list)

    def note_step(self, entry: Entry, step: str, skipped: str = "") -> None:
        """Notes that a step is tried on an entry, or why it is skipped."""
        self.cases.append(Case(entry.place, entry.id, step, skipped))

    def add(self, error: TorchportError, step: str, patch: str = "", review: str = "") -> None:
        """Adds an error and its `others`, which were found with it, as findings; none is added twice."""
        findings = [error_finding(mistake, step, patch, review) for mistake in (error, *error.others)]
        self.findings += [finding for finding in findings if finding not in self.findings]

    def extend(self, other: Report) -> None:
        """Adds the entries of another report that this one lacks: two processes may try the same patch."""
        self.findings = [*dict.fromkeys([*self.findings, *other.findings])]
        self.cases = [*dict.fromkeys([*self.cases, *other.cases])]
        self.notes = [*dict.fromkeys([*self.notes, *other.notes])]


def error_finding(error: TorchportError, step: str, patch: str = "", review: str = "") -> Finding:
    """Returns an error as a finding of a check's step; see `Finding` for `review`."""
    return Finding(error.id, error.place, f"{error.fact}. {error.remedy}.", patch, step, review)


def exit_code(findings: Iterable[Finding]) -> int:
    """Returns the lowest of 3 (drift), 4 (late or aliased) and 5 (not called) that occurs; else 1, or 0 without any."""
    codes = {_CODES.get(finding.id, 1) for finding in findings}
    return min(codes - {1}, default=1) if codes else 0  # 1 is the lowest number, and counts only if it is alone


AnyReport = TypeVar("AnyReport")
_LEVELS = {"covered": "note", "unknown": "warning"}
"""The SARIF level of a scan's finding, by its verdict, which is its `step`; all other findings are errors."""


def as_text(report: Report) -> str:
    """Returns one line per finding, the notes, and a last line that counts the findings."""
    lines = [printable(f"{finding.place}: {finding.id} {finding.text}") for finding in report.findings]
    count = f"{len(lines)} finding{'s' if len(lines) > 1 else ''}" if lines else "clean"
    return "\n".join([*lines, *map(printable, report.notes), count])


def as_json(report: Report) -> str:
    """Returns the findings as a JSON list of objects with the fields of `Finding`."""
    return json.dumps([dataclasses.asdict(finding) for finding in report.findings], indent=2)


def as_github(report: Report) -> str:
    """Returns workflow commands that put each finding on its line of a pull request."""
    lines = []
    for finding in report.findings:
        file, line = _file_and_line(finding.place)
        location = f" file={_escaped(file, ':,')},line={line}," if line else " "
        lines.append(f"::error{location}title={_escaped(finding.id, ':,')}::{_escaped(finding.text)}")
    return "\n".join(lines)


def _file_and_line(place: str) -> tuple[str, int]:
    """Returns the file and the line of a place `file:line`; the place and 0 if it has no line."""
    file, _, line = place.rpartition(":")
    return (file, int(line)) if line.isdecimal() else (place, 0)


def _escaped(value: str, more: str = "") -> str:
    """Returns a text escaped for a GitHub workflow command: `%`, CR, LF and `more` as %XX, other controls as `repr`.

    Source: `actions/toolkit`, packages/core/src/command.ts; properties need `:` and `,` as well.
    """
    escapes = {letter: f"%{ord(letter):02X}" for letter in f"%\r\n{more}"}
    return "".join(escapes.get(letter) or printable(letter) for letter in value)


def as_sarif(report: Report) -> str:
    """Returns the findings as SARIF 2.1.0, with files relative to the root of the current git repository."""
    ids = sorted({finding.id for finding in report.findings})
    here = Path.cwd()
    root = next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)
    results = []
    for finding in report.findings:
        file, line = _file_and_line(finding.place)
        path = Path(os.path.normpath(here / file))
        # A name that is not UTF-8 is quoted by its bytes, as `as_uri` does.
        uri = urllib.parse.quote(os.fsencode(path.relative_to(root))) if path.is_relative_to(root) else path.as_uri()
        # Without numbers of lines, a finding's fingerprint stays the same when its lines move.
        text = re.sub(r"(:|\bline )\d+", "", finding.text)
        facts = (finding.id, uri, finding.patch, finding.step, text)
        digest = hashlib.sha256(os.fsencode("\0".join(facts))).hexdigest()[:32]  # a file's name may be no UTF-8
        location = {"artifactLocation": {"uri": uri}, "region": {"startLine": max(line, 1)}}  # it counts from 1
        results.append(
            {
                "ruleId": finding.id,
                "ruleIndex": ids.index(finding.id),
                "level": _LEVELS.get(finding.step, "error"),
                "message": {"text": printable(finding.text)},
                "locations": [{"physicalLocation": location}],
                "partialFingerprints": {"torchport/v1": digest},
            }
        )
    driver = {"name": "torchport", "version": __version__, "rules": [_rule(id) for id in ids]}
    run = {"tool": {"driver": driver}, "results": results}
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return json.dumps({"$schema": schema, "version": "2.1.0", "runs": [run]}, indent=2)


def _rule(id: str) -> dict[str, Any]:
    """Returns the SARIF rule of an id: of a finding of scan its section in `explain`, else its class's docstring."""
    if id in RULES:
        name = RULES[id].kind
        title = RULES[id].title
        page = scan_section(id)
    else:
        kind = errors.KINDS[id]
        page = inspect.getdoc(kind) or ""
        name = kind.__name__
        title = page.partition("\n")[0]
    return {
        "id": id,
        "name": name,
        "shortDescription": {"text": title},
        "fullDescription": {"text": page},
        "help": {"text": f"{page}\n\nSee: torchport explain {id}"},
        "defaultConfiguration": {"level": "error"},
    }


def as_junit(report: Report) -> str:
    """Returns JUnit XML: a suite for each file, with a test case for each patch and step.

    Only elements and attributes occur that the schemas of Jenkins and Surefire share: no file, no line.
    """
    suites: dict[str, dict[tuple[str, str], list[Case | Finding]]] = {}
    everything: list[Case | Finding] = [*report.cases, *report.findings]
    for item in everything:
        file, _ = _file_and_line(item.place)
        if isinstance(item, Finding) and item.patch:  # a finding at upstream's file goes to the patch's file
            place = next((case.place for case in report.cases if case.patch == item.patch), item.place)
            file, _ = _file_and_line(place)
        suites.setdefault(file, {}).setdefault((item.patch, item.step), []).append(item)
    root = ElementTree.Element("testsuites")
    for file, tests in suites.items():
        root.append(_suite(file, tests))
    for name in ("tests", "failures", "errors"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=False)


def _suite(file: str, tests: Mapping[tuple[str, str], Sequence[Case | Finding]]) -> ElementTree.Element:
    """Returns the test suite of a file; `tests` has the cases and findings of each patch and step."""
    suite = ElementTree.Element("testsuite", name=printable(file))
    for (patch, step), items in tests.items():
        name = f"{patch or Path(file).name} {step}"
        case = ElementTree.SubElement(suite, "testcase", classname=printable(file), name=printable(name), time="0")
        failures = [item for item in items if isinstance(item, Finding)]
        reasons = [item.skipped for item in items if isinstance(item, Case) and item.skipped]
        if reasons and not failures:
            ElementTree.SubElement(case, "skipped", message=printable(reasons[0]))
        for failure in failures:
            element = ElementTree.SubElement(case, "failure", type=failure.id, message=printable(failure.text))
            element.text = printable(f"{failure.place}: {failure.id} {failure.text}")
    counts = {"tests": "testcase", "failures": "testcase[failure]", "skipped": "testcase[skipped]"}
    for key, path in counts.items():
        suite.set(key, str(len(suite.findall(path))))
    suite.set("errors", "0")
    return suite


FORMATS: dict[str, Callable[[Report], str]] = {
    "text": as_text,
    "json": as_json,
    "sarif": as_sarif,
    "github": as_github,
    "junit": as_junit,
}
ENDINGS = {".txt": "text", ".json": "json", ".sarif": "sarif", ".xml": "junit"}
"""The format of a `--report` file, by its ending."""


def check_report_file(file: Path, formats: Collection[str]) -> None:
    """Raises if a file has no ending of `formats`, or cannot be written; called before a check takes minutes."""
    endings = {ending: form for ending, form in ENDINGS.items() if form in formats}
    if file.suffix not in endings:
        known = ", ".join(f"{ending} ({form})" for ending, form in endings.items())
        raise BadValueError(f"--report {file}", f"'{file.suffix}' is the ending of no format", f"Known: {known}")
    folder.check_writable("--report", file)


def write_report(report: AnyReport, file: Path, formats: Mapping[str, Callable[[AnyReport], str]]) -> None:
    """Writes a report to a file, in the format that goes with the file's ending: `.sarif`, `.json`, `.xml`, `.txt`."""
    with writing(file) as temporary:
        temporary.write_text(formats[ENDINGS[file.suffix]](report) + "\n", encoding="utf-8")
