"""`torchport explain`: what every error means, out of the docstrings of their classes."""

from __future__ import annotations

import inspect

from torchport import errors


def page() -> str:
    """Returns the documentation of every error as Markdown, one section for each id."""
    parts = [
        "# Errors",
        "An error is one line, `error[ID] <place>: <what is>. <what must be, or the command to run>.` The exit code is "
        "2, or 130 after Ctrl-C. `torchport explain ID` prints one section of this page, and `torchport explain --all` "
        "all of it. Mistakes that are found together, as those of one file, have a line each. Below TP901 to TP906 "
        "stand the frames of the model's code, the exception's own message, and where it helps an entry to paste; "
        "`torchport -v COMMAND` prints the whole traceback first.",
    ]
    for kind in errors.kinds():
        group = kind.__bases__[0]
        above = "" if group is errors.TorchportError else f"\n\nA `{group.__name__}`: {_plain(group).splitlines()[0]}"
        parts.append(f"## {kind.id} {kind.__name__}\n\n{_plain(kind)}{above}")
    return "\n\n".join(parts) + "\n"


def _plain(kind: type[errors.TorchportError]) -> str:
    return inspect.getdoc(kind) or ""
