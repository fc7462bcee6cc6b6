"""A pack whose upstream has plain modules and its own files: `.pth` under other names, several components to a file."""

import importlib
import sys
import textwrap
from pathlib import Path

MODEL = """
import torch


class Block(torch.nn.Module):
    def __init__(self, dim, drop):
        super().__init__()
        self.drop = drop
        self.up = torch.nn.Linear(dim, 2 * dim)
        self.down = torch.nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(x)))


class Net(torch.nn.Module):
    def __init__(self, dim, depth, channels=4, heads=2, drop=0.1):
        super().__init__()
        rates = torch.linspace(0, drop, 100)
        self.into = torch.nn.Linear(channels, dim)
        self.blocks = torch.nn.ModuleList(Block(dim, rates[n].item()) for n in range(depth))
        self.out = torch.nn.Linear(dim, channels)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, dim), persistent=False)

    def forward(self, x, context):
        y = self.into(x) * self.scale + context
        for block in self.blocks:
            y = block(y)
        return self.out(y)


class Text(torch.nn.Module):
    def __init__(self, dim, vocabulary=256):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, dim)

    def forward(self, tokens):
        return self.embedding(tokens).mean(1, keepdim=True)


class Options:
    def __init__(self, channels, dtype):
        self.channels, self.dtype = channels, dtype


class Decoder(torch.nn.Module):
    def __init__(self, options):
        super().__init__()
        self.to_pixels = torch.nn.Linear(options.channels, 3, dtype=options.dtype)

    def forward(self, z):
        return self.to_pixels(z).sigmoid()
"""

BUILD = """
def decoder(channels=4):
    import torch
    from up.model import Decoder, Options

    return Decoder(Options(channels, torch.float32))
"""

FAMILY = """
import torch

from torchport.stages.family import Stage

TAKES_IMAGE = False
VARIANTS = ()
arrange_tiny = None


def batch(guidance_scale):
    return 1


def encode(parts, call, settings, steps):
    tokens = torch.tensor([list(settings.prompt.encode())])
    with torch.no_grad():
        return {"context": parts["text"](tokens)}


def noise_like(parts, settings):
    channels = parts["net"].config["channels"]
    return torch.zeros(1, settings.frames * settings.height * settings.width // 64, channels)


def denoise(parts, call, settings, steps, *, context):
    generator = torch.Generator().manual_seed(settings.seed)
    latents = torch.randn(noise_like(parts, settings).shape, generator=generator)
    for number in steps.track(range(settings.steps), done=0, total=settings.steps):
        with torch.no_grad():
            latents = latents - call(x=latents, context=context) / settings.steps
        steps.finished(number + 1, {"latents": latents})
    return {"latents": latents}


def context_like(parts, settings):
    return {"context": torch.zeros(1, 1, parts["net"].config["dim"])}


def latents_like(parts, settings):
    shape = (1, settings.frames * settings.height * settings.width // 64, parts["decoder"].config["channels"])
    return {"latents": torch.zeros(shape)}


def decode(parts, call, settings, steps, *, latents):
    with torch.no_grad():
        pixels = call(z=latents)
    pixels = pixels.reshape(1, settings.frames, settings.height // 8, settings.width // 8, 3).permute(0, 1, 4, 2, 3)
    return {"frames": pixels.repeat_interleave(8, -1).repeat_interleave(8, -2).float()}


SIZES = ("height", "width", "frames", "dtypes")
STAGES = (
    Stage("encode", encode, ("prompt", "dtypes"), parts=("text",)),
    Stage("denoise", denoise, ("seed", "steps", *SIZES), needs=("encode",), network="net", like=context_like),
    Stage("decode", decode, SIZES, needs=("denoise",), network="decoder", like=latents_like),
)
"""

