"""A series: the videos of a file of prompts, those of one shape together, so that each stage is loaded for several.

Up to `together` videos of one shape go through a stage one after the other, then through the next stage. So weights are
read once, and programs compiled or loaded once, for that many videos; and no more than one network is on the devices.
All videos of a shape at once would read them less often, and would delay the first video to the end.

A process locks the folder of each video that it takes, until the video is finished. Several processes with one `--out`
take turns in this way. The kernel releases the locks of a process that is killed, and another one goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torchport.compile import failure
from torchport.config.prompts import Line
from torchport.errors import ConfigError, ForeignError, OutputError, SaveError, StoppedError, TorchportError, together
from torchport.files import atomic
from torchport.processes import hosts
from torchport.processes.stopping import Stopping
from torchport.progress import log, table
from torchport.run import path, resume
from torchport.run.journey import Journey
from torchport.run.path import output_folder
from torchport.save.manifest import versions
from torchport.stages import family
from torchport.task import Request, Task, accept

TOGETHER = 4
"""Videos that go through a stage before the next one is loaded, by default: a quarter of the loading is left."""
OF_ONE_VIDEO = (SaveError, ForeignError, ConfigError)
"""Errors that one video may have alone. Any other would come again with the next one."""


@dataclasses.dataclass
class Video:
    """A video of a series, and what became of it."""

    name: str  #: Of its folder in `--out`.
    task: Task  #: What makes it.
    #: "waiting", "done", "reused" (it was finished before, or by another process), "failed", or "elsewhere" (another
    #: process has its folder).
    state: str = "waiting"
    seconds: float = 0.0  #: Spent on it in this process.
    error: TorchportError | None = None  #: Why it failed.


def accepted(request: Request, lines: Sequence[Line]) -> list[Video]:
    """Returns the videos of a file of prompts, after checking all that each line names.

    Args:
        request: What all of them share; its `out` is the folder of their folders. Its negative prompt, seed and image
            are those of lines that have none.
        lines: The file's.
    """
    accept(request, dry=True)
    videos: list[Video] = []
    mistakes: list[TorchportError] = []
    for line in lines:
        try:
            videos.append(Video(line.name, accept(_request(request, line))))
        except TorchportError as error:
            for mistake in (error, *error.others):
                mistake.place = f"{line.place} ({mistake.place.removeprefix('--set ').removeprefix('--')})"
                mistakes.append(mistake)
            error.others = ()
    if mistakes:
        raise together(mistakes)
    return videos


def _request(request: Request, line: Line) -> Request:
    prompt = line.prompt
    assert request.out is not None
    return dataclasses.replace(
        request,
        prompt=prompt.prompt,
        negative_prompt=request.negative_prompt if prompt.negative is None else prompt.negative,
        seed=request.seed if prompt.seed is None else prompt.seed,
        image=request.image if prompt.image is None else Path(prompt.image),
        out=request.out / line.name,
        overrides=(*request.overrides, *line.sizes()),
    )


def shape(task: Task) -> tuple[int, int, int, bool]:
    """Returns that in which the videos of a series differ and their programs, too: the size, and whether an image."""
    settings = task.settings
    return settings.frames, settings.height, settings.width, settings.image is not None


def make(videos: Sequence[Video], out: Path, together: int = TOGETHER, cluster: hosts.Cluster | None = None) -> None:
    """Makes the videos of a series. Each ends with another state than "waiting", unless the series is stopped.

    Args:
        videos: From `accepted`; their states change.
        out: The folder of their folders.
        together: Videos of one shape that go through a stage before the next one is loaded.
        cluster: The processes that run each of them together; by default this one alone.

    Raises:
        StoppedError: Ctrl-C or a signal, after the step in progress.
        TorchportError: An error that is no single video's, in a run of several processes.
    """
    task = videos[0].task
    path.prepare(task, cluster)
    with Stopping().listening() as stopping, hosts.joined(cluster) as watch:
        watch.folder = out
        settings = [[video.name, dataclasses.asdict(video.task.settings)] for video in videos]
        execution = task.request.execution.row(task.machine)
        hosts.check_same({**task.job.model_dump(), **execution, "prompts": settings, "versions": versions()})
        hosts.from_first(lambda: atomic.make_folder(out))
        try:
            _Series(videos, together, stopping).make()
        except StoppedError as error:
            remedy = "Go on with the same command: what is finished stays"
            raise StoppedError(error.place, error.fact, remedy, on_every_process=True) from error


class _Taken:
    """A video that this process makes, while its folder is locked.

    Attributes:
        video: The video.
        lock: Its folder's.
        journey: Its way; None before it has begun.
        stage: The next stage on it; None where none is left.
    """

    def __init__(self, video: Video, lock: contextlib.ExitStack) -> None:
        self.video = video
        self.lock = lock
        self.journey: Journey | None = None
        self.stage: family.Stage | None = None
        self._stages: Iterator[family.Stage] = iter(())

    def start(self, common: path.Shared, stopping: Stopping) -> None:
        """Begins the video, or goes on with it, unless it is finished."""
        task = self.video.task
        if hosts.from_first(lambda: resume.is_finished(task, common.weights, common.upstream)):
            journey = common.journey(task, stopping)
            if journey.revise():
                journey.finish()
            self.end("reused")
            return
        self.journey = common.journey(task, stopping)
        self._stages = self.journey.stages()
        self.advance()

    def advance(self) -> None:
        """Goes on to the next stage; after the last one it ends the video."""
        self.stage = next(self._stages, None)
        if self.stage is None and self.journey is not None:
            summary = path.summary(self.journey)
            self.video.seconds = sum(summary.seconds.values())
            self.end("done")
            log.info("%s is done: %s", self.video.name, summary.video)

    def end(self, state: str, error: TorchportError | None = None) -> None:
        """Ends the video, and unlocks its folder."""
        self.video.state, self.video.error, self.stage = state, error, None
        self.lock.close()


class _Series:
    """The videos on their way."""

    def __init__(self, videos: Sequence[Video], together: int, stopping: Stopping) -> None:
        self.videos = videos
        self.together = together
        self.stopping = stopping

    def make(self) -> None:
        """Makes all videos that no other process has; again those of a process that has ended meanwhile."""
        waiting = len(self.videos) + 1
        while (left := sum(video.state == "waiting" for video in self.videos)) and left < waiting:
            waiting = left
            for key in dict.fromkeys(shape(video.task) for video in self.videos):
                self._make_shape([video for video in self.videos if shape(video.task) == key])
        for video in self.videos:
            video.state = "elsewhere" if video.state == "waiting" else video.state

    def _make_shape(self, videos: Sequence[Video]) -> None:
        """Makes the videos of one shape."""
        with contextlib.ExitStack() as locks:
            taken = self._take(videos, locks)
            if not taken:
                return
            try:
                with path.shared(taken[0].video.task) as common:
                    while taken:
                        self._carry(common, taken)
                        taken = self._take(videos, locks)
            except TorchportError as error:
                if isinstance(error, StoppedError) or not _is_everywhere(error):
                    raise
                log.error("%s", error.report())
                for video in videos:
                    if video.state == "waiting":
                        video.state, video.error = "failed", error

    def _take(self, videos: Sequence[Video], locks: contextlib.ExitStack) -> list[_Taken]:
        """Returns the next videos, their folders locked; those that another process has locked are left out."""
        taken: list[_Taken] = []
        for video in videos:
            if len(taken) < self.together and video.state == "waiting":
                lock = locks.enter_context(contextlib.ExitStack())
                try:
                    lock.enter_context(output_folder(video.task.folder))
                except OutputError as error:
                    if not error.held:
                        _fail(_Taken(video, lock), error)
                    continue
                taken.append(_Taken(video, lock))
        return taken

    def _carry(self, common: path.Shared, taken: Sequence[_Taken]) -> None:
        """Carries videos through all stages, each stage loaded once for all of them."""
        for way in taken:
            self._attempt(way, lambda way=way: way.start(common, self.stopping))  # type: ignore[misc]
        for stage in common.task.stages:
            here = [way for way in taken if way.stage is not None and way.stage.name == stage.name]
            if here:
                with path.at_stage(common, stage) as at_hand:
                    for way in here:
                        self._attempt(way, lambda way=way: _pass(way, at_hand), at_hand)  # type: ignore[misc]

    def _attempt(self, way: _Taken, work: Callable[[], None], at_hand: path.StageAtHand | None = None) -> None:
        """Does a part of the work on a video. What only this video has, ends only this video."""
        try:
            with failure.explained(failure.Owners.of_task(way.video.task)):
                work()
        except OF_ONE_VIDEO as error:
            is_loading = at_hand is not None and at_hand.is_loading
            if not _is_everywhere(error) or hosts.from_first(lambda: is_loading):
                raise
            _fail(way, error)


def _pass(way: _Taken, at_hand: path.StageAtHand) -> None:
    """Carries a video through a stage."""
    assert way.journey is not None
    log.info("%s: %s", way.video.name, at_hand.stage.name)
    at_hand.carry(way.journey)
    way.advance()


def _fail(way: _Taken, error: TorchportError) -> None:
    log.error("%s failed: %s", way.video.name, error.report())
    if way.journey is not None:
        way.video.seconds = sum(way.journey.seconds.values())
    way.end("failed", error)


def _is_everywhere(error: TorchportError) -> bool:
    """Returns whether all processes of the run have an error: only then can they go on together."""
    return hosts.processes() == 1 or error.on_every_process


def lines(videos: Sequence[Video]) -> list[str]:
    """Returns what became of the videos, as a table."""
    rows = [(f"{video.name:5}", f"{video.state:9}", _seconds(video), _about(video)) for video in videos]
    states = [video.state for video in videos]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    return [*table(rows, left=4), f"{len(videos)} videos: {counts}"]


def _seconds(video: Video) -> str:
    return f"{video.seconds:8.1f} s" if video.seconds else " " * 10


def _about(video: Video) -> str:
    if video.error is not None:
        return f"error[{video.error.id}] {video.error.place}"
    return str(video.task.folder)
