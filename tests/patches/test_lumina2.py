"""Forms of the Lumina 2 transformer's statements: upstream's positions of the same tokens, with padding between."""

import torch
from diffusers.models.transformers.transformer_lumina2 import Lumina2RotaryPosEmbed
from fakes.families import PATCHES

from torchport.patch.declared import replacement

FILE = PATCHES / "diffusers" / "lumina2.py"


def test_tokens_have_upstreams_positions_behind_the_padding_which_is_no_key():
    patches = replacement.module_of(FILE, "diffusers", str(FILE))
    rotary, mask = Lumina2RotaryPosEmbed(10000, [4, 4, 4], [16, 8, 8]), torch.tensor([[1, 1, 1, 0, 0], [1] * 5])
    latents = torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    tokens, text, image, both, *_ = rotary(latents, mask)
    ours = patches.positions(Lumina2RotaryPosEmbed.forward, rotary, latents, mask)
    assert torch.equal(ours[0], tokens) and torch.equal(ours[2], image)
    assert torch.equal(ours[1][mask.bool()], text[mask.bool()])
    assert torch.equal(ours[3][1], both[1]) and ours[4:] == ([5, 5], [11, 11])
    joint, valid, is_used = patches.joined(tokens, torch.zeros(2, 5, 12), mask)
    assert joint.shape == (2, 11, 12) and valid.sum(dim=1).tolist() == [9, 11] and is_used
