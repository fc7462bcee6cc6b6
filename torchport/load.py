"""Builds a module without storage, fills it from safetensors, and accounts for every key."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from torchport.card import Card
from torchport.errors import (
    CheckpointBrokenError,
    CheckpointForeignError,
    CheckpointMissingError,
    UnfilledWeightError,
    nearest,
)
from torchport.progress import log, track


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A folder in the diffusers format (`model_index.json`, one folder per component).

    Attributes:
        folder: Where it lies.
        identity: What the manifest calls it: `repo@commit`, or the folder's name.
        digests: Of each component that is there, by name: two copies of one checkpoint agree.
    """

    folder: Path
    identity: str
    digests: dict[str, str]


def is_folder(name: str) -> bool:
    """Whether `--checkpoint` names a folder rather than `repo@revision`."""
    return name.startswith((".", "/", "~")) or ("@" not in name and (Path(name).exists() or name.count("/") != 1))


def local(name: str) -> Path | None:
    """Returns a checkpoint's folder if it is on this machine already, given or in the hub's cache; asks no network."""
    if is_folder(name):
        folder = Path(name).expanduser().resolve()
        return folder if folder.is_dir() else None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    repo, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repo, revision=revision or "main", local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def locate(name: str, card: Card) -> Checkpoint:
    """Returns a checkpoint that is on this machine, downloading it first if it is `repo@revision`.

    Args:
        name: A folder, or `owner/repo@revision` (`main` if no revision is given).
        card: The model card whose components the checkpoint must hold.

    Raises:
        CheckpointMissingError: No such folder, or the repository cannot be reached.
        CheckpointBrokenError: `model_index.json` is not JSON.
        CheckpointForeignError: Components of other classes than the card's.
    """
    if is_folder(name):
        folder = Path(name).expanduser().resolve()
        if not folder.is_dir():
            raise CheckpointMissingError(
                f"--checkpoint {name}", "There is no such folder", "Name a folder, or owner/repo@revision"
            )
        identity = f"folder:{folder.name}"
    else:
        folder = _downloaded(name, card)
        identity = f"{name.partition('@')[0]}@{folder.name}"  # the cache names a snapshot by its commit
    check_index(folder, card)
    return Checkpoint(folder, identity, digests(folder, card))


