"""What a recording of the original holds, and how much."""

import os
import threading
import types

import jax
import pytest
import torch

from torchport.errors import MachineError, OutputError
from torchport.plan import aot
from torchport.stages.family import Stage
from torchport.task import Request, accept
from torchport.task.devices import devices
from torchport.verify import recording
from torchport.verify.borders import total_bytes
from torchport.verify.recording import RecordedCall

SIZES = ("height=32", "width=48", "frames=9", "steps=2", "machine=cpu:1", "mesh={}")


def task(root, backend):
    request = Request(
        "cogvideox",
        "configs/cogvideox_demo.yaml",
        prompt="A cat",
        checkpoint="tiny",
        overrides=SIZES,
        paths=(str(root),),
        backend=backend,
        cache=False,
    )
    return accept(request)


@pytest.fixture
def recorded(root):
    """Records the original."""
    jax.devices()
    return lambda: recording.recording_of(task(root, "original"), None, False).calls


def test_outputs_of_video_and_sound_are_split_by_the_originals_calls():
    calls = [types.SimpleNamespace(wide_output=(torch.zeros(rows, 3), torch.zeros(rows, 2))) for rows in (1, 2)]
    both = (torch.arange(9.0).reshape(3, 3), torch.arange(6.0).reshape(3, 2))
    first, second = recording.split_by_call([both], calls)
    assert torch.equal(first[1], both[1][:1]) and torch.equal(second[0], both[0][1:])
    assert recording.split_by_call([tuple(x[:2] for x in both)], calls) is None
    state = {"returned.0": both[0], "sound.returned.0": both[1]}
    assert [x.shape for x in recording.latents_in(state)] == [(3, 3), (3, 2)]
    assert torch.equal(recording.latents_in({"latents": both[0]}), both[0]) and recording.latents_in({}) is None


def units(call: RecordedCall):
    paths = {border.path for border in call.outer}
    return {border: value for border, value in call.values.items() if border.path in paths}


def test_a_plan_counts_the_bytes_of_the_values_that_a_recording_has(root, recorded):
    call, last = recorded()  # each with both conditions of guidance
    assert (call.step, last.step) == (0, 1)
    port = task(root, "torchax")
    [stage] = port.denoising
    with aot.outlined(port, stage, devices(port.machine)) as outline:
        [called] = outline.called
    assert called.borders == pytest.approx(total_bytes(units(call)), rel=0.02)


def test_above_the_limit_the_modules_of_units_are_left_for_later(recorded, monkeypatch):
    monkeypatch.setattr(recording, "BORDERS_LIMIT", 0)
    call, _ = recorded()
    assert call.values.keys() == units(call).keys()
    assert call.outer and not call.inner


@pytest.mark.parametrize(
    ("name", "steps", "decodes", "stop"),
    [
        ("denoise", None, False, 5),
        ("denoise", (0, 2), False, 3),
        ("denoise", (0, 2), True, 5),
        ("denoise", None, True, 5),
        ("denoise_first", (0, 2), False, 3),
        ("denoise_first", None, False, 5),
        ("denoise_first", (0, 2), True, 5),
    ],
)
def test_a_loop_stops_after_the_last_step_that_is_looked_at_unless_its_end_is_needed(name, steps, decodes, stop):
    """By the next network, by the decoder, or to know which step is the last; its 4 steps end before the fifth."""
    stages = [Stage(name, None, ()) for name in ("denoise_first", "denoise")]
    task = types.SimpleNamespace(denoising=stages, settings=types.SimpleNamespace(steps=4))
    stage = next(stage for stage in stages if stage.name == name)
    loop = recording._RecordedLoop(task, stage, None, types.SimpleNamespace(ends={}, states={}), steps, decodes)
    assert loop.stop == stop


def watched(kinds):
    """The steps that follow from a loop whose network is called with batches of some sizes, a list for each step."""
    watch = recording._StepWatch(0, {})
    for number, batches in enumerate(kinds):
        for batch in batches:
            watch.called({"hidden_states": torch.zeros(batch, 2), "timestep": number, "skips": False})
        watch.finished(number + 1, {"latents": torch.tensor(number + 1)})
    return [(step, {name: int(tensor) for name, tensor in state.items()}) for step, state in watch.steps_with_states()]


@pytest.mark.parametrize(
    ("kinds", "steps"),
    [
        ([[1, 1]] * 5, [4]),
        ([[1, 1]], []),
        ([[1, 1], [1, 1], [1], [1], [1, 1], [1, 1]], [2, 5]),
        ([[2], [2], [2, 1], [2]], [2, 3]),
        ([[2], [2], [1], [3]], [2, 3]),
    ],
    ids=["the last", "one step", "without a condition", "one call more", "the last is of its own kind"],
)
def test_the_last_step_and_the_first_of_each_kind_follow_from_the_loop(kinds, steps):
    assert watched(kinds) == [(step, {"latents": step}) for step in steps]


def test_a_process_waits_until_the_recording_is_whole(tmp_path):
    file = tmp_path / "original.pt"
    writer = threading.Timer(0.2, recording.write, ({"x": torch.ones(2)}, file))
    writer.start()
    recording.wait(file, os.getppid())
    assert torch.equal(torch.load(file)["x"], torch.ones(2))
    writer.join()
    assert [path.name for path in tmp_path.iterdir()] == ["original.pt"]


def test_a_process_does_not_wait_when_the_one_that_began_it_has_ended(tmp_path):
    """It may have ended before this one came so far."""
    with pytest.raises(MachineError) as caught:
        recording.wait(tmp_path / "original.pt", parent=os.getppid() + 1)
    assert str(caught.value) == "torchport.verify: The process that waits for this one has ended. Verify again."


def test_a_full_disk_is_said_with_the_folder(tmp_path, monkeypatch):
    def save(recording, file):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 1612928 vs 1612816")

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(OutputError) as caught:
        recording.write({}, tmp_path / "original.pt")
    assert str(caught.value).startswith(f"{tmp_path}: What the original computes cannot be written: ")
    assert str(caught.value).endswith("Free space there, or name another folder with TMPDIR=DIR.")
