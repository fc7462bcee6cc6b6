"""A network that stays in PyTorch, and how networks are called: the original's side of `program`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchport.stages.outputs import leaves, not_finite, of_call


class FirstNotFinite:
    """Looks at what each module of a network returns.

    Args:
        module: The network; hooks are added to its modules.
    """

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        #: The first module whose output has NaN or infinity, as a sentence; empty as long as there is none.
        self.text = ""
        self.name = name
        for path, part in module.named_modules():
            part.register_forward_hook(functools.partial(self._look, path), with_kwargs=True)

    def _look(self, path: str, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Looks at what a module returns: a forward hook. A module's parts come before it."""
        if self.text or not (bad := _bad({"": output})):
            return
        count, size = next(iter(bad.values()))
        held = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        if weights := _bad(held):
            cause = f"its '{next(iter(weights))}' has them already"
        elif _bad({"args": args, "kwargs": kwargs}):
            cause = "what it is called with has them already"
        else:
            cause = "its weights and what it is called with are finite"
        where = f"'{path}' of '{self.name}'" if path else f"'{self.name}'"
        kind = type(module).__name__
        self.text = f"{where}, a {kind}, is the first module to return them: {count} of {size} values; {cause}"


def _bad(trees: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Returns how many values of each tensor are NaN or infinite, and how many it has, by path, if any are."""
    tensors = {path: leaf for path, leaf in leaves(trees).items() if isinstance(leaf, torch.Tensor)}
    return {path: (count, leaf.numel()) for path, leaf in tensors.items() if (count := not_finite(leaf))}


How = Callable[..., Any]
"""How a network is called, `how(module, **inputs)`."""


def plainly(module: torch.nn.Module, **inputs: Any) -> Any:
    return module(**inputs)


class Eager:
    """A module called as it is, in PyTorch, on the host: the original."""

    batches = False
    drops = False

    def __init__(
        self, module: torch.nn.Module, how: How = plainly, outputs: Sequence[str] = (), name: str = "the network"
    ) -> None:
        self.module = module
        self.how = how
        self.outputs = outputs
        self.name = name
        #: The first of its modules that returned NaN or infinity, where that is looked for.
        self.first: FirstNotFinite | None = None

    def place(self, **inputs: Any) -> dict[str, Any]:
        return inputs

    def __call__(self, **inputs: Any) -> Any:
        """Returns the module's first output, or all of them if they have names."""
        with torch.no_grad():
            return of_call(self.how(self.module, **inputs), self.outputs, self.name)
