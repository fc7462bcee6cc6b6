"""Named sets of flags for XLA's compilers, `xla_flags.yaml`: what each flag is for, and where that is written."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import pydantic

from torchport.config.document import Frozen, read_document, validated
from torchport.config.machine import Machine
from torchport.errors import BadValueError, UnknownNameError, nearest

FILE = Path(__file__).with_name("xla_flags.yaml")
VARIABLES = {"tpu": "LIBTPU_INIT_ARGS", "cpu": "XLA_FLAGS"}
"""The environment variable from which the compiler of a platform reads its flags, once, when it starts."""


class Flag(Frozen):
    """One flag.

    Attributes:
        flag: As the compiler reads it, `--name=value`.
        why: What it changes.
        source: Where that is written.
    """

    flag: Annotated[str, pydantic.StringConstraints(pattern=r"^--\w+=\w+$")]
    why: str
    source: Annotated[str, pydantic.StringConstraints(pattern=r"^https://\S+$")]


class _FlagSet(Frozen):
    """A named set.

    Attributes:
        platform: The machines that it is for.
        why: What it is for.
        flags: The flags, in the order in which they are passed.
    """

    platform: Literal["tpu", "cpu"]
    why: str
    flags: Annotated[list[Flag], pydantic.Field(min_length=1)]

    @property
    def texts(self) -> list[str]:
        return [flag.flag for flag in self.flags]

    @property
    def variable(self) -> str:
        """The environment variable that they are passed in."""
        return VARIABLES[self.platform]


class _FlagTable(Frozen):
    """`xla_flags.yaml`."""

    sets: dict[str, _FlagSet]


@functools.cache
def sets() -> dict[str, _FlagSet]:
    return validated(_FlagTable, read_document(FILE, FILE.name)).sets


def set_of(name: str, machine: Machine) -> _FlagSet:
    """Returns the set of flags of this name; refuses an unknown name, and a set for another platform."""
    if name not in sets():
        raise UnknownNameError(f"--xla-flags {name}", "There is no such set of flags", nearest(name, sets()), name=name)
    chosen = sets()[name]
    if chosen.platform != machine.platform:
        others = [other for other, entry in sets().items() if entry.platform == machine.platform]
        fact = f"Its flags are for a {chosen.platform}, and the machine is {machine.name}"
        remedy = f"Leave it out, or name one for a {machine.platform}: {', '.join(others)}"
        raise BadValueError(f"--xla-flags {name}", fact, remedy if others else "Leave it out", name=name)
    return chosen


def added(name: str, chosen: _FlagSet, environment: Mapping[str, str]) -> str:
    """Returns the new value of an environment variable: its flags, then those of the set; raises if they conflict."""
    flags = environment.get(chosen.variable, "").split()
    for text in chosen.texts:
        key = text.partition("=")[0]
        other = next((flag for flag in flags if flag.partition("=")[0] == key and flag != text), None)
        if other is not None:
            fact = f"It has {text}, and {chosen.variable} has {other}"
            raise BadValueError(
                f"--xla-flags {name}", fact, f"Take {key} out of {chosen.variable}, or leave the set out"
            )
    value = " ".join([*flags, *(text for text in chosen.texts if text not in flags)])
    fusion = nan_pair({**environment, chosen.variable: value})
    if fusion is not None:
        fact = f"{OVERLAP} is in the environment, and {fusion} beside it makes NaN on v6e (jax issue 38741)"
        raise BadValueError(f"--xla-flags {name}", fact, "Drop one of the two")
    return value


FUSION = re.compile(r"(--xla_tpu_enable_async_collective_fusion\w*)=true")
OVERLAP = "--xla_tpu_overlap_compute_collective_tc"


def nan_pair(environment: Mapping[str, str]) -> str | None:
    """Returns the flag that must not stand beside `OVERLAP`, if the environment has both; None otherwise.

    Each alone is right. Together they turn sharded attention into NaN on v6e.
    Source: github.com/jax-ml/jax/issues/38741.
    """
    flags = " ".join(environment.get(variable, "") for variable in VARIABLES.values())
    fusion = FUSION.search(flags)
    return fusion[1] if fusion and f"{OVERLAP}=true" in flags else None
