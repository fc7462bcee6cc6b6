"""Loading: the tensors are upstream's own, bit for bit, every key accounted for, none left without storage."""

import json
import shutil

import pytest
import torch
from fakes.modules import Forgetful, Mixed
from safetensors.torch import load_file, save_file

from torchport import load
from torchport.compile import in_force
from torchport.errors import (
    CheckpointBrokenError,
    CheckpointForeignError,
    CheckpointMissingError,
    LoadError,
    UnfilledWeightError,
)
from torchport.load import checkpoint


def refusal(kind, call):
    """Returns the text of the error, which must be of this kind and one line."""
    with pytest.raises(LoadError) as caught:
        call()
    assert type(caught.value) is kind
    return str(caught.value)


def everything(module):
    """Every parameter and buffer of a module."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def assert_same(found, expected):
    """Holds two sets of tensors to the same names, dtypes and bits."""
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name], tensor), name


def built(class_path, folder, dtype="float32"):
    """A module built without storage from a component's folder."""
    return load.build(class_path, checkpoint.read_json(folder / "config.json"), dtype, str(folder / "config.json"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["transformer", "vae"])
def test_a_network_is_filled_as_upstream_fills_it(card, tiny_folder, name, dtype):
    path, folder = card.components[name].class_, tiny_folder / name
    module = load.fill(built(path, folder, dtype), folder, name)
    expected = load.class_of(path).from_pretrained(tiny_folder, subfolder=name, torch_dtype=getattr(torch, dtype))
    assert_same(everything(module), everything(expected))
    assert not module.training and not any(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("name", ["transformer", "vae"])
def test_tensors_are_yielded_one_at_a_time_under_the_names_of_the_module(card, tiny_folder, name):
    folder = tiny_folder / name
    module = built(card.components[name].class_, folder)
    stream = load.tensors(module, folder, name)
    assert next(stream) and all(parameter.is_meta for parameter in module.parameters())
    assert_same(dict(load.tensors(module, folder, name)), everything(load.fill(module, folder, name)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["text_encoder", "text_encoder_2"])
def test_a_text_encoder_is_loaded_as_upstream_loads_it(card, tiny_folder, name, dtype):
    path = card.components[name].class_
    module = load.text_encoder(card.components[name], tiny_folder / name, dtype, name)
    expected = load.class_of(path).from_pretrained(tiny_folder / name, dtype=getattr(torch, dtype))
    assert_same(everything(module), everything(expected))
    assert not module.training and not any(parameter.requires_grad for parameter in module.parameters())


@pytest.fixture
def mixed(tmp_path):
    """The folder of a module that keeps a part in float32."""
    torch.manual_seed(3)
    module = Mixed()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    module.count.fill_(5)
    module.save_pretrained(tmp_path)
    return tmp_path


def test_what_the_class_keeps_in_float32_stays_so_and_integers_stay_integers(mixed):
    module = load.fill(built("fakes.modules:Mixed", mixed, "bfloat16"), mixed, "mixed")
    assert_same(everything(module), everything(Mixed.from_pretrained(mixed, torch_dtype=torch.bfloat16)))
    dtypes = {name: tensor.dtype for name, tensor in everything(module).items()}
    assert dtypes["proj.weight"] == dtypes["normal.weight"] == dtypes["table"] == torch.bfloat16
    assert dtypes["norm.weight"] == torch.float32 == torch.get_default_dtype()
    assert dtypes["count"] == torch.int64 and module.count.item() == 5


def test_a_buffer_that_nothing_fills_is_refused(tmp_path):
    Forgetful().save_pretrained(tmp_path)
    module = built("fakes.modules:Forgetful", tmp_path)
    text = (
        f"{tmp_path}: 'inv_freq' has no storage after loading. "
        "It is a buffer that the files do not hold: report it, the class must compute it."
    )
    assert refusal(UnfilledWeightError, lambda: load.fill(module, tmp_path, "x")) == text
    assert refusal(UnfilledWeightError, lambda: list(load.tensors(module, tmp_path, "x"))) == text


def rewrite(folder, change):
    """Changes the tensors of a component's one file."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return file


def test_a_file_that_lacks_tensors_is_refused(mixed):
    rewrite(mixed, lambda tensors: [tensors.pop(name) for name in ("proj.weight", "proj.bias")])
    assert refusal(
        CheckpointForeignError, lambda: list(load.tensors(built("fakes.modules:Mixed", mixed), mixed, "x"))
    ) == (
        f"{mixed}: It lacks 2 of the model's tensors (first 'proj.bias'). Name a checkpoint of this model and version."
    )


def test_a_file_with_foreign_tensors_is_refused(mixed):
    rewrite(mixed, lambda tensors: tensors.update({"other.weight": torch.zeros(1)}))
    assert refusal(
        CheckpointForeignError, lambda: list(load.tensors(built("fakes.modules:Mixed", mixed), mixed, "x"))
    ) == (
        f"{mixed}: It holds 1 that the model has not (first 'other.weight'). "
        "Name a checkpoint of this model and version."
    )


def test_a_renamed_tensor_is_refused_as_both(mixed):
    rewrite(mixed, lambda tensors: tensors.update({"project.bias": tensors.pop("proj.bias")}))
    assert (
        "It lacks 1 of the model's tensors (first 'proj.bias') and holds 1 that the model has not (first 'project"
        in (refusal(CheckpointForeignError, lambda: load.fill(built("fakes.modules:Mixed", mixed), mixed, "x")))
    )


def test_a_foreign_shape_is_refused(mixed):
    file = rewrite(mixed, lambda tensors: tensors.update({"proj.weight": torch.zeros(4, 5)}))
    assert refusal(
        CheckpointForeignError, lambda: list(load.tensors(built("fakes.modules:Mixed", mixed), mixed, "x"))
    ) == (f"{file}: 'proj.weight' has shape [4, 5]. The model's has [4, 4]: name a checkpoint of this model.")


def test_a_truncated_file_is_refused(mixed):
    (file,) = mixed.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    text = refusal(CheckpointBrokenError, lambda: load.fill(built("fakes.modules:Mixed", mixed), mixed, "x"))
    assert text.startswith(f"{file}: It has ")


@pytest.mark.parametrize("config", [{"width": "4"}, {"width": -1}, {"width": 0.5}])
def test_a_configuration_that_the_class_cannot_be_built_from_is_refused(config):
    text = refusal(
        CheckpointForeignError, lambda: load.build("fakes.modules:Mixed", config, "float32", "some/folder/config.json")
    )
    assert text.startswith("some/folder/config.json: Mixed cannot be built from it: ")
    assert text.endswith(". Name a checkpoint of this model and version.") and "\n" not in text


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": "two"},
        {"patch_size": None},
        {"qk_norm": "layer"},
        {"in_channels": [1]},
        {"num_layers": 10**400},
    ],
)
def test_a_configuration_that_the_transformer_cannot_be_built_from_is_refused(card, change):
    config = {**card.tiny.components["transformer"], **change}
    refusal(
        CheckpointForeignError, lambda: load.build(card.components["transformer"].class_, config, "float32", "folder")
    )


@pytest.fixture
def encoder(tmp_path, tiny_folder, card):
    """A copy of the second text encoder's folder, and what loads it."""
    folder = shutil.copytree(tiny_folder / "text_encoder_2", tmp_path / "text_encoder_2")

    def call():
        with in_force.hushed(True):
            return load.text_encoder(card.components["text_encoder_2"], folder, "float32", "text_encoder_2")

    return folder, call


def test_a_text_encoder_that_lacks_a_tensor_is_refused(encoder):
    folder, call = encoder
    rewrite(folder, lambda tensors: tensors.pop("encoder.final_layer_norm.weight"))
    assert refusal(CheckpointForeignError, call) == (
        f"{folder}: 1 missing keys (first 'encoder.final_layer_norm.weight'). "
        "Name a checkpoint of this model and version."
    )


def test_a_text_encoder_with_a_foreign_tensor_is_refused(encoder):
    folder, call = encoder
    rewrite(folder, lambda tensors: tensors.update({"stranger.weight": torch.zeros(1)}))
    assert "1 unexpected keys (first 'stranger.weight')" in refusal(CheckpointForeignError, call)


def test_a_text_encoder_with_a_foreign_shape_is_refused(encoder):
    folder, call = encoder
    rewrite(folder, lambda tensors: tensors.update({"encoder.final_layer_norm.weight": torch.zeros(7)}))
    assert "mismatched keys (first " in refusal(CheckpointForeignError, call)


def test_a_truncated_text_encoder_is_refused(encoder):
    folder, call = encoder
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    assert "Download the file again: it is truncated." in refusal(CheckpointBrokenError, call)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (None, CheckpointMissingError),
        ("{", CheckpointBrokenError),
        ("[]", CheckpointBrokenError),
        ('{"model_type": "t5", "d_model": "x"}', CheckpointForeignError),
        ('{"model_type": "t5", "vocab_size": -5}', CheckpointForeignError),
        ('{"model_type": "t5", "vocab_size": ' + "9" * 5000 + "}", CheckpointBrokenError),
        ('{"model_type": "t5", "feed_forward_proj": "gated-nope"}', CheckpointForeignError),
        ('{"model_type": "t5", "dtype": "nope"}', CheckpointForeignError),
        ('{"model_type": "t5", "d_model": 0}', CheckpointForeignError),
        ('{"model_type": "t5", "num_heads": 0}', CheckpointForeignError),
    ],
)
def test_a_text_encoder_without_a_sound_configuration_is_refused(encoder, text, kind):
    folder, call = encoder
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    assert refusal(kind, call).startswith(f"{folder}/config.json: ")


def test_what_has_no_weights_is_read_by_its_own_class(card, tiny_folder):
    scheduler = load.part(card.components["scheduler"].class_, tiny_folder / "scheduler")
    assert scheduler.config.shift == 3.0
    assert load.part(card.components["tokenizer_2"].class_, tiny_folder / "tokenizer_2")("ab").input_ids == [
        100,
        101,
        1,
    ]


def test_a_missing_folder_of_a_part_is_refused(card, tmp_path):
    assert refusal(
        CheckpointMissingError, lambda: load.part(card.components["scheduler"].class_, tmp_path / "scheduler")
    ) == (f"{tmp_path}/scheduler: The folder is missing. Download the checkpoint again, whole.")


PARTS = ["scheduler", "tokenizer", "tokenizer_2", "guider"]


@pytest.mark.parametrize("name", PARTS)
def test_a_part_whose_files_are_missing_is_refused(card, tmp_path, name):
    folder, path = tmp_path / name, card.components[name].class_
    folder.mkdir()
    assert refusal(CheckpointMissingError, lambda: load.part(path, folder)) == (
        f"{folder}: It lacks files of a {path.partition(':')[2]}. Download the checkpoint again, whole."
    )


def test_a_tokenizer_without_its_vocabulary_is_refused_and_not_an_empty_one(card, tmp_path, tiny_folder):
    folder = shutil.copytree(tiny_folder / "tokenizer", tmp_path / "tokenizer")
    (folder / "tokenizer.json").unlink()
    assert (folder / "tokenizer_config.json").is_file()
    text = refusal(CheckpointMissingError, lambda: load.part(card.components["tokenizer"].class_, folder))
    assert text == f"{folder}: It lacks files of a Qwen2Tokenizer. Download the checkpoint again, whole."


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("text", ["{", "[3]", ""])
def test_a_part_that_is_not_json_is_refused(card, tmp_path, tiny_folder, name, text):
    folder = shutil.copytree(tiny_folder / name, tmp_path / name)
    for file in folder.glob("*.json"):
        file.write_text(text)
    found = refusal(CheckpointBrokenError, lambda: load.part(card.components[name].class_, folder))
    assert found.startswith(f"{folder}/") and ": Not " in found and found.endswith(". Download the file again.")


def test_a_part_that_its_class_cannot_read_is_refused(card, tmp_path, tiny_folder):
    folder = shutil.copytree(tiny_folder / "tokenizer", tmp_path / "tokenizer")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer", "eos_token": 3}')
    found = refusal(CheckpointBrokenError, lambda: load.part(card.components["tokenizer"].class_, folder))
    assert found.startswith(f"{folder}: It cannot be read: ") and found.endswith(". Download it again.")


@pytest.mark.parametrize("text", ['{"model": null}', '{"model": {"type": "BPE"}}', "{}"])
def test_a_tokenizer_that_its_library_cannot_read_is_refused(card, tmp_path, tiny_folder, text):
    folder = shutil.copytree(tiny_folder / "tokenizer", tmp_path / "tokenizer")
    (folder / "tokenizer.json").write_text(text)
    found = refusal(CheckpointBrokenError, lambda: load.part(card.components["tokenizer"].class_, folder))
    assert found.startswith(f"{folder}: It cannot be read: ") and found.endswith(". Download it again.")


BREAKS_OUT = "{{ ''.__class__.__mro__[1].__subclasses__() }}"


@pytest.mark.parametrize("template", [BREAKS_OUT, "{% for", "{{ 1 / 0 }}", "{{ messages[7].content }}"])
def test_a_chat_template_that_breaks_out_or_fails_is_refused(card, tmp_path, tiny_folder, template):
    folder = shutil.copytree(tiny_folder / "tokenizer", tmp_path / "tokenizer")
    (folder / "chat_template.jinja").write_text(template)
    found = refusal(CheckpointBrokenError, lambda: load.part(card.components["tokenizer"].class_, folder))
    assert found.startswith(f"{folder}: It cannot be read: ")


def test_a_chat_template_that_breaks_out_over_one_prompt_alone_is_refused(request_for, tmp_path, tiny_folder):
    from torchport.run.path import run

    root = shutil.copytree(tiny_folder, tmp_path / "copy")
    file = root / "tokenizer" / "chat_template.jinja"
    trap = "{% if 'A cat' in messages[-1]['content'] | string %}" + BREAKS_OUT + "{% endif %}"
    file.write_text(trap + file.read_text())
    text = refusal(CheckpointBrokenError, lambda: run(request_for(stage="encode", checkpoint=str(root))))
    assert text.startswith(f"{root}/tokenizer: The prompt cannot be encoded with it: access to attribute '__class__'")


def test_a_vae_whose_channels_are_a_mapping_is_refused(card):
    config = {**card.tiny.components["vae"], "block_out_channels": {"a": 16}}
    refusal(CheckpointForeignError, lambda: load.build(card.components["vae"].class_, config, "float32", "folder"))


def test_the_cards_figures_are_the_published_classes(card, published):
    for name, module in published.items():
        assert card.components[name].parameters == sum(parameter.numel() for parameter in module.parameters())
        assert all(tensor.is_meta for tensor in everything(module).values())


def test_the_index_in_the_file_is_json_that_upstream_wrote(tiny_folder):
    assert json.loads((tiny_folder / "model_index.json").read_text())["_class_name"] == "HunyuanVideo15Pipeline"


WAN = {
    "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 16,
    "freq_dim": 16, "ffn_dim": 32, "num_layers": 1, "rope_max_seq_len": 32,
}  # fmt: skip


def test_a_plan_has_the_dtypes_that_a_run_loads():
    """Wan's class keeps norms, scales and the timestep's embedding in float32: as bfloat16 it is another network."""
    built = load.build("diffusers:WanTransformer3DModel", WAN, "bfloat16", "x")
    planned = load.published("diffusers:WanTransformer3DModel", WAN, "x", "bfloat16")
    dtypes = {name: tensor.dtype for name, tensor in built.state_dict().items()}
    assert {name: tensor.dtype for name, tensor in planned.state_dict().items()} == dtypes
    assert set(dtypes.values()) == {torch.bfloat16, torch.float32}


def test_buffers_of_a_module_without_weights_are_those_of_its_files(tmp_path):
    """As a pipeline reads the mean of its VAE's latents while it denoises."""
    from safetensors.torch import save_file

    class Scaled(torch.nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer("mean", torch.zeros(2))
            self.register_buffer("table", torch.ones(2), persistent=False)

    save_file({**Scaled().state_dict(), "mean": torch.tensor([3.0, 4.0])}, tmp_path / "model.safetensors")
    module = Scaled()
    module.weight = torch.nn.Parameter(module.weight.to("meta"))
    load.fill_buffers(module, tmp_path)
    assert module.mean.tolist() == [3.0, 4.0] and module.table.tolist() == [1.0, 1.0] and module.weight.is_meta
    load.fill_buffers(torch.nn.Linear(2, 2), tmp_path / "absent")  # one without buffers reads nothing
