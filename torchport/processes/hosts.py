"""The processes of one run, one on each host: how they find each other, agree, and end together.

Every process runs the same command over the same devices. The first one keeps the run's folder: it reads and writes
there, and sends the others what it read. It sends through JAX's coordination service, not through the devices: a
process may have to wait for hours, and a device that waits in a program hangs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from torchport import errors
from torchport.errors import BadValueError, MachineError, TorchportError
from torchport.processes.watch import POLL, Watch

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
CONNECT = 300
"""Seconds in which all processes must have started: JAX's default."""
PIECE = 2**20
"""Bytes of one message: gRPC takes 4 MiB at most by default."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """How a process finds the others; without an address JAX asks the cluster that it runs in."""

    coordinator: str | None = None  #: `host:port` of the first process.
    processes: int | None = None
    process: int | None = None  #: Which of them this is, from 0.


def cluster_of(
    distributed: bool, coordinator: str | None, processes: int | None, process: int | None
) -> Cluster | None:
    """Returns the cluster that the flags name, or raises if they conflict; None without a flag: a single process."""
    flags = {"--coordinator": coordinator, "--processes": processes, "--process": process}
    names = [flag for flag, value in flags.items() if value is not None]
    if distributed and names:
        raise BadValueError(
            "--distributed", f"{names[0]} is given too", "Leave one out: --distributed takes all from the cluster"
        )
    if not names:
        return Cluster() if distributed else None
    missing = [flag for flag in flags if flag not in names]
    if missing:
        raise BadValueError(
            names[0],
            f"It is given without {' and '.join(missing)}",
            "Give all three, or --distributed alone where JAX knows them",
        )
    assert coordinator is not None and processes is not None and process is not None
    name, _, port = coordinator.rpartition(":")
    if not name or not re.fullmatch(r"[1-9]\d{0,4}", port) or int(port) > 65535:
        raise BadValueError(
            f"--coordinator {coordinator}", "It is no host and port", "Name the first process's, such as 10.0.0.1:8476"
        )
    if process >= processes:
        raise BadValueError(
            f"--process {process}", f"There are {processes} processes", f"It must be 0 to {processes - 1}"
        )
    return Cluster(coordinator, processes, process)


def _state() -> Any:
    """Returns JAX's state of the processes; JAX's public functions would start the backend, which fixes that state."""
    from jax._src import distributed

    return distributed.global_state


def processes() -> int:
    """Returns how many processes run this together; 1 without a cluster."""
    return int(_state().num_processes)


def process() -> int:
    return int(_state().process_id)


def first() -> bool:
    """Returns whether this process keeps the folder."""
    return process() == 0


@contextlib.contextmanager
def joined(cluster: Cluster | None) -> Iterator[Watch]:
    """Runs the context together with the cluster's other processes; alone without one.

    If a process fails, the others end within seconds, with its error and its exit code. If one is killed, the others
    end with a `LostProcessError`: within `watch.SILENCE` and a few seconds, or at once if it was the first.

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
                # A program's error says only that a connection is gone: another process may have died.
                watch.settle()
            watch.over.set()
            # If all processes refuse at the same point, they leave in order: JAX waits for all of them at its end.
            if not (isinstance(error, TorchportError) and error.on_every_process):
                watch.fail(error)
            raise


def _connect(cluster: Cluster) -> None:
    """Connects this process with the others by JAX's coordination service, or raises; mutes all but the first."""
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
    if not first() and log.getEffectiveLevel() < logging.WARNING:
        log.setLevel(logging.WARNING)  # the first process speaks for all


_number = itertools.count()
"""Number of the next exchange: every process makes the same exchanges in the same order."""
_alone: list[bool] = []
"""Not empty while the first process works and the others only wait for it."""


def from_first(make: Callable[[], T]) -> T:
    """Returns, on every process, what the first one makes. If the first one refuses, all refuse.

    Args:
        make: Called by the first process alone. Returns what JSON can hold.
    """
    return pair_from_first(lambda: (make(), {}))[0]


def pair_from_first(make: Callable[[], tuple[T, Mapping[str, torch.Tensor]]]) -> tuple[T, Mapping[str, torch.Tensor]]:
    """Returns, on every process, what the first one makes, tensors among it, bit for bit; see `from_first`."""
    if processes() == 1 or _alone:
        return make()
    key = f"torchport/{next(_number)}"
    return _publish(key, make) if first() else _receive(key)


def _publish(
    key: str, make: Callable[[], tuple[T, Mapping[str, torch.Tensor]]]
) -> tuple[T, Mapping[str, torch.Tensor]]:
    """Returns what the first process makes, and sends it to the others; if that fails, sends and raises the error."""
    from safetensors.torch import save

    _alone.append(True)
    try:
        value, tensors = make()
    except TorchportError as error:
        error.on_every_process = True
        plain = {name: value for name, value in vars(error).items() if isinstance(value, bool | int | float | str)}
        _send(key, {"kind": type(error).__name__, "args": error.args, "culprit": plain}, b"")
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
    """Returns what the first process sent under a key, or raises the refusal that it sent."""
    from safetensors.torch import load

    header = json.loads(_get(key))
    if "kind" in header:
        error: TorchportError = getattr(errors, header["kind"])(*header["args"])
        vars(error).update(header["culprit"])
        raise error
    client = _state().client
    pieces = [
        client.blocking_key_value_get_bytes(f"{key}/{start}", 60_000) for start in range(0, header["bytes"], PIECE)
    ]
    return header["value"], load(b"".join(pieces))


def _get(key: str) -> str:
    """Returns the value that another process sets for a key; waits as long as that takes, and Ctrl-C ends the wait."""
    import jax

    while True:
        try:
            return str(_state().client.blocking_key_value_get(key, round(1000 * POLL)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def _all(mine: str) -> list[str]:
    key = f"torchport/{next(_number)}"
    _state().client.key_value_set(f"{key}/{process()}", mine)
    return [_get(f"{key}/{number}") for number in range(processes())]


def any_process(mine: bool) -> bool:
    """Returns whether something is true of any process; all processes must call this."""
    if processes() == 1 or _alone:
        return mine
    return "yes" in _all("yes" if mine else "no")


def check_same(what: Mapping[str, Any]) -> None:
    """Refuses processes that differ in what they run: they would wait for each other, or compute nonsense.

    Args:
        what: All that decides which programs run; what JSON can hold.
    """
    if processes() == 1:
        return
    for number, theirs in enumerate(map(json.loads, _all(json.dumps(dict(what), default=str)))):
        mine = json.loads(json.dumps(dict(what), default=str))
        differs = [key for key in sorted({*theirs, *mine}) if theirs.get(key) != mine.get(key)]
        if differs:
            key = differs[0]
            raise MachineError(
                f"process {process()}",
                f"Its {key} is {mine.get(key)!r}, and that of process {number} is {theirs.get(key)!r}",
                "Start every process with the same command, versions and checkpoint",
                key=key,
            )
