"""Builds a module without storage, fills it from safetensors, and accounts for every key.

Over 400 lines: all that reads a component's files accounts for them in the same way.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import itertools
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from torchport.config.card import Component
from torchport.errors import (
    CheckpointBrokenError,
    CheckpointForeignError,
    CheckpointMissingError,
    UnfilledWeightError,
    UnknownNameError,
    nearest,
)
from torchport.foreign import check_values, reading
from torchport.load import checkpoint
from torchport.progress import log, track

SAME = "Name a checkpoint of this model and version"
"""The remedy for files of another model."""


def class_of(path: str, place: str | None = None) -> Any:
    """Returns the class that a card names as `package.module:Class`; patches must be in place by now.

    Args:
        path: As the card has it.
        place: Where it is written; by default the path itself.

    Raises:
        UnknownNameError: There is no such module, or it has no such name.
    """
    module, _, name = path.partition(":")
    try:
        home = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise _no_module(module, error.name, place or path) from error
    try:
        return getattr(home, name)
    except AttributeError as error:
        if name in dir(home):  # its own import fails
            raise
        fact = f"'{module}' has no class '{name}'"
        raise UnknownNameError(place or path, fact, _closest(name, dir(home)), name=name) from error


def _no_module(module: str, missing: str, place: str) -> UnknownNameError:
    """Returns the refusal of a module that does not exist, with the nearest one of its package."""
    package, _, name = missing.rpartition(".")
    if not package:
        fact = f"There is no package '{missing}' for '{module}'"
        return UnknownNameError(place, fact, "Install it, or mend the name", name=missing)
    paths = getattr(sys.modules[package], "__path__", ())
    names = [submodule.name for submodule in pkgutil.iter_modules(paths)]
    return UnknownNameError(place, f"'{package}' has no module '{name}'", _closest(name, names), name=missing)


def _closest(name: str, names: Iterable[str]) -> str:
    """Returns a remedy with the names that are like one; a package has too many to list all."""
    public = sorted(other for other in names if not other.startswith("_"))
    close = difflib.get_close_matches(name, public, n=3, cutoff=0.6)
    if not close:
        return nearest(name, public) if len(public) <= 10 else f"None of its {len(public)} names is like it"
    return f"The nearest {'are' if len(close) > 1 else 'is'} {', '.join(map(repr, close))}"


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
        module = _construct(class_path, config, place)
    return _cast(module, getattr(torch, dtype))


def _cast(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Casts floating-point weights, except those that the class keeps in float32, as upstream's own loading does."""
    float32_names = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    for name, tensor in module.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if float32_names & set(name.split(".")) else dtype)
    return module


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Sets PyTorch's default dtype while the context lasts, for tensors that upstream creates without naming one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def published(class_path: str, config: Mapping[str, Any], place: str = "the card", dtype: str | None = None) -> Any:
    """Returns a module with all weights and buffers on meta: shapes for planning, without a checkpoint; see `build`.

    Args:
        class_path: `package.module:Class`.
        config: As the checkpoint's `config.json` has it.
        place: The component's folder, for errors.
        dtype: Of weights, as `build` gives it to them; by default PyTorch's own.
    """
    with torch.device("meta"):
        if dtype is None:
            return _construct(class_path, config, place)
        with default_dtype(getattr(torch, dtype)):
            return _cast(_construct(class_path, config, place), getattr(torch, dtype))


def _construct(class_path: str, config: Mapping[str, Any], place: str) -> torch.nn.Module:
    cls = class_of(class_path)
    with _building(class_path, place):
        module: torch.nn.Module = cls.from_config(dict(config))
    return module.eval().requires_grad_(False)


MOST = 20_000
"""Parameters of a module, at most: building more than any real model has would use up the memory."""


