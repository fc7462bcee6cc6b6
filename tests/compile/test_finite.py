"""Where a network runs op by op, the first module that returns NaN or infinity is named, and what is to blame."""

import math

import jax
import pytest
import torch

from torchport import compile, patch, shard
from torchport.compile import network
from torchport.compile.eager import FirstNotFinite
from torchport.config.strategy import Rule
from torchport.errors import NotFiniteError
from torchport.run import journey

EVERYWHERE = Rule(match=".*", spec="replicate")


class Root(torch.nn.Module):
    """Computes NaN of what is negative."""

    def forward(self, x):
        return x.sqrt()


@pytest.fixture(scope="module", autouse=True)
def patched(pack):
    """torchax beside this torch needs its patches, as everything else does."""
    with patch.applied(patch.read(pack.patches, ["torchax"])):
        yield


def layers():
    """Returns a network whose weights and outputs are positive."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(Root(), torch.nn.Linear(4, 2)))
    with torch.no_grad():
        for weight in module.parameters():
            weight.abs_()
    return module.requires_grad_(False)


def in_pytorch(module):
    """Returns a network as `--backend original` calls it."""
    call = compile.Eager(module, lambda module, x: module(x), name="net")
    call.first = FirstNotFinite(module, "net")
    return call


def op_by_op(module):
    """Returns a network as `--no-jit` calls it, on 8 devices."""
    tensors, mesh = dict(module.named_parameters()), shard.make_mesh({"dp": 8}, jax.devices())
    weights = shard.place(tensors.items(), dict.fromkeys(tensors, EVERYWHERE), mesh)
    bare = module.to("meta")
    options = {"how": lambda module, x: module(x)}
    return compile.Compiled(
        compile.Network(bare, [EVERYWHERE], "net", "card.yaml:1", "highest", **options), weights, mesh, jit=False
    )


HOWS = pytest.mark.parametrize("how", [in_pytorch, op_by_op])


@HOWS
def test_a_weight_that_is_nan_is_named_with_its_module(how):
    module = layers()
    module[1][1].weight[1, 2] = math.nan
    call = how(module)
    assert call(x=torch.ones(2, 4)).isnan().sum() == 2
    assert call.first.text == (
        "'1.1' of 'net', a Linear, is the first module to return them: 2 of 4 values; its 'weight' has them already"
    )


@HOWS
def test_a_module_that_makes_nan_of_finite_numbers_is_named(how):
    call = how(layers())
    call(x=torch.full((2, 4), -9.0))
    assert call.first.text == (
        "'1.0' of 'net', a Root, is the first module to return them: 8 of 8 values; "
        "its weights and what it is called with are finite"
    )


@HOWS
def test_infinity_that_comes_in_is_said_to(how):
    call = how(layers())
    call(x=torch.full((2, 4), math.inf))
    assert call.first.text.startswith("'0' of 'net', a Linear, is the first module to return them: 8 of 8 values; ")
    assert call.first.text.endswith("what it is called with has them already")


@HOWS
def test_where_all_is_finite_nothing_is_named_and_the_numbers_are_pytorchs(how):
    module, x = layers(), torch.rand(2, 4)
    expected = module(x)
    call = how(module)
    assert torch.allclose(call(x=x), expected, rtol=1e-5) and call.first.text == ""


def test_an_error_about_nan_gets_the_module_as_a_line_of_its_own():
    call = in_pytorch(layers())
    call(x=torch.full((2, 4), -9.0))
    with pytest.raises(NotFiniteError) as caught, network.first_not_finite_named(call):
        raise NotFiniteError("'denoise', step 1 of 3", "'latents' has 1 of 9 values that are NaN", "Look")
    assert str(caught.value).splitlines()[1:] == [call.first.text]
    with pytest.raises(NotFiniteError) as caught, network.first_not_finite_named(None):
        raise NotFiniteError("'decode'", "It is NaN", "Look")
    assert len(str(caught.value).splitlines()) == 1


def test_memory_says_that_nothing_was_compiled_and_what_a_cpu_does_not_count(mesh8):
    call = op_by_op(layers())
    call(x=torch.ones(2, 4))
    assert journey.memory_lines(call, list(mesh8.devices.flat)) == [
        "'net' ran op by op: no program was compiled",
        "the backend 'cpu' does not count what its devices hold",
    ]
