"""The findings of one function, before anybody asks what leads to it.

Each detector looks at one event. A context is the function, with what its names mean and which of them are tensors.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Callable, Iterator

from torchport.porting.scan.codebase import Codebase, CodeUnit
from torchport.porting.scan.facts import Conditions, Terms
from torchport.porting.scan.syntax import MODULE, TRIED, Act, Body, Event, chain_of, head_of
from torchport.porting.scan.tensors import ON_DEVICE, Kind, Tensors

_BUILDERS = {
    "__init__", "reset_parameters", "init_weights", "_init_weights", "initialize_weights", "__new__",
    "__post_init__",
}  # fmt: skip
_LONGEST = 90


@dataclasses.dataclass(frozen=True)
class Site:
    unit: CodeUnit
    kind: str
    line: int
    text: str
    conditions: Conditions
    uses: str = ""
    if_none: str = ""  #: A parameter that must be None for it to be one.
    #: Whether it is one for certain: not where a package is tried, or where a tensor is only assumed.
    sure: bool = True


def text_of(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


class FunctionContext:
    """What the detectors know of a function: what its names mean, and which of them are tensors."""

    def __init__(self, codebase: Codebase, unit: CodeUnit, body: Body, attributes: frozenset[str]) -> None:
        self.unit = unit
        self.codebase = codebase
        self.terms = Terms(unit.parameters, unit.first, lambda node: codebase.meant(unit, chain_of(node)))
        self.at_import = unit.name == MODULE
        kinds: dict[str, Kind] = {}

        def full(node: ast.AST) -> str:
            head = head_of(node)
            if not head or head not in heads or (head in hidden and head not in unit.imports):
                return ""
            return codebase.meant(unit, chain_of(node))

        hidden = {} if self.at_import else kinds  # local names, which hide those of the module
        heads = self.heads = unit.heads
        self.full = full
        self.tensors = Tensors(unit, body, kinds, full, attributes, functools.partial(_returns, codebase))
        self.builds = unit.name.rpartition(".")[2] in _BUILDERS
        self._body = body

    @functools.cached_property
    def asks_for_autocast(self) -> set[ast.AST]:
        return {node for event in self._body.by_act[Act.CALL] for node in _arguments_of_autocast(event)}

    def site(self, kind: str, event: Event, uses: str = "", if_none: str = "", sure: bool = True) -> Site:
        line, conditions = getattr(event.node, "lineno", 1), self.terms.conditions(event.guards)
        return Site(self.unit, kind, line, text_of(event.node), conditions, uses, if_none, sure)


def _returns(codebase: Codebase, name: str) -> ast.expr | None:
    known = codebase.definition(name) if name else None
    return known.returns if isinstance(known, CodeUnit) else None


def _arguments_of_autocast(event: Event) -> Iterator[ast.AST]:
    if event.act is Act.CALL and isinstance(event.node, ast.Call):
        func = event.node.func
        last = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
        if last in ("autocast", "custom_fwd", "custom_bwd", "GradScaler"):
            yield from (*event.node.args, *(keyword.value for keyword in event.node.keywords))


KERNELS = {
    "flash_attn", "flash_attn_interface", "flash_attn_2_cuda", "flash_attn_3", "xformers", "sageattention",
    "sageattn", "sageattn3", "triton", "apex", "bitsandbytes", "natten", "flex_block_attn", "spas_sage_attn",
    "transformer_engine", "mamba_ssm", "causal_conv1d", "cupy", "pycuda", "tensorrt", "block_sparse_attn",
    "flashinfer", "liger_kernel", "sgl_kernel", "magi_attention",
}  # fmt: skip
"""Packages of GPU kernels."""
_FLEX = "torch.nn.attention.flex_attention"
_ANSWERED = {
    "is_available", "device_count", "empty_cache", "manual_seed", "manual_seed_all", "memory_allocated",
    "memory_reserved", "max_memory_allocated", "max_memory_reserved", "is_initialized", "is_bf16_supported", "seed",
    "seed_all", "amp",
}  # fmt: skip
"""What torch.cuda answers without CUDA."""
_WITHOUT_GROUP = {
    "is_initialized", "is_available", "is_nccl_available", "is_torchelastic_launched", "ProcessGroup", "ReduceOp",
}  # fmt: skip
_WRAPPERS = ("torch.nn.parallel.DistributedDataParallel", "deepspeed.", "torch.distributed.")
MAKES_GROUP = {"init_process_group", "init_device_mesh", "new_group", "new_subgroups", "DeviceMesh"}
"""What makes a process group; what asks one comes after it."""
_FACTORIES = {
    "arange", "linspace", "logspace", "tensor", "zeros", "ones", "full", "empty", "eye", "rand", "randn", "randint",
    "randperm", "normal", "Tensor", "FloatTensor", "LongTensor", "tril_indices", "triu_indices", "hann_window",
    "range",
}  # fmt: skip
AUTOCAST = "torch.amp.autocast_mode.autocast"
"""The class that all names of autocast lead to."""
_BACKENDS = {"torch.nn.attention.sdpa_kernel", "torch.backends.cuda.sdp_kernel"}
"""What allows only some kernels of attention."""
_COMPILES = {
    "torch.compile", "torch.jit.script", "torch.jit.trace", "torch.jit.script_method",
    "torch.jit.script_if_tracing", "torch.compiler.disable", "torch.compiler.allow_in_graph",
    "torch._dynamo.disable", "torch._dynamo.optimize", "torch._dynamo.allow_in_graph", "torch.jit.freeze",
    "torch.jit.load", "torch.jit.trace_module", "torch.compiler.compile",
}  # fmt: skip
_FLOAT64 = {"torch.float64", "torch.double", "torch.DoubleTensor"}
_COMPLEX = {
    "torch.view_as_complex", "torch.view_as_real", "torch.polar", "torch.complex", "torch.complex64",
    "torch.complex128", "torch.cfloat",
}  # fmt: skip
_BY_VALUES_METHODS = {"nonzero", "masked_select", "argwhere", "unique_consecutive", "bincount"}
BY_VALUES = {f"torch.{name}" for name in (*_BY_VALUES_METHODS, "unique")}
DIFFERING = {
    "torch.allclose", "torch.ctc_loss", "torch.equal", "torch.linalg.ldl_solve", "torch.linalg.matrix_exp",
    "torch.matrix_exp", "torch.nn.functional.ctc_loss", "torch.special.airy_ai",
}  # fmt: skip
"""Beside those, what the engine's table has as differing for all of its arguments."""
_NOT_INPLACE = {"requires_grad_", "eval_", "share_memory_", "enable_", "disable_", "apply_", "rename_", "to_"}

