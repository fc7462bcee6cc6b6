"""What a call of a ported module finds and leaves: its arguments, the module's attributes, and what these hold.

PyTorch runs a forward anew at each call. A program is made once, of what there was at that time. So a program belongs
to a snapshot of the graph of things that the call can reach. Calls whose snapshots are equal share it, and each call
leaves what PyTorch's forward would leave.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from torchport import engine
from torchport.compile import graph
from torchport.compile.graph import Opaque, Part, Reference, Whole, value_of
from torchport.errors import BadValueError

SMALL = 2**14
"""Bytes of the largest table whose values are compared; of a larger one identity and PyTorch's count of writes are."""
OF_MODULE = "(state)."
"""The prefix of an input's name if it is no argument, but kept by the module; no parameter has it."""
_BESIDE = "Keep it beside the tensor, in an object or a dict"
_NAMES = {"attribute", "slot", "item", "pairs", "set", "array"}
"""Kinds of parts whose names become a part of an input's name, as in `cache.keys`."""


@dataclasses.dataclass
class Node:
    """A mutable object that a call can reach."""

    thing: Any
    path: tuple[str, ...] | None = None  #: The names that lead to it from an argument; None: no argument leads to it.
    parts: dict[Part, Any] = dataclasses.field(default_factory=dict)
    terms: dict[Part, Any] = dataclasses.field(default_factory=dict)  #: Its parts, as terms.


@dataclasses.dataclass
class Snapshot:
    """The mutable objects (nodes of a graph) and tensors that a call of a module can reach, before or after it."""

    #: The terms of the arguments, by parameter; after a call, the term of its return value.
    root: Any = ()
    nodes: list[Node] = dataclasses.field(default_factory=list)  #: By number.
    inputs: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)  #: The program's inputs, by name.
    #: Of each input, the number of the first one that is the same tensor.
    firsts: list[int] = dataclasses.field(default_factory=list)
    #: The inputs that lie in another one: its number, and the size, the strides and the offset of the part.
    views: dict[int, tuple[int, tuple[Any, ...]]] = dataclasses.field(default_factory=dict)
    #: The tensors of the host whose values are in the program.
    tables: list[torch.Tensor] = dataclasses.field(default_factory=list)
    marks: tuple[Any, ...] = ()  #: A mark of each table's values (`_mark`): an equal mark means equal values.
    outputs: list[torch.Tensor] = dataclasses.field(default_factory=list)  #: The traced tensors that are no inputs.

    def key(self, submodules: Collection[int]) -> Any:
        """Returns a key that is equal for two calls that can use one program; `submodules` are ids of the module's."""
        kinds: list[Any] = []  # of each node, the part on which the program depends: code, the submodule, or its type
        for thing in (node.thing for node in self.nodes):
            if isinstance(thing, types.FunctionType):
                kinds.append((Opaque(thing.__code__), Opaque(thing.__globals__)))
                continue
            has_hooks = isinstance(thing, torch.nn.Module) and (thing._forward_hooks or thing._forward_pre_hooks)
            kinds.append(Opaque(thing if has_hooks or id(thing) in submodules else type(thing)))
        inputs = []
        for name, tensor in self.inputs.items():
            attributes = ((key, graph.constant(value)) for key, value in engine.attributes(tensor).items())
            inputs.append((name, *_form(tensor), is_read_only(tensor), *attributes))
        terms = tuple(tuple((part, _types(part[1]), term) for part, term in node.terms.items()) for node in self.nodes)
        shared = *self.firsts, *self.views.items()
        return self.root, tuple(kinds), terms, tuple(inputs), shared, self.marks

    def memory(self) -> set[int]:
        """Returns the addresses of the storages of all inputs and tables, in the host's memory."""
        tensors = (*self.inputs.values(), *self.tables)
        return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.layout == torch.strided}

    def overlaps(self, number: int) -> bool:
        """Returns whether another input or table overlaps an input in memory; views of that input do not count."""
        inputs = [*self.inputs.values()]
        own_views = {n for n, (base, _) in self.views.items() if base == number}
        others = [tensor for n, tensor in enumerate(inputs) if n != number and n not in own_views]
        first, last = _addresses(inputs[number])
        ranges = [_addresses(tensor) for tensor in (*others, *self.tables) if tensor.layout == torch.strided]
        return any(max(first, start) < min(last, end) for start, end in ranges)


