"""The patches of a stage: armed together, applied all or none, undone in reverse order."""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module

from torchport.errors import ConflictError, ThreadError, TooLateError, TorchportError, UnknownNameError, nearest
from torchport.patch import aliases
from torchport.patch.declared.entry import STAGES, Entry
from torchport.patch.declared.replacement import load_all
from torchport.patch.declared.versions import installed, outcome
from torchport.patch.ledger import Ledger, Record
from torchport.patch.live import hook, stub
from torchport.patch.live.change import Change, Placed, made
from torchport.patch.source import drift
from torchport.patch.source.checks import check_sources
from torchport.patch.source.source import is_imported
from torchport.patch.trace import digest, in_force

_lock = threading.Lock()
_groups: list[_Group] = []
_owner: list[int] = []


class _Group:
    """One entered set.

    Args:
        records: The patches that this set brings; not those that are in force already.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = list(records)
        self.done: list[Record] = []
        self.disarm: list[Callable[[], None]] = []
        self.ledgers: list[Ledger] = []
        self.failed = False
        self.rebound: list[Callable[[], None]] = []
        self.gone: list[Change] = []

    def enter(self) -> None:
        """Applies what is late and arms the rest; on an error nothing stays."""
        try:
            waiting = [record for record in self.records if record.outcome is None]
            for record in waiting:
                if record.entry.lifetime.while_importing:
                    self._arm_window(record)
                if record.entry.stub is not None:
                    self.disarm.append(stub.arm(record.entry, record.calls, self.keep))
            for name in dict.fromkeys(r.entry.module for r in waiting if _is_applied(r)):
                self._arm(name)
        except BaseException:
            self.leave()
            raise
        in_force.update({record.entry.id: digest(record.entry) for record in waiting})

    def keep(self, error: TorchportError) -> None:
        """Keeps an error for everybody who looks into one of the set's ledgers."""
        for ledger in self.ledgers:
            ledger.keep(error)

    def _arm(self, name: str) -> None:
        due = [r for r in self.records if r.entry.module == name and r.outcome is None and _is_applied(r)]
        if name in sys.modules:
            for record in due:
                record.late = True
            self._apply(sys.modules[name], due)
        self.disarm.append(hook.arm(name, lambda module: self._imported(module, due)))

    def _arm_window(self, record: Record) -> None:
        depth = 0

        @contextlib.contextmanager
        def window() -> Iterator[None]:
            nonlocal depth
            depth += 1
            try:
                if depth == 1:
                    self._make(record, import_module(record.entry.module))
                yield
            finally:
                depth -= 1
                if depth == 0 and record.change is not None:
                    record.change.undo()
                    record.change = None

        package = record.entry.lifetime.while_importing or ""
        self.disarm.append(hook.arm_window(package, window))

    def _imported(self, module: types.ModuleType, due: Sequence[Record]) -> None:
        """Applies a module's patches as it has been executed; a failure takes the whole set back."""
        if self.failed:
            return
        for record in due:
            if record.change is not None:  # imported again: the old functions may still be held by somebody
                self.done.remove(record)
                self.gone.append(record.change)
                record.change, record.detail = None, ""
        try:
            self._apply(module, due)
        except TorchportError as error:
            self.failed = True
            self.keep(error)
            self.leave()
            raise

    def _apply(self, module: types.ModuleType, due: Sequence[Record]) -> None:
        for record in due:
            self._make(record, module)
            self.done.append(record)
        self.rebound += aliases.repair(due)

    def _make(self, record: Record, module: types.ModuleType) -> None:
        record.change = made(record.entry, module, record.loaded, record.calls)

    def check_reached(self) -> None:
        """Keeps an error for a patch whose module is there, and was never seen to be imported: it did nothing.

        Another finder before ours, or `exec_module` of a spec made by hand, goes past the import system.
        """
        for record in self.records:
            entry = record.entry
            waits = record.outcome is None and record.change is None and _is_applied(record)
            if waits and not self.failed and entry.module in sys.modules:
                fact = f"{entry.module} was imported past '{entry.id}', which changed nothing"
                remedy = "Import it with an import statement, and let no other finder go before"
                self.keep(TooLateError(entry.place, fact, remedy, patch=entry.id))

    def leave(self) -> None:
        """Takes everything back, the last change first, and disarms what never came."""
        for disarm in reversed(self.disarm):
            disarm()
        self.disarm.clear()
        for record in self.records:
            in_force.pop(record.entry.id, None)
        for record in self.done:
            record.outcome = record.state()
        changes = [*self.gone, *(record.change for record in self.done if record.change is not None)]
        for undo in reversed(self.rebound):
            undo()
        self.rebound.clear()
        for change in reversed(changes):
            change.undo()
        placed = [change for change in changes if isinstance(change, Placed)]
        aliases.give_back(placed)
        self.gone.clear()
        self.done.clear()


