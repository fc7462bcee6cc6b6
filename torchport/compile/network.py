"""The only builder of a stage's program.

`run` gives it the weights of a checkpoint, `plan` gives it their shapes. Everything else is the same, so that a plan is
a plan of the program that runs. `port` gives it a module that somebody has loaded himself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import torch

from torchport import load, patch, shard
from torchport.compile import cached_steps, program
from torchport.compile.eager import Eager, FirstNotFinite, How, plainly
from torchport.compile.rules import Rules, of_task
from torchport.config.card import DENOISING, Implementation
from torchport.config.step_cache import StepCache
from torchport.config.strategy import WeightRule
from torchport.errors import (
    BadValueError,
    CheckpointBrokenError,
    NotFiniteError,
    TorchportError,
    UnknownNameError,
    combined,
    nearest,
)
from torchport.files.folder import expand_home
from torchport.kernels.attention import bound, dispatch
from torchport.load import checkpoint, tiny
from torchport.load.foreign import reading
from torchport.progress import log
from torchport.stages.family import Stage
from torchport.stages.guiding import instance
from torchport.task import Task
from torchport.task.family_file import builder


def loaded(task: Task, stage: Stage, folder: Path) -> dict[str, Any]:
    """Loads a stage's parts from a checkpoint, and prepares them as the stage asks for; patches must be in place.

    Returns:
        By name: encoders and tokenizers with their weights, on the host; the network, and parts of which only the
        configuration is used, with weights on meta and buffers on the host.
    """
    with reading(CheckpointBrokenError, str(folder), "Upstream cannot load its encoders", checkpoint.WHOLE):
        parts = stage.load(folder, task.settings.shared()) if stage.load is not None else {}
    for name in stage.parts:
        component, path = task.card.components[name], task.component_folder(folder, name)
        if component.dtype is None:
            parts[name] = _weightless(task, name, path)
        elif load.is_built_here(component):
            parts[name] = load.fill(_with_buffers(task, name, folder), path, name, layout(task, name))
        else:
            parts[name] = load.text_encoder(component, path, task.dtype(name), name)
    for name in (*stage.meta, *([stage.network] if stage.network else [])):
        if name in parts:  # upstream's own loading may have loaded it already
            continue
        parts[name] = _with_buffers(task, name, folder)
        if name != stage.network:
            load.fill_buffers(parts[name], task.component_folder(folder, name), layout(task, name))
    return _prepared(task, stage, parts)


def afresh(task: Task, stage: Stage, parts: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns a stage's `parts` for another run: parts with weights are the same objects, the others are loaded anew,
    because a loop changes its scheduler, and the next run must not see the change. Patches must be in place.
    """
    names = [name for name in stage.parts if task.card.components[name].dtype is None]
    return {**parts, **{name: _weightless(task, name, task.component_folder(folder, name)) for name in names}}


def _weightless(task: Task, name: str, folder: Path) -> Any:
    """Returns a part that has no weights: the scheduler that the job names, or the part that lies in the folder."""
    if name == "scheduler" and task.settings.scheduler is not None:
        place, chosen = task.job_document.place(["scheduler"]), task.settings.scheduler
        return instance(load.class_of(f"diffusers.schedulers:{chosen.get('class')}", place), chosen, place)
    return load.part(task.card.components[name].class_, folder)


def _prepared(task: Task, stage: Stage, parts: dict[str, Any]) -> dict[str, Any]:
    """Returns a stage's parts once the modules that it never calls (`Stage.without`) are empty, and it has prepared."""
    modules = {} if stage.network is None else dict(parts[stage.network].named_modules())
    for name in stage.without:
        if name in modules:
            owner, _, attribute = name.rpartition(".")
            setattr(modules[owner], attribute, torch.nn.Module())  # upstream may iterate over its modules
    if stage.prepare is not None:
        stage.prepare(parts, task.settings.shared())
    return parts


def is_left_out(stage: Stage, name: str) -> bool:
    """Returns whether a tensor of a stage's network is in a module that the stage never calls."""
    return name.startswith(tuple(f"{module}." for module in stage.without))


def _with_buffers(task: Task, component: str, folder: Path | None) -> torch.nn.Module:
    """Returns a component with parameters on meta, and with the buffers and other tensors that its class makes."""
    maker, config, place = recipe(task, component, folder)
    return load.build(maker, config, task.dtype(component), place)


