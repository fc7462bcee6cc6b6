"""Guiders in a run: the original backend is upstream's pipeline with the same guider, and the port agrees with it.

"Agreement" is DESIGN's: the largest difference over the largest value of the reference.
"""

import dataclasses
import json

import diffusers
import pytest
import torch
from diffusers import HunyuanVideo15Pipeline
from fakes.artefacts import difference, latents_of
from fakes.families import HUNYUAN

from torchport.compile.in_force import hushed
from torchport.errors import (
    ArtefactForeignError,
    BadValueError,
    MeshError,
    MissingKeyError,
    StoppedError,
    UnknownKeyError,
)
from torchport.load import tiny
from torchport.processes.stopping import Stopping
from torchport.run.path import run
from torchport.task import Request, accept

PROMPT, NEGATIVE, SEED, SCALE, STEPS = "A cat walks past a red sign", "blurry", 3, 3.0, 4
SMALL = ("height=64", "width=96", "frames=9", f"steps={STEPS}", "save_every=100")
GUIDERS = {
    "ClassifierFreeGuidance": {"guidance_rescale": 0.5},
    "ClassifierFreeZeroStarGuidance": {"zero_init_steps": 1},
    "AdaptiveProjectedGuidance": {"adaptive_projected_guidance_momentum": -0.5, "eta": 0.5},
    "AdaptiveProjectedMixGuidance": {"adaptive_projected_guidance_start_step": 1},
    "TangentialClassifierFreeGuidance": {},
}
"""Those that only combine predictions, each with arguments of its own."""
ONE_CONDITION = ("machine=cpu:4", "mesh={tp: 4}")
"""A mesh for steps with one condition: `dp` splits the conditions."""


def setting(name, **arguments):
    return f"guider={json.dumps({'class': name, **arguments})}"


@pytest.fixture(scope="module")
def encoded(root, tmp_path_factory):
    """A folder with embeddings of both prompts."""
    folder = tmp_path_factory.mktemp("encoded")
    request = Request("hunyuan", "configs/demo.yaml", PROMPT, NEGATIVE, stage="encode", out=folder, overrides=SMALL)
    run(dataclasses.replace(request, paths=(str(root),)))
    return folder


@pytest.fixture(scope="module")
def request_of(root, encoded):
    def made(out, *sets, **fields):
        known = {"seed": SEED, "stage": "denoise", "inputs": encoded, "paths": (str(root),), "backend": "original"}
        return Request("hunyuan", "configs/demo.yaml", out=out, overrides=(*SMALL, *sets), **{**known, **fields})

    return made


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A folder of JAX's cache: all guiders have the same programs."""
    with pytest.MonkeyPatch.context() as context:
        context.setenv("TORCHPORT_CACHE", str(tmp_path_factory.mktemp("programs")))
        yield


@pytest.fixture(scope="module")
def originals(request_of, tmp_path_factory):
    """The latents of the original backend, by guider."""
    kept = {}

    def latents(name, **arguments):
        key = json.dumps([name, arguments])
        if key not in kept:
            folder = tmp_path_factory.mktemp("original")
            run(request_of(folder, setting(name, **arguments)))
            kept[key] = folder
        return kept[key]

    return latents


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ClassifierFreeZeroStarGuidance", GUIDERS["ClassifierFreeZeroStarGuidance"]),
        ("AdaptiveProjectedGuidance", GUIDERS["AdaptiveProjectedGuidance"]),
        ("ClassifierFreeZeroStarGuidance", {"start": 0.25, "stop": 0.75}),
    ],
)
def test_the_original_is_upstreams_pipeline_bit_for_bit(originals, card, name, arguments):
    with hushed(True):
        pipe = HunyuanVideo15Pipeline.from_pretrained(tiny.write(card, HUNYUAN), dtype=torch.float32)
        pipe.set_progress_bar_config(disable=True)
        pipe.guider = getattr(diffusers, name)(guidance_scale=SCALE, **arguments)
        sizes = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": STEPS, "output_type": "latent"}
        generator = torch.Generator().manual_seed(SEED)
        theirs = pipe(prompt=PROMPT, negative_prompt=NEGATIVE, generator=generator, **sizes).frames
    assert torch.equal(latents_of(originals(name, **arguments)), theirs)


@pytest.mark.parametrize("name", GUIDERS)
def test_the_port_agrees_with_the_original(request_of, originals, programs, tmp_path, name):
    arguments = GUIDERS[name]
    run(request_of(tmp_path, setting(name, **arguments), backend="torchax"))
    theirs = latents_of(originals(name, **arguments))
    assert difference(latents_of(tmp_path), theirs) < 1e-4
    plain = latents_of(originals("ClassifierFreeGuidance"))
    assert difference(plain, theirs) > 1e-3  # the guider does something
    rows = json.loads((tmp_path / "denoise.json").read_text())
    assert rows["settings"]["guider"] == {"class": name, **arguments}
    assert len(rows["programs"]) == 1


