"""Where a component's tensors lie: one file of any name, an index, a part of a file, under other names."""

import dataclasses
import functools
import json

import pytest
import torch
from fakes.modules import Mixed, Plain
from safetensors.torch import load_file, save_file

from torchport import load
from torchport.config.card import Card, Component, RenameRule, Tiny
from torchport.errors import (
    BadValueError,
    CheckpointForeignError,
    CheckpointMissingError,
    DeadRuleError,
    MissingKeyError,
    TorchportError,
    UnknownKeyError,
)
from torchport.load import Layout, checkpoint, tiny

PLAIN = "fakes.modules:Plain"


def refusal(kind, call):
    with pytest.raises(TorchportError) as caught:
        call()
    assert type(caught.value) is kind
    return str(caught.value)


def rule(match, to):
    return RenameRule(match=match, to=to)


STATE = {"a.weight": torch.arange(4.0).reshape(2, 2), "a.bias": torch.ones(2), "shift": torch.tensor([5.0, 6.0])}


def filled(folder, layout, dtype="float32"):
    return load.fill(load.build(PLAIN, {"dim": 2}, dtype, "card:1"), folder, "plain", layout)


def assert_filled(module, dtype=torch.float32):
    assert {name: tensor.tolist() for name, tensor in module.state_dict().items()} == {
        name: tensor.to(dtype).tolist() for name, tensor in STATE.items()
    }
    assert not module.training and not any(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("name", ["x.safetensors", "deep/er/x.safetensors", "x.pth", "x.pt", "x.bin", "x"])
def test_a_plain_module_is_filled_from_the_file_that_is_named(tmp_path, name):
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith("safetensors"):
        save_file(STATE, file)
    else:
        torch.save(STATE, file)
    save_file({"other": torch.zeros(1)}, tmp_path / "other.safetensors")
    assert_filled(filled(tmp_path, Layout(name)))
    assert filled(tmp_path, Layout(name), "bfloat16").a.weight.dtype == torch.bfloat16
    assert Layout(name).parameters(tmp_path) == 8


def test_without_a_file_the_folder_is_read_as_diffusers_writes_it(tmp_path):
    save_file(STATE, tmp_path / "anything.safetensors")
    assert_filled(filled(tmp_path, Layout()))


def test_an_index_may_be_named_among_others(tmp_path):
    save_file({"a.weight": STATE["a.weight"]}, tmp_path / "x-1.safetensors")
    save_file({"a.bias": STATE["a.bias"], "shift": STATE["shift"]}, tmp_path / "x-2.safetensors")
    index = {"weight_map": {"a.weight": "x-1.safetensors", "a.bias": "x-2.safetensors", "shift": "x-2.safetensors"}}
    (tmp_path / "x.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "y.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    layout = Layout("x.safetensors.index.json")
    assert_filled(filled(tmp_path, layout))
    (tmp_path / "x-2.safetensors").unlink()
    assert refusal(CheckpointMissingError, lambda: layout.stored(tmp_path)) == (
        f"{tmp_path}/x-2.safetensors: The file is missing. Download the checkpoint again, whole."
    )


def test_components_may_share_a_file_each_with_the_names_of_its_own(tmp_path):
    torch.save({f"{part}.{name}": tensor for part in ("one", "two") for name, tensor in STATE.items()}, tmp_path / "x")
    layout = Layout("x", rename=[rule(r"one\.(.*)", r"\1")], unread=[r"two\..*"])
    assert_filled(filled(tmp_path, layout))
    assert set(layout.stored_by_file_name(tmp_path)) == {f"one.{name}" for name in STATE}
    dead = dataclasses.replace(layout, rename=[*layout.rename, rule(r"two\.(.*)", r"\1")], places=["c:1", "c:2"])
    assert refusal(DeadRuleError, lambda: filled(tmp_path, dead)).startswith(r"c:2: Rule 2, 'two\.(.*)', matches none")


def test_a_plain_module_whose_names_differ_is_told_of_the_rules(tmp_path):
    save_file({f"net.{name}": tensor for name, tensor in STATE.items()}, tmp_path / "x.safetensors")
    assert refusal(CheckpointForeignError, lambda: filled(tmp_path, Layout())) == (
        f"{tmp_path}: It lacks 3 of the model's tensors (first 'a.bias') and holds 3 that the model has not (first "
        "'net.a.bias'). The nearest are 'net.a.bias', 'net.a.weight': mend the rules under 'rename', or name a "
        "checkpoint of this model."
    )


def test_a_plain_module_on_meta_is_built_though_its_constructor_reads_values():
    module = load.published(PLAIN, {"dim": 3, "extra": 1}, "card:1", "bfloat16")
    assert all(tensor.is_meta for tensor in (*module.state_dict().values(), module.table))
    assert module.a.weight.dtype == torch.bfloat16 and module.factor == 2.0
    assert load.configuration(module) == {"dim": 3, "scale": 2.0, "extra": 1}


def test_a_modules_own_configuration_stays():
    def build(dim):
        module = Plain(dim)
        module.config = type("Options", (), {})()
        module.config.heads = dim
        return module

    module = load.build(load.Builder(build, PLAIN, "b.py:build"), {"dim": 2}, "float32", "card:1")
    assert load.configuration(module) == {"heads": 2}


@pytest.mark.parametrize(
    ("maker", "config", "kind", "text"),
    [
        (PLAIN, {}, MissingKeyError, "card:1: Plain needs the argument 'dim'. Add 'dim'."),
        ("fakes.networks:Halves", {"dim": 2}, UnknownKeyError, "card:1: Halves has no argument 'dim'. None are known."),
        (PLAIN, {"dim": "2"}, BadValueError, "card:1: Plain cannot be built from it: "),
        (load.Builder(lambda: 3, PLAIN, "b.py:f"), {}, BadValueError,
         "card:1: b.py:f returns a 'int'. It must return a Plain, the component's 'class'."),
        (load.Builder(lambda: 1 / 0, PLAIN, "b.py:f"), {}, BadValueError,
         "card:1: b.py:f cannot be built from it: division by zero. Mend the arguments."),
    ],
)  # fmt: skip
def test_arguments_that_a_module_cannot_be_built_from_are_refused(maker, config, kind, text):
    for built in (load.published, lambda *recipe: load.build(*recipe[:2], "float32", recipe[2])):
        assert refusal(kind, lambda built=built: built(maker, config, "card:1")).startswith(text)


def test_a_diffusers_class_in_a_file_has_its_configuration_in_the_card(tmp_path):
    state = Mixed(width=6).state_dict()
    torch.save({"model": {f"x.{name}": tensor for name, tensor in state.items()}}, tmp_path / "mixed.pt")
    data = {"class": "fakes.modules:Mixed", "file": "mixed.pt", "key": "model", "dtype": "float32"}
    component = Component.model_validate({**data, "rename": [{"match": r"x\.(.*)", "to": r"\1"}]})
    layout = load.layout_of(component, component.file, ["c:1"])
    recipe = load.Recipe(component.class_, {"width": 6}, "c:2")
    assert load.is_built_here(component) and not load.reads_config(component)
    load.account_component(component, tmp_path, layout, recipe)
    module = load.fill(load.build(*recipe[:2], "float32", "c:2"), tmp_path, "mixed", layout)
    assert module.config.width == 6 and torch.equal(module.proj.weight, state["proj.weight"])


def test_what_nothing_would_read_is_refused(tmp_path):
    data = {"class": "transformers:T5EncoderModel", "rename": [{"match": "a", "to": "b"}]}
    component = Component.model_validate(data)
    assert refusal(BadValueError, lambda: load.account_component(component, tmp_path)) == (
        f"{tmp_path}: 'rename' is for modules that torchport fills, and upstream loads transformers:T5EncoderModel. "
        "Remove it, or add 'build'."
    )
    component = Component.model_validate({"class": "transformers:T5EncoderModel", "file": "x.pt", "dtype": "float32"})
    assert refusal(BadValueError, lambda: load.text_encoder(component, tmp_path, "float32", "text")) == (
        f"{tmp_path}: 'file' is 'x.pt', but transformers finds the files of a T5EncoderModel by fixed names. "
        "Add 'build': torchport then fills the module from that file."
    )
    assert refusal(BadValueError, lambda: load.part("fakes.networks:Halves", tmp_path)) == (
        f"{tmp_path}: Halves has no 'from_pretrained'. Give its component a 'dtype' if it has weights, or make it in "
        "the stage's 'load'."
    )


def card_of(components, **more):
    """A card with components alone; nothing else of it is read here."""
    parsed = {name: Component.model_validate(entry) for name, entry in components.items()}
    small = Tiny(seed=1, scale=1.0, components=more)
    return Card.model_construct(model="some", pipeline=None, components=parsed, tiny=small)


MANY = {
    "plain": {"class": PLAIN, "folder": ".", "file": "{variant}.safetensors.index.json", "dtype": "float32"},
    "mixed": {"class": "fakes.modules:Mixed", "dtype": "float32", "rename": [{"match": r"x\.(.*)", "to": r"\1"}]},
    "own": {"class": "fakes.modules:Mixed", "folder": "inner/{variant}", "dtype": "float32"},
}  # fmt: skip


def written(tmp_path, monkeypatch, components=MANY):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "family.py").write_text("")
    card = card_of(components, plain={"dim": 2}, mixed={"width": 6})
    layouts = {
        variant: {
            name: load.layout_of(entry, card.file(name, variant), [f"c:{name}"] * len(entry.rename))
            for name, entry in card.components.items()
        }
        for variant in ("v1", "v2")
    }
    return (
        card,
        layouts,
        tiny.write(card, tmp_path / "family.py", functools.partial(tiny.save_in_layouts, card, layouts)),
    )


def test_tiny_components_lie_where_and_as_the_card_says(tmp_path, monkeypatch):
    card, layouts, folder = written(tmp_path, monkeypatch)
    assert {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} == {
        ".complete", "v1.safetensors.index.json", "v1-00001-of-00001.safetensors", "v2.safetensors.index.json",
        "v2-00001-of-00001.safetensors", "mixed/config.json", "mixed/model.safetensors", "inner/v1/config.json",
        "inner/v2/config.json", "inner/v1/diffusion_pytorch_model.safetensors",
        "inner/v2/diffusion_pytorch_model.safetensors",
    }  # fmt: skip
    assert set(load_file(folder / "mixed" / "model.safetensors")) == {f"x.{name}" for name in Mixed(6).state_dict()}
    for variant, layout_of in layouts.items():
        checkpoint.check_index(folder, card, variant)
        for name, entry in card.components.items():
            recipe = load.Recipe(PLAIN, {"dim": 2}, "c:1") if name == "plain" else None
            load.account_component(entry, folder / card.folder(name, variant), layout_of[name], recipe)


def test_a_buffer_that_a_constructor_draws_is_the_same_in_every_tiny_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(Plain, "__init__", drawing(Plain.__init__))
    folders = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        torch.manual_seed(len(folders))
        folders.append(written(tmp_path / name, monkeypatch)[2])
    first, second = (folder / "v1-00001-of-00001.safetensors" for folder in folders)
    assert "drawn" in load_file(first) and first.read_bytes() == second.read_bytes()


def drawing(init):
    def with_buffer(self, dim):
        init(self, dim)
        self.register_buffer("drawn", torch.randn(3))

    return with_buffer


def test_a_part_that_no_layout_can_save_is_refused(tmp_path, monkeypatch):
    components = {"options": {"class": "argparse:Namespace"}}
    assert refusal(BadValueError, lambda: written(tmp_path, monkeypatch, components)) == (
        "components.options: A Namespace has no 'save_pretrained'. Write the function 'arrange_tiny' in the family, "
        "which saves it."
    )


def test_components_in_the_root_have_digests_of_their_own_files(tmp_path, monkeypatch):
    card, _, folder = written(tmp_path, monkeypatch)
    before = checkpoint.digests(folder, card, "v1")
    assert set(before) == {"some/plain", "some/mixed", "some/own"}
    (folder / "v2-00001-of-00001.safetensors").write_bytes(b"")
    assert checkpoint.digests(folder, card, "v1") == before
    save_file({"a": torch.zeros(1)}, folder / "v1-00001-of-00001.safetensors")
    after = checkpoint.digests(folder, card, "v1")
    assert {name for name in after if after[name] != before[name]} == {"some/plain"}


def test_a_component_that_has_the_root_without_a_file_has_what_lies_there(tmp_path):
    card = card_of({"a": {"class": "fakes.modules:Mixed", "folder": "."}})
    (tmp_path / "config.json").write_text("{}")
    before = checkpoint.digests(tmp_path, card)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "x").write_text("x")
    (tmp_path / ".cache").write_text("x")
    assert checkpoint.digests(tmp_path, card) == before
    (tmp_path / "x").write_text("x")
    assert checkpoint.digests(tmp_path, card) != before
