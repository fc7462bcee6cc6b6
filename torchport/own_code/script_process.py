"""The process of `torchport exec`: the work in it before the first line of the script, and after the last."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import sys
from collections.abc import Sequence
from typing import Any, Literal, get_args

from torchport.config import machine
from torchport.config.card import Implementation
from torchport.config.pack import find_pack
from torchport.config.strategy import Axis
from torchport.errors import BadValueError, TorchportError, UnknownNameError, nearest
from torchport.own_code import PortDefaults, Session, applied
from torchport.patch.patch_set import unreached
from torchport.processes import script
from torchport.progress import log

_entered = contextlib.ExitStack()
"""The context of `applied`, which this process has entered for as long as it lives."""


@dataclasses.dataclass(frozen=True)
class Flags:
    """The command line of `torchport exec`; see `applied` and `PortDefaults` for its fields."""

    model: str
    words: Sequence[str]  #: The script and its arguments, or `-m` and a module.
    upstream_path: str | None = None
    backend: Literal["torchax", "original"] = "torchax"
    patches: Sequence[str] = ()
    strategy: str | None = None
    mesh: str | None = None  #: Sizes of the axes, `dp=2,tp=4`; by default one device.
    machine: str | None = None
    attention: Implementation | None = None
    strict: bool = False
    paths: Sequence[str] = ()


def run(flags: Flags) -> None:
    """Checks the flags, and replaces this process by the script's, which calls `start` first; does not return."""
    script.check(flags.words)
    # `axes_of` and `parse_machine` are called for their refusals alone: the script's process reads both flags again.
    axes_of(flags.mesh)
    if flags.machine is not None:
        machine.parse_machine(flags.machine, f"--machine {flags.machine}")
    if flags.backend == "original":
        for name in ("strategy", "mesh", "machine", "attention", "strict"):
            if (value := getattr(flags, name)) not in (None, False):
                place = f"--{name}" if value is True else f"--{name} {value}"
                raise BadValueError(place, "--backend original compiles nothing", "Leave one of the two out")
    # These names are checked here: the script's process reads them only when it compiles a network, late or never.
    if flags.strategy is not None:
        card, _ = find_pack(flags.paths).card(flags.model)
        if flags.strategy not in card.strategies:
            place, fact = f"--strategy {flags.strategy}", f"The card of '{flags.model}' has no such strategy"
            raise UnknownNameError(place, fact, nearest(flags.strategy, card.strategies), name=flags.strategy)
    known = get_args(Implementation)
    if flags.attention is not None and flags.attention not in known:
        place, fact = f"--attention {flags.attention}", "There is no such implementation"
        raise UnknownNameError(place, fact, nearest(flags.attention, known), name=flags.attention)
    arguments = {key: value for key, value in dataclasses.asdict(flags).items() if key != "words"}
    script.become(flags.words, "torchport.own_code.script_process:start", arguments)


def axes_of(text: str | None) -> dict[Axis, int] | None:
    """Returns the sizes of a mesh by axis for a value of `--mesh`: `{"dp": 2, "tp": 4}` for `dp=2,tp=4`. None if the
    flag is not given. Raises BadValueError for other text.
    """
    if text is None:
        return None
    mesh: dict[Any, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in ("dp", "sp", "tp") or axis in mesh or not size.isdecimal() or int(size) < 1:
            raise BadValueError(f"--mesh {text}", f"'{part}' is no axis with its size", "Write it as dp=2,tp=4")
        mesh[axis] = int(size)
    return mesh


def start(**arguments: Any) -> None:
    """Prepares the script's process before its first line: logs to stderr, gives JAX its devices, and puts the patches
    in force until the process ends. `arguments` are the fields of `Flags`, without `words`.
    """
    flags = Flags(words=(), **arguments)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)  # to this logger alone: all others are the script's to set up
    log.setLevel(logging.INFO)
    log.propagate = False
    choice = PortDefaults(flags.strategy, axes_of(flags.mesh), flags.attention, flags.machine, strict=flags.strict)
    choice.prepare()
    session = _entered.enter_context(
        applied(
            flags.model,
            patches=flags.patches,
            upstream_path=flags.upstream_path,
            backend=flags.backend,
            paths=flags.paths,
            choice=choice,
        )
    )
    atexit.register(_report, session)


def _report(session: Session) -> None:
    """Prints the errors of a script's patches after its end, and undoes the patches; the exit code stays as it is."""
    errors = unreached()
    unused = session.error_if_unused()
    # Python sets `sys.last_value` when an exception ends the script, perhaps before its imports.
    is_failed = hasattr(sys, "last_value")
    words = sys.orig_argv[2:]  # without `python script.py`, or `python -m`
    # A script prints its own help before it imports anything. `-h` may be a flag with a value, unless it is the last.
    asks_for_help = "--help" in words or words[-1:] == ["-h"]
    if unused is not None and not errors and not is_failed and not asks_for_help:
        errors = [unused]
    for error in errors:
        sys.stderr.write(f"{error.report()}\n")
    sys.stderr.flush()
    with contextlib.suppress(TorchportError):  # these errors are written already
        _entered.close()
