"""Trains the tiny weights of a card to draw scenes: first the VAE, then the transformer.

    python tools/train_tiny.py hunyuan --work DIR            # trains, or goes on
    python tools/train_tiny.py hunyuan --work DIR --decoder  # goes on with the VAE's decoder; at any time after the VAE
    python tools/train_tiny.py hunyuan --work DIR --write    # what there is now becomes the card's

Upstream's own classes in the card's `tiny:` configuration, in plain PyTorch. Text encoders stay as they are drawn from
the card's seed. Everything that is random comes from the seed and the number of the step, so a run that was stopped
goes on from DIR as if it had not been.

Shapes: B batch, C channels, T latent frames, H W latent height and width, F frames, L text tokens, D features.
"""

from __future__ import annotations

import abc
import argparse
import copy
import dataclasses
import hashlib
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from scenes.judge import judged
from scenes.scene import (
    BACKGROUNDS,
    COLOURS,
    DIRECTIONS,
    HEIGHT,
    SHAPES,
    WIDTH,
    Scene,
    clip,
    is_held_out,
    scenes,
)
from scenes.wording import NOTHING, Wording, partial, quoted, titled, whole
from tqdm import tqdm

log = logging.getLogger("train_tiny")
SEED = 20251120
SAVE_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Folder:
    """Where a run keeps what it needs to go on."""

    path: Path

    def save(self, name: str, value: Any) -> None:
        """Writes a file whole or not at all."""
        self.path.mkdir(parents=True, exist_ok=True)
        partial = self.path / f"{name}.partial"
        torch.save(value, partial)
        partial.replace(self.path / name)

    def load(self, name: str) -> Any:
        """Returns what a file holds; None if there is none."""
        file = self.path / name
        return torch.load(file, weights_only=False) if file.is_file() else None


def generator(*numbers: int) -> numpy.random.Generator:
    """Returns the random numbers of one step."""
    return numpy.random.default_rng([SEED, *numbers])


