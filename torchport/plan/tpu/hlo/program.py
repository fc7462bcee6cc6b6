"""A scheduled program, and what can be asked of it."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from torchport.errors import TopologyError, UnknownNameError, nearest
from torchport.plan.tpu.hlo.instruction import Computation, Instruction, SourceLine

KINDS = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute", "ragged-all-to-all")
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "partition-id", "replica-id", "after-all"}
_BUFFERS = {"ConcatBitcast", "AllocateBuffer"}
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


@dataclasses.dataclass(frozen=True)
class InstructionRuns:
    """An instruction, and how many times it is executed."""

    instruction: Instruction  #: Which.
    times: int  #: By one run of what was walked.
    #: Whether it runs beside the core (a DMA, the SparseCore) from one instruction that starts it to another that waits

    #: for it.
    beside: bool = False
    #: Cycles that the arithmetic of its convolutions takes at peak, each time.
    least: int = 0

    @property
    def estimated(self) -> int:
        """The cycles that the compiler estimates for all of these times; 0 without an estimate."""
        return (self.instruction.cycles or 0) * self.times

    @property
    def cycles(self) -> int:
        """The cycles of all of these times: what the compiler estimates, and no less than the arithmetic takes."""
        return max(self.estimated, self.least * self.times)


@dataclasses.dataclass(frozen=True)
class CollectiveExecution:
    """A collective, and how many times it is executed; one that starts and ends in two instructions is one."""

    kind: str  #: One of `KINDS`.
    bytes: int  #: Of its output on one device, each time.
    times: int  #: How many times it is executed.
    groups: tuple[tuple[int, ...], ...]  #: As an instruction has them.
    source: SourceLine | None  #: The line that asks for it.
    #: Whether the core can do other work between its start and its end.
    overlapped: bool

    @property
    def group_size(self) -> int:
        """How many devices exchange with one another: those of the largest group; 2 for a permutation."""
        return max(map(len, self.groups), default=0)


@dataclasses.dataclass(frozen=True)
class HloLoop:
    """A loop: its body's computation, iterations of one execution, executions, estimated cycles of one iteration."""

    body: str
    trips: int
    times: int
    cycles: int


