"""Named sets of compiler flags: each with its reason and source, for one kind of machine, and never what makes NaN."""

import pytest

from torchport.config import xla_flags
from torchport.config.machine import parse_machine
from torchport.errors import BadValueError, UnknownNameError

TPU, CPU, GPU = (parse_machine(name, "job.yaml:1") for name in ("v6e:2x4", "cpu:8", "cuda:8"))
FUSION = "--xla_tpu_enable_async_collective_fusion=true"


def test_every_flag_says_why_and_where_that_is_written(root):
    page = (root / "docs/profiling.md").read_text()
    for name, entry in xla_flags.SETS.items():
        assert entry.why.endswith(".") and f"`{name}`" in page
        for flag in entry.flags:
            assert flag.why.endswith(".") and flag.source.startswith("https://") and flag.flag in page


def test_no_set_has_the_flag_that_makes_nan_beside_one_that_is_on_by_default():
    assert not [name for name, entry in xla_flags.SETS.items() if xla_flags.OVERLAP in " ".join(entry.texts)]


def test_a_large_program_for_a_tpu_has_vmem_for_its_fusions_unless_the_user_says_how_much(monkeypatch):
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    assert xla_flags.compiler_options("v6e", 43 * 2**20) == {xla_flags.FUSION_VMEM: "98304"}
    assert xla_flags.compiler_options("tpu7x", 22 * 2**20) == {xla_flags.FUSION_VMEM: "49152"}
    assert xla_flags.compiler_options("v6e", 42 * 2**20) == xla_flags.compiler_options(None, 2**40) == {}
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_foo=true --xla_tpu_scoped_vmem_limit_kib=32768")
    assert xla_flags.compiler_options("v6e", 2**40) == {}


def test_an_unknown_name_lists_the_nearest():
    with pytest.raises(UnknownNameError) as caught:
        xla_flags.flag_set("async-all-reduction", TPU)
    assert str(caught.value) == (
        "--xla-flags async-all-reduction: There is no such set of flags. Did you mean 'async-all-reduce'? "
        "Known: async-all-reduce, async-all-to-all, less-memory, pipelined-gather, quick-compile."
    )


@pytest.mark.parametrize(
    ("name", "machine", "text"),
    [
        (
            "less-memory",
            CPU,
            "--xla-flags less-memory: Its flags are for a tpu, and the machine is cpu:8. "
            "Leave it out, or name one for a cpu: quick-compile.",
        ),
        (
            "quick-compile",
            GPU,
            "--xla-flags quick-compile: Its flags are for a cpu, and the machine is cuda:8. Leave it out.",
        ),
    ],
)
def test_a_set_for_machines_of_another_kind_is_refused(name, machine, text):
    with pytest.raises(BadValueError) as caught:
        xla_flags.flag_set(name, machine)
    assert str(caught.value) == text


def added(name, environment):
    return xla_flags.SETS[name].value(environment)


def test_flags_come_after_those_of_the_environment_each_once():
    both = "--xla_latency_hiding_scheduler_rerun=5 --xla_tpu_rwb_fusion=false"
    assert added("less-memory", {}) == both
    assert added("less-memory", {"LIBTPU_INIT_ARGS": "--a=1"}) == f"--a=1 {both}"
    assert added("less-memory", {"LIBTPU_INIT_ARGS": both}) == both


def test_a_flag_that_the_environment_sets_to_another_value_is_refused():
    with pytest.raises(BadValueError) as caught:
        added("less-memory", {"LIBTPU_INIT_ARGS": "--xla_tpu_rwb_fusion=true"})
    assert str(caught.value) == (
        "--xla-flags less-memory: It has --xla_tpu_rwb_fusion=false, and LIBTPU_INIT_ARGS has "
        "--xla_tpu_rwb_fusion=true. Take --xla_tpu_rwb_fusion out of LIBTPU_INIT_ARGS, or leave the set out."
    )


@pytest.mark.parametrize("variable", ["LIBTPU_INIT_ARGS", "XLA_FLAGS"])
def test_a_set_that_would_complete_the_pair_is_refused(variable):
    with pytest.raises(BadValueError) as caught:
        added("async-all-reduce", {variable: f"{xla_flags.OVERLAP}=true"})
    assert str(caught.value) == (
        "--xla-flags async-all-reduce: --xla_tpu_overlap_compute_collective_tc is in the environment, and "
        "--xla_tpu_enable_async_collective_fusion beside it makes NaN on v6e (jax issue 38741). Drop one of the two."
    )


@pytest.mark.parametrize(
    ("own", "fusion"),
    [
        ({}, None),
        ({"XLA_FLAGS": FUSION}, None),
        ({"XLA_FLAGS": f"{xla_flags.OVERLAP}=true"}, None),
        ({"XLA_FLAGS": FUSION, "LIBTPU_INIT_ARGS": f"{xla_flags.OVERLAP}=true"}, FUSION.removesuffix("=true")),
        ({"XLA_FLAGS": FUSION, "LIBTPU_INIT_ARGS": f"{xla_flags.OVERLAP}=false"}, None),
    ],
)
def test_the_pair_is_found_over_both_variables(own, fusion):
    assert xla_flags.nan_pair(own) == fusion
