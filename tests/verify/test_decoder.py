"""Where a decoder parts from the original's: modules that are called with other numbers of frames at once."""

import contextlib
import types

import torch

from torchport.verify import decoder


def test_the_calls_of_a_module_are_joined_along_the_frames():
    video = torch.randn(1, 2, 5, 3, 3)
    ours, theirs = decoder._joined([video], list(video.split(2, dim=2)))
    assert torch.equal(ours, video) and torch.equal(theirs, video)
    ours, theirs = decoder._joined(list(video.split(3, dim=2)), list(video.split(1, dim=2)))
    assert torch.equal(ours, video) and torch.equal(theirs, video)


def test_what_cannot_be_joined_is_not_compared():
    video = torch.randn(1, 2, 5, 3, 3)
    assert decoder._joined([video], [video[:, :, :4]]) is None
    assert decoder._joined([video], []) is None
    assert decoder._joined([video], [video[..., 0], video[..., 0]]) is None
    assert decoder._joined([video], [video[:, :, :1], video[:, :, :1, :2]]) is None


def test_frames_that_are_numbers_are_compared_in_levels_of_255(monkeypatch, tmp_path):
    monkeypatch.setattr(decoder, "stage_in_force", lambda task, stage: contextlib.nullcontext())
    monkeypatch.setattr(decoder.network, "loaded", lambda *_: None)
    video = torch.full((1, 2, 3, 4, 4), 0.5)

    def frames_of(parts, call, settings, steps, latents):
        return {"frames": latents + torch.tensor([0.0, 0.1]).reshape(1, 2, 1, 1, 1)}

    stage = types.SimpleNamespace(network=None, run=frames_of)
    task = types.SimpleNamespace(family=types.SimpleNamespace(STAGES=[stage]), settings=None)
    exact = torch.full_like(video, 128, dtype=torch.uint8)
    decoded = decoder.compare(task, tmp_path, {"original": exact, "yardstick": exact, "latents": {"latents": video}})
    assert (decoded.frame, decoded.added, decoded.rounding) == (1, 25.0, 0.0)
    assert all(picture.startswith(b"\x89PNG") for picture in decoded.pictures.values())
