"""What a call costs: the counting rule on made-up kernels, and against a real one's matrix work."""

import importlib.util

import numpy
import pytest

from torchport.config.machine import TPU_CHIPS, parse_machine
from torchport.errors import TopologyError
from torchport.kernels.attention.tiles import SplashTile, Tile
from torchport.plan.tpu.bundles import KernelBundles, Region, compile_kernel
from torchport.plan.tpu.cost import Trips, Work, executed, figures, least, splash_trips, transposed_trips

REAL = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed; pip install 'torchport[plan]' and run `pytest tests/plan/tpu/test_cost.py`",
)
SLOTS = {"MATMUL": 2, "VSTORE:SPILL": 1, "VLOAD:FILL": 1}


def bundles_of(root, busy=()):
    """A kernel whose bundles in the ranges `busy` use one matrix unit each."""
    counts = numpy.zeros((root.end, len(SLOTS)), numpy.int64)
    for start, end in busy:
        counts[start:end, 0] = 1
    return KernelBundles("k.1", SLOTS, counts, root)


def kernel(*inside, end):
    return Region("kernel", 0, end, 0, inside)


def loop(start, end, *inside):
    return Region("loop", start, end, 1, inside)


def predicated(start, end, *inside):
    return Region("predicated", start, end, 1, inside)


def test_every_bundle_counts_as_often_as_the_loops_around_it_run():
    root = kernel(loop(10, 300, loop(20, 80), predicated(100, 250, loop(100, 250, loop(150, 200)))), end=310)
    found = bundles_of(root, [(20, 80), (110, 130), (150, 200)])
    outside, grid, first, second, inner = 20, 290 - 60 - 150, 60, 150 - 50, 50
    wanted = outside + 3 * (grid + 5 * first + 7 * (second + 11 * inner))
    assert executed(found, Trips((3, 5, 7, 11))) == wanted
    assert executed(found, Trips((3, 5, 7, 11)), "MATMUL") == 3 * (5 * 60 + 7 * (20 + 11 * 50))


def test_a_loop_that_never_runs_costs_nothing_but_its_surroundings():
    assert executed(bundles_of(kernel(loop(10, 100, loop(20, 80)), end=110), [(20, 80)]), Trips((2, 0))) == 20 + 2 * 30


def test_the_compilers_own_loops_count_once():
    root = kernel(loop(0, 300, loop(10, 17), predicated(30, 130, loop(40, 120)), predicated(200, 290)), end=300)
    assert executed(bundles_of(root, [(210, 280)]), Trips((4,))) == 4 * 300


def test_regions_for_the_first_and_the_last_step_count_once_in_so_many_steps():
    root = kernel(loop(0, 300, predicated(10, 60), predicated(100, 200), predicated(210, 280)), end=300)
    found = bundles_of(root, [(100, 200)])
    assert executed(found, Trips((12,), once_in=4)) == 12 * (300 - 50 - 70) + 3 * (50 + 70)
    assert executed(found, Trips((12,))) == 12 * 300


def test_a_kernel_of_another_form_is_refused():
    with pytest.raises(TopologyError) as caught:
        executed(bundles_of(kernel(loop(0, 100), end=100), [(0, 50)]), Trips((3, 2)))
    assert str(caught.value) == (
        "bundles of k.1: It has 1 loops, and the passes of 2 are known (3, 2). "
        "The rule must follow the kernel: mend torchport/plan/tpu/cost.py."
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
    found = compile_kernel("torchport.plan.tpu.bundles:attention_call", arguments, parse_machine(machine, "a.yaml:1"))
    fitted = tile.fitted(4000, 8292)
    trips = transposed_trips(work, fitted, chip.cores)
    padded = 4 * (4 * fitted.block_q) * (33 * 256) * 128 * passes * work.heads / chip.cores
    busy = executed(found, trips, "MATMUL") * chip.bundle_flops / found.slots["MATMUL"]
    assert 0.85 < busy / padded < 1.02  # products that overlap in one unit's queue count once
    assert executed(found, trips) > executed(found, trips, "MATMUL") / found.slots["MATMUL"]