@contextlib.contextmanager
def _building(class_path: str, place: str) -> Iterator[None]:
    """Refuses a configuration from which the class cannot be built, or would be built without end."""
    count = itertools.count(1)

    def check_count(module: torch.nn.Module, name: str, parameter: object) -> None:
        if next(count) > MOST:
            raise ValueError(f"it asks for more than {MOST} parameters")

    hook = register_module_parameter_registration_hook(check_count)
    fact, remedy = (
        f"{class_path.partition(':')[2]} cannot be built from it",
        SAME,
    )
    try:
        with reading(CheckpointForeignError, f"{place}/config.json", fact, remedy):
            yield
    finally:
        hook.remove()


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

    state = module.state_dict()
    files = account(module, folder)
    for name, buffer in module.named_buffers():
        if name not in state:
            yield name, _check_filled(name, buffer, folder)
    open_file: Path | None = None
    stream: Any = None
    for file, name in track(sorted((file, name) for name, file in files.items()), f"load {what}", "tensor"):
        if file != open_file:
            open_file, stream = file, safe_open(str(file), framework="pt")
        tensor: torch.Tensor = stream.get_tensor(name)
        yield name, tensor.to(state[name].dtype)


def account(module: torch.nn.Module, folder: Path) -> dict[str, Path]:
    """Returns the file of every tensor of a module, all keys, shapes and dtypes accounted for, either way round.

    Args:
        module: Built without storage.
        folder: The component's.

    Raises:
        CheckpointMissingError, CheckpointBrokenError: Files that cannot be read.
        CheckpointForeignError: Keys or shapes that are not exactly the module's, or dtypes that do not become its.
    """
    state, files = module.state_dict(), checkpoint.weight_files(folder)
    missing = sorted(set(state) - set(files))
    foreign = sorted(set(files) - set(state))
    if missing or foreign:
        parts = [f"lacks {len(missing)} of the model's tensors (first '{missing[0][:120]}')"] if missing else []
        parts += [f"holds {len(foreign)} that the model has not (first '{foreign[0][:120]}')"] if foreign else []
        raise CheckpointForeignError(
            str(folder),
            f"It {' and '.join(parts)}",
            SAME,
            missing=missing,
            foreign=foreign,
        )
    for file in sorted(set(files.values())):
        for name, entry in checkpoint.header(file).items():
            if tuple(entry["shape"]) != tuple(state[name].shape):
                raise CheckpointForeignError(
                    str(file),
                    f"'{name}' has shape {entry['shape']}",
                    f"The model's has {list(state[name].shape)}: name a checkpoint of this model",
                    name=name,
                )
            _check_dtype(file, name, entry["dtype"], state[name].dtype)
    return files


def _check_dtype(file: Path, name: str, dtype: str, target: torch.dtype) -> None:
    """Refuses a tensor whose values would change, or lose their meaning, in the module's dtype."""
    word = str(target).removeprefix("torch.")
    loadable = list(checkpoint.FLOATS) if target.is_floating_point else [checkpoint.CODES[word]]
    if dtype not in loadable:
        raise CheckpointForeignError(
            str(file),
            f"'{name}' is of dtype {dtype}, and the model's is {word}",
            f"Name a checkpoint whose '{name}' is of {' or '.join(loadable)}",
            name=name,
        )


def _check_filled(name: str, tensor: torch.Tensor, folder: Path) -> torch.Tensor:
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
    state = {name: tensor for name, tensor in filled.items() if name in module.state_dict()}
    module.load_state_dict(state, assign=True, strict=True)
    module.requires_grad_(False)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        _check_filled(name, tensor, folder)
    return module


def account_component(component: Component, folder: Path) -> None:
    """Refuses a component that is not whole, or not the card's, before any of it is read; all components pass here.

    Args:
        component: As the card has it.
        folder: Where it lies.

    Raises:
        CheckpointMissingError, CheckpointBrokenError: Files that are missing, or cannot be read.
        CheckpointForeignError: Keys, shapes or dtypes that are not the model's.
    """
    cls = class_of(component.class_)
    if component.pickle is not None:
        _account_pickle(component, folder / component.pickle)
    elif not issubclass(cls, torch.nn.Module):
        check_part(component.class_, folder)
    elif hasattr(cls, "from_config"):
        config = checkpoint.read_json(folder / "config.json")
        check_values(cls, folder / "config.json", config)
        account(published(component.class_, config, str(folder)), folder)
    else:
        _account_encoder(component, folder)


