"""How a request is executed: a flag that would have no effect is refused before anything is loaded."""

import dataclasses
import os
import subprocess
import sys

import pytest

from torchport.errors import BadValueError, MachineError, UnknownNameError
from torchport.task import Execution, accept, execution


@pytest.fixture
def refused(request_for):
    """Returns the text of the refusal of a request."""

    def text(kind=BadValueError, changes=None, **flags):
        request = dataclasses.replace(request_for(), execution=Execution(**flags), **(changes or {}))
        with pytest.raises(kind) as caught:
            accept(request)
        return str(caught.value)

    return text


PORT = {"backend": "torchax"}


def test_a_trace_of_what_jax_does_not_run_is_refused(refused):
    text = "--profile steps=1: JAX's profiler does not see --backend original. Leave one of the two out."
    assert refused(profile=1) == text


def test_a_trace_of_a_stage_without_steps_is_refused(refused):
    text = "--profile steps=1: No stage of this run takes denoising steps. Leave it out, or run --stage denoise."
    assert refused(changes={**PORT, "stage": "decode"}, profile=1) == text


def test_a_trace_of_more_steps_than_there_are_is_refused(refused):
    assert refused(changes=PORT, profile=2) == (
        "--profile steps=2: The job has 3 steps, and the first 2 are not traced. Take more: --set steps=4."
    )


@pytest.mark.parametrize(("flag", "execution"), [("--no-jit", {"jit": False}), ("--strict", {"strict": True})])
def test_what_is_asked_of_a_network_is_refused_without_one(refused, flag, execution):
    assert refused(changes={**PORT, "stage": "encode"}, **execution) == (
        f"{flag}: 'encode' has no network that is compiled. Leave it out, or run another stage."
    )


def test_flags_for_a_compiler_that_is_not_called_are_refused(refused):
    assert refused(xla_flags="quick-compile") == (
        "--xla-flags quick-compile: --backend original compiles nothing. Leave one of the two out."
    )
    assert refused(UnknownNameError, PORT, xla_flags="quick").startswith("--xla-flags quick: There is no such set")
    assert refused(changes=PORT, xla_flags="less-memory").startswith("--xla-flags less-memory: Its flags are for a tpu")


def test_what_may_change_bits_is_in_the_manifest(request_for):
    machine = accept(request_for()).machine
    assert Execution(profile=2, memory=True).row(machine) == {"jit": True, "xla_flags": None}
    flags = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
    row = {"jit": False, "xla_flags": {"name": "quick-compile", "flags": flags}}
    assert Execution(jit=False, xla_flags="quick-compile").row(machine) == row


def test_flags_are_refused_once_jax_has_started_without_them(request_for, monkeypatch, mesh8):
    machine = accept(request_for()).machine
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_ftz=true")
    with pytest.raises(MachineError) as caught:
        execution.pass_flags(Execution(xla_flags="quick-compile"), machine)
    assert str(caught.value) == (
        "--xla-flags quick-compile: JAX runs in this process already, and reads its flags when it starts. "
        "Start a new process."
    )
    assert os.environ["XLA_FLAGS"] == "--xla_cpu_ftz=true"
    execution.pass_flags(Execution(), machine)  # without a set nothing is passed


PASSING = """
import jax
from torchport.config.machine import parse_machine
from torchport.task import Execution, execution
execution.pass_flags(Execution(xla_flags="quick-compile"), parse_machine("cpu:1", ""))
jax.config.update("jax_platforms", "cpu")
print(jax.jit(lambda x: x @ x)(jax.numpy.ones((2, 2))).sum())
"""


def test_jax_starts_with_the_flags_of_a_set(root):
    """XLA ends a process whose flags it does not know."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    run = subprocess.run([sys.executable, "-c", PASSING], env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "8.0\n"), run.stderr
