"""The loop's side faults, by name: schedule, noise, embeddings, guidance and dtypes, compared before a network runs.

Both loops are run with networks whose outputs are made up: docs/verify.md. The original's loop is upstream's own, its
pipeline's `__call__`, where that can be called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from torchport import load, patch
from torchport.compile import network
from torchport.compile.in_force import in_force
from torchport.load.foreign import brief, refusals
from torchport.save import tree
from torchport.stages import guiding, outputs
from torchport.stages.family import Stage, Steps
from torchport.stages.image import MOMENTS, Encoded
from torchport.stages.replay import Loop
from torchport.stages.stand_in import ComponentStandIn
from torchport.stages.upstream_pipeline import UpstreamPipeline
from torchport.task import Task
from torchport.verify import encoders
from torchport.verify.report import Seam, Verdict

LARGE = 2**20
"""Elements above which a tensor is kept for the chosen steps alone: the others' would not fit in memory at 720p."""

NEGATIVE = "negative_"
"""Embeddings of the negative prompt have this before their name."""

CONVENTIONS = {"height": "height", "width": "width", "num_frames": "frames", "num_inference_steps": "steps"}
"""Arguments of a pipeline of diffusers by their usual names, and the settings that they are."""


@dataclasses.dataclass
class ConditionCall:
    network: str
    condition: str  #: "" for the prompt, `negative_` for the negative prompt.
    #: How often the network was called with this condition in this step before.
    number: int
    #: Its inputs by path, the condition's row of each.
    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]


@dataclasses.dataclass
class SchedulerStep:
    state: dict[str, Any]
    arguments: dict[str, Any]  #: What `step` was called with, by its own names.
    latents: torch.Tensor | None
    calls: list[ConditionCall]


class LoopRecord:
    def __init__(self, chosen: Collection[int]) -> None:
        self.chosen = chosen  #: Steps, from 0, of which large tensors are kept.
        self.steps: list[SchedulerStep] = []
        self.calls: list[ConditionCall] = []
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
        tensors = {name: self.copy_of(tensor) for name, tensor in call.tensors.items()}
        call.tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        self.calls.append(call)

    def count(self, network: str, condition: str) -> int:
        """Returns how often a network was called with a condition since the last step."""
        return sum(call.network == network and call.condition == condition for call in self.calls)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
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
    from diffusers.schedulers.scheduling_utils import SchedulerMixin

    classes: list[Any] = [SchedulerMixin]
    for cls in classes:
        classes += [sub for sub in cls.__subclasses__() if sub not in classes]
    return classes


