"""What a scheduler keeps, as tensors alone and back."""

import math

import numpy
import torch

from torchport.save.tree import is_packable, packed, unpacked


def test_a_tree_comes_back_as_it_was():
    shared = torch.arange(3, dtype=torch.float64)
    value = {"returned": (shared, None), "kept": {"outputs": [None, shared], "order": 2, "on": True, "x": math.pi}}
    tensors = packed(value)
    assert set(tensors) == {"structure", "returned.0", "kept.outputs.1"}
    shared.zero_()
    back = unpacked(tensors)
    assert type(back["returned"]) is tuple and type(back["kept"]["outputs"]) is list
    assert torch.equal(back["returned"][0], torch.arange(3, dtype=torch.float64)) and back["returned"][1] is None
    assert back["kept"] == {"outputs": back["kept"]["outputs"], "order": 2, "on": True, "x": math.pi}


def test_what_is_no_plain_tree_is_not_packed():
    assert is_packable([{"a": (torch.zeros(1), None, 1, 2.0, "x", False)}])
    for other in (numpy.zeros(2), {1: 2}, {1, 2}, [print], torch.Size([1])):
        assert not is_packable(other)
