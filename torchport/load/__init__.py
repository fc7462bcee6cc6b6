"""Weights: a checkpoint's files, the modules that they fill, and the tiny checkpoint of the demo.

torchport fills modules itself (`module`). Text encoders, tokenizers and schedulers are loaded by upstream's own
`from_pretrained`, here.
"""

import inspect
from pathlib import Path
from typing import Any

import torch

from torchport.config.card import Card, Component
from torchport.errors import BadValueError, CheckpointBrokenError, CheckpointForeignError, CheckpointMissingError
from torchport.load import checkpoint, modular, pickled
from torchport.load.foreign import check_values, reading
from torchport.load.layout import Layout as Layout
from torchport.load.layout import layout_of as layout_of
from torchport.load.lora import Lora as Lora
from torchport.load.lora import Loras as Loras
from torchport.load.module import MOST, SAME, account, building, check_dtype, check_filled
from torchport.load.module import Builder as Builder
from torchport.load.module import Maker as Maker
from torchport.load.module import Recipe as Recipe
from torchport.load.module import build as build
from torchport.load.module import class_of as class_of
from torchport.load.module import configuration as configuration
from torchport.load.module import default_dtype as default_dtype
from torchport.load.module import fill as fill
from torchport.load.module import fill_buffers as fill_buffers
from torchport.load.module import published as published
from torchport.load.module import tensors as tensors
from torchport.progress import log


def is_built_here(component: Component) -> bool:
    """Whether torchport builds and fills a component's module; others are loaded by upstream's `from_pretrained`."""
    cls = class_of(component.class_)
    if component.build is not None:
        return True
    # diffusers' classes have `from_config`. transformers' have `config_class`, and rename tensors while they load.
    return issubclass(cls, torch.nn.Module) and (hasattr(cls, "from_config") or not hasattr(cls, "config_class"))


def reads_config(component: Component) -> bool:
    """Whether a module that is built here has its configuration in `config.json`, and not in the card."""
    in_card = component.build is not None or component.file is not None
    return not in_card and hasattr(class_of(component.class_), "from_config")


def records_config(component: Component, folder: Path) -> bool:
    """Whether a component is built from its folder's `config.json`: the card may say how to build it instead."""
    is_transformers = not component.published and hasattr(class_of(component.class_), "config_class")
    in_card = component.build is not None or component.file is not None
    return reads_config(component) or (is_transformers and not in_card and (folder / "config.json").is_file())


def account_component(
    component: Component, folder: Path, layout: Layout | None = None, recipe: Recipe | None = None
) -> None:
    """Refuses a component whose files are incomplete, or are not the card's, before any of its tensors is read. By
    default its tensors lie as the card says without a variant, and it is built from its `config.json`.
    """
    layout = layout or layout_of(component, component.file, [])
    if is_built_here(component):
        if recipe is None:
            file = folder / "config.json"
            recipe = Recipe(component.class_, checkpoint.read_json(file), str(file))
            check_values(class_of(component.class_), file, recipe.config)
        module = published(*recipe)
        stored = account(module, folder, layout)
        layout.additions(module.state_dict(), stored).check()  # refuses NaN and infinity in LoRA files
    elif component.rename:
        fact = f"'rename' is for modules that torchport fills, and upstream loads {component.class_}"
        raise BadValueError(layout.places[0] if layout.places else str(folder), fact, "Remove it, or add 'build'")
    elif component.file is not None:
        # Upstream loads strictly, and refuses wrong keys and shapes. float32 stands for all floating-point dtypes.
        for tensor in layout.stored_by_file_name(folder).values():
            check_dtype(tensor.file, tensor.name, tensor.dtype, torch.float32)
    elif issubclass(class_of(component.class_), torch.nn.Module):
        _account_pretrained(component, folder)
    else:
        _check_part(component.class_, folder)


def check_init(card: Card, folder: Path) -> None:
    """Refuses a checkpoint whose pipeline has other constructor arguments than the card, or than upstream's defaults.

    A missing value counts as null and as false. A component that the card sets to null is not compared.
    """
    assert card.call is not None
    defaults = inspect.signature(class_of(str(card.pipeline)).__init__).parameters
    init = {name: each.default for name, each in defaults.items() if each.default is not each.empty} | card.call.init
    file, index = checkpoint.pipeline_index(folder)
    names = {key for key, value in index.items() if not key.startswith("_") and not isinstance(value, list)}
    if modular.is_modular(class_of(str(card.pipeline))):
        names &= set(init)  # the class reads no others
    left_out = {name for name, value in card.call.init.items() if value is None and isinstance(index.get(name), list)}
    for name in sorted((names | set(card.call.init)) - left_out):
        if (index.get(name) or None) != (init.get(name) or None):
            expected = init.get(name)
            fact = f"'{name}' is {index.get(name)!r}"
            remedy = f"The card '{card.model}' has {expected!r} under 'call.init': name a checkpoint of that model"
            raise CheckpointForeignError(str(file), fact, remedy, name=name)


