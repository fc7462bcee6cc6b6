"""Faults outside the networks: schedule, noise, embeddings, guidance and dtypes of port and original, compared by name.

Both denoising loops run with networks whose outputs are random, see docs/verify.md. The original's loop is the
`__call__` of upstream's pipeline, where that can be called. A seam is a value that passes in or out of a loop.
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
from torch.utils import _pytree as pytree

from torchport import load, patch
from torchport.compile import network
from torchport.compile.in_force import in_force
from torchport.load.foreign import brief, refusals
from torchport.save import tree
from torchport.stages import guiding, outputs
from torchport.stages.beside import KEPT
from torchport.stages.family import Call, Stage, Steps
from torchport.stages.image_latents import MOMENTS, EncodedVae
from torchport.stages.replay import Loop
from torchport.stages.stand_in import NetworkStandIn
from torchport.stages.upstream_pipeline import PipelineInputs, UpstreamPipeline
from torchport.task import Task
from torchport.verify import encoders
from torchport.verify.report import FAULT, Seam, Verdict
from torchport.verify.yardstick import difference

LARGE = 2**20
"""Tensors with more elements are kept for the chosen steps alone: those of all would not fit in memory at 720p."""

NEGATIVE = "negative_"
"""The prefix of the names of the negative prompt's embeddings."""

CONVENTIONS = {"height": "height", "width": "width", "num_frames": "frames", "num_inference_steps": "steps"}
"""The usual arguments of a diffusers pipeline, and the settings that give their values."""


@dataclasses.dataclass
class ConditionCall:
    """The inputs of one call of a network, for one condition of guidance."""

    network: str
    condition: str  #: "" for the prompt, `negative_` for the negative prompt.
    number: int  #: How often the network was called with this condition in this step before.
    #: The network's inputs by path; of each batch, the row of this condition.
    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]


@dataclasses.dataclass
class SchedulerStep:
    """One call of a scheduler's `step`, and the calls of networks since the call before."""

    state: dict[str, Any]  #: The scheduler's fields before the call.
    arguments: dict[str, Any]  #: The arguments of the scheduler's `step`, by its parameter names.
    #: The latents that it returns; None if they are too large to keep.
    latents: torch.Tensor | None
    calls: list[ConditionCall]


@dataclasses.dataclass(eq=False)
class LoopRecord:
    """The values that a denoising loop passes to the scheduler and the networks, recorded step by step."""

    chosen: Collection[int]  #: Steps, from 0, of which large tensors are kept.
    steps: list[SchedulerStep] = dataclasses.field(default_factory=list)
    calls: list[ConditionCall] = dataclasses.field(default_factory=list)  #: Since the last step.
    _depth: int = 0

    def copy_of(self, value: Any) -> Any:
        """Returns a copy of a tree; unless this step is chosen, None replaces large tensors."""
        limit = math.inf if len(self.steps) in self.chosen else LARGE
        return pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone() if x.numel() <= limit else None, value)

    def add(self, network: str, condition: str, tensors: Mapping[str, torch.Tensor], values: dict[str, Any]) -> int:
        """Adds a call of a network to the current step, without tensors that are too large to keep. Returns how often
        the network was called with this condition in this step before.
        """
        number = sum(call.network == network and call.condition == condition for call in self.calls)
        copies = {name: self.copy_of(tensor) for name, tensor in tensors.items()}
        kept = {name: tensor for name, tensor in copies.items() if tensor is not None}
        self.calls.append(ConditionCall(network, condition, number, kept, values))
        return number

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Patches `step` of all scheduler classes of diffusers for the length of a `with`, to record the calls."""
        changed = [(cls, vars(cls)["step"]) for cls in _schedulers() if "step" in vars(cls)]
        for cls, step in changed:
            cls.step = self._recorder(step)
        try:
            yield
        finally:
            for cls, step in changed:
                cls.step = step

    def _recorder(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a scheduler's `step` that also records its arguments, and the scheduler's state before."""

        @functools.wraps(step)
        def recording_step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if self._depth:  # a call of `super().step`, within a recorded call
                return step(scheduler, *args, **kwargs)
            state = {name: value for name, value in vars(scheduler).items() if tree.is_packable(value)}
            arguments = dict(inspect.signature(step).bind(scheduler, *args, **kwargs).arguments)
            del arguments[next(iter(arguments))]  # the scheduler itself
            arguments = {name: value for name, value in arguments.items() if tree.is_packable(value)}
            record = SchedulerStep(self.copy_of(state), self.copy_of(arguments), None, self.calls)
            self._depth += 1
            try:
                returned = step(scheduler, *args, **kwargs)
            finally:
                self._depth -= 1
            latents = returned[0] if isinstance(returned, tuple) else getattr(returned, "prev_sample", None)
            record.latents = self.copy_of(latents)
            self.steps.append(record)
            self.calls = []
            return returned

        return recording_step


