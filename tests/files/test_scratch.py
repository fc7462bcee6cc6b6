"""Folders of temporary files: there while their process lives, gone after it, and nobody else's are touched."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from torchport.errors import OutputError
from torchport.files import atomic


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """The folder of temporary files, of the test's own."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def killed(temporary):
    """Kills a process that has such a folder; returns the folder."""
    code = "import sys, time; from torchport.files import atomic\nwith atomic.scratch() as folder:\n"
    code += " (folder / 'large').write_text('x'); print(folder, flush=True); time.sleep(60)"
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) as process:
        folder = Path(process.stdout.readline().strip())
        assert (folder / "large").exists()
        atomic.remove_abandoned()
        assert (folder / "large").exists(), "its process lives"
        process.send_signal(signal.SIGKILL)
    assert (folder / "large").exists()
    return folder


def test_what_a_killed_process_left_goes_at_the_next_start_and_what_a_living_one_has_stays(temporary):
    with atomic.scratch() as living:
        left = killed(temporary)
        with atomic.scratch() as mine:
            assert not left.exists() and living.exists()
            assert sorted(temporary.iterdir()) == sorted([living, mine])
    assert list(temporary.iterdir()) == []


def test_every_command_is_a_next_start(temporary, torchport, capsys):
    abandoned = temporary / f"{atomic.SCRATCH}dead"
    abandoned.mkdir()
    torchport("explain", "TP101", capsys=capsys)
    assert not abandoned.exists()


def test_links_and_what_is_another_users_or_has_another_name_stays(temporary, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (temporary / f"{atomic.SCRATCH}link").symlink_to(elsewhere)
    (temporary / f"{atomic.SCRATCH}file").write_text("")
    (temporary / "torchport-other").mkdir()
    atomic.remove_abandoned()
    assert elsewhere.exists() and len(list(temporary.iterdir())) == 3
    (temporary / f"{atomic.SCRATCH}theirs").mkdir()
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    atomic.remove_abandoned()
    assert (temporary / f"{atomic.SCRATCH}theirs").exists()
    monkeypatch.undo()


def test_where_nothing_can_be_locked_nothing_is_taken_for_abandoned(temporary, monkeypatch):
    monkeypatch.setattr(atomic, "_flock", lambda handle: False)
    with atomic.scratch() as living:
        atomic.remove_abandoned()
        assert living.exists()
    assert not living.exists()


def test_a_folder_that_another_process_takes_before_its_lock_is_made_again(temporary, monkeypatch):
    lock, taken = atomic._flock, []

    def late(handle):
        if not taken:
            taken.extend(temporary.iterdir())
            taken[0].rmdir()
        return lock(handle)

    monkeypatch.setattr(atomic, "_flock", late)
    with atomic.scratch() as folder:
        assert taken and folder.exists() and folder != taken[0]


def test_no_folder_for_temporary_files_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(OutputError) as caught, atomic.scratch():
        pass
    assert str(caught.value) == (
        "TMPDIR: No temporary folder can be made: No such file or directory. "
        "Free some space there, or name another folder with TMPDIR."
    )
