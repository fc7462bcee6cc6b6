"""`torchport check`: every patch tried against the upstreams that are installed, in fresh processes.

It needs no accelerator and no weights, and reports all findings, not only the first.

The patches of one upstream share a process, in which the upstream's modules are imported while they are in force. With
them are the patches of other upstreams that a card's stage needs for this import: an upstream that touches CUDA at
import needs those of torch.cuda. Two upstreams cannot share a process: the first would import modules before the
patches of the second. One more process imports all modules first, and then tries the patches of all upstreams.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import sys
import traceback
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from torchport import patch, progress
from torchport.commands import findings, options, static_check, terminal
from torchport.commands.findings import Finding, Report, error_finding, exit_code
from torchport.config.card import STAGES, Card
from torchport.config.checkout import checkout_folder
from torchport.config.pack import Pack, find_pack
from torchport.errors import (
    AbsentPackageError,
    NotCalledError,
    PatchError,
    TargetError,
    TorchportError,
    UnsupportedError,
)
from torchport.files import atomic
from torchport.patch.declared import replacement
from torchport.processes import child
from torchport.source.parsing import is_there, shown


@dataclasses.dataclass(frozen=True)
class StagePatches:
    """The patches that a stage of a card has in force."""

    names: tuple[str, ...]  #: `upstream` or `upstream/file`.
    #: The names that the original needs, too; it has all plumbing in any case.
    original: tuple[str, ...] = ()
    home: Path | None = None  #: The highest folder of patches in which the names are looked up.


@dataclasses.dataclass(frozen=True)
class CheckProcess:
    """The patches that a fresh process of a check tries."""

    names: tuple[str, ...]  #: `upstream` or `upstream/file`, all of one upstream.
    #: The ids of other upstreams' patches, without which a stage could not import this upstream.
    beside: tuple[str, ...] = ()
    chosen: tuple[Path, ...] | None = None  #: The folders whose patches are tried; None for all.


@terminal.command("check")
@click.argument("names", nargs=-1)
@click.option(
    "--model",
    metavar="NAME",
    callback=options.derived,
    help="Check a card and its patches, and count their calls with tiny weights.",
)
@click.option("--static", is_flag=True, help="In seconds: read files and upstream's source; run and import nothing.")
@options.upstream_path
@click.option(
    "--format",
    "form",
    type=click.Choice(list(findings.FORMATS)),
    default="text",
    show_default=True,
    help="The format of the findings.",
)
@options.report(".sarif, .xml (JUnit), .json or .txt", multiple=True)
@options.paths
def command(form: str, files: tuple[Path, ...], **given: Any) -> None:
    """Tries patches against the upstreams that are installed, and reads cards and configs.

    It checks the packs that --path names, or torchport's own if none is named.

    The exit code is 0 if there is no finding. It is 3 for drift, 4 for a patch that comes too late or leaves an alias,
    5 for a patch that is not called, and 1 if there is nothing but other findings. If several apply, it is the lowest
    of 3, 4 and 5.
    """
    terminal.log_to_stderr()
    for file in files:
        findings.check_report_file(file, findings.FORMATS)
    report = report_of(**given)
    for file in files:
        findings.write_report(report, file, findings.FORMATS)
    terminal.say(findings.FORMATS[form](report))
    sys.exit(exit_code(report.findings))


def report_of(
    names: Sequence[str] = (),
    model: str | None = None,
    static: bool = False,
    upstream_path: str | None = None,
    paths: Sequence[str] = (),
) -> Report:
    """Returns the findings for `upstream` or `upstream/file` names; without names, for the packs of --path."""
    pack, report = find_pack(paths), Report()
    checkout = None if upstream_path is None else checkout_folder(upstream_path)
    models = [] if model is None else [model]
    if models or not names:
        report.extend(static_check.check_cards(pack, models))
    # Findings on these cards are dropped: the cards only tell which patches stand together in a stage.
    cards = [card for card, _ in static_check.read_cards(pack, models or pack.models(), Report())]
    if models:
        known = patch.upstreams(pack.folders)
        stages = stage_patches(pack, cards)
        # A name that the pack lacks is a finding of the card already.
        more = dict.fromkeys(name for stage in stages for name in stage.names if name.partition("/")[0] in known)
        names = [*names, *more]
    chosen: tuple[Path, ...] | None = None
    if not names and not models:
        chosen = tuple(checked_pack.patches for checked_pack in pack.checked)
        names = static_check.upstreams_with_patches(chosen)
    # The card cannot be read, or the pack has cards alone. `check` would take an empty list for all patches.
    if not names:
        return report
    if static:
        report.extend(static_check.check(pack.folders, names, checkout, chosen))
        return report
    report.extend(check(pack.folders, names, checkout, stage_patches(pack, cards), chosen))
    if model is not None:
        report.extend(_not_called_by(pack, model, upstream_path))
    return report


def stage_patches(pack: Pack, cards: Iterable[Card]) -> list[StagePatches]:
    """Returns the patches of each stage of cards; a stage with several implementations has a set for each choice."""
    return [
        StagePatches(("torchax", *names), tuple(card.original), pack.home(card.model).patches)
        for card in cards
        for _, names in card.patch_sets()
    ]


def check(
    folders: patch.Folders,
    names: Sequence[str] = (),
    upstream_path: Path | None = None,
    stages: Sequence[StagePatches] = (),
    chosen: tuple[Path, ...] | None = None,
) -> Report:
    """Returns all findings for the patches of the named upstreams or files; without names, for those of all.

    Args:
        upstream_path: A checkout of an upstream that is not installed.
        stages: The patches of stages. With an upstream, the other patches are tried that a stage needs to import it.
        chosen: The folders whose patches are tried; None: all.
    """
    report = Report()
    groups = _processes(folders, static_check.known_names(folders, names), stages, chosen, report)
    # The upstreams whose process did not die: below, all of these share a process.
    alive = []
    for number, group in enumerate(progress.track(groups, "check", "upstream"), 1):
        progress.note(f"check {', '.join(group.names)} ({number} of {len(groups)}) ...")
        found, died = _in_fresh_process(folders, [group], "armed", upstream_path)  # as in a run: see `try_groups`
        report.extend(found)
        if not died:
            alive.append(group)
    with progress.waiting("check patches after their modules"):
        report.extend(_check_late(folders, alive, upstream_path))
    return report


def _processes(
    folders: patch.Folders,
    names: Iterable[str],
    stages: Sequence[StagePatches],
    chosen: tuple[Path, ...] | None,
    report: Report,
) -> list[CheckProcess]:
    """Returns a process for each upstream, and each set of other upstreams' patches that a stage needs beside it.

    A set that another one includes is left out. Patch files that cannot be read are added to `report`.
    """
    by_upstream: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        by_upstream.setdefault(name.partition("/")[0], []).append(name)
    needed = {stage: _needed_at_import(folders, stage, report) for stage in stages}
    groups = []
    for upstream, files in by_upstream.items():
        ids = {entry.id for entry in static_check.read(folders, files, Report())}
        using = [stage for stage in stages if any(name.partition("/")[0] == upstream for name in stage.names)]
        beside = [needed[stage] - ids for stage in using]  # the patches of other upstreams that such a stage needs
        widest = [others for others in dict.fromkeys(beside) if not any(others < wider for wider in beside)]
        for others in widest or [frozenset[str]()]:  # no stage uses it: it is tried alone
            groups.append(CheckProcess(tuple(files), tuple(sorted(others)), chosen))
    return groups


def _needed_at_import(folders: patch.Folders, stage: StagePatches, report: Report) -> frozenset[str]:
    """Returns the ids of a stage's patches that an import of upstream may need: plumbing, stubs, the original's."""
    # A name that does not exist has no entry, and is reported as the card's mistake.
    reading = Report()
    original = {entry.id for entry in static_check.read(folders, stage.original, reading, stage.home)}
    entries = static_check.read(folders, stage.names, reading, stage.home)
    report.findings += reading.findings
    return frozenset(entry.id for entry in entries if entry.plumbing or entry.stub or entry.id in original)


def _check_late(folders: patch.Folders, groups: list[CheckProcess], upstream_path: Path | None) -> Report:
    """Returns the findings for patches that are applied after their modules are imported. All groups share a process;
    if the process dies, each is tried again in a process of its own, to find the upstream that ends it.
    """
    if not groups:
        return Report()
    report, died = _in_fresh_process(folders, groups, "late", upstream_path)
    if not died or len(groups) == 1:
        return report
    report = Report()
    for group in groups:
        report.extend(_check_late(folders, [group], upstream_path))
    return report


def require_applied(
    folders: patch.Folders, names: Sequence[str], upstream_path: Path | None = None, stages: Sequence[StagePatches] = ()
) -> None:
    """Raises if a patch cannot be applied to the named upstreams; drift of their sources does not count."""
    for finding in check(folders, names, upstream_path, stages=stages).findings:
        if finding.step != "drift":
            fact = f"Nothing is locked, as {finding.id} is found: {finding.text.rstrip('.')}"
            remedy = f"See all findings with: torchport check {' '.join(names)}"
            raise UnsupportedError(finding.place, fact, remedy, patch=finding.patch)


def _in_fresh_process(
    folders: patch.Folders, groups: Sequence[CheckProcess], mode: str, upstream_path: Path | None
) -> tuple[Report, bool]:
    """Calls `try_groups` in a new process; returns the findings, and whether the process died."""
    names = ", ".join(name for group in groups for name in group.names)
    remedy = "Mend what ends it while it is imported"
    try:
        report: Report = child.call(
            "torchport.commands.check:try_groups",
            folders,
            groups,
            mode,
            ended=lambda end: PatchError(names, f"The process that checks '{names}' {end}", remedy, died=True),
            environment={"PYTHONWARNINGS": "ignore"},
            first=[] if upstream_path is None else [upstream_path],
        )
    except TorchportError as error:
        return Report([error_finding(error, "apply")]), hasattr(error, "died")
    return report, False


def try_groups(folders: patch.Folders, groups: Sequence[CheckProcess], mode: str) -> Report:
    """Tries the patches of each group in this process, which must be fresh, and returns the findings.

    Args:
        mode: "armed" imports the targets while their patches are in force, as a run does; "late" before.
    """
    report = Report()
    for group in groups:
        entries = static_check.read(folders, group.names, report)
        chosen = [entry for entry in entries if group.chosen is None or entry.folder.parent in group.chosen]
        sound = [entry for entry in chosen if _is_sound(entry, entries, report)]
        needed = _applied_first(folders, group, sound, report)
        if mode == "late":  # stubs come first even here: without its stub a module cannot be imported at all
            needed += [entry for entry in sound if entry.stub]
            sound = [entry for entry in sound if not entry.stub]
        while sound:  # when a patch raises, it is a finding, and the others are tried again without it
            try:
                with patch.applied(needed, accept_drift=True):
                    _apply_and_undo(sound, mode, report)
                break
            except PatchError as error:
                culprit = str(getattr(error, "patch", ""))
                report.add(error, "apply", culprit)
                if culprit not in {entry.id for entry in (*sound, *needed)}:  # without any change it would raise again
                    break
                sound = [entry for entry in sound if entry.id != culprit]
                needed = [entry for entry in needed if entry.id != culprit]
    return report


def _applied_first(
    folders: patch.Folders, group: CheckProcess, entries: Sequence[patch.Entry], report: Report
) -> list[patch.Entry]:
    """Returns the entries without which the targets' packages could not be imported.

    These are the patches that stages need beside the entries, and those that are in force while such a package is
    imported. Entries of packages that are not installed are left out.
    """
    packages = {entry.module.partition(".")[0] for entry in entries}
    tried = {entry.id for entry in entries}
    reading = Report()  # only its findings are kept: cases of these entries belong to their own upstreams
    everything = static_check.read(folders, patch.upstreams(folders), reading)
    needed = [e for e in everything if e.id in group.beside or e.lifetime.while_importing in packages]
    needed = [entry for entry in needed if entry.id not in tried and (entry.stub or is_there(entry.package))]
    needed = [entry for entry in needed if _is_sound(entry, everything, reading)]
    report.findings += reading.findings
    return needed


def _is_sound(entry: patch.Entry, entries: Sequence[patch.Entry], report: Report) -> bool:
    """Checks an entry without importing upstream; returns whether it can be applied to upstream's modules."""
    try:
        fits = static_check.fits_versions(entry, report)
        if fits is None:  # it is not needed
            return False
        loaded = replacement.load(entry, entry.reference) if entry.reference else None
    except AbsentPackageError as error:  # an extra of torchport's, which only those install who choose the patch
        report.note_step(entry, "targets", skipped=error.fact)
        return False
    except TorchportError as error:
        report.note_step(entry, "targets")
        report.add(error, "targets", entry.id)
        return False
    # The source is checked first, even where the versions do not fit: it shows what changed.
    return static_check.check_source(entry, loaded, entries, report) and fits


