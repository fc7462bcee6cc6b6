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
from torchport.processes import hosts
from torchport.progress import log

GRACE = 2.0
"""Seconds that a second Ctrl-C leaves a run for tidying up; a busy machine needs half a second."""


class Stopping:
    """The first Ctrl-C, SIGTERM or SIGHUP asks for a stop after the step in progress; the second stops at once.

    A hangup stops nothing at once: shells and service managers send it after another signal, or twice.
    """

    def __init__(self) -> None:
        self.cause = ""  # the signal's name; empty as long as no stop is requested

    def __call__(self, number: int, frame: object) -> None:
        """Handles a signal: Python calls this in the main thread, between two of its instructions."""
        if self.cause and number != signal.SIGHUP:
            raise KeyboardInterrupt
        self.cause = self.cause or ("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)

    @contextlib.contextmanager
    def listening(self) -> Iterator[Stopping]:
        """Handles the signals while the context lasts. Outside the main thread this does nothing: Python forbids it."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        # nohup makes the process ignore the hangup, and it must stay ignored.
        hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        thread = threading.Thread(target=_answer_signals, args=(reading,), daemon=True)
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
            thread.join(GRACE)  # its log lines must come before the run's last line

    def is_requested(self) -> bool:
        """Returns whether a stop is requested in any process of the run; all processes must call this."""
        if hosts.any_process(bool(self.cause)):
            self.cause = self.cause or "another process"
        return bool(self.cause)

    def check(self, folder: Path, when: str) -> None:
        """Stops here, in all processes of the run, if a stop is requested in any; `when` is, say, "before 'decode'"."""
        if self.is_requested():
            self.stop(folder, when)

    def stop(self, folder: Path, when: str) -> NoReturn:
        """Raises the StoppedError of this run; all its processes must call this. See `check`."""
        fact = f"Stopped {when}; what was finished is in {folder}"
        remedy = f"Go on with the same command and --out {folder}"
        raise StoppedError(self.cause, fact, remedy, on_every_process=True)


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise SystemExit while the context lasts, so that all is tidied up, as at Ctrl-C."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)  # what a shell returns for a process that a signal ended

    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _answer_signals(reading: int) -> None:
    """Answers signals in a thread of its own, as the main thread may be in a program or a compiler for minutes: logs
    the first signal, and ends the process `GRACE` seconds after the second, or at once at a third.

    In the main thread the second signal raises a KeyboardInterrupt, which leaves nothing half-written behind. Code that
    calls Python from C may swallow this exception, so the run has only these seconds.

    Args:
        reading: Gives the number of each signal as a byte, and ends when the run does.
    """
    pending = False
    with open(reading, "rb", buffering=0) as signals:
        while byte := signals.read(1):
            number = byte[0]
            if number == signal.SIGHUP:
                _leave_terminal()
            if pending and number in (signal.SIGINT, signal.SIGTERM):
                # The run has not ended within `GRACE` seconds, or a third signal came; else the pipe is closed.
                if not select.select([signals], [], [], GRACE)[0] or signals.read(1):
                    hosts.end(StoppedError.exit_code, hosts.AT_ONCE)
                return
            if not pending and number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                pending = True
                again = "press Ctrl-C again" if number == signal.SIGINT else "send SIGTERM"
                log.warning("stopping after what is in progress; %s to stop at once", again)


def _leave_terminal() -> None:
    """Redirects stdout and stderr to nowhere if their terminal is gone: a failed write would end the run unsaved."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")  # raises if the terminal is gone
        except OSError:
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), stream)
