"""`torchport scan`: the code of a codebase that will not port to TPU, as text, JSON or SARIF."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path

import click

from torchport.commands import findings, options, terminal
from torchport.config.pack import find_pack
from torchport.errors import BadValueError, printable
from torchport.porting.scan import GUARDS, ScanFinding, ScanReport
from torchport.porting.scan.scanning import scan


@terminal.command("scan")
@click.argument("codebase", metavar="PATH", type=options.FILE)
@click.option("--entry", "entries", multiple=True, metavar="PKG.MOD:CLASS", help="What you run of it. Repeatable.")
@click.option("--all", "everything", is_flag=True, help="Also list what the entry does not lead to.")
@options.as_json
@click.option("--sarif", "as_sarif", is_flag=True, help="Print SARIF.")
@options.report(".sarif, .json or .txt")
@click.option("--emit", type=options.FILE, metavar="DIR", help="Draft the patches into this pack.")
@options.paths
def command(
    codebase: Path,
    entries: tuple[str, ...],
    everything: bool,
    as_json: bool,
    as_sarif: bool,
    file: Path | None,
    emit: Path | None,
    paths: tuple[str, ...],
) -> None:
    """Lists what in a codebase will not port to TPU, and which patches take care of it. It imports none of it.

    The exit code is 1 if something that the entry leads to needs a patch that is not there, else 0. With --emit it is 1
    if no patch could be drafted for something.
    """
    terminal.log_to_stderr()
    form = _form(as_json, as_sarif, emit)
    kinds = {"text": text, "json": json_text, "sarif": sarif}
    writers = {name: functools.partial(writer, everything=everything) for name, writer in kinds.items()}
    if file is not None:
        findings.check_report_file(file, writers)
    report = scan(codebase, entries, find_pack(paths).folders)
    if file is not None:
        findings.write_report(report, file, writers)
    if emit is not None:
        from torchport.porting import emit as drafts

        lines, code = drafts.emit(report, codebase, emit, paths)
        terminal.say(lines)
        sys.exit(code)
    terminal.say(writers[form](report))
    sys.exit(1 if report.unpatched() else 0)


def _form(as_json: bool, as_sarif: bool, emit: Path | None) -> str:
    """Returns the format to print, "text", "json" or "sarif"; raises if flags ask for two."""
    if as_json and as_sarif:
        raise BadValueError("--json --sarif", "They are two formats", "Leave one out, or write it to a file: --report")
    form = "json" if as_json else "sarif" if as_sarif else "text"
    if emit is not None and form != "text":
        fact = f"It prints what it drafts, and --{form} prints the findings"
        raise BadValueError(f"--emit {emit}", fact, f"Write these to a file: --report findings.{form}")
    return form


def shown(report: ScanReport, everything: bool = False) -> list[ScanFinding]:
    """Returns the findings in code that the entry leads to, and those of whole files; or `everything`."""
    if everything:
        return list(report.findings)
    return [finding for finding in report.findings if finding.reach == report.wanted or not finding.meaning.in_code]


def text(report: ScanReport, everything: bool = False) -> str:
    """Returns a line for each finding to show, and a last line with their counts."""
    chosen = shown(report, everything)
    lines = [printable(_line(finding)) for finding in chosen if not finding.only]
    # Findings in code that runs only on CUDA, or under a process group.
    for only, words in GUARDS.items():
        guarded = [f"  {printable(_line(finding))}" for finding in chosen if finding.only == only]
        if guarded:
            lines += [f"{words}:", *guarded]
    if len(chosen) < len(report.findings):
        lines.append(f"{len(report.findings) - len(chosen)} that the entry does not lead to: add --all")
    for absent in report.absent:
        remedy = "install it, or stub it and rewrite what calls it"
        lines.append(f"{absent.package} is not installed here ({absent.file}:{absent.line}): {remedy}")
    return "\n".join([*lines, report.count()])


def _line(finding: ScanFinding) -> str:
    """Returns a finding as a line: place, rule, code, and whether a patch covers it or is needed."""
    place = f"{finding.file}:{finding.line}" if finding.line else finding.file
    if not finding.meaning.in_code:
        return f"{place}: {finding.rule} {finding.kind}: {finding.text}"
    facts = {
        "covered": f"covered by {', '.join(finding.covered_by)}",
        "rewrite": f"needs a patch ({finding.meaning.effort})",
        "unknown": "look at it",
    }[finding.verdict]
    where = {"path": "", "unknown": "", "training": "in training alone; ", "off": "not reached; "}[finding.reach]
    return f"{place}: {finding.rule} {finding.kind} in {finding.name}: {finding.text} [{where}{facts}]"


def json_text(report: ScanReport, everything: bool = False) -> str:
    """Returns JSON: the numbers of files and lines, the packages that are absent, and the findings, each on a line."""
    rows = []
    for finding in shown(report, everything):
        rule = finding.meaning
        row = dataclasses.asdict(finding)
        del row["sure"]  # `verdict` says it
        row |= {"kind": rule.kind, "verdict": finding.verdict, "why": rule.why, "do": rule.do}
        rows.append(json.dumps({**row, "effort": rule.effort, "draft": rule.draft}))
    facts = {"files": report.files, "lines": report.lines, "entries": list(report.entries), "count": report.count()}
    absent = [dataclasses.asdict(absent) for absent in report.absent]
    head = json.dumps({**facts, "absent": absent}).removesuffix("}")  # the findings are added to this object
    listed = ",\n".join(rows)
    return f'{head}, "findings": [\n{listed}\n]}}'


def sarif(report: ScanReport, everything: bool = False) -> str:
    """Returns the findings as SARIF 2.1.0: covered ones as notes, unknown ones as warnings, the others as errors."""
    check_report = findings.Report()
    for finding in shown(report, everything):
        covered = f" Covered by {', '.join(finding.covered_by)}." if finding.covered_by else ""
        text = f"{finding.text}. {finding.meaning.do}{covered if finding.meaning.in_code else ''}"
        place = f"{finding.file}:{finding.line}" if finding.line else finding.file
        check_report.findings.append(findings.Finding(finding.rule, place, text, finding.target, finding.verdict))
    return findings.as_sarif(check_report)
