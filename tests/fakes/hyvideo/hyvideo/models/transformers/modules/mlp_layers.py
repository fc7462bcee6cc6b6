"""Layers that mix features."""

import math

import torch
from torch import nn

from .modulate_layers import modulate


class MLP(nn.Module):
    """Two linear layers."""

    def __init__(
        self, in_channels, hidden_channels=None, out_features=None, act_layer=nn.GELU, norm_layer=None, bias=True,
        drop=0.0, use_conv=False, device=None, dtype=None,
    ):  # fmt: skip
        super().__init__()
        made = {"device": device, "dtype": dtype}
        self.fc1 = nn.Linear(in_channels, hidden_channels or in_channels, bias=bias, **made)
        self.act = act_layer()
        self.fc2 = nn.Linear(hidden_channels or in_channels, out_features or in_channels, bias=bias, **made)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class LinearWarpforSingle(nn.Module):
    """One linear layer over two tensors side by side."""

    def __init__(self, in_dim, out_dim, bias=False, device=None, dtype=None):
        super().__init__()
        self.fc = nn.Linear(in_dim, out_dim, bias=bias, device=device, dtype=dtype)

    def forward(self, x, y):
        return self.fc(torch.cat([x, y], dim=-1))


class FinalLayer(nn.Module):
    """From features to patches; returns zeros at first."""

    def __init__(self, hidden_size, patch_size, out_channels, act_layer, device=None, dtype=None):
        super().__init__()
        made = {"device": device, "dtype": dtype}
        self.norm_final = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6, **made)
        self.linear = nn.Linear(hidden_size, math.prod(patch_size) * out_channels, **made)
        self.adaLN_modulation = nn.Sequential(act_layer(), nn.Linear(hidden_size, 2 * hidden_size, **made))
        for layer in (self.linear, self.adaLN_modulation[1]):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x, c):
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=-1)
        return self.linear(modulate(self.norm_final(x), shift, scale))
