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
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import torch

from torchport.config.card import Card, PipelineCall
from torchport.errors import ArtefactForeignError, BadValueError, nearest
from torchport.foreign import tokenizing
from torchport.stages.family import Call, Settings, Stage, Steps, check_noise
from torchport.stages.replay import OTHER_LOOP, Finished, First, FirstStep, Loop, OtherNetwork, Replay
from torchport.stages.stand_in import StandIn

CPU = torch.device("cpu")
ENCODE_USES = ("prompt", "negative_prompt", "guidance_scale", "dtypes")
DENOISE_USES = ("seed", "height", "width", "frames", "steps", "guidance_scale", "dtypes")
DECODE_USES = ("height", "width", "frames", "vae_tiling", "dtypes")


def family(card: Card, place: str) -> ModuleType:
    """Returns the family of a card that has `family: diffusers`, as a module with the names that every family has.

    Args:
        card: The model card, which has `pipeline` and `call`.
        place: Where `call` is written, for errors.
    """
    module = ModuleType(__name__)
    assert card.call is not None  # `check_call`
    names = {"STAGES": _stages(card, place), "TAKES_IMAGE": False, "VARIANTS": (), "arrange_tiny": None}
    vars(module).update(names, batch=functools.partial(batch, card.call), __file__=__file__)
    return module


def batch(call: PipelineCall, guidance_scale: float) -> int:
    """Returns how many conditions go through the network at once."""
    return 2 if call.batches_guidance and _is_guided(guidance_scale) else 1


def _is_guided(guidance_scale: float) -> bool:
    return guidance_scale != 1.0


def _stages(card: Card, place: str) -> tuple[Stage, ...]:
    assert card.pipeline is not None and card.call is not None  # `check_call`
    pipeline, networks = _Pipeline(card.pipeline, card.call, place), card.call.networks
    denoising: dict[str, Any] = {"parts": ("scheduler",), "like": pipeline.embeddings_like}
    first, last = (
        {**denoising, "network": network, "meta": ("vae", *(other for other in networks if other != network))}
        for network in (networks[0], networks[-1])
    )
    denoise = [Stage("denoise", pipeline.denoise, DENOISE_USES, needs=("encode",), **last)]
    if len(networks) == 2:
        uses = tuple(name for name in DENOISE_USES if name != "seed")  # its state is among what the first one leaves
        denoise = [
            Stage("denoise_first", pipeline.denoise_first, DENOISE_USES, needs=("encode",), **first),
            Stage("denoise", pipeline.denoise, uses, needs=("encode", "denoise_first"), **last),
        ]
    return (
        Stage("encode", pipeline.encode, ENCODE_USES, parts=tuple(card.call.encoders)),
        *denoise,
        Stage("decode", pipeline.decode, DECODE_USES, needs=("denoise",), parts=("scheduler", "vae"), meta=networks),
    )


