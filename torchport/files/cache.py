"""The cache folder, which holds what torchport can make again and JAX's own cache, and the check that it is safe.

A compiled program is code, and JAX loads it from the cache. Whoever can write to the folder can run code
as its reader. So we make the folder for its owner alone, and refuse one that others can write.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from torchport.errors import BadValueError, OutputError
from torchport.files.folder import expand_home

VARIABLE = "TORCHPORT_CACHE"
OFF = "off"
"""The value of `VARIABLE` that switches JAX's cache off; other caches then lie in their usual place."""

INSTEAD = f"name another folder with {VARIABLE}, or run with --no-cache"
ABANDONED = 24 * 3600
"""Seconds after which a half-written folder has no living writer: none needs more than minutes."""
_WRITABLE = stat.S_IWGRP | stat.S_IWOTH


def folder() -> Path:
    """Returns torchport's cache folder: `$TORCHPORT_CACHE`, `$XDG_CACHE_HOME/torchport`, or `~/.cache/torchport`."""
    value = os.environ.get(VARIABLE)
    if value and value != OFF:
        return expand_home(value).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchport"


def jax_folder() -> Path:
    """Returns the folder of JAX's own cache for this host's kind of CPU."""
    return folder() / "jax" / cpu_kind()


def is_off() -> bool:
    """Returns whether the environment switches JAX's cache off."""
    return os.environ.get(VARIABLE) == OFF


def make(path: Path) -> Path:
    """Makes a folder of the cache, and the missing folders above, for their owner alone (0700); returns the folder."""
    try:
        for part in (*reversed(path.parents), path):
            # With `parents=True`, mkdir would make the folders above by the umask, which may let the group write.
            if not part.is_dir():
                part.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        fact = f"The cache folder cannot be made: {error.strerror}"
        raise OutputError(str(error.filename or path), fact, f"Name another folder with {VARIABLE}") from error
    return path


def remove_leftovers(path: Path, pattern: str) -> None:
    """Removes folders in `path` that match a pattern and are older than `ABANDONED`: their writers have died."""
    for leftover in path.glob(pattern):
        # Another run may remove it at the same time. A folder that cannot be removed does no harm.
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime > ABANDONED:
                shutil.rmtree(leftover, ignore_errors=True)


def check_trusted(path: Path) -> None:
    """Refuses a folder of the cache that somebody else can write, or may have written. It, and everything directly in
    it, must be this user's and writable by nobody else. A folder or link above it may belong to the superuser. The
    user's own private group may write there, and anybody may if the sticky bit is set (`/tmp`).
    """
    for part in dict.fromkeys([*_ancestors(path), *_ancestors(path.resolve())]):
        _check_above(part, part.lstat())
    _check_owner(path, path.stat())
    with os.scandir(path) as entries:
        for entry in entries:
            # Another run of ours may have renamed or removed it by now.
            with contextlib.suppress(FileNotFoundError):
                _check_owner(Path(entry.path), entry.stat(follow_symlinks=False))


def _check_owner(path: Path, status: os.stat_result) -> None:
    """Refuses a file or folder of the cache that is not this user's, or that others can write."""
    if status.st_uid != os.geteuid():
        fact = f"User {status.st_uid} owns it, and what is loaded from the cache is run as user {os.geteuid()}"
        raise BadValueError(str(path), fact, f"Remove it, {INSTEAD}", owner=status.st_uid)
    if status.st_mode & _WRITABLE and not stat.S_ISLNK(status.st_mode):
        raise _writable(path, status)


def _check_above(path: Path, status: os.stat_result) -> None:
    """Refuses a folder or link above the cache through which another user could put another cache in its place."""
    if status.st_uid not in (0, os.geteuid()):
        fact = f"User {status.st_uid} owns it, who could put another cache there; what is loaded from it is run"
        raise BadValueError(str(path), fact, INSTEAD[0].upper() + INSTEAD[1:], owner=status.st_uid)
    if stat.S_ISLNK(status.st_mode) or status.st_mode & stat.S_ISVTX:
        return
    if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid)):
        raise _writable(path, status)


def _writable(path: Path, status: os.stat_result) -> BadValueError:
    """Returns the refusal of a file or folder that others can write."""
    mode = stat.S_IMODE(status.st_mode)
    fact = f"Others can write to it (mode {mode:04o}), and what is loaded from the cache is run"
    return BadValueError(str(path), fact, f"Run chmod go-w {path}, {INSTEAD}", mode=mode)


def _is_private(group: int) -> bool:
    """Returns whether a group has this user alone, by its name and members, as OpenSSH checks on Debian."""
    import grp
    import pwd

    try:
        user = pwd.getpwuid(os.geteuid())
        row = grp.getgrgid(group)
    except KeyError:
        return False  # unknown to this system, as in a container
    return row.gr_name == user.pw_name and row.gr_gid == user.pw_gid and set(row.gr_mem) <= {user.pw_name}


def _ancestors(path: Path) -> Iterator[Path]:
    """Yields every folder and link on the way to a folder, from the root on, and on the way to each link's target."""
    path = path.absolute()  # not resolved: where '..' leads depends on the links before it
    for part in (*reversed(path.parents), path):
        yield part
        if part.is_symlink():
            yield from _ancestors(part.parent / part.readlink())


def cpu_kind() -> str:
    """Returns a name for this host's kind of CPU, such as `x86_64-0f3a9c1b2d4e`. XLA compiles for the CPU's
    instructions, which JAX's keys do not name: on another CPU a program may end in SIGILL.
    """
    info = Path("/proc/cpuinfo")
    if info.is_file():
        fields = ("model name", "flags", "Features", "CPU implementer", "CPU part")
        first_processor = info.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
        facts = [line for line in first_processor.splitlines() if line.partition(":")[0].strip() in fields]
    else:
        facts = [platform.system(), platform.processor()]
    return f"{platform.machine()}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}"
