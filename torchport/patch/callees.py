"""Follows from a definition what its upstream's own source lets it use, to the border of the package.

Names are resolved as Python would, without importing anything: a global of the module, a name that it imports from its
own package, `module.name`, `self.method` and `super().method` in the classes that the source shows. What is looked up
in any other way (a method of an argument, a table of functions) is not followed.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Iterator, Sequence

from torchport.patch.capture import imported_from
from torchport.patch.source import Source, at_import, binding, read_source

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_MADE_BY = ("__new__", "__init__", "__post_init__")
_SELF, _SUPER = "<self>", "<super>"
_ANNOTATIONS = ("annotation", "returns", "type_params")

Imports = ast.Import | ast.ImportFrom
Chain = tuple[str, ...]
Home = tuple[str, tuple[str, ...]]
"""A module, and the path of a definition in it."""


@dataclasses.dataclass(frozen=True)
class Callee:
    """One definition that another one uses.

    Attributes:
        source: The source of its module.
        node: The statement that binds its name.
        through: The `module:path` of the definition that uses it.
    """

    source: Source
    node: ast.stmt
    through: str


def home_of(target: str) -> Home:
    """Returns a `module:path` in its parts."""
    module, _, path = target.partition(":")
    return module, tuple(path.split("."))


def name_of(home: Home) -> str:
    """Returns `module:path`."""
    return f"{home[0]}:{'.'.join(home[1])}"


def callees(targets: Sequence[str]) -> dict[str, Callee]:
    """Returns all that definitions use of their own packages, directly or not, without themselves.

    Args:
        targets: The definitions, as `module:path`.

    Returns:
        The callees by `module:path`, the nearest first.

    Raises:
        TargetError: A source on the way is not Python.
    """
    result: dict[str, Callee] = {}
    pending = list(map(home_of, targets))
    while pending:
        user = pending.pop(0)
        for home in _used(user, user[0].partition(".")[0]):
            name, found = name_of(home), definition(home)
            if found and name not in result and name not in targets:
                result[name] = Callee(*found, name_of(user))
                pending.append(home)
    return result


def _source(module: str) -> Source | None:
    try:
        return read_source(module)
    except ModuleNotFoundError:
        return None


def definition(home: Home) -> tuple[Source, ast.stmt] | None:
    """Returns the source and statement of a definition; None if the source does not show it.

    Raises:
        TargetError: The source is not Python.
    """
    source = _source(home[0])
    node = source.where(home[1]).node if source else None
    return None if source is None or node is None else (source, node)


def _used(user: Home, package: str) -> Iterator[Home]:
    """Yields the definitions of a package that one of its definitions names."""
    source = _source(user[0])
    if source is None:
        return
    chains, own = _names(source, user[1])
    owner = user[1][:-1]
    for chain in chains:
        lookup = _Lookup(package)
        if chain[0] in (_SELF, _SUPER):
            yield from lookup.method((user[0], owner), chain[1], inherited=chain[0] == _SUPER)
        elif chain[0] in own:
            for statement in own[chain[0]]:
                yield from lookup.imported(statement, source, chain)
        else:
            yield from lookup.names(user[0], chain)


@functools.cache
def _names(source: Source, path: tuple[str, ...]) -> tuple[list[Chain], dict[str, list[Imports]]]:
    """Returns what a definition reads, and what it binds itself; a source never changes."""
    node = source.where(path).node
    if node is None or isinstance(node, (ast.Import, ast.ImportFrom)):
        return [], {}
    first = _first_argument(node) if len(path) > 1 else None
    return sorted(set(_chains(node, first))), _bound_inside(node)


def _bound_inside(node: ast.stmt) -> dict[str, list[Imports]]:
    """Returns the names that a function binds itself, with the imports in it that bind them."""
    own: dict[str, list[Imports]] = {}
    if not isinstance(node, _FUNCTIONS):
        return own
    for inner in _walked(node):
        if isinstance(inner, ast.arg):
            own.setdefault(inner.arg, [])
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            own.setdefault(inner.id, [])
        elif isinstance(inner, (ast.Import, ast.ImportFrom)):
            for alias in inner.names:
                own.setdefault((alias.asname or alias.name).partition(".")[0], []).append(inner)
        elif isinstance(inner, (*_FUNCTIONS, ast.ClassDef)) and inner is not node:
            own.setdefault(inner.name, [])
    return own


def _first_argument(node: ast.stmt) -> str | None:
    if not isinstance(node, _FUNCTIONS):
        return None
    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
    positional = [*node.args.posonlyargs, *node.args.args]
    return None if static or not positional else positional[0].arg


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yields what stands in a node but its annotations, which compute nothing."""
    for field, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        yield from (child for child in children if isinstance(child, ast.AST) and field not in _ANNOTATIONS)