def recipe(task: Task, component: str, folder: Path | None) -> load.Recipe:
    """Returns how a component is built: by the checkpoint's `config.json` (`folder` None: not here), or by the card."""
    card_part, is_tiny = task.card.components[component], task.is_tiny
    if folder is not None and load.records_config(card_part, task.component_folder(folder, component)):
        file = task.component_folder(folder, component) / "config.json"
        return load.Recipe(card_part.class_, checkpoint.read_json(file), str(file))
    config = task.card.tiny.components.get(component, {}) if is_tiny else card_part.published
    keys = ["tiny", "components", component] if is_tiny else ["components", component, "published"]
    return load.Recipe(maker(task, component), config, task.card_document.place(keys))


def maker(task: Task, component: str) -> load.Maker:
    """Returns what builds a component: its class, or the family's function that the card names under `build`."""
    card_part = task.card.components[component]
    if card_part.build is None:
        return card_part.class_
    function = builder(task.family, card_part.build, task.card_document.place(["components", component, "build"]))
    return load.Builder(function, card_part.class_, card_part.build)


def layout(task: Task, component: str, variant: str | None = None, without: Sequence[str] = ()) -> load.Layout:
    """Returns how a component's tensors are stored in its folder, with the job's LoRA files for the component.
    `variant` is that of the checkpoint, by default the task's; tensors of the modules `without` are not read.
    """
    card_part, document = task.card.components[component], task.card_document
    variant = variant or task.settings.variant
    rename_places = [document.place(["components", component, "rename", n]) for n in range(len(card_part.rename))]
    as_stored = load.layout_of(card_part, task.card.file(component, variant), rename_places)
    files = [load.Lora(expand_home(lora.path), lora.scale) for lora in task.job.lora if lora.component == component]
    path = ["components", task.card.rule_key(component), "lora_names"]
    lora_places = [document.place([*path, n]) for n in range(len(card_part.lora_names))]
    loras = load.Loras(component, files, card_part.lora_names, lora_places)
    return dataclasses.replace(as_stored, loras=loras, without=without)


def write_tiny(task: Task) -> Path:
    """Writes the card's tiny checkpoint if it is not there, and returns its folder: see `tiny.write`."""
    card, family = task.card, task.family
    arrange = family.arrange_tiny
    if arrange is None and card.pipeline is None:
        names = card.components
        variants = family.VARIANTS or (None,)
        layouts = {variant: {name: layout(task, name, variant) for name in names} for variant in variants}
        arrange = functools.partial(tiny.save_in_layouts, card, layouts)
    makers = {name: maker(task, name) for name in card.components}
    return tiny.write(card, Path(str(family.__file__)), arrange, makers)


def as_shapes(task: Task, stage: Stage) -> dict[str, Any]:
    """Returns a stage's parts on meta, pruned and prepared: as the checkpoint has them if it is on this machine, else
    as published. The caller may change the network, a new object. Encoders that only upstream can load are left out.
    """
    network = str(stage.network)
    if stage.without:
        task.shapes.pop(network, None)  # so that it is built anew: another stage may use the shared object
    parts = outlines(task, stage)
    del task.shapes[network]  # from now on the caller alone has the object
    return _prepared(task, stage, parts)


def outlines(task: Task, stage: Stage) -> dict[str, Any]:
    """Returns a stage's parts on meta, neither pruned nor prepared. All callers share them: none may change a part."""
    parts: dict[str, Any] = {}
    for name in (*stage.parts, *stage.meta, str(stage.network)):
        if name not in stage.parts or task.card.components[name].dtype is not None:
            parts[name] = outline(task, name)
            continue
        cls = load.class_of(task.card.components[name].class_)  # without weights, such as a scheduler
        if not hasattr(cls, "from_config"):
            parts[name] = cls()
            continue
        root = checkpoint.described(task.checkpoint, task.card)
        if root is not None or (name == "scheduler" and task.settings.scheduler is not None):
            parts[name] = _weightless(task, name, task.component_folder(root or Path(), name))
        else:
            parts[name] = cls.from_config(dict(recipe(task, name, None).config))
    return parts


def outline(task: Task, component: str) -> Any:
    """Returns a component on meta, in a run's dtypes, as the checkpoint or else the card has it. Callers share it."""
    if component not in task.shapes:
        dtype = task.dtype(component) if component in task.settings.dtypes else None  # None for one without weights
        root = checkpoint.described(task.checkpoint, task.card)
        task.shapes[component] = load.published(*recipe(task, component, root), dtype)
    return task.shapes[component]


