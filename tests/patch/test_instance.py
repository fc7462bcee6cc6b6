"""The kind `instance`: submodules and methods of a loaded component are exchanged, counted, and put back."""

from __future__ import annotations

import json

import pytest
import torch
from fakes.patch_world import World

from torchport import patch
from torchport.errors import TorchportError
from torchport.patch.declared.lock import read_lock
from torchport.patch.live.exchange import PATCH
from torchport.patch.source import drift

UPSTREAM = """\
import torch

class Scale(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((size,), 2.0))
        self.register_buffer("table", torch.ones(size), persistent=False)

    def forward(self, x, by=1):
        return x * self.weight * self.table * by

    @property
    def size(self): return len(self.weight)

    def __len__(self): return len(self.weight)

class Block(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.scale = Scale(size)
        self.other = Scale(size)

    def forward(self, x):
        return self.other(self.scale(x))

class Net(torch.nn.Module):
    def __init__(self, size=3, count=2):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(size) for _ in range(count))
        self.last = Scale(size)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)

class Tokenizer:
    def words(self, text): return text.split()

def helper(x): return x
"""

FUNCTIONS = """\
import torch

def doubled(original):
    return lambda x, by=1: original(x, by) * 2

def shouting(original):
    return lambda text: [word.upper() for word in original(text)]

class Plus(torch.nn.Module):
    def __init__(self, original, names=("weight", "table")):
        super().__init__()
        if "weight" in names:
            self.weight = original.weight
        if "table" in names:
            self.register_buffer("table", original.table, persistent=False)

    def forward(self, x, by=1):
        return x + self.weight

def plus(original): return Plus(original)
def bare(original): return Plus(original, ["weight"])
def more(original):
    new = Plus(original)
    new.bias = torch.nn.Parameter(torch.zeros(3))
    return new
def wide(original):
    new = Plus(original)
    new.weight = torch.nn.Parameter(torch.zeros(4))
    return new
def random(original):
    new = Plus(original)
    new.weight = torch.nn.Parameter(torch.zeros(3))
    return new
def copied(original):
    new = Plus(original)
    new.weight = torch.nn.Parameter(original.weight.detach().clone())
    return new
def saved(original):
    new = Plus(original, ["weight"])
    new.register_buffer("table", original.table)
    return new
def same(original): return original
def nothing(original): return None
def broken(original): return original.nothing
def two(original, more): return original
def short(original): return lambda x: x
class Narrow(Plus):
    def forward(self, x): return x
def narrow(original): return Narrow(original)
"""


@pytest.fixture
def world(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)
    world.write("up/m.py", UPSTREAM)
    world.python(FUNCTIONS)
    yield world
    world.close()


def _entry(world, path=r"last", put="plus", target="up.m:Scale", component="net", more="", key="up.one"):
    where = f"component: {component}, path: '{path}'" if path is not None else f"component: {component}"
    return world.one(f"instance: {{{where}, put: p.py:{put}{more}}}", target, key=key)


def _net(**kwargs):
    from up.m import Net

    return Net(**kwargs).eval()


def _refused(entries):
    """Returns the refusal to exchange anything in a network, which stays as it was."""
    with patch.applied(entries) as ledger:
        net = _net()
        before = dict(net.named_modules())
        spaces = {name: dict(vars(module)) for name, module in before.items()}
        with pytest.raises(TorchportError) as caught:
            ledger.exchange({"net": net}, all_parts=True)
        assert dict(net.named_modules()) == before
        assert {name: dict(vars(module)) for name, module in before.items()} == spaces
    return caught.value


X = torch.tensor([1.0, 2.0, 3.0])


def test_a_method_is_exchanged_counted_and_put_back(world):
    with patch.applied(_entry(world, put="doubled", target="up.m:Scale.forward")) as ledger:
        net = _net(count=0)
        assert ledger.rows()[0]["state"] == "armed"
        ledger.exchange({"net": net})
        assert ledger.rows()[0]["state"] == "applied"
        assert torch.equal(net(X), X * 4)
        captured = net.last.forward
        [row] = ledger.rows()
        assert (row["state"], row["calls"], row["kind"], row["target"]) == ("used", 1, "instance", "up.m:Scale.forward")
        assert getattr(captured, PATCH) == "up.one"
    assert torch.equal(net(X), X * 2)
    assert "forward" not in vars(net.last)
    assert torch.equal(captured(X), X * 2)  # whoever captured it has the original


