"""`torchport plan`: one job's plan, or a sweep over strategies and meshes, as the flags say."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torchport.errors import BadValueError
from torchport.files import folder
from torchport.plan import plan, report, sweep
from torchport.task import Execution, Request


@dataclasses.dataclass(frozen=True)
class Flags:
    """The flags of the command; None, False and () are those that were not given."""

    model: str
    config: str
    topology: str | None = None
    strategy: str | None = None
    sweep: bool = False
    jobs: int | None = None
    upstream_path: Path | None = None
    overrides: tuple[str, ...] = ()
    scores: str | None = None
    stage: str | None = None
    report: Path | None = None
    xla_flags: str | None = None
    keep: Path | None = None
    paths: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the command prints: the same as data and as text, and whether everything fits."""

    data: dict[str, Any]
    lines: list[str]
    fits: bool = True


def answer(flags: Flags, command: str) -> Answer:
    """Returns what the flags ask for; a page, if one is asked for, has been written.

    Args:
        flags: Those of the command line.
        command: The command line itself, which the page names.

    Raises:
        BadValueError: Flags that do not go together.
        OutputError: A file that cannot be written.
        TorchportError: Whatever the job is refused for.
    """
    if flags.report is not None:
        folder.check_writable("--report", flags.report)
    _check(flags)
    overrides = (*flags.overrides, f"strategy={flags.strategy}") if flags.strategy else flags.overrides
    place = None if flags.upstream_path is None else str(flags.upstream_path)
    how = Execution(xla_flags=flags.xla_flags)
    request = Request(
        flags.model, flags.config, paths=flags.paths, upstream_path=place, overrides=overrides, execution=how
    )
    bounded = flags.scores != "any"
    if flags.sweep:
        swept = sweep.sweep(request, flags.topology, flags.keep, bounded, flags.jobs)
        return Answer(sweep.data(swept), sweep.lines(swept))
    job = plan.plan(request, flags.topology, flags.keep, bounded, stages=(flags.stage,) if flags.stage else ())
    if flags.report is not None:
        report.write(flags.report, job, command)
    return Answer(job.model_dump(mode="json"), report.lines(job), job.fits)


def _check(flags: Flags) -> None:
    """Refuses flags that nothing would read."""
    if flags.sweep and flags.strategy is not None:
        raise BadValueError(f"--strategy {flags.strategy}", "A sweep takes every strategy", "Leave out one of the two")
    for name in ("stage", "report"):
        if flags.sweep and getattr(flags, name) is not None:
            fact = f"--{name} is given, and a sweep is a table of denoising steps"
            raise BadValueError("torchport plan --sweep", fact, "Leave it out")
    if flags.jobs is not None and not flags.sweep:
        raise BadValueError(f"--jobs {flags.jobs}", "There is one plan to make", "Add --sweep, or leave it out")
