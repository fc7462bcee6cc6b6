"""Each patch alone: inputs that are made of those of a real call, verdicts, and the demo's patches."""

import sys
import types
from collections import OrderedDict

import pytest
import torch
from torch.utils import _pytree as pytree

from torchport.patch import Entry
from torchport.task import Request
from torchport.verify import equivalence, inputs
from torchport.verify.equivalence import Alone
from torchport.verify.inputs import Noted

KNOWN = {"why": "w", "reported": "none: ours", "until": "never", "fits": {"numpy": "*"}}


def entry(equivalence="bitwise", target="plain_upstream:scale", **fields):
    known = {"id": "a.patch", "target": target, "replace": "a.py:b", "equivalence": equivalence}
    return Entry.model_validate({**KNOWN, **known, **fields})


@pytest.fixture
def upstream(monkeypatch):
    module = types.ModuleType("plain_upstream")

    def scale(x, mask=None, factor=2.0):
        return x * factor if mask is None else x * mask[..., None] * factor

    scale.__module__ = "plain_upstream"
    module.scale = scale
    monkeypatch.setitem(sys.modules, "plain_upstream", module)
    return module


def call():
    mask = torch.ones(1, 6, dtype=torch.int64)
    mask[:, 4:] = 0
    return Noted("captured", None, (torch.randn(1, 6, 8),), {"mask": mask, "factor": 3.0})


def test_inputs_are_made_of_those_of_a_call():
    made = {one.what: one for one in inputs.made_of(call())}
    assert list(made) == [
        "mask: all valid", "mask: the first alone valid", "mask: half valid", "5 tokens", "bfloat16", "float16",
        "great values", "zeros",
    ]  # fmt: skip
    assert made["mask: all valid"].kwargs["mask"].sum() == 6
    assert made["mask: the first alone valid"].kwargs["mask"].tolist() == [[1, 0, 0, 0, 0, 0]]
    assert made["mask: half valid"].kwargs["mask"].sum() == 3
    assert made["5 tokens"].args[0].shape == (1, 5, 8)
    assert made["5 tokens"].kwargs["mask"].shape == (1, 5)
    assert made["float16"].args[0].dtype == torch.float16
    assert made["float16"].kwargs["mask"].dtype == torch.int64
    assert torch.equal(made["great values"].args[0], call_args(made) * 1000)
    assert not made["zeros"].args[0].any()
    assert made["zeros"].kwargs["factor"] == 3.0


def call_args(made):
    return made["great values"].args[0] / 1000


def test_calls_of_a_target_are_noted_once_for_each_shape(upstream):
    with inputs.noting([entry()]) as calls:
        for size in (3, 3, 4, 5):
            upstream.scale(torch.ones(1, size, 2))
    assert [tuple(one.args[0].shape) for one in calls["a.patch"]] == [(1, 3, 2), (1, 4, 2)]
    assert "noting" not in upstream.scale.__qualname__


def test_what_is_noted_is_not_what_a_function_wrote_into(upstream):
    upstream.scale = types.FunctionType((lambda x: x.add_(1)).__code__, vars(upstream))
    with inputs.noting([entry()]) as calls:
        upstream.scale(torch.zeros(2, 2))
    assert not calls["a.patch"][0].args[0].any()


def test_calls_of_an_operator_are_noted():
    op = entry(target="torch.nn.functional:softmax", op="a.py:b", scope="global", scope_reason="r", replace=None)
    with inputs.noting([op]) as calls:
        torch.nn.functional.softmax(torch.ones(2, 3), dim=-1)
    assert calls["a.patch"][0].kwargs == {"dim": -1}


def test_a_tensor_of_a_function_is_compared_with_the_yardstick(upstream):
    one = call()
    original, wide = equivalence._original(upstream.scale, one)
    assert original.dtype == torch.float32
    assert wide.dtype == torch.float64
    assert equivalence._judged(entry(), one, original, original, wide)[1:] == ("same", "captured: the same bits")
    near = equivalence._judged(entry(), one, original * (1 + 1e-7), original, wide)
    assert near[1] == "rounding"
    far = equivalence._judged(entry(), one, original * 1.01, original, wide)
    assert far[1] == "broken"
    assert "from the yardstick, upstream" in far[2]


def test_patches_of_one_target_are_tested_together():
    one, two = entry(), entry(id="a.second")
    others = [entry(id="a.third", target="plain_upstream:shift"), entry(id="a.fourth", plumbing=True)]
    assert equivalence._beside(one, [one, two, *others]) == [two]


def test_what_upstream_compiles_is_called_as_it_is_written(upstream):
    def refuse(graph, inputs):
        raise NotImplementedError("the compiler knows no device of the engine's")

    original, wide = equivalence._original(torch.compile(upstream.scale, backend=refuse), call())
    assert torch.allclose(original.double(), wide)


