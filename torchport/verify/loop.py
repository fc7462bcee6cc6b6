"""A loop without its networks: what it passes to them and to its scheduler, recorded while their outputs are made up.

Each call returns numbers that depend on the step and on the condition alone. So two loops that do the same arithmetic
have the same numbers everywhere, whether the conditions of guidance come in one batch or one by one. The original's
loop is upstream's own, its pipeline's `__call__`, where that can be called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from torchport import load
from torchport.save import tree
from torchport.stages import guiding, outputs
from torchport.stages.image import MOMENTS, Encoded
from torchport.stages.replay import Loop
from torchport.stages.stand_in import ComponentStandIn
from torchport.stages.upstream_pipeline import UpstreamPipeline
from torchport.task import Task

LARGE = 2**20
"""Elements above which a tensor is kept for the chosen steps alone: the others' would not fit in memory at 720p."""

NEGATIVE = "negative_"
"""Embeddings of the negative prompt have this before their name."""

CONVENTIONS = {"height": "height", "width": "width", "num_frames": "frames", "num_inference_steps": "steps"}
"""Arguments of a pipeline of diffusers by their usual names, and the settings that they are."""


@dataclasses.dataclass
class ConditionCall:
    """One condition of one call of a network."""

    network: str  #: The component.
    condition: str  #: "" for the prompt, `negative_` for the negative prompt.
    #: How often the network was called with this condition in this step before.
    number: int
    #: Its inputs by path, the condition's row of each.
    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]  #: Its inputs that are numbers, texts, true or false.


@dataclasses.dataclass
class SchedulerStep:
    """One step of a scheduler."""

    state: dict[str, Any]  #: The scheduler's fields before the step.
    arguments: dict[str, Any]  #: What `step` was called with, by its own names.
    latents: torch.Tensor | None  #: What it returned first.
    calls: list[ConditionCall]  #: The network's calls since the step before.


