"""PyTorch's attention through the one door: masks are understood, and what cannot be held is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy
import pytest
import torch
from torch.nn import functional

from torchport import patch
from torchport.errors import AttentionError
from torchport.kernels.attention import for_torch, sdpa

pytestmark = pytest.mark.usefixtures("plainly_compiled")


@pytest.fixture(scope="module", autouse=True)
def patched(pack):
    """torchax beside this torch needs its patches, as everything else does."""
    with patch.applied(patch.read(pack.patches, ["torchax"])):
        yield


def drawn(*shapes, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def ours(q, k, v, mask=None, **options):
    arrays = [jnp.asarray(x.numpy()) for x in (q, k, v)]
    mask = None if mask is None else jnp.asarray(mask.numpy())
    run = jax.jit(functools.partial(sdpa.scaled_dot_product_attention, **options))
    return torch.from_numpy(numpy.array(run(*arrays, mask)))


def apart(a, b):
    return float((a - b).abs().max() / b.abs().max())


def refusal(call):
    with pytest.raises(AttentionError) as caught:
        call()
    return str(caught.value)


MASKS = {
    "none": None,
    "keys, valid first": torch.arange(20) < torch.tensor([20, 6])[:, None, None, None],
    "keys, anywhere": (torch.arange(20) % 3 != 0).expand(2, 1, 1, 20),
    "keys of all samples": (torch.arange(20) < 7)[None],
    "keys, by head": torch.rand(2, 3, 1, 20, generator=torch.Generator().manual_seed(0)) > 0.4,
    "keys, one sample": torch.rand(1, 3, 1, 20, generator=torch.Generator().manual_seed(2)) > 0.4,
    "pairs": (torch.arange(20) <= torch.arange(11)[:, None] + 4).expand(2, 1, 11, 20),
    "heads": torch.rand(2, 3, 11, 20, generator=torch.Generator().manual_seed(0)) > 0.3,
    "added": torch.randn(1, 3, 11, 20, generator=torch.Generator().manual_seed(0)),
    "added to keys": torch.where(torch.arange(20) < 9, 0.0, -torch.inf).expand(2, 1, 1, 20),
}


@pytest.mark.parametrize("name", MASKS)
def test_every_mask_means_what_it_means_in_pytorch(name):
    q, k, v = drawn((2, 3, 11, 8), (2, 3, 20, 8), (2, 3, 20, 8))
    wanted = functional.scaled_dot_product_attention(q, k, v, attn_mask=MASKS[name])
    assert apart(ours(q, k, v, MASKS[name]), wanted) < 1e-6


def test_a_key_mask_becomes_lengths_and_nothing_of_all_pairs_is_made():
    shape = jax.ShapeDtypeStruct((1, 1, 50_000, 8), jnp.float32)
    mask = jax.ShapeDtypeStruct((1, 1, 1, 50_000), jnp.bool_)
    program = jax.jit(sdpa.scaled_dot_product_attention).lower(shape, shape, shape, mask).compile()
    assert program.memory_analysis().temp_size_in_bytes < 64 * 2**20  # a bool of all pairs is 2.5 GB


def test_queries_are_not_zeroed_by_a_key_mask_and_a_row_without_keys_is_0():
    q, k, v = drawn((2, 3, 20, 8), (2, 3, 20, 8), (2, 3, 20, 8))
    mask = torch.arange(20) < torch.tensor([5, 0])[:, None, None, None]
    output = ours(q, k, v, mask)
    assert (output[0, :, 5:] != 0).all() and (output[1] == 0).all()


@pytest.mark.parametrize("dims", [2, 3, 4])
def test_two_to_four_dims_causal_and_grouped_heads_are_pytorchs(dims):
    lead = (2, 4)[4 - dims :]
    q, k, v = drawn((*lead, 9, 8), (*lead, 9, 8), (*lead, 9, 8))
    wanted = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    assert apart(ours(q, k, v, is_causal=True, scale=0.3), wanted) < 1e-6
    if dims == 4:
        few = [x[:, :2] for x in (k, v)]
        wanted = functional.scaled_dot_product_attention(q, *few, enable_gqa=True)
        assert apart(ours(q, *few, enable_gqa=True), wanted) < 1e-6


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ([2, 4, 8, 16], [2, 1, 8, 16], [2, 1, 8, 16]),
        ([2, 4, 8, 16], [1, 4, 8, 16], [1, 4, 8, 16]),
        ([1, 4, 8, 16], [2, 4, 9, 16], [2, 1, 9, 16]),
        ([4, 8, 16], [2, 4, 9, 16], [1, 4, 9, 16]),
        ([4, 8, 16], [1, 9, 16], [1, 9, 16]),
    ],
)
def test_one_batch_or_head_stands_for_all_as_in_pytorch(query, key, value):
    q, k, v = drawn(query, key, value)
    wanted = functional.scaled_dot_product_attention(q, k, v)
    found = ours(q, k, v)
    assert found.shape == wanted.shape and apart(found, wanted) < 1e-6


def test_a_mask_too_large_to_hold_says_which_patch_to_write():
    shape = jax.ShapeDtypeStruct((1, 2, 120_000, 8), jnp.float32)
    mask = jax.ShapeDtypeStruct((1, 1, 120_000, 120_000), jnp.bool_)
    text = refusal(lambda: jax.eval_shape(sdpa.scaled_dot_product_attention, shape, shape, shape, mask))
    assert text == (
        "scaled_dot_product_attention: Its mask [1, 1, 120000, 120000] takes 13.4 GiB. Write a patch for the function "
        "that builds it: a mask over keys alone goes as lengths, "
        "`torchport.kernels.attention.for_torch.attention(q, k, v, lengths=...)`."
    )


def test_values_may_have_other_features_than_keys():
    for size in (5, 13):
        q, k, v = drawn((2, 3, 11, 8), (2, 3, 20, 8), (2, 3, 20, size))
        wanted = functional.scaled_dot_product_attention(q, k, v)
        assert ours(q, k, v).shape == wanted.shape and apart(ours(q, k, v), wanted) < 1e-6


def test_a_mask_of_integers_and_heads_that_do_not_divide_are_refused():
    q, k, v = drawn((1, 8, 4, 8), (1, 3, 4, 8), (1, 3, 4, 8))
    assert "The mask is int32. It must be bool, or float and added." in refusal(
        lambda: ours(q, q, q, torch.ones(4, 4, dtype=torch.int32))
    )
    assert "Queries have 8 heads, and keys or values 3. With enable_gqa it must divide." in refusal(
        lambda: ours(q, k, v, enable_gqa=True)
    )


@pytest.mark.parametrize("mask", [None, (9,), (6, 9), (4, 6, 9), (1, 1, 1, 1, 9), (2, 3, 1, 6, 9), (3, 1, 1, 9)])
@pytest.mark.parametrize("options", [{}, {"scale": 0.5}, {"is_causal": True}, {"enable_gqa": True}])
def test_five_and_six_dims_are_pytorchs(mask, options):
    if mask and options.get("is_causal"):
        return
    heads = 2 if options.get("enable_gqa") else 4
    q, k, v = drawn((2, 3, 4, 6, 8), (2, 1, heads, 9, 8), (2, 3, heads, 9, 8))
    if mask:
        mask = drawn(mask)[0] > -0.5
        mask[..., 0] = True  # every query sees a key
    expected = functional.scaled_dot_product_attention(q, k.expand(2, 3, -1, -1, -1), v, mask, **options)
    found = ours(q, k, v, mask, **options)
    assert found.shape == expected.shape
    assert apart(found, expected) < 1e-5


@pytest.mark.parametrize(
    ("query", "key", "mask"),
    [
        ((2, 3, 4, 6, 8), (2, 2, 4, 9, 8), None),
        ((2, 3, 4, 6, 8), (2, 3, 4, 9, 8), (2, 2, 1, 1, 9)),
        ((2, 3, 4, 6, 8), (2, 3, 4, 9, 8), (5, 9)),
        ((2, 3, 4, 6, 8), (2, 3, 4, 9, 8), (1, 1, 1, 1, 1, 9)),
        ((2, 4, 6, 8), (2, 4, 9, 8), (3, 1, 1, 9)),
        ((2, 4, 6, 8), (2, 4, 9, 8), (7,)),
    ],
)
def test_batches_and_masks_that_do_not_broadcast_are_refused_with_their_shapes(query, key, mask):
    q, k, v = drawn(query, key, key)
    text = refusal(lambda: ours(q, k, v, None if mask is None else torch.ones(mask, dtype=torch.bool)))
    shapes = f"query is {list(query)}, key {list(key)}, value {list(key)}"
    shapes += "" if mask is None else f", and the mask {list(mask)}"
    assert text == (
        f"scaled_dot_product_attention: {shapes}. Batch dims must be equal or 1, and the mask must broadcast to "
        "[..., H, S, T]."
    )


def test_dropout_and_two_masks_are_refused():
    q, k, v = drawn((1, 1, 4, 8), (1, 1, 4, 8), (1, 1, 4, 8))
    assert "dropout_p is 0.1. It must be 0" in refusal(lambda: ours(q, k, v, dropout_p=0.1))
    mask = torch.ones(4, 4, dtype=torch.bool)
    assert "causal and has a mask" in refusal(lambda: ours(q, k, v, mask, is_causal=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [None, [9, 4]])
def test_a_patchs_attention_is_the_same_traced_and_eager(causal, lengths):
    import torchax
    from torchax import interop

    q, k, v = drawn((2, 3, 9, 8), (2, 3, 9, 8), (2, 3, 9, 8))
    count = None if lengths is None else torch.tensor(lengths)
    eager = for_torch.attention(q, k, v, lengths=count, causal=causal)

    def program(q, k, v, count):
        return for_torch.attention(q, k, v, lengths=None if lengths is None else count, causal=causal)

    with torchax.default_env():
        arrays = [jnp.asarray(x.numpy()) for x in (q, k, v)]
        counts = jnp.asarray([9, 9] if lengths is None else lengths)
        traced = jax.jit(lambda *inputs: interop.call_torch(program, *inputs))(*arrays, counts)
    traced = torch.from_numpy(numpy.array(traced))
    assert apart(traced, eager) < 1e-6
    assert lengths is None or ((eager[1, :, 4:] == 0).all() and (traced[1, :, 4:] == 0).all())
