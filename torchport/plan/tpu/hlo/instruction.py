"""What a scheduled program is made of: instructions in computations, each with the line of Python it comes from."""

from __future__ import annotations

import dataclasses
import re


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
    """An instruction of a computation."""

    name: str  #: Without its `%`; unique in its computation.
    opcode: str  #: As HLO names it, `fusion` or `all-reduce-start`.
    #: The arrays that it makes, dtype and shape; several where it makes a tuple.
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    bytes: int = 0  #: Of all of them, on one device.
    #: The names of instructions of the same computation.
    operands: tuple[str, ...] = ()
    #: The computations that it runs or applies; a loop's condition, then its body.
    calls: tuple[str, ...] = ()
    #: What the compiler estimates for one execution, or None where it does not. Of a convolution with many passes it

    #: may be negative.
    cycles: int | None = None
    #: The innermost line of Python that is not internal. A fusion without one has that of its root.

    source: SourceLine | None = None
    op_name: str = ""  #: JAX's name of what it was made from.
    target: str = ""  #: Of a custom call, such as tpu_custom_call.
    #: Of a collective: the devices that exchange, by their positions in the program's own order of devices; of a

    #: permutation [source, target] pairs.
    groups: tuple[tuple[int, ...], ...] = ()
    #: Of a collective that several fusions carry on: which, the same in each of them.
    chain: str = ""
    literal: str = ""  #: What stands in the parentheses of a constant or a parameter.
    index: str = ""  #: Of a get-tuple-element; the direction of a comparison.
    #: Of a loop, where the compiler wrote how many times it runs.
    trips: int | None = None
    #: Of a convolution, or of those in a fusion: bfloat16 operations on one device, those of all passes (see

    #: `convolution`). A matrix product is a convolution, too.
    flops: int = 0

    @property
    def kernel(self) -> str | None:
        """The name of the Pallas kernel that it calls, as `bundles.read` takes it; None if it calls none."""
        return re.sub(r"\.\d+$", "", self.name) if self.target == "tpu_custom_call" else None


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order in which they are issued; `root` names the one whose value it returns."""

    name: str
    instructions: dict[str, Instruction]
    root: str
