"""Reads a compiled TPU program in HLO text: its instructions, how often each runs, collectives, and lines of Python.

With `XLA_FLAGS="--xla_dump_to=DIR --xla_dump_hlo_as_text"` libtpu writes the scheduled program to a file whose name
ends in `after_codegen.txt`; JAX's `compiled.as_text()` has the same form, and fails on some programs. One instruction
of it, cut short:

    %fusion.7 = bf16[1024,512]{1,0:T(8,128)(2,1)} fusion(%copy.1, %param.2), kind=kOutput, calls=%fused_computation.3,
        metadata={op_name="jit(f)/dot_general" stack_frame_id=21}, backend_config={... "estimated_cycles":"5392" ...}

Estimates are the compiler's, in cycles of one core's clock (`machine.Chip.clock`). Collectives, Pallas kernels and
asynchronous copies have none. Bytes are those of the values, without the padding of their tiles.
Source: texts that libtpu 0.0.51 wrote for v6e; their form is documented nowhere.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy

from torchport.errors import TopologyError


@dataclasses.dataclass(frozen=True)
class SourceLine:
    """A line of Python: the file as the program names it, the line, and the function's qualified name."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        short = re.sub(r"^.*/(?:(?:site|dist)-packages/|(?=patches/))", "", self.file)
        return f"{short.rstrip('>')}:{self.line} in {self.function}"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of HLO text, with the fields that a plan needs."""

    name: str  #: Without its `%`; unique in its computation.
    opcode: str  #: As HLO names it, `fusion` or `all-reduce-start`.
    #: Dtype and shape of its output; of each array where the output is a tuple.
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    bytes: int = 0  #: Of all output arrays, on one device.
    operands: tuple[str, ...] = ()
    #: The computations that it runs or applies; a loop's condition, then its body.
    calls: tuple[str, ...] = ()
    #: The compiler's estimate for one execution, or None without one. It may be negative for a convolution with many
    #: passes.
    cycles: int | None = None
    #: The innermost line of Python that is not internal. A fusion without a line has the last line in it.
    source: SourceLine | None = None
    target: str = ""  #: A custom call's target, such as tpu_custom_call.
    #: A collective's groups of devices, as positions in the program's order of devices; a permutation's [source,
    #: target] pairs.
    groups: tuple[tuple[int, ...], ...] = ()
    #: The id of a collective that is split over several fusions; the same in each of them.
    chain: str = ""
    literal: str = ""  #: The text in the parentheses of a constant or a parameter.
    index: str = ""  #: The index of a get-tuple-element; the direction of a comparison.
    trips: int | None = None  #: The iterations of a loop, if the compiler wrote them.
    #: bfloat16 operations of a convolution, or of all in a fusion, on one device, in all passes (see
    #: `_convolution_flops`). A matrix product is a convolution, too.
    flops: int = 0

    @property
    def kernel(self) -> str | None:
        """The name of the Pallas kernel that it calls, as `bundles.read` takes it; None if it calls none."""
        return re.sub(r"\.\d+$", "", self.name) if self.target == "tpu_custom_call" else None


@dataclasses.dataclass(frozen=True)
class Computation:
    """An HLO computation: its instructions by name, in schedule order; `root` names the instruction of its result."""

    name: str
    instructions: dict[str, Instruction]
    root: str


KINDS = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute", "ragged-all-to-all")
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "partition-id", "replica-id", "after-all"}
_BUFFERS = {"ConcatBitcast", "AllocateBuffer"}
_LONGEST = 100_000
"""Simulating a loop ends after so many iterations: no loop of a model runs more often."""
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
    """An instruction, and how often it runs in one run of a program."""

    instruction: Instruction
    times: int
    #: Whether it runs asynchronously (by DMA, or on the SparseCore): a `-start` instruction starts it, and a `-done`
    #: waits for it.
    beside: bool = False
    #: Cycles that the arithmetic of its convolutions takes at peak FLOP/s, each time.
    least: int = 0

    @property
    def cycles(self) -> int:
        """The cycles of all runs together: the compiler's estimate, but no less than the arithmetic takes."""
        return max(self.instruction.cycles or 0, self.least) * self.times


