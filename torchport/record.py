"""What a run writes down of itself: the versions that decide its numbers, and the manifest beside the video."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from pathlib import Path

from torchport import save
from torchport.card import STAGES
from torchport.task import Task


def versions() -> dict[str, str]:
    """Returns the versions that decide a run's numbers."""
    names = ("torchport", "torch", "jax", "jaxlib", "libtpu", "torchax", "diffusers", "transformers", "numpy")
    found = {"python": platform.python_version()}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def write_manifest(task: Task, made: Path | None) -> None:
    """Writes the manifest of the run itself: the video, if it made one, and every stage's."""
    files = {name: task.folder / f"{name}.json" for name in STAGES}
    stages = {name: save.read_manifest(file).model_dump() for name, file in files.items() if file.is_file()}
    rows = [row for stage in stages.values() for row in stage["patches"]]
    manifest = {
        "schema_version": save.SCHEMA,
        "model": task.card.model,
        "title": task.card.title,
        "video": made.name if made else None,
        "deviations": [row for row in rows if row["equivalence"] != "bitwise"],
        "stages": stages,
    }
    save.write_json(task.folder / "manifest.json", manifest)
