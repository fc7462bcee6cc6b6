"""The components of a pipeline of diffusers: their classes, and small numbers for each class's arguments."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import itertools
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from torchport.config.card import TinyTokenizer
from torchport.errors import BadValueError, UnknownNameError, nearest
from torchport.load import tiny
from torchport.load.foreign import brief, line_of, refusals
from torchport.load.modular import as_pipeline, is_modular
from torchport.porting.draft.model import Argument, is_rotary, shares, tiny_arguments
from torchport.source.bindings import STARRED

Kind = Literal["network", "encoder", "tokenizer", "scheduler", "other"]

HEADS, HEAD_SIZE = 8, 24
"""The heads of a tiny network, which divide over 8 devices, and their dims, which divide into three rotary axes."""
_WIDTHS = (96, 80, 112)
"""Widths of tiny text encoders. No other number of a tiny network is one of them: a trial tells them apart."""
LARGEST = 100_000_000
"""The most parameters that a component of a trial may have."""
_STAND_FOR = {
    "PreTrainedModel": "transformers:Qwen3Model",
    "PreTrainedTokenizerBase": "transformers:GemmaTokenizer",
    "BaseGuidance": "diffusers:ClassifierFreeGuidance",
    "KarrasDiffusionSchedulers": "diffusers:EulerDiscreteScheduler",
    "SchedulerMixin": "diffusers:FlowMatchEulerDiscreteScheduler",
}
"""By the name of a base class that pipelines annotate a component with, the class that is built for it."""
_NEEDED_PARTS = ("transformer", "unet", "text_encoder", "tokenizer", "vae")
"""Components that a run is not without, though a pipeline's constructor may be."""


@dataclasses.dataclass(frozen=True)
class PipelinePart:
    name: str  #: An argument of the pipeline's constructor.
    cls: Any
    kind: Kind
    others: tuple[Any, ...] = ()  #: Classes that it may have as well, by its annotation.

    @property
    def class_path(self) -> str:
        """`package:Class`, as a card writes it."""
        package = self.cls.__module__.partition(".")[0]
        is_exported = getattr(importlib.import_module(package), self.cls.__name__, None) is self.cls
        return f"{package if is_exported else self.cls.__module__}:{self.cls.__name__}"


def pipeline_class(name: str) -> Any:
    """Returns the pipeline class of diffusers with the name `diffusers:MochiPipeline`, or raises if it is not there."""
    import diffusers
    from diffusers import DiffusionPipeline

    short = name.partition(":")[2]
    cls = getattr(diffusers, short, None) if short.isidentifier() else None
    _check_packages(cls, f"'{short}' of diffusers", f"--model {name}")
    cls = as_pipeline(cls)
    is_plain = isinstance(cls, type) and issubclass(cls, DiffusionPipeline) and cls is not DiffusionPipeline
    if not is_plain and not is_modular(cls):
        bases = (DiffusionPipeline.__name__, "ModularPipeline")
        pipelines = [other for other in dir(diffusers) if other.endswith("Pipeline") and other not in bases]
        names = [other for other in pipelines if ("Modular" in other) == ("Modular" in short)]
        fact = f"diffusers {diffusers.__version__} has no pipeline '{short}'"
        if cls is not None:
            fact = f"'{short}' of diffusers is no pipeline with a loop of its own"
        raise UnknownNameError(f"--model {name}", fact, nearest(short, names), name=short)
    return cls


_DISTRIBUTIONS = {"onnx": "onnxruntime", "opencv": "opencv-python"}
"""What to install for packages that diffusers calls otherwise."""


def _check_packages(cls: Any, what: str, place: str) -> None:
    # Where a package is absent, upstream has a stand-in for the class, with the packages that it needs in `_backends`.
    needed = list(getattr(cls, "_backends", ()))
    if not needed and hasattr(cls, "get_attributes") and "video_processor" in cls.get_attributes():  # of transformers
        needed = ["torchvision"]
    absent = [package for package in needed if importlib.util.find_spec(package) is None]
    if absent:
        fact = f"{what} needs {' and '.join(absent)}, not installed here"
        raise BadValueError(place, fact, f"pip install {' '.join(_DISTRIBUTIONS.get(name, name) for name in absent)}")


