"""Audits who still holds an original after a change: each is rebound, or refused by name.

A function's reference count says in a microsecond whether anybody else holds it. Only then are holders looked for.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import types
import weakref
from collections.abc import Sequence
from typing import Any

from torchport.errors import AliasError, PatchError, TooLateError
from torchport.patch.declared.entry import Entry
from torchport.patch.ledger import Op, Record
from torchport.patch.live.change import Placed
from torchport.patch.live.counted import parts_of_stand_ins
from torchport.patch.live.holders import Holder, Referrers, names_of, weak_references
from torchport.patch.live.naming import expression
from torchport.patch.live.places import Place
from torchport.patch.live.registry import registry
from torchport.patch.live.target import Slot, function_in
from torchport.patch.source import capture


@dataclasses.dataclass(slots=True)
class _Pair:
    """An object, what takes its place, and the record that wants it."""

    record: Record | None
    old: Any
    new: Any


@dataclasses.dataclass(slots=True)
class Rebinding:
    """A place in which an original was exchanged for what takes its place."""

    place: Place
    old: Any
    new: Any

    def undo(self) -> None:
        self.place.exchange(self.new, self.old)


@dataclasses.dataclass(slots=True)
class _Audit:
    """Who holds the old object of a pair, and how many references nobody accounts for."""

    pair: _Pair
    holders: list[Holder]
    unknown: int


def repair(records: Sequence[Record]) -> list[Rebinding]:
    """Makes every holder of the originals hold what took their place.

    Args:
        records: Patches whose changes have just been made in one module.

    Returns:
        What was rebound, in that order.
    """
    pairs = [pair for record in records for pair in _pairs(record)]
    audits = _audits(pairs)
    if any(audit.unknown or any(map(_may_be_garbage, audit.holders)) for audit in audits):
        audits.clear()
        gc.collect()  # who is only waiting to be collected holds nothing
        audits = _audits(pairs)
    for audit in audits:
        _check_rebound(audit)
    return [rebinding for audit in audits for rebinding in _rebind(audit)]


def _may_be_garbage(holder: Holder) -> bool:
    """Returns whether a holder is no namespace: a closure of an earlier call may only wait to be collected."""
    return holder.place is None or holder.container is not None


def _check_rebound(audit: _Audit) -> None:
    record = audit.pair.record
    assert record is not None
    for holder in audit.holders:
        if holder.place is None:
            raise _refusal(record, _in_words(holder, record.entry))
    if audit.unknown > 0:
        variable = capture.local_variable(audit.pair.old)
        raise _refusal(record, variable or f"{audit.unknown} unknown (a local variable, or C)")


def _rebind(audit: _Audit) -> list[Rebinding]:
    """Makes an audit's holders hold the new object, and notes it in the record."""
    pair = audit.pair
    if pair.record is not None:
        notes = [f"rebound {holder.where}" for holder in audit.holders]
        pair.record.detail = "; ".join([*filter(None, [pair.record.detail]), *notes])
    places = [holder.place for holder in audit.holders if holder.place is not None]
    for place in places:
        place.exchange(pair.old, pair.new)
    return [Rebinding(place, pair.old, pair.new) for place in places]


def give_back(changes: Sequence[Placed]) -> None:
    """Makes whoever captured a replacement while it was in force hold the original again.

    Who cannot be rebound (a local variable, a closure) holds a function that falls through to the original. Who refers
    to it weakly keeps it as well.
    """
    pairs = [pair for change in changes for pair in _both(None, change.value, change.slot.raw)]
    # The change (or the descriptor around it) and the pair hold a replacement always.
    for audit in _audits([pair for pair in pairs if sys.getrefcount(pair.old) > 3]):
        _rebind(audit)
    registry.kept += [pair.old for pair in pairs if weak_references(pair.old)]


def _both(record: Record | None, old: Any, new: Any) -> list[_Pair]:
    """Returns the pair of two objects, and that of the functions in them if they are descriptors."""
    inner = function_in(old)
    pairs = [_Pair(record, old, new)]
    return pairs if inner is old else [*pairs, _Pair(record, inner, function_in(new))]


def _pairs(record: Record) -> list[_Pair]:
    """Returns the pairs of a record's change. None where its name alone is changed, or nobody else has the original."""
    change = record.change
    if not isinstance(change, Placed) or not change.held or not change.slot.in_holder:
        return []
    original, entry = function_in(change.slot.raw), record.entry
    home = getattr(original, "__module__", None)
    alone = record.imported
    if alone is None:
        alone = len(entry.path) == 1 and home not in (None, entry.module)
    if isinstance(original, types.BuiltinFunctionType) and home is not None:
        alone = alone or home.partition(".")[0] != entry.package  # `size = len` in a class is no alias of everybody's
    return [] if alone else _both(record, change.slot.raw, change.value)


def _audits(pairs: list[_Pair]) -> list[_Audit]:
    if not pairs:
        return []
    control = _Pair(None, lambda: None, None)
    objects = [pair.old for pair in (*pairs, control)]
    counts = [sys.getrefcount(thing) for thing in objects]
    parts = parts_of_stand_ins()

    def is_own(referrer: Any) -> bool:
        return id(referrer) in parts or isinstance(referrer, (_Pair, Slot, Placed, Record, Op, Rebinding))

    names = names_of(objects, classes=False)
    referrers = Referrers(objects, is_own)
    del objects[:]
    _, seen = referrers.holders(control.old)
    overhead = counts[-1] - seen
    audits = []
    for pair, count in zip(pairs, counts, strict=False):
        holders, seen = referrers.holders(pair.old)
        weak = weak_references(pair.old)
        unknown = 0 if isinstance(pair.old, type) else count - seen - overhead
        audits.append(_Audit(pair, [*names[id(pair.old)], *holders, *weak], unknown))
    return audits


def _in_words(holder: Holder, entry: Entry) -> str:
    """Returns a holder in words: the expression that leads to it, its kind, and its line."""
    line = capture.line_of(holder.module, holder.name, entry.path[-1]) if holder.module else None
    where = holder.where
    name = None if holder.container is None else expression(holder.container)
    if name is not None or isinstance(holder.container, weakref.ref):
        where = f"{name or where}, a {type(holder.container).__name__}"
    return f"{where} ({line})" if line else where


def _refusal(record: Record, holder: str) -> PatchError:
    entry = record.entry
    fact = f"{entry.target} is still held by {holder}"
    if not record.late:
        return AliasError(entry.place, fact, "Patch that holder instead", patch=entry.id, target=entry.target)
    importer = capture.importer(entry.module)
    fact = f"{entry.module} was imported before its patch{f' ({importer})' if importer else ''}, and {fact}"
    remedy = "Import it inside 'with patch.applied(...)'"
    return TooLateError(entry.place, fact, remedy, patch=entry.id, target=entry.target)
