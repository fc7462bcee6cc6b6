"""Which expressions of a function are tensors, as far as its source shows it.

What is not known is no tensor: a finding that is wrong costs more than one that a trace finds later.
"""

from __future__ import annotations

import ast
import enum
import re
from collections.abc import Callable, Iterable

from torchport.errors import UnreadableError
from torchport.porting.scan.codebase import CodeUnit
from torchport.porting.scan.syntax import Act, Body, Event, chain_of
from torchport.source import parsing
from torchport.source.bindings import STARRED, Function, parameters


class Kind(enum.Enum):
    UNKNOWN = enum.auto()
    TENSOR = enum.auto()
    MASK = enum.auto()
    """A tensor of booleans."""
    HOST = enum.auto()
    """A tensor that was moved to the host on purpose."""
    PLAIN = enum.auto()
    """A number, a shape or another value of Python."""


ON_DEVICE = (Kind.TENSOR, Kind.MASK)
Full = Callable[[ast.AST], str]
"""Returns the name in full of a chain of names; empty for none."""

_TENSOR_NAMES = {
    "Tensor", "LongTensor", "FloatTensor", "BoolTensor", "IntTensor", "HalfTensor", "BFloat16Tensor", "tensor",
}  # fmt: skip
_PLAIN_ATTRIBUTES = {
    "shape", "ndim", "dtype", "device", "requires_grad", "is_cuda", "layout", "names", "itemsize", "nbytes",
}  # fmt: skip
_TENSOR_ATTRIBUTES = {"T", "mT", "H", "mH", "real", "imag", "data", "grad"}
_PLAIN_METHODS = {
    "size", "dim", "numel", "stride", "element_size", "is_contiguous", "data_ptr", "get_device",
    "is_floating_point", "is_complex", "item", "tolist", "numpy", "type", "nelement", "ndimension",
    "storage_offset",
}  # fmt: skip
_MASK_METHODS = {
    "bool", "eq", "ne", "gt", "ge", "lt", "le", "isnan", "isinf", "isfinite", "logical_not", "logical_and",
    "logical_or",
}  # fmt: skip
_ONLY_TENSORS = {
    "unsqueeze", "expand", "expand_as", "repeat", "repeat_interleave", "permute", "contiguous", "detach", "float",
    "half", "bool", "long", "bfloat16", "chunk", "unbind", "type_as", "masked_fill", "new_zeros", "new_ones",
    "softmax", "cpu", "cuda", "nonzero", "flatten", "clamp", "requires_grad_", "unflatten", "masked_select",
    "narrow", "sigmoid",
}  # fmt: skip
_MASK_FUNCTIONS = {
    "isnan", "isinf", "isfinite", "logical_not", "logical_and", "logical_or", "eq", "ne", "gt", "ge", "lt", "le",
    "all", "any", "isin",
}  # fmt: skip
_PLAIN_FUNCTIONS = {
    "is_tensor", "is_floating_point", "is_complex", "numel", "get_default_dtype", "device", "Size", "Generator",
    "finfo", "iinfo", "is_grad_enabled", "no_grad", "inference_mode", "autocast", "enable_grad", "compile", "load",
    "save", "manual_seed", "is_autocast_enabled", "set_default_dtype", "get_autocast_dtype", "set_grad_enabled",
    "dtype", "initial_seed", "seed", "get_num_threads", "set_num_threads", "typename", "is_inference_mode_enabled",
    "get_rng_state", "Stream", "get_autocast_gpu_dtype", "can_cast", "result_type", "promote_types",
    "broadcast_shapes", "device_count",
}  # fmt: skip
_NUMBERS = re.compile(
    r"(^|_)(len|length|num|size|shape|mode|idx|index|dim|type|name|height|width|frames|heads|channels|step|config|args|"
    r"kwargs|return|use|is|do|list|dict|n|h|w|enable|generator|callback|dtype|device|func|fn|"
    r"train|training)(_|$)"
)
"""Parameters without an annotation that are no tensors, by the words of their names."""
_PLAIN_MODULES = (
    "torch.cuda.", "torch.distributed.", "torch.backends.", "torch.utils.", "torch.jit.", "torch.nn.attention.",
    "torch.compiler.", "torch._dynamo.", "torch.profiler.", "torch.optim.", "torch.amp.", "torch.version.",
    "torch.hub.", "torch.onnx.", "torch.multiprocessing.", "torch.library.", "torch.accelerator.",
)  # fmt: skip
_HANDED_THROUGH = {"enumerate", "zip", "list", "tuple", "reversed", "sorted", "iter"}


