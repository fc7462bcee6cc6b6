"""`family: diffusers`: a loop of upstream's own that goes on after any step, and what it does not carry is refused."""

import dataclasses
import functools

import pytest
import torch
from diffusers import CogVideoXPipeline
from fakes.artefacts import levels, same_frames

from torchport import load
from torchport.errors import ArtefactForeignError, BadValueError
from torchport.load import tiny
from torchport.stages import recorder
from torchport.stages.diffusers_pipeline import family
from torchport.stages.family import Settings, Steps
from torchport.stages.replay import Finished, First, latents_of

STEPS = 8
SETTINGS = Settings(
    prompt="A cat",
    negative_prompt="dark",
    seed=5,
    height=32,
    width=48,
    frames=9,
    steps=STEPS,
    guidance_scale=6.0,
    dtypes=dict.fromkeys(("text_encoder", "transformer", "vae"), torch.float32),
    vae_tiling=None,
)
DDIM = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
SCHEDULERS = {
    "diffusers:CogVideoXDDIMScheduler": DDIM,
    "diffusers:CogVideoXDPMScheduler": DDIM,
    "diffusers:UniPCMultistepScheduler": {"prediction_type": "flow_prediction", "use_flow_sigmas": True},
    "diffusers:DPMSolverMultistepScheduler": {"prediction_type": "v_prediction", "algorithm_type": "sde-dpmsolver++"},
}


@pytest.fixture(scope="module")
def cogvideox(pack):
    return pack.card("cogvideox")[0]


@pytest.fixture
def stage(cogvideox):
    """Returns a stage of the card, of which fields of `call` may be others."""

    def made(name, **changes):
        card = cogvideox.model_copy(update={"call": cogvideox.call.model_copy(update=changes)})
        [result] = (stage for stage in family(card, "card.yaml:1").STAGES if stage.name == name)
        return result

    return made


@pytest.fixture(scope="module")
def parts_with(cogvideox):
    """Returns the parts of denoising, with a scheduler of a class."""
    tiny_configs = cogvideox.tiny.components
    network, vae = (load.published(cogvideox.components[n].class_, tiny_configs[n]) for n in ("transformer", "vae"))

    def made(scheduler="diffusers:CogVideoXDDIMScheduler", **config):
        config = {**SCHEDULERS.get(scheduler, {}), **config}
        return {"transformer": network, "vae": vae, "scheduler": load.class_of(scheduler)(**config)}

    return made


class Network:
    """A network of which every input counts."""

    batches = drops = False

    def __init__(self):
        self.times = 0

    def place(self, **inputs):
        return inputs

    def __call__(self, *, hidden_states, encoder_hidden_states, timestep, image_rotary_emb, **rest):
        self.times += 1
        text = encoder_hidden_states.mean(dim=(1, 2)).reshape(-1, 1, 1, 1, 1)
        time = timestep.float().reshape(-1, 1, 1, 1, 1) / 1000
        return torch.tanh(hidden_states + text * time + image_rotary_emb[0].mean())


@pytest.fixture
def embeddings(stage, parts_with):
    like = stage("denoise").like(parts_with(), SETTINGS)
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(tensor.shape, generator=generator) for name, tensor in like.items()}


class Denoising:
    """Runs the stage `denoise`, and keeps the state after each step."""

    def __init__(self, stage, parts, embeddings, settings=SETTINGS):
        self.stage, self.parts, self.embeddings, self.settings = stage, parts, embeddings, settings
        self.states = {}

    def __call__(self, resume=None, **inputs):
        self.network, self.items = Network(), []
        steps = Steps(self.track, lambda number, state, timestep: self.states.__setitem__(number, dict(state)), resume)
        every = {**self.embeddings, **inputs}
        return self.stage.run(self.parts(), self.network, self.settings, steps, **every)["latents"]

    def track(self, items, done, total):
        for item in items:
            self.items.append(item)
            yield item


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of diffusers' own schedulers
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_loop_stopped_after_any_step_goes_on_to_the_same_bits(stage, parts_with, embeddings, scheduler):
    denoising = Denoising(stage("denoise"), lambda: parts_with(scheduler), embeddings)
    whole = denoising()
    states = dict(denoising.states)
    assert torch.equal(latents_of(states[STEPS]), whole), "what is kept after a step is the latents"
    assert list(states) == denoising_numbers(1) and denoising.network.times == STEPS
    for number in range(1, STEPS):
        assert torch.equal(denoising(resume=(number, states[number])), whole), number
        assert denoising.network.times == STEPS - number
        assert denoising.items == list(range(number, STEPS))


