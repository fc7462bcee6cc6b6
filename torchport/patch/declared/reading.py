"""Reads the files of entries, of which nothing is run, and the locks: the sources that patches were reviewed with."""

from __future__ import annotations

import filecmp
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pydantic

from torchport.config import Document, Frozen, read_document, validated
from torchport.errors import (
    BadValueError,
    ConflictError,
    TakenNameError,
    UnknownKeyError,
    UnknownNameError,
    WrongTypeError,
    nearest,
)
from torchport.files.folder import as_named, has_file, has_folder, inside
from torchport.patch.declared import Entry, TargetName, mistake

LOCK = "lock.yaml"

# Keys that entries once had, each with what to do instead.
_REMOVED = {
    "aliases": "Remove it: every holder of the original is rebound, or refused by name",
    "optional": "Remove it, and widen 'fits' to the versions that the patch was tried with",
    "value": "Replace or wrap the function that reads the constant, or rewrite the statement",
}


Folders = Path | str | Sequence[Path]
"""A folder of patches, or several: those of packs on top of each other, from the top."""


def read(folders: Folders, names: Sequence[str], home: Path | None = None) -> list[Entry]:
    """Returns the entries of the files that are named, in their order.

    Args:
        folders: A folder of patches, one folder per upstream in it; or several, from the top.
        names: `upstream` for every file of that folder, `upstream/file` for one file.
        home: The folder of `folders` in which, and in those under it, the names are looked up; by default in all.
            Of the folders above it only the entries are used that override a patch.
    """
    stack = stack_of(folders)
    by_id: dict[str, Entry] = {}
    for file in _files(stack if home is None else stack[stack.index(home) :], names):
        for entry in read_file(file):
            upper = entry
            if entry.id in by_id:
                # `patch.folder.parent` is the entry's folder of `stack`, whose first folder is the highest.
                lower, upper = sorted((by_id[entry.id], entry), key=lambda patch: -stack.index(patch.folder.parent))
                _check_double(upper, lower)
            by_id[entry.id] = upper
    for entry in _overriding(stack):
        if entry.id in by_id and stack.index(by_id[entry.id].folder.parent) > stack.index(entry.folder.parent):
            by_id[entry.id] = entry
    return list(by_id.values())


def stack_of(folders: Folders) -> list[Path]:
    """Returns a folder of patches, or several, as a list of paths from the top."""
    return [Path(folders)] if isinstance(folders, str | Path) else list(folders)


def _check_double(entry: Entry, other: Entry) -> None:
    """Refuses two entries with one id, unless `entry` is of a higher folder, and overrides `other` or is its copy."""
    fact = f"The id '{entry.id}' is also at {other.place}"
    if entry.folder.parent == other.folder.parent:
        raise ConflictError(entry.place, fact, "Rename one of the two", patches=[entry.id])
    if not entry.overrides and not _is_copy(entry, other):
        remedy = "Rename it, or write 'overrides: true' in it to take the other one's place"
        raise TakenNameError(entry.place, fact, remedy, patch=entry.id)


def _is_copy(entry: Entry, other: Entry) -> bool:
    if entry.model_dump() != other.model_dump():
        return False
    files = [patch.folder / patch.reference.partition(":")[0] for patch in (entry, other) if patch.reference]
    return not files or (all(map(has_file, files)) and filecmp.cmp(files[0], files[1], shallow=False))


def _overriding(stack: Sequence[Path]) -> list[Entry]:
    """Returns the entries that override a lower folder's, the highest last; refuses an entry that overrides nothing."""
    overriding: list[Entry] = []
    for level in reversed(range(len(stack) - 1)):  # the lowest folder has none to override
        upper = [entry for entry in _all_entries(stack[level]) if entry.overrides]
        if not upper:
            continue
        ids = {entry.id for root in stack[level + 1 :] for entry in _all_entries(root)}
        for entry in upper:
            if entry.id not in ids:
                fact = f"'{entry.id}' overrides nothing: no pack under it has a patch with this id"
                raise BadValueError(entry.place, fact, nearest(entry.id, sorted(ids)), patch=entry.id)
        overriding += upper
    return overriding


