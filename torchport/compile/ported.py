"""A module whose forward is a program on a mesh, and which is called as before."""

from __future__ import annotations

import contextvars
import dataclasses
import inspect
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding, PartitionSpec

from torchport import engine, patch, shard
from torchport.compile import failure, graph, network, rules, state
from torchport.compile.in_force import lowerings
from torchport.config.card import Implementation
from torchport.errors import BadValueError, HostTensorError
from torchport.stages.family import Stage
from torchport.task import Task, encoder_names
from torchport.task.devices import devices

STRATEGY = "tp"
ATTENTION: Implementation = "plain"
"""Of encoders: the shared strategy, and the implementation of attention, as texts are short."""
CALL = "(call)"
"""The name of the static argument that says how a module is called; no parameter has it."""

_lock = threading.RLock()  # a trace replaces parts of the module, and changes PyTorch for the process
_traced_call: contextvars.ContextVar[state.Snapshot] = contextvars.ContextVar("snapshot")
"""The snapshot of the call that is being traced."""


class Ported(torch.nn.Module):
    """A module whose forward is a compiled program. Its other attributes are those of the original module.

    Args:
        module: The original; its weights move to the devices, and its parameters to meta.
        ledger: The patches that are in force.
        owners: Whose code the module runs, for errors.
        attention: The implementation of attention; None: the platform's.
    """

    device = torch.device("cpu")
    """Where its inputs and outputs are: on the host."""

    def __init__(
        self,
        module: torch.nn.Module,
        module_rules: rules.Rules,
        mesh: jax.sharding.Mesh,
        ledger: patch.Ledger,
        owners: failure.Owners,
        attention: Implementation | None,
    ) -> None:
        """Moves the module's weights to the mesh by its rules, and keeps the module for its other attributes."""
        super().__init__()
        self.ledger = ledger
        self.owners = owners
        self.signature = inspect.signature(module.forward)
        self._effects: dict[Any, state.Effects] = {}  # by the key of a program, `call` in `_call`
        self._outside: dict[Any, list[dict[Any, Any]]] = {}  # the states outside of snapshots that are known, by key
        buffers = module.named_buffers(remove_duplicate=False)
        self._memory = {name: buffer.untyped_storage().data_ptr() for name, buffer in buffers}
        self.compiled = network.ported(
            module, module_rules, mesh, how=self._traced, trace=ledger.trace(), attention=attention
        )
        self._state = state.State(module, module_rules.name)
        self.training = False
        vars(self)["original"] = module  # no submodule: `to` and `state_dict` would find parameters without values

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["original"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute of the original module; refuses weights, buffers and submodules: the devices have them."""
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

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the weights and buffers by name, gathered on the host; those of stacked blocks are stacked."""
        weights = self.compiled.weights
        module = self.original
        on_host = module.state_dict(keep_vars=True)
        # A layer may have several names; `weights` has the first. The names of stacked weights are not the module's.
        firsts = {id(x): name for name, x in (*module.named_parameters(), *module.named_buffers())}
        names = {name: firsts.get(id(x), name) for name, x in on_host.items()}  # the first name, by each name
        names |= {name: name for name in weights if name not in firsts.values()}
        values = {n: x for n, x in on_host.items() if not getattr(x, "is_meta", False)}
        values |= {name: shard.to_torch(weights[name]) for name in {*names.values()} & weights.keys()}
        return {name: values[first] for name, first in names.items() if first in values}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Refuses new weights with a BadValueError."""
        self._state.refuse(next(iter(state_dict), "weights"))

    def train(self, mode: bool = True) -> Ported:
        """Returns the module, which is in evaluation mode; refuses training mode with a BadValueError."""
        if mode:
            raise BadValueError(self.compiled.network.name, "A ported module has no gradients", "Train it before port")
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the module's output on the host; refuses arguments that are neither tensors nor constants."""
        with _lock:
            return self._call(args, kwargs)

    def _call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Calls the program for these arguments, returns the module's output, and changes the objects on the host that
        the module's forward would change. Refuses a forward that leaves a tensor in a global.
        """
        bound = self.signature.bind(*args, **kwargs).arguments
        given_names = (*bound,)
        for name, parameter in self.signature.parameters.items():
            if isinstance(parameter.default, list | dict):  # the forward may change this object
                bound.setdefault(name, parameter.default)
        unnamed = [p.name for p in self.signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
        snapshot = self._state.snapshot_before(bound, unnamed)
        autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cuda", "cpu")]
        # The key of the program, beside the shapes of its inputs. Hooks see which arguments are keywords.
        call: Any = self._state.program_number(snapshot), tuple(autocast), (*kwargs,), given_names
        # Its last part is a number: a program is for one state of what the forward may read outside of the snapshot.
        outside, known = self._state.outside(snapshot), self._outside.setdefault(call, [])
        numbers = (n for n, marks in enumerate(known) if marks.items() <= outside.items())
        call = *call, next(numbers, len(known))
        is_new = call not in self._effects
        token = _traced_call.set(snapshot)
        try:
            # Tensors that the module keeps between calls are replicated on all devices.
            where, named = NamedSharding(self.compiled.mesh, PartitionSpec()), snapshot.inputs.items()
            with failure.explained(self.owners), lowerings(self.ledger):
                inputs = {n: shard.to_jax(t, where) if n.startswith(state.OF_MODULE) else t for n, t in named}
                (returned,) = self.compiled(**inputs, **{CALL: call})
        except HostTensorError as error:
            if not self._state.add_input(getattr(error, "tensor", None), snapshot):
                raise
            return self._call(args, kwargs)  # the tensor of the error is an input from now on
        finally:
            _traced_call.reset(token)
        # In the first call each rule for inputs had to match an input; later calls may lack optional inputs.
        self.compiled.network = dataclasses.replace(self.compiled.network, spare=True)
        effects = self._effects[call]
        if is_new:
            effects = self._effects[call] = effects._replace(holder=graph.holder_of_traced())
            known.append({**self._state.outside(snapshot), **outside})
        if effects.holder:
            fact = f"It leaves a tensor in {effects.holder}, where torchport does not follow it"
            remedy = "Return it, or keep it in an attribute of the module, in a list, a dict or an object"
            raise BadValueError(self.compiled.network.name, fact, remedy)
        return self._make_changes(effects, snapshot, returned)

    def _make_changes(self, effects: state.Effects, snapshot: state.Snapshot, returned: Sequence[torch.Tensor]) -> Any:
        """Makes the changes of a call's effects on the host, and returns the call's return value. `returned` has the
        program's results: outputs, then new values of inputs, then new values of buffers.
        """
        values = iter(returned)
        outputs = [next(values) for _ in range(effects.outputs - len(effects.views))]
        for number in effects.written:
            if snapshot.overlaps(number):
                fact = "It writes to an argument that lies in the memory of another one, or of an attribute"
                raise BadValueError(self.compiled.network.name, fact, "Pass a clone()")
            with torch.no_grad():
                [*snapshot.inputs.values()][number].copy_(next(values))
        names = {base for kind, base, _ in effects.views.values() if kind == "weight"}
        names |= {*effects.weights, *(name for name, _ in effects.buffers)}
        weights, new_buffers = {name: self._host_weight(name) for name in names}, {}
        for name, is_new in effects.buffers:
            value = next(values)
            self.compiled.weights[name] = shard.to_jax(value, self.compiled.weights[name].sharding)
            buffer = new_buffers[name] = self._state.write_buffer(name, value, is_new)
            self._memory[name] = buffer.untyped_storage().data_ptr()
        return self._state.apply(effects, snapshot, outputs, {"weight": weights, "new": new_buffers})

    @torch.inference_mode(False)  # a tensor of inference has no count of writes
    def _host_weight(self, name: str) -> torch.Tensor:
        """Returns a buffer, or a weight's copy on the host, noted as lent: the next call refuses a write to it."""
        prefix, _, attribute = name.rpartition(".")
        buffer: torch.Tensor | None = self.original.get_submodule(prefix)._buffers.get(attribute)
        if buffer is not None:
            return buffer
        if name not in self._state.lent:
            weight = torch.nn.Parameter(shard.to_torch(self.compiled.weights[name]), requires_grad=False)
            self._state.lent[name] = weight, weight._version
        return self._state.lent[name][0]

    def _traced(self, module: torch.nn.Module, **inputs: Any) -> tuple[tuple[torch.Tensor, ...]]:
        """Traces the module's forward for the call in `_traced_call`, and notes its effects: the network's `how`. It
        returns outputs that are no views, then the new values of written inputs, then the new values of buffers.
        """
        call = inputs.pop(CALL)
        snapshot = _traced_call.get()
        _, _, keywords, given_names, _ = call
        tensors = self._traced_inputs(snapshot, inputs)
        forms = [(tensor.shape, tensor.stride()) for tensor in tensors]
        traced = {id(tensors[first]): graph.Reference("input", first) for first in snapshot.firsts}
        buffers = {name: buffer for name, buffer in module.named_buffers() if name in self.compiled.weights}
        weights = dict(module.named_parameters()) | buffers
        with self._state.traced_inputs_in_place(snapshot, tensors, weights) as arguments:
            attributes = [engine.attributes(weight) for weight in module.parameters()]
            # The forward may write to these tensors: the program returns their new values.
            shared, pairs = snapshot.memory(), zip(tensors, snapshot.inputs.values(), strict=True)
            writable = [tensor for tensor, host_input in pairs if not state.is_read_only(host_input)]
            for name, buffer in buffers.items():
                if self._shares_no_memory(name) and self._memory[name] not in shared:
                    writable.append(buffer)
            engine.freeze(writable, whose="")  # allows writes again
            args, kwargs = self._as_passed(arguments, keywords, given_names)
            returned = module(*args, **kwargs)
            for number, (tensor, form) in enumerate(zip(tensors, forms, strict=True)):
                if (tensor.shape, tensor.stride()) != form:
                    fact = f"It gives the argument '{[*snapshot.inputs][number]}' another shape"
                    raise BadValueError(self.compiled.network.name, fact, "Give a view of it that shape")
            if attributes != [engine.attributes(weight) for weight in module.parameters()]:
                fact = "It sets an attribute of a weight, and a later call would not see that"
                raise BadValueError(self.compiled.network.name, fact, "Keep it in an attribute of the module")
            rebound = self._rebound(module, buffers)
            known: dict[tuple[str, Any], Any] = {("weight", name): weight for name, weight in weights.items()}
            known |= {("new", name): buffer for name, is_new, buffer in rebound if is_new}
            known |= {("input", number): tensor for number, tensor in enumerate(tensors)}
            references = {id(tensor): graph.Reference(*key) for key, tensor in known.items()}
            after = self._state.snapshot_after(snapshot, references | traced, returned)
            views, changed = engine.views(after.outputs, known), [(name, is_new) for name, is_new, _ in rebound]
            effects = self._state.effects(snapshot, after, tensors)._replace(buffers=changed, views=views)
        self._effects[call] = effects
        outputs = (output for number, output in enumerate(after.outputs) if number not in views)
        return ((*outputs, *(tensors[n] for n in effects.written), *(buffer for *_, buffer in rebound)),)

    def _traced_inputs(self, snapshot: state.Snapshot, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Returns a snapshot's traced inputs, with strides, attributes and shared memory as the host's tensors."""
        tensors = [
            inputs[name] if tensor.is_contiguous() else engine.with_strides(inputs[name], tensor.stride())
            for name, tensor in snapshot.inputs.items()
        ]
        for number, (base, (size, strides, start)) in snapshot.views.items():
            tensors[number] = tensors[base].view(-1)[start:].as_strided(size, strides)
        tensors = [tensors[first] for first in snapshot.firsts]
        for tensor, host_input in zip(tensors, snapshot.inputs.values(), strict=True):
            vars(tensor).update(vars(host_input))
        return tensors

    def _as_passed(self, arguments: dict[str, Any], keywords: Sequence[str], given: Sequence[str]) -> Any:
        """Splits arguments by name into `args` and `kwargs`: those `given` by the caller, the `keywords` by name."""
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

    def _shares_no_memory(self, name: str) -> bool:
        """Returns whether no other buffer lies in the memory of the buffer with this name."""
        return list(self._memory.values()).count(self._memory.get(name, 0)) == 1

    def _rebound(
        self, module: torch.nn.Module, before: Mapping[str, torch.Tensor]
    ) -> list[tuple[str, bool, torch.Tensor]]:
        """Returns a row for each buffer that the forward wrote to or bound to another tensor: name, whether it is
        another tensor, new value. It also binds the old tensors again. Refuses a new shape or dtype.
        """
        rows = []
        for name, buffer in before.items():
            prefix, _, attribute = name.rpartition(".")
            buffers = module.get_submodule(prefix)._buffers
            new = buffers.get(attribute)
            if engine.was_written(buffer):
                rows.append((name, False, buffer))
            if new is buffer:
                continue
            buffers[attribute] = buffer
            form = buffer.shape, buffer.dtype
            if new is None or (new.shape, new.dtype) != form or not self._shares_no_memory(name):
                fact = f"It binds the buffer '{name}' to a tensor of another form, or another buffer is the same tensor"
                raise BadValueError(self.compiled.network.name, fact, "Keep it in an attribute, which is no buffer")
            rows.append((name, True, new))
        return rows


def encoders(task: Task, stage: Stage, parts: Mapping[str, Any], ledger: patch.Ledger) -> dict[str, Ported]:
    """Returns a stage's text encoders by name, each ported to all devices of the job's mesh."""
    owners, mesh = failure.Owners.of_task(task), encoder_mesh(task, devices(task.machine))
    return {
        name: Ported(parts[name].eval(), rules.of_shared(name, STRATEGY), mesh, ledger, owners, ATTENTION)
        for name in encoder_names(task.card, stage)
    }


def encoder_mesh(task: Task, on: Any) -> jax.sharding.Mesh:
    """Returns the mesh for text encoders: as many devices as the job's mesh has, all along `tp`."""
    return shard.make_mesh({axis: task.job.devices if axis == "tp" else 1 for axis in shard.AXES}, on)
