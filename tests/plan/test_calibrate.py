"""Published step times, their models, the factor between, and the order in which they come out."""

import pytest
from fakes import plans as fakes

from torchport.errors import (
    BadValueError,
    TopologyError,
    UnknownKeyError,
    UnknownNameError,
    WrongTypeError,
)
from torchport.plan import calibrate, calibration
from torchport.plan.figures import JobPlan
from torchport.plan.published import read
from torchport.task import accept

KERNELS = """\
kernels:
  splash: {title: stock, implementation: splash}
  own: {title: own, implementation: splash_transposed, bounded: true, steady_percent: {v6e: 32.0}}
  ring: {title: ring}
steps:
"""


def step(name, seconds, way="card: {model: hunyuan, config: configs/720p.yaml, strategy: tp}", **fields):
    given = {"kernel": "splash", "machine": '"v6e:2x4"', "mesh": "{tp: 8}", "strategy": "tp", "batch": 2, **fields}
    given.setdefault("frames", 121)
    size = "model: M, height: 720, width: 1280, source: S"
    told = ", ".join(f"{key}: {value}" for key, value in given.items())
    return f"  - {{name: {name}, {size}, step_s: {seconds}, {told}, {way}}}\n"


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A pack whose published step times are these, on top of torchport's own."""

    def write(*steps):
        root = tmp_path / "pack"
        (root / "configs" / "published").mkdir(parents=True, exist_ok=True)
        (root / "configs" / "published" / "steps.yaml").write_text(KERNELS + "".join(steps))
        monkeypatch.chdir(root)
        return (str(root),)

    return write


@pytest.fixture
def plans(monkeypatch):
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
        step = seconds | {"floor_s": 1.0, "flops": 1}
        device, call = fakes.memory(peak_bytes=2**35), fakes.attention(peak_percent=64.0)
        stage = fakes.stage(fits=bool(outcome), step=step, attention=call, per_device=device)
        return JobPlan.model_validate(fakes.plan(denoise=stage))

    monkeypatch.setattr(calibrate, "plan", plan)
    found["asked"] = asked
    return found


def way(strategy):
    return f"card: {{model: hunyuan, config: configs/720p.yaml, strategy: {strategy}}}"


def refusal(call, kind):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_the_shipped_steps_are_complete(pack):
    """Every kernel, card and strategy that a step names is there, and its mesh fits."""
    found, _ = read(pack.root / "configs" / "published" / "steps.yaml")
    modelled = [one for one in found.steps if one.left_out is None]
    assert len(found.steps) >= 30 and len(modelled) >= 10
    assert all(not one.trusted for one in found.steps if one.name.startswith("hunyuan-v6e8-first"))
    for one in modelled:
        task = accept(calibrate.request_of(one, found.kernels[one.kernel], ()), dry=True)
        assert task.family.batch(task.settings.guidance_scale) == one.batch
        chips = found.kernels[one.kernel].steady_percent
        assert not chips or one.machine.partition(":")[0] in chips


def test_one_factor_is_fitted_to_all_steps_together(published, plans):
    plans |= {"a": (3.0, 1.0, 0.0), "b": (1.0, 0.5, 0.5)}
    path = published(
        step("first", 8.0, way("a")),
        step("second", 2.0, way("b")),
        step("third", 9, "left_out: no card", kernel="ring"),
    )
    outcome = calibrate.calibrate(path, 2)
    assert [one.seconds for one in outcome.models] == [4.0, 2.0]
    factor, spread = calibration.fitted([(3.0, 1.0, 8.0), (1.0, 1.0, 2.0)])
    assert (outcome.calibration.factor, outcome.calibration.spread_percent, outcome.calibration.steps) == (
        factor,
        spread,
        2,
    )
    data = calibrate.data(outcome)
    assert [row["ratio"] for row in data["steps"]] == [0.5, 1.0]
    models = [pytest.approx(3.0 + 1.0 / factor), pytest.approx(1.0 + (0.5 + 0.5) / factor)]
    assert [row["model_s"] for row in data["steps"]] == models
    assert data["steps"][0]["model_ratio"] == pytest.approx((3.0 + 1.0 / factor) / 8.0)
    assert data["left_out"] == [{"name": "third", "measured_s": 9.0, "trusted": True, "why": "no card"}]
    given, bounded = plans["asked"][0]
    assert given["mesh"] == "{tp: 8}" and given["attention"] == "splash" and given["machine"] == "v6e:2x4"
    assert not bounded and "guidance_scale" not in given


def test_a_kernels_own_share_of_peak_takes_the_place_of_the_tables(published, plans):
    plans |= {"a": (3.0, 1.0, 0.5)}
    path = published(step("one", 8.0, way("a"), kernel="own", batch=1))
    [found] = calibrate.calibrate(path, 1).models
    assert found.parts.attention_s == pytest.approx(3.0 * 64 / 32) and found.seconds == pytest.approx(7.5)
    given, bounded = plans["asked"][0]
    assert bounded and given["attention"] == "splash_transposed" and given["guidance_scale"] == "1.0"


