"""Networks with several outputs, and with caches that stay on the devices from one call to the next."""

from types import SimpleNamespace

import jax
import pytest
import torch
from fakes.networks import Chunks
from jax.sharding import PartitionSpec

from torchport import compile, patch, shard
from torchport.compile import preflight
from torchport.config.strategy import Rule
from torchport.errors import BadValueError, DeadRuleError, MeshError, UnmatchedError
from torchport.stages import recorder
from torchport.stages.family import Stage

WEIGHTS = [Rule(match=r".*\.weight", spec=["tp"]), Rule(match=r".*\.bias", spec="replicate")]
INPUTS = [
    Rule(match="chunk", spec=["dp"]),
    Rule(match=r"cache\.first", spec=["dp", None, "tp"]),
    Rule(match=r"cache\.later\.0", spec=["dp"]),
]
OUTPUTS = {"outputs": ("frames", "cache", "facts"), "keeps": ("cache",)}


@pytest.fixture(scope="module", autouse=True)
def patched(pack):
    """torchax beside this torch needs its patches, as everything else does."""
    with patch.applied(patch.read(pack.patches, ["torchax"])):
        yield


@pytest.fixture
def module():
    """A decoder with drawn weights."""
    torch.manual_seed(0)
    return Chunks().eval().requires_grad_(False)


def compiled(module, mesh, rules=INPUTS, **options):
    """Returns a copy of a module as programs."""
    tensors = {name: tensor.clone() for name, tensor in module.named_parameters()}
    placed = shard.match(WEIGHTS, shard.named_shapes(tensors), dict(mesh.shape), "card.yaml:1")
    arrays = shard.place(tensors.items(), placed, mesh)
    bare = Chunks().to("meta").eval().requires_grad_(False)
    options = {**OUTPUTS, **options}
    return compile.Compiled(compile.Network(bare, rules, "decoder", "card.yaml:9", "highest", **options), arrays, mesh)


def decode(call, video):
    """Returns what a call makes of a video chunk by chunk, and the caches that it returned."""
    frames, caches, cache = [], [], None
    for chunk in video.split(2, dim=1):
        some, cache, facts = call(chunk=chunk, cache=cache)
        assert torch.allclose(facts["norm"], some.square().mean())
        frames.append(some)
        caches.append(cache)
    return torch.cat(frames, 1), caches


def test_chunks_with_a_cache_are_what_the_eager_module_and_the_whole_video_are(module, mesh8):
    video = torch.randn(4, 6, 8)
    eager, _ = decode(compile.Eager(module, outputs=OUTPUTS["outputs"]), video)
    torch.testing.assert_close(eager, module(video)[0], rtol=1e-6, atol=1e-6)
    program = compiled(module, mesh8)
    frames, caches = decode(program, video)
    torch.testing.assert_close(frames, eager, rtol=1e-5, atol=1e-5)
    assert len(program.programs) == 2, "one without a cache, and one for all later chunks"
    assert isinstance(caches[-1]["first"], jax.Array) and caches[-1]["later"][1] is None


def test_a_cache_stays_on_the_devices_where_the_rules_for_inputs_put_it(module, mesh8, monkeypatch):
    program, gathered = compiled(module, mesh8), []
    monkeypatch.setattr(shard, "to_torch", lambda array: gathered.append(array.shape) or torch.zeros(array.shape))
    cache = None
    for chunk in torch.randn(3, 4, 2, 8):
        before = cache
        _, cache, _ = program(chunk=chunk, cache=cache)
        assert cache["first"].sharding.spec == PartitionSpec("dp", None, "tp")
        assert cache["later"][0].sharding.is_equivalent_to(shard.sharding(INPUTS[2], mesh8), 3)
        assert before is None or before["first"].is_deleted(), "its memory serves the next one"
    assert gathered == [(4, 2, 8), ()] * 3


