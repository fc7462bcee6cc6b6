"""Named sets of flags for XLA's compilers, `xla_flags.yaml`: what each flag is for, and where that is written."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import pydantic

from torchport.config.document import Frozen, read_document, validated
from torchport.config.machine import TPU_CHIPS, Machine
from torchport.errors import BadValueError, UnknownNameError, nearest

FILE = Path(__file__).with_name("xla_flags.yaml")
VARIABLES = {"tpu": "LIBTPU_INIT_ARGS", "cpu": "XLA_FLAGS"}
"""The environment variable from which the compiler of a platform reads its flags, once, when it starts."""
FUSION = re.compile(r"(--xla_tpu_enable_async_collective_fusion\w*)=true")
OVERLAP = "--xla_tpu_overlap_compute_collective_tc"
FUSION_VMEM = "xla_tpu_scoped_vmem_limit_kib"
"""By default 16 MiB on v5e and v5p, 32 on v6e and tpu7x, which is little for a large product: docs/performance.md."""


class Flag(Frozen):
    """A flag of a compiler."""

    flag: Annotated[str, pydantic.StringConstraints(pattern=r"^--\w+=\w+$")]
    """As the compiler reads it, `--name=value`."""
    why: str
    """What it changes."""
    source: Annotated[str, pydantic.StringConstraints(pattern=r"^https://\S+$")]
    """Where that is written."""


class FlagSet(Frozen):
    """A named set of flags, which `--xla-flags NAME` passes to the compiler of a platform."""

    name: str = ""
    platform: Literal["tpu", "cpu"]
    """The machines that it is for."""
    why: str
    """What it is for."""
    flags: Annotated[list[Flag], pydantic.Field(min_length=1)]
    """The flags, in the order in which they are passed."""

    @property
    def texts(self) -> list[str]:
        """The flags as the compiler reads them: `["--xla_tpu_enable_latency_hiding_scheduler=true"]`."""
        return [flag.flag for flag in self.flags]

    @property
    def variable(self) -> str:
        """The environment variable that they are passed in."""
        return VARIABLES[self.platform]

    def value(self, environment: Mapping[str, str]) -> str:
        """Returns the new value of `variable`: its flags in this environment, then the set's; raises for a conflict."""
        place = f"--xla-flags {self.name}"
        flags = environment.get(self.variable, "").split()
        for text in self.texts:
            key = text.partition("=")[0]
            for flag in flags:
                if flag.partition("=")[0] != key or flag == text:
                    continue
                fact = f"It has {text}, and {self.variable} has {flag}"
                raise BadValueError(place, fact, f"Take {key} out of {self.variable}, or leave the set out")
        value = " ".join([*flags, *(text for text in self.texts if text not in flags)])
        fusion = nan_pair({**environment, self.variable: value})
        if fusion is not None:
            fact = f"{OVERLAP} is in the environment, and {fusion} beside it makes NaN on v6e (jax issue 38741)"
            raise BadValueError(place, fact, "Drop one of the two")
        return value


class _FlagTable(Frozen):
    """`xla_flags.yaml`."""

    sets: dict[str, FlagSet]


SETS = {
    name: flags.model_copy(update={"name": name})
    for name, flags in validated(_FlagTable, read_document(FILE, FILE.name)).sets.items()
}
"""The sets of `xla_flags.yaml`, by name."""


def flag_set(name: str, machine: Machine) -> FlagSet:
    """Returns the set of flags of this name; refuses an unknown name, and a set for another platform."""
    place = f"--xla-flags {name}"
    if name not in SETS:
        raise UnknownNameError(place, "There is no such set of flags", nearest(name, SETS), name=name)
    flags = SETS[name]
    if flags.platform != machine.platform:
        fitting = [key for key, candidate in SETS.items() if candidate.platform == machine.platform]
        fact = f"Its flags are for a {flags.platform}, and the machine is {machine.name}"
        remedy = f"Leave it out, or name one for a {machine.platform}: {', '.join(fitting)}"
        raise BadValueError(place, fact, remedy if fitting else "Leave it out", name=name)
    return flags


def compiler_options(chip: str | None, written: int) -> dict[str, str]:
    """Returns the flags that the compiler gets with a program: on a TPU, three quarters of VMEM for a fusion.

    They are empty without a chip, and if LIBTPU_INIT_ARGS has the flag: the user's value counts. They are also empty
    for a small network: XLA keeps its activations in VMEM, or fetches its weights ahead, and needs VMEM for that.

    Args:
        written: Bytes of the largest array that a product of the program writes on a device.
    """
    if chip is None or f"--{FUSION_VMEM}=" in os.environ.get(VARIABLES["tpu"], ""):
        return {}
    if written < TPU_CHIPS[chip].vmem // 3:
        return {}
    return {FUSION_VMEM: str(TPU_CHIPS[chip].vmem * 3 // 4 // 1024)}


def nan_pair(environment: Mapping[str, str]) -> str | None:
    """Returns the flag that must not stand beside `OVERLAP`, if the environment has both; None otherwise.

    Each alone is right. Together they turn sharded attention into NaN on v6e.
    Source: github.com/jax-ml/jax/issues/38741.
    """
    flags = " ".join(environment.get(variable, "") for variable in VARIABLES.values())
    fusion = FUSION.search(flags)
    return fusion[1] if fusion and f"{OVERLAP}=true" in flags else None
