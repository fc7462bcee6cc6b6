"""The manifest of a whole run, beside its video."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torchport import save
from torchport.config.card import STAGES
from torchport.files import atomic
from torchport.save.manifest import SCHEMA, Manifest
from torchport.task import Task


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
