"""Exact forms, fit for tracing, of functions of Tencent's HunyuanVideo-1.5 transformer.

Shapes: B batch, S tokens of image and text, L tokens of text, H heads, D features of a head, C features.
"""

import torch
from torch.nn import functional

from torchport.errors import BadValueError
from torchport.kernels.attention.for_torch import Stream, attention, self_attention, token_multiple

DENSE = ("flash", "flash2", "flash3", "torch")
"""Attention modes that compute the same thing: softmax over image and valid text tokens."""


def padded_tokens(original, self, x):
    """Returns the image's tokens [B, S, C], padded with zeros to the multiple that the mesh and the kernel want.

    Args:
        original: Upstream's method.
        self: The module.
        x: The latents [B, C, T, H, W].
    """
    tokens = original(self, x)
    missing = -tokens.shape[1] % token_multiple(tokens)
    return functional.pad(tokens, (0, 0, 0, missing)) if missing else tokens


def final_tokens(self, img, vec, freqs_cos):
    """Returns the prediction [B, S, C] of every token that has a position: the others are padding.

    Args:
        self: The transformer.
        img: The image's tokens after the last block.
        vec: The modulation's vector.
        freqs_cos: Cosines, a row for each token.
    """
    return self.final_layer(img, vec)[:, : freqs_cos.shape[0]]


def unrotated(img_q, img_k):
    """Returns the image's queries and keys as they are: `joint_attention` normalises and turns them."""
    return img_q, img_k


def joint_attention(
    self, img, img_q, img_k, img_v, txt_q, txt_k, txt_v, freqs_cis, text_mask, attn_mode, img_mod1_gate
):
    """Returns the image's tokens [B, S, C] after attention, and the text's attention [B, L, H * D].

    Args:
        self: The block.
        img: The image's tokens before it.
        img_q: The image's queries [B, S, H, D], neither normalised nor turned.
        img_k: Its keys, likewise.
        img_v: Its values.
        txt_q: The text's queries [B, L, H, D], normalised.
        txt_k: Its keys, likewise.
        txt_v: Its values.
        freqs_cis: Cosines and sines, a row for each of the image's tokens; what lies beyond is padding.
        text_mask: [B, L], nonzero for valid tokens, which come first: `valid_tokens_first` has put them in order. Their
            number is therefore the whole mask.
        attn_mode: One of the dense modes.
        img_mod1_gate: What the image's attention is multiplied by.

    Raises:
        BadValueError: `sageattn` (attends to padding, in 8 bits), `flex-block-attn` (leaves blocks out), or no mask.
    """
    from hyvideo.models.transformers.modules.modulate_layers import apply_gate
    from hyvideo.models.transformers.modules.posemb_layers import apply_rotary_emb

    _check(attn_mode, text_mask)
    images = (x.flatten(2) for x in (img_q, img_k, img_v))
    attended, text = self_attention(
        Stream(*images, self.img_attn_q_norm, self.img_attn_k_norm),
        Stream(*(x.flatten(2) for x in (txt_q, txt_k, txt_v))),
        rotary=freqs_cis,
        rotate=lambda x: apply_rotary_emb(x, x, freqs_cis, head_first=False)[0],
        lengths=text_mask.bool().sum(dim=1),
        project=self.img_attn_proj,
        bound="joint",
    )
    return img + apply_gate(attended, gate=img_mod1_gate), text


def whole_attention(q, k, v, img_q_len, img_kv_len, attn_mode=None, text_mask=None, attn_param=None, block_idx=None):
    """Returns the attention [B, S, H * D] of image and text tokens over image and valid text tokens.

    Args:
        q: Queries of the image [B, S - L, H, D] and of the text [B, L, H, D].
        k: Keys, likewise.
        v: Values, likewise.
        img_q_len: Not read: the shapes say it.
        img_kv_len: Not read, likewise.
        attn_mode: One of the dense modes.
        text_mask: [B, L], nonzero for valid tokens, which come first.
        attn_param: Settings of the sparse mode; not read.
        block_idx: Not read.

    Raises:
        BadValueError: `sageattn` (attends to padding, in 8 bits), `flex-block-attn` (leaves blocks out), or no mask.
    """
    _check(attn_mode, text_mask)
    query, key, value = (torch.cat(pair, dim=1).transpose(1, 2) for pair in (q, k, v))
    # The image is whole, and `valid_tokens_first` has put the text in order: the number of valid tokens is the mask.
    lengths = q[0].shape[1] + text_mask.bool().sum(dim=1)
    return attention(query, key, value, lengths=lengths, bound="joint").transpose(1, 2).flatten(2)