@dataclasses.dataclass(frozen=True)
class CollectiveExecution:
    """A collective, and how many times it is executed; its `-start` and `-done` instructions count as one."""

    kind: str
    bytes: int  #: Bytes of its output on one device, each time.
    times: int
    groups: tuple[tuple[int, ...], ...]
    source: SourceLine | None

    @property
    def group_size(self) -> int:
        """The devices in the largest group; 2 for a permutation."""
        return max(map(len, self.groups), default=0)


@dataclasses.dataclass(frozen=True)
class HloLoop:
    """A loop of a program, and how often it runs."""

    body: str  #: The name of its body's computation.
    trips: int  #: Iterations of one execution.
    times: int  #: Executions.
    cycles: int  #: Estimated cycles of one iteration.


@dataclasses.dataclass(frozen=True, eq=False)
class HloProgram:
    """A scheduled program, the same on every device.

    Methods with an argument `computation` look at one execution of it; without one, at a run of the whole program.
    """

    file: Path
    entry: str
    computations: dict[str, Computation]
    trips: Mapping[str, int]  #: The iterations of each loop by the name of its body's computation.
    #: The device's peak of bfloat16 operations in a cycle. With the default, the compiler's estimates are never raised.
    flops_per_cycle: float = math.inf

    def walk(self, computation: str | None = None, times: int = 1, beside: bool = False) -> Iterator[InstructionRuns]:
        """Yields every instruction that runs, with the number of its runs; a fusion is one instruction.

        A loop's condition runs once more than its body. Of a conditional, only the longest branch is taken to run. The
        computation itself runs `times` times, asynchronously if `beside`.
        """
        for instruction in self.computations[computation or self.entry].instructions.values():
            least = math.ceil(instruction.flops / self.flops_per_cycle)
            yield InstructionRuns(instruction, times, beside, least)
            for called, more in self._called(instruction):
                yield from self.walk(called, times * more, beside or instruction.opcode.endswith("-start"))

    def constants(self) -> int:
        """Returns the bytes of all constants in the program, on each device."""
        instructions = [i for part in self.computations.values() for i in part.instructions.values()]
        return sum(instruction.bytes for instruction in instructions if instruction.opcode == "constant")

    def cycles(self, computation: str | None = None) -> int:
        """Returns the cycles of all instructions with an estimate; Pallas kernels and collectives have no estimate."""
        return sum(run.cycles for run in self.priced(computation))

    def kernels(self, computation: str | None = None) -> dict[str, int]:
        """Returns the number of runs of each Pallas kernel by its name, kernels in fusions included."""
        count: Counter[str] = Counter()
        for run in self.walk(computation):
            for _, inner in self._with_fused(run.instruction):
                if inner.kernel:
                    count[inner.kernel] += run.times
        return dict(count)

    def largest(self, number: int, computation: str | None = None) -> list[InstructionRuns]:
        """Returns the `number` instructions with the most cycles in all runs together, the largest first."""
        return sorted(self.priced(computation), key=lambda run: -run.cycles)[:number]

    def unpriced(self) -> list[InstructionRuns]:
        """Returns the instructions that take time, but have no estimate and no model; the largest output first."""
        left = []
        for run in self.walk():
            instruction = run.instruction
            cycles = run.instruction.cycles
            # A call takes the time of the instructions that it runs, and these are walked, too.
            free = instruction.opcode in _FREE or instruction.target in _BUFFERS or bool(self._called(instruction))
            waits = instruction.opcode.endswith(("-start", "-update", "-done"))
            parts = [inner for _, inner in self._with_fused(instruction)]
            modelled = any(part.kernel or part.opcode.removesuffix("-start") in KINDS for part in parts)
            known = (cycles is not None and cycles >= 0) or run.least > 0
            if not (run.beside or free or waits or modelled or known):
                left.append(run)
        return sorted(left, key=lambda run: -run.instruction.bytes * run.times)

    def collectives(self, computation: str | None = None) -> list[CollectiveExecution]:
        """Returns the collectives that run, also collectives in fusions."""
        sent = []
        for run in self.walk(computation):
            for fusion, inner in self._with_fused(run.instruction):
                kind, size = inner.opcode.removesuffix("-start"), inner.bytes
                if kind not in KINDS:
                    continue
                if inner.chain and fusion is not None:
                    targets = [part.target for _, part in self._with_fused(fusion)]
                    if "AsyncCollectiveStart" not in targets:
                        continue  # all fusions of a chain repeat the collective; only the fusion that starts it counts
                if fusion is not None and self._scatters(fusion):
                    kind = "reduce-scatter"
                    size = fusion.bytes
                source = inner.source or run.instruction.source
                sent.append(CollectiveExecution(kind, size, run.times, inner.groups, source))
        return sent

    def loop_bodies(self) -> list[HloLoop]:
        """Returns the loops that run, nested loops too, the loop with the most estimated cycles first.

        If a model's blocks run in a loop, `cycles(loop.body)` and other methods with `loop.body` are for one block.
        """
        loops = []
        for run in self.walk():
            if run.instruction.opcode == "while":
                body = run.instruction.calls[1]
                loops.append(HloLoop(body, self.trips[body], run.times, self.cycles(body)))
        return sorted(loops, key=lambda loop: -loop.cycles * loop.trips * loop.times)

    def _called(self, instruction: Instruction) -> list[tuple[str, int]]:
        """Returns the computations that one execution of an instruction runs, and how often; [] for a fusion."""
        if instruction.opcode == "while":
            condition, body = instruction.calls
            return [(condition, self.trips[body] + 1), (body, self.trips[body])]
        if instruction.opcode == "conditional":
            return [(max(instruction.calls, key=self.cycles), 1)]
        # `async-update` and `async-done` may name the computation of their `async-start` again. A reduction's
        # computation is applied to pairs of elements: no call. A custom call runs its computation on the SparseCore.
        runs = instruction.opcode in ("call", "custom-call", "async-start")
        return [(called, 1) for called in instruction.calls] if runs else []

    def _with_fused(self, instruction: Instruction) -> Iterator[tuple[Instruction | None, Instruction]]:
        """Yields (None, instruction), and for each part of a fusion (innermost fusion around the part, the part)."""
        yield None, instruction
        if instruction.opcode == "fusion":
            for called in instruction.calls:
                for inner in self.computations[called].instructions.values():
                    yield from ((fusion or instruction, part) for fusion, part in self._with_fused(inner))

    def _scatters(self, fusion: Instruction) -> bool:
        """Returns whether a fusion is a reduce-scatter, which libtpu writes as an all-reduce and a dynamic-slice."""
        inside = self.computations[fusion.calls[0]]
        root = inside.instructions[inside.root]
        kept = inside.instructions[root.operands[0]] if root.operands else root
        return root.opcode == "dynamic-slice" and kept.opcode == "all-reduce"

    def priced(self, computation: str | None) -> Iterator[InstructionRuns]:
        """Yields the instructions whose cycles count: synchronous, with an estimate, and without a kernel."""
        for run in self.walk(computation):
            kernel = any(inner.kernel for _, inner in self._with_fused(run.instruction))
            if run.cycles and not run.beside and not kernel:
                yield run


