"""The recording's way from the original's process to the port's, which starts beside it and waits for it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from torchport.errors import MachineError

PAUSE = 0.1
"""Seconds between two looks at the folder."""


def write(recording: Any, file: Path) -> None:
    """Writes a recording: a file that has its name is whole.

    Args:
        recording: What `torch.save` can write.
        file: In the folder of the verification.
    """
    unfinished = file.with_suffix(".unfinished")
    torch.save(recording, unfinished)
    unfinished.rename(file)


def refuse(file: Path) -> None:
    """Tells the process that waits for a recording that none will come."""
    _refusal(file).touch()


def wait(file: Path) -> None:
    """Returns when a recording is there.

    Raises:
        MachineError: None will come: the original was refused, or the process that began both has ended.
    """
    parent = os.getppid()
    while not file.exists():
        if _refusal(file).exists() or os.getppid() != parent:
            fact = "The original's process left no recording"
            raise MachineError("torchport.verify", fact, "Read what the original was refused for")
        time.sleep(PAUSE)


def _refusal(file: Path) -> Path:
    return file.with_suffix(".refused")
