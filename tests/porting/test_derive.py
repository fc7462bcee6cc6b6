"""Cards that are derived from pipelines of diffusers."""

import subprocess
import sys
import types

import pipelines
import pytest
import torch
import transformers
import yaml
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.utils import DummyObject

from torchport.config import parse_document, validated
from torchport.config.card import Card
from torchport.config.pack import find_pack
from torchport.errors import BadValueError, UnknownNameError
from torchport.load import tiny
from torchport.porting import derive
from torchport.porting.derive import parts
from torchport.porting.derive import trial as trials
from torchport.porting.derive.trial import Observed, PipelineTrial


@pytest.fixture(scope="module")
def texts():
    """The derived card and jobs of a pipeline, by its name: of its demo, and of its published weights."""
    made = {}

    def of(name):
        if name not in made:
            made[name] = derive.derived_card(f"diffusers:{name}")
        return tuple(map(yaml.safe_load, made[name]))

    of.made = made
    return of


def test_a_video_pipelines_card_says_what_its_code_does(texts):
    card, job, published = texts("MochiPipeline")
    prompt, mask = [1, 256, "text_embed_dim"], [1, 256]
    assert card["call"] == {
        "network": "transformer",
        "encoders": ["text_encoder", "tokenizer"],
        "embeddings": {
            "prompt_embeds": prompt,
            "prompt_attention_mask": mask,
            "negative_prompt_embeds": prompt,
            "negative_prompt_attention_mask": mask,
        },
        "dtypes": {"prompt_attention_mask": "bool", "negative_prompt_attention_mask": "bool"},
        "settings": {
            "num_frames": "frames",
            "num_inference_steps": "steps",
            "height": "height",
            "width": "width",
            "guidance_scale": "guidance_scale",
        },
        "init": {"force_zeros_for_empty_prompt": False},
    }
    assert card["frames"] == {"multiple_of": 6, "plus": 1} and card["size_multiple_of"] == 16
    assert card["stacks"] == {
        "transformer": {"transformer_blocks": {"carries": ["hidden_states", "encoder_hidden_states"], "last": 1}}
    }
    assert card["patches"]["denoise"] == ["diffusers/mochi", "torch/attention", "torch/normalization", "torch/autocast"]
    assert card["tiny"]["components"]["transformer"]["text_embed_dim"] == 96  # as wide as the text encoder
    assert (job["frames"], job["mesh"]) == (13, {"dp": 2, "sp": 4})
    assert (published["height"], published["width"], published["frames"]) == (480, 832, 19)  # 19 is upstream's
    assert (published["steps"], published["guidance_scale"]) == (64, 4.5)
    assert texts.made["MochiPipeline"][0].count("\n") <= 60


@pytest.mark.slow
def test_blocks_that_know_their_place_are_not_stacked(texts):
    card, *_ = texts("ZImagePipeline")
    assert card["stacks"]["transformer"].keys() == {"noise_refiner", "context_refiner"}, "`layers` have numbers"


def test_two_calls_a_step_are_conditions(texts):
    card, _, published = texts("WanPipeline")
    assert card["call"]["conditions"] == {"encoder_hidden_states": ["prompt_embeds", "negative_prompt_embeds"]}
    assert card["patches"] == {
        "denoise": ["diffusers/wan", "torch/attention", "torch/normalization"],
        "decode": ["diffusers/wan_vae"],
    }
    assert published == {
        "height": 480,
        "width": 832,
        "frames": 81,
        "fps": 16,
        "steps": 50,
        "guidance_scale": 5.0,
        "machine": "v6e:2x4",
        "mesh": {"dp": 2, "sp": 4},
        "strategy": "fsdp",
        "checkpoint": "Wan-AI/Wan2.1-T2V-14B-Diffusers@main",
        "encode": "devices",
    }


