"""`torchport plan`: does this job trace, shard and fit on that slice, and how fast should it be; no TPU is needed.

What the compiler says is exact: bytes per device, collectives, its own estimate of cycles for all but the kernels. The
rest is a model, printed as one: attention from its share of peak by static schedule, communication from bytes and
links, one after the other. All but attention is divided by the one factor of `calibration`.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torchport.attention import tiles, transposed
from torchport.attention.dispatch import HEAD_AXES, KERNELS
from torchport.config.machine import Chip, Machine, chip
from torchport.errors import BadValueError
from torchport.files import atomic
from torchport.plan import aot, calibration
from torchport.plan.collectives import exchanges
from torchport.save.manifest import versions
from torchport.shard import grid
from torchport.stages.family import Stage
from torchport.task import Request, Task, accept
from torchport.tpu import cost, hlo

SECOND_ARRAY = 1.025
"""How much longer attention takes with a text's keys in an array of their own, taken in pieces: by the kernel's
schedule for 111,600 and 1,256 keys on v6e, 45.7 ms against 44.6."""
PARTS = ("attention_s", "other_s", "communication_s", "uncalibrated_s", "model_s")
"""Of the model of a step, their sum, and that with all but attention divided by the factor of the calibration."""


def plan(
    request: Request,
    topology_name: str | None,
    keep: Path | None = None,
    bounded: bool = True,
    *,
    stages: Sequence[str] = ("denoise",),
) -> dict[str, Any]:
    """Returns the plan of a job, as `--json` prints it.

    Args:
        request: Model, config and overrides.
        topology_name: A TPU slice in place of the config's machine.
        keep: A folder for the compiler's dump, from which every figure can be computed again, and `plan.json`.
        bounded: Whether the norms' gains keep scores within the bounds that the card names; no weights are read.
        stages: Those to compile, each in a process of its own, one after the other: a compiler takes gigabytes.

    Raises:
        BadValueError: The machine is no TPU, or nothing of a stage is compiled.
        TopologyError: No libtpu, no such slice, or a program that the compiler refuses.
        OutputError: The folder has a dump already, or cannot be written.
        TorchportError: Whatever the job is refused for; see `task.accept`.
    """
    overrides = request.overrides if topology_name is None else (*request.overrides, f"machine={topology_name}")
    task = accept(dataclasses.replace(request, stage="denoise", overrides=overrides))
    if task.machine.platform != "tpu":
        place = f"machine {task.machine.name}"
        raise BadValueError(place, "It is no TPU, and a plan is for one", "Name a slice with --topology v6e:2x4")
    ported = [stage.name for stage in task.family.STAGES if stage.network is not None]
    for name in stages:
        if name not in ported:
            fact = "Nothing of it is compiled: it runs on the host, in PyTorch"
            raise BadValueError(f"--stage {name}", fact, f"Name one of {', '.join(ported)}, or all")
    with tempfile.TemporaryDirectory(prefix="torchport-plan-") as scratch:
        folder = Path(scratch) if keep is None else keep
        planned = {name: _planned(task, name, folder / name, bounded) for name in stages}
    found = {
        "model": task.card.model,
        "machine": task.machine.name,
        "strategy": task.job.strategy,
        "mesh": dict(task.job.mesh),
        "fits": all(stage["fits"] for stage in planned.values()),
        "versions": versions(),
        "assumptions": [calibration.said(calibration.shipped(), versions()), *_assumptions(task, bounded)],
        "stages": {stage.name: planned.get(stage.name, _left_out(stage)) for stage in task.family.STAGES},
    }
    if keep is not None:
        atomic.write_json(keep / "plan.json", found)
    return found


def _left_out(stage: Stage) -> dict[str, Any]:
    """Returns what is said of a stage that is not compiled."""
    if stage.network is None:
        return {"status": "not_ported", "why": "It runs on the host, in PyTorch: nothing of it is compiled"}
    return {"status": "not_asked", "why": f"Add --stage {stage.name}, or --stage all"}


def _planned(task: Task, name: str, folder: Path, bounded: bool) -> dict[str, Any]:
    """Compiles a stage's programs, and returns what is known of each and of all together."""
    programs = []
    for result in aot.apart(task, name, folder, bounded):
        file = folder / (result["dump"] or "")  # of the folder `hlo` says what is there in its stead
        known = _stage(task, result, hlo.read(file)) if "bytes" in result else _unfit(task, result)
        shared = {"inputs": result["inputs"], "times": result["times"]}
        dump = None if result["dump"] is None else f"{name}/{result['dump']}"
        programs.append(shared | known | {"dump": dump})
    [stage] = (stage for stage in task.family.STAGES if stage.name == name)
    shown, network = task.manifest_settings(stage), str(stage.network)
    numbers = {key: {network: shown[key][network]} for key in ("dtypes", "precision")}
    # What is counted once for each call becomes what one denoising step takes, or one whole decode.
    return together(programs, task.settings.steps if name == "denoise" else 1) | numbers


