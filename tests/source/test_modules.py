"""Sources are found and cut without running anything, and what is cut is what parsing the whole file gives."""

from __future__ import annotations

import ast
import inspect
import sys

import pytest
from fakes.patch_world import World

from torchport import patch
from torchport.patch.declared import entry
from torchport.patch.live import holders
from torchport.source import bindings, flow, modules
from torchport.source.bindings import definition_alone

TEXT = '''\
"""A module."""
import functools
from x import imported
from y import (
    first,
    second,
)

@functools.wraps(
    len
)
@functools.lru_cache
def decorated(
    a,
):
    text = """
at the first column
"""
    return text

class Plain:
    # a comment
    def f(self):
        return decorated

# between

def after(): return Plain

assigned = 1
def twice(): pass
def twice(): return 2
if assigned:
    def inside(): pass
for looped in []: pass
left, right = 1, 2
def called(): return dict(Plain=1)
def last():
    return 1'''


@pytest.mark.parametrize("name", ["Plain", "after", "called", "last"])
def test_a_definition_that_is_cut_out_is_the_one_of_the_whole_file(name):
    cut = definition_alone(TEXT, name)
    (whole,) = [node for node in ast.parse(TEXT).body if getattr(node, "name", None) == name]
    assert cut is not None
    assert ast.dump(cut.body[0], include_attributes=True) == ast.dump(whole, include_attributes=True)


@pytest.mark.parametrize(
    "name", ["imported", "first", "assigned", "twice", "inside", "looped", "left", "right", "absent", "decorated"]
)
def test_where_it_is_not_sure_nothing_is_cut_out(name):
    assert definition_alone(TEXT, name) is None


@pytest.mark.parametrize("module", [ast, inspect, entry, flow, holders, modules, sys.modules[World.__module__]])
def test_real_files_are_cut_as_they_are_parsed(module):
    text = inspect.getsource(module)
    tree = ast.parse(text)
    names = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    cuts = {name: cut for name in names if (cut := definition_alone(text, name)) is not None}
    assert len(cuts) > len(names) / 2
    for name, cut in cuts.items():
        whole = bindings.binding_at(tree, [name]).node
        assert ast.dump(cut.body[0], include_attributes=True) == ast.dump(whole, include_attributes=True)


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
