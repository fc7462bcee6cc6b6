"""Exact forms, fit for tracing, of functions of the VAE of Tencent's HunyuanVideo-1.5."""

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
    later = frame[None, :] > frame[:, None]
    mask = torch.zeros(later.shape, dtype=dtype, device=device).masked_fill(later, float("-inf"))
    return mask if batch_size is None else mask.unsqueeze(0).expand(batch_size, -1, -1)


def blend_v(self, a, b, blend_extent):
    """Blends the last rows of the tile above, `a`, into the first rows of `b` [B, C, T, H, W], and returns `b`.

    In place, as upstream's: the tile below blends with rows that are blended already.
    """
    return _blend(a, b, blend_extent, -2)


def blend_h(self, a, b, blend_extent):
    """Blends the last columns of the tile to the left, `a`, into the first columns of `b`; see `blend_v`."""
    return _blend(a, b, blend_extent, -1)


def _blend(a, b, extent, dim):
    extent = min(a.shape[dim], b.shape[dim], extent)
    if extent == 0:
        return b
    # As upstream's products with Python floats: each in float32 at least, rounded to the tensor's dtype, then added.
    wide = torch.float64 if b.dtype == torch.float64 else torch.float32
    steps = torch.arange(extent, dtype=torch.float64) / extent
    shape = [1] * b.dim()
    shape[dim] = extent
    new, old = (weights.to(wide).to(b.device).view(shape) for weights in (steps, 1 - steps))
    overlap, rest = b.split([extent, b.shape[dim] - extent], dim=dim)
    above = a.narrow(dim, a.shape[dim] - extent, extent)
    overlap = (above.to(wide) * old).to(b.dtype) + (overlap.to(wide) * new).to(b.dtype)
    # The whole tile is written, not a view of its edge: of a traced tensor, a view is a copy, and would be lost.
    return b.copy_(torch.cat([overlap, rest], dim=dim))
