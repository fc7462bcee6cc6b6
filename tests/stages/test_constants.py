"""Tensors that are made on the host while a network is traced: constants of its program, or refused with the cure."""

from pathlib import Path

import numpy
import pytest
import torch

from torchport import compile, patch, shard
from torchport.compile.program import LARGE
from torchport.config.strategy import Rule
from torchport.errors import HostTensorError
from torchport.files.folder import as_named
from torchport.stages.family import Stage
from torchport.stages.recorder import Recorder

EVERYWHERE = [Rule(match=".*", spec="replicate")]
ROW = torch.tensor([True, False, True, False])
CASES = {
    "a list of numbers": lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "on the left": lambda x: torch.tensor([1.0, 2.0, 3.0, 4.0]) * x,
    "positions": lambda x: x + torch.arange(4),
    "zeros beside it": lambda x: torch.cat([x, torch.zeros(2, 4)]),
    "a number": lambda x: x.bfloat16() * torch.tensor(2.0),
    "a tensor of one": lambda x: x[torch.tensor([0]), torch.tensor([1])],
    "numpy": lambda x: x * torch.from_numpy(numpy.arange(4, dtype=numpy.float32)),
    "an index": lambda x: x[:, torch.tensor([0, 2])],
    "computed on the host": lambda x: x * (torch.arange(4.0) * 2).exp().view(1, 4),
    "moved to the network": lambda x: x * torch.arange(4.0).to(x),
    "a mask": lambda x: torch.where(ROW, x, 2 * x).masked_fill(ROW, 0.5),
    "half precision": lambda x: x.bfloat16() * torch.ones(4, dtype=torch.bfloat16),
    "a weight": lambda x: torch.nn.functional.layer_norm(torch.ones(3, 4) @ x.T, (2,), torch.ones(2)),
    "a tensor like it": lambda x: x * x.new_tensor([1, 2, 3, 4]),
    "an output": lambda x: torch.arange(3),
}


@pytest.fixture(scope="module", autouse=True)
def patched(pack):
    """torchax beside this torch needs its patches, as everything else does."""
    with patch.applied(patch.read(pack.patches, ["torchax"])):
        yield


class Network(torch.nn.Module):
    """A matrix, a table that is no buffer, and something that is done with what the matrix makes."""

    def __init__(self, then):
        super().__init__()
        torch.manual_seed(0)
        self.matrix = torch.nn.Linear(4, 4)
        self.table = torch.linspace(0, 1, 4)
        self.then = then

    def forward(self, x):
        return self.then(self.matrix(x) + self.table)


def program(then, mesh):
    """Returns a network as programs."""
    tensors = dict(Network(then).requires_grad_(False).named_parameters())
    weights = shard.place(tensors.items(), dict.fromkeys(tensors, EVERYWHERE[0]), mesh)
    network = compile.Network(Network(then).to("meta"), EVERYWHERE, "network", "card.yaml:1", "highest")
    return compile.Compiled(network, weights, mesh)


def recorder(then):
    """Returns the stand-in for a network that plans and checks call."""
    return Recorder(Network(then), compile.plainly, Stage("denoise", dict, (), network="network"), count=False)


@pytest.mark.parametrize("case", CASES)
def test_a_tensor_of_the_host_is_a_constant_of_the_program(mesh8, case):
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    expected = compile.Eager(Network(CASES[case]))(x=x)
    made = program(CASES[case], mesh8)(x=x)
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)
    recorded = recorder(CASES[case])(x=x)
    assert recorded.shape == expected.shape


REFUSED = {
    "copied into": (
        lambda x: torch.zeros(2, 4).copy_(x),
        "'copy_' writes values of the network into a tensor that is made on the host. "
        "Make that tensor with `device=x.device`, x a tensor of the network.",
    ),
    "added to": (
        lambda x: torch.tensor(0.0).add_(x[0, 0]),
        "'add_' writes values of the network into a tensor that is made on the host. "
        "Make that tensor with `device=x.device`, x a tensor of the network.",
    ),
    "assigned to": (
        lambda x: torch.zeros(2, 4).__setitem__((slice(None), 0), x[:, 0]),
        "'__setitem__' writes values of the network into a tensor that is made on the host. "
        "Make that tensor with `device=x.device`, x a tensor of the network.",
    ),
    "an output of another function": (
        lambda x: torch.add(x, 1, out=torch.zeros(2, 4)),
        "'add' writes values of the network into a tensor that is made on the host. "
        "Make that tensor with `device=x.device`, x a tensor of the network.",
    ),
    "drawn": (
        lambda x: x + torch.randn(4),
        "'randn' draws numbers while the network is traced, the same for every call. "
        "Draw them in the stage's verb, and pass them as an input.",
    ),
    "drawn on the network's device": (
        lambda x: x + torch.randn(4, device=x.device),
        "'randn' draws numbers while the network is traced, the same for every call. "
        "Draw them in the stage's verb, and pass them as an input.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_a_constant_is_refused_with_the_line_that_makes_it(mesh8, case):
    then, text = REFUSED[case]
    line = f"{as_named(Path(__file__))}:{then.__code__.co_firstlineno}"
    for call in (program(then, mesh8), recorder(then)):
        with pytest.raises(HostTensorError) as caught:
            call(x=torch.ones(2, 4))
        assert str(caught.value) == f"{line}: {text}"


def test_a_large_constant_is_an_argument_of_its_program(mesh8):
    made = program(lambda x: x[:1, :1] * 0 + torch.arange(LARGE // 4 + 1).float(), mesh8)
    for _ in range(2):
        assert made(x=torch.ones(2, 4)).equal(torch.arange(LARGE // 4 + 1).float()[None])
    assert [table.shape for [table] in (origin.tables[0] for origin in made._origins.values())] == [(LARGE // 4 + 1,)]


def test_constants_keep_64_bits(mesh8):
    wide = torch.tensor([2**40, 1, 2, 3]), torch.arange(4, dtype=torch.float64) / 3
    for each in wide:
        assert program(lambda x, each=each: each + 0 * x.long(), mesh8)(x=torch.ones(2, 4)).equal(each.expand(2, 4))


def test_blocks_under_a_scan_meet_constants_too(mesh8):
    from torchport.config.card import Stack

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = torch.nn.Linear(4, 4)

        def forward(self, x, table):
            return torch.tanh(self.mix(x)) * torch.arange(4.0) + table

    class Blocks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.blocks = torch.nn.ModuleList([Block() for _ in range(3)])

        def forward(self, x):
            for block in self.blocks:
                x = block(x, torch.ones(4))
            return x

    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    tensors = dict(Blocks().requires_grad_(False).named_parameters())
    weights = shard.place(tensors.items(), dict.fromkeys(tensors, EVERYWHERE[0]), mesh8)
    stacks = {"blocks": Stack(carries=["x"])}
    network = compile.Network(Blocks().to("meta"), EVERYWHERE, "n", "card.yaml:1", "highest", stacks=stacks)
    made = compile.Compiled(network, weights, mesh8)(x=x)
    torch.testing.assert_close(made, compile.Eager(Blocks())(x=x), rtol=1e-5, atol=1e-5)
