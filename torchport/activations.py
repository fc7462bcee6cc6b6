"""Puts rules on what a network's modules return, so that activations are sharded where a strategy says so."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding, PartitionSpec

from torchport.card import ActivationRule, Spec, dims_of
from torchport.errors import DeadRuleError, MeshError, nearest


def constrain(module: torch.nn.Module, rules: Sequence[ActivationRule], mesh: jax.sharding.Mesh, place: str) -> None:
    """Makes every module that a rule matches return its outputs as the rule says, when it is traced.

    Args:
        module: The network; hooks are added to its submodules. The first rule that matches one is its rule.
        rules: The rules.
        mesh: The devices.
        place: Where the rules are written, `file:line`.

    Raises:
        DeadRuleError: A rule that matches no module.
        MeshError: While tracing: outputs that are fewer than a rule has specs, or a dim that its axes do not divide and
            that may not be padded.
    """
    taken: set[int] = set()
    names = [name for name, _ in module.named_modules() if name]
    for name in names:
        number = next((n for n, rule in enumerate(rules) if re.fullmatch(rule.match, name)), None)
        if number is not None:
            taken.add(number)
            hook = functools.partial(_constrained, name, rules[number], mesh, place)
            module.get_submodule(name).register_forward_hook(hook)
    for number, rule in enumerate(rules):
        if number not in taken:
            fact = f"Rule {number + 1}, '{rule.match}', matches none of {len(names)} modules"
            raise DeadRuleError(
                place, fact, "Remove it or mend it. " + nearest(rule.match, names[:12]), rule=rule.match
            )


def _constrained(
    name: str, rule: ActivationRule, mesh: jax.sharding.Mesh, place: str, module: Any, inputs: Any, output: Any
) -> Any:
    """Returns a module's output with every tensor where its spec puts it: a forward hook."""
    outputs = output if isinstance(output, tuple) else (output,)
    if len(outputs) < len(rule.outputs):
        raise MeshError(
            place,
            f"'{rule.match}' has {len(rule.outputs)} specs, and '{name}' returns {len(outputs)} tensor(s)",
            "Give one for each output",
            name=name,
        )
    specs = [*rule.outputs, *[None] * (len(outputs) - len(rule.outputs))]
    placed = tuple(_placed(name, rule, *pair, mesh, place) for pair in zip(outputs, specs, strict=True))
    return placed if isinstance(output, tuple) else placed[0]


def _placed(
    name: str, rule: ActivationRule, tensor: Any, spec: Spec | None, mesh: jax.sharding.Mesh, place: str
) -> Any:
    if spec is None:
        return tensor
    from torchax import interop

    for dim, axes in enumerate(dims_of(spec)):
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if axes and dim >= tensor.ndim:
            fact = f"'{rule.match}' has a spec of {dim + 1} dims, and what '{name}' returns has {tensor.ndim}"
            raise MeshError(place, fact, "Shorten the spec", name=name)
        if axes and tensor.shape[dim] % parts and not rule.uneven:
            shown = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
            raise MeshError(
                place,
                f"{shown} does not divide dim {dim} of what '{name}' returns, {list(tensor.shape)}",
                f"Choose {' x '.join(axes)} among the divisors of {tensor.shape[dim]}, or pad it with `uneven: true`",
                name=name,
                axis=axes[0],
            )
    where = NamedSharding(mesh, PartitionSpec(*(axes or None for axes in dims_of(spec))))
    return interop.call_jax(jax.lax.with_sharding_constraint, tensor, where)
