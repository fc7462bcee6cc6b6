"""Puts the patches of a stage in force: armed together, applied all or none, undone in reverse order."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from importlib import import_module

from torchport.config.card import STAGES
from torchport.errors import ConflictError, ThreadError, TooLateError, TorchportError, UnknownNameError, nearest
from torchport.patch import aliases
from torchport.patch.declared import Entry
from torchport.patch.declared.replacement import Explained, load_all
from torchport.patch.declared.versions import installed, outcome
from torchport.patch.ledger import NOT_NEEDED, Ledger, Record, check_twins, digest
from torchport.patch.live import hook, registry, stub
from torchport.patch.live.change import Change, Placed, change
from torchport.patch.source import drift
from torchport.patch.source.checks import check_source


@dataclasses.dataclass(eq=False)
class _PatchSet:
    """The patches that one `applied(...)` puts in force, without those that an outer one has in force already."""

    records: Sequence[Record]
    ledger: Ledger
    changed: list[Record] = dataclasses.field(default_factory=list)  #: In the order of their changes.
    #: Changes of modules that were imported again since: somebody may still hold the old functions.
    replaced: list[Change] = dataclasses.field(default_factory=list)
    #: Where an original was exchanged for its replacement.
    rebindings: list[aliases.Rebinding] = dataclasses.field(default_factory=list)
    #: The waits for imports, which end when it is closed.
    waits: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    failed: bool = False  #: Whether a patch could not be applied, and all were undone.

    def enter(self) -> None:
        """Applies the patches of modules that are imported already, and arms the others. An error undoes all."""
        try:
            waiting = [record for record in self.records if record.outcome is None]
            by_module: dict[str, list[Record]] = {}
            for record in waiting:
                if package := record.entry.lifetime.while_importing:
                    self._arm_window(record, package)
                if record.entry.stub is not None:
                    self.waits.callback(stub.arm(record.entry, record.calls, self.ledger.pending.append))
                if _is_applied_at_import(record):
                    by_module.setdefault(record.entry.module, []).append(record)
            for name, due in by_module.items():
                if name in sys.modules:  # its patches come late, and at once
                    for record in due:
                        record.late = True
                    self._apply(sys.modules[name], due)
                self.waits.callback(hook.arm(name, functools.partial(self._apply_at_import, due)))
        except BaseException:
            self.leave()
            raise
        registry.digests.update({record.entry.id: digest(record.entry) for record in waiting})

    def _arm_window(self, record: Record, package: str) -> None:
        """Applies a `while_importing` patch each time that a package is imported, and undoes it afterwards."""
        depth = 0  # how many modules of the package are being imported, one by another

        @contextlib.contextmanager
        def window() -> Iterator[None]:
            nonlocal depth
            depth += 1
            try:
                if depth == 1:
                    module = import_module(record.entry.module)
                    record.change = change(record.entry, module, record.loaded, record.calls)
                yield
            finally:
                depth -= 1
                if depth == 0 and record.change is not None:
                    record.change.undo()
                    record.change = None

        self.waits.callback(hook.arm(package, window, when="windows"))

    def _apply_at_import(self, due: Sequence[Record], module: types.ModuleType) -> None:
        """Applies a module's patches after its execution. An error undoes the whole set, and is kept in the ledger."""
        if self.failed:
            return
        for record in due:
            if record.change is not None:  # the module is imported again
                self.changed.remove(record)
                self.replaced.append(record.change)
                record.change, record.detail = None, ""
        try:
            self._apply(module, due)
        except TorchportError as error:
            self.failed = True
            self.ledger.pending.append(error)
            self.leave()
            raise

    def _apply(self, module: types.ModuleType, due: Sequence[Record]) -> None:
        """Changes a module's objects, and puts the replacements in place of the originals wherever these are held."""
        for record in due:
            record.change = change(record.entry, module, record.loaded, record.calls)
            self.changed.append(record)
        self.rebindings += aliases.repair(due)

    def check_reached(self) -> None:
        """Notes an error for each patch that did nothing, because its module was imported without being noticed.
        Another finder before ours, or `exec_module` of a spec made by hand, goes past our finder. A second name for
        the same file is such an error, too: the module under that name has no patch.
        """
        try:
            check_twins([record.entry for record in self.records if record.change is not None])
        except TorchportError as error:
            self.ledger.pending.append(error)
        for record in self.records:
            entry = record.entry
            waits = record.outcome is None and record.change is None and _is_applied_at_import(record)
            if waits and not self.failed and entry.module in sys.modules:
                fact = f"{entry.module} was imported past '{entry.id}', which changed nothing"
                remedy = "Import it with an import statement, and put no finder before torchport's"
                self.ledger.pending.append(TooLateError(entry.place, fact, remedy, patch=entry.id))

    def leave(self) -> None:
        """Undoes all changes, the last one first, notes each patch's last state, and ends the wait for imports."""
        self.waits.close()
        for record in self.records:
            registry.digests.pop(record.entry.id, None)
        for record in self.changed:
            record.outcome = record.state()
        changes = [*self.replaced, *(record.change for record in self.changed if record.change is not None)]
        for rebinding in reversed(self.rebindings):
            rebinding.place.exchange(rebinding.new, rebinding.old)
        for change_made in reversed(changes):
            change_made.undo()
        aliases.give_back([placed for placed in changes if isinstance(placed, Placed)])
        for spent in (self.rebindings, self.replaced, self.changed):
            spent.clear()