def parts_of(cls: Any, place: str) -> list[PipelinePart]:
    """Returns the required components of a pipeline, in its constructor's order; raises if a class is unknown."""
    hints = typing.get_type_hints(cls.__init__)
    result = []
    for parameter in list(inspect.signature(cls.__init__).parameters.values())[1:]:
        is_optional = parameter.default is None and parameter.name not in _NEEDED_PARTS
        is_optional |= parameter.name in absent_parts(cls)
        classes = [hint for hint in _alternatives(hints.get(parameter.name, Any)) if isinstance(hint, type)]
        is_plain = classes and all(kind in (bool, int, float, str, type(None)) for kind in classes)
        if is_optional or is_plain:
            continue
        built = [kind for kind in map(_class_to_build, classes) if kind is not type(None)]
        if not built:
            fact = f"'{cls.__name__}' does not say of which class its component '{parameter.name}' is"
            raise BadValueError(place, fact, "Write a card for it: docs/cards.md")
        result.append(PipelinePart(parameter.name, built[0], _kind(built[0]), tuple(built[1:])))
    parts = [_with_tokenizer(part, result) for part in result]
    for part in parts:
        _check_packages(part.cls, f"'{part.name}' of '{cls.__name__}'", place)
    return parts


def absent_parts(cls: Any) -> dict[str, None]:
    """Returns, as `{"image_encoder": None}`, the components without a default that a pipeline lists as optional."""
    parameters = inspect.signature(cls.__init__).parameters.values()
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    optional = [name for name in required if name in getattr(cls, "_optional_components", ())]
    return {name: None for name in optional if not name.startswith(_NEEDED_PARTS)}


def plain_arguments(cls: Any) -> dict[str, Any]:
    """Returns arguments of a pipeline's constructor that are no components, with their defaults."""
    hints = typing.get_type_hints(cls.__init__)
    plain = (bool, int, float, str)
    result = {}
    for name, parameter in inspect.signature(cls.__init__).parameters.items():
        is_plain = any(kind in plain for kind in _alternatives(hints.get(name, Any)))
        if is_plain and type(parameter.default) in (*plain, type(None)):
            result[name] = parameter.default
    return result


def _with_tokenizer(part: PipelinePart, parts: Sequence[PipelinePart]) -> PipelinePart:
    """Returns a part with the class that its tokenizer or processor has in the end. `AutoTokenizer` and `AutoProcessor`
    become the class that belongs to the text encoder. A processor of texts and images that a pipeline takes as its
    `image_processor` becomes its image processor. Other parts are returned as they are.
    """
    import transformers
    from transformers import AutoProcessor, AutoTokenizer, ProcessorMixin
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    if part.name == "image_processor" and issubclass(part.cls, ProcessorMixin):
        return PipelinePart(part.name, tiny.processor_classes(part.cls)[part.name], "other")
    if part.cls not in (AutoTokenizer, AutoProcessor):
        return part
    name = part.name.replace("tokenizer", "text_encoder")
    encoders = {other.name: other for other in parts if other.kind == "encoder"}
    encoder = encoders.get(name) or next(iter(encoders.values()), None)
    model_type = None if encoder is None else encoder.cls.config_class.model_type
    if part.cls is AutoProcessor and model_type in PROCESSOR_MAPPING_NAMES:
        cls = getattr(transformers, PROCESSOR_MAPPING_NAMES[model_type])
    else:
        cls = tiny.tokenizer_class(AutoTokenizer, model_type)
    return PipelinePart(part.name, cls, "tokenizer")


def _alternatives(hint: Any) -> Sequence[Any]:
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if is_union else [hint]


def _class_to_build(cls: Any) -> Any:
    """Returns the class to build where a pipeline names `cls`, which may only be a base such as `T5PreTrainedModel`."""
    path = _STAND_FOR.get(cls.__name__)
    if path is None and cls.__name__.endswith("PreTrainedModel"):
        path = f"transformers:{cls.__name__.removesuffix('PreTrainedModel')}Model"
    if path is None:
        return cls
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _kind(cls: Any) -> Kind:
    """Returns what a class is, by its base class: a network, scheduler, encoder, tokenizer or other component."""
    from diffusers import ModelMixin, SchedulerMixin
    from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

    tokenizers = (PreTrainedTokenizerBase, ProcessorMixin, AutoTokenizer, AutoProcessor)
    kinds: dict[Kind, Any] = {"network": ModelMixin, "scheduler": SchedulerMixin}
    kinds |= {"encoder": PreTrainedModel, "tokenizer": tokenizers}
    return next((kind for kind, bases in kinds.items() if issubclass(cls, bases)), "other")


