"""A pipeline that makes sound: two latents in one loop, a component that is called before it, and what is heard."""

import copy
import types

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from torchport.config.card import PipelineCall
from torchport.errors import ArtefactForeignError, BadValueError
from torchport.stages import diffusers_pipeline
from torchport.stages.family import Settings, Steps

SETTINGS = Settings("A cat", "", 7, 8, 16, 1, 4, 1.0, {}, None)
CALL = PipelineCall(
    network="network",
    encoders=["text"],
    before=["connector"],
    embeddings={"prompt_embeds": [1, 3, "connector.one*connector.two"]},
    settings={"num_inference_steps": "steps", "frame_rate": "frame_rate"},
    sound={"parts": ["speaker"], "rate": "speaker.rate"},
    host=["vae"],
)
DTYPES = dict.fromkeys(("network", "connector", "speaker", "vae"), torch.float32)


class Text:
    def encode(self, prompt):
        return torch.arange(18.0).reshape(1, 3, 6) / 10 + len(prompt)


class Connector(torch.nn.Linear):
    """It is called before the loop, and returns two tensors."""

    config = types.MappingProxyType({"one": 2, "two": 3})
    returns = tuple

    def forward(self, embeddings):
        return self.returns([super().forward(embeddings), embeddings.mean((1, 2))])


class Network(torch.nn.Module):
    """Each of its outputs depends on both latents."""

    config = types.MappingProxyType({})
    batches, drops = False, False

    def place(self, **inputs):
        return inputs

    def forward(self, hidden_states, sound_states, text, mean):
        both = hidden_states.mean() - sound_states.mean() + text.mean() + mean.mean()
        return (hidden_states * 0.1 + both, sound_states * 0.2 - both)


class Speaker(torch.nn.Module):
    config = types.MappingProxyType({"rate": 24000})

    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.tensor(3.0), requires_grad=False)

    def decode(self, latents):
        return (latents * self.gain,)


class Vae(torch.nn.Module):
    config = types.MappingProxyType({})

    def decode(self, latents, return_dict=False):
        return (torch.nn.functional.interpolate(latents.tanh().expand(1, 3, -1, -1), scale_factor=4),)


class Sounding:
    """A pipeline with sound, as LTX-2's: a copy of its scheduler has the sound's latents."""

    copies = 1

    def __init__(self, network, text, connector, speaker, vae, scheduler):
        vars(self).update(locals())
        self.video_processor = types.SimpleNamespace(
            postprocess=lambda video, output_type: video / 2 + 0.5, postprocess_video=None
        )

    def set_progress_bar_config(self, disable): ...

    def encode_prompt(self, prompt):
        return self.text.encode(prompt)

    def __call__(
        self, prompt, prompt_embeds, num_inference_steps, frame_rate, generator, output_type, latents=None, **_
    ):
        text, mean = self.connector(prompt_embeds)
        video = torch.randn(1, 1, 2, 4, generator=generator) if latents is None else latents
        sound = torch.randn(1, 2, frame_rate, generator=generator)
        others = [copy.deepcopy(self.scheduler) for _ in range(self.copies)]
        for scheduler in (self.scheduler, *others):
            scheduler.set_timesteps(num_inference_steps)
        for time in self.scheduler.timesteps:
            outputs = self.network(hidden_states=video, sound_states=sound, text=text, mean=mean)
            video = self.scheduler.step(outputs[0], time, video, return_dict=False)[0]
            for scheduler in others:
                sound = scheduler.step(outputs[1], time, sound, return_dict=False)[0]
        if output_type == "latent":
            return (video * 2, sound * 2)
        video = self.video_processor.postprocess(self.vae.decode(video)[0], output_type="pt")
        return (video, self.speaker.decode(sound)[0])


class TwoCopies(Sounding):
    copies = 2


