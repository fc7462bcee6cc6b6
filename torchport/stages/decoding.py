"""A VAE after a pipeline's loop: what it is to decode is noted, and is decoded later, on the devices.

Upstream's code goes on after `vae.decode` with something in place of the video, from which nothing can be computed. It
may only pick one frame of it, post-process it, and return it. So a pipeline that does anything else is noticed.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchport.errors import BadValueError
from torchport.stages.family import Tensors
from torchport.stages.image_latents import EncodedVae

ON_HOST = "Decode on the host: add 'host: [vae]' to the card's 'call'"
"""What to do with a pipeline whose video cannot come from the devices."""
CARRIED = (torch.Tensor, bool, int, float, str, type(None))
"""Types of arguments that a program can take: inputs, and constants."""


def processor_of(pipe: Any) -> Any:
    """Returns the processor that post-processes a pipeline's video or picture; None if the pipeline has none."""
    return getattr(pipe, "video_processor", None) or getattr(pipe, "image_processor", None)


class _Pending(torch.Tensor):
    """Takes the place of a video that will be computed later. Only its batch and one part of it may be asked for."""

    refusal: Callable[[str], BadValueError]  #: Returns the error, by the name of the function.
    picked: str  #: The dim and the position that upstream picked, `2:0`; "" for the whole tensor.

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Returns the result of a function of PyTorch: the shape, or a part by an index. Refuses any other function."""
        [pending, *_] = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, _Pending)]
        if function == torch.Tensor.shape.__get__:  # type: ignore[attr-defined]
            return _Shape(pending.refusal)
        if function is torch.Tensor.__getitem__ and not pending.picked and _picked(args[1]):
            return _pending(pending.refusal, _picked(args[1]))
        name = torch.overrides.resolve_name(function) or getattr(function, "__name__", str(function))
        raise pending.refusal(name.removesuffix(".__get__"))


def _pending(refusal: Callable[[str], BadValueError], picked: str = "") -> _Pending:
    pending = torch.empty(0).as_subclass(_Pending)
    pending.refusal, pending.picked = refusal, picked
    return pending


@dataclasses.dataclass(frozen=True)
class _Shape:
    """The shape of a pending tensor, of which the batch is known: 1."""

    refusal: Callable[[str], BadValueError]

    def __getitem__(self, dim: int) -> int:
        if dim != 0:
            raise self.refusal("torch.Tensor.shape")
        return 1


def _picked(index: Any) -> str:
    """Returns `dim:position` of an index that picks one position of a dim: `[:, :, 0]` -> `2:0`; "" of any other."""
    *before, last = index if isinstance(index, tuple) else (index,)
    if not before or type(last) is not int:
        return ""
    if before != [slice(None)] * len(before):
        return ""
    return f"{len(before)}:{last}"


def part_of(video: torch.Tensor, picked: str) -> torch.Tensor:
    """Returns the part of a tensor that upstream picked, by `_Pending.picked`; it may be traced."""
    if not picked:
        return video
    dim, _, position = picked.partition(":")
    return video.select(int(dim), int(position))


class PostponedVae(EncodedVae):
    """Takes the VAE's place after the loop, and notes what its `decode` is called with, for a later stage."""

    def __init__(self, vae: torch.nn.Module, dtype: torch.dtype, tensors: Tensors, pipeline: str, place: str) -> None:
        """Makes the placeholders for the video and the frames, with a refusal for code that computes with them."""
        super().__init__(vae, dtype, tensors, stage="denoise")
        self.pipeline = pipeline
        self.place = place
        #: What `decode` is called with, by its own names; None before.
        self.inputs: dict[str, Any] | None = None
        self.video = _pending(lambda function: self._refusal(f"calls '{function}' with what its VAE decoded"))
        self.frames = _pending(lambda function: self._refusal(f"calls '{function}' with its post-processed video"))

    def _readable(self, value: Any, name: str) -> Any:
        if isinstance(value, torch.nn.Parameter) and value.is_meta:
            raise self._refusal(f"reads the VAE's weight '{name}'")
        return super()._readable(value, name)

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        """Notes the arguments as `inputs`, and returns a placeholder for the video, in the form of the VAE's `decode`.

        Refuses a second call, and an argument that no program can take.
        """
        from diffusers.models.autoencoders.vae import DecoderOutput

        if self.inputs is not None:
            raise self._refusal("calls its VAE's 'decode' more than once")
        arguments = inspect.signature(self.component.decode).bind(*args, **kwargs)
        arguments.apply_defaults()
        inputs = dict(arguments.arguments)
        as_object = inputs.pop("return_dict")
        # The VAE's name for its first argument.
        latents = next(iter(inputs))
        inputs[latents] = inputs[latents].to(self.dtype)
        for name, value in inputs.items():
            if name == "generator" and isinstance(value, torch.Generator):
                inputs[name] = None  # a VAE that draws from it is refused when it is traced
            elif not isinstance(value, CARRIED):
                raise self._refusal(f"calls its VAE's 'decode' with a {type(value).__name__} as '{name}'")
        self.inputs = inputs
        return DecoderOutput(sample=self.video) if as_object else (self.video,)

    def take_over(self, pipe: Any) -> None:
        """Replaces a pipeline's post-processing, which then returns a placeholder for the frames."""

        def postprocess(
            video: Any = None, output_type: str = "np", do_denormalize: Any = None, image: Any = None, **kwargs: Any
        ) -> _Pending:
            """Returns the placeholder for the frames, if upstream passes the video and its usual arguments."""
            video = image if video is None else video
            # The frames are pending, too, with another refusal.
            is_decoded = isinstance(video, _Pending) and video.refusal is self.video.refusal
            # `do_denormalize` has a truth value for each picture; by default all are true.
            is_usual = output_type == "pt" and not kwargs and all(do_denormalize or [])
            if not is_decoded or not is_usual:
                raise self._refusal("post-processes something else than what its VAE decoded")
            if video.picked:
                self.inputs = {**(self.inputs or {}), "picked": video.picked}
            return self.frames

        processor = processor_of(pipe)
        if processor is None:
            raise self._refusal("has neither 'video_processor' nor 'image_processor'")
        processor.postprocess = processor.postprocess_video = postprocess

    def inputs_of(self, result: Any) -> dict[str, Any]:
        """Returns the noted arguments of `decode`. Refuses a pipeline that returned another `result` than `frames`."""
        if result is not self.frames or self.inputs is None:
            raise self._refusal("returns something else than its post-processed video")
        return self.inputs

    def _refusal(self, fact: str) -> BadValueError:
        return BadValueError(self.place, f"'{self.pipeline}' {fact}", ON_HOST)
