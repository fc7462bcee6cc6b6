"""LoRA files: what they add to which weight, under whatever names, and what is refused of them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from torchport import load
from torchport.config.card import LoraName, RenameRule
from torchport.errors import (
    CheckpointBrokenError,
    CheckpointForeignError,
    CheckpointMissingError,
    DeadRuleError,
    TorchportError,
)
from torchport.load import Layout, lora

LAYERS = "fakes.modules:Layers"
RANK = 2


def refusal(kind, call):
    with pytest.raises(TorchportError) as caught:
        call()
    assert type(caught.value) is kind
    return str(caught.value)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


SHAPES = {name: tensor.shape for name, tensor in load.published(LAYERS, {}).state_dict().items()}
STATE = {name: drawn(*shape, seed=number) for number, (name, shape) in enumerate(SHAPES.items())}
DOWN, UP = drawn(RANK, 4), drawn(6, RANK)
"""A pair for `blocks.1.to_q`."""
TO_Q = "blocks.1.to_q"


@pytest.fixture
def filled(tmp_path):
    """Fills the module, with the tensors of LoRA files merged in."""

    def fill(*files, names=(), rename=(), state=STATE, dtype="float32", scales=None, metadata=None):
        base = tmp_path / "base"
        base.mkdir(exist_ok=True)
        save_file(state, base / "weights.safetensors")
        loras = []
        for number, tensors in enumerate(files):
            file = tmp_path / f"lora{number}.safetensors"
            save_file({key: tensor.clone() for key, tensor in tensors.items()}, file, metadata)
            loras.append(load.Lora(file, (scales or [1.0] * len(files))[number]))
        places = [f"card:{number}" for number in range(len(names))]
        layout = Layout(rename=rename, places=["card"] * len(rename), loras=load.Loras("network", loras, names, places))
        return load.fill(load.build(LAYERS, {}, dtype, "card:1"), base, "network", layout).state_dict()

    return fill


def assert_added(state, **differences):
    """Checks that these tensors alone have changed, by these differences; a name has `__` for a dot."""
    expected = {name.replace("__", "."): difference for name, difference in differences.items()}
    for name, tensor in STATE.items():
        torch.testing.assert_close(state[name], tensor + expected.get(name, 0), rtol=0, atol=1e-6, msg=name)
        assert name in expected or torch.equal(state[name], tensor)


SPELLINGS = {
    "peft": ("blocks.1.to_q.lora_A.weight", "blocks.1.to_q.lora_B.weight"),
    "diffusers": ("transformer.blocks.1.to_q.lora_A.weight", "transformer.blocks.1.to_q.lora_B.weight"),
    "adapter": tuple(f"base_model.model.blocks.1.to_q.lora_{half}.default.weight" for half in "AB"),
    "old diffusers": ("transformer.blocks.1.to_q.lora.down.weight", "transformer.blocks.1.to_q.lora.up.weight"),
    "common": ("diffusion_model.blocks.1.to_q.lora_down.weight", "diffusion_model.blocks.1.to_q.lora_up.weight"),
    "underscores": ("lora_unet_blocks_1_to_q.lora_down.weight", "lora_unet_blocks_1_to_q.lora_up.weight"),
    "component": ("network.blocks.1.to_q.lora_A.weight", "network.blocks.1.to_q.lora_B.weight"),
}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_pair_adds_its_product_under_every_spelling(filled, spelling):
    down, up = SPELLINGS[spelling]
    state = filled({down: DOWN, up: UP}, scales=[0.5])
    assert_added(state, blocks__1__to_q__weight=0.5 * UP @ DOWN)


def test_alpha_over_the_rank_scales_a_pair(filled):
    pair = {"lora_unet_blocks_1_to_q.lora_down.weight": DOWN, "lora_unet_blocks_1_to_q.lora_up.weight": UP}
    state = filled({**pair, "lora_unet_blocks_1_to_q.alpha": torch.tensor(3.0)})
    assert_added(state, blocks__1__to_q__weight=3 / RANK * UP @ DOWN)


@pytest.mark.parametrize(
    ("config", "factor"),
    [
        ({"transformer.lora_alpha": 8, "transformer.r": 2}, 4.0),
        ({"lora_alpha": 8, "alpha_pattern": {"to_out": 1, "to_q": 3}}, 1.5),
        ({"network.lora_alpha": 8, "network.use_rslora": True}, 8 / 2**0.5),
        ({"text_encoder.lora_alpha": 8}, 1.0),
    ],
)
def test_pefts_configuration_in_the_metadata_scales_a_pair(filled, config, factor):
    tensors = dict(zip(SPELLINGS["diffusers"], (DOWN, UP), strict=True))
    state = filled(tensors, metadata={"lora_adapter_metadata": json.dumps(config)})
    assert_added(state, blocks__1__to_q__weight=factor * UP @ DOWN)


def test_a_convolution_takes_a_pair_of_convolutions(filled):
    down, up = drawn(RANK, 2, 1, 2, 2), drawn(4, RANK, 1, 1, 1)
    state = filled({"patch.lora_A.weight": down, "patch.lora_B.weight": up})
    added = torch.einsum("or,rithw->oithw", up[:, :, 0, 0, 0], down)
    assert_added(state, patch__weight=added)
    inputs, zero = drawn(1, 2, 3, 4, 4), torch.zeros(4)
    conv = torch.nn.functional.conv3d
    both = conv(conv(inputs, down, stride=(1, 2, 2)), up) + conv(inputs, STATE["patch.weight"], zero, stride=(1, 2, 2))
    torch.testing.assert_close(conv(inputs, state["patch.weight"], zero, stride=(1, 2, 2)), both)


def test_whole_differences_are_added_to_weights_and_biases(filled):
    differences = {"blocks.0.norm.diff": drawn(6), "blocks.0.norm.diff_b": drawn(6, seed=1), "patch.diff_b": drawn(4)}
    state = filled({f"diffusion_model.{name}": tensor for name, tensor in differences.items()}, scales=[2.0])
    norm, norm_bias, patch = (2 * tensor for tensor in differences.values())
    assert_added(state, blocks__0__norm__weight=norm, blocks__0__norm__bias=norm_bias, patch__bias=patch)


def test_the_bias_of_a_pair_is_scaled_as_the_pair_is(filled):
    tensors = {**dict(zip(SPELLINGS["peft"], (DOWN, UP), strict=True)), "blocks.1.to_q.lora_B.bias": drawn(6)}
    state = filled({**tensors, "blocks.1.to_q.alpha": torch.tensor(1.0)})
    assert_added(state, blocks__1__to_q__weight=0.5 * UP @ DOWN, blocks__1__to_q__bias=0.5 * drawn(6))


def test_several_files_add_up_each_with_its_scale(filled):
    pair = dict(zip(SPELLINGS["peft"], (DOWN, UP), strict=True))
    state = filled(pair, pair, {"blocks.0.norm.diff": drawn(6)}, scales=[0.5, -0.25, 1.0])
    assert_added(state, blocks__1__to_q__weight=0.25 * UP @ DOWN, blocks__0__norm__weight=drawn(6))


def test_the_sum_is_rounded_once_to_the_modules_dtype(filled):
    half = {name: tensor.to(torch.bfloat16) for name, tensor in STATE.items()}
    state = filled(dict(zip(SPELLINGS["peft"], (DOWN, UP), strict=True)), state=half, dtype="bfloat16")
    name = f"{TO_Q}.weight"
    assert torch.equal(state[name], (half[name].float() + UP @ DOWN).to(torch.bfloat16))
    assert not torch.equal(state[name], half[name] + (UP @ DOWN).to(torch.bfloat16))  # as rounding twice would have it
    assert all(torch.equal(state[other], half[other]) for other in STATE if other != name)


NAMES = (LoraName(match=r"blocks\.(\d+)\.to_q", to=r"blocks.\1.self_attn.q"),)


@pytest.mark.parametrize("name", ["diffusion_model.blocks.1.self_attn.q", "lora_unet_blocks_1_self_attn_q", TO_Q])
def test_the_cards_rules_say_what_files_call_a_layer(filled, name):
    state = filled({f"{name}.lora_down.weight": DOWN, f"{name}.lora_up.weight": UP}, names=NAMES)
    assert_added(state, blocks__1__to_q__weight=UP @ DOWN)


@pytest.mark.parametrize("name", ["layers.1.query", "lora_unet_layers_1_query", TO_Q])
def test_the_checkpoints_names_are_known_where_the_card_renames_them(filled, name):
    published = {key.replace("blocks.", "layers.").replace("to_q", "query"): tensor for key, tensor in STATE.items()}
    rename = (
        RenameRule(match=r"layers\.(\d+)\.query\.(.*)", to=r"blocks.\1.to_q.\2"),
        RenameRule(match=r"layers\.(.*)", to=r"blocks.\1"),
    )
    state = filled({f"{name}.lora_A.weight": DOWN, f"{name}.lora_B.weight": UP}, rename=rename, state=published)
    assert_added(state, blocks__1__to_q__weight=UP @ DOWN)


def pair(name=TO_Q, down=DOWN, up=UP, **more):
    return {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up, **more}


@pytest.mark.parametrize(
    ("tensors", "kind", "text"),
    [
        (
            pair("blocks.7.to_q"),
            CheckpointForeignError,
            "'blocks.7.to_q.lora_A.weight' is no layer of 'network'. The nearest are 'blocks.1.to_q', 'blocks.0.to_q', "
            "'blocks.1.to_out'. Name a LoRA that was made for this model, or add a rule to the card's 'lora_names'.",
        ),
        (
            pair("lora_unet_blocks_7_to_q"),
            CheckpointForeignError,
            "'lora_unet_blocks_7_to_q.lora_A.weight' is no layer of 'network'. The nearest are 'blocks_1_to_q', "
            "'blocks_0_to_q', 'blocks_1_to_out'. Name a LoRA that was made for this model, or add a rule to the card's "
            "'lora_names'.",
        ),
        (
            {"blocks.1.to_q.lora_A.weight": DOWN},
            CheckpointBrokenError,
            "'blocks.1.to_q.lora_A.weight' is there, and 'blocks.1.to_q' lacks the other half. A LoRA has pairs, "
            "lora_A and lora_B or lora_down and lora_up: download the file again.",
        ),
        (
            {"blocks.1.to_q.alpha": torch.tensor(1.0)},
            CheckpointBrokenError,
            "'blocks.1.to_q.alpha' is there, and 'blocks.1.to_q' lacks both halves. A LoRA has pairs, lora_A and "
            "lora_B or lora_down and lora_up: download the file again.",
        ),
        (
            pair(up=drawn(6, 3)),
            CheckpointForeignError,
            "'blocks.1.to_q.lora_A.weight' has rank 2, and 'blocks.1.to_q.lora_B.weight' has shape [6, 3]. The rank "
            "must be the same: download the file again.",
        ),
        (
            pair(down=drawn(RANK, 5)),
            CheckpointForeignError,
            "'blocks.1.to_q.lora_A.weight' has shape [2, 5]. For 'blocks.1.to_q.weight', of shape [6, 4], it must be "
            "[2, 4]. Name a LoRA that was made for this model.",
        ),
        (
            pair(up=drawn(5, RANK)),
            CheckpointForeignError,
            "'blocks.1.to_q.lora_B.weight' has shape [5, 2]. For 'blocks.1.to_q.weight', of shape [6, 4], it must be "
            "[6, 2]. Name a LoRA that was made for this model.",
        ),
        (
            {"blocks.0.norm.diff": drawn(4)},
            CheckpointForeignError,
            "'blocks.0.norm.diff' has shape [4]. For 'blocks.0.norm.weight', of shape [6], it must be [6]. Name a LoRA "
            "that was made for this model.",
        ),
        (
            pair(down=DOWN / 0),
            CheckpointBrokenError,
            "'blocks.1.to_q.lora_A.weight' holds NaN or infinity. Download the file again.",
        ),
        (
            pair(**{"blocks.1.to_q.alpha": torch.tensor(float("nan"))}),
            CheckpointBrokenError,
            "'blocks.1.to_q.alpha' holds NaN or infinity. Download the file again.",
        ),
        (
            pair(**{"blocks.1.to_q.alpha": torch.tensor(0.0)}),
            CheckpointBrokenError,
            "'blocks.1.to_q.alpha' is 0, and would add nothing. Write the file again with the alpha of its training; "
            "a negative 'scale' in the job subtracts a LoRA.",
        ),
        (
            pair(**{"blocks.1.to_q.alpha": torch.tensor(-4.0)}),
            CheckpointBrokenError,
            "'blocks.1.to_q.alpha' is -4, and an alpha is a positive number. Write the file again with the alpha of "
            "its training; a negative 'scale' in the job subtracts a LoRA.",
        ),
        (
            {},
            CheckpointForeignError,
            "It has no tensors, and would change nothing. Remove it from 'lora', or name a file that has some.",
        ),
        (
            pair(**{"blocks.1.to_q.alpha": torch.ones(2)}),
            CheckpointBrokenError,
            "'blocks.1.to_q.alpha' has shape [2]. It must be one number.",
        ),
        (
            pair() | pair(f"transformer.{TO_Q}"),
            CheckpointForeignError,
            "'blocks.1.to_q' and 'transformer.blocks.1.to_q' are both 'blocks.1.to_q' of 'network'. Remove "
            "one of them.",
        ),
        (
            pair(**{"blocks.1.to_q.lora_down.weight": DOWN.clone()}),
            CheckpointForeignError,
            "'blocks.1.to_q.lora_A.weight' and 'blocks.1.to_q.lora_down.weight' mean the same. Remove one of them.",
        ),
        (
            pair(down=DOWN.to(torch.float8_e4m3fn)),
            CheckpointForeignError,
            "'blocks.1.to_q.lora_A.weight' is of dtype F8_E4M3. It must be F64, F32, F16, BF16.",
        ),
        (
            pair(**{"blocks.1.to_q.dora_scale": drawn(6)}),
            CheckpointForeignError,
            "'blocks.1.to_q.dora_scale' is of DoRA. torchport merges pairs of matrices and whole differences: "
            "lora_A.weight, lora_A.default.weight, lora_down.weight, lora.down.weight, lora_B.weight, "
            "lora_B.default.weight, lora_up.weight, lora.up.weight, lora_B.bias, lora_B.default.bias, alpha, diff, "
            "diff_b. Merge this one into the checkpoint, or name a plain LoRA.",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_file_and_key(filled, tmp_path, tensors, kind, text):
    assert refusal(kind, lambda: filled(tensors)) == f"{tmp_path / 'lora0.safetensors'}: {text}"


def test_keys_of_no_lora_are_refused(filled):
    text = refusal(CheckpointForeignError, lambda: filled({"blocks.1.to_q.weight": drawn(6, 4)}))
    assert "'blocks.1.to_q.weight' does not end as a key of a LoRA. torchport merges pairs" in text
    assert "'blocks.0.hada_w1_a' is of LoHa" in refusal(
        CheckpointForeignError, lambda: filled({"blocks.0.hada_w1_a": drawn(6, 4)})
    )


def test_a_name_that_can_be_two_layers_is_refused(filled):
    names = (LoraName(match=r"blocks\.0\.to_q", to="blocks.1.to_q"),)
    text = refusal(CheckpointForeignError, lambda: filled(pair(), names=names))
    assert "'blocks.1.to_q.lora_A.weight' can be 'blocks.0.to_q' and 'blocks.1.to_q' of 'network'" in text


def test_a_rule_that_names_no_layer_is_refused(filled):
    names = (*NAMES, LoraName(match=r"blocks\.0\.to_q", to="never"))
    assert refusal(DeadRuleError, lambda: filled(pair(), names=names)) == (
        "card:1: Rule 2, 'blocks\\.0\\.to_q', is the first match of no layer of 'network'. Remove it, or mend it."
    )


def test_metadata_that_cannot_be_used_is_refused(filled):
    for text, kind, fact in (
        ("no json", CheckpointBrokenError, "'lora_adapter_metadata' in its metadata is no JSON object"),
        ("[1]", CheckpointBrokenError, "'lora_adapter_metadata' in its metadata is no JSON object"),
        ('{"use_dora": true}', CheckpointForeignError, "'lora_adapter_metadata' has 'use_dora'"),
        ('{"alpha_pattern": {"(": 1}}', CheckpointBrokenError, "has a 'alpha_pattern' that cannot be read"),
        ('{"alpha_pattern": {"((([a-z0-9_.]+)+)+)+!": 1}}', CheckpointBrokenError, "it repeats a group, and may take"),
        ('{"lora_alpha": "much"}', CheckpointBrokenError, "has a 'lora_alpha' that is no number"),
        ('{"lora_alpha": NaN}', CheckpointBrokenError, "'lora_alpha' in 'lora_adapter_metadata' is nan, and an alpha"),
        ('{"lora_alpha": 0}', CheckpointBrokenError, "'lora_alpha' in 'lora_adapter_metadata' is 0, and would add"),
        ('{"alpha_pattern": {"to_q": -1}}', CheckpointBrokenError, "The alpha of 'to_q' in 'lora_adapter_metadata' is"),
    ):
        assert fact in refusal(kind, lambda text=text: filled(pair(), metadata={"lora_adapter_metadata": text}))


def test_settings_of_more_than_a_sum_of_pairs_are_refused_by_name(filled):
    remedy = "Save it again with PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...)"
    for config, fact in (
        ({"init_lora_weights": "pissa"}, f"'pissa' changes the model's own weights. {remedy}"),
        ({"transformer.init_lora_weights": "pissa_niter_16"}, "'pissa_niter_16' changes the model's own weights"),
        ({"network.init_lora_weights": "loftq"}, "'loftq' changes the model's own weights"),
        ({"init_lora_weights": "olora"}, "'olora' changes the model's own weights"),
        ({"use_dora": "True"}, "has 'use_dora', and a DoRA scales each row of the sum. torchport merges pairs"),
        ({"peft_type": "LOHA"}, "has 'peft_type', and is a LOHA. torchport merges pairs of matrices alone: merge this"),
        ({"fan_in_fan_out": True}, "has 'fan_in_fan_out', and its pairs are transposed"),
        ({"layer_replication": [[0, 4], [2, 5]]}, "has 'layer_replication', and its network has layers several times"),
    ):
        for metadata in ({"lora_adapter_metadata": json.dumps(config)}, {k: str(v) for k, v in config.items()}):
            assert fact in refusal(CheckpointForeignError, lambda m=metadata: filled(pair(), metadata=m))
    plain = {"init_lora_weights": True, "use_dora": False, "peft_type": "LORA", "layer_replication": None}
    assert_added(
        filled(pair(), metadata={"lora_adapter_metadata": json.dumps(plain)}), blocks__1__to_q__weight=UP @ DOWN
    )


def test_a_difference_of_modulation_is_refused_with_the_command_that_leaves_it_out(filled, tmp_path):
    text = refusal(CheckpointForeignError, lambda: filled(pair(**{"blocks.1.diff_m": drawn(1, 6, 6)})))
    assert "'blocks.1.diff_m' is of a difference of modulation. Leave these keys out, if the LoRA may do less" in text
    command = text.split('python -c "')[1].removesuffix('".')
    exec(command, {})
    left = load_file(tmp_path / "lora0.without_diff_m.safetensors")
    assert left.keys() == pair().keys()


METADATA_OF_TRAINERS = [
    ({"transformer.lora_alpha": "8", "transformer.r": "2"}, 4.0),
    ({"network.lora_alpha": "8", "network.r": "2", "transformer.lora_alpha": "2"}, 4.0),
    ({"lora_alpha": "8", "r": "2"}, 4.0),
    ({"lora_alpha": "8.0", "lora_rank": "2"}, 4.0),
    ({"alpha": "1", "rank": "2"}, 0.5),
    ({"network_alpha": "1", "network_dim": "2"}, 0.5),
    ({"ss_network_alpha": "1.0", "ss_network_dim": "2", "ss_alpha_mask": "False"}, 0.5),
    ({"ss_network_alpha": "8", "lora_adapter_metadata": json.dumps({"lora_alpha": 8})}, 4.0),
    ({"lora_alpha": "8", "use_rslora": "True"}, 8 / 2**0.5),
    ({"lora_alpha": "8", "use_rslora": "False"}, 4.0),
    ({"lora_config": json.dumps({"r": 2, "lora_alpha": 8})}, 4.0),
    ({"lora_alpha": "8", "alpha_pattern": '{"to_q": 3}'}, 1.5),
    ({"lora_adapter_metadata": '{"r": 8, "lora_alpha": 8, "rank_pattern": {"to_q": 2}}'}, 4.0),
    ({"text_encoder.lora_alpha": "8", "format": "pt"}, 1.0),
]


@pytest.mark.parametrize(("metadata", "factor"), METADATA_OF_TRAINERS)
def test_every_trainers_metadata_has_the_alpha(filled, metadata, factor):
    assert_added(filled(pair(), metadata=metadata), blocks__1__to_q__weight=factor * UP @ DOWN)
    alone = pair(**{f"{TO_Q}.alpha": torch.tensor(4)})  # a tensor goes before what is said of all layers
    rooted = "use_rslora" in metadata and metadata["use_rslora"] == "True"
    assert_added(filled(alone, metadata=metadata), blocks__1__to_q__weight=4 / (2**0.5 if rooted else 2) * UP @ DOWN)


def test_an_alpha_that_is_not_understood_is_refused_unless_tensors_have_it(filled):
    for metadata, fact in (
        (
            {"weird_alpha": "8"},
            "'weird_alpha' in its metadata is not known, and a pair has no alpha of its own. Call it",
        ),
        ({"networkAlpha": "8"}, "'networkAlpha' in its metadata is not known"),
        ({"decoder.lora_alpha": "8"}, "'decoder.lora_alpha' in its metadata is not known"),
        ({"lora_alpha": "Dynamic"}, "its metadata has a 'lora_alpha' that is no number: "),
        ({"lora_adapter_metadata": '{"lora_alpha": true}'}, "has a 'lora_alpha' that is no number: it is True"),
        (
            {"lora_alpha": "8", "alpha": "4"},
            "'alpha' in its metadata is 4 and 'lora_alpha' in its metadata is 8. Write",
        ),
        (
            {"lora_alpha": "8", "r": "4"},
            "'r' in its metadata is 4, and 'blocks.1.to_q' has rank 2. Write the file again",
        ),
        ({"ss_network_alpha": "8", "ss_network_dim": "Dynamic"}, "has a 'ss_network_dim' that is no number: "),
        ({"lora_alpha": "8", "alpha_pattern": "[1]"}, "'alpha_pattern' in its metadata is no JSON object"),
    ):
        assert fact in refusal(CheckpointBrokenError, lambda m=metadata: filled(pair(), metadata=m))
        own = pair(**{f"{TO_Q}.alpha": torch.tensor(4.0)})
        assert_added(filled(own, metadata=metadata), blocks__1__to_q__weight=2 * UP @ DOWN)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8, torch.float16, torch.float64])
def test_an_alpha_may_be_an_integer(filled, dtype):
    state = filled(pair(**{f"{TO_Q}.alpha": torch.tensor(8, dtype=dtype)}))
    assert_added(state, blocks__1__to_q__weight=4 * UP @ DOWN)


def halves(before, down="lora_A.weight", up="lora_B.weight"):
    return {f"{before}.{down}": DOWN, f"{before}.{up}": UP}


CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "init_lora_weights": True, "lora_dropout": 0.0}
COMMON = halves(f"diffusion_model.{TO_Q}", "lora_down.weight", "lora_up.weight")
WHOLE = {"diffusion_model.blocks.0.norm.diff": drawn(6), "diffusion_model.blocks.1.to_q.diff_b": drawn(6)}
KOHYA = halves("lora_unet_blocks_1_to_q", "lora_down.weight", "lora_up.weight")
LAYOUTS = {
    "diffusers": (
        halves(f"transformer.{TO_Q}"),
        {"format": "pt", "lora_adapter_metadata": json.dumps({f"transformer.{k}": v for k, v in CONFIG.items()})},
    ),
    "diffusers, older": (halves(f"transformer.{TO_Q}", "lora.down.weight", "lora.up.weight"), {"format": "pt"}),
    "PEFT": (halves(f"base_model.model.{TO_Q}"), {"format": "pt"}),
    "SimpleTuner": (halves(f"transformer.{TO_Q}"), {"transformer.lora_alpha": "8", "transformer.r": "2"}),
    "Kohya, musubi-tuner": (
        KOHYA | {"lora_unet_blocks_1_to_q.alpha": torch.tensor(8.0)},
        {"ss_network_module": "networks.lora_wan", "ss_network_alpha": "8", "ss_network_dim": "2"},
    ),
    "ComfyUI": (COMMON | {f"diffusion_model.{TO_Q}.alpha": torch.tensor(8, dtype=torch.bfloat16)}, None),
    "lightx2v": (COMMON | WHOLE, None),
}  # fmt: skip
"""A file of each layout in the table of docs/jobs.md: its tensors, and its metadata. All but two have the alpha 8."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_the_docs_is_read(tmp_path, layout):
    tensors, metadata = LAYOUTS[layout]
    if layout == "PEFT":
        (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, tmp_path / "adapter_model.safetensors", metadata)
    (tmp_path / "base").mkdir()
    save_file(STATE, tmp_path / "base" / "weights.safetensors")
    loras = load.Loras("network", [load.Lora(tmp_path / "adapter_model.safetensors", 0.5)], (), ())
    module = load.build(LAYERS, {}, "float32", "card:1")
    state = load.fill(module, tmp_path / "base", "network", Layout(loras=loras)).state_dict()
    factor = 1 if layout in ("diffusers, older", "lightx2v") else 4
    whole = {"blocks__0__norm__weight": 0.5 * WHOLE["diffusion_model.blocks.0.norm.diff"]}
    whole["blocks__1__to_q__bias"] = 0.5 * WHOLE["diffusion_model.blocks.1.to_q.diff_b"]
    assert_added(state, blocks__1__to_q__weight=0.5 * factor * UP @ DOWN, **(whole if layout == "lightx2v" else {}))


