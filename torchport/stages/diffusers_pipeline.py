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
import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from torchport.config.card import TOKENS, Card, StageName
from torchport.errors import ArtefactForeignError, BadValueError, nearest
from torchport.stages import frames, picture
from torchport.stages.decoding import Decoding, part_of
from torchport.stages.family import ALWAYS, Call, Settings, Stage, Steps, check_noise
from torchport.stages.image import LATENTS, MOMENTS, Encoded, Encoding, moments_of
from torchport.stages.replay import GENERATOR, OTHER_LOOP, Finished, First, FirstStep, OtherNetwork, Replay, latents_of
from torchport.stages.stand_in import ComponentStandIn
from torchport.stages.upstream_pipeline import UpstreamPipeline, is_guided

ENCODE_USES = ("prompt", "negative_prompt", "guidance_scale", "dtypes")
IMAGE_USES = ("image", "height", "width", "frames", "vae_tiling", "call")
DENOISE_USES = ("seed", "height", "width", "frames", "steps", "guidance_scale", "dtypes", "call", "scheduler")
DECODE_USES = ("height", "width", "frames", "vae_tiling", "dtypes", "call")

ENCODER = ("encoder", "quant_conv")
DECODER = ("decoder", "post_quant_conv")
"""Modules of a VAE that it does not decode with, as diffusers' classes call them."""


def family(card: Card, place: str) -> ModuleType:
    """Returns the family of a card that has `family: diffusers`, as a module with the names that every family has."""
    module = ModuleType(__name__)
    assert card.call is not None  # `check_call`
    takes_image = False if card.call.image is None else ALWAYS
    names = {"STAGES": _stages(card, place), "TAKES_IMAGE": takes_image, "VARIANTS": (), "arrange_tiny": None}
    vars(module).update(names, batch=batch, __file__=__file__)
    return module


def batch(guidance_scale: float) -> int:
    """Returns how many conditions go through the network at once."""
    return 2 if guidance_scale != 1.0 else 1


def _stages(card: Card, place: str) -> tuple[Stage, ...]:
    assert card.pipeline is not None and card.call is not None  # `check_call`
    pipeline, networks = _Stages(card.pipeline, card.call, place), card.call.networks
    # The blocks of a modular pipeline that encode may ask its networks for their configurations.
    asked = networks if pipeline.has_blocks else ()
    encode = Stage("encode", pipeline.encode, ENCODE_USES, parts=tuple(card.call.encoders), meta=asked)
    encoding, on_host = [encode], "vae" in card.call.host
    if card.call.image is not None and on_host:
        parts, uses = (*encode.parts, "scheduler", "vae"), (*ENCODE_USES, *IMAGE_USES)
        encoding = [dataclasses.replace(encode, uses=uses, parts=parts, meta=networks)]
    elif card.call.image is not None:
        image_uses = (*IMAGE_USES, "dtypes")
        network: dict[str, Any] = {"network": "vae", "without": DECODER, "call": pipeline.image_encoded}
        encoding.append(
            Stage(
                "encode_image",
                pipeline.encode_image,
                image_uses,
                parts=("scheduler",),
                meta=networks,
                like=lambda parts, settings: {},
                **network,
            )
        )
    encoders = tuple(stage.name for stage in encoding)
    denoising: dict[str, Any] = {"parts": ("scheduler",), "like": pipeline.inputs_like}
    denoising["open_dims"] = {
        name: [dim for dim, size in enumerate(shape or ()) if size == TOKENS]
        for name, shape in card.call.shapes.items()
    }
    if card.call.lists:
        denoising["call"] = pipeline.stacked
    first, last = (
        {**denoising, "network": network, "meta": ("vae", *(other for other in networks if other != network))}
        for network in (networks[0], networks[-1])
    )
    denoise = [Stage("denoise", pipeline.denoise, DENOISE_USES, needs=encoders, **last)]
    if len(networks) == 2:
        # The noise and the seed's generator are among what the first one leaves. The image is drawn from anew.
        uses_second = tuple(name for name in DENOISE_USES if name != "seed" or card.call.image is not None)
        denoise = [
            Stage("denoise_first", pipeline.denoise_first, DENOISE_USES, needs=encoders, **first),
            Stage("denoise", pipeline.denoise, uses_second, needs=(*encoders, "denoise_first"), **last),
        ]
    decode = Stage("decode", pipeline.decode, DECODE_USES, needs=("denoise",), parts=("scheduler",), meta=networks)
    if on_host:
        return *encoding, *denoise, dataclasses.replace(decode, parts=("scheduler", "vae"))
    compiled: dict[str, Any] = {"network": "vae", "without": ENCODER, "outputs": frames.OUTPUTS}
    return (
        *encoding,
        *denoise,
        dataclasses.replace(decode, **compiled, call=pipeline.decoded, like=pipeline.latents_like),
    )


