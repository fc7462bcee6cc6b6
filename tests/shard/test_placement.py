"""Rules and meshes: what matches nothing, what nothing matches, what does not divide; placement and round trips."""

import math

import jax
import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from torchport import shard
from torchport.config import overridden, parse_document, validated
from torchport.config.card import Job
from torchport.config.strategy import Rule, Strategy, WeightRule, shared_strategies
from torchport.errors import DeadRuleError, MeshError, PlacementError, ShardError, UnmatchedError

MESH = {"dp": 2, "tp": 4}


def rule(match, spec="replicate", *otherwise):
    """A rule, validated as YAML is."""
    return Rule.model_validate({"match": match, "spec": spec, "otherwise": list(otherwise)})


def refusal(kind, rules, shapes, mesh=MESH):
    """Returns the text of the one error that matching gives."""
    with pytest.raises(ShardError) as caught:
        shard.match(rules, shapes, mesh, "card.yaml:30")
    assert type(caught.value) is kind
    return str(caught.value)


def test_the_first_rule_that_matches_the_whole_name_wins():
    first, second, third = rule(r"a\.weight", ["tp"]), rule(r"a\..*", [None]), rule(r".*")
    shapes = {"a.weight": (8, 4), "a.weight_scale": (3,), "a.bias": (8,), "ba.weight": (3,)}
    found = shard.match([first, second, third], shapes, MESH, "x")
    assert {name: one.match for name, one in found.items()} == {
        "a.weight": r"a\.weight",
        "a.weight_scale": r"a\..*",
        "a.bias": r"a\..*",
        "ba.weight": ".*",
    }


def test_a_rule_that_matches_nothing_is_refused_with_the_nearest_name():
    shapes = {"blocks.0.attn.to_q.weight": (8, 8), "blocks.0.attn.to_q.bias": (8,)}
    rules = [rule(r"blocks\.\d+\.attn\.to_qq\.weight", ["tp"]), rule(".*")]
    assert refusal(DeadRuleError, rules, shapes) == (
        r"card.yaml:30: Rule 1, 'blocks\.\d+\.attn\.to_qq\.weight', matches none of 2 tensors. Remove it or mend it. "
        "Did you mean 'blocks.0.attn.to_q.weight'? Known: blocks.0.attn.to_q.bias, blocks.0.attn.to_q.weight."
    )


def test_a_rule_that_matches_only_what_earlier_rules_took_is_refused():
    text = refusal(DeadRuleError, [rule("a.*"), rule("ab")], {"ab": (1,), "ac": (1,)})
    assert text.startswith("card.yaml:30: Rule 2, 'ab', matches only tensors that an earlier rule has taken. Remove it")


def test_of_two_equal_rules_the_second_is_dead():
    assert "Rule 2, 'a'" in refusal(DeadRuleError, [rule("a"), rule("a")], {"a": (1,)})


def test_of_many_tensors_only_a_few_near_names_are_listed():
    shapes = {f"blocks.{n}.weight": (1,) for n in range(2000)}
    text = refusal(DeadRuleError, [rule(r"blocks\.\d+\.weigth"), rule(".*")], shapes)
    assert len(text) < 300 and "blocks.0.weight" in text


def test_a_tensor_that_no_rule_matches_is_refused():
    assert refusal(UnmatchedError, [rule("a")], {"a": (2,), "b.weight": (3, 5)}) == (
        "card.yaml:30: No rule matches 'b.weight' [3, 5] (15 elements). "
        "Add a rule for it, with `spec: replicate` if every device shall have it whole."
    )


def test_a_spec_that_does_not_divide_is_refused_with_axis_dim_and_shape():
    assert refusal(MeshError, [rule("a", [None, "tp"])], {"a": (8, 6)}) == (
        "card.yaml:30: tp=4 does not divide dim 1 of 'a' [8, 6]. Choose tp among the divisors of 6."
    )


def test_a_spec_of_more_dims_than_the_tensor_is_refused():
    assert refusal(MeshError, [rule(".*", [None, "tp"])], {"a": (8, 8), "b": (8,)}) == (
        "card.yaml:30: '.*' has a spec of 2 dims, and 'b' has 1. Shorten the spec, or narrow the rule."
    )


