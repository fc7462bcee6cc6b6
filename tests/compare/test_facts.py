"""In which fields what made two runs differs, in words."""

import pytest
from fakes.run_folders import PATCH, write_run

from torchport.compare import facts, folder


@pytest.fixture
def words(tmp_path):
    """Returns how a run differs from the one that every test here begins with."""

    def of(**changes):
        a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", **changes)
        return [row.words() for row in facts.differences(folder.read(a).manifests, folder.read(b).manifests)]

    return of


def test_the_same_job_differs_in_nothing(words):
    later = {"created": "2027-01-01T00:00:00+00:00", "seconds": {"denoise run": 3.0}, "run": "f" * 16}
    assert words(**later, job={"fps": 16, "save_every": 1, "keep_steps": True}) == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"job": {"mesh": {"dp": 1, "tp": 8}}}, "mesh: dp=2 x tp=4 and dp=1 x tp=8"),
        ({"job": {"cache": {"kind": "deepcache", "every": 4}}}, "cache.kind: none and deepcache"),
        ({"job": {"vae_tiling": False}}, "vae tiling: none and false"),
        ({"settings": {"dtypes": {"net": "bfloat16", "vae": "float32"}}}, "the dtype of net: float32 and bfloat16"),
        ({"settings": {"prompt": "A dog"}}, "prompt: 'A cat' and 'A dog'"),
        ({"settings": {"prompt": ""}}, "prompt: 'A cat' and ''"),
        ({"backend": "original"}, "backend: torchax and original"),
        ({"code": "beef"}, "the card, the family or a patch: c0de and beef"),
        ({"components": {"net": "bbbb"}}, "the weights of net: aaaa and bbbb"),
        ({"versions": {"torch": "2.12.0"}}, "the version of torch: 2.13.0 and 2.12.0"),
        ({"upstream": {"package": "up", "commit": "1234", "dirty": False}}, "upstream.commit: none and 1234"),
        ({"patches": []}, "the patch up.guard: algebraic and none"),
        ({"patches": [{**PATCH, "state": "displaced"}]}, "the patch up.guard: algebraic and displaced"),
    ],
)
def test_a_difference_is_named_once_for_all_stages(words, changes, text):
    assert words(**changes).count(text) == 1


def test_a_setting_counts_rather_than_the_jobs_field_of_the_same_name(words):
    """A job's `dtypes` are only those that it changes."""
    assert words(job={"dtypes": {"net": "float32"}}) == []


def test_calls_of_a_patch_are_no_difference(words):
    assert words(patches=[{**PATCH, "state": "applied", "calls": 0}]) == []


def test_a_difference_of_one_stage_names_the_stage(tmp_path, forged):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    forged(b / "decode.safetensors", backend="original")
    [row] = facts.differences(folder.read(a).manifests, folder.read(b).manifests)
    assert row.words() == "backend: torchax and original (in decode)" and row.stages == ("decode",)


def test_a_port_and_its_original_differ_in_patches_and_not_in_code(words):
    assert words(backend="original", code="beef", patches=[]) == [
        "backend: torchax and original",
        "the patch up.guard: algebraic and none",
    ]


def test_another_family_is_seen_between_backends(words):
    both = "the card, the family or a patch that both backends have"
    assert f"{both}: 5a4e and feed" in words(backend="original", code="beef", shared_code="feed")


def test_between_backends_of_earlier_versions_the_whole_code_is_compared(words):
    said = "the card, the family or a patch: c0de and beef"
    assert said in words(backend="original", code="beef", shared_code="")
