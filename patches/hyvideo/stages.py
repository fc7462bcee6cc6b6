"""HunyuanVideo-1.5 with the classes of Tencent's own repository, package `hyvideo`.

Upstream's pipeline object does what it does well: prompts, glyphs, noise, condition channels, the image's features. It
is built around the parts that a stage has. Ours is the loop.

Shapes: B batch, C channels, T latent frames, H W latent height and width, F frames, L text tokens, D features.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from torchport.errors import ArtefactForeignError, BadValueError
from torchport.load.foreign import tokenizing
from torchport.stages import frames, picture
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

TAKES_IMAGE = True
"""Whether --image means anything here."""

CPU = torch.device("cpu")
EMBEDDINGS = ("prompt_embeds", "prompt_embeds_mask", "prompt_embeds_2", "prompt_embeds_mask_2")
"""Stage files have these, and the same with `negative_` before them; `_2` is ByT5's."""

VARIANTS = (
    "480p_t2v", "480p_i2v", "720p_t2v", "720p_i2v", "480p_t2v_distilled", "480p_i2v_distilled", "720p_t2v_distilled",
    "720p_i2v_distilled", "480p_i2v_step_distilled",
)  # fmt: skip
"""Networks of the published checkpoint; those with sparse attention compute something else, and are refused."""


def task(variant: str) -> str:
    """Returns the task that a variant's network was trained for: t2v or i2v."""
    return variant.split("_")[1]


class _NoEncoder:
    """Stands where a text encoder would; upstream's constructor asks for its length even if nothing is encoded."""

    max_length = 1000


def pipeline(settings: Settings, parts: Mapping[str, Any]) -> Any:
    """Returns upstream's pipeline object around the parts that a stage has, for its variant's flow shift."""
    from hyvideo.commons import PIPELINE_CONFIGS
    from hyvideo.pipelines.hunyuan_video_pipeline import HunyuanVideo_1_5_Pipeline

    if settings.variant not in PIPELINE_CONFIGS:  # step distillation came in 2025-12
        raise BadValueError(
            "variant",
            f"It is {settings.variant!r}, which the checkout does not have",
            f"Use a later checkout, or one of {', '.join(PIPELINE_CONFIGS)}",
        )
    published = PIPELINE_CONFIGS[settings.variant]
    names = ("byt5_model", "byt5_tokenizer", "prompt_format", "vision_encoder")
    pipe = HunyuanVideo_1_5_Pipeline(
        vae=parts["vae"],
        text_encoder=parts.get("text_encoder", _NoEncoder()),
        transformer=parts["transformer"],
        scheduler=None,
        flow_shift=published["flow_shift"],
        execution_device=CPU,
        **{name: parts[name] for name in names if name in parts},
    )
    pipe.target_dtype = settings.dtypes["transformer"]
    pipe._guidance_scale = settings.guidance_scale
    return pipe


def batch(guidance_scale: float) -> int:
    """Returns how many conditions go through the transformer at each step."""
    return 1 if guidance_scale == 1.0 else 2


def encoders(settings: Settings) -> tuple[str, ...]:
    """Returns the components of which upstream loads what `load_encoders` returns."""
    text = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "glyph_encoder")
    return text if settings.image is None else (*text, "vision_encoder", "image_processor", "vae")


def load_encoders(folder: Path, settings: Settings) -> dict[str, Any]:
    """Returns the encoders, loaded by upstream's own functions; those of an image only if there is one.

    Args:
        folder: The checkpoint, in Tencent's layout.
        settings: Whether there is an image.
    """
    from hyvideo.models.autoencoders.hunyuanvideo_15_vae import AutoencoderKLConv3D
    from hyvideo.pipelines.hunyuan_video_pipeline import HunyuanVideo_1_5_Pipeline as Upstream

    text_encoder, _ = Upstream._load_text_encoders(str(folder), device=CPU)
    glyphs, prompt_format = Upstream._load_byt5(str(folder), True, 256, device=CPU)
    parts = {
        "text_encoder": text_encoder,
        "byt5_model": glyphs["byt5_model"].eval(),
        "byt5_tokenizer": glyphs["byt5_tokenizer"],
        "prompt_format": prompt_format,
    }
    if settings.image is not None:
        parts["vision_encoder"] = Upstream._load_vision_encoder(str(folder), device=CPU)
        parts["vae"] = AutoencoderKLConv3D.from_pretrained(folder / "vae", torch_dtype=settings.dtypes["vae"]).eval()
    return parts


