"""What is in force while code of an upstream runs: the same for `run`, `plan`, `shard`, `trace`, `verify`."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torchport import engine, load, patch
from torchport.compile import failure
from torchport.config import checkout
from torchport.patch.live import hook
from torchport.progress import log
from torchport.stages.family import Stage
from torchport.task import Task


@contextlib.contextmanager
def in_force(
    task: Task, stages: Sequence[Stage], *, entries: Sequence[patch.Entry] | None = None, explained: bool = True
) -> Iterator[patch.Ledger]:
    """Prepares the process for upstream's code while the context lasts: upstream's checkout on `sys.path`, the stages'
    patches, few logs, float32 as default dtype. Yields the ledger of the patches.

    Args:
        entries: Patches in place of the stages' own: `trace` passes fewer, to show where upstream fails.
        explained: Whether upstream's exceptions become torchport's errors with a line; `trace` needs the exceptions.
    """
    with (
        failure.explained(failure.Owners.of_task(task)) if explained else contextlib.nullcontext(),
        checkout.on_path(task.upstream),
        patch.applied(task.patches(stages) if entries is None else entries) as ledger,
        hushed(not log.isEnabledFor(logging.DEBUG)),
        load.default_dtype(torch.float32),  # upstream's schedules count on it, and a caller may have set another
    ):
        yield ledger


@contextlib.contextmanager
def stage_in_force(task: Task, stage: Stage) -> Iterator[patch.Ledger]:
    """Applies one stage's patches and registers their lowerings, inside `in_force`; yields the patches' ledger."""
    with patch.applied(task.patches([stage]), stage=stage.name) as ledger, lowerings(ledger):
        yield ledger


@contextlib.contextmanager
def hushed(hush: bool) -> Iterator[None]:
    """Hides progress bars and logs of diffusers and transformers if `hush`, also of modules imported in the context."""
    with contextlib.ExitStack() as undos:
        for name in ("diffusers.utils.logging", "transformers.utils.logging") if hush else ():
            undos.callback(hook.arm(name, lambda module: _hush(module, undos)))
            if name in sys.modules:
                _hush(sys.modules[name], undos)
        yield


def _hush(logs: Any, undos: contextlib.ExitStack) -> None:
    """Switches off logs and progress bars by a library's module `logs`; `undos` gets the calls to switch them on."""
    undos.callback(logs.set_verbosity, logs.get_verbosity())
    if logs.is_progress_bar_enabled():
        undos.callback(logs.enable_progress_bar)
    logs.set_verbosity_error()
    logs.disable_progress_bar()


def lowerings(ledger: patch.Ledger) -> contextlib.AbstractContextManager[None]:
    """Returns a context, for tracing programs, in which torchax uses the lowerings that a ledger's patches declare."""
    return engine.operators({op.target: op.function for op in ledger.ops()})
