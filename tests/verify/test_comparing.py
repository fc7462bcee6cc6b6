"""What a run compiles is what a plan compiled, and a mismatch is named."""

import dataclasses
import functools

import jax
import pytest
import torch

from torchport import engine, patch, shard
from torchport.compile import network
from torchport.compile.in_force import in_force
from torchport.stages.family import Steps
from torchport.task import Request, accept
from torchport.task.devices import devices
from torchport.verify import comparing

SIZES = ("height=64", "width=96", "frames=9", "steps=2")


@pytest.fixture(scope="module")
def compared(root):
    """The programs of a run's first step and of a plan, for changes of either job."""
    request = Request("ltx", "configs/ltx_demo.yaml", prompt="A cat", overrides=SIZES, paths=(str(root),))

    def made(of_plan=(), of_run=()):
        run, plan = (accept(dataclasses.replace(request, overrides=(*SIZES, *sets))) for sets in (of_run, of_plan))
        with in_force(run, run.stages):
            folder, stage = network.write_tiny(run), run.denoising[0]
            return stage, of_a_run(run, stage, folder), comparing.plan_programs(plan, stage, devices(plan.machine))

    return functools.cache(made)


class EnoughError(Exception):
    """Leaves a loop at its first call."""


def of_a_run(task, stage, folder, without_operators=False):
    """Returns the program of the first call, which is lowered and not run."""
    with patch.applied(task.patches([stage]), stage=stage.name) as ledger:
        operators = {} if without_operators else {op.target: op.function for op in ledger.ops()}
        with engine.operators(operators):
            parts = network.loaded(task, stage, folder)
            mesh = shard.make_mesh(task.job.mesh, devices(task.machine))
            weights = network.placed(task, stage, parts, mesh, folder)
            compiled = network.compiled(task, stage, network.module_of(stage, parts), weights, mesh)
            with pytest.raises(EnoughError):
                stage.run(parts, Noting(compiled), task.settings, Steps(), **stage.like(parts, task.settings))
            return comparing.run_programs(compiled)


class Noting:
    """A compiled network that notes what it is called with, as a program's key."""

    batches = drops = True

    def __init__(self, compiled):
        self.compiled, self.place = compiled, compiled.place

    def __call__(self, **inputs):
        arrays, static = self.compiled._arrays_and_static(inputs)
        flat, tree = jax.tree_util.tree_flatten(arrays)
        self.compiled.programs[static, repr(static), tree, tuple((x.shape, x.dtype, x.sharding) for x in flat)] = None
        raise EnoughError


def test_a_run_and_a_plan_have_the_same_programs(compared):
    stage, run, plan = compared()
    assert comparing.program_differences(stage, run, plan) == []
    assert [program.digest for program in run] == [program.digest for program in plan]


def test_another_dtype_is_named(compared):
    stage, run, plan = compared(of_plan=("dtypes.transformer=bfloat16",))
    [line] = comparing.program_differences(stage, run, plan)
    assert line.startswith("denoise: run and plan compile two programs (")
    assert "is float32 [" in line
    assert "in a run and bfloat16 [" in line


def test_another_strategy_is_named(compared):
    stage, run, plan = compared(of_plan=("strategy=tp",))
    [line] = comparing.program_differences(stage, run, plan)
    assert "is float32 [64, 64] P(('dp', 'sp'),) in a run and float32 [64, 64] P() in a plan" in line


def program(text="a\nb", **fields):
    known = {"arguments": {"x": "float32 [2] P()"}, "static": {}, "outputs": ["float32 [2]"], "modules": {"": "Net"}}
    return comparing.LoweredProgram(**known | {"constants": {}, "text": text} | fields)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"text": "a\nc"}, "line 2 of the text is `b` in a run and `c` in a plan"),
        ({"text": "a\nb\nc"}, "the text of one goes on where the other ends"),
        ({"text": "", "modules": {"": "Other"}}, "module '' is Net in a run and Other in a plan"),
        ({"text": "", "static": {"mode": "1"}}, "argument 'mode' is absent in a run and 1 in a plan"),
        ({"text": "", "constants": {"4xf32": 1}}, "constants of '4xf32' is absent in a run and 1 in a plan"),
        ({"text": "", "outputs": ["bfloat16 [2]"]}, "the output is float32 [2] in a run and bfloat16 [2] in a plan"),
    ],
)
def test_the_first_cause_is_named(compared, other, what):
    ours, theirs = program(), program(**other)
    stage = compared()[0]
    [line] = comparing.program_differences(stage, [ours], [theirs])
    assert line == f"denoise: run and plan compile two programs ({ours.digest}): {what}"


def test_no_program_of_a_plan_is_named(compared):
    stage = compared()[0]
    assert comparing.program_differences(stage, [program()], [])[0].endswith("a plan has no program")


class Placing:
    """A compiled network that places its inputs, and returns them."""

    batches = drops = True

    def place(self, **inputs):
        return {name: jax.numpy.asarray(value.numpy()) for name, value in inputs.items()}

    def __call__(self, **inputs):
        return torch.ones(2)


def test_what_a_program_got_is_kept_in_host_memory():
    program = comparing._WatchedProgram(Placing(), 0, 1)
    placed, values = program.place(text=torch.arange(3.0)), torch.arange(2)
    program(**placed, each=[values], guidance=None)
    [kept] = program.inputs
    assert type(kept["text"]) is torch.Tensor and torch.equal(kept["text"], torch.arange(3.0))
    assert type(kept["each"][0]) is torch.Tensor and kept["each"][0] is not values and kept["guidance"] is None