def test_a_promise_is_judged_by_what_it_says(upstream):
    one = call()
    original, wide = equivalence._original(upstream.scale, one)
    off = original * 1.01
    assert equivalence._judged(entry({"close": {"bound": 0.02}}), one, off, original, wide)[1] == "rounding"
    assert equivalence._judged(entry({"close": {"bound": 0.002}}), one, off, original, wide)[1] == "broken"
    near, far = (wide * (1 + apart) for apart in (4.2e-7, 6e-7))
    assert equivalence._judged(entry(), one, near, original, wide)[1] == "broken"
    order = equivalence._judged(entry({"algebraic": "another order"}), one, near, original, wide)
    assert order[1] == "rounding"
    assert order[2].endswith("4.8e-07 in the worst order of summation")  # of 8 terms
    assert equivalence._judged(entry({"algebraic": "another order"}), one, far, original, wide)[1] == "broken"
    assert equivalence._judged(entry({"lossy": "fast"}), one, off, original, wide)[2].endswith("declared lossy")


def test_a_result_of_another_shape_is_unclear(upstream):
    one = call()
    original, wide = equivalence._original(upstream.scale, one)
    words = "captured: it returns tensors of other shapes than upstream"
    assert equivalence._judged(entry(), one, original[:, :2], original, wide)[1:] == ("unclear", words)


def test_inputs_that_upstream_refuses_are_left_out(upstream):
    refused = Noted("odd", None, (torch.ones(2, 3),), {"mask": torch.ones(7)})
    tested = equivalence._tested(entry(), [refused], None, [])
    assert (tested.verdict, tested.cases) == ("unclear", 0)
    assert tested.why.startswith("it cannot be called alone (upstream refuses odd: The size of tensor a (2)")


@pytest.mark.parametrize(
    ("changes", "calls", "why"),
    [
        ({"plumbing": True}, [], "no tensor passes through it"),
        ({}, [], "its target was not called"),
        ({}, [Noted("captured", None, (3,), {})], "its target gets no tensor"),
        ({}, [call()], ""),
    ],
)
def test_what_cannot_be_tested_alone_says_why(changes, calls, why):
    assert equivalence._unclear(entry(**changes), calls) == why


def test_half_of_a_mask_is_valid_in_random_inputs():
    for like in (torch.ones(1, 6), torch.zeros(1, 6, dtype=torch.int64), torch.zeros(1, 6, dtype=torch.bool)):
        assert equivalence._random(like).int().tolist() == [[1, 1, 1, 0, 0, 0]]
    assert equivalence._random(torch.zeros(1, 6, 2)).abs().min() > 0


def test_the_broken_ones_come_first():
    rows = [
        Alone("a", "a.yaml:1", "bitwise", "same", "captured: the same bits", 3),
        Alone("b", "b.yaml:2", "bitwise", "broken", "zeros: 1 from the yardstick", 4, ("5 tokens: no such length",)),
    ]
    assert equivalence.lines(rows) == [
        "2 patches alone: 1 same, 0 rounding, 0 unclear, 1 broken",
        "broken   b (b.yaml:2) (4 inputs): zeros: 1 from the yardstick; refuses 1: 5 tokens: no such length",
        "same     a (a.yaml:1) (3 inputs): captured: the same bits",
    ]


@pytest.mark.slow
def test_no_patch_of_the_demo_is_broken(root):
    sizes = ("height=64", "width=96", "frames=9", "steps=2")
    request = Request("ltx", "configs/ltx_demo.yaml", prompt="A cat", overrides=sizes, paths=(str(root),))
    verdicts = {row.patch: row.verdict for row in equivalence.alone(request)}
    assert "broken" not in verdicts.values()
    assert verdicts["torch.layer-norm"] in ("same", "rounding")


def test_a_patch_that_needs_another_one_is_not_called_broken():
    row = equivalence.Alone(
        "a.patch", "a.yaml:1", "bitwise", "broken", "captured: 0.3 from the yardstick, upstream 1e-6", 4
    )
    alone = equivalence._only_alone(row)
    assert (alone.verdict, alone.cases) == ("unclear", 4)
    assert alone.why == (
        "alone it differs (captured: 0.3 from the yardstick, upstream 1e-6), and the network with all patches does "
        "not: another patch beside it is needed"
    )


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)


def called(layer, x):
    """As an attention processor is called: the module is an argument."""
    return layer.linear(x)


def test_a_module_among_the_arguments_is_widened_and_gets_the_engines_weights(upstream):
    case = Noted("captured", None, (Layer().requires_grad_(False), torch.ones(2, 3)), {})
    output, wide = equivalence._original(called, case)
    assert (output.dtype, wide.dtype) == (torch.float32, torch.float64)
    leaves, structure = pytree.tree_flatten((case.args, case.kwargs))
    bound = equivalence._Bound(called, None, structure, leaves)
    assert [name for name, _ in bound.named_parameters()] == ["arguments.0.linear.weight", "arguments.0.linear.bias"]


class Output(OrderedDict):
    """As diffusers' outputs are: JAX does not look into them."""


def test_what_a_class_of_upstream_holds_is_brought_to_the_host(upstream):
    def output(x):
        return Output(sample=x * 2, rest=(x,))

    leaves, structure = pytree.tree_flatten(((torch.ones(2),), {}))
    bound = equivalence._Bound(output, None, structure, [equivalence._TENSOR])
    tree = bound(*leaves)
    assert type(tree) is dict and type(tree["rest"]) is tuple and tree["sample"].tolist() == [2, 2]
