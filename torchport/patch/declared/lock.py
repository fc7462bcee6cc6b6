"""The lock file of an upstream's folder, as data: the sources that its patches were reviewed with."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pydantic

from torchport.config import Document, Frozen, read_document, validated
from torchport.errors import WrongTypeError
from torchport.files.folder import as_named, inside
from torchport.patch.declared.entry import TargetName
from torchport.patch.declared.reading import LOCK


class LockRow(Frozen):
    """One known-good source of a target.

    Attributes:
        versions: The distributions of `fits` that it was seen in. One that is not installed is "unknown", if there is
            no commit either.
        commit: The commit that it was first seen at, in an upstream that is a checkout and no installed distribution.
        dirty: Whether that checkout had changes of its own: then the commit does not have this source.
        statements: The short hashes of its arguments and statements: they tell what changed, without upstream's code.
        relies_on: What the patch relies on, and all that this uses of its package: by module, each name in it
            with its short hash, as `rotate_half:0c41d2aa`.
    """

    versions: dict[str, str] = {}
    commit: str | None = pydantic.Field(default=None, pattern=r"^(?:[0-9a-f]{40}|[0-9a-f]{64})$")
    dirty: bool = False
    signature: str | None = None
    tree: str
    statements: str = ""
    relies_on: dict[str, str] = {}

    def seen_at(self) -> dict[str, Any]:
        return {**self.versions, **self.model_dump(include={"commit", "dirty"}, exclude_defaults=True)}

    def seen_at_in_words(self) -> str:
        words = [f"{name} {version}" for name, version in self.versions.items()]
        if self.commit is not None:
            words.append(f"commit {self.commit[:12]}{' with changes' if self.dirty else ''}")
        return ", ".join(words)


class Locked(Frozen):
    target: TargetName
    rows: list[LockRow] = pydantic.Field(min_length=1)


def read_lock(folder: Path) -> dict[str, Locked]:
    """Returns the lock of one upstream's folder, by target. It is empty if there is no lock file."""
    file = inside(folder.parent, folder / LOCK)
    shown = as_named(file)
    if not file.is_file():
        if file.is_symlink() or file.exists():
            read_document(file, shown)  # which refuses what is no file
        return {}
    stat = file.stat()
    return _lock(file, shown, stat.st_mtime_ns, stat.st_size)


@functools.cache
def _lock(file: Path, shown: str, mtime_ns: int, size: int) -> dict[str, Locked]:
    """Returns a lock, read once for each version of its file."""
    document = read_document(file, shown)
    if not isinstance(document.data, list):
        raise WrongTypeError(document.place(), "The lock is no list", "Write it with: torchport patches lock")
    parts = [
        Document(document.file, data, {p[1:]: n for p, n in document.lines.items() if p[:1] == (index,)})
        for index, data in enumerate(document.data)
    ]
    targets = [_with_statements(validated(Locked, part)) for part in parts]
    return {locked.target: locked for locked in targets}


def _with_statements(locked: Locked) -> Locked:
    """Returns a target with the statements that `_yaml` writes once where several rows differ in callees alone."""
    known = {row.tree: row.statements for row in reversed(locked.rows) if row.statements}
    rows = [row.model_copy(update={"statements": known.get(row.tree, "")}) for row in locked.rows]
    return locked.model_copy(update={"rows": rows})
