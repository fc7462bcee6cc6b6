"""What each trap of the migration guide does to the demo's picture: planted one at a time in upstream's own pipeline.

    python benchmarks/demo_traps.py [--only "mask dropped"] [--picture docs/demo-traps.jpg]

A row is printed when it is ready: how many of eight prompts still show what was asked, and what is wrong with the rest.
The colour of every prompt is in quotes, so that both text encoders are asked.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import drawing
import numpy
import torch
import yaml
from diffusers import FlowMatchEulerDiscreteScheduler as Scheduler
from diffusers import HunyuanVideo15Pipeline
from diffusers.models.transformers import transformer_hunyuan_video15 as network
from scenes.scene import Frames, Scene

from torchport.config.pack import find_pack
from torchport.load import tiny

Plant = Callable[[], contextlib.AbstractContextManager[Any]]
TRANSFORMER = network.HunyuanVideo15Transformer3DModel


def mask_dropped() -> contextlib.AbstractContextManager[Any]:
    """Attention sees the padding of the text."""
    attention = network.dispatch_attention_fn

    def unmasked(*args: Any, attn_mask: Any = None, **rest: Any) -> Any:
        return attention(*args, attn_mask=None, **rest)

    return mock.patch.object(network, "dispatch_attention_fn", unmasked)


def keys_zeroed() -> contextlib.AbstractContextManager[Any]:
    """Padded keys and values are set to zero, and not masked."""
    attention = network.dispatch_attention_fn

    def zeroed(query: Any, key: Any, value: Any, attn_mask: Any = None, **rest: Any) -> Any:
        if attn_mask is None:
            return attention(query, key, value, **rest)
        # [B, 1, L, L] of booleans. The first row is a query of the image, which is valid.
        valid = attn_mask[:, 0, 0, :, None, None]
        return attention(query, key * valid, value * valid, attn_mask=None, **rest)

    return mock.patch.object(network, "dispatch_attention_fn", zeroed)


def _scheduled(change: Callable[[Any], None]) -> contextlib.AbstractContextManager[Any]:
    set_timesteps = Scheduler.set_timesteps

    @functools.wraps(set_timesteps)  # upstream reads the signature
    def changed(self: Any, *args: Any, **kwargs: Any) -> None:
        set_timesteps(self, *args, **kwargs)
        change(self)

    return mock.patch.object(Scheduler, "set_timesteps", changed)


def schedule_in_bfloat16() -> contextlib.AbstractContextManager[Any]:
    """Noise levels and times are rounded to bfloat16."""

    def rounded(scheduler: Any) -> None:
        scheduler.sigmas = scheduler.sigmas.bfloat16().float()
        scheduler.timesteps = scheduler.timesteps.bfloat16().float()

    return _scheduled(rounded)


def schedule_moved() -> contextlib.AbstractContextManager[Any]:
    """The transformer is told the time of the step after."""

    def moved(scheduler: Any) -> None:
        scheduler.timesteps = torch.cat([scheduler.timesteps[1:], torch.zeros(1)])

    return _scheduled(moved)


def schedule_without_shift() -> contextlib.AbstractContextManager[Any]:
    """The scheduler's `shift` is not read."""

    def unshifted(scheduler: Any) -> None:
        sigmas = torch.linspace(1, 0, len(scheduler.timesteps) + 1)
        scheduler.sigmas, scheduler.timesteps = sigmas, 1000 * sigmas[:-1]

    return _scheduled(unshifted)


def byt5_ignored() -> contextlib.AbstractContextManager[Any]:
    """What is in quotes reaches the first text encoder alone."""
    forward = TRANSFORMER.forward

    def without(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["encoder_attention_mask_2"] = torch.zeros_like(kwargs["encoder_attention_mask_2"])
        return forward(self, *args, **kwargs)

    return mock.patch.object(TRANSFORMER, "forward", without)


TRAPS: dict[str, Plant] = {
    "none": contextlib.nullcontext,
    "mask dropped": mask_dropped,
    "keys zeroed": keys_zeroed,
    "schedule in bfloat16": schedule_in_bfloat16,
    "schedule moved by a step": schedule_moved,
    "schedule without its shift": schedule_without_shift,
    "ByT5 ignored": byt5_ignored,
}


def quoted(scene: Scene) -> str:
    """Returns a scene's prompt with its colour in quotes."""
    return scene.prompt.replace(scene.colour, f'"{scene.colour}"')


def pipeline() -> Any:
    """Returns upstream's pipeline with the card's tiny weights."""
    pack = find_pack()
    card, document = pack.card("hunyuan")
    pipe = HunyuanVideo15Pipeline.from_pretrained(tiny.write(card, pack.family_file(card, document.place(["family"]))))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def videos(pipe: Any, asked: list[Scene]) -> Iterator[Frames]:
    """Yields the frames of prompts at the demo's size."""
    job = yaml.safe_load(Path("configs/demo.yaml").read_text())
    for scene in asked:
        made = pipe(
            prompt=quoted(scene),
            height=job["height"],
            width=job["width"],
            num_frames=job["frames"],
            num_inference_steps=job["steps"],
            generator=torch.Generator().manual_seed(42),
            output_type="np",
        ).frames[0]
        yield (made * 255).round().astype(numpy.uint8)


def main() -> None:
    """Prints the table and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(TRAPS), action="append", help="a trap; all by default")
    parser.add_argument("--picture", type=Path, help="write a strip of each trap's first two videos")
    arguments = parser.parse_args()
    pipe, asked, rows = pipeline(), drawing.trained(8), []
    for name in arguments.only or TRAPS:
        with TRAPS[name]():
            made = list(videos(pipe, asked))
        right, wrong = drawing.score(made, asked)
        print(f"{name:28}{right} of {len(asked)}   {'; '.join(wrong[:2])}", flush=True)
        rows.append(made[:2])
    if arguments.picture:
        drawing.strip(rows, arguments.picture)


if __name__ == "__main__":
    main()
