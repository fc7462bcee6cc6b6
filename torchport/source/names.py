"""Finds the definitions that a definition uses, directly or not, in the source of its own package.

Names are resolved as Python would, without importing anything: a global of the module, a name that it imports from its
own package, `module.name`, `self.method` and `super().method` in the classes that the source shows. A look-up of any
other kind (a method of an argument, a table of functions) is not followed.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Iterator, Sequence

from torchport.source import parsing
from torchport.source.bindings import DEFINITIONS, at_import, bound_name, last_bindings
from torchport.source.parsing import SourceFile, read_source

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*_FUNCTIONS, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_MADE_BY = ("__new__", "__init__", "__post_init__")
_SELF, _SUPER = "<self>", "<super>"
_ANNOTATIONS = ("annotation", "returns", "type_params")

Imports = ast.Import | ast.ImportFrom
Chain = tuple[str, ...]
Home = tuple[str, tuple[str, ...]]
"""A module, and the path of a definition in it."""


def home_of(target: str) -> Home:
    """Returns a target's module and path: `"up.model:Block.forward"` -> `("up.model", ("Block", "forward"))`."""
    module, _, path = target.partition(":")
    return module, tuple(path.split("."))


def name_of(home: Home) -> str:
    """Returns a home as a target: `("up.model", ("Block", "forward"))` -> `"up.model:Block.forward"`."""
    return f"{home[0]}:{'.'.join(home[1])}"


def callees(targets: Sequence[str]) -> dict[str, tuple[SourceFile, ast.stmt, str]]:
    """Returns the definitions in their own packages that targets use, directly or not, by name, the nearest first: for
    each its source, its statement, and the name of the definition that uses it.
    """
    result: dict[str, tuple[SourceFile, ast.stmt, str]] = {}
    pending = list(map(home_of, targets))
    while pending:
        user = pending.pop(0)
        for home in dict.fromkeys(home for _, home in _homes_used(user)):
            name, place = name_of(home), definition(home)
            if place and name not in result and name not in targets:
                result[name] = (*place, name_of(user))
                pending.append(home)
    return result


def _source(module: str) -> SourceFile | None:
    try:
        return read_source(module)
    except ModuleNotFoundError:
        return None


def definition(home: Home) -> tuple[SourceFile, ast.stmt] | None:
    """Returns the source and statement of a definition. None if the source does not show it."""
    source = _source(home[0])
    node = source.where(home[1]).node if source else None
    if source is not None and node is None and len(home[1]) == 1:  # a loop or a `with` binds it
        node = next(iter(source.all_names.get(home[1][0], ())), None)
    return None if source is None or node is None else (source, node)


def uses(home: Home) -> list[str]:
    """Returns the names that a definition reads, each with the definition of its own package, or else the import, to
    which it leads. Sorted: `["<self>.attend=up.m:Block.attend", "np=numpy"]`.
    """
    source = _source(home[0])
    if source is None:
        return []
    chains, local = _reads(source, home[1])
    firsts = {chain[0] for chain in chains}
    statements = {first: local.get(first, source.all_names.get(first, [])) for first in firsts}
    imported = {f"{first}={name}" for first in firsts for name in _imported_names(first, statements[first], source)}
    return sorted(imported | {f"{'.'.join(chain)}={name_of(used)}" for chain, used in _homes_used(home)})


def _imported_names(name: str, statements: Sequence[ast.stmt], source: SourceFile) -> Iterator[str]:
    """Yields the full names that imports bind to a name: `up.m.f` for the name `a` and `from up.m import f as a`."""
    for node in statements:
        for alias in node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
            if bound_name(alias) == name and isinstance(node, ast.ImportFrom):
                yield f"{source.imported_from(node)}.{alias.name}"
            elif bound_name(alias) == name:
                yield alias.name if alias.asname else name  # `import a.b` binds `a`


def _homes_used(user: Home) -> Iterator[tuple[Chain, Home]]:
    """Yields the definitions that the definition `user` names in its own package, each after the names that lead there:
    `(("<self>", "attend"), ("up.m", ("Block", "attend")))`.
    """
    source = _source(user[0])
    if source is None:
        return
    chains, local = _reads(source, user[1])
    owner = user[1] if isinstance(source.where(user[1]).node, ast.ClassDef) else user[1][:-1]
    for chain in chains:
        # The class is inside a function, where no path leads.
        if chain[0] == _SUPER and not owner:
            continue
        lookup = Lookup(package=user[0].partition(".")[0])
        if chain[0] in (_SELF, _SUPER):
            homes = lookup.method((user[0], owner), chain[1], inherited=chain[0] == _SUPER)
        elif chain[0] in local:
            homes = (home for statement in local[chain[0]] for home in lookup.from_import(statement, source, chain))
        else:
            homes = lookup.names(user[0], chain)
        yield from ((chain, home) for home in homes)