class _MadeUpNetwork:
    """Stands in for a network: its outputs are made up, and what it receives is recorded.

    Args:
        like: What one of its calls returns, without values: shape [B, ...] and dtype.
        embeddings: Of the prompts, by which a row's condition is known.
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
        return inputs

    def __call__(self, **inputs: Any) -> torch.Tensor:
        """Returns made-up outputs [B, ...], a row for each condition."""
        tensors = {name: leaf for name, leaf in outputs.leaves(inputs).items() if isinstance(leaf, torch.Tensor)}
        values = {name: value for name, value in inputs.items() if type(value) in (bool, int, float, str)}
        batch = next(tensor.shape[0] for tensor in tensors.values() if tensor.ndim > 2)
        rows = []  # each depends on the step and the condition alone
        for n in range(batch):
            row = {key: x[n : n + 1] if x.ndim and x.shape[0] == batch else x for key, x in tensors.items()}
            condition = self._condition(row)
            number = self.record.count(self.network, condition)
            self.record.add(ConditionCall(self.network, condition, number, row, values))
            seed = 1000 * len(self.record.steps) + 10 * number + (condition == NEGATIVE)
            rows.append(torch.randn(self.template.shape[1:], generator=torch.Generator().manual_seed(seed)))
        return torch.stack(rows).to(self.template.dtype)

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


class _UpstreamLoop(Loop):
    def returned(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self.real(*args, **kwargs)


def _has_upstream_loop(task: Task) -> bool:
    """Returns whether upstream's own loop can be called; otherwise port and original share the family's."""
    return task.card.pipeline is not None or hasattr(task.family, "upstream_loop")


def _run_upstream(
    task: Task, parts: Mapping[str, Any], calls: Mapping[str, _MadeUpNetwork], inputs: Mapping[str, Any]
) -> None:
    """Takes the denoising steps of the original in upstream's own loop.

    Args:
        task: The original's, whose card names a pipeline, or whose family has the function `upstream_loop`.
        inputs: What the stages before returned, and `noise` where it is given.
    """
    settings = task.settings
    if hasattr(task.family, "upstream_loop"):
        [call] = calls.values()
        task.family.upstream_loop(parts, call, settings, **inputs)
        return
    loop = _UpstreamLoop(parts["scheduler"], torch.Generator().manual_seed(settings.seed))
    if task.card.call is None:
        _run_pipeline(task, parts, calls, inputs, loop)
        return
    upstream = UpstreamPipeline(str(task.card.pipeline), task.card.call, task.card_document.place(["call"]))
    moments = {name: value for name, value in inputs.items() if name.startswith(MOMENTS)}
    embeddings = {name: value for name, value in inputs.items() if name not in (*moments, "noise")}
    stage = "encode" if "vae" in upstream.card.host else "encode_image"
    vae = Encoded(parts["vae"], settings.dtypes["vae"], loop, moments, stage)
    noise = {"latents": inputs["noise"]} if "noise" in inputs else {}
    upstream.called(parts, settings, embeddings, loop, calls, vae, is_latent=True, **noise)


def _run_pipeline(
    task: Task,
    parts: Mapping[str, Any],
    calls: Mapping[str, _MadeUpNetwork],
    inputs: Mapping[str, Any],
    loop: _UpstreamLoop,
) -> None:
    """Calls a pipeline whose arguments have their usual names, with what the family's `encode` returned."""
    settings, cls = task.settings, load.class_of(str(task.card.pipeline))
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


ROUNDINGS = 2
"""Roundings of a value's dtype that the same arithmetic in another order may make. Both loops run on one host."""
FIRST = ("timesteps", "sigmas")
"""Fields of a scheduler that are compared first: the others follow from them."""
RENAMED = {"model_output": "guidance", "sample": "latents"}
"""What the arguments of a scheduler's step are called here: the combined prediction is what guidance makes."""
SHOWN = 4
"""Numbers of a tensor that a person is shown."""
STEPS = "number of scheduler steps"
"""The seam of how many steps a loop takes."""
LOOP = "denoise"
"""The stage of a loop's seams."""


@dataclasses.dataclass(frozen=True)
class SideRecord:
    encoded: dict[str, dict[str, torch.Tensor]]
    moments: dict[str, torch.Tensor]
    loop: LoopRecord
    #: What upstream raised in a port's loop; None where the loop came to its end.
    stopped: Exception | None = None
    #: Of the original, where a port encodes on the devices; of a capture without modules.
    yardstick: encoders.Yardstick | None = None
    #: Of a port's encoders on the devices, the modules that differ most.
    modules: list[Seam] = dataclasses.field(default_factory=list)

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        return {**{name: x for values in self.encoded.values() for name, x in values.items()}, **self.moments}


@dataclasses.dataclass(frozen=True)
class Seams:
    seams: tuple[Seam, ...]
    unlike: tuple[str, ...]


def against(
    port: Task, folder: Path, chosen: Collection[int], reference: SideRecord, likes: Mapping[str, torch.Tensor]
) -> Seams:
    side = record(port, folder, chosen, likes, reference)
    rows, unlike = differences(reference, side), []
    if side.stopped is not None:
        if all(row.verdict is Verdict.SAME for row in rows if row.name != STEPS):
            raise side.stopped
        unlike.append(f"the loop after step {len(side.loop.steps)}: the port's stops with {brief(side.stopped)}")
    if any(stage.network for stage in _encoders(port)):
        unlike.append("the image's moments: the port takes the original's, whose VAE encodes it in PyTorch")
    if not _has_upstream_loop(port):
        unlike.append("the loop: that of the family is both the port's and the original's")
    return Seams(tuple(rows), tuple(unlike))