class _Kept:
    """Lets an error that was kept go before whatever it led to in the body of the `with`."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: object) -> None:
        if isinstance(value, Exception) and not isinstance(value, TorchportError) and self._ledger.pending:
            raise self._ledger.pending[0] from value


def _is_applied(record: Record) -> bool:
    return record.entry.edits and not record.entry.lifetime.while_importing


@contextlib.contextmanager
def applied(entries: Sequence[Entry], stage: str | None = None, *, accept_drift: bool = False) -> Iterator[Ledger]:
    """Puts patches in force for the length of a `with`, and gives their ledger.

    Each is applied as its module is imported; all of them or none. Sets nest, and what is in force already is not
    applied twice. Nothing of them is left afterwards.

    Args:
        entries: As `read` returns them.
        stage: encode, denoise or decode, whose `must_be_called` is checked by the ledger; None for all.
        accept_drift: For `torchport check`, which tells of drift itself and goes on to look further.

    Raises:
        PatchError: A patch cannot be applied as declared.
    """
    if stage is not None and stage not in STAGES:
        raise UnknownNameError("stage", f"No stage '{stage}'", nearest(stage, STAGES))
    with _lock:
        _enter_thread()
        group, ledger = _prepared(entries, stage, accept_drift)
        group.enter()
        _groups.append(group)
    try:
        with _Kept(ledger):
            yield ledger
        group.check_reached()
    finally:
        with _lock:
            _leave(group)
    ledger.raise_pending()


def _leave(group: _Group) -> None:
    """Takes a set back, and the later ones first, should they still be in force: they are built upon it."""
    above = _groups[_groups.index(group) + 1 :] if group in _groups else []
    for one in reversed([group, *above]):
        one.leave()
        if one in _groups:
            _groups.remove(one)
    if not _groups:
        _owner.clear()
    if above:
        fact = "A set of patches is left while a later one is in force; both are undone"
        error = ConflictError("patch.applied", fact, "Leave sets in the reverse order of entering them")
        for one in above:
            one.keep(error)  # whoever entered it goes on without its patches, and shall hear of it
        raise error


def _enter_thread() -> None:
    me = threading.get_ident()
    if _groups and _owner and _owner[0] != me:
        fact = "Another thread has patches applied"
        raise ThreadError("patch.applied", fact, "Apply patches in one thread, around all of its work")
    _owner[:] = [me]


def _prepared(entries: Sequence[Entry], stage: str | None, accept_drift: bool) -> tuple[_Group, Ledger]:
    running = {record.entry.id: record for group in _groups for record in group.records}
    installed.cache_clear()
    fresh = [entry for entry in entries if not (entry.id in running and running[entry.id].entry == entry)]
    _check_claims([record.entry for record in running.values()], fresh)
    outcomes = {entry.id: outcome(entry) for entry in fresh}
    chosen = [entry for entry in fresh if outcomes[entry.id] is None]
    loaded = load_all(chosen)
    check_sources(chosen, loaded)
    records = {entry.id: Record(entry, loaded.get(entry.id)) for entry in fresh}
    for key, result in outcomes.items():
        if result is not None:
            records[key].outcome, records[key].detail = result
    for entry in chosen:
        if entry.edits:
            records[entry.id].imported = is_imported(entry)
            records[entry.id].drift = "accepted" if accept_drift else drift.check(entry)
    ledger = Ledger([records.get(entry.id) or running[entry.id] for entry in entries], stage)
    group = _Group(list(records.values()))
    group.ledgers.append(ledger)
    return group, ledger


def _check_claims(running: Sequence[Entry], fresh: Sequence[Entry]) -> None:
    """Checks new entries against each other and against those in force.

    Rewrites of one function may stand beside each other: whether their runs overlap is seen when they are matched.

    Raises:
        ConflictError: Two claims meet; both are named.
    """
    claimed = list(running)
    for entry in fresh:
        for other in claimed:
            if entry.id == other.id:
                fact = f"The id '{entry.id}' is in force with another content, from {other.place}"
                raise ConflictError(entry.place, fact, "Rename one of the two", patches=[entry.id])
            if _meet(entry, other):
                fact = f"'{entry.id}' claims {entry.target}, and '{other.id}' at {other.place} {other.target}"
                raise ConflictError(entry.place, fact, "Keep one of the two", patches=[entry.id, other.id])
        claimed.append(entry)


def _meet(one: Entry, other: Entry) -> bool:
    if one.module != other.module or one.edits != other.edits:
        return False
    if one.kind == other.kind == "rewrite" and one.path == other.path:
        return False
    shorter = min(len(one.path), len(other.path))
    return one.path[:shorter] == other.path[:shorter]