def test_a_published_job_has_upstreams_numbers_and_no_field_that_a_job_lacks():
    class Pipeline:
        def __call__(self, prompt, height=None, width=1000, max_area=1024**2, num_inference_steps=28):
            """Has a size, and an area that is no field of a job."""

    settings = {"height": "height", "width": "width", "max_area": "area", "num_inference_steps": "steps"}
    card = {"size_multiple_of": 16, "checkpoint": "a/b@main", "call": {"settings": settings}}
    demo = {"height": 32, "width": 64, "frames": 1, "fps": 8, "steps": 4, "machine": "cpu:8", "dtypes": {}}
    assert derive.published_job_of(card, demo, Pipeline) == {
        "height": 1024,
        "width": 992,
        "frames": 1,
        "fps": 8,
        "steps": 28,
        "machine": "v6e:2x4",
        "strategy": "fsdp",
        "checkpoint": "a/b@main",
        "encode": "devices",
    }


def test_blocks_that_take_arguments_without_a_name_are_a_chain():
    class Block(torch.nn.Module):
        def forward(self, x, *args):
            return x + args[0]

    blocks = torch.nn.ModuleList(Block() for _ in range(3))
    [chain] = trials._chains("transformer", torch.nn.ModuleDict({"blocks": blocks}))
    chain.watched()
    for values in ((1, None), (1, None)), ((1, 2000), (1, 3000)):
        x = torch.zeros(2)
        for block, number in zip(blocks, (0, 1, 1), strict=True):
            x = block(x, *values[number])
        assert chain.carries == (["x"] if values[0] == values[1] else [])


def test_a_picture_has_one_frame_and_texts_of_any_length(texts):
    card, job, published = texts("QwenImagePipeline")
    assert (published["height"], published["width"], published["frames"]) == (1024, 1024, 1)
    assert card["frames"] == {"multiple_of": 1, "plus": 0} and "frames" not in card["call"]["settings"].values()
    shape = [1, "tokens", "joint_attention_dim"]
    assert card["call"]["embeddings"] == {"prompt_embeds": shape, "prompt_embeds_mask": None}  # nothing is masked
    assert card["call"]["negative_apart"] is True  # `encode_prompt` takes one prompt
    assert (job["frames"], job["mesh"]) == (1, {"sp": 8})  # two lengths are no batch
    assert card["tiny"]["components"]["text_encoder"]["text_config"]["rope_parameters"]["mrope_section"] == [2, 4, 6]


def test_a_derived_card_gets_the_shared_strategies(texts):
    texts("WanPipeline")
    card = validated(Card, parse_document(texts.made["WanPipeline"][0], "card.yaml"))
    assert list(card.strategies) == ["tp", "ulysses", "fsdp"]
    assert all(set(each.weights) == {"transformer", "vae"} for each in card.strategies.values())


def test_the_card_of_a_modular_pipeline_is_that_of_the_one_with_its_own_call(texts):
    modular, plain = texts("WanModularPipeline")[0], texts("WanPipeline")[0]
    assert modular["pipeline"] == "diffusers:WanModularPipeline"
    assert modular["components"].pop("scheduler") == {"class": "diffusers:UniPCMultistepScheduler"}  # as published
    assert modular["components"] == {name: plain["components"][name] for name in modular["components"]}
    for field in ("patches", "stacks", "frames", "size_multiple_of", "tiny"):
        assert modular[field] == plain[field]
    assert modular["call"]["embeddings"] == {
        name: [1, 512, "text_dim"] for name in ("prompt_embeds", "negative_prompt_embeds")
    }
    assert modular["call"]["conditions"] == {"encoder_hidden_states": ["prompt_embeds", "negative_prompt_embeds"]}


def test_no_such_pipeline_and_one_that_has_no_prompt_are_refused():
    with pytest.raises(UnknownNameError, match=r"has no pipeline 'MochiPipelin'. Did you mean 'MochiPipeline'"):
        derive.derived_card("diffusers:MochiPipelin")
    for name in ("DiffusionPipeline", "UNet2DModel"):
        with pytest.raises(UnknownNameError, match=f"'{name}' of diffusers is no pipeline with a loop of") as caught:
            derive.derived_card(f"diffusers:{name}")
        assert "Modular" not in str(caught.value) and f" {name}," not in str(caught.value)
    with pytest.raises(BadValueError, match="calls unet, and not one network beside 'vae' and 'scheduler'"):
        derive.derived_card("diffusers:DDPMPipeline")


