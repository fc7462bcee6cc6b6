"""What a verb calls its network with: every shape, how often, and the arithmetic of each, from shapes alone."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch

from torchport.errors import BadValueError
from torchport.stages.family import Settings, Stage, Steps

Static = tuple[tuple[str, object], ...]


@dataclasses.dataclass
class Called:
    """One set of shapes that a network is called with.

    Attributes:
        tensors: The inputs, without storage.
        static: What is no tensor.
        times: How often the verb calls with these.
        flops: Of one call, counted by PyTorch on shapes alone: every matrix product, attention with padding included;
            None where it was not to be counted.
        shape: Of the output.
        dtype: Of the output.
    """

    tensors: dict[str, torch.Tensor]
    static: Static
    times: int
    flops: int | None
    shape: torch.Size
    dtype: torch.dtype


class Recorder:
    """Stands where a compiled network stands, and answers with tensors that have a shape and no values.

    The verb goes on with them as with the network's own, so that all of its calls are seen.

    Args:
        module: The network; it is moved to meta.
        how: How it is called, `how(module, **inputs)`.
        count: Whether arithmetic is counted, which takes as long as all else.
    """

    batches = True
    drops = True

    def __init__(self, module: torch.nn.Module, how: Any, count: bool = True) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self.module = module.to("meta")
        self.how = how
        self.count = count
        self.found: dict[Any, Called] = {}
        # Beside them are real tensors, such as latents before the first step; the mode is never entered, or masks would
        # lose their values, too.
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def place(self, **inputs: torch.Tensor) -> dict[str, Any]:
        """Returns the inputs: only their shapes count."""
        return inputs

    def __call__(self, **inputs: Any) -> torch.Tensor:
        """Returns a tensor of the host like the network's first output, without values."""
        given = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        static = tuple(sorted((name, value) for name, value in inputs.items() if name not in given))
        key = (static, tuple(sorted((name, value.shape, str(value.dtype)) for name, value in given.items())))
        if key not in self.found:
            self.found[key] = self._measured(given, static)
        self.found[key].times += 1
        with self.mode:
            return torch.empty(self.found[key].shape, dtype=self.found[key].dtype, device="cpu")

    def _measured(self, given: dict[str, torch.Tensor], static: Static) -> Called:
        from torch.utils.flop_counter import FlopCounterMode

        tensors = {
            name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in sorted(given.items())
        }
        counter = FlopCounterMode(display=False)
        with counter if self.count else contextlib.nullcontext(), torch.no_grad():
            output = self.how(self.module, **tensors, **dict(static))
        first = output[0] if isinstance(output, tuple) else output
        flops = int(counter.get_total_flops()) if self.count else None
        return Called(tensors, static, 0, flops, first.shape, first.dtype)


def recorded(
    stage: Stage,
    parts: dict[str, Any],
    module: torch.nn.Module,
    how: Any,
    settings: Settings,
    *,
    count: bool = True,
    **given: torch.Tensor,
) -> list[Called]:
    """Returns what a stage's verb calls its network with, in the order of first calls: the verb itself says it.

    Args:
        stage: One with a network, and which says what its inputs are like (`Stage.like`).
        parts: The stage's, without storage.
        module: What is compiled of the network; it is moved to meta.
        how: How it is called.
        settings: What the stage is asked to make.
        count: Whether arithmetic is counted.
        **given: Inputs that are at hand.

    Raises:
        BadValueError: The verb never calls its network, or asks for a value that it computed.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException

    assert stage.like is not None
    recorder = Recorder(module, how, count)
    try:
        stage.run(parts, recorder, settings, Steps(), **stage.like(parts, settings), **given)
    except DataDependentOutputException as error:
        fact = f"Its verb asks for a value that the network computes ({error.func})"
        raise BadValueError(f"--stage {stage.name}", fact, "Its calls must follow from shapes alone") from error
    if not recorder.found:
        raise BadValueError(f"--stage {stage.name}", "It never calls its network", "Report this: its verb is at fault")
    return list(recorder.found.values())
