"""`torchport scan --emit`: drafts a patch for each finding that none covers, and says what is left to a person."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torchport.config.checkout import on_path
from torchport.config.pack import find_pack
from torchport.errors import ConfigError, ConflictError, PatchError, TakenNameError, printable
from torchport.files.folder import as_named, has_file
from torchport.patch import Entry, read, upstreams
from torchport.porting.draft import draft, folder
from torchport.porting.draft.draft import PatchDraftRequest
from torchport.porting.draft.folder import Home
from torchport.porting.draft.target import folder_of
from torchport.porting.scan.finding import ScanFinding, ScanReport
from torchport.porting.scan.syntax import MODULE

AT_IMPORT = "it runs while its module is imported, where no patch of a function reaches it"
SHOWN = 20
"""Findings that are left to a person and listed one by one."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A patch to draft, with the findings that it is for."""

    wish: PatchDraftRequest
    findings: Sequence[ScanFinding]


@dataclasses.dataclass
class Outcome:
    """What became of the findings that no patch covers."""

    #: The patches that were drafted.
    written: list[draft.DraftedPatch] = dataclasses.field(default_factory=list)
    #: The ids of patches that the folder has already.
    there: list[str] = dataclasses.field(default_factory=list)
    #: Findings that no draft is for, each with the reason.
    left: list[tuple[ScanFinding, str]] = dataclasses.field(default_factory=list)


def emit(report: ScanReport, path: Path, out: Path, paths: Sequence[str] = ()) -> tuple[list[str], int]:
    """Drafts patches into the folder of a pack; returns the lines to print and the exit code: 1 if something is left.

    Args:
        report: What a scan of the codebase found.
        path: The codebase.
        out: The folder of the pack.
        paths: The packs whose patches count.
    """
    root = _search_folder(path, report)
    outcome = Outcome()
    with on_path(root):
        home = home_of(report, path, out)
        drawn = list(_drawn(_open(report), outcome))
        for one in drawn:
            _write(one, home, outcome)
    return list(_lines(report, outcome, out, root, paths)), int(bool(outcome.left))


def home_of(report: ScanReport, path: Path, out: Path) -> Home:
    """Returns the folder of the pack; the codebase must be on the search path."""
    modules = {one.target.partition(":")[0] for one in report.findings if one.target}
    packages = {name.partition(".")[0] for name in modules}
    found = [folder_of(name) for name in sorted(packages)]
    return folder.home(out, [path, *(one for one in found if one is not None)], "--emit")


def _search_folder(path: Path, report: ScanReport) -> Path:
    """Returns the folder that must be on the search path so that the codebase's packages can be imported.

    It is the one that most findings are imported from: `src/` where the packages lie in it.
    """
    wanted = "path" if report.entries else "unknown"
    starts = Counter(start for one in report.findings if one.reach == wanted and (start := _start(one)) is not None)
    if starts:
        return starts.most_common(1)[0][0]
    current = Path(os.path.realpath(path))
    current = current.parent if has_file(current) else current
    while has_file(current / "__init__.py"):
        current = current.parent
    return current


def _start(one: ScanFinding) -> Path | None:
    """Returns the folder that a finding's module is imported from; None where its file is not named as its module."""
    names = one.target.partition(":")[0].split(".")
    file = Path(os.path.realpath(one.file)).with_suffix("")
    file = file.parent if file.name == "__init__" else file
    return file.parents[len(names) - 1] if list(file.parts[-len(names) :]) == names else None


def _open(report: ScanReport) -> list[ScanFinding]:
    wanted = "path" if report.entries else "unknown"
    return [one for one in report.findings if one.verdict == "rewrite" and one.reach == wanted]


def _drawn(findings: Sequence[ScanFinding], outcome: Outcome) -> Iterator[Drawn]:
    """Yields the patches to draft: stubs, then functions to replace, then statements to rewrite in other functions."""
    stubs: dict[tuple[str, str], list[ScanFinding]] = {}
    functions: dict[str, list[ScanFinding]] = {}
    statements: list[ScanFinding] = []
    for one in findings:
        at_import = one.name == MODULE
        if at_import and one.kind == "kernel":
            stubs.setdefault((one.uses.partition(".")[0], one.target.partition(".")[0]), []).append(one)
        elif at_import or not one.meaning.draft:
            outcome.left.append((one, AT_IMPORT if at_import else one.meaning.do))
        elif one.meaning.draft == "rewrite" or one.kind == "parallel-state":
            statements.append(one)
        else:
            functions.setdefault(one.target, []).append(one)
    yield from (_stub(some) for some in stubs.values())
    yield from _of_functions(functions, statements)


def _of_functions(functions: Mapping[str, list[ScanFinding]], statements: Sequence[ScanFinding]) -> Iterator[Drawn]:
    """Yields the functions to replace, and the statements to rewrite where no such function takes care of them."""
    helpers = {target.replace(":", "."): target for target in functions}
    home = {one: one.target if one.target in functions else helpers.get(one.uses) for one in statements}
    inner = [one for one in statements if home[one] is None]
    names = _Names([*functions, *(one.target for one in inner)])
    for target, some in functions.items():
        wish = PatchDraftRequest(
            target, "replace", names.file(target), why=some[0].meaning.why, in_full=names.is_double(target)
        )
        yield Drawn(wish, [*some, *(one for one in statements if home[one] == target)])
    for one in inner:
        yield Drawn(
            PatchDraftRequest(one.target, "rewrite", names.file(one.target), one.line, why=one.meaning.why), [one]
        )