@dataclasses.dataclass(frozen=True)
class _Pipeline:
    """A pipeline of diffusers, called as a card says.

    Attributes:
        class_path: `package.module:Class`.
        card: The card's section `call`.
        place: Where that is written.
    """

    class_path: str
    card: PipelineCall
    place: str

    @property
    def name(self) -> str:
        return self.class_path.partition(":")[2]

    @property
    def network(self) -> str:
        """The network whose configuration and dtype the pipeline reads: the first."""
        return self.card.networks[0]

    def encode(self, parts: Mapping[str, Any], call: None, settings: Settings, steps: Steps) -> dict[str, torch.Tensor]:
        """Returns what `encode_prompt` returns, by the names under which the pipeline takes it, in the network's dtype.

        Raises:
            BadValueError: It returns more or fewer values than the card names.
        """
        pipe = self._built(parts)
        arguments = {
            "prompt": settings.prompt,
            "negative_prompt": settings.negative_prompt,
            "do_classifier_free_guidance": _is_guided(settings.guidance_scale),
            "device": CPU,
            "dtype": settings.dtypes[self.network],
            **self.card.encode,
        }
        self._check_takes("encode_prompt", pipe.encode_prompt, arguments)
        with torch.no_grad(), tokenizing(self.name):
            values = pipe.encode_prompt(**arguments)
        if len(values) != len(self.card.embeddings):
            fact = f"'{self.name}.encode_prompt' returns {len(values)} values, and 'embeddings' names"
            raise BadValueError(self.place, f"{fact} {len(self.card.embeddings)}", "Name each of them, in their order")
        wanted = self._embeddings(settings)
        return {name: value for name, value in zip(self.card.embeddings, values, strict=True) if name in wanted}

    def _embeddings(self, settings: Settings) -> list[str]:
        guided = _is_guided(settings.guidance_scale)
        return [name for name in self.card.embeddings if guided or not name.startswith("negative_")]

    def embeddings_like(
        self, parts: Mapping[str, Any], settings: Settings, of: str | None = None
    ) -> dict[str, torch.Tensor]:
        """Returns embeddings of the shapes that `encode` returns, in the dtype of a component: the network's."""
        config, dtype = parts[self.network].config, settings.dtypes[of or self.network]
        return {
            name: torch.zeros([self._size(size, config) for size in self.card.embeddings[name]], dtype=dtype)
            for name in self._embeddings(settings)
        }

    def _size(self, size: int | str, config: Mapping[str, Any]) -> int:
        if isinstance(size, int):
            return size
        if not isinstance(config.get(size), int):
            fact = f"'{size}' is no number in the configuration of '{self.network}'"
            raise BadValueError(self.place, fact, nearest(size, config), name=size)
        return int(config[size])

    def denoise(
        self, parts: Mapping[str, Any], call: Call, settings: Settings, steps: Steps, **inputs: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Returns the latents that upstream's loop ends with, around `call`.

        Args:
            parts: The scheduler, and network and VAE for their configurations.
            call: The network.
            settings: Size, steps, guidance and seed.
            steps: Progress, saving and resuming.
            **inputs: What `encode` returned; and `noise`, where it is not to be drawn, in the pipeline's own layout.

        Returns:
            `latents`, in the layout and dtype of the pipeline's `output_type="latent"`.

        Raises:
            ArtefactForeignError: Embeddings are missing.
            BadValueError: Replay does not carry this pipeline, or noise of another shape.
        """
        replay = self._replay(parts, settings, steps)
        network = {self.card.networks[-1]: call}
        return {"latents": self._denoised(parts, network, settings, replay, **inputs)}

    def denoise_first(
        self, parts: Mapping[str, Any], call: Call, settings: Settings, steps: Steps, **inputs: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Returns what the second network's stage goes on from; see `denoise` for what comes in.

        Returns:
            The state after the last step of the first network, and `done`, how many steps there were.

        Raises:
            BadValueError: One of the two networks has no step.
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
        **embeddings: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the latents that upstream's loop ends with; see `denoise` for what it refuses.

        Args:
            parts: As `denoise` has them.
            calls: The stage's network, by its name.
            settings: As `denoise` has them.
            replay: The loop.
            noise: To begin with; None: it is drawn.
            **embeddings: By the pipeline's names for them.
        """
        missing = [name for name in self._embeddings(settings) if name not in embeddings]
        if missing:
            fact = f"It lacks '{missing[0]}', and the guidance scale is {settings.guidance_scale}"
            remedy = "Run --stage encode with this model and guidance scale"
            raise ArtefactForeignError("encode.safetensors", fact, remedy, name=missing[0])
        if noise is not None:
            drawn = self._drawn(parts, settings, embeddings)
            check_noise(noise, tuple(drawn.shape[1:]))
            noise = noise.to(drawn.dtype)
        return self._run(parts, settings, embeddings, replay, calls, latents=noise, output_type="latent")

    def _drawn(
        self, parts: Mapping[str, Any], settings: Settings, embeddings: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Returns the latents that upstream's loop begins with: it is left at its first step."""
        first = First(copy.deepcopy(parts["scheduler"]))
        try:
            self._run(parts, settings, embeddings, first, {}, output_type="latent")
        except FirstStep as reached:
            return reached.sample
        raise BadValueError(self.place, f"'{self.name}' never calls its scheduler's 'step'", OTHER_LOOP)

    def decode(
        self, parts: Mapping[str, Any], call: None, settings: Settings, steps: Steps, *, latents: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Returns the frames that upstream makes of latents after its loop, which is replayed to its end.

        Args:
            parts: The VAE, the scheduler, and the network for its configuration.
            call: None: the VAE runs on the host.
            settings: The size, and whether to decode in tiles.
            steps: Progress.
            latents: As `denoise` left them.

        Returns:
            `frames` [1, F, 3, height, width], 0 to 1.

        Raises:
            ArtefactForeignError: Latents of another shape than this job's.
        """
        if settings.vae_tiling:
            parts["vae"].enable_tiling()
        embeddings = self.embeddings_like(parts, settings, "vae")
        replay = Finished(parts["scheduler"], latents.to(settings.dtypes["vae"]))
        frames = latents
        for _ in steps.track(range(1), done=0, total=1):
            frames = self._run(parts, settings, embeddings, replay, {}, vae=parts["vae"], output_type="pt")
        return {"frames": frames}

    def _run(
        self,
        parts: Mapping[str, Any],
        settings: Settings,
        embeddings: Mapping[str, torch.Tensor],
        replay: Loop,
        calls: Mapping[str, Call],
        vae: Any = None,
        **arguments: Any,
    ) -> torch.Tensor:
        """Returns what upstream's `__call__` returns first.

        Args:
            parts: Network and VAE for their configurations.
            settings: Those of the card's `settings` go in.
            embeddings: By the pipeline's names for them.
            replay: The scheduler's steps, and the seed's generator.
            calls: The stage's network, by its name; none where every step is done.
            vae: Decodes; None: only its configuration is needed.
            **arguments: Of the pipeline.

        Raises:
            BadValueError: The pipeline does not take an argument, or has another number of steps.
        """
        names = (*self.card.networks, *(["vae"] if vae is None else []))
        stand_ins = {name: StandIn(parts[name], settings.dtypes[name], replay, calls.get(name)) for name in names}
        pipe = self._built({"vae": vae, **stand_ins, "scheduler": replay.scheduler})
        pipe.set_progress_bar_config(disable=True)
        values = {name: getattr(settings, setting) for name, setting in self.card.settings.items()}
        every = {**values, **self.card.constants, **embeddings, "generator": replay.generator, **arguments}
        self._check_takes("__call__", pipe.__call__, every)
        video: torch.Tensor = pipe(**every, return_dict=False)[0]
        if replay.number != settings.steps:
            fact = f"'{self.name}' calls its scheduler's 'step' {replay.number} times in {settings.steps} steps"
            raise BadValueError(self.place, fact, f"Replay needs one call a step. {OTHER_LOOP}")
        replay.finish()
        return video

    def _built(self, parts: Mapping[str, Any]) -> Any:
        """Returns upstream's pipeline object around some parts; components that are not among them are None."""
        module, _, name = self.class_path.partition(":")
        cls = getattr(importlib.import_module(module), name)
        self._check_takes("__init__", cls.__init__, self.card.init)
        parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
        names = [each.name for each in parameters if each.name in parts or each.default is each.empty]
        return cls(**{name: parts.get(name) for name in names} | self.card.init)

    def _check_takes(self, what: str, function: Callable[..., Any], names: Iterable[str]) -> None:
        parameters = inspect.signature(function).parameters
        for name in names:
            if name not in parameters:
                fact = f"'{self.name}.{what}' takes no argument '{name}'"
                raise BadValueError(self.place, fact, nearest(name, parameters), name=name)
