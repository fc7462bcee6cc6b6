"""What `attention_tiles` reads in a kernel's instruction schedule: its steady state, shares, and the cost of a call."""

import importlib.util

import attention_tiles
import pytest
from attention_tiles import (
    Work,
    figures,
    least,
    outermost_loops,
    share,
    spills,
    splash_trips,
    steady_bundles,
    transposed_trips,
)
from fakes.bundles import GRID, GRID_MATMUL, INNER, bundles_of, dump, kernel, loop

from torchport.config.machine import TPU_CHIPS, parse_machine
from torchport.errors import UnknownNameError
from torchport.kernels.attention.tiles import SplashTile, Tile
from torchport.plan.tpu.bundles import Region, Trips, compile_kernel, executed, read

REAL = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed; pip install 'torchport[plan]' and run "
    "`pytest tests/benchmarks/test_attention_schedules.py`",
)


def test_our_kernels_loops_are_tiles_cells_chunks_and_pieces_of_the_tail():
    work = Work(queries=4300, keys=3300, heads=8, head_size=64, group=2)
    # 5 tiles of 896 queries in cells of 256 and a remainder; 12 chunks of 256, 228 keys left.
    tile = Tile(1024, 256, columns=256).fitted(4300, 3300)
    # The three cells of a piece of the tail are one, and so no loop.
    assert transposed_trips(work, tile, cores=1) == Trips((4 * 5, 3, 11, 3, 1, 3))
    assert transposed_trips(work, tile, cores=2) == Trips((2 * 5, 3, 11, 3, 1, 3))
    assert transposed_trips(work, Tile(896, 256, columns=512), cores=1) == Trips((20, 11, 1))
    assert transposed_trips(Work(1024, 2048, 1, 128), Tile(1024, 512), cores=1) == Trips((1, 2, 3, 2, 0, 2))
    further = Work(1024, 2048, 1, 128, further=300)
    assert transposed_trips(further, Tile(1024, 512, columns=128), cores=1) == Trips((1, 8, 3, 8, 0, 2, 2, 2, 8))


def test_jaxs_kernel_has_one_loop_over_whole_tiles_and_chunks():
    assert splash_trips(Work(4300, 3300, 3, 128), SplashTile(1024, 2048, 1024), cores=2) == Trips((2 * 5 * 2,), 2)


def test_percentages_are_of_useful_arithmetic_and_memory_is_counted_as_it_lies_there():
    chip, work = TPU_CHIPS["v6e"], Work(queries=1000, keys=1024, heads=2, head_size=128)
    root = kernel(loop(100, 900, loop(200, 600), loop(700, 760)), end=1000)
    found = figures(bundles_of(root, [(200, 600)]), work, Tile(1024, 256, columns=1024), chip, 256)
    assert work.flops == 4 * 1000 * 1024 * 128 * 2
    # One cell; 4 chunks and no tail, so three trips: two heads' tiles, the steady loop, and the tail's.
    bundles = 200 + 2 * (800 - 400 - 60 + 3 * 400 + 0 * 60)
    assert found.peak_percent == pytest.approx(100 * work.flops / (524_288 * bundles))
    assert found.steady_percent == pytest.approx(100 * 4 * 1024 * 256 * 128 / (524_288 * 400))
    assert found.waits == 0
    assert found.dma_share == pytest.approx(2 * 256 * 128 * 2 / (1638e9 / 1.755e9) / 400)
    assert (found.matrix_unit_share, found.spills, found.steady_bundles, found.body_bundles) == (0.5, 0, 400, 1000)


def test_where_products_take_longer_than_their_bundles_they_count():
    chip, work = TPU_CHIPS["v6e"], Work(queries=1024, keys=1024, heads=1, head_size=128)
    found = bundles_of(kernel(loop(100, 900, loop(200, 500), loop(700, 760)), end=1000), [(200, 500)])
    given = figures(found, work, Tile(1024, 256, columns=1024), chip, 256)
    # 3 passes of 1024 x 256 x 128 through a unit of 256 in place of 2: 384 bundles, and the step has 300.
    assert (given.waits, given.matrix_unit_share) == (84, 1.0)
    assert given.steady_percent == pytest.approx(100 * 2 / 3)
    bundles = 200 + 800 - 300 - 60 + 3 * 300
    assert given.peak_percent == pytest.approx(100 * work.flops / (524_288 * (bundles + 3 * 84)))


@pytest.mark.parametrize(
    ("tile", "head_size", "group", "width", "percent"),
    [
        (Tile(1024, 512), 128, 1, 256, 66.7),
        (Tile(1024, 512), 64, 2, 256, 40.0),
        (Tile(1024, 512), 128, 1, 128, 100.0),
        (Tile(1024, 512), 64, 2, 128, 66.7),
        (SplashTile(1024, 512, 512), 128, 1, 256, 50.0),
        (SplashTile(1024, 512, 512), 64, 2, 256, 25.0),
        (SplashTile(1024, 512, 512), 128, 1, 128, 100.0),
    ],
)
def test_the_matrix_units_own_ceiling_is_known(tile, head_size, group, width, percent):
    bundles = least(Work(4096, 4096, 2, head_size, group), tile, width, 524_288)
    step = 4 * 1024 * 512 * head_size * (group if isinstance(tile, Tile) else 1)
    assert 100 * step / (524_288 * bundles) == pytest.approx(percent, abs=0.05)