class CopyFirst(Sounding):
    """Its loop steps with the copy first."""

    def __call__(self, **arguments):
        self.scheduler, other = copy.deepcopy(self.scheduler), self.scheduler
        self.scheduler.set_timesteps(4)
        self.scheduler.step(torch.zeros(1, 2), self.scheduler.timesteps[0], torch.zeros(1, 2))
        other.set_timesteps(4)
        other.step(torch.zeros(1, 2), other.timesteps[0], torch.zeros(1, 2))


class Silenced(Sounding):
    """It steps the video alone."""

    copies = 0


class Again(Sounding):
    """It calls its connector in the loop, too."""

    def __call__(self, prompt, prompt_embeds, **arguments):
        self.connector(prompt_embeds)
        return super().__call__(prompt, prompt_embeds, **arguments)


@pytest.fixture
def stages():
    def of(name="Sounding", **changes):
        card = types.SimpleNamespace(pipeline=f"{__name__}:{name}", call=CALL.model_copy(update=changes))
        return {stage.name: stage for stage in diffusers_pipeline._stages(card, "card.yaml:1")}

    return of


@pytest.fixture
def parts():
    torch.manual_seed(0)
    return {
        "network": Network(),
        "text": Text(),
        "connector": Connector(6, 4).requires_grad_(False),
        "speaker": Speaker(),
        "vae": Vae(),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
    }


SET = Settings(**{**vars(SETTINGS), "dtypes": DTYPES, "frame_rate": 5})


def without_values(parts, *names):
    """Returns parts of which some have no storage, as in a stage that only asks for their configurations."""
    return {name: copy.deepcopy(part).to("meta") if name in names else part for name, part in parts.items()}


def test_video_and_sound_are_upstreams_also_after_a_stop_at_any_step(stages, parts):
    upstream = Sounding(**copy.deepcopy(parts))

    def original(kind):
        generator = torch.Generator().manual_seed(7)
        return upstream(None, upstream.encode_prompt("A cat"), 4, 5, generator, kind)

    encoded = stages()["encode"].run(parts, None, SET, Steps())
    assert sorted(encoded) == ["before.connector.0.0", "before.connector.0.1", "before.structure", "prompt_embeds"]
    there = without_values(parts, "connector", "speaker")
    states = {}
    keep = Steps(finished=lambda number, state, *_: states.update({number: dict(state)}))
    whole = stages()["denoise"].run(copy.deepcopy(there), Network(), SET, keep, **encoded)
    for name, latents in zip(("latents", "sound_latents"), original("latent"), strict=True):
        assert torch.equal(2 * whole[name], latents)  # the pipeline changes them after its loop
    for number, state in states.items():
        rest = stages()["denoise"].run(copy.deepcopy(there), Network(), SET, Steps(resume=(number, state)), **encoded)
        assert all(torch.equal(rest[name], whole[name]) for name in whole)
    made = stages()["decode"].run(without_values(parts, "connector"), None, SET, Steps(), **whole)
    frames, sound = original("pt")
    assert made["sound_rate"] == 24000 and torch.equal(made["sound"], sound[0].clamp(-1, 1)) and sound.abs().max() > 1
    assert torch.equal(made["frames"][0], (frames.clamp(0, 1) * 255).round().to(torch.uint8))


def test_what_the_stages_are_like_has_the_shapes_of_what_they_get(stages, parts):
    encoded = stages()["encode"].run(parts, None, SET, Steps())
    there = without_values(parts, "connector", "speaker", "network", "vae")
    like = stages()["denoise"].like(there, SET)
    assert {name: x.shape for name, x in like.items()} == {name: x.shape for name, x in encoded.items()}
    denoised = stages()["denoise"].run(without_values(parts, "speaker"), Network(), SET, Steps(), **encoded)
    like = diffusers_pipeline._Stages(f"{__name__}:Sounding", CALL, "card.yaml:1").latents_like(there, SET)
    assert {name: x.shape for name, x in like.items()} == {name: x.shape for name, x in denoised.items()}
    # A plan has no weights: the sound is silence.
    assert not stages()["decode"].run(there | {"vae": Vae()}, None, SET, Steps(), **denoised)["sound"].any()


