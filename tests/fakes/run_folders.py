"""Output folders of runs that never ran: artefacts with manifests, of tensors that a test chooses."""

import torch

from torchport import save

JOB = {"machine": "cpu:8", "mesh": {"dp": 2, "tp": 4}, "strategy": "tp", "steps": 2, "fps": 8, "dtypes": {}}
SETTINGS = {"prompt": "A cat", "seed": 42, "steps": 2, "dtypes": {"net": "float32", "vae": "float32"}}
PATCH = {
    "id": "up.guard",
    "target": "up.model:Net.forward",
    "kind": "rewrite",
    "equivalence": {"algebraic": "a sum in another order"},
    "state": "used",
    "calls": 3,
    "plumbing": False,
    "late": False,
    "drift": "",
    "detail": "",
    "why": "",
    "place": "",
}
FACTS = {
    "run": "0123456789abcdef",
    "created": "2026-11-20T00:00:00+00:00",
    "identity": {"model": "m", "height": 16, "width": 16, "frames": 2},
    "checkpoint": "a/b@c",
    "components": {"net": "aaaa"},
    "backend": "torchax",
    "patches": [PATCH],
    "card": {"components": {"net": {"precision": "high"}}, "original": ["up/cuda", "up/groups"]},
    "code": {"patches/up/stages.py": "c0de", "patches/up/net.yaml: up.guard": "5a4e"},
    "versions": {"torch": "2.13.0"},
    "seconds": {},
}


def latents(seed=0):
    """Returns latents, by a seed."""
    return torch.randn(1, 4, 2, 2, 2, generator=torch.Generator().manual_seed(seed))


def frames(level=100):
    """Returns a video of one level, [1, 2, 3, 16, 16], in bytes."""
    return torch.full((1, 2, 3, 16, 16), level, dtype=torch.uint8)


def write_run(folder, last=None, video=None, steps=(), job=None, settings=None, sound=None, **facts):
    """Writes a run of two steps.

    Args:
        folder: Where.
        last: Its last latents; None: those of `latents()`.
        video: Its frames; None: those of `frames()`.
        steps: The latents that it kept after each step, in order.
        job: Fields of its config that are others.
        settings: Settings that are others.
        sound: Its sound's last latents, and its samples; None: it has none.
        **facts: Fields of the manifests that are others.
    """
    folder.mkdir()
    shared = {**FACTS, "config": {**JOB, **(job or {})}, "settings": {**SETTINGS, **(settings or {})}, **facts}
    last = latents() if last is None else last
    for number, tensor in enumerate(steps, 1):
        denoise = {**shared, "stage": "denoise", "inputs": {}, "done": number}
        save.write(folder, save.step_name("denoise", number), {"latents": tensor}, denoise)
    heard, samples = ({}, {}) if sound is None else ({"sound_latents": sound[0]}, {"sound": sound[1]})
    denoised = save.write(folder, "denoise", {"latents": last, **heard}, {**shared, "stage": "denoise", "inputs": {}})
    inputs = {"denoise": denoised.sha256}
    video = frames() if video is None else video
    save.write(folder, "decode", {"frames": video, **samples}, {**shared, "stage": "decode", "inputs": inputs})
    return folder
