"""What is kept of a function when its syntax tree is dropped: calls, reads and imports, each with its conditions.

A condition becomes a term: a tuple of an operation and its operands, such as `("not", ("self", "flag"))`. None stands
for what the source does not show. Without CUDA or a process group, some values are assumed.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torchport.porting.scan.syntax import Guards, chain_of, names_cuda

Term = tuple[Any, ...] | None
"""An expression; None where the source does not show its value."""
Conditions = tuple[tuple[Term, bool], ...]
"""Terms, each with the truth that it must have."""
_FALSE_ALONE = {
    "torch.distributed.is_initialized", "torch.distributed.is_available", "torch.is_grad_enabled",
    "torch.compiler.is_compiling", "torch.jit.is_scripting", "torch.jit.is_tracing",
}  # fmt: skip
"""Functions that return False in inference, in a single process, without compiling or scripting."""
_VALUES_WITHOUT = {
    "torch.distributed.get_world_size": ("process-group", 1),
    "torch.distributed.get_rank": ("process-group", 0),
    "torch.cuda.is_available": ("cuda", False),
    "torch.cuda.device_count": ("cuda", 0),
    "torch.version.cuda": ("cuda", None),
}
_MANY = r"(cp|sp|usp|tp|pp|ulysses|ring|fsdp|dist|distributed|world|(sequence|context|tensor|model|data)_parallel)"
_WORDS = (
    (re.compile(rf"(^|_)({_MANY}|parallel)_(\w+_)?(size|degree)$|^(nproc|num_ranks)$"), ("process-group", 1)),
    (re.compile(rf"(^|_)({_MANY}|local|global)_rank$"), ("process-group", 0)),
    (re.compile(rf"(^|_)({_MANY}|parallel|process)_(\w+_)?(group|mesh|config)$"), ("process-group", None)),
    (re.compile(r"^device_mesh$"), ("process-group", None)),
    (re.compile(rf"^(is|use|using|enable|has)_(\w+_)?({_MANY}|parallel)$"), ("process-group", False)),
    (re.compile(rf"(^|_){_MANY}_(active|enabled?|initialized)$"), ("process-group", False)),
    (re.compile(r"^is_cuda$"), ("cuda", False)),
)
"""The values that names such as `sp_size` have where there is no process group, or no CUDA, by their words."""
_DEVICES = {"type", "device", "device_type"}
_OPS = {
    ast.Is: "is_", ast.IsNot: "is_not", ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt",
    ast.GtE: "ge",
}  # fmt: skip
"""The functions of `operator` that compare."""


@dataclasses.dataclass(slots=True, eq=False)
class Read:
    """A name or attribute that is read, or (`Called`) called."""

    line: int
    conditions: Conditions
    chain: tuple[str, ...]  #: Its names, as `("a", "b")` for `a.b`; empty for `f().b`.
    name: str  #: The full name of the chain; empty where no known import or definition binds it.
    attribute: str  #: The attribute or method `b` of `f().b`; empty with a chain.


@dataclasses.dataclass(slots=True, eq=False)
class Called(Read):
    of_super: bool  #: As in `super().b()`.
    arguments: tuple[Term, ...]  #: Arguments by position, up to the first `*arguments`.
    keywords: tuple[tuple[str, Term], ...]
    starred: bool  #: It passes `*a` or `**b`.


@dataclasses.dataclass(slots=True, eq=False)
class Imported:
    line: int
    conditions: Conditions
    modules: tuple[str, ...]  #: The full names of the modules that it may run.
    packages: tuple[str, ...]  #: Their top-level packages; none for a relative import.
    aliases: tuple[tuple[str, str, int], ...]  #: Of `from m import name`: the name, what it is in full, the line.
    always: bool  #: Under no condition.


@dataclasses.dataclass(slots=True, eq=False)
class Facts:
    references: tuple[Read | Imported, ...] = ()
    assigned: frozenset[str] = frozenset()  #: The parameters that it assigns to.
    nones: frozenset[str] = frozenset()  #: The parameters that it sets to None.
    attributes: tuple[tuple[str, Term], ...] = ()  #: The attributes that it sets, with a constant value or None.
    asked: frozenset[str] = frozenset()  #: The names in its conditions.
    answer: Term = None  #: What it returns, if it does nothing but return.

    @property
    def calls(self) -> Iterator[Called]:
        return (reference for reference in self.references if isinstance(reference, Called))

    @property
    def imports(self) -> Iterator[Imported]:
        return (reference for reference in self.references if isinstance(reference, Imported))


class Terms:
    """Turns the expressions of a function into terms."""

    def __init__(self, parameters: Iterable[str], first: str, full_name: Callable[[ast.AST], str]) -> None:
        self._parameters = frozenset(parameters)
        self._first = first  # the name of a method's first argument
        self._full_name = full_name
        self._conditions: dict[Guards, Conditions] = {(): ()}  # a cache

    def conditions(self, guards: Guards) -> Conditions:
        """Returns the conditions of an event as terms, without those that always hold."""
        known = self._conditions.get(guards)
        if known is None:
            guard = guards[-1]
            term = self.term(guard.test)
            known = self.conditions(guards[:-1])
            if term is not None and term != ("const", guard.wanted):
                known = (*known, (_certain(term) if guard.refused else term, guard.wanted))
            self._conditions[guards] = known
        return known

    def term(self, node: ast.AST | None) -> Term:
        """Returns an expression as a term, such as `("not", ("self", "flag"))`; None where its value is not shown."""
        if isinstance(node, ast.Constant):
            return "const", node.value
        if isinstance(node, ast.Name):
            if node.id == "TYPE_CHECKING":
                return "const", False
            known = node.id in self._parameters or node.id == "__name__"
            return _with_assumption(("name", node.id) if known else None, node.id)
        if isinstance(node, ast.Attribute):
            if node.attr == "training":
                return ("training",)
            if node.attr == "TYPE_CHECKING":
                return "const", False
            on_self = isinstance(node.value, ast.Name) and node.value.id == self._first and bool(self._first)
            return _with_assumption(("self", node.attr) if on_self else None, node.attr, self._full_name(node))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self.term(node.operand)
            return None if inner is None else ("not", inner)
        if isinstance(node, ast.BoolOp):
            parts = tuple(map(self.term, node.values))
            return ("or" if isinstance(node.op, ast.Or) else "and", *parts) if any(parts) else None
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._comparison(node.left, _OPS.get(type(node.ops[0]), ""), node.comparators[0])
        return self._call(node) if isinstance(node, ast.Call) else None

    def _comparison(self, left: ast.expr, op: str, right: ast.expr) -> Term:
        """Returns a comparison as a term, `("eq", left, right)`; `device == "cuda"` is assumed False without CUDA."""
        sides = self.term(left), self.term(right)
        compared = (op, *sides) if op and None not in sides else None
        names_device = names_cuda(right) or names_cuda(left)
        asked = chain_of(left if names_cuda(right) else right)[-1:] if names_device else ()
        if set(asked) & _DEVICES and op in ("eq", "ne"):
            return "else", compared, "cuda", op == "ne"
        return compared

    def _call(self, node: ast.Call) -> Term:
        """Returns the term of a call in a condition: `("const", False)` for `is_grad_enabled()`, `("call", "pkg.m.f")`
        for a function of the codebase, whose answer may be known later; None for torch's other functions.
        """
        name = self._full_name(node.func)
        if name in _FALSE_ALONE:
            return "const", False
        last = chain_of(node.func)[-1:]
        known = ("call", name) if name and not name.startswith("torch.") else None
        return _with_assumption(known, last[0].removeprefix("get_") if last else "", name)


@functools.cache
def _with_assumption(term: Term, last: str, name: str = "") -> Term:
    """Returns `("else", term, "process-group", 1)` for `sp_size`: the term's value, or 1 where the source does not show
    it and there is no process group. A name that asks for neither a group nor CUDA leaves the term as it is.
    """
    by_words = (value for words, value in _WORDS if words.search(last.lower()))
    assumed = _VALUES_WITHOUT.get(name) or next(by_words, None)
    return term if assumed is None else ("else", term, *assumed)


def _certain(term: Term) -> Term:
    """Returns a term without its assumed values; None if nothing else is known. So code after `if not initialized:
    raise` counts as reached, although a process group is assumed to be absent.
    """
    if term is None or term[0] in ("const", "name", "self", "training"):
        return term
    if term[0] == "call":  # a function's answer is looked up only under an assumption
        return None
    return _certain(term[1]) if term[0] == "else" else (term[0], *map(_certain, term[1:]))
