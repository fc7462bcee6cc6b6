"""PyTorch's attention, as torchax traces it."""


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """Returns what the torch function of this name does, for torchax's tensors.

    Raises:
        AttentionError: Dropout, or a mask of all pairs of tokens that is too large to hold.
    """
    from torchport import engine
    from torchport.kernels.attention import sdpa

    inputs = (query, key, value, attn_mask, dropout_p, is_causal)
    return engine.call_kernel(sdpa.scaled_dot_product_attention, *inputs, scale=scale, enable_gqa=enable_gqa)
