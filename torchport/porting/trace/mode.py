"""A mode of torch under which a trace goes on where it would stop: each stopper is noted, and a value assumed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from torchport import engine
from torchport.errors import HostTensorError
from torchport.load.foreign import is_cuda
from torchport.porting.trace.notes import Notes, Raised
from torchport.stages import constants

_TRUE = {"all", "equal", "allclose", "isfinite", "isclose", "__ge__", "__le__", "ge", "le"}
"""Functions whose answer is assumed to be true: code asserts it, or raises where it is not."""
_SCALARS = {"item", "__float__", "__int__", "__index__", "__bool__", "is_nonzero"}


def is_networks(value: Any) -> bool:
    """Returns whether a value is a tensor of the network: the engine's, or one on meta."""
    return engine.is_traced(value) or (isinstance(value, torch.Tensor) and value.is_meta)


class GoingOn(TorchFunctionMode):
    """Carries functions out, and where one cannot be, notes why and returns a plausible value."""

    def __init__(self, notes: Notes, counts: bool) -> None:
        super().__init__()
        self.notes = notes
        self.counts = counts
        self.made: Any = WeakIdKeyDictionary()
        self.by: Any = WeakIdKeyDictionary()

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carries a function out, or returns what is assumed in its place."""
        kwargs = kwargs or {}
        if self.counts:
            self._note_constants(function, args, kwargs)
        with Raised() as raised:
            output = function(*args, **kwargs)
        if raised.error is not None:
            return self._assumed(raised.error, function, args, kwargs)
        self._remember(function, output, args, kwargs)
        return output

    def _remember(self, function: Callable[..., Any], output: Any, args: Any, kwargs: Any) -> None:
        """Notes the line that made a tensor of the host, and which function made a truth value."""
        if not isinstance(output, torch.Tensor):
            return
        if constants.is_host(output) and output.ndim and output not in self.made:
            self.made[output] = constants.place()
        if output.dtype == torch.bool and not output.ndim:
            self.by[output] = getattr(function, "__name__", "")

    def _note_constants(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(map(is_networks, tensors)):
            for tensor in tensors:
                if constants.is_host(tensor) and tensor.ndim:
                    used = constants.place()
                    self.notes.note_constant(tensor, self.made.get(tensor, used), used)

    def _assumed(self, error: BaseException, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Notes an exception and returns what is assumed in place of the result."""
        name = getattr(function, "__name__", "")
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if isinstance(error, HostTensorError) or engine.is_host_tensor(error):
            return self._without_host(error, function, args, kwargs)
        if is_cuda(error):
            self.notes.record(error, "the tensor stays where it is")
            args, kwargs = pytree.tree_map(self._off_cuda, (args, kwargs))
            return args[0] if name == "cuda" else function(*args, **kwargs)
        if name in _SCALARS and tensors and engine.is_traced_value(error):
            return self._scalar(error, name, tensors[0])
        if engine.is_traced_value(error) and any(map(is_networks, tensors)):
            return self._by_value(error, function, args, kwargs)
        if engine.missing_operator(error) is not None:
            return self._unlowered(error, function, args, kwargs)
        raise error

    def _scalar(self, error: BaseException, name: str, tensor: torch.Tensor) -> Any:
        frame = self.notes.here()
        statement = frame.statement if frame is not None else ""
        is_truth = name in ("__bool__", "is_nonzero") or tensor.dtype == torch.bool
        if is_truth:
            value: Any = statement.startswith("assert") or self.by.get(tensor, "") in _TRUE
        else:
            value = 1.0 if tensor.dtype.is_floating_point and name != "__int__" else 1
        self.notes.record(error, f"the value is {value}")
        return value

    def _by_value(self, error: BaseException, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns the result for a function whose output's shape follows from values: of a mask, all is selected."""
        name = getattr(function, "__name__", "")
        if name == "tolist":
            self.notes.record(error, "all values are 1")
            return torch.ones(args[0].shape, dtype=args[0].dtype).tolist()
        if name in ("nonzero", "argwhere", "nonzero_static"):
            self.notes.record(error, "all values are true")
            return torch.ones(args[0].shape, dtype=torch.bool).nonzero(**kwargs)
        if name in ("__getitem__", "masked_select") and isinstance(args[1], torch.Tensor):
            self.notes.record(error, "the mask is true everywhere")
            return args[0].flatten(0, args[1].ndim - 1)
        shape = _first_network(args, kwargs)
        self.notes.record(error, f"the result is zeros like the first argument, {list(shape.shape)}")
        return torch.zeros_like(shape)

    def _unlowered(self, error: BaseException, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns zeros of the shapes that the operator has on meta."""
        like = _first_network(args, kwargs)
        meta = pytree.tree_map_only(torch.Tensor, _on_meta, (args, kwargs))
        self.notes.record(error, "the result is zeros")
        with torch._C.DisableTorchFunction():
            output = function(*meta[0], **meta[1])
        return pytree.tree_map_only(
            torch.Tensor, lambda leaf: like.new_zeros(tuple(leaf.shape), dtype=leaf.dtype), output
        )

    def _without_host(self, error: BaseException, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns the result with zeros of the network in place of the host's tensors."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        hosts = [leaf for leaf in tensors if constants.is_host(leaf)]
        made = next((self.made[leaf] for leaf in hosts if leaf in self.made), None)
        if not any(map(is_networks, tensors)):  # numbers that are drawn: their shape alone counts
            self.notes.record_made(error, "the numbers are drawn once", made)
            with torch._C.DisableTorchFunction():
                return torch.zeros(tuple(function(*args, **kwargs).shape))
        like = next(leaf for leaf in tensors if is_networks(leaf))
        if "writes" in str(error):
            self.notes.record_made(error, "nothing is written", made)
            return args[0]
        self.notes.record_made(error, "the host's tensor is zeros of the network", made)
        args, kwargs = _replaced(args, kwargs, hosts, like)
        return function(*args, **kwargs)

    def _off_cuda(self, value: Any) -> Any:
        is_device = isinstance(value, torch.device) and value.type == "cuda"
        return "cpu" if is_device or (isinstance(value, str) and re.match(r"cuda(:\d+)?$", value)) else value


def _replaced(args: Any, kwargs: Any, hosts: list[torch.Tensor], like: torch.Tensor) -> Any:
    """Returns arguments with zeros of the network in place of the host's tensors."""
    ids = {id(one) for one in hosts}

    def replaced(leaf: torch.Tensor) -> torch.Tensor:
        if id(leaf) not in ids:
            return leaf
        return like.new_zeros(tuple(leaf.shape), dtype=_narrow(leaf.dtype))

    return pytree.tree_map_only(torch.Tensor, replaced, (args, kwargs))


def _narrow(dtype: torch.dtype) -> torch.dtype:
    return {torch.float64: torch.float32, torch.complex128: torch.complex64}.get(dtype, dtype)


def _first_network(args: Any, kwargs: Any) -> torch.Tensor:
    leaves = pytree.tree_leaves((args, kwargs))
    first: torch.Tensor = next(leaf for leaf in leaves if is_networks(leaf))
    return first


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")