class _LoopTrips(dict[str, int]):
    """The iterations of loops by their bodies; computed on the first access. If the compiler did not write the number,
    the loop is simulated on integers, which must follow from constants.
    """

    def __init__(self, file: Path, computations: Mapping[str, Computation]) -> None:
        super().__init__()
        self._file = file
        self._computations = computations
        # By the name of the body: a loop calls its condition, and then its body.
        self._loops = {
            loop.calls[1]: (part, loop)
            for part in computations.values()
            for loop in part.instructions.values()
            if loop.opcode == "while"
        }

    def __missing__(self, body: str) -> int:
        """Returns a loop's iterations, simulated if the compiler did not write them; raises if they stay unknown."""
        part, loop = self._loops[body]
        trips = loop.trips if loop.trips is not None else self._simulated(part, loop)
        if trips is None:
            fact = f"The program does not say how many times the loop %{loop.name} runs"
            must = "It must count from one constant to another, as jax.lax.scan does"
            raise TopologyError(str(self._file), fact, must)
        self[body] = trips
        return trips

    def _simulated(self, part: Computation, loop: Instruction) -> int | None:
        """Simulates a loop and returns its iterations; None if they depend on unknown values, or are too many."""
        condition, body = (self._computations[called] for called in loop.calls)

        @functools.cache
        def state(index: int, *, trip: int) -> int | None:
            """Returns element `index` of the loop's state before iteration `trip`; None if not known."""
            if trip == 0:
                return self._initial(part, loop, index)
            return self._value(body, body.root, functools.partial(state, trip=trip - 1), index)

        for trip in range(_LONGEST):
            goes_on = self._value(condition, condition.root, functools.partial(state, trip=trip))
            if goes_on is None:
                return None
            if goes_on == 0:
                return trip
        return None

    def _initial(self, part: Computation, loop: Instruction, index: int) -> int | None:
        """Returns an element of a loop's initial state; None if it is no constant, or if an outer loop changes it."""

        def outer_state(outer: int) -> int | None:
            """Returns element `outer` of the state of the loop around this loop; None if iterations change it."""
            if part.name not in self._loops:
                return None  # the program's own inputs are not known
            # The outer loop leaves the element as it is if its body returns, in this place, what it got there.
            root = part.instructions[part.root]
            passed = part.instructions[root.operands[outer]] if root.opcode == "tuple" else root
            same = passed.opcode == "get-tuple-element" and passed.index == str(outer)
            return self._initial(*self._loops[part.name], outer) if same else None

        return self._value(part, loop.operands[0], outer_state, index)

    def _value(
        self, part: Computation, name: str, parameters: Callable[[int], int | None], index: int | None = None
    ) -> int | None:
        """Returns the value of an integer instruction, or of element `index` of a tuple; None if it needs more than
        constants and known parameters. `parameters` returns a parameter's value, or an element of a tuple that is one.
        """
        instruction = part.instructions[name]
        if instruction.opcode == "parameter":
            return parameters(int(instruction.literal) if index is None else index)
        if index is not None:
            return self._value(part, instruction.operands[index], parameters) if instruction.opcode == "tuple" else None
        if instruction.opcode == "get-tuple-element":
            return self._value(part, instruction.operands[0], parameters, int(instruction.index))
        if instruction.opcode == "constant":
            literal = {"true": "1", "false": "0"}.get(instruction.literal, instruction.literal)
            return int(literal) if re.fullmatch(r"-?\d+", literal) else None
        if instruction.opcode in ("fusion", "call"):
            inside = self._computations[instruction.calls[0]]
            return self._value(
                inside, inside.root, lambda number: self._value(part, instruction.operands[number], parameters)
            )
        # The index of a comparison is its direction, such as `LT`.
        compute = _COMPUTED.get(instruction.index if instruction.opcode == "compare" else instruction.opcode)
        if compute is None:
            return None
        values = [self._value(part, operand, parameters) for operand in instruction.operands]
        return None if None in values else int(compute(*values))


