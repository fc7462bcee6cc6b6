"""A job's plan without a TPU: what the compiler says, what is a model, and what does not fit."""

import dataclasses
import json

import jax
import pytest

from torchport import hlo, outline, patch, plan, topology
from torchport.errors import BadValueError, MeshError, TopologyError
from torchport.task import Request, accept

needs_libtpu = pytest.mark.skipif(
    not topology.installed(),
    reason="libtpu is not installed; pip install 'torchport[plan]' and run `pytest tests/test_plan.py`",
)
SMALL = ("height=64", "width=96", "frames=9", "dtypes={transformer: bfloat16}")
ULYSSES = (*SMALL, "strategy=ulysses", "mesh={dp: 2, sp: 4}")


def request(*overrides, config="configs/demo.yaml"):
    return Request("hunyuan", config, overrides=overrides)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    keep = tmp_path_factory.mktemp("plan")
    return plan.plan(request(*ULYSSES), "v6e:2x4", keep), keep


@needs_libtpu
def test_a_plan_says_what_the_compiler_says(planned):
    found, keep = planned
    stage = found["stages"]["denoise"]
    assert found["fits"] and stage["fits"] and stage["status"] == "ok"
    assert found["stages"]["encode"] == {"status": "not_ported"}
    device = stage["per_device"]
    assert 0 < device["arguments_bytes"] < device["peak_bytes"] < device["hbm_bytes"] == 32 * 2**30
    program = hlo.read(keep / "denoise")
    loop = max((loop for loop in program.loop_bodies() if program.kernels(loop.body)), key=lambda loop: loop.cycles)
    assert stage["per_block"]["count"] == loop.trips == 2
    assert stage["per_block"]["other_ms"] == pytest.approx(1e3 * loop.cycles / 1.755e9)
    assert json.loads(json.dumps(found)) == found


@needs_libtpu
def test_ulysses_moves_tokens_and_heads_and_tp_sums_what_was_split(planned):
    kinds = {one["kind"] for one in planned[0]["stages"]["denoise"]["per_block"]["collectives"]}
    assert "all-to-all" in kinds
    found = plan.plan(request(*SMALL), "v6e:2x4")
    kinds = [one["kind"] for one in found["stages"]["denoise"]["per_block"]["collectives"]]
    assert set(kinds) == {"all-reduce"}


@needs_libtpu
def test_the_model_of_a_step_is_the_sum_of_its_parts_and_above_the_floor(planned):
    stage = planned[0]["stages"]["denoise"]
    step = stage["step"]
    assert step["model_s"] == pytest.approx(step["attention_s"] + step["other_s"] + step["communication_s"])
    assert step["model_s"] > step["floor_s"] > 0
    call = stage["attention"]
    assert call["implementation"] == "splash_transposed" and call["bounded"]
    assert call["queries"] % 256 == 0, "the sequence is whole pieces"
    assert call["flops_per_device"] == 4 * 2 * 4 * call["queries"] ** 2 * 32 // 8


@needs_libtpu
def test_a_plan_reads_as_text(planned):
    text = "\n".join(report.lines(planned[0]))
    assert text.startswith("hunyuan on v6e:2x4, ulysses, dp=2 x sp=4: fits")
    assert "(compiler)" in text and "by the model" in text and "assumed: uncalibrated" in text
    assert "diffusers/models/" in text


@needs_libtpu
def test_unrolled_blocks_have_no_figure_per_block():
    found = plan.plan(request(*ULYSSES, "stacked=false"), "v6e:2x4")
    assert found["stages"]["denoise"]["per_block"] is None
    assert found["stages"]["denoise"]["step"]["model_s"] > 0


