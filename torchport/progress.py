"""What a person sees: a progress bar for each long task, a log line for each event, tables, and sizes with units."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
log = logging.getLogger("torchport")
_waits: list[object] = []  # bars of one line, the innermost last


def track(items: Iterable[T], what: str, unit: str, total: int | None = None, done: int = 0) -> Iterator[T]:
    """Yields the items under a bar that shows seconds per item and the time left.

    The bar goes to a terminal alone. In a file, a log line says that the work began, unless `--quiet` is set.

    Args:
        what: The work, in the words of the path: `denoise`, `load transformer`.
        unit: The noun for an item: `step`, `tensor`, `frame`.
        total: How many items there are, where `len` does not say.
        done: How many were finished earlier, in a run that is being resumed.
    """
    from tqdm import tqdm

    enabled = log.isEnabledFor(logging.INFO)
    if enabled and not sys.stderr.isatty():
        log.info("%s ...", what)
    yield from tqdm(
        items,
        desc=what,
        unit=unit,
        total=total,
        initial=done,
        disable=not (enabled and sys.stderr.isatty()),
        dynamic_ncols=True,
        leave=True,
    )


def note(text: str) -> None:
    """Logs a text if standard error is no terminal, where no bar can show it."""
    if not sys.stderr.isatty():
        log.info("%s", text)


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Shows the seconds of a task of unknown length while the context lasts. An outer bar of this kind pauses."""
    from tqdm import tqdm

    if not (log.isEnabledFor(logging.INFO) and sys.stderr.isatty()):
        log.info("%s ...", what)
        yield
        return
    over = threading.Event()
    # `{bar}` is as many spaces as fill the line: they clear an outer bar, whose text may be longer.
    with tqdm(desc=what, bar_format="{desc}: {elapsed}{bar}", leave=False, dynamic_ncols=True, position=0) as bar:
        _waits.append(bar)

        def tick() -> None:
            """Redraws the bar twice a second. A notebook cannot go up a line: the innermost bar has the only one."""
            while not over.wait(0.5):
                if _waits[-1] is bar:
                    bar.refresh()

        clock = threading.Thread(target=tick, daemon=True)
        clock.start()
        try:
            yield
        finally:
            over.set()
            clock.join()
            _waits.remove(bar)


def table(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Returns rows of cells as lines in columns. The first `left` columns are flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = "<" * left + ">" * (len(widths) - left)
    template = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))  # "{:<9}  {:>4}"
    return [template.format(*row).rstrip() for row in rows]


def size_text(size: int) -> str:
    """Returns a number of bytes as a person reads it: `16.7 GiB`, `512.0 MiB`, `12 B`."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"