def test_a_submodule_is_exchanged_with_its_tensors_and_put_back(world):
    with patch.applied(_entry(world)) as ledger:
        net = _net(count=0)
        old, names = net.last, list(net.state_dict())
        ledger.exchange({"net": net})
        assert type(net.last).__name__ == "Plus"
        assert list(net.state_dict()) == names and not net.last.training
        assert torch.equal(net(X), X + 2)
        assert ledger.rows()[0]["calls"] == 1
        new = net.last
    assert net.last is old and "forward" not in vars(new)
    assert torch.equal(net(X), X * 2)


def test_weights_that_are_loaded_meanwhile_are_there_when_the_submodule_is_put_back(world):
    with patch.applied(_entry(world)) as ledger:
        with torch.device("meta"):
            net = _net(count=0)
        ledger.exchange({"net": net})
        net.load_state_dict({"last.weight": torch.full((3,), 5.0)}, assign=True)
        assert torch.equal(net(X), X + 5)
    assert net.last.weight.tolist() == [5.0] * 3


def test_a_regular_expression_matches_as_often_as_times_says(world):
    entries = _entry(world, r"blocks\.\d+\.scale", more=", times: 2")
    with patch.applied(entries) as ledger:
        net = _net()
        ledger.exchange({"net": net})
        assert torch.equal(net(X), ((X + 2) * 2 + 2) * 2 * 2)
        assert ledger.rows()[0]["calls"] == 2
    assert torch.equal(net(X), X * 32)


def test_any_number_of_matches_is_taken_where_the_entry_says_so_but_not_none(world):
    entries = _entry(world, r"blocks\.\d+\.scale", more=", times: any")
    for count in (1, 3):
        with patch.applied(entries) as ledger:
            net = _net(count=count)
            ledger.exchange({"net": net})
            assert {type(block.scale).__name__ for block in net.blocks} == {"Plus"}
    with patch.applied(entries) as ledger:
        with pytest.raises(TorchportError, match=r"'up.one' finds no module 'blocks\\.\\d\+\\.scale' in net"):
            ledger.exchange({"net": _net(count=0)})


def test_a_method_of_a_component_that_is_no_module_is_exchanged(world):
    with patch.applied(_entry(world, None, "shouting", "up.m:Tokenizer.words", "tokenizer")) as ledger:
        from up.m import Tokenizer

        tokenizer = Tokenizer()
        ledger.exchange({"tokenizer": tokenizer, "net": _net()}, all_parts=True)
        assert tokenizer.words("a b") == ["A", "B"]
        assert Tokenizer().words("a b") == ["a", "b"]
    assert tokenizer.words("a b") == ["a", "b"] and not vars(tokenizer)


def test_a_component_is_exchanged_once_and_another_one_of_its_name_too(world):
    with patch.applied(_entry(world, put="doubled", target="up.m:Scale.forward")) as ledger:
        first, second = _net(count=0), _net(count=0)
        for net in (first, first, second):
            ledger.exchange({"net": net})
        assert torch.equal(first(X), X * 4) and torch.equal(second(X), X * 4)
    assert torch.equal(first(X), X * 2) and torch.equal(second(X), X * 2)


def test_a_nested_set_puts_back_what_it_exchanged_and_counts_anew(world):
    entries = _entry(world, put="doubled", target="up.m:Scale.forward", more="")
    with patch.applied(entries) as outer:
        net = _net(count=0)
        for _ in range(2):
            with patch.applied(entries, stage="decode") as inner:
                patch.exchange({"net": net}, all_parts=True)
                net(X)
                assert inner.rows()[0]["calls"] == 1
            assert torch.equal(net(X), X * 2)
        assert (outer.rows()[0]["state"], outer.rows()[0]["calls"]) == ("used", 2)


def test_an_exchange_stands_beside_a_patch_of_the_class(world):
    world.python("def other(self, x, by=1): return x\n" + FUNCTIONS)
    entries = world.yaml(
        "id: up.class\n  target: up.m:Scale.forward\n  replace: p.py:other\n"
        "- id: up.one\n  target: up.m:Scale.forward\n  instance: {component: net, path: last, put: p.py:doubled}"
    )
    with patch.applied(entries) as ledger:
        net = _net(count=0)
        ledger.exchange({"net": net})
        assert torch.equal(net(X), X * 2)
        assert [row["calls"] for row in ledger.rows()] == [1, 1]
    assert torch.equal(net(X), X * 2) and torch.equal(net.last(X, 3), X * 6)