def _small_numbers(parts: Sequence[PipelinePart]) -> dict[str, dict[str, Any]]:
    """Returns tiny arguments, chosen by their names, for each component with weights; a trial shows if they agree."""
    widths = itertools.cycle(_WIDTHS)
    result: dict[str, dict[str, Any]] = {}
    for part in parts:
        if part.kind == "encoder":
            result[part.name] = _encoder_arguments(part.cls, next(widths))
        elif part.kind == "network":
            result[part.name] = _network_arguments(part.cls)
    pooled = result.get("text_encoder_2", {}).get("projection_dim")
    for values in result.values():
        if pooled and "addition_embed_type_num_heads" in values:  # it embeds six sizes of the picture, and pooled text
            numbers = {"addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 6 * 8 + pooled}
            values |= {"addition_embed_type": "text_time", **numbers}
    return result


def arguments(cls: Any) -> list[Argument]:
    """Returns the arguments of a class's constructor; for a class of transformers, of its configuration's."""
    if getattr(cls, "config_class", None) is not None:
        return [Argument(name, value) for name, value in cls.config_class().to_dict().items() if name[0] != "_"]
    result = []
    for parameter in list(inspect.signature(cls.__init__).parameters.values())[1:]:
        if parameter.kind not in STARRED:
            is_required = parameter.default is parameter.empty
            result.append(Argument(parameter.name, None if is_required else parameter.default, is_required))
    return result


_HEAD_COUNT = re.compile(r"(audio_)?(num_attention_heads|num_heads|n_heads)")
_HEAD_SIZE_NAME = re.compile(r"(audio_)?(attention_head_dim|head_dim|dim_head)")
_NEEDED = {
    "patch_size": 2,
    "latent_channels": 16,
    "block_out_channels": (128, 128, 128, 128),
    "layers_per_block": 1,
    "spatial_compression_ratio": 8,
    "sample_size": 16,
}
"""Small numbers for arguments without a default."""
_SIDE = 64
"""Pixels of a side of the output, for networks with an argument for that."""


def _network_arguments(cls: Any) -> dict[str, Any]:
    """Returns tiny arguments for a network of diffusers: heads, widths, rotary dims, channels and levels."""
    known = {argument.name: argument.default for argument in arguments(cls)}  # None, too, for one without a default
    values, lacking = tiny_arguments(arguments(cls))
    heads = [name for name, value in known.items() if type(value) is int and _HEAD_COUNT.fullmatch(name)]
    values |= dict.fromkeys(heads, HEADS)
    if heads:
        values |= {name: HEAD_SIZE for name in known if _HEAD_SIZE_NAME.fullmatch(name)}
    # The 4 heads of a part that takes the text have the text's width in total; captions have the text's width, too.
    sizes = [name for name in known if name.endswith("_attention_head_dim") and not _HEAD_SIZE_NAME.fullmatch(name)]
    with_heads = [name for name in sizes if name.replace("attention_head_dim", "num_attention_heads") in known]
    values |= dict.fromkeys(with_heads, _WIDTHS[0] // 4)
    if type(known.get("caption_channels")) is int:
        values["caption_channels"] = _WIDTHS[0]
    rotary = {name: shares(value, HEAD_SIZE) for name, value in known.items() if is_rotary(name, value)}
    values |= rotary
    has_size = any(_HEAD_SIZE_NAME.fullmatch(name) for name in known)
    if rotary and not has_size and (heads or not any("head" in name for name in known)):  # heads share its width
        values |= {name: HEADS * HEAD_SIZE for name in known if name in ("dim", "model_dim", "hidden_size")}
    empty = {name for name, default in known.items() if default is None}
    optional = {"sample_size", "patch_size"} if heads else {"sample_size"}
    values |= {name: number for name, number in _NEEDED.items() if name in lacking or name in optional & empty}
    if "in_channels" in empty:  # colours of a VAE; a trial makes others what the latents have
        channels = 3 if "latent_channels" in known else 16
        values |= {name: channels for name in ("in_channels", "out_channels") if name in empty}
    if type(known.get("target_size")) is int:
        values |= {"target_size": _SIDE}
    for name, value in known.items():  # lists of the layers that have some part, by number
        if name.endswith("_layers") and isinstance(value, list | tuple) and value and value[0] == 0:
            values[name] = [0, 1]
    values |= _four_levels(known) | _compression_ratios(known)
    factors = {"shift_factor": 0.125, "scaling_factor": 0.5}  # pipelines compute latents with them
    values |= {name: number for name, number in factors.items() if name in empty}
    return values


def _compression_ratios(known: Mapping[str, Any]) -> dict[str, int]:
    """Returns by how much a VAE compresses space and time, where its class's defaults are None: its patches times 2 for
    each level that halves the dim. Levels that halve space twice and time once, with patches of 2 and 1, give
    `{"spatial_compression_ratio": 8, "temporal_compression_ratio": 2}`.
    """
    kinds = known.get("downsample_type", ())
    if not kinds or not set(kinds) <= {"spatial", "temporal", "spatiotemporal"}:
        return {}
    result = {}
    for dim, patch in (("spatial", "patch_size"), ("temporal", "patch_size_t")):
        name = f"{dim}_compression_ratio"
        if name in known and known[name] is None:
            halvings = sum(kind in (dim, "spatiotemporal") for kind in kinds)
            result[name] = known[patch] * 2**halvings
    return result


def _four_levels(known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns four levels for a network whose class has a single level by default: published networks have four."""
    lists = {name: value for name, value in known.items() if name.endswith(("_block_types", "_out_channels"))}
    if not lists or any(not isinstance(value, tuple | list) or len(value) != 1 for value in lists.values()):
        return {}
    return {name: [32] * 4 if name.endswith("channels") else list(value) * 4 for name, value in lists.items()}


def _encoder_arguments(cls: Any, width: int) -> dict[str, Any]:
    """Returns tiny arguments for a text encoder of a given `width`; a nested configuration is a dictionary in them."""
    values = _encoder_numbers(arguments(cls), width) | _rotary_axes(cls.config_class, width)
    nested_classes = getattr(cls.config_class, "sub_configs", {})
    for name, nested in cls.config_class().to_dict().items():
        if (name.endswith("_config") or name in nested_classes) and isinstance(nested, dict):
            kept = {"model_type": nested["model_type"]} if "model_type" in nested else {}
            numbers = _encoder_numbers([Argument(key, nested[key]) for key in nested if key[0] != "_"], width)
            values[name] = kept | numbers | _rotary_axes(nested_classes.get(name), width)
    return values


def _rotary_axes(config: Any, width: int) -> dict[str, Any]:
    """Returns how the rotary axes of a vision model share a head's dims, as `rope_parameters`; empty without axes.
    Encoders have 4 heads of `width // 4` dims, and rotary sections count pairs of dims.
    """
    if "mrope_section" not in getattr(config, "ignore_keys_at_rope_validation", ()):
        return {}
    return {"rope_parameters": {**(config().rope_parameters or {}), "mrope_section": shares([2, 3, 3], width // 8)}}


def _encoder_numbers(known: Sequence[Argument], width: int) -> dict[str, Any]:
    """Returns tiny values for the known arguments of an encoder: widths, heads and rotary sections fit `width`."""
    values, _ = tiny_arguments(known)
    names = {argument.name for argument in known}
    wide = ("d_model", "hidden_size", "projection_dim", "embed_dim", "out_hidden_size")
    values |= {name: width for name in wide if name in names}
    values |= {name: 4 for name in ("num_heads", "num_attention_heads", "num_key_value_heads") if name in names}
    values |= {name: width // 4 for name in ("d_kv", "head_dim") if name in names}
    for argument in known:
        if isinstance(argument.default, dict) and "mrope_section" in argument.default:  # rotary axes of a vision model
            sections = shares(argument.default["mrope_section"], width // 8)
            values[argument.name] = {**argument.default, "mrope_section": sections}
    return values | ({"pad_token_id": 0} if "pad_token_id" in names and "vocab_size" in names else {})


def _tokenizer_of(cls: Any, *, is_long: bool) -> TinyTokenizer | None:
    """Returns the settings by which a tiny tokenizer of a class is trained; None for a class without a vocabulary.
    Raises if the class needs files. If `is_long`, long instructions come before the prompts: a larger vocabulary makes
    fewer tokens of them.
    """
    tokenizer_class = tiny.tokenizer_class(cls)
    try:
        blank = tokenizer_class()
        if tiny.is_processor(cls):
            tiny.processor(cls, blank)  # only to see whether it can be made without files
    except refusals() as error:
        line = line_of(error)
        fact = f"A {cls.__name__} cannot be made without files: {brief(error)}{f' ({line})' if line else ''}"
        raise BadValueError("tiny.tokenizers", fact, "Write a card for it: docs/cards.md") from error
    if not hasattr(blank, "_tokenizer"):  # the library's own tokenizer, which feature extractors lack
        return None
    return TinyTokenizer(
        eos_token=str(blank.eos_token or "</s>"),
        pad_token=str(blank.pad_token or "<pad>"),
        model_max_length=77 if "CLIP" in cls.__name__ else None,
        vocab_size=512 if is_long else TinyTokenizer().vocab_size,
    )


TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{% endfor %}"
)
"""The chat template of tiny tokenizers, for pipelines that apply a chat template."""
LONGEST = 256
"""The `model_max_length` of tiny tokenizers, for pipelines that read it; most tiny tokenizers have none."""


class Configurations:
    """Small configurations of a pipeline's components, which a trial mends."""

    def __init__(self, parts: Sequence[PipelinePart]) -> None:
        """Chooses small numbers for each component, and gives encoders the ids of their processors' special tokens."""
        self.parts = {part.name: part for part in parts}
        self.values = _small_numbers(parts)  #: The arguments of each component with weights, by name.
        #: Arguments that a trial has set, by component: those that agree with another component.
        self.mended: dict[str, list[str]] = {}
        tokenizers = [part for part in parts if part.kind == "tokenizer"]
        is_long = any(tiny.is_processor(part.cls) for part in tokenizers)
        self.tokenizers = {part.name: _tokenizer_of(part.cls, is_long=is_long) for part in tokenizers}
        # Encoders know the ids of the tokens by which a processor marks images and videos in a text.
        for name, spec in self.tokenizers.items():
            ids = vars(self.built(name)) if spec is not None else {}
            ids = {key: value for key, value in ids.items() if key.endswith("_token_id") and isinstance(value, int)}
            for part in parts:
                if ids and part.kind == "encoder":
                    known = {argument.name for argument in arguments(part.cls)}
                    self.values[part.name] |= {key: value for key, value in ids.items() if key in known}

    def built(self, component: str) -> Any:
        """Returns a component: a tiny tokenizer, a module with random weights of seed 0, or another object. Raises
        ValueError if it has more parameters than a tiny one may have.
        """
        if component in self.values:
            count = sum(weight.numel() for weight in self.on_meta(component, changes={}).parameters())
            if count > LARGEST:
                raise ValueError(f"The tiny '{component}' has {count:,} parameters")
        tokenizer = self.tokenizers.get(component)
        if tokenizer is not None:
            return tiny.tokenizer(self.parts[component].cls, tokenizer, component)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            built = self._of_class(component, self.values.get(component, {}))
        if isinstance(built, torch.nn.Module):
            tiny.randomise(built, 0, component, 1.0)
            built.eval()
        return built

    def on_meta(self, component: str, changes: Mapping[str, Any]) -> torch.nn.Module:
        """Returns a component on the meta device, with `changes` of its arguments."""
        with torch.device("meta"):
            module: torch.nn.Module = self._of_class(component, {**self.values[component], **changes})
        return module

    def _of_class(self, component: str, values: Mapping[str, Any]) -> Any:
        cls = self.parts[component].cls
        config = getattr(cls, "config_class", None)
        return cls(**values) if config is None else cls(config(**values))

    def give(self, field: str, value: Any) -> bool:
        """Sets a field, such as `chat_template`, of all tokenizers that lack it; returns whether any tokenizer did."""
        lacking = {name: spec for name, spec in self.tokenizers.items() if spec and getattr(spec, field) is None}
        self.tokenizers |= {name: spec.model_copy(update={field: value}) for name, spec in lacking.items()}
        return bool(lacking)

    def choose(self, component: str, cls: Any) -> None:
        """Takes another class for a component, and new small numbers for it."""
        part = self.parts[component]
        others = tuple(other for other in part.others if other is not cls)
        self.parts[component] = dataclasses.replace(part, cls=cls, others=others)
        self.values[component] = _network_arguments(cls)

    def all_values(self, component: str) -> dict[str, Any]:
        """Returns the arguments of a component: its own values, and the class's defaults of the others."""
        known = {argument.name: argument.default for argument in arguments(self.parts[component].cls)}
        return {**known, **self.values.get(component, {})}
