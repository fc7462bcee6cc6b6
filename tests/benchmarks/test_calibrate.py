"""Published step times, their models, the factor between, and the order in which they come out."""

import math

import pytest
from fakes import plans as fakes

from torchport.errors import TopologyError, UnknownKeyError, WrongTypeError
from torchport.plan import step_time
from torchport.plan.figures import JobPlan
from torchport.task import accept

KERNELS = """\
kernels:
  splash: {title: stock, implementation: splash}
  own: {title: own, implementation: splash_transposed, bounded: true, steady_percent: {v6e: 32.0}}
  ring: {title: ring}
steps:
"""


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


def step(name, seconds, way="card: {model: hunyuan, config: configs/720p.yaml, strategy: tp}", **fields):
    given = {"kernel": "splash", "machine": '"v6e:2x4"', "mesh": "{tp: 8}", "strategy": "tp", "batch": 2, **fields}
    given.setdefault("frames", 121)
    size = "model: M, height: 720, width: 1280, source: S"
    told = ", ".join(f"{key}: {value}" for key, value in given.items())
    return f"  - {{name: {name}, {size}, step_s: {seconds}, {told}, {way}}}\n"


@pytest.fixture
def calibrate(root, monkeypatch):
    """benchmarks/calibrate.py as a module."""
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    import calibrate

    return calibrate


@pytest.fixture
def published(tmp_path):
    """Writes a file of published step times, and returns its path."""

    def write(*steps):
        file = tmp_path / "published.yaml"
        file.write_text(KERNELS + "".join(steps))
        return file

    return write


@pytest.fixture
def plans(calibrate, monkeypatch):
    """Has every job planned in no time: `plans[frames]` is its seconds of attention, everything else and moving."""
    found, asked = {}, []

    def plan(request, topology, bounded, stages):
        given = dict(override.split("=", 1) for override in request.overrides)
        asked.append((given, bounded))
        outcome = found[given["strategy"]]
        if isinstance(outcome, Exception):
            raise outcome
        names = ("attention_s", "other_s", "communication_s", "uncalibrated_s", "model_s")
        seconds = (
            dict.fromkeys(names) if not outcome else dict.fromkeys(names, 0.0) | dict(zip(names, outcome, strict=False))
        )
        products = outcome[1] / 4 if outcome else None
        step = seconds | {"products_s": products, "floor_s": 1.0, "flops": 1}
        device, call = fakes.memory(peak_bytes=2**35), fakes.attention(peak_percent=64.0)
        stage = fakes.stage(fits=bool(outcome), step=step, attention=call, per_device=device)
        return JobPlan.model_validate(fakes.plan(denoise=stage))

    monkeypatch.setattr(calibrate, "plan", plan)
    found["asked"] = asked
    return found


def way(strategy):
    return f"card: {{model: hunyuan, config: configs/720p.yaml, strategy: {strategy}}}"


def test_the_published_steps_are_complete(calibrate):
    """Every kernel, card and strategy that a step names is there, and its mesh fits."""
    found, _ = calibrate.read(calibrate.STEPS)
    modelled = [one for one in found.steps if one.left_out is None]
    assert len(found.steps) >= 30 and len(modelled) >= 10
    assert all(not one.trusted for one in found.steps if one.name.startswith("hunyuan-v6e8-first"))
    for one in modelled:
        task = accept(calibrate.request_of(one, found.kernels[one.kernel]), dry=True)
        assert task.family.batch(task.settings.guidance_scale) == one.batch
        chips = found.kernels[one.kernel].steady_percent
        assert not chips or one.machine.partition(":")[0] in chips


def test_without_attention_the_factor_is_the_geometric_mean_of_modelled_over_measured(calibrate):
    factor, spread = calibrate.fitted([(0.0, 1.0, 2.0), (0.0, 8.0, 4.0), (0.0, 3.0, 3.0)])
    assert factor == pytest.approx(1.0)
    assert spread == pytest.approx(100 * (math.exp(math.sqrt(2 / 3) * math.log(2)) - 1))
    assert calibrate.fitted([(0.0, 3.0, 4.0)]) == (pytest.approx(0.75), pytest.approx(0.0, abs=1e-5))


def test_twelve_published_steps_have_the_factor_that_a_scan_of_their_sum_of_squares_has(calibrate):
    steps = [(attention, other + moved, measured) for attention, other, moved, measured in PUBLISHED]

    def rms(factor):
        logs = [math.log((attention + rest / factor) / measured) for attention, rest, measured in steps]
        return math.sqrt(sum(log**2 for log in logs) / len(logs))

    factor, spread = calibrate.fitted(steps)
    assert factor == pytest.approx(min((n / 1000 for n in range(200, 20_001)), key=rms), abs=1e-3)
    assert factor == pytest.approx(1.626, abs=5e-4) and rms(factor) == pytest.approx(0.167, abs=5e-4)
    assert spread == pytest.approx(100 * (math.exp(rms(factor)) - 1))
    assert all(rms(factor) < rms(factor * near) for near in (1 - 1e-6, 1 + 1e-6))
    assert calibrate.fitted(steps[::-1]) == (factor, spread), "the order of the steps says nothing"


