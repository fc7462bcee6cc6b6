"""The one door: every tensor of every component of every card has its place, its shape and a dtype that fits."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from fakes import native_checkpoint
from fakes.families import HYVIDEO, loaded
from fakes.native_checkpoint import ENCODERS, glyphs
from safetensors.torch import load_file, save_file

from torchport import load
from torchport.compile import in_force
from torchport.config.card import Component
from torchport.errors import CheckpointBrokenError, CheckpointForeignError, CheckpointMissingError, LoadError
from torchport.stages import family as families
from torchport.task.family_file import family as family_of

OTHERS = [torch.int8, torch.uint8, torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(scope="module")
def native(pack):
    """The card whose encoders upstream loads itself."""
    return pack.card("hyvideo")[0]


@pytest.fixture(scope="module")
def native_folder(native, tmp_path_factory):
    """Its tiny encoders, in the layout of its checkpoint; its networks need a checkout."""
    return native_checkpoint.write(native, tmp_path_factory.mktemp("native"))


@pytest.fixture
def native_copy(native_folder, tmp_path):
    """A copy of them, which a test may damage."""
    return shutil.copytree(native_folder, tmp_path / "copy")


def accounted(card, root, name):
    """Sends a component through the door, as a run does."""
    with in_force.hushed(True):
        load.account_component(card.components[name], root / card.folder(name, None))


def refusal(kind, card, root, name):
    """Returns the one line of a refusal, which must be of this kind."""
    with pytest.raises(LoadError) as caught:
        accounted(card, root, name)
    assert type(caught.value) is kind and "\n" not in str(caught.value)
    return str(caught.value)


def file_of(card, root, name):
    (file,) = (root / card.folder(name, None)).glob("*.safetensors")
    return file


@pytest.mark.parametrize("name", native_checkpoint.NAMES)
def test_whole_components_of_a_native_repository_are_accounted_for(native, native_folder, name):
    accounted(native, native_folder, name)


def test_whole_components_in_diffusers_format_are_accounted_for(card, tiny_folder):
    for name in card.components:
        accounted(card, tiny_folder, name)


@pytest.mark.parametrize("name", ENCODERS)
def test_no_tensor_of_a_native_repositorys_encoder_can_be_missing(native, native_copy, name):
    file = file_of(native, native_copy, name)
    tensors = load_file(file)
    for missing in tensors:
        save_file({key: tensor for key, tensor in tensors.items() if key != missing}, file, {"format": "pt"})
        text = refusal(CheckpointForeignError, native, native_copy, name)
        assert " missing keys (first '" in text and "Name a checkpoint of this model and version." in text


@pytest.mark.parametrize("name", ["text_encoder", "text_encoder_2", "transformer", "vae"])
def test_no_tensor_of_a_component_in_diffusers_format_can_be_missing(card, tiny_folder, tmp_path, name):
    shutil.copytree(tiny_folder / name, tmp_path / name)
    file = file_of(card, tmp_path, name)
    tensors = load_file(file)
    for missing in tensors:
        save_file({key: tensor for key, tensor in tensors.items() if key != missing}, file, {"format": "pt"})
        refusal(CheckpointForeignError, card, tmp_path, name)


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
@pytest.mark.parametrize("name", ENCODERS)
def test_a_weight_of_a_native_repositorys_encoder_that_is_no_float_is_refused(native, native_copy, name, dtype):
    file = file_of(native, native_copy, name)
    tensors = load_file(file)
    changed = sorted(tensors)[len(tensors) // 2]
    save_file(tensors | {changed: tensors[changed].to(dtype)}, file, {"format": "pt"})
    text = refusal(CheckpointForeignError, native, native_copy, name)
    assert text.startswith(f"{file}: '{changed}' is of dtype ") and ", and the model's is float32. " in text


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
@pytest.mark.parametrize("name", ["text_encoder", "text_encoder_2", "transformer", "vae"])
def test_a_weight_in_diffusers_format_that_is_no_float_is_refused(card, tiny_folder, tmp_path, name, dtype):
    shutil.copytree(tiny_folder / name, tmp_path / name)
    file = file_of(card, tmp_path, name)
    tensors = load_file(file)
    changed = sorted(tensors)[-1]
    save_file(tensors | {changed: tensors[changed].to(dtype)}, file, {"format": "pt"})
    text = refusal(CheckpointForeignError, card, tmp_path, name)
    assert text.endswith(f"Name a checkpoint whose '{changed}' is of F64 or F32 or F16 or BF16.")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_floats_of_every_width_become_each_other(card, tiny_folder, native, native_copy, tmp_path, dtype):
    for name, root, owner in (
        ("vae", shutil.copytree(tiny_folder, tmp_path / "tiny"), card),
        ("text_encoder", native_copy, native),
    ):
        file = file_of(owner, root, name)
        save_file({key: tensor.to(dtype) for key, tensor in load_file(file).items()}, file, {"format": "pt"})
        accounted(owner, root, name)


@pytest.mark.parametrize("name", ENCODERS)
def test_a_native_repositorys_encoder_of_another_shape_or_cut_off_is_refused(native, native_copy, name):
    file = file_of(native, native_copy, name)
    tensors = load_file(file)
    changed = sorted(tensors)[0]
    save_file(tensors | {changed: torch.zeros(3)}, file, {"format": "pt"})
    assert "1 mismatched keys (first '" in refusal(CheckpointForeignError, native, native_copy, name)
    file.write_bytes(file.read_bytes()[:-1])
    assert "it is truncated" in refusal(CheckpointBrokenError, native, native_copy, name)


def test_only_the_tensors_that_a_card_calls_unread_may_be_more_than_the_class_takes(native, native_copy):
    file = file_of(native, native_copy, "text_encoder")
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": torch.zeros(2)}, file, {"format": "pt"})
    accounted(native, native_copy, "text_encoder")
    save_file(tensors | {"lm_head.bias": torch.zeros(2)}, file, {"format": "pt"})
    assert "1 unexpected keys (first 'lm_head.bias')" in refusal(
        CheckpointForeignError, native, native_copy, "text_encoder"
    )


def pickled(native, root, change=lambda tensors: tensors):
    """Has the second encoder's weights in `pytorch_model.bin`, as its publisher has them."""
    file = file_of(native, root, "text_encoder_2")
    tensors = load_file(file)
    file.unlink()
    torch.save(change(tensors), file.with_name("pytorch_model.bin"))
    return file.with_name("pytorch_model.bin")


