"""Trains the tiny weights of a card to draw scenes: first the VAE, then the transformer.

    python tools/train_tiny.py hunyuan --work DIR

Upstream's own classes in the card's `tiny:` configuration, in plain PyTorch. Text encoders stay as they are drawn from the
card's seed. Everything that is random comes from the seed and the number of the step, so a run that was stopped goes on
from DIR as if it had not been.

Shapes: B batch, C channels, T latent frames, H W latent height and width, F frames, L text tokens, D features.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import yaml
from tqdm import tqdm

from torchport.scenes.scene import DIRECTIONS, FRAMES, HEIGHT, WIDTH, Scene, clip, is_held_out, scenes

log = logging.getLogger("train_tiny")
SEED = 20251120
SAVE_SECONDS = 180.0


@dataclasses.dataclass(frozen=True)
class Folder:
    """Where a run keeps what it needs to go on."""

    path: Path

    def save(self, name: str, value: Any) -> None:
        """Writes a file whole or not at all."""
        self.path.mkdir(parents=True, exist_ok=True)
        partial = self.path / f"{name}.partial"
        torch.save(value, partial)
        os.replace(partial, self.path / name)

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

    def __init__(self, module: torch.nn.Module, folder: Folder, name: str, steps: int, rate: float) -> None:
        self.module, self.folder, self.name, self.steps, self.rate = module, folder, name, steps, rate
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
        """Returns the learning rate: a short rise, then half a cosine."""
        rise = min(1.0, (step + 1) / 100)
        return self.rate * rise * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / self.steps)))

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
            if self.done % 50 == 0:
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


VAE_STEPS, VAE_RATE, NOISE, PULL = 1300, 2.5e-3, 0.4, 1e-3
"""`NOISE` is added to latents, so that shapes stay apart in them; `PULL` keeps them small, or the noise would be nothing."""
def windows(step: int) -> torch.Tensor:
    """Returns parts of clips as [B, 3, F, H, W]: most of them small, for they cost less."""
    random = generator(1, step)
    kind = random.random()
    frames, side, count = (5, 64, 2) if kind < 0.75 else (9, 64, 1) if kind < 0.95 else (13, 80, 1)
    chosen = [scenes()[number] for number in random.integers(0, 96, count)]
    return torch.cat([window(scene, frames, side, random) for scene in chosen])


def window(scene: Scene, frames: int, side: int, random: numpy.random.Generator) -> torch.Tensor:
    """Returns a part of a clip as [1, 3, F, H, W]; it begins at a border between latents and has some of the shape."""
    offset = 4 * int(random.integers(0, (FRAMES - frames) // 4 + 1))
    dx, dy = DIRECTIONS[scene.direction]
    x = WIDTH / 2 + (4 * offset + 2 * frames) * dx - side / 2 + 16 * int(random.integers(-1, 2))
    y = HEIGHT / 2 + (4 * offset + 2 * frames) * dy - side / 2 + 16 * int(random.integers(-1, 2))
    left, top = (int(min(max(round(value / 16) * 16, 0), WIDTH - side)) for value in (x, y))
    return as_video(clip(scene, frames, offset)[:, top : top + side, left : left + side].copy())


def causal_mask(frames: int, area: int, dtype: Any, device: Any, batch_size: int | None = None) -> torch.Tensor:
    """Returns upstream's mask of the VAE's attention without the dim of clips: with it, it fits one clip only."""
    frame = torch.arange(frames).repeat_interleave(area)
    return torch.zeros(len(frame), len(frame)).masked_fill(frame[None] > frame[:, None], -math.inf)


def folded(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Returns upstream's causal convolution as one over pictures, whose channels are those of three frames.

    One thread computes it at three times the speed: for few clips, PyTorch's convolution over three dims is a slow one.
    """
    padded = torch.nn.functional.pad(hidden_states, self.time_causal_padding, mode=self.pad_mode)
    weight, count = self.conv.weight, padded.shape[2] - self.conv.weight.shape[2] + 1
    if weight.shape[2] == 1:
        made: torch.Tensor = self.conv(padded)
        return made
    frames = torch.cat([padded[:, :, at : at + count] for at in range(weight.shape[2])], 1).transpose(1, 2)
    pictures = torch.nn.functional.conv2d(frames.flatten(0, 1), weight.transpose(1, 2).flatten(1, 2), self.conv.bias)
    return pictures.unflatten(0, (len(padded), count)).transpose(1, 2)


def normalised(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Returns upstream's RMS norm, which one thread computes slowly through a vector's norm."""
    inverse: torch.Tensor = torch.rsqrt(x.square().sum(1 if self.channel_first else -1, keepdim=True) + 1e-12)
    return x * inverse * (self.gamma * self.scale) + self.bias


def train_vae(vae: Any, folder: Folder) -> Any:
    """Returns the trained VAE."""

    def loss_of(step: int) -> dict[str, torch.Tensor]:
        video = windows(step)
        latents = vae.encode(video).latent_dist.mode()
        noise = normal(generator(2, step), tuple(latents.shape))
        made = vae.decode(latents + NOISE * noise).sample
        return {
            "absolute": (made - video).abs().mean(),
            "square": (made - video).square().mean(),
            "pull": PULL * latents.square().mean(),
        }

    training = Training(vae, folder, "vae", VAE_STEPS, VAE_RATE)
    training.run(loss_of, VAE_STEPS, lambda step: None)
    return training.mean.eval()


def card_of(model: str) -> dict[str, Any]:
    """Returns a card as it is written."""
    file = Path(__file__).parent.parent / "configs" / "models" / f"{model}.yaml"
    card: dict[str, Any] = yaml.safe_load(file.read_text())
    return card


def main() -> None:
    """Trains one model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=["hunyuan"])
    parser.add_argument("--work", type=Path, required=True, help="A folder for what a stopped run goes on from.")
    arguments = parser.parse_args()
    folder = Folder(arguments.work / arguments.model)
    folder.path.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", filename=folder.path / "log")
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    import diffusers

    card = card_of(arguments.model)
    from diffusers.models.autoencoders import autoencoder_kl_hunyuanvideo15 as upstream

    upstream.HunyuanVideo15AttnBlock.prepare_causal_attention_mask = staticmethod(causal_mask)
    upstream.HunyuanVideo15CausalConv3d.forward = folded
    upstream.HunyuanVideo15RMS_norm.forward = normalised
    vae = diffusers.AutoencoderKLHunyuanVideo15(**card["tiny"]["components"]["vae"])
    train_vae(vae, folder)


if __name__ == "__main__":
    main()