INTERNAL = (
    r"/(site|dist)-packages/(jax|jaxlib|torch|torchax|functorch|torchport)/",
    r"/lib/python3\.\d+/(?!site-packages/|dist-packages/)",
    rf"^{re.escape(str(Path(__file__).parents[2]))}/",
    r"/patches/(torch|torchax)/",
)
"""Patterns of library files, whose lines are not shown as an operation's source: JAX, torch, torchax, torchport, and
patches of torch and torchax."""
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]')
_ROW = re.compile(r'(\d+) (?:"(?P<name>.*)"|\{(?P<numbers>.*)\})')
_START = re.compile(r"(?P<entry>ENTRY )?%(?P<name>[\w.-]+) \(.*\{")
_END = re.compile(r'\}(, execution_thread="[^"]*")?')
_BROKEN = re.compile(r"(\{kernel_metadata=\{)\n(.*)\n(\}\}.*)")
_NAMED = re.compile(r"\s+(?P<root>ROOT )?%(?P<name>[\w.-]+) = (?P<shape>\(?)")
_OPCODE = re.compile(r" ([a-z][\w-]*)(?=\()")
_ARRAY = re.compile(r"\b(?P<dtype>pred|[a-z]+(?P<bits>\d+)\w*)\[(?P<sides>[\d,<=]*)\]")
_CYCLES = re.compile(r'"estimated_cycles":"(-?\d+)"')
_UNKNOWN = 2**63 - 1
"""The number of cycles by which a program of the SparseCore says that there is no estimate."""
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_CHAIN = re.compile(r'\bchain_id="([^"]*)"')
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTS = re.compile(r"\{(\{[\d,]+\}(,\{[\d,]+\})*)?\}")
_CALLS = ("condition", "body", "calls", "to_apply", "branch_computations", "true_computation", "false_computation")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_Array = tuple[str, tuple[int, ...]]
"""Dtype and shape of an array."""
_PARTS = {"default": 1, "high": 2, "highest": 3}
"""The number of bfloat16 numbers into which a float32 operand is split, by precision."""
_LABELS = re.compile(r"([\w?]+)_([\w?]+)->([\w?]+)")
_FORM = "It must be a scheduled program as libtpu 0.0.51 writes it: the whole of an *after_codegen.txt"


