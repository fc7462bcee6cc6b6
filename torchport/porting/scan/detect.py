"""The findings of one function, whatever leads to it.

Each detector looks at one event. A context is the function, with what its names mean and which of them are tensors, as
far as its source shows it. What is not known is no tensor: a wrong finding costs more than a missed one, which a trace
finds later.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from torchport.errors import UnreadableError
from torchport.porting.scan.codebase import Codebase, CodeUnit
from torchport.porting.scan.facts import Conditions, Terms
from torchport.porting.scan.syntax import MODULE, TRIED, Act, Body, Event, chain_of
from torchport.source import parsing
from torchport.source.bindings import STARRED, Function, parameters

_BUILDERS = {
    "__init__", "reset_parameters", "init_weights", "_init_weights", "initialize_weights", "__new__",
    "__post_init__",
}  # fmt: skip
_LONGEST = 90
NAMES = Path(__file__).with_name("names.yaml")
_NAMES: dict[str, frozenset[str]] = {
    key: frozenset(names) for key, names in yaml.safe_load(NAMES.read_text(encoding="utf-8")).items()
}


@dataclasses.dataclass(frozen=True)
class Site:
    """A finding in a function, with the conditions that it stands under."""

    unit: CodeUnit
    kind: str  #: Of `RULES`, such as `branch`.
    line: int
    text: str
    conditions: Conditions
    uses: str = ""
    if_none: str = ""  #: A parameter of the function: it is a finding only if calls leave this parameter None.
    sure: bool = True  #: As in `ScanFinding`.


def text_of(node: ast.AST) -> str:
    """Returns a node's source in one line of at most 90 characters."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


class FunctionContext:
    """What the detectors know of a function: what its names mean, and which of them are tensors."""

    def __init__(self, codebase: Codebase, unit: CodeUnit, body: Body) -> None:
        self.unit = unit
        self.codebase = codebase
        self.at_import = unit.name == MODULE
        self.builds = unit.name.rpartition(".")[2] in _BUILDERS  # a constructor: it runs before anything is traced
        self.terms = Terms(unit.parameters, unit.first, lambda node: codebase.resolve(unit, chain_of(node)))
        self.tensors = Tensors(self, body)
        self._body = body

    def full_name(self, chain: tuple[str, ...]) -> str:
        """Returns the full name of a chain of names, such as `torch.nn.Linear` for `nn.Linear`. Empty where no import
        or definition binds its first name, or where a local variable has this name.
        """
        if not chain or not self.unit.may_import(chain[0]):
            return ""
        is_local = not self.at_import and chain[0] in self.tensors.kinds and chain[0] not in self.unit.imports
        return "" if is_local else self.codebase.resolve(self.unit, chain)

    def returned(self, name: str) -> ast.expr | None:
        """Returns the annotation of the result of the function with a full name; None outside of the codebase."""
        known = self.codebase.definition(name) if name else None
        return known.returns if isinstance(known, CodeUnit) else None

    @functools.cached_property
    def arguments_of_autocast(self) -> set[ast.AST]:
        """The arguments of all calls of autocast and the like, such as the "cuda" of `autocast("cuda")`."""
        calls: list[Any] = [event.node for event in self._body.by_act[Act.CALL]]
        asking = [call for call in calls if getattr(call.func, "attr", getattr(call.func, "id", "")) in _AUTOCASTS]
        keywords = {keyword.value for call in asking for keyword in call.keywords}
        return keywords.union(*(call.args for call in asking))

    def site(self, kind: str, event: Event, uses: str = "", if_none: str = "", sure: bool = True) -> Site:
        """Returns a finding at an event of this function."""
        line, conditions = getattr(event.node, "lineno", 1), self.terms.conditions(event.guards)
        return Site(self.unit, kind, line, text_of(event.node), conditions, uses, if_none, sure)


