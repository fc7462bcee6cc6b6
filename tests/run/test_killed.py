"""SIGKILL before every file event of a whole run and at random moments, and every error of a disk."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FAKES = Path(__file__).parents[1] / "fakes"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The library that makes one file event of a process fail."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler: apt-get install gcc, then pytest -m slow tests/run/test_killed.py")
    file = tmp_path_factory.mktemp("library") / "file_events.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", file, FAKES / "file_events.c", "-ldl"], check=True)
    return file


@pytest.mark.slow
@pytest.mark.parametrize("error", ["KILL", "ENOSPC", "EIO", "EDQUOT"])
def test_at_every_file_event_nothing_is_lost_and_the_rerun_has_the_same_bits(library, tmp_path, root, error):
    """No wrong byte, no step that was saved and is taken again, no traceback, no half-written file that stays."""
    result = result_of("file_faults.py", library, tmp_path, root, error)
    assert result["counts"]["events"] >= 60
    assert result["complaints"] == []


@pytest.mark.slow
def test_killed_at_40_random_moments_a_run_of_20_steps_ends_with_the_same_bits(library, tmp_path, root):
    """In between the disk is full, the folder is read-only, or a file is truncated."""
    result = result_of("random_kills.py", library, tmp_path, root, "40", "20261122")
    assert result["complaints"] == []
    stages = {key: count for key, count in result["counts"].items() if key.startswith("killed in ")}
    assert set(stages) == {"killed in encode", "killed in denoise", "killed in decode"}
    assert sum(stages.values()) == 40 and min(stages.values()) >= 5


def result_of(program, library, *args):
    """Runs a program of fakes/ under the library; returns what it prints, and shows its counts."""
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(args[1])}
    command = [sys.executable, FAKES / program, library, *args]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    sys.stdout.write(f"{result['counts']}\n")
    return result
