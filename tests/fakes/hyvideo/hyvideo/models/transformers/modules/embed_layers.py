"""What makes tokens of patches, text, vision states and timesteps."""

import math

import torch
from torch import nn


class PatchEmbed(nn.Module):
    """A convolution over patches of latents, with their condition channels beside them."""

    def __init__(
        self, patch_size=16, in_chans=3, embed_dim=768, is_reshape_temporal_channels=False, concat_condition=True,
        norm_layer=None, flatten=True, bias=True, dtype=None, device=None,
    ):  # fmt: skip
        super().__init__()
        channels = in_chans + (in_chans // 2 if is_reshape_temporal_channels else in_chans) + 1
        size = tuple(patch_size)
        made = {"dtype": dtype, "device": device}
        self.proj = nn.Conv3d(channels if concat_condition else in_chans, embed_dim, size, size, bias=bias, **made)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class TextProjection(nn.Module):
    """Two linear layers."""

    def __init__(self, in_channels, hidden_size, act_layer, dtype=None, device=None):
        super().__init__()
        self.linear_1 = nn.Linear(in_channels, hidden_size, dtype=dtype, device=device)
        self.act_1 = act_layer()
        self.linear_2 = nn.Linear(hidden_size, hidden_size, dtype=dtype, device=device)

    def forward(self, caption):
        return self.linear_2(self.act_1(self.linear_1(caption)))


class VisionProjection(nn.Module):
    """Two linear layers between two norms."""

    def __init__(self, input_dim, output_dim):
        super().__init__()
        widths = nn.Linear(input_dim, input_dim), nn.GELU(), nn.Linear(input_dim, output_dim)
        self.proj = nn.Sequential(nn.LayerNorm(input_dim), *widths, nn.LayerNorm(output_dim))

    def forward(self, vision_embeds):
        return self.proj(vision_embeds)


def timestep_embedding(t, dim, max_period=10000):
    rates = torch.arange(dim // 2, dtype=torch.float32) * (-math.log(max_period) / (dim // 2))
    angles = t.float()[:, None] * rates.exp().to(t.device)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class TimestepEmbedder(nn.Module):
    """Sines and cosines of a timestep through two linear layers."""

    def __init__(
        self, hidden_size, act_layer, frequency_embedding_size=256, max_period=10000, out_size=None, dtype=None,
        device=None,
    ):  # fmt: skip
        super().__init__()
        self.frequency_embedding_size, self.max_period = frequency_embedding_size, max_period
        made = {"dtype": dtype, "device": device}
        first = nn.Linear(frequency_embedding_size, hidden_size, **made)
        self.mlp = nn.Sequential(first, act_layer(), nn.Linear(hidden_size, out_size or hidden_size, **made))

    def forward(self, t):
        waves = timestep_embedding(t, self.frequency_embedding_size, self.max_period)
        return self.mlp(waves.type(self.mlp[0].weight.dtype))
