"""Weights: a checkpoint's files, the modules that they fill, and the tiny checkpoint of the demo."""

import inspect
from pathlib import Path

import torch

from torchport.config.card import Card, Component
from torchport.errors import BadValueError, CheckpointForeignError
from torchport.load import checkpoint, modular, pretrained
from torchport.load.foreign import check_values
from torchport.load.layout import Layout as Layout
from torchport.load.layout import layout_of as layout_of
from torchport.load.lora import Lora as Lora
from torchport.load.lora import Loras as Loras
from torchport.load.module import Builder as Builder
from torchport.load.module import Maker as Maker
from torchport.load.module import Recipe as Recipe
from torchport.load.module import account, check_dtype
from torchport.load.module import build as build
from torchport.load.module import class_of as class_of
from torchport.load.module import configuration as configuration
from torchport.load.module import default_dtype as default_dtype
from torchport.load.module import fill as fill
from torchport.load.module import fill_buffers as fill_buffers
from torchport.load.module import published as published
from torchport.load.module import tensors as tensors
from torchport.load.pretrained import part as part
from torchport.load.pretrained import text_encoder as text_encoder


def is_built_here(component: Component) -> bool:
    """Whether torchport builds and fills the module; all else is loaded by upstream's own `from_pretrained`."""
    cls = class_of(component.class_)
    if component.build is not None:
        return True
    # Only transformers knows how its classes take the names in their files.
    return issubclass(cls, torch.nn.Module) and (hasattr(cls, "from_config") or not hasattr(cls, "config_class"))


def reads_config(component: Component) -> bool:
    """Whether a module that is built here has its configuration in `config.json`, and not in the card."""
    in_card = component.build is not None or component.file is not None
    return not in_card and hasattr(class_of(component.class_), "from_config")


def records_config(component: Component, folder: Path) -> bool:
    """Whether a component of a checkpoint is built from the `config.json` that lies in its folder. That holds for
    modules of transformers, too, unless the card says how they are built.
    """
    is_transformers = not component.published and hasattr(class_of(component.class_), "config_class")
    is_open = component.build is None and component.file is None and is_transformers
    return reads_config(component) or (is_open and (folder / "config.json").is_file())


def account_component(
    component: Component, folder: Path, layout: Layout | None = None, recipe: Recipe | None = None
) -> None:
    """Refuses a component whose files are incomplete, or are not the card's, before any of its tensors is read.

    Args:
        layout: How its tensors lie there; by default as the card has it without a variant.
        recipe: How it is built, where the card says so; by default from its `config.json`.
    """
    layout = layout or layout_of(component, component.file, [])
    if is_built_here(component):
        if recipe is None:
            file = folder / "config.json"
            recipe = Recipe(component.class_, checkpoint.read_json(file), str(file))
            check_values(class_of(component.class_), file, recipe.config)
        module = published(*recipe)
        layout.additions(module.state_dict(), account(module, folder, layout)).check()
    elif component.rename:
        fact = f"'rename' is for modules that torchport fills, and upstream loads {component.class_}"
        raise BadValueError(layout.places[0] if layout.places else str(folder), fact, "Remove it, or add 'build'")
    elif component.file is not None:
        # Upstream loads the file strictly, so it refuses wrong keys and shapes.
        for stored in layout.held(folder).values():
            check_dtype(stored.file, stored.name, stored.dtype, torch.float32)
    elif issubclass(class_of(component.class_), torch.nn.Module):
        pretrained.account(component, folder)
    else:
        pretrained.check_part(component.class_, folder)


def check_init(card: Card, folder: Path) -> None:
    """Refuses a checkpoint whose pipeline has other constructor arguments than the card, or than upstream's defaults. A
    missing value counts as null and as false. A component that the card sets to null is not compared.
    """
    assert card.call is not None
    defaults = inspect.signature(class_of(str(card.pipeline)).__init__).parameters
    init = {name: each.default for name, each in defaults.items() if each.default is not each.empty} | card.call.init
    file, index = checkpoint.pipeline_index(folder)
    values = {key for key, value in index.items() if not key.startswith("_") and not isinstance(value, list)}
    values &= set(init) if modular.is_modular(class_of(str(card.pipeline))) else values  # it reads no others
    left_out = {name for name, value in card.call.init.items() if value is None and isinstance(index.get(name), list)}
    for name in sorted((values | set(card.call.init)) - left_out):
        if (index.get(name) or None) != (init.get(name) or None):
            fact = f"'{name}' is {index.get(name)!r}"
            remedy = (
                f"The card '{card.model}' has {init.get(name)!r} under 'call.init': name a checkpoint of that model"
            )
            raise CheckpointForeignError(str(file), fact, remedy, name=name)
