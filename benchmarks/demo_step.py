"""Seconds per denoising step: torchport against the original, on one machine, alternating, in one run.

    python benchmarks/demo_step.py [--json] [--rounds 5]

Two sizes: the demo's, where the network is a few million parameters and overheads show, and one whose original step
fills a core for about a second. Printed are the medians of the rounds and their ratio; on a machine that is shared only
the ratio means something. On virtual CPU devices the port has no speed to win: eight of them share the cores that the
original has to itself. What is measured is what the path costs.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
from pathlib import Path

from torchport.run.path import run
from torchport.task import Request

SIZES = {
    "demo: 128x128, 13 frames": ("steps=8",),
    "large: 448x256, 25 frames": ("height=256", "width=448", "frames=25", "steps=3"),
}
BACKENDS = ("original", "torchax")


def measure(overrides: tuple[str, ...], rounds: int) -> dict[str, float]:
    """Returns the median over the rounds of each backend's seconds per step, compilation not counted."""
    times: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    with tempfile.TemporaryDirectory() as folder:
        first = Request("hunyuan", "configs/demo.yaml", "A cat", out=Path(folder), stage="encode", overrides=overrides)
        run(first)
        for _ in range(rounds):
            for backend in BACKENDS:
                request = dataclasses.replace(first, prompt=None, stage="denoise", backend=backend)
                summary = run(request)
                times[backend].append(summary.seconds["denoise run"] / summary.steps)
    return {backend: statistics.median(values) for backend, values in times.items()}


def main() -> None:
    """Prints the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds of both backends")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    results = {size: measure(overrides, arguments.rounds) for size, overrides in SIZES.items()}
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    print(f"{'size':28}{'original s/step':>18}{'torchax s/step':>18}{'ratio':>8}")
    for size, times in results.items():
        ratio = times["torchax"] / times["original"]
        print(f"{size:28}{times['original']:18.3f}{times['torchax']:18.3f}{ratio:8.2f}")


if __name__ == "__main__":
    main()