def test_a_cache_of_the_host_is_placed_and_one_that_was_passed_before_is_refused(module, mesh8):
    program, zero = compiled(module, mesh8), torch.zeros(4, 1, 8)
    chunk = torch.randn(4, 2, 8)
    frames, cache, _ = program(chunk=chunk, cache={"first": zero, "later": (zero, None)})
    torch.testing.assert_close(frames, module(chunk)[0], rtol=1e-5, atol=1e-5)
    program(chunk=chunk, cache=cache)
    with pytest.raises(BadValueError) as caught:
        program(chunk=chunk, cache=cache)
    assert str(caught.value) == (
        "decoder: 'cache.first' was an input of an earlier call, which may write over it. "
        "Pass a cache once only, and then the one that the call returned."
    )


def test_without_names_the_first_output_alone_is_returned(module, mesh8):
    chunk = torch.randn(4, 2, 8)
    program = compiled(module, mesh8, INPUTS[:1], outputs=(), keeps=())
    torch.testing.assert_close(program(chunk=chunk), compile.Eager(module)(chunk=chunk), rtol=1e-5, atol=1e-5)


def test_outputs_that_are_not_kept_come_to_the_host_whatever_tree_they_are(module, mesh8):
    chunk = torch.randn(4, 2, 8)
    frames, cache, facts = compiled(module, mesh8, INPUTS[:1], keeps=())(chunk=chunk)
    expected = module(chunk)
    torch.testing.assert_close((frames, cache["later"][0]), (expected[0], expected[1]["later"][0]))
    assert cache["later"][1] is None and facts["norm"].shape == ()


def test_outputs_of_an_object_or_a_mapping_are_found_by_their_names(module, mesh8):
    class Output:
        def __init__(self, frames, cache, facts):
            self.frames, self.cache, self.facts = frames, cache, facts

    chunk = torch.randn(4, 2, 8)
    for kind in (Output, dict):
        program = compiled(
            module,
            mesh8,
            how=lambda module, kind=kind, **inputs: kind(
                **dict(zip(OUTPUTS["outputs"], module(**inputs), strict=True))
            ),
        )
        torch.testing.assert_close(program(chunk=chunk, cache=None)[0], module(chunk)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("outputs", "how", "text"),
    [
        (
            ("frames", "cache"),
            compile.plainly,
            "decoder: It returns 3 output(s), and `Stage.outputs` names 2: frames, cache. "
            "Give each output a name, in their order.",
        ),
        (
            ("frames", "cache"),
            lambda module, **inputs: {"frames": module(**inputs)[0], "caches": None},
            "decoder: What it returns, of the type dict, has no 'cache'. Did you mean 'caches'? Known: caches, frames.",
        ),
        (
            ("frames", "cache"),
            lambda module, **inputs: (module(**inputs)[0], {"position": 3}),
            "decoder: 'cache.position' is no tensor, but of the type int. "
            "It must be tensors in tuples, lists and dicts: the function of `Stage.call` may arrange them.",
        ),
        (
            (),
            lambda module, **inputs: [3],
            "decoder: The first of its outputs is no tensor, but of the type int. "
            "Return a tensor first, or name all outputs in `Stage.outputs`.",
        ),
    ],
)
def test_outputs_that_are_not_those_of_the_stage_are_refused_alike_by_a_program_and_eager(
    module, mesh8, outputs, how, text
):
    program = compiled(module, mesh8, INPUTS[:1], outputs=outputs, keeps=(), how=how)
    for call in (program, compile.Eager(module, how, outputs, "decoder")):
        with pytest.raises(BadValueError) as caught:
            call(chunk=torch.randn(4, 2, 8))
        assert str(caught.value) == text


def test_a_cache_needs_a_rule_and_a_rule_for_one_that_is_never_returned_is_refused(module, mesh8):
    chunk = torch.randn(4, 2, 8)
    with pytest.raises(
        UnmatchedError, match=r"card.yaml:9: No rule matches the input 'cache.first' \[4, 1, 8\] of decod"
    ):
        compiled(module, mesh8, INPUTS[:1])(chunk=chunk, cache=None)
    with pytest.raises(DeadRuleError, match=r"Rule 4, 'cache\\.last', matches none of 3 tensors"):
        compiled(module, mesh8, [*INPUTS, Rule(match=r"cache\.last", spec="replicate")])(chunk=chunk, cache=None)


