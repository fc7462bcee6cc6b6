"""Attention for TPU whose products are both transposed: scores as K Q^T, outputs as V^T P.

docs/attention.md says what this is good for. 16-bit arrays wider than a register lie in VMEM as columns of 128 lanes:
there both halves of a register's rows are neighbours. In the usual order each register would be put together from two.

Shapes: B batch, H heads, S queries, T keys, D features of a head; G groups of heads that share a tile, g heads in one,
W = g * D features of a group, F = G * W; N parts of the values; C keys of a chunk.

Source: K Q^T with V^T S, several heads to a tile and a bound in place of the maximum are ideas of maxdiffusion's
`custom_splash_attention.py` (Apache-2.0, commit 7cfb8801). The order of work is ours; no code is taken over.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torchport.kernels.attention.tiles import LANES, SLOTS, SUBLANES, TAIL, Tile

Cell = tuple[int, Any, int]
"""Some queries of a head: the head's number in its group, the first query, and how many queries."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything about one call of the kernel that is known before tracing."""

    tile: Tile
    heads: int  #: g.
    head_size: int  #: D.
    groups: int  #: G, H / g.
    scale: float  #: What scores are multiplied by, in units of log 2.
    bounded: bool  #: Whether exp2 of a score can neither overflow nor vanish.
    #: Of the products: `HIGHEST` for float32, which would otherwise be multiplied as bfloat16.
    precision: lax.Precision | None
    arrays: int = 1  #: The number of arrays in which keys and values come.
    #: dtype of queries and keys, where the values have another dtype.
    scores: Any = None
    packed: bool = False  #: Whether probabilities wait as pairs of bfloat16 in int32.

    @property
    def width(self) -> int:
        """W."""
        return self.heads * self.head_size

    def cells(self) -> list[Cell]:
        """Returns the cells of a tile, which all of a chunk's keys meet; cells with the last queries may be smaller."""
        width, end = self.tile.columns, self.tile.block_q
        starts = range(0, end, width)
        return [(head, start, min(width, end - start)) for start in starts for head in range(self.heads)]

    def rows(self, head: int) -> slice:
        """Returns the slice of a head's features within its group's features."""
        return slice(head * self.head_size, (head + 1) * self.head_size)


@dataclasses.dataclass
class Refs:
    """The kernel's references: its inputs and outputs, and its scratch memory."""

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