def _schedulers() -> list[Any]:
    from diffusers.schedulers.scheduling_utils import SchedulerMixin

    classes: list[Any] = [SchedulerMixin]
    for cls in classes:  # grows as it is read, so that subclasses of subclasses are found
        classes += [sub for sub in cls.__subclasses__() if sub not in classes]
    return classes


@dataclasses.dataclass(eq=False)
class _MadeUpNetwork(Call):
    """Replaces a network: returns random outputs, and records its inputs."""

    network: str
    template: Any  #: An output of the network, [B, ...]: a tensor, or a tuple of tensors.
    #: The embeddings of both prompts; a row of inputs belongs to the prompt with the nearest embeddings.
    embeddings: Mapping[str, torch.Tensor]
    record: LoopRecord
    batches: bool  #: This and `drops`: True for a port, as of `Compiled`; False for the original.
    drops: bool

    def __call__(self, **inputs: Any) -> Any:
        """Returns random outputs [B, ...], a row for each condition; equal in port and original."""
        tensors = {name: leaf for name, leaf in outputs.leaves(inputs).items() if isinstance(leaf, torch.Tensor)}
        values = {name: value for name, value in inputs.items() if type(value) in (bool, int, float, str)}
        batch = next(x.shape[0] for x in tensors.values() if x.ndim > 2)  # of latents or embeddings
        seeds = []  # of each row: they depend on the step, the condition and its number of calls alone
        for n in range(batch):
            row = {key: x[n : n + 1] if x.ndim and x.shape[0] == batch else x for key, x in tensors.items()}
            condition = self._condition(row)
            number = self.record.add(self.network, condition, row, values)
            seeds.append(1000 * len(self.record.steps) + 10 * number + (condition == NEGATIVE))
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        # Normal noise with a row for each seed, in the shape and dtype of the template's rows.
        return outputs.map_tensors(
            self.template,
            lambda x: torch.stack([torch.randn(x.shape[1:], generator=seeded) for seeded in generators]).to(x.dtype),
        )

    def _condition(self, row: Mapping[str, torch.Tensor]) -> str:
        """Returns `negative_` if the row's embeddings are nearer to those of the negative prompt, else ""."""
        distances = {}
        for prefix in ("", NEGATIVE):
            known = [x for name, x in self.embeddings.items() if name.startswith(NEGATIVE) == bool(prefix)]
            nearest = (min((_token_distance(x, other) for other in known), default=math.inf) for x in row.values())
            distances[prefix] = sum(distance for distance in nearest if distance < math.inf)
        return NEGATIVE if distances[NEGATIVE] < distances[""] else ""


def _token_distance(x: torch.Tensor, known: torch.Tensor) -> float:
    """Returns the mean distance of two embeddings over the tokens that both have; infinity if their shapes differ."""
    is_like = x.ndim == known.ndim and x.shape[:1] == known.shape[:1] and x.shape[2:] == known.shape[2:]
    if not is_like or x.ndim not in (2, 3) or x.shape[1] == 0:
        return math.inf
    length = min(x.shape[1], known.shape[1])
    return float((x[:, :length].float() - known[:, :length].float()).abs().mean())


