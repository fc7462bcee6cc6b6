"""Stand-ins for the ATen operators and overloads that torchax 0.0.13 names and a later torch no longer has."""

from __future__ import annotations

import torch


class RemovedOverload:
    """Answers to the name of an operator or overload that torch has removed. Nothing dispatches to it; a call raises.

    Args:
        name: The operator or overload, as torchax writes it.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __repr__(self) -> str:
        return f"<removed from torch: {self.__name__}>"

    def __getattr__(self, key):
        if key.startswith("_"):
            raise AttributeError(key)
        return RemovedOverload(f"{self.__name__}.{key}")

    def __call__(self, *args, **kwargs):
        raise RuntimeError(
            f"{self.__name__}: torch {torch.__version__} has removed it, and torchax calls it. "
            "Report it to torchax; nothing in torch can produce the call"
        )


def named_overload(original, self, key):
    """Returns what the packet has under a name, or a stand-in for a removed overload of named tensors."""
    try:
        return original(self, key)
    except AttributeError:
        if self._qualified_op_name.startswith("aten::") and ("imname" in key or "names" in key):
            return RemovedOverload(f"{self._qualified_op_name}.{key}")
        raise


def removed_operator(original, self, op_name):
    """Returns what the namespace has under a name, or a stand-in for a removed operator of ATen."""
    try:
        return original(self, op_name)
    except AttributeError:
        if self.name == "aten" and not op_name.startswith("_"):
            return RemovedOverload(f"aten::{op_name}")
        raise


def overloads_are_gone() -> bool:
    """Returns whether torch has removed the overloads of named tensors."""
    return "dim_Dimname" not in torch.ops.aten.prod.overloads()


def operators_are_gone() -> bool:
    """Returns whether torch has removed the operators that torch.linalg has replaced."""
    return not hasattr(torch.ops.aten, "cholesky")