def denoising_numbers(first):
    return list(range(first, STEPS + 1))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("scheduler", list(SCHEDULERS)[:2])
def test_the_loop_is_upstreams(stage, parts_with, embeddings, scheduler, dynamic):
    class Module(torch.nn.Module):
        """The same network, as a pipeline wants it."""

        dtype, device, config = torch.float32, torch.device("cpu"), parts_with()["transformer"].config
        cache_context = parts_with()["transformer"].cache_context

        def forward(self, **inputs):
            return (Network()(**inputs),)

    parts = parts_with(scheduler)
    pipe = CogVideoXPipeline(None, None, parts["vae"], Module(), parts["scheduler"])
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(SETTINGS.seed)
    size = {"height": 32, "width": 48, "num_frames": 9, "num_inference_steps": STEPS, "guidance_scale": 6.0}
    more = {"use_dynamic_cfg": dynamic, "output_type": "latent", "generator": generator}
    expected = pipe(**size, **more, **embeddings).frames
    ours = Denoising(
        stage("denoise", constants={"use_dynamic_cfg": dynamic}), lambda: parts_with(scheduler), embeddings
    )
    assert torch.equal(ours(), expected)


def test_noise_of_the_drawn_shape_is_taken_and_any_other_refused(stage, parts_with, embeddings):
    denoising = Denoising(stage("denoise"), parts_with, embeddings)
    drawn = torch.randn(1, 4, 8, 4, 6, generator=torch.Generator().manual_seed(SETTINGS.seed))
    assert torch.equal(denoising(noise=drawn), denoising())
    with pytest.raises(BadValueError, match=r"shape \[1, 8, 3, 4, 6\].*it must be \[1, 4, 8, 4, 6\]"):
        denoising(noise=torch.zeros(1, 8, 3, 4, 6))


def test_embeddings_of_another_dtype_become_the_networks(stage, parts_with, embeddings):
    rounded = {name: value.bfloat16() for name, value in embeddings.items()}
    as_float32 = {name: value.float() for name, value in rounded.items()}
    latents = [Denoising(stage("denoise"), parts_with, each)() for each in (rounded, as_float32)]
    assert latents[0].dtype == torch.float32 and torch.equal(*latents)


def test_several_videos_at_once_are_refused(parts_with):
    scheduler = parts_with()["scheduler"]
    scheduler.set_timesteps(2)
    First(scheduler)
    with pytest.raises(BadValueError) as caught:
        scheduler.step(torch.zeros(2, 4), 1, torch.zeros(2, 4))
    assert str(caught.value) == (
        "'call': The pipeline makes 2 videos at once. Make one, and run again with another --seed for the next."
    )


def refusal(kind, denoising):
    with pytest.raises(kind) as caught:
        denoising()
    return str(caught.value)


def test_embeddings_that_are_missing_are_refused(stage, parts_with, embeddings):
    del embeddings["negative_prompt_embeds"]
    assert refusal(ArtefactForeignError, Denoising(stage("denoise"), parts_with, embeddings)) == (
        "encode.safetensors: It lacks 'negative_prompt_embeds', and the guidance scale is 6.0. Run --stage encode with "
        "this model and guidance scale."
    )


def test_a_scheduler_with_two_calls_a_step_is_refused(stage, parts_with, embeddings):
    from diffusers import CogVideoXDDIMScheduler

    class Twice(CogVideoXDDIMScheduler):
        def set_timesteps(self, num_inference_steps, device=None):
            super().set_timesteps(2 * num_inference_steps, device)

    parts = {**parts_with(), "scheduler": Twice()}
    text = refusal(BadValueError, Denoising(stage("denoise"), lambda: parts, embeddings))
    assert text == (
        "card.yaml:1: 'CogVideoXPipeline' calls its scheduler's 'step' 16 times in 8 steps. Replay needs one call a "
        "step. Write a family with a loop of its own for it: docs/families.md."
    )