def test_plans_and_checks_see_each_program_its_cache_and_the_rules_of_what_it_keeps(module, mesh8):
    def verb(parts, call, settings, steps, video):
        return {"frames": decode_shapes(call, video)}

    def decode_shapes(call, video):
        frames, cache = [], None
        for chunk in video.split(2, dim=1):
            some, cache, facts = call(chunk=chunk, cache=cache)
            assert some.device.type == "cpu" and facts["norm"].shape == ()
            frames.append(some)
        return torch.cat(frames, 1)

    stage = Stage(
        "decode", verb, (), network="vae", like=lambda parts, settings: {"video": torch.zeros(4, 6, 8)}, **OUTPUTS
    )
    calls = recorder.network_calls(stage, {}, Chunks(), compile.plainly, None)
    cache = {"cache.first": [4, 1, 8], "cache.later.0": [4, 1, 8]}
    assert [call.times for call in calls] == [1, 2] and [call.flops for call in calls] == [
        2 * 2 * 2 * 4 * 2 * 8 * 8
    ] * 2
    assert [{path: list(tensor.shape) for path, tensor in call.tensors.items()} for call in calls] == [
        {"chunk": [4, 2, 8]},
        {"chunk": [4, 2, 8], **cache},
    ]
    assert [{path: list(tensor.shape) for path, tensor in call.kept.items()} for call in calls] == [cache] * 2
    planned, ran = compiled(module, mesh8), compiled(module, mesh8)
    chunks = torch.randn(3, 4, 2, 8)
    _, first, _ = ran(chunk=chunks[0], cache=None)
    for call, arrays in zip(calls, ({"chunk": chunks[0]}, {"chunk": chunks[1], "cache": first}), strict=True):
        text = planned.lowered(planned.shapes(call.inputs), call.static).as_text()
        assert text == ran.lowered(ran.place(**arrays), call.static).as_text()
        assert ("jax.buffer_donor" in text or "tf.aliasing_output" in text) == ("cache" in arrays)


@pytest.mark.parametrize(
    ("rules", "kind", "text"),
    [
        (INPUTS, None, ""),
        (INPUTS[:2], UnmatchedError, "No rule matches the input 'cache.later.0' [4, 1, 8] of vae"),
        ([*INPUTS, Rule(match="caches.*", spec="replicate")], DeadRuleError, "'caches.*', matches none of 3 tensors"),
        (
            [*INPUTS[:2], Rule(match=r"cache\.later\.0", spec=["dp", "tp"])],
            MeshError,
            "tp=4 does not divide dim 1 of 'cache.later.0' [4, 1, 8], an input of vae",
        ),
    ],
)
def test_a_check_before_a_run_of_one_chunk_knows_that_its_cache_needs_rules(rules, kind, text, monkeypatch):
    stage = Stage(
        "decode",
        lambda parts, call, settings, steps, chunk: call(chunk=chunk, cache=None),
        (),
        network="vae",
        like=lambda parts, settings: {"chunk": torch.zeros(4, 2, 8)},
        **OUTPUTS,
    )
    calls = recorder.network_calls(stage, {}, Chunks(), compile.plainly, None, count=False)
    written = SimpleNamespace(
        inputs=rules,
        place=lambda kind: "card.yaml:9",
        places=lambda kind: [f"card.yaml:{10 + n}" for n in range(len(rules))],
    )
    monkeypatch.setattr(preflight, "of_task", lambda task, component: written)
    task = SimpleNamespace(
        job=SimpleNamespace(strategy="tp", mesh={"dp": 2, "tp": 4}),
        family=SimpleNamespace(batch=lambda scale: 4),
        settings=SimpleNamespace(guidance_scale=1.0),
    )
    if kind is None:
        [found] = preflight.input_rules(task, "vae", calls)
        assert list(found) == ["chunk"]
        return
    with pytest.raises(kind) as caught:
        preflight.input_rules(task, "vae", calls)
    assert text in str(caught.value)


def test_an_output_that_is_kept_must_have_a_name():
    with pytest.raises(BadValueError) as caught:
        Stage("decode", dict, (), outputs=("frames", "cache"), keeps=("caches",))
    assert str(caught.value) == (
        "Stage 'decode': 'caches' in `keeps` is no name in `outputs`. Did you mean 'cache'? Known: cache, frames."
    )