CARD = r"""
model: plain
title: Plain modules
family: up/stages
artefacts: plain
upstream: {up: "*"}
checkpoint: somebody/plain
demo: configs/small.yaml
patches: {encode: [], denoise: [], decode: []}
components:
  text:
    class: up.model:Text
    folder: .
    file: net.pth
    key: parts.text
    dtype: float32
    published: {dim: 16}
  net:
    class: up.model:Net
    folder: .
    file: net.pth
    key: parts.ema
    rename:
      - {match: 'module\.layer(\d+)_(up|down)\.(.*)', to: 'blocks.\1.\2.\3'}
      - {match: 'module\.(.*)', to: '\1'}
    unread: [step]
    dtype: float32
    published: {dim: 16, depth: 2}
  decoder:
    class: up.model:Decoder
    build: build.py:decoder
    folder: .
    file: decoder.safetensors
    dtype: float32
frames: {multiple_of: 1, plus: 0}
size_multiple_of: 8
strategies:
  tp:
    mesh: {tp: 8}
    divides: {tp: net.dim}
    weights:
      net:
        - {match: 'blocks\.\d+\.up\..*', spec: [tp]}
        - {match: 'blocks\.\d+\.down\.weight', spec: [null, tp]}
        - {match: '.*', spec: replicate}
      decoder: [{match: '.*', spec: replicate}]
    inputs:
      net: [{match: '.*', spec: replicate}]
      decoder: [{match: 'z', spec: [null, tp]}]
tiny:
  seed: 7
  scale: 1.0
  components:
    text: {dim: 16}
    net: {dim: 16, depth: 2}
"""

JOB = """
height: 16
width: 16
frames: 2
fps: 8
steps: 2
guidance_scale: 1.0
machine: cpu:8
strategy: tp
checkpoint: tiny
"""


GPU_CODE = """
import torch
import flashy

DEVICE = torch.cuda.current_device()
"""

FIXES = """
- id: up.flashy
  target: flashy:attention
  stub: {package: flashy, importers: [up.model]}
  why: A package for GPUs.
  reported: "none: correct on a GPU"
  until: never
  fits: {torch: "*"}
  equivalence: bitwise
  plumbing: true
- id: up.guard
  target: up.model:Net.forward
  rewrite:
    match: |
      if y.abs().max().item() > 1e6:
          raise ValueError("too large")
    put: fixes.py:unguarded
    gives: []
  why: Asks for the value of a tensor while it is traced.
  reported: "none: correct on a GPU"
  until: never
  fits: {torch: "*"}
  equivalence: {algebraic: "the same, but for an error"}
  must_be_called: [denoise]
"""


class PlainPack:
    """A pack at `root`, and its upstream `up` on the search path."""

    def __init__(self, tmp_path: Path, monkeypatch) -> None:
        self.root = tmp_path / "pack"
        self.write("patches/up/stages.py", FAMILY)
        self.write("patches/up/build.py", BUILD)
        self.write("configs/models/plain.yaml", CARD)
        self.write("configs/small.yaml", JOB)
        self.write("../site/up/__init__.py", "")
        self.write("../site/up/model.py", MODEL)
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        importlib.invalidate_caches()

    def write(self, file: str, text: str) -> None:
        """Writes a file of the pack."""
        path = self.root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))

    def change(self, text: str, new: str, file: str = "configs/models/plain.yaml") -> None:
        """Replaces some text in a file, which must have it once."""
        path = self.root / file
        before = path.read_text()
        assert before.count(text) == 1, text
        path.write_text(before.replace(text, new))

    def line(self, text: str) -> str:
        """Returns the place in the card of the line that has some text."""
        lines = (self.root / "configs/models/plain.yaml").read_text().splitlines()
        number = next(n for n, line in enumerate(lines, 1) if text in line)
        return f"configs/models/plain.yaml:{number}"

    def write_gpu_code(self) -> None:
        """Makes the upstream ask for CUDA and an absent package, and the value of a tensor; the pack patches it."""
        self.change("\nimport torch\n", GPU_CODE, "../site/up/model.py")
        guard = '        if y.abs().max().item() > 1e6:\n            raise ValueError("too large")\n'
        self.change("        return self.out(y)\n", f"{guard}        return self.out(y)\n", "../site/up/model.py")
        self.write("patches/up/fixes.yaml", FIXES)
        self.write("patches/up/fixes.py", "def unguarded():\n    return None\n")
        listed = "{encode: [*], denoise: [*], decode: [*]}".replace("*", "torch/cuda, up/fixes")
        self.change("{encode: [], denoise: [], decode: []}", listed)

    def close(self) -> None:
        """Forgets the modules that were imported."""
        for name in list(sys.modules):
            if name.partition(".")[0] == "up" or name.startswith("torchport_patches.up"):
                del sys.modules[name]
