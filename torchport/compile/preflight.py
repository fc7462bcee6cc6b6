"""Checks a stage's network on its mesh from shapes alone, so that nothing fails hours later.

We run the stage's own verb with a recorder in place of the network. So the names and shapes of the network's inputs are
those of the real run. `run` and `shard show` refuse the same tasks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchport import load, shard
from torchport.compile import network
from torchport.compile.rules import of_task
from torchport.config.card import DENOISING
from torchport.config.machine import HOST
from torchport.config.strategy import Rule, WeightRule, dims_of
from torchport.errors import AttentionError, MeshError
from torchport.kernels.attention import dispatch, sdpa
from torchport.load import checkpoint
from torchport.shard import activations
from torchport.stages import family, guiding, outputs, recorder
from torchport.task import Task, devices

LARGE = 2**24
"""Elements from which a tensor of a rehearsal has no values. Verbs read the values of masks and noise levels, which are
far smaller."""


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """The facts on a stage's network that follow from shapes alone; all its rules fit."""

    module: torch.nn.Module
    weights: dict[str, WeightRule]  #: The rule of every parameter and buffer, with the spec that fits.
    #: The verb's calls of the network, one for each set of shapes; none if the stage has no `like`.
    calls: list[recorder.NetworkCall]
    inputs: dict[str, Rule]  #: The rule of every input of the largest call, with the spec that fits.
    #: Bytes that each device holds at least beside the weights: the inputs of a call, and its share of the largest
    #: output of one layer.
    activations: int
    #: The calls of attention, each as the arguments of `sdpa`, tensors without values.
    attention: list[dict[str, Any]]


def check(task: Task) -> None:
    """Refuses a task whose networks cannot run on its mesh and machine; patches must be in place."""
    network.check_classes(task)
    _check_guider(task)
    memory = _memory(task)
    _require(task, memory, {})
    if task.original:
        return
    network.check_heads(task)
    activation_bytes: dict[str, int] = {}
    for stage in task.stages:
        if stage.network is not None:
            rehearsal = rehearse(task, stage)
            check_attention(task, rehearsal)
            activation_bytes[stage.network] = rehearsal.activations
    _require(task, memory, activation_bytes)


def _check_guider(task: Task) -> None:
    """Refuses a guider that does more than combine predictions, or with a number of them that `dp` does not divide."""
    if task.settings.guider is None or not any("guider" in stage.uses for stage in task.stages):
        return
    place, ways = task.job_document.place(["guider"]), task.job.mesh.get("dp", 1)
    guider = guiding.guider(from_checkpoint=None, settings=task.settings, place=place)  # the job names its class
    bad = [count for count in guiding.counts(guider, task.settings.steps, place) if count % ways]
    if bad and not task.original:
        fact = f"dp={ways} splits the conditions, and '{task.settings.guider['class']}' has {bad[0]} in some steps"
        raise MeshError(task.job_document.place(["mesh", "dp"]), fact, "Choose a mesh without dp, or no start and stop")


def check_checkpoint(task: Task, folder: Path) -> None:
    """Refuses a checkpoint that lacks a part, or holds a part of another model, before any stage runs."""
    if task.card.call is not None:
        load.check_init(task.card, folder)
    for stage in task.stages:
        names = [stage.network] if stage.network is not None else []
        for name in (*stage.parts, *stage.loads(task.settings), *names):
            component, path = task.card.components[name], task.component_folder(folder, name)
            # Of these the card has the configuration, so that their shapes can be checked, too.
            is_in_card = load.is_built_here(component) and not load.reads_config(component)
            recipe = network.recipe(task, name, folder) if is_in_card else None
            load.account_component(component, path, network.layout(task, name), recipe)


_Memory = tuple[dict[str, int], list[tuple[int, int, str]]]
"""The bytes of weights on each device, by network; and of each stage: the bytes of its weights in the host's memory,
those of its latents or frames there, and its network."""