def test_a_guider_and_a_vae_that_encodes_without_an_image_are_parts_of_each_loop(stages):
    by_name = stages(guider=True, before=["vae"], sound=None, host=[], asks=True)
    assert list(by_name) == ["encode", "encode_image", "denoise", "decode"]
    assert all("guider" in by_name[name].parts for name in by_name) and by_name["encode"].meta == ("network", "vae")
    assert "image" not in by_name["encode_image"].uses and "guider" in by_name["denoise"].uses
    whole = CALL.model_copy(update={"guider": True})
    assert whole.takes_guidance and {"guider", "connector", "speaker"} <= set(whole.components)
    assert not CALL.takes_guidance and not CALL.encodes_video


def test_the_stages_say_what_they_use_and_what_they_have(stages):
    by_name = stages()
    assert by_name["encode"].parts == ("text", "connector", "scheduler") and "speaker" in by_name["encode"].meta
    assert by_name["denoise"].outputs == ("video", "sound") and "frame_rate" in by_name["denoise"].uses
    assert "speaker" in by_name["decode"].parts and "connector" in by_name["decode"].meta
    assert "frame_rate" not in stages(settings={})["denoise"].uses


@pytest.mark.parametrize(("stage", "missing"), [("denoise", "before.structure"), ("decode", "sound_latents")])
def test_an_artefact_without_what_the_sound_needs_is_refused(stages, parts, stage, missing):
    inputs = stages()["encode"].run(parts, None, SET, Steps())
    if stage == "decode":
        inputs = stages()["denoise"].run(without_values(parts, "speaker"), Network(), SET, Steps(), **inputs)
    del inputs[missing]
    with pytest.raises(
        ArtefactForeignError, match=f"It lacks .*Run --stage {'encode' if stage == 'denoise' else 'de'}"
    ):
        stages()[stage].run(parts, Network() if stage == "denoise" else None, SET, Steps(), **inputs)


def test_what_a_card_cannot_say_is_refused(stages, parts, monkeypatch):
    encoded = stages()["encode"].run(parts, None, SET, Steps())
    for name, words in (
        ("CopyFirst", "steps with a copy of its scheduler before the scheduler itself"),
        ("Silenced", "'Silenced' steps with 1 of its 2 latents"),
        ("Again", "'connector' is called in the loop, too, and the card has it under 'before'"),
    ):
        with pytest.raises(BadValueError, match=words):
            stages(name)["denoise"].run(without_values(parts, "speaker"), Network(), SET, Steps(), **encoded)
    with pytest.raises(BadValueError, match=r"steps with 3 copies of its scheduler\. Write a family"):
        stages("TwoCopies")["denoise"].run(without_values(parts, "speaker"), Network(), SET, Steps(), **encoded)
    denoised = stages()["denoise"].run(without_values(parts, "speaker"), Network(), SET, Steps(), **encoded)
    with pytest.raises(BadValueError, match=r"'speaker\.pace' is no number in a configuration"):
        sound = CALL.sound.model_copy(update={"rate": "speaker.pace"})
        stages(sound=sound)["decode"].run(parts, None, SET, Steps(), **denoised)
    monkeypatch.setattr(Speaker, "decode", lambda self, latents: (latents.expand(1, 3, -1, -1),))
    with pytest.raises(BadValueError, match=r"returns sound \[1, 3, 2, 5\], and not \[1, channels, samples\]"):
        stages()["decode"].run(parts, None, SET, Steps(), **denoised)
    monkeypatch.setattr(Connector, "returns", list)
    stages()["encode"].run(parts, None, SET, Steps())  # a list is kept as well
    monkeypatch.setattr(Connector, "returns", iter)
    monkeypatch.setattr(Sounding, "encode_prompt", lambda self, prompt: self.text.encode(prompt))
    with pytest.raises(BadValueError, match=r"'connector' returns a list_iterator before the first step"):
        stages()["encode"].run(parts, None, SET, Steps())
