"""What a run writes down of itself: the versions that decide its numbers, and the manifest beside the video."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from collections.abc import Mapping
from pathlib import Path

from torchport import save
from torchport.card import STAGES
from torchport.files import atomic
from torchport.manifest import SCHEMA, Manifest
from torchport.task import Task


def versions() -> dict[str, str]:
    """Returns the versions that decide a run's numbers."""
    names = ("torchport", "torch", "jax", "jaxlib", "libtpu", "torchax", "diffusers", "transformers", "numpy")
    found = {"python": platform.python_version()}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def write_manifest(task: Task, made: Path | None, own: Mapping[str, Manifest]) -> None:
    """Writes the manifest of the run itself: the video, if it made one, and every stage's.

    Args:
        task: The run.
        made: The video.
        own: Manifests of the stages that this run has finished; those of others are read from the folder.
    """
    manifests = {name: own.get(name) or save.readable_manifest(save.file_of(task.folder, name)) for name in STAGES}
    stages = {name: manifest.model_dump() for name, manifest in manifests.items() if manifest is not None}
    rows = [row for stage in stages.values() for row in stage["patches"]]
    manifest = {
        "schema_version": SCHEMA,
        "model": task.card.model,
        "title": task.card.title,
        "video": made.name if made else None,
        "deviations": [row for row in rows if row["equivalence"] != "bitwise"],
        "stages": stages,
    }
    atomic.write_json(task.folder / "manifest.json", manifest)
