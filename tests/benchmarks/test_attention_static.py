"""The benchmark of static schedules: what it prints, with schedules that take no time."""

import dataclasses
import importlib.util
import json

import pytest
from attention_tiles import Candidate, Figures

KEYS = [
    "name",
    "chip",
    "head_size",
    "tile",
    "peak_percent",
    "steady_percent",
    "matrix_unit_share",
    "dma_share",
    "spills",
]


@pytest.fixture
def benchmark(root, monkeypatch):
    """The benchmark's module; each kernel is given the figures of `benchmark.given`."""
    spec = importlib.util.spec_from_file_location("attention_static", root / "benchmarks" / "attention_static.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.given = Figures(60.0, 64.4, 0.97, 0.05, 12, 6000, 0, 9000)
    module.dropped = ""
    monkeypatch.setattr(
        module, "tried", lambda job, implementation, bounded, tile: Candidate(tile, module.given, module.dropped)
    )
    return module


def printed(benchmark, monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["attention_static.py", *arguments])
    benchmark.main()
    return capsys.readouterr().out


def test_every_kernel_has_its_figures_on_both_chips(benchmark, monkeypatch, capsys):
    kernels = json.loads(printed(benchmark, monkeypatch, capsys, "--json"))["kernels"]
    assert len({(row["name"], row["chip"], row["head_size"]) for row in kernels}) == len(kernels) == 13
    assert all(set(KEYS) <= set(row) for row in kernels)
    assert {row["chip"] for row in kernels} == {"v6e", "tpu7x"} and {row["head_size"] for row in kernels} == {64, 128}
    assert {row["tokens"] for row in kernels} == {112_856, 39_826}


def test_the_table_says_whether_the_targets_are_met(benchmark, monkeypatch, capsys):
    lines = printed(benchmark, monkeypatch, capsys).splitlines()
    assert lines[-2:] == [
        "target, head size 128 on v6e: above 64.3 in the steady loop. It is 64.4: met",
        "target, head size 64 on v6e: above 33.0 in the steady loop. It is 64.4: met",
    ]
    benchmark.given = dataclasses.replace(benchmark.given, steady_percent=64.3)
    lines = printed(benchmark, monkeypatch, capsys).splitlines()
    assert lines[-2].endswith("It is 64.3: MISSED")


def test_a_shipped_tile_that_is_no_result_ends_it(benchmark, monkeypatch, capsys):
    benchmark.dropped = "HBM: 0.95 of the cycles, limit 0.9"
    with pytest.raises(SystemExit, match=r"splash v6e 128: .* is no result \(HBM: 0\.95 of the cycles, limit 0\.9\)"):
        printed(benchmark, monkeypatch, capsys)
