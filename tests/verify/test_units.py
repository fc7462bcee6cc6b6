"""Units whose error the network's output does not show, on a small network whose output is its first token."""

import dataclasses
import functools

import pytest
import torch

from torchport.stages.recorder import unit_paths
from torchport.verify import verification, yardstick
from torchport.verify.borders import Border, Copies, WatchedCall
from torchport.verify.recording import RecordedCall
from torchport.verify.report import Unit, Verdict
from torchport.verify.units import MeasuredUnit, Units, measured_units, outputs_of

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


class Mixed(Linear):
    """Adds the last token to all others: a fault that shows what nobody should see."""

    def forward(self, x):
        return super().forward(x) + x[-1:]


class HostPort:
    """A port in PyTorch, with errors in some of its modules: by path, the error and the tokens that have it."""

    def __init__(self, **errors):
        torch.manual_seed(0)
        self.module = Network().requires_grad_(False)
        for path, (error, tokens) in errors.items():
            module = self.module.get_submodule(path)
            module.error, module.tokens = error, tokens
        self.units = unit_paths(self.module)

    def called(self, inputs, paths, replacements, skipped=(), whole=()):
        watch = WatchedCall(self.module, paths, replacements, lambda new, like: new, Copies(), skipped, whole=whole)
        with watch.watching():
            output = self.module(**inputs)
        return output, watch


def recorded():
    """A call of the original whose yardstick is the same: its rounding is one of the dtype."""
    port = HostPort()
    output, watch = port.called({"x": X}, ["", *port.units], {}, whole=None)
    return RecordedCall("denoise", "net", 0, 0, {"x": X}, output, output, watch.observed, watch.observed, {})


def verdicts(port, has_fault_before=False, call=None, outputs=None):
    units = Units(port, call or recorded(), outputs)
    return {one.unit.path: one.unit for one in measured_units(units, has_fault_before) if one.unit.kind == "block"}


LAST, ALL = slice(2, 3), slice(None)


def test_an_error_in_tokens_that_nobody_sees_is_harmless():
    unit = verdicts(HostPort(inlet=(1.0, LAST)))["inlet"]
    assert unit.ratio > 1e5
    assert unit.effect == 0
    assert unit.is_harmless


def test_what_a_forward_computes_itself_is_named_by_the_module_that_it_calls_next():
    names = [one.unit.name for one in measured_units(Units(HostPort(), recorded()), False)]
    inside = [name for path in ("inlet", "middle", "outlet") for name in (f"net.forward before {path}", f"net.{path}")]
    assert names == [*inside, "net.forward at its end"]


def test_a_harmless_error_before_a_fault_is_no_fault_and_one_behind_it_is_unclear():
    units = verdicts(HostPort(inlet=(1.0, LAST), middle=(1.0, ALL), outlet=(1.0, LAST)))
    assert [unit.verdict for unit in units.values()] == [Verdict.SAME, Verdict.OTHER, Verdict.UNCLEAR]
    assert units["middle"].effect > 1e5
    assert units["outlet"].effect is None


def test_no_unit_of_a_call_after_a_fault_is_a_fault():
    units = verdicts(HostPort(inlet=(1.0, LAST), middle=(1.0, ALL)), has_fault_before=True)
    assert [unit.verdict for unit in units.values()] == [Verdict.UNCLEAR, Verdict.UNCLEAR, Verdict.SAME]


@pytest.mark.parametrize(("tokens", "is_cured"), [(LAST, True), (ALL, False)])
def test_what_is_left_without_a_patch_is_judged_by_what_the_output_shows(tokens, is_cured):
    border = Border("inlet", 0, "out")
    unit = Unit(0, 0, "net", "inlet", 0, "block", "net.inlet", ROUNDING, 5.0, effect=70.0)
    measured = MeasuredUnit(unit, border, "inlet", forced=("", "inlet", "middle", "outlet"))
    added = verification._error_at_border(HostPort(inlet=(0.5, tokens)), recorded(), measured)
    assert verification._is_cured(unit.rounding, added) is is_cured
    unmeasured = dataclasses.replace(measured, unit=dataclasses.replace(unit, effect=None))
    assert not verification._is_cured(
        unit.rounding, verification._error_at_border(HostPort(inlet=(0.5, tokens)), recorded(), unmeasured)
    )


