"""The processes of one run, one on each host: how they find each other, agree, and end together.

Every process runs the same command over the same devices. The first one keeps the run's folder: it reads and writes
there, and sends the others what it read. It sends through JAX's coordination service, not through the devices: a
process may have to wait for hours, and a device that waits in a program hangs.

Each process watches the others, and ends with a message if another has failed or is lost. JAX's own heartbeats
(`heartbeat_timeout_seconds`) cannot do it: they abort this process with a stack trace of C++, and no handler is told
which process is lost.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import itertools
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from torchport import errors
from torchport.errors import BadValueError, LostProcessError, MachineError, TorchportError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
CONNECT = 300
"""Seconds that the processes of a run wait for each other at the start: JAX's default."""
PIECE = 2**20
"""Bytes of one message: gRPC takes 4 MiB at most by default."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """How a process finds the others of its run; without an address JAX asks the cluster that it runs in."""

    coordinator: str | None = None  #: `host:port` of the first process.
    processes: int | None = None  #: How many processes the run has.
    process: int | None = None  #: The number of this process, from 0.


def cluster_of(
    distributed: bool, coordinator: str | None, processes: int | None, process: int | None
) -> Cluster | None:
    """Returns the cluster that the flags name, or raises if they conflict; None without a flag: a single process."""
    flags = {"--coordinator": coordinator, "--processes": processes, "--process": process}
    names = [flag for flag, value in flags.items() if value is not None]
    if distributed and names:
        remedy = "Leave one out: --distributed takes all from the cluster"
        raise BadValueError("--distributed", f"{names[0]} is given too", remedy)
    if not names:
        return Cluster() if distributed else None
    missing = [flag for flag in flags if flag not in names]
    if missing:
        remedy = "Give all three, or --distributed alone on a cluster that JAX knows"
        raise BadValueError(names[0], f"It is given without {' and '.join(missing)}", remedy)
    assert coordinator is not None and processes is not None and process is not None
    name, _, port = coordinator.rpartition(":")
    if not name or not re.fullmatch(r"[1-9]\d{0,4}", port) or int(port) > 65535:
        remedy = "Name those of the first process, such as 10.0.0.1:8476"
        raise BadValueError(f"--coordinator {coordinator}", "It is no host and port", remedy)
    if process >= processes:
        remedy = f"It must be 0 to {processes - 1}"
        raise BadValueError(f"--process {process}", f"There are {processes} processes", remedy)
    return Cluster(coordinator, processes, process)


def _state() -> Any:
    """Returns JAX's state of the run's processes. JAX's public functions would start its backend, too early to join."""
    from jax._src import distributed

    return distributed.global_state


def processes() -> int:
    """Returns how many processes the run has; 1 without a cluster."""
    return int(_state().num_processes)


def process() -> int:
    """Returns the number of this process in the run, from 0."""
    return int(_state().process_id)


def is_first() -> bool:
    """Returns whether this is the first process of the run, which alone reads and writes the run's folder."""
    return process() == 0


@contextlib.contextmanager
def joined(cluster: Cluster | None) -> Iterator[Watch]:
    """Connects this process with the others of a cluster while the context lasts; does nothing without a cluster.

    If a process fails, the others end within seconds, with its error and its exit code. If one is killed, the others
    end with a `LostProcessError`: within `SILENCE` and a few seconds, or at once if it was the first.

    Yields:
        The watch over the others; set its `folder` once the run's folder is known.
    """
    if cluster is None:
        yield Watch(_state())
        return
    _connect(cluster)
    watch = Watch(_state())
    with watch.watching():
        try:
            yield watch
        except BaseException as error:
            if isinstance(error, RuntimeError):
                # A program only says that a connection was lost. If a process has died, `settle` ends with that error.
                watch.settle()
            watch.over.set()
            # If all processes refuse at the same point, they leave in order: JAX waits for all of them at its end.
            if not (isinstance(error, TorchportError) and error.on_every_process):
                watch.fail(error)
            raise