class _UpstreamLoop(Loop):
    """A loop of upstream's that calls the networks in each step; its base class may return saved results instead."""

    def returned(self, track: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns the result of the scheduler's own `step`, recorded by `LoopRecord`."""
        return self.tracks[track].real(*args, **kwargs)


def _has_upstream_loop(task: Task) -> bool:
    """Returns whether upstream's denoising loop can be called; if not, port and original share the family's loop."""
    return task.card.pipeline is not None or hasattr(task.family, "upstream_loop")


def _run_upstream(
    task: Task, parts: Mapping[str, Any], calls: Mapping[str, _MadeUpNetwork], inputs: Mapping[str, Any]
) -> None:
    """Takes the original's denoising steps in upstream's loop: a pipeline's `__call__`, or `upstream_loop` of a family.
    `inputs` are the outputs of the stages before, and `noise` if the user gives it.
    """
    settings = task.settings
    if hasattr(task.family, "upstream_loop"):
        # A family with `upstream_loop` compiles one network.
        [call] = calls.values()
        task.family.upstream_loop(parts, call, settings, **inputs)
        return
    generator = torch.Generator().manual_seed(settings.seed)
    if task.card.call is None:
        _run_pipeline(task, parts, calls, inputs, _UpstreamLoop(parts["scheduler"], generator))
        return
    place = task.card_document.place(["call"])
    text_encoders = task.card.text_encoders
    upstream = UpstreamPipeline(str(task.card.pipeline), task.card.call, place, text_encoders)
    loop = _UpstreamLoop(parts["scheduler"], generator, latents=upstream.latents)
    moments = {name: value for name, value in inputs.items() if name.startswith(MOMENTS)}
    kept = {name: value for name, value in inputs.items() if name.startswith(f"{KEPT}.")}
    embeddings = {name: value for name, value in inputs.items() if name not in (*moments, *kept, "noise")}
    vae = EncodedVae(parts["vae"], settings.dtypes["vae"], moments, upstream.image_stage)
    noise = {"latents": inputs["noise"]} if "noise" in inputs else {}
    others = upstream.others(parts, settings, kept)
    upstream.called(PipelineInputs(parts, settings, embeddings, loop, vae, others, calls, arguments=noise))


def _run_pipeline(
    task: Task,
    parts: Mapping[str, Any],
    calls: Mapping[str, _MadeUpNetwork],
    inputs: Mapping[str, Any],
    loop: _UpstreamLoop,
) -> None:
    """Calls a pipeline of diffusers whose arguments have the usual names, with the outputs of the stages before."""
    settings, cls = task.settings, load.class_of(str(task.card.pipeline))
    stand_ins = {name: NetworkStandIn(parts[name], settings.dtypes[name], loop, call) for name, call in calls.items()}
    components = {**parts, **stand_ins}
    if "guider" in parts:
        components["guider"] = guiding.guider(parts["guider"], settings)
    names = list(inspect.signature(cls.__init__).parameters)[1:]  # without `self`
    pipe = cls(**{name: components.get(name) for name in names})
    pipe.set_progress_bar_config(disable=True)
    arguments = {name: getattr(settings, setting) for name, setting in CONVENTIONS.items()}
    arguments |= {"guidance_scale": settings.guidance_scale, "generator": loop.generator, "output_type": "latent"}
    arguments |= {"latents" if name == "noise" else name: value for name, value in inputs.items()}
    known = inspect.signature(pipe.__call__).parameters
    with torch.no_grad():
        pipe(**{name: value for name, value in arguments.items() if name in known}, return_dict=False)


ROUNDINGS = 2
"""Roundings by which the same arithmetic in another order may differ. Both loops run on one host."""
FIRST = ("timesteps", "sigmas")
"""Fields of a scheduler that are compared first: the others follow from them."""
RENAMED = {"model_output": "guidance", "sample": "latents"}
"""Other names of the arguments of a scheduler's `step`: `model_output` is the result of guidance."""
SHOWN = 4
"""Numbers of a tensor that a person is shown."""
STEPS = "number of scheduler steps"
"""The seam of how many steps a loop takes."""
LOOP = "denoise"
"""The stage of a loop's seams."""


@dataclasses.dataclass(frozen=True)
class SideRecord:
    """The values of one side, the original or the port, that pass in or out of its loop."""

    encoded: dict[str, dict[str, torch.Tensor]]  #: The outputs of the stages that encode the prompt, by stage.
    moments: dict[str, torch.Tensor]  #: The outputs of the stage that encodes an image with the VAE.
    loop: LoopRecord  #: The scheduler's steps, and the calls of networks in each.
    #: The exception that upstream raised in a port's loop; None where the loop came to its end.
    stopped: Exception | None = None
    #: The original's encoders, where a port encodes on the devices; without modules in a capture.
    yardstick: encoders.Yardstick | None = None
    #: The modules of a port's encoders on the devices that differ most.
    modules: list[Seam] = dataclasses.field(default_factory=list)


def compare(
    port: Task, folder: Path, reference: SideRecord, templates: Mapping[str, Any]
) -> tuple[list[Seam], list[str]]:
    """Runs the port with made-up network outputs, and returns how its values differ from the original's `reference`:
    the seams, and notes on what was not compared, a line each. For `templates` see `record`.
    """
    side = record(port, folder, reference.loop.chosen, templates, reference)
    rows = differences(reference, side)
    notes = list[str]()
    if side.stopped is not None:  # reported as a consequence of a seam that differs; raised if none does
        if all(row.verdict is Verdict.SAME for row in rows if row.name != STEPS):
            raise side.stopped
        notes.append(f"the loop after step {len(side.loop.steps)}: the port's stops with {brief(side.stopped)}")
    if any(stage.network for stage in encoding_stages(port)):
        notes.append("the image's moments: the port takes the original's, whose VAE encodes it in PyTorch")
    if not _has_upstream_loop(port):
        notes.append("the loop: that of the family is both the port's and the original's")
    return rows, notes


def encoding_stages(task: Task) -> list[Stage]:
    """Returns the stages before denoising, which encode the prompt and the image."""
    names = [stage.name for stage in task.family.STAGES]
    return list(task.family.STAGES[: names.index(task.denoising[0].name)])


def record(
    task: Task,
    folder: Path,
    chosen: Collection[int],
    templates: Mapping[str, Any],
    reference: SideRecord | None = None,
    encoded: Mapping[str, dict[str, torch.Tensor]] | None = None,
) -> SideRecord:
    """Returns the values of the port's or the original's loop. Only encoders run; networks' outputs are random.

    Args:
        chosen: Steps, from 0, whose large tensors are compared.
        templates: An output of each network; its made-up outputs have this shape and dtype.
        reference: The original's record, if `task` is a port: the port's loop gets the original's embeddings, so that
            an error of an encoder is reported once.
        encoded: The outputs of each encoding stage, if they are known; None: the encoders run.
    """
    with in_force(task, task.stages):
        side = _encoded(task, folder, LoopRecord(chosen), encoded, reference)
        source = reference or side
        inputs = {name: x for values in source.encoded.values() for name, x in values.items()} | source.moments
        with side.loop.recording():
            try:
                _denoise(task, folder, side.loop, templates, inputs)
            except refusals() as error:
                if reference is None:
                    raise
                return dataclasses.replace(side, stopped=error)
    return side


def _encoded(
    task: Task,
    folder: Path,
    loop: LoopRecord,
    encoded: Mapping[str, dict[str, torch.Tensor]] | None,
    reference: SideRecord | None,
) -> SideRecord:
    """Returns a record after encoding; for the arguments see `record`. A port takes the original's moments of the image
    from `reference`. The original's record has the yardstick of encoders that the port has on the devices.
    """
    side = SideRecord({}, {} if reference is None else reference.moments, loop)
    for stage in encoding_stages(task):
        # The stage with a network is that of the VAE, which encodes the image.
        if reference is not None and stage.network is not None:
            continue
        if reference is not None and task.encodes_on_devices(stage):
            values, modules = encoders.encoded(task, stage, folder, reference.yardstick)
            side.modules.extend(modules)
        else:
            values = encode(task, stage, folder) if encoded is None else encoded[stage.name]
        if reference is None and task.original and task.job.encode == "devices" and stage.name == "encode":
            side = dataclasses.replace(side, yardstick=encoders.yardstick_of(task, stage, folder, values))
        if stage.network is None:
            side.encoded[stage.name] = values
        else:
            side.moments.update(values)
    return side


def encode(task: Task, stage: Stage, folder: Path) -> dict[str, torch.Tensor]:
    """Runs an encoding stage on the host, under its patches, and returns its outputs."""
    with patch.applied(task.patches([stage]), stage=stage.name):
        parts = _loaded(task, stage, folder)
        call = None if stage.network is None else network.eager(task, stage, parts, folder)
        return stage.run(parts, call, task.settings, Steps())


def _denoise(
    task: Task, folder: Path, record: LoopRecord, templates: Mapping[str, Any], inputs: Mapping[str, torch.Tensor]
) -> None:
    """Takes all denoising steps, with made-up outputs shaped as `templates`; fills `record`."""
    is_port = not task.original
    calls = {
        name: _MadeUpNetwork(name, template, inputs, record, batches=is_port, drops=is_port)
        for name, template in templates.items()
    }
    stage_inputs = {**inputs, **task.noise(task.denoising[0])}
    if task.original and _has_upstream_loop(task):
        with patch.applied(task.patches(task.denoising)):
            by_stage = [_loaded(task, stage, folder) for stage in task.denoising]
            parts = {name: part for loaded in by_stage for name, part in loaded.items()}
            _run_upstream(task, parts, calls, stage_inputs)
        return
    # The outputs of the denoising stage before; `done` is its number of steps.
    before: Mapping[str, torch.Tensor] = {}
    for stage in task.denoising:
        with patch.applied(task.patches([stage]), stage=stage.name):
            parts = _loaded(task, stage, folder)
            state = {name: value for name, value in before.items() if name != "done"}
            steps = Steps(resume=(int(before["done"]), state) if before else None)
            before = stage.run(parts, calls[str(stage.network)], task.settings, steps, **stage_inputs)
            # The first stage alone takes the noise.
            stage_inputs = dict(inputs)


def _loaded(task: Task, stage: Stage, folder: Path) -> dict[str, Any]:
    """Returns a stage's components; the original's do not go through the family's `prepare`."""
    return network.loaded(task, dataclasses.replace(stage, prepare=None) if task.original else stage, folder)


def differences(original: SideRecord, port: SideRecord) -> list[Seam]:
    """Returns a seam, the comparison of one value of the loop, for each value by name, in the order of a run."""
    stages = original.encoded.items()
    rows = [row for stage, values in stages for row in value_seams(stage, values, port.encoded[stage])]
    if original.yardstick is not None:
        roundings = original.yardstick.roundings
        # From the yardstick the original is one rounding away, and the port may be `FAULT` roundings.
        allowed = [max(row.allowed, (1 + FAULT) * roundings.get(row.name, 0.0)) for row in rows]
        pairs = zip(rows, allowed, strict=True)
        rows = [*port.modules, *(dataclasses.replace(row, allowed=limit) for row, limit in pairs)]
    # If the port's loop stopped, its number of steps comes last: it is a consequence of what differs before.
    return [
        *rows,
        *sorted(_loop_seams(original.loop, port.loop), key=lambda row: row.name == STEPS and bool(port.stopped)),
    ]


def value_seams(
    stage: str, original: Mapping[str, Any], port: Mapping[str, Any], step: int | None = None, suffix: str = ""
) -> Iterator[Seam]:
    """Yields a seam for each value in two trees of tensors and numbers, and a seam for each dtype that differs."""
    originals = outputs.leaves(original)
    ported = outputs.leaves(port)
    for name in {**originals, **ported}:
        expected = originals.get(name)
        other = ported.get(name)
        if not isinstance(expected, torch.Tensor) or not isinstance(other, torch.Tensor):
            # A tensor of one element counts as a number; a larger tensor equals nothing.
            values = [x.item() if isinstance(x, torch.Tensor) and x.numel() == 1 else x for x in (expected, other)]
            is_same = not any(isinstance(value, torch.Tensor) for value in values) and bool(values[0] == values[1])
            distance = 0.0 if is_same else math.inf
            yield Seam(f"{name}{suffix}", stage, step, _words(expected), _words(other), distance, allowed=0.0)
            continue
        if expected.dtype != other.dtype:
            first, second = (str(x.dtype).removeprefix("torch.") for x in (expected, other))
            yield Seam(f"dtype of {name}{suffix}", stage, step, first, second, math.inf, allowed=0.0)
        masks, other_masks = _masks(name, expected, originals), _masks(name, other, ported)
        # Each is cut to the tokens of the other: either may have more.
        pair = _without_padding(expected, other, masks, stage), _without_padding(other, expected, other_masks, stage)
        expected, other = pair
        index = _worst_index(expected, other)
        words = _words(expected, index), _words(other, index)
        # The distance that rounding in the original's dtype may cause.
        allowed = ROUNDINGS * torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0.0
        yield Seam(f"{name}{suffix}", stage, step, *words, _distance(expected, other), allowed)


def _loop_seams(original: LoopRecord, port: LoopRecord) -> Iterator[Seam]:
    """Yields the seams of two loops, step by step: the scheduler's state, networks' inputs, arguments, latents."""
    yield from value_seams(LOOP, {STEPS: len(original.steps)}, {STEPS: len(port.steps)})
    for n, (expected, ported) in enumerate(zip(original.steps, port.steps, strict=False)):
        # The scheduler's first state and the noise belong to no step.
        if n == 0:
            yield from value_seams(LOOP, _state(expected, left_out=set()), _state(ported, left_out=set()))
            noise, other = ({"noise": step.arguments.get("sample")} for step in (expected, ported))
            yield from value_seams(LOOP, noise, other)
        else:
            unchanged = _unchanged_fields(original.steps[0], expected) & _unchanged_fields(port.steps[0], ported)
            states = _state(expected, unchanged), _state(ported, unchanged)
            yield from value_seams(LOOP, *states, n, " of the scheduler")
        yield from _call_seams(expected.calls, ported.calls, n)
        yield from value_seams(LOOP, _step_values(expected), _step_values(ported), n)


def _state(step: SchedulerStep, left_out: set[str]) -> dict[str, Any]:
    """Returns a scheduler's state before a step, timesteps and sigmas first, without the fields in `left_out`."""
    state = {name.lstrip("_"): value for name, value in step.state.items()}
    ordered = {name: state[name] for name in FIRST if name in state} | state
    return {name: value for name, value in ordered.items() if name not in left_out}


def _unchanged_fields(first: SchedulerStep, other: SchedulerStep) -> set[str]:
    """Returns the fields of a scheduler's state that are the same at a step as at the first one."""
    before = _state(first, left_out=set())
    after = _state(other, left_out=set())
    pairs = {name: value_seams(LOOP, {name: before[name]}, {name: after.get(name)}) for name in before}
    return {name for name, seams in pairs.items() if not any(seam.distance for seam in seams)}


def _call_seams(original: list[ConditionCall], port: list[ConditionCall], step: int) -> Iterator[Seam]:
    """Yields the seams of the networks' inputs in a step; calls are paired by network, condition and number."""
    originals, ported = ({(c.network, c.condition, c.number): c for c in side} for side in (original, port))
    names, others = (", ".join(sorted(map(_call_name, side.values()))) or "none" for side in (originals, ported))
    yield Seam("calls of networks", LOOP, step, names, others, 0.0 if names == others else math.inf, allowed=0.0)
    for key, call in originals.items():
        if key in ported:
            both = sorted(call.values.keys() & ported[key].values.keys())
            inputs, other = ({**c.tensors, **{name: c.values[name] for name in both}} for c in (call, ported[key]))
            suffix = " of the negative prompt" if call.condition == NEGATIVE else ""
            yield from value_seams(LOOP, inputs, other, step, suffix)


def _call_name(call: ConditionCall) -> str:
    """Returns a call as a person reads it: `transformer with the negative prompt again (2)`."""
    prompt = " with the negative prompt" if call.condition == NEGATIVE else " with the prompt"
    return f"{call.network}{prompt}" + (f" again ({call.number + 1})" if call.number else "")


def _step_values(step: SchedulerStep) -> dict[str, Any]:
    """Returns the arguments of a scheduler's step by their names in reports, timestep first; and the new latents."""
    names = sorted(step.arguments, key=lambda name: (name != "timestep", name != "model_output"))
    arguments = {RENAMED.get(name, name): step.arguments[name] for name in names}
    return {**arguments, "latents after the step": step.latents}


def _without_padding(x: torch.Tensor, other: torch.Tensor, masks: list[torch.Tensor], stage: str) -> torch.Tensor:
    """Returns `x` cut to the tokens of `other`, if the masks hide all further tokens; else `x` as it is.

    Zeros alone are no reason to cut: attention without a mask sees such tokens. The exception is an input of the loop
    that is all zeros, as for an image that is not there.
    """
    if x.ndim not in (2, 3) or x.ndim != other.ndim or x.shape[1] <= other.shape[1]:
        return x
    length = other.shape[1]
    is_masked = bool(masks) and not any(mask[:, length:].any() for mask in masks)
    is_unread = is_masked or (stage == LOOP and not x.any())
    return x[:, :length] if is_unread else x


def _masks(name: str, tokens: torch.Tensor, values: Mapping[str, Any]) -> list[torch.Tensor]:
    """Returns the attention masks that belong to tokens: 2-D, of zeros and ones, of the same prompt and encoder."""
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
    """Returns whether a name is of the negative prompt, and its text encoder: `2` of `prompt_embeds_mask_2`, or ""."""
    end = name.rpartition("_")[2]
    number = end if end.isdigit() else ""
    return name.startswith(NEGATIVE), number


def _distance(first: torch.Tensor, other: torch.Tensor) -> float:
    """Returns max|other - first| / max|first|; infinity if shapes, integers or the places of NaN differ."""
    if first.numel() == other.numel() == 0:
        return 0.0
    if first.shape != other.shape:
        return math.inf
    if torch.equal(first, other):
        return 0.0
    if not first.is_floating_point() or not torch.equal(other.isfinite(), first.isfinite()):
        return math.inf
    return difference(*(x.nan_to_num(posinf=0.0, neginf=0.0) for x in (other, first)))


def _worst_index(first: torch.Tensor, other: torch.Tensor) -> int:
    """Returns the flat index at which two tensors differ most; 0 if it is below `SHOWN`, or if nothing differs."""
    if first.shape != other.shape or not first.numel() or torch.equal(first, other):
        return 0
    errors = (first.double() - other.double()).abs().nan_to_num(nan=math.inf)
    worst = int(errors.argmax())
    return 0 if worst < SHOWN else worst


def _words(value: Any, first: int = 0) -> str:
    """Returns a value as a person reads it: dtype, shape, and `SHOWN` numbers from the flat index `first` on."""
    if not isinstance(value, torch.Tensor):
        return "absent" if value is None else repr(value)
    kind = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    numbers = [f"{number:.6g}" for number in value.flatten()[first : first + SHOWN].tolist()]
    more = ", ..." if value.numel() > first + len(numbers) else ""
    before = f"from number {first} on: " if first else ""
    return f"{kind} ({before}{', '.join(numbers)}{more})" if numbers else kind
