"""Milliseconds that XLA's TPU compiler estimates for products in bfloat16, by the VMEM that a fusion may take.

    python benchmarks/products.py [--chips v6e,tpu7x] [--mib 16,32,48,64,96]

No TPU is needed. The products are those of a device with Wan2.2-T2V-A14B at 1280 x 720, 81 frames, on 8 devices:
18,944 tokens through both matrices of the feed-forward net, 5120 x 13824 and back, and 5120 x 5120 of attention. `peak`
is their arithmetic at the chip's peak, `default` the compiler's own limit. torchport gives a fusion three quarters of
VMEM (`torchport.config.xla_flags.compiler_options`).
"""

import argparse
import re

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from torchport.config.machine import TPU_CHIPS, parse_machine
from torchport.config.xla_flags import FUSION_VMEM
from torchport.errors import TopologyError
from torchport.plan.tpu import absent
from torchport.processes import child

SLICES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
TOKENS = 18_944
PRODUCTS = {"up": (5120, 13824), "down": (13824, 5120), "attention": (5120, 5120)}
"""Features before and after each product."""


def estimate(chip: str, features: tuple[int, int], kib: int | None) -> float:
    """Returns the milliseconds that the compiler estimates for a product; None: with its own limit."""
    device = absent.describe(parse_machine(SLICES[chip], "products")).devices[0]
    where = SingleDeviceSharding(device)
    shapes = ((TOKENS, features[0]), features[::-1])
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=where) for shape in shapes]
    options = {} if kib is None else {FUSION_VMEM: str(kib)}
    text = jax.jit(lambda x, weight: x @ weight.T, compiler_options=options).lower(*operands).compile().as_text()
    cycles = sum(int(found) for found in re.findall(r'"estimated_cycles":"(\d+)"', text))
    return 1e3 * cycles / TPU_CHIPS[chip].clock


def lines(chip: str, mibs: list[int]) -> list[str]:
    """Returns a line for each product, with its milliseconds by limit. Runs in a child process."""
    limits = {"default": None} | {f"{mib} MiB": 1024 * mib for mib in mibs if mib * 2**20 < TPU_CHIPS[chip].vmem}
    text = []
    for name, features in PRODUCTS.items():
        flops = TPU_CHIPS[chip].cores * TPU_CHIPS[chip].bundle_flops * TPU_CHIPS[chip].clock
        found = {"peak": 1e3 * 2 * TOKENS * features[0] * features[1] / flops}
        found |= {limit: estimate(chip, features, kib) for limit, kib in limits.items()}
        text.append(f"{chip:6} {name:10}" + "".join(f"  {limit} {ms:.2f}" for limit, ms in found.items()) + " ms")
    return text


def main() -> None:
    """Prints a line for each chip and product."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", default=",".join(SLICES))
    parser.add_argument("--mib", default="16,32,48,64,96", help="Limits, as far as the chip has as much.")
    arguments = parser.parse_args()
    for chip in arguments.chips.split(","):
        print(
            *child.call(
                "products:lines",
                *(chip, [int(mib) for mib in arguments.mib.split(",")]),
                ended=lambda end: TopologyError(
                    "benchmarks/products.py", f"The compiler {end}", "Name another chip or limit"
                ),
                environment=absent.environment(),
            ),
            sep="\n",
            flush=True,
        )


if __name__ == "__main__":
    main()
