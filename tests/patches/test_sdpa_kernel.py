"""A region that allows only CUDA's kernels of attention raises without CUDA, and restricts nothing under the patch."""

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import torchport


def attend():
    torch.manual_seed(0)
    return functional.scaled_dot_product_attention(*torch.randn(3, 1, 2, 4, 8))


@pytest.mark.parametrize("backend", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION])
def test_a_region_of_a_kernel_of_cuda_is_harmless_under_the_patch(backend):
    with pytest.raises(RuntimeError, match="No viable backend"), sdpa_kernel(backend):
        attend()
    with torchport.applied(patches=["torch/sdpa_kernel"]):
        with sdpa_kernel(backend):
            inside = attend()
        with torch.nn.attention.sdpa_kernel([backend], set_priority=True):
            listed = attend()
        assert torch.equal(sdpa_kernel(backend)(attend)(), inside)
    assert torch.equal(inside, attend()) and torch.equal(listed, attend())
    with pytest.raises(RuntimeError, match="No viable backend"), torch.nn.attention.sdpa_kernel(backend):
        attend()
