"""`torchport shard show`: the tensors that each rule of a strategy matches, and the bytes on each device."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchport.commands import options, terminal
from torchport.progress import size_text

if TYPE_CHECKING:
    from torchport.config.strategy import Rule, Spec
    from torchport.shard import RuleT
    from torchport.stages import family
    from torchport.task import Request, Task


@terminal.group("shard")
def command() -> None:
    """Shows sharding rules and what they match."""


@command.command("show")
@options.model
@options.config("the published network, on the strategy's mesh")
@options.strategy
@options.upstream_path
@options.overrides
@options.paths
def show(**given: Any) -> None:
    """Prints every rule: its spec, how many tensors it matches, and their bytes on each device."""
    terminal.say(lines(rule_rows(request_of(**given))))


@dataclasses.dataclass(frozen=True)
class RuleRow:
    """A line of `torchport shard show`: a rule, and what it matches in one network."""

    component: str  #: The network.
    kind: str  #: `weights`, `inputs` or `activations`.
    pattern: str
    #: The specs in use: one, or several if some tensors use a fallback of `otherwise`. For inputs whose shapes only a
    #: run knows, all specs in the order in which they are tried.
    specs: tuple[str, ...]
    matches: int
    #: Bytes of the matched weights on each device; None for inputs and activations.
    bytes: int | None
    #: How many tensors use a fallback, whether they are gathered, whether they may be padded.
    notes: tuple[str, ...] = ()


def request_of(model: str, config: str | None, strategy: str | None, paths: tuple[str, ...], **fields: Any) -> Request:
    """Returns the request whose rules are shown; without a config, for the published network on the strategy's mesh."""
    from torchport.config.pack import DERIVED, find_pack
    from torchport.task import Request

    overrides = tuple(fields.pop("overrides", ()))
    # A derived card has tiny sizes alone: the published sizes are in its checkpoint, which is not read.
    if config is None and not model.startswith(DERIVED):
        card, _ = find_pack(paths).card(model)
        overrides = (f"checkpoint={json.dumps(card.checkpoint)}", "dtypes={}", *overrides)
    overrides = options.with_fields(overrides, strategy=strategy)
    return Request(model, config or "demo", paths=paths, overrides=overrides, **fields)


def rule_rows(request: Request) -> list[RuleRow]:
    """Returns a row for each rule of the job's strategy and each network, from shapes: no weights are read. A rule for
    several networks has no row for a network in which it matches nothing.
    """
    from torchport.compile import network
    from torchport.compile.in_force import in_force
    from torchport.task import accept

    task = accept(dataclasses.replace(request, stage="all"), dry=True)
    with in_force(task, task.stages):
        network.check_classes(task)
        network.check_heads(task)
        return [row for stage in task.stages if stage.network for row in _rows(task, stage, stage.network)]


def _rows(task: Task, stage: family.Stage, name: str) -> Iterator[RuleRow]:
    """Yields the rows of one network: rules for weights, then for inputs, then for activations."""
    from torchport import shard
    from torchport.compile import preflight
    from torchport.compile.rules import of_task
    from torchport.shard import activations

    rules, rehearsal = of_task(task, name), preflight.rehearse(task, stage)
    shapes = shard.named_shapes(dict(rehearsal.module.named_parameters()) | dict(rehearsal.module.named_buffers()))
    for rule, weight_rules in _by_rule(rules.as_written.weights, rehearsal.weights):
        matched = {key: shapes[key] for key in weight_rules}
        size = shard.device_bytes(matched, weight_rules, task.job.mesh, task.dtype(name))
        notes = ("gathered where they are used",) if rule.gather else ()
        yield _row(name, "weights", rule, weight_rules, size, notes)
    for input_rule, inputs in _by_rule(rules.inputs, rehearsal.inputs):
        if rehearsal.calls:
            yield _row(name, "inputs", input_rule, inputs, size=None, notes=())
        else:  # the shapes of inputs are not known before a run
            order = tuple(map(_spec_words, (input_rule.spec, *input_rule.otherwise)))
            notes = ("the first that divides",) if input_rule.otherwise else ()
            yield RuleRow(name, "inputs", input_rule.match, order, matches=0, bytes=None, notes=notes)
    by_module = activations.rule_by_module(rehearsal.module, rules.as_written.activations, rules.place("activations"))
    for activation in rules.as_written.activations:
        notes = ("may be padded",) if activation.uneven else ()
        count = sum(rule is activation for rule in by_module.values())
        if activation.is_shared and not count:
            continue
        specs = tuple(map(_spec_words, activation.outputs))
        yield RuleRow(name, "activations", activation.match, specs, count, bytes=None, notes=notes)


def _by_rule(rules: Sequence[RuleT], fitted: Mapping[str, RuleT]) -> Iterator[tuple[RuleT, dict[str, RuleT]]]:
    """Yields each rule with the tensors for which it is the first that matches: their fitted rules, by name.

    A rule that matches nothing is left out if several networks share it: it may be for another network.

    Args:
        fitted: By a tensor's name, its rule with the spec that divides its shape.
    """
    from torchport import shard

    first_rule = {key: next(rule for rule in rules if shard.matches(rule, key)) for key in fitted}
    for rule in rules:
        found = {key: fitted_rule for key, fitted_rule in fitted.items() if first_rule[key] is rule}
        if found or not rule.is_shared or not fitted:
            yield rule, found


def _row(
    name: str, kind: str, rule: Rule, matches: Mapping[str, Rule], size: int | None, notes: tuple[str, ...]
) -> RuleRow:
    """Returns a rule's row; its notes say how many of the matched tensors use a fallback spec."""
    fallbacks = sum(fitted_rule.spec != rule.spec for fitted_rule in matches.values())
    more = (*notes, f"{fallbacks} by fallback from {_spec_words(rule.spec)}") if fallbacks else notes
    specs = tuple(dict.fromkeys(_spec_words(fitted_rule.spec) for fitted_rule in matches.values()))
    return RuleRow(name, kind, rule.match, specs, len(matches), size, more)


def _spec_words(spec: Spec | None) -> str:
    """Returns a sharding spec as text: `[dp, -, (sp, tp)]`, `replicate`, or `free` for None."""
    from torchport.config.strategy import dims_of

    if spec is None or spec == "replicate":
        return spec or "free"
    dims = []
    for axes in dims_of(spec):
        words = ", ".join(axes) or "-"
        dims.append(f"({words})" if len(axes) > 1 else words)
    return f"[{', '.join(dims)}]"


def lines(rows: list[RuleRow]) -> list[str]:
    """Returns the rules as an aligned table, with the bytes of each component's weights on a device."""
    text: list[str] = []
    for component in dict.fromkeys(row.component for row in rows):
        component_rows = [row for row in rows if row.component == component]
        total = sum(row.bytes or 0 for row in component_rows)
        text.append(f"{component}: {size_text(total)} of weights on each device")
        for row in component_rows:
            size = "" if row.bytes is None else size_text(row.bytes)
            count = str(row.matches or "")
            notes = f"  ({'; '.join(row.notes)})" if row.notes else ""
            text.append(f"  {row.kind:11} {' | '.join(row.specs):22} {count:>6} {size:>10}  {row.pattern}{notes}")
    return text
