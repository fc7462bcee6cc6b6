"""The devices and the memory that this process has, and what a job needs of them."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from torchport.config.machine import Machine, Platform
from torchport.errors import MachineError
from torchport.processes import hosts
from torchport.progress import size_text

UNKNOWN_TO_LIBTPU = {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v6e-8"}
"""Variables that libtpu finds out for itself where there is a TPU. Without a TPU libtpu writes lines of errors, unless
these are set. The values are never used: a slice that is described has its own sizes."""
DEVICES, CHIPS = Path("/dev"), ("accel*", "vfio/[0-9]*")
"""The folder in which Linux shows TPU chips, and patterns of their files' names, by either of two drivers."""


@dataclasses.dataclass(frozen=True)
class Need:
    """The devices and the bytes of memory that a job needs, computed from shapes alone."""

    devices: int  #: JAX devices of the mesh; 0 for a job that runs in PyTorch.
    device_bytes: dict[str, int]  #: Bytes of each component's weights on one device.
    host_bytes: int  #: Bytes of the weights in the host's memory.
    checkpoint: str
    #: The least bytes of latents and frames in the host's memory.
    host_tensors: int = 0
    #: The least bytes of each component on one device beside weights.
    activations: dict[str, int] = dataclasses.field(default_factory=dict)

    def bytes_of(self, component: str) -> int:
        """Returns the bytes of a component on each device: its weights and its activations."""
        return self.device_bytes[component] + self.activations.get(component, 0)

    @property
    def largest(self) -> str | None:
        """The component with the most bytes on a device, where each is alone at its time; None without any."""
        return max(self.device_bytes, key=self.bytes_of, default=None)


def prepare(machine: Machine) -> None:
    """Sets how many virtual CPU devices JAX has in this process: its share of a machine of CPU devices. Raises a
    MachineError if JAX runs already with fewer devices, or if the processes cannot share evenly.
    """
    import jax

    if machine.platform != "cpu":
        return
    share, rest = divmod(machine.devices, hosts.processes())
    if rest:
        fact = f"Its devices cannot be shared out evenly among {hosts.processes()} processes"
        raise MachineError(f"machine {machine.name}", fact, "Name a multiple of the number of processes")
    try:
        jax.config.update("jax_num_cpu_devices", share)
        jax.config.update("jax_platforms", "cpu")  # no TPU is woken, or held, for a run beside it
    except RuntimeError as error:
        # JAX fixes the number when its CPU backend starts.
        if len(jax.devices("cpu")) < machine.devices:
            fact = f"JAX runs in this process with {len(jax.devices('cpu'))} CPU device(s)"
            remedy = f"Start a new process, or call jax.config.update('jax_num_cpu_devices', {machine.devices}) first"
            raise MachineError(f"machine {machine.name}", fact, remedy) from error


def devices(machine: Machine) -> list[Any]:
    """Returns the first of JAX's devices of a machine's platform, as many as the machine has."""
    import jax

    all_devices: list[Any] = jax.devices("gpu" if machine.platform == "cuda" else machine.platform)
    return all_devices[: machine.devices]


def require(machine: Machine, need: Need, instead: str) -> None:
    """Refuses a job that does not fit this host: too few or other devices than its `machine` has, or too little memory.
    Nothing has been loaded or downloaded yet. `instead` is a command that fits any host, for the remedy.
    """
    # A job without devices, which runs in PyTorch, does not start JAX.
    count, kind, memory = visible_devices(machine.platform) if need.devices else (0, "none", None)
    lacks = []
    if count < need.devices:
        lacks.append(f"{count} device(s) of kind '{kind}'" if count else f"no {machine.platform} device")
    elif count > need.devices and need.devices and hosts.processes() > 1:
        # Every process must start every program, and some process would have no device in them.
        lacks.append(f"{count} devices in {hosts.processes()} processes")
    elif machine.kinds and kind not in machine.kinds:
        lacks.append(f"{count} devices of kind '{kind}'")
    limit = memory if memory is not None else machine.memory
    if count and limit is not None and need.largest is not None and need.bytes_of(need.largest) > limit:
        lacks.append(f"{size_text(limit)} on each device")
    host = host_memory()
    if need.host_bytes + need.host_tensors > host:
        lacks.append(f"{size_text(host)} of free host memory")
    if not lacks:
        return
    wants = []
    if need.largest is not None:
        weights = f"{size_text(need.device_bytes[need.largest])} of weights ({need.largest})"
        activations = need.activations.get(need.largest, 0)
        more = f" and at least {size_text(activations)} of activations" if activations else ""
        wants.append(f"{need.devices} device(s) of {machine.name} with {weights}{more} on each")
    tensors = f" and at least {size_text(need.host_tensors)} for latents and frames" if need.host_tensors else ""
    wants.append(f"{size_text(need.host_bytes)} of host memory for weights{tensors}")
    wants.append(f"the checkpoint {need.checkpoint}")
    rest = "more" if need.activations else "activations"
    fact = f"The job needs {', '.join(wants)}, and {rest} beside them; this machine has {' and '.join(lacks)}"
    remedy = _remedy(machine, need, limit, host, instead)
    raise MachineError(f"machine {machine.name}", fact, remedy, need=need, found=count)


def _remedy(machine: Machine, need: Need, limit: int | None, host: int, instead: str) -> str:
    """Returns the remedy: a smaller video, if the weights alone would fit; else a larger machine, or `instead`."""
    weights_fit = limit is None or max(need.device_bytes.values(), default=0) <= limit
    all_fits = limit is None or max(map(need.bytes_of, need.device_bytes), default=0) <= limit
    is_large_video = (weights_fit and not all_fits) or need.host_bytes <= host < need.host_bytes + need.host_tensors
    if is_large_video:
        start, where = "Make the video smaller with --set height=, width= or frames=; or run it", "a larger machine"
    else:
        start, where = "Run it", f"a {machine.name}" if need.devices else "a larger machine"
    return f"{start} on {where}, or run here: {instead}"


def visible_devices(platform: Platform) -> tuple[int, str, int | None]:
    """Returns the number of a platform's devices in this run, their kind, and the bytes of each, None if unknown.
    Without a device the result is `(0, "none", None)`.
    """
    import jax

    hush_libtpu()
    try:
        devices = jax.devices("gpu" if platform == "cuda" else platform)
    except RuntimeError:
        # JAX raises this for a platform that it was not installed with, or that has no device.
        return 0, "none", None
    local = [device for device in devices if device.process_index == hosts.process()]
    stats = local[0].memory_stats() if local and platform != "cpu" else None
    return len(devices), devices[0].device_kind, (stats or {}).get("bytes_limit")


def host_memory() -> int:
    """Returns the bytes of host memory that a process can take without swapping."""
    import psutil

    return int(psutil.virtual_memory().available)


def hush_libtpu() -> None:
    """Sets variables that keep libtpu from writing lines of errors to stderr where there is no TPU. To be called before
    JAX gives out any device, even of a CPU: it loads libtpu then.
    """
    if not any(any(DEVICES.glob(pattern)) for pattern in CHIPS):
        os.environ.update({name: value for name, value in UNKNOWN_TO_LIBTPU.items() if name not in os.environ})