def _all_entries(root: Path) -> list[Entry]:
    names = _upstreams(root) if has_folder(root) else []
    return [entry for name in names for file in _files_of(root, name) for entry in read_file(file)]


def upstreams(folders: Folders) -> list[str]:
    return sorted({name for root in stack_of(folders) if root.is_dir() for name in _upstreams(root)})


def _upstreams(root: Path) -> list[str]:
    """Returns the names of the upstreams with a folder in `root`; refuses a name that is no Python identifier."""
    names = sorted(f.name for f in root.iterdir() if f.is_dir() and not f.name.startswith((".", "_")))
    for name in names:
        if not (name.isidentifier() and name.isascii()):
            plain = re.sub(r"\W", "_", name, flags=re.ASCII)
            remedy = f"Rename the folder to {plain if plain[0].isalpha() else f'up_{plain}'}"
            raise BadValueError(as_named(root / name), f"'{name}' is no name of an upstream", remedy)
    return names


def _files(stack: Sequence[Path], names: Sequence[str]) -> list[Path]:
    """Returns the YAML files of names (`upstream`, `upstream/file`), the lowest folder first; refuses unknown names."""
    roots = [root for root in stack if root.is_dir()]
    if not roots:
        shown = ", ".join(map(as_named, stack))
        raise UnknownNameError(shown, "No such folder of patches", "Give the folder that holds them")
    files: dict[Path, None] = {}
    for name in names:
        chosen = [file for root in reversed(roots) for file in _files_of(root, name)]
        upstream, slash, file = name.partition("/")
        place, has_upstream = ", ".join(map(as_named, roots)), any(has_folder(root / upstream) for root in roots)
        if not chosen and not has_upstream:
            raise UnknownNameError(place, f"No folder '{upstream}' of patches", nearest(upstream, upstreams(roots)))
        if not chosen and slash:
            known = sorted({path.stem for root in roots for path in _yaml_files(root / upstream)})
            raise UnknownNameError(place, f"No patches '{name}'", nearest(file, known))
        files.update(dict.fromkeys(chosen))
    return list(files)


def _yaml_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*.yaml")) if path.name != LOCK]


def _files_of(root: Path, name: str) -> list[Path]:
    """Returns the YAML files in `root` of `upstream` or `upstream/file`; refuses a name or link that leaves `root`."""
    upstream, slash, file = name.partition("/")
    if not all(word.isidentifier() and word.isascii() for word in name.split("/", 1)):
        if upstream in {f.name for f in root.iterdir()}:
            # Raises the error that says how to rename the folder.
            _upstreams(root)
        raise BadValueError(name, f"'{name}' is no name of patches", "Write upstream or upstream/file")
    folder = root / upstream
    if not has_folder(folder):
        return []
    _check_all_read(root, inside(root, folder))
    return [inside(root, path) for path in _yaml_files(folder) if not slash or path.stem == file]


def _check_all_read(root: Path, folder: Path) -> None:
    """Refuses YAML in an upstream's folder that would never be read: nobody would notice."""
    for path in sorted(folder.rglob("*")):
        steps = path.relative_to(folder).parts
        if path.suffix.lower() not in (".yaml", ".yml") or steps[0].startswith((".", "_")):
            continue
        if path.is_dir():
            remedy = "It is a folder: rename it, or put a file in its place"
        elif len(steps) > 1:
            remedy = f"Move it up into {as_named(folder)}"
        elif path.suffix != ".yaml":
            remedy = f"Rename it to {path.stem}.yaml"
        else:
            continue
        raise BadValueError(as_named(path), f"'{path.name}' would never be read", remedy)


def read_file(file: Path) -> list[Entry]:
    """Returns the entries of a YAML file, none of an empty file; raises if the file is no list of entries."""
    document = read_document(file, as_named(file))
    if document.data is None:
        return []
    if not isinstance(document.data, list):
        kind = type(document.data).__name__
        raise WrongTypeError(document.place(), f"The file is a {kind}", "Write a list of entries, each '- id: ...'")
    return [_entry(item, file.parent) for item in _items(document)]


