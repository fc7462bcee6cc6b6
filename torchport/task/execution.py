"""How a request is executed, beside what it makes: op by op or compiled, with which flags, and what is shown of it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from torchport.config import xla_flags
from torchport.config.card import DENOISING, Job
from torchport.config.machine import Machine
from torchport.errors import BadValueError, MachineError
from torchport.progress import log
from torchport.stages.family import Stage

SKIPPED = 2
"""Denoising steps before the first step in a profile: the first step compiles, and the second may still settle."""


@dataclasses.dataclass(frozen=True)
class Execution:
    """The flags that say how a request is executed, and what a person sees of it."""

    #: Whether networks are compiled. Otherwise they run op by op, and an error about NaN names the module.
    jit: bool = True
    xla_flags: str | None = None  #: The name of a set of flags for the compiler.
    profile: int | None = None  #: How many denoising steps the profiler traces.
    memory: bool = False  #: Whether the memory that each program takes is logged.
    #: Whether an operator is refused if no sample has compared it with PyTorch's.
    strict: bool = False

    def row(self, machine: Machine) -> dict[str, object]:
        """Returns the fields of a manifest on the execution, which may change last bits: `{"jit": True, ...}`."""
        if self.xla_flags is None:
            return {"jit": self.jit, "xla_flags": None}
        texts = xla_flags.flag_set(self.xla_flags, machine).texts
        return {"jit": self.jit, "xla_flags": {"name": self.xla_flags, "flags": texts}}


COMPILED = Execution()
"""How a request is executed without any flag."""


def check(execution: Execution, stages: Sequence[Stage], original: bool, job: Job, machine: Machine) -> None:
    """Refuses flags that would have no effect on these stages, or contradict the job or each other."""
    for flag, is_given in {"--no-jit": not execution.jit, "--strict": execution.strict}.items():
        if is_given and not any(stage.network for stage in stages):
            fact = f"'{stages[0].name}' has no network that is compiled"
            raise BadValueError(flag, fact, "Leave it out, or run another stage")
    if not execution.jit and job.cache is not None:
        fact = "The job has a step cache, which is two compiled programs"
        raise BadValueError("--no-jit", fact, "Leave one of the two out: --set cache=null")
    if execution.profile is not None:
        place = f"--profile steps={execution.profile}"
        if original:
            fact = "JAX's profiler does not see --backend original"
            raise BadValueError(place, fact, "Leave one of the two out")
        if not any(stage.name in DENOISING for stage in stages):
            fact = "No stage of this run takes denoising steps"
            raise BadValueError(place, fact, "Leave it out, or run --stage denoise")
        if job.steps < SKIPPED + execution.profile:
            fact = f"The job has {job.steps} steps, and the first {SKIPPED} are not traced"
            raise BadValueError(place, fact, f"Take more: --set steps={SKIPPED + execution.profile}")
    if execution.xla_flags is not None:
        place = f"--xla-flags {execution.xla_flags}"
        if original:
            raise BadValueError(place, "--backend original compiles nothing", "Leave one of the two out")
        xla_flags.flag_set(execution.xla_flags, machine)  # raises if there is no such set for this machine


def pass_flags(execution: Execution, machine: Machine) -> None:
    """Passes a set of flags to the compiler, which reads them when JAX starts; raises if JAX runs already."""
    if execution.xla_flags is None:
        return
    from jax._src import xla_bridge

    flags = xla_flags.flag_set(execution.xla_flags, machine)
    value = flags.value(os.environ)
    if value != os.environ.get(flags.variable, ""):
        if xla_bridge.backends_are_initialized():
            fact = "JAX runs in this process already, and reads its flags when it starts"
            raise MachineError(f"--xla-flags {flags.name}", fact, "Start a new process")
        os.environ[flags.variable] = value
    log.info("xla flags %s: %s", flags.name, " ".join(flags.texts))