def _is_applied_at_import(record: Record) -> bool:
    """Returns whether a patch is applied when its target's module is imported: no operator, no stub, no window."""
    return record.entry.edits and not record.entry.lifetime.while_importing


@contextlib.contextmanager
def applied(entries: Sequence[Entry], stage: str | None = None, *, accept_drift: bool = False) -> Iterator[Ledger]:
    """Puts patches in force while the context lasts, and yields their ledger.

    A patch is applied as its module is imported. If a patch fails, all are undone. Contexts nest: a patch that is in
    force already is not applied twice. At the end all changes are undone.

    Args:
        stage: A stage's name, such as denoise: the ledger checks the patches that it must call. None: all stages.
        accept_drift: Whether drift is no error: `torchport check` reports drift itself and goes on.
    """
    if stage is not None and stage not in STAGES:
        raise UnknownNameError("stage", f"No stage '{stage}'", nearest(stage, STAGES))
    with registry.lock:
        if registry.sets and registry.owner != threading.get_ident():
            fact = "Another thread has patches applied"
            raise ThreadError("patch.applied", fact, "Apply patches in one thread, around all of its work")
        patches = _patch_set(entries, stage, accept_drift)
        patches.enter()
        registry.sets.append(patches)
        registry.owner = threading.get_ident()
    pending = patches.ledger.pending
    try:
        # A pending error is raised in place of what followed from it, but for SystemExit.
        with Explained(lambda error: pending[0] if pending and isinstance(error, Exception) else None):
            yield patches.ledger
        patches.check_reached()
    finally:
        with registry.lock:
            _leave(patches)
    patches.ledger.raise_pending()


def _leave(patches: _PatchSet) -> None:
    """Undoes a set of patches. Sets that were entered later and are still in force go first, and are an error."""
    above = registry.sets[registry.sets.index(patches) + 1 :] if patches in registry.sets else []
    for entered in reversed([patches, *above]):
        entered.leave()
        if entered in registry.sets:
            registry.sets.remove(entered)
    if above:
        fact = "A set of patches is left while a later one is in force; both are undone"
        error = ConflictError("patch.applied", fact, "Leave sets in the reverse order of entering them")
        for entered in above:
            entered.ledger.pending.append(error)  # its code goes on without patches, and the error is raised there, too
        raise error


def _patch_set(entries: Sequence[Entry], stage: str | None, accept_drift: bool) -> _PatchSet:
    """Returns a checked set of the entries that are not in force yet. It neither imports nor changes upstream."""
    in_force = {record.entry.id: record for patches in registry.sets for record in patches.records}
    fresh = [entry for entry in entries if entry.id not in in_force or in_force[entry.id].entry != entry]
    check_claims([record.entry for record in in_force.values()], fresh)
    installed.cache_clear()
    records = {entry.id: Record(entry) for entry in fresh}
    for record in records.values():
        reason = outcome(record.entry)
        if reason is not None:
            record.outcome, record.detail = NOT_NEEDED, reason
    wanted = [record for record in records.values() if record.outcome is None]
    loaded = load_all([record.entry for record in wanted])
    # The text of each module after the rewrites that are checked by then.
    texts: dict[str, str] = {}
    for record in wanted:
        record.loaded = loaded.get(record.entry.id)
        if record.entry.edits:
            check_source(record.entry, record.loaded, texts)
    for record in wanted:
        if record.entry.edits:
            record.drift = "accepted" if accept_drift else drift.check(record.entry)
    ledger = Ledger([records.get(entry.id) or in_force[entry.id] for entry in entries], stage)
    return _PatchSet(list(records.values()), ledger)


def check_claims(running: Sequence[Entry], fresh: Sequence[Entry]) -> None:
    """Raises if a fresh entry changes what another entry changes, or has the id of another entry. Several rewrites of
    one function are allowed: whether they change the same statements is seen when they are matched.
    """
    ids: dict[str, Entry] = {}
    claimed: dict[tuple[str, bool, tuple[str, ...]], Entry] = {}
    below: dict[tuple[str, bool, tuple[str, ...]], Entry] = {}  # an entry that changes a part of this place
    for number, entry in enumerate([*running, *fresh]):
        place = entry.module, entry.edits, entry.path
        above = [(*place[:2], entry.path[:length]) for length in range(1, len(entry.path))]
        # Entries in force were checked when they were entered.
        if number >= len(running):
            if entry.id in ids:
                fact = f"The id '{entry.id}' is in force with another content, from {ids[entry.id].place}"
                raise ConflictError(entry.place, fact, "Rename one of the two", patches=[entry.id])
            same = claimed.get(place)
            if same is not None and same.kind == entry.kind == "rewrite":
                same = None
            other = next(filter(None, (*map(claimed.get, above), same, below.get(place))), None)
            if other is not None:
                fact = f"'{entry.id}' claims {entry.target}, and '{other.id}' at {other.place} claims {other.target}"
                raise ConflictError(entry.place, fact, "Keep one of the two", patches=[entry.id, other.id])
        ids[entry.id] = entry
        claimed.setdefault(place, entry)
        below.update((outer, entry) for outer in above if outer not in below)


def unreached() -> list[TorchportError]:
    """Returns the errors that the sets in force would raise if they were left now, as for a patch that did nothing."""
    errors: list[TorchportError] = []
    for patches in registry.sets:
        patches.check_reached()
        errors += patches.ledger.pending
    return list(dict.fromkeys(errors))
