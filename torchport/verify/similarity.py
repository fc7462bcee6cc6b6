"""How alike two pictures or two tensors are: PSNR, SSIM, cosine, the greatest difference.

Shapes: C channels, H rows and W columns of a frame.
"""

from __future__ import annotations

import functools
import math

import torch

LEVELS = 255
"""The greatest value of a byte, to which PSNR and SSIM refer."""
RADIUS, SIGMA = 5, 1.5
"""Of SSIM's window, 11 x 11, in pixels."""
K1, K2 = 0.01, 0.03
"""SSIM's constants."""


def mean_square(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the mean of the squared differences of bytes."""
    return float((a.double() - b.double()).square().mean())


def psnr(mean_square: float) -> float:
    """Returns the peak signal-to-noise ratio, in dB, of a mean square of bytes; infinite where nothing differs."""
    return math.inf if mean_square == 0 else 10 * math.log10(LEVELS**2 / mean_square)


def ssim(a_CHW: torch.Tensor, b_CHW: torch.Tensor) -> float | None:
    """Returns the structural similarity of two frames, the mean of all channels; 1 where they are equal.

    Returns:
        The mean over all whole windows; None if a frame is smaller than one. It agrees within 1e-12 with scikit-image's
        `structural_similarity(gaussian_weights=True, sigma=1.5, use_sample_covariance=False, data_range=255)`.

    Source: Wang, Bovik, Sheikh, Simoncelli: Image quality assessment, IEEE Transactions on Image Processing 13 (2004),
    equation 13 and its window.
    """
    if min(a_CHW.shape[-2:]) < 2 * RADIUS + 1:
        return None
    a, b = a_CHW.double(), b_CHW.double()
    mean_a, mean_b, square_a, square_b, product = _windows(torch.stack([a, b, a * a, b * b, a * b]))
    c1, c2 = (K1 * LEVELS) ** 2, (K2 * LEVELS) ** 2
    variances = square_a - mean_a.square() + square_b - mean_b.square()
    luminance = (2 * mean_a * mean_b + c1) / (mean_a.square() + mean_b.square() + c1)
    return float((luminance * (2 * (product - mean_a * mean_b) + c2) / (variances + c2)).mean())


def _windows(maps: torch.Tensor) -> torch.Tensor:
    """Returns the Gaussian mean of every whole window of the last two dims."""
    weights = [math.exp(-((n / SIGMA) ** 2) / 2) for n in range(-RADIUS, RADIUS + 1)]
    for dim in (-1, -2):
        length = maps.shape[dim] - 2 * RADIUS
        parts = (maps.narrow(dim, n, length) * (weight / sum(weights)) for n, weight in enumerate(weights))
        maps = functools.reduce(torch.Tensor.add_, parts)
    return maps


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the cosine of the angle between two tensors; 1 if both are zero, 0 if one is."""
    a, b = a.double().flatten(), b.double().flatten()
    norms = float(a.norm() * b.norm())
    if norms == 0:
        return float(not a.any() and not b.any())
    return float(a @ b) / norms


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns max|a - b| / max|b|; 0 if nothing differs, infinite if b alone is zero."""
    greatest, scale = float((a.double() - b.double()).abs().max()), float(b.double().abs().max())
    if greatest == 0:
        return 0.0
    return greatest / scale if scale else math.inf


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two tensors have the same dtype, shape and bytes."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    left, right = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b))
    return torch.equal(left, right)
