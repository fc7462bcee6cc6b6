"""Which programs a stage needs, and the argument that makes a second one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torchport.compile.failure import cure
from torchport.errors import TorchportError
from torchport.porting.trace.notes import Notes, Raised
from torchport.stages import outputs
from torchport.stages.family import Stage
from torchport.stages.recorder import NetworkCall
from torchport.task import Task


@dataclasses.dataclass
class Program:
    """A program of a stage's network.

    Attributes:
        stage: The stage.
        times: How often the stage calls it in this job; 0 for one of another job.
        because: What makes it another program than the stage's first; empty of that.
    """

    stage: str
    times: int
    because: str


def programs(
    task: Task,
    stage: Stage,
    calls: Sequence[NetworkCall],
    calls_of: Callable[[Task, Stage], list[NetworkCall]],
    notes: Notes,
) -> list[Program]:
    """Returns the programs of this job, and those that other values of its settings would add.

    Args:
        task: The job.
        stage: One with a network.
        calls: Of the job.
        calls_of: Returns the calls that another job makes.
        notes: What stops another job is no stopper of this one, and is not noted.
    """
    first = calls[0]
    result = [Program(stage.name, first.times, "")]
    result += [Program(stage.name, one.times, _difference(first, one)) for one in calls[1:]]
    for words, other in _others(task):
        try:
            with notes.of_another_job(), Raised() as raised:
                new = [one for one in calls_of(other, stage) if all(_difference(one, old) for old in calls)]
                result += [Program(stage.name, 0, f"{words}: {_difference(first, one)}") for one in new]
            error: BaseException | None = raised.error
        except TorchportError as refusal:
            error = refusal
        if error is not None:
            result.append(Program(stage.name, 0, f"{words}: not known, that job ends with {cure.reason(error)}"))
    if task.settings.text_bucket is not None and stage.needs:
        words = f"prompts whose lengths differ by more than text_bucket, {task.settings.text_bucket} tokens"
        result.append(Program(stage.name, 0, f"{words}: the shapes of the text"))
    return result


def _others(task: Task) -> list[tuple[str, Task]]:
    """Returns other jobs that a service may be asked for, in words and as such; all of a job has the same settings."""
    now = task.settings
    scale = 1.0 if now.guidance_scale > 1.0 else 5.0
    word = "without guidance" if scale == 1.0 else "with guidance"
    others = [
        (f"{word} (guidance_scale {scale})", dataclasses.replace(now, guidance_scale=scale)),
        (f"with {now.steps + 1} steps", dataclasses.replace(now, steps=now.steps + 1)),
    ]
    return [(words, dataclasses.replace(task, settings=settings)) for words, settings in others]


def _difference(one: NetworkCall, other: NetworkCall) -> str:
    """Returns in words how the arguments of two calls differ; empty if one program takes both."""
    before, after = outputs.leaves(one.inputs), outputs.leaves(other.inputs)
    words = [f"'{name}' is only in one of them" for name in sorted(before.keys() ^ after.keys())]
    for name in sorted(before.keys() & after.keys()):
        old, new = before[name], after[name]
        if tuple(old.shape) != tuple(new.shape):
            words.append(f"'{name}' is {list(new.shape)}, not {list(old.shape)}")
        elif old.dtype != new.dtype:
            words.append(f"'{name}' is {new.dtype}, not {old.dtype}".replace("torch.", ""))
    was, now = dict(one.static), dict(other.static)
    words += [
        f"'{key}' is {now.get(key)!r}, not {was.get(key)!r}"
        for key in sorted(was | now)
        if was.get(key) != now.get(key)
    ]
    return "; ".join(words)
