"""A command that is not a run is left at a signal as at Ctrl-C."""

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from torchport.processes import stopping


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_what_is_in_progress_and_its_folders_are_removed(number):
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as caught, stopping.unwinding(), tempfile.TemporaryDirectory() as folder:
        os.kill(os.getpid(), number)
        time.sleep(60)
    assert caught.value.code == 128 + number
    assert not Path(folder).exists() and signal.getsignal(number) is before
