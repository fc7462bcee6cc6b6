"""Families of models: found by name, as data that every stage of the path can be carried by."""

import dataclasses
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from fakes.families import HUNYUAN, HYVIDEO, loaded

from torchport.errors import ArtefactForeignError, BadValueError, ReplacementError
from torchport.stages import family as families
from torchport.stages.family import Steps

HUNYUAN_STAGES, HYVIDEO_STAGES = loaded(HUNYUAN), loaded(HYVIDEO)


class Recorded:
    """A network that adds its conditions up and remembers how it was called."""

    def __init__(self, batches):
        self.batches = self.drops = batches
        self.placed = []
        self.called = []

    def place(self, **inputs):
        self.placed.append({name: tuple(tensor.shape) for name, tensor in inputs.items()})
        return inputs

    def __call__(self, hidden_states, timestep, a, return_dict):
        self.called.append(tuple(hidden_states.shape))
        return hidden_states * a.reshape(-1, 1) + timestep.reshape(-1, 1)


@pytest.mark.parametrize("batches", [True, False])
def test_conditions_are_placed_once_and_predicted_alike_in_one_batch_or_apart(batches):
    call = Recorded(batches)
    inputs = {"a": (torch.tensor([2.0]), torch.tensor([3.0]))}
    conditions = HUNYUAN_STAGES._Conditions(call, inputs)
    x, t = torch.ones(1, 4), torch.tensor([10.0])
    for used in (2, 2, 1):
        found = conditions.predict(used, x, t)
        assert [tensor[0, 0].item() for tensor in found] == [12.0, 13.0][:used]
        assert all(tensor.shape == (1, 4) for tensor in found)
    if batches:
        assert call.called == [(2, 4), (2, 4), (1, 4)] and call.placed == [{"a": (2,)}, {"a": (1,)}]
    else:
        assert call.called == [(1, 4)] * 5 and call.placed == [{"a": (1,)}] * 3


@pytest.mark.parametrize(("bucket", "length"), [(None, 12), (1, 7), (4, 8), (5, 10), (64, 12)])
def test_text_is_cut_to_the_longest_prompt_rounded_up(bucket, length):
    tokens = [torch.arange(12.0).reshape(1, 12, 1), torch.arange(12.0).reshape(1, 12, 1)]
    masks = [(torch.arange(12) < n)[None].float() for n in (3, 7)]
    cut, cut_masks = families.fit_text([tokens, masks], bucket)
    assert [part.shape[1] for part in (*cut, *cut_masks)] == [length] * 4
    assert [int(mask.sum()) for mask in cut_masks] == [3, 7]
    assert (cut[1] == tokens[1][:, :length]).all()


def test_text_without_a_valid_token_keeps_one_bucket():
    cut, masks = families.fit_text([[torch.ones(1, 12, 1)], [torch.zeros(1, 12)]], 4)
    assert cut[0].shape == (1, 4, 1) and not masks[0].any()


@pytest.mark.parametrize("bucket", [None, 4])
def test_text_is_padded_until_the_sequence_is_whole_pieces(bucket):
    tokens, masks = [torch.ones(1, 12, 3)], [(torch.arange(12) < 3)[None]]
    text, mask, more, other = families.fit_text([tokens, masks, tokens, masks], bucket, 1000)
    assert (1000 + text[0].shape[1] + more[0].shape[1]) % families.PIECE == 0
    assert text[0].shape[1] == mask[0].shape[1] and more[0].shape[1] == other[0].shape[1] == (bucket or 12)
    assert int(mask[0].sum()) == 3 and (text[0][:, 12:] == 0).all()


@pytest.mark.parametrize(("drops", "tokens", "text"), [(True, 0, 248), (False, 729, 12)])
def test_a_program_is_given_no_token_that_the_task_masks_for_good_and_the_original_all(drops, tokens, text):
    call = Recorded(drops)
    pipe = SimpleNamespace(vision_num_semantic_tokens=729, vision_states_dim=5)
    valid = (torch.arange(12) < 6)[None].float()
    embeddings = dict(zip(HUNYUAN_STAGES.EMBEDDINGS, (torch.ones(1, 12, 3), valid) * 2, strict=True))
    inputs = HUNYUAN_STAGES._inputs(pipe, embeddings, settings(text_bucket=4), call, 10)
    assert inputs["image_embeds"][0].shape == (1, tokens, 5)
    assert inputs["encoder_hidden_states"][0].shape == (1, text, 3)
    assert inputs["encoder_attention_mask_2"][0].shape == (1, 8 if drops else 12)


def settings(**changes):
    """Settings of a small video."""
    fields = {"prompt": "A cat", "negative_prompt": "", "seed": 1, "height": 64, "width": 96, "frames": 9, "steps": 2}
    fields |= {"guidance_scale": 6.0, "dtypes": {"transformer": torch.float32}, "vae_tiling": False}
    return families.Settings(**{**fields, **changes})


def test_rotary_tables_are_computed_once_on_the_host_by_upstreams_own_code(card, tiny_folder):
    from torchport import load
    from torchport.load import checkpoint

    parts = {
        name: load.build(
            card.components[name].class_, checkpoint.read_json(tiny_folder / name / "config.json"), "float32", name
        )
        for name in ("transformer", "vae")
    }
    rope = parts["transformer"].rope
    expected = rope(torch.zeros(1, 1, 3, 4, 6))
    HUNYUAN_STAGES.prepare(parts, settings())
    assert torch.equal(rope.cos, expected[0]) and torch.equal(rope.sin, expected[1])
    assert rope.cos.shape[0] == 3 * 4 * 6
    assert not {"rope.cos", "rope.sin"} & set(parts["transformer"].state_dict())