def test_steps_with_one_program_share_its_compilation(published, plans):
    plans |= {"a": (3.0, 1.0, 0.5)}
    path = published(step("one", 4.0, way("a")), step("two", 5.0, way("a")), step("three", 6.0, way("a"), frames=49))
    assert [one.step.name for one in calibrate.calibrate(path, 1).models] == ["one", "two", "three"]
    assert [given["frames"] for given, _ in plans["asked"]] == ["121", "49"]


def test_pairs_that_are_apart_on_one_kernel_have_an_order_and_the_wrong_ones_are_printed(published, plans):
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


def test_the_order_is_that_of_the_models_with_their_factor(published, plans):
    plans |= {"a": (3.0, 1.0, 0), "b": (1.0, 3.5, 0)}
    path = published(step("slow", 3.3, way("a")), step("fast", 2.2, way("b")))
    outcome = calibrate.calibrate(path, 1)
    slow, fast = outcome.models
    assert slow.seconds < fast.seconds and slow.model_s(outcome.calibration) > fast.model_s(outcome.calibration)
    assert [pair.right for pair in calibrate.pairs(outcome.models, outcome.calibration)] == [True]


def test_a_step_that_cannot_be_modelled_is_a_line_and_no_factor_is_written(published, plans, tmp_path):
    stopped = TopologyError("plan v6e:2x4", "The compiler refuses it", "Plan another size")
    plans |= {"a": (3.0, 1.0, 0.0), "b": stopped, "c": ()}
    path = published(step("good", 4.0, way("a")), step("bad", 4.0, way("b")), step("large", 4.0, way("c")))
    outcome = calibrate.calibrate(path, 1)
    text = "\n".join(calibrate.lines(outcome))
    assert "not modelled: bad, plan v6e:2x4: The compiler refuses it. Plan another size." in text
    assert "not modelled: large, configs/published/steps.yaml:8: Its program takes 32.0 GiB on a device." in text
    file = tmp_path / "calibration.yaml"
    assert refusal(lambda: calibrate.write(file, outcome), BadValueError) == (
        f"--write {file}: There is no model of bad, large. Mend it, or leave it out with a reason."
    )
    assert not file.exists()
    path = published(step("good", 4.0, way("a")))
    calibrate.write(file, calibrate.calibrate(path, 1))
    assert calibration.read(file).factor == 1.0


def test_a_calibration_reads_as_text(published, plans):
    plans |= {"a": (3.0, 1.0, 0.0), "b": (1.0, 0.5, 0.5), "c": (2.0, 1.0, 0.0), "d": (2.0, 0.5, 0.0)}
    path = published(step("first", 8.0, way("a")), step("second", 2.0, way("b")), step("third", 4.0, way("d")))
    text = calibrate.lines(calibrate.calibrate(path, 1))
    assert " ".join(text[1].split()) == "first 8.00 s 4.00 s (3.00 + 1.00 + 0.00) 0.50 5.04 s 0.63"
    assert " ".join(text[2].split()) == "second 2.00 s 2.00 s (1.00 + 0.50 + 0.50) 1.00 3.04 s 1.52"
    assert text[4] == (
        "factor 0.489 for everything but attention (least squares of 3), spread ±48 %; the worst is first, "
        "-37 % after the factor"
    )
    text = calibrate.lines(calibrate.calibrate(published(step("short", 1.0, way("c"))), 1))
    assert text[1].endswith(" s   2.05, shorter than its attention alone")
    assert text[2].startswith("factor 20.000, the end of the range searched, for everything but attention (least ")


@pytest.mark.parametrize(
    ("line", "kind", "said"),
    [
        (step("a", 1, way("tp"), speed=3), UnknownKeyError, "p.yaml:6: Unknown key 'steps.0.speed'."),
        (step("a", 1, way("tp"), kernel="none"), UnknownNameError, "p.yaml:6: There is no kernel 'none'."),
        (
            step("a", 1, way("tp"), kernel="ring"),
            BadValueError,
            "p.yaml:6: 'ring' has no implementation, and 'a' is to",
        ),
        (step("a", 1, way("tp") + ", left_out: no"), WrongTypeError, "It must have one of card and left_out,"),
        (step("a", 1, way("tp"), trusted="false"), WrongTypeError, "What is not trusted is not modelled: it must have"),
        (step("a", 1, way("tp")) + step("a", 2, way("tp")), BadValueError, "p.yaml:7: A second step is called 'a'."),
        (
            step("a", 1, way("tp"), kernel="own", machine='"v5e:2x4"'),
            BadValueError,
            "p.yaml:6: The kernel 'own' has no steady_percent for v5e. Add it, or use one of v6e.",
        ),
        (step("a", -1, way("tp")), WrongTypeError, "p.yaml:6: 'steps.0.step_s' is -1 (a number)."),
    ],
)
def test_published_steps_with_a_mistake_are_refused_with_the_line(tmp_path, line, kind, said):
    file = tmp_path / "p.yaml"
    file.write_text(KERNELS + line)
    assert said in refusal(lambda: read(file, "p.yaml"), kind)