def test_without_a_set_in_force_nothing_is_exchanged():
    patch.exchange({"net": object()}, all_parts=True)


def test_a_trace_needs_the_same_function(world):
    entries = _entry(world)
    with patch.applied(entries) as ledger:
        trace = ledger.trace()
        trace.check()
    world.python(FUNCTIONS + "\n# edited\n")
    with patch.applied(entries):
        with pytest.raises(TorchportError, match=r"'up.one' has changed"):
            trace.check()


def test_a_patch_that_must_be_called_is_refused_if_it_was_not(world):
    entries = world.one(
        "instance: {component: net, path: last, put: p.py:plus}", "up.m:Scale", "must_be_called: [decode]"
    )
    with patch.applied(entries, stage="decode") as ledger:
        ledger.exchange({"net": _net()})
        with pytest.raises(TorchportError, match=r"'up.one' was not called in decode \(it is applied\)"):
            ledger.check_called()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"path": "lost"},
            "'up.one' finds no module 'lost' in net. Did you mean 'last'? Known: blocks, blocks.0, blocks.1, "
            "blocks.1.other, last.",
        ),
        (
            {"path": r"blocks\..*\.scale"},
            "'up.one' matches 2 modules of net (blocks.0.scale, blocks.1.scale), and 'times' is 1. Write 'times: 2', "
            "or another path.",
        ),
        (
            {"path": r"blocks\.0"},
            "'blocks.0' of net is a up.m:Block, not a up.m:Scale. Name its class as the target, or write another path.",
        ),
        (
            {"path": r"blocks\.0", "put": "doubled", "target": "up.m:Scale.forward"},
            "'blocks.0' of net is a up.m:Block, whose 'forward' is not up.m:Scale.forward. Write up.m:Block.forward.",
        ),
        (
            {"target": "up.m:Net", "path": None},
            "net itself cannot be exchanged. Add 'instance.path', or name a method.",
        ),
        (
            {"target": "up.m:Scale.size"},
            "up.m:Scale.size is a property. Name a class, or a method that is called by its name, such as forward.",
        ),
        (
            {"target": "up.m:Scale.__len__"},
            "up.m:Scale.__len__ is looked up in the class. Name a class, or a method that is called by its name, such "
            "as forward.",
        ),
        (
            {"target": "up.m:helper"},
            "up.m:helper is a function. Name a class, or a method that is called by its name, such as forward.",
        ),
        (
            {"component": "nets"},
            "'up.one' is for the component 'nets', which the stage does not load. Did you mean 'net'? Known: net.",
        ),
        ({"put": "nothing"}, "What 'p.py:nothing' returns for 'last' of net is a NoneType. Return a torch.nn.Module."),
        (
            {"put": "same"},
            "What 'p.py:same' returns for 'last' of net is the original itself. Return what takes its place.",
        ),
        (
            {"put": "same", "target": "up.m:Scale.forward"},
            "What 'p.py:same' returns for 'last' of net is the original itself. Return what takes its place.",
        ),
        (
            {"put": "nothing", "target": "up.m:Scale.forward"},
            "What 'p.py:nothing' returns for 'last' of net is a NoneType. Return a function.",
        ),
        (
            {"put": "broken"},
            "'p.py:broken' fails for 'last' of net: AttributeError: 'Scale' object has no attribute 'nothing'. "
            "Mend the function.",
        ),
        (
            {"put": "short", "target": "up.m:Scale.forward"},
            "'p.py:short' does not take 'by' by position, unlike up.m:Scale.forward(x, by=...). Give it the target's "
            "parameters, in its order and with defaults where it has them.",
        ),
        (
            {"put": "narrow"},
            "'p.py:narrow' does not take 'by' by position, unlike up.m:Scale(x, by=...). Give it the target's "
            "parameters, in its order and with defaults where it has them.",
        ),
        (
            {"put": "bare"},
            "What 'p.py:bare' returns for 'last' of net has no tensor 'table'. Give it the original's tensors: "
            "new.load_state_dict(original.state_dict(), assign=True).",
        ),
        ({"put": "more"}, "What 'p.py:more' returns for 'last' of net has another tensor 'bias'. Give it the"),
        (
            {"put": "wide"},
            "What 'p.py:wide' returns for 'last' of net has 'weight' as a parameter, float32 [4] on cpu, and the "
            "original as a parameter, float32 [3] on cpu. Give it the",
        ),
        (
            {"put": "saved"},
            "What 'p.py:saved' returns for 'last' of net has 'table' as a buffer, float32 [3] on cpu, and the original "
            "as a buffer that is not saved, float32 [3] on cpu. Give it the",
        ),
        ({"put": "random"}, "What 'p.py:random' returns for 'last' of net has other values in 'weight'. Give it the"),
    ],
)
def test_what_cannot_be_exchanged_is_refused_and_nothing_is_changed(world, change, text):
    assert str(_refused(_entry(world, **change))).startswith(f"patches/up/p.yaml:1: {text}")