@functools.cache
def _reads(source: SourceFile, path: tuple[str, ...]) -> tuple[list[Chain], dict[str, list[Imports]]]:
    """Returns the names (`a.b.c` as a tuple) that a definition reads, and its local names, each with the statements
    that import it; none for a local name that is assigned.
    """
    chains: set[Chain] = set()
    local: dict[str, list[Imports]] = {}
    for node in bindings(source, path):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        first = _first_argument(node) if len(path) > 1 else None
        with parsing.nesting(source.shown, node.lineno):
            chains |= set(_chains(node if isinstance(node, DEFINITIONS) else _head(node), first))
            bound = _bound_inside(node) if isinstance(node, _FUNCTIONS) else {}
            local |= {name: local.get(name, []) + imports for name, imports in bound.items()}
    return sorted(chains), local


def bindings(source: SourceFile, path: tuple[str, ...]) -> list[ast.stmt]:
    """Returns the statements that bind or change a global; for a path `("Class", "name")` the last statement that binds
    it in the class, and assignments `Class.name = ...` outside.
    """
    node, touching = source.where(path).node, source.all_names.get(path[0], [])
    if len(path) == 1:
        return touching
    name = ".".join(path)
    assigned = [statement for statement in touching if isinstance(statement, ast.Assign)]
    outside = [statement for statement in assigned if name in map(ast.unparse, statement.targets)]
    return [*([] if node is None else [node]), *outside]


def _head(node: ast.stmt) -> ast.AST:
    """Returns a statement without the blocks in it: of a loop or an `if` the part before the colon."""
    if not hasattr(node, "body"):
        return node
    flat = []
    for field in ("test", "iter", "items"):
        head = getattr(node, field, [])
        flat += head if isinstance(head, list) else [head]
    return ast.Module(flat, [])


def _bound_inside(scope: ast.AST) -> dict[str, list[Imports]]:
    """Returns the arguments and assigned names of a function or comprehension, without those of scopes in it; and the
    names that it imports, scopes in it included, each with its imports.
    """
    arguments = ast.walk(getattr(scope, "args", ast.Module([], [])))
    local: dict[str, list[Imports]] = {node.arg: [] for node in arguments if isinstance(node, ast.arg)}
    pending = [(child, True) for child in _children(scope)]
    for node, is_here in pending:  # `is_here`: whether the node is in this scope itself; the list grows meanwhile
        if is_here and isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            local.setdefault(node.id, [])
        if is_here and isinstance(node, DEFINITIONS):
            local.setdefault(node.name, [])
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                local.setdefault(bound_name(alias), []).append(node)
        is_here = is_here and not isinstance(node, (*_SCOPES, ast.ClassDef))
        pending += [(child, is_here) for child in _children(node)]
    return local