def test_a_guider_that_skips_steps_has_a_program_for_one_condition(request_of, originals, programs, tmp_path):
    arguments = {"start": 0.25, "stop": 0.75}
    sets = setting("ClassifierFreeZeroStarGuidance", **arguments)
    run(request_of(tmp_path, sets, *ONE_CONDITION, backend="torchax"))
    theirs = latents_of(originals("ClassifierFreeZeroStarGuidance", **arguments))
    assert difference(latents_of(tmp_path), theirs) < 1e-4
    assert len(json.loads((tmp_path / "denoise.json").read_text())["programs"]) == 2


def test_steps_with_one_condition_are_refused_on_a_mesh_that_splits_two(request_of, tmp_path):
    sets = setting("ClassifierFreeZeroStarGuidance", stop=0.5)
    with pytest.raises(MeshError) as caught:
        run(request_of(tmp_path / "out", sets, backend="torchax"))
    assert str(caught.value).endswith(
        ": dp=2 splits the conditions, and 'ClassifierFreeZeroStarGuidance' has 1 in some steps. Choose a mesh without "
        "dp, or no start and stop."
    )
    assert not (tmp_path / "out").exists()


def test_a_run_that_is_stopped_goes_on_with_the_guiders_momentum(request_of, originals, tmp_path, monkeypatch):
    name = "AdaptiveProjectedGuidance"
    request, stops = request_of(tmp_path, setting(name, **GUIDERS[name])), 0
    with monkeypatch.context() as context:
        context.setattr(Stopping, "__init__", lambda self: setattr(self, "cause", True))
        context.setattr(Stopping, "check", lambda *_: None)  # not before the first step
        while stops < STEPS:
            try:
                run(request)
                break
            except StoppedError:
                stops += 1
    assert stops == STEPS - 1
    assert torch.equal(latents_of(tmp_path), latents_of(originals(name, **GUIDERS[name])))


def test_another_guider_is_another_run(request_of, tmp_path, monkeypatch):
    with monkeypatch.context() as context:
        context.setattr(Stopping, "__init__", lambda self: setattr(self, "cause", True))
        context.setattr(Stopping, "check", lambda *_: None)
        with pytest.raises(StoppedError):
            run(request_of(tmp_path, setting("TangentialClassifierFreeGuidance")))
    with pytest.raises(ArtefactForeignError, match=r"A run with guider \{'class': 'Tangential.*and this one has None"):
        run(request_of(tmp_path))


@pytest.mark.parametrize(
    ("sets", "kind", "text"),
    [
        (
            (setting("ClassifierFreeGuidance", guidance_scale=3.0),),
            BadValueError,
            "'guidance_scale' is there twice, in the job and in its guider. Keep the job's.",
        ),
        (
            (setting("ClassifierFreeGuidance"), "guidance_scale=1.0", *ONE_CONDITION),
            BadValueError,
            "'guidance_scale' is 1.0, and a guider needs two predictions. Raise 'guidance_scale', or remove 'guider'.",
        ),
        (("guider={start: 0.5}",), MissingKeyError, "'guider' has no 'class'. Name a class of diffusers.guiders"),
        (("guider={class: 3}",), MissingKeyError, "'guider' has a number for its 'class'. Name a class"),
    ],
)
def test_contradictions_are_refused(request_of, tmp_path, sets, kind, text):
    with pytest.raises(kind) as caught:
        accept(request_of(tmp_path, *sets))
    assert text in str(caught.value)


@pytest.mark.parametrize("backend", ["original", "torchax"])
def test_a_guider_that_is_not_taken_is_refused_before_the_prompts_are_encoded(request_of, tmp_path, backend):
    out = tmp_path / "out"
    reasons = {
        "SkipLayerGuidance": "changes the network's layers between two calls of a step",
        "MagnitudeAwareGuidance": "cannot combine predictions of a video",
    }
    for name, reason in reasons.items():
        with pytest.raises(BadValueError, match=f"'{name}' {reason}"):
            run(request_of(out, setting(name), backend=backend, stage="all", inputs=None, prompt=PROMPT))
        assert not out.exists()


def test_a_model_whose_pipeline_takes_no_guider_says_so(root, tmp_path):
    sets = (setting("ClassifierFreeGuidance"),)
    with pytest.raises(UnknownKeyError) as caught:
        accept(Request("wan", "configs/wan_demo.yaml", PROMPT, out=tmp_path, overrides=sets, paths=(str(root),)))
    assert str(caught.value).endswith(
        ": 'wan' has no guider: its pipeline combines the predictions itself, by 'guidance_scale'. "
        "Remove 'guider', or take a card whose pipeline has one: hunyuan."
    )
