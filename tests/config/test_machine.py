"""Machines: their names, and what they have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchport.config.machine import GIB, HOST, TPU_CHIPS, parse_machine
from torchport.errors import BadValueError

V6E = parse_machine("v6e:2x4", "a.yaml:1")


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
    "v6e:2x" + 5000 * "1",
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