class Tensors:
    """Which names of a function are tensors, after each of its events in turn. It fills `kinds`."""

    def __init__(
        self,
        unit: CodeUnit,
        body: Body,
        kinds: dict[str, Kind],
        full: Full,
        attributes: frozenset[str],
        returns: Callable[[str], ast.expr | None],
    ) -> None:
        self._full = full
        self._returns = returns
        self._self = unit.first
        self._attributes = attributes
        self.kinds = kinds
        self.made_from: dict[str, ast.expr] = {}
        self._containers: set[str] = set()
        self._used_as_tensors = {name for event in body.by_act[Act.CALL] for name in _used_as_tensor(event)}
        read = (*body.by_act[Act.INDEX], *body.by_act[Act.WRITE])
        self._dictionaries = {name for event in read for name in _used_as_dictionary(event)}
        in_forward = unit.name.endswith(".forward") and unit.owner is not None
        if isinstance(body.node, Function):
            self._enter(body.node, in_forward)

    def _enter(self, function: Function, in_forward: bool) -> None:
        """Notes which parameters are tensors: by annotation, or in a `forward` by name where there is no annotation."""
        for parameter in parameters(function):
            if parameter.kind in STARRED or parameter.name == self._self:
                continue
            if parameter.argument.annotation is not None:
                kind = Kind.TENSOR if _names_tensor(parameter.argument.annotation) else Kind.UNKNOWN
                if _is_collection(parameter.argument.annotation):
                    self._containers.add(parameter.name)
            else:
                number = parameter.name in self._dictionaries or _NUMBERS.search(parameter.name) is not None
                assumed = in_forward and parameter.default is None and not number
                kind = Kind.TENSOR if assumed else Kind.UNKNOWN
            self.kinds[parameter.name] = kind

    def follow(self, event: Event) -> None:
        if event.act is Act.ENTER and isinstance(event.node, Function):
            self._enter(event.node, False)
        elif event.act is Act.ASSIGN and event.value is not None:
            self._bind(event.node, event.value, event.loops_over)

    def _bind(self, target: ast.AST, value: ast.expr, loops_over: bool) -> None:
        """Notes the kind of value that the target of an assignment or loop gets."""
        if isinstance(target, ast.Name):
            if isinstance(value, ast.Constant) and value.value is None and target.id in self.kinds:
                return  # `x = None` in one branch: in the other one it is what it was
            self.kinds[target.id] = self.kind(value)
            self.made_from[target.id] = value
            if not loops_over:
                collects = isinstance(value, (ast.List, ast.ListComp, ast.Tuple, ast.Dict, ast.DictComp))
                (self._containers.add if collects else self._containers.discard)(target.id)
        elif isinstance(target, (ast.Tuple, ast.List)):
            self._unpack(target.elts, value, loops_over)

    def _unpack(self, targets: list[ast.expr], value: ast.expr, loops_over: bool) -> None:
        """Notes the kind of value that each target of `a, b = ...` or `for a, b in ...` gets."""
        called = value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else ""
        parts = self._parts_returned(value) if not loops_over else []
        values: list[ast.expr] = [value] * len(targets)
        if not loops_over and isinstance(value, (ast.Tuple, ast.List)):
            values[: len(value.elts)] = value.elts[: len(targets)]
        elif loops_over and isinstance(value, ast.Call) and called == "zip":
            values[: len(value.args)] = value.args[: len(targets)]
        elif loops_over and isinstance(value, ast.Call) and called == "enumerate" and value.args:
            values = [ast.Constant(0), *[value.args[0]] * (len(targets) - 1)]
        for number, target in enumerate(targets):
            if len(parts) == len(targets) and isinstance(target, ast.Name):
                self.kinds[target.id] = Kind.TENSOR if _names_tensor(parts[number]) else Kind.PLAIN
            else:
                self._bind(target, values[number], loops_over)

    def _parts_returned(self, value: ast.expr) -> list[ast.expr]:
        returned = self._returns(self._full(value.func)) if isinstance(value, ast.Call) else None
        if isinstance(returned, ast.Subscript) and chain_of(returned.value)[-1:] in (("tuple",), ("Tuple",)):
            return returned.slice.elts if isinstance(returned.slice, ast.Tuple) else []
        return []

    def is_container(self, node: ast.expr) -> bool:
        """Returns whether a name is a list or dictionary of tensors, and no tensor itself."""
        return isinstance(node, ast.Name) and node.id in self._containers

    def kind(self, node: ast.expr) -> Kind:
        """Returns the kind of an expression's value, such as a tensor; a list of tensors counts as what is in it."""
        if isinstance(node, ast.Name):
            kind = self.kinds.get(node.id, Kind.UNKNOWN)
            return Kind.TENSOR if kind is Kind.UNKNOWN and node.id in self._used_as_tensors else kind
        if isinstance(node, ast.Constant):
            return Kind.PLAIN
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Subscript):
            return self.kind(node.value)
        if isinstance(node, ast.Compare):
            return self._comparison(node)
        if isinstance(node, ast.UnaryOp):
            return Kind.PLAIN if isinstance(node.op, ast.Not) else self.kind(node.operand)
        return self._compound(node)

    def _compound(self, node: ast.expr) -> Kind:
        """Returns the kind of an operator's, tuple's, list's, choice's or comprehension's value, by its parts."""
        if isinstance(node, ast.BinOp):
            kind = _joint_kind([self.kind(node.left), self.kind(node.right)])
            bits = isinstance(node.op, (ast.BitAnd, ast.BitOr, ast.BitXor))
            return Kind.TENSOR if kind is Kind.MASK and not bits else kind
        if isinstance(node, (ast.Tuple, ast.List)):
            return _joint_kind([self.kind(element) for element in node.elts]) if node.elts else Kind.UNKNOWN
        if isinstance(node, ast.IfExp):
            return _joint_kind([self.kind(node.body), self.kind(node.orelse)])
        if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
            return self.kind(node.elt)
        if isinstance(node, ast.NamedExpr):
            return self.kind(node.value)
        return Kind.PLAIN if isinstance(node, (ast.JoinedStr, ast.Dict, ast.BoolOp)) else Kind.UNKNOWN

    def _attribute(self, node: ast.Attribute) -> Kind:
        if node.attr in _PLAIN_ATTRIBUTES:
            return Kind.PLAIN
        if node.attr in _TENSOR_ATTRIBUTES:
            return self.kind(node.value)
        on_self = isinstance(node.value, ast.Name) and node.value.id == self._self and bool(self._self)
        return Kind.TENSOR if on_self and node.attr in self._attributes else Kind.UNKNOWN

    def _comparison(self, node: ast.Compare) -> Kind:
        """Returns the kind of a comparison's result: a mask if one side is a tensor; plain for `is`, `in` and texts."""
        if any(isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for op in node.ops):
            return Kind.PLAIN
        sides = [node.left, *node.comparators]
        if any(isinstance(side, ast.Constant) and isinstance(side.value, (str, type(None))) for side in sides):
            return Kind.PLAIN
        kinds = [self.kind(side) for side in sides]
        if any(kind in ON_DEVICE for kind in kinds):
            return Kind.MASK
        return _joint_kind(kinds)

    def _call(self, node: ast.Call) -> Kind:
        """Returns the kind of value that a call returns, by its full name, its annotation or its first argument."""
        name = self._full(node.func)
        if name.startswith("torch."):
            return _kind_of_torch_call(name, node, self)
        returned = self._returns(name)
        if name.startswith("einops.") or (returned is not None and _names_tensor(returned)):
            return Kind.TENSOR
        if isinstance(node.func, ast.Name):
            if node.func.id in _HANDED_THROUGH and node.args and not name:
                return self.kind(node.args[0])
            return Kind.UNKNOWN if name or node.func.id in self.kinds else Kind.PLAIN
        if isinstance(node.func, ast.Attribute):
            return self._method(node, node.func)
        return Kind.UNKNOWN

    def _method(self, node: ast.Call, func: ast.Attribute) -> Kind:
        """Returns what a method of an object returns; a call of a submodule with a tensor returns a tensor."""
        kind, method = self.kind(func.value), func.attr
        if kind in (*ON_DEVICE, Kind.HOST) or method in _ONLY_TENSORS:
            if method in _PLAIN_METHODS:
                return Kind.PLAIN
            if method == "cpu" or kind is Kind.HOST:
                return Kind.HOST
            stays = kind is Kind.MASK and method not in ("float", "long", "int", "sum", "cumsum")
            return Kind.MASK if stays or method in _MASK_METHODS else Kind.TENSOR
        given = [self.kind(argument) for argument in node.args]
        on_self = isinstance(func.value, ast.Name) and func.value.id == self._self
        if on_self and any(name in ON_DEVICE for name in given):  # a submodule over a tensor
            return Kind.TENSOR
        return Kind.UNKNOWN