def _pretrained_files(folder: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Returns the file and the header's row of each tensor that transformers reads: `{"lm_head.weight": (file, row)}`.

    A row has `dtype` and `shape`. Refuses a folder whose files do not have the names under which transformers reads
    them.
    """
    file = folder / "pytorch_model.bin"
    if file.is_file() and not any(folder.glob("*.safetensors*")):
        return {name: (file, row) for name, row in pickled.header(file).items()}
    rows = checkpoint.weight_files(folder)
    names = ("model.safetensors", "model.safetensors.index.json")
    if not any((folder / name).is_file() for name in names):
        fact = f"It holds {next(iter(rows.values()))[0].name[:120]}, and neither {' nor '.join(names)}"
        raise CheckpointForeignError(str(folder), fact, "Give the files the names under which they are published")
    return rows


def _account_pretrained(component: Component, folder: Path) -> None:
    """Refuses a transformers model whose files lack a tensor, or hold a tensor of another model, before any is read.

    transformers renames keys and ties weights while it loads. Only transformers knows how, so it loads the model here
    on meta, without values. In a run it would fill a missing tensor with random values, and go on.
    """
    files = _pretrained_files(folder)
    module = _from_pretrained(component, folder, device_map="meta")
    integers = {name: tensor.dtype for name, tensor in module.state_dict().items() if not tensor.is_floating_point()}
    is_unread = layout_of(component, component.file, []).is_unread
    for name, (file, row) in files.items():
        # float32 stands for all floating-point dtypes.
        if not is_unread(name):
            check_dtype(file, name, row["dtype"], integers.get(name, torch.float32))


def _from_pretrained(component: Component, folder: Path, **options: Any) -> torch.nn.Module:
    """Returns a transformers model; refuses missing, unexpected and mismatched keys."""
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
            is_unread = layout_of(component, component.file, []).is_unread
            keys = [key for key in keys if not is_unread(key)]
        if keys:
            fact = f"{len(keys)} {kind.replace('_', ' ')} (first '{keys[0][:120]}')"
            raise CheckpointForeignError(str(folder), fact, SAME, keys=keys)
    return module


def _check_config(cls: Any, folder: Path) -> None:
    """Refuses a `config.json` of another class, with too many layers, other weight files, or dtypes that round."""
    file = folder / "config.json"
    config = checkpoint.read_json(file)
    expected = cls.config_class.model_type
    model_type = config.get("model_type")
    if model_type != expected:
        fact, remedy = f"'model_type' is {model_type!r}", f"It must be '{expected}': name a checkpoint of this model"
        raise CheckpointForeignError(str(file), fact, remedy)
    if config.get("transformers_weights") is not None:  # transformers reads that file, and no other one
        fact = f"'transformers_weights' is {str(config['transformers_weights'])[:80]!r}"
        raise CheckpointForeignError(str(file), fact, "Remove it, and keep the weights in model.safetensors")
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key, value in part.items():
            # A constructor makes lists of this length before its first layer.
            if "layers" in key and isinstance(value, int) and value > MOST:
                fact, remedy = f"'{key}' is {value:.3g}", f"It must be at most {MOST}: name a checkpoint of this model"
                raise CheckpointForeignError(str(file), fact, remedy)
        for key in ("dtype", "torch_dtype"):
            if part.get(key) not in (None, "auto", *checkpoint.FLOATS.values()):
                fact, dtypes = f"'{key}' is {str(part[key])[:80]!r}", ", ".join(checkpoint.FLOATS.values())
                raise CheckpointForeignError(str(file), fact, f"It must be one of {dtypes}")


def text_encoder(component: Component, folder: Path, dtype: str, what: str) -> torch.nn.Module:
    """Returns a transformers model in host memory, loaded by its own `from_pretrained`. The log calls it `what`."""
    if component.file is not None:
        name = class_of(component.class_).__name__
        fact = f"'file' is '{component.file}', but transformers finds the files of a {name} by fixed names"
        raise BadValueError(str(folder), fact, "Add 'build': torchport then fills the module from that file")
    checkpoint.weight_files(folder)  # raises if the files are not one set of weights
    _account_pretrained(component, folder)  # raises for missing and foreign tensors, before any is read
    log.info("load %s ...", what)
    module = _from_pretrained(component, folder, dtype=getattr(torch, dtype))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        check_filled(name, tensor, folder)
    return module.eval().requires_grad_(False)


def part(class_path: str, folder: Path) -> Any:
    """Returns a part without weights (tokenizer, scheduler, guider), which its class's `from_pretrained` loads."""
    _check_part(class_path, folder)
    with reading(CheckpointBrokenError, str(folder), "It cannot be read", "Download it again"):
        loaded = class_of(class_path).from_pretrained(folder, local_files_only=True)
        if getattr(loaded, "chat_template", None):  # it is tried here, so that a broken one is refused
            loaded.apply_chat_template([{"role": role, "content": ""} for role in ("system", "user")], tokenize=False)
        return loaded


def _check_part(class_path: str, folder: Path) -> None:
    """Refuses a tokenizer, scheduler or other part without weights whose files are missing, or of another class."""
    if not folder.is_dir():
        raise CheckpointMissingError(str(folder), "The folder is missing", checkpoint.WHOLE)
    cls = class_of(class_path)
    files = sorted(folder.glob("*.json"))
    if not hasattr(cls, "from_pretrained"):
        remedy = "Give its component a 'dtype' if it has weights, or make it in the stage's 'load'"
        raise BadValueError(str(folder), f"{cls.__name__} has no 'from_pretrained'", remedy)
    for file in files:
        config = checkpoint.read_json(file)
        if file.name == getattr(cls, "config_name", None):
            check_values(cls, file, config)
    # Without its vocabulary transformers silently makes an empty tokenizer. A fast tokenizer needs one file, a slow one
    # all others; a scheduler needs none of them.
    names: dict[str, str] = dict(getattr(cls, "vocab_files_names", {}))
    fast_file = names.pop("tokenizer_file", None)
    has_fast = fast_file is not None and (folder / fast_file).is_file()
    has_slow = all((folder / name).is_file() for name in names.values()) and (bool(names) or fast_file is None)
    if not files or not (has_fast or has_slow):
        raise CheckpointMissingError(str(folder), f"It lacks files of a {cls.__name__}", checkpoint.WHOLE)
