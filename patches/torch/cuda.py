"""Answers to the CUDA calls of GPU scripts on a machine without CUDA: nothing to do, or a device of nothing."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class NoDevice:
    """The properties of a CUDA device that is not there: no name, no memory, compute capability 0.0."""

    name: str = "no CUDA device"
    major: int = 0
    minor: int = 0
    total_memory: int = 0
    multi_processor_count: int = 0


class NoStream:
    """The stream of a device that is not there: nothing is ever pending on it."""

    def synchronize(self):
        """Returns at once."""

    def query(self):
        """Returns True: all work is done."""
        return True


def without_cuda():
    """Returns whether this machine has no CUDA device."""
    return not torch.cuda.is_available()


def nothing(device=None):
    """Does nothing, as there is no device to do it on."""


def nothing_at_all():
    """Does nothing, as there is no device to do it on."""


def first_device():
    """Returns 0, the index that a process with one device sees."""
    return 0


def properties(device=None):
    """Returns the properties of no device; a check for a minimum of memory or capability fails honestly."""
    return NoDevice()


def name(device=None):
    """Returns the name of no device."""
    return NoDevice.name


def capability(device=None):
    """Returns 0.0, below every capability that a script may ask for."""
    return (0, 0)


def memory(device=None):
    """Returns that 0 of 0 bytes are free."""
    return (0, 0)


def stream(device=None):
    """Returns a stream on which nothing is ever pending."""
    return NoStream()
