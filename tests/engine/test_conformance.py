"""The form of a call, what the table says of it, and the tool that makes the table: it sees a wrong lowering."""

import re

import conformance as tool
import operator_table
import pytest
import torch
import yaml

from torchport import engine
from torchport.engine import conformance
from torchport.engine.conformance import Form, Operators, form_of

aten = torch.ops.aten


def form(operator="aten.add.Tensor", dtypes=("float32",), options=()):
    return Form(operator, frozenset(dtypes), frozenset(options))


FORMS = {
    "plain": (aten.add.Tensor, (torch.ones(2), torch.ones(2)), {}, form()),
    "a zero": (
        aten.addmm.default, (torch.ones(2, 2),) * 3, {"beta": 0}, form("aten.addmm.default", options=["beta=0"])),
    "a bool by place": (
        aten.avg_pool2d.default, (torch.ones(1, 4, 4), [2, 2], [2, 2], [0, 0], True), {},
        form("aten.avg_pool2d.default", options=["ceil_mode=True", "stride"])),
    "the defaults": (
        aten.avg_pool2d.default, (torch.ones(1, 4, 4), [2, 2], [], 0, False), {}, form("aten.avg_pool2d.default")),
    "a dtype, and a place": (
        aten.zeros_like.default, (torch.ones(2),), {"dtype": torch.int64, "device": torch.device("cpu")},
        form("aten.zeros_like.default", options=["dtype=int64"])),
    "to": (torch.Tensor.to, (torch.ones(2), torch.float64), {}, form("torch.Tensor.to", options=["dtype=float64"])),
    "a builtin": (
        torch.argsort, (torch.ones(2), -1, True), {}, form("torch.argsort", options=["descending=True"])),
    "a required argument by keyword": (
        torch.nn.functional.linear, (), {"input": torch.ones(2, 2), "weight": torch.ones(2, 2)},
        form("torch.nn.functional.linear", options=["input by keyword", "weight by keyword"])),
    "a required bool": (
        aten.native_batch_norm.default, (torch.ones(2, 2), None, None, None, None, True, 0.1, 1e-5), {},
        form("aten.native_batch_norm.default", options=[
            "bias=None", "running_mean=None", "running_var=None", "training=True", "weight=None"])),
    "a number": (aten.add.Tensor, (torch.ones(2), 2), {}, form(options=["int number"])),
    "a point of a wider dtype": (
        aten.add.Tensor, (torch.ones(2).bfloat16(), torch.tensor(1.0)), {},
        form("aten.add.Tensor", ["bfloat16", "float32"], ["0-dim", "0-dim of a wider dtype", "mixed dtypes"])),
    "a point that changes nothing": (
        aten.add.Tensor, (torch.ones(2), torch.tensor(1)), {},
        form("aten.add.Tensor", ["float32", "int64"], ["0-dim", "mixed dtypes"])),
    "an equation": (
        torch.einsum, ("ij,jk->ik", torch.ones(2, 2), torch.ones(2, 2)), {}, form("torch.functional.einsum")),
    "an equation with a diagonal": (
        torch.einsum, ("...ii -> ...", torch.ones(2, 2)), {},
        form("torch.functional.einsum", options=["equation: ...", "equation: 1 tensors", "equation: diagonal"])),
    "nothing in it": (aten.add.Tensor, (torch.ones(0), torch.ones(1)), {}, form(options=["empty"])),
    "an index": (
        torch.Tensor.__getitem__, (torch.ones(4, 4), (slice(None, None, 2), torch.tensor([True] * 4))), {},
        form("torch.Tensor.__getitem__", ["bool", "float32"], ["index: mask", "index: step", "mixed dtypes"])),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_a_form_has_the_operator_the_dtypes_and_what_is_chosen(name):
    func, args, kwargs, expected = FORMS[name]
    assert form_of(func, args, kwargs) == expected


@pytest.fixture
def table(monkeypatch, tmp_path):
    """A table of two operators in the place of the shipped one."""
    file = tmp_path / "conformance.yaml"
    evidence = [
        operator_table.Evidence(form(), "", "", ""),
        operator_table.Evidence(form(options=["alpha"]), "", "", ""),
        operator_table.Evidence(form(dtypes=["int64"]), "dtype: int32 for int64", "", ""),
        operator_table.Evidence(form(options=["empty", "alpha"]), "other values", "", ""),
        operator_table.Evidence(form("aten.rms.default"), "", "", ""),
        operator_table.Evidence(form("aten.rms.default", options=["eps"]), "other values", "torch.rms", ""),
        operator_table.Evidence(form("aten.rand.default"), operator_table.RANDOM, "", ""),
    ]
    file.write_text(operator_table.written(operator_table.table(evidence)))
    monkeypatch.setattr(conformance, "FILE", file)
    conformance.read.cache_clear()
    yield file
    conformance.read.cache_clear()


STATES = [
    (form(), ("same", "")),
    (form(options=["alpha"]), ("same", "")),
    (form(dtypes=["float32", "int64"]), ("differs", "dtype: int32 for int64")),
    (form(options=["empty"]), ("differs", "other values")),
    (form(dtypes=["bool"], options=["beta"]), ("unknown", "never sampled: bool, beta")),
    (form("aten.sub.Tensor"), ("unknown", "the operator was never sampled")),
    (form("aten.rms.default"), ("same", "")),
    (form("aten.rms.default", options=["eps"]), ("mended", "torch.rms")),
    (form("aten.rand.default"), ("unknown", "random by nature")),
]


@pytest.mark.parametrize(("found", "state"), STATES)
def test_the_table_says_of_a_form_what_its_samples_said(table, found, state):
    assert conformance.state_of(found) == state


def test_an_unknown_operator_is_counted_and_under_strict_refused(table):
    found = Operators()
    for function in (aten.add.Tensor, aten.sub.Tensor):
        found.see(function, (torch.ones(2), torch.ones(2)), {})
    assert found.text() == "2 operators: 1 same, 1 unknown (aten.sub.Tensor)"
    Operators({"aten.sub.Tensor": "a reason"}, strict=True).see(aten.sub.Tensor, (torch.ones(2), torch.ones(2)), {})
    strict = Operators(strict=True)
    strict.see(aten.add.Tensor, (torch.ones(2), torch.ones(2)), {})
    with pytest.raises(engine.DiffersError) as caught:
        strict.see(aten.sub.Tensor, (torch.ones(2), torch.ones(2)), {})
    assert str(caught.value) == (
        "aten.sub.Tensor, which no sample has compared with PyTorch's (the operator was never sampled)"
    )
    assert caught.value.cure.startswith("Compute it with other operators, or accept it under `operators` in the card")


def test_an_operator_in_place_is_known_by_the_other_and_else_has_its_own_reason(table):
    table.write_text(table.read_text() + "  aten.sub_.Tensor: {dtypes: [int64], options: []}\n")
    found = Operators()
    found.see(aten.sub_.Tensor, (torch.ones(2), torch.ones(2)), {})
    found.see(aten.add_.Tensor, (torch.ones(2), torch.ones(2)), {"alpha": 2})
    assert list(found.found.values()) == [("unknown", "never sampled: float32"), ("same", "")]


def test_a_form_of_which_some_calls_are_the_same_differs_only_there():
    passed = [form(), form(options=["alpha"]), form(options=["alpha", "empty"])]
    assert operator_table.smallest(form(options=["alpha"]), passed) == ({"alpha"}, {"float32"}, False)
    assert operator_table.smallest(form(options=["alpha", "beta"]), passed) == ({"beta"}, {"float32"}, True)


def test_what_raises_for_some_inputs_is_the_same_for_the_others():
    raised = operator_table.Evidence(form(), "raises ValueError", "", "")
    entry = operator_table.table([operator_table.Evidence(form(), "", "", ""), raised])["operators"]["aten.add.Tensor"]
    assert "differs" not in entry and entry["stops"][0]["what"] == "for some inputs: raises ValueError"
    assert "differs" in operator_table.table([raised])["operators"]["aten.add.Tensor"]


def test_a_width_alone_is_counted_apart():
    width = operator_table.Evidence(form(dtypes=["int64"]), "dtype: int32 for int64", "", "")
    other = operator_table.Evidence(form(dtypes=["int64"]), "other values", "", "")
    for evidence, cells in ([width], "1 | 0 | 0 | 1 | 1"), ([width, other], "1 | 0 | 0 | 1 | 0"):
        assert f"| int64 | {cells} |" in operator_table.in_short(operator_table.table(evidence))


def test_a_table_that_says_something_else_is_drift(table):
    old = yaml.safe_load(table.read_text())
    new = yaml.safe_load(table.read_text())
    assert operator_table.drift(old, new, "") == []
    new["operators"]["aten.add.Tensor"]["dtypes"] = []
    [line] = operator_table.drift(old, new, "")
    assert line.startswith("aten.add.Tensor: ")
    assert operator_table.drift(old, new, "rms") == []


def test_what_pytorchs_samples_leave_out_is_compared_beside_as_many_of_them():
    comparison = tool.Comparison(re.compile("add"), {})
    calls = [tool.Call(aten.add.Tensor, (torch.ones(size), torch.ones(size)), {}) for size in range(1, 20)]
    assert [comparison._is_new(call, False) for call in calls].count(True) == tool.SHAPES
    assert comparison._is_new(calls[-1], True)
    assert not comparison._is_new(calls[0], True)


def test_a_part_of_a_table_takes_the_place_of_the_operators_whose_names_match(table):
    old = yaml.safe_load(table.read_text())
    new = {"versions": {}, "random": [], "operators": {"aten.rms.default": {"dtypes": [], "options": []}}}
    merged = tool.merged(old, new, "rms|rand")
    assert merged["operators"] == {"aten.add.Tensor": old["operators"]["aten.add.Tensor"]} | new["operators"]
    assert merged["random"] == []
    assert tool.merged(old, new, "rms")["random"] == ["aten.rand.default"]


def test_the_shipped_table_is_of_these_versions_and_is_written_as_the_tool_writes():
    text = conformance.FILE.read_text(encoding="utf-8")
    data = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    assert data["versions"] == operator_table.versions(), "Run `python tools/conformance.py --write`"
    assert operator_table.written(data) == text
    assert list(data["operators"]) == sorted(data["operators"])
    assert len(text.splitlines()) <= 2000
    assert conformance.state_of(form("aten.relu.default")) == ("same", "")


@pytest.fixture(scope="module")
def lowerings():
    """The table of lowerings of the engine, as the tool sets it up."""
    with tool.engine_in_force():
        import torchax

        yield torchax.default_env()._ops


def _wrong(function, *args):
    return function(*args) + 1


PLANTED = {
    "aten.relu.default": (aten.relu.default, (torch.tensor([1.0, -1.0]),)),
    "aten.amax.default": (aten.amax.default, (torch.tensor([[1.0, 2.0]]), [-1])),
    "aten.bitwise_and.Tensor": (aten.bitwise_and.Tensor, (torch.tensor([1, 2], dtype=torch.int32),) * 2),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_lowering_that_was_made_wrong_differs(name, lowerings, monkeypatch):
    import dataclasses

    func, args = PLANTED[name]
    assert tool.verdict(tool.Call(func, args, {})) == ""
    key = func if func in lowerings else func.overloadpacket
    wrong = dataclasses.replace(lowerings[key], func=lambda *args: _wrong(right, *args))
    right = lowerings[key].func
    monkeypatch.setitem(lowerings, key, wrong)
    assert tool.verdict(tool.Call(func, args, {})) == "other values"


def test_what_a_lowering_leaves_out_is_said(lowerings):
    half = torch.ones(1, 1, 3, 3)
    pooled = aten.avg_pool2d.default, (half, [2, 2], [2, 2], [0, 0], True)
    nan = torch.full((2, 2), float("nan"))
    verdicts = {
        "pool": tool.verdict(tool.Call(*pooled, {})),
        "beta": tool.verdict(tool.Call(aten.addmm.default, (nan, torch.ones(2, 2), torch.ones(2, 2)), {"beta": 0})),
        "width": tool.verdict(tool.Call(aten.sort.default, (torch.tensor([2.0, 1.0]),), {})),
        "random": tool.verdict(tool.Call(aten.rand_like.default, (half,), {})),
        "refused": tool.verdict(tool.Call(aten.mm.default, (half, half), {})),
        "none": tool.verdict(tool.Call(aten.ldexp.Tensor, (half, half), {})),
    }
    assert verdicts == {
        "pool": "other values",
        "beta": "NaN at other places",
        "width": "",
        "random": operator_table.RANDOM,
        "refused": None,
        "none": "no lowering",
    }


def test_a_sample_is_recorded_as_the_operators_that_reach_the_engine(lowerings):
    def composite(x):
        y = torch.nn.functional.linear(x, x)
        y.mul_(2)
        return y.view(-1)

    calls = tool.calls_of(tool.Sample("composite", composite, (torch.eye(2),)))
    names = [conformance.operator_name(call.func) for call in calls]
    assert names == ["torch.nn.functional.linear", "aten.mul_.Tensor", "aten.view.default"]
    assert torch.equal(calls[2].args[0], torch.eye(2) * 2), "PyTorch's values, after the write"
    assert engine.is_traced(calls[0].args[0]) is False
