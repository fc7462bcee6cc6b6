"""A small port whose three stages make a video of a prompt in moments, and that hangs or fails where a test says so."""

from fakes.small_port import CARD, JOB, SmallPort

STAGES = """\
import os
import time
from pathlib import Path

import torch

from torchport.stages.family import Stage

TAKES_IMAGE = False
VARIANTS = ()


def batch(guidance_scale):
    return 1


def arrange_tiny(make, folder):
    make("net").save_pretrained(folder / "net")


def _numbers(seed, settings):
    return torch.randn(settings.height // 2, 4, generator=torch.Generator().manual_seed(seed))


def encode(parts, call, settings, steps):
    if settings.prompt == "raise":
        raise KeyError("upstream does not like this prompt")
    numbers = _numbers(sum(settings.prompt.encode()), settings)
    return {"x": numbers / (settings.prompt != "nan")}


def _wait(settings, number):
    # Where a test says so, this says that it is here, and waits for a file that may never come.
    prompt, _, name = os.environ.get("SMALL_WAITS", "").partition("@")
    if prompt == settings.prompt and number == 2:
        Path(f"{name}.here").touch()
        while not Path(name).exists():
            time.sleep(0.05)


def denoise(parts, call, settings, steps, x):
    done, state = steps.resume or (0, {"latents": _numbers(settings.seed, settings)})
    latents = state["latents"]
    for number in steps.track(range(done + 1, settings.steps + 1), done=done, total=settings.steps):
        _wait(settings, number)
        latents = latents + 0.1 * call(x=latents + x)
        steps.finished(number, {"latents": latents})
    return {"latents": latents}


def call(module, settings, x):
    return module(x)


def decode(parts, call, settings, steps, latents):
    picture = (latents.sigmoid() * 255).to(torch.uint8)
    picture = picture.repeat_interleave(2, 0).repeat_interleave(settings.width // 4, 1)
    return {"frames": picture.expand(1, settings.frames, 3, settings.height, settings.width).contiguous()}


SIZE = ("height", "width", "frames")
STAGES = (
    Stage("encode", encode, ("prompt", "negative_prompt", *SIZE)),
    Stage("denoise", denoise, ("seed", "steps", *SIZE), needs=("encode",), network="net", call=call),
    Stage("decode", decode, SIZE, needs=("denoise",)),
)
"""


def small_videos(root, monkeypatch) -> SmallPort:
    """Returns the port; its pack is `root / "pack"`, its upstream in `root / "site"`."""
    port = SmallPort(root, monkeypatch)
    port.write("configs/models/small.yaml", CARD)
    job = JOB.replace("height: 4, width: 4, frames: 1", "height: 16, width: 16, frames: 5").replace(
        "steps: 1", "steps: 3"
    )
    port.write("configs/small.yaml", job.replace("guidance", "save_every: 1, guidance"))
    port.write("patches/up/stages.py", STAGES)
    return port