def read(file: Path, flops_per_cycle: float = math.inf) -> HloProgram:
    """Returns the scheduled program in a file.

    Args:
        file: A file named `*after_codegen.txt`, or a folder with exactly one file of that name.
        flops_per_cycle: The device's peak of bfloat16 operations in a cycle; see `HloProgram`.
    """
    files = sorted(file.glob("*after_codegen.txt")) if file.is_dir() else [file]
    if len(files) != 1 or not files[0].is_file():
        names = ", ".join(path.name for path in files if path.is_file()) or "none"
        raise TopologyError(str(file), f"Scheduled programs (*after_codegen.txt) there: {names}", "There must be one")
    return dataclasses.replace(_HloReader(files[0]).read(), flops_per_cycle=flops_per_cycle)


class _HloReader:
    """Parses one file; every error names its line."""

    def __init__(self, file: Path) -> None:
        self.file = file
        text = file.read_text(encoding="utf-8", errors="replace").rstrip("\n")
        # An attribute on a separate line is joined to its instruction; blank lines keep the line numbers right.
        self.lines = _BROKEN.sub(r"\1\2\3\n\n", text).split("\n")
        self.at = 0  # the index of the current line, for errors
        self.tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
        self.sources: dict[int, SourceLine | None] = {0: None}
        self.computations: dict[str, Computation] = {}

    def read(self) -> HloProgram:
        """Returns the file's program; raises if the file is no scheduled HloModule with an ENTRY computation."""
        header = self.lines[0] if self.lines else ""
        if not header.startswith("HloModule ") or "is_scheduled=true" not in header:
            raise self.refusal("It does not begin with a scheduled HloModule")
        counts = (re.search(rf"\b{name}=(\d+)", header) for name in ("replica_count", "num_partitions"))
        self.devices = math.prod(int(count[1]) for count in counts if count)
        entry = ""
        for at, line in enumerate(self.lines):
            self.at = at
            if line in _TABLES:
                for row in itertools.takewhile(bool, map(_ROW.fullmatch, self.lines[at + 1 :])):
                    assert row is not None
                    self.tables[line][int(row[1])] = row["name"] or row["numbers"] or ""
            elif start := _START.fullmatch(line):
                self.read_computation(start["name"])
                entry = start["name"] if start["entry"] else entry
        self.at = len(self.lines) - 1
        if not entry:
            raise self.refusal("There is no ENTRY computation")
        return HloProgram(self.file, entry, self.computations, trips=_LoopTrips(self.file, self.computations))

    def refusal(self, fact: str) -> TopologyError:
        return TopologyError(f"{self.file}:{self.at + 1}", fact, _FORM)

    def read_computation(self, name: str) -> None:
        """Reads the instructions of a computation, from the line below its head to its closing brace."""
        root = ""
        instructions: dict[str, Instruction] = {}
        for at in range(self.at + 1, len(self.lines)):
            self.at, line = at, self.lines[at]
            if _END.fullmatch(line) and root:
                self.computations[name] = Computation(name, instructions, root)
                return
            named = _NAMED.match(line)
            if not line:
                continue
            if not named:
                break
            instruction = self.instruction(named["name"], line[named.start("shape") :], instructions)
            instructions[instruction.name] = instruction
            root = instruction.name if named["root"] else root
        raise self.refusal(f"Computation %{name} is not closed, or has no ROOT")

    def instruction(self, name: str, text: str, before: Mapping[str, Instruction]) -> Instruction:
        """Returns an instruction from its text after `=`; `before` are the earlier ones of its computation."""
        shape_ends = self.close(text, 0) if text.startswith("(") else 0
        opening = _OPCODE.search(text, shape_ends)
        if not opening:
            raise self.refusal(f"%{name} has no opcode")
        ends = self.close(text, opening.end())
        opcode, inside = opening[1], text[opening.end() + 1 : ends - 1]
        # Each part is `name=value`.
        attributes = dict(part.partition("=")[::2] for part in _split(text[ends:].removeprefix(",")))
        metadata, config = attributes.get("metadata", ""), attributes.get("backend_config", "")
        calls = self.calls(name, attributes)
        shapes = _shapes(opcode, text[: opening.start()])
        cycles = _CYCLES.search(config)
        trips = _TRIPS.search(config)
        chain = _CHAIN.search(attributes.get("frontend_attributes", ""))
        leaf = opcode in ("constant", "parameter")
        operands = () if leaf else tuple(re.findall(r"%([\w.-]+)", inside))
        missing = [operand for operand in operands if operand not in before]
        if missing:
            raise self.refusal(f"%{name} uses %{missing[0]}, which is not before it in its computation")
        arrays = tuple((dtype, sides) for dtype, sides, _ in shapes)
        fused = [*self.computations[calls[0]].instructions.values()] if opcode == "fusion" else []
        frame = _FRAME.search(metadata)
        source = self.frame(int(frame[1])) if frame else None
        return Instruction(
            name,
            opcode,
            shapes=arrays,
            bytes=sum(size for _, _, size in shapes),
            operands=operands,
            calls=calls,
            cycles=int(cycles[1]) if cycles and int(cycles[1]) < _UNKNOWN else None,
            # A fusion without a line has the last line in it.
            source=source or next((inner.source for inner in reversed(fused) if inner.source), None),
            target=attributes.get("custom_call_target", "").strip('"'),
            groups=self.groups(attributes.get("replica_groups") or attributes.get("source_target_pairs") or ""),
            chain=chain[1] if chain else "",
            literal=inside if leaf else "",
            index=attributes.get("index") or attributes.get("direction") or "",
            trips=int(trips[1]) if trips else None,
            flops=self.flops(name, opcode, [arrays, *(before[operand].shapes for operand in operands)], attributes)
            + sum(instruction.flops for instruction in fused),
        )

    def flops(self, name: str, opcode: str, values: Sequence[tuple[_Array, ...]], attributes: Mapping[str, str]) -> int:
        """Returns a convolution's bfloat16 operations by the arrays of its output and operands; 0 for other opcodes."""
        if opcode != "convolution":
            return 0
        try:
            [[output], [left], [right]] = values
            return _convolution_flops(output, left, right, attributes)
        except (ValueError, KeyError, IndexError):
            raise self.refusal(f"%{name} is a convolution, and its window or its dims are not known") from None

    def close(self, text: str, start: int) -> int:
        """Returns the index after the bracket that closes the bracket at `start`; raises if no bracket closes it."""
        depth = 0
        for token in _TOKEN.finditer(text, start):
            depth += (token[0] in "([{") - (token[0] in ")]}")
            if not depth:
                return token.end()
        raise self.refusal("A bracket is not closed")

    def calls(self, name: str, attributes: dict[str, str]) -> tuple[str, ...]:
        """Returns the names of the computations that an instruction calls; raises if any was not read before."""
        texts = [attributes.get(key, "") for key in (*_CALLS, "called_computations")]
        names = tuple(called for text in texts for called in re.findall(r"%([\w.-]+)", text))
        missing = [called for called in names if called not in self.computations]
        if missing:
            raise self.refusal(f"%{name} calls %{missing[0]}, which is not before it")
        return names

    def frame(self, number: int) -> SourceLine | None:
        """Returns the innermost line outside of libraries (`INTERNAL`) of the stack of frame `number`, or None."""
        inner, source = [], None
        while number not in self.sources:
            self.sources[number] = None  # so that a cycle of frames ends
            inner.append(number)
            place, parent = self.row("StackFrames", number, ("file_location_id", "parent_frame_id"))
            file, function, line = self.row("FileLocations", place, ("file_name_id", "function_name_id", "line"))
            source = SourceLine(
                self.tables["FileNames"].get(file, ""), line, self.tables["FunctionNames"].get(function, "")
            )
            if not re.search("|".join(INTERNAL), source.file):
                break
            # Frames are numbered from 1. The first has no parent, 0. If the program says 1, all parents are 1 too high.
            number = parent - self.row("StackFrames", 1, ("parent_frame_id",))[0]
        else:
            # An earlier walk has met this frame.
            source = self.sources[number]
        self.sources.update(dict.fromkeys(inner, source))
        return source

    def row(self, table: str, number: int, columns: tuple[str, ...]) -> list[int]:
        """Returns some columns of a row of a table: of `file_name_id=3 line=12` the numbers 3 and 12."""
        numbers = dict(re.findall(r"\b(\w+)=(\d+)", self.tables[table].get(number, "")))
        if not numbers.keys() >= set(columns):
            raise self.refusal(f"The table {table} has no row {number} with {', '.join(columns)}")
        return [int(numbers[column]) for column in columns]

    def groups(self, text: str) -> tuple[tuple[int, ...], ...]:
        """Returns a collective's groups of devices from their text.

        `{{0,1},{2,3}}` lists them. `[2,2]<=[2,2]T(1,0)` counts the devices in the second shape, transposes it, and has
        the groups as rows of the first shape: {{0,2},{1,3}}. In `mesh['a'=2,'b'=4] {'b'}` a group's devices differ only
        along the axes in braces.
        """
        if text == "{}":
            return (tuple(range(self.devices)),)
        if not text or _LISTS.fullmatch(text):
            return tuple(_numbers(part) for part in re.findall(r"\{([\d,]+)\}", text))
        order: Sequence[int]
        if iota := _IOTA.fullmatch(text):
            shape, sides, order = (_numbers(part or "") for part in iota.groups())
            order = order or range(len(sides))
        else:
            axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", text)}
            named = re.fullmatch(r"mesh\[[^]]*\] \{([^}]*)\}", text)
            along = re.findall(r"'(\w+)'", named[1]) if named else []
            if not along or not set(along) <= set(axes) or math.prod(axes.values()) != self.devices:
                raise self.refusal(f"Groups of devices are written '{text[:60]}'")
            names = list(axes)
            sides = tuple(axes.values())
            order = [*map(names.index, [name for name in names if name not in along]), *map(names.index, along)]
            shape = -1, math.prod(axes[name] for name in along)
        devices = numpy.arange(math.prod(sides)).reshape(sides).transpose(order).reshape(shape)
        return tuple(map(tuple, devices.tolist()))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _split(text: str) -> list[str]:
    """Returns a text's parts, split at the commas outside of brackets and quotes."""
    parts, depth, start = [], 0, 0
    for token in _TOKEN.finditer(text):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if token[0] == "," and not depth:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    return [*parts, text[start:].strip()]


