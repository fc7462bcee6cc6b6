"""A series: the videos of a file of prompts, those of one shape together, so that each stage is loaded for several.

docs/prompts.md has the order. A process locks the folder of each video that it takes, until the video is finished.
Several processes with one `--out` take turns in this way. The kernel releases the locks of a process that is killed,
and another one goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import pydantic

from torchport.compile import failure
from torchport.config.document import Document, Frozen, text_of, validated
from torchport.errors import (
    BadValueError,
    ConfigError,
    DuplicateKeyError,
    ForeignError,
    OutputError,
    SaveError,
    StoppedError,
    SyntaxYamlError,
    TorchportError,
    combined,
)
from torchport.files import atomic
from torchport.processes import hosts
from torchport.processes.stopping import Stopping
from torchport.progress import log, table
from torchport.run import path, resume
from torchport.run.journey import Journey
from torchport.run.path import output_folder
from torchport.save import CONTACT_SHEET
from torchport.save.manifest import versions
from torchport.save.video import grid
from torchport.stages import family, picture
from torchport.task import Request, Task, accept, accept_like

LONGEST_NAME = 255
"""Bytes of a folder's name, on common file systems."""
ON_SHEET = 64
"""Pictures on the sheet of a series, at most."""
BYTE_ORDER_MARK = "\ufeff"
"""The character that some editors of Windows write in front of UTF-8."""
DEVICES = {"CON", "PRN", "AUX", "NUL", *(f"{name}{number}" for name in ("COM", "LPT") for number in range(1, 10))}
"""Names that Windows keeps for devices, with any ending: a folder that is to be copied there cannot have them."""


def _folder_name(text: str) -> str:
    """Returns a folder's name; raises a ValueError for a name that some system refuses, or that looks like a flag."""
    if not re.fullmatch(r"[^./\\\0][^/\\\0]*", text) or len(text.encode("utf-8", "replace")) > LONGEST_NAME:
        raise ValueError("It must be the name of one folder in --out: no slash, and no dot in front")
    bad = next((letter for letter in text if not letter.isprintable() or letter in '<>:"|?*'), None)
    if bad is not None:
        raise ValueError(f"A folder's name has no {bad!r}: use letters, digits, '-', '_', '.' and spaces")
    if text != text.strip() or text.endswith("."):
        raise ValueError("A folder's name neither begins with a space nor ends with a space or a dot: remove it")
    if text.startswith("-"):
        raise ValueError("Commands take a name with '-' in front for a flag: begin with a letter or a digit")
    if text.lower() == CONTACT_SHEET:
        raise ValueError("The sheet of all pictures has this name: take another")
    if text.partition(".")[0].rstrip().upper() in DEVICES:
        raise ValueError(f"Windows has no folder of this name: write for example 'video-{text}'")
    return text


