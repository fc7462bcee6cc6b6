"""Guiders: which of diffusers' are taken, what is refused of them, and what one carries from step to step."""

import pytest
import torch
from diffusers import AdaptiveProjectedGuidance, ClassifierFreeGuidance, guiders
from diffusers.guiders.guider_utils import BaseGuidance

from torchport.compile.in_force import hushed
from torchport.errors import BadValueError, TorchportError, UnknownKeyError, UnknownNameError
from torchport.stages import guiding
from torchport.stages.family import Settings

TAKEN = {
    "AdaptiveProjectedGuidance",
    "AdaptiveProjectedMixGuidance",
    "ClassifierFreeGuidance",
    "ClassifierFreeZeroStarGuidance",
    "TangentialClassifierFreeGuidance",
}
LAYERS = "changes the network's layers between two calls of a step, and a compiled program cannot be changed"
REFUSED = {
    "AutoGuidance": LAYERS,
    "FrequencyDecoupledGuidance": "takes no 'guidance_scale', which a job has",
    "LTX2Guidance": "combines 4 predictions, and there are two: with the prompt and with the negative prompt",
    "MagnitudeAwareGuidance": "cannot combine predictions of a video",
    "PerturbedAttentionGuidance": LAYERS,
    "SkipLayerGuidance": LAYERS,
    "SmoothedEnergyGuidance": LAYERS,
}


@pytest.fixture(autouse=True)
def quiet():
    """Each guider logs that guiders are experimental."""
    with hushed(True):
        yield


def settings(guider, scale=4.0):
    return Settings("", "", 0, 64, 64, 5, 3, scale, {}, None, guider=guider)


def refusal(kind, guider):
    with pytest.raises(TorchportError) as caught:
        guiding.guider(None, settings(guider), "job.yaml:3")
    assert type(caught.value) is kind
    return str(caught.value)


def test_every_guider_of_diffusers_is_taken_or_refused_by_name():
    shipped = {
        name
        for name, value in vars(guiders).items()
        if isinstance(value, type) and issubclass(value, BaseGuidance) and value is not BaseGuidance
    }
    assert shipped == TAKEN | set(REFUSED)
    for name in TAKEN:
        guider = guiding.guider(None, settings({"class": name, "stop": 0.5}))
        assert (type(guider).__name__, guider.guidance_scale, guider._stop) == (name, 4.0, 0.5)


@pytest.mark.parametrize("name", REFUSED)
def test_a_guider_that_does_more_than_combine_two_predictions_is_refused(name):
    assert refusal(BadValueError, {"class": name}) == (
        f"job.yaml:3: '{name}' {REFUSED[name]}. Take one of {', '.join(sorted(TAKEN))}."
    )


def test_a_guider_is_tried_on_a_video_before_it_is_needed():
    for name in sorted(TAKEN):
        assert guiding.counts(guiding.guider(None, settings({"class": name})), 3) == {2}
        assert guiding.counts(guiding.guider(None, settings({"class": name, "start": 0.5})), 3) == {1, 2}
    job = {"class": "AdaptiveProjectedGuidance", "adaptive_projected_guidance_norm_dim": [9]}
    with pytest.raises(BadValueError) as caught:
        guiding.counts(guiding.guider(None, settings(job)), 3, "job.yaml:3")
    text = str(caught.value)
    assert text.startswith(
        "job.yaml:3: 'AdaptiveProjectedGuidance' cannot combine predictions of a video: Dimension out of"
    )
    assert text.endswith(". Mend its arguments, or take another.")


def test_names_and_arguments_that_there_are_not_are_refused():
    assert refusal(UnknownNameError, {"class": "ClassifierFreeZeroGuidance"}) == (
        "job.yaml:3: diffusers has no guider 'ClassifierFreeZeroGuidance'. Did you mean "
        f"'ClassifierFreeZeroStarGuidance'? Known: {', '.join(sorted(TAKEN))}."
    )
    known = {"class": "ClassifierFreeZeroStarGuidance"}
    assert "takes no argument 'zero_steps' here" in refusal(UnknownKeyError, {**known, "zero_steps": 1})
    assert "takes no argument 'enabled' here" in refusal(UnknownKeyError, {**known, "enabled": False})
    assert "cannot be made of its arguments" in refusal(BadValueError, {**known, "start": 2.0})
    assert refusal(BadValueError, {**known, "zero_init_steps": "two"}) == (
        "job.yaml:3: 'zero_init_steps' is 'two'. It must be like its default, 1."
    )


def test_without_one_in_the_job_the_checkpoints_has_the_jobs_scale():
    guider = guiding.guider(ClassifierFreeGuidance(guidance_scale=7.5, guidance_rescale=0.25), settings(None))
    assert (guider.guidance_scale, guider.guidance_rescale) == (4.0, 0.25)


def step(guider, number, inputs, predictions):
    guider.set_state(step=number, num_inference_steps=3, timestep=torch.tensor(1.0))
    states = guider.prepare_inputs(inputs)
    for state, prediction in zip(states, predictions, strict=True):
        state.noise_pred = prediction
    return guider(states)[0]


def test_a_guider_with_momentum_goes_on_to_the_same_bits():
    job = {"class": "AdaptiveProjectedGuidance", "adaptive_projected_guidance_momentum": -0.5}
    inputs = {"text": (torch.zeros(1), torch.ones(1))}
    generator = torch.Generator().manual_seed(0)
    predictions = [[torch.randn(1, 2, 3, generator=generator) for _ in range(2)] for _ in range(3)]
    whole, first, second = (guiding.guider(None, settings(job)) for _ in range(3))
    outputs = [step(whole, number, inputs, predictions[number]) for number in range(3)]
    step(first, 0, inputs, predictions[0])
    step(first, 1, inputs, predictions[1])
    guiding.resume(second, inputs, guiding.state(first))
    assert torch.equal(step(second, 2, inputs, predictions[2]), outputs[2])
    without = AdaptiveProjectedGuidance(guidance_scale=4.0)
    guiding.resume(without, inputs, guiding.state(without))
    assert guiding.state(without) == {} and without.momentum_buffer is None