def encode(parts: Mapping[str, Any], call: None, settings: Settings, steps: Steps) -> dict[str, torch.Tensor]:
    """Returns the embeddings of both prompts, and of the image, as upstream's pipeline would hand them to its loop.

    Args:
        parts: The encoders, and the configurations of transformer and VAE.
        call: None: the encoders run on the host.
        settings: Prompts, guidance scale, image.
        steps: Not used: there is one step for each prompt.

    Returns:
        `prompt_embeds` [1, 1000, D], `prompt_embeds_mask` [1, 1000], `prompt_embeds_2` [1, 256, 1472],
        `prompt_embeds_mask_2` [1, 256]; with guidance the same with `negative_` before them; with an image
        `image_latents` [1, C, 1, H, W] and `image_embeds` [1, 729, 1152].
    """
    pipe, guided = pipeline(settings, parts), batch(settings.guidance_scale) == 2
    with torch.no_grad(), tokenizing(pipe.text_encoder.tokenizer_path):
        embeds, negative, mask, negative_mask = pipe.encode_prompt(
            settings.prompt, CPU, 1, guided, settings.negative_prompt, data_type="video"
        )
        glyphs = pipe._prepare_byt5_embeddings(settings.prompt, CPU)
        states, states_mask = glyphs["byt5_text_states"], glyphs["byt5_text_mask"]
        positive = dict(zip(EMBEDDINGS, (embeds, mask, states[-1:], states_mask[-1:]), strict=True))
        outputs = {**positive, **(_image(pipe, settings) if settings.image is not None else {})}
        if guided:
            values = (negative, negative_mask, states[:1], states_mask[:1])
            outputs |= {f"negative_{name}": value for name, value in zip(EMBEDDINGS, values, strict=True)}
    return outputs


def _image(pipe: Any, settings: Settings) -> dict[str, torch.Tensor]:
    """Returns the first frame's latents and features."""
    import numpy

    first = picture.read(settings.image)
    latents = pipe.get_image_condition_latents("i2v", first, settings.height, settings.width)
    states = pipe._prepare_vision_states(numpy.array(first), pipe.ideal_resolution, latents, CPU)
    return {"image_latents": latents, "image_embeds": states[:1]}


