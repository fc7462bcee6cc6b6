"""Recomputes a plan's figures of a block from the compiler's dump, without torchport: a second reading of one text.

    torchport plan --model hunyuan --config configs/720p.yaml --keep DIR
    python benchmarks/plan_dump.py DIR [--json]

Prints, for each program whose blocks run in a loop, what this reading and the plan have for `per_block.other_ms` and
for the collectives' bytes on each device, and their ratio. The rules, in full: a block is the body of the loop that
calls a `tpu_custom_call`, of several the one with most cycles. Its other work is the sum of `estimated_cycles` in that
computation and in those that it calls, less those of instructions that are such a call or hold one, over the chip's
clock; and of each kernel beside attention the calls that are counted here, times the milliseconds that the plan has for
one, since the dump has no estimate for a kernel. Its collectives are the instructions of these kinds in it, alone or in
a fusion, each with the bytes of its output, times the loop's trips.
"""

import argparse
import json
import math
import re
import sys
from pathlib import Path

CLOCKS = {"v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.755e9, "tpu7x": 2.2e9}
"""Cycles a second of a core. Source: libtpu 0.0.51's target_arguments; torchport.config.machine has the same."""
KINDS = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute", "ragged-all-to-all")
KIND = re.compile(rf" ({'|'.join(KINDS)})(-start)?\(")
CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|branch_computations)=(\{[^}]*\}|%[\w.-]+)")
KERNEL = 'custom_call_target="tpu_custom_call"'


def calls(parts: dict[str, list[str]], name: str, kernel: str) -> int:
    """Returns how many times a computation calls a kernel, itself."""
    return sum(bool(re.match(rf"\s*(ROOT )?%{re.escape(kernel)}(\.\d+)? = ", line)) for line in parts[name])


def computations(text: str) -> dict[str, list[str]]:
    """Returns the lines of instructions of each computation, by its name."""
    found, name = {}, None
    for line in text.splitlines():
        if start := re.match(r"(?:ENTRY )?%([\w.-]+) \(.*\{$", line):
            name = start[1]
            found[name] = []
        elif line.startswith("}"):
            name = None
        elif name is not None:
            found[name].append(line)
    return found


def called(line: str) -> list[str]:
    """Returns the computations that an instruction names."""
    return [name for part in CALLED.findall(line) for name in re.findall(r"%([\w.-]+)", part)]


def holds(parts: dict[str, list[str]], line: str, what: str) -> bool:
    """Returns whether an instruction, or a computation that it names, has this in its text."""
    return what in line or any(holds(parts, inner, what) for name in called(line) for inner in parts[name])


def cycles(parts: dict[str, list[str]], name: str) -> int:
    """Returns the estimated cycles of a computation, without kernels and what runs beside the core."""
    total = 0
    for line in parts[name]:
        estimate = re.search(r'"estimated_cycles":"(\d+)"', line)
        if re.search(r" (while|call)\(", line):
            total += sum(cycles(parts, inner) for inner in called(line)) * trips(parts, line)
        elif estimate and int(estimate[1]) < 2**63 - 1 and not holds(parts, line, KERNEL):
            total += int(estimate[1])
    return total


def trips(parts: dict[str, list[str]], line: str) -> int:
    """Returns how often a loop runs: as written, or the one integer that its condition compares with."""
    if " while(" not in line:
        return 1
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', line):
        return int(known[1])
    condition = re.search(r"condition=%([\w.-]+)", line)[1]
    limits = {number for inner in parts[condition] for number in re.findall(r"s32\[\]\S* constant\((\d+)\)", inner)}
    if len(limits) != 1:
        raise SystemExit(f"The loop with the condition %{condition} counts to {sorted(limits) or 'nothing known'}")
    return int(limits.pop())


def size(shape: str) -> int:
    """Returns the bytes of the arrays in a shape's text."""
    arrays = re.findall(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]", shape)
    return sum(
        math.ceil(math.prod(int(side) for side in sides.split(",") if side) * int(bits or 8) / 8)
        for _, bits, sides in arrays
    )


