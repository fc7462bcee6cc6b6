"""Programs on the mesh: equal to the eager module, their inputs placed by rule, operators registered and taken out."""

import dataclasses
import re

import jax
import pytest
import torch
from fakes.networks import Halves
from jax.sharding import PartitionSpec

from torchport import compile, engine, patch, shard
from torchport.config import xla_flags
from torchport.config.card import Stack
from torchport.config.strategy import Rule, WeightRule
from torchport.errors import DeadRuleError, MeshError, NotCalledError, StaleTraceError, UnmatchedError
from torchport.patch.ledger import Record
from torchport.plan import aot
from torchport.task import Request, accept

WEIGHTS = [
    Rule(match=r"up\.(weight|bias)", spec=["tp"]),
    Rule(match=r"down\.weight", spec=[None, "tp"]),
    Rule(match=r"down\.bias|shift", spec="replicate"),
]
INPUTS = [Rule(match="x|mask", spec=["dp"])]


@pytest.fixture(scope="module", autouse=True)
def patched(pack):
    """torchax beside this torch needs its patches, as everything else does."""
    with patch.applied(patch.read(pack.patches, ["torchax"])):
        yield


@pytest.fixture
def module():
    """A network with drawn weights."""
    torch.manual_seed(0)
    return Halves().eval().requires_grad_(False)


@pytest.fixture
def program(module, mesh8):
    """The same network as programs on dp=2 x tp=4; its own weights are gone."""
    return compiled(module, mesh8)


def compiled(module, mesh, rules=INPUTS, trace=None):
    """Places a copy of a module's weights and leaves the module without storage."""
    tensors = {name: t.clone() for name, t in (*module.named_parameters(), *module.named_buffers())}
    sizes = dict(mesh.shape)
    placed = shard.match(WEIGHTS, shard.named_shapes(tensors), sizes, "card.yaml:1")
    bare = Halves().to("meta").eval().requires_grad_(False)
    arrays = shard.place(tensors.items(), placed, mesh)
    return compile.Compiled(compile.Network(bare, rules, "halves", "card.yaml:9", "highest"), arrays, mesh, trace=trace)


def test_a_program_computes_what_the_eager_module_does(module, program):
    x, mask = torch.randn(4, 8), torch.tensor([[True], [False], [True], [True]])
    for inputs in ({"x": x}, {"x": x, "mask": mask}, {"x": x, "scale": 3.0, "return_dict": True}):
        torch.testing.assert_close(program(**inputs), compile.Eager(module)(**inputs), rtol=1e-5, atol=1e-5)
    assert program(x=x).shape == (4, 8) and program(x=x).dtype == torch.float32


def test_the_eager_module_takes_conditions_one_by_one_and_a_program_as_one_batch(module, program):
    assert not compile.Eager(module).batches and program.batches
    x = torch.randn(2, 8)
    assert compile.Eager(module).place(x=x)["x"] is x


def test_one_program_is_made_for_each_set_of_shapes_and_static_arguments(program):
    for rows in (2, 2, 4, 2):
        program(x=torch.randn(rows, 8))
    assert len(program.programs) == 2 and program.seconds > 0
    program(x=torch.randn(2, 8), scale=2.0)
    program(x=torch.randn(2, 8), scale=2.0)
    assert len(program.programs) == 3


def test_the_compilers_options_reach_the_compiler(program, monkeypatch):
    monkeypatch.setattr(xla_flags, "compiler_options", lambda chip, written: {"xla_no_such_flag": "1"})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_flag"):
        program(x=torch.randn(2, 8))


def test_inputs_that_were_placed_once_are_passed_as_they_are(program, module):
    x = torch.randn(4, 8)
    placed = program.place(x=x)
    assert isinstance(placed["x"], jax.Array) and placed["x"].sharding.spec == PartitionSpec("dp")
    torch.testing.assert_close(program(**placed), compile.Eager(module)(x=x), rtol=1e-5, atol=1e-5)
    program(x=x)
    assert len(program.programs) == 1


