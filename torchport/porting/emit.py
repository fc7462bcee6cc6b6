"""`torchport scan --emit`: drafts a patch for each finding that none covers, and says what is left to a person."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from torchport.config.checkout import on_path
from torchport.config.pack import find_pack
from torchport.errors import ConfigError, ConflictError, PatchError, TakenNameError, printable
from torchport.files.folder import as_named
from torchport.patch import Entry, read, upstreams
from torchport.porting import draft
from torchport.porting.draft import PatchDraftRequest, home
from torchport.porting.draft.home import Home
from torchport.porting.draft.target_source import folders_of
from torchport.porting.scan import ScanFinding, ScanReport
from torchport.porting.scan.scanning import import_root
from torchport.porting.scan.syntax import MODULE

AT_IMPORT = "it runs while its module is imported, where no patch of a function reaches it"
SHOWN = 20
"""Findings that are left to a person and listed one by one."""
Wish = tuple[PatchDraftRequest, Sequence[ScanFinding]]
"""A patch to draft, with the findings that it is for."""


@dataclasses.dataclass
class Outcome:
    """What became of the findings that no patch covers."""

    written: list[draft.DraftedPatch] = dataclasses.field(default_factory=list)
    there: list[str] = dataclasses.field(default_factory=list)  #: Ids of entries that are in the pack already.
    #: Those that no patch was drafted for, each with the reason.
    left: list[tuple[ScanFinding, str]] = dataclasses.field(default_factory=list)


def emit(report: ScanReport, path: Path, out: Path, paths: Sequence[str] = ()) -> tuple[list[str], int]:
    """Drafts patches into the pack's folder `out`, for the codebase at `path`; `paths` are the folders of `--path`.
    Returns the lines to print, and the exit code: 1 if findings are left.
    """
    root = _search_folder(path, report)
    outcome = Outcome()
    with on_path(root):
        packages = {finding.target.partition(":")[0].partition(".")[0] for finding in report.findings} - {""}
        pack = home.home(out, [path, *folders_of(sorted(packages))], flag="--emit")
        for request, findings in _wishes(report.unpatched(), outcome):
            _write(request, findings, pack, outcome)
    return list(_lines(report, outcome, out, root, paths)), int(bool(outcome.left))


def _search_folder(path: Path, report: ScanReport) -> Path:
    """Returns the folder that most findings are imported from, such as `src/`: it has to be on `sys.path`."""
    starts: Counter[Path] = Counter()
    for finding in report.findings:
        names = finding.target.partition(":")[0].split(".")
        file = Path(os.path.realpath(finding.file)).with_suffix("")
        file = file.parent if file.name == "__init__" else file
        # `src/pkg/m.py` and `pkg.m`: the file lies where its module's name says, so `src/` is counted.
        if finding.reach == report.wanted and list(file.parts[-len(names) :]) == names:
            starts[file.parents[len(names) - 1]] += 1
    if starts:
        return starts.most_common(1)[0][0]
    folder, _ = import_root(Path(os.path.realpath(path)))
    return folder


def _wishes(findings: Sequence[ScanFinding], outcome: Outcome) -> Iterator[Wish]:
    """Yields the patches to draft: stubs, functions to replace, statements to rewrite. Notes other findings as left."""
    stubs: dict[tuple[str, str], list[ScanFinding]] = {}
    functions: dict[str, list[ScanFinding]] = {}
    statements: list[ScanFinding] = []
    for finding in findings:
        at_import = finding.name == MODULE
        if at_import and finding.kind == "kernel":
            stubs.setdefault((finding.uses.partition(".")[0], finding.target.partition(".")[0]), []).append(finding)
        elif at_import or not finding.meaning.draft:
            outcome.left.append((finding, AT_IMPORT if at_import else finding.meaning.do))
        elif finding.meaning.draft == "rewrite" or finding.kind == "parallel-state":
            statements.append(finding)
        else:
            functions.setdefault(finding.target, []).append(finding)
    for (package, _), imports in stubs.items():
        name = imports[0].uses.partition(".")[2] or package
        importers = list(dict.fromkeys(finding.target.partition(":")[0] for finding in imports))
        why = f"{package} is a package of GPU kernels, which is imported and not installed."
        yield PatchDraftRequest(f"{package}:{name}", "stub", importers=importers, why=why), imports
    yield from _wishes_in_functions(functions, statements)


def _wishes_in_functions(
    functions: Mapping[str, list[ScanFinding]], statements: Sequence[ScanFinding]
) -> Iterator[Wish]:
    """Yields a patch for each function to replace, of which `functions` has the findings, and for each of `statements`
    to rewrite. A statement needs no patch of its own if it lies in a replaced function or calls a replaced function.
    """
    by_name = {target.replace(":", "."): target for target in functions}  # `pkg.m.f`, as in `ScanFinding.uses`
    # For each statement, the replaced function that takes care of it; None if it is to be rewritten.
    covering: dict[ScanFinding, str | None] = {}
    for statement in statements:
        covering[statement] = statement.target if statement.target in functions else by_name.get(statement.uses)
    rewritten = [statement for statement in statements if covering[statement] is None]
    targets = dict.fromkeys([*functions, *(finding.target for finding in rewritten)])
    # How many targets of a package have the same path, such as `Block.forward` in two modules.
    paths = Counter((target.partition(".")[0], target.partition(":")[2]) for target in targets)
    files = _file_names(targets)
    for target, findings in functions.items():
        is_double = paths[target.partition(".")[0], target.partition(":")[2]] > 1
        why = findings[0].meaning.why
        request = PatchDraftRequest(target, "replace", files[target], why=why, in_full=is_double)
        yield request, [*findings, *(statement for statement in statements if covering[statement] == target)]
    for finding in rewritten:
        target, why = finding.target, finding.meaning.why
        yield PatchDraftRequest(target, "rewrite", files[target], finding.line, why=why), [finding]


def _file_names(targets: Iterable[str]) -> dict[str, str | None]:
    """Returns the file name of each target's draft: None for the default, the last name of the target's module. Where
    two modules have the same last name, it has more names: `models_attention` for `pkg.models.attention:Block`.
    """
    modules = {target: target.partition(":")[0].split(".") for target in targets}
    last_names = Counter(names[-1] for names in {tuple(names) for names in modules.values()})
    shared = {target: names[1:] if last_names[names[-1]] > 1 else [] for target, names in modules.items()}
    return {target: "_".join(name.strip("_") for name in names) or None for target, names in shared.items()}


def _write(request: PatchDraftRequest, findings: Sequence[ScanFinding], home: Home, outcome: Outcome) -> None:
    """Writes a draft into the pack; if that fails, notes the entry that is there, or the findings that are left."""
    try:
        outcome.written.append(draft.write_draft(request, home))
    except (TakenNameError, ConflictError) as error:
        entries = draft.drafted_entries(home, request.package)
        ids = [entry.id for entry in entries if _does_the_work(entry, request, error)]
        new = {drafted.id for drafted in outcome.written}
        if not ids:
            outcome.left += [(finding, error.fact) for finding in findings]
        elif not set(ids) <= new:  # an entry was in the pack before this command
            outcome.there += [id for id in ids if id not in outcome.there]
    except (PatchError, ConfigError) as error:
        outcome.left += [(finding, error.fact) for finding in findings]


def _does_the_work(entry: Entry, request: PatchDraftRequest, error: TakenNameError | ConflictError) -> bool:
    """Returns whether an entry of the pack is named by the error of a draft, and does the draft's work already."""
    named = {getattr(error, "patch", ""), *getattr(error, "patches", ())}  # ids: `patches` of a ConflictError
    if entry.id not in named:
        return False
    if entry.stub is not None:
        return request.kind == "stub" and set(request.importers) <= set(entry.stub.importers)
    return entry.target == request.target


