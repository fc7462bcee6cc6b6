"""`torchport.port`: a module that is loaded already, compiled on a mesh, and called as before."""

import dataclasses
import re
import runpy
import subprocess
import sys

import jax
import pytest
import torch
from fakes.small_port import SmallPort
from torch.nn import functional

import torchport
from torchport.engine import conformance
from torchport.errors import (
    BadValueError,
    CudaError,
    DeadRuleError,
    ForeignError,
    HostTensorError,
    MeshError,
    NoLoweringError,
    OperatorError,
    StaleTraceError,
    TorchportError,
    TracedValueError,
    UnknownKeyError,
    UnknownNameError,
    UnmatchedError,
)

pytestmark = pytest.mark.usefixtures("plainly_compiled")

MESH = {"dp": 2, "tp": 4}
WEIGHTS = [
    {"match": r"up\.(weight|bias)", "spec": ["tp"]},
    {"match": r"down\.weight", "spec": [None, "tp"]},
    {"match": r"down\.bias|table", "spec": "replicate"},
]
INPUTS = [{"match": "x", "spec": ["dp"]}]
RULES = {"weights": WEIGHTS, "inputs": INPUTS}
REPLICATED = [{"match": ".*", "spec": "replicate"}]


class Block(torch.nn.Module):
    """A network as somebody has it: options, a buffer, and more than one thing to return."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.register_buffer("table", torch.arange(8.0))
        self.config = {"heads": 4}

    def forward(self, x, scale=1.0, *, extra=None, form="dict", **more):
        y = self.down(torch.relu(self.up(x))) * scale + self.table
        if extra is not None:
            y = y + extra["added"]
        if "also" in more:
            y = y + more["also"]
        return {"sample": y, "scale": scale} if form == "dict" else (y, x.shape[0]) if form == "tuple" else y


@pytest.fixture
def block():
    torch.manual_seed(0)
    return Block().eval()


@pytest.fixture
def x():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def session():
    with torchport.applied() as session:
        yield session


def close(a, b):
    return (a - b).abs().max() <= 1e-6 * b.abs().max()


def test_on_one_device_it_needs_no_rules(block, x, session):
    expected = block(x, 2.0, form="tensor")
    assert close(torchport.port(block)(x, 2.0, form="tensor"), expected)
    assert torch.equal(torchport.port(torch.nn.ReLU().eval())(x), x.relu())  # it has no weights, either
    table = torch.nn.Identity().eval()
    table.register_buffer("table", torch.ones(8), persistent=False)
    assert torch.equal(torchport.port(table, inputs=[{"match": "input", "spec": ["dp"]}])(x), x)
    with pytest.raises(DeadRuleError, match="no_input"):
        torchport.port(table, inputs=[{"match": "no_input", "spec": ["dp"]}])(x)


@pytest.mark.parametrize("form", ["dict", "tuple", "tensor"])
def test_it_returns_what_the_module_returns(block, x, session, form):
    expected = block(x, 2.0, form=form)
    ported = torchport.port(block, strategy=RULES, mesh=MESH)
    result = ported(x, 2.0, form=form)
    assert type(result) is type(expected)
    values = lambda output: list(output.values()) if isinstance(output, dict) else output  # noqa: E731
    for ours, theirs in zip(values(result), values(expected), strict=True):
        assert close(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs


def test_its_weights_lie_where_the_rules_put_them_and_the_hosts_memory_is_free(block, session):
    ported = torchport.port(block, strategy=RULES, mesh=MESH)
    shards = {name: array.sharding.shard_shape(array.shape) for name, array in ported.compiled.weights.items()}
    assert shards == {"up.weight": (4, 8), "up.bias": (4,), "down.weight": (8, 4), "down.bias": (8,), "table": (8,)}
    assert all(parameter.is_meta for parameter in block.parameters()) and not block.table.is_meta


def test_attributes_are_the_modules_and_the_device_is_the_host(block, session):
    ported = torchport.port(block, strategy=RULES, mesh=MESH)
    assert ported.config == {"heads": 4} and ported.up.in_features == 8
    assert (ported.device, ported.training) == (torch.device("cpu"), False)
    assert ported.to("cpu") is ported and ported.eval() is ported
    with pytest.raises(AttributeError, match="no_such"):
        _ = ported.no_such
    with pytest.raises(BadValueError, match="A ported module has no gradients"):
        ported.train()


def test_calls_of_other_forms_and_shapes_are_programs_of_their_own(block, x, session):
    twice, longer = x * 2, torch.cat([x, x])
    expected = [block(x)["sample"], block(twice)["sample"], block(longer)["sample"], block(x, 3.0)["sample"]]
    ported = torchport.port(block, strategy=RULES, mesh=MESH)
    results = [ported(x), ported(x=twice), ported(longer), ported(x, 3.0)]
    assert all(close(ours["sample"], theirs) for ours, theirs in zip(results, expected, strict=True))
    assert len(ported.compiled.programs) == 4  # hooks and decorators see which arguments are keywords


def test_nested_inputs_are_named_by_their_path_and_may_be_left_out_later(block, x, session):
    added, also = torch.ones(8), torch.ones(4, 8)
    whole, plain = block(x, extra={"added": added}, also=also)["sample"], block(x)["sample"]
    inputs = [*INPUTS, {"match": r"extra\.added|also", "spec": "replicate"}]
    ported = torchport.port(block, strategy={**RULES, "inputs": inputs}, mesh=MESH)
    assert close(ported(x, extra={"added": added}, also=also)["sample"], whole)
    assert close(ported(x)["sample"], plain)


def test_a_region_of_autocast_is_part_of_a_call(block, x):
    """Or a program that was compiled outside would be called inside."""
    with torchport.applied(patches=["torch/autocast"]):
        ported = torchport.port(block, strategy=RULES, mesh=MESH)
        outside = ported(x)["sample"]
        with torch.autocast("cuda", torch.bfloat16):
            inside = ported(x)["sample"]
        assert close(ported(x)["sample"], outside)
    assert 1e-4 < ((inside - outside).abs().max() / outside.abs().max()).item() < 0.05


def test_rules_may_be_text_of_yaml(block, x, session):
    expected = block(x)["sample"]
    text = "weights: [{match: '.*', spec: replicate}]\ninputs: [{match: x, spec: [dp]}]\n"
    assert close(torchport.port(block, strategy=text, mesh={"dp": 2})(x)["sample"], expected)


def test_a_mesh_of_jax_is_taken_with_its_devices(block, x, session):
    expected = block(x)["sample"]
    mesh = jax.sharding.Mesh([[jax.devices()[7], jax.devices()[6]]], ("dp", "tp"))
    ported = torchport.port(block, strategy=RULES, mesh=mesh)
    assert dict(ported.compiled.mesh.shape) == {"dp": 1, "sp": 1, "tp": 2}
    assert [device.id for device in ported.compiled.mesh.devices.flat] == [7, 6]
    assert close(ported(x)["sample"], expected)


class Attending(torch.nn.Module):
    """A network with diffusers' names of modules."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Module(), torch.nn.Module()])
        for each in self.blocks:
            each.to_q, each.to_k, each.to_v = (torch.nn.Linear(16, 16) for _ in range(3))
            each.to_out = torch.nn.ModuleList([torch.nn.Linear(16, 16)])

    def forward(self, hidden_states):
        for block in self.blocks:
            q, k, v = (
                f(hidden_states).unflatten(2, (4, 4)).transpose(1, 2) for f in (block.to_q, block.to_k, block.to_v)
            )
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            hidden_states = hidden_states + block.to_out[0](mixed)
        return hidden_states


