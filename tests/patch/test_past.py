"""Ways past the import system, and sets left out of order: nobody goes on without patches unawares."""

import importlib
import importlib.abc
import importlib.util
import sys

import pytest
from fakes.patch_world import World

from torchport import patch
from torchport.errors import ConflictError, TooLateError


@pytest.fixture
def entries(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)
    world.write("up/m.py", "def f():\n    return 'original'\n")
    world.python("def new():\n    return 'new'\n")
    yield lambda: world.one("replace: p.py:new", "up.m:f")
    world.close()


def test_a_module_executed_by_hand_is_noticed(entries):
    with pytest.raises(TooLateError, match=r"up\.m was imported past 'up\.one', which changed nothing"):
        with patch.applied(entries()):
            importlib.import_module("up")
            spec = importlib.util.find_spec("up.m")
            plain = importlib.util.spec_from_file_location("up.m", spec.origin)
            module = sys.modules["up.m"] = importlib.util.module_from_spec(plain)
            plain.loader.exec_module(module)
            assert module.f() == "original"


def test_a_patch_whose_module_never_came_is_no_error(entries):
    with patch.applied(entries()) as ledger:
        assert ledger.rows()[0]["state"] == "armed"


def test_who_loses_patches_to_a_set_left_out_of_order_hears_of_it(entries):
    first, second = patch.applied([]), patch.applied(entries())
    first.__enter__()
    second.__enter__()
    with pytest.raises(ConflictError):
        first.__exit__(None, None, None)
    with pytest.raises(ConflictError, match="A set of patches is left while a later one is in force"):
        second.__exit__(None, None, None)
