"""Seconds of a whole decode: upstream in eager PyTorch, the port, and the port on eight devices, on one machine.

    python benchmarks/vae.py [MODEL ...] [--rounds 3] [--json]

The decoders are the cards', at their published depth with a quarter of the channels, in float32, and the video is of a
size that takes seconds. The three take turns; printed are the medians of the rounds and their ratios to eager, and how
far the port's video is from eager's. The eight devices share the cores that the others have to themselves: what the
last column has above the one before it is what parting a frame costs.
"""

import argparse
import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import torch

from torchport import compile, load, patch, shard
from torchport.config.pack import find_pack
from torchport.config.strategy import Rule

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")

DECODERS = {
    "hunyuan": ({"block_out_channels": [32, 64, 128, 256, 256]}, (5, 8, 12)),
    "cogvideox": ({"block_out_channels": [32, 64, 64, 128], "norm_num_groups": 8}, (5, 16, 24)),
    "wan": ({"base_dim": 24}, (5, 16, 24)),
}
"""Each card's decoder, smaller, and its latents' frames, rows and columns."""
MESHES = {"port": {"sp": 1}, "port, 8 devices": {"dp": 2, "sp": 4}}


def decode(module: torch.nn.Module, z: torch.Tensor) -> torch.Tensor:
    """Returns the video of latents."""
    with torch.no_grad():
        video: torch.Tensor = module.decode(z, return_dict=False)[0]
    return video


def ported(module: torch.nn.Module, mesh: dict[str, int]) -> compile.Compiled:
    """Returns a VAE's decoder as a program on the first devices; it is traced under patches that are in place."""
    devices = shard.make_mesh(mesh, jax.devices()[: math.prod(mesh.values())])
    where = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec())
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    weights = {name: shard.to_jax(tensor.detach(), where) for name, tensor in tensors.items()}
    rules = [Rule(match="z", spec="replicate")]
    network = compile.Network(module, rules, "vae", "a benchmark", precision="highest", how=decode)
    return compile.Compiled(network, weights, devices)


def timed(function: Callable[[], Any]) -> float:
    """Returns the seconds of a call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def of_model(model: str, rounds: int) -> dict[str, Any]:
    """Returns the medians and the differences for the decoder of a card."""
    pack = find_pack(())
    card, _ = pack.card(model)
    config, latents = DECODERS[model]
    torch.manual_seed(0)
    vae = card.components["vae"]
    module = load.class_of(vae.class_).from_config({**(vae.published or {}), **config}).eval().requires_grad_(False)
    module.encoder = None
    z = torch.randn(1, module.config.get("latent_channels") or module.config["z_dim"], *latents)
    programs = {}
    ways = card.implementations.get("vae")
    patches = card.patches.get("decode", []) + (ways.patches[ways.default]["decode"] if ways else [])
    with patch.applied(patch.read(pack.folders, ["torchax/overloads", *patches]), stage="decode"):
        for name, mesh in MESHES.items():
            programs[name] = ported(copy.deepcopy(module), mesh)
            programs[name](z=z)
    calls = {"eager": lambda: decode(module, z)} | {
        name: (lambda program=program: program(z=z)) for name, program in programs.items()
    }
    video = calls["eager"]()
    difference = max((calls[name]() - video).abs().max().item() for name in MESHES) / video.abs().max().item()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(timed(call))
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {"model": model, "video": list(video.shape), "seconds": medians, "difference": difference}


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(DECODERS), metavar="MODEL", help=", ".join(DECODERS))
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    rows = [of_model(model, options.rounds) for model in options.models]
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    print(f"{'decoder':12}{'video':>22}{'eager':>10}" + "".join(f"{name + ' (ratio)':>26}" for name in MESHES))
    for row in rows:
        eager, size = row["seconds"]["eager"], "x".join(map(str, row["video"][2:]))
        others = "".join(f"{row['seconds'][name]:17.2f} s ({row['seconds'][name] / eager:4.2f})" for name in MESHES)
        print(f"{row['model']:12}{size:>22}{eager:8.2f} s{others}   differs by {row['difference']:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
