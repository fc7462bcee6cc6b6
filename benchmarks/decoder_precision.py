"""How far a decoder's video is from float64's at each precision of its products, in steps of 8 bits.

    python benchmarks/decoder_precision.py [MODEL ...] [--json]

The decoders are the cards', at their published sizes, with PyTorch's own initialisation and latents from N(0, 1): a few
latent positions, and frames enough for two chunks or more where upstream decodes in chunks. Upstream's code runs in
eager PyTorch on the CPU; its products alone are computed as a TPU does. A float32 operand becomes a sum of bfloat16
numbers, one at `default`, two at `high`, three at `highest`, and of n * n products of these the n * (n + 1) / 2 largest
are added in float32. In the last column weights and activations are bfloat16, too.

The float64 video is scaled so that its largest value is 1; between -1 and 1 there are 255 steps. A difference of less
than half a step is the limit.
"""

import argparse
import json
import sys
import time
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from torchport import load
from torchport.config.pack import find_pack

aten = torch.ops.aten
LIMIT = 0.5
STEPS = 255 / 2
"""Of 8 bits, in a difference of 1."""
SMALL = 2.0**-6
"""What the last weights are multiplied with, exact in every dtype: Wan's decoder cuts its video off at -1 and 1."""
PARTS = {"default": 1, "high": 2, "highest": 3}
LATENTS = {"hunyuan": (3, 4, 4), "cogvideox": (4, 6, 8), "wan": (3, 6, 8), "wan_5b": (3, 4, 4)}
"""Frames, rows and columns of latent positions. CogVideoX decodes two frames at a time, Wan one."""
OPERANDS = {
    aten.convolution.default: (0, 1, 2),
    aten.mm.default: (0, 1, None),
    aten.bmm.default: (0, 1, None),
    aten.addmm.default: (1, 2, 0),
    aten.baddbmm.default: (1, 2, 0),
}
"""Where each product has its two operands, and what is added to it."""


def parts(value: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Returns bfloat16 numbers, in float32, whose sum comes close to a float32 tensor; the largest first."""
    pieces, rest = [], value
    for _ in range(count):
        pieces.append(rest.bfloat16().float())
        rest = rest - pieces[-1]
    return pieces


class Products(TorchDispatchMode):
    """Computes float32 products as sums of products of bfloat16 numbers.

    Attributes:
        count: Numbers that an operand is split into.
        seen: Products that were computed so.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.seen = count, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Computes an operation; a product in float32 from its operands' parts."""
        where, options = OPERANDS.get(function), kwargs or {}
        if where is None or args[where[0]].dtype != torch.float32:
            return function(*args, **options)
        first, second, added = where
        self.seen += 1
        left, right = (parts(args[at], self.count) for at in (first, second))
        total = None
        for number, piece in enumerate(left):  # each with those of the other operand that leave a product large enough
            operands = list(args)
            operands[first], operands[second] = piece, sum(right[: self.count - number])
            if added is not None and number:
                operands[added] = None if operands[added] is None else torch.zeros_like(operands[added])
            product = function(*operands, **options)
            total = product if total is None else total + product
        return total


def decoded(module: Any, latents: torch.Tensor, count: int | None = None) -> torch.Tensor:
    """Returns a video in float64, of products of operands in so many parts, or of PyTorch's own products."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        if count is None:
            return module.decode(latents).sample.double()
        with Products(count) as products:
            video = module.decode(latents).sample
    assert products.seen > 30, "the decoder's products are seen"
    return video.double()


def of_model(model: str) -> dict[str, Any]:
    """Returns the differences for the decoder of a card, in steps of 8 bits, by precision."""
    card, _ = find_pack(()).card(model)
    vae = card.components["vae"]
    torch.manual_seed(0)
    module = load.class_of(vae.class_).from_config(vae.published or {}).eval().requires_grad_(False)
    module.encoder = None
    for parameter in module.decoder.conv_out.parameters():
        parameter.mul_(SMALL)
    frames, rows, columns = LATENTS[model]
    channels = module.config.get("latent_channels") or module.config["z_dim"]
    latents = torch.randn(1, channels, frames, rows, columns)
    start = time.monotonic()
    videos = {"eager float32": decoded(module, latents)}
    videos |= {name: decoded(module, latents, count) for name, count in PARTS.items()}
    exact = decoded(module.double(), latents.double())
    videos["all in bfloat16"] = decoded(module.float().bfloat16(), latents.bfloat16())
    largest = exact.abs().max().item()
    assert largest < 1, "no value is cut off"
    return {
        "model": model,
        "decoder": vae.class_,
        "parameters": sum(one.numel() for one in module.decoder.parameters()),
        "latents": list(latents.shape),
        "video": list(exact.shape),
        "card": f"{vae.dtype}, {vae.precision}",
        "largest": largest,
        "seconds": time.monotonic() - start,
        "steps": {name: STEPS * (video - exact).abs().max().item() / largest for name, video in videos.items()},
    }


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(LATENTS), metavar="MODEL", help=", ".join(LATENTS))
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    options = parser.parse_args()
    rows = []
    for model in options.models:
        row = of_model(model)
        rows.append(row)
        if options.json:
            continue
        if len(rows) == 1:
            print(f"{'steps of 8 bits':16}" + "".join(f"{name:>17}" for name in row["steps"]))
        print(f"{model:16}" + "".join(f"{steps:17.2g}" for steps in row["steps"].values()), flush=True)
        cheapest = next((name for name in PARTS if row["steps"][name] < LIMIT), "none")
        print(f"  {row['decoder']} of {row['latents']}, {row['seconds']:.0f} s; below {LIMIT}: {cheapest}")
    if options.json:
        print(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
