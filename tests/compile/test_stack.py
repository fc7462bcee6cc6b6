"""Repeated blocks as one under a scan: the same numbers, and what cannot be stacked is refused by name."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy
import pytest
import torch

from torchport import compile, patch, shard
from torchport.compile import stack
from torchport.config import xla_flags
from torchport.config.card import Stack
from torchport.config.strategy import Rule
from torchport.errors import StackError

pytestmark = pytest.mark.usefixtures("plainly_compiled")


class Block(torch.nn.Module):
    """Two streams, of which each moves the other; `known` sets it apart."""

    def __init__(self, size=6, known=None):
        super().__init__()
        self.mix = torch.nn.Linear(size, size)
        self.norm = torch.nn.LayerNorm(size)
        self.register_buffer("shift", torch.randn(size))
        if known is not None:
            self.known = known

    def forward(self, x, y, factor, tables=None, *, flag=True):
        moved = torch.tanh(self.mix(self.norm(x))) * factor + (tables[0] if tables else 0)
        return x + moved, (y + moved.mean(1, keepdim=True) + self.shift if flag else y)


class Keeper(Block):
    """Keeps something of every call."""

    def forward(self, x, y, factor, tables=None, *, flag=True):
        self.seen = x
        return super().forward(x, y, factor, tables, flag=flag)


class Open(Block):
    """Takes all but its first arguments as they come."""

    def forward(self, x, y, factor, **options):
        return super().forward(x, y, factor, **options)


class Network(torch.nn.Module):
    """Upstream's own loop over blocks."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, x, y, factor):
        for block in self.blocks:
            x, y = block(x, y, factor, tables=(factor * 0.1, None), flag=True)
        return (x + y,)


ENDS = [(0, 0), (0, 1), (0, 3), (1, 0), (2, 1), (1, 2)]
CARRIES = Stack(carries=["x", "y"])
RULES = [Rule(match=r"module\..*|blocks\..*", spec="replicate")]
INPUTS = [Rule(match=".*", spec="replicate")]


@pytest.fixture(scope="module", autouse=True)
def patched(pack):
    """torchax beside this torch needs its patches, as everything else does."""
    with patch.applied(patch.read(pack.patches, ["torchax"])):
        yield


def network(count=4, kind=Block, **options):
    torch.manual_seed(3)
    return Network([kind(**options) for _ in range(count)]).eval()


def compiled(module, stacks):
    mesh = shard.make_mesh({}, jax.devices()[:1])
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    rules = dict.fromkeys(tensors, RULES[0])
    weights = shard.place(((name, t.detach()) for name, t in tensors.items()), rules, mesh)
    bare = compile.Network(module.to("meta"), INPUTS, "network", "card.yaml:1", "highest", stacks=stacks)
    return compile.Compiled(bare, weights, mesh)


def inputs():
    torch.manual_seed(5)
    return {"x": torch.randn(2, 5, 6), "y": torch.randn(2, 1, 6), "factor": torch.rand(2, 1, 1)}