_AUTOCASTS = ("autocast", "custom_fwd", "custom_bwd", "GradScaler")
_FLEX = "torch.nn.attention.flex_attention"
_WRAPPERS = ("torch.nn.parallel.DistributedDataParallel", "deepspeed.", "torch.distributed.")
MAKES_GROUP = _NAMES["makes_group"]
AUTOCAST = "torch.amp.autocast_mode.autocast"
"""The class that all names of autocast lead to."""
_BACKENDS = {"torch.nn.attention.sdpa_kernel", "torch.backends.cuda.sdp_kernel"}
"""What allows only some kernels of attention."""
BY_VALUES = {f"torch.{name}" for name in (*_NAMES["by_values"], "unique")}
DIFFERING = _NAMES["differing"]

_OUTER = (ast.BitAnd, ast.BitOr, ast.Sub)
_NO_COUNTS = (ast.Constant, ast.UnaryOp, ast.Starred)
"""Sizes such as `4`, `-1` and `*sizes`, which are no count of positions for certain."""


Detector = Callable[[FunctionContext, Event], Iterator[Site]]


def sites(context: FunctionContext, body: Body) -> Iterator[Site]:
    """Yields the findings of a function in order, each kind at most once for a line."""
    uses_torch = context.unit.module.uses_torch
    detectors = _BY_ACT if uses_torch else _WITHOUT_TORCH
    seen: set[tuple[str, int]] = set()
    for event in body.events:
        if event.act is Act.CHAIN and not (event.chain and context.unit.may_import(event.chain[0])):
            continue  # a local name, as most are
        for detector in detectors.get(event.act, ()):
            for site in detector(context, event):
                if (site.kind, site.line) not in seen:
                    seen.add((site.kind, site.line))
                    yield site
        if uses_torch and event.act in (Act.ASSIGN, Act.ENTER):
            context.tensors.follow(event)


def _imports(context: FunctionContext, event: Event) -> Iterator[Site]:
    """Yields a finding for each package of GPU kernels that an import names; unsure where the import may fail."""
    node = event.node
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom) and not node.level:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    for name in names:
        if is_kernel(name) and not context.codebase.has(name):
            yield context.site("kernel", event, name, sure=TRIED not in event.guards and not name.startswith(_FLEX))


def is_autocast(name: str) -> bool:
    """Returns whether a full name is a name of autocast, such as `torch.autocast` or `torch.cuda.amp.autocast`."""
    return name.startswith("torch.") and name.rpartition(".")[2] in ("autocast", "custom_fwd")


def is_kernel(name: str) -> bool:
    """Returns whether a full name is of a package of GPU kernels, or of torch's flex attention."""
    return name.partition(".")[0] in _NAMES["gpu_kernels"] or name == _FLEX or name.startswith(f"{_FLEX}.")


def _kind_of_name(context: FunctionContext, name: str) -> str:
    """Returns the kind of finding for the use of a full name: `float64` for `torch.double`; empty for none."""
    if is_kernel(name):
        return "" if context.at_import else "kernel"  # at import the finding is the import itself
    if name in _NAMES["float64"]:
        return "float64"
    return "complex" if name in _NAMES["complex"] or name.startswith("torch.fft.") else ""


def _names(context: FunctionContext, event: Event) -> Iterator[Site]:
    """Yields a finding for a name that is read and not called, such as `torch.float64`."""
    name = context.full_name(event.chain)
    kind = _kind_of_name(context, name)
    if kind:
        yield context.site(kind, event, name)


def _calls(context: FunctionContext, event: Event) -> Iterator[Site]:
    """Yields the findings of a call: of a function by its full name, of a method, and of `int(x)` of a tensor."""
    if not isinstance(event.node, ast.Call):
        return
    node = event.node
    name = context.full_name(event.chain)
    if name and (name.startswith(("torch.", "deepspeed.")) or is_kernel(name)):
        kind = _kind_of_call(context, node, name)
        if kind:
            yield context.site(kind, event, name)
        yield from _host_tensors(context, event, node, name)
    if isinstance(node.func, ast.Attribute):
        yield from _method_calls(context, event, node, name)
    builtin = node.func.id if isinstance(node.func, ast.Name) and not name else ""
    takes_value = builtin in ("int", "float", "bool", "range", "round")
    if takes_value and any(context.tensors.kind(argument) in ON_DEVICE for argument in node.args):
        yield context.site("branch" if builtin == "bool" else "item", event)


