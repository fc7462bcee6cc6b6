"""PyTorch's attention, as torchax traces it."""


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """Returns what the torch function of this name does, for torchax's tensors.

    Raises:
        AttentionError: Dropout, or a mask of all pairs of tokens that is too large to hold.
    """
    import torch

    from torchport import engine
    from torchport.kernels.attention import sdpa

    inputs = (query, key, value, attn_mask, dropout_p, is_causal)
    if query.dtype == torch.float64 and not dropout_p:  # the kernels know 32 bits
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = query.new_zeros(attn_mask.shape).masked_fill(attn_mask.logical_not(), float("-inf"))
        inputs, options = (query, key, value, attn_mask, 0.0, is_causal), {"scale": scale, "enable_gqa": enable_gqa}
        return torch.ops.aten._scaled_dot_product_attention_math(*inputs, **options)[0]
    return engine.call_kernel(sdpa.scaled_dot_product_attention, *inputs, scale=scale, enable_gqa=enable_gqa)