@pytest.mark.parametrize("strategy", ["tp", "ulysses", "fsdp"])
def test_a_module_that_no_card_knows_takes_a_shared_strategy(session, strategy):
    module, x = Attending().eval(), torch.randn(2, 8, 16)
    expected = module(x).detach()
    ported = torchport.port(module, strategy=strategy, mesh={"dp": 2, "tp" if strategy == "tp" else "sp": 4})
    assert close(ported(x), expected)
    split = [array for array in ported.compiled.weights.values() if not array.sharding.is_fully_replicated]
    assert len(split) == {"tp": 14, "ulysses": 0, "fsdp": 8}[strategy]  # of tp all but the biases of to_out


def test_tied_weights_stay_tied(session, x):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    module = Tied().eval()
    expected = module(x).detach()
    rules = {"weights": [{"match": ".*", "spec": "replicate"}], "inputs": INPUTS}
    assert close(torchport.port(module, strategy=rules, mesh={"dp": 2})(x), expected)


def changed(**changes):
    return {**RULES, **changes}


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        (
            {"strategy": changed(wieghts=[])},
            UnknownKeyError,
            "port(strategy=...) wieghts: Unknown key 'wieghts'. Did you mean 'weights'?",
        ),
        (
            {"strategy": changed(weights=WEIGHTS[:2])},
            UnmatchedError,
            "port(strategy=...) weights: No rule matches 'down.bias' [8]",
        ),
        (
            {"strategy": changed(weights=[*WEIGHTS, {"match": "no", "spec": "replicate"}])},
            DeadRuleError,
            "port(strategy=...) weights[3]: Rule 4, 'no'",
        ),
        (
            {"strategy": changed(weights=[{"match": ".*", "spec": ["dp", "tp"]}])},
            MeshError,
            "port(strategy=...) weights: '.*' has a spec of 2 dims, and 'up.bias' has 1",
        ),
        ({"mesh": {"sp": 2}}, MeshError, "port(mesh=...): sp=2 splits nothing: no rule of Block names it"),
        ({"mesh": {"tp": 3}}, MeshError, "port(strategy=...) weights: tp=3 does not divide dim 0 of 'up.weight'"),
        ({"mesh": {"tp": 16}}, MeshError, "port(mesh=...): The mesh tp=16 takes 16 device(s), and this process"),
        ({"mesh": {"tp": 0}}, MeshError, "port(mesh=...): It takes 0 devices"),
        ({"mesh": {"xp": 2}}, UnknownNameError, "port(mesh=...): There is no axis 'xp'. Known: dp, sp, tp."),
        ({"strategy": "tpp"}, UnknownNameError, "port(strategy=...): There is no shared strategy 'tpp', and no model"),
        ({"strategy": None}, BadValueError, "port(strategy=...): There is none for a mesh of several devices, and no"),
        ({"inputs": INPUTS}, BadValueError, "port(inputs=...): 'strategy' has rules for inputs already"),
    ],
)  # fmt: skip
def test_rules_and_meshes_that_do_not_fit_are_refused(block, session, options, kind, text):
    with pytest.raises(kind, match=f"^{re.escape(text)}"):
        torchport.port(block, **{"strategy": RULES, "mesh": MESH, **options})