def test_weights_are_arguments_of_the_program_and_none_a_constant(program):
    """The module it was traced from has no storage; the weights' shapes are parameters of the program."""
    x = torch.randn(2, 8)
    before = program(x=x)
    text = program.lowered(program.place(x=x), ()).as_text()
    (main,) = [line for line in text.splitlines() if "func.func public @main" in line]
    assert main.count("tensor<16x8xf32>") == main.count("tensor<8x16xf32>") == 1
    program.weights["shift"] = program.weights["shift"] + 1
    torch.testing.assert_close(program(x=x), before + 1, rtol=1e-5, atol=1e-5)
    assert len(program.programs) == 1


@pytest.mark.usefixtures("own_jax_cache")
def test_a_later_run_counts_the_calls_of_the_programs_that_it_takes_over(program, pack):
    entry = next(entry for entry in patch.read(pack.patches, ["torchax"]) if entry.counted)
    record = Record(entry.model_copy(update={"must_be_called": ["denoise"]}))

    def how(module, **inputs):
        record.calls.count += 1
        return module(**inputs)

    ledger, x, program.bound.how = patch.Ledger([record], "denoise"), torch.ones(2, 8), how
    loaded = ledger.trace()
    program.start_run(ledger)
    for scale in (1.0, 2.0, 2.0):
        program(x=x, scale=scale)
    assert [row["calls"] for row in ledger.rows()] == [2]
    assert program.rows() == [{"jax_cache": False, "operators": {"same": 4}}] * 2
    later = ledger.of_run(loaded)
    program.start_run(later)
    with pytest.raises(NotCalledError):
        later.check_called()
    for scale in (1.0, 1.0, 3.0):  # one program of the earlier run, and one that is traced now
        program(x=x, scale=scale)
    later.check_called()
    assert [row["calls"] for row in later.rows()] == [2] and len(program.rows()) == 2


def test_an_input_that_no_rule_matches_is_refused(module, mesh8):
    program = compiled(module, mesh8, [Rule(match="x", spec=["dp"])])
    with pytest.raises(UnmatchedError) as caught:
        program(x=torch.randn(2, 8), mask=torch.ones(2, 1))
    assert str(caught.value) == (
        "card.yaml:9: No rule matches the input 'mask' [2, 1] of halves. "
        "Add a rule for it, with `spec: replicate` if every device shall have it whole."
    )


def test_a_rule_for_inputs_that_matches_none_is_refused_when_the_program_is_traced(module, mesh8):
    program = compiled(module, mesh8, [Rule(match="xs", spec=["dp"]), Rule(match="x|mask", spec=["dp"])])
    places = ["card.yaml:10", "card.yaml:11"]
    program.network = dataclasses.replace(program.network, places=places)
    with pytest.raises(DeadRuleError) as caught:
        program(x=torch.randn(2, 8))
    assert str(caught.value) == (
        "card.yaml:10: Rule 1, 'xs', matches none of 1 tensors. Remove it or mend it. Did you mean 'x'? Known: x."
    )


def test_a_batch_that_dp_does_not_divide_is_refused(program):
    with pytest.raises(MeshError) as caught:
        program(x=torch.randn(3, 8))
    assert str(caught.value) == (
        "card.yaml:9: dp=2 does not divide dim 0 of 'x' [3, 8], an input of halves. Choose dp among the divisors of 3."
    )


def test_the_matmul_precision_is_in_the_program(program):
    text = program.lowered(program.place(x=torch.randn(2, 8)), ()).as_text()
    assert "precision = [HIGHEST, HIGHEST]" in text
    program.precision = "default"
    assert "HIGHEST" not in program.lowered(program.place(x=torch.randn(2, 8)), ()).as_text()


