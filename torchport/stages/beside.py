"""Components that a pipeline calls beside its network and VAE: before its loop, or after it to make sound.

What the first return is kept where they run, in `encode`, and given back where they do not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchport.errors import ArtefactForeignError, BadValueError
from torchport.load.foreign import tokenizing
from torchport.save import tree
from torchport.stages import outputs
from torchport.stages.family import Tensors
from torchport.stages.image_latents import VaeStandIn
from torchport.stages.replay import OTHER_LOOP
from torchport.stages.stand_in import ComponentStandIn

KEPT = "before"
"""The beginning of the names of what is kept, by component and number of its call: `before.connectors.0.0`."""


class _Fields(dict[str, Any]):
    """The fields of an object that a component returned: by name, by number or as attributes."""

    def __getitem__(self, key: str | int) -> Any:
        return super().__getitem__(list(self)[key] if isinstance(key, int) else key)

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"A component returned the fields {', '.join(self)}, and no '{name}'", name=name)
        return self[name]


class RecordedComponent(ComponentStandIn):
    """Takes a component's place in a pipeline, calls it, and keeps what it returned. On meta only shapes are right."""

    def __init__(self, component: torch.nn.Module, dtype: torch.dtype, name: str, place: str) -> None:
        super().__init__(component, dtype)
        self.name = name
        self.place = place
        self.returned: list[Any] = []

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the component returns, and keeps a copy; refuses values that cannot be saved."""
        if any(weight.is_meta for weight in self.component.parameters()):
            args, kwargs = outputs.map_tensors((args, kwargs), lambda tensor: tensor.to("meta"))
        returned = self.component(*args, **kwargs)
        if isinstance(returned, Mapping):  # an object of transformers or diffusers, with fields
            returned = {name: value for name, value in returned.items() if value is not None}
        if not tree.is_packable(returned):
            fact = f"'{self.name}' returns a {type(returned).__name__} before the first step, and no tuple of tensors"
            raise BadValueError(self.place, fact, OTHER_LOOP)
        returned = outputs.map_tensors(returned, lambda x: torch.zeros(x.shape, dtype=x.dtype) if x.is_meta else x)
        # A copy: the pipeline may write to what it got.
        self.returned.append(outputs.map_tensors(returned, torch.clone))
        return _Fields(returned) if isinstance(returned, dict) else returned


class ReplayedComponent(ComponentStandIn):
    """Takes a component's place in a pipeline, and returns what `encode` kept of its calls, from all `tensors`."""

    def __init__(self, component: torch.nn.Module, dtype: torch.dtype, name: str, place: str, tensors: Tensors) -> None:
        """Unpacks what `encode` kept; refuses the artefact if it has nothing of such components."""
        super().__init__(component, dtype)
        self.name = name
        self.place = place
        packed = {key.removeprefix(f"{KEPT}."): tensor for key, tensor in tensors.items()}
        if tree.STRUCTURE not in packed:
            remedy = "Run --stage encode with this model"
            raise ArtefactForeignError("encode.safetensors", f"It lacks what '{name}' returns", remedy, name=name)
        self.returned = iter(tree.unpacked(packed)[name])

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the component returned in its next call in `encode`; refuses more calls than there were."""
        returned = next(self.returned, None)
        if returned is None:
            fact = f"'{self.name}' is called in the loop, too, and the card has it under 'before'"
            raise BadValueError(self.place, fact, OTHER_LOOP)
        returned = outputs.map_tensors(returned, torch.clone)
        return _Fields(returned) if isinstance(returned, dict) else returned


@dataclasses.dataclass(eq=False)
class EncodePrompt:
    """Takes the place of a pipeline's `encode_prompt`, and returns its values from the stage `encode`, call by call."""

    function: Callable[..., Any]  #: Upstream's `encode_prompt`.
    place: str
    known: Sequence[tuple[Any, ...]] | None = None  #: The values of each call; None: `function` is called.
    returned: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)  #: Gets the values of each call.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the values of the next call; refuses more calls than are known."""
        if self.known is None:
            with tokenizing("encode_prompt"):
                values = self.function(*args, **kwargs)
            # Copies: the pipeline may write to what it gets.
            self.returned.append(outputs.map_tensors(values if isinstance(values, tuple) else (values,), torch.clone))
            return values
        if len(self.returned) == len(self.known):
            fact = f"It calls 'encode_prompt' more than {len(self.known)} times"
            raise BadValueError(self.place, fact, OTHER_LOOP)
        values = outputs.map_tensors(self.known[len(self.returned)], torch.clone)
        self.returned.append(values)
        return values if len(values) > 1 else values[0]


class SilentComponent(VaeStandIn):
    """Takes the place of a component that makes sound, where no sound is made: it is here for its configuration."""

    def decode(self, latents: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor]:
        # Silence, [1, channels, samples].
        return (torch.zeros(1, 1, 1),)

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        return torch.zeros(1, 1, 1)