def refusal(call):
    with pytest.raises(StackError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(("first", "last", "kind"), [*((*ends, Block) for ends in ENDS), (1, 1, Open)])
def test_stacked_blocks_compute_what_the_loop_computes(first, last, kind):
    module = network(kind=kind)
    with torch.no_grad():
        wanted = module(**inputs())[0]
    program = compiled(module, {"blocks": Stack(carries=["x", "y"], first=first, last=last)})
    assert len(program.network.module.blocks._modules) == first + 1 + last
    assert program.weights[f"blocks.{first}.block.mix.weight"].shape == (4 - first - last, 6, 6)
    found = program(**inputs())
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-6


def test_the_program_holds_one_block_and_its_weights_have_a_first_dim_of_blocks():
    program = compiled(network(7), {"blocks": CARRIES})
    assert program.weights["blocks.0.block.mix.weight"].shape == (7, 6, 6)
    arrays = program.place(**inputs())
    text = program.lowered(arrays, ()).as_text()
    assert text.count("stablehlo.while") == 1 and text.count("stablehlo.dot_general") == 1
    apart = compiled(network(7), {}).lowered(arrays, ()).as_text()
    assert apart.count("stablehlo.while") == 0 and apart.count("stablehlo.dot_general") == 7


def test_the_compilers_options_depend_on_the_largest_product_of_a_block_stacked_or_not(monkeypatch):
    written = []
    monkeypatch.setattr(xla_flags, "compiler_options", lambda chip, size: written.append(size) or {})
    for stacks in ({"blocks": CARRIES}, {}):
        program = compiled(network(7), stacks)
        program.lowered(program.place(**inputs()), ())
    [largest] = set(written)
    assert largest == inputs()["x"].numel() * 4 // program.mesh.size


def test_blocks_are_stacked_in_their_order_whatever_the_order_of_names():
    names = stack.names(
        [f"blocks.{n}.w" for n in ("10", "2", "0", "1", *map(str, range(3, 10)))], {"blocks": CARRIES}, {"blocks": 11}
    )
    assert names == {"blocks.0.block.w": [f"blocks.{n}.w" for n in range(11)]}
    apart = stack.names(["blocks.0.w", "blocks.1.w", "blocks.2.w", "other.3.w"], {"blocks": CARRIES}, {"blocks": 2})
    assert apart == {
        "blocks.0.block.w": ["blocks.0.w", "blocks.1.w"],
        "blocks.1.w": ["blocks.2.w"],
        "other.3.w": ["other.3.w"],
    }


def test_blocks_before_and_after_the_stacked_ones_keep_their_order():
    keys = [f"blocks.{n}.w" for n in (3, 0, 4, 2, 1)]
    apart = stack.names(keys, {"blocks": Stack(carries=["x"], first=1, last=2)}, {"blocks": 2})
    assert apart == {
        "blocks.2.w": ["blocks.3.w"],
        "blocks.0.w": ["blocks.0.w"],
        "blocks.3.w": ["blocks.4.w"],
        "blocks.1.block.w": ["blocks.1.w", "blocks.2.w"],
    }


def test_shapes_alone_are_stacked_with_their_placement():
    mesh = shard.make_mesh({"tp": 2}, jax.devices()[:2])
    where = shard.sharding(Rule(match="x", spec=["tp"]), mesh)
    arrays = {f"blocks.{n}.w": jax.ShapeDtypeStruct((4, 3), jnp.bfloat16, sharding=where) for n in range(3)}
    made = stack.weights(arrays, {"blocks": CARRIES}, {"blocks": 3})["blocks.0.block.w"]
    assert made.shape == (3, 4, 3) and tuple(made.sharding.spec) == (None, "tp") and not arrays


def test_weights_that_are_called_like_stacked_ones_are_left_alone():
    mesh = shard.make_mesh({}, jax.devices()[:1])
    array = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=shard.sharding(RULES[0], mesh))
    name = "up.0.block.1.weight"
    assert stack.weights({name: array}, {}, {}) == {name: array}
    made = stack.weights({name: array, "blocks.0.w": array}, {"blocks": CARRIES}, {"blocks": 1})
    assert made[name].shape == (4,) and made["blocks.0.block.w"].shape == (1, 4)


def test_a_block_that_knows_its_index_is_refused_by_name():
    module = Network([Block(known=n) for n in range(3)])
    text = refusal(lambda: stack.stack(module, {"blocks": CARRIES}, lambda name: "card.yaml:7"))
    assert text == (
        "card.yaml:7: 'blocks.1' differs from the first block's in 'known', 0 there and 1 here. "
        "Only weights may differ: leave the blocks that know their place apart, or unstacked."
    )


def test_blocks_of_which_one_has_a_method_in_place_of_its_classs_are_refused():
    module, mix = network(3), torch.nn.functional.silu
    module.blocks[1].mix.forward = mix
    text = refusal(lambda: stack.stack(module, {"blocks": CARRIES}, lambda name: "card.yaml:7"))
    assert text.startswith("card.yaml:7: 'blocks.1.mix' differs from the first block's in 'forward', None there and ")
    for block in module.blocks:
        block.mix.forward = mix
    assert stack.stack(module, {"blocks": CARRIES}, str) == {"blocks": 3}


def test_blocks_of_other_shapes_or_other_modules_are_refused():
    module = network(3)
    module.blocks[2].mix = torch.nn.Linear(6, 6, bias=False)
    text = refusal(lambda: stack.stack(module, {"blocks": CARRIES}, str))
    assert text.startswith("blocks: 'blocks.2.mix' differs from the first block's in its weights")
    module = network(3)
    module.blocks[1].norm = torch.nn.Identity()
    assert "'blocks.1' has other modules than the first: 'norm'" in refusal(
        lambda: stack.stack(module, {"blocks": CARRIES}, str)
    )


