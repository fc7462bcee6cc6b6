"""What is said of an exception that leaves code of an upstream, of a family or of a patch: where, why, and the cure.

Such code runs while a port imports, loads, prepares, traces and runs a model. The frames of a traceback say whose the
exception is: that of the innermost frame outside the libraries. If that frame is torchport's own, it is a fault of
torchport, and stays a traceback. Upstream is what the card names, and what its patches change.

`frames` reads tracebacks, `cure` says what to do by the kind of the exception, and `explained` makes the error.
"""

import functools
import traceback

from torchport.compile.failure.cure import CURES, Failure
from torchport.compile.failure.frames import Owners as Owners
from torchport.compile.failure.frames import caller, culprit, frames, of_syntax, to_list
from torchport.errors import ForeignError
from torchport.patch.declared.replacement import Explained


def explained(owners: Owners) -> Explained:
    """Returns a context that turns exceptions of foreign code into errors, each with its line and its cure."""
    return Explained(functools.partial(_error_of, owners))


def _error_of(owners: Owners, exception: BaseException) -> ForeignError | None:
    """Returns the error for an exception of foreign code; None for torchport's own exceptions and a lack of memory."""
    causes = [exception]  # upstream wraps errors in errors that say less
    while (cause := causes[-1].__cause__) is not None and cause not in causes:
        causes.append(cause)
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
    listed = to_list(every, frame)
    more = f"{len(every) - len(listed)} more frames: "
    more += "its __cause__ has them" if owners.is_script else "torchport -v COMMAND"
    error.details = [
        *(one.text() for one in listed),
        f"  {failure.reason}  ({more})",
        *(entry.text.splitlines() if entry else ()),
    ]
    error.trace = "".join(traceback.format_exception(exception))
    return error
