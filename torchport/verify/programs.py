"""The programs that a run calls, beside those that a plan has of the same job: they must be the same, word for word.

A program is compared before it is compiled: its modules, its arguments with their dtypes and shardings, its constants,
and the hash of its text.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import torch

from torchport.compile import Compiled
from torchport.plan import aot
from torchport.stages.family import Stage
from torchport.stages.outputs import leaves
from torchport.task import Task

_CONSTANT = re.compile(r"stablehlo\.constant dense.*: tensor<([^>]*)>")
"""A constant in the text of a program; the group is its shape and dtype."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A lowered program, as far as two are compared.

    Attributes:
        arguments: dtype, shape and sharding of each weight and input, by path.
        static: Its static arguments.
        outputs: dtype and shape of its outputs.
        modules: The classes of its modules, by path.
        constants: How many it has of each shape and dtype; scalars are left out.
        text: The program.
    """

    arguments: dict[str, str]
    static: dict[str, str]
    outputs: list[str]
    modules: dict[str, str]
    constants: dict[str, int]
    text: str

    @property
    def digest(self) -> str:
        """The hash of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


def lowered(compiled: Compiled, arrays: Mapping[str, Any], static: Any) -> Program:
    """Returns the program of some inputs, before it is compiled.

    Args:
        compiled: The network on its mesh.
        arrays: The inputs as shapes with shardings.
        static: The static arguments.
    """
    whole = compiled.lowered(arrays, static)
    text = whole.as_text()
    arguments = {**{f"weight {name}": leaf for name, leaf in compiled.weights.items()}, **leaves(arrays)}
    constants = Counter(shape for shape in _CONSTANT.findall(text) if "x" in shape)
    return Program(
        {path: _words(leaf) for path, leaf in arguments.items()},
        {name: repr(value) for name, value in static},
        [f"{leaf.dtype} {list(leaf.shape)}" for leaf in jax.tree.leaves(whole.out_info)],
        _modules(compiled.network.module),
        dict(constants),
        text,
    )


def _modules(module: torch.nn.Module) -> dict[str, str]:
    return {path: f"{type(part).__module__}.{type(part).__qualname__}" for path, part in module.named_modules()}


def _words(leaf: Any) -> str:
    return f"{leaf.dtype} {list(leaf.shape)} {leaf.sharding.spec}"


def of_run(compiled: Compiled) -> list[Program]:
    """Returns the programs that a network was called with."""
    programs = []
    for static, tree, kinds in compiled.programs:
        shapes = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype, sharding in kinds]
        programs.append(lowered(compiled, jax.tree.unflatten(tree, shapes), static))
    return programs


def of_plan(task: Task, stage: Stage, devices: Any) -> list[Program]:
    """Returns the programs that a plan has of a stage.

    Args:
        task: The job.
        stage: The stage, whose inputs' shapes are known beforehand.
        devices: The run's: a plan for the same machine has the same.
    """
    with aot.outlined(task, stage, devices) as outline:
        compiled = outline.program
        return [lowered(compiled, compiled.shapes(called.inputs), called.static) for called in outline.called]


def differences(stage: Stage, run: list[Program], plan: list[Program]) -> list[str]:
    """Returns what differs between the programs of a run and of a plan, a line each; none where all are the same.

    A run that is left after some steps may have called fewer.
    """
    lines = []
    digests = [program.digest for program in plan]
    for program in run:
        if program.digest not in digests:
            nearest = min(plan, key=lambda other: sum(1 for _ in _fields(program, other)), default=None)
            what = "a plan has no program" if nearest is None else next(_fields(program, nearest))
            lines.append(f"{stage.name}: run and plan compile two programs ({program.digest}): {what}")
    return lines


def _fields(run: Program, plan: Program) -> Iterator[str]:
    """Yields what differs between two programs, the cause before what follows from it."""
    for what in ("modules", "static", "arguments", "constants"):
        ours, theirs = getattr(run, what), getattr(plan, what)
        for name in [*ours, *(name for name in theirs if name not in ours)]:
            if ours.get(name) != theirs.get(name):
                kind = {"modules": "module", "static": "argument", "arguments": "", "constants": "constants of"}[what]
                yield f"{kind} '{name}' is {_or(ours.get(name))} in a run and {_or(theirs.get(name))} in a plan".strip()
    if run.outputs != plan.outputs:
        yield f"the output is {', '.join(run.outputs)} in a run and {', '.join(plan.outputs)} in a plan"
    pairs = zip(run.text.splitlines(), plan.text.splitlines(), strict=False)
    other = next(((n, a, b) for n, (a, b) in enumerate(pairs, 1) if a != b), None)
    if other is not None:
        number, ours, theirs = other
        yield f"line {number} of the text is `{ours.strip()[:120]}` in a run and `{theirs.strip()[:120]}` in a plan"
    elif run.text != plan.text:
        yield "the text of one goes on where the other ends"


def _or(value: Any) -> Any:
    return "absent" if value is None else value
