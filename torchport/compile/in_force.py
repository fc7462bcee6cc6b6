"""What is in force while code of an upstream runs: its checkout, its patches, silence, and float32 as the default."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from torchport import engine, load, patch
from torchport.compile import failure
from torchport.config import checkout
from torchport.stages.family import Stage
from torchport.task import Task


@contextlib.contextmanager
def in_force(task: Task, stages: Sequence[Stage]) -> Iterator[patch.Ledger]:
    """Puts all in force that upstream's code needs, as a run does, and gives the ledger of the stages' patches."""
    with (
        failure.explained(task),
        checkout.on_path(task.upstream),
        patch.applied(task.patches(list(stages))) as ledger,
        checkout.hushed(True),
        load.default_dtype(torch.float32),  # upstream's schedules count on it, and a caller may have set another
    ):
        yield ledger


@contextlib.contextmanager
def stage_in_force(task: Task, stage: Stage) -> Iterator[patch.Ledger]:
    """Puts one stage's patches in force and registers its lowerings, inside `in_force`; gives the stage's ledger."""
    with patch.applied(task.patches([stage]), stage=stage.name) as ledger, lowerings(ledger):
        yield ledger


def lowerings(ledger: patch.Ledger) -> contextlib.AbstractContextManager[None]:
    """Returns a context that registers the lowerings among some patches, while a program may be traced."""
    return engine.operators({op.target: op.function for op in ledger.ops()})
