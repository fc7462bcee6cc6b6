"""A run with a step cache: what it says of itself, and what it refuses. The arithmetic: tests/compile."""

import dataclasses
import json
import logging

import pytest
import torch
import yaml
from fakes.artefacts import difference, latents_of

from torchport.config.step_cache import DeepCache
from torchport.errors import ArtefactForeignError, BadValueError, StoppedError
from torchport.processes.stopping import Stopping
from torchport.run.path import run
from torchport.task import Request, accept, check_step_cache

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
        (
            (CACHE, "stacked=false"),
            "torchax",
            "and 'stacked' is false. Remove one of the two: --set cache=null, or --set stacked=true.",
        ),
        (
            (CACHE,),
            "original",
            "'cache' is for compiled programs, and --backend original computes every step in PyTorch. Remove it, --set",
        ),
        (
            ("cache={kind: schedule, full: [0, 6]}",),
            "torchax",
            "'cache.full' names step 6, and the job has 6, counted from 0. Name steps from 0 to 5, or take more: ",
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


def test_the_line_of_the_field_at_fault_is_named(request_, tmp_path, root):
    job = tmp_path / "job.yaml"
    text = (root / "configs" / "cogvideox_demo.yaml").read_text()
    job.write_text(f"{text}cache:\n  kind: deepcache\n  start: 8\n  end: 7\n")
    with pytest.raises(BadValueError) as caught:
        accept(dataclasses.replace(request_, config=str(job), overrides=()))
    start = 1 + text.count("\n") + 2
    assert str(caught.value) == (
        f"{job}:{start}: 'cache.start' is 8, 'cache.end' is 7, 'cache.of' is 50 by default. "
        "Write all three in this order: start < end <= of."
    )
    with pytest.raises(BadValueError) as caught:
        accept(dataclasses.replace(request_, config=str(job), overrides=("cache.end=6",)))
    assert str(caught.value).startswith("--set cache.end=6: 'cache.start' is 8, 'cache.end' is 6,")


def test_a_card_without_stacks_is_refused_before_anything_is_loaded(request_):
    task = accept(request_)
    job, card = task.job.model_copy(update={"cache": DeepCache(kind="deepcache")}), task.card
    with pytest.raises(BadValueError) as caught:
        check_step_cache(card.model_copy(update={"stacks": {}}), job, task.stages, False, task.job_document)
    assert str(caught.value).endswith(
        ": A step cache reuses what stacked blocks compute, and the card 'cogvideox' names none of 'transformer'. "
        "Name them in the card's 'stacks' (docs/cards.md), or --set cache=null."
    )
    stages = [dataclasses.replace(stage, outputs=("output", "memory")) for stage in task.denoising]
    with pytest.raises(BadValueError) as caught:
        check_step_cache(card, job, stages, False, task.job_document)
    assert "'transformer' returns output, memory, and a step cache is for one output." in str(caught.value)


def test_a_run_without_steps_reads_no_cache(request_):
    sets = (*request_.overrides, CACHE)
    accept(dataclasses.replace(request_, overrides=sets, stage="encode", backend="original"))