def _kind_of_call(context: FunctionContext, node: ast.Call, name: str) -> str:
    """Returns the kind of finding for a call of a full name: `cuda-call` for `torch.cuda.synchronize`; or empty."""
    last = name.rpartition(".")[2]
    if is_autocast(name):
        return ""  # `_contexts` finds it, as a context or decorator
    if name.startswith("torch.cuda.") and name.split(".")[2] not in _NAMES["cuda_answers"]:
        return "cuda-import" if context.at_import else "cuda-call"
    if name.startswith(_WRAPPERS) and last not in _NAMES["without_group"] and "._checkpoint." not in name:
        return "cuda-import" if context.at_import else "process-group"
    if name in _NAMES["compilers"]:
        return "compile"
    if name in BY_VALUES or (name == "torch.where" and len(node.args) == 1):
        return "mask-index"
    return "operator" if name in DIFFERING else _kind_of_name(context, name)


def _host_tensors(context: FunctionContext, event: Event, node: ast.Call, name: str) -> Iterator[Site]:
    """Yields a finding for a tensor of the host, as by `torch.zeros(4)` without a device, outside of constructors."""
    module, _, last = name.rpartition(".")
    if module != "torch" or last not in _NAMES["factories"] or context.builds or context.at_import:
        return
    device = next((keyword.value for keyword in node.keywords if keyword.arg == "device"), None)
    if device is None and any(keyword.arg is None for keyword in node.keywords):
        return  # `**options` may have the device
    inner = device.args[0] if isinstance(device, ast.Call) and device.args else device
    if device is None or (isinstance(inner, ast.Constant) and inner.value in ("cpu", None)):
        yield context.site("host-tensor", event, name)
    elif isinstance(device, ast.Name) and context.unit.defaults.get(device.id) == ("const", None):
        # `device=device`, a parameter whose default is None: a finding only if no call passes a device.
        yield context.site("host-tensor", event, name, if_none=device.id)


def _method_calls(context: FunctionContext, event: Event, node: ast.Call, name: str) -> Iterator[Site]:
    """Yields findings for the call of a method, such as `.item()`, `.cuda()`, `.nonzero()`, or `.add_()` in a loop."""
    func: Any = node.func
    method = func.attr
    of_numpy = name.startswith(("numpy.", "math."))
    if method in ("item", "tolist") and not node.args and not of_numpy:
        yield context.site("item", event, sure=context.tensors.kind(func.value) in ON_DEVICE)
    elif method == "numpy" and not node.args and context.tensors.kind(func.value) in ON_DEVICE:
        yield context.site("item", event)
    elif method == "cuda" and not name:
        yield context.site("cuda-import" if context.at_import else "cuda-device", event)
    elif method == "double" and not node.args and not name:
        yield context.site("float64", event)
    elif method in _NAMES["by_values"] and not name:
        yield context.site("mask-index", event)
    elif (method == "unique" or f"torch.{method}" in DIFFERING) and context.tensors.kind(func.value) in ON_DEVICE:
        yield context.site("mask-index" if method == "unique" else "operator", event)
    in_place = method.endswith("_") and not method.endswith("__") and method not in _NAMES["not_in_place"]
    if event.loop and in_place and not context.builds and not name:
        yield context.site("inplace-loop", event)


def _branches(context: FunctionContext, event: Event) -> Iterator[Site]:
    """Yields a finding for a condition that is a tensor, or combines one with `and`, `or` or `not`."""
    pending = [event.node]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.BoolOp):
            pending += node.values
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            pending.append(node.operand)
        elif isinstance(node, ast.expr) and context.tensors.is_tensor(node):
            yield context.site("branch", event)
            return