def test_a_list_that_is_not_there_and_one_that_is_too_short_are_refused():
    text = refusal(lambda: stack.stack(network(2), {"block": CARRIES}, lambda name: "card.yaml:7"))
    assert text == "card.yaml:7: The network has no list of blocks 'block'. Did you mean 'blocks'? Known: blocks."
    whole = Stack(carries=["x"], first=1, last=1)
    assert "'blocks' has 2 blocks, and 2 stay apart" in refusal(lambda: stack.stack(network(2), {"blocks": whole}, str))


def test_a_block_that_keeps_something_between_calls_is_refused_by_name():
    program = compiled(network(3, Keeper), {"blocks": CARRIES})
    text = refusal(lambda: program(**inputs()))
    assert "A block of 'blocks' changes 'seen' of a Keeper when it is called" in text and "stacked=false" in text


def test_carries_that_are_not_what_a_block_returns_are_refused():
    program = compiled(network(3), {"blocks": Stack(carries=["x"])})
    assert "a block of 'blocks' returned" in refusal(lambda: program(**inputs())) and "under 'carries'" in refusal(
        lambda: program(**inputs())
    )
    program = compiled(network(3), {"blocks": Stack(carries=["x", "why"])})
    assert "'why' is no argument with which 'blocks' is called" in refusal(lambda: program(**inputs()))


