"""Rotary positions in time, height and width, interleaved pairs."""

from functools import cache

import torch


def rotate_half(x):
    even, odd = x.float()[..., 0::2], x.float()[..., 1::2]
    return torch.stack([-odd, even], dim=-1).flatten(-2)


def apply_rotary_emb(xq, xk, freqs_cis, head_first=False):
    cos, sin = (table.to(xq.device)[None, :, None, :] for table in freqs_cis)
    turned = [(x.float() * cos + rotate_half(x) * sin).type_as(x) for x in (xq, xk)]
    return turned[0], turned[1]


@cache
def get_nd_rotary_pos_embed(
    rope_dim_list, start, *args, theta=10000.0, use_real=False, theta_rescale_factor=1.0, interpolation_factor=1.0
):
    """Returns cosines and sines [T * H * W, D] on the host, whatever the device of the tokens."""
    places = torch.meshgrid(*(torch.arange(count, dtype=torch.float32) for count in start), indexing="ij")
    tables = []
    for dim, place in zip(rope_dim_list, places, strict=True):
        rates = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / -dim)
        tables.append((place.reshape(-1, 1) * rates).repeat_interleave(2, dim=1))
    angles = torch.cat(tables, dim=1)
    return angles.cos(), angles.sin()
