"""The machine a job runs on: what it is called, what it has, and whether it can carry the job."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, Literal

from torchport.errors import BadValueError, MachineError
from torchport.processes import hosts

Platform = Literal["cpu", "cuda", "tpu"]
GIB = 2**30
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Machine:
    """A machine as a config names it: `v6e:2x4`, `cuda:8`, `cpu:8`.

    Attributes:
        name: As written.
        platform: The JAX backend.
        devices: How many JAX devices it has; a tpu7x chip holds two.
        kinds: What JAX calls one such device (`device_kind`), any of these.
        memory: Bytes of memory per device; None where it is not the chip's own.
    """

    name: str
    platform: Platform
    devices: int
    kinds: tuple[str, ...] = ()
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
            remedy: What to do instead, for the error.
            fact: What is wrong, for the error.

        Raises:
            BadValueError: It is a machine of CPUs or GPUs.
        """
        if self.chip is None:
            raise BadValueError(place or f"machine {self.name}", fact, remedy)
        return self.chip


HOST = Machine("the host", "cpu", 0)
"""The host alone, for what runs in PyTorch."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of TPU chip and its limits, each for one JAX device.

    Attributes:
        name: As a machine names it, `v6e`.
        kinds: What JAX calls a device of it (`device_kind`), any of these.
        memory: Bytes of HBM.
        cores: TensorCores that a device fuses, over which a `parallel` grid dimension is divided.
        vmem: Bytes of vector memory of one core.
        clock: Hz; bundles that one core issues in a second.
        bundle_flops: bfloat16 flop (a multiply and an add are two) of one core's matrix units in one bundle.
        flops: Peak bfloat16 flop/s as published; `cores * bundle_flops * clock` within 0.3 %.
        bandwidth: Bytes/s between HBM and the device, as published.
        link: Bytes/s of one link to another chip, in one direction.
        devices: JAX devices that a chip holds.

    Source: cloud.google.com/tpu/docs (a page for each chip): memory, flops, bandwidth (v6e's page, as revised, rounds
    to 800e9 and 1600e9 for v5e and v6e).
    `jax/_src/pallas/mosaic/tpu_info.py` of JAX 0.10.2: vmem, cores; its memory, flops and bandwidth agree within 1 %,
    except for v5p's bandwidth, where it has 2460e9. bundle_flops: the compiler's schedules (libtpu 0.0.51), where one
    of 4 units (v5e, v5p) is busy for 16 bundles with 16 rows times 128 x 128, one of 2 (v6e, tpu7x) for 8 bundles with
    16 rows times 256 x 256. clock: that file's flops over `cores * bundle_flops`, rounded. link: the chips' pages, 400,
    1200, 800 and 1200 GB/s a chip, both directions, over 4, 6, 4 and 6 ports.
    """

    name: str
    kinds: tuple[str, ...]
    memory: int
    _: dataclasses.KW_ONLY
    cores: int = 1
    vmem: int
    clock: float
    bundle_flops: int
    flops: float
    bandwidth: float
    link: float
    devices: int = 1


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
        place: Where it is written, for the error.

    Raises:
        BadValueError: Not such a name.
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


@dataclasses.dataclass(frozen=True)
class Need:
    """What a job takes, in bytes, computed from shapes alone.

    Attributes:
        devices: JAX devices that the mesh takes; 0 for what runs in PyTorch.
        device_bytes: Weights on each device, by component.
        host_bytes: Weights that are held in the host's memory at once.
        checkpoint: What is read, and from where.
        host_tensors: Latents and frames that are held there beside them, those counted that there must be.
        activations: What each device must hold beside weights, by component, of which one runs at a time; likewise.
    """

    devices: int
    device_bytes: dict[str, int]
    host_bytes: int
    checkpoint: str
    host_tensors: int = 0
    activations: dict[str, int] = dataclasses.field(default_factory=dict)


def prepare(machine: Machine) -> None:
    """Makes this process's JAX have its share of the machine's virtual CPU devices, if it is a CPU machine.

    Raises:
        MachineError: JAX was started in this process with another number of devices, or the processes of the run cannot
            have equally many.
    """
    import jax

    if machine.platform != "cpu":
        return
    own, rest = divmod(machine.devices, hosts.processes())
    if rest:
        raise MachineError(
            f"machine {machine.name}",
            f"Its devices cannot be shared out evenly among {hosts.processes()} processes",
            "Name a multiple of the number of processes",
        )
    try:
        jax.config.update("jax_num_cpu_devices", own)
        jax.config.update("jax_platforms", "cpu")  # no TPU is woken, or held, for a run beside it
    except RuntimeError as error:
        # JAX fixes the number when its CPU backend starts.
        if len(jax.devices("cpu")) < machine.devices:
            raise MachineError(
                f"machine {machine.name}",
                f"JAX runs in this process with {len(jax.devices('cpu'))} CPU device(s)",
                f"Start a new process, or call jax.config.update('jax_num_cpu_devices', {machine.devices}) first",
            ) from error


