"""Which conditions have one value only: those of constants in the source.

A parameter has one if every call that the entry leads to gives it the same. An attribute has one if the whole codebase
assigns it no other.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


class Unknown:
    """A value that the source does not show."""


UNKNOWN: Any = Unknown()
NOT_NONE: Any = Unknown()
"""Some value, and not None."""
_ALONE = {
    "torch.distributed.is_initialized", "torch.distributed.is_available", "torch.is_grad_enabled",
    "torch.compiler.is_compiling", "torch.jit.is_scripting", "torch.jit.is_tracing",
}  # fmt: skip
"""What is False in an inference of one process that nobody scripts."""


@dataclasses.dataclass(frozen=True)
class Values:
    """What is known in one function.

    Attributes:
        names: Parameters that are never assigned, with their values.
        attributes: Attributes of `self`, by name.
        full: Who is meant by a chain of names.
        first: The name of `self`.
        trains: Whether the code is read as training.
    """

    names: Mapping[str, Any]
    attributes: Mapping[str, Any]
    full: Callable[[ast.AST], str]
    first: str = ""
    trains: bool = False

    def of(self, node: ast.AST) -> Any:
        """Returns an expression's value, or UNKNOWN."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self._of_name(node)
        if isinstance(node, ast.Attribute):
            return self._of_attribute(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            value = self.truth(node.operand)
            return UNKNOWN if value is None else not value
        if isinstance(node, ast.BoolOp):
            value = self._of_bools(node)
            return UNKNOWN if value is None else value
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return _compared(node.ops[0], self.of(node.left), self.of(node.comparators[0]))
        if isinstance(node, ast.Call) and self.full(node.func) in _ALONE:
            return False
        return UNKNOWN

    def truth(self, node: ast.AST) -> bool | None:
        """Returns whether a condition holds; None if the source does not show it."""
        value = self.of(node)
        return None if value is UNKNOWN or value is NOT_NONE else bool(value)

    def _of_name(self, node: ast.Name) -> Any:
        if node.id == "TYPE_CHECKING":
            return False
        if node.id == "__name__":
            return "imported"
        return self.names.get(node.id, UNKNOWN)

    def _of_attribute(self, node: ast.Attribute) -> Any:
        if node.attr == "training":
            return self.trains
        if node.attr == "TYPE_CHECKING":
            return False
        own = isinstance(node.value, ast.Name) and node.value.id == self.first and bool(self.first)
        return self.attributes.get(node.attr, UNKNOWN) if own else UNKNOWN

    def _of_bools(self, node: ast.BoolOp) -> bool | None:
        values = [self.truth(value) for value in node.values]
        decisive = isinstance(node.op, ast.Or)
        if decisive in values:
            return decisive
        return None if None in values else not decisive


def _compared(op: ast.cmpop, left: Any, right: Any) -> Any:
    if left is UNKNOWN or right is UNKNOWN:
        return UNKNOWN
    if isinstance(op, (ast.Is, ast.IsNot)):
        if right is None and left is NOT_NONE:
            return isinstance(op, ast.IsNot)
        unsure = left is NOT_NONE or right is NOT_NONE
        return UNKNOWN if unsure else (left is right) == isinstance(op, ast.Is)
    if left is NOT_NONE or right is NOT_NONE:
        return UNKNOWN
    try:
        return _ORDER[type(op)](left, right) if type(op) in _ORDER else UNKNOWN
    except TypeError:
        return UNKNOWN


_ORDER: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: lambda a, b: bool(a == b),
    ast.NotEq: lambda a, b: bool(a != b),
    ast.Lt: lambda a, b: bool(a < b),
    ast.LtE: lambda a, b: bool(a <= b),
    ast.Gt: lambda a, b: bool(a > b),
    ast.GtE: lambda a, b: bool(a >= b),
}