@dataclasses.dataclass(frozen=True, eq=False)
class HloProgram:
    """A scheduled program, the same on every device.

    Methods with an `of` answer for one run of the whole program, or for one execution of the computation so named.
    """

    file: Path  #: Where it was read.
    devices: int  #: How many it runs on.
    entry: str  #: The computation that it begins with.
    computations: dict[str, Computation]  #: By name.
    #: bfloat16 operations that a device does at most in one cycle of the estimates' clock. By default so many that

    #: every estimate counts as it is.
    flops_per_cycle: float = math.inf

    def walk(self, of: str | None = None) -> Iterator[InstructionRuns]:
        """Yields every instruction that runs, with how many times; a fusion is one instruction.

        A loop's condition runs once more than its body. Of a conditional's branches the one with the most estimated
        cycles is taken to run, every time.
        """
        if of is not None and of not in self.computations:
            raise UnknownNameError(str(self.file), f"There is no computation '{of}'", nearest(of, self.computations))
        yield from self._walk(of or self.entry, 1, False)

    def constants(self) -> int:
        """Returns the bytes of the constants in the program, on each device: what it holds and no argument says."""
        every = [one for part in self.computations.values() for one in part.instructions.values()]
        return sum(one.bytes for one in every if one.opcode == "constant")

    def cycles(self, of: str | None = None) -> int:
        """Returns the cycles (`InstructionRuns.cycles`) of the core alone: no Pallas kernels, no collectives."""
        return sum(run.cycles for run in self._priced(of))

    def kernels(self, of: str | None = None) -> dict[str, int]:
        """Returns how many times each Pallas kernel is called, by its name."""
        count: Counter[str] = Counter()
        for run in self.walk(of):
            for _, inner in self._inner(run.instruction):
                if inner.kernel:
                    count[inner.kernel] += run.times
        return dict(count)

    def largest(self, number: int, of: str | None = None) -> list[InstructionRuns]:
        """Returns the instructions with the most estimated cycles over all their times, the largest first."""
        return sorted(self._priced(of), key=lambda run: -run.cycles)[:number]

    def underestimated(self, of: str | None = None) -> list[InstructionRuns]:
        """Returns what `cycles` counts with more than the compiler's estimate, what is furthest from it first."""
        raised = [run for run in self._priced(of) if run.cycles > run.estimated]
        return sorted(raised, key=lambda run: run.estimated - run.cycles)

    def unpriced(self, of: str | None = None) -> list[InstructionRuns]:
        """Returns what `cycles` leaves out though the core does it: no estimate; the largest output first.

        Collectives, Pallas kernels, what takes no time and what runs beside the core are not among them.
        """
        left = [run for run in self.walk(of) if not run.beside and self._unpriced(run.instruction)]
        return sorted(left, key=lambda run: -run.instruction.bytes * run.times)

    def collectives(self, of: str | None = None) -> list[CollectiveExecution]:
        """Returns the collectives, in the order in which they begin."""
        sent = []
        for run in self.walk(of):
            for fusion, inner in self._inner(run.instruction):
                kind, size = inner.opcode.removesuffix("-start"), inner.bytes
                if kind not in KINDS or (inner.chain and fusion is not None and not self._begins(fusion)):
                    continue
                if fusion is not None and self._scatters(fusion):
                    kind, size = "reduce-scatter", fusion.bytes
                apart = run.beside or inner.opcode.endswith("-start") or bool(inner.chain)
                source = inner.source or run.instruction.source
                sent.append(CollectiveExecution(kind, size, run.times, inner.groups, source, apart))
        return sent

    def loop_bodies(self, of: str | None = None) -> list[HloLoop]:
        """Returns the loops that run, inner ones too, the one with the most estimated cycles first.

        Where a model's blocks run in one loop, `cycles(loop.body)`, `collectives(loop.body)` and `kernels(loop.body)`
        are those of one block.
        """
        loops = []
        for run in self.walk(of):
            if run.instruction.opcode == "while":
                body = run.instruction.calls[1]
                loops.append(HloLoop(body, self._trips[body], run.times, self.cycles(body)))
        return sorted(loops, key=lambda loop: -loop.cycles * loop.trips * loop.times)

    def _walk(self, name: str, times: int, beside: bool) -> Iterator[InstructionRuns]:
        for instruction in self.computations[name].instructions.values():
            yield InstructionRuns(instruction, times, beside, self._least(instruction))
            for called, more in self._called(instruction):
                yield from self._walk(called, times * more, beside or instruction.opcode.endswith("-start"))

    def _called(self, instruction: Instruction) -> list[tuple[str, int]]:
        """Returns the computations that one execution runs, and how many times; a fusion's is part of it."""
        if instruction.opcode == "while":
            condition, body = instruction.calls
            return [(condition, self._trips[body] + 1), (body, self._trips[body])]
        if instruction.opcode == "conditional":
            return [(max(instruction.calls, key=self.cycles), 1)]
        # Only one that starts names what it wraps; an update or the end of it may name it again. What a reduction
        # applies to each pair of elements is part of it. A custom call with a computation runs it on the SparseCore.
        runs = instruction.opcode in ("call", "custom-call", "async-start")
        return [(called, 1) for called in instruction.calls] if runs else []

    def _inner(self, instruction: Instruction) -> Iterator[tuple[Instruction | None, Instruction]]:
        """Yields an instruction, and with the fusion that it is in each one that a fusion holds."""
        yield None, instruction
        if instruction.opcode == "fusion":
            for called in instruction.calls:
                for inner in self.computations[called].instructions.values():
                    yield from ((fusion or instruction, held) for fusion, held in self._inner(inner))

    def _least(self, instruction: Instruction) -> int:
        """Returns the cycles that the convolutions in an instruction take at peak."""
        return math.ceil(instruction.flops / self.flops_per_cycle)

    def _scatters(self, fusion: Instruction) -> bool:
        """Whether a fusion sums over devices and keeps one part of the sum: libtpu's reduce-scatter."""
        inside = self.computations[fusion.calls[0]]
        root = inside.instructions[inside.root]
        kept = inside.instructions[root.operands[0]] if root.operands else root
        return root.opcode == "dynamic-slice" and kept.opcode == "all-reduce"

    def _begins(self, fusion: Instruction) -> bool:
        """Whether a fusion begins a collective that others, which name it again, go on with while they compute."""
        return any(inner.target == "AsyncCollectiveStart" for _, inner in self._inner(fusion))

    def _apart(self, instruction: Instruction) -> bool:
        """Whether it is a Pallas kernel or a collective, or holds one."""
        names = {inner.opcode.removesuffix("-start") for _, inner in self._inner(instruction)}
        return bool(names.intersection(KINDS)) or any(inner.kernel for _, inner in self._inner(instruction))

    def _priced(self, of: str | None) -> Iterator[InstructionRuns]:
        for run in self.walk(of):
            kernel = any(inner.kernel for _, inner in self._inner(run.instruction))
            if run.cycles and not run.beside and not kernel:
                yield run

    def _unpriced(self, instruction: Instruction) -> bool:
        free = instruction.opcode in _FREE or instruction.opcode.endswith(("-start", "-update", "-done"))
        free = free or instruction.target in _BUFFERS or bool(self._called(instruction))
        known = (instruction.cycles is not None and instruction.cycles >= 0) or self._least(instruction) > 0
        return not known and not free and not self._apart(instruction)

    @functools.cached_property
    def _trips(self) -> _LoopTrips:
        return _LoopTrips(self.file, self.computations)


class _LoopTrips(dict[str, int]):
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


@dataclasses.dataclass(frozen=True)
class PerBlock:
    """What one more block adds to a program."""

    cycles: float  #: Estimated cycles, as `Program.cycles` counts them.
    #: How many, by kind, bytes of output on one device and size of the group.
    collectives: dict[tuple[str, int, int], float]
    kernels: dict[str, float]  #: How many calls of each Pallas kernel.


def per_block(fewer: HloProgram, more: HloProgram, blocks: int) -> PerBlock:
    """Returns what a block adds: the difference of two programs that differ in their number of blocks alone.

    This is for blocks that are not in a loop; `Program.loop_bodies` is for those that are. Nothing in such a program
    says which block an instruction is of. The first and the last block differ from those between them (what the last
    one computes for nobody is removed), so both programs should have two blocks or more.
    """
    sent, calls = _collective_counts(more), Counter(more.kernels())
    sent.subtract(_collective_counts(fewer))
    calls.subtract(fewer.kernels())
    return PerBlock(
        (more.cycles() - fewer.cycles()) / blocks,
        {collective: count / blocks for collective, count in sent.items() if count},
        {kernel: count / blocks for kernel, count in calls.items() if count},
    )


def _collective_counts(program: HloProgram) -> Counter[tuple[str, int, int]]:
    count: Counter[tuple[str, int, int]] = Counter()
    for one in program.collectives():
        count[one.kind, one.bytes, one.group_size] += one.times
    return count