def test_a_scheduler_that_keeps_what_cannot_be_saved_is_refused(stage, parts_with, embeddings):
    from diffusers import CogVideoXDDIMScheduler

    class Counting(CogVideoXDDIMScheduler):
        def step(self, model_output, timestep, sample, generator=None, return_dict=True):
            self.seen = {timestep}
            return super().step(model_output, timestep, sample, return_dict=return_dict)

    parts = {**parts_with(), "scheduler": Counting()}
    assert refusal(BadValueError, Denoising(stage("denoise"), lambda: parts, embeddings)) == (
        "Counting: It keeps 'seen', of the type set, from step to step of 'CogVideoXPipeline'. That cannot be saved. "
        "Write a family with a loop of its own for it: docs/families.md."
    )


def test_a_scheduler_that_returns_no_tuple_is_refused(stage, parts_with, embeddings):
    from diffusers import CogVideoXDDIMScheduler

    class Plain(CogVideoXDDIMScheduler):
        def step(self, model_output, timestep, sample, generator=None, return_dict=True):
            return [sample]

    parts = {**parts_with(), "scheduler": Plain()}
    assert refusal(BadValueError, Denoising(stage("denoise"), lambda: parts, embeddings)) == (
        "Plain: Its 'step' returns a list to 'CogVideoXPipeline', and no tuple of tensors. Write a family with a loop "
        "of its own for it: docs/families.md."
    )


def test_a_pipeline_that_asks_step_for_an_object_gets_one():
    from diffusers import CogVideoXDDIMScheduler

    scheduler, latents = CogVideoXDDIMScheduler(), torch.ones(1, 4)
    scheduler.set_timesteps(2)
    Finished(scheduler, {"latents": latents}, None)
    given = (latents / 2, scheduler.timesteps[0], latents / 2)
    assert scheduler.step(*given).prev_sample is scheduler.step(*given, return_dict=False)[0] is latents


def test_an_argument_that_the_pipeline_does_not_take_is_refused(stage, parts_with, embeddings):
    text = refusal(BadValueError, Denoising(stage("denoise", constants={"eto": 0.0}), parts_with, embeddings))
    assert text.startswith("card.yaml:1: 'CogVideoXPipeline.__call__' takes no argument 'eto'. Did you mean 'eta'")


def test_a_shape_with_a_name_that_the_network_has_not_is_refused(stage, parts_with):
    shapes = {"prompt_embeds": [1, 226, "text_dim"]}
    with pytest.raises(BadValueError, match=r"'text_dim' is no number in the configuration of 'transformer'"):
        stage("denoise", embeddings=shapes).like(parts_with(), dataclasses.replace(SETTINGS, guidance_scale=1.0))


def test_whole_numbers_in_one_dim_are_where_each_prompt_ends_and_masks_are_zeros(stage, parts_with):
    shapes = {"prompt_embeds": [1, 226, 4], "ends": [3], "mask": [1, "tokens"]}
    made = stage("denoise", embeddings=shapes, tokens=100, dtypes={"ends": "int32", "mask": "int64"})
    like = made.like(parts_with(), dataclasses.replace(SETTINGS, guidance_scale=1.0))
    assert like["ends"].tolist() == [0, 50, 100] and like["ends"].dtype == torch.int32
    assert not like["mask"].any() and like["mask"].shape == (1, 100)


@pytest.fixture(scope="module")
def encoders(cogvideox):
    make = tiny._component  # the parts that the tiny checkpoint is written from
    return {"text_encoder": make(cogvideox, {}, "text_encoder").eval(), "tokenizer": make(cogvideox, {}, "tokenizer")}


def test_encode_returns_what_the_pipeline_would_make_of_the_prompts(stage, encoders):
    outputs = stage("encode").run(encoders, None, SETTINGS, Steps())
    pipe = CogVideoXPipeline(encoders["tokenizer"], encoders["text_encoder"], None, None, None)
    with torch.no_grad():
        prompt, negative = pipe.encode_prompt("A cat", "dark", device=torch.device("cpu"))
    assert torch.equal(outputs["prompt_embeds"], prompt) and torch.equal(outputs["negative_prompt_embeds"], negative)
    unguided = stage("encode").run(encoders, None, dataclasses.replace(SETTINGS, guidance_scale=1.0), Steps())
    assert list(unguided) == ["prompt_embeds"]


