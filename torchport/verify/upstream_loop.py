"""Upstream's own loop, its pipeline's `__call__`, around networks whose outputs are made up."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from torchport import load
from torchport.stages import guiding
from torchport.stages.image import MOMENTS, Encoded
from torchport.stages.replay import Loop
from torchport.stages.stand_in import StandIn
from torchport.stages.upstream_pipeline import UpstreamPipeline
from torchport.task import Task
from torchport.verify.trace import Fed

CONVENTIONS = {"height": "height", "width": "width", "num_frames": "frames", "num_inference_steps": "steps"}
"""Arguments of a pipeline of diffusers by their usual names, and the settings that they are."""


class Untouched(Loop):
    """A loop whose every step is upstream's."""

    def returned(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Takes the step."""
        return self.real(*args, **kwargs)


def is_upstreams(task: Task) -> bool:
    """Returns whether upstream's own loop can be called; otherwise port and original share the family's."""
    return task.card.pipeline is not None or hasattr(task.family, "upstream_loop")


def run(task: Task, parts: Mapping[str, Any], calls: Mapping[str, Fed], inputs: Mapping[str, Any]) -> None:
    """Takes the denoising steps of the original in upstream's own loop.

    Args:
        task: The original's, whose card names a pipeline, or whose family has the function `upstream_loop`.
        parts: Scheduler, guider, and networks and VAE for their configurations.
        calls: The networks by name.
        inputs: What the stages before returned, and `noise` where it is given.
    """
    if hasattr(task.family, "upstream_loop"):
        [call] = calls.values()
        task.family.upstream_loop(parts, call, task.settings, **inputs)
        return
    if task.card.call is None:
        _run_pipeline(task, parts, calls, inputs)
        return
    upstream = UpstreamPipeline(str(task.card.pipeline), task.card.call, task.card_document.place(["call"]))
    _run_generic(upstream, task, parts, calls, inputs)


def _run_generic(
    upstream: UpstreamPipeline,
    task: Task,
    parts: Mapping[str, Any],
    calls: Mapping[str, Fed],
    inputs: Mapping[str, Any],
) -> None:
    """Calls the pipeline of a card that says how."""
    settings = task.settings
    loop = Untouched(parts["scheduler"], torch.Generator().manual_seed(settings.seed))
    moments = {name: value for name, value in inputs.items() if name.startswith(MOMENTS)}
    embeddings = {name: value for name, value in inputs.items() if name not in (*moments, "noise")}
    stage = "encode" if "vae" in upstream.card.host else "encode_image"
    vae = Encoded(parts["vae"], settings.dtypes["vae"], loop, moments, stage)
    noise = {"latents": inputs["noise"]} if "noise" in inputs else {}
    upstream.called(parts, settings, embeddings, loop, calls, vae, is_latent=True, **noise)


def _run_pipeline(task: Task, parts: Mapping[str, Any], calls: Mapping[str, Fed], inputs: Mapping[str, Any]) -> None:
    """Calls a pipeline whose arguments have their usual names, with what the family's `encode` returned."""
    settings, cls = task.settings, load.class_of(str(task.card.pipeline))
    loop = Untouched(parts["scheduler"], torch.Generator().manual_seed(settings.seed))
    stand_ins = {name: StandIn(parts[name], settings.dtypes[name], loop, call) for name, call in calls.items()}
    components = {**parts, **stand_ins}
    if "guider" in parts:
        components["guider"] = guiding.guider(parts["guider"], settings)
    names = list(inspect.signature(cls.__init__).parameters)[1:]
    pipe = cls(**{name: components.get(name) for name in names})
    pipe.set_progress_bar_config(disable=True)
    arguments = {name: getattr(settings, setting) for name, setting in CONVENTIONS.items()}
    arguments |= {"guidance_scale": settings.guidance_scale, "generator": loop.generator, "output_type": "latent"}
    arguments |= {"latents" if name == "noise" else name: value for name, value in inputs.items()}
    known = inspect.signature(pipe.__call__).parameters
    with torch.no_grad():
        pipe(**{name: value for name, value in arguments.items() if name in known}, return_dict=False)
