"""Tensors of the host that a network meets while it is traced: they become constants of its program."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torchport.errors import HostTensorError
from torchport.files.folder import as_named

RANDOM = {
    *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.bernoulli, torch.multinomial),
    *(torch.rand_like, torch.randn_like, torch.randint_like, torch.Tensor.normal_, torch.Tensor.uniform_),
    *(torch.Tensor.random_, torch.Tensor.bernoulli_, torch.Tensor.exponential_),
}
"""Functions that draw numbers. What is drawn while a network is traced is the same in every call of its program."""

WRITES = re.compile(r"(.*[^_])?_|__set(item)?__|__i.*")
"""Names of functions of PyTorch that change their first argument: `copy_`, `__setitem__`, `__iadd__`."""

LIBRARIES = ("torch", "torchax", "jax", "torchport")
"""Packages whose frames are not where a constant is made."""


class Constants(TorchFunctionMode):
    """A mode in which a function that gets tensors of the host and of the network gets the first ones converted.

    A function of the host's tensors alone computes on the host. A tensor without dims is left as it is: PyTorch and the
    engine both take it for a number, which does not widen the other arguments' dtype.

    Args:
        is_networks: Whether a tensor is the network's.
        convert: Returns a tensor of the host as a tensor of the network.
    """

    def __init__(self, is_networks: Callable[[Any], bool], convert: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.is_networks = is_networks
        self.convert = convert

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function, with constants in place of the host's tensors beside tensors of the network.

        Refuses a function that writes values of the network into a tensor of the host, or that draws random numbers.
        """
        kwargs = kwargs or {}
        # It takes numbers, and its only tensor is the network's: the checks below would not see a tensor of the host.
        if function is torch.Tensor.new_tensor and self.is_networks(args[0]):
            dtype = kwargs.get("dtype") or args[0].dtype
            return self.convert(torch.tensor(*args[1:], **{**kwargs, "dtype": dtype, "device": "cpu"}))
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if torch.is_autocast_enabled("cpu") and any(map(self.is_networks, tensors)):
            fact = "torch.autocast('cpu') casts tensors of the host, and none of the network's"
            raise HostTensorError(place(), fact, "Enter torch.autocast('cuda'), which has its dtypes here, too")
        if any(map(is_host, tensors)) and any(map(self.is_networks, tensors)):
            name = getattr(function, "__name__", "")
            if is_host(kwargs.get("out")) or (WRITES.fullmatch(name) and is_host(args[0])):
                fact = f"'{name}' writes values of the network into a tensor that is made on the host"
                remedy = "Make that tensor with `device=x.device`, x a tensor of the network"
                raise HostTensorError(place(), fact, remedy, tensor=kwargs.get("out", args[0] if args else None))
            args, kwargs = converted((args, kwargs), lambda x: self.convert(x) if x.ndim else x)
        if function in RANDOM:
            fact = f"'{function.__name__}' draws numbers while the network is traced, the same for every call"
            raise HostTensorError(place(), fact, "Draw them in the stage's verb, and pass them as an input")
        return function(*args, **kwargs)


def converted(tree: Any, convert: Callable[[torch.Tensor], Any]) -> Any:
    """Returns a tree with `convert(tensor)` in place of each tensor of the host."""
    return pytree.tree_map_only(torch.Tensor, lambda leaf: convert(leaf) if is_host(leaf) else leaf, tree)


def is_host(value: Any) -> bool:
    """Returns whether a value is a tensor with values in the host's memory."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type == "cpu"


def place() -> str:
    """Returns the line of the model's code, or of a patch, that is being executed: `file:line`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARIES:
        frame = frame.f_back
    return f"{as_named(Path(frame.f_code.co_filename))}:{frame.f_lineno}"
