"""Components that a pipeline calls beside its network and VAE: before its loop, or after it to make sound.

What the first return is kept where they run, in `encode`, and given back where they do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torchport.errors import ArtefactForeignError, BadValueError
from torchport.save import tree
from torchport.stages import outputs
from torchport.stages.image import VaeStandIn
from torchport.stages.replay import OTHER_LOOP
from torchport.stages.stand_in import ComponentStandIn

KEPT = "before"
"""The beginning of the names of what is kept, by component and number of its call: `before.connectors.0.0`."""


class CalledBefore(ComponentStandIn):
    """Takes a component's place in a pipeline, calls it, and keeps what it returned. On meta only shapes are right."""

    def __init__(self, component: torch.nn.Module, dtype: torch.dtype, name: str, place: str) -> None:
        super().__init__(component, dtype, None, None)
        self.name = name
        self.place = place
        self.returned: list[Any] = []

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        component = vars(self)["component"]
        if any(weight.is_meta for weight in component.parameters()):
            args, kwargs = outputs.moved((args, kwargs), lambda tensor: tensor.to("meta"))
        returned = component(*args, **kwargs)
        if not tree.is_packable(returned):
            fact = f"'{self.name}' returns a {type(returned).__name__} before the first step, and no tuple of tensors"
            raise BadValueError(self.place, fact, OTHER_LOOP)
        # A copy for whoever reads it: the pipeline may write to what it got.
        returned = outputs.moved(returned, lambda x: torch.zeros(x.shape, dtype=x.dtype) if x.is_meta else x)
        self.returned.append(outputs.moved(returned, torch.clone))
        return returned


def kept(components: Mapping[str, CalledBefore]) -> dict[str, torch.Tensor]:
    """Returns what components returned, as tensors of an artefact."""
    tensors = tree.packed({name: component.returned for name, component in components.items()}) if components else {}
    return {f"{KEPT}.{name}": tensor for name, tensor in tensors.items()}


class GivenBack(ComponentStandIn):
    """Takes a component's place in a pipeline, and returns what `encode` kept of its calls.

    Args:
        tensors: What `encode` kept, of all components.
    """

    def __init__(
        self, component: torch.nn.Module, dtype: torch.dtype, name: str, place: str, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__(component, dtype, None, None)
        self.name = name
        self.place = place
        names = {key.removeprefix(f"{KEPT}."): tensor for key, tensor in tensors.items()}
        if tree.STRUCTURE not in names:
            remedy = "Run --stage encode with this model"
            raise ArtefactForeignError("encode.safetensors", f"It lacks what '{name}' returns", remedy, name=name)
        self.returned = iter(tree.unpacked(names)[name])

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        returned = next(self.returned, None)
        if returned is None:
            fact = f"'{self.name}' is called in the loop, too, and the card has it under 'before'"
            raise BadValueError(self.place, fact, OTHER_LOOP)
        return outputs.moved(returned, torch.clone)


class Silent(VaeStandIn):
    """Takes the place of a component that makes sound, where no sound is made: it is here for its configuration."""

    def decode(self, latents: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor]:
        return (torch.zeros(1, 1, 1),)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return torch.zeros(1, 1, 1)