def embeddings_like(parts: Mapping[str, Any], settings: Settings) -> dict[str, torch.Tensor]:
    """Returns embeddings of the shapes and dtypes that `encode` returns, all tokens valid."""
    config = parts["transformer"].config
    prefixes = ["", "negative_"][: batch(settings.guidance_scale)]
    text, mask = torch.ones(1, 1000, config.text_states_dim).half(), torch.ones(1, 1000, dtype=torch.int64)
    values = (text, mask, torch.ones(1, 256, 1472), mask[:, :256])
    outputs = {prefix + name: value for prefix in prefixes for name, value in zip(EMBEDDINGS, values, strict=True)}
    if task(str(settings.variant)) == "i2v":
        outputs["image_latents"] = torch.zeros(1, 32, 1, settings.height // 16, settings.width // 16)
        outputs["image_embeds"] = torch.ones(1, 729, config.vision_states_dim)
    return outputs


def denoise(
    parts: Mapping[str, Any], call: Call, settings: Settings, steps: Steps, **embeddings: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Returns the denoised latents. The loop is upstream's, statement by statement, around `call`.

    Args:
        parts: The configurations of transformer and VAE.
        call: The transformer; both conditions of guidance go through it in one batch, as upstream has it.
        settings: Size, steps, guidance and seed.
        steps: Progress, saving and resuming.
        **embeddings: What `encode` returned; and `noise` [1, C, T, H, W], where it is not to be drawn.

    Returns:
        `latents` [1, C, T, H, W], float32.

    Raises:
        ArtefactForeignError: Embeddings of the other task than the variant's.
    """
    pipe, transformer = pipeline(settings, parts), parts["transformer"]
    scheduler = pipe._create_scheduler(pipe.config.flow_shift)
    scheduler.set_timesteps(settings.steps, device=CPU)
    size = pipe.get_latent_size(settings.frames, settings.height, settings.width)
    latents = pipe.prepare_latents(
        1, transformer.config.in_channels, *size[1:], size[0], pipe.target_dtype, CPU,
        torch.Generator().manual_seed(settings.seed), embeddings.pop("noise", None),
    )  # fmt: skip
    check_noise(latents, (transformer.config.in_channels, *size))
    _check_kind(settings, embeddings)
    # The stage file says which task it is: the image itself need not be on this machine.
    kind = "i2v" if "image_latents" in embeddings else "t2v"
    mask = pipe.get_task_mask(kind, size[0])
    condition = pipe._prepare_cond_latents(kind, embeddings.get("image_latents"), latents, mask)
    fixed = call.place(**_inputs(pipe, settings, embeddings, size, call.drops))
    done = 0
    if steps.resume is not None:
        done, latents = steps.resume[0], steps.resume[1]["latents"]
        scheduler.set_begin_index(done)
    remaining = list(enumerate(scheduler.timesteps))[done:]
    for i, t in steps.track(remaining, done=done, total=settings.steps):
        with torch.no_grad():
            model_input = torch.cat([torch.cat([latents, condition], dim=1)] * batch(settings.guidance_scale))
            changing = {"hidden_states": model_input, "timestep": t.repeat(len(model_input))}
            if pipe.use_meanflow:
                later = scheduler.timesteps[i + 1] if i + 1 < settings.steps else torch.tensor(0.0)
                changing["timestep_r"] = later.repeat(len(model_input))
            noise = call(**changing, **fixed, mask_type=kind)
            if batch(settings.guidance_scale) == 2:
                negative, positive = noise.chunk(2)
                noise = negative + settings.guidance_scale * (positive - negative)
            latents = scheduler.step(noise, t, latents, return_dict=False)[0]
        steps.finished(i + 1, {"latents": latents}, t)
    return {"latents": latents}


def _check_kind(settings: Settings, embeddings: Mapping[str, torch.Tensor]) -> None:
    """Refuses a stage file of the other task than the variant's network was trained for."""
    made, wanted = "i2v" if "image_latents" in embeddings else "t2v", task(str(settings.variant))
    if made != wanted:
        fact = f"It was made for {made}, and the variant '{settings.variant}' is for {wanted}"
        raise ArtefactForeignError(
            "encode.safetensors", fact, "Name the variant that it was made for with --set variant="
        )


def _inputs(
    pipe: Any, settings: Settings, embeddings: Mapping[str, torch.Tensor], size: tuple[int, int, int], drops: bool
) -> dict[str, torch.Tensor]:
    """Returns the transformer's constant inputs, the negative condition first, as upstream has them."""
    conditions = ["negative_", ""] if batch(settings.guidance_scale) == 2 else [""]
    values = [[embeddings[prefix + name] for prefix in conditions] for name in EMBEDDINGS]
    # Upstream computes the tables inside its forward, once for each step; as arguments they are no constants.
    cos, sin = pipe.transformer.get_rotary_pos_embed(size)
    # Without an image upstream passes zeros, which the transformer masks.
    tokens = 0 if drops else pipe.config.vision_num_semantic_tokens
    vision = embeddings.get("image_embeds", torch.zeros(1, tokens, pipe.transformer.config.vision_states_dim))
    if drops:
        values = fit_text(values, settings.text_bucket, vision.shape[1])
    embeds, mask, glyphs, glyphs_mask = (torch.cat(value) for value in values)
    if settings.dtypes["transformer"] == torch.float32:
        # No autocast then, which otherwise brings upstream's half-precision embeddings to the weights' dtype.
        embeds, glyphs, vision = embeds.float(), glyphs.float(), vision.float()
    return {
        "text_states": embeds,
        "encoder_attention_mask": mask.to(torch.int64),
        "byt5_text_states": glyphs,
        "byt5_text_mask": glyphs_mask.to(torch.int64),
        "vision_states": vision.repeat(len(conditions), 1, 1),
        "freqs_cos": cos,
        "freqs_sin": sin,
    }


class _AsUpstreamCalls:
    """Stands in upstream's pipeline where the transformer stood, and passes its inputs on by the loop's names."""

    def __init__(self, transformer: Any, call: Call, dtype: torch.dtype) -> None:
        self.transformer, self.call, self.dtype = transformer, call, dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transformer, name)

    def __call__(
        self, hidden_states: torch.Tensor, timestep: Any, text_states: Any, _: Any, mask: Any, **more: Any
    ) -> Any:
        """Returns what `call` returns, as upstream's transformer does."""
        cos, sin = self.transformer.get_rotary_pos_embed(tuple(hidden_states.shape[2:]))
        inputs = {"hidden_states": hidden_states, "timestep": timestep, "text_states": text_states}
        inputs |= {
            "encoder_attention_mask": mask,
            "freqs_cos": cos,
            "freqs_sin": sin,
            **more.pop("extra_kwargs"),
            **more,
        }
        if self.dtype == torch.float32:  # see `_inputs`
            states = ("text_states", "byt5_text_states", "vision_states")
            inputs |= {name: inputs[name].float() for name in states}
        del inputs["return_dict"]
        return (self.call(**inputs),)


def upstream_loop(parts: Mapping[str, Any], call: Call, settings: Settings, **inputs: torch.Tensor) -> None:
    """Takes all steps in upstream's own `__call__`, with `call` for the transformer: `denoise` is compared with it.

    Args:
        parts: As `denoise` has them.
        call: The transformer.
        settings: As `denoise` has them.
        **inputs: As `denoise` has them.
    """
    from PIL import Image

    pipe, guided = pipeline(settings, parts), batch(settings.guidance_scale) == 2
    size, prefixes = (settings.height, settings.width), ["negative_", ""] if guided else [""]
    glyphs = [torch.cat([inputs[prefix + name] for prefix in prefixes]) for name in EMBEDDINGS[2:]]
    overridden: dict[str, Any] = {
        "transformer": _AsUpstreamCalls(parts["transformer"], call, settings.dtypes["transformer"]),
        "encode_prompt": lambda *_, **__: [inputs.get(p + name) for name in EMBEDDINGS[:2] for p in ("", "negative_")],
        "_prepare_byt5_embeddings": lambda *_: dict(zip(("byt5_text_states", "byt5_text_mask"), glyphs, strict=True)),
        "get_closest_resolution_given_original_size": lambda *_: size,
        "autocast_enabled": False,
    }
    picture = None
    if "image_latents" in inputs:
        picture = Image.new("RGB", size[::-1])
        overridden |= {
            "get_closest_resolution_given_reference_image": lambda *_: size,
            "get_image_condition_latents": lambda *_: inputs["image_latents"],
            "_prepare_vision_states": lambda *_: inputs["image_embeds"].repeat(len(prefixes), 1, 1),
        }
    if "noise" in inputs:
        overridden["prepare_latents"] = lambda *_: inputs["noise"]
    vars(pipe).update(overridden)
    pipe.set_progress_bar_config(disable=True)
    given = {
        "guidance_scale": settings.guidance_scale,
        "num_inference_steps": settings.steps,
        "reference_image": picture,
    }
    generator = torch.Generator().manual_seed(settings.seed)
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):  # it prints a table of its arguments
        pipe(
            settings.prompt, "16:9", settings.frames, False, **given, enable_sr=False, generator=generator,
            output_type="latent", return_dict=False,
        )  # fmt: skip