def _memory(task: Task) -> _Memory:
    device_bytes: dict[str, int] = {}
    host_bytes = []
    for stage in task.stages:
        on_host = [*stage.parts, *([stage.network] if stage.network and task.original else [])]
        if stage.load is not None:  # upstream's own loader reads the encoders, which have no dtype in the card
            on_host += [name for name, component in task.card.components.items() if component.dtype is None]
        weights = sum(_host_bytes(task, name) for name in on_host)
        host_bytes.append((weights, _tensor_bytes(task, stage), str(stage.network)))
        if stage.network and not task.original:
            device_bytes[stage.network] = _device_bytes(task, stage, stage.network)
    return device_bytes, host_bytes


def host_bytes(task: Task) -> int:
    """Returns the bytes of host memory that the largest of all stages takes, whichever the task runs."""
    whole = dataclasses.replace(task, request=dataclasses.replace(task.request, stage="all"))
    return max(weights + tensors for weights, tensors, _ in _memory(whole)[1])


def _require(task: Task, memory: _Memory, activation_bytes: Mapping[str, int]) -> None:
    """Refuses a task that needs more devices or memory than this machine has. `activation_bytes` has, by component, the
    least bytes on each device beside a network's weights. It is empty before the rehearsal, which can take place only
    once latents and frames are known to fit.
    """
    device_bytes, host_bytes = memory
    if not task.original:
        devices.prepare(task.machine)
    # Virtual CPU devices have the host's memory.
    shared = task.job.devices if task.machine.platform == "cpu" else 0
    host = [(weights, tensors + shared * activation_bytes.get(name, 0)) for weights, tensors, name in host_bytes]
    weights, tensors = max([(0, 0), *host], key=sum)
    count = task.job.devices if device_bytes else 0
    path_flag = f" --upstream-path {task.request.upstream_path}" if task.request.upstream_path else ""
    devices.require(
        task.machine if device_bytes else HOST,
        devices.Need(count, device_bytes, weights, task.checkpoint, tensors, dict(activation_bytes)),
        f'torchport run --model {task.card.model}{path_flag} --config {task.card.demo} --prompt "..."',
    )


def _host_bytes(task: Task, component: str) -> int:
    """Returns the bytes of a component's weights, by the checkpoint's files or else the card; 0 for tiny ones."""
    if task.is_tiny:
        return 0
    dtype = task.settings.dtypes.get(component, torch.float16)  # assumed where the card has none
    root = checkpoint.described(task.checkpoint, task.card)
    folder = None if root is None else task.component_folder(root, component)
    if folder is None or not any(folder.glob("*.safetensors")):
        return dtype.itemsize * network.parameters(task, component)
    return dtype.itemsize * network.layout(task, component).parameters(folder)


def _tensor_bytes(task: Task, stage: family.Stage) -> int:
    """Returns the most bytes of latents or frames that a stage holds in the host's memory; 0 for other stages.

    A denoising step holds the latents, the prediction and the new latents. Decoding holds the VAE's output beside the
    frames made from it. The video file is encoded one frame at a time.
    """
    last = task.family.STAGES[-1]
    settings = task.settings
    if stage.name == "decode":
        dtype = settings.dtypes.get(str(stage.network), torch.float32)
        video = 3 * settings.frames * settings.height * settings.width  # 3 colours
        return 2 * video * dtype.itemsize
    if stage.name not in DENOISING or last.like is None:
        return 0
    with without_values():  # the inputs of the last stage, decode, are the latents
        latents = last.like(network.outlines(task, last), settings).values()
    sizes: list[int] = [tensor.numel() * tensor.dtype.itemsize for tensor in latents]
    return 3 * sum(sizes)