def test_the_table_of_layouts_in_the_docs_has_a_file_for_each_row(root):
    text = (root / "docs" / "jobs.md").read_text(encoding="utf-8").partition("| layout |")[2].partition("\n\n")[0]
    assert [row.split("|")[1].strip() for row in text.splitlines()[2:]] == list(LAYOUTS)


def test_pefts_configuration_beside_its_file_is_read(tmp_path):
    (tmp_path / "base").mkdir()
    save_file(STATE, tmp_path / "base" / "weights.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "init_lora_weights": True, "lora_dropout": 0.0}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))

    def fill(name, tensors):
        save_file(tensors, tmp_path / name)
        loras = load.Loras("network", [load.Lora(tmp_path / name, 1.0)], (), ())
        module = load.build(LAYERS, {}, "float32", "card:1")
        return load.fill(module, tmp_path / "base", "network", Layout(loras=loras)).state_dict()

    of_peft = pair(f"base_model.model.{TO_Q}")
    for name, tensors in (("adapter_model.safetensors", pair()), ("renamed.safetensors", of_peft)):
        assert_added(fill(name, tensors), blocks__1__to_q__weight=4 * UP @ DOWN)
    assert_added(fill("neighbour.safetensors", pair()), blocks__1__to_q__weight=UP @ DOWN)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"init_lora_weights": "pissa"}))
    with pytest.raises(CheckpointForeignError, match=r"'adapter_config\.json' beside it has 'init_lora_weights'"):
        fill("adapter_model.safetensors", pair())
    (tmp_path / "adapter_config.json").write_text("[")
    with pytest.raises(CheckpointBrokenError, match=r"adapter_config.json: Not JSON"):
        fill("adapter_model.safetensors", pair())


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_is_refused_by_its_content_with_the_command_that_converts_it(tmp_path, zipped):
    file = tmp_path / "style.safetensors"
    torch.save(pair(), file, _use_new_zipfile_serialization=zipped)
    assert refusal(CheckpointForeignError, lambda: lora.check_format(file)) == (
        f"{file}: It is a pickle, as torch.save writes it (.pt, .bin, .ckpt), and a pickle can run code. Convert it to "
        f"safetensors: python -c \"import torch, safetensors.torch as s; s.save_file(torch.load('{file}', "
        f"weights_only=True), '{file}')\"."
    )


