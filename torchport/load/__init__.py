"""Weights: a checkpoint's files, the modules that they fill, and the tiny checkpoint of the demo."""

from torchport.load.module import (
    account_component,
    build,
    class_of,
    default_dtype,
    fill,
    part,
    published,
    tensors,
    text_encoder,
)

__all__ = [
    "account_component",
    "build",
    "class_of",
    "default_dtype",
    "fill",
    "part",
    "published",
    "tensors",
    "text_encoder",
]
