"""Reading a run's folder: what is no whole run is refused."""

import re

import pytest
import torch
from fakes.run_folders import frames, latents, write_run

from torchport import save
from torchport.compare import folder
from torchport.errors import ArtefactBrokenError, ArtefactForeignError, ArtefactMissingError

OF_TENSORS = {"schema_version", "tensors", "sha256"}
"""Fields of a manifest that are made of the tensors."""


def refusal(kind, call):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    text = refusal(ArtefactMissingError, lambda: folder.read(tmp_path / "no"))
    assert text == f"{tmp_path}/no: There is no such folder. Name the output folder of a run."


def test_a_folder_without_a_run_is_refused(tmp_path):
    assert refusal(ArtefactMissingError, lambda: folder.read(tmp_path)) == (
        f"{tmp_path}: It holds no denoise.safetensors, and so no run. "
        "Name the folder that `torchport run --out` wrote to."
    )


def test_a_run_that_has_not_decoded_is_refused(tmp_path):
    a = write_run(tmp_path / "a")
    save.remove(a, "decode")
    assert refusal(ArtefactMissingError, lambda: folder.read(a)) == (
        f"{a}/decode.safetensors: The run has no frames. Run --stage decode with the flags of that run and --out {a}."
    )


@pytest.mark.parametrize("name", ["denoise", "decode"])
def test_a_damaged_artefact_is_refused(tmp_path, name):
    a = write_run(tmp_path / "a")
    file = save.file_of(a, name)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    text = refusal(ArtefactBrokenError, lambda: folder.read(a))
    assert text.startswith(f"{file}: Its tensors are not those that were written. Copy the file again, or make it with")


def test_frames_of_other_latents_than_lie_beside_them_are_refused(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", last=latents(1))
    (a / "denoise.safetensors").write_bytes((b / "denoise.safetensors").read_bytes())
    text = refusal(ArtefactForeignError, lambda: folder.read(a))
    assert text.startswith(f"{a}/decode.safetensors: 'decode' was made from another 'denoise' than the one beside it.")


def test_frames_of_numbers_are_compared_as_the_bytes_of_the_video(tmp_path):
    run = folder.read(write_run(tmp_path / "a", video=torch.full((1, 2, 3, 16, 16), 0.5)))
    assert run.frames.dtype == torch.uint8 and run.frames.unique().tolist() == [128]


def test_frames_by_another_name_are_refused(tmp_path):
    a = write_run(tmp_path / "a")
    facts = save.read_manifest(a / "decode.safetensors").model_dump(exclude=OF_TENSORS)
    save.write(a, "decode", {"video": frames()}, facts)
    text = refusal(ArtefactForeignError, lambda: folder.read(a))
    assert text.endswith(
        "decode.safetensors: It holds 'video', and no 'frames'. Only runs with 'frames' can be compared."
    )


def test_latents_after_a_step_are_read_and_verified(tmp_path):
    run = folder.read(write_run(tmp_path / "a", steps=[latents(1), latents(2)]))
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
            folder.read(a).latents_after(2)
