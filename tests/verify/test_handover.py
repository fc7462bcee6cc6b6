"""A recording goes from one process to another that waits for it."""

import os
import threading

import pytest
import torch

from torchport.errors import MachineError, OutputError
from torchport.verify import handover


def test_a_process_waits_until_the_recording_is_whole(tmp_path):
    file = tmp_path / "original.pt"
    writer = threading.Timer(0.2, handover.write, ({"x": torch.ones(2)}, file))
    writer.start()
    handover.wait(file, os.getppid())
    assert torch.equal(torch.load(file)["x"], torch.ones(2))
    writer.join()
    assert [path.name for path in tmp_path.iterdir()] == ["original.pt"]


def test_a_process_does_not_wait_when_the_one_that_began_it_has_ended(tmp_path):
    """It may have ended before this one came so far."""
    with pytest.raises(MachineError) as caught:
        handover.wait(tmp_path / "original.pt", parent=os.getppid() + 1)
    assert str(caught.value) == "torchport.verify: The process that waits for this one has ended. Verify again."


def test_a_full_disk_is_said_with_the_folder(tmp_path, monkeypatch):
    def save(recording, file):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 1612928 vs 1612816")

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(OutputError) as caught:
        handover.write({}, tmp_path / "original.pt")
    assert str(caught.value).startswith(f"{tmp_path}: What the original computes cannot be written: ")
    assert str(caught.value).endswith("Free space there, or name another folder with TMPDIR=DIR.")