def test_an_encoder_in_a_pickle_is_accounted_for_as_one_in_safetensors(native, native_copy):
    file = pickled(native, native_copy)
    accounted(native, native_copy, "text_encoder_2")
    tensors = torch.load(file, weights_only=True)
    torch.save({name: tensor for name, tensor in tensors.items() if "block.1" not in name}, file)
    assert " missing keys (first 'encoder.block.1." in refusal(
        CheckpointForeignError, native, native_copy, "text_encoder_2"
    )
    torch.save({name: tensor.to(torch.int8) for name, tensor in tensors.items()}, file)
    assert " is of dtype I8, and the model's is float32." in refusal(
        CheckpointForeignError, native, native_copy, "text_encoder_2"
    )


class Evil:
    """Runs a command when it is unpickled, wherever that is allowed."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


@pytest.mark.parametrize("name", ["text_encoder_2", "glyph_encoder"])
def test_a_pickle_that_runs_code_is_refused_and_runs_nothing(native, native_copy, name):
    file = pickled(native, native_copy) if name == "text_encoder_2" else glyphs(native, native_copy)
    torch.save({"a": Evil(native_copy / "RAN")}, file)
    text = refusal(CheckpointBrokenError, native, native_copy, name)
    assert text.startswith(f"{file}: Not tensors by name: ") and not (native_copy / "RAN").exists()


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"x" * 100, None])
def test_a_pickle_that_cannot_be_read_is_refused(native, native_copy, data):
    file = glyphs(native, native_copy)
    file.write_bytes(file.read_bytes()[:-100] if data is None else data)
    assert refusal(CheckpointBrokenError, native, native_copy, "glyph_encoder").startswith(f"{file}: Not tensors by ")
    torch.save([torch.zeros(2)], file)
    refusal(CheckpointBrokenError, native, native_copy, "glyph_encoder")
    file.unlink()
    assert refusal(CheckpointMissingError, native, native_copy, "glyph_encoder") == (
        f"{file}: The file is missing. Download the checkpoint again, whole."
    )


def test_a_pickles_weights_are_floats_and_what_upstream_leaves_out_may_be_anything(native, native_copy):
    file = glyphs(native, native_copy)
    inner = "module.text_tower.encoder.final_layer_norm.weight"
    torch.save({"state_dict": {"module.count": torch.zeros(1, dtype=torch.int64), inner: torch.zeros(2)}}, file)
    accounted(native, native_copy, "glyph_encoder")
    torch.save({"state_dict": {inner: torch.zeros(2, dtype=torch.int8)}}, file)
    assert f"{file}: '{inner}' is of dtype I8, " in refusal(
        CheckpointForeignError, native, native_copy, "glyph_encoder"
    )


@pytest.mark.parametrize(("change", "fact"), [
    ({"model_type": "qwen2"}, "'model_type' is 'qwen2'. It must be 'qwen2_5_vl'"),
    ({"model_type": None}, "'model_type' is None"),
    ({"dtype": "no dtype"}, "'dtype' is 'no dtype'. It must be one of float64, float32, float16, bfloat16."),
    ({"dtype": "float8_e4m3fn"}, "'dtype' is 'float8_e4m3fn'"),
    ({"torch_dtype": "int8"}, "'torch_dtype' is 'int8'"),
])  # fmt: skip
def test_a_configuration_of_another_class_or_with_a_dtype_that_is_none_is_refused(native, native_copy, change, fact):
    file = native_copy / native.folder("text_encoder", None) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert refusal(CheckpointForeignError, native, native_copy, "text_encoder").startswith(f"{file}: {fact}")


def test_two_loadings_of_one_checkpoint_are_the_same_to_the_bit(native, native_folder):
    """What the door lets through has nothing that is drawn."""
    for name in ENCODERS:
        accounted(native, native_folder, name)
        found = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            cls = load.class_of(native.components[name].class_)
            with in_force.hushed(True):
                found.append(cls.from_pretrained(native_folder / native.folder(name, None)))
        one, two = (dict(module.state_dict()) | dict(module.named_buffers()) for module in found)
        assert set(one) == set(two) and all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("model", ["hunyuan", "hyvideo"])
def test_every_component_of_every_card_goes_through_the_door(pack, model, request_for):
    """Each is a part or the network of a stage, or among what a stage's own loading reads; or it has no weights."""
    card, document = pack.card(model)
    family = family_of(pack, card, document)
    settings = families.Settings("", "", 0, 64, 64, 5, 1, 6.0, {}, None, image=Path("picture.png"))
    seen = set()
    for stage in family.STAGES:
        assert bool(stage.load) == bool(stage.loads(settings)), "what loads says what it reads"
        seen |= {*stage.parts, *stage.loads(settings), stage.network}
    assert set(card.components) - seen <= {"scheduler"}


