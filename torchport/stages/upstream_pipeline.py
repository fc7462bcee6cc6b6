"""A pipeline object of diffusers, built around other parts than its own, and called as a card says."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from torchport.config.card import PipelineCall, StageName
from torchport.errors import BadValueError, nearest
from torchport.load.foreign import tokenizing
from torchport.load.module import class_of
from torchport.stages import guiding
from torchport.stages.beside import EncodePrompt, RecordedComponent, ReplayedComponent, SilentComponent
from torchport.stages.conditions import Conditions
from torchport.stages.decoding import PostponedVae
from torchport.stages.family import Call, Parts, Settings, Tensors
from torchport.stages.replay import OTHER_LOOP, Loop
from torchport.stages.stand_in import ComponentStandIn, NetworkStandIn

KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
"""What an argument takes, by the type of its default."""


@dataclasses.dataclass(frozen=True)
class PipelineInputs:
    """All that one call of upstream's pipeline is made with: its components, and the arguments of the call."""

    parts: Parts  #: The networks, for their configurations.
    settings: Settings
    embeddings: Tensors
    loop: Loop  #: The scheduler's steps, and the seed's generator.
    vae: Any  #: In the place of the VAE. A `PostponedVae` also replaces the pipeline's post-processing.
    others: Parts  #: Further components, by name.
    #: The stage's network, by its name; none where every step is done.
    calls: Mapping[str, Call] = dataclasses.field(default_factory=dict)
    is_latent: bool = True  #: Whether the pipeline returns latents, or frames.
    #: Further arguments of the call. Without an image the pipeline gets a blank image: `vae` has the encoded image.
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    #: For a card with `answers`, a list that gets the values of each call of `encode_prompt`. None: these calls return
    #: the values in `embeddings`, and upstream's function is not called.
    encoded: list[tuple[Any, ...]] | None = None


