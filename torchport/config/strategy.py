"""Sharding strategies: rules for weights, inputs and activations, and those that any network of diffusers can have."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from torchport.config.document import Frozen, read_document, validated

FILE = Path(__file__).with_name("strategies.yaml")
"""The shared rules."""

Axis = Literal["dp", "sp", "tp"]


def _regex(text: str) -> str:
    """Returns the text, if it is a regular expression; raises a ValueError otherwise."""
    try:
        with warnings.catch_warnings(action="error", category=FutureWarning):  # `[[` may come to mean a nested set
            re.compile(text)
    except (re.error, FutureWarning) as error:
        raise ValueError(f"It must be a regular expression: {error}") from error
    return text


Regex = Annotated[str, pydantic.AfterValidator(_regex), pydantic.WithJsonSchema({"type": "string", "format": "regex"})]


def _axes_once(split: list[Split]) -> list[Split]:
    """Returns the dims of a spec as they are, if no axis splits two of them; raises a ValueError otherwise."""
    axes_of_dims = [axis for axes in dims_of(split) for axis in axes]
    if len(axes_of_dims) != len(set(axes_of_dims)):
        raise ValueError("It must name each axis once at most: an axis splits one dim; fallbacks go under 'otherwise'")
    return split


Split = Axis | Annotated[list[Axis], pydantic.Field(min_length=1)] | None
"""What splits a dim: one axis, several (the first one outermost), or none."""
Spec = Literal["replicate"] | Annotated[list[Split], pydantic.AfterValidator(_axes_once)]


def dims_of(spec: Spec | None) -> list[tuple[Axis, ...]]:
    """Returns the mesh axes that split each dim of a spec: `[None, ["dp", "tp"]]` -> `[(), ("dp", "tp")]`.

    The list is empty for `replicate` and for None.
    """
    if spec is None or spec == "replicate":
        return []
    return [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in spec]


class _ShareableRule(Frozen):
    """A rule of a card, or of `strategies.yaml`."""

    _is_shared: bool = pydantic.PrivateAttr(False)

    @property
    def is_shared(self) -> bool:
        """Whether it comes from `strategies.yaml`: such a rule may match nothing."""
        return self._is_shared


class Rule(_ShareableRule):
    """One sharding rule: the tensors whose whole name matches, and the mesh axes of their dims."""

    match: Regex
    """A regular expression for the whole name of a tensor. The first rule that matches is used."""
    spec: Spec
    """The axis of each dim, from dim 0 on: `[tp]`, `[null, tp]`, `[[dp, tp]]`; or `replicate`."""
    otherwise: list[Spec] = []
    """Specs to try in this order if an axis does not divide its dim. Without them that is an error."""


class WeightRule(Rule):
    """A rule for weights."""

    gather: bool = False
    """Whether it is split in memory and gathered where it is used (FSDP). Stacked blocks are gathered one at a time."""

    @pydantic.model_validator(mode="after")
    def _splits(self) -> WeightRule:
        if self.gather and not any(dims_of(self.spec)):
            raise ValueError("'gather' needs a spec that splits: what is whole everywhere cannot be gathered")
        return self


class ActivationRule(_ShareableRule):
    """One rule for what modules return: those whose whole name matches, and the mesh axes of their outputs' dims."""

    match: Regex
    """A regular expression for the whole name of a module."""
    outputs: list[Spec | None]
    """A spec for each tensor that the module returns, in order. `null` leaves that tensor to the compiler."""
    uneven: bool = False
    """Whether the compiler may pad a dim that its axes do not divide. Otherwise that is an error."""


class Strategy(Frozen):
    """A named set of rules, by component: for its weights, the inputs of its forward, and what its modules return."""

    shared: Literal["tp", "ulysses", "fsdp"] | None = None
    """The shared strategy whose rules follow the card's for each network (docs/sharding.md)."""
    like: str | None = None
    """Another strategy of the card, whose mesh, `divides` and rules for a network hold where this one has none."""
    mesh: dict[Axis, pydantic.PositiveInt] = {}
    """Its mesh, `{dp: 2, tp: 4}`. It is used if a config has no mesh, or if a flag changes only the strategy."""
    weights: dict[str, list[WeightRule]] = {}
    """By network, the rules for its parameters and buffers. Every network of the family needs rules."""
    inputs: dict[str, list[Rule]] = {}
    """By network, the rules for the tensors that it is called with."""
    activations: dict[str, list[ActivationRule]] = {}
    """By network, the rules for what its modules return."""
    divides: dict[Axis, str] = {}
    """For an axis, the number that it must divide, such as the heads: `component.key` of a configuration."""

    def over(self, base: Strategy) -> Strategy:
        """Returns this strategy with the mesh, the `divides` and the networks' rules of `base` where it has none."""
        kinds = ("divides", "weights", "inputs", "activations")
        update: dict[str, Any] = {kind: {**getattr(base, kind), **getattr(self, kind)} for kind in kinds}
        return self.model_copy(update={**update, "mesh": self.mesh or base.mesh})

    def with_shared_rules(self, name: str, networks: Iterable[str]) -> Strategy:
        """Returns this strategy with rules of the shared strategy that `shared` names, by default of one called `name`.

        With `shared`, the shared rules follow a network's rules. Without, only networks that have no rules get them.
        If no shared strategy has the name, this strategy is returned as it is.
        """
        shared = shared_strategies().get(self.shared or name)
        if shared is None:
            return self
        kinds: dict[str, dict[str, Any]] = {}
        for kind in ("weights", "inputs", "activations"):
            rules_by_network: dict[str, Any] = dict(getattr(self, kind))
            for network in networks:
                rules = getattr(shared.vae if network == "vae" else shared.network, kind)
                if self.shared is None:
                    rules_by_network.setdefault(network, rules)
                elif rules:
                    rules_by_network[network] = [*rules_by_network.get(network, []), *rules]
            kinds[kind] = rules_by_network
        return self.model_copy(update={**kinds, "mesh": self.mesh or shared.mesh})


class NetworkRules(Frozen):
    """The rules of a shared strategy for a network."""

    weights: list[WeightRule]
    inputs: list[Rule]
    activations: list[ActivationRule] = []


class SharedStrategy(Frozen):
    """A strategy for any network of diffusers."""

    mesh: dict[Axis, pydantic.PositiveInt]
    network: NetworkRules
    vae: NetworkRules


class _StrategyTable(Frozen):
    """`strategies.yaml`."""

    strategies: dict[str, SharedStrategy]


@functools.cache
def shared_strategies() -> dict[str, SharedStrategy]:
    """Returns the strategies of `strategies.yaml`, by name, with all their rules marked as shared."""
    strategies = validated(_StrategyTable, read_document(FILE, FILE.name)).strategies
    for strategy in strategies.values():
        for rules in (strategy.network, strategy.vae):
            all_rules: list[Rule | ActivationRule] = [*rules.weights, *rules.inputs, *rules.activations]
            for rule in all_rules:
                rule._is_shared = True
    return strategies
