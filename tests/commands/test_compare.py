"""`torchport compare`: the lines and the JSON of two runs, beside a floor, and what is refused."""

import json

import pytest
import torch
from fakes.plain_pack import PlainPack
from fakes.run_folders import frames, latents, write_run

from torchport.run.path import run
from torchport.task import Request

MESH = {"mesh": {"dp": 1, "tp": 8}}


@pytest.fixture
def compared(torchport, capsys):
    """Runs the command; returns its lines, each without spaces at its end."""

    def call(*args):
        code, out, err = torchport("compare", *args, capsys=capsys)
        assert code == 0, err
        return [line.rstrip() for line in out]

    return call


@pytest.fixture
def refused(torchport, capsys):
    """Runs the command; returns the one line of its refusal."""

    def call(*args):
        code, out, err = torchport("compare", *args, capsys=capsys)
        assert (code, out, len(err)) == (2, [], 1)
        return err[0]

    return call


@pytest.fixture
def three(tmp_path):
    """Writes a run, one in bfloat16, and a floor."""
    steps = [latents(1), latents(2)]
    write_run(tmp_path / "a", steps=steps)
    half = [tensor.bfloat16() for tensor in (*steps, latents())]
    dtypes = {"dtypes": {"net": "bfloat16", "vae": "float32"}}
    write_run(tmp_path / "b", steps=half[:2], last=half[2], video=frames(104), settings=dtypes)
    video = frames()
    video[0, 1, 0, 0, 0] = 101
    write_run(tmp_path / "c", steps=steps, last=latents() * (1 + 1e-6), video=video, job=MESH)


def test_two_runs_beside_a_floor(three, compared):
    assert compared("a", "b", "--floor", "c") == [
        "A      a",
        "B      b",
        "floor  c: the job of A but for mesh: dp=2 x tp=4 and dp=1 x tp=8",
        "",
        "A and B differ:",
        "  the dtype of net: float32 and bfloat16",
        "",
        "2 frames of 16 x 16, bytes before the codec                  B              floor",
        "PSNR, dB                                                 36.09              79.99",
        "PSNR of the worst frame                        36.09 (frame 1)    76.98 (frame 2)",
        "SSIM                                                   0.99923            1.00000",
        "SSIM of the worst frame                      0.99923 (frame 1)  1.00000 (frame 2)",
        "greatest difference                                   4 of 255           1 of 255",
        "",
        "latents after step   B: cosine  max|a-b|/max|b|  floor: cosine  max|a-b|/max|b|",
        "1                   0.99999909         1.97e-03     1.00000000         0.00e+00",
        "2                   0.99999906         1.28e-03     1.00000000         0.00e+00",
        "last                0.99999895         2.77e-03     1.00000000         9.02e-07",
    ]


def test_json_has_the_same(three, compared):
    result = json.loads("\n".join(compared("a", "b", "--floor", "c", "--json")))
    assert (result["a"], result["identical"], result["other_video"]) == ("a", False, [])
    b, floor = result["b"], result["floor"]
    assert b["folder"] == "b" and b["warning"] is b["unkept"] is None
    row = {"field": "dtypes.net", "a": "float32", "b": "bfloat16", "stages": []}
    assert b["differences"] == [row] and [row["field"] for row in floor["differences"]] == ["mesh"]
    assert b["frames"]["psnr"] == pytest.approx(36.09, abs=0.01) and b["frames"]["greatest"] == 4
    assert [row["step"] for row in b["latents"]] == [1, 2, None] == [row["step"] for row in floor["latents"]]
    assert floor["latents"][0] == {"step": 1, "cosine": pytest.approx(1), "difference": 0, "same": True}


def test_two_runs_with_the_same_bits_are_identical(tmp_path, compared):
    steps = [latents(1), latents(2)]
    write_run(tmp_path / "a", steps=steps)
    write_run(tmp_path / "b", steps=steps, versions={"torch": "2.12.0"})
    assert compared("a", "b") == [
        "A      a",
        "B      b",
        "",
        "A and B differ:",
        "  the version of torch: 2.13.0 and 2.12.0",
        "",
        "identical: every byte of latents and frames",
    ]
    result = json.loads("\n".join(compared("a", "b", "--json")))
    assert result["identical"] and result["floor"] is None and result["b"]["frames"]["psnr"] is None, "it is infinite"


