"""The recording's way from the original's process to the port's, which starts beside it and waits for it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from torchport.errors import MachineError, OutputError
from torchport.foreign import brief

PAUSE = 0.1
"""Seconds between two looks at the folder."""


def write(recording: Any, file: Path) -> None:
    """Writes a recording: a file that has its name is whole.

    Args:
        recording: What `torch.save` can write.
        file: In the folder of the verification.

    Raises:
        OutputError: The disk is full, or the folder cannot be written.
    """
    unfinished = file.with_suffix(".unfinished")
    try:
        torch.save(recording, unfinished)
        unfinished.rename(file)
    except (OSError, RuntimeError) as error:  # PyTorch raises the latter where the disk is full
        fact = f"What the original computes cannot be written: {brief(error)}"
        raise OutputError(str(file.parent), fact, "Free space there, or name another folder with TMPDIR=DIR") from error


def wait(file: Path, parent: int) -> None:
    """Returns when a recording is there.

    Args:
        file: The recording.
        parent: The process that began this one and the original's; it ends this one where the original is refused.

    Raises:
        MachineError: None will come: that process has ended.
    """
    while not file.exists():
        if os.getppid() != parent:
            fact = "The process that waits for this one has ended"
            raise MachineError("torchport.verify", fact, "Verify again")
        time.sleep(PAUSE)
