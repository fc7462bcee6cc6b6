"""What stands for a pipeline's image: kept where the VAE runs, given back where it does not."""

import pytest
import torch

from torchport import load
from torchport.errors import ArtefactForeignError, BadValueError
from torchport.stages.diffusers_pipeline import family
from torchport.stages.family import ALWAYS, Settings
from torchport.stages.image_latents import EncodedVae, EncodingVae

PIXELS = torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 1, 32, 32)
SMALL = {"block_out_channels": [16, 16, 16, 16], "layers_per_block": 1, "norm_num_groups": 4}
SETTINGS = Settings(
    prompt="A cat",
    negative_prompt="",
    seed=0,
    height=32,
    width=48,
    frames=9,
    steps=2,
    guidance_scale=1.0,
    dtypes=dict.fromkeys(("text_encoder", "transformer", "vae"), torch.float32),
    vae_tiling=None,
)


@pytest.fixture(scope="module")
def vae():
    torch.manual_seed(0)
    return load.class_of("diffusers:AutoencoderKLCogVideoX")(**SMALL).eval()


@torch.no_grad()
def test_what_is_drawn_is_the_same_on_a_machine_without_the_vae_and_without_the_pixels(vae):
    real = vae.encode(PIXELS).latent_dist.sample(torch.Generator().manual_seed(1))
    encoding = EncodingVae(vae, torch.float32, "card.yaml:1")
    encoding.encode(PIXELS)
    encoded = EncodedVae(
        load.published("diffusers:AutoencoderKLCogVideoX", SMALL), torch.float32, encoding.moments, "encode"
    )
    blank = torch.zeros_like(PIXELS)
    assert torch.equal(encoded.encode(blank).latent_dist.sample(torch.Generator().manual_seed(1)), real)
    assert list(encoded.drawn) == ["image_latents_0"]
    after = EncodedVae(vae, torch.float32, encoded.drawn, "denoise")
    assert torch.equal(after.encode(blank).latent_dist.sample(), real)
    assert after.enable_tiling == vae.enable_tiling  # all else is the VAE's
    frames = vae.decode(real).sample
    assert torch.equal(after.decode(real).sample, frames)
    assert torch.equal(after.decode(real.double(), return_dict=False)[0], frames)  # in its dtype


@torch.no_grad()
def test_the_mean_is_given_back_where_the_pipeline_takes_that(vae):
    encoding = EncodingVae(vae, torch.float32, "card.yaml:1")
    mean = encoding.encode(PIXELS).latent_dist.mode()
    encoded = EncodedVae(vae, torch.float32, encoding.moments, "encode")
    assert torch.equal(encoded.encode(PIXELS, return_dict=False)[0].mode(), mean)


def test_without_weights_the_shapes_are_right(vae):
    encoding = EncodingVae(load.published("diffusers:AutoencoderKLCogVideoX", SMALL), torch.float32, "card.yaml:1")
    encoding.encode(PIXELS)
    [moments] = encoding.moments.values()
    assert moments.shape == vae.encode(PIXELS).latent_dist.parameters.shape and not moments.is_meta


def test_what_was_not_kept_is_refused_with_the_stage_that_keeps_it(vae):
    with pytest.raises(ArtefactForeignError) as caught:
        EncodedVae(vae, torch.float32, {}, "denoise").encode(PIXELS).latent_dist.sample()
    assert str(caught.value) == (
        "denoise.safetensors: It lacks 'image_latents_0'. Run --stage denoise with this model."
    )


def test_a_vae_without_a_latent_distribution_is_refused():
    class Plain(torch.nn.Linear):
        def encode(self, pixels):
            return (pixels,)

    with pytest.raises(BadValueError) as caught:
        EncodingVae(Plain(1, 1), torch.float32, "card.yaml:1").encode(PIXELS)
    assert str(caught.value) == (
        "card.yaml:1: 'Plain.encode' returns no latent distribution of mean and variance. An image goes through one. "
        "Write a family with a loop of its own for it: docs/families.md."
    )


def test_a_card_says_whether_its_model_takes_an_image(pack):
    for model, takes in (("cogvideox", False), ("cogvideox_i2v", ALWAYS)):
        card, _ = pack.card(model)
        assert vars(family(card, "card.yaml:1"))["TAKES_IMAGE"] == takes


def test_a_pipeline_that_does_not_encode_its_image_first_is_refused(pack):
    card, _ = pack.card("cogvideox")  # text-to-video, of which this argument is none of an image
    card = card.model_copy(update={"call": card.call.model_copy(update={"image": "attention_kwargs"})})
    [stage] = (stage for stage in family(card, "card.yaml:1").STAGES if stage.name == "denoise")
    parts = {
        name: load.published(card.components[name].class_, card.tiny.components[name])
        for name in ("transformer", "vae")
    }
    parts["scheduler"] = load.class_of(card.components["scheduler"].class_)()
    with pytest.raises(BadValueError) as caught:
        stage.like(parts, SETTINGS)
    assert str(caught.value).startswith(
        "card.yaml:1: 'CogVideoXPipeline' does not call its VAE's 'encode' before its first step. "
    )
