"""A port of an upstream that nobody has: a package `up` with one network, and a pack with its card and family."""

import importlib
import sys
import textwrap
from pathlib import Path

CARD = """\
model: small
title: A network of one layer
family: up/stages
artefacts: small
upstream: {up: "*"}
checkpoint: tiny
demo: configs/small.yaml
patches:
  denoise: []
components:
  net: {class: "up.model:Net", dtype: float32}
frames: {multiple_of: 1, plus: 0}
size_multiple_of: 1
strategies:
  whole:
    mesh: {tp: 8}
    weights: {net: [{match: '.*', spec: replicate}]}
    inputs: {net: [{match: 'x', spec: [tp]}]}
tiny: {seed: 0, scale: 1.0, components: {net: {}}}
"""

JOB = """\
{height: 4, width: 4, frames: 1, fps: 8, steps: 1, guidance_scale: 1.0,
 machine: "cpu:8", strategy: whole, checkpoint: tiny}
"""

MODEL = """\
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config


class Net(ModelMixin, ConfigMixin):
    @register_to_config
    def __init__(self, width: int = 4):
        super().__init__()
        self.layer = torch.nn.Linear(width, width)

    def forward(self, x):
        y = self.layer(x)
        return y
"""

FAMILY = """\
import torch

from torchport.stages.family import Stage

TAKES_IMAGE = False
VARIANTS = ()


def batch(guidance_scale):
    return 1


def arrange_tiny(make, folder):
    make("net").save_pretrained(folder / "net")


def encode(parts, call, settings, steps):
    return {"x": torch.ones(8, 4)}


def denoise(parts, call, settings, steps, x):
    return {"latents": call(x=x)}


def call(module, settings, x):
    return module(x)


STAGES = (
    Stage("encode", encode, ()),
    Stage("denoise", denoise, (), needs=("encode",), network="net", call=call),
)
"""


class SmallPort:
    """A pack in `root / "pack"`, and its upstream in `root / "site"`, which is on the search path."""

    def __init__(self, root: Path, monkeypatch) -> None:
        self.pack, self.site, self.monkeypatch = root / "pack", root / "site", monkeypatch
        monkeypatch.syspath_prepend(str(self.site))
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        self.before = set(sys.modules)
        self.upstream("__init__.py", "")
        self.upstream("model.py", MODEL)
        self.write("configs/models/small.yaml", CARD)
        self.write("configs/small.yaml", JOB)
        self.write("patches/up/stages.py", FAMILY)

    def write(self, file: str, text: str) -> Path:
        path = self.pack / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def upstream(self, file: str, text: str) -> Path:
        path = self.site / "up" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        return path

    def change(self, file: str, old: str, new: str) -> None:
        """Exchanges text of a file of the pack, or of upstream."""
        path = next(path for path in (self.pack / file, self.site / file) if path.exists())
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def forget(self) -> None:
        """Forgets the modules that a run has imported: the next one reads them again."""
        for name in set(sys.modules) - self.before:
            if name.partition(".")[0] in ("up", "torchport_patches"):
                del sys.modules[name]
