"""Reads the files of entries. Nothing that they name is run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from torchport.config import Document, read_document, validated
from torchport.errors import (
    BadValueError,
    ConflictError,
    UnknownKeyError,
    UnknownNameError,
    WrongTypeError,
    nearest,
)
from torchport.files.folder import has_folder, inside
from torchport.patch.declared.entry import Entry, mistake

LOCK = "lock.yaml"

# Keys that entries once had, each with what to do instead.
_REMOVED = {
    "aliases": "Remove it: every holder of the original is rebound, or refused by name",
    "optional": "Remove it, and widen 'fits' to the versions that the patch was tried with",
    "value": "Replace or wrap the function that reads the constant, or rewrite the statement",
}


def read(folder: Path | str, names: Sequence[str]) -> list[Entry]:
    """Returns the entries of the files that are named, in their order.

    Args:
        folder: A folder of patches, one folder per upstream in it.
        names: `upstream` for every file of that folder, `upstream/file` for one file.

    Raises:
        UnknownNameError: No such folder or file.
        BadValueError: A name or link that leads out of the folder, a file that would never be read, or fields that
            contradict each other.
        ConflictError: Two entries with one id.
        ConfigError: Anything else that is wrong in a file, with its line.
    """
    root = Path(folder)
    entries = [entry for file in _files(root, names) for entry in read_file(root, file)]
    seen: dict[str, Entry] = {}
    for entry in entries:
        if entry.id in seen:
            fact = f"The id '{entry.id}' is also at {seen[entry.id].place}"
            raise ConflictError(entry.place, fact, "Rename one of the two", patches=[entry.id])
        seen[entry.id] = entry
    return entries


def upstreams(folder: Path | str) -> list[str]:
    """Returns the names of the upstreams that a folder of patches has.

    Raises:
        BadValueError: A folder of it could never be named.
    """
    root = Path(folder)
    names = sorted(f.name for f in root.iterdir() if f.is_dir() and not f.name.startswith((".", "_")))
    for name in names:
        if not _is_word(name):
            plain = re.sub(r"\W", "_", name, flags=re.ASCII)
            remedy = f"Rename the folder to {plain if plain[0].isalpha() else f'up_{plain}'}"
            raise BadValueError(f"{root.name}/{name}", f"'{name}' is no name of an upstream", remedy)
    return names


def _is_word(name: str) -> bool:
    return name.isidentifier() and name.isascii()


def _files(root: Path, names: Sequence[str]) -> list[Path]:
    if not root.is_dir():
        raise UnknownNameError(str(root), "No such folder of patches", "Give the folder that holds them")
    files: dict[Path, None] = {}
    for name in names:
        files.update(dict.fromkeys(_files_of(root, name)))
    return list(files)


def _files_of(root: Path, name: str) -> list[Path]:
    """Returns the files of one name. A name is one or two plain words, so that it cannot leave the folder."""
    upstream, slash, file = name.partition("/")
    words = (upstream, file) if slash else (upstream,)
    if not all(map(_is_word, words)):
        if upstream in {f.name for f in root.iterdir()}:
            upstreams(root)  # says what to rename it to
        raise BadValueError(name, f"'{name}' is no name of patches", "Write upstream or upstream/file")
    folder = root / upstream
    if not has_folder(folder):
        raise UnknownNameError(str(root), f"No patches for '{upstream}'", nearest(upstream, upstreams(root)))
    _check_all_read(root, inside(root, folder))
    known = {path.stem: path for path in sorted(folder.glob("*.yaml")) if path.name != LOCK}
    if slash and file not in known:
        raise UnknownNameError(str(root), f"No patches '{name}'", nearest(file, known))
    return [inside(root, path) for path in ([known[file]] if slash else known.values())]


def _check_all_read(root: Path, folder: Path) -> None:
    """Refuses YAML in an upstream's folder that would never be read: nobody would miss it."""
    for path in sorted(folder.rglob("*")):
        steps = path.relative_to(folder).parts
        if path.suffix.lower() not in (".yaml", ".yml") or steps[0].startswith((".", "_")):
            continue
        if path.is_dir():
            remedy = "It is a folder: rename it, or put a file in its place"
        elif len(steps) > 1:
            remedy = f"Move it up into {root.name}/{folder.name}"
        elif path.suffix != ".yaml":
            remedy = f"Rename it to {path.stem}.yaml"
        else:
            continue
        raise BadValueError(f"{root.name}/{path.relative_to(root)}", f"'{path.name}' would never be read", remedy)


def read_file(root: Path, file: Path) -> list[Entry]:
    """Returns the entries of one file. See `read`."""
    document = read_document(file, f"{root.name}/{file.relative_to(root)}")
    if document.data is None:
        return []
    if not isinstance(document.data, list):
        kind = type(document.data).__name__
        raise WrongTypeError(document.place(), f"The file is a {kind}", "Write a list of entries, each '- id: ...'")
    return [_entry(_item(document, index), file.parent) for index in range(len(document.data))]


def _item(document: Document, index: int) -> Document:
    """Returns one item of a list as a document of its own, with the lines that it has in the file."""
    lines = {path[1:]: line for path, line in document.lines.items() if path[:1] == (index,)}
    return Document(document.file, document.data[index], lines)


def _entry(document: Document, folder: Path) -> Entry:
    _check_removed(document)
    entry = validated(Entry, document)
    first = mistake(entry) or _range_mistake(entry)
    if first:
        location, fact, remedy = first
        raise BadValueError(document.place(location), fact, remedy, patch=entry.id)
    entry._place = document.place()
    entry._folder = folder
    return entry


def _check_removed(document: Document) -> None:
    """Refuses a key that entries no longer have."""
    for key in document.data if isinstance(document.data, dict) else ():
        if key in _REMOVED:
            raise UnknownKeyError(document.place((key,)), f"The key '{key}' was removed", _REMOVED[key], key=key)


def _range_mistake(entry: Entry) -> Any:
    ranges = [(("fits", name), text) for name, text in entry.fits.items()]
    ranges += [(("needed", name), text) for name, text in (entry.needed or {}).items() if name != "probe"]
    for location, text in ranges:
        try:
            SpecifierSet("" if text == "*" else text)
        except InvalidSpecifier:
            return location, f"'{'.'.join(location)}' is {text!r}", 'Write a PEP 440 range, as ">=2.13", or "*"'
    return None
