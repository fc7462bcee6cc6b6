"""The same numbers: upstream's own pipeline, the original backend and the port, on the demo's weights.

"Agreement" is DESIGN's: the largest difference over the largest value of the reference, whose maximum must lie between
0.5 and 20, and the port's own error against float64 is at most four times that of eager float32.
"""

import dataclasses
import functools
import json
import shutil

import jax
import pytest
import torch
from diffusers import HunyuanVideo15Pipeline
from fakes.artefacts import difference, frames_of, latents_of, levels, same_frames, video_of
from fakes.families import HUNYUAN, loaded
from safetensors.torch import load_file, save_file

from torchport.compile import network
from torchport.compile.in_force import hushed
from torchport.config.pack import find_pack
from torchport.errors import AttentionError, NotFiniteError
from torchport.load import tiny
from torchport.run.path import run, staged
from torchport.task import Execution, Request

FAMILY = loaded(HUNYUAN)
PROMPT, NEGATIVE = 'A cat walks past a red sign with the word "torchport" on it', "blurry"
SMALL = ("height=64", "width=96", "frames=9", "steps=3", "save_every=100")
SHAPE = (1, 16, 3, 4, 6)


@pytest.fixture(scope="module")
def noise():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def request_small(noise):
    """The demo at a small size, from given noise: what upstream's pipeline is given too."""
    return Request(
        model="hunyuan",
        config="configs/demo.yaml",
        prompt=PROMPT,
        negative_prompt=NEGATIVE,
        overrides=SMALL,
        noise=noise,
    )


@pytest.fixture(scope="module")
def upstream(noise):
    """Upstream's own pipeline object: the tiny checkpoint, read and called as its documentation says."""
    card, _ = find_pack().card("hunyuan")
    return lambda **kwargs: _upstream(tiny.write(card, HUNYUAN), noise, **kwargs)


def _upstream(folder, noise, dtype=torch.float32, steps=3, **kwargs):
    with hushed(True):
        pipe = HunyuanVideo15Pipeline.from_pretrained(folder, dtype=dtype)
        pipe.set_progress_bar_config(disable=True)
        pipe.guider = pipe.guider.new(guidance_scale=3.0)
        return pipe(
            prompt=PROMPT,
            negative_prompt=NEGATIVE,
            height=64,
            width=96,
            num_frames=9,
            num_inference_steps=steps,
            latents=noise.to(dtype),
            **kwargs,
        ).frames


@pytest.fixture(scope="module")
def runs(request_small, tmp_path_factory):
    """The folder of a run of each backend."""

    def made(**changes):
        folder = tmp_path_factory.mktemp("run")
        run(dataclasses.replace(request_small, out=folder, **changes))
        return folder

    return {"original": made(backend="original"), "torchax": made()}


def test_the_original_is_upstreams_pipeline_bit_for_bit(runs, upstream):
    assert torch.equal(latents_of(runs["original"]), upstream(output_type="latent"))
    assert torch.equal(frames_of(runs["original"]), levels(upstream(output_type="pt")))


def test_the_original_draws_upstreams_noise(request_small, tmp_path):
    """Without given noise, a seed gives what upstream's generator gives."""
    run(dataclasses.replace(request_small, noise=None, seed=3, backend="original", out=tmp_path))
    drawn = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    given = tmp_path / "given"
    run(dataclasses.replace(request_small, noise=drawn, backend="original", out=given))
    assert torch.equal(latents_of(tmp_path), latents_of(given))


def test_the_original_applies_no_patch(runs):
    manifest = json.loads((runs["original"] / "manifest.json").read_text())
    assert [stage["patches"] for stage in manifest["stages"].values()] == [[], [], []]
    assert manifest["deviations"] == []


def test_the_two_prompts_have_different_lengths(runs):
    """Or the masks would be alike for both rows of the batch, and the comparisons below blind to a mix-up."""
    embeddings = load_file(runs["torchax"] / "encode.safetensors")
    lengths = {name: int(embeddings[name].sum()) for name in embeddings if "mask" in name}
    assert lengths["prompt_embeds_mask"] != lengths["negative_prompt_embeds_mask"]
    assert lengths["prompt_embeds_mask_2"] > 0
    assert lengths["negative_prompt_embeds_mask_2"] == 0


