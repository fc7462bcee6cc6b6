"""A network that stays in PyTorch, and how networks are called: the original's side of `program`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchport.compile.finite import FirstNotFinite
from torchport.stages.outputs import of_call

How = Callable[..., Any]
"""How a network is called, `how(module, **inputs)`."""


def plainly(module: torch.nn.Module, **inputs: Any) -> Any:
    return module(**inputs)


class Eager:
    """A module called as it is, in PyTorch, on the host: the original.

    Attributes:
        first: The first of its modules that returned NaN or infinity, where that is looked for.
    """

    batches = False
    drops = False

    def __init__(
        self, module: torch.nn.Module, how: How = plainly, outputs: Sequence[str] = (), name: str = "the network"
    ) -> None:
        self.module = module
        self.how = how
        self.outputs = outputs
        self.name = name
        self.first: FirstNotFinite | None = None

    def place(self, **inputs: Any) -> dict[str, Any]:
        """Returns the inputs as they are: an eager module runs on the host."""
        return inputs

    def __call__(self, **inputs: Any) -> Any:
        """Returns the module's first output, or all of them if they have names."""
        with torch.no_grad():
            return of_call(self.how(self.module, **inputs), self.outputs, self.name)
