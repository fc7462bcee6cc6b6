"""`torchport run --prompts FILE`: its flags, and the table at its end."""

from __future__ import annotations

from pathlib import Path

from torchport import save, series
from torchport.commands import terminal
from torchport.config.prompts import read_prompts
from torchport.errors import BadValueError
from torchport.processes import hosts
from torchport.task import Request


def make(file: Path, request: Request, together: int | None, cluster: hosts.Cluster | None, quiet: bool) -> int:
    """Makes the videos of a file of prompts, prints a table of them, and returns the exit code: 1 if one failed.

    Args:
        file: The file.
        request: What the videos share.
        together: Videos that go through a stage together; None: as `series.TOGETHER` says.
        cluster: The processes that run each of them together.
        quiet: Whether only the paths of finished videos are printed.

    Raises:
        TorchportError: A flag or a line is refused, before anything runs; or the series is stopped.
    """
    out = _check(file, request)
    videos = series.accepted(request, read_prompts(file))
    try:
        series.make(videos, out, together or series.TOGETHER, cluster)
    finally:
        if hosts.first():
            _print(videos, quiet)
    return int(any(video.state == "failed" for video in videos))


def _check(file: Path, request: Request) -> Path:
    """Returns the folder of the videos' folders.

    Raises:
        BadValueError: There is none, or a flag says what each line says.
    """
    place = f"--prompts {file}"
    if request.prompt is not None:
        raise BadValueError(place, "--prompt is given too", "Leave one out: each line of the file has a prompt")
    if request.stage != "all" or request.inputs is not None:
        flag = "--inputs" if request.inputs is not None else f"--stage {request.stage}"
        raise BadValueError(place, f"{flag} is given too", "Leave it out: each video goes through all stages")
    if request.out is None:
        raise BadValueError(place, "There is no --out", "Name the folder that has, or gets, a folder for each video")
    return request.out


def _print(videos: list[series.Video], quiet: bool) -> None:
    if not quiet:
        terminal.say("\n".join(["", *series.lines(videos)]))
        return
    for video in videos:
        if video.state in ("done", "reused"):
            terminal.say(str(video.task.folder / save.VIDEO))
