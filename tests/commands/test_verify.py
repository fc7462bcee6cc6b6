"""`torchport verify`: what its flags refuse before anything runs."""

from pathlib import Path

import pytest

from torchport.commands.verify import VerifyFlags, answer, findings_of, write_report
from torchport.errors import BadValueError, OutputError, TorchportError
from torchport.processes import child
from torchport.task import Request
from torchport.verify import verification
from torchport.verify.report import Cause, Unit, Verification


def refusal(root, **flags):
    request = Request("cogvideox", "configs/cogvideox_demo.yaml", paths=(str(root),))
    with pytest.raises(BadValueError) as caught:
        answer(request, VerifyFlags(**flags))
    return str(caught.value)


@pytest.mark.parametrize("text", ["", "one", "1,", "-1", "9" * 5000])
def test_steps_are_numbers_with_commas(root, text):
    assert refusal(root, steps=text) == (
        f"--steps {text}: It is no list of steps. Write the numbers of steps, from 0: 0,1,25."
    )


def test_a_step_is_one_that_the_job_takes(root):
    expected = "--steps 8: The job takes 8 steps, which are 0 to 7. Name some of these."
    assert refusal(root, steps="0,8") == expected


@pytest.mark.parametrize("text", ["originals", "run:", "run"])
def test_a_port_is_compared_with_the_original_or_with_a_capture(root, text):
    expected = f"--against {text}: It names neither. Write original, or run:DIR of a --capture DIR."
    assert refusal(root, against=text) == expected


@pytest.mark.parametrize("mesh", ["8", "dp=0,tp=4", "dp=1,dp=2", "dp=1;tp=4"])
def test_a_floor_is_a_mesh(root, mesh):
    expected = f"--floor {mesh}: It is no mesh. Write the size of each axis once: dp=1,tp=4."
    assert refusal(root, floor=mesh) == expected


@pytest.mark.parametrize(("mesh", "fact"), [("foo=4", "foo"), ("dp=64,tp=64", "dp=64 does not divide the batch")])
def test_a_floor_that_the_job_cannot_run_on_is_refused_before_the_original_runs(root, mesh, fact):
    text = refusal(root, floor=mesh)
    assert text.startswith(f"--floor {mesh}: ") and fact in text


def test_a_job_with_a_step_cache_is_refused(root):
    request = Request(
        "cogvideox", "configs/cogvideox_demo.yaml", paths=(str(root),), overrides=("cache={kind: deepcache}",)
    )
    for flags in ({}, {"capture": Path("c")}):
        with pytest.raises(BadValueError, match="A step cache makes other latents on purpose"):
            answer(request, VerifyFlags(**flags))


@pytest.mark.parametrize("limit", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_limit_is_a_size(root, limit, tmp_path):
    text = refusal(root, capture=tmp_path, capture_limit=limit)
    assert text == f"--capture-limit {limit:g}: It is no size in GiB. Give a number above 0."


def test_a_captures_folder_is_made_before_the_original_runs(root, tmp_path):
    (tmp_path / "file").touch()
    request = Request("cogvideox", "configs/cogvideox_demo.yaml", paths=(str(root),))
    with pytest.raises(OutputError, match=r"--capture .*file: It is a file, not a folder"):
        answer(request, VerifyFlags(capture=tmp_path / "file"))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            {"capture": Path("c"), "against": "run:d"},
            "--against: --capture runs the original alone. Leave one of the two out.",
        ),
        ({"capture_limit": 1.0}, "--capture-limit: Nothing is captured. Add --capture DIR."),
        (
            {"against": "run:d", "steps": "1"},
            "--steps: The capture says what is compared. Capture with --steps, and leave it out.",
        ),
        (
            {"file": Path("r.txt")},
            "--report r.txt: '.txt' is the ending of no format. Known: .html, .json, .sarif.",
        ),
    ],
)
def test_flags_that_do_not_go_together_are_refused(root, flags, expected):
    assert refusal(root, **flags) == expected


def test_a_patch_at_fault_is_a_finding_at_its_line(tmp_path):
    cause = Cause("a.patch", "patches/a.yaml:3", "bitwise", "transformer.blocks.2", 9e-4, 1e-6, "absence", 1e-6)
    unit = Unit(0, 0, "transformer", "blocks.2", 2, "block", "transformer.blocks.2", 1e-6, 9e-4)
    one = Verification("m", "c.yaml", {}, {}, "tp", {}, (0,), 8, units=(unit,), causes=(cause,))
    for name, what in (("a.sarif", '"startLine": 3'), ("a.json", '"exit_code": 1'), ("a.html", "patches/a.yaml:3")):
        write_report(tmp_path / name, one)
        assert what in (tmp_path / name).read_text()
    [finding] = findings_of(one).findings
    assert finding.text == (
        "a.patch: Another picture: the error of transformer.blocks.2 is 900 times the rounding, and 1 times the "
        "rounding without it. It promises: bitwise."
    )


def test_a_verification_that_blames_no_patch_is_a_finding_at_the_job():
    unit = Unit(0, 0, "transformer", "", 0, "network", "transformer", 1e-6, 9e-4)
    one = Verification("m", "c.yaml", {}, {}, "tp", {}, (0,), 8, units=(unit,), clue="look at the rules")
    [finding] = findings_of(one).findings
    assert (finding.place, finding.text) == ("c.yaml:1", one.first_line)
    assert findings_of(Verification("m", "c.yaml", {}, {}, "tp", {}, (0,), 8)).findings == []


def test_the_result_is_printed_before_a_report_that_cannot_be_written(torchport, capsys, monkeypatch, root, tmp_path):
    from torchport.commands import verify

    one = Verification("m", "c.yaml", {}, {}, "tp", {}, (0,), 8)
    monkeypatch.setattr(verification, "verify", lambda *_: one)

    def write(file, data):
        raise OutputError(str(file), "The disk is full", "Free some space, or choose another folder with --out")

    monkeypatch.setattr(verify.atomic, "write_json", write)
    words = ("--model", "cogvideox", "--config", "configs/cogvideox_demo.yaml", "--path", root)
    code, out, err = torchport("verify", *words, "--report", "r.json", capsys=capsys)
    assert (code, out[0]) == (2, one.first_line)
    assert err[-1].endswith("--report r.json: The disk is full. Free space there, or name another place.")


def test_a_process_that_ends_is_told_with_its_last_words(root, monkeypatch):
    def call(function, *arguments, ended, environment, stop):
        if function.endswith("record"):
            raise ended(child.Ended(-9, ""))
        stop.wait()  # the port's process is ended then
        raise child.ChildStoppedError

    monkeypatch.setattr(child, "call", call)
    request = Request("cogvideox", "configs/cogvideox_demo.yaml", prompt="A cat", paths=(str(root),))
    with pytest.raises(TorchportError) as caught:
        verification.verify(request, verification.Options())
    assert str(caught.value) == (
        "torchport.verify.recording:record: Its process was killed by SIGKILL, as the system does where memory runs "
        "out, and said: nothing. Free memory, or make the video smaller: --set height=, width= or frames=."
    )
