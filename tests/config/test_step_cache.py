"""Which steps a cache computes, before the first of them."""

import pytest

from torchport.config import Frozen, parse_document, validated
from torchport.config.step_cache import Calibrate, DeepCache, MagCache, Schedule, StepCache, TaylorSeer, schedule_text
from torchport.errors import (
    BadValueError,
    ConfigError,
    MissingKeyError,
    UnknownKeyError,
    UnknownNameError,
    WrongTypeError,
)


def test_deepcache_computes_the_published_25_of_50_steps():
    cache = DeepCache(kind="deepcache")
    assert cache.computed(50) == (*range(11), *range(11, 45, 4), *range(45, 50))
    assert schedule_text(cache, 50) == "25 of 50 steps: 0-11, 15, 19, 23, 27, 31, 35, 39, 43, 45-49"


def test_its_ends_move_with_the_number_of_steps():
    cache = DeepCache(kind="deepcache")
    assert schedule_text(cache, 30) == "15 of 30 steps: 0-7, 11, 15, 19, 23, 27-29"
    assert schedule_text(cache, 8) == "5 of 8 steps: 0-2, 6-7"
    assert cache.computed(1) == (0,)
    for steps in range(1, 60):
        computed = cache.computed(steps)
        assert computed[0] == 0 and computed[-1] < steps


def test_a_network_that_takes_over_computes_its_first_step():
    cache = Schedule(kind="schedule", full=[0, 4])
    assert schedule_text(cache, 6, first_step=2) == "3 of 6 steps: 0, 2, 4"
    assert schedule_text(cache, 6, first_step=4) == schedule_text(cache, 6) == "2 of 6 steps: 0, 4"


def test_taylorseer_has_the_same_steps_and_its_order():
    assert TaylorSeer(kind="taylorseer", order=2).computed(50) == DeepCache(kind="deepcache").computed(50)
    assert TaylorSeer(kind="taylorseer", order=2).differences == 2 and DeepCache(kind="deepcache").differences == 0


def test_magcache_skips_until_the_error_adds_up():
    # After two of ten steps, each ratio is 0.95: errors 0.05 and 0.0975 add up to 0.1475, a third makes 0.29.
    cache = MagCache(kind="magcache", curve=[1.0] + [0.95] * 9, threshold=0.15)
    assert cache.computed(10) == (0, 1, 4, 7)
    assert MagCache(kind="magcache", curve=[1.0] * 10, threshold=0.15, skips=3).computed(10) == (0, 1, 5, 9)
    assert MagCache(kind="magcache", curve=[1.0] + [0.2] * 3, threshold=0.01).computed(4) == (0, 1, 2, 3)


def test_a_curve_of_another_number_of_steps_is_read_at_the_nearest():
    curve = [1.0] + [0.95] * 9
    assert len(MagCache(kind="magcache", curve=curve, threshold=0.15).computed(20)) < 20


def test_calibration_computes_all_steps():
    assert Calibrate(kind="calibrate").computed(5) == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("cache", "text"),
    [
        (
            Schedule(kind="schedule", full=[0, 8]),
            "cache: 'cache.full' names step 8, and the job has 8, counted from 0. "
            "Name steps from 0 to 7, or take more: --set steps=9.",
        ),
        (
            Schedule(kind="schedule", full=[1, 2]),
            "cache: 'cache.full' begins with step 1, and before it nothing is there to reuse. Add step 0.",
        ),
        (
            DeepCache(kind="deepcache", start=45, end=11),
            "cache: 'cache.start' is 45, 'cache.end' is 11, 'cache.of' is 50 by default. "
            "Write all three in this order: start < end <= of.",
        ),
    ],
)
def test_steps_that_the_job_has_not_are_refused(cache, text):
    with pytest.raises(BadValueError) as caught:
        cache.computed(8)
    assert str(caught.value) == text


KINDS = "deepcache, schedule, magcache, taylorseer or calibrate"


@pytest.mark.parametrize(
    ("yaml", "kind", "text"),
    [
        ("deepcache", WrongTypeError, "1: 'cache' is 'deepcache' (text). It must be a mapping of keys to values, such "
         "as {kind: deepcache}."),
        ("deep", WrongTypeError, "1: 'cache' is 'deep' (text). It must be a mapping of keys to values, such as "
         f"{{kind: deepcache}}. Write a 'kind': {KINDS}."),
        ("{}", MissingKeyError, f"1: 'cache.kind' is missing. Write a 'kind': {KINDS}."),
        ("\n  start: 3\n  kind: deepcahce", UnknownNameError, "3: 'cache.kind' is 'deepcahce'. Did you mean "
         "'deepcache'? Known: calibrate, deepcache, magcache, schedule, taylorseer."),
        ("\n  kind: 3", WrongTypeError, f"2: 'cache.kind' is 3 (a number). Write a 'kind': {KINDS}."),
        ("\n  kind:", WrongTypeError, f"2: 'cache.kind' is empty. Write a 'kind': {KINDS}."),
        ("\n  kind: deepcache\n  evry: 3", UnknownKeyError, "3: Unknown key 'cache.evry'. Did you mean 'every'? "
         "Known: end, every, keep, kind, of, start."),
        ("\n  kind: schedule\n  full: []", WrongTypeError, "3: 'cache.full' is [] (a list). It must be a list of 1 "
         "or more."),
    ],
)  # fmt: skip
def test_what_is_no_cache_is_refused_by_line_with_the_kinds(yaml, kind, text):
    with pytest.raises(ConfigError) as caught:
        validated(_Job, parse_document(f"cache: {yaml}\n", "job.yaml"))
    assert type(caught.value) is kind and str(caught.value) == f"job.yaml:{text}"


class _Job(Frozen):
    """A job of a cache alone."""

    cache: StepCache | None = None
