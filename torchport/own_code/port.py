"""A module that somebody has loaded already becomes a program on a mesh, and is called as before."""

from __future__ import annotations

import contextvars
import dataclasses
import inspect
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import torch
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from torchport import engine, load, shard
from torchport.compile import failure, network, rules
from torchport.config import Document, Frozen, validated
from torchport.config.card import Card, Implementation
from torchport.config.strategy import Axis, Rule
from torchport.errors import BadValueError, HostTensorError, MeshError, UnknownNameError, nearest
from torchport.own_code import graph, state
from torchport.own_code.applied import Session, sessions
from torchport.task.devices import hush_libtpu

CALL = "(call)"
"""The name of the static argument that says how a module is called; no parameter has it."""


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

    It takes what `module` takes, with tensors of the host, and returns what that returns, on the host. Call it inside
    the same `torchport.applied(...)`. It takes `module` over: the weights go to the devices.

    Args:
        module: With its weights, in the host's memory, in evaluation mode.
        strategy: The name of one of the card's strategies; without a card, of a shared one (`tp`, `ulysses`, `fsdp`);
            or own rules for this module in a card's words, `{"weights": [{"match": ".*", "spec": "replicate"}],
            "inputs": [...]}`, also as text of YAML. By default the card's first.
        mesh: Sizes of the axes, `{"dp": 2, "tp": 4}`, or a mesh of JAX's with these names. By default one device.
        component: The card's name for the module; by default the one whose class it is.
        inputs: Rules for inputs, before those of the card: for a call that differs from that of its family.
        attention: The implementation of attention; by default the platform's own.
        strict: Whether an operator is refused that no sample has compared with PyTorch's; see docs/engine.md.

    Returns:
        The ported module. Under `backend="original"` it is `module` itself.

    Raises:
        BadValueError: There are no patches in force, or it is no module, or is training.
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
    if any(isinstance(each, Ported) for each in module.modules()):
        raise BadValueError("port", "A part of the module is ported already", "Port the whole, or its parts alone")
    if module.training:
        raise BadValueError("port", "The module is in training mode, where dropout is random", "Call its eval() first")
    written = _rules(module, session, strategy or session.choice.strategy, component, inputs)
    placed_on = _mesh(mesh if mesh is not None else session.choice.mesh or {})
    sizes = {axis: placed_on.shape[axis] for axis in shard.AXES}
    config = load.configuration(module) if hasattr(module, "config") else {}
    rules.check(written, config, sizes)
    written = dataclasses.replace(written, strict=strict or session.choice.strict)
    return Ported(module, written, placed_on, session, attention or session.choice.attention)


def _rules(
    module: torch.nn.Module,
    session: Session,
    strategy: str | Mapping[str, object] | None,
    component: str | None,
    inputs: Sequence[Mapping[str, object]],
) -> rules.Rules:
    """Returns what is said of a module: by the card, or by its caller."""
    is_name = strategy is None or (isinstance(strategy, str) and strategy.isidentifier())
    if not is_name:
        if inputs:
            fact = "'strategy' has rules for inputs already"
            raise BadValueError("port(inputs=...)", fact, "Put them there")
        assert strategy is not None
        return rules.of_caller(component or type(module).__name__, strategy)
    if session.card is None or session.document is None:
        if strategy is None:
            fact = "There is none, and no model's card is in force"
            remedy = (
                "Name a shared one ('tp', 'ulysses', 'fsdp') or a model, `torchport.applied(\"...\")`, or pass rules"
            )
            raise BadValueError(rules.PLACE, fact, remedy)
        return rules.of_shared(component or type(module).__name__, str(strategy))
    extra = validated(_Inputs, Document("port(inputs=...)", {"inputs": [dict(rule) for rule in inputs]}, {})).inputs
    name = component or _component(module, session.card)
    first = next(iter(session.card.strategies))
    return rules.of_card(session.card, session.document, str(strategy or first), name, extra)


class _Inputs(Frozen):
    inputs: list[Rule]


def _component(module: torch.nn.Module, card: Card) -> str:
    """Returns the network of a card whose class a module is of.

    Raises:
        UnknownNameError: There is none, or there are two.
    """
    path = f"{type(module).__module__}:{type(module).__qualname__}"
    networks = [name for name in card.components if any(name in each.weights for each in card.strategies.values())]
    names = [name for name in networks if card.components[name].class_.rpartition(":")[2] == type(module).__name__]
    if len(names) != 1:
        which = f"{' and '.join(names)} are" if names else "None of its networks is"
        fact = f"The module is a {path}. {which} of that class in the card of '{card.model}'"
        raise UnknownNameError("port", fact, f"Name its network with component=: {', '.join(networks)}", name=path)
    return names[0]


