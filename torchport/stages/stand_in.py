"""What stands in a pipeline of upstream where its network stood."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from torchport.stages import outputs
from torchport.stages.conditions import Conditions
from torchport.stages.family import Call
from torchport.stages.replay import Loop


class ComponentStandIn(torch.nn.Module):
    """Stands in a pipeline where a component stood: `call` computes, all else that is asked for is the component's.

    Args:
        component: Without storage.
        loop: Says which steps are done; None for a component that is asked and not called.
        call: The network; None if it is never needed, or another stage's.
        conditions: Makes one batch of two calls; None: each is computed by itself. So does a call that takes no batch.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        component: torch.nn.Module,
        dtype: torch.dtype,
        loop: Loop | None,
        call: Call | None,
        conditions: Conditions | None = None,
    ) -> None:
        super().__init__()
        vars(self)["component"] = component  # no submodule: nobody is to look for its weights here
        self.dtype = dtype
        self.loop = loop
        self.call = call
        self.conditions = conditions if call is not None and call.batches else None
        self.constants = PlacedInputs(call)
        # Upstream may ask which inputs the network takes, and leave out the others.
        forward: Any = functools.partial(self._forward)
        forward.__signature__ = inspect.signature(component.forward)
        vars(self)["forward"] = forward

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The component's class: upstream asks whether its VAE is one of a kind."""
        return type(self.__dict__.get("component", self))

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the component."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(vars(self)["component"], name)

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """Yields one without elements: upstream asks the first for its dtype and device."""
        yield torch.nn.Parameter(torch.empty(0, dtype=self.dtype), requires_grad=False)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what `_outputs` does; as an object with `sample` unless upstream asks its network for a tuple."""
        outputs = self._outputs(*args, **kwargs)
        takes = inspect.signature(vars(self)["component"].forward).parameters
        if len(outputs) > 1 or not kwargs.get("return_dict", "return_dict" in takes):
            return outputs
        from diffusers.models.modeling_outputs import Transformer2DModelOutput

        return Transformer2DModelOutput(sample=outputs[0])

    def _outputs(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Returns a tuple of the network's output, or of its list of outputs, or of the outputs for video and sound;
        zeros for a step that is done already. Zeros have the shape of the latents if that is known, or else of the
        input, with the network's output channels.
        """
        loop = self.loop
        assert loop is not None
        inputs = inspect.signature(vars(self)["component"].forward).bind_partial(*args).arguments | kwargs
        inputs = {name: static(value) for name, value in inputs.items()}
        if not loop.is_done and self.call is not None:
            loop.begin()
            output = self._computed(self.call, inputs, loop.number)
            if isinstance(output, tuple):  # of the video, and of its sound
                return output
            return (list(output) if _takes_list(inputs) else output,)
        if not loop.is_done:
            loop.begin_other()
        if _takes_list(inputs):
            return ([torch.zeros_like(each) for each in next(iter(inputs.values()))],)
        samples = [value for value in inputs.values() if isinstance(value, torch.Tensor)][: loop.count]
        return tuple(self._zeros(sample, *loop.shapes[number : number + 1]) for number, sample in enumerate(samples))

    def _zeros(self, sample: torch.Tensor, known: torch.Size | None = None) -> torch.Tensor:
        """Returns zeros in place of an output, by an input of the network and the shape of the loop's latents."""
        shape = known if known and len(known) == sample.ndim else sample.shape
        return torch.zeros(sample.shape[0], *self._without_batch(shape), dtype=sample.dtype)

    def _without_batch(self, shape: torch.Size) -> list[int]:
        """Returns the shape of an output, by that of latents or of an input; 1 for all dims if that does not say it."""
        config = getattr(vars(self)["component"], "config", {})
        taken, returned = config.get("in_channels"), config.get("out_channels")
        returned = 2 * taken if taken and returned is None and config.get("learn_sigma") else returned
        if len(shape) < 2 or returned in (None, taken, shape[1]):
            return list(shape[1:])
        return [returned, *shape[2:]] if shape[1] == taken else [1] * (len(shape) - 1)

    def _computed(self, call: Call, inputs: dict[str, Any], number: int) -> Any:
        """Returns the network's output, which may have been computed with the call before."""
        batch = inputs if self.conditions is None else self.conditions.inputs(inputs, number)
        if self.conditions is not None and batch is None:
            return self.conditions.second
        assert batch is not None
        output: Any = call(**{name: self.constants.placed(name, value) for name, value in batch.items()})
        return output if self.conditions is None else self.conditions.halves(output)


class StaticOptions(dict[str, Any]):
    """A dict without tensors that a network is called with. It has a hash: a program depends on what it says."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(sorted(self.items())))  # in whatever order they were set


class StaticList(list[Any]):
    """A list without tensors that a network is called with. It has a hash: a program depends on what it says."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(self))


def _takes_list(inputs: dict[str, Any]) -> bool:
    """Whether a network's first input is a list of a tensor for each video. Its output is one, too."""
    first = next(iter(inputs.values()))
    return isinstance(first, list) and outputs.has_tensor(first)


def static(value: Any) -> Any:
    """Returns an input of a network; a dict or list without tensors so that it can choose a program."""
    if not isinstance(value, dict | list) or outputs.has_tensor(value):
        return value
    return StaticOptions(value) if isinstance(value, dict) else StaticList(value)


class PlacedInputs:
    """Inputs that a loop passes again and again, placed once: those that are the very tensors of a recent call."""

    RECENT = 4
    """Values of an input that are remembered: guidance alternates between two."""

    def __init__(self, call: Call | None) -> None:
        self.call = call
        self.recent: dict[str, list[tuple[Any, list[int], Any]]] = {}

    def placed(self, name: str, value: Any) -> Any:
        """Returns an input, where the network wants it if it was among the recent ones."""
        if self.call is None or not outputs.has_tensor(value):
            return value
        versions = [leaf._version for leaf in outputs.leaves({name: value}).values()]  # it may have been written to
        entries = self.recent.get(name, [])
        same = [entry for entry in entries if entry[0] is value and entry[1] == versions]
        result = None
        if same:
            result = same[0][2] if same[0][2] is not None else self.call.place(**{name: value})[name]
        others = [entry for entry in entries if entry[0] is not value]
        self.recent[name] = [*others, (value, versions, result)][-self.RECENT :]
        return value if result is None else result