def test_what_does_not_fit_is_a_finding(monkeypatch):
    exceeds = {"exceeds": {"asked": 20 * 2**30, "limit": 16 * 2**30}, "flops": 10**15, "trace_s": 1.0, "compile_s": 2.0}
    monkeypatch.setattr(plan, "_compiled", lambda task, keep: (exceeds, None))
    found = plan.plan(request(*ULYSSES), "v5e:2x4")
    assert not found["fits"] and found["stages"]["denoise"]["per_device"]["peak_bytes"] == 20 * 2**30
    text = report.lines(found)
    assert text[0].endswith("DOES NOT FIT") and text[1] == "  bytes per device  20 GiB of 16"


def test_the_compilers_words_for_too_little_memory_become_bytes():
    class Lowered:
        def __init__(self, said):
            self.said = said

        def compile(self):
            raise jax.errors.JaxRuntimeError(self.said)

    said = "RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (17.50G) exceeds available HBM (15.75G)."
    assert outline._sizes(Lowered(said), "v5e:2x4") == {"exceeds": {"asked": 17.5 * 2**30, "limit": 15.75 * 2**30}}
    with pytest.raises(TopologyError) as caught:
        outline._sizes(Lowered("INTERNAL: broken"), "v5e:2x4")
    assert str(caught.value) == "plan v5e:2x4: The compiler refuses it: INTERNAL: broken. Plan another size."


def refusal(kind, call):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_a_machine_that_is_no_tpu_and_a_mesh_that_does_not_fit_are_refused():
    assert refusal(BadValueError, lambda: plan.plan(request(), None)) == (
        "machine cpu:8: It is no TPU, and a plan is for one. Name a slice with --topology v6e:2x4."
    )
    text = refusal(MeshError, lambda: plan.plan(request(), "v6e:4x4"))
    assert "dp=2 x tp=4 takes 8 device(s), and v6e:4x4 has 16" in text


@needs_libtpu
def test_a_refusal_in_the_compilers_process_is_this_process_refusal():
    text = refusal(MeshError, lambda: plan.plan(request(*SMALL, "mesh={dp: 1, tp: 8}"), "v6e:2x4"))
    assert "tp=8 does not divide transformer.num_attention_heads, which is 4" in text
    text = refusal(TopologyError, lambda: plan.plan(request(*SMALL, "mesh={tp: 15}"), "v6e:3x5"))
    assert text.startswith("machine v6e:3x5: libtpu does not know this slice")


def test_a_stage_is_outlined_with_the_inputs_its_verb_makes(pack):
    task = accept(dataclasses.replace(request(*ULYSSES), stage="denoise"))
    [stage] = task.stages
    with patch.applied(task.patches([stage]), stage=stage.name):
        parts = outline._parts(task, stage)
        inputs = outline._inputs(task, stage, parts)
    assert inputs["hidden_states"].shape == (2, 65, 3, 4, 6) and inputs["image_embeds"].shape == (2, 0, 40)
    tokens = 3 * 4 * 6 + inputs["encoder_hidden_states"].shape[1] + inputs["encoder_hidden_states_2"].shape[1]
    assert tokens % 256 == 0
    assert all(parameter.device.type == "meta" for parameter in parts["transformer"].parameters())


def test_a_stage_whose_inputs_are_not_known_is_refused(pack):
    task = accept(dataclasses.replace(request(*SMALL), stage="decode"))
    [stage] = task.stages
    with pytest.raises(BadValueError) as caught, outline.outlined(task, stage, []):
        pass
    assert str(caught.value) == "--stage decode: Its inputs are not known beforehand. Plan the stage 'denoise'."


def test_collectives_take_as_long_as_their_bytes_take_through_two_links():
    assert plan.Exchange("all-to-all", 100_000_000, 2, 4).seconds("v6e") == pytest.approx(2 * 1e8 * 0.75 / 2e11)
    assert plan.Exchange("all-reduce", 100_000_000, 1, 4).seconds("v6e") == pytest.approx(2 * 1e8 * 0.75 / 2e11)
    assert plan.Exchange("reduce-scatter", 25_000_000, 1, 4).seconds("v6e") == pytest.approx(1e8 * 0.75 / 2e11)
