"""`torchport run`: makes a video, or runs one stage of it; with --prompts, makes many."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchport.commands import options, terminal
from torchport.errors import BadValueError

if TYPE_CHECKING:
    from torchport.processes.hosts import Cluster
    from torchport.run.journey import Summary
    from torchport.task import Request


def _steps(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Returns the number in a value of --profile, `steps=2`, or raises; None if the flag was not given."""
    if value is None:
        return None
    name, _, digits = value.partition("=")
    if name != "steps" or not re.fullmatch(r"[1-9]\d{0,5}", digits):
        raise BadValueError(f"--profile {value}", "It is no number of steps", "Write --profile steps=2")
    return int(digits)


@terminal.command("run")
@options.model
@options.config(published="named")
@options.prompt("required for the stage encode")
@click.option(
    "--prompts",
    type=options.FILE,
    metavar="FILE",
    help="Many videos: a line of JSON for each, with its prompt. Each gets a folder in --out.",
)
@click.option(
    "--together",
    type=click.IntRange(1),
    metavar="N",
    help="With --prompts: videos that go through a stage before the next stage is loaded [4].",
)
@options.negative_prompt
@options.seed
@options.checkpoint
@options.image
@options.upstream_path
@click.option("--out", type=options.FILE, metavar="DIR", help="Output folder [outputs/<run>].")
@click.option("--inputs", type=options.FILE, metavar="DIR", help="The folder with earlier artefacts [--out].")
@click.option("--stage", default="all", show_default=True, metavar="encode|denoise|decode|all", help="Stages to run.")
@options.backend
@options.strategy
@options.machine
@options.overrides
@click.option("--jit/--no-jit", default=True, help="Compile networks, or run op by op and name what makes NaN [yes].")
@options.xla_flags
@click.option("--profile", callback=_steps, metavar="steps=N", help="Trace N steps after the first two.")
@click.option("--memory", is_flag=True, help="Print the devices' memory after each stage.")
@options.strict
@options.cache
@options.paths
@click.option("--distributed", is_flag=True, help="On several hosts that JAX finds: a TPU slice, Slurm, Kubernetes.")
@click.option("--coordinator", metavar="HOST:PORT", help="On several hosts: the address of process 0.")
@click.option("--processes", type=click.IntRange(1), metavar="N", help="On several hosts: the number of processes.")
@click.option("--process", type=click.IntRange(0), metavar="I", help="On several hosts: this process's number, from 0.")
@click.option("-q", "--quiet", is_flag=True, help="Print only errors and the path of the video.")
@click.option("-v", "--verbose", is_flag=True, help="Print every patch, upstream's own log, and whole tracebacks.")
def command(
    prompts: Path | None,
    together: int | None,
    strategy: str | None,
    machine: str | None,
    overrides: tuple[str, ...],
    quiet: bool,
    verbose: bool,
    **given: Any,
) -> None:
    """Makes a video, or runs one stage of it; with --prompts, makes many."""
    terminal.log_to_stderr(quiet, verbose)
    from torchport.processes import hosts
    from torchport.run.path import run
    from torchport.task import Execution, Request

    overrides = options.with_fields(overrides, strategy=strategy, machine=machine)
    cluster = options.call_with(hosts.cluster_of, given)
    execution = options.call_with(Execution, given)
    original = given["backend"] == "original"
    if execution.strict and original:
        raise BadValueError("--strict", "--backend original calls PyTorch's own operators", "Leave one of the two out")
    request = Request(**given, overrides=overrides, execution=execution)
    if prompts is not None:
        sys.exit(_make_series(prompts, request, together, quiet, cluster))
    if together is not None:
        raise BadValueError(f"--together {together}", "There is no --prompts", "Add it, or leave this out")
    summary = run(request, cluster)
    if hosts.is_first():
        terminal.say(lines(summary, quiet))


def lines(summary: Summary, quiet: bool = False) -> list[str]:
    """Returns the report of a run: seconds of each stage, and at last the path of the video or the output folder."""
    from torchport.config.card import DENOISING
    from torchport.save import CONTACT_SHEET

    place = str(summary.video or summary.folder)
    if quiet:
        return [place]
    stages = dict.fromkeys(key.split()[0] for key in summary.seconds)  # a key is `denoise run`
    width = max([8, *map(len, stages)])
    text = [""]
    for stage in stages:
        verbs = {key.split()[1]: seconds for key, seconds in summary.seconds.items() if key.startswith(stage + " ")}
        shares = ", ".join(f"{verb} {seconds:.1f}" for verb, seconds in verbs.items() if seconds >= 0.05)  # else 0.0
        text.append(f"{stage:{width}} {sum(verbs.values()):7.1f} s   ({shares})")
        if stage in summary.operators:
            text.append(f"{'':{width}}           {summary.operators[stage]}")
    if summary.steps:
        running = sum(summary.seconds.get(f"{stage} run", 0.0) for stage in DENOISING)
        text.append(f"{'':{width}} {running / summary.steps:7.2f} s/step")
    if summary.seconds:
        clip: dict[str, float] = {}  # by the parts of a clip that `torchport plan` shows
        for key, value in summary.seconds.items():
            stage, verb = key.split()
            part = {"run": stage, "save": "write", "shard": "load"}.get(verb, verb)
            clip[part] = clip.get(part, 0.0) + value
        shares = ", ".join(f"{part} {value:.1f}" for part, value in clip.items() if value >= 0.05)
        text.append(f"{'clip':{width}} {sum(summary.seconds.values()):7.1f} s   ({shares})")
    if summary.upstream is not None:
        text.append(str(summary.upstream))
    sheet = summary.folder / CONTACT_SHEET
    text.append("")
    if summary.video and sheet.exists():
        text.append(f"{sheet}: frames of it, side by side")
    return [*text, place]


def _make_series(file: Path, request: Request, together: int | None, quiet: bool, cluster: Cluster | None) -> int:
    """Makes a video for each line of a file, prints a table of them, and returns the exit code: 1 if one failed."""
    from torchport.processes import hosts
    from torchport.run import series

    place = f"--prompts {file}"
    if request.prompt is not None:
        raise BadValueError(place, "--prompt is given too", "Leave one out: each line of the file has a prompt")
    if request.stage != "all" or request.inputs is not None:
        flag = "--inputs" if request.inputs is not None else f"--stage {request.stage}"
        raise BadValueError(place, f"{flag} is given too", "Leave it out: each video goes through all stages")
    if request.out is None:
        raise BadValueError(place, "There is no --out", "Name the folder that has, or gets, a folder for each video")
    videos = series.accepted(request, series.read_prompts(file))
    try:
        sheet = series.make(videos, request.out, together or series.TOGETHER, cluster)
    finally:
        if hosts.is_first():
            made = [str(video.task.result) for video in videos if video.state in ("done", "reused")]
            terminal.say(made if quiet else ["", *series.lines(videos)])
    if sheet is not None and hosts.is_first() and not quiet:
        terminal.say([f"{sheet}: the pictures, side by side"])
    return int(any(video.state == "failed" for video in videos))
