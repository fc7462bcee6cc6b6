"""What made an artefact: the manifest that it holds, as frozen fields and as JSON."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
from collections.abc import Collection, Mapping
from typing import Any

import pydantic

from torchport.config import Frozen
from torchport.config.card import StageName

SCHEMA = 4
"""Version of the manifest's schema; a reader refuses any other."""


class Tensor(Frozen):
    dtype: str
    shape: list[int]


class _PatchRow(Frozen):
    """A patch as a manifest lists it; see `torchport.patch.ledger`."""

    id: str
    target: str
    kind: str
    equivalence: str | dict[str, Any]
    state: str
    calls: int | None
    plumbing: bool
    late: bool
    drift: str
    detail: str
    why: str
    place: str


class _UpstreamRow(Frozen):
    """An upstream that is a checkout, as a manifest lists it; see `torchport.processes.git`."""

    package: str
    commit: str | None
    dirty: bool


class _ProgramRow(Frozen):
    """A program as a manifest lists it: whether JAX's cache delivered its executable, and what it computes otherwise.

    `operators` has the number of those that compute what PyTorch does, and the names of all others: docs/engine.md.
    """

    jax_cache: bool
    operators: dict[str, Any] = {}


class _CacheRow(Frozen):
    """A step cache as a manifest lists it; see `torchport.config.step_cache`."""

    kind: str
    steps: int
    computed: list[int]


class _FlagsRow(Frozen):
    """A named set of compiler flags, as a manifest lists it; see `torchport.config.xla_flags`."""

    name: str
    flags: list[str]


class Manifest(Frozen):
    """What made an artefact."""

    schema_version: int
    stage: StageName
    run: str
    """The run that made it; one that is stopped or killed keeps its name when it goes on."""
    created: str
    identity: dict[str, Any]
    """What must agree between the stages of one video: model, sizes, whether there is guidance."""
    checkpoint: str
    components: dict[str, str]
    """Digest of each component of the checkpoint that was at hand."""
    inputs: dict[StageName, str]
    """sha256 of the artefacts that this one was made from, by stage."""
    settings: dict[str, Any]
    config: dict[str, Any]
    backend: str
    jit: bool = True
    """Whether networks were compiled; otherwise they ran op by op."""
    xla_flags: _FlagsRow | None = None
    """The named set of flags that the compiler was given."""
    patches: list[_PatchRow]
    """The ledger: every patch, what it promises, what became of it."""
    card: dict[str, Any] = {}
    """The fields of the card that are not at their defaults."""
    code: dict[str, str] = {}
    """Hashes of the files and of the entries of patches that the stage ran with, by file and id."""
    cache: _CacheRow | None = None
    """The step cache, and which steps computed all blocks."""
    upstream: _UpstreamRow | None = None
    """The upstream, if it is a checkout and no installed package."""
    programs: list[_ProgramRow] = []
    """One row for each program of the stage."""
    versions: dict[str, str]
    seconds: dict[str, float]
    done: int | None = pydantic.Field(default=None, ge=1)
    """Of unfinished latents, and of those that are kept after a step: how many steps they have gone through."""
    tensors: dict[str, Tensor]
    sha256: str
    """Of the tensors: names, dtypes, shapes and values."""


def text_of(manifest: Manifest) -> str:
    """Returns a manifest as the JSON that artefacts hold."""
    return json.dumps(manifest.model_dump(), indent=2, ensure_ascii=False) + "\n"


def leaves(fields: Mapping[str, Any], whole: Collection[str] = ()) -> dict[str, Any]:
    """Returns the values of nested fields by path: `{"vae": {"dtype": "float32"}}` -> `{"vae.dtype": "float32"}`.

    A field in `whole` is one value, also if it has fields.
    """
    paths: dict[str, Any] = {}
    for name, value in fields.items():
        nested = leaves(value) if isinstance(value, dict) and name not in whole else {"": value}
        for path, leaf in nested.items():
            paths[f"{name}.{path}" if path else name] = leaf
    return paths


class Version(pydantic.BaseModel):
    """The one field that manifests of all versions have."""

    schema_version: Any


def versions() -> dict[str, str]:
    """Returns the versions that decide a run's numbers."""
    names = ("torchport", "torch", "jax", "jaxlib", "libtpu", "torchax", "diffusers", "transformers", "numpy")
    numbers = {"python": platform.python_version()}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            numbers[name] = importlib.metadata.version(name)
    return numbers
