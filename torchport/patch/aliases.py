"""After a change, everybody who still holds the original: rebound, reported or refused; and back again at the end.

A function's reference count says in a microsecond whether anybody else holds it. Only then are holders looked for.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Sequence
from typing import Any

from torchport.errors import AliasError, PatchError, TooLateError
from torchport.patch import capture, holders
from torchport.patch.change import Placed
from torchport.patch.counted import own_parts
from torchport.patch.entry import Entry
from torchport.patch.holders import Holder, Undo
from torchport.patch.ledger import Op, Record
from torchport.patch.target import Slot, function_in


@dataclasses.dataclass(slots=True)
class _Pair:
    """An object, what takes its place, and the record that wants it."""

    record: Record | None
    old: Any
    new: Any


def repair(records: Sequence[Record]) -> list[Undo]:
    """Makes every holder of the originals hold what took their place.

    Args:
        records: Patches whose changes have just been made in one module.

    Returns:
        What puts the originals back, in the order in which they were replaced.

    Raises:
        TooLateError: A module was imported before its patch, and a holder cannot be rebound.
        AliasError: The same in a circle of imports, or the entry says `aliases: fail`.
    """
    undos: list[Undo] = []
    pairs = [pair for record in records for pair in _pairs(record)]
    try:
        findings = _found(pairs)
        if any(unseen or any(holder.rebind is None for holder in found) for _, found, unseen in findings):
            findings.clear()
            gc.collect()  # who is only waiting to be collected holds nothing
            findings = _found(pairs)
        for pair, found, unseen in findings:
            undos += _treated(pair, found, unseen)
    except BaseException:
        for undo in reversed(undos):
            undo()
        raise
    return undos


def give_back(changes: Sequence[Placed]) -> None:
    """Makes whoever captured a replacement while it was in force hold the original again.

    Who cannot be rebound (a local variable, say) holds a function that falls through to the original.
    """
    held = [pair for change in changes for pair in _returning(change) if _is_held(pair)]
    for pair, found, _ in _found(held):
        for holder in found:
            if holder.rebind is not None:
                holder.rebind(pair.new)


def _returning(change: Placed) -> list[_Pair]:
    old, new = change.value, change.slot.raw
    pairs = [_Pair(None, old, new)]
    return pairs if function_in(old) is old else [*pairs, _Pair(None, function_in(old), function_in(new))]


def _is_held(pair: _Pair) -> bool:
    """Returns whether anybody but the change (or the descriptor around it) and the pair holds a replacement."""
    return sys.getrefcount(pair.old) > 3


def _pairs(record: Record) -> list[_Pair]:
    change = record.change
    if not isinstance(change, Placed) or not change.held or not change.slot.own:
        return []
    imported = record.imported
    if imported is None:
        home = getattr(function_in(change.slot.raw), "__module__", None)
        imported = len(record.entry.path) == 1 and home not in (None, record.entry.module)
    if imported and record.entry.aliases != "report":
        return []
    old, new = change.slot.raw, change.value
    if function_in(old) is old:
        return [_Pair(record, old, new)]
    return [_Pair(record, old, new), _Pair(record, function_in(old), function_in(new))]


_Finding = tuple[_Pair, list[Holder], int]


def _found(pairs: list[_Pair]) -> list[_Finding]:
    """Returns each pair with the holders of its old object, and how many references nobody accounts for."""
    if not pairs:
        return []
    control = _Pair(None, lambda: None, None)
    objects = [pair.old for pair in (*pairs, control)]
    counts = [sys.getrefcount(thing) for thing in objects]
    parts = own_parts()

    def own(referrer: Any) -> bool:
        return isinstance(referrer, (_Pair, Slot, Placed, Record, Op)) or id(referrer) in parts

    shallow = holders.swept(objects, classes=False)
    deep = holders.Deep(objects, own)
    del objects[:]
    _, seen = deep.holders(control.old)
    overhead = counts[-1] - seen
    result = []
    for pair, count in zip(pairs, counts, strict=False):
        found, seen = deep.holders(pair.old)
        unseen = 0 if isinstance(pair.old, type) else count - seen - overhead
        result.append((pair, [*shallow[id(pair.old)], *found], unseen))
    return result


def _treated(pair: _Pair, found: list[Holder], unseen: int) -> list[Undo]:
    record = pair.record
    if record is None or not (found or unseen):
        return []
    entry = record.entry
    fixed = [holder for holder in found if holder.rebind is None]
    if entry.aliases == "report":
        record.detail = "; ".join([f"still held by {_shown(holder, entry)}" for holder in found])
        return []
    if entry.aliases == "fail" and found:
        raise _refused(record, _shown(found[0], entry))
    if fixed:
        raise _refused(record, _shown(fixed[0], entry))
    if unseen > 0:
        raise _refused(record, capture.local_variable(pair.old) or f"{unseen} unknown (a local variable, or C)")
    record.detail = "; ".join(f"rebound {holder.where}" for holder in found)
    return [holder.rebind(pair.new) for holder in found if holder.rebind is not None]


def _shown(holder: Holder, entry: Entry) -> str:
    line = capture.line_of(holder.module, holder.name, entry.path[-1]) if holder.module else None
    return f"{holder.where} ({line})" if line else holder.where


def _refused(record: Record, holder: str) -> PatchError:
    entry = record.entry
    fact = f"{entry.target} is still held by {holder}"
    if not record.late:
        remedy = "Patch that holder instead, or write 'aliases: report'"
        return AliasError(entry.place, fact, remedy, patch=entry.id, target=entry.target)
    importer = capture.importer(entry.module)
    fact = f"{entry.module} was imported before its patch{f' ({importer})' if importer else ''}, and {fact}"
    remedy = "Import it inside 'with patch.applied(...)'"
    return TooLateError(entry.place, fact, remedy, patch=entry.id, target=entry.target)
