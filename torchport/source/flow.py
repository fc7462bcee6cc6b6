"""Says which names a run of statements binds and reads, and which of them are read after it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

from torchport.source.parameters import Function, parameters

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_SCOPES = (*_FUNCTIONS, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_TRIES = (ast.Try, ast.TryStar)

# (statement that holds the block, block that this statement stands in, its index there), outermost first
Chain = tuple[tuple[ast.AST, list[ast.stmt], int], ...]


def blocks(function: Function) -> Iterator[tuple[list[ast.stmt], Chain]]:
    """Yields every block of a function that belongs to its own scope, with the way to it."""
    pending: list[tuple[list[ast.stmt], Chain]] = [(function.body, ())]
    while pending:
        block, chain = pending.pop(0)
        yield block, chain
        for index, statement in enumerate(block):
            if not isinstance(statement, _SCOPES):
                pending += [(inner, (*chain, (statement, block, index))) for inner in inner_blocks(statement)]


def inner_blocks(statement: ast.AST) -> list[list[ast.stmt]]:
    candidates = [getattr(statement, field, None) for field in ("body", "orelse", "finalbody")]
    result = [block for block in candidates if isinstance(block, list) and block]
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        result.append(part.body)
    return result


def in_scope(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yields the nodes that are evaluated in the same scope. Of a nested scope it is its own node alone."""
    for node in nodes:
        yield node
        if isinstance(node, _SCOPES):
            continue
        if isinstance(node, _COMPREHENSIONS):
            yield from (inner for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr))
            yield from (inner.target for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr))
            continue
        yield from in_scope(ast.iter_child_nodes(node))


def binds(node: ast.AST) -> set[str]:
    """Returns the names that a node itself binds, what stands inside it aside."""
    if isinstance(node, ast.Name):
        return set() if isinstance(node.ctx, ast.Load) else {node.id}
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return set(map(taken, node.names))
    if isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
        return {node.name} if node.name else set()
    if isinstance(node, ast.MatchMapping):
        return {node.rest} if node.rest else set()
    return set()


def taken(alias: ast.alias) -> str:
    """Returns the name that a part of an import statement binds."""
    return (alias.asname or alias.name).partition(".")[0]


def names_bound(nodes: Iterable[ast.AST]) -> set[str]:
    return _union(map(binds, in_scope(nodes)))


def arguments(function: Function | ast.Lambda) -> set[str]:
    return {parameter.name for parameter in parameters(function)}


def reads(node: ast.AST) -> set[str]:
    """Returns the names that a node reads from its own scope, what nested scopes capture included."""
    if isinstance(node, ast.Name):
        return set() if isinstance(node.ctx, ast.Store) else {node.id}
    inner = _union(reads(child) for child in ast.iter_child_nodes(node))
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        return inner | {node.target.id}
    if isinstance(node, _FUNCTIONS):
        body = node.body if isinstance(node.body, list) else [node.body]
        outside = _union(reads(part) for part in _evaluated_outside(node))
        return outside | (_union(map(reads, body)) - arguments(node) - names_bound(body))
    if isinstance(node, _COMPREHENSIONS):
        return inner - names_bound(generator.target for generator in node.generators)
    return inner


def _evaluated_outside(function: Function | ast.Lambda) -> list[ast.AST]:
    defaults = [*function.args.defaults, *(d for d in function.args.kw_defaults if d is not None)]
    return [*defaults, *getattr(function, "decorator_list", ())]


def _union(sets: Iterable[set[str]]) -> set[str]:
    return set().union(*sets)


def exposed(statements: Sequence[ast.stmt]) -> tuple[set[str], set[str]]:
    """Returns the names that may be read before they are written, and those that are surely written."""
    read: set[str] = set()
    written: set[str] = set()
    for statement in statements:
        first, sure = _exposed_by(statement)
        read |= first - written
        written |= sure
    jumps = any(isinstance(node, (ast.Break, ast.Continue)) for node in in_scope(statements))
    return read, set() if jumps else written


def _exposed_by(statement: ast.stmt) -> tuple[set[str], set[str]]:
    if isinstance(statement, ast.If):
        body, orelse = exposed(statement.body), exposed(statement.orelse)
        sure = body[1] & orelse[1]
        return reads(statement.test) | ((body[0] | orelse[0]) - names_bound([statement.test])), sure
    if isinstance(statement, (ast.For, ast.AsyncFor)):
        inside = exposed(statement.body)[0] - names_bound([statement.target])
        return reads(statement.iter) | inside | exposed(statement.orelse)[0], set()
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        first = _union(reads(item) for item in statement.items)
        names = names_bound(statement.items)
        inside, written = exposed(statement.body)
        return first | (inside - names), names | written
    if isinstance(statement, ast.Delete):
        return reads(statement), set()
    if inner_blocks(statement) and not isinstance(statement, _SCOPES):
        return reads(statement), set()
    return reads(statement), names_bound([statement])


def read_after(function: Function, chain: Chain, block: list[ast.stmt], end: int) -> set[str]:
    """Returns the names that may be read after a run and before they are written again."""
    live, sure = exposed(block[end:])
    for parent, outer, index in reversed(chain):
        if isinstance(parent, _LOOPS):
            live |= exposed([parent])[0] - sure
            sure = set()  # the loop may end at its head, before the rest of its body is reached
        if isinstance(parent, _TRIES):
            live |= _union(exposed(inner)[0] for inner in inner_blocks(parent))
        first, written = exposed(outer[index + 1 :])
        live |= first - sure
        sure |= written
    nested = (node for node in in_scope(function.body) if isinstance(node, _SCOPES))
    return live | _union(map(reads, nested))
