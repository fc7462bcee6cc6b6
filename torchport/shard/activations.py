"""Puts rules on what a network's modules return, so that activations are sharded where a strategy says so."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding, PartitionSpec

from torchport import engine, shard
from torchport.config.strategy import ActivationRule, Axis, Spec, dims_of
from torchport.errors import DeadRuleError, MeshError, nearest


def constrain(module: torch.nn.Module, rules: Sequence[ActivationRule], mesh: jax.sharding.Mesh, place: str) -> None:
    """Adds hooks by which modules return their outputs sharded, by the first rule that matches a module's name."""
    for name, rule in rule_by_module(module, rules, place).items():
        hook = functools.partial(_sharded_output, name, rule, mesh, place)
        module.get_submodule(name).register_forward_hook(hook)


def check(
    module: torch.nn.Module, rules: Sequence[ActivationRule], sizes: Mapping[Axis, int], place: str
) -> Callable[[], None]:
    """Adds hooks that refuse a module's output if the module's rule does not fit the output; see `constrain`.

    Returns:
        A function to call after the network was called. It refuses a rule if none of its modules was called.
    """
    module_rules, called = rule_by_module(module, rules, place), set[str]()

    def check_output(name: str, rule: ActivationRule, submodule: Any, inputs: Any, output: Any) -> None:
        _check_output(name, rule, sizes, place, output)
        called.add(name)

    def check_called() -> None:
        """Refuses a rule if none of its modules was called: the rule would have no effect."""
        for number, rule in enumerate(rules, 1):
            names = [name for name, module_rule in module_rules.items() if module_rule is rule]
            if called.isdisjoint(names) and not rule.is_shared:
                fact = f"Rule {number}, '{rule.match}', matches modules that are not called ('{names[0]}')"
                raise DeadRuleError(place, fact, "Name the modules that return the tensors", rule=rule.match)

    for name, rule in module_rules.items():
        module.get_submodule(name).register_forward_hook(functools.partial(check_output, name, rule))
    return check_called


def rule_by_module(module: torch.nn.Module, rules: Sequence[ActivationRule], place: str) -> dict[str, ActivationRule]:
    """Returns each submodule's first matching rule, by the submodule's name; refuses a rule that is nobody's first."""
    names = [name for name, _ in module.named_modules() if name]
    numbers = {
        name: next((n for n, rule in enumerate(rules) if re.fullmatch(rule.match, name)), None) for name in names
    }
    for number, rule in enumerate(rules):
        if number not in numbers.values() and not rule.is_shared:
            fact = f"Rule {number + 1}, '{rule.match}', matches none of {len(names)} modules"
            remedy = f"Remove it or mend it. {nearest(rule.match, names[:12])}"  # a network may have thousands
            raise DeadRuleError(place, fact, remedy, rule=rule.match)
    return {name: rules[number] for name, number in numbers.items() if number is not None}


def _sharded_output(
    name: str, rule: ActivationRule, mesh: jax.sharding.Mesh, place: str, module: Any, inputs: Any, output: Any
) -> Any:
    """Returns the output of the module `name` with every tensor sharded by its spec: a forward hook."""
    _check_output(name, rule, dict(mesh.shape), place, output)
    outputs = output if isinstance(output, tuple) else (output,)
    sharded = [*outputs]
    for number, spec in enumerate(_specs(rule, outputs)):
        if spec is not None:
            where = NamedSharding(mesh, PartitionSpec(*(axes or None for axes in dims_of(spec))))
            sharded[number] = engine.call_jax(jax.lax.with_sharding_constraint, outputs[number], where)
    return tuple(sharded) if isinstance(output, tuple) else sharded[0]


def _specs(rule: ActivationRule, outputs: Sequence[Any]) -> list[Spec | None]:
    """Returns the spec of each output; None for no constraint, as under a shared rule for an output of fewer dims."""
    if not rule.is_shared:
        return rule.outputs
    pairs = zip(rule.outputs, outputs, strict=False)
    return [spec if getattr(output, "ndim", 0) >= len(dims_of(spec)) else None for spec, output in pairs]


def _check_output(name: str, rule: ActivationRule, sizes: Mapping[Axis, int], place: str, output: Any) -> None:
    """Refuses an output of the module `name` that has fewer tensors than its rule has specs, or does not fit a spec."""
    outputs = output if isinstance(output, tuple) else (output,)
    if len(outputs) < len(rule.outputs):
        fact = f"'{rule.match}' has {len(rule.outputs)} specs, and '{name}' returns {len(outputs)} tensor(s)"
        raise MeshError(place, fact, "Give one for each output", name=name)
    for tensor, spec in zip(outputs, _specs(rule, outputs), strict=False):
        for dim, axes in enumerate(dims_of(spec)):
            if axes and dim >= tensor.ndim:
                fact = f"'{rule.match}' has a spec of {dim + 1} dims, and what '{name}' returns has {tensor.ndim}"
                raise MeshError(place, fact, "Shorten the spec", name=name)
            if axes and tensor.shape[dim] % shard.ways(axes, sizes) and not rule.uneven:
                product = " x ".join(f"{axis}={sizes[axis]}" for axis in axes)
                fact = f"{product} does not divide dim {dim} of what '{name}' returns, {list(tensor.shape)}"
                remedy = f"Choose {' x '.join(axes)} among the divisors of {tensor.shape[dim]}"
                raise MeshError(place, fact, f"{remedy}, or pad it with `uneven: true`", name=name, axis=axes[0])