def leaking():
    """A port with an error in the last token after `inlet`, which only its fault in `middle` shows."""
    port = HostPort(inlet=(1.0, LAST))
    port.module.middle.__class__ = Mixed
    return port


def test_an_error_that_only_a_later_fault_shows_is_harmless_in_the_original():
    units = verdicts(leaking(), outputs=functools.partial(outputs_of, HostPort().called, recorded()))
    assert [unit.verdict for unit in units.values()] == [Verdict.SAME, Verdict.OTHER, Verdict.SAME]
    assert units["inlet"].effect == 0
    assert verdicts(leaking())["inlet"].verdict is Verdict.OTHER  # beside a capture, the port itself shows effects


def lucky(error):
    """A call of an original that is exact in the end, though each of its blocks has an error: they cancel."""
    call = recorded()
    outer = {border: call.values[border] for border in call.values}
    for path in ("inlet", "middle"):
        border = Border(path, 0, "out")
        outer[border] = outer[border] + error
    return dataclasses.replace(call, outer=outer)


def test_the_rounding_of_a_network_is_at_least_what_those_of_its_blocks_make_together():
    units = Units(HostPort(), lucky(1e-5))
    before = units.rounding
    units.estimate_rounding(10 * before)
    after = units.rounding
    assert 10 * before < after < 1e-4
    units.estimate_rounding(10 * after)
    assert units.rounding == after  # it is estimated once


@pytest.mark.parametrize("ratio", [1.9, 101])
def test_the_rounding_is_left_where_no_verdict_depends_on_it(ratio):
    units = Units(HostPort(), lucky(1e-5))
    before = units.rounding
    units.estimate_rounding(ratio * before)
    assert units.rounding == before


def test_a_fault_is_no_rounding_though_the_original_was_lucky():
    units = verdicts(HostPort(middle=(1e-3, ALL)), call=lucky(1e-6))
    assert units["middle"].verdict is Verdict.OTHER


def test_an_error_that_cannot_be_shown_in_the_original_is_judged_by_itself():
    call, border = recorded(), Border("inlet", 0, "out")
    port = HostPort(inlet=(1.0, LAST))
    paired = {b: (value, None) if b == border else value for b, value in call.values.items()}
    units = Units(port, dataclasses.replace(call, values=paired))
    one = MeasuredUnit(Unit(0, 0, "net", "inlet", 0, "block", "net.inlet", ROUNDING, 5.0), border, "inlet")
    units.forced_call = port.called({"x": X}, ["", *port.units], {})[1]
    assert units.effects([one]) == [None]


@pytest.fixture
def sampling(monkeypatch):
    """Tensors of more than 4 numbers are compared in 2 of their rows: the first and the last."""
    monkeypatch.setattr(yardstick, "LARGE", 4)
    monkeypatch.setattr(yardstick, "KEPT", 2)


def large():
    """A call whose yardstick's values are kept in rows, and the original's whole, as in a recording of a long video."""
    call = recorded()
    outer = {
        border: yardstick.sampled(value) if border.side == "out" else value for border, value in call.outer.items()
    }
    assert any(yardstick.is_sampled(value) for value in outer.values())
    return dataclasses.replace(call, outer=outer)


@pytest.mark.parametrize("tokens", [LAST, ALL])
def test_a_fault_is_found_in_rows_and_its_effect_is_measured_whole(sampling, tokens):
    units = verdicts(HostPort(middle=(0.5, tokens)), call=large())
    expected = verdicts(HostPort(middle=(0.5, tokens)))
    assert {path: unit.verdict for path, unit in units.items()} == {path: u.verdict for path, u in expected.items()}
    assert units["middle"].effect == pytest.approx(expected["middle"].effect)
    assert units["middle"].effect is not None


def test_an_estimate_of_the_rounding_takes_no_rows_for_the_whole(sampling):
    call = large()
    units = Units(HostPort(), call)
    before = units.rounding
    units.estimate_rounding(10 * before)
    assert units.rounding == before
