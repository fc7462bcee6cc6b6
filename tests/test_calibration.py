"""The one factor between modelled and measured seconds."""

import math

import pytest

from torchport import calibration
from torchport.calibration import Calibration
from torchport.errors import UnknownKeyError, WrongTypeError

FOUND = Calibration(factor=0.8, spread_percent=12.34, steps=7, versions={"libtpu": "0.0.51"}, date="2026-01-31")


def test_the_factor_is_the_geometric_mean_of_modelled_over_measured():
    factor, spread = calibration.fitted([(1.0, 2.0), (8.0, 4.0), (3.0, 3.0)])
    assert factor == pytest.approx(1.0)
    assert spread == pytest.approx(100 * (math.exp(math.log(2)) - 1))
    assert calibration.fitted([(3.0, 4.0)]) == (pytest.approx(0.75), 0.0)


def test_a_model_is_divided_by_the_factor():
    factor, _ = calibration.fitted([(2.0, 4.0), (3.0, 6.0)])
    found = FOUND.model_copy(update={"factor": factor})
    assert calibration.calibrated(2.0, found) == pytest.approx(4.0), "what was fitted comes out as it was measured"
    assert calibration.calibrated(2.0, None) == 2.0


def test_a_calibration_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "calibration.yaml"
    calibration.write(file, FOUND)
    assert calibration.read(file) == FOUND.model_copy(update={"spread_percent": 12.3})


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("factor: 0.8\nsteps: 7\nspread: 3\n", UnknownKeyError, "calibration.yaml:3: Unknown key 'spread'."),
        ("factor: 0\nsteps: 7\n", WrongTypeError, "calibration.yaml:1: 'factor' is 0 (a number). It must be greater"),
    ],
)
def test_a_calibration_with_a_mistake_is_refused_with_its_line(tmp_path, text, kind, said):
    file = tmp_path / "calibration.yaml"
    file.write_text(text + 'spread_percent: 1\nversions: {}\ndate: "2026-01-31"\n')
    with pytest.raises(kind) as caught:
        calibration.read(file)
    assert str(caught.value).startswith(said)


def test_a_plan_says_what_it_was_calibrated_with():
    said = "calibrated with 7 published steps, factor 0.8, spread ±12 %"
    assert calibration.said(FOUND, {"libtpu": "0.0.51", "jax": "1"}) == said
    assert calibration.said(FOUND, {"libtpu": "0.0.52"}) == f"{said} (with libtpu 0.0.51)"
    assert calibration.said(None, {}) == "uncalibrated"


def test_the_shipped_factor_can_be_read():
    assert 0.3 < calibration.shipped().factor < 3
    assert calibration.shipped().steps >= 4
