"""A TPU that is not there: its description, and the environment of the process that asks for it."""

import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from jax._src.pallas.mosaic import tpu_info

from torchport.config.machine import HOST, TPU_CHIPS, parse_machine
from torchport.errors import TopologyError
from torchport.plan.tpu import absent
from torchport.plan.tpu.absent import describe, environment
from torchport.task.devices import CHIPS, DEVICES

V6E = parse_machine("v6e:2x4", "a.yaml:1")
REAL = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed; pip install 'torchport[plan]' and run `pytest tests/plan/tpu/test_absent.py`",
)


def refusal(machine):
    with pytest.raises(TopologyError) as caught:
        describe(machine)
    return str(caught.value)


CHIPS_OF_A_HOST = ("v6e:2x4", "v5e:2x4", "v5p:2x2x1", "tpu7x:2x2x1")


@pytest.fixture(scope="module")
def described(root):
    """What a process with the environment says of each machine: devices, kind and cores, or the refusal."""
    code = """if True:
        import json, sys
        from torchport.errors import TopologyError
        from torchport.config.machine import parse_machine
        from torchport.plan.tpu.absent import describe
        said = {}
        for name in sys.argv[1:]:
            try:
                devices = describe(parse_machine(name, "a.yaml:1")).devices
                said[name] = [len(devices), devices[0].device_kind, devices[0].num_cores]
            except TopologyError as error:
                said[name] = str(error)
        print(json.dumps(said))
    """
    child = subprocess.run(
        [sys.executable, "-c", code, *CHIPS_OF_A_HOST, "v6e:3x5"],
        env=os.environ | environment() | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert child.stderr == "", "libtpu writes no errors about what the environment says"
    return json.loads(child.stdout)


@REAL
def test_every_chip_is_described_as_the_machine_says(described):
    for name in CHIPS_OF_A_HOST:
        machine, (devices, kind, cores) = parse_machine(name, "a.yaml:1"), described[name]
        assert devices == machine.devices and kind in machine.kinds and cores == machine.chip.cores


@REAL
def test_a_slice_that_does_not_exist_is_refused(described):
    assert described["v6e:3x5"] == (
        'machine v6e:3x5: libtpu does not know this slice (INVALID_ARGUMENT: Topology layout "v6e:3x5" is not '
        'divisible by the given (or default) chips_per_host_bounds "2x2x1"). '
        "It must be one that exists, such as v6e:2x4, v5e:2x4, v5p:2x2x1 or tpu7x:2x2x1."
    )


def test_a_machine_that_is_no_tpu_is_refused():
    text = refusal(parse_machine("cpu:8", "a.yaml:1"))
    assert text == "machine cpu:8: It is of kind 'cpu'. It must be a TPU: v5e, v5p, v6e, tpu7x."


def test_without_libtpu_the_reader_is_told_where_it_is(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert refusal(V6E) == (
        "machine v6e:2x4: libtpu, the TPU's compiler, is not installed (this is Darwin arm64). "
        "pip install 'torchport[plan]' on Linux x86-64, which is where libtpu is."
    )


def test_a_process_that_was_started_without_the_environment_is_refused(monkeypatch):
    monkeypatch.setattr(absent, "installed", lambda: True)
    for name in environment():
        monkeypatch.setenv(name, "set")
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY")
    assert refusal(V6E) == (
        "machine v6e:2x4: This process was started without TPU_SKIP_MDS_QUERY. "
        "Describe a TPU in a child process that is started with torchport.plan.tpu.absent.environment()."
    )


def test_the_environment_is_returned_and_never_written():
    before = dict(os.environ)
    assert environment() == {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v6e-8",
    }
    assert dict(os.environ) == before


@REAL
@pytest.mark.skipif(any(any(DEVICES.glob(name)) for name in CHIPS), reason="There is a TPU here.")
def test_a_machine_without_a_tpu_is_examined_without_a_word_of_libtpu(root):
    code = "from torchport.task import devices; print(devices.visible_devices('tpu'), devices.visible_devices('cuda'))"
    unset = {name: value for name, value in os.environ.items() if name not in environment()}
    child = subprocess.run(
        [sys.executable, "-c", code], env=unset | {"PYTHONPATH": str(root)}, capture_output=True, text=True, check=True
    )
    assert (child.stdout, child.stderr) == ("(0, 'none', None) (0, 'none', None)\n", "")


def test_a_dump_is_asked_for_behind_the_callers_own_flags_and_never_comes_from_a_cache(monkeypatch):
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    asked = environment(Path("/a/b"))
    assert asked["LIBTPU_INIT_ARGS"] == "--xla_jf_dump_to=/a/b --xla_jf_dump_llo_text=true"
    assert asked["JAX_ENABLE_COMPILATION_CACHE"] == "false"
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--mine=1")
    assert environment(Path("/a"))["LIBTPU_INIT_ARGS"].startswith("--mine=1 --xla_jf_dump_to=/a ")


def test_a_folder_that_libtpu_would_cut_in_two_is_refused():
    with pytest.raises(TopologyError) as caught:
        environment(Path("/my dumps"))
    assert str(caught.value) == ("/my dumps: The folder for the dump has white space in its name. Name one without.")


@pytest.mark.parametrize("name", TPU_CHIPS)
def test_a_chips_peak_is_what_its_cores_do_in_a_bundle(name):
    found = TPU_CHIPS[name]
    assert abs(found.cores * found.bundle_flops * found.clock / found.flops - 1) < 0.003


@pytest.mark.parametrize("name", TPU_CHIPS)
def test_a_chips_limits_are_those_that_jax_knows(name):
    found = TPU_CHIPS[name]
    known = tpu_info._get_tpu_info_impl(tpu_info.chip_version_from_device_kind(found.kinds[0]), found.cores)
    # Its numbers are a core's, and rounded.
    assert found.vmem == known.vmem_capacity_bytes
    assert abs(found.flops / (known.bf16_ops_per_second * found.cores) - 1) < 0.01
    assert abs(found.memory / (known.hbm_capacity_bytes * found.cores) - 1) < 0.01
    within = 0.13 if name == "v5p" else 0.01  # 2460 GB/s there, 2765 GB/s in Google's documentation
    assert abs(found.bandwidth / (known.mem_bw_bytes_per_second * found.cores) - 1) < within


def test_a_machine_without_tpus_has_no_chip():
    assert V6E.chip is TPU_CHIPS["v6e"] and HOST.chip is None