def _types(key: Any) -> Any:
    """Returns the type of a dict's key, or the types in a tuple: these tell the equal keys 1, 1.0 and True apart."""
    return type(key) if not isinstance(key, tuple | frozenset) else tuple(map(_types, key))


class Effects(NamedTuple):
    """The effects of each call of a program: the value it returns and the parts of objects it changes, as terms."""

    returned: Any  #: The term of the return value.
    changed: dict[int, dict[Part, Any]]  #: By number of a changed node, the terms of its parts.
    created: list[tuple[Callable[[], Any], dict[Part, Any]]]  #: Of a new node, its maker and the terms of its parts.
    written: list[int]  #: The numbers of the inputs that the call writes to.
    tables: dict[int, torch.Tensor]  #: New values of tables, by number; new tables have the last numbers.
    weights: frozenset[str]  #: The names of the weights that these terms refer to.
    #: How many outputs these terms refer to. The program returns first the outputs that are no views, then the new
    #: values of `written`, and then those of `buffers`.
    outputs: int
    #: The names of the buffers that the call has written to (False), or bound to other tensors (True).
    buffers: Sequence[tuple[str, bool]] = ()
    #: The outputs that lie in the memory of an input, a weight or another output; see `engine.views`.
    views: Mapping[int, tuple[str, Any, engine.Section]] = types.MappingProxyType({})
    #: The new tables that lie in another table: its number, and the size, the strides and the offset.
    parts: Mapping[int, tuple[int, tuple[Any, ...]]] = types.MappingProxyType({})
    #: The attributes that upstream has set on inputs and outputs, by kind and number: `("input", 0)`.
    attributes: Mapping[tuple[str, int], dict[str, Any]] = types.MappingProxyType({})
    holder: str = ""  #: In words, an object that still refers to a tensor of the trace: no later call would change it.