def test_a_card_is_derived_once_and_again_by_other_code(texts, tmp_path, monkeypatch):
    texts("WanPipeline")
    monkeypatch.setenv("TORCHPORT_CACHE", str(tmp_path))
    asked = []
    monkeypatch.setattr(derive, "derived_card", lambda model: asked.append(model) or texts.made["WanPipeline"])
    for _ in range(2):
        derive.ensure("diffusers:WanPipeline")
    derive.ensure("wan")
    assert asked == ["diffusers:WanPipeline"]
    assert find_pack().card("diffusers:WanPipeline")[0].pipeline == "diffusers:WanPipeline"
    assert find_pack().job("configs/diffusers:WanPipeline_demo.yaml")[0].checkpoint == "tiny"
    assert find_pack().job("configs/diffusers:WanPipeline.yaml")[0].frames == 81
    monkeypatch.setattr(derive, "_code", lambda: "other")
    derive.ensure("diffusers:WanPipeline")
    assert len(asked) == 2


@pytest.mark.parametrize("file", ["configs/models/{}.yaml", "configs/{}_demo.yaml", "configs/{}.yaml"])
@pytest.mark.parametrize("damage", [lambda data: data[:-40], lambda data: data + b"\xff\xfe", lambda data: b""])
def test_a_damaged_file_of_a_derived_card_is_derived_again(tmp_path, monkeypatch, caplog, file, damage):
    model = "diffusers:WanPipeline"
    monkeypatch.setenv("TORCHPORT_CACHE", str(tmp_path))
    monkeypatch.setattr(derive, "derived_card", lambda model: ("card: 1\n", "job: 1\n", "job: 2\n"))
    derive.ensure(model)
    path = derive.derived_folder() / file.format(model)
    before = path.read_bytes()
    path.write_bytes(damage(before))
    caplog.clear()  # of the first deriving, if a test before left the log at INFO
    with caplog.at_level("INFO", logger="torchport"):
        derive.ensure(model)
        derive.ensure(model)
    assert path.read_bytes() == before
    assert [record.getMessage().partition(model)[2] for record in caplog.records] in (
        [", again, since its file is damaged: upstream's code runs with tiny weights ..."],
        [": upstream's code runs with tiny weights ..."],  # the first line, which says what wrote it, is lost, too
    )


def test_a_picture_by_name_is_upstreams():
    found = pipelines.in_child("PixArtAlphaPipeline", ["ulysses"])
    assert "refused" not in found
    assert found["latents ulysses"] <= 1e-5 and found["levels ulysses"] <= 1


@pytest.mark.parametrize("name", pipelines.PIPELINES)
def test_a_pipeline_by_name_is_upstreams(name):
    found = pipelines.in_child(name)
    if "needs torchvision" in found.get("refused", ""):
        pytest.skip(
            f"needs torchvision: pip install torchvision, then pytest -m slow tests/porting/test_derive.py -k {name}"
        )
    assert "refused" not in found, found["refused"]
    for strategy in pipelines.STRATEGIES:
        assert found.get(f"latents {strategy}", 0.0) <= 1e-5
        assert found[f"levels {strategy}"] <= 1


def test_a_pipeline_has_its_package_before_its_name(tmp_path, torchport, capsys):
    words = ("new", "model", "mine", "--pipeline", "WanPipeline", "--out", str(tmp_path))
    assert torchport(*words, capsys=capsys)[2] == [
        "error[TP107] --pipeline WanPipeline: A pipeline has 'diffusers:' before its name. Write diffusers:WanPipeline."
    ]