_OUTER = (ast.BitAnd, ast.BitOr, ast.Sub)
_FEATURES = {"d", "dim", "c", "channels", "head_dim", "hidden_size", "features", "embed_dim", "self.head_dim"}
"""Sizes of what is no position."""
_MADE = {"zeros", "ones", "full", "empty", "eye", "tri", "new_zeros", "new_ones", "new_full"}


Detector = Callable[[FunctionContext, Event], Iterator[Site]]


def sites(context: FunctionContext, body: Body) -> Iterator[Site]:
    """Yields the findings of a function in order, each kind once for a line."""
    tensors = context.unit.module.uses_torch
    detectors = _BY_ACT if tensors else _WITHOUT_TORCH
    seen: set[tuple[str, int]] = set()
    heads = context.heads
    for event in body.events:
        if event.act is Act.CHAIN and head_of(event.node) not in heads:
            continue
        for detector in detectors.get(event.act, ()):
            for site in detector(context, event):
                if (site.kind, site.line) not in seen:
                    seen.add((site.kind, site.line))
                    yield site
        if tensors and event.act in (Act.ASSIGN, Act.ENTER):
            context.tensors.follow(event)


def _imports(context: FunctionContext, event: Event) -> Iterator[Site]:
    """Yields imports of packages of GPU kernels."""
    node = event.node
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom) and not node.level:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    for name in names:
        if is_kernel(name) and not context.codebase.has(name):
            yield context.site("kernel", event, name, sure=TRIED not in event.guards and not name.startswith(_FLEX))


def is_autocast(name: str) -> bool:
    return name.startswith("torch.") and name.rpartition(".")[2] in ("autocast", "custom_fwd")


def is_kernel(name: str) -> bool:
    return name.partition(".")[0] in KERNELS or name == _FLEX or name.startswith(f"{_FLEX}.")


def _kind_of_name(context: FunctionContext, name: str) -> str:
    """Returns the kind of finding that a name in full is, read or called; empty for none."""
    if is_kernel(name):
        return "" if context.at_import else "kernel"
    if name in _FLOAT64:
        return "float64"
    return "complex" if name in _COMPLEX or name.startswith("torch.fft.") else ""


def _names(context: FunctionContext, event: Event) -> Iterator[Site]:
    """Yields names that are read: of a kernel package, float64 or complex numbers."""
    name = context.full(event.node)
    kind = _kind_of_name(context, name)
    if kind:
        yield context.site(kind, event, name)


