"""CogVideoX 1.5 through `family: diffusers`: upstream's pipeline object, the original backend and the port agree.

"Agreement" is DESIGN's: the largest difference over the largest value of the reference.
"""

import dataclasses
import json

import pytest
import torch
import yaml
from diffusers import CogVideoXPipeline
from fakes.artefacts import bits, difference, frames_of, latents_of, levels, same_frames, video_of
from fakes.plants import plant
from safetensors.torch import load_file, save_file

from torchport import save
from torchport.compile.in_force import hushed
from torchport.errors import ArtefactForeignError, BadValueError, MeshError, NotFiniteError, StoppedError
from torchport.load import tiny
from torchport.processes.stopping import Stopping
from torchport.run.path import run
from torchport.stages import file_of
from torchport.task import Request, accept

PROMPT, NEGATIVE, SEED = "A cat walks past a red sign", "blurry", 3
SMALL = ("height=32", "width=48", "frames=9", "steps=3", "save_every=100")


@pytest.fixture(scope="module")
def small(root):
    return Request(
        "cogvideox",
        "configs/cogvideox_demo.yaml",
        PROMPT,
        NEGATIVE,
        seed=SEED,
        overrides=SMALL,
        checkpoint="tiny:random",  # at this size, the trained weights draw nothing but black
        paths=(str(root),),
    )


@pytest.fixture(scope="module")
def upstream(pack):
    """Upstream's own pipeline object: the tiny checkpoint, read and called as its documentation says."""
    card, _ = pack.card("cogvideox")
    with hushed(True):
        pipe = CogVideoXPipeline.from_pretrained(
            tiny.write(card.with_trained({}), file_of(pack, card, "")), dtype=torch.float32
        )
        pipe.set_progress_bar_config(disable=True)

        def made(**kwargs):
            settings = {"height": 32, "width": 48, "num_frames": 9, "num_inference_steps": 3, "guidance_scale": 2.0}
            generator = torch.Generator().manual_seed(SEED)
            return pipe(PROMPT, NEGATIVE, generator=generator, **settings | kwargs).frames

        return made


@pytest.fixture(scope="module")
def runs(small, tmp_path_factory):
    """The folder of a run of each backend, which is made when it is first asked for."""

    class Runs(dict):
        def __missing__(self, backend):
            self[backend] = tmp_path_factory.mktemp(backend)
            run(dataclasses.replace(small, out=self[backend], backend=backend))
            return self[backend]

    return Runs()


def test_the_original_is_upstreams_pipeline_bit_for_bit(small, runs, upstream):
    latents, video = upstream(output_type="latent"), upstream(output_type="pt")
    assert latents.shape == (1, 4, 8, 4, 6)  # three latent frames, and one more before them for patch_size_t
    assert torch.equal(latents_of(runs["original"]), latents)
    assert torch.equal(video_of(dataclasses.replace(small, backend="original"), runs["original"]), video)
    assert torch.equal(frames_of(runs["original"]), levels(video))
    assert frames_of(runs["original"]).shape == (1, 9, 3, 32, 48)


def test_the_port_agrees_with_upstream_after_the_last_step(small, runs, upstream):
    assert 0.5 <= latents_of(runs["original"]).abs().max() <= 20
    assert difference(latents_of(runs["torchax"]), latents_of(runs["original"])) < 1e-4
    assert difference(video_of(small, runs["torchax"]), upstream(output_type="pt")) < 1e-3
    assert same_frames(frames_of(runs["torchax"]), frames_of(runs["original"]))


@pytest.mark.parametrize("strategy", ["tp", "ulysses"])
def test_the_decoder_alone_agrees_with_upstream_in_float32(small, runs, upstream, strategy):
    sets = (*SMALL, f"strategy={strategy}", "mesh={dp: 2, tp: 4}" if strategy == "tp" else "mesh={dp: 2, sp: 4}")
    video = video_of(dataclasses.replace(small, overrides=sets), runs["original"])
    assert difference(video, upstream(output_type="pt")) < 1e-5