@contextlib.contextmanager
def _autocast(dtype: torch.dtype) -> Iterator[None]:
    """Enters CUDA's autocast as upstream does, where a network computes in half precision."""
    if dtype == torch.float32:
        yield
        return
    with torch.autocast(device_type="cuda", dtype=dtype):
        yield


def call_transformer(module: torch.nn.Module, settings: Settings, **inputs: Any) -> Any:
    """Calls the transformer as upstream's loop does."""
    glyphs = {name: inputs.pop(name) for name in ("byt5_text_states", "byt5_text_mask")}
    with _autocast(settings.dtypes["transformer"]):
        return module(**inputs, text_states_2=None, return_dict=False, extra_kwargs=glyphs)


def decoded(module: torch.nn.Module, settings: Settings, **inputs: Any) -> tuple[torch.Tensor, ...]:
    """Returns the video as bytes, by `frames.pixels`; or with tiles what the decoder returns, for each of them.

    Args:
        module: The decoder, called as upstream's pipeline does.
        settings: Whether there are tiles: then all of them have to be there before there is a video.
        **inputs: Latents `z`.
    """
    with _autocast(settings.dtypes["vae"]):
        video = module(inputs["z"])
    return (video, frames.not_finite(video)) if _is_tiled(settings) else frames.pixels(_post_processed(video))


