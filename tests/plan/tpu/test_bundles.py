"""The bundles of a kernel: read from the compiler's text, and from a real compilation for a TPU that is not there."""

import importlib.util
import re

import pytest
from fakes.bundles import GRID, GRID_MATMUL, INNER, bundles_of, dump, kernel, loop, predicated

from torchport.config.machine import parse_machine
from torchport.errors import TopologyError, VmemError
from torchport.plan.tpu.bundles import Region, Trips, compile_kernel, executed, read, refused

V6E = parse_machine("v6e:1x1", "a.yaml:1")
REAL = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed; pip install 'torchport[plan]' and run `pytest tests/plan/tpu/test_bundles.py`",
)
FORM = "It must have the form that torchport reads, which is libtpu 0.0.51's."


def refusal(call, kind=TopologyError):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_loops_and_predicated_regions_are_a_tree_and_delay_slots_are_not_skipped(tmp_path):
    found = read(dump(tmp_path, GRID, GRID_MATMUL), "k")
    assert found.kernel == "k.1" and found.size == 17 == len(found.counts)
    first, steady, last = (Region("predicated", *span, depth=1) for span in ((4, 5), (8, 10), (12, 13)))
    assert found.root == Region("kernel", 0, 17, 0, (Region("loop", 1, 16, 1, (first, steady, last)),))


def test_a_branch_to_an_empty_bundle_that_names_no_region_goes_to_the_exit(tmp_path):
    lines = ["   : { sbr.rel (%p1) target = $region4 }", "   : {}", *INNER, "PF: {}"]
    found = read(dump(tmp_path, lines, [1] * len(lines)), "k")
    assert [(part.kind, part.start, part.end) for part in found.root.inside] == [("predicated", 2, 12)]


def test_a_kernel_is_found_by_the_name_that_libtpu_makes_of_it(tmp_path):
    dump(tmp_path, GRID, GRID_MATMUL, kernel="my-kernel_v6e_1x1.1")
    dump(tmp_path, INNER, [1] * 10, kernel="k.2")
    assert read(tmp_path, "my-kernel v6e:1x1").size == 17
    assert read(tmp_path, "k").size == read(tmp_path, "k.2").size == 10


def test_a_kernel_that_was_not_dumped_is_refused(tmp_path):
    text = refusal(lambda: read(dump(tmp_path, GRID, GRID_MATMUL, kernel="splash.1"), "splosh.1"))
    assert text == (
        f"{tmp_path}: The compiler left no bundles of a kernel 'splosh.1' there. "
        "Did you mean 'splash.1'? Known: splash.1."
    )
    assert refusal(lambda: read(tmp_path / "none", "k")) == (
        f"{tmp_path / 'none'}: The compiler left no bundles of a kernel 'k' there. None are known."
    )


def test_a_kernel_that_is_called_twice_must_be_named_as_a_call(tmp_path):
    dump(tmp_path, GRID, GRID_MATMUL, kernel="k.2")
    dump(tmp_path, GRID, GRID_MATMUL, kernel="k.3")
    assert refusal(lambda: read(tmp_path, "k")) == (
        f"{tmp_path}: It has the bundles of 2 calls of a kernel 'k': k.2, k.3. "
        "Name one of the calls, and dump each program into an empty folder."
    )
    assert read(tmp_path, "k.3").kernel == "k.3"


@pytest.mark.parametrize(
    ("bundles", "fact"),
    [
        ([], ": There is no bundle. "),
        (["   : { sbr.rel target = $region7 }"], ": A branch goes to region 7, which begins nowhere. "),
        (["   : { s }", "LB: > { s }"], ": bundle 0x1: Its mark of a loop and the branches do not agree. "),
        ([*GRID[:1], GRID[1].replace(">", ">>"), *GRID[2:]], ": bundle 0x1: Its mark of a loop and the branches do"),
        ([*GRID[:1], GRID[1].replace("LB", "  "), *GRID[2:]], ": bundle 0x1: Its mark of a loop and the branches do"),
    ],
)
def test_bundles_of_another_form_are_refused(tmp_path, bundles, fact):
    text = refusal(lambda: read(dump(tmp_path, bundles, [0] * len(bundles)), "k"))
    assert text.startswith(f"{tmp_path / '17-k.1-72-final_bundles.txt'}{fact}") and text.endswith(FORM)


def test_a_bundle_out_of_order_is_refused_with_its_line(tmp_path):
    file = dump(tmp_path, GRID, GRID_MATMUL) / "17-k.1-72-final_bundles.txt"
    file.write_text(file.read_text().replace("   0x3 ", "   0x4 "))
    assert refusal(lambda: read(tmp_path, "k")) == f"{file}:9: Bundle 0x4 is number 0x3. {FORM}"