def _apply_and_undo(entries: Sequence[patch.Entry], mode: str, report: Report) -> None:
    """Applies patches twice, and undoes both; adds findings: patches not applied, and namespaces not restored."""
    modules = sorted({entry.module for entry in entries if entry.edits})
    if mode == "late":
        served = {importer for entry in entries if entry.stub for importer in entry.stub.importers}
        _import_all([module for module in modules if module not in served])  # the others need their stub first
    before = _namespaces(modules)
    for entry in entries:
        report.note_step(entry, "apply")
    with patch.applied(entries, accept_drift=True) as ledger:
        _import_all(modules)
        # These change nothing in the imported modules, or only while another package is imported.
        excused = {entry.id for entry in entries if not entry.edits or entry.lifetime.while_importing}
        for row in ledger.rows():
            if row["state"] not in ("applied", "used", "not needed") and row["id"] not in excused:
                text = f"'{row['id']}' is {row['state']} after its module was imported. Find who changed it."
                report.findings.append(Finding(PatchError.id, row["place"], text, row["id"], "apply"))
        patched = _namespaces(modules)
        with patch.applied(entries, accept_drift=True):
            pass
        if _namespaces(modules) != patched:
            entry, text = entries[0], "A second application changed something."
            report.findings.append(Finding(PatchError.id, entry.place, text, entry.id, "apply"))
    after = _namespaces(modules)
    first = {entry.module: entry for entry in reversed(entries)}  # the first entry of each module
    for entry in first.values():
        if entry.module in before:
            report.note_step(entry, "undo")
    module_ids = {id(module) for module in list(sys.modules.values())}
    for key in sorted(before.keys() & after.keys()):
        names = {name for name, _ in before[key]}
        # A new name for a module is no change: an import of a submodule sets it.
        pairs = [(name, value_id) for name, value_id in after[key] if name in names or value_id not in module_ids]
        if pairs != before[key]:
            entry = first[key.partition(":")[0]]
            text = f"The namespace {key} is not what it was before the patches were applied and undone."
            report.findings.append(Finding(PatchError.id, entry.place, text, entry.id, "undo"))


