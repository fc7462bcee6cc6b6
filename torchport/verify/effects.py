"""What values at the borders of modules do to a network's output.

The original shows it: in a port with a fault, what stands before the fault may be seen through it alone. Where the
original cannot be called, as beside a capture, the port shows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchport.compile import network
from torchport.compile.in_force import in_force
from torchport.errors import MachineError
from torchport.processes import child
from torchport.task import Request, accept
from torchport.verify.borders import Values
from torchport.verify.original import Original
from torchport.verify.port import Port
from torchport.verify.recording import Call, Inside, read, weights_of

Outputs = Callable[[Sequence[Values]], list[Any]]
"""Returns what a network returns in one of its calls, for each of some sets of values at borders."""


def of_port(port: Port, call: Call) -> Outputs:
    """Returns what a port returns with other values at borders."""

    def outputs(changes: Sequence[Values]) -> list[Any]:
        return [port.called(call.inputs, {border.path for border in values}, values)[0] for values in changes]

    return outputs


def of_original(request: Request, file: Path, call: Call) -> Outputs:
    """Returns what the original returns with other values at borders; it has a process of its own.

    Args:
        request: Of the original.
        file: The recording.
        call: The network's.
    """
    key = Inside(call.network, call.step, call.number, "")

    def ended(end: child.Ended) -> MachineError:
        return MachineError("torchport verify", f"The original's process {end}", "Free memory")

    def outputs(changes: Sequence[Values]) -> list[Any]:
        function = "torchport.verify.effects:outputs_of"
        environment = {"PYTHONWARNINGS": "ignore"}
        found: list[Any] = child.call(function, request, file, key, list(changes), ended=ended, environment=environment)
        return found

    return outputs


def outputs_of(request: Request, file: Path, key: Inside, changes: Sequence[Values]) -> list[Any]:
    """Returns what the original's network returns in one call; runs in a process of its own.

    Args:
        request: Of the original.
        file: The recording.
        key: Of the call.
        changes: Values at borders, in place of the original's.
    """
    task, call = accept(request), key.call_of(read(file))
    stage = next(dataclasses.replace(stage, prepare=None) for stage in task.denoising if stage.name == call.stage)
    with in_force(task, [stage]):
        folder = weights_of(task)
        eager = network.eager(task, stage, network.loaded(task, stage, folder), folder)
        original = Original(eager, task.settings.dtypes[call.network])
        return [original.output(call.inputs, values) for values in changes]
