"""An exact form, fit for tracing, of statements of diffusers' Mochi transformer.

Shapes: B batch, H heads, S video tokens, L text tokens, D dims of a head.
"""

import torch
import torch.nn.functional as F


def joint_attention(query, key, value, encoder_query, encoder_key, encoder_value, attention_mask):
    """Returns attention over video and text tokens, [B, H, S + L, D]; the rows of padded text tokens are 0.

    Args:
        query: Of the video, [B, H, S, D], as are `key` and `value`.
        key: See `query`.
        value: See `query`.
        encoder_query: Of the text, [B, H, L, D], as are `encoder_key` and `encoder_value`.
        encoder_key: See `encoder_query`.
        encoder_value: See `encoder_query`.
        attention_mask: [B, L], nonzero if valid. Valid tokens come first.
    """
    video = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool, device=query.device)
    valid = torch.cat([video, attention_mask.bool()], dim=1)
    output = F.scaled_dot_product_attention(
        torch.cat([query, encoder_query], dim=2),
        torch.cat([key, encoder_key], dim=2),
        torch.cat([value, encoder_value], dim=2),
        attn_mask=valid[:, None, None, :],
    )
    return torch.where(valid[:, None, :, None], output, 0.0)
