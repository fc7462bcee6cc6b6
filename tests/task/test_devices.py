"""The devices that this process has, and jobs that they cannot carry."""

import dataclasses
import os
import types

import jax
import pytest

from torchport.config.machine import GIB, HOST, Machine, parse_machine
from torchport.errors import MachineError
from torchport.task import devices
from torchport.task.devices import Need, prepare, require

V6E = parse_machine("v6e:2x4", "a.yaml:1")
NEED = Need(devices=8, device_bytes={"transformer": 5 * GIB, "vae": 3 * GIB}, host_bytes=14 * GIB, checkpoint="a/b@c")


@pytest.fixture
def here(monkeypatch):
    """Sets what this machine has: devices of a kind, memory on each, memory of the host."""

    def have(found, kind="TPU v6 lite", memory=None, host=1000 * GIB):
        monkeypatch.setattr(devices, "visible_devices", lambda platform: (found, kind if found else "none", memory))
        monkeypatch.setattr(devices, "host_memory", lambda: host)

    return have


def refusal(need=NEED, of=V6E):
    """Returns the text of the refusal."""
    with pytest.raises(MachineError) as caught:
        require(of, need, "torchport run --model m --config configs/demo.yaml")
    return str(caught.value)


def test_a_machine_with_enough_of_everything_is_accepted(here):
    here(8)
    require(V6E, NEED, "")
    here(256, memory=5 * GIB, host=14 * GIB)
    require(V6E, NEED, "")


def test_a_machine_without_devices_is_told_what_the_job_needs_and_what_to_run_instead(here):
    here(0)
    assert refusal() == (
        "machine v6e:2x4: The job needs 8 device(s) of v6e:2x4 with 5.0 GiB of weights (transformer) on "
        "each, 14.0 GiB of host memory for weights, the checkpoint a/b@c, and activations beside them; this machine "
        "has no tpu device. Run it on a v6e:2x4, or run here: torchport run --model m --config configs/demo.yaml."
    )


@pytest.mark.parametrize(
    ("has", "lack"),
    [
        ({"found": 4}, "this machine has 4 device(s) of kind 'TPU v6 lite'. "),
        ({"found": 8, "kind": "TPU v5 lite"}, "this machine has 8 devices of kind 'TPU v5 lite'. "),
        ({"found": 8, "memory": 5 * GIB - 1}, "this machine has 5.0 GiB on each device. "),
        ({"found": 8, "memory": 2**20}, "this machine has 1.0 MiB on each device. "),
        ({"found": 8, "host": 13 * GIB}, "this machine has 13.0 GiB of free host memory. "),
        ({"found": 1, "host": 0}, "has 1 device(s) of kind 'TPU v6 lite' and 0 B of free host memory. "),
    ],
)
def test_what_is_lacking_is_named(here, has, lack):
    here(**has)
    assert lack in refusal()


def test_what_is_held_beside_weights_counts_and_is_named(here):
    here(8, memory=7 * GIB, host=15 * GIB)
    beside = dataclasses.replace(NEED, activations={"transformer": 3 * GIB, "vae": GIB}, host_tensors=2 * GIB)
    assert refusal(beside) == (
        "machine v6e:2x4: The job needs 8 device(s) of v6e:2x4 with 5.0 GiB of weights (transformer) and "
        "at least 3.0 GiB of activations on each, 14.0 GiB of host memory for weights and at least 2.0 GiB for latents "
        "and frames, the checkpoint a/b@c, and more beside them; this machine has 7.0 GiB on each device and 15.0 GiB "
        "of free host memory. Make the video smaller with --set height=, width= or frames=; or run it on a larger "
        "machine, or run here: torchport run --model m --config configs/demo.yaml."
    )
    here(8, memory=8 * GIB, host=16 * GIB)
    require(V6E, beside, "")


def test_the_chips_published_memory_counts_where_the_device_does_not_say(here):
    here(8, memory=None)
    assert "32.0 GiB on each device" in refusal(Need(8, {"transformer": 33 * GIB}, 0, "c"))
    require(V6E, Need(8, {"transformer": 32 * GIB}, 0, "c"), "")


def test_what_runs_in_pytorch_needs_host_memory_alone(here, monkeypatch):
    here(0, host=3 * GIB)
    monkeypatch.setattr(devices, "visible_devices", None)  # JAX is not even asked
    require(HOST, Need(0, {}, 3 * GIB, "c"), "")
    text = refusal(Need(0, {}, 4 * GIB, "a/b@c"), HOST)
    assert text == (
        "machine the host: The job needs 4.0 GiB of host memory for weights, the checkpoint a/b@c, and activations "
        "beside them; this machine has 3.0 GiB of free host memory. Run it on a larger machine, or run here: "
        "torchport run --model m --config configs/demo.yaml."
    )


def test_preparing_a_cpu_machine_makes_its_virtual_devices():
    prepare(Machine("cpu:8", "cpu", 8))
    assert devices.visible_devices("cpu")[:2] == (8, "cpu") and devices.visible_devices("tpu") == (0, "none", None)


def test_a_process_whose_devices_are_fewer_is_refused_and_more_are_cut():
    assert len(jax.devices("cpu")) == 8
    with pytest.raises(MachineError) as caught:
        prepare(Machine("cpu:16", "cpu", 16))
    assert str(caught.value) == (
        "machine cpu:16: JAX runs in this process with 8 CPU device(s). "
        "Start a new process, or call jax.config.update('jax_num_cpu_devices', 16) first."
    )
    prepare(Machine("cpu:2", "cpu", 2))
    assert devices.devices(Machine("cpu:2", "cpu", 2)) == jax.devices("cpu")[:2]


def test_preparing_another_machine_leaves_jax_alone(monkeypatch):
    monkeypatch.setattr(jax.config, "update", None)
    prepare(V6E)


def test_host_memory_is_what_can_be_taken_without_swapping(monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: types.SimpleNamespace(available=12345, total=99999))
    assert devices.host_memory() == 12345


def hushed(monkeypatch, folder):
    """The variables that are set where a machine's devices are files of a folder."""
    monkeypatch.setattr(devices, "DEVICES", folder)
    monkeypatch.setattr(os, "environ", {"TPU_WORKER_HOSTNAMES": "mine"})
    devices.hush_libtpu()
    return os.environ


def test_libtpu_is_told_what_it_cannot_find_out_only_where_there_is_no_chip(monkeypatch, tmp_path):
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio" / "vfio").touch()  # the driver itself
    assert hushed(monkeypatch, tmp_path) == {"TPU_WORKER_HOSTNAMES": "mine", "TPU_ACCELERATOR_TYPE": "v6e-8"}
    for name in ("vfio/0", "accel0"):
        (tmp_path / name).touch()
        assert hushed(monkeypatch, tmp_path) == {"TPU_WORKER_HOSTNAMES": "mine"}
        (tmp_path / name).unlink()