def test_of_two_minima_the_lower_is_found(calibrate):
    """By one sort of step the factor is about 10, by the other about 0.2; more are of the first."""
    steps = [(1.0, 1.0, 6.0)] * 3 + [(0.0, 0.1, 0.01)] * 4
    logs = [n * math.log(400) / 100_000 + math.log(0.05) for n in range(100_001)]

    def squares(log):
        return sum(math.log((a + r / math.exp(log)) / m) ** 2 for a, r, m in steps)

    assert math.log(calibrate.fitted(steps)[0]) == pytest.approx(min(logs, key=squares), abs=1e-4)


def test_a_step_shorter_than_its_attention_pulls_the_factor_up_and_a_fit_without_a_rest_has_none_to_find(calibrate):
    steps = [(1.0, 1.0, 1.5), (1.0, 1.0, 1.4)]
    assert calibrate.fitted([*steps, (2.0, 1.0, 1.0)])[0] > calibrate.fitted(steps)[0]
    factor, spread = calibrate.fitted([(2.0, 1.0, 1.0)])
    assert factor == pytest.approx(calibrate.RANGE[1]) and spread == pytest.approx(100 * (2.05 - 1))
    assert calibrate.fitted([(2.0, 0.0, 1.0)]) == (pytest.approx(1.0), pytest.approx(100.0))


def test_one_factor_is_fitted_to_all_steps_together(calibrate, published, plans):
    plans |= {"a": (3.0, 1.0, 0.0), "b": (1.0, 0.5, 0.5)}
    path = published(
        step("first", 8.0, way("a")),
        step("second", 2.0, way("b")),
        step("third", 9, "left_out: no card", kernel="ring"),
    )
    outcome = calibrate.calibrate(path, 2)
    assert [one.seconds for one in outcome.models] == [4.0, 2.0]
    factor, spread = calibrate.fitted([(3.25, 0.75, 8.0), (1.125, 0.875, 2.0)])
    assert (outcome.calibration.factor, outcome.calibration.spread_percent, outcome.calibration.steps) == (
        factor,
        spread,
        2,
    )
    models = [pytest.approx(3.25 + 0.75 / factor), pytest.approx(1.125 + (0.375 + 0.5) / factor)]
    assert [one.model_s(outcome.calibration) for one in outcome.models] == models
    assert "left out: third, 9 s: no card" in calibrate.lines(outcome)
    given, bounded = plans["asked"][0]
    assert given["mesh"] == "{tp: 8}" and given["attention"] == "splash" and given["machine"] == "v6e:2x4"
    assert not bounded and "guidance_scale" not in given


def test_a_kernels_own_share_of_peak_takes_the_place_of_the_tables(calibrate, published, plans):
    plans |= {"a": (3.0, 1.0, 0.5)}
    path = published(step("one", 8.0, way("a"), kernel="own", batch=1))
    [found] = calibrate.calibrate(path, 1).models
    assert found.parts.attention_s == pytest.approx(3.0 * 64 / 32) and found.seconds == pytest.approx(7.5)
    given, bounded = plans["asked"][0]
    assert bounded and given["attention"] == "splash_transposed" and given["guidance_scale"] == "1.0"


def test_steps_with_one_program_share_its_compilation(calibrate, published, plans):
    plans |= {"a": (3.0, 1.0, 0.5)}
    path = published(step("one", 4.0, way("a")), step("two", 5.0, way("a")), step("three", 6.0, way("a"), frames=49))
    assert [one.step.name for one in calibrate.calibrate(path, 1).models] == ["one", "two", "three"]
    assert [given["frames"] for given, _ in plans["asked"]] == ["121", "49"]


def test_pairs_that_are_apart_on_one_kernel_have_an_order_and_the_wrong_ones_are_printed(calibrate, published, plans):
    plans |= {"a": (3.0, 0, 0), "b": (2.0, 0, 0), "c": (1.0, 0, 0), "d": (9.0, 0, 0)}
    path = published(
        step("slow", 4.0, way("a")),
        step("fast", 2.0, way("b")),
        step("near", 2.2, way("c")),
        step("other", 1.0, way("d"), kernel="own"),
    )
    outcome = calibrate.calibrate(path, 1)
    pairs = calibrate.pairs(outcome.models, outcome.calibration)
    found = {(pair.faster.step.name, pair.slower.step.name): pair.right for pair in pairs}
    assert found == {("fast", "slow"): True, ("near", "slow"): True}, "10 % is not apart, and one kernel not another"
    plans["a"] = (1.5, 0, 0)
    text = calibrate.lines(calibrate.calibrate(path, 1))
    assert "2 pairs of one kernel are more than 15 % apart: 1 in their order, 1 not" in text
    assert text[-1] == ("  misordered: fast (measured 2 s, model 2.00 s) before slow (measured 4 s, model 1.50 s)")


