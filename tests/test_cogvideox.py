"""CogVideoX 1.5 through `family: diffusers`: upstream's pipeline object, the original backend and the port agree.

"Agreement" is DESIGN's: the largest difference over the largest value of the reference.
"""

import dataclasses

import pytest
import torch
from diffusers import CogVideoXPipeline
from safetensors.torch import load_file

from torchport import save
from torchport.config.checkout import hushed
from torchport.errors import MeshError, StoppedError
from torchport.load import tiny
from torchport.processes.stopping import Stopping
from torchport.run import run
from torchport.stages.module import file_of
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
        paths=(str(root),),
    )


@pytest.fixture(scope="module")
def upstream(pack):
    """Upstream's own pipeline object: the tiny checkpoint, read and called as its documentation says."""
    card, _ = pack.card("cogvideox")
    with hushed(True):
        pipe = CogVideoXPipeline.from_pretrained(tiny.write(card, file_of(pack, card, "")), dtype=torch.float32)
        pipe.set_progress_bar_config(disable=True)

        def made(**kwargs):
            settings = {"height": 32, "width": 48, "num_frames": 9, "num_inference_steps": 3, "guidance_scale": 6.0}
            generator = torch.Generator().manual_seed(SEED)
            return pipe(PROMPT, NEGATIVE, generator=generator, **settings | kwargs).frames

        return made


@pytest.fixture(scope="module")
def runs(small, tmp_path_factory):
    """The folder of a run of each backend."""

    def made(**changes):
        folder = tmp_path_factory.mktemp("run")
        run(dataclasses.replace(small, out=folder, **changes))
        return folder

    return {"original": made(backend="original"), "torchax": made()}


def latents_of(folder):
    return load_file(folder / "denoise.safetensors")["latents"]


def frames_of(folder):
    return load_file(folder / "decode.safetensors")["frames"]


def difference(ours, reference):
    return (ours.double() - reference.double()).abs().max().item() / reference.abs().max().item()


def bits(folder, name):
    return save.read_manifest(save.file_of(folder, name)).sha256


def test_the_original_is_upstreams_pipeline_bit_for_bit(runs, upstream):
    latents = upstream(output_type="latent")
    assert latents.shape == (1, 4, 16, 4, 6)  # three latent frames, and one more before them for patch_size_t
    assert torch.equal(latents_of(runs["original"]), latents)
    assert torch.equal(frames_of(runs["original"]), upstream(output_type="pt"))
    assert frames_of(runs["original"]).shape == (1, 9, 3, 32, 48)


def test_the_port_agrees_with_upstream_after_the_last_step(runs):
    assert 0.5 <= latents_of(runs["original"]).abs().max() <= 20
    assert difference(latents_of(runs["torchax"]), latents_of(runs["original"])) < 1e-4
    assert difference(frames_of(runs["torchax"]), frames_of(runs["original"])) < 1e-3


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
