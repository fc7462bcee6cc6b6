"""A module's name is in the name of each operation that it is traced to, and changes nothing else of a program."""

import contextlib
import re

import jax
import pytest
import torch

from torchport import compile, patch, shard
from torchport.compile import program
from torchport.config.card import Stack
from torchport.config.strategy import Rule


class Block(torch.nn.Module):
    """A block of a feed-forward net."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())

    def forward(self, x):
        return x + self.net(x)


class Failing(torch.nn.Module):
    """A module that cannot do what it is called for."""

    def forward(self, x):
        raise NotImplementedError


class Network(torch.nn.Module):
    """Blocks under a scan, and a module that upstream calls in vain before another."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.fused = Failing()
        self.out = torch.nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        with contextlib.suppress(NotImplementedError):
            x = self.fused(x)
        return self.out(x)


@pytest.fixture(scope="module", autouse=True)
def patched(pack):
    """torchax beside this torch needs its patches, as everything else does."""
    with patch.applied(patch.read(pack.patches, ["torchax"])):
        yield


def lowered(stacks):
    """Returns the traced program of the network."""
    torch.manual_seed(0)
    module, everywhere = Network().requires_grad_(False), Rule(match=".*", spec="replicate")
    tensors, mesh = dict(module.named_parameters()), shard.make_mesh({}, jax.devices()[:1])
    weights = shard.place(tensors.items(), dict.fromkeys(tensors, everywhere), mesh)
    network = compile.Network(module.to("meta"), [everywhere], "net", "card.yaml:1", "highest", stacks=stacks)
    compiled = compile.Compiled(network, weights, mesh)
    return compiled.lowered(compiled.place(x=torch.ones(1, 4)), ())


def test_the_name_of_an_operation_has_the_path_of_its_module():
    names = re.findall(r'op_name="([^"]*)"', lowered({}).compile().as_text())
    for path in ("net/blocks.1/net/0/", "net/blocks.2/net/1/", "net/out/"):
        assert any(path in name for name in names), (path, names)
    assert not any("fused" in name for name in names if "out/" in name), "a call that failed is over"


def test_stacked_blocks_have_their_numbers():
    names = re.findall(r'op_name="([^"]*)"', lowered({"blocks": Stack(carries=["x"])}).compile().as_text())
    assert any(re.search(r"net/blocks\.0-2/.*while/body/.*block/net/0/", name) for name in names), names


def test_a_program_is_the_same_with_names_and_without(monkeypatch):
    """Its text is in the key by which an executable is found again."""
    text = lowered({}).as_text()
    monkeypatch.setattr(program, "_module_scopes", lambda module, name: contextlib.nullcontext())
    assert lowered({}).as_text() == text


def test_no_hook_stays_on_a_module():
    module = Network()
    with program._module_scopes(module, "net"):
        assert module.out._forward_hooks
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