def _calls(context: FunctionContext, event: Event) -> Iterator[Site]:
    """Yields calls that will not port: by their full name, of a method, and `int(x)` or the like of a tensor."""
    if not isinstance(event.node, ast.Call):
        return
    node, name = event.node, context.full(event.node.func)
    if name.startswith(("torch.", "deepspeed.")) or is_kernel(name):
        kind = _kind_of_call(context, node, name)
        if kind:
            yield context.site(kind, event, name)
        yield from _host_tensors(context, event, node, name)
    if isinstance(node.func, ast.Attribute):
        yield from _method_calls(context, event, node, node.func)
    called = node.func.id if isinstance(node.func, ast.Name) and not name else ""
    converts = called in ("int", "float", "bool", "range", "round")
    if converts and any(context.tensors.kind(argument) in ON_DEVICE for argument in node.args):
        yield context.site("branch" if called == "bool" else "item", event)


def _kind_of_call(context: FunctionContext, node: ast.Call, name: str) -> str:
    """Returns the kind of finding that a call is by its full name, as `torch.cuda.synchronize`; empty for none."""
    last = name.rpartition(".")[2]
    if is_autocast(name):
        return ""  # as a context or decorator
    if name.startswith("torch.cuda.") and name.split(".")[2] not in _ANSWERED:
        return "cuda-import" if context.at_import else "cuda-call"
    if name.startswith(_WRAPPERS) and last not in _WITHOUT_GROUP and "._checkpoint." not in name:
        return "cuda-import" if context.at_import else "process-group"
    if name in _COMPILES:
        return "compile"
    if name in BY_VALUES or (name == "torch.where" and len(node.args) == 1):
        return "mask-index"
    return "operator" if name in DIFFERING else _kind_of_name(context, name)


def _host_tensors(context: FunctionContext, event: Event, node: ast.Call, name: str) -> Iterator[Site]:
    """Yields a call such as `torch.zeros(4)` without a device, outside of constructors: a tensor of the host."""
    module, _, last = name.rpartition(".")
    if module != "torch" or last not in _FACTORIES or context.builds or context.at_import:
        return
    device = next((keyword.value for keyword in node.keywords if keyword.arg == "device"), None)
    if device is None and any(keyword.arg is None for keyword in node.keywords):
        return  # in a dictionary that is unpacked
    inner = device.args[0] if isinstance(device, ast.Call) and device.args else device
    if device is None or (isinstance(inner, ast.Constant) and inner.value in ("cpu", None)):
        yield context.site("host-tensor", event, name)
    elif isinstance(device, ast.Name) and context.unit.defaults.get(device.id) == ("const", None):
        yield context.site("host-tensor", event, name, if_none=device.id)


def _method_calls(context: FunctionContext, event: Event, node: ast.Call, func: ast.Attribute) -> Iterator[Site]:
    """Yields calls of methods that will not port, such as `.item()`, `.cuda()`, `.nonzero()`, `.add_()` in a loop."""
    method = func.attr
    plain = context.full(func).startswith(("numpy.", "math."))
    if method in ("item", "tolist") and not node.args and not plain:
        yield context.site("item", event, sure=context.tensors.kind(func.value) in ON_DEVICE)
    elif method == "numpy" and not node.args:
        if context.tensors.kind(func.value) in ON_DEVICE:
            yield context.site("item", event)
    elif method == "cuda" and not context.full(func):
        yield context.site("cuda-import" if context.at_import else "cuda-device", event)
    elif method == "double" and not node.args and not context.full(func):
        yield context.site("float64", event)
    elif method in _BY_VALUES_METHODS and not context.full(func):
        yield context.site("mask-index", event)
    elif (method == "unique" or f"torch.{method}" in DIFFERING) and context.tensors.kind(func.value) in ON_DEVICE:
        yield context.site("mask-index" if method == "unique" else "operator", event)
    in_place = method.endswith("_") and not method.endswith("__") and method not in _NOT_INPLACE
    if event.loop and in_place and not context.builds and not context.full(func):
        yield context.site("inplace-loop", event)


def _branches(context: FunctionContext, event: Event) -> Iterator[Site]:
    """Yields a condition that depends on the values of a tensor."""
    pending = [event.node]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.BoolOp):
            pending += node.values
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            pending.append(node.operand)
        elif (
            isinstance(node, ast.expr)
            and context.tensors.kind(node) in ON_DEVICE
            and not context.tensors.is_container(node)
        ):
            yield context.site("branch", event)
            return


def _indices(context: FunctionContext, event: Event) -> Iterator[Site]:
    """Yields an index that needs a tensor's values: a bound of a slice, or a mask."""
    if not isinstance(event.node, ast.Subscript):
        return
    index = event.node.slice
    for part in index.elts if isinstance(index, ast.Tuple) else [index]:
        if isinstance(part, ast.Slice):
            bounds = [bound for bound in (part.lower, part.upper) if bound is not None]
            if any(context.tensors.kind(bound) in ON_DEVICE for bound in bounds):
                yield context.site("item", event)
        elif context.tensors.kind(part) is Kind.MASK and context.tensors.kind(event.node.value) is not Kind.PLAIN:
            yield context.site("mask-index", event)