class Chunks:
    """The copies of an array's keys and values from HBM into two slots of vector memory, which chunks take in turn."""

    def __init__(self, plan: Plan, refs: Refs, row: Any, array: int) -> None:
        self.refs = refs
        self.block = plan.tile.block_kv
        # A row of the grid is a group of heads of a sample.
        self.sample = lax.div(row, plan.groups)
        self.features = pl.ds(pl.multiple_of(lax.rem(row, plan.groups) * plan.width, LANES), plan.width)
        self.k_hbm, self.v_hbm = refs.k_hbm[array], refs.v_hbm[array]

    def keys(self, j: Any, slot: Any) -> Any:
        """Returns the copy of the keys of chunk `j` into a slot, to be started or awaited."""
        refs, tokens = self.refs, pl.ds(pl.multiple_of(j * self.block, self.block), self.block)
        source = self.k_hbm.at[self.sample, tokens, self.features]
        return pltpu.make_async_copy(source, refs.keys.at[slot], refs.chunk_done.at[0, slot])

    def values_at(self, slot: Any) -> tuple[Any, Any]:
        """Returns a slot's memory for values, and the semaphore of the copies into it."""
        return self.refs.values.at[slot], self.refs.chunk_done.at[1, slot]

    def start_values(self, first: Any, columns: range, target: Any, done: Any) -> None:
        """Starts to copy values into `target` [n, W, 128]: column i of it has the 128 keys of column `first` + i."""
        _, parts, _, keys = self.v_hbm.shape
        for i in columns:
            part, column = 0, first + i
            if parts > 1:  # a chunk may lie in two parts
                part, column = lax.div(column, keys // LANES), lax.rem(column, keys // LANES)
            tokens = pl.ds(pl.multiple_of(column * LANES, LANES), LANES)
            source = self.v_hbm.at[self.sample, part, self.features, tokens]
            pltpu.make_async_copy(source, target.at[i], done).start()

    def fetch_first(self) -> None:
        """Starts to copy chunk 0."""
        self.keys(0, slot=0).start()
        self.start_values(0, range(self.block // LANES), *self.values_at(0))

    def fetch_tail(self, start: Any) -> None:
        """Copies keys and values of the piece of the tail at key `start` from HBM, and waits for both copies."""
        refs, tokens = self.refs, pl.ds(pl.multiple_of(start, TAIL), TAIL)
        source = self.k_hbm.at[self.sample, tokens, self.features]
        keys = pltpu.make_async_copy(source, refs.tail_keys, refs.tail_done.at[0])
        first, columns = lax.div(start, LANES), range(refs.tail_values.shape[0])
        keys.start()
        self.start_values(first, columns, refs.tail_values, refs.tail_done.at[1])
        keys.wait()
        _wait_for_all(refs.tail_values, refs.tail_done.at[1])


def _wait_for_all(target: Any, done: Any) -> None:
    """Waits for the bytes of all copies into `target`, once: each wait delays the products."""
    pltpu.make_async_copy(target, target, done).wait()


def scratch(plan: Plan, dtype: Any) -> list[Any]:
    """Returns the shapes of the kernel's scratch buffers, in the order of the fields of `Refs`, from `acc` on."""
    block_q = plan.tile.block_q
    block_kv = plan.tile.block_kv
    g = plan.heads
    width = g * plan.head_size
    # A bound leaves the maximum unused, but `Refs` needs a reference: it gets the smallest size.
    statistics = pltpu.VMEM((g, SUBLANES, LANES if plan.bounded else block_q), jnp.float32)
    waiting = (block_kv // 2, jnp.int32) if plan.packed else (block_kv, dtype if plan.bounded else jnp.float32)
    scores = plan.scores or dtype
    buffers = {
        "acc": pltpu.VMEM((width, block_q), jnp.float32),
        "sums": pltpu.VMEM((g, SUBLANES, block_q), jnp.float32),
        "waiting": pltpu.VMEM((g, block_q // LANES, waiting[0], LANES), waiting[1]),
        "peaks": statistics,
        "maximum": statistics,
        "keys": pltpu.VMEM((SLOTS, block_kv, width), scores),
        "values": pltpu.VMEM((SLOTS, block_kv // LANES, width, LANES), dtype),
        "tail_keys": pltpu.VMEM((TAIL, width), scores),
        "tail_values": pltpu.VMEM((TAIL // LANES, width, LANES), dtype),
        "chunk_done": pltpu.SemaphoreType.DMA((2, SLOTS)),
        "tail_done": pltpu.SemaphoreType.DMA((2,)),
    }
    if g > 1:
        buffers["heads"] = pltpu.VMEM((g, block_q, width), scores)
    return list(buffers.values())


ROWS = (((1,), (1,)), ((), ()))
"""Dims of a product a b^T."""
PLAIN = (((1,), (0,)), ((), ()))
"""Dims of a product a b."""


@dataclasses.dataclass(eq=False)
class Softmax:
    """The products and the softmax of a tile of queries, cell by cell: some queries of a head at a time."""

    plan: Plan
    refs: Refs

    def clear(self) -> None:
        """Resets outputs, sums and maximum for a new tile of queries, and separates the queries of its heads."""
        refs, plan = self.refs, self.plan
        refs.acc[...] = jnp.zeros_like(refs.acc)
        refs.sums[...] = jnp.zeros_like(refs.sums)
        if not plan.bounded:
            refs.maximum[...] = jnp.full_like(refs.maximum, -jnp.inf)
        if plan.heads > 1:
            q = refs.q[...]
            feature = lax.broadcasted_iota(jnp.int32, q.shape, 1)
            for head in range(plan.heads):
                is_of_head = (feature >= head * plan.head_size) & (feature < (head + 1) * plan.head_size)
                refs.heads[head] = jnp.where(is_of_head, q, jnp.zeros_like(q))

    def multiply_keys(self, keys: jax.Array, cell: Cell) -> None:
        """Multiplies keys [C, W] with a cell's queries, and stores scores, or probabilities under a bound of scores."""
        head, start, count = cell
        s = self._scores(keys, cell)
        if self.plan.bounded:
            p = jnp.exp2(s)
            self.refs.sums[head, :, pl.ds(start, count)] += _by_sublane(p).sum(0)
            self._store(cell, p.astype(self.refs.waiting.dtype))
        else:
            self.refs.peaks[head, :, pl.ds(start, count)] = _by_sublane(s).max(0)
            self._store(cell, s)

    def add_values(self, values: Any, cell: Cell) -> None:
        """Adds values [C / 128, W, 128] of a chunk to the outputs, weighted by the results of `multiply_keys`."""
        head, start, count = cell
        columns = range(count // LANES)
        left = jnp.concatenate([self.refs.waiting[head, lax.div(start, LANES) + i] for i in columns], axis=1)
        if self.plan.bounded:
            self._add(values, cell, left)
        else:
            self._add_online(values, cell, left, self.refs.peaks[head, :, pl.ds(start, count)])

    def add_tail(self, keys: jax.Array, values: Any, valid: jax.Array, cells: Sequence[Cell]) -> None:
        """Adds a piece of the tail to the outputs of some cells; `valid` [TAIL, 1] says which keys count."""
        # All scores first: while some are exponentiated, others are multiplied.
        scores = [self._scores(keys, cell) for cell in cells]
        if self.plan.bounded:
            weights = [jnp.where(valid, jnp.exp2(s), 0.0) for s in scores]
            for (head, start, count), p in zip(cells, weights, strict=True):
                self.refs.sums[head, :, pl.ds(start, count)] += _by_sublane(p).sum(0)
            for cell, p in zip(cells, weights, strict=True):
                self._add(values, cell, p)
        else:
            for cell, score in zip(cells, scores, strict=True):
                s = jnp.where(valid, score, -jnp.inf)
                self._add_online(values, cell, s, _by_sublane(s).max(0))

    def _store(self, cell: Cell, x: jax.Array) -> None:
        """Stores x [C, queries] for `add_values`, as columns of 128 queries."""
        head, start, count = cell
        for i in range(count // LANES):
            self.refs.waiting[head, lax.div(start, LANES) + i] = x[:, i * LANES : (i + 1) * LANES]

    def _add_online(self, values: Any, cell: Cell, scores: jax.Array, peaks: jax.Array) -> None:
        """Adds values to the outputs by online softmax: earlier outputs and sums shrink where the maximum grows.

        Args:
            scores: [C, queries].
            peaks: Their maximum by sublane, [8, queries].
        """
        head, start, count = cell
        place = (head, slice(None), pl.ds(start, count))
        before = self.refs.maximum[place]
        # All sublanes of a query get the same maximum: their sums are added up only at the end.
        after = jnp.maximum(before, peaks.max(0, keepdims=True))
        self.refs.maximum[place] = after
        p = jnp.exp2(scores - after[:1])
        shrink = jnp.exp2(before - after)
        self.refs.sums[place] = self.refs.sums[place] * shrink + _by_sublane(p).sum(0)
        self._add(values, cell, p, shrink[:1])

    def _add(self, values: Any, cell: Cell, p: jax.Array, shrink: jax.Array | None = None) -> None:
        """Adds the values weighted with p [C, queries] to the outputs, which are multiplied by `shrink` first."""
        head, start, count = cell
        place = (self.plan.rows(head), pl.ds(start, count))
        head_values = self._head_values(values, head)
        product = self._product(head_values, p.astype(head_values.dtype), PLAIN)
        before = self.refs.acc[place]
        self.refs.acc[place] = (before if shrink is None else before * shrink) + product

    def _head_values(self, values: Any, head: int) -> jax.Array:
        """Returns a head's values of a chunk, [D, C]."""
        return jnp.concatenate([values[i, self.plan.rows(head), :] for i in range(values.shape[0])], axis=1)

    def _scores(self, keys: jax.Array, cell: Cell) -> jax.Array:
        """Returns the scores [C, queries] of keys [C, W], in units of log 2."""
        head, start, count = cell
        queries = pl.ds(start, count)
        q = self.refs.q[queries, :] if self.plan.heads == 1 else self.refs.heads[head, queries, :]
        # In float32, after the product: a scaled q, rounded to bfloat16 again, would cost precision.
        return self._product(keys, q, ROWS) * self.plan.scale

    def _product(self, a: jax.Array, b: jax.Array, dims: Any) -> jax.Array:
        """Returns a product in float32; `dims` are the dims of a and b that are summed over: `ROWS` or `PLAIN`."""
        return lax.dot_general(a, b, dims, precision=self.plan.precision, preferred_element_type=jnp.float32)


@dataclasses.dataclass(eq=False)
class ShiftedSoftmax(Softmax):
    """The products and the softmax of a chunk whose scores are bounded once each query's shift is subtracted."""

    shifts: Any  #: float32 [g, block_q], in units of log 2.

    def _scores(self, keys: jax.Array, cell: Cell) -> jax.Array:
        """Returns the scores [C, queries] of keys [C, W], less the queries' shifts, in units of log 2."""
        head, start, count = cell
        return super()._scores(keys, cell) - self.shifts[head : head + 1, pl.ds(start, count)]


def _by_sublane(x: jax.Array) -> jax.Array:
    """Returns [rows, n] as [rows / 8, 8, n]: reducing the first dim then costs no shuffle."""
    return x.reshape(x.shape[0] // SUBLANES, SUBLANES, x.shape[1])


def kernel(plan: Plan, kind: type[Softmax], lengths: Any, *inputs: Any) -> None:
    """Computes one tile of queries against all keys of its sample: whole chunks first, then the tail.

    Args:
        kind: The class that computes products and softmax.
        inputs: References: unless `kind` is `Softmax`, the scales or the shifts of scores [g, block_q]; the queries;
            then the fields of `Refs` in their order, with a reference for each array of keys and of values.
    """
    n = plan.arrays
    *rows, q = inputs[: 1 if kind is Softmax else 2]
    others = inputs[len(rows) + 1 :]
    refs = Refs(lengths, q, others[:n], others[n : 2 * n], *others[2 * n :])
    softmax = kind(plan, refs, *rows)
    row = pl.program_id(0)
    tile = pl.program_id(1)
    block = plan.tile.block_kv
    first, *further = [Chunks(plan, refs, row, array) for array in range(plan.arrays)]
    length = lengths[0, first.sample]
    full = lax.div(length, block)
    # Each tile fetches chunk 0 of the next tile beside its own tail; the first tile also fetches its own chunk 0.
    pl.when((tile == 0) & (full > 0))(first.fetch_first)
    softmax.clear()
    pl.when(full > 0)(lambda: _full_chunks(softmax, first, full))
    pl.when((tile < pl.num_programs(1) - 1) & (full > 0))(first.fetch_first)
    _tail(softmax, first, full * block, length)
    for array, chunks in enumerate(further, 1):
        _tail(softmax, chunks, start=0, length=lengths[array, chunks.sample])
    _finish(softmax)


def _full_chunks(softmax: Softmax, chunks: Chunks, full: Any) -> None:
    """Adds all whole chunks of keys, `full` of them: scores of chunk j are computed beside outputs of chunk j - 1."""
    refs = softmax.refs
    plan = softmax.plan
    last = full - 1
    slot = functools.partial(lax.rem, y=SLOTS)  # chunk j lies in slot j mod SLOTS
    chunks.keys(jnp.minimum(1, last), slot(1)).start()
    chunks.keys(0, slot=0).wait()
    _each_cell(plan, lambda cell: softmax.multiply_keys(refs.keys[0], cell))

    def add_chunk(j: Any, _: None) -> None:
        """Adds the values of chunk j - 1 and computes the scores of chunk j, while the next chunk is copied."""
        chunks.keys(j, slot(j)).wait()
        _wait_for_all(*chunks.values_at(slot(j - 1)))
        # The last iteration fetches its keys again rather than branch: the compiler does not schedule across a branch.
        chunks.keys(jnp.minimum(j + 1, last), slot(j + 1)).start()
        keys = refs.keys.at[slot(j)]
        values = refs.values.at[slot(j - 1)]
        cells = plan.cells()
        count = plan.tile.block_kv // LANES
        target = chunks.values_at(slot(j))
        first = j * count
        for cell, columns in zip(cells, _shares(count, len(cells)), strict=True):
            chunks.start_values(first, columns, *target)
            softmax.add_values(values, cell)
            softmax.multiply_keys(keys[...], cell)

    lax.fori_loop(1, full, add_chunk, None)
    # The keys that the last iteration has fetched again.
    chunks.keys(last, slot(full)).wait()
    _wait_for_all(*chunks.values_at(slot(last)))
    _each_cell(plan, lambda cell: softmax.add_values(refs.values.at[slot(last)], cell))


def _shares(copies: int, cells: int) -> list[range]:
    """Returns which of a chunk's copies to start before each cell: (2, 5) -> [], [], [0], [], [1].

    Products wait while several copies are started at once, so copies are spread over the cells. But products of two
    cells do not overlap if a copy is started between them. Few cells cannot afford that: all copies come before them.
    """
    if cells < 2 * copies:
        return [range(copies), *[range(0)] * (cells - 1)]
    return [range(i * copies // cells, (i + 1) * copies // cells) for i in range(cells)]


def _tail(softmax: Softmax, chunks: Chunks, start: Any, length: Any) -> None:
    """Adds the keys from `start` to `length`, which fill no whole chunk, in pieces of `TAIL`."""
    refs = softmax.refs

    def piece(i: Any, _: None) -> None:
        first = start + i * TAIL
        chunks.fetch_tail(first)
        left = length - first
        valid = lax.broadcasted_iota(jnp.int32, (TAIL, 1), 0) < left
        # Values beyond the length may hold anything, and 0 * NaN is NaN.
        shape = refs.tail_values.shape
        key = lax.broadcasted_iota(jnp.int32, shape, 0) * LANES + lax.broadcasted_iota(jnp.int32, shape, 2)
        refs.tail_values[...] = jnp.where(key < left, refs.tail_values[...], jnp.zeros_like(refs.tail_values))
        work = functools.partial(softmax.add_tail, refs.tail_keys[...], refs.tail_values, valid)
        _each(softmax.plan, work, softmax.plan.tile.cells_at_once)

    lax.fori_loop(0, lax.div(length - start + TAIL - 1, TAIL), piece, None)


def _finish(softmax: Softmax) -> None:
    """Writes the outputs of a tile, divided by the sums of probabilities; 0 for queries without a key."""
    refs, plan = softmax.refs, softmax.plan

    def work(cells: Sequence[Cell]) -> None:
        parts = []
        for head, start, count in cells:
            sums = refs.sums[head, :, pl.ds(start, count)].sum(0, keepdims=True)
            share = jnp.where(sums == 0, 0.0, 1.0 / sums)
            parts.append(refs.acc[plan.rows(head), pl.ds(start, count)] * share)
        refs.o[pl.ds(start, count), :] = jnp.concatenate(parts, axis=0).T.astype(refs.o.dtype)

    _each(plan, work)


def _each(plan: Plan, work: Callable[[Sequence[Cell]], None], at_once: int = 1) -> None:
    """Calls `work` on all cells of a tile, in a loop of the program: unrolled, the code would be long for little gain.

    Args:
        work: Called with some of the cells: all heads of the same queries.
        at_once: How many cells of each head `work` gets at once: a divisor of their number.
    """
    width, end = plan.tile.columns, plan.tile.block_q

    def call(i: Any, _: None) -> None:
        starts = [pl.multiple_of((i * at_once + cell) * width, LANES) for cell in range(at_once)]
        work([(head, start, width) for start in starts for head in range(plan.heads)])

    lax.fori_loop(0, end // width // at_once, call, None)
    if end % width:  # the last cells are smaller
        work([(head, end // width * width, end % width) for head in range(plan.heads)])


def _each_cell(plan: Plan, work: Callable[[Cell], None]) -> None:
    """Calls `work` on each cell of a tile by itself, in a loop of the program."""

    def work_on_heads(cells: Sequence[Cell]) -> None:
        for cell in cells:
            work(cell)

    _each(plan, work_on_heads)