def _downloaded(name: str, card: Card) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repo, _, revision = name.partition("@")
    wanted = ["model_index.json", *(f"{component}/*" for component in card.components)]
    log.info("checkpoint %s ...", name)
    try:
        return Path(snapshot_download(repo, revision=revision or "main", allow_patterns=wanted))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise CheckpointMissingError(
            f"--checkpoint {name}",
            f"It is neither in the cache nor to be had: {reason}",
            "Check the name and the network, or pass --checkpoint DIR with a copy of it",
            repo=repo,
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    """Returns a JSON object of a checkpoint.

    Raises:
        CheckpointMissingError: No such file.
        CheckpointBrokenError: Not a JSON object.
    """
    if not file.is_file():
        raise CheckpointMissingError(str(file), "The file is missing", "Download the checkpoint again, whole")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointBrokenError(str(file), f"Not JSON: {error}", "Download the file again") from error
    if not isinstance(data, dict):
        raise CheckpointBrokenError(str(file), "Not a JSON object", "Download the file again")
    return data


def check_index(folder: Path, card: Card) -> None:
    """Refuses a folder whose `model_index.json` lists other classes than the card's.

    Raises:
        CheckpointMissingError, CheckpointBrokenError: No index, or one that cannot be read.
        CheckpointForeignError: Another model's index.
    """
    file = folder / "model_index.json"
    index = read_json(file)
    for name, component in card.components.items():
        library, _, class_name = component.class_.partition(":")
        if name not in index:
            raise CheckpointForeignError(
                str(file),
                f"It has no component '{name}'",
                f"The card '{card.model}' wants a {class_name}. {nearest(name, index)}",
                component=name,
            )
        found = [str(word).removesuffix("Fast") for word in index[name]]  # transformers 4 had two of each tokenizer
        if found != [library.partition(".")[0], class_name]:
            raise CheckpointForeignError(
                str(file),
                f"'{name}' is {index[name]}",
                f"The card '{card.model}' wants {[library, class_name]}: name a checkpoint of that model",
                component=name,
            )


def digests(folder: Path, card: Card) -> dict[str, str]:
    """Returns a digest of each component of a checkpoint that is there.

    It covers every file's name and size, and its two ends: sixteen gigabytes are not read through for a name. A
    safetensors header, with all names, shapes and offsets, is in the first end.
    """
    return {name: _digest(folder / name) for name in card.components if (folder / name).is_dir()}


def _digest(folder: Path) -> str:
    sha = hashlib.sha256()
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        size = file.stat().st_size
        sha.update(f"{file.relative_to(folder).as_posix()}\0{size}\0".encode())
        with file.open("rb") as stream:
            sha.update(stream.read(2**16))
            if size > 2**16:
                stream.seek(max(2**16, size - 2**16))
                sha.update(stream.read(2**16))
    return sha.hexdigest()[:16]


def class_of(path: str) -> Any:
    """Returns the class that a card names as `package.module:Class`; patches must be in place by now."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def build(class_path: str, config: Mapping[str, Any], dtype: str, place: str) -> torch.nn.Module:
    """Returns a diffusers module without storage: weights on meta, buffers real, in evaluation mode.

    Buffers that no file holds are computed by the class's own constructor.

    Args:
        class_path: `package.module:Class`.
        config: As the checkpoint's `config.json` has it.
        dtype: Of floating-point weights; what the class keeps in float32 stays float32.
        place: The component's folder, for errors.

    Raises:
        CheckpointForeignError: A configuration that the class cannot be built from.
    """
    from accelerate import init_empty_weights

    try:
        with init_empty_weights(include_buffers=False):
            module: torch.nn.Module = class_of(class_path).from_config(dict(config))
    except (TypeError, ValueError, RuntimeError, ZeroDivisionError, IndexError) as error:
        raise CheckpointForeignError(
            f"{place}/config.json",
            f"{class_path.partition(':')[2]} cannot be built from it: {error}",
            "Name a checkpoint of this model and version",
        ) from error
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    for name, tensor in module.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and not kept & set(name.split(".")):
            tensor.data = tensor.data.to(getattr(torch, dtype))
    return module.eval().requires_grad_(False)


def published(class_path: str, config: Mapping[str, Any]) -> torch.nn.Module:
    """Returns a module on meta altogether: shapes for planning, with no checkpoint at hand."""
    with torch.device("meta"):
        module: torch.nn.Module = class_of(class_path)(**config)
    return module.eval().requires_grad_(False)


def weight_files(folder: Path) -> dict[str, Path]:
    """Returns the file of every tensor of a component, from the index or the single file.

    Raises:
        CheckpointMissingError: No safetensors, or a shard of the index is missing.
        CheckpointBrokenError: A file is truncated or not safetensors.
    """
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if indices:
        mapping = read_json(indices[0]).get("weight_map")
        if not isinstance(mapping, dict):
            raise CheckpointBrokenError(str(indices[0]), "It has no 'weight_map'", "Download the file again")
        files = [folder / name for name in sorted(set(mapping.values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointMissingError(
            str(folder), "There is no *.safetensors in it", "Download the checkpoint again, whole"
        )
    return {name: file for file in files for name in header(file)}


def parameters(folder: Path) -> int:
    """Returns how many parameters a component has, from its files' headers."""
    entries = [entry for file in sorted(set(weight_files(folder).values())) for entry in header(file).values()]
    return sum(math.prod(entry["shape"]) for entry in entries)


def header(file: Path) -> dict[str, Any]:
    """Returns the tensors of a safetensors file: name to dtype, shape and offsets.

    Raises:
        CheckpointMissingError: No such file.
        CheckpointBrokenError: Truncated, or not safetensors.
    """
    if not file.is_file():
        raise CheckpointMissingError(str(file), "The file is missing", "Download the checkpoint again, whole")
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= size - 8:
            raise CheckpointBrokenError(str(file), f"{size} bytes, and not safetensors", "Download the file again")
        try:
            entries = json.loads(stream.read(length))
            entries.pop("__metadata__", None)
            end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointBrokenError(
                str(file), "Its header is not safetensors'", "Download the file again"
            ) from error
    if size != end:
        raise CheckpointBrokenError(
            str(file),
            f"It has {size} bytes, and its header promises {end}",
            "Download the file again: it is truncated",
            size=size,
            promised=end,
        )
    return dict(entries)


def tensors(module: torch.nn.Module, folder: Path, what: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every parameter and buffer of a module, filled from a component's safetensors.

    Args:
        module: Built without storage; its dtypes are those that the tensors are cast to.
        folder: The component's folder.
        what: What the progress bar calls it.

    Raises:
        CheckpointMissingError, CheckpointBrokenError: Files that cannot be read.
        CheckpointForeignError: Keys or shapes that are not the module's, either way round.
        UnfilledWeightError: A buffer that neither the files nor the constructor filled.
    """
    from safetensors import safe_open

    wanted = module.state_dict()
    files = weight_files(folder)
    _account(wanted, files, folder)
    for name, buffer in module.named_buffers():
        if name not in wanted:
            yield name, _filled(name, buffer, folder)
    open_file: Path | None = None
    stream: Any = None
    for file, name in track(sorted((file, name) for name, file in files.items()), f"load {what}", "tensor"):
        if file != open_file:
            open_file, stream = file, safe_open(str(file), framework="pt")
        tensor: torch.Tensor = stream.get_tensor(name)
        yield name, tensor.to(wanted[name].dtype)


def _account(wanted: Mapping[str, torch.Tensor], files: Mapping[str, Path], folder: Path) -> None:
    """Refuses a component whose keys and shapes are not exactly the module's."""
    missing = sorted(set(wanted) - set(files))
    foreign = sorted(set(files) - set(wanted))
    if missing or foreign:
        parts = [f"lacks {len(missing)} of the model's tensors (first '{missing[0]}')"] if missing else []
        parts += [f"holds {len(foreign)} that the model has not (first '{foreign[0]}')"] if foreign else []
        raise CheckpointForeignError(
            str(folder),
            f"It {' and '.join(parts)}",
            "Name a checkpoint of this model and version",
            missing=missing,
            foreign=foreign,
        )
    for file in sorted(set(files.values())):
        for name, entry in header(file).items():
            if tuple(entry["shape"]) != tuple(wanted[name].shape):
                raise CheckpointForeignError(
                    str(file),
                    f"'{name}' has shape {entry['shape']}",
                    f"The model's has {list(wanted[name].shape)}: name a checkpoint of this model",
                    name=name,
                )


def _filled(name: str, tensor: torch.Tensor, folder: Path) -> torch.Tensor:
    if tensor.is_meta:
        raise UnfilledWeightError(
            str(folder),
            f"'{name}' has no storage after loading",
            "It is a buffer that the files do not hold: report it, the class must compute it",
            name=name,
        )
    return tensor


def fill(module: torch.nn.Module, folder: Path, what: str) -> torch.nn.Module:
    """Returns the module with every tensor filled, in host memory; see `tensors` for what it refuses."""
    filled = dict(tensors(module, folder, what))
    own = {name: tensor for name, tensor in filled.items() if name in module.state_dict()}
    module.load_state_dict(own, assign=True, strict=True)
    module.requires_grad_(False)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        _filled(name, tensor, folder)
    return module


def text_encoder(class_path: str, folder: Path, dtype: str, what: str) -> torch.nn.Module:
    """Returns a transformers model in host memory, loaded by its own `from_pretrained`, every key accounted for.

    transformers renames keys, ties weights and computes buffers while it loads; that knowledge is its own.

    Raises:
        CheckpointMissingError, CheckpointBrokenError: Files that cannot be read.
        CheckpointForeignError: Keys or shapes that are not the model's.
    """
    weight_files(folder)
    log.info("load %s ...", what)
    module: torch.nn.Module
    module, info = class_of(class_path).from_pretrained(
        folder, dtype=getattr(torch, dtype), output_loading_info=True, local_files_only=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        keys = sorted(str(key) for key in info.get(kind) or ())
        if keys:
            raise CheckpointForeignError(
                str(folder),
                f"{len(keys)} {kind.replace('_', ' ')} (first '{keys[0]}')",
                "Name a checkpoint of this model and version",
                keys=keys,
            )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        _filled(name, tensor, folder)
    return module.eval().requires_grad_(False)


@contextlib.contextmanager
def hushed(hush: bool) -> Iterator[None]:
    """Keeps upstream's own bars and notes from between torchport's while the context lasts."""
    if not hush:
        yield
        return
    import diffusers.utils.logging
    import transformers.utils.logging

    libraries = (diffusers.utils.logging, transformers.utils.logging)
    levels = [library.get_verbosity() for library in libraries]
    bars = [library.is_progress_bar_enabled() for library in libraries]
    try:
        for library in libraries:
            library.set_verbosity_error()
            library.disable_progress_bar()
        yield
    finally:
        for library, level, bar in zip(libraries, levels, bars, strict=True):
            library.set_verbosity(level)
            if bar:
                library.enable_progress_bar()


def part(class_path: str, folder: Path) -> Any:
    """Returns what has no weights (tokenizer, scheduler, guider), by its own `from_pretrained`.

    Raises:
        CheckpointMissingError: The folder is not there.
        CheckpointBrokenError: Its files cannot be read.
    """
    if not folder.is_dir():
        raise CheckpointMissingError(str(folder), "The folder is missing", "Download the checkpoint again, whole")
    try:
        return class_of(class_path).from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise CheckpointBrokenError(str(folder), f"It cannot be read: {reason}", "Download it again") from error
