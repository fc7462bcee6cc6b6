"""What stands in a pipeline where its network stood."""

import inspect
import types

import pytest
import torch

from torchport.errors import BadValueError
from torchport.stages.image_latents import EncodedVae
from torchport.stages.stand_in import ComponentStandIn, NetworkStandIn, PlacedInputs, StaticList, StaticOptions, static


class Network(torch.nn.Module):
    """A network of which only the signature and the configuration count."""

    config = types.MappingProxyType({"in_channels": 4})

    def forward(self, hidden_states, encoder_hidden_states=None):
        raise AssertionError


def stand_in(shape=None, **attributes):
    """Returns what stands in a loop all of whose steps are done, with latents of a shape if it is known."""
    loop = types.SimpleNamespace(is_done=True, count=1, shapes=[] if shape is None else [shape])
    network = Network()
    vars(network).update(attributes)
    return NetworkStandIn(network, torch.float32, loop)


def test_upstream_sees_which_inputs_the_network_takes():
    network = stand_in()
    assert list(inspect.signature(network.forward).parameters) == ["hidden_states", "encoder_hidden_states"]
    assert torch.equal(network.forward(torch.ones(2, 4, 3))[0], torch.zeros(2, 4, 3))
    with pytest.raises(BadValueError, match=r"^Network: The pipeline calls it, .* Write a family with a loop"):
        ComponentStandIn(Network(), torch.float32)(torch.ones(2, 4, 3))


@pytest.mark.parametrize(
    ("config", "known", "shape"),
    [
        ({"in_channels": 4}, None, [2, 4, 3, 3]),  # as many channels come out as go in
        ({"in_channels": 4, "out_channels": 8}, None, [2, 8, 3, 3]),
        ({"in_channels": 4, "learn_sigma": True}, None, [2, 8, 3, 3]),
        ({"in_channels": 6, "out_channels": 8}, None, [2, 1, 1, 1]),
        ({"in_channels": 4, "out_channels": 8}, torch.Size([1, 8, 3, 3]), [2, 8, 3, 3]),
        ({"in_channels": 4}, torch.Size([1, 9, 2]), [2, 4, 3, 3]),  # the loop's latents have another layout
    ],
)
def test_a_step_that_is_done_returns_zeros_of_the_shape_that_is_known(config, known, shape):
    [zeros] = stand_in(known, config=config)(torch.ones(2, 4, 3, 3))
    assert list(zeros.shape) == shape and not zeros.any()


def test_a_network_of_lists_returns_a_list():
    [zeros] = stand_in()([torch.ones(4, 1, 2), torch.ones(4, 1, 3)])
    assert [list(each.shape) for each in zeros] == [[4, 1, 2], [4, 1, 3]]


def test_upstream_sees_the_components_class():
    assert isinstance(stand_in(), Network) and isinstance(stand_in(), ComponentStandIn)


def test_options_without_tensors_choose_a_program():
    assert static({"scale": [1, 2]}) == {"scale": [1, 2]}
    assert hash(static({"b": 2, "a": [1]})) == hash(StaticOptions(a=[1], b=2))
    assert static([[(1, 2, 4)]]) == [[(1, 2, 4)]] and hash(static([[1]])) == hash(StaticList([[1]]))
    trees = [[torch.ones(1)], {"mask": torch.ones(1)}, (1, 2), 3]
    assert all(static(value) is value for value in trees)


def test_a_buffer_without_values_is_ones_also_in_a_module_of_the_vae():
    vae = torch.nn.Module()
    vae.norm = torch.nn.BatchNorm2d(3).to("meta")
    vae.other = torch.nn.BatchNorm2d(3)
    whole = EncodedVae(vae, torch.float32, {}, "encode")
    assert whole.other is vae.other
    assert torch.equal(whole.norm.running_mean, torch.ones(3))
    assert whole.norm.eps == vae.norm.eps and whole.norm.weight.is_meta


def test_an_input_that_comes_again_is_placed_once():
    placed = []

    class Call:
        def place(self, **inputs):
            placed.append(next(iter(inputs)))
            return {name: (value, "placed") for name, value in inputs.items()}

    constants, text, other = PlacedInputs(Call()), torch.zeros(2), torch.zeros(2)
    assert constants.placed("text", text) is text
    assert constants.placed("text", other) is other
    for _ in range(3):
        assert constants.placed("text", text)[1] == "placed"
        constants.placed("latents", torch.zeros(3))
    assert placed == ["text"]
    text.add_(1)
    assert constants.placed("text", text) is text