def test_fallbacks_are_tried_in_their_order_and_only_where_the_spec_does_not_divide():
    rules = [rule(".*", ["dp", "tp"], ["tp"], [None, "tp"], "replicate")]
    shapes = {"both": (2, 4), "first": (4, 3), "second": (3, 4), "neither": (3, 3)}
    found = shard.match(rules, shapes, MESH, "x")
    assert {name: one.spec for name, one in found.items()} == {
        "both": ["dp", "tp"],
        "first": ["tp"],
        "second": [None, "tp"],
        "neither": "replicate",
    }


def test_where_no_fallback_divides_the_error_is_about_the_rules_own_spec():
    assert "tp=4 does not divide dim 0 of 'a' [6, 3]" in refusal(
        MeshError, [rule("a", ["tp"], [None, "dp"])], {"a": (6, 3)}
    )


def test_several_axes_split_one_dim_and_fall_back_to_fewer():
    """The practice's list for a VAE's columns: both axes, then one, then the other."""
    rules = [rule(".*", [["dp", "tp"]], ["tp"], ["dp"], "replicate")]
    shapes = {"eight": (16, 3), "four": (4, 3), "two": (6, 3), "none": (5, 3)}
    found = shard.match(rules, shapes, MESH, "x")
    assert {name: one.spec for name, one in found.items()} == {
        "eight": [["dp", "tp"]],
        "four": ["tp"],
        "two": ["dp"],
        "none": "replicate",
    }
    assert shard.device_bytes(shapes, found, MESH, "float32") == 4 * (6 + 3 + 9 + 15)


def test_several_axes_that_do_not_divide_are_refused_together():
    assert refusal(MeshError, [rule("a", [None, ["dp", "tp"]])], {"a": (8, 12)}) == (
        "card.yaml:30: dp=2 x tp=4 does not divide dim 1 of 'a' [8, 12]. Choose dp x tp among the divisors of 12."
    )


def test_a_dim_split_by_two_axes_is_placed_first_axis_outermost(mesh8):
    tensor = torch.arange(16.0)
    placed = shard.place([("a", tensor)], {"a": rule("a", [["dp", "tp"]])}, mesh8)["a"]
    for number, device in enumerate(mesh8.devices.reshape(-1)):
        [part] = [part for part in placed.addressable_shards if part.device == device]
        assert numpy.asarray(part.data).tolist() == [2 * number, 2 * number + 1]


SIZES = st.dictionaries(st.sampled_from(["dp", "sp", "tp"]), st.integers(1, 4))
SHAPES = st.lists(st.integers(1, 12), max_size=4).map(tuple)
AXES = st.permutations(["dp", "sp", "tp", None, None]) | st.permutations([["dp", "sp"], "tp", None])


@given(mesh=SIZES, shape=SHAPES, axes=AXES, length=st.integers(0, 4), fall_back=st.booleans())
def test_a_spec_is_kept_if_and_only_if_it_divides(mesh, shape, axes, length, fall_back):
    spec = axes[:length]
    parts = [
        math.prod(mesh.get(axis, 1) for axis in ([axes] if isinstance(axes, str) else axes or [])) for axes in spec
    ]
    divides = all(size % part == 0 for size, part in zip(shape, parts, strict=False))
    rules = [rule("a", spec, *(["replicate"] if fall_back else []))]
    try:
        found = shard.match(rules, {"a": shape}, mesh, "x")["a"]
    except MeshError:
        assert len(spec) > len(shape) or (not divides and not fall_back)
        return
    assert len(spec) <= len(shape) and (divides or fall_back)
    assert found.spec == (spec if divides else "replicate")
    bytes_ = shard.device_bytes({"a": shape}, {"a": found}, mesh, "bfloat16")
    split = math.prod(parts) if divides else 1
    assert bytes_ * split == 2 * math.prod(shape)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_bytes_per_device_are_those_of_the_placed_arrays(mesh8, dtype, size):
    shapes = {"a": (8, 12), "b": (4,), "c": (6, 8)}
    rules = shard.match([rule("a", ["tp", "dp"]), rule("b"), rule("c", [None, "tp"])], shapes, MESH, "x")
    tensors = [(name, torch.zeros(shape, dtype=getattr(torch, dtype))) for name, shape in shapes.items()]
    placed = shard.place(tensors, rules, mesh8)
    held = {
        device: sum(s.data.nbytes for a in placed.values() for s in a.addressable_shards if s.device == device)
        for device in mesh8.devices.flat
    }
    assert set(held.values()) == {shard.device_bytes(shapes, rules, MESH, dtype)} == {(12 + 4 + 12) * size}