@pytest.mark.parametrize(
    "header",
    [{"slots": "VALU, XLU, A, B"}, {"slots": "MATMUL, VALU"}, {"capacities": "2 4"}, {"capacities": "2 4 3 x"}],
)
def test_counts_of_another_form_are_refused(tmp_path, header):
    text = refusal(lambda: read(dump(tmp_path, GRID, GRID_MATMUL, **header), "k"))
    file = tmp_path / "17-k.1-70-final_hlo-static-per-bundle-utilization.txt"
    assert text == f"{file}:2: No table of slots such as MATMUL with a row for each bundle. {FORM}"


def test_counts_of_another_program_are_refused(tmp_path):
    text = refusal(lambda: read(dump(tmp_path, GRID, [0, 1]), "k"))
    assert text.endswith(f"-utilization.txt: It has 2 rows for 17 bundles. {FORM}")


SCOPED = (
    "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:\nRan out of memory in memory space vmem while allocating on "
    "stack for %f.1. Scoped allocation with size 72.50M and limit {}M exceeded scoped vmem limit by 56.50M."
)


def test_vector_memory_that_the_kernel_may_use_is_told_from_what_there_is():
    error = refused(SCOPED.format("16.00"), V6E, "m:f(bq=8)")
    assert type(error) is VmemError and (error.asked, error.limit) == (76021760, 16 * 2**20)
    assert str(error) == (
        "m:f(bq=8): The tile takes 72.5 MiB of VMEM on v6e:1x1, and the limit is 16.0 MiB. "
        "Take a smaller tile, or raise vmem_limit_bytes: a core has 128.0 MiB."
    )
    assert str(refused(SCOPED.format("128.00"), V6E, "m:f()")).endswith("128.0 MiB. Take a smaller tile.")


def test_another_complaint_of_the_compiler_is_quoted():
    assert str(refused("INTERNAL: LLO_CHECK\n failure", V6E, "m:f()")) == (
        "m:f(): The compiler for v6e:1x1 refuses it: INTERNAL: LLO_CHECK failure. Change the kernel or its tile."
    )


@REAL
def test_the_compilers_files_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    text = refusal(lambda: compile_kernel("fakes.kernels:product", {"calls": 2}, V6E))
    assert re.search(r"The program has 2 Pallas kernels: product\.\S+, product\.\S+\. It must have one\.", text)
    assert list(tmp_path.iterdir()) == []


@REAL
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"scratch": 40960, "limit": 16 * 2**20},
            r"MiB of VMEM on v6e:1x1, and the limit is 16\.0 MiB\. "
            r"Take a smaller tile, or raise vmem_limit_bytes: a core has 128\.0 MiB\.",
        ),
        ({"scratch": 300_000}, r"146\.5 MiB of VMEM on v6e:1x1, and the limit is 128\.0 MiB\. Take a smaller tile\."),
    ],
)
def test_a_tile_that_does_not_fit_is_refused_with_its_size(arguments, text):
    with pytest.raises(VmemError, match=text) as caught:
        compile_kernel("fakes.kernels:product", arguments, V6E)
    assert caught.value.place == f"fakes.kernels:product({', '.join(f'{k}={v}' for k, v in arguments.items())})"
    assert caught.value.asked > caught.value.limit >= 16 * 2**20


@REAL
def test_a_program_without_a_single_kernel_is_refused():
    assert refusal(lambda: compile_kernel("fakes.kernels:product", {"calls": 0}, V6E)) == (
        "fakes.kernels:product(calls=0): The program has 0 Pallas kernels: none. It must have one."
    )


@REAL
def test_a_function_that_does_not_build_is_refused_with_what_it_said():
    text = refusal(lambda: compile_kernel("fakes.kernels:product", {"row": 1}, V6E))
    assert re.fullmatch(
        r"fakes\.kernels:product\(row=1\): The process that compiles it ended with exit code 1 and said: TypeError: "
        r"product\(\) got an unexpected keyword argument 'row'.*\. The function must build and lower on any machine\.",
        text,
    )


@REAL
def test_a_slice_that_does_not_exist_is_refused_from_the_child():
    text = refusal(lambda: compile_kernel("fakes.kernels:product", {}, parse_machine("v6e:3x5", "a.yaml:1")))
    assert text.startswith("machine v6e:3x5: libtpu does not know this slice (")


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
        "The rule must follow the kernel: mend torchport/plan/tpu/bundles.py."
    )