@pytest.mark.parametrize(("flag", "value"), [("--upstream-path", "wan"), ("--checkpoint", "owner/repository@revision")])
def test_a_flag_that_does_nothing_with_a_pipeline_is_refused(tmp_path, torchport, capsys, flag, value):
    words = ("new", "model", "mine", "--pipeline", "diffusers:WanPipeline", "--out", str(tmp_path), flag, value)
    code, _, lines = torchport(*words, capsys=capsys)
    assert (code, lines) == (2, [f"error[TP107] {flag} {value}: It is for --entry. Leave it out."])
    assert not any(tmp_path.iterdir())


def test_the_command_writes_a_card_to_edit(tmp_path):
    words = ["new", "model", "mine", "--pipeline", "diffusers:WanPipeline", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "torchport", *words], capture_output=True, text=True, check=True)
    assert "configs/models/mine.yaml" in done.stdout and all(
        (tmp_path / "configs" / name).is_file() for name in ("mine_demo.yaml", "mine.yaml")
    )
    assert find_pack([str(tmp_path)]).card("mine")[0].pipeline == "diffusers:WanPipeline"


def test_a_tokenizer_that_needs_files_and_components_that_are_not_small_are_refused(monkeypatch):
    with pytest.raises(BadValueError, match=r"tiny\.tokenizers: A TokenizersBackend cannot be made without files"):
        derive.derived_card("diffusers:HiDreamImagePipeline")
    cls = parts.pipeline_class("diffusers:WanPipeline")
    configurations = parts.Configurations(parts.parts_of(cls, "here"))
    monkeypatch.setattr(parts, "LARGEST", 1000)
    with pytest.raises(ValueError, match=r"The tiny 'transformer' has [\d,]+ parameters"):
        configurations.built("transformer")


class Forgets:
    """A pipeline that takes embeddings, and makes its own of no prompt."""

    scheduler = FlowMatchEulerDiscreteScheduler()

    def set_progress_bar_config(self, disable): ...

    def __call__(self, prompt=None, prompt_embeds=None, return_dict=True):
        return (torch.ones(1, 3, 2, 2) * (0 if prompt is None else prompt_embeds or 1),)


def test_a_pipeline_that_makes_something_else_of_its_own_embeddings_is_refused():
    trial = PipelineTrial(Forgets, types.SimpleNamespace(parts={}), "--model x")
    trial.check_replay(Observed(outputs=[torch.zeros(1, 3, 2, 2)]), {"prompt_embeds": 1})
    another = "'Forgets' makes another picture of its own embeddings, and the latents of its last step alone, than of"
    for output in (torch.ones(1, 3, 2, 2), torch.zeros(1, 3, 2, 4), [torch.zeros(1)]):
        with pytest.raises(BadValueError, match=another):
            trial.check_replay(Observed(outputs=[output]), {"prompt_embeds": 1})
    with pytest.raises(BadValueError, match=r"'Forgets' does not take its own embeddings: .*'mask'"):
        trial.check_replay(Observed(outputs=[torch.zeros(1, 3, 2, 2)]), {"mask": 1})


def test_a_modules_size_that_does_not_fit_its_input_is_named():
    nn, x = torch.nn, torch.zeros(1, 4, 6)
    assert trials._wanted(nn.Linear(8, 2), [x]) == ("in_features", 6)
    assert trials._wanted(nn.Conv1d(8, 2, 1), [x]) == ("in_channels", 4)
    assert trials._wanted(nn.LayerNorm(8), [x]) == ("normalized_shape", 6)
    assert trials._wanted(nn.RMSNorm(8), [x]) == ("weight", 6)
    fitting = (nn.Linear(6, 2), nn.Conv1d(4, 2, 1), nn.LayerNorm(6), nn.RMSNorm(6))
    assert [trials._wanted(module, [x]) for module in fitting] == [None] * 4


