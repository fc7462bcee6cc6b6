"""A trial of a pipeline with tiny components: what upstream's own code does is noted, and where it stops is mended."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import math
import re
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torchport.errors import BadValueError
from torchport.load.foreign import brief, line_of, reading, refusals
from torchport.load.modular import is_modular
from torchport.porting.derive.parts import HEAD_SIZE, HEADS, LONGEST, TEMPLATE, Configurations, absent_parts
from torchport.porting.draft.model import shares
from torchport.stages.beside import EncodePrompt
from torchport.stages.decoding import processor_of
from torchport.stages.replay import OTHER_LOOP, Loop
from torchport.stages.upstream_pipeline import asked_steps

STEPS = 2
"""The denoising steps of a trial."""
NEGATIVE = "bad"
"""The negative prompt of a trial."""
LAYERS = 40
"""Layers of a tiny text encoder, where a pipeline takes hidden states by their numbers, such as the 30th."""
PATIENCE = 120.0
"""Seconds after which no further change of arguments is tried."""
ARGUMENTS = {
    "frames": ("num_frames", "frames", "video_length"),
    "frame_rate": ("frame_rate", "fps"),
    "steps": ("num_inference_steps",),
    "height": ("height",),
    "width": ("width",),
    "area": ("max_area",),
}
"""By field of a job, the names that pipelines give the argument for it."""
IMAGES = ("image", "control_image", "video", "control_video")
"""Names that pipelines give the argument for an image, or for a video as a list of frames."""
_SPATIAL = ("vae_scale_factor_spatial", "vae_spatial_compression_ratio", "vae_scale_factor")
_TEMPORAL = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "vae_temporal_scale_factor")


@dataclasses.dataclass
class LoopCall:
    """A call of a network in the pipeline's loop."""

    network: str
    step: int  #: The steps that were over.
    inputs: dict[str, Any]


@dataclasses.dataclass
class Observed:
    """What a pipeline did in a trial."""

    unit: int = 16  #: Pixels that height and width are multiples of.
    size: tuple[int, int] = (32, 64)  #: Height and width.
    frames: int = 1  #: Frames that were asked for.
    encoding: dict[str, Any] = dataclasses.field(default_factory=dict)  #: The arguments of `encode_prompt`.
    embeddings: list[Any] = dataclasses.field(default_factory=list)  #: The results of `encode_prompt`.
    longer: list[Any] = dataclasses.field(default_factory=list)  #: Its results for longer prompts.
    encodings: int = 0  #: How often the pipeline called it.
    #: Its results for the negative prompt, if the pipeline calls it a second time for that.
    negative: list[Any] = dataclasses.field(default_factory=list)
    calls: list[LoopCall] = dataclasses.field(default_factory=list)
    #: By network, the lists of blocks that feed one another, as a card's `stacks` says it.
    stacks: dict[str, dict[str, dict[str, Any]]] = dataclasses.field(default_factory=dict)
    steps: int = 0  #: Calls of the scheduler's `step`.
    latents: int = 1  #: How many latents go through the loop, each with a copy of the scheduler.
    before: dict[str, None] = dataclasses.field(default_factory=dict)  #: Components called before step 1 is over.
    #: Whether the pipeline changes the VAE's output before it is post-processed. Taking a frame of it is no change.
    changes_decoded: bool = False
    after: dict[str, None] = dataclasses.field(default_factory=dict)  #: Components called after the last step.
    tokenizers: dict[str, Any] = dataclasses.field(default_factory=dict)  #: As the pipeline left them.
    is_encoding: bool = False  #: Whether `encode_prompt` runs.
    outputs: list[Any] = dataclasses.field(default_factory=list)  #: What the pipeline returned for each latents.
    finished: int = 0  #: How many calls of modules have returned: how far the trial came.
    line: int = 0  #: The line of the pipeline's `__call__` at which it stopped.


@dataclasses.dataclass(frozen=True)
class Stop:
    error: Exception
    component: str | None  #: The component whose module raised; None if the pipeline's own code did.
    module: str = ""  #: The name of this module in the component.
    #: The attribute of the module that does not fit its input, and the size that would: `("in_features", 96)`.
    wanted: tuple[str, int] | None = None


