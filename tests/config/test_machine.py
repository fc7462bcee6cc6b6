"""Machines: their names, what they have, and jobs that they cannot carry."""

import dataclasses
import types

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchport.config import machine
from torchport.config.machine import GIB, HOST, TPU_CHIPS, Machine, Need, parse_machine, prepare, require
from torchport.errors import BadValueError, MachineError

V6E = parse_machine("v6e:2x4", "a.yaml:1")
NEED = Need(devices=8, device_bytes={"transformer": 5 * GIB, "vae": 3 * GIB}, host_bytes=14 * GIB, checkpoint="a/b@c")


@pytest.mark.parametrize(
    ("name", "platform", "devices", "memory"),
    [
        ("cpu:1", "cpu", 1, None),
        ("cpu:8", "cpu", 8, None),
        ("cuda:4", "cuda", 4, None),
        ("v6e:1x1", "tpu", 1, 32 * GIB),
        ("v6e:2x4", "tpu", 8, 32 * GIB),
        ("v5e:2x4", "tpu", 8, 16 * GIB),
        ("v5p:2x2x1", "tpu", 4, 95 * GIB),
        ("tpu7x:2x2x1", "tpu", 8, 96 * GIB),
    ],
)
def test_a_machine_is_named_as_jax_names_it(name, platform, devices, memory):
    found = parse_machine(name, "a.yaml:1")
    assert (found.name, found.platform, found.devices, found.memory) == (name, platform, devices, memory)
    assert bool(found.kinds) == (platform == "tpu")


def test_a_slice_has_a_chip_and_any_other_machine_is_refused_where_one_is_needed():
    assert V6E.require_tpu() is V6E.chip is TPU_CHIPS["v6e"]
    assert all(chip.name == name for name, chip in TPU_CHIPS.items())
    with pytest.raises(BadValueError) as caught:
        parse_machine("cpu:8", "").require_tpu()
    assert str(caught.value) == "machine cpu:8: It is no TPU. Name a slice such as v6e:2x4."
    with pytest.raises(BadValueError) as caught:
        HOST.require_tpu("a.yaml:3", "Name another", "It has no chip")
    assert str(caught.value) == "a.yaml:3: It has no chip. Name another."


BAD = [
    "",
    "cpu",
    "cpu:",
    "cpu:0",
    "cpu:08",
    "cpu:10000",
    "cuda:2x2",
    "v6e",
    "v6e:8",
    "v6e:2x",
    "v6e:0x4",
    "v6e:2x4x1x1",
]


@pytest.mark.parametrize(
    "name", [*BAD, "v7:2x4", "V6E:2x4", " cpu:8", "cpu:8 ", "cpu:8\n", "v6e:2\u00d74", "cpu:\u0661"]
)
def test_any_other_name_is_refused(name):
    with pytest.raises(BadValueError) as caught:
        parse_machine(name, "a.yaml:7")
    assert str(caught.value).startswith("a.yaml:7: 'machine' is '") and str(caught.value).endswith(
        "It must be a TPU slice (v5e, v5p, v6e, tpu7x, such as v6e:2x4), cuda:<devices> or cpu:<devices>."
    )


@given(st.from_regex(r"(cpu|cuda|v5e|v6e|tpu7x)?:?[0-9x]{0,6}", fullmatch=True) | st.text())
def test_every_name_parses_to_devices_or_is_refused(name):
    try:
        found = parse_machine(name, "a.yaml:1")
    except BadValueError:
        return
    assert found.devices >= 1 and found.name == name


@pytest.fixture
def here(monkeypatch):
    """Sets what this machine has: devices of a kind, memory on each, memory of the host."""

    def have(found, kind="TPU v6 lite", memory=None, host=1000 * GIB):
        monkeypatch.setattr(machine, "found_devices", lambda platform: (found, kind if found else "none", memory))
        monkeypatch.setattr(machine, "host_memory", lambda: host)

    return have


def refusal(need=NEED, of=V6E):
    """Returns the text of the refusal."""
    with pytest.raises(MachineError) as caught:
        require(of, need, "torchport run --model m --config configs/demo.yaml")
    return str(caught.value)


def test_a_machine_with_enough_of_everything_is_accepted(here):
    here(8)
    require(V6E, NEED, "")
    here(256, memory=8 * GIB, host=14 * GIB)
    require(V6E, NEED, "")


