"""A plan in words and as a page: numbers are the plan's, hostile text stays text, nothing is fetched."""

import html.parser
import json
import re

import pytest
from fakes import plans
from fakes.plans import GIB, memory, stage

from torchport.errors import OutputError
from torchport.files import folder
from torchport.plan import plan_report
from torchport.plan.figures import JobPlan, VerificationCost

VOID = {"meta", "rect"}
HOSTILE = "<script>alert('x')</script>&\"quoted\""


def plan(**stages):
    """The figures of a plan of these stages."""
    return JobPlan.model_validate(plans.plan(**stages))


class Page(html.parser.HTMLParser):
    """Reads a page, and fails on a tag that is not closed where it should be."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID or tag == "rect":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def rects(self, figure):
        """The segments of a picture, each with its kind, x and width."""
        starts = [n for n, (tag, _) in enumerate(self.tags) if tag == "svg"]
        found = []
        for tag, attributes in self.tags[starts[figure] + 1 :]:
            if tag not in ("rect", "title"):
                break
            if tag == "rect":
                found.append((attributes["class"], float(attributes["x"]), float(attributes["width"])))
        return found


def test_a_page_is_well_formed_and_fetches_nothing():
    text = plan_report.page_of(plan(denoise=stage(), decode=stage(per_block=None, steps=1)), "torchport plan")
    page = Page(text)
    assert not re.search(r"https?:|//|@import|url\(|<script|<link|<img", text)
    assert {"svg", "table", "figure", "h2"} <= {tag for tag, _ in page.tags}
    assert "not one was measured" not in page.text and "none was measured" in page.text


def test_the_numbers_of_a_page_are_the_plans():
    text = Page(plan_report.page_of(plan(), "torchport plan --model m")).text
    for shown in (
        "dp=2 x sp=4",
        "4.75 s",
        "2.5 s",
        "55.5 ms",
        "4.5 ms",
        "123,456,789",
        "19.0 GiB of 32.0 GiB",
        "16.0 GiB",
        "60.5",
        "0.10.2",
    ):
        assert shown in text, shown
    assert "One of 54 blocks, modelled: 80 ms, before any factor" in text and "Made by torchport plan --model m" in text
    assert "uncalibrated" in text and "2 call(s) of kernels outside the blocks" in text


def test_a_bar_is_divided_as_the_time_is():
    page = Page(plan_report.page_of(plan(), ""))
    kinds, starts, widths = zip(*page.rects(0), strict=True)
    assert kinds == ("attention", "rest", "communication", "floor")
    assert widths == pytest.approx([1000 * part / 4.75 for part in (3.0, 1.5, 0.25, 2.5)], abs=0.01)
    assert starts == pytest.approx([0, 631.58, 947.37, 0], abs=0.01)
    kinds, _, widths = zip(*page.rects(1), strict=True)
    # Two operations of one line are one part; what is left of the other 20 ms comes after them.
    assert kinds == ("attention", "operation", "operation", "rest", "communication")
    assert widths == pytest.approx([1000 * part / 80 for part in (55.5, 8.0, 2.0, 10.0, 4.5)], abs=0.01)
    kinds, _, widths = zip(*page.rects(2), strict=True)
    assert kinds == ("arguments", "temporaries", "rest", "free")
    assert widths == pytest.approx([1000 * part / 32 for part in (16, 2, 1, 13)], abs=0.01)


def calibrated(**more):
    """A stage whose step's other parts, 1.5 s without products, were divided by 1.25."""
    one = stage(**more)
    return one | {"step": one["step"] | {"model_s": 3.25 + 1.5 / 1.25}}


def test_a_calibrated_step_has_attention_and_products_as_they_are_and_all_else_divided():
    [line] = [line for line in plan_report.lines(plan(denoise=calibrated())) if "by the model" in line]
    assert line == (
        "  per step  4.45 s by the model (attention 3, other 1.5, of it 0.25 for products at peak, communication 0.25; "
        "the last two make 1.45, as all of them but the products is divided by 1.25); "
        "the arithmetic alone at peak takes 2.5 s"
    )
    [line] = [line for line in plan_report.lines(plan()) if "by the model" in line]
    assert "of it 0.25 for products at peak, communication 0.25); the" in line, "nothing was divided"
    page = Page(plan_report.page_of(plan(denoise=calibrated()), ""))
    assert "One step, modelled, all but attention and products divided by 1.25: 4.45 s; below it" in page.text
    widths = [width for *_, width in page.rects(0)]
    assert widths == pytest.approx([1000 * part / 4.45 for part in (3.0, 1.25, 0.2, 2.5)], abs=0.01)
    whole = Page(plan_report.page_of(plan(decode=calibrated(per_block=None, steps=1)), ""))
    widths = [width for *_, width in whole.rects(0)]
    share = 1.25 / 1.5  # of other operations, with the products
    divided = (3.0, 0.008 * share, 0.002 * share, 1.49 * share, 0.2, 2.5)
    assert widths == pytest.approx([1000 * part / 4.45 for part in divided], abs=0.01)
    assert sum(widths[:-1]) == pytest.approx(1000, abs=0.05)


def test_a_calibrated_step_without_anything_but_attention_was_not_divided():
    alone = {"other_s": 0.0, "products_s": 0.0, "communication_s": 0.0, "uncalibrated_s": 3.0, "model_s": 3.0}
    one = stage()
    found = plan(denoise=one | {"step": one["step"] | alone})
    assert "(attention 3, other 0, of it 0 for products at peak, communication 0); the" in "\n".join(
        plan_report.lines(found)
    )
    assert "One step, modelled: 3 s" in Page(plan_report.page_of(found, "")).text


