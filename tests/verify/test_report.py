"""A verification in words, as data and as a page."""

import dataclasses
import json
import math

import torch

from torchport.verify import decoder, report
from torchport.verify.report import Cause, Decoded, Drift, Seam, Unit, Verdict, Verification


def unit(depth, added, kind="block", step=0, **more):
    path = "" if kind == "network" else f"blocks.{depth}"
    name = f"transformer.{path}".rstrip(".")
    return Unit(step, 0, "transformer", path, depth, kind, name, 1e-6, added, **more)


def verification(*units, **fields):
    known = {"model": "m", "config": "c.yaml", "dtypes": {"transformer": "float32"}, "strategy": "tp", "total": 8}
    known |= {"yardstick": {"transformer": "float64"}, "mesh": {"dp": 2, "tp": 4}, "steps": (0, 3)}
    return Verification(**known | {"units": units, **fields})


CLEAN = [unit(n, 1e-6 * (1 + n / 10), step=step, inherited=2e-6) for step in (0, 3) for n in range(4)]
FAULTY = verification(
    unit(0, 4e-6, "network"),
    unit(1, 1e-6),
    unit(2, 9e-4, inherited=1e-3, effect=70.0),
    seams=(Seam("sigmas", "denoise", None, "float32 [3]", "float32 [3]", 0.0, 1e-7),),
    causes=(Cause("a.patch", "patches/a.yaml:3", "bitwise", "transformer.blocks.2", 9e-4, 1e-6, "absence", 1e-6),),
    drift=(Drift(1, 1e-5, 2e-5), Drift(2, 3e-5, 4e-5)),
    floor="dp=1,tp=8",
    decoded=Decoded(0.0, 2.0, 1, {"the original": b"png"}),
    unlike=("the encoders", "the loop"),
    programs=("denoise: another dtype",),
    operators={"denoise": "2 operators: 2 same"},
    seconds={"the original": 3.0, "the port": 9.5},
)


def test_the_text_has_twelve_lines_at_most_and_the_verdict_first():
    lines = report.lines(FAULTY)
    assert len(lines) == 12
    assert lines[0] == FAULTY.first_line
    assert lines[0].startswith(
        "another picture: transformer.blocks.2 adds 900 times the rounding at step 0; patch a.patch"
    )
    assert lines[1] == "m c.yaml: float32 beside float64, tp on dp=2,tp=4, step 0, 3 of 8, against original"
    assert lines[4] == "units: 2 blocks: 1 with at most 2 times the rounding, 1 at fault (above 3 times)"
    assert lines[5] == (
        "first: transformer.blocks.2 adds 900 times the rounding, 1e+03 times with the errors before it; alone it "
        "moves the network's output by 70 times the rounding there; the rounding is 1e-06 of the largest value"
    )
    assert lines[6] == (
        "patch: a.patch (patches/a.yaml:3), found by leaving it out: 900 times the rounding with it, 1 times the "
        "rounding without it"
    )
    assert lines[7] == "drift (no verdict): running free, the port is 3e-05 away after step 2, of dp=1,tp=8 4e-05"


def test_the_first_line_of_a_clean_port_says_what_was_compared():
    worst = "no unit adds more than 1.3 times the rounding (transformer.blocks.3, step 0)"
    lines = report.lines(verification(*CLEAN))
    assert lines[0] == f"the same latents (2 of 8 steps compared; the decoder was not: add --decode): {worst}"
    assert len(lines) == 3
    captured = verification(*CLEAN, against="run:reference")
    assert captured.first_line.startswith("the same latents (2 of 8 steps compared; the decoder was not: capture with ")
    decoded = verification(*CLEAN, decoded=Decoded(0.0, 1.0, 1))
    assert decoded.first_line == f"the same picture (2 of 8 steps compared, and the decoder): {worst}"


def test_data_and_page_claim_no_more_than_was_compared():
    clean = verification(*CLEAN)
    for said, one in (("latents", clean), ("picture", dataclasses.replace(clean, decoded=Decoded(0.0, 1.0, 1)))):
        data, page = report.data(one), report.page_of(one)
        assert data["verdict"] == f"the same {said}"
        assert data["first_line"] == one.first_line
        assert f"<title>m: the same {said}</title>" in page
        assert f"<h1>the same {said} (2 of 8 steps compared" in page


