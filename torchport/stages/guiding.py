"""Guiders of diffusers: what combines the predictions under each condition, where a pipeline takes one.

A guider that only combines predictions runs on the host, after the network's call. One that changes the network's
layers between two calls of a step is refused: a compiled program has its layers from its trace.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from torchport.errors import BadValueError, UnknownKeyError, UnknownNameError, nearest
from torchport.load.foreign import reading, unlike_defaults
from torchport.stages.family import Settings

SCALE = "guidance_scale"
"""The argument that a job has as a field of its own."""

NO_VIDEO = "cannot combine predictions of a video"

MOMENTUM = "momentum"
"""The name, among what a loop saves, of the running average that some guiders keep."""


def guider(from_checkpoint: Any, settings: Settings, place: str = "guider") -> Any:
    """Returns the guider of a run, with the job's scale; refuses a class that does more than combine predictions."""
    if settings.guider is None:
        return from_checkpoint.new(**{SCALE: settings.guidance_scale})
    from diffusers import guiders
    from diffusers.guiders.guider_utils import BaseGuidance

    classes = {
        key: value
        for key, value in vars(guiders).items()
        if isinstance(value, type) and issubclass(value, BaseGuidance) and value is not BaseGuidance
    }
    name = str(settings.guider["class"])
    reasons = {key: _reason(cls, BaseGuidance) for key, cls in classes.items()}
    usable = sorted(key for key, reason in reasons.items() if reason is None)
    if name not in classes:
        raise UnknownNameError(place, f"diffusers has no guider '{name}'", nearest(name, usable), name=name)
    if reasons[name] is not None:
        raise BadValueError(place, f"'{name}' {reasons[name]}", f"Take one of {', '.join(usable)}", name=name)
    return instance(classes[name], settings.guider, place, **{SCALE: settings.guidance_scale})


def instance(cls: Any, chosen: Mapping[str, Any], place: str, **given: Any) -> Any:
    """Returns an object of a guider's or scheduler's class that a job chooses; refuses wrong arguments. `chosen` is the
    mapping in the job, with `class`; `given` are arguments that no job can choose.
    """
    name = cls.__name__
    arguments = {key: value for key, value in chosen.items() if key != "class"}
    known = [key for key in inspect.signature(cls.__init__).parameters if key not in ("self", "enabled", *given)]
    for key in arguments:
        if key not in known:
            raise UnknownKeyError(place, f"'{name}' takes no argument '{key}' here", nearest(key, known), key=key)
    for key, value, default in unlike_defaults(cls, arguments):
        raise BadValueError(place, f"'{key}' is {value!r}", f"It must be like its default, {default!r}", key=key)
    with reading(BadValueError, place, f"'{name}' cannot be made of its arguments", "Mend them"):
        return cls(**arguments, **given)


def _reason(cls: Any, base: Any) -> str | None:
    """Returns why a guider cannot be used, as the end of a sentence; None if it can be used."""
    count = len(cls._input_predictions)
    if cls.prepare_models is not base.prepare_models:
        return "changes the network's layers between two calls of a step, and a compiled program cannot be changed"
    if count > 2:
        return f"combines {count} predictions, and there are two: with the prompt and with the negative prompt"
    if SCALE not in inspect.signature(cls.__init__).parameters:
        return f"takes no '{SCALE}', which a job has"
    try:
        counts(cls(**{SCALE: 2.0}), steps=1)  # a trial step
    except BadValueError:
        return NO_VIDEO
    return None


def counts(guider: Any, steps: int, place: str = "guider") -> set[int]:
    """Returns how many conditions a guider asks for in its steps, `{1, 2}`, by running it on a tiny random video."""
    numbers, generator = set(), torch.Generator().manual_seed(0)
    fact = f"'{type(guider).__name__}' {NO_VIDEO}"
    with reading(BadValueError, place, fact, "Mend its arguments, or take another"):
        for step in range(steps):
            guider.set_state(step=step, num_inference_steps=steps, timestep=torch.zeros(()))
            states = guider.prepare_inputs({"text": (torch.zeros(1), torch.ones(1))})
            for state in states:
                state.noise_pred = torch.randn(1, 2, 1, 2, 2, generator=generator)  # [B, C, T, H, W]
            guider(states)
            numbers.add(len(states))
    return numbers


def state(guider: Any) -> dict[str, torch.Tensor]:
    """Returns what a guider carries from step to step, by name: a running average; an empty dict if it has none."""
    average = getattr(getattr(guider, "momentum_buffer", None), "running_average", None)
    return {MOMENTUM: average} if isinstance(average, torch.Tensor) else {}


def resume(guider: Any, inputs: Mapping[str, Any], saved: Mapping[str, torch.Tensor]) -> None:
    """Gives a new guider what another carried, as `state` returned it. `inputs` are as for `prepare_inputs`."""
    guider.set_state(step=0, num_inference_steps=1, timestep=torch.zeros(()))
    guider.prepare_inputs(dict(inputs))  # at its first step a guider makes its buffer
    if MOMENTUM in saved:
        guider.momentum_buffer.running_average = saved[MOMENTUM]