class WideningBlock(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size
        self.gain = torch.nn.Parameter(torch.rand(6).bfloat16())

    def forward(self, x):
        x = (
            x
            if self.size is None or x.shape[-1] == self.size
            else torch.cat([x, x[..., : self.size - x.shape[-1]]], -1)
        )
        return x.float() + self.gain[:1] * torch.tanh(x)


class Widening(torch.nn.Module):
    """Blocks of half precision whose stream is float32, or of another size, once the first has added to it."""

    def __init__(self, size=None):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = torch.nn.ModuleList([WideningBlock(size) for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("size", "shape", "remedy"),
    [
        (None, "[2, 6]", "cast the carry before the blocks."),
        (8, "[2, 8]", "name the arguments that its outputs become, in their order, under 'carries'."),
    ],
)
def test_a_carry_that_the_first_block_changes_is_named_and_that_block_can_be_left_apart(size, shape, remedy):
    x = torch.linspace(-1, 1, 12).reshape(2, 6).bfloat16()
    with torch.no_grad():
        wanted = Widening(size)(x)
    program = compiled(Widening(size).requires_grad_(False), {"blocks": Stack(carries=["x"])})
    assert refusal(lambda: program(x=x)) == (
        f"stacks.blocks: 'blocks.0', the first stacked block, takes the carry 'x' as bfloat16 [2, 6] and returns it "
        f"as float32 {shape}. Leave this block apart with `first: 1`, or {remedy}"
    )
    program = compiled(Widening(size).requires_grad_(False), {"blocks": Stack(carries=["x"], first=1)})
    made = program(x=x)
    assert made.dtype == torch.float32 and made.shape == wanted.shape
    assert float((made - wanted).abs().max() / wanted.abs().max()) < 1e-2


def test_a_block_of_one_output_is_called_as_it_was():
    class One(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = torch.nn.Linear(6, 6)

        def forward(self, x):
            return torch.tanh(self.mix(x))

    class Loop(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.blocks = torch.nn.ModuleList([One() for _ in range(3)])

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    module, x = Loop(), torch.randn(2, 6)
    with torch.no_grad():
        wanted = module(x)
    found = compiled(module, {"blocks": Stack(carries=["x"])})(x=x)
    assert numpy.allclose(found, wanted, atol=1e-6)


class Numbered(Network):
    """It takes its blocks out of their list by number."""

    def __init__(self, blocks, order):
        super().__init__(blocks)
        self.order = order

    def forward(self, x, y, factor):
        for block in [self.blocks[number] for number in self.order] if self.order else self.blocks[: len(self.blocks)]:
            x, y = block(x, y, factor, tables=(factor * 0.1, None), flag=True)
        return (x + y,)


@pytest.mark.parametrize("order", [(), (0, 1, 2), (0, 1, -1)])
def test_blocks_may_be_taken_out_of_their_list_by_number(order):
    module = Numbered([Block() for _ in range(3)], order).eval()
    with torch.no_grad():
        wanted = module(**inputs())[0]
    program = compiled(module, {"blocks": CARRIES})
    assert float((program(**inputs()) - wanted).abs().max() / wanted.abs().max()) < 1e-6


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ((1, 0, 2), "block 1 of 'blocks' out of order"),
        ((0, 2), "calls 2 of the 3 stacked blocks"),
        ((0, 0, 2), "block 0 of 'blocks' out of order"),
    ],
)
def test_blocks_out_of_order_are_refused(order, words):
    program = compiled(Numbered([Block() for _ in range(3)], order).eval(), {"blocks": CARRIES})
    text = refusal(lambda: program(**inputs()))
    assert words in text and "--set stacked=false" in text


class Guided(Network):
    """Its loop calls some blocks with other arguments, as skipped blocks in guidance, or changes what they return."""

    def __init__(self, blocks, change):
        super().__init__(blocks)
        self.change = change

    def forward(self, x, y, factor):
        for number, block in enumerate(self.blocks):
            is_it = number == 2
            if self.change == "break" and is_it:
                break
            if self.change == "skip" and is_it:
                continue
            tables = None if self.change == "flag" and is_it else (factor * number, None)
            x, y = block(x, y, factor, tables=tables, flag=not (self.change == "flag" and is_it))
            if self.change == "residual":
                x = x + number
            if self.change == "in place" and is_it:
                x += 1
        return (x + y,)


@pytest.mark.parametrize(("first", "last"), [(0, 0), (1, 1)])
def test_blocks_that_the_loop_calls_with_other_arguments_have_these(first, last):
    for change, loops in (("", 1), ("flag", 3 if first == 0 else 2)):
        torch.manual_seed(3)
        module = Guided([Block() for _ in range(5)], change).eval()
        with torch.no_grad():
            wanted = module(**inputs())[0]
        program = compiled(module, {"blocks": Stack(carries=["x", "y"], first=first, last=last)})
        assert float((program(**inputs()) - wanted).abs().max() / wanted.abs().max()) < 1e-6
        text = program.lowered(program.place(**inputs()), ()).as_text()
        assert text.count("stablehlo.while") == loops + (change == "flag" and first == 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("break", "The network computes with what a block of 'blocks' returned"),
        ("skip", "The network calls 3 of the 4 stacked blocks of 'blocks'"),
        ("residual", "The network computes with what a block of 'blocks' returned"),
        ("in place", "The network computes with what a block of 'blocks' returned"),
    ],
)
def test_a_loop_that_does_more_than_to_call_the_stacked_blocks_in_order_is_refused(change, words):
    program = compiled(Guided([Block() for _ in range(4)], change).eval(), {"blocks": CARRIES})
    text = refusal(lambda: program(**inputs()))
    assert words in text and "--set stacked=false" in text
    assert words in refusal(lambda: program(**inputs()))  # again: nothing is left of the first call


class Written(Network):
    """It changes what it has called its blocks with, before the last of them is called."""

    def __init__(self, blocks, change):
        super().__init__(blocks)
        self.change = change

    def forward(self, x, y, factor):
        table, options = factor * 1.0, {"flag": True}
        for number, block in enumerate(self.blocks):
            if self.change == "dict":
                options["flag"] = number != 1
            x, y = block(x, x if self.change == "other" else y, table, **options)
            if self.change == "tensor":
                table += 1
            if self.change == "view":
                table[:1].add_(1)
        return (y,) if self.change == "kept" and number else (x + y,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("dict", ""),
        ("tensor", "The network writes to an argument of 'blocks.0' after that call"),
        ("view", "The network writes to an argument of 'blocks.0' after that call"),
        ("other", "Block 1 of 'blocks' gets a 'y' that is not what the block before returned"),
    ],
)
def test_what_changes_between_the_calls_of_blocks_is_as_it_was_or_refused(change, words):
    module = Written([Block() for _ in range(3)], change).eval()
    with torch.no_grad():
        wanted = module(**inputs())[0]
    program = compiled(module, {"blocks": CARRIES})
    if words:
        assert words in refusal(lambda: program(**inputs()))
    else:
        assert float((program(**inputs()) - wanted).abs().max() / wanted.abs().max()) < 1e-6


