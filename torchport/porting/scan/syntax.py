"""A file's syntax as events: what each function does, in order, each with the conditions that it stands under.

A function's nested functions count as its own. What runs at import is the function `<module>`.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from torchport.source.bindings import Function

MODULE = "<module>"


class _Guard(NamedTuple):
    """A condition that code stands under."""

    test: ast.expr
    wanted: bool  #: The truth that the test must have.
    refused: bool = False  #: Whether the other truth raises.


Guards = tuple[_Guard, ...]
NEVER = _Guard(ast.Constant(False), wanted=True)  # no code runs under it
TRIED = _Guard(ast.Constant(True), True)
"""Stands among the conditions of code in a `try` that may fail without ending the function."""
_JUMPS = (ast.Return, ast.Raise, ast.Continue, ast.Break)


class Act(enum.IntEnum):
    """What an event does."""

    CALL = enum.auto()
    CHAIN = enum.auto()  #: A name such as `a`, or a chain such as `a.b.c`, that is read and not called.
    TEST = enum.auto()  #: A condition of `if`, `while`, `assert`, `a if b else c`, or of a comprehension.
    INDEX = enum.auto()  #: A subscript that is read.
    WRITE = enum.auto()  #: A subscript that is assigned to; its value is the second node.
    ASSIGN = enum.auto()  #: A target, and the value as the second node; of a loop, the iterable.
    OPERATOR = enum.auto()  #: A binary operator or comparison.
    TEXT = enum.auto()  #: A string that names CUDA.
    IMPORT = enum.auto()
    WITH = enum.auto()
    DECORATOR = enum.auto()
    ENTER = enum.auto()  #: A nested function begins.


@dataclasses.dataclass(slots=True, eq=False)
class Event:
    """Something that a statement or expression does."""

    act: Act
    node: ast.AST
    guards: Guards  #: The conditions that it stands under.
    loop: bool  #: Whether it is in a loop.
    chain: tuple[str, ...] = ()  #: The names of what a CALL calls or a CHAIN reads; empty for `f().b`.
    value: ast.expr | None = None  #: A second node: the value of an assignment, or the iterable of a loop.
    loops_over: bool = False  #: Whether `value` is the iterable of a loop.


@dataclasses.dataclass(eq=False)
class Body:
    """A function, a class's decorators, or what a module does at import."""

    name: str
    node: Function | ast.ClassDef | ast.Module
    owner: str = ""  #: The class that it is a method of, by name; empty for none.
    events: list[Event] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def by_act(self) -> dict[Act, list[Event]]:
        """The events of each `Act`, in order."""
        result: dict[Act, list[Event]] = defaultdict(list)
        for event in self.events:
            result[event.act].append(event)
        return result


def bodies(tree: ast.Module) -> tuple[list[Body], dict[str, ast.ClassDef]]:
    """Returns the functions of a module, `<module>` first, and its classes by qualified name."""
    walk = _WalkAtImport(Body(MODULE, tree))
    walk.statements(tree.body)
    return walk.bodies, walk.classes


def _guards_after(statement: ast.stmt) -> Guards:
    """Returns the conditions of the code after a statement that may jump: after `if x: return`, that x is false."""
    if isinstance(statement, _JUMPS):
        return (NEVER,)
    if isinstance(statement, ast.If):
        if _jumps(statement.body):
            return (_Guard(statement.test, wanted=False, refused=isinstance(statement.body[-1], ast.Raise)),)
        if statement.orelse and _jumps(statement.orelse):
            return (_Guard(statement.test, wanted=True, refused=isinstance(statement.orelse[-1], ast.Raise)),)
    return ()


def _jumps(statements: list[ast.stmt]) -> bool:
    """Returns whether statements always end with `return`, `raise`, `continue` or `break`."""
    last = statements[-1]
    both = isinstance(last, ast.If) and bool(last.orelse) and _jumps(last.body) and _jumps(last.orelse)
    return both or isinstance(last, _JUMPS)


