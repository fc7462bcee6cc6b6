"""LTX-Video through `family: diffusers`: upstream's pipeline object, the original backend and the port agree.

"Agreement" is DESIGN's: the largest difference over the largest value of the reference.
"""

import dataclasses

import pytest
import torch
import yaml
from diffusers import LTXPipeline
from fakes.artefacts import bits, difference, frames_of, levels, same_frames, tensor_of, video_of

from torchport.compile.in_force import hushed
from torchport.config.pack import find_pack
from torchport.errors import BadValueError, StoppedError
from torchport.load import tiny
from torchport.processes.stopping import Stopping
from torchport.run.path import run
from torchport.stages import file_of
from torchport.stages.replay import Replay, latents_of
from torchport.task import Request

PROMPT, NEGATIVE, SEED = "A cat walks past a red sign", "blurry", 3
SMALL = ("height=64", "width=96", "frames=17", "steps=3", "save_every=100")
WITHOUT_PROMPTS = {"prompt": None, "negative_prompt": None}
DRAWS = {"decode_timestep": 0.05, "decode_noise_scale": 0.025}


@pytest.fixture(scope="module")
def small(root):
    return Request("ltx", "configs/ltx_demo.yaml", PROMPT, NEGATIVE, seed=SEED, overrides=SMALL, paths=(str(root),))


def upstream_of(pack, dtype=torch.float32, **kwargs):
    """Returns what upstream's own pipeline object does with the tiny checkpoint, called as its documentation says."""
    card, _ = pack.card("ltx")
    settings = {"height": 64, "width": 96, "num_frames": 17, "num_inference_steps": 3, "guidance_scale": 3.0}
    with hushed(True):
        pipe = LTXPipeline.from_pretrained(tiny.write(card, file_of(pack, card, "")), dtype=dtype)
        pipe.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(SEED)
        return pipe(PROMPT, NEGATIVE, generator=generator, **settings | kwargs).frames


@pytest.fixture(scope="module")
def after_steps(pack):
    """The latents of upstream's loop after each step."""
    latents = []

    def note(pipe, step, timestep, tensors):
        latents.append(tensors["latents"])
        return {}

    upstream_of(pack, output_type="latent", callback_on_step_end=note)
    return latents


@pytest.fixture(scope="module")
def original(small, tmp_path_factory):
    """The folder of a run of the original backend."""
    out = tmp_path_factory.mktemp("original")
    run(dataclasses.replace(small, out=out, backend="original"))
    return out


@pytest.fixture(scope="module")
def ported(small, original, tmp_path_factory):
    """Returns the folder of the port's denoising and decoding under a strategy, and its latents after each step."""
    made = {}

    def denoised(strategy):
        if strategy in made:
            return made[strategy]
        request, after = denoising(small, strategy, original, tmp_path_factory.mktemp(strategy)), []
        with pytest.MonkeyPatch.context() as context:
            returned = Replay.returned

            def noted(self, *given):
                result = returned(self, *given)
                after.append(latents_of(self.state))
                return result

            context.setattr(Replay, "returned", noted)
            run(request)
        run(dataclasses.replace(request, stage="decode", inputs=request.out))
        made[strategy] = request.out, after[-3:]  # a rehearsal takes the steps before
        return made[strategy]

    return denoised


def denoising(small, strategy, inputs, out):
    mesh = "{dp: 2, tp: 4}" if strategy == "tp" else "{dp: 2, sp: 4}"
    overrides = (*SMALL, f"strategy={strategy}", f"mesh={mesh}")
    return dataclasses.replace(small, stage="denoise", inputs=inputs, out=out, overrides=overrides, **WITHOUT_PROMPTS)


@pytest.fixture
def stopping(monkeypatch):
    """Runs a request, which is stopped after its first step."""

    def stopped(request):
        with monkeypatch.context() as context, pytest.raises(StoppedError):
            context.setattr(Stopping, "__init__", lambda self: setattr(self, "cause", True))
            context.setattr(Stopping, "check", lambda *_: None)  # not before the first step
            run(request)

    return stopped


@pytest.fixture(scope="module")
def conditioned(root, tmp_path_factory):
    """A pack whose VAE takes a timestep, as LTX-Video 0.9.1's does: upstream draws noise for it after its loop."""
    folder = tmp_path_factory.mktemp("conditioned")
    card = yaml.safe_load((root / "configs" / "models" / "ltx.yaml").read_text())
    card["tiny"]["components"]["vae"]["timestep_conditioning"] = True
    for strategy in (each for each in card["strategies"].values() if "inputs" in each):
        strategy["inputs"]["vae"].append({"match": "temb", "spec": "replicate"})
    (folder / "configs" / "models").mkdir(parents=True)
    (folder / "configs" / "models" / "ltx.yaml").write_text(
        yaml.safe_dump({**card, "overrides": True}, sort_keys=False)
    )
    (folder / "configs" / "ltx_demo.yaml").write_text((root / "configs" / "ltx_demo.yaml").read_text())
    return folder