def _indices(context: FunctionContext, event: Event) -> Iterator[Site]:
    """Yields a finding for an index that needs a tensor's values: a bound of a slice, or a mask."""
    if not isinstance(event.node, ast.Subscript):
        return
    for part in _items_of(event.node.slice):
        if isinstance(part, ast.Slice):
            bounds = [bound for bound in (part.lower, part.upper) if bound is not None]
            if any(context.tensors.kind(bound) in ON_DEVICE for bound in bounds):
                yield context.site("item", event)
        elif context.tensors.kind(part) is Kind.MASK and context.tensors.kind(event.node.value) is not Kind.PLAIN:
            yield context.site("mask-index", event)


def _writes(context: FunctionContext, event: Event) -> Iterator[Site]:
    """Yields findings for `x[i] = value`: in a loop, or through a mask."""
    if not isinstance(event.node, ast.Subscript) or context.builds:
        return
    base = event.node.value
    if event.loop and context.tensors.is_tensor(base):
        yield context.site("inplace-loop", event)
    if event.value is not None and not isinstance(event.value, ast.Constant):  # `x[mask] = 0` keeps the shapes
        yield from (site for site in _indices(context, event) if site.kind == "mask-index")


def _contexts(context: FunctionContext, event: Event) -> Iterator[Site]:
    """Yields a finding for a `with` or decorator of autocast, of attention's backends, a compiler or a GPU kernel."""
    name = context.full_name(chain_of(event.node.func if isinstance(event.node, ast.Call) else event.node))
    if is_autocast(name):
        yield context.site("autocast", event, AUTOCAST)
    elif name in _BACKENDS:
        yield context.site("attention-backend", event, name)
    elif name in _NAMES["compilers"]:
        yield context.site("compile", event, name)
    elif is_kernel(name):
        yield context.site("kernel", event, name)


def _cuda_strings(context: FunctionContext, event: Event) -> Iterator[Site]:
    """Yields a finding for a string such as "cuda:0", unless it is an argument of autocast."""
    if event.node in context.arguments_of_autocast:
        return
    text = ast.unparse(event.node).strip("'\"f")
    if text == "cuda" or text.startswith("cuda:"):
        yield context.site("cuda-import" if context.at_import else "cuda-device", event)


def _square_masks(context: FunctionContext, event: Event) -> Iterator[Site]:
    """Yields a finding for a mask of all pairs of positions: made as a square, or as in `x[:, None] == x[None]`."""
    node = event.node
    sides: list[ast.expr] = []
    if isinstance(node, ast.BinOp) and isinstance(node.op, _OUTER):
        sides = [node.left, node.right]
    elif isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
    elif isinstance(node, ast.Call):
        last = context.full_name(event.chain).rpartition(".")[2] or getattr(node.func, "attr", "")
        sides = node.args if last in ("logical_and", "logical_or") else []
        if last in _NAMES["makes_mask"] and _is_square(node, last):
            yield context.site("square-mask", event)
    if len(sides) == 2:
        # Both sides are the same tensor with a new dim, each at another place: all pairs are combined.
        (tensor, place), (other_tensor, other_place) = (_added_dim(context, side) for side in sides)
        if place != other_place and tensor == other_tensor != "":
            yield context.site("square-mask", event)


def _is_square(node: ast.Call, name: str) -> bool:
    """Returns whether a call makes a square of positions, as `torch.ones(n, n)`; not of numbers or feature sizes."""
    parts = node.args[0].elts if node.args and isinstance(node.args[0], (ast.Tuple, ast.List)) else node.args
    if name in ("eye", "tri"):  # a single size, of both sides
        parts = node.args[:1] * 2
    # More dims are those of a video.
    if not 2 <= len(parts) <= 4 or any(isinstance(part, _NO_COUNTS) for part in parts[-2:]):
        return False
    size = ast.unparse(parts[-1])
    return ast.unparse(parts[-2]) == size and size.lower() not in _NAMES["features"]