def _account_encoder(component: Component, folder: Path) -> None:
    """Refuses a transformers model whose files lack a tensor, or hold a tensor of another model, before any is read.

    transformers renames keys and ties weights while it loads. Only transformers knows how, so it loads the model here
    without storage. It would fill a missing tensor with new random values in every run.

    Raises:
        CheckpointMissingError, CheckpointBrokenError: Files that cannot be read.
        CheckpointForeignError: Keys, shapes or dtypes that are not the model's.
    """
    module = _from_pretrained(component, folder, device_map="meta")
    whole = {name: tensor.dtype for name, tensor in module.state_dict().items() if not tensor.is_floating_point()}
    for name, (file, entry) in checkpoint.weights(folder).items():
        if not _is_unread(component, name):
            _check_dtype(file, name, entry["dtype"], whole.get(name, torch.float32))


def _from_pretrained(component: Component, folder: Path, **options: Any) -> torch.nn.Module:
    """Returns a transformers model, every key and shape accounted for."""
    checkpoint.weights(folder)
    cls = class_of(component.class_)
    _check_config(cls, folder)
    module: torch.nn.Module
    with _building(component.class_, str(folder)):
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
    """Refuses a configuration of another class or with files of its own, and dtypes that would round in silence."""
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


def _account_pickle(component: Component, file: Path) -> None:
    """Refuses weights that are no floats. Upstream loads the file strictly, so it refuses wrong keys and shapes."""
    for name, entry in checkpoint.pickle_header(file).items():
        if not _is_unread(component, name):
            _check_dtype(file, name, entry["dtype"], torch.float32)


def text_encoder(component: Component, folder: Path, dtype: str, what: str) -> torch.nn.Module:
    """Returns a transformers model in host memory, loaded by its own `from_pretrained`; see `account_component`.

    Raises:
        CheckpointMissingError, CheckpointBrokenError: Files that cannot be read.
        CheckpointForeignError: Keys, shapes or dtypes that are not the model's.
    """
    checkpoint.weight_files(folder)
    _account_encoder(component, folder)
    log.info("load %s ...", what)
    module = _from_pretrained(component, folder, dtype=getattr(torch, dtype))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        _check_filled(name, tensor, folder)
    return module.eval().requires_grad_(False)


def part(class_path: str, folder: Path) -> Any:
    """Returns a part without weights (tokenizer, scheduler, guider), by its own `from_pretrained`.

    Raises:
        CheckpointMissingError: The folder, or a file in it, is not there.
        CheckpointBrokenError: Its files cannot be read.
    """
    check_part(class_path, folder)
    with reading(CheckpointBrokenError, str(folder), "It cannot be read", "Download it again"):
        loaded = class_of(class_path).from_pretrained(folder, local_files_only=True)
        if getattr(loaded, "chat_template", None):
            loaded.apply_chat_template([{"role": role, "content": ""} for role in ("system", "user")], tokenize=False)
        return loaded


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
        config = checkpoint.read_json(file)
        if file.name == getattr(cls, "config_name", None):
            check_values(cls, file, config)
    if not files or not _has_vocabulary(cls, folder):
        raise CheckpointMissingError(
            str(folder), f"It lacks files of a {cls.__name__}", "Download the checkpoint again, whole"
        )


def _has_vocabulary(cls: Any, folder: Path) -> bool:
    """Returns whether a tokenizer's vocabulary is there; without it transformers silently makes an empty one."""
    names: dict[str, str] = dict(getattr(cls, "vocab_files_names", {}))
    whole = names.pop("tokenizer_file", None)
    if whole is not None and (folder / whole).is_file():
        return True
    return all((folder / name).is_file() for name in names.values()) and (bool(names) or whole is None)
