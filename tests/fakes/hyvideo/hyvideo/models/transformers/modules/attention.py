"""Attention of image and text tokens, and of text tokens alone."""

from typing import Optional

import torch
import torch.nn.functional as F

from hyvideo.commons import maybe_fallback_attn_mode
from hyvideo.commons.parallel_states import get_parallel_state
from hyvideo.utils.communications import all_gather, all_to_all_4D
from hyvideo.utils.flash_attn_no_pad import flash_attn_no_pad, flash_attn_no_pad_v3

_KERNELS = {"flash2": flash_attn_no_pad, "flash3": flash_attn_no_pad_v3}


def _dense(query, key, value, valid, causal=False):
    """A mask over queries and keys: a padded query has no key at all, and PyTorch's softmax gives it zeros."""
    mask = None
    if valid is not None:
        if valid.dtype != torch.bool:
            # Whether a mask's values are fit cannot be known while tracing.
            assert valid.max() <= 1 and valid.min() >= 0, "a mask holds 0 and 1"
        both = valid.bool()
        mask = (both[:, :, None] & both[:, None, :])[:, None]
    swapped = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return F.scaled_dot_product_attention(*swapped, attn_mask=mask, is_causal=causal).transpose(1, 2)


@torch.compiler.disable
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    drop_rate: float = 0.0,
    attn_mask: Optional[torch.Tensor] = None,
    causal: bool = False,
    attn_mode: str = "flash",
) -> torch.Tensor:
    if maybe_fallback_attn_mode(attn_mode) == "torch":
        return _dense(q, k, v, attn_mask, causal).flatten(2)
    return flash_attn_no_pad(torch.stack([q, k, v], dim=2), attn_mask, causal=causal, dropout_p=drop_rate).flatten(2)


@torch.compiler.disable
def parallel_attention(
    q, k, v, img_q_len, img_kv_len, attn_mode=None, text_mask=None, attn_param=None, block_idx=None
):  # fmt: skip
    return sequence_parallel_attention(
        q, k, v, img_q_len, img_kv_len, attn_mode, text_mask, attn_param=attn_param, block_idx=block_idx
    )


def sequence_parallel_attention(
    q, k, v, img_q_len, img_kv_len, attn_mode=None, text_mask=None, attn_param=None, block_idx=None
):  # fmt: skip
    state = get_parallel_state()
    image, text = zip(q, k, v, strict=True)
    if state.sp_enabled:
        image = [all_to_all_4D(tensor, state.sp_group, scatter_dim=2, gather_dim=1) for tensor in image]
        text = [tensor.chunk(state.sp, dim=2)[state.sp_rank] for tensor in text]
    joined = [torch.cat(pair, dim=1) for pair in zip(image, text, strict=True)]
    mode = maybe_fallback_attn_mode(attn_mode)
    if mode == "sageattn":
        from sageattention import sageattn

        out = sageattn(*joined, tensor_layout="NHD", is_causal=False)
    else:
        valid = F.pad(text_mask, (image[0].shape[1], 0), value=True)
        out = _dense(*joined, valid) if mode == "torch" else _KERNELS[mode](torch.stack(joined, dim=2), valid)
    if state.sp_enabled:
        own, shared = out.split([image[0].shape[1], text[0].shape[1]], dim=1)
        own = all_to_all_4D(own, state.sp_group, scatter_dim=1, gather_dim=2)
        out = torch.cat([own, all_gather(shared, dim=2, group=state.sp_group)], dim=1)
    return out.flatten(2)
