"""PSNR, SSIM, cosine and the greatest difference: values by hand, and SSIM's by scikit-image."""

import math

import pytest
import torch

from torchport.verify import yardstick


def flat(level, size=(3, 16, 16)):
    return torch.full(size, level, dtype=torch.uint8)


def test_psnr_of_a_level_everywhere_is_48_decibels():
    assert yardstick.mean_square(flat(100), flat(101)) == 1
    assert yardstick.psnr(1) == pytest.approx(48.1308, abs=1e-4)
    assert yardstick.psnr(yardstick.mean_square(flat(0), flat(255))) == 0, "black and white"
    assert yardstick.psnr(0) == math.inf


def test_bytes_are_subtracted_as_numbers():
    assert yardstick.mean_square(flat(3), flat(5)) == yardstick.mean_square(flat(5), flat(3)) == 4


def test_ssim_of_equal_frames_is_one():
    noise = torch.randint(0, 256, (3, 20, 30), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    assert yardstick.ssim(noise, noise) == pytest.approx(1, abs=1e-12)


def test_ssim_of_two_levels_is_their_luminance():
    c1 = (0.01 * 255) ** 2
    by_hand = (2 * 100 * 110 + c1) / (100**2 + 110**2 + c1)
    assert yardstick.ssim(flat(100), flat(110)) == pytest.approx(by_hand, abs=1e-12)


def test_ssim_of_a_point_is_that_of_one_window():
    point = flat(0, (1, 11, 11))
    point[0, 5, 5] = 255
    weight = 1 / sum(math.exp(-(n**2) / (2 * 1.5**2)) for n in range(-5, 6)) ** 2
    mean, square = 255 * weight, 255**2 * weight
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    by_hand = c1 / (mean**2 + c1) * c2 / (square - mean**2 + c2)
    assert yardstick.ssim(point, flat(0, (1, 11, 11))) == pytest.approx(by_hand, abs=1e-12)


def test_ssim_is_scikit_images():
    """Its 0.26.0, float64: gaussian_weights, sigma=1.5, use_sample_covariance=False, data_range=255, channel_axis."""
    y, x = torch.meshgrid(torch.arange(24), torch.arange(32), indexing="ij")
    a = torch.stack([(7 * x + 13 * y + 29 * channel) % 256 for channel in range(3)])
    others = {
        (a + 3 * x * y % 17) % 256: 0.7980702371877694,
        a // 2 + 60: 0.7813135445356876,
        255 - a: -0.6648320397116884,
    }
    for other, value in others.items():
        assert yardstick.ssim(a.to(torch.uint8), other.to(torch.uint8)) == pytest.approx(value, abs=1e-12)
    corner, other = a[:, :11, :11].to(torch.uint8), (a // 2 + 60)[:, :11, :11].to(torch.uint8)
    assert yardstick.ssim(corner, other) == pytest.approx(0.8137469416172217, abs=1e-12)


def test_a_frame_smaller_than_the_window_has_no_ssim():
    assert yardstick.ssim(flat(1, (3, 10, 64)), flat(1, (3, 10, 64))) is None


def test_the_cosine_is_that_of_the_angle():
    right, diagonal = torch.tensor([1.0, 0.0]), torch.tensor([3.0, 3.0])
    assert yardstick.cosine(right, diagonal) == pytest.approx(math.sqrt(0.5))
    assert yardstick.cosine(right, -right) == -1
    assert yardstick.cosine(0 * right, right) == 0 and yardstick.cosine(0 * right, 0 * right) == 1


def test_the_difference_is_relative_to_the_second():
    assert yardstick.difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, -4.0])) == 1.5
    assert yardstick.difference(torch.zeros(2), torch.zeros(2)) == 0
    assert yardstick.difference(torch.ones(2), torch.zeros(2)) == math.inf
    halves = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert yardstick.difference(halves, torch.tensor([1.0, 2.5])) == pytest.approx(0.2), "of two dtypes"


def test_same_means_the_same_bytes():
    assert yardstick.is_same(torch.ones(2, 3).T, torch.ones(3, 2))
    assert not yardstick.is_same(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not yardstick.is_same(torch.ones(2), torch.ones(2, dtype=torch.float64))
    assert not yardstick.is_same(torch.ones(2), torch.ones(1, 2))
