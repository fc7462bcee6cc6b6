"""The original's network beside the yardstick: what both have at the borders of modules."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from torchport.compile.eager import Eager
from torchport.stages.recorder import unit_paths
from torchport.verify.borders import Copies, Pass, Values, inner_paths
from torchport.verify.yardstick import computing_in, wide_dtype, wide_module, widened


class Original:
    """A network in PyTorch, and a copy of it in the yardstick's dtype.

    Args:
        eager: The network.
        dtype: That of the job.

    Attributes:
        dtype: The yardstick's.
        outer: The paths of its units.
    """

    def __init__(self, eager: Eager, dtype: torch.dtype) -> None:
        self.eager = eager
        self.dtype = wide_dtype(dtype)
        self.outer = unit_paths(eager.module)
        self._wide: Eager | None = None

    @property
    def every(self) -> list[str]:
        """The paths of all its modules that can be called, its own among them, which is empty."""
        return ["", *(path for unit in self.outer for path in inner_paths(self.eager.module, unit))]

    def watched(self, inputs: Mapping[str, Any], paths: Collection[str]) -> tuple[Any, Values]:
        """Returns what the network returns, and its values at borders."""
        watch = Pass(self.eager.module, paths, {}, _same, Copies())
        with watch.watching():
            output = self.eager(**inputs)
        if watch.autocasts:  # which would narrow a yardstick in float32, too
            self.dtype = torch.float64
        return output, watch.noted

    def output(self, inputs: Mapping[str, Any], values: Values) -> Any:
        """Returns what the network returns with other values at some borders."""
        watch = Pass(self.eager.module, {border.path for border in values}, values, _like, Copies())
        with watch.watching():
            return self.eager(**inputs)

    def yardstick(self, inputs: Mapping[str, Any], paths: Collection[str], values: Values) -> tuple[Any, Values]:
        """Returns what the yardstick returns, and its values at borders.

        Args:
            inputs: The original's.
            paths: The modules that have borders.
            values: The original's, which replace the yardstick's.
        """
        eager = self.eager
        if self._wide is None:
            module = wide_module(eager.module, self.dtype)
            self._wide = Eager(module, eager.how, eager.outputs, eager.name)
        watch = Pass(self._wide.module, paths, given(values), _like, Copies(), whole=())  # they are compared alone
        with watch.watching(), computing_in(self.dtype):
            output = self._wide(**widened(dict(inputs), self.dtype))
        return output, watch.noted


def given(values: Values) -> Values:
    """Returns what replaces the values at borders: not what the network itself gets and returns."""
    return {border: value for border, value in values.items() if border.path}


def _same(given: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return given


def _like(given: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a value in the network's own dtype; a copy, as a module may write into it."""
    return given.to(like.dtype, copy=True)
