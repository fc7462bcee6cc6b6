"""The VAE: causal in time, and in tiles where a frame is large."""

from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.autoencoders.vae import BaseOutput, DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from diffusers.models.modeling_utils import ModelMixin
from torch import distributed as dist
from torch import nn

from hyvideo.commons.parallel_states import get_parallel_state


@dataclass
class DecoderOutput(BaseOutput):
    """A video."""

    sample: torch.FloatTensor
    posterior: Optional[DiagonalGaussianDistribution] = None


class CausalConv3d(nn.Module):
    """A convolution that sees no later frame."""

    def __init__(self, chan_in, chan_out, kernel_size=3):
        super().__init__()
        self.time_causal_padding = (kernel_size // 2,) * 4 + (kernel_size - 1, 0)
        self.conv = nn.Conv3d(chan_in, chan_out, kernel_size)

    def forward(self, x):
        return self.conv(F.pad(x, self.time_causal_padding, mode="replicate"))


def prepare_causal_attention_mask(n_frame: int, n_hw: int, dtype, device, batch_size: int = None):
    """Fills the mask row by row, in place."""
    count = n_frame * n_hw
    mask = torch.full((count, count), -torch.inf, dtype=dtype, device=device)
    for row in range(count):
        mask[row, : n_hw * (1 + row // n_hw)] = 0
    return mask if batch_size is None else mask[None].expand(batch_size, -1, -1)


class RMS_norm(nn.Module):
    """Channels of unit length, times a gain for each."""

    def __init__(self, dim):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim, 1, 1, 1))

    def forward(self, x):
        return F.normalize(x, dim=1) * x.shape[1] ** 0.5 * self.gamma


class AttnBlock(nn.Module):
    """Positions attend to their own frame and earlier ones."""

    def __init__(self, in_channels: int):
        super().__init__()
        self.norm = RMS_norm(in_channels)
        for name in ("q", "k", "v", "proj_out"):
            self.add_module(name, nn.Conv3d(in_channels, in_channels, kernel_size=1))

    def forward(self, x):
        frames, size = x.shape[2], x.shape[2:]
        normal = self.norm(x)
        q, k, v = (layer(normal).flatten(2).transpose(1, 2)[:, None] for layer in (self.q, self.k, self.v))
        mask = prepare_causal_attention_mask(frames, size[1] * size[2], q.dtype, x.device, batch_size=x.shape[0])
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        return x + self.proj_out(mixed[:, 0].transpose(1, 2).unflatten(2, size))


class ResnetBlock(nn.Module):
    """Two convolutions of what is normalised, and a shortcut."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.norm1, self.norm2 = RMS_norm(in_channels), RMS_norm(out_channels)
        self.conv1, self.conv2 = CausalConv3d(in_channels, out_channels), CausalConv3d(out_channels, out_channels)
        if in_channels != out_channels:
            self.nin_shortcut = nn.Conv3d(in_channels, out_channels, kernel_size=1)

    def forward(self, x):
        shortcut = self.nin_shortcut(x) if self.in_channels != self.out_channels else x
        return shortcut + self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))


class Upsample(nn.Module):
    """Channels become rows, columns and frames; those of the first frame become no frames."""

    def __init__(self, in_channels: int, out_channels: int, add_temporal_upsample: bool = True):
        super().__init__()
        factor = 8 if add_temporal_upsample else 4
        self.conv = CausalConv3d(in_channels, out_channels * factor)
        self.add_temporal_upsample = add_temporal_upsample
        self.repeats = factor * out_channels // in_channels

    def forward(self, x):
        hidden = self.conv(x)
        if not self.add_temporal_upsample:
            return _unfolded(hidden, 1) + _unfolded(x.repeat_interleave(self.repeats, 1), 1)
        first = _unfolded(hidden[:, :, :1], 1).chunk(2, dim=1)[0]
        first = first + _unfolded(x[:, :, :1], 1).repeat_interleave(self.repeats // 2, 1)
        rest = _unfolded(hidden[:, :, 1:], 2) + _unfolded(x[:, :, 1:], 2).repeat_interleave(self.repeats, 1)
        return torch.cat([first, rest], dim=2)


def _unfolded(x, frames):
    x = x.unflatten(1, (frames, 2, 2, -1)).permute(0, 4, 5, 1, 6, 2, 7, 3)
    return x.flatten(6, 7).flatten(4, 5).flatten(2, 3)


class Encoder(nn.Module):
    """Blocks of pixels and frames become channels."""

    def __init__(self, channels, width, latent, space, time):
        super().__init__()
        self.space, self.time = space, time
        self.conv_in = CausalConv3d(channels * space * space * time, width)
        self.attn = AttnBlock(width)
        self.conv_out = CausalConv3d(width, 2 * latent)

    def forward(self, x):
        x = torch.cat([x[:, :, :1]] * (self.time - 1) + [x], dim=2)
        x = x.unflatten(4, (-1, self.space)).unflatten(3, (-1, self.space)).unflatten(2, (-1, self.time))
        x = x.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(1, 4)
        return self.conv_out(F.silu(self.attn(self.conv_in(x))))


class Decoder(nn.Module):
    """A middle with attention, and levels that end with more positions and frames; the first frame stays one."""

    def __init__(self, z_channels, out_channels, block_out_channels, num_res_blocks, ffactor_spatial, ffactor_temporal):
        super().__init__()
        self.z_channels, self.block_out_channels = z_channels, block_out_channels
        width = block_out_channels[0]
        self.conv_in = CausalConv3d(z_channels, width)
        self.mid = nn.Module()
        self.mid.block_1, self.mid.attn_1 = ResnetBlock(width, width), AttnBlock(width)
        self.mid.block_2 = ResnetBlock(width, width)
        self.up = nn.ModuleList()
        for level, channels in enumerate(block_out_channels):
            up = nn.Module()
            up.block = nn.ModuleList(ResnetBlock(channels if n else width, channels) for n in range(num_res_blocks + 1))
            width = channels
            if 2**level < ffactor_spatial:
                width = block_out_channels[level + 1]
                up.upsample = Upsample(channels, width, 2**level < ffactor_temporal)
            self.up.append(up)
        self.norm_out = RMS_norm(width)
        self.conv_out = CausalConv3d(width, out_channels)

    def forward(self, z):
        x = self.conv_in(z) + z.repeat_interleave(self.block_out_channels[0] // self.z_channels, dim=1)
        x = self.mid.block_2(self.mid.attn_1(self.mid.block_1(x)))
        for up in self.up:
            for block in up.block:
                x = block(x)
            if hasattr(up, "upsample"):
                x = up.upsample(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class AutoencoderKLConv3D(ModelMixin, ConfigMixin):
    """Encodes and decodes, whole or in tiles whose edges are blended."""

    @register_to_config
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        latent_channels: int,
        block_out_channels: tuple[int, ...],
        layers_per_block: int,
        ffactor_spatial: int,
        ffactor_temporal: int,
        sample_size: int,
        sample_tsize: int,
        scaling_factor: float = None,
        shift_factor: Optional[float] = None,
        downsample_match_channel: bool = True,
        upsample_match_channel: bool = True,
    ):
        super().__init__()
        width, factors = block_out_channels[0], (ffactor_spatial, ffactor_temporal)
        self.ffactor_spatial, self.ffactor_temporal = factors
        self.scaling_factor, self.shift_factor = scaling_factor, shift_factor
        self.encoder = Encoder(in_channels, width, latent_channels, *factors)
        reverse = list(reversed(block_out_channels))
        self.decoder = Decoder(latent_channels, out_channels, reverse, layers_per_block, *factors)
        self.use_spatial_tiling = False
        self._tile_parallelism_enabled = False
        self.set_tile_sample_min_size(sample_size, 0.25)

    def set_tile_sample_min_size(self, sample_size: int, tile_overlap_factor: float = 0.2):
        self.tile_sample_min_size = sample_size
        self.tile_latent_min_size = sample_size // self.ffactor_spatial
        self.tile_overlap_factor = tile_overlap_factor

    def enable_tiling(self, use_tiling: bool = True):
        self.use_spatial_tiling = use_tiling

    def blend_v(self, a: torch.Tensor, b: torch.Tensor, blend_extent: int):
        extent = min(blend_extent, a.shape[3], b.shape[3])
        for step in range(extent):
            above = a[:, :, :, a.shape[3] - extent + step]
            b[:, :, :, step] = above * (1 - step / extent) + b[:, :, :, step] * (step / extent)
        return b

    def blend_h(self, a: torch.Tensor, b: torch.Tensor, blend_extent: int):
        extent = min(blend_extent, a.shape[4], b.shape[4])
        for step in range(extent):
            left = a[..., a.shape[4] - extent + step]
            b[..., step] = left * (1 - step / extent) + b[..., step] * (step / extent)
        return b

    def enable_tile_parallelism(self):
        self._tile_parallelism_enabled = True

    def _tiles(self, x, size):
        """Returns rows of tiles, each as large as `size` where the frame does not end."""
        stride = int(size * (1 - self.tile_overlap_factor))
        down, right = (range(0, length, stride) for length in x.shape[3:])
        return [[x[..., top : top + size, left : left + size] for left in right] for top in down]

    def _blended(self, rows, size):
        extent = int(size * self.tile_overlap_factor)
        keep, result = size - extent, []
        for i, row in enumerate(rows):
            for j, tile in enumerate(row):
                if i:
                    self.blend_v(rows[i - 1][j], tile, extent)
                if j:
                    self.blend_h(row[j - 1], tile, extent)
            result.append(torch.cat([tile[..., :keep, :keep] for tile in row], dim=4))
        return torch.cat(result, dim=3)

    def spatial_tiled_decode(self, z: torch.Tensor):
        rows = [[self.decoder(tile) for tile in row] for row in self._tiles(z, self.tile_latent_min_size)]
        if self._tile_parallelism_enabled:
            for row in rows:
                for tile in row:
                    dist.all_gather([torch.empty_like(tile)], tile, group=get_parallel_state().sp_group)
        return self._blended(rows, self.tile_sample_min_size)

    def encode(self, x: torch.Tensor, return_dict: bool = True):
        if self.use_spatial_tiling and max(x.shape[3:]) > self.tile_sample_min_size:
            rows = [[self.encoder(tile) for tile in row] for row in self._tiles(x, self.tile_sample_min_size)]
            moments = self._blended(rows, self.tile_latent_min_size)
        else:
            moments = self.encoder(x)
        posterior = DiagonalGaussianDistribution(moments)
        return AutoencoderKLOutput(latent_dist=posterior) if return_dict else (posterior,)

    def decode(self, z: torch.Tensor, return_dict: bool = True, generator=None):
        tiled = self.use_spatial_tiling and max(z.shape[3:]) > self.tile_latent_min_size
        sample = self.spatial_tiled_decode(z) if tiled else self.decoder(z)
        return DecoderOutput(sample=sample) if return_dict else (sample,)
