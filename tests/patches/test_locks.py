"""Every row of a shipped lock is what the reader of source says of the upstream that the row names.

Of the rows with versions, those of the versions that are installed here are tried. Those with commits are tried with a
checkout that has its history:

TORCHPORT_HYVIDEO=DIR pytest -m upstream tests/patches/test_locks.py
"""

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from torchport import patch
from torchport.patch.declared.reading import read_lock
from torchport.patch.declared.versions import installed
from torchport.patch.source import drift

PATCHES = Path(__file__).parents[2] / "patches"
CHECKOUT = os.environ.get("TORCHPORT_HYVIDEO")
COMMITS = {row.commit for locked in read_lock(PATCHES / "hyvideo").values() for row in locked.rows if row.commit}


def seen(upstream, commit=None):
    """The rows that the code makes of each locked target, and those of the lock that must be among them."""
    entries = [entry for entry in patch.read(PATCHES, [upstream]) if entry.edits]
    now = {}
    for entry in entries:
        row = drift.current_row(entry)
        if row is not None:
            now.setdefault(entry.target, []).append(row)
    for target, locked in read_lock(PATCHES / upstream).items():
        for row in locked.rows:
            here = all(installed(name) == version for name, version in row.versions.items())
            if row.commit == commit and here and not row.dirty:
                yield target, row, now[target]


def check(upstream, commit=None):
    """Checks the rows of an upstream, and returns how many there were."""
    count = 0
    for target, row, rows in seen(upstream, commit):
        callees = {}
        for one in rows:
            assert (one.signature, one.tree, one.statements) == (row.signature, row.tree, row.statements), target
            callees |= one.relies_on
        assert callees == row.relies_on, target
        count += 1
    return count


@pytest.mark.parametrize("upstream", ["diffusers", "torch", "torchax"])
def test_the_rows_of_what_is_installed_are_reproduced(upstream):
    locked = read_lock(PATCHES / upstream).values()
    here = [row for one in locked for row in one.rows if all(installed(n) == v for n, v in row.versions.items())]
    assert check(upstream) == len(here)


@pytest.mark.upstream
@pytest.mark.skipif(not CHECKOUT, reason="needs a checkout: TORCHPORT_HYVIDEO=DIR pytest -m upstream")
@pytest.mark.parametrize("commit", sorted(COMMITS))
def test_the_rows_of_a_commit_are_reproduced(commit, tmp_path, monkeypatch):
    git = ["git", "-C", CHECKOUT]
    listed = subprocess.run([*git, "ls-tree", "-r", "--name-only", commit, "hyvideo"], capture_output=True, check=True)
    files = [name for name in listed.stdout.decode().splitlines() if name.endswith(".py")]
    archive = subprocess.run([*git, "archive", commit, "--", *files], capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(tmp_path, filter="data")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "hyvideo" not in sys.modules
    assert check("hyvideo", commit) > 0
