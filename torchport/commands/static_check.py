"""`torchport check --static`: checks of files and of upstream's source, without importing upstream or a pack's Python.

`torchport check` begins with the same checks.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from torchport import patch
from torchport import stages as family_module
from torchport.commands.findings import Case, Finding, Report
from torchport.config import Document
from torchport.config.card import Card, check_call, check_names, job_mistakes
from torchport.config.checkout import on_path
from torchport.config.machine import parse_machine
from torchport.config.pack import Pack
from torchport.errors import (
    BadValueError,
    DriftError,
    ReplacementError,
    TargetError,
    TorchportError,
    UnknownNameError,
    UnreadableError,
    UnsupportedError,
    combined,
    nearest,
)
from torchport.files.folder import as_named
from torchport.patch import patch_set
from torchport.patch.declared import versions
from torchport.patch.declared.reading import LOCK, stack_of
from torchport.patch.declared.replacement import file_of
from torchport.patch.source import checks, drift
from torchport.source.bindings import binding_at
from torchport.source.parsing import tree_of

_MARK = "fill in "
"""The text of a drafted function's `NotImplementedError` begins with this."""
_WORDS = "say here "
"""A text that is still to be written in a drafted entry begins with this."""


def check(
    folders: patch.Folders,
    names: Sequence[str] = (),
    upstream_path: Path | None = None,
    chosen: Sequence[Path] | None = None,
) -> Report:
    """Returns the findings for the patches of the named upstreams or files; without names, for those of all. With
    `chosen`, only the patches in these packs' folders are checked.
    """
    report = Report()
    versions.installed.cache_clear()
    entries = read(folders, known_names(folders, names), report)
    with on_path(upstream_path):
        for entry in entries:
            if chosen is not None and entry.folder.parent not in chosen:
                continue
            # The Python file that the entry names is parsed and not run.
            try:
                loaded = checks.parsed(entry, entry.reference) if entry.reference else None
                if entry.needed and "probe" in entry.needed:
                    # The function that says at run time whether the patch is needed: raises if it is not there.
                    checks.parsed(entry, entry.needed["probe"])
            except TorchportError as error:
                report.note_step(entry, "targets")
                report.add(error, "targets", entry.id)
                continue
            if fits_versions(entry, report, probe=False) is not None:
                check_source(entry, loaded, entries, report)
    return report


def upstreams_with_patches(folders: patch.Folders) -> list[str]:
    """Returns the upstreams that have a file of patches; an upstream's folder may have only a family."""
    return [name for name in patch.upstreams(folders) if any(_files(root, name) for root in stack_of(folders))]


def known_names(folders: patch.Folders, names: Sequence[str]) -> list[str]:
    """Returns the names, or all upstreams if there are none; raises for a name without patches."""
    known, with_patches = patch.upstreams(folders), upstreams_with_patches(folders)
    for name in names:
        upstream, slash, file = name.partition("/")
        if upstream not in known:
            fact = f"No pack has a folder patches/{upstream}"
            raise UnknownNameError(f"torchport check {name}", fact, nearest(name, known))
        files = {other for root in stack_of(folders) for other in _files(root, upstream)}
        if slash and name not in files:
            others = sorted(other.partition("/")[2] for other in files)
            fact = f"There is no patches/{upstream}/{file}.yaml"
            raise UnknownNameError(f"torchport check {name}", fact, nearest(file, others))
        if not slash and name not in with_patches:
            fact = f"There are no patches in patches/{name}"
            raise UnknownNameError(f"torchport check {name}", fact, nearest(name, with_patches))
    return list(names) or known


def read(folders: patch.Folders, names: Sequence[str], report: Report, home: Path | None = None) -> list[patch.Entry]:
    """Returns the entries of every file that can be read, each id once; an unreadable file is added to `report`. `home`
    is the highest folder in which the names are looked up, as in `patch.read`.
    """
    stack = stack_of(folders)
    readable: dict[str, None] = {}
    entries: list[patch.Entry] = []
    for root in stack if home is None else stack[stack.index(home) :]:
        for name in dict.fromkeys(file for files in names for file in _files(root, files)):
            try:
                entries += patch.read(root, [name])
                readable[name] = None
            except TorchportError as error:
                report.add(error, "schema")
    by_id = {entry.id: entry for entry in reversed(entries)}  # the entry of the highest folder comes first, and is kept
    if readable and (len(stack) > 1 or len(by_id) < len(entries)):
        try:
            # Read at once, files are also checked against each other.
            by_id = {entry.id: entry for entry in patch.read(stack, list(readable), home)}
        except TorchportError as error:  # files that contradict each other, or one above that cannot be read
            report.add(error, "schema")
    entries = [by_id[key] for key in dict.fromkeys(entry.id for entry in entries)]
    for entry in entries:
        report.note_step(entry, "schema")
    return entries


