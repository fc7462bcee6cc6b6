"""HunyuanVideo-1.5's own package in this process, real or fake, with and without patches: for tests.

The package is imported once, under its patches, as a run does it; leaving the set takes them back, so that afterwards
the same modules are upstream's own, and may be patched again with any subset.

Shapes: B batch, C channels, T H W latents, L text tokens, D features, N image tokens.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import shutil
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import torch
from fakes.hyvideo_cases import (
    CASES,
    FILLS,
    INPUTS,
    LATENTS,
    TINY,
    TINY_VAE,
    WEIGHTS,
    attention_inputs,
    case_of,
    randomised,
    refiner_inputs,
)
from torch import nn

from torchport import compile, patch, shard
from torchport.config import card
from torchport.config.strategy import Rule, WeightRule
from torchport.patch.live import registry

TRANSFORMER = "hyvideo.models.transformers.hunyuanvideo_1_5_transformer"
ATTENTION = "hyvideo.models.transformers.modules.attention"
VAE = "hyvideo.models.autoencoders.hunyuanvideo_15_vae"
PIPELINE = "hyvideo.pipelines.hunyuan_video_pipeline"
FILES = ("hyvideo/parallel", "hyvideo/transformer", "hyvideo/vae")
MODULES = ("hyvideo.commons", "hyvideo.commons.parallel_states", TRANSFORMER, ATTENTION, VAE, PIPELINE)


class Flat(nn.Module):
    """The transformer, called with tensors by name alone: upstream wants two of them in a dict."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, byt5_text_states: Any, byt5_text_mask: Any, **inputs: Any) -> torch.Tensor:
        letters = {"byt5_text_states": byt5_text_states, "byt5_text_mask": byt5_text_mask}
        return self.model(text_states_2=None, extra_kwargs=letters, **inputs)[0]


