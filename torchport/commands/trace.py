"""`torchport trace`: the places that stop a job's networks from being traced, as text or JSON."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import click

from torchport.commands import options, terminal
from torchport.progress import size_text

if TYPE_CHECKING:
    from torchport.porting.trace import TraceReport

SHOWN = 10
"""How many constants are listed: the largest ones."""


@terminal.command("trace")
@options.model
@options.config("the card's demo")
@options.upstream_path
@click.option("--without-patches", is_flag=True, help="Without the card's patches: what upstream itself stops at.")
@options.overrides
@options.strict
@options.as_json
@options.paths
def command(without_patches: bool, as_json: bool, strict: bool, config: str | None, **given: Any) -> None:
    """Lists every place that stops the networks from being traced; the exit code is 1 if there is one.

    No weights are read. After a stopper the trace goes on with a value that it names. It also lists the constants of
    the programs, what makes a second program, and how many operators compute what PyTorch does.
    """
    terminal.log_to_stderr()
    from torchport.porting.trace import trace
    from torchport.task import Execution, Request

    request = Request(config=config or "demo", execution=Execution(strict=strict), **given)
    report = trace(request, patched=not without_patches)
    terminal.Answer(dataclasses.asdict(report), lines(report, patched=not without_patches)).say(as_json)
    sys.exit(1 if report.stoppers else 0)


def lines(report: TraceReport, patched: bool) -> list[str]:
    """Returns a trace as lines of text: stoppers, programs, operators, constants, stages left out, and a verdict."""
    text: list[str] = []
    for stopper in report.stoppers:
        often = f" ({stopper.times} times)" if stopper.times > 1 else ""
        text += [
            f"{stopper.id} {stopper.place}: {stopper.fact}{often}. {stopper.remedy}.",
            *(f"  {frame}" for frame in reversed(stopper.frames)),
            f"  ({stopper.folded} more frames of JAX, torch and torchport)",
            f"  assumed, to go on: {stopper.assumed}",
            *(f"  {line}" for line in stopper.entry.splitlines()),
        ]
    for program in report.programs:
        if not program.because:
            text.append(f"{program.stage}: one program, called {program.times} times")
        elif program.times:
            text.append(f"{program.stage}: another program, called {program.times} times: {program.because}")
        else:
            text.append(f"{program.stage}: another program {program.because}")
    text += [f"{stage}: {operators}" for stage, operators in report.operators.items()]
    if report.constants:
        total = sum(constant.bytes for constant in report.constants)
        text.append(f"constants: {len(report.constants)} tensors of the host, {size_text(total)}")
        for constant in report.constants[:SHOWN]:
            made = "" if constant.made == constant.used else f", made at {constant.made}"
            text.append(f"  {size_text(constant.bytes):>9}  {constant.dtype} {constant.shape} at {constant.used}{made}")
        more = len(report.constants) - SHOWN
        if more > 0:
            text.append(f"  and {more} smaller ones")
    text += [f"{stage}: not traced, {reason}" for stage, reason in report.skipped.items()]
    return [*text, _verdict_line(report, patched)]


def _verdict_line(report: TraceReport, patched: bool) -> str:
    """Returns the last line of a trace: `1 place stops denoise, decode with the card's patches`."""
    if not report.stages:
        return "no stage was traced"
    word = "with" if patched else "without"
    traced = f"{', '.join(report.stages)} {word} the card's patches"
    count = len(report.stoppers)
    if count == 0:
        return f"nothing stops {traced}"
    if count == 1:
        return f"1 place stops {traced}"
    return f"{count} places stop {traced}; after the first place, the trace goes on under the assumptions above"
