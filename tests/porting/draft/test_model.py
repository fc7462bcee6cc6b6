"""Drafts of model cards, from the source of a model's classes."""

import ast
import subprocess
import sys

import pytest
import yaml

from torchport.porting.draft import model
from torchport.porting.draft.target_source import find

CODE = """
import torch
from up.parts import Base


class Net(torch.nn.Module):
    def __init__(self, channels: int, hidden_size=2048, heads_num=16, num_layers=40, rope_dim_list=[16, 56, 56],
                 patch_size=(1, 2, 2), qk_norm="rms", eps=1e-6, *, ffn_dim=8192):
        super().__init__()

    def forward(self, x, text, t):
        return x


class Vae(Base):
    pass


class Wrapped(torch.nn.Module):
    def __init__(self, options: Options):
        super().__init__()
"""
PARTS = """
import torch


class Base(torch.nn.Module):
    def __init__(self, base_dim=96, block_out_channels=(128, 256, 512), layers_per_block=3):
        super().__init__()
"""


@pytest.fixture
def checkout(world):
    world.write("checkout/up/net.py", CODE)
    world.write("checkout/up/parts.py", PARTS)
    return world


def drafted(world, *flags):
    code, out, error = world.new("model", "mine", *flags)
    assert code == 0, error
    return out, yaml.safe_load(world.read("configs/models/mine.yaml"))


def test_a_card_has_small_numbers_of_the_classs_own_arguments(checkout):
    out, card = drafted(checkout, "--entry", "up.net:Net", "--entry", "vae=up.net:Vae")
    assert card["tiny"]["components"] == {
        "network": {"hidden_size": 128, "heads_num": 4, "num_layers": 2, "rope_dim_list": [4, 14, 14], "ffn_dim": 128},
        "vae": {"base_dim": 16, "block_out_channels": [32, 64, 128], "layers_per_block": 1},
    }
    assert card["checkout"]["has"] == "up/net.py" and card["components"]["vae"]["class"] == "up.net:Vae"
    assert "fill in     tiny.components.network: channels, which have no default." in out
    assert out[-1] == "then        torchport check --static --path pack --upstream-path checkout"


def test_what_is_drafted_passes_the_static_check(checkout):
    drafted(checkout, "--entry", "up.net:Net")
    assert checkout.checked() == []


def test_the_stages_say_what_is_to_be_filled_in(checkout):
    drafted(checkout, "--entry", "transformer=up.net:Net", "--entry", "vae=up.net:Vae")
    text = checkout.read("patches/up/mine_stages.py")
    assert "call(x=..., text=..., t=...)" in text and 'network="transformer"' in text and 'parts=("vae",)' in text
    scope = {}
    exec(compile(text, "stages.py", "exec"), scope)
    for stage in scope["STAGES"]:
        arguments = {"latents": None} if stage.name == "decode" else {}
        with pytest.raises(NotImplementedError, match=f"fill in {stage.name}"):
            stage.run(None, None, None, None, **arguments)


def test_a_class_of_objects_asks_for_a_builder(checkout):
    out, card = drafted(checkout, "--entry", "up.net:Wrapped")
    assert card["tiny"]["components"] == {"network": {}}
    assert "fill in     build of network: its class takes options, which YAML cannot say (docs/cards.md)." in out


def test_a_clones_url_is_taken_without_its_password(checkout):
    checkout.write("checkout/.git/config", '[remote "origin"]\nurl = https://me:secret@example.com/up\n')
    _, card = drafted(checkout, "--entry", "up.net:Net", "--checkpoint", "a/b@c")
    assert card["checkout"]["url"] == "https://example.com/up" and card["checkpoint"] == "a/b@c"


def test_a_class_of_an_installed_package_has_a_range_and_no_checkout(world):
    entry = "diffusers.models.transformers.transformer_wan:WanTransformer3DModel"
    assert world.call("new", "model", "mine", "--entry", entry, "--out", "pack")[0] == 0
    card = yaml.safe_load(world.read("configs/models/mine.yaml"))
    assert "checkout" not in card and set(card["upstream"]) == {"diffusers"}
    code, out, _ = world.call("check", "--static", "--path", "pack")
    assert (code, out[-1]) == (1, "1 finding") and " is a draft: " in out[0]


