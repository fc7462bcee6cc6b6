"""What an entry leads to: calls, constructors, imports, properties and functions that are handed on.

What is followed are the facts of functions, which are made here from their events.

A method of an object whose class the source does not show is looked up in all classes that are made on the way, and a
network that is made is also called. Conditions that constants of the source decide close a way.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torchport.porting.scan.codebase import Class, Codebase, CodeUnit
from torchport.porting.scan.detect import Site
from torchport.porting.scan.facts import Called, Conditions, Facts, Imported, Read, Term, Terms
from torchport.porting.scan.syntax import MODULE, NEVER, Act, Body, Event, chain_of, names_in
from torchport.source.bindings import STARRED, Function, parameters

Arguments = dict[str, Any]
_DUNDERS = ("__call__", "__enter__", "__exit__", "__getitem__", "__iter__", "__len__", "__next__")
_DEPTH = 4
"""How many functions that only return another function's answer are looked through."""
_NETWORK = ("forward", "encode", "decode", "__call__")


_UNKNOWN: Any = object()
"""A value that the source does not show."""
_NOT_NONE: Any = object()
"""Some value, and not None."""


@dataclasses.dataclass
class Patches:
    """What the patches for a codebase change. What they replace never runs."""

    by_unit: dict[CodeUnit, list[str]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    #: Those that rewrite lines of a function: first line, last line, and the id.
    by_lines: dict[CodeUnit, list[tuple[int, int, str]]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    #: Those of names outside of the codebase, such as `torch.cuda.set_device`.
    by_name: dict[str, list[str]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    #: The absent packages that are stubbed, with the modules that may import the stub.
    stubs: dict[str, list[tuple[str, frozenset[str]]]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    #: The parameters of networks' `forward` that a family always passes, so that they are not None; with the family.
    given: dict[str, str] = dataclasses.field(default_factory=dict)

    def at(self, unit: CodeUnit, line: int) -> list[str]:
        """Returns the ids of the patches that replace a function, or a line of it."""
        rewrites = [id for first, last, id in self.by_lines.get(unit, ()) if first <= line <= last]
        return self.by_unit.get(unit, []) + rewrites


class Reached:
    """What runs when some functions are called: all that they lead to, each with the constants that its calls pass.

    Args:
        patches: The patches that are in force: what they replace does not run. None: no patches.
        trains: Whether networks are in training.
        without: What is absent, `process-group` or `cuda`, which decides conditions that ask for it; empty for none.
    """

    def __init__(
        self, codebase: Codebase, patches: Patches | None = None, trains: bool = False, without: str = ""
    ) -> None:
        self._codebase = codebase
        self._patches = patches or Patches()
        attributes = _attribute_constants(codebase, self._patches)
        self._known_everywhere = _Values({}, attributes, trains, without, codebase.definition)
        self._arguments: dict[CodeUnit, Arguments] = {}  # the reached functions, with the constants that all calls pass
        self._known: dict[CodeUnit, _Values] = {}  # a cache of `_values`
        self._made: dict[Class, None] = {}  # the classes of which objects are made
        self._live_methods: dict[str, dict[CodeUnit, None]] = defaultdict(dict)  # the methods of `_made`, by name
        # Calls that may be of classes made later, by the method's name and a class above the object's; None: unknown.
        self._open_calls: dict[tuple[str, Class | None], dict[int, tuple[CodeUnit, Called | None]]] = defaultdict(dict)
        self._properties = {unit.name.rpartition(".")[2] for unit in codebase.units if "property" in unit.decorators}
        self._pending: dict[CodeUnit, None] = {}  # the reached functions that are still to be followed
        #: By function, the functions that call it, each with the line of the call; 0 if the line is unknown.
        self.callers: dict[CodeUnit, set[tuple[CodeUnit, int]]] = defaultdict(set)

    def start(self, units: Iterable[CodeUnit], classes: Iterable[Class] = ()) -> None:
        """Follows everything that runs when functions are called and objects of classes are made."""
        for unit in units:
            self._import(unit.module.name)
            self._reach(unit)
        for cls in classes:
            self._import(cls.module.name)
            self._create(cls)
        while self._pending:
            self._follow(self._pending.popitem()[0])

    def admit(self, units: Iterable[CodeUnit]) -> None:
        """Notes that functions may be called with any arguments; their own calls are not followed."""
        for unit in units:
            if unit not in self._patches.by_unit:
                self._arguments[unit] = {}

    def may_run(self, site: Site) -> bool:
        """Returns whether the place of a finding may run, with None for its parameter `site.if_none`, if it has any."""
        if site.if_none and self._values(site.unit).names.get(site.if_none, _UNKNOWN) is not None:
            return False
        return self.leads_to(site.unit, site.conditions, site.line)

    def leads_to(self, unit: CodeUnit, conditions: Conditions, line: int) -> bool:
        """Returns whether a line of a function may run: it is reached, not patched, and its conditions may hold."""
        is_reached = unit in self._arguments and not self._patches.at(unit, line)
        return is_reached and self._values(unit).allow(conditions)

    def _values(self, unit: CodeUnit) -> _Values:
        """Returns the known values in a function: for a parameter the constant that all calls pass, or `_NOT_NONE`."""
        known = self._known.get(unit)
        if known is None:
            names = {n: value for n, value in self._arguments.get(unit, {}).items() if n not in unit.facts.assigned}
            if unit.name.endswith(".forward"):
                given = self._patches.given.keys() & unit.defaults.keys()
                names |= dict.fromkeys(given - unit.facts.nones, _NOT_NONE)
            known = self._known[unit] = dataclasses.replace(self._known_everywhere, names=names)
        return known

    def _import(self, name: str) -> None:
        """Notes that a module and the packages around it are imported: their own statements and class bodies run."""
        for package in itertools.accumulate(name.split("."), "{}.{}".format):  # `a`, `a.b` and `a.b.c`
            module = self._codebase.modules.get(package)
            if module is not None and module.units[MODULE] not in self._arguments:  # else it was imported before
                for unit in module.units.values():
                    if unit.is_class or unit.name == MODULE:
                        self._reach(unit)

    def _reach(
        self, unit: CodeUnit, caller: CodeUnit | None = None, call: Called | None = None, bound: bool = True
    ) -> None:
        """Notes that a function is called, and with which constants. If that is new, it will be followed (again).
        Without a `caller` a run starts there, or imports it; without a `call` its arguments are unknown. `bound` is
        as for `_constants_passed`.
        """
        if caller is not None:
            self.callers[unit].add((caller, call.line if call is not None else 0))
        if unit in self._patches.by_unit:
            return
        known = self._arguments.get(unit)
        if known == {}:
            return  # nothing is known of its parameters, whatever a further call passes
        given: Arguments = {}
        if call is not None and caller is not None:
            given = _constants_passed(unit, call, self._values(caller), bound)
        if known is not None:  # a parameter keeps its value only if all calls pass the same
            both = [(name, value, given[name]) for name, value in known.items() if name in given]
            given = {n: value for n, value, other in both if type(value) is type(other) and value == other}
            if len(given) == len(known):
                return
        self._arguments[unit] = given
        self._known.pop(unit, None)
        self._pending[unit] = None

    def _create(self, cls: Class, caller: CodeUnit | None = None, call: Called | None = None) -> None:
        """Notes that an object of a class is made: its constructor runs, and its methods may be called from now on."""
        methods = self._codebase.methods(cls)
        for name in ("__init__", "__post_init__", "__new__"):
            if name in methods:
                self._reach(methods[name], caller, call)
        if cls in self._made:
            return
        self._made[cls] = None
        names = (*_DUNDERS, "forward") if self._codebase.is_network(cls) else _DUNDERS
        for name in names:
            if name in methods:
                self._reach(methods[name], caller)
        for name, unit in methods.items():
            if unit not in self._live_methods[name]:
                self._live_methods[name][unit] = None
                # Calls that came before, and that may be of this class.
                for above in (None, *self._codebase.lineage(cls)):
                    for open_caller, open_call in list(self._open_calls.get((name, above), {}).values()):
                        self._reach(unit, open_caller, open_call)

    def _call_in_any_class(self, name: str, unit: CodeUnit, call: Called | None = None) -> None:
        """Follows a method call on an object of unknown class: it may be of any class that is made, now or later."""
        if call is None and id(unit) in self._open_calls[name, None]:
            return  # nothing is known of its arguments, so a second time adds nothing
        self._open_calls[name, None][id(unit if call is None else call)] = unit, call  # by `id`, each call once
        for method in list(self._live_methods.get(name, ())):
            self._reach(method, unit, call)

    def _follow(self, unit: CodeUnit) -> None:
        values = self._values(unit)
        is_rewritten = unit in self._patches.by_lines
        for reference in unit.facts.references:
            is_replaced = is_rewritten and self._patches.at(unit, reference.line)
            if is_replaced or not values.allow(reference.conditions):
                continue
            if isinstance(reference, Imported):
                for name in reference.modules:
                    self._import(name)
            elif isinstance(reference, Called):
                self._call(unit, reference)
            else:
                self._mention(unit, reference)

    def _call(self, unit: CodeUnit, call: Called) -> None:
        """Follows one call: of `super()`, `self`, a known name, or a method of an object of unknown class."""
        chain = call.chain
        for name in chain[1:-1]:
            if name in self._properties:  # it runs first, as in `x.name.method()`
                self._call_in_any_class(name, unit)
        if call.of_super and unit.owner is not None:
            method = self._codebase.method(unit.owner, call.attribute, inherited=True)
            if method is not None:
                self._reach(method, unit, call)
        elif not chain:
            self._call_in_any_class(call.attribute, unit, call)
        elif chain[0] == unit.first and unit.owner is not None:
            if len(chain) == 1:  # `cls(...)`
                self._create(unit.owner, unit, call)
            elif len(chain) == 2:  # `self.method(...)`
                self._call_method(unit, unit.owner, chain[1], call)
            else:  # `self.a.method(...)`
                self._call_in_any_class(chain[-1], unit, call)
        else:
            self._mention_table(unit, f"{unit.module.name}.{chain[0]}")  # as in `BLOCKS.get(kind)`
            known = bool(call.name) and self._call_of_name(unit, call.name, call)
            if not known and len(chain) > 1 and not call.name.startswith(("torch.", "numpy.")):
                self._call_in_any_class(chain[-1], unit, call)

    def _call_of_name(self, unit: CodeUnit, name: str, call: Called) -> bool:
        """Follows a call of a full name; returns whether the codebase defines that name."""
        known = self._codebase.definition(name)
        if known is not None:
            self._use(unit, known, call)
            return True
        above, _, last = name.rpartition(".")
        cls = self._codebase.definition(above) if above else None
        if not isinstance(cls, Class):
            return False
        forward = self._codebase.method(cls, "forward") if last == "apply" else None  # of an autograd function
        if forward is not None:
            self._reach(forward, unit)
        else:  # as in `Network.from_pretrained()`, where the codebase has no such method
            self._create(cls, unit)
        return True

    def _call_method(self, unit: CodeUnit, owner: Class, name: str, call: Called | None = None) -> None:
        """Notes that a class's method is called, or one that overrides it in a subclass of which objects are made."""
        method = self._codebase.method(owner, name)
        if method is not None:
            self._reach(method, unit, call)
            self._open_calls[name, owner][id(unit if call is None else call)] = unit, call
            for other in list(self._live_methods.get(name, ())):
                if other is not method and other.owner is not None and owner in self._codebase.lineage(other.owner):
                    self._reach(other, unit, call)

    def _mention(self, unit: CodeUnit, read: Read) -> None:
        """Follows a function or class that is named and not called, as in `map(f, xs)`, and a property that is read."""
        chain = read.chain
        if chain and chain[0] == unit.first and unit.owner is not None:
            if len(chain) > 1:
                self._call_method(unit, unit.owner, chain[1])
        elif chain:
            self._use(unit, self._codebase.definition(read.name) if read.name else None)
            self._mention_table(unit, read.name or f"{unit.module.name}.{chain[0]}")
        for name in chain[1:] or [read.attribute]:
            if name in self._properties:
                self._call_in_any_class(name, unit)

    def _use(self, unit: CodeUnit, known: CodeUnit | Class | None, call: Called | None = None) -> None:
        """Notes that a function calls a definition by name; without a `call` it hands it on, for any arguments."""
        if isinstance(known, Class):
            self._create(known, unit, call)
        elif known is not None:
            # A method that is called by its class's name, `Class.method(x)`, gets its object as an argument.
            bound = known.owner is None or "classmethod" in known.decorators or known.is_static
            self._reach(known, unit, call, bound)

    def _mention_table(self, unit: CodeUnit, name: str) -> None:
        """Hands on all definitions in a list or dictionary of the codebase with this full name, if there is one."""
        for inner in self._codebase.table(name):
            self._use(unit, self._codebase.definition(inner))


@dataclasses.dataclass(frozen=True)
class _Values:
    """What is known in one function, by which its conditions are decided."""

    names: Mapping[str, Any]  #: The parameters to which every call on the way passes the same constant.
    attributes: Mapping[str, Any]  #: The attributes to which the whole codebase assigns a single value.
    trains: bool  #: What `self.training` is.
    without: str  #: What is absent, `process-group` or `cuda`; empty if nothing is assumed.
    definition: Callable[[str], CodeUnit | Class | None]
    depth: int = 0  #: How many functions were asked for their answers on the way.

    def allow(self, conditions: Conditions) -> bool:
        """Returns whether code may run that stands under these conditions."""
        return not conditions or all(self.truth(condition) in (None, wanted) for condition, wanted in conditions)

    def truth(self, term: Term) -> bool | None:
        """Returns whether a condition holds; None if the source does not show it."""
        value = self.value(term)
        return None if value is _UNKNOWN or value is _NOT_NONE else bool(value)

    def value(self, term: Term) -> Any:
        """Returns the value of a term; `_UNKNOWN` where the source does not show it."""
        if term is None:
            return _UNKNOWN
        kind, *parts = term
        if kind == "const":
            return parts[0]
        if kind == "name":
            # `__name__` is any text but "__main__": a module that is imported.
            return "imported" if parts[0] == "__name__" else self.names.get(parts[0], _UNKNOWN)
        if kind == "self":
            return self.attributes.get(parts[0], _UNKNOWN)
        if kind == "training":
            return self.trains
        if kind == "else":
            value = self.value(parts[0])
            absent, assumed = parts[1:]
            return assumed if value is _UNKNOWN and absent == self.without else value
        if kind == "call":
            if not self.without or self.depth >= _DEPTH:
                return _UNKNOWN
            known = self.definition(parts[0])
            answer = known.facts.answer if isinstance(known, CodeUnit) else None  # what it returns, if that is all
            return dataclasses.replace(self, names={}, depth=self.depth + 1).value(answer)
        return self._operator_value(kind, parts)

    def _operator_value(self, op: str, operands: list[Term]) -> Any:
        """Returns the value of `not`, `and`, `or` or a comparison; `_UNKNOWN` if the operands do not decide it."""
        if op == "not":
            value = self.truth(operands[0])
            return _UNKNOWN if value is None else not value
        if op in ("and", "or"):
            values = [self.truth(operand) for operand in operands]
            deciding = op == "or"  # a True decides `or`, and a False decides `and`
            if deciding in values:
                return deciding
            return _UNKNOWN if None in values else not deciding
        left, right = map(self.value, operands)
        if left is _NOT_NONE and right is None and op in ("is_", "is_not"):
            return op == "is_not"
        if any(side is _UNKNOWN or side is _NOT_NONE for side in (left, right)):
            return _UNKNOWN
        try:
            return getattr(operator, op)(left, right)
        except TypeError:
            return _UNKNOWN


def _constants_passed(unit: CodeUnit, call: Called, values: _Values, bound: bool) -> Arguments:
    """Returns the values of a function's parameters in a call, as far as the source and the caller's `values` show
    them. `bound`: a method's first argument is not written, as in `x.method()`; it is in `Class.method(x)`.
    """
    names = unit.parameters
    method = unit.owner is not None and bound and not unit.is_static
    result = {} if call.starred else {name: term[1] for name, term in unit.defaults.items() if term is not None}
    result |= zip(names[int(method) :], map(values.value, call.arguments), strict=False)
    result |= {name: values.value(term) for name, term in call.keywords if name in names}
    return {name: value for name, value in result.items() if value is not _UNKNOWN}


def _attribute_constants(codebase: Codebase, patches: Patches) -> dict[str, Any]:
    """Returns the attributes that the whole codebase sets to one boolean and to nothing else: `{"use_sp": False}`. A
    replaced function sets nothing; a variable in a class body counts as unknown.
    """
    values: dict[str, set[Any]] = defaultdict(set)
    for module in codebase.modules.values():
        for cls in module.classes.values():
            for name in cls.variables:
                values[name].add(_UNKNOWN)
    for unit in codebase.units:
        for name, term in unit.facts.attributes if unit not in patches.by_unit else ():
            values[name].add(term[1] if term is not None and isinstance(term[1], bool) else _UNKNOWN)
    return {name: next(iter(known)) for name, known in values.items() if len(known) == 1 and _UNKNOWN not in known}


def roots(codebase: Codebase, cls: Class) -> tuple[list[CodeUnit], list[Class]]:
    """Returns the methods that a run calls if its entry is a class, and the classes of which it makes objects: the
    class, and those that its constructor's annotations name.
    """
    known = codebase.methods(cls)
    methods = [known[name] for name in _NETWORK if name in known]
    defined = [unit for unit in cls.module.units.values() if unit.owner is cls]
    if not methods:  # the class is no network: all public methods
        methods = [unit for unit in defined if not unit.name.rpartition(".")[2].startswith("_")]
    # A class method that calls `cls(...)` makes an object.
    class_methods = [unit for unit in defined if "classmethod" in unit.decorators]
    methods += [unit for unit in class_methods if (unit.first,) in {call.chain for call in unit.facts.calls}]
    classes = [cls]
    init = codebase.method(cls, "__init__")
    known_classes = [other for module in codebase.modules.values() for other in module.classes.values()]
    for name in _annotated_names(codebase, init) if init is not None else ():
        component = codebase.definition(name)
        if isinstance(component, Class):
            classes += [component, *(other for other in known_classes if name in codebase.bases(other))]
    return methods, classes


def _annotated_names(codebase: Codebase, unit: CodeUnit) -> Iterator[str]:
    """Yields the full names in the annotations of a function's parameters, such as `pkg.models.Network`."""
    node = codebase.body(unit).node
    for parameter in parameters(node) if isinstance(node, Function) else ():
        annotation = parameter.argument.annotation if parameter.kind not in STARRED else None
        for part in ast.walk(annotation) if annotation else ():
            name = codebase.resolve(unit, chain_of(part))
            if name:
                yield name


def facts_of(codebase: Codebase, unit: CodeUnit, body: Body, terms: Terms) -> Facts:
    """Returns the facts of a function, which are kept when its syntax tree is dropped."""
    skipped = set(unit.module.in_tables if unit.name == MODULE else ())
    # No object is made of a class that an `isinstance` or `issubclass` names.
    for event in body.by_act[Act.CALL]:
        call: Any = event.node
        if event.chain in (("isinstance",), ("issubclass",)):
            skipped |= {node for argument in call.args[1:] for node in ast.walk(argument)}
    others = {unit.first, *unit.module.tables}  # names that are followed, too
    references: dict[Any, Read | Imported] = {}
    attributes: dict[tuple[str, Term], None] = {}
    bound: set[str] = set()
    nones: set[str] = set()
    for event in body.events:
        node = event.node
        if event.act is Act.CHAIN:
            if len(event.chain) == 1 and not unit.may_import(event.chain[0]) and event.chain[0] not in others:
                continue  # a local name, as most are
            read = _read_of(codebase, unit, event, terms) if node not in skipped else None
            if read is not None:
                references.setdefault((read.line, id(read.conditions), read.chain, read.attribute), read)
        elif event.act is Act.CALL:
            call = _call_of(codebase, unit, event, terms) if node not in skipped else None
            if call is not None:
                references[event] = call
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            references[event] = _import_of(unit, event, node, terms)
        elif event.act is Act.ASSIGN:
            bound.update([node.id] if isinstance(node, ast.Name) else names_in(node))
            value = terms.term(event.value) if isinstance(event.value, ast.Constant) else None
            if isinstance(node, ast.Name) and value == ("const", None):
                nones.add(node.id)
            elif isinstance(node, ast.Attribute) and NEVER not in event.guards:
                attributes[node.attr, value] = None
        elif event.act is Act.ENTER and isinstance(node, Function):
            bound |= {name.arg for name in ast.walk(node.args) if isinstance(name, ast.arg)}
    distinct = {id(event.guards): event.guards for event in body.events if event.guards}  # many events share theirs
    tests = {guard.test for guards in distinct.values() for guard in guards}
    return Facts(
        tuple(references.values()), frozenset(bound & set(unit.parameters)), frozenset(nones & set(unit.parameters)),
        tuple(attributes), frozenset(name for test in tests for name in names_in(test)), _returned_alone(body, terms),
    )  # fmt: skip


def _returned_alone(body: Body, terms: Terms) -> Term:
    """Returns the term that a function returns, if it does nothing else; else None."""
    statements = [] if isinstance(body.node, (ast.Module, ast.ClassDef)) else body.node.body
    docs = [node for node in statements if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    rest = [node for node in statements if node not in docs and not isinstance(node, ast.Global)]
    return terms.term(rest[0].value) if len(rest) == 1 and isinstance(rest[0], ast.Return) else None


def _import_of(unit: CodeUnit, event: Event, node: ast.Import | ast.ImportFrom, terms: Terms) -> Imported:
    """Returns an import statement as a fact, with the modules that it runs and the names that it binds."""
    conditions = terms.conditions(event.guards)
    if isinstance(node, ast.Import):
        names = tuple(alias.name for alias in node.names)
        packages = tuple(dict.fromkeys(name.partition(".")[0] for name in names))
        return Imported(node.lineno, conditions, names, packages, (), not event.guards)
    bound = unit.module.bound if unit.name == MODULE else unit.imports
    aliases = tuple((alias.name, bound.get(alias.asname or alias.name, ""), alias.lineno) for alias in node.names)
    packages = (node.module.partition(".")[0],) if not node.level and node.module else ()
    modules = (*(full for _, full, _ in aliases), *unit.module.stars)
    return Imported(node.lineno, conditions, modules, packages, aliases, not event.guards)


def _call_of(codebase: Codebase, unit: CodeUnit, event: Event, terms: Terms) -> Called | None:
    """Returns a call as a fact, with the full name of its function; None if no function of the codebase is called."""
    node: Any = event.node
    chain = event.chain
    name = codebase.resolve(unit, chain)
    attribute = "" if chain else getattr(node.func, "attr", "")  # as in `f().method()`
    owner = node.func.value if attribute else None
    of_super = isinstance(owner, ast.Call) and chain_of(owner.func) == ("super",)
    if not chain and not attribute:  # as in `f()()`, which cannot be followed
        return None
    if chain and chain[0] != unit.first and len(chain) < 3 and chain[0] not in unit.module.tables:
        is_outside = name.startswith(("torch.", "numpy.")) and not codebase.has(name)
        if is_outside or (len(chain) == 1 and not name):
            return None
    stars = [number for number, argument in enumerate(node.args) if isinstance(argument, ast.Starred)]
    arguments = tuple(map(terms.term, node.args[: stars[0]] if stars else node.args))
    keywords = tuple((keyword.arg, terms.term(keyword.value)) for keyword in node.keywords if keyword.arg is not None)
    starred = bool(stars) or any(keyword.arg is None for keyword in node.keywords)
    conditions = terms.conditions(event.guards)
    return Called(node.lineno, conditions, chain, name, attribute, of_super, arguments, keywords, starred=starred)


def _read_of(codebase: Codebase, unit: CodeUnit, event: Event, terms: Terms) -> Read | None:
    """Returns the reading of a name or attribute as a fact; None if the name is not of the codebase."""
    node: Any = event.node
    chain = event.chain
    name = codebase.resolve(unit, chain)
    attribute = "" if chain else getattr(node, "attr", "")
    if len(chain) == 1:
        is_known = codebase.has(name) if name else chain[0] == unit.first or chain[0] in unit.module.tables
        if not is_known:
            return None
    return Read(node.lineno, terms.conditions(event.guards), chain, name, attribute)
