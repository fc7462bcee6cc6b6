"""Children of a process with patches: each arms itself, by one call."""

from __future__ import annotations

import atexit
import contextlib
import json
import os

from torchport.errors import BadValueError, TorchportError
from torchport.own_code.applied import VARIABLE, PortDefaults, applied
from torchport.patch.live.registry import registry

_armed = contextlib.ExitStack()
"""Of a child: what it has entered, for as long as it lives."""


def arm(*_: object) -> None:
    """Puts the patches in force that were in force where this process was started, for as long as it lives.

    What `torchport.port` takes by default there, it takes here, too: strategy, mesh, attention, and the devices.

    It is an initializer: `multiprocessing.Pool(initializer=torchport.arm)`, `ProcessPoolExecutor(initializer=...)`,
    `DataLoader(worker_init_fn=torchport.arm)`, or the first line of a script that a subprocess runs. A process that was
    forked has the patches of its parent, and nothing is to be done.

    Args:
        *_: What an initializer is called with, such as the worker's number.

    Raises:
        BadValueError: No parent has told it anything.
        TooLateError: Upstream is imported already, and the original cannot be replaced everywhere.
    """
    told = os.environ.get(VARIABLE)
    if told is None:
        fact = f"No process above this one has patches in force ({VARIABLE} is not set)"
        raise BadValueError("torchport.arm", fact, "Call it in a child of torchport exec, or of torchport.applied")
    if not registry.sets:
        arguments = json.loads(told)
        choice = PortDefaults(**arguments.pop("choice"))
        choice.prepare()
        _armed.enter_context(applied(**arguments, choice=choice))
        atexit.register(_disarm)


def _disarm() -> None:
    """Takes the patches back as the process ends. What there is to say of them, the parent's process says."""
    with contextlib.suppress(TorchportError):
        _armed.close()
