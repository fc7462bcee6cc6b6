"""What an entry leads to: calls, constructors, imports, properties and functions that are handed on.

A method of an object whose class the source does not show is looked up in all classes that are made on the way, and a
network that is made is also called. Conditions that constants of the source decide close a way.
"""

from __future__ import annotations

import ast
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torchport.porting.scan.codebase import Class, Codebase, CodeUnit
from torchport.porting.scan.syntax import MODULE, NEVER, Act, Event, chain_of

Arguments = dict[str, Any]
_DUNDERS = ("__call__", "__enter__", "__exit__", "__getitem__", "__iter__", "__len__", "__next__")
_NETWORK = ("forward", "encode", "decode", "__call__")


class _Unknown:
    """A value that the source does not show."""


_UNKNOWN: Any = _Unknown()
_NOT_NONE: Any = _Unknown()
"""Some value, and not None."""
_ALONE = {
    "torch.distributed.is_initialized", "torch.distributed.is_available", "torch.is_grad_enabled",
    "torch.compiler.is_compiling", "torch.jit.is_scripting", "torch.jit.is_tracing",
}  # fmt: skip
"""What is False in an inference of one process that nobody scripts."""


@dataclasses.dataclass(frozen=True)
class Closed:
    """What patches close."""

    #: Functions whose own code no longer runs.
    units: frozenset[CodeUnit] = frozenset()
    #: Lines of a function that no longer run, first and last.
    lines: Mapping[CodeUnit, tuple[tuple[int, int], ...]] = dataclasses.field(default_factory=dict)
    #: Parameters of networks' `forward` that are always given, and then are not None.
    given: frozenset[str] = frozenset()

    def has(self, unit: CodeUnit, line: int) -> bool:
        """Returns whether a line of a function no longer runs."""
        return unit in self.units or any(first <= line <= last for first, last in self.lines.get(unit, ()))


