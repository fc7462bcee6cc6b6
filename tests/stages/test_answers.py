"""A pipeline whose own call encodes prompt and video together: what `encode_prompt` returned is given back later."""

import copy
import types

import av
import numpy
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from transformers.modeling_outputs import BaseModelOutputWithPooling

from torchport.config.card import PipelineCall
from torchport.errors import BadValueError
from torchport.save import video
from torchport.stages import diffusers_pipeline
from torchport.stages.beside import RecordedComponent
from torchport.stages.family import Settings, Steps

CALL = PipelineCall(
    network="network",
    encoders=["text"],
    before=["seer"],
    processors=["preparer"],
    embeddings={"embeds": [1, 3], "mask": None},
    negative_apart=True,
    answers=True,
    settings={"num_inference_steps": "steps", "num_frames": "frames", "guidance_scale": "guidance_scale"},
    image="video",
    edits=True,
    host=["vae"],
)
DTYPES = dict.fromkeys(("network", "text", "seer", "vae"), torch.float32)


class Text(torch.nn.Linear):
    def forward(self, prompt, level):
        return super().forward(torch.tensor([[len(prompt), level, 1.0]]))


class Seer(torch.nn.Linear):
    """It sees the video before the loop, and returns an object of transformers."""

    def forward(self, pixels):
        return BaseModelOutputWithPooling(last_hidden_state=super().forward(pixels), pooler_output=None)


class Network(torch.nn.Module):
    config = types.MappingProxyType({})

    def forward(self, sample, embeds, seen, return_dict=True):
        output = computed(sample, embeds, seen)
        return types.SimpleNamespace(sample=output) if return_dict else (output,)


def computed(sample, embeds, seen, return_dict=True):
    return sample * 0.1 + embeds.mean() + seen.mean()


computed.batches, computed.drops, computed.place = False, False, lambda **inputs: inputs


class Vae(torch.nn.Linear):
    config = types.MappingProxyType({})

    def encode(self, pixels):
        return AutoencoderKLOutput(DiagonalGaussianDistribution(pixels[:, :2]))

    def decode(self, latents, return_dict=False):
        return (latents.tanh().expand(1, 3, -1, 8, 8),)


class Editing:
    """A pipeline that takes no embeddings, as those that edit pictures have it."""

    def __init__(self, network, text, seer, preparer, vae, scheduler):
        vars(self).update(locals())
        self.video_processor = types.SimpleNamespace(
            postprocess=None, postprocess_video=lambda video, output_type: (video / 2 + 0.5).movedim(2, 1)
        )

    def set_progress_bar_config(self, disable): ...

    def encode_prompt(self, prompt, level):
        return self.text(prompt, level), None

    def __call__(
        self,
        video,
        prompt,
        num_frames,
        num_inference_steps,
        guidance_scale,
        generator,
        output_type,
        negative_prompt=None,
        **_,
    ):
        assert prompt and next(self.text.parameters()).dtype == torch.float32
        pixels = self.preparer(video)
        level = float(pixels.mean())
        embeds, _ = self.encode_prompt(prompt, level)
        negative = self.encode_prompt(negative_prompt, level)[0] if guidance_scale > 1 else embeds
        seen = self.seer(pixels).last_hidden_state
        known = self.vae.encode(pixels).latent_dist.sample(generator)
        sample = torch.randn(1, 1, num_frames, 1, 1, generator=generator)
        self.scheduler.set_timesteps(num_inference_steps)
        for time in self.scheduler.timesteps:
            one = self.network(sample=sample, embeds=embeds, seen=seen).sample
            other = self.network(sample=sample, embeds=negative, seen=known.mean(), return_dict=False)[0]
            sample = self.scheduler.step(one - other, time, sample, return_dict=False)[0]
        if output_type == "latent":
            return (sample,)
        return (self.video_processor.postprocess_video(self.vae.decode(sample)[0], output_type="pt"),)


class Thrice(Editing):
    def __call__(self, video, prompt, negative_prompt=None, **more):
        self.encode_prompt("again", 0.0)
        return super().__call__(video, prompt, negative_prompt=negative_prompt, **more)


class Masked(Editing):
    def encode_prompt(self, prompt, level):
        return self.text(prompt, level), torch.ones(1)


