"""Faults planted in a port, one at a time: the first line of a verification names the module and the patch."""

import re

import pytest
from fakes.plain_pack import PlainPack

from tests.fakes import faults
from tests.fakes.verifying import CONFIGS, small, verifying
from torchport.task import Request
from torchport.verify import recording, yardstick
from torchport.verify.report import Verdict

PLAIN = """
- id: up.swapped
  target: up.model:Block.forward
  replace: faults.py:swapped
  why: a fault
  reported: "none: planted"
  until: never
  fits: {torch: "*"}
  equivalence: {algebraic: "the same, it says"}
"""
SWAPPED = """
import torch


def swapped(self, x):
    return x + self.down(torch.nn.functional.gelu(self.up(x)))
"""


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Recordings of originals."""
    return tmp_path_factory.mktemp("originals")


@pytest.fixture
def verified(root, tmp_path, originals):
    with verifying(originals) as verify:
        yield lambda model, fault=None, **options: verify(small(root, model, fault, tmp_path / "pack"), **options)


def check_named(verified, fault, **options):
    """Checks that the first line names what a fault is in."""
    result = verified(fault.model, fault, **options)
    assert result.verdict is Verdict.OTHER, result.first_line
    assert re.search(fault.names, result.first_line), result.first_line
    assert fault.patch in result.first_line, result.first_line
    assert "faults.yaml:1" in result.first_line
    assert result.exit_code == 1


EVERY = [*faults.HUNYUAN_FAULTS, *faults.COGVIDEOX_FAULTS, *faults.WAN_FAULTS]
EVERY += [fault for fault in faults.NEW_FAULTS if fault.model == "cogvideox"]
DECODERS = [faults.DECODER_FAULT, *faults.WAN_DECODER_FAULTS]


def test_the_module_and_the_patch_of_a_fault_in_a_plain_network_are_named(root, tmp_path, monkeypatch, originals):
    pack = PlainPack(tmp_path, monkeypatch)
    pack.write("patches/up/faults.yaml", PLAIN)
    pack.write("patches/up/faults.py", SWAPPED)
    pack.change("denoise: []", "denoise: [up/faults]")
    plain = Request("plain", "configs/small.yaml", prompt="A cat", checkpoint="tiny", paths=(str(pack.root),))
    try:
        with verifying(originals) as verify:
            result = verify(plain)
    finally:
        pack.close()
    assert result.exit_code == 1 and result.verdict is Verdict.OTHER
    assert re.search(r"blocks\.0\b.*up\.swapped.*faults\.yaml:2", result.first_line), result.first_line
    assert "network" in {unit.kind for unit in result.units}, result.unlike  # its output is compared, too


@pytest.mark.slow
@pytest.mark.parametrize("fault", EVERY, ids=lambda f: f"{f.model}, {f.name}")
def test_the_module_and_the_patch_of_every_fault_are_named(verified, fault):
    check_named(verified, fault)


def test_another_order_of_summation_is_harmless(verified):
    fault = next(fault for fault in faults.HARMLESS if fault.model == "cogvideox")
    result = verified("cogvideox", fault)
    assert result.verdict is not Verdict.OTHER, result.first_line
    assert "): no unit adds more than " in result.first_line
    assert result.exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize("change", faults.UNSEEN, ids=lambda change: f"{change.model}, {change.name}")
def test_a_change_that_no_picture_shows_is_called_harmless_with_its_figures(verified, change):
    result = verified(change.model, change)
    assert result.verdict is Verdict.SAME, result.first_line
    assert change.patch not in result.first_line
    figures = rf"; harmless: .*{change.names}.* adds [\d.e+]+ times the rounding, and moves the output by "
    assert re.search(figures, result.first_line), result.first_line


@pytest.mark.slow
@pytest.mark.parametrize("model", CONFIGS)
def test_a_clean_port_makes_the_same_picture(verified, model):
    result = verified(model)
    assert result.verdict is Verdict.SAME, result.first_line


@pytest.mark.slow
def test_a_fault_of_a_large_video_is_named_from_rows_and_from_modules_recorded_later(verified, monkeypatch, originals):
    for kept in originals.iterdir():
        kept.unlink()
    monkeypatch.setattr(recording, "BORDERS_LIMIT", 0)
    monkeypatch.setattr(yardstick, "LARGE", 2000)
    monkeypatch.setattr(yardstick, "KEPT", 8)
    fault = next(f for f in faults.COGVIDEOX_FAULTS if f.name == "a sign")
    check_named(verified, fault)


@pytest.mark.slow
def test_the_frames_of_the_decoder_are_compared_in_levels(verified):
    result = verified("cogvideox", decodes=True)
    assert result.verdict is Verdict.SAME, result.first_line
    assert 0 <= result.decoded.added <= 1
    assert 0 <= result.decoded.frame < 9
    assert all(png.startswith(b"\x89PNG") for png in result.decoded.pictures.values())
    assert not any("decoder" in line for line in result.unlike)


@pytest.mark.slow
@pytest.mark.parametrize("fault", DECODERS, ids=lambda fault: f"{fault.model}, {fault.name}")
def test_the_module_and_the_patch_of_a_fault_in_the_decoder_are_named(verified, fault):
    check_named(verified, fault, decodes=True)


@pytest.mark.slow
def test_a_floor_is_the_drift_of_another_mesh(verified):
    result = verified("cogvideox", floor="tp=2")
    assert result.floor == "the same port on tp=2"
    assert result.drift
    assert all(0 < row.floor < 1e-3 for row in result.drift)
