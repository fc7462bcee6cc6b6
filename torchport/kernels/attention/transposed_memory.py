"""The memory of `transposed_kernel`: what is known of a call before tracing, its references, and the copies from HBM.

Shapes: as `transposed_kernel` has them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torchport.kernels.attention.tiles import LANES, SLOTS, SUBLANES, TAIL, Tile

Cell = tuple[int, Any, int]
"""A head of the group, its first query, and how many queries."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is known before tracing."""

    tile: Tile  #: Fitted to the numbers of queries and keys.
    heads: int  #: g.
    head_size: int  #: D.
    groups: int  #: G, H / g.
    scale: float  #: What scores are multiplied by, in units of log 2.
    bounded: bool  #: Whether exp2 of a score can neither overflow nor vanish.
    #: Of the products: float32 needs `HIGHEST` to be float32.
    precision: lax.Precision | None
    arrays: int = 1  #: How many arrays the keys lie in.
    #: dtype of queries and keys, where it is not that of the values.
    scores: Any = None
    packed: bool = False  #: Whether probabilities wait as pairs of bfloat16 in int32.

    @property
    def width(self) -> int:
        """W."""
        return self.heads * self.head_size

    def cells(self) -> list[Cell]:
        """Returns the cells of a chunk; the last queries may be fewer."""
        width, end = self.tile.columns, self.tile.block_q
        return [(g, a, min(width, end - a)) for a in range(0, end, width) for g in range(self.heads)]

    def rows(self, head: int) -> slice:
        """Returns the slice of a head's features within its group's features."""
        return slice(head * self.head_size, (head + 1) * self.head_size)


@dataclasses.dataclass
class Refs:
    """The kernel's memory."""

    lengths: Any  # int32 [arrays, B], scalar memory
    q: Any  # [block_q, W]
    k_hbm: Any  # of each array [B, T, F], in HBM
    v_hbm: Any  # of each array [B, N, F, T / N], in HBM
    o: Any  # [block_q, W]
    acc: Any  # float32 [W, block_q]
    sums: Any  # float32 [g, 8, block_q]: row sums, by sublane
    waiting: Any  # [g, block_q / 128, C, 128]: what a chunk leaves to the next step: probabilities, or float32 scores
    peaks: Any  # float32 [g, 8, block_q]: the waiting scores' maximum, by sublane; not used under a bound
    maximum: Any  # float32 [g, 8, block_q]: the running maximum, in every sublane; not used under a bound
    keys: Any  # [SLOTS, C, W]
    values: Any  # [SLOTS, C / 128, W, 128]
    tail_keys: Any  # [TAIL, W]
    tail_values: Any  # [TAIL / 128, W, 128]
    chunk_done: Any  # [2, SLOTS]
    tail_done: Any  # [2]
    heads: Any = None  # [g, block_q, W]: each head's queries, zeros for the others' features; if g > 1

    @classmethod
    def of(cls, plan: Plan, lengths: Any, q: Any, others: Sequence[Any]) -> Refs:
        """Returns the references in the order in which a kernel is called with them."""
        n = plan.arrays
        return cls(lengths, q, others[:n], others[n : 2 * n], *others[2 * n :])


