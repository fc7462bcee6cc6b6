"""The edit of statements inside one upstream function: a run of them becomes one call, as text and as compiled code.

Nothing is imported or executed. The text keeps its number of lines: the call stands on the first line of what it
replaces and the rest is blank, so that every other line of a traceback is upstream's own.

A run is matched by a pattern: `$name` matches any one expression, the same one wherever it stands; `$...name` on a line
of its own matches any statements, none included. Formatting and comments never matter.
"""

from __future__ import annotations
import __future__

import ast
import dataclasses
import functools
import inspect
import re
import textwrap
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torchport.errors import ConflictError, RewriteError, SignatureError
from torchport.patch.declared import Entry, Rewrite
from torchport.source.bindings import (
    DEFINITIONS,
    Chain,
    Definition,
    Function,
    arguments,
    binds,
    blocks,
    in_scope,
    names_bound,
    read_after,
    reads,
)

_HOLE = re.compile(r"\$(\.\.\.)?([A-Za-z_][A-Za-z0-9_]*)")
_SINGLE = "_torchport_hole_one_"
_MANY = "_torchport_hole_many_"
"""What takes the place of `$` and of `$...` before the name of a hole, so that Python can parse the pattern."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One place where a pattern matches: `block[start:end]`, and the statements around the block (`chain`)."""

    block: list[ast.stmt]
    start: int
    end: int
    chain: Chain

    @property
    def statements(self) -> list[ast.stmt]:
        return self.block[self.start : self.end]


def statements(text: str) -> list[ast.stmt]:
    """Returns the statements of a pattern; raises ValueError for bad Python, a misplaced hole, or holes alone."""
    marked = _HOLE.sub(lambda hole: (_MANY if hole[1] else _SINGLE) + hole[2], textwrap.dedent(text))
    try:
        body = ast.parse(marked).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"is not Python: {error.args[0] if error.args else error}") from error
    if all(_hole(statement) for statement in body):
        raise ValueError("names no statement")
    if _hole(body[0]) or _hole(body[-1]):
        raise ValueError("begins or ends with a hole for statements, which would match nothing")
    alone = {id(node.value) for node in ast.walk(ast.Module(body, [])) if isinstance(node, ast.Expr)}
    for node in ast.walk(ast.Module(body, [])):
        if isinstance(node, ast.Name) and node.id.startswith(_MANY) and id(node) not in alone:
            raise ValueError(f"has '$...{node.id.removeprefix(_MANY)}' inside a statement")
    return body


def runs(function: Function, pattern: Sequence[ast.stmt]) -> Iterator[Run]:
    """Yields the runs of a function's own statements that match, none of them overlapping."""
    for block, chain in blocks(function):
        start = 0
        while start < len(block):
            length = _match_run(pattern, block[start:], captured={}, whole=False)
            if length:
                yield Run(block, start, start + length, chain)
            start += length or 1


Captured = dict[str, str]


def _hole(node: ast.AST) -> str | None:
    """Returns the marked name of a hole for statements, `$...name` on a line of its own; None for other nodes."""
    value = node.value if isinstance(node, ast.Expr) else None
    return value.id if isinstance(value, ast.Name) and value.id.startswith(_MANY) else None


def _match_run(pattern: Sequence[ast.AST], nodes: Sequence[ast.AST], captured: Captured, whole: bool) -> int | None:
    """Returns how many of the first nodes a pattern takes, as few as possible, or all if it has to fit the `whole`
    list; None if it does not match. Puts the syntax tree of each hole, as text, into `captured` by the hole's name.
    """
    if not pattern:
        return None if whole and nodes else 0
    if _hole(pattern[0]):
        for skipped in range(len(nodes) + 1):
            rest = _match_run(pattern[1:], nodes[skipped:], captured, whole)
            if rest is not None:
                return skipped + rest
        return None
    trial = dict(captured)
    if not nodes or not _match(pattern[0], nodes[0], trial):
        return None
    rest = _match_run(pattern[1:], nodes[1:], trial, whole)
    if rest is not None:
        captured.update(trial)
    return None if rest is None else rest + 1


def _match(pattern: object, node: object, captured: Captured) -> bool:
    """Returns whether a node fits a pattern's node; puts the syntax tree of each hole, as text, into `captured`."""
    if isinstance(pattern, ast.Name) and pattern.id.startswith(_SINGLE) and isinstance(node, ast.expr):
        seen = ast.dump(node).replace("Store()", "Load()")  # `$x` is the same name where it is assigned and read
        return captured.setdefault(pattern.id, seen) == seen
    if isinstance(pattern, ast.AST):
        if type(pattern) is not type(node):
            return False
        fields = (field for field in pattern._fields if field not in ("ctx", "kind", "type_comment"))
        return all(_match(getattr(pattern, f, None), getattr(node, f, None), captured) for f in fields)
    if isinstance(pattern, list):
        if not isinstance(node, list):
            return False
        if any(map(_hole, pattern)):
            return _match_run(pattern, node, captured, whole=True) is not None
        # Without recursion: a list of numbers may be longer than Python's stack is deep.
        return len(pattern) == len(node) and all(_match(p, n, captured) for p, n in zip(pattern, node, strict=True))
    if isinstance(pattern, str):
        return pattern.replace(_MANY, "$...").replace(_SINGLE, "$") == node  # inside strings a `$` is only a `$`
    return type(pattern) is type(node) and pattern == node