def _device_bytes(task: Task, stage: family.Stage, name: str) -> int:
    """Returns the bytes of the stage's weights on each device under the job's strategy and mesh."""
    prefix = f"{stage.submodule}." if stage.submodule else ""
    shapes = {
        key.removeprefix(prefix): tuple(parameter.shape)
        for key, parameter in network.outline(task, name).named_parameters()
        if key.startswith(prefix) and not network.is_left_out(stage, key)
    }
    written = of_task(task, name)
    # Buffers are made later: rules for them match nothing yet, or only what an earlier rule matches.
    firsts = shard.firsts(written.as_written.weights, shapes)
    rules = [rule for n, rule in enumerate(written.as_written.weights) if n in firsts]
    rule_of = shard.match(rules, shapes, task.job.mesh, written.place("weights"))
    return shard.device_bytes(shapes, rule_of, task.job.mesh, task.dtype(name))


def rehearse(task: Task, stage: family.Stage) -> Rehearsal:
    """Runs a stage on shapes alone, and returns its network with the rules of all tensors; patches must be in place."""
    name = str(stage.network)
    rules, mesh = of_task(task, name), shard.abstract_mesh(task.job.mesh, task.machine)
    with without_values(), jax.sharding.use_abstract_mesh(mesh):
        parts = network.as_shapes(task, stage)
        module = network.module_of(stage, parts)
        weights = network.weight_rules(task, stage, module)
        place = rules.place("activations")
        check_called = activations.check(module, rules.as_written.activations, dict(mesh.shape), place)
        if stage.like is None:
            return Rehearsal(module, weights, calls=[], inputs={}, activations=0, attention=[])
        attention = _AttentionCalls()
        with _largest_output(module) as largest, attention:
            calls = recorder.network_calls(
                stage, parts, module, network.how(stage, task), task.settings, count=False, **task.noise(stage)
            )
        check_called()
    inputs = input_rules(task, name, calls)
    per_device = [_activation_bytes(call, fitted, task, largest[0]) for call, fitted in zip(calls, inputs, strict=True)]
    largest_call = max(range(len(calls)), key=lambda n: sum(x.numel() for x in calls[n].tensors.values()))
    return Rehearsal(module, weights, calls, inputs[largest_call], max(per_device), list(attention.calls.values()))


def input_rules(task: Task, component: str, calls: Sequence[recorder.NetworkCall]) -> list[dict[str, Rule]]:
    """Returns the rule of every input, for each call; refuses unused rules, and a batch left whole under `dp`."""
    rules = of_task(task, component)
    mesh = task.job.mesh
    ways, batch = mesh.get("dp", 1), task.family.batch(task.settings.guidance_scale)
    place = rules.place("inputs")
    places = rules.places("inputs")
    names = [k for call in calls for k in (*call.tensors, *call.kept)]
    shard.check_alive(rules.inputs, names, place, places)
    rules_by_call = []
    for call in calls:
        # Outputs that become inputs of later calls, `kept`, are checked here, too.
        shapes = shard.named_shapes({**call.tensors, **call.kept})
        fitting = {key: shard.input_rule(rules.inputs, key, shapes[key], mesh, place, component) for key in shapes}
        for key, rule in fitting.items():
            shape, is_split = shapes[key], any("dp" in axes for axes in dims_of(rule.spec))
            if ways > 1 and shape[:1] == (batch,) and not is_split:
                number = next(n for n, other in enumerate(rules.inputs) if shard.matches(other, key))
                fact = f"'{rule.match}' gives every device the whole batch of '{key}' {list(shape)}, an input of"
                fact = f"{fact} {component}, and the mesh has dp={ways}"
                raise MeshError(places[number], fact, "Split it with the spec [dp]", name=key)
        rules_by_call.append({key: fitting[key] for key in call.tensors})
    return rules_by_call


def _activation_bytes(call: recorder.NetworkCall, rules: Mapping[str, Rule], task: Task, largest: int) -> int:
    """Returns the least bytes of a call on each device beside weights; `largest`: bytes of the largest output."""
    output: int = sum(leaf.numel() * leaf.dtype.itemsize for leaf in outputs.leaves({"": call.output}).values())
    inputs = 0
    for name, tensor in call.tensors.items():
        axes = itertools.chain(*dims_of(rules[name].spec))
        inputs += tensor.numel() * tensor.dtype.itemsize // shard.ways(axes, task.job.mesh)
    return inputs + max(output, largest) // task.job.devices


