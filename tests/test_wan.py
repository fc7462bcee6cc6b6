"""Wan 2.2 through `family: diffusers`: upstream's pipeline object, the original backend and the port agree.

"Agreement" is DESIGN's: the largest difference over the largest value of the reference.
"""

import dataclasses
import functools
import json

import pytest
import torch
import yaml
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from fakes.artefacts import bits, difference, frames_of, latents_of, levels, same_frames, tensor_of, video_of
from fakes.plants import plant
from safetensors.torch import load_file

from torchport import load
from torchport.compile import Compiled, Eager
from torchport.compile.in_force import hushed
from torchport.errors import (
    ArtefactForeignError,
    ArtefactMissingError,
    BadValueError,
    CheckpointForeignError,
    MeshError,
    NotFiniteError,
    StoppedError,
)
from torchport.load import checkpoint, tiny
from torchport.processes.stopping import Stopping
from torchport.run.path import run
from torchport.stages import file_of
from torchport.task import Request, accept

PROMPT, NEGATIVE, SEED = "A cat walks past a red sign", "blurry", 3
SIZES = {"wan": (32, 48, 4.0), "wan_5b": (64, 96, 5.0)}
FIRST_STEPS = {1: 1, 3: 1, 5: 2}  # of the first network, by number of steps
MODELS = pytest.mark.parametrize("model", SIZES)


def small(model, steps=3):
    height, width, _ = SIZES[model]
    return (f"height={height}", f"width={width}", "frames=9", f"steps={steps}", "save_every=100")


@pytest.fixture(scope="module")
def request_of(root):
    def made(model, steps=3, sets=(), **fields):
        overrides = (*small(model, steps), *sets)
        prompts = {"prompt": PROMPT, "negative_prompt": NEGATIVE} if fields.get("stage", "all") == "all" else {}
        known = {"seed": SEED, "overrides": overrides, "paths": (str(root),), **prompts}
        return Request(model, f"configs/{model}_demo.yaml", **{**known, **fields})

    return made


@pytest.fixture(scope="module")
def upstream(pack):
    """Upstream's own pipeline objects: the tiny checkpoints, read and called as its documentation says."""

    def made(model, steps=3, scheduler=None, **kwargs):
        card, _ = pack.card(model)
        height, width, guidance = SIZES[model]
        sizes = {"height": height, "width": width, "num_frames": 9, "num_inference_steps": steps}
        scales = {"guidance_scale": guidance, **card.call.constants}
        with hushed(True):
            pipe = WanPipeline.from_pretrained(tiny.write(card, file_of(pack, card, "")), dtype=torch.float32)
            pipe.set_progress_bar_config(disable=True)
            pipe.scheduler = scheduler or pipe.scheduler
            seeded = {"generator": torch.Generator().manual_seed(SEED)}
            return pipe(PROMPT, NEGATIVE, **seeded | sizes | scales | kwargs)

    return made


@pytest.fixture(scope="module")
def runs(request_of, tmp_path_factory):
    """The folder of a run of each model and backend."""
    folders = {}

    def folder(model, backend, steps=3):
        if (model, backend, steps) not in folders:
            out = tmp_path_factory.mktemp("run")
            run(request_of(model, steps, out=out, backend=backend))
            folders[model, backend, steps] = out
        return folders[model, backend, steps]

    return folder


@MODELS
def test_the_original_is_upstreams_pipeline_bit_for_bit(runs, upstream, model):
    folder = runs(model, "original")
    assert torch.equal(latents_of(folder), upstream(model, output_type="latent").frames)
    assert torch.equal(frames_of(folder), levels(upstream(model, output_type="pt").frames))
    assert frames_of(folder).shape == (1, 9, 3, *SIZES[model][:2])


@MODELS
def test_the_port_agrees_with_upstream_after_the_last_step(request_of, runs, upstream, model):
    theirs, ours = runs(model, "original"), runs(model, "torchax")
    assert 0.5 <= latents_of(theirs).abs().max() <= 20
    assert difference(latents_of(ours), latents_of(theirs)) < 1e-4
    assert difference(video_of(request_of(model, 3), ours), upstream(model, output_type="pt").frames) < 1e-3
    assert same_frames(frames_of(ours), frames_of(theirs))


