"""`family: diffusers`: the stages of any model that a pipeline of diffusers runs, made from its card.

Upstream's own `__call__` runs, with its network, its VAE and its scheduler replaced by what is needed of them. The
mechanism is *replay*: the loop always begins at its start. For a step that is done the network is not called, and
`scheduler.step` returns what is known already. So a stopped run goes on after any step, and decoding passes through the
whole loop with the finished latents to upstream's code after it.

A loop that calls a second network after the first has a stage for each, so that one is on the devices at a time: the
first leaves the loop where it calls the other network, and the second goes on as a stopped run does.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from torchport.config.card import TOKENS, Card, StageName
from torchport.errors import ArtefactForeignError, BadValueError, nearest
from torchport.save import tree
from torchport.stages import frames, picture
from torchport.stages.beside import KEPT
from torchport.stages.decoding import PostponedVae, part_of, processor_of
from torchport.stages.family import ALWAYS, Call, Parts, Settings, Stage, Steps, Tensors, check_noise
from torchport.stages.image_latents import LATENTS, MOMENTS, EncodedVae, EncodingVae, moments_of
from torchport.stages.replay import GENERATOR, OTHER_LOOP, Finished, First, LoopLeft, Replay, all_latents
from torchport.stages.stand_in import ComponentStandIn
from torchport.stages.upstream_pipeline import PipelineInputs, UpstreamPipeline

ENCODE_USES = ("prompt", "negative_prompt", "guidance_scale", "dtypes")
IMAGE_USES = ("image", "height", "width", "frames", "vae_tiling", "call")
DENOISE_USES = ("seed", "height", "width", "frames", "steps", "guidance_scale", "dtypes", "call", "scheduler")
DECODE_USES = ("height", "width", "frames", "vae_tiling", "dtypes", "call")
BEFORE_USES = ("height", "width", "frames", "call")

SOUND_LATENTS = "sound_latents"
SOUND = "sound"
RATE = "sound_rate"
"""What `denoise` and `decode` return of a pipeline's sound: [1, ...]; [channels, samples], from -1 to 1; and the number
of samples a second."""

ENCODER = ("encoder", "quant_conv")
DECODER = ("decoder", "post_quant_conv")
"""Modules of a VAE that only encode, and that only decode, as diffusers' classes call them."""


def family(card: Card, place: str) -> ModuleType:
    """Returns the family of a card that has `family: diffusers`, as a module with the names that every family has."""
    module = ModuleType(__name__)
    assert card.call is not None  # `check_call` has refused a card without it
    takes_image = False if card.call.image is None else ALWAYS
    names = {"STAGES": _stages(card, place), "TAKES_IMAGE": takes_image, "VARIANTS": (), "arrange_tiny": None}
    vars(module).update(names, batch=batch, __file__=__file__)
    return module


def batch(guidance_scale: float) -> int:
    """Returns how many conditions go through the network at once: the prompt, and with guidance the negative one."""
    return 2 if guidance_scale != 1.0 else 1


def _stages(card: Card, place: str) -> tuple[Stage, ...]:
    """Returns the stages of a card's pipeline in their order: encoding, denoising and `decode`."""
    assert card.pipeline is not None and card.call is not None  # `check_call` has refused a card without them
    pipeline = _Stages(card.pipeline, card.call, place, card.text_encoders if card.call.answers else ())
    encoding = _encoding(pipeline)
    parts, uses = ("scheduler", *pipeline.sound_parts), (*DECODE_USES, *pipeline.frame_rate)
    decode = Stage("decode", pipeline.decode, uses, needs=("denoise",), parts=parts)
    if "vae" in card.call.host:
        decode = dataclasses.replace(decode, parts=(*parts, "vae"))
    else:
        compiled: dict[str, Any] = {"network": "vae", "without": ENCODER, "outputs": frames.OUTPUTS}
        decode = dataclasses.replace(decode, **compiled, call=pipeline.decoded, like=pipeline.latents_like)
    denoising = _denoising(pipeline, tuple(stage.name for stage in encoding))
    return *encoding, *denoising, _in_pipeline(decode, pipeline)


