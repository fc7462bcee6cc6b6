"""The VAE of Tencent's HunyuanVideo-1.5: its decoder in parts of a frame and chunks of time, blending without loops.

The decoder is that of `patches/diffusers/hunyuan_video15_vae.py`, with other names. A latent frame becomes four frames,
and the first becomes one. Here the first becomes four, too, which are all the same, and three are left out in the end.
"""

import functools

import torch
from torch.nn import functional

from torchport.kernels.convolution import for_torch


def convolve(self, x):
    """Returns `CausalConv3d`'s output; in the decoder its kernel is 3 in each dim, and it looks back."""
    return _convolved(self.conv, x)


def _convolved(conv, x, **fused):
    # Under autocast the video stays float32, and its products have the weights' dtype.
    return for_torch.conv3d(x.to(conv.weight.dtype), conv.weight, conv.bias, edges=True, **fused)


def resnet(self, x):
    """Returns `ResnetBlock`'s output: norm and activation belong to the convolution after them."""
    shortcut = x if self.in_channels == self.out_channels else self.nin_shortcut(x)
    return _activated(self.norm2, self.conv2, _activated(self.norm1, self.conv1, x), shortcut)


def _activated(norm, conv, x, residual=None):
    """Returns a convolution of the normalised and activated input; it is fused with both where nothing is cast."""
    if all(other is None or other.dtype == conv.conv.weight.dtype for other in (x, residual)):
        return _convolved(conv.conv, x, gains_C=norm.gamma.flatten(), residual_BDTHW=residual)
    out = _convolved(conv.conv, functional.silu(norm(x)))
    return out if residual is None else residual + out


def attend(self, x):
    """Returns `AttnBlock`'s output, without its mask of all pairs of positions."""
    normal = self.norm(x)
    query, key, value = (layer(normal) for layer in (self.q, self.k, self.v))
    return x + self.proj_out(for_torch.frame_attention(query, key, value))


def upsample(self, x):
    """Returns `Upsample`'s output, with as many frames for the first one as for every other."""
    return for_torch.unfolded(self.conv(x), x, self.repeats, makes_frames=self.add_temporal_upsample)


def decode(self, z):
    """Returns `Decoder`'s output; from the last blocks' frames on it runs on some of them at a time."""
    with for_torch.spread(z) as (latents, form):
        repeats = self.block_out_channels[0] // self.z_channels
        x = self.conv_in(latents) + latents.repeat_interleave(repeats=repeats, dim=1)
        for layer in (self.mid.block_1, self.mid.attn_1, self.mid.block_2):
            x = layer(x)
        layers = [layer for up in self.up for layer in (*up.block, *([up.upsample] if hasattr(up, "upsample") else []))]
        last = functools.partial(_activated, self.norm_out, self.conv_out)
        return for_torch.crop(for_torch.through(layers, last, x), form)


def blend_v(self, a, b, blend_extent):
    """Blends the last rows of the tile above, `a`, into the first rows of `b` [B, C, T, H, W], and returns `b`.

    In place, as upstream's: the tile below blends with rows that are blended already.
    """
    return _blend(a, b, blend_extent, -2)


def blend_h(self, a, b, blend_extent):
    """Blends the last columns of the tile to the left, `a`, into the first columns of `b`; see `blend_v`."""
    return _blend(a, b, blend_extent, -1)


def _blend(a, b, extent, dim):
    extent = min(a.shape[dim], b.shape[dim], extent)
    if extent == 0:
        return b
    # As upstream's products with Python floats: each in float32 at least, rounded to the tensor's dtype, then added.
    wide = torch.float64 if b.dtype == torch.float64 else torch.float32
    steps = torch.arange(extent, dtype=torch.float64) / extent
    shape = [1] * b.dim()
    shape[dim] = extent
    new, old = (weights.to(wide).to(b.device).view(shape) for weights in (steps, 1 - steps))
    overlap, rest = b.split([extent, b.shape[dim] - extent], dim=dim)
    above = a.narrow(dim, a.shape[dim] - extent, extent)
    overlap = (above.to(wide) * old).to(b.dtype) + (overlap.to(wide) * new).to(b.dtype)
    # The whole tile is written, not a view of its edge: of a traced tensor, a view is a copy, and would be lost.
    return b.copy_(torch.cat([overlap, rest], dim=dim))