def _encoders(task: Task) -> list[Stage]:
    names = [stage.name for stage in task.family.STAGES]
    return list(task.family.STAGES[: names.index(task.denoising[0].name)])


def record(
    task: Task,
    folder: Path,
    chosen: Collection[int],
    likes: Mapping[str, torch.Tensor],
    reference: SideRecord | None = None,
    encoded: Mapping[str, dict[str, torch.Tensor]] | None = None,
) -> SideRecord:
    """Returns what one side passes on. No network runs but encoders.

    Args:
        chosen: Steps, from 0, whose large tensors are compared.
        reference: The original's, for a port: its loop gets the original's embeddings, so that what an encoder does
            wrong is told once.
    """
    with in_force(task, task.stages):
        side = SideRecord({}, {} if reference is None else reference.moments, LoopRecord(chosen))
        for stage in _encoders(task):
            if stage.network is not None and reference is not None:
                continue
            if task.encodes_on_devices(stage) and reference is not None:
                values, modules = encoders.encoded(task, stage, folder, reference.yardstick)
                side.modules.extend(modules)
            else:
                values = _encoded(task, stage, folder) if encoded is None else encoded[stage.name]
            if task.original and task.job.encode == "devices" and stage.name == "encode":
                yardstick = encoders.yardstick_of(task, stage, folder, values)
                side = dataclasses.replace(side, yardstick=yardstick)
            if stage.network is None:
                side.encoded[stage.name] = values
            else:
                side.moments.update(values)
        inputs = (reference or side).inputs
        with side.loop.recording():
            try:
                _denoise(task, folder, side.loop, likes, inputs)
            except refusals() as error:
                if reference is None:
                    raise
                return dataclasses.replace(side, stopped=error)
    return side


def _encoded(task: Task, stage: Stage, folder: Path) -> dict[str, torch.Tensor]:
    with patch.applied(task.patches([stage]), stage=stage.name):
        parts = network.loaded(task, _bare(stage) if task.original else stage, folder)
        call = None if stage.network is None else network.eager(task, stage, parts, folder)
        return stage.run(parts, call, task.settings, Steps())


def _denoise(
    task: Task, folder: Path, record: LoopRecord, likes: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
) -> None:
    """Takes all denoising steps with made-up outputs."""
    is_port = not task.original
    calls = {name: _MadeUpNetwork(name, template, inputs, record, is_port) for name, template in likes.items()}
    start = {**inputs, **task.noise(task.denoising[0])}
    if task.original and _has_upstream_loop(task):
        with patch.applied(task.patches(task.denoising)):
            by_stage = [network.loaded(task, _bare(stage), folder) for stage in task.denoising]
            parts = {name: part for loaded in by_stage for name, part in loaded.items()}
            _run_upstream(task, parts, calls, start)
        return
    done: Mapping[str, torch.Tensor] = {}
    for stage in task.denoising:
        with patch.applied(task.patches([stage]), stage=stage.name):
            parts = network.loaded(task, _bare(stage) if task.original else stage, folder)
            state = {name: value for name, value in done.items() if name != "done"}
            steps = Steps(resume=(int(done["done"]), state) if done else None)
            done = stage.run(parts, calls[str(stage.network)], task.settings, steps, **start)
            start = dict(inputs)


def _bare(stage: Stage) -> Stage:
    return dataclasses.replace(stage, prepare=None)


def differences(original: SideRecord, port: SideRecord) -> list[Seam]:
    stages = original.encoded.items()
    rows = [row for stage, values in stages for row in value_seams(stage, values, port.encoded[stage])]
    if original.yardstick is not None:
        allowed = {row.name: max(row.allowed, original.yardstick.allowed(row.name)) for row in rows}
        rows = [*port.modules, *(dataclasses.replace(row, allowed=allowed[row.name]) for row in rows)]
    # A loop that stopped took fewer steps because of what differs before.
    return [
        *rows,
        *sorted(_loop_seams(original.loop, port.loop), key=lambda row: row.name == STEPS and bool(port.stopped)),
    ]