def test_the_original_is_upstreams_pipeline_bit_for_bit(original, pack):
    assert torch.equal(tensor_of(original), upstream_of(pack, output_type="latent"))
    assert torch.equal(frames_of(original), levels(upstream_of(pack, output_type="pt")))
    assert tensor_of(original).shape == (1, 18, 16) and frames_of(original).shape == (1, 17, 3, 64, 96)


def test_the_original_is_upstreams_pipeline_in_bfloat16_too(small, pack, tmp_path):
    dtypes = "dtypes={text_encoder: bfloat16, transformer: bfloat16, vae: bfloat16}"
    run(dataclasses.replace(small, out=tmp_path, backend="original", overrides=(*SMALL, dtypes)))
    assert tensor_of(tmp_path).dtype == torch.float32
    assert torch.equal(tensor_of(tmp_path), upstream_of(pack, torch.bfloat16, output_type="latent"))
    assert torch.equal(frames_of(tmp_path), levels(upstream_of(pack, torch.bfloat16, output_type="pt")))


@pytest.mark.parametrize("strategy", ["tp", "ulysses", "fsdp"])
def test_the_port_agrees_with_upstream(small, original, ported, after_steps, pack, strategy):
    folder, after = ported(strategy)
    assert 0.5 <= after_steps[-1].abs().max() <= 20
    assert difference(after[0], after_steps[0]) < 1e-5
    assert difference(tensor_of(folder), after_steps[-1]) < 1e-4
    request = denoising(small, strategy, original, folder)
    assert difference(video_of(request, folder), upstream_of(pack, output_type="pt")) < 1e-3
    assert same_frames(frames_of(folder), frames_of(original))


def test_the_port_goes_on_after_a_stop_to_the_same_bits(small, original, ported, stopping, tmp_path):
    request = denoising(small, "tp", original, tmp_path)
    stopping(request)
    assert run(request).steps == 2
    assert bits(tmp_path, "denoise") == bits(ported("tp")[0], "denoise")


def test_three_runs_are_one(small, original, tmp_path):
    for stage in ("encode", "denoise", "decode"):
        prompts = {} if stage == "encode" else WITHOUT_PROMPTS
        run(dataclasses.replace(small, stage=stage, out=tmp_path, backend="original", **prompts))
        assert bits(tmp_path, stage) == bits(original, stage), stage


def test_decoding_in_another_process_draws_what_upstream_draws_after_its_loop(
    small, root, conditioned, stopping, tmp_path
):
    pack, pixels = find_pack((str(conditioned), str(root))), {"output_type": "pt"}
    frames = upstream_of(pack, **pixels, **DRAWS)
    assert difference(upstream_of(pack, **pixels, decode_timestep=0.05), frames) > 0.01
    sets = tuple(f"call.{name}={value}" for name, value in DRAWS.items())
    request = dataclasses.replace(
        small, out=tmp_path, backend="original", overrides=(*SMALL, *sets), paths=(str(conditioned), str(root))
    )
    stopping(request)
    for stage in ("denoise", "decode"):
        run(dataclasses.replace(request, stage=stage, **WITHOUT_PROMPTS))
    assert torch.equal(frames_of(tmp_path), levels(frames))
    ported = dataclasses.replace(request, stage="decode", backend="torchax", inputs=tmp_path, **WITHOUT_PROMPTS)
    run(dataclasses.replace(ported, out=tmp_path / "ported"))
    assert difference(video_of(ported, tmp_path), frames) < 1e-5  # the timestep is an input of the program
    assert same_frames(frames_of(tmp_path / "ported"), levels(frames))


def test_guidance_1_is_upstreams_pipeline_too(small, pack, tmp_path):
    run(dataclasses.replace(small, out=tmp_path, backend="original", overrides=(*SMALL, "guidance_scale=1.0")))
    assert torch.equal(tensor_of(tmp_path), upstream_of(pack, output_type="latent", guidance_scale=1.0))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, before the refusal
def test_one_step_of_a_schedule_that_has_none_is_refused(small, tmp_path):
    with pytest.raises(BadValueError) as caught:
        run(dataclasses.replace(small, out=tmp_path, backend="original", overrides=(*SMALL, "steps=1")))
    assert str(caught.value) == (
        "'steps': It is 1, and 'FlowMatchEulerDiscreteScheduler' makes timesteps of NaN or infinity of it. Take more."
    )