_RESERVED = "__torchport_"

Site = tuple[str, int, str]
"""Where a function is defined, as its code object says: its name, its first line (a decorator's), and its file."""


@dataclasses.dataclass(frozen=True)
class Edit:
    """What a rewrite makes of a file's text."""

    text: str
    part: str  #: The statement of the file that the function is in, on its lines; those before it are blank.
    name: str  #: The global name under which the function is called.
    reads: frozenset[str]  #: Names that the call passes and the function does not bind: its globals must have them.


def parameters(entry: Entry, function: Callable[..., Any]) -> list[str]:
    """Returns the names of the parameters of `put`, all passed by keyword; raises for `*args` and the like."""
    found = inspect.signature(function).parameters.values()
    for parameter in found:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            fact = f"'{entry.reference}' takes '{parameter}' for '{entry.id}'"
            raise SignatureError(entry.place, fact, "Name each value it needs as a parameter", patch=entry.id)
    return [parameter.name for parameter in found]


@functools.lru_cache(maxsize=8)
def spans(text: str) -> list[tuple[int, int]]:
    """Returns the first and last line of each top-level statement that has a body: an edit does not move them."""
    statements = [node for node in ast.parse(text).body if hasattr(node, "body")]  # no other has a function in it
    return [(first_line(node), node.end_lineno or node.lineno) for node in statements]


