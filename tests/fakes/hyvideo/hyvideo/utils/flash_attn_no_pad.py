"""Attention without padding, by kernels for CUDA."""


def flash_attn_no_pad(
    qkv, key_padding_mask, causal=False, dropout_p=0.0, softmax_scale=None, deterministic=False
):  # fmt: skip
    from flash_attn import flash_attn_varlen_qkvpacked_func

    return flash_attn_varlen_qkvpacked_func(qkv, key_padding_mask, dropout_p, softmax_scale, causal, deterministic)


def flash_attn_no_pad_v3(
    qkv, key_padding_mask, causal=False, dropout_p=0.0, softmax_scale=None, deterministic=False
):  # fmt: skip
    from flash_attn_interface import flash_attn_varlen_func

    return flash_attn_varlen_func(qkv, key_padding_mask, softmax_scale, causal, deterministic)
