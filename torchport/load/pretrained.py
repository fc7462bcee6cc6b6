"""Components that upstream's own `from_pretrained` loads: text encoders, tokenizers, schedulers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from torchport.config.card import Component
from torchport.errors import BadValueError, CheckpointBrokenError, CheckpointForeignError, CheckpointMissingError
from torchport.load import checkpoint, pickled
from torchport.load.foreign import check_values, reading
from torchport.load.module import MOST, SAME, building, check_dtype, check_filled, class_of
from torchport.progress import log


def weights(folder: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Returns file, dtype and shape of each tensor that transformers reads, from safetensors or pickle, or raises."""
    file = folder / "pytorch_model.bin"
    if file.is_file() and not any(folder.glob("*.safetensors*")):
        return {name: (file, entry) for name, entry in pickled.header(file).items()}
    files = sorted(set(checkpoint.weight_files(folder).values()))
    names = ("model.safetensors", "model.safetensors.index.json")
    if not any((folder / name).is_file() for name in names):
        fact = f"It holds {files[0].name[:120]}, and neither {' nor '.join(names)}"
        raise CheckpointForeignError(str(folder), fact, "Give the files the names under which they are published")
    return {name: (file, entry) for file in files for name, entry in checkpoint.header(file).items()}


def account(component: Component, folder: Path) -> None:
    """Refuses a transformers model whose files lack a tensor, or hold a tensor of another model, before any is read.

    transformers renames keys and ties weights while it loads. Only transformers knows how, so it loads the model here
    without storage. It would fill a missing tensor with new random values in every run.
    """
    module = _from_pretrained(component, folder, device_map="meta")
    integers = {name: tensor.dtype for name, tensor in module.state_dict().items() if not tensor.is_floating_point()}
    for name, (file, entry) in weights(folder).items():
        if not _is_unread(component, name):
            check_dtype(file, name, entry["dtype"], integers.get(name, torch.float32))


def _from_pretrained(component: Component, folder: Path, **options: Any) -> torch.nn.Module:
    """Returns a transformers model; refuses missing, unexpected and mismatched keys."""
    weights(folder)  # raises for files that transformers would not read
    cls = class_of(component.class_)
    _check_config(cls, folder)
    module: torch.nn.Module
    with building(cls.__name__, f"{folder}/config.json"):
        module, info = cls.from_pretrained(
            folder,
            output_loading_info=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            **options,
        )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        keys = sorted(str(key) for key in info.get(kind) or ())
        if kind == "unexpected_keys":
            keys = [key for key in keys if not _is_unread(component, key)]
        if keys:
            raise CheckpointForeignError(
                str(folder),
                f"{len(keys)} {kind.replace('_', ' ')} (first '{keys[0][:120]}')",
                SAME,
                keys=keys,
            )
    return module


def _is_unread(component: Component, name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in component.unread)


def _check_config(cls: Any, folder: Path) -> None:
    """Refuses a `config.json` of another class, with too many layers, other weight files, or dtypes that round."""
    file = folder / "config.json"
    config = checkpoint.read_json(file)
    expected, model_type = cls.config_class.model_type, config.get("model_type")
    if model_type != expected:
        fact, remedy = f"'model_type' is {model_type!r}", f"It must be '{expected}': name a checkpoint of this model"
        raise CheckpointForeignError(str(file), fact, remedy)
    if config.get("transformers_weights") is not None:  # transformers reads that file, and no other one
        fact = f"'transformers_weights' is {str(config['transformers_weights'])[:80]!r}"
        raise CheckpointForeignError(str(file), fact, "Remove it, and keep the weights in model.safetensors")
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key, value in part.items():
            if "layers" in key and isinstance(value, int) and value > MOST:  # lists are made of it before any layer is
                fact, remedy = f"'{key}' is {value:.3g}", f"It must be at most {MOST}: name a checkpoint of this model"
                raise CheckpointForeignError(str(file), fact, remedy)
        for key in ("dtype", "torch_dtype"):
            if part.get(key) not in (None, "auto", *checkpoint.FLOATS.values()):
                fact, dtypes = f"'{key}' is {str(part[key])[:80]!r}", ", ".join(checkpoint.FLOATS.values())
                raise CheckpointForeignError(str(file), fact, f"It must be one of {dtypes}")


def text_encoder(component: Component, folder: Path, dtype: str, what: str) -> torch.nn.Module:
    """Returns a transformers model in host memory, loaded by its own `from_pretrained`; see `account_component`."""
    if component.file is not None:
        name = class_of(component.class_).__name__
        fact = f"'file' is '{component.file}', and transformers reads a {name} under names of its own"
        raise BadValueError(str(folder), fact, "Add 'build', which makes one that torchport fills")
    checkpoint.weight_files(folder)  # raises if the files are not one set of weights
    account(component, folder)
    log.info("load %s ...", what)
    module = _from_pretrained(component, folder, dtype=getattr(torch, dtype))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        check_filled(name, tensor, folder)
    return module.eval().requires_grad_(False)


def part(class_path: str, folder: Path) -> Any:
    """Returns a part without weights (tokenizer, scheduler, guider), by its own `from_pretrained`."""
    check_part(class_path, folder)
    with reading(CheckpointBrokenError, str(folder), "It cannot be read", "Download it again"):
        loaded = class_of(class_path).from_pretrained(folder, local_files_only=True)
        if getattr(loaded, "chat_template", None):  # it is tried here, so that a broken one is refused
            loaded.apply_chat_template([{"role": role, "content": ""} for role in ("system", "user")], tokenize=False)
        return loaded


def check_part(class_path: str, folder: Path) -> None:
    """Refuses a tokenizer, scheduler or other part without weights whose files are missing, or of another class."""
    if not folder.is_dir():
        raise CheckpointMissingError(str(folder), "The folder is missing", checkpoint.WHOLE)
    cls, files = class_of(class_path), sorted(folder.glob("*.json"))
    if not hasattr(cls, "from_pretrained"):
        remedy = "Give its component a 'dtype' if it has weights, or make it in the stage's 'load'"
        raise BadValueError(str(folder), f"{cls.__name__} has no 'from_pretrained'", remedy)
    for file in files:
        config = checkpoint.read_json(file)
        if file.name == getattr(cls, "config_name", None):
            check_values(cls, file, config)
    # Without its vocabulary transformers silently makes an empty tokenizer.
    names: dict[str, str] = dict(getattr(cls, "vocab_files_names", {}))
    fast_file = names.pop("tokenizer_file", None)
    has_fast = fast_file is not None and (folder / fast_file).is_file()
    has_slow = all((folder / name).is_file() for name in names.values()) and (bool(names) or fast_file is None)
    if not files or not (has_fast or has_slow):
        raise CheckpointMissingError(str(folder), f"It lacks files of a {cls.__name__}", checkpoint.WHOLE)
