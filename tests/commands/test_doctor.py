"""The doctor: what it finds, what it calls bad, and what it says to do."""

import importlib.metadata
import json
import os
import shutil
import types

import pytest

from torchport.commands import doctor
from torchport.commands.doctor import Diagnosis, advice, bad_combinations, examine
from torchport.config import machine
from torchport.files import cache
from torchport.save import manifest
from torchport.task import devices

FUSION = "--xla_tpu_enable_async_collective_fusion=true"
OVERLAP = "--xla_tpu_overlap_compute_collective_tc=true"


@pytest.fixture
def findings(root, monkeypatch, tmp_path):
    """What the doctor finds, by what was looked at; run where nothing lies."""
    monkeypatch.chdir(tmp_path)

    def look():
        return {finding.what: finding for finding in examine([str(root)])}

    return look


def test_a_sound_machine_has_nothing_bad_and_is_told_the_next_command(findings, root, tiny_folder):
    found = findings()
    assert not [finding for finding in found.values() if finding.state == "bad"]
    assert found["cpu devices"].fact.startswith("8 of kind 'cpu'")
    assert (found["tpu devices"].state, found["tpu devices"].fact) == ("note", "none: configs/demo.yaml runs without")
    assert found["host memory"].fact.endswith("GiB free") and found["python"].state == "ok"
    assert found["tiny checkpoint of hunyuan"].fact == str(tiny_folder)
    assert advice(list(found.values()), [str(root)]) == (
        'Ready: torchport run --model hunyuan --config configs/demo.yaml --prompt "..."'
    )


def test_the_next_command_is_the_first_one_of_the_readme(root):
    told = advice([], [str(root)]).removeprefix("Ready: ").partition(" --prompt")[0]
    first = next(line for line in (root / "README.md").read_text().splitlines() if "torchport run " in line)
    assert told in first


def test_looking_changes_nothing(findings, tmp_path, unchanged, monkeypatch):
    before = unchanged(cache.folder()).keys()
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    environment = dict(os.environ)
    findings()
    assert unchanged(tmp_path) == {} and unchanged(cache.folder()).keys() == before and os.environ == environment


def test_an_issue_asks_for_its_answer_as_json(torchport, capsys, monkeypatch, root):
    monkeypatch.setattr(
        doctor, "examine", lambda paths: [Diagnosis("ok", "jax", "0.10"), Diagnosis("bad", "disk", "full")]
    )
    code, out, _ = torchport("doctor", "--json", capsys=capsys)
    assert code == 1 and json.loads("\n".join(out)) == [
        {"state": "ok", "what": "jax", "fact": "0.10"},
        {"state": "bad", "what": "disk", "fact": "full"},
    ]
    assert "torchport doctor --json" in (root / ".github" / "ISSUE_TEMPLATE" / "fault.yml").read_text()


def requirements(monkeypatch, *lines):
    """Makes torchport an installed package with these requirements."""
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: list(lines))


def test_versions_are_held_against_what_torchport_asks_for(monkeypatch):
    monkeypatch.setattr(manifest, "versions", lambda: {"torch": "2.13.0+cpu", "jax": "0.9.0", "libtpu": "0.0.51"})
    requirements(monkeypatch, "torch<2.14,>=2.12", "jax<0.11,>=0.10", "jax[tpu]<0.11; extra == 'tpu'", "absent>1")
    assert doctor._versions() == [
        Diagnosis("ok", "torch", "2.13.0+cpu"),
        Diagnosis("bad", "jax", "0.9.0, and torchport wants <0.11,>=0.10: pip install 'jax<0.11,>=0.10'"),
        Diagnosis("ok", "libtpu", "0.0.51"),
    ]


def test_another_torchax_than_the_tried_one_is_said_and_not_refused(monkeypatch):
    requirements(monkeypatch, "torchax<0.0.15,>=0.0.13")
    monkeypatch.setattr(manifest, "versions", lambda: {"torchax": "0.0.14.dev20261026"})
    fact = "0.0.14.dev20261026; torchport is tested with 0.0.13, and results may differ"
    assert doctor._versions() == [Diagnosis("note", "torchax", fact)]
    monkeypatch.setattr(manifest, "versions", lambda: {"torchax": "0.0.13"})
    assert doctor._versions() == [Diagnosis("ok", "torchax", "0.0.13")]


def test_the_table_of_operators_says_for_which_versions_it_is(monkeypatch):
    assert doctor._operators() == Diagnosis("ok", "table of operators", doctor._operators().fact)
    here = manifest.versions() | {"torchax": "0.0.14.dev20261026"}
    monkeypatch.setattr(manifest, "versions", lambda: here)
    found = doctor._operators()
    assert found.state == "note" and "; here is torchax 0.0.14.dev20261026, of which it may not be true" in found.fact


