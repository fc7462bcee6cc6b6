"""The one factor between modelled and measured seconds."""

import pytest

from torchport.errors import UnknownKeyError, WrongTypeError
from torchport.plan import step_time
from torchport.plan.figures import Parts
from torchport.plan.step_time import Calibration

FOUND = Calibration(factor=0.8, spread_percent=12.34, steps=7, versions={"libtpu": "0.0.51"}, date="2026-01-31")


def parts(attention, other, products=0.0):
    return Parts[float](attention_s=attention, other_s=other, products_s=products, communication_s=0.0)


def test_all_but_attention_and_products_is_divided_by_the_factor():
    half = FOUND.model_copy(update={"factor": 0.5})
    assert step_time.calibrated(parts(2.0, 2.0), half) == pytest.approx(6.0)
    assert step_time.calibrated(parts(2.0, 0.0), half) == 2.0, "attention is left as it is"
    assert step_time.calibrated(parts(2.0, 2.0, 1.5), half) == pytest.approx(2.0 + 1.5 + 1.0)
    assert step_time.calibrated(parts(2.0, 0.5, 0.25), None) == 2.5


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
        step_time.read_calibration(file)
    assert str(caught.value).startswith(said)


def test_a_plan_says_what_it_was_calibrated_with():
    said = "calibrated with 7 published steps, factor 0.8 for all but attention and products, spread ±12 %"
    assert step_time.calibration_words(FOUND, {"libtpu": "0.0.51", "jax": "1"}) == said
    assert step_time.calibration_words(FOUND, {"libtpu": "0.0.52"}) == f"{said} (with libtpu 0.0.51)"
    assert step_time.calibration_words(None, {}) == "uncalibrated"


def test_the_shipped_factor_can_be_read():
    assert 0.3 < step_time.shipped_calibration().factor < 3
    assert step_time.shipped_calibration().steps >= 4
