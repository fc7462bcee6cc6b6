"""Which devices of a mesh are neighbours, by coordinates alone; and once by libtpu's own."""

import itertools
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchport.plan.tpu import absent
from torchport.shard import grid
from torchport.shard.grid import Spot

needs_libtpu = pytest.mark.skipif(
    not absent.installed(),
    reason="libtpu is not installed; pip install 'torchport[plan]' and run `pytest tests/shard/test_grid.py`",
)


def slices(*sides, cores=1, count=1):
    """The places of a TPU slice, x fastest, as JAX lists them; of several slices one after the other."""
    axes = [range(side) for side in (*sides, 1, 1)[:3]]
    chips = [tuple(reversed(chip)) for chip in itertools.product(*reversed(axes))]
    return [Spot(island, chip, core) for island in range(count) for chip in chips for core in range(cores)]


def processes(count, devices):
    """The places of CPU devices in processes."""
    return [Spot(process, (), device) for process in range(count) for device in range(devices)]


def shapes(sizes, where, known=()):
    """The links of every group of each axis, dp, sp and tp, of the order that is chosen."""
    order = grid.order(sizes, where, known)
    assert sorted(order) == list(range(len(where)))
    arranged = [where[number] for number in order]
    return {
        name: {grid.links([arranged[n] for n in group]) for group in grid._groups(sizes, axis)}
        for axis, name in enumerate(("dp", "sp", "tp"))
        if sizes[axis] > 1
    }


def test_on_a_2x4_slice_four_that_exchange_are_a_square():
    for sizes, inner in (((2, 4, 1), "sp"), ((2, 1, 4), "tp")):
        assert shapes(sizes, slices(2, 4)) == {inner: {"2x2 square"}, "dp": {"1x3 line with gaps"}}
    where = slices(2, 4)
    order = grid.order((2, 4, 1), where)
    assert {where[n].chip[:2] for n in order[:4]} == {(0, 0), (1, 0), (1, 1), (0, 1)}
    assert {where[n].chip[:2] for n in order[4:]} == {(0, 2), (1, 2), (1, 3), (0, 3)}


def test_an_axis_of_all_devices_takes_the_whole_slice():
    assert shapes((1, 8, 1), slices(2, 4)) == {"sp": {"2x4 rectangle"}}
    assert shapes((8, 1, 1), slices(2, 4)) == {"dp": {"2x4 rectangle"}}


def test_larger_slices_are_cut_into_squares_and_rectangles():
    assert shapes((4, 4, 1), slices(4, 4))["sp"] == {"2x2 square"}
    assert shapes((2, 8, 1), slices(4, 4))["sp"] == {"2x4 rectangle"}
    assert shapes((2, 16, 1), slices(4, 8))["sp"] == {"4x4 square"}
    assert shapes((2, 2, 4), slices(4, 4))["tp"] == {"2x2 square"}
    assert shapes((8, 8, 1), slices(4, 4, 4))["sp"] == {"2x2x2 cube"}


def test_two_devices_of_a_chip_come_before_a_second_chip():
    assert shapes((1, 4, 1), slices(2, 2)) == {"sp": {"2x2 square"}}
    assert shapes((4, 2, 1), slices(2, 2, cores=2)) == {"sp": {"one chip"}, "dp": {"2x2 square"}}
    assert shapes((2, 4, 1), slices(2, 2, cores=2)) == {"sp": {"1x2 line"}, "dp": {"1x2 line"}}


