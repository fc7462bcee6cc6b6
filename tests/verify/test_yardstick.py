"""The yardstick computes in a wider dtype, and distances are relative to it."""

import math
from collections import OrderedDict

import pytest
import torch
from torch.utils import _pytree as pytree

from torchport.verify.yardstick import (
    channel_ratio,
    computing_in,
    distance,
    least_rounding,
    wide_dtype,
    wide_module,
    widened,
)


class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.table = torch.arange(3, dtype=torch.float32)

    def forward(self, x):
        return (x.to(torch.float32) * torch.linspace(0, 1, 3, dtype=torch.float32) + self.table) * self.weight


def test_float64_stands_beside_float32_and_float32_beside_bfloat16():
    assert wide_dtype(torch.float32) is torch.float64
    assert wide_dtype(torch.bfloat16) is torch.float32
    assert wide_dtype(torch.float16) is torch.float32


def test_what_a_module_casts_to_float32_stays_as_wide_as_the_yardstick():
    module, x = wide_module(Norm(), torch.float64), torch.rand(3, dtype=torch.float64)
    with computing_in(torch.float64):
        output = module(x)
    assert output.dtype is torch.float64
    exact = x * torch.linspace(0, 1, 3, dtype=torch.float64) + torch.arange(3, dtype=torch.float64)
    assert torch.equal(output, exact)


def test_what_upstream_compiles_runs_as_it_is_written():
    def refuse(graph, inputs):
        raise NotImplementedError("no compiled kernel has float64")

    doubled = torch.compile(lambda x: x * 2, backend=refuse)
    with computing_in(torch.float64):
        assert doubled(torch.ones(1, dtype=torch.float64)) == 2


def test_whole_numbers_and_masks_keep_their_dtypes():
    tree = widened({"ids": torch.tensor([1]), "mask": torch.tensor([True]), "x": torch.ones(1)}, torch.float64)
    assert [tree[name].dtype for name in ("ids", "mask", "x")] == [torch.int64, torch.bool, torch.float64]


def test_the_distance_is_that_of_the_worst_tensor():
    a, b = (torch.tensor([1.0, 2.0]), torch.tensor([10.0])), (torch.tensor([1.0, 2.0]), torch.tensor([8.0]))
    assert distance(a, b) == 0.25


def test_a_tensor_of_another_shape_is_not_compared():
    assert distance(torch.ones(2), torch.ones(3)) is None
    assert distance({"x": torch.ones(2), "mask": None}, {"x": torch.ones(2), "mask": torch.ones(1)}) == 0


def test_an_output_of_upstream_is_compared_by_its_names():
    """PyTorch knows no keys of a `ModelOutput` that nobody registered with them."""

    class Output(OrderedDict):
        pass

    def flat(output):
        return list(output.values()), list(output)

    pytree.register_pytree_node(Output, flat, lambda values, keys: Output(zip(keys, values, strict=True)))
    one, other = Output(sample=torch.ones(2), rest=[torch.zeros(1)]), Output(sample=torch.full((2,), 2.0))
    assert distance(one, other) == 0.5
    assert distance(one, Output(rest=(torch.ones(1),))) == 1


def test_nan_is_infinitely_far_unless_the_yardstick_has_it():
    nan = torch.tensor([math.nan, 1.0])
    assert distance(nan, torch.ones(2)) == math.inf
    assert distance(nan, nan) == 0
    assert distance(torch.ones(2), nan) == 0


def test_zeros_are_compared_absolutely():
    assert distance(torch.tensor([0.5]), torch.zeros(1)) == 0.5


def test_the_floor_is_one_rounding_of_the_narrowest_dtype():
    assert least_rounding([torch.ones(1), torch.ones(1, dtype=torch.bfloat16)]) == torch.finfo(torch.bfloat16).eps
    assert least_rounding([torch.tensor([1])]) == 0


def massive(dtype=torch.bfloat16):
    """Tokens of size 1 beside one value of 1e6: the exact ones, and those that a dtype has."""
    exact = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    exact[3, 5] = 1e6
    return exact, exact.to(dtype)


@pytest.mark.parametrize("channels", [slice(None), slice(8, 10), slice(5, 6)], ids=["all", "two", "its own"])
def test_a_massive_value_hides_no_change_of_the_other_channels(channels):
    exact, rounded = massive()
    changed = rounded.clone()
    changed[:, channels] += 0.1
    assert distance(changed, exact) == distance(rounded, exact)
    assert (channel_ratio(changed, exact, rounded) > 3) is (channels != slice(5, 6))


def test_another_rounding_of_every_channel_is_no_fault():
    exact, rounded = massive()
    noise = torch.rand(64, 32, generator=torch.Generator().manual_seed(1)) - 0.5
    other = (exact * (1 + noise * torch.finfo(torch.bfloat16).eps)).to(torch.bfloat16)
    assert channel_ratio(rounded, exact, rounded) <= 1
    assert channel_ratio(other, exact, rounded) < 2


def test_a_channel_of_few_values_has_no_figure():
    exact, rounded = massive()
    assert channel_ratio(rounded[:7] + 1, exact[:7], rounded[:7]) == 0
    assert channel_ratio(rounded[:8] + 1, exact[:8], rounded[:8]) > 3


def test_the_channels_of_a_video_are_its_second_dim():
    exact = torch.ones(1, 2, 3, 4, 4)
    exact[:, 0] *= 1e6
    changed = exact.clone()
    changed[:, 1] += 1e-3
    assert channel_ratio(changed, exact, exact) > 1e3
    assert distance(changed, exact) < 1e-8
