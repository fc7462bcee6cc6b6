"""The files of a run that a person looks at: the video and its contact sheet, made of the frames in `decode`."""

from __future__ import annotations

import functools

import torch

from torchport import save
from torchport.progress import log, track
from torchport.run import resume
from torchport.save.manifest import Manifest
from torchport.save.video import write_contact_sheet, write_video
from torchport.task import Task

DERIVED = ("schema_version", "tensors", "sha256")
"""Fields of a manifest that `save.write` finds out itself."""


def write(task: Task, frames_FCHW: torch.Tensor) -> None:
    """Writes the video and its contact sheet.

    Raises:
        OutputError: The folder cannot be written.
    """
    every = functools.partial(track, what="save video.mp4", unit="frame", total=len(frames_FCHW))
    write_video(task.folder / save.VIDEO, frames_FCHW, task.job.fps, every)
    write_contact_sheet(task.folder / save.CONTACT_SHEET, frames_FCHW)


def at_jobs_rate(task: Task, digests: dict[str, str]) -> Manifest | None:
    """Writes a finished video again if it has another `fps` than the job: no latents and no frames depend on it.

    The video comes first. If the process is killed before the manifest is written, the next run writes both again.

    Args:
        task: The run; its last stage is finished.
        digests: Of the checkpoint in use.

    Returns:
        The new manifest of the last stage; None where the video has the job's rate, or there is none.

    Raises:
        ArtefactBrokenError: The frames are damaged.
        OutputError: The folder cannot be written.
    """
    stage, folder = task.stages[-1], task.folder
    manifest = save.read_manifest(save.file_of(folder, stage.name))
    before = manifest.config.get("fps")
    if "frames" not in manifest.tensors or before == task.job.fps:
        return None
    names = task.identity(stage.name), digests, resume.AFTER_REMOVAL
    outputs = save.read(folder, stage.name, *names)[0]
    log.info("%s had %s frames per second: it is written again with %s", folder / save.VIDEO, before, task.job.fps)
    write(task, outputs["frames"][0])
    facts = {key: value for key, value in manifest.model_dump().items() if key not in DERIVED}
    facts["config"] = {**manifest.config, "fps": task.job.fps}
    manifest = save.write(folder, stage.name, outputs, facts)
    save.write_copy(folder, stage.name, manifest)
    return manifest