class UpstreamPipeline:
    """A pipeline of diffusers as a card describes it.

    Args:
        class_path: Its class, `package.module:Class`.
        place: Where the card has its call, for errors.
        text_encoders: Those of the card's encoders that have weights.
    """

    def __init__(self, class_path: str, card: PipelineCall, place: str, text_encoders: tuple[str, ...] = ()) -> None:
        self.class_path = class_path
        self.card = card
        self.place = place
        self.text_encoders = text_encoders
        self.name = class_path.partition(":")[2]
        #: The network whose configuration and dtype the pipeline reads: the first.
        self.network = card.networks[0]
        #: Whether encoding reads configurations of networks and VAE. A modular pipeline may. Its class is recognised by
        #: the name, as upstream may not be imported yet.
        self.asks = card.asks or class_path.endswith("ModularPipeline")
        #: The setting of the frames a second, if the pipeline takes them.
        self.frame_rate = ("frame_rate",) if "frame_rate" in card.settings.values() else ()
        #: The latents that go through its loop: two, if it makes sound.
        self.latents = 1 if card.sound is None else 2
        self.sound_parts = [] if card.sound is None else card.sound.parts
        #: The components that are called before the loop; the VAE is replaced apart from them.
        self.called_before = [name for name in card.before if name != "vae"]
        #: The components without weights that stand in the pipeline in all stages, with the guider if there is one.
        self.processors = [*card.processors, *(["guider"] if card.guider else [])]
        #: Whether the job says the size. Otherwise the pipeline computes one of the image's shape and its network.
        self.takes_size = "height" in card.settings.values()
        #: The stage in which the VAE encodes the image, if there is one.
        self.image_stage: StageName = "encode" if "vae" in card.host else "encode_image"

    def is_guided(self, settings: Settings) -> bool:
        """Returns whether there are negative embeddings. At a scale of 1.0, the sound may still be guided."""
        return settings.guidance_scale != 1.0 or (self.card.sound is not None and self.card.takes_negative)

    def encoded(self, encoders: Parts, settings: Settings) -> tuple[Any, ...]:
        """Returns the values of upstream's `encode_prompt`, as a tuple.

        Of `prompt`, `negative_prompt`, `do_classifier_free_guidance`, `device` and `dtype`, upstream gets those that
        its function takes; and all of the card's `encode`.
        """
        pipe = self.built(encoders)
        self._check_call(pipe, settings)
        arguments = {
            "prompt": settings.prompt,
            "negative_prompt": settings.negative_prompt,
            "do_classifier_free_guidance": self.is_guided(settings),
            "device": torch.device("cpu"),
            "dtype": settings.dtypes[self.network],
        }
        takes = inspect.signature(pipe.encode_prompt).parameters
        arguments = {name: value for name, value in arguments.items() if name in takes or name == "prompt"}
        required = [x.name for x in takes.values() if x.default is x.empty and x.kind is not x.VAR_KEYWORD]
        # Further required arguments are prompts of further encoders: None, and upstream takes `prompt`.
        arguments = {**dict.fromkeys(required), **arguments, **self.card.encode}
        self._check_takes("encode_prompt", pipe.encode_prompt, arguments)
        with torch.no_grad(), tokenizing(self.name):
            values = pipe.encode_prompt(**arguments)
        return values if isinstance(values, tuple) else (values,)

    def called(self, inputs: PipelineInputs) -> list[torch.Tensor]:
        """Runs upstream's pipeline, and returns its latents or frames; and after them its sound, if it makes any."""
        stand_ins: dict[str, Any] = {"vae": inputs.vae, "scheduler": inputs.loop.scheduler}
        for name in self.card.networks:
            dtype, call = inputs.settings.dtypes[name], inputs.calls.get(name)
            conditions = self._conditions(name, inputs.settings, inputs.embeddings)
            stand_ins[name] = NetworkStandIn(inputs.parts[name], dtype, inputs.loop, call, conditions)
        pipe = self.built({**inputs.others, **stand_ins})
        pipe.set_progress_bar_config(disable=True)
        if isinstance(inputs.vae, PostponedVae):
            inputs.vae.take_over(pipe)
        if self.card.answers:
            inputs = self._answered(pipe, inputs)
        arguments = self._arguments(pipe, inputs)
        output = pipe(**{**arguments, "generator": inputs.loop.generator}, return_dict=False)
        # Some pipelines return an object all the same.
        results = list(output.values() if isinstance(output, Mapping) else output)[: self.latents]
        self._check_loop(inputs.loop, inputs.settings)
        if inputs.is_latent and not all(isinstance(result, torch.Tensor) for result in results):
            raise self._wrong_result("latent", results[0], "a tensor")
        inputs.loop.finish()
        return results

    def _answered(self, pipe: Any, inputs: PipelineInputs) -> PipelineInputs:
        """Replaces the `encode_prompt` of a pipeline whose call calls it; returns the call's inputs, with prompts."""
        settings = inputs.settings
        prefixes = ("", "negative_") if self.card.negative_apart and self.is_guided(settings) else ("",)
        names = self.card.embeddings
        returned = [tuple(inputs.embeddings.get(prefix + name) for name in names) for prefix in prefixes]
        prompts = {"prompt": settings.prompt, "negative_prompt": settings.negative_prompt}
        if inputs.encoded is None:  # a later stage, which has no prompt
            prompts = dict.fromkeys(prompts, "any")
            pipe.encode_prompt = EncodePrompt(pipe.encode_prompt, self.place, returned)
        else:
            pipe.encode_prompt = EncodePrompt(pipe.encode_prompt, self.place, returned=inputs.encoded)
        return dataclasses.replace(inputs, embeddings={}, arguments={**inputs.arguments, **prompts})

    def _arguments(self, pipe: Any, inputs: PipelineInputs) -> dict[str, Any]:
        """Returns the arguments of a pipeline's call, without the generator. The later ones replace the earlier: the
        job's fields, the card's constants, the job's `call`, the embeddings, `arguments`. A prompt is None unless
        `arguments` has it.
        """
        settings = inputs.settings
        arguments = inputs.arguments
        self._check_call(pipe, settings)
        prompts, takes = ("prompt", "negative_prompt"), inspect.signature(pipe.__call__).parameters
        result = {name: arguments.get(name) for name in prompts if name in takes}  # some have "" by default
        fields = {**vars(settings), "area": settings.height * settings.width}
        result |= {name: fields[setting] for name, setting in self.card.settings.items()}
        if self.card.image is not None:
            from PIL import Image

            blank = Image.new("RGB", (settings.width, settings.height))  # the image is not here
            result[self.card.image] = [blank] * settings.frames if self.card.edits else blank
        result |= {**self.card.constants, **settings.call, "output_type": "latent" if inputs.is_latent else "pt"}
        for name, value in inputs.embeddings.items():
            result[name] = [value] if name in self.card.lists else value
        result |= {name: value for name, value in arguments.items() if name not in prompts}
        steps = [name for name, setting in self.card.settings.items() if setting == "steps"]
        result |= dict.fromkeys(steps, asked_steps(type(pipe), settings.steps, result))
        self._check_takes("__call__", pipe.__call__, [*result, "generator"])
        return result

    def _check_loop(self, replay: Loop, settings: Settings) -> None:
        """Refuses a loop with another number of steps than the job's, or of latents than the card's."""
        if replay.number != settings.steps:
            fact = f"'{self.name}' calls its scheduler's 'step' {replay.number} times in {settings.steps} steps"
            raise BadValueError(self.place, fact, f"Replay needs one call a step. {OTHER_LOOP}")
        if self.latents > 1 and len(replay.tracks) != self.latents:
            fact = f"'{self.name}' steps with {len(replay.tracks)} of its {self.latents} latents"
            raise BadValueError(self.place, fact, f"Each needs the scheduler or a deep copy of it. {OTHER_LOOP}")

    def others(self, parts: Parts, settings: Settings, tensors: Tensors | None = None) -> dict[str, Any]:
        """Returns the pipeline's components beside network, VAE and scheduler, by name; those of sound are silent. With
        `tensors`, which `encode` kept, the components of `before` return these. Else they are called and recorded.
        """
        dtypes, others = settings.dtypes, self.without_weights(parts, settings)
        for name in self.called_before:
            others[name] = (
                RecordedComponent(parts[name], dtypes[name], name, self.place)
                if tensors is None
                else ReplayedComponent(parts[name], dtypes[name], name, self.place, tensors)
            )
        if self.card.answers:  # the pipeline's call reads the dtypes of text encoders
            others |= {name: ComponentStandIn(parts[name], dtypes[name]) for name in self.text_encoders}
        return others | {name: SilentComponent(parts[name], dtypes[name]) for name in self.sound_parts}

    def without_weights(self, parts: Parts, settings: Settings) -> dict[str, Any]:
        """Returns the components in `processors` that `parts` has, by name; the guider is built for the job's scale."""
        processors = {name: parts[name] for name in self.processors if name in parts}
        if "guider" in processors:
            processors["guider"] = guiding.guider(parts["guider"], settings)
        return processors

    def _conditions(self, network: str, settings: Settings, embeddings: Tensors) -> Conditions | None:
        """Returns what computes a network's two calls of a step as one batch; None for a network with one call."""
        if not self.card.conditions or not embeddings or not self.is_guided(settings):
            return None
        names = self.card.conditions.items()
        pairs = {name: (embeddings[first], embeddings[second]) for name, (first, second) in names}
        return Conditions(pairs, network, self.place)

    def checked_frames(self, frames: Any, settings: Settings) -> torch.Tensor:
        """Returns a post-processed video [1, F, 3, height, width]; refuses another. A picture becomes one frame."""
        size = [1, settings.frames, 3, settings.height, settings.width]
        if isinstance(frames, torch.Tensor) and frames.ndim == 4 and settings.frames == 1:
            frames = frames[:, None]
        if isinstance(frames, torch.Tensor) and frames.is_floating_point() and list(frames.shape) == size:
            return frames
        if isinstance(frames, torch.Tensor) and list(frames.shape[:3]) == size[:3] and not self.takes_size:
            fact = f"'{self.name}' makes {frames.shape[-2]} x {frames.shape[-1]} of an image of that shape"
            raise BadValueError("'height' and 'width'", f"They are {size[-2]} x {size[-1]}, and {fact}", "Set these")
        raise self._wrong_result("pt", frames, f"numbers from 0 to 1, {size}")

    def _wrong_result(self, output_type: str, value: Any, needed: str) -> BadValueError:
        """Returns the error for a pipeline that returns a `value` in place of what is `needed`."""
        kind = f"a {type(value).__name__}"
        if isinstance(value, torch.Tensor):
            kind = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        fact = f"'{self.name}' with output_type '{output_type}' returns {kind}, and not {needed}"
        return BadValueError(self.place, fact, "Write a family of its own for it: docs/families.md")

    def built(self, parts: Parts) -> Any:
        """Returns upstream's pipeline object around some parts; a component that `parts` lacks is None."""
        cls = class_of(self.class_path)
        self._check_takes("__init__", cls.__init__, self.card.init)
        parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]  # without `self`
        names = [x.name for x in parameters if x.name in parts or x.default is x.empty]
        return cls(**{name: parts.get(name) for name in names} | self.card.init)

    def _check_call(self, pipe: Any, settings: Settings) -> None:
        """Refuses a field of the config's `call` that is no argument of the pipeline, or of another type.

        The type must be that of the card's constant, or of upstream's default: a text would count as true.
        """
        for name, value in settings.call.items():
            place, parameters = f"call.{name}", inspect.signature(pipe.__call__).parameters
            self._check_takes("__call__", pipe.__call__, [name], place)
            default = parameters[name].default if name in parameters else None
            example = self.card.constants.get(name, default)
            is_whole = type(example) is float and type(value) is int  # a whole number suits there, too
            if type(example) in KINDS and type(value) is not type(example) and not is_whole:
                fact = f"It is {value!r}, and '{self.name}' takes {KINDS[type(example)]}"
                raise BadValueError(place, fact, f"Write it as {example!r} is written", name=name)

    def _check_takes(
        self, method: str, function: Callable[..., Any], names: Iterable[str], place: str | None = None
    ) -> None:
        """Refuses names that are no arguments of a pipeline's method, unless the method takes any keyword."""
        parameters = inspect.signature(function).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return
        for name in names:
            if name not in parameters:
                fact = f"'{self.name}.{method}' takes no argument '{name}'"
                raise BadValueError(place or self.place, fact, nearest(name, parameters), name=name)


