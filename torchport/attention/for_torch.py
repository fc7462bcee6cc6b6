"""Attention for patches: functions of torch tensors, traced into JAX under torchax and computed eagerly without it.

Shapes: B batch, H heads, S queries, T keys, D features of a head.
"""

from __future__ import annotations

import sys

import torch
from torch.nn import functional


def attention(
    q_BHSD: torch.Tensor,
    k_BHTD: torch.Tensor,
    v_BHTD: torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    bound: str | None = None,
) -> torch.Tensor:
    """Returns attention over the first `lengths` tokens of each sample; 0 for queries beyond them where S equals T.

    Args:
        q_BHSD: Queries [B, H, S, D].
        k_BHTD: Keys [B, H, T, D].
        v_BHTD: Values [B, H, T, D].
        lengths: Integers [B]; None: all tokens.
        scale: 1 / sqrt(D) by default.
        causal: Whether query s sees keys up to s only.
        bound: The model card's name for the bound of these scores, if their q and k are normalised.

    Returns:
        [B, H, S, D] of q's dtype.
    """
    if not _traced(q_BHSD):
        return _eager(q_BHSD, k_BHTD, v_BHTD, lengths, scale, causal)
    from torchax import interop

    from torchport.attention import dispatch

    inputs = {"lengths": lengths, "scale": scale, "causal": causal, "bound": bound}
    output: torch.Tensor = interop.call_jax(dispatch.attention, q_BHSD, k_BHTD, v_BHTD, **inputs)
    return output


def _traced(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is torchax's; without torchax there is none."""
    module = sys.modules.get("torchax.tensor")
    return module is not None and isinstance(tensor, module.Tensor)


def _eager(
    q_BHSD: torch.Tensor,
    k_BHTD: torch.Tensor,
    v_BHTD: torch.Tensor,
    lengths: torch.Tensor | None,
    scale: float | None,
    causal: bool,
) -> torch.Tensor:
    valid_BT = None if lengths is None else torch.arange(k_BHTD.shape[2], device=lengths.device) < lengths[:, None]
    mask = None if valid_BT is None else valid_BT[:, None, None, :]
    if mask is not None and causal:
        mask = mask & torch.ones(q_BHSD.shape[2], k_BHTD.shape[2], dtype=torch.bool, device=mask.device).tril()
    output = functional.scaled_dot_product_attention(
        q_BHSD, k_BHTD, v_BHTD, attn_mask=mask, is_causal=causal and mask is None, scale=scale
    )
    if valid_BT is not None and q_BHSD.shape[2] == k_BHTD.shape[2]:
        output = torch.where(valid_BT[:, None, :, None], output, torch.zeros_like(output))
    return output
