"""Stand-ins for the ATen overloads that torchax 0.0.13 names and torch 2.13 no longer has."""

from __future__ import annotations

import torch


class RemovedOverload:
    """Answers to the name of an overload that torch has removed. Nothing dispatches to it; a call raises.

    Args:
        name: The overload, as torchax writes it.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __repr__(self) -> str:
        return f"<removed from torch: {self.__name__}>"

    def __call__(self, *args, **kwargs):
        raise RuntimeError(
            f"{self.__name__}: torch {torch.__version__} has removed this overload with its named tensors, "
            "and torchax calls it. Report it to torchax; nothing in torch can produce the call"
        )


def named_overload(original, self, key):
    """Returns what the packet has under a name, or a stand-in for a removed overload of named tensors."""
    try:
        return original(self, key)
    except AttributeError:
        if self._qualified_op_name.startswith("aten::") and ("imname" in key or "names" in key):
            return RemovedOverload(f"{self._qualified_op_name}.{key}")
        raise


def overloads_are_gone() -> bool:
    """Returns whether torch has removed the overloads of named tensors."""
    return "dim_Dimname" not in torch.ops.aten.prod.overloads()