class Prompt(Frozen):
    """A line of a file of prompts.

    Attributes:
        negative: The negative prompt; by default that of `--negative-prompt`.
        seed: The seed of the noise; by default that of `--seed`.
        height: Pixels; by default the config's.
        width: Pixels; by default the config's.
        frames: The number of frames; by default the config's.
        image: A file with the first frame, or the video to edit; by default that of `--image`.
        out: The name of the video's folder in `--out`, one that every system can have; by default the number of the
            line, as `0001`.
    """

    prompt: str
    negative: str | None = None
    seed: Annotated[int, pydantic.Field(ge=0, le=2**63 - 1)] | None = None
    height: Annotated[int, pydantic.Field(ge=1)] | None = None
    width: Annotated[int, pydantic.Field(ge=1)] | None = None
    frames: Annotated[int, pydantic.Field(ge=1)] | None = None
    image: str | None = None
    out: Annotated[str, pydantic.AfterValidator(_folder_name)] | None = None


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a file of prompts, with its place and its name."""

    prompt: Prompt
    place: str  #: `file:line`.
    name: str  #: Of the video's folder.


def read_prompts(file: Path) -> list[Line]:
    """Returns the lines of a file of prompts, without blank lines; raises all their mistakes as one error."""
    text = text_of(file, str(file), 'Put a file there with a line such as {"prompt": "A cat"}')
    lines: list[Line] = []
    mistakes: list[TorchportError] = []
    texts = text.removeprefix(BYTE_ORDER_MARK).split("\n")  # JSON's strings may hold what `splitlines` also splits at
    for number, line in enumerate(texts, 1):
        if line.strip():
            try:
                lines.append(_line(line, str(file), number))
            except TorchportError as error:
                mistakes += [error, *error.others]  # without its `others`, `error` does not report them again
                error.others = ()
    mistakes += _shared_folders(lines)
    if mistakes:
        raise combined(mistakes)
    if not lines:
        raise BadValueError(str(file), "It has no line", 'Write one such as {"prompt": "A cat"} for each video')
    return lines


def _line(text: str, file: str, number: int) -> Line:
    """Returns the `Line` of one line of text; refuses text that is no JSON object, or has unknown keys."""
    place, remedy = f"{file}:{number}", 'Write one object on a line, such as {"prompt": "A cat", "seed": 7}'
    try:
        data = json.loads(text, object_pairs_hook=lambda pairs: _mapping(pairs, place))
    except json.JSONDecodeError as error:
        raise SyntaxYamlError(f"{place}:{error.pos + 1}", f"Not JSON: {error.msg}", remedy) from error
    except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
        raise SyntaxYamlError(place, f"Not JSON: {' '.join(str(error).split())[:200]}", remedy) from error
    if not isinstance(data, dict):
        raise SyntaxYamlError(place, f"It is no JSON object: {text[:80]}", remedy)
    document = Document(file, data, lines={(): number})
    prompt = validated(Prompt, document)
    return Line(prompt, place, prompt.out or f"{number:04}")


def _mapping(pairs: list[tuple[str, Any]], place: str) -> dict[str, Any]:
    """Returns the pairs of a JSON object as a dict; refuses an object with the same key twice."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        key = next(key for key in keys if keys.count(key) > 1)
        raise DuplicateKeyError(place, f"'{key}' stands here twice", "Keep one of the two", key=key)
    return mapping


def _shared_folders(lines: list[Line]) -> list[TorchportError]:
    """Returns an error for each line with the folder of an earlier line. Case does not count: some disks ignore it."""
    first: dict[str, Line] = {}
    mistakes: list[TorchportError] = []
    for line in lines:
        other = first.setdefault(unicodedata.normalize("NFC", line.name).casefold(), line)
        if other is not line:
            also = "so is that" if other.name == line.name else f"'{other.name}', the same on some disks, is that"
            fact = f"Its folder is '{line.name}', and {also} of {other.place}"
            mistakes.append(BadValueError(line.place, fact, "Give each line an 'out' of its own", key="out"))
    return mistakes


TOGETHER = 4
"""Videos that go through a stage before the next stage is loaded, by default: a stage is loaded a quarter as often."""
OF_ONE_VIDEO = (SaveError, ForeignError, ConfigError)
"""Errors that one video may have alone. Other errors would come again with the next video."""


@dataclasses.dataclass(eq=False)
class Video:
    """A video of a series, and its state."""

    name: str  #: The name of its folder in `--out`.
    task: Task
    #: "waiting", "done", "reused" (it was finished before, or by another process), "failed", or "elsewhere" (another
    #: process has locked its folder).
    state: str = "waiting"
    seconds: float = 0.0
    error: TorchportError | None = None
    #: While this process makes the video: the lock of its folder, its run, and its next stage.
    lock: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    journey: Journey | None = None
    stage: family.Stage | None = None
    stages: Iterator[family.Stage] | None = None  #: The stages after the next one.

    def start(self, common: path.Shared, stopping: Stopping) -> None:
        """Starts the video's run, or resumes a stopped run; ends a video that is finished already as "reused"."""
        journey = Journey(self.task, common.weights, common.upstream, stopping)
        if hosts.from_first(lambda: resume.is_finished(self.task, common.weights, common.upstream)):
            if journey.revise():
                journey.finish()
            self.end("reused")
            return
        self.journey, self.stages = journey, journey.stages()
        self.advance(journey)

    def advance(self, journey: Journey) -> None:
        """Sets `stage` to the next stage; after the last stage, finishes the run and ends the video as "done"."""
        assert self.stages is not None
        self.stage = next(self.stages, None)
        if self.stage is None:
            summary = journey.finish()
            self.seconds = sum(summary.seconds.values())
            self.end("done")
            log.info("%s is done: %s", self.name, summary.video)

    def carry(self, loaded_stage: path.StageAtHand) -> None:
        """Runs a loaded stage for the video, and sets `stage` to the next."""
        assert self.journey is not None
        log.info("%s: %s", self.name, loaded_stage.stage.name)
        loaded_stage.carry(self.journey)
        self.advance(self.journey)

    def fail(self, error: TorchportError) -> None:
        """Ends the video as "failed", and logs the error."""
        log.error("%s failed: %s", self.name, error.report())
        if self.journey is not None:
            self.seconds = sum(self.journey.seconds.values())
        self.end("failed", error)

    def end(self, state: str, error: TorchportError | None = None) -> None:
        """Sets the video's last state, and unlocks its folder."""
        self.state, self.error = state, error
        self.journey = self.stage = self.stages = None
        self.lock.close()


