"""The decoders of Wan 2.1's and Wan 2.2's VAE in parts of a frame and chunks of time, with diffusers' modules.

A latent frame becomes four frames, and the first becomes one. Here the first becomes four, too, of which the last one
counts: the three before it are 0 for every convolution, as all before the video is. So every frame is treated alike,
and all chunks of time are one program. Upstream decodes a latent frame at a time, the first apart, with lists of what
the next one needs.
"""

import torch
from torch import nn

from torchport.kernels.convolution import for_torch


def resnet(self, x, feat_cache=None, feat_idx=(0,)):
    """Returns `WanResidualBlock`'s output: norm and activation belong to the convolution after them."""
    residual = x if isinstance(self.conv_shortcut, nn.Identity) else _pointwise(self.conv_shortcut, x)
    return _activated(self.norm2, self.conv2, _activated(self.norm1, self.conv1, x), residual)


def _activated(norm, conv, x, residual=None):
    gains = norm.gamma.flatten()
    return for_torch.conv3d(x, conv.weight, conv.bias, edges=False, gains_C=gains, residual_BDTHW=residual)


def _pointwise(conv, x):
    """Returns a convolution with a kernel of 1 as a product of matrices."""
    out = torch.einsum("dc,bcthw->bdthw", conv.weight.flatten(1), x)
    return out + conv.bias[:, None, None, None]


def attend(self, x):
    """Returns `WanAttentionBlock`'s output: attention within each frame."""
    normal = torch.nn.functional.normalize(x, dim=1) * self.norm.scale * self.norm.gamma[..., None]
    query, key, value = _pointwise(self.to_qkv, normal).chunk(3, dim=1)
    return _pointwise(self.proj, for_torch.frame_attention(query, key, value, causal=False)) + x


def up_block(self, x, feat_cache=None, feat_idx=(0,), first_chunk=False):
    """Returns `WanResidualUpBlock`'s output: its upsampling convolution adds the shortcut."""
    start = x
    for resnet in self.resnets:
        x = resnet(x)
    shortcut = self.avg_shortcut
    if shortcut is None:
        return x
    if shortcut.in_channels not in (shortcut.out_channels, 2 * shortcut.out_channels):
        return self.upsampler(x) + shortcut(start)
    return self.upsampler.forward(x, residual=_duplicated(shortcut, start))


def _duplicated(shortcut, x):
    """Returns `DupUp3D`'s output before its rows and columns are repeated.

    Of twice as many channels as it returns, each other one is for the second of two frames; or of two rows, if there
    are no more frames than before.
    """
    halves = shortcut.in_channels != shortcut.out_channels
    if shortcut.factor_t == 2:  # frames are joined one by one: a TPU takes several times as long to interleave them
        first, second = (x[:, ::2], x[:, 1::2]) if halves else (x, x)
        pairs = zip(first.split(1, dim=2), second.split(1, dim=2), strict=True)
        return torch.cat([frame for pair in pairs for frame in pair], dim=2)
    return x.unflatten(1, (-1, 2)).permute(0, 1, 3, 4, 2, 5).flatten(3, 4) if halves else x


def upsample(self, x, feat_cache=None, feat_idx=(0,), residual=None):
    """Returns `WanResample`'s output in a decoder, with as many frames for the first one as for every other."""
    x = _twice_as_many_frames(self.time_conv, x) if self.mode == "upsample3d" else x
    weight, bias = self.resample[1].weight, self.resample[1].bias
    return for_torch.conv3d(x, weight[:, :, None], bias, edges=False, zoom=2, residual_BDTHW=residual)


def _twice_as_many_frames(conv, x):
    """Returns two frames for each: what a convolution over time makes of all after the first, and the first as it is.

    That convolution does not see the first frame, either.
    """
    first = for_torch.is_first(x)
    batch, channels, frames, height, width = x.shape
    later = for_torch.with_frames_before(torch.where(first, torch.zeros_like(x), x), 2)
    taps = torch.cat([later[:, :, n : n + frames] for n in range(3)], 1)
    weight = conv.weight[..., 0, 0].transpose(1, 2).flatten(1)
    out = torch.einsum("dc,bcthw->bdthw", weight, taps) + conv.bias[:, None, None, None]
    out = torch.where(first, torch.cat([x, x], 1), out).reshape(batch, 2, channels, frames, height, width)
    return out.permute(0, 2, 3, 1, 4, 5).reshape(batch, channels, 2 * frames, height, width)


def decode(self, x, feat_cache=None, feat_idx=(0,), first_chunk=False):
    """Returns `WanDecoder3d`'s output for all latent frames, some at a time."""
    with for_torch.spread(x, multiple=8) as (latents, form):

        def some(x):
            x = for_torch.conv3d(x, self.conv_in.weight, self.conv_in.bias, edges=False)
            x = self.mid_block(x)
            for block in self.up_blocks:
                x = block(x)
            return _activated(self.norm_out, self.conv_out, x)

        return for_torch.crop(for_torch.by_chunks(some, latents), form)


def decode_video(self, z, return_dict=True):
    """Returns what `AutoencoderKLWan._decode` does, without its loop over latent frames and without tiles."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
    from diffusers.models.autoencoders.vae import DecoderOutput

    video = self.decoder(_pointwise(self.post_quant_conv, z))
    if self.config.patch_size is not None:
        video = unpatchify(video, patch_size=self.config.patch_size)
    video = torch.clamp(video, min=-1.0, max=1.0)
    return DecoderOutput(sample=video) if return_dict else (video,)
