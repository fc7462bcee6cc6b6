"""The tiny checkpoint: seeded, whole or not there, nothing in it zero or constant, the tokenizer's prefix exact."""

import errno
import hashlib
import inspect
import os
import re
from pathlib import Path

import pytest
import torch
from diffusers import HunyuanVideo15Pipeline
from fakes.families import HUNYUAN
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from torchport import load
from torchport.config.card import Trained
from torchport.errors import (
    BadValueError,
    CheckpointBrokenError,
    CheckpointForeignError,
    CheckpointMissingError,
    OutputError,
)
from torchport.load import tiny
from torchport.task import accept


def test_written_twice_it_is_the_same_byte_for_byte(card, tiny_folder, tmp_path, monkeypatch, unchanged):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    again = tiny.write(card, HUNYUAN)
    assert again == tmp_path / "torchport" / "tiny" / tiny_folder.name
    assert unchanged(again) == unchanged(tiny_folder)
    assert [folder.name for folder in again.parent.iterdir()] == [again.name]


def test_it_is_written_once_and_then_only_found(card, tiny_folder):
    assert tiny.write(card, HUNYUAN, raising(AssertionError("it was written again"))) == tiny_folder


def test_every_parameter_is_drawn_none_zero_none_constant(tiny_folder):
    count = 0
    for file in tiny_folder.rglob("*.safetensors"):
        for name, tensor in load_file(file).items():
            if tensor.is_floating_point():
                count += 1
                where = f"{file.parent.name}/{name}"
                assert torch.isfinite(tensor).all() and (tensor != 0).any(), where
                assert tensor.numel() == 1 or (tensor != tensor.flatten()[0]).any(), where
    assert count > 200


def test_equal_shapes_get_different_numbers(tiny_folder):
    tensors = load_file(tiny_folder / "transformer" / "diffusion_pytorch_model.safetensors")
    drawn = [tensor.flatten()[:8] for name, tensor in sorted(tensors.items()) if tensor.numel() >= 8]
    assert len({tuple(values.tolist()) for values in drawn}) == len(drawn)


def test_the_scale_is_that_of_the_card():
    module = torch.nn.Linear(1000, 400)
    tiny.randomise(module, 1, "a", 2.0)
    assert abs(module.weight.std().item() * 1000**0.5 - 2.0) < 0.05
    assert abs(module.bias.mean().item()) < 0.02 and abs(module.bias.std().item() - 0.1) < 0.02
    norm = torch.nn.LayerNorm(1000)
    tiny.randomise(norm, 1, "a", 2.0)
    assert abs(norm.weight.mean().item() - 1) < 0.02


def test_no_order_and_no_global_seed_matters():
    def drawn(seed, what="a"):
        torch.manual_seed(seed)
        module = torch.nn.Linear(3, 3)
        tiny.randomise(module, 1, what, 1.0)
        return module.weight

    assert torch.equal(drawn(1), drawn(2)) and not torch.equal(drawn(1), drawn(1, "b"))


