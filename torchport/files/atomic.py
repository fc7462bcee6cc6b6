"""Writes files whole or not at all, keeps a folder for one run at a time, and removes what killed processes have left.

Everything is written under a temporary name, flushed to the disk, and renamed: a file that has its name is whole, at
every moment and after a power cut.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchport.errors import OutputError
from torchport.progress import log

TEMPORARY = ".part-"
"""The prefix of a half-written file's name."""
SCRATCH = "torchport-scratch-"
"""The prefix of the name of a folder of temporary files."""
_HELD_ELSEWHERE = (errno.EWOULDBLOCK, errno.EACCES)
_NO_LOCKS_HERE = (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


@contextlib.contextmanager
def writing(file: Path) -> Iterator[Path]:
    """Yields the path of a temporary file beside `file`; at the end of the context flushes the temporary file to the
    disk and renames it to `file`, or removes it at an exception.
    """
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=TEMPORARY, suffix=file.suffix, dir=file.parent)
        os.close(handle)
        temporary = Path(name)
        yield temporary
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())
        # mkstemp makes files that only their owner may read, and artefacts are shared. The umask is read by setting it.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(file)
        # The folder is flushed, too. Else a power cut may undo this renaming, and leave that of a file written later.
        handle = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise _unwritable(file, error) from error
    finally:
        if temporary is not None:
            # If this fails, the writing has failed, too, and the error of the writing matters more.
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def _unwritable(file: Path, error: OSError) -> OutputError:
    """Returns the refusal of a file or folder that could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutputError(str(file), "The disk is full", "Free some space, or choose another folder with --out")
    if error.errno == errno.EEXIST or (file.is_file() and error.errno == errno.ENOTDIR):
        fact = "It is a file, not a folder" if file.exists() else "It is a link to nothing"
        return OutputError(str(file), fact, "Choose another folder with --out")
    reason = error.strerror or " ".join(str(error).split())
    return OutputError(str(file), f"It cannot be written: {reason}", "Choose another folder with --out")


def write_json(file: Path, data: Any) -> None:
    """Writes data as indented JSON, whole or not at all."""
    write_text(file, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def write_text(file: Path, text: str) -> None:
    """Writes a text in UTF-8, whole or not at all."""
    write_bytes(file, text.encode())


def write_bytes(file: Path, data: bytes) -> None:
    """Writes bytes, whole or not at all: see `writing`."""
    with writing(file) as temporary:
        temporary.write_bytes(data)


def remove(*files: Path) -> None:
    """Removes files, in this order; a file that is absent is no error."""
    for file in files:
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(file, error) from error


def make_folder(folder: Path) -> None:
    """Makes a folder and those above; raises if no file can be written to the folder, before hours are spent."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\0")
    except OSError as error:
        raise _unwritable(folder, error) from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks a folder for this process while the context lasts, and removes half-written files of dead runs. Raises if
    another process has the lock. The kernel releases the lock however the process ends.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        try:
            is_locked = _flock(handle)  # the folder itself: `filelock` would leave a file
        except OSError as error:
            if error.errno in _HELD_ELSEWHERE:
                fact, remedy = "Another run writes to this folder", "Wait until it has ended, or choose another --out"
                raise OutputError(str(folder), fact, remedy, is_locked=True) from error
            raise _unwritable(folder, error) from error
        if is_locked:
            remove(*sorted(file for file in folder.glob(f"{TEMPORARY}*") if not file.is_dir()))
        else:
            log.warning("%s cannot be locked: do not start a second run with this --out", folder)
        yield
    finally:
        os.close(handle)


def _flock(handle: int) -> bool:
    """Locks an open folder, or raises if another process has the lock; returns False on a file system without locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS_HERE:
            return False
        raise
    return True


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Yields an empty folder for temporary files, and removes it at the end; first removes those of dead processes."""
    remove_abandoned()
    try:
        folder, handle = _new_scratch()
    except OSError as error:
        fact = f"No temporary folder can be made: {error.strerror}"
        raise OutputError("TMPDIR", fact, "Free some space there, or name another folder with TMPDIR") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _new_scratch() -> tuple[Path, int]:
    """Returns a new folder for temporary files, and the open handle that has its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=SCRATCH))
        # Until it is locked, another process may take the folder for abandoned and remove it: then we make another.
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            handle = os.open(folder, os.O_RDONLY)
            try:
                _flock(handle)
                # Raises if the folder was removed before the lock.
                folder.stat()
            except OSError:
                os.close(handle)
                raise
            return folder, handle


def remove_abandoned() -> None:
    """Removes this user's folders of temporary files whose processes are gone. The lock on its folder shows that a
    process lives; its id would not, since another process may have the same id by now.
    """
    folders: list[Path] = []
    with contextlib.suppress(OSError):  # without a folder for temporary files there is nothing to remove
        folders = list(Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"))
    for folder in folders:
        with contextlib.suppress(OSError):  # it is another user's, a living process's, a link, or gone by now
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(handle).st_uid == os.geteuid() and _flock(handle):
                    shutil.rmtree(folder)
            finally:
                os.close(handle)
