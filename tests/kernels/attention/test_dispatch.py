"""The one door: what it chooses, what it refuses, and how it splits kernels over a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy
import pytest

from tests.attention_reference import reference
from torchport.errors import AttentionError, VmemError
from torchport.kernels.attention import dispatch, tiles
from torchport.kernels.attention.dispatch import Context, attention, context
from torchport.kernels.attention.tiles import Tile

pytestmark = pytest.mark.usefixtures("plainly_compiled")
SMALL = Tile(128, 256, 128)
INTERPRETED = functools.partial(attention, implementation="splash_transposed", interpret=True, tile=SMALL)


def drawn(batch=2, heads=4, queries=40, keys=40, size=16, dtype=jnp.float32, seed=0):
    generator = numpy.random.default_rng(seed)
    shapes = ((batch, heads, queries, size), (batch, heads, keys, size), (batch, heads, keys, size))
    return [jnp.asarray(generator.normal(size=shape), dtype) for shape in shapes]


def error(output, q, k, v, **options):
    options = {"lengths": None, "scale": q.shape[-1] ** -0.5, "causal": False, "window": None, "mask": None, **options}
    wanted = reference(*(numpy.asarray(x, numpy.float64) for x in (q, k, v)), **options)
    return float(numpy.abs(numpy.asarray(output, numpy.float64) - wanted).max() / numpy.abs(wanted).max())


def refusal(call, kind=AttentionError):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def problem(platform="tpu", **changes):
    base = {
        "platform": platform,
        "chip": "v6e" if platform == "tpu" else None,
        "dtype": jnp.bfloat16,
        "head_size": 128,
        "scale": 0.1,
        "causal": False,
        "window": None,
        "masked": False,
        "bound": None,
        "tile": None,
        "interpret": False,
    }
    return dispatch.Problem(**{**base, **changes})


@pytest.mark.parametrize("implementation", [None, "plain", "xla"])
def test_every_implementation_for_any_platform_agrees_with_softmax_in_float64(implementation):
    q, k, v = drawn()
    lengths = jnp.asarray([40, 17])
    output = attention(q, k, v, lengths=lengths, query_lengths=jnp.full(2, 40), implementation=implementation)
    assert error(output, q, k, v, lengths=numpy.asarray(lengths)) < 1e-6


@pytest.mark.parametrize("implementation", ["splash", "splash_transposed"])
def test_a_tpu_kernel_runs_interpreted_and_agrees(implementation):
    q, k, v = drawn(batch=1, heads=2, queries=300, keys=300, size=64)
    lengths = jnp.asarray([270])
    options = {"tile": Tile(256, 256, 128), "interpret": True, "implementation": implementation}
    run = jax.jit(functools.partial(attention, **options))
    output = run(q, k, v, lengths=lengths, query_lengths=jnp.asarray([300]))
    assert error(output, q, k, v, lengths=numpy.asarray([270])) < 2e-5


@pytest.mark.parametrize("implementation", ["splash", "splash_transposed"])
def test_a_rehearsal_checks_a_call_of_a_kernel_and_computes_nothing(implementation):
    q, k, v = drawn()
    with context(Context(implementation, interpret=True, rehearse=True)):
        program = jax.make_jaxpr(lambda: attention(q, k, v))()
        assert (attention(q, k, v) == q).all()
    assert "pallas_call" not in str(program)


def test_padded_queries_come_out_0_in_self_attention_and_only_there():
    q, k, v = drawn()
    lengths = jnp.asarray([40, 17])
    output = attention(q, k, v, lengths=lengths)
    assert (output[1, :, 17:] == 0).all() and (output[1, :, :17] != 0).any()
    crossed = attention(q[:, :, :39], k, v, lengths=lengths)
    assert (crossed[1, :, 17:] != 0).any()
    kept = attention(q, k, v, lengths=lengths, query_lengths=jnp.asarray([40, 40]))
    assert (kept[1, :, 17:] != 0).any()


def test_a_bound_by_name_is_the_programs(monkeypatch):
    q, k, v = drawn()
    seen = []
    monkeypatch.setattr(
        dispatch,
        "_implementation",
        lambda name, asked, *shapes: seen.append((name, asked.bound)) or (lambda *_, **__: q),
    )
    with context(Context("plain", {"joint": 12.0})):
        attention(q, k, v, bound="joint")
        attention(q, k, v, bound="other")
        attention(q, k, v, implementation="xla")
    attention(q, k, v, bound="joint")
    assert seen == [(None, 3.0), (None, None), ("xla", None), (None, None)]


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        (problem(), "splash_transposed"),
        (problem(causal=True), "splash"),
        (problem(window=(5, None)), "splash"),
        (problem(window=(None, None)), "splash_transposed"),
        (problem(masked=True), "plain"),
        (problem(dtype=jnp.float16), "plain"),
        (problem(head_size=256), "plain"),
        (problem("gpu"), "cudnn"),
        (problem("gpu", causal=True), "cudnn"),
        (problem("gpu", dtype=jnp.float32), "plain"),
        (problem("gpu", head_size=256), "plain"),
        (problem("gpu", head_size=12), "plain"),
        (problem("gpu", window=(None, 3)), "plain"),
        (problem("cpu"), "plain"),
    ],
)
def test_the_platform_and_the_request_choose(asked, name):
    assert dispatch._choice_for_platform(asked) == name


def test_a_named_implementation_is_that_one_or_an_error():
    q, k, v = drawn()
    assert refusal(lambda: attention(q, k, v, implementation="flash")) == (
        "attention: There is no implementation 'flash'. Did you mean 'splash'? "
        "Known: cudnn, plain, splash, splash_int8, splash_transposed, xla."
    )
    assert refusal(lambda: attention(q, k, v, implementation="splash_transposed")) == (
        "attention splash_transposed: It is a TPU kernel, and this program is for cpu. Use implementation 'plain', or "
        "run it on a TPU (or for one: under jax.set_mesh of its topology)."
    )
    text = refusal(lambda: attention(q, k, v, implementation="splash_transposed", causal=True, interpret=True))
    assert text.startswith("attention splash_transposed: It is asked for causal=True, window=None, and computes")
    mask = jnp.ones((1, 1, 40, 40), bool)
    text = refusal(lambda: attention(q, k, v, implementation="xla", mask=mask))
    assert text.startswith("attention xla: It is given a mask, and knows key padding only")
    halves = [x.astype(jnp.float16) for x in (q, k, v)]
    text = refusal(lambda: attention(*halves, implementation="splash", interpret=True))
    assert text.startswith("attention splash: q, k and v are float16")


def test_tensors_that_do_not_belong_together_are_refused():
    q, k, v = drawn()
    assert refusal(lambda: attention(q, k[:, :2], v)).startswith("attention: q [2, 4, 40, 16], k [2, 2, 40, 16]")
    assert "None of them may be empty" in refusal(lambda: attention(q[:, :, :0], k, v))
    assert "None of them may be empty" in refusal(lambda: attention(q, k[:, :, :0], v[:, :, :0]))
    assert "They must have one float dtype" in refusal(lambda: attention(q, k.astype(jnp.bfloat16), v))
    assert refusal(lambda: attention(q, k, v, lengths=jnp.asarray([41, 3]))) == (
        "attention: lengths is [41, 3]. Each must be 0 to 40, the number of tokens."
    )
    text = refusal(lambda: attention(q, k, v, lengths=jnp.asarray([4])))
    assert text == "attention: lengths has the shape [1] and dtype int32. It must be [2] integers, one for each sample."
    assert "dtype float32" in refusal(lambda: attention(q, k, v, lengths=jnp.asarray([4.0, 5.0])))
    text = refusal(lambda: attention(q, k, v, mask=jnp.ones((40, 40), bool)))
    assert text == "attention: The mask has the shape [40, 40]. It must be [2 or 1, 4 or 1, 40, 40]."


def test_a_tile_that_does_not_fit_is_refused_with_its_bytes():
    q, k, v = drawn(batch=1, heads=1, queries=40_000, keys=40_000, size=8, dtype=jnp.bfloat16)
    call = lambda: attention(  # noqa: E731
        q, k, v, tile=Tile(40_064, 4096), interpret=True, implementation="splash_transposed"
    )
    text = refusal(call, VmemError)
    assert "40064" in text and "MiB" in text


@pytest.mark.parametrize("with_lengths", [False, True])
def test_a_kernel_on_shards_equals_one_on_whole_arrays(with_lengths):
    q, k, v = drawn(batch=2, heads=4, queries=140, keys=140, size=64)
    lengths = jnp.asarray([140, 33]) if with_lengths else None
    whole = jax.jit(INTERPRETED)(q, k, v, lengths=lengths)
    kinds = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, 1), ("dp", "sp", "tp"), axis_types=kinds, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        split = jax.jit(INTERPRETED)(q, k, v, lengths=lengths)
    assert not split.sharding.is_fully_replicated
    # XLA fuses shards otherwise on a CPU: a rounding or two apart.
    assert float(jnp.abs(split - whole).max() / jnp.abs(whole).max()) < 1e-6


def test_few_keys_leave_queries_where_they_are():
    """Cross-attention to a text: sp splits the queries, also of heads that it does not divide."""
    q, k, v = drawn(batch=2, heads=3, queries=280, keys=20, size=64)
    lengths = jnp.asarray([20, 7])
    whole = jax.jit(INTERPRETED)(q, k, v, lengths=lengths)
    assert error(whole, q, k, v, lengths=numpy.asarray(lengths)) < 2e-5
    kinds = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 4, 1), ("dp", "sp", "tp"), axis_types=kinds, devices=jax.devices()[:8])
    with jax.set_mesh(mesh):
        split = jax.jit(INTERPRETED)(q, k, v, lengths=lengths)
    assert split.sharding.shard_shape(split.shape) == (1, 3, 70, 64)
    assert float(jnp.abs(split - whole).max() / jnp.abs(whole).max()) < 1e-6


def test_only_few_keys_do():
    sizes = {"dp": 2, "sp": 4, "tp": 1}
    assert dispatch._query_axes(sizes, 280, 20) == ("sp",)
    assert dispatch._query_axes(sizes, 280, 70) == ()  # to exchange a quarter of the queries costs no more
    assert dispatch._query_axes(sizes, 281, 20) == ()
    assert dispatch._query_axes({"dp": 2, "tp": 4}, 280, 20) == ()


def test_axes_that_do_not_divide_are_left_out():
    sizes = {"dp": 2, "sp": 4, "tp": 2}
    assert dispatch._dividing_axes(("dp",), sizes, 2) == ("dp",)
    assert dispatch._dividing_axes(("dp",), sizes, 3) == ()
    assert dispatch._dividing_axes(("sp", "tp"), sizes, 8) == ("sp", "tp")
    assert dispatch._dividing_axes(("sp", "tp"), sizes, 4) == ("sp",)
    assert dispatch._dividing_axes(("sp", "tp"), sizes, 6) == ("tp",)


def test_calls_are_noted_with_what_computes_them():
    q, k, v = drawn()
    seen = []
    with context(Context(None, {"joint": 1.0}, seen.append)):
        attention(q, k, v, bound="joint")
        attention(q, k[:, :, :7], v[:, :, :7], implementation="xla")
    assert seen == [
        dispatch.Traced("plain", 2, 4, 40, 40, 16, True, dtype="float32"),
        dispatch.Traced("xla", 2, 4, 40, 7, 16, False, dtype="float32"),
    ]


def test_long_calls_without_a_bound_try_shifts_with_the_tile_of_bounded_scores():
    long, short = (
        jnp.zeros((1, 1, tokens, 16), jnp.bfloat16) for tokens in (dispatch.LEAST_SHIFTED, dispatch.LEAST_SHIFTED - 1)
    )
    seen = []
    for shifts in (True, False):
        settings = Context(
            "splash_transposed", {"joint": 1.0}, seen.append, shifts=shifts, interpret=True, rehearse=True
        )
        with context(settings):
            attention(long, long, long)
            attention(long, short, short)
            attention(long, long, long, bound="joint")
            named = dispatch.transposed_settings(
                problem(), dispatch.LEAST_SHIFTED, dispatch.LEAST_SHIFTED, 1, 128, int8=False
            )
            assert named.shifted_tile == (tiles.best("v6e", "splash_transposed", 128, bounded=True) if shifts else None)
    assert [call.shifted for call in seen] == [True, False, False, False, False, False]


def test_lengths_may_be_a_list_or_numpys():
    q, k, v = drawn()
    wanted = attention(q, k, v, lengths=jnp.asarray([40, 17]))
    assert (attention(q, k, v, lengths=[40, 17]) == wanted).all()
    assert (attention(q, k, v, lengths=numpy.asarray([40, 17])) == wanted).all()


@pytest.mark.parametrize("window", [7, (3,), (1.5, 2), (-3, None), "x", (True, 1)])
def test_a_window_that_is_no_pair_of_distances_is_refused(window):
    q, k, v = drawn()
    text = refusal(lambda: attention(q, k, v, window=window))
    assert text == f"attention: window is {window!r}. It must be (left, right), each a whole number of keys or None."


@pytest.mark.parametrize("bound", [0.0, -5.0, True, [3], float("nan")])
def test_a_bound_that_bounds_nothing_is_refused(bound):
    q, k, v = drawn()
    assert "It must be a positive number" in refusal(lambda: attention(q, k, v, bound=bound))


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((512, 128, 128), "tile: block_kv is 128. It must be a positive multiple of 256."),
        ((512, 256, 100), "tile: columns is 100. It must be a positive multiple of 128."),
        ((0, 256, 128), "tile: block_q is 0. It must be a positive multiple of 128."),
    ],
)
def test_a_tile_that_the_kernel_would_compute_something_else_with_is_refused(sizes, text):
    assert refusal(lambda: Tile(*sizes)) == text


def test_a_tile_for_what_has_none_and_a_tile_of_another_kind_are_refused():
    q, k, v = drawn()
    text = refusal(lambda: attention(q, k, v, implementation="plain", tile=SMALL))
    assert text.startswith("attention plain: It is given a tile, and has none")
    text = refusal(lambda: attention(q, k, v, implementation="splash", tile=(128, 256, 128), interpret=True))
    assert text == "attention splash: The tile is (128, 256, 128). It must be a tiles.Tile."


def test_a_programs_implementation_leaves_masks_of_pairs_to_plain():
    q, k, v = drawn()
    mask = jnp.tril(jnp.ones((1, 1, 40, 40), bool))
    with context(Context("xla")):
        output = attention(q, k, v, mask=mask)
    assert error(output, q, k, v, mask=numpy.asarray(mask)) < 1e-6
    assert "It is given a mask" in refusal(lambda: attention(q, k, v, mask=mask, implementation="xla"))


def test_meshes_that_split_nothing_or_are_typed_are_refused():
    q, k, v = drawn()
    auto, explicit = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "model"), axis_types=(auto,) * 2, devices=jax.devices()[:4])):
        text = refusal(lambda: jax.jit(attention)(q, k, v))
    assert text == (
        "attention: No axis of the mesh {'data': 2, 'model': 2} splits the batch or the heads. "
        "Name its axes dp, sp, tp, or call attention inside a jax.shard_map of your own."
    )
    with jax.set_mesh(jax.make_mesh((2, 2), ("dp", "sp"), axis_types=(explicit,) * 2, devices=jax.devices()[:4])):
        assert "has explicit axes. Make it with axis_types=" in refusal(lambda: jax.jit(attention)(q, k, v))


def test_inside_a_shard_map_it_computes_what_it_is_given():
    q, k, v = drawn()
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec = jax.P("x")
    split = jax.shard_map(attention, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)(q, k, v)
    assert float(jnp.abs(split - attention(q, k, v)).max()) < 1e-6


def test_an_unknown_tpu_has_plain_and_is_told_what_the_kernels_know():
    asked = problem(chip=None)
    assert "It knows no tile for this TPU. Known: v5e, v5p, v6e, tpu7x; or use 'plain'." in refusal(
        lambda: dispatch._check_kernel("splash_transposed", asked)
    )