@dataclasses.dataclass(eq=False)
class _Walk:
    """Lists what statements and expressions do as events, each with the conditions around it (`guards`)."""

    events: list[Event]
    guards: Guards = ()
    loop: bool = False

    def _note(self, act: Act, node: ast.AST, value: ast.expr | None = None, loops_over: bool = False) -> None:
        self.events.append(Event(act, node, self.guards, self.loop, (), value, loops_over))

    def head(self, node: Function | ast.ClassDef) -> None:
        """Notes what a definition does where it stands: its decorators, and a function's defaults."""
        for decorator in node.decorator_list:
            self._note(Act.DECORATOR, decorator)
            self.expression(decorator)
        for default in () if isinstance(node, ast.ClassDef) else (*node.args.defaults, *node.args.kw_defaults):
            self.expression(default)

    def statements(self, statements: list[ast.stmt]) -> None:
        """Walks statements in order; the code after `if x: return` stands under the condition that x is false."""
        before = self.guards
        for statement in statements:
            self.statement(statement)
            self.guards += _guards_after(statement)
        self.guards = before

    def statement(self, node: ast.stmt) -> None:
        """Notes what a statement does, in the order in which Python runs its expressions and inner statements."""
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            self._assignment(node)
        elif isinstance(node, ast.If):
            self._if_else(node)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                self._note(Act.WITH, item.context_expr)
                self.expression(item.context_expr)
                if item.optional_vars:
                    self._target(item.optional_vars, item.context_expr)
            self.statements(node.body)
        elif isinstance(node, (ast.Try, ast.TryStar)):
            goes_on = bool(node.handlers) and not _jumps(node.handlers[-1].body)  # after an error, too
            self._under(node.body, *([TRIED] if goes_on else []))
            for body in (*(handler.body for handler in node.handlers), node.orelse, node.finalbody):
                self.statements(body)
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            self._loop_statement(node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            outer = self.loop
            self.loop = False
            self._note(Act.ENTER, node)
            self.head(node)
            self.statements(node.body)
            self.loop = outer
        elif isinstance(node, ast.ClassDef):
            self.statements(node.body)
        elif isinstance(node, ast.Assert):
            self.test(node.test)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            self._note(Act.IMPORT, node)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        elif isinstance(node, ast.Match):
            self.expression(node.subject)
            for case in node.cases:
                self.statements(case.body)
        else:
            self._each_part(node)

    def _loop_statement(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        """Notes the condition or iterable of a loop, then its body; its `else` block counts as outside of the loop."""
        outer = self.loop
        if isinstance(node, ast.While):
            self.test(node.test)
        else:
            self.expression(node.iter)
            self._target(node.target, node.iter, loops_over=True)
        self.loop = True
        self.statements(node.body)
        self.loop = outer
        self.statements(node.orelse)

    def _assignment(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> None:
        if node.value is None:  # an annotation alone, as in `x: int`
            return
        self.expression(node.value)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(node, ast.AugAssign) and not isinstance(target, ast.Subscript):
                self._target(target, ast.BinOp(target, node.op, node.value))  # `x += 1` is `x = x + 1`
            else:
                self._target(target, node.value)

    def _target(self, target: ast.expr, value: ast.expr, loops_over: bool = False) -> None:
        """Notes an assignment. `x[i] = value` is a WRITE, and the events in `x` and `i` are noted, too."""
        if isinstance(target, ast.Subscript):
            self._note(Act.WRITE, target, value)
            self.expression(target.value)
            self.expression(target.slice)
            return
        self._note(Act.ASSIGN, target, value, loops_over)

    def test(self, node: ast.expr) -> None:
        """Notes a condition, and the events in it."""
        self._note(Act.TEST, node)
        self.expression(node)

    def expression(self, node: Any) -> None:
        """Notes the events in an expression, in the order in which Python computes it."""
        kind = type(node)
        if kind is ast.Name:
            if type(node.ctx) is ast.Load:
                self.events.append(Event(Act.CHAIN, node, self.guards, self.loop, (node.id,)))
        elif kind is ast.Attribute:
            chain = chain_of(node)
            self.events.append(Event(Act.CHAIN, node, self.guards, self.loop, chain))
            if not chain:
                self._start(node)
        elif kind is ast.Constant:
            if names_cuda(node):
                self._note(Act.TEXT, node)
        elif kind is ast.Subscript:
            self.expression(node.value)
            self.expression(node.slice)
            if isinstance(node.ctx, ast.Load):
                self._note(Act.INDEX, node)
        elif node is not None:
            _WALKS.get(kind, _Walk._each_part)(self, node)

    def _each_part(self, node: Any) -> None:
        for part in ast.iter_child_nodes(node):
            if part._fields:  # operators have none
                self.expression(part)

    def _start(self, chain: ast.expr) -> None:
        """Notes the events at the start of a chain of attributes, such as `f()` in `f().a.b`."""
        while isinstance(chain, ast.Attribute):
            chain = chain.value
        self.expression(chain)

    def _f_string(self, node: ast.JoinedStr) -> None:
        """Notes a text that begins with `cuda`, and the expressions in braces."""
        first = node.values[0] if node.values else None
        if isinstance(first, ast.Constant) and str(first.value).startswith("cuda"):
            self._note(Act.TEXT, node)
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.expression(part.value)

    def _if_else(self, node: ast.If | ast.IfExp) -> None:
        """Notes the condition, and walks each branch under it: code under `if cuda:` needs CUDA."""
        self.test(node.test)
        self._under(node.body, _Guard(node.test, wanted=True))
        self._under(node.orelse, _Guard(node.test, wanted=False))

    def _under(self, part: ast.expr | list[ast.stmt], *guards: _Guard) -> None:
        """Walks an expression or statements under more conditions."""
        outer = self.guards
        self.guards += guards
        if isinstance(part, list):
            self.statements(part)
        else:
            self.expression(part)
        self.guards = outer

    def _and_or(self, node: ast.BoolOp) -> None:
        """Walks `a and b` or `a or b`: b is computed under the condition that a is true, or false."""
        outer = self.guards
        for value in node.values:
            self.expression(value)
            self.guards += (_Guard(value, wanted=isinstance(node.op, ast.And)),)
        self.guards = outer

    def _operator(self, node: ast.BinOp | ast.Compare) -> None:
        """Notes an operator or comparison; not `device.type == "cuda"`, which puts nothing on CUDA."""
        if isinstance(node, ast.BinOp) or not any(map(names_cuda, (node.left, *node.comparators))):
            self._note(Act.OPERATOR, node)
            self._each_part(node)

    def _call(self, node: ast.Call) -> None:
        """Notes the events in a call's arguments, then the call, as Python computes them."""
        chain = chain_of(node.func)
        if not chain:
            self._start(node.func)
        for argument in node.args:
            self.expression(argument)
        for keyword in node.keywords:
            self.expression(keyword.value)
        self.events.append(Event(Act.CALL, node, self.guards, self.loop, chain))

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        """Notes the events of a comprehension in Python's order: iterables, targets and conditions, then the values."""
        for part in node.generators:
            self.expression(part.iter)
            self._note(Act.ASSIGN, part.target, part.iter, loops_over=True)
            for condition in part.ifs:
                self.test(condition)
        for value in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.expression(value)


class _WalkAtImport(_Walk):
    """Lists what runs when a module is imported, and gives each function and class that it meets a body of its own."""

    def __init__(self, module_body: Body) -> None:
        super().__init__(module_body.events)
        self.bodies = [module_body]
        self.classes: dict[str, ast.ClassDef] = {}
        self._owner = ""  # the qualified name of the class that is walked

    def statement(self, node: ast.stmt) -> None:
        """Adds a body for a function or decorated class; any other statement, and all in a loop, is the module's."""
        if self.loop or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            super().statement(node)
            return
        name = f"{self._owner}.{node.name}" if self._owner else node.name
        if isinstance(node, ast.ClassDef):
            outer = self._owner
            self._owner = name
            self.classes[name] = node
            if node.decorator_list:
                self.bodies.append(Body(name, node, name))
                _Walk(self.bodies[-1].events).head(node)
            self.statements(node.body)
            self._owner = outer
            return
        body = Body(name, node, self._owner)
        self.bodies.append(body)
        walk = _Walk(body.events)
        walk.head(node)
        # The calls in its defaults and decorators run where it is defined: they are the module's events.
        called = [decorator.func if isinstance(decorator, ast.Call) else decorator for decorator in node.decorator_list]
        at_import = [event for event in body.events if event.act is Act.CALL and event.node not in node.decorator_list]
        body.events[:] = [event for event in body.events if event not in at_import]
        self.events += [dataclasses.replace(event, guards=self.guards) for event in at_import]
        self.events += [Event(Act.CHAIN, node, self.guards, False, chain_of(node)) for node in called]
        walk.statements(node.body)


_WALKS: dict[type, Callable[[_Walk, Any], None]] = {
    ast.Call: _Walk._call, ast.IfExp: _Walk._if_else, ast.JoinedStr: _Walk._f_string, ast.BoolOp: _Walk._and_or,
    ast.BinOp: _Walk._operator, ast.Compare: _Walk._operator,
    ast.ListComp: _Walk._comprehension, ast.SetComp: _Walk._comprehension, ast.GeneratorExp: _Walk._comprehension,
    ast.DictComp: _Walk._comprehension,
}  # fmt: skip
"""How each kind of expression is walked; all others part by part."""


def names_cuda(node: ast.expr) -> bool:
    """Returns whether an expression is a text such as "cuda:0"."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cuda")


def names_in(node: ast.AST) -> set[str]:
    """Returns all names and all attribute names in a syntax tree."""
    names: set[str] = set()
    pending = [node]
    while pending:
        part = pending.pop()
        kind = type(part)
        if kind is ast.Name:
            names.add(part.id)  # type: ignore[attr-defined]
        elif kind is ast.Attribute:
            names.add(part.attr)  # type: ignore[attr-defined]
            pending.append(part.value)  # type: ignore[attr-defined]
        elif part._fields and kind is not ast.Constant:  # operators have no parts
            pending += ast.iter_child_nodes(part)
    return names


def chain_of(node: ast.AST) -> tuple[str, ...]:
    """Returns a chain of names as a tuple: `("a", "b")` of `a.b`; empty where no name comes first, as in `f().b`."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return (node.id, *reversed(names)) if isinstance(node, ast.Name) else ()
