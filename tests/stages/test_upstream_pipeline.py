"""A pipeline object as a card calls it: what it must take and return, and how it is refused."""

import dataclasses

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from torchport.config.card import PipelineCall
from torchport.errors import BadValueError
from torchport.stages.family import Settings
from torchport.stages.replay import First
from torchport.stages.upstream_pipeline import PipelineInputs, UpstreamPipeline, asked_steps, taken_steps

SETTINGS = Settings(
    prompt="A cat",
    negative_prompt="dark",
    seed=5,
    height=8,
    width=16,
    frames=5,
    steps=1,
    guidance_scale=6.0,
    dtypes={"network": torch.float32},
    vae_tiling=None,
)
CALL = PipelineCall(network="network", encoders=["encoder"], embeddings={"prompt_embeds": [1]}, settings={})


class Prompts:
    """A pipeline that needs no more than a prompt."""

    def __init__(self, encoder):
        self.encoder = encoder

    def encode_prompt(self, prompt, negative_prompt=None):
        return self.encoder, prompt, negative_prompt

    def __call__(self, prompt): ...


class AnyPrompts(Prompts):
    def encode_prompt(self, prompt, **kwargs):
        return self.encoder, prompt, kwargs


def upstream(name, **changes):
    return UpstreamPipeline(f"{__name__}:{name}", CALL.model_copy(update=changes), "card.yaml:1")


def test_encode_prompt_gets_what_it_takes_and_all_of_the_cards():
    assert upstream("Prompts").encoded({"encoder": 1}, SETTINGS) == (1, "A cat", "dark")
    _, _, more = upstream("AnyPrompts", encode={"clean": True}).encoded({"encoder": 1}, SETTINGS)
    assert more == {"clean": True}
    with pytest.raises(BadValueError, match=r"'Prompts\.encode_prompt' takes no argument 'clean'"):
        upstream("Prompts", encode={"clean": True}).encoded({"encoder": 1}, SETTINGS)


@pytest.mark.parametrize(
    ("video", "fact"),
    [
        (torch.zeros(1, 5, 8, 16, 3, dtype=torch.uint8), "'pt' returns uint8 [1, 5, 8, 16, 3], and not numbers"),
        (torch.zeros(1, 9, 3, 8, 16), "'pt' returns float32 [1, 9, 3, 8, 16], and not numbers"),
        ([None], "'pt' returns a list, and not numbers from 0 to 1, [1, 5, 3, 8, 16]"),
    ],
)
def test_another_result_is_refused(video, fact):
    with pytest.raises(BadValueError) as caught:
        upstream("Prompts").checked_frames(video, SETTINGS)
    assert str(caught.value).startswith(f"card.yaml:1: 'Prompts' with output_type {fact}")
    assert str(caught.value).endswith("Write a family of its own for it: docs/families.md.")


def test_frames_of_the_jobs_size_are_taken():
    frames = torch.zeros(1, 5, 3, 8, 16)
    assert upstream("Prompts").checked_frames(frames, SETTINGS) is frames


class Loopless(Prompts):
    """A pipeline whose loop takes no step, and that returns what it was made with."""

    def set_progress_bar_config(self, disable):
        pass

    def __call__(self, prompt_embeds, generator, output_type, return_dict):
        return (self.encoder,)


@pytest.mark.parametrize("latents", [torch.zeros(1, 7), [None]])
def test_latents_are_any_tensor_and_nothing_else(latents):
    """Their shape is the pipeline's own."""
    parts, settings = {"network": torch.nn.Identity()}, dataclasses.replace(SETTINGS, steps=0)
    loop = First(FlowMatchEulerDiscreteScheduler())
    pipeline = upstream("Loopless", init={"encoder": latents})

    def called():
        vae = torch.nn.Identity()
        return pipeline.called(PipelineInputs(parts, settings, {"prompt_embeds": torch.zeros(1)}, loop, vae, {}))

    if isinstance(latents, torch.Tensor):
        assert called()[0] is latents
        return
    with pytest.raises(BadValueError) as caught:
        called()
    assert str(caught.value) == (
        "card.yaml:1: 'Loopless' with output_type 'latent' returns a list, and not a tensor. "
        "Write a family of its own for it: docs/families.md."
    )