def test_tiles_are_counted_as_upstream_cuts_them(card, tiny_folder):
    from torchport import load
    from torchport.load import checkpoint

    config = checkpoint.read_json(tiny_folder / "vae" / "config.json")
    for height, width in ((16, 16), (19, 17), (40, 20)):
        vae = load.fill(load.build(card.components["vae"].class_, config, "float32", "vae"), tiny_folder / "vae", "vae")
        latents = torch.zeros(1, 16, 1, height, width)
        vae.enable_tiling()
        counted = HUNYUAN_STAGES._tiles(vae, latents)
        calls = []
        vae.decoder = families.CallModule(
            lambda hidden_states, calls=calls: (
                calls.append(1) or torch.zeros(1, 3, 1, *(16 * size for size in hidden_states.shape[-2:]))
            ),
            "hidden_states",
            iter(()),
        )
        vae.decode(latents)
        assert len(calls) == counted, (height, width)


@pytest.fixture
def tencents(monkeypatch):
    """Stands for the two modules of Tencent's repository that the verbs read, without the variants that came later."""

    class Upstream:
        @staticmethod
        def get_vae_inference_config():
            return {"sample_size": 256, "tile_overlap_factor": 0.25}

    for name in ("hyvideo", "hyvideo.pipelines"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, content in {
        "hyvideo.commons": {"PIPELINE_CONFIGS": {"480p_t2v": {}}},
        "hyvideo.pipelines.hunyuan_video_pipeline": {"HunyuanVideo_1_5_Pipeline": Upstream},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("tencents")
def test_a_variant_that_the_checkout_lacks_is_refused_by_name():
    with pytest.raises(BadValueError) as caught:
        HYVIDEO_STAGES.pipeline(types.SimpleNamespace(variant="480p_i2v_step_distilled"), {})
    assert str(caught.value) == (
        "variant: It is '480p_i2v_step_distilled', which the checkout does not have. "
        "Use a later checkout, or one of 480p_t2v."
    )


class EarlyVAE(torch.nn.Module):
    """Tiles, but has no `memory_efficient_context`, as at the commits of 2025-11."""

    config = types.SimpleNamespace(scaling_factor=1.0)
    tile_latent_min_size = 8
    tiles = False

    def set_tile_sample_min_size(self, sample_size, overlap):
        pass

    def enable_tiling(self):
        self.tiles = True

    def decode(self, latents, return_dict):
        assert not return_dict
        return (self.decoder(latents),)


@pytest.mark.usefixtures("tencents")
@pytest.mark.parametrize(("tiling", "tiles"), [(None, True), (True, True), (False, False)])
def test_an_early_vae_is_tiled_by_its_own_switch(tiling, tiles):
    vae, latents = EarlyVAE(), torch.zeros(1, 3, 2, 4, 4)
    settings = types.SimpleNamespace(vae_tiling=tiling)
    settings.dtypes = {"vae": torch.float32}

    def call(z):
        return HYVIDEO_STAGES.decoded(torch.nn.Identity(), settings, z=z)

    made = HYVIDEO_STAGES.decode({"vae": vae}, call, settings, Steps(), latents=latents)
    assert vae.tiles is tiles
    assert torch.equal(made["frames"], torch.full((1, 2, 3, 4, 4), 128, dtype=torch.uint8))


def test_embeddings_of_an_image_are_refused_where_videos_are_made_from_text_alone():
    embeddings = dict.fromkeys((*HUNYUAN_STAGES.EMBEDDINGS, "image_embeds"), torch.zeros(1))
    with pytest.raises(ArtefactForeignError) as caught:
        HUNYUAN_STAGES._check_embeddings(dataclasses.replace(settings(), guidance_scale=1.0), embeddings)
    assert str(caught.value) == (
        "encode.safetensors: It holds 'image_embeds', and this model makes videos from text alone. "
        "Run --stage encode with this model and checkpoint."
    )


def test_a_first_stage_that_denoises_must_say_how_many_steps_it_took():
    def first_half(parts, call, settings, steps):
        return {"latents": torch.zeros(2)}

    stage = families.Stage("denoise_first", first_half, ())
    with pytest.raises(ReplacementError) as caught:
        families.check_outputs(stage, first_half(None, None, None, None))
    assert "'first_half' returns no 'done', the number of steps that it took. Return the stage's" in str(caught.value)
    families.check_outputs(stage, {"latents": torch.zeros(2), "done": torch.tensor(3)})


def test_a_dim_that_is_open_may_have_any_size_and_the_others_may_not():
    like = {"embeds": torch.zeros(1, 512, 8)}
    stage = SimpleNamespace(like=lambda parts, settings: like, open_dims={"embeds": [1]}, needs=("encode",))
    families.check_inputs(stage, {}, None, {"embeds": torch.zeros(1, 17, 8)})
    for shape in ((1, 17, 4), (2, 512, 8), (1, 512)):
        with pytest.raises(ArtefactForeignError, match=r"this run takes \[1, 512, 8\]"):
            families.check_inputs(stage, {}, None, {"embeds": torch.zeros(shape)})
