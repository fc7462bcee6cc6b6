"""A loaded module becomes a program on a mesh, and is called as before."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import torch
from jax.sharding import AxisType, Mesh
from torch.nn.parameter import is_lazy

from torchport import load, shard
from torchport.compile import failure, rules
from torchport.compile.ported import Ported
from torchport.compile.state import check_class
from torchport.config import Document, Frozen, validated
from torchport.config.card import Card, Implementation
from torchport.config.strategy import Axis, Rule
from torchport.errors import BadValueError, MeshError, UnknownNameError, nearest
from torchport.own_code import Session, sessions
from torchport.task.devices import hush_libtpu


def port(
    module: torch.nn.Module,
    *,
    strategy: str | Mapping[str, object] | None = None,
    mesh: Mapping[Axis, int] | Mesh | None = None,
    component: str | None = None,
    inputs: Sequence[Mapping[str, object]] = (),
    attention: Implementation | None = None,
    strict: bool = False,
) -> torch.nn.Module:
    """Returns a module that is compiled on a mesh at its first call, and at each call with other shapes.

    The returned module has the arguments and results of `module`, as tensors of the host. Call it inside the same
    `torchport.applied(...)`. `module` itself is used up: its weights go to the devices.

    Args:
        module: With its weights, in the host's memory, in evaluation mode.
        strategy: The name of a strategy of the card, or without a card that of a shared strategy (`tp`, `ulysses`,
            `fsdp`). Or rules for this module, as a card writes them, as a mapping or as YAML: `{"weights": [{"match":
            ".*", "spec": "replicate"}], "inputs": [...]}`. None: the card's first strategy; without a card, a single
            device needs no strategy, and a mesh of several devices is refused.
        mesh: Sizes of the axes, `{"dp": 2, "tp": 4}`, or a mesh of JAX's with these names. By default one device.
        component: The card's name for the module; by default the component that has the module's class.
        inputs: Rules for inputs, which come before the card's: for code that passes other inputs than a run does.
        attention: The implementation of attention; by default the platform's own.
        strict: Whether an operator is refused that no sample has compared with PyTorch's; see docs/engine.md.

    Returns:
        The ported module. Under `backend="original"` it is `module` itself.

    Raises:
        BadValueError: No patches are in force, or `module` is no module, or in training mode.
        UnknownNameError: There is no such strategy or component.
        ShardError: Rules that do not fit the module, or a mesh that does not fit it or the devices.
    """
    if not sessions:
        remedy = "Call it inside `with torchport.applied(...)`, or start the script with torchport exec"
        raise BadValueError("port", "No patches are in force, and torchax needs some to trace", remedy)
    if not isinstance(module, torch.nn.Module):
        fact = f"It is of the type {type(module).__name__}, and no torch.nn.Module"
        raise BadValueError("port", fact, "Pass a network, such as the pipeline's transformer")
    session = sessions[-1]
    if session.backend == "original":
        return module
    _check_state(module)
    placed_on = _mesh(mesh if mesh is not None else session.choice.mesh or {})
    strategy = strategy or session.choice.strategy
    if strategy is None and session.card is None and placed_on.size == 1:
        # On one device all strategies are the same.
        strategy = "fsdp"
    chosen_rules = _rules(module, session, strategy, component, inputs)
    sizes = {axis: placed_on.shape[axis] for axis in shard.AXES}
    config = load.configuration(module) if hasattr(module, "config") else {}
    rules.check(chosen_rules, config, sizes)
    chosen_rules = dataclasses.replace(chosen_rules, strict=strict or session.choice.strict)
    implementation = attention or session.choice.attention
    return Ported(module, chosen_rules, placed_on, session.ledger, _owners(module, session), implementation)


def _check_state(module: torch.nn.Module) -> None:
    """Refuses a module with ported or scripted parts, one in training mode, and weights that no program can take."""
    if any(isinstance(part, Ported) for part in module.modules()):
        raise BadValueError("port", "A part of the module is ported already", "Port the whole, or its parts alone")
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise BadValueError("port", "A part of the module is TorchScript", "Port the module that it was made of")
    if module.training:
        raise BadValueError("port", "The module is in training mode, where dropout is random", "Call its eval() first")
    for name, tensor in module.state_dict(keep_vars=True).items():
        if is_lazy(tensor):
            raise BadValueError("port", f"'{name}' has no shape before the first call", "Call it once in PyTorch")
        check_class("port", name, tensor)
        if getattr(tensor, "is_meta", False):
            fact = f"'{name}' has no values: port has moved them to the devices, or they were never loaded"
            raise BadValueError("port", fact, "Load the module anew, or call the ported one")


def _rules(
    module: torch.nn.Module,
    session: Session,
    strategy: str | Mapping[str, object] | None,
    component: str | None,
    inputs: Sequence[Mapping[str, object]],
) -> rules.Rules:
    """Returns the sharding rules of a module: those that the caller wrote, or those of a shared strategy or the card's.
    Raises BadValueError if there is neither a strategy nor a card.
    """
    is_name = isinstance(strategy, str) and strategy.isidentifier()  # else it is a mapping of rules, or YAML
    if strategy is not None and not is_name:
        if inputs:
            raise BadValueError("port(inputs=...)", "'strategy' has rules for inputs already", "Put them there")
        return rules.of_caller(component or type(module).__name__, strategy)
    extra = validated(_Inputs, Document("port(inputs=...)", {"inputs": [dict(rule) for rule in inputs]}, {})).inputs
    if session.card is None or session.document is None:
        if strategy is None:
            fact = "There is none for a mesh of several devices, and no model's card is in force"
            model = '`torchport.applied("...")`'
            remedy = f"Name a shared one ('tp', 'ulysses', 'fsdp') or a model, {model}, or pass rules"
            raise BadValueError(rules.PLACE, fact, remedy)
        shared = rules.of_shared(component or type(module).__name__, str(strategy))
        return dataclasses.replace(shared, extra=extra)
    name = component or _component(module, session.card)
    first = next(iter(session.card.strategies))
    return rules.of_card(session.card, session.document, str(strategy or first), name, extra)


class _Inputs(Frozen):
    inputs: list[Rule]


def _component(module: torch.nn.Module, card: Card) -> str:
    """Returns the name of the card's network that has a module's class; refuses a card with no or several of them."""
    path = f"{type(module).__module__}:{type(module).__qualname__}"
    sharded = {name for strategy in card.strategies.values() for name in strategy.weights}
    networks = [name for name in card.components if name in sharded]
    names = [name for name in networks if card.components[name].class_.rpartition(":")[2] == type(module).__name__]
    if len(names) != 1:
        found = f"{' and '.join(names)} are" if names else "None of its networks is"
        fact = f"The module is a {path}. {found} of that class in the card of '{card.model}'"
        raise UnknownNameError("port", fact, f"Name its network with component=: {', '.join(networks)}", name=path)
    return names[0]


def _mesh(mesh: Mapping[Axis, int] | Mesh) -> Mesh:
    """Returns a mesh with all of torchport's axes: on the devices of a given `Mesh`, or for sizes on the first devices
    of the process. Refuses an unknown axis, and more devices than there are.
    """
    sizes = dict(mesh.shape) if isinstance(mesh, Mesh) else dict(mesh)
    for axis in sizes:
        if axis not in shard.AXES:
            fact = f"There is no axis '{axis}'"
            raise UnknownNameError(rules.MESH, fact, nearest(str(axis), shard.AXES), name=str(axis))
    if isinstance(mesh, Mesh):
        # The same devices in torchport's order of axes; an axis that the given mesh lacks has size 1.
        order = [list(mesh.axis_names).index(axis) for axis in shard.AXES if axis in sizes]
        devices = mesh.devices.transpose(order).reshape([sizes.get(axis, 1) for axis in shard.AXES])
        return Mesh(devices, shard.AXES, axis_types=(AxisType.Auto,) * len(shard.AXES))
    hush_libtpu()  # before `jax.devices()`
    available = jax.devices()
    count = math.prod(sizes.values())
    if count > len(available):
        shard.check_mesh(sizes, len(available), f"this process ({available[0].platform})", rules.MESH)  # raises
    if count < 1:
        raise MeshError(rules.MESH, f"It takes {count} devices", "Give each axis a size of 1 or more")
    return shard.make_mesh(sizes, available[:count])


def _owners(module: torch.nn.Module, session: Session) -> failure.Owners:
    """Returns the owners of a module's code, for remedies in errors: its submodules' packages count as upstream."""
    packages = {type(part).__module__.partition(".")[0] for part in module.modules()}
    return failure.Owners(
        session.pack,
        session.card,
        session.document,
        lambda: [record.entry for record in session.ledger.records],
        others=frozenset(packages - {"__main__"}),  # a script can be edited, and no patch can name it
        is_script=True,
    )