def _stub(findings: Sequence[ScanFinding]) -> Drawn:
    package, _, rest = findings[0].uses.partition(".")
    importers = list(dict.fromkeys(one.target.partition(":")[0] for one in findings))
    why = f"{package} is a package of GPU kernels, which is imported and not installed."
    return Drawn(PatchDraftRequest(f"{package}:{rest or package}", "stub", importers=importers, why=why), findings)


class _Names:
    """File names of drafts: a module's last name, or more of it where two modules share that."""

    def __init__(self, targets: Sequence[str]) -> None:
        every = dict.fromkeys(targets)
        modules = dict.fromkeys(target.partition(":")[0] for target in every)
        self._last = Counter(module.rpartition(".")[2] for module in modules)
        self._paths = Counter((target.partition(".")[0], target.partition(":")[2]) for target in every)

    def file(self, target: str) -> str | None:
        """Returns the file's name; None for the usual one."""
        module = target.partition(":")[0]
        if self._last[module.rpartition(".")[2]] < 2:
            return None
        return "_".join(part.strip("_") for part in module.split(".")[1:]) or None

    def is_double(self, target: str) -> bool:
        """Returns whether two modules of a package have a function of this name."""
        return self._paths[target.partition(".")[0], target.partition(":")[2]] > 1


def _write(drawn: Drawn, home: Home, outcome: Outcome) -> None:
    """Writes one patch, or notes why it is not written."""
    try:
        outcome.written.append(draft.write_draft(drawn.wish, home))
    except (TakenNameError, ConflictError) as error:
        ids = [one.id for one in draft.drafted_entries(home, drawn.wish.package) if _is_for(one, drawn.wish, error)]
        new = {one.id for one in outcome.written}
        if ids and not set(ids) <= new:
            outcome.there += [one for one in ids if one not in outcome.there]
        elif not ids:
            outcome.left += [(one, error.fact) for one in drawn.findings]
    except (PatchError, ConfigError) as error:
        outcome.left += [(one, error.fact) for one in drawn.findings]


def _is_for(entry: Entry, wish: PatchDraftRequest, error: TakenNameError | ConflictError) -> bool:
    """Returns whether an entry is the one that an error names, and changes what is wanted."""
    named = {getattr(error, "patch", ""), *getattr(error, "patches", ())}
    if entry.id not in named:
        return False
    if entry.stub is not None:
        return wish.kind == "stub" and set(wish.importers) <= set(entry.stub.importers)
    return entry.target == wish.target


def _lines(report: ScanReport, outcome: Outcome, out: Path, root: Path, paths: Sequence[str]) -> Iterator[str]:
    yield report.count()
    if outcome.written:
        tests = _many(sum(bool(one.test) for one in outcome.written), "test", "tests")
        count = _many(len(outcome.written), "patch", "patches")
        yield f"drafted     {count} in {as_named(out / 'patches')}, and {tests} in {as_named(out / 'tests')}"
    if outcome.there:
        names = ", ".join(outcome.there)
        yield f"there       {_many(len(outcome.there), 'patch', 'patches')} already, left as they are: {names}"
    functions = [f"patches/{one.names.partition('/')[0]}/{one.function}" for one in outcome.written if one.function]
    if functions:
        yield f"fill in     {', '.join(functions)}"
        yield "            and why, equivalence and must_be_called of their entries, and the arguments in their tests"
    for one, reason in outcome.left[:SHOWN]:
        place = f"{one.file}:{one.line}: {one.rule} {one.kind} in {one.name}"
        yield printable(f"left        {place}: {reason.rstrip('.')}")
    if len(outcome.left) > SHOWN:
        yield f"left        {len(outcome.left) - SHOWN} more like these"
    unknown = sum(one.verdict == "unknown" for one in report.findings if one.reach in ("path", "unknown"))
    if unknown:
        yield f"unsure      {unknown} that may be harmless: torchport trace shows which of them stop"
    listed = _listed(report, outcome, paths)
    if listed:
        yield f"list        {', '.join(listed)} under 'patches' of the card, for the stages that need them"
    packages = sorted({one.names.partition("/")[0] for one in outcome.written})
    if packages:
        yield f"then        {folder.check_command(out, as_named(root), *packages)}"


def _many(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def _listed(report: ScanReport, outcome: Outcome, paths: Sequence[str]) -> list[str]:
    """Returns the files of patches that a card needs: those that were drafted, and those that cover the others."""
    covering = {id for one in report.findings if one.reach in ("path", "unknown") for id in one.covered_by}
    names = {one.names for one in outcome.written}
    if covering:
        folders = find_pack(paths).folders
        for entry in read(folders, upstreams(folders)):
            if entry.id in covering:
                file = Path(entry.place.rpartition(":")[0])
                names.add(f"{file.parent.name}/{file.stem}")
    return sorted(names)