def test_the_order_is_that_of_the_models_with_their_factor(calibrate, published, plans):
    plans |= {"a": (3.0, 1.0, 0), "b": (1.0, 3.5, 0)}
    path = published(step("slow", 3.3, way("a")), step("fast", 2.2, way("b")))
    outcome = calibrate.calibrate(path, 1)
    slow, fast = outcome.models
    assert slow.seconds < fast.seconds and slow.model_s(outcome.calibration) > fast.model_s(outcome.calibration)
    assert [pair.right for pair in calibrate.pairs(outcome.models, outcome.calibration)] == [True]


def test_a_step_that_cannot_be_modelled_is_a_line_and_no_factor_is_written(
    calibrate, published, plans, tmp_path, monkeypatch, capsys
):
    stopped = TopologyError("plan v6e:2x4", "The compiler refuses it", "Plan another size")
    plans |= {"a": (3.0, 1.0, 0.0), "b": stopped, "c": ()}
    published(step("good", 4.0, way("a")), step("bad", 4.0, way("b")), step("large", 4.0, way("c")))
    monkeypatch.setattr(calibrate, "STEPS", tmp_path / "published.yaml")
    monkeypatch.setattr(step_time, "CALIBRATION", tmp_path / "calibration.yaml")
    monkeypatch.setattr("sys.argv", ["calibrate.py", "--jobs", "1", "--write"])
    with pytest.raises(SystemExit, match="No factor is written"):
        calibrate.main()
    text = capsys.readouterr().out
    assert "not modelled: bad, plan v6e:2x4: The compiler refuses it. Plan another size." in text
    assert "not modelled: large, published.yaml:8: Its program takes 32.0 GiB on a device." in text
    assert not step_time.CALIBRATION.exists()
    published(step("good", 4.0, way("a")))
    calibrate.main()
    assert step_time.read_calibration(step_time.CALIBRATION).factor == 1.0


def test_a_calibration_reads_as_text(calibrate, published, plans):
    plans |= {"a": (3.0, 1.0, 0.0), "b": (1.0, 0.5, 0.5), "c": (2.0, 1.0, 0.0), "d": (2.0, 0.5, 0.0)}
    path = published(step("first", 8.0, way("a")), step("second", 2.0, way("b")), step("third", 4.0, way("d")))
    text = calibrate.lines(calibrate.calibrate(path, 1))
    assert " ".join(text[1].split()) == "first 8.00 s 4.00 s (3.00 + 0.25 + 0.75 + 0.00 ) 0.50 4.85 s 0.61"
    assert " ".join(text[2].split()) == "second 2.00 s 2.00 s (1.00 + 0.12 + 0.38 + 0.50 ) 1.00 2.99 s 1.49"
    assert text[4] == (
        "factor 0.469 for all but attention and products (least squares of 3), spread ±51 %; the worst is first, "
        "-39 % after the factor"
    )
    (page := path.with_name("page.md")).write_text(f"{calibrate.BEGIN}\nold\n{calibrate.END}\n")
    calibrate.write_page(page, calibrate.calibrate(path, 1))
    assert "| splash | 8 | 4.85 | -39 % | S |" in page.read_text() and "old" not in page.read_text()
    text = calibrate.lines(calibrate.calibrate(published(step("short", 1.0, way("c"))), 1))
    assert text[1].endswith(" s   2.29, shorter than its attention alone")
    assert text[2].startswith(
        "factor 20.000, the end of the range searched, for all but attention and products (least "
    )


@pytest.mark.parametrize(
    ("lines", "kind", "said"),
    [
        ([step("a", 1, way("tp"), speed=3)], UnknownKeyError, "published.yaml:6: Unknown key 'steps.0.speed'."),
        ([step("a", 1, way("tp"), kernel="none")], WrongTypeError, "There is no kernel 'none', which 'a' names"),
        ([step("a", 1, way("tp"), kernel="ring")], WrongTypeError, "'ring' has no implementation: 'a' must have"),
        ([step("a", 1, way("tp") + ", left_out: no")], WrongTypeError, "It must have one of card and left_out,"),
        ([step("a", 1, way("tp"), trusted="false")], WrongTypeError, "What is not trusted is not modelled: it must"),
        ([step("a", 1, way("tp"))] * 2, WrongTypeError, "Two steps are called 'a'"),
        (
            [step("a", 1, way("tp"), kernel="own", machine='"v5e:2x4"')],
            WrongTypeError,
            "'own' has no steady_percent for v5e, the chip of 'a'",
        ),
        ([step("a", -1, way("tp"))], WrongTypeError, "published.yaml:6: 'steps.0.step_s' is -1 (a number)."),
    ],
)
def test_published_steps_with_a_mistake_are_refused(calibrate, published, lines, kind, said):
    with pytest.raises(kind) as caught:
        calibrate.read(published(*lines))
    assert said in str(caught.value)
