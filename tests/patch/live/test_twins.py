"""A patched module that is there a second time, under another name."""

import importlib
import importlib.util
import sys

import pytest
from fakes.patch_world import TAIL, World
from fakes.small_port import SmallPort

from torchport import patch
from torchport.errors import TwinModuleError
from torchport.run.path import run
from torchport.task import Request


@pytest.fixture
def world(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)
    yield world
    world.close()


def entries_of(world):
    world.write("up/sub/m.py", "def f(x):\n    return x\n")
    world.python("def new(x): return -x\n")
    return world.one("replace: p.py:new", "up.sub.m:f")


def test_a_folder_inside_the_package_on_the_path_makes_a_second_module(world, monkeypatch):
    entries = entries_of(world)
    folder = world.site / "up"
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(TwinModuleError) as caught:
        with patch.applied(entries):
            from sub import m as second
            from up.sub import m

            assert (m.f(1), second.f(1)) == (-1, 1)
    assert str(caught.value) == (
        f"patches/up/p.yaml:1: {folder / 'sub' / 'm.py'} was imported twice, as 'up.sub.m' and as 'sub.m', and "
        f"'up.one' changes the first alone. Take {folder} off sys.path (and PYTHONPATH), and import 'up.sub.m' instead."
    )
    assert (caught.value.patch, caught.value.names) == ("up.one", "sub.m")


def test_the_ledger_of_a_stage_refuses_it_before_anything_is_saved(world, monkeypatch):
    entries = entries_of(world)
    monkeypatch.syspath_prepend(str(world.site / "up"))
    with pytest.raises(TwinModuleError, match=r"as 'up\.sub\.m' and as 'sub\.m'"):
        with patch.applied(entries, stage="denoise") as ledger:
            importlib.import_module("sub.m")
            importlib.import_module("up.sub.m")
            ledger.check_called()
            pytest.fail("the ledger lets it pass")


def test_a_link_to_the_file_is_the_same_file(world):
    entries = entries_of(world)
    (world.site / "link.py").symlink_to(world.site / "up" / "sub" / "m.py")
    with pytest.raises(TwinModuleError, match=r"as 'up\.sub\.m' and as 'link', and"):
        with patch.applied(entries):
            importlib.import_module("link")
            importlib.import_module("up.sub.m")


def test_a_second_name_of_the_same_module_is_none(world, monkeypatch):
    entries = entries_of(world)
    with patch.applied(entries):
        monkeypatch.setitem(sys.modules, "m", importlib.import_module("up.sub.m"))


def test_a_second_copy_of_a_module_without_patches_is_none(world, monkeypatch):
    entries = entries_of(world)
    world.write("up/sub/other.py", "")
    monkeypatch.syspath_prepend(str(world.site / "up" / "sub"))
    with patch.applied(entries):
        importlib.import_module("up.sub.m")
        importlib.import_module("up.sub.other")
        importlib.import_module("other")


def test_check_finds_it_in_an_upstream_that_puts_its_own_folder_on_the_path(world):
    from torchport.commands.check import check

    entries_of(world)
    line = "import os, sys\nsys.path.insert(0, os.path.dirname(__file__))\nimport sub.m\n"
    world.write("up/__init__.py", line)
    report = check(world.patches, ["up"], upstream_path=world.site)
    found = [finding for finding in report.findings if finding.id == "TP215"]
    assert found and "as 'up.sub.m' and as 'sub.m'" in found[0].text


def test_a_run_ends_where_upstream_has_a_second_copy_of_its_network(tmp_path, monkeypatch):
    """The stage whose patch may have done nothing leaves no artefact."""
    port = SmallPort(tmp_path, monkeypatch)
    port.upstream("__init__.py", "import os, sys\nsys.path.insert(0, os.path.dirname(__file__))\nimport model\n")
    port.write("patches/up/p.py", "def doubled(original, self, x):\n    return 2 * original(self, x)\n")
    entry = "- id: up.doubled\n  target: up.model:Net.forward\n  wrap: p.py:doubled\n"
    port.write("patches/up/p.yaml", entry + TAIL)
    port.change("configs/models/small.yaml", "denoise: []", "denoise: [up/p]")
    request = Request(
        "small", "configs/small.yaml", prompt="x", paths=(str(port.pack),), out=tmp_path / "out", cache=False
    )
    try:
        with pytest.raises(
            TwinModuleError, match=r"as 'up\.model' and as 'model', and 'up\.doubled' changes the first"
        ):
            run(request)
        assert not (tmp_path / "out" / "denoise.safetensors").exists()
    finally:
        port.forget()
        sys.modules.pop("model", None)