def accepted(request: Request, lines: Sequence[Line]) -> list[Video]:
    """Returns the videos of a file of prompts, after checking all that each line names.

    Args:
        request: The request that all videos share. Its `out` is the folder of their folders; its negative prompt, seed
            and image are for lines without them.
    """
    accept(request, dry=True, reads_picture=False)
    videos: list[Video] = []
    mistakes: list[TorchportError] = []
    by_overrides: dict[tuple[str, ...], Task] = {}  # a card and a job take longer to read than a line
    for line in lines:
        try:
            wanted = _request(request, line)
            earlier = by_overrides.get(wanted.overrides)
            task = accept(wanted, reads_picture=False) if earlier is None else accept_like(earlier, wanted)
            by_overrides.setdefault(wanted.overrides, task)
            videos.append(_video(line, task))
        except TorchportError as error:
            for mistake in (error, *error.others):  # without its `others`, `error` does not report them again
                mistake.place = f"{line.place} ({mistake.place.removeprefix('--set ').removeprefix('--')})"
                mistakes.append(mistake)
            error.others = ()
    if mistakes:
        raise combined(mistakes)
    return videos


def _video(line: Line, task: Task) -> Video:
    """Returns the video of a line, "failed" if its image cannot be read: the other videos are made all the same."""
    video = Video(line.name, task)
    try:
        if task.settings.image is not None:
            picture.read(task.settings.image, task.settings.frames if task.card.edits else None)
    except BadValueError as error:
        error.place = f"{line.place} ({error.place.removeprefix('--')})"
        video.fail(error)
    return video


def _request(request: Request, line: Line) -> Request:
    """Returns the request for a line: the values that the line names, and those of the series' request otherwise."""
    prompt = line.prompt
    assert request.out is not None
    sizes = {key: getattr(prompt, key) for key in ("height", "width", "frames")}
    return dataclasses.replace(
        request,
        prompt=prompt.prompt,
        negative_prompt=request.negative_prompt if prompt.negative is None else prompt.negative,
        seed=request.seed if prompt.seed is None else prompt.seed,
        image=request.image if prompt.image is None else Path(prompt.image),
        out=request.out / line.name,
        overrides=(*request.overrides, *(f"{key}={value}" for key, value in sizes.items() if value is not None)),
    )


def shape(task: Task) -> tuple[int, int, int, bool]:
    """Returns the values on which a video's programs depend: frames, height, width, and whether it has an image."""
    settings = task.settings
    return settings.frames, settings.height, settings.width, settings.image is not None


