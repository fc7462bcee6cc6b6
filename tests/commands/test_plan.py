"""The flags of `torchport plan`: which go together, and what each leads to."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from torchport.__main__ import cli
from torchport.commands import plan as command
from torchport.commands.plan import PlanFlags
from torchport.errors import BadValueError
from torchport.plan import plan_report, planning, sweep
from torchport.task import Request

JOB = {"model": "hunyuan", "config": "configs/720p.yaml"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"sweep": True, "strategy": "tp"},
            "--strategy tp: A sweep takes every strategy. Leave out one of the two.",
        ),
        (
            {"sweep": True, "stage": "all"},
            "torchport plan --sweep: --stage is given, and a sweep is a table of denoising steps. Leave it out.",
        ),
        ({"jobs": 2}, "--jobs 2: There is one plan to make. Add --sweep, or leave it out."),
    ],
)
def test_flags_that_do_not_go_together_are_refused(given, said):
    with pytest.raises(BadValueError) as caught:
        command.answer(Request(**JOB), PlanFlags(**given), "torchport plan")
    assert str(caught.value) == said


def test_each_flag_reaches_what_it_is_for(monkeypatch):
    calls = []

    def stand_in(name):
        def call(*args, **given):
            calls.append((name, (*args, *given.values())))
            return SimpleNamespace(what=name, fits=True, model_dump=lambda mode: {"what": name})

        return call

    for module, function in ((planning, "plan"), (sweep, "sweep")):
        monkeypatch.setattr(module, function, stand_in(function))
    for module in (plan_report, sweep):
        monkeypatch.setattr(module, "lines", lambda found: [found.what])
    monkeypatch.setattr(sweep, "data", lambda found: found.model_dump("json"))

    def run(*arguments):
        calls.clear()
        done = CliRunner().invoke(cli, ["plan", *arguments], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output.strip()

    job = ["--model", "hunyuan", "--config", "configs/720p.yaml"]
    assert run(*job, "--strategy", "tp", "--topology", "v5e:2x4", "--scores", "any") == "plan"
    [(_, (request, topology, keep, bounded, stages))] = calls
    assert stages == (), "those that denoise"
    assert request.execution.xla_flags is None
    assert request.overrides == ("strategy=tp",) and (topology, keep, bounded) == ("v5e:2x4", None, False)
    assert run(*job, "--sweep", "--jobs", "3", "--keep", "kept") == "sweep"
    [(_, (request, topology, keep, bounded, jobs))] = calls
    assert (topology, keep, bounded, jobs) == (None, Path("kept"), True, 3)
    run(*job, "--xla-flags", "less-memory")
    assert calls[0][1][0].execution.xla_flags == "less-memory"
    assert run(*job, "--sweep", "--json") == '{\n  "what": "sweep"\n}'


@pytest.mark.parametrize(
    ("words", "job"),
    [
        (["plan"], "configs/diffusers:XPipeline.yaml"),
        (["plan", "--set", "checkpoint=tiny"], "configs/diffusers:XPipeline_demo.yaml"),
        (["plan", "--set", "checkpoint=a/b@main", "--config", "mine.yaml"], "mine.yaml"),
        (["run", "--checkpoint", "a/b@main"], "configs/diffusers:XPipeline.yaml"),
        (["run", "--set", "checkpoint=./folder"], "configs/diffusers:XPipeline.yaml"),
        (["run", "--checkpoint", "tiny:random"], "configs/diffusers:XPipeline_demo.yaml"),
        (["run"], "configs/diffusers:XPipeline_demo.yaml"),
        (["run", "--set", "checkpoint"], "configs/diffusers:XPipeline_demo.yaml"),
        (["plan", "--set", "checkpoint"], "configs/diffusers:XPipeline.yaml"),
        (["verify", "--checkpoint", "a/b@main"], "configs/diffusers:XPipeline_demo.yaml"),
    ],
)
def test_a_pipelines_job_is_that_of_its_published_weights_or_of_its_demo(words, job, monkeypatch):
    monkeypatch.setattr("torchport.porting.derive.ensure", lambda model: None)
    name, *flags = words
    command = importlib.import_module(f"torchport.commands.{name}").command
    assert command.make_context(name, ["--model", "diffusers:XPipeline", *flags]).params["config"] == job
