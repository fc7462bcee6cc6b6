"""Sources are found and read without running anything."""

from __future__ import annotations

import sys

import pytest
from fakes.patch_world import World

from torchport import patch
from torchport.source import parsing as modules


@pytest.fixture
def world(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)
    yield world
    world.close()


def test_sources_are_found_by_walking_search_paths_and_no_parent_is_run(world):
    world.write("up/__init__.py", "raise RuntimeError('ran')\n")
    world.write("up/sub/__init__.py", "raise RuntimeError('ran')\n")
    world.write("up/sub/m.py", "def f(): pass\n")
    assert modules.read_source("up.sub.m").text == "def f(): pass\n"
    assert not [name for name in sys.modules if name.startswith("up")]
    with pytest.raises(ModuleNotFoundError, match=r"no 'up.sub.absent'"):
        modules.read_source("up.sub.absent")
    with pytest.raises(ModuleNotFoundError, match="no 'absentpackage' on the search path"):
        modules.read_source("absentpackage.m")


def test_portions_of_a_namespace_package_are_all_searched(world, tmp_path, monkeypatch):
    for root, name in ((world.site, "one"), (tmp_path / "more", "two")):
        (root / "ns" / "deep").mkdir(parents=True)
        (root / "ns" / "deep" / f"{name}.py").write_text(f"x = '{name}'\n")
    monkeypatch.syspath_prepend(str(tmp_path / "more"))
    assert modules.read_source("ns.deep.one").text == "x = 'one'\n"
    assert modules.read_source("ns.deep.two").text == "x = 'two'\n"
    assert "ns" not in sys.modules


def test_a_module_in_c_has_no_source():
    assert modules.read_source("math") is None
    assert modules.read_source("sys") is None


def test_a_changed_file_is_read_anew(world):
    world.write("up/m.py", "x = 1\n")
    assert modules.read_source("up.m").text == "x = 1\n"
    world.write("up/m.py", "x = 22\n")
    assert modules.read_source("up.m").text == "x = 22\n"


def test_a_module_that_is_no_python_is_refused(world):
    from torchport.errors import UnreadableError

    world.write("up/m.py", "def f(:\n")
    world.python("def new(): pass\n")
    with pytest.raises(UnreadableError, match=r"^up/m.py:1: Python 3.\d+ cannot read it: invalid syntax. Mend the"):
        patch.applied(world.one("replace: p.py:new", "up.m:f")).__enter__()


def test_a_target_inside_a_condition_is_found(world):
    world.write("up/m.py", "try:\n    import absent\nexcept ImportError:\n    def f(a):\n        return 'old'\n")
    world.python("def new(b): return 'new'\n")
    from torchport.errors import SignatureError

    with pytest.raises(SignatureError):
        patch.applied(world.one("replace: p.py:new", "up.m:f")).__enter__()
