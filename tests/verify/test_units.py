"""Units whose error the network's output does not show, on a small network whose output is its first token."""

import dataclasses

import pytest
import torch

from torchport.verify import causes
from torchport.verify.borders import Border, Copies, Pass, outer_paths
from torchport.verify.facts import Unit, Verdict
from torchport.verify.recording import Call
from torchport.verify.units import Measured, Units, looked_into

X = torch.linspace(-1, 1, 12).reshape(3, 4)
ROUNDING = 1e-6


class Linear(torch.nn.Linear):
    """Adds an error to some tokens of its output."""

    error = 0.0
    tokens = slice(None)

    def forward(self, x):
        x = super().forward(x)
        x[self.tokens] += self.error
        return x


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inlet, self.middle, self.outlet = Linear(4, 4), Linear(4, 4), Linear(4, 4)

    def forward(self, x):
        return self.outlet(self.middle(self.inlet(x)))[:1]


class HostPort:
    """A port in PyTorch, with errors in some of its modules: by path, the error and the tokens that have it."""

    def __init__(self, **errors):
        torch.manual_seed(0)
        self.module = Network().requires_grad_(False)
        for path, (error, tokens) in errors.items():
            module = self.module.get_submodule(path)
            module.error, module.tokens = error, tokens
        self.outer = outer_paths(self.module)

    def called(self, inputs, paths, given, skipped=()):
        watch = Pass(self.module, paths, given, lambda new, like: new, Copies(), skipped)
        with watch.watching():
            output = self.module(**inputs)
        return output, watch


def recorded():
    """A call of the original whose yardstick is the same: its rounding is one of the dtype."""
    port = HostPort()
    output, watch = port.called({"x": X}, ["", *port.outer], {})
    return Call("denoise", "net", 0, 0, {"x": X}, output, output, watch.noted, watch.noted, {})


def verdicts(port, is_over=False):
    return {
        one.unit.path: one.unit for one in looked_into(Units(port, recorded()), is_over) if one.unit.kind == "block"
    }


LAST, ALL = slice(2, 3), slice(None)


def test_an_error_in_tokens_that_nobody_sees_is_harmless():
    unit = verdicts(HostPort(inlet=(1.0, LAST)))["inlet"]
    assert unit.ratio > 1e5
    assert unit.effect == 0
    assert unit.is_harmless


def test_what_a_forward_computes_itself_is_named_by_the_module_that_it_calls_next():
    names = [one.unit.name for one in looked_into(Units(HostPort(), recorded()), False)]
    inside = [name for path in ("inlet", "middle", "outlet") for name in (f"net.forward before {path}", f"net.{path}")]
    assert names == [*inside, "net.forward at its end"]


def test_a_harmless_error_before_a_fault_is_no_fault_and_one_behind_it_is_unclear():
    units = verdicts(HostPort(inlet=(1.0, LAST), middle=(1.0, ALL), outlet=(1.0, LAST)))
    assert [unit.verdict for unit in units.values()] == [Verdict.SAME, Verdict.OTHER, Verdict.UNCLEAR]
    assert units["middle"].effect > 1e5
    assert units["outlet"].effect is None


def test_no_unit_of_a_call_after_a_fault_is_a_fault():
    units = verdicts(HostPort(inlet=(1.0, LAST), middle=(1.0, ALL)), is_over=True)
    assert [unit.verdict for unit in units.values()] == [Verdict.UNCLEAR, Verdict.UNCLEAR, Verdict.SAME]


@pytest.mark.parametrize(("tokens", "is_cured"), [(LAST, True), (ALL, False)])
def test_what_is_left_without_a_patch_is_judged_by_what_the_output_shows(tokens, is_cured):
    border = Border("inlet", 0, "out")
    unit = Unit(0, 0, "net", "inlet", 0, "block", "net.inlet", ROUNDING, 5.0, effect=70.0)
    measured = Measured(unit, border, "inlet", forced=("", "inlet", "middle", "outlet"))
    added = causes._added(HostPort(inlet=(0.5, tokens)), recorded(), measured)
    assert causes._is_cured(unit.rounding, added) is is_cured
    unmeasured = dataclasses.replace(measured, unit=dataclasses.replace(unit, effect=None))
    assert not causes._is_cured(unit.rounding, causes._added(HostPort(inlet=(0.5, tokens)), recorded(), unmeasured))