def first_line(node: ast.stmt) -> int:
    """Returns the `co_firstlineno` of a definition's code object: the line of the first decorator, or else its own."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def edit(entry: Entry, text: str, site: Site, parameters: Sequence[str], home: str | None = None) -> Edit:
    """Returns the text of a file in which calls replace the statements that an entry's pattern matches in a function.

    The number of lines stays. Some statements in a row that the pattern matches are a `Run`.

    Args:
        site: The function in which the statements are.
        parameters: The names that the call passes, from `parameters`.
        home: The file's text before other rewrites, of which the same `spans` are cached already; by default `text`.
    """
    rewrite, lines = entry.rewrite, text.encode().splitlines(keepends=True)
    assert rewrite is not None
    known = spans(text if home is None else home)
    start, end = next((span for span in known if span[0] <= site[1] <= span[1]), (1, len(lines)))
    # A module may have a thousand functions that are rewritten: this statement alone is parsed, at its own line.
    tree = ast.parse("\n" * (start - 1) + b"".join(lines[start - 1 : end]).decode())
    function = _enclosing(entry, tree, site)[-1]
    assert isinstance(function, Function)
    matches = _matches(entry, rewrite, function)
    name = _RESERVED + re.sub(r"[^a-z0-9]", "_", entry.id) + "__"  # dunders are never mangled inside a class
    call = f"{name}({', '.join(f'{each}={each}' for each in parameters)})"
    edits = [(run, _statement(entry, rewrite, function, run, call)) for run in matches]
    for run in matches:
        _check_visible(entry, function, run, parameters)
    # The last run first: the lines and columns of the others stay right.
    for run, statement in sorted(edits, key=lambda pair: pair[0].statements[0].lineno, reverse=True):
        _replace(lines, run, statement)
    local = arguments(function) | names_bound(function.body)
    from_outside = frozenset(name for name in parameters if name not in local)
    edited_part = "\n" * (start - 1) + b"".join(lines[start - 1 : end]).decode()
    _check_meaning(entry, tree, edits, edited_part)
    return Edit(b"".join(lines).decode(), edited_part, name, reads=from_outside)


def _check_meaning(entry: Entry, tree: ast.Module, edits: Sequence[tuple[Run, str]], result: str) -> None:
    """Refuses an edited text that does not parse to the intended tree, for which it makes the same edits in `tree`."""
    # Each `run.block` is a list inside `tree`. The last run goes first: the indices of the others stay right.
    for run, statement in sorted(edits, key=lambda pair: pair[0].start, reverse=True):
        run.block[run.start : run.end] = ast.parse(statement).body
    try:
        same = ast.dump(ast.parse(result)) == ast.dump(tree)
    except SyntaxError:
        same = False
    if not same:
        fact = f"'{entry.id}' cannot be put into {entry.target} without changing what stands around it"
        raise _refusal(entry, fact, "Match whole lines, or more of them")


def _refusal(entry: Entry, fact: str, remedy: str) -> RewriteError:
    return RewriteError(entry.place, fact, remedy, patch=entry.id, target=entry.target)


def _matches(entry: Entry, rewrite: Rewrite, function: Function) -> list[Run]:
    """Returns the runs that an entry's `match` finds; refuses a wrong number, or a run with another patch's call."""
    try:
        pattern = statements(rewrite.match)
    except ValueError as error:
        raise _refusal(entry, f"'match' of '{entry.id}' {error}", "Write whole statements") from error
    matches = list(runs(function, pattern))
    for run in matches:
        for node in (node for statement in run.statements for node in ast.walk(statement)):
            if isinstance(node, ast.Name) and node.id.startswith(_RESERVED):
                fact = f"'{entry.id}' matches what another patch put in {entry.target} ({node.id})"
                raise ConflictError(entry.place, fact, "Let one of the two match less", patches=[entry.id])
    if len(matches) != rewrite.times:
        lines = ", ".join(str(run.statements[0].lineno) for run in matches) or "no line"
        fact = f"'{entry.id}' matches {len(matches)} times in {entry.target} (at {lines}), not {rewrite.times}"
        raise _refusal(entry, fact, "Read the upstream that is installed and mend 'match'")
    return matches


_JUMPS = (ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith)
_SCOPING = (ast.Global, ast.Nonlocal, ast.Delete)


def _statement(entry: Entry, rewrite: Rewrite, function: Function, run: Run, call: str) -> str:
    """Returns the statement that replaces a run: `return call`, `names = call`, or the call alone. Refuses a run that
    jumps: a called function cannot return, yield or break for its caller.
    """
    returns = isinstance(run.statements[-1], ast.Return)
    inside = run.statements[:-1] if returns else run.statements
    jumps: list[ast.AST] = [node for node in in_scope(inside) if isinstance(node, (*_JUMPS, *_SCOPING))]
    jumps += [node for statement in inside for node in _jumps_out(statement)]
    if jumps:
        word = type(jumps[0]).__name__.lower()
        fact = f"The run of '{entry.id}' has a {word} on line {getattr(jumps[0], 'lineno', '?')}"
        raise _refusal(entry, fact, "Match less: a call cannot do that for the function")
    if returns:
        if rewrite.gives:
            raise _refusal(entry, f"'{entry.id}' has 'gives', and its run returns", "Remove 'gives'")
        return f"return {call}"
    gives = _gives(entry, rewrite, function, run)
    return f"{', '.join(gives)} = {call}" if gives else call


def _jumps_out(statement: ast.AST) -> list[ast.AST]:
    """Returns each `break` and `continue` in a statement that is for a loop around the statement."""
    if isinstance(statement, (ast.Break, ast.Continue)):
        return [statement]
    if isinstance(statement, DEFINITIONS):
        return []
    is_loop = isinstance(statement, (ast.For, ast.AsyncFor, ast.While))  # those in its body are for this loop
    children = getattr(statement, "orelse", ()) if is_loop else ast.iter_child_nodes(statement)
    return [jump for child in children for jump in _jumps_out(child)]


def _gives(entry: Entry, rewrite: Rewrite, function: Function, run: Run) -> list[str]:
    """Returns the names that the call's result is assigned to; refuses a `gives` with a missing or wrong name."""
    inside = names_bound(run.statements)
    if rewrite.gives is None and len(inside) > 1:
        fact = f"The run of '{entry.id}' binds {', '.join(sorted(inside))}"
        raise _refusal(entry, fact, "Say in 'gives' which of them the function returns, in its order")
    gives = sorted(inside) if rewrite.gives is None else rewrite.gives
    needed = read_after(function, run.chain, run.block, run.end) & inside
    lost = sorted(needed - set(gives))
    if lost:
        fact = f"'{lost[0]}' is bound in the run of '{entry.id}' and read after it"
        raise _refusal(entry, fact, f"Add '{lost[0]}' to 'gives'")
    taken = arguments(function) | names_bound(function.body).union(*map(reads, function.body))
    for name in gives:
        if name not in inside and name in taken:
            fact = f"'gives' of '{entry.id}' has '{name}', which the run does not bind"
            nothing = "It assigns no name: write 'gives: []', also where it changes an object in place"
            remedy = f"Give some of {', '.join(sorted(inside))}, or a new name" if inside else nothing
            raise _refusal(entry, fact, remedy)
    return gives


