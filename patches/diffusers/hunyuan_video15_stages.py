"""HunyuanVideo-1.5 with diffusers' classes.

Upstream's pipeline object does what it does well: prompts, noise, condition channels, guidance, post-processing. It
is built from real parts and, where it only asks for a configuration, from parts without storage. Ours is the loop.

Shapes: B batch, C channels, T latent frames, H W latent height and width, F frames, L text tokens, D features.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch

from torchport.errors import ArtefactForeignError
from torchport.load.foreign import tokenizing
from torchport.stages import frames, guiding
from torchport.stages.family import (
    Call,
    CallModule,
    Settings,
    Stage,
    Steps,
    check_noise,
    fit_text,
    latents_like,
    note_tiles,
)

EMBEDDINGS = ("prompt_embeds", "prompt_embeds_mask", "prompt_embeds_2", "prompt_embeds_mask_2")
PARTS = (
    "text_encoder",
    "tokenizer",
    "text_encoder_2",
    "tokenizer_2",
    "transformer",
    "vae",
    "scheduler",
    "guider",
)


def pipeline(parts: Mapping[str, Any]) -> Any:
    """Returns upstream's pipeline object around the parts a stage has; the others are None.

    Only its helpers are used, so components that it would merely hold need not be there.
    """
    from diffusers import HunyuanVideo15Pipeline

    return HunyuanVideo15Pipeline(**{name: parts.get(name) for name in PARTS})


TAKES_IMAGE = False
"""Whether --image means anything here."""

VARIANTS: tuple[str, ...] = ()
"""A checkpoint has one network."""

arrange_tiny = None
"""The tiny checkpoint is in the diffusers format: upstream's pipeline saves itself."""


def batch(guidance_scale: float) -> int:
    """Returns how many conditions go through the transformer at each step."""
    return 1 if guidance_scale == 1.0 else 2


def encode(parts: Mapping[str, Any], call: None, settings: Settings, steps: Steps) -> dict[str, torch.Tensor]:
    """Returns the embeddings of both prompts, as upstream's pipeline would hand them to its loop.

    Text in double quotes is also read letter by letter, by ByT5. The negative prompt's embeddings are left out when
    guidance is off.

    Args:
        parts: Text encoders and tokenizers, and the VAE's configuration.
        call: None: the encoders run on the host.
        settings: The prompts, the guidance scale, and the transformer's dtype: upstream casts embeddings to it.
        steps: Not used: there is one step for each prompt.

    Returns:
        `prompt_embeds` [1, 1000, D], `prompt_embeds_mask` [1, 1000], `prompt_embeds_2` [1, 256, D2],
        `prompt_embeds_mask_2` [1, 256], and with guidance the same with `negative_` before them; masks are cast too.
    """
    pipe = pipeline(parts)
    prompts = {"": settings.prompt}
    if batch(settings.guidance_scale) == 2:
        prompts["negative_"] = settings.negative_prompt
    outputs: dict[str, torch.Tensor] = {}
    with torch.no_grad(), tokenizing(parts["tokenizer"].name_or_path):
        for prefix, text in prompts.items():
            embedded = pipe.encode_prompt(prompt=text, device=torch.device("cpu"), dtype=settings.dtypes["transformer"])
            outputs |= {prefix + name: tensor for name, tensor in zip(EMBEDDINGS, embedded, strict=True)}
    return outputs


def prepare(parts: Mapping[str, Any], settings: Settings) -> None:
    """Computes what depends on the latents' shape alone, so that a traced program gets it as an argument.

    The rotary tables are computed here, on the host, by upstream's own code, and kept as buffers: traced, they would
    be constants of the program (114 MB at 720p), computed by another library's cosine.

    Args:
        parts: The transformer, changed in place, and the VAE's configuration.
        settings: The video's size.
    """
    rope, grid = parts["transformer"].rope, _grid(parts["vae"], settings)
    with torch.no_grad():
        cos, sin = rope(torch.zeros(()).expand(1, 1, *grid))
    rope.grid = grid  # as many tokens may be those of another size
    rope.register_buffer("cos", cos, persistent=False)
    rope.register_buffer("sin", sin, persistent=False)