@pytest.mark.parametrize("strategy", ["tp", "ulysses"])
def test_the_decoder_in_flax_agrees_with_upstream_and_is_in_the_manifest(small, runs, upstream, tmp_path, strategy):
    mesh = "mesh={dp: 2, tp: 4}" if strategy == "tp" else "mesh={dp: 2, sp: 4}"
    sets = (*SMALL, f"strategy={strategy}", mesh, "vae.implementation=flax")
    request = dataclasses.replace(small, overrides=sets, prompt=None, negative_prompt=None, seed=None)
    assert difference(video_of(request, runs["original"]), upstream(output_type="pt")) < 1e-5
    run(dataclasses.replace(request, stage="decode", inputs=runs["original"], out=tmp_path))
    assert same_frames(frames_of(tmp_path), frames_of(runs["original"]))
    rows = json.loads((tmp_path / "decode.json").read_text())["patches"]
    assert [row["calls"] for row in rows if row["id"] == "diffusers.cogvideox.vae-flax"] == [1]


def test_tiles_of_a_decoder_that_is_compiled_whole_are_refused(small, runs, upstream, tmp_path):
    tiled = (*SMALL, "vae_tiling=true")
    for stage in ("all", "decode"):
        with pytest.raises(BadValueError) as caught:
            accept(dataclasses.replace(small, overrides=tiled, stage=stage))
        assert str(caught.value) == (
            "--set vae_tiling=true: 'vae_tiling' is true, and the VAE of 'cogvideox' is compiled whole and split over "
            "the mesh. Leave it out: --backend original decodes in tiles."
        )
    accept(dataclasses.replace(small, overrides=tiled, stage="denoise"))
    accept(dataclasses.replace(small, overrides=(*SMALL, "vae_tiling=false")))
    request = dataclasses.replace(small, prompt=None, negative_prompt=None, seed=None, inputs=runs["original"])
    run(dataclasses.replace(request, stage="decode", out=tmp_path, backend="original", overrides=tiled))
    assert torch.equal(frames_of(tmp_path), levels(upstream(output_type="pt")))  # of one tile


@pytest.mark.parametrize("strategy", ["tp", "ulysses", "fsdp"])
def test_the_port_agrees_with_upstream_after_the_first_step(small, upstream, runs, tmp_path, strategy):
    mesh = "{dp: 2, tp: 4}" if strategy == "tp" else "{dp: 2, sp: 4}"
    overrides = (*SMALL, "steps=1", f"strategy={strategy}", f"mesh={mesh}")
    request = dataclasses.replace(small, prompt=None, negative_prompt=None, inputs=runs["original"])
    run(dataclasses.replace(request, stage="denoise", out=tmp_path, overrides=overrides))
    assert difference(latents_of(tmp_path), upstream(output_type="latent", num_inference_steps=1)) < 1e-5


def test_three_runs_are_one(small, runs, tmp_path):
    small = dataclasses.replace(small, backend="original", out=tmp_path)
    run(dataclasses.replace(small, stage="encode"))
    request = dataclasses.replace(small, prompt=None, negative_prompt=None)
    run(dataclasses.replace(request, stage="denoise"))
    run(dataclasses.replace(request, stage="decode", seed=None))
    for name in ("encode", "denoise", "decode"):
        assert bits(tmp_path, name) == bits(runs["original"], name)


def test_a_stopped_run_goes_on_to_the_same_bits(small, runs, tmp_path, monkeypatch):
    request = dataclasses.replace(small, prompt=None, negative_prompt=None, inputs=runs["torchax"], out=tmp_path)
    request = dataclasses.replace(request, stage="denoise")
    with monkeypatch.context() as context, pytest.raises(StoppedError, match="after step 1 of 3"):
        context.setattr(Stopping, "__init__", lambda self: setattr(self, "cause", True))
        context.setattr(Stopping, "check", lambda *_: None)  # not before the first step
        run(request)
    assert run(request).steps == 2
    assert bits(tmp_path, "denoise") == bits(runs["torchax"], "denoise")


def test_infinity_in_the_third_of_five_steps_is_refused_there(small, tmp_path, monkeypatch):
    request = dataclasses.replace(small, backend="original", out=tmp_path / "in", overrides=(*SMALL, "steps=5"))
    run(dataclasses.replace(request, stage="encode"))
    request = dataclasses.replace(request, prompt=None, negative_prompt=None, stage="denoise", inputs=tmp_path / "in")
    request = dataclasses.replace(request, out=tmp_path / "out")
    plant(monkeypatch, "transformer", 3, float("inf"))
    with pytest.raises(NotFiniteError, match=r"^'denoise', step 3 of 5 \(timestep \d+\): 'returned\.0' has 1 of 768 "):
        run(request)
    assert not (tmp_path / "out").exists()