class Blocks(torch.nn.Module):
    """Blocks alike, each with a matrix, and a matrix before them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(16, 16, bias=False)
        self.blocks = torch.nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Block(torch.nn.Module):
    """A matrix and a nonlinearity."""

    def __init__(self):
        super().__init__()
        self.mix = torch.nn.Linear(16, 16, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.mix(x))


@pytest.mark.parametrize(
    ("stacks", "gathers"),
    [({"blocks": Stack(carries=["x"])}, 2), ({"blocks": Stack(carries=["x"], first=1)}, 3), ({}, 4)],
    ids=["stacked", "all but the first", "unstacked"],
)
def test_weights_are_gathered_where_they_are_used_and_stacked_ones_a_block_at_a_time(stacks, gathers):
    mesh, x = shard.make_mesh({"dp": 2, "sp": 4}, jax.devices()), torch.randn(2, 8, 16)
    rules = [WeightRule(match=".*", spec=[["dp", "sp"]], gather=True)]
    module = Blocks().eval().requires_grad_(False)
    expected = module(x)
    tensors = {name: tensor.clone() for name, tensor in module.named_parameters()}
    found = shard.match(rules, shard.named_shapes(tensors), dict(mesh.shape), "card.yaml:1")
    arrays = shard.place(tensors.items(), found, mesh)
    inputs = [Rule(match="x", spec=["dp", "sp"])]
    gathered = shard.gathered(found)
    network = compile.Network(
        module.to("meta"), inputs, "blocks", "card.yaml:9", "highest", stacks=stacks, gathered=gathered
    )
    program = compile.Compiled(network, arrays, mesh)
    torch.testing.assert_close(program(x=x), expected, rtol=1e-5, atol=1e-5)
    text = program.lowered(program.place(x=x), ()).compile().as_text()
    shapes = re.findall(r"= \(?(f32\[[\d,]+\])\S* all-gather", text)
    assert set(shapes) <= {"f32[16,16]", "f32[1,16,16]"} and len(shapes) == gathers, "never all blocks'"
    assert "all-reduce" not in text and "all-to-all" not in text


@pytest.mark.parametrize("precision", ["highest", "default"])
def test_every_product_of_the_decoder_has_its_components_precision(pack, precision):
    """Convolutions too: one setting covers both, and none asks for another by itself."""
    found = accept(Request("hunyuan", "configs/demo.yaml", stage="decode"))
    [stage] = found.stages
    latents = {"hidden_states": torch.zeros(1, 16, 2, 4, 8)}
    with aot.outlined(found, stage, jax.devices()) as outlined:
        program = outlined.program
        program.precision = precision
        text = program.lowered(program.shapes(latents), ()).as_text()
    products = re.findall(r"stablehlo\.(dot_general|convolution)\b(.*)", text)
    attention = [line for kind, line in products if kind == "dot_general"]
    assert len(products) > 30 and len(attention) == 2
    highest = [line for _, line in products if line.count("HIGHEST") == 2]
    assert len(highest) == (len(products) if precision == "highest" else 0)


def test_tracing_asks_whether_the_patches_are_those_of_the_first_trace(module, mesh8):
    class Stale:
        def check(self):
            raise StaleTraceError("halves", "It was traced under other patches", "Compile it again")

    with pytest.raises(StaleTraceError, match="halves: It was traced under other patches"):
        compiled(module, mesh8, trace=Stale())(x=torch.randn(2, 8))


def test_an_operator_is_registered_for_the_length_of_a_with_and_then_as_before(program):
    import torchax

    def always_two(x, *args, **kwargs):
        return torch.full_like(x, 2.0)

    operators = torchax.default_env()._ops
    before = dict(operators)
    x = torch.randn(2, 8)
    plain = program(x=x)
    with engine.operators({"torch.ops.aten:relu": always_two}):
        assert operators != before
        program.programs.clear()
        assert not torch.allclose(program(x=x), plain)
    assert operators == before
    program.programs.clear()
    assert torch.equal(program(x=x), plain)


def test_operators_are_taken_out_after_an_error_too():
    import torchax

    before = dict(torchax.default_env()._ops)
    with (
        pytest.raises(KeyError),
        engine.operators({"torch.nn.functional:gelu": len, "torch.ops.aten:add.Tensor": len}),
    ):
        raise KeyError
    assert torchax.default_env()._ops == before


def test_without_operators_torchax_is_not_asked(monkeypatch):
    monkeypatch.setattr("torchax.default_env", None)
    with engine.operators({}):
        pass