def test_encoders_on_the_devices_agree_with_those_on_the_host(request_small, runs, tmp_path):
    on_devices = dataclasses.replace(request_small, stage="encode", overrides=(*SMALL, "encode=devices"))
    embeddings = {}
    with staged(on_devices) as carry:
        for number in range(2):
            summary = carry(dataclasses.replace(on_devices, out=tmp_path / str(number)))
            embeddings[number] = load_file(tmp_path / str(number) / "encode.safetensors")
            assert set(summary.operators) == {"encode text_encoder", "encode text_encoder_2"}
    host = load_file(runs["torchax"] / "encode.safetensors")
    assert all(torch.equal(embeddings[0][name], embeddings[1][name]) for name in host)
    for name, values in host.items():
        torch.testing.assert_close(embeddings[0][name], values, rtol=0, atol=1e-5 * float(values.abs().max()))
    assert not torch.equal(embeddings[0]["prompt_embeds"], host["prompt_embeds"])
    manifest = json.loads((tmp_path / "0" / "manifest.json").read_text())["stages"]["encode"]
    assert manifest["settings"]["encode"] == "devices" and manifest["programs"]
    taken_over = dataclasses.replace(request_small, stage="encode", out=tmp_path / "0")
    run(taken_over)
    assert torch.equal(load_file(tmp_path / "0" / "encode.safetensors")["prompt_embeds"], host["prompt_embeds"])


def test_the_port_agrees_after_the_first_step(request_small, tmp_path):
    # The schedule of three steps, stopped after one: its noise level is not that of a schedule of one step.
    first = {}
    for backend in ("original", "torchax"):
        out = tmp_path / backend
        changed = dataclasses.replace(request_small, out=out, backend=backend, overrides=(*SMALL, "save_every=1"))
        stages = []
        keep = _keep_partials(stages)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torchport.save.write", keep)
            run(dataclasses.replace(changed, stage="encode"))
            run(dataclasses.replace(changed, stage="denoise", prompt=None, negative_prompt=None))
        first[backend] = stages[0]
    assert difference(first["torchax"], first["original"]) <= 1e-5


def _keep_partials(stages):
    from torchport import save

    written = save.write

    def keep(folder, name, tensors, facts):
        if name == "denoise.partial":
            stages.append(tensors["latents"].clone())
        return written(folder, name, tensors, facts)

    return keep


def test_the_port_agrees_after_the_last_step(runs):
    assert difference(latents_of(runs["torchax"]), latents_of(runs["original"])) <= 1e-4


def test_the_port_agrees_in_the_frames(request_small, runs, upstream):
    assert difference(video_of(request_small, runs["torchax"]), upstream(output_type="pt")) <= 1e-3
    assert same_frames(frames_of(runs["torchax"]), frames_of(runs["original"]))


def test_the_ports_error_is_that_of_float32(runs, upstream):
    """Against upstream in float64, the port is at most four times as far off as upstream in float32."""
    exact = upstream(output_type="latent", dtype=torch.float64)
    assert exact.dtype == torch.float64
    eager = difference(latents_of(runs["original"]), exact)
    assert 0 < difference(latents_of(runs["torchax"]), exact) <= 4 * eager


def test_in_bfloat16_the_port_is_as_close_as_upstream(request_small, runs, tmp_path):
    """Tensors enter the networks in upstream's dtypes; one float32 among them would make JAX compute all in float32."""
    half = (*SMALL, "dtypes.transformer=bfloat16", "dtypes.vae=bfloat16")
    for backend in ("original", "torchax"):
        run(dataclasses.replace(request_small, backend=backend, out=tmp_path / backend, overrides=half))
    ours, reference = latents_of(tmp_path / "torchax"), latents_of(tmp_path / "original")
    assert ours.dtype == reference.dtype == torch.bfloat16
    assert frames_of(tmp_path / "torchax").dtype == torch.uint8
    in_half = dataclasses.replace(request_small, overrides=half)
    assert video_of(in_half, tmp_path / "torchax").dtype == torch.bfloat16
    exact = latents_of(runs["original"])
    assert difference(ours, exact) <= 2 * difference(reference, exact)


def test_a_repository_in_the_cache_is_read_like_a_folder(request_small, runs, tmp_path, monkeypatch):
    """`repo@revision`, as the hub's cache keeps it; the network is not asked."""
    card, _ = find_pack().card("hunyuan")
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = tmp_path / "hub" / "models--someone--a-model"
    shutil.copytree(tiny.write(card, HUNYUAN), folder / "snapshots" / commit)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    changed = dataclasses.replace(
        request_small, checkpoint="someone/a-model@main", backend="original", out=tmp_path / "o"
    )
    run(changed)
    assert torch.equal(latents_of(tmp_path / "o"), latents_of(runs["original"]))
    assert json.loads((tmp_path / "o" / "encode.json").read_text())["checkpoint"] == f"someone/a-model@{commit}"