def _mesh(mesh: Mapping[Axis, int] | Mesh) -> Mesh:
    """Returns a mesh with all axes named, of the first devices of the process or of those that are given.

    Raises:
        UnknownNameError: An axis of another name.
        MeshError: More devices than there are.
    """
    sizes = dict(mesh.shape) if isinstance(mesh, Mesh) else dict(mesh)
    for axis in sizes:
        if axis not in shard.AXES:
            fact = f"There is no axis '{axis}'"
            raise UnknownNameError(rules.MESH, fact, nearest(str(axis), shard.AXES), name=str(axis))
    if isinstance(mesh, Mesh):
        order = [list(mesh.axis_names).index(axis) for axis in shard.AXES if axis in sizes]
        devices = mesh.devices.transpose(order).reshape([sizes.get(axis, 1) for axis in shard.AXES])
        return Mesh(devices, shard.AXES, axis_types=(AxisType.Auto,) * len(shard.AXES))
    hush_libtpu()
    there, count = jax.devices(), math.prod(sizes.values())
    if count > len(there):
        shard.check_mesh(sizes, len(there), f"this process ({there[0].platform})", rules.MESH)
    if count < 1:
        raise MeshError(rules.MESH, f"It takes {count} devices", "Give each axis a size of 1 or more")
    return shard.make_mesh(sizes, there[:count])


_lock = threading.RLock()  # a trace replaces parts of the module, and changes PyTorch for the process
_found: contextvars.ContextVar[state.Snapshot] = contextvars.ContextVar("found")
"""What the call finds that is traced now."""


