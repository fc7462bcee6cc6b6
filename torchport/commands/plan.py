"""`torchport plan`: one job's plan, a sweep over strategies and meshes, or the calibration, as the flags say."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torchport.errors import BadValueError
from torchport.files import folder
from torchport.plan import calibrate, plan, report, sweep
from torchport.task import Execution, Request


@dataclasses.dataclass(frozen=True)
class Flags:
    """The flags of the command; None, False and () are those that were not given."""

    model: str | None = None
    config: str | None = None
    topology: str | None = None
    strategy: str | None = None
    sweep: bool = False
    calibrate: bool = False
    write: Path | None = None
    jobs: int | None = None
    upstream_path: Path | None = None
    overrides: tuple[str, ...] = ()
    scores: str | None = None
    stage: str | None = None
    report: Path | None = None
    xla_flags: str | None = None
    keep: Path | None = None
    paths: tuple[str, ...] = ()


NAMES = {"overrides": "set", "upstream_path": "upstream-path", "xla_flags": "xla-flags"}
"""What flags are called where their fields are called otherwise."""
OF_CALIBRATION = ("calibrate", "write", "jobs", "paths")


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
        BadValueError: Flags that do not go together, or are missing.
        OutputError: A file that cannot be written.
        TorchportError: Whatever the job is refused for.
    """
    if flags.report is not None:
        folder.check_writable("--report", flags.report)
    _check(flags)
    if flags.calibrate:
        if flags.write is not None:
            folder.check_writable("--write", flags.write)
        outcome = calibrate.calibrate(flags.paths, flags.jobs)
        if flags.write is not None:
            calibrate.write(flags.write, outcome)
        return Answer(calibrate.data(outcome), calibrate.lines(outcome))
    assert flags.model is not None and flags.config is not None
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
    """Refuses flags that nothing would read, and those that are missing."""
    names = [field.name for field in dataclasses.fields(flags) if getattr(flags, field.name) not in (None, False, ())]
    if flags.calibrate:
        unread = [name for name in names if name not in OF_CALIBRATION]
        if unread:
            fact = f"{_flag(unread[0])} is given, and the published steps say themselves what is planned"
            raise BadValueError("torchport plan --calibrate", fact, "Leave it out")
        return
    if flags.write is not None:
        raise BadValueError(f"--write {flags.write}", "There is no factor to write", "Add --calibrate")
    if flags.sweep and flags.strategy is not None:
        raise BadValueError(f"--strategy {flags.strategy}", "A sweep takes every strategy", "Leave out one of the two")
    for name in ("stage", "report"):
        if flags.sweep and name in names:
            fact = f"{_flag(name)} is given, and a sweep is a table of denoising steps"
            raise BadValueError("torchport plan --sweep", fact, "Leave it out")
    if flags.jobs is not None and not flags.sweep:
        raise BadValueError(f"--jobs {flags.jobs}", "There is one plan to make", "Add --sweep, or leave it out")
    missing = [name for name in ("model", "config") if name not in names]
    if missing:
        raise BadValueError("torchport plan", f"--{missing[0]} is missing", f"Add --{missing[0]}, or --calibrate")


def _flag(name: str) -> str:
    return f"--{NAMES.get(name, name)}"
