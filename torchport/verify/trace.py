"""What a loop passes to its networks and its scheduler, recorded while the networks' outputs are made up.

No network runs. Each call returns numbers that depend on the step and on the condition alone. So two loops that do the
same arithmetic have the same numbers everywhere, whether the conditions of guidance come in one batch or one by one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from torchport.stages import outputs, tree

LARGE = 2**20
"""Elements above which a tensor is kept for the chosen steps alone: the others' would not fit in memory at 720p."""

NEGATIVE = "negative_"
"""Embeddings of the negative prompt have this before their name."""


@dataclasses.dataclass
class Called:
    """One condition of one call of a network.

    Attributes:
        network: The component.
        condition: "" for the prompt, `negative_` for the negative prompt.
        number: How often the network was called with this condition in this step before.
        tensors: Its inputs by path, the condition's row of each.
        values: Its inputs that are numbers, texts, true or false.
    """

    network: str
    condition: str
    number: int
    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]


@dataclasses.dataclass
class Stepped:
    """One step of a scheduler.

    Attributes:
        state: The scheduler's fields before the step.
        arguments: What `step` was called with, by its own names.
        latents: What it returned first.
        calls: The network's calls since the step before.
    """

    state: dict[str, Any]
    arguments: dict[str, Any]
    latents: torch.Tensor | None
    calls: list[Called]


class Trace:
    """The record of a loop.

    Args:
        chosen: Steps, from 0, of which large tensors are kept.

    Attributes:
        steps: The scheduler's steps.
        calls: The networks' calls since the last of them.
    """

    def __init__(self, chosen: Collection[int]) -> None:
        self.chosen = chosen
        self.steps: list[Stepped] = []
        self.calls: list[Called] = []
        self._depth = 0

    def kept(self, value: Any) -> Any:
        """Returns a copy of a tree as the record keeps it: large tensors of steps that are not chosen are left out."""

        def copied(_: str, leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if leaf.numel() > LARGE and len(self.steps) not in self.chosen:
                return None
            return leaf.detach().clone()

        return outputs.each(copied, "", value)

    def note(self, called: Called) -> None:
        """Records a call."""
        tensors = {name: self.kept(tensor) for name, tensor in called.tensors.items()}
        called.tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        self.calls.append(called)

    def count(self, network: str, condition: str) -> int:
        """Returns how often a network was called with a condition since the last step."""
        return sum(called.network == network and called.condition == condition for called in self.calls)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Records every step of every scheduler for the length of a `with`."""
        changed = [(cls, vars(cls)["step"]) for cls in _schedulers() if "step" in vars(cls)]
        for cls, step in changed:
            cls.step = self._recorder(step)
        try:
            yield
        finally:
            for cls, step in changed:
                cls.step = step

    def _recorder(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def recorded(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if self._depth:  # of the class that this one is derived from
                return step(scheduler, *args, **kwargs)
            state = {name: value for name, value in vars(scheduler).items() if tree.is_packable(value)}
            arguments = dict(inspect.signature(step).bind(scheduler, *args, **kwargs).arguments)
            arguments = {name: value for name, value in list(arguments.items())[1:] if tree.is_packable(value)}
            stepped = Stepped(self.kept(state), self.kept(arguments), None, self.calls)
            self._depth += 1
            try:
                returned = step(scheduler, *args, **kwargs)
            finally:
                self._depth -= 1
            first = returned[0] if isinstance(returned, tuple) else getattr(returned, "prev_sample", None)
            stepped.latents = self.kept(first)
            self.steps.append(stepped)
            self.calls = []
            return returned

        return recorded


def _schedulers() -> list[Any]:
    """Returns every class of a scheduler that was imported."""
    from diffusers.schedulers.scheduling_utils import SchedulerMixin

    classes: list[Any] = [SchedulerMixin]
    for cls in classes:
        classes += [sub for sub in cls.__subclasses__() if sub not in classes]
    return classes


class Fed:
    """Stands in for a network: its outputs are made up, and what it receives is recorded.

    Args:
        network: The component.
        like: What one of its calls returns, without values: shape [B, ...] and dtype.
        embeddings: Of the prompts, by which a row's condition is known.
        trace: The record.
        is_port: Whether it is called as a program is: all conditions in one batch, masked tokens left out.
    """

    def __init__(
        self, network: str, like: torch.Tensor, embeddings: Mapping[str, torch.Tensor], trace: Trace, is_port: bool
    ) -> None:
        self.network = network
        self.like = like
        self.embeddings = embeddings
        self.trace = trace
        self.batches = self.drops = is_port

    def place(self, **inputs: Any) -> dict[str, Any]:
        """Returns the inputs as they are."""
        return inputs

    def __call__(self, **inputs: Any) -> torch.Tensor:
        """Returns made-up outputs [B, ...], a row for each condition."""
        tensors = {name: leaf for name, leaf in outputs.leaves(inputs).items() if isinstance(leaf, torch.Tensor)}
        values = {name: value for name, value in inputs.items() if type(value) in (bool, int, float, str)}
        batch = next(tensor.shape[0] for tensor in tensors.values() if tensor.ndim > 2)
        rows = []
        for n in range(batch):
            row = {key: x[n : n + 1] if x.ndim and x.shape[0] == batch else x for key, x in tensors.items()}
            condition = self._condition(row)
            number = self.trace.count(self.network, condition)
            self.trace.note(Called(self.network, condition, number, row, values))
            rows.append(self._made_up(condition, number))
        return torch.stack(rows)

    def _made_up(self, condition: str, number: int) -> torch.Tensor:
        """Returns the output for one condition, which depends on the step and the condition alone."""
        seed = 1000 * len(self.trace.steps) + 10 * number + (condition == NEGATIVE)
        values = torch.randn(self.like.shape[1:], generator=torch.Generator().manual_seed(seed))
        return values.to(self.like.dtype)

    def _condition(self, row: Mapping[str, torch.Tensor]) -> str:
        """Returns the condition whose embeddings are nearest; the prompt's where both are as near."""
        distances = {}
        for prefix in ("", NEGATIVE):
            known = [x for name, x in self.embeddings.items() if name.startswith(NEGATIVE) == bool(prefix)]
            nearest = (min((_apart(x, one) for one in known), default=math.inf) for x in row.values())
            distances[prefix] = sum(distance for distance in nearest if distance < math.inf)
        return NEGATIVE if distances[NEGATIVE] < distances[""] else ""


def _apart(x: torch.Tensor, known: torch.Tensor) -> float:
    """Returns the mean distance of two embeddings over the tokens that both have; infinity where they cannot be one."""
    if x.ndim != known.ndim or x.ndim not in (2, 3) or x.shape[2:] != known.shape[2:] or x.shape[1] == 0:
        return math.inf
    length = min(x.shape[1], known.shape[1])
    return float((x[:, :length].float() - known[:, :length].float()).abs().mean())
