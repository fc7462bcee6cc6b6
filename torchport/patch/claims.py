"""Refuses two patches that claim one target, or a target and what contains it."""

from __future__ import annotations

from collections.abc import Sequence

from torchport.errors import ConflictError
from torchport.patch.entry import Entry


def check_claims(running: Sequence[Entry], fresh: Sequence[Entry]) -> None:
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
    if one.module != other.module or (one.kind == "op") != (other.kind == "op"):
        return False
    if one.kind == other.kind == "rewrite" and one.path == other.path:
        return False
    shorter = min(len(one.path), len(other.path))
    return one.path[:shorter] == other.path[:shorter]
