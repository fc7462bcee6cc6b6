"""Reads a folder that somebody else may have made: it follows no link out of it, and does not wait for pipes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from torchport.errors import BadValueError, OutputError


def inside(root: Path, path: Path) -> Path:
    """Returns `path` unchanged; raises if a link in it leads out of the folder `root`."""
    # Unlike `Path.resolve`, this does not fail on a loop of links.
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        fact = f"'{path.name}' is a link out of '{root.name}'"
        raise BadValueError(as_named(path), fact, "Put the file itself there")
    return path


def as_named(path: Path) -> str:
    """Returns a path as text: relative to the current folder if it lies in that folder, else absolute."""
    current = Path.cwd()
    absolute = current / path
    return str(absolute.relative_to(current) if absolute.is_relative_to(current) else absolute)


def refused(place: str, path: str, error: OSError) -> BadValueError:
    """Returns the error for a path that the system refuses, such as a path that is too long, or a loop of links."""
    excerpt = path if len(path) <= 80 else f"{path[:77]}..."
    return BadValueError(f"{place} {excerpt}", f"The system refuses this path: {error.strerror}", "Name another")


# Whether a path is a file, or a folder. The methods of `Path` raise for a path that the system refuses for its length.
has_file, has_folder = os.path.isfile, os.path.isdir


def expand_home(name: str) -> Path:
    """Returns a path with `~` as the home folder; `~somebody` that this system does not know stays as it is."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def text(path: Path) -> str:
    """Returns a file's text.

    Raises:
        OSError: It cannot be read, is a folder, or is a pipe or device, for which a read would wait.
        UnicodeDecodeError: It is not UTF-8.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise OSError(None, "It is a folder" if stat.S_ISDIR(mode) else "It is a pipe, socket or device")
    return path.read_text(encoding="utf-8")


def check_writable(flag: str, file: Path) -> None:
    """Refuses a file, named by a flag, that cannot be written: before minutes or hours are spent on its content."""
    if (file.exists() and not file.is_file()) or not file.absolute().parent.is_dir():
        fact = "It is no file, or lies in no folder"
        raise OutputError(f"{flag} {file}", fact, "Name a file in a folder that is there")
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise OutputError(f"{flag} {file}", "You may not write there", "Name a file in a folder that can be written")
