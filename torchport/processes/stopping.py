"""Stops a run cleanly at a signal: the step in progress is finished and saved, and nothing else is begun."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from torchport.errors import StoppedError
from torchport.processes import hosts, watch
from torchport.progress import log

GRACE = 2.0
"""Seconds that a second Ctrl-C leaves a run for tidying up; a busy machine needs half of one."""


class Stopping:
    """The first Ctrl-C, SIGTERM or SIGHUP asks for a stop after the step in progress; the second stops at once.

    A hangup stops nothing at once: shells and service managers send it after another signal, or twice.
    """

    def __init__(self) -> None:
        self.asked = ""  # by what

    def __call__(self, number: int, frame: object) -> None:
        """Handles a signal, in the main thread and between two of Python's own steps."""
        if self.asked and number != signal.SIGHUP:
            raise KeyboardInterrupt
        self.asked = self.asked or ("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)

    @contextlib.contextmanager
    def listening(self) -> Iterator[Stopping]:
        """Handles the signals while the context lasts; only a main thread can, and elsewhere nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        # nohup has the hangup ignored, and that is to stay so.
        hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        thread = threading.Thread(target=_hear, args=(reading,), daemon=True)
        thread.start()
        waking = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        before = {number: signal.signal(number, self) for number in (signal.SIGINT, signal.SIGTERM, *hangup)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(waking)
            os.close(writing)
            thread.join(GRACE)  # what it logs comes before what the run says last

    def wanted(self) -> bool:
        """Returns whether any process of the run was asked to stop; all of them must call this."""
        if hosts.any_process(bool(self.asked)):
            self.asked = self.asked or "another process"
        return bool(self.asked)

    def check(self, folder: Path, when: str) -> None:
        """Stops here, in all processes of the run, if that was asked for in any.

        Args:
            folder: The run's.
            when: How far the run is, as "before 'decode'".

        Raises:
            StoppedError: It was.
        """
        if self.wanted():
            self.stop(folder, when)

    def stop(self, folder: Path, when: str) -> NoReturn:
        """Stops here, as all processes of the run do; see `check`.

        Raises:
            StoppedError: Always.
        """
        raise StoppedError(
            self.asked,
            f"Stopped {when}; what was finished is in {folder}",
            f"Go on with the same command and --out {folder}",
            on_every_process=True,
        )


def _hear(reading: int) -> None:
    """Answers signals where the main thread cannot: it may be in a program or a compiler for minutes.

    Where it can, the second signal raises a KeyboardInterrupt there, which leaves nothing half-written behind. That has
    `GRACE` seconds to end the run: what calls Python from C may swallow it.

    Args:
        reading: Gives the number of each signal as a byte, and ends when the run does.
    """
    asked = False
    with open(reading, "rb", buffering=0) as signals:
        while byte := signals.read(1):
            number = byte[0]
            if number == signal.SIGHUP:
                _leave_terminal()
            if asked and number in (signal.SIGINT, signal.SIGTERM):
                if not select.select([signals], [], [], GRACE)[0] or signals.read(1):
                    watch.end(StoppedError.exit_code, watch.AT_ONCE)
                return
            if not asked and number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                asked = True
                again = "press Ctrl-C again" if number == signal.SIGINT else "send SIGTERM"
                log.warning("stopping after what is in progress; %s to stop at once", again)


def _leave_terminal() -> None:
    """Writes to nowhere from now on if the terminal is gone: a line that fails would end the run before it is saved."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), stream)
