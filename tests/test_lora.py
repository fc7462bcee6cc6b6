"""LoRA files in a run: both backends have the weights that diffusers would have, and manifests say of which files.

"Agreement" is DESIGN's: the largest difference over the largest value of the reference.
"""

import dataclasses
import functools
import json
import re

import pytest
import torch
from diffusers import CogVideoXPipeline, HunyuanVideo15Pipeline, WanPipeline
from fakes.artefacts import difference, latents_of
from safetensors.torch import load_file, save_file

from torchport import patch
from torchport.compile import network
from torchport.compile.in_force import hushed
from torchport.errors import ArtefactForeignError, CheckpointForeignError, StoppedError
from torchport.load import tiny
from torchport.processes.stopping import Stopping
from torchport.run.path import run
from torchport.stages import file_of
from torchport.task import Request, accept

PROMPT, NEGATIVE, SEED, RANK = "A cat walks past a red sign", "blurry", 3, 3
CONFIGS = {"hunyuan": "configs/demo.yaml", "cogvideox": "configs/cogvideox_demo.yaml", "wan": "configs/wan_demo.yaml"}
SIZES = {"hunyuan": (64, 96, 3.0), "cogvideox": (32, 48, 2.0), "wan": (32, 48, 4.0)}
PIPELINES = {"hunyuan": HunyuanVideo15Pipeline, "cogvideox": CogVideoXPipeline, "wan": WanPipeline}
MODELS = pytest.mark.parametrize("model", CONFIGS)
LAYERS = {
    "hunyuan": r"transformer_blocks\.\d+\.(attn\.(to_[qkv]|add_[qkv]_proj|to_out\.0)|ff\.net\.2)|x_embedder\.proj",
    "cogvideox": r"transformer_blocks\.\d+\.(attn1\.(to_[qkv]|to_out\.0)|ff\.net\.(0\.proj|2))",
    "wan": r"blocks\.\d+\.(attn[12]\.(to_[qkv]|to_out\.0)|ffn\.net\.(0\.proj|2))|patch_embedding",
}
"""The layers of each model that its LoRA changes: matrices, and a convolution where there is one."""
PUBLISHED = {
    "hunyuan": [
        ("transformer_blocks", "double_blocks"),
        ("attn.to_out.0", "img_attn_proj"),
        ("attn.to_", "img_attn_"),
        (r"attn.add_([qkv])_proj", r"txt_attn_\1"),
        ("ff.net.2", "img_mlp.fc2"),
        ("x_embedder", "img_in"),
    ],
    "cogvideox": [],
    "wan": [
        ("attn1.to_out.0", "self_attn.o"),
        ("attn2.to_out.0", "cross_attn.o"),
        ("attn1.to_", "self_attn."),
        ("attn2.to_", "cross_attn."),
        ("ffn.net.0.proj", "ffn.0"),
        ("ffn.net.2", "ffn.2"),
    ],
}
"""What the models' own repositories call these layers."""


@pytest.fixture(scope="module")
def folder_of(pack):
    """The tiny checkpoint of a model."""

    def folder(model):
        card, _ = pack.card(model)
        return tiny.write(card, file_of(pack, card, ""))

    return folder


@pytest.fixture(scope="module")
def pairs_of(folder_of):
    """Random pairs for the layers of a network, by the module's names, and what they add to its weights."""

    def pairs(model, component="transformer", seed=0):
        generator = torch.Generator().manual_seed(seed)
        [file] = (folder_of(model) / component).glob("*.safetensors")
        halves, differences = {}, {}
        for name, weight in load_file(file).items():
            if re.fullmatch(LAYERS[model], name.removesuffix(".weight")):
                rows, columns, ones = weight.shape[0], weight.shape[1:], [1] * (weight.dim() - 2)
                down = torch.randn(RANK, *columns, generator=generator) / weight[0].numel() ** 0.5
                up = torch.randn(rows, RANK, *ones, generator=generator) / 4
                halves[name.removesuffix(".weight")] = (down, up)
                differences[name] = (up.flatten(1) @ down.flatten(1)).reshape(weight.shape)
        return halves, differences

    return pairs


def published(model, layer):
    for ours, theirs in PUBLISHED[model]:
        layer = re.sub(ours, theirs, layer)
    return layer


def as_diffusers(halves):
    names = {"lora_A": 0, "lora_B": 1}
    return {
        f"transformer.{layer}.{half}.weight": both[n] for layer, both in halves.items() for half, n in names.items()
    }


