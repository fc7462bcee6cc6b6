"""Builds a module without storage, fills it from safetensors, and accounts for every key."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from torchport import checkpoint
from torchport.errors import (
    CheckpointBrokenError,
    CheckpointForeignError,
    CheckpointMissingError,
    UnfilledWeightError,
)
from torchport.progress import log, track


def class_of(path: str) -> Any:
    """Returns the class that a card names as `package.module:Class`; patches must be in place by now."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def build(class_path: str, config: Mapping[str, Any], dtype: str, place: str) -> torch.nn.Module:
    """Returns a diffusers module without storage: weights on meta, buffers real, in evaluation mode.

    Buffers that no file holds are computed by the class's own constructor, under the default dtype that upstream's
    own loading would set.

    Args:
        class_path: `package.module:Class`.
        config: As the checkpoint's `config.json` has it.
        dtype: Of floating-point weights; what the class keeps in float32 stays float32.
        place: The component's folder, for errors.

    Raises:
        CheckpointForeignError: A configuration that the class cannot be built from.
    """
    from accelerate import init_empty_weights

    with default_dtype(getattr(torch, dtype)), init_empty_weights(include_buffers=False):
        module = _constructed(class_path, config, place)
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    for name, tensor in module.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if kept & set(name.split(".")) else getattr(torch, dtype))
    return module


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Makes a dtype PyTorch's default, of what upstream creates without naming one, while the context lasts."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def published(class_path: str, config: Mapping[str, Any], place: str = "the card") -> Any:
    """Returns a module on meta altogether: shapes for planning, with no checkpoint at hand; see `build`."""
    with torch.device("meta"):
        return _constructed(class_path, config, place)


def _constructed(class_path: str, config: Mapping[str, Any], place: str) -> torch.nn.Module:
    try:
        module: torch.nn.Module = class_of(class_path).from_config(dict(config))
    except (TypeError, ValueError, RuntimeError, ZeroDivisionError, IndexError) as error:
        raise CheckpointForeignError(
            f"{place}/config.json",
            f"{class_path.partition(':')[2]} cannot be built from it: {_brief(error)}",
            "Name a checkpoint of this model and version",
        ) from error
    return module.eval().requires_grad_(False)


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
    files = account(module, folder)
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


def account(module: torch.nn.Module, folder: Path) -> dict[str, Path]:
    """Returns the file of every tensor of a module, all keys and shapes accounted for, either way round.

    Raises:
        CheckpointMissingError, CheckpointBrokenError: Files that cannot be read.
        CheckpointForeignError: Keys or shapes that are not exactly the module's.
    """
    wanted, files = module.state_dict(), checkpoint.weight_files(folder)
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
        for name, entry in checkpoint.header(file).items():
            if tuple(entry["shape"]) != tuple(wanted[name].shape):
                raise CheckpointForeignError(
                    str(file),
                    f"'{name}' has shape {entry['shape']}",
                    f"The model's has {list(wanted[name].shape)}: name a checkpoint of this model",
                    name=name,
                )
    return files


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
    from huggingface_hub.errors import StrictDataclassError

    checkpoint.weight_files(folder)
    checkpoint.read_json(folder / "config.json")
    log.info("load %s ...", what)
    module: torch.nn.Module
    try:
        module, info = class_of(class_path).from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            output_loading_info=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    except (TypeError, ValueError, RuntimeError, OSError, StrictDataclassError) as error:
        raise CheckpointForeignError(
            f"{folder}/config.json",
            f"{class_path.partition(':')[2]} cannot be built from it: {_brief(error)}",
            "Name a checkpoint of this model and version",
        ) from error
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
        CheckpointMissingError: The folder, or a file in it, is not there.
        CheckpointBrokenError: Its files cannot be read.
    """
    check_part(class_path, folder)
    try:
        return class_of(class_path).from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointBrokenError(str(folder), f"It cannot be read: {_brief(error)}", "Download it again") from error


def check_part(class_path: str, folder: Path) -> None:
    """Refuses a part without weights whose files are not there, before it is needed.

    Raises:
        CheckpointMissingError: The folder, or a file in it, is not there.
        CheckpointBrokenError: A file is not JSON.
    """
    if not folder.is_dir():
        raise CheckpointMissingError(str(folder), "The folder is missing", "Download the checkpoint again, whole")
    cls, files = class_of(class_path), sorted(folder.glob("*.json"))
    for file in files:
        checkpoint.read_json(file)
    if not files or not _has_vocabulary(cls, folder):
        raise CheckpointMissingError(
            str(folder), f"It lacks files of a {cls.__name__}", "Download the checkpoint again, whole"
        )


def _has_vocabulary(cls: Any, folder: Path) -> bool:
    """Whether a tokenizer's vocabulary is there; without it transformers makes an empty one, and says nothing."""
    names: dict[str, str] = dict(getattr(cls, "vocab_files_names", {}))
    whole = names.pop("tokenizer_file", None)
    if whole is not None and (folder / whole).is_file():
        return True
    return all((folder / name).is_file() for name in names.values()) and (bool(names) or whole is None)


def _brief(error: Exception) -> str:
    """Returns what an upstream's error says as one short phrase."""
    return " ".join(str(error).split())[:200].rstrip(".")
