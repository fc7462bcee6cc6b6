"""Names of a network's modules in its program, by which a profile shows what each operation belongs to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import torch

from torchport.compile.stack import Stacked

LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)
"""Modules that are not called: their items are."""


@contextlib.contextmanager
def named(module: torch.nn.Module, name: str) -> Iterator[None]:
    """Puts the name of each module that is called into the operations that are traced in the call.

    An operation of XLA then has a name such as `jit(program)/transformer/blocks.0-53/while/body/block/attn/to_q/dot`.
    Names are no part of what XLA compiles: a program's key and its numbers stay as they are.

    Args:
        module: The network.
        name: What the network is called.
    """
    entered: list[Any] = []

    def enter(scope: str) -> None:
        entered.append(jax.named_scope(scope))
        entered[-1].__enter__()

    def leave() -> None:
        entered.pop().__exit__(None, None, None)

    handles = []
    for part, scope in scopes(module, name).items():
        handles.append(part.register_forward_pre_hook(lambda _, inputs, scope=scope: enter(scope)))
        # Also after an exception: upstream may catch it and go on.
        handles.append(part.register_forward_hook(lambda _, inputs, output: leave(), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def scopes(module: torch.nn.Module, name: str) -> Mapping[torch.nn.Module, str]:
    """Returns what each module of a network is called inside the one that calls it; that of a stack has its numbers."""
    modules = dict(module.named_modules())
    result: dict[torch.nn.Module, str] = {module: name}
    for path, part in modules.items():
        if not path or isinstance(part, LISTS):
            continue
        parent = path.rpartition(".")[0]
        while parent and isinstance(modules[parent], LISTS):
            parent = parent.rpartition(".")[0]
        scope = path[len(parent) :].lstrip(".")
        if isinstance(part, Stacked):
            scope = f"{scope}-{part.first + part.count - 1}"
        result[part] = scope
    return result