def devices(machine: Machine) -> list[Any]:
    """Returns the JAX devices of the machine that a job may use."""
    import jax

    found: list[Any] = jax.devices("gpu" if machine.platform == "cuda" else machine.platform)
    return found[: machine.devices]


def require(machine: Machine, need: Need, instead: str) -> None:
    """Refuses a job that this machine cannot carry; nothing has been loaded or downloaded yet.

    Args:
        machine: The machine that the config names.
        need: What the job takes.
        instead: The command to run instead.

    Raises:
        MachineError: Too few devices, devices of another kind, or too little memory on one or on the host.
    """
    found, kind, memory = found_devices(machine.platform) if need.devices else (0, "none", None)
    lacks = []
    if found < need.devices:
        lacks.append(f"{found} device(s) of kind '{kind}'" if found else f"no {machine.platform} device")
    elif found > need.devices and need.devices and hosts.processes() > 1:
        # Some process would have no part in the programs that all of them must start.
        lacks.append(f"{found} devices in {hosts.processes()} processes")
    elif machine.kinds and kind not in machine.kinds:
        lacks.append(f"{found} devices of kind '{kind}'")
    limit = memory if memory is not None else machine.memory
    most = max(need.activations.values(), default=0)
    if found and limit is not None and sum(need.device_bytes.values()) + most > limit:
        lacks.append(f"{_gib(limit)} on each device")
    host = host_memory()
    if need.host_bytes + need.host_tensors > host:
        lacks.append(f"{_gib(host)} of free host memory")
    if not lacks:
        return
    more = "more" if need.activations else "activations"
    wants = [*_on_devices(machine, need), _on_host(need), f"the checkpoint {need.checkpoint}"]
    raise MachineError(
        f"machine {machine.name}",
        f"The job needs {', '.join(wants)}, and {more} beside them; this machine has {' and '.join(lacks)}",
        _remedy(machine, need, limit, host, instead),
        need=need,
        found=found,
    )


def _on_devices(machine: Machine, need: Need) -> list[str]:
    if not need.devices:
        return []
    parts = " + ".join(f"{name} {_gib(size)}" for name, size in need.device_bytes.items())
    most = max(need.activations.values(), default=0)
    beside = f" and at least {_gib(most)} of activations" if most else ""
    return [f"{need.devices} device(s) of {machine.name} with {parts} of weights{beside} on each"]


def _on_host(need: Need) -> str:
    beside = f" and at least {_gib(need.host_tensors)} for latents and frames" if need.host_tensors else ""
    return f"{_gib(need.host_bytes)} of host memory for weights{beside}"


def _remedy(machine: Machine, need: Need, limit: int | None, host: int, instead: str) -> str:
    """Returns what to do: where weights alone would fit, the video is what is too large."""
    weights = limit is None or sum(need.device_bytes.values()) <= limit
    whole = limit is None or sum(need.device_bytes.values()) + max(need.activations.values(), default=0) <= limit
    large = (weights and not whole) or need.host_bytes <= host < need.host_bytes + need.host_tensors
    smaller = "Make the video smaller with --set height=, width= or frames=; or run it" if large else "Run it"
    where = f"a {machine.name}" if need.devices and not large else "a larger machine"
    return f"{smaller} on {where}, or run here: {instead}"


def found_devices(platform: Platform) -> tuple[int, str, int | None]:
    """Returns how many devices of a platform the processes of this run see, their kind, and their memory in bytes."""
    import jax

    try:
        devices = jax.devices("gpu" if platform == "cuda" else platform)
    except RuntimeError:
        # JAX raises this for a platform that it was not installed with, or that has no device.
        return 0, "none", None
    own = [device for device in devices if device.process_index == hosts.process()]
    stats = own[0].memory_stats() if own and platform != "cpu" else None
    return len(devices), devices[0].device_kind, (stats or {}).get("bytes_limit")


def host_memory() -> int:
    """Returns the bytes of host memory that a process can take without swapping."""
    import psutil

    return int(psutil.virtual_memory().available)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"
