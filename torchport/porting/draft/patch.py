"""Writes a patch that is to be filled in: its entry, its function, its test, and the row of its target in the lock."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from torchport.config import parse_document
from torchport.errors import TakenNameError, WrongTypeError
from torchport.files.folder import as_named
from torchport.patch import patch_set
from torchport.patch.declared.entry import Entry
from torchport.patch.declared.reading import LOCK, read_file
from torchport.patch.source import checks, drift, proposal
from torchport.porting.draft import function
from torchport.porting.draft.draft import Draft, PatchDraftRequest, draft
from torchport.porting.draft.folder import Home, Piece
from torchport.porting.draft.target import folder_of


@dataclasses.dataclass(frozen=True)
class DraftedPatch:
    """A patch that was written."""

    id: str  #: Its id.
    names: str  #: Its file of entries, as a card lists it.
    function: str  #: Its function, as `model.py:forward_12`; empty for a stub.
    test: str  #: The file of its test.
    lines: Sequence[str]  #: What happened to each file.
    left: Sequence[str]  #: What is left to fill in, a sentence each.


def write(wish: PatchDraftRequest, home: Home) -> DraftedPatch:
    """Drafts a patch and writes it into a pack's folder, all of it or nothing.

    Raises:
        TakenNameError: The entry, its function or its test is there already.
        PatchError: The target cannot be patched in this way, or drifted from the lock.
    """
    one = draft(wish)
    file = f"patches/{wish.names}.yaml"
    text = proposal.written(one.fields, wish.package) + "\n"
    entry = _checked(wish, one, home, file, text)
    pieces = [Piece(file, text)]
    reference = (entry.reference or "") if one.python else ""
    if one.python:
        python = f"patches/{wish.package}/{reference.partition(':')[0]}"
        pieces.append(Piece(python, one.python, function.head(wish.names)))
    pieces.append(Piece(one.trial.file, one.test, mode="new"))
    lock = drift.with_row(entry, entries(home, wish.package))
    pieces += [Piece(f"patches/{wish.package}/{LOCK}", lock, mode="whole")] if lock else []
    lines = home.write(pieces)
    locked = [] if lock or not entry.edits else ["Its target has no row of its own in the lock: it was there"]
    return DraftedPatch(entry.id, wish.names, reference, one.trial.file, lines, [*one.left, *locked])


def entries(home: Home, package: str) -> list[Entry]:
    """Returns the entries that the pack has of a package."""
    folder = home.root / "patches" / package
    files = [file for file in sorted(folder.glob("*.yaml")) if file.name != LOCK] if folder.is_dir() else []
    return [entry for file in files for entry in read_file(file)]


def _checked(wish: PatchDraftRequest, one: Draft, home: Home, file: str, text: str) -> Entry:
    """Returns the entry, if it can stand in its file beside the others."""
    entry = proposal.entry_of(one.fields, wish.package)
    path = home.root / file
    before = home.text(file)
    known = entries(home, wish.package)
    for other in known:
        if other.id == entry.id:
            fact = f"The patch '{entry.id}' is there already"
            raise TakenNameError(other.place, fact, "Change that entry, or delete it first", patch=entry.id)
    entry._place = wish.place
    patch_set.check_claims([], [*read_file(path), entry] if before else [entry])
    document = parse_document(f"{before.rstrip()}\n\n{text}" if before else text, as_named(path))
    if not isinstance(document.data, list):
        fact = "It is no list whose items stand on lines of their own"
        raise WrongTypeError(as_named(path), fact, "Choose another file with --file")
    entry._place = f"{as_named(path)}:{(before.rstrip().count(chr(10)) + 3) if before else 1}"
    entry._folder = path.parent
    if entry.edits:
        checks.check_source(entry, checks.UNKNOWN)
    return entry


def upstreams(wish: PatchDraftRequest, checkout: Path | None) -> list[Path]:
    """Returns the folders of upstream that a draft must not be written into."""
    modules = [wish.target.partition(":")[0], *wish.importers]
    found = [folder_of(module) for module in modules if module.partition(".")[0] != "torch"]
    return [*([checkout] if checkout else []), *(one for one in found if one is not None)]
