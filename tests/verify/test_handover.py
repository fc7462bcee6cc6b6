"""A recording goes from one process to another that waits for it."""

import os
import threading

import pytest
import torch

from torchport.errors import MachineError
from torchport.verify import handover


def test_a_process_waits_until_the_recording_is_whole(tmp_path):
    file = tmp_path / "original.pt"
    writer = threading.Timer(0.2, handover.write, ({"x": torch.ones(2)}, file))
    writer.start()
    handover.wait(file)
    assert torch.equal(torch.load(file)["x"], torch.ones(2))
    writer.join()
    assert [path.name for path in tmp_path.iterdir()] == ["original.pt"]


def test_a_process_does_not_wait_for_an_original_that_was_refused(tmp_path):
    handover.refuse(tmp_path / "original.pt")
    with pytest.raises(MachineError) as caught:
        handover.wait(tmp_path / "original.pt")
    assert str(caught.value) == (
        "torchport.verify: The original's process left no recording. Read what the original was refused for."
    )


def test_a_process_does_not_wait_when_the_one_that_began_it_has_ended(tmp_path, monkeypatch):
    parents = iter([7, 7, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    with pytest.raises(MachineError):
        handover.wait(tmp_path / "original.pt")
