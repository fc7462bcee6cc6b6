"""The statements that bind a name; the names that statements bind and read; a function's parameters as written."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from inspect import Parameter, Signature
from typing import Any, NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_SCOPES = (*_FUNCTIONS, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_TRIES = (ast.Try, ast.TryStar)

# (statement that holds the block, block that this statement stands in, its index there), outermost first
Chain = tuple[tuple[ast.AST, list[ast.stmt], int], ...]


@dataclasses.dataclass(frozen=True)
class Binding:
    """Where a dotted path leads in a syntax tree."""

    #: The statement that binds the path's last name, or its first name that is bound by an import; None if the source
    #: does not say (a star import, an inherited name, a name made at run time).
    node: ast.stmt | None
    depth: int  #: How many of the path's names were found.
    open: bool  #: Whether the name may come from somewhere that the source does not show.


def binding_at(tree: ast.Module, path: Sequence[str]) -> Binding:
    """Returns the statement that binds the last name of a path, or its first name that is no class of this source.

    `("Block", "forward")` leads to the `def` in the class; `("nn", "Linear")` to `import torch.nn as nn`, at depth 1.
    """
    holder: ast.Module | ast.ClassDef = tree
    for depth, name in enumerate(path, 1):
        mangled = f"_{path[depth - 2].lstrip('_')}" if depth > 1 else ""
        if mangled and name.startswith(f"{mangled}__") and not name.endswith("__"):
            # Inside `class K` Python makes `_K__name` of the source's `__name`.
            name = name.removeprefix(mangled)
        node = last_bindings(holder).get(name)
        if node is None:
            return Binding(None, depth - 1, open=_may_have_other_names(holder))
        if depth == len(path) or not isinstance(node, ast.ClassDef):
            return Binding(node, depth, open=depth < len(path))
        holder = node
    raise AssertionError("a path has at least one name")


def at_import(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Returns the statements of a body and of its `if`, `try` and loops; of a function or class the `def` alone."""
    return (statement for statement, _ in _under_conditions(body))


def _under_conditions(
    body: Iterable[ast.stmt], above: tuple[ast.stmt, ...] = ()
) -> Iterator[tuple[ast.stmt, tuple[ast.stmt, ...]]]:
    """Yields the statements that run when a module is imported, each with the `if` statements around it."""
    for statement in body:
        yield statement, above
        if isinstance(statement, DEFINITIONS):
            continue
        inside = (*above, statement) if isinstance(statement, ast.If) else above
        for block in inner_blocks(statement):
            yield from _under_conditions(block, inside)


