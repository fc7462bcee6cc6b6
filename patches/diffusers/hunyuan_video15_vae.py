"""Exact forms, fit for tracing, of functions of diffusers' HunyuanVideo-1.5 VAE."""

import torch


def causal_mask(n_frame, n_hw, dtype, device, batch_size=None):
    """Returns the mask with which a position attends to its own frame and earlier ones: 0 there, else -inf.

    Args:
        n_frame: Latent frames.
        n_hw: Positions of one frame.
        dtype: Of the mask.
        device: Of the mask.
        batch_size: Adds a leading dim of this size, if given.

    Returns:
        [n_frame * n_hw, n_frame * n_hw], or with the batch before it.
    """
    frame = torch.arange(n_frame * n_hw, device=device) // n_hw
    allowed = frame[None, :] <= frame[:, None]
    mask = torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill(~allowed, float("-inf"))
    return mask if batch_size is None else mask.unsqueeze(0).expand(batch_size, -1, -1)