def _files(root: Path, name: str) -> list[str]:
    """Returns the patch files of an upstream, or of `upstream/file`, in one folder: `["up/attention", "up/norm"]`."""
    upstream, _, chosen = name.partition("/")
    files = sorted((root / upstream).glob("*.yaml"))
    return [f"{upstream}/{file.stem}" for file in files if file.name != LOCK and (not chosen or file.stem == chosen)]


def fits_versions(entry: patch.Entry, report: Report, probe: bool = True) -> bool | None:
    """Returns whether an entry fits the installed versions, None if they do not need it; reports both but a fit."""
    try:
        reason = versions.outcome(entry, probe)  # without `probe`, the entry's Python is not run
    except UnsupportedError as error:
        report.note_step(entry, "targets")
        report.add(error, "targets", entry.id)
        return False  # the caller still checks the source, to show what changed in that version
    if reason is not None:
        report.note_step(entry, "targets", skipped=f"not needed: {reason}")
        return None
    return True


def check_source(entry: patch.Entry, loaded: Any, entries: Sequence[patch.Entry], report: Report) -> bool:
    """Checks an entry against upstream's source, and adds findings to `report`; returns whether it can be tried.

    Args:
        loaded: The replacement that the entry names, or its parsed source; None if it names none.
        entries: All entries: those that change the same target share a row of the lock.
    """
    report.note_step(entry, "targets")
    tree = tree_of(file_of(entry, entry.reference)) if entry.reference else None
    for draft in _unfilled_entry(entry, tree):
        report.add(draft, "targets", entry.id)
    if not entry.edits:
        return True
    try:
        try:
            state = drift.check(entry)
        except DriftError as error:
            state = "drift"  # the patch is tried all the same: it may still fit
            report.add(error, "drift", entry.id, drift.review(entry, entries))
        if state != "no source":
            report.note_step(entry, "drift")
        checks.check_source(entry, loaded)
        if state == "unlocked":
            command = f"torchport patches lock {entry.upstream}"
            text = f"'{entry.id}' has no row in the lock. Review it, then run: {command}"
            text += " (with the --path and --upstream-path that are used here)."
            try:
                review = drift.review(entry, entries)
            except TargetError:  # its target cannot be read, so there is no row to review
                review = ""
            report.findings.append(Finding(DriftError.id, entry.place, text, entry.id, "drift", review))
    except TorchportError as error:
        report.add(error, "targets", entry.id)
        return False
    return True


def check_cards(pack: Pack, models: Sequence[str] = ()) -> Report:
    """Returns the findings for the named model cards; without names, for all cards and all configs."""
    report = Report()
    cards = read_cards(pack, models or {name for layer in pack.checked for name in layer.card_names()}, report)
    sound = []  # jobs are tried with these cards alone: with another card, an error could follow from its mistake
    mistaken: set[str] = set()
    for card, document in cards:
        report.cases.append(Case(document.place(), patch="", step="card"))
        # A mistake of a card is reported for that card alone, and not for the cards that extend it.
        inherits = card.extends in mistaken
        mistakes = [] if inherits else list(_mistakes(pack, card, document))
        if mistakes:
            mistaken.add(card.model)
        if not mistakes and not inherits:
            sound.append(card)
        for error in mistakes:
            report.add(error, "card")
        for key, why in card.operators.items():
            place = document.place(["operators", key])
            note = f"accepts {key}, which may differ from PyTorch's"
            report.notes.append(f"{place}: {note}: {why}")
        _check_demo(pack, card, document, has_mistakes=bool(mistakes) or inherits, report=report)
    if not models:
        for layer in pack.checked:
            for error in layer.unread():
                report.add(error, "schema")
        # A config may also be for a card of a pack that is not checked.
        others = set(pack.models()) - {card.model for card, _ in cards}
        known = [*sound, *(card for card, _ in read_cards(pack, others, Report()))]
        is_whole = len(known) == len({*pack.models()})
        for file in sorted(file for layer in pack.checked for file in (layer.root / "configs").glob("*.yaml")):
            _check_config(pack, file, known, is_whole, report)
    return report