def test_a_machine_without_devices_is_told_what_the_job_needs_and_what_to_run_instead(here):
    here(0)
    assert refusal() == (
        "machine v6e:2x4: The job needs 8 device(s) of v6e:2x4 with transformer 5.0 GiB + vae 3.0 GiB of weights on "
        "each, 14.0 GiB of host memory for weights, the checkpoint a/b@c, and activations beside them; this machine "
        "has no tpu device. Run it on a v6e:2x4, or run here: torchport run --model m --config configs/demo.yaml."
    )


@pytest.mark.parametrize(
    ("has", "lack"),
    [
        ({"found": 4}, "this machine has 4 device(s) of kind 'TPU v6 lite'. "),
        ({"found": 8, "kind": "TPU v5 lite"}, "this machine has 8 devices of kind 'TPU v5 lite'. "),
        ({"found": 8, "memory": 8 * GIB - 1}, "this machine has 8.0 GiB on each device. "),
        ({"found": 8, "memory": 2**20}, "this machine has 1 MiB on each device. "),
        ({"found": 8, "host": 13 * GIB}, "this machine has 13.0 GiB of free host memory. "),
        ({"found": 1, "host": 0}, "has 1 device(s) of kind 'TPU v6 lite' and 0 MiB of free host memory. "),
    ],
)
def test_what_is_lacking_is_named(here, has, lack):
    here(**has)
    assert lack in refusal()


def test_what_is_held_beside_weights_counts_and_is_named(here):
    here(8, memory=10 * GIB, host=15 * GIB)
    beside = dataclasses.replace(NEED, activations={"transformer": 3 * GIB, "vae": GIB}, host_tensors=2 * GIB)
    assert refusal(beside) == (
        "machine v6e:2x4: The job needs 8 device(s) of v6e:2x4 with transformer 5.0 GiB + vae 3.0 GiB of weights and "
        "at least 3.0 GiB of activations on each, 14.0 GiB of host memory for weights and at least 2.0 GiB for latents "
        "and frames, the checkpoint a/b@c, and more beside them; this machine has 10.0 GiB on each device and 15.0 GiB "
        "of free host memory. Make the video smaller with --set height=, width= or frames=; or run it on a larger "
        "machine, or run here: torchport run --model m --config configs/demo.yaml."
    )
    here(8, memory=11 * GIB, host=16 * GIB)
    require(V6E, beside, "")


def test_the_chips_published_memory_counts_where_the_device_does_not_say(here):
    here(8, memory=None)
    assert "32.0 GiB on each device" in refusal(Need(8, {"transformer": 33 * GIB}, 0, "c"))
    require(V6E, Need(8, {"transformer": 32 * GIB}, 0, "c"), "")


def test_what_runs_in_pytorch_needs_host_memory_alone(here, monkeypatch):
    here(0, host=3 * GIB)
    monkeypatch.setattr(machine, "found_devices", None)  # JAX is not even asked
    require(HOST, Need(0, {}, 3 * GIB, "c"), "")
    text = refusal(Need(0, {}, 4 * GIB, "a/b@c"), HOST)
    assert text == (
        "machine the host: The job needs 4.0 GiB of host memory for weights, the checkpoint a/b@c, and activations "
        "beside them; this machine has 3.0 GiB of free host memory. Run it on a larger machine, or run here: "
        "torchport run --model m --config configs/demo.yaml."
    )


def test_preparing_a_cpu_machine_makes_its_virtual_devices():
    prepare(Machine("cpu:8", "cpu", 8))
    assert machine.found_devices("cpu")[:2] == (8, "cpu") and machine.found_devices("tpu") == (0, "none", None)


def test_a_process_whose_devices_are_fewer_is_refused_and_more_are_cut():
    assert len(jax.devices("cpu")) == 8
    with pytest.raises(MachineError) as caught:
        prepare(Machine("cpu:16", "cpu", 16))
    assert str(caught.value) == (
        "machine cpu:16: JAX runs in this process with 8 CPU device(s). "
        "Start a new process, or call jax.config.update('jax_num_cpu_devices', 16) first."
    )
    prepare(Machine("cpu:2", "cpu", 2))
    assert machine.devices(Machine("cpu:2", "cpu", 2)) == jax.devices("cpu")[:2]


def test_preparing_another_machine_leaves_jax_alone(monkeypatch):
    monkeypatch.setattr(jax.config, "update", None)
    prepare(V6E)


def test_host_memory_is_what_can_be_taken_without_swapping(monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: types.SimpleNamespace(available=12345, total=99999))
    assert machine.host_memory() == 12345