class State:
    """The state that a ported module keeps from call to call, and its snapshots. Errors name the module by `place`."""

    def __init__(self, module: torch.nn.Module, place: str) -> None:
        """Notes the module's weights and buffers as they are at the time of `port`."""
        self.module = module
        self.place = place
        self._owned = {
            (id(part), name): (tensor, tensor._version)
            for part in module.modules()
            for name, tensor in (*part._parameters.items(), *part._buffers.items())
            if tensor is not None
        }
        self._keys = {
            f"{prefix}.{name}".lstrip("."): (id(part), name)
            for prefix, part in module.named_modules()
            for name in (*part._parameters, *part._buffers)
        }
        self.kept: set[tuple[Opaque, Part]] = set()  # module and attribute to which a call has bound an output
        self.made = WeakIdKeyDictionary()  # outputs that calls have left in objects: inputs of later calls
        self.lent: dict[str, tuple[torch.nn.Parameter, int]] = {}  # weights that calls return, and counts of writes
        self.weights: dict[int, str] = {}  # the names of weights, lent ones and buffers, by their ids
        self._numbers: dict[Any, int] = {}
        self._submodules: frozenset[int] = frozenset()

    def program_number(self, snapshot: Snapshot) -> int:
        """Returns the number of the program for a call with this snapshot; a new `Snapshot.key` gets a new number."""
        return self._numbers.setdefault(snapshot.key(self._submodules), len(self._numbers))

    def snapshot_before(self, arguments: Mapping[str, Any], unnamed: Sequence[str]) -> Snapshot:
        """Returns a snapshot of the objects and tensors that a call can reach, taken before the call. Raises a
        BadValueError for a weight or buffer that was changed since `port`. The parameters `unnamed` are the `**kwargs`:
        a tensor in it is named `mask`, not `kwargs.mask`.
        """
        submodules = [*self.module.modules()]
        self.weights = {id(tensor): name for name, (tensor, _) in self.lent.items()}
        for prefix, part in self.module.named_modules():
            for name, tensor in (*part._parameters.items(), *part._buffers.items()):
                known, path = self._owned.get((id(part), name)), f"{prefix}.{name}".lstrip(".")
                if known is not None and (known[0] is not tensor or known[1] != tensor._version):
                    self.refuse(path)
                # A module that is set after port, or under another name.
                is_new = known is None and isinstance(tensor, torch.nn.Parameter)
                if is_new or self._keys.get(path, (id(part), name)) != (id(part), name):
                    self.refuse(path)
                if known is not None:
                    self.weights.setdefault(id(tensor), path)
        for name, (tensor, version) in self.lent.items():
            if tensor._version != version:
                self.refuse(name)
        self._submodules = frozenset(map(id, submodules))
        survey = _Survey(self, Snapshot(nodes=[*map(Node, submodules)]), traced=None)
        names = [() if name in unnamed else (name,) for name in arguments]
        try:
            root = [survey.term(value, path) for path, value in zip(names, arguments.values(), strict=True)]
            return survey.finish(tuple(zip(arguments, root, strict=True)))
        except RecursionError as error:
            fact = "What a call reaches has tuples in tuples, deeper than Python can follow"
            raise BadValueError(self.place, fact, "Keep a flat list, or an object for each level") from error

    def outside(self, snapshot: Snapshot) -> dict[Any, Any]:
        """Returns marks of what a forward may read where a snapshot does not look: data attributes of the submodules'
        classes, and tensors that are globals of the files of classes and functions. Large lists and dicts do not count.
        """
        code: set[Any] = {cls for kind in {*map(type, self.module.modules())} for cls in kind.__mro__}
        code |= {node.thing for node in snapshot.nodes if isinstance(node.thing, types.FunctionType)}
        code = {thing for thing in code if not graph.is_of_library(thing.__module__)}
        files = {thing.__module__ for thing in code} & sys.modules.keys()
        marks: dict[Any, Any] = {}
        for holder in (*(x for x in code if isinstance(x, type)), *map(sys.modules.__getitem__, files)):
            for name, value in [*vars(holder).items()]:
                values: dict[Any, Any] = {"": value}  # the items of a list or a dict, else the value itself
                if isinstance(value, list | dict) and len(value) <= graph.LONG:
                    values = value if isinstance(value, dict) else dict(enumerate(value))
                for key, each in values.items():
                    if isinstance(each, torch.Tensor) and not engine.is_traced(each):
                        marks[Opaque(holder), name, Opaque(key)] = _mark(each)
                    elif each is value and isinstance(holder, type) and (term := graph.constant(value)) is not None:
                        marks[Opaque(holder), name, ""] = term
        return marks

    def check_attributes(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Returns the attributes that upstream or the user has set on a tensor; refuses values other than constants."""
        attributes = engine.attributes(tensor)
        for name, value in attributes.items():
            if graph.constant(value) is None:
                fact = f"The attribute '{name}' of a tensor is of the type {type(value).__name__}, and no constant"
                raise BadValueError(self.place, fact, _BESIDE)
        return attributes

    def refuse(self, name: str) -> None:
        """Raises a BadValueError for a new value of a weight, a buffer or a submodule: the devices have the old one."""
        remedy = "Set it before port, or port the module anew"
        raise BadValueError(self.place, f"'{name}' is on the devices", remedy, name=name)

    def write_buffer(self, name: str, value: torch.Tensor, is_new: bool) -> torch.Tensor:
        """Sets a buffer to a value from the devices: binds it if `is_new`, else writes in place; returns the buffer."""
        prefix, _, attribute = name.rpartition(".")
        owner = self.module.get_submodule(prefix)
        buffer = owner._buffers[attribute]
        assert buffer is not None
        if is_new:
            buffer = owner._buffers[attribute] = value
        else:
            _write(buffer, value)
        self._owned[id(owner), attribute] = buffer, buffer._version
        return buffer

    def add_input(self, tensor: torch.Tensor | None, before: Snapshot) -> bool:
        """Makes the tables that lie in a tensor's memory inputs of later calls; returns whether there are such tables.

        Their values were in the program until then. Tables of the same form in the same list, or under the same name in
        an object of the same type, become inputs, too, such as the caches of layers: else each would cost a new trace.
        """
        memory = tensor.untyped_storage().data_ptr() if tensor is not None else None
        numbers = {
            number
            for number, table in enumerate(before.tables)
            if table.layout == torch.strided and table.untyped_storage().data_ptr() == memory
        }
        kinds: dict[int, set[Any]] = {number: set() for number in range(len(before.tables))}  # place and form
        for node in before.nodes:
            for part, term in node.terms.items():
                for reference in graph.references(term, "table"):
                    form = _form(before.tables[reference.number])
                    kinds[reference.number] |= {(id(node.thing), form), ((type(node.thing), part), form)}
        kinds_of_inputs = set().union(*(kinds[number] for number in numbers))
        for number, table in enumerate(before.tables):
            if number in numbers or kinds[number] & kinds_of_inputs:
                self.made[table] = True
        return bool(numbers)

    def snapshot_after(self, before: Snapshot, traced: Mapping[int, Reference], returned: Any) -> Snapshot:
        """Returns the snapshot after a traced call, with the nodes and tables of `before` under their numbers. `traced`
        has references to traced inputs, weights and buffers, by the tensors' ids.
        """
        nodes = [Node(node.thing) for node in before.nodes]
        survey = _Survey(self, Snapshot(nodes=nodes, tables=[*before.tables]), traced)
        return survey.finish(survey.term(returned, path=None))

    @contextlib.contextmanager
    def traced_inputs_in_place(
        self, before: Snapshot, traced: Sequence[Any], weights: Mapping[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Replaces inputs and weights by traced tensors in all nodes, yields the arguments with them, and restores
        nodes, submodules and tables at the end. Traced weights get the attributes of the weights on the host.
        """
        for part in self.module.modules():
            for name, tensor in (*part._parameters.items(), *part._buffers.items()):
                if (owned := self._owned.get((id(part), name))) is not None and engine.is_traced(tensor):
                    vars(tensor).update(vars(owned[0]))
        things = [node.thing for node in before.nodes]
        values = {"thing": things, "input": traced, "table": before.tables, "weight": weights}
        tables = [(t, t.clone()) for t in before.tables if _is_small(t) and not is_read_only(t)]
        submodules = [(part, dict(part._modules)) for part in self.module.modules()]
        try:
            for node in before.nodes:
                terms = node.terms.items()
                new = {p: value_of(t, values) for p, t in terms if graph.references(t, "input", "weight")}
                if new:
                    self.fill(node.thing, node.parts | new)
            yield {name: value_of(term, values) for name, term in before.root}
        finally:
            for node in before.nodes:
                left = self.parts(node.thing)
                if [*left] != [*node.parts] or any(left[part] is not value for part, value in node.parts.items()):
                    self.fill(node.thing, node.parts)
            for part, old in submodules:
                part._modules.clear()
                part._modules.update(old)
            for table, value in tables:
                _write(table, value)

    def effects(self, before: Snapshot, after: Snapshot, traced: Sequence[Any]) -> Effects:
        """Returns the effects of a traced call, by the snapshots before and after it; refuses exchanged submodules."""
        # Nodes, tables and outputs keep their numbers: those with higher numbers are new.
        changed = {}
        for number, (old, new) in enumerate(zip(before.nodes, after.nodes, strict=False)):
            if [*old.terms.items()] == [*new.terms.items()]:  # also in this order
                continue
            changed[number] = new.terms
            if old.terms.get(_SUBMODULES) != new.terms.get(_SUBMODULES):
                fact = f"A call exchanges submodules of a '{type(old.thing).__name__}'"
                raise BadValueError(self.place, fact, "Have them all from the start, and choose by a flag")
        created = [(graph.blank(node.thing), node.terms) for node in after.nodes[len(before.nodes) :]]
        written = [n for n in {*before.firsts} if n not in before.views and engine.was_written(traced[n])]
        tables, parts = _new_tables(before, after)

        # The weights that the new terms refer to. A term that the call has left alone needs none.
        terms_of_new = [after.root, *(term for _, terms in created for term in terms.values())]
        for number, terms in changed.items():
            old_terms = before.nodes[number].terms
            terms_of_new += [term for part, term in terms.items() if old_terms.get(part) != term]
        references = (reference for term in terms_of_new for reference in graph.references(term, "weight"))
        return Effects(
            returned=after.root,
            changed=changed,
            created=created,
            written=written,
            tables=tables,
            weights=frozenset(str(reference.number) for reference in references),
            outputs=len(after.outputs),
            parts=parts,
            attributes=self._new_attributes(before, after, traced),
        )

    def _new_attributes(
        self, before: Snapshot, after: Snapshot, traced: Sequence[Any]
    ) -> dict[tuple[str, int], dict[str, Any]]:
        """Returns the attributes that a call has set on inputs and outputs, by kind and number: `("input", 0)`."""
        found = {}
        for number, tensor in enumerate(before.inputs.values()):
            attributes = self.check_attributes(traced[number])
            if attributes != vars(tensor):
                found["input", number] = attributes
        for number, tensor in enumerate(after.outputs):
            attributes = self.check_attributes(tensor)
            if attributes:
                found["output", number] = attributes
        return found

    def apply(self, effects: Effects, before: Snapshot, outputs: Sequence[Any], weights: Mapping[str, Any]) -> Any:
        """Makes the changes of a call's effects in the nodes of `before`, and returns the call's return value. No
        output in `outputs` is a view; `weights` has dicts by name for terms of the kinds `weight` and `new`.
        """
        things = [*(node.thing for node in before.nodes), *(make() for make, _ in effects.created)]
        tables = dict(enumerate(before.tables))
        tables.update({n: value.clone() for n, value in effects.tables.items() if n not in tables})
        for number, (base, (size, strides, offset)) in effects.parts.items():
            whole = tables[base]
            tables[number] = whole.as_strided(size, strides, whole.storage_offset() + offset)
        inputs = [*before.inputs.values()]
        computed = iter(outputs)
        outputs = [None if number in effects.views else next(computed) for number in range(effects.outputs)]
        for number, (kind, base, section) in effects.views.items():
            outputs[number] = section.within({"input": inputs, "output": outputs, **weights}[kind][base])
        sorted_tables = [tables[number] for number in sorted(tables)]
        values = {**weights, "thing": things, "input": inputs, "output": outputs, "table": sorted_tables}
        for (kind, number), attributes in effects.attributes.items():
            vars(values[kind][number]).clear()
            vars(values[kind][number]).update(attributes)
        for thing, (_, terms) in zip(things[len(before.nodes) :], effects.created, strict=True):
            self.fill(thing, {part: value_of(term, values) for part, term in terms.items()})
            self._note(thing, terms, values)
        for number, terms in effects.changed.items():
            node = before.nodes[number]
            old = node.terms
            parts = node.parts
            self.fill(node.thing, {p: parts[p] if old.get(p) == t else value_of(t, values) for p, t in terms.items()})
            self._note(node.thing, terms, values)
        for number, value in effects.tables.items():
            if number < len(before.tables) and _is_small(value):  # the trace itself has written to a large one
                _write(before.tables[number], value)
        return value_of(effects.returned, values)

    def _note(self, thing: Any, terms: Mapping[Part, Any], values: Mapping[str, Any]) -> None:
        """Notes the tensors in an object that a call has computed or was given: later calls take them as inputs."""
        for part, term in terms.items():
            tensors = [value_of(reference, values) for reference in graph.references(term, "output", "input")]
            self.made.update((tensor, True) for tensor in tensors)
            if tensors and isinstance(thing, torch.nn.Module):
                self.kept.add((Opaque(thing), part))

    def parts(self, thing: Any) -> dict[Part, Any]:
        """Returns an object's parts as `graph.parts`. Of a submodule these are attributes, `training`, slots, buffers
        added since `port`, submodules and hooks, but no weights.
        """
        if not self._is_submodule(thing):
            return graph.parts(thing)
        result: dict[Part, Any] = {
            ("attribute", name): value for name, value in vars(thing).items() if name not in graph.INTERNAL
        }
        result["attribute", "training"] = thing.training
        result.update(graph.slots(thing))
        result.update({("buffer", n): b for n, b in thing._buffers.items() if (id(thing), n) not in self._owned})
        hooks = tuple(
            hook
            for hook in (*thing._forward_pre_hooks.values(), *thing._forward_hooks.values())
            if not str(getattr(hook, "__module__", "")).startswith("torchport.")  # a trace has some of its own
        )
        if thing._modules:
            result[_SUBMODULES] = (*thing._modules.values(),)
        if hooks:
            result[_HOOKS] = hooks
        return result

    def fill(self, thing: Any, new: Mapping[Part, Any]) -> None:
        """Replaces an object's parts by `new`, in place, and deletes parts that `new` lacks. Of a submodule only slots,
        attributes and buffers are changed.
        """
        if not self._is_submodule(thing):
            graph.fill(thing, new)
            return
        attributes = vars(thing)
        buffers = thing._buffers
        graph.fill_slots(thing, new)
        for kind, name in self.parts(thing):
            if (kind, name) not in new and kind == "attribute":
                del attributes[name]
            elif (kind, name) not in new and kind == "buffer":
                del buffers[name]
        attributes.update({name: value for (kind, name), value in new.items() if kind == "attribute"})
        buffers.update({name: value for (kind, name), value in new.items() if kind == "buffer"})

    def _is_submodule(self, thing: Any) -> bool:
        """Returns whether an object is a submodule of the ported module, whose weights are on the devices."""
        return isinstance(thing, torch.nn.Module) and id(thing) in self._submodules


class _Survey:
    """Walks once through all mutable objects that a call can reach, and fills a snapshot with them.

    Args:
        snapshot: The snapshot to fill. The nodes in it at first, the submodules, are read last, so that a tensor which
            an argument has, too, becomes an input.
        traced: The references to traced inputs, by the tensors' ids; None: nothing is traced yet.
    """

    def __init__(self, state: State, snapshot: Snapshot, traced: Mapping[int, Reference] | None) -> None:
        self.state = state
        self.snapshot = snapshot
        self.traced = traced
        self.numbers = {id(node.thing): number for number, node in enumerate(snapshot.nodes)}
        self.tensors = {id(t): Reference("table", n) for n, t in enumerate(snapshot.tables)}
        self.tensors.update(traced or {})
        self.first_nodes = [*snapshot.nodes]
        self.waiting: collections.deque[Node] = collections.deque()  # whose parts are not read yet

    def finish(self, root: Any) -> Snapshot:
        """Reads the waiting nodes, then the first nodes, and all they lead to; returns the snapshot with this root."""
        snapshot = self.snapshot
        while self.waiting or self.first_nodes:
            if not self.waiting:
                self.waiting.extend(self.first_nodes)
                self.first_nodes = []
            node = self.waiting.popleft()
            node.parts = self.state.parts(node.thing)
            node.terms = {
                part: graph.constant(value) or self.term(value, _longer(node.path, part), node.thing, part)
                for part, value in node.parts.items()
            }
        snapshot.root, snapshot.marks = root, tuple(map(_mark, snapshot.tables))
        snapshot.views = _views([*snapshot.inputs.values()])
        return snapshot

    def term(self, value: Any, path: tuple[str, ...] | None, thing: Any = None, part: Part = ("", "")) -> Any:
        """Returns the term for a value, and adds new nodes and tensors to the snapshot: the term is a constant, a
        reference, or a container of terms. Refuses arguments of other types.

        Args:
            path: The names that lead to the value from an argument; None: no argument leads to it.
            thing: The node that has the value as its `part`; None for an argument or a return value.
        """
        if id(value) in self.numbers:
            return Reference("thing", self.numbers[id(value)])
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path, thing, part)
        if (term := graph.constant(value)) is not None:
            return term
        if (inner := graph.values_in(value)) is not None:
            names = getattr(value, "_fields", range(len(inner)))
            is_container = isinstance(value, tuple | frozenset)
            paths = [(*path, str(name)) if is_container and path is not None else None for name in names]
            terms = (self.term(each, longer, thing, part) for each, longer in zip(inner, paths, strict=True))
            attributes = vars(value).items() if isinstance(value, tuple) and hasattr(value, "__dict__") else ()
            return Whole(type(value), tuple(terms), tuple((n, self.term(v, path, thing, part)) for n, v in attributes))
        is_code = isinstance(value, types.FunctionType | torch.nn.Module)
        if graph.is_node(value, is_long=path is not None) and not (is_code and self.traced is not None):
            node = Node(value, None if is_code else path)
            number = self.numbers[id(value)] = len(self.snapshot.nodes)
            self.snapshot.nodes.append(node)
            self.waiting.append(node)  # its parts are read later, by `finish`
            return Reference("thing", number)
        is_known = graph.is_hashable(value) and not isinstance(value, Iterator)
        if path is not None and not is_known:
            name = ".".join(path)
            fact = f"'{name}' is of the type {type(value).__name__}, and becomes no constant of a program"
            remedy = "Pass tensors, in tuples, lists, dicts and objects, and constants"
            raise BadValueError(self.state.place, fact, remedy, name=name)
        if isinstance(value, Iterator) and type(value).__module__ in graph.ITERATORS:
            fact = f"{f'{part[1]!r} of a {type(thing).__name__}' if thing is not None else 'What it returns'} is a "
            fact += f"{type(value).__name__}, of which a program would take the same item in each call"
            raise BadValueError(self.state.place, fact, "Keep a list and a number")
        return Opaque(value)

    def _tensor(self, tensor: torch.Tensor, path: tuple[str, ...] | None, thing: Any, part: Part) -> Any:
        """Returns the reference to a tensor, after adding a new tensor to the snapshot's inputs, outputs or tables."""
        snapshot = self.snapshot
        if self.traced is None and id(tensor) in self.state.weights:
            return Reference("weight", self.state.weights[id(tensor)])
        if self.traced is not None:
            given, tensor = tensor, tensor if id(tensor) in self.tensors else engine.on_host(tensor)
            for attribute in engine.attributes(given) if given is not tensor else ():
                fact = f"The attribute '{attribute}' is of a tensor that depends on no input"
                raise BadValueError(self.state.place, fact, _BESIDE)
            if engine.is_traced(tensor) and id(tensor) not in self.tensors:
                self.tensors[id(tensor)] = Reference("output", len(snapshot.outputs))
                snapshot.outputs.append(tensor)
        elif path is not None:
            return self._argument(tensor, ".".join(path))
        elif id(tensor) not in self.tensors and (tensor in self.state.made or (Opaque(thing), part) in self.state.kept):
            # It depends on the inputs of an earlier call.
            return self._argument(tensor, f"{OF_MODULE}{len(snapshot.inputs)}")
        if id(tensor) not in self.tensors:
            self.tensors[id(tensor)] = Reference("table", len(snapshot.tables))
            snapshot.tables.append(tensor)
        return self.tensors[id(tensor)]

    def _argument(self, tensor: torch.Tensor, name: str) -> Reference:
        """Adds a tensor to the inputs by a new name and returns its reference; refuses sparse ones and subclasses."""
        snapshot = self.snapshot
        if tensor.layout != torch.strided:
            fact = f"'{name}' has the layout {tensor.layout}"
            raise BadValueError(self.state.place, fact, "Pass it as to_dense()", name=name)
        check_class(self.state.place, name, tensor)
        self.state.check_attributes(tensor)
        while snapshot.inputs.get(name, tensor) is not tensor:
            name += "'"
        if name not in snapshot.inputs:
            number = len(snapshot.inputs)
            snapshot.inputs[name] = tensor
            first = self.tensors.setdefault(id(tensor), Reference("input", number))
            snapshot.firsts.append(first.number)
        return Reference("input", snapshot.firsts[[*snapshot.inputs].index(name)])


