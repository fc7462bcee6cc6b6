"""The one factor between modelled and measured seconds."""

import math

import pytest

from torchport.errors import UnknownKeyError, WrongTypeError
from torchport.plan import calibration
from torchport.plan.calibration import Calibration
from torchport.plan.figures import Parts

FOUND = Calibration(factor=0.8, spread_percent=12.34, steps=7, versions={"libtpu": "0.0.51"}, date="2026-01-31")


PUBLISHED = [
    (4.16, 2.97, 0.87, 8.12),
    (0.75, 1.09, 0.37, 2.28),
    (4.16, 2.34, 0.66, 7.29),
    (3.97, 2.34, 0.66, 5.81),
    (0.97, 0.97, 0.56, 2.08),
    (2.91, 3.98, 0.44, 4.59),
    (2.91, 3.98, 0.44, 4.63),
    (1.46, 1.81, 0.38, 2.36),
    (3.46, 3.40, 0.43, 6.29),
    (2.85, 3.40, 0.43, 5.10),
    (1.76, 1.41, 1.34, 3.10),
    (1.56, 1.41, 1.34, 2.95),
]
"""Modelled seconds of attention, everything else and communication, and measured ones, of twelve published steps."""


def parts(attention, other):
    return Parts[float](attention_s=attention, other_s=other, communication_s=0.0)


def test_without_attention_the_factor_is_the_geometric_mean_of_modelled_over_measured():
    factor, spread = calibration.fitted([(0.0, 1.0, 2.0), (0.0, 8.0, 4.0), (0.0, 3.0, 3.0)])
    assert factor == pytest.approx(1.0)
    assert spread == pytest.approx(100 * (math.exp(math.sqrt(2 / 3) * math.log(2)) - 1))
    assert calibration.fitted([(0.0, 3.0, 4.0)]) == (pytest.approx(0.75), pytest.approx(0.0, abs=1e-5))


def test_twelve_published_steps_have_the_factor_that_a_scan_of_their_sum_of_squares_has():
    steps = [(attention, other + moved, measured) for attention, other, moved, measured in PUBLISHED]

    def rms(factor):
        logs = [math.log((attention + rest / factor) / measured) for attention, rest, measured in steps]
        return math.sqrt(sum(log**2 for log in logs) / len(logs))

    factor, spread = calibration.fitted(steps)
    assert factor == pytest.approx(min((n / 1000 for n in range(200, 20_001)), key=rms), abs=1e-3)
    assert factor == pytest.approx(1.626, abs=5e-4) and rms(factor) == pytest.approx(0.167, abs=5e-4)
    assert spread == pytest.approx(100 * (math.exp(rms(factor)) - 1))
    assert all(rms(factor) < rms(factor * near) for near in (1 - 1e-6, 1 + 1e-6))
    assert calibration.fitted(steps[::-1]) == (factor, spread), "the order of the steps says nothing"


def test_of_two_minima_the_lower_is_found():
    """By one sort of step the factor is about 10, by the other about 0.2; more are of the first."""
    steps = [(1.0, 1.0, 6.0)] * 3 + [(0.0, 0.1, 0.01)] * 4
    logs = [n * math.log(400) / 100_000 + math.log(0.05) for n in range(100_001)]

    def squares(log):
        return sum(math.log((a + r / math.exp(log)) / m) ** 2 for a, r, m in steps)

    assert math.log(calibration.fitted(steps)[0]) == pytest.approx(min(logs, key=squares), abs=1e-4)


def test_a_step_shorter_than_its_attention_pulls_the_factor_up_and_a_fit_without_a_rest_has_none_to_find():
    steps = [(1.0, 1.0, 1.5), (1.0, 1.0, 1.4)]
    assert calibration.fitted([*steps, (2.0, 1.0, 1.0)])[0] > calibration.fitted(steps)[0]
    factor, spread = calibration.fitted([(2.0, 1.0, 1.0)])
    assert factor == pytest.approx(calibration.RANGE[1]) and spread == pytest.approx(100 * (2.05 - 1))
    assert calibration.fitted([(2.0, 0.0, 1.0)]) == (pytest.approx(1.0), pytest.approx(100.0))


def test_all_but_attention_is_divided_by_the_factor():
    factor, _ = calibration.fitted([(2.0, 2.0, 6.0), (3.0, 3.0, 9.0)])
    found = FOUND.model_copy(update={"factor": factor})
    assert factor == pytest.approx(0.5)
    assert calibration.calibrated(parts(2.0, 2.0), found) == pytest.approx(6.0), "what was fitted comes out as measured"
    assert calibration.calibrated(parts(2.0, 0.0), found) == 2.0, "attention is left as it is"
    assert calibration.calibrated(parts(2.0, 0.5), None) == 2.5


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
    said = "calibrated with 7 published steps, factor 0.8 for all but attention, spread ±12 %"
    assert calibration.said(FOUND, {"libtpu": "0.0.51", "jax": "1"}) == said
    assert calibration.said(FOUND, {"libtpu": "0.0.52"}) == f"{said} (with libtpu 0.0.51)"
    assert calibration.said(None, {}) == "uncalibrated"


def test_the_shipped_factor_can_be_read():
    assert 0.3 < calibration.shipped().factor < 3
    assert calibration.shipped().steps >= 4
