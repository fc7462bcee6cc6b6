"""A command that is not a run is left at a signal as at Ctrl-C."""

import contextlib
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from torchport.processes import stopping


@pytest.fixture
def handled():
    """Gives a signal its default handler: under `nohup` the tests' own process ignores SIGHUP, and so would ours."""
    with contextlib.ExitStack() as stack:

        def handle(number, handler=signal.SIG_DFL):
            stack.callback(signal.signal, number, signal.signal(number, handler))

        yield handle


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_what_is_in_progress_and_its_folders_are_removed(handled, number):
    handled(number)
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as caught, stopping.unwinding(), tempfile.TemporaryDirectory() as folder:
        os.kill(os.getpid(), number)
        time.sleep(60)
    assert caught.value.code == 128 + number
    assert not Path(folder).exists() and signal.getsignal(number) is before


def test_a_hangup_that_the_process_ignores_stays_ignored(handled):
    handled(signal.SIGHUP, signal.SIG_IGN)
    with stopping.unwinding():
        os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