def test_embeddings_of_another_number_than_encode_prompt_returns_are_refused(stage, encoders):
    with pytest.raises(BadValueError, match=r"returns 2 values, and 'embeddings' names 1\. Name each of them"):
        stage("encode", embeddings={"prompt_embeds": [1]}).run(encoders, None, SETTINGS, Steps())


@pytest.mark.parametrize(
    ("dtypes", "fact", "remedy"),
    [
        ({}, "in int64, and the card says float32", "Write 'dtypes: {prompt_embeds: int64}'"),
        ({"prompt_embeds": "bool"}, "in int64, and the card says bool", "Write 'dtypes: {prompt_embeds: int64}'"),
    ],
)
def test_whole_numbers_where_the_card_names_others_are_refused(stage, monkeypatch, encoders, dtypes, fact, remedy):
    ids = torch.zeros(1, 226, dtype=torch.int64)
    monkeypatch.setattr(CogVideoXPipeline, "encode_prompt", lambda self, prompt, **kwargs: (ids, ids))
    with pytest.raises(BadValueError) as caught:
        stage("encode", dtypes=dtypes).run(encoders, None, SETTINGS, Steps())
    fact = f"'CogVideoXPipeline.encode_prompt' returns 'prompt_embeds' {fact}"
    assert str(caught.value) == f"card.yaml:1: {fact}. {remedy}."


def test_numbers_where_the_card_names_a_mask_are_refused(stage, encoders):
    remedy = r"in float32, and the card says bool\. Remove 'prompt_embeds' from 'dtypes'"
    with pytest.raises(BadValueError, match=remedy):
        stage("encode", dtypes={"prompt_embeds": "bool"}).run(encoders, None, SETTINGS, Steps())


def test_a_mask_that_encode_prompt_leaves_out_is_one_of_ones(stage, monkeypatch, encoders):
    embeds, shapes = torch.zeros(1, 9, 4), {"prompt_embeds": [1, "tokens", 4], "prompt_mask": [1, "tokens"]}
    monkeypatch.setattr(CogVideoXPipeline, "encode_prompt", lambda self, prompt, **kwargs: (embeds, None))
    settings = dataclasses.replace(SETTINGS, guidance_scale=1.0)
    call = {"embeddings": shapes, "dtypes": {"prompt_mask": "int64"}, "conditions": {}}
    mask = stage("encode", **call).run(encoders, None, settings, Steps())["prompt_mask"]
    assert torch.equal(mask, torch.ones(1, 9, dtype=torch.int64))
    monkeypatch.setattr(CogVideoXPipeline, "encode_prompt", lambda self, prompt, **kwargs: (None, embeds[:, :, 0]))
    with pytest.raises(BadValueError, match="returns None as 'prompt_embeds', and the card says that it has a shape"):
        stage("encode", **call).run(encoders, None, settings, Steps())


def test_latents_of_a_hand_written_port_that_lack_more_than_padding_are_refused(stage, parts_with):
    latents = {"latents_BCTHW": torch.zeros(1, 8, 1, 4, 6)}
    with pytest.raises(ArtefactForeignError, match=r"shape \[1, 1, 8, 4, 6\], and this job takes \[1, 4, 8, 4, 6\]"):
        stage("decode").run(parts_with(), None, SETTINGS, Steps(), **latents)


def test_latents_of_a_hand_written_port_need_a_card_that_says_what_they_are(stage, parts_with):
    latents = {"latents_BCTHW": torch.zeros(1, 8, 3, 4, 6)}
    with pytest.raises(ArtefactForeignError) as caught:
        stage("decode", hand_written=None).run(parts_with(), None, SETTINGS, Steps(), **latents)
    assert str(caught.value) == (
        "stage2_latents.safetensors: Its latents are [B, C, T, H, W], and the card does not say how "
        "'CogVideoXPipeline' has them. Run --stage denoise with this model, or add 'hand_written' at card.yaml:1."
    )


class Drawing(CogVideoXPipeline):
    """A pipeline that adds noise to what its loop ends with, as a VAE that takes a timestep needs it."""

    def __call__(self, generator, **kwargs):
        self.seeded = generator
        return super().__call__(generator=generator, **kwargs)

    def decode_latents(self, latents):
        return super().decode_latents(latents + torch.randn(latents.shape, generator=self.seeded))