_SUBMODULES = ("submodules", "")
_HOOKS = ("hooks", "")
"""Parts of a submodule. A hook that a call registers stays, as those of transformers that gather hidden states do."""


def _longer(path: tuple[str, ...] | None, part: Part) -> tuple[str, ...] | None:
    """Returns a path with a part's name at its end; None without a path, or for a part without a name."""
    kind, name = part
    if path is None or kind not in _NAMES:
        return None
    return (*path, name.rpartition(".")[2] if kind == "slot" else str(name) or kind)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns shape, dtype and strides of a tensor; None in place of the strides if it is contiguous or sparse."""
    is_plain = tensor.layout != torch.strided or tensor.is_contiguous()
    return tensor.shape, tensor.dtype, None if is_plain else tensor.stride()


def _new_tables(before: Snapshot, after: Snapshot) -> tuple[dict[int, torch.Tensor], dict[int, Any]]:
    """Returns copies of the tables that a call has written to or made, by number, and the new tables that are parts of
    another: its number, and size, strides and offset in it. New tables that share memory become parts of one more
    table, which has all of that memory.
    """
    count = len(before.tables)
    marks = dict(enumerate(before.marks))
    new = {n: table for n, table in enumerate(after.tables) if marks.get(n) != after.marks[n]}
    parts: dict[int, tuple[int, tuple[Any, ...]]] = {}
    if len(after.tables) == count:
        return {n: table.clone() for n, table in new.items()}, parts
    groups: dict[Any, list[int]] = {}
    by_number = {**dict(enumerate(before.tables)), **new}
    plain = {n: t for n, t in by_number.items() if t.layout == torch.strided and not (t.is_conj() or t.is_neg())}
    for number, tensor in plain.items():
        groups.setdefault((tensor.untyped_storage().data_ptr(), tensor.dtype), []).append(number)
    last = max([count, *new])
    for numbers in groups.values():
        made = [number for number in numbers if number >= count]
        bases = [n for n in numbers if n < count and all(engine.lies_in(plain[each], plain[n]) for each in made)]
        if not made or (not bases and len(made) < 2):
            continue
        if not bases:
            last += 1
            first = plain[made[0]]
            plain[last] = new[last] = torch.empty(0, dtype=first.dtype).set_(first.untyped_storage())
            bases = [last]
        for number in made:
            tensor = new.pop(number)
            offset = tensor.storage_offset() - plain[bases[0]].storage_offset()
            parts[number] = bases[0], (tensor.shape, tensor.stride(), offset)
    return {n: table.clone() for n, table in new.items()}, parts


def _addresses(tensor: torch.Tensor) -> tuple[int, int]:
    memory, (start, end) = tensor.untyped_storage().data_ptr(), engine.extent(tensor)
    return memory + start, memory + end


def _views(inputs: Sequence[torch.Tensor]) -> dict[int, tuple[int, tuple[Any, ...]]]:
    """Returns, for each input inside another input, the other's number, and its size, strides and offset there."""
    views = {}
    by_memory: dict[Any, list[int]] = {}
    for number, tensor in enumerate(inputs):
        by_memory.setdefault((tensor.untyped_storage().data_ptr(), tensor.dtype), []).append(number)
    for numbers in by_memory.values():
        base = max(numbers, key=lambda number: inputs[number].numel())
        whole = inputs[base]
        for tensor, number in ((inputs[n], n) for n in numbers if inputs[n] is not whole and whole.is_contiguous()):
            if tensor.numel() and engine.lies_in(tensor, whole) and not is_read_only(tensor):
                start = tensor.storage_offset() - whole.storage_offset()
                views[number] = base, (tensor.shape, tensor.stride(), start)
    return views