def as_common(model, halves, alpha):
    """Returns pairs as trainers outside diffusers write them: the repository's names, with underscores and alphas."""
    tensors = {}
    for layer, (down, up) in halves.items():
        name = f"lora_unet_{published(model, layer).replace('.', '_')}"
        tensors |= {
            f"{name}.lora_down.weight": down,
            f"{name}.lora_up.weight": up,
            f"{name}.alpha": torch.tensor(alpha),
        }
    return tensors


@pytest.fixture(scope="module")
def loras_of(pairs_of, tmp_path_factory):
    """A job's `lora` for a model, and by component what it adds; wan's second network has a file of its own."""

    def loras(model):
        folder, rows, added = tmp_path_factory.mktemp("lora"), [], {}
        for number, component in enumerate(("transformer", "transformer_2") if model == "wan" else ("transformer",)):
            halves, differences = pairs_of(model, component, number)
            common = number or model == "hunyuan"
            file = folder / f"{component}.safetensors"
            save_file(as_common(model, halves, 1.5) if common else as_diffusers(halves), file)
            rows.append(f"{{path: {file}, scale: 0.5, component: {component}}}")
            factor = 0.5 * (1.5 / RANK if common else 1.0)
            added[component] = {name: factor * difference for name, difference in differences.items()}
        return f"lora=[{', '.join(rows)}]", added

    return functools.cache(loras)


@pytest.fixture(scope="module")
def request_of(root):
    def made(model, *sets, **fields):
        height, width, _ = SIZES[model]
        sizes = (f"height={height}", f"width={width}", "frames=9", "steps=3", "save_every=100")
        known = {"seed": SEED, "overrides": (*sizes, *sets), "paths": (str(root),)}
        return Request(model, CONFIGS[model], PROMPT, NEGATIVE, **{**known, **fields})

    return made


@pytest.fixture(scope="module")
def upstream(folder_of, pack):
    """The latents of upstream's own pipeline, with these differences added to its networks' weights."""

    def latents(model, added):
        card, _ = pack.card(model)
        height, width, guidance = SIZES[model]
        settings = {"height": height, "width": width, "num_frames": 9, "num_inference_steps": 3}
        with hushed(True):
            pipe = PIPELINES[model].from_pretrained(folder_of(model), dtype=torch.float32)
            pipe.set_progress_bar_config(disable=True)
            for component, differences in added.items():
                state = getattr(pipe, component).state_dict()
                for name, difference in differences.items():
                    state[name] += difference
            if model == "hunyuan":
                pipe.guider = pipe.guider.new(guidance_scale=guidance)
            else:
                settings |= {"guidance_scale": guidance, **card.call.constants}
            generator = torch.Generator().manual_seed(SEED)
            return pipe(PROMPT, negative_prompt=NEGATIVE, generator=generator, output_type="latent", **settings).frames

    return latents


@pytest.fixture(scope="module")
def runs(request_of, loras_of, tmp_path_factory):
    """The folder of a run with LoRA of each model and backend, without the decoder."""
    kept = {}

    def folder(model, backend):
        if (model, backend) not in kept:
            out = tmp_path_factory.mktemp("run")
            request = request_of(model, loras_of(model)[0], out=out, backend=backend)
            later = {"prompt": None, "negative_prompt": None, "seed": SEED}
            for stage in accept(request).family.STAGES:
                if stage.name != "decode":
                    run(dataclasses.replace(request, stage=stage.name, **({} if stage.name == "encode" else later)))
            kept[model, backend] = out
        return kept[model, backend]

    return folder


@MODELS
def test_the_original_is_upstreams_pipeline_with_the_same_weights(runs, upstream, loras_of, model):
    theirs = upstream(model, loras_of(model)[1])
    assert difference(latents_of(runs(model, "original")), theirs) < 1e-6
    assert difference(upstream(model, {}), theirs) > 1e-2  # the LoRA does something


@MODELS
def test_the_port_agrees_with_the_original(runs, model):
    assert difference(latents_of(runs(model, "torchax")), latents_of(runs(model, "original"))) < 1e-4


@pytest.mark.parametrize("model", ["cogvideox", "wan"])
def test_the_merged_weights_are_those_that_diffusers_fuses(folder_of, request_of, loras_of, tmp_path, model):
    pytest.importorskip("peft")  # diffusers merges through it
    request = request_of(model, loras_of(model)[0], out=tmp_path, backend="original")
    file = accept(request).job.lora[0].path
    with hushed(True):
        pipe = PIPELINES[model].from_pretrained(folder_of(model), dtype=torch.float32)
        pipe.load_lora_weights(file)
        pipe.fuse_lora(lora_scale=0.5)
        pipe.unload_lora_weights()
    theirs = pipe.transformer.state_dict()
    ours = filled(accept(request))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-6, msg=name)


