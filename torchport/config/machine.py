"""The machine that a job runs on: its name, its devices and their limits."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Literal

import yaml

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
        """Returns the chip of a TPU slice. Refuses another machine, at `place`: by default the machine itself."""
        if self.chip is None:
            raise BadValueError(place or f"machine {self.name}", fact, remedy)
        return self.chip


HOST = Machine("the host", "cpu", devices=0)
"""The host alone, for what runs in PyTorch."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of TPU chip and its limits, each for one JAX device."""

    name: str  #: As a machine names it, `v6e`.
    kinds: tuple[str, ...]  #: What JAX calls a device of it (`device_kind`), any of these.
    memory: int  #: Bytes of HBM.
    vmem: int  #: Bytes of vector memory of one core.
    clock: float  #: Hz; bundles that one core issues in a second.
    #: bfloat16 flop (a multiply and an add are two) of one core's matrix units in one bundle.
    bundle_flops: int
    #: Peak bfloat16 flop/s as published; `cores * bundle_flops * clock` within 0.3 %.
    flops: float
    bandwidth: float  #: Bytes/s between HBM and the device, as published.
    link: float  #: Bytes/s of one link to another chip, in one direction.
    #: TensorCores that a device fuses, over which a `parallel` grid dimension is divided.
    cores: int = 1
    devices: int = 1  #: JAX devices that a chip holds.
    #: Bytes of a host's memory for each chip, of the smallest machine. None where no source was read.
    host_memory: int | None = None


FILE = Path(__file__).with_name("chips.yaml")
TPU_CHIPS = {
    name: Chip(name, **{**row, "kinds": tuple(row["kinds"])})
    for name, row in yaml.safe_load(FILE.read_text(encoding="utf-8")).items()
}
"""Limits are per JAX device; those of a core say so."""


def parse_machine(name: str, place: str) -> Machine:
    """Returns the machine of a name: `v6e:2x4` (a TPU slice), `cuda:8`, or `cpu:8` (virtual devices); else raises."""
    kind, _, shape = name.partition(":")
    if kind in ("cpu", "cuda") and re.fullmatch(r"[1-9]\d{0,3}", shape):
        return Machine(name, "cuda" if kind == "cuda" else "cpu", int(shape))
    if kind in TPU_CHIPS and re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3}){1,2}", shape):
        chip = TPU_CHIPS[kind]
        chips = math.prod(int(side) for side in shape.split("x"))
        return Machine(name, "tpu", chips * chip.devices, chip.kinds, chip.memory)
    raise BadValueError(
        place,
        f"'machine' is '{name}'",
        f"It must be a TPU slice ({', '.join(TPU_CHIPS)}, such as v6e:2x4), cuda:<devices> or cpu:<devices>",
    )