@pytest.mark.parametrize("strategy", ["tp", "ulysses", "fsdp"])
@MODELS
def test_the_port_agrees_with_upstream_after_the_first_step(request_of, upstream, runs, tmp_path, model, strategy):
    stage, name = ("denoise_first", "returned.0") if model == "wan" else ("denoise", "latents")
    steps = 3 if model == "wan" else 1
    mesh = "{dp: 2, tp: 4}" if strategy == "tp" else "{dp: 2, sp: 4}"
    sets = (f"strategy={strategy}", f"mesh={mesh}")
    run(request_of(model, steps, sets, stage=stage, inputs=runs(model, "original"), out=tmp_path))
    after = []

    def note(pipe, step, timestep, tensors):
        after.append(tensors["latents"])
        return {}

    upstream(model, steps, output_type="latent", callback_on_step_end=note)
    assert difference(tensor_of(tmp_path, stage, name), after[0]) < 1e-5


@pytest.mark.parametrize("strategy", ["tp", "ulysses"])
def test_both_networks_agree_with_upstream_under_every_strategy(request_of, runs, tmp_path, strategy):
    sets = (f"strategy={strategy}", "mesh={dp: 2, tp: 4}" if strategy == "tp" else "mesh={dp: 2, sp: 4}")
    for stage in ("denoise_first", "denoise"):
        inputs = tmp_path if stage == "denoise" else runs("wan", "original")
        for name in ("encode",) if stage == "denoise" else ():
            (tmp_path / f"{name}.safetensors").symlink_to(runs("wan", "original") / f"{name}.safetensors")
        run(request_of("wan", 3, sets, stage=stage, inputs=inputs, out=tmp_path))
    assert difference(latents_of(tmp_path), latents_of(runs("wan", "original"))) < 1e-4


def test_four_runs_are_one(request_of, runs, tmp_path):
    prompts = {"prompt": PROMPT, "negative_prompt": NEGATIVE}
    for stage in ("encode", "denoise_first", "denoise", "decode"):
        request = request_of("wan", stage=stage, out=tmp_path, backend="original")
        run(dataclasses.replace(request, **(prompts if stage == "encode" else {})))
        assert bits(tmp_path, stage) == bits(runs("wan", "original"), stage), stage
    assert load_file(tmp_path / "denoise_first.safetensors")["done"] == 1
    assert list(json.loads((tmp_path / "manifest.json").read_text())["stages"]) == [
        "encode",
        "denoise_first",
        "denoise",
        "decode",
    ]


@pytest.mark.parametrize("backend", ["original", "torchax"])
def test_a_run_that_is_stopped_after_every_step_ends_with_the_same_bits(
    request_of, runs, tmp_path, monkeypatch, backend
):
    steps, stops = 5, []
    whole = runs("wan", backend, steps)
    request = request_of("wan", steps, out=tmp_path, backend=backend)
    with monkeypatch.context() as context:
        context.setattr(Stopping, "__init__", lambda self: setattr(self, "cause", True))
        context.setattr(Stopping, "check", lambda *_: None)  # not before the first step
        while len(stops) < steps:
            try:
                summary = run(request)
                break
            except StoppedError as stopped:
                stops.append(str(stopped))
    assert [f"after step {n} of {steps}" in stop for n, stop in enumerate(stops, 1)] == [True] * (steps - 1)
    assert summary.steps == 1
    assert not list(tmp_path.glob("*.partial*"))
    for name in ("denoise_first", "denoise", "decode"):
        assert bits(tmp_path, name) == bits(whole, name), name
    assert int(tensor_of(tmp_path, "denoise_first", "done")) == FIRST_STEPS[steps]