def parameters(task: Task, component: str) -> int:
    """Returns the number of a component's parameters, by the card or by the checkpoint's configuration; 0: unknown."""
    card_part, root = task.card.components[component], checkpoint.described(task.checkpoint, task.card)
    if card_part.parameters is not None:
        return card_part.parameters
    folder = None if root is None else task.component_folder(root, component)
    if folder is None or not load.records_config(card_part, folder) or not (folder / "config.json").is_file():
        return 0  # a scheduler or a tokenizer has another file
    return sum(each.numel() for each in outline(task, component).parameters())


def restore_attributes(task: Task, component: str, module: torch.nn.Module) -> None:
    """Sets the tensors of a network on meta that are plain attributes, neither parameters nor buffers, to their values:
    upstream may move such a tensor to its input's device, where a trace needs the values.
    """
    parts = dict(module.named_modules())
    plain: list[tuple[str, str]] = []
    for path, part in parts.items():
        plain += [(path, name) for name, value in vars(part).items() if isinstance(value, torch.Tensor)]
    if plain:
        root = checkpoint.described(task.checkpoint, task.card)
        built = dict(_with_buffers(task, component, root).named_modules())
        for path, attribute in plain:
            setattr(parts[path], attribute, getattr(built[path], attribute))


def check_classes(task: Task) -> None:
    """Raises a joint error for all classes of a card that do not exist, and for networks that are no torch modules.
    Patches must be applied before: the classes' modules are imported.
    """
    networks = {stage.network for stage in task.stages}
    names = {name for stage in task.stages for name in (*stage.parts, *stage.meta, *stage.loads(task.settings))}
    mistakes: list[TorchportError] = []
    for name, component in task.card.components.items():
        if name in networks | names:
            place = task.card_document.place(["components", name, "class"])
            try:
                cls = load.class_of(component.class_, place)
            except UnknownNameError as error:
                mistakes.append(error)
                continue
            if name in networks and not (isinstance(cls, type) and issubclass(cls, torch.nn.Module)):
                fact = f"'{component.class_}' is a {type(cls).__name__}, and '{name}' is a network"
                mistakes.append(BadValueError(place, fact, "Name a class that is a torch.nn.Module", name=name))
    if mistakes:
        raise combined(mistakes)


def check_heads(task: Task) -> None:
    """Raises if a mesh axis does not divide its number in the card's `divides`, such as the number of heads."""
    networks = [] if task.original else [task.card.rule_key(str(s.network)) for s in task.stages if s.network]
    for axis, path in task.card.strategies[task.job.strategy].divides.items():
        component, _, key = path.partition(".")
        if component in networks:
            config = load.configuration(outline(task, component))
            place = task.card_document.place(["strategies", task.job.strategy, "divides", axis])
            if not isinstance(config.get(key), int):
                raise BadValueError(place, f"'{path}' is no number of the checkpoint's", nearest(key, config))
            axis_place = task.job_document.place(["mesh", axis])
            shard.check_divides(axis, task.job.mesh.get(axis, 1), path, config[key], axis_place)


def module_of(stage: Stage, parts: Mapping[str, Any]) -> torch.nn.Module:
    """Returns the module of a stage to be compiled: its network, or the submodule that the stage names."""
    module: torch.nn.Module = parts[str(stage.network)].get_submodule(stage.submodule)
    return module


def how(stage: Stage, task: Task) -> How:
    """Returns the function that calls a stage's network in a trace: the family's `Stage.call`, or `plainly`."""
    return plainly if stage.call is None else functools.partial(stage.call, settings=task.settings.traced())


def weight_rules(task: Task, stage: Stage, module: torch.nn.Module) -> dict[str, WeightRule]:
    """Returns the rule of every parameter and buffer of a stage's prepared network, by name, with the spec that fits.
    A rule that matches only modules which this stage never calls (`Stage.without`) is not refused as a dead rule.
    """
    component = str(stage.network)
    shapes = shard.named_shapes(dict(module.named_parameters()) | dict(module.named_buffers()))
    written = of_task(task, component)
    rules = written.as_written.weights
    places = written.places("weights")
    if stage.without:
        left_out = [name for name, _ in outline(task, component).named_parameters() if is_left_out(stage, name)]
        used, used_elsewhere = shard.firsts(rules, shapes), shard.firsts(rules, left_out)
        # A rule that is used nowhere stays: `match` refuses it.
        numbers = [n for n in range(len(rules)) if n in used or n not in used_elsewhere]
        rules = [rules[n] for n in numbers]
        places = [places[n] for n in numbers]
    return shard.match(rules, shapes, task.job.mesh, written.place("weights"), places)