def test_a_mesh_must_use_every_device_once():
    shard.check_mesh({"dp": 2, "tp": 4}, 8, "cpu:8", "a.yaml:7")
    with pytest.raises(MeshError) as caught:
        shard.check_mesh({"dp": 2, "tp": 2}, 8, "cpu:8", "a.yaml:7")
    assert str(caught.value) == (
        "a.yaml:7: The mesh dp=2 x tp=2 takes 4 device(s), and cpu:8 has 8. The axes' product must be 8."
    )
    with pytest.raises(MeshError, match=r"The mesh 1 takes 1 device\(s\), and cpu:8 has 8"):
        shard.check_mesh({}, 8, "cpu:8", "a.yaml:7")


def test_an_axis_must_divide_what_it_splits():
    shard.check_divides("tp", 4, "the heads", 16, "a.yaml:7")
    with pytest.raises(MeshError) as caught:
        shard.check_divides("tp", 3, "transformer.num_attention_heads", 16, "a.yaml:7")
    assert str(caught.value) == (
        "a.yaml:7: tp=3 does not divide transformer.num_attention_heads, which is 16. tp must be one of 1, 2, 4, 8, 16."
    )


def job_of(text, *overrides):
    """A job with its document, overrides applied."""
    document = parse_document(text, "job.yaml")
    for override in overrides:
        document = overridden(document, override)
    return validated(Job, document), document


JOB = "{height: 64, width: 64, frames: 5, fps: 8, steps: 3, guidance_scale: 6.0, machine: cpu:8, strategy: tp"


@pytest.mark.parametrize(
    ("text", "overrides", "mesh"),
    [
        (JOB + "}", (), {"dp": 2, "sp": 4}),
        (JOB + ", mesh: {tp: 8}}", (), {"tp": 8}),
        (JOB + ", mesh: {tp: 8}}", ("strategy=fsdp",), {"dp": 2, "sp": 4}),
        (JOB + ", mesh: {tp: 8}}", ("strategy=fsdp", "mesh={sp: 8}"), {"sp": 8}),
        (JOB + ", mesh: {tp: 8}}", ("strategy=fsdp", "mesh.tp=4"), {"tp": 4}),
        (JOB + "}", ("mesh={}",), {}),
    ],
)
def test_a_job_has_its_own_mesh_or_that_of_the_strategy_that_was_exchanged(text, overrides, mesh):
    job, document = job_of(text, *overrides)
    strategy = Strategy(mesh={"dp": 2, "sp": 4}, weights={}, inputs={})
    assert shard.with_mesh(job, strategy, document).mesh == mesh


def test_the_mesh_has_all_three_axes_in_a_fixed_order():
    mesh = shard.make_mesh({"tp": 4, "dp": 2}, jax.devices())
    assert dict(mesh.shape) == {"dp": 2, "sp": 1, "tp": 4} and mesh.axis_names == ("dp", "sp", "tp")
    assert set(mesh.devices.flat) == set(jax.devices())


