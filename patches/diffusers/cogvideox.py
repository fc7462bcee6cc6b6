"""Exact forms, fit for tracing, of statements of diffusers' CogVideoX transformer.

Shapes: B batch, H heads, S tokens, D features of a head.
"""

import torch


def normed_and_rotated(attn, query, key, text_seq_length, image_rotary_emb):
    """Returns queries and keys, normed, with rotary embeddings on the tokens behind the text's, which are joined anew.

    Args:
        attn: The module: its norms, and whether it is cross-attention, whose keys are not rotated.
        query: [B, H, S, D].
        key: [B, H, S, D].
        text_seq_length: The number of text tokens, which come first.
        image_rotary_emb: Cosines and sines, each [S - text_seq_length, D]; or None.
    """
    from diffusers.models.embeddings import apply_rotary_emb

    def joined(x):
        text, image = x[:, :, :text_seq_length], x[:, :, text_seq_length:]
        return torch.cat([text, apply_rotary_emb(image, image_rotary_emb)], dim=2)

    query = query if attn.norm_q is None else attn.norm_q(query)
    key = key if attn.norm_k is None else attn.norm_k(key)
    if image_rotary_emb is None:
        return query, key
    return joined(query), key if attn.is_cross_attention else joined(key)
