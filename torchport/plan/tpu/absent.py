"""Compiling for a TPU on a machine that has none: environment variables for libtpu, and JAX's description of a slice.

libtpu reads its settings from the environment once, when it is loaded. So compile for an absent TPU in a process that
was started with the variables of `environment()`; nothing here changes the environment of this process.
"""

from __future__ import annotations

import importlib.util
import os
import platform
from pathlib import Path
from typing import Any

from torchport.config.machine import TPU_CHIPS, Machine
from torchport.errors import TopologyError
from torchport.task.devices import UNKNOWN_TO_LIBTPU

INSTALL = "pip install 'torchport[plan]' on Linux x86-64, which is where libtpu is"


def environment(dump: Path | None = None) -> dict[str, str]:
    """Returns the environment variables of a child process that compiles for an absent TPU.

    Args:
        dump: The folder into which the compiler writes every kernel's instruction schedule as text (hundreds of
            megabytes for a large kernel), or None for no dump.
    """
    variables = {
        "JAX_PLATFORMS": "cpu",  # if this machine has a TPU, it is not initialised and stays free for others
        "TPU_SKIP_MDS_QUERY": "1",  # outside Google's cloud the metadata server does not answer, and libtpu waits
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several such processes, or one beside a job that holds the TPU
        **UNKNOWN_TO_LIBTPU,
    }
    if dump is None:
        return variables
    if any(letter.isspace() for letter in str(dump)):
        raise TopologyError(str(dump), "The folder for the dump has white space in its name", "Name one without")
    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    return variables | {
        # A program that comes out of JAX's cache of compiled programs is not compiled, and dumps nothing.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "LIBTPU_INIT_ARGS": f"{flags} --xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true".lstrip(),
    }


def installed() -> bool:
    """Returns whether libtpu, the TPU's compiler, is installed."""
    return importlib.util.find_spec("libtpu") is not None


def describe(machine: Machine) -> Any:
    """Returns JAX's description of an absent TPU slice, such as v6e:2x4: programs can be compiled for its `devices`.

    Raises if libtpu is missing or does not know the slice, or if the process lacks the variables of `environment`.
    """
    place = f"machine {machine.name}"
    if machine.platform != "tpu":
        raise TopologyError(place, f"It is of kind '{machine.platform}'", f"It must be a TPU: {', '.join(TPU_CHIPS)}")
    if not installed():
        here = f"{platform.system()} {platform.machine()}"
        raise TopologyError(place, f"libtpu, the TPU's compiler, is not installed (this is {here})", INSTALL)
    unset = [name for name in environment() if name not in os.environ]
    if unset:
        raise TopologyError(
            place,
            f"This process was started without {', '.join(unset)}",
            "Describe a TPU in a child process that is started with torchport.plan.tpu.absent.environment()",
        )
    import jax
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=machine.name)
    except jax.errors.JaxRuntimeError as error:
        raise TopologyError(
            place,
            f"libtpu does not know this slice ({str(error).splitlines()[0]})",
            "It must be one that exists, such as v6e:2x4, v5e:2x4, v5p:2x2x1 or tpu7x:2x2x1",
        ) from error