class Kept(Network):
    """It returns what its first block returned."""

    def forward(self, x, y, factor):
        kept = []
        for block in self.blocks:
            x, y = block(x, y, factor)
            kept.append(x)
        return (kept[0],)


class Asking(Network):
    """It asks each block for something before it calls it."""

    def __init__(self, blocks, ask):
        super().__init__(blocks)
        self.ask = ask

    def forward(self, x, y, factor):
        for block in self.blocks:
            factor = factor * (self.ask(block) or 1)
            x, y = block(x, y, factor)
        return (x + y,)


def test_blocks_may_be_asked_for_what_they_agree_in_and_for_nothing_else():
    def made(ask):
        torch.manual_seed(3)
        blocks = [Block() for _ in range(3)]
        for block in blocks:
            block.scale = 0.5
        return Asking(blocks, ask).eval()

    for ask in (lambda block: block.scale, lambda block: 3 if isinstance(block, Block) else 5):
        with torch.no_grad():
            wanted = made(ask)(**inputs())[0]
        found = compiled(made(ask), {"blocks": CARRIES})(**inputs())
        assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-6
    for ask, words in (
        (lambda block: block.mix.weight.mean(), "The network takes 'mix' of a block of 'blocks'"),
        (lambda block: setattr(block, "scale", 2), "The network sets 'scale' of a block of 'blocks'"),
    ):
        assert words in refusal(lambda ask=ask: compiled(made(ask), {"blocks": CARRIES})(**inputs()))
    kept = Kept([Block() for _ in range(3)]).eval()
    assert "computes with what a block" in refusal(lambda: compiled(kept, {"blocks": CARRIES})(**inputs()))


class Aliased(torch.nn.Module):
    """A block that writes to its carry, and returns a tuple of one."""

    def __init__(self):
        super().__init__()
        self.mix = torch.nn.Linear(6, 6)

    def forward(self, x, before=None):
        x += self.mix(x) if before is None else before
        return (x,)


class AliasedNetwork(Network):
    def forward(self, x, y, factor):
        first = x = x * 1.0
        for block in self.blocks:
            out = block(x, first) if len(self.blocks) > 1 else block(x)
            x = out[0] if isinstance(out, tuple) else out
        return (x,)


def test_a_carry_that_is_another_arguments_memory_and_other_outputs_are_refused():
    network = AliasedNetwork([Aliased() for _ in range(3)]).eval()
    text = refusal(lambda: compiled(network, {"blocks": Stack(carries=["x"])})(**inputs()))
    assert "A block of 'blocks' writes to 'x', another argument's memory" in text
    single = AliasedNetwork([Aliased()]).eval()
    with torch.no_grad():
        wanted = single(**inputs())[0]
    found = compiled(single, {"blocks": Stack(carries=["x"])})(**inputs())
    assert float((found - wanted).abs().max()) < 1e-6  # the tuple of one is upstream's
    network = Network([Block() for _ in range(2)])
    network.blocks[1].norm.forward = lambda x: {"x": x}
    assert "differs from the first block's" in refusal(lambda: stack.stack(network, {"blocks": CARRIES}, str))
    hooked = Network([Block() for _ in range(2)])
    hooked.blocks[1].register_forward_hook(lambda *_: None)
    assert "'forward hooks', 0 there and 1 here" in refusal(lambda: stack.stack(hooked, {"blocks": CARRIES}, str))


class Acting(torch.nn.Module):
    """A block that does one thing, with whatever it is called with."""

    def __init__(self, act):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.rand(3))
        self.act = act
        self.kept = {}

    def forward(self, x, *given):
        return self.act(self, x * self.gain, *given)


class Loop(torch.nn.Module):
    """It makes something, calls its blocks with it, and changes it after each call."""

    def __init__(self, act, make, change):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = torch.nn.ModuleList([Acting(act) for _ in range(3)])
        self.make, self.change = make, change

    def forward(self, x):
        given = self.make(self, x)
        for number, block in enumerate(self.blocks):
            x = block(x, *given)
            self.change(number, *given)
        return (x,)


COUNTS = {"n": 1}
"""A module's global, which blocks and loops change."""


def nothing(*_):
    return ()


def adds(m, x, o):
    o.n += 1
    return x * o.n


def counted(m, x):
    COUNTS["n"] += 1
    return x * COUNTS["n"]