def test_inner_axes_stay_on_one_host_and_in_one_slice():
    assert shapes((2, 4, 1), processes(2, 4)) == {"dp": {"hosts"}, "sp": {"one host"}}
    mixed = [Spot(n % 2, (), n // 2) for n in range(8)]
    assert shapes((2, 4, 1), mixed, [list(range(8))]) == {"dp": {"hosts"}, "sp": {"one host"}}
    assert shapes((2, 1, 4), slices(2, 2, count=2)) == {"dp": {"slices"}, "tp": {"2x2 square"}}
    assert shapes((2, 4, 1), processes(4, 2)) == {"dp": {"hosts"}, "sp": {"hosts"}}


def test_an_order_that_is_known_is_taken_unless_another_is_more_compact_or_has_closer_neighbours():
    where, ring, path = slices(2, 4), [0, 1, 2, 3, 7, 6, 5, 4], [1, 0, 2, 3, 5, 4, 6, 7]
    assert grid.order((1, 8, 1), where, [path]) == path
    assert grid.order((1, 8, 1), where, [ring]) != ring, "its second and third chip are two links apart"
    assert grid.order((2, 4, 1), where, [ring]) != ring, "its pairs lie up to four chips apart"
    lines = [0, 2, 4, 6, 1, 3, 5, 7]
    assert shapes((2, 4, 1), where, [lines])["sp"] == {"2x2 square"}


def test_devices_that_are_no_full_box_stay_as_they_come():
    where = slices(2, 4)[:5]
    assert grid.order((1, 5, 1), where) == [0, 1, 2, 3, 4]
    assert shapes((1, 5, 1), where) == {"sp": {"2x3 rectangle with gaps"}}


@given(
    sides=st.lists(st.sampled_from([1, 2, 4]), min_size=3, max_size=3),
    parts=st.permutations([1, 2, 4]),
    cores=st.sampled_from([1, 2]),
)
def test_every_device_is_used_once_and_inner_neighbours_are_near(sides, parts, cores):
    where = slices(*sides, cores=cores)
    inner = parts[0] if len(where) % parts[0] == 0 else 1
    sizes = (len(where) // inner, 1, inner)
    order = grid.order(sizes, where)
    assert sorted(order) == list(range(len(where)))
    for group in grid._groups(sizes, 2):
        for one, other in itertools.pairwise(where[order[n]] for n in group):
            apart = [abs(a - b) for a, b in zip((*one.chip, one.core), (*other.chip, other.core), strict=True)]
            assert sum(apart) == 1, "successive devices are neighbours"


@pytest.mark.parametrize(
    ("chips", "kind", "links", "ports"),
    [
        ([(0, 0), (1, 0), (0, 1), (1, 1)], "all-to-all", "2x2 square", 2),
        ([(0, 0), (1, 0), (0, 1), (1, 1)], "all-reduce", "2x2 square", 2),
        ([(0, y) for y in range(4)], "all-to-all", "1x4 line", 1),
        ([(0, y) for y in range(8)], "all-to-all", "1x8 line", 0.5),
        ([(0, y) for y in range(8)], "all-gather", "1x8 line", 1),
        ([(x, y) for x in range(2) for y in range(4)], "all-to-all", "2x4 rectangle", 1),
        ([(x, y) for x in range(2) for y in range(4)], "all-reduce", "2x4 rectangle", 2),
        ([(0, 0), (0, 1)], "collective-permute", "1x2 line", 1),
        ([(0, 0), (0, 2)], "all-reduce", "1x3 line with gaps", 2 / 3),
    ],
)
def test_a_lines_all_to_all_has_half_the_links_of_a_squares(chips, kind, links, ports):
    group = [Spot(0, (*chip, 0), 0) for chip in chips]
    assert grid.links(group) == links and grid.ports(kind, group) == pytest.approx(ports)


def test_devices_of_a_chip_share_its_links():
    chip = [Spot(0, (0, 0, 0), core) for core in range(2)]
    assert grid.links(chip) == "one chip" and grid.ports("all-to-all", chip) == 6
    assert grid.ports("all-to-all", slices(2, 1, cores=2)) == 0.5
    assert grid.links([Spot(0, (), 0), Spot(0, (), 1)]) == "one host"


def test_a_device_is_placed_by_its_slice_or_its_process():
    tpu = SimpleNamespace(coords=[1, 2, 0], core_on_chip=1, slice_index=3, process_index=7)
    assert grid.spots([tpu]) == [Spot(3, (1, 2, 0), 1)]
    cpus = [SimpleNamespace(process_index=n // 2) for n in range(4)]
    assert grid.spots(cpus) == [Spot(0, (), 0), Spot(0, (), 1), Spot(1, (), 0), Spot(1, (), 1)]


@needs_libtpu
def test_a_mesh_of_a_slice_that_is_not_there_is_compact(root):
    """What JAX alone makes of these: lines of v6e:4x4, and an error where an axis takes half a line."""
    code = """if True:
        import json, sys
        from torchport import shard
        from torchport.shard import grid
        from torchport.config.machine import parse_machine
        from torchport.plan.tpu.absent import describe
        said = {}
        for name, *sizes in json.loads(sys.argv[1]):
            devices = describe(parse_machine(name, "a.yaml:1")).devices
            where = grid.spots(shard.make_mesh(dict(zip(shard.AXES, sizes)), devices).devices.flat)
            inner = max(n for n, size in enumerate(sizes) if size > 1)
            found = {grid.links([where[n] for n in group]) for group in grid._groups(sizes, inner)}
            said[" ".join([name, *map(str, sizes)])] = sorted(found)
        print(json.dumps(said))
    """
    wanted = {
        "v6e:2x4 2 4 1": ["2x2 square"],
        "v6e:2x4 2 1 4": ["2x2 square"],
        "v6e:2x4 1 8 1": ["2x4 rectangle"],
        "v6e:2x4 8 1 1": ["2x4 rectangle"],
        "v6e:4x4 4 4 1": ["2x2 square"],
        "v6e:4x4 2 8 1": ["2x4 rectangle"],
        "v5p:2x2x1 1 4 1": ["2x2 square"],
        "tpu7x:2x2x1 2 4 1": ["1x2 line"],
        "tpu7x:2x2x1 4 2 1": ["one chip"],
    }
    asked = json.dumps([[name, *map(int, sizes)] for name, *sizes in map(str.split, wanted)])
    child = subprocess.run(
        [sys.executable, "-c", code, asked],
        env=os.environ | absent.environment() | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(child.stdout) == wanted