@pytest.fixture
def decoding(monkeypatch, cogvideox, stage, parts_with):
    """Decodes tensors with a pipeline that draws, and a VAE with weights that stays on the host."""
    monkeypatch.setattr("diffusers.CogVideoXPipeline", Drawing)
    vae = tiny._component(cogvideox, {}, "vae").eval()

    def decoded(**tensors):
        with torch.no_grad():
            decode = stage("decode", host=["vae"])
            return decode.run({**parts_with(), "vae": vae}, None, SETTINGS, Steps(), **tensors)["frames"]

    return decoded


def test_code_after_the_loop_draws_on_where_the_loop_ended(stage, parts_with, embeddings, decoding):
    steps = Steps()
    ends = {
        seed: stage("denoise").run(
            parts_with(), Network(), dataclasses.replace(SETTINGS, seed=seed), steps, **embeddings
        )
        for seed in (5, 6)
    }
    frames = decoding(**ends[5])
    assert torch.equal(decoding(**ends[5]), frames)
    assert not torch.equal(decoding(latents=ends[5]["latents"], generator=ends[6]["generator"]), frames)
    with pytest.raises(ArtefactForeignError) as caught:
        decoding(latents=ends[5]["latents"])
    assert str(caught.value) == (
        "denoise.safetensors: It lacks 'generator', the state of the seed's generator, and the pipeline draws after "
        "its loop. Run --stage denoise with this model."
    )


class Sharpening(CogVideoXPipeline):
    """A pipeline that does more with its video than to post-process it."""

    def decode_latents(self, latents):
        return super().decode_latents(latents) * 1.5


def test_a_video_that_is_changed_is_refused_unless_its_vae_stays_on_the_host(
    monkeypatch, cogvideox, stage, parts_with, embeddings
):
    monkeypatch.setattr("diffusers.CogVideoXPipeline", Sharpening)
    latents = {"latents": torch.randn(1, 4, 8, 4, 6, generator=torch.Generator().manual_seed(1))}
    with pytest.raises(BadValueError) as caught:
        stage("decode").run(parts_with(), Network(), SETTINGS, Steps(), **latents)
    assert str(caught.value) == (
        "card.yaml:1: 'CogVideoXPipeline' calls 'torch.Tensor.mul' with what its VAE decoded. Decode on the host: add "
        "'host: [vae]' to the card's 'call'."
    )
    decode, vae = stage("decode", host=["vae"]), tiny._component(cogvideox, {}, "vae").eval()
    assert (decode.network, decode.parts, decode.like) == (None, ("scheduler", "vae"), None)
    outputs = decode.run({**parts_with(), "vae": vae}, None, SETTINGS, Steps(), **latents)
    with torch.no_grad():
        z = latents["latents"][:, 1:].permute(0, 2, 1, 3, 4) / vae.config.scaling_factor
        video = (vae.decode(z).sample * 1.5 * 0.5 + 0.5).permute(0, 2, 1, 3, 4)
    assert same_frames(outputs["frames"], levels(video))


def test_the_checks_before_a_run_see_what_decode_is_called_with(stage, parts_with, embeddings):
    decode, parts = stage("decode"), parts_with()
    like = decode.like(parts, SETTINGS)
    after = stage("denoise").run(parts_with(), Network(), SETTINGS, Steps(), **embeddings)
    assert {name: (value.shape, value.dtype) for name, value in like.items()} == {
        name: (value.shape, value.dtype) for name, value in after.items()
    }
    vae, how = parts["vae"], functools.partial(decode.call, settings=SETTINGS.traced())
    [called] = recorder.network_calls(decode, parts, vae, how, SETTINGS)
    assert {name: list(value.shape) for name, value in called.tensors.items()} == {"z": [1, 8, 3, 4, 6]}
    frames, not_finite = called.output
    assert (list(frames.shape), frames.dtype) == ([1, 9, 3, 32, 48], torch.uint8) and not_finite.ndim == 0


