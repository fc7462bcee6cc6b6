"""What `torchport check` finds, what it tried, and the exit code that follows."""

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
from torchport.errors import DRIFT_EXIT_CODE, BadValueError, PatchError, TorchportError, printable
from torchport.files import folder
from torchport.files.atomic import writing
from torchport.patch import Entry
from torchport.porting.scan import RULES

# Exit codes: the lowest of 3, 4 and 5 that occurs; 1 for findings of any other sort.
_CODES = {"TP207": DRIFT_EXIT_CODE, "TP203": 4, "TP204": 4, "TP206": 5}


@dataclasses.dataclass(frozen=True)
class Finding:
    id: str  #: The diagnostic id, as TP207.
    place: str  #: `file:line`.
    text: str
    patch: str
    step: str  #: schema, card, job, targets, drift, apply, undo or called.
    #: For drift, what accepting it would change in the lock file, as a unified diff.
    review: str = ""


@dataclasses.dataclass(frozen=True)
class Case:
    """One step that was tried on one patch or file, with or without a finding."""

    place: str  #: `file:line`.
    patch: str
    step: str
    skipped: str = ""  #: Why it was not tried after all; empty where it was.


@dataclasses.dataclass
class Report:
    """All that was found, and all that was tried."""

    findings: list[Finding] = dataclasses.field(default_factory=list)
    cases: list[Case] = dataclasses.field(default_factory=list)
    #: What is worth knowing and no mistake, a line each, in the text alone.
    notes: list[str] = dataclasses.field(default_factory=list)

    def try_entry(self, entry: Entry, step: str, skipped: str = "") -> None:
        """Notes that a step of an entry is tried, or why it is not."""
        self.cases.append(Case(entry.place, entry.id, step, skipped))

    def add(self, error: TorchportError, step: str, patch: str = "", review: str = "") -> None:
        """Adds a refusal as a finding, once, and each other mistake that it was found with."""
        findings = [of_error(mistake, step, patch, review) for mistake in (error, *error.others)]
        self.findings += [finding for finding in findings if finding not in self.findings]

    def extend(self, other: Report) -> None:
        """Adds what another report has and this one has not; a patch is tried in more than one process."""
        self.findings = [*dict.fromkeys([*self.findings, *other.findings])]
        self.cases = [*dict.fromkeys([*self.cases, *other.cases])]
        self.notes = [*dict.fromkeys([*self.notes, *other.notes])]


def of_error(error: TorchportError, step: str, patch: str = "", review: str = "") -> Finding:
    return Finding(error.id, error.place, f"{error.fact}. {error.remedy}.", patch, step, review)


def of_entry(entry: Entry, text: str, step: str) -> Finding:
    """Returns what no error of its own says about an entry."""
    return Finding(PatchError.id, entry.place, text, entry.id, step)


def exit_code(findings: Iterable[Finding]) -> int:
    """Returns 0 if there are none, else the lowest of 3 drift, 4 late or aliased, 5 not called; 1 for any other."""
    codes = {_CODES.get(finding.id, 1) for finding in findings}
    return min(codes - {1}, default=1) if codes else 0


AnyReport = TypeVar("AnyReport")
_LEVELS = {"covered": "note", "unknown": "warning"}
"""The level of a scan's finding, by what is to be done about it; everything else is an error."""


def as_text(report: Report) -> str:
    """Returns one line per finding, the notes, and a last line that counts the findings."""
    lines = [printable(f"{finding.place}: {finding.id} {finding.text}") for finding in report.findings]
    count = f"{len(lines)} finding{'s' if len(lines) > 1 else ''}" if lines else "clean"
    return "\n".join([*lines, *map(printable, report.notes), count])


def as_json(report: Report) -> str:
    return json.dumps([dataclasses.asdict(finding) for finding in report.findings], indent=2)


def as_github(report: Report) -> str:
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
    escapes = {letter: f"%{ord(letter):02X}" for letter in f"%\r\n{more}"}
    return "".join(escapes.get(letter) or printable(letter) for letter in value)


