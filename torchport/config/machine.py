"""The machine that a job runs on: its name, its devices and their limits."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Literal

from torchport.errors import BadValueError

Platform = Literal["cpu", "cuda", "tpu"]
GIB = 2**30
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Machine:
    """A machine as a config names it: `v6e:2x4`, `cuda:8`, `cpu:8`."""

    name: str  #: As written.
    platform: Platform  #: The JAX backend.
    devices: int  #: How many JAX devices it has; a tpu7x chip holds two.
    #: What JAX calls one such device (`device_kind`), any of these.
    kinds: tuple[str, ...] = ()
    #: Bytes of memory per device; None where it is not the chip's own.
    memory: int | None = None

    @property
    def chip(self) -> Chip | None:
        """The chip that a TPU slice is made of; None for a machine of CPUs or GPUs."""
        return TPU_CHIPS.get(self.name.partition(":")[0])

    def require_tpu(
        self,
        place: str | None = None,
        remedy: str = "Name a slice such as v6e:2x4",
        fact: str = "It is no TPU",
    ) -> Chip:
        """Returns the chip that a TPU slice is made of.

        Args:
            place: Where the machine is written, for the error; by default the machine itself.
        """
        if self.chip is None:
            raise BadValueError(place or f"machine {self.name}", fact, remedy)
        return self.chip


HOST = Machine("the host", "cpu", 0)
"""The host alone, for what runs in PyTorch."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of TPU chip and its limits, each for one JAX device."""

    name: str  #: As a machine names it, `v6e`.
    #: What JAX calls a device of it (`device_kind`), any of these.
    kinds: tuple[str, ...]
    memory: int  #: Bytes of HBM.
    _: dataclasses.KW_ONLY
    #: TensorCores that a device fuses, over which a `parallel` grid dimension is divided.
    cores: int = 1
    vmem: int  #: Bytes of vector memory of one core.
    clock: float  #: Hz; bundles that one core issues in a second.
    #: bfloat16 flop (a multiply and an add are two) of one core's matrix units in one bundle.
    bundle_flops: int
    #: Peak bfloat16 flop/s as published; `cores * bundle_flops * clock` within 0.3 %.
    flops: float
    bandwidth: float  #: Bytes/s between HBM and the device, as published.
    link: float  #: Bytes/s of one link to another chip, in one direction.
    #: JAX devices that a chip holds. Source: cloud.google.com/tpu/docs (a page for each chip): memory, flops, bandwidth
    #: (v6e's page, as revised, rounds to 800e9 and 1600e9 for v5e and v6e). `jax/_src/pallas/mosaic/tpu_info.py` of JAX

    #: 0.10.2: vmem, cores; its memory, flops and bandwidth agree within 1 %, except for v5p's bandwidth, where it has
    #: 2460e9. bundle_flops: the compiler's schedules (libtpu 0.0.51), where one of 4 units (v5e, v5p) is busy for 16

    #: bundles with 16 rows times 128 x 128, one of 2 (v6e, tpu7x) for 8 bundles with 16 rows times 256 x 256. clock:
    #: that file's flops over `cores * bundle_flops`, rounded. link: the chips' pages, 400, 1200, 800 and 1200 GB/s a

    #: chip, both directions, over 4, 6, 4 and 6 ports.
    devices: int = 1
    #: Bytes of a host's memory for each chip: of the smallest machine of v6e, 176 GB with one chip (`ct6e-standard-1t`;
    #: eight chips have 1,440). None where no source was read.
    host_memory: int | None = None


TPU_CHIPS = {
    "v5e": Chip(
        "v5e",
        ("TPU v5 lite", "TPU v5e"),
        16 * GIB,
        vmem=128 * MIB,
        clock=1.5e9,
        bundle_flops=131_072,
        flops=197e12,
        bandwidth=819e9,
        link=50e9,
    ),
    "v5p": Chip(
        "v5p",
        ("TPU v5", "TPU v5p"),
        95 * GIB,
        cores=2,
        vmem=64 * MIB,
        clock=1.75e9,
        bundle_flops=131_072,
        flops=459e12,
        bandwidth=2765e9,
        link=100e9,
    ),
    "v6e": Chip(
        "v6e",
        ("TPU v6 lite", "TPU v6e"),
        32 * GIB,
        vmem=128 * MIB,
        clock=1.755e9,
        bundle_flops=524_288,
        flops=918e12,
        bandwidth=1638e9,
        link=100e9,
        host_memory=176 * 10**9,
    ),
    "tpu7x": Chip(
        "tpu7x",
        ("TPU7x", "TPU v7x", "TPU v7"),
        96 * GIB,
        vmem=64 * MIB,
        clock=2.2e9,
        bundle_flops=524_288,
        flops=1155e12,
        bandwidth=3.69e12,
        link=100e9,
        devices=2,
    ),
}
"""Limits are per JAX device; those of a core say so."""


def parse_machine(name: str, place: str) -> Machine:
    """Returns the machine that a config names.

    Args:
        name: `<chip>:<topology>` for a TPU slice, `cuda:<n>`, or `cpu:<n>` for n virtual devices.
    """
    kind, _, shape = name.partition(":")
    if kind in ("cpu", "cuda") and re.fullmatch(r"[1-9]\d{0,3}", shape):
        return Machine(name, "cuda" if kind == "cuda" else "cpu", int(shape))
    if kind in TPU_CHIPS and re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", shape):
        chip = TPU_CHIPS[kind]
        chips = math.prod(int(side) for side in shape.split("x"))
        return Machine(name, "tpu", chips * chip.devices, chip.kinds, chip.memory)
    raise BadValueError(
        place,
        f"'machine' is '{name}'",
        f"It must be a TPU slice ({', '.join(TPU_CHIPS)}, such as v6e:2x4), cuda:<devices> or cpu:<devices>",
    )