def test_an_image_encoder_is_asked_for_only_where_there_is_an_image():
    settings = families.Settings("", "", 0, 64, 64, 5, 1, 6.0, {}, None)
    assert "vision_encoder" not in loaded(HYVIDEO).encoders(settings)


def test_a_configuration_that_asks_for_a_million_layers_is_refused_soon(card, tiny_folder, tmp_path):
    for name, key in (("transformer", "num_layers"), ("text_encoder", "num_hidden_layers")):
        shutil.copytree(tiny_folder / name, tmp_path / name)
        file = tmp_path / name / "config.json"
        config = json.loads(file.read_text()) | {key: 10**9}
        config.pop("layer_types", None)
        file.write_text(json.dumps(config))
        text = refusal(CheckpointForeignError, card, tmp_path, name)
        assert "it asks for more than 20000 parameters" in text or f"'{key}' is 1e+09. It must be at most" in text


@pytest.mark.parametrize(
    ("name", "old", "published"),
    [("text_encoder", "language_model.", "model."), ("vision_encoder", "", "vision_model.")],
)
def test_names_as_they_are_published_are_the_classes_own_by_transformers_rules(
    native, native_copy, name, old, published
):
    """The published files are older than the classes' names; what transformers renames is not missing."""
    file = file_of(native, native_copy, name)
    tensors = {
        published + key.removeprefix(old) if key.startswith(old) else key: tensor
        for key, tensor in load_file(file).items()
    }
    whole = tensors | ({"lm_head.weight": torch.zeros(1024, 64)} if name == "text_encoder" else {})
    save_file(whole, file, {"format": "pt"})
    accounted(native, native_copy, name)
    lost = next(key for key in whole if key.startswith(published))
    save_file({key: tensor for key, tensor in whole.items() if key != lost}, file, {"format": "pt"})
    assert "1 missing keys" in refusal(CheckpointForeignError, native, native_copy, name)