def test_what_a_step_returns_beside_the_latents_is_lost_at_last():
    scheduler, x = Beside(), torch.ones(1, 1)
    trials._LatentsAtLast(scheduler, {}, Observed())
    assert scheduler.step(x, x)[1] == 1
    latents, other, nothing = scheduler.step(x, x)
    assert latents == 1 and other.isnan() and nothing is None


class Beside:
    """A scheduler that returns more than the latents."""

    timesteps = (2.0, 1.0)

    def step(self, output, sample):
        return sample, output, None


def test_what_is_called_before_the_loop_and_makes_sound_has_numbers_of_its_own():
    cls = parts.pipeline_class("diffusers:LTX2Pipeline")
    configurations = parts.Configurations(parts.parts_of(cls, "here"))
    values = configurations.values
    assert values["transformer"]["audio_num_attention_heads"] == parts.HEADS
    assert values["vae"]["spatial_compression_ratio"] == 32 and values["vae"]["temporal_compression_ratio"] == 8
    assert values["connectors"]["audio_connector_attention_head_dim"] * 4 == values["connectors"]["caption_channels"]
    trial = PipelineTrial(cls, configurations, "--model x")
    assert derive._rate(trial, ["audio_vae", "vocoder"]) == "vocoder.output_sampling_rate"
    assert derive._rate(trial, ["audio_vae"]) == "audio_vae.sample_rate"
    with pytest.raises(BadValueError, match="how many samples a second its sound has"):
        derive._rate(trial, ["connectors"])
    size = values["connectors"]["caption_channels"] * 49
    assert derive._size(trial, ["transformer", "connectors"], "prompt_embeds", 2, size) == (
        "connectors.caption_channels*connectors.text_proj_in_factor"
    )
    assert derive._size(trial, ["transformer"], "prompt_embeds", 2, size) == size
    assert derive._frame_rate(cls, {"call": {"settings": {"frame_rate": "frame_rate"}}}, 8) == 24
    assert derive._frame_rate(cls, {"call": {"settings": {}}}, 8) == 8


def test_a_pipeline_says_what_it_takes_and_what_may_be_none():
    classes = {name: parts.pipeline_class(f"diffusers:{name}Pipeline") for name in ("StableDiffusion", "FluxControl")}
    absent = {"safety_checker": None, "feature_extractor": None}
    assert parts.absent_parts(classes["StableDiffusion"]) == absent
    assert not absent.keys() & {part.name for part in parts.parts_of(classes["StableDiffusion"], "here")}
    assert derive.image_argument(classes["FluxControl"]) == "control_image"
    assert trials.embedding_names(parts.pipeline_class("diffusers:ErnieImagePipeline")) == ["prompt_embeds"]
    assert trials.embedding_names(Renames) == ["embeds_of_one", "pooled"]
    names = ("LucyEdit", "WanVideoToVideo", "SanaImageToVideo", "QwenImage21", "CogVideoXFunControl")
    classes = [parts.pipeline_class(f"diffusers:{name}Pipeline") for name in names]
    assert list(map(derive.image_argument, classes)) == ["video", "video", "image", None, "control_video"]


class Renames:
    """A pipeline whose call has other names for what `encode_prompt` returns."""

    def encode_prompt(self, prompt):
        first, second = prompt
        return first, second

    def __call__(self, prompt, embeds_of_one=None, pooled=None):
        embeds_of_one, pooled = self.encode_prompt(prompt)
        return embeds_of_one + pooled


class Answers:
    """A pipeline that takes no embeddings: its call calls `encode_prompt`."""

    scheduler, times = FlowMatchEulerDiscreteScheduler(), 1

    def set_progress_bar_config(self, disable): ...

    def encode_prompt(self, prompt):
        return torch.full((1, 3, 2, 2), float(len(prompt)))

    def __call__(self, prompt, return_dict=True):
        return (sum(self.encode_prompt(prompt) for _ in range(self.times)),)