def test_a_port_of_which_no_network_was_compared_is_unclear():
    one = verification(steps=())
    assert one.first_line == "unclear: no network was compared; every value of the loop agrees"
    assert one.exit_code == 0


def test_stretches_of_a_forward_and_units_that_are_not_judged_are_counted():
    stretch = unit(1, 1e-6, "forward")
    behind = unit(2, 1e-4, is_behind=True)
    harmless, between = unit(3, 1e-4, effect=0.5), unit(4, 2.5e-6)
    lines = report.lines(verification(unit(0, 9e-4), stretch, behind, harmless, between))
    assert next(line for line in lines if line.startswith("units: ")) == (
        "units: 4 blocks, 1 stretches of forward() between them: 1 with at most 2 times the rounding, 1 with more, "
        "which the output does not show, 1 unclear, 1 at fault (above 3 times), 1 behind the first fault and not judged"
    )


def test_an_error_of_a_value_of_the_loop_is_a_part_of_it():
    cause = Cause("a.patch", "patches/a.yaml:3", "bitwise", "sigmas", 0.25, 0.0, "absence")
    bad = Seam("sigmas", "denoise", None, "a", "b", 0.25, 1e-7)
    lines = report.lines(verification(*CLEAN, seams=(bad,), causes=(cause,)))
    assert (
        "patch: a.patch (patches/a.yaml:3), found by leaving it out: 0.25 of the largest value with it, 0 of the "
        "largest value without it"
    ) in lines
    assert cause.words(math.inf) == "another value"


def test_frames_that_differ_are_reported_with_the_decoders_patches():
    found = verification(unit(1, 1e-7), decoded=Decoded(1.0, 255.0, 3), clue="its patches: one.decode (one.yaml:4)")
    assert found.first_line == (
        "another picture: frame 3 of decode differs by 255 levels of 255; its patches: one.decode (one.yaml:4)"
    )


def test_data_is_json_without_infinity():
    bad = Seam("noise", "denoise", None, "a", "b", math.inf, 0.0)
    data = report.data(dataclasses.replace(FAULTY, seams=(bad,)))
    text = json.dumps(data, allow_nan=False)
    assert json.loads(text)["exit_code"] == 1
    assert data["seams"][0]["distance"] is None
    assert data["seams"][0]["verdict"] == "different"
    assert data["verdict"] == "another picture"
    assert data["units"][2]["ratio"] == 900


def test_the_page_shows_blocks_by_steps_and_error_against_depth():
    page = report.page_of(verification(*CLEAN, unit(0, 1e-6, "network")))
    assert "step 0</th><th>step 3" in page
    assert page.count('class="cell"') == 10
    assert "error against depth" in page
    assert "polyline" in page
    assert "http" not in page.replace("http-equiv", "")


def test_the_page_names_the_patch_and_shows_frames():
    page = report.page_of(FAULTY)
    assert "patches/a.yaml:3" in page
    assert "data:image/png;base64,cG5n" in page


def test_a_difference_of_frames_is_made_visible():
    original = torch.zeros(3, 4, 4, dtype=torch.uint8)
    port = original.clone()
    port[0, 0, 0] = 5
    frames = decoder.frame_pictures(original, port)
    assert list(frames) == ["the original", "the port", "the difference, 51 times"]
    assert all(png.startswith(b"\x89PNG") for png in frames.values())


def test_the_first_line_of_an_unclear_port_names_what_is_unclear():
    one = verification(*CLEAN, unit(5, 4e-5, effect=2.5))
    assert one.verdict is Verdict.UNCLEAR and one.exit_code == 0
    assert one.first_line == (
        "unclear (2 of 8 steps compared; the decoder was not: add --decode): transformer.blocks.5 adds 40 times the "
        "rounding at step 0, and moves the output by 2.5 roundings; up to 2 is rounding, above 3 a fault"
    )


def test_the_first_line_says_what_a_capture_lacks():
    line = verification(*CLEAN, against="run:reference", left_out=12).first_line
    assert line.startswith("the same latents (2 of 8 steps compared, without 12 blocks that the capture lacks; the ")


def test_a_patch_that_reads_what_prepare_has_made_is_not_blamed_alone():
    prepared = dataclasses.replace(FAULTY.causes[0], prepared=True)
    line = dataclasses.replace(FAULTY, causes=(prepared,)).first_line
    assert line.endswith("which promises: bitwise; or the family's `prepare`, which changes this module")