def test_equal_values_in_a_tensor_of_its_own_are_taken(world):
    with patch.applied(_entry(world, put="copied")) as ledger:
        net = _net(count=0)
        ledger.exchange({"net": net})
        assert torch.equal(net(X), X + 2)


def test_a_function_that_does_not_take_the_original_is_refused_before_anything_is_imported(world):
    import sys

    with pytest.raises(TorchportError) as caught:
        patch.applied(_entry(world, put="two")).__enter__()
    assert str(caught.value) == (
        "patches/up/p.yaml:1: 'p.py:two' of 'up.one' cannot be called with the original alone: missing a required "
        "argument: 'more'. Take the original as its one parameter."
    )
    assert "up.m" not in sys.modules


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (
            ("up.m:Scale", "'last'", 1),
            ("up.m:Scale", "'last'", 1),
            "'up.two' claims up.m:Scale, and 'up.one' at patches/up/p.yaml:1 up.m:Scale. Keep one of the two.",
        ),
        (
            ("up.m:Scale", "'last'", 1),
            ("up.m:Scale", "'las.'", 1),
            "'up.two' claims 'last' of net, and 'up.one' at patches/up/p.yaml:1 claims 'last' of net. Keep one of",
        ),
        (
            ("up.m:Scale.forward", "'last'", 1),
            ("up.m:Scale.forward", "'las.'", 1),
            "'up.two' claims 'last' of net, and 'up.one' at patches/up/p.yaml:1 claims 'last' of net. Keep one of",
        ),
        (
            ("up.m:Scale", "'last'", 1),
            ("up.m:Scale.forward", "'last'", 1),
            "'up.two' claims 'last' of net, and 'up.one' at patches/up/p.yaml:1 claims 'last' of net. Keep one of",
        ),
        (
            ("up.m:Block", "'blocks[.]0'", 1),
            ("up.m:Scale.forward", "'blocks[.]..scale'", 2),
            "'up.two' claims 'blocks.0.scale' of net, and 'up.one' at patches/up/p.yaml:1 claims 'blocks.0' of net.",
        ),
    ],
)
def test_two_exchanges_in_one_place_conflict(world, first, second, text):
    instance = "instance: {{component: net, path: {}, put: p.py:same, times: {}}}".format
    entries = world.yaml(
        "\n".join(
            f"- id: up.{key}\n  target: {target}\n  {instance(path, times)}"
            for key, (target, path, times) in (("one", first), ("two", second))
        )
    )
    with pytest.raises(TorchportError) as caught:
        with patch.applied(entries) as ledger:
            ledger.exchange({"net": _net()})
    assert caught.value.fact and text in str(caught.value)


def test_a_submodule_that_has_a_second_name_is_refused_unless_both_match(world):
    world.write("up/m.py", UPSTREAM.replace("self.last = Scale(size)", "self.last = self.tied = Scale(size)"))
    refusal = _refused(_entry(world))
    assert str(refusal) == (
        "patches/up/p.yaml:1: 'last' of net is also 'tied'. Match both, or exchange a method of it."
    )
    with patch.applied(_entry(world, "last|tied", more=", times: 2")) as ledger:
        net = _net(count=0)
        ledger.exchange({"net": net})
        assert net.last is net.tied and torch.equal(net(X), X + 2)
    assert net.last is net.tied and torch.equal(net(X), X * 2)