def test_the_comparison_fails_when_the_mask_is_dropped(request_small, runs, tmp_path, monkeypatch):
    attention = torch.nn.functional.scaled_dot_product_attention

    def unmasked(query, key, value, attn_mask=None, **rest):
        return attention(query, key, value, **rest)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", unmasked)
    run(dataclasses.replace(request_small, out=tmp_path, stage="encode"))
    run(dataclasses.replace(request_small, out=tmp_path, stage="denoise"))
    assert difference(latents_of(tmp_path), latents_of(runs["original"])) > 1e-2


def test_cutting_the_text_to_the_prompts_changes_nothing(request_small, runs, tmp_path):
    run(dataclasses.replace(request_small, out=tmp_path, stage="encode"))
    overrides = (*request_small.overrides, "text_bucket=32")
    run(dataclasses.replace(request_small, out=tmp_path, stage="denoise", overrides=overrides))
    assert difference(latents_of(tmp_path), latents_of(runs["torchax"])) < 1e-5


@pytest.fixture(scope="module")
def denoised(request_small, runs, tmp_path_factory):
    """Gives the latents of a job with other fields, from the same embeddings; each job runs once."""

    @functools.cache
    def latents(*overrides, size=SMALL):
        out, noise = tmp_path_factory.mktemp("denoised"), request_small.noise if size == SMALL else None
        asked = dataclasses.replace(request_small, prompt=None, negative_prompt=None, noise=noise, out=out)
        run(dataclasses.replace(asked, inputs=runs["torchax"], stage="denoise", overrides=(*size, *overrides)))
        return latents_of(out)

    return latents


UNSHARDED = ("strategy=tp", "mesh={}", "machine=cpu:1")


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "unstacked"])
@pytest.mark.parametrize("strategy", ["tp", "tp_replicated_rows", "ulysses", "fsdp"])
def test_every_strategy_on_its_mesh_agrees_with_one_device(denoised, strategy, stacked):
    ours = denoised(f"strategy={strategy}", f"stacked={str(stacked).lower()}")
    assert difference(ours, denoised(*UNSHARDED)) <= 1e-5


@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [("ulysses", "{dp: 2, sp: 4}"), ("fsdp", "{dp: 1, sp: 2}"), ("tp_replicated_rows", "{dp: 2, tp: 4}")],
)
def test_tokens_that_the_mesh_does_not_divide_are_padded_and_agree(denoised, strategy, mesh):
    """3 x 3 x 5 latent positions: 45 image tokens, over four devices and over two."""
    odd, machine = ("height=48", "width=80", "frames=9", "steps=1"), f"machine=cpu:{8 if '4' in mesh else 2}"
    ours = denoised(f"strategy={strategy}", f"mesh={mesh}", machine, size=odd)
    assert difference(ours, denoised(*UNSHARDED, size=odd)) <= 1e-5


def test_an_implementation_of_attention_may_be_named(request_small, runs, tmp_path):
    overrides = (*request_small.overrides, "attention=xla")
    run(dataclasses.replace(request_small, out=tmp_path, stage="encode"))
    run(dataclasses.replace(request_small, out=tmp_path, stage="denoise", overrides=overrides))
    assert difference(latents_of(tmp_path), latents_of(runs["torchax"])) < 1e-5
    named = (*request_small.overrides, "attention=splash")
    with pytest.raises(AttentionError, match="It is a TPU kernel, and this program is for cpu"):
        run(dataclasses.replace(request_small, out=tmp_path, stage="denoise", overrides=named))


def test_every_patch_was_used_and_is_in_the_manifest(runs):
    manifest = json.loads((runs["torchax"] / "manifest.json").read_text())
    used = {row["id"]: row for stage in manifest["stages"].values() for row in stage["patches"]}
    assert {key for key, row in used.items() if row["state"] == "used"} >= {
        "diffusers.hunyuan15.image-condition",
        "diffusers.hunyuan15.token-cut",
        "diffusers.hunyuan15.token-order",
        "diffusers.hunyuan15.token-padding",
        "diffusers.hunyuan15.attention",
        "diffusers.hunyuan15.refiner-mask",
        "diffusers.hunyuan15.rotary-tables",
        "diffusers.hunyuan15.vae-attention",
        "diffusers.hunyuan15.vae-convolution",
        "diffusers.hunyuan15.vae-decoder",
        "diffusers.hunyuan15.vae-resnet",
        "diffusers.hunyuan15.vae-upsample",
        "torch.layer-norm",
    }
    assert {row["id"] for row in manifest["deviations"]} == {
        "diffusers.hunyuan15.token-padding",
        "diffusers.hunyuan15.attention",
        "diffusers.hunyuan15.refiner-mask",
        "diffusers.hunyuan15.vae-attention",
        "diffusers.hunyuan15.vae-convolution",
        "diffusers.hunyuan15.vae-decoder",
        "diffusers.hunyuan15.vae-resnet",
        "torch.layer-norm",
        "torch.scaled-dot-product-attention",
        "torchax.convolution",
        "torchax.linalg-vector-norm",
        "torchax.power-by-number",
        "torchax.sum-dim",
        "torchax.sum-dtype",
    }