def _check(attn_mode, text_mask):
    if attn_mode not in DENSE:
        raise BadValueError(
            "hyvideo's attn_mode",
            f"It is {attn_mode!r}, which computes something else than dense attention",
            f"Use one of {', '.join(DENSE)}",
        )
    if text_mask is None:
        raise BadValueError("hyvideo's text_mask", "It is None", "Pass the mask: upstream has no unmasked mode either")


def refiner_attention(q, k, v, drop_rate=0.0, attn_mask=None, causal=False, attn_mode="flash"):
    """Returns the attention [B, L, H * D] of text tokens [B, L, H, D] over the valid ones.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        drop_rate: 0: this is inference.
        attn_mask: [B, L], nonzero for valid tokens, or None if all are.
        causal: Whether a token attends to earlier ones only.
        attn_mode: One of the dense modes.

    Raises:
        BadValueError: Dropout, causal attention under a mask, or a mode that is not dense.
    """
    if attn_mode not in DENSE or drop_rate or (causal and attn_mask is not None):
        raise BadValueError(
            "hyvideo's attention",
            f"attn_mode={attn_mode!r}, drop_rate={drop_rate}, causal={causal}",
            "Only dense attention without dropout, and causal only without a mask, is carried over",
        )
    query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
    if attn_mask is None:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=causal).transpose(1, 2).flatten(2)
    valid = attn_mask.bool()
    output = functional.scaled_dot_product_attention(query, key, value, attn_mask=valid[:, None, None, :])
    output = torch.where(valid[:, None, :, None], output, torch.zeros_like(output))
    return output.transpose(1, 2).flatten(2)


def valid_tokens_first(self, byt5_txt, txt, byt5_text_mask, text_mask, zero_feat=False, is_reorder=True):
    """Returns both groups' tokens [B, S, C], valid ones first and in order, and their mask [B, S] as int64.

    Args:
        self: The transformer; not read.
        byt5_txt: The first group's tokens.
        txt: The second group's.
        byt5_text_mask: The first group's mask, nonzero for valid tokens.
        text_mask: The second group's.
        zero_feat: Whether tokens that are not valid become zeros.
        is_reorder: True: attention relies on the order.

    Raises:
        BadValueError: Another order.
    """
    if not is_reorder:
        remedy = "Leave it: attention takes the number of valid tokens as the whole mask"
        raise BadValueError("hyvideo's is_reorder", "It is False", remedy)
    tokens = torch.cat([byt5_txt, txt], dim=1)
    valid = torch.cat([byt5_text_mask.bool(), text_mask.bool()], dim=1)
    if zero_feat:
        # where, not a product: a token that is not valid may hold anything, and 0 * NaN is NaN.
        tokens = torch.where(valid[..., None], tokens, torch.zeros_like(tokens))
    order = torch.argsort((~valid).int(), dim=1, stable=True)
    tokens = torch.gather(tokens, 1, order[..., None].expand_as(tokens))
    return tokens, torch.gather(valid, 1, order).to(torch.int64)


def vision_condition(mask_type, vision_states, extra_encoder_hidden_states, text_mask):
    """Returns the vision tokens [B, S, C] and their mask [B, S]: zeros, masked out, if a t2v job's states are all zero.

    Args:
        mask_type: `t2v` or `i2v`.
        vision_states: [B, S, D], zeros for text-to-video.
        extra_encoder_hidden_states: Their projection.
        text_mask: Gives the mask's dtype.
    """
    tokens = extra_encoder_hidden_states
    mask = torch.ones(tokens.shape[:2], dtype=text_mask.dtype, device=text_mask.device)
    if mask_type == "t2v":
        without = torch.all(vision_states == 0)
        tokens = torch.where(without, torch.zeros_like(tokens), tokens)
        mask = torch.where(without, torch.zeros_like(mask), mask)
    return tokens, mask