def _added_dim(context: FunctionContext, node: ast.expr, depth: int = 0) -> tuple[str, str]:
    """Returns which tensor gets a new dim, and where, as source: `x` and `:, None` for `x[:, None]`, `x` and the whole
    call for `x.unsqueeze(1)`, a transposition or einops. For a name `x` alone the place is empty; for others both are.
    """
    if isinstance(node, ast.Name) and depth < 3:
        made = context.tensors.made_from.get(node.id)
        if isinstance(made, (ast.Call, ast.Subscript)):
            inner = _added_dim(context, made, depth + 1)
            return inner if inner[1] else (node.id, "")
        return node.id, ""
    if isinstance(node, ast.Subscript) and any(ast.unparse(item) == "None" for item in _items_of(node.slice)):
        return ast.unparse(node.value), ast.unparse(node.slice)
    if isinstance(node, ast.Call):
        func = node.func
        if isinstance(func, ast.Attribute) and func.attr in ("unsqueeze", "transpose"):
            return ast.unparse(func.value), ast.unparse(node)
        if context.full_name(chain_of(func)) == "einops.rearrange" and len(node.args) > 1:
            inside = _added_dim(context, node.args[0], depth + 1)
            return (inside[0] or ast.unparse(node.args[0])), ast.unparse(node.args[1])
    return "", ""


_BY_ACT: dict[Act, tuple[Detector, ...]] = {
    Act.IMPORT: (_imports,),
    Act.CHAIN: (_names,),
    Act.CALL: (_calls, _square_masks),
    Act.OPERATOR: (_square_masks,),
    Act.TEST: (_branches,),
    Act.INDEX: (_indices,),
    Act.WRITE: (_writes,),
    Act.WITH: (_contexts,),
    Act.DECORATOR: (_contexts,),
    Act.TEXT: (_cuda_strings,),
}
_WITHOUT_TORCH: dict[Act, tuple[Detector, ...]] = {Act.IMPORT: (_imports,), Act.CHAIN: (_names,), Act.CALL: (_calls,)}


class Kind(enum.Enum):
    """What the value of an expression is."""

    UNKNOWN = enum.auto()
    TENSOR = enum.auto()
    MASK = enum.auto()  #: A tensor of booleans.
    HOST = enum.auto()  #: A tensor that was moved to the host on purpose.
    PLAIN = enum.auto()  #: A number, a shape or another value of Python.


ON_DEVICE = (Kind.TENSOR, Kind.MASK)
_NUMBERS = re.compile(
    r"(^|_)(len|length|num|size|shape|mode|idx|index|dim|type|name|height|width|frames|heads|channels|step|config|args|"
    r"kwargs|return|use|is|do|list|dict|n|h|w|enable|generator|callback|dtype|device|func|fn|train|training)(_|$)"
)
"""Parameters without an annotation that are no tensors, by the words of their names."""
_PLAIN_MODULES = tuple(_NAMES["plain_modules"])
_HANDED_THROUGH = {"enumerate", "zip", "list", "tuple", "reversed", "sorted", "iter"}


