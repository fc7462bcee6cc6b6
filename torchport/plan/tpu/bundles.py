"""The instruction schedule of a Pallas TPU kernel as bundles, read without a TPU from the compiler's dump.

A TPU core issues one bundle of instructions each cycle, in the order that the compiler fixed: a loop of a kernel takes
as many cycles as it has bundles, unless it waits for a DMA. libtpu writes the bundles as text if its flags ask for it
(`absent.environment`). Two files of a kernel matter. `*-final_bundles.txt` has a line for each bundle:

    0x1328   : > { %v1 = vadd.f32 ...  ;;  %9 = sbr.rel (%p1_p7) target = $region99 }
    0x1329   :  {}
    0x132d LB: >> { %v2 = vmatmul ... } /* Start region 105 */

A line has one `>` for each loop around the bundle, `LB` where a loop's body begins, and the target region of a branch.
A branch backwards closes a loop, one forwards skips a predicated region (`pl.when`); bundles in its delay slots always
run. `*-final_hlo-static-per-bundle-utilization.txt` has, for each bundle, how many of the core's slots it fills.
Source: files that libtpu 0.0.51 wrote for v5e, v5p, v6e and tpu7x; their form is documented nowhere.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
from collections import deque
from pathlib import Path
from typing import Any, Literal

import jax
import numpy
import numpy.typing

from torchport.config.machine import Machine
from torchport.errors import TopologyError, VmemError, nearest
from torchport.files import atomic
from torchport.kernels.attention import dispatch
from torchport.plan.tpu.absent import describe, environment
from torchport.processes import child
from torchport.progress import size_text

MATMUL = "MATMUL"
"""The slot of the matrix unit, as the compiler names it."""

_BUNDLE = re.compile(r"\s*(?P<at>0x[0-9a-f]+|0) *(?P<marks>[A-Z ]*):(?P<depth>[ >]*)\{(?P<empty>\s*\})?")
_BRANCH = re.compile(r"\bsbr\.rel (?:\(!?%\w+\) )?\s*target = \$region(\d+)")
_START = re.compile(r"\bStart(?:/End empty)? region (\d+)")
_FILE = re.compile(r"\d+-(?P<kernel>.+)-\d+-(?P<what>final_bundles|final_hlo-static-per-bundle-utilization)\.txt")
_PALLAS = re.compile(r'%([\w.-]+) = [^\n]*custom_call_target="tpu_custom_call"')
_SCOPED = re.compile(r"Scoped allocation with size ([\d.]+)([KMG]?) and limit ([\d.]+)([KMG]?)")
_ALLOCATION = re.compile(r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\).*space=vmem", re.DOTALL)
_FORM = "It must have the form that torchport reads, which is libtpu 0.0.51's"

Kind = Literal["kernel", "loop", "predicated"]


@dataclasses.dataclass(frozen=True)
class Region:
    """Consecutive bundles `[start, end)`: the whole kernel, a loop's body, or code that a predicate can skip."""

    kind: Kind
    #: The first bundle. Delay slots of the branch that skips a predicated region lie before it.
    start: int
    #: The bundle after the last. Delay slots of the branch that closes a loop belong to the loop.
    end: int
    depth: int  #: How many loops surround the bundles; a loop counts itself.
    inside: tuple[Region, ...] = ()  #: The regions directly in this region.


@dataclasses.dataclass(frozen=True, eq=False)
class KernelBundles:
    """A kernel's bundles on one core."""

    kernel: str  #: As the compiler names it: the `name=` of `pallas_call` and a number.
    #: The capacity of a bundle for each kind of slot, in the order of the columns of `counts`.
    slots: dict[str, int]
    #: The slots in use, int64 [bundle, slot]. A matrix product counts in each of the 8 or 16 bundles for which it
    #: occupies its matrix unit; products that overlap in one unit's queue count once.
    counts: numpy.typing.NDArray[numpy.int64]
    root: Region

    @property
    def size(self) -> int:
        """Bundles of the whole kernel."""
        return len(self.counts)

    @property
    def matrix_work(self) -> numpy.typing.NDArray[numpy.int64]:
        """The uses of the matrix unit in each bundle."""
        return self.counts[:, list(self.slots).index(MATMUL)]