class Reached:
    """What some functions lead to."""

    def __init__(self, codebase: Codebase, closed: Closed | None = None, trains: bool = False) -> None:
        self._codebase = codebase
        self._closed = closed or Closed()
        self._trains = trains
        self._arguments: dict[CodeUnit, Arguments] = {}
        self._attributes = _attribute_constants(codebase, self._closed.units)
        self._live: dict[Class, None] = {}
        self._live_methods: dict[str, dict[CodeUnit, None]] = defaultdict(dict)
        self._asked: dict[str, dict[int, tuple[CodeUnit, ast.Call | None]]] = defaultdict(dict)
        self._properties = {unit.name.rpartition(".")[2] for unit in codebase.units if unit.has_decorator("property")}
        self._pending: list[CodeUnit] = []
        self.callers: dict[CodeUnit, set[tuple[CodeUnit, int]]] = defaultdict(set)

    @property
    def units(self) -> Iterable[CodeUnit]:
        """The functions that are reached."""
        return self._arguments.keys()

    def start(self, units: Iterable[CodeUnit], classes: Iterable[Class] = ()) -> None:
        """Follows functions and constructors that are called with any arguments."""
        for unit in units:
            self._import(unit.module.name)
            self._reach(unit, None, None)
        for kind in classes:
            self._import(kind.module.name)
            self._make(kind, None, None)
        while self._pending:
            self._process(self._pending.pop())

    def admit(self, units: Iterable[CodeUnit]) -> None:
        """Notes that functions may be called with any arguments, and follows nothing that they call."""
        for unit in units:
            if unit not in self._closed.units:
                self._arguments[unit] = {parameter.arg: _UNKNOWN for parameter in unit.parameters}

    def leads_to(self, unit: CodeUnit, guards: Iterable[tuple[ast.expr, bool]], line: int, if_none: str = "") -> bool:
        """Returns whether a place of a function is reached."""
        if unit not in self._arguments or self._closed.has(unit, line):
            return False
        values = self._values(unit)
        if if_none and values.names.get(if_none, _UNKNOWN) is not None:
            return False
        return _is_open(values, guards)

    def _values(self, unit: CodeUnit) -> _Values:
        assigned = _assigned(unit)
        names = {name: value for name, value in self._arguments.get(unit, {}).items() if name not in assigned}
        if unit.name.endswith(".forward"):
            names |= {
                name: _NOT_NONE for name in self._closed.given if name in unit.defaults and not _may_be_none(unit, name)
            }
        return _Values(names, self._attributes, lambda node: self._full(unit, node), unit.first, self._trains)

    def _full(self, unit: CodeUnit, node: ast.AST) -> str:
        name = self._codebase.full(unit.module, chain_of(node), unit.imports)
        return self._codebase.canonical(name) if name else ""

    def _import(self, name: str) -> None:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            module = self._codebase.modules.get(".".join(parts[:end]))
            if module is not None and module.units[MODULE] not in self._arguments:
                self._reach(module.units[MODULE], None, None)
                for unit in module.units.values():
                    if isinstance(unit.body.node, ast.ClassDef):
                        self._reach(unit, None, None)

    def _reach(self, unit: CodeUnit, caller: CodeUnit | None, call: ast.Call | None, bound: bool = True) -> None:
        """Notes that a function is called, and with which constants; without a call with anything."""
        if caller is not None:
            self.callers[unit].add((caller, call.lineno if call is not None else 0))
        if unit in self._closed.units:
            return
        given = {parameter.arg: _UNKNOWN for parameter in unit.parameters}
        if call is not None and caller is not None:
            given = _given(unit, call, self._values(caller), bound)
        known = self._arguments.get(unit)
        if known is None:
            self._arguments[unit] = given
            self._pending.append(unit)
            return
        joined = {name: value if _same(value, given.get(name, _UNKNOWN)) else _UNKNOWN for name, value in known.items()}
        if any(joined[name] is not known[name] for name in known):
            self._arguments[unit] = joined
            self._pending.append(unit)

    def _make(self, kind: Class, caller: CodeUnit | None, call: ast.Call | None) -> None:
        """Notes that an object of a class is made."""
        for name in ("__init__", "__post_init__", "__new__"):
            unit = self._codebase.method(kind, name)
            if unit is not None:
                self._reach(unit, caller, call)
        if kind in self._live:
            return
        self._live[kind] = None
        names = (*_DUNDERS, "forward") if self._codebase.is_network(kind) else _DUNDERS
        for name in names:
            unit = self._codebase.method(kind, name)
            if unit is not None:
                self._reach(unit, caller, None)
        for name, unit in self._codebase.methods(kind).items():
            if unit not in self._live_methods[name]:
                self._live_methods[name][unit] = None
                for asker, call_of_it in list(self._asked[name].values()) if name in self._asked else ():
                    self._reach(unit, asker, call_of_it)

    def _ask(self, name: str, unit: CodeUnit, call: ast.Call | None) -> None:
        """Notes that a method of some object is called."""
        self._asked[name][id(call if call is not None else unit)] = unit, call
        for method in list(self._live_methods.get(name, ())):
            self._reach(method, unit, call)

    def _process(self, unit: CodeUnit) -> None:
        values, skipped = self._values(unit), _only_asked_about(unit)
        skipped |= unit.module.in_tables if unit.name == MODULE else frozenset()
        for event in unit.body.events:
            if event.act not in (Act.CALL, Act.CHAIN, Act.IMPORT) or id(event.node) in skipped:
                continue
            line = getattr(event.node, "lineno", 0)
            if self._closed.has(unit, line) or not _is_open(values, event.guards):
                continue
            if event.act is Act.IMPORT:
                self._imports(unit, event)
            elif isinstance(event.node, ast.Call):
                self._call(unit, event.node)
            else:
                self._value(unit, event.node)

    def _imports(self, unit: CodeUnit, event: Event) -> None:
        if isinstance(event.node, ast.Import):
            for alias in event.node.names:
                self._import(alias.name)
        elif isinstance(event.node, ast.ImportFrom):
            for alias in event.node.names:
                bound = unit.module.bound if unit.name == MODULE else unit.imports
                self._import(bound.get(alias.asname or alias.name, ""))
            for star in unit.module.stars:
                self._import(star)

    def _call(self, unit: CodeUnit, node: ast.Call) -> None:
        chain = chain_of(node.func)
        for name in chain[1:-1]:
            if name in self._properties:
                self._ask(name, unit, None)
        if not chain:
            self._call_of_expression(unit, node)
        elif chain[0] == unit.first and unit.owner is not None:
            self._call_of_self(unit, unit.owner, chain, node)
        else:
            name = self._full(unit, node.func)
            self._read_table(unit, f"{unit.module.name}.{chain[0]}")
            known = bool(name) and self._call_of_name(unit, name, node)
            if not known and len(chain) > 1 and not name.startswith(("torch.", "numpy.")):
                self._ask(chain[-1], unit, node)

    def _call_of_name(self, unit: CodeUnit, name: str, node: ast.Call) -> bool:
        known = self._codebase.definition(name)
        if isinstance(known, Class):
            self._make(known, unit, node)
            return True
        if isinstance(known, CodeUnit):
            bound = known.owner is None or known.has_decorator("classmethod") or known.has_decorator("staticmethod")
            self._reach(known, unit, node, bound)
            return True
        above, _, last = name.rpartition(".")
        kind = self._codebase.definition(above) if above else None
        if isinstance(kind, Class):
            forward = self._codebase.method(kind, "forward") if last == "apply" else None
            if forward is not None:
                self._reach(forward, unit, None)
            else:
                self._make(kind, unit, None)
            return True
        return False

    def _call_of_self(self, unit: CodeUnit, owner: Class, chain: tuple[str, ...], node: ast.Call) -> None:
        if len(chain) == 1:  # `cls(...)`
            self._make(owner, unit, node)
        elif len(chain) > 2:
            self._ask(chain[-1], unit, node)
        else:
            self._method_of(unit, owner, chain[1], node)

    def _method_of(self, unit: CodeUnit, owner: Class, name: str, node: ast.Call | None) -> None:
        method = self._codebase.method(owner, name)
        if method is not None:
            self._reach(method, unit, node)
            for other in list(self._live_methods.get(name, ())):
                if other is not method and other.owner is not None and owner in self._codebase.lineage(other.owner):
                    self._reach(other, unit, node)

    def _call_of_expression(self, unit: CodeUnit, node: ast.Call) -> None:
        func = node.func
        if not isinstance(func, ast.Attribute):
            return
        above = func.value.func if isinstance(func.value, ast.Call) else None
        if isinstance(above, ast.Name) and above.id == "super" and unit.owner is not None:
            method = self._codebase.method(unit.owner, func.attr, inherited=True)
            if method is not None:
                self._reach(method, unit, node)
            return
        self._ask(func.attr, unit, node)

    def _value(self, unit: CodeUnit, node: ast.AST) -> None:
        """Follows a function or class that is named and not called: somebody may call it."""
        chain = chain_of(node)
        if chain and chain[0] == unit.first and unit.owner is not None:
            if len(chain) > 1:
                self._method_of(unit, unit.owner, chain[1], None)
        elif chain:
            known = self._codebase.definition(name) if (name := self._full(unit, node)) else None
            self._hand_on(unit, known)
            self._read_table(unit, name or f"{unit.module.name}.{chain[0]}")
        for name in chain[1:] if chain else ([node.attr] if isinstance(node, ast.Attribute) else []):
            if name in self._properties:
                self._ask(name, unit, None)

    def _hand_on(self, unit: CodeUnit, known: CodeUnit | Class | None) -> None:
        if isinstance(known, Class):
            self._make(known, unit, None)
        elif isinstance(known, CodeUnit):
            self._reach(known, unit, None)

    def _read_table(self, unit: CodeUnit, name: str) -> None:
        """Follows what stands in a table of functions or classes that is read."""
        home, nodes = self._codebase.table(name) or (unit.module, [])
        for node in nodes:
            inner = self._codebase.full(home, chain_of(node), {})
            self._hand_on(unit, self._codebase.definition(self._codebase.canonical(inner)) if inner else None)


