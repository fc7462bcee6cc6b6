"""The output folder of a run: made, and locked while the run writes to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from torchport.files import atomic
from torchport.processes import hosts


@contextlib.contextmanager
def output_folder(folder: Path) -> Iterator[None]:
    """Makes the output folder and locks it for this run; removes it again if an error leaves it empty."""
    new = [path for path in (folder, *folder.parents) if not path.exists()] if hosts.first() else []
    hosts.from_first(lambda: atomic.make_folder(folder))
    lock = contextlib.ExitStack()
    try:
        with lock:
            hosts.from_first(lambda: lock.enter_context(atomic.locked(folder)))
            yield
    except BaseException:
        # A folder that cannot be removed stays: the first error matters more.
        with contextlib.suppress(OSError):
            for path in new:
                path.rmdir()
        raise