class Tensors:
    """Which names of a function are tensors. `follow` takes its events in turn, and keeps `kinds` up to date."""

    def __init__(self, context: FunctionContext, body: Body) -> None:
        """Notes which parameters are tensors, and which names the function uses as a tensor or a dictionary."""
        unit = context.unit
        init = context.codebase.method(unit.owner, "__init__") if unit.owner and unit.module.uses_torch else None
        self._attributes = init.tensors if init is not None else frozenset()
        # A cycle would keep the syntax tree: `scan` disables the collector.
        self._context: FunctionContext = weakref.proxy(context)
        self._self = unit.first
        self.kinds: dict[str, Kind] = {}
        self.made_from: dict[str, ast.expr] = {}  # the last value that each name was assigned
        self._containers: set[str] = set()  # names of lists and dictionaries
        called = [event.chain for event in body.by_act[Act.CALL] if len(event.chain) == 2]
        self._used_as_tensors = {owner for owner, method in called if method in _NAMES["tensor_methods"]}
        # A name with a text as its index, as in `batch["image"]`, is a dictionary.
        indexed: list[Any] = [event.node for event in (*body.by_act[Act.INDEX], *body.by_act[Act.WRITE])]
        holders = [node.value for node in indexed if isinstance(getattr(node.slice, "value", None), str)]
        self._dictionaries = {holder.id for holder in holders if isinstance(holder, ast.Name)}
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
        """Notes the kinds of the names that an assignment binds, or of the parameters of a nested function."""
        if event.act is Act.ENTER and isinstance(event.node, Function):
            self._enter(event.node, False)
        elif event.act is Act.ASSIGN and event.value is not None:
            self._bind(event.node, event.value, event.loops_over)

    def _bind(self, target: ast.AST, value: ast.expr, loops_over: bool) -> None:
        """Notes the kind of value that the target of an assignment or loop gets."""
        if isinstance(target, ast.Name):
            if isinstance(value, ast.Constant) and value.value is None and target.id in self.kinds:
                return  # `x = None` in a branch: x is what the other branches make it
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
        values: list[ast.expr] = [value] * len(targets)
        annotations: list[ast.expr] = []  # of the parts of a tuple that a function of the codebase returns
        if not loops_over and isinstance(value, ast.Call):
            returned = self._context.returned(self._context.full_name(chain_of(value.func)))
            if isinstance(returned, ast.Subscript) and chain_of(returned.value)[-1:] in (("tuple",), ("Tuple",)):
                annotations = returned.slice.elts if isinstance(returned.slice, ast.Tuple) else []
        if not loops_over and isinstance(value, (ast.Tuple, ast.List)):
            values[: len(value.elts)] = value.elts[: len(targets)]
        elif loops_over and isinstance(value, ast.Call) and called == "zip":
            values[: len(value.args)] = value.args[: len(targets)]
        elif loops_over and isinstance(value, ast.Call) and called == "enumerate" and value.args:
            values = [ast.Constant(0), *[value.args[0]] * (len(targets) - 1)]
        for number, target in enumerate(targets):
            if len(annotations) == len(targets) and isinstance(target, ast.Name):
                self.kinds[target.id] = Kind.TENSOR if _names_tensor(annotations[number]) else Kind.PLAIN
            else:
                self._bind(target, values[number], loops_over)

    def is_tensor(self, node: ast.expr) -> bool:
        """Returns whether an expression is a tensor of the device, and no list or dictionary of tensors."""
        return self.kind(node) in ON_DEVICE and not (isinstance(node, ast.Name) and node.id in self._containers)

    def kind(self, node: ast.expr) -> Kind:
        """Returns the kind of an expression's value; a list of tensors counts as a tensor."""
        if isinstance(node, ast.Name):
            kind = self.kinds.get(node.id, Kind.UNKNOWN)
            return Kind.TENSOR if kind is Kind.UNKNOWN and node.id in self._used_as_tensors else kind
        if isinstance(node, ast.Constant):
            return Kind.PLAIN
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, (ast.Subscript, ast.NamedExpr)):
            return self.kind(node.value)
        if isinstance(node, ast.Compare):
            return self._comparison(node)
        if isinstance(node, ast.UnaryOp):
            return Kind.PLAIN if isinstance(node.op, ast.Not) else self.kind(node.operand)
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
        return Kind.PLAIN if isinstance(node, (ast.JoinedStr, ast.Dict, ast.BoolOp)) else Kind.UNKNOWN

    def _attribute(self, node: ast.Attribute) -> Kind:
        if node.attr in _NAMES["plain_attributes"]:
            return Kind.PLAIN
        if node.attr in _NAMES["tensor_attributes"]:
            return self.kind(node.value)
        on_self = isinstance(node.value, ast.Name) and node.value.id == self._self and bool(self._self)
        return Kind.TENSOR if on_self and node.attr in self._attributes else Kind.UNKNOWN

    def _comparison(self, node: ast.Compare) -> Kind:
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
        name = self._context.full_name(chain_of(node.func))
        if name.startswith("torch."):
            return _kind_of_torch_call(name, node, self)
        returned = self._context.returned(name)
        if name.startswith("einops.") or (returned is not None and _names_tensor(returned)):
            return Kind.TENSOR
        if isinstance(node.func, ast.Name):
            if node.func.id in _HANDED_THROUGH and node.args and not name:
                return self.kind(node.args[0])
            is_bound = bool(name) or node.func.id in self.kinds
            return Kind.UNKNOWN if is_bound else Kind.PLAIN  # a name that nothing binds is a builtin, such as `len`
        if isinstance(node.func, ast.Attribute):
            return self._method(node, node.func)
        return Kind.UNKNOWN

    def _method(self, node: ast.Call, func: ast.Attribute) -> Kind:
        """Returns the kind of value that a method returns; a call of a submodule with a tensor returns a tensor."""
        kind = self.kind(func.value)
        method = func.attr
        if kind in (*ON_DEVICE, Kind.HOST) or method in _NAMES["tensor_methods"]:
            if method in _NAMES["plain_methods"]:
                return Kind.PLAIN
            if method == "cpu" or kind is Kind.HOST:
                return Kind.HOST
            stays = kind is Kind.MASK and method not in ("float", "long", "int", "sum", "cumsum")
            return Kind.MASK if stays or method in (*_NAMES["masks"], "bool") else Kind.TENSOR
        given = [self.kind(argument) for argument in node.args]
        on_self = isinstance(func.value, ast.Name) and func.value.id == self._self  # it may be a submodule
        return Kind.TENSOR if on_self and any(kind in ON_DEVICE for kind in given) else Kind.UNKNOWN


