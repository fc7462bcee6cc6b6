"""One device's attention in a job: how many tokens, heads and features, from configurations alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torchport import load
from torchport.compile import network as networks
from torchport.compile.in_force import in_force
from torchport.config.card import Axis
from torchport.config.machine import TPU_CHIPS, Chip, Machine, parse_machine
from torchport.errors import BadValueError
from torchport.kernels.attention import transposed
from torchport.plan.tpu.cost import Work
from torchport.task import Request, Task, accept


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a kernel is to compute on a machine."""

    machine: Machine  #: A TPU slice.
    work: Work  #: One device's attention, a sample of it.
    note: str = ""  #: Where the numbers come from.

    @property
    def chip(self) -> Chip:
        """The chip that the slice is made of."""
        return self.machine.require_tpu()


def sized(machine: Machine, tokens: int, heads: int, head_size: int, note: str = "") -> Workload:
    """Returns the job of as many queries as keys."""
    remedy = f"It must be a TPU slice ({', '.join(TPU_CHIPS)}, such as v6e:2x4)"
    machine.require_tpu(f"--topology {machine.name}", remedy)
    group, _ = transposed.grouping(heads, head_size)
    return Workload(machine, Work(tokens, tokens, heads, head_size, group), note)


def of_flags(
    topology: str,
    *,
    model: str | None = None,
    config: str | None = None,
    tokens: int | None = None,
    heads: int | None = None,
    head_size: int | None = None,
    upstream_path: str | None = None,
    overrides: tuple[str, ...] = (),
    paths: tuple[str, ...] = (),
) -> Workload:
    """Returns the job of the flags: of a model and a config, or of sizes alone; beside a model, sizes override."""
    machine = parse_machine(topology, f"--topology {topology}")
    if model is not None and config is not None:
        request = Request(model, config, paths=paths, upstream_path=upstream_path, overrides=overrides)
        return of_model(request, machine, tokens, heads, head_size)
    unread = {"model": model, "config": config, "upstream-path": upstream_path, "set": overrides or None}
    if tokens is None or heads is None or head_size is None or any(unread.values()):
        flags = unread | {"tokens": tokens, "heads": heads, "head-size": head_size}
        have = [f"--{name}" for name, value in flags.items() if value is not None]
        raise BadValueError(
            "torchport tune",
            f"It has {', '.join(have) or 'neither a model nor sizes'}",
            "Give --model and --config, or --tokens, --heads and --head-size alone",
        )
    return sized(machine, tokens, heads, head_size)


def of_model(
    request: Request,
    machine: Machine,
    tokens: int | None = None,
    heads: int | None = None,
    head_size: int | None = None,
) -> Workload:
    """Returns the job of a model and a config, from configurations alone: no weights are read.

    Args:
        request: Which model and config.
        machine: Where it would run; takes the place of the config's.
        tokens: S = T; by default the tokens of the pictures, to which those of the text come on top.
        heads: Of one device; by default the model's, over the axes that split them.
        head_size: D; by default the model's.
    """
    overrides = (*request.overrides, f"machine={machine.name}")
    task = accept(dataclasses.replace(request, stage="denoise", overrides=overrides))
    network, vae = _configurations(task)
    heads, note = _heads(task, network) if heads is None else heads, ""
    head_size = _head_size(task, network) if head_size is None else head_size
    if tokens is None:
        tokens, note = _pictures(task, network, vae), "of the pictures; those of the text come on top"
    return sized(machine, tokens, heads, head_size, note)


def _configurations(task: Task) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the published configuration of the network that denoises, and of the VAE (empty where there is none)."""
    [stage] = task.stages
    names = [str(stage.network), "vae"]
    with in_force(task, [stage]):
        known = {name: task.card.components[name] for name in names if name in task.card.components}
        makers = {name: networks.maker(task, name) for name in known}
        read = {name: load.configuration(load.published(makers[name], c.published, name)) for name, c in known.items()}
    return read[names[0]], read.get("vae", {})


def _split(task: Task) -> dict[Axis, str]:
    """Returns the axes of the mesh that split the heads, with the configuration's key that counts the heads."""
    network = task.card.written(str(task.stages[0].network))
    divides = {axis: path.partition(".") for axis, path in task.card.strategies[task.job.strategy].divides.items()}
    return {axis: key for axis, (component, _, key) in divides.items() if component == network}


def _heads(task: Task, network: Mapping[str, Any]) -> int:
    axes = _split(task)
    heads = _number(network, [*axes.values(), "num_attention_heads"], "--heads", task)
    return heads // math.prod(task.job.mesh.get(axis, 1) for axis in axes)


def _head_size(task: Task, network: Mapping[str, Any]) -> int:
    if "attention_head_dim" in network or not isinstance(network.get("hidden_size"), int):
        return _number(network, ["attention_head_dim"], "--head-size", task)
    heads = _number(network, [*_split(task).values(), "num_attention_heads"], "--head-size", task)
    return int(network["hidden_size"]) // heads


def _pictures(task: Task, network: Mapping[str, Any], vae: Mapping[str, Any]) -> int:
    """Returns the tokens of the pictures: patches of the latents, by the names that configurations have for sizes."""
    space = _number(vae, ["spatial_compression_ratio", "ffactor_spatial", "scale_factor_spatial"], "--tokens", task)
    frames = _number(vae, ["temporal_compression_ratio", "ffactor_temporal", "scale_factor_temporal"], "--tokens", task)
    patch_size = network.get("patch_size", 1)
    sides = (
        patch_size if isinstance(patch_size, list | tuple) else (network.get("patch_size_t") or 1, *2 * [patch_size])
    )
    latents = ((task.job.frames - 1) // frames + 1, task.job.height // space, task.job.width // space)
    return math.prod(latent // side for latent, side in zip(latents, sides, strict=True))


def _number(config: Mapping[str, Any], keys: Sequence[str], flag: str, task: Task) -> int:
    for key in keys:
        if isinstance(config.get(key), int):
            return int(config[key])
    raise BadValueError(
        f"--model {task.card.model}", f"Its configuration has no {' or '.join(dict.fromkeys(keys))}", f"Add {flag}"
    )