def value_seams(
    stage: str, original: Mapping[str, Any], port: Mapping[str, Any], step: int | None = None, suffix: str = ""
) -> Iterator[Seam]:
    """Yields the seams of named trees of tensors, numbers and texts: of each its dtype, and itself."""
    ours, theirs = outputs.leaves(port), outputs.leaves(original)
    for name in [*theirs, *(name for name in ours if name not in theirs)]:
        expected, other = theirs.get(name), ours.get(name)
        if not isinstance(expected, torch.Tensor) or not isinstance(other, torch.Tensor):
            distance = 0.0 if _is_same(expected, other) else math.inf
            yield Seam(f"{name}{suffix}", stage, step, _words(expected), _words(other), distance, 0.0)
            continue
        if expected.dtype != other.dtype:
            first, second = (str(x.dtype).removeprefix("torch.") for x in (expected, other))
            yield Seam(f"dtype of {name}{suffix}", stage, step, first, second, math.inf, 0.0)
        longer, shorter = expected, other
        expected = _without_padding(longer, shorter, _masks(name, longer, theirs), stage)
        other = _without_padding(shorter, longer, _masks(name, shorter, ours), stage)
        where = _worst(expected, other)
        words = _words(expected, where), _words(other, where)
        # The distance that roundings of the original's dtype may make.
        allowed = ROUNDINGS * torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0.0
        yield Seam(f"{name}{suffix}", stage, step, *words, _distance(expected, other), allowed)


def _loop_seams(original: LoopRecord, port: LoopRecord) -> Iterator[Seam]:
    """Yields the seams of two loops, in the order in which the loops pass them on."""
    counts = str(len(original.steps)), str(len(port.steps))
    yield Seam(STEPS, LOOP, None, *counts, _distance_unless(counts[0] == counts[1]), 0.0)
    for n, (theirs, ours) in enumerate(zip(original.steps, port.steps, strict=False)):
        constant = _constant(original.steps[0], theirs) & _constant(port.steps[0], ours) if n else set()
        suffix = " of the scheduler" if n else ""
        step = n if n else None
        yield from value_seams(LOOP, _state(theirs, constant), _state(ours, constant), step, suffix)
        if n == 0:
            noise, other = ({"noise": each.arguments.get("sample")} for each in (theirs, ours))
            yield from value_seams(LOOP, noise, other)
        yield from _call_seams(theirs.calls, ours.calls, n)
        yield from value_seams(LOOP, _step_values(theirs), _step_values(ours), n)


def _state(step: SchedulerStep, constant: set[str]) -> dict[str, Any]:
    """Returns the fields of a scheduler before a step by their bare names, without some."""
    state = {name.lstrip("_"): value for name, value in step.state.items()}
    ordered = {name: state[name] for name in FIRST if name in state} | state
    return {name: value for name, value in ordered.items() if name not in constant}


def _constant(first: SchedulerStep, other: SchedulerStep) -> set[str]:
    before, after = _state(first, set()), _state(other, set())
    pairs = {name: value_seams(LOOP, {name: before[name]}, {name: after.get(name)}) for name in before}
    return {name for name, seams in pairs.items() if not any(seam.distance for seam in seams)}


def _call_seams(theirs: list[ConditionCall], ours: list[ConditionCall], step: int) -> Iterator[Seam]:
    """Yields the seams of the networks' calls in a step, matched by network and condition, in whatever order."""
    known, calls = ({(c.network, c.condition, c.number): c for c in each} for each in (theirs, ours))
    words, other = (", ".join(sorted(_call_words(key) for key in each)) or "none" for each in (known, calls))
    yield Seam("calls of networks", LOOP, step, words, other, _distance_unless(known.keys() == calls.keys()), 0.0)
    for key in known:
        if key in calls:
            both = known[key].values.keys() & calls[key].values.keys()
            inputs, others = (
                {**each.tensors, **{name: each.values[name] for name in sorted(both)}}
                for each in (known[key], calls[key])
            )
            suffix = " of the negative prompt" if known[key].condition == NEGATIVE else ""
            yield from value_seams(LOOP, inputs, others, step, suffix)


def _call_words(key: tuple[str, str, int]) -> str:
    network, condition, number = key
    prompt = " with the negative prompt" if condition == NEGATIVE else " with the prompt"
    return f"{network}{prompt}" + (f" again ({number + 1})" if number else "")


