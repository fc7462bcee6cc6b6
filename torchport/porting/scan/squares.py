"""Masks of all pairs of positions."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchport.porting.scan.context import Context, Site
from torchport.porting.scan.syntax import Event

_OUTER = (ast.BitAnd, ast.BitOr, ast.Sub)
_FEATURES = {"d", "dim", "c", "channels", "head_dim", "hidden_size", "features", "embed_dim", "self.head_dim"}
"""Sizes of what is no position."""
_MADE = {"zeros", "ones", "full", "empty", "eye", "tri", "new_zeros", "new_ones", "new_full"}


def squares(context: Context, event: Event) -> Iterator[Site]:
    """Yields a mask of all pairs of positions: made as a square, or of one tensor along two dims."""
    node = event.node
    pair: tuple[ast.expr, ast.expr] | None = None
    if isinstance(node, ast.BinOp) and isinstance(node.op, _OUTER):
        pair = node.left, node.right
    elif isinstance(node, ast.Compare) and len(node.comparators) == 1:
        pair = node.left, node.comparators[0]
    elif isinstance(node, ast.Call):
        last = _called(context, node)
        if last in ("logical_and", "logical_or") and len(node.args) == 2:
            pair = node.args[0], node.args[1]
        elif last in _MADE and _is_square(node, last):
            yield context.site("square-mask", event)
    if pair is not None and _is_outer(context, *pair):
        yield context.site("square-mask", event)


def _called(context: Context, node: ast.Call) -> str:
    name = context.full(node.func).rpartition(".")[2]
    return name or (node.func.attr if isinstance(node.func, ast.Attribute) else "")


def _is_square(node: ast.Call, name: str) -> bool:
    if name in ("eye", "tri"):
        return bool(node.args) and not _is_small(node.args[0]) and ast.unparse(node.args[0]).lower() not in _FEATURES
    parts = node.args[0].elts if node.args and isinstance(node.args[0], (ast.Tuple, ast.List)) else node.args
    if not 2 <= len(parts) <= 4 or any(_is_small(part) for part in parts[-2:]):  # more dims are those of a video
        return False
    size = ast.unparse(parts[-1])
    return ast.unparse(parts[-2]) == size and size.lower() not in _FEATURES


def _is_small(node: ast.expr) -> bool:
    return isinstance(node, (ast.Constant, ast.UnaryOp, ast.Starred))


def _is_outer(context: Context, left: ast.expr, right: ast.expr) -> bool:
    """Returns whether two sides are one tensor, each turned to another dim: their combination has all pairs."""
    one, other = _spread(context, left), _spread(context, right)
    return one[1] != other[1] and one[0] == other[0] and bool(one[0])


def _spread(context: Context, node: ast.expr, depth: int = 0) -> tuple[str, str]:
    """Returns what an expression adds a dim to, and how; the second is empty where it adds none."""
    if isinstance(node, ast.Name) and depth < 3:
        made = context.tensors.made_from.get(node.id)
        if isinstance(made, (ast.Call, ast.Subscript)):
            inner = _spread(context, made, depth + 1)
            return inner if inner[1] else (node.id, "")
        return node.id, ""
    if isinstance(node, ast.Subscript):
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if any(_adds_dim(part) for part in parts):
            return ast.unparse(node.value), ast.unparse(node.slice)
    if isinstance(node, ast.Call):
        func = node.func
        if isinstance(func, ast.Attribute) and func.attr in ("unsqueeze", "transpose"):
            return ast.unparse(func.value), ast.unparse(node)
        if context.full(func) == "einops.rearrange" and len(node.args) > 1:
            inside = _spread(context, node.args[0], depth + 1)
            return (inside[0] or ast.unparse(node.args[0])), ast.unparse(node.args[1])
    return "", ""


def _adds_dim(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