def make(
    videos: Sequence[Video], out: Path, together: int = TOGETHER, cluster: hosts.Cluster | None = None
) -> Path | None:
    """Makes the videos of a series, and returns the file of the sheet of their pictures, if there is a sheet. Each
    video ends with another state than "waiting", unless the series is stopped.

    Args:
        together: Videos of one shape that go through a stage before the next stage is loaded.
        cluster: The processes that run each video jointly; by default this process alone.
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
            before = len(videos) + 1
            # Again, as long as videos get done: another process with the same `--out` may have unlocked some meanwhile.
            while (waiting := sum(video.state == "waiting" for video in videos)) and waiting < before:
                before = waiting
                for key in dict.fromkeys(shape(video.task) for video in videos):
                    _make_shape([video for video in videos if shape(video.task) == key], together, stopping)
            for video in videos:
                video.state = "elsewhere" if video.state == "waiting" else video.state
            return hosts.from_first(lambda: write_sheet(out, videos))
        except StoppedError as error:
            remedy = "Go on with the same command: what is finished stays"
            raise StoppedError(error.place, error.fact, remedy, on_every_process=True) from error


def write_sheet(out: Path, videos: Sequence[Video]) -> Path | None:
    """Writes a series' first `ON_SHEET` finished pictures side by side, in the order of its lines; returns the file.
    With fewer than two pictures it returns None, and removes the sheet of an earlier series.
    """
    if not videos[0].task.card.makes_pictures:
        return None
    files = [video.task.result for video in videos if video.error is None and video.task.result.is_file()]
    images = [picture.read(file) for file in files[:ON_SHEET]]
    if len(images) < 2:
        if (out / CONTACT_SHEET).is_file():
            (out / CONTACT_SHEET).unlink()
        return None
    atomic.write_bytes(out / CONTACT_SHEET, grid(images, columns=math.ceil(math.sqrt(len(images)))))
    return out / CONTACT_SHEET


def _make_shape(videos: Sequence[Video], together: int, stopping: Stopping) -> None:
    """Makes the waiting videos of one shape, `together` of them at a time. An error on all processes fails all these
    videos, and the series goes on with the next shape.
    """
    with contextlib.ExitStack() as locks:
        taken = _take(videos, together, locks)
        if not taken:
            return
        try:
            with path.shared(taken[0].task) as common:
                while taken:
                    _carry(common, taken, stopping)
                    taken = _take(videos, together, locks)
        except TorchportError as error:
            if isinstance(error, StoppedError) or not _is_everywhere(error):
                raise
            log.error("%s", error.report())
            for video in videos:
                if video.state == "waiting":
                    video.end("failed", error)


def _take(videos: Sequence[Video], together: int, locks: contextlib.ExitStack) -> list[Video]:
    """Locks the folders of the next waiting videos, at most `together`, and returns these videos. It leaves out folders
    that another process has locked, and fails videos whose folder cannot be written.
    """
    taken: list[Video] = []
    for video in videos:
        if len(taken) < together and video.state == "waiting":
            video.lock = locks.enter_context(contextlib.ExitStack())
            try:
                video.lock.enter_context(output_folder(video.task.folder))
            except OutputError as error:
                if not error.is_locked:
                    video.fail(error)
                continue
            taken.append(video)
    return taken


def _carry(common: path.Shared, videos: Sequence[Video], stopping: Stopping) -> None:
    """Runs all stages for videos of one shape; each stage is loaded once for all of them."""
    for video in videos:
        _attempt(video, functools.partial(video.start, common, stopping))
    for stage in common.task.stages:
        at_this_stage = [video for video in videos if video.stage is not None and video.stage.name == stage.name]
        if at_this_stage:
            with path.at_stage(common, stage) as loaded_stage:
                for video in at_this_stage:
                    _attempt(video, functools.partial(video.carry, loaded_stage), loaded_stage)


def _attempt(video: Video, work: Callable[[], None], loaded_stage: path.StageAtHand | None = None) -> None:
    """Calls `work`, a part of the work on a video. An error of this video alone fails this video, not the series."""
    try:
        with failure.explained(failure.Owners.of_task(video.task)):
            work()
    except OF_ONE_VIDEO as error:
        is_loading = loaded_stage is not None and loaded_stage.is_loading
        if not _is_everywhere(error) or hosts.from_first(lambda: is_loading):  # the same on all processes
            raise
        video.fail(error)


def _is_everywhere(error: TorchportError) -> bool:
    """Returns whether all processes of the run have this error: only then can the processes go on."""
    return hosts.processes() == 1 or error.on_every_process


def lines(videos: Sequence[Video]) -> list[str]:
    """Returns a table of videos with their states and seconds as lines of text; the last line counts them by state."""
    rows = []
    for video in videos:
        time = f"{video.seconds:8.1f} s" if video.seconds else ""
        about = str(video.task.folder) if video.error is None else f"error[{video.error.id}] {video.error.place}"
        rows.append((f"{video.name:5}", f"{video.state:9}", f"{time:10}", about))
    states = [video.state for video in videos]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    return [*table(rows, left=4), f"{len(videos)} videos: {counts}"]