def _changed_by(statement: ast.stmt) -> set[str]:
    """Returns the names that a loop or `with` binds, and the names whose items or attributes a statement assigns.

    `for key in table:` changes `key`; `table["a"].b = 1` changes `table`.
    """
    if isinstance(statement, (ast.For, ast.AsyncFor)):
        targets: list[ast.expr] = [statement.target]
    elif isinstance(statement, (ast.With, ast.AsyncWith)):
        targets = [item.optional_vars for item in statement.items if item.optional_vars]
    elif isinstance(statement, ast.Assign):
        targets = [target for target in statement.targets if isinstance(target, (ast.Subscript, ast.Attribute))]
    else:
        return set()
    names: set[str] = set()
    for target in targets:
        while isinstance(target, (ast.Subscript, ast.Attribute)):
            target = target.value
        names |= {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
    return names


@functools.cache
def last_bindings(holder: ast.Module | ast.ClassDef) -> dict[str, ast.stmt]:
    """Returns the last statement of a module or class that binds each name. A property's setter does not count."""
    statements = at_import(holder.body)
    return {name: node for node in statements for name in _bound_by(node) if not _is_accessor(node, name)}


def all_bindings(body: Iterable[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """Returns by name all statements that bind or change it, each after the `if` statements around it."""
    result: dict[str, list[ast.stmt]] = {}
    for statement, conditions in _under_conditions(body):
        for name in _bound_by(statement) | _changed_by(statement):
            known = result.setdefault(name, [])
            known += [condition for condition in (*conditions, statement) if condition not in known]
    return result


def definitions(body: Iterable[ast.stmt]) -> list[Definition]:
    """Returns the functions and classes that a module or class defines when it runs, nested ones aside."""
    return [statement for statement in at_import(body) if isinstance(statement, DEFINITIONS)]


def _bound_by(statement: ast.stmt) -> set[str]:
    """Returns the names that a statement binds, the targets of an assignment included."""
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        targets = [statement.target]
    return binds(statement).union(*(binds(node) for target in targets for node in ast.walk(target)))


def _is_accessor(statement: ast.stmt, name: str) -> bool:
    """Returns whether a statement adds a setter, deleter or getter to a property: `@x.setter def x(self, value)`."""
    marks = [mark for mark in getattr(statement, "decorator_list", ()) if isinstance(mark, ast.Attribute)]
    return any(mark.attr in ("setter", "deleter", "getter") and ast.unparse(mark.value) == name for mark in marks)


_DYNAMIC = {"globals", "vars", "setattr", "exec", "locals", "__getattr__"}


def _may_have_other_names(holder: ast.Module | ast.ClassDef) -> bool:
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


def blocks(function: Function) -> Iterator[tuple[list[ast.stmt], Chain]]:
    """Yields each list of statements in a function, nested functions aside, with the statements around the list."""
    pending: list[tuple[list[ast.stmt], Chain]] = [(function.body, ())]
    while pending:
        block, chain = pending.pop(0)
        yield block, chain
        for index, statement in enumerate(block):
            if not isinstance(statement, _SCOPES):
                pending += [(inner, (*chain, (statement, block, index))) for inner in inner_blocks(statement)]


def inner_blocks(statement: ast.AST) -> list[list[ast.stmt]]:
    """Returns the blocks directly in a statement: its body, `else`, `finally`, handlers and cases."""
    candidates = [getattr(statement, field, None) for field in ("body", "orelse", "finalbody")]
    result = [block for block in candidates if isinstance(block, list) and block]
    parts = (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ()))
    return [*result, *(part.body for part in parts)]


def in_scope(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yields nodes and the nodes inside them; of a nested function or class the node alone, as it is a new scope."""
    for node in nodes:
        yield node
        if isinstance(node, _SCOPES):
            continue
        # A comprehension is a scope, too, but `:=` in it binds a name outside of it.
        if isinstance(node, _COMPREHENSIONS):
            yield from (inner for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr))
            yield from (inner.target for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr))
            continue
        yield from in_scope(ast.iter_child_nodes(node))


def binds(node: ast.AST) -> set[str]:
    """Returns the names that a node itself binds, without the nodes inside it: `{"f"}` for `def f(x): y = x`."""
    if isinstance(node, ast.Name):
        return set() if isinstance(node.ctx, ast.Load) else {node.id}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return set(map(bound_name, node.names))
    if isinstance(node, (*DEFINITIONS, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
        return {node.name} if node.name else set()
    if isinstance(node, ast.MatchMapping):
        return {node.rest} if node.rest else set()
    return set()


def bound_name(alias: ast.alias) -> str:
    """Returns the name that a part of an import statement binds: `a` for `import a.b`, `c` for `import a.b as c`."""
    return (alias.asname or alias.name).partition(".")[0]


def names_bound(nodes: Iterable[ast.AST]) -> set[str]:
    """Returns the names that nodes bind in their own scope: `{"x", "f"}` for `x = 1` and `def f(): y = 2`."""
    return set().union(*map(binds, in_scope(nodes)))


def arguments(function: Function | ast.Lambda) -> set[str]:
    return {parameter.name for parameter in parameters(function)}


def reads(node: ast.AST) -> set[str]:
    """Returns the names that a node reads from its own scope, with those that functions inside it capture."""
    if isinstance(node, ast.Name):
        return set() if isinstance(node.ctx, ast.Store) else {node.id}
    inner: set[str] = set().union(*map(reads, ast.iter_child_nodes(node)))
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        return inner | {node.target.id}
    if isinstance(node, _FUNCTIONS):
        body = node.body if isinstance(node.body, list) else [node.body]
        defaults = [*node.args.defaults, *(default for default in node.args.kw_defaults if default is not None)]
        outside = set().union(*map(reads, (*defaults, *getattr(node, "decorator_list", ()))))
        return outside | (set().union(*map(reads, body)) - arguments(node) - names_bound(body))
    if isinstance(node, _COMPREHENSIONS):
        return inner - names_bound(generator.target for generator in node.generators)
    return inner


def exposed(statements: Sequence[ast.stmt]) -> tuple[set[str], set[str]]:
    """Returns the names that statements may read before they write them, and the names that they surely write."""
    read: set[str] = set()
    written: set[str] = set()
    for statement in statements:
        first, sure = _exposed_by(statement)
        read |= first - written
        written |= sure
    jumps = any(isinstance(node, (ast.Break, ast.Continue)) for node in in_scope(statements))
    # A jump may leave out any of the writes.
    return read, set() if jumps else written


def _exposed_by(statement: ast.stmt) -> tuple[set[str], set[str]]:
    """Returns the names that a statement may read before it writes them, and the names that it surely writes."""
    if isinstance(statement, ast.If):
        body_reads, body_writes = exposed(statement.body)
        else_reads, else_writes = exposed(statement.orelse)
        inside = (body_reads | else_reads) - names_bound([statement.test])
        return reads(statement.test) | inside, body_writes & else_writes
    if isinstance(statement, (ast.For, ast.AsyncFor)):
        inside = exposed(statement.body)[0] - names_bound([statement.target])
        # Nothing is surely written: there may be no item.
        return reads(statement.iter) | inside | exposed(statement.orelse)[0], set()
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        names = names_bound(statement.items)
        inside, written = exposed(statement.body)
        return (inside - names).union(*map(reads, statement.items)), names | written
    if isinstance(statement, ast.Delete) or (inner_blocks(statement) and not isinstance(statement, _SCOPES)):
        return reads(statement), set()
    return reads(statement), names_bound([statement])


def read_after(function: Function, chain: Chain, block: list[ast.stmt], end: int) -> set[str]:
    """Returns the names that may be read after `block[:end]` before they are written; `chain` leads to the block."""
    live, sure = exposed(block[end:])  # names that may be read, and names that are surely written before
    for parent, outer, index in reversed(chain):
        if isinstance(parent, _LOOPS):
            live |= exposed([parent])[0] - sure
            sure = set()  # the loop may end at its head, before the rest of its body is reached
        # An exception leads to its other blocks.
        if isinstance(parent, _TRIES):
            live = live.union(*(exposed(inner)[0] for inner in inner_blocks(parent)))
        first, written = exposed(outer[index + 1 :])
        live |= first - sure
        sure |= written
    # A nested function may be called at any later time.
    nested = (node for node in in_scope(function.body) if isinstance(node, _SCOPES))
    return live.union(*map(reads, nested))


POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
STARRED = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)

# Decorators that keep the signature of the function under them.
_KEEPING = {
    "staticmethod", "classmethod", "property", "cached_property", "cache", "lru_cache", "abstractmethod", "no_grad",
    "inference_mode", "disable", "override", "final", "deprecated",
}  # fmt: skip


class WrittenParameter(NamedTuple):
    """A parameter as the source has it."""

    name: str
    argument: ast.arg
    kind: Any  #: As `inspect.Parameter.kind`.
    default: ast.expr | None


def parameters(function: Function | ast.Lambda) -> list[WrittenParameter]:
    """Returns a function's parameters, in the order in which they are written."""
    spec = function.args
    positional = [*spec.posonlyargs, *spec.args]
    defaults = [None] * (len(positional) - len(spec.defaults)) + spec.defaults
    kinds = [Parameter.POSITIONAL_ONLY] * len(spec.posonlyargs) + [Parameter.POSITIONAL_OR_KEYWORD] * len(spec.args)
    written: list[tuple[ast.arg | None, Any, ast.expr | None]] = [*zip(positional, kinds, defaults, strict=True)]
    written.append((spec.vararg, Parameter.VAR_POSITIONAL, None))
    for argument, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        written.append((argument, Parameter.KEYWORD_ONLY, default))
    written.append((spec.kwarg, Parameter.VAR_KEYWORD, None))
    return [WrittenParameter(node.arg, node, kind, default) for node, kind, default in written if node is not None]


def signature(function: Function) -> Signature:
    """Returns a function's signature as its `def` has it, decorators left aside; `...` stands for every default."""
    bare = []
    for name, _, kind, default in parameters(function):
        bare.append(Parameter(name, kind, default=Parameter.empty if default is None else ...))
    return Signature(bare)


def written_signature(function: Function) -> Signature | None:
    """Returns a function's signature from its source; None if a decorator may change it."""
    for decorator in function.decorator_list:
        named = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = named.attr if isinstance(named, ast.Attribute) else getattr(named, "id", "")
        if name not in _KEEPING:
            return None
    return signature(function)
