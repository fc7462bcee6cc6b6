"""The rules of one network, from a card or from a caller of `port`: how its tensors are sharded, its blocks stacked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from torchport import shard
from torchport.config import Document, parse_document, validated
from torchport.config.card import Card, ScoreBound, Stack, Word
from torchport.config.strategy import Axis, NetworkRules, Rule, shared_strategies
from torchport.errors import BadValueError, UnknownNameError, nearest
from torchport.task import Task

PLACE = "port(strategy=...)"
"""The place of a caller's rules, for errors; `MESH`: of a caller's mesh."""
MESH = "port(mesh=...)"


class WrittenRules(NetworkRules):
    """The rules of one network as its author has written them: a card for a component, or a caller of `port`."""

    stacks: dict[str, Stack] = {}
    """By the path of a list of blocks in it: the blocks that are compiled as one."""
    precision: Literal["default", "high", "highest"] = "default"
    """The precision of its float32 products on a TPU."""
    operators: dict[str, Word] = {}
    """Operators that may compute something else than PyTorch, each with the reason why it may here."""


@dataclasses.dataclass(frozen=True)
class Rules:
    """The rules of one network, and where they are written, for errors."""

    name: str
    as_written: WrittenRules
    document: Document
    strategy: Sequence[str | int] = ()  #: `["strategies", "tp"]` in a card's file; empty for rules of no card.
    written: str = ""  #: The key under which the card's file has the component's rules.
    bounds: Mapping[str, ScoreBound] = dataclasses.field(default_factory=dict)
    #: For an axis, the number of the network's configuration that it must divide.
    divides: Mapping[Axis, str] = dataclasses.field(default_factory=dict)
    extra: Sequence[Rule] = ()  #: Rules for inputs that hold before the others: those of a caller of `port`.
    strict: bool = False  #: Whether an operator is refused that no sample has compared with PyTorch's.
    base: str | None = None  #: The strategy that this strategy is `like`, from which it takes rules; None: no strategy.

    @property
    def is_of_card(self) -> bool:
        """Whether the rules are a card's. Some of these are for inputs that a caller may leave out."""
        return bool(self.strategy)

    @property
    def inputs(self) -> list[Rule]:
        """The network's rules for inputs, after those that a caller of `port` has added."""
        return [*self.extra, *self.as_written.inputs]

    def _path(self, kind: str) -> list[str | int]:
        """Returns the path of a kind of rules in their document: `["strategies", "tp", "weights", "vae"]`."""
        rest = [kind, *([self.written] if self.is_of_card else [])]
        # A strategy takes the rules that it leaves out from the strategy that it is `like`.
        is_inherited = self.base and (*self.strategy, *rest) not in self.document.lines
        return [*(("strategies", self.base) if is_inherited else self.strategy), *rest]

    def place(self, field: str) -> str:
        """Returns where a kind of rules is written, such as `weights`, or a stack, such as `stacks.blocks`."""
        kind, _, blocks = field.partition(".")
        if kind == "stacks":
            path = [kind, *([self.written] if self.is_of_card else []), blocks]
            return self.document.place(path)
        return self.document.place(self._path(field))

    def places(self, kind: Literal["weights", "inputs"]) -> list[str]:
        """Returns where each rule of a kind is written, those of a caller of `port` first."""
        count, path = len(getattr(self.as_written, kind)), self._path(kind)
        places = [self.document.place([*path, number]) for number in range(count)]
        extra = ["port(inputs=...)"] * len(self.extra) if kind == "inputs" else []
        return [*extra, *places]


def of_card(card: Card, document: Document, strategy: str, component: str, extra: Sequence[Rule] = ()) -> Rules:
    """Returns a component's sharding rules in a card's strategy; refuses an unknown strategy or component.
    Where an `extra` rule and a rule of the card match the same input, the `extra` rule holds.
    """
    if strategy not in card.strategies:
        fact = f"'{card.model}' has no strategy '{strategy}'"
        raise UnknownNameError("port", fact, nearest(strategy, card.strategies), name=strategy)
    chosen = card.strategies[strategy]
    if component not in chosen.weights:
        fact = f"The strategy '{strategy}' of '{card.model}' has no rules for '{component}'"
        raise UnknownNameError("port", fact, nearest(component, chosen.weights), name=component)
    written = WrittenRules(
        weights=chosen.weights[component],
        inputs=chosen.inputs[component],
        activations=chosen.activations.get(component, []),
        stacks=card.stacks.get(component, {}),
        precision=card.components[component].precision,
        operators=card.operators,
    )
    bounds = {name: bound for name, bound in card.score_bounds.items() if bound.component == component}
    path = ["strategies", strategy]
    rule_key = card.rule_key(component)
    divides = {axis: key for axis, key in chosen.divides.items() if key.partition(".")[0] == rule_key}
    return Rules(component, written, document, path, rule_key, bounds, divides, extra=extra, base=chosen.like)


def of_task(task: Task, component: str) -> Rules:
    """Returns a component's rules in the strategy of a task's job."""
    return of_card(task.card, task.card_document, task.job.strategy, component)


def of_shared(name: str, strategy: str) -> Rules:
    """Returns a shared strategy's rules (docs/sharding.md) for a module without a card; refuses an unknown name."""
    known = shared_strategies()
    if strategy not in known:
        fact = f"There is no shared strategy '{strategy}', and no model's card is in force"
        raise UnknownNameError(PLACE, fact, nearest(strategy, known), name=strategy)
    shared = known[strategy].network
    written = WrittenRules(weights=shared.weights, inputs=shared.inputs, activations=shared.activations)
    return Rules(name, written, Document(f"port(strategy={strategy!r})", data={}, lines={}))  # it is in no file


def of_caller(name: str, rules: str | Mapping[str, object]) -> Rules:
    """Returns the rules that a caller of `port` has written, with a card's keys: as a dict, or as text of YAML."""
    if isinstance(rules, str):
        document = parse_document(rules, PLACE)
    else:  # a dict has no line numbers: the place of a rule is its key with its index
        places: dict[tuple[str | int, ...], str] = {}
        for key, value in rules.items():
            places[(key,)] = f"{PLACE} {key}"
            places |= {(key, n): f"{PLACE} {key}[{n}]" for n in range(len(value) if isinstance(value, list) else 0)}
        document = Document(PLACE, dict(rules), lines={}, flags=places)  # errors print a flag as it is
    return Rules(name, validated(WrittenRules, document), document)


def check(rules: Rules, config: Mapping[str, object], mesh: Mapping[Axis, int]) -> None:
    """Refuses a mesh that does not fit a network: an axis that splits nothing, or that does not divide the heads."""
    written = rules.as_written
    shard.check_used(mesh, [*written.weights, *rules.inputs], written.activations, lambda _: MESH, rules.name)
    for axis, path in rules.divides.items():
        key = path.partition(".")[2]
        number, place = config.get(key), rules.document.place([*rules.strategy, "divides", axis])
        if not isinstance(number, int):
            raise BadValueError(place, f"'{path}' is no number of the module's", nearest(key, config))
        shard.check_divides(axis, mesh.get(axis, 1), path, number, MESH)
