"""What a stage takes on its devices: as the compiler planned it, and as the devices count it."""

import types

import jax
import pytest
import torch

from torchport import compile, patch, shard
from torchport.config.machine import GIB
from torchport.config.strategy import Rule
from torchport.run import journey

EVERYWHERE = Rule(match=".*", spec="replicate")


@pytest.fixture
def call(pack):
    """A network that was called once, on one device."""
    with patch.applied(patch.read(pack.patches, ["torchax"])):
        module = torch.nn.Linear(256, 256).requires_grad_(False)
        tensors, mesh = dict(module.named_parameters()), shard.make_mesh({}, jax.devices()[:1])
        weights = shard.place(tensors.items(), dict.fromkeys(tensors, EVERYWHERE), mesh)
        network = compile.Network(module.to("meta"), [EVERYWHERE], "net", "card.yaml:1", "highest")
        call = compile.Compiled(network, weights, mesh)
        call(input=torch.ones(1, 256))
        yield call


def test_the_compilers_figures_are_of_each_program_and_a_cpu_counts_nothing(call):
    planned, counted = journey.memory_lines(call, jax.devices()[:1])
    assert planned.startswith("'net', as compiled, on each device: 260.0 KiB (")  # weights are 256 x 256 x 4 bytes
    assert "258.0 KiB weights and inputs, 1.0 KiB outputs, " in planned
    assert counted == "the backend 'cpu' does not count what its devices hold"


@pytest.mark.parametrize(
    ("limit", "text"), [({"bytes_limit": 31 * GIB}, " of 31.0 GiB"), ({}, "")], ids=["limit", "none"]
)
def test_devices_that_count_are_shown_by_the_fullest(limit, text):
    def device(peak):
        stats = {"bytes_in_use": GIB, "peak_bytes_in_use": peak, **limit}
        return types.SimpleNamespace(process_index=0, platform="tpu", memory_stats=lambda: stats)

    line = journey._counted([device(2 * GIB), device(3 * GIB)])
    assert line == f"on the fullest device: 1.0 GiB in use, 3.0 GiB at most since the run began{text}"


def test_a_stage_of_the_host_says_so():
    assert journey.memory_lines(None, []) == ["it runs on the host, and takes no memory of a device"]