def _kind_of_torch_call(name: str, node: ast.Call, tensors: Tensors) -> Kind:
    """Returns whether a function of torch returns a tensor, a mask (bool tensor), or a plain Python value."""
    last = name.rpartition(".")[2]
    if name.startswith(_PLAIN_MODULES) or last in _NAMES["plain_functions"]:
        return Kind.PLAIN
    if name.startswith("torch.nn.") and not name.startswith("torch.nn.functional."):
        return Kind.PLAIN
    if last in (*_NAMES["masks"], "all", "any", "isin"):
        return Kind.MASK
    first = tensors.kind(node.args[0]) if node.args else Kind.UNKNOWN
    if first is Kind.MASK and last in ("cat", "concat", "stack", "zeros_like", "ones_like", "pad"):
        return Kind.MASK
    dtype = next((chain_of(keyword.value)[-1:] for keyword in node.keywords if keyword.arg == "dtype"), ())
    return Kind.MASK if dtype == ("bool",) else Kind.TENSOR


def _joint_kind(kinds: list[Kind]) -> Kind:
    """Returns the kind of a value made of other values: a tensor if any of them is a tensor, plain if all are plain."""
    found = [kind for kind in (Kind.TENSOR, Kind.MASK, Kind.HOST, Kind.UNKNOWN) if kind in kinds]
    return found[0] if found else Kind.PLAIN


def _items_of(index: ast.expr) -> list[ast.expr]:
    """Returns the parts of an index: `[a, b]` for `x[a, b]`."""
    return index.elts if isinstance(index, ast.Tuple) else [index]


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
        skipped = 1 if outer in (("Dict",), ("dict",), ("Mapping",)) else 0  # the keys
        return outer != ("Callable",) and any(map(_names_tensor, _items_of(annotation.slice)[skipped:]))
    if isinstance(annotation, ast.BinOp):
        return _names_tensor(annotation.left) or _names_tensor(annotation.right)
    return any(name in _NAMES["tensor_types"] for name in chain_of(annotation)[-1:])


def _is_collection(annotation: ast.expr) -> bool:
    """Returns whether an annotation is a collection such as `list[Tensor]`, or may be one."""
    if isinstance(annotation, ast.Subscript):
        outer = chain_of(annotation.value)[-1:]
        is_optional = outer in (("Optional",), ("Union",))
        return any(map(_is_collection, _items_of(annotation.slice))) if is_optional else outer != ()
    if isinstance(annotation, ast.BinOp):
        return _is_collection(annotation.left) or _is_collection(annotation.right)
    return False
