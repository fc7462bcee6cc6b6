"""Both conditions of guidance as one batch, where upstream's loop calls its network for one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchport.errors import BadValueError, nearest
from torchport.stages import outputs

WITHOUT_BATCH = "Remove 'conditions' from the card: each call is then computed by itself"


class Conditions:
    """Computes both conditions at the first of a step's two calls, and keeps the second half for the second call. The
    embeddings are the network's inputs that differ, by name: their values in the first call and in the second.
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
        #: The output for a second call, once the first has come.
        self.second = torch.empty(0)

    def output(
        self, inputs: Mapping[str, Any], step: int, computed: Callable[[Mapping[str, Any]], torch.Tensor]
    ) -> torch.Tensor:
        """Returns the network's output of a call. A step's first call computes both conditions, its second none.

        Args:
            step: The number of the step. It may have the first call alone: some loops guide in some steps.
            computed: Returns the network's output for the inputs of a batch.
        """
        first = self.first if self.step == step else None
        self._check_embeddings(inputs, is_second=first is not None)
        if first is None:
            self.first, self.step = inputs, step
            half, self.second = computed(self._batch(inputs)).chunk(2)
            return half
        for name in (first.keys() | inputs.keys()) - self.embeddings.keys():
            if not _are_equal(first.get(name), inputs.get(name)):
                fact = f"The loop calls '{self.network}' for the second condition with another '{name}' than before"
                raise BadValueError(self.place, fact, WITHOUT_BATCH, name=name)
        self.first = None
        return self.second

    def _check_embeddings(self, inputs: Mapping[str, Any], is_second: bool) -> None:
        """Refuses a call of the network without an input, or with another embedding than the card says."""
        for name, values in self.embeddings.items():
            if name not in inputs:
                fact = f"The loop calls '{self.network}' without '{name}'"
                raise BadValueError(self.place, fact, nearest(name, inputs), name=name)
            if not _are_equal(inputs[name], values[int(is_second)].to(inputs[name].dtype)):
                call = f"{'second' if is_second else 'first'} call of '{self.network}' in a step"
                fact = f"In its {call}, the loop has another '{name}' than the card says"
                remedy = f"Name the embeddings in the order of the calls. {WITHOUT_BATCH}"
                raise BadValueError(self.place, fact, remedy, name=name)

    def _batch(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the inputs of one batch. The embeddings of both conditions are joined. Any other tensor whose first
        dim has the size of an embedding's is repeated. Refuses embeddings of two shapes.
        """
        for name, (first, second) in self.embeddings.items():
            if first.shape != second.shape:
                fact = f"'{name}' is {list(first.shape)} for one condition and {list(second.shape)} for the other"
                raise BadValueError(self.place, fact, f"One batch needs equal shapes. {WITHOUT_BATCH}", name=name)
            if name not in self.joined:
                self.joined[name] = torch.cat([first, second]).to(inputs[name].dtype)
        batch_sizes = {first.shape[0] for first, _ in self.embeddings.values()}
        batch = {**inputs, **self.joined}
        for name in inputs.keys() - self.joined.keys():
            value = inputs[name]
            if isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] in batch_sizes:
                batch[name] = torch.cat([value, value])
        return batch


def _are_equal(value: Any, other: Any) -> bool:
    """Returns whether two inputs have equal values: tensors of one dtype, trees of tensors, or anything else."""
    leaves = outputs.leaves({"": value})
    other_leaves = outputs.leaves({"": other})
    if leaves.keys() != other_leaves.keys():
        return False
    for path, first in leaves.items():
        second = other_leaves[path]
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
            is_same = first is second or (first.dtype == second.dtype and torch.equal(first, second))
        else:
            is_same = first is second or bool(first == second)
        if not is_same:
            return False
    return True
