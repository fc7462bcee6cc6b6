"""The JSON Schemas of cards, jobs and patch files: they accept what is shipped, and refuse what torchport refuses."""

import functools
import json

import jsonschema
import pytest

from torchport.commands.schema import meanings, schema, summary
from torchport.config import parse_document, read_document
from torchport.config.card import Component
from torchport.config.strategy import WeightRule
from torchport.patch.declared import Entry
from torchport.stages.family import Stage


@functools.cache
def validator(kind):
    jsonschema.Draft202012Validator.check_schema(schema(kind))
    return jsonschema.Draft202012Validator(schema(kind))


def shipped(root):
    cards = [("card", file) for file in (root / "configs" / "models").glob("*.yaml")]
    jobs = [("job", file) for file in (root / "configs").glob("*.yaml")]
    patches = [("patch", file) for file in (root / "patches").glob("*/*.yaml") if file.name != "lock.yaml"]
    assert cards and jobs and patches
    return sorted(cards + jobs + patches)


def test_every_shipped_file_validates(root):
    for kind, file in shipped(root):
        assert [error.message for error in validator(kind).iter_errors(read_document(file).data)] == [], file


PATCH = """
- id: up.f
  target: up.m:f
  replace: p.py:new
  why: A test.
  reported: "none: a test"
  until: never
  fits: {up: "*"}
  equivalence: bitwise
"""
WRONG = {
    "an unknown key of a job": ("job", "steps: 8", "step: 8"),
    "a value of another type": ("job", "steps: 8", "steps: many"),
    "a value out of its range": ("job", "guidance_scale: 3.0", "guidance_scale: 0.5"),
    "an axis that does not exist": ("job", "dp: 2", "pp: 2"),
    "a missing key of a card": ("card", "title: ", "titel: "),
    "a class that is no path": ("card", "diffusers:HunyuanVideo15Pipeline", "HunyuanVideo15Pipeline"),
    "a family with an ending": ("card", "diffusers/hunyuan_video15_stages", "diffusers/hunyuan_video15_stages.py"),
    "an unknown key of a component": ("card", "precision: high", "precission: high"),
    "a patch without a promise": ("patch", "  equivalence: bitwise\n", ""),
    "a patch of two kinds": ("patch", "  replace: p.py:new\n", "  replace: p.py:new\n  wrap: p.py:new\n"),
    "a patch of no kind": ("patch", "  replace: p.py:new\n", ""),
    "a target without a module": ("patch", "target: up.m:f", "target: up.m.f"),
    "a promise that does not exist": ("patch", "bitwise", "same"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_does_not_validate(root, name):
    kind, right, wrong = WRONG[name]
    files = {"job": root / "configs" / "demo.yaml", "card": root / "configs" / "models" / "hunyuan.yaml"}
    text = PATCH if kind == "patch" else files[kind].read_text(encoding="utf-8")
    assert text.count(right) >= 1
    assert validator(kind).is_valid(parse_document(text, "x.yaml").data)
    assert not validator(kind).is_valid(parse_document(text.replace(right, wrong), "x.yaml").data)


@pytest.mark.parametrize("kind", ["card", "job", "patch"])
def test_every_field_says_what_it_means(kind):
    definitions = schema(kind)["$defs"]
    for name, definition in definitions.items():
        assert definition["description"].endswith((".", ":")), name
        for key, field in definition.get("properties", {}).items():
            assert field["description"][0].isupper() or field["description"][0] == "`", (name, key)
            assert field["description"].endswith("."), (name, key)


def test_meanings_come_from_both_forms_of_docstrings_and_from_classes_above():
    assert meanings(Component)["dtype"].startswith("The dtype of its weights.")
    assert meanings(WeightRule)["match"].startswith("A regular expression")
    assert meanings(Entry)["why"] == "What fails, or is slow, without the patch."
    assert "Attributes" not in summary(Entry) and summary(Stage).startswith("One stage of a family")


@pytest.mark.parametrize("kind", ["card", "job", "patch"])
def test_the_command_prints_the_schema(torchport, capsys, kind):
    code, out, _ = torchport("schema", kind, capsys=capsys)
    assert code == 0 and json.loads("\n".join(out)) == schema(kind)


def test_the_older_command_prints_the_schema_of_patches(torchport, capsys):
    code, out, _ = torchport("patches", "schema", capsys=capsys)
    assert code == 0 and json.loads("\n".join(out)) == schema("patch")


def test_a_schema_that_does_not_exist_is_refused(torchport, capsys):
    code, _, err = torchport("schema", "cards", capsys=capsys)
    assert code == 2 and "'cards' is not one of 'card', 'job', 'patch'" in err[-1]
