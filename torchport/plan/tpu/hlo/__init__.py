"""A compiled TPU program as its compiler scheduled it: what it computes how many times, what it sends, where from.

libtpu writes the program as text where `XLA_FLAGS="--xla_dump_to=DIR --xla_dump_hlo_as_text"` says so, in a file whose
name ends in `after_codegen.txt`; JAX's `compiled.as_text()` has the same form, and fails on some programs. One
instruction of it, cut short:

    %fusion.7 = bf16[1024,512]{1,0:T(8,128)(2,1)} fusion(%copy.1, %param.2), kind=kOutput, calls=%fused_computation.3,
        metadata={op_name="jit(f)/dot_general" stack_frame_id=21}, backend_config={... "estimated_cycles":"5392" ...}

An estimate is the compiler's own, in cycles of one core's clock (`machine.Chip.clock`). Collectives, Pallas kernels
and copies that run beside the core have none. Bytes are those of the values, without the padding of their tiles.
Source: texts that libtpu 0.0.51 wrote for v6e; their form is documented nowhere.
"""

from __future__ import annotations

from torchport.plan.tpu.hlo.instruction import Computation, Instruction, SourceLine
from torchport.plan.tpu.hlo.program import (
    CollectiveExecution,
    HloLoop,
    HloProgram,
    InstructionRuns,
    PerBlock,
    per_block,
)
from torchport.plan.tpu.hlo.text import INTERNAL, read

__all__ = [
    "INTERNAL",
    "CollectiveExecution",
    "Computation",
    "HloLoop",
    "HloProgram",
    "Instruction",
    "InstructionRuns",
    "PerBlock",
    "SourceLine",
    "per_block",
    "read",
]
