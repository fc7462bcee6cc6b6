"""`torchport scan`: what in a codebase will not port, as lines, JSON or SARIF."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchport.commands import findings, formats
from torchport.config.pack import find_pack
from torchport.errors import BadValueError, printable
from torchport.files import folder
from torchport.files.atomic import writing
from torchport.scan.finding import Finding, Report
from torchport.scan.scanning import scan


def report_of(path: Path, entries: Sequence[str], paths: Sequence[str]) -> Report:
    """Returns what a scan of a codebase finds, with the patches of the packs that are named.

    Raises:
        ConfigError: The command line names what is not there, or a file of patches has a mistake.
    """
    return scan(path, entries, find_pack(paths).folders)


def shown(report: Report, everything: bool = False) -> list[Finding]:
    """Returns the findings to show: those on the path, and files that could not be read; or all."""
    if everything:
        return list(report.findings)
    wanted = "path" if report.entries else "unknown"
    return [one for one in report.findings if one.reach == wanted or not one.meaning.in_code]


def text(report: Report, everything: bool = False) -> str:
    """Returns a line for each finding, and a last line that counts those on the path."""
    some = shown(report, everything)
    lines = [printable(_line(one)) for one in some]
    if len(some) < len(report.findings):
        lines.append(f"{len(report.findings) - len(some)} that the entry does not lead to: add --all")
    lines += [f"{one.package} is not installed here ({one.file}:{one.line}): {_ABSENT}" for one in report.absent]
    return "\n".join([*lines, report.count()])


_ABSENT = "install it, or stub it and rewrite what calls it"


def _line(one: Finding) -> str:
    place = f"{one.file}:{one.line}" if one.line else one.file
    if not one.meaning.in_code:
        return f"{place}: {one.rule} {one.kind}: {one.text}"
    facts = {
        "covered": f"covered by {', '.join(one.covered_by)}",
        "rewrite": f"needs a patch ({one.meaning.effort})",
        "unknown": "look at it",
    }[one.verdict]
    where = {"path": "", "unknown": "", "training": "in training alone; ", "off": "not reached; "}[one.reach]
    return f"{place}: {one.rule} {one.kind} in {one.name}: {one.text} [{where}{facts}]"


def as_json(report: Report, everything: bool = False) -> str:
    """Returns the findings with all that is known of them, and what they were counted over."""
    rows = [_row(one) for one in shown(report, everything)]
    facts = {"files": report.files, "lines": report.lines, "entries": list(report.entries), "count": report.count()}
    absent = [dataclasses.asdict(one) for one in report.absent]
    return json.dumps({**facts, "absent": absent, "findings": rows}, indent=2)


def _row(one: Finding) -> dict[str, Any]:
    rule = one.meaning
    row = {key: value for key, value in dataclasses.asdict(one).items() if key != "sure"}
    said = {"kind": rule.kind, "verdict": one.verdict, "why": rule.why, "do": rule.do}
    return {**row, **said, "effort": rule.effort, "draft": rule.draft}


def sarif(report: Report, everything: bool = False) -> str:
    """Returns the findings as SARIF 2.1.0: covered ones as notes, unknown ones as warnings, the others as errors."""
    return formats.sarif(findings.Report([_as_finding(one) for one in shown(report, everything)]))


def _as_finding(one: Finding) -> findings.Finding:
    covered = f" Covered by {', '.join(one.covered_by)}." if one.covered_by else ""
    said = f"{one.text}. {one.meaning.do}{covered}" if one.meaning.in_code else f"{one.text}. {one.meaning.do}"
    place = f"{one.file}:{one.line}" if one.line else one.file
    return findings.Finding(one.rule, place, said, one.target, one.verdict)


FORMATS: dict[str, Callable[[Report, bool], str]] = {"text": text, "json": as_json, "sarif": sarif}
ENDINGS = {".txt": "text", ".json": "json", ".sarif": "sarif"}
"""The format of a file that `--report` names, by its ending."""


def form_of(as_json: bool, as_sarif: bool) -> str | None:
    """Returns the format that is asked for on the terminal; None for text.

    Raises:
        BadValueError: Two are.
    """
    if as_json and as_sarif:
        raise BadValueError("--json --sarif", "They are two formats", "Leave one out, or write it to a file: --report")
    return "json" if as_json else "sarif" if as_sarif else None


def check_form(emit: Path, form: str | None) -> None:
    """Refuses `--emit` beside a format of its own on the terminal.

    Raises:
        BadValueError: Both are asked for.
    """
    if form is not None:
        fact = f"It prints what it drafts, and --{form} prints the findings"
        raise BadValueError(f"--emit {emit}", fact, f"Write these to a file: --report findings.{form}")


def check_file(file: Path) -> None:
    """Refuses a file that no report can be written to.

    Raises:
        BadValueError: Its ending is no format's.
        OutputError: It cannot be written.
    """
    if file.suffix not in ENDINGS:
        known = ", ".join(f"{ending} ({form})" for ending, form in ENDINGS.items())
        raise BadValueError(f"--report {file}", f"'{file.suffix}' is the ending of no format", f"Known: {known}")
    folder.check_writable("--report", file)


def write(report: Report, file: Path, everything: bool = False) -> None:
    """Writes a report to a file, in the format of its ending."""
    with writing(file) as temporary:
        temporary.write_text(FORMATS[ENDINGS[file.suffix]](report, everything) + "\n", encoding="utf-8")


def exit_code(report: Report) -> int:
    """Returns 1 if something on the path needs a patch that is not there, else 0."""
    wanted = "path" if report.entries else "unknown"
    return int(any(one.verdict == "rewrite" and one.reach == wanted for one in report.findings))