def test_the_sound_of_two_runs_is_compared_too(tmp_path, compared, refused):
    sound = (latents(4), torch.linspace(-1, 1, 20).reshape(2, 10))
    write_run(tmp_path / "a", sound=sound)
    write_run(tmp_path / "b", sound=(sound[0], sound[1] * 1.5))
    write_run(tmp_path / "c")
    lines = compared("a", "b")
    assert "identical: every byte of latents and frames" not in lines
    assert [line.split() for line in lines if line.startswith("sound")] == [
        ["sound:", "latents", "1.00000000", "0.00e+00"],
        ["sound:", "samples", "1.00000000", "3.33e-01"],
    ]
    found = json.loads("\n".join(compared("a", "b", "--json")))
    assert (
        not found["identical"] and found["b"]["sound"]["latents"]["same"] and not found["b"]["sound"]["samples"]["same"]
    )
    assert "Its 'sound latents' have the shape [0], and those of the first run [1, 4, 2, 2, 2]" in refused("a", "c")


def test_a_run_without_steps_says_how_to_keep_them(tmp_path, compared):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", last=latents(3), video=frames(90))
    assert compared("a", "b")[-3:] == [
        "latents after step   B: cosine  max|a-b|/max|b|",
        "last                0.12313233         1.17e+00",
        "a kept latents after none of its 2 steps, and b kept latents after none of its 2 steps. A run with --set "
        "keep_steps=true keeps them after each.",
    ]


def test_two_different_videos_are_said_to_be_that_first(tmp_path, compared):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", video=frames(9), last=latents(3), settings={"seed": 7, "prompt": "A dog"})
    lines = compared("a", "b")
    assert lines[0] == "A and B are two different videos: prompt: 'A cat' and 'A dog'; seed: 42 and 7"
    assert "A and B differ:" not in lines and "greatest difference" in "\n".join(lines)


def test_a_warning_stands_before_the_numbers(tmp_path, compared):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", video=frames(101))
    assert compared("a", "b")[2] == "warning: the latents are the same, and the frames differ: only the decodes differ"


OTHER_MESH = "Run the job of A again on another mesh: --set mesh=..., with --out of its own."


def test_a_floor_of_another_job_or_the_same_mesh_is_refused(three, tmp_path, refused):
    text = "error[TP107] --floor b: It is another job than A: the dtype of net: float32 and bfloat16. "
    assert refused("a", "c", "--floor", "b") == text + OTHER_MESH
    write_run(tmp_path / "same")
    text = "error[TP107] --floor same: It is the job of A on the same mesh, which shows nothing of rounding. "
    assert refused("a", "b", "--floor", "same") == text + OTHER_MESH


INT8 = {**MESH, "attention": "splash_int8"}


def test_a_floor_that_is_lossy_is_refused(three, tmp_path, refused):
    without = "which is lossy: a floor shows rounding alone. Name a run without it, on another mesh than A."
    write_run(tmp_path / "int8", job=INT8)
    text = f"error[TP107] --floor int8: It was made with attention 'splash_int8', {without}"
    assert refused("a", "b", "--floor", "int8") == text
    assert refused("int8", "b", "--floor", "c") == (
        f"error[TP107] --floor c: It is another job than A: attention: splash_int8 and none. {OTHER_MESH}"
    )
    write_run(tmp_path / "cached", job=MESH, cache={"kind": "deepcache", "steps": 2, "computed": [0]})
    text = f"error[TP107] --floor cached: It was made with the step cache 'deepcache', {without}"
    assert refused("a", "b", "--floor", "cached") == text


