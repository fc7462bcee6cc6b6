"""`torchport plan`: the plan of one job, or with --sweep those of all strategies and meshes."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchport.commands import options, terminal
from torchport.errors import BadValueError
from torchport.files import folder

if TYPE_CHECKING:
    from torchport.task import Request


@dataclasses.dataclass(frozen=True)
class PlanFlags:
    """The flags of the command that are no fields of a `Request`."""

    topology: str | None = None
    strategy: str | None = None
    sweep: bool = False
    jobs: int | None = None
    overrides: tuple[str, ...] = ()
    scores: str | None = None
    stage: str | None = None
    file: Path | None = None
    xla_flags: str | None = None
    strict: bool = False
    keep: Path | None = None
    as_json: bool = False


@terminal.command("plan")
@options.model
@options.config(published="always")
@click.option(
    "--topology",
    metavar="NAME",
    help="The TPU slice, such as v6e:2x4; it may be absent [the config's machine].",
)
@options.strategy
@click.option("--sweep", is_flag=True, help="Compare all strategies and meshes of the slice in one table.")
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Compilations at once [by processors and memory].")
@options.upstream_path
@options.overrides
@click.option("--scores", type=click.Choice(["bounded", "any"]), help="Assume bounded scores, or any [bounded].")
@click.option("--stage", metavar="denoise|decode|all", help="Compile one stage alone [all with a network].")
@options.xla_flags
@click.option("--keep", type=options.FILE, metavar="DIR", help="Keep the plan and the dump.")
@options.report("an HTML page")
@options.strict
@options.as_json
@options.paths
def command(**given: Any) -> None:
    """Tells, without a TPU, whether a job fits on a slice and how fast it should be; the exit code is 1 if not."""
    terminal.log_to_stderr()
    from torchport.task import Execution, Request

    flags = options.call_with(PlanFlags, given)
    overrides = options.with_fields(flags.overrides, strategy=flags.strategy)
    request = Request(**given, overrides=overrides, execution=Execution(xla_flags=flags.xla_flags, strict=flags.strict))
    outcome = answer(request, flags, shlex.join(["torchport", *sys.argv[1:]]))
    outcome.say(flags.as_json)
    sys.exit(outcome.exit_code)


def answer(request: Request, flags: PlanFlags, line: str) -> terminal.Answer:
    """Returns the plan or the sweep; with --report, also writes the HTML page, which shows the command `line`."""
    if flags.file is not None:
        folder.check_writable("--report", flags.file)
    if flags.sweep and flags.strategy is not None:
        raise BadValueError(f"--strategy {flags.strategy}", "A sweep takes every strategy", "Leave out one of the two")
    if flags.sweep:
        for name, value in {"--stage": flags.stage, "--report": flags.file}.items():
            if value is not None:
                fact = f"{name} is given, and a sweep is a table of denoising steps"
                raise BadValueError("torchport plan --sweep", fact, "Leave it out")
    if flags.jobs is not None and not flags.sweep:
        raise BadValueError(f"--jobs {flags.jobs}", "There is one plan to make", "Add --sweep, or leave it out")
    from torchport.plan import plan_report, planning, sweep

    bounded = flags.scores != "any"
    if flags.sweep:
        swept = sweep.sweep(request, flags.topology, flags.keep, bounded, flags.jobs)
        return terminal.Answer(sweep.data(swept), sweep.lines(swept))
    job = planning.plan(request, flags.topology, flags.keep, bounded, stages=(flags.stage,) if flags.stage else ())
    if flags.file is not None:
        plan_report.write(flags.file, job, line)
    return terminal.Answer(job.model_dump(mode="json"), plan_report.lines(job), exit_code=int(not job.fits))