def test_without_blocks_the_whole_stage_is_divided_by_operation():
    page = Page(plan_report.page_of(plan(decode=stage(per_block=None, steps=1)), ""))
    assert [kind for kind, *_ in page.rects(0)] == [
        "attention",
        "operation",
        "operation",
        "rest",
        "communication",
        "floor",
    ]
    assert "The whole stage, modelled: 4.75 s" in page.text and "Collectives of the stage" in page.text


def test_hostile_text_stays_text():
    hostile = plans.plan()
    hostile["model"] = hostile["assumptions"][0] = HOSTILE
    hostile["versions"] = {HOSTILE: HOSTILE}
    one = hostile["stages"]["denoise"]
    one["largest"][0]["source"] = one["per_block"]["collectives"][0]["source"] = HOSTILE
    one["not_modelled"] = [HOSTILE]
    hostile["stages"]["encode"]["why"] = HOSTILE
    page = Page(plan_report.page_of(JobPlan.model_validate(hostile), HOSTILE))
    assert "script" not in {tag for tag, _ in page.tags}
    assert page.text.count(HOSTILE) >= 8


def test_a_stage_that_does_not_fit_says_so_and_has_no_time():
    unknown = dict.fromkeys(
        ("attention_s", "other_s", "products_s", "communication_s", "uncalibrated_s", "model_s")
    ) | {
        "floor_s": 2.5,
        "flops": 1,
    }
    device = memory(arguments_bytes=None, temporaries_bytes=None, peak_bytes=40 * GIB, constants_bytes=None)
    finding = {
        "what": "vmem",
        "kernel": "splash_transposed",
        "tile": "4096/2048/512",
        "asked_bytes": 130_000_000,
        "limit_bytes": 125_829_120,
        "fact": "It takes much",
    }
    found = stage(
        fits=False, step=unknown, per_device=device, per_block=None, per_step=None, largest=[], findings=[finding]
    )
    unfit = plan(denoise=found).model_copy(update={"fits": False})
    page = Page(plan_report.page_of(unfit, ""))
    said = "VMEM splash_transposed 4096/2048/512: 130,000,000 bytes, limit 125,829,120. It takes much"
    assert f"Does not fit: {said}" in page.text and "does not fit" in page.text
    assert [kind for kind, *_ in page.rects(0)] == ["rest", "free"]
    assert f"  DOES NOT FIT: {said}" in plan_report.lines(unfit)


def test_a_page_is_written_and_replaces_an_older_one(tmp_path):
    file = tmp_path / "plan.html"
    file.write_text("old")
    folder.check_writable("--report", file)
    plan_report.write(file, plan(), "torchport plan")
    assert file.read_text().startswith("<!DOCTYPE html>") and [file] == list(tmp_path.iterdir())


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_compiled(tmp_path, torchport, capsys, root):
    for file in (tmp_path, tmp_path / "none" / "plan.html"):
        with pytest.raises(OutputError) as caught:
            folder.check_writable("--report", file)
        assert str(caught.value) == (
            f"--report {file}: It is no file, or lies in no folder. Name a file in a folder that is there."
        )
    arguments = ("--model", "hunyuan", "--config", "configs/720p.yaml", "--path", root, "--report", tmp_path)
    code, out, err = torchport("plan", *arguments, capsys=capsys)
    assert (code, out) == (2, []) and err == [f"error[TP604] {caught_text(tmp_path)}"]


def caught_text(file):
    return f"--report {file}: It is no file, or lies in no folder. Name a file in a folder that is there."


def test_a_plan_can_be_read_again_from_its_json():
    written = json.loads(json.dumps(plan().model_dump(mode="json")))
    assert written == plans.plan() and JobPlan.model_validate(written) == plan()


def test_a_plan_of_two_networks_says_whether_both_would_fit_at_once():
    def at_once(**changes):
        both = plan(denoise_first=stage(per_device=memory(**changes)), denoise=stage())
        return [line for line in plan_report.lines(both) if "take turns" in line]

    turns = "two networks take turns, one is on the devices at a time; both would"
    assert at_once() == [f"{turns} not fit at once: 35.0 GiB of 32.0 GiB"]
    assert at_once(arguments_bytes=2 * GIB, peak_bytes=12 * GIB) == [f"{turns} fit at once: 28.0 GiB of 32.0 GiB"]
    assert at_once(arguments_bytes=None) == []
    assert plan(denoise=stage()).at_once_bytes is None


def test_a_plan_states_what_a_verification_takes():
    cost = VerificationCost(
        host_bytes=72 * GIB, values_bytes=24 * GIB, device_bytes=16 * GIB, flops=5.6e16, host_s=56000.0
    )
    job = plan(denoise=stage()).model_copy(update={"verification": cost})
    [line] = [line for line in plan_report.lines(job) if line.startswith("verify: ")]
    assert line == (
        "verify: a step takes about 72.0 GiB on the host, 24.0 GiB of them in TMPDIR, too, and weights of 16.0 GiB "
        "on one device; 5.6e+16 FLOP on the host, 5.6e+04 s at 1 TFLOP/s"
    )


def test_a_decode_is_read_as_one():
    lines = plan_report.lines(plan(decode=stage(per_block=None, steps=1)))
    assert [line[:12] for line in lines if " a decode" in line] == ["  a decode  ", "  a decode  "]