def _shapes(opcode: str, text: str) -> list[tuple[str, tuple[int, ...], int]]:
    """Returns dtype, shape and bytes of each array of an output; for a `-start`, of the output of its `-done`."""
    if opcode.endswith("-start") and opcode != "all-reduce-start" and text.startswith("("):
        text = _split(text[1:-1])[1]  # (operands, result, semaphores)
    shapes = []
    for array in _ARRAY.finditer(text):
        sides = _numbers(array["sides"].replace("<=", ""))
        bits = 8 if array["dtype"] == "pred" else int(array["bits"])
        shapes.append((array["dtype"], sides, math.ceil(math.prod(sides) * bits / 8)))
    return shapes


def _convolution_flops(output: _Array, left: _Array, right: _Array, attributes: Mapping[str, str]) -> int:
    """Returns the bfloat16 operations of a convolution on one device, in all passes; 0 for integers and float8.

    A multiply and an add are two. Products with padding do not count: HLO has a batched matrix product as a convolution
    along the batch, in which all positions of a window but one are padding.
    """
    labels = _LABELS.fullmatch(attributes.get("dim_labels", ""))
    if labels is None:
        raise ValueError(attributes)
    left_dims, right_dims, output_dims = labels.groups()
    sizes, inputs, kernel = (
        dict[str, int](zip(dims, shape, strict=True))
        for dims, (_, shape) in ((output_dims, output), (left_dims, left), (right_dims, right))
    )
    window = dict(field.split("=") for field in attributes.get("window", "").strip("{}").split())
    spatial = sorted(dim for dim in kernel if dim.isdigit())
    products = sizes["b"] * sizes["f"] * kernel["i"]
    for at, dim in enumerate(spatial):
        products *= _positions(sizes[dim], inputs[dim], kernel[dim], window, at)
    precisions = attributes.get("operand_precision", "").strip("{}").split(",")
    parts = min(_PARTS.get(precision, 1) for precision in precisions)
    dtypes = (left[0], right[0])
    wide = dtypes.count("f32")
    if wide + dtypes.count("bf16") < 2:
        return 0
    # By the number of float32 operands. Of two, the products of the smallest parts are left out.
    passes = (1, parts, parts * (parts + 1) // 2)[wide]
    return 2 * products * passes


def _positions(output: int, inputs: int, kernel: int, window: Mapping[str, str], at: int) -> int:
    """Returns how many pairs of an output and a kernel position along a dim fall on an input element, not padding.

    `window` has fields such as `pad`, with a part for each spatial dim: `1_1x1_1`. `at` is the dim's number.
    """
    fields = {name: parts.split("x")[at] for name, parts in window.items()}
    stride, spread, dilation = (int(fields.get(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    before = int(fields.get("pad", "0_0").split("_")[0])
    reached = numpy.arange(output)[:, None] * stride + numpy.arange(kernel) * dilation - before
    return int(((reached >= 0) & (reached <= (inputs - 1) * spread) & (reached % spread == 0)).sum())