def _first_argument(node: ast.stmt) -> str | None:
    """Returns the name of a method's first parameter, such as `self`; None for a static method."""
    if not isinstance(node, _FUNCTIONS):
        return None
    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
    positional = [*node.args.posonlyargs, *node.args.args]
    return None if static or not positional else positional[0].arg


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes directly in a node, without annotations, which compute nothing."""
    for field, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        yield from (child for child in children if isinstance(child, ast.AST) and field not in _ANNOTATIONS)


def _chains(node: ast.AST, self_name: str | None) -> Iterator[Chain]:
    """Yields the names that a definition reads, by their parts, with a mark for a method's first argument: `a.b.c` ->
    `("a", "b", "c")`, `self.f` -> `("<self>", "f")`, `super().f` -> `("<super>", "f")`.
    """
    attributes: list[str] = []
    base = node
    while isinstance(base, ast.Attribute):
        attributes.insert(0, base.attr)
        base = base.value
    called = base.func.id if isinstance(base, ast.Call) and isinstance(base.func, ast.Name) else None
    if attributes and called == "type" and isinstance(base, ast.Call) and len(base.args) == 1:
        base = base.args[0]  # `type(self).method`
    if isinstance(base, ast.Name):
        first = _SELF if base.id == self_name else base.id
        if first == _SELF and attributes[:1] == ["__class__"]:
            del attributes[0]  # `self.__class__.method`
        if isinstance(base.ctx, ast.Load) and (attributes or first != _SELF):
            yield (first, *attributes)
        return
    if attributes and called == "super":
        yield (_SUPER, *attributes)
        return
    # A scope's own names are not read from outside it.
    bound = _bound_inside(node) if isinstance(node, _SCOPES) else {}
    hidden = {name for name, imports in bound.items() if not imports and name != self_name}
    for child in _children(node):
        outside = isinstance(child, ast.arguments) or child in getattr(node, "decorator_list", ())
        yield from (chain for chain in _chains(child, self_name) if outside or chain[0] not in hidden)


@dataclasses.dataclass
class Lookup:
    """One look-up of a chain of names. Circular imports end, as no question is answered twice."""

    package: str | None  #: The package whose modules are entered; None: those of all packages.
    is_for_classes: bool = False  #: Whether a class leads to the class itself; else it leads to its constructors.
    _asked: set[tuple[object, ...]] = dataclasses.field(default_factory=set, init=False)

    def names(self, module: str, chain: Chain) -> Iterator[Home]:
        """Yields the definitions to which a chain of names (`a.b.c` as a tuple) leads in a module."""
        source = self._source(module)
        if source is None or (module, chain) in self._asked:
            return
        self._asked.add((module, chain))
        nodes = source.all_names.get(chain[0], [])
        if not nodes:
            for star in at_import(source.tree.body):
                if isinstance(star, ast.ImportFrom) and star.names[0].name == "*":
                    yield from self.names(source.imported_from(star), chain)
        # `all_names` also has the `if` statements around those that bind a name.
        others = [node for node in nodes if not isinstance(node, (ast.Import, ast.ImportFrom, ast.If))]
        for node in nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                yield from self.from_import(node, source, chain)
        if others and isinstance(source.names.get(chain[0]), ast.ClassDef):
            yield from self._in_class((module, (chain[0],)), chain[1:])
        elif others and not (chain[0].startswith("__") and chain[0].endswith("__")):  # `__version__` differs by version
            yield module, (chain[0],)

    def from_import(self, node: Imports, source: SourceFile, chain: Chain) -> Iterator[Home]:
        """Yields the definitions to which a chain of names leads, if this import binds the first of them."""
        for alias in node.names:
            if isinstance(node, ast.ImportFrom) and (alias.asname or alias.name) == chain[0]:
                home, as_there = source.imported_from(node), (alias.name, *chain[1:])
                known = _source(home)
                if known is not None and alias.name in known.names:
                    yield from self.names(home, as_there)
                else:
                    yield from self._in_module(f"{home}.{alias.name}", chain[1:]) or self.names(home, as_there)
            elif isinstance(node, ast.Import) and bound_name(alias) == chain[0]:
                yield from self._in_module(alias.name if alias.asname else chain[0], chain[1:])

    def _source(self, module: str) -> SourceFile | None:
        return _source(module) if self.package in (None, module.partition(".")[0]) else None

    def _in_module(self, module: str, chain: Chain) -> list[Home]:
        """Returns the definitions to which a chain of names leads in a module; the first names may be submodules."""
        if not chain:
            return []
        source = self._source(module)
        if source is not None and chain[0] in source.names:
            return list(self.names(module, chain))
        return self._in_module(f"{module}.{chain[0]}", chain[1:]) or list(self.names(module, chain))

    def _in_class(self, home: Home, chain: Chain) -> Iterator[Home]:
        """Yields the method of a class that `chain` begins with; for an empty chain its constructors, or the class."""
        if chain and not self.is_for_classes:
            yield from self.method(home, chain[0], inherited=False)
        elif not chain:
            names = () if self.is_for_classes else _MADE_BY
            makers = [maker for name in names for maker in self.method(home, name, inherited=False)]
            yield from makers or [home]

    def method(self, home: Home, name: str, inherited: bool) -> Iterator[Home]:
        """Yields the first definition of a method, in a class or those above it; if `inherited`, only above it."""
        place = definition(home)
        node = place[1] if place else None
        if not isinstance(node, ast.ClassDef) or (home, name, inherited) in self._asked:
            return
        self._asked.add((home, name, inherited))
        if not inherited and name in last_bindings(node):
            yield home[0], (*home[1], name)
            return
        found = (list(self.method(cls, name, inherited=False)) for cls in self.bases(home[0], node))
        yield from next(filter(None, found), [])  # the first base that has the method

    def bases(self, module: str, node: ast.ClassDef) -> Iterator[Home]:
        """Yields the classes right above a class, as far as source shows them."""
        source = _source(module)
        # The first chain of each base: of `Base[T]` that of `Base`.
        chains = [next(_chains(ast.Expr(base), self_name=None), ()) for base in node.bases]
        for chain in filter(None, chains):
            bound = source.names.get(chain[0]) if source else None
            if isinstance(bound, ast.ClassDef) and len(chain) == 1:
                yield module, (bound.name,)
            elif isinstance(bound, (ast.Import, ast.ImportFrom)) and source is not None:
                yield from Classes(self.package).from_import(bound, source, chain)


Classes = functools.partial(Lookup, is_for_classes=True)
"""A look-up that leads to classes; `Classes(None)` looks in all packages."""