def eager(task: Task, stage: Stage, parts: Mapping[str, Any], folder: Path) -> Eager:
    """Fills a stage's network with the checkpoint's weights, and returns the network as called in PyTorch."""
    name = str(stage.network)
    load.fill(parts[name], task.component_folder(folder, name), name, layout(task, name, without=stage.without))
    call = plainly if stage.call is None else functools.partial(stage.call, settings=task.settings.shared())
    module = module_of(stage, parts)
    first = None if task.request.execution.jit else FirstNotFinite(module, name)
    return Eager(module, call, stage.outputs, name, first)


def placed(
    task: Task, stage: Stage, parts: Mapping[str, Any], mesh: jax.sharding.Mesh, folder: Path
) -> dict[str, jax.Array]:
    """Returns the checkpoint's weights of a stage's compiled module by name, each sharded over the mesh by its rule.

    It also sets tensors of the network on the host, where the stage may read them: all buffers, and the weights outside
    the submodule where a submodule alone is compiled.
    """
    name, prefix = str(stage.network), f"{stage.submodule}." if stage.submodule else ""
    rules = weight_rules(task, stage, module_of(stage, parts))
    stored = layout(task, name, without=stage.without)
    tensors = load.tensors(parts[name], task.component_folder(folder, name), name, stored)
    buffers = {key for key, _ in parts[name].named_buffers()}
    on_host: dict[str, torch.Tensor] = {}

    def selected() -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors of the compiled module, and keeps those for the host in `on_host`."""
        for key, tensor in tensors:
            if key in buffers or not key.startswith(prefix):
                on_host[key] = tensor
            if key.startswith(prefix):
                yield key.removeprefix(prefix), tensor

    weights = shard.place(selected(), rules, mesh)
    parts[name].load_state_dict(on_host, assign=True, strict=False)
    return weights


def shapes(
    task: Task, stage: Stage, module: torch.nn.Module, mesh: jax.sharding.Mesh
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns a stage's weights as `jax.ShapeDtypeStruct`s with their shardings, by name; no checkpoint is read."""
    rules = weight_rules(task, stage, module)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return {key: shard.shape(tensor, shard.sharding(rules[key], mesh)) for key, tensor in tensors.items()}


def compiled(
    task: Task,
    stage: Stage,
    module: torch.nn.Module,
    weights: Mapping[str, Any],
    mesh: jax.sharding.Mesh,
    *,
    trace: patch.Trace | None = None,
    record: Callable[[Any], None] | None = None,
) -> program.Compiled:
    """Returns a stage's network as programs on a mesh; nothing is traced yet.

    Args:
        module: The network, or the submodule of it that is compiled.
        weights: From `placed` or, for a plan, from `shapes`.
        trace: The patches under which it is traced; None: it is not checked that they stay the same.
        record: Is called with each call of attention while it is traced; see `dispatch.Context`.
    """
    name = str(stage.network)
    rules = of_task(task, str(stage.network))
    bounds = _score_bounds(rules, weights)
    jit = task.request.execution.jit
    cache = step_cache_of(task, stage)
    # Without jit operators run one by one, to find NaN. A stack would be one scan, which hides values in its blocks.
    stacks = rules.as_written.stacks if task.job.stacked and jit else {}
    call = how(stage, task)
    outputs = stage.outputs
    keeps = stage.keeps
    free = frozenset[str]()
    if cache is not None:
        stacks = cached_steps.stacks(cache, stacks)
        call = cached_steps.with_cache(call, cache, name, rules.place("stacks"))
        # The tensors for later steps are a second output. It stays on the devices, where the compiler puts it.
        outputs = ("output", cached_steps.KEPT)
        keeps = (cached_steps.KEPT,)
        free = frozenset([cached_steps.KEPT])
    rule_of, strict = weight_rules(task, stage, module), task.request.execution.strict
    network = _network_of(
        module, rules, rule_of, stacks=stacks, how=call, outputs=outputs, keeps=keeps, free=free, strict=strict
    )
    attention = dispatch.Context(task.job.attention, bounds, note=record)
    return program.Compiled(network, weights, mesh, trace=trace, attention=attention, jit=jit)


