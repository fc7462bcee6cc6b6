"""One call of a network, in which the values at the borders of its modules are noted, and replaced by others.

What a module is called with and what it returns are its two borders. With the original's values at all borders,
whatever differs at a border was made since the border before: by a module, or by the code between two modules.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from torchport.verify.yardstick import sampled


class Border(NamedTuple):
    """Where a value enters a module or leaves it.

    Attributes:
        path: The module's.
        number: Which call of the module in this call of the network, from 0.
        side: `in` or `out`.
    """

    path: str
    number: int
    side: str


Values = dict[Border, Any]
"""Trees of tensors of the host by border, in the order of the call: of `in`, the arguments by name."""


class Pass:
    """Notes the values at borders, and replaces them.

    A value replaces another one where that has the same shape, and is as it of numbers or of true and false: a port may
    pad, or pass a mask in another form.

    Args:
        network: The module that is called.
        paths: Those of its modules that have borders.
        given: What replaces the values, on the host.
        to_network: Makes a tensor of the host one of the network's, which is its second argument.
        to_host: The other way round; a copy.
        skipped: Modules that are not called: they return what is given.
        counts: Returns how often each patch was called so far.
        whole: The borders at which large tensors are noted whole, and elsewhere in some rows; None: all.

    Attributes:
        noted: The values before they are replaced.
        touched: The patches that were called since the border before.
        autocasts: Whether a region of CUDA autocast was entered around a module.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        paths: Collection[str],
        given: Values,
        to_network: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        to_host: Callable[[torch.Tensor], torch.Tensor],
        skipped: Collection[str] = (),
        counts: Callable[[], Mapping[str, int]] = dict,
        whole: Container[Border] | None = None,
    ) -> None:
        self.modules = {path: module for path, module in network.named_modules() if path in paths}
        self.given = given
        self.to_network = to_network
        self.to_host = to_host
        self.skipped = skipped
        self.counts = counts
        self.whole = whole
        self.noted: Values = {}
        self.touched: dict[Border, frozenset[str]] = {}
        self.autocasts = False
        self._numbers: dict[str, list[int]] = {path: [] for path in self.modules}  # of the calls that are open
        self._begun = dict.fromkeys(self.modules, 0)
        self._before: Mapping[str, int] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watches the network for the length of a `with`."""
        handles: list[Any] = []
        self._before = self.counts()
        try:
            for path, module in self.modules.items():
                enter, leave = functools.partial(self._enter, path), functools.partial(self._leave, path)
                handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                handles.append(module.register_forward_hook(leave, with_kwargs=True))
                if path in self.skipped:
                    vars(module)["forward"] = functools.partial(self._returned, path)
            yield
        finally:
            for handle in handles:
                handle.remove()
            for path in self.skipped:
                vars(self.modules[path]).pop("forward", None)

    def _enter(self, path: str, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        number = self._begun[path]
        self._begun[path] += 1
        self._numbers[path].append(number)
        border = Border(path, number, "in")
        self.autocasts |= torch.is_autocast_enabled("cuda")
        if path in self.skipped:
            return None
        signature = inspect.signature(module.forward)
        bound = signature.bind(*args, **kwargs)
        self._note(border, dict(bound.arguments))
        if border not in self.given:
            return None
        bound.arguments.update(self._replaced(dict(bound.arguments), self.given[border]))
        return bound.args, bound.kwargs

    def _leave(self, path: str, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        border = Border(path, self._numbers[path].pop(), "out")
        if path in self.skipped:
            return None
        self._note(border, output)
        return self._replaced(output, self.given[border]) if border in self.given else None

    def _returned(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Returns what is given in place of a module's call, in its own dtype: an embedding's is not its input's."""
        given = self.given[Border(path, self._numbers[path][-1], "out")]
        return pytree.tree_map_only(torch.Tensor, lambda leaf: self.to_network(leaf, leaf), given)

    def _note(self, border: Border, value: Any) -> None:
        is_whole = self.whole is None or border in self.whole
        keep = self.to_host if is_whole else lambda tensor: sampled(self.to_host(tensor))
        self.noted[border] = pytree.tree_map_only(torch.Tensor, keep, value)
        now = self.counts()
        self.touched[border] = frozenset(key for key, count in now.items() if count != self._before.get(key, 0))
        self._before = now

    def _replaced(self, value: Any, given: Any) -> Any:
        """Returns a tree with what is given in place of each tensor that has the same shape."""
        if isinstance(value, Mapping) and isinstance(given, Mapping) and type(value) is dict:
            return {key: self._replaced(item, given[key]) if key in given else item for key, item in value.items()}
        leaves, structure = pytree.tree_flatten(value)
        others, other_structure = pytree.tree_flatten(given)
        if structure != other_structure:
            return value
        return pytree.tree_unflatten([self._leaf(*pair) for pair in zip(leaves, others, strict=True)], structure)

    def _leaf(self, value: Any, given: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not isinstance(given, torch.Tensor):
            return value
        fits = value.shape == given.shape and value.is_floating_point() == given.is_floating_point()
        return self.to_network(given, value) if fits else value


class Copies:
    """Copies tensors, as a module may write into what it gets; each once, until it is written into.

    It holds neither the tensors nor the copies: those of a whole network would not be freed.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]]] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy."""
        key = id(tensor), tensor._version
        known, copy = (reference() for reference in self._known.get(key, (_nothing, _nothing)))
        if copy is None or known is not tensor:  # another tensor may have the id of one that is gone
            copy = tensor.detach().clone()
            self._known[key] = weakref.ref(tensor), weakref.ref(copy)
        return copy


def _nothing() -> None:
    """Stands for a reference to what is gone."""


def inner_paths(network: torch.nn.Module, path: str) -> list[str]:
    """Returns the paths of a unit and of all modules in it that can be called."""
    lists = (torch.nn.ModuleList, torch.nn.ModuleDict)
    modules = network.get_submodule(path).named_modules()
    inner = [f"{path}.{name}" for name, module in modules if name and not isinstance(module, lists)]
    return [path, *inner]


def size(values: Values) -> int:
    """Returns the bytes of all tensors."""
    leaves = pytree.tree_leaves(list(values.values()))
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())