def read(folder: Path, kernel: str) -> KernelBundles:
    """Returns a kernel's bundles from the folder into which libtpu dumped them.

    Args:
        folder: The `dump` that `absent.environment` named to the process that compiled.
        kernel: The `name=` of the kernel's `pallas_call`, or the compiler's own name for one call of it (`name.1`).
    """
    files: dict[str, list[tuple[str, Path]]] = {"final_bundles": [], "final_hlo-static-per-bundle-utilization": []}
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        parts = _FILE.fullmatch(file.name)
        # The compiler's own programs around a kernel: TLP (the whole program), <late-initialization>, ...
        if parts and parts["kernel"] != "TLP" and "<" not in parts["kernel"]:
            files[parts["what"]].append((parts["kernel"], file))
    (name, bundles), (_, counts) = (_file_of(folder, kernel, pairs) for pairs in files.values())
    slots, table = _read_counts(counts)
    root = _read_regions(bundles)
    if root.end == len(table):
        return KernelBundles(name, slots, table, root)
    raise TopologyError(str(counts), f"It has {len(table)} rows for {root.end} bundles", _FORM)


def _file_of(folder: Path, kernel: str, files: list[tuple[str, Path]]) -> tuple[str, Path]:
    """Returns the compiler's name and the file of a kernel's only call among `files`, which are such pairs."""
    stem = re.sub(r"[^\w.-]", "_", kernel)  # libtpu replaces other characters, and adds a number for each call
    calls = [(name, file) for name, file in files if re.fullmatch(rf"{re.escape(stem)}(\.\d+)?", name)]
    exact = [(name, file) for name, file in calls if name == stem] or calls  # `kernel` may name a call, or the kernel
    if not exact:
        fact = f"The compiler left no bundles of a kernel '{kernel}' there"
        raise TopologyError(str(folder), fact, nearest(kernel, {name for name, _ in files}))
    if len(exact) > 1:
        raise TopologyError(
            str(folder),
            f"It has the bundles of {len(exact)} calls of a kernel '{kernel}': {', '.join(name for name, _ in exact)}",
            "Name one of the calls, and dump each program into an empty folder",
        )
    return exact[0]


def _read_counts(file: Path) -> tuple[dict[str, int], numpy.typing.NDArray[numpy.int64]]:
    """Returns the capacity of each slot by name, and the slots in use, [bundle, slot]; raises for another table.

    Line 2 has the slots' names, separated by commas; line 3 the capacities; lines 5 on have a row for each bundle.
    """
    lines = file.read_text(encoding="utf-8").splitlines()
    names = [name.strip() for name in lines[1].split(",")] if len(lines) > 4 else []
    capacities = lines[2].split() if names else []
    rows = [line.split() for line in lines[4:] if line.strip()]
    numbers = all(cell.isdecimal() for row in [capacities, *rows] for cell in row)
    if MATMUL not in names or not numbers or {len(row) for row in [capacities, *rows]} != {len(names)}:
        raise TopologyError(f"{file}:2", f"No table of slots such as {MATMUL} with a row for each bundle", _FORM)
    return dict(zip(names, map(int, capacities), strict=True)), numpy.array(rows, dtype=numpy.int64)


@dataclasses.dataclass(frozen=True)
class _Bundle:
    """A line of `*-final_bundles.txt`."""

    marks: str  #: Such as `LB`, at the first bundle of a loop's body.
    depth: int  #: How many loops surround it.
    empty: bool
    branches: list[int] = dataclasses.field(default_factory=list)  #: The regions to which it may jump.


def _read_regions(file: Path) -> Region:
    """Returns a kernel's whole region with the other regions nested in it; raises if branches contradict the marks."""
    bundles, starts = _read_bundles(file)
    missing = {name for bundle in bundles for name in bundle.branches} - set(starts)
    nameless = [at for at, bundle in enumerate(bundles) if "PF" in bundle.marks and at not in starts.values()]
    if len(missing) == len(nameless) == 1:
        # An empty bundle has no comment that names its region. It is the exit, to which v5p's second core may jump.
        starts[missing.pop()] = nameless[0]
    if not bundles or missing:
        fact = f"A branch goes to region {min(missing)}, which begins nowhere" if missing else "There is no bundle"
        raise TopologyError(str(file), fact, _FORM)
    # Bundles of a branch and of its target; code after a branch's delay slots is `after` bundles behind it.
    jumps = [(at, starts[name]) for at, bundle in enumerate(bundles) for name in bundle.branches]
    after = 1 + _delay_slots(bundles, jumps)
    # A loop ends with the last jump to its beginning.
    last: dict[int, int] = {}
    for at, to in jumps:
        last[to] = max(at, last.get(to, at))
    loops = {(to, last[to] + after, "loop") for at, to in jumps if to <= at}
    skips = {(at + after, to, "predicated") for at, to in jumps if to > at + after}
    # If a loop and a skip begin at one bundle, the loop lies in the skipped region.
    spans = deque(sorted(loops | skips, key=lambda span: (span[0], -span[1], span[2] == "loop")))
    root = _nest("kernel", start=0, end=len(bundles), depth=0, spans=spans)
    # The depth at the beginning of each loop.
    by_marks = {at: bundle.depth for at, bundle in enumerate(bundles) if "LB" in bundle.marks}
    by_branches = {start: sum(first <= start < last for first, last, _ in loops) for start, _, _ in loops}
    if by_marks != by_branches:
        at = min(dict(by_marks.items() ^ by_branches.items()))  # the first bundle at which they differ
        raise TopologyError(f"{file}: bundle {at:#x}", "Its mark of a loop and the branches do not agree", _FORM)
    return root


