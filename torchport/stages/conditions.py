"""Both conditions of guidance as one batch, where upstream's loop calls its network for one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torchport.errors import BadValueError, nearest
from torchport.stages import outputs

APART = "Remove 'conditions' from the card: each call is then computed by itself"


class Conditions:
    """Computes both conditions at the first of a step's two calls, and keeps the second half for the second call.

    Args:
        embeddings: By input of the network, what it is in the first call and in the second.
    """

    def __init__(self, embeddings: Mapping[str, tuple[torch.Tensor, torch.Tensor]], network: str, place: str) -> None:
        self.embeddings = embeddings
        self.network = network
        self.place = place
        #: The inputs that differ, for both conditions: one tensor for all steps, so that it is placed once.
        self.joined: dict[str, torch.Tensor] = {}
        self.step = -1
        #: The inputs of a first call whose second call has not come.
        self.first: Mapping[str, Any] | None = None
        self.second = torch.empty(0)

    def inputs(self, inputs: Mapping[str, Any], step: int) -> dict[str, Any] | None:
        """Returns one batch of both conditions; None at a step's second call, as the batch has its half already.

        Args:
            step: The number of the step. It may have the first call alone: some loops guide in some steps.
        """
        is_second = self.first is not None and self.step == step
        for name, values in self.embeddings.items():
            self._check_embedding(name, values[is_second], inputs, is_second=is_second)
        if not is_second:
            self.first, self.step = inputs, step
            return self._of_both(inputs)
        assert self.first is not None
        for name in (self.first.keys() | inputs.keys()) - self.embeddings.keys():
            if not _are_equal(self.first.get(name), inputs.get(name)):
                fact = f"The loop calls '{self.network}' for the second condition with another '{name}' than before"
                raise BadValueError(self.place, fact, APART, name=name)
        self.first = None
        return None

    def halves(self, output: torch.Tensor) -> torch.Tensor:
        """Returns the first condition's half of a network's output, and keeps the other."""
        first, self.second = output.chunk(2)
        return first

    def _check_embedding(self, name: str, value: torch.Tensor, inputs: Mapping[str, Any], is_second: bool) -> None:
        """Refuses a call of the network without an input, or with another embedding than the card says."""
        if name not in inputs:
            fact = f"The loop calls '{self.network}' without '{name}'"
            raise BadValueError(self.place, fact, nearest(name, inputs), name=name)
        if not _are_equal(inputs[name], value.to(inputs[name].dtype)):
            which = "second" if is_second else "first"
            fact = (
                f"In its {which} call of '{self.network}' in a step, the loop has another '{name}' than the card says"
            )
            raise BadValueError(self.place, fact, f"Name the embeddings in the order of the calls. {APART}", name=name)

    def _of_both(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns one batch of both conditions, tensors with the same first dim repeated; raises if shapes differ."""
        for name, (first, second) in self.embeddings.items():
            if first.shape != second.shape:
                fact = f"'{name}' is {list(first.shape)} for one condition and {list(second.shape)} for the other"
                raise BadValueError(self.place, fact, f"One batch needs equal shapes. {APART}", name=name)
            if name not in self.joined:
                self.joined[name] = torch.cat([first, second]).to(inputs[name].dtype)
        batch = {first.shape[0] for first, _ in self.embeddings.values()}

        def repeated(value: Any) -> Any:
            has_batch = isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] in batch
            return torch.cat([value, value]) if has_batch else value

        return {name: self.joined[name] if name in self.joined else repeated(inputs[name]) for name in inputs}


def _are_equal(one: Any, other: Any) -> bool:
    """Returns whether two inputs are the same: tensors, trees of them, or anything else."""
    if one is other:
        return True
    first, second = outputs.leaves({"": one}), outputs.leaves({"": other})
    return first.keys() == second.keys() and all(_is_same(first[path], second[path]) for path in first)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one is other or (one.dtype == other.dtype and torch.equal(one, other))
    return bool(one == other)