def _items(document: Document) -> list[Document]:
    """Returns the items of a document that is a list, each as a document with the lines that it has in the file."""
    lines: dict[Any, dict[Any, int]] = {index: {} for index in range(len(document.data))}
    for path, line in document.lines.items():
        if path:
            lines[path[0]][path[1:]] = line
    return [Document(document.file, item, lines[index]) for index, item in enumerate(document.data)]


def _entry(document: Document, folder: Path) -> Entry:
    """Returns a document as an entry, with its place and folder; refuses a wrong field, and fields in contradiction."""
    for key in document.data if isinstance(document.data, dict) else ():
        if key in _REMOVED:
            raise UnknownKeyError(document.place((key,)), f"The key '{key}' was removed", _REMOVED[key], key=key)
    entry = validated(Entry, document)
    first = mistake(entry)
    if first:
        location, fact, remedy = first
        raise BadValueError(document.place(location), fact, remedy, patch=entry.id)
    entry._place = document.place()
    entry._folder = folder
    return entry


class LockRow(Frozen):
    """One known-good source of a target."""

    #: The distributions of `fits` that it was seen in. One that is not installed is "unknown", if there is no commit.
    versions: dict[str, str] = {}
    #: The commit that it was first seen at, in an upstream that is a checkout and no installed distribution.
    commit: str | None = pydantic.Field(default=None, pattern=r"^(?:[0-9a-f]{40}|[0-9a-f]{64})$")
    dirty: bool = False  #: Whether that checkout had changes of its own: then the commit does not have this source.
    signature: str | None = None
    tree: str  #: The hash of its syntax tree.
    #: The short hashes of its arguments and statements: they tell what changed, without upstream's code.
    statements: str = ""
    #: What the patch relies on, and all that this uses of its package: the short hash of each, by its name as
    #: `up.m:rotate_half`. In the file by module, the names in it with their hashes: `rotate_half:0c41d2aa`.
    relies_on: dict[str, str] = {}

    def seen_at(self) -> dict[str, Any]:
        """Returns where the source was seen: `{"diffusers": "0.36.0"}`, or `{"commit": "0f1e...", "dirty": True}`."""
        return {**self.versions, **self.model_dump(include={"commit", "dirty"}, exclude_defaults=True)}

    def seen_at_in_words(self) -> str:
        """Returns where the source was seen: `diffusers 0.36.0`, or `commit 0f1e2d3c4b5a with changes`."""
        words = [f"{name} {version}" for name, version in self.versions.items()]
        if self.commit is not None:
            words.append(f"commit {self.commit[:12]}{' with changes' if self.dirty else ''}")
        return ", ".join(words)


class Locked(Frozen):
    """A target's rows in a lock file: a row for each source of the target that was reviewed."""

    target: TargetName
    rows: list[LockRow] = pydantic.Field(min_length=1)


def read_lock(folder: Path) -> dict[str, Locked]:
    """Returns the lock of one upstream's folder, by target. It is empty if there is no lock file."""
    file = inside(folder.parent, folder / LOCK)
    shown = as_named(file)
    if not file.is_file():
        if file.is_symlink() or file.exists():
            # Raises: it is a folder, or a link to nothing.
            read_document(file, shown)
        return {}
    stat = file.stat()
    return _lock(file, shown, stat.st_mtime_ns, stat.st_size)


@functools.cache
def _lock(file: Path, shown: str, mtime_ns: int, size: int) -> dict[str, Locked]:
    """Returns a lock file's rows by target; time and size are part of the cache's key, so that a new file is read."""
    document = read_document(file, shown)
    if not isinstance(document.data, list):
        raise WrongTypeError(document.place(), "The lock is no list", "Write it with: torchport patches lock")
    locks: dict[str, Locked] = {}
    for locked in (validated(Locked, part) for part in _items(document)):
        # Of rows with the same tree, the file has the statements in the first alone.
        known = {row.tree: row.statements for row in reversed(locked.rows) if row.statements}
        rows = []
        for row in locked.rows:
            parts = ((module, part.rpartition(":")) for module, text in row.relies_on.items() for part in text.split())
            relies_on = {f"{module}:{path}": short_hash for module, (path, _, short_hash) in parts}
            rows.append(row.model_copy(update={"statements": known.get(row.tree, ""), "relies_on": relies_on}))
        locks[locked.target] = locked.model_copy(update={"rows": rows})
    return locks