def test_a_class_of_transformers_has_the_fields_of_its_configuration():
    target = find("transformers.models.t5.modeling_t5:T5EncoderModel", "here")
    small, lacking = model.tiny_arguments(model.card_arguments(target.source, target.node))
    assert small == {"vocab_size": 1024, "d_model": 128, "d_kv": 32, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    assert not lacking


@pytest.mark.parametrize(
    ("annotation", "lacks"),
    [
        ("", False),
        (": int", False),
        (": Optional[int]", False),
        (": int | tuple[int, int]", False),
        (": List[int]", True),
        (": 'List[int]'", True),
        (": tuple[int, ...]", True),
    ],
)
def test_a_list_without_a_default_is_left_to_fill_in(annotation, lacks):
    node = ast.parse(f"class Net:\n    def __init__(self, num_layers{annotation}): pass").body[0]
    small, lacking = model.tiny_arguments(model.arguments(None, node))
    assert (small, lacking) == (({}, ["num_layers"]) if lacks else ({"num_layers": 2}, []))


def test_small_arguments_build_networks_of_diffusers():
    """Of the 88 transformers and VAEs of diffusers 0.42, 77 are built so; these are the shipped cards' and others."""
    import diffusers
    import torch

    names = ["CogVideoXTransformer3DModel", "WanTransformer3DModel", "LTXVideoTransformer3DModel"]
    for name in [*names, "AutoencoderKLWan", "AutoencoderKL"]:
        made = getattr(diffusers, name)
        target = find(f"{made.__module__}:{name}", "here")
        small, _ = model.tiny_arguments(model.card_arguments(target.source, target.node))
        with torch.device("meta"):
            module = made(**small)
        assert sum(tensor.numel() for tensor in module.parameters()) < 2e7, name


def test_a_card_that_is_there_stays(checkout):
    drafted(checkout, "--entry", "up.net:Net")
    before = checkout.read("configs/models/mine.yaml")
    code, out, error = checkout.new("model", "mine", "--entry", "up.net:Vae")
    assert (code, out, checkout.read("configs/models/mine.yaml")) == (2, [], before)
    assert error == [
        "error[TP110] pack/configs/models/mine.yaml: It is there already. Choose another name, or delete it first."
    ]


@pytest.mark.parametrize(
    ("name", "entries", "says"),
    [
        ("my-model", ["up.net:Net"], "'my-model' is no name for a folder of patches. Write letters, digits and"),
        ("mine", ["up.net"], "--entry up.net: 'up.net' is no target. Write package.module:function, or package"),
        ("mine", ["up.net:Nett"], "There is no 'Nett' in up/net.py that a patch can name. Did you mean 'Net'?"),
        ("mine", ["up.net:Net.forward"], "up.net:Net.forward (up/net.py:11) is a method. Name a class, and a function"),
        ("mine", ["a=up.net:Net", "a=up.net:Vae"], "--entry a=up.net:Vae: 'a' is no new name of a component. Write"),
    ],
)
def test_what_no_card_can_name_is_refused(checkout, name, entries, says):
    code, out, (error,) = checkout.new("model", name, *(word for entry in entries for word in ("--entry", entry)))
    assert (code, out) == (2, []) and says in error and not checkout.pack.exists()


def test_neither_torch_nor_upstream_is_imported(checkout):
    """It answers at once, also where torch takes seconds to import."""
    code = (
        "import sys; from torchport import __main__ as m\n"
        "m.cli(sys.argv[1:], standalone_mode=False)\n"
        "assert not {'torch', 'jax', 'transformers', 'diffusers', 'up'} & set(sys.modules)"
    )
    flags = ["--out", "pack", "--upstream-path", "checkout"]
    for command in (
        ["new", "model", "mine", "--entry", "up.net:Net", *flags],
        ["new", "patch", "up.model:Net.forward", "--kind", "wrap", *flags],
    ):
        line = [sys.executable, "-P", "-c", code, *command]
        done = subprocess.run(line, capture_output=True, text=True, cwd=checkout.folder)
        assert done.returncode == 0, done.stderr


def refused(world, name, *flags):
    code, out, error = world.new("model", name, *flags)
    assert (code, out, len(error)) == (2, [], 1) and not world.pack.exists()
    return error[0]


def test_a_shipped_name_is_refused(checkout):
    said = refused(checkout, "wan", "--entry", "up.net:Net")
    assert "There is a model 'wan' already" in said and said.endswith("Choose another name.")


def test_a_network_that_is_no_module_is_refused(checkout):
    checkout.write("checkout/up/plain.py", "class Above:\n    pass\n\n\nclass Plain(Above):\n    pass\n")
    said = refused(checkout, "mine", "--entry", "up.plain:Plain")
    assert "up.plain:Plain (up/plain.py:5) is no torch.nn.Module, and the first class is the network" in said


def test_a_checkpoint_that_no_run_could_name_is_refused(checkout):
    said = refused(checkout, "mine", "--entry", "up.net:Net", "--checkpoint", "nosuchdir")
    assert "--checkpoint nosuchdir" in said


def test_an_entry_without_a_name_before_its_sign_is_refused(checkout):
    said = refused(checkout, "mine", "--entry", "=up.net:Net")
    assert "No component stands before '='. Write NAME=MODULE:CLASS." in said


def test_a_network_of_images_has_one_frame(checkout):
    checkout.write("checkout/up/net.py", CODE.replace("x, text, t", "images, t"))
    _, card = drafted(checkout, "--entry", "up.net:Net")
    assert card["frames"] == {"multiple_of": 1, "plus": 0}
    assert yaml.safe_load(checkout.read("configs/mine_demo.yaml"))["frames"] == 1


def test_the_stages_use_guidance(checkout):
    drafted(checkout, "--entry", "up.net:Net")
    assert checkout.read("patches/up/mine_stages.py").count('"guidance_scale"') == 2


def test_the_static_check_says_what_is_a_draft(checkout):
    drafted(checkout, "--entry", "up.net:Net")
    code, out, _ = checkout.call("check", "--static", "--path", "pack", "--upstream-path", "checkout")
    assert code == 1 and out[0].endswith("/mine_stages.py' is a draft: decode, denoise, encode, like. Fill them in.")


def test_a_name_with_a_newline_stays_one_line_and_a_reason_that_was_given_is_not_asked_for(checkout):
    out = checkout.folder / "two\nlines"
    flags = ("--kind", "wrap", "--out", out, "--upstream-path", "checkout", "--why", "It asks for CUDA.")
    code, lines, _ = checkout.call("new", "patch", "up.net:Net.forward", *flags)
    assert code == 0 and not [line for line in lines if not line.startswith(("wrote", "fill in", "then"))]
    [asked] = [line for line in lines if "In the entry: " in line]
    assert asked.startswith("fill in     In the entry: equivalence, and must_be_called")


def test_a_card_and_the_patches_of_its_package_lie_in_one_folder(checkout):
    drafted(checkout, "--entry", "up.net:Net")
    assert (
        checkout.call(
            *("new", "patch", "up.net:Net.forward", "--kind", "wrap", "--out", "pack", "--upstream-path", "checkout")
        )[0]
        == 0
    )
    assert [folder.name for folder in (checkout.folder / "pack" / "patches").iterdir()] == ["up"]
