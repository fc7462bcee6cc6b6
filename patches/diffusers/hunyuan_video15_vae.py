"""The decoder of HunyuanVideo-1.5 in parts of a frame and chunks of time, with diffusers' modules and weights.

A latent frame becomes four frames, and the first becomes one. Here the first becomes four, too, which are all the same:
what is causal and takes the nearest frame for those outside computes the same for each of them. Three are left out in
the end. So every frame is treated alike, and a chunk needs no program of its own.
"""

import functools

from torchport.kernels.convolution import for_torch


def convolve(self, hidden_states):
    """Returns `HunyuanVideo15CausalConv3d`'s output; its kernel is 3 in each dim."""
    return for_torch.conv3d(hidden_states, self.conv.weight, self.conv.bias, edges=True)


def resnet(self, hidden_states):
    """Returns `HunyuanVideo15ResnetBlock`'s output: norm and activation belong to the convolution after them."""
    residual = hidden_states if self.conv_shortcut is None else self.conv_shortcut(hidden_states)
    hidden_states = _activated(self.norm1, self.conv1, hidden_states)
    return _activated(self.norm2, self.conv2, hidden_states, residual)


def _activated(norm, conv, hidden_states, residual=None):
    weight, bias = conv.conv.weight, conv.conv.bias
    gains = norm.gamma.flatten()
    return for_torch.conv3d(hidden_states, weight, bias, edges=True, gains_C=gains, residual_BDTHW=residual)


def attend(self, x):
    """Returns `HunyuanVideo15AttnBlock`'s output, without its mask of all pairs of positions."""
    normal = self.norm(x)
    query, key, value = (layer(normal) for layer in (self.to_q, self.to_k, self.to_v))
    return self.proj_out(for_torch.frame_attention(query, key, value)) + x


def upsample(self, x):
    """Returns `HunyuanVideo15Upsample`'s output, with as many frames for the first one as for every other."""
    return for_torch.unfolded(self.conv(x), x, self.repeats, makes_frames=self.add_temporal_upsample)


def decode(self, hidden_states):
    """Returns `HunyuanVideo15Decoder3D`'s output; from the last blocks' frames on it runs on some of them at a time."""
    with for_torch.spread(hidden_states) as (latents, form):
        x = self.conv_in(latents) + latents.repeat_interleave(repeats=self.repeat, dim=1)
        x = self.mid_block(x)
        layers = [layer for block in self.up_blocks for layer in (*block.resnets, *(block.upsamplers or ()))]
        last = functools.partial(_activated, self.norm_out, self.conv_out)
        return for_torch.crop(for_torch.through(layers, last, x), form)