def read_cards(pack: Pack, models: Collection[str], report: Report) -> list[tuple[Card, Document]]:
    """Returns the named cards that can be read, those that extend another card last. A card that cannot be read is a
    finding in `report`; cards that extend it are left out without a finding of their own.
    """
    cards = []
    unread: set[str | None] = set()
    extended = {name: pack.base_name(name) for name in models}
    for name in sorted(models, key=lambda name: (extended[name] is not None, name)):
        if extended[name] in unread:
            continue
        try:
            card, document = pack.card(name)
        except UnknownNameError as error:
            if extended[name] is None:
                raise  # no such card
            report.add(error, "schema")  # it extends a card that does not exist
            continue
        except TorchportError as error:
            report.add(error, "schema")
            unread.add(name)
            continue
        report.cases.append(Case(document.place(), patch="", step="schema"))
        cards.append((card, document))
    return cards


def _mistakes(pack: Pack, card: Card, document: Document) -> Iterator[TorchportError]:
    """Yields an error for each thing that a card names but does not exist, and for each contradiction in it."""
    home = pack.home(card.model).patches
    # The lists of patches in a card: where each stands, and its names.
    lists: list[tuple[list[str | int], list[str]]] = [(["original"], card.original), (["script"], card.script)]
    lists += [(["patches", stage], names) for stage, names in card.patches.items()]
    for component, kinds in card.implementations.items():
        for implementation, stages in kinds.patches.items():
            here = ["implementations", component, "patches", implementation]
            lists += [([*here, stage], names) for stage, names in stages.items()]
    for path, names in lists:
        for number, name in enumerate(names):
            yield from absent_patches(pack.folders, name, document.place([*path, number]), home)
    for _, names in card.patch_sets():
        fitting = []
        for entry in read(pack.folders, names, Report(), home):  # unreadable files are reported elsewhere
            with contextlib.suppress(UnsupportedError):
                if versions.outcome(entry, probe=False) is None:
                    fitting.append(entry)
        try:
            patch_set.check_claims(running=[], fresh=fitting)  # raises if two patches of a stage change the same target
        except TorchportError as error:
            yield error
    try:
        networks = _networks(pack, card, document)
        if networks is not None:
            check_names(card, networks, document)
        yield from _absent_builders(pack, card, document)
        if card.call is None:
            place = document.place(["family"])
            file = pack.family_file(card, place)
            unwritten = ", ".join(sorted(_unwritten(tree_of(file))))
            if unwritten:
                yield ReplacementError(place, f"'{as_named(file)}' is a draft: {unwritten}", "Fill them in")
    except TorchportError as error:
        yield error


def _absent_builders(pack: Pack, card: Card, document: Document) -> Iterator[TorchportError]:
    """Yields an error for each component whose `build` function, as `file:function`, does not exist."""
    family = family_module.file_of(pack, card, document.place(["family"]))
    for name, component in card.components.items():
        if component.build is None:
            continue
        place = document.place(["components", name, "build"])
        file, _, function = component.build.partition(":")
        path = family.with_name(file)
        try:
            tree = tree_of(path)
        except UnreadableError as error:
            known = [other.name for other in sorted(path.parent.glob("*.py"))]
            absent = ReplacementError(place, f"There is no '{as_named(path)}'", nearest(path.name, known))
            yield error if path.exists() else absent
            continue
        binding = binding_at(tree, (function,))
        if binding.node is None and not binding.open:  # open: it may come from an import of `*`
            known = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
            fact = f"'{as_named(path)}' has no function '{function}'"
            yield ReplacementError(place, fact, nearest(function, known))


def _check_demo(pack: Pack, card: Card, document: Document, has_mistakes: bool, report: Report) -> None:
    """Checks that a card's demo exists and can be read; if the card has no mistakes, also that the demo fits it."""
    try:
        job, job_document = pack.job(pack.demo(card))
    except UnknownNameError as error:
        report.add(UnknownNameError(document.place(["demo"]), error.fact, error.remedy), "card")
    except TorchportError as error:
        report.add(error, "schema")
    else:
        if not has_mistakes:
            for mistake in job_mistakes(job, card, job_document):
                report.add(mistake, "job")


