"""A plan's figures, and the page that documents them."""

import plan_table
import pytest
from fakes import plans

from torchport.errors import BadValueError
from torchport.plan.figures import JobPlan, KernelAttention, StepTime


def test_the_page_has_the_schema_that_the_figures_have(root):
    page = (root / "docs" / "plan.md").read_text(encoding="utf-8")
    assert page == plan_table.with_table(page), "Run `python tools/plan_table.py docs/plan.md`"


def test_every_figure_that_json_has_is_in_the_schema_with_its_meaning():
    rows = dict(line.split(" | ", 1) for line in plan_table.table().splitlines()[2:])
    for path in (".per_block.collectives[].bytes", ".step.model_s", ".programs[].inputs", ".attention.ms", "mesh"):
        assert f"| `{path}`" in rows
    assert rows["| `.programs[].inputs`"].startswith("object of lists of integers | ")
    assert rows["| `.step.model_s`"].startswith("number or null | seconds")


def test_attention_of_a_kernel_has_a_time_and_any_other_has_none():
    job = JobPlan.model_validate(plans.plan(denoise=plans.stage()))
    assert isinstance(job.stage("denoise").attention, KernelAttention)
    rates = {"steady_percent": None, "peak_percent": None}
    plain = {key: value for key, value in plans.attention(**rates).items() if key not in ("row_tokens", "ms")}
    job = JobPlan.model_validate(plans.plan(denoise=plans.stage(attention=plain)))
    assert job.stage("denoise").model_dump(mode="json")["attention"] == plain


def test_a_time_that_is_not_known_has_no_parts():
    unknown = dict.fromkeys(("attention_s", "other_s", "products_s", "communication_s", "uncalibrated_s", "model_s"))
    assert StepTime(**unknown, floor_s=1.0, flops=1).known is None


def test_a_stage_that_was_not_compiled_has_no_figures():
    job = JobPlan.model_validate(plans.plan())
    with pytest.raises(BadValueError) as caught:
        job.stage("encode")
    assert str(caught.value) == "stage encode: It was not compiled. It runs on the host."
