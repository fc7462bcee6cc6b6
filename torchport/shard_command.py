"""`torchport shard show`: what a strategy's rules match in a network, and what each device then holds."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torchport import load, outline, patch, pipelines, shard, upstream
from torchport.card import Rule, Spec, Strategy, dims_of, find_pack
from torchport.task import Request, Task, accept, published


@dataclasses.dataclass(frozen=True)
class Row:
    """One rule, and what it does on one device.

    Attributes:
        component: Whose weights, inputs or modules it is for.
        kind: `weights`, `inputs` or `activations`.
        pattern: Its regular expression.
        specs: As they are used: one, or several where `otherwise` had to step in; of inputs whose shapes are not known
            beforehand all, in the order in which they are tried.
        matches: How many tensors, or modules, it is the rule of.
        bytes: Of the matched weights on each device; None for what has no size beforehand.
        notes: What else is to be said: how many took a fallback, whether they are gathered, or may be padded.
    """

    component: str
    kind: str
    pattern: str
    specs: tuple[str, ...]
    matches: int
    bytes: int | None
    notes: tuple[str, ...] = ()


def request_of(model: str, config: str | None, strategy: str | None, path: str | None, **fields: Any) -> Request:
    """Returns the request whose rules are shown: without a config, the published network on the strategy's own mesh.

    Raises:
        UnknownNameError: There is no such model or strategy.
    """
    given = tuple(fields.pop("overrides", ()))
    if config is None:
        card, _ = find_pack(path).card(model)
        config, given = card.demo, (f"checkpoint={json.dumps(card.checkpoint)}", "dtypes={}", *given)
    if strategy is not None:
        given = (*given, f"strategy={strategy}")
    return Request(model, config, path=path, overrides=given, **fields)


def shown(request: Request) -> list[Row]:
    """Returns every rule of the job's strategy, for all networks, from published shapes: no weights are read.

    Raises:
        ShardError: A rule that matches nothing, a weight without a rule, or a dim that does not divide.
        ConfigError: The model or the config.
    """
    task = accept(dataclasses.replace(request, stage="all", prompt=request.prompt or "a prompt"))
    with upstream.on_path(task.upstream), patch.applied(task.patches(task.stages)), load.hushed(True):
        return [row for stage in task.stages if stage.network for row in _rows(task, stage, stage.network)]


def _rows(task: Task, stage: pipelines.Stage, name: str) -> Iterator[Row]:
    module = published(task, name).get_submodule(stage.submodule)
    strategy = task.card.strategies[task.job.strategy]
    shapes = shard.named_shapes(dict(module.named_parameters()))
    # Buffers that a stage prepares later are not there yet, and rules for them match nothing.
    rules = [rule for rule in strategy.weights[name] if any(shard.matches(rule, key) for key in shapes)]
    found = shard.match(rules, shapes, task.job.mesh, task.rules_place("weights", name))
    for rule in rules:
        own = [key for key in shapes if next(r for r in rules if shard.matches(r, key)) is rule]
        size = shard.device_bytes({key: shapes[key] for key in own}, found, task.job.mesh, task.dtype(name))
        notes = ("gathered where they are used",) if rule.gather else ()
        yield _row(name, "weights", rule, {key: found[key] for key in own}, size, notes)
    yield from _inputs(task, stage, name, strategy)
    modules = [key for key, _ in module.named_modules() if key]
    for number, kind in enumerate(activations := strategy.activations.get(name, [])):
        own = [key for key in modules if re.fullmatch(kind.match, key)]
        own = [key for key in own if not any(re.fullmatch(other.match, key) for other in activations[:number])]
        notes = ("may be padded",) if kind.uneven else ()
        yield Row(name, "activations", kind.match, tuple(map(_spec, kind.outputs)), len(own), None, notes)


def _inputs(task: Task, stage: pipelines.Stage, name: str, strategy: Strategy) -> Iterator[Row]:
    rules = strategy.inputs[name]
    shapes = outline.input_shapes(task, stage)
    for rule in rules:
        own = {key: shape for key, shape in shapes.items() if next(r for r in rules if shard.matches(r, key)) is rule}
        found = shard.match([rule], own, task.job.mesh, task.rules_place("inputs", name)) if own else {}
        if shapes:
            yield _row(name, "inputs", rule, found, None, ())
        else:
            order = tuple(map(_spec, (rule.spec, *rule.otherwise)))
            yield Row(name, "inputs", rule.match, order, 0, None, ("the first that divides",) if rule.otherwise else ())


def _row(name: str, kind: str, rule: Rule, found: Mapping[str, Rule], size: int | None, notes: tuple[str, ...]) -> Row:
    """Returns a rule's row: the specs that its tensors got, and how many got another than the first."""
    fallen = sum(one.spec != rule.spec for one in found.values())
    more = (*notes, f"{fallen} by fallback from {_spec(rule.spec)}") if fallen else notes
    specs = tuple(dict.fromkeys(_spec(one.spec) for one in found.values()))
    return Row(name, kind, rule.match, specs, len(found), size, more)


def _spec(spec: Spec | None) -> str:
    if spec is None or spec == "replicate":
        return spec or "free"
    dims = ["-" if not axes else axes[0] if len(axes) == 1 else f"({', '.join(axes)})" for axes in dims_of(spec)]
    return f"[{', '.join(dims)}]"


def lines(rows: list[Row]) -> list[str]:
    """Returns the rules as an aligned table, with the bytes of each component's weights on a device."""
    text: list[str] = []
    for component in dict.fromkeys(row.component for row in rows):
        own = [row for row in rows if row.component == component]
        total = sum(row.bytes or 0 for row in own)
        text.append(f"{component}: {_size(total)} of weights on each device")
        for row in own:
            held = "" if row.bytes is None else _size(row.bytes)
            count = str(row.matches or "")
            noted = f"  ({'; '.join(row.notes)})" if row.notes else ""
            text.append(f"  {row.kind:11} {' | '.join(row.specs):22} {count:>6} {held:>10}  {row.pattern}{noted}")
    return text


def _size(size: int) -> str:
    unit = min(3, int(math.log(size, 1024))) if size else 0
    return f"{size / 1024**unit:.3g} {('B', 'KiB', 'MiB', 'GiB')[unit]}"