def test_a_vae_that_makes_another_number_of_frames_is_refused_before_a_run(stage, parts_with):
    """Of an even number of latent frames CogVideoX's makes three more than asked for."""
    decode, parts, settings = stage("decode"), parts_with(), dataclasses.replace(SETTINGS, frames=13)
    how = functools.partial(decode.call, settings=settings.traced())
    with pytest.raises(BadValueError) as caught:
        recorder.network_calls(decode, parts, parts["vae"], how, settings)
    assert str(caught.value) == (
        "card.yaml:1: 'CogVideoXPipeline' with output_type 'pt' returns float32 [1, 16, 3, 32, 48], and not numbers "
        "from 0 to 1, [1, 13, 3, 32, 48]. Write a family of its own for it: docs/families.md."
    )


def test_decode_knows_the_image_latents_of_its_job_without_an_encoder(pack):
    card = pack.card("cogvideox_i2v")[0]
    networks = {
        name: load.published(card.components[name].class_, card.tiny.components[name]) for name in NETWORKS[::2]
    }
    networks["vae"].encoder = None
    scheduler = load.class_of(card.components["scheduler"].class_)(**card.tiny.components["scheduler"])
    decode = family(card, "card.yaml:1").STAGES[-1]
    like = decode.like({**networks, "scheduler": scheduler}, SETTINGS)
    assert list(like["image_latents_0"].shape) == [1, 16, 1, 4, 6] and "generator" in like


def test_latents_of_another_size_are_not_decoded(stage, parts_with):
    with pytest.raises(ArtefactForeignError) as caught:
        stage("decode").run(parts_with(), None, SETTINGS, Steps(), latents=torch.zeros(1, 3, 8, 4, 6))
    assert str(caught.value) == (
        "denoise.safetensors: 'latents' has shape [1, 3, 8, 4, 6], and this job takes [1, 4, 8, 4, 6]. Run --stage "
        "denoise with this model and size."
    )


NETWORKS = ("transformer", "transformer_2", "vae")


def two_networks(pack, card, stage, **call):
    """Returns a stage of the card with two networks, and its parts."""
    card = card.model_copy(update={"call": card.call.model_copy(update=call)})
    [result] = (each for each in family(card, "card.yaml:1").STAGES if each.name == stage)
    networks = {name: load.published(card.components[name].class_, card.tiny.components[name]) for name in NETWORKS}
    scheduler = load.class_of(card.components["scheduler"].class_)(**card.tiny.components["scheduler"])
    return result, {**networks, "scheduler": scheduler}


def test_a_rehearsal_counts_the_steps_of_each_of_two_networks(pack):
    settings = dataclasses.replace(
        SETTINGS, dtypes=dict.fromkeys(("transformer", "transformer_2", "vae"), torch.float32)
    )
    for name, steps in {"denoise_first": 3, "denoise": 5}.items():
        stage, parts = two_networks(pack, pack.card("wan")[0], name)
        network = parts[stage.network]
        [called] = recorder.network_calls(stage, parts, network, lambda module, **inputs: module(**inputs), settings)
        assert (called.times, called.steps) == (steps, steps)
        assert {tensor.shape[0] for tensor in called.tensors.values()} == {2}  # conditions of guidance


def test_a_loop_that_goes_back_to_its_first_network_is_refused(pack):
    settings = dataclasses.replace(
        SETTINGS, dtypes=dict.fromkeys(("transformer", "transformer_2", "vae"), torch.float32)
    )
    stage, parts = two_networks(pack, pack.card("wan")[0], "denoise", network=["transformer_2", "transformer"])
    zeros = stage.like(parts, settings)

    class Zeros(Network):
        def __call__(self, *, hidden_states, **rest):
            return torch.zeros_like(hidden_states)

    with pytest.raises(BadValueError) as caught:
        stage.run(parts, Zeros(), settings, Steps(), **zeros)
    assert str(caught.value) == (
        "WanPipeline: Step 4 of 8 goes back from its second network to the first. "
        "Write a family with a loop of its own for it: docs/families.md."
    )
    first, parts = two_networks(pack, pack.card("wan")[0], "denoise_first", network=["transformer_2", "transformer"])
    with pytest.raises(BadValueError, match="'steps': 8 steps of 'WanPipeline' leave none to 'transformer_2'"):
        first.run(parts, Zeros(), settings, Steps(), **zeros)
