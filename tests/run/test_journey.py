"""What a run's manifest says of its stages."""

import logging
from types import SimpleNamespace

import torch

from torchport.config.step_cache import Schedule
from torchport.run import journey
from torchport.run.path import StageAtHand
from torchport.stages.family import Steps


def test_stages_whose_attention_is_in_eight_bits_are_lossy():
    asked, exact = {"attention": "splash_int8"}, {"attention": None}
    stages = {
        "encode": {"config": asked, "backend": "torchax"},
        "denoise_first": {"config": exact, "backend": "torchax"},
        "denoise": {"config": asked, "backend": "torchax"},
    }
    lossy = "multiplies queries and keys in eight bits where scores have a bound"
    row = {"id": "attention splash_int8", "stage": "denoise", "equivalence": {"lossy": lossy}}
    assert journey._eight_bits(stages) == [row]
    stages["denoise"]["backend"] = "original"
    assert journey._eight_bits(stages) == []


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