@pytest.mark.parametrize(
    ("network", "call", "place"),
    [("transformer", 1, "'denoise_first', step 1 of 3"), ("transformer_2", 3, "'denoise', step 3 of 3")],
)
def test_infinity_of_either_network_is_refused_in_its_step(
    request_of, runs, tmp_path, monkeypatch, network, call, place
):
    """Each is called twice a step: for the prompt, and for the negative one."""
    request = request_of("wan", out=tmp_path, backend="original", prompt=None, negative_prompt=None)
    request = dataclasses.replace(request, stage=place.split("'")[1], inputs=runs("wan", "original"))
    plant(monkeypatch, network, call, float("inf"))
    with pytest.raises(NotFiniteError) as caught:
        run(request)
    assert str(caught.value).startswith(f"{place} (timestep ") and "'returned.0' has " in str(caught.value)
    assert not list(tmp_path.glob("denoise*"))


def test_the_noise_of_the_caller_is_the_first_networks(request_of, runs, upstream, tmp_path):
    noise = torch.randn(1, 16, 3, 4, 6, generator=torch.Generator().manual_seed(9))
    run(request_of("wan", noise=noise, out=tmp_path, backend="original"))
    assert torch.equal(latents_of(tmp_path), upstream("wan", output_type="latent", latents=noise).frames)


def test_guidance_1_is_upstreams_pipeline_too(request_of, upstream, tmp_path):
    run(request_of("wan", sets=("guidance_scale=1.0",), out=tmp_path, backend="original"))
    theirs = upstream("wan", output_type="latent", guidance_scale=1.0, negative_prompt_embeds=None).frames
    assert torch.equal(latents_of(tmp_path), theirs)


@pytest.mark.parametrize("backend", ["original", "torchax"])
def test_few_steps_with_a_scheduler_of_the_jobs_are_upstreams(request_of, upstream, tmp_path, backend):
    request = request_of("wan_5b", out=tmp_path, backend=backend)
    run(dataclasses.replace(request, config="configs/wan_5b_fast_demo.yaml"))
    scheduler = FlowMatchEulerDiscreteScheduler(shift=0.967047, shift_terminal=0.522, stochastic_sampling=True)
    generator = torch.Generator().manual_seed(SEED)
    scheduler.step = functools.partial(scheduler.step, generator=generator)  # upstream gives it none
    scales = {"guidance_scale": 1.0, "output_type": "latent", "generator": generator}
    theirs = upstream("wan_5b", scheduler=scheduler, **scales).frames
    assert scheduler.timesteps.tolist() == [1000, 757, 522]
    assert difference(latents_of(tmp_path), theirs) <= (0 if backend == "original" else 1e-5)


@MODELS
def test_one_condition_is_no_batch_for_dp(request_of, model):
    with pytest.raises(MeshError, match=r"dp=2.*guidance_scale 1\.0"):
        accept(request_of(model, sets=("guidance_scale=1.0",)))


def test_the_network_is_called_once_for_both_conditions_by_the_port_alone(request_of, runs, monkeypatch, tmp_path):
    batches = []
    for cls, name in ((Compiled, "torchax"), (Eager, "original")):
        computed = cls.__call__

        def noted(self, computed=computed, name=name, **inputs):
            batches.append((name, *(inputs[each].shape[0] for each in ("hidden_states", "timestep"))))
            return computed(self, **inputs)

        monkeypatch.setattr(cls, "__call__", noted)
        run(request_of("wan", stage="denoise_first", inputs=runs("wan", "original"), out=tmp_path / name, backend=name))
    assert batches == [("torchax", 2, 2), ("original", 1, 1), ("original", 1, 1)]


def test_one_condition_is_one_call_on_a_mesh_without_dp(request_of, tmp_path):
    sets, prompts = ("guidance_scale=1.0", "mesh={sp: 8}"), {"prompt": PROMPT, "negative_prompt": NEGATIVE}
    run(request_of("wan", sets=sets, stage="encode", out=tmp_path, **prompts))
    after = {}
    for backend in ("torchax", "original"):
        out = tmp_path / backend
        run(request_of("wan", sets=sets, stage="denoise_first", inputs=tmp_path, out=out, backend=backend))
        after[backend] = tensor_of(out, "denoise_first", "returned.0")
    assert difference(after["torchax"], after["original"]) < 1e-5