def test_inputs_that_do_not_fit_are_refused(block, x, session):
    ported = torchport.port(block, strategy=RULES, mesh=MESH)
    with pytest.raises(UnmatchedError, match=r"No rule matches the input 'also' \[4, 8\] of Block"):
        ported(x, also=x)
    with pytest.raises(MeshError, match=r"dp=2 does not divide dim 0 of 'x' \[3, 8\], an input of Block"):
        ported(x[:3])
    with pytest.raises(BadValueError, match=r"Block: 'scale' is of the type dict_keys, and becomes no constant"):
        ported(x, {}.keys())
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        ported()


def test_a_rule_for_inputs_that_the_first_call_does_not_have_is_refused(block, x, session):
    rules = changed(inputs=[*INPUTS, {"match": "mask", "spec": ["dp"]}])
    with pytest.raises(DeadRuleError, match=r"inputs\[1\]: Rule 2, 'mask', matches none of 1 tensors"):
        torchport.port(block, strategy=rules, mesh=MESH)(x)


class Twice(torch.nn.Module):
    """A block whose one layer has two names, and that shares another one with its neighbours."""

    def __init__(self, shared):
        super().__init__()
        self.first = self.second = torch.nn.Linear(8, 8)
        self.shared = shared

    def forward(self, x):
        return self.shared(self.second(self.first(x)))


