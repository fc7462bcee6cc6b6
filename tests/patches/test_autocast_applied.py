"""The patches of CUDA autocast put in force and taken back: each test applies them itself."""

import pytest
import torch

from torchport import patch
from torchport.errors import TooLateError

B, S = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def entries(root):
    return patch.read(root / "patches", ["torchax", "torch/autocast"])


@pytest.fixture
def product():
    """Gives the dtype of a product of two float32 matrices, which tells whether a region is in force."""
    a = torch.rand(2, 3)
    return lambda: (a @ a.T).dtype


def test_a_region_made_before_the_patches_is_refused(entries, product):
    with pytest.warns(UserWarning, match="Disabling autocast"):
        decorated = torch.autocast("cuda", B)(product)
    with patch.applied(entries):
        with pytest.raises(TooLateError, match="made before its patch was in force, and torch has disabled it"):
            decorated()
        assert product() == S
    assert decorated() == S


def test_nothing_stays_in_torch_afterwards(entries):
    holders = [torch.amp.autocast, torch.cuda.amp.autocast, torch.amp.autocast_mode, torch, torch._C]
    before = [dict(vars(holder)) for holder in holders]
    entered = id(torch.autocast.__enter__)
    with patch.applied(entries):
        assert id(torch.autocast.__enter__) != entered
        with torch.autocast("cuda", B):
            pass
    assert [dict(vars(holder)) for holder in holders] == before
    assert torch._C._len_torch_function_stack() == 0 and not torch.is_autocast_enabled("cuda")
    with pytest.warns(UserWarning, match="CUDA is not available"):
        torch.autocast("cuda", B)