def _writes(context: FunctionContext, event: Event) -> Iterator[Site]:
    """Yields an assignment to a part of a tensor, in a loop or through a mask."""
    if not isinstance(event.node, ast.Subscript) or context.builds:
        return
    base = event.node.value
    if event.loop and context.tensors.kind(base) in ON_DEVICE and not context.tensors.is_container(base):
        yield context.site("inplace-loop", event)
    if event.value is not None and not isinstance(event.value, ast.Constant):
        yield from (site for site in _indices(context, event) if site.kind == "mask-index")


def _contexts(context: FunctionContext, event: Event) -> Iterator[Site]:
    """Yields a `with` or decorator of autocast, of the kernels of attention, of a compiler, or of a kernel package."""
    name = context.full(event.node.func if isinstance(event.node, ast.Call) else event.node)
    if is_autocast(name):
        yield context.site("autocast", event, AUTOCAST)
    elif name in _BACKENDS:
        yield context.site("attention-backend", event, name)
    elif name in _COMPILES:
        yield context.site("compile", event, name)
    elif is_kernel(name):
        yield context.site("kernel", event, name)


def _cuda_strings(context: FunctionContext, event: Event) -> Iterator[Site]:
    """Yields a string such as "cuda:0", unless it is an argument of autocast."""
    if event.node in context.asks_for_autocast:
        return
    text = ast.unparse(event.node).strip("'\"f")
    if text == "cuda" or text.startswith("cuda:"):
        yield context.site("cuda-import" if context.at_import else "cuda-device", event)


def _square_masks(context: FunctionContext, event: Event) -> Iterator[Site]:
    """Yields masks of all pairs of positions: made as a square, or as in `x[:, None] == x[None]`."""
    node = event.node
    pair: tuple[ast.expr, ast.expr] | None = None
    if isinstance(node, ast.BinOp) and isinstance(node.op, _OUTER):
        pair = node.left, node.right
    elif isinstance(node, ast.Compare) and len(node.comparators) == 1:
        pair = node.left, node.comparators[0]
    elif isinstance(node, ast.Call):
        last = context.full(node.func).rpartition(".")[2]
        if not last and isinstance(node.func, ast.Attribute):
            last = node.func.attr
        if last in ("logical_and", "logical_or") and len(node.args) == 2:
            pair = node.args[0], node.args[1]
        elif last in _MADE and _is_square(node, last):
            yield context.site("square-mask", event)
    if pair is not None and _are_all_pairs(context, *pair):
        yield context.site("square-mask", event)


def _is_square(node: ast.Call, name: str) -> bool:
    """Returns whether a factory call makes a square of positions: its last two sizes are equal, and no feature size."""
    if name in ("eye", "tri"):
        return bool(node.args) and not _is_small(node.args[0]) and ast.unparse(node.args[0]).lower() not in _FEATURES
    parts = node.args[0].elts if node.args and isinstance(node.args[0], (ast.Tuple, ast.List)) else node.args
    if not 2 <= len(parts) <= 4 or any(_is_small(part) for part in parts[-2:]):  # more dims are those of a video
        return False
    size = ast.unparse(parts[-1])
    return ast.unparse(parts[-2]) == size and size.lower() not in _FEATURES


def _is_small(node: ast.expr) -> bool:
    return isinstance(node, (ast.Constant, ast.UnaryOp, ast.Starred))


def _are_all_pairs(context: FunctionContext, left: ast.expr, right: ast.expr) -> bool:
    """Returns whether two sides are one tensor with a new dim each, at another place: all pairs are combined."""
    first, other = _added_dim(context, left), _added_dim(context, right)
    return first[1] != other[1] and first[0] == other[0] and bool(first[0])


def _added_dim(context: FunctionContext, node: ast.expr, depth: int = 0) -> tuple[str, str]:
    """Returns `x` and `:, None` for `x[:, None]`, or `x` and the whole call for `x.unsqueeze(1)`, a transposition and
    einops; `x` and an empty text for a name, and two empty texts for other nodes.
    """
    if isinstance(node, ast.Name) and depth < 3:
        made = context.tensors.made_from.get(node.id)
        if isinstance(made, (ast.Call, ast.Subscript)):
            inner = _added_dim(context, made, depth + 1)
            return inner if inner[1] else (node.id, "")
        return node.id, ""
    if isinstance(node, ast.Subscript):
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if any(isinstance(part, ast.Constant) and part.value is None for part in parts):
            return ast.unparse(node.value), ast.unparse(node.slice)
    if isinstance(node, ast.Call):
        func = node.func
        if isinstance(func, ast.Attribute) and func.attr in ("unsqueeze", "transpose"):
            return ast.unparse(func.value), ast.unparse(node)
        if context.full(func) == "einops.rearrange" and len(node.args) > 1:
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
