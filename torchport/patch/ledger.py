"""The patches of a run, what became of each, and the proof of it that a traced program keeps.

A state is asked of the live objects. It is not remembered.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchport.errors import NotCalledError, StaleTraceError, TorchportError, TwinModuleError
from torchport.patch.declared import Entry
from torchport.patch.declared.replacement import file_of
from torchport.patch.live import registry
from torchport.patch.live.change import Change
from torchport.patch.live.counted import Calls, counting

NOT_NEEDED = "not needed"
"""The outcome of a patch that the installed upstream does not need."""


@dataclasses.dataclass(slots=True)
class Record:
    """One patch of a run."""

    entry: Entry
    loaded: Any = None  #: The function or class that takes the target's place.
    calls: Calls = dataclasses.field(default_factory=Calls)
    change: Change | None = None
    #: `NOT_NEEDED` or, after a run, the last state. None while it can still change.
    outcome: str | None = None
    detail: str = ""  #: What led to that outcome, or what else is worth printing.
    late: bool = False  #: Whether its module was imported before the patch.
    drift: str = ""  #: "locked", "unlocked", "no source", "accepted", or empty where it was not looked at.

    def state(self) -> str:
        """Returns the patch's state: armed before its import, then applied; used once called; displaced; not needed."""
        if self.outcome is not None:
            return self.outcome
        if self.change is not None and not self.change.stands():
            return "displaced"
        if self.calls.count:
            return "used"
        return "armed" if self.change is None else "applied"


@dataclasses.dataclass(frozen=True)
class Op:
    """A torchax lowering, for `compile` to register through torchax's public `override_op_definition`."""

    id: str
    target: str  #: The torch function or ATen overload, `module:attribute.path`.
    function: Callable[..., Any]
    place: str


def digest(entry: Entry) -> str:
    """Returns the hash of an entry and of the file with its function, if it has any."""
    hashes = entry_digest(entry)
    if entry.reference is not None:
        hashes += hashlib.sha256(file_of(entry, entry.reference).read_bytes()).hexdigest()
    return hashlib.sha256(hashes.encode()).hexdigest()[:16]