def _kind_of_torch_call(name: str, node: ast.Call, tensors: Tensors) -> Kind:
    """Returns whether a function of torch returns a tensor, a mask (bool tensor), or a plain Python value."""
    last = name.rpartition(".")[2]
    if name.startswith(_PLAIN_MODULES) or last in _PLAIN_FUNCTIONS:
        return Kind.PLAIN
    if name.startswith("torch.nn.") and not name.startswith("torch.nn.functional."):
        return Kind.PLAIN
    if last in _MASK_FUNCTIONS:
        return Kind.MASK
    first = tensors.kind(node.args[0]) if node.args else Kind.UNKNOWN
    if first is Kind.MASK and last in ("cat", "concat", "stack", "zeros_like", "ones_like", "pad"):
        return Kind.MASK
    dtype = next((chain_of(keyword.value)[-1:] for keyword in node.keywords if keyword.arg == "dtype"), ())
    return Kind.MASK if dtype == ("bool",) else Kind.TENSOR


def _joint_kind(kinds: list[Kind]) -> Kind:
    for kind in (Kind.TENSOR, Kind.MASK, Kind.HOST, Kind.PLAIN):
        if kind in kinds and (kind is not Kind.PLAIN or all(kind is Kind.PLAIN for kind in kinds)):
            return kind
    return Kind.UNKNOWN


