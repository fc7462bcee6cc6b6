"""Forms of the Wan transformer's statements: the numbers of upstream's own, with and without padding."""

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor, WanRotaryPosEmbed
from fakes.families import PATCHES

from torchport.errors import BadValueError
from torchport.patch.declared import replacement

WAN = PATCHES / "diffusers" / "wan.py"


@pytest.fixture(scope="module")
def patches():
    return replacement.module_of(WAN, "diffusers", str(WAN))


def small(dtype):
    """Returns an attention, tokens and their positions."""
    attn = WanAttention(64, heads=4, dim_head=16).to(dtype)
    x = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    return attn, x, WanRotaryPosEmbed(16, (1, 2, 2), 32)(torch.empty(2, 16, 2, 6, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_are_turned_as_upstream_turns_them(patches, dtype, monkeypatch):
    attn, x, positions = small(dtype)
    seen = []

    def keep(query, key, value, **rest):
        seen.extend((query, key))
        return value

    monkeypatch.setattr("diffusers.models.transformers.transformer_wan.dispatch_attention_fn", keep)
    with torch.no_grad():
        for positions_or_none in (positions, None):
            WanAttnProcessor()(attn, x, None, None, positions_or_none)
        [*theirs, query, key] = seen
        for plain, reference in zip((query, key), theirs, strict=True):
            ours = patches.rotated(plain, positions)
            assert ours.dtype == reference.dtype == dtype and torch.equal(ours, reference)


def test_in_pytorch_attention_is_upstreams_and_padding_is_no_key(patches):
    attn, x, positions = small(torch.float32)
    upstream, processor = WanAttnProcessor.__call__, WanAttnProcessor()
    with torch.no_grad():
        reference = processor(attn, x, None, None, positions)
        padded = torch.cat([x, torch.full((2, 8, 64), 9.0)], dim=1)
        ours = patches.attended(upstream, processor, attn, padded, None, None, positions)[:, :24]
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6)
        text = x[:, :5]
        cross = patches.attended(upstream, processor, attn, x, text, None, None)
        assert torch.equal(cross, processor(attn, x, text, None, None))


def test_a_mask_of_self_attention_is_refused(patches):
    attn, x, positions = small(torch.float32)
    with pytest.raises(BadValueError) as caught:
        patches.attended(WanAttnProcessor.__call__, None, attn, x, None, torch.ones(2, 24), positions)
    assert str(caught.value) == (
        "Wan's attention_mask: It has the shape [2, 24]. Pass None: every token takes part, as in upstream's "
        "transformer."
    )


@pytest.mark.parametrize("timestep", [torch.tensor([7.0, 8.0]), torch.arange(10.0).reshape(2, 5)])
def test_tokens_are_padded_with_their_timesteps(patches, timestep, monkeypatch):
    tokens = torch.ones(2, 5, 4)
    monkeypatch.setattr(patches, "token_multiple", lambda _: 4)
    padded, times, length = patches.padded_tokens(tokens, timestep)
    assert padded.shape == (2, 8, 4) and torch.equal(padded[:, :5], tokens) and not padded[:, 5:].any()
    if timestep.ndim == 1:
        assert times is timestep and length is None
    else:
        assert length == 8 and torch.equal(times.reshape(2, 8)[:, :5], timestep) and times.shape == (16,)
