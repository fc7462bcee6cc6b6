"""Tiles tried, ranked and written; and what a kernel has to compute, from a model's configurations."""

import dataclasses
import importlib.util
import json
import logging
import warnings

import attention_tiles
import pytest
from attention_tiles import (
    Figures,
    Work,
    least,
    sized_workload,
    workload_of_flags,
    write_table,
)

from torchport.config.machine import MIB, parse_machine
from torchport.errors import BadValueError, ConfigError, OutputError, TopologyError, VmemError
from torchport.kernels.attention import tiles
from torchport.kernels.attention.tiles import SplashTile, Tile, TileTable, best, read_table

REAL = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed; pip install 'torchport[plan]' and run "
    "`pytest tests/benchmarks/test_attention_tiles.py`",
)
V6E = parse_machine("v6e:2x4", "a.yaml:1")
JOB = sized_workload(V6E, tokens=2304, heads=1, head_size=128)
FIGURES = Figures(60.0, 64.0, 0.97, 0.05, 12, 6000, 0, 9000)


def refusal(call, kind):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


@pytest.fixture
def script(monkeypatch, tmp_path, capsys):
    """Runs the script in this process and folder `tmp_path`; returns its exit code and lines of stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr("sys.argv", ["attention_tiles.py", *map(str, words)])
        level = logging.getLogger("torchport").level
        with warnings.catch_warnings(), pytest.raises(SystemExit) as stop:
            attention_tiles.main()
        logging.getLogger("torchport").setLevel(level)
        captured = capsys.readouterr()
        return stop.value.code, captured.out.splitlines(), captured.err.splitlines()

    return call


@pytest.fixture
def schedules(monkeypatch):
    """Has every tile compiled in no time: `schedules[tile]` is its figures, or what its compilation raises."""
    found = {}

    def compile_kernel(build, arguments, machine):
        outcome = found[tuple(arguments["tile"].values())]
        if isinstance(outcome, VmemError):
            raise outcome
        return outcome

    monkeypatch.setattr(attention_tiles, "compile_kernel", compile_kernel)
    monkeypatch.setattr(attention_tiles, "figures", lambda kernel, work, tile, chip, width: kernel)
    return found


def test_tiles_are_ranked_by_the_whole_calls_share_of_peak_and_the_dropped_come_last(schedules):
    schedules[2048, 256, 512] = FIGURES
    schedules[2048, 512, 512] = dataclasses.replace(FIGURES, peak_percent=61.0, steady_percent=62.0)
    schedules[2048, 1024, 512] = dataclasses.replace(FIGURES, peak_percent=70.0, steady_bundles=16_001)
    schedules[1024, 256, 512] = dataclasses.replace(FIGURES, peak_percent=70.0, dma_share=0.91)
    schedules[1024, 512, 512] = VmemError("m:f()", "It takes much", "Take less", asked=130_000_000, limit=125_829_120)
    found = attention_tiles.tune(JOB, "splash_transposed", True, [Tile(*sides) for sides in schedules])
    assert [(candidate.tile.block_q, candidate.tile.block_kv) for candidate in found.candidates[:2]] == [
        (2048, 512),
        (2048, 256),
    ]
    assert [candidate.dropped for candidate in found.candidates] == [
        "",
        "",
        "body: 16,001 bundles, limit 16,000",
        "HBM: 0.91 of the cycles, limit 0.9",
        "VMEM: 130,000,000 bytes, limit 125,829,120 (120.0 MiB)",
    ]
    assert found.ranked_by == "schedule"


def test_a_tile_that_declares_too_much_is_dropped_without_a_compilation(schedules):
    job = sized_workload(V6E, tokens=40_000, heads=1, head_size=128)
    [found] = attention_tiles.tune(job, "splash_transposed", False, [Tile(20_480, 2048)]).candidates
    asked_bytes = (
        Tile(20_480, 2048).fitted(40_000, 40_000).vmem_bytes(head_size=128, heads=1, itemsize=2, bounded=False)
    )
    assert found.dropped == f"VMEM: {asked_bytes:,} bytes, limit {120 * MIB:,} (120.0 MiB)" and not schedules


def test_where_the_chip_is_time_decides(schedules, monkeypatch):
    seconds = {256: 0.002, 512: 0.001}
    schedules[2048, 256, 512] = FIGURES
    schedules[2048, 512, 512] = dataclasses.replace(FIGURES, peak_percent=50.0)
    monkeypatch.setattr(attention_tiles, "visible_devices", lambda platform: (8, "TPU v6 lite", 32 * 2**30))
    monkeypatch.setattr(attention_tiles, "_seconds", lambda job, implementation, bounded, tile: seconds[tile.block_kv])
    found = attention_tiles.tune(JOB, "splash_transposed", True, [Tile(*sides) for sides in schedules])
    assert found.ranked_by == "time" and [c.seconds for c in found.candidates] == [0.001, 0.002]
    percent = attention_tiles.percent_of_peak(found, found.candidates[0])
    assert percent == pytest.approx(100 * JOB.work.flops / 0.001 / 918e12)
    monkeypatch.setattr(attention_tiles, "visible_devices", lambda platform: (4, "TPU v5p", 95 * 2**30))
    found = attention_tiles.tune(JOB, "splash_transposed", True, [Tile(2048, 256)])
    assert found.ranked_by == "schedule", "another chip's time"


def test_a_call_is_timed_on_the_devices_that_are_there(monkeypatch):
    from torchport.kernels.attention import transposed

    attention = transposed.attention

    def interpreted(*tokens, settings, **lengths):
        return attention(*tokens, **lengths, settings=dataclasses.replace(settings, interpret=True))

    monkeypatch.setattr(attention_tiles.transposed, "attention", interpreted)
    job = sized_workload(V6E, tokens=256, heads=1, head_size=128)
    assert 0 < attention_tiles._seconds(job, "splash_transposed", True, Tile(256, 256, 256)) < 60


@pytest.mark.parametrize("machine", ["v5e:2x4", "v5p:2x2x1", "v6e:2x4", "tpu7x:2x2x1"])
@pytest.mark.parametrize("head_size", [64, 128])
def test_only_tiles_whose_products_alone_fit_the_largest_body_are_tried(machine, head_size):
    job = sized_workload(parse_machine(machine, "a.yaml:1"), 100_000, 4, head_size)
    found = attention_tiles.candidates(job, "splash_transposed")
    assert 3 <= len(found) <= 12
    width = attention_tiles.UNIT_WIDTH[job.chip.name]
    assert all(4000 <= least(job.work, tile, width, job.chip.bundle_flops) <= 16_000 for tile in found)
    assert all(isinstance(tile, SplashTile) for tile in attention_tiles.candidates(job, "splash"))


def test_the_best_tiles_are_written_and_read_back(schedules, tmp_path, monkeypatch):
    monkeypatch.setattr(attention_tiles.importlib.metadata, "version", lambda name: f"{name} 0.1")
    schedules[2048, 256, 512] = schedules[1024, 512, 512] = FIGURES
    results = [
        attention_tiles.tune(JOB, "splash_transposed", True, [Tile(2048, 256)]),
        attention_tiles.tune(JOB, "splash", False, [SplashTile(1024, 512, 512)]),
    ]
    attention_tiles.write(tmp_path / "tiles.yaml", results)
    found = tiles.read_table(tmp_path / "tiles.yaml")
    assert [row.model_dump() for row in found.splash_transposed] == [
        {
            "chip": "v6e",
            "head_size": 128,
            "tokens": 2304,
            "peak_percent": 60.0,
            "steady_percent": 64.0,
            "ranked_by": "schedule",
            "libtpu": "libtpu 0.1",
            "bounded": True,
            "tile": {"block_q": 2048, "block_kv": 256, "columns": 512},
        }
    ]
    assert found.splash[0].tile.model_dump() == {"block_q": 1024, "block_kv": 512, "block_kv_compute": 512}
    text = refusal(lambda: attention_tiles.write(tmp_path / "none" / "tiles.yaml", results), OutputError)
    assert text == (
        f"{tmp_path / 'none' / 'tiles.yaml'}: It cannot be written (No such file or directory). "
        "Name a file in a folder that can be written."
    )


def test_a_result_without_a_tile_is_not_written(schedules, tmp_path):
    schedules[2048, 256, 512] = dataclasses.replace(FIGURES, steady_bundles=20_000)
    result = attention_tiles.tune(JOB, "splash_transposed", True, [Tile(2048, 256)])
    text = refusal(lambda: attention_tiles.write(tmp_path / "tiles.yaml", [result]), TopologyError)
    assert text == (
        "tune splash_transposed on v6e: Every tile was dropped; the first: body: 20,000 bundles, limit 16,000. "
        "Name another chip or head size."
    )
    assert not (tmp_path / "tiles.yaml").exists()


def test_a_models_attention_is_read_from_its_configurations(root):
    found = workload_of_flags("v6e:2x4", model="hunyuan", config="configs/720p.yaml", paths=(str(root),))
    assert found.work == Work(111_600, 111_600, heads=4, head_size=128) and found.chip.name == "v6e"
    assert found.note == "of the pictures; those of the text come on top"
    found = workload_of_flags(
        "v6e:2x4", model="hunyuan", config="configs/720p.yaml", paths=(str(root),), tokens=112_856, heads=2
    )
    assert found.work == Work(112_856, 112_856, heads=2, head_size=128) and found.note == ""


def test_two_small_heads_share_a_tile():
    assert sized_workload(V6E, 39_826, 12, 64).work == Work(39_826, 39_826, 12, 64, group=2)
    assert sized_workload(V6E, 39_826, 3, 64).work.group == 1


@pytest.mark.parametrize(
    ("how", "has"),
    [
        ({}, "neither a model nor sizes"),
        ({"model": "hunyuan"}, "--model"),
        ({"tokens": 100, "heads": 4}, "--tokens, --heads"),
        (
            {"tokens": 100, "heads": 4, "head_size": 64, "overrides": ("frames=5",)},
            "--set, --tokens, --heads, --head-size",
        ),
    ],
)
def test_half_a_job_is_refused(how, has):
    assert refusal(lambda: workload_of_flags("v6e:2x4", **how), BadValueError) == (
        f"python benchmarks/attention_tiles.py: It has {has}. "
        "Give --model and --config, or --tokens, --heads and --head-size alone."
    )


def test_eight_bits_are_for_chips_and_heads_that_they_make_faster(schedules):
    tile = Tile(2048, 512, 256)
    schedules[(2048, 512, 256)] = FIGURES
    found = attention_tiles.tune(JOB, "splash_int8", True, [tile])
    assert [row.tile for row in found.candidates] == [tile] and not found.candidates[0].dropped
    other = sized_workload(parse_machine("tpu7x:2x2x1", "a.yaml:1"), tokens=2304, heads=1, head_size=128)
    assert refusal(lambda: attention_tiles.tune(other, "splash_int8", True, [tile]), BadValueError) == (
        "--implementation splash_int8: tpu7x multiplies int8 no faster. It is for v5e, v5p, v6e."
    )
    small = sized_workload(V6E, tokens=2304, heads=2, head_size=64)
    assert refusal(lambda: attention_tiles.tune(small, "splash_int8", True, [tile]), BadValueError) == (
        "--implementation splash_int8: Heads have 64 features. It is for heads that are padded to 128: "
        "65 to 128 features."
    )


def test_a_machine_that_is_no_tpu_is_refused(script):
    sizes = ("--tokens", 100, "--heads", 1, "--head-size", 128)
    code, _, err = script("--topology", "cuda:8", *sizes)
    assert (code, err) == (
        2,
        [
            "error[TP107] --topology cuda:8: It is no TPU. "
            "It must be a TPU slice (v5e, v5p, v6e, tpu7x, such as v6e:2x4)."
        ],
    )
    code, _, err = script("--topology", "v7:2x4", *sizes)
    assert code == 2 and err[0].startswith("error[TP107] --topology v7:2x4: 'machine' is 'v7:2x4'. It must be a TPU")


@REAL
def test_a_slice_that_does_not_exist_is_refused(script):
    arguments = ("--topology", "v6e:3x5", "--tokens", 2304, "--heads", 1, "--head-size", 128, "--scores", "bounded")
    code, _, err = script(*arguments)
    assert code == 2 and err[-1].startswith("error[TP502] machine v6e:3x5: libtpu does not know this slice (")


@REAL
def test_the_command_compiles_ranks_prints_and_writes(script, tmp_path, monkeypatch):
    monkeypatch.setattr(attention_tiles, "candidates", lambda job, implementation: [Tile(512, 256), Tile(1024, 256)])
    arguments = ("--topology", "v6e:2x4", "--tokens", 2304, "--heads", 1, "--head-size", 128, "--scores", "bounded")
    code, out, err = script(*arguments, "--json", "--write", tmp_path / "t.yaml")
    assert (code, err) == (0, [])
    first, second = json.loads("\n".join(out))
    assert first["peak_percent"] > second["peak_percent"] > 10 and first["dropped"] is None
    assert 0 < first["steady_percent"] < 66.7 and 0 < first["dma_share"] < 0.9
    [row] = tiles.read_table(tmp_path / "t.yaml").splash_transposed
    assert row.tile.model_dump() == first["tile"] and row.ranked_by == "schedule"


def test_the_table_for_people_is_aligned(schedules):
    schedules[2048, 256, 512] = FIGURES
    schedules[2048, 512, 512] = VmemError("m:f()", "It takes much", "Take less", asked=130_000_000, limit=125_829_120)
    found = attention_tiles.tune(JOB, "splash_transposed", True, [Tile(2048, 256), Tile(2048, 512)])
    assert attention_tiles.lines(found) == [
        "splash_transposed bounded, v6e, by schedule: 2,304 tokens, 1 head(s) of 128",
        "  tile                peak %  steady %  matrix   HBM  spills  bundles",
        "  2048/256/512          60.0      64.0    0.97  0.05      12     6000",
        "  2048/512/512        dropped, VMEM: 130,000,000 bytes, limit 125,829,120 (120.0 MiB)",
    ]


def test_a_table_that_cannot_be_written_is_refused_before_anything_is_compiled(tmp_path):
    for file in (tmp_path, tmp_path / "none" / "table.yaml"):
        with pytest.raises(OutputError) as caught:
            attention_tiles.check_writable(file)
        assert "It is no file, or lies in no folder. Name a file in a folder that is there." in str(caught.value)
    attention_tiles.check_writable(tmp_path / "new.yaml")


def test_the_shipped_table_has_no_row_twice_and_is_as_it_would_be_written(tmp_path):
    found = tiles.table()
    write_table(tmp_path / "tiles.yaml", [*found.splash, *found.splash_int8, *reversed(found.splash_transposed)])
    assert (tmp_path / "tiles.yaml").read_text() == tiles.TABLE.read_text()


def test_a_written_row_takes_the_place_of_its_key_and_leaves_the_others(tmp_path):
    file = tmp_path / "tiles.yaml"
    write_table(file, [tiles.row("v6e", "splash_transposed", 128, bounded) for bounded in (True, False)])
    old = read_table(file)
    new = old.splash_transposed[1].model_copy(update={"peak_percent": 61.0})
    write_table(file, [new, *tiles.table().splash[:1]])
    found = read_table(file)
    assert found == TileTable(splash_transposed=[old.splash_transposed[0], new], splash=[tiles.table().splash[0]])


def test_rows_of_eight_bits_are_a_list_of_their_own(tmp_path):
    write_table(tmp_path / "new.yaml", [*tiles.table().splash_int8, *tiles.table().splash_transposed])
    found = read_table(tmp_path / "new.yaml")
    assert found.splash_int8 == tiles.table().splash_int8 and found.splash_transposed == tiles.table().splash_transposed
    assert best("v6e", "splash_int8", 128, True).columns == 256


def test_a_file_that_is_no_table_is_not_overwritten(tmp_path):
    file = tmp_path / "notes.yaml"
    file.write_text("a: 1\n")
    assert "Unknown key 'a'" in refusal(lambda: write_table(file, []), ConfigError)
    assert file.read_text() == "a: 1\n"