def _grid(vae: Any, settings: Settings) -> tuple[int, int, int]:
    """Returns the latents' sizes: frames, height, width."""
    space, time = vae.spatial_compression_ratio, vae.temporal_compression_ratio
    return (settings.frames - 1) // time + 1, settings.height // space, settings.width // space


def embeddings_like(parts: Mapping[str, Any], settings: Settings) -> dict[str, torch.Tensor]:
    """Returns embeddings of the shapes and dtypes that `encode` returns, all tokens valid."""
    config, dtype = parts["transformer"].config, settings.dtypes["transformer"]
    shapes = ((1, 1000, config.text_embed_dim), (1, 1000), (1, 256, config.text_embed_2_dim), (1, 256))
    prefixes = ["", "negative_"][: batch(settings.guidance_scale)]
    return {
        prefix + name: torch.ones(shape, dtype=dtype)
        for prefix in prefixes
        for name, shape in zip(EMBEDDINGS, shapes, strict=True)
    }


def denoise(
    parts: Mapping[str, Any], call: Call, settings: Settings, steps: Steps, **embeddings: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Returns the denoised latents. The loop is upstream's, statement by statement, around `call`.

    Noise is drawn on the host, so that it is the same on every machine, and tensors enter the transformer in the
    dtypes that upstream gives them.

    Args:
        parts: Scheduler and guider, and the configurations of transformer and VAE.
        call: The transformer.
        settings: Size, steps, guidance, guider and seed.
        steps: Progress, saving and resuming.
        **embeddings: What `encode` returned; and `noise` [1, C, T, H, W], where it is not to be drawn.

    Returns:
        `latents` [1, C, T, H, W].
    """
    pipe, dtype, device = pipeline(parts), settings.dtypes["transformer"], torch.device("cpu")
    scheduler, guider = pipe.scheduler, guiding.guider(pipe.guider, settings)
    # Upstream leaves out the last of steps + 1 evenly spaced values; float64 here, float32 in the scheduler.
    scheduler.set_timesteps(sigmas=numpy.linspace(1.0, 0.0, settings.steps + 1)[:-1], device=device)
    latents = pipe.prepare_latents(
        1,
        pipe.num_channels_latents,
        settings.height,
        settings.width,
        settings.frames,
        dtype,
        device,
        torch.Generator().manual_seed(settings.seed),
        embeddings.pop("noise", None),
    )
    check_noise(latents, (pipe.num_channels_latents, *_grid(pipe.vae, settings)))
    _check_embeddings(settings, embeddings)
    fixed = torch.cat(pipe.prepare_cond_latents_and_mask(latents, dtype, device), dim=1)
    size, step = pipe.transformer.config.patch_size, pipe.transformer.config.patch_size_t
    tokens = latents.shape[2] // step * (latents.shape[3] // size) * (latents.shape[4] // size)
    inputs = _inputs(pipe, embeddings, settings, call, tokens)
    conditions = _Conditions(call, inputs)
    done = 0
    if steps.resume is not None:
        done, latents = steps.resume[0], steps.resume[1]["latents"]
        scheduler.set_begin_index(done)
        guiding.resume(guider, inputs, steps.resume[1])
    remaining = list(enumerate(scheduler.timesteps))[done:]
    for i, t in steps.track(remaining, done=done, total=settings.steps):
        with torch.no_grad():
            model_input = torch.cat([latents, fixed], dim=1)
            timestep = t.expand(model_input.shape[0]).to(model_input.dtype)
            guider.set_state(step=i, num_inference_steps=settings.steps, timestep=t)
            states = guider.prepare_inputs(inputs)
            for state, noise in zip(states, conditions.predict(len(states), model_input, timestep), strict=True):
                state.noise_pred = noise
            latents = scheduler.step(guider(states)[0], t, latents, return_dict=False)[0]
        steps.finished(i + 1, {"latents": latents, **guiding.state(guider)}, t)
    return {"latents": latents}


def _check_embeddings(settings: Settings, embeddings: Mapping[str, torch.Tensor]) -> None:
    """Refuses a stage file that this transformer cannot take: without guidance, or of an image."""
    prefixes = ["", "negative_"][: batch(settings.guidance_scale)]
    missing = [prefix + name for prefix in prefixes for name in EMBEDDINGS if prefix + name not in embeddings]
    if missing:
        raise ArtefactForeignError(
            "encode.safetensors",
            f"It lacks '{missing[0]}', and the guidance scale is {settings.guidance_scale}",
            "Run --stage encode with this model and guidance scale",
            name=missing[0],
        )
    foreign = [name for name in embeddings if name.removeprefix("negative_") not in EMBEDDINGS]
    if foreign:
        fact = f"It holds '{foreign[0]}', and this model makes videos from text alone"
        remedy = "Run --stage encode with this model and checkpoint"
        raise ArtefactForeignError("encode.safetensors", fact, remedy, name=foreign[0])


def _inputs(
    pipe: Any, embeddings: Mapping[str, torch.Tensor], settings: Settings, call: Call, tokens: int
) -> dict[str, tuple[torch.Tensor, ...]]:
    """Returns the transformer's constant inputs by its own names, with one value for each condition of guidance."""
    names = ("encoder_hidden_states", "encoder_attention_mask", "encoder_hidden_states_2", "encoder_attention_mask_2")
    prefixes = [prefix for prefix in ("", "negative_") if prefix + EMBEDDINGS[0] in embeddings]
    dtype, values = (
        settings.dtypes["transformer"],
        [[embeddings[prefix + key] for prefix in prefixes] for key in EMBEDDINGS],
    )
    if call.drops:
        values = fit_text(values, settings.text_bucket, 0)
    inputs = {name: tuple(value.to(dtype) for value in group) for name, group in zip(names, values, strict=True)}
    # Text-to-video has no image: upstream passes zeros, which the transformer masks.
    count = 0 if call.drops else pipe.vision_num_semantic_tokens
    image = torch.zeros(1, count, pipe.vision_states_dim, dtype=dtype)
    return {**inputs, "image_embeds": (image,) * len(prefixes)}


class _Conditions:
    """The transformer's constant inputs under each condition of guidance, placed once for all steps."""

    def __init__(self, call: Call, inputs: Mapping[str, tuple[torch.Tensor, ...]]) -> None:
        self.call = call
        self.inputs = inputs
        self.placed: dict[int, list[dict[str, Any]]] = {}

    def groups(self, used: int) -> list[dict[str, Any]]:
        """Returns the inputs of the first `used` conditions: in one batch where the program takes it, else apart."""
        if used not in self.placed:
            cut = [slice(used)] if self.call.batches else [slice(n, n + 1) for n in range(used)]
            self.placed[used] = [
                self.call.place(**{name: torch.cat(values[part]) for name, values in self.inputs.items()})
                for part in cut
            ]
        return self.placed[used]

    def predict(self, used: int, model_input: torch.Tensor, timestep: torch.Tensor) -> list[torch.Tensor]:
        """Returns the predicted velocity [1, C, T, H, W] of each of the first `used` conditions."""
        noise: list[torch.Tensor] = []
        for constants in self.groups(used):
            size = used if self.call.batches else 1
            output = self.call(
                hidden_states=model_input.expand(size, *model_input.shape[1:]),
                timestep=timestep.expand(size),
                return_dict=False,
                **constants,
            )
            noise += torch.split(output, 1)
        return noise


def decoded(decoder: torch.nn.Module, settings: Settings, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the video as bytes, by `frames.pixels`; or with tiles what the decoder returns, for each of them.

    Args:
        decoder: Upstream's.
        settings: Whether there are tiles: then all of them have to be there before there is a video.
        hidden_states: Latents.
    """
    video = decoder(hidden_states)
    if settings.vae_tiling:
        return video, frames.not_finite(video)
    return frames.pixels(_post_processed(video))


def _post_processed(video: torch.Tensor) -> torch.Tensor:
    """Returns a decoded video [B, C, F, H, W] as numbers from 0 to 1, [B, F, C, H, W], as upstream's pipeline does."""
    from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor

    numbers: torch.Tensor = HunyuanVideo15ImageProcessor().postprocess_video(video, output_type="pt")
    return numbers


def decode(
    parts: Mapping[str, Any], call: Call, settings: Settings, steps: Steps, *, latents: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Returns the video's frames.

    The decoder alone goes through `call`. Tiling and blending stay upstream's, on the host: one program for each shape
    of tile, instead of one with all tiles unrolled in it.

    Args:
        parts: The VAE.
        call: Its decoder, called as `decoded`.
        settings: Whether to decode in tiles.
        steps: Progress: one item for each call of the decoder.
        latents: [1, C, T, H, W], as `denoise` left them.

    Returns:
        `frames` [1, F, 3, height, width], bytes.
    """
    vae = parts["vae"]
    if settings.vae_tiling:
        vae.enable_tiling()
    count = _tiles(vae, latents)
    progress = iter(steps.track(range(count), done=0, total=count))
    latents = latents.to(vae.dtype) / vae.config.scaling_factor
    if settings.vae_tiling:
        pixels = frames.pixels(_post_processed(_tiled(vae, call, latents, count, progress)))
    else:
        next(progress, None)
        pixels = call(hidden_states=latents)
    next(progress, None)
    return {"frames": frames.checked(*pixels)}


def _tiled(vae: Any, call: Call, latents: torch.Tensor, count: int, progress: Iterator[Any]) -> torch.Tensor:
    """Returns what upstream decodes in tiles and blends, on the host."""
    note_tiles(latents, count)
    vae.decoder = CallModule(lambda hidden_states: call(hidden_states=hidden_states)[0], "hidden_states", progress)
    with torch.no_grad():
        video: torch.Tensor = vae.decode(latents, return_dict=False)[0]
    return video


def _tiles(vae: Any, latents: torch.Tensor) -> int:
    """Returns how often upstream will call the decoder: its own rule, for the progress bar."""
    height, width = latents.shape[-2:]
    sides = ((height, vae.tile_latent_min_height), (width, vae.tile_latent_min_width))
    if not vae.use_tiling or all(size <= tile for size, tile in sides):
        return 1
    return math.prod(math.ceil(size / int(tile * (1 - vae.tile_overlap_factor))) for size, tile in sides)


ENCODE_USES = ("prompt", "negative_prompt", "guidance_scale", "dtypes")
DENOISE_USES = ("seed", "height", "width", "frames", "steps", "guidance_scale", "guider", "dtypes", "text_bucket")
DECODE_USES = ("height", "width", "frames", "vae_tiling", "dtypes")

STAGES = (
    Stage(
        "encode",
        encode,
        ENCODE_USES,
        parts=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
        meta=("vae",),
    ),
    Stage(
        "denoise",
        denoise,
        DENOISE_USES,
        needs=("encode",),
        parts=("scheduler", "guider"),
        network="transformer",
        meta=("vae",),
        prepare=prepare,
        like=embeddings_like,
    ),
    Stage(
        "decode",
        decode,
        DECODE_USES,
        needs=("denoise",),
        network="vae",
        submodule="decoder",
        call=decoded,
        outputs=frames.OUTPUTS,
        like=functools.partial(latents_like, space="spatial_compression_ratio", time="temporal_compression_ratio"),
    ),
)
