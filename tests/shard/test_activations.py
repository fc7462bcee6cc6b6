"""Rules for what modules return: applied where a program is traced, and refused where they can do nothing."""

import jax
import pytest
import torch

from torchport import compile, patch, shard
from torchport.config.strategy import ActivationRule, Rule, shared_strategies
from torchport.errors import DeadRuleError, MeshError
from torchport.shard.activations import check, constrain


@pytest.fixture(scope="module", autouse=True)
def patched(pack):
    """torchax beside this torch needs its patches, as everything else does."""
    with patch.applied(patch.read(pack.patches, ["torchax"])):
        yield


class Two(torch.nn.Module):
    """Returns two tensors."""

    def __init__(self):
        super().__init__()
        self.mix = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.mix(x), x.mean(1)


class Network(torch.nn.Module):
    """One such module, and its first output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.two = Two()

    def forward(self, x):
        a, b = self.two(x)
        return a * 2 + b[:, None]


def program(rules, tokens=8):
    mesh = shard.make_mesh({"dp": 2, "sp": 4}, jax.devices())
    module = Network()
    tensors = {name: t.detach() for name, t in module.named_parameters()}
    weights = shard.place(tensors.items(), dict.fromkeys(tensors, Rule(match=".*", spec="replicate")), mesh)
    network = compile.Network(
        module,
        [Rule(match="x", spec=["dp"])],
        "network",
        place="card.yaml:1",
        precision="highest",
        activations=rules,
        place_of=lambda what: "card.yaml:9",
    )
    return compile.Compiled(network, weights, mesh), {"x": torch.randn(2, tokens, 4)}


def test_what_a_module_returns_is_sharded_as_its_rule_says_and_the_numbers_stay():
    plain, x = program([])
    split, _ = program([ActivationRule(match="two", outputs=[["dp", "sp"], "replicate"])])
    assert float((plain(**x) - split(**x)).abs().max()) < 1e-6
    text = split.lowered(split.place(**x), ()).as_text()
    assert '{"dp"}, {"sp"}' in text or "devices=[2,4,1]" in text


def test_null_leaves_an_output_to_the_compiler():
    made, x = program([ActivationRule(match="two", outputs=[None, ["dp"]])])
    assert made(**x).shape == (2, 8, 4)


def test_a_rule_that_matches_no_module_is_refused():
    with pytest.raises(DeadRuleError) as caught:
        program([ActivationRule(match="tow", outputs=[["dp"]])])
    assert str(caught.value) == (
        "card.yaml:9: Rule 1, 'tow', matches none of 2 modules. Remove it or mend it. "
        "Did you mean 'two'? Known: two, two.mix."
    )


def test_a_dim_that_does_not_divide_and_an_output_that_is_not_there_are_refused():
    made, x = program([ActivationRule(match="two", outputs=[["dp", "sp"]])], tokens=6)
    with pytest.raises(MeshError) as caught:
        made(**x)
    assert str(caught.value) == (
        "card.yaml:9: sp=4 does not divide dim 1 of what 'two' returns, [2, 6, 4]. "
        "Choose sp among the divisors of 6, or pad it with `uneven: true`."
    )
    made, x = program([ActivationRule(match=r"two\.mix", outputs=[None, ["dp"]])])
    with pytest.raises(MeshError) as caught:
        made(**x)
    assert "has 2 specs, and 'two.mix' returns 1 tensor(s)" in str(caught.value)


@pytest.mark.parametrize("tokens", [1, 3, 6, 7])
def test_an_uneven_dim_is_padded_where_the_rule_says_so_and_the_numbers_stay(tokens):
    plain, x = program([], tokens)
    padded, _ = program([ActivationRule(match="two", outputs=[["dp", "sp"]], uneven=True)])
    assert float((plain(**x) - padded(**x)).abs().max()) < 1e-6


def test_a_dim_may_be_split_by_several_axes():
    made, x = program([ActivationRule(match="two", outputs=[[None, ["dp", "sp"]]])])
    plain, _ = program([])
    assert float((plain(**x) - made(**x)).abs().max()) < 1e-6
    made, x = program([ActivationRule(match="two", outputs=[[None, ["dp", "sp"]]])], tokens=12)
    with pytest.raises(MeshError, match="dp=2 x sp=4 does not divide dim 1 of what 'two' returns") as caught:
        made(**x)
    assert "Choose dp x sp among the divisors of 12" in str(caught.value)


def test_a_spec_of_more_dims_than_an_output_has_is_refused():
    made, x = program([ActivationRule(match="two", outputs=[[None, None, None, "sp"]], uneven=True)])
    with pytest.raises(MeshError) as caught:
        made(**x)
    assert str(caught.value) == (
        "card.yaml:9: 'two' has a spec of 4 dims, and what 'two' returns has 3. Shorten the spec."
    )


def test_the_first_rule_that_matches_is_a_modules_rule():
    first = ActivationRule(match="two", outputs=[None])
    with pytest.raises(DeadRuleError, match="Rule 2"):
        constrain(Network(), [first, ActivationRule(match="two", outputs=[None])], None, "card.yaml:9")


def test_a_shared_rule_may_match_nothing_and_leaves_other_outputs_alone():
    shared = shared_strategies()["ulysses"].network.activations
    net = torch.nn.ModuleDict({"other": torch.nn.Linear(2, 2)})
    check(net, shared, {"dp": 2, "sp": 2}, "x")()
    blocks = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([TwoOutputs()])})
    done = check(blocks, shared, {"dp": 2, "sp": 2}, "x")
    assert blocks["blocks"][0](torch.ones(2, 4, 2))[0] is None
    done()


class TwoOutputs(torch.nn.Module):
    """A block whose last call has no text to return."""

    def forward(self, x):
        return None, x