class Decoding(nn.Module):
    """The VAE's decode, as a module's forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.model.decode(z, return_dict=False)[0]


class World:
    """Upstream's modules in this process.

    Attributes:
        entries: Its patches, and what torchax needs.
        is_locked: Whether there is a lock file, which knows the checkouts' sources.
        rows: The ledger of the import under them.
        set: The patches in force, until others are asked for.
    """

    def __init__(self, folder: Path, patches: Path) -> None:
        self.folder = folder
        self.entries = patch.read(patches, ["torchax", *FILES])
        self.is_locked = (patches / "hyvideo" / "lock.yaml").is_file()
        self.held = contextlib.ExitStack()
        self.set: list[patch.Entry] | None = None
        with quiet(), patch.applied(self.entries) as ledger:
            for name in MODULES:
                with without_torchvision() if name == PIPELINE else contextlib.nullcontext():
                    importlib.import_module(name)
            self.rows = [row for row in ledger.rows() if row["id"].startswith("hyvideo.")]

    def __getitem__(self, module: str) -> types.ModuleType:
        return sys.modules[module]

    @property
    def hyvideo(self) -> list[patch.Entry]:
        """The patches of upstream itself."""
        return [entry for entry in self.entries if entry.upstream == "hyvideo"]

    def without(self, *ids: str) -> list[patch.Entry]:
        """Returns all patches but these."""
        assert set(ids) <= {entry.id for entry in self.entries}
        return [entry for entry in self.entries if entry.id not in ids]

    @contextlib.contextmanager
    def original(self) -> Iterator[None]:
        """Upstream with at most its plumbing patched."""
        with quiet(), torch.no_grad(), self.patched([entry for entry in self.entries if entry.plumbing]):
            yield

    @contextlib.contextmanager
    def bare(self) -> Iterator[None]:
        """Upstream without any patch."""
        self.held.close()
        self.set = None
        assert not registry.digests
        yield

    @contextlib.contextmanager
    def patched(self, entries: list[patch.Entry] | None = None) -> Iterator[patch.Ledger]:
        """Upstream with these patches, or all; the parallel state is asked for anew.

        The set stays in force until another one is asked for: to enter one costs a second, which many tests can share.
        """
        wanted = self.entries if entries is None else entries
        if self.set != wanted:
            self.held.close()
            self.set = None
            self.ledger = self.held.enter_context(patch.applied(wanted))
            self.set = wanted
        states = vars(self["hyvideo.commons.parallel_states"])
        states["__parallel_dims"] = None
        try:
            yield self.ledger
        finally:
            states["__parallel_dims"] = None
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()

    @functools.cached_property
    def model(self) -> nn.Module:
        """The tiny transformer with every parameter drawn: upstream's own initialisation returns zeros."""
        return randomised(self[TRANSFORMER].HunyuanVideo_1_5_DiffusionTransformer(**TINY), 20251121)

    @functools.cached_property
    def vae(self) -> nn.Module:
        """The tiny VAE, likewise; it decodes in tiles."""
        vae = randomised(self[VAE].AutoencoderKLConv3D(**TINY_VAE), 7)
        vae.enable_tiling()
        return vae

    @functools.cached_property
    def expected(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """The original's output for each case, and the same in float64."""
        with self.original():
            return {case: self._expected(case) for case in CASES}

    def _expected(self, case: str) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, static = case_of(case, self.tables)
        eager = Flat(self.model)(**inputs, **static)
        with all_float64():
            wide = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
            exact = Flat(self.model.double())(**wide, **static)
        self.model.float()
        return eager, exact

    @functools.cached_property
    def originals(self) -> dict[str, Any]:
        """What else the original returns: with masks that are full, of the attentions, the refiner and the decoder."""
        inputs, static = case_of("i2v", self.tables)
        assert self.expected  # under the same set
        with self.original():
            full = {name: {**inputs, name: torch.ones_like(inputs[name])} for name in inputs if name.endswith("mask")}
            return {
                **{name: Flat(self.model)(**changed, **static) for name, changed in full.items()},
                "attention": {fill: self.attentions(*attention_inputs(fill)) for fill in FILLS},
                "refiner": self.model.txt_in(**refiner_inputs(self.tables)),
                "decode": self.vae.decode(LATENTS, return_dict=False)[0],
            }

    def attentions(self, pairs: list[Any], mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns joint and refiner attention [B, S, H * D] and [B, L, H * D], as they are now."""
        module, text = self[ATTENTION], [text for _, text in pairs]
        joint = module.sequence_parallel_attention(*pairs, 5, 5, "flash", mask)
        return joint, module.attention(*text, attn_mask=mask.bool())

    def tables(self, sizes: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns upstream's rotary tables [N, D]."""
        return self.model.get_rotary_pos_embed(sizes)

    def compiled(self, ledger: patch.Ledger, mesh: dict[str, int], **config: Any) -> compile.Compiled:
        """Returns the transformer as a program on a mesh: built without storage, with the model's weights placed."""
        with torch.device("meta"):
            meta = self[TRANSFORMER].HunyuanVideo_1_5_DiffusionTransformer(**{**TINY, **config})
        return placed(Flat(meta), Flat(self.model), WEIGHTS, INPUTS, mesh, ledger)

    def under(
        self, ledger: patch.Ledger, strategy: card.Strategy, mesh: dict[str, int], stacks: dict[str, card.Stack]
    ) -> compile.Compiled:
        """Returns the same under a strategy of the card, whose names are the transformer's own."""
        with torch.device("meta"):
            meta = self[TRANSFORMER].HunyuanVideo_1_5_DiffusionTransformer(**TINY)
        weights, activations = (
            [rule.model_copy(update={"match": rf"model\.({rule.match})"}) for rule in rules["transformer"]]
            for rules in (strategy.weights, {"transformer": [], **strategy.activations})
        )
        return placed(
            Flat(meta),
            Flat(self.model),
            weights,
            strategy.inputs["transformer"],
            mesh,
            ledger,
            activations=activations,
            stacks={f"model.{name}": stack for name, stack in stacks.items()},
        )


def placed(
    module: nn.Module,
    weights: nn.Module,
    rules: list[WeightRule],
    inputs: list[Rule],
    mesh: dict[str, int],
    ledger: patch.Ledger | None,
    **options: Any,
) -> compile.Compiled:
    """Returns a module as a program on the first devices, through torchport's own path."""
    count = 1
    for size in mesh.values():
        count *= size
    devices = shard.make_mesh(mesh, jax.devices()[:count])
    tensors = dict(weights.named_parameters()) | dict(weights.named_buffers())
    matched = shard.match(rules, shard.named_shapes(tensors), mesh, "test:1")
    network = compile.Network(
        module, inputs, "hyvideo", place="test:1", precision="highest", gathered=shard.gathered(matched), **options
    )
    weights = shard.place(tensors.items(), matched, devices)
    return compile.Compiled(network, weights, devices, trace=ledger.trace() if ledger is not None else None)


@contextlib.contextmanager
def all_float64() -> Iterator[None]:
    """Makes upstream's `.float()` keep float64, so that only the result of a computation in float64 is rounded."""
    kept = torch.Tensor.float
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.float = kept  # type: ignore[method-assign]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Lets upstream warn, of an attention that is not installed, at every call; and compiles nothing.

    Its torch mode is a compiled flex_attention: a C++ compiler and half a minute for each shape. What is not compiled
    is the same function.
    """
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def opened(folder: Path, patches: Path) -> Iterator[World]:
    """Imports upstream from a folder, and leaves path, modules and environment as they were."""
    environment, world = dict(os.environ), None
    forget()
    sys.path.insert(0, str(folder))
    try:
        world = World(folder, patches)
        yield world
    finally:
        if world is not None:
            world.held.close()
        sys.path.remove(str(folder))
        forget()
        os.environ.clear()
        os.environ.update(environment)


@contextlib.contextmanager
def without_torchvision() -> Iterator[None]:
    """Has an empty module in torchvision's place: upstream's pipelines import it, and nothing here calls it."""
    names = ("torchvision", "torchvision.transforms")
    absent = [name for name in names if name not in sys.modules]
    sys.modules.update({name: types.ModuleType(name) for name in absent})
    if absent:
        sys.modules[names[0]].transforms = sys.modules[names[1]]  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def forget() -> None:
    """Removes upstream's modules from the process."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "hyvideo"]:
        del sys.modules[name]


def unlocked(root: Path, folder: Path) -> Path:
    """Returns a copy of torchport's patches without hyvideo's lock, which knows Tencent's source, not the fake's."""
    copied = shutil.copytree(root / "patches", folder / "patches")
    (copied / "hyvideo" / "lock.yaml").unlink(missing_ok=True)
    return copied
