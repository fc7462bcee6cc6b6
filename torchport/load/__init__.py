"""Weights: a checkpoint's files, the modules that they fill, and the tiny checkpoint of the demo."""

from torchport.load.component import account_component, check_init, is_built_here, reads_config
from torchport.load.layout import Layout, layout_of
from torchport.load.lora import Lora, Loras
from torchport.load.module import (
    Builder,
    Maker,
    Recipe,
    build,
    class_of,
    configuration,
    default_dtype,
    fill,
    fill_buffers,
    published,
    tensors,
)
from torchport.load.pretrained import part, text_encoder

__all__ = [
    "Builder",
    "Layout",
    "Lora",
    "Loras",
    "Maker",
    "Recipe",
    "account_component",
    "build",
    "check_init",
    "class_of",
    "configuration",
    "default_dtype",
    "fill",
    "fill_buffers",
    "is_built_here",
    "layout_of",
    "part",
    "published",
    "reads_config",
    "tensors",
    "text_encoder",
]