def _names_tensor(annotation: ast.expr) -> bool:
    """Returns whether an annotation is a tensor, or may be one: `Tensor`, `Optional[Tensor]`, `Tensor | None`."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            body = parsing.tree(annotation.value.strip(), "").body
        except UnreadableError:
            return False
        annotation = body[0].value if body and isinstance(body[0], ast.Expr) else annotation
    if isinstance(annotation, ast.Subscript):
        outer = chain_of(annotation.value)[-1:]
        inner = annotation.slice
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if outer in (("Dict",), ("dict",), ("Mapping",)):
            parts = parts[1:]
        return outer != ("Callable",) and any(_names_tensor(part) for part in parts)
    if isinstance(annotation, ast.BinOp):
        return _names_tensor(annotation.left) or _names_tensor(annotation.right)
    return chain_of(annotation)[-1:] != () and chain_of(annotation)[-1] in _TENSOR_NAMES


def _is_collection(annotation: ast.expr) -> bool:
    """Returns whether an annotation is a collection such as `list[Tensor]`, or may be one."""
    if isinstance(annotation, ast.Subscript):
        outer = chain_of(annotation.value)[-1:]
        if outer in (("Optional",), ("Union",)):
            inner = annotation.slice
            return any(_is_collection(part) for part in (inner.elts if isinstance(inner, ast.Tuple) else [inner]))
        return outer != ()
    if isinstance(annotation, ast.BinOp):
        return _is_collection(annotation.left) or _is_collection(annotation.right)
    return False


def _used_as_dictionary(event: Event) -> Iterable[str]:
    if isinstance(event.node, ast.Subscript) and isinstance(event.node.value, ast.Name):
        index = event.node.slice
        if isinstance(index, ast.Constant) and isinstance(index.value, str):
            yield event.node.value.id


def _used_as_tensor(event: Event) -> Iterable[str]:
    if isinstance(event.node, ast.Call):
        func = event.node.func
        if isinstance(func, ast.Attribute) and func.attr in _ONLY_TENSORS and isinstance(func.value, ast.Name):
            yield func.value.id