def entry_digest(entry: Entry) -> str:
    """Returns the hash of an entry's fields, except those that only give reasons, such as `why`."""
    text = json.dumps(entry.model_dump(mode="json", exclude={"why", "reported", "until", "overrides"}), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Trace:
    """The patches that a program was traced under, with their calls by then. Keep it with the compiled program."""

    digests: Mapping[str, str]
    calls: Mapping[str, int]

    def check(self) -> None:
        """Refuses to trace a program again while other patches are in force than at its first trace."""
        for key in sorted(self.digests.keys() | registry.digests.keys()):
            before, current = self.digests.get(key), registry.digests.get(key)
            if before != current:
                difference = "is not in force" if current is None else "has changed"
                difference = "was not in force then" if before is None else difference
                fact = f"A program is traced again, and '{key}' {difference}"
                remedy = "Trace it inside the same 'with patch.applied(...)', or compile it anew"
                raise StaleTraceError("trace", fact, remedy, patch=key)


class Ledger:
    """The patches of one `with patch.applied(...)`: a record for each."""

    def __init__(self, records: Sequence[Record], stage: str | None) -> None:
        self.records = list(records)
        self.stage = stage
        self.pending: list[TorchportError] = []  # raised in somebody's import, where a `try` of theirs may swallow them
        #: The calls before this ledger was opened, by the record's id.
        self._before = {id(record): record.calls.count for record in self.records}
        self._ops: list[Op] | None = None
        self._traced: dict[str, int] = {}  #: The calls in earlier traces of the programs, by the patch's id.

    def of_run(self, loading: Trace) -> Ledger:
        """Returns a ledger that counts anew, for another run of a stage; `loading` has the calls of its loading."""
        ledger = Ledger(self.records, self.stage)
        ledger.pending = self.pending
        ledger.credit(loading)
        return ledger

    def calls(self, record: Record) -> int:
        """Returns how often a patch was called since this ledger was opened."""
        return record.calls.count - self._before[id(record)] + self._traced.get(record.entry.id, 0)

    def trace(self, before: Trace | None = None) -> Trace:
        """Returns the record for a newly traced program: the patches in force, and their calls since `before`."""
        earlier = {} if before is None else before.calls
        calls = {record.entry.id: self.calls(record) for record in self.records}
        return Trace(dict(registry.digests), {key: count - earlier.get(key, 0) for key, count in calls.items()})

    def credit(self, trace: Trace) -> None:
        """Adds the calls of an earlier trace, whose program is used again; refuses it if other patches are in force."""
        trace.check()
        for key, calls in trace.calls.items():
            self._traced[key] = self._traced.get(key, 0) + calls

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row for each patch, for manifests and tables."""
        rows = []
        for record in self.records:
            entry, state = record.entry, record.state()
            if state in ("armed", "applied") and self._traced.get(entry.id):
                state = "used"  # by a credited trace, though it was not called here
            row = {
                "id": entry.id,
                "target": entry.target,
                "kind": entry.kind,
                "equivalence": entry.equivalence.written(),
                "state": state,
                "calls": self.calls(record) if entry.counted else None,
                "plumbing": entry.plumbing,
                "late": record.late,
                "drift": record.drift,
                "detail": record.detail,
                "why": " ".join(entry.why.split()),
                "place": entry.place,
            }
            rows.append(row)
        return rows

    def ops(self) -> list[Op]:
        """Returns the `op` entries with their functions, as the same objects at each call."""
        if self._ops is None:
            used = [record for record in self.records if record.entry.kind == "op" and record.outcome is None]
            self._ops = [Op(r.entry.id, r.entry.target, counting(r.loaded, r.calls)[0], r.entry.place) for r in used]
        return self._ops

    def raise_pending(self) -> None:
        """Raises the first pending error, which a `try` around an import of upstream's may have swallowed."""
        if self.pending:
            raise self.pending[0]

    def check_called(self) -> None:
        """Refuses a stage that did not call a patch it must call, and a patched module that was imported twice."""
        self.raise_pending()
        needed = [record for record in self.records if record.outcome != NOT_NEEDED]
        check_twins([record.entry for record in needed])
        for record in needed:
            entry = record.entry
            # A ledger without a stage is for all: then each patch is due that any stage must call.
            is_due = bool(entry.must_be_called) if self.stage is None else self.stage in entry.must_be_called
            if is_due and self.calls(record) == 0:
                stages = self.stage or ", ".join(entry.must_be_called)
                fact = f"'{entry.id}' was not called in {stages} (it is {record.state()})"
                remedy = f"Find what is called instead of {entry.target}, or remove the stage from 'must_be_called'"
                raise NotCalledError(entry.place, fact, remedy, patch=entry.id, target=entry.target)


def check_twins(entries: Iterable[Entry]) -> None:
    """Refuses (TwinModuleError) a patched module of which this process has a second copy, under another name."""
    by_file: dict[tuple[int, int], list[tuple[str, object]]] = {}
    by_module: dict[int, list[tuple[str, object]]] = {}  # by the module's id, the same list as for its file
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) if isinstance(module, types.ModuleType) else None
        if isinstance(file, str) and (identity := _identity(file)) is not None:
            by_module[id(module)] = by_file.setdefault(identity, [])
            by_module[id(module)].append((name, module))
    for entry in entries:
        if not entry.edits or entry.module not in sys.modules:
            continue
        module = sys.modules[entry.module]
        copies = by_module.get(id(module), ())
        twin = next((name for name, copy in copies if copy is not module), None)
        if twin is not None:
            file = str(module.__file__)
            names = f"'{entry.module}' and as '{twin}'"
            fact = f"{file} was imported twice, as {names}, and '{entry.id}' changes the first alone"
            remedy = _remedy(file, entry.module, twin)
            raise TwinModuleError(entry.place, fact, remedy, patch=entry.id, names=twin)


@functools.cache  # a process has thousands of modules, and applies patches again and again
def _identity(file: str) -> tuple[int, int] | None:
    """Returns the device and inode of a file; None for a file in an archive, or that was removed."""
    try:
        status = Path(file).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _remedy(file: str, name: str, other: str) -> str:
    """Returns the remedy for a file that was imported twice: often a folder inside the package is on `sys.path`."""
    if other == "__main__":
        return f"Start it from a script of its own, which imports '{name}'"
    # The folder in which an import of the other name finds the file.
    folder = Path(file).parents[other.count(".") + (Path(file).name == "__init__.py")]
    if str(folder) in map(os.path.realpath, sys.path):
        return f"Take {folder} off sys.path (and PYTHONPATH), and import '{name}' instead"
    return f"Import it as '{name}' everywhere"
