"""Records the calls that a verb makes of its network: shapes, how often, and arithmetic, from shapes alone."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch

from torchport.errors import BadValueError
from torchport.stages.family import Settings, Stage, Steps

Static = tuple[tuple[str, object], ...]


@dataclasses.dataclass
class NetworkCall:
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
    """Stands in for a compiled network, and returns tensors that have a shape and no values.

    The verb continues with these tensors, so that we see all of its calls.

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
        self.calls: dict[Any, NetworkCall] = {}
        # Real tensors are among them, such as latents before the first step. We never enter the mode: masks would lose
        # their values, too.
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def place(self, **inputs: torch.Tensor) -> dict[str, Any]:
        """Returns the inputs: only their shapes count."""
        return inputs

    def __call__(self, **inputs: Any) -> torch.Tensor:
        """Returns a tensor of the host like the network's first output, without values."""
        tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        static = tuple(sorted((name, value) for name, value in inputs.items() if name not in tensors))
        key = (static, tuple(sorted((name, value.shape, str(value.dtype)) for name, value in tensors.items())))
        if key not in self.calls:
            self.calls[key] = self._new_call(tensors, static)
        self.calls[key].times += 1
        with self.mode:
            return torch.empty(self.calls[key].shape, dtype=self.calls[key].dtype, device="cpu")

    def _new_call(self, tensors: dict[str, torch.Tensor], static: Static) -> NetworkCall:
        from torch.utils.flop_counter import FlopCounterMode

        tensors = {
            name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in sorted(tensors.items())
        }
        counter = FlopCounterMode(display=False)
        with counter if self.count else contextlib.nullcontext(), torch.no_grad():
            output = self.how(self.module, **tensors, **dict(static))
        first = output[0] if isinstance(output, tuple) else output
        flops = int(counter.get_total_flops()) if self.count else None
        return NetworkCall(tensors, static, 0, flops, first.shape, first.dtype)


def network_calls(
    stage: Stage,
    parts: dict[str, Any],
    module: torch.nn.Module,
    how: Any,
    settings: Settings,
    *,
    count: bool = True,
    **inputs: torch.Tensor,
) -> list[NetworkCall]:
    """Returns the calls that a stage's verb makes of its network, in the order of first calls; the verb itself runs.

    Args:
        stage: It has a network, and says what its inputs are like (`Stage.like`).
        parts: The stage's, without storage.
        module: What is compiled of the network; it is moved to meta.
        how: How it is called.
        settings: What the stage makes.
        count: Whether arithmetic is counted.
        **inputs: Inputs that exist already.

    Raises:
        BadValueError: The verb never calls its network, or asks for a value that it computed.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException

    assert stage.like is not None
    recorder = Recorder(module, how, count)
    try:
        stage.run(parts, recorder, settings, Steps(), **stage.like(parts, settings), **inputs)
    except DataDependentOutputException as error:
        fact = f"Its verb asks for a value that the network computes ({error.func})"
        raise BadValueError(f"--stage {stage.name}", fact, "Its calls must follow from shapes alone") from error
    if not recorder.calls:
        raise BadValueError(f"--stage {stage.name}", "It never calls its network", "Report this: its verb is at fault")
    return list(recorder.calls.values())