def test_a_submodule_that_a_list_holds_too_is_refused(world):
    world.write(
        "up/m.py", UPSTREAM.replace("self.last = Scale(size)", "self.last = Scale(size); self.all = [self.last]")
    )
    assert "'last' of net is also 'all'. Match both" in str(_refused(_entry(world)))


def test_a_method_that_somebody_has_exchanged_already_is_refused(world):
    with patch.applied(_entry(world, put="doubled", target="up.m:Scale.forward")) as ledger:
        net = _net()
        net.last.forward = net.last.forward
        with pytest.raises(TorchportError, match="'last' of net has a 'forward' of its own, beside that of its class"):
            ledger.exchange({"net": net})


def test_what_somebody_else_put_in_its_place_since_stays(world):
    with patch.applied(_entry(world, put="doubled", target="up.m:Scale.forward")) as ledger:
        net = _net(count=0)
        ledger.exchange({"net": net})
        net(X)
        net.last.forward = theirs = lambda x: x
        assert ledger.rows()[0]["state"] == "displaced"
    assert net.last.forward is theirs


def test_the_target_of_an_exchange_is_locked_with_what_it_uses(world):
    world.write("up/m.py", UPSTREAM.replace("return x * self.weight", "helper(x); return x * self.weight"))
    entries = _entry(world)
    assert drift.lock(entries) == ["up.m:Scale: new"]
    assert drift.check(entries[0]) == "locked"
    [row] = read_lock(world.patches / "up")["up.m:Scale"].rows
    assert "helper:" in row.relies_on["up.m"]
    world.write("up/m.py", UPSTREAM.replace("* self.table * by", "* self.table"))
    with pytest.raises(TorchportError, match=r"up.m:Scale is not what 'up.one' was reviewed against"):
        patch.applied(entries).__enter__()


def test_a_class_is_named_where_it_is_defined(world):
    entries = _entry(world, "0", target="torch.nn:Linear")
    with patch.applied(entries) as ledger, pytest.raises(TorchportError) as caught:
        ledger.exchange({"net": torch.nn.Sequential(torch.nn.Linear(2, 2))})
    assert str(caught.value) == (
        "patches/up/p.yaml:1: torch.nn:Linear is torch.nn.modules.linear:Linear. Write torch.nn.modules.linear:Linear."
    )


def test_of_a_class_of_torch_the_class_alone_is_locked(world):
    entries = _entry(world, target="torch.nn.modules.linear:Linear")
    assert drift.lock(entries) == ["torch.nn.modules.linear:Linear: new"]
    [row] = read_lock(world.patches / "up")["torch.nn.modules.linear:Linear"].rows
    assert row.tree and not row.relies_on


def test_a_class_of_torch_may_be_a_target_without_a_scope(world):
    entries = _entry(world, put="same", target="torch.nn.modules.linear:Linear")
    with patch.applied(entries) as ledger:
        net = torch.nn.Sequential(torch.nn.Linear(2, 2))
        with pytest.raises(TorchportError, match=r"finds no module 'last' in net. Known: 0"):
            ledger.exchange({"net": net})


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ("scope: global\nscope_reason: x", "p.yaml:1: 'scope' is global, and an instance is nobody else's. Remove it."),
        ("lifetime: {while_importing: up}", "'while_importing' does not go with 'instance'. Use replace or wrap."),
        ("counted: false", "'instance' is always counted. Remove 'counted'."),
    ],
)
def test_fields_that_would_do_nothing_are_refused(world, more, text):
    with pytest.raises(TorchportError) as caught:
        world.one("instance: {component: net, path: last, put: p.py:plus}", "up.m:Scale", more)
    assert text.partition(": ")[2] in str(caught.value)


def test_a_path_that_is_no_regular_expression_is_refused(world):
    with pytest.raises(TorchportError) as caught:
        _entry(world, "blocks[")
    assert str(caught.value) == (
        "patches/up/p.yaml:3: 'instance.path' is 'blocks[', no regular expression: unterminated character set at "
        "position 6. Escape its points and brackets with a backslash."
    )


def test_the_rows_of_the_ledger_are_plain_data(world):
    with patch.applied(_entry(world)) as ledger:
        ledger.exchange({"net": _net()})
        json.dumps(ledger.trace().as_json())
