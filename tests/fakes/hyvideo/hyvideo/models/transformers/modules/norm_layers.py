"""Norms by name."""

import torch
from torch import nn


class RMSNorm(nn.Module):
    """Root mean square norm over the last dim, computed in float32."""

    def __init__(self, dim, elementwise_affine=True, eps=1e-6, device=None, dtype=None):
        super().__init__()
        self.eps = eps
        if elementwise_affine:
            self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))

    def forward(self, x):
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).type_as(x)
        return normed * self.weight if hasattr(self, "weight") else normed


def get_norm_layer(norm_layer):
    return {"layer": nn.LayerNorm, "rms": RMSNorm}[norm_layer]
