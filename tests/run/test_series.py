"""Many videos with one command: the same bytes as one by one, each ready by itself, and nothing made twice."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from fakes.small_videos import small_videos
from PIL import Image

from torchport import run, save
from torchport.compile import network, program
from torchport.config import document
from torchport.config.strategy import shared_strategies
from torchport.errors import StoppedError
from torchport.run import path, resume, series
from torchport.run.series import read_prompts
from torchport.task import Request, accept

PATIENCE = 300
"""Seconds after which a process is taken to hang; a busy machine needs a fifth of it."""
EIGHT = [
    {"prompt": f"prompt {number}", "seed": number % 3, **({"height": 32} if number in (3, 7) else {})}
    for number in range(1, 9)
]


@pytest.fixture
def port(tmp_path, monkeypatch):
    """The small port, and the current folder in which its series are made."""
    port = small_videos(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    yield port
    port.forget()


def write(*lines, file="p.jsonl"):
    Path(file).write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def flags(out="out", *more):
    names = ("--model", "small", "--config", "configs/small.yaml", "--path", "pack", "--prompts", "p.jsonl")
    return ("run", *names, "--out", out, "--no-cache", *more)


def request(**changes):
    return Request("small", "configs/small.yaml", paths=("pack",), cache=False, **changes)


def made(out):
    """The bits of every video in a folder: its tensors, and what a person sees."""
    names = sorted(path.name for path in Path(out).iterdir())
    return {name: bits(Path(out, name)) for name in names}


def bits(folder):
    shas = [save.read_manifest(save.file_of(folder, name)).sha256 for name in ("encode", "denoise", "decode")]
    return *shas, (folder / save.VIDEO).read_bytes(), (folder / save.CONTACT_SHEET).read_bytes()


def table(lines):
    """Name, state and what else is said of each video, without the seconds; and the counts."""
    *rows, counts = [line for line in lines if line]
    return [re.sub(r" +[\d.]+ s ", " ", row).split(maxsplit=2) for row in rows], counts


def test_each_video_has_the_bytes_of_a_run_of_its_own(port, torchport, capsys):
    write(*EIGHT[:4])
    code, lines, _ = torchport(*flags(), capsys=capsys)
    rows, counts = table(lines)
    assert (code, counts) == (0, "4 videos: 4 done")
    assert rows == [[f"000{n}", "done", f"out/000{n}"] for n in range(1, 5)]
    for number, line in enumerate(EIGHT[:4], 1):
        size = (f"height={line['height']}",) if "height" in line else ()
        alone = Path(f"alone{number}")
        run.run(request(prompt=line["prompt"], seed=line["seed"], overrides=size, out=alone))
        assert bits(alone) == bits(Path(f"out/000{number}"))


def test_a_stage_is_loaded_and_a_program_compiled_once_for_several(port, torchport, capsys, monkeypatch, caplog):
    loaded, compiled, order = [], [], []
    whole, lowered, carry = network.loaded, program.Compiled.lowered, path.StageAtHand.carry
    monkeypatch.setattr(network, "loaded", lambda *args: loaded.append(args[1].name) or whole(*args))
    monkeypatch.setattr(program.Compiled, "lowered", lambda *args: compiled.append(1) or lowered(*args))
    monkeypatch.setattr(
        path.StageAtHand,
        "carry",
        lambda self, journey: order.append((self.stage.name, journey.task.folder.name)) or carry(self, journey),
    )
    write(*EIGHT)
    assert torchport(*flags("out", "--together", "3"), capsys=capsys)[0] == 0
    three_passes = ["encode", "denoise", "decode"] * 3  # six videos of one shape, and two of another
    assert loaded == three_passes and len(compiled) == 3
    assert order[:9] == [(stage, name) for stage in three_passes[:3] for name in ("0001", "0002", "0004")]
    said = caplog.messages
    ready = [line for line in said if "is done" in line]
    assert ready[0] == "0001 is done: out/0001/video.mp4" and len(ready) == 8
    assert said.index(ready[0]) < said.index("0002: decode"), "a video is written as soon as it is ready"


@pytest.mark.usefixtures("own_jax_cache")
def test_the_manifest_of_each_video_has_its_own_calls_and_programs(port, torchport, capsys):
    write(*EIGHT[:2])
    assert torchport(*flags(), capsys=capsys)[0] == 0
    first, second = (save.read_manifest(Path(f"out/{name}/denoise.safetensors")) for name in ("0001", "0002"))
    assert [row.jax_cache for row in first.programs] == [row.jax_cache for row in second.programs] == [False]
    assert [row.calls for row in first.patches] == [row.calls for row in second.patches]
    assert first.settings["seed"], second.settings["seed"] == (1, 2)
    assert first.run != second.run


def test_the_pictures_of_a_series_are_on_one_sheet_in_the_order_of_its_lines(tmp_path):
    videos = []
    for number, colour in enumerate(["red", "lime", "blue", "white"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        if colour != "white":  # the last failed
            Image.new("RGB", (16, 8), colour).save(folder / "image.png")
        task = types.SimpleNamespace(card=types.SimpleNamespace(makes_pictures=True), result=folder / "image.png")
        videos.append(types.SimpleNamespace(task=task, error=None))
    assert series.write_sheet(tmp_path, videos) == tmp_path / "contact_sheet.png"
    assert series.write_sheet(tmp_path, videos[:1]) is None  # and none of an earlier series is left
    assert not (tmp_path / "contact_sheet.png").exists()
    series.write_sheet(tmp_path, videos)
    with Image.open(tmp_path / "contact_sheet.png") as sheet:
        places = [(8, 4), (28, 4), (8, 16)]  # two columns of 16 x 8 pixels, with gaps of 4
        assert [sheet.getpixel(place) for place in places] == [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
        assert sheet.size == (36, 20)


def test_a_rerun_makes_what_is_left_and_nothing_twice(port, torchport, capsys, monkeypatch):
    write(*EIGHT[:2])
    assert torchport(*flags(), capsys=capsys)[0] == 0
    before = {path: path.stat().st_mtime_ns for path in Path("out").rglob("*")}
    write(*EIGHT[:3])
    code, lines, _ = torchport(*flags(), capsys=capsys)
    rows, counts = table(lines)
    assert [row[1] for row in rows] == ["reused", "reused", "done"]
    assert (code, counts) == (0, "3 videos: 2 reused, 1 done")
    assert {path: path.stat().st_mtime_ns for path in before if path.is_file()} == {
        path: time for path, time in before.items() if path.is_file()
    }


def test_a_rerun_with_another_rate_writes_the_video_again_and_nothing_else(port, torchport, capsys, caplog):
    write(EIGHT[0])
    assert torchport(*flags(), capsys=capsys)[0] == 0
    [before] = made("out").values()
    code, lines, _ = torchport(*flags("out", "--set", "fps=4"), capsys=capsys)
    assert (code, table(lines)[1]) == (0, "1 videos: 1 reused")
    [after] = made("out").values()
    assert before[:3] == after[:3] and before[3] != after[3], "the tensors are the same, and the video is not"
    assert "out/0001/video.mp4 had 8 frames per second: it is written again with 4" in caplog.messages
    folder = Path("out/0001")
    assert save.read_manifest(folder / "decode.safetensors").config["fps"] == 4
    assert json.loads((folder / "manifest.json").read_text())["stages"]["decode"]["config"]["fps"] == 4
    run.run(request(prompt=EIGHT[0]["prompt"], seed=EIGHT[0]["seed"], overrides=("fps=4",), out=Path("alone")))
    assert bits(Path("alone")) == after
    caplog.clear()
    torchport(*flags("out", "--set", "fps=4"), capsys=capsys)
    assert made("out") == {"0001": after} and not any("written again" in line for line in caplog.messages)


def test_a_finished_video_without_the_latents_that_are_asked_for_is_refused(port, torchport, capsys, caplog):
    write(EIGHT[0])
    assert torchport(*flags(), capsys=capsys)[0] == 0
    assert torchport(*flags("out", "--set", "keep_steps=true"), capsys=capsys)[0] == 1
    said = "A finished video with keep_steps False lies here, and this one has True. Remove the folder to make it anew"
    assert any(said in line for line in caplog.messages)


def test_a_failed_video_is_reported_and_the_others_are_made(port, torchport, capsys, caplog):
    Path("out").mkdir()
    Path("out/0004").write_text("in the way")
    write({"prompt": "one"}, {"prompt": "nan"}, {"prompt": "raise"}, {"prompt": "four"}, {"prompt": "five"})
    code, lines, _ = torchport(*flags(), capsys=capsys)
    rows, counts = table(lines)
    assert code == 1 and counts == "5 videos: 2 done, 3 failed"
    assert rows[1] == ["0002", "failed", "error[TP605] out/0002/encode.safetensors"]
    assert rows[2][:2] == ["0003", "failed"] and re.fullmatch(r"error\[TP901\] \S*stages.py:\d+", rows[2][2])
    assert rows[3] == ["0004", "failed", "error[TP604] out/0004"]
    assert any(line.startswith("0002 failed: error[TP605] out/0002/encode") for line in caplog.messages)
    assert [row[1] for row in (rows[0], rows[4])] == ["done", "done"]

    Path("out/0004").unlink()
    code, lines, _ = torchport(*flags(), capsys=capsys)
    assert [row[1] for row in table(lines)[0]] == ["reused", "failed", "failed", "done", "reused"] and code == 1


def test_a_broken_picture_costs_its_video_and_not_the_series(port, torchport, capsys, caplog):
    port.change("patches/up/stages.py", "TAKES_IMAGE = False", "TAKES_IMAGE = True")
    Image.new("RGB", (8, 8)).save("good.png")
    Path("broken.png").write_bytes(Path("good.png").read_bytes()[:40])
    Path("script.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) (w) file\n")
    names = ("good.png", "broken.png", "script.png", "good.png")
    write(*({"prompt": "x", "image": name} for name in names))
    code, lines, _ = torchport(*flags(), capsys=capsys)
    rows, counts = table(lines)
    assert (code, counts) == (1, "4 videos: 2 done, 2 failed")
    assert [row[1] for row in rows] == ["done", "failed", "failed", "done"]
    assert rows[1][2] == "error[TP107] p.jsonl:2 (image broken.png)"
    assert (
        "0003 failed: error[TP107] p.jsonl:3 (image script.png): Its format is EPS. Name a picture in one of PNG, "
        "JPEG, WebP, BMP, GIF, TIFF."
    ) in caplog.messages
    write({"prompt": "x"}, {"prompt": "x", "image": "absent.png"})
    assert torchport(*flags("other"), capsys=capsys)[0] == 2, "a file that is not there is a mistake of the line"


def test_what_all_videos_of_a_shape_need_fails_all_of_them_once(port, torchport, capsys):
    """A network that cannot be loaded is not loaded again for each."""
    port.change("patches/up/stages.py", 'network="net", call=call', 'network="net", call=call, prepare=prepare')
    port.change(
        "patches/up/stages.py",
        "def call(",
        "def prepare(parts, settings):\n    if settings.height == 32 and not parts['net'].layer.weight.is_meta:\n"
        "        raise OSError\n    assert (settings.prompt, settings.seed) == ('', 0)\n\n\ndef call(",
    )
    write(*EIGHT[:4])
    code, lines, _ = torchport(*flags(), capsys=capsys)
    assert code == 0, lines  # its weights are on meta

    port.forget()
    port.change("patches/up/stages.py", " and not parts['net'].layer.weight.is_meta", "")
    code, lines, _ = torchport(*flags("other"), capsys=capsys)
    rows, counts = table(lines)
    assert (code, counts) == (1, "4 videos: 3 done, 1 failed")
    assert rows[2][:2] == ["0003", "failed"] and rows[2][2].startswith("error[TP901] ")


def test_a_finished_video_of_another_line_is_never_written_over(port, torchport, capsys, caplog):
    write(*EIGHT[:2])
    assert torchport(*flags(), capsys=capsys)[0] == 0
    before = made("out")
    write({"prompt": "a new first line"}, *EIGHT[:2])
    code, lines, _ = torchport(*flags(), capsys=capsys)
    assert [row[1:] for row in table(lines)[0][:2]] == [["failed", f"error[TP603] out/000{n}"] for n in (1, 2)]
    assert code == 1 and {name: made("out")[name] for name in before} == before
    assert (
        "0001 failed: error[TP603] out/0001: A finished video with prompt 'prompt 1' lies here, and this one has "
        "'a new first line'. Remove the folder to make it anew, or choose another --out."
    ) in caplog.messages


def test_every_line_that_the_model_cannot_make_is_refused_before_anything_runs(port, torchport, capsys):
    write({"prompt": "x"}, {"prompt": "x", "height": 0}, {"prompt": "x", "image": "a.png"}, {"prompt": "x"})
    assert torchport(*flags(), capsys=capsys) == (
        2,
        [],
        ["error[TP105] p.jsonl:2: 'height' is 0 (a number). It must be greater than or equal to 1."],
    )
    write({"prompt": "x"}, {"prompt": "x", "image": "a.png"}, {"prompt": "\ud800"})
    code, _, said = torchport(*flags(), capsys=capsys)
    assert code == 2 and said == [
        "error[TP107] p.jsonl:2 (image a.png): 'small' begins with text alone. Leave the flag out.",
        "error[TP107] p.jsonl:3 (prompt): Character 1 is not Unicode text. Write it as UTF-8.",
    ]
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (("--prompt", "x"), "--prompt is given too. Leave one out: each line of the file has a prompt."),
        (("--stage", "encode"), "--stage encode is given too. Leave it out: each video goes through all stages."),
        (("--inputs", "x"), "--inputs is given too. Leave it out: each video goes through all stages."),
    ],
)
def test_a_flag_that_contradicts_the_file_is_refused(port, torchport, capsys, more, text):
    write({"prompt": "x"})
    assert torchport(*flags("out", *more), capsys=capsys)[2] == [f"error[TP107] --prompts p.jsonl: {text}"]


def test_flags_without_what_they_need_are_refused(port, torchport, capsys):
    write({"prompt": "x"})
    names = ("run", "--model", "small", "--config", "configs/small.yaml", "--path", "pack")
    assert torchport(*names, "--prompts", "p.jsonl", capsys=capsys)[2] == [
        "error[TP107] --prompts p.jsonl: There is no --out. Name the folder that has, or gets, a folder for each video."
    ]
    assert torchport(*names, "--prompt", "x", "--together", "2", capsys=capsys)[2] == [
        "error[TP107] --together 2: There is no --prompts. Add it, or leave this out."
    ]


def test_flags_are_what_a_line_leaves_out(port):
    write({"prompt": "x"}, {"prompt": "y", "negative": "", "seed": 3})
    shared = request(out=Path("out"), negative_prompt="dark", seed=5)
    settings = [video.task.settings for video in series.accepted(shared, read_prompts(Path("p.jsonl")))]
    assert [(one.negative_prompt, one.seed) for one in settings] == [("dark", 5), ("", 3)]


def test_quiet_prints_the_paths_of_the_videos_alone(port, torchport, capsys, caplog):
    write({"prompt": "x"}, {"prompt": "nan"})
    code, lines, _ = torchport(*flags("out", "-q"), capsys=capsys)
    assert (code, lines) == (1, ["out/0001/video.mp4"])
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith("0002 failed: error[TP605]")


def test_ctrl_c_stops_after_the_step_and_the_rerun_goes_on(port, torchport, capsys, monkeypatch, caplog):
    write(*EIGHT[:2])
    track, steps = resume.track, []

    def sending(items, what, unit, total=None, done=0):
        for item in track(items, what, unit, total, done):
            steps.append(what)
            if steps.count("denoise") == 5:
                os.kill(os.getpid(), signal.SIGINT)
            yield item

    with monkeypatch.context() as context:
        context.setattr(resume, "track", sending)
        code, lines, said = torchport(*flags(), capsys=capsys)
    assert code == 130 and [row[1] for row in table(lines)[0]] == ["waiting", "waiting"]
    assert said[-1] == (
        "error[TP701] Ctrl-C: Stopped after step 2 of 3; what was finished is in out/0002. "
        "Go on with the same command: what is finished stays."
    )
    caplog.clear()
    assert torchport(*flags(), capsys=capsys)[0] == 0
    assert {"resume after step 2 of 3", "denoise was finished before the stop"} <= set(caplog.messages)
    assert torchport(*flags("whole"), capsys=capsys)[0] == 0
    assert made("out") == made("whole")


@pytest.fixture
def started(port, root):
    """Starts the series in a process of its own; what waits there waits for the file `SMALL_WAITS` names."""
    running = []

    def start(out="out", waits=""):
        path = os.pathsep.join([str(root), str(port.site)])
        environment = {**os.environ, "PYTHONPATH": path, "SMALL_WAITS": waits}
        command = [sys.executable, "-m", "torchport", *flags(out)]
        file = Path(f"log{len(running)}")
        with file.open("w") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        process.log = file
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.wait()


def wait_for(file, *processes):
    deadline = time.monotonic() + PATIENCE
    while not Path(file).exists():
        assert time.monotonic() < deadline and all(one.poll() is None for one in processes), "it never came there"
        time.sleep(0.05)


def states(process):
    return [row[1] for row in table(process.log.read_text().splitlines()[-9:])[0]]


# Slow: three processes load torch and JAX. The test after this one shows that two share the videos; here none dies.
# pytest -m slow tests/run/test_series.py -k two_processes
@pytest.mark.slow
def test_two_processes_make_eight_videos_with_the_bytes_of_one(started, tmp_path):
    write(*EIGHT)
    one = started("whole")
    assert one.wait(PATIENCE) == 0, one.log.read_text()
    first = started(waits="prompt 1@go")
    wait_for("go.here", first)  # it has its first four folders
    second = started(waits="prompt 8@on")
    wait_for("on.here", second)
    Path("go").touch()
    Path("on").touch()
    assert [first.wait(PATIENCE), second.wait(PATIENCE)] == [0, 0], first.log.read_text() + second.log.read_text()
    made_by = [[state == "done" for state in states(one)] for one in (first, second)]
    assert all(a != b for a, b in zip(*made_by, strict=True)), "each video was made by one of them"
    assert made("out") == made("whole")


def test_when_one_is_killed_the_other_takes_its_videos_over(started, torchport, capsys):
    write(*EIGHT)
    assert torchport(*flags("whole"), capsys=capsys)[0] == 0  # in this process: another would load torch and JAX first
    first = started(waits="prompt 4@never")
    wait_for("never.here", first)
    second = started(waits="prompt 8@on")
    wait_for("on.here", second)
    first.kill()
    first.wait()
    Path("on").touch()
    assert second.wait(PATIENCE) == 0, second.log.read_text()
    assert states(second) == ["done"] * 8
    assert made("out") == made("whole")


# Slow: four processes load torch and JAX. A test above shows in one process that a rerun makes what is left.
# pytest -m slow tests/run/test_series.py -k a_process_ends
@pytest.mark.slow
def test_a_process_ends_when_others_have_all_that_is_left_and_the_rerun_completes(started):
    write(*EIGHT)
    first = started(waits="prompt 4@never")
    wait_for("never.here", first)
    second = started()
    assert second.wait(PATIENCE) == 0
    held = [1, 2, 4, 5]  # of one shape
    assert states(second) == ["elsewhere" if number in held else "done" for number in range(1, 9)]
    assert second.log.read_text().splitlines()[-1] == "8 videos: 4 elsewhere, 4 done"
    first.kill()
    first.wait()
    again = started()
    assert again.wait(PATIENCE) == 0
    assert states(again) == ["done" if number in held else "reused" for number in range(1, 9)]
    whole = started("whole")
    assert whole.wait(PATIENCE) == 0
    assert made("out") == made("whole")


SMALL = ("height=64", "width=64", "frames=5", "steps=3")


@pytest.mark.parametrize(("model", "config"), [("hunyuan", "demo"), ("wan", "wan_demo")])
def test_a_real_model_makes_the_same_bytes_in_a_series_as_alone(tmp_path, root, model, config):
    """Its scheduler and its encoders keep nothing of the video before."""
    shared = Request(model, f"configs/{config}.yaml", overrides=SMALL, paths=(str(root),), out=tmp_path / "out")
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "A dog in the snow", "negative": "dark"}\n{"prompt": "A cat", "seed": 3}\n')
    videos = series.accepted(shared, read_prompts(file))
    series.make(videos, tmp_path / "out")
    assert [video.state for video in videos] == ["done", "done"]
    run.run(dataclasses.replace(shared, prompt="A cat", seed=3, out=tmp_path / "alone"))
    theirs, ours = bits(tmp_path / "out" / "0002"), bits(tmp_path / "alone")
    # Now and then x264 makes other bytes of the same frames; the contact sheet is drawn of them after the video.
    assert (*theirs[:3], theirs[4]) == (*ours[:3], ours[4])
    with pytest.raises(StoppedError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(series.Stopping, "is_requested", lambda self: True)
        series.make(series.accepted(dataclasses.replace(shared, out=tmp_path / "no"), read_prompts(file)), tmp_path)


def test_the_card_and_the_job_are_read_once_for_each_size_and_not_for_each_line(tmp_path, monkeypatch):
    shared_strategies()  # read once in a process, by whichever test is the first
    read = []
    parse = document.parse_document
    monkeypatch.setattr(document, "parse_document", lambda text, file: read.append(file) or parse(text, file))

    def tasks(count):
        read.clear()
        lines = [
            series.Line(series.Prompt(prompt=f"cat {n}", seed=n, frames=(5, 9)[n % 2]), f"a:{n}", f"{n:04}")
            for n in range(count)
        ]
        asked = Request("hunyuan", "configs/demo.yaml", out=tmp_path)
        videos = series.accepted(asked, lines)
        whole = [accept(series._request(asked, line), reads_picture=False) for line in lines[2:4]]
        for video, task in zip(videos[2:4], whole, strict=True):
            assert (video.task.settings, video.task.folder, video.task.job) == (task.settings, task.folder, task.job)
        return len(read)

    assert tasks(4) == tasks(40)