def taken_steps(cls: Any, asked: int, arguments: Mapping[str, Any]) -> int:
    """Returns how many steps a pipeline's loop takes if its call asks for `asked` steps. A pipeline that adds noise to
    an image leaves out the first steps, by its argument for the strength: upstream's `get_timesteps` counts the rest.
    Arguments that are left out have their defaults.
    """
    takes = inspect.signature(cls.__call__).parameters
    strength = next((name for name in ("denoise_strength", "strength") if name in takes), None)
    if strength is None or not hasattr(cls, "get_timesteps"):
        return asked
    values = {"num_inference_steps": asked, "strength": arguments.get(strength, takes[strength].default)}
    values |= {"device": None, "timesteps": [], "sigmas": []}
    keywords = {name: values[name] for name in inspect.signature(cls.get_timesteps).parameters if name in values}
    # All of a pipeline that `get_timesteps` reads.
    pipe = types.SimpleNamespace(scheduler=types.SimpleNamespace(timesteps=[], order=1))
    return int(cls.get_timesteps(pipe, **keywords)[-1])


def asked_steps(cls: Any, taken: int, arguments: Mapping[str, Any]) -> int:
    """Returns the steps to ask a pipeline's call for, so that its loop takes `taken` steps: upstream's default if its
    loop then takes as many, or else the smallest number. See `taken_steps`.
    """
    default = getattr(inspect.signature(cls.__call__).parameters.get("num_inference_steps"), "default", None)
    defaults = [default] if isinstance(default, int) else []
    # A strength of 0.01 needs 100 times as many. At 0 no number is right: `taken` is returned, and upstream refuses it.
    counts = (*defaults, *range(taken, 100 * taken))
    return next((asked for asked in counts if taken_steps(cls, asked, arguments) == taken), taken)
