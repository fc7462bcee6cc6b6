"""`torchport patches` and `torchport check`, through the command line."""

import json
import subprocess
import sys

import pytest


def test_patches_are_listed_with_what_they_promise(torchport, capsys):
    code, out, err = torchport("patches", "list", "diffusers", capsys=capsys)
    assert (code, err) == (0, [])
    assert any(line.split()[:3] == ["diffusers.hunyuan15.token-order", "rewrite", "bitwise"] for line in out)
    assert all(line.startswith("diffusers.") for line in out)


def test_a_patch_is_shown_whole(torchport, capsys):
    code, out, _ = torchport("patches", "show", "diffusers.hunyuan15.vae-attention", capsys=capsys)
    shown = "\n".join(out)
    assert code == 0 and "until: upstream computes attention without the mask" in shown and "locked_at:" in shown


def test_an_unknown_patch_is_refused_with_the_nearest(torchport, capsys):
    code, _, err = torchport("patches", "show", "diffusers.hunyuan15.vae-attentoin", capsys=capsys)
    assert code == 2 and "Did you mean 'diffusers.hunyuan15.vae-attention'?" in err[0]


def test_the_schema_is_json(torchport, capsys):
    code, out, _ = torchport("patches", "schema", capsys=capsys)
    assert code == 0 and "$defs" in json.loads("\n".join(out))


def test_the_shipped_locks_are_current(torchport, capsys):
    code, out, _ = torchport("patches", "lock", "--check", "diffusers", "torchax", capsys=capsys)
    assert (code, out) == (0, ["0 target(s) would change."])


def test_an_unlocked_target_would_change_and_says_so(torchport, capsys, root, tmp_path):
    import shutil

    shutil.copytree(root / "patches" / "diffusers", tmp_path / "pack" / "patches" / "diffusers")
    shutil.copytree(root / "configs", tmp_path / "pack" / "configs")
    (tmp_path / "pack" / "patches" / "diffusers" / "lock.yaml").unlink()
    arguments = ("patches", "lock", "diffusers", "--path", tmp_path / "pack")
    code, out, _ = torchport(*arguments, "--check", capsys=capsys)
    files = (root / "patches" / "diffusers").glob("*.yaml")
    lines = [line for file in files if file.name != "lock.yaml" for line in file.read_text().splitlines()]
    count = len({line for line in lines if line.startswith("  target: ")})
    assert code == 3 and out[-1] == f"{count} target(s) would change.", "several patches may be on one target"
    assert not (tmp_path / "pack" / "patches" / "diffusers" / "lock.yaml").exists()
    assert torchport(*arguments, capsys=capsys)[0] == 0
    assert torchport(*arguments, "--check", capsys=capsys)[0] == 0


@pytest.mark.slow
def test_a_models_patches_are_clean_and_called():
    done = subprocess.run(
        [sys.executable, "-m", "torchport", "check", "--model", "hunyuan"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "clean\n"), done.stdout + done.stderr