def step_cache_of(task: Task, stage: Stage) -> StepCache | None:
    """Returns the cache of a stage's loop; None where the job has none, or the stage takes no steps."""
    return task.job.cache if stage.name in DENOISING else None


def ported(
    module: torch.nn.Module,
    rules: Rules,
    mesh: jax.sharding.Mesh,
    *,
    how: How,
    trace: patch.Trace | None,
    attention: Implementation | None = None,
) -> program.Compiled:
    """Returns a caller's own module as programs on a mesh. Its weights are moved to the devices: its parameters are on
    meta afterwards. Nothing is traced yet.

    Args:
        module: With its weights, in the host's memory, or on meta for a plan.
        how: The function that calls the module. It returns a tuple of one tree of tensors.
    """
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    shapes = shard.named_shapes(tensors)
    axis_sizes = {axis: mesh.shape[axis] for axis in shard.AXES}
    written_at, each_written_at = rules.place("weights"), rules.places("weights")  # for errors
    rule_of = shard.match(rules.as_written.weights, shapes, axis_sizes, written_at, each_written_at)
    if any(tensor.is_meta for tensor in module.parameters()):  # of a plan
        weights = {key: shard.shape(x, shard.sharding(rule_of[key], mesh)) for key, x in tensors.items()}
    else:
        weights = shard.place(tensors.items(), rule_of, mesh)
    bounds = _score_bounds(rules, weights)
    # The devices have the parameters: the host's memory of these is freed. Tied parameters stay tied.
    on_meta: dict[int, torch.nn.Parameter] = {}  # by the id of the parameter on the host
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                outline = torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
                vars(outline).update(vars(parameter))  # the attributes that upstream has set on it
                owner._parameters[name] = on_meta.setdefault(id(parameter), outline)
    stacks, spare = rules.as_written.stacks, rules.is_of_card  # a card's caller may leave inputs out
    network = _network_of(
        module, rules, rule_of, stacks=stacks, how=how, outputs=("output",), spare=spare, strict=rules.strict
    )
    return program.Compiled(network, weights, mesh, trace=trace, attention=dispatch.Context(attention, bounds))


def _network_of(
    module: torch.nn.Module, rules: Rules, rule_of: Mapping[str, WeightRule], **fields: Any
) -> program.Network:
    """Returns a module and its rules as the `Network` to compile; `fields` are those that no rules determine."""
    return program.Network(
        module,
        rules.inputs,
        rules.name,
        place=rules.place("inputs"),
        places=rules.places("inputs"),
        precision=rules.as_written.precision,
        activations=rules.as_written.activations,
        gathered=shard.gathered(rule_of),
        place_of=rules.place,
        differing=rules.as_written.operators,
        **fields,
    )


def _score_bounds(rules: Rules, weights: Mapping[str, Any]) -> dict[str, float]:
    """Returns upper bounds of |q . k| in a network's attention, from the gains of its norms, by the names in the card's
    `score_bounds`. Without values of weights, as in a plan, each bound is assumed to be 1.
    """
    if any(isinstance(weight, jax.ShapeDtypeStruct) for weight in weights.values()):
        return dict.fromkeys(rules.bounds, 1.0)
    # A gain whose parts lie on other hosts is gathered first. Gains are vectors.
    spread = {key: array for key, array in weights.items() if not array.is_fully_addressable}
    weights = {**weights, **{key: shard.to_host(array) for key, array in spread.items() if array.ndim == 1}}
    bounds: dict[str, float] = {}
    for name, card_bound in rules.bounds.items():
        place = rules.document.place(["score_bounds", name])
        limit = bound.of_weights(weights, card_bound.queries, card_bound.keys, name, place)
        if limit is not None:
            bounds[name] = limit
            log.info("attention scores %s: |q . k| is at most %.1f by the gains of the norms", name, limit)
    return bounds


@contextlib.contextmanager
def first_not_finite_named(call: Any) -> Iterator[None]:
    """Adds to the details of a NotFiniteError which module returned NaN first, if `call` has looked for it."""
    try:
        yield
    except NotFiniteError as error:
        first = getattr(call, "first", None)
        if first is not None and first.text:
            error.details = (*error.details, first.text)
        raise