def a_namespace(m, x):
    return (types.SimpleNamespace(n=1, table=torch.ones(3)),)


AFTER_THAT_CALL = "The network writes to an argument of 'blocks.0' after that call"
CHANGED = {
    "an object": (lambda m, x, o: x * o.n, a_namespace, lambda n, o: vars(o).update(n=n + 2), AFTER_THAT_CALL),
    "a tensor of it": (lambda m, x, o: x * o.table, a_namespace, lambda n, o: o.table.add_(1), AFTER_THAT_CALL),
    "an array": (
        lambda m, x, o: x * float(o[0]),
        lambda m, x: (numpy.ones(1),),
        lambda n, o: o.fill(n + 2),
        AFTER_THAT_CALL,
    ),
    "a global": (
        lambda m, x: x * COUNTS["n"],
        nothing,
        lambda n: COUNTS.update(n=n + 2),
        "changes 'n' of a dict between its calls of the blocks 'blocks'",
    ),
    "the last block": (
        lambda m, x: x * getattr(m, "n", 1),
        lambda m, x: setattr(m.blocks[-1], "n", 2) or (),
        nothing,
        "The network sets 'n' of a block of 'blocks'",
    ),
    "a global, by a block": (counted, nothing, nothing, "A block of 'blocks' changes 'n' of a dict when it is called"),
    "an object, by a block": (
        adds,
        a_namespace,
        nothing,
        "A block of 'blocks' changes 'n' of a SimpleNamespace when it is called",
    ),
    "a dict, by a block": (
        lambda m, x, o: (o.update(n=o["n"] + 1), x * o["n"])[1],
        lambda m, x: ({"n": 1},),
        nothing,
        "A block of 'blocks' changes 'n' of a dict when it is called",
    ),
    "a list under two names, by a block": (
        lambda m, x, o, other: (o.append(x), x + other[0])[1],
        lambda m, x: (parts := [], parts),
        nothing,
        "A block of 'blocks' changes 0 of a list when it is called",
    ),
    "a tensor that a block keeps": (
        lambda m, x: m.kept.setdefault("x", x),
        nothing,
        nothing,
        "A block of 'blocks' changes 'x' of a dict when it is called",
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_what_blocks_or_their_loop_change_beside_the_carries_is_refused(case, monkeypatch):
    monkeypatch.setitem(COUNTS, "n", 1)
    act, make, change, words = CHANGED[case]
    program = compiled(Loop(act, make, change), {"blocks": Stack(carries=["x"])})
    assert words in refusal(lambda: program(x=torch.ones(2, 3)))


def test_blocks_have_their_arguments_as_they_were_also_those_that_are_the_same_and_keep_tables():
    def act(m, x, parts, others, again):
        table = m.kept.setdefault("table", torch.arange(3, device=x.device))
        return x + table * len(parts) * (2 if parts is others else 3) * (2 if again is parts[0] else 3)

    def make(m, x):
        return (parts := [x * 2], parts, parts[0])

    modules = [Loop(act, make, lambda n, parts, *_: parts.append(n)) for _ in range(2)]
    with torch.no_grad():
        (wanted,) = modules[0](torch.ones(2, 3))
    found = compiled(modules[1], {"blocks": Stack(carries=["x"])})(x=torch.ones(2, 3))
    assert numpy.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize(
    "made",
    [
        lambda n: torch.tensor([1.0, n]),
        lambda n: numpy.ones(n),
        lambda n: {"n": [n]},
        lambda n: types.SimpleNamespace(n=n),
        lambda n: functools.partial(torch.mul, other=n),
        lambda n: lambda x: x * n,
        lambda n: slice(0, n),
    ],
    ids=["tensor", "array", "dict", "object", "partial", "closure", "slice"],
)
def test_blocks_that_differ_in_what_they_hold_are_refused(made):
    def network(*held):
        module = Loop(nothing, nothing, nothing)
        for block, each in zip(module.blocks, held, strict=True):
            block._held = each
        return module

    stacks = {"blocks": Stack(carries=["x"])}
    assert stack.stack(network(made(1), made(1), made(1)), stacks, str) == {"blocks": 3}
    words = "'blocks.2' differs from the first block's in '_held'"
    assert words in refusal(lambda: stack.stack(network(made(1), made(1), made(2)), stacks, str))