def _walked(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in _children(node):
        yield from _walked(child)


def _chains(node: ast.AST, self_name: str | None) -> Iterator[Chain]:
    """Yields what a definition reads: `a.b.c` as its names; the first argument of a method as `_SELF`."""
    steps: list[str] = []
    base = node
    while isinstance(base, ast.Attribute):
        steps.insert(0, base.attr)
        base = base.value
    if isinstance(base, ast.Name):
        first = _SELF if base.id == self_name else base.id
        if isinstance(base.ctx, ast.Load) and (steps or first != _SELF):
            yield (first, *steps)
        return
    if steps and isinstance(base, ast.Call) and isinstance(base.func, ast.Name) and base.func.id == "super":
        yield (_SUPER, *steps)
        return
    for child in _children(node):
        yield from _chains(child, self_name)


class _Lookup:
    """One look-up of a chain of names, inside one package; nothing is asked twice, so that a circle ends.

    Args:
        package: The top-level package.
    """

    def __init__(self, package: str) -> None:
        self._package = package
        self._asked: set[tuple[object, ...]] = set()

    def _is_new(self, *question: object) -> bool:
        before = len(self._asked)
        self._asked.add(question)
        return len(self._asked) > before

    def names(self, module: str, chain: Chain) -> Iterator[Home]:
        """Yields the definition to which names lead from a module's globals."""
        source = _source(module)
        if source is None or not self._is_new(module, chain):
            return
        node = source.names.get(chain[0])
        if node is None:
            for star in at_import(source.tree.body):
                if isinstance(star, ast.ImportFrom) and star.names[0].name == "*":
                    yield from self._in(imported_from(star, module, source), chain)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from self.imported(node, source, chain)
        elif isinstance(node, ast.ClassDef):
            yield from self._in_class((module, (node.name,)), chain[1:])
        elif not (chain[0].startswith("__") and chain[0].endswith("__")):  # `__version__` is another in each version
            yield module, (chain[0],)

    def imported(self, node: Imports, source: Source, chain: Chain) -> Iterator[Home]:
        """Yields the definition to which names lead of which the first is bound by an import."""
        for alias in node.names:
            if isinstance(node, ast.ImportFrom) and (alias.asname or alias.name) == chain[0]:
                home = imported_from(node, source.module, source)
                known = _source(home)
                if known is not None and alias.name in known.names:
                    yield from self._in(home, (alias.name, *chain[1:]))
                else:
                    yield from self._in_module(f"{home}.{alias.name}", chain[1:]) or self._in(home, chain)
            elif isinstance(node, ast.Import) and (alias.asname or alias.name.partition(".")[0]) == chain[0]:
                yield from self._in_module(alias.name if alias.asname else chain[0], chain[1:])

    def _in(self, module: str, chain: Chain) -> Iterator[Home]:
        if module.partition(".")[0] == self._package:
            yield from self.names(module, chain)

    def _in_module(self, module: str, chain: Chain) -> list[Home]:
        """Returns what names lead to from a module: a name of it, or one of a submodule that the first of them is."""
        source = _source(module) if chain and module.partition(".")[0] == self._package else None
        if source is not None and chain[0] in source.names:
            return list(self.names(module, chain))
        deeper = self._in_module(f"{module}.{chain[0]}", chain[1:]) if chain else []
        return deeper or (list(self._in(module, chain)) if chain else [])

    def _in_class(self, home: Home, chain: Chain) -> Iterator[Home]:
        """Yields the method that a class is asked for; of a class alone what makes an instance, or else all of it."""
        if chain:
            yield from self.method(home, chain[0], inherited=False)
            return
        makers = [maker for name in _MADE_BY for maker in self.method(home, name, inherited=False)]
        yield from makers or [home]

    def method(self, home: Home, name: str, inherited: bool) -> Iterator[Home]:
        """Yields the first definition of a method in a class, or, if it is inherited, in what is above it."""
        place = definition(home)
        node = place[1] if place else None
        if not isinstance(node, ast.ClassDef) or not self._is_new(home, name, inherited):
            return
        if not inherited and binding(node.body, name) is not None:
            yield home[0], (*home[1], name)
            return
        chains = (chain for base in node.bases for chain in list(_chains(ast.Expr(base), None))[:1])
        above = (cls for chain in chains for cls in self._classes(home[0], chain))
        homes = (list(self.method(cls, name, inherited=False)) for cls in above)
        yield from next(filter(None, homes), [])

    def _classes(self, module: str, chain: Chain) -> Iterator[Home]:
        """Yields the class that names lead to."""
        source = _source(module)
        node = source.names.get(chain[0]) if source else None
        if isinstance(node, ast.ClassDef) and len(chain) == 1:
            yield module, (node.name,)
        elif isinstance(node, (ast.Import, ast.ImportFrom)) and source is not None:
            yield from _Classes(self._package).imported(node, source, chain)


class _Classes(_Lookup):
    """A look-up that ends at a class itself."""

    def _in_class(self, home: Home, chain: Chain) -> Iterator[Home]:
        if not chain:
            yield home
