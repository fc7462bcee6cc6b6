"""Mutated checkpoints and stage files: each is refused in one line, or loaded as its files have it, twice the same."""

import random
import shutil

import pytest
import torch
from fakes import fuzz_checkpoints, native_checkpoint
from safetensors.torch import load_file

from torchport import load, save
from torchport.compile import in_force
from torchport.errors import CheckpointBrokenError, TorchportError
from torchport.load import checkpoint, pickled
from torchport.load.foreign import reading

CHECKPOINTS, STAGE_FILES, BLOCK = 600, 400, 100
IDENTITY = {"model": "m", "height": 64, "width": 64, "frames": 5}


@pytest.fixture(scope="module")
def cases(card, tiny_folder, pack, tmp_path_factory):
    """Card, root and name of every component that can be made without a checkout."""
    native = pack.card("hyvideo")[0]
    folder = native_checkpoint.write(native, tmp_path_factory.mktemp("native"))
    own = [(card, tiny_folder, name) for name in sorted(card.components)]
    return own + [(native, folder, name) for name in native_checkpoint.NAMES]


def loaded(component, folder, name):
    """Returns a component as a run loads it: the door, then our own reading, or upstream's."""
    load.account_component(component, folder)
    cls = load.class_of(component.class_)
    if component.file is not None:
        return pickled.header(folder / component.file)
    if not issubclass(cls, torch.nn.Module):
        return load.part(component.class_, folder)
    if hasattr(cls, "from_config"):
        config = checkpoint.read_json(folder / "config.json")
        return load.fill(load.build(component.class_, config, component.dtype, str(folder)), folder, name)
    if component.dtype is not None:
        return load.text_encoder(component, folder, component.dtype, name)
    with reading(CheckpointBrokenError, str(folder), "Upstream cannot load its encoders", checkpoint.WHOLE):
        return cls.from_pretrained(folder)


def is_right(made, again, folder):
    """Whether two loadings are the same to the bit, whole, and, where no name changes, the files' own tensors."""
    if not isinstance(made, torch.nn.Module):
        return True
    one, two = (dict(module.state_dict()) | dict(module.named_buffers()) for module in (made, again))
    same = set(one) == set(two) and all(
        torch.equal(
            one[name].view(torch.uint8) if one[name].dim() else one[name],
            two[name].view(torch.uint8) if one[name].dim() else two[name],
        )
        for name in one
    )
    held = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    exact = all(
        torch.equal(one[name], held[name].to(one[name].dtype))
        for name in set(one) & set(held)
        if not held[name].isnan().any()
    )
    return same and exact and not any(tensor.is_meta for tensor in one.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", range(CHECKPOINTS // BLOCK))
def test_a_mutated_component_is_refused_in_one_line_or_loaded_right(cases, block, tmp_path):
    refused = 0
    for number in range(block * BLOCK, (block + 1) * BLOCK):
        draw = random.Random(number)
        card, root, name = draw.choice(cases)
        folder = shutil.copytree(root / card.folder(name, None), tmp_path / f"{number}")
        what = fuzz_checkpoints.mutate(folder, draw)
        try:
            with in_force.hushed(True):
                torch.manual_seed(1)
                made = loaded(card.components[name], folder, name)
                torch.manual_seed(2)
                assert is_right(made, loaded(card.components[name], folder, name), folder), (number, name, what)
        except TorchportError as error:
            assert "\n" not in str(error) and len(str(error)) < 1500, (number, name, what)
            refused += 1
        shutil.rmtree(folder)
    assert BLOCK / 4 < refused < BLOCK


@pytest.mark.slow
@pytest.mark.parametrize("block", range(STAGE_FILES // BLOCK))
def test_a_mutated_stage_file_of_a_hand_written_port_is_refused_in_one_line_or_read_right(block, tmp_path, caplog):
    caplog.set_level("ERROR")
    read = 0
    for number in range(block * BLOCK, (block + 1) * BLOCK):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        fuzz_checkpoints.write_latents(folder, random.Random(number))
        try:
            tensors, manifest = save.read(folder, "denoise", IDENTITY, {}, "torchport run")
            assert manifest is None and set(tensors) == {"latents"}, number
            assert tensors["latents"].ndim == 5 and tensors["latents"].is_floating_point(), number
            read += 1
        except TorchportError as error:
            assert "\n" not in str(error), number
    assert 0 < read < BLOCK