class _Stages(UpstreamPipeline):
    """The functions of the stages."""

    @property
    def network(self) -> str:
        """The network whose configuration and dtype the pipeline reads: the first."""
        return self.card.networks[0]

    def encode(self, parts: Mapping[str, Any], call: None, settings: Settings, steps: Steps) -> dict[str, torch.Tensor]:
        """Returns what `encode_prompt` returns, by the names under which the pipeline takes it, in the network's dtype.

        And what the VAE's `encode` returns, where the pipeline takes an image and the VAE is on the host.
        """
        encoders = {name: parts[name] for name in self.card.encoders}
        encoders |= self._asked(parts, settings) if self.has_blocks else {}
        values = list(self.encoded(encoders, settings))
        if len(values) != len(self.card.embeddings):
            fact = f"'{self.name}.encode_prompt' returns {len(values)} values, and 'embeddings' names"
            raise BadValueError(self.place, f"{fact} {len(self.card.embeddings)}", "Name each of them, in their order")
        wanted = self._embeddings(settings)
        if self.card.negative_apart:
            negative = dataclasses.replace(settings, prompt=settings.negative_prompt)
            values += self.encoded(encoders, negative) if is_guided(settings) else [None] * len(values)
        outputs = {name: value for name, value in zip(self.card.shapes, values, strict=True) if name in wanted}
        outputs = {name: value[0] if name in self.card.lists else value for name, value in outputs.items()}
        for name, value in outputs.items():
            self._check_dtype(name, value.dtype, settings)
        if self._image_stage == "encode":
            outputs |= self._moments(parts, settings, outputs, is_read=True)
        return outputs

    def _asked(self, parts: Mapping[str, Any], settings: Settings) -> dict[str, ComponentStandIn]:
        """Returns the networks that are here without weights, for code that asks for configuration and dtype."""
        return {name: ComponentStandIn(parts[name], settings.dtypes[name], None, None) for name in self.card.networks}

    @property
    def _image_stage(self) -> StageName | None:
        if self.card.image is None:
            return None
        return "encode" if "vae" in self.card.host else "encode_image"

    def encode_image(
        self, parts: Mapping[str, Any], call: Call, settings: Settings, steps: Steps
    ) -> dict[str, torch.Tensor]:
        """Returns what the VAE's `encode` returns of the image, by `image.MOMENTS`.

        Args:
            parts: The scheduler, and networks and VAE for their configurations.
            call: The VAE, called as `image_encoded`.
        """
        embeddings = self.embeddings_like(parts, settings)  # no image depends on them
        return self._moments(parts, settings, embeddings, call, is_read=settings.image is not None)

    def image_encoded(self, vae: torch.nn.Module, settings: Settings, **inputs: Any) -> torch.Tensor:
        """Returns the moments of what the VAE encodes: `call` of the stage."""
        return moments_of(vae, self.place, **inputs)

    def _moments(
        self,
        parts: Mapping[str, Any],
        settings: Settings,
        embeddings: Mapping[str, torch.Tensor],
        call: Call | None = None,
        *,
        is_read: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Returns what the VAE's `encode` returns to upstream's code before its first step, by `image.MOMENTS`.

        Args:
            embeddings: Of the prompts, or like them.
            call: The VAE as a network; None: it encodes on the host.
            is_read: Whether the image is the one that was named; otherwise it is blank.
        """
        dtype = settings.dtypes["vae"]  # upstream gives the image the embeddings' dtype
        loop = First(copy.deepcopy(parts["scheduler"]))
        if settings.vae_tiling:
            parts["vae"].enable_tiling()
        image = {str(self.card.image): picture.read(settings.image)} if is_read else {}
        vae = Encoding(parts["vae"], dtype, loop, self.place, call)
        embeddings = {name: v.to(dtype) if v.is_floating_point() else v for name, v in embeddings.items()}
        self._sample_of_first_step(parts, settings, embeddings, loop, vae, **image)
        if not vae.moments:
            fact = f"'{self.name}' takes an image, and does not call its VAE's 'encode' before its first step"
            raise BadValueError(self.place, fact, OTHER_LOOP)
        return vae.moments

    def _embeddings(self, settings: Settings) -> list[str]:
        guided = is_guided(settings)
        taken = [name for name, shape in self.card.shapes.items() if shape is not None]
        return [name for name in taken if guided or not name.startswith("negative_")]

    def inputs_like(self, parts: Mapping[str, Any], settings: Settings) -> dict[str, torch.Tensor]:
        """Returns tensors of the shapes that `encode` returns."""
        embeddings = self.embeddings_like(parts, settings)
        return embeddings | ({} if self.card.image is None else self._moments(parts, settings, embeddings))

    def embeddings_like(self, parts: Mapping[str, Any], settings: Settings) -> dict[str, torch.Tensor]:
        """Returns embeddings of the shapes and dtypes that `encode` returns."""
        config = parts[self.network].config
        sizes = {
            name: [self._size(size, config) for size in self.card.shapes[name] or ()]
            for name in self._embeddings(settings)
        }
        return {name: torch.zeros(size, dtype=self._dtype(name, settings)) for name, size in sizes.items()}

    def _dtype(self, name: str, settings: Settings) -> torch.dtype:
        """Returns the dtype of one of the embeddings, by the card: the network's where that says nothing."""
        by_name = self.card.dtypes.get(name, self.card.dtypes.get(name.removeprefix("negative_"), ""))
        own: torch.dtype | None = getattr(torch, by_name, None)
        return own or settings.dtypes[self.network]

    def _size(self, size: int | str, config: Mapping[str, Any]) -> int:
        if isinstance(size, int):
            return size
        if size == TOKENS:
            return self.card.tokens
        if not isinstance(config.get(size), int):
            fact = f"'{size}' is no number in the configuration of '{self.network}'"
            raise BadValueError(self.place, fact, nearest(size, config), name=size)
        return int(config[size])

    def _check_dtype(self, name: str, dtype: torch.dtype, settings: Settings) -> None:
        """Refuses whole numbers where the card names floating-point ones, and the other way round."""
        by_card = self._dtype(name, settings)
        if dtype == by_card or (dtype.is_floating_point and by_card.is_floating_point):
            return
        returned, named = (str(each).removeprefix("torch.") for each in (dtype, by_card))
        fact = f"'{self.name}.encode_prompt' returns '{name}' in {returned}, and the card says {named}"
        remedy = (
            f"Remove '{name}' from 'dtypes'" if dtype.is_floating_point else f"Write 'dtypes: {{{name}: {returned}}}'"
        )
        raise BadValueError(self.place, fact, remedy, name=name)

    def denoise(
        self, parts: Mapping[str, Any], call: Call, settings: Settings, steps: Steps, **inputs: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Returns the latents that upstream's loop ends with, around `call`.

        Args:
            parts: The scheduler, and network and VAE for their configurations.
            steps: Progress, saving and resuming.
            **inputs: What `encode` returned; and `noise`, where it is not to be drawn, in the pipeline's own layout.

        Returns:
            `latents`, in the layout and dtype of the pipeline's `output_type="latent"`; `generator`, the state of the
            seed's generator after them; and what it drew of the image.
        """
        replay = self._replay(parts, settings, steps)
        return self._denoised(parts, {self.card.networks[-1]: call}, settings, replay, **inputs)

    def denoise_first(
        self, parts: Mapping[str, Any], call: Call, settings: Settings, steps: Steps, **inputs: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Returns what the second network's stage goes on from; see `denoise` for what comes in.

        Returns:
            The state after the last step of the first network, and `done`, how many steps there were.
        """
        first, second = self.card.networks
        replay = self._replay(parts, settings, steps, leaves=True)
        try:
            self._denoised(parts, {first: call}, settings, replay, **inputs)
        except OtherNetwork:
            replay.finish()
            if replay.number:
                return {**replay.state, "done": torch.tensor(replay.number)}
        fact = f"{settings.steps} steps of '{self.name}' leave none to '{first if not replay.number else second}'"
        raise BadValueError("'steps'", fact, f"Take more, so that both '{first}' and '{second}' have some")

    def _replay(self, parts: Mapping[str, Any], settings: Settings, steps: Steps, leaves: bool = False) -> Replay:
        generator = torch.Generator().manual_seed(settings.seed)
        return Replay(parts["scheduler"], generator, steps, self.name, settings.steps, leaves)

    def _denoised(
        self,
        parts: Mapping[str, Any],
        calls: Mapping[str, Call],
        settings: Settings,
        replay: Replay,
        noise: torch.Tensor | None = None,
        **inputs: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Returns the latents that upstream's loop ends with; see `denoise`. It draws noise where none is given."""
        moments = {name: inputs.pop(name) for name in sorted(inputs) if name.startswith(MOMENTS)}
        # They may have been encoded for another dtype of the network's. Masks stay what they are.
        embeddings = {n: v.to(self._dtype(n, settings)) if v.is_floating_point() else v for n, v in inputs.items()}
        missing = [name for name in self._embeddings(settings) if name not in inputs]
        if missing:
            fact = f"It lacks '{missing[0]}', and the guidance scale is {settings.guidance_scale}"
            remedy = "Run --stage encode with this model and guidance scale"
            raise ArtefactForeignError("encode.safetensors", fact, remedy, name=missing[0])
        if noise is not None:
            drawn, _ = self._drawn(parts, settings, embeddings, moments, str(self._image_stage))
            check_noise(noise, tuple(drawn.shape[1:]))
            noise = noise.to(drawn.dtype)
        vae = Encoded(parts["vae"], settings.dtypes["vae"], replay, moments, str(self._image_stage))
        run = functools.partial(self.called, parts, settings, embeddings, replay, calls, vae)
        latents = run(is_latent=True, latents=noise)
        last = latents_of(replay.state)
        is_other = last is not None and last.shape != latents.shape  # the pipeline turned them round after its loop
        if last is not None and (is_other or vae.is_blank):
            latents = last
        return {"latents": latents, GENERATOR: replay.state[GENERATOR], **vae.drawn}

    def _drawn(
        self,
        parts: Mapping[str, Any],
        settings: Settings,
        embeddings: Mapping[str, torch.Tensor],
        image: Mapping[str, torch.Tensor],
        stage: str,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns the latents that upstream's loop begins with, and what it draws of the image by `image.LATENTS`."""
        loop = First(copy.deepcopy(parts["scheduler"]))
        vae = Encoded(parts["vae"], settings.dtypes["vae"], loop, image, stage)
        return self._sample_of_first_step(parts, settings, embeddings, loop, vae), vae.drawn

    def _sample_of_first_step(
        self,
        parts: Mapping[str, Any],
        settings: Settings,
        embeddings: Mapping[str, torch.Tensor],
        loop: First,
        vae: ComponentStandIn,
        **arguments: Any,
    ) -> torch.Tensor:
        """Returns the latents in upstream's loop at its first step, where it is left."""
        try:
            self.called(parts, settings, embeddings, loop, {}, vae, is_latent=True, **arguments)
        except FirstStep as reached:
            return reached.sample
        raise BadValueError(self.place, f"'{self.name}' never calls its scheduler's 'step'", OTHER_LOOP)

    def latents_like(self, parts: Mapping[str, Any], settings: Settings) -> dict[str, torch.Tensor]:
        """Returns tensors of the shapes and dtypes that `denoise` returns."""
        embeddings, moments = self.embeddings_like(parts, settings), {}
        if self.card.image is not None:
            with torch.device("meta"):  # `decode` has no encoder
                whole = type(parts["vae"]).from_config(parts["vae"].config).to(settings.dtypes["vae"])
            moments = self._moments({**parts, "vae": whole}, settings, embeddings)
        drawn, image = self._drawn(parts, settings, embeddings, moments, str(self._image_stage))
        return {"latents": drawn, GENERATOR: torch.Generator().get_state(), **image}

    def decode(
        self, parts: Mapping[str, Any], call: Call | None, settings: Settings, steps: Steps, **inputs: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Returns the frames that upstream makes of latents after its loop, which is replayed to its end.

        Args:
            parts: The VAE, the scheduler, and the network for its configuration.
            call: The VAE, called as `decoded`; None: it runs on the host, in upstream's own code.
            steps: Progress.
            **inputs: `latents` and what else `denoise` returned; or `latents_BCTHW` of a hand-written port.

        Returns:
            `frames` [1, F, 3, height, width], bytes.
        """
        if settings.vae_tiling:
            parts["vae"].enable_tiling()
        embeddings = self.embeddings_like(parts, settings)
        image = {name: value for name, value in inputs.items() if name.startswith(LATENTS)}
        latents = inputs.get("latents")
        if latents is None:
            drawn, _ = self._drawn(parts, settings, embeddings, image, "denoise")
            latents = self._of_hand_written(inputs["latents_BCTHW"], drawn.shape).to(drawn.dtype)
        replay = Finished(parts["scheduler"], latents, inputs.get(GENERATOR))
        dtype = settings.dtypes["vae"]
        progress = iter(steps.track(range(1), done=0, total=1))
        if call is None:
            next(progress, None)
            vae = Encoded(parts["vae"], dtype, replay, image, "denoise")
            video = self.called(parts, settings, embeddings, replay, {}, vae, is_latent=False)
            pixels = frames.pixels(self.checked_frames(video, settings))
        else:
            noted = Decoding(parts["vae"], dtype, replay, image, self.name, self.place)
            result = self.called(parts, settings, embeddings, replay, {}, noted, is_latent=False)
            next(progress, None)
            pixels = call(**noted.inputs_of(result))
        next(progress, None)
        return {"frames": frames.checked(*pixels)}

    def stacked(self, network: torch.nn.Module, settings: Settings, **inputs: Any) -> torch.Tensor:
        """Returns the outputs of a network for lists, which it may return as a list, as one tensor: `call`."""
        outputs = network(**inputs)[0]
        return outputs if isinstance(outputs, torch.Tensor) else torch.stack(outputs)

    def decoded(
        self, vae: torch.nn.Module, settings: Settings, picked: str = "", **inputs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what `frames.pixels` makes of the video that upstream's VAE decodes: `call` of the stage."""
        video = part_of(vae.decode(**inputs, return_dict=False)[0], picked)  # type: ignore[operator]
        return frames.pixels(self.post_processed(vae, video, settings))

    def _of_hand_written(self, latents_BCTHW: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Returns the latents of a hand-written port as the pipeline has them."""
        rule = self.card.hand_written
        if rule is None:
            fact = f"Its latents are [B, C, T, H, W], and the card does not say how '{self.name}' has them"
            remedy = f"Run --stage denoise with this model, or add 'hand_written' at {self.place}"
            raise ArtefactForeignError("stage2_latents.safetensors", fact, remedy)
        latents, time = latents_BCTHW.permute(["BCTHW".index(dim) for dim in rule.order]), rule.order.index("T")
        missing = shape[time] - latents.shape[time] if len(shape) == len(rule.order) else 0
        if 0 < missing <= rule.leading:  # upstream removes these frames unseen
            first = latents.narrow(time, 0, 1)
            latents = torch.cat([*[torch.zeros_like(first)] * missing, latents], dim=time)
        return latents