def test_one_folder_is_not_compared_with_itself(three, refused):
    assert refused("a", "./a") == "error[TP107] a: It is the folder of the first run. Name another run."
    text = "error[TP107] --floor a: It is the folder of the first run. Name another run."
    assert refused("a", "b", "--floor", "a") == text


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("a", "no"), "error[TP601] no: There is no such folder. Name the output folder of a run."),
        (("a", "x" * 300), f"error[TP107] B {'x' * 77}...: The system refuses this path: File name too long. Name ano"),
        (("", "b"), "error[TP107] A '': It is empty. Write a value."),
        (("a", "\udcff"), "error[TP107] B: Character 1 is not Unicode text. Write it as UTF-8."),
    ],
)
def test_a_path_without_a_run_is_refused_in_one_line(three, refused, args, text):
    assert refused(*args).startswith(text)


def test_a_damaged_step_is_refused(three, tmp_path, refused):
    file = tmp_path / "b" / "denoise.step-0002.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    assert refused("a", "b").startswith("error[TP602] b/denoise.step-0002.safetensors: It is not safetensors: ")


def test_two_sizes_are_refused(three, tmp_path, refused):
    write_run(tmp_path / "wide", video=torch.zeros(1, 2, 3, 16, 32, dtype=torch.uint8))
    assert "'frames' have the shape [2, 3, 16, 32], and those of the first run [2, 3, 16, 16]" in refused("a", "wide")


@pytest.fixture
def plain(tmp_path, monkeypatch):
    """A pack with a small network, which takes the dtype of its weights."""
    pack = PlainPack(tmp_path, monkeypatch)
    call = "call(x=latents, context=context)"
    cast = "call(x=latents.to(dtype), context=context.to(dtype)).float()"
    pack.change(call, cast, "patches/up/stages.py")
    start = "    generator = torch.Generator().manual_seed(settings.seed)\n"
    pack.change(start, f'    dtype = settings.dtypes["net"]\n{start}', "patches/up/stages.py")
    monkeypatch.chdir(pack.root)
    yield pack
    pack.close()


def test_the_file_and_the_field_of_the_card_that_were_edited_are_named(plain, compared, tmp_path):
    def make(name):
        run(Request("plain", "configs/small.yaml", "A cat", out=tmp_path / name, paths=(str(plain.root),)))

    make("a")
    plain.change("settings.seed)", "settings.seed)  # the same", "patches/up/stages.py")
    plain.change("title: ", "title: Another ", "configs/models/plain.yaml")
    plain.close()
    make("b")
    said = compared(tmp_path / "a", tmp_path / "b")
    assert "  patches/up/stages.py: its text is another" in said
    [title] = [line for line in said if "title" in line]
    assert title.startswith("  the card's title: ") and "Another" in title
    assert any(line.startswith("  checkpoint: tiny:") for line in said), "the family arranges its weights"
    assert sum(line.startswith("  ") for line in said) == 3, said


def test_bfloat16_is_farther_from_float32_than_another_mesh(plain, compared, tmp_path):
    other_mesh = ("machine=cpu:4", "mesh={tp: 4}")
    for name, changes in {"a": (), "b": ("dtypes.net=bfloat16",), "c": other_mesh}.items():
        overrides, paths = ("keep_steps=true", *changes), (str(plain.root),)
        run(Request("plain", "configs/small.yaml", "A cat", out=tmp_path / name, overrides=overrides, paths=paths))
    folders = [tmp_path / name for name in "abc"]
    result = json.loads("\n".join(compared(*folders[:2], "--floor", folders[2], "--json")))
    b, floor = result["b"], result["floor"]
    assert [row["field"] for row in b["differences"]] == ["dtypes.net"]
    assert {row["field"] for row in floor["differences"]} == {"mesh", "machine"}
    assert [row["step"] for row in b["latents"]] == [1, 2, None] == [row["step"] for row in floor["latents"]]
    for ours, rounding in zip(b["latents"], floor["latents"], strict=True):
        assert 1e-4 < ours["difference"] < 0.1 and rounding["difference"] < 1e-5 and ours["cosine"] > 0.999
    assert b["latents"][1] == {**b["latents"][2], "step": 2}, "the last step makes the last latents"
    assert 30 < b["frames"]["psnr"] < 70 and b["frames"]["ssim"] > 0.9 and floor["frames"]["greatest"] <= 1
    assert "  the dtype of net: float32 and bfloat16" in compared(*folders[:2])
