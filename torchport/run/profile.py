"""A trace of some denoising steps by JAX's profiler, in the run's folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax

from torchport.errors import OutputError
from torchport.progress import log
from torchport.task.execution import SKIPPED

T = TypeVar("T")
FOLDER = "profile"
"""The folder in a run's folder; each stage has one of its own in it."""


class Profile:
    """A trace of the steps of one stage after the first two.

    Args:
        folder: The run's.
        stage: The stage's name.
        count: How many steps.
    """

    def __init__(self, folder: Path, stage: str, count: int) -> None:
        self.folder = folder / FOLDER / stage
        self.stage = stage
        self.count = count

    def tracking(self, track: Callable[..., Iterable[T]]) -> Callable[..., Iterator[T]]:
        """Returns what iterates a loop's steps as `track` does, and traces some of them; see `family.Steps`."""
        return lambda items, done, total: self._traced(track(items, done=done, total=total), done)

    def _traced(self, items: Iterable[T], done: int) -> Iterator[T]:
        """Yields a loop's items, one a step, and traces while some of them are worked on.

        Args:
            items: The steps that are left.
            done: How many were taken in an earlier run; the first two of this one are not traced all the same.

        Raises:
            OutputError: The trace cannot be written.
        """
        items, first, taken = iter(items), SKIPPED + 1, 0
        try:
            with contextlib.ExitStack() as trace:
                for number, item in enumerate(items, 1):
                    if number == first:
                        trace.enter_context(_tracing(self.folder))
                    with _step(done + number) if number >= first else contextlib.nullcontext():
                        yield item
                    taken += number >= first
                    if taken == self.count:
                        break
        except GeneratorExit:  # a loop that is left for another network's
            self._note(done + first, taken)
            raise
        self._note(done + first, taken)
        yield from items

    def _note(self, first: int, taken: int) -> None:
        """Says where the trace is, and how to open it."""
        if not taken:
            log.warning("profile: '%s' took no more than %d steps, and none is traced", self.stage, SKIPPED)
            return
        files = sorted(self.folder.glob("plugins/profile/*/perfetto_trace.json.gz"))
        log.info("profile: steps %d to %d of '%s' are in %s", first, first + taken - 1, self.stage, self.folder)
        log.info("profile: open it with `xprof --logdir %s` (pip install xprof),", self.folder)
        log.info("profile: or %s at https://ui.perfetto.dev", files[-1])


def _step(number: int) -> Any:
    """Marks a step, as xprof groups what it shows."""
    return jax.profiler.StepTraceAnnotation("step", step_num=number)


@contextlib.contextmanager
def _tracing(folder: Path) -> Iterator[None]:
    """Traces what runs in the context, on the host and on the devices.

    Raises:
        OutputError: The trace cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)  # before the trace: JAX cannot start another after one that it lost
    except OSError as error:
        raise _unwritten(folder, error) from error
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's own calls would be most of the file, and of the time
    jax.profiler.start_trace(folder, create_perfetto_trace=True, profiler_options=options)
    try:
        yield
    finally:
        try:
            jax.profiler.stop_trace()
        except (OSError, jax.errors.JaxRuntimeError) as error:
            raise _unwritten(folder, error) from error


def _unwritten(folder: Path, error: Exception) -> OutputError:
    """Returns the refusal of a folder that takes no trace."""
    reason = " ".join(str(error).split())[:200].rstrip(".")
    remedy = "Free some space, or choose another folder with --out"
    return OutputError(str(folder), f"The trace cannot be written: {reason}", remedy)