def _read_bundles(file: Path) -> tuple[list[_Bundle], dict[int, int]]:
    """Returns the bundles of a file, and the bundle at which each region starts, by the region's number."""
    bundles: list[_Bundle] = []
    starts: dict[int, int] = {}
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if head := _BUNDLE.match(line):
                if int(head["at"], 16) != len(bundles):
                    raise TopologyError(f"{file}:{number}", f"Bundle {head['at']} is number {len(bundles):#x}", _FORM)
                bundles.append(_Bundle(head["marks"], head["depth"].count(">"), bool(head["empty"])))
            # A bundle's comments can take several lines.
            if bundles:
                bundles[-1].branches.extend(map(int, _BRANCH.findall(line)))
                starts.update((int(name), len(bundles) - 1) for name in _START.findall(line))
    return bundles, starts


def _delay_slots(bundles: list[_Bundle], jumps: list[tuple[int, int]]) -> int:
    """Returns the number of delay slots: bundles after a branch that always run. It is 4 up to v6e, and 1 on tpu7x.

    No file has this number, so it is inferred: delay slots contain no mark and no branch, and those of a loop's last
    branch are as deep as the loop. The shortest such run of bundles in the kernel is the number.
    """
    runs = []
    for at, to in jumps:
        depth = bundles[to].depth if to <= at else 0  # a branch backwards closes a loop
        end = at + 1
        while end < len(bundles) and not bundles[end].marks.strip() and not bundles[end].branches:
            if bundles[end].depth < depth and not bundles[end].empty:
                break
            end += 1
        runs.append(end - at - 1)
    return min(runs, default=0)


def _nest(kind: Kind, start: int, end: int, depth: int, spans: deque[tuple[int, int, Any]]) -> Region:
    """Returns a region with the regions nested in it, and removes their spans from `spans`. A span is (first bundle,
    bundle after the last, kind); `spans` are sorted by first bundle, the longest first.
    """
    inside = []
    while spans and spans[0][0] < end:
        first, last, inner = spans.popleft()
        inside.append(_nest(inner, first, min(last, end), depth + (inner == "loop"), spans))
    return Region(kind, start, end, depth, tuple(inside))


def compile_kernel(build: str, arguments: dict[str, Any], machine: Machine) -> KernelBundles:
    """Compiles a function for one device of an absent TPU, and returns the bundles of its only Pallas kernel.

    Compiling runs in a child process: libtpu reads its settings once, and may end the process.

    Args:
        build: `module:function`; the function returns the callable to compile and its operands as a list of
            `jax.ShapeDtypeStruct`.
    """
    place = f"{build}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"
    remedy = "The function must build and lower on any machine"
    with atomic.scratch() as dump:
        kernels = child.call(
            "torchport.plan.tpu.bundles:compiled",
            *(build, arguments, machine, place),
            ended=lambda end: TopologyError(place, f"The process that compiles it {end}", remedy, stderr=end.stderr),
            environment=environment(dump),
        )
        if len(kernels) != 1:
            fact = f"The program has {len(kernels)} Pallas kernels: {', '.join(kernels) or 'none'}"
            raise TopologyError(place, fact, "It must have one")
        return read(dump, kernels[0])


def compiled(build: str, arguments: dict[str, Any], machine: Machine, place: str) -> list[str]:
    """Compiles what `build` returns, and returns the names of its Pallas kernels; runs in `compile_kernel`'s child."""
    devices = describe(machine).devices
    module, _, function = build.partition(":")
    call, operands = getattr(importlib.import_module(module), function)(**arguments)
    mesh = jax.sharding.Mesh(numpy.array(devices[:1]), ("x",))
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    operands = [jax.ShapeDtypeStruct(operand.shape, operand.dtype, sharding=here) for operand in operands]
    try:
        with jax.set_mesh(mesh):
            program = jax.jit(call).lower(*operands).compile()
        text = program.as_text()  # XLA cannot print every program that it compiles
    except jax.errors.JaxRuntimeError as error:
        raise refused(str(error), machine, place) from error
    return sorted(set(_PALLAS.findall(text)))