class LoopRecord:
    """The record of a loop."""

    def __init__(self, chosen: Collection[int]) -> None:
        self.chosen = chosen  #: Steps, from 0, of which large tensors are kept.
        self.steps: list[SchedulerStep] = []
        self.calls: list[ConditionCall] = []  #: Since the last of the steps.
        self._depth = 0

    def copy_of(self, value: Any) -> Any:
        """Returns a copy of a tree as the record keeps it: large tensors of steps that are not chosen are left out."""

        def copied(_: str, leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if leaf.numel() > LARGE and len(self.steps) not in self.chosen:
                return None
            return leaf.detach().clone()

        return outputs.each(copied, "", value)

    def add(self, call: ConditionCall) -> None:
        """Records a call."""
        tensors = {name: self.copy_of(tensor) for name, tensor in call.tensors.items()}
        call.tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        self.calls.append(call)

    def count(self, network: str, condition: str) -> int:
        """Returns how often a network was called with a condition since the last step."""
        return sum(call.network == network and call.condition == condition for call in self.calls)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Records every step of every scheduler for the length of a `with`."""
        changed = [(cls, vars(cls)["step"]) for cls in _schedulers() if "step" in vars(cls)]
        for cls, step in changed:
            cls.step = self._recorder(step)
        try:
            yield
        finally:
            for cls, step in changed:
                cls.step = step

    def _recorder(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def recording_step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if self._depth:  # of the class that this one is derived from
                return step(scheduler, *args, **kwargs)
            state = {name: value for name, value in vars(scheduler).items() if tree.is_packable(value)}
            arguments = dict(inspect.signature(step).bind(scheduler, *args, **kwargs).arguments)
            arguments = {name: value for name, value in list(arguments.items())[1:] if tree.is_packable(value)}
            record = SchedulerStep(self.copy_of(state), self.copy_of(arguments), None, self.calls)
            self._depth += 1
            try:
                returned = step(scheduler, *args, **kwargs)
            finally:
                self._depth -= 1
            first = returned[0] if isinstance(returned, tuple) else getattr(returned, "prev_sample", None)
            record.latents = self.copy_of(first)
            self.steps.append(record)
            self.calls = []
            return returned

        return recording_step


def _schedulers() -> list[Any]:
    """Returns every class of a scheduler that was imported."""
    from diffusers.schedulers.scheduling_utils import SchedulerMixin

    classes: list[Any] = [SchedulerMixin]
    for cls in classes:
        classes += [sub for sub in cls.__subclasses__() if sub not in classes]
    return classes


class MadeUpNetwork:
    """Stands in for a network: its outputs are made up, and what it receives is recorded.

    Args:
        network: The component.
        like: What one of its calls returns, without values: shape [B, ...] and dtype.
        embeddings: Of the prompts, by which a row's condition is known.
        record: The loop's.
        is_port: Whether it is called as a program is: all conditions in one batch, masked tokens left out.
    """

    def __init__(
        self,
        network: str,
        template: torch.Tensor,
        embeddings: Mapping[str, torch.Tensor],
        record: LoopRecord,
        is_port: bool,
    ) -> None:
        self.network = network
        self.template = template
        self.embeddings = embeddings
        self.record = record
        self.batches = self.drops = is_port

    def place(self, **inputs: Any) -> dict[str, Any]:
        """Returns the inputs as they are."""
        return inputs

    def __call__(self, **inputs: Any) -> torch.Tensor:
        """Returns made-up outputs [B, ...], a row for each condition."""
        tensors = {name: leaf for name, leaf in outputs.leaves(inputs).items() if isinstance(leaf, torch.Tensor)}
        values = {name: value for name, value in inputs.items() if type(value) in (bool, int, float, str)}
        batch = next(tensor.shape[0] for tensor in tensors.values() if tensor.ndim > 2)
        rows = []
        for n in range(batch):
            row = {key: x[n : n + 1] if x.ndim and x.shape[0] == batch else x for key, x in tensors.items()}
            condition = self._condition(row)
            number = self.record.count(self.network, condition)
            self.record.add(ConditionCall(self.network, condition, number, row, values))
            rows.append(self._made_up(condition, number))
        return torch.stack(rows)

    def _made_up(self, condition: str, number: int) -> torch.Tensor:
        """Returns the output for one condition, which depends on the step and the condition alone."""
        seed = 1000 * len(self.record.steps) + 10 * number + (condition == NEGATIVE)
        values = torch.randn(self.template.shape[1:], generator=torch.Generator().manual_seed(seed))
        return values.to(self.template.dtype)

    def _condition(self, row: Mapping[str, torch.Tensor]) -> str:
        """Returns the condition whose embeddings are nearest; the prompt's where both are as near."""
        distances = {}
        for prefix in ("", NEGATIVE):
            known = [x for name, x in self.embeddings.items() if name.startswith(NEGATIVE) == bool(prefix)]
            nearest = (min((_token_distance(x, other) for other in known), default=math.inf) for x in row.values())
            distances[prefix] = sum(distance for distance in nearest if distance < math.inf)
        return NEGATIVE if distances[NEGATIVE] < distances[""] else ""


def _token_distance(x: torch.Tensor, known: torch.Tensor) -> float:
    """Returns the mean distance of two embeddings over the tokens that both have; infinity where they cannot be one."""
    if x.ndim != known.ndim or x.ndim not in (2, 3) or x.shape[2:] != known.shape[2:] or x.shape[1] == 0:
        return math.inf
    length = min(x.shape[1], known.shape[1])
    return float((x[:, :length].float() - known[:, :length].float()).abs().mean())


class UpstreamLoop(Loop):
    """A loop whose every step is upstream's."""

    def returned(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Takes the step."""
        return self.real(*args, **kwargs)


def has_upstream_loop(task: Task) -> bool:
    """Returns whether upstream's own loop can be called; otherwise port and original share the family's."""
    return task.card.pipeline is not None or hasattr(task.family, "upstream_loop")


def run_upstream(
    task: Task, parts: Mapping[str, Any], calls: Mapping[str, MadeUpNetwork], inputs: Mapping[str, Any]
) -> None:
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
    elif task.card.call is not None:
        upstream = UpstreamPipeline(str(task.card.pipeline), task.card.call, task.card_document.place(["call"]))
        _run_card(upstream, task, parts, calls, inputs)
    else:
        _run_pipeline(task, parts, calls, inputs)


def _run_card(
    upstream: UpstreamPipeline,
    task: Task,
    parts: Mapping[str, Any],
    calls: Mapping[str, MadeUpNetwork],
    inputs: Mapping[str, Any],
) -> None:
    """Calls the pipeline of a card that says how."""
    settings = task.settings
    loop = UpstreamLoop(parts["scheduler"], torch.Generator().manual_seed(settings.seed))
    moments = {name: value for name, value in inputs.items() if name.startswith(MOMENTS)}
    embeddings = {name: value for name, value in inputs.items() if name not in (*moments, "noise")}
    stage = "encode" if "vae" in upstream.card.host else "encode_image"
    vae = Encoded(parts["vae"], settings.dtypes["vae"], loop, moments, stage)
    noise = {"latents": inputs["noise"]} if "noise" in inputs else {}
    upstream.called(parts, settings, embeddings, loop, calls, vae, is_latent=True, **noise)


def _run_pipeline(
    task: Task, parts: Mapping[str, Any], calls: Mapping[str, MadeUpNetwork], inputs: Mapping[str, Any]
) -> None:
    """Calls a pipeline whose arguments have their usual names, with what the family's `encode` returned."""
    settings, cls = task.settings, load.class_of(str(task.card.pipeline))
    loop = UpstreamLoop(parts["scheduler"], torch.Generator().manual_seed(settings.seed))
    stand_ins = {name: ComponentStandIn(parts[name], settings.dtypes[name], loop, call) for name, call in calls.items()}
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
