"""`torchport verify`: whether a port makes the same picture; and if not, where, and through which patch."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchport.commands import options, terminal
from torchport.errors import BadValueError, OutputError, PatchError
from torchport.files import atomic, folder

if TYPE_CHECKING:
    from torchport.commands import findings
    from torchport.task import Request
    from torchport.verify.report import Verification

ENDINGS = (".html", ".json", ".sarif")
"""Of the names of reports."""


@dataclasses.dataclass(frozen=True)
class VerifyFlags:
    """The flags of the command that are not those of a request."""

    against: str = "original"
    steps: str | None = None
    decode: bool = False
    floor: str | None = None
    capture: Path | None = None
    capture_limit: float | None = None
    strategy: str | None = None
    overrides: tuple[str, ...] = ()
    file: Path | None = None
    as_json: bool = False


@terminal.command("verify")
@options.model
@options.config()
@click.option("--against", default="original", show_default=True, metavar="original|run:DIR", help="What is compared.")
@click.option("--steps", metavar="N,N", help="Denoising steps to compare, from 0 [first and last of each network].")
@click.option("--decode", is_flag=True, help="Compare the decoder's frames, too, given the same latents.")
@click.option("--floor", metavar="MESH", help="Another mesh, as `dp=1,tp=4`: its drift is printed beside the port's.")
@click.option("--capture", type=options.FILE, metavar="DIR", help="Run the original alone, into DIR.")
@click.option("--capture-limit", type=float, metavar="GIB", help="The most that --capture writes, in GiB [2].")
@options.prompt("the card's own")
@options.negative_prompt
@options.seed
@options.checkpoint
@options.image
@options.upstream_path
@options.strategy
@options.overrides
@options.strict
@options.cache
@options.report(".html, .json or .sarif")
@options.as_json
@options.paths
def command(**given: Any) -> None:
    """Proves that a port makes the same picture as the original, or names the module and the patch at fault.

    The exit code is 1 for another picture, and 0 for the same one and for an unclear one. It is 2 where torchport
    refuses to run, and 130 after Ctrl-C.
    """
    terminal.log_to_stderr()
    from torchport.processes import stopping
    from torchport.task import Execution, Request

    flags, execution = options.taken(VerifyFlags, given), options.taken(Execution, given)
    overrides = options.with_fields(flags.overrides, strategy=flags.strategy)
    request = Request(**given, overrides=overrides, execution=execution)
    with stopping.unwinding():
        outcome, verification = answer(request, flags)
    outcome.say(flags.as_json)
    if flags.file is not None:
        assert verification is not None, "flags that have no verification were refused"
        write_report(flags.file, verification)
    sys.exit(outcome.exit_code)


def answer(request: Request, flags: VerifyFlags) -> tuple[terminal.Answer, Verification | None]:
    """Returns what a verification says, and the verification; None where the original is captured alone.

    Args:
        request: Of the port. Without a prompt it takes the card's own, which its tiny weights have.
    """
    _check(flags)
    from torchport.config.pack import find_pack
    from torchport.verify import reference, report
    from torchport.verify.verification import Options, capture_original, verify

    if request.prompt is None:
        request = dataclasses.replace(request, prompt=find_pack(request.paths).card(request.model)[0].tiny.prompt)
    steps = None if flags.steps is None else _steps(flags.steps)
    wanted = Options(steps, flags.decode, flags.floor, _reference(flags.against))
    if flags.capture is not None:
        with _named(f"--capture {flags.capture}"):
            atomic.make_folder(flags.capture)
        limit = reference.LIMIT if flags.capture_limit is None else int(flags.capture_limit * 2**30)
        words = capture_original(request, wanted, flags.capture, limit)
        lines = [f"captured in {flags.capture}: {words}"]
        return terminal.Answer({"capture": str(flags.capture), "holds": words}, lines), None
    result = verify(request, wanted)
    return terminal.Answer(report.data(result), report.lines(result), result.exit_code), result


def write_report(file: Path, verification: Verification) -> None:
    from torchport.commands import findings
    from torchport.verify import report

    with _named(f"--report {file}"):
        if file.suffix == ".html":
            report.write(file, verification)
        elif file.suffix == ".json":
            atomic.write_json(file, report.data(verification))
        else:
            findings.write_report(findings_of(verification), file, findings.FORMATS)


@contextlib.contextmanager
def _named(flag: str) -> Iterator[None]:
    """Names the flag in the refusal of a file or folder that cannot be written."""
    try:
        yield
    except OutputError as error:
        raise OutputError(flag, error.fact, "Free space there, or name another place") from error


def _check(flags: VerifyFlags) -> None:
    """Refuses flags that do not go together, and a report that cannot be written."""
    if flags.capture is not None:
        others = {"--against": flags.against != "original", "--floor": flags.floor, "--report": flags.file}
        for flag in (flag for flag, given in others.items() if given):
            raise BadValueError(flag, "--capture runs the original alone", "Leave one of the two out")
        limit = flags.capture_limit
        if limit is not None and not 0 < limit < 2**20:
            raise BadValueError(f"--capture-limit {limit:g}", "It is no size in GiB", "Give a number above 0")
    elif flags.capture_limit is not None:
        raise BadValueError("--capture-limit", "Nothing is captured", "Add --capture DIR")
    if flags.against != "original":
        for flag, given in {"--steps": flags.steps, "--decode": flags.decode}.items():
            if given:
                raise BadValueError(flag, "The capture says what is compared", f"Capture with {flag}, and leave it out")
    if flags.file is not None:
        if flags.file.suffix not in ENDINGS:
            fact = f"'{flags.file.suffix}' is the ending of no format"
            raise BadValueError(f"--report {flags.file}", fact, f"Known: {', '.join(ENDINGS)}")
        folder.check_writable("--report", flags.file)


def findings_of(verification: Verification) -> findings.Report:
    """Returns the patches at fault as findings, each at the entry's line; without one, what differs, at the job."""
    from torchport.commands import findings

    if verification.exit_code and not verification.causes:
        text = verification.first_line
        return findings.Report([findings.Finding(PatchError.id, f"{verification.config}:1", text, "", "verify")])
    found = findings.Report()
    for cause in verification.causes:
        without = "" if cause.without_it is None else f", and {cause.words(cause.without_it)} without it"
        words = f"{verification.verdict_words.capitalize()}: the error of {cause.unit} is {cause.words(cause.with_it)}"
        text = f"{cause.patch}: {words}{without}. It promises: {cause.promise}."
        found.findings.append(findings.Finding(PatchError.id, cause.place, text, cause.patch, "verify"))
    return found


def _reference(against: str) -> Path | None:
    if against == "original":
        return None
    kind, _, name = against.partition(":")
    if kind != "run" or not name:
        raise BadValueError(f"--against {against}", "It names neither", "Write original, or run:DIR of a --capture DIR")
    return Path(name)


def _steps(text: str) -> tuple[int, ...]:
    if re.fullmatch(r"\d{1,9}(,\d{1,9})*", text) is None:
        raise BadValueError(f"--steps {text}", "It is no list of steps", "Write the numbers of steps, from 0: 0,1,25")
    return tuple(sorted({int(part) for part in text.split(",")}))