@dataclasses.dataclass(frozen=True)
class _Values:
    """What is known in one function: what has one value only, that of a constant in the source.

    A parameter has one if every call that the entry leads to gives it the same. An attribute has one if the whole
    codebase assigns it no other.
    """

    names: Mapping[str, Any]  #: Parameters that are never assigned, with their values.
    attributes: Mapping[str, Any]  #: Attributes of `self`, by name.
    full: Callable[[ast.AST], str]  #: Who is meant by a chain of names.
    first: str = ""  #: The name of `self`.
    trains: bool = False  #: Whether the code is read as training.

    def value(self, node: ast.AST) -> Any:
        """Returns an expression's value, or _UNKNOWN."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self._of_name(node)
        if isinstance(node, ast.Attribute):
            return self._of_attribute(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            value = self.truth(node.operand)
            return _UNKNOWN if value is None else not value
        if isinstance(node, ast.BoolOp):
            value = self._of_bools(node)
            return _UNKNOWN if value is None else value
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return _compared(node.ops[0], self.value(node.left), self.value(node.comparators[0]))
        if isinstance(node, ast.Call) and self.full(node.func) in _ALONE:
            return False
        return _UNKNOWN

    def truth(self, node: ast.AST) -> bool | None:
        """Returns whether a condition holds; None if the source does not show it."""
        value = self.value(node)
        return None if value is _UNKNOWN or value is _NOT_NONE else bool(value)

    def _of_name(self, node: ast.Name) -> Any:
        if node.id == "TYPE_CHECKING":
            return False
        if node.id == "__name__":
            return "imported"
        return self.names.get(node.id, _UNKNOWN)

    def _of_attribute(self, node: ast.Attribute) -> Any:
        if node.attr == "training":
            return self.trains
        if node.attr == "TYPE_CHECKING":
            return False
        on_self = isinstance(node.value, ast.Name) and node.value.id == self.first and bool(self.first)
        return self.attributes.get(node.attr, _UNKNOWN) if on_self else _UNKNOWN

    def _of_bools(self, node: ast.BoolOp) -> bool | None:
        values = [self.truth(value) for value in node.values]
        decisive = isinstance(node.op, ast.Or)
        if decisive in values:
            return decisive
        return None if None in values else not decisive


def _compared(op: ast.cmpop, left: Any, right: Any) -> Any:
    if left is _UNKNOWN or right is _UNKNOWN:
        return _UNKNOWN
    if isinstance(op, (ast.Is, ast.IsNot)):
        if right is None and left is _NOT_NONE:
            return isinstance(op, ast.IsNot)
        unsure = left is _NOT_NONE or right is _NOT_NONE
        return _UNKNOWN if unsure else (left is right) == isinstance(op, ast.Is)
    if left is _NOT_NONE or right is _NOT_NONE:
        return _UNKNOWN
    try:
        return _ORDER[type(op)](left, right) if type(op) in _ORDER else _UNKNOWN
    except TypeError:
        return _UNKNOWN


_ORDER: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: lambda a, b: bool(a == b),
    ast.NotEq: lambda a, b: bool(a != b),
    ast.Lt: lambda a, b: bool(a < b),
    ast.LtE: lambda a, b: bool(a <= b),
    ast.Gt: lambda a, b: bool(a > b),
    ast.GtE: lambda a, b: bool(a >= b),
}


def _is_open(values: _Values, guards: Iterable[tuple[ast.expr, bool]]) -> bool:
    return all(values.truth(condition) in (None, wanted) for condition, wanted in guards)


def _same(value: Any, other: Any) -> bool:
    return value is other or (type(value) is type(other) and value is not _UNKNOWN and bool(value == other))


def _given(unit: CodeUnit, call: ast.Call, values: _Values, bound: bool) -> Arguments:
    """Returns the constants that a call gives to a function's parameters."""
    names = [parameter.arg for parameter in unit.parameters]
    method = unit.owner is not None and bound and not unit.has_decorator("staticmethod")
    result = {name: _constant(unit.defaults.get(name)) for name in names}
    open_ended = any(isinstance(argument, ast.Starred) for argument in call.args) or any(
        argument.arg is None for argument in call.keywords
    )
    if open_ended:
        result = dict.fromkeys(names, _UNKNOWN)
    for name, argument in zip(names[int(method) :], call.args, strict=False):
        if isinstance(argument, ast.Starred):
            break
        result[name] = values.value(argument)
    result |= {
        keyword.arg: values.value(keyword.value)
        for keyword in call.keywords
        if keyword.arg in result and keyword.arg is not None
    }
    return result