def test_a_header_that_begins_as_a_pickle_does_is_none(tmp_path):
    file = tmp_path / "style.safetensors"
    for padding in range(200):  # some length of the header ends in the byte 0x80
        save_file(pair(), file, {"padding": "x" * padding})
        lora.check_format(file)
        if file.read_bytes()[0] == 0x80:
            break
    assert file.read_bytes()[0] == 0x80


def test_a_file_that_is_cut_or_missing_is_refused(filled, tmp_path):
    filled(pair())
    file = tmp_path / "lora0.safetensors"
    whole = file.read_bytes()
    loras = load.Loras("network", [load.Lora(file, 1.0)])
    module = load.build(LAYERS, {}, "float32", "card:1")
    file.write_bytes(whole[:-1])
    fact = refusal(CheckpointBrokenError, lambda: load.fill(module, tmp_path / "base", "network", Layout(loras=loras)))
    assert "its header promises" in fact
    file.unlink()
    refusal(CheckpointMissingError, lambda: load.fill(module, tmp_path / "base", "network", Layout(loras=loras)))


def test_a_pair_is_read_once_when_its_tensor_is_filled(filled, monkeypatch):
    reads, honest = [], lora.Additions._read
    monkeypatch.setattr(lora.Additions, "_read", lambda self, file, key: reads.append(key) or honest(self, file, key))
    filled(pair())
    assert reads == ["blocks.1.to_q.lora_B.weight", "blocks.1.to_q.lora_A.weight"]