def absent_patches(folders: patch.Folders, name: str, place: str, home: Path | None = None) -> Iterator[TorchportError]:
    """Yields an error if the patches that a card names at `place` do not exist; none for mistakes in their file."""
    try:
        patch.read(folders, [name], home)  # for its errors alone
    except UnknownNameError as error:
        yield UnknownNameError(place, error.fact, error.remedy, name=name)
    except BadValueError as error:
        # The name has another form than `upstream` or `upstream/file`.
        if error.place == name:
            yield BadValueError(place, error.fact, error.remedy, name=name)
    except TorchportError:
        return


def _networks(pack: Pack, card: Card, document: Document) -> set[str] | None:
    """Returns the components that a family's stages compile, from its source; None if the source does not show them."""
    check_call(card, document)
    if card.call is not None:
        return set(card.call.compiled)
    place = document.place(["family"])
    file = pack.family_file(card, place)
    tree = tree_of(file)
    bindings = {name: binding_at(tree, (name,)) for name in family_module.NAMES}
    names = [name for name, binding in bindings.items() if binding.node is not None or binding.open]
    family_module.check_complete(as_named(file), names, place, variants=False)  # raises if a name is missing
    # `STAGES = (Stage(..., network="vae"), ...)`
    statement = bindings["STAGES"].node
    value = statement.value if isinstance(statement, (ast.Assign, ast.AnnAssign)) else None
    calls = value.elts if isinstance(value, ast.Tuple) else []
    networks: set[Any] = set()
    for call in calls:
        if not isinstance(call, ast.Call) or len(call.args) > 5:  # the sixth argument of `Stage` is `network`
            return None
        for keyword in call.keywords:
            # `**fields`, whose names the source does not show.
            if keyword.arg is None:
                return None
            if keyword.arg == "network":
                if not isinstance(keyword.value, ast.Constant):
                    return None
                networks.add(keyword.value.value)
    return {str(network) for network in networks if network is not None} or None


def _check_config(pack: Pack, file: Path, cards: Sequence[Card], is_whole: bool, report: Report) -> None:
    """Checks a config: its fields, its machine, and, if `is_whole`, that it is valid for one of `cards`. Without
    `is_whole`, a card of the pack cannot be read or has mistakes, and the config may be for that card.
    """
    try:
        pack.highest(f"configs/{file.name}")  # raises if the file hides one in a lower pack
        job, document = pack.job(str(file))
        report.cases.append(Case(document.place(), patch="", step="schema"))
        parse_machine(job.machine, document.place(["machine"]))  # raises for an unknown machine
        report.cases.append(Case(document.place(), patch="", step="job"))
    except TorchportError as error:
        report.add(error, "schema")
        return
    if not cards or not is_whole:
        return
    refusals = [list(job_mistakes(job, card, document)) for card in cards]
    places = {finding.place for finding in report.findings}  # of jobs that are reported already, as a card's demo
    if all(mistakes and mistakes[0].place not in places for mistakes in refusals):
        report.add(combined(refusals[0]), "job")


def _unfilled_entry(entry: patch.Entry, tree: ast.Module | None) -> Iterator[ReplacementError]:
    """Yields one error if an entry is a draft; `tree` is the parsed file of its function, None without a function."""
    promise = entry.equivalence.written()  # `"bitwise"`, or `{"lossy": "why"}`
    reason = next(iter(promise.values())) if isinstance(promise, dict) else ""
    texts = {"why": entry.why, "equivalence": reason, "scope_reason": entry.scope_reason}
    gaps = [key for key, text in texts.items() if str(text).startswith(_WORDS)]
    file, _, name = (entry.reference or "").partition(":")
    if tree and name in _unwritten(tree):
        gaps.append(f"{name} in {file}")
    if not gaps:
        return
    verb, remedy = "are", "Fill them in"
    if len(gaps) == 1:
        verb, remedy = "is", "Fill it in"
    fact = f"'{entry.id}' is a draft: {', '.join(gaps)} {verb} not filled in"
    yield ReplacementError(entry.place, fact, remedy, patch=entry.id)


def _unwritten(tree: ast.Module) -> set[str]:
    """Returns the names of top-level functions and classes with a `NotImplementedError("fill in ...")`: drafts."""
    names = set()
    for definition in tree.body:
        if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for call in ast.walk(definition):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "NotImplementedError" and call.args:
                text = call.args[0]
                if isinstance(text, ast.Constant) and str(text.value).startswith(_MARK):
                    names.add(definition.name)
    return names
