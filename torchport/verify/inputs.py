"""Inputs of upstream's functions: those of a real call, and others that are made of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchport import engine
from torchport.patch import Entry
from torchport.patch.live.target import Slot, locate

CALLS = 2
"""Calls of a function that are kept: those with other shapes than before."""
GREAT = 1000.0
"""What values are multiplied by, to see what overflows."""


@dataclasses.dataclass
class Noted:
    """One call of an upstream function.

    Attributes:
        what: How its inputs were made: `captured`, or what was changed in them.
        module: The module whose method it is; None for a function.
        args: Its positional arguments, without the module.
        kwargs: Its keywords.
    """

    what: str
    module: torch.nn.Module | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def has_tensor(self) -> bool:
        """Whether a tensor is among the inputs."""
        return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((self.args, self.kwargs)))

    def mapped(self, what: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Noted:
        """Returns the call with every tensor changed, and nothing else."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, function, (self.args, self.kwargs))
        return Noted(what, self.module, args, kwargs)

    def copied(self) -> Noted:
        """Returns a copy: a function may write into what it gets."""
        return self.mapped(self.what, lambda tensor: tensor.detach().clone())


def slot_of(entry: Entry) -> Slot | None:
    """Returns where a patch's target stands; None where its module is not imported, or it is no plain function."""
    module = sys.modules.get(entry.module)
    if module is None or not entry.edits:
        return None
    slot = locate(entry, module)
    return slot if isinstance(slot.raw, types.FunctionType) else None


def function_of(entry: Entry) -> Any:
    """Returns what stands at a patch's target now, unbound."""
    if entry.kind == "op":
        return engine.operator(entry.target)
    value: Any = sys.modules[entry.module]
    for part in entry.path:
        value = getattr(value, part)
    return value


class _Functions(TorchFunctionMode):
    """Notes calls of PyTorch's functions."""

    def __init__(self, noted: Mapping[Any, list[Noted]]) -> None:
        super().__init__()
        self.noted = noted

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes a call, and carries it out."""
        _note(self.noted.get(function), None, args, kwargs or {})
        return function(*args, **(kwargs or {}))


class _Overloads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes calls of ATen's overloads."""

    supports_higher_order_operators = True  # they pass through, as flex attention does

    def __init__(self, noted: Mapping[Any, list[Noted]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noted = noted

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes a call, and carries it out."""
        _note(self.noted.get(function), None, args, kwargs or {})
        return function(*args, **(kwargs or {}))


def _note(noted: list[Noted] | None, module: torch.nn.Module | None, args: Any, kwargs: Any) -> None:
    """Keeps a call if it is one of the first with its shapes."""
    one = Noted("captured", module, tuple(args), dict(kwargs))
    if noted is not None and len(noted) < CALLS and _shapes(one) not in map(_shapes, noted):
        noted.append(one.copied())


@contextlib.contextmanager
def noting(entries: Sequence[Entry]) -> Iterator[dict[str, list[Noted]]]:
    """Notes the calls of the targets of patches that are not in force, by the patches' ids."""
    calls: dict[str, list[Noted]] = {}
    slots: dict[Any, tuple[Slot, list[Noted]]] = {}
    for entry in entries:
        slot = slot_of(entry)
        if slot is not None:
            key = (id(slot.holder), slot.name)
            calls[entry.id] = slots.setdefault(key, (slot, []))[1]
    ops = [entry for entry in entries if entry.kind == "op"]
    operators = {engine.operator(entry.target): calls.setdefault(entry.id, []) for entry in ops}
    for slot, noted in slots.values():
        slot.put(_noting(slot.raw, noted))
    try:
        overloads = {op: noted for op, noted in operators.items() if isinstance(op, torch._ops.OpOverload)}
        # Compiled code of upstream's would be interpreted under a mode, so it is entered where it is needed.
        with _Functions(operators), _Overloads(overloads) if overloads else contextlib.nullcontext():
            yield calls
    finally:
        for slot, _ in slots.values():
            slot.restore()


def _noting(function: Callable[..., Any], noted: list[Noted]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        module = args[0] if args and isinstance(args[0], torch.nn.Module) else None
        _note(noted, module, args[1:] if module is not None else args, kwargs)
        return function(*args, **kwargs)

    return call


def _shapes(call: Noted) -> str:
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    return str([(leaf.dtype, tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in leaves])


def made_of(call: Noted) -> list[Noted]:
    """Returns other inputs: masks of all forms, an odd length, another dtype, and values that are great or zero."""
    return [*_masks(call), *_odd(call), *_dtypes(call), *_extremes(call)]


def _is_mask(tensor: torch.Tensor) -> bool:
    if tensor.dtype == torch.bool:
        return True
    return tensor.ndim >= 2 and tensor.numel() > 1 and bool(((tensor == 0) | (tensor == 1)).all())


def _masks(call: Noted) -> Iterator[Noted]:
    if not any(_is_mask(leaf) for leaf in _tensors(call)):
        return

    def first_only(tensor: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros_like(tensor)
        mask[..., 0] = 1
        return mask

    def half(tensor: torch.Tensor) -> torch.Tensor:
        mask = torch.ones_like(tensor)
        mask[..., tensor.shape[-1] // 2 :] = 0
        return mask

    forms = {"all valid": torch.ones_like, "the first alone valid": first_only, "half valid": half}
    for name, form in forms.items():
        yield call.mapped(f"mask: {name}", lambda x, form=form: form(x) if _is_mask(x) else x)  # type: ignore[misc]


def _odd(call: Noted) -> Iterator[Noted]:
    """Yields a call with an odd number of tokens: the size that most tensors have in a dim that is not their last."""
    sizes = Counter(
        size for tensor in _tensors(call) if tensor.ndim > 2 for size in set(tensor.shape[1:-1]) if size > 4
    )
    if not sizes:
        return
    size = sizes.most_common(1)[0][0]
    odd = size - 1 if size % 2 == 0 else size - 2

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        for dim in range(min(1, tensor.ndim), tensor.ndim):
            tensor = tensor.narrow(dim, 0, odd) if tensor.shape[dim] == size else tensor
        return tensor.clone()

    yield call.mapped(f"{odd} tokens", cut)


def _dtypes(call: Noted) -> Iterator[Noted]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if any(leaf.is_floating_point() and leaf.dtype != dtype for leaf in _tensors(call)):
            name = str(dtype).removeprefix("torch.")
            yield call.mapped(name, lambda x, d=dtype: x.to(d) if x.is_floating_point() else x)  # type: ignore[misc]


def _extremes(call: Noted) -> Iterator[Noted]:
    if any(leaf.is_floating_point() and not _is_mask(leaf) for leaf in _tensors(call)):
        for name, factor in (("great values", GREAT), ("zeros", 0.0)):
            yield call.mapped(name, functools.partial(_times, factor))


def _times(factor: float, tensor: torch.Tensor) -> torch.Tensor:
    return tensor * factor if tensor.is_floating_point() and not _is_mask(tensor) else tensor


def _tensors(call: Noted) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
