"""A modular pipeline of diffusers, as a pipeline with `encode_prompt` and a `__call__` of its own.

Some of diffusers' models have blocks (`ModularPipelineBlocks`) alone. Those that run for a prompt are in a row: they
encode the prompt, prepare the loop, are the loop, and decode. Here they get the two methods that every other pipeline
of diffusers has, so that one kind of card, of replay and of trial is for both.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchport.errors import BadValueError

_GUIDER, _SCALE = "guider", "guidance_scale"
"""The component that computes guidance, and its argument for the scale."""
_FIELDS = "denoiser_input_fields"
"""Upstream's mark of embeddings that the loop takes without naming each."""


def is_modular(cls: Any) -> bool:
    """Returns whether a class is one of diffusers' modular pipelines."""
    return isinstance(cls, type) and getattr(cls, "default_blocks_name", None) is not None


@functools.cache
def as_pipeline(cls: Any) -> Any:
    """Returns a subclass of a modular pipeline with the methods of other pipelines; any other class as it is."""
    if not is_modular(cls) or issubclass(cls, _Pipeline):
        return cls
    blocks = PromptBlocks(cls)
    parameters = {"__init__": blocks.components, "__call__": blocks.arguments, "encode_prompt": blocks.texts}
    methods = {name: _with_signature(getattr(_Pipeline, name), each) for name, each in parameters.items()}
    return type(cls.__name__, (_Pipeline, cls), {"__module__": cls.__module__, "prompt_blocks": blocks, **methods})


def _with_signature(method: Any, parameters: Sequence[inspect.Parameter]) -> Any:
    """Returns a method that has these parameters and passes them to `method` by keyword: callers inspect signatures."""
    signature = inspect.Signature([_parameter("self"), *parameters])

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        return method(**signature.bind(*args, **kwargs).arguments)

    called.__signature__ = signature  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters if each.annotation is not each.empty}
    return called


