"""Functions that a test has a child process call; a child can import nothing of a file of tests."""

import dataclasses
import os
import sys
import time
from pathlib import Path

from torchport.errors import VmemError
from torchport.processes import child


@dataclasses.dataclass(frozen=True)
class Place:
    """Something that is no JSON."""

    where: tuple[int, ...]


def moved(place, by=1):
    sys.stdout.write("upstream prints\n")
    sys.stdout.flush()
    os.write(1, b"and so does C\n")
    sys.stderr.write("a warning\n")
    return Place(tuple(one + by for one in place.where))


def refused():
    raise VmemError("a kernel", "It takes 2 bytes", "Take 1", asked=2, limit=1, patch="up.one")


def raised():
    sys.stderr.write("a warning\n")
    raise ValueError("two\nlines")


def killed(number):
    sys.stderr.write("a warning\nthe last words\n")
    sys.stderr.flush()
    os.kill(os.getpid(), number)


def left(code):
    os._exit(code)


def nested(file, more):
    """Writes this process's number into a file, and so do as many processes below it; none of them ends by itself."""
    with Path(file).open("a") as stream:
        stream.write(f"{os.getpid()}\n")
    if more:
        child.call("fakes.child_calls:nested", file, more - 1, ended=str)
    time.sleep(600)


def imported():
    import json

    return sys.path, json.__file__, os.environ.get("PYTHONPATH"), os.environ.get("ONE")
