"""The text of a scheduled program, read."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy

from torchport.errors import TopologyError
from torchport.plan.tpu.hlo.instruction import Computation, Instruction, SourceLine
from torchport.plan.tpu.hlo.program import HloProgram

INTERNAL = (
    r"/(site|dist)-packages/(jax|jaxlib|torch|torchax|functorch|torchport)/",
    r"/lib/python3\.\d+/(?!site-packages/|dist-packages/)",
    rf"^{re.escape(str(Path(__file__).parents[3]))}/",
    r"/patches/(torch|torchax)/",
)
"""Patterns of files whose lines say how something is computed and not what for: JAX, torch, torchax, torchport, and
the patches of these."""
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
"""What stands for no estimate in a program of the SparseCore."""
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_CHAIN = re.compile(r'\bchain_id="([^"]*)"')
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTS = re.compile(r"\{(\{[\d,]+\}(,\{[\d,]+\})*)?\}")
_CALLS = ("condition", "body", "calls", "to_apply", "branch_computations", "true_computation", "false_computation")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_Array = tuple[str, tuple[int, ...]]
"""Dtype and shape, as an instruction has them."""
_PARTS = {"default": 1, "high": 2, "highest": 3}
"""bfloat16 numbers whose sum stands for a float32 operand, by its precision."""
_LABELS = re.compile(r"([\w?]+)_([\w?]+)->([\w?]+)")
_FORM = "It must be a scheduled program as libtpu 0.0.51 writes it: the whole of an *after_codegen.txt"


def read(file: Path, internal: tuple[str, ...] = INTERNAL, flops_per_cycle: float = math.inf) -> HloProgram:
    """Returns a scheduled program.

    Args:
        file: An `*after_codegen.txt`, or a folder that has one of them.
        internal: Patterns that are searched in the names of files; no line of these is an instruction's source.
        flops_per_cycle: bfloat16 operations that a device does at most in one cycle, as the program has them.
    """
    files = sorted(file.glob("*after_codegen.txt")) if file.is_dir() else [file]
    if len(files) != 1 or not files[0].is_file():
        names = ", ".join(path.name for path in files if path.is_file()) or "none"
        raise TopologyError(str(file), f"Scheduled programs (*after_codegen.txt) there: {names}", "There must be one")
    return dataclasses.replace(_HloReader(files[0], internal).read(), flops_per_cycle=flops_per_cycle)


class _HloReader:
    """Reads one file; every refusal names its line."""

    def __init__(self, file: Path, internal: tuple[str, ...]) -> None:
        self.file = file
        self.internal = re.compile("|".join(internal) or "(?!)")
        text = file.read_text(encoding="utf-8", errors="replace").rstrip("\n")
        # An attribute may be written on lines of its own: what breaks them comes after the instruction, blank lines.
        self.lines = _BROKEN.sub(r"\1\2\3\n\n", text).split("\n")
        self.at = 0
        self.tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
        self.sources: dict[int, SourceLine | None] = {0: None}
        self.computations: dict[str, Computation] = {}

    def read(self) -> HloProgram:
        header = self.lines[0] if self.lines else ""
        if not header.startswith("HloModule ") or "is_scheduled=true" not in header:
            raise self.refusal("It does not begin with a scheduled HloModule")
        counts = (re.search(rf"\b{name}=(\d+)", header) for name in ("replica_count", "num_partitions"))
        self.devices = math.prod(int(count[1]) for count in counts if count)
        entry = ""
        for at, line in enumerate(self.lines):
            self.at = at
            if line in _TABLES:
                self.read_table(line)
            elif start := _START.fullmatch(line):
                self.read_computation(start["name"])
                entry = start["name"] if start["entry"] else entry
        self.at = len(self.lines) - 1
        if not entry:
            raise self.refusal("There is no ENTRY computation")
        return HloProgram(self.file, self.devices, entry, self.computations)

    def refusal(self, fact: str) -> TopologyError:
        return TopologyError(f"{self.file}:{self.at + 1}", fact, _FORM)

    def read_table(self, name: str) -> None:
        for line in self.lines[self.at + 1 :]:
            row = _ROW.fullmatch(line)
            if not row:
                return
            self.tables[name][int(row[1])] = row["name"] or row["numbers"] or ""

    def read_computation(self, name: str) -> None:
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
        shape_ends = self.close(text, 0) if text.startswith("(") else 0
        opening = _OPCODE.search(text, shape_ends)
        if not opening:
            raise self.refusal(f"%{name} has no opcode")
        ends = self.close(text, opening.end())
        opcode, inside = opening[1], text[opening.end() + 1 : ends - 1]
        attributes = dict(part.partition("=")[::2] for part in _split(text[ends:].removeprefix(",")))
        metadata, config = attributes.get("metadata", ""), attributes.get("backend_config", "")
        calls = self.calls(name, attributes)
        shapes = _shapes(opcode, text[: opening.start()])
        cycles, trips, op_name = _CYCLES.search(config), _TRIPS.search(config), _OP_NAME.search(metadata)
        chain = _CHAIN.search(attributes.get("frontend_attributes", ""))
        leaf = opcode in ("constant", "parameter")
        operands = () if leaf else tuple(re.findall(r"%([\w.-]+)", inside))
        missing = [operand for operand in operands if operand not in before]
        if missing:
            raise self.refusal(f"%{name} uses %{missing[0]}, which is not before it in its computation")
        arrays = tuple((dtype, sides) for dtype, sides, _ in shapes)
        return Instruction(
            name,
            opcode,
            arrays,
            sum(size for _, _, size in shapes),
            operands=operands,
            calls=calls,
            cycles=int(cycles[1]) if cycles and int(cycles[1]) < _UNKNOWN else None,
            source=self.source(metadata) or self.fused(opcode, calls),
            op_name=op_name[1] if op_name else "",
            target=attributes.get("custom_call_target", "").strip('"'),
            groups=self.groups(attributes.get("replica_groups") or attributes.get("source_target_pairs") or ""),
            chain=chain[1] if chain else "",
            literal=inside if leaf else "",
            index=attributes.get("index") or attributes.get("direction") or "",
            trips=int(trips[1]) if trips else None,
            flops=self.flops(name, opcode, [arrays, *(before[operand].shapes for operand in operands)], attributes)
            + self.fused_flops(opcode, calls),
        )

    def flops(self, name: str, opcode: str, values: Sequence[tuple[_Array, ...]], attributes: Mapping[str, str]) -> int:
        """Returns the bfloat16 operations of a convolution, from its value and those of its operands; else 0."""
        if opcode != "convolution":
            return 0
        try:
            [[output], [left], [right]] = values
            return _convolution_flops(output, left, right, attributes)
        except (ValueError, KeyError, IndexError):
            raise self.refusal(f"%{name} is a convolution, and its window or its dims are not known") from None

    def fused_flops(self, opcode: str, calls: tuple[str, ...]) -> int:
        """Returns the bfloat16 operations of the convolutions in a fusion; else 0."""
        inside = self.computations[calls[0]].instructions.values() if opcode == "fusion" else ()
        return sum(one.flops for one in inside)

    def close(self, text: str, start: int) -> int:
        """Returns where the bracket that opens at `start` has been closed."""
        depth = 0
        for token in _TOKEN.finditer(text, start):
            depth += (token[0] in "([{") - (token[0] in ")]}")
            if not depth:
                return token.end()
        raise self.refusal("A bracket is not closed")

    def calls(self, name: str, attributes: dict[str, str]) -> tuple[str, ...]:
        texts = [attributes.get(key, "") for key in (*_CALLS, "called_computations")]
        names = tuple(called for text in texts for called in re.findall(r"%([\w.-]+)", text))
        missing = [called for called in names if called not in self.computations]
        if missing:
            raise self.refusal(f"%{name} calls %{missing[0]}, which is not before it")
        return names

    def fused(self, opcode: str, calls: tuple[str, ...]) -> SourceLine | None:
        """Returns the source of what a fusion computes last, for one that has none itself."""
        if opcode != "fusion":
            return None
        inside = self.computations[calls[0]].instructions.values()
        return next((one.source for one in reversed(inside) if one.source), None)

    def source(self, metadata: str) -> SourceLine | None:
        frame = _FRAME.search(metadata)
        return self.frame(int(frame[1])) if frame else None

    def frame(self, number: int) -> SourceLine | None:
        """Returns the innermost source that is not internal, from a frame outwards."""
        inner, source = [], None
        while number not in self.sources:
            self.sources[number] = None  # a circle of frames ends here
            inner.append(number)
            place, parent = self.row("StackFrames", number, ("file_location_id", "parent_frame_id"))
            file, function, line = self.row("FileLocations", place, ("file_name_id", "function_name_id", "line"))
            source = SourceLine(
                self.tables["FileNames"].get(file, ""), line, self.tables["FunctionNames"].get(function, "")
            )
            if not self.internal.search(source.file):
                break
            # Frames are numbered from 1. Where the first, which has none around it, says 1, parents are one too high.
            number = parent - self.row("StackFrames", 1, ("parent_frame_id",))[0]
        else:
            source = self.sources[number]
        self.sources.update(dict.fromkeys(inner, source))
        return source

    def row(self, table: str, number: int, columns: tuple[str, ...]) -> list[int]:
        numbers = dict(re.findall(r"\b(\w+)=(\d+)", self.tables[table].get(number, "")))
        if not numbers.keys() >= set(columns):
            raise self.refusal(f"The table {table} has no row {number} with {', '.join(columns)}")
        return [int(numbers[column]) for column in columns]

    def groups(self, text: str) -> tuple[tuple[int, ...], ...]:
        """Returns the lists of devices that `{{0,1},{2,3}}`, `[2,2]<=[4]` or `[2,2]<=[2,2]T(1,0)` stand for."""
        iota = _IOTA.fullmatch(text)
        if iota:
            shape, sides, order = (_numbers(part or "") for part in iota.groups())
            devices = numpy.arange(math.prod(sides)).reshape(sides)
            return tuple(map(tuple, devices.transpose(order or range(len(sides))).reshape(shape).tolist()))
        if text == "{}":
            return (tuple(range(self.devices)),)
        if text.startswith("mesh["):
            return self.along_axes(text)
        if text and not _LISTS.fullmatch(text):
            raise self.refusal(f"Groups of devices are written '{text[:60]}'")
        return tuple(_numbers(part) for part in re.findall(r"\{([\d,]+)\}", text))

    def along_axes(self, text: str) -> tuple[tuple[int, ...], ...]:
        """Returns the groups of `mesh['a'=2,'b'=4] {'b'}`: the devices that differ in the axes in braces."""
        axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", text)}
        named = re.fullmatch(r"mesh\[[^]]*\] \{([^}]*)\}", text)
        along = re.findall(r"'(\w+)'", named[1]) if named else []
        if not along or not set(along) <= set(axes) or math.prod(axes.values()) != self.devices:
            raise self.refusal(f"Groups of devices are written '{text[:60]}'")
        names = list(axes)
        order = [names.index(name) for name in names if name not in along] + [names.index(name) for name in along]
        devices = numpy.arange(self.devices).reshape(tuple(axes.values())).transpose(order)
        return tuple(map(tuple, devices.reshape(-1, math.prod(axes[name] for name in along)).tolist()))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _split(text: str) -> list[str]:
    """Returns the parts between commas that stand in no bracket and no quotes."""
    parts, depth, start = [], 0, 0
    for token in _TOKEN.finditer(text):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if token[0] == "," and not depth:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    return [*parts, text[start:].strip()]


def _shapes(opcode: str, text: str) -> list[tuple[str, tuple[int, ...], int]]:
    """Returns dtype, shape and bytes of each array of a value; of one that is awaited later, of what it will be."""
    if opcode.endswith("-start") and opcode != "all-reduce-start" and text.startswith("("):
        text = _split(text[1:-1])[1]  # (operands, result, semaphores)
    shapes = []
    for array in _ARRAY.finditer(text):
        sides = _numbers(array["sides"].replace("<=", ""))
        bits = 8 if array["dtype"] == "pred" else int(array["bits"])
        shapes.append((array["dtype"], sides, math.ceil(math.prod(sides) * bits / 8)))
    return shapes


def _convolution_flops(output: _Array, left: _Array, right: _Array, attributes: Mapping[str, str]) -> int:
    """Returns the bfloat16 operations of a convolution on one device, in all its passes; 0 of another dtype.

    A multiply and an add are two. What is multiplied with padding is not counted: a product with a batch is written as
    a convolution along that batch, and of each window of it all but one position is padding.

    Args:
        output: Dtype and shape of the result.
        left: Of the input.
        right: Of the kernel.
        attributes: The instruction's, by name.

    Raises:
        ValueError: The labels of the dims are missing, or those of other shapes.
    """
    labels = _LABELS.fullmatch(attributes.get("dim_labels", ""))
    if labels is None:
        raise ValueError(attributes)
    names = labels.groups()
    sizes, inputs, kernel = (
        dict[str, int](zip(dims, array[1], strict=True))
        for dims, array in zip((names[2], names[0], names[1]), (output, left, right), strict=True)
    )
    window = dict(field.split("=") for field in attributes.get("window", "").strip("{}").split())
    spatial = sorted(dim for dim in kernel if dim.isdigit())
    products = sizes["b"] * sizes["f"] * kernel["i"]
    for at, dim in enumerate(spatial):
        products *= _positions(sizes[dim], inputs[dim], kernel[dim], window, at)
    return 2 * products * _passes(left[0], right[0], attributes)


def _passes(left: str, right: str, attributes: Mapping[str, str]) -> int:
    """Returns how many bfloat16 products make one product of these dtypes; 0 where the unit takes them as they are.

    Two float32 operands of n parts each take n * (n + 1) / 2: the products of the smallest parts are left out.
    """
    each = attributes.get("operand_precision", "").strip("{}").split(",")
    parts = min(_PARTS.get(precision, 1) for precision in each)
    wide = (left, right).count("f32")
    if wide + (left, right).count("bf16") < 2:
        return 0
    return (1, parts, parts * (parts + 1) // 2)[wide]


def _positions(output: int, inputs: int, kernel: int, window: Mapping[str, str], at: int) -> int:
    """Returns along a dim how many pairs of a position of the output and one of the kernel meet an input."""

    def field(name: str, default: str) -> str:
        return window[name].split("x")[at] if name in window else default

    stride, spread, apart = (int(field(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    before = int(field("pad", "0_0").split("_")[0])
    reached = numpy.arange(output)[:, None] * stride + numpy.arange(kernel) * apart - before
    return int(((reached >= 0) & (reached <= (inputs - 1) * spread) & (reached % spread == 0)).sum())
