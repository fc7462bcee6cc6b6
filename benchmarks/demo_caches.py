"""What step caches do to a picture: each kind in three settings, against the same run without a cache.

    python benchmarks/demo_caches.py [--out DIR] [--steps 16]

Printed as each is ready: the steps that compute all blocks, PSNR and SSIM of the frames by `torchport compare`'s
functions (means over the prompts), and how many videos still show what was asked. A run that was stopped goes on from
DIR.
"""

import argparse
import dataclasses
import statistics
from pathlib import Path

import drawing
import torch
import yaml
from scenes.scene import Frames

from torchport.config.card import Job
from torchport.config.document import Document, validated
from torchport.verify import yardstick

CURVE = "curve: [1.0, 1.02, 1.01, 1.0, 0.99, 0.98, 0.97, 0.95]"
CACHES = [
    "{kind: deepcache, every: 2}",
    "{kind: deepcache}",
    "{kind: deepcache, start: 5, end: 48, every: 6}",
    "{kind: schedule, full: [0, 1, 2, 3, 4, 6, 8, 10, 12, 14]}",
    "{kind: schedule, full: [0, 1, 2, 3, 6, 9, 12]}",
    "{kind: schedule, full: [0, 1, 5, 10]}",
    f"{{kind: magcache, {CURVE}, threshold: 0.02}}",
    f"{{kind: magcache, {CURVE}, threshold: 0.06}}",
    f"{{kind: magcache, {CURVE}, threshold: 0.24, skips: 4}}",
    "{kind: taylorseer, every: 2}",
    "{kind: taylorseer, order: 2}",
    "{kind: taylorseer, start: 5, end: 48, every: 6}",
]


def likeness(a: Frames, b: Frames) -> tuple[float, float]:
    """Returns PSNR and SSIM of two videos: PSNR of all pixels, SSIM the mean of the frames."""
    first, second = (torch.from_numpy(video).permute(0, 3, 1, 2) for video in (a, b))
    ssims = [yardstick.ssim(x, y) or 0.0 for x, y in zip(first, second, strict=True)]
    return yardstick.psnr(yardstick.mean_square(first, second)), statistics.mean(ssims)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/demo-caches"), help="where runs are kept")
    parser.add_argument("--steps", type=int, default=16, help="denoising steps of every run")
    arguments = parser.parse_args()
    asked = drawing.trained(3)
    base = (f"steps={arguments.steps}",)
    prompts = [scene.prompt for scene in asked]
    whole = drawing.drawn(dataclasses.replace(drawing.DEMO, overrides=base), prompts, arguments.out / "none")
    print(f"{'cache':64}{'computed':>10}{'PSNR dB':>9}{'SSIM':>8}{'drawn':>8}", flush=True)
    print(f"{'none':64}{arguments.steps:10}{'':17}{drawing.score(whole, asked)[0]:3} of {len(asked)}", flush=True)
    for number, cache in enumerate(CACHES):
        request = dataclasses.replace(drawing.DEMO, overrides=(*base, f"cache={cache}"))
        frames = drawing.drawn(request, prompts, arguments.out / str(number))
        pairs = [likeness(a, b) for a, b in zip(whole, frames, strict=True)]
        psnr, ssim = (statistics.mean(values) for values in zip(*pairs, strict=True))
        steps = computed(cache, arguments.steps)
        print(
            f"{cache:64}{steps:10}{psnr:9.1f}{ssim:8.4f}{drawing.score(frames, asked)[0]:3} of {len(asked)}", flush=True
        )


def computed(cache: str, steps: int) -> int:
    """Returns how many steps compute all blocks."""
    job = yaml.safe_load(Path("configs/demo.yaml").read_text()) | {"cache": yaml.safe_load(cache), "steps": steps}
    step_cache = validated(Job, Document("cache", job, {})).cache
    assert step_cache is not None
    return len(step_cache.computed(steps))


if __name__ == "__main__":
    main()