def normal(random: numpy.random.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns float32 noise."""
    return torch.from_numpy(random.standard_normal(shape, dtype=numpy.float32))


def as_video(frames: Any) -> torch.Tensor:
    """Returns [F, H, W, 3] of 8 bits as [1, 3, F, H, W] from -1 to 1."""
    return torch.from_numpy(frames).permute(3, 0, 1, 2)[None].float() / 127.5 - 1


class Training:
    """A module under training: its mean weights, its optimizer, and how far it is."""

    def __init__(
        self, module: torch.nn.Module, folder: Folder, name: str, cycles: tuple[int, ...], rate: float
    ) -> None:
        """Takes the steps of each cycle of the learning rate."""
        self.module, self.folder, self.name, self.cycles, self.rate = module, folder, name, cycles, rate
        self.steps = sum(cycles)
        self.parameters = [each for each in module.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
        self.mean = copy.deepcopy(module).requires_grad_(False)
        self.done = 0
        state = folder.load(f"{name}.pt")
        if state is not None:
            module.load_state_dict(state["module"])
            self.mean.load_state_dict(state["mean"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.done = state["done"]

    def save(self) -> None:
        """Writes all of it."""
        state = {"module": self.module, "mean": self.mean, "optimizer": self.optimizer}
        self.folder.save(f"{self.name}.pt", {"done": self.done, **{k: v.state_dict() for k, v in state.items()}})

    def rate_of(self, step: int) -> float:
        """Returns the learning rate: in each cycle a short rise, a plain, and half a cosine from two thirds on."""
        for cycle in self.cycles:
            if step < cycle:
                break
            step -= cycle
        rise, fall = min(1.0, (step + 1) / 100), max(0.0, 3 * step / cycle - 2)
        return self.rate * rise * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * fall)))

    def run(self, loss_of: Callable[[int], dict[str, torch.Tensor]], every: int, look: Callable[[int], None]) -> None:
        """Trains to the end.

        Args:
            loss_of: Returns the terms of the loss by the number of the step; what is trained is their sum.
            every: After that many steps,
            look: is called with their number.
        """
        saved, means = time.monotonic(), dict[str, float]()
        bar = tqdm(range(self.done, self.steps), initial=self.done, total=self.steps, desc=self.name, mininterval=10)
        for step in bar:
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate_of(step)
            terms = loss_of(step)
            self.optimizer.zero_grad(set_to_none=True)
            sum(terms.values(), torch.zeros(())).backward()
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            self.done = step + 1
            self._average()
            means = {key: 0.98 * means.get(key, value.item()) + 0.02 * value.item() for key, value in terms.items()}
            if self.done % 25 == 0:
                log.info("%s %d: %s", self.name, self.done, {key: round(value, 5) for key, value in means.items()})
            if time.monotonic() - saved > SAVE_SECONDS or self.done == self.steps:
                self.save()
                saved = time.monotonic()
            if self.done % every == 0 or self.done == self.steps:
                look(self.done)

    def _average(self) -> None:
        decay = min(0.998, self.done / (self.done + 20))
        with torch.no_grad():
            for mean, each in zip(self.mean.parameters(), self.module.parameters(), strict=True):
                mean.lerp_(each, 1 - decay)


VAE_STEPS, VAE_RATE, NOISE, PULL = 1900, 6e-4, 0.4, 5e-3
"""`NOISE` is added to latents, so that shapes stay apart in them; `PULL` keeps them small."""


def windows(model: Model, step: int) -> torch.Tensor:
    """Returns parts of clips as [B, 3, F, H, W]: most of them small, for they cost less."""
    random = generator(1, step)
    shares, kinds = [kind[0] for kind in model.windows], [kind[1:] for kind in model.windows]
    frames, side, count = kinds[random.choice(len(kinds), p=shares)]
    chosen = [scenes()[number] for number in random.integers(0, 96, count)]
    return torch.cat([window(scene, model.frames, frames, side, random) for scene in chosen])


def window(scene: Scene, length: int, frames: int, side: int, random: numpy.random.Generator) -> torch.Tensor:
    """Returns a part of a clip as [1, 3, F, H, W]; it begins at a border between latents and has some of the shape."""
    offset = 4 * int(random.integers(0, (length - frames) // 4 + 1))
    dx, dy = DIRECTIONS[scene.direction]
    x = WIDTH / 2 + (4 * offset + 2 * frames) * dx - side / 2 + 16 * int(random.integers(-1, 2))
    y = HEIGHT / 2 + (4 * offset + 2 * frames) * dy - side / 2 + 16 * int(random.integers(-1, 2))
    left, top = (int(min(max(round(value / 16) * 16, 0), WIDTH - side)) for value in (x, y))
    return as_video(clip(scene, frames, offset)[:, top : top + side, left : left + side].copy())


def causal_mask(frames: int, area: int, dtype: Any, device: Any, batch_size: int | None = None) -> torch.Tensor:
    """Returns upstream's mask of the VAE's attention without the dim of clips: with it, it fits one clip only."""
    frame = torch.arange(frames).repeat_interleave(area)
    return torch.zeros(len(frame), len(frame)).masked_fill(frame[None] > frame[:, None], -math.inf)


def folded(conv: torch.nn.Conv3d, frames: torch.Tensor) -> torch.Tensor:
    """Returns a convolution as one over pictures, whose channels are those of three frames.

    One thread computes it at three times the speed: for few clips, PyTorch's convolution over three dims is a slow one.

    Args:
        conv: Without padding in time.
        frames: [B, C, F, H, W].
    """
    weight, count = conv.weight, frames.shape[2] - conv.weight.shape[2] + 1
    if weight.shape[2] == 1:
        made: torch.Tensor = conv(frames)
        return made
    wide = torch.cat([frames[:, :, at : at + count] for at in range(weight.shape[2])], 1).transpose(1, 2).flatten(0, 1)
    flat, (_, *padding) = weight.transpose(1, 2).flatten(1, 2), conv.padding
    pictures = torch.nn.functional.conv2d(wide, flat, conv.bias, padding=tuple(int(each) for each in padding))
    return pictures.unflatten(0, (len(frames), count)).transpose(1, 2)


def causal(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Returns HunyuanVideo-1.5's causal convolution, folded."""
    return folded(self.conv, torch.nn.functional.pad(hidden_states, self.time_causal_padding, mode=self.pad_mode))


def causal_with_cache(self: Any, inputs: torch.Tensor, conv_cache: Any = None) -> tuple[torch.Tensor, Any]:
    """Returns CogVideoX's causal convolution, folded, and the frames that the next part of a video needs."""
    frames = self.fake_context_parallel_forward(inputs, conv_cache)
    return folded(self.conv, frames), frames[:, :, -self.time_kernel_size + 1 :]


def normalised(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Returns upstream's RMS norm, which one thread computes slowly through a vector's norm."""
    inverse: torch.Tensor = torch.rsqrt(x.square().sum(1 if self.channel_first else -1, keepdim=True) + 1e-12)
    return x * inverse * (self.gamma * self.scale) + self.bias


def means(video: torch.Tensor, side: int) -> torch.Tensor:
    """Returns the mean colour of what each latent stands for, [B, 3, T, H, W]: what its first three channels learn.

    Without that, the VAE takes red and yellow for one colour for thousands of steps.
    """
    first, others = video[:, :, :1], video[:, :, 1:]
    pooled = torch.nn.functional.avg_pool3d(first, (1, side, side))
    if others.shape[2]:
        pooled = torch.cat([pooled, torch.nn.functional.avg_pool3d(others, (4, side, side))], 2)
    return pooled


def tint(video: torch.Tensor) -> torch.Tensor:
    """Returns what is left of a video without its grey. The VAE learns grey shapes first, and colours late."""
    return video - video.mean(1, keepdim=True)


def train_vae(model: Model, vae: Any, folder: Folder) -> Any:
    """Returns the trained VAE."""

    def loss_of(step: int) -> dict[str, torch.Tensor]:
        video = windows(model, step)
        latents = vae.encode(video).latent_dist.mode()
        noise = normal(generator(2, step), tuple(latents.shape))
        made = vae.decode(latents + NOISE * noise).sample
        return {
            "absolute": (made - video).abs().mean(),
            "square": (made - video).square().mean(),
            "colour": 4 * (tint(made) - tint(video)).square().mean(),
            "mean": (latents[:, :3] - means(video, model.pixels)).square().mean(),
            "pull": PULL * latents.square().mean(),
        }

    training = Training(vae, folder, "vae", (VAE_STEPS,), VAE_RATE)
    training.run(loss_of, VAE_STEPS, lambda step: None)
    return training.mean.eval()


class Model(abc.ABC):
    """What is particular to a model: how it reads text, adds noise, and makes latents of noise."""

    cycles: tuple[tuple[int, float], ...]
    """The transformer's training, in cycles of its learning rate: steps, and the share of each fact.

    The part of an error that makes one shape another counts so often that it weighs as if it were this share of the
    latents' variance; and so do colour and direction. Of HunyuanVideo-1.5's latents, shape is 4 %, colour 4 %,
    direction 18 %, and the rest is background. With shape counted 12 times and the others once, no colour and no
    direction was read after 2,500 steps.
    """
    guidance: float
    """Of the demo."""
    frames: int
    """Of the demo's clips."""
    pixels: int
    """Of a latent position's side."""
    leading = 0
    """Latent frames before the first one, which upstream puts there and nobody sees."""
    letters = False
    """Whether an encoder of letters reads what is in quotes."""
    windows: tuple[tuple[float, int, int, int], ...]
    """Parts of clips that the VAE learns from: how often, frames, side in pixels, and how many at once."""
    lengths: tuple[tuple[int, float], ...]
    """Latent frames of the parts from which the decoder learns last, and how often."""
    part: int
    """Their side, in latent positions."""
    last: tuple[str, ...]
    """The beginnings of the names of the decoder's last blocks."""
    coarse: tuple[str, ...]
    """The beginnings of the names of the tensors that are shipped with fewer bits, so that a clone is small."""
    frozen: tuple[str, ...] = ()
    """Parts of the transformer that stay as the card's seed draws them."""
    pipe: Any

    @abc.abstractmethod
    def encode(self, wordings: list[Wording]) -> list[Any]:
        """Returns what the text encoders make of each prompt."""

    @abc.abstractmethod
    def inputs(self, texts: list[Any]) -> dict[str, torch.Tensor]:
        """Returns the transformer's inputs of some prompts."""

    @abc.abstractmethod
    def noised(
        self, clean: torch.Tensor, random: numpy.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns latents with noise, [B, C, T, H, W], how late it is, [B], and what the transformer has to predict."""

    @abc.abstractmethod
    def predicted(self, transformer: Any, latents: torch.Tensor, time: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Returns what the transformer predicts, [B, C, T, H, W]."""

    @abc.abstractmethod
    def sample(self, transformer: Any, texts: list[Any], empty: Any, guidance: float, seed: int) -> torch.Tensor:
        """Returns latents of prompts, by the real scheduler."""

    def fresh(self, name: str) -> Any:
        """Returns the VAE or the transformer as upstream initialises it, but for what stays frozen."""
        old = getattr(self.pipe, name)
        module = type(old).from_config(old.config)
        for key, parameter in module.named_parameters():
            if name == "transformer" and key.startswith(self.frozen):
                parameter.requires_grad_(False).copy_(old.get_parameter(key).detach())
        return module


class Hunyuan(Model):
    """HunyuanVideo-1.5 through diffusers."""

    cycles = ((7000, 0.45), (2700, 0.45))
    steps, shift, guidance, frames, pixels, letters = 8, 3.0, 3.0, 13, 16, True
    lengths, part = ((1, 0.3), (2, 0.3), (3, 0.2), (4, 0.2)), 4
    last = ("up_blocks.1.resnets", "up_blocks.2", "up_blocks.3", "up_blocks.4", "norm_out", "conv_out")
    coarse = tuple(f"decoder.{name}" for name in last)
    windows = ((0.3, 1, 32, 24), (0.15, 1, 64, 6), (0.35, 5, 48, 4), (0.15, 9, 48, 2), (0.05, 13, 80, 1))
    frozen = ("context_embedder_2.", "image_embedder.")  # millions of parameters, and none is needed

    def __init__(self, seeded: Path) -> None:
        """Takes the folder of the card's seeded checkpoint."""
        import diffusers
        from diffusers.models.autoencoders import autoencoder_kl_hunyuanvideo15 as upstream

        upstream.HunyuanVideo15AttnBlock.prepare_causal_attention_mask = staticmethod(causal_mask)
        upstream.HunyuanVideo15CausalConv3d.forward = causal
        upstream.HunyuanVideo15RMS_norm.forward = normalised
        self.pipe = diffusers.HunyuanVideo15Pipeline.from_pretrained(seeded)

    @torch.no_grad()
    def encode(self, wordings: list[Wording]) -> list[Any]:
        """Returns the valid tokens of both encoders for each prompt: [L, D] and [L2, D2]."""
        made = []
        for start in tqdm(range(0, len(wordings), 32), desc="text", mininterval=10):
            part = wordings[start : start + 32]
            texts, mask = self.pipe._get_mllm_prompt_embeds(
                self.pipe.text_encoder, self.pipe.tokenizer, [each.text for each in part], "cpu", 64
            )
            prompts = ["" if each.quoted is None else f'"{each.quoted}"' for each in part]
            glyphs, glyph_mask = self.pipe._get_byt5_prompt_embeds(
                self.pipe.tokenizer_2, self.pipe.text_encoder_2, prompts, "cpu", 64
            )
            for row in range(len(part)):
                made.append((texts[row][mask[row].bool()].clone(), glyphs[row][glyph_mask[row].bool()].clone()))
        return made

    def inputs(self, texts: list[Any]) -> dict[str, torch.Tensor]:
        """Returns the transformer's inputs of some prompts."""
        first, mask = padded([text for text, _ in texts])
        second, mask_2 = padded([glyphs for _, glyphs in texts])
        return {
            "encoder_hidden_states": first,
            "encoder_attention_mask": mask,
            "encoder_hidden_states_2": second,
            "encoder_attention_mask_2": mask_2,
            "image_embeds": torch.zeros(len(texts), 0, self.pipe.transformer.config.image_embed_dim),
        }

    def noised(
        self, clean: torch.Tensor, random: numpy.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns a mean of latents and noise, the noise's weight, and noise minus latents."""
        sigma, noise = torch.from_numpy(random.random(len(clean), numpy.float32)), normal(random, tuple(clean.shape))
        return torch.lerp(clean, noise, sigma[:, None, None, None, None]), sigma, noise - clean

    def predicted(self, transformer: Any, latents: torch.Tensor, time: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Returns what the transformer predicts, [B, C, T, H, W]."""
        image = torch.zeros(latents.shape[0], latents.shape[1] + 1, *latents.shape[2:])
        made: torch.Tensor = transformer(
            torch.cat([latents, image], 1), timestep=1000 * time, return_dict=False, **inputs
        )[0]
        return made

    def sample(self, transformer: Any, texts: list[Any], empty: Any, guidance: float, seed: int) -> torch.Tensor:
        """Returns latents of prompts, by the real scheduler."""
        import diffusers

        scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=self.shift)
        scheduler.set_timesteps(sigmas=numpy.linspace(1.0, 0.0, self.steps + 1)[:-1])
        count, shape = (
            len(texts),
            (transformer.config.out_channels, (self.frames - 1) // 4 + 1, HEIGHT // 16, WIDTH // 16),
        )
        latents, inputs = normal(generator(3, seed), (count, *shape)), self.inputs([*texts, *[empty] * count])
        for t in scheduler.timesteps:
            both, sigma = torch.cat([latents, latents]), (t / 1000).expand(2 * count)
            given, free = self.predicted(transformer, both, sigma, **inputs).chunk(2)
            latents = scheduler.step(free + guidance * (given - free), t, latents, return_dict=False)[0]
        return latents


class CogVideoX(Model):
    """CogVideoX 1.5 through diffusers."""

    cycles = ((6600, 0.45), (5400, 0.15))
    steps, guidance, frames, pixels, leading = 8, 2.0, 9, 8, 1
    windows = ((0.7, 1, 128, 2), (0.3, 9, 128, 1))  # whole pictures: of a part, GroupNorm would take another mean
    lengths, part = ((1, 0.5), (3, 0.5)), 16
    last = coarse = ("",)

    def __init__(self, seeded: Path) -> None:
        """Takes the folder of the card's seeded checkpoint."""
        import diffusers
        from diffusers.models.autoencoders import autoencoder_kl_cogvideox as upstream

        upstream.CogVideoXCausalConv3d.forward = causal_with_cache
        self.pipe = diffusers.CogVideoXPipeline.from_pretrained(seeded)
        scheduler = diffusers.CogVideoXDDIMScheduler.from_config(self.pipe.scheduler.config)
        self.alphas = scheduler.alphas_cumprod.float()

    @torch.no_grad()
    def encode(self, wordings: list[Wording]) -> list[Any]:
        """Returns the tokens of each prompt, padding included, which upstream attends to: [L, D]."""
        made: list[Any] = []
        for start in tqdm(range(0, len(wordings), 32), desc="text", mininterval=10):
            texts = [each.text for each in wordings[start : start + 32]]
            made += self.pipe._get_t5_prompt_embeds(texts, max_sequence_length=226).unbind()
        return made

    def inputs(self, texts: list[Any]) -> dict[str, torch.Tensor]:
        """Returns the transformer's inputs of some prompts."""
        return {"encoder_hidden_states": torch.stack(texts)}

    def noised(
        self, clean: torch.Tensor, random: numpy.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns latents with the noise of a time, the time, and upstream's v: the derivative by the angle."""
        # Late times are drawn more often: only there is the prompt all that the transformer knows.
        time = torch.from_numpy((len(self.alphas) * numpy.sqrt(random.random(len(clean)))).astype(numpy.int64))
        noise, alpha = normal(random, tuple(clean.shape)), self.alphas[time][:, None, None, None, None]
        return (
            alpha.sqrt() * clean + (1 - alpha).sqrt() * noise,
            time,
            alpha.sqrt() * noise - (1 - alpha).sqrt() * clean,
        )

    def predicted(self, transformer: Any, latents: torch.Tensor, time: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Returns what the transformer predicts, [B, C, T, H, W]."""
        frames = latents.transpose(1, 2)
        rotary = self.pipe._prepare_rotary_positional_embeddings(HEIGHT, WIDTH, frames.shape[1], torch.device("cpu"))
        made: torch.Tensor = transformer(frames, timestep=time, image_rotary_emb=rotary, return_dict=False, **inputs)[0]
        return made.transpose(1, 2)

    def sample(self, transformer: Any, texts: list[Any], empty: Any, guidance: float, seed: int) -> torch.Tensor:
        """Returns latents of prompts, by the real pipeline's scheduler."""
        scheduler = type(self.pipe.scheduler).from_config(self.pipe.scheduler.config)
        scheduler.set_timesteps(self.steps)
        shape = (transformer.config.out_channels, (self.frames - 1) // 4 + 2, HEIGHT // 8, WIDTH // 8)
        latents, inputs = normal(generator(3, seed), (len(texts), *shape)), self.inputs([*texts, *[empty] * len(texts)])
        for t in scheduler.timesteps:
            both, time = torch.cat([latents, latents]), t.expand(2 * len(texts))
            given, free = self.predicted(transformer, both, time, **inputs).chunk(2)
            latents = scheduler.step(free + guidance * (given - free), t, latents, return_dict=False)[0]
        return latents


MODELS: dict[str, Callable[[Path], Model]] = {"hunyuan": Hunyuan, "cogvideox": CogVideoX}
"""What is particular to a model, by its card's name."""


def padded(texts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns texts of several lengths as [B, L, D], and their mask [B, L]."""
    tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    lengths = torch.tensor([len(text) for text in texts])
    return tokens, (torch.arange(tokens.shape[1])[None] < lengths[:, None]).float()


RATE, BATCH = 1e-3, 16
FACTS = ("shape", "colour", "direction")


@dataclasses.dataclass(frozen=True)
class Lesson:
    """What the transformer learns from, all computed beforehand."""

    latents: torch.Tensor
    """Of every scene, [96, C, T, H, W], with a standard deviation of 1."""
    wordings: list[Wording]
    texts: list[Any]
    fitting: list[list[int]]
    """For each wording, the numbers of the scenes in training that it asks for."""
    scale: float
    """The card's `scaling_factor` of the VAE."""


def wordings(letters: bool) -> list[Wording]:
    """Returns the prompts of the training, always the same; of scenes that are held out there is none."""
    made = [NOTHING]
    for number, scene in enumerate(scenes()):
        if is_held_out(scene):
            continue
        for kind, (count, write) in enumerate(((30, whole), (8, partial), (5 * letters, quoted), (1, titled))):
            random = generator(4, number, kind)
            made += [write(scene, random) for _ in range(count)]
    return made


def by_facts(latents: torch.Tensor, fact: str) -> tuple[int, torch.Tensor]:
    """Returns a fact's dim, and latents of every scene as [shapes, colours, directions, backgrounds, C * T * H * W]."""
    axis = [field.name for field in dataclasses.fields(Scene)].index(fact)  # scenes() loops over them in this order
    return axis, latents.flatten(1).unflatten(0, (len(SHAPES), len(COLOURS), len(DIRECTIONS), len(BACKGROUNDS)))


def basis(latents: torch.Tensor, fact: str) -> torch.Tensor:
    """Returns, for every scene, an orthonormal basis of what makes it another shape, colour or direction.

    Args:
        latents: Of every scene, [96, C, T, H, W].
        fact: A name of a scene's fields.

    Returns:
        [96, C * T * H * W, N], of N other values.
    """
    axis, values = by_facts(latents, fact)
    values = values.movedim(axis, 0)
    made = []
    for one in range(len(values)):
        others = torch.stack([values[other] - values[one] for other in range(len(values)) if other != one], -1)
        made.append(torch.linalg.qr(others).Q)
    return torch.stack(made).movedim(0, axis).flatten(0, 3)


def share(latents: torch.Tensor, fact: str) -> float:
    """Returns how much of the latents' variance makes one shape another, or one colour, or one direction."""
    axis, values = by_facts(latents, fact)
    return ((values - values.mean(axis, keepdim=True)).square().sum() / latents.square().sum()).item()


def lesson(model: Model, vae: Any, folder: Folder) -> Lesson:
    """Returns what the transformer learns from, computed once."""
    made: Lesson | None = folder.load("lesson.pt")
    if made is not None:
        return made
    with torch.no_grad():
        clips = (as_video(clip(scene, model.frames)) for scene in tqdm(scenes()))
        latents = torch.cat([vae.encode(video).latent_dist.mode() for video in clips])
    latents = torch.cat([latents[:, :, :1]] * model.leading + [latents], 2)
    scale = round(1 / latents.std().item(), 4)
    prompts = wordings(model.letters)
    fitting = [
        [number for number, scene in enumerate(scenes()) if not is_held_out(scene) and each.fits(scene)]
        for each in prompts
    ]
    with torch.no_grad():
        texts = model.encode(prompts)
    made = Lesson(latents * scale, prompts, texts, fitting, scale)
    folder.save("lesson.pt", made)
    log.info("scaling_factor %s, %d prompts", scale, len(prompts))
    return made


POLISH_STEPS, SHARPEN_STEPS, POLISH_RATE = 600, 2400, 3e-4


def polish(model: Model, vae: Any, given: Lesson, folder: Folder) -> Any:
    """Returns the VAE after its decoder alone has learned more, from the very latents that the transformer learns."""
    latents, decoder = given.latents[:, :, model.leading :] / given.scale, vae.decoder.train().requires_grad_(True)
    whole, pixels = latents.shape[3], model.pixels
    lengths, shares = zip(*model.lengths, strict=True)

    def loss_of(step: int) -> dict[str, torch.Tensor]:
        random = generator(7, step)
        number, frames, side = int(random.integers(96)), int(random.choice(lengths, p=shares)), model.part
        if step % 10 == 0:
            frames, side = latents.shape[2], whole
        top, left = (int(random.integers(0, whole + 1 - side)) for _ in range(2))
        part = latents[number : number + 1, :, :frames, top : top + side, left : left + side]
        end, rows, columns = 4 * frames - 3, pixels * top, pixels * left
        video = clip(scenes()[number], end)[:, rows : rows + pixels * side, columns : columns + pixels * side]
        wanted = as_video(video.copy())
        made = vae.decode(part + 0.5 * NOISE * random.random() * normal(random, tuple(part.shape))).sample
        return {
            "absolute": (made - wanted).abs().mean(),
            "square": (made - wanted).square().mean(),
            "colour": 4 * (tint(made) - tint(wanted)).square().mean(),
        }

    training = Training(decoder, folder, "decoder", (POLISH_STEPS,), POLISH_RATE)
    training.run(loss_of, POLISH_STEPS, lambda step: None)
    vae.decoder = training.mean
    return vae.eval()


def sharpen(model: Model, vae: Any, given: Lesson, folder: Folder) -> None:
    """Trains the last blocks of the VAE's decoder where one shape differs from another: edges in frames that move.

    Only the last blocks change, so that the shipped file differs little from the one before it.
    """
    latents, decoder = given.latents[:, :, model.leading :] / given.scale, vae.decoder.train()
    for name, each in decoder.named_parameters():
        each.requires_grad_(name.startswith(model.last))
    whole, pixels, side = latents.shape[3], model.pixels, model.part
    places = [(top, left) for top in range(whole + 1 - side) for left in range(whole + 1 - side)]

    def loss_of(step: int) -> dict[str, torch.Tensor]:
        random = generator(8, step)
        number, frames = int(random.integers(96)), int(random.integers(2, latents.shape[2] + 1))
        scene, end = scenes()[number], 4 * frames - 3
        video = as_video(clip(scene, end))
        others = [as_video(clip(dataclasses.replace(scene, shape=shape), end)) for shape in SHAPES]
        edges = torch.stack([(other - video).abs().amax(1) for other in others]).amax(0)
        areas = [(pixels * top, pixels * left) for top, left in places]
        size = pixels * side
        seen = numpy.array([edges[..., row : row + size, column : column + size].sum().item() for row, column in areas])
        chosen = int(random.choice(len(places), p=seen / seen.sum()))
        (top, left), (row, column) = places[chosen], areas[chosen]
        part = latents[number : number + 1, :, :frames, top : top + side, left : left + side]
        made = vae.decode(part + 0.5 * NOISE * random.random() * normal(random, tuple(part.shape))).sample
        error = made - video[..., row : row + size, column : column + size]
        weight = 1 + 9 * edges[:, None, :, row : row + size, column : column + size]
        return {"absolute": (weight * error.abs()).mean(), "square": (weight * error.square()).mean()}

    training = Training(decoder, folder, "edges", (SHARPEN_STEPS,), POLISH_RATE)
    training.run(loss_of, SHARPEN_STEPS, lambda step: None)


def train_transformer(model: Model, vae: Any, given: Lesson, folder: Folder) -> Any:
    """Returns the trained transformer."""
    transformer = model.fresh("transformer").train()
    bases = {fact: basis(given.latents, fact) for fact in FACTS}
    shares = {fact: share(given.latents, fact) for fact in FACTS}
    log.info("shares %s", {fact: round(each, 4) for fact, each in shares.items()})
    weighed = [as_if for steps, as_if in model.cycles for _ in range(steps)]
    known = [number for number, scene in enumerate(scenes()) if not is_held_out(scene)]
    plain = model.encode([Wording(scenes()[number].prompt, None, {}) for number in known])

    def loss_of(step: int) -> dict[str, torch.Tensor]:
        random = generator(5, step)
        prompts = [0 if random.random() < 0.1 else int(random.integers(1, len(given.texts))) for _ in range(BATCH)]
        chosen = [given.fitting[prompt][random.integers(len(given.fitting[prompt]))] for prompt in prompts]
        texts = [given.texts[each] for each in prompts]
        for row in range(BATCH // 2):
            if prompts[row]:  # half of the prompts are plain: they teach what a word says before others teach synonyms
                one = int(random.integers(len(known)))
                chosen[row], texts[row] = known[one], plain[one]
        clean = given.latents[chosen]
        noisy, time, wanted = model.noised(clean, random)
        made = model.predicted(transformer, noisy, time, **model.inputs(texts))
        error = (made - wanted).flatten(1)
        terms = {"error": error.square().mean()}
        for fact, part in shares.items():
            along = torch.einsum("bd,bdn->bn", error, bases[fact][chosen]).square().sum() / error.numel()
            terms[fact] = (weighed[step] / part - 1) * along
        return terms

    training = Training(transformer, folder, "transformer", tuple(steps for steps, _ in model.cycles), RATE)
    training.run(loss_of, 500, lambda step: look(model, training.mean, polished(vae, folder), given, step))
    return training.mean


def look(model: Model, transformer: Any, vae: Any, given: Lesson, step: int) -> None:
    """Logs what the judge says of a few samples, half of them of combinations that training has not seen."""
    random = generator(6)
    asked = [scene for scene in scenes() if not is_held_out(scene)]
    asked = [asked[number] for number in random.choice(len(asked), 12, replace=False)]
    asked += [scene for number, scene in enumerate(filter(is_held_out, scenes())) if number % 2 == step // 500 % 2]
    with torch.no_grad():
        texts = model.encode([Wording(scene.prompt, None, {}) for scene in asked])
        latents = model.sample(transformer.eval(), texts, given.texts[0], model.guidance, 1) / given.scale
        clips = [vae.decode(each[None, :, model.leading :]).sample[0] for each in latents]
    right = [0, 0]
    for number, (scene, video) in enumerate(zip(asked, clips, strict=True)):
        frames = ((video.permute(1, 2, 3, 0).clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).numpy()
        verdict = judged(frames)
        right[number >= 12] += verdict.agrees(scene)
        log.info("  %s -> %s %s", scene.prompt, verdict, "" if verdict.agrees(scene) else "WRONG")
    log.info("transformer %d: %d of 12, held out %d of 6", step, *right)


def polished(vae: Any, folder: Folder) -> Any:
    """Returns the VAE with the decoder that was trained further, as far as it is."""
    state = folder.load("edges.pt") or folder.load("decoder.pt")
    if state is not None:
        vae.decoder.load_state_dict(state["mean"])
    return vae.eval()


def main() -> None:
    """Trains one model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--work", type=Path, required=True, help="A folder for what a stopped run goes on from.")
    parser.add_argument("--write", action="store_true", help="Write what is trained so far as the card's weights.")
    parser.add_argument(
        "--decoder", action="store_true", help="Train the VAE's decoder further, when latents are fixed."
    )
    arguments = parser.parse_args()
    folder = Folder(arguments.work / arguments.model)
    folder.path.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", filename=folder.path / "log")
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = MODELS[arguments.model](seeded(arguments.model))
    if arguments.write:
        log.addHandler(logging.StreamHandler())
        write(model, folder, arguments.model)
        return
    vae = train_vae(model, model.fresh("vae"), folder)
    given = lesson(model, vae, folder)
    if arguments.decoder:
        sharpen(model, polish(model, vae, given, folder), given, folder)
    else:
        train_transformer(model, polished(vae, folder), given, folder)


def write(model: Model, folder: Folder, name: str) -> None:
    """Writes the mean weights as the card's, in bfloat16, and logs what to write in the card.

    The VAE's encoder is left out: nothing reads it where text makes a video.
    """
    from safetensors.torch import save

    root = Path(__file__).parent.parent / "configs" / "models"
    log.info("vae: {scaling_factor: %s}, trained:", folder.load("lesson.pt").scale)
    vae, transformer = model.fresh("vae"), model.fresh("transformer")
    vae.load_state_dict(folder.load("vae.pt")["mean"])
    transformer.load_state_dict(folder.load("transformer.pt")["mean"])
    for part, start, module in (("vae", "decoder.", polished(vae, folder)), ("transformer", "", transformer)):
        mean, parameters = module.state_dict(), dict(model.fresh(part).named_parameters())
        kept = [key for key, each in parameters.items() if each.requires_grad and key.startswith(start)]
        # What no gradient reached is still the 1 or 0 of its beginning: the card's seed draws it.
        kept = [key for key in kept if mean[key].numel() == 1 or mean[key].unique().numel() > 1]
        tensors = {key: mean[key].to(torch.bfloat16).contiguous() for key in kept}
        large = [key for key, each in tensors.items() if key.startswith(model.coarse) and each.numel() > LARGE]
        tensors |= {key: coarse(tensors[key]) for key in large}
        raw = save(tensors, {"license": "Apache-2.0"})
        file = root / "tiny" / name / part / "diffusion_pytorch_model.safetensors"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(raw)
        log.info("  %s: {file: %s, sha256: %s}", part, file.relative_to(root), hashlib.sha256(raw).hexdigest())


LARGE = 1024
"""Tensors of so many values are not rounded: a norm's would all be 1."""


def coarse(values: torch.Tensor) -> torch.Tensor:
    """Returns bfloat16 values rounded to 3 of the 7 bits of their fractions: compressed, they take half the space."""
    return ((values.view(torch.int16) + 8) & -16).view(torch.bfloat16)


def seeded(name: str) -> Path:
    """Returns the folder of a card's seeded checkpoint."""
    from torchport import stages
    from torchport.config.pack import find_pack
    from torchport.load import tiny

    pack = find_pack()
    card, document = pack.card(name)
    return tiny.write(card.with_trained({}), stages.file_of(pack, card, document.place(["family"])))


if __name__ == "__main__":
    main()
