"""Makes the error of an exception: its line, its cure, the frames that lead there, an entry to paste."""

from __future__ import annotations

import functools
import traceback

from torchport.compile.failure.cure import CURES, Failure
from torchport.compile.failure.frames import OURS, Owners, caller, culprit, frames, of_syntax
from torchport.errors import ForeignError
from torchport.patch.declared.replacement import Explained

MOST_FRAMES = 2
"""Frames that are listed, the innermost ones."""


def explained(owners: Owners) -> Explained:
    """Returns a context that turns exceptions of foreign code into errors, each with its line and its cure."""
    return Explained(functools.partial(error_of, owners))


def error_of(owners: Owners, exception: BaseException) -> ForeignError | None:
    """Returns the error of an exception of foreign code. None for one of torchport's own."""
    causes = _causes(exception)
    if isinstance(causes[-1], MemoryError):  # no line of code is at fault
        return None
    every = frames(causes, owners)
    unparsed = of_syntax(causes[-1])
    every += [unparsed] if unparsed is not None else []
    frame = unparsed or culprit(causes[-1], every)
    if frame is None and owners.is_script:
        frame = caller(every, owners)
    if frame is None:
        return None
    if frame not in every:
        every.insert(0, frame)
    failure = Failure(owners, causes[-1], frame, every)
    kind = failure.kind()
    fact, remedy, entry = CURES[kind](failure)
    error = kind(frame.place, fact, remedy, owner=frame.owner)
    ours = [one for one in every if one.owner in OURS or one == frame]
    # A comprehension has a frame of its own, on its function's line.
    listed = [one for one, inner in zip(ours, [*ours[1:], None], strict=True) if one != inner][-MOST_FRAMES:]
    more = f"{len(every) - len(listed)} more frames: "
    more += "its __cause__ has them" if owners.is_script else "torchport -v COMMAND"
    error.details = [
        *(one.text() for one in listed),
        f"  {failure.reason}  ({more})",
        *(entry.text.splitlines() if entry else ()),
    ]
    error.trace = "".join(traceback.format_exception(exception))
    return error


def _causes(exception: BaseException) -> list[BaseException]:
    """Returns an exception and what it was raised from: upstream wraps errors in errors that say less."""
    causes = [exception]
    while (cause := causes[-1].__cause__) is not None and cause not in causes:
        causes.append(cause)
    return causes