class Chunks:
    """Copies keys and values from HBM into two slots in turn.

    It fetches chunk 0 of the next tile of the same heads while this tile's tail is computed.
    """

    def __init__(self, plan: Plan, refs: Refs, row: Any, array: int) -> None:
        self.refs = refs
        self.block = plan.tile.block_kv
        self.sample = lax.div(row, plan.groups)
        self.features = pl.ds(pl.multiple_of(lax.rem(row, plan.groups) * plan.width, LANES), plan.width)
        self.k_hbm, self.v_hbm = refs.k_hbm[array], refs.v_hbm[array]

    @staticmethod
    def slot(j: Any) -> Any:
        """Returns the slot of chunk j."""
        return lax.rem(j, SLOTS)

    def keys(self, j: Any, slot: Any) -> Any:
        """Returns the copy of the keys of chunk j."""
        refs, here = self.refs, pl.ds(pl.multiple_of(j * self.block, self.block), self.block)
        source = self.k_hbm.at[self.sample, here, self.features]
        return pltpu.make_async_copy(source, refs.keys.at[slot], refs.chunk_done.at[0, slot])

    def values(self, j: Any, slot: Any) -> _Copies:
        """Returns the copies of the values of chunk j."""
        count = self.block // LANES
        return self._columns(j * count, self.refs.values.at[slot], self.refs.chunk_done.at[1, slot])

    def _columns(self, first: Any, target: Any, done: Any) -> _Copies:
        """Returns the copies of values into [n, W, 128], from a column of 128 keys on: a chunk may lie in two parts."""
        _, parts, _, keys = self.v_hbm.shape

        def copy(i: int) -> Any:
            part, column = (0, first + i) if parts == 1 else _divmod(first + i, keys // LANES)
            here = pl.ds(pl.multiple_of(column * LANES, LANES), LANES)
            source = self.v_hbm.at[self.sample, part, self.features, here]
            return pltpu.make_async_copy(source, target.at[i], done)

        return _Copies(copy, target, done)

    def fetch_first(self) -> None:
        """Starts to fetch chunk 0."""
        self.keys(0, 0).start()
        self.values(0, 0).start()

    def fetch_tail(self, start: Any) -> None:
        """Fetches a piece of the tail."""
        refs, here = self.refs, pl.ds(pl.multiple_of(start, TAIL), TAIL)
        source = self.k_hbm.at[self.sample, here, self.features]
        keys = pltpu.make_async_copy(source, refs.tail_keys, refs.tail_done.at[0])
        values = self._columns(lax.div(start, LANES), refs.tail_values, refs.tail_done.at[1])
        keys.start()
        values.start()
        keys.wait()
        values.wait()


class _Copies:
    """Several copies that are waited for as one."""

    def __init__(self, copy: Callable[[int], Any], target: Any, done: Any) -> None:
        self.copy = copy
        self.target, self.done = target, done

    def __len__(self) -> int:
        return int(self.target.shape[0])

    def start(self, some: range | None = None) -> None:
        """Starts some, or all."""
        for i in range(len(self)) if some is None else some:
            self.copy(i).start()

    def wait(self) -> None:
        """Waits for the bytes of all copies, once: each wait delays the products."""
        pltpu.make_async_copy(self.target, self.target, self.done).wait()


def _divmod(number: Any, by: int) -> tuple[Any, Any]:
    return lax.div(number, by), lax.rem(number, by)


def scratch(plan: Plan, dtype: Any) -> list[Any]:
    """Returns the kernel's scratch memory, in the order of `Refs` from `acc` on."""
    block_q, block_kv, g = plan.tile.block_q, plan.tile.block_kv, plan.heads
    width = g * plan.head_size
    # A bound leaves the maximum unused; a reference has to be there.
    statistics = pltpu.VMEM((g, SUBLANES, LANES if plan.bounded else block_q), jnp.float32)
    waiting = (block_kv // 2, jnp.int32) if plan.packed else (block_kv, dtype if plan.bounded else jnp.float32)
    scores = plan.scores or dtype
    scratch = [
        pltpu.VMEM((width, block_q), jnp.float32),
        pltpu.VMEM((g, SUBLANES, block_q), jnp.float32),
        pltpu.VMEM((g, block_q // LANES, waiting[0], LANES), waiting[1]),
        statistics,
        statistics,
        pltpu.VMEM((SLOTS, block_kv, width), scores),
        pltpu.VMEM((SLOTS, block_kv // LANES, width, LANES), dtype),
        pltpu.VMEM((TAIL, width), scores),
        pltpu.VMEM((TAIL // LANES, width, LANES), dtype),
        pltpu.SemaphoreType.DMA((2, SLOTS)),
        pltpu.SemaphoreType.DMA((2,)),
    ]
    return [*scratch, pltpu.VMEM((g, block_q, width), scores)] if g > 1 else scratch
