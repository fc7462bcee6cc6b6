"""How many times a loop of a scheduled program runs."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from torchport.errors import TopologyError
from torchport.plan.tpu.hlo.instruction import Computation, Instruction

_LONGEST = 100_000
"""A loop that runs more often than this is not counted: none of a model's does."""
_COMPUTED: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape"), int),
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "minimum": min,
    "maximum": max,
    "and": operator.and_,
    "or": operator.or_,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}


class LoopTrips(dict[str, int]):
    """How many times each loop's body runs in one execution of the loop, by the body's name; counted when asked for.

    Where the compiler did not write the number, the loop is run: its condition and its state are computed from the
    program's integers, as far as these depend on constants alone.

    Args:
        file: Where the program was read, for the error.
        computations: The program's, by name.
    """

    def __init__(self, file: Path, computations: Mapping[str, Computation]) -> None:
        super().__init__()
        self._file = file
        self._computations = computations
        self._loops = {
            loop.calls[1]: (part, loop)
            for part in computations.values()
            for loop in part.instructions.values()
            if loop.opcode == "while"
        }

    def __missing__(self, body: str) -> int:
        part, loop = self._loops[body]
        trips = loop.trips if loop.trips is not None else self._count(part, loop)
        if trips is None:
            fact = f"The program does not say how many times the loop %{loop.name} runs"
            must = "It must count from one constant to another, as jax.lax.scan does"
            raise TopologyError(str(self._file), fact, must)
        self[body] = trips
        return trips

    def _count(self, part: Computation, loop: Instruction) -> int | None:
        condition, body = (self._computations[called] for called in loop.calls)
        known: dict[tuple[int, int], int | None] = {}

        def state(index: int, trip: int) -> int | None:
            if (index, trip) not in known:
                before = functools.partial(state, trip=trip - 1)
                later = self._element(body, body.root, index, before) if trip else None
                known[index, trip] = later if trip else self._first(part, loop, index)
            return known[index, trip]

        for trip in range(_LONGEST):
            goes_on = self._value(condition, condition.root, functools.partial(state, trip=trip))
            if not goes_on:
                return None if goes_on is None else trip
        return None

    def _first(self, part: Computation, loop: Instruction, index: int) -> int | None:
        """Returns what a loop's state holds at first; in a loop around it only what that one does not change."""

        def around(outer: int) -> int | None:
            if part.name not in self._loops:
                return None  # the program's own inputs are not known
            root = part.instructions[part.root]
            passed = part.instructions[root.operands[outer]] if root.opcode == "tuple" else root
            same = passed.opcode == "get-tuple-element" and passed.index == str(outer)
            return self._first(*self._loops[part.name], outer) if same else None

        return self._element(part, loop.operands[0], index, around)

    def _element(self, part: Computation, name: str, index: int, parameters: Callable[[int], int | None]) -> int | None:
        """Returns an element of a tuple; `parameters` has those of the computation, or those of its one tuple."""
        instruction = part.instructions[name]
        if instruction.opcode == "parameter":
            return parameters(index)
        return self._value(part, instruction.operands[index], parameters) if instruction.opcode == "tuple" else None

    def _value(self, part: Computation, name: str, parameters: Callable[[int], int | None]) -> int | None:
        """Returns a scalar integer, or None where it depends on anything but such and constants."""
        instruction = part.instructions[name]
        if instruction.opcode == "get-tuple-element":
            return self._element(part, instruction.operands[0], int(instruction.index), parameters)
        if instruction.opcode == "parameter":
            return parameters(int(instruction.literal))
        if instruction.opcode == "constant":
            literal = {"true": "1", "false": "0"}.get(instruction.literal, instruction.literal)
            return int(literal) if re.fullmatch(r"-?\d+", literal) else None
        if instruction.opcode in ("fusion", "call"):
            inside = self._computations[instruction.calls[0]]
            return self._value(
                inside, inside.root, lambda number: self._value(part, instruction.operands[number], parameters)
            )
        compute = _COMPUTED.get(instruction.index if instruction.opcode == "compare" else instruction.opcode)
        if compute is None:
            return None
        values = [self._value(part, operand, parameters) for operand in instruction.operands]
        return None if None in values else int(compute(*values))