def _lines(report: ScanReport, outcome: Outcome, out: Path, root: Path, paths: Sequence[str]) -> Iterator[str]:
    yield report.count()
    if outcome.written:
        tests = _count(sum(bool(drafted.test) for drafted in outcome.written), "test", "tests")
        count = _count(len(outcome.written), "patch", "patches")
        yield f"drafted     {count} in {as_named(out / 'patches')}, and {tests} in {as_named(out / 'tests')}"
    if outcome.there:
        names = ", ".join(outcome.there)
        yield f"there       {_count(len(outcome.there), 'patch', 'patches')} already, left as they are: {names}"
    written = [drafted for drafted in outcome.written if drafted.function]
    if written:
        functions = [f"patches/{drafted.names.partition('/')[0]}/{drafted.function}" for drafted in written]
        yield f"fill in     {', '.join(functions)}"
        yield "            and why, equivalence and must_be_called of their entries, and the arguments in their tests"
    for remaining, reason in outcome.left[:SHOWN]:
        place = f"{remaining.file}:{remaining.line}: {remaining.rule} {remaining.kind} in {remaining.name}"
        yield printable(f"left        {place}: {reason.rstrip('.')}")
    if len(outcome.left) > SHOWN:
        yield f"left        {len(outcome.left) - SHOWN} more like these"
    unknown = sum(finding.verdict == "unknown" for finding in report.findings if finding.reach in ("path", "unknown"))
    if unknown:
        yield f"unsure      {unknown} that may be harmless: torchport trace shows which of them stop"
    files = _files_for_card(report, outcome, paths)
    if files:
        yield f"list        {', '.join(files)} under 'patches' of the card, for the stages that need them"
    packages = sorted({drafted.names.partition("/")[0] for drafted in outcome.written})
    if packages:
        yield f"then        {home.check_command(out, as_named(root), *packages)}"


def _count(count: int, singular: str, several: str) -> str:
    return f"{count} {singular if count == 1 else several}"


def _files_for_card(report: ScanReport, outcome: Outcome, paths: Sequence[str]) -> list[str]:
    """Returns the files of patches that a card has to list: the drafted files, and files that cover other findings."""
    covering = {id for finding in report.findings if finding.reach in ("path", "unknown") for id in finding.covered_by}
    names = {drafted.names for drafted in outcome.written}
    if covering:
        folders = find_pack(paths).folders
        for entry in read(folders, upstreams(folders)):
            if entry.id in covering:
                file = Path(entry.place.rpartition(":")[0])
                names.add(f"{file.parent.name}/{file.stem}")
    return sorted(names)