_parameter = functools.partial(inspect.Parameter, kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _ends(cls: Any, blocks: Sequence[Any]) -> tuple[int, int]:
    """Returns the counts of blocks up to the end of text encoding and of the loop; refuses another order."""
    from diffusers.modular_pipelines.modular_pipeline import LoopSequentialPipelineBlocks

    loops, encoders = [], []
    for number, block in enumerate(blocks, 1):
        modules = [str(getattr(spec.type_hint, "__module__", "")) for spec in block.expected_components]
        if isinstance(block, LoopSequentialPipelineBlocks):
            loops.append(number)
        if any(module.startswith("transformers.") for module in modules):  # a text encoder, tokenizer or processor
            encoders.append(number)
    if not loops or not encoders or encoders[-1] >= loops[0]:
        fact = f"The blocks of '{cls.__name__}' do not encode a prompt and then run a loop"
        raise BadValueError(f"diffusers:{cls.__name__}", fact, "Write a family with a loop for it: docs/families.md")
    return encoders[-1], loops[-1]


class PromptBlocks:
    """The blocks of a modular pipeline that run for a prompt, in their order."""

    def __init__(self, cls: Any) -> None:
        """Divides the blocks of a class at the end of its text encoding, and at the end of its loop."""
        import diffusers
        from diffusers import SequentialPipelineBlocks

        self.blocks = getattr(diffusers, cls.default_blocks_name)().get_execution_blocks(prompt="")
        blocks, sequence = list(self.blocks.sub_blocks.items()), SequentialPipelineBlocks.from_blocks_dict
        encoded, denoised = _ends(cls, [block for _, block in blocks])
        #: The blocks that encode the prompt.
        self.encode = sequence(dict(blocks[:encoded]))
        #: The blocks from the embeddings to the latents of the last step.
        self.denoise = sequence(dict(blocks[encoded:denoised]))
        #: The blocks from the embeddings to the picture or video.
        self.rest = sequence(dict(blocks[encoded:]))
        #: The name of the picture or video in upstream's state.
        self.output = blocks[-1][1].intermediate_outputs[-1].name
        taken, results = {each.name for each in self.rest.inputs}, self.encode.intermediate_outputs
        #: The names of what `encode_prompt` returns.
        self.embeddings = [each.name for each in results if each.name in taken or each.kwargs_type == _FIELDS]
        #: Upstream's mark of each input, by its name.
        self.marks = {each.name: each.kwargs_type for each in (*results, *self.rest.inputs)}
        specs, inputs = self.blocks.expected_components, {each.name: each.default for each in self.blocks.inputs}
        loaded = [each for each in specs if each.default_creation_method == "from_pretrained"]
        #: The constructor's parameters: components; and plain values, which the type of None marks as no components.
        self.components = [
            *(_parameter(each.name, annotation=each.type_hint) for each in loaded),
            *(
                _parameter(each.name, default=each.default, annotation=type(None))
                for each in self.blocks.expected_configs
            ),
        ]
        # A guider that upstream has switched off computes no guidance, whatever the scale.
        guiders = [each.config or {} for each in specs if each.name == _GUIDER]
        scales = [config[_SCALE] for config in guiders if config.get("enabled", True) and _SCALE in config]
        names = dict.fromkeys(name for name in (*inputs, *self.embeddings) if name and name != _SCALE)
        #: The parameters of `__call__`.
        self.arguments = [_parameter(name, default=inputs.get(name)) for name in names]
        self.arguments += [_parameter(_SCALE, default=scale) for scale in scales]
        self.arguments += [_parameter("return_dict", default=True)]
        #: The parameters of `encode_prompt`.
        self.texts = [_parameter(each.name, default=each.default) for each in self.encode.inputs if each.name]
        self.texts += [_parameter("do_classifier_free_guidance", default=True) for _ in scales]


class _Pipeline:
    """The methods of a modular pipeline's subclass."""

    prompt_blocks: PromptBlocks

    def __init__(self, **arguments: Any) -> None:
        """Builds the pipeline around its components, and registers them and the plain values with upstream."""
        super().__init__(blocks=self.prompt_blocks.blocks)  # type: ignore[call-arg]
        configs = self.prompt_blocks.blocks.expected_configs  # values of the constructor that are no components
        values = {config.name: arguments.pop(config.name, config.default) for config in configs}
        # Upstream's class has these methods.
        pipeline: Any = self
        pipeline.register_components(**arguments)
        pipeline.register_to_config(**values)

    def encode_prompt(self, do_classifier_free_guidance: bool = True, **texts: Any) -> tuple[Any, ...]:
        """Returns the embeddings of a prompt, in the order of `PromptBlocks.embeddings`."""
        if not do_classifier_free_guidance and hasattr(self, _GUIDER):
            getattr(self, _GUIDER).guidance_scale = 1.0  # switches guidance off
        state = self._state_after(self.prompt_blocks.encode, texts)
        return tuple(state.get(name) for name in self.prompt_blocks.embeddings)

    def __call__(self, return_dict: bool = True, guidance_scale: float | None = None, **values: Any) -> tuple[Any]:
        """Returns the picture or video; with `output_type="latent"` the latents after the last step."""
        if guidance_scale is not None and hasattr(self, _GUIDER):
            getattr(self, _GUIDER).guidance_scale = guidance_scale
        if values.get("prompt") is not None:
            texts = {each.name: values[each.name] for each in self.prompt_blocks.texts if each.name in values}
            values |= dict(zip(self.prompt_blocks.embeddings, self.encode_prompt(**texts), strict=True))
        is_latent = values.get("output_type") == "latent"
        state = self._state_after(self.prompt_blocks.denoise if is_latent else self.prompt_blocks.rest, values)
        return (state.get("latents" if is_latent else self.prompt_blocks.output),)

    def _state_after(self, blocks: Any, values: Mapping[str, Any]) -> Any:
        """Runs blocks on values by name, over the blocks' defaults; returns upstream's state afterwards."""
        from diffusers.modular_pipelines.modular_pipeline import PipelineState

        state = PipelineState()
        for each in blocks.inputs:
            if each.name:
                state.set(each.name, each.default, each.kwargs_type)
        for name, value in values.items():
            state.set(name, value, self.prompt_blocks.marks.get(name))
        # Upstream logs a traceback for each block around an exception, which is reported anyway.
        logger = logging.getLogger("diffusers.modular_pipelines.modular_pipeline")
        was_disabled, logger.disabled = logger.disabled, True
        try:
            with torch.no_grad():
                _, state = blocks(self, state)
        finally:
            logger.disabled = was_disabled
        return state

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes the components, and the `model_index.json` that pipelines of both kinds read."""
        index: dict[str, Any] = {"_class_name": type(self).__name__}
        plain = {each.name for each in self.prompt_blocks.blocks.expected_configs}
        for name in (each.name for each in self.prompt_blocks.components if each.name not in plain):
            component = getattr(self, name)
            component.save_pretrained(Path(folder) / name)
            index[name] = [type(component).__module__.partition(".")[0], type(component).__name__]
        (Path(folder) / "model_index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