@pytest.mark.parametrize("count", [1, 3])
def test_a_layer_may_have_two_names(count, session):
    shared = torch.nn.Linear(8, 8)
    module = torch.nn.Sequential(*(Twice(shared) for _ in range(count))).eval()
    x = torch.randn(2, 8)
    expected = module(x).detach()
    torch.testing.assert_close(torchport.port(module)(x), expected, rtol=1e-5, atol=1e-6)


def test_a_lazy_module_is_refused_before_its_first_call(session):
    with pytest.raises(BadValueError, match=r"'weight' has no shape before the first call\. Call it once"):
        torchport.port(torch.nn.LazyLinear(3).eval())


def test_a_module_that_was_ported_is_used_up_and_so_are_its_parts(session):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2)).eval()
    torchport.port(module)
    for each, name in ((module, "0.weight"), (module[0], "weight")):
        with pytest.raises(BadValueError, match=rf"'{name}' has no values: .*Load the module anew"):
            torchport.port(each)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_part_that_is_torchscript_is_refused(session):
    module = torch.nn.Sequential(torch.jit.trace(torch.nn.Linear(3, 3), torch.ones(2, 3)))
    with pytest.raises(BadValueError, match="A part of the module is TorchScript"):
        torchport.port(module.eval())


def test_a_module_that_is_training_is_refused(block, session):
    with pytest.raises(BadValueError, match=r"training mode, where dropout is random\. Call its eval\(\) first"):
        torchport.port(block.train(), strategy=RULES, mesh=MESH)


def test_without_patches_in_force_it_is_refused(block):
    with pytest.raises(BadValueError, match=r"^port: No patches are in force"):
        torchport.port(block, strategy=RULES, mesh=MESH)


def test_it_says_how_many_operators_are_known_and_under_strict_refuses_the_others(x, session, caplog, monkeypatch):
    known = conformance.state_of
    unknown = "unknown", "the operator was never sampled"
    monkeypatch.setattr(conformance, "state_of", lambda form: unknown if ".neg." in form.operator else known(form))

    class Negated(torch.nn.Module):
        def forward(self, x):
            return x.neg()

    with caplog.at_level("INFO"):
        torchport.port(Negated().eval(), strategy=RULES | {"weights": []}, mesh={"dp": 2})(x)
    assert " unknown (aten.neg.default)" in caplog.text
    accepting = RULES | {"weights": [], "operators": {"aten.neg.default": "A test"}}
    torchport.port(Negated().eval(), strategy=accepting, mesh={"dp": 2}, strict=True)(x)
    with pytest.raises(OperatorError, match="no sample has compared with PyTorch's"):
        torchport.port(Negated().eval(), strategy=RULES | {"weights": []}, mesh={"dp": 2}, strict=True)(x)


def test_it_is_not_compiled_outside_of_its_patches(block, x):
    with torchport.applied():
        ported = torchport.port(block, strategy=RULES, mesh=MESH)
        ported(x)
    with pytest.raises(StaleTraceError):
        ported(torch.cat([x, x]))


