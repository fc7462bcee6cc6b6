"""What HunyuanVideo-1.5's transformer and VAE are called with in tests, and how they are made tiny and sharded.

Shapes: B batch, L text tokens, H heads, D features.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from torchport.config.strategy import Rule, WeightRule

CASES = ("t2v", "t2v-with-image", "i2v")
NAN = float("nan")
FILLS = (None, 1e30, NAN)
LATENTS = torch.randn(1, 4, 3, 9, 7, generator=torch.Generator().manual_seed(6))

TINY: dict[str, Any] = {
    "patch_size": [1, 1, 1],
    "in_channels": 4,
    "out_channels": 4,
    "hidden_size": 128,
    "heads_num": 4,
    "mm_double_blocks_depth": 2,
    "mm_single_blocks_depth": 0,
    "rope_dim_list": [8, 12, 12],
    "text_states_dim": 48,
    "text_states_dim_2": None,
    "glyph_byT5_v2": True,
    "vision_projection": "linear",
    "vision_states_dim": 24,
    "use_cond_type_embedding": True,
}
TINY_VAE: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
    "block_out_channels": (16, 16, 16),
    "layers_per_block": 1,
    "ffactor_spatial": 4,
    "ffactor_temporal": 2,
    "sample_size": 16,
    "sample_tsize": 8,
}

COLUMNS = r"model\.double_blocks\.\d+\.(img|txt)_(attn_[qkv]|mlp\.fc1)\.(weight|bias)"
ROWS = r"model\.double_blocks\.\d+\.(img|txt)_(attn_proj|mlp\.fc2)\.weight"
WEIGHTS = [
    WeightRule(match=COLUMNS, spec=["tp"]),
    WeightRule(match=ROWS, spec=[None, "tp"]),
    WeightRule(match=".*", spec="replicate"),
]
BATCH = [Rule(match=".*", spec=["dp"])]
REPLICATE = [WeightRule(match=".*", spec="replicate")]
INPUTS = [Rule(match="freqs_(cos|sin)", spec="replicate"), Rule(match=".*", spec=["dp"])]


def randomised(module: nn.Module, seed: int) -> nn.Module:
    """Returns a module with every parameter drawn, so that values stay near 1 from layer to layer."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(module.named_parameters()):
            drawn = torch.randn(tensor.shape, generator=generator)
            fan_in = tensor[0].numel()
            is_gain = "norm" in name and name.endswith(("weight", "gamma"))
            is_matrix = tensor.dim() > 1 and fan_in > 1
            tensor.copy_(1 + drawn / 10 if is_gain else drawn / fan_in**0.5 if is_matrix else drawn / 10)
    return module.eval().requires_grad_(False)


def case_of(case: str, tables: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Returns inputs of a case: t2v, t2v-with-image (states that are not zero) or i2v.

    Four samples: all masks full; a short text without letters; a longer one with some; one token without letters.
    """
    generator = torch.Generator().manual_seed(3)
    drawn = functools.partial(torch.randn, generator=generator)
    lengths, letters = torch.tensor([10, 3, 7, 1]), torch.tensor([6, 0, 4, 0])
    inputs = {
        "hidden_states": drawn(4, 9, 3, 4, 4),
        "timestep": torch.tensor([1000.0, 731.5, 250.0, 3.0]),
        "text_states": drawn(4, 10, 48),
        "encoder_attention_mask": (torch.arange(10) < lengths[:, None]).long(),
        "vision_states": drawn(4, 5, 24),
        "byt5_text_states": drawn(4, 6, 1472),
        "byt5_text_mask": (torch.arange(6) < letters[:, None]).long(),
    }
    if case == "t2v":
        inputs["vision_states"] = torch.zeros(4, 5, 24)
    cos, sin = tables((3, 4, 4))
    return {**inputs, "freqs_cos": cos, "freqs_sin": sin}, {"mask_type": case.partition("-")[0]}


def attention_inputs(fill: float | None = None) -> tuple[list[Any], torch.Tensor]:
    """Returns q, k, v of image [2, 5, 2, 8] and text [2, 4, 2, 8], and the text's mask; `fill` lies in padded k, v."""
    draw, mask = torch.Generator().manual_seed(4), torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    pairs = [tuple(torch.randn(2, length, 2, 8, generator=draw) for length in (5, 4)) for _ in "qkv"]
    for _, text in pairs[1:] if fill is not None else ():
        text[mask == 0] = fill
    return pairs, mask


def refiner_inputs(tables: Any) -> dict[str, torch.Tensor]:
    """Returns the inputs of the token refiner."""
    inputs, _ = case_of("t2v", tables)
    return {"x": inputs["text_states"], "t": inputs["timestep"], "mask": inputs["encoder_attention_mask"]}