def _in_pipeline(stage: Stage, pipeline: _Stages) -> Stage:
    """Returns a stage that calls the pipeline, with all components that the pipeline needs: most without weights."""
    names = (*pipeline.card.networks, "vae", *pipeline.called_before, *pipeline.sound_parts, *pipeline.text_encoders)
    meta = tuple(name for name in names if name not in (*stage.parts, stage.network))
    return dataclasses.replace(stage, parts=(*stage.parts, *pipeline.processors), meta=meta)


def _encoding(pipeline: _Stages) -> list[Stage]:
    """Returns the stages before denoising: `encode`, and `encode_image` for a VAE on the devices."""
    card = pipeline.card
    on_host = "vae" in card.host
    # Beside `encode_prompt`, `encode` may run the pipeline up to its first step: for the image, or other components.
    encodes_image = card.encodes_video and on_host
    calls_others = bool(pipeline.called_before) or card.answers
    reads_image = encodes_image or (calls_others and card.image is not None)
    image_uses = tuple(name for name in IMAGE_USES if name != "image" or card.image is not None)
    parts = [*card.encoders]
    uses = [*ENCODE_USES]
    if calls_others or encodes_image:
        parts += [*pipeline.called_before, "scheduler"]
    if encodes_image:
        parts.append("vae")
    if calls_others:
        uses += BEFORE_USES
    if reads_image:
        uses += image_uses
    encode = Stage("encode", pipeline.encode, tuple(dict.fromkeys(uses)), parts=tuple(parts))
    if calls_others or encodes_image or pipeline.asks or card.guider:
        encode = _in_pipeline(encode, pipeline)
    if not card.encodes_video or on_host:
        return [encode]
    compiled: dict[str, Any] = {"network": "vae", "without": DECODER, "call": pipeline.image_encoded}
    image_uses = (*image_uses, "dtypes")
    like: dict[str, Any] = {"like": lambda parts, settings: {}, "parts": ("scheduler",)}  # it has no inputs
    encode_image = Stage("encode_image", pipeline.encode_image, image_uses, **compiled, **like)
    return [encode, _in_pipeline(encode_image, pipeline)]


def _denoising(pipeline: _Stages, encoders: tuple[StageName, ...]) -> list[Stage]:
    """Returns the stages that take steps: one for each network."""
    card = pipeline.card
    networks = card.networks
    shapes = {name: shape or () for name, shape in card.shapes.items()}
    token_dims = {name: [dim for dim, size in enumerate(shape) if size == TOKENS] for name, shape in shapes.items()}
    shared: dict[str, Any] = {
        "parts": ("scheduler",),
        "like": pipeline.inputs_like,
        # What components of `before` return may have tokens in any dim but the batch; none has more than 8 dims.
        "open_dims": {**token_dims, KEPT: range(1, 8) if any(token_dims.values()) else ()},
        "call": pipeline.stacked if card.lists else None,
        "outputs": ("video", SOUND) if pipeline.sound_parts else (),
    }
    uses = (*DENOISE_USES, *pipeline.frame_rate, *(("guider",) if card.guider else ()))
    denoise = Stage("denoise", pipeline.denoise, uses, needs=encoders, network=networks[-1], **shared)
    if len(networks) == 1:
        return [_in_pipeline(denoise, pipeline)]
    first = Stage("denoise_first", pipeline.denoise_first, uses, needs=encoders, network=networks[0], **shared)
    # The first stage passes on the noise and the seed's generator. The seed then decides an image's latents alone.
    uses = tuple(name for name in uses if name != "seed" or card.encodes_video)
    denoise = dataclasses.replace(denoise, uses=uses, needs=(*encoders, first.name))
    return [_in_pipeline(first, pipeline), _in_pipeline(denoise, pipeline)]


