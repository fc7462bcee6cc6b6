"""What determines a program, as plain data: two programs with equal parts are the same, and unequal parts have names.

If we do not know whether something matters, it is in the key: an extra compilation costs minutes, a missing one gives a
wrong picture. Arguments of the program (weights, prompts, noise) are not in the key, but their shapes are.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import torch

from torchport.compile.program import Arguments
from torchport.config.card import DENOISING
from torchport.files import cache
from torchport.stages import family
from torchport.stages.outputs import leaves
from torchport.stages.recorder import Static
from torchport.task import Task

SCHEMA = 2
"""Version of the key's parts and of the entry on disk."""

FREE = ("prompt", "negative_prompt", "seed", "steps", "guider")
"""Settings that no program may depend on; see `fixed`."""

PREFIXES = ("XLA_", "LIBTPU_", "TORCH_", "TORCHAX_", "PYTORCH_")
"""Of environment variables that compilers and tracers read."""

_ASIDE = re.compile("cache|log|explain|pprint|dump")
"""JAX's settings that say where it keeps or prints things."""


def digest(parts: Any) -> str:
    """Returns the sha256 of plain data, in hexadecimal."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def of_process(upstreams: Iterable[str]) -> dict[str, Any]:
    """Returns the parts that are the same for all programs of a run.

    Args:
        upstreams: The import names of the packages that a trace goes through; their sources are hashed whole.
    """
    names = sorted({"torchport", "torchax", *upstreams})
    return {
        "schema": SCHEMA,
        "python": platform.python_version(),
        "versions": versions(),
        "sources": {name: sources(name) for name in names},
        "environment": environment(names),
        "jax": {name: repr(value) for name, value in sorted(jax.config.values.items()) if not _ASIDE.search(name)},
        "torch": {"default dtype": str(torch.get_default_dtype())},
    }


def versions() -> dict[str, str]:
    """Returns the version of every installed distribution: a trace may go through any."""
    return {
        str(distribution.metadata["Name"]): distribution.version for distribution in importlib.metadata.distributions()
    }


def sources(package: str) -> str:
    """Returns the hash of a package's Python files, and of the data beside torchport's own.

    A version does not suffice: a checkout or an editable install keeps its version while its files change. This finds
    the package as an import would, and does not import it.
    """
    spec = importlib.util.find_spec(package)
    if spec is None:
        return "absent"
    sha = hashlib.sha256()
    roots = [Path(root) for root in spec.submodule_search_locations or ()] or [Path(spec.origin or "")]
    kinds = (".py", ".yaml") if package == "torchport" else (".py",)
    for root in roots:
        for file in sorted(_files(root, kinds) if root.is_dir() else [root]):
            sha.update(f"{file.relative_to(root)}\0".encode())
            sha.update(hashlib.sha256(file.read_bytes()).digest())
    return sha.hexdigest()[:16]


def _files(root: Path, kinds: tuple[str, ...]) -> Iterator[Path]:
    """Yields the files of some kinds in a folder, links to folders followed as an import follows them."""
    seen: set[str] = set()
    for folder, inner, names in os.walk(root, followlinks=True):
        inner[:] = [name for name in inner if name != "__pycache__"]
        if os.path.realpath(folder) in seen:
            inner.clear()  # a link to where we have been: there is no end to it otherwise
            continue
        seen.add(os.path.realpath(folder))
        yield from (Path(folder, name) for name in names if name.endswith(kinds))


def environment(packages: Iterable[str]) -> dict[str, str]:
    """Returns the environment variables that compilers, tracers and these packages read."""
    prefixes = (*PREFIXES, *(f"{name.upper()}_" for name in packages if name != "torchport"))
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


def of_mesh(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Returns the parts that are the devices, in the mesh's order, and what drives them."""
    devices = list(mesh.devices.flat)
    client = devices[0].client
    return {
        "mesh": dict(mesh.shape),
        "device": {
            "platform": client.platform,
            "platform version": client.platform_version,
            "kind": devices[0].device_kind,
            "capability": str(getattr(devices[0], "compute_capability", "")),
            "host": cache.host() if client.platform == "cpu" else "",
            "process": [jax.process_index(), jax.process_count()],
            "order": [[d.id, d.process_index, list(getattr(d, "coords", ()))] for d in devices],
        },
    }