def _connect(cluster: Cluster) -> None:
    """Connects this process with the others by JAX's coordination service, or raises; all but the first log less."""
    import jax

    # torchport stops at SIGTERM by itself; JAX's service would take the signal away.
    jax.config.update("jax_enable_preemption_service", False)
    place = f"--coordinator {cluster.coordinator}" if cluster.coordinator else "--distributed"
    try:
        jax.distributed.initialize(
            cluster.coordinator,
            cluster.processes,
            cluster.process,
            initialization_timeout=CONNECT,
            # The cluster's own numbering must not mix with the flags.
            cluster_detection_method="deactivate" if cluster.coordinator else None,
        )
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        remedy = (
            "Start all processes at about the same time, with one free port on a host that all of them reach"
            if cluster.coordinator
            else "Name it: --coordinator HOST:PORT --processes N --process I"
        )
        raise MachineError(place, f"The processes of the run do not find each other: {reason}", remedy) from error
    log = logging.getLogger("torchport")
    if not is_first() and log.getEffectiveLevel() < logging.WARNING:
        log.setLevel(logging.WARNING)  # the first process speaks for all


_exchanges = itertools.count()
"""Numbers of exchanges: every process makes the same exchanges in the same order."""
_alone: list[bool] = []
"""Not empty while the first process works and the others only wait for it."""


def from_first(make: Callable[[], T]) -> T:
    """Calls `make` in the first process alone, and returns its result on every process; a TorchportError of `make` is
    raised on all. The result is data that JSON can hold.
    """
    return pair_from_first(lambda: (make(), {}))[0]


def pair_from_first(make: Callable[[], tuple[T, Mapping[str, torch.Tensor]]]) -> tuple[T, Mapping[str, torch.Tensor]]:
    """Returns, on every process, the data and tensors of `make` in the first, bit for bit; see `from_first`."""
    if processes() == 1 or _alone:
        return make()
    key = f"torchport/{next(_exchanges)}"
    return _publish(key, make) if is_first() else _receive(key)


def _publish(
    key: str, make: Callable[[], tuple[T, Mapping[str, torch.Tensor]]]
) -> tuple[T, Mapping[str, torch.Tensor]]:
    """Calls `make` in the first process, and sends its result or error to the others; returns or raises it, too."""
    from safetensors.torch import save

    _alone.append(True)
    try:
        value, tensors = make()
    except TorchportError as error:
        error.on_every_process = True
        culprit = {name: value for name, value in vars(error).items() if isinstance(value, bool | int | float | str)}
        _send(key, {"kind": type(error).__name__, "args": error.args, "culprit": culprit}, data=b"")
        raise
    finally:
        _alone.pop()
    _send(key, {"value": value}, save({name: tensor.contiguous() for name, tensor in tensors.items()}))
    return value, tensors


def _send(key: str, header: dict[str, Any], data: bytes) -> None:
    """Sends a header and bytes under a key to the other processes, by JAX's coordination service."""
    # The service keeps every message until the end: a few artefacts, each once.
    client = _state().client
    for start in range(0, len(data), PIECE):
        client.key_value_set_bytes(f"{key}/{start}", data[start : start + PIECE])
    client.key_value_set(key, json.dumps({**header, "bytes": len(data)}))


def _receive(key: str) -> tuple[Any, Mapping[str, torch.Tensor]]:
    """Returns the result that the first process sent under a key, or raises the error that it sent."""
    from safetensors.torch import load

    header = json.loads(_wait_for(key))
    if "kind" in header:
        error: TorchportError = getattr(errors, header["kind"])(*header["args"])
        vars(error).update(header["culprit"])
        raise error
    client = _state().client
    starts = range(0, header["bytes"], PIECE)
    # The pieces were sent before the header: 60,000 ms are more than enough to get each.
    pieces = [client.blocking_key_value_get_bytes(f"{key}/{start}", 60_000) for start in starts]
    return header["value"], load(b"".join(pieces))


def _wait_for(key: str) -> str:
    """Waits, without a limit, until another process sets a key, and returns its value. Ctrl-C ends the wait."""
    import jax

    while True:
        try:
            return str(_state().client.blocking_key_value_get(key, round(1000 * POLL)))  # in ms
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def _all_texts(text: str) -> list[str]:
    """Sends this process's text to all, and returns the texts of all processes, in the order of their numbers."""
    key = f"torchport/{next(_exchanges)}"
    _state().client.key_value_set(f"{key}/{process()}", text)
    return [_wait_for(f"{key}/{number}") for number in range(processes())]