@dataclasses.dataclass
class PipelineTrial:
    cls: Any
    configurations: Configurations
    place: str
    image: str | None = None  #: The pipeline's argument that takes an image; None for one that takes none.
    unit: int | None = None  #: Pixels that height and width are multiples of; None before a trial.
    answers: bool = False  #: Whether a run calls `encode_prompt` inside the pipeline: a card's field `answers`.
    longest: float = 0.0  #: Seconds of the longest trial so far.

    @property
    def edits(self) -> bool:
        """Whether it begins with a video, as a list of frames, and not with an image."""
        return self.image is not None and self.image.endswith("video")

    def observed(self) -> Observed:
        """Tries the pipeline until a trial comes to its end, and returns what it did then. After each trial that stops,
        `configurations` is changed so that the next comes further; raises at a stop that no change mends.
        """
        end = time.monotonic() + PATIENCE
        observed, stop = self._tried()
        while stop is not None:
            further = self._mended(stop, observed, end)
            if further is None:
                raise self._refusal(stop)
            observed, stop = further
        if observed.steps != STEPS:
            fact = f"'{self.cls.__name__}' calls its scheduler's 'step' {observed.steps} times in {STEPS} steps"
            raise BadValueError(self.place, fact, f"Replay needs one call a step. {OTHER_LOOP}")
        return observed

    def check_replay(self, observed: Observed, embeddings: Mapping[str, Any] | None) -> None:
        """Refuses a pipeline whose output from its own embeddings differs from its output from the prompts.

        Args:
            embeddings: The results of `encode_prompt`, by the pipeline's arguments that take them. With None the
                pipeline calls `encode_prompt` with other prompts, and gets the results that it returned before.
        """
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            parts = {name: self.configurations.built(name) for name in self.configurations.parts}
            parts |= observed.tokenizers
            pipe = self.cls(**parts, **absent_parts(self.cls))
            pipe.set_progress_bar_config(disable=True)
            arguments = self._arguments(pipe, Observed())
            _LatentsAtLast(pipe.scheduler, arguments, observed)  # replaces the scheduler's `step`
            names = arguments.keys() & {"prompt", "negative_prompt"}
            texts: dict[str, str | None] = dict.fromkeys(names)  # None: the embeddings take their place
            if embeddings is None:
                calls = [tuple(values) for values in (observed.embeddings, observed.negative) if values]
                pipe.encode_prompt = EncodePrompt(pipe.encode_prompt, self.place, calls)
                texts = dict.fromkeys(names, "any")
                embeddings = {}
            fact = f"'{self.cls.__name__}' does not take its own embeddings"
            with reading(BadValueError, self.place, fact, OTHER_LOOP):
                again = list(pipe(**{**arguments, **texts, **embeddings}, return_dict=False))
        if not all(map(_are_close, observed.outputs, again)):
            kept = "its own embeddings, and the latents of its last step alone,"
            fact = f"'{self.cls.__name__}' makes another picture of {kept} than of the prompts"
            raise BadValueError(self.place, fact, OTHER_LOOP)

    def _refusal(self, stop: Stop) -> BadValueError:
        name = self.cls.__name__
        line = line_of(stop.error)
        if isinstance(stop.error, NameError) and stop.error.name:  # upstream imports it only where it is installed
            fact = f"'{name}' stops at {line}: it needs '{stop.error.name}', which is not installed"
            return BadValueError(self.place, fact, f"pip install {stop.error.name}")
        field = f"tiny.components.{stop.component}" if stop.component else "its components"
        fact = f"With tiny weights '{name}' stops at {line or 'upstream'}: {brief(stop.error)}"
        return BadValueError(self.place, fact, f"Write a card that says {field}: docs/cards.md")

    def _mended(self, stop: Stop, before: Observed, end: float) -> tuple[Observed, Stop | None] | None:
        """Returns the next trial that came further than the trial `before`, and keeps the change that helped; None if
        no change helps. After the time `end`, by `time.monotonic`, no change is tried.
        """
        if self._follow_message(stop):
            return self._tried()
        for _ in self._changes(stop, end):
            observed, further = self._tried()
            if further is None or (observed.finished, observed.line) > (before.finished, before.line):
                return observed, further
        return None

    def _follow_message(self, stop: Stop) -> bool:
        """Makes the change that the error's text asks for; returns whether it asks for one that was not made before."""
        text = str(stop.error)
        divisor = re.search(r"divisible by\D*(\d+)", text)
        if divisor and (self.unit is None or self.unit % int(divisor[1])):  # else the sizes are divisible already
            self.unit = math.lcm(int(divisor[1]), self.unit or 1)
            return True
        if "chat_template" in text and self.configurations.give("chat_template", TEMPLATE):
            return True
        return isinstance(stop.error, OverflowError) and self.configurations.give("model_max_length", LONGEST)

    def _changes(self, stop: Stop, end: float) -> Iterator[None]:
        """Makes the changes that may help, the likeliest first. Each is in force until the next is asked for."""
        parts = self.configurations.parts
        values = self.configurations.values
        takes = [name for name in IMAGES if name in inspect.signature(self.cls.__call__).parameters]
        speaks_of_image = re.search(r"image|video|NoneType", str(stop.error), re.IGNORECASE)
        if takes and self.image is None and speaks_of_image:
            self.image = takes[0]
            yield
            self.image = None
        # Another class of a network that may have several.
        for name, part in list(parts.items()):
            others = part.others if part.kind == "network" and stop.component in (None, name) else ()
            for other in others:
                kept = values[name]
                self.configurations.choose(name, other)
                yield
                parts[name], values[name] = part, kept
        for name, changes in self._proposals(stop):
            if time.monotonic() + self.longest > end:  # it would end too late
                return
            mended = self.configurations.mended
            kept = values.get(name, {})
            known = mended.get(name, [])
            values[name], mended[name] = {**kept, **changes}, [*known, *changes]
            yield
            values[name], mended[name] = kept, known

    def _proposals(self, stop: Stop) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields changes of a component's arguments that may help, the likeliest first: changes that give the module
        that raised the size of its input, changes that the error's text suggests, and changes that often help.
        """
        if stop.component is not None and stop.wanted is not None:
            yield from ((stop.component, changes) for changes in self._resizing(stop))
        yield from self._attributes(stop)
        parts = self.configurations.parts.items()
        if isinstance(stop.error, IndexError) and stop.component is None:  # it reads hidden states of more layers
            values = self.configurations.values
            yield from ((name, _deeper(values[name])) for name, part in parts if part.kind == "encoder")
        networks = [stop.component] if stop.component else [name for name, part in parts if part.kind == "network"]
        if re.search(r"NoneType|object has no attribute", str(stop.error)):  # a part is made only where it has a width
            for component in networks:
                known = self.configurations.all_values(component)
                dims = [name for name, value in known.items() if value is None and name.endswith("_dim")]
                yield from ((component, {dim: width}) for dim in dims for width in sorted(self._widths()))
        yield from self._as_the_message_says(str(stop.error), networks)
        for component in networks:
            yield from ((component, changes) for changes in self._variants(component))

    def _attributes(self, stop: Stop) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields changes for an encoder whose configuration lacks an attribute that a nested configuration has: all
        attributes of the nested configuration. A lacking rate of dropout is set to 0 in the nested configuration.
        """
        lacking = re.search(r"'\w+Config' object has no attribute '(\w+)'", str(stop.error))
        if lacking and stop.component:
            known = self.configurations.parts[stop.component].cls.config_class().to_dict()
            for name, small in list(self.configurations.values[stop.component].items()):
                if isinstance(small, dict) and "dropout" in lacking[1]:  # a larger configuration would set it
                    yield stop.component, {name: {**small, lacking[1]: 0.0}}
                elif isinstance(small, dict) and lacking[1] in known[name]:
                    values = {key: value for key, value in known[name].items() if key not in known} | small
                    kinds = list(dict.fromkeys(values.get("layer_types") or [])) * LAYERS
                    yield stop.component, values | {"layer_types": kinds[: values["num_hidden_layers"]] or None}

    def _resizing(self, stop: Stop) -> Iterator[dict[str, int]]:
        """Yields each change of a single argument that gives the module that raised the size of its input."""
        assert stop.component is not None and stop.wanted is not None
        attribute, size = stop.wanted
        current = _size(self.configurations.on_meta(stop.component, changes={}), stop.module, attribute)
        values = self.configurations.all_values(stop.component)
        for name, value in values.items():
            if type(value) is not int:
                continue
            # The argument may be the size, or in proportion to it, such as a number of heads.
            for proposal in dict.fromkeys((size, value * size // current if current else size)):
                if proposal in (value, 0):
                    continue
                resized = None
                with contextlib.suppress(*refusals()):
                    module = self.configurations.on_meta(stop.component, {name: proposal})
                    resized = _size(module, stop.module, attribute)
                if resized == size:
                    yield {name: proposal}

    def _as_the_message_says(self, message: str, components: Sequence[str]) -> Iterator[tuple[str, dict[str, int]]]:
        """Yields changes of a single argument, by the sizes in an error's message. After "Expected size 16 but got size
        8", `in_channels` of 16 is tried as 8 (and in the same proportion as 32), and `in_channels` of 8 as 16.
        """
        sizes = dict.fromkeys(int(size) for size in re.findall(r"\d+", message) if 1 < int(size) < 10_000)
        for component in components:
            for name, value in self.configurations.all_values(component).items():
                if re.search(r"(layers|blocks|depth)$", name):  # more of them let more modules finish, and mend nothing
                    continue
                others = [size for size in sizes if size != value]
                if type(value) is int and value in sizes:
                    yield from ((component, {name: size}) for size in others)
                    yield from ((component, {name: value * value // size}) for size in others if size < value)
                elif value is None and re.search(r"channels|_dim$", name):
                    scaled = [small * small // large for small in sizes for large in sizes if small < large]
                    yield from ((component, {name: size}) for size in dict.fromkeys([*others, *scaled]))

    def _variants(self, component: str) -> Iterator[dict[str, Any]]:
        """Yields changes of a single argument to try: a switch turned, another head size, another component's width."""
        current = self.configurations.all_values(component)
        sizes = {HEADS * HEAD_SIZE, HEAD_SIZE, *self._widths()}
        for name, value in current.items():
            if type(value) is bool:
                yield {name: not value}
            elif value is None and name.startswith("use_"):
                yield from ({name: is_on} for is_on in (False, True))
            elif value is None and re.search(r"rope|axes", name):  # how the axes share a head's dims
                yield from ({name: shares([1] * axes, size)} for size in (16, HEAD_SIZE) for axes in (2, 3))
            elif type(value) is int and re.search(r"head_dim|head_size", name):
                yield from ({name: size} for size in (16, 32, 48) if size != value)
            elif type(value) is int and re.search(r"dim|channels|width|size", name):
                yield from ({name: size} for size in sorted(sizes) if size != value)

    def _widths(self) -> set[int]:
        """Returns the widths of the text encoders, and their sum: pipelines concatenate embeddings."""
        values = self.configurations.values
        parts = self.configurations.parts
        encoders = [values[name] for name in values if parts[name].kind == "encoder"]
        sizes = [encoder.get(name) for encoder in encoders for name in ("d_model", "hidden_size")]
        widths = [size for size in sizes if isinstance(size, int)]
        return {*widths, sum(widths)}

    def _tried(self) -> tuple[Observed, Stop | None]:
        """Runs the pipeline once with `_run`, and notes the time in `longest`."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of upstream's, about numbers that nobody will run with
            began = time.monotonic()
            tried = self._run()
            self.longest = max(self.longest, time.monotonic() - began)
            return tried

    def _run(self) -> tuple[Observed, Stop | None]:
        """Runs the pipeline once with tiny weights. Returns what it did, and where it stopped, or None at its end."""
        observed = Observed()
        running: list[tuple[str, str, torch.nn.Module, tuple[Any, ...]]] = []  # as in `_watched`
        kinds: tuple[type[Exception], ...] = (*refusals(), NameError, StopIteration)
        component: str | None = None
        try:
            parts: dict[str, Any] = {}
            for component in self.configurations.parts:
                parts[component] = built = self.configurations.built(component)
                if component in self.configurations.tokenizers:
                    observed.tokenizers |= {component: built}
                observed.finished += 1
            component = None  # from here on an error is the pipeline's, or that of a module in `running`
            pipe = self.cls(**parts, **absent_parts(self.cls))
            observed.finished += 1
            pipe.set_progress_bar_config(disable=True)
            arguments = self._arguments(pipe, observed)
            _Watched(pipe.scheduler, arguments, observed)
            with _watched(pipe, parts, observed, running), torch.no_grad():
                observed.outputs = list(pipe(**arguments, return_dict=False))[: observed.latents]
            output = observed.outputs[0]
            size = [arguments.get("height", 0), arguments.get("width", 0)]
            if isinstance(output, torch.Tensor) and not any(size):  # the pipeline chooses its size
                observed.size = (output.shape[-2], output.shape[-1])
                observed.unit = math.gcd(observed.unit, *observed.size)
            elif isinstance(output, torch.Tensor):  # [batch, frames, 3, height, width], or an image without frames
                asked = [*([observed.frames] if output.ndim == 5 else []), 3, *size]
                if list(output.shape[1:]) != asked:
                    raise ValueError(f"It makes {list(output.shape[1:])} where {asked} was asked for")
        except BaseException as error:
            if not isinstance(error, kinds) and type(error) is not Exception:  # `tokenizers` raises a bare Exception
                raise
            frames = traceback.extract_tb(error.__traceback__)
            observed.line = next((frame.lineno or 0 for frame in frames if frame.name == "__call__"), 0)
            if not running:
                return observed, Stop(error, component)
            component, name, module, args = running[-1]
            return observed, Stop(error, component, name, _wanted(module, args))
        return observed, None

    def _arguments(self, pipe: Any, observed: Observed) -> dict[str, Any]:
        """Returns the arguments for the smallest video of the pipeline, in two steps; notes its size in `observed`."""
        parameters = inspect.signature(pipe.__call__).parameters
        spatial = next((getattr(pipe, name) for name in _SPATIAL if getattr(pipe, name, None)), 8)
        temporal = next((getattr(pipe, name) for name in _TEMPORAL if getattr(pipe, name, None)), 4)
        self.unit = self.unit or int(spatial) * _patch_side(self.configurations)  # an earlier trial may have set it
        observed.unit = self.unit
        observed.frames = 1
        observed.size = (self.unit * 2, self.unit * 4)
        values: dict[str, Any] = {"prompt": "A cat walks", "negative_prompt": NEGATIVE, "output_type": "pt"}
        values |= {"generator": torch.Generator().manual_seed(0), **constants_of(parameters)}
        values |= {"height": observed.size[0], "width": observed.size[1], "max_area": self.unit**2 * 8}
        frames = next((name for name in ARGUMENTS["frames"] if name in parameters), None)
        if frames is not None:
            observed.frames = values[frames] = 2 * int(temporal) + 1
        if scale := guidance_argument(parameters):
            values[scale] = 3.0
        if self.image is not None:
            from PIL import Image

            image = Image.new("RGB", (values["width"], values["height"]), (90, 120, 60))
            values[self.image] = [image] * observed.frames if self.edits else image
        named = [parameter for parameter in parameters.values() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        required = [parameter.name for parameter in named if parameter.default is parameter.empty]
        lacking = [name for name in required if name not in values]
        if lacking:
            fact = f"'{self.cls.__name__}' needs {', '.join(lacking)}, and a run has a prompt and at most one image"
            raise BadValueError(self.place, fact, OTHER_LOOP)
        values["num_inference_steps"] = asked_steps(self.cls, STEPS, values)
        return {name: value for name, value in values.items() if name in parameters}


class _Watched(Loop):
    """A loop that runs the scheduler's own steps, and notes how many there are, and for how many latents."""

    def __init__(self, scheduler: Any, arguments: Mapping[str, Any], observed: Observed) -> None:
        super().__init__(scheduler, arguments.get("generator") or torch.Generator(), latents=2)
        self.observed = observed

    def returned(self, track: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.observed.steps, self.observed.latents = self.number, len(self.tracks)
        return self.tracks[track].real(*args, **kwargs)


class _LatentsAtLast(_Watched):
    """A loop whose last step returns NaN beside the latents: a pipeline that uses another value later makes NaN."""

    def returned(self, track: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        returned = self.tracks[track].real(*args, **kwargs)
        if self.number < STEPS or not isinstance(returned, tuple):
            return returned
        latents, *others = returned
        return (latents, *(None if value is None else value * math.nan for value in others))


def _are_close(a: Any, b: Any) -> bool:
    are_tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return are_tensors and a.shape == b.shape and torch.allclose(a, b, atol=1e-4)


def _deeper(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns changes that give an encoder and its nested configurations as many layers as published encoders have."""
    layers = {"num_hidden_layers": LAYERS}
    nested = {name: value for name, value in values.items() if isinstance(value, dict) and "num_hidden_layers" in value}
    changes: dict[str, Any] = layers if "num_hidden_layers" in values else {}
    return changes | {name: value | layers for name, value in nested.items()}


def constants_of(parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Returns arguments that are False in all jobs, such as `enable_prompt_rewrite`: a job's size and prompt stay."""
    names = ("use_resolution_binning", "_auto_resize", "enable_prompt_rewrite")
    return {name: False for name in names if name in parameters}


def guidance_argument(parameters: Mapping[str, inspect.Parameter]) -> str | None:
    """Returns the name of a pipeline's argument for the scale of guidance, of two known names; None without any."""
    plain = parameters.get("guidance_scale")
    if plain is not None and (plain.default is not None or "true_cfg_scale" not in parameters):
        return "guidance_scale"
    return "true_cfg_scale" if "true_cfg_scale" in parameters else None


def _patch_side(configurations: Configurations) -> int:
    """Returns the side of a token in latent positions: the least common multiple of 2 and of all networks' patches."""
    sides = [2]
    for name, part in configurations.parts.items():
        if part.kind == "network" and name != "vae":
            known = configurations.all_values(name)
            value = known.get("patch_size", known.get("patch_size_hw"))
            value = value[-1] if isinstance(value, list | tuple) else value
            if isinstance(value, int) and value > 0:
                sides.append(value)
    return math.lcm(*sides)


def _size(module: torch.nn.Module, path: str, attribute: str) -> int | None:
    """Returns a module's attribute as a number, of a tensor or tuple the first size; None without the attribute."""
    try:
        value = getattr(module.get_submodule(path), attribute)
    except AttributeError:
        return None
    if isinstance(value, torch.Tensor):
        value = value.shape
    return int(value[0] if isinstance(value, tuple | torch.Size) else value)


def _wanted(module: torch.nn.Module, args: Sequence[Any]) -> tuple[str, int] | None:
    """Returns the attribute of a module that does not fit its input, and the size that would fit: `("in_features", 96)`
    for a `Linear(80, ...)`. None if all fits, or for another kind of module.
    """
    shapes = [tuple(value.shape) for value in args if isinstance(value, torch.Tensor) and value.ndim]
    if not shapes:
        return None
    last = shapes[0][-1]
    second = shapes[0][1] if len(shapes[0]) > 1 else 0  # the channels of a convolution's input
    if isinstance(module, torch.nn.Linear):
        return ("in_features", last) if last != module.in_features else None
    if isinstance(module, torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d):
        return ("in_channels", second) if second != module.in_channels else None
    if isinstance(module, torch.nn.LayerNorm):
        return ("normalized_shape", last) if last != module.normalized_shape[0] else None
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.ndim == 1 and last != weight.shape[0]:  # a norm of any other class
        return "weight", last
    return None


@contextlib.contextmanager
def _watched(pipe: Any, parts: Mapping[str, Any], observed: Observed, running: list[Any]) -> Iterator[None]:
    """Notes the calls of a pipeline's components and of `encode_prompt` in `observed` while the context lasts, and its
    stacks of blocks at the end. `running` is the stack of modules that run, which hooks keep: `(component, name,
    module, args)`.
    """
    handles: list[Any] = []
    networks = [name for name, part in parts.items() if isinstance(part, torch.nn.Module)]
    for component in networks:
        for name, module in parts[component].named_modules():
            handles += _counted(component, name, module, observed, running)
    chains = [chain for component in networks for chain in _chains(component, parts[component])]
    handles += [handle for chain in chains for handle in chain.watched()]
    _watch_decoding(pipe, observed)
    if hasattr(pipe, "encode_prompt"):
        pipe.encode_prompt = functools.partial(_noted_encoding, pipe.encode_prompt, observed)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for chain in chains:
            if chain.carries:
                last = {"last": chain.last} if chain.last else {}
                observed.stacks.setdefault(chain.component, {})[chain.path] = {"carries": chain.carries, **last}


def _noted_encoding(encode: Callable[..., Any], observed: Observed, *args: Any, **kwargs: Any) -> Any:
    """Calls a pipeline's `encode_prompt`, and notes its arguments and results. The first time it is called once more,
    with longer texts, which shows the sizes that count tokens.
    """
    observed.is_encoding = True
    try:
        returned = encode(*args, **kwargs)
        observed.encodings += 1
        bound = inspect.signature(encode).bind(*args, **kwargs)
        if observed.encodings == 1:
            observed.encoding = dict(bound.arguments)
            observed.embeddings = _as_list(returned)
            texts = bound.arguments.keys() & {"prompt", "prompts", "negative_prompt"}
            bound.arguments |= {name: _longer(bound.arguments[name]) for name in texts}
            observed.longer = _as_list(encode(*bound.args, **bound.kwargs))
        elif observed.encodings == 2 and bound.arguments.get("prompt") != observed.encoding.get("prompt"):
            observed.negative = _as_list(returned)
        return returned
    finally:
        observed.is_encoding = False


def _watch_decoding(pipe: Any, observed: Observed) -> None:
    """Wraps a pipeline's VAE and post-processor so that they set `observed.changes_decoded`."""
    vae = getattr(pipe, "vae", None)
    processor = processor_of(pipe)
    decoded = list[torch.Tensor]()
    if vae is None or processor is None:
        return

    def decode(real: Any, *args: Any, **kwargs: Any) -> Any:
        returned = real(*args, **kwargs)
        decoded.append(returned[0])
        return returned

    def process(real: Any, *args: Any, **kwargs: Any) -> Any:
        video = [*args, *kwargs.values()][0]  # its first argument, by position or by keyword
        if decoded:  # else this is a further frame of the video in the call before
            first = decoded[0]
            is_smaller = isinstance(video, torch.Tensor) and video.ndim < first.ndim
            # A view of it at one position of a dim is no change.
            is_view = is_smaller and video.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            observed.changes_decoded = len(decoded) > 1 or not (video is first or is_view)
            decoded.clear()
        return real(*args, **kwargs)

    vae.decode = functools.wraps(vae.decode)(functools.partial(decode, vae.decode))
    for name in ("postprocess", "postprocess_video"):
        if hasattr(processor, name):
            setattr(processor, name, functools.partial(process, getattr(processor, name)))


def _as_list(returned: Any) -> list[Any]:
    return list(returned) if isinstance(returned, tuple) else [returned]


def _longer(prompt: Any) -> Any:
    if isinstance(prompt, list):
        return [_longer(text) for text in prompt]
    return f"{prompt} on the grass in the evening light while birds fly over water" if prompt else prompt


@dataclasses.dataclass
class _Chain:
    """A list of blocks of one class, and whether each block takes the outputs of the block before."""

    component: str
    path: str
    blocks: list[torch.nn.Module]
    #: The inputs that are outputs of the block before; [] if they differ between blocks; None before any call.
    carries: list[str] | None = None
    before: tuple[int, dict[str, Any], list[Any]] | None = None  #: The last call: block's number, inputs, outputs.

    @property
    def last(self) -> int:
        """How many blocks at the end differ in their modules or plain values from the first block."""
        made = []  # the modules of each block, and the plain values among its attributes
        for block in self.blocks:
            plain = {name: repr(value) for name, value in vars(block).items() if isinstance(value, int | float | str)}
            made.append((repr(block), plain))
        # From the end, how many blocks come before a block that is like the first.
        return next((n for n in range(len(made)) if made[-1 - n] == made[0]), 0)

    def watched(self) -> list[Any]:
        """Registers a hook on each block, and returns the handles of the hooks."""
        return [
            block.register_forward_hook(functools.partial(self._noted, number), with_kwargs=True)
            for number, block in enumerate(self.blocks)
        ]

    def _noted(self, number: int, block: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Notes in `carries` which inputs of a block are the outputs of the block before: a scan would carry them."""
        inputs = dict(inspect.signature(block.forward).bind_partial(*args, **kwargs).arguments)
        outputs = _as_list(output)
        if self.before is not None and self.before[0] == number - 1:
            _, others, returned = self.before
            carries = [next((name for name, value in inputs.items() if value is item), "") for item in returned]
            # All other inputs are the same objects. Starred arguments come as a new tuple in every call, some others as
            # a new list: of these the items are compared.
            rest = [(inputs[name], others.get(name)) for name in inputs if name not in carries]
            pairs: list[Any] = [
                (x, y) if isinstance(x, tuple | list) and type(x) is type(y) else ((x,), (y,)) for x, y in rest
            ]
            same = all([*map(id, x)] == [*map(id, y)] for x, y in pairs)
            fits = "" not in carries and same and self.carries in (None, carries)
            self.carries = carries if fits else []
        self.before = (number, inputs, outputs)


def _chains(component: str, module: torch.nn.Module) -> Iterator[_Chain]:
    """Yields a component's lists of at least two blocks of one class, such as its attribute `blocks`."""
    for path, child in module.named_children():
        blocks = list(child) if isinstance(child, torch.nn.ModuleList) else []
        if len(blocks) > 1 and len({type(block) for block in blocks}) == 1:
            yield _Chain(component, path, blocks)


def _counted(component: str, name: str, module: torch.nn.Module, observed: Observed, running: list[Any]) -> list[Any]:
    """Registers hooks on a module, and returns their handles. The hooks keep the stack of running modules and count
    finished calls; on a component, whose `name` is empty, they also note its calls.
    """

    def enter(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if observed.steps == 0 and not observed.is_encoding:
            observed.before[component] = None
        elif observed.steps == STEPS and not observed.is_encoding:
            observed.after[component] = None
        running.append((component, name, module, args))
        if not name:
            inputs = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
            observed.calls.append(LoopCall(component, observed.steps, dict(inputs)))

    def leave(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        observed.finished += 1
        running.pop()

    return [module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)]


def embedding_names(cls: Any) -> list[str]:
    """Returns the names of the values that `encode_prompt` returns, such as `["prompt_embeds", "prompt_embeds_mask"]`.

    They are the names in its `return`, or those in `... = self.encode_prompt()` of the pipeline's call: the list that
    has more arguments of the call. A single value of another name is called `prompt_embeds`.
    """
    if is_modular(cls):
        return list(cls.prompt_blocks.embeddings)
    takes = inspect.signature(cls.__call__).parameters
    returns = [node.value for node in _nodes(cls.encode_prompt) if isinstance(node, ast.Return) and node.value]
    assigns = [node for node in _nodes(cls.__call__) if isinstance(node, ast.Assign)]
    targets = [node.targets[0] for node in assigns if "self.encode_prompt(" in ast.unparse(node.value)]
    candidates = []
    for node in (*returns[-1:], *targets):
        items = node.elts if isinstance(node, ast.Tuple) else [node]
        candidates.append([_root(item) for item in items])
    best = max(candidates or [[""]], key=lambda names: sum(name in takes for name in names))
    return ["prompt_embeds"] if len(best) == 1 and best[0] not in takes and "prompt_embeds" in takes else best


def _nodes(function: Any) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))))


def _root(node: ast.expr) -> str:
    """Returns the name at the root of `name.to(...)`, or of `name if ... else None`."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.IfExp):
            node = node.body
        elif isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return ""
    return node.id
