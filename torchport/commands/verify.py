"""`torchport verify`: whether a port makes the same picture; and if not, where, and through which patch."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from torchport.config.pack import find_pack
from torchport.errors import BadValueError
from torchport.files import folder
from torchport.task import Request
from torchport.verify import report
from torchport.verify.facts import Verification
from torchport.verify.verification import Options, verify


@dataclasses.dataclass(frozen=True)
class Flags:
    """The flags of the command that are not those of `torchport run`."""

    steps: str | None = None
    against: str = "original"
    capture: Path | None = None
    decode: bool = False
    floor: str | None = None
    report: Path | None = None


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the command prints, as data and as text, and its exit code."""

    data: dict[str, Any]
    lines: list[str]
    exit_code: int


def answer(request: Request, flags: Flags) -> Answer:
    """Returns what a verification says; a report, if one is asked for, has been written.

    Args:
        request: Of the port. Without a prompt it takes the card's own, which its tiny weights have.
        flags: What is verified.

    Raises:
        TorchportError: Flags that do not go together; whatever a run refuses.
    """
    if flags.report is not None:
        folder.check_writable("--report", flags.report)
    if request.prompt is None:
        request = dataclasses.replace(request, prompt=find_pack(request.paths).card(request.model)[0].tiny.prompt)
    steps = None if flags.steps is None else _steps(flags.steps)
    options = Options(steps, flags.decode, flags.floor, flags.capture, _reference(flags.against))
    verification: Verification = verify(request, options)
    if flags.report is not None:
        report.write(flags.report, verification)
    return Answer(report.data(verification), report.lines(verification), verification.exit_code)


def _reference(against: str) -> Path | None:
    """Returns the folder of `run:DIR`; None for the original.

    Raises:
        BadValueError: It is something else.
    """
    if against == "original":
        return None
    kind, _, name = against.partition(":")
    if kind != "run" or not name:
        raise BadValueError(f"--against {against}", "It names neither", "Write original, or run:DIR of a --capture DIR")
    return Path(name)


def _steps(text: str) -> tuple[int, ...]:
    """Returns the steps that `0,1,25` names, in order.

    Raises:
        BadValueError: It is something else.
    """
    if re.fullmatch(r"\d+(,\d+)*", text) is None:
        raise BadValueError(f"--steps {text}", "It is no list of steps", "Write the numbers of steps, from 0: 0,1,25")
    return tuple(sorted({int(part) for part in text.split(",")}))