def prepared(frames):
    """Returns [1, 3, F, 8]: the means of the columns of the frames."""
    return torch.tensor(numpy.stack(frames) / 255.0, dtype=torch.float32).mean(1).permute(2, 0, 1)[None]


@pytest.fixture
def parts():
    torch.manual_seed(0)
    modules = {"network": Network(), "text": Text(3, 3), "seer": Seer(8, 2), "vae": Vae(1, 1)}
    loose = {"preparer": prepared, "scheduler": FlowMatchEulerDiscreteScheduler()}
    return {name: module.requires_grad_(False) for name, module in modules.items()} | loose


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    file = tmp_path_factory.mktemp("video") / "clip.mp4"
    file.write_bytes(video.encoded(torch.randint(0, 255, (5, 3, 8, 8), dtype=torch.uint8), 8, iter))
    return Settings("A cat", "dark", 7, 8, 8, 3, 4, 2.0, DTYPES, None, image=file)


def stages(name="Editing", **changes):
    card = types.SimpleNamespace(
        pipeline=f"{__name__}:{name}", call=CALL.model_copy(update=changes), text_encoders=("text",)
    )
    return {stage.name: stage for stage in diffusers_pipeline._stages(card, "card.yaml:1")}


def on_meta(parts, *names):
    return {name: copy.deepcopy(part).to("meta") if name in names else part for name, part in parts.items()}


@pytest.mark.parametrize("scale", [2.0, 1.0])
def test_the_video_is_upstreams_and_later_stages_have_no_prompt(parts, settings, scale):
    settings = Settings(**{**vars(settings), "guidance_scale": scale})
    upstream = Editing(**copy.deepcopy(parts))
    with av.open(str(settings.image)) as opened:
        frames = [frame.to_image() for frame in opened.decode(video=0)][:3]
    arguments = (frames, "A cat", 3, 4, scale, torch.Generator().manual_seed(7))
    original = upstream(*arguments, "latent", "dark")[0]
    encoded = stages()["encode"].run(parts, None, settings, Steps())
    assert ("negative_embeds" in encoded) == (scale > 1) and "mask" not in encoded
    blank = Settings(**{**vars(settings), "prompt": "", "negative_prompt": "", "image": None})
    there = on_meta(parts, "text", "seer", "vae")
    like = stages()["denoise"].like(on_meta(there, "network"), blank)
    assert {name: x.shape for name, x in like.items()} == {name: x.shape for name, x in encoded.items()}
    made = stages()["denoise"].run(there, computed, blank, Steps(), **encoded)
    assert torch.equal(made["latents"], original)
    decoded = stages()["decode"].run(on_meta(parts, "text", "seer"), None, blank, Steps(), **made)
    arguments = (*arguments[:-1], torch.Generator().manual_seed(7))
    pixels = upstream(*arguments, "pt", "dark")[0]
    assert torch.equal(decoded["frames"], (pixels.clamp(0, 1) * 255).round().to(torch.uint8))


def test_what_a_card_says_of_encode_prompt_is_what_it_does(parts, settings):
    for name, changes, words in (
        ("Thrice", {}, "'Thrice' calls 'encode_prompt' 3 times, and the card says 2"),
        ("Editing", {"negative_apart": False}, "2 times, and the card says 1. Set 'negative_apart', or remove it"),
        ("Masked", {}, r"'Masked\.encode_prompt' returns a Tensor as 'mask'. Write its shape in 'embeddings'"),
        ("Editing", {"embeddings": {"embeds": [1, 3]}}, "returns 2 values, and 'embeddings' names 1"),
    ):
        with pytest.raises(BadValueError, match=words):
            stages(name, **changes)["encode"].run(parts, None, settings, Steps())
    encoded = stages()["encode"].run(parts, None, settings, Steps())
    with pytest.raises(BadValueError, match="It calls 'encode_prompt' more than 2 times"):
        stages("Thrice")["denoise"].run(on_meta(parts, "text", "seer", "vae"), computed, settings, Steps(), **encoded)


def test_a_field_that_an_object_did_not_have_is_named(parts, settings):
    returned = RecordedComponent(parts["seer"], torch.float32, "seer", "card.yaml:1")(torch.ones(1, 8))
    assert torch.equal(returned[0], returned.last_hidden_state)
    with pytest.raises(AttributeError, match="the fields last_hidden_state, and no 'pooler_output'"):
        _ = returned.pooler_output