SCHEDULERS = {
    "CogVideoXDDIMScheduler": {},
    "CogVideoXDPMScheduler": {},
    "UniPCMultistepScheduler": {"prediction_type": "flow_prediction", "use_flow_sigmas": True},
    "DPMSolverMultistepScheduler": {"prediction_type": "v_prediction", "algorithm_type": "sde-dpmsolver++"},
}
"""Schedulers by their class, each with the configuration that replaces the card's tiny one, if any does."""


@pytest.fixture
def with_scheduler(small, root, tmp_path):
    """Returns a request of the same model with another scheduler: a card of somebody's own pack."""

    def made(name, **config):
        data = yaml.safe_load((root / "configs/models/cogvideox.yaml").read_text())
        data["model"], data["components"]["scheduler"] = name.lower(), {"class": f"diffusers:{name}"}
        data["tiny"]["components"]["scheduler"] = config or data["tiny"]["components"]["scheduler"]
        file = tmp_path / "pack" / "configs" / "models" / f"{name.lower()}.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(yaml.safe_dump(data))
        overrides = (*SMALL, "steps=8", "save_every=1")
        return dataclasses.replace(
            small, model=name.lower(), paths=(str(tmp_path / "pack"),), overrides=overrides, backend="original"
        )

    return made


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of diffusers' own schedulers
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_8_steps_with_a_stop_after_each_of_them_have_the_same_bits(with_scheduler, tmp_path, monkeypatch, scheduler):
    request = with_scheduler(scheduler, **SCHEDULERS[scheduler])
    run(dataclasses.replace(request, stage="encode", out=tmp_path / "whole"))
    request = dataclasses.replace(
        request, prompt=None, negative_prompt=None, stage="denoise", inputs=tmp_path / "whole"
    )
    run(dataclasses.replace(request, out=tmp_path / "whole"))
    monkeypatch.setattr(Stopping, "__init__", lambda self: setattr(self, "cause", True))
    monkeypatch.setattr(Stopping, "check", lambda *_: None)  # not before the first step
    request = dataclasses.replace(request, out=tmp_path / "pieces")
    for number in range(1, 8):
        with pytest.raises(StoppedError, match=f"after step {number} of 8"):
            run(request)
    assert run(request).steps == 1
    assert bits(tmp_path / "pieces", "denoise") == bits(tmp_path / "whole", "denoise")


@pytest.fixture(scope="module")
def dynamic(small, runs, tmp_path_factory):
    """The folder of latents with dynamic guidance, which the card leaves off."""
    folder = tmp_path_factory.mktemp("dynamic")
    request = dataclasses.replace(small, prompt=None, negative_prompt=None, inputs=runs["original"], out=folder)
    overrides = (*SMALL, "call.use_dynamic_cfg=true")
    run(dataclasses.replace(request, stage="denoise", backend="original", overrides=overrides))
    return folder


def test_dynamic_guidance_is_upstreams_bit_for_bit_on_and_off(runs, dynamic, upstream):
    on, off = (upstream(output_type="latent", use_dynamic_cfg=value) for value in (True, False))
    assert not torch.equal(on, off)
    assert torch.equal(latents_of(dynamic), on) and torch.equal(latents_of(runs["original"]), off)


def test_what_a_job_calls_the_pipeline_with_is_in_the_manifest_and_must_be_so_in_later_stages(small, dynamic, tmp_path):
    manifest = save.read_manifest(save.file_of(dynamic, "denoise"))
    assert manifest.settings["call"] == manifest.config["call"] == {"use_dynamic_cfg": True}
    request = dataclasses.replace(small, prompt=None, negative_prompt=None, seed=None, inputs=dynamic, out=tmp_path)
    with pytest.raises(ArtefactForeignError, match=r"'denoise' was made for call {'use_dynamic_cfg': True}, and this"):
        run(dataclasses.replace(request, stage="decode"))
    request = dataclasses.replace(request, stage="decode", backend="original")
    run(dataclasses.replace(request, overrides=(*SMALL, "call.use_dynamic_cfg=true")))


