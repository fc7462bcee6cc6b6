"""Watches the other processes of a run, and ends this one with a message if another has failed or is lost.

JAX's own heartbeats (`heartbeat_timeout_seconds`) cannot do it: they abort this process with a stack trace of C++, and
no handler is told which process is lost.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from torchport import errors
from torchport.errors import LostProcessError, TorchportError

SILENCE = 20
"""Seconds after which a silent process counts as lost.

Every process sends a sign of life each second, from its own thread. JAX's own limit is 100 s, with a stack trace.
"""
POLL = 1.0
"""Seconds between two looks at the others."""
BRIEF = 3 * POLL
"""Seconds in which all others have looked; a process that ends waits no longer for anything that may hang."""
KEYS = "torchport/watch/"
"""The folder of keys that every process reads: under its number, the last word of each process."""
FAILED = f"{KEYS}failed"
"""Key of the coordination service that holds the failing process's error and exit code."""
AT_ONCE = "Stopped at once; what was being written is not kept."
"""The last line after a second Ctrl-C."""
OVER = "over"
"""The last word of a process that ends normally."""


class Watch:
    """Ends this process if another has failed or is lost: a program that waits for the other never gets an error."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.folder: Path | None = None  #: Where what is finished lies, once that is known.
        self.over = threading.Event()  #: Whether this process has come to its end by itself.
        self.last_words = {number: "" for number in range(state.num_processes) if number != state.process_id}
        self.heard = dict.fromkeys(self.last_words, time.monotonic())
        self.words = dict.fromkeys(self.last_words, 0)
        self.answered = time.monotonic()  # the first process, which has the service

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watches the other processes, in a thread, while the context lasts."""
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        _watches.append(self)
        try:
            # The first process runs the service itself, so it needs no handler.
            with self._abort() if self.state.process_id else contextlib.nullcontext():
                yield
        finally:
            self.over.set()
            thread.join()

    def settle(self) -> None:
        """Waits for a new sign of life of every other process; this process ends here if one gives none."""
        before, limit = dict(self.words), time.monotonic() + 2 * SILENCE
        # The last word of a dead process may be unread yet; a second new word proves that the process lives.
        while any(self.words[number] < before[number] + 2 for number in before) and time.monotonic() < limit:
            time.sleep(POLL / 10)

    def fail(self, error: BaseException) -> None:
        """Publishes the failure to the others, and skips JAX's barrier at the end of this process."""
        code, text = 1, f"{type(error).__name__}: {error}"
        if isinstance(error, TorchportError):
            code, text = error.exit_code, f"error[{error.id}] {error.sentence()}"
        elif isinstance(error, KeyboardInterrupt):
            code, text = errors.StoppedError.exit_code, AT_ONCE
        self._publish(code, text)
        # Before JAX's own: handlers run last in, first out.
        atexit.register(self._leave, code)

    def end(self, code: int, text: str) -> NoReturn:
        """Ends this process and the others with an exit code and a last line; see the function `end`."""
        _briefly(lambda: self._publish(code, text))
        self._leave(code, text)

    def _publish(self, code: int, text: str) -> None:
        """Publishes why this process failed, for the others to read; if another one failed first, its reason stays."""
        import jax

        with contextlib.suppress(jax.errors.JaxRuntimeError):
            failed = {"process": self.state.process_id, "code": code, "error": text}
            self.state.client.key_value_set(FAILED, json.dumps(failed))

    def _set_word(self, word: str) -> None:
        self.state.client.key_value_set(f"{KEYS}{self.state.process_id}", word, allow_overwrite=True)

    def _run(self) -> None:
        """Publishes a sign of life and looks at the other processes, every second, until this process is over."""
        import jax

        for beat in itertools.count():
            # Where the service does not answer, JAX ends this process: `_abort`.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._set_word(str(beat))
                self._look()
            if self.over.wait(POLL):
                break
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._set_word(OVER)

    def _look(self) -> None:
        """Reads the others' signs of life; ends this process if another one has failed, or was silent for too long."""
        messages = dict(self.state.client.key_value_dir_get(KEYS))
        self.answered = time.monotonic()
        failed = json.loads(messages.get(FAILED, "{}"))
        if self.over.is_set():
            return
        if failed and failed["process"] != self.state.process_id:
            place = f"process {failed['process']} of {self.state.num_processes}"
            self._leave(failed["code"], f"{place} failed, and this one ends: {failed['error']}")
        for number, before in self.last_words.items():
            last = messages.get(f"{KEYS}{number}", before)
            if last != before or last == OVER:
                self.last_words[number], self.heard[number] = last, time.monotonic()
                self.words[number] += 1
            elif time.monotonic() - self.heard[number] > SILENCE:
                self._lose(number)

    def _lose(self, number: int) -> NoReturn:
        """Ends this process with the error that process `number` is lost."""
        fact, remedy = "It was killed, or its host is lost", "Start all processes again with the same command"
        if self.folder is not None:
            fact = f"{fact}; what was finished is in {self.folder}"
            remedy = f"{remedy} and --out {self.folder}"
        error = LostProcessError(f"process {number} of {self.state.num_processes}", fact, remedy)
        self._leave(error.exit_code, f"error[{error.id}] {error}")

    @contextlib.contextmanager
    def _abort(self) -> Iterator[None]:
        """Prints the last line if JAX aborts this process. JAX does so at once when the first process is gone. The
        abort raises no exception, and Python's own handlers would run too late: nothing runs after `abort`.
        """
        handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: self._on_abort())
        handle = ctypes.CDLL(None).signal
        handle.argtypes, handle.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
        before = handle(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
        try:
            yield
        finally:
            handle(signal.SIGABRT, before)

    def _on_abort(self) -> None:
        # A process that hangs, is stopped or swapped out still accepts connections: its kernel does.
        silent = time.monotonic() - self.answered > SILENCE
        if not self.over.is_set() and (silent or not _reachable(self.state.coordinator_address)):
            self._lose(0)

    def _leave(self, code: int, text: str = "") -> NoReturn:
        if self.state.process_id == 0:
            # The others ask this process for what has failed.
            time.sleep(BRIEF)
        _leave(code, text)


_watches: list[Watch] = []
"""Of this process: none, or one; processes find each other once."""


def end(code: int, text: str) -> NoReturn:
    """Ends this process at once, whatever its main thread does, with a last line; the others of its run end too.
    Nothing waits for threads: a compiler's would go on for minutes.
    """
    for watch in _watches:
        watch.end(code, text)
    _leave(code, text)


def _leave(code: int, text: str) -> NoReturn:
    _briefly(lambda: _write(text))
    os._exit(code)


def _reachable(address: str) -> bool:
    """Returns whether a process accepts connections at `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=BRIEF).close()
    except OSError:
        return False
    return True


def _briefly(work: Callable[[], object]) -> None:
    """Runs work that may hang in a thread, and leaves the thread behind if it hangs: a pipe without a reader."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(BRIEF)


def _write(text: str) -> None:
    """Flushes the output and writes a last line; on a terminal it starts a new line, as a bar may be on this one."""
    sys.stdout.flush()
    if text:
        sys.stderr.write(f"\n{text}\n" if sys.stderr.isatty() else f"{text}\n")
    sys.stderr.flush()