class Times(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("one", torch.tensor(1, dtype=torch.int32))

    def forward(self, x, n):
        return functional.dropout(x.abs().clip(1) * self.one * n, training=False)


REPLICATE = {"weights": REPLICATED, "inputs": REPLICATED}


def test_a_call_in_inference_mode_is_a_call(x, session):
    ported = torchport.port(Times().eval(), strategy=REPLICATE)
    for scale in (1, 2):
        with torch.inference_mode():
            assert close(ported(scale * x, 3), Times().eval()(scale * x, 3))
    assert close(ported(x, 3), Times().eval()(x, 3))


def test_numbers_that_are_equal_and_of_other_types_have_programs_of_their_own(x, session):
    ported, whole = torchport.port(Times().eval(), strategy=REPLICATE), (8 * x).int()
    assert [ported(whole, n).dtype for n in (1, 1.0, True)] == [torch.int32, torch.float32, torch.int32]
    assert not ported(x, 0.0).signbit().any() and ported(x, -0.0).signbit().all()


@pytest.fixture
def small(tmp_path, monkeypatch):
    port = SmallPort(tmp_path, monkeypatch)
    port.write("patches/up/p.py", "def doubled(original, self, x):\n    return 2 * original(self, x)\n")
    entry = """\
    - id: up.doubled
      target: up.model:Net.forward
      wrap: p.py:doubled
      why: A test.
      reported: "none: a test"
      until: never
      fits: {up: "*"}
      equivalence: bitwise
    """
    port.write("patches/up/p.yaml", entry)
    port.change("configs/models/small.yaml", "denoise: []", "denoise: [up/p]")
    yield port
    port.forget()


def test_a_cards_strategy_is_named_and_its_network_known_by_its_class(small):
    with torchport.applied("small", paths=(str(small.pack),)) as session:
        from up.model import Net

        net = Net().eval()
        x = torch.randn(8, 4)
        expected = (net.layer(x) * 2).detach()
        ported = torchport.port(net, strategy="whole", mesh={"tp": 8})
        assert close(ported(x), expected) and close(ported(x=x), expected)
        assert session.rows()[-1]["state"] == "used"


def test_without_more_words_it_is_the_cards_first_strategy_on_one_device(small):
    with torchport.applied("small", paths=(str(small.pack),)):
        from up.model import Net

        ported = torchport.port(Net().eval())
        assert (ported(torch.ones(3, 4)).shape, ported.compiled.mesh.size) == ((3, 4), 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"strategy": "hole"}, "port: 'small' has no strategy 'hole'. Did you mean 'whole'? Known: whole."),
        ({"component": "ent"}, "port: The strategy 'whole' of 'small' has no rules for 'ent'."),
        ({"mesh": {"dp": 2}}, "port(mesh=...): dp=2 splits nothing: no rule of net names it. Use the axes tp."),
    ],
)
def test_names_that_a_card_has_not_are_refused(small, options, text):
    with torchport.applied("small", paths=(str(small.pack),)):
        from up.model import Net

        with pytest.raises(TorchportError, match=f"^{re.escape(text)}"):
            torchport.port(Net().eval(), **options)


def test_a_module_of_another_class_is_refused(small, block):
    with torchport.applied("small", paths=(str(small.pack),)):
        import up.model  # noqa: F401

        text = "None of its networks is of that class in the card of 'small'. Name its network with component=: net."
        with pytest.raises(UnknownNameError, match=re.escape(text)):
            torchport.port(block)


def test_under_the_original_it_is_the_module_itself(small):
    with torchport.applied("small", paths=(str(small.pack),), backend="original"):
        from up.model import Net

        net = Net().eval()
        assert torchport.port(net) is net


def test_the_package_imports_neither_torch_nor_jax(root):
    code = "import sys, torchport; print([n for n in ('torch', 'jax', 'yaml', 'pydantic') if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r}); {code}"], capture_output=True, text=True
    )
    assert done.stdout == "[]\n"
    with pytest.raises(AttributeError, match="module 'torchport' has no attribute 'prot'"):
        _ = torchport.prot


def test_an_output_of_any_class_has_tensors_of_the_host(x, session):
    output = dataclasses.make_dataclass("Output", ["sample", "rows"])
    form = dataclasses.make_dataclass("Slots", ["part"], slots=True)

    class Own(torch.nn.Module):
        def forward(self, x):
            return output(form([x * 2, x]), len(x))

    ported = torchport.port(Own().eval(), strategy={"weights": [], "inputs": INPUTS}, mesh={"dp": 2})
    first, second, third = ported(x), ported(x[:2]), ported(x)
    assert torch.equal(first.sample.part[0], 2 * x) and first.sample.part[1] is x and third.sample is not first.sample
    assert (first.rows, second.rows, third.rows) == (len(x), 2, len(x))