def _check_visible(entry: Entry, function: Function, run: Run, parameters: Sequence[str]) -> None:
    """Refuses parameters that the function binds only inside or after the run."""
    inside = {id(node) for node in in_scope(run.statements)}
    loop = next((p for p, _, _ in run.chain if isinstance(p, (ast.For, ast.AsyncFor, ast.While))), None)
    outside = [node for node in in_scope(function.body) if id(node) not in inside]
    before = [node for node in outside if getattr(node, "lineno", 0) <= run.statements[0].lineno]
    names = arguments(function).union(*map(binds, before))
    if loop is not None:  # from its second round on, it also has the names that it bound after the run
        names |= names_bound([loop]) - names_bound(run.statements)
    local = arguments(function) | names_bound(function.body)
    for name in parameters:
        if name in local and name not in names:
            fact = f"'{entry.reference}' takes '{name}', which {entry.target} binds only in or after the run"
            raise _refusal(entry, fact, "Take names that are bound before the run")


def _replace(lines: list[bytes], run: Run, statement: str) -> None:
    """Puts a statement on a run's first line, with the text after the run, and leaves its other lines blank."""
    first, last = run.statements[0], run.statements[-1]
    start = first_line(first) - 1
    end = (last.end_lineno or last.lineno) - 1
    has_decorator = start < first.lineno - 1
    column = len(lines[start]) - len(lines[start].lstrip()) if has_decorator else first.col_offset
    head = lines[start][:column]
    tail = lines[end][last.end_col_offset :]
    # An `elif` is an `if` that stands alone in the outer one's else, and is written without that word.
    word = b"else: " if lines[start][column:].startswith(b"elif") else b""
    lines[start] = head + word + statement.encode() + tail
    for index in range(start + 1, end + 1):
        lines[index] = b"\n"
    if not lines[start].endswith((b"\n", b"\r")):
        lines[start] += b"\n" if end > start else b""


_FUTURE = 0  # the compiler flags of all `from __future__ import ...`
for _feature in __future__.all_feature_names:
    _FUTURE |= getattr(__future__, _feature).compiler_flag


def _enclosing(entry: Entry, tree: ast.Module, site: Site) -> list[Definition]:
    """Returns the `def` of a function after the classes and functions around it, outermost first, or raises."""
    name, line, file = site
    pending: list[tuple[ast.AST, list[Definition]]] = [(tree, [])]
    while pending:
        node, chain = pending.pop()
        if isinstance(node, DEFINITIONS):
            chain = [*chain, node]
            if (node.name, first_line(node)) == (name, line) and isinstance(node, Function):
                return chain
        pending += [(child, chain) for child in ast.iter_child_nodes(node)]
    fact = f"{entry.target} has no definition of its own in {file}"
    remedy = "Only a function written with def can be rewritten; use replace or wrap"
    raise RewriteError(entry.place, fact, remedy, patch=entry.id)


def code(entry: Entry, text: str, old: types.CodeType, filename: str) -> types.CodeType:
    """Returns the edited function's code, to replace the `old` code; raises if its free variables are not the same."""
    chain = _enclosing(entry, ast.parse(text), (old.co_name, old.co_firstlineno, old.co_filename))
    names = [scope.name for scope in chain]
    cells = [name for name in old.co_freevars if name != "__class__"]  # the class around it gives `__class__`
    tree = ast.Module([_alone(chain, cells)], [])
    flags = old.co_flags & _FUTURE
    new: types.CodeType = compile(ast.fix_missing_locations(tree), filename, "exec", flags=flags, dont_inherit=True)
    # The code of each scope is a constant of the code around it.
    for name in names:
        new = next(c for c in new.co_consts if inspect.iscode(c) and c.co_name == name)
    if new.co_freevars != old.co_freevars:
        changed = sorted(set(new.co_freevars) ^ set(old.co_freevars))
        fact = f"'{entry.id}' drops or adds the use of '{changed[0]}', a variable of an enclosing scope"
        raise RewriteError(entry.place, fact, "Match less, or take it as a parameter of 'put'", patch=entry.id)
    return new


def _alone(chain: Sequence[Definition], cells: Sequence[str]) -> Definition:
    """Returns a definition in empty copies of the functions and classes around it. The nearest function binds `cells`,
    so that they are free variables of the definition.
    """
    inner = chain[-1]
    if inner.decorator_list:  # never run; it stays because a code object's first line is its first decorator's
        inner.decorator_list = [ast.Name("_", ast.Load(), lineno=first_line(inner), col_offset=0)]
    for scope in reversed(chain[:-1]):
        if isinstance(scope, ast.ClassDef):
            inner = ast.ClassDef(name=scope.name, bases=[], keywords=[], body=[inner], decorator_list=[])
        else:
            binds: list[ast.stmt] = [ast.Assign([ast.Name(name, ast.Store())], ast.Constant(None)) for name in cells]
            cells = ()  # bound already
            bare = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
            inner = ast.FunctionDef(name=scope.name, args=bare, body=[*binds, inner], decorator_list=[])
    return inner
