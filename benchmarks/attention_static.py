"""Attention kernels' share of a TPU's peak by their static schedules, with the tiles that are shipped. No TPU needed.

    python benchmarks/attention_static.py [--json]

Percent of peak is useful, unpadded bfloat16 arithmetic over what the matrix units could do in the bundles that run:
`steady` in the steady loop, which is how the public figures are read, `peak` in a whole call at the job's length, with
its first, last and ragged tiles (the rule is in `attention_tiles.py`). Bundles are cycles if the kernel does not wait
for the matrix units, which is counted, or for HBM: `HBM` is the part of the steady loop that fetching takes at the
published bandwidth, and above 0.9 a tile is no result. XLA's passes over q, k and v around the kernel are not in it.

The jobs: HunyuanVideo-1.5, 1280 x 720, 121 frames: 31 x 45 x 80 tokens of pictures and 1256 of text, 4 of 16 heads of
128 on each of 4 devices. CogVideoX1.5-5B, 720p, 81 frames: 39,826 tokens, 12 of 48 heads of 64 on each of 4 devices.

Source of the public figures: maxdiffusion's and JAX's kernels on v6e, compiled with libtpu 0.0.51, best tiles found.
"""

import argparse
import dataclasses
import json
import sys

from attention_tiles import sized_workload, tried

from torchport.config.machine import parse_machine
from torchport.kernels.attention import tiles

MACHINES = {"v6e": "v6e:2x4", "tpu7x": "tpu7x:2x2x1"}
JOBS = {128: (31 * 45 * 80 + 1256, 4), 64: (39_826, 12)}
"""Tokens, and heads of a device, by head size."""
KERNELS = {
    "splash": ("splash", False),
    "splash_transposed online": ("splash_transposed", False),
    "splash_transposed bounded": ("splash_transposed", True),
    "splash_int8": ("splash_int8", True),
}
INT8_JOBS = (("v6e", 128),)
"""Chips and head sizes that `splash_int8` is for. Its percent, too, is of the bfloat16 peak."""
PUBLIC = {
    128: {"splash": 39.1, "splash_transposed online": 45.9, "splash_transposed bounded": 64.3},
    64: {"splash": 19.5, "splash_transposed online": 23.0, "splash_transposed bounded": 33.0},
}
"""Best public figures in the steady loop on v6e, percent, of kernels of the same kind."""
CAPS = {
    128: {"splash": 50.0, "splash_transposed online": 66.7, "splash_transposed bounded": 66.7},
    64: {"splash": 25.0, "splash_transposed online": 40.0, "splash_transposed bounded": 40.0},
}
"""What a 256-wide matrix unit leaves to products with so few features, percent; JAX's order has them in both."""


def measure(name: str, chip: str, head_size: int) -> dict[str, object]:
    """Returns the figures of a kernel with its shipped tile."""
    implementation, bounded = KERNELS[name]
    tokens, heads = JOBS[head_size]
    tile = tiles.best(chip, implementation, head_size, bounded)
    job = sized_workload(parse_machine(MACHINES[chip], "benchmark"), tokens, heads, head_size)
    found = tried(job, implementation, bounded, tile)
    if found.dropped or found.figures is None:
        raise SystemExit(f"{name} {chip} {head_size}: the shipped tile {tile} is no result ({found.dropped})")
    shown = {"name": name, "chip": chip, "head_size": head_size, "tile": dataclasses.asdict(tile)}
    return shown | dataclasses.asdict(found.figures) | {"tokens": tokens, "heads": heads}


def line(kernel: dict) -> str:
    """Returns a row of the table."""
    size, tile = kernel["head_size"], "/".join(map(str, kernel["tile"].values()))
    row = f"{kernel['name']:26}{kernel['chip']:6}{size:5}  {tile:16}{kernel['steady_percent']:8.1f}"
    row += (
        f"{kernel['peak_percent']:7.1f}{kernel['matrix_unit_share']:8.2f}{kernel['dma_share']:6.2f}{kernel['spills']:8}"
    )
    if kernel["chip"] != "v6e" or kernel["name"] == "splash_int8":
        return row
    return f"{row}{PUBLIC[size][kernel['name']]:8.1f}{CAPS[size][kernel['name']]:7.1f}"


def main() -> None:
    """Prints the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    kernels = []
    for name, chip, head_size in ((n, c, d) for c in MACHINES for d in JOBS for n in KERNELS):
        if name == "splash_int8" and (chip, head_size) not in INT8_JOBS:
            continue
        print(f"{name} {chip} {head_size} ...", file=sys.stderr)
        kernels.append(measure(name, chip, head_size))
    if arguments.json:
        print(json.dumps({"kernels": kernels}, indent=2))
        return
    print(
        f"{'kernel':26}{'chip':6}{'D':>5}  {'tile':16}{'steady':>8}{'peak':>7}{'matrix':>8}{'HBM':>6}{'spills':>8}",
        end="",
    )
    print(f"{'public':>8}{'cap':>7}")
    for kernel in kernels:
        print(line(kernel))
    for size in JOBS:
        here = [k for k in kernels if k["chip"] == "v6e" and k["head_size"] == size and k["name"] in PUBLIC[size]]
        best = max(k["steady_percent"] for k in here)
        target = max(PUBLIC[size].values())
        verdict = "met" if best > target else "MISSED"
        print(f"target, head size {size} on v6e: above {target} in the steady loop. It is {best:.1f}: {verdict}")


if __name__ == "__main__":
    main()