def test_the_devices_hold_what_the_rules_say(runs):
    assert jax.device_count() == 8
    manifest = json.loads((runs["torchax"] / "denoise.json").read_text())
    assert manifest["config"]["mesh"] == {"dp": 2, "tp": 4}
    assert manifest["settings"]["precision"]["transformer"] == "default"
    manifest = json.loads((runs["torchax"] / "decode.json").read_text())
    assert manifest["settings"]["precision"]["vae"] == "high" and manifest["settings"]["dtypes"]["vae"] == "float32"


def test_a_networks_weights_are_gone_before_the_next_are_placed(request_small, tmp_path, monkeypatch):
    """Two experts that fit one after the other need not fit together."""
    honest, kept = network.placed, []

    def placed(task, stage, *rest):
        before = sum(array.nbytes for array in jax.live_arrays())
        weights = honest(task, stage, *rest)
        kept.append((stage.name, before - start, sum(array.nbytes for array in weights.values())))
        return weights

    monkeypatch.setattr(network, "placed", placed)
    start = sum(array.nbytes for array in jax.live_arrays())
    run(dataclasses.replace(request_small, out=tmp_path))
    assert [name for name, _, _ in kept] == ["denoise", "decode"]
    assert kept[1][1] < kept[0][2] / 100


def test_stages_on_three_machines_make_the_same_video(request_small, runs, tmp_path):
    """Three processes' worth of folders, only the artefacts carried from one to the next."""
    folders = [tmp_path / name for name in ("one", "two", "three")]
    run(dataclasses.replace(request_small, stage="encode", out=folders[0]))
    asked = dataclasses.replace(request_small, prompt=None, negative_prompt=None)
    run(dataclasses.replace(asked, stage="denoise", inputs=folders[0], out=folders[1]))
    run(dataclasses.replace(asked, stage="decode", inputs=folders[1], out=folders[2]))
    assert torch.equal(frames_of(folders[2]), frames_of(runs["torchax"]))
    assert (folders[2] / "video.mp4").stat().st_size > 1000


def test_tiles_are_blended_as_upstream_blends_them(request_small, tmp_path):
    """A frame of more than one tile, the last ones odd; see the fallbacks in the card's rules."""
    large = ("height=304", "width=272", "frames=5", "steps=1", "vae_tiling=true")
    for backend in ("original", "torchax"):
        run(dataclasses.replace(request_small, noise=None, backend=backend, out=tmp_path / backend, overrides=large))
    request = dataclasses.replace(request_small, noise=None, overrides=large)
    videos = [
        video_of(dataclasses.replace(request, backend=backend), tmp_path / backend)
        for backend in ("torchax", "original")
    ]
    assert difference(*videos) <= 1e-3
    assert same_frames(frames_of(tmp_path / "torchax"), frames_of(tmp_path / "original"))


def test_guidance_can_be_off(request_small, tmp_path):
    """One condition only: the batch is 1, and dp=2 would not divide it."""
    off = (*SMALL, "guidance_scale=1.0", "machine=cpu:4", "mesh={tp: 4}")
    for backend in ("original", "torchax"):
        run(dataclasses.replace(request_small, backend=backend, out=tmp_path / backend, overrides=off))
    ours, reference = latents_of(tmp_path / "torchax"), latents_of(tmp_path / "original")
    assert difference(ours, reference) <= 1e-4


def test_a_compiled_step_does_not_move_the_scheduler(request_small, tmp_path):
    """Compiling is the only warm-up there is, and it runs nothing: every step of the schedule is taken once."""
    summary = run(dataclasses.replace(request_small, out=tmp_path))
    assert summary.steps == 3
    assert summary.seconds["denoise compile"] > 0