def test_a_pipeline_that_takes_no_embeddings_gets_them_where_it_calls_encode_prompt(monkeypatch):
    trial = PipelineTrial(Answers, types.SimpleNamespace(parts={}), "--model x")
    observed = Observed(outputs=[torch.ones(1, 3, 2, 2)], encodings=1, embeddings=[torch.ones(1, 3, 2, 2)])
    assert not derive.takes_embeddings(trial, observed)
    monkeypatch.setattr(Answers, "times", 2)
    with pytest.raises(BadValueError, match=r"'Answers' makes another picture|does not take its own embeddings"):
        derive.takes_embeddings(trial, observed)
    assert derive.takes_embeddings(trial, Observed())  # without one there is nothing to replay


def test_a_class_without_a_known_tokenizer_is_no_class_that_needs_files(monkeypatch):
    def unknown(cls):
        raise AttributeError("no tokenizer")

    monkeypatch.setattr(tiny, "tokenizer_class", unknown)
    with pytest.raises(AttributeError, match="no tokenizer"):
        parts._tokenizer_of(transformers.CLIPProcessor, is_long=True)


def test_the_tiny_processor_has_the_tokenizer_of_its_model():
    spec = parts._tokenizer_of(transformers.CLIPProcessor, is_long=True)
    assert spec.vocab_size == 512
    processor = tiny.tokenizer(transformers.CLIPProcessor, spec, "here")
    assert isinstance(processor.tokenizer, transformers.CLIPTokenizer)
    ids = processor(text=["A cat"], return_tensors="pt")["input_ids"]
    assert ids.shape[1] > 3
    assert tiny.tokenizer_class(transformers.AutoTokenizer, "qwen2") is transformers.Qwen2Tokenizer
    marks = types.SimpleNamespace(image_token="<|image|>", video_token=None, image_token_id=7)
    assert tiny._marks(marks) == ["<|image|>"]


def test_numbers_are_proposed_as_an_error_says_them():
    cls = parts.pipeline_class("diffusers:PRXPipeline")
    trial = PipelineTrial(cls, parts.Configurations(parts.parts_of(cls, "here")), "--model x")
    message = "Expected size 16 but got size 8"
    found = list(trial._as_the_message_says(message, ["transformer"]))
    assert ("transformer", {"in_channels": 8}) in found and ("transformer", {"in_channels": 32}) in found
    assert {"axes_dim": [8, 8]} in list(trial._variants("transformer"))
    trial.configurations.values["transformer"]["out_channels"] = None
    found = list(trial._as_the_message_says("size of a (64) and b (256)", ["transformer"]))
    assert ("transformer", {"out_channels": 16}) in found
    lacking = AttributeError("'T5GemmaConfig' object has no attribute 'hidden_size'")
    [*_, (_, values)] = trial._attributes(trials.Stop(lacking, "text_encoder"))
    assert values["hidden_size"] == 96 and len(values["layer_types"]) == values["num_hidden_layers"] == 2
    assert trial.configurations.give("model_max_length", 9) and not trial.configurations.give("model_max_length", 9)


def test_a_part_that_is_lacking_gets_the_width_of_an_encoder():
    values = {"network": {"image_dim": None, "text_dim": 8, "other": None}, "encoder": {"hidden_size": 80}}
    kinds = {name: types.SimpleNamespace(kind=name) for name in values}
    configurations = types.SimpleNamespace(parts=kinds, values=values, all_values=values.get)
    trial, lacking = PipelineTrial(Forgets, configurations, "--model x"), AttributeError("'NoneType' is not callable")
    assert next(trial._proposals(trials.Stop(lacking, "network"))) == ("network", {"image_dim": 80})
    others = trial._proposals(trials.Stop(ValueError("odd"), "network"))
    assert all("image_dim" not in changes for _, changes in others)


def test_what_upstream_raises_outside_a_trial_is_refused_with_its_line(monkeypatch):
    monkeypatch.setattr(derive, "parts_of", lambda cls, place: FlowMatchEulerDiscreteScheduler().scale_noise(1, 2, 3))
    with pytest.raises(BadValueError, match=r"It stops at diffusers/schedulers/\S+\.py:\d+: .* Write a card for it"):
        derive.derived_card("diffusers:WanPipeline")
    monkeypatch.setattr(derive, "parts_of", lambda cls, place: [][0])  # a mistake of ours
    with pytest.raises(IndexError):
        derive.derived_card("diffusers:WanPipeline")


