"""Tiles of the attention kernels, and the best tile for each chip: `tiles.yaml`.

`python benchmarks/attention_tiles.py` writes that table.

The table's key is the chip, the implementation, the head size as the kernel pads it, and whether scores are bounded.
The key has the chip, not its generation: the matrix unit is 256 wide on v6e and tpu7x, and 128 wide on v5e and v5p.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Annotated, Literal, get_args

import pydantic

from torchport.config import Frozen, read_document, validated
from torchport.config.machine import MIB, TPU_CHIPS
from torchport.errors import AttentionError, VmemError, WrongTypeError
from torchport.progress import size_text

LANES = 128
SUBLANES = 8
SLOTS = 2
"""Chunks of keys, and of values, that are in vector memory at once: the current chunk, and a chunk on its way."""
TAIL = 256
"""Keys of a piece of the last, incomplete chunk: the depth of the matrix unit."""


def rounded_up(number: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class Tile:
    """How an attention kernel cuts queries into tiles and keys into chunks."""

    #: Queries of a tile, at most; a multiple of 128. Tiles are made equally large.
    block_q: int
    block_kv: int  #: Keys of a chunk; a multiple of 256.
    #: Queries of a cell: the queries of one product; a multiple of 128.
    columns: int = 512

    def __post_init__(self) -> None:
        """Refuses sizes with which the kernel would compute wrong results."""
        for name, multiple in (("block_q", LANES), ("block_kv", TAIL), ("columns", LANES)):
            size = getattr(self, name)
            if not isinstance(size, int) or size <= 0 or size % multiple:
                remedy = f"It must be a positive multiple of {multiple}"
                raise AttentionError("tile", f"{name} is {size!r}", remedy, name=name)

    @property
    def cells_at_once(self) -> int:
        """Cells (of `columns` queries) that the kernel computes at once on the last keys, which fill no whole chunk."""
        cells = self.block_q // self.columns
        # Each time as many: a divisor of their number, up to five.
        return max((part for part in range(1, 6) if cells and cells % part == 0), default=1)

    def fitted(self, queries: int, keys: int) -> Tile:
        """Returns the tile for these numbers of queries and keys: equal tiles, and no chunk larger than all keys."""
        tiles = math.ceil(queries / self.block_q)
        block_q = rounded_up(math.ceil(queries / tiles), LANES)
        block_kv = min(self.block_kv, max(TAIL, keys // TAIL * TAIL))
        return dataclasses.replace(self, block_q=block_q, block_kv=block_kv, columns=min(self.columns, block_q))

    def vmem_bytes(self, *, head_size: int, heads: int, itemsize: int, bounded: bool) -> int:
        """Returns the bytes of VMEM that this tile declares.

        Args:
            head_size: D, as padded.
            heads: g, heads that share a tile.
            itemsize: Bytes of an element of q, k and v.
            bounded: Whether there is a bound; without one, scores wait in float32.
        """
        width = heads * head_size
        # Pallas keeps two blocks of q and of o, so that one is on its way while the other is used. If heads share a
        # tile, the kernel also keeps each head's queries, with zeros for the others' features.
        queries = 2 * 2 * self.block_q * width * itemsize
        queries += heads * self.block_q * width * itemsize if heads > 1 else 0
        chunks = 2 * SLOTS * self.block_kv * width * itemsize + 2 * TAIL * width * itemsize
        statistics = 2 * heads * SUBLANES * (LANES if bounded else self.block_q) * 4
        sums = (width + heads * SUBLANES) * self.block_q * 4
        waiting = heads * self.block_kv * self.block_q * (itemsize if bounded else 4)
        return queries + chunks + statistics + sums + waiting


@dataclasses.dataclass(frozen=True)
class SplashTile:
    """How JAX's own kernel cuts the work; see `splash.attention`."""

    block_q: int  #: Queries of a tile; a multiple of 128.
    block_kv: int  #: Keys that are fetched at once; a multiple of `block_kv_compute`.
    block_kv_compute: int  #: Keys that are computed at once; a multiple of 128.

    def fitted(self, queries: int, keys: int) -> SplashTile:
        """Returns the tile for these numbers of queries and keys, no larger than needed, for `splash.attention`."""
        compute = min(self.block_kv_compute, rounded_up(keys, LANES))
        block_kv = min(self.block_kv // compute * compute, rounded_up(keys, compute))
        return SplashTile(min(self.block_q, rounded_up(queries, LANES)), block_kv, compute)


TABLE = Path(__file__).with_name("tiles.yaml")
RESERVED = 8 * MIB
"""Bytes of a core's VMEM that kernels leave to XLA."""

KernelName = Literal["splash_transposed", "splash_int8", "splash"]


def check_vmem(tile: Tile, *, head_size: int, heads: int, itemsize: int, bounded: bool, vmem: int) -> Tile:
    """Returns the tile if it fits into `vmem` bytes of a core less `RESERVED`, and refuses it otherwise."""
    needed = tile.vmem_bytes(head_size=head_size, heads=heads, itemsize=itemsize, bounded=bounded)
    limit = vmem - RESERVED
    if needed <= limit:
        return tile
    sizes = f"block_q={tile.block_q}, block_kv={tile.block_kv}, columns={tile.columns}"
    raise VmemError(
        f"tile {sizes}",
        f"It takes {needed:,} bytes of VMEM ({size_text(needed)}) with {heads} head(s) of {head_size} features to a "
        f"tile, and the limit is {limit:,} ({size_text(limit)})",
        "Leave the tile out, and torchport takes the one of its table; or take a smaller one, which `python "
        "benchmarks/attention_tiles.py` of the repository finds",
        tile=tile,
        asked=needed,
        limit=limit,
    )


def _multiple_of(number: int) -> pydantic.AfterValidator:
    def check(value: int) -> int:
        if value <= 0 or value % number:
            raise ValueError(f"It must be a positive multiple of {number}")
        return value

    return pydantic.AfterValidator(check)


class _TransposedTile(Frozen):
    block_q: Annotated[int, _multiple_of(LANES)]
    block_kv: Annotated[int, _multiple_of(TAIL)]
    columns: Annotated[int, _multiple_of(LANES)]


class _SplashTile(Frozen):
    block_q: Annotated[int, _multiple_of(LANES)]
    block_kv: Annotated[int, _multiple_of(LANES)]
    block_kv_compute: Annotated[int, _multiple_of(LANES)]


class _Row(Frozen):
    """The fields of every row of the table of tiles."""

    chip: str
    head_size: pydantic.PositiveInt
    """D, as the kernel pads it."""
    tokens: pydantic.PositiveInt
    """The number of queries, and of keys, for which the tile is the best."""
    peak_percent: float
    """Useful arithmetic of a whole call at this length, over the matrix units' peak in the call's bundles, or time."""
    steady_percent: float
    """Likewise, of the steady loop alone."""
    ranked_by: Literal["schedule", "time"]
    libtpu: str
    """The version of libtpu whose schedule or programs gave these figures."""

    @pydantic.field_validator("chip")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in TPU_CHIPS:
            raise ValueError(f"It must be one of {', '.join(TPU_CHIPS)}")
        return name


class TransposedRow(_Row):
    """The best tile of `splash_transposed` for a chip, a head size and a kind of scores."""

    bounded: bool
    tile: _TransposedTile


class Int8Row(_Row):
    """The best tile of `splash_int8` for a chip and a head size; its scores are always bounded."""

    tile: _TransposedTile


class SplashRow(_Row):
    """The best tile of JAX's own kernel for a chip and a head size."""

    tile: _SplashTile


class TileTable(Frozen):
    splash_transposed: list[TransposedRow]
    splash_int8: list[Int8Row] = []
    splash: list[SplashRow]


Row = TransposedRow | Int8Row | SplashRow


def key(row: Row) -> tuple[str, int, bool]:
    """Returns the key of a table's row: chip, head size, and whether scores are bounded."""
    return row.chip, row.head_size, isinstance(row, TransposedRow) and row.bounded


@functools.cache
def table() -> TileTable:
    """Returns the shipped table of tiles."""
    return read_table(TABLE)


def read_table(file: Path) -> TileTable:
    """Returns the table of tiles in a file; refuses two rows with the same key."""
    document = read_document(file, file.name)
    contents = validated(TileTable, document)
    for implementation in get_args(KernelName):
        rows: list[Row] = getattr(contents, implementation)
        keys = [key(row) for row in rows]
        second = next((at for at, row_key in enumerate(keys) if row_key in keys[:at]), None)
        if second is not None:
            line = document.line([implementation, keys.index(keys[second])])
            double = rows[second]
            fact = f"The row of {double.chip} with head size {double.head_size} stands here and on line {line}"
            raise WrongTypeError(document.place([implementation, second]), fact, "Keep one of the two")
    return contents


def best(chip: str, implementation: KernelName, head_size: int, bounded: bool) -> Tile | SplashTile:
    """Returns the best tile in the table for a chip and a head size.

    Args:
        chip: v5e, v5p, v6e or tpu7x.
        implementation: `splash_transposed`, `splash_int8`, or JAX's own `splash`.
        head_size: D; a size that is not in the table takes the next larger size, to which the kernel pads.
        bounded: Whether there is a bound of the scores; only `splash_transposed` has tiles with and without.
    """
    best_row = row(chip, implementation, head_size, bounded)
    kind = SplashTile if isinstance(best_row, SplashRow) else Tile
    return kind(**best_row.tile.model_dump())


def row(chip: str, implementation: KernelName, head_size: int, bounded: bool) -> Row:
    """Returns the table's row with the best tile and its figures; raises for a chip or head size without a row."""
    rows: list[Row] = getattr(table(), implementation)
    rows = [row for row in rows if not isinstance(row, TransposedRow) or row.bounded == bounded]
    # The kernel pads heads to the row's size, so the smallest sufficient size is the best.
    of_chip = [row for row in rows if row.chip == chip]
    enough = [row for row in of_chip if row.head_size >= head_size]
    if enough:
        return min(enough, key=lambda row: row.head_size)
    if of_chip:
        fact = f"The table has no tile for a head size of {head_size} on {chip}"
        available = f"It has {', '.join(str(row.head_size) for row in of_chip)}"
    else:
        chips = list(dict.fromkeys(row.chip for row in rows)) or ["none"]
        fact, available = f"The table has no tile for a chip '{chip}'", f"It has {', '.join(chips)}"
    raise AttentionError(
        f"attention '{implementation}'",
        fact,
        f"{available}; `python benchmarks/attention_tiles.py --help` of the repository says how to measure one",
        chip=chip,
        head_size=head_size,
    )
