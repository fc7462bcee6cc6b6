"""The one builder: what `plan` lowers is what `run` lowers, text for text."""

import collections
import dataclasses
import os

import jax
import pytest

from torchport import load, patch
from torchport.compile import network, preflight
from torchport.compile.program import Compiled
from torchport.plan import aot
from torchport.run import run
from torchport.task import Request, accept

HYVIDEO = os.environ.get("TORCHPORT_HYVIDEO")
SIZE = ("height=64", "width=64", "frames=5", "steps=1")
NETWORKS = ("denoise", "decode")
"""The stages that have a network."""


@pytest.fixture
def texts(monkeypatch):
    """Collects the text of every program that a run lowers, by the network's name and the shapes of its inputs."""
    collected = {}
    honest = Compiled.lowered

    def lowered(self, arrays, static):
        program = honest(self, arrays, static)
        collected[key(self, arrays, static)] = program.as_text()
        return program

    monkeypatch.setattr(Compiled, "lowered", lowered)
    return collected


def key(program, arrays, static):
    return program.network.name, tuple(sorted((name, a.shape, str(a.dtype)) for name, a in arrays.items())), static


@pytest.mark.parametrize(
    "model",
    [
        "hunyuan",
        pytest.param(
            "hyvideo",
            marks=[
                pytest.mark.upstream,
                pytest.mark.skipif(not HYVIDEO, reason="needs a checkout: TORCHPORT_HYVIDEO=DIR pytest -m upstream"),
            ],
        ),
    ],
)
@pytest.mark.parametrize("changes", [(), ("dtypes={transformer: bfloat16, vae: float32}", "stacked=false")])
def test_run_and_plan_lower_the_same_programs(model, changes, texts, root, tmp_path):
    config, path = ("configs/hyvideo_demo.yaml", HYVIDEO) if model == "hyvideo" else ("configs/demo.yaml", None)
    request = Request(
        model, str(root / config), prompt="A cat", out=tmp_path, overrides=(*SIZE, *changes), upstream_path=path
    )
    run(request)
    ran = dict(texts)
    assert {name for name, *_ in ran} == {"transformer", "vae"}
    texts.clear()
    for name in NETWORKS:
        task = accept(dataclasses.replace(request, stage=name, prompt=None))
        [stage] = task.stages
        with aot.outlined(task, stage, jax.devices()) as outline:
            for called in outline.called:
                outline.program.lowered(outline.program.shapes(called.tensors), called.static)
    assert texts.keys() == ran.keys()
    assert [name for name, text in texts.items() if text != ran[name]] == []


@pytest.mark.parametrize("stage", NETWORKS)
def test_the_checks_before_a_run_build_each_network_once_as_shapes(stage, request_for, monkeypatch, tmp_path):
    task = accept(request_for(backend="torchax", stage=stage, prompt=None, inputs=tmp_path))
    built = collections.Counter()
    honest = load.published

    def counted(class_path, *rest):
        built[class_path] += 1
        return honest(class_path, *rest)

    monkeypatch.setattr(load, "published", counted)
    with patch.applied(task.patches(task.stages)):
        preflight.check(task)
    assert built == {task.card.components[name].class_: 1 for name in ("transformer", "vae")[stage == "decode" :]}


def test_the_network_of_shapes_belongs_to_who_took_it(request_for):
    task = accept(request_for(backend="torchax", stage="decode", prompt=None))
    with patch.applied(task.patches(task.stages)):
        first, second = (network.as_shapes(task, task.stages[0])["vae"] for _ in range(2))
    assert first is not second