class Shown(Forgets):
    """A pipeline that cannot be without an image, though its call says so nowhere."""

    def __call__(self, prompt, image=None, num_inference_steps=2, output_type=None, return_dict=True):
        if image is None:
            raise ValueError("`image` input cannot be undefined")
        for _ in range(num_inference_steps):
            self.scheduler.step(torch.ones(1), self.scheduler.timesteps[0], torch.ones(1))
        return ([image],)


def test_a_pipeline_that_stops_without_an_image_is_tried_with_one():
    configurations = types.SimpleNamespace(parts={}, tokenizers={}, values={})
    trial = PipelineTrial(Shown, configurations, "--model x")
    assert trial.observed().steps == 2 and trial.image == "image"


@pytest.mark.parametrize(
    ("shown", "changes"),
    [
        (lambda video: video, False),
        (lambda video: video[:, :, 0], False),
        (lambda video: video.permute(0, 2, 1, 3), True),
        (lambda video: torch.cat([video]), True),
    ],
)
def test_a_pipeline_that_changes_what_its_vae_decoded_is_noted(shown, changes):
    vae = types.SimpleNamespace(decode=lambda latents: (latents + 1,))
    processor = types.SimpleNamespace(postprocess=lambda video: video)
    processor.postprocess_video = lambda video: processor.postprocess(video * 2)  # of each frame
    pipe, observed = types.SimpleNamespace(vae=vae, video_processor=processor), Observed()
    trials._watch_decoding(pipe, observed)
    processor.postprocess_video(shown(vae.decode(torch.ones(1, 2, 3, 4))[0]))
    assert observed.changes_decoded is changes
    first, _ = (vae.decode(torch.ones(1))[0] for _ in range(2))
    processor.postprocess(first)
    assert observed.changes_decoded  # it decodes twice


def test_a_loop_whose_first_steps_another_network_takes_is_refused():
    names = ("vae", "tran_2", "tran", "scheduler")
    kinds = {name: types.SimpleNamespace(kind="network", cls=name[:4]) for name in names}
    trial = PipelineTrial(Asks, types.SimpleNamespace(parts=kinds), "--model x")
    observed = Observed(calls=[trials.LoopCall("tran_2", 1, {})], before={"tran": None})
    with pytest.raises(BadValueError, match="The loop of 'Asks' calls tran_2 and tran, and not one network"):
        derive._roles(trial, observed)


def test_a_processor_that_a_pipeline_shows_its_image_is_what_that_has_for_images():
    cls = parts.pipeline_class("diffusers:SkyReelsV2ImageToVideoPipeline")
    found = {part.name: part for part in parts.parts_of(cls, "here")}["image_processor"]
    assert found.kind == "other" and found.cls.__name__.startswith("CLIPImageProcessor")


class Asks(Forgets):
    """A pipeline that cannot be without more than a run has."""

    def __call__(self, prompt, mask_image, embeds, height=None, **more): ...


def test_a_pipeline_that_needs_more_than_a_run_has_is_refused():
    trial = PipelineTrial(Asks, types.SimpleNamespace(parts={}), "--model x")
    with pytest.raises(BadValueError, match="'Asks' needs mask_image, embeds, and a run has a prompt and at most one"):
        trial._arguments(Asks(), Observed())


def test_a_package_that_upstream_needs_is_named(monkeypatch):
    monkeypatch.setattr("diffusers.MochiPipeline", DummyObject("MochiPipeline", (), {"_backends": ["torch", "odd"]}))
    with pytest.raises(BadValueError, match=r"needs odd, not installed here\. pip install odd\."):
        derive.derived_card("diffusers:MochiPipeline")
