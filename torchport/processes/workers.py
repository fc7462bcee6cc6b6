"""Several pieces of work at once, each in a thread that waits for a process; one that is refused is a result, too."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from torchport.errors import TorchportError
from torchport.progress import note, track

ItemT = TypeVar("ItemT")
FoundT = TypeVar("FoundT")

COMPILATION = 6 * 2**30
"""Bytes of host memory that one compilation of a large network is given room for."""


def default() -> int:
    """Returns how many compilations this machine has room for: two processors and `COMPILATION` each, one at least."""
    import psutil

    return max(1, min((os.cpu_count() or 1) // 2, psutil.virtual_memory().available // COMPILATION))


def each(
    work: Callable[[ItemT], FoundT], items: Sequence[ItemT], count: int, what: str, name: Callable[[ItemT], str]
) -> list[FoundT | TorchportError]:
    """Returns what the work makes of each item, in their order; of one that it refuses, the refusal.

    Args:
        work: Called in a thread.
        items: What it is called with.
        count: How many at once.
        what: What is being done, for the progress bar.
        name: Returns an item's name, for the line that says it is done where there is no bar.
    """
    found: dict[int, FoundT | TorchportError] = {}
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        waiting = {pool.submit(work, item): number for number, item in enumerate(items)}
        try:
            for done in track(concurrent.futures.as_completed(waiting), what, "plan", total=len(items)):
                number = waiting[done]
                try:
                    found[number] = done.result()
                except TorchportError as error:
                    found[number] = error
                end = "refused" if isinstance(found[number], TorchportError) else "done"
                note(f"{what}: {name(items[number])}: {end} ({len(found)} of {len(items)})")
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)  # or what has not begun would still be begun
            raise
    return [found[number] for number in range(len(items))]
