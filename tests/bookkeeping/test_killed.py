"""Every file event of a whole run, once with SIGKILL before it and once with each error of a disk."""

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
        pytest.skip("needs a C compiler: apt-get install gcc, then pytest -m slow tests/bookkeeping/test_killed.py")
    file = tmp_path_factory.mktemp("library") / "file_events.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", file, FAKES / "file_events.c", "-ldl"], check=True)
    return file


@pytest.mark.slow
@pytest.mark.parametrize("error", ["KILL", "ENOSPC", "EIO", "EDQUOT"])
def test_at_every_file_event_nothing_is_lost_and_the_rerun_has_the_same_bits(library, tmp_path, root, error):
    """No wrong byte, no step that was saved and is taken again, no traceback, no half-written file that stays."""
    command = [sys.executable, FAKES / "file_faults.py", library, tmp_path, root, error]
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(root)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    sys.stdout.write(f"{result['counts']}\n")
    assert result["counts"]["events"] >= 60
    assert result["complaints"] == []
