"""After a change, everybody who still holds the original: rebound, reported or refused; and back again at the end.

A function's reference count says in a microsecond whether anybody else holds it. Only then are holders looked for.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import weakref
from collections.abc import Sequence
from typing import Any

from torchport.errors import AliasError, PatchError, TooLateError
from torchport.patch.declared.entry import Entry
from torchport.patch.ledger import Op, Record
from torchport.patch.live import holders
from torchport.patch.live.change import Placed
from torchport.patch.live.counted import is_ours, own_parts
from torchport.patch.live.holders import Holder, Undo
from torchport.patch.live.naming import expression
from torchport.patch.live.target import Slot, function_in
from torchport.patch.source import capture


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
        if any(unseen or any(_may_be_garbage(holder) for holder in found) for _, found, unseen in findings):
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


def _may_be_garbage(holder: Holder) -> bool:
    """Returns whether a holder is no namespace: a closure of an earlier call may only wait to be collected."""
    return holder.rebind is None or holder.container is not None


def give_back(changes: Sequence[Placed]) -> None:
    """Makes whoever captured a replacement while it was in force hold the original again.

    Who cannot be rebound (a local variable, say) holds a function that falls through to the original.
    """
    held = [pair for change in changes for pair in _returning(change)]
    for pair, found, _ in _found(held):
        for holder in found:
            if holder.rebind is not None:
                holder.rebind(pair.new)


def _returning(change: Placed) -> list[_Pair]:
    pairs = _both(None, change.value, change.slot.raw)
    held = [pair for pair in pairs if _is_held(pair)]
    return held + [weak for pair in pairs if _is_held_weakly(pair) for weak in _weak(pair)]


def _is_held(pair: _Pair) -> bool:
    """Returns whether anybody but the change (or the descriptor around it) and the pair holds a replacement."""
    return sys.getrefcount(pair.old) > 3


def _is_held_weakly(pair: _Pair) -> bool:
    return weakref.getweakrefcount(pair.old) > is_ours(pair.old)  # of ours, `counted` has one itself


def _both(record: Record | None, old: Any, new: Any) -> list[_Pair]:
    """Returns the pair of two objects, and that of the functions in them if they are descriptors."""
    inner = function_in(old)
    pairs = [_Pair(record, old, new)]
    return pairs if inner is old else [*pairs, _Pair(record, inner, function_in(new))]


def _weak(pair: _Pair) -> list[_Pair]:
    """Returns a pair for each weak reference to a function: they stand in names and containers like anything else."""
    if isinstance(pair.old, type):  # its bases, and the caches of `isinstance`, refer to it weakly
        return []
    made = [(ref, holders.referring(ref, pair.new)) for ref in weakref.getweakrefs(pair.old)]
    for ref, new in made:
        if new is None and pair.record is not None and pair.record.entry.aliases != "report":
            raise _refused(pair.record, f"{expression(ref) or 'an unknown holder'}, a {type(ref).__name__}")
    return [_Pair(pair.record, ref, new) for ref, new in made if new is not None]


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
    pairs = _both(record, change.slot.raw, change.value)
    return pairs + [weak for pair in pairs for weak in _weak(pair)]


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
        _note(record, [f"still held by {_shown(holder, entry)}" for holder in found])
        return []
    if entry.aliases == "fail" and found:
        raise _refused(record, _shown(found[0], entry))
    if fixed:
        raise _refused(record, _shown(fixed[0], entry))
    if unseen > 0:
        raise _refused(record, capture.local_variable(pair.old) or f"{unseen} unknown (a local variable, or C)")
    _note(record, [f"rebound {holder.where}" for holder in found])
    return [holder.rebind(pair.new) for holder in found if holder.rebind is not None]


def _note(record: Record, lines: list[str]) -> None:
    """Adds to a record's detail what became of the holders of one of its objects."""
    record.detail = "; ".join([*filter(None, [record.detail]), *lines])


def _shown(holder: Holder, entry: Entry) -> str:
    line = capture.line_of(holder.module, holder.name, entry.path[-1]) if holder.module else None
    name = None if holder.container is None else expression(holder.container)
    where = holder.where if name is None else f"{name}, a {type(holder.container).__name__}"
    return f"{where} ({line})" if line else where


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
