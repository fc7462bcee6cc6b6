"""Which statement of a module or class binds a name, conditional statements included."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence

from torchport.source.flow import binds

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclasses.dataclass(frozen=True)
class Binding:
    """Where a dotted path leads in a syntax tree."""

    #: The statement that binds the path's last name, or its first name that is bound by an import; None if the source
    #: does not say (a star import, an inherited name, a name made at run time).
    node: ast.stmt | None
    depth: int
    #: Whether the name may come from somewhere that the source does not show.
    open: bool


def binding_at(tree: ast.Module, path: Sequence[str]) -> Binding:
    holder: ast.Module | ast.ClassDef = tree
    for depth, name in enumerate(path, 1):
        node = last_bindings(holder).get(_as_written(name, path[: depth - 1]))
        if node is None:
            return Binding(None, depth - 1, _is_loose(holder))
        if depth == len(path) or not isinstance(node, ast.ClassDef):
            return Binding(node, depth, depth < len(path))
        holder = node
    raise AssertionError("a path has at least one name")


def _as_written(name: str, above: Sequence[str]) -> str:
    """Returns a name as its class has it: Python makes `_K__name` of a class's own `__name`."""
    prefix = f"_{above[-1].lstrip('_')}" if above else None
    private = prefix is not None and name.startswith(f"{prefix}__") and not name.endswith("__")
    return name.removeprefix(prefix) if private and prefix is not None else name


def at_import(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Returns the statements that run when a module or class body does, conditional ones included."""
    return (statement for statement, _ in _under_conditions(body))


def _under_conditions(
    body: Iterable[ast.stmt], above: tuple[ast.stmt, ...] = ()
) -> Iterator[tuple[ast.stmt, tuple[ast.stmt, ...]]]:
    for statement in body:
        yield statement, above
        if isinstance(statement, DEFINITIONS):
            continue
        inside = (*above, statement) if isinstance(statement, ast.If) else above
        blocks = [getattr(statement, field, None) or () for field in ("body", "orelse", "finalbody")]
        for block in (*blocks, *(handler.body for handler in getattr(statement, "handlers", ()))):
            yield from _under_conditions(block, inside)


def _changed_by(statement: ast.stmt) -> set[str]:
    """Returns the names that a loop or a `with` binds, and those of which an item or attribute is assigned."""
    if isinstance(statement, (ast.For, ast.AsyncFor)):
        targets: list[ast.expr] = [statement.target]
    elif isinstance(statement, (ast.With, ast.AsyncWith)):
        targets = [item.optional_vars for item in statement.items if item.optional_vars]
    elif isinstance(statement, ast.Assign):
        targets = [target for target in statement.targets if isinstance(target, (ast.Subscript, ast.Attribute))]
    else:
        return set()
    return {node.id for target in targets for node in ast.walk(_base(target)) if isinstance(node, ast.Name)}


def _base(target: ast.expr) -> ast.expr:
    return _base(target.value) if isinstance(target, (ast.Subscript, ast.Attribute)) else target


@functools.cache
def last_bindings(holder: ast.Module | ast.ClassDef) -> dict[str, ast.stmt]:
    """Returns the last statement that binds each name. A property's setter is no binding of its own."""
    return {name: s for s in at_import(holder.body) for name in _bound_by(s) if not _is_accessor(s, name)}


def all_bindings(body: Iterable[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """Returns all statements that bind each name, or a part of it, with the conditions that they stand under."""
    result: dict[str, list[ast.stmt]] = {}
    for statement, conditions in _under_conditions(body):
        for name in _bound_by(statement) | _changed_by(statement):
            known = result.setdefault(name, [])
            known += [condition for condition in (*conditions, statement) if condition not in known]
    return result


def definitions(body: Iterable[ast.stmt]) -> list[Definition]:
    return [statement for statement in at_import(body) if isinstance(statement, DEFINITIONS)]


def _bound_by(statement: ast.stmt) -> set[str]:
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        targets = [statement.target]
    return binds(statement).union(*(binds(node) for target in targets for node in ast.walk(target)))


def _is_accessor(statement: ast.stmt, name: str) -> bool:
    decorators = getattr(statement, "decorator_list", ())
    return any(
        isinstance(d, ast.Attribute) and d.attr in ("setter", "deleter", "getter")
        and isinstance(d.value, ast.Name) and d.value.id == name
        for d in decorators
    )  # fmt: skip


_DYNAMIC = {"globals", "vars", "setattr", "exec", "locals", "__getattr__"}


def _is_loose(holder: ast.Module | ast.ClassDef) -> bool:
    """Returns whether a module or class may have names that its body does not show."""
    if isinstance(holder, ast.ClassDef) and (holder.bases or holder.keywords or holder.decorator_list):
        return True
    for statement in at_import(holder.body):
        if isinstance(statement, ast.ImportFrom) and any(alias.name == "*" for alias in statement.names):
            return True
        if isinstance(statement, DEFINITIONS):
            if statement.name == "__getattr__":
                return True
            continue
        names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        if names & _DYNAMIC:
            return True
    return False
