"""The table of tiles: complete, strict, and what a tile takes of VMEM."""

import itertools

import pytest

from torchport.config.machine import MIB, TPU_CHIPS
from torchport.errors import AttentionError, MissingKeyError, UnknownKeyError, VmemError, WrongTypeError
from torchport.kernels.attention import tiles
from torchport.kernels.attention.tiles import (
    SplashTile,
    Tile,
    best,
    check_vmem,
    read_table,
    row,
)

ROW = (
    "{chip: v6e, head_size: 128, tokens: 4096, peak_percent: 60.0, steady_percent: 64.5, ranked_by: schedule, "
    'libtpu: "0.0.51", bounded: true, tile: {block_q: 8192, block_kv: 1024, columns: 512}}'
)


def refusal(call, kind):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def written(folder, *rows):
    """Returns a table's file: these rows of `splash_transposed`, from line 2 on."""
    file = folder / "tiles.yaml"
    file.write_text("splash_transposed:\n" + "".join(f"  - {one}\n" for one in rows) + "splash: []\n")
    return file


@pytest.mark.parametrize(("chip", "size"), list(itertools.product(TPU_CHIPS, (64, 128))))
def test_every_chip_has_a_tile_for_both_head_sizes(chip, size):
    for bounded in (True, False):
        assert isinstance(best(chip, "splash_transposed", size, bounded), Tile)
    assert isinstance(best(chip, "splash", size, bounded=False), SplashTile)


def test_every_shipped_tile_fits_its_chip():
    for found in tiles.table().splash_transposed:
        heads = 2 if found.head_size == 64 else 1
        tile = best(found.chip, "splash_transposed", found.head_size, found.bounded)
        vmem = TPU_CHIPS[found.chip].vmem
        assert check_vmem(tile, head_size=found.head_size, heads=heads, itemsize=2, bounded=found.bounded, vmem=vmem)


def test_a_head_size_between_those_of_the_table_takes_the_next_larger_ones_row():
    assert row("v6e", "splash_transposed", 72, True) == row("v6e", "splash_transposed", 128, True)
    assert row("v6e", "splash_transposed", 40, True) == row("v6e", "splash_transposed", 64, True)


def test_a_chip_without_a_row_is_refused_with_those_that_have_one():
    assert refusal(lambda: best("v4", "splash_transposed", 128, True), AttentionError) == (
        "attention 'splash_transposed': The table has no tile for a chip 'v4'. It has v5e, v5p, v6e, tpu7x; "
        "`python benchmarks/attention_tiles.py --help` of the repository says how to measure one."
    )


def test_a_head_size_beyond_the_table_is_refused_with_the_command_that_adds_it():
    assert refusal(lambda: best("v6e", "splash", 256, False), AttentionError) == (
        "attention 'splash': The table has no tile for a head size of 256 on v6e. It has 64, 128; "
        "`python benchmarks/attention_tiles.py --help` of the repository says how to measure one."
    )


def test_a_tile_that_does_not_fit_is_refused_with_the_tile_and_the_bytes():
    tile, how = Tile(8192, 4096), {"head_size": 128, "heads": 1, "itemsize": 2, "bounded": True}
    with pytest.raises(VmemError) as caught:
        check_vmem(tile, **how, vmem=64 * MIB)
    assert str(caught.value) == (
        "tile block_q=8192, block_kv=4096, columns=512: It takes 84,287,488 bytes of VMEM (80.4 MiB) with 1 head(s) of "
        "128 features to a tile, and the limit is 58,720,256 (56.0 MiB). "
        "Leave the tile out, and torchport takes the one of its table; or take a smaller one, which `python "
        "benchmarks/attention_tiles.py` of the repository finds."
    )
    assert (caught.value.tile, caught.value.asked, caught.value.limit) == (tile, tile.vmem_bytes(**how), 56 * MIB)
    assert check_vmem(tile, **how, vmem=128 * MIB) is tile


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (
            ("columns: 512", "columns: 512, rows: 8"),
            UnknownKeyError,
            ":2: Unknown key 'splash_transposed.0.tile.rows'. ",
        ),
        (("bounded: true, ", ""), MissingKeyError, ":2: 'splash_transposed.0.bounded' is missing. Add 'bounded'."),
        (
            ("chip: v6e", "chip: v4"),
            WrongTypeError,
            ":2: 'splash_transposed.0.chip' is 'v4'. It must be one of v5e, v5p, v6e, tpu7x.",
        ),
        (
            ("block_kv: 1024", "block_kv: 1152"),
            WrongTypeError,
            ":2: 'splash_transposed.0.tile.block_kv' is 1152. It must be a positive multiple of 256.",
        ),
        (('"0.0.51"', "0.1"), WrongTypeError, ":2: 'splash_transposed.0.libtpu' is 0.1 (a number). It must be text."),
        (
            ("by: schedule", "by: guess"),
            WrongTypeError,
            "'splash_transposed.0.ranked_by' is 'guess' (text). It must be",
        ),
    ],
)
def test_a_mistake_in_a_table_is_refused_with_its_line(tmp_path, change, kind, text):
    assert change[0] in ROW
    assert text in refusal(lambda: read_table(written(tmp_path, ROW.replace(*change))), kind)


def test_two_rows_of_one_key_are_refused_with_both_lines(tmp_path):
    other = ROW.replace("block_q: 8192", "block_q: 4096")
    text = refusal(lambda: read_table(written(tmp_path, ROW, ROW.replace("true", "false"), other)), WrongTypeError)
    assert text == "tiles.yaml:4: The row of v6e with head size 128 stands here and on line 2. Keep one of the two."