def test_the_tokenizers_prefix_is_exactly_what_upstream_crops(card, tiny_folder):
    tokenizer = load.part(card.components["tokenizer"].class_, tiny_folder / "tokenizer")
    function = HunyuanVideo15Pipeline._get_mllm_prompt_embeds
    defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    for text in ("A cat", "0", " ", "Zebras"):
        messages = [{"role": "system", "content": defaults["system_message"]}, {"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        assert tokenizer.decode(ids[108:]).startswith(text) and not tokenizer.decode(ids[107:]).startswith(text)
    assert card.tiny.tokenizers["tokenizer"].prefix_tokens == 108 == defaults["crop_start"]


def test_a_vocabulary_that_is_too_small_for_the_prefix_is_refused(card):
    spec = card.tiny.tokenizers["tokenizer"].model_copy(update={"vocab_size": 260})
    with pytest.raises(BadValueError) as caught:
        tiny.tokenizer(tiny.class_of(card.components["tokenizer"].class_), spec, "tiny.tokenizers.tokenizer of m")
    text = str(caught.value)
    assert text.startswith("tiny.tokenizers.tokenizer of m: 'vocab_size' is 260, and the template's prefix takes ")
    assert text.endswith(" tokens. Raise it until the prefix takes at most 108.")


def test_a_unigram_tokenizer_is_the_same_each_time_that_it_is_trained(pack):
    from transformers import T5Tokenizer

    spec = pack.card("cogvideox")[0].tiny.tokenizers["tokenizer"]
    first, second = (tiny.tokenizer(T5Tokenizer, spec, "")._tokenizer.to_str() for _ in range(2))
    assert first == second


def test_the_folder_is_named_by_all_that_determines_its_bytes(card, monkeypatch):
    other = card.model_copy(update={"tiny": card.tiny.model_copy(update={"seed": 1})})
    assert tiny.folder_of(other, HUNYUAN) != tiny.folder_of(card, HUNYUAN) == tiny.folder_of(card.model_copy(), HUNYUAN)
    before = tiny.folder_of(card, HUNYUAN)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9")
    assert tiny.folder_of(card, HUNYUAN) != before


def raising(error):
    """Returns a function that raises, whatever it is given."""

    def call(*args):
        raise error

    return call


@pytest.fixture
def saving(card, tmp_path, monkeypatch):
    """Writes a stand-in checkpoint into a cache of its own; what happens while it is written is given."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def write(then=lambda folder: None):
        def arrange(make, folder):
            (folder / "model_index.json").write_text("{}")
            then(folder)

        return tiny.write(card, HUNYUAN, arrange)

    return write


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("upstream"), SystemExit(1)])
def test_killed_while_writing_it_leaves_nothing_and_the_next_writes_it_whole(saving, tmp_path, error):
    with pytest.raises(type(error)):
        saving(raising(error))
    assert list((tmp_path / "torchport" / "tiny").iterdir()) == []
    assert (saving() / "model_index.json").read_text() == "{}"


FULL = "No space left on device (os error 28)"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        SafetensorError(f"Error while serializing: I/O error: {FULL}"),
        Exception(FULL),  # what tokenizers raises
    ],
)
def test_a_full_cache_is_refused_and_leaves_nothing(saving, tmp_path, error):
    with pytest.raises(OutputError) as caught:
        saving(raising(error))
    folder = tmp_path / "torchport" / "tiny"
    assert str(caught.value) == (
        f"{folder}: The cache folder cannot be written: No space left on device. "
        "Free some space there, or name another folder with TORCHPORT_CACHE."
    )
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("error", [Exception("upstream"), SafetensorError("no dtype"), RuntimeError(FULL)])
def test_what_is_no_failure_to_write_is_not_taken_for_one(saving, error):
    with pytest.raises(type(error), match=re.escape(str(error))):
        saving(raising(error))


def test_a_cache_that_cannot_be_made_is_refused(saving, tmp_path):
    (tmp_path / "torchport").write_text("a file")
    with pytest.raises(OutputError) as caught:
        saving()
    assert str(caught.value) == (
        f"{tmp_path}/torchport: The cache folder cannot be made: File exists. Name another folder with TORCHPORT_CACHE."
    )


def test_another_process_that_was_faster_has_written_the_same(card, saving, tmp_path):
    def faster(folder):
        tiny.folder_of(card, HUNYUAN).mkdir()
        (tiny.folder_of(card, HUNYUAN) / "model_index.json").write_text("theirs")
        sha = hashlib.sha256(b"theirs").hexdigest()
        (tiny.folder_of(card, HUNYUAN) / tiny.DONE).write_text(f"{sha}  model_index.json\n")

    folder = saving(faster)
    assert (folder / "model_index.json").read_text() == "theirs" and len(list(folder.parent.iterdir())) == 1


def _damage(file, how):
    match how:
        case "truncated":
            file.write_bytes(file.read_bytes()[:-1])
        case "garbage":
            file.write_bytes(bytes(255 - byte for byte in file.read_bytes()))
        case "empty":
            file.write_bytes(b"")
        case "missing":
            file.unlink()
        case "folder":
            file.unlink()
            file.mkdir()


@pytest.mark.parametrize("name", ["model_index.json", tiny.DONE])
@pytest.mark.parametrize("how", ["truncated", "garbage", "empty", "missing", "folder"])
def test_a_damaged_file_is_written_again_and_said_in_a_line(saving, unchanged, caplog, name, how):
    folder = saving()
    before = unchanged(folder)
    _damage(folder / name, how)
    caplog.clear()  # of the first writing, if a test before left the log at INFO
    with caplog.at_level("INFO", logger="torchport"):
        assert saving() == folder and unchanged(folder) == before
    assert [record.getMessage() for record in caplog.records] == [
        f"write the tiny checkpoint of hunyuan to {folder} again, since a file of it is damaged ..."
    ]
    assert list(folder.parent.iterdir()) == [folder]


def test_what_is_in_the_folders_place_and_what_was_added_to_it_goes(card, saving, unchanged):
    folder = saving()
    before = unchanged(folder)
    (folder / "more.safetensors").write_text("")
    assert unchanged(saving()) == before
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    assert unchanged(saving(lambda _: folder.mkdir())) == before


@pytest.fixture
def trained(card, tmp_path, monkeypatch):
    """Makes the card with trained weights of its VAE, by name, and perhaps a wrong checksum; in a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def made(tensors, sha256=None):
        file = tmp_path / "vae.safetensors"
        save_file(tensors, file)
        right = hashlib.sha256(file.read_bytes()).hexdigest()
        return card.with_trained({"vae": Trained(file=str(file), sha256=sha256 or right)})

    return made


NAME = "decoder.conv_out.conv.bias"


def test_trained_tensors_take_the_place_of_drawn_ones_and_the_rest_stays(card, trained):
    theirs = tiny.write(trained({NAME: torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)}), HUNYUAN)
    mine = tiny.write(card.with_trained({}), HUNYUAN)
    first, second = (load_file(path / "vae" / "diffusion_pytorch_model.safetensors") for path in (theirs, mine))
    assert first[NAME].tolist() == [1.0, 2.0, 3.0] and first[NAME].dtype == torch.float32
    assert [name for name in first if not torch.equal(first[name], second[name])] == [NAME]
    assert theirs.name != mine.name


@pytest.mark.parametrize(
    ("tensors", "fact"),
    [
        ({"decoder.nothing": torch.ones(3)}, "It has 'decoder.nothing' of [3]"),
        ({NAME: torch.ones(4)}, f"It has '{NAME}' of [4]"),
    ],
)
def test_trained_tensors_of_another_module_are_refused(trained, tensors, fact):
    card = trained(tensors)
    with pytest.raises(CheckpointForeignError) as caught:
        tiny.write(card, HUNYUAN)
    class_name = "AutoencoderKLHunyuanVideo15"
    assert str(caught.value).endswith(
        f"{fact}, and the {class_name} of the card has not. Train it again for this card."
    )


def test_a_trained_file_that_is_not_the_cards_is_refused(trained):
    card = trained({NAME: torch.ones(3)}, sha256="0" * 64)
    with pytest.raises(CheckpointBrokenError) as caught:
        tiny.write(card, HUNYUAN)
    assert str(caught.value).endswith(
        "vae.safetensors: Its checksum is not the one in the card. "
        "Restore the file, or run with --checkpoint tiny:random."
    )


def test_a_trained_file_that_is_not_there_is_refused(trained, tmp_path):
    card = trained({NAME: torch.ones(3)})
    (tmp_path / "vae.safetensors").unlink()
    with pytest.raises(CheckpointMissingError) as caught:
        tiny.write(card, HUNYUAN)
    assert "There is no such file of trained tiny weights. Restore the file" in str(caught.value)


def test_tiny_random_leaves_trained_weights_out(pack, request_for):
    assert accept(request_for(checkpoint="tiny:random")).card.tiny.trained == {}
    found = accept(request_for())
    assert found.card.tiny.trained == pack.card("hunyuan")[0].tiny.trained and found.is_tiny
    assert all(Path(each.file).is_absolute() for each in found.card.tiny.trained.values())
