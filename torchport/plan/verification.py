"""What `torchport verify` takes of a job: memory of the host and of a device, disk, arithmetic."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torchport.compile import network
from torchport.plan.figures import StagePlan, VerificationCost
from torchport.task import Task

LIMIT = 2**30
"""Bytes of what units get and return in a call up to which all is recorded; above it, see `recording`."""
CALLS, LARGE_CALLS = 5, 3
"""Calls of the original for each of the loop's, at most, up to the limit and above it.

Its own: with the units' values noted, and those of all modules. The yardstick's: free, with the original's values at
the units, and at all modules. Above the limit, modules are left out.
"""
HOST_FLOPS = 1e12
"""Floating-point operations that a host does in a second, where a plan says how long it takes."""


def cost_of(task: Task, planned: Mapping[str, StagePlan]) -> VerificationCost | None:
    """Returns what a verification takes, by the weights and a step of each network.

    Args:
        task: The job.
        planned: The stages that were compiled.
    """
    stages = [stage for stage in task.denoising if stage.name in planned]
    if not stages:
        return None
    host, device, values, flops = [], [], 0, 0.0
    for stage in stages:
        name, plan = str(stage.network), planned[stage.name]
        count = sum(parameter.numel() for parameter in network.published(task, name).parameters())
        dtype = task.settings.dtypes[name]
        wide = 8 if dtype.itemsize >= torch.float32.itemsize else torch.float32.itemsize  # as `verify` chooses it
        host.append(count * (dtype.itemsize + wide))
        device.append(count * dtype.itemsize)
        borders = sum(program.borders_bytes * program.times for program in plan.programs) // plan.steps
        values += borders
        flops += plan.step.flops * (LARGE_CALLS if borders > LIMIT else CALLS)
    return VerificationCost(
        host_bytes=max(host) + values,
        values_bytes=values,
        device_bytes=max(device),
        flops=flops,
        host_s=round(flops / HOST_FLOPS, 1),
    )
