"""`torchport.applied` in somebody's own process."""

import importlib
import json
import os
import sys

import pytest
from fakes.plain_script import PlainScript

import torchport
from torchport.errors import BadValueError, NothingAppliedError, TwinModuleError, UnknownNameError, UpstreamError


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The upstream `up` on the path; what a test imports of it is forgotten."""
    world = PlainScript(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield world
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("up", "m", "torchport_patches"):
            del sys.modules[name]


def applied(here, *arguments, **options):
    return torchport.applied(*arguments, paths=(str(here.root / "pack"),), backend="original", **options)


def test_a_models_patches_are_in_force_inside_and_not_after(here):
    with applied(here, "small") as session:
        from up import m

        assert m.answer() == "patched"
        assert [(row["id"], row["state"]) for row in session.rows()] == [("up.answer", "used")]
    assert m.answer() == "upstream"


def test_children_are_told_what_is_in_force(here, monkeypatch):
    monkeypatch.delenv("TORCHPORT_APPLIED", raising=False)
    with applied(here, "small"):
        importlib.import_module("up.m")
        told = json.loads(os.environ["TORCHPORT_APPLIED"])
    assert told == {
        "model": "small", "patches": [], "upstream_path": None, "backend": "original",
        "paths": [str(here.root / "pack")],
        "choice": dict.fromkeys(("strategy", "mesh", "attention", "machine")) | {"strict": False},
    }  # fmt: skip
    assert "TORCHPORT_APPLIED" not in os.environ


def test_patches_alone_can_be_named(here):
    with applied(here, patches=["up/p"]) as session:
        assert importlib.import_module("up.m").answer() == "patched"
        assert session.card is None


def test_a_set_that_changed_nothing_says_so(here):
    text = "^torchport: None of the patches of 'small' was applied: nobody imported up.m. Name the model of the code"
    with pytest.raises(NothingAppliedError, match=text):
        with applied(here, "small"):
            pass


def test_an_error_inside_is_not_hidden_by_that(here):
    with pytest.raises(ZeroDivisionError):
        with applied(here, "small"):
            1 / 0  # noqa: B018


def test_a_module_that_was_imported_before_is_patched_where_it_is(here):
    m = importlib.import_module("up.m")
    with applied(here, "small"):
        assert m.answer() == "patched"


def test_a_second_copy_of_a_patched_module_is_refused(here, monkeypatch):
    monkeypatch.syspath_prepend(str(here.root / "up"))
    file = here.root / "up" / "m.py"
    with pytest.raises(TwinModuleError, match=rf"{file} was imported twice, as 'up.m' and as 'm', and 'up.answer'"):
        with applied(here, "small"):
            importlib.import_module("up.m")
            assert importlib.import_module("m").answer() == "upstream"


def test_the_environment_stays_the_scripts(here):
    with applied(here, "small"):
        importlib.import_module("up.m")
        os.environ["MINE"] = "1"
    assert os.environ.pop("MINE") == "1"


def test_a_model_that_is_not_there_is_refused(here):
    with pytest.raises(UnknownNameError, match="There is no model card 'smal'"):
        with applied(here, "smal"):
            pass


def test_a_checkout_without_a_model_is_refused(here):
    with pytest.raises(BadValueError, match="It is the checkout of a card's upstream, and no model is named"):
        with applied(here, upstream_path="up"):
            pass


def test_a_checkout_of_a_model_that_has_none_is_refused(here):
    with pytest.raises(UpstreamError, match="This model's upstreams are installed packages"):
        with applied(here, "small", upstream_path="up"):
            pass
