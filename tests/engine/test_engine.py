"""What an exception of the engine means, and what is a tensor of it; nothing here imports it."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy
import pytest
import torch

from torchport import engine


@pytest.fixture
def tensors(monkeypatch):
    """Stands in the place of torchax's module of tensors."""
    module = types.ModuleType("torchax.tensor")
    module.Tensor = type("Tensor", (), {})
    module.OperatorNotFound = type("OperatorNotFound", (Exception,), {})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.fixture
def not_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "torchax.tensor", raising=False)


def test_a_traced_tensor_is_the_engines(tensors):
    assert engine.is_traced(tensors.Tensor()) is True
    assert engine.is_traced(torch.ones(1)) is False


@pytest.mark.usefixtures("not_imported")
def test_before_the_engine_is_imported_nothing_is_of_it():
    assert engine.is_traced(torch.ones(1)) is False
    assert engine.missing_operator(KeyError("aten::add.Tensor")) is None


@pytest.mark.parametrize(
    ("text", "operator"),
    [
        ("Operator with name aten::special_airy_ai has no lowering", "torch.ops.aten:special_airy_ai.default"),
        ("Operator with name aten::add.Tensor has no lowering", "torch.ops.aten:add.Tensor"),
        ("Operator with name <function f> has no lowering", ""),
    ],
)
def test_a_missing_operator_is_named_with_its_overload(tensors, text, operator):
    assert engine.missing_operator(tensors.OperatorNotFound(text)) == operator
    assert engine.missing_operator(RuntimeError(text)) is None


def test_a_tensor_of_the_host_is_told_by_the_text_of_two_kinds_of_exceptions():
    texts = "Expect a Tensor or a View but got <class 'torch.Tensor'>", "Tensor on device cpu is not on the expected"
    assert engine.is_host_tensor(AssertionError(texts[0]))
    assert engine.is_host_tensor(RuntimeError(f"{texts[1]} device meta!"))
    assert not engine.is_host_tensor(ValueError(texts[0]))
    assert not engine.is_host_tensor(AssertionError("no"))


TRACED = {
    "bool": lambda x: bool(x > 0),
    "float": lambda x: float(x),
    "array": lambda x: numpy.asarray(x),
    "index": lambda x: [1, 2][x.astype(int)],
    "boolean index": lambda x: jnp.ones(2)[jnp.stack([x > 0, x > 1])],
}


@pytest.mark.parametrize("name", TRACED)
def test_what_jax_says_where_a_value_is_asked_for_is_known(name):
    with pytest.raises(Exception) as caught:
        jax.jit(TRACED[name])(1.0)
    assert engine.is_traced_value(caught.value)


def test_what_torch_says_where_a_value_of_meta_is_asked_for_is_known():
    with pytest.raises(RuntimeError) as caught:
        torch.ones(1, device="meta").item()
    assert engine.is_traced_value(caught.value)


@pytest.mark.parametrize("error", [TypeError("no such argument"), KeyError("a meta tensor"), IndexError("1")])
def test_another_exception_says_nothing_of_a_value(error):
    assert not engine.is_traced_value(error)