def of_stage(task: Task, stage: family.Stage, weights: Path, bounds: Mapping[str, float]) -> dict[str, Any]:
    """Returns the parts that the request decides.

    Args:
        task: The run.
        stage: The stage, which has a network.
        weights: The checkpoint's folder.
        bounds: The bounds of attention scores, which choose the kernel.
    """
    settings = dataclasses.asdict(task.settings.traced())
    card = task.card.model_dump(mode="json")
    files = task.card.code(Path(str(task.family.__file__)))
    configs = {name: task.component_folder(weights, name) / "config.json" for name in task.card.components}
    assert stage.network is not None
    return {
        "model": task.card.model,
        "card": digest(card)[:16],
        "family": hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16],
        "component": stage.network,
        "submodule": stage.submodule,
        "precision": task.card.components[stage.network].precision,
        "strategy": task.job.strategy,
        "stacked": task.job.stacked,
        "cache": None if task.job.cache is None or stage.name not in DENOISING else task.job.cache.kind,
        "attention": task.job.attention,
        "score bounds": dict(bounds),
        "settings": {name: str(value) for name, value in settings.items() if name not in FREE},
        "configurations": {
            name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for name, file in configs.items() if file.is_file()
        },
    }


def of_module(module: torch.nn.Module) -> str:
    """Returns the hash of a network's modules: their classes and their plain attributes, before anything is traced.

    What prepares a network may set any of them.
    """
    rows = []
    for name, part in module.named_modules():
        attributes = {key: _as_plain(value) for key, value in vars(part).items() if not key.startswith("_")}
        rows.append([name, f"{type(part).__module__}.{type(part).__qualname__}", attributes])
    return digest(rows)[:16]


def _as_plain(value: Any) -> Any:
    """Returns a value as plain data; for any other value its type, and its name if it has one."""
    if isinstance(value, Mapping):
        return {str(key): _as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(str(_as_plain(item)) for item in value)
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | enum.Enum):
        return repr(value)
    if isinstance(value, torch.Tensor):
        raw = b"" if value.is_meta else value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {list(value.shape)} {hashlib.sha256(raw).hexdigest()}"
    has_name = isinstance(value, type | types.FunctionType | types.BuiltinFunctionType)
    return f"{type(value).__qualname__} {value.__qualname__ if has_name else ''}"


def of_call(arguments: Arguments, static: Static) -> dict[str, Any] | None:
    """Returns the parts that one set of inputs decides; None if an argument is no plain data, and has no key."""
    if not all(_is_plain(value) for _, value in static):
        return None
    weights, inputs, caches = arguments
    return {
        "weights": {name: _shape(array) for name, array in weights.items()},
        "inputs": {path: _shape(array) for path, array in leaves({**inputs, **caches}).items()},
        "structure": str(jax.tree_util.tree_structure((inputs, caches))),
        "static": {name: repr(value) for name, value in static},
    }


def of_executable(parts: Mapping[str, Any], lowered: Any) -> str:
    """Returns the hash of all that determines what the compiler makes of a traced program.

    Sources, patches and settings are not in it: what they decide stands in the program. So an edit after which the
    program is the same finds the executable that we have.

    Args:
        parts: The parts of the program's key.
        lowered: The traced program, `jax.stages.Lowered`.
    """
    compilers = ("jax", "libtpu", "nvidia")
    return digest(
        {
            **{name: parts.get(name) for name in ("schema", "python", "jax", "mesh", "device", *CALL)},
            "versions": {k: v for k, v in parts.get("versions", {}).items() if k.startswith(compilers)},
            "environment": {k: v for k, v in parts.get("environment", {}).items() if k.startswith(("XLA_", "LIBTPU_"))},
            # JAX leaves out the arguments that are not used. The text does not say which ones those are.
            "used": sorted(lowered._lowering.compile_args["kept_var_idx"]),
            "program": hashlib.sha256(lowered.as_text().encode()).hexdigest(),
        }
    )


CALL = ("weights", "inputs", "structure")
"""Parts of `of_call` that an executable depends on beside the traced program, which knows arguments by number."""


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def _shape(array: jax.Array) -> str:
    where = array.sharding
    spec = where.spec if isinstance(where, jax.sharding.NamedSharding) else where
    return f"{array.dtype} {list(array.shape)} {spec} {where.memory_kind}"


def differences(stored: Mapping[str, Any], current: Mapping[str, Any], path: str = "") -> dict[str, tuple[Any, Any]]:
    """Returns where two keys differ, and what each has there, by the path of the part."""
    result: dict[str, tuple[Any, Any]] = {}
    for name in dict.fromkeys([*current, *stored]):
        old, new = stored.get(name), current.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            result |= differences(old, new, f"{path}{name}.")
        elif old != new:
            result[f"{path}{name}"] = (old, new)
    return result