def test_the_second_stage_needs_the_first_ones_state_of_the_same_loop(request_of, runs, tmp_path):
    (tmp_path / "encode.safetensors").symlink_to(runs("wan", "original") / "encode.safetensors")
    with pytest.raises(ArtefactMissingError, match=r"'denoise_first' is not there.*--stage denoise_first"):
        run(request_of("wan", stage="denoise", out=tmp_path, backend="original"))
    inputs = runs("wan", "original")
    with pytest.raises(ArtefactForeignError, match="'denoise_first' was made for steps 3, and this run is for 5"):
        run(request_of("wan", 5, stage="denoise", inputs=inputs, out=tmp_path, backend="original"))
    with pytest.raises(ArtefactForeignError, match="'denoise_first' was made with seed 3, and 'denoise' is asked for"):
        run(request_of("wan", stage="denoise", inputs=inputs, out=tmp_path, backend="original", seed=4))


@pytest.mark.parametrize("backend", ["original", "torchax"])
def test_a_network_without_a_step_is_refused(request_of, tmp_path, backend):
    fact = "'steps': 1 steps of 'WanPipeline' leave none to 'transformer_2'. Take more"
    with pytest.raises(BadValueError, match=fact):
        run(request_of("wan", 1, out=tmp_path, backend=backend))
    assert list(tmp_path.glob("denoise*")) == []


def test_a_checkpoint_whose_pipeline_is_made_otherwise_is_refused(pack, tmp_path):
    card, _ = pack.card("wan")
    folder = tiny.write(card, file_of(pack, card, ""))
    index = json.loads((folder / "model_index.json").read_text())
    assert index["boundary_ratio"] == 0.875
    changes = {"boundary_ratio": "'boundary_ratio' is None. The card 'wan' has 0.875", "expand_timesteps": "is True"}
    for (name, fact), value in zip(changes.items(), (None, True), strict=True):
        (tmp_path / "model_index.json").write_text(json.dumps({**index, name: value}))
        with pytest.raises(CheckpointForeignError, match=fact):
            load.check_init(card, tmp_path)
    left_out = {**card.call.init, "safety_checker": None}  # a component that the checkpoint has
    (tmp_path / "model_index.json").write_text(json.dumps({**index, "safety_checker": ["package", "Class"]}))
    load.check_init(card.model_copy(update={"call": card.call.model_copy(update={"init": left_out})}), tmp_path)


def test_a_network_in_bfloat16_has_the_dtypes_that_upstream_loads(pack):
    card, _ = pack.card("wan")
    folder = tiny.write(card, file_of(pack, card, "")) / "transformer"
    theirs = WanTransformer3DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
    config = checkpoint.read_json(folder / "config.json")
    cls = card.components["transformer"].class_
    filled = load.fill(load.build(cls, config, "bfloat16", "config"), folder, "transformer")
    shapes = load.published(cls, config, "config", "bfloat16")
    dtypes = {name: tensor.dtype for name, tensor in (*theirs.named_parameters(), *theirs.named_buffers())}
    assert dtypes["blocks.0.norm2.weight"] == dtypes["rope.freqs_cos"] == torch.float32
    assert dtypes["blocks.0.attn1.to_q.weight"] == torch.bfloat16
    for ours in (filled, shapes):
        assert {name: t.dtype for name, t in (*ours.named_parameters(), *ours.named_buffers())} == dtypes
    state = theirs.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in filled.state_dict().items())


@pytest.mark.slow
def test_a_curve_has_the_steps_of_both_networks_in_turn(request_of, tmp_path):
    """Each step calls a network with and without the prompt; a curve of a network alone would be another one's."""
    run(request_of("wan", out=tmp_path, sets=("cache={kind: calibrate}",)))
    curve = yaml.safe_load((tmp_path / "magcache.yaml").read_text())["cache"]["curve"]
    first = FIRST_STEPS[3]
    assert len(curve) == 3 and curve[0] == curve[first] == 1.0 and curve[2] != 1.0
    assert tensor_of(tmp_path, "denoise_first", "step_cache.curve").tolist() == curve[:first]