class Call(Prompts):
    def __call__(self, dynamic=False, scale=1.0, number=3, name="a", steps=None):
        raise AssertionError


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            {"dynamic": "off"},
            "call.dynamic: It is 'off', and 'Call' takes true or false. Write it as False is written.",
        ),
        ({"scale": "abc"}, "call.scale: It is 'abc', and 'Call' takes a number. Write it as 1.0 is written."),
        ({"number": 2.5}, "call.number: It is 2.5, and 'Call' takes a whole number. Write it as 3 is written."),
        ({"name": 4}, "call.name: It is 4, and 'Call' takes a text. Write it as 'a' is written."),
    ],
)
def test_an_argument_of_another_type_is_refused(call, text):
    """A text would count as true."""
    pipe, settings = Call(None), dataclasses.replace(SETTINGS, call=call)
    with pytest.raises(BadValueError) as caught:
        upstream("Call")._check_call(pipe, settings)
    assert str(caught.value) == text


def test_an_argument_of_the_defaults_type_or_without_one_is_taken():
    settings = dataclasses.replace(SETTINGS, call={"dynamic": True, "scale": 2, "number": 1, "steps": [3]})
    upstream("Call")._check_call(Call(None), settings)


def test_a_negative_prompt_that_is_encoded_apart_has_the_names_of_the_other():
    call = CALL.model_copy(
        update={"embeddings": {"embeds": [["tokens", 8]], "mask": None}, "negative_apart": True, "tokens": 7}
    )
    assert call.shapes == {
        "embeds": ["tokens", 8],
        "mask": None,
        "negative_embeds": ["tokens", 8],
        "negative_mask": None,
    }
    assert call.lists == {"embeds", "negative_embeds"}


def test_what_encode_prompt_returns_alone_is_one_value():
    class_path = f"{__name__}:One"
    assert UpstreamPipeline(class_path, CALL, "card.yaml:1").encoded({"encoder": 1}, SETTINGS) == ("A cat",)


class One(Prompts):
    def encode_prompt(self, prompt):
        return prompt


class Late:
    """A pipeline that adds noise to an image, and begins its loop late."""

    def get_timesteps(self, num_inference_steps, timesteps, strength, device):
        skipped = num_inference_steps - min(int(num_inference_steps * strength), num_inference_steps)
        return timesteps[skipped * self.scheduler.order :], num_inference_steps - skipped

    def __call__(self, prompt, image, strength=0.6, num_inference_steps=28): ...


class LateUp(Late):
    """Another one, which rounds up, has no usual number, and calls another strength its own."""

    def get_timesteps(self, num_inference_steps, strength, device):
        skipped = int(max(num_inference_steps - min(num_inference_steps * strength, num_inference_steps), 0))
        return self.scheduler.timesteps[skipped:], num_inference_steps - skipped

    def __call__(self, prompt, num_inference_steps, strength=1.0, denoise_strength=0.5): ...


def test_a_loop_that_begins_late_takes_the_jobs_steps():
    assert taken_steps(Late, 28, {}) == 16 and taken_steps(LateUp, 5, {}) == 3
    assert asked_steps(Late, 16, {}) == 28  # upstream's own, which 27 would be as good as
    assert [asked_steps(Late, steps, {}) for steps in (1, 2, 30)] == [2, 4, 50]
    assert [asked_steps(LateUp, steps, {}) for steps in (1, 2, 3)] == [1, 3, 5]
    assert asked_steps(Late, 9, {"strength": 1.0}) == 9 and asked_steps(Late, 9, {"strength": 0.3}) == 30
    assert asked_steps(Late, 9, {"strength": 0.0}) == 9  # no number is right, and upstream says so
    assert asked_steps(Prompts, 9, {}) == taken_steps(Prompts, 9, {}) == 9
