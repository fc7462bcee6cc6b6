"""What a call costs: the counting rule on made-up kernels."""

import pytest
from fakes.bundles import bundles_of, kernel, loop, predicated

from torchport.errors import TopologyError
from torchport.plan.tpu.cost import Trips, executed


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
