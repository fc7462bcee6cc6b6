"""One call in a fresh Python process: the only door through which torchport starts one.

The process imports what this one does, and nothing of the current folder (`-P`, see `trusted_path`). Arguments and
result go through files in a folder that only this user can read: upstream may print what it likes. The process ends
when this one does, however this one ends.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import importlib
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torchport import processes
from torchport.errors import TorchportError
from torchport.files import atomic
from torchport.progress import note, track

_CODE = "import sys; sys.path[:] = {path!r}; from torchport.processes import child; child.answer({folder!r}, {parent})"
_EXCEPTION = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception)(?::|$)")
_REQUEST = "request"
_RESULT = "result"
_REFUSAL = "refusal"
PAUSE = 0.1
"""Seconds between two looks at whether a process is to be stopped."""


class ChildStoppedError(Exception):
    """A child process was killed because its `stop` event was set."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of a process that left no answer."""

    code: int  #: Its exit code; minus the signal's number if a signal ended the process.
    stderr: str

    def __str__(self) -> str:
        """Returns a clause that follows the process's name, as "ended with exit code 7 and said: nothing"."""
        clause = f"ended with exit code {self.code}"
        if self.code < 0:
            name = signal.Signals(-self.code).name if -self.code in list(signal.Signals) else f"signal {-self.code}"
            clause = f"was killed by {name}"
            if self.code == -signal.SIGKILL:
                clause += ", as the system does where memory runs out,"
        return f"{clause} and said: {last_words(self.stderr)}"


def last_words(stderr: str) -> str:
    """Returns the reason of a process's end, from its stderr: the last line that names an exception, such as
    `"ValueError: the cause"` (JAX may write more below it), or else the last line.
    """
    lines = stderr.strip().splitlines() or ["nothing"]
    exceptions = [line for line in lines if _EXCEPTION.match(line)]
    return (exceptions or lines)[-1].strip()[:300].rstrip(".")


def call(
    function: str,
    *arguments: Any,
    ended: Callable[[Ended], TorchportError],
    environment: Mapping[str, str] | None = None,
    first: Sequence[Path] = (),
    stop: threading.Event | None = None,
) -> Any:
    """Calls a function in a new process, and returns its result.

    Args:
        function: `package.module:function`.
        *arguments: The function's arguments. They and the result must be objects that `pickle` can carry.
        ended: Returns the refusal of a process that ended without an answer.
        environment: Variables to set in the process, beside those of this process.
        first: Folders that are searched before all others for imports.
        stop: When it is set, the process is killed, and ChildStoppedError raised.
    """
    root = str(Path(__file__).resolve().parents[2])
    trusted = processes.trusted_path(sys.path)
    # The process must import the same torchport as this process, even if torchport lies in the current folder.
    folders = [] if root in trusted else [root]
    entries = [*(str(folder.absolute()) for folder in first), *folders, *trusted]
    variables = {**os.environ, **(environment or {})}
    search_path = processes.without_empty(variables.pop("PYTHONPATH", ""))
    with atomic.scratch() as folder:
        (folder / _REQUEST).write_bytes(pickle.dumps((function, arguments)))
        code = _CODE.format(path=entries, folder=str(folder), parent=os.getpid())
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            env=variables | ({"PYTHONPATH": search_path} if search_path else {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
        end = _wait_for_end(process, stop)
        # Safe to unpickle: nobody else can write to this folder.
        if (folder / _REFUSAL).exists():
            raise pickle.loads((folder / _REFUSAL).read_bytes())
        if (folder / _RESULT).exists():
            return pickle.loads((folder / _RESULT).read_bytes())
    raise ended(end) from ChildProcessError(end.stderr)


def _wait_for_end(process: subprocess.Popen[str], stop: threading.Event | None) -> Ended:
    """Waits for the end of a process. Kills the process if `stop` is set (ChildStoppedError), or at any exception."""
    with process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    _, stderr = process.communicate(timeout=None if stop is None else PAUSE)
                    return Ended(process.returncode, stderr)
                if stop is not None and stop.is_set():
                    raise ChildStoppedError
        except BaseException:
            process.kill()
            raise


def answer(name: str, parent: int) -> None:
    """Runs in the child: calls the function of the request in folder `name`, and writes its result or refusal there."""
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    folder = Path(name)
    function, arguments = pickle.loads((folder / _REQUEST).read_bytes())
    module, _, attribute = function.partition(":")
    try:
        result, file = getattr(importlib.import_module(module), attribute)(*arguments), _RESULT
    except TorchportError as error:
        result, file = error, _REFUSAL
    # Renamed once it is whole: the process may be killed while it writes.
    (folder / "unfinished").write_bytes(pickle.dumps(result))
    (folder / "unfinished").rename(folder / file)


def _end_with_parent(parent: int) -> None:
    """Waits for the end of the parent, and then ends this process, which nobody waits for any more."""
    # A signal at the parent's death (`PR_SET_PDEATHSIG`) is Linux's alone. A pipe to the parent would not tell: other
    # processes that the parent forks keep it open.
    while os.getppid() == parent:
        time.sleep(PAUSE)
    os._exit(1)


ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

COMPILATION = 6 * 2**30
"""Bytes of host memory that we reserve for one compilation of a large network."""


def default_workers() -> int:
    """Returns how many compilations this machine has room for, at least 1: each takes two CPUs and `COMPILATION`."""
    import psutil

    return max(1, min((os.cpu_count() or 1) // 2, psutil.virtual_memory().available // COMPILATION))


def in_parallel(
    work: Callable[[ItemT], ResultT], items: Sequence[ItemT], count: int, title: str, name: Callable[[ItemT], str]
) -> list[ResultT | TorchportError]:
    """Returns each item's result, or its refusal, in their order; `count` items at a time, each in a thread. The bar
    and the log name the whole work by `title`, and an item by `name(item)`.
    """
    results: dict[int, ResultT | TorchportError] = {}
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        waiting = {pool.submit(work, item): number for number, item in enumerate(items)}
        try:
            for done in track(concurrent.futures.as_completed(waiting), title, unit="plan", total=len(items)):
                number = waiting[done]
                try:
                    results[number] = done.result()
                except TorchportError as error:
                    results[number] = error
                end = "refused" if isinstance(results[number], TorchportError) else "done"
                note(f"{title}: {name(items[number])}: {end} ({len(results)} of {len(items)})")
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)  # else the pool would start the waiting items
            raise
    return [results[number] for number in range(len(items))]