def _step_values(step: SchedulerStep) -> dict[str, Any]:
    """Returns what a step was called with, by what it is and the timestep first, and what it returned."""
    names = sorted(step.arguments, key=lambda name: (name != "timestep", name != "model_output"))
    arguments = {RENAMED.get(name, name): step.arguments[name] for name in names}
    return {**arguments, "latents after the step": step.latents}


def _without_padding(x: torch.Tensor, other: torch.Tensor, masks: list[torch.Tensor], stage: str) -> torch.Tensor:
    """Returns tokens without those that the other side has not, if their masks hide them: they change nothing.

    That tokens are zeros is no evidence: attention without a mask sees them. An input of a network that is all zeros
    may stand for an image that is not there; the network is called with it, and its outputs are compared.
    """
    if x.ndim not in (2, 3) or x.ndim != other.ndim or x.shape[1] <= other.shape[1]:
        return x
    length = other.shape[1]
    is_masked = bool(masks) and not any(mask[:, length:].any() for mask in masks)
    is_unread = is_masked or (stage == LOOP and not x.any())
    return x[:, :length] if is_unread else x


def _masks(name: str, tokens: torch.Tensor, values: Mapping[str, Any]) -> list[torch.Tensor]:
    """Returns the masks of tokens: as many columns, zeros and ones, for the same prompt, of the same text encoder."""
    return [
        value
        for key, value in values.items()
        if isinstance(value, torch.Tensor)
        and value.ndim == 2
        and tokens.ndim in (2, 3)
        and value.shape[1] == tokens.shape[1]
        and _prompt_and_encoder(key) == _prompt_and_encoder(name)
        and bool(((value == 0) | (value == 1)).all())
    ]


def _prompt_and_encoder(name: str) -> tuple[bool, str]:
    """Returns whether a name is of the negative prompt, and the number that it ends with: `prompt_embeds_mask_2`."""
    end = name.rpartition("_")[2]
    number = end if end.isdigit() else ""
    return name.startswith(NEGATIVE), number


def _is_same(first: Any, other: Any) -> bool:
    """Returns whether two values that are not both tensors are the same: a tensor is like the number that it holds."""
    values = [x.item() if isinstance(x, torch.Tensor) and x.numel() == 1 else x for x in (first, other)]
    return not any(isinstance(value, torch.Tensor) for value in values) and bool(values[0] == values[1])


def _distance_unless(same: bool) -> float:
    return 0.0 if same else math.inf


def _distance(first: torch.Tensor, other: torch.Tensor) -> float:
    """Returns max|a - b| / max|b|; infinity for other shapes, or where one is not finite and the other is."""
    if first.numel() == other.numel() == 0:
        return 0.0
    if first.shape != other.shape:
        return math.inf
    if torch.equal(first, other):
        return 0.0
    if not first.is_floating_point():
        return math.inf
    a, b = other.double(), first.double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return math.inf
    a, b = a.nan_to_num(posinf=0.0, neginf=0.0), b.nan_to_num(posinf=0.0, neginf=0.0)
    greatest = float(b.abs().max())
    return float((a - b).abs().max()) / greatest if greatest else math.inf


def _worst(first: torch.Tensor, other: torch.Tensor) -> int:
    """Returns the number of the element in which two tensors differ most; 0 if that is among the first."""
    if first.shape != other.shape or not first.numel() or torch.equal(first, other):
        return 0
    difference = (first.double() - other.double()).abs().nan_to_num(nan=math.inf)
    worst = int(difference.argmax())
    return 0 if worst < SHOWN else worst


def _words(value: Any, first: int = 0) -> str:
    """Returns a value as a person reads it: dtype, shape, and some numbers from one of them on."""
    if not isinstance(value, torch.Tensor):
        return "absent" if value is None else repr(value)
    kind = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    numbers = [f"{number:.6g}" for number in value.flatten()[first : first + SHOWN].tolist()]
    more = ", ..." if value.numel() > first + len(numbers) else ""
    before = f"from number {first} on: " if first else ""
    return f"{kind} ({before}{', '.join(numbers)}{more})" if numbers else kind
