"""Stand-ins in a pipeline of upstream: each answers for its component, and computes elsewhere, or not at all."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchport.errors import BadValueError
from torchport.stages import outputs
from torchport.stages.conditions import Conditions
from torchport.stages.family import Call
from torchport.stages.replay import OTHER_LOOP, Loop


class ComponentStandIn(torch.nn.Module):
    """Takes a component's place in a pipeline that asks for its class, dtype or configuration, and never calls it. The
    component may be without storage.
    """

    component: Any
    device = torch.device("cpu")

    def __init__(self, component: torch.nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        vars(self)["component"] = component  # no submodule: nobody is to look for its weights here
        self.dtype = dtype
        # Upstream may ask which inputs the component takes, and leave out the others. A partial can have another
        # signature; a bound method cannot.
        forward: Any = functools.partial(self._called)
        forward.__signature__ = inspect.signature(component.forward)
        vars(self)["forward"] = forward

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The component's class: upstream asks `isinstance` of its VAE."""
        return type(self.__dict__.get("component", self))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(vars(self)["component"], name)

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """Yields one parameter without elements: upstream reads the dtype and device of a component's first one."""
        yield torch.nn.Parameter(torch.empty(0, dtype=self.dtype), requires_grad=False)

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        """Raises, in place of the component's `forward`. A subclass computes here."""
        fact = "The pipeline calls it, and no stage has a call of it"
        raise BadValueError(type(self.component).__name__, fact, OTHER_LOOP)


class NetworkStandIn(ComponentStandIn):
    """Takes the place of a network that a pipeline's loop calls.

    Args:
        loop: Says which steps are done: for these the network returns zeros, and is not called.
        call: Computes what the network does; None if all steps are done, or if another stage has the network.
        conditions: Computes two calls of a step as one batch; None, or a `call` that takes no batch: one by one.
    """

    def __init__(
        self,
        component: torch.nn.Module,
        dtype: torch.dtype,
        loop: Loop,
        call: Call | None = None,
        conditions: Conditions | None = None,
    ) -> None:
        super().__init__(component, dtype)
        self.loop = loop
        self.call = call
        self.conditions = conditions if call is not None and call.batches else None
        self.placed_inputs = PlacedInputs(call)

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the network's output, or its outputs for video and sound, as a tuple; zeros for a step that is done.

        Upstream may ask for an object with `sample` instead. An output is a list if the network's first input is.
        """
        signature = inspect.signature(self.component.forward)
        inputs = {name: static(value) for name, value in (signature.bind_partial(*args).arguments | kwargs).items()}
        first = next(iter(inputs.values()))
        is_list = isinstance(first, list) and outputs.has_tensor(first)  # of a tensor for each video
        if not self.loop.is_done and self.call is not None:
            self.loop.before_network()
            if self.conditions is None:
                output: Any = self._computed(inputs)
            else:
                output = self.conditions.output(inputs, self.loop.number, self._computed)
            single = list(output) if is_list else output
            results = output if isinstance(output, tuple) else (single,)
        else:
            if not self.loop.is_done:
                self.loop.before_other_network()
            results = ([torch.zeros_like(each) for each in first],) if is_list else self._zeros(inputs)
        if len(results) > 1 or not kwargs.get("return_dict", "return_dict" in signature.parameters):
            return results
        from diffusers.models.modeling_outputs import Transformer2DModelOutput

        return Transformer2DModelOutput(sample=results[0])

    def _computed(self, inputs: Mapping[str, Any]) -> Any:
        """Returns the output of `call` for these inputs, of which recurring ones are placed once."""
        assert self.call is not None
        return self.call(**{name: self.placed_inputs.placed(name, value) for name, value in inputs.items()})

    def _zeros(self, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Returns zeros in place of an output for each of the loop's latents. They have the shape of the latents if
        that is known, or else of the input, with the network's output channels; 1 for all dims if neither says it.
        """
        config = getattr(self.component, "config", {})
        in_channels = config.get("in_channels")
        out_channels = config.get("out_channels")
        if in_channels and out_channels is None and config.get("learn_sigma"):
            out_channels = 2 * in_channels  # the network predicts a variance, too
        samples = [value for value in inputs.values() if isinstance(value, torch.Tensor)][: self.loop.count]
        zeros = []
        for number, sample in enumerate(samples):
            known = [shape for shape in self.loop.shapes[number : number + 1] if len(shape) == sample.ndim]
            sizes = list(known[0] if known else sample.shape)[1:]
            if sizes and out_channels not in (None, in_channels, sizes[0]):
                sizes = [out_channels, *sizes[1:]] if sizes[0] == in_channels else [1] * len(sizes)
            zeros.append(torch.zeros(sample.shape[0], *sizes, dtype=sample.dtype))
        return tuple(zeros)


class StaticOptions(dict[str, Any]):
    """A dict without tensors that a network is called with. It has a hash: a program depends on what it says."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(sorted(self.items())))  # in whatever order they were set


class StaticList(list[Any]):
    """A list without tensors that a network is called with. It has a hash: a program depends on what it says."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(self))


def static(value: Any) -> Any:
    """Returns an input of a network; a dict or list without tensors gets a hash, as its value chooses a program."""
    if not isinstance(value, dict | list) or outputs.has_tensor(value):
        return value
    return StaticOptions(value) if isinstance(value, dict) else StaticList(value)


class PlacedInputs:
    """Inputs that a loop passes again and again, placed once: those that are the very tensors of a recent call."""

    RECENT = 4
    """Values of an input that are remembered: guidance alternates between two."""

    def __init__(self, call: Call | None) -> None:
        self.call = call
        #: By the input's name: its recent values, the versions of their tensors, and what `place` returned or None.
        self.recent: dict[str, list[tuple[Any, list[int], Any]]] = {}

    def placed(self, name: str, value: Any) -> Any:
        """Returns an input as it is the first time; when it comes again, placed where the network wants it."""
        if self.call is None or not outputs.has_tensor(value):
            return value
        versions = [leaf._version for leaf in outputs.leaves({name: value}).values()]  # it may have been written to
        recent = self.recent.get(name, [])
        results = [placed for earlier, written, placed in recent if earlier is value and written == versions]
        result = None
        if results:  # a second call passes it: a third is likely
            result = results[0] if results[0] is not None else self.call.place(**{name: value})[name]
        others = [row for row in recent if row[0] is not value]
        self.recent[name] = [*others, (value, versions, result)][-self.RECENT :]
        return value if result is None else result