def encoder(name):
    """A small network of transformers, as pipelines of diffusers have it for their prompts."""
    import transformers

    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "max_position_embeddings": 64}
    grouped = {**sizes, **heads, "num_key_value_heads": 2}
    t5 = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    rotary = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    configuration = {
        "CLIPTextModel": lambda: transformers.CLIPTextConfig(**sizes, **heads, eos_token_id=2),
        "T5EncoderModel": lambda: transformers.T5Config(**t5, feed_forward_proj="gated-gelu"),
        "UMT5EncoderModel": lambda: transformers.UMT5Config(**t5, feed_forward_proj="gated-gelu"),
        "LlamaModel": lambda: transformers.LlamaConfig(**grouped),
        "Gemma2Model": lambda: transformers.Gemma2Config(**grouped, head_dim=8),
        "Qwen3Model": lambda: transformers.Qwen3Config(**grouped, head_dim=8),
        "Qwen2_5_VLForConditionalGeneration": lambda: transformers.Qwen2_5_VLConfig(
            text_config={**grouped, "rope_parameters": rotary}, vision_config=vision, image_token_id=45
        ),
    }[name]()
    torch.manual_seed(0)
    return getattr(transformers, name)(configuration).eval()


ENCODERS = [
    ("CLIPTextModel", 12),
    ("T5EncoderModel", 14),
    ("UMT5EncoderModel", 14),
    ("LlamaModel", 14),
    ("Gemma2Model", 14),
    ("Qwen3Model", 14),
    ("Qwen2_5_VLForConditionalGeneration", 17),  # three of its vision tower
]
"""The class, and how many of its weights `tp` splits: q, k, v and out, and the feed-forward net, of two blocks."""