def test_an_argument_that_the_pipeline_does_not_take_is_refused_before_anything_is_loaded(small, tmp_path):
    overrides = (*SMALL, "call.use_dynamic_cgf=true")
    with pytest.raises(BadValueError) as caught:
        run(dataclasses.replace(small, overrides=overrides, out=tmp_path))
    assert str(caught.value).startswith(
        "call.use_dynamic_cgf: 'CogVideoXPipeline.__call__' takes no argument 'use_dynamic_cgf'. "
        "Did you mean 'use_dynamic_cfg'?"
    )
    assert list(tmp_path.glob("*.safetensors")) == []


@pytest.fixture
def by_hand(runs, tmp_path):
    """The folder of a hand-written port's stage files with the tensors of the original's."""
    folder = tmp_path / "stage_outputs"
    folder.mkdir()
    embeddings = load_file(runs["original"] / "encode.safetensors")
    dtypes = {"dtype_info": json.dumps(dict.fromkeys(embeddings, "torch.float32"))}
    save_file(embeddings, folder / "stage1_embeddings.safetensors", {"prompt": PROMPT, **dtypes})
    latents_BCTHW = (
        latents_of(runs["original"])[:, 1:].permute(0, 2, 1, 3, 4).contiguous()
    )  # without upstream's padding
    sizes = {"num_frames": "9", "height": "32", "width": "48", "seed": "3"}
    dtypes = {"dtype_info": json.dumps({"latents": "torch.float32"})}
    save_file({"latents": latents_BCTHW}, folder / "stage2_latents.safetensors", {**sizes, **dtypes})
    (folder / "generation_config.json").write_text(
        json.dumps({"prompt": PROMPT, "height": 32, "width": 48, "frames": 81})
    )
    return folder


def test_stage_files_of_a_hand_written_port_are_read(small, runs, by_hand, tmp_path):
    request = dataclasses.replace(small, prompt=None, negative_prompt=None, inputs=by_hand, out=tmp_path / "out")
    for stage, seed in (("denoise", SEED), ("decode", None)):
        run(dataclasses.replace(request, stage=stage, seed=seed, backend="original"))
        assert bits(tmp_path / "out", stage) == bits(runs["original"], stage)


def test_stage_files_of_a_hand_written_port_of_another_size_are_refused(small, by_hand, tmp_path):
    overrides = (*SMALL, "frames=17")
    request = dataclasses.replace(small, prompt=None, negative_prompt=None, seed=None, inputs=by_hand, stage="decode")
    with pytest.raises(ArtefactForeignError) as caught:
        run(dataclasses.replace(request, overrides=overrides, out=tmp_path / "out"))
    assert str(caught.value) == (
        f"{by_hand}/stage2_latents.safetensors: 'num_frames' is 9, and this run's frames is 17. "
        "Run with --set frames=9."
    )


def test_stage_files_of_another_models_hand_written_port_are_refused(small, by_hand, tmp_path):
    tensors = load_file(by_hand / "stage1_embeddings.safetensors")
    tensors["prompt_embeds_mask"] = torch.ones(1, 226)
    save_file(tensors, by_hand / "stage1_embeddings.safetensors")
    request = dataclasses.replace(small, prompt=None, negative_prompt=None, inputs=by_hand, out=tmp_path / "out")
    with pytest.raises(ArtefactForeignError) as caught:
        run(dataclasses.replace(request, stage="denoise", backend="original"))
    assert str(caught.value) == (
        f"{by_hand}/stage1_embeddings.safetensors: It holds 'prompt_embeds_mask'. It must hold floating-point tensors "
        "prompt_embeds, negative_prompt_embeds: make it again."
    )


def test_the_720p_jobs_other_size_is_taken(small):
    accept(dataclasses.replace(small, overrides=("height=768", "width=1360", "frames=81", "steps=50")))


def test_guidance_1_with_a_split_batch_is_refused(small):
    with pytest.raises(MeshError, match=r"dp=2.*guidance_scale 1\.0") as caught:
        accept(dataclasses.replace(small, overrides=(*SMALL, "guidance_scale=1.0")))
    assert "configs/cogvideox_demo.yaml" in str(caught.value)


def test_guidance_1_is_upstreams_pipeline_too(small, upstream, tmp_path):
    overrides = (*SMALL, "guidance_scale=1.0", "mesh={dp: 1, tp: 4}", "machine=cpu:4")
    request = dataclasses.replace(small, overrides=overrides, out=tmp_path)
    for stage in ("encode", "denoise"):
        run(dataclasses.replace(request, stage=stage, backend="original"))
    assert torch.equal(latents_of(tmp_path), upstream(output_type="latent", guidance_scale=1.0))