def any_process(mine: bool) -> bool:
    """Returns whether `mine` is true in any process; all processes must call this."""
    if processes() == 1 or _alone:
        return mine
    return "yes" in _all_texts("yes" if mine else "no")


def check_same(facts: Mapping[str, Any]) -> None:
    """Refuses a run whose processes differ in their facts: they would wait for each other, or compute nonsense. The
    facts are all settings that decide which programs run, by name; data that JSON can hold.
    """
    if processes() == 1:
        return
    text = json.dumps(dict(facts), default=str)
    # As the facts of the others come: JSON makes lists of tuples.
    ours = json.loads(text)
    for number, theirs in enumerate(map(json.loads, _all_texts(text))):
        differs = [key for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key)]
        if differs:
            key = differs[0]
            fact = f"Its {key} is {ours.get(key)!r}, and that of process {number} is {theirs.get(key)!r}"
            remedy = "Start every process with the same command, versions and checkpoint"
            raise MachineError(f"process {process()}", fact, remedy, key=key)


SILENCE = 20
"""Seconds after which a silent process counts as lost.

Every process sends a sign of life each second, from its own thread. JAX's own limit is 100 s, with a stack trace.
"""
POLL = 1.0
"""Seconds between two looks at the other processes."""
BRIEF = 3 * POLL
"""Seconds in which all other processes have looked. A process that ends waits no longer than this for others."""
KEYS = "torchport/watch/"
"""The prefix of keys that every process reads: with a process's number, the key of its last sign of life."""
FAILED = f"{KEYS}failed"
"""The key of a message, as JSON, with the number, the error and the exit code of the process that failed first."""
AT_ONCE = "Stopped at once; what was being written is not kept."
"""The last line of output after a second Ctrl-C."""
OVER = "over"
"""The last sign of life of a process that ends normally."""


