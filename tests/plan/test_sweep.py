"""All strategies on all meshes of a slice, in one table."""

import pytest
from fakes import plans
from fakes.plans import memory

from torchport.config.machine import parse_machine
from torchport.errors import BadValueError, TopologyError
from torchport.plan import sweep
from torchport.plan.figures import JobPlan
from torchport.task import Request

LOSSY = ["cache deepcache computes 5 of 8 steps"]
TINY = ("checkpoint=tiny", "machine=v6e:2x4")
MOVED = {"kind": "all-to-all", "bytes": 100_000_000, "count": 4, "group": 4, "source": None}
MOVED |= {"links": "2x2 square", "ports": 2.0}
BLOCK = {"count": 54, "kernels": [], "other_ms": 20.0, "attention_ms": 50.0, "communication_ms": 1.0}
BLOCK |= {"collectives": [MOVED]}


@pytest.fixture
def outcomes(monkeypatch):
    """Has every choice planned in no time: `outcomes[strategy, mesh]` is its seconds, an error, or None: no room."""
    found, asked = {}, []

    def of_task(task, keep, bounded, stages):
        given = dict(override.split("=", 1) for override in task.request.overrides)
        asked.append((given, keep, bounded))
        outcome = found.get((given["strategy"], given["mesh"]), 9.0)
        if isinstance(outcome, Exception):
            raise outcome
        seconds = dict.fromkeys(
            ("attention_s", "other_s", "products_s", "communication_s", "uncalibrated_s", "model_s"), outcome
        )
        fields = {"step": {**seconds, "floor_s": 1.0, "flops": 1}}
        if outcome is None:
            fields |= {"fits": False, "per_block": None, "per_device": memory(peak_bytes=2**36)}
        else:
            fields |= {"per_block": BLOCK, "per_device": memory(peak_bytes=2**33)}
        job = plans.plan(denoise=plans.stage(**fields))
        return JobPlan.model_validate(
            job | {"fits": outcome is not None, "assumptions": ["nothing overlaps"], "lossy": LOSSY}
        )

    monkeypatch.setattr(sweep, "of_task", of_task)
    found["asked"] = asked
    return found


def swept(*overrides, **given):
    return sweep.sweep(Request("hunyuan", "configs/demo.yaml", overrides=(*TINY, *overrides)), None, count=1, **given)


def refusal(call, kind):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_choices_are_all_strategies_on_all_meshes_of_the_axes_they_use(card):
    found = [(one.strategy, one.mesh_text) for one in sweep.choices(card, parse_machine("v6e:2x4", ""))]
    for strategy, axis in (("tp", "tp"), ("ulysses", "sp")):
        meshes = {mesh for name, mesh in found if name == strategy}
        assert meshes == {f"{axis}=8", f"dp=2 x {axis}=4", f"dp=4 x {axis}=2", "dp=8"}
    assert len(found) == len(set(found))


def test_a_sweep_is_sorted_by_the_modelled_step_and_what_does_not_fit_comes_last(outcomes):
    outcomes |= {("tp", "{dp: 2, tp: 4}"): None, ("ulysses", "{dp: 2, sp: 4}"): 3.0}
    found = swept()
    ranked = [(choice.strategy, choice.mesh_text) for choice, _ in found.planned]
    assert ranked[0] == ("ulysses", "dp=2 x sp=4") and ranked[-1] == ("tp", "dp=2 x tp=4")
    data = sweep.data(found)
    assert data["rows"][0] == {
        "strategy": "ulysses",
        "mesh": {"dp": 2, "sp": 4},
        "fits": True,
        "peak_bytes": 2**33,
        "block_other_ms": 20.0,
        "block_collectives_bytes": 400_000_000,
        "block_attention_ms": 50.0,
        "uncalibrated_s": 3.0,
        "model_s": 3.0,
    }
    assert data["rows"][-1]["fits"] is False and data["rows"][-1]["model_s"] is None
    text = sweep.lines(found)
    assert text[1].split("  ")[0] == "strategy" and text[1].split()[-2:] == ["model", "s"]
    assert text[2].split() == ["ulysses", "dp=2", "x", "sp=4", "yes", "8", "20", "400", "50", "3"]
    assert text[1 + len(found.planned)].split() == ["tp", "dp=2", "x", "tp=4", "NO", "64", "-", "-", "-", "-"]
    assert text[-2:] == [f"lossy: {LOSSY[0]}", "assumed: nothing overlaps"] and data["lossy"] == LOSSY


def test_meshes_that_divide_neither_the_batch_nor_the_heads_are_skipped_with_the_reason(outcomes):
    """The demo's network has 4 heads, and guidance makes two conditions."""
    found = swept()
    told = {(choice.strategy, choice.mesh_text): str(error) for choice, error in found.skipped}
    assert "dp=8 does not divide the batch of guidance_scale 3.0, which is 2" in told["tp", "dp=8"]
    assert "tp=8 does not divide transformer.num_attention_heads, which is 4" in told["tp", "tp=8"]
    planned = {(given["strategy"], given["mesh"]) for given, _, _ in outcomes["asked"]}
    assert not planned & set(told) and ("tp", "{tp: 8}") not in planned
    text = sweep.lines(found)
    assert any(line.startswith("skipped: tp, tp=8: --set mesh={tp: 8}: tp=8 does not divide") for line in text)


def test_a_plan_that_is_refused_is_a_line_and_not_the_end(outcomes):
    outcomes["tp", "{dp: 2, tp: 4}"] = TopologyError("plan v6e:2x4", "The compiler refuses it", "Plan another size")
    found = swept()
    assert ("ulysses", "dp=2 x sp=4") in [(choice.strategy, choice.mesh_text) for choice, _ in found.planned]
    assert "failed: tp, dp=2 x tp=4: plan v6e:2x4: The compiler refuses it. Plan another size." in sweep.lines(found)
    assert sweep.data(found)["failed"][0]["id"] == TopologyError.id


def test_every_plan_keeps_its_dump_apart_and_is_told_of_the_scores(outcomes, tmp_path):
    swept(keep=tmp_path, bounded=False)
    kept = {keep for _, keep, _ in outcomes["asked"]}
    assert len(kept) == len(outcomes["asked"]) and tmp_path / "ulysses-dp=2-sp=4" in kept
    assert not any(bounded for _, _, bounded in outcomes["asked"])


def test_what_is_swept_cannot_be_set_and_the_machine_must_be_a_tpu(outcomes):
    assert refusal(lambda: swept("mesh={tp: 8}"), BadValueError) == (
        "--set mesh={tp: 8}: A sweep takes every strategy and mesh in turn. Leave it out."
    )
    assert refusal(lambda: swept("machine=cpu:8"), BadValueError) == (
        "machine cpu:8: It is no TPU, and a plan is for one. Name a slice with --topology v6e:2x4."
    )
