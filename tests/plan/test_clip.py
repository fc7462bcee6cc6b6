"""The seconds of a clip: its parts add up, each says what limits it, and the host's memory is part of "it fits"."""

import contextlib
import html

import pytest
from fakes import plans

from torchport.plan import plan_report, planning
from torchport.plan.figures import ClipPart, JobPlan, StagePlan
from torchport.task import Request, accept

SIZES = ("machine=v6e:2x4", "encode=host", "price_per_chip_hour=2.7", "checkpoint=somebody/hunyuan@main")


def task_of(*overrides):
    return accept(Request("hunyuan", "configs/720p.yaml", overrides=(*SIZES, *overrides)), dry=True)


def planned(**changes):
    whole = {"denoise": plans.stage(), "decode": plans.stage(per_block=None, steps=1)} | changes
    return {name: StagePlan.model_validate(stage) for name, stage in whole.items()}


@pytest.fixture(scope="module")
def found():
    return planning.clip_of_plans(task_of(), planned())


def test_the_parts_are_in_their_order_and_add_up(found):
    assert [part.part for part in found.parts] == ["load", "compile", "encode", "denoise", "decode", "write"]
    assert [part.part for part in found.parts if part.once] == ["load", "compile"]
    seconds = {part.part: part.seconds for part in found.parts}
    assert seconds["denoise"] == 50 * 4.75 and seconds["decode"] == 4.75 and seconds["compile"] == 2 * 61.5
    assert seconds["write"] == pytest.approx(3 * 121 * 720 * 1280 / 1e9)
    assert found.first_s == pytest.approx(sum(seconds.values()))
    assert found.next_s == pytest.approx(found.first_s - seconds["load"] - seconds["compile"])
    assert found.times_real_time == pytest.approx(found.next_s / (121 / 24))
    assert found.chip_s == pytest.approx(8 * found.next_s)
    assert found.dollars == pytest.approx(found.chip_s * 2.7 / 3600)


def test_weights_are_those_of_all_components_and_encoders_take_two_operations_for_each_parameter_and_token(found):
    parts = {part.part: part for part in found.parts}
    parameters = {"bfloat16": 7_070_619_136 + 8_326_608_160, "float32": 219_314_944 + 1_260_634_115}
    assert parts["load"].seconds == pytest.approx((2 * parameters["bfloat16"] + 4 * parameters["float32"]) / 1e9)
    # Both conditions: 1,000 tokens of the first encoder, and 256 of the second, which is small.
    assert parts["encode"].seconds == pytest.approx(2 * 2 * (7_070_619_136 * 1000 + 219_314_944 * 256) / 1e12, rel=0.3)
    assert "attention" in parts["denoise"].limit and "50 steps of 4.75 s" in parts["denoise"].limit


def test_what_is_slower_limits_the_writing(monkeypatch):
    def written():
        return planning.clip_of_plans(task_of(), planned()).parts[-1]

    pixels = 121 * 720 * 1280
    assert "of frames are written to the disk" in written().limit
    monkeypatch.setattr(planning, "DISK", 1e10)
    assert written().seconds == pytest.approx(pixels / (22 * planning.ENCODED))  # 720 rows
    assert written().limit == "112 Mpixel of video are encoded on 22 threads"


def test_on_the_devices_the_encoders_are_a_part_that_is_planned():
    task = task_of("encode=devices")
    assert planning.clip_of_plans(task, planned()) is None
    whole = planning.clip_of_plans(task, planned(encode=plans.stage(per_block=None, steps=1)))
    assert [part.part for part in whole.parts] == ["load", "compile", "encode", "denoise", "decode", "write"]
    assert [part.seconds for part in whole.parts if part.part == "encode"] == [4.75]


def test_without_guidance_one_prompt_is_encoded(found):
    one = planning.clip_of_plans(task_of("guidance_scale=1.0", "mesh={sp: 8}"), planned())
    [both], [single] = ([p.seconds for p in each.parts if p.part == "encode"] for each in (found, one))
    assert both == pytest.approx(2 * single)


def test_a_clip_is_of_all_stages_and_has_no_price_of_ours():
    assert planning.clip_of_plans(task_of(), {"denoise": planned()["denoise"]}) is None
    unfit = plans.stage(step=plans.stage()["step"] | {"model_s": None})
    assert planning.clip_of_plans(task_of(), planned(decode=unfit)) is None
    assert planning.clip_of_plans(task_of("price_per_chip_hour=null"), planned()).dollars is None


def test_a_job_that_the_host_has_no_memory_for_does_not_fit():
    small = planning.clip_of_plans(task_of("machine=v6e:1x1", "mesh={}", "dtypes={text_encoder: float32}"), planned())
    assert small.host_memory_bytes == 176 * 10**9 and small.host_bytes >= 4 * 7_070_619_136 and small.fits_host
    large = planning.clip_of_plans(
        task_of("machine=v6e:1x1", "mesh={}", "height=2160", "width=3840", "frames=1001"), planned()
    )
    assert large.host_bytes > large.host_memory_bytes and not large.fits_host


def test_the_memory_of_a_host_that_is_not_known_refuses_nothing():
    unknown = planning.clip_of_plans(task_of("machine=v5e:2x4"), planned())
    assert unknown.host_memory_bytes is None and unknown.fits_host
    job = JobPlan.model_validate(plans.plan() | {"clip": unknown.model_dump()})
    assert "GiB of a size that is not known" in "\n".join(plan_report.lines(job))


def test_lines_and_page_have_each_part_with_its_limit(found):
    job = JobPlan.model_validate(plans.plan() | {"clip": found.model_dump()})
    text = "\n".join(plan_report.lines(job))
    assert f"a clip: {found.first_s:.3g} s for the first, {found.next_s:.3g} s for each after it" in text
    assert "US dollars" in text and "the first alone" in text and "the host's memory: " in text
    page = plan_report.page_of(job, "torchport plan")
    for part in found.parts:
        assert part.limit in text
        assert (html.escape(part.limit, quote=False) in page.replace("&#39;", "'")) is not part.once


def test_upstreams_modules_are_built_with_the_patches_in_force(monkeypatch):
    """A network whose number of parameters the card does not say is built, and its module may need a stub."""
    inside = []

    @contextlib.contextmanager
    def noted(task, stages):
        inside.append(stages)
        yield
        inside.pop()

    monkeypatch.setattr(planning, "in_force", noted)
    encoding = ClipPart(part="encode", once=False, seconds=0.0, limit="nothing")
    monkeypatch.setattr(planning, "_encode_part", lambda task: encoding)
    monkeypatch.setattr(planning.network, "parameters", lambda task, component: {1: 10**9}[len(inside)])
    assert planning.clip_of_plans(task_of(), planned()).host_bytes > 0
