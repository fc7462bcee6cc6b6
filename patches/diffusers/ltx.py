"""Exact forms, fit for tracing, of statements of diffusers' LTX-Video transformer.

Shapes: B batch, H heads, S queries, L text tokens.
"""


def key_mask(encoder_attention_mask):
    """Returns which keys of cross-attention are valid, for every query: bool [B, 1, L].

    Args:
        encoder_attention_mask: [B, L], nonzero if valid; or None, or another shape, which is returned as it is.
    """
    if encoder_attention_mask is None or encoder_attention_mask.ndim != 2:
        return encoder_attention_mask
    return encoder_attention_mask.bool().unsqueeze(1)


def mask_of_all_heads(attn, attention_mask, sequence_length, batch_size):
    """Returns a mask for every head: [B, 1, 1 or S, L]; upstream's own form, [B, H, ...], where its length is another.

    Args:
        attn: The module.
        attention_mask: [B, 1 or S, L], or None.
        sequence_length: The number of keys.
        batch_size: B.
    """
    if attention_mask is None:
        return None
    if attention_mask.shape[0] == batch_size and attention_mask.shape[-1] == sequence_length:
        return attention_mask.unsqueeze(1)
    attention_mask = attn.prepare_attention_mask(attention_mask, sequence_length, batch_size)
    return attention_mask.view(batch_size, attn.heads, -1, attention_mask.shape[-1])
