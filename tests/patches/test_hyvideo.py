"""Patches of HunyuanVideo-1.5's own package: against a fake of it always, against a checkout where there is one.

    TORCHPORT_HYVIDEO=DIR pytest -m upstream tests/patches/test_hyvideo.py

runs every test here against the checkout, and more combinations of inputs and meshes; `-m slow` does the latter for the
fake. The original is upstream in eager PyTorch with at most its plumbing patched; the port is jitted through
torchport's own path on virtual devices. "Agreement" is DESIGN's. Upstream's torch mode is computed uncompiled; see the
world.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import os
import sys
import types
from pathlib import Path

import jax
import pytest
import torch
from fakes import hyvideo_world
from fakes.hyvideo_cases import (
    BATCH,
    CASES,
    FILLS,
    LATENTS,
    NAN,
    REPLICATE,
    TINY,
    attention_inputs,
    case_of,
    randomised,
    refiner_inputs,
)
from fakes.hyvideo_world import ATTENTION, PIPELINE, TRANSFORMER, VAE, Decoding, Flat, placed, quiet

from torchport import patch
from torchport.errors import BadValueError
from torchport.patch.declared import replacement

pytestmark = pytest.mark.usefixtures("plainly_compiled")
COMMAND = "TORCHPORT_HYVIDEO=DIR pytest -m upstream"
MESHES = ({"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 4})
FAST = "t2v-with-image", MESHES[0]


@pytest.fixture(scope="module", params=["fake", pytest.param("checkout", marks=pytest.mark.upstream)])
def world(request, root, tmp_path_factory):
    """Upstream in this process: the fake, with patches that no lock ties to Tencent's source; or the checkout."""
    folder, patches = root / "tests/fakes/hyvideo", root / "patches"
    if request.param == "checkout":
        if "TORCHPORT_HYVIDEO" not in os.environ:
            pytest.skip(f"needs a checkout of Tencent's HunyuanVideo-1.5: {COMMAND}")
        folder = Path(os.environ["TORCHPORT_HYVIDEO"]).resolve()
    else:
        patches = hyvideo_world.unlocked(root, tmp_path_factory.mktemp("pack"))
    with hyvideo_world.opened(folder, patches) as opened:
        assert opened.originals  # now: each later change of what is patched takes a second
        yield opened


@pytest.fixture(scope="module")
def programs(world):
    """The jitted transformer by mesh; one program takes zero vision states and others."""
    made = {}

    def ported(case, mesh):
        key = tuple(mesh.items())
        inputs, static = case_of(case, world.tables)
        with world.patched() as ledger:
            made.setdefault(key, world.compiled(ledger, mesh))
            return made[key](**inputs, **static)

    return ported


@pytest.fixture(scope="module")
def under(world, pack):
    """The jitted transformer under a strategy of the card, one program for each of them."""
    card, _ = pack.card("hyvideo")

    @functools.cache
    def program(strategy, mesh, stacked):
        stacks = card.stacks["transformer"] if stacked else {}
        return world.under(world.ledger, card.strategies[strategy], dict(mesh), stacks)

    def ported(strategy, mesh, stacked, case):
        inputs, static = case_of(case, world.tables)
        with world.patched():
            return program(strategy, tuple(mesh.items()), stacked)(**inputs, **static)

    return ported


