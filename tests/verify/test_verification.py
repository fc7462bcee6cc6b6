"""A verification's processes, and what is said of one that ends without an answer."""

import signal

import pytest

from torchport.errors import MachineError
from torchport.processes import child
from torchport.verify import verification


def refused(monkeypatch, end):
    def call(function, *arguments, ended, environment, stop):
        raise ended(end)

    monkeypatch.setattr(child, "call", call)
    with pytest.raises(MachineError) as caught:
        verification._call("comparing:compare")
    return str(caught.value)


def test_a_process_that_was_killed_wants_memory(monkeypatch):
    text = refused(monkeypatch, child.Ended(-signal.SIGKILL, ""))
    assert text.startswith("torchport.verify.comparing:compare: Its process was killed by SIGKILL, as the system does")
    assert text.endswith("Free memory, or make the video smaller: --set height=, width= or frames=.")


def test_a_process_that_raised_is_to_be_reported(monkeypatch):
    text = refused(monkeypatch, child.Ended(1, "Traceback\nValueError: no such type\n"))
    assert "ended with exit code 1 and said: ValueError: no such type. Report this, with what" in text
