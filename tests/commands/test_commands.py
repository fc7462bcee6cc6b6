"""`torchport patches` and `torchport check`, through the command line."""

import json
import subprocess
import sys

import pytest
from fakes.patch_world import World


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


def test_an_unlocked_target_would_change_and_says_so(torchport, capsys, tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)
    world.write("up/m.py", "def f(a):\n    return a\n\ndef g(a):\n    b = a\n    c = b\n    return c\n")
    world.python("def new(a): return a\ndef same(): return 1\n")
    rewrites = [
        f"id: up.{name}\n  target: up.m:g\n  rewrite: {{match: '{line}', put: p.py:same, gives: [{line[0]}]}}"
        for name, line in (("first", "b = a"), ("second", "c = b"))
    ]
    world.yaml("\n- ".join(["id: up.f\n  target: up.m:f\n  replace: p.py:new", *rewrites]))
    arguments = ("patches", "lock", "up", "--path", tmp_path, "--upstream-path", world.site)
    code, out, _ = torchport(*arguments, "--check", capsys=capsys)
    assert (code, out[-1]) == (3, "2 target(s) would change."), "two patches are on one target"
    assert not (world.patches / "up" / "lock.yaml").exists()
    code, _, said = torchport(*arguments, capsys=capsys)
    assert (code, said) == (0, []), said
    assert torchport(*arguments, "--check", capsys=capsys)[0] == 0
    world.close()


@pytest.mark.slow
def test_a_models_patches_are_clean_and_called():
    done = subprocess.run(
        [sys.executable, "-m", "torchport", "check", "--model", "hunyuan"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "clean\n"), done.stdout + done.stderr
