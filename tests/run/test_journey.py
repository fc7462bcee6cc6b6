"""What a run's manifest says of its stages, and a trace of some of its steps that xprof and Perfetto can open."""

import gzip
import json
import logging
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
import torch

from torchport.config.step_cache import Schedule
from torchport.errors import OutputError
from torchport.progress import log
from torchport.run import journey
from torchport.run.journey import profiled
from torchport.run.path import StageAtHand
from torchport.stages.family import Steps


def test_stages_whose_attention_is_in_eight_bits_are_lossy():
    asked, exact = {"attention": "splash_int8"}, {"attention": None}
    stages = {
        "encode": {"config": asked, "backend": "torchax", "cache": None},
        "denoise_first": {"config": exact, "backend": "torchax", "cache": None},
        "denoise": {"config": asked, "backend": "torchax", "cache": None},
    }
    lossy = "multiplies queries and keys in eight bits where scores have a bound"
    row = {"id": "attention splash_int8", "stage": "denoise", "equivalence": {"lossy": lossy}}
    assert journey._lossy(stages) == [row]
    stages["denoise"]["backend"] = "original"
    assert journey._lossy(stages) == []


def test_a_second_networks_first_step_is_among_the_computed_ones_also_after_a_stop(monkeypatch, caplog):
    """It has nothing to reuse: the log counts the step, and so does the manifest."""
    job = SimpleNamespace(cache=Schedule(kind="schedule", full=[0, 4]), steps=6)
    task = SimpleNamespace(job=job, noise=lambda stage: {}, original=False)
    stage = SimpleNamespace(name="denoise")
    one = journey.Journey(task, None, None, None)
    tensors = {"state/done": torch.tensor(2), "state/latents": torch.zeros(1), "text": torch.zeros(1)}
    monkeypatch.setattr(one, "_read", lambda stage: ({"shas": {}, "settings": {}}, dict(tensors)))
    assert set(one.read(stage)) == {"text"}
    one._start = (4, {})  # where a stopped run goes on
    assert journey._cache_row(task, stage, one.begins) == {"kind": "schedule", "steps": 6, "computed": [0, 2, 4]}
    with caplog.at_level(logging.INFO):
        StageAtHand(None, stage, None)._cached(None, one, Steps(resume=(4, {})))
    assert caplog.messages == ["denoise: cache schedule (lossy) computes 3 of 6 steps: 0, 2, 4"]
    del tensors["state/done"], tensors["state/latents"]
    one.read(stage)
    assert journey._cache_row(task, stage, one.begins)["computed"] == [0, 4], "a network that has all steps"


def track(items, done, total):
    """Iterates as a progress bar does."""
    yield from items


def steps_of(folder, stage, traced, count, done=0, leave=None):
    """Takes steps under a profile; in the step `leave` the loop is closed, as where another network goes on from it."""
    loop = profiled(track(range(done, count), done=done, total=count), done, traced, folder / "profile" / stage)
    taken = []
    for step in loop:
        taken.append(step)
        if step == leave:
            loop.close()
            break
        jax.block_until_ready(jnp.ones(8) * step)
    return taken


def marks(folder):
    """Returns the numbers of the steps that Perfetto's file has."""
    [file] = folder.rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return sorted({int(event["args"]["step_num"]) for event in events if "step_num" in event.get("args", {})})


@pytest.mark.parametrize(("done", "marked"), [(0, [3, 4]), (5, [8, 9])])
def test_as_many_steps_as_named_are_traced_after_the_first_two_of_the_run(tmp_path, caplog, done, marked):
    with caplog.at_level(logging.INFO, log.name):
        assert steps_of(tmp_path, "denoise", 2, done + 7, done) == list(range(done, done + 7))
    folder = tmp_path / "profile" / "denoise"
    assert marks(folder) == marked and list(folder.rglob("*.xplane.pb"))
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == f"profile: steps {marked[0]} to {marked[1]} of 'denoise' are in {folder}"
    assert f"`xprof --logdir {folder}`" in lines[1] and "perfetto_trace.json.gz at https://ui.perfetto.dev" in lines[2]


def test_a_loop_that_ends_early_has_what_it_took(tmp_path, caplog):
    with caplog.at_level(logging.INFO, log.name):
        steps_of(tmp_path, "denoise", 3, 4)
    assert marks(tmp_path) == [3, 4] and "steps 3 to 4 of" in caplog.text


def test_a_loop_of_two_steps_says_that_none_is_traced(tmp_path, caplog):
    steps_of(tmp_path, "denoise_first", 1, 2)
    assert caplog.messages == ["profile: 'denoise_first' took no more than 2 steps, and none is traced"]
    assert not (tmp_path / "profile").exists()


def test_a_loop_that_is_left_within_the_trace_ends_it(tmp_path):
    steps_of(tmp_path, "denoise_first", 3, 9, leave=3)
    steps_of(tmp_path, "denoise", 1, 3)  # JAX refuses a second trace while there is one


def test_a_trace_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "profile").write_text("a file is in its way")
    with pytest.raises(OutputError, match=r"profile/denoise: The trace cannot be written: .* --out\.$"):
        steps_of(tmp_path, "denoise", 1, 4)
    steps_of(tmp_path / "other", "denoise", 1, 3)  # JAX would refuse a second trace after one it lost


def test_after_an_error_nobody_waits_for_a_video(monkeypatch, tmp_path):
    seen = []

    def encoded(frames, fps, track):
        for frame in track(frames):
            seen.append(frame)
            time.sleep(0.01)
        return b""

    monkeypatch.setattr("torchport.run.journey.encoded", encoded)
    card, job = SimpleNamespace(makes_pictures=False), SimpleNamespace(fps=8)
    task = SimpleNamespace(card=card, job=job, folder=tmp_path)
    with pytest.raises(MemoryError), journey._rendered(task, {"frames": torch.zeros(1, 6000, 3, 4, 4)}):
        raise MemoryError
    assert len(seen) < 6000 and not list(tmp_path.iterdir())
