"""A network that stays in PyTorch, and how networks are called: the original's side of `program`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchport.stages.family import Call
from torchport.stages.outputs import leaves, not_finite, stage_outputs


class FirstNotFinite:
    """Finds the first module of a network that returns NaN or infinity, by a forward hook on each module."""

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        #: The first module whose output has NaN or infinity, as a sentence; empty as long as there is none.
        self.text = ""
        self.name = name
        for path, part in module.named_modules():
            part.register_forward_hook(functools.partial(self._look, path), with_kwargs=True)

    def _look(self, path: str, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Notes the first module whose output has NaN or infinity, with the cause: a forward hook."""
        # Submodules return before their parent does: the innermost module comes first.
        if self.text or not (bad := _not_finite_counts({"": output})):
            return
        count, size = next(iter(bad.values()))
        tensors = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        if weights := _not_finite_counts(tensors):
            cause = f"its '{next(iter(weights))}' has them already"
        elif _not_finite_counts({"args": args, "kwargs": kwargs}):
            cause = "what it is called with has them already"
        else:
            cause = "its weights and what it is called with are finite"
        where = f"'{path}' of '{self.name}'" if path else f"'{self.name}'"
        kind = type(module).__name__
        self.text = f"{where}, a {kind}, is the first module to return them: {count} of {size} values; {cause}"


def _not_finite_counts(trees: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Returns, for each tensor with NaN or infinite values, their number and the number of all values, by path."""
    tensors = {path: leaf for path, leaf in leaves(trees).items() if isinstance(leaf, torch.Tensor)}
    return {path: (count, leaf.numel()) for path, leaf in tensors.items() if (count := not_finite(leaf))}


How = Callable[..., Any]
"""A function that calls a network: `how(module, **inputs)` returns the network's output."""


def plainly(module: torch.nn.Module, **inputs: Any) -> Any:
    """Calls a module with its inputs and nothing else: the `how` of a network whose family has no `Stage.call`."""
    return module(**inputs)


@dataclasses.dataclass(eq=False)
class Eager(Call):
    """Calls a network in PyTorch on the host, with nothing compiled: the backend `original`."""

    module: torch.nn.Module
    how: How = plainly
    outputs: Sequence[str] = ()  #: The names of its outputs, if more than the first is returned.
    name: str = "the network"
    first: FirstNotFinite | None = None  #: Finds the first module that returns NaN; None: it is not looked for.

    def __call__(self, **inputs: Any) -> Any:
        with torch.no_grad():
            return stage_outputs(self.how(self.module, **inputs), self.outputs, self.name)