def test_keys_with_a_further_feature_take_two_registers_lanes_of_memory():
    chip, work = TPU_CHIPS["v6e"], Work(1024, 1024, 1, 128)
    found = bundles_of(kernel(loop(0, 1500), end=1500), [(0, 1500)])
    assert figures(found, work, SplashTile(1024, 512, 512), chip, 256).dma_share == pytest.approx(
        512 * (128 + 256) * 2 / (1638e9 / 1.755e9) / 1500
    )


@REAL
@pytest.mark.parametrize(
    ("machine", "passes"),
    [("v6e:2x4", 1.5), ("v5p:2x2x1", 1.0)],
)
def test_the_count_of_a_real_kernel_holds_all_of_the_matrix_work(machine, passes):
    """The products of padded sizes are known; a wrong number of passes of any loop would show in their sum."""
    chip, work, tile = TPU_CHIPS[machine.partition(":")[0]], Work(4000, 8292, 2, 128), Tile(1024, 512)
    arguments = {"implementation": "splash_transposed", "queries": 4000, "keys": 8292, "heads": 2, "head_size": 128}
    arguments |= {"bounded": True, "tile": vars(tile), "vmem_bytes": 2**25}
    found = compile_kernel(attention_tiles.BUILD, arguments, parse_machine(machine, "a.yaml:1"))
    fitted = tile.fitted(4000, 8292)
    trips = transposed_trips(work, fitted, chip.cores)
    padded = 4 * (4 * fitted.block_q) * (33 * 256) * 128 * passes * work.heads / chip.cores
    busy = executed(found, trips, "MATMUL") * chip.bundle_flops / found.slots["MATMUL"]
    assert 0.85 < busy / padded < 1.02  # products that overlap in one unit's queue count once
    assert executed(found, trips) > executed(found, trips, "MATMUL") / found.slots["MATMUL"]


def test_a_steady_grid_step_runs_neither_the_first_steps_region_nor_the_lasts(tmp_path):
    found = read(dump(tmp_path, GRID, GRID_MATMUL), "k")
    assert steady_bundles(found) == [1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 13, 14, 15]


def test_an_inner_loop_is_the_steady_state_though_work_stands_before_it(tmp_path):
    found = read(dump(tmp_path, INNER, [2, 2, 0, 2, 0, 1, 1, 0, 0, 0]), "k")
    inner = Region("loop", 3, 7, 2)
    guard = Region("predicated", 3, 7, 1, (inner,))
    assert found.root == Region("kernel", 0, 10, 0, (Region("loop", 0, 10, 1, (guard,)),))
    assert steady_bundles(found) == [3, 4, 5, 6]


def test_an_inner_loop_with_little_of_the_matrix_work_is_not_the_steady_state(tmp_path):
    found = read(dump(tmp_path, INNER, [9, 9, 0, 1, 0, 0, 0, 0, 0, 0]), "k")
    assert steady_bundles(found) == list(range(10))


def test_a_kernel_without_loops_is_taken_whole(tmp_path):
    found = read(dump(tmp_path, ["   : { s }", "   : { s }"], [1, 0]), "k")
    assert steady_bundles(found) == [0, 1]


def test_of_two_regions_with_equal_work_the_one_that_does_not_mask_runs(tmp_path):
    found = read(dump(tmp_path, GRID, [0] * 8 + [1, 1, 0, 0, 2, 0, 0, 0, 0]), "k")
    assert steady_bundles(found) == [1, 2, 3, 5, 6, 7, 10, 11, 12, 13, 14, 15]


def test_regions_without_matrix_work_do_not_run_in_the_steady_state(tmp_path):
    found = read(dump(tmp_path, GRID, [0, 2] + [0] * 15), "k")
    assert steady_bundles(found) == [1, 2, 3, 5, 6, 7, 10, 11, 13, 14, 15]


def test_shares_and_spills_are_those_of_the_steady_state(tmp_path):
    found = read(dump(tmp_path, GRID, GRID_MATMUL), "k")
    assert found.slots == {"MATMUL": 2, "VALU": 4, "VLOAD:FILL": 3, "VSTORE:SPILL": 2}
    assert share(found, "MATMUL") == 4 / (2 * 13) and share(found, "VSTORE:SPILL") == 1 / 2
    assert spills(found) == (13, 4)


def test_a_slot_that_the_chip_lacks_is_refused(tmp_path):
    found = read(dump(tmp_path, GRID, GRID_MATMUL), "k")
    with pytest.raises(UnknownNameError) as caught:
        share(found, "MATMULL")
    assert str(caught.value) == (
        "bundles of k.1: There is no slot 'MATMULL'. "
        "Did you mean 'MATMUL'? Known: MATMUL, VALU, VLOAD:FILL, VSTORE:SPILL."
    )


@REAL
@pytest.mark.parametrize("machine", ["v5e:2x4", "v5p:2x2x1", "v6e:2x4", "tpu7x:2x2x1"])
def test_a_kernel_is_compiled_for_every_chip_and_its_steady_step_is_found(machine):
    kernel = compile_kernel("fakes.kernels:product", {"rows": 512}, parse_machine(machine, "a.yaml:1"))
    assert kernel.kernel == "product.1"
    # On v5p under a predicate: without a parallel dimension one of two cores works.
    [loop] = outermost_loops(kernel.root)
    steady = steady_bundles(kernel)
    assert len(steady) < loop.end - loop.start < kernel.size  # neither the first step's region nor the last's
    assert 0 < share(kernel, "MATMUL") <= 1 and spills(kernel) == (0, 0)
    column = list(kernel.slots).index("MATMUL")
    assert kernel.counts[steady, column].sum() == kernel.counts[:, column].sum() > 0