def as_sarif(report: Report) -> str:
    """Returns the findings as SARIF 2.1.0, with files relative to the repository that the current folder is in."""
    ids = sorted({finding.id for finding in report.findings})
    here = Path.cwd()
    root = next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)
    results = []
    for finding in report.findings:
        file, line = _file_and_line(finding.place)
        location = {"artifactLocation": {"uri": _uri(file, root)}, "region": {"startLine": max(line, 1)}}
        results.append(
            {
                "ruleId": finding.id,
                "ruleIndex": ids.index(finding.id),
                "level": _LEVELS.get(finding.step, "error"),
                "message": {"text": printable(finding.text)},
                "locations": [{"physicalLocation": location}],
                "partialFingerprints": {"torchport/v1": _fingerprint(finding, root)},
            }
        )
    driver = {"name": "torchport", "version": __version__, "rules": [_rule(id) for id in ids]}
    run = {"tool": {"driver": driver}, "results": results}
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return json.dumps({"$schema": schema, "version": "2.1.0", "runs": [run]}, indent=2)


def _rule(id: str) -> dict[str, Any]:
    """Returns what SARIF knows of an id: the documentation of its class, or of a scan's rule."""
    if id in RULES:
        name, title, page = RULES[id].kind, RULES[id].title, scan_section(id)
    else:
        kind = next(kind for kind in errors.kinds() if kind.id == id)
        page = inspect.getdoc(kind) or ""
        name, title = kind.__name__, page.partition("\n")[0]
    return {
        "id": id,
        "name": name,
        "shortDescription": {"text": title},
        "fullDescription": {"text": page},
        "help": {"text": f"{page}\n\nSee: torchport explain {id}"},
        "defaultConfiguration": {"level": "error"},
    }


def _uri(file: str, root: Path) -> str:
    """Returns a file as a reference: relative to a repository if it lies in it, else absolute."""
    path = Path(os.path.normpath(Path.cwd() / file))
    # A name that is no UTF-8 is quoted by its bytes, as `as_uri` does.
    return urllib.parse.quote(os.fsencode(path.relative_to(root))) if path.is_relative_to(root) else path.as_uri()


def _fingerprint(finding: Finding, root: Path) -> str:
    """Returns a hash of a finding that stays the same when its lines move."""
    what = re.sub(r"(:|\bline )\d+", "", finding.text)
    parts = (finding.id, _uri(_file_and_line(finding.place)[0], root), finding.patch, finding.step, what)
    return hashlib.sha256(os.fsencode("\0".join(parts))).hexdigest()[:32]


def as_junit(report: Report) -> str:
    """Returns a test case for each patch and step, in one suite per file, as JUnit's XML.

    The elements and attributes are those that Jenkins' schema and Surefire's have in common: no file, no line.
    """
    suites: dict[str, dict[tuple[str, str], list[Case | Finding]]] = {}
    everything: list[Case | Finding] = [*report.cases, *report.findings]
    for item in everything:
        file, _ = _file_and_line(item.place)
        if isinstance(item, Finding) and item.patch:  # what upstream's file shows belongs to the patch
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
    suite = ElementTree.Element("testsuite", name=printable(file))
    for (patch, step), all_of_it in tests.items():
        name = f"{patch or Path(file).name} {step}"
        case = ElementTree.SubElement(suite, "testcase", classname=printable(file), name=printable(name), time="0")
        failures = [item for item in all_of_it if isinstance(item, Finding)]
        reasons = [item.skipped for item in all_of_it if isinstance(item, Case) and item.skipped]
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
"""The format of a file that `--report` names, by its ending."""


def check_report_file(file: Path, formats: Collection[str]) -> None:
    """Refuses a file that no report can be written to, before minutes are spent on it."""
    endings = {ending: form for ending, form in ENDINGS.items() if form in formats}
    if file.suffix not in endings:
        known = ", ".join(f"{ending} ({form})" for ending, form in endings.items())
        raise BadValueError(f"--report {file}", f"'{file.suffix}' is the ending of no format", f"Known: {known}")
    folder.check_writable("--report", file)


def write_report(report: AnyReport, file: Path, formats: Mapping[str, Callable[[AnyReport], str]]) -> None:
    with writing(file) as temporary:
        temporary.write_text(formats[ENDINGS[file.suffix]](report) + "\n", encoding="utf-8")
