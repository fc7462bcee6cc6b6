"""A run with a step cache: what it says of itself, and what it refuses. The arithmetic: tests/compile."""

import dataclasses
import json
import logging

import pytest
import torch
import yaml
from fakes.artefacts import difference, latents_of

from torchport.errors import ArtefactForeignError, BadValueError, StoppedError
from torchport.processes.stopping import Stopping
from torchport.run import run
from torchport.task import Request, accept

SMALL = ("height=32", "width=48", "frames=9", "steps=6", "save_every=1")
CACHE = "cache={kind: deepcache, start: 2, end: 6, every: 2, of: 6}"


@pytest.fixture(scope="module")
def request_(root):
    return Request("cogvideox", "configs/cogvideox_demo.yaml", "A cat", overrides=SMALL, paths=(str(root),))


def denoised(request, folder, *overrides, inputs=None):
    """Encodes and denoises; returns the folder."""
    changed = dataclasses.replace(request, out=folder, overrides=(*request.overrides, *overrides))
    if inputs is None:
        run(dataclasses.replace(changed, stage="encode"))
    run(dataclasses.replace(changed, stage="denoise", prompt=None, inputs=inputs or folder))
    return folder


@pytest.fixture(scope="module")
def plain(request_, tmp_path_factory):
    return denoised(request_, tmp_path_factory.mktemp("plain"), "cache={kind: calibrate}")


@pytest.fixture(scope="module")
def cached(request_, plain, tmp_path_factory):
    return denoised(request_, tmp_path_factory.mktemp("cached"), CACHE, inputs=plain)


def test_a_cached_run_is_near_and_says_that_it_is_lossy(plain, cached):
    assert 1e-4 < difference(latents_of(cached), latents_of(plain)) < 0.5
    manifest = json.loads((cached / "manifest.json").read_text())
    assert manifest["stages"]["denoise"]["cache"] == {"kind": "deepcache", "steps": 6, "computed": [0, 1, 2, 4]}
    assert {
        "id": "cache deepcache", "stage": "denoise", "equivalence": {"lossy": "computes 4 of 6 steps"}
    } in manifest["deviations"]  # fmt: skip


def test_calibration_writes_a_curve_that_a_job_takes(request_, plain):
    text = yaml.safe_load((plain / "magcache.yaml").read_text())
    assert text["cache"]["kind"] == "magcache" and text["cache"]["curve"][0] == 1 and len(text["cache"]["curve"]) == 6
    overrides = (*request_.overrides, f"cache={json.dumps(text['cache'])}")
    assert accept(dataclasses.replace(request_, overrides=overrides)).job.cache.curve == text["cache"]["curve"]


def test_a_stopped_run_goes_on_to_the_same_bits_and_refuses_another_cache(
    request_, plain, cached, tmp_path, monkeypatch, caplog
):
    asked = iter([False, False, False, True])
    monkeypatch.setattr(Stopping, "is_requested", lambda self: next(asked, False))
    with pytest.raises(StoppedError):
        denoised(request_, tmp_path, CACHE, inputs=plain)
    with pytest.raises(ArtefactForeignError) as caught:
        denoised(request_, tmp_path, "cache={kind: schedule, full: [0, 2]}", inputs=plain)
    assert "A run with cache {" in str(caught.value) and "'kind': 'deepcache'" in str(caught.value)
    with caplog.at_level(logging.INFO):
        denoised(request_, tmp_path, CACHE, inputs=plain)
    assert "resume after step 3 of 6" in caplog.text
    assert "denoise: cache deepcache (lossy) computes 4 of 6 steps: 0-2, 4" in caplog.text
    assert torch.equal(latents_of(tmp_path), latents_of(cached))


@pytest.mark.parametrize(
    ("overrides", "backend", "text"),
    [
        ((CACHE, "stacked=false"), "torchax", "It reuses what stacked blocks compute, and 'stacked' is false."),
        ((CACHE,), "original", "The original computes every step. Leave it out, or --backend original."),
        (
            ("cache={kind: schedule, full: [0, 6]}",),
            "torchax",
            "'full' has the steps 0 to 6, and the job has 6, from 0.",
        ),
    ],
)
def test_a_cache_that_cannot_be_is_refused_before_anything_is_loaded(request_, tmp_path, overrides, backend, text):
    changed = dataclasses.replace(
        request_, out=tmp_path / "out", backend=backend, overrides=(*request_.overrides, *overrides)
    )
    with pytest.raises(BadValueError) as caught:
        run(changed)
    assert text in str(caught.value) and str(caught.value).startswith("--set cache")
    assert not (tmp_path / "out" / "encode.safetensors").exists()
