"""`torchport patches list|show|lock|schema`: what the shipped, or a third party's, patches are; as data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchport import patch
from torchport.errors import UnknownNameError, nearest
from torchport.patch.declared import versions
from torchport.patch.source import drift


def entries_of(folder: Path, names: Sequence[str] = ()) -> list[patch.Entry]:
    """Returns the entries of the upstreams or files that are named; of all upstreams if none is."""
    return patch.read(folder, list(names) or patch.upstreams(folder))


def listed(folder: Path, names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Returns one row per entry: what it changes, what it promises, and whether it would be applied here."""
    return [_row(entry) for entry in entries_of(folder, names)]


def _row(entry: patch.Entry) -> dict[str, Any]:
    return {
        "id": entry.id,
        "kind": entry.kind,
        "target": entry.target,
        "equivalence": entry.equivalence.written(),
        "plumbing": entry.plumbing,
        "must_be_called": list(entry.must_be_called),
        "locked": entry.target in drift.read_lock(entry.folder),
        "place": entry.place,
    }


def shown(folder: Path, key: str) -> dict[str, Any]:
    """Returns everything about one entry.

    Raises:
        UnknownNameError: No entry has that id.
    """
    versions.installed.cache_clear()
    entries = {entry.id: entry for entry in entries_of(folder)}
    if key not in entries:
        raise UnknownNameError(str(folder), f"No patch '{key}'", nearest(key, entries))
    entry = entries[key]
    fields = entry.model_dump(mode="json", exclude_defaults=True)
    found = {name: versions.installed(name) for name in entry.fits}
    lock = drift.read_lock(entry.folder).get(entry.target)
    rows = [row.versions for row in lock.rows] if lock else []
    written = {"equivalence": entry.equivalence.written(), "installed": found, "locked_at": rows}
    return {**fields, **written, "place": entry.place}


def locked(
    folder: Path, names: Sequence[str] = (), check: bool = False, tried: Callable[[Sequence[str]], None] | None = None
) -> list[str]:
    """Locks the targets of whole upstreams as reviewed; returns one line per target that is new, changed or dropped.

    Args:
        folder: The folder of patches.
        names: Upstreams; all of them if none is named. Part of one cannot be locked alone.
        check: Only tell what would change.
        tried: Refuses upstreams, by name, on which their patches cannot be applied; asked before anything is written.

    Raises:
        TargetError: An upstream is not installed.
    """
    versions.installed.cache_clear()  # asked now, not when this process began
    upstreams = sorted({name.partition("/")[0] for name in names})
    entries = entries_of(folder, upstreams)
    lines = drift.lock(folder, entries, write=False)
    if lines and not check:
        if tried is not None:
            tried(upstreams or patch.upstreams(folder))
        drift.lock(folder, entries)
    return lines


def schema() -> dict[str, Any]:
    """Returns the JSON Schema of a file of entries."""
    return patch.schema()