class Ported(torch.nn.Module):
    """A module whose forward is a program. Its other attributes are those of the module that it was.

    Args:
        module: It is taken over.
        written: What is said of it.
        mesh: The devices.
        session: The patches.
        attention: The implementation.

    Attributes:
        compiled: Its programs.
        original: The module; its parameters have shapes, and no values.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        written: rules.Rules,
        mesh: Mesh,
        session: Session,
        attention: Implementation | None,
    ) -> None:
        super().__init__()
        self.session = session
        self.signature = inspect.signature(module.forward)
        self._effects: dict[Any, state.Effects] = {}
        self._memory = {
            name: b.untyped_storage().data_ptr() for name, b in module.named_buffers(remove_duplicate=False)
        }
        trace = session.ledger.trace()
        self.compiled = network.ported(module, written, mesh, how=self._traced, trace=trace, attention=attention)
        self._state = state.State(module, written.name)
        self.training = False
        vars(self)["original"] = module  # no submodule: `to` and `state_dict` would find parameters without values

    @property
    def device(self) -> torch.device:
        """Where its inputs and outputs are: on the host."""
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the module that it was."""
        return getattr(vars(self)["original"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute of the module that it was."""
        original = vars(self).get("original")
        if original is None or name in vars(self):
            super().__setattr__(name, value)
            return
        if name in {**original._parameters, **original._buffers, **original._modules}:
            self._state.refuse(name)
        setattr(original, name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        fact = "A ported module is on the devices, and can be neither copied nor pickled"
        raise BadValueError(self.compiled.network.name, fact, "Copy the module before port")

    def train(self, mode: bool = True) -> Ported:
        """Refuses training.

        Raises:
            BadValueError: `mode` is True.
        """
        if mode:
            raise BadValueError(self.compiled.network.name, "A ported module has no gradients", "Train it before port")
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the module returns for these arguments, on the host.

        Raises:
            ForeignError: An exception of the module's code, or of PyTorch's or JAX's at one of its calls.
            UnmatchedError: An input that no rule matches.
            MeshError: A dim that its axes do not divide.
            StaleTraceError: It is compiled outside of its patches.
            BadValueError: An argument that is neither tensors nor a constant.
        """
        with _lock:
            return self._called(args, kwargs)

    def _called(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        bound = self.signature.bind(*args, **kwargs).arguments
        given = [*bound]
        for name, parameter in self.signature.parameters.items():
            if isinstance(parameter.default, list | dict):  # a call may leave something in it
                bound.setdefault(name, parameter.default)
        rest = [p.name for p in self.signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
        found = self._state.before(bound, rest)
        regions = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cuda", "cpu")]
        # What it is beside its tensors, which are the program's inputs. Hooks see which arguments are keywords.
        call = self._state.number(found), tuple(regions), (*kwargs,), (*given,)
        is_new = call not in self._effects
        token = _found.set(found)
        try:
            with failure.explained(self._owners()), self.session.operators():
                (returned,) = self.compiled(**self._inputs(found), **{CALL: call})
        except HostTensorError as error:
            if not self._state.add_input(getattr(error, "tensor", None), found):
                raise
            return self._called(args, kwargs)  # what it writes to is an input now
        finally:
            _found.reset(token)
        # A rule for inputs must match one in the first call; a later call may lack what is optional.
        self.compiled.network = dataclasses.replace(self.compiled.network, spare=True)
        effects = self._effects[call]
        if is_new:
            effects = self._effects[call] = effects._replace(holder=graph.holder_of_traced())
        if effects.holder:
            fact = f"It leaves a tensor in {effects.holder}, where torchport does not follow it"
            remedy = "Return it, or keep it in an attribute of the module, in a list, a dict or an object"
            raise BadValueError(self.compiled.network.name, fact, remedy)
        waiting = iter(returned)
        outputs = [next(waiting) for _ in range(effects.outputs - len(effects.views))]
        for number in effects.written:
            self._write([*found.inputs.values()][number], next(waiting), found)
        for name in effects.buffers:
            self.compiled.weights[name] = shard.to_jax(next(waiting), self.compiled.weights[name].sharding)
        return self._state.leave(effects, found, outputs)

    def _write(self, tensor: torch.Tensor, value: torch.Tensor, found: state.Snapshot) -> None:
        """Writes to a tensor of the caller's what a call has written to it."""
        if tensor.numel() and tensor.untyped_storage().data_ptr() in found.memory(but=tensor):
            fact = "It writes to an argument that lies in the memory of another one, or of an attribute"
            raise BadValueError(self.compiled.network.name, fact, "Pass a clone()")
        with torch.no_grad():
            tensor.copy_(value)

    def _inputs(self, found: state.Snapshot) -> dict[str, Any]:
        """Returns a call's tensors. What the module has kept is no argument: it is on every device."""
        where = NamedSharding(self.compiled.mesh, PartitionSpec())
        named = found.inputs.items()
        return {n: shard.to_jax(t, where) if n.startswith(state.OF_MODULE) else t for n, t in named}

    def _owners(self) -> failure.Owners:
        """Returns whose code the module runs. The packages of its parts are upstream also where no card names them."""
        session = self.session
        packages = {type(part).__module__.partition(".")[0] for part in self.original.modules()}
        return failure.Owners(
            session.pack,
            session.card,
            session.document,
            lambda: [record.entry for record in session.ledger.records],
            others=frozenset(packages - {"__main__"}),  # a script can be edited, and no patch can name it
            is_script=True,
        )

    def _traced(self, module: torch.nn.Module, **inputs: Any) -> tuple[tuple[torch.Tensor, ...]]:
        """Calls the module while it is traced, and notes what the call returns and changes."""
        call, found = inputs.pop(CALL), _found.get()
        given = list(found.inputs.values())
        tensors = [
            inputs[name] if tensor.is_contiguous() else engine.laid(inputs[name], tensor.stride())
            for name, tensor in found.inputs.items()
        ]
        tensors = [tensors[first] for first in found.firsts]
        traced = {id(tensors[first]): graph.Reference("input", first) for first in found.firsts}
        with self._state.entered(found, tensors) as arguments:
            buffers = {name: b for name, b in module.named_buffers() if name in self.compiled.weights}
            # A write to one of these is no loss: it is an output.
            writable = [tensor for n, tensor in enumerate(tensors) if not state.is_read_only(given[n])]
            shared = found.memory()
            alone = [b for name, b in buffers.items() if self._is_alone(name) and self._memory[name] not in shared]
            engine.freeze((writable, alone), "")
            args, kwargs = self._as_given(arguments, *call[2:])
            returned = module(*args, **kwargs)
            rebound = self._rebound(module, buffers)
            left = self._state.after(found, traced, returned)
            views = engine.views(left.outputs, tensors)
            effects = self._state.effects(found, left, tensors)._replace(buffers=list(rebound), views=views)
        self._effects[call] = effects
        outputs = (output for number, output in enumerate(left.outputs) if number not in views)
        return ((*outputs, *(tensors[n] for n in effects.written), *rebound.values()),)

    def _as_given(self, arguments: dict[str, Any], keywords: Sequence[str], given: Sequence[str]) -> Any:
        """Returns arguments by position and by keyword, as a call has given them."""
        args, kwargs = [], {name: arguments[name] for name in keywords if name in given}
        for name in given:
            kind = self.signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                args.extend(arguments[name])
            elif kind is inspect.Parameter.VAR_KEYWORD:
                kwargs |= arguments[name]
            elif name not in kwargs:
                args.append(arguments[name])
        return args, kwargs

    def _is_alone(self, name: str) -> bool:
        """Returns whether no other buffer lies in the memory of one."""
        return list(self._memory.values()).count(self._memory.get(name, 0)) == 1

    def _rebound(self, module: torch.nn.Module, before: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the buffers that a call has written to, or bound to other tensors, and binds them as before."""
        found = {}
        for name, buffer in before.items():
            prefix, _, attribute = name.rpartition(".")
            buffers = module.get_submodule(prefix)._buffers
            new = buffers.get(attribute)
            if new is buffer and not engine.was_written(buffer):
                continue
            buffers[attribute] = buffer
            form = buffer.shape, buffer.dtype
            if new is None or (new.shape, new.dtype) != form or not self._is_alone(name):
                fact = f"It binds the buffer '{name}' to a tensor of another form, or another buffer is the same tensor"
                raise BadValueError(self.compiled.network.name, fact, "Keep it in an attribute, which is no buffer")
            found[name] = new
        return found
