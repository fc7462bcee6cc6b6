"""The port's network on one device, its operators called one by one, so that every module can be looked at.

It is the network that a run compiles: the same module under the same patches, with the same precision and the same
attention. What the mesh and the compiler add to it is in the program alone, which is compared as a whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Container, Mapping
from pathlib import Path
from typing import Any

import torch

from torchport import engine, patch, shard
from torchport.compile import network
from torchport.stages.family import Stage
from torchport.stages.recorder import unit_paths
from torchport.task import Task
from torchport.task.devices import devices
from torchport.verify.borders import Border, Pass, Values


class Port:
    """A stage's network, which patches are in force for.

    Args:
        task: The port's.
        stage: The stage.
        folder: The checkpoint's.
        ledger: Of the patches in force.

    Attributes:
        outer: The paths of its units.
        place: Of each patch, by id.
    """

    def __init__(self, task: Task, stage: Stage, folder: Path, ledger: patch.Ledger) -> None:
        mesh = dict.fromkeys(task.job.mesh, 1)
        job = task.job.model_copy(update={"mesh": mesh, "stacked": False})
        alone = dataclasses.replace(task, job=job)
        parts = network.loaded(alone, stage, folder)
        one = shard.make_mesh(mesh, devices(task.machine)[:1])
        self.ledger = ledger
        self.module = network.module_of(stage, parts)
        weights = network.placed(alone, stage, parts, one, folder)
        self.compiled = network.compiled(alone, stage, self.module, weights, one)
        self.compiled.jit = False  # set afterwards: hooks that look for NaN would wait for every operator
        self.outer = unit_paths(self.module)

    def counts(self) -> dict[str, int]:
        """Returns how often each patch was called so far."""
        return {record.entry.id: record.calls.count for record in self.ledger.records}

    def called(
        self,
        inputs: Mapping[str, Any],
        paths: Collection[str],
        given: Values,
        skipped: Collection[str] = (),
        whole: Container[Border] = (),
    ) -> tuple[Any, Pass]:
        """Returns what the network returns, and what was noted at the borders.

        Args:
            inputs: The network's.
            paths: The modules that have borders.
            given: What replaces values at borders.
            skipped: Modules that return what is given.
            whole: The borders at which large tensors are noted whole, and elsewhere in some rows.
        """
        watch = Pass(self.module, paths, given, _to_engine, to_host, skipped, self.counts, whole)
        with watch.watching():
            output = self.compiled(**inputs)
        return output, watch


def _to_engine(given: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    tensor: torch.Tensor = engine.constant(given.to(like.dtype))
    return tensor


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy on the host."""
    return shard.to_torch(engine.array(tensor)) if engine.is_traced(tensor) else tensor.detach().clone()