def filled(task, component="transformer"):
    """Returns a network's weights as the original backend has them."""
    [stage] = (stage for stage in task.denoising if stage.network == component)
    with patch.applied(task.patches([stage]), stage=stage.name):
        folder = network.write_tiny(task)
        parts = network.loaded(task, stage, folder)
        network.eager(task, stage, parts, folder)
    return parts[component].state_dict()


@MODELS
def test_every_rule_for_names_in_lora_files_names_layers(request_of, loras_of, model, tmp_path):
    """A rule that names none is refused when a LoRA is read."""
    task = accept(request_of(model, loras_of(model)[0], out=tmp_path, backend="original"))
    rules = task.card.components["transformer"].lora_names
    assert (len(rules) > 10) == (model != "cogvideox")
    plain = accept(request_of(model, out=tmp_path, backend="original"))
    added = loras_of(model)[1]["transformer"]
    before, after = filled(plain), filled(task)
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor + added.get(name, 0), rtol=0, atol=1e-6, msg=name)
    assert sum(not torch.equal(before[name], after[name]) for name in before) == len(added) >= 12


def test_manifests_have_the_files_of_the_loop_alone(runs):
    folder = runs("wan", "original")
    settings = {name: json.loads((folder / f"{name}.json").read_text())["settings"] for name in ("encode", "denoise")}
    assert "lora" not in settings["encode"]
    rows = settings["denoise"]["lora"]
    assert [(row["file"], row["scale"], row["component"]) for row in rows] == [
        ("transformer.safetensors", 0.5, "transformer"),
        ("transformer_2.safetensors", 0.5, "transformer_2"),
    ]
    assert all(re.fullmatch("[0-9a-f]{64}", row["sha256"]) for row in rows)


def test_another_lora_is_another_run(runs, request_of, loras_of, tmp_path, monkeypatch):
    sets = loras_of("hunyuan")[0]

    def denoising(*sets):
        request = request_of("hunyuan", *sets, out=tmp_path, backend="original", stage="denoise")
        return dataclasses.replace(request, prompt=None, negative_prompt=None, inputs=runs("hunyuan", "original"))

    stopped = denoising(sets)
    with monkeypatch.context() as context:
        context.setattr(Stopping, "__init__", lambda self: setattr(self, "cause", True))
        context.setattr(Stopping, "check", lambda *_: None)  # not before the first step
        with pytest.raises(StoppedError):
            run(stopped)
    for request in (denoising(sets.replace("0.5", "0.25")), denoising()):
        with pytest.raises(
            ArtefactForeignError, match=r"A run with lora \[\{'file'.*was stopped here, and this one has"
        ):
            run(request)
    run(stopped)
    assert torch.equal(latents_of(tmp_path), latents_of(runs("hunyuan", "original")))


def test_the_second_network_goes_on_only_with_the_same_lora(runs, request_of, tmp_path):
    folder = runs("wan", "original")
    request = request_of("wan", out=tmp_path, backend="original", stage="denoise", inputs=folder)
    with pytest.raises(ArtefactForeignError, match=r"'denoise_first' was made for lora \[\{.*this run is for \[\]"):
        run(dataclasses.replace(request, prompt=None, negative_prompt=None))


def test_a_lora_that_an_earlier_stage_did_not_have_is_refused(runs, request_of, loras_of, tmp_path):
    sets = loras_of("hunyuan")[0].replace("0.5", "0.25")
    request = request_of("hunyuan", sets, out=tmp_path, backend="original", stage="decode", seed=None)
    request = dataclasses.replace(request, prompt=None, negative_prompt=None, inputs=runs("hunyuan", "original"))
    with pytest.raises(ArtefactForeignError, match=r"'denoise' was made with lora \[.*and 'decode' is asked for with"):
        run(request)


def test_a_lora_of_another_model_is_refused_before_any_stage(request_of, loras_of, tmp_path):
    request = request_of("cogvideox", loras_of("hunyuan")[0], out=tmp_path / "out", backend="original")
    with pytest.raises(CheckpointForeignError, match=r"lora_unet_.* is no layer of 'transformer'. The nearest are "):
        run(request)
    assert not (tmp_path / "out").exists()