def test_a_checkout_that_is_not_installed_is_a_note(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert doctor._versions() == [
        Diagnosis("note", "torchport", "it runs from a checkout that is not installed: pip install -e .")
    ]


def test_a_checkpoint_in_the_cache_is_found_and_an_absent_one_has_a_size(findings, card, tmp_path, monkeypatch):
    absent = findings()["checkpoint of hunyuan"]
    repo = card.checkpoint.partition("@")[0]
    assert absent.state == "note" and absent.fact == f"{repo} is not in the cache; about 37 GB"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "hub" / ("models--" + repo.replace("/", "--")) / "snapshots" / "0123").mkdir(parents=True)
    assert findings()["checkpoint of hunyuan"].fact.startswith("in the cache, ")


@pytest.mark.parametrize(
    ("free", "writable", "state"), [(2**40, True, "ok"), (2**20, True, "bad"), (2**40, False, "bad")]
)
def test_a_full_or_read_only_disk_is_bad(findings, monkeypatch, free, writable, state):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=free))
    monkeypatch.setattr(os, "access", lambda folder, mode: writable)
    found = findings()["output folder"]
    assert found.state == state and ("not writable: choose another" in found.fact) is not writable


@pytest.mark.parametrize("variable", ["LIBTPU_INIT_ARGS", "XLA_FLAGS"])
def test_the_flags_that_make_nan_on_v6e_are_bad_there_and_a_note_elsewhere(variable):
    environment = {variable: f"{FUSION} --other=1 {OVERLAP}"}
    (bad,) = bad_combinations(environment, ["TPU v6 lite"])
    assert bad.state == "bad" and "jax issue 38741" in bad.fact and bad.fact.endswith("drop one of the two")
    assert "--xla_tpu_enable_async_collective_fusion together with" in bad.fact
    assert [finding.state for finding in bad_combinations(environment, [])] == ["note"]


@pytest.mark.parametrize("flags", ["", FUSION, OVERLAP, f"{FUSION.replace('true', 'false')} {OVERLAP}"])
def test_one_of_the_flags_alone_is_fine(flags):
    assert bad_combinations({"LIBTPU_INIT_ARGS": flags}, ["TPU v6 lite"]) == [
        Diagnosis("ok", "known-bad combinations", "none found")
    ]


def test_flags_spread_over_two_variables_are_one_set():
    assert bad_combinations({"LIBTPU_INIT_ARGS": FUSION, "XLA_FLAGS": OVERLAP}, ["TPU v6 lite"])[0].state == "bad"


def test_a_backslash_in_the_flags_is_bad():
    (bad,) = bad_combinations({"LIBTPU_INIT_ARGS": "--a=1 \\\n --b=2"}, [])
    assert bad.state == "bad" and "libtpu stops reading at a backslash" in bad.fact


@pytest.mark.parametrize(("value", "noted"), [("1", True), ("True", True), ("0", False), ("", False)])
def test_64_bit_numbers_are_a_note(value, noted):
    assert ("JAX_ENABLE_X64" in bad_combinations({"JAX_ENABLE_X64": value}, [])[0].what) is noted


def test_a_tpu_is_shown_with_its_memory(findings, monkeypatch):
    monkeypatch.setattr(devices, "visible_devices", lambda name: (8, "TPU v6 lite", 32 * machine.GIB))
    assert findings()["tpu devices"].fact == "8 of kind 'TPU v6 lite', 32.0 GiB each"


def test_things_to_mend_are_counted(root):
    bad = Diagnosis("bad", "a", "b")
    assert advice([bad, Diagnosis("note", "a", "b"), bad], [str(root)]) == "2 thing(s) to mend."


def test_it_tells_whether_compiled_programs_may_be_loaded(monkeypatch, tmp_path):
    def told():
        (finding,) = doctor._jax_cache()
        return finding.state, finding.fact

    assert told() == ("note", "not kept: TORCHPORT_CACHE is off")
    monkeypatch.setenv("TORCHPORT_CACHE", str(tmp_path))
    assert told() == ("ok", f"{cache.jax_folder()}: none yet")
    folder = cache.make(cache.jax_folder())
    (folder / "program").write_bytes(bytes(2048))
    assert told() == ("ok", f"{folder}: 2.0 KiB")
    folder.chmod(0o777)
    state, fact = told()
    assert state == "bad" and fact.startswith(f"{folder}: Others can write to it (mode 0777)")
