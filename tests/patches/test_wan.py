"""The exact form of the Wan transformer's rotary positions has the bits of upstream's strided writes."""

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor, WanRotaryPosEmbed
from fakes.families import PATCHES

from torchport.patch.declared import replacement

WAN = PATCHES / "diffusers" / "wan.py"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_are_turned_as_upstream_turns_them(dtype, monkeypatch):
    rotated = replacement.module_of(WAN, "diffusers", str(WAN)).rotated
    attn = WanAttention(64, heads=4, dim_head=16).to(dtype)
    x = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    positions = WanRotaryPosEmbed(16, (1, 2, 2), 32)(torch.empty(2, 16, 2, 6, 8))
    seen = []

    def keep(query, key, value, **rest):
        seen.extend((query, key))
        return value

    monkeypatch.setattr("diffusers.models.transformers.transformer_wan.dispatch_attention_fn", keep)
    with torch.no_grad():
        for positions_or_none in (positions, None):
            WanAttnProcessor()(attn, x, None, None, positions_or_none)
        [*theirs, query, key] = seen
        for ours, reference in zip(rotated(query, key, positions), theirs, strict=True):
            assert ours.dtype == reference.dtype == dtype and torch.equal(ours, reference)
        assert rotated(query, key, None) == (query, key)