def _import_all(modules: Sequence[str]) -> None:
    """Imports modules; raises a `TargetError` with the line of upstream that raises."""
    for module in modules:
        with replacement.Explained(functools.partial(_not_importable, module)):
            importlib.import_module(module)


def _not_importable(module: str, error: BaseException) -> TargetError:
    """Returns the error for an upstream whose import raises, with the line that raises."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    place = f"{shown(frames[-1].filename)}:{frames[-1].lineno}"
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{shown(error.filename)}:{error.lineno}"
    text = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    fact = f"Importing {module} fails: {type(error).__name__}: {text}".rstrip(". ")
    return TargetError(place, fact, "Install what it needs, or patch what fails")


def _namespaces(modules: Sequence[str]) -> dict[str, list[tuple[str, int]]]:
    """Returns the names in modules and classes with `id(value)`: `{"up.net": [("Net", 14)], "up.net:Net": []}`."""
    result: dict[str, list[tuple[str, int]]] = {}
    for name in modules:
        module = sys.modules.get(name)
        if isinstance(module, types.ModuleType):
            names = dict(vars(module))
            result[name] = [(key, id(value)) for key, value in names.items() if key != "__warningregistry__"]
            for value in names.values():
                if isinstance(value, type) and value.__module__ == name:
                    result[f"{name}:{value.__qualname__}"] = [(k, id(v)) for k, v in vars(value).items()]
    return result


def _not_called_by(pack: Pack, model: str, upstream_path: str | None) -> Report:
    """Runs a card's demo with tiny weights in a fresh process; returns findings for patches that were not called."""
    from PIL import Image

    from torchport.stages.family import ALWAYS
    from torchport.task import Request
    from torchport.task.family_file import family

    card, document = pack.card(model)
    paths = tuple(str(layer.root) for layer in pack.layers() if layer.chosen)
    place = f"--model {card.model}"
    remedy = f'Run it: torchport run {place} --config {card.demo} --prompt "..."'
    with atomic.scratch() as folder:
        out = folder / "out"
        fields: dict[str, Any] = {"prompt": card.tiny.prompt, "cache": False}
        if family(pack, card, document).TAKES_IMAGE == ALWAYS:
            fields["image"] = folder / "image.png"
            Image.linear_gradient("L").save(fields["image"])
        request = Request(model, pack.demo(card), out=out, paths=paths, upstream_path=upstream_path, **fields)
        try:
            with progress.waiting(f"run {model}'s demo"):
                child.call(
                    "torchport.run.path:run",
                    request,
                    ended=lambda end: PatchError(place, f"The process of its demo {end}", remedy),
                )
        except TorchportError as error:
            return Report([error_finding(error, "called")])
        report = Report()
        for stage in STAGES:
            names = card.patch_names(stage, implementations={})  # the card's defaults
            if not names:
                continue
            rows = json.loads((out / f"{stage}.json").read_text(encoding="utf-8"))["patches"]
            report.extend(not_called(rows, patch.read(pack.folders, names, pack.home(model).patches), stage))
        return report


def not_called(rows: Iterable[Mapping[str, Any]], entries: Iterable[patch.Entry], stage: str) -> Report:
    """Returns a finding for each patch that a stage must call and did not, by `rows`, the ledger in its manifest."""
    calls = {row["id"]: row for row in rows}
    report = Report()
    for entry in entries:
        row = calls.get(entry.id)
        if stage not in entry.must_be_called or (row is not None and row["state"] == "not needed"):
            continue
        report.note_step(entry, "called")
        if not (row and row["calls"]):
            state = row["state"] if row else "not in the ledger"
            remedy = f"Find what is called instead of {entry.target}."
            text = f"'{entry.id}' was not called in {stage} (it is {state}). {remedy}"
            report.findings.append(Finding(NotCalledError.id, entry.place, text, entry.id, "called"))
    return report
