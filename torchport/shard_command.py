"""`torchport shard show`: what a strategy's rules match in a network, and what each device then holds."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

from torchport import load, patch, shard, upstream
from torchport.task import Request, Task, accept, published


@dataclasses.dataclass(frozen=True)
class Row:
    """One rule, and what it does on one device.

    Attributes:
        component: Whose weights, inputs or modules it is for.
        kind: `weights`, `inputs` or `activations`.
        pattern: Its regular expression.
        specs: As they are used: one, or several where `otherwise` had to step in.
        matches: How many tensors, or modules, it is the rule of.
        bytes: Of the matched weights on each device; None for what has no size beforehand.
    """

    component: str
    kind: str
    pattern: str
    specs: tuple[str, ...]
    matches: int
    bytes: int | None


def shown(request: Request) -> list[Row]:
    """Returns every rule of the job's strategy, for all networks, from published shapes: no weights are read.

    Raises:
        ShardError: A rule that matches nothing, a weight without a rule, or a dim that does not divide.
        ConfigError: The model or the config.
    """
    task = accept(dataclasses.replace(request, stage="all", prompt=request.prompt or "a prompt"))
    with upstream.on_path(task.upstream), patch.applied(task.patches(task.stages)), load.hushed(True):
        return [row for stage in task.stages if stage.network for row in _rows(task, stage.network, stage.submodule)]


def _rows(task: Task, name: str, submodule: str) -> Iterator[Row]:
    module, strategy = published(task, name).get_submodule(submodule), task.card.strategies[task.job.strategy]
    shapes = shard.named_shapes(dict(module.named_parameters()))
    # Buffers that a stage prepares later are not there yet, and rules for them match nothing.
    rules = [rule for rule in strategy.weights[name] if any(shard.matches(rule, key) for key in shapes)]
    found = shard.match(rules, shapes, task.job.mesh, task.rules_place("weights", name))
    for rule in rules:
        own = [key for key in shapes if next(r for r in rules if shard.matches(r, key)) is rule]
        size = shard.device_bytes({key: shapes[key] for key in own}, found, task.job.mesh, task.dtype(name))
        specs = tuple(dict.fromkeys(_spec(found[key].spec) for key in own))
        yield Row(name, "weights", rule.match, specs, len(own), size)
    for rule in strategy.inputs[name]:
        yield Row(name, "inputs", rule.match, tuple(map(_spec, (rule.spec, *rule.otherwise))), 0, None)
    modules = [key for key, _ in module.named_modules() if key]
    for kind in strategy.activations.get(name, []):
        own = [key for key in modules if re.fullmatch(kind.match, key)]
        yield Row(name, "activations", kind.match, tuple(map(_spec, kind.outputs)), len(own), None)


def _spec(spec: object) -> str:
    if spec is None:
        return "free"
    return spec if isinstance(spec, str) else f"[{', '.join(axis or '-' for axis in spec)}]"  # type: ignore[attr-defined]


def lines(rows: list[Row]) -> list[str]:
    """Returns the rules as an aligned table, with the bytes of each component's weights on a device."""
    text: list[str] = []
    for component in dict.fromkeys(row.component for row in rows):
        own = [row for row in rows if row.component == component]
        total = sum(row.bytes or 0 for row in own)
        text.append(f"{component}: {_size(total)} of weights on each device")
        for row in own:
            held = "" if row.bytes is None else _size(row.bytes)
            count = str(row.matches) if row.kind != "inputs" else ""
            text.append(f"  {row.kind:11} {' | '.join(row.specs):22} {count:>6} {held:>10}  {row.pattern}")
    return text


def _size(size: int) -> str:
    unit = min(3, int(math.log(size, 1024))) if size else 0
    return f"{size / 1024**unit:.3g} {('B', 'KiB', 'MiB', 'GiB')[unit]}"
