"""Latents of a pipeline's image: kept where the VAE runs, and given back where it does not.

`encode_image` keeps the moments of each latent distribution that the pipeline asks its VAE for, before its first step;
where the VAE stays on the host, `encode` does. `denoise` gives them back, and keeps what the pipeline draws from them.
`decode` gives that back: code after the loop may use it, too. So one stage alone needs the image, and none draws it
again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from torchport.errors import ArtefactForeignError, BadValueError
from torchport.stages.family import Call, Tensors
from torchport.stages.replay import OTHER_LOOP
from torchport.stages.stand_in import ComponentStandIn

MOMENTS = "image_moments_"
"""Names of what `vae.encode` returned, with the number of its call: [1, 2C, T, H, W], mean and log of the variance."""
LATENTS = "image_latents_"
"""Names of what the pipeline drew from that, with the number of its drawing: [1, C, T, H, W]."""


class VaeStandIn(ComponentStandIn):
    """Takes the VAE's place in a pipeline, which may read the VAE's buffers: they have no values in a rehearsal."""

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the VAE; in place of a buffer on meta, also in the VAE's modules, ones."""
        return self._readable(super().__getattr__(name), name)

    def _readable(self, value: Any, name: str) -> Any:
        """Returns an attribute's value: ones for a buffer on meta; for a module with such buffers, a wrapper."""
        if isinstance(value, torch.nn.Module) and any(buffer.is_meta for buffer in value.buffers(recurse=False)):
            return _Attributes(lambda key: self._readable(getattr(value, key), f"{name}.{key}"))
        is_buffer = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
        return torch.ones(value.shape, dtype=value.dtype) if is_buffer and value.is_meta else value


class _Attributes:
    """An object whose attributes a function returns by their names."""

    def __init__(self, attribute: Callable[[str], Any]) -> None:
        self._attribute = attribute

    def __getattr__(self, name: str) -> Any:
        return self._attribute(name)


class EncodingVae(VaeStandIn):
    """Takes the VAE's place in a pipeline, encodes with it, and keeps what it returned.

    Args:
        vae: With weights; or on meta, and then only the shapes are right.
        call: The VAE as the stage's network, which returns what `moments_of` does; None: `vae` itself encodes.
    """

    def __init__(self, vae: torch.nn.Module, dtype: torch.dtype, place: str, call: Call | None = None) -> None:
        super().__init__(vae, dtype)
        self.place = place
        self.call = call
        self.moments: dict[str, torch.Tensor] = {}

    def encode(self, pixels: torch.Tensor, **kwargs: Any) -> Any:
        """Returns a latent distribution, as the VAE's `encode` does, and keeps its moments."""
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
        from diffusers.models.modeling_outputs import AutoencoderKLOutput

        vae = self.component
        name = next(iter(inspect.signature(vae.encode).parameters))
        kwargs.pop("return_dict", None)
        if self.call is None:
            moments = moments_of(vae, self.place, **{name: pixels.to(next(vae.parameters()).device)}, **kwargs)
        else:
            moments = self.call(**{name: pixels.to(self.dtype)}, **kwargs)
        moments = torch.zeros(moments.shape, dtype=moments.dtype) if moments.is_meta else moments
        self.moments[f"{MOMENTS}{len(self.moments)}"] = moments
        return AutoencoderKLOutput(latent_dist=DiagonalGaussianDistribution(moments))


def moments_of(vae: Any, place: str, **inputs: Any) -> torch.Tensor:
    """Returns mean and log of the variance of the latents that a VAE encodes an image as: [1, 2C, T, H, W].

    It may be traced. Refuses a VAE whose `encode`, called with these inputs, returns another distribution.
    """
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    distribution = vae.encode(**inputs)[0]
    if not isinstance(distribution, DiagonalGaussianDistribution):
        fact = f"'{type(vae).__name__}.encode' returns no latent distribution of mean and variance"
        raise BadValueError(place, fact, f"An image goes through one. {OTHER_LOOP}")
    moments: torch.Tensor = distribution.parameters
    return moments


class EncodedVae(VaeStandIn):
    """Takes the VAE's place in a pipeline, and returns what an earlier stage kept of the image; all else is the VAE's.

    Args:
        vae: The VAE; without storage if it is not to decode.
        tensors: What the stage kept, by name.
        stage: `encode` or `encode_image`, which kept moments; or `denoise`, which kept what the loop drew of them.
    """

    def __init__(self, vae: torch.nn.Module, dtype: torch.dtype, tensors: Tensors, stage: str) -> None:
        super().__init__(vae, dtype)
        self.tensors = tensors
        self.stage = stage
        #: The calls of `encode` so far.
        self.number = 0
        #: The latents that the loop has drawn, by name.
        self.drawn: dict[str, torch.Tensor] = {}

    def encode(self, pixels: torch.Tensor, **kwargs: Any) -> Any:
        """Returns a latent distribution, as a VAE does, with the mean and variance that the stage kept. With what
        `denoise` kept, for code after the loop, its samples are the latents that the loop drew.
        """
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
        from diffusers.models.modeling_outputs import AutoencoderKLOutput

        by_moments: Any = None
        if self.stage != "denoise":
            by_moments = DiagonalGaussianDistribution(self._kept(f"{MOMENTS}{self.number}"))
            self.number += 1

        def draw(method: str, *arguments: Any) -> torch.Tensor:
            """Returns latents drawn from the distribution, or those that the loop drew; keeps them by number."""
            name = f"{LATENTS}{len(self.drawn)}"
            self.drawn[name] = self._kept(name) if by_moments is None else getattr(by_moments, method)(*arguments)
            return self.drawn[name]

        distribution = SimpleNamespace(
            sample=lambda generator=None: draw("sample", generator), mode=lambda: draw("mode")
        )
        return AutoencoderKLOutput(latent_dist=distribution)

    def decode(self, latents: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Returns what the VAE's `decode` returns for latents that are first cast to the VAE's dtype."""
        return self.component.decode(latents.to(self.dtype), *args, **kwargs)

    def _kept(self, name: str) -> torch.Tensor:
        """Returns a tensor that an earlier stage kept; refuses that stage's artefact if it lacks the tensor."""
        if name not in self.tensors:
            image = " and --image FILE" if name.startswith(MOMENTS) else ""
            remedy = f"Run --stage {self.stage} with this model{image}"
            raise ArtefactForeignError(f"{self.stage}.safetensors", f"It lacks '{name}'", remedy, name=name)
        return self.tensors[name]