def test_upstream_is_run_under_float32_whatever_the_callers_default_dtype_is(request_small, tmp_path, monkeypatch):
    """A schedule that upstream makes without naming a dtype would have bfloat16's levels, some of them twice."""
    seen = []

    def encode(parts, call, settings, steps):
        seen.append(torch.linspace(1, 0, 51).dtype)
        return {"prompt_embeds": torch.zeros(1)}

    stages = tuple(
        dataclasses.replace(stage, run=encode) if stage.name == "encode" else stage for stage in FAMILY.STAGES
    )
    monkeypatch.setattr(FAMILY, "STAGES", stages)
    torch.set_default_dtype(torch.bfloat16)
    try:
        run(dataclasses.replace(request_small, stage="encode", out=tmp_path, noise=None))
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert seen == [torch.float32]


def test_a_run_tells_of_its_patches_in_one_line_and_of_each_that_is_not_exact(caplog):
    from types import SimpleNamespace

    from torchport.run.journey import log_patches

    rows = [
        {"id": "a", "equivalence": "bitwise", "state": "used", "calls": 3},
        {"id": "b", "equivalence": {"close": {"bound": 1e-2}}, "state": "used", "calls": 1},
        {"id": "c", "equivalence": {"algebraic": "why"}, "state": "displaced", "calls": None},
    ]
    caplog.set_level("INFO", "torchport")
    log_patches(SimpleNamespace(rows=lambda: rows), " while tracing")
    assert [record.getMessage() for record in caplog.records] == [
        "patches: 2 in force, 2 called while tracing",
        "patch b (close): used, called 1 time while tracing",
        "patch c (algebraic): displaced",
    ]
    caplog.clear()
    log_patches(SimpleNamespace(rows=list), "")
    assert caplog.records == []


def test_op_by_op_a_step_agrees_and_a_module_with_nan_in_its_weight_is_named(
    request_small, runs, tmp_path, tiny_folder
):
    """Blocks are not stacked then, so that a module has upstream's own name."""
    request = dataclasses.replace(request_small, prompt=None, negative_prompt=None, stage="denoise")
    request = dataclasses.replace(request, overrides=(*SMALL, "steps=1"), inputs=runs["original"])
    run(dataclasses.replace(request, out=tmp_path / "compiled"))
    op_by_op = dataclasses.replace(request, execution=Execution(jit=False))
    run(dataclasses.replace(op_by_op, out=tmp_path / "op_by_op"))
    assert difference(latents_of(tmp_path / "op_by_op"), latents_of(tmp_path / "compiled")) < 1e-5
    manifest = json.loads((tmp_path / "op_by_op" / "denoise.json").read_text())
    assert manifest["jit"] is False and manifest["programs"] == []

    folder, name = shutil.copytree(tiny_folder, tmp_path / "weights"), "transformer_blocks.1.ff.net.2"
    [file] = (folder / "transformer").glob("*.safetensors")
    tensors = load_file(file)
    tensors[f"{name}.weight"][0, 0] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    run(dataclasses.replace(request_small, noise=None, checkpoint=str(folder), stage="encode", out=tmp_path / "nan"))
    broken = dataclasses.replace(op_by_op, checkpoint=str(folder), inputs=tmp_path / "nan", out=tmp_path / "nan")
    with pytest.raises(NotFiniteError) as caught:
        run(broken)
    assert caught.value.place.startswith("'denoise', step 1 of 1 (timestep ")
    [detail] = caught.value.details
    assert detail.startswith(f"'{name}' of 'transformer', a Linear, is the first module to return them: ")
    assert detail.endswith("; its 'weight' has them already")


def test_a_profile_has_the_steps_and_the_names_of_the_modules(request_small, runs, tmp_path, caplog):
    request = dataclasses.replace(request_small, prompt=None, negative_prompt=None, stage="denoise", out=tmp_path)
    request = dataclasses.replace(request, inputs=runs["original"], execution=Execution(profile=1, memory=True))
    with caplog.at_level("INFO", "torchport"):
        run(request)
    [trace] = (tmp_path / "profile" / "denoise").rglob("*.xplane.pb")
    assert b"transformer/transformer_blocks.0-1/" in trace.read_bytes()
    assert list(trace.parent.glob("perfetto_trace.json.gz"))
    text = caplog.text
    assert f"profile: steps 3 to 3 of 'denoise' are in {tmp_path}/profile/denoise" in text
    assert "memory of 'denoise': 'transformer', as compiled, on each device: " in text
    assert "memory of 'denoise': the backend 'cpu' does not count what its devices hold" in text