def _is_tiled(settings: Settings) -> bool:
    """Returns whether to decode in tiles: as upstream does, unless the settings forbid it."""
    return settings.vae_tiling is not False


def _post_processed(video: torch.Tensor) -> torch.Tensor:
    """Returns a decoded video [B, C, F, H, W] as numbers from 0 to 1, [B, F, C, H, W]."""
    return (video / 2 + 0.5).clamp(0, 1).float().transpose(1, 2)


def decode(
    parts: Mapping[str, Any], call: Call, settings: Settings, steps: Steps, *, latents: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Returns the video's frames.

    The decoder alone goes through `call`; tiling, which upstream always does, and blending stay its own.

    Args:
        parts: The VAE.
        call: Its decoder, called as `decoded`.
        settings: Whether to decode in tiles; by default, as upstream does.
        steps: Progress: one item for each call of the decoder.
        latents: [1, C, T, H, W], as `denoise` left them.

    Returns:
        `frames` [1, F, 3, height, width], bytes.
    """
    vae = parts["vae"]
    latents = latents / vae.config.scaling_factor
    if getattr(vae.config, "shift_factor", None):
        latents = latents + vae.config.shift_factor
    if _is_tiled(settings):
        return {"frames": frames.checked(*frames.pixels(_post_processed(_tiled(vae, call, steps, latents))))}
    progress = iter(steps.track(range(1), done=0, total=1))
    next(progress, None)
    pixels = call(z=latents)
    next(progress, None)
    return {"frames": frames.checked(*pixels)}


def _tiled(vae: Any, call: Call, steps: Steps, latents: torch.Tensor) -> torch.Tensor:
    """Returns what upstream decodes in tiles and blends, on the host."""
    from hyvideo.pipelines.hunyuan_video_pipeline import HunyuanVideo_1_5_Pipeline as Upstream

    inference = Upstream.get_vae_inference_config()
    vae.set_tile_sample_min_size(inference["sample_size"], inference["tile_overlap_factor"])
    count = _tiles(vae, latents)
    note_tiles(latents, count)
    progress = iter(steps.track(range(count), done=0, total=count))
    vae.decoder = CallModule(lambda z: call(z=z)[0], "z", progress)
    tiling: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if hasattr(vae, "memory_efficient_context"):
        tiling = vae.memory_efficient_context()
    else:
        vae.enable_tiling()  # as upstream's pipeline does at its commits of 2025-11, where the VAE has no such context
    with torch.no_grad(), tiling:
        video: torch.Tensor = vae.decode(latents, return_dict=False)[0]
    next(progress, None)
    return video


def _tiles(vae: Any, latents: torch.Tensor) -> int:
    """Returns how often upstream will call the decoder: its own rule, for the progress bar."""
    tile, sides = vae.tile_latent_min_size, latents.shape[-2:]
    if all(side <= tile for side in sides):
        return 1
    return math.prod(math.ceil(side / int(tile * (1 - vae.tile_overlap_factor))) for side in sides)


def arrange_tiny(make: Callable[..., Any], folder: Path) -> None:
    """Saves tiny components in the layout of Tencent's checkpoint.

    Args:
        make: Returns one component by its name in the card.
        folder: An empty folder.
    """
    make("text_encoder").save_pretrained(folder / "text_encoder" / "llm")
    make("tokenizer").save_pretrained(folder / "text_encoder" / "llm")
    make("vision_encoder").save_pretrained(folder / "vision_encoder" / "siglip" / "image_encoder")
    make("image_processor").save_pretrained(folder / "vision_encoder" / "siglip" / "feature_extractor")
    for variant in VARIANTS:
        resolution, task, *distilled = variant.split("_")
        transformer = make(
            "transformer", ideal_resolution=resolution, ideal_task=task, use_meanflow="step" in distilled
        )
        transformer.save_pretrained(folder / "transformer" / variant)
    make("vae").save_pretrained(folder / "vae")
    make("scheduler").save_pretrained(folder / "scheduler")
    _arrange_glyphs(make, folder / "text_encoder")


def _arrange_glyphs(make: Callable[..., Any], folder: Path) -> None:
    """Saves a tiny ByT5 as upstream reads it: the model, and, over it, an encoder with tokens for fonts and colours."""
    model, tokenizer = make("text_encoder_2"), make("tokenizer_2")
    model.save_pretrained(folder / "byt5-small")
    tokenizer.save_pretrained(folder / "byt5-small")
    fonts, colours = {"en-Sans": 0, "en-Serif": 1}, {"black": 0, "white": 1, "red": 2}
    assets, weights = folder / "Glyph-SDXL-v2" / "assets", folder / "Glyph-SDXL-v2" / "checkpoints"
    assets.mkdir(parents=True)
    weights.mkdir()
    (assets / "multilingual_10-lang_idx.json").write_text(json.dumps(fonts))
    (assets / "color_idx.json").write_text(json.dumps(colours))
    tokenizer.add_tokens(
        [*(f"<color-{n}>" for n in colours.values()), *(f"<en-font-{n}>" for n in fonts.values())], special_tokens=True
    )
    encoder = model.get_encoder()
    encoder.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    # Into memory first: where a disk is full, torch's own writer raises what says nothing of it.
    written = io.BytesIO()
    torch.save({name: tensor.clone() for name, tensor in encoder.state_dict().items()}, written)
    (weights / "byt5_model.pt").write_bytes(written.getvalue())


ENCODE_USES = ("prompt", "negative_prompt", "guidance_scale", "height", "width", "dtypes", "variant", "image")
DENOISE_USES = ("seed", "height", "width", "frames", "steps", "guidance_scale", "dtypes", "variant", "text_bucket")
DECODE_USES = ("height", "width", "frames", "vae_tiling", "dtypes")

STAGES = (
    Stage("encode", encode, ENCODE_USES, load=load_encoders, loads=encoders, meta=("transformer", "vae")),
    Stage(
        "denoise", denoise, DENOISE_USES, needs=("encode",), network="transformer", meta=("vae",),
        call=call_transformer, like=embeddings_like,
    ),
    Stage(
        "decode", decode, DECODE_USES, needs=("denoise",), network="vae", submodule="decoder", call=decoded,
        outputs=frames.OUTPUTS,
        like=functools.partial(latents_like, space="ffactor_spatial", time="ffactor_temporal", dtype=torch.float32),
    ),
)  # fmt: skip
