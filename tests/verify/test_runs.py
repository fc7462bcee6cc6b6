"""Two runs compared: what is read of them, in which fields they differ, and how alike they are."""

import math
import re

import pytest
import torch
from fakes.run_folders import FACTS, PATCH, frames, latents, write_run

from torchport import save
from torchport.errors import ArtefactBrokenError, ArtefactForeignError, ArtefactMissingError
from torchport.verify import runs

OF_TENSORS = {"schema_version", "tensors", "sha256"}
"""Fields of a manifest that are made of the tensors."""
STAGES = "patches/up/stages.py"


def refusal(kind, call):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    text = refusal(ArtefactMissingError, lambda: runs.read(tmp_path / "no"))
    assert text == f"{tmp_path}/no: There is no such folder. Name the output folder of a run."


def test_a_folder_without_a_run_is_refused(tmp_path):
    assert refusal(ArtefactMissingError, lambda: runs.read(tmp_path)) == (
        f"{tmp_path}: It holds no denoise.safetensors, and so no run. "
        "Name the folder that `torchport run --out` wrote to."
    )


def test_a_run_that_has_not_decoded_is_refused(tmp_path):
    a = write_run(tmp_path / "a")
    save.remove(a, "decode")
    assert refusal(ArtefactMissingError, lambda: runs.read(a)) == (
        f"{a}/decode.safetensors: The run has no frames. Run --stage decode with the flags of that run and --out {a}."
    )


@pytest.mark.parametrize("name", ["denoise", "decode"])
def test_a_damaged_artefact_is_refused(tmp_path, name):
    a = write_run(tmp_path / "a")
    file = save.file_of(a, name)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    text = refusal(ArtefactBrokenError, lambda: runs.read(a))
    assert text.startswith(f"{file}: Its tensors are not those that were written. Copy the file again, or make it with")


