"""Runs several pieces of work at once, each in a thread that waits for a process; a refusal is a result, too."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from torchport.errors import TorchportError
from torchport.progress import note, track

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

COMPILATION = 6 * 2**30
"""Bytes of host memory that we reserve for one compilation of a large network."""


def default() -> int:
    """Returns how many compilations this machine has room for: two processors and `COMPILATION` each, one at least."""
    import psutil

    return max(1, min((os.cpu_count() or 1) // 2, psutil.virtual_memory().available // COMPILATION))


def each(
    work: Callable[[ItemT], ResultT], items: Sequence[ItemT], count: int, what: str, name: Callable[[ItemT], str]
) -> list[ResultT | TorchportError]:
    """Returns the result of the work for each item, in their order; if it refuses an item, the refusal.

    Args:
        work: Called in a thread.
        items: What it is called with.
        count: How many at once.
        what: What is being done, for the progress bar.
        name: Returns an item's name, for the line that says it is done where there is no bar.
    """
    results: dict[int, ResultT | TorchportError] = {}
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        waiting = {pool.submit(work, item): number for number, item in enumerate(items)}
        try:
            for done in track(concurrent.futures.as_completed(waiting), what, "plan", total=len(items)):
                number = waiting[done]
                try:
                    results[number] = done.result()
                except TorchportError as error:
                    results[number] = error
                end = "refused" if isinstance(results[number], TorchportError) else "done"
                note(f"{what}: {name(items[number])}: {end} ({len(results)} of {len(items)})")
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)  # or what has not begun would still be begun
            raise
    return [results[number] for number in range(len(items))]