class _Stages(UpstreamPipeline):
    """The verbs of the stages, such as `encode`, around upstream's pipeline."""

    def encode(self, parts: Parts, call: None, settings: Settings, steps: Steps) -> Tensors:
        """Returns the prompts' embeddings by the names of the pipeline's arguments, in the dtypes of `encode_prompt`.

        With them come the moments of an image, if the VAE is on the host; and what components of `before` return.
        """
        encoders = {name: parts[name] for name in self.card.encoders}
        if self.asks:  # upstream reads their configurations and dtypes
            names = (*self.card.networks, "vae")
            encoders |= {name: ComponentStandIn(parts[name], settings.dtypes[name]) for name in names}
        encoders |= self.without_weights(parts, settings)
        if self.card.answers:
            calls = self._encoded_in_call(parts, encoders, settings)
        else:
            prompts = [settings.prompt]
            if self.card.negative_apart and self.is_guided(settings):
                prompts.append(settings.negative_prompt)
            calls = [self.encoded(encoders, dataclasses.replace(settings, prompt=prompt)) for prompt in prompts]
        embeddings = self._embeddings(calls, settings)
        outputs = dict(embeddings)
        if self.card.encodes_video and self.image_stage == "encode":
            outputs |= self._moments(parts, settings, embeddings, image=self._image(settings))
        if self.called_before:
            outputs |= self._before(parts, settings, embeddings, image=self._image(settings))
        return outputs

    def _embeddings(self, calls: list[tuple[Any, ...]], settings: Settings) -> dict[str, Any]:
        """Returns the values of all calls of `encode_prompt` by name; refuses too few or too many, and wrong dtypes."""
        for call in calls:
            if len(call) != len(self.card.embeddings):
                fact = f"'{self.name}.encode_prompt' returns {len(call)} values, and 'embeddings' names"
                remedy = "Name each of them, in their order"
                raise BadValueError(self.place, f"{fact} {len(self.card.embeddings)}", remedy)
        values = [value for call in calls for value in call]
        by_name = dict(zip(self.card.shapes, values, strict=False))  # with no guidance there are fewer values
        embeddings: dict[str, Any] = {name: by_name.get(name) for name in self._embedding_names(settings)}
        embeddings = {name: value[0] if name in self.card.lists else value for name, value in embeddings.items()}
        absent = [name for name, value in embeddings.items() if value is None]
        embeddings |= {name: self._mask_of_ones(name, embeddings, settings) for name in absent}
        for name, value in embeddings.items():
            dtype, by_card = value.dtype, self._dtype(name, settings)
            if dtype != by_card and not (dtype.is_floating_point and by_card.is_floating_point):
                returned, named = (str(each).removeprefix("torch.") for each in (dtype, by_card))
                fact = f"'{self.name}.encode_prompt' returns '{name}' in {returned}, and the card says {named}"
                remove, write = f"Remove '{name}' from 'dtypes'", f"Write 'dtypes: {{{name}: {returned}}}'"
                raise BadValueError(self.place, fact, remove if dtype.is_floating_point else write, name=name)
        return embeddings

    def _mask_of_ones(self, name: str, embeddings: Mapping[str, Any], settings: Settings) -> torch.Tensor:
        """Returns a mask of ones in place of None: `encode_prompt` leaves out a mask that masks nothing.

        Refuses None for an embedding that is no mask, and for a mask whose sizes no other embedding tells. All of a
        prompt's embeddings have the same number of tokens (`TOKENS`).
        """
        shapes, is_negative = self.card.shapes, name.startswith("negative_")
        token_counts = []
        for other, value in embeddings.items():
            if value is not None and other.startswith("negative_") == is_negative:
                token_counts += [n for n, size in zip(value.shape, shapes[other] or (), strict=False) if size == TOKENS]
        sizes = [token_counts[0] if size == TOKENS and token_counts else size for size in shapes[name] or ()]
        numbers = [size for size in sizes if isinstance(size, int)]
        if "mask" not in name or len(numbers) < len(sizes):
            fact = f"'{self.name}.encode_prompt' returns None as '{name}', and the card says that it has a shape"
            raise BadValueError(self.place, fact, "Write null for it in 'embeddings'", name=name)
        return torch.ones(numbers, dtype=self._dtype(name, settings))

    def _encoded_in_call(self, parts: Parts, encoders: Parts, settings: Settings) -> list[tuple[Any, ...]]:
        """Returns the values of each call of `encode_prompt` that the pipeline's call makes before its first step.
        Refuses another number of calls than the card says, and None or a value where the card says otherwise.
        """
        encoded: list[tuple[Any, ...]] = []
        vae = EncodingVae(parts["vae"], settings.dtypes["vae"], self.place)
        others, image = {**self.others(parts, settings), **encoders}, self._image(settings)
        # Only `encoded` is wanted, to which the call appends. It takes prompts, so there are no embeddings to pass.
        self._first_latents(parts, settings, {}, vae, others, arguments=image, encoded=encoded)
        expected = 2 if self.card.negative_apart and self.is_guided(settings) else 1
        if len(encoded) != expected:
            fact = f"'{self.name}' calls 'encode_prompt' {len(encoded)} times, and the card says {expected}"
            raise BadValueError(self.place, fact, "Set 'negative_apart', or remove it")
        wanted = self._embedding_names(settings)
        pairs = [pair for call in encoded for pair in zip(self.card.embeddings, call, strict=False)]
        for name, value in pairs:
            has_shape = name in wanted if value is None else self.card.embeddings[name] is not None
            if has_shape is (value is None):
                fact = f"'{self.name}.encode_prompt' returns a {type(value).__name__} as '{name}'"
                raise BadValueError(self.place, fact, "Write its shape in 'embeddings', or null for None", name=name)
        return encoded

    def _before(self, parts: Parts, settings: Settings, embeddings: Tensors, image: Parts) -> Tensors:
        """Returns what the components in the card's `before` return, as named tensors; zeros if those are on meta.

        See `_moments` for the arguments.
        """
        others = self.others(parts, settings)
        vae = EncodingVae(parts["vae"], settings.dtypes["vae"], self.place)
        encoders = {name: parts[name] for name in self.card.encoders if name in parts}
        self._first_latents(parts, settings, embeddings, vae, {**encoders, **others}, arguments=image)
        tensors = tree.packed({name: others[name].returned for name in self.called_before})
        return {f"{KEPT}.{name}": tensor for name, tensor in tensors.items()}

    def encode_image(self, parts: Parts, call: Call, settings: Settings, steps: Steps) -> Tensors:
        """Returns the moments that `call`, the VAE, encodes the image as: `image_moments_0` and so on."""
        embeddings = self.embeddings_like(parts, settings)  # zeros suffice: no image depends on embeddings
        return self._moments(parts, settings, embeddings, self._image(settings), call)

    def image_encoded(self, vae: torch.nn.Module, settings: Settings, **inputs: Any) -> torch.Tensor:
        """Returns the moments that the VAE encodes an image as: `Stage.call` of `encode_image`."""
        return moments_of(vae, self.place, **inputs)

    def _moments(
        self, parts: Parts, settings: Settings, embeddings: Tensors, image: Parts, call: Call | None = None
    ) -> Tensors:
        """Returns the moments that the pipeline gets from its VAE before its first step, `image_moments_0` and so on.

        Args:
            embeddings: Of the prompts, or zeros of their shapes.
            image: The pipeline's argument with the image; empty in a rehearsal, where the pipeline gets a blank image.
            call: The VAE as a compiled network; None: the VAE encodes on the host.
        """
        dtype = settings.dtypes["vae"]  # upstream gives the image the embeddings' dtype
        if settings.vae_tiling:
            parts["vae"].enable_tiling()
        vae = EncodingVae(parts["vae"], dtype, self.place, call)
        embeddings = {name: v.to(dtype) if v.is_floating_point() else v for name, v in embeddings.items()}
        self._first_latents(parts, settings, embeddings, vae, self.others(parts, settings), arguments=image)
        if not vae.moments:
            fact = f"'{self.name}' does not call its VAE's 'encode' before its first step"
            raise BadValueError(self.place, fact, OTHER_LOOP)
        return vae.moments

    def _image(self, settings: Settings) -> dict[str, Any]:
        """Returns the image under the name of the pipeline's argument for it; an empty dict where no image is given.

        Refuses an image of another shape than the job's, by more than 1 %, where the pipeline takes no size.
        """
        name = self.card.image
        file = settings.image
        if name is None or file is None:
            return {}
        image = picture.read(file, settings.frames if self.card.edits else None)
        takes_any_shape = self.takes_size or self.card.edits
        if not takes_any_shape and abs(image.width * settings.height / (image.height * settings.width) - 1) > 0.01:
            fact = f"It is {image.width} x {image.height}, and '{self.name}' makes a video of its shape"
            remedy = f"Crop it to the shape of the job's {settings.width} x {settings.height}, or set height and width"
            raise BadValueError(f"--image {file}", fact, remedy)
        return {name: image}

    def _embedding_names(self, settings: Settings) -> list[str]:
        """Returns the names of the embeddings that a run passes; without guidance none begins with `negative_`."""
        is_guided = self.is_guided(settings)
        taken = [name for name, shape in self.card.shapes.items() if shape is not None]
        return [name for name in taken if is_guided or not name.startswith("negative_")]

    def inputs_like(self, parts: Parts, settings: Settings) -> Tensors:
        """Returns tensors of the shapes that `encode` and `encode_image` return."""
        embeddings = self.embeddings_like(parts, settings)
        moments = self._moments(parts, settings, embeddings, image={}) if self.card.encodes_video else {}
        before = self._before(parts, settings, embeddings, image={}) if self.called_before else {}
        return embeddings | moments | before

    def embeddings_like(self, parts: Parts, settings: Settings) -> Tensors:
        """Returns embeddings of the shapes and dtypes that `encode` returns."""
        result = {}
        for name in self._embedding_names(settings):
            sizes = [self._size(size, parts) for size in self.card.shapes[name] or ()]
            dtype = self._dtype(name, settings)
            result[name] = torch.zeros(sizes, dtype=dtype)
            if len(sizes) == 1 and not dtype.is_floating_point:  # where each prompt ends among all tokens
                result[name] = torch.linspace(0, self.card.tokens, *sizes).to(dtype)
        return result

    def _dtype(self, name: str, settings: Settings) -> torch.dtype:
        """Returns the dtype of an embedding: the card's, or the network's where the card names none."""
        dtypes = self.card.dtypes
        by_card = dtypes.get(name, dtypes.get(name.removeprefix("negative_")))
        dtype: torch.dtype = settings.dtypes[self.network] if by_card is None else getattr(torch, by_card)
        return dtype

    def _size(self, size: int | str, parts: Parts) -> int:
        """Returns the number that a size in the card's `embeddings` stands for.

        `tokens` is the card's number of tokens. `in_channels*vae.scale` is the network's `in_channels` times the VAE's
        `scale`, as their configurations have them.
        """
        if isinstance(size, int):
            return size
        if size == TOKENS:
            return self.card.tokens
        numbers = []
        for path in size.split("*"):
            prefix, _, key = path.rpartition(".")
            component = prefix or self.network
            if component not in parts:
                fact = f"'{path}' is a number of '{component}', which the stage does not have"
                raise BadValueError(self.place, fact, nearest(component, parts), name=key)
            config = getattr(parts[component], "config", {})
            number = config.get(key)
            if not isinstance(number, int):
                fact = f"'{key}' is no number in the configuration of '{component}'"
                raise BadValueError(self.place, fact, nearest(key, config), name=key)
            numbers.append(number)
        return math.prod(numbers)

    def denoise(self, parts: Parts, call: Call, settings: Settings, steps: Steps, **inputs: torch.Tensor) -> Tensors:
        """Returns the latents that upstream's loop ends with; the loop calls `call` as its network.

        Args:
            parts: The scheduler, and network and VAE for their configurations.
            steps: Progress, saving and resuming.
            **inputs: What `encode` returned; and `noise` in the pipeline's own layout, which is drawn if absent.

        Returns:
            `latents`, in the layout and dtype of the pipeline's loop, and `sound_latents` of a pipeline that makes
            sound; `generator`, the state of the seed's generator after the last step; and the image's latents.
        """
        replay = Replay(parts["scheduler"], settings, steps, self.name, self.latents)
        return self._denoised(parts, {self.card.networks[-1]: call}, settings, replay, **inputs)

    def denoise_first(
        self, parts: Parts, call: Call, settings: Settings, steps: Steps, **inputs: torch.Tensor
    ) -> Tensors:
        """Returns the loop's state where the second network takes over; see `denoise` for the arguments.

        Returns:
            The state after the last step of the first network, and `done`, how many steps there were.
        """
        first, second = self.card.networks
        replay = Replay(parts["scheduler"], settings, steps, self.name, self.latents, leaves=True)
        try:
            self._denoised(parts, {first: call}, settings, replay, **inputs)
        except LoopLeft:
            replay.finish()
            if replay.number:
                return {**replay.state, "done": torch.tensor(replay.number)}
        idle = second if replay.number else first  # the network that would take no step
        fact = f"{settings.steps} steps of '{self.name}' leave none to '{idle}'"
        raise BadValueError("'steps'", fact, f"Take more, so that both '{first}' and '{second}' have some")

    def _denoised(
        self, parts: Parts, calls: Mapping[str, Call], settings: Settings, replay: Replay, **inputs: torch.Tensor
    ) -> Tensors:
        """Returns the latents that upstream's loop ends with; see `denoise`."""
        noise = inputs.pop("noise", None)
        moments = {name: inputs.pop(name) for name in sorted(inputs) if name.startswith(MOMENTS)}
        before = {name: inputs.pop(name) for name in sorted(inputs) if name.startswith(f"{KEPT}.")}
        # They may have been encoded for another dtype of the network's. Masks stay what they are.
        embeddings = {n: v.to(self._dtype(n, settings)) if v.is_floating_point() else v for n, v in inputs.items()}
        missing = [name for name in self._embedding_names(settings) if name not in inputs]
        if missing:
            fact = f"It lacks '{missing[0]}', and the guidance scale is {settings.guidance_scale}"
            remedy = "Run --stage encode with this model and guidance scale"
            raise ArtefactForeignError("encode.safetensors", fact, remedy, name=missing[0])
        arguments: dict[str, Any] = {}
        if noise is not None:
            [expected, *_], _ = self._starting_latents(parts, settings, embeddings, moments, self.image_stage)
            check_noise(noise, tuple(expected.shape[1:]))
            arguments = {"latents": noise.to(expected.dtype)}
        vae = EncodedVae(parts["vae"], settings.dtypes["vae"], moments, self.image_stage)
        others = self.others(parts, settings, before)
        self.called(PipelineInputs(parts, settings, embeddings, replay, vae, others, calls, arguments=arguments))
        # The loop's latents, not the call's: the pipeline may change them after its loop, and `decode` runs that code.
        latents = dict(zip(("latents", SOUND_LATENTS), all_latents(replay.state), strict=False))
        return {**latents, GENERATOR: replay.state[GENERATOR], **vae.drawn}

    def _starting_latents(
        self, parts: Parts, settings: Settings, embeddings: Tensors, image: Tensors, stage: str
    ) -> tuple[list[torch.Tensor], Tensors]:
        """Returns the latents that upstream's loop begins with, and the image's latents, `image_latents_0` and so on.
        `image` has the image's moments or latents, which `stage` kept.
        """
        vae = EncodedVae(parts["vae"], settings.dtypes["vae"], image, stage)
        latents = self._first_latents(parts, settings, embeddings, vae, self.others(parts, settings))
        return latents, vae.drawn

    def _first_latents(
        self, parts: Parts, settings: Settings, embeddings: Tensors, vae: ComponentStandIn, others: Parts, **fields: Any
    ) -> list[torch.Tensor]:
        """Returns the latents at the first step of upstream's loop: the pipeline runs up to there, and is left. Further
        `fields` are those of `PipelineInputs`.
        """
        loop = First(copy.deepcopy(parts["scheduler"]), self.latents)
        try:
            self.called(PipelineInputs(parts, settings, embeddings, loop, vae, others, **fields))
        except LoopLeft:
            return loop.samples
        raise BadValueError(self.place, f"'{self.name}' never calls its scheduler's 'step'", OTHER_LOOP)

    def latents_like(self, parts: Parts, settings: Settings) -> Tensors:
        """Returns tensors of the shapes and dtypes that `denoise` returns."""
        embeddings, moments = self.embeddings_like(parts, settings), {}
        if self.card.encodes_video:
            with torch.device("meta"):  # the VAE in `parts` has no encoder: `decode` removes it
                whole = type(parts["vae"]).from_config(parts["vae"].config).to(settings.dtypes["vae"])
            moments = self._moments({**parts, "vae": whole}, settings, embeddings, image={})
        first, image_latents = self._starting_latents(parts, settings, embeddings, moments, self.image_stage)
        latents = dict(zip(("latents", SOUND_LATENTS), first, strict=False))
        return {**latents, GENERATOR: torch.Generator().get_state(), **image_latents}

    def decode(
        self, parts: Parts, call: Call | None, settings: Settings, steps: Steps, **inputs: torch.Tensor
    ) -> Tensors:
        """Returns the frames that upstream makes of finished latents: its loop is replayed without a network's call.

        Args:
            parts: The VAE, the scheduler, and the network for its configuration.
            call: The VAE as a compiled network, through `decoded`; None: upstream's code calls the VAE on the host.
            steps: Progress.
            **inputs: `latents` and what else `denoise` returned; or `latents_BCTHW` of a hand-written port.

        Returns:
            `frames` [1, F, 3, height, width], bytes; and `sound` [channels, samples], float32, with `sound_rate`.
        """
        if settings.vae_tiling:
            parts["vae"].enable_tiling()
        embeddings = self.embeddings_like(parts, settings)
        image_latents = {name: value for name, value in inputs.items() if name.startswith(LATENTS)}
        latents = inputs.get("latents")
        if latents is None:
            [expected, *_], _ = self._starting_latents(parts, settings, embeddings, image_latents, "denoise")
            latents = self._from_hand_written(inputs["latents_BCTHW"], expected.shape).to(expected.dtype)
        finished = {"latents": latents}
        if self.card.sound is not None:
            if SOUND_LATENTS not in inputs:
                fact, remedy = f"It lacks '{SOUND_LATENTS}'", "Run --stage denoise with this model"
                raise ArtefactForeignError("denoise.safetensors", fact, remedy, name=SOUND_LATENTS)
            finished[SOUND_LATENTS] = inputs[SOUND_LATENTS]
        replay = Finished(parts["scheduler"], finished, inputs.get(GENERATOR))
        others = self.others(parts, settings)
        for name in self.sound_parts:  # in a plan they have no values, and their stand-ins return silence
            if not any(weight.is_meta for weight in parts[name].parameters()):
                others[name] = parts[name]
        dtype = settings.dtypes["vae"]
        progress = iter(steps.track(range(1), done=0, total=1))  # the first `next` shows a bar, the second fills it
        if call is None:  # upstream's code decodes on the host
            next(progress, None)
            vae = EncodedVae(parts["vae"], dtype, image_latents, "denoise")
            given = PipelineInputs(parts, settings, embeddings, replay, vae, others, is_latent=False)
            video, *sound = self.called(given)
            pixels = frames.pixels(self.checked_frames(video, settings))
        else:  # upstream's code passes the latents to a VAE that only notes them; then the program decodes
            postponed = PostponedVae(parts["vae"], dtype, image_latents, self.name, self.place)
            given = PipelineInputs(parts, settings, embeddings, replay, postponed, others, is_latent=False)
            result, *sound = self.called(given)
            next(progress, None)
            pixels = call(**postponed.inputs_of(result))
        next(progress, None)
        return {"frames": frames.checked(*pixels), **self._sound(parts, sound)}

    def _sound(self, parts: Parts, sounds: list[torch.Tensor]) -> Tensors:
        """Returns the sound that a pipeline made, with its rate, by name; an empty dict if the pipeline makes none."""
        if self.card.sound is None:
            return {}
        [sound] = sounds
        name, _, key = self.card.sound.rate.partition(".")
        rate = getattr(parts.get(name), "config", {}).get(key)
        if not isinstance(rate, int):
            fact = f"'{self.card.sound.rate}' is no number in a configuration"
            remedy = "Write 'sound: {rate: COMPONENT.KEY}' with a component of its 'parts'"
            raise BadValueError(self.place, fact, remedy)
        if sound.ndim != 3 or sound.shape[0] != 1 or sound.shape[1] not in (1, 2):
            fact = f"'{self.name}' returns sound {list(sound.shape)}, and not [1, channels, samples] of 1 or 2 channels"
            raise BadValueError(self.place, fact, OTHER_LOOP)
        return {SOUND: sound[0].float().clamp(-1, 1), RATE: torch.tensor(rate)}

    def stacked(self, network: torch.nn.Module, settings: Settings, **inputs: Any) -> torch.Tensor:
        """Returns a network's outputs as one tensor, where the network may return a list of them: `Stage.call`."""
        outputs = network(**inputs)[0]
        return outputs if isinstance(outputs, torch.Tensor) else torch.stack(outputs)

    def decoded(
        self, vae: torch.nn.Module, settings: Settings, picked: str = "", **inputs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the decoded and post-processed video as `frames.pixels` does, in bytes: `Stage.call` of `decode`."""
        video = part_of(vae.decode(**inputs, return_dict=False)[0], picked)  # type: ignore[operator]
        processor = processor_of(self.built({"vae": vae}))
        postprocess = processor.postprocess_video if video.ndim == 5 else processor.postprocess
        return frames.pixels(self.checked_frames(postprocess(video, output_type="pt"), settings))

    def _from_hand_written(self, latents_BCTHW: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Returns latents from the stage file of a port without torchport, in the pipeline's layout and shape. The
        pipeline's latents may have more frames at the beginning; those become zeros.
        """
        layout = self.card.hand_written
        if layout is None:
            fact = f"Its latents are [B, C, T, H, W], and the card does not say how '{self.name}' has them"
            remedy = f"Run --stage denoise with this model, or add 'hand_written' at {self.place}"
            raise ArtefactForeignError("stage2_latents.safetensors", fact, remedy)
        latents = latents_BCTHW.permute(["BCTHW".index(dim) for dim in layout.order])
        time = layout.order.index("T")
        missing = shape[time] - latents.shape[time] if len(shape) == len(layout.order) else 0
        if 0 < missing <= layout.leading:  # any values do: upstream drops these frames before it decodes
            first = latents.narrow(time, 0, 1)
            latents = torch.cat([*[torch.zeros_like(first)] * missing, latents], dim=time)
        return latents