def int8_beside(folder, index):
    """Puts sound weights under an index, and integers where transformers looks first."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    file.rename(folder / "sound.safetensors")
    save_file({name: tensor.to(torch.int8) for name, tensor in tensors.items()}, file, {"format": "pt"})
    (folder / index).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "sound.safetensors")}))


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "other.safetensors.index.json"])
def test_weights_beside_an_index_that_does_not_name_them_are_refused(native, native_copy, index):
    folder = native_copy / native.folder("text_encoder", None)
    int8_beside(folder, index)
    assert refusal(CheckpointForeignError, native, native_copy, "text_encoder") == (
        f"{folder}: It holds model.safetensors, which {index} does not name. Keep one set of weights in this folder."
    )


def test_weights_under_names_that_transformers_does_not_read_are_refused_as_such(native, native_copy):
    file = file_of(native, native_copy, "text_encoder")
    file.rename(file.with_name("other.safetensors"))
    assert refusal(CheckpointForeignError, native, native_copy, "text_encoder") == (
        f"{file.parent}: It holds other.safetensors, and neither model.safetensors nor model.safetensors.index.json. "
        "Give the files the names under which they are published."
    )


def test_a_configuration_cannot_name_weights_that_no_door_has_seen(native, native_copy):
    file = file_of(native, native_copy, "text_encoder")
    (file.parent / "sub").mkdir()
    tensors = {name: tensor.to(torch.int8) for name, tensor in load_file(file).items()}
    save_file(tensors, file.parent / "sub" / "x.safetensors", {"format": "pt"})
    config = file.with_name("config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"transformers_weights": "sub/x.safetensors"}))
    assert refusal(CheckpointForeignError, native, native_copy, "text_encoder") == (
        f"{config}: 'transformers_weights' is 'sub/x.safetensors'. "
        "Remove it, and keep the weights in model.safetensors."
    )


def test_files_with_holes_of_gigabytes_are_refused_unread(native, native_copy):
    file = file_of(native, native_copy, "text_encoder")
    with file.with_name("config.json").open("wb") as stream:
        stream.truncate(300 << 30)
    text = refusal(CheckpointBrokenError, native, native_copy, "text_encoder")
    assert text.endswith(f"config.json: Not JSON of a checkpoint: {300 << 30} bytes. Download the file again.")
    with file.open("wb") as stream:
        stream.write((300 << 30).to_bytes(8, "little"))
        stream.truncate(400 << 30)
    text = refusal(CheckpointBrokenError, native, native_copy, "text_encoder")
    assert text == f"{file}: {400 << 30} bytes, and not safetensors. Download the file again."


@pytest.mark.parametrize(
    ("name", "file", "change", "said"),
    [
        (
            "vae",
            "config.json",
            {"scaling_factor": "x"},
            "'scaling_factor' is 'x'. It must be like its default, 1.03682",
        ),
        ("vae", "config.json", {"scaling_factor": float("nan")}, "'scaling_factor' is 'nan'. It must be like"),
        ("vae", "config.json", {"block_out_channels": [16, "x"]}, "'block_out_channels' is "),
        ("transformer", "config.json", {"rope_theta": "x"}, "'rope_theta' is 'x'. It must be like its default, 256.0"),
        ("transformer", "config.json", {"num_layers": True}, "'num_layers' is 'True'. It must be like its default, 54"),
        (
            "transformer",
            "config.json",
            {"_class_name": "Nope"},
            "It is of a 'Nope'. It must be of a Hunyuan",
        ),
        (
            "scheduler",
            "scheduler_config.json",
            {"shift": float("nan")},
            "'shift' is 'nan'. It must be like its",
        ),
        ("scheduler", "scheduler_config.json", {"_class_name": "DDIMScheduler"}, "It is of a 'DDIMScheduler'. It must"),
        ("guider", "guider_config.json", {"enabled": "no"}, "'enabled' is 'no'. It must be like its default, True"),
    ],
)
def test_a_value_of_a_configuration_that_upstream_would_stop_at_later_is_refused(
    card, tiny_folder, tmp_path, name, file, change, said
):
    path = shutil.copytree(tiny_folder / name, tmp_path / name) / file
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert refusal(CheckpointForeignError, card, tmp_path, name).startswith(f"{path}: {said}")


def test_numbers_of_either_kind_and_values_that_are_left_open_pass(card, tiny_folder, tmp_path):
    path = shutil.copytree(tiny_folder / "scheduler", tmp_path / "scheduler") / "scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"shift": 7, "shift_terminal": None, "base_shift": None}))
    accounted(card, tmp_path, "scheduler")


def test_a_transformers_module_is_built_from_its_file_unless_the_card_says_how(tmp_path):
    def records(**entry):
        return load.records_config(Component.model_validate({"class": "transformers:T5EncoderModel"} | entry), tmp_path)

    assert not records()
    (tmp_path / "config.json").write_text("{}")
    assert records() and records(**{"class": "diffusers:AutoencoderKL"})
    assert not records(published={"d_model": 64}) and not records(file="model.pt")
    assert not records(**{"class": "transformers:T5Tokenizer"})