@pytest.mark.parametrize(("name", "split"), ENCODERS)
def test_a_text_encoder_of_transformers_computes_what_it_does_in_pytorch(name, split, session):
    network = encoder(name)
    ids, mask = torch.arange(24).reshape(2, 12) % 43 + 3, torch.ones(2, 12, dtype=torch.long)
    mask[0, 7:], mask[1, 10:] = 0, 0
    with torch.no_grad():
        expected = network(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    ported = torchport.port(encoder(name), strategy="tp", mesh=MESH)
    matrices = [each for key, each in ported.compiled.weights.items() if key.endswith("weight") and each.ndim == 2]
    assert sum(not each.sharding.is_fully_replicated for each in matrices) == split
    found = ported(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    assert type(found) is type(expected) and len(found.hidden_states) == len(expected.hidden_states) == 3
    for state, other in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert (state - other)[mask.bool()].abs().max() <= 1e-5 * other.abs().max()


def test_what_is_no_module_is_refused(session):
    with pytest.raises(BadValueError, match=r"^port: It is of the type function, and no torch\.nn\.Module\. Pass a"):
        torchport.port(close, strategy=RULES, mesh=MESH)


class Broken(torch.nn.Module):
    """A network that does one thing to its input, on a line of this file."""

    def __init__(self, act):
        super().__init__()
        self.act, self.weight = act, torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.act(x)


def _refusal(x):
    raise ValueError("the sample size is wrong")


BROKEN = {
    "if": (TracedValueError, lambda x: x if x.sum() > 0 else -x),
    "item": (TracedValueError, lambda x: x * x.max().item()),
    "tolist": (TracedValueError, lambda x: x[0].tolist()),
    "nonzero": (TracedValueError, lambda x: x.nonzero()),
    "boolean index": (TracedValueError, lambda x: x[x[:, 0] > 0]),
    "numpy": (TracedValueError, lambda x: x.numpy()),
    "random": (HostTensorError, lambda x: x + torch.randn_like(x)),
    "operator": (NoLoweringError, lambda x: torch.special.airy_ai(x)),
    "cuda": (CudaError, lambda x: x.cuda()),
    "torchax": (ForeignError, lambda x: torch.linalg.matrix_exp((x.T @ x).bfloat16())),
    "shape": (ForeignError, lambda x: x.reshape(3, 3)),
    "own": (ForeignError, _refusal),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_a_module_raises_while_it_is_traced_is_an_error_with_its_line(name, x, session):
    kind, act = BROKEN[name]
    whole = torch.nn.Sequential(Broken(act)).eval()  # its class is PyTorch's, and the code at fault is not
    ported = torchport.port(whole, strategy={"weights": REPLICATED, "inputs": REPLICATED})
    with pytest.raises(kind) as caught:
        ported(x)
    line = act.__code__.co_firstlineno + (act is _refusal)
    assert type(caught.value) is kind and f"test_port.py:{line}: " in str(caught.value)


def test_the_line_is_the_callers_where_no_code_of_the_module_runs(session):
    ported = torchport.port(torch.nn.Linear(8, 2).eval(), strategy={"weights": REPLICATED, "inputs": REPLICATED})
    with pytest.raises(ForeignError) as caught:
        ported(torch.ones(4, 7))
    assert re.search(r"test_port\.py:\d+: test_the_line_is_the_callers\S* raises \w+Error: ", str(caught.value))
    assert "It is your own code: mend it there" in str(caught.value)
    with pytest.raises(BadValueError, match=r"Linear: 'input' has the layout torch\.sparse_coo\. Pass it as to_dense"):
        ported(torch.ones(4, 8).to_sparse())
    with pytest.raises(TypeError, match="missing a required argument: 'input'"):  # as PyTorch's own
        ported()


def test_the_code_of_a_script_is_named_as_that_of_a_package(tmp_path, session):
    file = tmp_path / "script.py"
    file.write_text(
        "import torch, torchport\n"
        "class Net(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x * float(x.sum())\n"
        "torchport.port(Net().eval(), strategy={'weights': [], 'inputs': REPLICATED})(torch.ones(2))\n"
    )
    with pytest.raises(TracedValueError, match=r"script\.py:4: Net\.forward asks for the value of a tensor.* your own"):
        runpy.run_path(str(file), {"REPLICATED": REPLICATED}, "__main__")
    file.write_text(file.read_text().replace("Net()", "torch.nn.Softmax(7)"))
    with pytest.raises(ForeignError, match=r"script\.py:5: The script raises ValueError: "):
        runpy.run_path(str(file), {"REPLICATED": REPLICATED}, "__main__")


AFTERWARDS = """
import warnings
import torch, torchport
from torch.nn.attention.flex_attention import flex_attention

warnings.simplefilter("error")
warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
warnings.filterwarnings("ignore", "'pin_memory' argument is set as true but no accelerator is found")

def check():
    torch._dynamo.reset()
    assert not torch.accelerator.is_available() and torch.accelerator.device_count() == 0
    assert torch.compile(lambda x: torch.relu(x) + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]
    assert flex_attention(*[torch.ones(1, 1, 16, 16)] * 3).shape == (1, 1, 16, 16)
    assert next(iter(torch.utils.data.DataLoader(torch.arange(4), pin_memory=True))).tolist() == [0]
    assert torch.nn.DataParallel(torch.nn.Identity())(torch.ones(2)).tolist() == [1, 1]
    with torch.random.fork_rng():
        torch.rand(1)

with torchport.applied():
    torchport.port(torch.nn.Linear(3, 3).eval())(torch.ones(1, 3))
    check()
check()
session = torchport.applied()
session.__enter__()  # Python ends inside
"""


def test_pytorch_works_on_tensors_of_the_host_while_a_port_lives_and_after_it(root):
    """In a process of its own: what torchax registers with PyTorch cannot be taken back."""
    code = f"import sys; sys.path.insert(0, {str(root)!r})\n{AFTERWARDS}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "Exception" not in done.stderr, done.stderr
