"""Compiles one function out of a file's text so that its code fits the live function: same cells, same lines."""

from __future__ import annotations
import __future__

import ast
import inspect
import io
import linecache
import types
from collections.abc import Callable, Sequence

from torchport.errors import RewriteError
from torchport.patch.declared.entry import Entry
from torchport.patch.rewriting.rewrite import first_line
from torchport.source.parameters import Function

_FUTURE = 0
for _feature in __future__.all_feature_names:
    _FUTURE |= getattr(__future__, _feature).compiler_flag

Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def source_text(entry: Entry, function: types.FunctionType) -> str:
    """Returns the text that a live function was compiled from. Of a rewritten one it is what really runs."""
    lines = linecache.getlines(function.__code__.co_filename, function.__globals__)
    if not lines:
        fact = f"The source of {entry.target} cannot be read ({function.__code__.co_filename})"
        raise RewriteError(entry.place, fact, "Install the upstream with its sources", patch=entry.id)
    return "".join(lines)


def finder(entry: Entry, old: types.CodeType) -> Callable[[ast.Module], Function]:
    """Returns a function that finds a code object's definition in a tree, by its name and first line."""

    def find(tree: ast.Module) -> Function:
        return _chain(entry, tree, old)[-1]  # type: ignore[return-value]

    return find


def _chain(entry: Entry, tree: ast.Module, old: types.CodeType) -> list[Scope]:
    """Returns the definitions that lead to a code object's, outermost first."""
    pending: list[tuple[ast.AST, list[Scope]]] = [(tree, [])]
    while pending:
        node, chain = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            chain = [*chain, node]
            same = (node.name, first_line(node)) == (old.co_name, old.co_firstlineno)
            if same and not isinstance(node, ast.ClassDef):
                return chain
        pending += [(child, chain) for child in ast.iter_child_nodes(node)]
    fact = f"{entry.target} has no definition of its own in {old.co_filename}"
    remedy = "Only a function written with def can be rewritten; use replace or wrap"
    raise RewriteError(entry.place, fact, remedy, patch=entry.id)


def code(entry: Entry, text: str, old: types.CodeType, filename: str) -> types.CodeType:
    """Returns the code of the edited function, fit to take the place of the old one."""
    chain = _chain(entry, ast.parse(text), old)
    names = [scope.name for scope in chain]
    cells = [name for name in old.co_freevars if name != "__class__"]
    tree = ast.Module([_alone(chain, cells)], [])
    flags = old.co_flags & _FUTURE
    outer = compile(ast.fix_missing_locations(tree), filename, "exec", flags=flags, dont_inherit=True)
    new = _inner(outer, names)
    if new.co_freevars != old.co_freevars:
        changed = sorted(set(new.co_freevars) ^ set(old.co_freevars))
        fact = f"'{entry.id}' drops or adds the use of '{changed[0]}', a variable of an enclosing scope"
        raise RewriteError(entry.place, fact, "Match less, or take it as a parameter of 'put'", patch=entry.id)
    return new


def _alone(chain: Sequence[Scope], cells: Sequence[str]) -> Scope:
    """Returns the definition inside bare copies of its enclosing ones, which bind the variables it closes over."""
    inner: Scope = chain[-1]
    if inner.decorator_list:  # never run; it stays because a code object's first line is its first decorator's
        inner.decorator_list = [ast.Name("_", ast.Load(), lineno=first_line(inner), col_offset=0)]
    for scope in reversed(chain[:-1]):
        if isinstance(scope, ast.ClassDef):
            inner = ast.ClassDef(name=scope.name, bases=[], keywords=[], body=[inner], decorator_list=[])
        else:
            binds: list[ast.stmt] = [ast.Assign([ast.Name(name, ast.Store())], ast.Constant(None)) for name in cells]
            cells = ()
            bare = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
            inner = ast.FunctionDef(name=scope.name, args=bare, body=[*binds, inner], decorator_list=[])
    return inner


def _inner(outer: types.CodeType, names: Sequence[str]) -> types.CodeType:
    for name in names:
        outer = next(c for c in outer.co_consts if inspect.iscode(c) and c.co_name == name)
    return outer


def remember(filename: str, text: str, home: str) -> None:
    """Lets tracebacks and `inspect.getsource` show a text under a filename that is on no disk.

    The lines that it shares with its home are those of the home: a module may have a thousand such texts.
    """
    pairs = zip(io.StringIO(text).readlines(), linecache.getlines(home), strict=False)
    linecache.cache[filename] = (len(text), None, [old if old == new else new for new, old in pairs], filename)