def check_class(place: str, name: str, value: Any) -> None:
    """Refuses a tensor of a subclass, whose operators may be others than PyTorch's."""
    if isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        fact = f"'{name}' is of the class {type(value).__name__}, whose operators no program calls"
        raise BadValueError(place, fact, "Pass it as as_subclass(torch.Tensor)", name=name)


def is_read_only(tensor: torch.Tensor) -> bool:
    """Returns whether PyTorch refuses to write to a tensor in place: it is expanded, or an inference tensor."""
    return tensor.is_inference() or (tensor.layout == torch.strided and 0 in tensor.stride())


def _is_small(tensor: torch.Tensor) -> bool:
    """Returns whether a host tensor is known by its values: plain, on the CPU, and of `SMALL` bytes at most."""
    if tensor.is_conj() or tensor.is_neg() or tensor.is_nested:
        return False
    is_plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    return is_plain and tensor.nbytes <= SMALL


def _mark(tensor: torch.Tensor) -> Any:
    """Returns a mark of a host tensor's values, which changes with them: the values of a small tensor; of others the
    tensor itself, PyTorch's count of writes to it, and its address.
    """
    if engine.is_traced(tensor):
        return Opaque(tensor)
    if _is_small(tensor):
        values = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return tensor.shape, tensor.dtype, tensor.stride(), values
    where = tensor.data_ptr() if tensor.layout == torch.strided else 0
    return Opaque(tensor), 0 if tensor.is_inference() else tensor._version, where  # an inference tensor has no count


def _write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(value)
