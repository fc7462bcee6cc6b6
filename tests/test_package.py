"""What is installed: a wheel carries its own patches/ and configs/, and an editable install reads the checkout's."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from fakes.plain_pack import PlainPack
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder that holds what the wheel holds, as `pip install` would unpack it."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "-q", "-w", folder]
    subprocess.run(command, check=True, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def torchport(where, folder, *arguments, site=None):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [where, site] if site else [where]))}
    command = [sys.executable, "-m", "torchport", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("where", ["wheel", "checkout"])
def test_cards_and_patches_are_found_from_any_folder(where, installed, tmp_path):
    listed = torchport(installed if where == "wheel" else ROOT, tmp_path, "models")
    assert listed.returncode == 0, listed.stderr
    assert "hunyuan" in listed.stdout


def test_a_wheel_holds_every_file_of_patches_and_configs(installed):
    tracked = subprocess.run(
        ["git", "ls-files", "patches", "configs"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert tracked.stdout.split()
    for name in tracked.stdout.split():
        assert (installed / "torchport" / "_data" / name).read_bytes() == (ROOT / name).read_bytes()


def test_the_image_is_built_from_the_files_that_a_wheel_needs():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project, wheel = table["project"], table["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"pyproject.toml", project["readme"], *project["license-files"]}
    needed |= {*wheel["packages"], *wheel["force-include"]}
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {line[1:] for line in lines if line.startswith("!")} == needed


@pytest.mark.slow
def test_the_demo_runs_from_a_wheel_in_an_empty_folder(installed, tmp_path):
    done = torchport(installed, tmp_path, "demo", "--out", "made")
    assert done.returncode == 0, done.stderr
    assert "made/video.mp4" in done.stdout.splitlines()
    assert (tmp_path / "made" / "video.mp4").stat().st_size > 1_000


def test_a_wheel_says_where_the_pages_are(installed):
    """`torchport explain --web` reads it there."""
    done = torchport(installed, installed, "explain", "--web", "TP203")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.endswith("/errors/#tp203\n")


@pytest.mark.slow
def test_two_builds_have_the_same_bytes(tmp_path):
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "clone")], check=True)
    for name in ("one", "two"):
        command = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path / name)]
        subprocess.run(command, check=True, cwd=tmp_path / "clone", capture_output=True)
    files = sorted(file.name for file in (tmp_path / "one").iterdir())
    assert [Path(name).suffix for name in files] == [".whl", ".gz"]
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_wheel_is_typed(installed):
    assert (installed / "torchport" / "py.typed").is_file()


def test_the_current_folder_is_never_taken_unasked(installed, tmp_path):
    """A folder with patches/ and configs/ may be anybody's: it takes --path to run code from it."""
    (tmp_path / "patches").mkdir()
    (tmp_path / "configs" / "models").mkdir(parents=True)
    (tmp_path / "configs" / "models" / "mine.yaml").write_text("model: mine\n")
    unasked, asked = torchport(installed, tmp_path, "models"), torchport(installed, tmp_path, "models", "--path", ".")
    assert "hunyuan" in unasked.stdout and "mine" not in unasked.stdout + unasked.stderr
    assert "hunyuan" in asked.stdout and "configs/models/mine.yaml:1: " in asked.stderr


def test_a_wheel_runs_somebody_elses_model_from_a_folder_of_its_own(installed, tmp_path, monkeypatch):
    """A card with plain modules and a `.pth`, a family, a stub, a rewrite and a strategy; the wheel stays as it is."""
    pack = PlainPack(tmp_path, monkeypatch)
    pack.write_gpu_code()
    before = contents(installed)
    elsewhere, flags = tmp_path / "elsewhere", ("--model", "plain", "--config", "small", "--path", pack.root)
    elsewhere.mkdir()
    for out, more in (("port", ()), ("original", ("--backend", "original"))):
        words = ("run", *flags, "--prompt", "A cat", "--out", out, *more)
        ran = torchport(installed, elsewhere, *words, site=tmp_path / "site")
        assert ran.returncode == 0, ran.stderr
    port, original = (load_file(elsewhere / out / "decode.safetensors")["frames"] for out in ("port", "original"))
    assert original.abs().max() > 0.1 and (port - original).abs().max() <= 1e-6 * original.abs().max()
    checked = torchport(installed, elsewhere, "check", "--static", "--path", pack.root, site=tmp_path / "site")
    assert checked.returncode == 3 and "has no row in the lock" in checked.stdout, checked.stdout
    locked = torchport(installed, elsewhere, "patches", "lock", "--path", pack.root, site=tmp_path / "site")
    assert locked.returncode == 0 and (pack.root / "patches" / "up" / "lock.yaml").is_file(), locked.stderr
    checked = torchport(installed, elsewhere, "check", "--static", "--path", pack.root, site=tmp_path / "site")
    assert (checked.returncode, checked.stdout) == (0, "clean\n")
    assert contents(installed) == before


def contents(folder):
    """The bytes of every file, but for what Python compiles."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.suffix != ".pyc"]
    return {file: file.read_bytes() for file in files}