def refused(text: str, machine: Machine, place: str) -> TopologyError | VmemError:
    """Returns the error for a compiler's message; about VMEM, a `VmemError` with the bytes asked for and allowed."""
    scoped = _SCOPED.search(text)
    allocation = _ALLOCATION.search(text)
    if scoped and "memory space vmem" in text:
        # A number and its unit each: 15.2 and M are 15.2 * 1024**2 bytes.
        sizes = [float(scoped[n]) * 1024 ** " KMG".index(scoped[n + 1] or " ") for n in (1, 3)]
    elif allocation:
        sizes = [float(size) for size in allocation.groups()]
    else:
        fact = f"The compiler for {machine.name} refuses it: {' '.join(text.split())[:300]}"
        return TopologyError(place, fact, "Change the kernel or its tile")
    asked, limit = (round(size) for size in sizes)
    fact = f"The tile takes {size_text(asked)} of VMEM on {machine.name}, and the limit is {size_text(limit)}"
    vmem = machine.chip.vmem if machine.chip else 0
    more = f", or raise vmem_limit_bytes: a core has {size_text(vmem)}" if limit < vmem else ""
    return VmemError(place, fact, f"Take a smaller tile{more}", asked=asked, limit=limit)


OVERHEAD = 40
"""Bundles that tell loops apart: the compiler's loops have 7 to 33, a kernel's 50 or more (libtpu 0.0.51)."""


@dataclasses.dataclass(frozen=True)
class Trips:
    """How often the parts of a kernel run on one core."""

    #: The iterations of each loop, each time it is entered, in the order in which the loops begin.
    loops: tuple[int, ...]
    #: In how many steps a predicated region without matrix work runs once, if a region next to it has matrix work.
    once_in: int = 1


def pass_seconds(call: dispatch.Pass, machine: Machine) -> float:
    """Compiles a kernel, and returns its modelled seconds: by its schedule, or by its memory traffic if longer."""
    chip = machine.require_tpu()
    kernel = compile_kernel(call.build, dict(call.arguments), machine)
    loops = (math.ceil(call.loops[0] / chip.cores), *call.loops[1:])  # cores share the grid's steps
    count = executed(kernel, Trips(tuple(passes for passes in loops if passes > 1)))  # the compiler unrolls others
    return max(count / chip.clock, call.bytes / chip.bandwidth)


def executed(kernel: KernelBundles, trips: Trips, slot: str | None = None) -> int:
    """Returns how many bundles one core runs in a call of a kernel; with `slot`, how many uses of that slot.

    A schedule says how many bundles each loop's body has, not how often it runs: that is in `trips`. The rules:

    * The n-th loop of the kernel runs as often as the n-th number of `Trips.loops`. A loop that the compiler knows to
      run once is no loop in the schedule, and must not be in `Trips.loops`.
    * Loops without matrix work are the compiler's if they have fewer than `OVERHEAD` bundles, or lie in a predicated
      region that has none either: they start a copy in pieces. They count once.
    * A predicated region counts as if it always ran. The exception is one without matrix work next to one with it: it
      is for the first or the last step, and runs once in `Trips.once_in` steps.

    So the count is rather too high than too low. Not in it: waiting for memory or matrix units, XLA's other programs.
    """
    loops = _loops(kernel)
    if len(loops) != len(trips.loops):
        raise TopologyError(
            f"bundles of {kernel.kernel}",
            f"It has {len(loops)} loops, and the passes of {len(trips.loops)} are known {trips.loops}",
            "The rule must follow the kernel: mend torchport/plan/tpu/bundles.py",
        )
    weights = numpy.ones(kernel.size, numpy.int64)
    if slot is not None:
        weights = kernel.counts[:, list(kernel.slots).index(slot)]
    passes, work = dict(zip(loops, trips.loops, strict=True)), kernel.matrix_work

    def count(region: Region, times: int) -> int:
        """Returns the sum of the weights of a region's bundles in all their runs, if code around it runs `times`."""
        times *= passes.get(region, 1)
        busy = [bool(work[part.start : part.end].any()) for part in region.inside]
        total, at = 0, region.start
        for part, works in zip(region.inside, busy, strict=True):
            rare = part.kind == "predicated" and not works and any(busy)  # for the first or the last step
            total += times * int(weights[at : part.start].sum())
            total += count(part, times // trips.once_in if rare else times)
            at = part.end
        return total + times * int(weights[at : region.end].sum())

    return count(kernel.root, times=1)


def _loops(kernel: KernelBundles) -> list[Region]:
    """Returns the loops of the kernel's code, without loops of the compiler, in the order in which they begin."""
    work, loops = kernel.matrix_work, list[Region]()

    def visit(region: Region) -> None:
        busy = work[region.start : region.end].any()
        if region.kind == "predicated" and not busy and work.any():  # a kernel of sums has no matrix work anywhere
            return
        if region.kind == "loop" and (busy or region.end - region.start >= OVERHEAD):
            loops.append(region)
        for part in region.inside:
            visit(part)

    visit(kernel.root)
    return loops
