"""`torchport verify`: whether a port makes the original's picture; if not, the module and the patch at fault."""

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
"""The endings that the file of `--report` may have."""


@dataclasses.dataclass(frozen=True)
class VerifyFlags:
    """The flags of the command that are no fields of a `Request`."""

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

    flags, execution = options.call_with(VerifyFlags, given), options.call_with(Execution, given)
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
    """Returns the command's output, and the verification; None for the latter if only the original is captured.

    A request without a prompt gets the prompt of the card's tiny weights.
    """
    _check_combination(flags)
    from torchport.config.pack import find_pack
    from torchport.verify import reference, report
    from torchport.verify.verification import Options, capture_original, verify

    if request.prompt is None:
        request = dataclasses.replace(request, prompt=find_pack(request.paths).card(request.model)[0].tiny.prompt)
    steps = None
    if flags.steps is not None:
        if re.fullmatch(r"\d{1,9}(,\d{1,9})*", flags.steps) is None:
            remedy = "Write the numbers of steps, from 0: 0,1,25"
            raise BadValueError(f"--steps {flags.steps}", "It is no list of steps", remedy)
        steps = tuple(sorted({int(step) for step in flags.steps.split(",")}))
    kind, _, name = flags.against.partition(":")  # `original`, or `run:DIR`
    if flags.against != "original" and (kind != "run" or not name):
        remedy = "Write original, or run:DIR of a --capture DIR"
        raise BadValueError(f"--against {flags.against}", "It names neither", remedy)
    chosen = Options(steps, flags.decode, flags.floor, reference=Path(name) if kind == "run" else None)
    if flags.capture is not None:
        with _naming(f"--capture {flags.capture}"):
            atomic.make_folder(flags.capture)
        limit = reference.LIMIT if flags.capture_limit is None else int(flags.capture_limit * 2**30)
        words = capture_original(request, chosen, flags.capture, limit)
        lines = [f"captured in {flags.capture}: {words}"]
        return terminal.Answer({"capture": str(flags.capture), "holds": words}, lines), None
    result = verify(request, chosen)
    return terminal.Answer(report.data(result), report.lines(result), result.exit_code), result


def write_report(file: Path, verification: Verification) -> None:
    """Writes a verification to a file as HTML, JSON or SARIF, by the file's ending."""
    from torchport.commands import findings
    from torchport.verify import report

    with _naming(f"--report {file}"):
        if file.suffix == ".html":
            atomic.write_text(file, report.page_of(verification))
        elif file.suffix == ".json":
            atomic.write_json(file, report.data(verification))
        else:
            findings.write_report(findings_of(verification), file, findings.FORMATS)


@contextlib.contextmanager
def _naming(flag: str) -> Iterator[None]:
    """Makes the flag the place of an `OutputError`, for the length of a `with`."""
    try:
        yield
    except OutputError as error:
        raise OutputError(flag, error.fact, "Free space there, or name another place") from error


def _check_combination(flags: VerifyFlags) -> None:
    """Raises if flags do not go together, or if the report cannot be written."""
    if flags.capture is not None:
        others = {"--against": flags.against != "original", "--floor": flags.floor, "--report": flags.file}
        for flag, is_given in others.items():
            if is_given:
                raise BadValueError(flag, "--capture runs the original alone", "Leave one of the two out")
        limit = flags.capture_limit
        if limit is not None and not 0 < limit < 2**20:
            raise BadValueError(f"--capture-limit {limit:g}", "It is no size in GiB", "Give a number above 0")
    elif flags.capture_limit is not None:
        raise BadValueError("--capture-limit", "Nothing is captured", "Add --capture DIR")
    if flags.against != "original":
        for flag, is_given in {"--steps": flags.steps, "--decode": flags.decode}.items():
            if is_given:
                raise BadValueError(flag, "The capture says what is compared", f"Capture with {flag}, and leave it out")
    if flags.file is not None:
        if flags.file.suffix not in ENDINGS:
            fact = f"'{flags.file.suffix}' is the ending of no format"
            raise BadValueError(f"--report {flags.file}", fact, f"Known: {', '.join(ENDINGS)}")
        folder.check_writable("--report", flags.file)


def findings_of(verification: Verification) -> findings.Report:
    """Returns a finding for each patch at fault. If a bad verdict has none, it is one with the verdict's line."""
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
