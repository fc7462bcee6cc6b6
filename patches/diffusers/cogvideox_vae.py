"""CogVideoX's VAE decoder in parts of a frame and chunks of time, with diffusers' modules and weights.

Upstream decodes two latent frames at a time, and three at first where their number is odd. GroupNorm's statistics are
those of such a batch. Here a chunk has several batches, each with its own statistics, and all chunks are alike: the
first latent frame comes twice. What is made of the first of the two counts in no statistics, and is left out in the
end.

A norm becomes a scale and a shift of each latent position and frame, which the convolution after it applies.
"""

import torch

from torchport.kernels.convolution import for_torch


def decode(self, z, return_dict=True):
    """Returns what `AutoencoderKLCogVideoX._decode` does."""
    from diffusers.models.autoencoders.vae import DecoderOutput

    if self.post_quant_conv is not None:
        z = self.post_quant_conv(z)
    with for_torch.spread(z, paired=True) as (latents, form):
        video = for_torch.by_chunks(lambda some: _frames(self.decoder, some), latents)
        video = for_torch.crop(video, form)
    return DecoderOutput(sample=video) if return_dict else (video,)


def _frames(decoder, latents):
    """Returns `CogVideoXDecoder3D`'s output."""
    x = _convolved(decoder.conv_in, latents)
    for resnet in decoder.mid_block.resnets:
        x = _resnet(resnet, x, latents)
    for block in decoder.up_blocks:
        for resnet in block.resnets:
            x = _resnet(resnet, x, latents)
        for upsampler in block.upsamplers or ():
            x = _upsampled(upsampler, x)
    return _convolved(decoder.conv_out, x, _scaling(decoder.norm_out, x, latents))


def _resnet(block, x, latents):
    """Returns `CogVideoXResnetBlock3D`'s output: norm, activation and residual belong to its convolutions."""
    hidden = _convolved(block.conv1, x, _scaling(block.norm1, x, latents))
    if block.in_channels == block.out_channels:
        shortcut = x
    elif block.use_conv_shortcut:
        shortcut = _convolved(block.conv_shortcut, x)
    else:
        shortcut = _product(block.conv_shortcut, x)
    return _convolved(block.conv2, hidden, _scaling(block.norm2, hidden, latents), shortcut)


def _convolved(causal, x, scaling=None, residual=None):
    """Returns `CogVideoXCausalConv3d`'s output: zeros beside a frame, and the first frame before itself."""
    weight, bias = causal.conv.weight, causal.conv.bias
    return for_torch.conv3d(x, weight, bias, edges=False, still=True, scaling=scaling, residual_BDTHW=residual)


def _scaling(norm, x, latents):
    """Returns by what `CogVideoXSpatialNorm3D` multiplies x and what it adds, [B, C, T, h, w] at the latents' size."""
    layer = norm.norm_layer
    mean, variance = for_torch.batch_moments(x, layer.num_groups)
    mean, variance = (each.repeat_interleave(x.shape[1] // layer.num_groups, dim=1) for each in (mean, variance))
    gain = layer.weight.float()[:, None] * torch.rsqrt(variance + layer.eps)
    offset = layer.bias.float()[:, None] - mean * gain
    # Frames are repeated while they have few channels; rows and columns are by the convolution.
    latents = latents.float().repeat_interleave(x.shape[2] // latents.shape[2], dim=2)
    scale, shift = (_product(conv.conv, latents) for conv in (norm.conv_y, norm.conv_b))
    return scale * gain[..., None, None], scale * offset[..., None, None] + shift


def _product(conv, x):
    """Returns a 1 x 1 x 1 convolution's output, in x's dtype."""
    weight, bias = conv.weight.flatten(1).to(x.dtype), conv.bias.to(x.dtype)
    return torch.einsum("bcthw,dc->bdthw", x, weight) + bias[:, None, None, None]


def _upsampled(layer, x):
    """Returns `CogVideoXUpsample3D`'s output: frames are doubled while they are small.

    They are joined one by one: a TPU takes six times as long for `repeat_interleave` along them.
    """
    if layer.compress_time:
        x = torch.cat([frame for frame in x.split(1, dim=2) for _ in range(2)], dim=2)
    return for_torch.conv3d(x, layer.conv.weight[:, :, None], layer.conv.bias, edges=False, zoom=2)