@contextlib.contextmanager
def _largest_output(module: torch.nn.Module) -> Iterator[list[int]]:
    """Yields a list with the bytes of the largest output of a layer with a matrix, which no compiler removes."""
    largest = [0]

    def note(_: Any, __: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            largest[0] = max(largest[0], output.numel() * output.dtype.itemsize)

    layers = [part for part in module.modules() if any(p.ndim > 1 for p in part.parameters(recurse=False))]
    with contextlib.ExitStack() as hooks:
        for part in layers:
            hooks.enter_context(part.register_forward_hook(note))
        yield largest


class _AttentionCalls(TorchFunctionMode):
    """Notes the calls of PyTorch's attention while it is entered, once for each set of shapes and other arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, dict[str, Any]] = {}

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of PyTorch; if it is attention, notes its arguments, with shapes in place of tensors."""
        kwargs = kwargs or {}
        if function is torch.nn.functional.scaled_dot_product_attention:
            positional = dict(zip(inspect.signature(sdpa.scaled_dot_product_attention).parameters, args, strict=False))
            arguments = positional | kwargs
            for name, value in arguments.items():
                if isinstance(value, torch.Tensor):
                    arguments[name] = jax.ShapeDtypeStruct(tuple(value.shape), shard.KINDS[value.dtype])
            self.calls.setdefault(repr(arguments), arguments)
        return function(*args, **kwargs)


def check_attention(task: Task, rehearsal: Rehearsal) -> None:
    """Refuses calls of attention that the job's implementation cannot compute, or for which no tile fits the chip."""
    if task.job.attention == "splash_int8" and not task.card.score_bounds:
        fact = f"'splash_int8' is for scores with a bound, and the card '{task.card.model}' has no score_bounds"
        raise AttentionError(task.job_document.place(["attention"]), fact, "Use 'splash_transposed'")
    mesh = shard.abstract_mesh(task.job.mesh, task.machine)
    context = dispatch.Context(task.job.attention, rehearse=True)
    try:
        with jax.sharding.use_abstract_mesh(mesh), dispatch.context(context):
            for call in rehearsal.attention:
                tensors = {name: value for name, value in call.items() if isinstance(value, jax.ShapeDtypeStruct)}
                rest = {name: value for name, value in call.items() if name not in tensors}
                jax.eval_shape(functools.partial(sdpa.scaled_dot_product_attention, **rest), **tensors)
    except AttentionError as error:
        if task.job.attention is None:
            raise
        place = task.job_document.place(["attention"])
        raise AttentionError(place, f"{error.place}: {error.fact}", error.remedy) from error


_META = torch.device("meta")


class _LargeWithoutValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes tensors of `LARGE` elements or more, and the results of operators on them, without values or memory."""

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls an operator; in the fake mode, without values, if a tensor that it takes or makes is large."""
        kwargs = kwargs or {}
        values = [item for value in args for item in (value if isinstance(value, list | tuple) else (value,))]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        # An operator that takes no tensor makes a tensor: the integers among its arguments are the sizes.
        sizes = [value for value in values if isinstance(value, int)] if not tensors else [0]
        elements = max([math.prod(sizes), *(tensor.numel() for tensor in tensors)])
        is_on_meta = kwargs.get("device") == _META or any(tensor.is_meta for tensor in tensors)
        if elements < LARGE or is_on_meta:  # tensors on meta take no memory anyway
            return function(*args, **kwargs)
        with self.fake:
            return function(*args, **kwargs)


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Makes large tensors without values or memory while the context lasts, with float32 as the default dtype."""
    with _LargeWithoutValues(), load.default_dtype(torch.float32):
        yield