def together(programs: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """Returns a stage's figures from those of its programs: bytes of the largest, sums of the rest.

    Args:
        programs: One for each set of shapes, with `times`, how often the stage calls it.
        steps: How many steps these calls make.
    """
    first = max(programs, key=lambda program: (not program["fits"], program["per_device"]["peak_bytes"] or 0))
    longest = max(programs, key=lambda program: program["step"]["flops"] * program["times"])
    alone = len(programs) == 1 and programs[0]["times"] == steps
    stage = {key: value for key, value in longest.items() if key not in ("inputs", "times", "dump")}
    largest = [{**one, "ms": one["ms"] * p["times"] / steps} for p in programs for one in p["largest"]]
    return stage | {
        "fits": all(program["fits"] for program in programs),
        "per_device": first["per_device"],
        "per_block": longest["per_block"] if alone else None,
        "per_step": longest["per_step"] if alone else _collected(programs, steps),
        "step": longest["step"] if alone else _sum_of_steps(programs, steps),
        "steps": steps,
        "largest": longest["largest"] if alone else sorted(largest, key=lambda one: -one["ms"])[:10],
        "findings": [finding for program in programs for finding in program["findings"]],
        "not_modelled": list(dict.fromkeys(said for program in programs for said in program["not_modelled"])),
        "programs": list(programs),
        "trace_s": sum(program["trace_s"] for program in programs),
        "compile_s": sum(program["compile_s"] for program in programs),
    }


def _collected(programs: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """Returns the collectives of all calls, a step."""
    found = [
        {**one, "count": one["count"] * program["times"] / steps}
        for program in programs
        for one in (program["per_step"]["collectives"] if program["per_step"] else ())
    ]
    times = [(p["per_step"] or {"communication_ms": None})["communication_ms"] for p in programs]
    spent = None if None in times else sum(ms * p["times"] / steps for ms, p in zip(times, programs, strict=True))
    return {"communication_ms": spent, "collectives": found}


def _sum_of_steps(programs: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """Returns the seconds and the arithmetic of all calls, a step; None for what is not known of one of them."""
    total: dict[str, Any] = {}
    for key in programs[0]["step"]:
        parts = [program["step"].get(key) for program in programs]
        known = None not in parts
        total[key] = sum(part * p["times"] for part, p in zip(parts, programs, strict=True)) / steps if known else None
    return total


def _assumptions(task: Task, bounded: bool) -> list[str]:
    said = "the norms' gains keep the scores '{}' within their bound" if bounded else "no bound of the scores '{}'"
    known = [said.format(name) for name in task.card.score_bounds]
    return [*known, "every token is valid", "nothing overlaps"]


def _unfit(task: Task, result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what is known of a program that does not fit: there is none."""
    machine, kind = task.machine, chip(task.machine)
    assert kind is not None
    memory = result.get("exceeds", {"asked": None, "limit": kind.memory})
    known = {
        "kernel": None,
        "tile": None,
        "asked": memory["asked"],
        "limit": memory["limit"],
        "fact": "Too large for HBM",
    }
    finding = {"what": "vmem" if "vmem" in result else "hbm", **known, **result.get("vmem", {})}
    asked = {"arguments_bytes": None, "temporaries_bytes": None, "peak_bytes": memory["asked"], "constants_bytes": None}
    floor = result["flops"] / (kind.flops * machine.devices)
    return {
        "status": "ok",
        "fits": False,
        "per_device": {**asked, "hbm_bytes": memory["limit"]},
        "per_block": None,
        "per_step": None,
        "step": {**dict.fromkeys(PARTS), "floor_s": floor, "flops": result["flops"]},
        "attention": None,
        "largest": [],
        "findings": [{(f"{key}_bytes" if key in ("asked", "limit") else key): value for key, value in finding.items()}],
        "not_modelled": [],
        "trace_s": result["trace_s"],
        "compile_s": result["compile_s"],
    }


def _stage(task: Task, result: Mapping[str, Any], program: hlo.Program) -> dict[str, Any]:
    """Returns what is known of a program."""
    machine, kind = task.machine, chip(task.machine)
    assert kind is not None
    sizes = result["bytes"]
    peak = sizes["argument"] + sizes["temp"] + sizes["output"] + sizes["generated_code"] - sizes["alias"]
    calls, loop = [_attention(task, call, kind) for call in result["attention"]], _loop(program)
    attention = max(calls, key=lambda call: call["flops_per_device"], default=None)
    passes = {one["kernel"]: cost.pass_seconds(one, machine) for one in result["passes"]}
    where = grid.read(result["spots"])
    block = _block(program, attention, passes, machine, kind, where)
    step = _step(program, block, calls, passes, result["flops"], machine, kind, where)
    return {
        "status": "ok",
        "fits": peak <= kind.memory,
        "per_device": {
            "arguments_bytes": sizes["argument"],
            "temporaries_bytes": sizes["temp"],
            "peak_bytes": peak,
            "constants_bytes": program.constants(),
            "hbm_bytes": kind.memory,
        },
        "per_block": block,
        "per_step": _per_step(program, machine, where),
        "step": step,
        "attention": attention,
        "largest": _largest(program, passes, None if loop is None else loop.body, kind),
        "findings": [],
        "not_modelled": _not_modelled(program, calls, loop),
        "trace_s": result["trace_s"],
        "compile_s": result["compile_s"],
    }


def _loop(program: hlo.Program) -> hlo.Loop | None:
    """Returns the loop over blocks: of those with a kernel, the one that takes longest."""
    loops = [loop for loop in program.loop_bodies() if program.kernels(loop.body)]
    return max(loops, key=lambda loop: loop.cycles, default=None)


def _largest(program: hlo.Program, passes: Mapping[str, float], of: str | None, kind: Chip) -> list[dict[str, Any]]:
    """Returns what takes longest of a computation, attention and collectives apart."""
    own = [(1e3 * times * passes[k], "kernel", k) for k, times in program.kernels(of).items() if k in passes]
    compiled = [
        (_ms(one.cycles, kind), one.instruction.opcode, str(one.instruction.source or ""))
        for one in program.largest(10, of)
    ]
    ordered = sorted([*own, *compiled], key=lambda one: -one[0])[:10]
    return [dict(zip(("ms", "opcode", "source"), one, strict=True)) for one in ordered]


def _attention(task: Task, call: Mapping[str, Any], kind: Chip) -> dict[str, Any]:
    """Returns a call of attention with its share of peak by static schedule, and what follows from it."""
    name = task.machine.name.partition(":")[0]
    split = math.prod(task.job.mesh.values())
    flops = 4 * call["batch"] * call["heads"] * call["queries"] * call["keys"] * call["head_size"] // split
    found: dict[str, Any] = {**call, "flops_per_device": flops, "steady_percent": None, "peak_percent": None}
    implementation: Literal["splash_transposed", "splash"]
    if call["implementation"] in ("splash_transposed", "splash"):
        implementation = call["implementation"]
        own = call["heads"] // math.prod(task.job.mesh.get(axis, 1) for axis in HEAD_AXES)
        _, size = transposed.grouping(max(own, 1), call["head_size"])
        row = tiles.row(name, implementation, size, call["bounded"])
        # Features are padded to what the row is for, and padding is no useful arithmetic.
        useful = call["head_size"] / size
        share = useful * row.peak_percent / (SECOND_ARRAY if call["arrays"] > 1 else 1)
        found |= {"steady_percent": useful * row.steady_percent, "peak_percent": share, "row_tokens": row.tokens}
        found["ms"] = 1e3 * flops / (kind.flops * share / 100)
    return found


def _block(
    program: hlo.Program,
    attention: Mapping[str, Any] | None,
    passes: Mapping[str, float],
    machine: Machine,
    kind: Chip,
    where: Sequence[grid.Spot],
) -> dict[str, Any] | None:
    """Returns what one block costs, if blocks run in a loop; unrolled ones cannot be told apart."""
    loop = _loop(program)
    if loop is None:
        return None
    name = machine.name.partition(":")[0]
    found = exchanges(program, loop.body, where)
    return {
        "count": loop.trips,
        "other_ms": _ms(loop.cycles, kind) + 1e3 * _in_passes(program, passes, loop.body),
        "kernels": [
            {"kernel": name, "count": times, "ms": 1e3 * passes[name]}
            for name, times in program.kernels(loop.body).items()
            if name in passes
        ],
        "attention_ms": attention.get("ms") if attention else None,
        "communication_ms": 1e3 * sum(one.seconds(name) for one in found),
        "collectives": [dataclasses.asdict(one) for one in found],
    }


def _per_step(program: hlo.Program, machine: Machine, where: Sequence[grid.Spot]) -> dict[str, Any]:
    """Returns the exchanges between devices of one run of the program."""
    found, name = exchanges(program, None, where), machine.name.partition(":")[0]
    spent = 1e3 * sum(one.seconds(name) for one in found)
    return {"communication_ms": spent, "collectives": [dataclasses.asdict(one) for one in found]}


def _not_modelled(program: hlo.Program, calls: list[dict[str, Any]], loop: hlo.Loop | None) -> list[str]:
    """Returns what takes time and is in no part of the model."""
    said, unpriced = [], program.unpriced()
    if unpriced:
        size = sum(one.instruction.bytes * one.times for one in unpriced)
        said.append(
            f"{len(unpriced)} operation(s) without an estimate of the compiler's, {size / 1e6:.3g} MB of output"
        )
    for call in calls:
        if "ms" in call and (call["dtype"] != "bfloat16" or 4 * call["keys"] < call["row_tokens"]):
            here = f"{call['keys']:,} keys in {call['dtype']}"
            said.append(f"attention's own share of peak: {here} have that of {call['row_tokens']:,} in bfloat16")
    if loop is None and any(call["implementation"] not in KERNELS for call in calls):
        said.append("attention on its own: it is plain XLA here, and its cycles are among the other operations'")
    return list(dict.fromkeys(said))


def _step(
    program: hlo.Program,
    block: Mapping[str, Any] | None,
    calls: Sequence[Mapping[str, Any]],
    passes: Mapping[str, float],
    flops: int,
    machine: Machine,
    kind: Chip,
    where: Sequence[grid.Spot],
) -> dict[str, Any]:
    """Returns the model of one denoising step, in seconds, with its parts; and the floor from arithmetic alone."""
    name = machine.name.partition(":")[0]
    # Attention that is no kernel is XLA's, and in its estimate. Stacked blocks are traced once: theirs is the largest.
    spent = sorted(call["ms"] for call in calls if "ms" in call)
    kernel = (sum(spent) + (block["count"] - 1 if block and spent else 0) * max(spent, default=0.0)) / 1e3
    other = program.cycles() / kind.clock + _in_passes(program, passes, None)
    moved = sum(one.seconds(name) for one in exchanges(program, None, where))
    return {
        "attention_s": kernel,
        "other_s": other,
        "communication_s": moved,
        "uncalibrated_s": calibration.calibrated(kernel, other + moved, None),
        "model_s": calibration.calibrated(kernel, other + moved, calibration.shipped()),
        "floor_s": flops / (kind.flops * machine.devices),
        "flops": flops,
    }


def _in_passes(program: hlo.Program, passes: Mapping[str, float], of: str | None) -> float:
    """Returns the seconds of a computation's kernels beside attention."""
    return sum(times * passes.get(kernel, 0.0) for kernel, times in program.kernels(of).items())


def _ms(cycles: int, kind: Chip) -> float:
    return 1e3 * cycles / kind.clock