def bits(tensor):
    """The bytes of a tensor."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.contiguous().view(whole).numpy().tobytes()


FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@given(shape=st.lists(st.integers(0, 6), max_size=4), seed=st.integers(0, 2**31), dtype=st.sampled_from(FLOATS))
def test_floats_go_to_jax_and_back_bit_for_bit(mesh8, shape, seed, dtype):
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (max(1, math.prod(shape)) * size,), dtype=torch.uint8, generator=generator(seed))
    tensor = raw.view(dtype)[: math.prod(shape)].reshape(
        shape
    )  # NaNs with payloads, infinities and subnormals among them
    array = shard.to_jax(tensor, shard.sharding(rule("a"), mesh8))
    back = shard.to_torch(array)
    assert str(array.dtype) == str(dtype).removeprefix("torch.") and array.shape == tuple(shape)
    assert back.dtype == dtype and back.shape == tensor.shape
    assert bits(back) == bits(tensor)


def generator(seed):
    """A seeded generator."""
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("tensor", "dtype"),
    [
        (torch.tensor([[0, -1], [2**31 - 1, -(2**40)]]), torch.int64),
        (torch.tensor([[True, False, True]]), torch.bool),
        (torch.arange(6, dtype=torch.int32).reshape(2, 3).T, torch.int32),
        (torch.tensor(7), torch.int64),
        (torch.tensor([1 / 3], dtype=torch.float64), torch.float64),
        (torch.nn.Parameter(torch.ones(2, 2)), torch.float32),
    ],
)
def test_integers_bools_views_and_parameters_keep_their_values(mesh8, tensor, dtype):
    back = shard.to_torch(shard.to_jax(tensor, shard.sharding(rule("a"), mesh8)))
    assert back.dtype == dtype and torch.equal(back.to(tensor.dtype), tensor.detach())


def test_a_dtype_that_numpy_does_not_have_is_refused(mesh8):
    with pytest.raises(PlacementError, match=r"float8_e5m2 \[2\]: NumPy has no such numbers. Cast it"):
        shard.to_jax(torch.zeros(2).to(torch.float8_e5m2), shard.sharding(rule("a"), mesh8))


def test_what_comes_back_from_jax_is_our_own_to_change(mesh8):
    array = shard.to_jax(torch.zeros(3), shard.sharding(rule("a"), mesh8))
    shard.to_torch(array).add_(1)
    assert numpy.asarray(array).tolist() == [0, 0, 0]


def test_each_device_receives_its_own_part(mesh8):
    tensor = torch.arange(32.0).reshape(4, 8)
    placed = shard.place([("a", tensor)], {"a": rule("a", ["dp", "tp"])}, mesh8)["a"]
    assert placed.sharding.spec == PartitionSpec("dp", "tp")
    for part in placed.addressable_shards:
        assert part.data.shape == (2, 2)
        assert numpy.array_equal(numpy.asarray(part.data), tensor.numpy()[part.index])
    assert len({part.device for part in placed.addressable_shards}) == 8


def test_an_array_that_lies_elsewhere_than_its_rule_says_is_refused(mesh8, monkeypatch):
    replicated = shard.sharding(rule("a"), mesh8)
    honest = shard.to_jax
    monkeypatch.setattr("torchport.shard.to_jax", lambda tensor, where: honest(tensor, replicated))
    with pytest.raises(PlacementError) as caught:
        shard.place([("some.weight", torch.zeros(8))], {"some.weight": rule("a", ["tp"])}, mesh8)
    text = str(caught.value)
    assert text.startswith("some.weight: It lies as NamedSharding(") and "with shape (8,). Its rule puts it as" in text


def test_weights_are_gathered_that_are_split_and_whose_rule_says_so():
    rules = [
        WeightRule(match="a|b", spec=["tp"], otherwise=["replicate"], gather=True),
        WeightRule(match="c", spec=["tp"]),
    ]
    found = shard.match(rules, {"a": (8,), "b": (7,), "c": (8,)}, MESH, "x")
    assert shard.gathered(found) == {"a"}


def test_shapes_are_read_from_meta_tensors_too():
    assert shard.named_shapes({"a": torch.empty(2, 3, device="meta"), "b": torch.zeros(())}) == {"a": (2, 3), "b": ()}


def test_the_shipped_rules_cover_the_published_network_without_a_dead_rule(card, published):
    """On each strategy's own mesh all rules divide, and what a device holds is the share that the name says."""
    shapes = shard.named_shapes(dict(published["transformer"].named_parameters())) | {
        "rope.cos": (9, 9),
        "rope.sin": (9, 9),
    }
    whole = sum(math.prod(shape) for shape in shapes.values())
    held = {}
    for name, strategy in card.strategies.items():
        found = shard.match(strategy.weights["transformer"], shapes, strategy.mesh, "card")
        held[name] = shard.device_bytes(shapes, found, strategy.mesh, "bfloat16") / (2 * whole)
    assert held == {
        "tp": pytest.approx(0.51, abs=0.005),
        "tp_replicated_rows": pytest.approx(0.715, abs=0.005),
        "ulysses": 1,
        "fsdp": pytest.approx(1 / 8, abs=0.001),
    }


def test_a_shared_rule_may_be_dead_and_a_long_spec_of_it_gives_way():
    rules = shared_strategies()["fsdp"].network.weights
    found = shard.match(rules, {"a.weight": (3,), "b.weight": (16, 4), "b.bias": (16,)}, {"dp": 2, "sp": 4}, "x")
    assert [found[name].spec for name in ("a.weight", "b.weight", "b.bias")] == [
        "replicate",
        [["dp", "sp"]],
        "replicate",
    ]
    own = [rule("c", [None, "tp"], "replicate")]
    with pytest.raises(MeshError, match="has a spec of 2 dims, and 'c' has 1"):
        shard.match(own, {"c": (4,)}, {"tp": 2}, "x")
