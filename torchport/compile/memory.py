"""The memory that a stage takes on its devices: what the devices count, and what the compiler planned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from torchport.compile.program import Compiled
from torchport.progress import size_text


def lines(call: Any, devices: Sequence[jax.Device]) -> list[str]:
    """Returns the memory of a stage whose steps are done, as lines of text.

    Args:
        call: The stage's network; anything else runs on the host.
        devices: Those of the mesh.
    """
    if not isinstance(call, Compiled):
        return ["it runs on the host, and takes no memory of a device"]
    planned = [_planned(call.network.name, program) for program in call.programs.values()]
    if not call.jit:
        planned = [f"'{call.network.name}' ran op by op: no program was compiled"]
    return [*planned, _counted([device for device in devices if device.process_index == jax.process_index()])]


def _planned(name: str, program: Any) -> str:
    """Returns what the compiler planned for a program, on each device."""
    memory = program.memory_analysis()
    if memory is None:
        return f"'{name}': this backend's compiler does not say what a program takes"
    sizes = {
        "weights and inputs": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "intermediate": memory.temp_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
    }
    parts = ", ".join(f"{size_text(size)} {what}" for what, size in sizes.items())
    return f"'{name}', as compiled, on each device: {size_text(sum(sizes.values()))} ({parts})"


def _counted(devices: Sequence[jax.Device]) -> str:
    """Returns what the devices count, the fullest of this process's."""
    stats = [stats for device in devices if (stats := device.memory_stats())]
    if not stats:
        return f"the backend '{devices[0].platform}' does not count what its devices hold"
    most = max(stats, key=lambda one: one.get("peak_bytes_in_use", 0))
    held, peak = (size_text(most.get(key, 0)) for key in ("bytes_in_use", "peak_bytes_in_use"))
    limit = f" of {size_text(most['bytes_limit'])}" if "bytes_limit" in most else ""
    return f"on the fullest device: {held} in use, {peak} at most since the run began{limit}"
