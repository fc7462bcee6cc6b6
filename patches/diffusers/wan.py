"""Exact forms, fit for tracing, of statements of diffusers' Wan transformer.

Shapes: B batch, S tokens, H heads, D features of a head.
"""

import torch


def rotated(query, key, rotary_emb):
    """Returns queries and keys with rotary embeddings on pairs of neighbouring features.

    Args:
        query: [B, S, H, D].
        key: [B, S, H, D].
        rotary_emb: Cosines and sines, each [1, S, 1, D], where a pair has its value twice; None in cross-attention.
    """
    if rotary_emb is None:
        return query, key
    cos, sin = rotary_emb[0][..., 0::2], rotary_emb[1][..., 1::2]

    def turned(x):
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).type_as(x)

    return turned(query), turned(key)
