"""What git says of somebody's checkout: its commit, and whether its files are those of the commit.

The repository may be anybody's, and its configuration may name commands: hooks, a file system monitor, filters, ways
to fetch what is missing. git is only asked for what it answers without them. So files are compared here, not by git:
`git status` runs the filters, and believes the repository's index, which may call a changed file unchanged.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import stat
import subprocess
from pathlib import Path

_LINK, _SUBMODULE = "120000", b"160000"
"""The modes of a symbolic link and of a submodule, as `git ls-tree` prints them: a text, and the bytes of a row."""


@dataclasses.dataclass(frozen=True)
class Revision:
    """The version of a package that is a checkout."""

    #: The commit's hash, 40 or 64 hexadecimal digits. None where git names no commit.
    commit: str | None
    #: Whether a file of the package differs from the commit, or is gone. Files that git does not know do not count.
    dirty: bool = False
    reason: str = ""  #: Why there is no commit.

    def __str__(self) -> str:
        if self.commit is None:
            return f"no commit ({self.reason})"
        return f"commit {self.commit[:12]}{' with changes' if self.dirty else ''}"


class _NoAnswerError(Exception):
    """git has given no answer; the message says why."""


def revision(package: Path) -> Revision:
    """Returns the commit of a package's checkout, and whether the package's files differ from the commit; or no commit,
    and why. `package` is its folder, or the file of a package that is one module. Windows line ends are no difference;
    files that a filter has written (Git LFS) differ.
    """
    try:
        commit = _git(package.parent, "rev-parse", "--verify", "--end-of-options", "HEAD^{commit}").decode().strip()
        listing = _git(package.parent, "ls-tree", "-r", "-z", commit, "--", package.name)
    except _NoAnswerError as error:
        return Revision(None, reason=str(error))
    files = [row for row in listing.split(b"\0") if row and not row.startswith(_SUBMODULE)]
    if not files:
        return Revision(None, reason=f"git does not track {package.name}")
    return Revision(commit, any(_differs(package.parent, row) for row in files))


def _git(folder: Path, *arguments: str) -> bytes:
    """Returns git's stdout for a command in a folder, without this user's configuration; or raises _NoAnswerError."""
    path = os.pathsep.join(filter(os.path.isabs, os.environ.get("PATH", os.defpath).split(os.pathsep)))
    program = shutil.which("git", path=path)
    if program is None:
        raise _NoAnswerError("git is not installed")
    environment = {
        "PATH": path,
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_ALLOW_PROTOCOL": "none",  # before 2.45 git would fetch what a partial clone lacks, by any command
    }
    # git refuses another user's repository unless it counts as safe. Here it is safe: none of its commands are run.
    settings = "safe.directory=*", "core.fsmonitor=false", f"core.hooksPath={os.devnull}"
    options = [word for setting in settings for word in ("-c", setting)]
    result = subprocess.run(
        [program, "--no-pager", *options, "-C", str(folder), *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if result.returncode == 0:
        return result.stdout
    stderr = result.stderr.decode(errors="replace")
    if "not a git repository" in stderr:
        raise _NoAnswerError("no git repository")
    if "Needed a single revision" in stderr:
        raise _NoAnswerError("its repository has no commit yet")
    lines = stderr.strip().splitlines() or ["git fails"]
    raise _NoAnswerError(lines[0].removeprefix("fatal: ").strip()[:200])


def _differs(folder: Path, row: bytes) -> bool:
    """Returns whether a file differs from the commit: it is gone, no longer a file or link, or has other content. `row`
    is the file as `git ls-tree -z` lists it, `100644 blob <hash>\t<path>`.
    """
    words, _, name = row.partition(b"\t")
    mode, _, digest = words.decode().split()
    path = folder / os.fsdecode(name)
    try:
        is_link = stat.S_ISLNK(path.lstat().st_mode)
        if is_link is not (mode == _LINK):
            return True
        content = os.fsencode(path.readlink()) if is_link else path.read_bytes()
    except OSError:
        return True
    new = hashlib.sha1 if len(digest) == 40 else hashlib.sha256  # by the repository's format
    contents = (content, content.replace(b"\r\n", b"\n"))
    blobs = (b"blob %d\0" % len(content) + content for content in contents)  # git hashes a file with this head
    return digest not in (new(blob, usedforsecurity=False).hexdigest() for blob in blobs)