def moved(parts: dict[str, list[str]], name: str) -> list[int]:
    """Returns the bytes of output of each exchange in a computation; of one that fusions carry on, once."""
    found, chains = [], set()
    for line in parts[name]:
        fused = [inner for part in called(line) for inner in parts[part]] if " fusion(" in line else []
        nested = [inner for one in fused if " fusion(" in one for part in called(one) for inner in parts[part]]
        exchange = next((one for one in (line, *fused, *nested) if KIND.search(one)), None)
        if exchange is None:
            continue
        chain = re.search(r'\bchain_id="([^"]*)"', exchange)
        if chain and chain[1] in chains:
            continue
        chains |= {chain[1]} if chain else set()
        root = next((one for one in fused if one.lstrip().startswith("ROOT")), "")
        found.append(output(line if " dynamic-slice(" in root else exchange))
    return found


def output(line: str) -> int:
    """Returns the bytes of what an instruction gives; of one that only starts, of what it will give."""
    shape = line.split(" = ", 1)[1]
    kind = KIND.search(shape) or re.search(r" fusion\(", shape)
    shape = shape[: kind.start()]
    if kind.lastindex == 2 and kind[2] and kind[1] != "all-reduce":
        bare = re.sub(r"\{[^}]*\}", "", shape)  # without layouts, in which there are parentheses
        return size(re.match(r"\((?:\([^)]*\)|[^ ]+), (\([^)]*\)|[^ ]+)", bare)[1])
    return size(shape)


def block(text: str, clock: float, kernels: dict[str, float]) -> dict[str, float] | None:
    """Returns what this reading has of a program's blocks, or None where no loop has a kernel."""
    parts = computations(text)
    loops = [
        (cycles(parts, body), body, trips(parts, line))
        for lines in parts.values()
        for line in lines
        if " while(" in line
        for body in re.findall(r"body=%([\w.-]+)", line)
        if any(holds(parts, inner, KERNEL) for inner in parts[body])
    ]
    if not loops:
        return None
    spent, body, count = max(loops)
    sizes = moved(parts, body)
    beside = sum(calls(parts, body, kernel) * ms for kernel, ms in kernels.items())
    return {
        "other_ms": 1e3 * spent / clock + beside,
        "bytes": sum(sizes),
        "bytes_of_all": sum(sizes) * count,
        "count": count,
    }


def compared(folder: Path) -> list[dict[str, object]]:
    """Returns, for each program of a plan with blocks in a loop, both readings and their ratio."""
    plan = json.loads((folder / "plan.json").read_text())
    clock, rows = CLOCKS[plan["machine"].partition(":")[0]], []
    for name, stage in plan["stages"].items():
        for program in stage.get("programs", []):
            if program["dump"] is None or program["per_block"] is None:
                continue
            kernels = {one["kernel"]: one["ms"] for one in program["per_block"]["kernels"]}
            own = block((folder / program["dump"]).read_text(errors="replace"), clock, kernels)
            if own is None:
                raise SystemExit(f"{folder / program['dump']}: no loop there calls a kernel, and the plan has blocks")
            said = program["per_block"]
            sent = sum(one["bytes"] * one["count"] for one in said["collectives"])
            theirs = {"other_ms": said["other_ms"], "bytes": sent, "bytes_of_all": sent * said["count"]}
            rows += [
                {
                    "stage": name,
                    "figure": key,
                    "here": own[key],
                    "plan": value,
                    "ratio": own[key] / value if value else 1.0,
                }
                for key, value in theirs.items()
            ]
    return rows


def main() -> None:
    """Prints both readings side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="what --keep named")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    rows = compared(arguments.folder)
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'stage':9}{'figure of a block':22}{'this reading':>18}{'the plan':>18}{'ratio':>9}")
    for row in rows:
        print(f"{row['stage']:9}{row['figure']:22}{row['here']:18,.6g}{row['plan']:18,.6g}{row['ratio']:9.5f}")
    if not rows:
        sys.exit("No program of this plan has blocks in a loop")


if __name__ == "__main__":
    main()
