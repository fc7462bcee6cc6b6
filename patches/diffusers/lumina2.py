"""Exact forms, fit for tracing, of statements of diffusers' Lumina 2 transformer.

Shapes: B batch, L text tokens with their padding, S tokens of the picture, D features.
"""

import torch


def positions(original, self, hidden_states, attention_mask):
    """Returns what upstream returns, with the text's padding kept: tokens, positions of both, and their lengths.

    Upstream puts the picture's tokens behind the valid ones of the text, and asks for their number. Here they lie
    behind the padding, at the same positions.

    Args:
        original: Upstream's method.
        self: The module.
        hidden_states: Latents [B, C, H, W].
        attention_mask: [B, L], nonzero if valid. Valid tokens come first.
    """
    batch, _, height, width = hidden_states.shape
    size, length = self.patch_size, attention_mask.shape[1]
    rows, columns = height // size, width // size
    device = hidden_states.device
    text = torch.arange(length, device=device).expand(batch, length)
    behind = attention_mask.sum(dim=1).to(text.dtype)[:, None].expand(batch, rows * columns)
    down = torch.arange(rows, device=device).repeat_interleave(columns).expand(batch, -1)
    across = torch.arange(columns, device=device).repeat(rows).expand(batch, -1)
    nothing = torch.zeros_like(text)
    ids = torch.cat([torch.stack([text, nothing, nothing], dim=-1), torch.stack([behind, down, across], dim=-1)], dim=1)
    rotary = self._get_freqs_cis(ids)
    tokens = hidden_states.unflatten(3, (columns, size)).unflatten(2, (rows, size)).permute(0, 2, 4, 3, 5, 1)
    tokens = tokens.flatten(3).flatten(1, 2)
    lengths, lengths_of_both = [length] * batch, [length + rows * columns] * batch
    return tokens, rotary[:, :length], rotary[:, length:], rotary, lengths, lengths_of_both


def joined(hidden_states, encoder_hidden_states, encoder_attention_mask):
    """Returns tokens of text and picture [B, L + S, D], which of them are valid [B, L + S], and that a mask is used.

    Args:
        hidden_states: Of the picture, [B, S, D].
        encoder_hidden_states: Of the text, [B, L, D].
        encoder_attention_mask: [B, L], nonzero if valid.
    """
    valid = torch.ones(hidden_states.shape[:2], dtype=torch.bool, device=hidden_states.device)
    tokens = torch.cat([encoder_hidden_states, hidden_states], dim=1)
    return tokens, torch.cat([encoder_attention_mask.bool(), valid], dim=1), True
