"""What a recording of the original holds, and how much."""

import jax
import pytest

from torchport.plan import aot
from torchport.task import Request, accept
from torchport.task.devices import devices
from torchport.verify import recording
from torchport.verify.borders import size
from torchport.verify.recording import Call

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
    return lambda: recording.recorded(task(root, "original"), None, False).calls


def units(call: Call):
    paths = {border.path for border in call.outer}
    return {border: value for border, value in call.values.items() if border.path in paths}


def test_a_plan_counts_the_bytes_of_the_values_that_a_recording_has(root, recorded):
    [call] = recorded()  # both conditions of guidance
    port = task(root, "torchax")
    [stage] = port.denoising
    with aot.outlined(port, stage, devices(port.machine)) as outline:
        [called] = outline.called
    assert called.borders == pytest.approx(size(units(call)), rel=0.02)


def test_above_the_limit_the_modules_of_units_are_left_for_later(recorded, monkeypatch):
    monkeypatch.setattr(recording, "LIMIT", 0)
    [call] = recorded()
    assert call.values.keys() == units(call).keys()
    assert call.outer and not call.inner and not call.is_whole