class Watch:
    """Ends this process if another has failed or is lost: a program that waits for another host never gets an error."""

    def __init__(self, state: Any) -> None:
        """Notes that all other processes are alive at this moment; `state`: from `_state`."""
        self.state = state
        self.folder: Path | None = None  #: The run's folder, for errors, once it is known.
        self.over = threading.Event()  #: Set when this process ends by itself.
        #: The last sign of life of each other process, when it was read, and how many were read.
        self.signs = {number: "" for number in range(state.num_processes) if number != state.process_id}
        self.heard = dict.fromkeys(self.signs, time.monotonic())
        self.counts = dict.fromkeys(self.signs, 0)
        self.answered = time.monotonic()  #: When the first process, which has the service, answered last.

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watches the other processes, in a thread, while the context lasts."""
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        _watches.append(self)
        try:
            # The first process runs the service itself, so it needs no handler.
            with self._abort_handler() if self.state.process_id else contextlib.nullcontext():
                yield
        finally:
            self.over.set()
            thread.join()

    def settle(self) -> None:
        """Waits for two new signs of life of all others. If one gives none, the watching thread ends this process."""
        before = dict(self.counts)
        limit = time.monotonic() + 2 * SILENCE
        # Two, since the first may be the last sign of a dead process, not read before.
        while any(self.counts[number] < before[number] + 2 for number in before) and time.monotonic() < limit:
            time.sleep(POLL / 10)

    def fail(self, error: BaseException) -> None:
        """Publishes an error to the other processes, and makes this process end without JAX's barrier for all."""
        code, text = 1, f"{type(error).__name__}: {error}"
        if isinstance(error, TorchportError):
            code, text = error.exit_code, f"error[{error.id}] {error.sentence()}"
        elif isinstance(error, KeyboardInterrupt):
            code, text = errors.StoppedError.exit_code, AT_ONCE
        self.publish(code, text)
        # Before JAX's own: handlers run last in, first out.
        atexit.register(self.leave, code)

    def publish(self, code: int, text: str) -> None:
        """Publishes why this process failed, for the others to read; the message of an earlier failure stays."""
        import jax

        with contextlib.suppress(jax.errors.JaxRuntimeError):
            failed = {"process": self.state.process_id, "code": code, "error": text}
            self.state.client.key_value_set(FAILED, json.dumps(failed))

    def leave(self, code: int, text: str = "") -> NoReturn:
        """Ends this process once the others have had the time to read its message."""
        if self.state.process_id == 0:
            # This process runs the service from which the others read the message.
            time.sleep(BRIEF)
        _leave(code, text)

    def _run(self) -> None:
        """Publishes a sign of life and looks at the other processes, every second, until this process is over."""
        import jax

        client = self.state.client
        key = f"{KEYS}{self.state.process_id}"
        for beat in itertools.count():
            # If the service does not answer, JAX aborts this process: `_abort_handler`.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                client.key_value_set(key, str(beat), allow_overwrite=True)
                self._look()
            if self.over.wait(POLL):
                break
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            client.key_value_set(key, OVER, allow_overwrite=True)

    def _look(self) -> None:
        """Reads the others' signs of life; ends this process if another one has failed, or was silent for too long."""
        messages = dict(self.state.client.key_value_dir_get(KEYS))
        self.answered = time.monotonic()
        failed = json.loads(messages.get(FAILED, "{}"))
        if self.over.is_set():
            return
        if failed and failed["process"] != self.state.process_id:
            place = f"process {failed['process']} of {self.state.num_processes}"
            self.leave(failed["code"], f"{place} failed, and this one ends: {failed['error']}")
        for number, before in self.signs.items():
            sign = messages.get(f"{KEYS}{number}", before)
            # After its normal end a process is never lost.
            if sign != before or sign == OVER:
                self.signs[number], self.heard[number] = sign, time.monotonic()
                self.counts[number] += 1
            elif time.monotonic() - self.heard[number] > SILENCE:
                self._lose(number)

    def _lose(self, number: int) -> NoReturn:
        """Ends this process with the error that process `number` is lost."""
        fact, remedy = "It was killed, or its host is lost", "Start all processes again with the same command"
        if self.folder is not None:
            fact = f"{fact}; what was finished is in {self.folder}"
            remedy = f"{remedy} and --out {self.folder}"
        error = LostProcessError(f"process {number} of {self.state.num_processes}", fact, remedy)
        self.leave(error.exit_code, f"error[{error.id}] {error}")

    @contextlib.contextmanager
    def _abort_handler(self) -> Iterator[None]:
        """Sets a handler for SIGABRT, which names the reason: JAX aborts this process if the first process is gone."""
        # The abort raises no exception, and Python's own handlers would run too late: nothing runs after `abort`.
        handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: self._on_abort())
        signal_of_c = ctypes.CDLL(None).signal
        signal_of_c.argtypes, signal_of_c.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
        before = signal_of_c(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
        try:
            yield
        finally:
            signal_of_c(signal.SIGABRT, before)

    def _on_abort(self) -> None:
        """Ends this process with the error that the first process is lost, if JAX aborts it for this reason."""
        if self.over.is_set():
            return
        # A process that hangs, is stopped or swapped out still accepts connections: its kernel does.
        is_gone = time.monotonic() - self.answered > SILENCE
        if not is_gone:
            host, _, port = self.state.coordinator_address.rpartition(":")
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=BRIEF).close()
            except OSError:
                is_gone = True
        if is_gone:
            self._lose(0)


_watches: list[Watch] = []
"""The watch of this process, if it is part of a cluster: an empty list, or a list of one."""


def end(code: int, text: str) -> NoReturn:
    """Ends this process at once, whatever its main thread does, with a last line; its run's other processes end, too.

    Nothing waits for threads: a compiler's would go on for minutes.
    """
    for watch in _watches:
        _briefly(functools.partial(watch.publish, code, text))
        watch.leave(code, text)
    _leave(code, text)


def _leave(code: int, text: str) -> NoReturn:
    """Ends this process at once, after flushing its output and writing a last line."""

    def write() -> None:
        sys.stdout.flush()
        if text:  # on a terminal it starts a new line, as a bar may be on this one
            sys.stderr.write(f"\n{text}\n" if sys.stderr.isatty() else f"{text}\n")
        sys.stderr.flush()

    _briefly(write)
    os._exit(code)


def _briefly(work: Callable[[], object]) -> None:
    """Runs work in a thread, and goes on without the thread if it hangs, as at a pipe that nobody reads."""
    thread = threading.Thread(target=work, daemon=True)
    with contextlib.suppress(RuntimeError):
        thread.start()
        thread.join(BRIEF)
        return
    work()  # Python 3.12 starts no thread while it ends