def _constant(node: ast.expr | None) -> Any:
    return node.value if isinstance(node, ast.Constant) else _UNKNOWN


def _assigned(unit: CodeUnit) -> frozenset[str]:
    """Returns the names that a function binds itself, those of its nested functions included."""
    known: frozenset[str] | None = unit.__dict__.get("_assigned")
    if known is None:
        names: set[str] = set()
        for event in unit.body.events:
            if event.act is Act.ASSIGN:
                names |= {node.id for node in ast.walk(event.node) if isinstance(node, ast.Name)}
            elif event.act is Act.ENTER and isinstance(event.node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names |= {node.arg for node in ast.walk(event.node.args) if isinstance(node, ast.arg)}
        known = unit.__dict__["_assigned"] = frozenset(names)
    return known


def _may_be_none(unit: CodeUnit, name: str) -> bool:
    """Returns whether a function sets a name to None itself."""
    return any(
        isinstance(event.node, ast.Name) and event.node.id == name and _constant(event.value) is None
        for event in unit.body.events
        if event.act is Act.ASSIGN
    )


def _only_asked_about(unit: CodeUnit) -> set[int]:
    """Returns the nodes that are asked for their class alone: of `isinstance` and `issubclass`."""
    result: set[int] = set()
    for event in unit.body.events:
        if isinstance(event.node, ast.Call) and chain_of(event.node.func) in (("isinstance",), ("issubclass",)):
            result |= {id(node) for argument in event.node.args[1:] for node in ast.walk(argument)}
    return result


def _attribute_constants(codebase: Codebase, closed: frozenset[CodeUnit]) -> dict[str, Any]:
    """Returns the attributes that the whole codebase sets to one boolean and nothing else."""
    values: dict[str, set[Any]] = defaultdict(set)
    for module in codebase.modules.values():
        for kind in module.classes.values():
            for statement in kind.node.body:
                for name in _names_set(statement):
                    values[name].add(_UNKNOWN)
    for unit in codebase.units:
        for event in unit.body.events if unit not in closed else ():
            if event.act is Act.ASSIGN and isinstance(event.node, ast.Attribute) and NEVER not in event.guards:
                constant = isinstance(event.value, ast.Constant) and isinstance(event.value.value, bool)
                values[event.node.attr].add(event.value.value if constant else _UNKNOWN)  # type: ignore[union-attr]
    return {name: next(iter(some)) for name, some in values.items() if len(some) == 1 and _UNKNOWN not in some}


def _names_set(statement: ast.stmt) -> Iterator[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
    yield from (target.id for target in targets if isinstance(target, ast.Name))


def roots(codebase: Codebase, kind: Class) -> tuple[list[CodeUnit], list[Class]]:
    """Returns where an entry begins: what is called of its class, and the classes that it is made of."""
    methods = [unit for name in _NETWORK if (unit := codebase.method(kind, name)) is not None]
    mine = [unit for unit in kind.module.units.values() if unit.owner is kind]
    if not methods:
        methods = [unit for unit in mine if not unit.name.rpartition(".")[2].startswith("_")]
    methods += [unit for unit in mine if unit.has_decorator("classmethod") and _makes_itself(unit)]
    classes, init = [kind], codebase.method(kind, "__init__")
    for parameter in init.parameters if init is not None else ():
        for name in _annotated(codebase, init, parameter):  # type: ignore[arg-type]
            known = codebase.definition(name)
            if isinstance(known, Class):
                classes += [known, *codebase.subclasses[known.dotted]]
    return methods, classes


def _makes_itself(unit: CodeUnit) -> bool:
    calls = [event.node for event in unit.body.events if event.act is Act.CALL and isinstance(event.node, ast.Call)]
    return any(chain_of(call.func) == (unit.first,) for call in calls)


def _annotated(codebase: Codebase, unit: CodeUnit, parameter: ast.arg) -> Iterator[str]:
    for node in ast.walk(parameter.annotation) if parameter.annotation else ():
        if isinstance(node, (ast.Name, ast.Attribute)):
            name = codebase.full(unit.module, chain_of(node), unit.imports)
            if name:
                yield codebase.canonical(name)
