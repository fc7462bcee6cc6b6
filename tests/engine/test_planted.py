"""Faults in torchax's table of lowerings, one at a time: the command that makes the table of operators finds each."""

import contextlib
import dataclasses
import re
import sys
from unittest import mock

import conformance as tool
import pytest

from torchport.engine import conformance

FAULTS = {
    "aten.relu.default": ("relu", lambda right: lambda x: right(x) + 1),
    "aten.amax.default": ("amax", lambda right: lambda x, dim=None, keepdim=False: -right(-x, dim, keepdim) + 1),
    "aten.bitwise_and.Tensor": ("bitwise_and", lambda right: lambda x, y: x | y),
    "aten._softmax.default": ("softmax", lambda right: lambda *args: right(*args) * 1.001),
    "aten.cat.default": ("cat", lambda right: lambda tensors, dim=0: right(tensors[::-1], dim)),
    "aten.gelu.default": ("gelu", lambda right: lambda x, **options: right(x)),
    "aten.clamp.default": ("generated", lambda right: lambda x, low=None, high=None: right(x, low)),
    "aten.index_select.default": ("index_select", lambda right: lambda x, dim, index: right(x, dim, index[::-1])),
    "aten.roll.default": ("roll", lambda right: lambda x, shifts, dims=(): right(x, [-n for n in shifts], dims)),
    "aten.logical_not.default": ("logical_not", lambda right: lambda x: right(right(x))),
}


@contextlib.contextmanager
def planted(name, fault, in_force=tool.engine_in_force):
    """The engine with a lowering made wrong."""
    with in_force() as patched:
        import torch
        import torchax

        lowerings = torchax.default_env()._ops
        _, packet, overload = name.split(".")
        function = getattr(getattr(torch.ops.aten, packet), overload)
        key = function if function in lowerings else function.overloadpacket
        wrong = dataclasses.replace(lowerings[key], func=fault(lowerings[key].func))
        with mock.patch.dict(lowerings, {key: wrong}):
            yield patched


class InThisProcess:
    """Stands in the place of the pool: the fault is in this process."""

    map = staticmethod(map)

    def __init__(self, *args):
        """Takes what the pool takes."""

    def __enter__(self):
        return self

    def __exit__(self, *args):
        return None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAULTS)
def test_the_command_finds_an_operator_that_was_made_wrong(name, monkeypatch, capsys):
    samples, fault = FAULTS[name]
    assert not any(row.what for row in conformance.read().operators[name].rows)
    monkeypatch.setattr(tool.concurrent.futures, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setattr(tool, "engine_in_force", lambda: planted(name, fault))
    chosen = ["--operators", f"^{re.escape(name)}$", "--samples", rf"(^|\.){samples}$"]
    monkeypatch.setattr(sys, "argv", ["conformance.py", *chosen])
    assert tool.main() == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith(name)]