def test_frames_of_other_latents_than_lie_beside_them_are_refused(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", last=latents(1))
    (a / "denoise.safetensors").write_bytes((b / "denoise.safetensors").read_bytes())
    text = refusal(ArtefactForeignError, lambda: runs.read(a))
    assert text.startswith(f"{a}/decode.safetensors: 'decode' was made from another 'denoise' than the one beside it.")


def test_frames_of_numbers_are_compared_as_the_bytes_of_the_video(tmp_path):
    run = runs.read(write_run(tmp_path / "a", video=torch.full((1, 2, 3, 16, 16), 0.5)))
    assert run.frames.dtype == torch.uint8 and run.frames.unique().tolist() == [128]


def test_frames_by_another_name_are_refused(tmp_path):
    a = write_run(tmp_path / "a")
    facts = save.read_manifest(a / "decode.safetensors").model_dump(exclude=OF_TENSORS)
    save.write(a, "decode", {"video": frames()}, facts)
    text = refusal(ArtefactForeignError, lambda: runs.read(a))
    assert text.endswith(
        "decode.safetensors: It holds 'video', and no 'frames'. Only runs with 'frames' can be compared."
    )


def test_latents_after_a_step_are_read_and_verified(tmp_path):
    run = runs.read(write_run(tmp_path / "a", steps=[latents(1), latents(2)]))
    assert run.steps == {1: "denoise", 2: "denoise"} and run.total == 2
    assert torch.equal(run.latents_after(2), latents(2))


def test_latents_after_a_step_of_another_run_are_refused(tmp_path, forged):
    """A run in the same folder that was killed may have left them."""
    a = write_run(tmp_path / "a", steps=[latents(1), latents(2)])
    file = a / "denoise.step-0002.safetensors"
    settings = save.read_manifest(file).settings
    for changes, what in (
        ({"settings": {**settings, "seed": 7}}, "seed"),
        ({"settings": settings, "inputs": {"encode": "f" * 64}}, "encode"),
        ({"inputs": {}, "done": 1}, "the step"),
    ):
        forged(file, **changes)
        with pytest.raises(
            ArtefactForeignError,
            match=re.escape(
                f"{file}: It is not of the run that made denoise.safetensors: {what} is another. "
                "Finish the run that left it, or remove it."
            ),
        ):
            runs.read(a).latents_after(2)


@pytest.fixture
def words(tmp_path):
    """Returns how a run differs from the one that every test here begins with."""

    def of(**changes):
        a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", **changes)
        return [row.words() for row in runs.differences(runs.read(a).manifests, runs.read(b).manifests)]

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
        ({"code": {**FACTS["code"], STAGES: "beef"}}, "patches/up/stages.py: its text is another"),
        ({"code": {STAGES: "c0de"}}, "patches/up/net.yaml: up.guard: only A has it"),
        ({"code": {**FACTS["code"], "patches/up/net.py": "beef"}}, "patches/up/net.py: only B has it"),
        (
            {"card": {**FACTS["card"], "components": {"net": {"precision": "highest"}}}},
            "the card's components.net.precision: high and highest",
        ),
        ({"card": {**FACTS["card"], "original": ["up/groups"]}}, "the card's original: ['up/cuda'] and []"),
        ({"card": {**FACTS["card"], "size_multiple_of": 16}}, "the card's size_multiple_of: none and 16"),
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
    [row] = runs.differences(runs.read(a).manifests, runs.read(b).manifests)
    assert row.words() == "backend: torchax and original (in decode)" and row.stages == ("decode",)


def test_a_port_and_its_original_differ_in_patches_and_not_in_code(words):
    assert words(backend="original", code={STAGES: "c0de"}, patches=[]) == [
        "backend: torchax and original",
        "the patch up.guard: algebraic and none",
    ]


def test_another_family_is_seen_between_backends(words):
    assert f"{STAGES}: its text is another" in words(backend="original", code={STAGES: "beef"})


@pytest.fixture
def pair(tmp_path):
    """Writes two runs and reads them."""

    def of(a=None, b=None):
        return (runs.read(write_run(tmp_path / name, **(run or {}))) for name, run in (("a", a), ("b", b)))

    return of


def test_frames_are_compared_as_a_whole_and_by_the_worst(pair):
    video = frames()
    video[0, 1] += 2
    result = runs.distance(*pair(None, {"video": video})).frames
    assert result.psnr == pytest.approx(20 * math.log10(255) - 10 * math.log10(2)), "a mean square of 0 and 4"
    assert result.worst_psnr == pytest.approx(20 * math.log10(255 / 2)) and result.worst_psnr_frame == 2
    c1 = (0.01 * 255) ** 2
    ssim = (2 * 100 * 102 + c1) / (100**2 + 102**2 + c1)
    assert result.worst_ssim == pytest.approx(ssim) and result.worst_ssim_frame == 2
    assert result.ssim == pytest.approx((1 + ssim) / 2) and result.greatest == 2


def test_small_frames_have_no_ssim(pair):
    video = torch.zeros(1, 2, 3, 8, 8, dtype=torch.uint8)
    result = runs.distance(*pair({"video": video}, {"video": video + 1})).frames
    assert result.ssim is result.worst_ssim is result.worst_ssim_frame is None and result.psnr < 49


def test_latents_are_compared_after_each_step_and_at_last(pair):
    a = {"steps": [latents(1), latents(2)]}
    b = {"steps": [latents(1), 2 * latents(2)], "last": -latents()}
    one, two, last = runs.distance(*pair(a, b)).latents
    assert (one.step, one.difference, one.same) == (1, 0, True) and one.cosine == pytest.approx(1)
    assert (two.step, two.difference, two.same) == (2, 0.5, False) and two.cosine == pytest.approx(1)
    assert (last.step, last.difference) == (None, 2) and last.cosine == pytest.approx(-1)


@pytest.mark.parametrize(
    ("a", "b", "numbers", "unkept"),
    [
        ([1, 2], [1, 2], [1, 2, None], ""),
        ([], [1, 2], [None], "A kept latents after none of its 2 steps"),
        ([1], [1, 2], [1, None], "A kept latents after 1 of its 2 steps"),
        ([], [], [None], "A kept latents after none of its 2 steps, and B kept latents after none of its 2 steps"),
    ],
)
def test_steps_that_a_run_did_not_keep_are_named(pair, tmp_path, a, b, numbers, unkept):
    result = runs.distance(*pair({"steps": [*map(latents, a)]}, {"steps": [*map(latents, b)]}))
    assert [row.step for row in result.latents] == numbers
    remedy = ". A run with --set keep_steps=true keeps them after each" if unkept else ""
    assert result.unkept == unkept.replace("A k", f"{tmp_path}/a k").replace("B k", f"{tmp_path}/b k") + remedy


def test_steps_of_another_number_of_steps_are_not_compared(pair, tmp_path):
    """After the same number of steps they have other noise."""
    kept = {"steps": [latents(1), latents(2)]}
    result = runs.distance(*pair(kept, {**kept, "settings": {"steps": 4}}))
    assert [row.step for row in result.latents] == [None]
    assert result.unkept == f"{tmp_path}/a takes 2 steps, and {tmp_path}/b 4: only their last latents are compared"


def test_videos_of_two_sizes_are_refused(pair, tmp_path):
    with pytest.raises(ArtefactForeignError) as caught:
        runs.distance(*pair(None, {"video": torch.zeros(1, 2, 3, 16, 32, dtype=torch.uint8)}))
    assert str(caught.value) == (
        f"{tmp_path}/b/decode.safetensors: Its 'frames' have the shape [2, 3, 16, 32], and those of the first run "
        "[2, 3, 16, 16]. Compare runs of one model, one size and one number of frames."
    )


def test_latents_of_two_shapes_are_refused(pair, tmp_path):
    with pytest.raises(ArtefactForeignError) as caught:
        runs.distance(*pair(None, {"last": torch.ones(1, 8, 4)}))
    assert f"{tmp_path}/b/denoise.safetensors: Its 'latents' have the shape [1, 8, 4], and" in str(caught.value)


def test_latents_that_differ_without_frames_and_the_reverse_are_warned_of(pair):
    a, b = pair(None, {"video": frames(101)})
    assert runs.distance(a, b).warning == "the latents are the same, and the frames differ: only the decodes differ"
    assert runs.distance(a, a).warning == ""


def test_frames_that_hide_a_difference_of_latents_are_warned_of(pair):
    text = runs.distance(*pair(None, {"last": latents() + 1e-6})).warning
    assert text == "the latents differ, and the frames are the same: the difference is too small for a byte"
