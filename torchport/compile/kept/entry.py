"""One program on disk: a folder with the executable, and a manifest that says what it is and what its trace called.

    programs/transformer-4f1c.../manifest.json
    programs/transformer-4f1c.../executable

The executable is in JAX's own format, which is a pickle: it is read only from files that are this user's alone, and
only after its sha256 has been compared. The tree of the arguments is not stored: the key names every argument.

Entries that have the same executable are links to one file. There are several of it after edits of the sources that
left the traced program as it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pydantic

from torchport.compile.kept.key import digest
from torchport.files import cache

MANIFEST, EXECUTABLE = "manifest.json", "executable"
KEPT = 16
"""Executables of one component; a program for another size or mesh is another executable."""
ENTRIES = 64
"""Entries of one component: after an edit an executable has another entry."""
ABANDONED = 24 * 3600
"""Seconds after which a half-written entry belongs to a run that is no more."""


class DamagedError(Exception):
    """An entry that is not what it was written as."""


class EntryManifest(pydantic.BaseModel):
    """What is beside an executable.

    Attributes:
        schema_version: `key.SCHEMA`.
        key: The parts of its key.
        created: When it was traced.
        executable: What determines its executable: `key.of_executable`.
        outputs: The tree of its outputs; see `as_json`.
        trace: The patches that it was traced under, with the calls of its trace alone: `patch.Trace.as_json`.
        size: Bytes of the executable.
        sha256: Of the executable.
    """

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    schema_version: int
    key: dict[str, Any]
    created: str
    executable: str
    outputs: Any
    trace: dict[str, Any]
    size: int
    sha256: str


def as_json(tree: Any) -> Any:
    """Returns a tree of tuples, lists and dicts as JSON has it: beside a container's items the name of its type."""
    if isinstance(tree, dict):
        return {"dict": {name: as_json(item) for name, item in tree.items()}}
    if isinstance(tree, tuple | list):
        return {type(tree).__name__: [as_json(item) for item in tree]}
    return None if tree is None else "array"


def from_json(data: Any) -> Any:
    """Returns the tree that `as_json` was given, with "array" for each leaf.

    Raises:
        DamagedError: It is no such tree.
    """
    if data is None or data == "array":
        return data
    match data:
        case {"dict": dict(items)}:
            return {name: from_json(item) for name, item in items.items()}
        case {"tuple": list(items)}:
            return tuple(map(from_json, items))
        case {"list": list(items)}:
            return list(map(from_json, items))
    raise DamagedError("its manifest has no tree of outputs")


def folder(root: Path, component: str, key: dict[str, Any]) -> Path:
    """Returns where the entry of a key lies."""
    return root / f"{component}-{digest(key)[:32]}"


def read(path: Path, key: dict[str, Any]) -> tuple[EntryManifest, bytes] | None:
    """Returns an entry's manifest and executable, or None if there is no such entry.

    Raises:
        BadValueError: Somebody else owns it or can write to it.
        DamagedError: It is not whole, not what its manifest says, or another key's.
    """
    try:
        cache.check_trusted(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    manifest = read_manifest(path)
    if manifest.key != json.loads(json.dumps(key)):
        raise DamagedError("its manifest has another key than its name")
    data = _read(path / EXECUTABLE)
    if len(data) != manifest.size:
        raise DamagedError(f"its executable has {len(data)} bytes, and was written with {manifest.size}")
    if hashlib.sha256(data).hexdigest() != manifest.sha256:
        raise DamagedError("the sha256 of its executable is not the one in its manifest")
    return manifest, data


def read_manifest(path: Path) -> EntryManifest:
    """Returns an entry's manifest.

    Raises:
        BadValueError: Somebody else owns it or can write to it.
        DamagedError: It is missing, or is no manifest.
    """
    try:
        return EntryManifest.model_validate(json.loads(_read(path / MANIFEST)))
    except (ValueError, RecursionError) as error:  # pydantic's ValidationError is a ValueError
        raise DamagedError("its manifest cannot be read") from error


def _read(file: Path) -> bytes:
    """Returns the bytes of a file. It checks the owner of the open file, so that nobody can exchange it in between."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise DamagedError(f"its file '{file.name}' cannot be opened: {error.strerror}") from error
    with os.fdopen(handle, "rb") as stream:
        cache.check_owner(file, os.fstat(handle))
        return stream.read()


def write(path: Path, manifest: EntryManifest, data: bytes, same: Path | None = None) -> None:
    """Writes and flushes an entry beside its place, then renames it: an entry with its name is whole.

    Args:
        path: Its place.
        manifest: What it is.
        data: The executable.
        same: An entry that has this executable.

    Raises:
        OSError: It cannot be written, most often since the disk is full; nothing is left behind.
    """
    cache.remove_leftovers(path.parent, ".*")
    work = Path(tempfile.mkdtemp(prefix=".", dir=path.parent))
    try:
        if same is None or not _linked(same / EXECUTABLE, work / EXECUTABLE):
            _put(work / EXECUTABLE, data)
        _put(work / MANIFEST, (manifest.model_dump_json(indent=1) + "\n").encode())
        remove(path)
        try:
            work.rename(path)
        except OSError:
            # Another run was faster; what it wrote is the same program.
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _linked(file: Path, other: Path) -> bool:
    """Links a file, and returns whether it could: some file systems have no links, and another run may remove it."""
    try:
        os.link(file, other)
    except OSError:
        return False
    return True


def _put(file: Path, data: bytes) -> None:
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def remove(path: Path) -> None:
    """Removes an entry, if it is there. It renames the entry first, so that no run reads half of it."""
    if not path.is_dir():
        return
    away = Path(tempfile.mkdtemp(prefix=".", dir=path.parent))
    path.rename(away / path.name)
    shutil.rmtree(away)


def of_component(root: Path, component: str) -> list[Path]:
    """Returns the entries of a component, the one that was used last first."""
    times: dict[Path, int] = {}
    for path in root.glob(f"{component}-*"):
        with contextlib.suppress(FileNotFoundError):  # another run has just replaced it
            times[path] = path.stat().st_mtime_ns
    return sorted(times, key=lambda path: times[path], reverse=True)


def prune(root: Path, component: str) -> None:
    """Removes what was left half, and the entries of a component that were used least lately.

    Those stay that have the `KEPT` executables that were used last, and of them the last `ENTRIES`.
    """
    files: set[int] = set()
    for number, path in enumerate(of_component(root, component)):
        with contextlib.suppress(FileNotFoundError):  # another run has just removed it
            files.add((path / EXECUTABLE).stat().st_ino)
        if len(files) > KEPT or number >= ENTRIES:
            remove(path)
    for path in root.glob(".*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > ABANDONED:
                shutil.rmtree(path)