@pytest.fixture(scope="module")
def trace(root):
    """The benchmark's module, which counts the constants of a program."""
    spec = importlib.util.spec_from_file_location("hyvideo_trace", root / "benchmarks/hyvideo_trace.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def function(world, entry_id):
    """Returns a patch's own function."""
    entry = next(entry for entry in world.hyvideo if entry.id == entry_id)
    return replacement.load(entry, entry.reference)


def difference(ours, reference):
    """Returns max|a - b| / max|b|, of a reference whose size makes that mean something."""
    largest = reference.abs().max().item()
    assert 0.5 <= largest <= 20
    return (ours.double() - reference.double()).abs().max().item() / largest


def agreements():
    for case, mesh in itertools.product(CASES, MESHES):
        name = f"{case} {' '.join(f'{axis}={size}' for axis, size in mesh.items())}"
        yield pytest.param(case, mesh, id=name, marks=() if (case, mesh) == FAST else pytest.mark.slow)


# The whole transformer.


@pytest.mark.parametrize(("case", "mesh"), list(agreements()))
def test_the_jitted_port_agrees_with_the_original(world, programs, case, mesh):
    """Four samples: full masks, a short text without letters, a longer one with some, one token without letters."""
    eager, exact = world.expected[case]
    ours = programs(case, mesh)
    assert difference(ours, eager) <= 1e-5
    assert 0 < difference(ours, exact) <= 4 * difference(eager, exact)


STRATEGIES = [
    ("ulysses", {"sp": 2}, False),
    ("ulysses", {"sp": 4}, True),
    ("ulysses", {"dp": 2, "sp": 4}, False),
    ("tp", {"dp": 2, "tp": 4}, True),
    ("tp_replicated_rows", {"dp": 2, "tp": 4}, True),
    ("tp_replicated_rows", {"tp": 2}, False),
    ("fsdp", {"dp": 2, "sp": 4}, True),
    ("fsdp", {"dp": 2, "sp": 4}, False),
]
QUICK = {("ulysses", 2): "t2v", ("ulysses", 4): "i2v", ("fsdp", 4): "t2v-with-image"}


def under_strategies():
    for (strategy, mesh, stacked), case in itertools.product(STRATEGIES, CASES):
        shown = f"{strategy} {' '.join(f'{axis}={size}' for axis, size in mesh.items())} {'stacked' * stacked} {case}"
        is_quick = QUICK.get((strategy, mesh.get("sp"))) == case and stacked == (mesh.get("sp") == 4)
        yield pytest.param(strategy, mesh, stacked, case, id=shown, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize(("strategy", "mesh", "stacked", "case"), list(under_strategies()))
def test_the_port_under_every_strategy_of_the_card_agrees_with_the_original(
    world, under, strategy, mesh, stacked, case
):
    """The same four samples as above, under the card's own rules; image tokens over sp=2 and sp=4 among them."""
    eager, exact = world.expected[case]
    ours = under(strategy, mesh, stacked, case)
    assert difference(ours, eager) <= 1e-5
    assert 0 < difference(ours, exact) <= 4 * difference(eager, exact)


def test_every_sample_and_condition_counts(world):
    """Or the agreement above would not see a mask, a letter or an image that is ignored."""
    with_image, _ = world.expected["i2v"]
    assert difference(world.expected["t2v"][0], with_image) > 1e-2
    for name in ("encoder_attention_mask", "byt5_text_mask"):
        moved = (world.originals[name] - with_image).abs().amax(dim=(1, 2, 3, 4))
        assert moved[0] == 0
        assert (moved[1:] > 1e-3).all()


@pytest.mark.slow
def test_single_stream_blocks_agree(world):
    """The published model has none; a slice of a slice is what torchax's lazy views break on."""
    kept = world.model
    made = world[TRANSFORMER].HunyuanVideo_1_5_DiffusionTransformer
    small = {"mm_double_blocks_depth": 1, "mm_single_blocks_depth": 1, "glyph_byT5_v2": True}
    try:
        world.model = randomised(made(**{**TINY, **small}), 5)
        inputs, static = case_of("i2v", world.tables)
        with world.original():
            eager = Flat(world.model)(**inputs, **static)
        with world.patched() as ledger:
            ours = world.compiled(ledger, {"tp": 2}, **small)(**inputs, **static)
    finally:
        world.model = kept
    assert difference(ours, eager) <= 1e-5


def test_every_patch_of_denoise_is_called(world):
    with world.patched(), patch.applied(world.entries, stage="denoise") as ledger, torch.no_grad():
        inputs, static = case_of("t2v", world.tables)
        eager = Flat(world.model)(**inputs, **static)
        ledger.check_called()
    assert difference(eager, world.expected["t2v"][0]) <= 1e-5


# Where patches are, and who holds them.


def test_every_patch_is_applied_as_its_module_is_imported(world):
    assert {row["id"] for row in world.rows} == {entry.id for entry in world.hyvideo}
    drift = "locked" if world.is_locked else "unlocked"
    assert {(row["state"], row["late"], row["drift"]) for row in world.rows} == {("applied", False, drift)}


HOLDERS = {
    "hyvideo.sequence-parallel-attention": [f"{ATTENTION}.sequence_parallel_attention"],
    "hyvideo.refiner-attention": [
        f"{ATTENTION}.attention",
        "hyvideo.models.transformers.modules.token_refiner.attention",
    ],
    "hyvideo.gpu-memory": [
        "hyvideo.commons.get_gpu_memory", "hyvideo.get_gpu_memory", f"{PIPELINE}.get_gpu_memory",
    ],
    "hyvideo.vae-attention": [f"{VAE}.AttnBlock.forward"],
}  # fmt: skip


def holders(things):
    """Returns, for each object by its key, every name of a module or of a class in one that stands for it.

    The objects are known by their ids: whatever refers to them, and be it weakly, would be given the replacements.
    """
    keys, found = {thing: key for key, thing in things.items()}, {key: set() for key in things}
    spaces = [(key, vars(module)) for key, module in list(sys.modules.items()) if type(module) is types.ModuleType]
    types_ = {id(value): value for _, names in spaces for value in names.values() if issubclass(type(value), type)}
    spaces += [(f"{cls.__module__}.{cls.__qualname__}", vars(cls)) for cls in types_.values()]
    for where, names in spaces:
        for name, value in list(names.items()):
            if id(value) in keys:
                found[keys[id(value)]].add(f"{where}.{name}")
    return found


def target_of(world, entry):
    """Returns the id of what a target is now; upstream, or the engine that puts it back, keeps it alive."""
    thing = world[entry.module]
    for name in entry.path:
        thing = vars(thing)[name]
    return id(thing)


def test_every_holder_of_every_target_sees_the_patch(world):
    replaced = [entry for entry in world.hyvideo if entry.kind == "replace"]
    with world.bare():
        originals = {entry.id: target_of(world, entry) for entry in replaced}
        before = holders(originals)
    for key, names in HOLDERS.items():
        assert before[key] >= set(names)
    with world.patched():
        assert not any(holders(originals).values())
        assert holders({entry.id: target_of(world, entry) for entry in replaced}) == before
    with world.bare():
        assert holders(originals) == before


# Each function against upstream's.


def test_tokens_are_ordered_bit_for_bit(world):
    ours = function(world, "hyvideo.token-order")
    model, draw = world.model, torch.Generator().manual_seed(1)
    for number in range(240):
        batch, first, second = (int(torch.randint(1, high, (), generator=draw)) for high in (4, 7, 9))
        tokens = [torch.randn(batch, length, 3, generator=draw) for length in (first, second)]
        masks = [torch.randint(0, 2, (batch, length), generator=draw) for length in (first, second)]
        masks = [
            torch.full_like(m, kind) if kind in (0, 1) else m for m, kind in zip(masks, KINDS[number % 9], strict=True)
        ]
        masks = [mask.bool() if number % 5 == 0 else mask for mask in masks]
        flags = {"zero_feat": number % 2 == 0}
        with world.bare():
            expected = model.reorder_txt_token(*tokens, *masks, **flags)
        for a, b in zip(ours(model, *tokens, *masks, **flags), expected, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


KINDS = list(itertools.product((0, 1, None), repeat=2))


def test_tokens_in_another_order_are_refused(world):
    ours, tokens, mask = function(world, "hyvideo.token-order"), torch.ones(1, 2, 3), torch.ones(1, 2)
    text = refusal(lambda: ours(world.model, tokens, tokens, mask, mask, is_reorder=False))
    assert text == (
        "hyvideo's is_reorder: It is False. Leave it: attention takes the number of valid tokens as the whole mask."
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["blend_v", "blend_h"])
def test_tiles_are_blended_bit_for_bit_and_in_place(world, name, dtype):
    ours = function(world, {"blend_v": "hyvideo.blend-rows", "blend_h": "hyvideo.blend-columns"}[name])
    draw = torch.Generator().manual_seed(2)
    for a_size, b_size, extent in itertools.product((1, 5, 32), (1, 4, 32), (0, 1, 7, 32, 50)):
        sizes = ((a_size, 6), (b_size, 6)) if name == "blend_v" else ((6, a_size), (6, b_size))
        a, b = (torch.randn(2, 3, 2, *size, generator=draw).to(dtype) for size in sizes)
        expected, mine = b.clone(), b.clone()
        with world.bare():
            getattr(world.vae, name)(a, expected, extent)
        assert ours(world.vae, a, mine, extent) is mine
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("case", CASES)
def test_the_vision_condition_is_upstreams_bit_for_bit(world, case):
    entries = [entry for entry in world.entries if entry.plumbing or entry.id == "hyvideo.vision-condition"]
    inputs, static = case_of(case, world.tables)
    with quiet(), world.patched(entries), patch.applied(entries) as ledger, torch.no_grad():
        output = Flat(world.model)(**inputs, **static)
        calls = {row["id"]: row["calls"] for row in ledger.rows()}
    assert calls["hyvideo.vision-condition"] == 1
    assert torch.equal(output, world.expected[case][0])


# Padding.


def test_padded_queries_return_exact_zeros_as_upstreams_do(world):
    with world.patched():
        ours = world.attentions(*attention_inputs())
    for a, b in zip(ours, world.originals["attention"][None], strict=True):
        assert a.shape == b.shape
        for output in (a, b):
            assert (output[1, -3:] == 0).all()
            assert (output[1, :-3] != 0).all()
        assert difference(a, b) <= 1e-6


def test_large_numbers_in_padding_change_nothing(world):
    """As in upstream: a padded key's weight is exactly 0, and 0 times 1e30 is 0."""
    with world.patched():
        ours = {fill: world.attentions(*attention_inputs(fill)) for fill in FILLS}
    for outputs in (ours, world.originals["attention"]):
        for a, b in zip(outputs[None], outputs[1e30], strict=True):
            assert torch.equal(a, b)


def test_nan_in_padding_spreads_to_its_own_sample_alone_as_in_upstream(world):
    """0 times NaN is NaN: neither upstream nor the port may be given NaN in padded values, and neither hides it."""
    with world.patched():
        ours = world.attentions(*attention_inputs(NAN))
    for output in (*ours, *world.originals["attention"][NAN]):
        assert output[0].isfinite().all()
        assert output[1, :-3].isnan().all()
    for output in ours:
        assert (output[1, -3:] == 0).all()


# What is refused.


def refusal(call):
    with pytest.raises(BadValueError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("mode", ["sageattn", "flex-block-attn", "auto", None])
def test_attention_that_computes_something_else_is_refused(world, mode):
    pairs, mask = attention_inputs()
    with world.patched():
        text = refusal(lambda: world[ATTENTION].parallel_attention(*pairs, 5, 5, attn_mode=mode, text_mask=mask))
    assert text == (
        f"hyvideo's attn_mode: It is {mode!r}, which computes something else than dense attention. "
        "Use one of flash, flash2, flash3, torch."
    )


def test_no_mask_is_refused_as_upstream_has_no_unmasked_mode(world):
    pairs, _ = attention_inputs()
    with world.patched():
        text = refusal(lambda: world[ATTENTION].parallel_attention(*pairs, 5, 5, attn_mode="flash", text_mask=None))
    assert text == "hyvideo's text_mask: It is None. Pass the mask: upstream has no unmasked mode either."


def test_dropout_and_other_attention_are_refused_in_the_refiner(world):
    (_, q), mask = attention_inputs()[0][0], attention_inputs()[1]
    with world.patched():
        for wrong in ({"attn_mode": "sageattn"}, {"drop_rate": 0.1}, {"causal": True}):
            text = refusal(lambda wrong=wrong: world[ATTENTION].attention(q, q, q, attn_mask=mask, **wrong))
            assert text.startswith("hyvideo's attention: attn_mode=")
            assert text.endswith(
                "Only dense attention without dropout, and causal only without a mask, is carried over."
            )


def test_upstreams_own_sequence_parallelism_is_refused(world):
    with world.patched():
        states = world["hyvideo.commons.parallel_states"]
        text = refusal(lambda: states.initialize_parallel_state(sp=2))
    assert text == ("hyvideo's sequence parallelism: 'sp' is 2. Leave it at 1: the job's mesh shards the program.")


def test_the_parallel_state_is_complete(world):
    with world.patched():
        state = world[TRANSFORMER].get_parallel_state()
        assert (state.sp, state.sp_enabled, state.sp_rank, state.sp_group) == (1, False, 0, None)
        assert state is world[ATTENTION].get_parallel_state()
        assert isinstance(state, world["hyvideo.commons.parallel_states"].ParallelDims)
        assert (state.sp_mesh.size(), state.sp_mesh.get_local_rank(), state.world_mesh["dp"].get_group()) == (
            1,
            0,
            None,
        )
    assert not torch.distributed.is_initialized()


# Constants.


def test_rotary_tables_are_arguments_and_no_constant_exceeds_a_megabyte(world, trace):
    """10,240 image tokens: tables that upstream computes in its forward are 1.3 MB each, twice for each block."""
    inputs, static = case_of("t2v", world.tables)
    sizes = (8, 32, 40)
    inputs = {name: tensor[:2] for name, tensor in inputs.items()} | {"hidden_states": torch.empty(2, 9, *sizes)}
    inputs["freqs_cos"], inputs["freqs_sin"] = world.tables(sizes)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, str(x.dtype).removeprefix("torch.")) for name, x in inputs.items()}
    shapes = {n: jax.ShapeDtypeStruct(s.shape, "int32") if "mask" in n else s for n, s in shapes.items()}
    with world.patched() as ledger:
        program = world.compiled(ledger, {"tp": 2})
        as_arguments = trace.constants(program.lowered(shapes, tuple(static.items())))
        del shapes["freqs_cos"], shapes["freqs_sin"]
        rules = [rule for rule in program.network.inputs if "freqs" not in rule.match]
        program.network = dataclasses.replace(program.network, inputs=rules)
        inside = trace.constants(program.lowered(shapes, tuple(static.items())))
    assert as_arguments[0] < 10_000 and inside[0] < 10_000
    assert [table.nbytes for table in program._tables] == [8 * 32 * 40 * 32 * 4] * 8


# Without one of the patches.


def test_without_the_refiners_patch_its_output_is_nan(world):
    """XLA's softmax of a fully masked row; from there 0 * NaN reaches valid tokens in the second block."""
    outputs = {}
    for name, entries in (("patched", None), ("without", world.without("hyvideo.refiner-attention"))):
        with quiet(), world.patched(entries) as ledger:
            refiner = placed(world.model.txt_in, world.model.txt_in, REPLICATE, BATCH, {"dp": 2}, ledger)
            outputs[name] = refiner(**refiner_inputs(world.tables))
    assert difference(outputs["patched"], world.originals["refiner"]) <= 1e-5
    assert outputs["without"][0].isfinite().all()
    assert outputs["without"][1:].isnan().all()


FAILURES = {
    "hyvideo.joint-attention hyvideo.rotary hyvideo.sequence-parallel-attention": jax.errors.ConcretizationTypeError,
    "hyvideo.token-order": jax.errors.NonConcreteBooleanIndexError,
    "hyvideo.vision-condition": jax.errors.ConcretizationTypeError,
}


@pytest.mark.parametrize("ids", FAILURES)
def test_without_the_patches_of_one_fault_the_transformer_cannot_be_traced(world, ids):
    inputs, static = case_of("t2v", world.tables)
    with quiet(), world.patched(world.without(*ids.split())) as ledger:
        program = world.compiled(ledger, {"dp": 2})
        with pytest.raises(FAILURES[ids]):
            program(**inputs, **static)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA: there it starts")
def test_without_the_parallel_state_upstream_asks_for_cuda(world):
    with quiet(), world.patched(world.without("hyvideo.parallel-state")):
        with pytest.raises((AttributeError, RuntimeError, AssertionError, ValueError)):  # as torch was built
            world[TRANSFORMER].get_parallel_state()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_the_gpus_memory_tiles_are_small(world):
    config = world[PIPELINE].HunyuanVideo_1_5_Pipeline.get_vae_inference_config
    with world.bare():
        meant, found = config(80 * 2**30), config()
    assert (meant["sample_size"], found["sample_size"]) in [(256, 128), (256, 160)]  # 160 at first
    with world.patched():
        assert config() == meant


def test_without_the_patch_tile_parallelism_asks_for_a_process_group(world):
    z = torch.zeros(1, 4, 1, 6, 6)
    with torch.no_grad():
        for entries, outcome in (
            (None, contextlib.nullcontext()),
            (world.without("hyvideo.tile-parallelism"), pytest.raises(ValueError, match="process group")),
        ):
            with world.patched(entries), outcome:
                world.vae.enable_tile_parallelism()
                world.vae.decode(z)
            world.vae._tile_parallelism_enabled = False


# The VAE in a program.


@pytest.fixture(scope="module")
def length(world):
    """Gives the length of the program that decodes 2 x 2 tiles, with its constants, without the patches named."""

    def counted(*without):
        with world.patched(world.without(*without)) as ledger:
            program = placed(Decoding(world.vae), Decoding(world.vae), REPLICATE, REPLICATE, {"dp": 1}, ledger)
            shape = {"z": jax.ShapeDtypeStruct((1, 4, 2, 6, 6), "float32")}
            return len(program.lowered(shape, ()).as_text())

    return functools.cache(counted)


@pytest.mark.parametrize("entry_id", ["hyvideo.vae-attention", "hyvideo.blend-rows", "hyvideo.blend-columns"])
def test_without_one_patch_the_vaes_program_grows_with_rows(length, entry_id):
    assert length(entry_id) > length() + 2000


def test_a_tiled_decode_agrees_with_the_original(world):
    """3 x 3 tiles, the last ones odd: each blends with neighbours that are blended already."""
    with world.patched(), patch.applied(world.entries, stage="decode") as ledger:
        program = placed(Decoding(world.vae), Decoding(world.vae), REPLICATE, REPLICATE, {"dp": 1}, ledger)
        ours = program(z=LATENTS)
        ledger.check_called()
    assert difference(ours, world.originals["decode"]) <= 1e-5
